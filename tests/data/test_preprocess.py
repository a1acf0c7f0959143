"""The program: what it writes, that it does not depend on how it is run, and what it leaves when it fails."""

import concurrent.futures
import gzip
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import preprocess
from nanomegatron.config.settings import DataConfig
from nanomegatron.data import reading
from nanomegatron.data import text as data_text
from nanomegatron.data.gpt_dataset import build_datasets, split_ranges
from nanomegatron.data.indexed_dataset import IndexedDataset
from nanomegatron.data.tokenizer import build_tokenizer, tokenizer_from_spec

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["first document", "", "second \u00e9\U0001f917\x00 one\r\n", "third " * 50]


def jsonl(path, texts, key="text"):
    path.write_bytes(b"".join(json.dumps({key: text}).encode() + b"\n" for text in texts))
    return str(path)


def run(*arguments):
    return preprocess.main([str(a) for a in arguments])


def read(prefix, key="text"):
    return IndexedDataset(f"{prefix}_{key}_document")


def decoded(prefix, key="text"):
    data, tokenizer = read(prefix, key), build_tokenizer("ByteTokenizer")
    return [tokenizer.decode(data[i]) for i in range(len(data))]


BYTES = ("--tokenizer-type", "ByteTokenizer")


def test_a_finished_data_set_is_kept(tmp_path, capsys):
    """One of the keys is enough; --overwrite replaces them."""
    words = ["--output-prefix", tmp_path / "x", *BYTES, "--input"]
    assert run(*words, jsonl(tmp_path / "a.jsonl", ["old"])) == 0
    before, other = (tmp_path / "x_text_document.bin").read_bytes(), jsonl(tmp_path / "b.jsonl", ["newer"])
    for more in [], ["--resume"], ["--json-keys", "text", "title"]:
        assert run(*words, other, *more) == 2
        rule = "x_text_document.idx: a finished data set; give another --output-prefix, or --overwrite"
        assert rule in capsys.readouterr().err
    assert (tmp_path / "x_text_document.bin").read_bytes() == before
    assert run(*words, other, "--overwrite") == 0 and decoded(tmp_path / "x") == ["newer"]


def test_same_files_as_megatron(tmp_path):
    """Its builder, fed as its preprocess_data.py does: an empty document is a bound and nothing else."""
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    assert (
        run(
            "--input",
            jsonl(tmp_path / "in.jsonl", TEXTS),
            "--output-prefix",
            tmp_path / "x",
            *BYTES,
            "--append-eod",
        )
        == 0
    )
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "y.bin"), dtype=np.uint16)
    for text in TEXTS:
        ids = [*text.encode(), 256] if text else []
        builder.add_document(np.array(ids), [len(ids)] if ids else [])
    builder.finalize(str(tmp_path / "y.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"x_text_document{suffix}").read_bytes() == (tmp_path / f"y{suffix}").read_bytes()


def test_sidecar(tmp_path):
    run(
        "--input",
        jsonl(tmp_path / "in.jsonl", TEXTS),
        "--output-prefix",
        tmp_path / "x",
        *BYTES,
        "--append-eod",
    )
    sidecar, size = read(tmp_path / "x").sidecar(), sum(len(t.encode()) for t in TEXTS)
    tokenizer = tokenizer_from_spec(sidecar["tokenizer"])
    assert tokenizer.fingerprint == sidecar["fingerprint"]
    assert (sidecar["documents"], sidecar["empty_documents"], sidecar["max_token"]) == (4, 1, 256)
    assert (sidecar["text_bytes"], sidecar["tokens"]) == (size, size + 3)


@pytest.mark.parametrize("split, each", [("90,10,0", 10), ("969,30,1", 700), ("1", 10)])
def test_bytes_of_a_split(split, each, tmp_path):
    """Documents of a byte a token, then of nearly two, three, and in the last tenth four; an empty one."""
    texts = ["8", "8", "", *["8"] * (7 * each - 2)]
    texts += [" ".join([number] * 20) for number in ("7", "70", "107") for _ in range(each)]
    more = ("--output-prefix", tmp_path / "x", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127")
    run("--input", jsonl(tmp_path / "in.jsonl", texts), *more)
    tokenizer, full = build_tokenizer("NullTokenizer", vocab_size=127), [text for text in texts if text]

    def found():
        data = DataConfig(data_path=(str(tmp_path / "x_text_document"),), split=split, seq_length=8)
        made = build_datasets(data, (1, 1, 1), 0, tokenizer)
        return [dataset and dataset.bytes_per_token() for dataset in made]

    expected = []
    for part in split_ranges(split, len(full)):
        mine = full[slice(*part)] if part else []
        tokens = sum(len(text.split()) for text in mine)
        expected.append(pytest.approx(sum(map(len, mine)) / tokens, rel=1e-9) if mine else None)
    assert found() == expected

    path = tmp_path / "x_text_document.json"
    sidecar = json.loads(path.read_text())
    del sidecar["text_bytes_before"]  # only the bytes of the whole file are known
    path.write_text(json.dumps(sidecar))
    assert found() == (expected if split == "1" else [None] * 3)


def test_every_kind_of_input(tmp_path):
    """JSON Lines with BOM, CRLF and blank lines, gzip, plain text; globs in order of name; two keys."""
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "one", "title": "1"}\r\n\n  \n{"title": "2", "text": "two"}'
    )
    with gzip.open(tmp_path / "b.json.gz", "wb") as file:
        file.write(b'{"text": "three", "title": "3"}\n')
    assert (
        run(
            "--input",
            tmp_path / "[ab].js*",
            "--output-prefix",
            tmp_path / "x",
            *BYTES,
            "--json-keys",
            "text",
            "title",
        )
        == 0
    )
    assert decoded(tmp_path / "x") == ["one", "two", "three"]
    assert decoded(tmp_path / "x", "title") == ["1", "2", "3"]
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfplain\r\ntext\n")
    with gzip.open(tmp_path / "d.txt.gz", "wb") as file:
        file.write(b"more")
    assert (
        run("--input", tmp_path / "d.txt.gz", tmp_path / "c.txt", "--output-prefix", tmp_path / "y", *BYTES)
        == 0
    )
    assert decoded(tmp_path / "y") == ["more", "plain\r\ntext\n"]


def test_result_does_not_depend_on_workers(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "in.jsonl", [f"document {i} " * (i % 37) for i in range(3000)])
    monkeypatch.setattr(reading, "CHUNK_BYTES", 9000)
    for workers in (1, 2):
        arguments = (
            "--output-prefix",
            tmp_path / f"w{workers}",
            *BYTES,
            "--append-eod",
            "--workers",
            workers,
        )
        assert run("--input", source, *arguments) == 0
    for suffix in (".bin", ".idx", ".json"):
        one, two = ((tmp_path / f"w{w}_text_document{suffix}").read_bytes() for w in (1, 2))
        assert one == two
    assert len(read(tmp_path / "w1").document_indices) == 3001


def test_input_is_read_a_few_chunks_ahead(monkeypatch):
    """Bounded memory: the reader never runs away from slow workers."""
    ahead, taken = [], 0

    def inputs():
        nonlocal taken
        for i in range(60):
            taken += 1
            yield i

    for done, value in enumerate(data_text.in_order(abs, inputs(), 2)):
        assert value == done
        ahead.append(taken - done)
    assert done == 59 and max(ahead) <= 2 * 2 * data_text.CHUNKS_PER_WORKER + 1


@pytest.mark.parametrize(
    "line, reason, workers",
    [
        (b'{"text": "a"', "Expecting ',' delimiter", 1),
        (b'["text"]', "a JSON list, not an object", 1),
        (b'["text"]', "a JSON list, not an object", 2),
        (b'{"other": "a", "b": 1}', "no string under 'text'; the keys are other, b", 1),
        (b'{"text": 5}', "no string under 'text'", 1),
        (b'{"text": "\xff"}', "can't decode byte 0xff", 1),
        (b'{"text": "a\x00"}', "Invalid control character", 1),
        (b'{"text": "\\ud800"}', "surrogates not allowed", 1),
        (b"[" * 100_000, "recursion", 1),
    ],
)
def test_a_bad_line_stops_it(tmp_path, capsys, line, reason, workers):
    good = json.dumps({"text": "good"}).encode() + b"\n"
    path = tmp_path / "in.jsonl"
    path.write_bytes(good * 41 + line + b"\n" + good)
    assert run("--input", path, "--output-prefix", tmp_path / "x", *BYTES, "--workers", workers) == 2
    assert f"nanomegatron preprocess: {path}:42: " in (error := capsys.readouterr().err)
    assert reason in error and len(error.strip().splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "nothing to do: give --input FILE"),
        (["--input", "gone.jsonl"], "--output-prefix is missing"),
        (["--input", "gone.jsonl", "--output-prefix", "x"], "--tokenizer-type is missing"),
        (["--input", "gone.jsonl", "--output-prefix", "x", *BYTES], "--input gone.jsonl: no such file"),
        (["--input", "a.csv", "--output-prefix", "x", *BYTES], "must end in .jsonl, .json or .txt"),
        (["--input", "a.txt", "--output-prefix", "x", *BYTES, "--json-keys", "t"], "only the key text"),
        (["--input", "a.jsonl", "--output-prefix", "x", *BYTES, "--workers", "0"], "--workers 0"),
        (["--input", "empty.jsonl", "--output-prefix", "x", *BYTES], "2 documents without a token"),
        (["--input", "cut.jsonl.gz", "--output-prefix", "x", *BYTES], "cut.jsonl.gz: damaged behind line 0"),
        (
            ["--input", "a.jsonl", "--output-prefix", "x", "--tokenizer-type", "NullTokenizer"],
            "needs --vocab-size",
        ),
        (
            ["--input", "a.jsonl", "--output-prefix", "no/such/x", *BYTES],
            "no folder no; mend the path, or mkdir",
        ),
        (["--input", "a.jsonl", "--train-tokenizer", "300", "--output", "no/such/x"], "no folder no; mend"),
        (["--input", "a.jsonl", "--train-tokenizer", "300"], "needs --output FILE"),
        (["--input", "a.jsonl", "--train-tokenizer", "256", "--output", "t"], "257 entries are the least"),
    ],
)
def test_wrong_arguments(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "a.txt"):
        Path(name).write_text("text")
    jsonl(Path("a.jsonl"), ["5"])
    jsonl(Path("empty.jsonl"), ["", ""])
    Path("cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n')[:-6])
    before = sorted(tmp_path.iterdir())
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(sys.platform != "linux", reason="spawned elsewhere")
def test_forked_workers(tmp_path):
    """Without torch and threads workers are forked: the same files."""
    source = jsonl(
        tmp_path / "in.jsonl", [f"the words of document {i} and its end\n" * 50 for i in range(3000)]
    )
    pairs = []
    for workers in ("1", "3"):
        arguments = [
            "--input",
            source,
            "--output-prefix",
            str(tmp_path / workers),
            *BYTES,
            "--workers",
            workers,
        ]
        code = f"""
import multiprocessing, preprocess
get, methods = multiprocessing.get_context, []
multiprocessing.get_context = lambda method=None: methods.append(method) or get(method)
assert preprocess.main({arguments}) == 0
assert methods == ["fork"] * ({workers} > 1), methods
"""
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
        pairs.append(
            [Path(f"{tmp_path / workers}_text_document.{end}").read_bytes() for end in ("bin", "idx")]
        )
    assert pairs[0] == pairs[1]


def test_killed_in_the_middle(tmp_path):
    """Nothing loads, no worker stays behind, and the same command run again succeeds."""
    source = jsonl(tmp_path / "in.jsonl", ["some words to tokenize " * 400] * 4000)
    arguments = ["--input", source, "--output-prefix", str(tmp_path / "x"), *BYTES]
    command = [sys.executable, str(ROOT / "preprocess.py"), *arguments, "--workers", "2"]
    process = subprocess.Popen(command, start_new_session=True)
    unfinished, deadline = tmp_path / "x_text_document.bin.tmp", time.monotonic() + 30
    while not (unfinished.exists() and unfinished.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(ValueError, match="no such file"):
        read(tmp_path / "x")
    assert unfinished.exists()
    while group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group_lives(process.pid)
    jsonl(tmp_path / "in.jsonl", ["short"])
    assert run(*arguments) == 0
    assert decoded(tmp_path / "x") == ["short"] and not unfinished.exists()


def group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    states = [Path(f"/proc/{p}/stat") for p in os.listdir("/proc") if p.isdigit()]
    fields = [s.read_text().rsplit(")", 1)[1].split() for s in states if s.exists()]
    return any(int(f[2]) == group and f[0] != "Z" for f in fields)


def test_progress_of_a_pipe(tmp_path, capsys):
    """Whole lines, no control characters."""
    source = jsonl(tmp_path / "in.jsonl", ["word " * 5000] * 100)
    assert run("--input", source, "--output-prefix", tmp_path / "x", *BYTES, "--log-interval", 20) == 0
    out = capsys.readouterr()
    assert "100 documents (0 empty), 2,500,000 tokens, 1.00 bytes a token" in out.out
    assert len(out.err.splitlines()) >= 3 and "\r" not in out.err and "ETA 0:" in out.err


def test_a_resumed_run_expects_no_end_before_it_has_read(capsys):
    with preprocess.Progress(1000, 1, begin=500) as progress:
        progress.start -= 30  # seconds, for the first hundred of five
        progress.wrote(1, 5, 500)
        progress.wrote(2, 9, 600)
    first, second, _ = capsys.readouterr().err.splitlines()
    assert "50%" in first and "ETA" not in first and "60% | ETA 2:0" in second


def test_a_new_folder_is_made_beside_others(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", ["a"])
    assert run("--input", source, "--output-prefix", tmp_path / "new" / "x", *BYTES) == 0


@pytest.mark.parametrize("workers, packed", [(1, ""), (2, ""), (1, ".gz")])
def test_progress_is_that_of_what_is_written(workers, packed, tmp_path, capsys):
    """The share of the input grows with the documents, and the last line has all of both."""
    source, texts = tmp_path / f"in.jsonl{packed}", [f"{i} " + "word " * 5000 for i in range(175)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    source.write_bytes(gzip.compress(lines, 0) if packed else lines)
    flags = ["--workers", workers, "--log-interval", 15]
    assert run("--input", source, "--output-prefix", tmp_path / "x", *BYTES, *flags) == 0
    shown = [
        re.match(r"([\d,]+) documents, .*\| +(\d+)% \|", line)
        for line in capsys.readouterr().err.splitlines()
    ]
    found = [(int(line[1]), int(line[2])) for line in shown]
    assert len(found) > 5 and found[-1] == (175, 100)
    assert all(abs(documents / 175 - share / 100) < 0.03 for documents, share in found), found


def test_train_tokenizer(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    source = jsonl(tmp_path / "in.jsonl", [Path(preprocess.__file__).read_text()] * 2)
    assert run("--input", source, "--train-tokenizer", 500, "--output", tmp_path / "b" / "bpe") == 0
    assert "bpe: 500 entries with <|endoftext|>" in capsys.readouterr().out
    assert build_tokenizer("TikTokenizer", str(tmp_path / "b" / "bpe")).vocab_size == 500
    assert (
        run(
            "--input",
            jsonl(tmp_path / "s.jsonl", ["ab"]),
            "--train-tokenizer",
            500,
            "--output",
            tmp_path / "c",
        )
        == 0
    )
    assert "258 entries with <|endoftext|>, not 500" in capsys.readouterr().out


@pytest.fixture
def small_stdlib(tmp_path, monkeypatch):
    """120 files that are sources, and some that are none."""
    root = tmp_path / "lib"
    for name in [*(f"pkg/m{i:03}.py" for i in range(120)), "site-packages/x.py", "__pycache__/x.py", "a.txt"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"x = {name!r}\n" * 20)
    (root / "latin.py").write_bytes(b"# \xe9")
    monkeypatch.setattr(preprocess.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return tmp_path / "data"


def test_collect_stdlib(tmp_path, small_stdlib):
    preprocess.collect_stdlib(tmp_path / "t.jsonl", tmp_path / "v.jsonl")
    train, valid = ([json.loads(x) for x in (tmp_path / f).open()] for f in ("t.jsonl", "v.jsonl"))
    assert [d["path"] for d in valid] == ["pkg/m049.py", "pkg/m099.py"]
    assert len(train) == 118 and train[0] == {"path": "pkg/m000.py", "text": "x = 'pkg/m000.py'\n" * 20}


def test_embedded_bytes_then_bpe(small_stdlib, monkeypatch):
    """Without the tokenizers library bytes; with it a BPE; a BPE that is there is used even without."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    plain = preprocess.prepare_embedded(small_stdlib, 300, report=lambda line: None)
    assert (plain.tokenizer_type, plain.tokenizer_model) == ("ByteTokenizer", None)
    assert "pip install tokenizers" in plain.note
    assert len(IndexedDataset(plain.train_prefix)) == 118 and len(IndexedDataset(plain.valid_prefix)) == 2
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(importlib.util, "find_spec", find)
    bpe = preprocess.prepare_embedded(small_stdlib, 300, report=lambda line: None)
    tokenizer = build_tokenizer(bpe.tokenizer_type, bpe.tokenizer_model)
    assert tokenizer.vocab_size <= 300 and bpe.note == ""
    data = IndexedDataset(bpe.valid_prefix)
    assert data.sidecar()["fingerprint"] == tokenizer.fingerprint
    assert tokenizer.decode(data[0]) == "x = 'pkg/m049.py'\n" * 20 + "<|endoftext|>"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    began = time.monotonic()
    assert preprocess.prepare_embedded(small_stdlib, 300) == bpe and time.monotonic() - began < 0.5


def test_embedded_by_several_at_once(small_stdlib):
    """One works; the others find its result."""
    reports = []
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(preprocess.prepare_embedded, small_stdlib, 300, reports.append) for _ in range(3)
        ]
        assert len({call.result() for call in calls}) == 1
    assert len([line for line in reports if "2 documents" in line]) == 1
    assert not multiprocessing.active_children()

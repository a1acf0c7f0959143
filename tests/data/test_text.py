"""What is read: compressed files, bad lines that may be left out, inputs larger than memory should be."""

import json
import subprocess
import sys

import pytest

from nanomegatron.data.indexed_dataset import IndexedDataset
from tests.data.test_preprocess import BYTES, ROOT, decoded, jsonl, read, run

ONE_BY_ONE = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]


def test_zstd(tmp_path, monkeypatch):
    """Several frames in a file are one text; a file cut short is an error, and so is a missing library."""
    library = pytest.importorskip("zstandard")
    frames = [library.compress(json.dumps({"text": f"text {i}" * 9}).encode() + b"\n") for i in range(3)]
    path = tmp_path / "in.jsonl.zst"
    path.write_bytes(b"".join(frames))
    assert run("--input", path, "--output-prefix", tmp_path / "x", *BYTES) == 0
    assert decoded(tmp_path / "x") == [f"text {i}" * 9 for i in range(3)]
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert run("--input", path, "--output-prefix", tmp_path / "y", *BYTES) == 2


def test_damaged_zstd(tmp_path, capsys):
    library = pytest.importorskip("zstandard")
    whole = library.compress(json.dumps({"text": "text " * 99}).encode() + b"\n")
    path = tmp_path / "in.jsonl.zst"
    path.write_bytes(whole[:5] + bytes([whole[5] ^ 255]) + whole[6:])
    assert run("--input", path, "--output-prefix", tmp_path / "x", *BYTES) == 2
    assert f"{path}: damaged behind line 0" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl.zst"]


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_are_left_out_and_told(tmp_path, capsys, workers):
    """As many as allowed, each in PREFIX.skipped with its place; one more leaves nothing that loads."""
    good = [f"{i} {i}" for i in range(90)]
    source = tmp_path / "in.jsonl"
    jsonl(source, good)
    lines = source.read_bytes().splitlines(keepends=True)
    lines[20:20] = [b"no JSON\n"]
    lines[40:40] = [b'{"text": "1 2 x"}\n', b'{"text": "5 100"}\n']
    source.write_bytes(b"".join(lines))
    arguments = ["--input", source, "--output-prefix", tmp_path / "x", *ONE_BY_ONE, "--workers", workers]
    assert run(*arguments, "--skip-bad-lines", 2) == 2
    error = capsys.readouterr().err
    assert f"{source}:42: id 100 is outside 0..99" in error and "--skip-bad-lines" in error
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]
    assert run(*arguments, "--skip-bad-lines", 3) == 0
    skipped = (tmp_path / "x.skipped").read_text().splitlines()
    assert [line.split(": ")[0] for line in skipped] == [f"{source}:{n}" for n in (21, 41, 42)]
    assert "x.skipped: 3 lines left out" in capsys.readouterr().out
    data = read(tmp_path / "x")
    assert [data[i].tolist() for i in range(len(data))] == [[i, i] for i in range(90)]


def test_a_chunk_of_bad_lines_alone(tmp_path):
    pytest.importorskip("tokenizers")
    source, ranks = tmp_path / "in.jsonl", tmp_path / "ranks"
    assert run("--input", jsonl(source, ["a b c"]), "--train-tokenizer", 257, "--output", ranks) == 0
    source.write_bytes(b"[]\n" * 5)
    tokenizer = ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", ranks, "--skip-bad-lines", 5]
    other = jsonl(tmp_path / "other.jsonl", ["x " * 500_000, "a"])  # behind it, in a chunk of its own
    assert run("--input", source, other, source, "--output-prefix", tmp_path / "x", *tokenizer) == 2
    assert run("--input", source, other, "--output-prefix", tmp_path / "x", *tokenizer) == 0
    assert len(read(tmp_path / "x")) == 2
    other = jsonl(tmp_path / "other.jsonl", ["x " * 500_000])  # fills a chunk; the next has bad lines alone
    assert run("--input", other, source, "--output-prefix", tmp_path / "y", *tokenizer) == 0
    assert len(read(tmp_path / "y")) == 1


def test_a_run_of_blanks_that_tiktoken_cannot_split(tmp_path, capfd):
    pytest.importorskip("tokenizers")
    source = jsonl(tmp_path / "in.jsonl", ["fine \u00e9", " " * 2_000_000 + "\u00e9", "fine"])
    ranks = tmp_path / "ranks"
    assert (
        run("--input", jsonl(tmp_path / "t.jsonl", ["a b c"]), "--train-tokenizer", 257, "--output", ranks)
        == 0
    )
    tokenizer = ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", ranks]
    assert run("--input", source, "--output-prefix", tmp_path / "x", *tokenizer, "--skip-bad-lines", 1) == 0
    assert f"{source}:2: tiktoken cannot split it" in (tmp_path / "x.skipped").read_text()
    assert len(read(tmp_path / "x")) == 2
    capfd.readouterr()  # Rust's own words


@pytest.mark.parametrize("flag", ["--partitions", "--keep-sequential-samples"])
def test_what_megatrons_scripts_say_changes_nothing(tmp_path, flag):
    source = jsonl(tmp_path / "in.jsonl", [f"document {i}" for i in range(50)])
    extra = [flag, "4"] if flag == "--partitions" else [flag]
    for name, more in (("x", []), ("y", extra)):
        assert run("--input", source, "--output-prefix", tmp_path / name, *BYTES, *more) == 0
    files = [[(tmp_path / f"{n}_text_document.{end}").read_bytes() for end in ("bin", "idx")] for n in "xy"]
    assert files[0] == files[1]
    assert run("--input", source, "--output-prefix", tmp_path / "z", *BYTES, "--partitions", 0) == 2


def test_memory_does_not_grow_with_the_input(tmp_path):
    """Ten times the text takes as much memory; what grows is the index, 20 bytes a document."""
    program = (
        "import sys; import preprocess; preprocess.main(sys.argv[1:]);"
        "print(next(line for line in open('/proc/self/status') if 'VmHWM' in line))"
    )
    peaks = []
    for size in (400, 4000):
        source = jsonl(tmp_path / f"{size}.jsonl", ["some text of a document " * 700] * size)  # 6.7 and 67 MB
        prefix = str(tmp_path / f"x{size}")
        command = [sys.executable, "-c", program, "--input", source, "--output-prefix", prefix]
        done = subprocess.run([*command, *BYTES], capture_output=True, text=True, cwd=ROOT, check=True)
        peaks.append(int(done.stdout.split()[-2]) >> 10)
        assert len(IndexedDataset(f"{prefix}_text_document")) == size
    assert peaks[1] < peaks[0] + 16, f"{peaks} MiB"

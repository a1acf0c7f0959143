"""Input that is wrong, or written by a program that was killed: named before a step, never trained on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import train
from nanomegatron.data.indexed_dataset import IndexedDataset
from nanomegatron.data.tokenizer import build_tokenizer
from nanomegatron.faults.exit import BAD_CONFIG, DONE
from nanomegatron.faults.launch import launch
from nanomegatron.mesh import World
from tests.data.test_preprocess import BYTES, ROOT, group_lives, jsonl, run
from tests.megatron_data import write
from tests.test_train import MODEL, arguments, corpus, output_of  # noqa: F401 (a fixture)

# JSON Lines. What is put in as lines 3 and 6, and the reason for which it is no document; "": it is one.


def line(text: str) -> bytes:
    return json.dumps({"text": text}).encode()


INPUT = {
    "bad JSON": (b'{"text": "a"', "Expecting ',' delimiter"),
    "wrong type": (b'{"text": 5}', "no string under 'text'; it is 5: texts are JSON strings"),
    "a list": (b'["text"]', "a JSON list, not an object"),
    "missing key": (b'{"other": "a"}', "the keys are other"),
    "bad UTF-8": (b'{"text": "\xff"}', "can't decode byte 0xff"),
    "NUL": (b'{"text": "a\x00"}', "Invalid control character"),
    "lone surrogate": (b'{"text": "\\ud800"}', "surrogates not allowed"),
    "BOM inside": (b"\xef\xbb\xbf" + line("x"), "Unexpected UTF-8 BOM"),
    "10 MB line": (b'{"text": "' + b"x" * 10_000_000, "Unterminated string"),
    "nested": (b'{"text": ' + b"[" * 100_000, "recursion"),
}
GOOD = [line(text) for text in ("one", "two words", "", "\u00e9\U0001f917", "five " * 40)]


def pair_of(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}_text_document.{end}").read_bytes() for end in ("bin", "idx")]


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("clean")
    (folder / "in.jsonl").write_bytes(b"\n".join(GOOD))
    assert run("--input", folder / "in.jsonl", "--output-prefix", folder / "x", *BYTES, "--append-eod") == 0
    return pair_of(folder / "x")


@pytest.mark.parametrize("kind", INPUT)
def test_bad_lines_have_numbers_and_good_ones_their_tokens(kind, clean, tmp_path, capsys):
    """Both modes: stop at the first one, or leave them out."""
    bad, reason = INPUT[kind]
    source, prefix = tmp_path / "in.jsonl", tmp_path / "x"
    source.write_bytes(b"\n".join([*GOOD[:2], bad, *GOOD[2:4], bad, *GOOD[4:]]))
    command = ["--input", source, "--output-prefix", prefix, *BYTES, "--append-eod"]
    assert run(*command) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"nanomegatron preprocess: {source}:3: ") and reason in error and len(error) < 600
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert run(*command, "--skip-bad-lines", 2) == 0
    skipped = Path(f"{prefix}.skipped").read_text().splitlines()
    assert [entry.split(": ")[0] for entry in skipped] == [f"{source}:3", f"{source}:6"]
    assert pair_of(prefix) == clean and run("--verify-data", f"{prefix}_text_document") == 0


@pytest.mark.parametrize("end, first, between", [(b"\r\n", b"", b""), (b"\n", b"\xef\xbb\xbf", b" \n\n\t\n")])
def test_what_is_between_documents_changes_no_token(end, first, between, clean, tmp_path):
    """CRLF; a BOM at the beginning, and blank lines."""
    (tmp_path / "in.jsonl").write_bytes(first + (end + between).join(GOOD) + end)
    assert (
        run("--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "x", *BYTES, "--append-eod") == 0
    )
    assert pair_of(tmp_path / "x") == clean


@pytest.mark.full
@pytest.mark.parametrize("workers", ["1", "2"])
def test_killed_at_any_time(workers, tmp_path):
    """Ten times each: a pair that loads is whole, and the same command then writes the same bytes."""
    source = jsonl(tmp_path / "in.jsonl", ["some words to tokenize " * 400] * 3000)
    command = [sys.executable, str(ROOT / "preprocess.py"), "--input", source, *BYTES, "--workers", workers]

    def start(name: str) -> subprocess.Popen:
        where = ["--output-prefix", str(tmp_path / name), "--overwrite"]
        return subprocess.Popen([*command, *where], start_new_session=True, stdout=subprocess.DEVNULL)

    begin = time.monotonic()
    assert start("whole").wait() == 0
    seconds, draw = time.monotonic() - begin, random.Random(int(workers))
    expected = pair_of(tmp_path / "whole")
    for trial in range(10):
        process = start(f"x{trial}")
        time.sleep(draw.random() * seconds)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while group_lives(process.pid):
            time.sleep(0.01)
        try:
            IndexedDataset(tmp_path / f"x{trial}_text_document")
        except ValueError as error:
            assert "no such file" in str(error)
        else:
            assert pair_of(tmp_path / f"x{trial}") == expected
        if trial % 3 == 0:
            assert start(f"x{trial}").wait() == 0 and pair_of(tmp_path / f"x{trial}") == expected
            assert not list(tmp_path.glob(f"x{trial}*.tmp"))


# Tokens that do not fit the model, on one rank and on two that share each layer.

TEXT = np.append(np.full(99, 97), 256)


def data(name: str, documents=(TEXT,) * 40, dtype=np.uint16, made_by: str = "") -> None:
    """A pair, with a PREFIX.json if it says which tokenizer made it."""
    kind = build_tokenizer(made_by, vocab_size=257) if made_by else None
    about = kind and dict(fingerprint=kind.fingerprint, tokenizer=kind.spec, max_token=256)
    write(name, documents, dtype, about)


def empty_documents(name: str) -> None:
    """Forty sequences without a token."""
    data(name)
    index = bytearray(Path(f"{name}.idx").read_bytes())
    index[34 : 34 + 12 * 40] = bytes(12 * 40)
    Path(f"{name}.idx").write_bytes(index)
    Path(f"{name}.bin").write_bytes(b"")


UNFIT = {
    "id of the vocabulary's size": (lambda: data("d", [*[TEXT] * 39, TEXT + 1]), "", "d: holds token 257;"),
    "-1": (lambda: data("d", [TEXT] * 39 + [TEXT - 98], np.int32), "", "d: holds token -1; the vocabulary"),
    "70000": (lambda: data("d", [TEXT, np.append(TEXT, 70000)], np.int32), "", "d: holds token 70000; the"),
    "another tokenizer": (
        lambda: data("d", made_by="NullTokenizer"),
        "",
        "d.json: made with {'type': 'NullTokenizer'",
    ),
    "less than a sample": (lambda: data("d", [TEXT[-9:]] * 3), "--split 1", "train data: 27 tokens"),
    "less than the tokenizer's": (
        lambda: data("d"),
        "--vocab-size 100",
        "--vocab-size 100: the tokenizer has",
    ),
    "empty documents": (lambda: empty_documents("d"), "", "d.bin: 0 bytes; it must hold at least one token"),
    "no validation": (lambda: data("d", [TEXT] * 3), "", "valid data: 0 tokens in sequences 3..3 of d"),
}


def said(world: World, argv: list[str], folder: str) -> int:
    """A rank whose words go to a file."""
    os.chdir(folder)
    words = os.open(f"said{world.rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(words, stream)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    return train.run_rank(world, argv)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] * bool(i)) for i, kind in enumerate(UNFIT)]
)
def test_unfit_tokens_are_said_alike_by_every_layout(kind, tmp_path, monkeypatch):
    """Before step 1, with exit code 2, by one line of one rank."""
    make, flags, message = UNFIT[kind]
    monkeypatch.chdir(tmp_path)
    make()
    argv = f"{MODEL} --train-iters 9 --data-path d --tokenizer-type ByteTokenizer --split 90,10,0".split()
    argv += flags.split()
    found = []
    for ranks, more in ((1, []), (2, ["--tp", "2"])):
        codes = launch(said, ranks, ([*argv, *more], str(tmp_path)), timeout=60, threads=1)
        assert codes == [BAD_CONFIG] * ranks
        words = "".join(Path(f"said{rank}").read_text() for rank in range(ranks))
        assert "Traceback" not in words and not Path("runs/test/metrics.jsonl").exists()
        found += [[text for text in words.splitlines() if text.startswith("! ")]]
    assert found[0] == found[1] and len(found[0]) == 1 and message in found[0][0], words


@pytest.mark.full
def test_no_change_of_a_resumed_run_is_silent(corpus, tmp_path):  # noqa: F811
    """In its folder, and from another one: threads and machine are a note, the rest an error or a warning."""
    flags = "--lr-warmup-iters 0 --eval-iters 0 --num-layers 1 --micro-batch-size 1"
    output_of(tmp_path, arguments(corpus, flags, "--train-iters 1"), DONE)
    argv = arguments(corpus, flags, "--train-iters 2")
    for more, word in {
        "--seed 5": "--seed 5: the run in this folder has 1234",
        "--global-batch-size 4": "--global-batch-size 4: the run in this folder has 8",
        "--seq-length 16": "--seq-length 16: the run in this folder has 32",
        "--mock-data --data-path None": "--mock-data",
    }.items():
        assert word in output_of(tmp_path, [*argv, *more.split()], BAD_CONFIG)
    elsewhere = [*argv, "--load", "runs/test/ckpt", "--run-name"]
    words = output_of(tmp_path, [*elsewhere, "a", "--global-batch-size", "4"], BAD_CONFIG)
    assert "has consumed 8 samples in 1 iterations, this run 4; keep its batch sizes" in words
    for more in ("--seed 5", "--seq-length 16"):
        words = output_of(tmp_path, [*elsewhere, f"b{more[-1]}", *more.split()], DONE)
        assert f"! {more.split()[0]}: runs/test/ckpt was made with another: samples may be in" in words
    assert launch(said, 1, ([*elsewhere, "c"], str(tmp_path)), timeout=60, threads=2) == [DONE]
    words = (tmp_path / "said0").read_text()
    assert "note    the same state and data, but not the same bits: threads 1 -> 2" in words

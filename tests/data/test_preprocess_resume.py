"""--resume: what an interrupted run has completed is kept and checked, the rest is done again."""

import gzip
import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nanomegatron.data import output, reading
from tests.data.test_columns import write
from tests.data.test_preprocess import BYTES, ROOT, jsonl, read, run

KEYS = ["--json-keys", "text", "title"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(reading, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(output, "SHARD_BYTES", 10_000)


def inputs(folder):
    """Lines, packed lines, and rows where pyarrow is there; two have a bad line."""
    lines = [json.dumps({"text": f"{i} " * (i % 90), "title": "" if i % 7 else f"t{i}"}) for i in range(600)]
    lines[130] = "no JSON"
    (folder / "a.jsonl").write_text("\n".join(lines))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("\n".join(lines[:400]))
    found = [folder / "a.jsonl", folder / "b.jsonl.gz"]
    if importlib.util.find_spec("pyarrow"):
        texts = [f"row {i} " * (i % 50) for i in range(400)]
        found.append(write(folder / "c.parquet", texts, title=["x"] * 400))
    return found


def results(prefix):
    folder, name = prefix.parent, prefix.name
    return {p.name.replace(name, "", 1): p.read_bytes() for p in folder.glob(f"{name}*") if p.is_file()}


def interrupted(monkeypatch, arguments, chunks):
    """Run, and stop behind a number of chunks; returns how many shards are kept."""
    add, calls = output.DatasetOutput.add, []

    def counted(self, *given):
        calls.append(0)
        if len(calls) > chunks:
            raise KeyboardInterrupt
        add(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(output.DatasetOutput, "add", counted)
        assert run(*arguments) == 130
    return len([*Path(f"{arguments[arguments.index('--output-prefix') + 1]}.unfinished").glob("*.npz")])


def test_goes_on_where_it_was_interrupted(tmp_path, small, monkeypatch, capsys):
    """Again and again; in the end the bytes of one run. Nothing loads before, nothing is left behind."""
    flags = [*BYTES, *KEYS, "--append-eod", "--skip-bad-lines", 9, "--input", *inputs(tmp_path)]
    assert run(*flags, "--output-prefix", tmp_path / "x") == 0
    arguments = [*flags, "--output-prefix", tmp_path / "y", "--resume"]
    kept = [interrupted(monkeypatch, arguments, chunks) for chunks in (3, 14, 25, 40)]
    assert kept == sorted(kept) and kept[0] == 0 and len(set(kept)) == 4
    for key in ("text", "title"):
        with pytest.raises(ValueError, match="no such file"):
            read(tmp_path / "y", key)
    capsys.readouterr()
    assert run(*arguments) == 0
    assert "documents are there and right" in capsys.readouterr().err
    assert results(tmp_path / "y") == results(tmp_path / "x")
    assert not (tmp_path / "y.unfinished").exists()


@pytest.mark.parametrize("damage", ["byte", "cut", "gone", "first"])
def test_what_is_damaged_is_done_again(tmp_path, small, monkeypatch, damage):
    flags = [*BYTES, *KEYS, "--append-eod", "--skip-bad-lines", 9, "--input", *inputs(tmp_path)]
    assert run(*flags, "--output-prefix", tmp_path / "x") == 0
    arguments = [*flags, "--output-prefix", tmp_path / "y", "--resume"]
    assert interrupted(monkeypatch, arguments, 40) > 3
    shard = tmp_path / "y.unfinished" / ("00000.npz" if damage == "first" else "00001.npz")
    whole = bytearray(shard.read_bytes())
    whole[4321] ^= 1  # a token
    shard.unlink()
    if damage in ("byte", "first"):
        shard.write_bytes(whole)
    elif damage == "cut":
        shard.write_bytes(whole[:-30])
    found, read_shard = [], output.read_shard
    monkeypatch.setattr(output, "read_shard", lambda *a: found.append(read_shard(*a)) or found[-1])
    assert run(*arguments) == 0
    assert len(found) == (1 if damage == "first" else 2) and found[-1] is None
    assert results(tmp_path / "y") == results(tmp_path / "x")


def test_another_run_is_refused(tmp_path, small, monkeypatch, capsys):
    source = jsonl(tmp_path / "in.jsonl", [f"{i} " * 50 for i in range(400)])
    arguments = ["--input", source, "--output-prefix", tmp_path / "x", *BYTES, "--resume"]
    assert interrupted(monkeypatch, arguments, 20) > 1
    assert run(*arguments, "--append-eod") == 2
    assert "of a run with another append_eod, False -> True; give the same" in capsys.readouterr().err
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "900"]
    assert run(*arguments[:4], *null, "--resume") == 2 and "another tokenizer" in capsys.readouterr().err
    other = jsonl(tmp_path / "other.jsonl", ["1"])
    assert run("--input", source, other, *arguments[2:]) == 2
    assert "another file 2, None" in capsys.readouterr().err
    jsonl(tmp_path / "in.jsonl", ["1"])
    assert run(*arguments) == 2 and f"another file 1, ['{source}'" in capsys.readouterr().err
    (tmp_path / "x.unfinished" / "run.json").write_text("{")
    assert run(*arguments) == 2 and "remove" in capsys.readouterr().err


def test_a_bad_line_that_is_mended_by_a_flag(tmp_path, small):
    """What was complete before it is kept; those that were left out there count."""
    lines = [json.dumps({"text": f"{i} " * 50}) for i in range(400)]
    lines[5] = lines[300] = "no JSON"
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    arguments = ["--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "x", *BYTES, "--resume"]
    assert run(*arguments, "--skip-bad-lines", 1) == 2
    assert run(*arguments, "--skip-bad-lines", 1) == 2
    assert run(*arguments, "--skip-bad-lines", 2) == 0
    assert len((tmp_path / "x.skipped").read_text().splitlines()) == 2 and len(read(tmp_path / "x")) == 398


def test_killed_between_shards(tmp_path):
    """SIGKILL to a real run: the next run keeps the shards on the disk."""
    source = jsonl(tmp_path / "in.jsonl", ["some words to tokenize " * 400] * 2500)
    program = (
        "import sys, preprocess; from nanomegatron.data import output; output.SHARD_BYTES = 1 << 22;"
        "sys.exit(preprocess.main(sys.argv[1:]))"
    )
    flags = ["--input", source, *BYTES, "--output-prefix"]
    command = [sys.executable, "-c", program, *flags, str(tmp_path / "x"), "--resume"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    kept, deadline = tmp_path / "x.unfinished" / "00001.npz", time.monotonic() + 60
    while not kept.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and kept.exists()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0 and "documents are there and right" in again.stderr
    data = read(tmp_path / "x")
    assert len(data) == 2500 and set(data.sequence_lengths.tolist()) == {23 * 400}
    assert np.array_equal(data[2499], data[0])

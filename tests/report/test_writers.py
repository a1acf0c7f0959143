"""What a run writes where it cannot: full disks, folders that are not there, a console that has gone."""

import io
import json
import resource
import subprocess
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from nanomegatron.report.log import RunLog
from nanomegatron.report.status import read_status
from nanomegatron.report.writers import read_jsonl
from tests.report.test_metrics import config, record, started


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes: a write up to there is cut short, the next one fails."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_line_that_is_cut_short_stays_by_itself(tmp_path):
    """A disk that is full for a while: one warning a file, whole records before and after."""
    log, path = started(tmp_path), tmp_path / "metrics.jsonl"
    log.step(record(1))
    with full_after(path.stat().st_size + 20):
        for i in (2, 3, 4):
            log.step(record(i))
    with full_after(20):
        for i in (2, 3):
            log.status("running", iteration=i)
    log.step(record(5))
    log.status("running", iteration=5)
    with pytest.warns(UserWarning, match="1 damaged line left out, 2 steps are whole"):
        assert [r["iteration"] for r in read_jsonl(path)] == [1, 5]
    assert len(path.read_text().splitlines()) == 3
    said = log.stream.getvalue()
    assert said.count(f"! {path}: File too large; the run continues without it\n") == 1
    assert said.count(f"! {tmp_path / 'status.json'}: File too large") == 1
    assert json.loads((tmp_path / "status.json").read_text())["iteration"] == 5
    assert not list(tmp_path.glob("*.tmp"))
    with open(path, "a") as file:
        file.write('{"iteration": 6, "lm_l')  # killed while writing
    log.close()
    log = RunLog(tmp_path, config(), stream=io.StringIO())
    with full_after(10):
        log.begin(1, 100)
        log.step(record(2, lm_loss=1.0))  # would stand behind step 5
    log.step(record(3))
    assert [r["iteration"] for r in read_jsonl(path)] == [1, 3]


def test_nothing_that_a_run_writes_is_needed(tmp_path, monkeypatch):
    """No folder, no console, a writer that fails: a warning each."""
    (tmp_path / "file").write_text("in the way")
    log = started(tmp_path / "file" / "run")
    log._writers.append(types.SimpleNamespace(add=lambda *_: 1 / 0, close=lambda: 1 / 0))
    for i in (1, 2):
        log.step(record(i))
        log.evaluation(i, "validation", 3.0)
    with log.attempt("sample"):
        raise ValueError("no such word")
    log.close()
    warnings = [line for line in log.stream.getvalue().splitlines() if line.startswith("!")]
    assert len(warnings) == len(set(warnings)) == 8 and "! sample: ValueError: no such word" in warnings[-2]
    assert sum("ZeroDivisionError" in line for line in warnings) == 2
    log = started(tmp_path / "run")
    monkeypatch.setattr(log, "stream", None)  # as sys.stdout is where it was closed
    log.line("before")
    log.step(record(1))
    log.close()
    first, warning, *_ = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert (
        warning == "before"
        and first.startswith("! console: ")
        and len(read_jsonl(log.folder / "metrics.jsonl")) == 1
    )


def test_a_full_disk_does_not_keep_the_end_of_a_run_secret(tmp_path):
    """status.json is written over where there is no room for a new one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("mounts are not permitted here")
    try:
        log = started(disk / "run")
        with suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        log.status("failed", exit_code=4, message="no room: " + "x" * 9000)
        log.status("failed", exit_code=1, message="a second failure")
        status = read_status(disk / "run/status.json", pytest.fail)
        assert status["state"] == "failed" and status["exit_code"] == 4
        assert status["message"].startswith("no room: xxx") and len(status["message"]) == 512
        log.close()
        log.stream = io.StringIO()
        log.status("running")
        assert "No space left" not in log.stream.getvalue()
        (disk / "filler").unlink()
        stream = io.StringIO()
        RunLog(disk / "run", config(), stream=stream).close()
        assert "the run before wrote no end" in stream.getvalue()
    finally:
        subprocess.run(["umount", disk], check=True)

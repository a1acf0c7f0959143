"""`make train` ends as the training does: stopped and saved is no error, and signals reach the run."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.house.test_style import ROOT

# In place of .venv/bin/python: `train.py` here only waits for a signal, and ends with the given exit code. It
# ends after make has taken the signal, as a save does: make waits for a child that it has already collected,
# and ends with "No child processes", if the child ends between the signal's coming and its handler.
PYTHON = """#!/bin/sh
[ "$1" = train.py ] || exec {python} "$@"
heard={heard}
trap 'for i in $(seq 200); do [ -e "$heard" ] && break; sleep 0.05; done; echo saved; exit {code}' INT TERM
touch {begun}
for i in $(seq 200); do sleep 0.05; done
"""


def is_pending(number: int, pid: int) -> bool:
    """Whether a process has still to take a signal; false where there is no /proc."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    signals = re.search(r"^ShdPnd:\s*(\w+)$", status, re.M)[1]
    return bool(int(signals, 16) >> (number - 1) & 1)


def make_train(folder: Path, code: int, number: int, group: bool) -> subprocess.CompletedProcess:
    """`make train` of this checkout; gets a signal once the training runs: make alone, or all processes."""
    begun, heard, python = folder / "begun", folder / "heard", folder / "bin/python"
    python.parent.mkdir()
    for name in (".train", ".kernels"):  # the environment is ready
        (folder / name).touch()
    paths = {"python": sys.executable, "begun": str(begun), "heard": str(heard)}
    facts = {name: shlex.quote(path) for name, path in paths.items()}
    python.write_text(PYTHON.format(code=code, **facts))
    python.chmod(0o755)
    command = ["make", "train", f"VENV={folder}", "train_gpus="]
    kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=kept,
    ) as process:
        end = time.monotonic() + 30
        while not begun.exists() and time.monotonic() < end:
            time.sleep(0.02)
        (os.killpg if group else os.kill)(process.pid, number)
        while is_pending(number, process.pid) and time.monotonic() < end:
            time.sleep(0.01)
        heard.touch()
        out, err = process.communicate(timeout=30)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize("number, group", ((signal.SIGINT, True), (signal.SIGTERM, False)), ids=str)
def test_a_run_that_is_stopped_and_saved_is_no_error_of_make(number, group, tmp_path):
    """Ctrl-C, which all processes get, and SIGTERM, which make alone gets and passes on."""
    done = make_train(tmp_path, 75, number, group)
    assert done.stdout == "saved\n" and "Error" not in done.stderr, done.stdout + done.stderr
    assert done.returncode in (0, -number)


def test_a_failure_is_an_error_of_make(tmp_path):
    done = make_train(tmp_path, 4, signal.SIGINT, group=True)
    assert "Error 4" in done.stderr and done.returncode in (2, -signal.SIGINT)

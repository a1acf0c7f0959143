"""The start of train.py, by part, and what it does not import."""

import re
import subprocess
import sys

from tests.house.test_style import ROOT
from tools import startup

TINY = "--device cpu --nproc 1 --mock-data --vocab-size 64 --seq-length 16 --train-iters 3"


def test_a_start_is_measured_and_imports_no_compiler(tmp_path):
    """What takes seconds to import, and no step needs, is not there when the first step is done."""
    command = [sys.executable, str(ROOT / "tools/startup.py"), "--repeat", "1", *TINY.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *rows, total, modules = done.stdout.splitlines()[1:]
    parts = [re.match(r"(.{24}) +([\d.]+) +([\d.]+) +([\d.]+)$", row) for row in rows]
    assert all(parts), done.stdout
    named = ["Python", "import torch", "import train", *startup.PARTS.values()]
    assert [p[1].strip() for p in parts[: len(named)]] == named
    assert [p[1].strip() for p in parts[len(named) :]] == [
        "rest of the set-up",
        "first step launched",
        "first step done",
    ]
    ends = [float(p[3]) for p in parts]
    assert ends == sorted(ends) and sum(float(p[2]) for p in parts) - ends[-1] < 0.1
    assert total.split()[:2] == ["all", parts[-1][3]] and "none of torch._dynamo" in modules
    assert not [*(tmp_path / "runs/startup").rglob("iter_*")]


def test_a_wrong_flag_ends_it(tmp_path, capfd):
    assert startup.main([*TINY.split(), "--hidden-size", "0"]) == 2
    assert "--hidden-size 0" in capfd.readouterr().err

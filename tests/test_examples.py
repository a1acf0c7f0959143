"""The examples run as their first lines say, and do what they are for."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def numbers(processes: int) -> list[list[float]]:
    """Loss and gradient norm of each step that examples/custom_loop.py prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*LAUNCHER, str(processes), "examples/custom_loop.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^step +\d+  loss (\S+)  gradient norm (\S+)$", done.stdout, re.MULTILINE)
    return [[float(number) for number in line] for line in lines]


def test_custom_loop():
    """tp 2 learns, from an even guess among 100 tokens down; tp 2 x dp 2 learns the same."""
    two, four = numbers(2), numbers(4)
    losses = [loss for loss, _ in two]
    assert len(losses) == 20 and abs(losses[0] - math.log(100)) < 0.2
    assert losses[-1] < 0.3 * losses[0]
    for here, there in zip(two, four, strict=True):
        assert here == pytest.approx(there, abs=3e-3)


def test_custom_loop_is_short():
    assert len((ROOT / "examples" / "custom_loop.py").read_text().splitlines()) <= 60

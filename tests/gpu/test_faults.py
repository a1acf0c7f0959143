"""Faults of a run over NCCL, where the host waits for a rank only when its queue of launches is full."""

import json

import pytest

from nanomegatron.faults import launch as launcher
from nanomegatron.faults.launch import launch
from tests.faults.test_stragglers import with_a_slow_rank
from tests.faults.test_watchdog import hanging
from tests.gpu.ranks import needs_two
from tests.spmd import run_spmd

T = 4  # seconds
RUN = (
    "--mock-data --vocab-size 512 --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-4 --eval-iters 0 --run-name test"
)
pytestmark = needs_two


@pytest.mark.parametrize("layout, how", [("--tp 2", "stopped"), ("", "stopped"), ("--tp 2", "sleeps")])
def test_a_rank_that_hangs_is_named(layout, how, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "GRACE", 1.0)
    argv = f"{RUN} {layout} --train-iters 1000 --hang-timeout-secs {T}".split()
    launch(hanging, 2, (argv, str(tmp_path), 1, how), timeout=120)
    path = tmp_path / "runs/test/status.json"
    status = json.loads(path.read_text())
    assert status["rank"] == "rank 1", status
    assert T <= path.stat().st_mtime - (tmp_path / "began").stat().st_mtime < T + 2, status
    stacks = (tmp_path / "runs/test/hang.0.txt").read_text()
    assert "in train_step" in stacks or "in report" in stacks


@pytest.mark.parametrize("layout", ["--tp 2 --check-replicas 1", "--check-replicas 1"])
def test_a_slow_rank_is_named_and_replicas_agree(layout, tmp_path):
    flags = "--train-iters 12 --lr-warmup-iters 0 --log-interval 3 --log-straggler"
    log = run_spmd(with_a_slow_rank, 2, f"{RUN} {layout} {flags}".split(), str(tmp_path), 1)[0]
    assert "straggler rank 1" in log and "replicas differ" not in log

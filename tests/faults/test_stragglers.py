"""Slow ranks: which one, in time, and none in a clean run."""

import math
import os
import re
import time
from types import SimpleNamespace

import pytest

import train
from nanomegatron.data.loader import BatchLoader
from nanomegatron.faults.exit import DONE
from nanomegatron.faults.stragglers import SLOW, Stragglers, medians_of_others, spread
from nanomegatron.mesh import World
from nanomegatron.report import plots
from tests.spmd import run_spmd
from tests.test_train import arguments, corpus  # noqa: F401 (a fixture)


def with_a_slow_rank(world: World, argv: list[str], folder: str, slow: int) -> str:
    """The log of a run in which rank `slow` sleeps 200 ms in every step; -1: none."""
    os.chdir(folder)
    usual = BatchLoader.batches

    def batches(*args):
        time.sleep(0.2 * (world.rank == slow))
        return usual(*args)

    BatchLoader.batches, plots.plot_loss = batches, lambda *_: None
    assert train.run_rank(world, argv) == DONE
    with open("runs/test/log.txt", encoding="utf-8") as file:
        return file.read()


MORE = (2, "--tp 2", 0), (4, "--tp 2", 2), (2, "--cp 2", 1)
FULL = [pytest.param(*each, marks=pytest.mark.full) for each in MORE]


@pytest.mark.parametrize("ranks, layout, slow", [(2, "", 1), *FULL])
def test_a_slow_rank_is_named_within_three_windows(ranks, layout, slow, corpus, tmp_path):  # noqa: F811
    flags = "--train-iters 7 --lr-warmup-iters 0 --log-interval 2 --eval-iters 0 --enable-straggler-detection"
    log = run_spmd(with_a_slow_rank, ranks, arguments(corpus, flags, layout), str(tmp_path), slow)[0]
    found = re.findall(
        r"! step (\d+): straggler rank (\d) .*: at least ([\d.]+) ms of computation a step, (\S+)x", log
    )
    assert [(step, rank) for step, rank, *_ in found] == [("6", str(slow))]
    assert float(found[0][2]) > 200 and float(found[0][3]) > SLOW
    assert log.count("ranks   compute min ") == 3 and f"ms (rank {slow}), wait" in log
    wait = re.findall(rf"wait min ([\d.]+) \(rank {slow}\) .* max ([\d.]+) ms", log)
    assert len(wait) == 3 and all(float(low) < 150 < float(high) for low, high in wait)


@pytest.mark.full
@pytest.mark.parametrize("turn", range(20))
def test_no_rank_is_slow_in_a_clean_run(turn, corpus, tmp_path):  # noqa: F811
    flags = (
        f"--train-iters 40 --lr-warmup-iters 0 --log-interval 10 --eval-iters 0 --log-straggler --seed {turn}"
    )
    layout = ("", "--tp 2", "--pp 2", "--cp 2")[turn % 4]
    log = run_spmd(with_a_slow_rank, 2, arguments(corpus, flags, layout), str(tmp_path), -1)[0]
    assert "straggler rank" not in log and log.count("ranks   compute min ") == 4


class Fixed:
    """A clock that has been read."""

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = lambda: milliseconds


def steps_of_given_lengths(mesh, lengths: list[list[tuple[float, float]]]) -> list[str]:
    """What rank 0 logs for steps of these times: (step, wait) by step and rank."""
    lines: list[str] = []
    log = SimpleNamespace(
        line=lines.append, warn=lambda text: lines.append(f"! {text}"), is_main=not mesh.rank
    )
    stragglers = Stragglers(mesh, log, 3)
    for i, ranks in enumerate(lengths, 1):
        whole, wait = ranks[mesh.rank]
        step = SimpleNamespace(clock=Fixed(whole), waits=[Fixed(wait / 2)] * 2)
        stragglers.after_step(SimpleNamespace(batch=SimpleNamespace(iteration=i), **vars(step)))
    assert isinstance(mesh.observer.new_clock().stop().milliseconds(), float)
    return lines


USUAL = [(200, 120)] * 3  # (step, wait) of each rank, in ms
SLOW_1 = [(200, 120), (200, 60), (200, 120)]  # rank 1 computes 140 ms, the others 80
LINE = (
    "ranks   compute min 80.0 (rank 0) median 80.0 max 80.0 ms (rank 0), "
    "wait min 120.0 (rank 0) median 120.0 max 120.0 ms (rank 0)"
)


def test_only_what_lasts_is_a_straggler():
    """Two windows that end, three in which rank 0 is interrupted in all steps but one, four windows."""
    interrupted = [(1000, 120), (1000, 920), (1000, 920)]
    windows = (
        [[SLOW_1] * 3] * 2 + [[USUAL, interrupted, interrupted]] * 3 + [[USUAL] * 3] + [[SLOW_1] * 3] * 4
    )
    steps = [step for window in windows for step in window]
    lines = run_spmd(steps_of_given_lengths, 3, steps)[0]
    assert lines[5] == LINE and lines[0] != LINE
    warned = [line for line in lines if line.startswith("!")]
    assert [line.split(":")[0] for line in warned] == ["! step 27", "! step 30"]
    assert warned[0].startswith("! step 27: straggler rank 1 tp0 pp0 cp0 dp1 on ")
    assert warned[0].endswith(
        ": at least 140.0 ms of computation a step, 1.75x the median of its stage's other ranks, "
        "for 3 windows of 3 steps"
    )


def test_ranks_are_compared_within_their_stage():
    assert medians_of_others([10, 10, 40, 40], [0, 0, 1, 1]) == [10, 10, 40, 40]
    assert medians_of_others([10, 20, 40, 99], [0, 0, 0, 1]) == [30, 25, 15, math.inf]
    assert spread([3.0, 1.0, 2.0]) == "min 1.0 (rank 1) median 2.0 max 3.0 ms (rank 0)"


def test_short_steps_are_noise():
    """Four times as long as the others, but by 30 ms."""
    lines = run_spmd(steps_of_given_lengths, 3, [[(50, 40), (50, 10), (50, 40)]] * 12)[0]
    assert len(lines) == 4 and "max 40.0 ms (rank 1), wait" in lines[0]

"""Timers: which parts are timed at which level, the mean over an interval, Megatron's three formats."""

import time

import pytest
import torch

from nanomegatron.mesh import Axis
from nanomegatron.report.timers import Timers
from tests.spmd import run_spmd

CPU = torch.device("cpu")


class Fixed:
    """A clock that has been read."""

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = lambda: milliseconds


def test_level_and_order():
    for level, names in ((0, []), (1, ["outer", "last"]), (2, ["outer", "inner", "inner", "last"])):
        timers = Timers(level, "minmax", CPU)
        with timers("outer"):
            for _ in range(2):
                with timers("inner", level=2):
                    time.sleep(0.002)
        with timers("last"):
            pass
        clocks = timers.take()
        assert [name for name, _ in clocks] == names and timers.take() == []
        if level == 2:
            outer, *inner, last = [clock.milliseconds() for _, clock in clocks]
            assert outer >= sum(inner) >= 4 and last < 2


def two_steps(timers: Timers, world: Axis) -> str:
    for step in (0, 1):
        timers.add([("forward-backward", Fixed(10 * world.rank + step)), ("optimizer", Fixed(2))])
    return timers.text(world)


def texts(mesh, option: str) -> list[str]:
    timers = Timers(1, option, CPU)
    return [two_steps(timers, mesh.world), two_steps(timers, mesh.world)]  # the second starts afresh


DOTS = "." * 31
EXPECTED = {
    "minmax": "(min, max) time across ranks (ms):\n"
    f"    forward-backward {DOTS}: (0.50, 10.50)\n"
    f"    optimizer {DOTS}.......: (2.00, 2.00)",
    "max": "max time across ranks (ms):\n"
    f"    forward-backward {DOTS}: 10.50\n"
    f"    optimizer {DOTS}.......: 2.00",
    "all": "times across ranks (ms):\n"
    "  forward-backward:\n     rank  0: 0.50\n     rank  1: 10.50\n"
    "  optimizer:\n     rank  0: 2.00\n     rank  1: 2.00",
}


@pytest.mark.parametrize("option", EXPECTED)
def test_text_is_megatrons(option):
    """Its Timers.get_all_timers_string: names padded with dots to 48, the mean a step."""
    for rank in run_spmd(texts, 2, option):
        assert rank == [EXPECTED[option]] * 2

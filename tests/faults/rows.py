"""The fault matrix: every row with its fault, what is expected, its number of cases, and the function of one.

    few     cases in `make test-full`            all     cases in `make faults`

A case is `run(place, seed)`: it raises, or returns in a word which kind it was. A new row is one entry here
and a function in a file of this folder; `by_tests` makes one of tests that are elsewhere. A row that `waits`
has its function, but the part of the project that it needs is absent.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults import damage, exact, hangs, kills, machines, soak, stops
from tests.faults.runs import ROOT, Place


@dataclass(frozen=True)
class Row:
    """A row. whole: one call runs all cases. minutes: that a case takes by default, if it is given a time.

    skip: says why this machine cannot run it, or nothing.
    """

    id: str
    fault: str
    expected: str
    few: int
    all: int
    run: Callable[[Place, int], str]
    whole: bool = False
    minutes: float = 0.0
    waits: str = ""
    skip: Callable[[], str] = lambda: ""


def by_tests(*words: str) -> Callable[[Place, int], str]:
    """A row whose cases are tests: the words of a pytest command, which must pass."""

    def run(place: Place, seed: int) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "--full", "--tb=short", "-p", "no:cacheprovider"]
        done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=1800)
        lines = done.stdout.strip().splitlines()
        assert done.returncode == 0, "\n".join(lines[-15:])
        passed = re.search(r"(\d+) passed", lines[-1])
        assert passed, f"no test has run: {lines[-1]}"
        return f"{passed[1]} tests"

    return run


def until(setting: str, part: str) -> str:
    """What a row waits for: the part of the project that has this setting, as long as there is none."""
    return "" if kills.has_flag(setting) else part


ROWS = (
    Row(
        "K1",
        "SIGKILL to a random rank at a random moment, saves included; dp, tp with sp, pp, cp, tp x pp; "
        "one in five under `torchrun --max-restarts`, else the same command again",
        "equal; no more steps again than lie between two saves, with the same losses",
        6,
        80,
        kills.k1,
    ),
    Row(
        "K2",
        "SIGKILL at 8 points inside a save, from its first file to the removal of an old checkpoint",
        "the newest complete one is loaded; the step is saved again; equal",
        8,
        40,
        kills.k2,
    ),
    Row("K3", "SIGKILL to the launcher or agent and all ranks; the same command", "equal", 2, 10, kills.k3),
    Row(
        "K4",
        "three kills in one run under torchrun; more kills than it may restart",
        "equal; else another exit code than 0, and status.json names the checkpoints",
        1,
        6,
        kills.k4,
    ),
    Row(
        "K5", "`torchrun --standalone --max-restarts=3`, a rank killed", "it recovers; equal", 2, 8, kills.k5
    ),
    Row(
        "M1",
        "SIGKILL to a random rank of two machines (network namespaces, `torchrun --nnodes 2`)",
        "both machines start again; equal",
        1,
        20,
        machines.m1,
        skip=machines.not_permitted,
    ),
    Row(
        "L1",
        "the cable between two machines is cut",
        "the ranks that do not answer are named within 30 seconds",
        1,
        4,
        machines.l1,
        waits=until("hang_timeout_secs", "the watch-dog"),
        skip=machines.not_permitted,
    ),
    Row(
        "T1",
        "SIGTERM to the launcher or torchrun: in set-up, a step, an evaluation, a save",
        "saved at the next step, none lost, out within 25 seconds, `preempted`; again: equal",
        4,
        20,
        stops.t1,
    ),
    Row("T2", "SIGTERM to one rank", "all ranks save the same step; again: equal", 2, 10, stops.t2),
    Row(
        "T3",
        "a rank is killed, the others get SIGTERM",
        "out within 5 seconds; no save begun, nothing published",
        2,
        10,
        stops.t3,
    ),
    Row(
        "H1",
        "SIGSTOP to each rank of tp x pp, `--hang-timeout-secs 10`",
        "the rank is named within 12 seconds, with the stacks of all others",
        1,
        8,
        hangs.h1,
        waits=until("hang_timeout_secs", "the watch-dog"),
    ),
    Row("T4", "Ctrl-C once, twice", "once saves; twice leaves at once; again: equal", 2, 4, stops.t4),
    Row(
        "S1",
        "one flipped bit in a shard, the manifest, its sum",
        "found, the file named, the checkpoint before it loaded",
        30,
        400,
        damage.s1,
    ),
    Row(
        "S2",
        "each file of a checkpoint cut to 0 bytes, 1, half, by 1, removed; of 5 layouts",
        "the same",
        1,
        5,
        damage.s2,
    ),
    Row(
        "S3",
        "all checkpoints damaged; `--load` of nothing; an empty folder; a newer format",
        "exit code 3 and what was tried; never random weights",
        4,
        4,
        damage.s3,
    ),
    Row("D1", "the same command twice, 10 layouts, dropout", "equal", 3, 10, exact.d1),
    Row(
        "D2",
        "stopped and resumed after each step of 20; recomputation off, full, selective",
        "equal",
        20,
        60,
        exact.d2,
    ),
    Row(
        "X2",
        "5 kills in 3 epochs, every sample written down",
        "none lost, none twice, the same order",
        1,
        4,
        exact.x2,
    ),
    Row(
        "Q1", "half an hour with a fault each minute", "it ends by itself; equal", 0, 1, soak.q1, minutes=30.0
    ),
)

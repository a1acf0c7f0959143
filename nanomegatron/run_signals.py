"""SIGTERM and Ctrl-C: a rank counts what it gets, and all leave together where they next ask each other.

    set-up        between its stages                nothing to save                   exit code 75
    training      in every step's all-reduce        finish the step, save             75
    evaluation    before each global batch          give it up, save if need be       75

A second signal leaves at once, by the signal itself; status.json says so.
"""

import signal
from typing import Any

from nanomegatron.comm import any_rank
from nanomegatron.mesh import Mesh
from nanomegatron.metrics_log import RunLog

PREEMPTED = 75  # exit code


class Preempted(Exception):
    """A rank was signalled before there was anything to save, and all ranks know."""


def preempted(log: RunLog, text: str, **facts: Any) -> int:
    """Say that a signal has ended the run, and what to do; returns the exit code."""
    log.line(text)
    log.status("preempted", exit_code=PREEMPTED, message=text, **facts)
    return PREEMPTED


class Signals:
    """How often this rank has received SIGTERM or SIGINT."""

    def __init__(self, log: RunLog | None = None) -> None:
        """Count from here on, where there is a log, which the second one writes its status to."""
        self.count = 0
        if log is None:
            return

        def note(number: int, _: Any) -> None:
            self.count += 1
            if self.count > 1:
                name = signal.Signals(number).name
                why = f"left at once by a second signal, {name}; the same command goes on from the last save"
                log.status("failed", exit_code=128 + number, message=why)
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, note)

    def anywhere(self, mesh: Mesh) -> bool:
        """Whether any rank has received one. Communicates a number over world, for which the host waits."""
        return any_rank(self.count > 0, mesh.world, mesh.device)

    def check(self, mesh: Mesh) -> None:
        """Raises Preempted on every rank if any has received one. Communicates as `anywhere`."""
        if self.anywhere(mesh):
            raise Preempted("a signal before the first step: nothing to save, the same command starts again")


UNHEARD = Signals()  # of a run that does not listen

"""SIGTERM and Ctrl-C: a rank counts what it gets, and all leave together where they next ask each other.

    set-up        between its stages                nothing to save                   exit code 75
    training      in every step's all-reduce        finish the step, save             75
    evaluation    before each global batch          give it up, save if need be       75

They count once the run's folders are held and its log is open; before, a signal ends the rank. A second one,
ECHO seconds or more after the first, leaves at once, by the signal itself, and status.json says so; but not
out of a collective, to which Python's handlers have to wait.
"""

import signal
import time
from typing import Any

from nanomegatron.comm import any_rank
from nanomegatron.mesh import Mesh
from nanomegatron.report.log import RunLog

PREEMPTED = 75  # exit code
ECHO = 1.0  # seconds within which a signal is the same one, by the launcher and as one of a process group


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
        self.count, self.first = 0, 0.0
        if log is None:
            return

        def note(number: int, _: Any) -> None:
            now = time.monotonic()
            self.first = self.first or now
            if self.count and now - self.first < ECHO:
                return
            self.count += 1
            if self.count > 1:
                name = signal.Signals(number).name
                why = f"left at once by a second signal, {name}; the same command resumes from the last save"
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

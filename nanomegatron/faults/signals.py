"""SIGTERM and Ctrl-C: a rank counts its signals, and all ranks stop together at their next common check.

    set-up        between its stages                nothing to save                   exit code 75
    training      in every step's all-reduce        finish the step, save             75
    evaluation    before each global batch          stop it, save if needed           75

Signals are counted once the run's folders are locked and its log is open; before, a signal ends the rank. A
second one, ECHO seconds or more after the first, ends the process at once, by the signal itself, and
status.json says so. Inside a collective it has to wait, since Python runs its handler only afterwards.
"""

import signal
import time
from typing import Any

from nanomegatron.comm import any_rank
from nanomegatron.mesh import Mesh
from nanomegatron.report.log import RunLog

PREEMPTED = 75  # exit code
ECHO = 1.0  # seconds in which two signals count as one: from the launcher, and to the process group


class Preempted(Exception):
    """Raised on all ranks: one of them got a signal before there was anything to save."""


def preempted(log: RunLog, text: str, **facts: Any) -> int:
    """Log `text`, which says that a signal has ended the run; returns the exit code."""
    log.line(text)
    log.status("preempted", exit_code=PREEMPTED, message=text, **facts)
    return PREEMPTED


class Signals:
    """Counts the SIGTERM and SIGINT that this rank receives."""

    def __init__(self, log: RunLog | None = None) -> None:
        """Install the handlers if there is a log; the second signal writes its status there."""
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
        """Return whether any rank has received one. All-reduces a number over world; the host waits."""
        return any_rank(self.count > 0, mesh.world, mesh.device)

    def check(self, mesh: Mesh) -> None:
        """Raise Preempted on every rank if any has received one. Communicates as `anywhere`."""
        if self.anywhere(mesh):
            raise Preempted("a signal before the first step: nothing to save, the same command starts again")


UNHEARD = Signals()  # for a run without handlers

"""Signals (SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2): all ranks stop at their next check if one got any.

    set-up        between its stages                nothing to save                   exit code 75
    training      in every step's all-reduce        finish the step, save             75
    evaluation    before each global batch          stop it, save if needed           75
    a save        after it, as in training          finish the save                   75

A file that appears (--exit-on-preemption-file) does the same, and so does a folder of the run that is lost
(lock.py), but its exit code is 4, and nothing is saved there. Rank 0 looks at these checks. The flag is sent
with what every step all-reduces, and a save begins with a collective of its own, so a rank that has lost a
peer, and gets torchrun's SIGTERM for that, saves nothing: its next collective fails.

Signals are counted once the run's folders are locked and its log is open. One that comes before ends the
process, but a rank of `--nproc` holds it back and counts it then (launch.py). A second one, ECHO seconds or
more after the first, ends the process at once, by the signal itself, and status.json says so. Inside a
collective it has to wait, since Python runs its handler only afterwards; the launcher of `--nproc` waits
GRACE seconds.
"""

import signal
import time
from pathlib import Path
from typing import Any

from nanomegatron.comm import any_rank
from nanomegatron.faults.launch import ECHO, passed_on, take_signals
from nanomegatron.faults.lock import FolderLost, Held, Locks
from nanomegatron.mesh import Mesh
from nanomegatron.report.log import RunLog
from nanomegatron.report.steps import StepReport
from nanomegatron.step import LocalNumbers, Observer, Training

PREEMPTED = 75  # exit code


class Preempted(Exception):
    """Raised on all ranks: one of them had to stop the run before there was anything to save."""


def preempted(log: RunLog, text: str, **facts: Any) -> int:
    """Log `text`, which says that a signal has ended the run; returns the exit code."""
    log.line(text)
    log.status("preempted", exit_code=PREEMPTED, message=text, **facts)
    return PREEMPTED


class Signals:
    """Counts signals of PASSED_ON that this rank receives; on rank 0 looks for file and folders, too."""

    def __init__(
        self, log: RunLog | None = None, file: str | None = None, locks: Locks | None = None
    ) -> None:
        """Install the handlers if there is a log; the second signal writes its status there."""
        self.count = 0
        self.name = "a signal"  # another rank's
        self.first = 0.0
        self.log, self.locks = log, locks or Locks()
        self.file = Path(file) if log and log.is_main and file else None
        if log is None:
            return

        def note(number: int, _: Any) -> None:
            now = time.monotonic()
            self.first = self.first or now
            if self.count and now - self.first < ECHO:
                return
            self.count += 1
            self.name = signal.Signals(number).name
            if self.count > 1:
                log.status(
                    "failed",
                    exit_code=128 + number,
                    message=f"left at once by a second signal, {self.name}; "
                    "the same command resumes from the last save",
                )
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

        for number in passed_on():
            signal.signal(number, note)
        take_signals()

    @property
    def asked(self) -> bool:
        """Whether this rank has to stop the run: it got a signal, the file is there, or a folder is lost."""
        return self.count > 0 or (self.file is not None and self.file.exists()) or bool(self.lost())

    def lost(self) -> list[Held]:
        """Return the folders of the run that rank 0 has lost; its log leaves the run's."""
        lost = self.locks.lost()
        if any(each.name.startswith("--run-name") for each in lost):
            self.log.folder_lost = True
        return lost

    @property
    def cause(self) -> str:
        """Why the run ends, for the log of rank 0, once any rank has asked for it."""
        if self.lost():
            return "the loss of a folder"
        return f"--exit-on-preemption-file {self.file}" if self.asked and not self.count else self.name

    def anywhere(self, mesh: Mesh) -> bool:
        """Return whether any rank has to stop the run. All-reduces a number over world; the host waits."""
        return any_rank(self.asked, mesh.world, mesh.device)

    def check(self, mesh: Mesh) -> None:
        """Raise Preempted, or FolderLost, on every rank if any has to stop. Communicates as `anywhere`."""
        if self.anywhere(mesh):
            self.check_folders(mesh)
            raise Preempted(
                f"{self.cause} before the first step: nothing to save, the same command starts again"
            )

    def check_folders(self, mesh: Mesh, flag: str = "--") -> None:
        """Raise FolderLost on all ranks if a folder of these flags is lost. Communicates as `anywhere`."""
        lost = self.lost()
        if any_rank(any(each.name.startswith(flag) for each in lost), mesh.world, mesh.device):
            what = "; ".join(f"{each.name}: {each.folder} {each.lost()}" for each in lost)
            raise FolderLost(
                f"{what}; nothing more is written there; put it back and the same command resumes from the "
                "last save, or give another --run-name"
            )


class Stops(Observer):
    """Ends a training, after a step on all ranks, for a signal or --exit-duration-in-mins on any of them."""

    def __init__(self, run: Training, signals: Signals) -> None:
        self.run = run
        self.signals = signals
        self.minutes = run.config.run.exit_duration_in_mins
        self.started = time.monotonic()

    def before_sync(self) -> LocalNumbers:
        late = self.minutes is not None and time.monotonic() - self.started > 60 * self.minutes
        return {"signalled": float(self.signals.asked), "out_of_time": float(late)}

    def after_step(self, step: StepReport) -> None:
        if step.numbers["signalled"]:
            self.preempt()
        elif step.numbers["out_of_time"]:
            self.run.progress.stop = f"--exit-duration-in-mins {self.minutes}"

    def now(self) -> bool:
        """Whether a signal ends the training here. All-reduces a number over world; the host waits."""
        if not self.run.progress.preempted and self.signals.anywhere(self.run.mesh):
            self.preempt()
        return self.run.progress.preempted

    def preempt(self) -> None:
        """End the training for a signal on some rank."""
        self.run.progress.stop = self.signals.cause
        self.run.progress.preempted = True


NO_SIGNALS = Signals()  # for a run without handlers

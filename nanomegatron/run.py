"""The state of a run in one process: its parts and its progress."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nanomegatron.checkpoint.saver import Saver
from nanomegatron.config.settings import Config
from nanomegatron.dp import Buckets
from nanomegatron.faults.signals import UNHEARD, Signals
from nanomegatron.mesh import Mesh
from nanomegatron.optim import Optimizer
from nanomegatron.pp import Stages
from nanomegatron.report.log import RunLog
from nanomegatron.report.profiler import Profile
from nanomegatron.report.steps import GlobalBatch, Reporter, StepReport


@dataclass
class Run:
    """The parts of a run in one process, and its progress."""

    config: Config
    mesh: Mesh
    log: RunLog
    tokenizer: Any
    datasets: tuple  # training, validation, test; None where there is none
    loaders: tuple
    model: Stages
    grads: Buckets | None  # these and reporter: None with --eval-only, which needs no memory for them
    optimizer: Optimizer | None
    samples_before: list[int]  # consumed before each iteration, and after the last
    data_samples: list[int]  # samples that the training data was built for, by each run so far
    profile: Profile
    reporter: Reporter | None
    signals: Signals = UNHEARD
    saver: Saver | None = None  # None with --eval-only
    iteration: int = 0  # the last finished one
    skipped_samples: int = 0  # passed over by --iterations-to-skip
    pending: StepReport | None = None  # of the last step, launched and not yet reported
    stop: str = ""  # why the run ends early; "": it does not
    preempted: bool = False  # it ends because of a signal
    started: float = field(default_factory=time.monotonic)

    @property
    def consumed_samples(self) -> int:
        return self.samples_before[min(self.iteration, len(self.samples_before) - 1)]

    def next_batch(self) -> GlobalBatch:
        """Return the global batch of the next iteration."""
        first, end = self.samples_before[self.iteration : self.iteration + 2]
        lengths = Counter({self.config.data.seq_length: end - first})
        if self.config.data.variable_seq_lengths:
            lengths = Counter(self.loaders[0].lengths(first, end - first))
        return GlobalBatch(self.iteration + 1, first, end, lengths)

    def report(self, step: StepReport | None) -> None:
        """Log a step's numbers, and set `stop` if a rank has to stop; waits for the end of the step."""
        if step is None:
            return
        signalled, out_of_time, save_failed = self.reporter.report(step, self.skipped_samples)
        if signalled:
            self.stop, self.preempted = "a signal", True
        elif out_of_time:
            self.stop = f"--exit-duration-in-mins {self.config.run.exit_duration_in_mins}"
        self.saver.poll(save_failed, pending=self.pending is not None)

    def flush_report(self) -> None:
        """Report the step in flight and wait for its end; call it before anything that depends on that."""
        step, self.pending = self.pending, None
        self.report(step)

    def stop_flags(self) -> tuple[bool, bool, bool]:
        """Return (this rank got a signal, its time limit is exceeded, its save in flight has failed)."""
        minutes = self.config.run.exit_duration_in_mins
        late = minutes is not None and time.monotonic() - self.started > 60 * minutes
        return self.signals.count > 0, late, self.saver.failed

    def ends_by_signal(self) -> bool:
        """Whether any rank got a signal; if so, sets `stop`. All-reduces a number over world; waits."""
        if not self.preempted and self.signals.anywhere(self.mesh):
            self.stop, self.preempted = "a signal", True
        return self.preempted


def due(interval: int | None, iteration: int) -> bool:
    """Whether an action that is due every `interval` iterations (None: never) is due after this one."""
    return bool(interval) and iteration % interval == 0

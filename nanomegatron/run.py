"""The state of a run in one process: its parts and its progress.

Tests: tests/test_train.py. Page: docs/life-of-a-step.md.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanomegatron.checkpoint.saver import Saver
from nanomegatron.config.settings import Config
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.faults.health import Health
from nanomegatron.faults.replicas import check_replicas
from nanomegatron.faults.signals import NO_SIGNALS, Signals
from nanomegatron.faults.stragglers import Stragglers
from nanomegatron.mesh import Mesh
from nanomegatron.optim import Optimizer
from nanomegatron.pp import ModelChunks, execute
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
    model: ModelChunks
    buckets: (
        ParamAndGradBuckets | None
    )  # these, reporter and health: None with --eval-only, which needs no memory for them
    optimizer: Optimizer | None
    samples_before: list[int]  # consumed before each iteration, and after the last
    data_samples: list[int]  # samples that the training data was built for, by each run so far
    profile: Profile
    reporter: Reporter | None
    health: Health | None
    signals: Signals = NO_SIGNALS
    data: dict = field(default_factory=dict)  # on rank 0 what it is trained on (data/identity.py)
    saver: Saver | None = None  # None with --eval-only
    forward_backward: Callable[..., None] = execute  # of a training step, as `pp.execute`
    iteration: int = 0  # the last finished one
    skipped_samples: int = 0  # not read, or of a spike without an update
    skipped_iterations: set[int] = field(default_factory=set)  # by rollbacks, not by --iterations-to-skip
    evaluated: int = 0  # the step of the last complete evaluation; a signal may have deferred one
    rollbacks: Counter[int] = field(default_factory=Counter)  # to each checkpoint, by iteration
    pending: StepReport | None = None  # of the last step, launched and not yet reported
    stop: str = ""  # why the run ends early; "": it does not
    preempted: bool = False  # it ends because of a signal
    stragglers: Stragglers | None = None
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.reporter is not None and self.config.run.log_straggler:
            self.stragglers = Stragglers(self.mesh, self.log, self.config.run.log_interval)

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
        """Log a step's numbers, set `stop` if a rank has to stop; waits for the step. Raises BadSteps."""
        if step is None:
            return
        numbers = self.reporter.numbers(step)
        self.reporter.report(step, self.skipped_samples)
        if self.stragglers is not None:
            self.stragglers.add(step)
        if numbers.signalled:
            self.stop = self.signals.cause
            self.preempted = True
        elif numbers.out_of_time:
            self.stop = f"--exit-duration-in-mins {self.config.run.exit_duration_in_mins}"
        self.saver.poll(numbers.save_failed, pending=self.pending is not None)
        self.health.judge(numbers)
        if self.health.spike and self.config.faults.on_spike == "skip":
            self.skipped_samples += numbers.batch.size
            self.health.spike = None

    def flush_report(self) -> None:
        """Report the step in flight and wait for its end; call it before anything that depends on that."""
        step = self.pending
        self.pending = None
        self.report(step)
        if self.reporter is not None:
            self.reporter.energy.pause()

    def check_replicas(self) -> None:
        """Compare all replicas if it is time. Raises MachineFault on every rank if two differ."""
        if due(self.config.run.check_replicas, self.iteration):
            self.flush_report()
            self.buckets.wait_params()
            check_replicas(self.model.parameters(), self.mesh, self.iteration)

    def stop_flags(self) -> tuple[bool, bool, bool]:
        """Return (this rank has to stop, its time limit is exceeded, its save in flight has failed)."""
        minutes = self.config.run.exit_duration_in_mins
        late = minutes is not None and time.monotonic() - self.started > 60 * minutes
        return self.signals.asked, late, self.saver.failed

    def ends_by_signal(self) -> bool:
        """Whether any rank has to stop; if so, sets `stop`. All-reduces a number over world; waits."""
        if not self.preempted and self.signals.anywhere(self.mesh):
            self.stop = self.signals.cause
            self.preempted = True
        return self.preempted


def due(interval: int | None, iteration: int) -> bool:
    """Whether an action that is due every `interval` iterations (None: never) is due after this one."""
    return bool(interval) and iteration % interval == 0

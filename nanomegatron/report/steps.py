"""Brings the numbers of a step from the device to the log, while the host launches the next step.

train_step t      device tensors -> one copy to pinned memory, in flight          StepReport
train_step t+1    launched
step t            the copy has arrived: observers look at it, then it is logged        on every rank
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanomegatron.batch import Batch
from nanomegatron.optim import NO_LIMITS, StepLimits
from nanomegatron.report.energy import Energy, open_meter
from nanomegatron.report.speed import machine_gpus, peak_memory, speed_of
from nanomegatron.report.timers import Clock, Timers
from nanomegatron.report.trace import Tracer, trace_title
from nanomegatron.report.trace_draw import write
from nanomegatron.report.traffic import Traffic, ledger
from nanomegatron.step import GlobalBatch, LocalNumbers, Numbers, Observer, Training

FLAGS = ("signalled", "out_of_time", "save_failed", "save_published")  # numbers of ranks, that are not logged


@dataclass(frozen=True)
class StepNumbers:
    """What decides about a step, on the host; the same on every rank but for `part_norms`."""

    batch: GlobalBatch
    loss: float
    grad_norm: float
    good: bool  # it has updated the parameters
    loss_scale: float
    part_norms: torch.Tensor  # `[parts]`, on the device: to read them waits for the step in flight

    @property
    def finite(self) -> bool:
        """Whether loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class StepReport:
    """The numbers of one step, in flight to the host; with `read` they are there, by name.

    `clock`, `timed`, `waits`: stopped clocks of the step, of its parts, and of what this rank waited for;
    `traffic`: calls and bytes that it communicated.
    """

    def __init__(
        self,
        batch: GlobalBatch,
        numbers: Numbers,
        clock: Clock,
        timed: list[tuple[str, Clock]],
        traffic: Traffic,
    ) -> None:
        """Start the copy to the host. numbers: those of `train_step`, 0-d, or tables of counters.py."""
        numbers = dict(numbers)
        self.batch = batch
        self.part_norms = numbers.pop("part_norms")
        self.shapes = {name: number.shape for name, number in numbers.items()}
        values = torch.cat([number.double().reshape(-1) for number in numbers.values()])
        self.values = torch.empty(len(values), dtype=torch.float64, pin_memory=values.is_cuda)
        self.values.copy_(values, non_blocking=True)
        self.clock = clock.stop()
        self.timed = timed
        self.traffic, self.waits = traffic.end_step()
        self.numbers: dict[str, Any] = {}
        self.milliseconds = 0.0  # of the step, once it is read

    def read(self) -> dict[str, Any]:
        """Return the numbers on the host, by name; the first call waits for the step's end."""
        if not self.numbers:
            self.milliseconds = self.clock.milliseconds()  # waits
            values = self.values.split([shape.numel() for shape in self.shapes.values()])
            self.numbers = {
                name: x.view(shape).tolist()
                for x, (name, shape) in zip(values, self.shapes.items(), strict=True)
            }
        return self.numbers

    def judged(self) -> StepNumbers:
        """Return what decides about the step."""
        found = self.read()
        return StepNumbers(
            self.batch,
            found["lm_loss"],
            found["grad_norm"],
            bool(found["good"]),
            found["loss_scale"],
            self.part_norms,
        )


class Reporter(Observer):
    """Times and traces the steps of a training, and logs their numbers. Comes behind what adds to them."""

    def __init__(self, run: Training) -> None:
        config = run.config.run
        self.run = run
        self.config = config
        self.log = run.log
        self.mesh = run.mesh
        self.batch: GlobalBatch | None = None  # of the step that is launched
        self.pending: StepReport | None = None  # launched, and not yet logged
        self.timers = Timers(config.timing_log_level, config.timing_log_option, run.mesh.device)
        self.tracer = Tracer(run.mesh, config.trace_iterations if config.trace_dir else (), self.timers)
        gpus = machine_gpus(run.mesh) if run.mesh.rank == 0 else []
        self.energy = Energy(open_meter(gpus), run.mesh.world.size)

    def launch(self, step: Callable[..., Numbers], limits: StepLimits = NO_LIMITS) -> StepReport:
        """Launch step(run, limits), with clocks around it and its phases; the host does not wait for it."""
        self.timers.take()  # those of a step that is only looked at (faults/alive.py)
        clock = Clock(self.mesh.device)
        self.timers.phase("batch-generator", level=2)
        numbers = step(self.run, limits)
        self.timers.phase()
        if self.config.log_params_norm:
            numbers["params_norm"] = self.run.optimizer.params_norm()
        report = StepReport(self.batch, numbers, clock, self.timers.take(), self.mesh.observer)
        recording = self.tracer.end()  # after the step's clock has stopped: drawing takes a second
        if recording:
            with self.log.attempt("trace"):
                name = self.log.folder.name
                title = trace_title(name, self.run.config, self.mesh)
                for line in write(recording, Path(self.config.trace_dir) / name, title):
                    self.log.line(f"trace   {line}")
        return report

    def report_previous(self, launched: StepReport | None = None) -> None:
        """Wait for the end of the step before `launched`, and report it; None: no step is behind it."""
        previous = self.pending
        self.pending = launched
        if previous is None:
            return
        with self.mesh.observer.wait():
            previous.read()
        for observer in self.run.observers:
            observer.after_step(previous)

    def flush(self) -> None:
        """Report the step in flight and wait for its end; call it before anything that depends on that."""
        self.report_previous()
        self.energy.pause()

    def before_step(self, batch: GlobalBatch, microbatches: list[Batch]) -> None:
        """Begin to count communication, to trace and to time."""
        self.batch = batch
        self.mesh.observer.start_step(launching=self.mesh.device.type == "cuda")
        pipeline = self.run.model.pipeline
        self.tracer.begin(batch.iteration, pipeline.plan(len(microbatches))[0], pipeline.placed)
        self.timers.phase("forward-backward")

    def before_sync(self) -> LocalNumbers:
        self.timers.phase("all-grads-sync")
        return {}

    def before_update(self) -> Numbers:
        """Count zeros among the gradients, if they are logged."""
        zeros = {}
        if self.config.log_num_zeros_in_grad:
            zeros["num_zeros"] = self.run.optimizer.num_zeros()
        self.timers.phase("optimizer")
        return zeros

    def after_step(self, step: StepReport) -> None:
        """Log a step's numbers."""
        log = self.log
        log.step(self.record(step))
        self.timers.add(step.timed)
        if log.line_due(step.batch.iteration):
            with log.attempt("timers"):
                if self.timers.level:
                    log.line(self.timers.text(self.mesh.world))
            with log.attempt("traffic"):
                for line in ledger(step.traffic) if self.config.log_comm else ():
                    log.line(f"comm    {line}")

    def record(self, step: StepReport) -> dict[str, Any]:
        """Return what is logged of a step: its numbers, its speed, energy and memory."""
        batch = step.batch
        found = {name: value for name, value in step.read().items() if name not in FLAGS}
        good = found.pop("good")
        if not good:
            found["next_lr"] = found["lr"]  # a bad step holds the schedule
        vocab = self.run.model[0].padded_vocab_size
        return {
            "iteration": batch.iteration,
            "consumed_samples": batch.end,
            "global_batch_size": batch.size,
            **found,
            **speed_of(self.run.config, self.mesh, vocab, batch.lengths, step.milliseconds / 1e3),
            **self.energy.step(batch.tokens, batch.iteration % self.config.log_interval == 0),
            "skipped": int(not good),
            "skipped_samples": self.run.progress.skipped_samples,
            "peak_mem_gib": (peak_memory(self.mesh.device) + self.run.buckets.shared_bytes) / 2**30,
        }

    def end(self) -> None:
        if energy := self.energy.summary():
            self.log.line(f"energy  {energy}")

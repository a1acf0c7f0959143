"""Brings the numbers of a step from the device to the log, while the host launches the next step.

train_step t      device tensors -> one copy to pinned memory, in flight          StepReport
train_step t+1    launched
report t          the copy has arrived: log line, StepNumbers for faults/health.py      on every rank
"""

import math
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanomegatron.config.settings import Config
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.mesh import Mesh, Traffic
from nanomegatron.optim import StepStats
from nanomegatron.plan.flops import CONVENTIONS, flops_per_iteration, mfu
from nanomegatron.plan.gpus import device_peak
from nanomegatron.pp import ModelChunks
from nanomegatron.report.banner import local_ranks
from nanomegatron.report.counters import ExpertLoad, Fp8Stats
from nanomegatron.report.energy import Energy, open_meter
from nanomegatron.report.log import RunLog
from nanomegatron.report.timers import Clock, Timers
from nanomegatron.report.trace import Tracer, trace_title

FLAGS = ("signalled", "out_of_time", "save_failed")  # numbers of ranks, as in `Run.stop_flags`


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of an iteration, [first, end), and the number of samples of each length in tokens."""

    iteration: int
    first: int
    end: int
    lengths: Counter[int]  # length -> samples; documents count without padding

    @property
    def size(self) -> int:
        return self.end - self.first

    @property
    def tokens(self) -> int:
        """The number of tokens, masked ones included, padding excluded."""
        return sum(length * n for length, n in self.lengths.items())


@dataclass(frozen=True)
class StepNumbers:
    """What the host knows of one step; the same on every rank but for `part_norms`."""

    batch: GlobalBatch
    loss: float
    grad_norm: float
    good: bool  # it has updated the parameters
    loss_scale: float
    signalled: bool  # a rank got a signal
    out_of_time: bool  # a rank has run for longer than --exit-duration-in-mins
    save_failed: bool  # on a rank, the save in flight
    part_norms: torch.Tensor  # `[parts]`, on the device: to read them waits for the step in flight

    @property
    def finite(self) -> bool:
        """Whether loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class StepReport:
    """The numbers of one step, in flight to the host."""

    def __init__(
        self,
        batch: GlobalBatch,
        shared: torch.Tensor,
        stats: StepStats,
        extras: dict[str, torch.Tensor],
        clock: Clock,
        timed: list[tuple[str, Clock]],
        traffic: Traffic,
    ) -> None:
        """Start the copy to the host. shared `[4]`: loss, and the numbers of ranks with each of FLAGS.

        extras: further numbers for the log, 0-d, or tables of counters.py. traffic: calls and bytes that this
        rank communicated in the step.
        """
        numbers = dict(zip(("lm_loss", *FLAGS), shared, strict=True))
        numbers |= vars(stats) | extras
        self.batch = batch
        self.part_norms, self.names = numbers.pop("part_norms"), list(numbers)
        self.shapes = [number.shape for number in numbers.values()]
        values = torch.cat([number.double().flatten() for number in numbers.values()])
        self.values = torch.empty(len(values), dtype=torch.float64, pin_memory=values.is_cuda)
        self.values.copy_(values, non_blocking=True)
        self.clock, self.timed = clock.stop(), timed
        self.traffic, self.waits = traffic.end_step()
        self.found: tuple[float, dict[str, Any]] | None = None

    def read(self) -> tuple[float, dict[str, Any]]:
        """Return the step's milliseconds, and its numbers by name; the first call waits for its end."""
        if self.found is None:
            milliseconds = self.clock.milliseconds()  # waits
            values = self.values.split([shape.numel() for shape in self.shapes])
            lists = [x.view(shape).tolist() for x, shape in zip(values, self.shapes, strict=True)]
            self.found = milliseconds, dict(zip(self.names, lists, strict=True))
        return self.found


class Reporter:
    """Logs the steps of a run; has the objects that observe them: timers, tracer, FP8 and expert counters."""

    def __init__(
        self, config: Config, mesh: Mesh, log: RunLog, model: ModelChunks, grads: ParamAndGradBuckets
    ) -> None:
        run = config.run
        self.config, self.mesh = config, mesh
        self.log, self.grads = log, grads
        self.padded_vocab_size = model[0].padded_vocab_size
        self.timers = Timers(run.timing_log_level, run.timing_log_option, mesh.device)
        folder = Path(run.trace_dir) / log.folder.name if run.trace_dir else None
        title = trace_title(log.folder.name, config, mesh)
        self.tracer = Tracer(mesh, folder, run.trace_iterations, self.timers, log.attempt, title)
        self.fp8_stats = Fp8Stats(model.scales, mesh.world, mesh.pp) if run.log_fp8_stats else None
        self.expert_load = ExpertLoad(model, config.model, mesh) if config.model.num_experts else None
        self.energy = Energy(open_meter(machine_gpus(mesh) if mesh.rank == 0 else []), mesh.world.size)

    def numbers(self, step: StepReport) -> StepNumbers:
        """Wait for a step's numbers and return those that decide what follows."""
        with self.mesh.traffic.wait():
            _, found = step.read()
        flags = (bool(found[name]) for name in FLAGS)
        values = found["lm_loss"], found["grad_norm"], bool(found["good"]), found["loss_scale"]
        return StepNumbers(step.batch, *values, *flags, step.part_norms)

    def report(self, step: StepReport, skipped_samples: int) -> None:
        """Wait for one step's numbers and log them.

        skipped_samples: samples of --iterations-to-skip and of skipped spikes so far in the run; only logged.
        """
        run, log, batch = self.config.run, self.log, step.batch
        milliseconds, numbers = step.read()
        numbers = {name: value for name, value in numbers.items() if name not in FLAGS}
        good = numbers.pop("good")
        if not good:
            numbers["next_lr"] = numbers["lr"]  # a bad step holds the schedule
        if (table := numbers.pop("fp8", None)) is not None:
            log.details("fp8", batch.iteration, batch.end, self.fp8_stats.by_name(table))
        if (table := numbers.pop("experts", None)) is not None:
            numbers |= self.expert_load.means(table)
            if run.moe_per_layer_logging:
                log.details("experts", batch.iteration, batch.end, self.expert_load.by_name(table))
        record = dict(iteration=batch.iteration, consumed_samples=batch.end, global_batch_size=batch.size)
        record |= numbers
        record |= rates(self.config, self.mesh, self.padded_vocab_size, batch.lengths, milliseconds / 1e3)
        record |= self.energy.step(batch.tokens, batch.iteration % run.log_interval == 0)
        record |= dict(skipped=int(not good), skipped_samples=skipped_samples)
        record["peak_mem_gib"] = (peak_memory(self.mesh.device) + self.grads.shared_bytes) / 2**30
        log.step(record)
        self.timers.add(step.timed)
        if log.line_due(batch.iteration):
            with log.attempt("timers"):
                if self.timers.level:
                    log.line(self.timers.text(self.mesh.world))
            with log.attempt("traffic"):
                for line in ledger(step.traffic) if run.log_comm else ():
                    log.line(f"comm    {line}")


def rates(
    config: Config, mesh: Mesh, padded_vocab_size: int, lengths: Counter[int], seconds: float
) -> dict[str, float | None]:
    """Return the speed of a step of `seconds` with these sequence lengths, in every unit that is logged."""
    model, world = config.model, mesh.world.size
    peak = None
    if mesh.device.type == "cuda":
        peak = device_peak(torch.cuda.get_device_name(mesh.device), config.dtype_name)
    flops = {
        c: sum(flops_per_iteration(model, padded_vocab_size, length, n, c) for length, n in lengths.items())
        for c in CONVENTIONS
    }
    headline, *others = (flop / seconds / world / 1e12 for flop in flops.values())
    result = {
        "step_time_ms": 1e3 * seconds,
        "tokens_per_s": sum(length * n for length, n in lengths.items()) / seconds,
        "tflops_per_gpu": headline,
        "mfu": mfu(flops[CONVENTIONS[0]], seconds, world, peak),
    }
    if config.run.log_throughput:
        result |= {f"tflops_per_gpu_{c}": x for c, x in zip(CONVENTIONS[1:], others, strict=True)}
    return result


def machine_gpus(mesh: Mesh) -> list[str]:
    """Return the UUIDs of the GPUs of this machine's ranks, as far as this rank sees them; [] on a CPU."""
    if mesh.device.type != "cuda":
        return []
    seen = min(local_ranks(mesh.world.size), torch.cuda.device_count())  # it may see only its own
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(seen)]


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of the allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(ImportError):  # only on Unix
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return 0


def ledger(traffic: dict[tuple[str, str, str], int]) -> list[str]:
    """Return the counts of `comm.count_traffic` as lines of a table, one per kind of communication."""
    kinds = sorted({key[:2] for key in traffic})
    rows = [(axis, kind, traffic[axis, kind, "calls"], traffic[axis, kind, "bytes"]) for axis, kind in kinds]
    return [
        f"{axis:>6} {kind:<14} {calls:6d} calls {size_text(size)} a step" for axis, kind, calls, size in rows
    ]


def size_text(size: int) -> str:
    """Format a number of bytes, as wide as all others."""
    if size < 2**10:
        return f"{size:16,d} B"
    return f"{size / 2**10:14,.1f} KiB"

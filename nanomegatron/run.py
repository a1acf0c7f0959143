"""What stands around the training loop: the parts of a run, its first lines, its clock and reports.

A step's numbers take this way, so that the host never waits for the device:

    train_step t      device tensors -> one copy to pinned memory, under way          StepReport
    train_step t+1    launched
    report t          the copy has arrived: log line, stop wishes, bad steps          on every rank alike
"""

import math
import resource
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nanomegatron import comm
from nanomegatron.build import Paths
from nanomegatron.config.batch import stages
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import Config
from nanomegatron.data.packing import Ranks
from nanomegatron.dp import Buckets
from nanomegatron.faults.signals import UNHEARD, Signals
from nanomegatron.flops import (
    CONVENTIONS,
    device_peak,
    flops_per_iteration,
    mfu,
    parameter_count,
    stage_layers,
)
from nanomegatron.mesh import Mesh
from nanomegatron.ops.attention import choose_backend
from nanomegatron.ops.kernels import why_not
from nanomegatron.ops.paths import summary
from nanomegatron.optim import Optimizer, StepStats
from nanomegatron.plan.layer import Machine
from nanomegatron.plan.memory import chunks_kept, describe, memory_of_ranks
from nanomegatron.pp import Stages
from nanomegatron.report.counters import ExpertLoad, Fp8Stats
from nanomegatron.report.log import RunLog
from nanomegatron.report.profiler import Profile
from nanomegatron.report.timers import Clock, Timers
from nanomegatron.report.trace import Tracer


@dataclass
class Run:
    """What one process works with, and how far it is."""

    config: Config
    mesh: Mesh
    log: RunLog
    tokenizer: Any
    datasets: tuple  # training, validation, test; None where there is none
    loaders: tuple
    model: Stages
    grads: Buckets
    optimizer: Optimizer
    padded_vocab_size: int
    samples_before: list[int]  # consumed before each iteration, and after the last
    data_samples: list[int]  # how many the training data was made for, run by run
    timers: Timers
    tracer: Tracer
    profile: Profile
    paths: Paths
    fp8_stats: Fp8Stats | None = None  # of --log-fp8-stats
    expert_load: ExpertLoad | None = None  # of a model with experts
    iteration: int = 0  # finished
    skipped_samples: int = 0  # passed over by --iterations-to-skip
    pending: "StepReport | None" = None  # launched, not yet reported
    stop: str = ""  # why the run ends early
    preempted: bool = False  # it ends because of a signal
    signals: Signals = UNHEARD
    started: float = field(default_factory=time.monotonic)

    def batch_size(self, iteration: int) -> int:
        """Sequences of an iteration, counted from 1."""
        return self.samples_before[iteration] - self.samples_before[iteration - 1]

    @property
    def consumed_samples(self) -> int:
        return self.samples_before[min(self.iteration, len(self.samples_before) - 1)]

    @property
    def wants_to_stop(self) -> tuple[bool, bool]:
        """Whether this rank was signalled, and whether its time is up."""
        minutes = self.config.run.exit_duration_in_mins
        return self.signals.count > 0, minutes is not None and time.monotonic() - self.started > 60 * minutes

    def ends_by_signal(self) -> bool:
        """Whether any rank was signalled; then the run is to end. Communicates a number over world; waits."""
        if not self.preempted and self.signals.anywhere(self.mesh):
            self.stop, self.preempted = "a signal", True
        return self.preempted


def run_folder(config: Config) -> Path:
    """runs/NAME, where everything that a run writes is found."""
    return Path("runs") / config.run.run_name


def print_errors(error: ValueError) -> None:
    """One line an error on stderr."""
    messages = getattr(error, "messages", [str(error)])
    print(f"train.py: {len(messages)} error{'s' * (len(messages) > 1)}, nothing was started", file=sys.stderr)
    for message in messages:
        print(f"  {message}", file=sys.stderr)


def due(interval: int | None, iteration: int) -> bool:
    """Whether something that happens every `interval` iterations happens after this one."""
    return bool(interval) and iteration % interval == 0


def banner(run: Run, notes: list[str], vocab_size: int) -> None:
    """The first lines of a run: what runs, on what, and why."""
    config, mesh, say = run.config, run.mesh, run.log.line
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    backend = "no communication"
    if mesh.world.size > 1:
        backend = config.parallel.distributed_backend or ("nccl" if mesh.device.type == "cuda" else "gloo")
    layout = " ".join(f"{axis.name}{axis.size}" for axis in (mesh.tp, mesh.pp, mesh.dp, mesh.cp, mesh.ep))
    say(
        f"nanomegatron 0.1 | commit {commit()} | torch {torch.__version__} | {device} ({backend}) | "
        f"{mesh.world.size} rank{'s' * (mesh.world.size > 1)}, {torch.get_num_threads()} threads | {layout}"
    )
    for note in notes:
        say(f"note    {note}")
    model, size = config.model, parameter_count(config.model, vocab_size)
    precision = config.precision
    fp8 = f", FP8 {precision.fp8_format} {precision.fp8_recipe}" if precision.fp8_format else ""
    say(
        f"model   {model.num_layers} layers, hidden {model.hidden_size}, vocab {vocab_size} -> "
        f"{run.padded_vocab_size} | {size / 1e6:.2f} M params, {config.dtype_name}{fp8} | "
        f"expected first loss {expected_first_loss(model, vocab_size):.2f}, ln({vocab_size}) = "
        f"{math.log(vocab_size):.2f} for equal odds"
    )
    machine = Machine(gpu=mesh.device.type == "cuda", kernels=not why_not(mesh.device))
    say(f"memory  {describe(*memory_of_ranks(config, vocab_size, machine))}")
    if sharding := run.grads.describe():
        say(f"dp      {sharding}")
    if mesh.pp.size > 1:
        layers = stage_layers(config, run.padded_vocab_size)
        ranks = (" + ".join(str(len(layers[stage])) for stage in stages) for stages in run.model.placed)
        kept = " | ".join(map(str, chunks_kept(config)))
        say(f"pp      {run.model.name}: layers {' | '.join(ranks)}, microbatches of a piece kept {kept}")
    peers = run.paths.peers
    if run.paths.linear and mesh.tp.size > 1:
        say(f"tp      matmuls in pieces, sent by {peers.describe(mesh.tp)}")
    gathers = model.num_experts and model.moe_token_dispatcher_type == "allgather"
    if gathers and mesh.etp_ep.size > 1:
        say(f"ep      tokens in blocks, sent by {peers.describe(mesh.etp_ep)}")
    if mesh.cp.size > 1:
        path = f" | rings by {peers.describe(mesh.cp, 'messages')}" * (mesh.device.type == "cuda")
        say(f"cp      {cp_text(config)}{path}")
    core = choose_backend(
        model.attention_backend, mesh.device, getattr(torch, config.dtype_name), model.attention_dropout
    )
    documents = config.data.reset_attention_mask or config.data.variable_seq_lengths
    if core == "fused" and (documents or any(w is not None for w in model.windows)):
        core += ", flash for windows and documents"
    say(f"kernels {summary(mesh.device, model)} | attention {core}")
    if model.attention_dropout and core != "unfused":
        say("note    the fused kernel's attention dropout depends on the layout; unfused does not")
    sizes = [f"{len(d)} {n}" for n, d in zip(("train", "valid", "test"), run.datasets, strict=True) if d]
    say(
        f"data    {', '.join(sizes)} {batch_text(config)} | "
        f"{config.run.train_iters} iterations | seed {config.run.seed}"
    )
    grows = [f"{size} from sample {start}" for start, size in stages(config.data, mesh.dp.size)]
    if len(grows) > 1:
        shown = [*grows[:3], "...", *grows[-2:]] if len(grows) > 6 else grows
        say(f"batch   {', '.join(shown)} | {run.samples_before[-1]} samples in all")
    say(f"files   {run.log.folder}/ | Ctrl-C saves and stops, the same command goes on from there")


def cp_text(config: Config) -> str:
    """How the cp ranks share rows, and how attention communicates in how many layers."""
    model, parallel, total = config.model, config.parallel, config.model.num_layers
    types = parallel.cp_types(total)
    sizes = " x ".join(map(str, parallel.hierarchical_context_parallel_sizes))
    how = {"p2p": "ring", "a2a": "heads", "allgather": "all keys", "a2a+p2p": f"heads, ring: {sizes}"}
    counts = Counter(types).items()
    parts = [f"{name} ({how[name]})" + f" in {n} of {total} layers" * (n < total) for name, n in counts]
    gathered = sum("p2p" in name and w is not None for name, w in zip(types, model.windows, strict=True))
    rest = f" | {gathered} of {total} layers with a window: keys gathered, no ring" * (gathered > 0)
    return f"zigzag over {parallel.context_parallel_size} ranks by {', '.join(parts)}{rest}"


def batch_text(config: Config) -> str:
    """What a global batch is made of."""
    data, dp = config.data, config.parallel.data_parallel_size
    micro, batch = data.micro_batch_size, data.global_batch_size
    if not data.variable_seq_lengths:
        each = f"{micro} x {batch // micro // dp} microbatches x dp {dp}"
        return f"samples of {data.seq_length} tokens | batch {batch} = {each}"
    ranks = Ranks.of(config)
    groups = " or ".join(map(str, ranks.sizes))
    packs = f"in packs of up to {ranks.room(1)} tokens a rank, each on {groups} of dp {dp} x cp {ranks.cp}"
    return f"documents of up to {data.seq_length} tokens | batch {batch} {packs}"


def expected_first_loss(model: TransformerConfig, vocab_size: int) -> float:
    """Loss of fresh weights on any text: logits of a unit-variance state are normal with variance h * std^2.

    log E[exp(normal)] adds half of that variance to the ln(vocab_size) of equal odds. Tied weights begin by
    betting on the token just read: text that often repeats one (bytes: runs of spaces) starts lower.
    """
    return math.log(vocab_size) + model.hidden_size * model.init_method_std**2 / 2


def commit() -> str:
    """The checkout's commit, marked when there are changes; "unknown" outside a checkout."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:
        return "unknown"


class StepReport:
    """The numbers of one step, on their way to the host."""

    def __init__(
        self,
        iteration: int,
        shared: torch.Tensor,
        stats: StepStats,
        extras: dict[str, torch.Tensor],
        clock: Clock,
        timed: list[tuple[str, Clock]],
        traffic: Counter,
    ) -> None:
        """shared: loss, ranks that were signalled, ranks whose time is up; the same on all ranks.

        extras: further numbers for the log, 0-d, or tables of counters.py. traffic: what
        this rank has communicated in the step.
        """
        numbers = (
            dict(zip(("lm_loss", "signalled", "out_of_time"), shared, strict=True)) | vars(stats) | extras
        )
        self.iteration, self.part_norms, self.names = iteration, numbers.pop("part_norms"), list(numbers)
        self.shapes = [number.shape for number in numbers.values()]
        values = torch.cat([number.double().flatten() for number in numbers.values()])
        self.values = torch.empty(len(values), dtype=torch.float64, pin_memory=values.is_cuda)
        self.values.copy_(values, non_blocking=True)
        self.clock, self.timed, self.traffic = clock.stop(), timed, dict(traffic)

    def read(self) -> tuple[float, dict[str, Any]]:
        """Milliseconds, and the numbers by name."""
        milliseconds = self.clock.milliseconds()  # waits
        values = self.values.split([shape.numel() for shape in self.shapes])
        lists = [x.view(shape).tolist() for x, shape in zip(values, self.shapes, strict=True)]
        return milliseconds, dict(zip(self.names, lists, strict=True))


def report(run: Run, step: StepReport | None) -> None:
    """Read one step's numbers, log them, and heed a wish to stop."""
    if step is None:
        return
    milliseconds, numbers = step.read()
    signalled, out_of_time, finite = (numbers.pop(name) for name in ("signalled", "out_of_time", "finite"))
    if signalled:
        run.stop, run.preempted = "a signal", True
    elif out_of_time:
        run.stop = f"--exit-duration-in-mins {run.config.run.exit_duration_in_mins}"
    if not finite:
        name_bad_step(run, step, numbers["lm_loss"], numbers["grad_norm"])
        numbers["next_lr"] = numbers["lr"]  # a bad step holds the schedule
    batch, fp8, load = run.batch_size(step.iteration), numbers.pop("fp8", None), numbers.pop("experts", None)
    at = step.iteration, run.samples_before[step.iteration]
    if fp8 is not None:
        run.log.details("fp8", *at, run.fp8_stats.by_name(fp8))
    if load is not None:
        numbers |= run.expert_load.means(load)
        if run.config.run.moe_per_layer_logging:
            run.log.details("experts", *at, run.expert_load.by_name(load))
    run.log.step(
        {
            "iteration": step.iteration,
            "consumed_samples": run.samples_before[step.iteration],
            "global_batch_size": batch,
            **numbers,
            **rates(run, lengths_of(run, step.iteration), milliseconds / 1e3),
            "skipped": int(not finite),
            "skipped_samples": run.skipped_samples,
            "peak_mem_gib": (peak_memory(run.mesh.device) + run.grads.shared_bytes) / 2**30,
        }
    )
    run.timers.add(step.timed)
    if step.iteration % run.config.run.log_interval == 0:
        with run.log.attempt("timers"):
            if run.timers.level:
                run.log.line(run.timers.text(run.mesh.world))
        with run.log.attempt("traffic"):
            if run.config.run.log_comm:
                for line in comm.ledger(step.traffic):
                    run.log.line(f"comm    {line}")


def settle(run: Run) -> None:
    """Report the step that is still under way, before anything that must know how it ended."""
    step, run.pending = run.pending, None
    report(run, step)


def lengths_of(run: Run, iteration: int) -> Counter[int]:
    """How many sequences of which lengths an iteration takes; whole documents count without padding."""
    first, size = run.samples_before[iteration - 1], run.batch_size(iteration)
    if run.config.data.variable_seq_lengths:
        return Counter(run.loaders[0].lengths(first, size))
    return Counter({run.config.data.seq_length: size})


def rates(run: Run, lengths: Counter[int], seconds: float) -> dict[str, float | None]:
    """The speed of a step of such sequences in `seconds`, in every unit that is logged."""
    config, world = run.config, run.mesh.world.size
    peak = None
    if run.mesh.device.type == "cuda":
        peak = device_peak(torch.cuda.get_device_name(run.mesh.device), config.dtype_name)
    model, vocab = config.model, run.padded_vocab_size
    flops = {
        c: sum(flops_per_iteration(model, vocab, length, n, c) for length, n in lengths.items())
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


def name_bad_step(run: Run, step: StepReport, loss: float, norm: float) -> None:
    """Say which numbers of a step were not finite: each rank names the first of its own gradients."""
    first, behind = run.samples_before[step.iteration - 1 : step.iteration + 1]
    names = zip(run.optimizer.part_names, step.part_norms.tolist(), strict=True)
    bad = next((name for name, value in names if not math.isfinite(value)), None)
    if run.mesh.rank == 0 or bad:
        run.log.warn(
            f"step {step.iteration} (samples {first} to {behind - 1}): loss {loss}, "
            f"gradient norm {norm}, first bad gradient {bad or 'on another rank'}; the step changed nothing"
        )


def peak_memory(device: torch.device) -> int:
    """Largest memory so far in bytes: of the allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""The parts of bench_cp.py that train: Llama-3-8B's shape, built and stepped by train.py itself.

    train     32k, 64k, 128k: a row of so many tokens, one microbatch a step; the first two with all layers,
              the second makes the outputs of norms and SwiGLU again, the third has 16 layers
    memory    all layers, longer and longer rows; nothing, those outputs, or whole layers are made again.
              Measured where the plan says that it fits and a step will not take long, predicted everywhere
    dynamic   fixed, dynamic: the same documents, whose lengths have a long tail (long_tail.py), a step in
              turn, eight layers each; `--only dynamic --profile dynamic` profiles one by itself

Common to all: cp over all ranks, optimizer sharded over them, both overlaps, fused loss. --flags go to every
run, --add makes others. A step's time is train.py's own, of the slowest rank: from its batch to its update,
by events on the GPU; its numbers are read when the next step is under way. MFU is Megatron's count. Peak
memory is by torch's allocator, NCCL's own is not in it; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
keeps gaps small. Where a row has several lengths, tokens are those of documents; padding is not counted.
"""

import argparse
import contextlib
import io
import math
import statistics
import tempfile
import time
import traceback
from collections import Counter

import torch

import train
from benchmarks import bench_parallel
from benchmarks.bench_cp_report import run_line
from benchmarks.bench_parallel import FailedSomewhere, gib
from benchmarks.contenders import COMMON, SMALL
from benchmarks.kernel_times import profiled
from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import ConfigError, parse
from nanomegatron.config.settings import Config
from nanomegatron.flops import flops_per_iteration
from nanomegatron.mesh import Mesh
from nanomegatron.plan.memory import memory
from nanomegatron.report.log import RunLog
from nanomegatron.report.steps import StepReport, rates

ALL = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --cross-entropy-loss-fusion"
SOME = "--recompute-granularity selective --recompute-modules mlp_act layernorm"
WHOLE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
RUNS = {  # thousands of tokens, layers, flags; the first three are usual
    "32k": (32, 32, ""),
    "64k": (64, 32, SOME),
    "128k": (128, 16, ""),
    "32k a2a": (32, 32, "--cp-comm-type a2a"),
    "32k allgather": (32, 32, "--cp-comm-type allgather"),
    "32k fp8": (32, 32, "--fp8-format hybrid --fp8-recipe delayed"),
    "64k fp8": (64, 32, f"{SOME} --fp8-format hybrid --fp8-recipe delayed"),
    "128k a2a": (128, 16, "--cp-comm-type a2a"),
    "128k allgather": (128, 16, "--cp-comm-type allgather"),
    "128k all layers": (128, 32, WHOLE),
}
USUAL = ["32k", "64k", "128k"]
AGAIN = {"nothing again": "", "norms, SwiGLU again": SOME, "layers again": WHOLE}
GUESS = 0.4  # of the peak, to tell how long a step will take
OUTSIDE = 5 * 2**30  # bytes of a GPU that torch's allocator does not have: CUDA's, NCCL's, gaps


class Training:
    """A run as train.py makes it, which somebody else steps."""

    def __init__(self, argv: list[str], sitting: bench_parallel.Sitting) -> None:
        """Raises ConfigError. Communicates over all ranks."""
        parsed, config = train.settings(argv, sitting.world)
        key = config.parallel, config.model.num_kv_heads
        if key not in sitting.meshes:
            sitting.meshes[key] = Mesh.build(config.parallel, sitting.world, sitting.device, key[1])
        mesh = sitting.meshes[key]
        log = RunLog(config.run.folder, config, mesh.rank, mesh.label, io.StringIO())
        self.run = train.set_up(parsed, config, mesh, log)
        self.run.optimizer.cast_weights()

    def step(self) -> StepReport:
        """The next iteration, launched."""
        told = train.train_step(self.run)
        self.run.iteration += 1
        return told

    def close(self) -> None:
        """End its threads."""
        for loader in filter(None, self.run.loaders):
            loader.close()
        self.run.log.close()


def run(sitting: bench_parallel.Sitting) -> None:
    """One of the parts. Runs leave their files in a folder that goes away."""
    with tempfile.TemporaryDirectory(prefix="bench-cp-") as folder, contextlib.chdir(folder):
        {"train": train_part, "memory": memory_part, "dynamic": dynamic_part}[sitting.args.part](sitting)


def train_part(sitting: bench_parallel.Sitting) -> None:
    """One run after the other."""
    added = dict(text.split("=", 1) for text in sitting.args.add)
    if unknown := [name for name in sitting.args.only if name not in RUNS]:
        raise SystemExit(f"no run {', '.join(unknown)}; there are {', '.join(RUNS)}, and those of --add")
    wanted = {name: RUNS[name] for name in sitting.args.only or ([] if added else USUAL)}
    for name, text in added.items():
        thousands, layers, *more = text.split(maxsplit=2)
        wanted[name] = int(thousands), int(layers), "".join(more)
    for name, what in wanted.items():
        if sitting.in_time():
            row, argv = new_row(sitting, name, *what)
            measure(sitting, [row], [argv], sitting.args.iters)
        else:
            sitting.result["skipped"].append(name)
        sitting.write()


def memory_part(sitting: bench_parallel.Sitting) -> None:
    """Longer and longer rows, for each of the things that can be made again."""
    capacity = (torch.cuda.mem_get_info()[1] - OUTSIDE) if sitting.cuda else None
    sitting.result |= {"capacity_gib": gib(capacity) if capacity else None, "longest": {}}
    for again, flags in AGAIN.items():
        if sitting.args.only and again not in sitting.args.only:
            continue
        fits = True  # as far as is known
        for thousands in sorted(sitting.args.lengths):
            row, argv = new_row(sitting, f"{again}, {thousands}k", thousands, sitting.args.layers, flags)
            row["again"] = again
            if "predicted_gib" not in row:
                continue
            fits &= capacity is None or row["predicted_gib"]["sum"] <= gib(capacity)
            if not fits:
                row["left_out"] = "does not fit"
            elif row["guessed_s"] > sitting.args.step_seconds or not sitting.in_time():
                row["left_out"] = "takes too long"
            else:
                fits = measure(sitting, [row], [argv], sitting.args.iters)
            sitting.write()
        if capacity:
            sitting.result["longest"][again] = longest(sitting, flags, capacity)
            sitting.write()


def dynamic_part(sitting: bench_parallel.Sitting) -> None:
    """Fixed and dynamic context parallelism on the same documents, step by step in turn."""
    args, ways = sitting.args, {"fixed": "", "dynamic": "--dynamic-context-parallel"}
    if args.max_seqlen_per_dp_cp_rank:
        ways["dynamic"] += f" --max-seqlen-per-dp-cp-rank {args.max_seqlen_per_dp_cp_rank}"
    if unknown := {*args.only, *args.profile} - {*ways}:
        raise SystemExit(f"no run {', '.join(sorted(unknown))}; there are {', '.join(ways)}")
    data = f"--data-path {args.data} --split 1,0,0 --variable-seq-lengths --global-batch-size {args.batch}"
    data += " --vocab-size 264" * args.small  # bytes, and the end of a document
    made = [
        new_row(sitting, name, args.longest, args.layers, f"{data} {flags}")
        for name, flags in ways.items()
        if not args.only or name in args.only
    ]
    measure(sitting, *map(list, zip(*made, strict=True)), args.iters)


def new_row(
    sitting: bench_parallel.Sitting, name: str, thousands: int, layers: int, flags: str
) -> tuple[dict, list[str]]:
    """A run of rows of so many thousand tokens: what is known beforehand, and its command line."""
    args, ranks = sitting.args, sitting.world.size
    tokens = thousands * (2 * ranks if args.small else 1024)
    words = f"{COMMON if args.part != 'dynamic' else COMMON.replace('--mock-data', '')} {ALL} --cp {ranks}"
    if args.small:
        words, layers = f"{words} {SMALL}", min(layers, 2)
    words += f" --num-layers {layers} --seq-length {tokens} --max-position-embeddings {tokens}"
    words += f" --eval-iters 0 --run-name cp-{len(sitting.result['rows'])} --distributed-timeout-minutes 4"
    words += f" {flags} {args.flags}"
    row = {"name": name, "flags": " ".join(words.split()), "seq_length": tokens, "layers": layers}
    sitting.result["rows"].append(row)
    try:
        row |= beforehand(config_of(words.split(), sitting), sitting)
    except Exception:  # without it there is a measurement all the same
        row["errors"] = {"prediction": traceback.format_exc()}
    return row, words.split()


def beforehand(config: Config, sitting: bench_parallel.Sitting) -> dict:
    """Memory by plan/memory.py, and how long a step of one row may take."""
    parts = memory(config, config.data.vocab_size, sitting.planned_on)
    flops = flops_per_iteration(config.model, config.data.vocab_size, config.data.seq_length, 1)
    again = 4 / 3 if config.model.recompute_granularity == "full" else 1
    speed = sitting.world.size * GUESS * (sitting.peak or math.inf)
    return {
        "predicted_gib": {"sum": gib(sum(parts.values())), **{k: gib(v) for k, v in parts.items()}},
        "guessed_s": flops * again / speed,
    }


def config_of(argv: list[str], sitting: bench_parallel.Sitting) -> Config:
    """The whole run that a command line means. Raises ConfigError."""
    parsed = parse(argv)
    if errors := [*parsed.errors, *validate(parsed.config, sitting.world.size, sitting.device.type)]:
        raise ConfigError(errors)
    return resolve(parsed.config, sitting.world.size)


def longest(sitting: bench_parallel.Sitting, flags: str, capacity: int) -> int:
    """The longest row that plan/memory.py says will fit, in thousands of tokens, a multiple of 8."""

    def fits(thousands: int) -> bool:
        row, _ = new_row(sitting, "", thousands, sitting.args.layers, flags)
        sitting.result["rows"].pop()
        return row["predicted_gib"]["sum"] <= gib(capacity)

    low, high = 0, 1024  # in eights
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(8 * middle) else (low, middle)
    return 8 * low


def measure(sitting: bench_parallel.Sitting, rows: list[dict], argvs: list[list[str]], count: int) -> bool:
    """Build runs and take steps of each in turn; whether all worked. Communicates over all ranks."""
    runs: list[Training] = []

    def build() -> None:
        if sitting.cuda:
            torch.cuda.reset_peak_memory_stats()
        for row, argv in zip(rows, argvs, strict=True):
            begin = time.monotonic()
            runs.append(Training(argv, sitting))
            row["build_s"] = round(time.monotonic() - begin, 1)
        in_turn(rows, runs, sitting.args.warm)

    sitting.write()  # in case that this ends the sitting
    try:
        sitting.together(build)
        for row in rows:
            row["step_ms"], row["loss"], row["step"], row["lengths"] = [], [], [], []
        sitting.together(lambda: in_turn(rows, runs, count))
        for i, row in enumerate(rows):
            record(sitting, row, runs[i].run)
            if row["name"] in sitting.args.profile:
                row["profile"] = profiled(runs[i].step, sitting.world.rank)
    except FailedSomewhere as failure:
        for row in rows:
            row.setdefault("errors", {})["run"] = str(failure)
        sitting.meshes.clear()  # whose messages may have got out of step
    for row in rows:
        sitting.say(run_line(row))
    while runs:
        runs.pop().close()  # nobody else may refer to them: what follows needs the memory
    sitting.free()
    return all("mfu" in row for row in rows)


def in_turn(rows: list[dict], runs: list[Training], count: int) -> None:
    """So many steps of each run, A B A B; a step's numbers are read when the next one is under way."""
    pending: list[tuple[dict, StepReport]] = []
    for i in range(count * len(runs)):
        which = i % len(runs)
        pending.append((rows[which], runs[which].step()))
        note(pending[:-1])
        del pending[:-1]
    note(pending)


def note(pending: list[tuple[dict, StepReport]]) -> None:
    """Read the numbers of steps; waits for these."""
    for row, told in pending:
        milliseconds, numbers = told.read()
        found = dict(step_ms=milliseconds, loss=numbers["lm_loss"])
        for key, value in (found | dict(step=told.batch.iteration, lengths=told.batch.lengths)).items():
            row.setdefault(key, []).append(value)
        row["experts"] = numbers.get("experts")


def record(sitting: bench_parallel.Sitting, row: dict, training: train.Run) -> None:
    """The speed of the timed steps, of the slowest rank, and the memory. Communicates over all ranks."""
    row["step_ms"] = sitting.of_ranks(row["step_ms"]).amax(0).tolist()
    if load := row.pop("experts"):
        row["imbalance"] = training.reporter.expert_load.means(load)["moe_load_imbalance"]
    lengths = row.pop("lengths")
    row["tokens"] = [sum(length * n for length, n in step.items()) for step in lengths]
    alike = all(step == lengths[0] for step in lengths)
    seconds = (statistics.median(row["step_ms"]) * len(lengths) if alike else sum(row["step_ms"])) / 1e3
    padded_vocab_size = training.model[0].padded_vocab_size
    told = rates(training.config, training.mesh, padded_vocab_size, sum(lengths, Counter()), seconds)
    row |= {key: told[key] for key in ("tokens_per_s", "tflops_per_gpu", "mfu")}
    row["tokens_per_s_per_gpu"] = told["tokens_per_s"] / sitting.world.size
    most, outside = training.grads.shared_bytes, 0
    if sitting.cuda:
        free, total = torch.cuda.mem_get_info()
        most, outside = most + torch.cuda.max_memory_allocated(), total - free - torch.cuda.memory_reserved()
    row["peak_gib"], row["outside_torch_gib"] = map(gib, sitting.of_ranks([most, outside]).amax(0).tolist())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Settings of these parts."""
    parser.add_argument("--flags", default="", help="of train.py, for every run")
    parser.add_argument(
        "--add",
        action="append",
        default=[],
        metavar="'NAME=64 32 FLAGS'",
        help="train: thousands of tokens, layers",
    )
    parser.add_argument("--layers", type=int, help="memory 32, dynamic 8")
    parser.add_argument("--step-seconds", type=float, default=40, help="memory: no longer steps, by a guess")
    parser.add_argument("--data", help="dynamic: prefix of the documents, as long_tail.py makes them")
    parser.add_argument("--longest", type=int, default=128, help="dynamic: thousands of tokens")
    parser.add_argument("--batch", type=int, default=64, help="dynamic: documents a step")
    parser.add_argument("--max-seqlen-per-dp-cp-rank", type=int, help="dynamic: tokens of a rank's pack")

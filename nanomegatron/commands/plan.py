"""`nanomegatron plan`: what a training needs of every GPU's memory and how long a step takes, without a GPU.

    nanomegatron plan --config llama3-70b --gpus 64 --gpu H100          the best layouts of 64 GPUs
    nanomegatron plan --config llama3-70b --gpus 64 --gpu H100 --tp 8   those with tp 8
    nanomegatron plan --config llama3-8b --simulate 8 --gpu H100 --tp 2 --use-distributed-optimizer   this one
    nanomegatron plan --config gpt2-24gb --gpu-memory 24                whether it fits

It takes the flags of `nanomegatron train`. With --gpus and a known --gpu it searches: flags that are given
stay, all other dimensions are chosen. Exit code 0: a run fits (without a GPU's name, the
largest there is); 1: none does; 2: wrong flags.
"""

import argparse
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import ConfigError, Parsed, parse
from nanomegatron.config.help import CommandParser, did_you_mean
from nanomegatron.config.rules import spelled
from nanomegatron.config.settings import DataConfig
from nanomegatron.config.user_files import escaped
from nanomegatron.plan.cluster import CLUSTERS, Cluster, load_cluster
from nanomegatron.plan.flops import parameter_count
from nanomegatron.plan.gpus import PEAKS
from nanomegatron.plan.layer import Machine
from nanomegatron.plan.memory import known_schedule, memory_of_ranks, pipeline_order
from nanomegatron.plan.room import Planned, left_out, memory_table, remedies
from nanomegatron.plan.search import (
    COMPLEXITY,
    FILLED,
    Candidate,
    Search,
    disadvantage,
    model_size,
    usual_batch,
)
from nanomegatron.plan.step_time import stage_times, step_time, timeline
from nanomegatron.report.schedule_draw import text_rows
from nanomegatron.schedules import simulate

EMBEDDED = 4096  # token ids of the text that a run without data takes: preprocess.prepare_embedded
TEXT = "data_path data_args_path train_data_path tokenizer_type".split()  # settings that name a tokenizer
RATED = [gpu for gpu, *_ in PEAKS if (CLUSTERS / f"{gpu.casefold()}.toml").is_file()]
HEADS = (
    f"        {'layout':<28}{'micro':>6}  {'to make room':<16}"
    f"{'ms a step':>10}{'tokens/s':>12}{'MFU':>7}{'GiB':>6}"
)
LAYOUTS_SHOWN = 5  # layouts that fit, and half as many that do not
GPU_SIZES = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 180)  # GB of GPUs that there are


def main(argv: list[str]) -> int:
    """Print the plan of a command line; returns the exit code."""
    args, flags = arguments(argv)
    try:
        card, gib = known_gpu(args.gpu) if args.gpu_memory is None else ("a GPU", args.gpu_memory)
        numbers = {name: getattr(args, name) for name in ("gpus", "simulate", "nodes_of", "gpu_memory")}
        if wrong := [spelled(name, n) for name, n in numbers.items() if n is not None and n <= 0]:
            raise ValueError(f"{' '.join(wrong)}: must be greater than 0")
        if args.gpus and args.simulate:
            raise ValueError("--gpus searches layouts, --simulate plans one: give one of them")
        parsed = parse(flags)
        cluster = chosen_cluster(args, gib) if args.gpus or args.simulate else None
        if cluster is not None and args.gpus:
            return choose_layout(args, flags, parsed, cluster)
        if cluster is None and (args.gpus or args.simulate):
            why = f"the rates of {card} are not known" if card else "no --gpu is given, and none is here"
            parsed.notes.extend(
                (
                    f"{why}: no layouts are searched, only the memory of the flags' layout is known",
                    f"for layouts, times and a command: --gpu {', '.join(RATED)}, or a --cluster FILE",
                )
            )
        run = planned_run(parsed, args.simulate or args.gpus)
    except BrokenPipeError:
        raise  # for verbs.py
    except (ValueError, OSError, ImportError) as error:
        errors = getattr(error, "messages", [str(error)])
        print("nanomegatron plan:", *map(escaped, errors), sep="\n  ", file=sys.stderr)
        return 2
    show(*(f"note    {note}" for note in parsed.notes), *facts(run, parsed.preset))
    show(*memory_table(memory_of_ranks(*run[:3])), *left_out(run))
    show(*(simulated(run, cluster) if cluster else ()))
    return verdict(run, card, gib)


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this command, and the flags of training."""
    parser = CommandParser(
        "nanomegatron plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--gpus", type=int, metavar="N", help="GPUs of all machines; with --gpu: search their layouts")
    add("--simulate", type=int, metavar="N", help="what N GPUs do in the layout of the flags")
    add("--gpu", metavar="NAME", help='"H100", "A100 40GB" ..; default the one of this machine')
    add("--gpu-memory", type=float, metavar="GB", help="memory of each GPU, instead of --gpu")
    add("--cluster", metavar="FILE", help="rates of GPUs and links, instead of --gpu (TOML)")
    add("--nodes-of", type=int, metavar="N", help="GPUs of a machine; default 8")
    return parser.parse_known_args(argv)


def chosen_cluster(args: argparse.Namespace, gib: float | None) -> Cluster | None:
    """Return the cluster that the options name; None without one, or for a GPU whose rates are not known.

    gib: memory of each GPU, where --gpu-memory or --gpu says it.
    """
    try:
        cluster = load_cluster(args.cluster or args.gpu or "")
    except ValueError:
        if args.cluster:
            raise
        return None
    node, said = args.nodes_of or cluster.gpus_per_node, args.gpu_memory or (args.gpu and not args.cluster)
    if args.gpus and args.gpus > node and args.gpus % node:
        raise ValueError(f"--gpus {args.gpus}: must be whole machines of {node} GPUs; --nodes-of for others")
    return replace(cluster, gpus_per_node=node, memory_gb=gib if said and gib else cluster.memory_gb)


def choose_layout(args: argparse.Namespace, flags: list[str], parsed: Parsed, cluster: Cluster) -> int:
    """Search, and print the best layouts, why others lost, the plan and the command of the best.

    Returns the exit code. Raises ConfigError for wrong flags.
    """
    if parsed.errors:
        raise ConfigError(list(parsed.errors))
    data = parsed.config.data
    vocab, batch = vocabulary(data) or EMBEDDED, data.global_batch_size
    try:
        size = model_size(parsed.config, vocab)
    except (TypeError, ZeroDivisionError):  # of settings that are missing or wrong
        raise ConfigError(validate(parsed.config, args.gpus, "cuda")) from None
    if batch is None:
        batch = usual_batch(parsed, vocab, args.gpus)
        parsed.notes.append(f"--global-batch-size {batch}: none was given")
        data = replace(data, global_batch_size=batch)
        parsed = replace(parsed, config=replace(parsed.config, data=data))
        flags = [*flags, "--global-batch-size", str(batch)]
    if data.vocab_size and not any(getattr(data, name) for name in (*TEXT, "mock_data")):
        parsed.notes.append("--mock-data, random tokens: no data were given; --data-path PREFIX takes yours")
        flags = [*flags, "--mock-data"]
    found = Search(parsed, vocab, args.gpus, cluster)
    fits, others = found.run()
    if not (fits or others) and (errors := validate(parsed.config, args.gpus, "cuda")):
        raise ConfigError(errors)  # sizes that no check allows are no lack of memory
    best = found.valid(fits, LAYOUTS_SHOWN)
    show(*(f"note    {note}" for note in parsed.notes))
    print(f"model   {parsed.preset or 'of the flags'}: {count_text(size)} params, {parsed.config.dtype_name}")
    print(f"batch   {batch} x {data.seq_length} tokens")
    number = len(fits)
    print(
        f"search  {args.gpus} x {cluster.gpu}, {cluster.gpus_per_node} a node, "
        f"{FILLED * cluster.memory_gb:.0f} of {cluster.memory_gb:.0f} GiB used at most: "
        f"{number} layout{'s' * (number != 1)} fit{'s' * (number == 1)}"
    )
    lost = others[: LAYOUTS_SHOWN // 2 if best else LAYOUTS_SHOWN]
    if best:
        show(HEADS, *map(layout_row, best))
        print(f"        the best first; a further dimension or recomputation has to gain {COMPLEXITY:.1%}")
        show(*(lost_row(c, best[0], found.room) for c in [*best[1:], *lost]))
        run = best[0].run
        show(*memory_table(memory_of_ranks(*run[:3])), *simulated(run, cluster))
        print(f"run     {command_line(args.gpus, cluster, flags, best[0])}")
    else:
        show(*(lost_row(c, c, found.room) for c in lost))
        need = f"{6 * size / args.gpus / 2**30:,.0f} GiB of each GPU"
        print(f"no fit  weights and gradients alone take {need}; take more GPUs, or larger ones")
    return 0 if best else 1


def show(*lines: str) -> None:
    """Print lines, if there are any."""
    print(*(f"{line}\n" for line in lines), sep="", end="")


def count_text(parameters: float) -> str:
    """A number of parameters in words: "8.03 B"."""
    return f"{parameters / 1e9:,.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:,.3g} M"


def lost_row(other: Candidate, best: Candidate, room: float) -> str:
    """A line about a layout that is not the best, or does not fit."""
    return f"not     {other.word}, micro {other.micro}: {disadvantage(other, best, room)}"


def layout_row(candidate: Candidate) -> str:
    """A line about a layout that fits."""
    config, step = candidate.run.config, candidate.step
    ways = {
        config.model.recompute_granularity: config.model.recompute_granularity,
        "grads": config.parallel.sharding == "optim_grads",
        "host": config.optimizer.optimizer_cpu_offload,
    }
    again = " ".join(way for way, there in ways.items() if there) or "-"
    return (
        f"        {candidate.word:<28}{candidate.micro:>6}  {again:<16}"
        f"{step.total * 1e3:>10,.1f}{step.tokens_per_s:>11,.0f}{step.mfu:>7.1%}{candidate.need / 2**30:>6.1f}"
    )


def command_line(gpus: int, cluster: Cluster, flags: list[str], best: Candidate) -> str:
    """Return the command that starts the run, on each of its machines."""
    each = min(gpus, cluster.gpus_per_node)
    start = "python train.py" + f" --nproc {gpus}" * (gpus > 1)
    if gpus > each:
        machines = f"--nnodes {-(-gpus // each)} --node-rank $RANK --master-addr $FIRST_MACHINE"
        start = f"torchrun {machines} --nproc-per-node {each} train.py"
    return " ".join(filter(None, (start, shlex.join(flags), best.flags())))


def simulated(run: Planned, cluster: Cluster) -> list[str]:
    """Return lines on the time of a step, part by part."""
    step = step_time(run, cluster)
    parts = ", ".join(f"{name} {s * 1e3:,.1f}" for name, s in step.parts.items() if s >= step.total / 1000)
    rate = f"{step.tokens_per_s:,.0f} tokens/s, {step.tflops_per_gpu:.0f} TFLOP/s a GPU, {step.mfu:.1%} MFU"
    lines = [f"step    {step.total * 1e3:,.1f} ms: {rate}", f"        ms: {parts}"]
    order, stages = stage_times(run, cluster)
    if order.pp == 1:
        return lines
    one = [sum(sum(stages[stage].seconds) for stage in own) for own in order.stages]
    busy = " ".join(f"{seconds * order.microbatches * 1e3:,.0f}" for seconds in one)
    drawn = timeline(run, cluster)
    first = 1 + max(event.op.microbatch for event in drawn.events)
    lines.append(f"ranks   busy for {busy} ms; {first} of {order.microbatches} microbatches:")
    return [*lines, *text_rows(drawn, sys.stdout.isatty())]


def planned_run(parsed: Parsed, gpus: int | None) -> Planned:
    """Return the run of a command line on `gpus` GPUs. Raises ConfigError with all errors."""
    config, parallel = parsed.config, parsed.config.parallel
    smallest = parallel.ranks_per_replica * (parallel.data_parallel_size or 1)
    world = gpus or config.run.nproc or smallest
    if errors := [*parsed.errors, *validate(config, world, "cuda")]:
        raise ConfigError(errors)
    if not (vocab := vocabulary(config.data)):
        parsed.notes.append(f"vocabulary {EMBEDDED}: that of the embedded text; --vocab-size for other data")
    resolved = resolve(config, world)
    if not (config.data.global_batch_size or config.data.rampup_batch_size):
        parsed.notes.append(
            f"--global-batch-size {resolved.data.global_batch_size}: none was given, as in training"
        )
    return Planned(resolved, vocab or EMBEDDED, Machine(), world)


def vocabulary(data: DataConfig) -> int | None:
    """Return the number of token ids: as set, or the tokenizer's (imports torch); None without data."""
    if data.vocab_size or not any(getattr(data, name) for name in TEXT):
        return data.vocab_size
    return importlib.import_module("nanomegatron.data.gpt_dataset").choose_tokenizer(data).vocab_size


def known_gpu(name: str | None) -> tuple[str, float | None]:
    """Return the name and GB of a GPU, by default of this machine's first; no GB if it has none.

    Raises ValueError for a name that is not known.
    """
    if name is None and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        first = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0]
        name, _, mib = first.rpartition(", ")
        return name, float(mib) / 1024 if mib.isdigit() else None
    if name is None:
        return "", None
    known = {pattern.rstrip("$"): size for pattern, *_, size in PEAKS}
    sizes = [float(size) for size in re.findall(r"(\d+) ?GB", name)]
    squeezed = re.sub(r"[\s_-]", "", name).casefold()  # "rtx4090"
    sizes += [size for card, size in known.items() if card.replace(" ", "").casefold() in squeezed]
    if not sizes:
        hint = did_you_mean(name, known) or ";"
        raise ValueError(f"--gpu {name}: none of {', '.join(known)}{hint} or give its --gpu-memory GB")
    return name, sizes[0]


def facts(run: Planned, preset: str | None) -> list[str]:
    """Return lines on the model, the layout and the pipeline."""
    config, model = run.config, run.config.model
    data, parallel = config.data, config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    layout = f"tp{tp} pp{pp} dp{parallel.data_parallel_size} cp{parallel.context_parallel_size}"
    lines = [
        f"model   {preset or 'of the flags'}: {count_text(parameter_count(model, run.vocab_size))} params, "
        f"{model.num_layers} layers, hidden {model.hidden_size}, vocab {run.vocab_size}, {config.dtype_name}",
        f"layout  {layout} ep{parallel.expert_model_parallel_size}, GPUs: {run.world} | "
        f"batch {data.global_batch_size} x {data.seq_length} tokens, {data.micro_batch_size} in a microbatch",
    ]
    if pp > 1:
        order = pipeline_order(config)
        times = simulate(known_schedule(order), order.stages)  # backwards twice as long as forwards
        lines.append(f"pp      {parallel.schedule}, {pp} ranks: bubble {times.bubble:.1%} (idle/busy time)")
    return lines


def verdict(run: Planned, card: str, gib: float | None) -> int:
    """Print whether the run fits a GPU of `gib` GiB, and what would help; return the exit code."""
    need, most = run.need / 2**30, gib or GPU_SIZES[-1]
    if need <= FILLED * most:
        least = next(size for size in GPU_SIZES if need <= FILLED * size or size == GPU_SIZES[-1])
        where = f"{need / most:.0%} of {most:.4g} GiB, {card}" if gib else f"GPUs of {least} GB or more"
        print(f"fits    {where}")
        return 0
    largest = "" if gib else ", the largest GPU there is"
    print(f"no fit  {need:.2f} GiB are {need / most:.0%} of {most:.4g} GiB{largest}; use up to {FILLED:.0%}")
    print(*remedies(run, FILLED * most * 2**30), sep="\n")
    return 1

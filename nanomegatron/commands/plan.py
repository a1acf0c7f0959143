"""`nanomegatron plan`: what a training needs of every GPU's memory, before it starts and without a GPU.

    nanomegatron plan --config llama3-8b --gpus 8 --tp 2 --gpu H100
    nanomegatron plan --config gpt2-24gb --gpu-memory 24

It takes the flags of `nanomegatron train`. Exit code 0: the run fits, or no GPU is known; 1: it does not fit;
2: wrong flags.
"""

import argparse
import importlib
import re
import shutil
import subprocess
import sys

from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import ConfigError, Parsed, parse
from nanomegatron.config.settings import DataConfig
from nanomegatron.flops import parameter_count
from nanomegatron.plan.gpus import PEAKS
from nanomegatron.plan.layer import Machine
from nanomegatron.plan.memory import memory_of_ranks, pipeline_ops
from nanomegatron.plan.room import Planned, memory_table, remedies
from nanomegatron.schedules import simulate

EMBEDDED = 4096  # token ids of the text that a run without data takes: preprocess.prepare_embedded
TEXT = "data_path data_args_path train_data_path tokenizer_type".split()  # settings that name a tokenizer
FILLED = 0.9  # of a GPU's memory; the rest is for CUDA, NCCL and what torch cannot use
GPU_SIZES = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 180)  # GB of GPUs that there are


def main(argv: list[str]) -> int:
    """Print the plan of a command line; returns the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("nanomegatron plan", None, __doc__, formatter_class=form)
    parser.allow_abbrev = False
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of all machines; default --nproc, or one copy"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help='"H100", "A100 40GB" ..; default the one of this machine'
    )
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help="memory of each GPU, instead of --gpu")
    args, flags = parser.parse_known_args(argv)
    try:
        card, gib = known_gpu(args.gpu) if args.gpu_memory is None else ("a GPU", args.gpu_memory)
        if (gib is not None and gib <= 0) or (args.gpus is not None and args.gpus < 1):
            raise ValueError(f"--gpus {args.gpus} --gpu-memory {args.gpu_memory}: must be greater than 0")
        parsed = parse(flags)
        run = planned_run(parsed, args.gpus)
    except ValueError as error:
        print("nanomegatron plan:", *getattr(error, "messages", [error]), sep="\n  ", file=sys.stderr)
        return 2
    print(*(f"note    {note}" for note in parsed.notes), *facts(run, parsed.preset), sep="\n")
    print(*memory_table(memory_of_ranks(*run[:3])), sep="\n")
    return verdict(run, card, gib)


def planned_run(parsed: Parsed, gpus: int | None) -> Planned:
    """Return the run of a command line on `gpus` GPUs. Raises ConfigError with all errors."""
    config, parallel = parsed.config, parsed.config.parallel
    smallest = parallel.ranks_per_replica * (parallel.data_parallel_size or 1)
    world = gpus or config.run.nproc or smallest
    if errors := [*parsed.errors, *validate(config, world, "cuda")]:
        raise ConfigError(errors)
    if not (vocab := vocabulary(config.data)):
        parsed.notes.append(f"vocabulary {EMBEDDED}: that of the embedded text; --vocab-size for other data")
    return Planned(resolve(config, world), vocab or EMBEDDED, Machine(), world)


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
    sizes += [size for card, size in known.items() if card.casefold() in name.casefold()]
    if not sizes:
        raise ValueError(f"--gpu {name}: none of {', '.join(known)}; give its --gpu-memory GB")
    return name, sizes[0]


def facts(run: Planned, preset: str | None) -> list[str]:
    """Return lines on the model, the layout and the pipeline."""
    config, model = run.config, run.config.model
    data, parallel = config.data, config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    layout = f"tp{tp} pp{pp} dp{parallel.data_parallel_size} cp{parallel.context_parallel_size}"
    lines = [
        f"model   {preset or 'of the flags'}: {parameter_count(model, run.vocab_size) / 1e6:,.1f} M params, "
        f"{model.num_layers} layers, hidden {model.hidden_size}, vocab {run.vocab_size}, {config.dtype_name}",
        f"layout  {layout} ep{parallel.expert_model_parallel_size}, GPUs: {run.world} | "
        f"batch {data.global_batch_size} x {data.seq_length} tokens, {data.micro_batch_size} in a microbatch",
    ]
    if pp > 1:
        bubble = simulate(*pipeline_ops(config)).bubble  # with backwards twice as long as forwards
        lines.append(f"pp      {parallel.schedule}, {pp} ranks: bubble {bubble:.1%} (idle/busy time)")
    return lines


def verdict(run: Planned, card: str, gib: float | None) -> int:
    """Print whether the run fits a GPU of `gib` GiB, and what would help; return the exit code."""
    need, most = run.need / 2**30, gib or GPU_SIZES[-1]
    if need <= FILLED * most:
        least = next(size for size in GPU_SIZES if need <= FILLED * size or size == GPU_SIZES[-1])
        where = f"{need / most:.0%} of {most:.4g} GB, {card}" if gib else f"GPUs of {least} GB or more"
        print(f"fits    {where}")
        return 0
    print(f"no fit  {need:.2f} GiB are {need / most:.0%} of {most:.4g} GB; use up to {FILLED:.0%}")
    print(*remedies(run, FILLED * most * 2**30), sep="\n")
    return 1

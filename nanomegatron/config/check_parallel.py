"""The layout of a run looked at before it starts: a part of `config/check.py`. Pipelines have their own."""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from nanomegatron.config.cli import did_you_mean, flag, sections
from nanomegatron.config.settings import CP_TYPES, Config, ParallelConfig

TP, CP, PP = (f"{name}_parallel_size" for name in ("tensor_model", "context", "pipeline_model"))
SIZES, DYNAMIC = "hierarchical_context_parallel_sizes", "dynamic_context_parallel"
LENGTHS, MOST = "variable_seq_lengths", "max_seqlen_per_dp_cp_rank"
NEED_RANKS = ("cp_comm_type", SIZES, DYNAMIC, MOST)


def multiple(name: str, value: int, of: str, unit: int) -> Iterator[str]:
    """An error if `value` is no multiple of `unit`, with the nearest values that are."""
    if value % unit:
        near = [n for n in (value // unit * unit, (value // unit + 1) * unit) if n]
        yield f"{flag(name)} {value}: must divide by {of} {unit}; nearest {' or '.join(map(str, near))}"


def parallel_errors(config: Config, world: int, device: str) -> Iterator[str]:
    """What is wrong with the layout of a run: sizes that do not fit, settings that need others."""
    parallel, tp = config.parallel, config.parallel.tensor_model_parallel_size
    if parallel.tp_comm_overlap and tp > 1 and not config.model.sequence_parallel:
        yield "--tp-comm-overlap: needs --sequence-parallel, whose gathers and scatters it overlaps"
    if parallel.use_distributed_optimizer and parallel.data_parallel_sharding_strategy == "no_shard":
        yield "--use-distributed-optimizer --data-parallel-sharding-strategy no_shard: only one of the two"
    if parallel.overlap_param_gather and parallel.sharding == "no_shard":
        yield "--overlap-param-gather: needs --use-distributed-optimizer; without it nothing is gathered"
    yield from _processes(parallel, world)
    if parallel.distributed_backend == "nccl" and device != "cuda":
        yield "--distributed-backend nccl: needs GPUs; leave it out for gloo"


def fast_path_errors(config: Config, *_: Any) -> Iterator[str]:
    """Settings that ask for a fast path beside --no-fast-paths."""
    for part, setting in sections():
        asked = setting.metadata["fast_path"] and getattr(getattr(config, part), setting.name)
        if asked and config.parallel.fast_paths is False:
            yield f"{flag(setting.name)}: asks for a fast path, not with --no-fast-paths; leave one out"


def _processes(parallel: ParallelConfig, world: int) -> Iterator[str]:
    copy = parallel.ranks_per_replica
    sizes = [(name, getattr(parallel, name)) for name in (TP, CP, PP) if getattr(parallel, name) > 1]
    if world % copy:
        words = " x ".join(f"{flag(name)} {size}" for name, size in sizes)
        fits = [n for n in range(1, world + 1) if world % n == 0]
        yield (
            f"{words}: must divide the number of processes, {world}; use "
            f"--nproc {-(-world // copy) * copy} or a size of {', '.join(map(str, fits))}"
        )
    elif parallel.data_parallel_size not in (None, world // copy):
        short = {TP: "tp", CP: "cp", PP: "pp"}
        words = " / ".join([f"{world} processes", *(f"{short[name]} {size}" for name, size in sizes)])
        yield (
            f"--data-parallel-size {parallel.data_parallel_size}: {words} give {world // copy}; "
            f"start {parallel.data_parallel_size * copy} processes (--nproc) or leave it out"
        )


def length_unit(config: Config) -> int:
    """What --seq-length is a multiple of: a cp rank has two chunks, cut over tp. Packs are padded."""
    cp, cut = config.parallel.context_parallel_size, config.sequence_cut
    unit = cut if cp == 1 else cp * math.lcm(2, cut)
    return 1 if config.data.variable_seq_lengths else unit


def context_errors(config: Config, *_: Any) -> Iterator[str]:
    """What is wrong with the sharing of sequences, and with documents as they are."""
    parallel, data, micro = config.parallel, config.data, f"--micro-batch-size {config.data.micro_batch_size}"
    cp, unit, many = parallel.context_parallel_size, length_unit(config), data.micro_batch_size > 1
    cut = config.sequence_cut
    factors = ["2"] * (cut % 2) + [f"{flag(CP)} {cp}"] + [f"{flag(TP)} {cut}"] * (cut > 1)
    of = flag(TP) if cp == 1 else " x ".join(factors) + " ="
    yield from multiple("seq_length", data.seq_length, of, unit)
    pp, whole = parallel.pipeline_model_parallel_size, data.variable_seq_lengths
    if (whole or parallel.dynamic_context_parallel) and pp > 1:
        name = flag(LENGTHS if whole else DYNAMIC)
        yield f"{name}: not with {flag(PP)} {pp}, whose messages are all of one size; leave one out"
    if whole and many:
        yield f"{micro}: must be 1 with {flag(LENGTHS)}, which packs documents"
    if cp > 1:
        yield from _types(config, cp)
        yield from _dynamic(config, cp)
        if (dropout := config.model.attention_dropout) > 0:
            none = f"there is none with {flag(CP)} {cp}; set --attention-dropout 0"
            yield f"--attention-dropout {dropout}: {none}"
        if data.reset_attention_mask and many and not whole:
            yield f"{micro}: must be 1 for documents (--reset-attention-mask) over {flag(CP)} {cp}"
        return
    given = [s.name for s in fields(ParallelConfig) if getattr(parallel, s.name) != s.default]
    if given := [flag(name) for name in given if name in NEED_RANKS]:
        yield f"{', '.join(given)}: need{'s' * (len(given) == 1)} {flag(CP)} greater than 1"


def _types(config: Config, cp: int) -> Iterator[str]:
    """--cp-comm-type, the two sizes of a2a+p2p, and heads that are to be shared out."""
    parallel, model, tp = config.parallel, config.model, config.parallel.tensor_model_parallel_size
    types, sizes = parallel.cp_types(model.num_layers), parallel.hierarchical_context_parallel_sizes
    if len(types) != model.num_layers:
        words = " ".join(["--cp-comm-type", *parallel.cp_comm_type])
        yield f"{words}: must be one, or one for each of --num-layers {model.num_layers}"
    for name in sorted({*types} - {*CP_TYPES}):
        yield f"--cp-comm-type {name}: must be of {', '.join(CP_TYPES)}{did_you_mean(name, CP_TYPES)}"
    least = next(n for n in range(math.isqrt(cp), 0, -1) if cp % n == 0)
    such = f"such as {least} {cp // least}"
    given = f"{flag(SIZES)} {' '.join(map(str, sizes))}"
    if "a2a+p2p" in types and not sizes:
        yield f"--cp-comm-type a2a+p2p: needs {flag(SIZES)} with the product {cp}, {such}"
    elif sizes and "a2a+p2p" not in types:
        yield f"{given}: needs --cp-comm-type a2a+p2p"
    elif sizes and math.prod(sizes) != cp:
        yield f"{given}: must have the product of {flag(CP)} {cp}, {such}"
    if model.num_attention_heads % tp:
        return
    n, g = model.num_attention_heads // tp, model.num_kv_heads // tp or 1
    of_rank, instead = " of a tp rank" * (tp > 1), "use p2p or allgather"
    for name, ranks in (("a2a", cp), ("a2a+p2p", next(iter(sizes), 1))):
        if name in types and n % ranks:
            yield f"--cp-comm-type {name}: {n} query heads{of_rank} must divide by {ranks} ranks; {instead}"
        elif name in types and g % ranks and ranks % g:
            heads = f"{g} key/value heads{of_rank} must divide by {ranks} ranks or divide them"
            yield f"--cp-comm-type {name}: {heads}; {instead}"


def _dynamic(config: Config, cp: int) -> Iterator[str]:
    """Documents on groups of ranks, whose microbatches differ in number and size."""
    parallel, name, length = config.parallel, flag(DYNAMIC), config.data.seq_length
    most = parallel.max_seqlen_per_dp_cp_rank
    if not parallel.dynamic_context_parallel:
        if most is not None:
            yield f"{flag(MOST)} {most}: needs {name}"
        return
    if not config.data.variable_seq_lengths:
        yield f"{name}: needs {flag(LENGTHS)}, documents of different lengths"
    if cp & (cp - 1):
        less = 1 << cp.bit_length() - 1
        near = f"{flag(CP)} {cp} must be such a number, {less} or {2 * less}"
        yield f"{name}: has groups of 2, 4, 8 ... ranks; {near}"
    if parallel.sharding == "optim_grads":
        why = "whose ranks would have to have equally many microbatches"
        yield f"{name}: not with --data-parallel-sharding-strategy optim_grads, {why}; use optim"
    if config.run.trace_dir is not None:
        yield f"{name}: not with --trace-dir, where all ranks do the same ops; use --profile"
    if "a2a+p2p" in parallel.cp_comm_type:
        yield f"{name}: not with --cp-comm-type a2a+p2p; use p2p, a2a or allgather"
    if most is not None and most * cp < length:
        words = f"{flag(MOST)} {most}: x {flag(CP)} {cp} = {most * cp}"
        yield f"{words}: must hold --seq-length {length}; give {-(-length // cp)} or more"

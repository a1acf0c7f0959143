"""Checks of a run's layout: processes, sequences, pipeline stages and experts on their ranks."""

import math
from collections.abc import Iterator
from dataclasses import replace

from nanomegatron.config.parallel import LAYOUT
from nanomegatron.config.rules import spelled, those_that_hold
from nanomegatron.config.settings import Config, ParallelConfig
from nanomegatron.config.split import layout_sizes, stage_ranges
from nanomegatron.schedules import CHUNKS

TP, CP, PP = (f"--{name}-parallel-size" for name in ("tensor-model", "context", "pipeline-model"))
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
SIZES, MAX_SEQLEN = "hierarchical_context_parallel_sizes", "--max-seqlen-per-dp-cp-rank"
VPP, PER_PIECE = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


def multiple(name: str, value: int, of: str, unit: int) -> Iterator[str]:
    """Yield an error if `value` is no multiple of `unit`, with the nearest multiples."""
    if value % unit:
        yield f"{name} {value}: must be a multiple of {of} {unit}; nearest {nearest(value, unit)}"


def nearest(value: int, unit: int) -> str:
    """The multiples of `unit` just below and above `value`, as words: "8 or 16"; 0 is left out."""
    below = value // unit * unit
    return " or ".join(str(n) for n in (below, below + unit) if n)


def layout_errors(config: Config, world: int, device: str) -> Iterator[str]:
    """Yield the errors in the layout of a run of `world` processes; device: "cpu" or "cuda"."""
    parallel, tp = config.parallel, config.parallel.tensor_model_parallel_size
    impl = parallel.cuda_graph_impl or "none"
    why = graph_conflict(config, world, impl) if impl != "none" else ""
    yield from those_that_hold(
        (
            parallel.tp_comm_overlap and tp > 1 and not config.model.sequence_parallel,
            "--tp-comm-overlap: needs --sequence-parallel, whose gathers and scatters it overlaps",
        ),
        (
            parallel.distributed_backend == "nccl" and device != "cuda",
            "--distributed-backend nccl: needs GPUs; leave it out for gloo",
        ),
        (why, f"--cuda-graph-impl {impl}: not with {why}; leave it out, or use none"),
    )
    yield from _processes(parallel, world)
    yield from _sequences(config)
    yield from _pipeline(config)
    yield from _experts(config, world)


def graph_impl(config: Config, world: int) -> str:
    """The --cuda-graph-impl of a run that fits: as set, else the first of the three that can be."""
    fit = (impl for impl in ("full_iteration", "local") if not graph_conflict(config, world, impl))
    return config.parallel.cuda_graph_impl or next(fit, "none")


def graph_conflict(config: Config, world: int, impl: str) -> str:
    """The setting for which `world` processes can have no CUDA graphs of this kind; "" if they can."""
    model, data, parallel = config.model, config.data, config.parallel
    sizes = (("tensor_model", TP), ("pipeline_model", PP), ("context", CP), ("expert_model", EP))
    inside = [f"{flag} {n}" for name, flag in sizes if (n := getattr(parallel, f"{name}_parallel_size")) > 1]
    names = ("overlap_param_gather", "overlap_grad_reduce") if world > 1 and impl != "local" else ()
    inside += [spelled(name, True) for name in names if getattr(parallel, name)]
    found = {
        f"{' '.join(inside)}, whose ranks communicate inside it": bool(inside),
        "--num-experts, which get different numbers of tokens": model.num_experts is not None,
        "documents of their own lengths": data.reset_attention_mask or data.variable_seq_lengths,
        "--debug-nan, which reads every result": config.run.debug_nan,
        "recomputed layers": model.recompute_granularity == "full" and impl == "local",
        "optim_grads, which frees gradients": parallel.sharding == "optim_grads",
        "recomputed attention dropout": bool(model.attention_dropout and model.recompute_granularity),
    }
    return next((what for what, there in found.items() if there), "")


def _processes(parallel: ParallelConfig, world: int) -> Iterator[str]:
    copy, dp = parallel.ranks_per_replica, parallel.data_parallel_size
    names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    sizes = [spelled(name, getattr(parallel, name)) for name in names if getattr(parallel, name) > 1]
    if world % copy:
        fits = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        use = f"--nproc {-(-world // copy) * copy} or a size of {fits}"
        yield f"{' x '.join(sizes)}: must divide the number of processes, {world}; use {use}"
    elif dp not in (None, world // copy):
        give = f"{' / '.join([f'{world} processes', *sizes])} give {world // copy}"
        yield f"--data-parallel-size {dp}: {give}; start {dp * copy} processes (--nproc) or leave it out"


def length_unit(config: Config) -> int:
    """The number that must divide --seq-length: a cp rank has two chunks, each sharded over tp. Packs: 1."""
    cp, cut = config.parallel.context_parallel_size, config.sequence_cut
    unit = cut if cp == 1 else cp * math.lcm(2, cut)
    return 1 if config.data.variable_seq_lengths else unit


def _sequences(config: Config) -> Iterator[str]:
    """Yield the errors in sharding sequences over cp, and in packing documents."""
    parallel, data, cut = config.parallel, config.data, config.sequence_cut
    cp, micro = parallel.context_parallel_size, f"--micro-batch-size {data.micro_batch_size}: must be 1"
    factors = ["2"] * (cut % 2) + [f"{CP} {cp}"] + [f"{TP} {cut}"] * (cut > 1)
    of = TP if cp == 1 else " x ".join(factors) + " ="
    yield from multiple("--seq-length", data.seq_length, of, length_unit(config))
    packed = data.variable_seq_lengths
    several = data.micro_batch_size > 1
    dropout = config.model.attention_dropout
    most, length = parallel.max_seqlen_per_dp_cp_rank or data.seq_length, data.seq_length
    yield from those_that_hold(
        (several and packed, f"{micro} with --variable-seq-lengths, which packs documents"),
        (
            several and not packed and data.reset_attention_mask and cp > 1,
            f"{micro} for documents (--reset-attention-mask) over {CP} {cp}",
        ),
        (
            cp > 1 and dropout > 0,
            f"--attention-dropout {dropout}: there is none with {CP} {cp}; set --attention-dropout 0",
        ),
        (
            parallel.dynamic_context_parallel and cp.bit_count() != 1,
            f"--dynamic-context-parallel: has groups of 2, 4, 8 ... ranks; {CP} {cp} must be such a number",
        ),
        (
            cp > 1 and parallel.dynamic_context_parallel and most * cp < length,
            f"{MAX_SEQLEN} {most}: x {CP} {cp} = {most * cp}: must hold --seq-length {length}; "
            f"give {-(-length // cp)} or more",
        ),
    )
    if cp > 1:
        yield from _cp_types(config, cp)


def _cp_types(config: Config, cp: int) -> Iterator[str]:
    """Yield the errors in --cp-comm-type, the two sizes of a2a+p2p, and heads that do not divide by ranks."""
    parallel, model, tp = config.parallel, config.model, config.parallel.tensor_model_parallel_size
    types, sizes = parallel.cp_types(model.num_layers), parallel.hierarchical_context_parallel_sizes
    if len(types) != model.num_layers:
        words = spelled("cp_comm_type", parallel.cp_comm_type)
        yield f"{words}: must be one, or one for each of --num-layers {model.num_layers}"
    if "a2a+p2p" in types and math.prod(sizes) != cp:
        inner = next(n for n in range(math.isqrt(cp), 0, -1) if cp % n == 0)
        product = f"must have the product of {CP} {cp} for --cp-comm-type a2a+p2p"
        yield f"{spelled(SIZES, sizes)}: {product}, such as {inner} {cp // inner}"
    if model.num_attention_heads % tp:
        return
    n, g = model.num_attention_heads // tp, model.num_kv_heads // tp or 1
    of_rank = " of a tp rank" * (tp > 1)
    for name, ranks in (("a2a", cp), ("a2a+p2p", next(iter(sizes), 1))):
        if name in types and (n % ranks or (g % ranks and ranks % g)):
            heads = f"{n} query heads{of_rank} must be a multiple of {ranks} ranks, and {g} key/value heads"
            yield f"--cp-comm-type {name}: {heads} a multiple or a divisor; use p2p or allgather"


def _pipeline(config: Config) -> Iterator[str]:
    parallel, chunks = config.parallel, config.parallel.num_virtual_stages_per_pipeline_rank or 1
    if parallel.pipeline_model_parallel_size == 1:
        if chunks > 1:
            yield f"{VPP} {chunks}: needs {PP} greater than 1"
        return
    try:
        parallel = with_virtual_stages(config)
        yield from (errors := [*_schedule(parallel)])
        if not errors:
            stage_ranges(parallel, config.model.num_layers)
    except ValueError as error:
        yield str(error)


def with_virtual_stages(config: Config) -> ParallelConfig:
    """Return the layout with the number of virtual stages, not their size. Raises ValueError if not whole."""
    parallel, layers = config.parallel, config.model.num_layers
    size, pp = parallel.num_layers_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_size
    layout, vpp = parallel.pipeline_model_parallel_layout, parallel.num_virtual_stages_per_pipeline_rank
    if layout and pp > 1:
        pieces, rest = divmod(stages := len(layout_sizes(layout)), pp)
        if rest:
            raise ValueError(f"{LAYOUT} {layout}: has {stages} stages, which must be a multiple of {PP} {pp}")
        if vpp not in (None, pieces):
            fix = f"{LAYOUT} {layout} has {pieces} on each of {pp} ranks; leave it out"
            raise ValueError(f"{VPP} {vpp}: {fix}")
        return replace(parallel, num_virtual_stages_per_pipeline_rank=pieces)
    if size is None:
        return parallel
    counted = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    pieces, rest = divmod(layers + counted, pp * size)
    if rest:
        near = " or ".join(str(n * pp * size - counted) for n in (pieces, pieces + 1) if n)
        words = f"--num-layers {layers}" + f" + {counted}" * bool(counted)
        raise ValueError(
            f"{words}: must be a multiple of {PP} {pp} x {PER_PIECE} {size}; nearest --num-layers {near}"
        )
    return replace(
        parallel, num_layers_per_virtual_pipeline_stage=None, num_virtual_stages_per_pipeline_rank=pieces
    )


def _schedule(parallel: ParallelConfig) -> Iterator[str]:
    name, chunks = parallel.schedule, parallel.chunks
    wanted = CHUNKS.get(name, chunks)
    size = parallel.microbatch_group_size_per_virtual_pipeline_stage
    yield from those_that_hold(
        (
            chunks != wanted,
            f"--pipeline-schedule {name}: has {wanted} of the model's pieces on a pipeline rank, "
            f"not {chunks}; leave {VPP} out, or use interleaved",
        ),
        (
            name == "interleaved" and chunks == 1,
            f"--pipeline-schedule interleaved: needs {VPP} 2 or more; 1f1b is the same with 1",
        ),
        (
            size and name != "interleaved",
            f"{GROUP} {size}: is for --pipeline-schedule interleaved, not {name}",
        ),
    )


def _experts(config: Config, world: int) -> Iterator[str]:
    """Yield errors in the expert layout: a stage's ranks form a grid of etp (fastest), ep and edp."""
    parallel, model = config.parallel, config.model
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp, ep = parallel.pipeline_model_parallel_size, parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    if model.num_experts is None:
        if etp not in (1, tp):
            yield f"{ETP} {etp}: needs --num-experts"
        return
    unit = math.lcm(ep * etp, tp * cp) * pp
    yield from multiple("--num-experts", model.num_experts, EP, ep)
    if model.num_experts % ep == 0 and world % (tp * cp * pp) == 0 and world % unit:
        of = f"{world} processes" + f" / pp {pp} = {world // pp}" * (pp > 1)
        processes = -(-world // unit) * unit
        yield f"{EP} {ep} x {ETP} {etp} = {ep * etp}: must divide {of}; use --nproc {processes}"
    why = "with --variable-seq-lengths, where ranks that share experts have not equally many tokens"
    uneven = config.data.variable_seq_lengths and tp * cp % (etp * ep)  # replicas share experts
    dispatcher = model.moe_token_dispatcher_type
    yield from those_that_hold(
        (
            tp > 1 and not model.sequence_parallel,
            f"{TP} {tp}: needs --sequence-parallel with --num-experts, or ranks route the same tokens",
        ),
        (
            uneven and dispatcher != "alltoall",
            f"--moe-token-dispatcher-type {dispatcher}: must be alltoall {why}",
        ),
        (
            uneven and model.moe_pad_expert_input_to_capacity,
            f"--moe-pad-expert-input-to-capacity: not {why}; leave it out",
        ),
    )

"""What a run needs, before it starts: the memory of one rank, of each stage of a pipeline.

Bytes a parameter of this rank's share of the model (ZeRO, arXiv:1910.02054, section 3.1); d ranks share the
optimizer states with `optim` and `optim_grads`, the gradients too with `optim_grads`, which then needs some
buckets of gradients in use:

    type         weights   main weights   main_grad   Adam moments
    fp32            4           -             4           8/d
    bf16, fp16      2          4/d         4, 4/d         8/d        less with bf16 gradients and moments
    FP8 layers    2 + 2        4/d         4, 4/d         8/d        2: both casts, in bf16 none where the
                                                                     optimizer casts (`fp8.py`)

and what the forward pass of one microbatch keeps for its backward: of a layer see `plan/layer.py`. Of a row
that cp ranks share each has the cp-th part, of documents as they are the largest pack.

The parameters of experts count for the ranks that share them, d of edp instead of dp x cp.

Layers that are recomputed as a whole keep their input alone, and one such group is whole again in the
backward. At the end come the last norm, the logits, then their gradient, and without kernels the loss in
fp32, a chunk of tokens at a time, or with fused loss a chunk of all of it; there the memory of a rank with a
loss is at its peak, that of others where the first gradients inside an MLP join what is kept or, with that
MLP gone, what shared attention has in flight. (The same count for a model of 2022: arXiv:2205.05198, section
4.)

Pipeline ranks differ in their layers, in what they have of the two ends of the model, and in how many
microbatches are under way: each rank's ops (`schedules.py`) are gone through, F adding what its chunk keeps,
B or BW taking it away. What is put off from B until W holds, in values a token, * as above and V of one rank,

    inputs of the linear layers               2h * + n + f          made again, where they were not kept
    gradients of their outputs                n + 2g + 2f or f + 2h
    experts, of c copies                      c(2h + 3f) or c(2h + 2f)
    embedding                                 h
    output layer                              h * + V               none with fused loss: it has been done

Of messages one is counted on its way in and one out for each neighbour, and one in use; with them the memory
that GPUs share to send each other keys, and tokens in pieces. What torch itself takes is not in it: some 0.3
GiB of a process on a CPU, more of a GPU.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

from nanomegatron.config.batch import stages as batch_stages
from nanomegatron.config.settings import Config, padded_vocab_size
from nanomegatron.dp import IN_FLIGHT, bucket_size
from nanomegatron.fast.fused_loss import FusedLossFunction
from nanomegatron.flops import expert_parameters, layer_matmul_parameters, parameter_count, stage_layers
from nanomegatron.fp8 import Recipe
from nanomegatron.ops.cross_entropy import CHUNK
from nanomegatron.ops.kernels import why_not
from nanomegatron.plan.layer import (
    attention_in_flight,
    copies_of,
    expert_input,
    experts_in_fp8,
    linear_input,
    mlp_widths,
    norm_input,
    ring_slots,
    routed_width,
    saved_by_layer,
    tokens_of,
    widths,
)
from nanomegatron.recompute import segments
from nanomegatron.schedules import Op, most_open, owners, placement, schedule

PARTS = ("activations", "logits and loss", "backward of a layer", "weight gradients put off")


class Piece(NamedTuple):
    """A chunk: how many layers, and whether it is the first stage (embedding) and the last (norm, loss)."""

    layers: int
    first: bool = True
    last: bool = True


class Needs(NamedTuple):
    """Bytes by part that one microbatch takes in a chunk."""

    kept: Counter  # from F to B or BW
    put_off: Counter  # from B to W
    forward: Counter  # beside these, at the end of F: a fused loss
    backward: Counter  # beside these, when B or BW begins: the loss, or the last layers
    ending: Counter  # beside these, when B is at the first layers


def memory(config: Config, vocab_size: int, device: torch.device | None = None) -> dict[str, float]:
    """Bytes by part at the peak of a step, of the pipeline rank that needs most.

    Config resolved, vocab_size without padding. device: where the run is to be, else what --device means on
    this machine.
    """
    return max(memory_of_ranks(config, vocab_size, device), key=_total)


def memory_of_ranks(
    config: Config, vocab_size: int, device: torch.device | None = None
) -> list[dict[str, float]]:
    """The same of each pipeline rank."""
    tp, dtype = config.parallel.tensor_model_parallel_size, getattr(torch, config.dtype_name)
    device, (lists, placed) = device or _device(config), _pipeline(config)
    vocab = padded_vocab_size(vocab_size, config.data.make_vocab_size_divisible_by, tp)
    layers, found = stage_layers(config, vocab), []
    for ops, stages in zip(lists, placed, strict=True):
        pieces = [Piece(len(layers[stage]), stage == 0, stage == len(layers) - 1) for stage in stages]
        _, first, last = zip(*pieces, strict=True)
        own = [n for s in stages for n in layers[s]]
        params = parameter_count(config.model, vocab, tp, own, any(first), any(last), experts=0)
        chunks = [needs(config, piece, vocab // tp, device) for piece in pieces]
        peak = max((running for running, _ in walk(ops, chunks)), key=_total)
        found.append(
            {
                **states(config, params, dtype, expert_weights(config, own), *fp8_weights(config, own)),
                **{part: peak[part] for part in PARTS},
                "messages": messages(config, stages, placed) + ring_buffers(config, device, dtype),
                "room for pieces": piece_buffers(config, dtype) if device.type == "cuda" else 0,
            }
        )
    return found


def chunks_kept(config: Config) -> list[int]:
    """The most forwards of single chunks that wait for their backward at a time, of each pipeline rank."""
    return [most_open(ops) for ops in _pipeline(config)[0]]


def describe(*ranks: dict[str, float]) -> str:
    """One line about the pipeline rank that needs most: the sum in GiB and the share of each part."""
    totals = [_total(parts) for parts in ranks]
    total, worst = max(totals), totals.index(max(totals))
    shares = ", ".join(
        f"{name} {100 * size / total:.0f} %" for name, size in ranks[worst].items() if size > total / 200
    )
    which = f"of pipeline rank {worst}" if len(ranks) > 1 else "per rank"
    return f"predicted peak {which} {total / 2**30:.2f} GiB ({shares})"


def fp8_weights(config: Config, layers: list[int]) -> tuple[int, int]:
    """Parameters that a rank with the layers of these numbers multiplies in FP8, and those of experts."""
    tp, model = config.parallel.tensor_model_parallel_size, config.model
    fp8 = [layer for layer in layers if layer in config.precision.fp8_layers(model.num_layers)]
    mlps = [tp * widths(config, model.moe_layers[layer])[2] for layer in fp8]
    experts = expert_weights(config, fp8) if experts_in_fp8(config) else 0
    return sum(layer_matmul_parameters(model, tp, ffn) for ffn in mlps), experts


def expert_weights(config: Config, layers: list[int]) -> int:
    """Parameters of experts that a rank has, if it has the layers of these numbers."""
    model, parallel, sparse = config.model, config.parallel, config.model.moe_layers
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    local = (model.num_experts or 0) // parallel.expert_model_parallel_size
    return expert_parameters(model, local, etp) * sum(sparse[layer] for layer in layers)


def states(
    config: Config, params: int, dtype: torch.dtype, experts: int = 0, fp8: int = 0, fp8_experts: int = 0
) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer of a rank with so many parameters, `fp8` of them in FP8.

    experts: so many more that it shares with other ranks, those of edp.
    """
    parallel = config.parallel
    ranks = (parallel.data_parallel_size or 1) * parallel.context_parallel_size
    tp = parallel.tensor_model_parallel_size
    found = _states(config, params, dtype, fp8, ranks)
    if experts:
        etp = parallel.expert_tensor_parallel_size or tp
        edp = max(1, ranks * tp // (parallel.expert_model_parallel_size * etp))
        more = _states(config, experts, dtype, fp8_experts, edp)
        found = {name: size + more[name] for name, size in found.items()}
    return found


def _states(config: Config, params: int, dtype: torch.dtype, fp8: int, ranks: int) -> dict[str, float]:
    """The same of parameters that so many ranks share."""
    parallel, optimizer = config.parallel, config.optimizer
    shared = ranks if parallel.sharding != "no_shard" else 1
    here = 1 - optimizer.optimizer_offload_fraction * optimizer.optimizer_cpu_offload
    grads = params * getattr(torch, config.grad_dtype_name).itemsize
    if parallel.sharding == "optim_grads":
        some = 2 + (IN_FLIGHT if parallel.overlap_grad_reduce else 0)
        in_use = some * min(bucket_size(parallel, ranks), params)
        grads = params * 4 / ranks + min(params, in_use) * getattr(torch, config.grad_dtype_name).itemsize
    moments = sum(
        4 if kind == "fp32" else 2 for kind in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
    )
    gone = fp8 * (fp8 > 0 and Recipe.of(config.precision).cast_by_optimizer(shared > 1))
    return {
        "weights": (params - gone) * dtype.itemsize,
        "main weights": params * 4 * here / shared if dtype.itemsize < 4 else 0,
        "gradients": grads,
        "Adam moments": params * moments * here / shared,
        "FP8 weights": 2 * fp8,
    }


def walk(ops: list[Op], chunks: list[Needs]) -> Iterator[tuple[Counter, Counter]]:
    """For each op of a rank what microbatches take, by part: at most while it runs, and afterwards."""
    held: Counter = Counter()
    for op in ops:
        need, before = chunks[op.chunk], held
        if op.kind == "F":
            held = before + need.kept
            yield held + need.forward, held
        elif op.kind == "W":
            held = before - need.put_off
            yield before, held
        else:
            held = before - need.kept + (need.put_off if op.kind == "B" else Counter())
            ends = held + need.ending if op.kind == "B" else held
            yield max(before + need.backward, ends, key=_total), held


def needs(config: Config, piece: Piece, columns: int, device: torch.device) -> Needs:
    """What a microbatch takes in a chunk, with so many columns of the logits."""
    model, dtype = config.model, getattr(torch, config.dtype_name)
    value = dtype.itemsize * tokens_of(config)
    stream = value * model.hidden_size / config.sequence_cut
    fused = piece.last and model.cross_entropy_loss_fusion
    loss = logits_and_loss(config, columns, dtype, device) if piece.last else 0
    logits = stream if fused else value * columns * piece.last  # fused: the gradient of the stream
    saved = saved_by_layer(config, dtype, device)
    layer = tokens_of(config) * sum(saved.values())
    again = max((len(run) for run, again in segments(model, piece.layers) if again), default=0)
    group = min(again or 1, piece.layers)  # whose backward begins or ends that of the chunk
    mlps = saved["MLP"] + saved["experts"]
    attention = tokens_of(config) * (attention_in_flight(config, dtype, device) - mlps)
    inside = max(value * (3 if model.swiglu else 2) * max(mlp_widths(config)), attention) * (group > 0)
    part, later = (value * put_off(config, p, columns) for p in (Piece(group, False, False), piece))
    at_loss = Counter({"activations": stream * fused, "logits and loss": loss - logits})  # fused: normed x
    before = 0 if fused else loss  # what the backward of the layers finds to be free again
    backward = Counter({"backward of a layer": max(0, again * layer + inside - before)})
    return Needs(
        kept=Counter({"activations": activations(config, piece, device), "logits and loss": logits}),
        put_off=Counter({"weight gradients put off": later}),
        forward=at_loss if fused else Counter(),
        backward=backward if fused else at_loss + backward,
        ending=Counter({"backward of a layer": max(0, group * layer + inside - part)}),
    )


def activations(config: Config, piece: Piece, device: torch.device) -> float:
    """Bytes that a microbatch keeps of a chunk, from its embedding or input to its last norm."""
    model, cut, dtype = config.model, config.sequence_cut, getattr(torch, config.dtype_name)
    h, e, layer = model.hidden_size, dtype.itemsize, sum(saved_by_layer(config, dtype, device).values())
    output = 0 if model.cross_entropy_loss_fusion else e  # of the last norm
    kept = (norm_input(model, dtype, device) + output) * h / cut * piece.last
    kept += e * h / cut * (model.hidden_dropout > 0) * piece.first
    spread = config.parallel.tensor_model_parallel_size if model.distribute_saved_activations else cut
    kept += sum(e * h / spread if again else layer * len(run) for run, again in segments(model, piece.layers))
    return tokens_of(config) * kept


def put_off(config: Config, piece: Piece, columns: int) -> float:
    """Values a token that weight gradients need which are put off: the second table of the docstring.

    Those of FP8 layers count by their size.
    """
    model, h, own = config.model, config.model.hidden_size, config.model.hidden_size / config.sequence_cut
    (n, g, _), inner = widths(config), mlp_widths(config)
    sparse, both = sum(model.moe_layers) / len(inner), 3 if model.swiglu else 2  # features: input, gradients
    routed = copies_of(config) * routed_width(config) * sparse
    dense = 2 * own + 2 * n + 2 * g + 2 * h + both * (sum(inner) / len(inner) - routed)
    experts = copies_of(config) * 2 * h * sparse + both * routed
    loss = (own + columns) * (piece.last and not model.cross_entropy_loss_fusion)
    kept = dense * linear_input(config) + experts * expert_input(config)
    return piece.layers * kept / getattr(torch, config.dtype_name).itemsize + h * piece.first + loss


def logits_and_loss(config: Config, columns: int, dtype: torch.dtype, device: torch.device) -> float:
    """Bytes of `columns` logits a token, and the fp32 chunk from which their gradient comes, in their place.

    With fused loss of a chunk alone, and the gradient of the residual stream. Under sequence parallelism the
    last norm's output, gathered, and its gradient before it is scattered.
    """
    tokens, e = tokens_of(config), dtype.itemsize
    whole = 2 * e * tokens * config.model.hidden_size if config.sequence_cut > 1 else 0
    wide = 0 if not why_not(device) else 8 if e < 4 else 4
    if config.model.cross_entropy_loss_fusion:
        chunk = min(tokens, FusedLossFunction.chunk)
        return columns * chunk * (e + wide) + (whole or e * tokens * config.model.hidden_size)
    return columns * (e * tokens + wide * min(tokens, CHUNK)) + whole


def piece_buffers(config: Config, dtype: torch.dtype) -> float:
    """Bytes that tp ranks, and those that share experts, have for `comm_pieces`.

    Two slots for a rank's tokens, and two for the sums of all ranks'.
    """
    model, parallel, tp = config.model, config.parallel, config.parallel.tensor_model_parallel_size
    experts = (parallel.expert_tensor_parallel_size or tp) * parallel.expert_model_parallel_size
    halves = parallel.overlap_moe_expert_parallel_comm
    gathers = model.num_experts and model.moe_token_dispatcher_type == "allgather" and not halves
    among = (tp, tp, parallel.tp_comm_overlap), (experts, config.sequence_cut, gathers)
    slots = sum(2 * (1 + ranks) / cut for ranks, cut, used in among if used and ranks > 1)
    return slots * dtype.itemsize * model.hidden_size * tokens_of(config)


def _device(config: Config) -> torch.device:
    return torch.device("cuda" if config.run.device != "cpu" and torch.cuda.is_available() else "cpu")


def _pipeline(config: Config) -> tuple[list[list[Op]], list[list[int]]]:
    """The ops of every pipeline rank, for the largest batch there will be, and their stages."""
    parallel, data = config.parallel, config.data
    replicas = parallel.data_parallel_size or 1
    batch = max(size for _, size in batch_stages(data, replicas))
    name, pp, chunks = parallel.schedule, parallel.pipeline_model_parallel_size, parallel.chunks
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    microbatches = max(1, batch // (data.micro_batch_size * replicas))
    return schedule(name, pp, microbatches, chunks, group), placement(name, pp, chunks)


def messages(config: Config, stages: list[int], placed: list[list[int]]) -> float:
    """Bytes of the messages that the rank of these stages has at a time: see the module's docstring."""
    rank_of = owners(placed)
    here = rank_of[stages[0]]
    beside = {rank_of.get(stage + step, here) for stage in stages for step in (-1, 1)} - {here}
    size = getattr(torch, config.dtype_name).itemsize * config.model.hidden_size / config.sequence_cut
    return tokens_of(config) * size * (2 * len(beside) + bool(beside))


def ring_buffers(config: Config, device: torch.device, dtype: torch.dtype) -> float:
    """Bytes in which cp ranks send each other keys and values, and their gradients."""
    return ring_slots(config, device) * 2 * widths(config)[1] * dtype.itemsize * tokens_of(config)


def _total(parts: dict[str, float]) -> float:
    return sum(parts.values())

"""Predict a run's memory before it starts: of every pipeline rank, at the peak of a step.

Bytes per parameter of this rank's part of the model (ZeRO, arXiv:1910.02054, section 3.1). With `optim` and
`optim_grads` the optimizer states are sharded over d ranks, with `optim_grads` the gradients too, which then
has some whole buckets in use, or that of the output layer. d is the size of dp x cp, for experts that of edp.

    type         weights   main weights   main_grad   Adam moments
    fp32            4           -             4           8/d
    bf16, fp16      2          4/d         4, 4/d         8/d        less with bf16 gradients and moments
    FP8 layers    2 + 2        4/d         4, 4/d         8/d        2: both casts

A microbatch adds the activations that its forward keeps for the backward (`plan/layer.py`: the table of a
layer). Recomputed layers keep their input, and the backward rebuilds the activations of one group at a time.
The last stage adds the last norm, the logits, their gradient and without kernels a chunk of the loss in fp32:
there a rank with a loss has its peak. Other ranks have it when the first gradients inside an MLP are added to
the kept activations or, with that MLP freed, the gradients of attention over cp. (The same count for a model
of 2022: arXiv:2205.05198, section 4.)

Pipeline ranks differ in their layers, in having the first or the last stage, and in the microbatches in
flight. So the plan walks through each rank's ops (`schedules.py`): F adds the activations of its chunk, B or
BW frees them; the tensors of a deferred weight gradient are held from B to W. Of messages are counted: one in
flight from and one to each neighbour, and one in use. `plan/fast.py` adds the fast paths' buffers, and
`plan/gradients.py` what gradients take beside these states: of two moments of a step the larger one counts.

Counted is what torch's allocator gives out, not the memory of torch itself (about 0.3 GiB per process on a
CPU, more on a GPU) and of libraries (gloo 2 MiB, oneDNN's bf16 matmuls copies of weights).
A prediction within 3 % of what is allocated is enough: finer details are left out.
"""

import operator
from collections import Counter
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from nanomegatron.config.batch import stages as batch_stages
from nanomegatron.config.settings import Config, padded_vocab_size
from nanomegatron.plan.fast import fused_loss, layer_graphs, piece_buffers, ring_buffers
from nanomegatron.plan.flops import expert_parameters, layer_matmul_parameters, parameter_count, stage_layers
from nanomegatron.plan.gradients import ParamGroup, in_backward, in_the_end
from nanomegatron.plan.layer import ITEMSIZE, Machine, Sizes, attention_in_flight, saved_by_layer, sizes_of
from nanomegatron.schedules import Op, most_open, placement, schedule

# The values of the code that allocates; tests/plan/test_memory.py compares them.
LOSS_CHUNK = 2048  # tokens whose logits are in fp32 at a time: ops.cross_entropy.CHUNK_TOKENS
WORKSPACES = 2**27  # bytes of cuBLAS, of sums and of numbers for the log, on a GPU
SETTLED = 4  # microbatches for each pipeline rank after which a schedule needs no more memory
KEPT, DEFERRED, FORWARD, BACKWARD, ENDING = range(5)  # the parts of ChunkMemory
# What an op does in turn: one microbatch more or fewer holds a part; 0: the op itself needs it for a while.
HOLDS = {"F": ((KEPT, 1), (FORWARD, 0)), "BW": ((BACKWARD, 0), (KEPT, -1)), "W": ((DEFERRED, -1),)}
HOLDS["B"] = (*HOLDS["BW"], (DEFERRED, 1), (ENDING, 0))


class OpOrder(NamedTuple):
    """What decides the order of a pipeline's ops: the arguments of `schedule`."""

    name: str
    pp: int
    microbatches: int
    chunks: int
    group: int | None

    @property
    def stages(self) -> list[list[int]]:
        """The stages of every pipeline rank."""
        return placement(self.name, self.pp, self.chunks)


class StageChunk(NamedTuple):
    """A stage: its number of layers, and whether it is the first (embedding) and the last (norm, loss)."""

    layers: int
    first: bool = True
    last: bool = True


class ChunkMemory(NamedTuple):
    """Bytes by part that one microbatch takes in a chunk."""

    kept: Counter  # from F to B or BW
    deferred: Counter  # from B to W
    forward: Counter  # beside these, at the end of F: a fused loss
    backward: Counter  # beside these, when B or BW begins: the loss, or the last layers
    ending: Counter  # beside these, when B is at the first layers


def memory(config: Config, vocab_size: int, machine: Machine) -> dict[str, float]:
    """Return the bytes by part at the peak of a step, of the pipeline rank that needs most.

    config: resolved; vocab_size: without padding.
    """
    return memory_of_ranks(config, vocab_size, machine, largest=True)[0]


def memory_of_ranks(config: Config, vocab_size: int, machine: Machine, largest: bool = False) -> list[dict]:
    """Return the same for each pipeline rank, or for the one that needs most."""
    sizes, model = sizes_of(config, machine), config.model
    vocab = padded_vocab_size(vocab_size, config.data.make_vocab_size_divisible_by, sizes.tp)
    layers, order = stage_layers(config, vocab), pipeline_order(config, SETTLED)
    kinds = tuple(StageChunk(len(each), i == 0, i == len(layers) - 1) for i, each in enumerate(layers))
    columns, defers = vocab // sizes.tp, order.name.startswith("zb")
    chunks = [part for kind in sorted(set(kinds)) for part in chunk_memory(sizes, kind, columns, defers)]
    fp8, totals = config.precision.fp8_layers(model.num_layers), [*map(_total, chunks)]
    alike = tuple((moe, layer in fp8) for layer, moe in enumerate(model.moe_layers)) if largest else ()
    ranks = []
    for own, ends, moments in peak_moments(order, kinds, alike):
        divided = param_groups(config, sizes, vocab, own, ends)
        parts = states(config, sizes, vocab, divided, ends)
        size, moment = max((sum(map(operator.mul, moment, totals)), moment) for moment in moments)
        if not config.run.eval_only:
            pool, copies = in_backward(config, sizes, divided, own, columns * ends[1], order.microbatches)
            ending = in_the_end(config, sizes, divided, columns * (ends[0] or ends[1]))
            if ending > size + pool + copies:  # when no activations are left
                size, moment = 0, (0,) * len(totals)
                pool, copies = 0, ending
            parts["gradients"] += pool
            parts["reduction, update"] = copies
        neighbours = 2 - (ends[0] + ends[1]) * (order.chunks == 1)
        parts["messages"] = (1 + 2 * neighbours) * sizes.h * sizes.value * (order.pp > 1)
        ranks.append((_total(parts) + size, parts, moment))
    ranks = [max(ranks, key=operator.itemgetter(0))] if largest else ranks
    for _, parts, moment in ranks:
        for name in ("activations", "logits and loss", "backward of a layer", "deferred weight gradients"):
            parts[name] = sum(number * part[name] for number, part in zip(moment, chunks) if number)
        parts["messages"] += ring_buffers(sizes)
        parts["room for pieces"] = piece_buffers(sizes)
        parts["graphs"] = layer_graphs(sizes, order.microbatches)
        parts["workspaces"] = WORKSPACES * machine.gpu
    return [parts for _, parts, _ in ranks]


def chunks_kept(config: Config) -> list[int]:
    """Return for each pipeline rank the most forwards of chunks that wait for their backward at a time."""
    return [most_open(ops) for ops in known_schedule(pipeline_order(config))]


def describe_memory(*ranks: dict[str, float]) -> str:
    """One line about the pipeline rank that needs most: the sum in GiB and the share of each part."""
    worst = max(ranks, key=_total)
    total = _total(worst)
    shares = [f"{name} {100 * size / total:.0f} %" for name, size in worst.items() if size > total / 200]
    which = f"of pipeline rank {ranks.index(worst)}" if len(ranks) > 1 else "per rank"
    return f"predicted peak {which} {total / 2**30:.2f} GiB ({', '.join(shares)})"


def states(
    config: Config, sizes: Sizes, vocab: int, groups: list[ParamGroup], ends: tuple
) -> dict[str, float]:
    """Return the bytes by part of a rank's states. ends: whether it has the first stage, the last."""
    dense, experts = _states(config, groups[0]), _states(config, groups[1])
    if not config.model.untie_embeddings_and_output_weights:  # the embedding reads the 16-bit ones
        dense["FP8 weights"] += 2 * sizes.fp8_head * ends[1] * (vocab // sizes.tp) * config.model.hidden_size
    return {name: size + experts[name] for name, size in dense.items()}


def param_groups(
    config: Config, sizes: Sizes, vocab: int, layers: list[int], ends: tuple
) -> list[ParamGroup]:
    """Return the dense parameters of a rank and those of its experts."""
    model, tp = config.model, sizes.tp
    fp8 = [layer for layer in layers if layer in config.precision.fp8_layers(model.num_layers)]
    widths = [tp * sizes.ffn(model.moe_layers[layer]) for layer in fp8]
    matrices = sum(layer_matmul_parameters(model, tp, width) for width in widths)
    if model.untie_embeddings_and_output_weights:
        matrices += sizes.fp8_head * ends[1] * (vocab // tp) * model.hidden_size
    replicas, edp = sizes.shards(config)
    params = parameter_count(model, vocab, tp, layers, *ends, experts=0)
    fp8_experts = expert_weights(sizes, fp8) if sizes.fp8_experts else 0
    dense = ParamGroup(params, replicas, matrices)
    return [dense, ParamGroup(expert_weights(sizes, layers), edp, fp8_experts)]


def expert_weights(sizes: Sizes, layers: list[int]) -> int:
    """Count the parameters of experts on a rank that has the layers of these numbers."""
    model, sparse = sizes.model, sizes.model.moe_layers
    return sum(sparse[layer] for layer in layers) * expert_parameters(model, sizes.local_experts, sizes.etp)


def _states(config: Config, group: ParamGroup) -> dict[str, float]:
    """The same for one group of parameters."""
    params, ranks, fp8 = group
    optimizer, shared = config.optimizer, group.shards(config)
    item = ITEMSIZE[config.dtype_name]
    on_device = 1 - optimizer.optimizer_offload_fraction * optimizer.optimizer_cpu_offload
    grads = params * ITEMSIZE[config.grad_dtype_name]
    if config.parallel.sharding == "optim_grads":
        grads = params * 4 / ranks
    if config.run.eval_only:
        return {"weights": params * item, "FP8 weights": 2 * fp8}
    moments = sum(4 if t == "fp32" else 2 for t in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype))
    return {
        "weights": (params - fp8 * config.precision.optimizer_casts(shared > 1)) * item,
        "main weights": params * 4 * on_device / shared if item < 4 else 0,
        "gradients": grads,
        "Adam moments": params * moments * on_device / shared,
        "FP8 weights": 2 * fp8,
    }


@lru_cache(maxsize=1024)
def peak_moments(order: OpOrder, kinds: tuple[StageChunk, ...], alike: tuple = ()) -> list[tuple]:
    """Return each rank's layers, its ends (first stage, last stage), and its moments that may need most.

    A moment: for each kind of stage, in order, the microbatches that hold each part of ChunkMemory. kinds: of
    each stage; alike: of each layer what makes it differ, where ranks with the same layers and ends are one.
    """
    first = {kind: 5 * i for i, kind in enumerate(sorted(set(kinds)))}
    stops, found, ranks = [*accumulate(kind.layers for kind in kinds)], {}, []
    for rank, (ops, stages) in enumerate(zip(known_schedule(order), order.stages, strict=True)):
        own = [layer for i in stages for layer in range(stops[i] - kinds[i].layers, stops[i])]
        ends = 0 in stages, len(kinds) - 1 in stages
        like = (ends, *sorted(alike[layer] for layer in own)) if alike else rank
        moments = found.setdefault(like, (own, ends, set()))[2]
        held, starts = [0] * 5 * len(first), [first[kinds[stage]] for stage in stages]
        for kind, number, _ in ops:
            for part, change in HOLDS[kind]:
                at = starts[number] + part
                held[at] += change
                if not change:
                    moments.add((*held[:at], 1, *held[at + 1 :]))
    for own, ends, moments in found.values():
        peaks: list[tuple[int, ...]] = []  # no other has as much of everything
        for moment in sorted(moments, key=sum, reverse=True):
            peaks += [moment] * (not any(all(map(operator.ge, peak, moment)) for peak in peaks))
        ranks.append((own, ends, peaks))
    return ranks


@lru_cache(maxsize=4096)
def chunk_memory(sizes: Sizes, chunk: StageChunk, columns: int, defers: bool = False) -> ChunkMemory:
    """Return the bytes that a microbatch takes in a chunk.

    columns: of the logits on a rank; defers: weight gradients are made in W, not in B.
    """
    model, value = sizes.model, sizes.value
    layer, inside = _layer_backward(sizes, defers)
    inside *= chunk.layers > 0
    recomputed = max((len(run) for run, again in model.segments(chunk.layers) if again), default=0)
    group = min(recomputed or 1, chunk.layers)  # the layers first or last in the chunk's backward
    deferred = value * deferred_wgrad_values(sizes, chunk, columns)
    freed = value * deferred_wgrad_values(sizes, StageChunk(group, False, False), columns)
    fp32 = 0 if sizes.machine.kernels else 8 if sizes.item < 4 else 4  # bytes of copies per logit, in a chunk
    forward = Counter()
    logits, loss = 0.0, 0.0
    freed_loss = last_norm(sizes) * chunk.last  # before the last layers' backward
    if chunk.last and model.cross_entropy_loss_fusion:  # the forward leaves the gradient of the stream
        logits = value * sizes.h
        at_loss = fused_loss(sizes, columns, fp32) - logits
        forward = Counter({"activations": logits, "logits and loss": at_loss})
    elif chunk.last:
        logits = value * columns
        casts = 2 * sizes.tokens * sizes.fp8_head  # of the gradient of the logits
        chunk_copies = fp32 * min(sizes.tokens, LOSS_CHUNK)
        product = value * sizes.h + product_copies(sizes, columns, model.hidden_size)
        loss = max(columns * chunk_copies, columns * casts, product * (not sizes.machine.gpu and not defers))
        if sizes.config.sequence_cut > 1:  # the last norm's output, gathered; its gradient before the scatter
            loss += 2 * value * model.hidden_size
        freed_loss += logits + loss
    last_layers = max(0, recomputed * layer + inside - freed_loss)
    return ChunkMemory(
        kept=Counter({"activations": activations(sizes, chunk), "logits and loss": logits}),
        deferred=Counter({"deferred weight gradients": deferred}),
        forward=forward,
        backward=Counter({"logits and loss": loss, "backward of a layer": last_layers}),
        ending=Counter({"backward of a layer": max(0, group * layer + inside - freed)}),
    )


def _layer_backward(sizes: Sizes, defers: bool) -> tuple[float, float]:
    """Return the bytes that a layer keeps of a microbatch, and the most that gradients inside it take.

    defers: but those of weights. The latter are those of an MLP, or those of attention less the activations
    that the MLP has freed.
    """
    saved, model, mlp = saved_by_layer(sizes), sizes.model, 0.0
    for moe in {*model.moe_layers}:
        ffn, routed = sizes.ffn(moe), moe * sizes.copies * sizes.expert_ffn
        freed = sizes.input * ffn * (not model.recomputes("mlp_act"))  # the input of fc2, which is done
        freed += sizes.expert_input * routed * (not model.recomputes("moe_act"))
        mlp = max(mlp, sizes.item * (ffn + routed) * (3 if model.gated else 2) - freed)
    attention = attention_in_flight(sizes) - saved["MLP"] - saved["experts"]
    inside = sizes.tokens * max(mlp, attention)
    if not (defers or sizes.machine.gpu):
        inside = max(inside, _weight_gradients(sizes, saved["MLP"]))
    return sizes.tokens * _total(saved), inside


def _weight_gradients(sizes: Sizes, saved: float) -> float:
    """Return the most bytes that an MLP's weight gradients take on a CPU. saved: bytes a token of an MLP."""
    h, f, item = sizes.model.hidden_size, max(map(sizes.ffn, sizes.model.moe_layers)), sizes.item
    outputs = f * (2 if sizes.model.gated else 1)
    fc2 = sizes.tokens * item * f + product_copies(sizes, h, f)
    fc1 = sizes.tokens * (item * (outputs + h) - saved) + product_copies(sizes, outputs, h)
    return max(fc1, fc2)


def product_copies(sizes: Sizes, rows: int, columns: int) -> float:
    """Return the bytes that a weight gradient takes on a CPU before it is added, as param.add_product does.

    The product, and its factors in fp32 if they are to be added to fp32 sums.
    """
    wide = max(sizes.item, sizes.grad_item)
    return wide * (rows * columns + (wide > sizes.item) * sizes.tokens * (rows + columns))


def activations(sizes: Sizes, chunk: StageChunk) -> float:
    """Return the bytes that a chunk keeps of a microbatch, from its embedding or input to its last norm."""
    model, layer = sizes.model, _total(saved_by_layer(sizes))
    stream = sizes.item * sizes.h
    spread = model.hidden_size // sizes.tp if model.distribute_saved_activations else sizes.h
    token = stream * (chunk.first and sizes.keeps_masks)
    for run, recomputed in model.segments(chunk.layers):
        token += sizes.item * spread if recomputed else layer * len(run)
    return sizes.tokens * token + last_norm(sizes) * chunk.last


def last_norm(sizes: Sizes) -> float:
    """Return the bytes that the norm before the output layer keeps, and this layer without a fused loss."""
    head = sizes.input if sizes.fp8_head else sizes.item
    kept = sum(sizes.norm_input) + head * (not sizes.model.cross_entropy_loss_fusion)
    return sizes.tokens * sizes.h * kept


def deferred_wgrad_values(sizes: Sizes, chunk: StageChunk, columns: int) -> float:
    """Return the values per token held from B to W: inputs of matmuls, and gradients of their outputs.

    FP8 values count by their size. A fused loss has computed the output layer's gradient before.
    """
    model, h = sizes.model, sizes.model.hidden_size
    f = 3 if model.gated else 2  # of fc2's input, and of the gradient of fc1's output
    ffn = f * sum(n * sizes.ffn(moe) for moe, n in Counter(model.moe_layers).items()) / model.num_layers
    layer = sizes.input * (2 * (sizes.h + sizes.n + sizes.g + h) + ffn)
    experts = sizes.expert_input * sizes.copies * (2 * h + f * sizes.expert_ffn)
    layer += experts * sum(model.moe_layers) / model.num_layers
    loss = (sizes.h + columns) * (chunk.last and not model.cross_entropy_loss_fusion)
    return chunk.layers * layer / sizes.item + h * chunk.first + loss


def pipeline_order(config: Config, settled: int | None = None) -> OpOrder:
    """Return that of the run's largest batch; of `settled` microbatches a rank, if the ops repeat then."""
    parallel, data = config.parallel, config.data
    replicas = parallel.data_parallel_size or 1
    batch = max(size for _, size in batch_stages(data, replicas))
    name, pp, chunks = parallel.schedule, parallel.pipeline_model_parallel_size, parallel.chunks
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    microbatches = max(1, batch // (data.micro_batch_size * replicas))
    if settled and name != "gpipe":  # which keeps all of them
        microbatches = min(microbatches, settled * max(pp, group or 1) + microbatches % pp)
    return OpOrder(name, pp, microbatches, chunks, group)


@lru_cache(maxsize=256)
def known_schedule(order: OpOrder) -> list[list[Op]]:
    """Return the ops of every pipeline rank."""
    return schedule(*order)


def _total(parts: dict[str, float]) -> float:
    return sum(parts.values())

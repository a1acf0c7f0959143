"""The activations that a layer keeps of each token for its backward.

In values of one tp rank: h features of the residual stream, n of the query, g of the key or value, f of the
FFN. Sequence parallelism divides the rows marked * by tp.

    norm inputs *      2h          the residual sums, or what is added to them, or both (4h); a CPU's RMSNorm
                                   keeps x and x/rms in fp32
    norm outputs *     2h          inputs of QKV and fc1; none if `layernorm` is recomputed
    QKV output         n + 2g      if attention reads q, k or v in place; after an all-to-all over cp its
                                   result instead, with at least one key/value head for each rank
    q/k norm           n + g       where the QKV output is not kept, or by a CPU's RMSNorm
    q, k, v            n + g       q and k after a norm, or after rotation without the kernel
                       2n          k and v repeated for each query head: with grouped queries, not by `fused`;
                                   `unfused` always copies q, k and v
    attention output   n           twice with an all-to-all, before and after it
    scores             heads * s   `unfused`: softmax in the weights' type, also in fp32 without the kernel
    MLP                4f or 2f    SwiGLU: gate and up, silu(gate) without the kernel, product; GELU: before
                                   and after; one f less if `mlp_act` is recomputed, none with `mlp`
    experts            c(2h + 4f)  for c copies of a token, with the f of one expert: inputs, as in an MLP,
                                   outputs; none with `moe`. Without the kernel fp32 outputs; in the plain
                                   dispatch of a CPU those of all choices of the tokens at hand, here or not
    router *           k, E        two int64 for each choice, fp32 for each expert
    dropout masks *    2h          with --hidden-dropout
    statistics         fp32        1 or 2 per norm, log-sum-exp of each head

FP8 layers keep one byte per value of their inputs: norm outputs, attention output (beside the 16 bits that
attention keeps) and the product inside the MLP. A recomputed MLP then starts at its norm. (Layers in bf16 at
the ends are counted like the others.)

The load of experts is assumed to be even: an etp rank has the k copies of the tokens of all etp ranks, up to
the capacity, and in FP8 16 rows of padding for each of its experts. Shared experts count as an MLP.
"""

import math
from collections import Counter
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from nanomegatron.config.settings import Config

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes per value, by torch's name of the type
CHOICE_TABLES = (
    18  # bytes of a choice in a plain dispatch beside the router's: an int64 index, masks, fp32 probs
)
ONE_STAGE = dict(pipeline_model_parallel_size=1, num_virtual_stages_per_pipeline_rank=None)
ONE_STAGE |= dict(pipeline_schedule=None, pipeline_split="even", data_parallel_size=None)


class Machine(NamedTuple):
    """The properties of a machine that a run's memory depends on."""

    gpu: bool = True
    kernels: bool = True  # those of cuda/ are built for it
    fused: bool = True  # its GPUs have fused attention: Ampere or later


class CPMode(NamedTuple):
    """How cp ranks split a layer's attention: heads over `heads` ranks (all-to-all), keys over `keys`."""

    heads: int = 1
    keys: int = 1
    gathered: bool = False  # all keys at once, not in a ring


class Sizes:
    """The quantities of the table above, by its letters, of one rank in any pipeline and with any dp."""

    def __init__(self, config: Config, machine: Machine) -> None:
        model, parallel, precision = config.model, config.parallel, config.precision
        self.config, self.model = config, model
        self.parallel, self.machine = parallel, machine
        self.tp = parallel.tensor_model_parallel_size
        self.item = ITEMSIZE[config.dtype_name]  # bytes of a weight or an activation
        fp8 = precision.fp8_format is not None
        self.fp8_experts = precision.fp8_experts
        self.fp8_head = fp8 and precision.fp8_output_proj
        self.input = 1 if fp8 and precision.fp8_wgrad else self.item  # per value of a matmul's kept input
        self.expert_input = self.input if self.fp8_experts else self.item
        own = parallel.max_seqlen_per_dp_cp_rank or config.data.seq_length // parallel.context_parallel_size
        self.row = own * parallel.context_parallel_size  # tokens that cp ranks share, the largest pack's
        self.tokens = own * config.data.micro_batch_size  # of a microbatch on this rank
        self.h = model.hidden_size / config.sequence_cut  # features of the stream kept of a token
        self.heads = model.num_attention_heads // self.tp
        self.n = self.heads * model.head_dim
        self.g = max(model.num_kv_heads // self.tp, 1) * model.head_dim
        self.etp = parallel.expert_tensor_parallel_size or self.tp
        self.local_experts = (model.num_experts or 0) // parallel.expert_model_parallel_size
        self.expert_ffn = model.moe_ffn_size // self.etp
        capacity = model.moe_expert_capacity_factor or 1.0
        capacity = capacity if model.moe_pad_expert_input_to_capacity else min(capacity, 1.0)
        padding = precision.fp8_multiple * self.local_experts * self.fp8_experts / self.tokens
        self.copies = model.moe_router_topk * capacity * self.etp / config.sequence_cut + padding
        self.grad_item = ITEMSIZE[config.grad_dtype_name]  # bytes of a gradient of a weight
        self.value = self.item * self.tokens  # bytes of one value of each token of a microbatch

    def shards(self, config: Config) -> tuple[int, int]:
        """Return the sizes of dp x cp and of edp in a run with these sizes, which share states."""
        ranks = (config.parallel.data_parallel_size or 1) * config.parallel.context_parallel_size
        return ranks, max(1, ranks * self.tp // (config.parallel.expert_model_parallel_size * self.etp))

    def ffn(self, moe: bool) -> int:
        """Return the inner features of a layer's MLP; moe: of its shared experts."""
        model = self.model
        return (model.moe_shared_expert_intermediate_size or 0 if moe else model.ffn_size) // self.tp

    @property
    def plain_dispatch(self) -> bool:
        """Whether moe.py itself dispatches tokens, and without a kernel, as `paths_for` chooses."""
        model, parallel = self.model, self.parallel
        overlaps = parallel.overlap_moe_expert_parallel_comm or model.moe_shared_expert_overlap
        fast = parallel.fast_paths or (parallel.fast_paths is None and (self.machine.gpu or overlaps))
        return not fast and not (self.machine.kernels and model.moe_permute_fusion)

    @property
    def choices_at_hand(self) -> float:
        """Choices of experts, for each token of this rank, of all tokens that a plain dispatch brings here.

        An all-gather brings all tokens, an all-to-all those with an expert on this ep rank.
        """
        model, ep = self.model, self.parallel.expert_model_parallel_size
        k, experts, tokens = model.moe_router_topk, model.num_experts, ep
        if model.moe_token_dispatcher_type == "alltoall" and ep * self.etp > 1:
            elsewhere = math.comb(experts - self.local_experts, k) / math.comb(experts, k)
            tokens = ep * (1 - elsewhere)
            if model.moe_pad_expert_input_to_capacity:
                tokens = min(k * model.moe_expert_capacity_factor, ep)
        return k * tokens * self.etp / self.config.sequence_cut

    @property
    def backend(self) -> str:
        """The attention backend on this machine, as ops.attention.choose_backend chooses it."""
        if self.model.backend != "auto":
            return self.model.backend
        if self.machine.gpu:
            return "fused" if self.item == 2 and self.machine.fused else "unfused"
        return "unfused" if self.model.attention_dropout else "flash"

    @property
    def norm_input(self) -> tuple[int, int]:
        """Bytes per value that a norm keeps: its input, and fp32 copies if torch has no fused kernel."""
        if self.machine.gpu or self.model.normalization != "RMSNorm":
            return self.item, 0
        return (4, 4) if self.item == 4 else (0, 8)

    @property
    def keeps_masks(self) -> bool:
        """Whether hidden dropout keeps its masks; the kernel computes them again."""
        return self.model.hidden_dropout > 0 and not (self.machine.kernels and self.model.bias_dropout_fusion)

    @cached_property
    def cp_modes(self) -> list[CPMode]:
        """The mode of each layer's attention; a window needs all keys at once."""
        model, parallel = self.model, self.parallel
        cp, modes = parallel.context_parallel_size, []
        head_ranks = {"a2a": cp, "a2a+p2p": next(iter(parallel.hierarchical_context_parallel_sizes), 1)}
        for name, window in zip(parallel.cp_types(model.num_layers), model.windows, strict=True):
            heads = head_ranks.get(name, 1)
            modes.append(CPMode(heads, cp // heads, name == "allgather" or window is not None))
        return modes


@lru_cache(maxsize=64)
def sizes_of(config: Config, machine: Machine) -> Sizes:
    """Return the same Sizes for all configs that differ in their pipeline and in dp alone."""
    return _known_sizes(replace(config, parallel=replace(config.parallel, **ONE_STAGE)), machine)


_known_sizes = lru_cache(maxsize=1024)(Sizes)


@lru_cache(maxsize=1024)
def saved_by_layer(sizes: Sizes) -> dict[str, float]:
    """Return the bytes per token that a layer keeps for its backward, by part, averaged over the layers."""
    model, total = sizes.model, Counter()
    for (mode, moe), layers in Counter(zip(sizes.cp_modes, model.moe_layers, strict=True)).items():
        for part, size in (_saved(sizes, moe) | _saved_by_attention(sizes, mode)).items():
            total[part] += size * layers / model.num_layers
    return dict(total)


def _saved(sizes: Sizes, moe: bool) -> dict[str, float]:
    """The same for a layer with or without experts, except the part between attention's matmuls."""
    model, item, read = sizes.model, sizes.item, sizes.input
    outputs = 1 if read < item and model.recomputes("mlp") else 2  # the norms whose outputs are kept
    routed = item * (moe and read < item)  # the router reads 16 bits
    experts = moe and not model.recomputes("moe")
    norms = 4 if model.norm_placement == "both" else 2
    mlp = (experts and not model.recomputes("shared_experts")) if moe else not model.recomputes("mlp")
    return {
        "norm inputs": norms * sum(sizes.norm_input) * sizes.h,
        "norm outputs": (outputs * read + routed) * sizes.h * (not model.recomputes("layernorm")),
        "MLP": sizes.ffn(moe) * _feature(sizes, read, "mlp_act") * mlp,
        "experts": _saved_by_experts(sizes) * experts,
        "dropout masks": 2 * item * sizes.h * sizes.keeps_masks,
        "statistics": 4 * (norms * (1 if model.normalization == "RMSNorm" else 2) + sizes.heads),
    }


def _saved_by_attention(sizes: Sizes, mode: CPMode) -> dict[str, float]:
    """The same for the part between the matmuls of QKV and of the projection."""
    model, item = sizes.model, sizes.item
    n, g = sizes.n, sizes.g
    kernels = sizes.machine.kernels
    recomputed = model.recomputes("core_attn")
    a2a = mode.heads > 1 and not recomputed
    whole = mode.keys == 1 and not recomputed  # else q, k, v are kept as they are
    unfused = whole and sizes.backend == "unfused"
    rotated = model.position_embedding_type in ("rope", "yarn") and not (kernels and model.rope_fusion)
    new_qk = unfused or (not a2a and (model.qk_layernorm or rotated or model.softmax_scale is not None))
    expanded = unfused or (whole and g < n and sizes.backend != "fused")
    in_place = not (new_qk and expanded)
    packed = n + 2 * (max(g, mode.heads * model.head_dim) if a2a else g)
    norm_input, copies = sizes.norm_input
    score = item + 4 * (item < 4 and not (kernels and model.masked_softmax_fusion))
    score += (1 + item) * (model.attention_dropout > 0)  # the mask and the result
    score += item * (model.attn_logit_softcapping is not None)  # the bounded ones
    casts = sizes.input < item or (a2a and not unfused)
    return {
        "QKV output": item * packed * in_place,
        "q/k norm": (copies + norm_input * (a2a or not in_place)) * (n + g) * model.qk_layernorm,
        "q, k, v": item * (n * new_qk + (2 * n if expanded else g * new_qk)),
        "attention output": (item + sizes.input * casts) * n,
        "scores": score * sizes.heads * sizes.row * unfused,
    }


def _feature(sizes: Sizes, read: int, activation: str) -> float:
    """Return the bytes that an MLP keeps per inner feature; its last matmul reads `read` of them."""
    model, before = sizes.model, 1
    if model.gated:
        before = 2 if sizes.machine.kernels and model.bias_swiglu_fusion else 3
    return before * sizes.item + read * (not model.recomputes(activation))


def _saved_by_experts(sizes: Sizes) -> float:
    """Return the bytes per token that router and experts keep."""
    model, item, read = sizes.model, sizes.item, sizes.expert_input
    alltoall = model.moe_token_dispatcher_type == "alltoall"
    swaps = alltoall and sizes.parallel.expert_model_parallel_size > 1
    output = 4 if swaps and not (sizes.machine.kernels and model.moe_permute_fusion) else item
    outputs = output * sizes.copies * model.hidden_size
    if sizes.plain_dispatch:
        outputs = (4 * model.hidden_size + CHOICE_TABLES) * sizes.choices_at_hand
    copy = read * model.hidden_size + _feature(sizes, read, "moe_act") * sizes.expert_ffn
    inputs = item * (model.moe_shared_expert_gate + bool(model.moe_input_jitter_eps))
    router = 16 * model.moe_router_topk + 4 * (model.num_experts or 0)
    return sizes.copies * copy + outputs + router / sizes.config.sequence_cut + inputs * sizes.h


def attention_in_flight(sizes: Sizes) -> float:
    """Return the most bytes per token that the backward of attention over cp needs beside the kept ones.

    If keys are gathered: queries and their gradients, all keys and values, and fp32 sums of their gradients;
    with `unfused` the scores of a block. (A ring or an all-to-all otherwise needs less than an MLP.)
    """
    largest = 0.0
    for mode in {*sizes.cp_modes}:
        size = 12 * sizes.heads * sizes.row / mode.keys * (sizes.backend == "unfused")
        if mode.gathered:
            size = size * mode.keys + 4 * sizes.item * sizes.n + mode.keys * (2 * sizes.item + 16) * sizes.g
        largest = max(largest, size * (mode.keys > 1))
    return largest

"""What one layer takes of a rank's memory: a part of `plan/memory.py`.

Of each token it keeps for its backward, in values, with n the query, g the key/value and f the FFN width of
one tp rank, and with sequence parallelism of those rows marked * the tp-th part:

    norm inputs  *      2h          these are the residual sums; a CPU's RMSNorm keeps x and x/rms, in fp32
    norm outputs *      2h          which QKV and fc1 multiply; none if `layernorm` is made again
    QKV output          n + 2g      as long as attention or a q/k norm reads it in place
    q/k norm            n + g       only a CPU's RMSNorm, as above
    q, k, v             n + g       q and k where a norm, or rotation without the kernel, made new ones; v in
                                    the QKV output;
                        3n          `unfused` makes all anew, the others k and v too for grouped queries,
                                    a head for each query head; `fused` reads groups as they are
    attention output    n
    scores              heads * s   `unfused` alone: softmax in the type of the weights, and without the
                                    kernel in fp32
    MLP                 4f or 2f    SwiGLU: gate and up, silu(gate) but for the kernel, product; GELU: before
                                    and after; one f less if `mlp_act` is made again, none with `mlp`
    experts             c(2h + 4f)  of c copies of a token, with the f of one expert: inputs, as in an MLP,
                                    and results, by alltoall without the kernel in fp32; none with `moe`
    router *            k, E        fp32 and int64 of each choice and each expert
    dropout masks *     2h          with --hidden-dropout
    statistics          fp32        1 or 2 a norm (of each head, for a q/k norm), log-sum-exp of each head

Of what FP8 layers multiply, the norm outputs, the attention output and the MLP's product, they keep one byte
a value instead; attention keeps its output besides, and a recomputed MLP is made with the norm before it.
(Layers in bf16 at the ends are counted as the others.)

Copies are taken to be spread evenly: a rank of etp has the k choices of each of etp ranks' tokens, as many as
its experts have room for, and in FP8 16 rows of padding for each of these. Shared experts are an MLP, whose
result is kept for a gate.

Of rows that cp ranks share, p2p and allgather read q, k and v as they are and keep no scores; a2a keeps what
has come of some heads, n + 2g with a copy of a key/value head for each rank, and its output both ways. The
backward of attention has more beside these, in values a token, ' in fp32, for p2p or allgather over r ranks:

    queries             2n + min(r, 4) n        gradients: of the output, of all blocks' queries, of those of
                                                blocks that wait to be added; with r > 4 5n + n'
    p2p                 8g                      k and v of two ranks, in use and coming
                        8g + min(r, 4) 2g       their gradients: summed, found and on their way, of blocks
                                                that wait; with r > 4 14g + 2g'
    allgather           r * (2g + 4g')          all k and v; sums of their gradients, and in another order;
                                                so too with a window. Of queries 4n
    a2a                 n + 2 * (n + 2g)        gradients: of the output, of what has come, in another order
    scores              3' * heads * keys       `unfused`: of the keys of one block

On GPUs what comes by p2p lies in `comm_symmetric.PeerRing`s instead, made once for all layers: two slots for
k and v, and one a round for their gradients, of 4g each.
"""

import math
from collections import Counter
from typing import NamedTuple

import torch

from nanomegatron.config.settings import Config, TransformerConfig
from nanomegatron.cp_shard import ROUND
from nanomegatron.data.packing import Ranks
from nanomegatron.fp8 import MULTIPLE
from nanomegatron.ops.attention import choose_backend
from nanomegatron.ops.kernels import why_not
from nanomegatron.ops.merge import MOST


class Way(NamedTuple):
    """How cp ranks share the attention of a layer: so many its heads, and so many such groups its keys."""

    heads: int = 1
    keys: int = 1
    gathered: bool = False  # all keys at once, not in a ring
    experts: bool = False  # it has some


def ways(config: Config) -> list[Way]:
    """The way of each layer."""
    model, parallel, cp = config.model, config.parallel, config.parallel.context_parallel_size
    by_heads = {"a2a": cp, "a2a+p2p": next(iter(parallel.hierarchical_context_parallel_sizes), 1)}
    layers = zip(parallel.cp_types(model.num_layers), model.windows, model.moe_layers, strict=True)
    each = ((by_heads.get(n, 1), n == "allgather" or window is not None, moe) for n, window, moe in layers)
    return [Way(heads, cp // heads, gathered, moe) for heads, gathered, moe in each]


def saved_by_layer(config: Config, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Bytes a token that a layer keeps for its backward, on average: the first table."""
    found, count = Counter(ways(config)), config.model.num_layers
    parts = [(saved(config, dtype, device, way), times / count) for way, times in found.items()]
    return {name: sum(sizes[name] * share for sizes, share in parts) for name in parts[0][0]}


def saved(config: Config, dtype: torch.dtype, device: torch.device, way: Way) -> dict[str, float]:
    """The same of a layer whose attention is shared in this way."""
    model, tp, e = config.model, config.parallel.tensor_model_parallel_size, dtype.itemsize
    heads, groups = model.num_attention_heads // tp, max(model.num_kv_heads // tp, 1)
    h, (n, g, f) = model.hidden_size / config.sequence_cut, widths(config, way.experts)
    backend = choose_backend(model.attention_backend, device, dtype, model.attention_dropout)
    kept, read = norm_input(model, dtype, device), linear_input(config)
    kernels = not why_not(device)
    inner = e * (3 - (kernels and model.bias_swiglu_fusion) if model.swiglu else 1)  # without what fc2 reads
    mlp = (inner + read * (not model.recomputes("mlp_act"))) * f
    mlp *= not model.recomputes("shared_experts" if way.experts else "mlp")
    attends_again = model.recomputes("core_attn")
    whole = way.keys == 1 and not attends_again  # attention to all keys, with what autograd keeps of it
    come = way.heads > 1 and not attends_again
    unfused = backend == "unfused" and whole
    rotates = model.position_embedding_type in ("rope", "yarn") and not (kernels and model.rope_fusion)
    new_qk = unfused or (not come and (model.qk_layernorm or rotates))
    new_kv = unfused or (g < n and backend != "fused" and whole)  # as wide as q
    copied = kept > e and e < 4  # norms keep fp32 copies of their inputs, not these
    numbers = 1 if model.normalization == "RMSNorm" else 2
    again = read < e and model.recomputes("mlp")
    norms = 1 if again else 2
    shared = model.moe_shared_expert_intermediate_size is not None
    routed = (e - read * (not shared)) * (way.experts and read < e)  # the router reads it in 16 bits
    read_in_place = not new_kv or not new_qk  # the QKV output, or what has come in place of it
    return {
        "norm inputs": (kept + (e if again else kept)) * h,
        "norm outputs": (read * norms + routed) * h * (not model.recomputes("layernorm")),
        "QKV output": e * (n + 2 * g) * ((read_in_place and not come) or (model.qk_layernorm and not copied)),
        "q/k norm": (kept if copied else kept - e) * (n + g) * model.qk_layernorm,
        "q, k, v": e * (n * new_qk + 2 * n * new_kv + g * (new_qk and not new_kv))
        + e * (n + 2 * _copied_width(config, way)) * (come and read_in_place),
        "attention output": (e + read * (read < e or (come and not unfused))) * n,
        "scores": heads * row_of(config) * _score(model, e, kernels) * unfused,
        "MLP": mlp * (not way.experts or not model.recomputes("moe")),
        "experts": _experts(config, inner, kernels) * (way.experts and not model.recomputes("moe")),
        "dropout masks": 2 * e * h * (model.hidden_dropout > 0),
        "statistics": 4
        * (
            numbers * (norms + (heads + groups) * model.qk_layernorm)
            + heads * (not unfused and not attends_again)
        ),
    }


def _experts(config: Config, inner: float, kernels: bool) -> float:
    """Bytes a token that router and experts keep; these `inner` a feature, beside what fc2 reads."""
    model, e, k = config.model, getattr(torch, config.dtype_name).itemsize, config.model.moe_router_topk
    copies, f, read = copies_of(config), routed_width(config), expert_input(config)
    swaps = model.moe_token_dispatcher_type == "alltoall" and config.parallel.expert_model_parallel_size > 1
    by_torch = swaps and not (kernels and model.moe_permute_fusion)
    rows = read + (4 if by_torch else e)
    features = (inner + read * (not model.recomputes("moe_act"))) * f
    losses = any(model.moe_aux_loss_coeff) or bool(model.moe_z_loss_coeff)
    router = (34 if by_torch else 16) * k + 4 * (model.num_experts or 0) * (1 + losses)
    inputs = e * model.hidden_size * (bool(model.moe_shared_expert_gate) + bool(model.moe_input_jitter_eps))
    return copies * (rows * model.hidden_size + features) + (router + inputs) / config.sequence_cut


def copies_of(config: Config) -> float:
    """Rows of a rank's experts for each of its tokens."""
    model, etp = config.model, config.parallel.expert_tensor_parallel_size
    room = model.moe_expert_capacity_factor or 1.0
    room = room if model.moe_pad_expert_input_to_capacity else min(room, 1.0)
    etp = etp or config.parallel.tensor_model_parallel_size
    local = (model.num_experts or 0) // config.parallel.expert_model_parallel_size
    padding = MULTIPLE * local * experts_in_fp8(config) / tokens_of(config)
    return model.moe_router_topk * room * etp / config.sequence_cut + padding


def mlp_widths(config: Config) -> list[float]:
    """Features a token inside the MLP of each layer; of its experts those of all copies."""
    routed = copies_of(config) * routed_width(config)
    return [widths(config, moe)[2] + moe * routed for moe in config.model.moe_layers]


def routed_width(config: Config) -> int:
    """Features inside an expert that one etp rank has."""
    parallel = config.parallel
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    return config.model.moe_ffn_size // etp


def attention_in_flight(config: Config, dtype: torch.dtype, device: torch.device) -> float:
    """Bytes a token that the backward of shared attention has beside them, at most: the second table."""
    model, (n, *_), e = config.model, widths(config), dtype.itemsize
    heads = model.num_attention_heads // config.parallel.tensor_model_parallel_size
    backend = choose_backend(model.attention_backend, device, dtype, model.attention_dropout)
    scores = 12 * heads * row_of(config) * (backend == "unfused")
    found = [0.0]
    for way in set(ways(config)):
        g = _copied_width(config, way)
        a2a = e * (3 * n + 4 * g) * (way.heads > 1)
        parts, wide = (2, 0) if way.gathered else (min(way.keys, MOST), 4 * (way.keys > MOST))
        sums = (parts + 2 - bool(wide)) * e + wide
        if way.gathered:
            shared = g * way.keys * (2 * e + 16)
        else:
            several = min(ROUND, way.keys - 1) * e
            shared = 2 * g * (several + (2 * e + wide if ring_slots(config, device) else 2 * several + sums))
        block = scores / (1 if way.gathered else way.keys)
        found.append(a2a + (n * sums + shared + block) * (way.keys > 1))
    return max(found)


def ring_slots(config: Config, device: torch.device) -> int:
    """How many times a rank's keys and values have room where others write; 0 where they send messages."""
    ranks = max((way.keys for way in ways(config) if not way.gathered), default=1)
    if ranks == 1 or device.type != "cuda" or config.parallel.dynamic_context_parallel:
        return 0
    return min(ROUND, ranks - 1) * (3 + math.ceil((ranks - 1) / ROUND))


def _copied_width(config: Config, way: Way) -> int:
    """Features of the keys or values of one tp rank, with a head for each of those that share heads."""
    return max(widths(config)[1], way.heads * config.model.head_dim)


def linear_input(config: Config) -> int:
    """Bytes a value that a linear layer keeps of its input."""
    in_fp8 = config.precision.fp8_format and config.precision.fp8_wgrad
    return 1 if in_fp8 else getattr(torch, config.dtype_name).itemsize


def expert_input(config: Config) -> int:
    """The same of an expert's."""
    in_16_bits = getattr(torch, config.dtype_name).itemsize
    return linear_input(config) if experts_in_fp8(config) else in_16_bits


def experts_in_fp8(config: Config) -> bool:
    """Whether those of FP8 layers are."""
    return config.precision.fp8_format is not None and config.precision.fp8_recipe == "rowwise"


def norm_input(model: TransformerConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes a value that a norm keeps: its input, or where torch has no fused kernel two fp32 tensors."""
    return 8 if model.normalization == "RMSNorm" and device.type == "cpu" else dtype.itemsize


def _score(model: TransformerConfig, e: int, kernels: bool) -> int:
    """Bytes a score of unfused attention: softmax, from fp32 without a kernel, dropout's mask and result."""
    wide = 4 * (e < 4 and not (kernels and model.masked_softmax_fusion))
    return e + wide + (1 + e) * (model.attention_dropout > 0)


def row_of(config: Config) -> int:
    """Tokens of a row, which cp ranks share; where documents are as they are, of the largest pack."""
    ranks = Ranks.of(config)
    return ranks.room(ranks.cp) if config.data.variable_seq_lengths else config.data.seq_length


def tokens_of(config: Config) -> int:
    """What a rank has of a microbatch."""
    return row_of(config) // config.parallel.context_parallel_size * config.data.micro_batch_size


def widths(config: Config, experts: bool = False) -> tuple[int, int, int]:
    """Features of the queries, of the keys or values, and inside the MLP that one tp rank has.

    experts: of a layer that has some, where the shared experts are the MLP.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads // tp, max(model.num_kv_heads // tp, 1)
    ffn = model.moe_shared_expert_intermediate_size or 0 if experts else model.ffn_size
    return heads * model.head_dim, groups * model.head_dim, ffn // tp

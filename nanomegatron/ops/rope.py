"""Rotary position embedding: each pair of features is rotated by the angle position * frequency.

    pair i of d/2          frequency base^(-2i/d): the first pairs turn fast, the last ones hardly at all
    rope                   that, on the first `rotary_percent` of a head's features
    interpolation          positions are divided by `rotary_seq_len_interpolation_factor`
    Llama 3.1 scaling      pairs that turn less than once in 8192 positions are slowed by the factor, those
                           that turn more than 4 times are unchanged, with a linear ramp between
    yarn                   the same idea with bounds of `yarn_beta_slow` and `yarn_beta_fast` turns and a ramp
                           over the index of the pair; cos and sin are scaled up, against a flatter softmax

A pair is (i, i + d/2), or with `rotary_interleaved` (2i, 2i + 1). On a GPU cuda/rope.cu rotates the heads,
those of a packed projection in place; the backward rotates the gradient by the negative angle.
(arXiv 2104.09864; interpolation 2306.15595; YaRN 2309.00071; Llama 3.1 as in its reference code; settings
and defaults are Megatron's)
"""

import math
from dataclasses import replace

import torch

from nanomegatron.config.model import TransformerConfig
from nanomegatron.ops.kernels import TYPES, launch_kernel, once, usable

LLAMA3_CONTEXT, LLAMA3_SLOW, LLAMA3_FAST = 8192, 1.0, 4.0  # Llama 3.1's positions, and bounds in turns


def rope_angles(
    positions: torch.Tensor, config: TransformerConfig, local: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * frequency, fp32, for a head's r rotated features; for yarn times its scale.

    local: for layers with a window, of base --rotary-base-local and not scaled.
    positions `[s]` or `[b, s]` -> `[s, 1, 1, r/2]` or `[s, b, 1, r/2]`, `[s, 1, 1, r/2]` or `[s, b, 1, r/2]`
    """
    size = 1.0
    if local:
        plain = {"position_embedding_type": "rope", "use_rope_scaling": False}
        plain |= {"rotary_base": config.rotary_base_local, "rotary_seq_len_interpolation_factor": 1.0}
        config = replace(config, **plain)
    if config.position_embedding_type == "yarn":
        size = _mscale(config, config.mscale) / _mscale(config, config.mscale_all_dim)
    places = positions[:, None] if positions.dim() == 1 else positions.t()
    places = places.float() * (1 / config.rotary_seq_len_interpolation_factor)
    angles = places[:, :, None, None] * rope_frequencies(config, positions.device)
    return angles.cos() * size, angles.sin() * size


def rope_frequencies(config: TransformerConfig, device: torch.device | str = "cpu") -> torch.Tensor:
    """The angle, in radians, by which each pair turns from one position to the next. -> fp32 `[r/2]`"""
    features, base = int(config.head_dim * config.rotary_percent), config.rotary_base
    pairs = torch.arange(0, features, 2, dtype=torch.float32, device=device) / features
    frequencies = 1.0 / base**pairs
    if config.position_embedding_type == "yarn":
        ramp, factor = _yarn_ramp(config, features, device), config.rotary_scaling_factor
    elif config.use_rope_scaling:
        turns = LLAMA3_CONTEXT * frequencies / (2 * math.pi)
        ramp = ((turns - LLAMA3_SLOW) / (LLAMA3_FAST - LLAMA3_SLOW)).clamp(0, 1)
        factor = config.rope_scaling_factor
    else:
        return frequencies
    return frequencies / factor * (1 - ramp) + frequencies * ramp


def _yarn_ramp(config: TransformerConfig, features: int, device: torch.device | str) -> torch.Tensor:
    """1 for the pairs that turn often, 0 for those that hardly do."""

    def pair(turns: float) -> float:  # index of the pair with this number of turns in the original context
        positions = config.yarn_original_max_position_embeddings / (turns * 2 * math.pi)
        return features * math.log(positions) / (2 * math.log(config.rotary_base))

    first, last = pair(config.yarn_beta_fast), pair(config.yarn_beta_slow)
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, features - 1)
    last += 0.001 * (first == last)
    numbers = torch.arange(features // 2, dtype=torch.float32, device=device)
    return 1 - ((numbers - first) / (last - first)).clamp(0, 1)


def _mscale(config: TransformerConfig, weight: float) -> float:
    return (
        0.1 * weight * math.log(config.rotary_scaling_factor) + 1.0
        if config.rotary_scaling_factor > 1
        else 1.0
    )


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False, fused: bool = True
) -> torch.Tensor:
    """Rotate the first r features of each head of x. fused: by the kernel, where it can.

    x `[s, b, n, d]`; cos, sin `[s, 1, 1, r/2]` or `[s, b, 1, r/2]` -> `[s, b, n, d]`
    """
    if not (fused and usable(x, "rope")):
        return rope_ref(x, cos, sin, interleaved)
    return RopeFunction.apply(x, *_tables(x, x.shape[-1], cos, sin), interleaved)


def rope_packed(
    packed: torch.Tensor,
    widths: list[int],
    d: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a packed projection into queries, keys and values, and rotate the first two as `rope` does.

    packed `[s, b, (n+2*g)*d]`; cos, sin `[s, 1, 1, r/2]` or `[s, b, 1, r/2]` -> `[s, b, n, d]`,
    `[s, b, g, d]`, `[s, b, g, d]`. widths: of the three parts, multiples of the head size d. On a GPU the
    results are views of `packed`, rotated in place: no other op may need its old values. (Out of place if
    elements share memory.) Raises ValueError if `packed` is a leaf that requires grad.
    """
    own = packed.stride(-1) == 1 and all(step > 0 for step, n in zip(packed.stride(), packed.shape) if n > 1)
    if not usable(packed, "rope") or not own:
        q, k, v = (part.unflatten(-1, (-1, d)) for part in packed.split(widths, dim=-1))
        return rope(q, cos, sin, interleaved), rope(k, cos, sin, interleaved), v
    if packed.is_leaf and packed.requires_grad and torch.is_grad_enabled():
        raise ValueError("rope_packed rotates in place: a leaf that wants a gradient cannot be written over")
    return PackedRopeFunction.apply(packed, widths, d, *_tables(packed, d, cos, sin), interleaved)


def rope_ref(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """`rope` in plain torch: specification and oracle.

    x `[s, b, n, d]`; cos, sin `[s, 1, 1, r/2]` or `[s, b, 1, r/2]` -> `[s, b, n, d]`
    """
    turned, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    if interleaved:
        first, second = turned.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned.type_as(x), rest), dim=-1) if rest.shape[-1] else turned.type_as(x)


def _tables(
    x: torch.Tensor, d: int, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as the kernel reads them. Raises ValueError if they do not fit x `[s, b, ...]`."""
    s, b = x.shape[:2]
    fits = cos.dim() == 4 and cos.shape[:3] in ((s, 1, 1), (s, b, 1)) and cos.shape == sin.shape
    if (
        not fits
        or 2 * cos.shape[-1] > d
        or not cos.dtype == sin.dtype == torch.float32
        or not cos.device == sin.device == x.device
    ):
        raise ValueError(
            f"tables {cos.dtype} {list(cos.shape)}, {list(sin.shape)} for tokens {list(x.shape[:2])}"
        )
    return cos.contiguous(), sin.contiguous()


def _turn(out: torch.Tensor, parts: tuple, tables: tuple, interleaved: bool, back: bool) -> None:
    """Write q, k, v `[s, b, heads, d]` (None: absent) to out `[s, b, all heads, d]`, q and k rotated."""
    given = [part if part is None or part.stride(-1) == 1 else part.contiguous() for part in parts]
    args = [x for p in given for x in ((None, 0, 0, 0) if p is None else (p, *p.stride()[:3]))]
    heads = [0 if p is None else p.shape[2] for p in given]
    sizes = (*out.shape[:2], *heads, out.shape[-1], 2 * tables[0].shape[-1], tables[0].shape[1])
    launch_kernel(
        "rope", out, *out.stride()[:3], *args, *tables, *sizes, int(interleaved), int(back), TYPES[out.dtype]
    )


def _turned(x: torch.Tensor, cos, sin, interleaved: bool, back: bool) -> torch.Tensor:
    out = x.new_empty(x.shape)
    _turn(out, (x, None, None), (cos, sin), interleaved, back)
    return out


class RopeFunction(torch.autograd.Function):
    """`rope` by the kernel, out of place: the op that made x (a norm) may have saved it.

    x `[s, b, n, d]`; cos, sin `[s, 1, 1, r/2]` or `[s, b, 1, r/2]` -> `[s, b, n, d]`
    """

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        ctx.tables, ctx.interleaved = (cos, sin), interleaved
        return _turned(x, cos, sin, interleaved, False)

    @staticmethod
    @once
    def backward(ctx, grad: torch.Tensor) -> tuple:
        return _turned(grad, *ctx.tables, ctx.interleaved, True), None, None, None


class PackedRopeFunction(torch.autograd.Function):
    """`rope_packed` by the kernel; the backward rotates the three gradients back into one packed tensor."""

    @staticmethod
    def forward(ctx, packed, widths: list[int], d: int, cos, sin, interleaved: bool) -> tuple:
        ctx.tables, ctx.interleaved, ctx.shape = (cos, sin), interleaved, packed.shape
        counts = [width // d for width in widths]
        heads = packed.unflatten(-1, (-1, d))
        _turn(heads, (*heads.split(counts, dim=2)[:2], None), ctx.tables, interleaved, False)
        # Before the views are made: so autograd reports a saved `packed` as changed, but not the views.
        torch.autograd.graph.increment_version(packed)
        return packed.detach().unflatten(-1, (-1, d)).split(counts, dim=2)

    @staticmethod
    @once
    def backward(ctx, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple:
        packed = dq.new_empty(ctx.shape)
        _turn(packed.unflatten(-1, (-1, dq.shape[-1])), (dq, dk, dv), ctx.tables, ctx.interleaved, True)
        return packed, None, None, None, None, None

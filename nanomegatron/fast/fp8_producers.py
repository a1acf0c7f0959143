"""Same result as `layers.normalize` and `layers.activate` before an FP8 layer, which then quantizes itself.

Here the tensor that only such a layer reads is quantized where it is made, if it can be in the same kernel:

    x ----- norm ---------- normed ----- linear_qkv, linear_fc1
    h ----- act(gate) up -- y ---------- linear_fc2                 h [s, b, 2f]: the output of linear_fc1
      <---- dh -----------------------                             its gradient: what its backward reads

normed, y and dh need to exist in FP8 only. Autograd is given a placeholder: a tensor of the shape and type
that it expects without memory, whose `source` has the FP8 copies; all of it is one NaN, so that reading it
does not go unnoticed. For the backward a linear layer keeps the transposed FP8 copy, half of what bf16 takes.

Delayed scaling knows the scales before: its casts are fused into the norm, the unit and the unit's backward.
Their results are rounded once, from fp32; the plain form rounds to 16 bits first. With the other recipes the
results are equal to the bit.

Gain: of the tensors that linear layers read, half the memory for the backward, and no pass for the cast: on
an H200 sum, norm and cast take 124 us in one kernel, SwiGLU and cast 173 us at 96 % of a copy's bandwidth
(benchmarks/results/2026-11-21-kernels-fused-fp8.json).
"""

import functools

import torch
from torch import nn

from nanomegatron.fp8 import Fp8Linear, Quantized
from nanomegatron.fp8_linear import cast_input, input_copies
from nanomegatron.layers import MLP, Norm, activate, normalize
from nanomegatron.mesh import Axis
from nanomegatron.ops.fp8_fused import gated_backward_fp8, gated_fp8, norm_fp8
from nanomegatron.ops.kernels import once
from nanomegatron.ops.norm import norm_backward, norm_ref
from nanomegatron.ops.swiglu import SILU, gated_backward_ref, gated_ref
from nanomegatron.recompute import Source


def accepts_fp8(linear: nn.Module) -> bool:
    """Whether a layer of tp.py reads only FP8 copies: else it makes its weight gradient from x itself."""
    return linear.fp8 is not None and linear.fp8.recipe.wgrad


def copies_for(linear: nn.Module) -> tuple[str, bool]:
    """The copies of its input that an FP8 layer wants, and whether it trains."""
    trains = torch.is_grad_enabled()
    return input_copies(linear.fp8, linear.comm, trains), trains


def quantized_for(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """x `[..., i]` for the layer that reads it, as nothing else does -> a placeholder `[..., i]`"""
    return CastFp8Function.apply(x, linear.fp8, linear.tp, linear.comm, torch.is_grad_enabled())


class QuantizingNorm:
    """A `Norm.op` whose result `linear` reads, and nothing else does.

    x, residual `[s, b, h]` or `[s/tp, b, h]` -> a placeholder `[..., h]`, and the sum of both `[..., h]`
    """

    def __init__(self, linear: nn.Module) -> None:
        self.linear = linear

    def __call__(
        self, layer: Norm, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fp8 = self.linear.fp8
        if not (layer.fused and fp8.has_scale):
            y, total = normalize(layer, x, residual)
            return quantized_for(self.linear, y), total
        how = layer.weight, layer.bias, layer.eps, layer.from_one, fp8, copies_for(self.linear)
        if residual is None:
            return NormFp8Function.apply(x, None, *how), x
        return NormFp8Function.apply(x, residual, *how)


def quantizing_activate(mlp: MLP, x: torch.Tensor) -> torch.Tensor:
    """An `MLP.act` whose result is quantized, and so is its gradient where both layers allow it.

    x `[..., f]` or `[..., 2*f]` (gated) -> a placeholder `[..., f]`; f/tp of the features are here.
    """
    first, second = mlp.linear_fc1, mlp.linear_fc2
    can_fuse_cast = mlp.fused and first.bias is None and accepts_fp8(first)
    if can_fuse_cast and first.fp8.has_scale and second.fp8.has_scale:
        return GatedFp8Function.apply(x, first.fp8, second.fp8, *copies_for(second))
    return quantized_for(second, activate(mlp, x))


def fp8_placeholder(like: torch.Tensor, shape: tuple[int, ...], casts: Quantized) -> torch.Tensor:
    """A tensor of NaN with no memory whose source has the FP8 copies of the true one -> `[...]`, of `shape`

    like `[...]`: has its type and device.
    """
    x = _nan(like.dtype, like.device).expand(shape)
    x.source = Source(casts)
    return x


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device)


class CastFp8Function(torch.autograd.Function):
    """A cast by itself: x `[..., k]` -> a placeholder `[..., k]`. See `fp8_linear.cast_input`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, fp8: Fp8Linear, axis: Axis | None, comm: str, trains: bool):
        return fp8_placeholder(x, x.shape, cast_input(fp8, x, axis, comm, trains))

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None, None, None, None


class NormFp8Function(torch.autograd.Function):
    """`ops.norm.norm` or, with a residual, `add_norm`, for a linear layer.

    x, residual `[..., h]`, weight, bias `[h]` -> a placeholder `[..., h]`, with a residual also the sum
    `[..., h]`. fp8, how: the layer's state, and what it wants (`copies_for`).
    """

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps: float, from_one: bool, fp8: Fp8Linear, how: tuple):
        copies, trains = how
        output, inverse = fp8.known_scale("x", copies, trains)
        made = norm_fp8(x, residual, weight, bias, eps, from_one, output)
        x = x if residual is None else made.total
        casts = Quantized.with_scale((made.rowwise, made.columnwise), inverse)
        fp8.record_stats("x", lambda: norm_ref(x, weight, bias, eps, from_one).flatten(0, -2), casts, trains)
        ctx.save_for_backward(x, weight, bias, made.rstd, made.mean)
        ctx.eps, ctx.from_one = eps, from_one
        ctx.set_materialize_grads(False)
        y = fp8_placeholder(x, x.shape, casts)
        return y if residual is None else (y, x)

    @staticmethod
    @once
    def backward(ctx, grad, grad_total=None):
        dx, dweight, dbias = norm_backward(grad, grad_total, ctx.saved_tensors, ctx.eps, ctx.from_one)
        return dx, dx if ctx.needs_input_grad[1] else None, dweight, dbias, *[None] * 4


class GatedFp8Function(torch.autograd.Function):
    """SwiGLU between two linear layers: x `[..., 2*f]` -> a placeholder `[..., f]`

    In the backward another one for the gradient. before, after: of the two layers; copies: those that the
    second wants.
    """

    @staticmethod
    def forward(ctx, x, before: Fp8Linear, after: Fp8Linear, copies: str, trains: bool):
        output, inverse = after.known_scale("x", copies, trains)
        casts = Quantized.with_scale(gated_fp8(x, SILU, output), inverse)
        after.record_stats("x", lambda: gated_ref(x, SILU).flatten(0, -2), casts, trains)
        ctx.save_for_backward(x)
        ctx.before = before
        return fp8_placeholder(x, (*x.shape[:-1], x.shape[-1] // 2), casts)

    @staticmethod
    @once
    def backward(ctx, grad):
        (x,), before = ctx.saved_tensors, ctx.before
        output, inverse = before.known_scale("g", "both")
        casts = Quantized.with_scale(gated_backward_fp8(grad, x, SILU, output), inverse)
        before.record_stats("g", lambda: gated_backward_ref(grad, x, SILU).flatten(0, -2), casts)
        return fp8_placeholder(x, x.shape, casts), None, None, None, None

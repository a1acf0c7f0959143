"""What FP8 linear layers read, cast before it gets there: where it can be, in the kernel that makes it.

    x ----- norm ---------- normed ----- linear_qkv, linear_fc1
    h ----- act(gate) up -- y ---------- linear_fc2                 h [s, b, 2f]: what linear_fc1 gives
      <---- dh -----------------------                             its gradient: what its backward reads

normed, y and dh are read by nobody else, so they need to exist in FP8 alone. Autograd is given a stand-in: a
tensor of the shape and type that it expects without memory, which carries the casts; all of it is one NaN, so
that reading it does not go unnoticed. For the backward a linear layer keeps the transposed FP8 copy, half of
what 16 bits take.

Delayed scaling knows the scales before: its casts are fused into the norm, the unit and the unit's backward.
Their results are rounded once, from fp32; a cast of 16 bits has been rounded before.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn

from nanomegatron.fp8 import Cast, Fp8Linear, Quantized
from nanomegatron.mesh import Axis
from nanomegatron.ops.fp8_fused import Pair, gated_backward_fp8, gated_fp8, norm_fp8
from nanomegatron.ops.kernels import once
from nanomegatron.ops.norm import norm_backward, norm_ref
from nanomegatron.ops.swiglu import SILU, gated_backward_ref, gated_ref
from nanomegatron.recompute import made_again


def takes_casts(linear: nn.Module | None) -> bool:
    """Whether a layer of tp.py reads nothing but casts: else it makes its weight gradient of x itself."""
    return linear is not None and linear.fp8 is not None and linear.fp8.recipe.wgrad


def fuses(linear: nn.Module | None) -> bool:
    """Whether the kernel that makes the input of a layer, or the gradient of its output, can cast it."""
    return takes_casts(linear) and linear.fp8.knows_scales


def wanted(linear: nn.Module) -> tuple[str, bool]:
    """The copies of its input that an FP8 layer wants, and whether it trains."""
    trains = torch.is_grad_enabled()
    return linear.fp8.outputs(linear.comm, trains), trains


def cast_for(linear: nn.Module | None, x: torch.Tensor) -> torch.Tensor:
    """x as a layer takes it that alone reads it: x itself, or a stand-in."""
    if not takes_casts(linear):
        return x
    axis = None if linear.comm == "copy" else linear.tp
    return CastFp8Function.apply(x, linear.fp8, *wanted(linear), axis)


def stand_in(like: torch.Tensor, shape: tuple[int, ...], casts: Quantized) -> torch.Tensor:
    """A tensor of NaN with no memory that carries the casts of the true one."""
    x = _nan(like.dtype, like.device).expand(shape)
    x.casts = casts
    return x


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device)


def casts_of(x: torch.Tensor) -> Quantized | None:
    """What a stand-in carries; None of any other tensor."""
    return getattr(x, "casts", None)


def kept_of(x: torch.Tensor) -> torch.Tensor:
    """What a linear layer keeps of x for its backward: of a stand-in the bytes of a copy."""
    casts = casts_of(x)
    return x if casts is None else (casts.flip or casts.row).data


def through(
    y: torch.Tensor, then: Callable, first: Callable, x: torch.Tensor | None, early: list | None = None
) -> torch.Tensor:
    """then(y); where there is an x, what `then` keeps of y = first(x) is made anew in the backward.

    early: as `made_again` takes it.
    """
    if x is None:
        return then(y)
    x = x.detach()

    @torch.enable_grad  # makes the copies that a backward reads
    def again() -> torch.Tensor:
        return kept_of(first(x))

    with made_again(kept_of(y), again, early):
        return then(y)


class CastFp8Function(torch.autograd.Function):
    """A cast by itself: x `[..., k] ->` a stand-in. See `Fp8Linear.cast`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, fp8: Fp8Linear, outputs: str, trains: bool, axis: Axis | None):
        return stand_in(x, x.shape, fp8.cast(x.flatten(0, -2), "x", outputs, axis, trains))

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None, None, None, None


class NormFp8Function(torch.autograd.Function):
    """`ops_norm.norm`, or with a residual `add_norm`, for a linear layer: `[..., h] ->` a stand-in.

    fp8, how: the layer's state, and what it wants (`wanted`).
    """

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps: float, from_one: bool, fp8: Fp8Linear, how: tuple):
        outputs, trains = how
        into, inverse = fp8.ahead("x", outputs, trains)
        made = norm_fp8(x, residual, weight, bias, eps, from_one, into)
        x, casts = x if residual is None else made.total, _with((made.row, made.flip), inverse)
        fp8.watch("x", lambda: norm_ref(x, weight, bias, eps, from_one).flatten(0, -2), casts, trains)
        ctx.save_for_backward(x, weight, bias, made.rstd, made.mean)
        ctx.eps, ctx.from_one = eps, from_one
        ctx.set_materialize_grads(False)
        y = stand_in(x, x.shape, casts)
        return y if residual is None else (y, x)

    @staticmethod
    @once
    def backward(ctx, grad, grad_total=None):
        dx, dweight, dbias = norm_backward(grad, grad_total, ctx.saved_tensors, ctx.eps, ctx.from_one)
        return dx, dx if ctx.needs_input_grad[1] else None, dweight, dbias, *[None] * 4


class GatedFp8Function(torch.autograd.Function):
    """SwiGLU between two linear layers: `[..., 2f] ->` a stand-in `[..., f]`, and one for the gradient.

    before, after: of the two; outputs: the copies that the second wants.
    """

    @staticmethod
    def forward(ctx, x, before: Fp8Linear, after: Fp8Linear, outputs: str, trains: bool):
        into, inverse = after.ahead("x", outputs, trains)
        casts = _with(gated_fp8(x, SILU, into), inverse)
        after.watch("x", lambda: gated_ref(x, SILU).flatten(0, -2), casts, trains)
        ctx.save_for_backward(x)
        ctx.before = before
        return stand_in(x, (*x.shape[:-1], x.shape[-1] // 2), casts)

    @staticmethod
    @once
    def backward(ctx, grad):
        (x,), before = ctx.saved_tensors, ctx.before
        into, inverse = before.ahead("g", "both")
        casts = _with(gated_backward_fp8(grad, x, SILU, into), inverse)
        before.watch("g", lambda: gated_backward_ref(grad, x, SILU).flatten(0, -2), casts)
        return stand_in(x, x.shape, casts), None, None, None, None


def _with(pair: Pair, inverse: torch.Tensor) -> Quantized:
    return Quantized(*(None if q is None else Cast(q, inverse) for q in pair))

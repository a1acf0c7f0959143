"""The linear function of tp.py with its three matmuls in FP8.

    x ---- cast ----> x row [t, i] -------------------.                     y  = x W^T
       \\                                               \\
        `---------->  x flip [i, t]  kept, in place of x \\
                                                          W row [o, i], W flip [i, o]: cast once a step
                                                         /
    dy --- cast ----> g row [t, o] ---------------------'                     dx = dy W
       `----------->  g flip [o, t]  with x flip into main_grad               dW = dy^T x

Both operands of an FP8 matmul are contiguous in the dimension it sums over, hence a row-major and a
transposed copy (flip) of each. Under sequence parallelism ("gather", "scatter") only rows are cast; their
bytes are gathered, half of bf16's, and transposed then (`turned`). "gather" keeps its row shard and gathers
it again in the backward. Without FP8 weight gradients x is kept in 16 bits. One scale a tensor is one scale
over tp, so that the result does not depend on tp (`fp8.py` says which recipe agrees on it, and when). Scales
of rows on a GPU round dW to bf16 before it is added.
"""

from collections.abc import Callable

import torch
from torch import nn

from nanomegatron.comm import (
    Pending,
    all_gather,
    all_reduce_,
    reduce_scatter,
    start_all_gather,
)
from nanomegatron.fp8 import Fp8Linear
from nanomegatron.mesh import Axis
from nanomegatron.ops.fp8_cast import Fp8Matrix
from nanomegatron.ops.fp8_matmul import add_fp8_product_, fp8_matmul
from nanomegatron.param import accumulate_grad, accumulate_weight_grad, is_deferred, main_grad, run_or_defer
from nanomegatron.recompute import source_of
from nanomegatron.tp import start_input_grad_sum


def use_fp8(layer: nn.Module, fp8: Fp8Linear) -> None:
    """Let a linear layer of tp.py multiply in FP8."""

    def linear(x: torch.Tensor, weight: torch.Tensor, axis: Axis, comm: str) -> torch.Tensor:
        return Fp8LinearFunction.apply(x, weight, axis, comm, fp8, torch.is_grad_enabled())

    layer.linear, layer.fp8, layer.weight.fp8 = linear, fp8, fp8


class Fp8LinearFunction(torch.autograd.Function):
    """`tp.LinearFunction` in FP8, with the same `comm`; the result has the type of x."""

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, weight: torch.Tensor, axis: Axis, comm: str, fp8: Fp8Linear, trains: bool
    ) -> torch.Tensor:
        cast = source_of(x).casts  # where a norm or activation has written FP8 (fast/fp8_producers.py)
        if cast is None:
            wanted, cut = fp8.outputs(comm, trains), None if comm == "copy" else axis
            cast = fp8.cast(x.flatten(0, -2), "x", wanted, cut, trains)
        row = start_gather(cast.rowwise, axis)() if comm == "gather" else cast.rowwise
        y = fp8_matmul(row, fp8.weight(weight, axis).rowwise, x.dtype, fast=True).view(
            -1, *x.shape[1:-1], len(weight)
        )
        ctx.weight, ctx.axis, ctx.comm, ctx.fp8 = weight, axis, comm, fp8
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.save_for_backward(*(cast.saved_form() if fp8.recipe.wgrad else (x,)))
        if comm == "scatter":
            return reduce_scatter(y, axis)
        return all_reduce_(y, axis) if comm == "sum" else y

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, axis, comm, fp8 = ctx.weight, ctx.axis, ctx.comm, ctx.fp8
        rows, kept = grad.flatten(0, -2), ctx.saved_tensors
        if (cast := source_of(grad).casts) is not None:
            row, flip = cast
        elif comm == "scatter":
            row = start_gather(fp8.cast(rows, "g", "rowwise", axis).rowwise, axis)()
            flip = fp8.turned(row, "g") if fp8.recipe.wgrad else None
        else:
            wanted, cut = "both" if fp8.recipe.wgrad else "rowwise", None if comm == "sum" else axis
            row, flip = fp8.cast(rows, "g", wanted, cut)
        gathers_fp8_x, later = comm == "gather" and fp8.recipe.wgrad, is_deferred(weight)
        pending = start_gather(Fp8Matrix(*kept), axis) if gathers_fp8_x and not later else None
        dx = fp8_matmul(row, fp8.weight(weight, axis).columnwise, ctx.dtype)
        dx = dx.view(-1, *ctx.shape[1:-1], weight.shape[1])
        reduced = start_input_grad_sum(dx, axis, comm)

        def weight_grad() -> torch.Tensor | None:
            if not fp8.recipe.wgrad:
                x = all_gather(kept[0], axis) if comm == "gather" else kept[0]
                g = all_gather(grad, axis) if comm == "scatter" else grad
                return accumulate_weight_grad(weight, x, g)
            if not gathers_fp8_x:
                return add_weight_grad(weight, flip, Fp8Matrix(*kept))
            x = (pending or start_gather(Fp8Matrix(*kept), axis))()
            return add_weight_grad(weight, flip, fp8.turned(x, "x"))

        dw = run_or_defer(weight, weight_grad)
        return reduced.wait(), dw, None, None, None, None


def add_weight_grad(weight: nn.Parameter, g: Fp8Matrix, x: Fp8Matrix) -> torch.Tensor | None:
    """dW = g x^T into `main_grad`, by the matmul itself where it can. g `[o, t]`, x `[i, t]`"""
    target = main_grad(weight)
    if target is None or target.dtype != torch.float32 or g.inverse.dim():
        dtype = weight.dtype if target is None else target.dtype
        return accumulate_grad(weight, lambda: fp8_matmul(g, x, dtype))
    add_fp8_product_(target, g, x)
    weight.bucket.ready(weight)
    return None


def start_gather(cast: Fp8Matrix, axis: Axis) -> Callable[[], Fp8Matrix]:
    """Begin to gather the rows of all ranks in FP8, with their scales if rows have such; returns the wait."""
    data = start_all_gather(cast.data.view(torch.uint8), axis)
    inverse = start_all_gather(cast.inverse, axis) if cast.inverse.dim() else Pending(cast.inverse)
    return lambda: Fp8Matrix(data.wait().view(cast.data.dtype), inverse.wait())

r"""The linear function of tp.py with its three matmuls in FP8.

Tests: tests/test_fp8_linear.py. Page: docs/fp8.md.

    x --- cast --> x rowwise [t, i] ------------------.
      \                                                \                       y = x W^T
       `---------> x columnwise [i, t], saved           W rowwise [o, i]
                                                        W columnwise [i, o]     both cast once a step
                                                       /
    g --- cast --> g rowwise [t, o] ------------------'                         dx = g W
      \
       `---------> g columnwise [o, t] and the saved x columnwise               dW = g^T x, into main_grad

By the communication of the layer (`comm`), with bytes a value, where x and y are in 16 bits; generation
shards no sequence, so it has "copy" and "sum":

    comm       layer               x is cast    saved            forward              backward
    "copy"     column              both ways    x columnwise 1   -                    all-reduce dx 2
    "gather"   column, s sharded   rowwise      x rowwise 1      gather x rowwise 1   gather x rowwise 1,
                                                                                      reduce-scatter dx 2
    "sum"      row                 both ways    x columnwise 1   all-reduce y 2       -
    "scatter"  row, s sharded      both ways    x columnwise 1   reduce-scatter y 2   gather g rowwise 1

What is gathered is transposed behind (`Quantizer.transposed`), so that one copy is sent: "gather" saves this
rank's rows, and with "scatter" g is cast rowwise only, else both ways. Without FP8 weight gradients
(--fp8-wgrad) x is saved and dW is multiplied in 16 bits, gathers included, and rowwise is all that is cast.
Without gradients, too, x is cast rowwise only, and nothing is saved.

y is summed with less precision on a GPU (`fast`), as in Transformer Engine; gradients are not.

A tensor with one scale has it on all tp ranks, so the result does not depend on tp (`fp8.py`: which recipe
agrees on it, and when). With scales of rows, dW is rounded to bf16 on a GPU before it is added.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from nanomegatron.comm import (
    Pending,
    all_gather,
    all_reduce_,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)
from nanomegatron.fp8 import Fp8LayerState, Quantized, Recipe
from nanomegatron.mesh import Axis
from nanomegatron.ops.bias import add_bias
from nanomegatron.ops.fp8_cast import Fp8Matrix
from nanomegatron.ops.fp8_matmul import add_fp8_product_, fp8_matmul
from nanomegatron.param import (
    accumulate,
    add_grad,
    add_product,
    is_deferred,
)


class Fp8Input(NamedTuple):
    """An input of an FP8 layer with what is quantized already.

    x `[..., i]`: the input; with `copies` what stands for it in autograd. grad_copies: the list in which the
    backward finds those of the output's gradient, if what reads the output quantizes it.
    """

    x: torch.Tensor
    copies: Quantized | None = None
    grad_copies: list[Quantized] | None = None


def reads_only_fp8(linear: nn.Module) -> bool:
    """Whether a layer of tp.py reads x in FP8 only: else its weight gradient is from x in 16 bits."""
    return linear.fp8 is not None and linear.fp8.recipe.wgrad


def use_fp8(layer: nn.Module, recipe: Recipe) -> Fp8LayerState:
    """Make a linear layer of tp.py multiply in FP8; return its state, for `Scales`."""
    fp8 = Fp8LayerState(layer.weight.spec.name, recipe)
    fp8.matmuls = Fp8Matmuls()
    layer.linear = partial(fp8_linear, fp8)
    layer.fp8 = fp8
    if not layer.weight.spec.tied:  # the embedding reads it in 16 bits
        layer.weight.fp8 = fp8
    return fp8


def fp8_linear(
    fp8: Fp8LayerState,
    x: torch.Tensor | Fp8Input,
    weight: torch.Tensor,
    axis: Axis,
    comm: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`tp.LinearFunction` in FP8, with the same `comm`.

    x `[..., i]`, weight `[o, i]`, bias `[o]` -> `[..., o]`
    """
    given = x if isinstance(x, Fp8Input) else Fp8Input(x)
    copies = given.copies or quantize_input(fp8, given.x, axis, comm, trains=torch.is_grad_enabled())
    y = Fp8LinearFunction.apply(given.x, weight, axis, comm, fp8, copies, given.grad_copies)
    return add_bias(y, bias, accumulate)


def quantize_input(
    fp8: Fp8LayerState, x: torch.Tensor, axis: Axis | None, comm: str, trains: bool
) -> Quantized:
    """Quantize x `[..., i]` to the copies that a layer needs. tensorwise: one all-reduce if x is sharded."""
    fp8_group = axis if comm in ("gather", "sum", "scatter") else None  # its ranks have parts of x
    return fp8.x.quantize(x.flatten(0, -2), input_copies(fp8, comm, trains), fp8_group, record=trains)


def input_copies(fp8: Fp8LayerState, comm: str, trains: bool) -> str:
    """Return which copies of x a layer needs; columnwise is for dW, and made behind a gather."""
    return "both" if trains and fp8.recipe.wgrad and comm != "gather" else "rowwise"


class Fp8LinearFunction(torch.autograd.Function):
    """`fp8_linear` without the bias. x `[..., i]`, weight `[o, i]` -> `[..., o]`

    copies: of x, whose own values are read only for a dW in 16 bits. grad_copies: as of `Fp8Input`.
    """

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        weight: torch.Tensor,
        axis: Axis,
        comm: str,
        fp8: Fp8LayerState,
        copies: Quantized,
        grad_copies: list[Quantized] | None,
    ) -> torch.Tensor:
        w = fp8.weight(weight, axis).rowwise
        if fp8.recipe.wgrad:
            ctx.save_for_backward(*copies.saved_form())
        else:
            ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.axis = axis
        ctx.comm = comm
        ctx.fp8 = fp8
        ctx.grad_copies = grad_copies
        ctx.shape = x.shape
        ctx.dtype = x.dtype

        # y = x W^T
        if comm == "gather":
            y, _ = fp8.matmuls.gather_matmul(copies.rowwise, w, axis, x.dtype, fast=True)
        elif comm == "scatter":
            y = fp8.matmuls.matmul_scatter(copies.rowwise, w, axis, x.dtype, fast=True).wait()
        else:
            y = fp8_matmul(copies.rowwise, w, x.dtype, fast=True)
        if comm == "sum":
            y = all_reduce_(y, axis)
        return y.view((-1, *x.shape[1:-1], len(weight)))

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight = ctx.weight
        axis = ctx.axis
        comm = ctx.comm
        fp8 = ctx.fp8

        # g in FP8, if what read y has not quantized it already, and W
        g = ctx.grad_copies.pop() if ctx.grad_copies else quantize_grad(fp8, grad, axis, comm)
        w = fp8.weight(weight, axis).columnwise

        # x as it is saved; for dW its rows are gathered beside dx, unless dW is deferred
        gathering = None
        if not fp8.recipe.wgrad:
            (x_in_16_bits,) = ctx.saved_tensors
        else:
            saved_x = Fp8Matrix(*ctx.saved_tensors)
            if comm == "gather" and not is_deferred(weight):
                gathering = fp8.matmuls.start_gather(saved_x, axis)

        # dx = g W, its sum over ranks started
        dx, whole_g = input_grad_matmul(fp8, g, w, axis, comm, ctx.dtype)

        # dW = g^T x, now or later
        def write_in_fp8(out: torch.Tensor, beta: int) -> None:
            x = saved_x
            if comm == "gather":
                rows = gathering or fp8.matmuls.start_gather(saved_x, axis)
                x = fp8.x.transposed(rows.wait())
            write_weight_grad(out, beta, whole_g.columnwise, x)

        def write_in_16_bits(out: torch.Tensor, beta: int) -> None:
            x = all_gather(x_in_16_bits, axis) if comm == "gather" else x_in_16_bits
            dy = all_gather(grad, axis) if comm == "scatter" else grad
            add_product(out, dy, x, beta)

        dw = accumulate(weight, write_in_fp8 if fp8.recipe.wgrad else write_in_16_bits)
        return dx.wait().view((-1, *ctx.shape[1:-1], weight.shape[1])), dw, *[None] * 5


def quantize_grad(fp8: Fp8LayerState, grad: torch.Tensor, axis: Axis, comm: str) -> Quantized:
    """Quantize grad `[..., o]`, g, to the copies that the backward needs -> each `[t, o]`, or transposed

    tensorwise: communicates as `quantize_input`.
    """
    fp8_group = axis if comm in ("copy", "gather", "scatter") else None  # its ranks have parts of g
    copies = "both" if fp8.recipe.wgrad and comm != "scatter" else "rowwise"
    return fp8.g.quantize(grad.flatten(0, -2), copies, fp8_group)


def input_grad_matmul(
    fp8: Fp8LayerState, g: Quantized, w: Fp8Matrix, axis: Axis, comm: str, dtype: torch.dtype
) -> tuple[Pending, Quantized]:
    """dx = g W with the communication of the table's backward -> dx in flight `[t, i]`, and the whole g

    g `[t, o]`, with "scatter" `[t/tp, o]`, rowwise only; w `[i, o]`, columnwise.
    """
    if comm == "gather":
        return fp8.matmuls.matmul_scatter(g.rowwise, w, axis, dtype), g
    if comm == "scatter":
        dx, rowwise = fp8.matmuls.gather_matmul(g.rowwise, w, axis, dtype)
        columnwise = fp8.g.transposed(rowwise) if fp8.recipe.wgrad else None
        return Pending(dx), Quantized(rowwise, columnwise)
    dx = fp8_matmul(g.rowwise, w, dtype)
    return start_all_reduce_(dx, axis) if comm == "copy" else Pending(dx), g


def write_weight_grad(out: torch.Tensor, beta: int, g: Fp8Matrix, x: Fp8Matrix) -> None:
    """out = beta * out + g x^T; with one scale each in the matmul. out `[o, i]`, g `[o, t]`, x `[i, t]`"""
    if g.scale_inv.dim():
        add_grad(out, fp8_matmul(g, x, out.dtype), beta)
    else:
        add_fp8_product_(out, g, x, overwrite=beta == 0)


class Fp8Matmuls:
    """The matmuls a b^T of FP8 layers under sequence parallelism, with the gather or reduce-scatter of each.

    a `[t/tp, k]` or `[t, k]`, b `[n, k]` -> `[t, n]` or `[t/tp, n]`; dtype, fast: as of `fp8_matmul`.
    """

    def start_gather(self, matrix: Fp8Matrix, axis: Axis) -> Pending:
        """Start to all-gather FP8 rows, and their scales if they have any; the result: an Fp8Matrix."""
        data = start_all_gather(matrix.data.view(torch.uint8), axis)
        scale_inv = start_scale_gather(matrix, axis)
        return Pending(Fp8Matrix(data.result.view(matrix.data.dtype), scale_inv.result), [data, scale_inv])

    def gather_matmul(
        self, a: Fp8Matrix, b: Fp8Matrix, axis: Axis, dtype: torch.dtype, fast: bool = False
    ) -> tuple[torch.Tensor, Fp8Matrix]:
        """Gather the rows of a, then multiply -> `[t, n]`, and the gathered a."""
        whole = self.start_gather(a, axis).wait()
        return fp8_matmul(whole, b, dtype, fast), whole

    def matmul_scatter(
        self, a: Fp8Matrix, b: Fp8Matrix, axis: Axis, dtype: torch.dtype, fast: bool = False
    ) -> Pending:
        """Multiply, then start to reduce-scatter the rows; the result `[t/tp, n]`"""
        return start_reduce_scatter(fp8_matmul(a, b, dtype, fast), axis)


def start_scale_gather(matrix: Fp8Matrix, axis: Axis) -> Pending:
    """Start to all-gather the scales of rows or blocks; a tensor's one scale is the same on all ranks."""
    return start_all_gather(matrix.scale_inv, axis) if matrix.scale_inv.dim() else Pending(matrix.scale_inv)

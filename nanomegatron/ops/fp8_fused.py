"""Norms, activations and the loss's gradient with their result in FP8, cast by the kernel that computes them.

    norm_fp8               cuda/norm_fp8.cu      the input of a block's linear layers
    gated_fp8              cuda/swiglu_fp8.cu    the input of an MLP's second layer
    gated_backward_fp8     cuda/swiglu_fp8.cu    the gradient of its first layer's output
    bias_act_fp8           cuda/gelu_fp8.cu      both of these without a gate, and the bias's gradient
    cross_entropy_grad_fp8 cuda/cross_entropy_fp8.cu   the gradient of the logits

Each is fp8_cast of what the op without FP8 gives, in the type of x: values and amaxes are the same whether a
cast is fused or not. (Of Transformer Engine's kernels those of delayed scaling cast the fp32 value, those of
mxfp8 round first, too.) The transposed copy is for the weight gradient, whose GEMM contracts over rows.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanomegatron.ops.bias import add_bias, column_sums
from nanomegatron.ops.cross_entropy import check_logits, cross_entropy_grad_ref
from nanomegatron.ops.fp8_cast import Fp8Output, Pair
from nanomegatron.ops.gelu import bias_act_ref
from nanomegatron.ops.kernels import TYPES, check_fits, launch_kernel, usable
from nanomegatron.ops.norm import check_norm, norm_ref
from nanomegatron.ops.swiglu import gated_backward_ref, gated_ref


@dataclass(frozen=True)
class Normed:
    """A norm's result in FP8, rowwise `[rows, h]` and columnwise `[h, rows]`, and its by-products.

    out: the norm, total: x + residual, both in the type and shape of x. rstd, mean: fp32 `[rows]`, for the
    backward. None: not wanted, or not defined (total without a residual, the mean of RMSNorm).
    """

    rowwise: torch.Tensor | None
    columnwise: torch.Tensor | None
    out: torch.Tensor | None
    total: torch.Tensor | None
    rstd: torch.Tensor
    mean: torch.Tensor | None


def norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    from_one: bool,
    wanted: Fp8Output,
    also: bool = False,
) -> Normed:
    """The norm of x, or of x + residual, in FP8, and with `also` in the type of x too. See `norm.norm`.

    x, residual `[..., h]`, weight, bias `[h]`. Raises ValueError if shapes, types or devices do not fit.
    """
    check_norm(x, residual, weight, bias)
    h = weight.numel()
    rows = x.numel() // max(h, 1)
    pair = wanted.empty(x, rows, h)
    if not usable(x, "norm_fp8"):
        return norm_fp8_ref(x, residual, weight, bias, eps, from_one, wanted, also)
    x, residual, weight, bias = (None if t is None else t.contiguous() for t in (x, residual, weight, bias))
    out, total = torch.empty_like(x) if also else None, None if residual is None else torch.empty_like(x)
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = None if bias is None else torch.empty_like(rstd)
    types = int(from_one), TYPES[x.dtype], TYPES[weight.dtype], TYPES[wanted.dtype]
    tensors = x, residual, weight, bias, *pair, out, total, rstd, mean, wanted.scale, wanted.amax
    launch_kernel("norm_fp8", *tensors, rows, h, eps, *types)
    return Normed(*pair, out, total, rstd, mean)


def norm_fp8_ref(x, residual, weight, bias, eps, from_one, wanted, also=False) -> Normed:
    """`norm_fp8` in plain torch: specification and oracle."""
    total = None if residual is None else x + residual
    wide = (x if total is None else total).float().reshape(-1, weight.numel())
    y = norm_ref(x if total is None else total, weight, bias, eps, from_one)
    mean = None if bias is None else wide.mean(dim=-1)
    rstd = ((wide if mean is None else wide - mean[:, None]).square().mean(dim=-1) + eps).rsqrt()
    return Normed(*wanted.cast(y.view(wide.shape)), y if also else None, total, rstd, mean)


def gated_fp8(x: torch.Tensor, act: int, wanted: Fp8Output) -> Pair:
    """act(gate) * up in FP8, x `[..., 2*f]` = [gate; up]. -> `[rows, f]`, `[f, rows]`. Raises ValueError."""
    rows, f = _halved(x)
    pair = wanted.empty(x, rows, f)
    if not usable(x, "gated_fp8"):
        return wanted.cast(gated_ref(x.reshape(rows, 2 * f), act))
    tensors = x.contiguous(), *pair, wanted.scale, wanted.amax
    launch_kernel("swiglu_fp8_forward", *tensors, rows, f, act, TYPES[x.dtype], TYPES[wanted.dtype])
    return pair


def gated_backward_fp8(grad: torch.Tensor, x: torch.Tensor, act: int, wanted: Fp8Output) -> Pair:
    """The gradient of x in FP8, given the gradient of act(gate) * up.

    grad `[..., f]`, x `[..., 2*f]` -> `[rows, 2*f]`, `[2*f, rows]`

    Raises ValueError if shapes, types or devices do not fit.
    """
    rows, f = _halved(x)
    pair = wanted.empty(x, rows, 2 * f)
    check_fits("gradient", grad, (*x.shape[:-1], f), x.dtype, x.device)
    if not usable(x, "gated_backward_fp8"):
        return wanted.cast(gated_backward_ref(grad.reshape(rows, f), x.reshape(rows, 2 * f), act))
    tensors = grad.contiguous(), x.contiguous(), *pair, wanted.scale, wanted.amax
    launch_kernel("swiglu_fp8_backward", *tensors, rows, f, act, TYPES[x.dtype], TYPES[wanted.dtype])
    return pair


def bias_act_fp8(x: torch.Tensor, bias: torch.Tensor | None, act: int, wanted: Fp8Output) -> Pair:
    """act(x + bias) in FP8. x `[..., f]`, bias `[f]` of its type or None -> `[rows, f]`, `[f, rows]`"""
    rows, f = math.prod(x.shape[:-1]), x.shape[-1]
    pair = wanted.empty(x, rows, f)
    if not usable(x, "bias_act_fp8"):
        return wanted.cast(bias_act_ref(x.reshape(rows, f), bias, act=act))
    tensors = x.contiguous(), bias, *pair, wanted.scale, wanted.amax
    launch_kernel("gelu_fp8_forward", *tensors, rows, f, act, TYPES[x.dtype], TYPES[wanted.dtype])
    return pair


def bias_act_backward_fp8(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    act: int,
    wanted: Fp8Output,
    dbias: torch.Tensor | None = None,
    beta: int = 0,
) -> Pair:
    """The gradient of x in FP8, given that of act(x + bias), and dbias = beta * dbias + that of the bias.

    grad, x `[..., f]`, bias, dbias `[f]` (None: not wanted) -> `[rows, f]`, `[f, rows]`. Raises ValueError.
    """
    rows, f = math.prod(x.shape[:-1]), x.shape[-1]
    pair = wanted.empty(x, rows, f)
    check_fits("gradient", grad, x.shape, x.dtype, x.device)
    if not usable(x, "bias_act_backward_fp8"):
        at = add_bias(x, bias).detach().requires_grad_()
        with torch.enable_grad():
            dx = torch.autograd.grad(bias_act_ref(at, act=act), at, grad)[0].view(rows, f)
        if dbias is not None:
            column_sums(dx, dbias, beta)
        return wanted.cast(dx)
    sums = None if dbias is None else x.new_empty(math.ceil(rows / 128), f, dtype=torch.float32)
    tensors = grad.contiguous(), x.contiguous(), bias, *pair, wanted.scale, wanted.amax, dbias, sums
    types = TYPES[x.dtype], TYPES[wanted.dtype], TYPES[torch.float32 if dbias is None else dbias.dtype]
    launch_kernel("gelu_fp8_backward", *tensors, rows, f, beta, act, *types)
    return pair


def cross_entropy_grad_fp8(
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    real: int,
    wanted: Fp8Output,
) -> Pair:
    """`cross_entropy_grad_` in FP8; the logits stay. -> `[t, V]`, `[V, t]`

    logits `[t, V]`, of which `real` columns count; labels, lse, grad `[t]`. Raises ValueError.
    """
    check_logits(logits, labels, lse, grad)
    pair = wanted.empty(logits, *logits.shape)
    if not usable(logits, "cross_entropy_grad_fp8"):
        return wanted.cast(logits_grad_ref(logits, labels, lse, grad, real))
    numbers = labels.contiguous(), *(x.float().contiguous() for x in (lse, grad))
    sizes = len(logits), real, logits.shape[1], TYPES[logits.dtype], TYPES[wanted.dtype]
    tensors = logits.contiguous(), *numbers, *pair, wanted.scale, wanted.amax
    launch_kernel("cross_entropy_fp8", *tensors, *sizes)
    return pair


def logits_grad_ref(logits, labels, lse, grad, real: int) -> torch.Tensor:
    """The gradient, zeros in the columns of padding. logits `[t, V]`, others `[t]` -> `[t, V]`"""
    d = cross_entropy_grad_ref(logits[:, :real], labels, lse, grad)
    return F.pad(d, (0, logits.shape[1] - real))


def _halved(x: torch.Tensor) -> tuple[int, int]:
    """The number of rows, and f, of x `[..., 2f]`."""
    if x.shape[-1] % 2:
        raise ValueError(f"a gated unit of {list(x.shape)}: the last dim is two halves")
    return math.prod(x.shape[:-1]), x.shape[-1] // 2

"""RMSNorm and LayerNorm, with or without bias, dropout and residual add before: cuda/norm*.cu, references.

With a bias it is LayerNorm, without one RMSNorm. Saved for the backward: the norm's input (the sum, if there
is a residual) and one or two fp32 numbers per row.
"""

import torch
import torch.nn.functional as F

from nanomegatron.ops.dropout import (
    PARTS,
    Dropout,
    bias_dropout_add_ref,
    branch_backward,
    check_branch,
    kernel_arguments,
)
from nanomegatron.ops.kernels import TYPES, check_fits, launch_kernel, once, usable


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    from_one: bool = False,
    fused: bool = True,
) -> torch.Tensor:
    """The norm over the last dim: x `[..., h]` -> `[..., h]`; weight, bias `[h]` of the type of x or fp32.

    x / sqrt(mean(x^2) + eps) * weight; with a bias (x - mean) / sqrt(var + eps) * weight + bias. Statistics
    are fp32. from_one: multiply by 1 + weight (`--apply-layernorm-1p`). fused: by the kernel, where it can.

    Raises ValueError if shapes, types or devices do not fit.
    """
    check_norm(x, None, weight, bias)
    if fused and usable(x, "norm"):
        return NormFunction.apply(x, None, weight, bias, eps, from_one)[0]
    return norm_ref(x, weight, bias, eps, from_one)


def norm_beside(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, from_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm` of x, and x, whose two gradients the norm's backward adds up as `add_norm`'s does, to the bit.

    x `[..., h]`, weight, bias `[h]` -> `[..., h]`, `[..., h]`

    Raises ValueError if shapes, types or devices do not fit.
    """
    check_norm(x, None, weight, bias)
    if usable(x, "norm"):
        return NormFunction.apply(x, None, weight, bias, eps, from_one)
    return norm(x, weight, bias, eps, from_one), x


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    from_one: bool = False,
    x_bias: torch.Tensor | None = None,
    drop: Dropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm` of drop(x + x_bias) + residual, and this sum, rounded to their type: the new residual.

    x, residual `[..., h]`, weight, bias, x_bias `[h]` -> `[..., h]`, `[..., h]`; x is `[s, b, h]` with drop.

    Raises ValueError if shapes, types or devices do not fit.
    """
    check_norm(x, residual, weight, bias)
    check_branch(x, x_bias, None, drop)
    if usable(x, "add_norm"):
        return NormFunction.apply(x, residual, weight, bias, eps, from_one, x_bias, drop)
    total = bias_dropout_add_ref(x, x_bias, residual, drop)
    return norm_ref(total, weight, bias, eps, from_one), total


def norm_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, from_one: bool = False
) -> torch.Tensor:
    """`norm` by torch's norms, which compute statistics in fp32: specification and oracle.

    x `[..., h]`, weight, bias `[h]` -> `[..., h]`
    """
    same = weight.dtype == x.dtype and not from_one
    wide = x.dtype if same else torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(wide) + 1 if from_one else weight.to(wide)
    if bias is None:
        return F.rms_norm(x.to(wide), scale.shape, scale, eps).to(x.dtype)
    return F.layer_norm(x.to(wide), scale.shape, scale, bias.to(wide), eps).to(x.dtype)


class NormFunction(torch.autograd.Function):
    """`norm_beside` or, with a residual, `add_norm` by the kernels, of checked tensors."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, from_one, x_bias=None, drop=None):
        h = weight.numel()
        rows = x.numel() // max(h, 1)
        out = x.new_empty(x.shape)
        total = None if residual is None else x.new_empty(x.shape)
        rstd = x.new_empty(rows, dtype=torch.float32)
        mean = None if bias is None else torch.empty_like(rstd)
        tensors = out, total, rstd, mean, *map(_whole, (x, residual, weight, bias, x_bias))
        types = TYPES[x.dtype], TYPES[weight.dtype]
        sizes = rows, h, eps, int(from_one)
        launch_kernel("norm_forward", *tensors, *sizes, *types, *kernel_arguments(drop))
        ctx.save_for_backward(x if total is None else total, weight, rstd, mean)
        ctx.from_one, ctx.branch = from_one, (x_bias is not None, drop)
        ctx.set_materialize_grads(False)
        return out, x.view_as(x) if total is None else total

    @staticmethod
    @once
    def backward(ctx, grad, grad_total=None):
        x, weight, rstd, mean = ctx.saved_tensors
        if grad is None:  # only the sum was used
            dx, dx_bias = branch_backward(grad_total, *ctx.branch)
            return dx, grad_total, None, None, None, None, dx_bias, None
        dtotal, dweight, dbias, dropped, dx_bias = _backward(
            grad, grad_total, x, weight, rstd, mean, ctx.from_one, ctx.branch
        )
        dx, dresidual = dtotal if dropped is None else dropped, dtotal if ctx.needs_input_grad[1] else None
        return dx, dresidual, dweight, dbias, None, None, dx_bias, None


def _backward(
    grad, grad_total, x, weight, rstd, mean, from_one: bool, branch=(False, None)
) -> tuple[torch.Tensor | None, ...]:
    """dx, dweight, dbias (None without a mean), and of the branch dropped and dx_bias, or None.

    x: the norm's input, with a residual the sum, whose gradient is dx. branch: whether there was an x_bias,
    and the dropout.
    """
    grad, grad_total, x, weight = (_whole(t) for t in (grad, grad_total, x, weight))
    rows, h, (biased, drop) = rstd.numel(), weight.numel(), branch
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    dropped = None if drop is None else torch.empty_like(x)
    dbias, dx_bias = None if mean is None else torch.empty_like(weight), x.new_empty(h) if biased else None
    parts = min(rows, PARTS * torch.cuda.get_device_properties(x.device).multi_processor_count)
    sums = x.new_empty(1 + (mean is not None) + biased, parts, h, dtype=torch.float32)
    tensors = dx, dropped, dweight, dbias, dx_bias, sums, grad, grad_total, x, rstd, mean, weight
    types = TYPES[x.dtype], TYPES[weight.dtype]
    launch_kernel("norm_backward", *tensors, rows, h, parts, int(from_one), *types, *kernel_arguments(drop))
    return dx, dweight, dbias, dropped, dx_bias


def norm_backward(
    grad: torch.Tensor | None,
    grad_total: torch.Tensor | None,
    kept: tuple[torch.Tensor | None, ...],
    eps: float,
    from_one: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Backward of a norm made elsewhere (`norm_fp8`): the gradients of x (plus grad_total), weight and bias.

    grad, grad_total `[..., h]`, kept `[..., h]`, `[h]` or `[rows]`: x, weight, bias, and the forward's rstd
    and mean, fp32 -> `[..., h]`, `[h]`, `[h]`
    """
    x, weight, bias, rstd, mean = kept
    if grad is None:  # only the sum was used
        return grad_total, None, None
    if usable(x, "norm"):
        return _backward(grad, grad_total, x, weight, rstd, mean, from_one)[:3]
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
        y = norm_ref(*leaves, *[None] * (bias is None), eps, from_one)
    dx, *others = torch.autograd.grad(y, leaves, grad)
    return dx if grad_total is None else dx + grad_total, *others, *[None] * (bias is None)


def check_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise ValueError unless x, residual `[..., h]` and weight, bias `[h]` fit together."""
    if not x.is_floating_point() or weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"a norm of {x.dtype} with a weight of {weight.dtype}: needs that type or fp32")
    check_fits("weight", weight, x.shape[-1:], weight.dtype, x.device)
    check_fits("bias", bias, weight.shape, weight.dtype, x.device)
    check_fits("residual", residual, x.shape, x.dtype, x.device)


def _whole(t: torch.Tensor | None) -> torch.Tensor | None:
    """t, contiguous and, if one-dimensional, aligned to 16 bytes: else rows could not be read in packs."""
    if t is None:
        return None
    t = t.contiguous()
    return t.clone() if t.dim() == 1 and t.data_ptr() % 16 else t

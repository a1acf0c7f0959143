"""Biases of linear layers; their gradients are sums over rows: the kernel of cuda/column_sums.cu.

Its owner says where a gradient goes: `accumulate(bias, sums)` calls sums(target) at once, which adds the sums
to target `[n]`, or sums(None), which returns them: in fp32 by a kernel, else in the gradient's type.
"""

import math
from collections.abc import Callable

import torch

from nanomegatron.ops.kernels import TYPES, launch_kernel, usable

Sums = Callable[[torch.Tensor | None], torch.Tensor]
Accumulate = Callable[[torch.Tensor, Sums], torch.Tensor | None]
ROWS, BLOCKS = 8, 2  # as column_sums.cuh has them


def for_autograd(bias: torch.Tensor, sums: Sums) -> torch.Tensor:
    """The gradient of bias `[n]` as autograd takes it -> `[n]`"""
    return sums(None)


def add_bias(
    x: torch.Tensor, bias: torch.Tensor | None, accumulate: Accumulate = for_autograd
) -> torch.Tensor:
    """x + bias, or x without one. x `[..., n]`, bias `[n]` -> `[..., n]`"""
    if bias is None:
        return x
    return BiasFunction.apply(x, bias, accumulate)


class BiasFunction(torch.autograd.Function):
    """x + bias, whose gradient `accumulate` gets. x `[..., n]`, bias `[n]` -> `[..., n]`"""

    @staticmethod
    def forward(ctx, x: torch.Tensor, bias: torch.Tensor, accumulate: Accumulate) -> torch.Tensor:
        ctx.bias, ctx.accumulate = bias, accumulate
        return x + bias

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, bias_grad(ctx.bias, grad, ctx.accumulate), None


def bias_grad(bias: torch.Tensor, grad: torch.Tensor, accumulate: Accumulate) -> torch.Tensor | None:
    """The gradient of a bias `[n]` from that of x + bias, grad `[..., n]` -> `[n]`, by `accumulate`"""
    return accumulate(bias, lambda target: column_sums(grad, target)) if bias.requires_grad else None


def add_grad(
    bias: torch.Tensor | None, grad: torch.Tensor | None, accumulate: Accumulate
) -> torch.Tensor | None:
    """Give a bias's gradient `[n]` that a kernel has made to `accumulate` -> `[n]` or None"""
    if bias is None or not bias.requires_grad:
        return None
    return accumulate(bias, lambda target: grad if target is None else target.add_(grad))


def column_sums(x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
    """Add the sums over all rows of x to target, or return them. x `[..., n]`, target `[n]` -> `[n]`"""
    differentiable = torch.is_grad_enabled() and x.requires_grad
    if differentiable or not usable(x, "column_sums"):
        sums = x.sum_to_size(x.shape[-1:])
        return sums if target is None else target.add_(sums)
    x, n = x.contiguous(), x.shape[-1]
    out = x.new_empty(n, dtype=torch.float32) if target is None else target
    parts = x.new_empty(blocks_down(x), n, dtype=torch.float32)
    sizes = x.numel() // max(n, 1), n, len(parts), int(target is not None)
    launch_kernel("column_sums", out, parts, x, *sizes, TYPES[x.dtype], TYPES[out.dtype])
    return out


def blocks_down(x: torch.Tensor) -> int:
    """How many blocks share the rows of x `[..., n]`: as many parts their sums have."""
    n = max(x.shape[-1], 1)
    across = math.ceil(n * x.element_size() / 512)  # blocks, of 32 packs of 16 bytes
    fit = BLOCKS * torch.cuda.get_device_properties(x.device).multi_processor_count // across
    return max(min(fit, math.ceil(x.numel() / (n * ROWS))), 1)

"""Biases of linear layers; their gradients are sums over rows: the kernel of cuda/column_sums.cu.

Its owner says where a gradient goes: `accumulate(bias, write)`, that of `param.py`, calls write(out, beta) at
once, which makes out `[n]` beta * out + the sums; beta is 0 (out may be anything) or 1.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from nanomegatron.ops.kernels import TYPES, launch_kernel, usable

Accumulate = Callable[[torch.Tensor, Callable[[torch.Tensor, int], Any]], torch.Tensor | None]
ROWS, BLOCKS = 8, 2  # as column_sums.cuh has them


def for_autograd(bias: torch.Tensor, write: Callable[[torch.Tensor, int], Any]) -> torch.Tensor:
    """The gradient of bias `[n]` as autograd takes it -> `[n]`"""
    out = torch.empty_like(bias)
    write(out, 0)
    return out


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


def bias_grad(bias: torch.Tensor | None, dy: torch.Tensor, accumulate: Accumulate) -> torch.Tensor | None:
    """The gradient of a bias `[n]`, if any, by `accumulate`, from that of x + bias, dy `[..., n]` -> `[n]`"""
    if bias is None or not bias.requires_grad:
        return None
    return accumulate(bias, lambda out, beta: column_sums(dy, out, beta))


def column_sums(x: torch.Tensor, out: torch.Tensor, beta: int = 0) -> torch.Tensor:
    """out = beta * out + the sums over rows of x, in fp32 by a kernel. x `[..., n]`, out `[n]` -> `[n]`"""
    differentiable = torch.is_grad_enabled() and x.requires_grad
    if differentiable or not usable(x, "column_sums"):
        sums = x.sum_to_size(x.shape[-1:])
        return out.add_(sums) if beta else out.copy_(sums)
    x, n = x.contiguous(), x.shape[-1]
    parts = x.new_empty(blocks_down(x), n, dtype=torch.float32)
    sizes = x.numel() // max(n, 1), n, len(parts), beta
    launch_kernel("column_sums", out, parts, x, *sizes, TYPES[x.dtype], TYPES[out.dtype])
    return out


def blocks_down(x: torch.Tensor) -> int:
    """How many blocks share the rows of x `[..., n]`: as many parts their sums have."""
    n = max(x.shape[-1], 1)
    across = math.ceil(n * x.element_size() / 512)  # blocks, of 32 packs of 16 bytes
    fit = BLOCKS * torch.cuda.get_device_properties(x.device).multi_processor_count // across
    return max(min(fit, math.ceil(x.numel() / (n * ROWS))), 1)

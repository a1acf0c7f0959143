"""The gated activation of an MLP, SwiGLU or GEGLU: the kernel of cuda/swiglu.cu, and its reference.

Only the input x = [gate; up], `[..., 2f]`, is saved for the backward. (arXiv 2002.05202)
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from nanomegatron.config.model import TransformerConfig
from nanomegatron.ops.bias import Accumulate, add_bias, for_autograd
from nanomegatron.ops.gelu import EXACT, SQUARED_RELU, TANH, bias_act
from nanomegatron.ops.kernels import TYPES, launch_kernel, once, usable

SILU, GELU = 0, 1  # as swiglu.cu has them


def plain_act(config: TransformerConfig) -> int | None:
    """The number of an MLP's activation in `bias_act`, None if it is gated."""
    if config.gated:
        return None
    return SQUARED_RELU if config.squared_relu else TANH if config.tanh_gelu else EXACT


def activation(config: TransformerConfig) -> Callable[..., torch.Tensor]:
    """The function between an MLP's linear layers, of (x, bias, accumulate) or of x: see `bias_act`."""
    act = plain_act(config)
    if act is not None:
        return partial(bias_act, act=act)
    unit = gated if config.bias_swiglu_fusion else gated_ref
    return partial(bias_gated, unit=partial(unit, act=GELU if config.geglu else SILU))


def bias_gated(
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    accumulate: Accumulate = for_autograd,
    *,
    unit: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """A gated unit of x + bias. x `[..., 2*f]`, bias `[2*f]` -> `[..., f]`. accumulate: as in `bias_act`."""
    return unit(add_bias(x, bias, accumulate))


def gated(x: torch.Tensor, act: int) -> torch.Tensor:
    """act(gate) * up for x `[..., 2*f]` = [gate; up]. -> `[..., f]`  Raises ValueError for an odd size."""
    if x.shape[-1] % 2:
        raise ValueError(f"a gated unit of {list(x.shape)}: the last dim is two halves")
    if not usable(x, "gated"):
        return gated_ref(x, act)
    return GatedFunction.apply(x, act)


def gated_ref(x: torch.Tensor, act: int) -> torch.Tensor:
    """act(gate) * up in plain torch: specification and oracle. x `[..., 2*f]` -> `[..., f]`"""
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate) if act == SILU else F.gelu(gate, approximate="tanh")) * up


def gated_backward_ref(grad: torch.Tensor, x: torch.Tensor, act: int) -> torch.Tensor:
    """The gradient of x, from that of act(gate) * up: grad `[..., f]`, x `[..., 2*f]` -> `[..., 2*f]`"""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(gated_ref(x, act), x, grad)[0]


class GatedFunction(torch.autograd.Function):
    """act(gate) * up by the kernel. x `[..., 2*f]` -> `[..., f]`"""

    @staticmethod
    def forward(ctx, x: torch.Tensor, act: int) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.act = act
        f = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], f)
        launch_kernel("swiglu_forward", out, x, x.numel() // max(2 * f, 1), f, act, TYPES[x.dtype])
        return out

    @staticmethod
    @once
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        dx, f = torch.empty_like(x), x.shape[-1] // 2
        sizes = x.numel() // max(2 * f, 1), f, ctx.act, TYPES[x.dtype]
        launch_kernel("swiglu_backward", dx, grad.contiguous(), x, *sizes)
        return dx, None

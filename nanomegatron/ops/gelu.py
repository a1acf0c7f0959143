"""An MLP's activation without a gate, with the bias before it: the kernel of cuda/gelu.cu, and its reference.

Only x `[..., f]`, the matmul's result, is saved for the backward, which also makes the bias's gradient: no
other pass over memory is left between the two matrices.
"""

import torch
import torch.nn.functional as F

from nanomegatron.ops.bias import Accumulate, add_bias, blocks_down, for_autograd
from nanomegatron.ops.kernels import TYPES, check_fits, launch_kernel, once, usable

# as gelu.cu has them: GELU in the tanh form of GPT-2 and Megatron's fused path, or exact; max(x, 0)^2
# (arXiv 2109.08668)
TANH, EXACT, SQUARED_RELU = 0, 1, 2


def bias_act(
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    accumulate: Accumulate = for_autograd,
    *,
    act: int,
) -> torch.Tensor:
    """act(x + bias) for x `[..., f]` and, if there is one, a bias `[f]` of its type. -> `[..., f]`

    accumulate: what the bias's gradient is given to (`ops/bias.py`). Raises ValueError for another bias.
    """
    check_fits("bias", bias, x.shape[-1:], x.dtype, x.device)
    if not usable(x, "bias_act"):
        return bias_act_ref(x, bias, accumulate, act=act)
    return BiasActFunction.apply(x, bias, act, accumulate)


def bias_act_ref(
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    accumulate: Accumulate = for_autograd,
    *,
    act: int,
) -> torch.Tensor:
    """act(x + bias) in plain torch: specification and oracle. x `[..., f]`, bias `[f]` -> `[..., f]`"""
    x = add_bias(x, bias, accumulate)
    if act == SQUARED_RELU:
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if act == TANH else "none")


class BiasActFunction(torch.autograd.Function):
    """act(x + bias) by the kernel. x `[..., f]`, bias `[f]` or None -> `[..., f]`"""

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, bias: torch.Tensor | None, act: int, accumulate: Accumulate
    ) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.bias, ctx.act, ctx.accumulate = bias, act, accumulate
        out, f = torch.empty_like(x), x.shape[-1]
        launch_kernel("gelu_forward", out, x, bias, x.numel() // max(f, 1), f, act, TYPES[x.dtype])
        return out

    @staticmethod
    @once
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), bias = ctx.saved_tensors, ctx.bias
        dx = torch.empty_like(x)
        f = x.shape[-1]
        parts = blocks_down(x)

        def write(dbias: torch.Tensor | None, beta: int) -> None:
            sums = None if dbias is None else x.new_empty(parts, f, dtype=torch.float32)
            sizes = x.numel() // max(f, 1), f, parts, beta, ctx.act, TYPES[x.dtype]
            tensors = dx, dbias, sums, grad.contiguous(), x, bias
            launch_kernel("gelu_backward", *tensors, *sizes, TYPES[(x if dbias is None else dbias).dtype])

        if bias is None or not bias.requires_grad:
            write(None, 0)
            return dx, None, None, None
        return dx, ctx.accumulate(bias, write), None, None

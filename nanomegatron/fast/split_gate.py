"""Same result as `router.GateFunction`, the backward of fp32 logits at the speed of bf16 matmuls.

With --moe-router-dtype fp32 the gradient g of the logits is fp32, x and W are bf16. g is split in three bf16
parts, each of them the rounded rest of those before. They add up to it: 3 x 8 bits are fp32's 24.

    dx = [g1 g2 g3] [W; W; W]              one matmul, which adds the parts up in fp32
    dW = g1^T x + g2^T x + g3^T x          one matmul, then the sum

Gain: the router of a layer of Qwen3-30B-A3B, forward and backward, takes 0.63 ms on an H200; with matmuls of
fp32 1.03 (docs/log.md; benchmarks/results/2026-11-22-moe-layer-four-qwen.json).
"""

import torch

from nanomegatron.param import accumulate, add_grad
from nanomegatron.router import GateFunction, gate_matmul


class SplitGateFunction(torch.autograd.Function):
    """A `Router.gate`: x W^T, multiplied in `dtype`. x `[t, h]`, weight `[E, h]` -> `[t, E]`"""

    forward = staticmethod(GateFunction.forward)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if grad.dtype != torch.float32 or x.dtype != torch.bfloat16:
            return GateFunction.backward(ctx, grad)
        parts = []
        for _ in range(3):
            parts.append(grad.bfloat16())
            grad = grad - parts[-1]
        parts = torch.cat(parts, dim=1)

        def write(out: torch.Tensor, beta: int) -> None:
            add_grad(out, gate_matmul(parts.t(), x, torch.float32).view((3, *out.shape)).sum(0), beta)

        return parts @ ctx.weight.repeat(3, 1), accumulate(ctx.weight, write), None

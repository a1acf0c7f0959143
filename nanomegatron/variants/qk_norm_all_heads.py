"""Other result than `layers.Norm`, for `--qk-layernorm-all-heads`: one RMSNorm of all heads of a token.

    core        q [s, b, n, d]    mean over d              weight [d]       each head by itself
    here        q [s, b, n, d]    mean over n x d          weight [n*d]     all heads, sharded over tp

A rank sums the squares of its own heads, and an all-reduce over tp adds one number for each token. Every rank
holds the whole weight, and uses the part of its heads; with fewer key/value heads than ranks those that share
a head count it once each. (OLMo 2, arXiv 2501.00656. tests/test_model.py)
"""

import torch
from torch import nn

from nanomegatron.comm import copy_to, reduce_from
from nanomegatron.layers import Norm
from nanomegatron.param import Init, replicated


class HeadsNorm(nn.Module):
    """RMSNorm of all heads together. x `[s, b, n/tp, d]` -> `[s, b, n/tp, d]`; all-reduces `[s, b]` over tp.

    It takes the place of `norm`, and has its name, type and initial value; its weight is `[n*d]`.
    """

    def __init__(self, norm: Norm, size: int) -> None:
        """size: n*d, the features of all heads on all ranks."""
        super().__init__()
        spec = norm.weight.spec
        init = Init(dtype=norm.weight.dtype, device=norm.weight.device, name=spec.name)
        self.eps = norm.eps
        self.from_one = norm.from_one
        self.axis = spec.parts[0].axis
        self.weight = replicated(init, (size,), self.axis, partial_grad=True, fill=1 - self.from_one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        square = wide.square().mean((-2, -1), keepdim=True) / self.axis.size
        square = copy_to(reduce_from(square, self.axis), self.axis)
        own = x.shape[-2] * x.shape[-1]
        ranks = self.axis.size * own // len(self.weight)  # that share a head
        weight = self.weight[self.axis.rank // ranks * own :][:own].view(x.shape[-2:]).to(wide.dtype)
        return (wide * torch.rsqrt(square + self.eps) * (weight + self.from_one)).to(x.dtype)

"""The experts of a rank: MLPs that take turns on rows in order of experts.

    rows [r, h]          offsets [e + 1]: expert i has the rows offsets[i] ... offsets[i + 1]

    0  +----------+
       | expert 0 |   y = x W1[0]^T,  z = silu(gate) * up of y = [gate, up],  z W2[0]^T
    3  +----------+
       | expert 1 |   y = x W1[1]^T,  ...
    7  +----------+

Over etp every rank has its share of each expert's f inner features, and its result is a summand. Weights are
stored so that every part, an expert's matrix, is some rows of the whole, cut along these:

    weight1  [e * 2f/etp, h]    gate of expert 0, up of expert 0, gate of expert 1, ...
    weight2  [e * f/etp, h]     of expert 0, of expert 1, ...: transposed

`moe_matmul.py` multiplies. Under the rowwise recipe that is in FP8, under the others in bf16.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from nanomegatron.config.model import TransformerConfig
from nanomegatron.fast.fp8_producers import CastFp8Function
from nanomegatron.fp8 import E4M3, MULTIPLE, Fp8Linear, Scales
from nanomegatron.moe_matmul import GroupedFp8LinearFunction, GroupedLinearFunction, Groups, whole
from nanomegatron.ops.swiglu import activation
from nanomegatron.param import Init, ParamSpec, Part, Soon, new_parameter, replica, scaled_std, shard
from nanomegatron.recompute import keeping, with_source
from nanomegatron.router import MoeAxes


class AddBiasFunction(torch.autograd.Function):
    """x `[r, o]` plus to each row the bias of its expert, of `[e * o]`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(offsets)
        ctx.dtype, experts = bias.dtype, len(offsets) - 1
        rows = torch.arange(len(x), device=x.device, dtype=offsets.dtype)
        expert = torch.searchsorted(offsets[1:], rows, right=True).clamp_(max=experts - 1)
        return x + bias.view(experts, -1)[expert]

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (offsets,) = ctx.saved_tensors
        sums = torch.segment_reduce(grad.float(), "sum", offsets=offsets.long(), axis=0, unsafe=True)
        return grad, sums.flatten().to(ctx.dtype), None


class GroupedExperts(nn.Module):
    """This rank's experts on their rows: `[r, h] -> [r, h]`, over etp a summand.

    multiple: what each expert's rows are to be padded to one of, and if it is not 1, with zeros, and at least
    to that.
    """

    multiple, fp8 = 1, (None, None)

    def __init__(self, config: TransformerConfig, axes: MoeAxes, init: Init) -> None:
        super().__init__()
        ep, etp, h, f = axes.ep, axes.etp, config.hidden_size, config.moe_ffn_size
        if config.num_experts % ep.size or f % etp.size:
            sizes = f"ep {ep.size}, etp {etp.size}"
            raise ValueError(f"{config.num_experts} experts of {f} features do not divide by {sizes}")
        self.config, self.activation = config, activation(config)
        overlaps = axes.halves
        self.recompute, self.name = config.recomputes("moe_act"), init.name
        local = config.num_experts // ep.size
        names = [init.at(f"{ep.rank * local + i}").name for i in range(local)]
        inner = ("linear_fc1.gate", "linear_fc1.up") if config.swiglu else ("linear_fc1",)

        def parameter(kind: str, layers: tuple[str, ...], part: Callable[[str, int], Part], init: Init):
            parts, rows, rest = [], 0, (h,) * kind.startswith("weight")
            for name in (f"{expert}.{layer}.{kind}" for expert in names for layer in layers):
                parts.append(part(name, rows))
                rows += parts[-1].stop - parts[-1].start or h
            writes = bool(rest)
            uses = 1 + (writes and overlaps)  # each half of the tokens
            spec = ParamSpec(tuple(parts), (rows, *rest), writes, uses, decay=writes, expert=True)
            return new_parameter(spec, init, None if writes else 0.0)

        def cut(*rest: int) -> Callable[[str, int], Part]:
            return lambda name, row: shard(name, (f, *rest), 0, etp, row)

        def whole(name: str, row: int) -> Part:  # only the first rank adds it
            return replace(replica(name, (h,), etp, partial=True), local_start=row)

        last = replace(init, std=scaled_std(config.init_method_std, config.num_layers))
        self.weight1 = parameter("weight", inner, cut(h), init)
        self.weight2 = parameter("weight_t", ("linear_fc2",), cut(h), last)
        self.bias1 = self.bias2 = None
        if not config.disable_bias_linear:
            self.bias1 = parameter("bias", inner, cut(), init)
            self.bias2 = parameter("bias", ("linear_fc2",), whole, init)
        self.first = etp.rank == 0

    def use_fp8(self, scales: Scales) -> None:
        """Multiply in FP8, if the recipe is one that torch's grouped matmul knows; its gradients are E4M3."""
        if scales.recipe.name == "rowwise":
            layers = (f"{self.name}.{name}.weight" for name in ("linear_fc1", "linear_fc2"))
            self.multiple, self.fp8 = MULTIPLE, tuple(scales.layer(name, E4M3) for name in layers)

    def forward(
        self,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        ends: list[int] | None = None,
        soon: Soon | None = None,
        early: list | None = None,
    ) -> torch.Tensor:
        """offsets: int32 `[e + 1]`, ascending from 0; rows beyond the last are nobody's, in FP8 zeros.

        ends: the offsets on the host, where it knows them; else it does not ask, but for a loop. soon: takes
        the first layer's work on its weight gradient, for who has to wait once the rows' gradient is made.
        early: takes what makes again what is not kept, for who has to wait for the result's gradient.
        """
        groups = Groups(offsets, ends if len(rows) else [0] * len(offsets), self.config.moe_grouped_gemm)
        first, second = self.fp8
        if first is not None:
            groups = whole(groups, len(rows))
        x = linear(rows, self.weight1, groups, False, first, soon)
        if self.bias1 is not None:
            x = AddBiasFunction.apply(x, self.bias1, groups.offsets)

        def activated(x: torch.Tensor) -> torch.Tensor:
            y, trains = self.activation(x), torch.is_grad_enabled()
            if second is None or not second.recipe.wgrad:
                return y
            return CastFp8Function.apply(y, second, second.outputs("", trains), trains, None)

        y = activated(x)
        if self.recompute:
            with_source(y, activated, x)
        with keeping(y, early):
            y = linear(y, self.weight2, groups, True, second)
        return y if self.bias2 is None else AddBiasFunction.apply(y, self.bias2 * self.first, groups.offsets)


def linear(
    x: torch.Tensor,
    weight: nn.Parameter,
    groups: Groups,
    transposed: bool,
    fp8: Fp8Linear | None,
    soon: Soon | None = None,
) -> torch.Tensor:
    """Every expert's linear layer on its rows, in FP8 if there is an `fp8`. `[r, i] -> [r, o]`"""
    if fp8 is None:
        return GroupedLinearFunction.apply(x, weight, groups, transposed, soon)
    return GroupedFp8LinearFunction.apply(x, weight, groups, transposed, fp8, torch.is_grad_enabled(), soon)

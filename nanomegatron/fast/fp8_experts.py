"""Same result as `moe.grouped_linear` to the precision of FP8, with the matmuls of experts in FP8.

torch's grouped matmul supports only a scale per row and only E4M3. So only the rowwise recipe quantizes
experts, with gradients in E4M3 in the hybrid format, too; with other recipes they multiply in bf16. Both
operands are contiguous along the contracted dim, as in `fp8_linear.py`. In the transposed weights all experts
share a row and its scale. Groups begin at multiples of 16 rows, and none is empty (`ops/permute.route`). On a
CPU, where torch has no grouped FP8 matmul, a loop over the groups replaces it.

Gain: one H200, 4 experts, 16,384 rows of 4,096 to 28,672 features: 1,389 TFLOP/s, 784 in bf16; 64 experts on
131,072 rows of 2,048 to 1,536: 1,166, in bf16 735 (benchmarks/results/2026-11-22-moe-experts.json).
"""

from functools import partial

import torch
from torch import nn

from nanomegatron.fast.fp8_producers import CastFp8Function
from nanomegatron.fp8 import E4M3, MULTIPLE, Fp8LayerState, Quantized, Recipe, Rowwise
from nanomegatron.fp8_linear import Fp8Input, quantize_input
from nanomegatron.moe import Activation, GroupedExperts, accumulate_each, accumulate_grouped, accumulate_outer
from nanomegatron.ops.fp8_cast import Fp8Matrix
from nanomegatron.ops.fp8_matmul import fp8_matmul
from nanomegatron.ops.grouped_mm import Groups


def quantize_experts(experts: GroupedExperts, recipe: Recipe) -> list[Fp8LayerState]:
    """Make the experts multiply in FP8, if the recipe is rowwise; return the states of the two layers."""
    if recipe.quantizer_class is not Rowwise:
        return []
    first, second = (
        Fp8LayerState(f"{experts.name}.{name}.weight", recipe, E4M3) for name in ("linear_fc1", "linear_fc2")
    )
    experts.multiple, experts.linear = MULTIPLE, partial(fp8_expert_linear, first, second)
    if second.recipe.wgrad:
        experts.act = partial(quantizing_expert_act, second, experts.act)
    return [first, second]


def fp8_expert_linear(
    first: Fp8LayerState,
    second: Fp8LayerState,
    x: torch.Tensor | Fp8Input,
    weight: nn.Parameter,
    groups: Groups,
    transposed: bool = False,
) -> torch.Tensor:
    """A `GroupedExperts.linear` in FP8; first, second: states of the two layers, the second `transposed`.

    x `[r, i]`, weight `[e*o, i]` or `[e*i, o]` (transposed) -> `[r, o]`
    """
    given = x if isinstance(x, Fp8Input) else Fp8Input(x)
    groups = groups.covering(len(given.x))
    fp8 = second if transposed else first
    trains = torch.is_grad_enabled()
    return GroupedFp8LinearFunction.apply(given.x, weight, groups, transposed, fp8, given.copies, trains)


def quantizing_expert_act(second: Fp8LayerState, act: Activation, x: torch.Tensor) -> Fp8Input:
    """A `GroupedExperts.act` whose result only the second layer reads, in FP8.

    x `[r, f]` or `[r, 2*f]` (gated) -> `[r, f]`
    """
    y, copies = CastFp8Function.apply(act(x), second, None, "", torch.is_grad_enabled())
    return Fp8Input(y, copies)


def one_kernel(x: torch.Tensor, groups: Groups) -> bool:
    """Whether to use `torch._scaled_grouped_mm` for FP8 rows x `[r, i]` or `[o, r]` (transposed)."""
    return groups.grouped and x.is_cuda and x.numel() > 0


def grouped_fp8_mm(
    x: Fp8Matrix, w: Fp8Matrix, groups: Groups, dtype: torch.dtype, fast: bool = False
) -> torch.Tensor:
    """`grouped_mm` in FP8: x `[r, i]`, w `[e, o, i]`, contiguous along i, w.scale_inv `[e, o]` -> `[r, o]`"""
    if one_kernel(x.data, groups):
        return torch._scaled_grouped_mm(
            x.data,
            w.data.mT,
            x.scale_inv.flatten(),
            w.scale_inv,
            offs=groups.offsets[1:],
            out_dtype=dtype,
            use_fast_accum=fast,
        )
    y = x.scale_inv.new_empty(len(x.data), w.data.shape[1], dtype=dtype)
    for i, begin, end in groups.spans:
        rows = Fp8Matrix(x.data[begin:end], x.scale_inv[begin:end])
        y[begin:end] = fp8_matmul(rows, Fp8Matrix(w.data[i], w.scale_inv[i][:, None]), dtype, fast)
    return y


def accumulate_fp8_outer(
    weight: nn.Parameter, a: Fp8Matrix, b: Fp8Matrix, groups: Groups
) -> torch.Tensor | None:
    """`moe.accumulate_outer` from transposed FP8 copies: a `[m, r]`, b `[n, r]` -> `[e*m, n]`, or None"""
    if one_kernel(a.data, groups):
        multiply = partial(
            torch._scaled_grouped_mm,
            a.data,
            b.data.t(),
            a.scale_inv.flatten().repeat(groups.experts),
            b.scale_inv.flatten().repeat(groups.experts),
            offs=groups.offsets[1:],
            out_dtype=torch.bfloat16,
        )
        return accumulate_grouped(weight, multiply)

    def add_expert(out: torch.Tensor, begin: int, end: int) -> None:
        out.add_(fp8_matmul(*(Fp8Matrix(c.data[:, begin:end], c.scale_inv) for c in (a, b)), out.dtype))

    return accumulate_each(weight, groups, add_expert)


class GroupedFp8LinearFunction(torch.autograd.Function):
    """`moe.GroupedLinearFunction` in FP8. Rows that belong to no expert are zeros, and count as the last's.

    x `[r, i]`, or with `copies` a placeholder, weight `[e*o, i]` or `[e*i, o]` (transposed) -> `[r, o]`
    """

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        weight: nn.Parameter,
        groups: Groups,
        transposed: bool,
        fp8: Fp8LayerState,
        copies: Quantized | None,
        trains: bool,
    ) -> torch.Tensor:
        cast = copies or quantize_input(fp8, x, None, "", trains)
        ctx.weight, ctx.groups, ctx.transposed = weight, groups, transposed
        ctx.fp8, ctx.dtype = fp8, x.dtype
        ctx.save_for_backward(*(cast.saved_form() if fp8.recipe.wgrad else (x,)))
        w = fp8_parts(fp8, weight, groups, transposed)
        return grouped_fp8_mm(cast.rowwise, w, groups, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, groups = ctx.weight, ctx.groups
        fp8, kept = ctx.fp8, ctx.saved_tensors
        rowwise, columnwise = fp8.g.quantize(grad.contiguous(), "both" if fp8.recipe.wgrad else "rowwise")
        dx = grouped_fp8_mm(rowwise, fp8_parts(fp8, weight, groups, not ctx.transposed), groups, ctx.dtype)
        pair = (columnwise, Fp8Matrix(*kept)) if fp8.recipe.wgrad else (grad.contiguous(), *kept)
        a, b = reversed(pair) if ctx.transposed else pair
        outer = accumulate_fp8_outer if fp8.recipe.wgrad else accumulate_outer
        return dx, outer(weight, a, b, groups), *[None] * 5


def fp8_parts(fp8: Fp8LayerState, weight: nn.Parameter, groups: Groups, transposed: bool) -> Fp8Matrix:
    """The weight `[e*o, i]` for `grouped_fp8_mm`, `[e, o, i]`; or, transposed, as `[e, i, o]`."""
    experts, (rowwise, columnwise) = groups.experts, fp8.weight(weight)
    if not transposed:
        data = rowwise.data.view(experts, -1, rowwise.data.shape[1])
        return Fp8Matrix(data, rowwise.scale_inv.view(experts, -1))
    data = columnwise.data.view(len(columnwise.data), experts, -1).transpose(0, 1)
    return Fp8Matrix(data, columnwise.scale_inv.view(1, -1).expand(experts, -1))

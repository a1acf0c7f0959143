"""The linear layers of experts: three matmuls for each expert, on the rows that it has.

    y  = x W^T      [rows, out]     rows in groups
    dx = dy W       [rows, in]      rows in groups
    dW = dy^T x     [out, in]       sums over each group

torch multiplies all groups in one matmul, and on Hopper reads their offsets on the GPU; or there is a loop,
for which the host has to know them. In bf16 the loop adds weight gradients to `main_grad` in fp32 by the
matmul itself, where one matmul for all gives them in bf16, to be added afterwards. On an H200, torch 2.11:

    experts x rows x in x out        y: loop           grouped           dW: loop          grouped, added
    4 x 16384 x 4096 x 28672         4.83 ms (796)     4.91 ms (784)     5.19 ms (742)     6.84 ms (563)
    64 x 131072 x 2048 x 1536        1.29 ms (641)     1.12 ms (735)     1.58 ms (523)     1.85 ms (447)

(rows of all, TFLOP/s in brackets). The second loop's dW is faster here, where the GPU never waits for the
host; in training to launch 64 matmuls takes longer than to do them. Hence the loop where an expert has LARGE
multiplications or more on average, if the host knows the offsets; else all grouped, so that it need not wait.
Types and sizes that torch has no grouped matmul for are always in the loop.

In FP8 (`fp8.py`) a scale for each row is all that torch's grouped matmul knows, and E4M3 all that it takes:
so gradients are E4M3 there in the hybrid format too. Both operands lie along what is summed over, as in
`fp8_linear.py`. In the transposed copies, of features, experts share a row and its scale. Groups begin at
multiples of 16 rows, and none is empty (`ops_moe.route`). Without that matmul, on a CPU, there is the loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from math import prod

import torch
from torch import nn

from nanomegatron.fp8 import Cast, Fp8Linear, matmul
from nanomegatron.param import (
    Soon,
    accumulate_grad,
    add_product,
    is_deferred,
    main_grad,
    now_or,
    run_or_defer,
)
from nanomegatron.recompute import source_of

LARGE = 2**36  # multiplications


@dataclass
class Groups:
    """Which rows are whose: expert i has offsets[i] ... offsets[i + 1] of them."""

    offsets: torch.Tensor  # int32 [e + 1]
    ends: list[int] | None = None  # the same on the host, where that knows them
    grouped: bool = True  # to be multiplied at once, where that is good

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """(expert, first row, end) of all that have rows; the host may have to wait for the offsets."""
        ends = self.offsets.tolist() if self.ends is None else self.ends
        return [(i, begin, end) for i, (begin, end) in enumerate(pairwise(ends)) if begin < end]

    @property
    def experts(self) -> int:
        return len(self.offsets) - 1

    def large(self, *features: int) -> bool:
        """Whether an expert is known to have much to do with features of these sizes, on average."""
        return self.ends is not None and self.ends[-1] * prod(features) >= LARGE * self.experts


def fits(rows: torch.Tensor, *sizes: int) -> bool:
    """Whether `torch._grouped_mm` is for such rows, and features of these sizes."""
    return rows.dtype == torch.bfloat16 and len(rows) > 0 and all(size % 8 == 0 for size in sizes)


def products(x: torch.Tensor, w: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Each expert's rows of x `[r, i]` times its w `[e, i, o]` -> `[r, o]`; beyond the offsets anything."""
    if groups.grouped and not groups.large(*w.shape[1:]) and fits(x, *w.shape[1:]):
        return torch._grouped_mm(x, w, offs=groups.offsets[1:])
    y = x.new_empty(len(x), w.shape[2])
    for i, begin, end in groups.spans:
        torch.mm(x[begin:end], w[i], out=y[begin:end])
    return y


def weight_grads(
    weight: nn.Parameter, a: torch.Tensor, b: torch.Tensor, groups: Groups, soon: Soon | None = None
) -> torch.Tensor | None:
    """a^T b of each expert's rows, where `param.py` wants the gradient. a `[r, o]`, b `[r, i]`

    What is left in `soon`, for a bucket's parameter, runs beside a message. NCCL's shares the GPU with the
    loop, or the sum of gradients, but not with a grouped matmul, whose blocks expect all multiprocessors from
    the start and would end as much later. Copy engines leave them these, and all can wait: `soon.whole`.
    """
    sizes = a.shape[1], b.shape[1]
    if groups.grouped and not groups.large(*sizes) and fits(a, *sizes):
        offsets = groups.offsets[1:]
        return accumulate_grad(
            weight, lambda: torch._grouped_mm(a.t(), b, offs=offsets).view_as(weight), soon
        )

    def add(each: torch.Tensor, begin: int, end: int) -> None:
        add_product(each, a[begin:end], b[begin:end])

    return one_by_one(weight, groups, add, soon)


def one_by_one(
    weight: nn.Parameter, groups: Groups, add: Callable[[torch.Tensor, int, int], None], soon: Soon | None
) -> torch.Tensor | None:
    """The weight gradient: `add` adds that of an expert `[o, i]`, of its rows from the first to an end."""
    target = main_grad(weight)
    into = torch.zeros_like(weight) if target is None else target
    each = into.view(groups.experts, -1, weight.shape[1])

    def add_all() -> torch.Tensor | None:
        for i, begin, end in groups.spans:
            add(each[i], begin, end)
        if target is None:
            return into
        weight.bucket.ready(weight)
        return None

    return now_or(None if target is None else soon, weight, add_all)


def due(
    weight: nn.Parameter, work: Callable[[Soon | None], torch.Tensor | None], soon: Soon | None
) -> torch.Tensor | None:
    """`run_or_defer`, of work that may leave something in `soon`, where nobody puts it off as a whole."""
    given = None if is_deferred(weight) else soon
    return run_or_defer(weight, lambda: work(given))


class GroupedLinearFunction(torch.autograd.Function):
    """Every expert's linear layer on its rows: x `[r, i]` -> `[r, o]`

    weight `[e * o, i]`, or `transposed` `[e * i, o]`. soon: as `weight_grads` takes it.
    """

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, weight: nn.Parameter, groups: Groups, transposed: bool, soon: Soon | None = None
    ) -> torch.Tensor:
        x, w = x.contiguous(), weight.view(groups.experts, -1, weight.shape[1])
        ctx.save_for_backward(x)
        ctx.weight, ctx.groups, ctx.transposed, ctx.soon = weight, groups, transposed, soon
        return products(x, w if transposed else w.mT, groups)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight, groups, grad = ctx.saved_tensors, ctx.weight, ctx.groups, grad.contiguous()
        w = weight.view(groups.experts, -1, weight.shape[1])
        dx = products(grad, w.mT if ctx.transposed else w, groups)
        pair = (x, grad) if ctx.transposed else (grad, x)
        dw = due(weight, partial(weight_grads, weight, *pair, groups), ctx.soon)
        return dx, dw, None, None, None


def at_once(x: torch.Tensor, groups: Groups) -> bool:
    """Whether `torch._scaled_grouped_mm` is for FP8 rows, or transposed ones."""
    return groups.grouped and x.is_cuda and x.numel() > 0


def fp8_products(x: Cast, w: Cast, groups: Groups, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """As `products`, of w `[e, o, i]` with i in one piece and inverses `[e, o]`."""
    if at_once(x.data, groups):
        how = dict(offs=groups.offsets[1:], out_dtype=dtype, use_fast_accum=fast)
        return torch._scaled_grouped_mm(x.data, w.data.mT, x.inverse.flatten(), w.inverse, **how)
    y = x.inverse.new_empty(len(x.data), w.data.shape[1], dtype=dtype)
    for i, begin, end in groups.spans:
        rows = Cast(x.data[begin:end], x.inverse[begin:end])
        y[begin:end] = matmul(rows, Cast(w.data[i], w.inverse[i][:, None]), dtype, fast)
    return y


def fp8_weight_grads(
    weight: nn.Parameter, a: Cast, b: Cast, groups: Groups, soon: Soon | None = None
) -> torch.Tensor | None:
    """As `weight_grads`, of the transposed copies. a `[o, r]`, b `[i, r]`"""
    if at_once(a.data, groups):
        scales = [c.inverse.flatten().repeat(groups.experts) for c in (a, b)]
        how = dict(offs=groups.offsets[1:], out_dtype=torch.bfloat16)
        return accumulate_grad(
            weight, lambda: torch._scaled_grouped_mm(a.data, b.data.t(), *scales, **how).view_as(weight), soon
        )

    def add(each: torch.Tensor, begin: int, end: int) -> None:
        each.add_(matmul(*(Cast(c.data[:, begin:end], c.inverse) for c in (a, b)), each.dtype))

    return one_by_one(weight, groups, add, soon)


class GroupedFp8LinearFunction(torch.autograd.Function):
    """GroupedLinearFunction in FP8. Rows that are nobody's are zeros and the last expert's (`whole`)."""

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        weight: nn.Parameter,
        groups: Groups,
        transposed: bool,
        fp8: Fp8Linear,
        trains: bool,
        soon: Soon | None = None,
    ) -> torch.Tensor:
        """x: or a stand-in for it, with casts."""
        cast = source_of(x).casts or fp8.cast(x, "x", fp8.outputs("", trains), None, trains)
        ctx.weight, ctx.groups, ctx.transposed, ctx.fp8, ctx.dtype = weight, groups, transposed, fp8, x.dtype
        ctx.soon = soon
        ctx.save_for_backward(*((cast.flip or cast.row) if fp8.recipe.wgrad else (x,)))
        return fp8_products(cast.row, fp8_parts(fp8, weight, groups, transposed), groups, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, groups, fp8, kept = ctx.weight, ctx.groups, ctx.fp8, ctx.saved_tensors
        row, flip = fp8.cast(grad.contiguous(), "g", "both" if fp8.recipe.wgrad else "row")
        dx = fp8_products(row, fp8_parts(fp8, weight, groups, not ctx.transposed), groups, ctx.dtype)
        pair = (flip, Cast(*kept)) if fp8.recipe.wgrad else (grad.contiguous(), *kept)
        a, b = reversed(pair) if ctx.transposed else pair
        multiply = fp8_weight_grads if fp8.recipe.wgrad else weight_grads
        return dx, due(weight, partial(multiply, weight, a, b, groups), ctx.soon), *[None] * 5


def fp8_parts(fp8: Fp8Linear, weight: nn.Parameter, groups: Groups, transposed: bool) -> Cast:
    """The weight `[e * o, i]` as `fp8_products` takes it, or `transposed` of it: `[e, o, i]`, `[e, i, o]`."""
    (row, scales), (flip, shared) = fp8.weight(weight)
    if not transposed:
        return Cast(row.view(groups.experts, -1, row.shape[1]), scales.view(groups.experts, -1))
    parts = flip.view(len(flip), groups.experts, -1).transpose(0, 1)
    return Cast(parts, shared.view(1, -1).expand(groups.experts, -1))


def whole(groups: Groups, rows: int) -> Groups:
    """The last expert has all rows up to the end as well, so that no product of `rows` is left undefined."""
    offsets, ends = groups.offsets.clone(), groups.ends
    offsets[-1:].fill_(rows)
    return Groups(offsets, ends and [*ends[:-1], rows], groups.grouped)

"""The matmuls and biases of experts: rows in groups, each group with a matrix of its own.

    y  = x W^T      [rows, out]     rows in groups
    dx = dy W       [rows, in]      rows in groups
    dW = dy^T x     [out, in]       a sum over each group

torch multiplies all groups in one kernel, which on Hopper reads their offsets on the GPU. The alternative is
a loop over the groups, for which the host has to know the offsets. In bf16 the loop accumulates weight
gradients in fp32 inside the matmul; the grouped matmul returns them in bf16, to be added afterwards. On an
H200, torch 2.11:

    experts x rows x in x out        y: loop           grouped           dW: loop          grouped, added
    4 x 16384 x 4096 x 28672         4.83 ms (796)     4.91 ms (784)     5.19 ms (742)     6.84 ms (563)
    64 x 131072 x 2048 x 1536        1.29 ms (641)     1.12 ms (735)     1.58 ms (523)     1.85 ms (447)

(rows of all experts; TFLOP/s in brackets). With 64 experts the loop's dW is faster here, where the GPU never
waits for the host; in training, launching 64 matmuls takes longer than running them. Hence the loop if an
expert has LARGE multiplications or more on average and the host knows the offsets; else the grouped matmul,
so that the host need not wait. Types and sizes without a grouped matmul in torch always use the loop.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import torch

from nanomegatron.ops.kernels import usable
from nanomegatron.ops.merge import PartialRows, merge_rows

LARGE = 2**36  # multiplications


@dataclass
class Groups:
    """Which rows belong to which expert: expert i has rows offsets[i] ... offsets[i + 1]."""

    offsets: torch.Tensor  # int32 [e + 1]
    ends: list[int] | None = None  # the offsets on the host, if it knows them
    grouped: bool = True  # use the grouped matmul if it is the better one
    covers: "Groups | None" = None

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """(expert, begin, end) of each expert with rows; without `ends` the host waits for the offsets."""
        ends = self.offsets.tolist() if self.ends is None else self.ends
        return [(i, begin, end) for i, (begin, end) in enumerate(pairwise(ends)) if begin < end]

    @property
    def experts(self) -> int:
        return len(self.offsets) - 1

    def covering(self, rows: int) -> "Groups":
        """The same with the last expert extended to all `rows`, so that no product leaves one undefined."""
        if self.covers is None:
            offsets = self.offsets.clone()
            offsets[-1:].fill_(rows)
            ends = self.ends and [*self.ends[:-1], rows]
            self.covers = Groups(offsets, ends, self.grouped)
        return self.covers

    def one_kernel(self, rows: torch.Tensor, *features: int) -> bool:
        """Whether to use one grouped matmul for rows `[r, i]`; features: the sizes of an expert's matrix."""
        known = self.ends is not None
        large = known and self.ends[-1] * prod(features) >= LARGE * self.experts
        return self.grouped and not large and fits(rows, *features)


def fits(rows: torch.Tensor, *sizes: int) -> bool:
    """Whether `torch._grouped_mm` supports rows `[r, i]`, and features of these sizes."""
    return rows.dtype == torch.bfloat16 and len(rows) > 0 and all(size % 8 == 0 for size in sizes)


def grouped_mm(x: torch.Tensor, w: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Each expert's rows of x `[r, i]` times its w `[e, i, o]` -> `[r, o]`; undefined past the offsets."""
    if groups.one_kernel(x, *w.shape[1:]):
        return torch._grouped_mm(x, w, offs=groups.offsets[1:])
    y = x.new_empty(len(x), w.shape[2])
    for i, begin, end in groups.spans:
        torch.mm(x[begin:end], w[i], out=y[begin:end])
    return y


def grouped_outer(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """a^T b over each expert's rows in one kernel: a `[r, o]`, b `[r, i]` -> `[e, o, i]`"""
    return torch._grouped_mm(a.t(), b, offs=groups.offsets[1:])


def add_grouped_(total: torch.Tensor, part: torch.Tensor, beta: int = 1) -> None:
    """total `[e*o, i]` = beta * total + part `[e, o, i]`; by the kernel of merge.cu if 16 bits join fp32."""
    part = part.view_as(total)
    if beta == 0:
        total.copy_(part)
    elif total.dtype != torch.float32 or part.dtype == total.dtype or not usable(part, "add_grouped_"):
        total.add_(part)
    else:
        shape = -1, 1, 1, 8 if part.numel() % 8 == 0 else 1
        out = total.view(shape)
        merge_rows([PartialRows(out), PartialRows(part.view(shape))], out)


class AddBiasFunction(torch.autograd.Function):
    """Each expert's bias added to its rows: x `[r, o]`, bias `[e * o]`, offsets `[e + 1]` -> `[r, o]`."""

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

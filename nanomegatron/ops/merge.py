"""Merge parts of an attention or of a sum, row by row: the kernel of cuda/merge.cu, and its reference."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nanomegatron.ops.kernels import TYPES, launch_kernel, usable

MAX_PARTS = 4  # merged at a time
ALL = slice(None)


class PartialRows(NamedTuple):
    """A part of s rows: `count` of them `[count, b, n, d]`, and log-sum-exps of their scores `[b, n, count]`.

    at: which of the s rows: a slice, or int64 `[s]`, the index into `rows` of each, -1 where there is none.
    """

    rows: torch.Tensor
    at: slice | torch.Tensor = ALL
    lse: torch.Tensor | None = None


def merge_rows(parts: Sequence[PartialRows], out: torch.Tensor) -> torch.Tensor | None:
    """Merge one to four parts into out `[s, b, n, d]`. -> log-sum-exps `[b, n, s]`, None if parts have none

    With log-sum-exps rows are averaged, weighted by their exponentials; without, they are added. The first
    part and out are fp32 or of the others' type. out may be the first part's rows, if these are all s.
    """
    if not usable(parts[-1].rows, "merge_rows"):
        return merge_rows_ref(parts, out)
    parts = [
        PartialRows(p.rows.contiguous(), p.at, p.lse if p.lse is None else p.lse.contiguous()) for p in parts
    ]
    first, last, (s, b, n, d) = parts[0], parts[-1], out.shape
    lse = None if first.lse is None else first.lse.new_empty(b, n, s)
    table = torch.tensor([_entry(part) for part in parts])
    types = (TYPES[x.dtype] for x in (out, first.rows, last.rows))
    whole = out.contiguous()
    launch_kernel("merge_rows", whole, lse, table, len(parts), s, b * n, d, *types)
    if whole is not out:
        out.copy_(whole)
    return lse


def _entry(part: PartialRows) -> list[int]:
    """A part's entry in the kernel's table: addresses of rows, `at` and lse (0: none), begin, row count."""
    listed = not isinstance(part.at, slice)
    addresses = part.rows, part.at if listed else None, part.lse
    begin = 0 if listed else part.at.start or 0
    return [*(0 if x is None else x.data_ptr() for x in addresses), begin, len(part.rows)]


def sum_parts(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Write the sum of parts `[k, ...]` to out `[...]`, of their type: added in fp32, rounded once."""
    if len(parts) > MAX_PARTS or out.numel() % 8 or not usable(out, "sum_parts"):
        torch.sum(parts, 0, out=out)
        return
    rows = -1, 1, 1, 8
    merge_rows([PartialRows(part.view(rows)) for part in parts], out.view(rows))


def merge_rows_ref(parts: Sequence[PartialRows], out: torch.Tensor) -> torch.Tensor | None:
    """`merge_rows` in plain torch: specification and oracle. out `[s, b, n, d]` -> `[b, n, s]`"""
    wide = [_spread(part, len(out)) for part in parts]
    if parts[0].lse is None:
        out.copy_(sum(rows for rows, _ in wide))
        return None
    lses = torch.stack([lse for _, lse in wide])
    total = lses.logsumexp(0)
    weights = (lses - total).exp().nan_to_num(0).permute(0, 3, 1, 2)[..., None]
    out.copy_(sum(weight * rows for weight, (rows, _) in zip(weights, wide, strict=True)))
    return total


def _spread(part: PartialRows, s: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A part expanded to all s rows, in fp32: zeros, and log-sum-exps of -inf, where it has no row."""
    rows, at, lse = part
    if not isinstance(at, slice):
        places = (at >= 0).nonzero()[:, 0]
        at = places[at[places].argsort()]
    out = rows.new_zeros(s, *rows.shape[1:], dtype=torch.promote_types(rows.dtype, torch.float32))
    out[at] = rows.to(out.dtype)
    if lse is not None:
        whole = lse.new_full((*lse.shape[:2], s), -torch.inf)
        whole[..., at] = lse
        lse = whole
    return out, lse


class Reorder(torch.autograd.Function):
    """x[order] of x `[n, ...]`, order, inverse int64 `[n]` -> `[n, ...]`; the backward is grad[inverse]."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None

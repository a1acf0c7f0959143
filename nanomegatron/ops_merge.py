"""Rows added to rows, where attention or a sum comes in parts: cuda/merge.cu, and what it computes."""

import torch

from nanomegatron.ops_kernels import TYPES, launch, usable

Lse = tuple[torch.Tensor, torch.Tensor]


def merge_rows(
    first: torch.Tensor,
    part: torch.Tensor,
    at: slice | torch.Tensor,
    lse: Lse | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`first` `[s, b, n, d]`, fp32 or of part's type, joined at its rows `at` with what `part` has for them.

    lse: log-sum-exps of first's scores `[b, n, s]` and of part's: the rows are averages, weighted by their
    exponentials, and a new one comes back; None: the rows are added. at: a slice of the s, or for each of
    them the number of its row in `part`, -1 for none, int64 `[s]`. The result is in `dtype`; if both this and
    `first` are fp32 it is `first`, overwritten.
    """
    part = part.contiguous()
    if not usable(part, "merge_rows"):
        return merge_rows_ref(first, part, at, lse, dtype)
    in_place, rows = first.dtype == dtype == torch.float32, first.contiguous()
    out = rows if in_place else torch.empty_like(rows, dtype=dtype)
    numbers, begin = (None, at.start or 0) if isinstance(at, slice) else (at, 0)
    lses = (None, None) if lse is None else [x.contiguous() for x in lse]
    total = None if lse is None else torch.empty_like(lses[0])
    (s, b, n, d), count = rows.shape, part.shape[0]
    types = (TYPES[x.dtype] for x in (out, rows, part))
    launch("merge_rows", out, rows, part, numbers, *lses, total, s, b * n, d, begin, count, *types)
    if in_place and rows is not first:
        return first.copy_(out), total
    return out, total


def add_(total: torch.Tensor, part: torch.Tensor) -> None:
    """total += part, of the same shape; the kernel where the total is fp32 and the part is of 16 bits."""
    if total.dtype == part.dtype or total.dtype != torch.float32 or not usable(part, "add_"):
        total.add_(part)
        return
    rows = -1, 1, 1, 8 if part.numel() % 8 == 0 else 1
    merge_rows(total.view(rows), part.view(rows), slice(0, None), None, torch.float32)


def merge_rows_ref(
    first: torch.Tensor, part: torch.Tensor, at: slice | torch.Tensor, lse: Lse | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`merge_rows` in plain torch: specification and oracle."""
    if not isinstance(at, slice):
        rows = (at >= 0).nonzero()[:, 0]
        at = rows[at[rows].argsort()]
    out = first.float()
    if lse is None:
        out[at] += part.float()
        return out.to(dtype), None
    before, more = lse[0][..., at], lse[1]
    total = torch.logaddexp(before, more)
    old, new = ((x - total).exp().nan_to_num(0).permute(2, 0, 1)[..., None] for x in (before, more))
    out[at] = old * out[at] + new * part.float()
    whole = lse[0].clone()
    whole[..., at] = total
    return out.to(dtype), whole

"""Permute tokens to the order of experts and back: the kernels of cuda/permute.cu, and their references.

    route       ids [t, k] -> position [t, k], source [rows], offsets [experts + 1], counts [experts], int32
    permute     x [t, h] -> out [rows, h]:  out[position[t, j]] = x[t] * probs[t, j], rows of padding 0
    unpermute   z [rows, h] -> y [t, h]:    y[t] = sum over j of z[position[t, j]] * probs[t, j]

The copy of token t for its expert j of k has the number t * k + j. The copies of expert e are contiguous, in
this order, in the rows offsets[e] ... offsets[e + 1]: counts[e] of them, then padding to a multiple. Position
-1 means a dropped copy, source -1 a row of padding. Each op is the other's backward, with the same probs. The
number of rows is that of the worst case, so that the host need not wait for the GPU. `permute_block` and
`unpermute_block` do the same for a block of tokens, with the tables of `Routing.block`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from nanomegatron.config.model import MAX_EXPERTS
from nanomegatron.ops.kernels import FLOATS, TYPES, check_fits, launch_kernel, once, usable

BLOCK_COPIES = 1024  # copies per thread block: COPIES in permute.cu


@dataclass(frozen=True)
class Routing:
    """The tables of where each copy goes; all int32."""

    position: torch.Tensor
    """`[t, k]`: the row of a copy, -1 where it is dropped."""
    source: torch.Tensor
    """`[rows]`: the copy of a row, -1 in padding."""
    offsets: torch.Tensor
    """`[experts + 1]`: first row of each expert, and the end of the last."""
    counts: torch.Tensor
    """`[experts]`: number of copies, without padding."""

    def block(self, tokens: slice) -> "Routing":
        """The tables for a block of tokens, without the rows of padding."""
        return replace(self, position=self.position[tokens], source=self.source[:0])

    def cut_to_size(self) -> tuple["Routing", list[int]]:
        """The tables without the rows past the last expert's, and the offsets; the host waits for the GPU."""
        ends = self.offsets.tolist()
        return replace(self, source=self.source[: ends[-1]]), ends


def route(ids: torch.Tensor, experts: int, multiple: int = 1, capacity: int | None = None) -> Routing:
    """The tables for expert ids int32 `[t, k]`, each expert's rows padded to a multiple.

    Ids outside 0 ... experts - 1 are dropped. With a multiple above 1 an expert without copies has rows of
    padding: FP8 matmuls cannot contract over zero rows. Number of rows: t * k, or
    (t * k // multiple + experts) * multiple. capacity: every expert gets this many rows, rounded up to the
    multiple, and further copies for it are dropped. Raises ValueError for invalid arguments.
    """
    if capacity is not None:
        return _route_to_capacity(ids, experts, -(-max(capacity, multiple > 1) // multiple) * multiple)
    if ids.dtype != torch.int32 or ids.dim() != 2 or not 0 < experts <= MAX_EXPERTS or multiple < 1:
        raise ValueError(
            f"route: int32 [t, k], 1 to {MAX_EXPERTS} experts, not {ids.dtype} {ids.shape}, {experts}"
        )
    copies = ids.numel()
    rows = copies if multiple == 1 else (copies // multiple + experts) * multiple
    if rows >= 2**31:
        raise ValueError(f"route: {rows} rows do not fit int32")
    if not usable(ids, "route", (torch.int32,)):
        return route_ref(ids, experts, multiple, rows)
    ids = ids.contiguous()
    position, source, work = (
        ids.new_empty(s) for s in (ids.shape, rows, -(-copies // BLOCK_COPIES) * experts)
    )
    routing = Routing(position, source, ids.new_empty(experts + 1), ids.new_empty(experts))
    tables = (position, source, routing.offsets, routing.counts, work)
    launch_kernel("moe_route", ids, *tables, copies, experts, multiple, rows)
    return routing


def _route_to_capacity(ids: torch.Tensor, experts: int, capacity: int) -> Routing:
    packed, rows = route(ids, experts), experts * capacity
    expert = ids.clamp(0, experts - 1).long()
    place = packed.position - packed.offsets[expert]
    kept = (packed.position >= 0) & (place < capacity)
    position = (place + expert * capacity).where(kept, rows)  # an extra last row is for dropped copies
    source = ids.new_full((rows + 1,), -1)
    source[position.flatten()] = torch.arange(ids.numel(), dtype=ids.dtype, device=ids.device)
    offsets = torch.arange(experts + 1, dtype=ids.dtype, device=ids.device) * capacity
    return Routing(position.where(kept, -1).int(), source[:rows], offsets, packed.counts.clamp(max=capacity))


def padded(counts: torch.Tensor, multiple: int) -> torch.Tensor:
    """Rows of experts with these numbers of copies: counts `[..., experts]` -> `[..., experts]`"""
    return (counts.clamp(min=multiple > 1) + multiple - 1) // multiple * multiple


def route_ref(ids: torch.Tensor, experts: int, multiple: int, rows: int) -> Routing:
    """`route` in plain torch: a stable sort. ids: `[t, k]`"""
    flat = ids.flatten().long().where((ids.flatten() >= 0) & (ids.flatten() < experts), experts)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    ends = padded(counts, multiple).cumsum(0)
    offsets = torch.cat((ends.new_zeros(1), ends))
    order = flat.argsort(stable=True)[: int(counts.sum())]
    expert = flat[order]
    place = (
        torch.arange(len(order), device=ids.device) - (counts.cumsum(0) - counts)[expert] + offsets[expert]
    )
    position, source = torch.full_like(flat, -1), torch.full((rows,), -1, device=ids.device)
    position[order] = place
    source[place] = order
    return Routing(*(x.int() for x in (position.view(ids.shape), source, offsets, counts)))


def permute(
    x: torch.Tensor, routing: Routing, probs: torch.Tensor | None = None, fused: bool = True
) -> torch.Tensor:
    """Permute x `[t, h]` -> `[rows, h]`, each copy times probs fp32 `[t, k]`, if any. Raises ValueError.

    fused: by the kernel, where it can.
    """
    _check(x, routing, probs, routing.position.shape[0])
    if not (fused and usable(x, "permute")):
        return permute_ref(x, routing, probs)
    return ReorderFunction.apply(x, routing, probs, _permute, _unpermute)


def permute_ref(x: torch.Tensor, routing: Routing, probs: torch.Tensor | None = None) -> torch.Tensor:
    """`permute` in plain torch: copies times probs, padding 0. x `[t, h]`, probs `[t, k]` -> `[rows, h]`"""
    source, k = routing.source.long(), routing.position.shape[1]
    x = x if len(x) else F.pad(x, (0, 0, 0, 1))  # all rows are padding
    rows = x.float()[source.clamp(min=0) // max(k, 1)]  # whose gradients are added in fp32
    if probs is not None:
        rows = rows * probs.flatten()[source.clamp(min=0)][:, None]
    return rows.where((source >= 0)[:, None], 0.0).to(x.dtype)


def unpermute(
    z: torch.Tensor, routing: Routing, probs: torch.Tensor | None = None, fused: bool = True
) -> torch.Tensor:
    """Sum each token's copies, times their probs fp32 `[t, k]`, if any: z `[rows, h]` -> `[t, h]`

    Sums in fp32, in the order of the copies. fused: by the kernel, where it can. Raises ValueError if shapes,
    types or devices do not fit.
    """
    _check(z, routing, probs, routing.source.shape[0])
    if not (fused and usable(z, "unpermute")):
        return unpermute_ref(z, routing, probs)
    return ReorderFunction.apply(z, routing, probs, _unpermute, _permute)


def unpermute_ref(z: torch.Tensor, routing: Routing, probs: torch.Tensor | None = None) -> torch.Tensor:
    """`unpermute` in plain torch: sums of copies times probs. z `[rows, h]`, probs `[t, k]` -> `[t, h]`"""
    position = routing.position.long()
    z = z if len(z) else F.pad(z, (0, 0, 0, 1))  # all are dropped
    kept = position >= 0
    copies = z[position.clamp(min=0)].float().where(kept[:, :, None], 0.0)
    if probs is not None:
        copies = copies * probs.where(kept, 0.0)[:, :, None]
    return copies.sum(dim=1).to(z.dtype)


def permute_block(out, x, routing, probs=None, z=None, fused: bool = True) -> torch.Tensor | None:
    """Write to out `[rows, h]` the copies of a block of tokens x `[n, h]` times probs `[n, k]`; zero padding.

    With z `[rows, h]` -> dots <x[t], z[position[t, j]]> `[n, k]`. Not for autograd. Raises ValueError.
    """
    _check(x, routing, probs, len(routing.position))
    if fused and usable(x, "permute"):
        return _permute(x, routing, probs, z, out)[1]
    kept, at = routing.position >= 0, routing.position.long()
    rows = x.float()[:, None].expand(*at.shape, -1)
    out[: len(routing.source)].masked_fill_((routing.source < 0)[:, None], 0.0)
    out[at[kept]] = (rows if probs is None else rows * probs[:, :, None])[kept].to(x.dtype)
    return None if z is None else (rows * F.pad(z.float(), (0, 0, 0, 1))[at]).sum(2)  # the last: dropped


def unpermute_block(out, z, routing, probs=None, fused: bool = True) -> None:
    """`unpermute` of z `[rows, h]` to out `[n, h]`, a block of tokens. No autograd. Raises ValueError."""
    _check(out, routing, probs, len(routing.position))
    if fused and usable(z, "unpermute"):
        _unpermute(z, routing, probs, out=out)
    else:
        out.copy_(unpermute_ref(z, routing, probs))


def _permute(x, routing, probs, z=None, out=None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the kernel; with z `[rows, h]` also returns <x[t], z[position[t, j]]> `[t, k]`."""
    position, source = routing.position, routing.source
    out = x.new_empty(len(source), x.shape[1]) if out is None else out
    dots = None if z is None else x.new_empty(position.shape, dtype=torch.float32)
    sizes = (*position.shape, len(source), x.shape[1])
    launch_kernel("moe_permute", x, out, probs, position, source, z, dots, *sizes, TYPES[x.dtype])
    return out, dots


def _unpermute(z, routing, probs, x=None, out=None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the kernel; with x `[t, h]` also returns <x[t], z[position[t, j]]> `[t, k]`."""
    position = routing.position
    y = z.new_empty(len(position), z.shape[1]) if out is None else out
    dots = None if x is None else z.new_empty(position.shape, dtype=torch.float32)
    launch_kernel(
        "moe_unpermute", z, y, probs, position, x, dots, *position.shape, z.shape[1], TYPES[z.dtype]
    )
    return y, dots


class ReorderFunction(torch.autograd.Function):
    """`permute` or `unpermute` by `launch`, that op's kernel; `launch_back`, the other's, is the backward.

    x `[t, h]` or `[rows, h]`, probs `[t, k]` -> `[rows, h]` or `[t, h]`
    """

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        routing: Routing,
        probs: torch.Tensor | None,
        launch: Callable,
        launch_back: Callable,
    ) -> torch.Tensor:
        x, probs = x.contiguous(), None if probs is None else probs.contiguous()
        ctx.routing = routing
        ctx.launch_back = launch_back
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, probs)
        return launch(x, routing, probs)[0]

    @staticmethod
    @once
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, probs = ctx.saved_tensors
        dx, dprobs = ctx.launch_back(grad.contiguous(), ctx.routing, probs, x)
        return dx, None, dprobs, None, None


def _check(x: torch.Tensor, routing: Routing, probs: torch.Tensor | None, rows: int) -> None:
    """Raise ValueError for tables or tensors that the kernels do not take."""
    for table in (routing.position, routing.source):
        if table.dtype != torch.int32 or not table.is_contiguous() or table.device != x.device:
            raise ValueError(
                f"a table {table.dtype} on {table.device}: must be int32, contiguous, on {x.device}"
            )
    if x.dtype not in FLOATS or x.dim() != 2 or len(x) != rows:
        raise ValueError(f"a matrix of {rows} rows is permuted, not {x.dtype} {list(x.shape)}")
    check_fits("probs", probs, routing.position.shape, torch.float32, x.device)

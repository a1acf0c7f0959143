"""Context parallelism: attention over rows whose tokens are sharded over the ranks of an axis.

Tests: tests/test_cp.py. Page: docs/context.md.

All layers but attention work on each token separately. A causal query attends to earlier tokens, so equal
slices of a row would be unequal work. A row is cut into 2 * cp chunks, and rank r has chunks r and 2cp-1-r:

    cp 4     chunk   0  1  2  3 | 4  5  6  7           zigzag: queries see equally many keys on every rank
             rank    0  1  2  3 | 3  2  1  0           a rank's tokens are in the order of the row

A rank has n query heads and g key/value heads (its share over tp), in tensors `[s/cp, b, heads, d]`.

                what happens                                          each rank sends, in heads x s/cp tokens
    p2p         a ring: attention to one rank's keys while            forward 2g, cp - 1 times; backward the
                those of the next are received                        same, and 2g in fp32, cp times
    allgather   all-gather keys and values, then attention            the same; 2g in fp32, cp - 1 times
    a2a         all-to-all: s tokens of n/cp heads for s/cp           forward n + 2g and n; backward the same
                tokens of n heads, and back

`RingFunction` below is the plain ring; on GPUs `fast/ring.py` takes its place.

    the ring, cp 4, rank 1    compute    q1 k1 | q1 k0 | q1 k3 | q1 k2 |        k of every rank is passed
                              send       k1    | k0    | k3    |       |        on to the next rank
                              receive    k0    | k3    | k2    |       |
    backward: the same, and   add to     dk1   | dk0   | dk3   | dk2   |        the sums of gradients follow
                              send             | dk1   | dk0   | dk3   | dk2    k one step behind, and reach
                              receive          | dk0   | dk3   | dk2   | dk1    their own rank at the end

Attention to a part of the keys gives o_i, and l_i, the log-sum-exp of its scores. Parts are merged in fp32 to
l = log sum exp(l_i) and o = sum exp(l_i - l) o_i. The backward of a part needs o and l of all keys, nothing
else of other parts: so each part calls the attention kernel's forward and backward directly.

Weight gradients are of s/cp tokens; `dp.py` sums them over dp x cp. Documents inside a row, windows and two
levels of ranks are `variants/cp_documents.py`, `cp_windows.py` and `cp_hierarchy.py`; tests/test_cp.py and
tests/test_cp_shard.py hold all of them to attention over the whole row, docs/context.md has more.
(Ring: arXiv 2310.01889; zigzag: Megatron-LM; all-to-all: DeepSpeed-Ulysses, 2309.14509; all-gather: Llama 3,
2407.21783)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from nanomegatron.batch import Batch
from nanomegatron.comm import Pending, all_to_all, start_all_gather, start_reduce_scatter, start_ring_exchange
from nanomegatron.mesh import Axis
from nanomegatron.ops.attention import Block, Grads, Mask, attend, attend_backward, core_attention, to_device
from nanomegatron.ops.merge import PartialRows, Reorder, merge_rows

Rows = slice | torch.Tensor  # of dim 0: a slice, or indices


@dataclass(frozen=True)
class AttentionBlock:
    """Attention of some of a rank's queries to some of the keys at hand."""

    queries: Rows
    keys: Rows
    kind: Block

    def forward(
        self, q: torch.Tensor, kv: Sequence[torch.Tensor], backend: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from q `[s/cp, b, n, d]` to kv `[2, t, b, g, d]` -> `[rows, b, n, d]`, lse `[b, n, rows]`"""
        return attend(q[self.queries], kv[0][self.keys], kv[1][self.keys], self.kind, backend)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        kv: Sequence[torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        backend: str,
    ) -> Grads:
        """Compute gradients of these queries `[rows, b, n, d]`, keys and values `[rows, b, g, d]`.

        q `[s/cp, b, n, d]`, kv `[2, t, b, g, d]`: as in the forward. dout, out `[s/cp, b, n, d]`, lse
        `[b, n, s/cp]`: of attention to all keys.
        """
        return attend_backward(
            dout[self.queries],
            q[self.queries],
            kv[0][self.keys],
            kv[1][self.keys],
            out[self.queries],
            lse[..., self.queries],
            self.kind,
            backend,
        )

    def add_to(self, dkv: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add gradients dk, dv `[rows, b, g, d]` of these keys and values to dkv, fp32 `[2, t, b, g, d]`."""
        for total, grad in zip(dkv, (dk, dv), strict=True):
            if isinstance(self.keys, slice):
                total[self.keys] += grad
            else:  # a key may be there twice, seen by both chunks of a document
                total.index_add_(0, self.keys, grad.float())


class TokenOrder(NamedTuple):
    """Two permutations of n tokens that are here rank after rank: int64 `[n]`, `[n]`."""

    to_row: torch.Tensor  # x[to_row] is in the order of the row
    to_ranks: torch.Tensor  # its inverse


@dataclass(eq=False)
class SequenceShard:
    """This rank's tokens of one microbatch, whose rows are sharded over an axis; its `Batch.shard`.

    bounds: int64 `[2 * size + 1]`, of the row's chunks; types: how each layer communicates ("p2p", ...);
    device: of the model, for tensors. Raises ValueError if 2 * size does not divide the row.

    The first layer computes what is cached here, and the others share it. The next microbatch has its own.
    """

    axis: Axis
    bounds: np.ndarray
    types: Sequence[str]
    device: torch.device
    positions: np.ndarray = field(init=False)  # int64 [s/size], the tokens' positions in the row, ascending
    plans: dict[tuple, Any] = field(init=False, default_factory=dict, repr=False)  # of `cached`

    def __post_init__(self) -> None:
        if self.bounds.max() % (2 * self.axis.size):
            raise ValueError(
                f"{self.bounds.max()} tokens do not divide into 2 x {self.axis.size} context-parallel chunks"
            )
        self.positions = self.token_indices(self.axis.rank)

    @staticmethod
    def of_row(axis: Axis, s: int, types: Sequence[str], device: torch.device) -> "SequenceShard":
        """Cut a row of s tokens into chunks of equal length."""
        return SequenceShard(axis, np.arange(2 * axis.size + 1) * s // (2 * axis.size), types, device)

    def chunks(self, rank: int) -> list[tuple[int, int]]:
        """Return (begin, end) in the row of a rank's two chunks."""
        return [(int(self.bounds[i]), int(self.bounds[i + 1])) for i in (rank, 2 * self.axis.size - 1 - rank)]

    def token_indices(self, rank: int) -> np.ndarray:
        """Return the positions of a rank's tokens in the row, ascending."""
        return np.concatenate([np.arange(begin, end) for begin, end in self.chunks(rank)])

    def query_key_rows(self, own: int, other: int) -> tuple[slice | np.ndarray, slice | np.ndarray]:
        """Return which queries of rank `own` see keys of rank `other`, and which keys they see.
            other = own    all queries, all keys                          causal, as if in one sequence
            other < own    all queries, the first half of the keys        (the second chunk comes later)
            other > own    the second half of the queries, all keys       (the first chunk comes before)

        Both are among the tokens of their rank. So no chunk of scores is computed that is masked.
        """
        tokens = len(self.positions)
        first_query = tokens // 2 if other > own else 0
        end_of_keys = tokens // 2 if other < own else tokens
        return slice(first_query, tokens), slice(0, end_of_keys)

    def block(self, other: int) -> AttentionBlock:
        """Return attention to the keys of rank `other`."""
        queries, keys = self.query_key_rows(self.axis.rank, other)
        return AttentionBlock(queries, keys, Block(self.axis.rank == other))

    @cached_property
    def ring_blocks(self) -> list[AttentionBlock]:
        """The blocks for the keys of this rank, of the one before it, ..."""
        return [self.block((self.axis.rank - i) % self.axis.size) for i in range(self.axis.size)]

    @cached_property
    def gathered_blocks(self) -> list[AttentionBlock]:
        """The blocks, four at most, for all keys in the order of the row."""
        half = len(self.positions) // 2
        blocks = []
        for i, (begin, end) in enumerate(self.chunks(self.axis.rank)):
            queries = slice(i * half, (i + 1) * half)
            blocks.append(AttentionBlock(queries, slice(begin, end), Block(True)))
            if begin:
                blocks.append(AttentionBlock(queries, slice(0, begin), Block()))
        return blocks

    @cached_property
    def row_order(self) -> TokenOrder:
        """The order of the whole row."""
        return self.order_of(range(self.axis.size))

    def order_of(self, ranks: range) -> TokenOrder:
        """Return the order of the tokens of `ranks`."""
        to_row = np.argsort(np.concatenate([self.token_indices(rank) for rank in ranks]))
        return TokenOrder(to_device(to_row, self.device), to_device(np.argsort(to_row), self.device))

    def cached(self, plan: Callable, *args: Any) -> Any:
        """Return plan(self, *args), computed for the first layer that asks: what `variants/` cache here."""
        if (plan, args) not in self.plans:
            self.plans[plan, args] = plan(self, *args)
        return self.plans[plan, args]


def shard_batch(batch: Batch, axis: Axis, types: Sequence[str], device: torch.device) -> Batch:
    """Return this rank's tokens `[b, s/cp]` of a batch, with `shard` set; types, device: of `SequenceShard`.

    Raises ValueError if attention stays inside documents and `axis` has several ranks.
    """
    if axis.size == 1:
        return batch
    if batch.cu_seqlens is not None:
        raise ValueError("documents over several ranks are cut by variants/cp_documents.py")
    return batch.part(SequenceShard.of_row(axis, len(batch.positions), types, device))


def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shard: SequenceShard,
    layer: int,
    mask: Mask,
    backend: str,
    fused_softmax: bool = True,
) -> torch.Tensor:
    """Compute causal attention of this rank's queries to the keys of all ranks.

    q `[s/cp, b, n, d]`, k, v `[s/cp, b, g, d]` -> `[s/cp, b, n*d]`
    mask: of the whole row; fused_softmax: as for `core_attention`, which a2a calls. Communicates over
    shard.axis as shard.types[layer] says. Raises ValueError if a2a cannot divide the heads over the ranks, or
    for what `variants/` computes.
    """
    kind = shard.types[layer]
    if kind == "a2a":

        def whole_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
            return core_attention(q, k, v, backend, mask, fused_softmax=fused_softmax)[0]

        return ulysses_attention(q, k, v, shard.axis, shard.row_order, whole_rows)
    if kind not in ("p2p", "allgather") or mask.window is not None or mask.cap is not None:
        raise ValueError(f"{kind} with {mask} is a variant, which pick_variants.py picks")
    if kind == "allgather":
        return GatherFunction.apply(
            q, k, v, shard.axis, shard.gathered_blocks, shard.row_order, backend
        ).flatten(2)
    return RingFunction.apply(q, k, v, shard.axis, shard.ring_blocks, backend).flatten(2)


class RingFunction(torch.autograd.Function):
    """p2p, as drawn above. q `[s/cp, b, n, d]`, k, v `[s/cp, b, g, d]` -> `[s/cp, b, n, d]`

    blocks: `SequenceShard.ring_blocks`.
    """

    @staticmethod
    def forward(ctx, q, k, v, axis: Axis, blocks: list[AttentionBlock], backend: str) -> torch.Tensor:
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = out.new_full((*q.shape[1:3], len(q)), -torch.inf)  # [b, n, s/cp]
        for block, kv in zip(blocks, ring_kv(k, v, axis), strict=True):
            part, part_lse = block.forward(q, kv, backend)
            merge_(out, lse, block.queries, part, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.args = axis, blocks, backend
        return out

    @staticmethod
    def backward(ctx, dout: torch.Tensor) -> tuple:
        q, k, v, out, lse = ctx.saved_tensors
        axis, blocks, backend = ctx.args
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dkv = torch.zeros((2, *k.shape), dtype=torch.float32, device=k.device)
        arriving = Pending(dkv)
        for block, kv in zip(blocks, ring_kv(k, v, axis), strict=True):
            dq_part, dk_part, dv_part = block.backward(dout, q, kv, out, lse, backend)
            dq[block.queries] += dq_part
            dkv = arriving.wait()  # the sums for these keys, from the rank before
            block.add_to(dkv, dk_part, dv_part)
            arriving = start_ring_exchange(dkv, axis)  # they follow the keys to the next rank
        dk, dv = arriving.wait().to(k.dtype)  # those for this rank's own keys
        return dq.to(q.dtype), dk, dv, None, None, None


def ring_kv(k: torch.Tensor, v: torch.Tensor, axis: Axis) -> Iterator[torch.Tensor]:
    """Yield keys and values of this rank, of the rank before it, and so on.

    k, v `[s/cp, b, g, d]` -> kv `[2, s/cp, b, g, d]`, cp times. Those of the next step are in flight while
    the caller computes with the current ones.
    """
    kv = torch.stack((k, v))
    for _ in range(axis.size - 1):
        arriving = start_ring_exchange(kv, axis)
        yield kv
        kv = arriving.wait()
    yield kv


def merge_(
    out: torch.Tensor, lse: torch.Tensor, rows: Rows, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merge the attention of `rows` to further keys into out `[s, b, n, d]` and lse `[b, n, s]`, both fp32.

    part `[rows, b, n, d]` and part_lse `[b, n, rows]`: output and log-sum-exp for the further keys.
    """
    total = torch.logaddexp(lse[..., rows], part_lse)
    kept = (lse[..., rows] - total).exp().permute(2, 0, 1)[..., None]
    added = (part_lse - total).exp().permute(2, 0, 1)[..., None]
    out[rows] = kept * out[rows] + added * part
    lse[..., rows] = total


class GatherFunction(torch.autograd.Function):
    """allgather: q `[s/cp, b, n, d]`, k, v `[s/cp, b, g, d]` -> `[s/cp, b, n, d]`

    Keys and values are gathered again in the backward. blocks, order: `SequenceShard.gathered_blocks`,
    `.row_order`. `merge_rows` does at once for up to four parts what `merge_` does for one.
    """

    @staticmethod
    def forward(
        ctx, q, k, v, axis: Axis, blocks: list[AttentionBlock], order: TokenOrder, backend: str
    ) -> torch.Tensor:
        kv = gather_kv(k, v, axis, order)
        parts = []
        out = q.new_empty(q.shape)
        for block in blocks:
            part, part_lse = block.forward(q, kv, backend)
            parts.append(PartialRows(part, block.queries, part_lse))
        lse = merge_rows(parts, out)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.args = axis, blocks, order, backend
        return out

    @staticmethod
    def backward(ctx, dout: torch.Tensor) -> tuple:
        q, k, v, out, lse = ctx.saved_tensors
        axis, blocks, order, backend = ctx.args
        kv = gather_kv(k, v, axis, order)
        parts = []
        dq = q.new_empty(q.shape)
        dkv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        for block in blocks:
            dq_part, dk_part, dv_part = block.backward(dout, q, kv, out, lse, backend)
            parts.append(PartialRows(dq_part, block.queries))
            block.add_to(dkv, dk_part, dv_part)
        arriving = start_reduce_scatter(dkv.transpose(0, 1).index_select(0, order.to_ranks), axis)
        merge_rows(parts, dq)
        dk, dv = arriving.wait().to(k.dtype).unbind(1)
        return dq, dk, dv, None, None, None, None


def gather_kv(k: torch.Tensor, v: torch.Tensor, axis: Axis, order: TokenOrder) -> torch.Tensor:
    """Gather k, v `[s/cp, b, g, d]` of all ranks, in the order of the row -> `[2, s, b, g, d]`"""
    return start_all_gather(torch.stack((k, v), 1), axis).wait()[order.to_row].transpose(0, 1)


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axis: Axis,
    order: TokenOrder,
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """a2a: call attend(q, k, v) on all tokens of the axis, in the row's order, for this rank's heads.

    q `[s, b, n, d]`, k, v `[s, b, g, d]` -> `[s, b, n*d]`; attend: of `[s*cp, b, n/cp, d]`; order: of the
    tokens of its ranks. With fewer key/value heads than ranks, those that share one get copies.
    """
    s, b, n, d = q.shape
    g = k.shape[2]
    if n % axis.size or (g % axis.size and axis.size % g):
        raise ValueError(f"{n} query, {g} key/value heads cannot be divided over {axis.size} ranks (a2a)")
    k, v = (x.repeat_interleave(max(axis.size // g, 1), dim=2) for x in (k, v))
    blocks = torch.cat([x.unflatten(2, (axis.size, -1)) for x in (q, k, v)], dim=3)  # [s, b, ranks, heads, d]
    mine = all_to_all(blocks.permute(2, 0, 1, 3, 4).flatten(0, 1), axis)
    mine = Reorder.apply(mine, order.to_row, order.to_ranks)
    q, k, v = mine.split([x.shape[2] // axis.size for x in (q, k, v)], dim=2)
    context = Reorder.apply(attend(q, k, v), order.to_ranks, order.to_row)  # [ranks * s, b, n/ranks * d]
    return all_to_all(context, axis).unflatten(0, (axis.size, s)).permute(1, 2, 0, 3).reshape(s, b, n * d)

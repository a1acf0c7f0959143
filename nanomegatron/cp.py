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
from typing import Any, NamedTuple

import numpy as np
import torch

from nanomegatron.batch import Batch
from nanomegatron.comm import Pending, all_to_all, start_all_gather, start_reduce_scatter, start_ring_exchange
from nanomegatron.mesh import Axis
from nanomegatron.ops.attention import Block, Mask, attend, attend_backward, core_attention, to_device
from nanomegatron.ops.merge import PartialRows, Reorder, merge_rows

Rows = slice | torch.Tensor  # of dim 0: a slice, or indices


class AttentionBlock(NamedTuple):
    """Attention of some of a rank's queries to some of the keys at hand."""

    queries: Rows
    keys: Rows
    kind: Block


def memoized(plan: Callable) -> Callable:
    """Decorate a function of a SequenceShard, which keeps its result for each tuple of further arguments.

    There is a shard for each microbatch: its layers share the results.
    """

    def planned(shard: "SequenceShard", *args: Any) -> Any:
        if (plan, args) not in shard.plans:
            shard.plans[plan, args] = plan(shard, *args)
        return shard.plans[plan, args]

    return planned


@dataclass(eq=False)
class SequenceShard:
    """This rank's tokens of a row sharded over an axis. Raises ValueError if 2 * size does not divide it.

    bounds: int64 `[2 * size + 1]`, of the row's chunks; types: how each layer communicates ("p2p", ...).
    """

    axis: Axis
    bounds: np.ndarray
    types: Sequence[str]
    positions: np.ndarray = field(init=False)  # int64 [s/size], the tokens' positions in the row, ascending
    plans: dict[tuple, Any] = field(init=False, default_factory=dict, repr=False)  # see `memoized`

    def __post_init__(self) -> None:
        if self.bounds.max() % (2 * self.axis.size):
            raise ValueError(
                f"{self.bounds.max()} tokens do not divide into 2 x {self.axis.size} context-parallel chunks"
            )
        self.positions = self.token_indices(self.axis.rank)

    @staticmethod
    def of_row(axis: Axis, s: int, types: Sequence[str]) -> "SequenceShard":
        """Cut a row of s tokens into chunks of equal length."""
        return SequenceShard(axis, np.arange(2 * axis.size + 1) * s // (2 * axis.size), types)

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

    def block(self, other: int, device: torch.device) -> AttentionBlock | None:
        """Return attention to the keys of rank `other`, tensors on the device.

        None: no query sees one, as with documents (`variants/cp_documents.py`).
        """
        queries, keys = self.query_key_rows(self.axis.rank, other)
        return AttentionBlock(queries, keys, Block(self.axis.rank == other))

    @memoized
    def ring(self, device: torch.device) -> list[AttentionBlock | None]:
        """Return the blocks for the keys of this rank, of the one before it, ..."""
        ranks = [(self.axis.rank - i) % self.axis.size for i in range(self.axis.size)]
        return [self.block(other, device) for other in ranks]

    def gathered(self, device: torch.device) -> list[AttentionBlock]:
        """Return the blocks, four at most, for all keys in the order of the row; tensors on the device."""
        half = len(self.positions) // 2
        blocks = []
        for i, (begin, end) in enumerate(self.chunks(self.axis.rank)):
            queries = slice(i * half, (i + 1) * half)
            blocks.append(AttentionBlock(queries, slice(begin, end), Block(True)))
            if begin:
                blocks.append(AttentionBlock(queries, slice(0, begin), Block()))
        return blocks

    @memoized
    def order(self, ranks: range, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the permutation of the tokens of `ranks` from rank after rank to the order of the row.

        -> permutation `[n]`, its inverse `[n]`, n tokens of these ranks.
        """
        order = np.argsort(np.concatenate([self.token_indices(rank) for rank in ranks]))
        return to_device(order, device), to_device(np.argsort(order), device)


def shard_batch(batch: Batch, axis: Axis, types: Sequence[str]) -> Batch:
    """Return this rank's tokens `[b, s/cp]` of a batch, with `shard` set; types: as for `SequenceShard`.

    Raises ValueError if attention stays inside documents and `axis` has several ranks.
    """
    if axis.size == 1:
        return batch
    if batch.cu_seqlens is not None:
        raise ValueError("documents over several ranks are cut by variants/cp_documents.py")
    return batch.part(SequenceShard.of_row(axis, len(batch.positions), types))


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

        return ulysses_attention(
            q, k, v, shard.axis, order=shard.order(range(shard.axis.size), q.device), attend=whole_rows
        )
    if kind not in ("p2p", "allgather") or mask.window is not None:
        raise ValueError(f"{kind} with window {mask.window} is a variant, which pick_variants.py picks")
    if kind == "allgather":
        blocks = shard.gathered(q.device)
        order = shard.order(range(shard.axis.size), q.device)
        return GatherFunction.apply(q, k, v, shard.axis, blocks, order, backend).flatten(2)
    return RingFunction.apply(q, k, v, shard.axis, shard.ring(q.device), backend).flatten(2)


class RingFunction(torch.autograd.Function):
    """p2p, as drawn above. q `[s/cp, b, n, d]`, k, v `[s/cp, b, g, d]` -> `[s/cp, b, n, d]`

    blocks: those of `SequenceShard.ring`.
    """

    @staticmethod
    def forward(ctx, q, k, v, axis: Axis, blocks: list[AttentionBlock | None], backend: str) -> torch.Tensor:
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = out.new_full((*q.shape[1:3], len(q)), -torch.inf)  # [b, n, s/cp]
        for block, kv in zip(blocks, ring_kv(k, v, axis), strict=True):
            if block is not None:
                k_seen, v_seen = kv[:, block.keys]
                part, part_lse = attend(q[block.queries], k_seen, v_seen, block.kind, backend)
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
            if block is not None:
                dq_part, dk_part, dv_part = block_gradients(block, kv, dout, q, out, lse, backend)
            dkv = arriving.wait()  # the sums for these keys, from the rank before
            if block is not None:
                dq[block.queries] += dq_part
                dkv[0, block.keys] += dk_part
                dkv[1, block.keys] += dv_part
            arriving = start_ring_exchange(dkv, axis)
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


def block_gradients(
    block: AttentionBlock,
    kv: Sequence[torch.Tensor],
    dout: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    backend: str,
) -> tuple:
    """Compute the gradients of a block's queries, keys and values.

    kv `[2, s, b, g, d]`; dout, q, out `[s/cp, b, n, d]`, lse `[b, n, s/cp]`: of attention to all keys.
    """
    k, v = (x[block.keys] for x in kv)
    return attend_backward(
        dout[block.queries],
        q[block.queries],
        k,
        v,
        out[block.queries],
        lse[..., block.queries],
        block.kind,
        backend,
    )


class GatherFunction(torch.autograd.Function):
    """allgather: q `[s/cp, b, n, d]`, k, v `[s/cp, b, g, d]` -> `[s/cp, b, n, d]`

    Keys and values are gathered again in the backward. blocks, order: of `SequenceShard.gathered`, `.order`.
    """

    @staticmethod
    def forward(
        ctx, q, k, v, axis: Axis, blocks: list[AttentionBlock], order: tuple, backend: str
    ) -> torch.Tensor:
        kv = gather_kv(k, v, axis, order[0])
        parts = []
        out = q.new_empty(q.shape)
        for block in blocks:
            k_seen, v_seen = kv[:, block.keys]
            part, lse = attend(q[block.queries], k_seen, v_seen, block.kind, backend)
            parts.append(PartialRows(part, block.queries, lse))
        lse = merge_rows(parts, out)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.args = axis, blocks, order, backend
        return out

    @staticmethod
    def backward(ctx, dout: torch.Tensor) -> tuple:
        q, k, v, out, lse = ctx.saved_tensors
        axis, blocks, order, backend = ctx.args
        kv = gather_kv(k, v, axis, order[0])
        parts = []
        dq = q.new_empty(q.shape)
        dkv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        for block in blocks:
            part, *grads = block_gradients(block, kv, dout, q, out, lse, backend)
            parts.append(PartialRows(part, block.queries))
            for total, grad in zip(dkv, grads, strict=True):
                if isinstance(block.keys, slice):
                    total[block.keys] += grad
                else:  # some keys are seen by both chunks of a document
                    total.index_add_(0, block.keys, grad.float())
        arriving = start_reduce_scatter(dkv.transpose(0, 1).index_select(0, order[1]), axis)
        merge_rows(parts, dq)
        dk, dv = arriving.wait().to(k.dtype).unbind(1)
        return dq, dk, dv, None, None, None, None


def gather_kv(k: torch.Tensor, v: torch.Tensor, axis: Axis, order: torch.Tensor) -> torch.Tensor:
    """Gather k, v `[s/cp, b, g, d]` of all ranks, then permute rows by order `[s]` -> `[2, s, b, g, d]`"""
    return start_all_gather(torch.stack((k, v), 1), axis).wait()[order].transpose(0, 1)


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axis: Axis,
    order: tuple[torch.Tensor, torch.Tensor],
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """a2a: call attend(q, k, v) on all tokens of the axis, in the row's order, for this rank's heads.

    q `[s, b, n, d]`, k, v `[s, b, g, d]` -> `[s, b, n*d]`; attend: of `[s*cp, b, n/cp, d]`; order `[s*cp]`,
    twice: `SequenceShard.order` of the axis. With fewer key/value heads than ranks, those that share one get
    copies.
    """
    s, b, n, d = q.shape
    g = k.shape[2]
    if n % axis.size or (g % axis.size and axis.size % g):
        raise ValueError(f"{n} query, {g} key/value heads cannot be divided over {axis.size} ranks (a2a)")
    k, v = (x.repeat_interleave(max(axis.size // g, 1), dim=2) for x in (k, v))
    blocks = torch.cat([x.unflatten(2, (axis.size, -1)) for x in (q, k, v)], dim=3)  # [s, b, ranks, heads, d]
    mine = all_to_all(blocks.permute(2, 0, 1, 3, 4).flatten(0, 1), axis)
    to_row, to_ranks = order
    mine = Reorder.apply(mine, to_row, to_ranks)
    q, k, v = mine.split([x.shape[2] // axis.size for x in (q, k, v)], dim=2)
    context = Reorder.apply(attend(q, k, v), to_ranks, to_row)  # [ranks * s, b, n/ranks * d]
    return all_to_all(context, axis).unflatten(0, (axis.size, s)).permute(1, 2, 0, 3).reshape(s, b, n * d)

"""Context parallelism: attention over rows whose tokens are sharded over the ranks of an axis.

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
    a2a+p2p     a2a among neighbours, the ring between groups of them, for two levels of networks

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

Each document is cut zigzag separately. The remainder of its length modulo 2 * cp is distributed one token per
rank, round robin across documents: ranks have equal numbers of tokens, without padding. A layer with a window
uses allgather instead of the ring. A group of neighbouring ranks, treated as one rank, has neighbouring
chunks: groups are cut zigzag, too. Weight gradients are of s/cp tokens; `dp.py` sums them over dp x cp.
(Ring: arXiv 2310.01889; zigzag: Megatron-LM; all-to-all: DeepSpeed-Ulysses, 2309.14509; all-gather: Llama 3,
2407.21783; two levels: LoongTrain, 2406.18485)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from nanomegatron.batch import Batch
from nanomegatron.comm import Pending, all_to_all, start_all_gather, start_reduce_scatter, start_ring_exchange
from nanomegatron.mesh import Axis
from nanomegatron.ops.attention import Block, Mask, attend, attend_backward, core_attention, ranges, to_device
from nanomegatron.ops.merge import ALL, PartialRows, merge_rows

Rows = slice | torch.Tensor  # of dim 0: a slice, or indices


class Step(NamedTuple):
    """Attention of some of a rank's queries to some of the keys at hand."""

    queries: Rows
    keys: Rows
    block: Block


def memoized(plan: Callable) -> Callable:
    """Decorate a method of Shard: cache its result for each tuple of arguments."""

    def planned(self: "Shard", *args: Any) -> Any:
        if (plan, args) not in self._plans:
            self._plans[plan, args] = plan(self, *args)
        return self._plans[plan, args]

    return planned


class Shard:
    """This rank's tokens of a row sharded over an axis; `types`: how each layer communicates ("p2p", ...).

    `places`: int64 `[s/size]`, the tokens' positions in the row, ascending. If a method takes a `group`, that
    many neighbouring ranks are treated as one rank, and `rank` is the index of such a group.
    """

    def __init__(
        self, axis: Axis, s: int, types: Sequence[str], cu_seqlens: np.ndarray | None = None
    ) -> None:
        """cu_seqlens: bounds of the documents in the row; tokens past the last one are a document of padding.

        Raises ValueError if `s` is not divisible by 2 * axis.size.
        """
        if s % (2 * axis.size):
            raise ValueError(f"{s} tokens do not divide into 2 x {axis.size} context-parallel chunks")
        self.axis, self.types, self.documents = axis, types, cu_seqlens is not None
        bounds = np.array([0, s]) if cu_seqlens is None else np.append(np.asarray(cu_seqlens, np.int64), s)
        self.starts = bounds[:-1]
        self.bounds = self.starts[:, None] + chunk_bounds(np.diff(bounds), axis.size)
        self.places = self.token_indices(axis.rank)
        self._plans: dict[tuple, Any] = {}

    def chunks(self, rank: int, group: int = 1) -> np.ndarray:
        """Return (begin, end) in the row of a rank's two chunks of each document: `[docs, 2, 2]`."""
        bounds = self.bounds[:, ::group]
        return np.stack((bounds[:, rank : rank + 2], bounds[:, -2 - rank :][:, :2]), axis=1)

    def token_indices(self, rank: int, group: int = 1) -> np.ndarray:
        """Return the positions of a rank's tokens in the row, ascending."""
        return ranges(*self.chunks(rank, group).reshape(-1, 2).T)

    def query_key_rows(self, own: int, other: int, group: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return which queries of rank `own` see keys of rank `other`, and which keys they see.
            other = own    all queries, all keys                          causal, as if in one sequence
            other < own    all queries, the first half of the keys        (the second chunk comes later)
            other > own    the second half of the queries, all keys       (the first chunk comes before)

        Both are (begin, end) among the tokens of their rank, for each document that has both: `[2, docs]`.
        So no chunk of scores is computed that is masked.
        """
        q_sizes, k_sizes = (np.diff(self.chunks(rank, group))[..., 0] for rank in (own, other))
        q_ends, k_ends = (sizes.cumsum().reshape(sizes.shape) for sizes in (q_sizes, k_sizes))
        queries = np.stack(((q_ends - q_sizes)[:, int(other > own)], q_ends[:, 1]))
        keys = np.stack(((k_ends - k_sizes)[:, 0], k_ends[:, int(other >= own)]))
        both = (queries[0] < queries[1]) & (keys[0] < keys[1])
        return queries[:, both], keys[:, both]

    @memoized
    def ring(self, group: int, device: torch.device) -> list[Step | None]:
        """Return the steps for the keys of this rank, of the one before it, ...; None: no query sees them."""
        size, own = self.axis.size // group, self.axis.rank // group
        steps: list[Step | None] = []
        for other in ((own - i) % size for i in range(size)):
            queries, keys = self.query_key_rows(own, other, group)
            if not self.documents:
                steps.append(Step(slice(*queries[:, 0]), slice(*keys[:, 0]), Block(own == other)))
            elif queries.size:
                rows = (to_device(ranges(*x), device) for x in (queries, keys))
                steps.append(Step(*rows, Block.packed(queries, keys, device, own == other)))
            else:
                steps.append(None)
        return steps

    @memoized
    def gathered(self, group: int, window: int | None, device: torch.device) -> list[Step]:
        """Return the steps, four at most, for all keys in the order of the row."""
        begin, end = self.chunks(self.axis.rank // group, group).reshape(-1, 2).T
        first = np.repeat(self.starts, 2)
        if window is not None:
            first = np.maximum(first, begin - window)
        if self.documents:
            begin, first, end = (x[begin < end] for x in (begin, first, end))
            block = Block.packed((begin, end), (first, end), device, True, window)
            return [Step(ALL, to_device(ranges(first, end), device), block)]
        steps, half = [], len(self.places) * group // 2
        for i, queries in enumerate((slice(0, half), slice(half, 2 * half))):
            nearest = begin[i] if window is None else first[i]
            steps.append(Step(queries, slice(nearest, end[i]), Block(True, window)))
            if window is None and begin[i]:
                steps.append(Step(queries, slice(0, begin[i]), Block()))
        return steps

    @memoized
    def order(self, group: int, among: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the permutation of the tokens of `among` ranks from rank after rank to the order of the row.

        This rank is one of them. -> permutation `[n]`, its inverse `[n]`, n tokens of these ranks.
        """
        first = self.axis.rank // (group * among) * among
        order = np.argsort(np.concatenate([self.token_indices(first + i, group) for i in range(among)]))
        return to_device(order, device), to_device(np.argsort(order), device)


def chunk_bounds(lengths: np.ndarray, size: int) -> np.ndarray:
    """Cut each document into 2 * size chunks: lengths `[docs]` -> bounds in it `[docs, 2 * size + 1]`.

    The chunks of a document differ by one token at most; all ranks have equal numbers of tokens if the sum of
    lengths is divisible by `size`.
    """
    each, extra = np.divmod(np.asarray(lengths, np.int64)[:, None], 2 * size)
    turn = (np.arange(size) - (extra.cumsum(0) - extra)) % size  # each rank's turn to get an extra token
    first, second = each + (turn < extra), each + (turn < extra - size)
    sizes = np.concatenate((0 * each, first, second[:, ::-1]), axis=1)
    return sizes.cumsum(1)


def shard_batch(batch: Batch, axis: Axis, types: Sequence[str]) -> Batch:
    """Return this rank's tokens `[b, s/cp]` of a batch, with `shard` set; types: as for `Shard`."""
    if axis.size == 1:
        return batch
    bounds = None if batch.cu_seqlens is None else batch.cu_seqlens.numpy()
    shard = Shard(axis, len(batch.positions), types, bounds)
    at = torch.from_numpy(shard.places)
    names = ("tokens", "labels", "loss_mask", "position_ids")
    rows = {name: x[:, at] for name in names if (x := getattr(batch, name)) is not None}
    return replace(batch, positions=batch.positions[at], shard=shard, **rows)


def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shard: Shard,
    layer: int,
    mask: Mask,
    backend: str,
    fused_softmax: bool = True,
) -> torch.Tensor:
    """Compute causal attention of this rank's queries to the keys of all ranks.

    q `[s/cp, b, n, d]`, k, v `[s/cp, b, g, d]` -> `[s/cp, b, n*d]`
    mask: of the whole row; fused_softmax: as for `core_attention`, which a2a calls. Communicates over
    shard.axis as shard.types[layer] says. Raises ValueError if a2a cannot divide the heads over the ranks.
    """
    kind, axis, device = shard.types[layer], shard.axis, q.device

    def whole_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        return core_attention(q, k, v, backend, mask, fused_softmax=fused_softmax)[0]

    def shared_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axis: Axis, group: int):
        if kind == "allgather" or mask.window is not None:
            steps, order = shard.gathered(group, mask.window, device), shard.order(group, axis.size, device)
            return GatherFunction.apply(q, k, v, axis, steps, order, backend).flatten(2)
        return RingFunction.apply(q, k, v, axis, shard.ring(group, device), backend).flatten(2)

    if kind == "a2a":
        return ulysses_attention(q, k, v, axis, shard, whole_rows)
    if kind == "a2a+p2p":
        inner, outer = axis.levels
        return ulysses_attention(q, k, v, inner, shard, partial(shared_rows, axis=outer, group=inner.size))
    return shared_rows(q, k, v, axis, 1)


class RingFunction(torch.autograd.Function):
    """p2p, as drawn above. q `[s/cp, b, n, d]`, k, v `[s/cp, b, g, d]` -> `[s/cp, b, n, d]`

    steps: those of `Shard.ring`.
    """

    @staticmethod
    def forward(ctx, q, k, v, axis: Axis, steps: list[Step | None], backend: str) -> torch.Tensor:
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = out.new_full((*q.shape[1:3], len(q)), -torch.inf)  # [b, n, s/cp]
        for step, kv in zip(steps, ring_kv(k, v, axis), strict=True):
            if step is not None:
                part = attend(q[step.queries], *kv[:, step.keys], step.block, backend)
                merge_(out, lse, step.queries, *part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = axis, steps, backend
        return out

    @staticmethod
    def backward(ctx, dout: torch.Tensor) -> tuple:
        q, k, v, out, lse = ctx.saved_tensors
        axis, steps, backend = ctx.how
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dkv = torch.zeros((2, *k.shape), dtype=torch.float32, device=k.device)
        arriving = Pending(dkv)
        for step, kv in zip(steps, ring_kv(k, v, axis), strict=True):
            grads = step and step_gradients(step, kv, (dout, q, out, lse), backend)
            dkv = arriving.wait()  # the sums for these keys, from the rank before
            if grads:
                for total, rows, grad in zip((dq, *dkv), (step.queries, step.keys, step.keys), grads):
                    total[rows] += grad
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
    weights = ((x - total).exp().permute(2, 0, 1)[..., None] for x in (lse[..., rows], part_lse))
    out[rows] = next(weights) * out[rows] + next(weights) * part
    lse[..., rows] = total


def step_gradients(step: Step, kv: Sequence[torch.Tensor], known: tuple, backend: str) -> tuple:
    """Compute the gradients of a step's queries, keys and values.

    kv `[2, s, b, g, d]`; known: dout, q, out `[s/cp, b, n, d]`, lse `[b, n, s/cp]` of attention to all keys.
    """
    dout, q, out = (x[step.queries] for x in known[:3])
    k, v = (x[step.keys] for x in kv)
    return attend_backward(dout, q, k, v, out, known[3][..., step.queries], step.block, backend)


class GatherFunction(torch.autograd.Function):
    """allgather: q `[s/cp, b, n, d]`, k, v `[s/cp, b, g, d]` -> `[s/cp, b, n, d]`

    Keys and values are gathered again in the backward. steps: `Shard.gathered`, order: `Shard.order`.
    """

    @staticmethod
    def forward(ctx, q, k, v, axis: Axis, steps: list[Step], order: tuple, backend: str) -> torch.Tensor:
        kv = gather_kv(k, v, axis, order[0])
        parts, out = [], q.new_empty(q.shape)
        for step in steps:
            part, lse = attend(q[step.queries], *kv[:, step.keys], step.block, backend)
            parts.append(PartialRows(part, step.queries, lse))
        lse = merge_rows(parts, out)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = axis, steps, order, backend
        return out

    @staticmethod
    def backward(ctx, dout: torch.Tensor) -> tuple:
        q, k, v, *out_lse = ctx.saved_tensors
        axis, steps, order, backend = ctx.how
        kv = gather_kv(k, v, axis, order[0])
        parts, dq = [], q.new_empty(q.shape)
        dkv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        for step in steps:
            part, *grads = step_gradients(step, kv, (dout, q, *out_lse), backend)
            parts.append(PartialRows(part, step.queries))
            for total, grad in zip(dkv, grads, strict=True):
                if isinstance(step.keys, slice):
                    total[step.keys] += grad
                else:  # some keys are in two windows
                    total.index_add_(0, step.keys, grad.float())
        by_rank = dkv.transpose(0, 1).index_select(0, order[1])
        arriving = start_reduce_scatter(by_rank, axis)
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
    shard: Shard,
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """a2a: call attend(q, k, v) on all tokens of the axis, in the row's order, for this rank's heads.

    q `[s, b, n, d]`, k, v `[s, b, g, d]` -> `[s, b, n*d]`; attend: of `[s*cp, b, n/cp, d]`. With fewer
    key/value heads than ranks, each of the ranks that share a head gets a copy.
    """
    (s, b, n, d), g, ranks = q.shape, k.shape[2], axis.size
    if n % ranks or (g % ranks and ranks % g):
        raise ValueError(f"{n} query, {g} key/value heads cannot be divided over {ranks} ranks (a2a)")
    order = shard.order(1, ranks, q.device)
    k, v = (x.repeat_interleave(max(ranks // g, 1), dim=2) for x in (k, v))
    blocks = torch.cat([x.unflatten(2, (ranks, -1)) for x in (q, k, v)], dim=3)  # [s, b, ranks, heads, d]
    mine = all_to_all(blocks.permute(2, 0, 1, 3, 4).flatten(0, 1), axis)
    mine = Reorder.apply(mine, *order)
    q, k, v = mine.split([x.shape[2] // ranks for x in (q, k, v)], dim=2)
    context = Reorder.apply(attend(q, k, v), *order[::-1])  # [ranks * s, b, n/ranks * d]
    return all_to_all(context, axis).unflatten(0, (ranks, s)).permute(1, 2, 0, 3).reshape(s, b, n * d)


class Reorder(torch.autograd.Function):
    """x[order] of x `[n, ...]`, order, inverse `[n]` -> `[n, ...]`. The backward indexes with `inverse`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None

"""Same result as `cp.context_attention`, with another ring, for p2p.

    cp 4, rank 1      compute    q1 k1 | q1 k0  q1 k3 | q1 k2 |
                      receive   k0  k3 |           k2 |       |
    backward          compute      dk1 |   dk0    dk3 |   dk2 |          and send them to ranks 0, 3 and 2
                      receive          |              | dk1 dk1 | dk1    computed by ranks 2, 3 and 0

The plain ring passes all keys of a rank from neighbour to neighbour, followed by the fp32 sums of their
gradients. Here

- each rank sends its keys to the ranks whose queries see them, nearer ranks first, and only keys seen there;
- the keys of two ranks arrive per round; if the same queries see both, one kernel call handles both;
- gradients are sent directly to the rank that owns the keys, in the keys' type, and are added in fp32;
- up to four parts are merged at once (`ops/merge.py`), not each part into the sum so far;
- between GPUs that reach each other's memory copy engines push keys and gradients, and leave the
  multiprocessors to attention (`transfers.py`); others send messages.

Gain: causal rows of 32k, 64k, 128k tokens on 4 H200, forward and backward, at 0.939, 0.982 and 0.984 of the
rate of one GPU, which does not communicate (benchmarks/results/2026-11-22-cp-attention-four.json, at 128k
benchmarks/results/2026-11-22-cp-attention-four-128k.json); by messages from neighbour to neighbour and sums
in fp32 0.875, 0.961 and 0.919 (benchmarks/results/2026-11-22-cp-attention-four-messages.json).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from nanomegatron.comm import Pending
from nanomegatron.cp import AttentionBlock, Rows, SequenceShard, context_attention
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.transfers import Transfer, TransferPlan
from nanomegatron.mesh import Axis
from nanomegatron.ops.attention import Mask, to_device
from nanomegatron.ops.merge import ALL, MAX_PARTS, PartialRows, merge_rows

ROUND = 2  # other ranks whose keys arrive at a time


@dataclass(frozen=True)
class RingStep(AttentionBlock):
    """A block whose keys, a slice, are of those of a round. places: where `merge_rows` puts its results."""

    places: Rows


class RingRound(NamedTuple):
    """One round of the ring on a rank: attention to the keys at hand, and transfers.

    The first round has the rank's own keys, each later one those of up to `ROUND` other ranks, concatenated.
    """

    steps: list[RingStep]
    keys: list[Rows]
    """Rows of this rank's keys that are sent, one entry for each receiving rank."""
    key_places: list[Rows]
    """Where `merge_rows` adds the gradients of these rows."""
    there: TransferPlan
    """Transfers of keys, before the round."""
    back: TransferPlan
    """Transfers of their gradients, after it."""


class Ring:
    """`SelfAttention.context_attention`: this ring for p2p; other kinds are as in the core.

    q `[s/cp, b, n, d]`, k, v `[s/cp, b, g, d]` -> `[s/cp, b, n*d]`
    The rounds of a shard are planned once, and kept as long as the shard exists.
    """

    def __init__(self, peers: PeerAccess) -> None:
        self.peers = peers
        self.plans: WeakKeyDictionary[SequenceShard, list[RingRound]] = WeakKeyDictionary()

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shard: SequenceShard,
        layer: int,
        mask: Mask,
        backend: str,
        fused_softmax: bool = True,
    ) -> torch.Tensor:
        """As `cp.context_attention`."""
        if shard.types[layer] != "p2p" or mask.window is not None:
            return context_attention(q, k, v, shard, layer, mask, backend, fused_softmax)
        rounds = self.rounds(shard)
        return RoundsFunction.apply(q, k, v, shard.axis, rounds, self.peers, backend).flatten(2)

    def rounds(self, shard: SequenceShard) -> list[RingRound]:
        """The rounds of this rank."""
        if shard not in self.plans:
            self.plans[shard] = plan_rounds(shard)
        return self.plans[shard]


class RoundsFunction(torch.autograd.Function):
    """q `[s/cp, b, n, d]`, k, v `[s/cp, b, g, d]` -> `[s/cp, b, n, d]`, in the rounds of a ring.

    Keys and values for the next round are sent while one is computed. In the backward they are sent again,
    and after each round its gradients of keys and values, to the ranks that own these. After the last round
    that overlaps only with the sum of the queries' gradients.
    """

    @staticmethod
    def forward(ctx, q, k, v, axis: Axis, rounds: list[RingRound], peers: PeerAccess, backend: str):
        total = LseAccumulator(q, sum(len(this.steps) for this in rounds))
        for this, kv in rounds_kv(k, v, axis, rounds, peers):
            for step in this.steps:
                part, lse = step.forward(q, kv, backend)
                total.add(step.places, part, lse)
        ctx.save_for_backward(q, k, v, total.rows, total.lse)
        ctx.args = axis, rounds, peers, backend
        return total.rows

    @staticmethod
    def backward(ctx, dout: torch.Tensor) -> tuple:
        q, k, v, out, lse = ctx.saved_tensors
        axis, rounds, peers, backend = ctx.args
        dq = LseAccumulator(q, sum(len(this.steps) for this in rounds))
        sent = 1 + sum(len(this.keys) for this in rounds)
        dkv = LseAccumulator(k, sent), LseAccumulator(v, sent)
        send = exchange(peers, axis, k, "gradients of keys", kept=len(rounds) - 1)
        in_flight: list[tuple[RingRound, Pending]] = []

        def receive() -> None:
            this, arriving = in_flight.pop()
            for total, grads in zip(dkv, arriving.wait(), strict=True):
                for places, (_, size, (begin, _)) in zip(this.key_places, this.back.recvs, strict=True):
                    total.add(places, grads[begin : begin + size])

        for this, kv in rounds_kv(k, v, axis, rounds, peers):
            found = [step.backward(dout, q, kv, out, lse, backend) for step in this.steps]
            if this is rounds[0]:
                for total, own in zip(dkv, found[0][1:], strict=True):
                    total.add(ALL, own)
            else:
                if in_flight:
                    receive()
                in_flight.append((this, send([*grads_to_return(this, found)], (k, v), this.back)))
            for step, (more, *_) in zip(this.steps, found, strict=True):
                dq.add(step.places, more)
        if in_flight:
            receive()
        return dq.rows, *(total.rows for total in dkv), None, None, None, None


class LseAccumulator:
    """Merges parts, each for some of the tokens of like `[s, b, n, d]`, to `rows`, in fp32 until the last.

    With log-sum-exps of scores, `lse` `[b, n, s]`, rows are averages over all keys so far; without, sums.
    Parts are collected until there are as many as can be merged at once, which is before the memory of a
    ring is reused.
    """

    def __init__(self, like: torch.Tensor, parts: int) -> None:
        """parts: the number of parts that will be added."""
        self.like, self.left = like, parts
        self.rows = self.lse = None
        self.waiting: list[PartialRows] = []

    def add(self, places: Rows, part: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Add part `[rows, b, n, d]` for the tokens at `places`, and log-sum-exps lse `[b, n, rows]`."""
        self.left -= 1
        self.waiting.append(PartialRows(part, places, lse))
        if self.left and len(self.waiting) < MAX_PARTS:
            return
        if len(self.waiting) == 1 and isinstance(places, slice) and len(part) == len(self.like):
            self.rows, self.lse = part, lse
            return
        if self.rows is None or not self.left:
            dtype = torch.float32 if self.left else self.like.dtype
            self.rows = self.like.new_empty(self.like.shape, dtype=dtype)
        self.lse = merge_rows(self.waiting, self.rows)
        self.waiting = [PartialRows(self.rows, ALL, self.lse)]


def rounds_kv(
    k: torch.Tensor, v: torch.Tensor, axis: Axis, rounds: list[RingRound], peers: PeerAccess
) -> Iterator[tuple[RingRound, Sequence[torch.Tensor]]]:
    """Yield each round with its keys and values, while those of the next are in flight.

    k, v `[s/cp, b, g, d]` -> two of `[tokens, b, g, d]` a round
    """
    own = kv = k.contiguous(), v.contiguous()
    send = exchange(peers, axis, k, "keys", kept=1)
    for this, following in zip(rounds, [*rounds[1:], None], strict=True):
        if following is not None:
            parts = [[x[rows] for x in own] for rows in following.keys]
            arriving = send(parts, own, following.there)
        yield this, kv
        if following is not None:
            kv = arriving.wait()


def exchange(peers: PeerAccess, axis: Axis, k: torch.Tensor, name: str, kept: int) -> Callable[..., Pending]:
    """The function (`PeerAccess.ring`) that sends keys k `[s/cp, b, g, d]` and values, or their gradients."""
    return peers.ring(axis, k.device, name, 2 * k.nbytes * min(ROUND, axis.size - 1), kept)


def grads_to_return(this: RingRound, found: list[Sequence[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """Yield dk and dv for each rank that sent its keys for this round.

    found `[queries, b, n, d]` or `[keys, b, g, d]`: dq, dk, dv of each step -> `[rows, b, g, d]`: dk, dv
    """
    for _, size, (begin, _) in this.there.recvs:
        for step, (_, *grads) in zip(this.steps, found, strict=True):
            if step.keys.start <= begin < step.keys.stop:
                yield [x[begin - step.keys.start :][:size] for x in grads]


def plan_rounds(shard: SequenceShard) -> list[RingRound]:
    """The rounds of this rank: own keys, then those of `ROUND` others at a time, nearest first."""
    size = shard.axis.size
    distances = [[0], *(range(i, min(i + ROUND, size)) for i in range(1, size, ROUND))]
    planner = Planner(shard)
    return [planner.round(by) for by in distances]


class Planner:
    """Plans the rounds of a rank."""

    def __init__(self, shard: SequenceShard) -> None:
        self.shard, self.device = shard, shard.device
        self.size, self.own = shard.axis.size, shard.axis.rank
        self.tokens = len(shard.positions)
        self.rows = functools.cache(shard.query_key_rows)

    def round(self, by: Sequence[int]) -> RingRound:
        """Plan the round with the keys of the ranks at the distances `by` before this one."""
        steps = [
            self.step((self.own - d) % self.size, slice(begin, begin + rows))
            for d, (_, rows, (begin, _)) in zip(by, self.arriving(self.own, by, 1), strict=True)
            if rows
        ]
        if steps and all(x.kind.cu_q is None and x.queries == steps[0].queries for x in steps):
            steps = [replace(steps[0], keys=slice(0, steps[-1].keys.stop))]  # the keys of both at once
        sent = [self.keys_seen(self.own + d, self.own) for d in by if d]
        sent = [rows for rows in sent if count(rows)]
        keys = [rows if isinstance(rows, slice) else to_device(rows, self.device) for rows in sent]
        key_places = [self.places(rows) for rows in sent]
        return RingRound(steps, keys, key_places, self.transfers(by, 1), self.transfers(by, -1))

    def step(self, other: int, keys: slice) -> RingStep:
        """Plan attention to the keys of the rank `other`, which are the slice `keys` of the round's."""
        block = self.shard.block(other)
        queries, _ = self.rows(self.own, other)
        whole = count(queries) == self.tokens
        return RingStep(ALL if whole else block.queries, keys, block.kind, self.places(queries))

    def keys_seen(self, queries: int, keys: int) -> slice | np.ndarray:
        """The keys of one rank that queries of another see."""
        return self.rows(queries % self.size, keys % self.size)[1]

    def transfers(self, by: Sequence[int], sign: int) -> TransferPlan:
        """Plan to send keys (sign 1) or their gradients (-1) in the round with the distances `by`."""
        sends = [self.arriving(self.own + sign * d, by, sign)[i] for i, d in enumerate(by)]
        recvs = self.arriving(self.own, by, sign)
        return TransferPlan([x for x in sends if x.by and x.rows], [x for x in recvs if x.by and x.rows])

    def arriving(self, rank: int, by: Sequence[int], sign: int) -> list[Transfer]:
        """The transfers to a rank: of keys that its queries see (sign 1), or of its keys' gradients (-1)."""
        pairs = [(rank, rank - d) if sign > 0 else (rank + d, rank) for d in by]
        rows = [count(self.keys_seen(queries, keys)) for queries, keys in pairs]
        return [Transfer(sign * d, rows[i], (sum(rows[:i]), sum(rows))) for i, d in enumerate(by)]

    def places(self, rows: slice | np.ndarray) -> Rows:
        """These rows as `PartialRows.at`: a slice, or for each token its number among the rows, or -1."""
        if isinstance(rows, slice):
            return rows
        numbers = np.full(self.tokens, -1)
        numbers[rows] = np.arange(len(rows))
        return to_device(numbers, self.device)


def count(rows: slice | np.ndarray) -> int:
    """The number of rows; a slice has a stop."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)

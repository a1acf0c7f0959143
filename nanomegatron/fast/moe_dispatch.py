"""Tokens to the ranks of their experts, and what these have made of them back.

Expert i of E is on the ep rank i // (E / ep), and there cut over etp. Two ways, each the other's equal:

    allgather     x, probs, ids of all etp x ep ranks to all
    alltoall      a token, with its probs and ids, to each ep rank that has an expert of its choice, once; and
                  there to all the etp ranks. So x goes to ep - 1 ranks at most, and to k at most

Where tokens have come, they are copied for the experts there, in order of these; on the way back a token has
a part of its weighted sum on each rank: these are summed over etp, sent back, and summed.

    alltoall over ep 2, E 4, k 2    rank 0                          rank 1
    experts of its tokens           1 0   3 2   2 0   1 3           1 2   0 1
    tokens, in order of ranks       0 2 3 | 1 2 3                   4 5 | 4           sizes 3 | 3 and 2 | 1
    having gone                     0 2 3 | 4 5                     1 2 3 | 4
    copies in order of experts      0 2 5 | 0 3 4 5                 1 2 4 | 1 3

How many rows come is known on the GPU alone, and messages and memory need it on the host. That is the one
time that the host waits, but not for the GPU's whole queue: the numbers start on their way before the
router's losses are made, and are read after what else there is to launch, for both halves at once if there
are halves. Where every expert's rows of every rank are padded to the same capacity nothing is asked, nor
where one rank has all experts.

The weights come in once, on the way back: a rank's part of a token's sum is added in fp32, in the order of
its copies, and rounded to the type of x; so are the sums of these parts. Gradients flow the same ways in
reverse, with no size to be asked for.

What travels by the all-gather does so in the blocks of the ranks (`moe_pieces.py`), beside the work on them,
and x before the router knows where to. Of 4 ranks, where GPUs have each other's memory:

    forward
        network         x1 ----> x2 ----> x3 ---->                      to 1 --> to 2 --> to 3 -->
        GPU       copy  router  losses  own  x1  x2  x3  experts  for 1 for 2 for 3 own     wait  sum
    backward
        network         dy1 ---> dy2 ---> dy3 --->                to 1 --> to 2 --> to 3 -->
        GPU       copy  again  own  dy1  dy2  dy3  experts  for 1 for 2 for 3 own  first dW  router  sum

Over the network are copies by copy engines, which take nothing from the GPU; `own`, `x1`: that rank's tokens
permuted, `for 1`, `own`: their sums; `again`: what experts have not kept. So what they make again stands
between the gradients of y and their order, and weight gradients of their first layers, all of it, and the
router's backward between the gradients of x and their sum. Elsewhere collectives take the place of the
copies: own tokens are permuted beside them, the others' when all have come, and beside the way back in the
backward is the sum of the weight gradients. Probs and ids always go by collectives: probs beside the experts.

An all-to-all lets nothing but that sum and what experts make again be done beside it, or also other work
where one of two settings is made, of which the second goes with the all-gather too, by collectives:

    --moe-shared-expert-overlap
        network            send ----------------->                         back --->
        GPU       permute       shared experts      experts of all tokens            sum

    --overlap-moe-expert-parallel-comm, halves 1 and 2 of a rank's tokens
        network              send 1 ---> send 2 -------->  back 1 -------->  back 2 --->
        GPU       permute 1  permute 2   experts of 1      experts of 2      sum 1        sum 2

A backward reads them from right to left: autograd takes what was made last first, so that what stands between
begin and end of an exchange stands between those of its gradients' way back. The two go together.
(GShard, arXiv 2006.16668; MegaBlocks 2211.15841; a token once to a rank: DeepSeek-V3 2412.19437; overlap in
finer pieces: Comet, 2502.19811)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import torch

from nanomegatron.comm import Pending, all_gather, start_all_gather, start_reduce_scatter, start_swap
from nanomegatron.fast import moe_pieces
from nanomegatron.mesh import Axis
from nanomegatron.moe_experts import GroupedExperts
from nanomegatron.ops.permute import Routing, padded, permute, permute_ref, route, unpermute, unpermute_ref
from nanomegatron.param import Soon
from nanomegatron.router import MoeAxes, expert_capacity


class OnTheWay:
    """Numbers of the GPU on their way to the host, since this was made."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers, self.event = numbers.to("cpu", non_blocking=True), None
        if numbers.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self) -> list:
        """The numbers; waits for what was launched before them."""
        if self.event is not None:
            self.event.synchronize()
        return self.numbers.tolist()


def start(x: torch.Tensor, *trip) -> Callable[[], torch.Tensor]:
    """Begin a trip; at the end what has come. Differentiable: what is done between begin and end is undone
    between those of the gradients' way back.
    """
    under_way = moe_pieces.Trip(*trip)
    return partial(moe_pieces.FinishFunction.apply, moe_pieces.StartFunction.apply(x, under_way), under_way)


def start_gather(x: torch.Tensor, axis: Axis) -> Callable[[], torch.Tensor]:
    """Begin to hand x to all; at the end the ranks' x, one after the other."""
    if axis.size == 1:
        return lambda: x
    return start(x, partial(start_all_gather, axis=axis), partial(start_reduce_scatter, axis=axis))


def start_exchange(
    x: torch.Tensor,
    axis: Axis,
    send: list[int],
    receive: list[int],
    works: Soon | None = None,
    early: list | None = None,
) -> Callable[[], torch.Tensor]:
    """Begin to hand `send[r]` rows of x to the axis's rank r; at the end `receive[r]` from it, in rank order.

    Rows of x beyond these stay, and may get any gradient. works, early: as a `moe_pieces.Trip` has them.
    """
    if axis.size == 1:
        return lambda: x[: sum(send)]

    def there(x: torch.Tensor) -> Pending:
        return start_swap(x[: sum(send)], axis, send, receive)

    back = partial(start_swap, axis=axis, send=receive, receive=send, rows=len(x))
    return start(x, there, back, works, early)


def exchange(x: torch.Tensor, axis: Axis, send: list[int], receive: list[int]) -> torch.Tensor:
    """`start_exchange` and its end."""
    return start_exchange(x, axis, send, receive)()


def tables(ids: torch.Tensor, experts: int, multiple: int = 1, capacity: int | None = None) -> Routing:
    """`route`, or with a capacity so many rows for each expert, which should have no more copies.

    Of more it would take the first ones.
    """
    if capacity is None:
        return route(ids, experts, multiple)
    capacity = -(-max(capacity, multiple > 1) // multiple) * multiple
    found, rows = route(ids, experts), experts * capacity
    expert = ids.clamp(0, experts - 1).long()
    place = found.position - found.offsets[expert]
    kept = (found.position >= 0) & (place < capacity)
    position = (place + expert * capacity).where(kept, rows)  # the row after the last is for the others
    source = ids.new_full((rows + 1,), -1)
    source[position.flatten()] = torch.arange(ids.numel(), dtype=ids.dtype, device=ids.device)
    offsets = torch.arange(experts + 1, dtype=ids.dtype, device=ids.device) * capacity
    return Routing(position.where(kept, -1).int(), source[:rows], offsets, found.counts.clamp(max=capacity))


Rows = tuple[torch.Tensor, torch.Tensor, list[int] | None, Soon | None]
Ahead = tuple[torch.Tensor, moe_pieces.Trip] | None  # what has set out


class Dispatcher:
    """The way of some tokens to their experts, and back. Both are begun, and give what ends them:

    start_send    x `[t, h]`, probs fp32 `[t, k]` -> rows `[r, h]` for this rank's experts, offsets int32
                  `[e + 1]` of each, the same on the host, or None where only the device knows them, and a
                  list of what is to be done while gradients travel back, or None where nothing waits;
                  ahead: what `set_out` has begun of these x
    start_back    rows `[r, h]`, over etp summands -> each token's weighted sum `[t, h]`; early: what is to
                  be done while its gradient travels

    ids int32 `[t, k]` of `experts`, -1 for a copy to be dropped. capacity: rows that each expert has for each
    rank, padded, of which ids must have no more; else all that come, to a `multiple`. fused: by the kernels.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        experts: int,
        axes: MoeAxes,
        capacity: int | None = None,
        multiple: int = 1,
        fused: bool = True,
    ) -> None:
        self.axes, self.local, self.multiple = axes, experts // axes.ep.size, multiple
        self.fused = fused
        self.capacity = None if capacity is None else capacity * axes.etp_ep.size
        self._begin(ids)

    @classmethod
    def set_out(cls, x: torch.Tensor, axes: MoeAxes) -> Ahead:
        """Begin what needs no ids."""
        return None

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor], *how) -> list["Dispatcher"]:
        """One for the ids of each part of a batch."""
        return [cls(ids, *how) for ids in parts]

    def _route(self, ids: torch.Tensor) -> None:
        """The order of copies for the experts that are here; ids count from the first of these."""
        self.routing = tables(ids, self.local, self.multiple, self.capacity)

    def _trim(self, ends: list[int] | None) -> list[int] | None:
        """The tables without what no expert has, and the ends of these, if they are known."""
        if self.capacity is not None:
            ends = [i * (len(self.routing.source) // self.local) for i in range(self.local + 1)]
        elif ends is not None:
            self.routing = replace(self.routing, source=self.routing.source[: ends[-1]])
        return ends


class AllGather(Dispatcher):
    """By all-gather and reduce-scatter over etp x ep; all ranks have as many tokens. Sends ids at once."""

    def _begin(self, ids: torch.Tensor) -> None:
        axis = self.axes.etp_ep
        self._route(all_gather(ids, axis) - self.axes.ep.rank * self.local)
        asked = axis.size > 1 and self.capacity is None
        self.ends = OnTheWay(self.routing.offsets).read if asked else lambda: None

    def start_send(self, x: torch.Tensor, probs: torch.Tensor, ahead: Ahead) -> Callable[[], Rows]:
        """Goes on with what has set out."""
        begun, trip = ahead
        self.probs = start_gather(probs, self.axes.etp_ep)
        self.blocks = moe_pieces.Blocks(self.routing, self._ranks(self.axes), self.fused)
        ends = self._trim(self.ends())
        self.blocks.routing = self.routing

        def finish() -> Rows:
            rows = moe_pieces.PermuteFunction.apply(begun, trip, self.blocks)
            return rows, self.routing.offsets, ends, trip.works

        return finish

    def start_back(self, rows: torch.Tensor, early: list | None = None) -> Callable[[], torch.Tensor]:
        """Adds up each rank's sums one after the other, and sends them meanwhile."""
        trip = moe_pieces.Trip(None, partial(moe_pieces.start_pieces, axis=self.blocks.axis), None, early)
        begun = moe_pieces.UnpermuteFunction.apply(rows, self.probs(), trip, self.blocks)
        return partial(moe_pieces.FinishFunction.apply, begun, trip)

    @staticmethod
    def _ranks(axes: MoeAxes) -> Axis:
        """All that share the tokens; two halves are under way at once."""
        return axes.etp_ep

    @classmethod
    def set_out(cls, x: torch.Tensor, axes: MoeAxes) -> Ahead:
        """Begin to gather x."""
        axis, works = cls._ranks(axes), None
        if x.requires_grad and axis.size > 1:
            works = Soon()
        trip = moe_pieces.Trip(partial(moe_pieces.start_pieces, axis=axis), None, works)
        return moe_pieces.StartFunction.apply(x, trip), trip


class AllToAll(Dispatcher):
    """By all-to-all over ep and over etp; ranks may have any numbers of tokens, unless there is a capacity.

    Made by `of` alone.
    """

    def _begin(self, ids: torch.Tensor) -> None:
        self.permute, self.unpermute = (permute, unpermute) if self.fused else (permute_ref, unpermute_ref)
        (t, k), ep, ranks = ids.shape, self.axes.ep.size, self.axes.etp_ep.size
        owner = ids.div(self.local, rounding_mode="floor")
        again = (owner[:, :, None] == owner[:, None, :]).tril(-1).any(2)
        each = None if self.capacity is None else min(self.capacity // ranks * self.local, t)
        found, self.ids = tables(owner.masked_fill(again, -1), ep, 1, each), ids
        most = t * min(k, ep) if each is None else None
        self.going = replace(found, source=found.source[:most])  # tokens in order of ranks
        self.sizes = lambda: ([each] * ep, [each] * ranks, None)

    @classmethod
    def of(
        cls, parts: Sequence[torch.Tensor], experts: int, axes: MoeAxes, capacity: int | None = None, *how
    ) -> list[Dispatcher]:
        """As Dispatcher's; sends ep + E counts of each part at once to all of etp x ep, and to the host."""
        ep, ranks, n = axes.ep, axes.etp_ep, len(parts)
        ways = super().of(parts, experts, axes, capacity, *how)
        if capacity is not None:
            return ways
        going = torch.stack([way.going.offsets.diff() for way in ways])  # rows for each ep rank
        copies = torch.stack([route(ids, experts).counts for ids in parts])
        every = all_gather(torch.cat((going, copies), 1)[None], ranks)
        come, counts = every[:, :, ep.rank].t(), every[:, :, ep.size :].sum(0)
        mine = padded(counts.view(n, ep.size, -1)[:, ep.rank], ways[0].multiple)
        numbers = OnTheWay(torch.cat((going, come, mine), 1))

        def sizes(i: int) -> tuple[list[int], list[int], list[int]]:
            row = numbers.read()[i]
            ends = accumulate(row[ep.size + ranks.size :], initial=0)
            return row[: ep.size], row[ep.size :][: ranks.size], list(ends)

        for i, way in enumerate(ways):
            way.sizes = partial(sizes, i)
        return ways

    def start_send(self, x: torch.Tensor, probs: torch.Tensor, ahead: None) -> Callable[[], Rows]:
        """Tokens travel over ep meanwhile."""
        told = torch.cat((probs, self.ids + 1.0), dim=1)  # in padding 0 and 0
        rows, told = (self.permute(v, self.going) for v in (x, told))
        ep, etp = self.axes.ep, self.axes.etp
        going, coming, ends = self.sizes()
        here = coming[etp.rank :: etp.size]
        self.to_ep = ep, going, here
        self.to_etp = etp, [sum(here)] * etp.size, [sum(coming[i :: etp.size]) for i in range(etp.size)]
        self.going = replace(self.going, source=self.going.source[: sum(going)])
        works = Soon() if x.requires_grad and ep.size > 1 else None
        arrive = start_exchange(rows, *self.to_ep, works), start_exchange(told, *self.to_ep)

        def finish() -> Rows:
            rows, told = (self._to_etp(come()) for come in arrive)
            probs, ids = told.chunk(2, dim=1)
            self.probs = probs.contiguous()
            self._route(ids.detach().int() - (1 + ep.rank * self.local))
            ends_here = self._trim(ends)
            return self.permute(rows, self.routing), self.routing.offsets, ends_here, works

        return finish

    def _to_etp(self, x: torch.Tensor) -> torch.Tensor:
        """What has come to all the etp ranks that share an expert."""
        size = self.axes.etp.size
        return x if size == 1 else exchange(x.repeat(size, 1), *self.to_etp)

    def start_back(self, rows: torch.Tensor, early: list | None = None) -> Callable[[], torch.Tensor]:
        """Sums travel over ep meanwhile."""
        y = self.unpermute(rows, self.routing, self.probs)
        axis, send, receive = self.to_etp
        if axis.size > 1:
            y = exchange(y, axis, receive, send).view(axis.size, send[0], y.shape[1]).sum(0)
        axis, send, receive = self.to_ep
        arrive = start_exchange(y, axis, receive, send, None, early)
        return lambda: self.unpermute(arrive(), self.going)


DISPATCHERS = {"allgather": AllGather, "alltoall": AllToAll}


def dispatcher(kind: str, axes: MoeAxes) -> type[Dispatcher]:
    """Of this kind, unless there is one rank, which has nothing to send."""
    return DISPATCHERS[kind] if axes.etp_ep.size > 1 else AllGather


class Journey:
    """Tokens x `[t, h]` to their experts and back, of which each part begins when what it needs is known."""

    def __init__(self, x: torch.Tensor, experts: GroupedExperts, axes: MoeAxes, kind: str) -> None:
        """What needs no ids sets out. kind: of dispatcher, which communicates as it says."""
        self.experts, self.axes, self.dispatcher = experts, axes, dispatcher(kind, axes)
        self.parts = cut(x, 1 + axes.halves)
        self.ahead = [self.dispatcher.set_out(part, axes) for part in self.parts]

    def route(self, ids: torch.Tensor) -> None:
        """Tell which experts: int32 `[t, k]`, -1 for none. The sizes of messages set out to the host."""
        config = self.experts.config
        capacity = expert_capacity(len(ids), config) if config.moe_pad_expert_input_to_capacity else None
        how = capacity, self.experts.multiple, config.moe_permute_fusion
        ids = cut(ids, len(self.parts))
        self.ways: list[Dispatcher] = self.dispatcher.of(ids, config.num_experts, self.axes, *how)

    def sums(self, probs: torch.Tensor, meanwhile: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Each token's sum of what its experts make of it, times probs fp32 `[t, k]`: `[t, h]`.

        meanwhile: launches other work, before the host waits for sizes, or with moe_shared_expert_overlap
        while x travels.
        """
        late = self.experts.config.moe_shared_expert_overlap
        if not late:
            meanwhile()
        parts = zip(self.ways, self.parts, cut(probs, len(self.ways)), self.ahead, strict=True)
        coming = [way.start_send(*part) for way, *part in parts]
        if late:
            meanwhile()
        going = []
        for way in self.ways:
            # Not of both halves at once. What has come is let go of, and what was made of it.
            early: list[Callable] | None = [] if len(self.ways) == 1 else None
            going.append(way.start_back(self.experts(*coming.pop(0)(), early), early))
        found = [arrive() for arrive in going]
        return found[0] if len(found) == 1 else torch.cat(found)


def cut(x: torch.Tensor, parts: int) -> Sequence[torch.Tensor]:
    """The rows of x in parts, as even as can be, some perhaps of none."""
    places = [len(x) * i // parts for i in range(parts + 1)]
    return [x] if parts == 1 else x.split([end - start for start, end in pairwise(places)])

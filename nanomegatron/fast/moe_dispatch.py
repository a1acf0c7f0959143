"""Same result as `moe.MoELayer.run`, with its communication overlapped with other work.

    AllGatherInPieces    each rank fetches the others' tokens, one rank's at a time, and works on those before
    AsyncAllToAll        each token is sent to the ranks of its experts, while other tokens are worked on

In the backward their timelines run from right to left, as autograd does: if the forward does work between the
start and the end of an exchange, its backward lies between the start and the end of the gradients' exchange.

Gain: one layer of Qwen3-30B-A3B by all-gather on four H200, forward and backward: 9.18 ms, 10.64 with whole
collectives (benchmarks/results/2026-11-22-moe-layer-four-in-step.json, -pieces-before.json).
(Overlap in finer pieces: Comet, 2502.19811)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import torch

from nanomegatron.batch import Batch
from nanomegatron.comm import (
    Pending,
    all_gather,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from nanomegatron.fast.host_copy import AsyncHostCopy
from nanomegatron.fast.moe_pieces import (
    AsyncExchange,
    FinishExchange,
    GatherPermute,
    InBackward,
    OverlappedWgrads,
    RankBlocks,
    StartExchange,
    UnpermuteScatter,
    start_pieces,
)
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.mesh import Axis
from nanomegatron.moe import (
    AllGatherDispatch,
    AllToAllDispatch,
    ExchangeSizes,
    GroupedExperts,
    MoELayer,
    pack_choices,
    unpack_choices,
)
from nanomegatron.ops.permute import Routing, padded, route

Finish = Callable[[], torch.Tensor]
Arrived = tuple[torch.Tensor, torch.Tensor, list[int] | None]  # rows `[r, h]`, offsets `[e + 1]`, on the host


class OverlappedMoe:
    """A `MoELayer.run` that overlaps communication with other work. x `[s, b, h]` -> `[s, b, h]`, or of s/tp

    `MoELayer.dispatcher` becomes the constructor of a dispatch, which gets its tokens; then come set_routing
    (for all parts of a batch at once), start_dispatch and start_combine. The last two return the function
    that finishes what they started.

    The number of rows that arrive is known on the GPU, but messages and memory need it on the host. Its copy
    starts before the router's losses are computed, and is read after all else is launched, for both halves at
    once if there are halves: only then the host waits, and not for the GPU's whole queue. If every expert's
    rows are padded to one capacity, or one rank has all experts, it does not wait.
    """

    def __init__(self, peers: PeerAccess | None, halves: bool = False) -> None:
        """halves: interleave halves of the tokens (--overlap-moe-expert-parallel-comm), by collectives.

        prefetch: what makes the discarded activations of the experts that have just run, for the backward to
        call early; `discard_output.discarding_project` adds it.
        """
        self.peers, self.halves = None if halves else peers, halves  # peer memory serves one call at a time
        self.prefetch: list[Callable] = []

    def install(self, layer: MoELayer) -> None:
        """Make the layer use this; to be called before its parameters are put into buckets."""
        layer.run = self
        kind = AsyncAllToAll if isinstance(layer.dispatcher, AllToAllDispatch) else AllGatherInPieces
        layer.dispatcher = partial(kind, layer.dispatcher, self.peers)
        for weight in (layer.experts.weight1, layer.experts.weight2) if self.halves else ():
            weight.spec = replace(weight.spec, uses=2)

    def describe(self, axis: Axis, dispatcher: str) -> str:
        """How tokens are sent, for the banner."""
        if dispatcher == "alltoall":
            return "tokens sent by asynchronous all-to-all"
        by = self.peers.describe(axis) if self.peers else "asynchronous collectives"
        return f"tokens in blocks, sent by {by}"

    def __call__(self, layer: MoELayer, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        tokens, parts = x.flatten(0, 1), 1 + self.halves
        y_shared = None
        late = layer.experts.config.moe_shared_expert_overlap
        ways = [layer.dispatcher(part) for part in split_rows(tokens, parts)]

        output = layer.router.choose(tokens, batch)
        ways[0].set_routing(ways, split_rows(output.ids, parts))
        probs = layer.router.balance(output, batch)

        if layer.shared_experts is not None and not late:
            y_shared = layer.apply_shared_experts(x)
        arriving = [
            way.start_dispatch(part) for way, part in zip(ways, split_rows(probs, parts), strict=True)
        ]
        if layer.shared_experts is not None and late:
            y_shared = layer.apply_shared_experts(x)

        leaving = []
        for way in ways:
            y = run_experts(layer.experts, way.wgrads, *arriving.pop(0)())
            recompute = [] if self.halves else [*self.prefetch]  # both would recompute at once
            self.prefetch.clear()
            leaving.append(way.start_combine(y, recompute))
            del y  # so that its memory is freed before the end
        found = [finish() for finish in leaving]
        y = (torch.cat(found) if self.halves else found[0]).view_as(x)
        return y if y_shared is None else y + y_shared


def run_experts(
    experts: GroupedExperts,
    wgrads: OverlappedWgrads | None,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    ends: list[int] | None,
) -> torch.Tensor:
    """Run the experts on their rows; the backward defers the weight gradients of `wgrads`.

    rows `[r, h]`, offsets int32 `[e + 1]` -> `[r, h]`
    """
    if wgrads is None:
        return experts(rows, offsets, ends)
    rows = InBackward.apply(rows, wgrads.stop)
    return InBackward.apply(experts(rows, offsets, ends), wgrads.collect)


class AllGatherInPieces:
    """All-gather and reduce-scatter over etp x ep, in one block per rank (`moe_pieces.py`).

    x `[t, h]` is sent before the router has its ids. With 4 ranks whose GPUs access each other's memory:

    forward
        network         x1 ----> x2 ----> x3 ---->                      to 1 --> to 2 --> to 3 -->
        GPU       copy  router  losses  own  x1  x2  x3  experts  for 1 for 2 for 3 own     wait  sum
    backward
        network         dy1 ---> dy2 ---> dy3 --->                to 1 --> to 2 --> to 3 -->
        GPU       copy  again  own  dy1  dy2  dy3  experts  for 1 for 2 for 3 own  first dW  router  sum

    network: copies by copy engines, which take no multiprocessors from the GPU. `own`, `x1`: that rank's
    tokens are permuted; `for 1`, `own`: their sums; `again`: the experts recompute activations. So
    recomputation overlaps with the gradients of y in flight; the weight gradients of the experts' first
    layers and the router's backward overlap with the gradients of x. Elsewhere collectives replace the
    copies: own tokens are permuted meanwhile, the others' when all have arrived, and of the weight gradients
    only the addition to main_grad overlaps. Probs and ids are always sent by collectives, probs while the
    experts run.
    """

    def __init__(self, plain: AllGatherDispatch, peers: PeerAccess | None, x: torch.Tensor) -> None:
        """plain: the layer's dispatcher in the core, whose tables this uses."""
        self.plain, self.peers = plain, peers
        self.axis = axis = plain.mesh.etp_ep
        self.wgrads = None
        if x.requires_grad and axis.size > 1:
            memory = peers.memory(axis, x.device, "reduce_scatter") if peers else None
            self.wgrads = OverlappedWgrads(plain.experts.weight1, beside_nccl=memory is None)
        self.exchange = AsyncExchange(
            partial(start_pieces, axis=axis, peers=peers), None, [self.wgrads.run] if self.wgrads else []
        )
        self.started = StartExchange.apply(x, self.exchange)

    @staticmethod
    def set_routing(ways: list["AllGatherInPieces"], ids: Sequence[torch.Tensor]) -> None:
        """All-gather ids int32 `[t, k]` (-1: a dropped copy); start to copy the offsets to the host."""
        for way, part in zip(ways, ids, strict=True):
            capacity = way.plain.capacity(len(part))
            way.routing = way.plain.route_to_experts(all_gather(part, way.axis), capacity)
            if capacity is not None:
                way.ends = partial(padded_ends, way.routing, way.plain.local_experts)
            else:
                way.ends = AsyncHostCopy(way.routing.offsets).read if way.axis.size > 1 else lambda: None

    def start_dispatch(self, probs: torch.Tensor) -> Callable[[], Arrived]:
        """Start to gather probs fp32 `[t, k]`; the host waits for the offsets.

        -> a function that waits for the tokens and returns what the experts get
        """
        self.probs = start_gather_seq(probs, self.axis)
        self.blocks = RankBlocks(self.routing, self.axis, self.plain.config.moe_permute_fusion, self.peers)
        ends = self.ends()
        self.blocks.routing = routing = cut_to(self.routing, ends)
        return lambda: (GatherPermute.apply(self.started, self.exchange, self.blocks), routing.offsets, ends)

    def start_combine(self, rows: torch.Tensor, recompute: list[Callable]) -> Finish:
        """Start to send each rank the sums of its tokens, while the next rank's are added.

        rows `[r, h]` -> a function that returns `[t, h]` as `TokenDispatch.combine`; recompute: functions for
        the backward to call while the gradient of the result is in flight.
        """
        forward = partial(start_pieces, axis=self.axis, peers=self.peers)
        exchange = AsyncExchange(None, forward, recompute)
        started = UnpermuteScatter.apply(rows, self.probs(), exchange, self.blocks)
        return partial(FinishExchange.apply, started, exchange)


class AsyncAllToAll:
    """All-to-all over ep, then over etp, of x `[t, h]`.

    The addition of weight gradients and the recomputation of activations overlap with it, and with one of two
    settings other work; the second setting works with `AllGatherInPieces` too, by collectives:

    --moe-shared-expert-overlap
        network            dispatch ------------->                         combine ->
        GPU       permute       shared experts      experts of all tokens            sum

    --overlap-moe-expert-parallel-comm, halves 1 and 2 of a rank's tokens
        network              dispatch 1 -> dispatch 2 ---->  combine 1 ----->  combine 2 -->
        GPU       permute 1  permute 2     experts of 1      experts of 2      sum 1         sum 2
    """

    def __init__(self, plain: AllToAllDispatch, peers: PeerAccess | None, x: torch.Tensor) -> None:
        """plain: the layer's dispatcher in the core, whose tables and exchange over etp this uses."""
        self.plain, self.x = plain, x
        communicates = x.requires_grad and plain.mesh.ep.size > 1
        self.wgrads = OverlappedWgrads(plain.experts.weight1, beside_nccl=True) if communicates else None

    @staticmethod
    def set_routing(ways: list["AsyncAllToAll"], ids: Sequence[torch.Tensor]) -> None:
        """All-gather ep + E counts of each part over etp x ep, at once; start to copy them to the host.

        ids int32 `[t, k]`
        """
        plain = ways[0].plain
        for way, part in zip(ways, ids, strict=True):
            way.ids, way.rows_each = part, way.plain.capacity(len(part))
            way.to_ranks = way.plain.route_to_ranks(part, way.rows_each)
            if way.rows_each is None:
                most = len(part) * min(part.shape[1], way.plain.mesh.ep.size)
                way.to_ranks = replace(way.to_ranks, source=way.to_ranks.source[:most])
        if ways[0].rows_each is not None:
            return
        ep, ranks, experts = plain.mesh.ep, plain.mesh.etp_ep, plain.config.num_experts
        sent = torch.stack([way.to_ranks.offsets.diff() for way in ways])  # rows for each ep rank
        copies = torch.stack([route(part, experts).counts for part in ids])
        every = all_gather(torch.cat((sent, copies), 1)[None], ranks)
        received, counts = every[:, :, ep.rank].t(), every[:, :, ep.size :].sum(0)
        mine = padded(counts.view(len(ways), ep.size, -1)[:, ep.rank], plain.experts.multiple)
        numbers = AsyncHostCopy(torch.cat((sent, received, mine), 1))
        for i, way in enumerate(ways):
            way.numbers = lambda i=i: numbers.read()[i]

    def sizes(self) -> tuple[list[int], list[int], list[int] | None]:
        """Rows sent to each ep rank, received from each of etp x ep, and experts' offsets; waits for them."""
        ep, ranks = self.plain.mesh.ep.size, self.plain.mesh.etp_ep.size
        if self.rows_each is not None:
            rows = len(self.to_ranks.source) // ep
            return [rows] * ep, [rows] * ranks, None
        row = self.numbers()
        return row[:ep], row[ep:][:ranks], list(accumulate(row[ep + ranks :], initial=0))

    def start_dispatch(self, probs: torch.Tensor) -> Callable[[], Arrived]:
        """Start to send tokens and probs fp32 `[t, k]` -> a function that finishes the dispatch."""
        choices = self.plain.permute(pack_choices(probs, self.ids), self.to_ranks)
        x = self.plain.permute(self.x, self.to_ranks)
        ep, etp = self.plain.mesh.ep, self.plain.mesh.etp
        sent, received, ends = self.sizes()
        here = received[etp.rank :: etp.size]
        arrived = [sum(received[i :: etp.size]) for i in range(etp.size)]
        self.over_ep = ExchangeSizes(sent, here)
        self.over_etp = ExchangeSizes([sum(here)] * etp.size, arrived)
        self.to_ranks = replace(self.to_ranks, source=self.to_ranks.source[: sum(sent)])
        come = (
            start_exchange(x, ep, *self.over_ep, [self.wgrads.run] if self.wgrads else []),
            start_exchange(choices, ep, *self.over_ep),
        )
        return partial(self.finish_dispatch, come, ends)

    def finish_dispatch(self, come: tuple[Finish, Finish], ends: list[int] | None) -> Arrived:
        """Wait for the rows, gather them over the etp ranks, and permute them to the order of experts."""
        rows, choices = [self.plain.gather_over_etp(finish(), self.over_etp) for finish in come]
        self.probs, ids = unpack_choices(choices)
        routing = self.plain.route_to_experts(ids, self.rows_each)
        ends = padded_ends(routing, self.plain.local_experts) if ends is None else ends
        self.routing = cut_to(routing, ends)
        return self.plain.permute(rows, self.routing), routing.offsets, ends

    def start_combine(self, rows: torch.Tensor, recompute: list[Callable]) -> Finish:
        """Start to send rows `[r, h]` back -> a function that returns what `TokenDispatch.combine` does."""
        sent, received = self.over_ep
        y = self.plain.unpermute(rows, self.routing, self.probs)
        y = self.plain.scatter_over_etp(y, self.over_etp)
        arrive = start_exchange(y, self.plain.mesh.ep, received, sent, recompute)
        return lambda: self.plain.unpermute(arrive(), self.to_ranks)


def padded_ends(routing: Routing, experts: int) -> list[int]:
    """The `experts + 1` offsets, from 0, of experts' rows padded to a capacity: known without the GPU."""
    return [i * (len(routing.source) // experts) for i in range(experts + 1)]


def cut_to(routing: Routing, ends: list[int] | None) -> Routing:
    """The tables without the rows past the last expert's, if the host knows the offsets, `ends`."""
    return routing if ends is None else replace(routing, source=routing.source[: ends[-1]])


def start(x: torch.Tensor, exchange: AsyncExchange) -> Finish:
    """Start an exchange of x `[n, ...]` -> a function that waits for the rows received. Differentiable."""
    return partial(FinishExchange.apply, StartExchange.apply(x, exchange), exchange)


def start_gather_seq(x: torch.Tensor, axis: Axis) -> Finish:
    """Start `comm.gather_seq` of x `[n, ...]` -> a function that waits for it and returns `[n*size, ...]`"""
    if axis.size == 1:
        return lambda: x
    return start(
        x, AsyncExchange(partial(start_all_gather, axis=axis), partial(start_reduce_scatter, axis=axis))
    )


def start_exchange(
    x: torch.Tensor, axis: Axis, send: list[int], receive: list[int], meanwhile: list[Callable] | None = None
) -> Finish:
    """Start `comm.all_to_all` of x `[n, ...]` -> a function that waits for the rows received.

    Rows of x after those sent may get any gradient.
    """
    if axis.size == 1:
        return lambda: x[: sum(send)]

    def forward(x: torch.Tensor) -> Pending:
        return start_all_to_all(x[: sum(send)], axis, send, receive)

    backward = partial(start_all_to_all, axis=axis, send=receive, receive=send, rows=len(x))
    return start(x, AsyncExchange(forward, backward, meanwhile))


def split_rows(x: torch.Tensor, parts: int) -> Sequence[torch.Tensor]:
    """Split x `[t, ...]` into parts of nearly equal size, some perhaps empty -> `[t/parts, ...]` each"""
    places = [len(x) * i // parts for i in range(parts + 1)]
    return [x] if parts == 1 else x.split([end - start for start, end in pairwise(places)])

"""Same result as `moe.AllGatherDispatch`, its gathers and reduce-scatters in one block per rank.

    dispatch  StartExchange  . . . . . . . . . . . . GatherPermute            experts
                gather x in pieces                     permute each block as it arrives
                sum the gradients received             unpermute each rank's gradients, and send them

    combine   UnpermuteScatter . . . . . . . . . . . FinishExchange           experts' results
                sum rows for each rank, and send       sum the blocks received
                permute each block of dy as it         gather dy in pieces
                arrives, times probs; dprobs

The lower lines of each are the backward, which runs from right to left: there too one of a pair starts the
communication and the other waits for it. An all-to-all, in one piece, has StartExchange and FinishExchange.

Gain: that of `moe_dispatch.py`, which puts these together if there is work to hide behind: with experts that
do nothing, dispatch and combine take 4.15 ms in place of 3.96
(benchmarks/results/2026-11-22-moe-layer-four-in-step.json, four H200).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nanomegatron.comm import Pending
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.pieces import gather_pieces, scatter_pieces
from nanomegatron.mesh import Axis
from nanomegatron.ops.kernels import once
from nanomegatron.ops.permute import Routing, permute_block, unpermute_block
from nanomegatron.param import WeightGradStore

Start = Callable[[torch.Tensor], Any]
Arriving = tuple[torch.Tensor, torch.Tensor, list[tuple[slice, Any]]]  # x, and what `gather_pieces` returns


class AsyncExchange:
    """Rows in flight to other ranks; in the backward their gradients in flight back.

    meanwhile: functions that the backward calls, once, while gradients are in flight.
    """

    def __init__(
        self, forward_comm: Start | None, backward_comm: Start | None, meanwhile: list[Callable] | None = None
    ) -> None:
        self.forward_comm, self.backward_comm = forward_comm, backward_comm
        self.meanwhile = [] if meanwhile is None else meanwhile
        self.pending: list = []  # the one in flight; popped, so that its memory is freed

    def wait(self) -> torch.Tensor:
        """The rows received -> `[n, ...]`"""
        return self.pending.pop().wait()

    def run_meanwhile(self) -> None:
        while self.meanwhile:
            self.meanwhile.pop()()


class StartExchange(torch.autograd.Function):
    """Start an exchange; the backward waits for the gradient of x.

    x `[n, ...]` -> `[0]`, an empty tensor that links FinishExchange to this in the autograd graph
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, exchange: AsyncExchange) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.pending.append(exchange.forward_comm(x))
        return x.new_empty(0)

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.exchange.run_meanwhile()
        return ctx.exchange.wait(), None


class FinishExchange(torch.autograd.Function):
    """Wait for an exchange; the backward starts the exchange of the gradients.

    started `[0]`, from its StartExchange -> the rows received `[n, ...]`
    """

    @staticmethod
    def forward(ctx, started: torch.Tensor, exchange: AsyncExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.exchange.pending.append(ctx.exchange.backward_comm(grad))
        return grad.new_empty(0), None


class InBackward(torch.autograd.Function):
    """Return x `[...]` -> `[...]` unchanged; the backward calls a function."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return grad, None


class AdditionStore(WeightGradStore):
    """A store whose queue runs beside NCCL's kernels: of a grouped matmul it gets only the addition.

    The matmul, whose thread blocks need all multiprocessors at once, would wait for them; it runs at once.
    """

    grouped_matmuls = False


class OverlappedWgrads:
    """Gradients of one weight, deferred from its backward until other gradients are in flight.

    A pipeline that defers all weight gradients of this backward keeps these, too.
    """

    def __init__(self, weight: nn.Parameter, beside_nccl: bool) -> None:
        """beside_nccl: the gradients in flight are sent by NCCL; else by copy engines."""
        self.weight, self.store = weight, AdditionStore() if beside_nccl else WeightGradStore()
        self.wgrad_queue: list = []
        self.pipeline: WeightGradStore | None = None

    def collect(self) -> None:
        """Defer this weight's gradient from here on, unless a pipeline defers it already."""
        self.pipeline = getattr(self.weight, "wgrad_store", None)
        if self.pipeline is None or self.pipeline.queue is None:
            self.weight.wgrad_store, self.store.queue = self.store, self.wgrad_queue

    def stop(self) -> None:
        self.weight.wgrad_store = self.pipeline

    def run(self) -> None:
        WeightGradStore.run(self.wgrad_queue)
        self.wgrad_queue.clear()


def start_pieces(x: torch.Tensor, axis: Axis, peers: PeerAccess | None) -> Arriving:
    """Start to gather x `[t, h]` over the axis, a block per rank."""
    x = x.contiguous()
    return x, *gather_pieces(x, axis, peers)


class RankBlocks:
    """Permutes all ranks' tokens for this rank's experts, and back, in one block per rank of the axis.

    routing: before `permute` the caller replaces it by one that is cut to the number of rows. The constructor
    does not need that number, so it can run before the host knows it.
    """

    def __init__(self, routing: Routing, axis: Axis, fused: bool, peers: PeerAccess | None) -> None:
        self.routing, self.fused = routing, fused
        self.axis, self.peers = axis, peers
        self.tables = [routing.block(self.tokens_of(rank)) for rank in range(axis.size)]

    def tokens_of(self, rank: int) -> slice:
        n = len(self.routing.position) // self.axis.size
        return slice(rank * n, (rank + 1) * n)

    def permute(self, arriving: Arriving, probs=None, z=None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`ops.permute.permute` of blocks of tokens as they arrive; with z also the gradient of probs.

        probs fp32 `[t*ranks, k]`, z `[r, h]` -> `[r, h]`, `[t*ranks, k]`
        """
        x, gathered, arrivals = arriving
        out = x.new_empty(len(self.routing.source), x.shape[1])
        dots = None if z is None else torch.empty_like(probs)

        def order(block: torch.Tensor, tokens: slice, table: Routing) -> None:
            given = None if probs is None else probs[tokens]
            found = permute_block(out, block, table, given, z, self.fused)
            if dots is not None:
                dots[tokens] = found

        own = self.tokens_of(self.axis.rank)
        order(x, own, replace(self.tables[self.axis.rank], source=self.routing.source))  # the padding too
        for tokens, arrival in arrivals:
            arrival.wait()
            if tokens != own:
                order(gathered[tokens], tokens, self.routing.block(tokens))
        return out, dots

    def unpermute(self, z: torch.Tensor, probs: torch.Tensor | None = None) -> Pending:
        """Start to send each rank `ops.permute.unpermute` of its tokens; the result: the sum of the parts.

        z `[r, h]`, probs fp32 `[t*ranks, k]`; the result `[t, h]`
        """
        z = z.contiguous()

        def make(rank: int, out: torch.Tensor) -> None:
            given = None if probs is None else probs[self.tokens_of(rank)]
            unpermute_block(out, z, self.tables[rank], given, self.fused)

        whole = z.new_empty(len(self.routing.position), z.shape[1])
        return scatter_pieces(make, whole, self.axis, self.peers)


class GatherPermute(torch.autograd.Function):
    """Finish a gather, with rows permuted to the order of experts; the backward starts the reduce-scatter.

    started `[0]`, from the StartExchange -> `[r, h]`
    """

    @staticmethod
    def forward(ctx, started: torch.Tensor, exchange: AsyncExchange, blocks: RankBlocks) -> torch.Tensor:
        ctx.exchange, ctx.blocks = exchange, blocks
        return blocks.permute(exchange.pending.pop())[0]

    @staticmethod
    @once
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.exchange.pending.append(ctx.blocks.unpermute(grad))
        ctx.exchange.run_meanwhile()
        return grad.new_empty(0), None, None


class UnpermuteScatter(torch.autograd.Function):
    """Start the reduce-scatter of rows times probs; the backward finishes the gather of the gradients.

    z `[r, h]`, probs fp32 `[t*ranks, k]` -> `[0]`, for FinishExchange
    """

    @staticmethod
    def forward(
        ctx, z: torch.Tensor, probs: torch.Tensor, exchange: AsyncExchange, blocks: RankBlocks
    ) -> torch.Tensor:
        z, probs = z.contiguous(), probs.contiguous()
        ctx.exchange, ctx.blocks = exchange, blocks
        ctx.save_for_backward(z if ctx.needs_input_grad[1] else None, probs)
        exchange.pending.append(blocks.unpermute(z, probs))
        return z.new_empty(0)

    @staticmethod
    @once
    def backward(ctx, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        z, probs = ctx.saved_tensors
        ctx.exchange.run_meanwhile()
        return *ctx.blocks.permute(ctx.exchange.pending.pop(), probs, z), None, None

"""Trips of tokens: there and their gradients back, as a whole or in the blocks of the ranks.

    there     StartFunction  . . . . . . . . . . . . PermuteFunction          experts
                x set out: gather in pieces            each block, as it comes, to the order of experts
                the sum of what came back              each rank's gradients unpermuted, and sent

    back      UnpermuteFunction  . . . . . . . . . . FinishFunction           experts' results
                each rank's sums of rows, and sent     the sum of what came
                each block of dy, as it comes,         dy set out: gather in pieces
                permuted times probs; dprobs

The lower line is the backward, from right to left: what is begun by one of a pair is waited for by the other,
there too. A whole trip has a StartFunction and a FinishFunction.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nanomegatron.comm import Pending
from nanomegatron.fast.pieces import gather_pieces, scatter_pieces
from nanomegatron.mesh import Axis
from nanomegatron.ops.kernels import once
from nanomegatron.ops.permute import Routing, permute_block, unpermute_block
from nanomegatron.param import Soon, WeightGradStore

Start = Callable[[torch.Tensor], Any]
Coming = tuple[torch.Tensor, torch.Tensor, list[tuple[slice, Any]]]  # x, and what `gather_pieces` gives


class Trip:
    """Rows travel there, and their gradients back; one of the two is under way.

    works: work on weight gradients that comes up before the way back, to be done meanwhile. early: what
    can be made again before it is asked for, also then.
    """

    def __init__(
        self,
        there: Start | None,
        back: Start | None,
        works: Soon | None = None,
        early: list[Callable] | None = None,
    ) -> None:
        self.there, self.back, self.works, self.early = there, back, works, early
        self.under_way: list = []

    def wait(self) -> torch.Tensor:
        return self.under_way.pop().wait()

    def do_works(self) -> None:
        if self.works:
            WeightGradStore.run(self.works)
            self.works.clear()


class StartFunction(torch.autograd.Function):
    """Starts a trip of x; in the backward waits for the way back."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, trip: Trip) -> torch.Tensor:
        ctx.trip = trip
        trip.under_way.append(trip.there(x))
        return x.new_empty(0)

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.trip.do_works()
        return ctx.trip.wait(), None


class FinishFunction(torch.autograd.Function):
    """Waits for what was started, whose output it is given; in the backward starts the way back."""

    @staticmethod
    def forward(ctx, _: torch.Tensor, trip: Trip) -> torch.Tensor:
        ctx.trip = trip
        return trip.wait()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.trip.under_way.append(ctx.trip.back(grad))
        while ctx.trip.early:
            ctx.trip.early.pop()()  # which is let go of, with what it is made from
        return grad.new_empty(0), None


def start_pieces(x: torch.Tensor, axis: Axis) -> Coming:
    """Begin to hand x to all ranks of the axis."""
    x = x.contiguous()
    return x, *gather_pieces(x, axis, None)


class Blocks:
    """The order of all ranks' tokens for the experts here, and whom their blocks go to.

    routing: its source is to be as long as there are rows before any are permuted. What can be done before
    that is known is done at once.
    """

    def __init__(self, routing: Routing, axis: Axis, fused: bool) -> None:
        self.routing, self.axis, self.fused = routing, axis, fused
        self.tables: dict[tuple[int, int], Routing] = {}
        for rank in range(axis.size):
            self.table(self.of(rank))

    def of(self, rank: int) -> slice:
        """Tokens of a rank."""
        n = len(self.routing.position) // self.axis.size
        return slice(rank * n, (rank + 1) * n)

    def table(self, tokens: slice) -> Routing:
        """Their routing, without padding."""
        place = tokens.start, tokens.stop
        if place not in self.tables:
            self.tables[place] = self.routing.block(tokens)
        return self.tables[place]

    def permute(self, coming: Coming, probs=None, z=None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`ops_moe.permute` of blocks as they come, and with z the gradient of probs."""
        x, gathered, arrivals = coming
        out = x.new_empty(len(self.routing.source), x.shape[1])
        dots = None if z is None else torch.empty_like(probs)

        def order(block: torch.Tensor, tokens: slice, table: Routing) -> None:
            given = None if probs is None else probs[tokens]
            found = permute_block(out, block, table, given, z, self.fused)
            if dots is not None:
                dots[tokens] = found

        own = self.of(self.axis.rank)
        order(x, own, replace(self.table(own), source=self.routing.source))  # the padding too
        for tokens, arrival in arrivals:
            arrival.wait()
            if tokens != own:
                order(gathered[tokens], tokens, self.table(tokens))
        return out, dots

    def unpermute(self, z: torch.Tensor, probs: torch.Tensor | None = None) -> Pending:
        """Begin to send each rank `ops_moe.unpermute` of its tokens; the result is the sum of the parts."""
        z = z.contiguous()

        def make(rank: int, out: torch.Tensor) -> None:
            tokens = self.of(rank)
            given = None if probs is None else probs[tokens]
            unpermute_block(out, z, self.table(tokens), given, self.fused)

        return scatter_pieces(make, z.new_empty(len(self.routing.position), z.shape[1]), self.axis, None)


class PermuteFunction(torch.autograd.Function):
    """The end of a trip there, to rows in order of experts; its output's gradient sets out back."""

    @staticmethod
    def forward(ctx, _: torch.Tensor, trip: Trip, blocks: Blocks) -> torch.Tensor:
        ctx.trip, ctx.blocks = trip, blocks
        return blocks.permute(trip.under_way.pop())[0]

    @staticmethod
    @once
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.trip.under_way.append(ctx.blocks.unpermute(grad))
        ctx.trip.do_works()
        return grad.new_empty(0), None, None


class UnpermuteFunction(torch.autograd.Function):
    """The start of a trip back, of rows times probs fp32 `[t, k]`."""

    @staticmethod
    def forward(ctx, z: torch.Tensor, probs: torch.Tensor, trip: Trip, blocks: Blocks) -> torch.Tensor:
        z, probs, ctx.trip, ctx.blocks = z.contiguous(), probs.contiguous(), trip, blocks
        ctx.save_for_backward(z if ctx.needs_input_grad[1] else None, probs)
        trip.under_way.append(blocks.unpermute(z, probs))
        return z.new_empty(0)

    @staticmethod
    @once
    def backward(ctx, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        z, probs = ctx.saved_tensors
        return *ctx.blocks.permute(ctx.trip.under_way.pop(), probs, z), None, None

"""Same result as `comm.start_messages`, by a plan known to sender and receiver: messages or copy engines.

    plan of rank 1     sends    3 rows to rank 2, as rows 0 ... 2 of the 5 that arrive there
                       recvs    4 rows of rank 0, as rows 0 ... 3 of 6; 2 rows of rank 3, as rows 4, 5

A copy engine of the sender pushes rows to their places in the receiver's memory, and takes no multiprocessor
from attention. For that a sender must know where its rows go, and how many arrive there in all.

Gain: the ring at 128k tokens on 4 H200 at 0.971 of the rate of a GPU without communication, with messages at
0.919 (benchmarks/results/2026-11-22-cp-attention-four-ring.json, -four-messages.json; two machines).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nanomegatron.comm import Pending, start_messages
from nanomegatron.fast.peer_memory import PeerMemory
from nanomegatron.mesh import Axis


class Transfer(NamedTuple):
    """Rows for the rank `by` further on the axis; place: index of the first there, and how many arrive."""

    by: int
    rows: int
    place: tuple[int, int]


class TransferPlan(NamedTuple):
    """The transfers that this rank sends, and those that it receives, in the order of the result."""

    sends: list[Transfer]
    recvs: list[Transfer]


def start_transfers(
    parts: Sequence[Sequence[torch.Tensor]], like: Sequence[torch.Tensor], plan: TransferPlan, axis: Axis
) -> Pending:
    """Start to send the tensors of each part, by messages. The result: for each of `like` the rows received.

    parts `[rows, ...]`: the tensors of each transfer that is sent; like `[n, ...]`: a tensor like each of
    these, except for the number of rows.
    """
    rows = [transfer.rows for transfer in plan.recvs]
    outs = [x.new_empty(sum(rows), *x.shape[1:]) for x in like]
    sends = [
        (x.contiguous(), axis.rank + transfer.by)
        for part, transfer in zip(parts, plan.sends, strict=True)
        for x in part
    ]
    receives = [
        (piece, axis.rank - transfer.by)
        for out in outs
        for piece, transfer in zip(out.split(rows) if rows else (), plan.recvs, strict=True)
    ]
    return start_messages(sends, receives, outs, axis)


class PeerRing:
    """`start_transfers` by copy engines: each rank pushes tensors into another's memory.

    One call at a time. The result is in the memory of the ring, and must be read before the `kept`-th call
    after it is waited for.
    """

    def __init__(self, axis: Axis, device: torch.device, kept: int) -> None:
        self.axis, self.memory = axis, PeerMemory(axis, device, "send", 1 + kept)

    def start_transfers(
        self,
        parts: Sequence[Sequence[torch.Tensor]],
        like: Sequence[torch.Tensor],
        plan: TransferPlan,
        room: int,
    ) -> Pending:
        """As the function `start_transfers`; room: an upper bound of the bytes that any rank receives.

        parts `[rows, ...]`, like `[n, ...]`
        """
        memory, axis, copies = self.memory, self.axis, []
        sent = [x for part in parts for x in part]
        memory.begin(room, *sent)
        ready = memory.record(0)

        def all_rows(total: int, rank: int) -> torch.Tensor:
            return memory.views((len(like), total, *like[0].shape[1:]), like[0].dtype)[rank % axis.size]

        for part, transfer in zip(parts, plan.sends, strict=True):
            begin, total = transfer.place
            there = all_rows(total, axis.rank + transfer.by)[:, begin : begin + transfer.rows]
            copies += [(ready, *pair) for pair in zip(there, part, strict=True)]
        memory.copy(*copies)
        here = all_rows(sum(transfer.rows for transfer in plan.recvs), axis.rank)
        return Pending(here.unbind(0), [self], sent)

    def wait(self) -> None:
        """Make the current stream wait until every rank has finished its pushes."""
        self.memory.wait_copies()
        self.memory.barrier()

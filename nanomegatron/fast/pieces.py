"""Same result as `comm.all_gather` and `comm.reduce_scatter`, in one block per rank, overlapped with work.

A rank works on one block while the next is fetched (`gather_pieces`), or makes one while the last is sent
(`scatter_pieces`). The copies are made by copy engines between the GPUs (`peer_memory.py`). Where GPUs cannot
reach each other's memory, on CPUs, and without `peers`, whole collectives run beside the work, and sum in the
blocks' type. Several calls in flight at once have no `peers`, since peer memory serves one at a time.

Gain: that of `tp_overlap.py` and `moe_pieces.py` (benchmarks/results/2026-11-21-tp-overlap-tp4.json).
"""

from collections.abc import Callable
from typing import Any

import torch

from nanomegatron.comm import Pending, start_all_gather, start_reduce_scatter
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.peer_memory import PeerMemory
from nanomegatron.mesh import Axis
from nanomegatron.ops.merge import sum_parts

Make = Callable[[int, torch.Tensor], Any]


def gather_pieces(
    x: torch.Tensor, axis: Axis, peers: PeerAccess | None
) -> tuple[torch.Tensor, list[tuple[slice, Any]]]:
    """Start to gather x, one rank's block at a time.

    Rank r begins with its own block, fetches those of r + 1, r + 2, ... one after the other, so that no two
    ranks fetch from the same one, and works on each as it arrives:

    rank 0 of 4    work     [barrier][ own ][ 1    ][ 2    ][ 3 ]
                   copies            [  1   ][  2   ][  3   ]

    x `[n, ...]` -> `[n*size, ...]`, and (rows of it, object to wait for) as they arrive; the last means all
    """
    if axis.size == 1:
        return x, []
    memory, n = peers.memory(axis, x.device, "all_gather") if peers and x.numel() else None, x.shape[0]
    if memory is None:
        pending = start_all_gather(x, axis)
        before, behind = slice(0, axis.rank * n), slice((axis.rank + 1) * n, axis.size * n)
        return pending.result, [(rows, pending) for rows in (before, behind) if rows.start < rows.stop]
    gathered = x.new_empty(n * axis.size, *x.shape[1:])
    memory.begin(x.nbytes, gathered)
    theirs = memory.views(x.shape, x.dtype)
    theirs[axis.rank].copy_(x)
    memory.barrier()
    ranks, ready = [*others(axis), axis.rank], memory.record(0)
    blocks = [slice(rank * n, (rank + 1) * n) for rank in ranks]
    pulls = [(ready, gathered[rows], theirs[rank]) for rows, rank in zip(blocks, ranks)]
    return gathered, list(zip(blocks, memory.copy(*pulls)))


def scatter_pieces(make: Make, whole: torch.Tensor, axis: Axis, peers: PeerAccess | None) -> Pending:
    """Start to reduce-scatter blocks, of which `make(rank, out)` makes that for a rank; the result: its sum.

    The blocks for the others are made first, a rank's own, which is not sent, last. When the result is waited
    for, each rank adds the blocks that it has received, in fp32, and rounds once.

    rank 0 of 4    work     [ for 1 ][ for 2 ][ for 3 ][ own    ][barrier][sum]
                   copies            [ to 1  ][ to 2  ][ to 3 ]

    whole `[n*size, ...]`: room for all blocks; the result `[n, ...]`. With copy engines a call may begin only
    after the result of the previous one was waited for.
    """
    memory = peers.memory(axis, whole.device, "reduce_scatter") if peers and whole.numel() else None
    if memory is not None:
        return push_pieces(make, whole, memory, in_step=True)
    for rank, part in enumerate(whole.chunk(axis.size)):
        make(rank, part)
    return start_reduce_scatter(whole, axis)


def push_pieces(make: Make, whole: torch.Tensor, memory: PeerMemory, in_step: bool = False) -> Pending:
    """`scatter_pieces` by pushing blocks into this rank's slot in every rank's memory. whole `[n*size, ...]`

    in_step: no rank pushes before all have made their first block, so that no two ranks push to the same one
    at once, which is slower. Not for use beside matmuls, which may leave the barrier's kernel no room.
    """
    axis, parts = memory.axis, whole.chunk(memory.axis.size)
    memory.begin(whole.nbytes, whole)
    theirs = memory.views((axis.size, *parts[0].shape), whole.dtype)
    pushes = []
    for k, rank in enumerate(others(axis)):
        make(rank, parts[rank])
        ready = memory.record(k)
        pushes.append((ready, theirs[rank][axis.rank], parts[rank]))
        if in_step and k == 0 and axis.size > 2:
            memory.barrier_before_copies(ready)
    mine = theirs[axis.rank]
    make(axis.rank, mine[axis.rank])
    memory.copy(*pushes)
    result = torch.empty_like(parts[0])
    return Pending(result, [_Sum(memory, mine, result)], [whole])


class _Sum:
    """The work of a Pending: `wait` adds the blocks that the ranks have pushed here."""

    def __init__(self, memory: PeerMemory, mine: torch.Tensor, result: torch.Tensor) -> None:
        self.memory, self.mine, self.result = memory, mine, result

    def wait(self) -> None:
        self.memory.wait_copies()
        self.memory.barrier()
        sum_parts(self.mine, self.result)  # bf16 too is added in fp32 and rounded once


def others(axis: Axis) -> list[int]:
    """The other ranks, in an order in which at each step every rank has a different one."""
    return [(axis.rank + step) % axis.size for step in range(1, axis.size)]

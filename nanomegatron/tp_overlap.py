"""A gather before a matmul, or a reduce-scatter behind it, in pieces that run beside the matmul.

    gather_matmul, rank 0 of 4                          matmul_scatter, rank 0 of 4

    matmuls  [meet][ own ][ x1 W ][ x2 W ][ x3 W ]      [ for 1 ][ for 2 ][ for 3 ][ own    ][meet][sum]
    copies         [  x1 ][  x2 ][  x3 ]                         [ to 1  ][ to 2  ][ to 3 ]

Rank r begins with its own rows, fetches those of r + 1, r + 2, ... one after the other, so that no two ranks
fetch from the same one, and multiplies each block as it arrives. Scattering goes the other way: the blocks
for the others first, its own, which goes nowhere, last; then each rank adds the blocks that it was given, in
fp32. The copies are made by copy engines between the GPUs (`comm_symmetric.py`).

Where GPUs cannot reach each other's memory, and on CPUs, the pieces are sent by collectives: the matmul of a
rank's own rows hides part of the gather, that of the second half of every block hides part of the
reduce-scatter, whose sum is then made in x's type. `overlap_path` says which it is.

The four linear layers of a Llama-3-8B block on 4 H200, 8192 rows, bf16, ms (`bench_tp_overlap.py`): forward
1.21 for the matmuls alone, 2.06 with NCCL before or behind them, 1.53 so; with backward 3.86, 6.30 and 4.80.
Left over are smaller matmuls that fit the GPU less well, the sum, and for qkv and o copies that take longer
than the matmul. Tried and no better: two matmul streams, half blocks, meeting beside the own matmul; all
copies at once is worse. A call takes the host 0.14 ms, so with few rows this does not pay.
(Decomposed collectives: Wang et al., ASPLOS 2023; Megatron-LM's --tp-comm-overlap.)
"""

from typing import Any

import torch

from nanomegatron.comm import Pending, start_all_gather, start_reduce_scatter
from nanomegatron.comm_symmetric import PeerMemory, obstacle
from nanomegatron.mesh import Axis


def overlap_path(axis: Axis, device: torch.device) -> str:
    """How pieces travel over this axis, for a person to read. All ranks of the axis call it together."""
    if "path" not in axis.scratch:
        why_not = obstacle(axis, device)
        axis.scratch["path"] = f"asynchronous collectives ({why_not})" if why_not else "GPU copy engines"
        for kind in () if why_not else ("all_gather", "reduce_scatter"):
            axis.scratch[kind] = PeerMemory(axis, device, kind)
    return axis.scratch["path"]


def gather_matmul(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """all_gather(x) @ weight, and the gathered x, which is the caller's for good. Not for autograd.

    x: [n, i] this rank's rows; weight: [i, o] of any strides -> [n * size, o], [n * size, i]
    """
    if axis.size == 1:
        return x @ weight, x
    n, own = x.shape[0], axis.rank * x.shape[0]
    y = x.new_empty(n * axis.size, weight.shape[1])
    gathered, arrivals = _gather(x, axis)
    torch.mm(x, weight, out=y[own : own + n])
    for rows, arrival in arrivals:
        arrival.wait()
        if rows.start != own:
            torch.mm(gathered[rows], weight, out=y[rows])
    return y, gathered


def start_gather(x: torch.Tensor, axis: Axis) -> Pending:
    """Begin all_gather(x), to run beside matmuls: [n, ...] -> [n * size, ...]. Must be waited for."""
    if axis.size == 1:
        return Pending(x)
    gathered, arrivals = _gather(x, axis)
    return Pending(gathered, arrivals[-1][1])


def matmul_scatter(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's rows of the sum over the ranks of x @ weight. Not for autograd.

    x: [n * size, i]; weight: [i, o] of any strides -> [n, o]

    Raises ValueError where the rows do not divide by the ranks.
    """
    if axis.size == 1:
        return x @ weight
    if x.shape[0] % axis.size:
        raise ValueError(f"{x.shape[0]} rows do not divide by the {axis.size} ranks of {axis.name}; pad them")
    overlap_path(axis, x.device)
    memory = axis.scratch.get("reduce_scatter")
    return _scatter_halves(x, weight, axis) if memory is None else _scatter_blocks(x, weight, memory)


def _gather(x: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, list[tuple[slice, Any]]]:
    """Begin to gather: the result, and (rows, what to wait for) as they arrive; all with the last."""
    overlap_path(axis, x.device)
    memory, n = axis.scratch.get("all_gather"), x.shape[0]
    if memory is None:
        pending = start_all_gather(x, axis)
        before, behind = slice(0, axis.rank * n), slice((axis.rank + 1) * n, axis.size * n)
        return pending.result, [(rows, pending) for rows in (before, behind) if rows.start < rows.stop]
    gathered = x.new_empty(n * axis.size, *x.shape[1:])
    memory.begin(x.nbytes, gathered)
    theirs = memory.of(x.shape, x.dtype)
    theirs[axis.rank].copy_(x)
    memory.meet()
    ranks, mark = [*_others(axis), axis.rank], memory.mark(0)
    blocks = [slice(rank * n, (rank + 1) * n) for rank in ranks]
    pulls = [(mark, gathered[rows], theirs[rank]) for rows, rank in zip(blocks, ranks)]
    return gathered, list(zip(blocks, memory.copy(*pulls)))


def _scatter_blocks(x: torch.Tensor, weight: torch.Tensor, memory: PeerMemory) -> torch.Tensor:
    """Push every block of rows into its rank's memory, at the place that is ours there, and add what came."""
    axis, n = memory.axis, x.shape[0] // memory.axis.size
    whole = x.new_empty(x.shape[0], weight.shape[1])
    memory.begin(whole.nbytes, whole)
    blocks, parts = x.split(n), whole.split(n)
    theirs = memory.of((axis.size, n, weight.shape[1]), x.dtype)
    pushes = []
    for k, rank in enumerate(_others(axis)):
        torch.mm(blocks[rank], weight, out=parts[rank])
        pushes.append((memory.mark(k), theirs[rank][axis.rank], parts[rank]))
    mine = theirs[axis.rank]
    torch.mm(blocks[axis.rank], weight, out=mine[axis.rank])
    memory.copy(*pushes)
    memory.join()
    memory.meet()
    return mine.sum(0)  # bf16 too is added in fp32 and rounded once


def _others(axis: Axis) -> list[int]:
    """The other ranks, so ordered that at each step all have another one."""
    return [(axis.rank + step) % axis.size for step in range(1, axis.size)]


def _scatter_halves(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Both halves of every block: the first is reduced while the second is multiplied."""
    blocks = x.unflatten(0, (axis.size, -1))
    y = x.new_empty(blocks.shape[1], weight.shape[1])
    weights = weight.expand(axis.size, *weight.shape)
    half = (len(y) + 1) // 2
    sent = [
        start_reduce_scatter(torch.bmm(rows, weights).flatten(0, 1), axis, out)
        for rows, out in zip(blocks.split(half, dim=1), y.split(half))
    ]
    for pending in sent:
        pending.wait()
    return y

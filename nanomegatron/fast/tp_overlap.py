"""Same result as `tp.LinearFunction` with --sequence-parallel, its collectives in pieces beside the matmuls.

With `--tp-comm-overlap` a gather before a matmul, or a reduce-scatter after it, becomes a matmul for each
rank's block of rows, which copy engines fetch and push between the GPUs (timelines: `pieces.gather_pieces`,
`scatter_pieces`). Where GPUs cannot reach each other's memory, and on CPUs, the pieces are sent by
collectives: the matmul of a rank's own rows overlaps with part of the gather, that of the second half of each
block with part of the reduce-scatter, which then sums in x's type.

Gain: four linear layers of a Llama-3-8B block on 4 H200, 8192 rows, bf16: forward 1.21 ms for the matmuls,
2.06 with NCCL before or after them, 1.53 in pieces; with backward 3.86, 6.30 and 4.80 ms
(benchmarks/results/2026-11-21-tp-overlap-tp4.json).
What remains is due to smaller, less efficient matmuls, the sum, and for qkv and o copies that take longer
than the matmul. Tried and no better: two matmul streams, half blocks, the barrier beside the own matmul; all
copies at once is worse. A call takes the host 0.14 ms, so with few rows this does not pay.
(Decomposed collectives: Wang et al., ASPLOS 2023; Megatron-LM's --tp-comm-overlap.)
"""

from collections.abc import Callable
from typing import Any

import torch

from nanomegatron.comm import Pending, all_gather, start_reduce_scatter
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.pieces import gather_pieces, push_pieces
from nanomegatron.mesh import Axis
from nanomegatron.ops.bias import add_bias
from nanomegatron.param import accumulate, add_product, is_deferred
from nanomegatron.tp import LinearFunction


def overlapped_linear(
    peers: PeerAccess | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    axis: Axis,
    comm: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """A `linear` of tp.py whose gathers and reduce-scatters overlap with its matmuls.

    x `[s, b, i]` or `[s/tp, b, i]` or `[s, b, i/tp]`, weight `[o/tp, i]` or `[o, i/tp]`, bias `[o/tp]` or
    `[o]` -> `[s, b, o/tp]` or `[s, b, o]` or `[s/tp, b, o]`, each with its `comm` as in `tp.LinearFunction`

    peers: the memory by which pieces are sent; None: by collectives.
    """
    if axis.size == 1 or comm not in ("gather", "scatter"):
        return LinearFunction.apply(x, weight, axis, comm, bias)
    return add_bias(OverlappedLinearFunction.apply(x, weight, axis, comm, peers), bias, accumulate)


class OverlappedLinearFunction(torch.autograd.Function):
    """`tp.LinearFunction` for "gather" and "scatter"; in the backward the gather of x runs beside matmuls.

    x `[s/tp, b, i]` or `[s, b, i/tp]`, weight `[o/tp, i]` or `[o, i/tp]` -> `[s, b, o/tp]` or `[s/tp, b, o]`
    """

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, weight: torch.Tensor, axis: Axis, comm: str, peers: PeerAccess | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.comm = weight, comm
        ctx.axis, ctx.peers = axis, peers
        rows, w = x.flatten(0, -2), weight.t()
        gathers = comm == "gather"
        y = gather_matmul(rows, w, axis, peers)[0] if gathers else matmul_scatter(rows, w, axis, peers).wait()
        return y.view(-1, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        axis, peers = ctx.axis, ctx.peers
        shape, rows, x = x.shape, grad.flatten(0, -2), x.flatten(0, -2)
        later = is_deferred(weight) and ctx.comm == "gather"
        if ctx.comm == "gather":
            gathered = Pending(x) if later else start_gather_rows(x, axis, peers)
            reduced = matmul_scatter(rows, weight, axis, peers)
            x = gathered.wait()
        else:
            dx, rows = gather_matmul(rows, weight, axis, peers)
            reduced = Pending(dx)

        def write(out: torch.Tensor, beta: int) -> None:
            add_product(out, rows, all_gather(x, axis) if later else x, beta)

        dw = accumulate(weight, write)
        return reduced.wait().view(shape), dw, None, None, None


def gather_matmul(
    x: torch.Tensor, weight: torch.Tensor, axis: Axis, peers: PeerAccess | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """all_gather(x) @ weight, and the gathered x, which the caller may keep. Not for autograd.

    x `[n, i]` this rank's rows, weight `[i, o]` of any strides -> `[n*size, o]`, `[n*size, i]`
    """
    y = x.new_empty(x.shape[0] * axis.size, weight.shape[1])
    return y, multiply_gathered(lambda part, _, out: torch.mm(part, weight, out=out), x, y, axis, peers)


def multiply_gathered(
    multiply: Callable[..., Any], x: torch.Tensor, y: torch.Tensor, axis: Axis, peers: PeerAccess | None
) -> torch.Tensor:
    """Gather x, and as its rows arrive call multiply(they, which of all they are, where in y they belong).

    x `[n, i]`, y `[n*size, o]` -> the gathered x `[n*size, i]`
    """
    own = slice(axis.rank * len(x), (axis.rank + 1) * len(x))
    gathered, arrivals = gather_pieces(x, axis, peers)
    multiply(x, own, y[own])
    for rows, arrival in arrivals:
        arrival.wait()
        if rows.start != own.start:
            multiply(gathered[rows], rows, y[rows])
    return gathered


def start_gather_rows(x: torch.Tensor, axis: Axis, peers: PeerAccess | None = None) -> Pending:
    """Start an all-gather of x `[n, ...]`, to overlap with matmuls; the result: `[n*size, ...]`"""
    gathered, arrivals = gather_pieces(x, axis, peers)
    return Pending(gathered, [arrival for _, arrival in arrivals[-1:]])


def matmul_scatter(
    x: torch.Tensor, weight: torch.Tensor, axis: Axis, peers: PeerAccess | None = None
) -> Pending:
    """Start to make this rank's rows of the sum over the ranks of x @ weight. Not for autograd.

    x `[n*size, i]`, weight `[i, o]` of any strides; the result `[n, o]`

    Raises ValueError if the rows are not divisible by the number of ranks.
    """
    whole = x.new_empty(x.shape[0], weight.shape[1])
    return scatter_products(lambda rows, out: torch.mm(x[rows], weight, out=out), whole, axis, peers)


def scatter_products(
    multiply: Callable[[slice, torch.Tensor], Any], whole: torch.Tensor, axis: Axis, peers: PeerAccess | None
) -> Pending:
    """Start to reduce-scatter what multiply(rows, out) makes, block by block. See `matmul_scatter`.

    whole `[n*size, o]`: room for it -> `[n, o]`. By collectives each block's first half is reduced beside the
    second's matmuls.
    """
    n, left = divmod(len(whole), axis.size)
    if left:
        raise ValueError(f"{len(whole)} rows must be a multiple of {axis.name} {axis.size}; pad them")
    if axis.size == 1:
        multiply(slice(0, n), whole)
        return Pending(whole)
    if memory := peers.memory(axis, whole.device, "reduce_scatter") if peers else None:
        return push_pieces(lambda rank, out: multiply(slice(rank * n, rank * n + n), out), whole, memory)
    y, half, sent = whole.new_empty(n, whole.shape[1]), (n + 1) // 2, []
    for begin in range(0, n, half):
        end = min(n, begin + half)
        made = whole[begin * axis.size : end * axis.size]
        for rank, out in enumerate(made.chunk(axis.size)):
            multiply(slice(rank * n + begin, rank * n + end), out)
        sent.append(start_reduce_scatter(made, axis, y[begin:end]))
    return Pending(y, sent, [whole])

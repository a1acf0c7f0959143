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

import torch

from nanomegatron.comm import Pending, all_gather, start_reduce_scatter
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.pieces import gather_pieces, push_pieces
from nanomegatron.mesh import Axis
from nanomegatron.ops.bias import add_bias
from nanomegatron.param import accumulate_sums, accumulate_weight_grad, is_deferred, run_or_defer
from nanomegatron.tp import LinearFunction


class OverlappedLinear:
    """A `linear` of tp.py whose gathers and reduce-scatters overlap with its matmuls.

    x `[s, b, i]` or `[s/tp, b, i]` or `[s, b, i/tp]`, weight `[o/tp, i]` or `[o, i/tp]`
    -> `[s, b, o/tp]` or `[s, b, o]` or `[s/tp, b, o]`, each with its `comm` as in `tp.LinearFunction`

    peers: the memory by which pieces are sent; None: by collectives.
    """

    def __init__(self, peers: PeerAccess | None) -> None:
        self.peers = peers

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, axis: Axis, comm: str, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `tp.LinearFunction`. x `[..., n]`, weight `[m, n]`, bias `[m]` -> `[..., m]`"""
        if axis.size > 1 and comm in ("gather", "scatter"):
            y = OverlappedLinearFunction.apply(x, weight, axis, comm, self.peers)
            return add_bias(y, bias, accumulate_sums)
        return LinearFunction.apply(x, weight, axis, comm, bias)


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
        y = gather_matmul(rows, w, axis, peers)[0] if gathers else matmul_scatter(rows, w, axis, peers)
        return y.view(-1, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        axis, peers = ctx.axis, ctx.peers
        shape, rows, x = x.shape, grad.flatten(0, -2), x.flatten(0, -2)
        later = is_deferred(weight) and ctx.comm == "gather"
        if ctx.comm == "gather":
            gathered = Pending(x) if later else start_gather_rows(x, axis, peers)
            dx = matmul_scatter(rows, weight, axis, peers)
            x = gathered.wait()
        else:
            dx, rows = gather_matmul(rows, weight, axis, peers)

        def weight_grad() -> torch.Tensor | None:
            return accumulate_weight_grad(weight, all_gather(x, axis) if later else x, rows)

        return dx.view(shape), run_or_defer(weight, weight_grad), None, None, None


def gather_matmul(
    x: torch.Tensor, weight: torch.Tensor, axis: Axis, peers: PeerAccess | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """all_gather(x) @ weight, and the gathered x, which the caller may keep. Not for autograd.

    x `[n, i]` this rank's rows, weight `[i, o]` of any strides -> `[n*size, o]`, `[n*size, i]`
    """
    if axis.size == 1:
        return x @ weight, x
    n, own = x.shape[0], axis.rank * x.shape[0]
    y = x.new_empty(n * axis.size, weight.shape[1])
    gathered, arrivals = gather_pieces(x, axis, peers)
    torch.mm(x, weight, out=y[own : own + n])
    for rows, arrival in arrivals:
        arrival.wait()
        if rows.start != own:
            torch.mm(gathered[rows], weight, out=y[rows])
    return y, gathered


def start_gather_rows(x: torch.Tensor, axis: Axis, peers: PeerAccess | None = None) -> Pending:
    """Start an all-gather of x `[n, ...]`, to overlap with matmuls; the result: `[n*size, ...]`"""
    if axis.size == 1:
        return Pending(x)
    gathered, arrivals = gather_pieces(x, axis, peers)
    return Pending(gathered, [arrival for _, arrival in arrivals[-1:]])


def matmul_scatter(
    x: torch.Tensor, weight: torch.Tensor, axis: Axis, peers: PeerAccess | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over the ranks of x @ weight. Not for autograd.

    x `[n*size, i]`, weight `[i, o]` of any strides -> `[n, o]`

    Raises ValueError if the rows are not divisible by the number of ranks.
    """
    if axis.size == 1:
        return x @ weight
    if x.shape[0] % axis.size:
        raise ValueError(f"{x.shape[0]} rows do not divide by the {axis.size} ranks of {axis.name}; pad them")
    memory = peers.memory(axis, x.device, "reduce_scatter") if peers else None
    if memory is None:
        return _scatter_halves(x, weight, axis)
    blocks = x.chunk(axis.size)
    whole = x.new_empty(x.shape[0], weight.shape[1])
    return push_pieces(lambda rank, out: torch.mm(blocks[rank], weight, out=out), whole, memory).wait()


def _scatter_halves(x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`matmul_scatter` by collectives: each block's first half is reduced beside the second's matmul."""
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

"""Same result as `fp8_linear.Fp8Matmuls`, its gathers and reduce-scatters in pieces beside the matmuls.

As `tp_overlap.py` has it (--tp-comm-overlap), with FP8 factors: gathers move bytes, half of bf16's, and each
piece is multiplied with the scales of its own rows, or with the tensor's one. Products are in 16 bits, and so
is what the sum over ranks is made of.

Gain, 16 layers of Llama-3-8B on two H100: 329.0 ms a step, not 339.8. Of communication 6 ms stay exposed, not
31, but the GPU is idle for 16 ms, not 4 (benchmarks/results/2026-11-27-tp2-h100.json).
"""

import torch

from nanomegatron.comm import Pending
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.tp_overlap import multiply_gathered, scatter_products, start_gather_rows
from nanomegatron.fp8_linear import Fp8Matmuls, start_scale_gather
from nanomegatron.mesh import Axis
from nanomegatron.ops.fp8_cast import Fp8Matrix
from nanomegatron.ops.fp8_matmul import fp8_matmul


class OverlappedFp8Matmuls(Fp8Matmuls):
    """Fp8Matmuls in pieces. peers: the memory by which they are sent; None: by collectives."""

    def __init__(self, peers: PeerAccess | None) -> None:
        self.peers = peers

    def start_gather(self, matrix: Fp8Matrix, axis: Axis) -> Pending:
        """As in the base class, by copy engines. matrix `[t/tp, k]`; the result `[t, k]`"""
        data = start_gather_rows(matrix.data.view(torch.uint8), axis, self.peers)
        scale_inv = start_scale_gather(matrix, axis)
        return Pending(Fp8Matrix(data.result.view(matrix.data.dtype), scale_inv.result), [data, scale_inv])

    def gather_matmul(
        self, a: Fp8Matrix, b: Fp8Matrix, axis: Axis, dtype: torch.dtype, fast: bool = False
    ) -> tuple[torch.Tensor, Fp8Matrix]:
        """Multiply the rows of each rank as they arrive -> `[t, n]`, `[t, k]`"""
        y = torch.empty(len(a.data) * axis.size, len(b.data), dtype=dtype, device=a.data.device)
        kind, scale_inv = a.data.dtype, start_scale_gather(a, axis).wait()

        def multiply(data: torch.Tensor, rows: slice, out: torch.Tensor) -> None:
            fp8_matmul(part_of(data.view(kind), scale_inv, rows), b, dtype, fast, out)

        data = multiply_gathered(multiply, a.data.view(torch.uint8), y, axis, self.peers)
        return y, Fp8Matrix(data.view(kind), scale_inv)

    def matmul_scatter(
        self, a: Fp8Matrix, b: Fp8Matrix, axis: Axis, dtype: torch.dtype, fast: bool = False
    ) -> Pending:
        """Push the products of each rank's rows as they are made; the result `[t/tp, n]`"""
        whole = torch.empty(len(a.data), len(b.data), dtype=dtype, device=a.data.device)

        def multiply(rows: slice, out: torch.Tensor) -> None:
            fp8_matmul(part_of(a.data[rows], a.scale_inv, rows), b, dtype, fast, out)

        return scatter_products(multiply, whole, axis, self.peers)


def part_of(data: torch.Tensor, scale_inv: torch.Tensor, rows: slice) -> Fp8Matrix:
    """Some rows, data `[n, k]`, with their scales, those of all rows being scale_inv `[t, ...]`, or `[]`."""
    return Fp8Matrix(data, scale_inv[rows] if scale_inv.dim() else scale_inv)

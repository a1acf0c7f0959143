"""Matmuls by cuBLASLt with a chosen algorithm (cuda/matmul.cu): any of a linear layer's.

    out [m, n]  =  or +=  a_inverse * b_inverse * a [m, k] b [k, n]

A matrix is row-major or, by its flag, the transpose of a row-major one. Each stream has 32 MiB of workspace.
"""

import functools
import warnings
from typing import NamedTuple

import torch

from nanomegatron.ops import kernels as ops_kernels
from nanomegatron.ops.kernels import TYPES, launch_kernel

A_TRANSPOSED, B_TRANSPOSED, ADD, FAST = 1, 2, 4, 8  # flags of a problem; FAST: less precise sums, only FP8
BY_ESTIMATE = -1  # for `choice`: the library's best by its own estimate
WORKSPACE = 32 << 20  # bytes, as torch has for Hopper


class Problem(NamedTuple):
    """What an algorithm is chosen for."""

    m: int
    n: int
    k: int
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    flags: int

    def __str__(self) -> str:
        a, b, out = (str(dtype).removeprefix("torch.") for dtype in (self.a, self.b, self.out))
        t = ("'" * bool(self.flags & flag) for flag in (A_TRANSPOSED, B_TRANSPOSED))
        sizes = f"[{self.m}, {self.k}]{next(t)} [{self.k}, {self.n}]{next(t)}"
        return (
            f"{sizes} {a} x {b} {'+=' if self.flags & ADD else '='} {out}{' fast' * bool(self.flags & FAST)}"
        )


def matmul(
    problem: Problem,
    choice: int,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_inverse: torch.Tensor | None = None,
    b_inverse: torch.Tensor | None = None,
) -> None:
    """Launch a matmul: out `[m, n]`, a `[m, k]` or `[k, m]`, b `[k, n]` or `[n, k]`, all contiguous.

    choice: `BY_ESTIMATE` or a number below `candidates`. a_inverse, b_inverse `[]`: of FP8, in fp32. The
    first call of a problem cannot be part of a CUDA graph.
    """
    where, what = (out, a, a_inverse, b, b_inverse, workspace(out.device), WORKSPACE), _numbers(problem)
    launch_kernel("matmul", *where, *what, choice)


def candidates(problem: Problem, out, a, b, a_inverse=None, b_inverse=None) -> int:
    """The number of algorithms that `matmul` can be given for these tensors, as in `matmul`."""
    return launch_kernel("matmul_candidates", out, a, a_inverse, b, b_inverse, WORKSPACE, *_numbers(problem))


def _numbers(problem: Problem) -> tuple[int, ...]:
    m, n, k, a, b, out, flags = problem
    return m, n, k, TYPES[a], TYPES[b], TYPES[out], flags


@functools.cache
def missing() -> str:
    """The reason why cuBLASLt cannot be called, after a warning; "" if it can."""
    try:
        ops_kernels._kernels.matmul_ready()
    except RuntimeError as error:
        warnings.warn(f"FP8 weight gradients are added in a separate pass: {error}", stacklevel=3)
        return str(error)
    return ""


def workspace(device: torch.device) -> torch.Tensor:
    """The workspace of the current stream: matmuls of two may run at the same time -> uint8 `[bytes]`"""
    return _workspace_of(device, torch._C._cuda_getCurrentRawStream(device.index))


@functools.cache
def _workspace_of(device: torch.device, stream: int) -> torch.Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)

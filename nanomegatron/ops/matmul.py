"""FP8 matmuls by cuBLASLt (cuda/matmul.cu), which adds to what is there.

    out [m, n]  =  or +=  a_inverse * b_inverse * a [m, k] b [n, k]^T

Each stream has 32 MiB of workspace.
"""

import functools
import warnings

import torch

from nanomegatron.ops import kernels as ops_kernels
from nanomegatron.ops.kernels import TYPES, launch_kernel

WORKSPACE = 32 << 20  # bytes, as torch has for Hopper


def matmul(
    out: torch.Tensor,
    a: torch.Tensor,
    a_inverse: torch.Tensor,
    b: torch.Tensor,
    b_inverse: torch.Tensor,
    add: bool,
    fast: bool,
) -> None:
    """Launch a matmul: out `[m, n]`, a `[m, k]`, b `[n, k]`, a_inverse, b_inverse `[]`, all contiguous.

    add: to what is in out, else overwrite it. fast: sum less precisely. The first call of a shape cannot be
    part of a CUDA graph.
    """
    work = workspace(out.device)
    sizes = *out.shape, a.shape[1]
    types = TYPES[a.dtype], TYPES[b.dtype], TYPES[out.dtype]
    launch_kernel(
        "matmul", out, a, a_inverse, b, b_inverse, work, WORKSPACE, *sizes, *types, int(add), int(fast)
    )


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

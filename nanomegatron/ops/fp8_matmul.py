"""The matmul of FP8 weight gradients, which adds to those of earlier microbatches, and what it computes.

    out [m, n] fp32  +=  a_inverse * b_inverse * a [m, k] b [n, k]^T       E4M3 or E5M2, not both E5M2

Torch's FP8 matmul cannot add: by the reference below a temporary as large as `out` is written, and read again
in a pass that adds. cuda/matmul_fp8.cu has cuBLASLt do it in the matmul; that takes 32 MiB for each stream.
"""

import functools
import warnings

import torch

from nanomegatron.ops import kernels as ops_kernels
from nanomegatron.ops.fp8_cast import FORMATS, scale_of_rows
from nanomegatron.ops.kernels import TYPES, launch, usable

ALIGN, BYTES = 16, 16  # sizes, and where memory begins: cuBLASLt asks for it
WORKSPACE = 32 << 20  # as torch's own for Hopper


def add_fp8_product_(
    out: torch.Tensor,
    a: torch.Tensor,
    a_inverse: torch.Tensor,
    b: torch.Tensor,
    b_inverse: torch.Tensor,
    fast: bool = False,
) -> None:
    """out += a b^T, in place. out: fp32 `[m, n]`, a: FP8 `[m, k]`, b: FP8 `[n, k]`

    The inverses of their scales: fp32, one element. All sizes are multiples of 16. fast: sums lose bits, for
    speed. A shape's first call cannot be part of a CUDA graph. Raises ValueError.
    """
    _check(out, a, a_inverse, b, b_inverse)
    if not a.numel() or not b.numel():
        return
    if not usable(a, "add_fp8_product_", FORMATS) or missing():
        add_fp8_product_ref_(out, a, a_inverse, b, b_inverse, fast)
        return
    work, sizes = _workspace(out.device), (*out.shape, a.shape[1])
    kind = TYPES[a.dtype], TYPES[b.dtype], int(fast)
    launch("fp8_matmul_add", out, a, a_inverse, b, b_inverse, work, WORKSPACE, *sizes, *kind)


def add_fp8_product_ref_(out, a, a_inverse, b, b_inverse, fast=False) -> None:
    """`add_fp8_product_` by torch's matmul and a sum."""
    if not a.is_cuda:
        a_inverse, b_inverse = scale_of_rows(a_inverse, len(a)), scale_of_rows(b_inverse, len(b)).t()
    y = torch._scaled_mm(a, b.t(), a_inverse, b_inverse, out_dtype=torch.float32, use_fast_accum=fast)
    out.add_(y)


@functools.cache
def missing() -> str:
    """Why cuBLASLt cannot be called, told in a warning too; "" where it can."""
    try:
        ops_kernels._kernels.fp8_matmul_ready()
    except RuntimeError as error:
        warnings.warn(f"FP8 weight gradients take a pass to be added: {error}", stacklevel=3)
        return str(error)
    return ""


def _workspace(device: torch.device) -> torch.Tensor:
    return _workspace_of(device, torch._C._cuda_getCurrentRawStream(device.index))


@functools.cache
def _workspace_of(device: torch.device, stream: int) -> torch.Tensor:
    """Of one stream: matmuls of two may run at the same time."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def _check(out, a, a_inverse, b, b_inverse) -> None:
    """Raises ValueError for what the matmul does not take."""
    types = {a.dtype, b.dtype}
    if out.dtype != torch.float32 or not types <= set(FORMATS) or types == {torch.float8_e5m2}:
        raise ValueError(f"{out.dtype} += {a.dtype} x {b.dtype}: must be fp32 += E4M3 x E4M3, or x E5M2")
    shapes = [list(x.shape) for x in (out, a, b)]
    fits = a.dim() == b.dim() == 2 and shapes[0] == [len(a), len(b)] and a.shape[1] == b.shape[1]
    if not fits or any(size % ALIGN for shape in shapes for size in shape):
        raise ValueError(f"{shapes}: must be [m, n], [m, k] and [n, k], of multiples of {ALIGN}")
    for name, x in dict(out=out, a=a, b=b, a_inverse=a_inverse, b_inverse=b_inverse).items():
        if x.device != out.device or not x.is_contiguous() or x.data_ptr() % BYTES:
            raise ValueError(
                f"{name} must be contiguous, on {out.device} and begin at a multiple of {BYTES} bytes"
            )
        if name.endswith("inverse") and (x.dtype != torch.float32 or x.numel() != 1):
            raise ValueError(f"{name} must be one fp32 element, not {x.dtype} {list(x.shape)}")

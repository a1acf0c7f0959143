"""FP8 matmuls, a [m, k] b [n, k]^T: torch's, for all kinds of scales, and one that adds to a weight gradient.

    fp8_matmul         y [m, n]          =   a_inverse * b_inverse * a b^T     E4M3 or E5M2, not both E5M2
    add_fp8_product_   out [m, n]       +=   the same, or =                    one scale per tensor

Torch's FP8 matmul cannot accumulate: the reference writes a temporary as large as `out` and adds it in a
second pass. cuda/matmul.cu has cuBLASLt accumulate in the matmul.
"""

import torch
import torch.nn.functional as F

from nanomegatron.ops.fp8_cast import BLOCK, FORMATS, Fp8Matrix, fp8_decode
from nanomegatron.ops.kernels import usable
from nanomegatron.ops.matmul import matmul, missing

ALIGN, BYTES = 16, 16  # cuBLASLt needs sizes divisible by the first, addresses by the second


def fp8_matmul(
    a: Fp8Matrix,
    b: Fp8Matrix,
    dtype: torch.dtype,
    fast: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a b^T, summed in fp32: a `[m, k]`, b `[n, k]` -> `[m, n]` in `dtype`.

    Both have scales of the same kind. fast: on a GPU accumulate less precisely, for speed (not with blocks).
    out `[m, n]`: where to write. torch raises on GPUs without FP8, for blocks except on Hopper, and for n or
    k not divisible by 16.
    """
    m, gpu = len(a.data), a.data.is_cuda
    rows = all(matrix.scale_inv.shape == (len(matrix.data), 1) for matrix in (a, b))
    blocks = a.scale_inv.dim() == 2 and not rows
    if blocks and not gpu:  # torch has no CPU kernel
        y = (fp8_decode(a) @ fp8_decode(b).t()).to(dtype)
        return y if out is None else out.copy_(y)
    if blocks and m % ALIGN:  # as when text is generated at a run's end: cuBLAS has no kernel for such m
        padding = 0, 0, 0, -m % ALIGN
        data = F.pad(a.data.view(torch.uint8), padding).view(a.data.dtype)
        a = Fp8Matrix(data, F.pad(a.scale_inv, padding))
    scale_a, scale_b = _torch_scale(a, blocks), _torch_scale(b, blocks).t()
    kind = torch.bfloat16 if rows and gpu else dtype  # the GPU's kernel for rows has no other
    how = dict(out_dtype=kind, use_fast_accum=fast and not blocks)
    if out is not None and kind == dtype and len(a.data) == m:
        return torch._scaled_mm(a.data, b.data.t(), scale_a, scale_b, **how, out=out)
    y = torch._scaled_mm(a.data, b.data.t(), scale_a, scale_b, **how)[:m].to(dtype)
    return y if out is None else out.copy_(y)


def _torch_scale(a: Fp8Matrix, blocks: bool) -> torch.Tensor:
    """The scale_inv of a in the shape and strides that torch takes; those of gathered blocks have others."""
    q, scale_inv = a
    if not scale_inv.dim():  # most CPUs have a fast kernel for scales of rows only, with the same result
        return scale_inv if q.is_cuda else scale_inv.repeat(len(q), 1)
    if not blocks:
        return scale_inv.flatten()[:, None]
    if len(scale_inv) < len(q) and scale_inv.shape[1] % 4:  # torch 2.11 misreads such scales of 128 x 128
        scale_inv = scale_inv.repeat_interleave(BLOCK, 0)[: len(q)]
    return scale_inv.t().contiguous().t() if len(scale_inv) == len(q) else scale_inv


def add_fp8_product_(
    out: torch.Tensor, a: Fp8Matrix, b: Fp8Matrix, overwrite: bool = False, fast: bool = False
) -> None:
    """out += a b^T, in place; a and b have one scale each. out: `[m, n]`, a: `[m, k]`, b: `[n, k]`

    out is fp32 or bf16, as what a product is rounded before it is added. overwrite: out = a b^T, whatever it
    was. All sizes are multiples of 16. fast: accumulate with less precision, for speed. The first call for a
    shape cannot be part of a CUDA graph. Raises ValueError for other sizes, types or devices.
    """
    _check(out, *a, *b)
    if not a.data.numel() or not b.data.numel():
        if overwrite:
            out.zero_()
        return
    if not usable(a.data, "add_fp8_product_", FORMATS) or missing():
        add_fp8_product_ref_(out, a, b, fast, overwrite)
        return
    matmul(out, a.data, a.scale_inv, b.data, b.scale_inv, add=not overwrite, fast=fast)


def add_fp8_product_ref_(
    out: torch.Tensor, a: Fp8Matrix, b: Fp8Matrix, fast: bool = False, overwrite: bool = False
) -> None:
    """`add_fp8_product_` by torch's matmul, then an addition. out: `[m, n]`"""
    product = fp8_matmul(a, b, out.dtype, fast)
    out.copy_(product) if overwrite else out.add_(product)


def _check(out, a, a_inverse, b, b_inverse) -> None:
    """Raise ValueError for types, sizes or devices that the matmul does not take."""
    types = {a.dtype, b.dtype}
    wide = out.dtype in (torch.float32, torch.bfloat16)
    if not wide or not types <= set(FORMATS) or types == {torch.float8_e5m2}:
        given = f"{out.dtype} += {a.dtype} x {b.dtype}"
        raise ValueError(f"{given}: must be fp32 or bf16 += E4M3 x E4M3, or x E5M2")
    shapes = [list(x.shape) for x in (out, a, b)]
    fits = a.dim() == b.dim() == 2 and shapes[0] == [len(a), len(b)] and a.shape[1] == b.shape[1]
    if not fits or any(size % ALIGN for shape in shapes for size in shape):
        raise ValueError(f"{shapes}: must be [m, n], [m, k] and [n, k], of multiples of {ALIGN}")
    for name, x in dict(out=out, a=a, b=b, a_inverse=a_inverse, b_inverse=b_inverse).items():
        if x.device != out.device or not x.is_contiguous() or x.data_ptr() % BYTES:
            raise ValueError(f"{name} must be contiguous, on {out.device}, aligned to {BYTES} bytes")
        if name.endswith("inverse") and (x.dtype != torch.float32 or x.numel() != 1):
            raise ValueError(f"{name} must be one fp32 element, not {x.dtype} {list(x.shape)}")

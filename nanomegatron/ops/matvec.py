"""A matrix times one vector, without a backward: the kernel of cuda/matvec.cu, and its reference."""

import torch

from nanomegatron.ops.kernels import TYPES, launch_kernel, usable


def matvec(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T for a single row, added in fp32. x `[..., k]`, weight `[m, k]` of its type -> `[..., m]`

    Raises ValueError for another shape or type of x.
    """
    m, k = weight.shape
    if x.shape[-1:] != (k,) or x.numel() != k or x.dtype != weight.dtype:
        raise ValueError(f"{x.dtype} {list(x.shape)} is not one row for {weight.dtype} {list(weight.shape)}")
    if not weight.is_contiguous() or not usable(x, "matvec"):
        return matvec_ref(x, weight)
    out = x.new_empty(*x.shape[:-1], m)
    launch_kernel("matvec", out, weight, x.contiguous(), m, k, TYPES[x.dtype])
    return out


def matvec_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`matvec` in plain torch: specification and oracle. x `[..., k]`, weight `[m, k]` -> `[..., m]`"""
    return x @ weight.t()

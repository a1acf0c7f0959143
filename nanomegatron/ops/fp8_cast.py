"""Casts to FP8 with one scale per tensor, row or block: the kernels of cuda/fp8_*.cu, and their references.

    q = fp8(x * scale), saturating        x is about q * scale_inv, scale_inv = 1 / scale
    scale = limit / amax                  limit: the format's largest value / 2^margin

    current scaling    fp8_amax, fp8_scale, fp8_cast                          scale from this tensor's amax
    delayed scaling    fp8_cast (records the amax), fp8_update once a step    scale from earlier steps' amaxes
    row scaling        fp8_cast_rows                                          a scale per row, from its amax
    block scaling      fp8_cast_blocks                                        a scale per block, from its amax

The host never waits: scales and amaxes stay on the GPU. An amax is the largest |x| so far, NaN counting as
the largest; its owner resets it to zero. Without kernels plain torch gives the same results, to the bit.
(arXiv 2209.05433; blocks: 2412.19437, section 3.3)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanomegatron.ops.kernels import FLOATS, TYPES, launch_kernel, usable

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
BLOCK = 128
OUTPUTS = ("rowwise", "columnwise", "both")  # the cast of [m, k], its transpose [k, m], or both
Pair = tuple[torch.Tensor | None, torch.Tensor | None]  # rowwise and columnwise; None: not wanted
SMALLEST, LARGEST = 2.0**-126, 2.0**126  # of scales, so that they and their inverses are normal numbers


class Fp8Matrix(NamedTuple):
    """A matrix in FP8, about data * scale_inv; a matmul contracts its last dim."""

    data: torch.Tensor  # [m, k], contiguous
    scale_inv: torch.Tensor  # fp32: [] per tensor, [m, 1] per row, or per block as fp8_cast_blocks returns it


def fp8_limit(dtype: torch.dtype, margin: int = 0) -> float:
    """The value to which the largest |x| of a tensor is scaled."""
    return torch.finfo(dtype).max / 2.0**margin


def fp8_amax(x: torch.Tensor, amax: torch.Tensor) -> None:
    """amax = max(amax, |x|), in place. x: `[...]`, amax: fp32 `[]` or `[1]`. Raises ValueError."""
    _check(x, None, amax)
    if usable(x, "fp8_amax"):
        launch_kernel("fp8_amax", x.contiguous(), amax, x.numel(), TYPES[x.dtype])
    elif x.numel():
        amax.copy_(torch.maximum(amax, x.abs().amax().float().view(amax.shape)))


def fp8_scale(
    amax: torch.Tensor, limit: float, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """limit / amax and its inverse, 1 where amax is 0 or not finite: amax fp32 `[...]` -> `[...]`, `[...]`

    power_of_two: the scale is rounded down to a power of two. Raises ValueError for an amax of another type.
    """
    if amax.dtype != torch.float32:
        raise ValueError(f"amaxes are fp32, not {amax.dtype}")
    amax = amax.contiguous()
    if usable(amax, "fp8_scale"):
        scale, scale_inv = torch.empty_like(amax), torch.empty_like(amax)
        launch_kernel("fp8_scale", amax, scale, scale_inv, amax.numel(), limit, int(power_of_two))
        return scale, scale_inv
    scale = _scale(amax, torch.full_like(amax, limit), torch.ones_like(amax), power_of_two)
    return scale, 1.0 / scale


def fp8_update(
    history: torch.Tensor,
    scale: torch.Tensor,
    scale_inv: torch.Tensor,
    limits: torch.Tensor,
    most_recent: bool = False,
) -> None:
    """Update the scales of n tensors for the next step from their amax history, in place; all are fp32.

    history: `[length, n]`, amaxes: row 0 of the step that ends, row j of j steps before; rows are shifted
    down by one and row 0 is zeroed. scale, scale_inv, limits: `[n]`. Scales come from row 0 (`most_recent`)
    or the largest of each column. A scale stays where that is zero or row 0 is not finite; amaxes that are
    not finite are shifted as zero. Raises ValueError for other shapes, types or devices.
    """
    length, n = history.shape
    for x, shape in (history, (length, n)), (scale, (n,)), (scale_inv, (n,)), (limits, (n,)):
        kind = x.shape, x.dtype, x.device, x.is_contiguous()
        if kind != (shape, torch.float32, history.device, True):
            raise ValueError(f"scales, history {kind}: must be fp32 {list(shape)} on {history.device}")
    if usable(history, "fp8_update"):
        launch_kernel("fp8_update", history, scale, scale_inv, limits, n, length, int(most_recent))
    elif history.numel():
        fp8_update_ref(history, scale, scale_inv, limits, most_recent)


def fp8_update_ref(history, scale, scale_inv, limits, most_recent=False) -> None:
    """`fp8_update` in plain torch."""
    newest, finite = history[0].clone(), history.where(history.isfinite(), 0.0)
    amax = newest if most_recent else finite.amax(dim=0).where(newest.isfinite(), newest)
    history[1:] = finite[:-1]
    history[0] = 0.0
    scale.copy_(_scale(amax, limits, scale))
    scale_inv.copy_(1.0 / scale)


def fp8_cast(
    x: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    amax: torch.Tensor | None = None,
    outputs: str = "rowwise",
) -> Pair:
    """Cast x `[m, k]`: fp8(x * scale) rowwise `[m, k]`, columnwise (transposed) `[k, m]`, or both, else None.

    scale, amax: fp32 `[]` or `[1]`; amax becomes max(amax, |x|), x before scaling.
    outputs: "rowwise", "columnwise" or "both". Raises ValueError for other shapes, types or devices.
    """
    _check(x, dtype, amax, scale)
    x, (row, flip) = x.contiguous(), _empty(x, *x.shape, dtype, outputs)
    if usable(x, "fp8_cast"):
        launch_kernel("fp8_cast", x, row, flip, scale, amax, *x.shape, TYPES[x.dtype], TYPES[dtype])
        return row, flip
    if amax is not None:
        fp8_amax(x, amax)
    q = fp8_cast_ref(x, scale, dtype)
    return q if row is not None else None, q.t().contiguous() if flip is not None else None


def fp8_cast_ref(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp8(x * scale), saturating, to nearest even; NaN stays NaN. x, scale `[...]` -> `[...]`"""
    largest = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-largest, largest).to(dtype)


def fp8_transpose(q: torch.Tensor) -> torch.Tensor:
    """Transpose an FP8 matrix: q `[m, k]` -> `[k, m]`, contiguous. Raises ValueError for other types."""
    if q.dtype not in FORMATS or q.dim() != 2:
        raise ValueError(f"a matrix of FP8 is transposed, not {q.dtype} {q.shape}")
    if not usable(q, "fp8_transpose", FORMATS):
        return q.t().contiguous()
    flip = q.new_empty(q.shape[::-1])
    launch_kernel("fp8_transpose", q.contiguous(), flip, *q.shape)
    return flip


def fp8_cast_rows(
    x: torch.Tensor,
    dtype: torch.dtype,
    limit: float,
    outputs: str = "rowwise",
    scale_inv: torch.Tensor | None = None,
) -> tuple[Fp8Matrix | None, Fp8Matrix | None]:
    """Cast x `[m, k]`, x^T `[k, m]` or both to FP8, a scale for each row; inverses fp32 `[m, 1]`, `[k, 1]`.

    Scales are limit / amax, rounded down to powers of two. x may already be FP8 of `dtype`, with the
    scale_inv `[m, 1]` of its rows or `[...]` of its blocks: then x * scale_inv is cast. Raises ValueError.
    """
    source, (row, flip) = _source(x, dtype, scale_inv), _empty(x, *x.shape, dtype, outputs)
    if not x.numel() or not usable(x, "fp8_cast_rows", FLOATS + FORMATS):
        return _plainly(lambda y: fp8_cast_rows_ref(y, dtype, limit), x, scale_inv, outputs)
    inverses = [None if q is None else x.new_empty(len(q), 1, dtype=torch.float32) for q in (row, flip)]
    amax = None if flip is None else x.new_zeros(sum(x.shape), dtype=torch.float32)
    kind = float(limit), TYPES[x.dtype], TYPES[dtype]
    launch_kernel("fp8_cast_rows", *source, row, inverses[0], flip, inverses[1], amax, *x.shape, *kind)
    return tuple(None if q is None else Fp8Matrix(q, i) for q, i in zip((row, flip), inverses))


def fp8_cast_rows_ref(x: torch.Tensor, dtype: torch.dtype, limit: float) -> Fp8Matrix:
    """The rowwise output of `fp8_cast_rows` for x `[m, k]`, in plain torch."""
    amax = x.abs().amax(dim=1, keepdim=True).float() if x.shape[1] else x.new_zeros(len(x), 1).float()
    scale = _scale(amax, torch.full_like(amax, limit), torch.ones_like(amax), power_of_two=True)
    return Fp8Matrix(fp8_cast_ref(x, scale, dtype).contiguous(), 1.0 / scale)


def fp8_cast_blocks(
    x: torch.Tensor,
    dtype: torch.dtype,
    squares: bool,
    outputs: str = "rowwise",
    power_of_two: bool = False,
    scale_inv: torch.Tensor | None = None,
) -> tuple[Fp8Matrix | None, Fp8Matrix | None]:
    """Cast x `[m, k]`, x^T `[k, m]` or both to FP8, each block with a scale of its own.

    Blocks are 128 x 128 (`squares`), or 1 x 128 along the last dim of each output, so that the two are not
    each other's transpose. Inverses are fp32: `[m, k/128]` with the first dim contiguous, or `[m/128, k/128]`
    with a row stride divisible by 4, as `torch._scaled_mm` takes them (block counts rounded up).
    x, scale_inv `[...]`, outputs: as in `fp8_cast_rows`. Raises ValueError for other shapes, types and
    devices.
    """
    source, (row, flip) = _source(x, dtype, scale_inv), _empty(x, *x.shape, dtype, outputs)
    if not usable(x, "fp8_cast_blocks", FLOATS + FORMATS):
        return _plainly(lambda y: fp8_cast_blocks_ref(y, dtype, squares, power_of_two), x, scale_inv, outputs)
    inverses = [None if q is None else _inverse(q, squares) for q in (row, flip)]
    strides = [0 if i is None else i.stride(0) for i in inverses]
    kind = int(squares), int(power_of_two), TYPES[x.dtype], TYPES[dtype]
    launch_kernel("fp8_cast_blocks", *source, row, inverses[0], flip, inverses[1], *x.shape, *strides, *kind)
    return tuple(None if q is None else Fp8Matrix(q, i) for q, i in zip((row, flip), inverses))


def fp8_cast_blocks_ref(x, dtype, squares, power_of_two=False) -> Fp8Matrix:
    """The rowwise output of `fp8_cast_blocks`, in plain torch."""
    (m, k), high = x.shape, BLOCK if squares else 1
    padded = F.pad(x.float(), (0, -k % BLOCK, 0, -m % high))
    padded = padded.view(padded.shape[0] // high, high, padded.shape[1] // BLOCK, BLOCK)
    amax = padded.abs().amax(dim=(1, 3), keepdim=True)
    scale = _scale(amax, torch.full_like(amax, fp8_limit(dtype)), torch.ones_like(amax), power_of_two)
    q = fp8_cast_ref(padded, scale, dtype).flatten(2, 3).flatten(0, 1)[:m, :k].contiguous()
    return Fp8Matrix(q, _inverse(q, squares).copy_(1.0 / scale[:, 0, :, 0]))


def fp8_decode(a: Fp8Matrix) -> torch.Tensor:
    """Dequantize: data * scale_inv, with one per tensor, row or block. -> fp32 `[m, k]`"""
    q, scale_inv = a
    if scale_inv.dim() == 2 and scale_inv.shape != (len(q), 1):
        scale_inv = _of_rows(q, scale_inv).repeat_interleave(BLOCK, 1)[:, : q.shape[1]]
    return q.float() * scale_inv


def _of_rows(q: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """Inverses of blocks as those of blocks 1 x 128, `[m, k/128]`: those of squares are repeated."""
    return scale_inv if len(scale_inv) == len(q) else scale_inv.repeat_interleave(BLOCK, 0)[: len(q)]


def _source(x: torch.Tensor, dtype: torch.dtype, scale_inv: torch.Tensor | None) -> tuple:
    """The kernels' arguments for x: x, the inverses of each row (None without), and their strides."""
    if scale_inv is None:
        _check(x, dtype)
        return x.contiguous(), None, 0, 0
    (m, k), kind = x.shape, (x.dtype, scale_inv.dtype, scale_inv.device)
    down, across = -(-m // BLOCK), -(-k // BLOCK)
    shapes = (m, 1), (m, across), (down, across)
    if kind != (dtype, torch.float32, x.device) or dtype not in FORMATS or scale_inv.shape not in shapes:
        raise ValueError(
            f"{x.dtype} {x.shape} with {scale_inv.dtype} {scale_inv.shape} is not cast to {dtype}"
        )
    rows = _of_rows(x, scale_inv).expand(m, across)
    return x.contiguous(), rows, *rows.stride()


def _plainly(cast: Callable, x: torch.Tensor, scale_inv: torch.Tensor | None, outputs: str) -> tuple:
    """A cast of x and one of x^T, those named by `outputs`, in plain torch."""
    x = x if scale_inv is None else fp8_decode(Fp8Matrix(x, scale_inv))
    return None if outputs == "columnwise" else cast(x), None if outputs == "rowwise" else cast(x.t())


def _scale(amax, limits, otherwise, power_of_two=False) -> torch.Tensor:
    """limits / amax within the bounds; `otherwise` where amax is zero or not finite."""
    scale = (limits / amax).clamp(SMALLEST, LARGEST)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale.where((amax > 0) & amax.isfinite(), otherwise)


def _empty(x: torch.Tensor, m: int, k: int, dtype: torch.dtype, outputs: str) -> Pair:
    """Empty outputs `[m, k]` and `[k, m]` on x's device, those named by `outputs`. Raises ValueError."""
    if outputs not in OUTPUTS:
        raise ValueError(f"outputs: {', '.join(OUTPUTS)}; not {outputs!r}")
    row = None if outputs == "columnwise" else x.new_empty(m, k, dtype=dtype)
    return row, None if outputs == "rowwise" else x.new_empty(k, m, dtype=dtype)


def _inverse(q: torch.Tensor, squares: bool) -> torch.Tensor:
    """Empty fp32 inverses of a row-major q, in the layout that `torch._scaled_mm` takes."""
    across, down = -(-q.shape[1] // BLOCK), -(-q.shape[0] // BLOCK)
    if squares:
        return q.new_empty(down, -(-across // 4) * 4, dtype=torch.float32)[:, :across]
    return q.new_empty(across, q.shape[0], dtype=torch.float32).t()


def _check(x, dtype=None, *scalars: torch.Tensor | None) -> None:
    """Raise ValueError for types, shapes or devices that the kernels do not take."""
    if x.dtype not in FLOATS or (dtype is not None and (dtype not in FORMATS or x.dim() != 2)):
        raise ValueError(f"a matrix of fp32, bf16, fp16 to E4M3 or E5M2, not {x.dtype} {x.shape} to {dtype}")
    _check_scalars(x.device, *scalars)


def _check_scalars(device: torch.device, *scalars: torch.Tensor | None) -> None:
    for x in scalars:
        if x is not None and (x.dtype != torch.float32 or x.numel() != 1 or x.device != device):
            raise ValueError(f"scale and amax are one fp32 element on {device}, not {x}")


@dataclass(frozen=True)
class Fp8Output:
    """How a fused kernel casts its result y `[m, k]`: fp8(y * scale) rowwise, columnwise `[k, m]`, or both.

    scale, amax: fp32, one element; amax, if not None, becomes max(amax, |y|). outputs: one of OUTPUTS.
    Raises ValueError for other types, devices or outputs.
    """

    dtype: torch.dtype
    scale: torch.Tensor
    amax: torch.Tensor | None = None
    outputs: str = "rowwise"

    def __post_init__(self) -> None:
        if self.dtype not in FORMATS or self.outputs not in OUTPUTS:
            raise ValueError(f"E4M3 or E5M2, {', '.join(OUTPUTS)}; not {self.dtype}, {self.outputs!r}")
        _check_scalars(self.scale.device, self.scale, self.amax)

    def empty(self, x: torch.Tensor, m: int, k: int) -> Pair:
        """Empty outputs, None: not wanted. Raises ValueError if no kernel takes x `[...]`."""
        if x.dtype not in FLOATS or x.device != self.scale.device:
            raise ValueError(f"{x.dtype} on {x.device}: must be fp32, bf16 or fp16 on {self.scale.device}")
        return _empty(x, m, k, self.dtype, self.outputs)

    def cast(self, y: torch.Tensor) -> Pair:
        """The cast of y `[m, k]`."""
        return fp8_cast(y, self.scale, self.dtype, self.amax, self.outputs)

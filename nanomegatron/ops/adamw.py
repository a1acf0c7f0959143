"""AdamW over a flat shard in one pass: the kernels of cuda/adamw.cu, and their references in torch.

    shard      [ q . k . v | norm | fc1 .......... | (padding) | embedding ]
    segments     kind 2      kind 0  kind 2                      kind 3          equal neighbours merged

A table on the device, built once, holds for each segment which of the two learning rates it has and whether
it decays; a thread block works on `CHUNK` elements of one segment. All values that change between steps are
read from the device.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from nanomegatron.ops.fp8_cast import fp8_amax, fp8_cast_ref
from nanomegatron.ops.kernels import TYPES, launch_kernel, usable

CHUNK, PACK = 8192, 8  # elements per thread block; packs are counted from multiples of 8 (adamw.cu's ALIGN)
FP8 = torch.float8_e4m3fn
DECOUPLED, DECAY = 1, 2  # bits of a segment's kind: the second learning rate, weight decay


@dataclass(frozen=True)
class Segments:
    """Ranges (start, stop, kind) of a flat tensor.

    table: the same on the device, int64 `[ranges, 4]`, rows (start, stop, first block, kind).
    blocks: the number of thread blocks for all ranges.
    """

    ranges: tuple[tuple[int, int, int], ...]
    table: torch.Tensor
    blocks: int

    @classmethod
    def from_ranges(cls, ranges: Iterable[tuple[int, int, int]], device: torch.device) -> "Segments":
        """Build the table. Raises ValueError for a range that ends before it begins."""
        ranges, rows, blocks = tuple(ranges), [], 0
        for start, stop, kind in ranges:
            if not 0 <= start <= stop:
                raise ValueError(f"range {start}..{stop}: must not end before it begins")
            rows.append((start, stop, blocks, kind))
            blocks += -(-(stop - start // PACK * PACK) // CHUNK) if start < stop else 0
        table = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 4)
        return cls(ranges, table, blocks)

    @classmethod
    def merged(cls, ranges: Iterable[tuple[int, int, int]], device: torch.device) -> "Segments":
        """Sort the ranges (start, stop, kind), and merge adjacent ones of the same kind."""
        whole: list[tuple[int, int, int]] = []
        for start, stop, kind in sorted(ranges):
            if whole and whole[-1][1:] == (start, kind):
                whole[-1] = whole[-1][0], stop, kind
            else:
                whole.append((start, stop, kind))
        return cls.from_ranges(whole, device)

    def on(self, device: torch.device) -> "Segments":
        """The same segments with the table on `device`."""
        return self if self.table.device == device else replace(self, table=self.table.to(device))

    def check(self, *tensors: torch.Tensor) -> None:
        """Raise ValueError unless tensors `[n]` are contiguous, of one n, on this device, and hold all."""
        length, device = len(tensors[0]), self.table.device
        for x in tensors:
            if x.dim() != 1 or len(x) != length or not x.is_contiguous() or x.device != device:
                raise ValueError(
                    f"{list(x.shape)} on {x.device}: must be flat, contiguous, [{length}] on {device}"
                )
        if self.ranges and (end := max(stop for _, stop, _ in self.ranges)) > length:
            raise ValueError(f"a segment ends at {end}, the tensors at {length}")


@dataclass(frozen=True)
class FlatState:
    """The tensors that one update reads and writes, all flat and of one length.

    main: the main parameters in fp32; `params`, if not None, is a copy in bf16, fp16 or E4M3. Moments and
    gradients are fp32 or bf16.

    scale, amax: only for a copy in E4M3, fp32 `[segments]` (so segments must not be merged). The copy is
    fp8(bf16(w) * scale), equal to the cast of a bf16 copy; amax becomes max(amax, new |bf16(w)|), for the
    scale of a later step.
    """

    main: torch.Tensor
    params: torch.Tensor | None
    grads: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    scale: torch.Tensor | None = None
    amax: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All, in the kernel's order. -> main `[n]`, params `[n]`, grads `[n]`, moments `[n]` and `[n]`"""
        return self.main, self.params, self.grads, self.exp_avg, self.exp_avg_sq


def adamw_flat_(
    state: FlatState,
    segments: Segments,
    numbers: tuple[torch.Tensor, ...],
    hyper: tuple[float, float, float],
) -> None:
    """One AdamW step over the segments of a flat shard, in place, in one launch.

    numbers `[]` or `[3]`: (step, values, grad_scale, skip), fp32 on the device. step: the number of this
    update, from 1; values, `[3]`: the two learning rates and the weight decay; grad_scale divides the
    gradients; skip: if not 0, only a copy in E4M3 (its scale may be new) and its amax are updated. hyper:
    (beta1, beta2, eps).
    Raises ValueError for other shapes, types or devices. See `adamw_flat_ref_`.
    """
    main, params, *others = state.tensors
    segments.check(*(x for x in state.tensors if x is not None))
    kept = (torch.float32, torch.bfloat16)
    copy = None if params is None else params.dtype
    fits = main.dtype == torch.float32 and copy in (None, torch.bfloat16, torch.float16, FP8)
    if not fits or any(x.dtype not in kept for x in others):
        raise ValueError(
            f"main, params, gradients, moments {[main.dtype, copy, *(x.dtype for x in others)]}: must be "
            "fp32 and 16 bits, E4M3 or nothing; the others fp32 or bf16"
        )
    casts = (state.scale, state.amax) if copy == FP8 else ()
    shapes = (), (3,), (), (), *((len(segments.ranges),) for _ in casts)
    for x, shape in zip((*numbers, *casts), shapes, strict=True):
        kind = None if x is None else (x.shape, x.dtype, x.device, x.is_contiguous())
        if kind != (shape, torch.float32, main.device, True):
            raise ValueError(f"numbers, scale, amax {kind}: must be fp32 {list(shape)} on {main.device}")
    if not usable(state.grads, "adamw"):
        adamw_flat_ref_(state, segments, numbers, hyper)
        return
    sizes = len(segments.ranges), segments.blocks, CHUNK
    types = -1 if params is None else TYPES[params.dtype], *(TYPES[x.dtype] for x in others)
    arguments = *sizes, *numbers, *hyper, *types, state.scale, state.amax
    launch_kernel("adamw", *state.tensors, segments.table, *arguments)


def cast_flat_(
    main: torch.Tensor, copy: torch.Tensor, segments: Segments, scale: torch.Tensor, amax: torch.Tensor
) -> None:
    """Cast main fp32 `[n]` to copy `[n]`, E4M3, as `adamw_flat_` does; scale, amax `[segments]`."""
    state, one = FlatState(main, copy, main, main, main, scale, amax), torch.ones(3, device=main.device)
    adamw_flat_(state, segments, (one[0], one, one[0], one[0]), (0.9, 0.95, 1e-8))


def adamw_flat_ref_(state: FlatState, segments: Segments, numbers, hyper) -> None:
    """`adamw_flat_` in plain torch: specification and oracle (arXiv 1711.05101)."""
    step, values, grad_scale, skip = numbers
    beta1, beta2, eps = hyper
    unbias1, unbias2 = (1 - beta ** step.double() for beta in (beta1, beta2))  # in fp32 off by up to 5e-5
    for start, stop, kind in () if skip else segments.ranges:
        main, params, grads, exp_avg, exp_avg_sq = (x if x is None else x[start:stop] for x in state.tensors)
        lr, decay = values[kind & DECOUPLED], values[2] if kind & DECAY else 0.0
        g = grads.float() / grad_scale
        m = exp_avg.float() * beta1 + g * (1 - beta1)
        v = exp_avg_sq.float() * beta2 + g * g * (1 - beta2)
        p = main * (1 - lr * decay) - lr * (m / unbias1) / ((v / unbias2).sqrt() + eps)
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)
        main.copy_(p)
        if params is not None and params.dtype != FP8:
            params.copy_(p)
    for i, (start, stop, _) in enumerate(segments.ranges if state.amax is not None else ()):
        kept = state.main[start:stop].bfloat16()
        state.params[start:stop].copy_(fp8_cast_ref(kept, state.scale[i], FP8))
        fp8_amax(kept, state.amax[i])


def sums_of_squares(
    x: torch.Tensor, segments: Segments, count: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sum of squares and number of zeros of each segment of x `[n]` -> fp64 `[segments]`, fp64 `[segments]`

    Deterministic. Without `count` the second may be None (only the kernel counts at no cost). Raises
    ValueError for other shapes or devices.
    """
    segments.check(x)
    if usable(x, "sums_of_squares"):
        out, partial = (
            x.new_empty(2, n, dtype=torch.float64) for n in (len(segments.ranges), segments.blocks)
        )
        sizes = len(segments.ranges), segments.blocks, CHUNK
        launch_kernel("sums_of_squares", out, partial, x, segments.table, *sizes, TYPES[x.dtype])
        return out.unbind()
    pieces = [x[start:stop] for start, stop, _ in segments.ranges]
    norms = torch._foreach_norm(pieces, dtype=torch.float64) if pieces else []  # fp32 sums are off by 1e-5
    zeros = [(len(piece) - piece.count_nonzero()).double() for piece in pieces] if count else []
    none = x.new_zeros((), dtype=torch.float64)  # so that there is something to stack
    squares, counts = (torch.stack([*numbers, none])[:-1] for numbers in (norms, zeros))
    return squares.square(), counts if count else None


def adamw_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    moments: tuple[list[torch.Tensor], list[torch.Tensor]],
    step: torch.Tensor,
    lr: torch.Tensor,
    hyper: tuple[float, float, float, float],
    grad_scale: torch.Tensor,
    skip: torch.Tensor,
) -> None:
    """One AdamW step over fp32 tensors, in place; all values that change between steps are on the device.

    params, grads, moments: `[...]` each, in the same order; step, lr, grad_scale, skip: `[]`. hyper: (beta1,
    beta2, eps, weight_decay). step: number of this update, from 1. The gradient is first divided by
    `grad_scale` (loss scale and clipping in one); if `skip` is 1, nothing changes.
    """
    beta1, beta2, eps, weight_decay = hyper
    torch._fused_adamw_(
        params,
        grads,
        *moments,
        [],
        [step] * len(params),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=skip,
    )

"""FP8 recipes: which scale quantizes a tensor, which amax the scale is from, and which ranks agree on it.

Tests: tests/test_fp8.py. Page: docs/fp8.md.

A linear layer has three tensors, x `[t, i]`, W `[o, i]` and g = dL/dy `[t, o]`, and three matmuls
(`fp8_linear.py`). Each needs both operands contiguous in the dimension that it sums over, so a tensor is cast
as it is ("rowwise"), transposed ("columnwise"), or both:

    y  [t, o] = x.rowwise W.rowwise^T                  dx [t, i] = g.rowwise W.columnwise^T
    dW [o, i] = g.columnwise x.columnwise^T

x and W are E4M3 (3 bits of mantissa, up to 448), g is E5M2 (2 bits, up to 57344) in the hybrid format. The
names are Transformer Engine's:

    Recipe           the settings of a run, and which Quantizer they ask for
    Quantizer        casts one tensor of one layer: `fp8.x`, `fp8.w`, `fp8.g` of an Fp8LayerState
    Quantized        what it returns: both copies, each with its scale_inv = 1 / scale
    Scales           amax_history, scale, scale_inv of all quantizers of a model

One cast, in the plainest recipe (`Tensorwise.cast`):

    amax = the largest |x|, max over fp8_group         fp8_group: the ranks that hold other parts of x
    scale = limit / amax                               limit: the format's largest / 2^margin
    q = fp8(x * scale)                                 y = q_x q_W^T / (scale_x scale_W)   (fp8_linear.py)

The other recipes differ in what has a scale, and from which amax. "Rowwise" is two things: a copy of a tensor
in its own order, which all recipes make; and `--fp8-recipe rowwise`, a scale for each row, here `Rowwise`.

    recipe      a scale for each   amax                      agreed over     when            W is cast
    delayed     tensor             of earlier steps; a       tp, dp, cp      end_step: all   by the optimizer,
                                   cast records its own      (Scales.axes)   layers at once  or at first use
    tensorwise  tensor             of this one: a pass       tp, where the   every cast:     at first use, or
                                   before the cast           tensor is split one number      by the optimizer
    rowwise     row of each copy   of this row               -               -               at first use
    blockwise   1 x 128 of each    of this block, in the     -               -               at first use
                copy; W 128 x 128  cast

W is cast once a step, for all microbatches and both matmuls, from its 16-bit value: at first use, or to the
same bits by the optimizer (`fast/fp8_gather.py`), which makes the rowwise copy; the columnwise one is made at
first use. A flat shard may end inside a row or block, so with their scales the optimizer never casts.

A row or block that tp splits has a scale for each part: results depend on tp, within the error of the format.
Scales of rows and blocks are powers of two: requantizing along the other dim (`Quantizer.transposed`) is
exact but for underflow.

A step of delayed scaling, and what raises the amaxes in row 0 of the history, each to the largest |value|:

    forward         x, in training     `Delayed.cast`, or the kernel that makes x (`Delayed.fused_output`)
    backward        g                  the same
    once a step     W                  `Delayed.cast` at first use, or AdamW's kernel (`fast/fp8_gather.py`)
    end_step        row 0 is max-reduced over the ranks; from it (most_recent), or the largest in the history
                    (max), come the scales of the next step; the history moves by a row

Microbatches and recomputed forwards raise one amax, and the history moves once a step, so neither a schedule
nor recomputing changes a scale. The first step has no history, and casts as tensorwise does.

Zeros, infinities, NaN, outliers, error bounds and how Transformer Engine differs: docs/fp8.md.
(FP8: arXiv 2209.05433; blocks: 2412.19437)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from nanomegatron.comm import all_reduce_
from nanomegatron.config.settings import PrecisionConfig
from nanomegatron.mesh import Axis
from nanomegatron.ops.fp8_cast import (
    FORMATS,
    Fp8Matrix,
    Fp8Output,
    Pair,
    fp8_amax,
    fp8_cast,
    fp8_cast_blocks,
    fp8_cast_rows,
    fp8_limit,
    fp8_scale,
    fp8_transpose,
    fp8_update,
)

E4M3, E5M2 = FORMATS
ROLES = ("x", "w", "g")
MULTIPLE = 16  # all sizes of FP8 matmuls are multiples of it
SCALE_INV_STRIDE = 4  # a matmul on a GPU reads a tensor's scale_inv at a multiple of 16 bytes


class Quantized(NamedTuple):
    """The FP8 copies of x `[m, k]`; None for one that was not requested."""

    rowwise: Fp8Matrix | None  # of x
    columnwise: Fp8Matrix | None  # of x^T, [k, m]

    @classmethod
    def with_scale(cls, pair: Pair, scale_inv: torch.Tensor) -> "Quantized":
        """Build from the copies that a cast with one scale made, and its scale_inv `[]`."""
        return cls._make(None if data is None else Fp8Matrix(data, scale_inv) for data in pair)

    def saved_form(self) -> Fp8Matrix:
        """Return the copy that a layer saves of its input for dW: rowwise only if the backward gathers it."""
        return self.rowwise if self.columnwise is None else self.columnwise


@dataclass(frozen=True)
class Recipe:
    """The FP8 settings of a run, not all of which matter to each recipe.

    Raises ValueError for unknown ones.
    """

    quantizer_class: type["Quantizer"]
    gradient: torch.dtype = E5M2  # inputs and weights are E4M3
    margin: int = 0  # a tensor's largest value is scaled to the format's, divided by 2^margin
    amax_history_len: int = 1  # steps whose amaxes count
    amax_compute_algo: str = "most_recent"  # the last step's amax, or "max": the largest in the history
    wgrad: bool = True  # weight gradients are multiplied in FP8 too
    gather: bool = False  # a sharded optimizer casts its shards of weights

    def __post_init__(self) -> None:
        algos = ("most_recent", "max")
        if self.gradient not in FORMATS or self.amax_compute_algo not in algos or self.amax_history_len < 1:
            raise ValueError(f"{self}: amax_compute_algo is most_recent or max, amax_history_len at least 1")
        if self.gather and not self.quantizer_class.one_scale:
            raise ValueError(f"{self}: gather is for recipes with one scale a tensor")

    def limit(self, dtype: torch.dtype) -> float:
        """Return the value that an amax is scaled to in this format."""
        return fp8_limit(dtype, self.margin if self.quantizer_class.has_margin else 0)


class Quantizer:
    """Casts one tensor of one layer, its x, w or g, to FP8; each recipe is a class with its `cast`.

    dtype: the format; limit: the value that an amax is scaled to. amax, scale, scale_inv `[]`: of delayed
    scaling, and of weights that the optimizer casts; elements of the tensors of `scales`, from `bind` on.
    """

    one_scale: ClassVar[bool] = True  # a tensor has one, so that the optimizer may cast a weight
    power_of_two: ClassVar[bool] = False  # scales are rounded down to one
    has_margin: ClassVar[bool] = True
    keeps_history: ClassVar[bool] = False  # scales are of earlier steps' amaxes
    has_scale: bool = False  # `scale` is known before the tensor is

    def __init__(self, role: str, dtype: torch.dtype, limit: float) -> None:
        self.role = role
        self.dtype = dtype
        self.limit = limit

    def bind(self, scales: "Scales", slot: int) -> None:
        """Take one element of each tensor of `scales`."""
        self.scales = scales
        self.slot = slot
        self.amax = scales.amax_history[0, slot]
        self.scale = scales.scale[slot]
        self.scale_inv = scales.scale_inv[slot, 0]

    def quantize(
        self, x: torch.Tensor, copies: str = "both", fp8_group: Axis | None = None, record: bool = True
    ) -> Quantized:
        """Cast x `[m, k]`.

        copies: "rowwise", "columnwise" or "both". fp8_group: its ranks hold other rows or columns of the same
        tensor; tensorwise scaling, and delayed in its first step, all-reduce one number over it. record: keep
        the amax for later steps (delayed scaling), and count the cast in statistics; false for x and g in
        evaluation.
        """
        x = x.detach()
        quantized = self.cast(x, copies, fp8_group, record)
        self.record_stats(lambda: x, quantized, record)
        return quantized

    def cast(self, x: torch.Tensor, copies: str, fp8_group: Axis | None, record: bool) -> Quantized:
        """Cast x `[m, k]`, with the arguments of `quantize`."""
        raise NotImplementedError

    def transposed(self, rowwise: Fp8Matrix) -> Fp8Matrix:
        """Make the columnwise copy from the rowwise one: with one scale the same bytes. `[m, k] -> [k, m]`"""
        return Fp8Matrix(fp8_transpose(rowwise.data), rowwise.scale_inv)

    def record_stats(self, x: Callable[[], torch.Tensor], quantized: Quantized, record: bool = True) -> None:
        """Count a cast of x `[m, k]` in the statistics (report/counters.py), in steps that log them."""
        if self.scales.stats_hook and record and quantized.rowwise is not None:
            self.scales.stats_hook(self.slot, x(), quantized.rowwise)


class Tensorwise(Quantizer):
    """A scale for each tensor from its own amax, a pass over it before the cast."""

    def cast(self, x: torch.Tensor, copies: str, fp8_group: Axis | None, record: bool) -> Quantized:
        """Cast x `[m, k]`; all-reduces its amax over fp8_group."""
        scale, scale_inv = fp8_scale(tensor_amax(x, fp8_group), self.limit)
        return Quantized.with_scale(fp8_cast(x, scale, self.dtype, None, copies), scale_inv)


class Delayed(Quantizer):
    """A scale for each tensor from the amaxes of earlier steps, the same on all ranks of `Scales.axes`.

    The first step has no history and takes the scale from the tensor's own amax, as tensorwise does.
    """

    keeps_history = True

    @property
    def has_scale(self) -> bool:
        """Whether a step has ended."""
        return self.scales.has_history

    def cast(self, x: torch.Tensor, copies: str, fp8_group: Axis | None, record: bool) -> Quantized:
        """Cast x `[m, k]`; record: raise the amax of this step to that of x."""
        scale = self.scale
        scale_inv = self.scale_inv
        if not self.has_scale:
            scale, scale_inv = fp8_scale(tensor_amax(x, fp8_group), self.limit)
        amax = self.amax if record else None
        return Quantized.with_scale(fp8_cast(x, scale, self.dtype, amax, copies), scale_inv)

    def fused_output(self, copies: str, record: bool = True) -> Fp8Output:
        """How a kernel that makes this tensor casts it as `cast` would, where `has_scale`."""
        return Fp8Output(self.dtype, self.scale, self.amax if record else None, copies)


class Rowwise(Quantizer):
    """--fp8-recipe rowwise: a scale for each row of each copy, a power of two; nothing is agreed."""

    one_scale = False
    power_of_two = True

    def cast(self, x: torch.Tensor, copies: str, fp8_group: Axis | None, record: bool) -> Quantized:
        """Cast each row of x `[m, k]`, and each column as a row of the other copy."""
        return Quantized._make(fp8_cast_rows(x, self.dtype, self.limit, copies))

    def transposed(self, rowwise: Fp8Matrix) -> Fp8Matrix:
        """Cast the FP8 values along the other dim. `[m, k] -> [k, m]`"""
        _, columnwise = fp8_cast_rows(
            rowwise.data, self.dtype, self.limit, "columnwise", scale_inv=rowwise.scale_inv
        )
        return columnwise


class Blockwise(Quantizer):
    """A scale for each 1 x 128 values of each copy, 128 x 128 of a weight, a power of two; no margin."""

    one_scale = False
    power_of_two = True
    has_margin = False

    def cast(self, x: torch.Tensor, copies: str, fp8_group: Axis | None, record: bool) -> Quantized:
        """Cast each block of x `[m, k]`; fp8_group has other blocks, with scales of their own."""
        return Quantized._make(
            fp8_cast_blocks(x, self.dtype, squares=self.role == "w", outputs=copies, power_of_two=True)
        )

    def transposed(self, rowwise: Fp8Matrix) -> Fp8Matrix:
        """Cast the FP8 values along the other dim. `[m, k] -> [k, m]`"""
        _, columnwise = fp8_cast_blocks(
            rowwise.data,
            self.dtype,
            squares=self.role == "w",
            outputs="columnwise",
            power_of_two=True,
            scale_inv=rowwise.scale_inv,
        )
        return columnwise


RECIPES = {"delayed": Delayed, "tensorwise": Tensorwise, "rowwise": Rowwise, "blockwise": Blockwise}


def recipe_of(config: PrecisionConfig) -> Recipe:
    """Return the recipe of a run's settings."""
    return Recipe(
        RECIPES[config.fp8_recipe],
        gradient=E5M2 if config.fp8_format == "hybrid" else E4M3,
        margin=config.fp8_margin,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
        wgrad=config.fp8_wgrad,
        gather=config.fp8_param_gather,
    )


class Fp8LayerState:
    """The FP8 state of one linear layer: the quantizers of its x, w and g, and this step's casts of w.

    `Scales` takes the states of all layers; before that nothing can be quantized. gradient: the format of g,
    if not the recipe's.
    """

    def __init__(self, name: str, recipe: Recipe, gradient: torch.dtype | None = None) -> None:
        self.name = name
        self.recipe = recipe
        dtypes = E4M3, E4M3, gradient or recipe.gradient
        self.quantizers = [
            recipe.quantizer_class(role, dtype, recipe.limit(dtype))
            for role, dtype in zip(ROLES, dtypes, strict=True)
        ]
        self.x, self.w, self.g = self.quantizers
        self.cached_weight: Quantized | None = None  # both copies, of this step
        self.optimizer_cast: Fp8Matrix | None = None  # the rowwise copy, if the optimizer has made it
        self.matmuls: Any = None  # fp8_linear.Fp8Matmuls

    def weight(self, param: torch.Tensor, fp8_group: Axis | None = None) -> Quantized:
        """Return both copies of the local param `[o, i]`, cast at first use in a step; fp8_group shards it.

        Raises RuntimeError if the weight is freed and its cast was discarded.
        """
        if self.cached_weight is not None:
            return self.cached_weight
        if self.optimizer_cast is not None:  # fast/fp8_gather.py
            self.cached_weight = Quantized(self.optimizer_cast, self.w.transposed(self.optimizer_cast))
        elif is_freed(param):
            raise RuntimeError(f"{self.name}: the optimizer's cast was discarded; call end_step first")
        else:
            self.cached_weight = self.w.quantize(param, "both", fp8_group)
        return self.cached_weight


class Scales:
    """What the quantizers of all FP8 layers of a model, or of one stage of it, have in common.

    amax_history `[history, n]` (row 0 is this step's), scale, scale_inv and limits `[n, ...]` have an element
    for each quantizer, so that delayed scaling ends a step with one all-reduce and one kernel. Tensorwise
    scaling uses only those of weights that the optimizer casts.
    axes: delayed amaxes are max-reduced over them, so that all ranks cast with one scale (tp, dp_cp).
    Raises ValueError if two layers have one name.
    """

    def __init__(
        self,
        recipe: Recipe,
        layers: Sequence[Fp8LayerState],
        device: torch.device,
        axes: Sequence[Axis] = (),
    ) -> None:
        self.recipe = recipe
        self.axes = tuple(axes)
        self.layers = {layer.name: layer for layer in layers}
        if len(self.layers) < len(layers):
            raise ValueError(f"FP8 layers must have names of their own: {[layer.name for layer in layers]}")
        self.has_history = False  # delayed: no step has ended
        self.stats_hook: Callable | None = None  # report/counters.py: (slot, x, its rowwise copy)

        quantizers = [quantizer for layer in layers for quantizer in layer.quantizers]
        self.limits = torch.tensor([quantizer.limit for quantizer in quantizers], device=device)
        self.amax_history = self.limits.new_zeros(recipe.amax_history_len, len(quantizers))
        self.scale = torch.ones_like(self.limits)
        self.scale_inv = self.limits.new_ones(len(quantizers), SCALE_INV_STRIDE)
        for slot, quantizer in enumerate(quantizers):
            quantizer.bind(self, slot)

    def end_step(self) -> None:
        """Compute the next step's scales and drop the casts of weights, before the optimizer's step."""
        if self.layers and self.recipe.quantizer_class.keeps_history:
            self.update_scales()
        elif self.layers:
            self.amax_history[:1] = 0.0  # of weights that the optimizer casts
        self.clear_weight_cache()

    def update_scales(self) -> None:
        """Max-reduce the amaxes of this step over each axis; compute scales, and shift the history."""
        all_reduce_amax_(self.amax_history[0], self.axes)
        scale_inv = torch.empty_like(self.scale)
        most_recent = self.recipe.amax_compute_algo == "most_recent"
        fp8_update(self.amax_history, self.scale, scale_inv, self.limits, most_recent)
        self.set_scale_inv(scale_inv)
        self.has_history = True

    def clear_step(self) -> None:
        """Discard this step's amaxes, of a warm-up, and the casts of weights that recorded some."""
        self.amax_history[:1] = 0.0
        self.clear_weight_cache()

    def clear_weight_cache(self) -> None:
        """Drop the casts of weights: their next use casts again, unless the optimizer does so before."""
        for layer in self.layers.values():
            layer.cached_weight = None
            layer.optimizer_cast = None

    def set_scale_inv(self, scale_inv: torch.Tensor) -> None:
        """Copy scale_inv `[n]` of all scales to where matmuls, and graphs of kernels, read them."""
        self.scale_inv.copy_(scale_inv[:, None].expand(-1, SCALE_INV_STRIDE))


def tensor_amax(x: torch.Tensor, fp8_group: Axis | None) -> torch.Tensor:
    """The largest |x| of x `[m, k]` and of its other parts on the ranks of fp8_group -> fp32 `[]`"""
    amax = x.new_zeros((), dtype=torch.float32)
    fp8_amax(x, amax)
    return all_reduce_amax_(amax, [fp8_group] if fp8_group else ())


def all_reduce_amax_(amax: torch.Tensor, axes: Iterable[Axis]) -> torch.Tensor:
    """Max-reduce amax `[...]` over the axes, in place -> `[...]`; NaN, which reductions lose, becomes inf."""
    for axis in axes:
        if axis.size > 1:
            all_reduce_(amax.nan_to_num_(torch.inf, torch.inf), axis, "max")
    return amax


def is_freed(param: torch.Tensor) -> bool:
    """Whether param `[n, k]` has no memory of its own: it is one value, expanded (fast/fp8_gather.py)."""
    return not any(param.stride())

"""FP8 recipes: which scale quantizes a tensor, which amax the scale is from, and which ranks agree on it.

Tests: tests/test_fp8.py. Page: docs/fp8.md.

A linear layer has three tensors, x `[t, i]`, W `[o, i]` and g = dL/dy `[t, o]`, and three matmuls
(`fp8_linear.py`). Each needs both operands contiguous in the dimension that it sums over, so a tensor is cast
as it is ("rowwise"), transposed ("columnwise"), or both:

    y  [t, o] = x.rowwise W.rowwise^T                  dx [t, i] = g.rowwise W.columnwise^T
    dW [o, i] = g.columnwise x.columnwise^T

x and W are E4M3 (3 bits of mantissa, up to 448), g is E5M2 (2 bits, up to 57344) in the hybrid format. One
tensor's way, in the plainest recipe:

    Fp8LayerState.cast                                  x, "x", which copies, over which ranks x is split
        Recipe.cast
            amax = the largest |x|, max over the ranks  tensor_amax
            scale = limit / amax                        fp8_scale; limit: the format's largest / 2^margin
            q = fp8(x * scale), and 1 / scale           Fp8Output -> Quantized: the copies
    y = q_x q_W^T / (scale_x scale_W)                   fp8_linear.py

The other recipes differ in what has a scale, and from which amax. "Rowwise" is two things: a copy of a tensor
in its own order, which all recipes make; and `--fp8-recipe rowwise`, a scale for each row, here RowScaled.

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
Scales of rows and blocks are powers of two: requantizing along the other dim (`Recipe.transposed`) is
exact but for underflow.

Delayed scaling has no history in its first step, which casts as tensorwise does. Microbatches and recomputed
forwards raise one amax, and the history moves once a step, so neither a schedule nor recomputing changes a
scale. The scale is from the amax of the last step (most_recent) or the largest in the history (max).

Zeros, infinities, NaN, outliers, error bounds and how Transformer Engine differs: docs/fp8.md.
(FP8: arXiv 2209.05433; blocks: 2412.19437)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
INVERSE_STRIDE = 4  # a matmul on a GPU reads a tensor's inverse scale at a multiple of 16 bytes


class Quantized(NamedTuple):
    """The FP8 copies of x `[m, k]`; None for one that was not requested."""

    rowwise: Fp8Matrix | None  # of x
    columnwise: Fp8Matrix | None  # of x^T, [k, m]

    @classmethod
    def with_scale(cls, pair: Pair, inverse: torch.Tensor) -> "Quantized":
        """Build from the copies that a cast with one scale made, and the scale's inverse `[]`."""
        return cls._make(None if data is None else Fp8Matrix(data, inverse) for data in pair)

    def saved_form(self) -> Fp8Matrix:
        """Return the copy that a layer saves of its input for dW: rowwise only if the backward gathers it."""
        return self.rowwise if self.columnwise is None else self.columnwise


class Fp8LayerState:
    """The FP8 state of one linear layer, and its casts; `Scales.add_layer` makes it.

    first: the first of its three slots, for x, w and g, in the tensors of `scales`.
    """

    def __init__(self, name: str, scales: "Scales", first: int, recipe: "Recipe") -> None:
        self.name = name
        self.scales = scales
        self.recipe = recipe
        self.slots = slice(first, first + len(ROLES))
        self.cached_weight: Quantized | None = None  # both copies, of this step
        self.optimizer_cast: Fp8Matrix | None = None  # the rowwise copy, if the optimizer has made it
        self.matmuls: Any = None  # fp8_linear.Fp8Matmuls

    def cast(
        self, x: torch.Tensor, role: str, copies: str = "both", axis: Axis | None = None, record: bool = True
    ) -> Quantized:
        """Quantize x `[m, k]` as the tensor `role`, "x", "w" or "g".

        copies: "rowwise", "columnwise" or "both". axis: its ranks hold other rows or columns of the same
        tensor; tensorwise scaling, and delayed in its first step, all-reduce one number over it. record: keep
        the amax for later steps (delayed scaling), and count the cast in statistics; false for x and g in
        evaluation.
        """
        x = x.detach()
        quantized = self.recipe.cast(self, x, role, copies, axis, record)
        self.record_stats(role, lambda: x, quantized, record)
        return quantized

    def weight(self, param: torch.Tensor, axis: Axis | None = None) -> Quantized:
        """Return both copies of the local param `[o, i]`, cast at first use in a step; axis shards it.

        Raises RuntimeError if the weight is freed and its cast was discarded.
        """
        if self.cached_weight is not None:
            return self.cached_weight
        if self.optimizer_cast is not None:  # fast/fp8_gather.py
            columnwise = self.recipe.transposed(self.optimizer_cast, "w")
            self.cached_weight = Quantized(self.optimizer_cast, columnwise)
        elif is_freed(param):
            raise RuntimeError(f"{self.name}: the optimizer's cast was discarded; call end_step first")
        else:
            self.cached_weight = self.cast(param, "w", "both", axis)
        return self.cached_weight

    def slot(self, role: str) -> int:
        """Return the index of x, w or g in the tensors of `Scales`."""
        return self.slots.start + ROLES.index(role)

    @property
    def has_scale(self) -> bool:
        """Whether a tensor's scale is known before the tensor: delayed scaling, after its first step."""
        return self.recipe.keeps_history and self.scales.has_history

    def known_scale(self, role: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scale of x, w or g and its inverse, where `has_scale` -> `[]`, `[]`"""
        slot = self.slot(role)
        return self.scales.scale[slot], self.scales.inverses[slot, 0]

    def amax_of(self, role: str, record: bool) -> torch.Tensor | None:
        """Where a cast of x, w or g records its amax, a view of the history -> `[]`; None: nowhere"""
        if record and self.recipe.keeps_history:
            return self.scales.history[0, self.slot(role)]
        return None

    def scaled_output(self, role: str, copies: str, record: bool = True) -> tuple[Fp8Output, torch.Tensor]:
        """How to write x, w or g with its known scale -> Fp8Output, and the scale's inverse `[]`"""
        scale, inverse = self.known_scale(role)
        return Fp8Output(self.recipe.dtype(role), scale, self.amax_of(role, record), copies), inverse

    def record_stats(
        self, role: str, x: Callable[[], torch.Tensor], quantized: Quantized, record: bool = True
    ) -> None:
        """Count a cast of x `[m, k]` in the statistics (report/counters.py), in steps that log them."""
        if self.scales.stats_hook and record and quantized.rowwise is not None:
            self.scales.stats_hook(self.slot(role), x(), quantized.rowwise)


class Scales:
    """The FP8 state of all linear layers of a model, or of one stage of it.

    Each layer has three slots in `history`, `scale` and `limits`, for x, w and g. Delayed scaling uses all,
    tensorwise scaling only those of weights that the optimizer casts.
    axes: delayed amaxes are max-reduced over them, so that all ranks cast with one scale (tp, dp_cp).
    """

    def __init__(self, recipe: "Recipe", device: torch.device, axes: Sequence[Axis] = ()) -> None:
        self.recipe = recipe
        self.axes = tuple(axes)
        self.layers: dict[str, Fp8LayerState] = {}
        self.has_history = False  # delayed: no step has ended
        self.stats_hook: Callable | None = None  # report/counters.py: (slot, x, its rowwise copy)
        self.history = torch.zeros(recipe.history, 0, device=device)  # amaxes: row 0 is this step's
        self.scale, self.limits = (torch.ones(0, device=device) for _ in range(2))
        self.inverses = torch.ones(0, INVERSE_STRIDE, device=device)

    def add_layer(self, name: str, gradient: torch.dtype | None = None) -> Fp8LayerState:
        """Add a layer and return its state. Raises ValueError if the model has a layer of this name already.

        gradient: the format of its gradients, if not the recipe's.
        """
        if name in self.layers:
            raise ValueError(f"there is an FP8 layer {name} already")
        recipe = replace(self.recipe, gradient=gradient or self.recipe.gradient)
        limits = self.limits.new_tensor([recipe.limit(role) for role in ROLES])
        self.history = torch.cat((self.history, self.history.new_zeros(len(self.history), len(ROLES))), dim=1)
        self.limits = torch.cat((self.limits, limits))
        self.scale = torch.cat((self.scale, torch.ones_like(limits)))
        self.inverses = torch.cat((self.inverses, self.inverses.new_ones(len(ROLES), INVERSE_STRIDE)))
        self.layers[name] = Fp8LayerState(name, self, len(ROLES) * len(self.layers), recipe)
        return self.layers[name]

    def end_step(self) -> None:
        """Compute the next step's scales and drop the casts of weights, before the optimizer's step."""
        if self.layers:
            self.recipe.end_step(self)
        self.clear_weight_cache()

    def clear_step(self) -> None:
        """Discard this step's amaxes, of a warm-up, and the casts of weights that recorded some."""
        self.history[:1] = 0.0
        self.clear_weight_cache()

    def clear_weight_cache(self) -> None:
        """Drop the casts of weights: their next use casts again, unless the optimizer does so before."""
        for layer in self.layers.values():
            layer.cached_weight = layer.optimizer_cast = None

    def set_inverses(self, inverse: torch.Tensor) -> None:
        """Copy inverse `[n]` of all scales to where matmuls, and graphs of kernels, read them."""
        self.inverses.copy_(inverse[:, None].expand(-1, INVERSE_STRIDE))


@dataclass(frozen=True)
class Recipe:
    """Tensorwise scaling: a scale for each tensor from its own amax; other recipes override what differs.

    The fields are the settings of a run, not all of which matter to each recipe. Raises ValueError for
    unknown ones.
    """

    gradient: torch.dtype = E5M2  # inputs and weights are E4M3
    margin: int = 0  # a tensor's largest value is scaled to the format's, divided by 2^margin
    history: int = 1  # steps whose amaxes count
    algo: str = "most_recent"  # the last step's amax, or "max": the largest in the history
    wgrad: bool = True  # weight gradients are multiplied in FP8 too
    gather: bool = False  # a sharded optimizer casts its shards of weights

    one_scale: ClassVar[bool] = True  # a tensor has one, so that the optimizer may cast a weight
    power_of_two: ClassVar[bool] = False  # scales are rounded down to one
    keeps_history: ClassVar[bool] = False  # a step's scales are known before it: from the steps before

    def __post_init__(self) -> None:
        if self.gradient not in FORMATS or self.algo not in ("most_recent", "max") or self.history < 1:
            raise ValueError(f"{self}: algo is most_recent or max, history at least 1")
        if self.gather and not self.one_scale:
            raise ValueError(f"{self}: gather is for recipes with one scale a tensor")

    def dtype(self, role: str) -> torch.dtype:
        """Return the FP8 format of x, w or g."""
        return self.gradient if role == "g" else E4M3

    def limit(self, role: str) -> float:
        """Return the value that the amax of x, w or g is scaled to."""
        return fp8_limit(self.dtype(role), self.margin)

    def cast(
        self, layer: Fp8LayerState, x: torch.Tensor, role: str, copies: str, axis: Axis | None, record: bool
    ) -> Quantized:
        """Quantize x `[m, k]` as a tensor of the layer. The arguments are those of `Fp8LayerState.cast`."""
        scale, inverse = self.scale(layer, x, role, axis)
        output = Fp8Output(self.dtype(role), scale, layer.amax_of(role, record), copies)
        return Quantized.with_scale(output.cast(x), inverse)

    def scale(
        self, layer: Fp8LayerState, x: torch.Tensor, role: str, axis: Axis | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale of x `[m, k]` from its own amax, a pass over it, with its inverse -> `[]`, `[]`"""
        return fp8_scale(tensor_amax(x, axis), self.limit(role), self.power_of_two)

    def transposed(self, rowwise: Fp8Matrix, role: str) -> Fp8Matrix:
        """Make the columnwise copy from the rowwise one: with one scale the same bytes. `[m, k] -> [k, m]`"""
        return Fp8Matrix(fp8_transpose(rowwise.data), rowwise.inverse)

    def end_step(self, scales: Scales) -> None:
        """Compute the scales of the next step, if they are known before it; zero the amaxes of this one."""
        scales.history[:1] = 0.0


class Delayed(Recipe):
    """A scale for each tensor from the amaxes of earlier steps, the same on all ranks of `Scales.axes`.

    A cast records its own amax. The first step has no history and casts as tensorwise does.
    """

    keeps_history = True

    def scale(
        self, layer: Fp8LayerState, x: torch.Tensor, role: str, axis: Axis | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale for x `[m, k]` from the end of the last step, and its inverse -> `[]`, `[]`"""
        return layer.known_scale(role) if layer.has_scale else super().scale(layer, x, role, axis)

    def end_step(self, scales: Scales) -> None:
        """Max-reduce the amaxes of this step over each axis; compute scales, and shift the history."""
        all_reduce_amax_(scales.history[0], scales.axes)
        inverse = torch.empty_like(scales.scale)
        most_recent = self.algo == "most_recent"
        fp8_update(scales.history, scales.scale, inverse, scales.limits, most_recent)
        scales.set_inverses(inverse)
        scales.has_history = True


class RowScaled(Recipe):
    """--fp8-recipe rowwise: a scale for each row of each copy, a power of two; nothing is agreed."""

    one_scale = False
    power_of_two = True

    def cast(
        self, layer: Fp8LayerState, x: torch.Tensor, role: str, copies: str, axis: Axis | None, record: bool
    ) -> Quantized:
        """Cast each row of x `[m, k]`, and each column as a row of the other copy."""
        return self._rows(x, role, copies)

    def transposed(self, rowwise: Fp8Matrix, role: str) -> Fp8Matrix:
        """Cast the FP8 values along the other dim. `[m, k] -> [k, m]`"""
        return self._rows(rowwise.data, role, "columnwise", rowwise.inverse).columnwise

    def _rows(
        self, x: torch.Tensor, role: str, copies: str, inverse: torch.Tensor | None = None
    ) -> Quantized:
        return Quantized._make(fp8_cast_rows(x, self.dtype(role), self.limit(role), copies, inverse))


class Blockwise(Recipe):
    """A scale for each 1 x 128 values of each copy, 128 x 128 of a weight, a power of two; no margin."""

    one_scale = False
    power_of_two = True

    def limit(self, role: str) -> float:
        """Return the format's largest value."""
        return fp8_limit(self.dtype(role))

    def cast(
        self, layer: Fp8LayerState, x: torch.Tensor, role: str, copies: str, axis: Axis | None, record: bool
    ) -> Quantized:
        """Cast each block of x `[m, k]`; `axis` has other blocks, with scales of their own."""
        return self._blocks(x, role, copies)

    def transposed(self, rowwise: Fp8Matrix, role: str) -> Fp8Matrix:
        """Cast the FP8 values along the other dim. `[m, k] -> [k, m]`"""
        return self._blocks(rowwise.data, role, "columnwise", rowwise.inverse).columnwise

    def _blocks(
        self, x: torch.Tensor, role: str, copies: str, inverse: torch.Tensor | None = None
    ) -> Quantized:
        squares = role == "w"
        blocks = fp8_cast_blocks(x, self.dtype(role), squares, copies, power_of_two=True, inverse=inverse)
        return Quantized._make(blocks)


RECIPES = {"delayed": Delayed, "tensorwise": Recipe, "rowwise": RowScaled, "blockwise": Blockwise}


def recipe_of(config: PrecisionConfig) -> Recipe:
    """Return the recipe of a run's settings."""
    return RECIPES[config.fp8_recipe](
        gradient=E5M2 if config.fp8_format == "hybrid" else E4M3,
        margin=config.fp8_margin,
        history=config.fp8_amax_history_len,
        algo=config.fp8_amax_compute_algo,
        wgrad=config.fp8_wgrad,
        gather=config.fp8_param_gather,
    )


def tensor_amax(x: torch.Tensor, axis: Axis | None) -> torch.Tensor:
    """The largest |x| of x `[m, k]` and of its other parts on the ranks of `axis` -> fp32 `[]`"""
    amax = x.new_zeros((), dtype=torch.float32)
    fp8_amax(x, amax)
    return all_reduce_amax_(amax, [axis] if axis else ())


def all_reduce_amax_(amax: torch.Tensor, axes: Iterable[Axis]) -> torch.Tensor:
    """Max-reduce amax `[...]` over the axes, in place -> `[...]`; NaN, which reductions lose, becomes inf."""
    for axis in axes:
        if axis.size > 1:
            all_reduce_(amax.nan_to_num_(torch.inf, torch.inf), axis, "max")
    return amax


def is_freed(param: torch.Tensor) -> bool:
    """Whether param `[n, k]` has no memory of its own: it is one value, expanded (fast/fp8_gather.py)."""
    return not any(param.stride())

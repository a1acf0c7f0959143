"""FP8 recipes: which scale a tensor is cast with, who agrees on it, and the matmul of what has been cast.

A linear layer has three tensors, x `[t, i]`, W `[o, i]` and g = dL/dy `[t, o]`, and three matmuls
(`fp8_linear.py`). Each needs both operands contiguous in the dimension that it sums over, so a tensor is cast
as it is ("rowwise"), transposed ("columnwise"), or both:

    y  [t, o] = x.rowwise W.rowwise^T                  dx [t, i] = g.rowwise W.columnwise^T
    dW [o, i] = g.columnwise x.columnwise^T

x and W are E4M3 (3 bits of mantissa, up to 448), g is E5M2 (2 bits, up to 57344) in the hybrid format.

    recipe      a scale for each   amax                      agreed over     when            W is cast
    delayed     tensor             of earlier steps;         tp, dp, cp      end_step: one   by the optimizer,
                                   a cast notes its own      (Scales.axes)   max of all      or at first use
    tensorwise  tensor             of this one: a pass       tp, where the   every cast:     at first use, or
                                   before the cast           tensor is cut   one number      by the optimizer
    rowwise     row of each copy   of this row               -               -               at first use
    blockwise   1 x 128 of each    of this block, in the     -               -               at first use
                copy; W 128 x 128  cast

W is cast once a step, for all microbatches and both matmuls, from its value in 16 bits: at first use, or to
the same bits by the optimizer (`fast/fp8_gather.py`), which makes the rowwise copy; the columnwise one is
made at first use. A flat shard may end inside a row or block, so under these the optimizer never casts.
Experts (`fast/fp8_experts.py`) are in FP8 under rowwise only, with gradients in E4M3; else in bf16.

A row or block that tp cuts has a scale for each part: results depend on tp, within the error of the format.
Scales of rows and blocks are powers of two: a second cast along the other dim (`turned`) is exact but for
underflow.

Delayed scaling has no earlier amaxes in its first step, which casts as tensorwise does. Microbatches and
recomputed forwards raise one amax, and the history moves once a step, so neither a schedule nor recomputing
changes a scale. (Transformer Engine moves it with every microbatch, and begins with scale 1.) The scale is
limit / amax, limit = largest value / 2^margin, amax that of the last step (most_recent) or the largest in the
history (max).

What zeros, infinities, NaN and outliers do, and the bounds of the error, are in docs/fp8.md.
(FP8: arXiv 2209.05433; blocks: 2412.19437)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from nanomegatron.comm import all_reduce_
from nanomegatron.config.settings import PrecisionConfig
from nanomegatron.mesh import Axis
from nanomegatron.ops.fp8_cast import (
    FORMATS,
    Fp8,
    Fp8Matrix,
    Pair,
    fp8_amax,
    fp8_cast_blocks,
    fp8_cast_rows,
    fp8_limit,
    fp8_scale,
    fp8_turn,
    fp8_update,
)

E4M3, E5M2 = FORMATS
OF_TENSORS = ("delayed", "tensorwise")  # have a scale for each
RECIPES = (*OF_TENSORS, "rowwise", "blockwise")
ROLES = ("x", "w", "g")
MULTIPLE = 16  # of all sizes of FP8 matmuls
ALIGN = 4  # a matmul on a GPU reads a tensor's scale at a multiple of 16 bytes


@dataclass(frozen=True)
class Recipe:
    """How the tensors of linear layers are cast. Raises ValueError for what there is not."""

    name: str  # of RECIPES
    gradient: torch.dtype = E5M2  # inputs and weights are E4M3
    margin: int = 0  # a tensor's largest value is scaled to the format's, divided by 2^margin; not blockwise
    history: int = 1  # delayed: steps whose amaxes count
    algo: str = "most_recent"  # delayed: which of them, or "max"
    wgrad: bool = True  # weight gradients are multiplied in FP8 too
    gather: bool = False  # a sharded optimizer casts its shards of weights; not rowwise, not blockwise

    def __post_init__(self) -> None:
        known = self.name in RECIPES and self.gradient in FORMATS and self.algo in ("most_recent", "max")
        if not known or self.history < 1 or (self.gather and self.name not in OF_TENSORS):
            raise ValueError(
                f"{self}: recipes are {', '.join(RECIPES)}; algo is most_recent or max, history at least 1; "
                f"gather is for {' and '.join(OF_TENSORS)}"
            )

    @classmethod
    def of(cls, config: PrecisionConfig) -> "Recipe":
        """What the settings of a run ask for."""
        gradient = E5M2 if config.fp8_format == "hybrid" else E4M3
        history = config.fp8_amax_history_len, config.fp8_amax_compute_algo
        weights = config.fp8_wgrad, config.fp8_param_gather
        return cls(config.fp8_recipe, gradient, config.fp8_margin, *history, *weights)

    def dtype(self, role: str) -> torch.dtype:
        """The format of x, w or g."""
        return self.gradient if role == "g" else E4M3

    def cast_by_optimizer(self, sharded: bool) -> bool:
        """Whether the optimizer casts the weights; sharded: it holds shards of them only."""
        return self.gather if sharded else self.name == "delayed"


class Quantized(NamedTuple):
    """The FP8 copies of x `[m, k]` that were asked for."""

    rowwise: Fp8Matrix | None  # of x
    columnwise: Fp8Matrix | None  # of x^T, [k, m]

    @classmethod
    def with_scale(cls, pair: Pair, inverse: torch.Tensor) -> "Quantized":
        """Of what a cast with one scale made, and the scale's inverse."""
        return cls(*(None if data is None else Fp8Matrix(data, inverse) for data in pair))

    def saved_form(self) -> Fp8Matrix:
        """What a layer keeps of its input for dW: columnwise, or rowwise where the backward gathers it."""
        return self.rowwise if self.columnwise is None else self.columnwise


def _agree_(amax: torch.Tensor, axes: Iterable[Axis]) -> torch.Tensor:
    """The largest over the axes, in place; NaN travels as infinity, since not every reduction keeps it."""
    for axis in axes:
        if axis.size > 1:
            all_reduce_(amax.nan_to_num_(torch.inf, torch.inf), axis, "max")
    return amax


class Scales:
    """The FP8 state of all linear layers of a model, or of one stage of it.

    Each layer has three slots of the tensors below, for x, w and g, which delayed scaling uses; tensorwise
    uses those of weights that the optimizer casts.
    axes: those over which delayed amaxes are agreed, so that all ranks cast with one scale (tp, dp_cp).
    """

    def __init__(self, recipe: Recipe, device: torch.device, axes: Sequence[Axis] = ()) -> None:
        self.recipe, self.axes = recipe, tuple(axes)
        self.layers: dict[str, Fp8Linear] = {}
        self.fresh = True  # delayed: no step has ended yet
        self.note: Callable | None = None  # (slot, x, its cast): statistics, of report/counters.py
        self.history = torch.zeros(recipe.history, 0, device=device)  # amaxes: row 0 of this step
        self.scale, self.limits = (torch.ones(0, device=device) for _ in range(2))
        self._invert()

    def layer(self, name: str, gradient: torch.dtype | None = None) -> "Fp8Linear":
        """The state of a new layer; `name` is its own among all layers of the model. Raises ValueError.

        gradient: the format of its gradients, if it takes no other.
        """
        if name in self.layers:
            raise ValueError(f"there is an FP8 layer {name} already")
        recipe = replace(self.recipe, gradient=gradient or self.recipe.gradient)
        limits = [fp8_limit(recipe.dtype(role), recipe.margin) for role in ROLES]
        self.history = torch.cat((self.history, self.history.new_zeros(len(self.history), len(ROLES))), dim=1)
        self.limits = torch.cat((self.limits, self.limits.new_tensor(limits)))
        self.scale = torch.cat((self.scale, self.scale.new_ones(len(ROLES))))
        self._invert()
        self.layers[name] = Fp8Linear(name, self, len(ROLES) * len(self.layers), recipe)
        return self.layers[name]

    def end_step(self) -> None:
        """After the backward, before the optimizer's step: the next step's scales; weights are cast again.

        delayed: all amaxes of this step go over each axis in one all-reduce.
        """
        if self.recipe.name == "delayed" and self.layers:
            _agree_(self.history[0], self.axes)
            most_recent = self.recipe.algo == "most_recent"
            fp8_update(self.history, self.scale, torch.empty_like(self.scale), self.limits, most_recent)
            self._invert()
            self.fresh = False
        self.forget_step()

    def forget_weights(self) -> None:
        """Fp8Matrix weights again when they are used next, if the optimizer has not done it by then."""
        for layer in self.layers.values():
            layer.cached = layer.taken = None

    def scale_weights(self) -> None:
        """Scales of weights from the amaxes that the optimizer has noted of them in this step.

        Communicates these over each axis, in one all-reduce.
        """
        of = slice(ROLES.index("w"), None, len(ROLES))
        amax = _agree_(self.history[0, of].clone(), self.axes)
        self.scale[of] = fp8_scale(amax, fp8_limit(E4M3, self.recipe.margin))[0]
        self._invert()

    def forget_step(self) -> None:
        """After a warm-up step discard its amaxes, and the casts of weights, which note theirs again."""
        self.history[:1] = 0.0
        self.forget_weights()

    def state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint between steps, by layer: amaxes `[history, 3]` and scales `[3]` of x, w, g."""
        found = {}
        if self.recipe.name == "delayed":
            for name, layer in self.layers.items():
                found[f"{name}.fp8_history"] = self.history[:, layer.slots].clone()
                found[f"{name}.fp8_scale"] = self.scale[layer.slots].clone()
        return found

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up what `state` gave of these layers, among others. Raises ValueError where one is missing."""
        mine = self.state()
        if missing := sorted(mine.keys() - state.keys()):
            raise ValueError(f"no FP8 scales of {', '.join(missing)}")
        for name, layer in self.layers.items() if mine else ():
            self.history[:, layer.slots] = state[f"{name}.fp8_history"].to(self.history.device)
            self.scale[layer.slots] = state[f"{name}.fp8_scale"].to(self.scale.device)
        self._invert()
        self.fresh = not bool((self.history != 0).any() | (self.scale != 1).any())  # of a run in 16 bits
        self.forget_weights()

    def _invert(self) -> None:
        """Inverses where matmuls read them, `[n, ALIGN]`; new ones, since casts keep views of their own."""
        self.spread = (1.0 / self.scale)[:, None].repeat(1, ALIGN)


class Fp8Linear:
    """What one linear layer casts with: `Scales.layer` makes it."""

    def __init__(self, name: str, scales: Scales, first: int, recipe: Recipe) -> None:
        self.name, self.scales, self.recipe = name, scales, recipe
        self.slots = slice(first, first + len(ROLES))
        self.cached: Quantized | None = None
        self.taken: Fp8Matrix | None = None  # of the weight, row-major, by the optimizer

    def cast(
        self,
        x: torch.Tensor,
        role: str,
        outputs: str = "both",
        axis: Axis | None = None,
        notes: bool = True,
    ) -> Quantized:
        """x `[m, k]` in FP8 as what `role` says, "x", "w" or "g"; outputs: "rowwise", "columnwise" or "both".

        axis: its ranks hold other rows or columns of the same tensor. tensorwise: one number goes over it.
        notes: the amax counts for later steps (delayed scaling), and the cast in statistics; neither does in
        an evaluation.
        """
        x = x.detach()
        copies = self._cast(x, role, outputs, axis, notes)
        self.watch(role, lambda: x, copies, notes)
        return copies

    def slot(self, role: str) -> int:
        """Where the numbers of x, w or g are in `Scales`."""
        return self.slots.start + ROLES.index(role)

    @property
    def knows_scales(self) -> bool:
        """Whether there are scales before there are tensors: of delayed scaling, but in its first step."""
        return self.recipe.name == "delayed" and not self.scales.fresh

    def ahead(self, role: str, outputs: str, notes: bool = True) -> tuple[Fp8, torch.Tensor]:
        """For a kernel that writes x, w or g in FP8: type, scale and amax slot; and the scale's inverse."""
        slot, s = self.slot(role), self.scales
        amax = s.history[0, slot] if notes else None
        return Fp8(self.recipe.dtype(role), s.scale[slot], amax, outputs), s.spread[slot, 0]

    def outputs(self, comm: str, trains: bool) -> str:
        """The copies of x to make: row, and transposed for dW, unless the backward gathers x."""
        return "both" if trains and self.recipe.wgrad and comm != "gather" else "rowwise"

    def watch(self, role: str, x: Callable[[], torch.Tensor], casts: Quantized, notes: bool = True) -> None:
        """Give the statistics of casts (report/counters.py) these, of x `[m, k]`."""
        if self.scales.note and notes and casts.rowwise is not None:
            self.scales.note(self.slot(role), x(), casts.rowwise)

    def _cast(self, x: torch.Tensor, role: str, outputs: str, axis: Axis | None, notes: bool) -> Quantized:
        dtype, recipe = self.recipe.dtype(role), self.recipe
        if recipe.name in ("rowwise", "blockwise"):
            return self._cast_parts(x, role, outputs)
        if self.knows_scales:
            wanted, inverse = self.ahead(role, outputs, notes)
        else:
            amax = x.new_zeros((), dtype=torch.float32)
            fp8_amax(x, amax)
            if notes and recipe.name == "delayed":  # for delayed scaling's next step
                noted = self.scales.history[0, self.slot(role)]
                noted.copy_(torch.maximum(noted, amax))
            limit = fp8_limit(dtype, recipe.margin)
            scale, inverse = fp8_scale(_agree_(amax, [axis] if axis else ()), limit)
            wanted = Fp8(dtype, scale, None, outputs)
        return Quantized.with_scale(wanted.of(x), inverse)

    def _cast_parts(
        self, x: torch.Tensor, role: str, outputs: str, inverse: torch.Tensor | None = None
    ) -> Quantized:
        """With a scale for each row or block. inverse: that of x, where x is FP8 itself."""
        dtype = self.recipe.dtype(role)
        if self.recipe.name == "rowwise":
            copies = fp8_cast_rows(x, dtype, fp8_limit(dtype, self.recipe.margin), outputs, inverse)
        else:
            copies = fp8_cast_blocks(x, dtype, role == "w", outputs, True, inverse)
        return Quantized(*copies)

    def weight(self, param: torch.Tensor, axis: Axis | None = None) -> Quantized:
        """Both copies of the local `[o, i]`, made at first use in a step. axis: what it is cut over.

        Raises RuntimeError where neither a cast nor the weight is there.
        """
        if self.cached is None and self.taken is not None:
            self.cached = Quantized(self.taken, self.turned(self.taken, "w"))
        elif self.cached is None and not any(param.stride()):  # it was freed: fast/fp8_gather.py
            raise RuntimeError(f"{self.name}: the optimizer's cast was forgotten; call end_step before it")
        elif self.cached is None:
            self.cached = self.cast(param, "w", "both", axis)
        return self.cached

    def take(self, data: torch.Tensor) -> None:
        """The optimizer's cast of the weight `[o, i]`, E4M3, with the scale of now."""
        self.taken, self.cached = Fp8Matrix(data, self.scales.spread[self.slot("w"), 0]), None

    def turned(self, row: Fp8Matrix, role: str) -> Fp8Matrix:
        """The transposed copy of what was cast row-major and gathered. `[m, k] -> [k, m]`

        The same bytes where the tensor has one scale; else what they stand for, cast along the other dim.
        """
        if not row.inverse.dim():
            return Fp8Matrix(fp8_turn(row.data), row.inverse)
        return self._cast_parts(row.data, role, "columnwise", row.inverse).columnwise

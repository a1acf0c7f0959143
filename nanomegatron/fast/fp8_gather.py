"""Same result as `fp8.Fp8LayerState.weight`, to the bit: FP8 weights cast by the optimizer, sent as bytes.

The plain form casts the gathered bf16 weights at first use. Here AdamW's kernel writes the FP8 copy in its
own pass over the main weights; a sharded optimizer gathers one byte per weight, not two (--fp8-param-gather);
and between steps there are no 16-bit weights. These are rebuilt from the main weights when they are needed
(`ParamAndGradBuckets.wait_params`), and are NaN until then, so that no stale one is read unnoticed. Gain,
Llama-3-8B, four H200, both overlaps: 559.2 ms a step, not 562.7, and 99.4 GiB, not 112.5
(benchmarks/results/2026-11-21-parallel-dp4-fp8.json).

The cast starts from the main weight rounded to 16 bits, which is the weight in a checkpoint. A skipped step
casts, too: its weights are the old ones, their scales may be new.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from nanomegatron.config.settings import OptimizerConfig
from nanomegatron.dp import Bucket, GatheredParams
from nanomegatron.fp8 import E4M3, ROLES, Recipe, Scales, all_reduce_amax_
from nanomegatron.mesh import Axis
from nanomegatron.ops.adamw import FlatState, Segments, adamw_flat_, cast_flat_
from nanomegatron.ops.fp8_cast import Fp8Matrix, fp8_scale
from nanomegatron.optim import ShardState, ShardUpdates, StepScalars, segment_kind


class WeightCasts:
    """The FP8 copies of a bucket's weights, in place of `dp.GatheredParams`; all weights are bf16.

    whole: their bytes `[size]`, rowwise, at the parameters' offsets; shard: this rank's shard of whole.
    """

    itemsize = 1

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.layers = bucket, [param.fp8 for param in bucket.params]
        self.scales = self.layers[0].w.scales
        self.note = "FP8 weights cast by the optimizer"
        if bucket.shard_axis is bucket.axis:
            self.note = "FP8 weights gathered as bytes"
        self.whole = bucket.comm.zeros(bucket.size, torch.uint8)
        self.shard = self.whole[bucket.shard]
        self.param_data = torch.zeros(bucket.size, dtype=bucket.dtype, device=bucket.device)
        self.main: torch.Tensor | None = None  # this rank's main weights, where they were last cast
        first = bucket.shard.start
        ranges, slots = [], []
        for param, layer, begin in zip(bucket.params, self.layers, bucket.begins, strict=True):
            start, stop = max(begin, first), min(begin + param.numel(), bucket.shard.stop)
            if start < stop:
                ranges.append((start - first, stop - first, segment_kind(param.spec)))
                slots.append(layer.w.slot)
        self.segments = Segments.from_ranges(ranges, bucket.device)  # one per weight
        self.slots = torch.tensor(slots, dtype=torch.int64, device=bucket.device)

    @property
    def waits(self) -> bool:
        """Whether casts wait for the amaxes of all weights: tensorwise, and delayed before its first step."""
        return not self.layers[0].w.has_scale

    def cast_scales(self, main: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales of the weights in this shard -> fp32 `[weights]`, and zeros `[weights]` for their amaxes.

        main fp32 `[size/ranks]`: the main weights; the results are on its device.
        """
        self.main, self.segments = main, self.segments.on(main.device)
        scale = self.scales.scale.index_select(0, self.slots).to(main.device)
        return scale, torch.zeros_like(scale)

    def record_amax(self, amax: torch.Tensor) -> None:
        """Record the amax `[weights]` of this shard's weights, for later steps and `update_weight_scales`."""
        recorded = self.scales.amax_history[0]
        amax = torch.maximum(recorded.index_select(0, self.slots), amax.to(recorded.device))
        recorded.index_copy_(0, self.slots, amax)

    def write(self, main: torch.Tensor, out: torch.Tensor) -> None:
        """Cast main fp32 `[size/ranks]` into out uint8 `[size/ranks]`, on main's device; record amaxes."""
        scale, amax = self.cast_scales(main)
        cast_flat_(main, out.view(E4M3), self.segments, scale, amax)
        self.record_amax(amax)

    def start_gather(self) -> None:
        """Start to gather the bytes, and make FP8 layers use them as their weights."""
        self.bucket.start_gather()
        for layer, cast in zip(self.layers, self.bucket.views(self.whole), strict=True):
            layer.optimizer_cast = Fp8Matrix(cast.view(E4M3), layer.w.scale_inv)
            layer.cached_weight = None
        self.free_params()

    def free_params(self) -> None:
        """Free the bf16 parameters while the FP8 copy is current."""
        bucket = self.bucket
        if self.param_data is None or self.layers[0].optimizer_cast is None:
            return
        self.param_data, nan = None, torch.full((), torch.nan, dtype=bucket.dtype, device=bucket.device)
        for param in bucket.params:
            param.data = nan.expand(param.shape)

    def rebuild_params(self) -> None:
        """Rebuild the bf16 parameters from all ranks' main weights, if they are freed."""
        bucket = self.bucket
        if self.param_data is None:
            self.param_data = torch.zeros(bucket.size, dtype=bucket.dtype, device=bucket.device)
            self.param_data[bucket.shard].copy_(self.main)
            bucket.comm.start_all_gather(self.param_data).wait()
            for param, view in zip(bucket.params, bucket.views(self.param_data), strict=True):
                param.data = view


def gathered_casts(sharded: bool, param: nn.Parameter, axis: Axis) -> type:
    """The `gathered` of `ParamAndGradBuckets`: `WeightCasts` for the weights that the optimizer casts.

    sharded: the ranks of `axis` divide the update.
    """
    layer = getattr(param, "fp8", None)
    mixed = layer is not None and param.dtype == torch.bfloat16
    return WeightCasts if mixed and casts_weights(layer.recipe, sharded and axis.size > 1) else GatheredParams


def casts_weights(recipe: Recipe, sharded: bool) -> bool:
    """Whether the optimizer casts the weights; sharded: it holds only shards of them."""
    return recipe.gather if sharded else recipe.quantizer_class.keeps_history


def update_weight_scales(scales: Scales) -> None:
    """Compute the weights' scales from the amaxes that the optimizer has recorded in this step.

    All-reduces these amaxes, all at once, over each axis.
    """
    recipe = scales.recipe
    weights = slice(ROLES.index("w"), None, len(ROLES))
    amax = all_reduce_amax_(scales.amax_history[0, weights].clone(), scales.axes)
    scales.scale[weights] = fp8_scale(amax, recipe.limit(E4M3), recipe.quantizer_class.power_of_two)[0]
    scales.set_scale_inv(1.0 / scales.scale)


class CastShard(ShardState):
    """A shard of weights that AdamW's kernel casts to FP8."""

    def update_by_kernel(self, now: StepScalars) -> None:
        """Update and cast by AdamW's kernel, in one launch."""
        casts = self.bucket.gathered
        scale, amax = casts.cast_scales(self.main)
        copy, grads = casts.shard.view(E4M3), self.bucket.grad_shard
        state = FlatState(self.main, copy, grads, self.exp_avg, self.exp_avg_sq, scale, amax)
        adamw_flat_(state, casts.segments, now, self.betas_eps)
        casts.record_amax(amax)


def cast_state(bucket: Bucket, config: OptimizerConfig) -> ShardState:
    """The state of a bucket's shard on the device, for `CastUpdates`."""
    return (CastShard if isinstance(bucket.gathered, WeightCasts) else ShardState)(bucket, config)


class CastUpdates(ShardUpdates):
    """Updates that cast FP8 weights; if scales need all weights' amaxes, casts and gathers come last.

    end_step              amaxes of the step that ends -> scales                       delayed only
    AdamW                 main weights -> bytes, in its own pass; records each weight's amax
    update_weight_scales  the amaxes of all weights, over all ranks -> scales          tensorwise only, as
    cast                  main weights -> bytes again                                  AdamW used old scales
    gather                bytes of all shards
    first use             columnwise copy (fp8.py)
    """

    def step(self, shards: Iterable[ShardState], now: StepScalars) -> None:
        """Update, cast, gather all shards. May all-reduce amaxes."""
        self._gather(shards, lambda shard: shard.update(now))

    def cast_weights(self, shards: Iterable[ShardState]) -> None:
        """Cast and gather as `step` would, before the first one."""
        casting = [shard for shard in shards if isinstance(shard.bucket.gathered, WeightCasts)]
        for scales in {shard.bucket.gathered.scales for shard in casting}:
            scales.clear_step()
        self._gather(casting, lambda shard: shard.publish())

    def _gather(self, shards: Iterable[ShardState], write: Callable[[ShardState], None]) -> None:
        """Write and gather each shard; those that wait for all weights' amaxes are cast again, and last."""
        waiting = []
        for shard in shards:
            write(shard)
            casts = shard.bucket.gathered
            if not isinstance(casts, WeightCasts):
                shard.bucket.start_gather()
            elif casts.waits:
                waiting.append(shard)
            else:
                casts.start_gather()
        if waiting:
            update_weight_scales(waiting[0].bucket.gathered.scales)
        for shard in waiting:
            shard.publish()
            shard.bucket.gathered.start_gather()

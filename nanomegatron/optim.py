"""AdamW with fp32 main parameters, clipping and loss scaling; the host never waits in a step.

Tests: tests/test_optim.py. Page: docs/life-of-a-step.md.

    gradients (summed)  ->  norm of each part  ->  global norm over all ranks  ->  clip factor, finite?
                                                                                           |
    main params (fp32)   <-  AdamW reads factor and flag from the device: a bad step changes nothing
    params (bf16/fp16)   <-  copied from the main params; in fp32 they are the same tensors

Each rank updates its shards (`dp.py`), bucket by bucket in the order of the forward: as soon as a shard is
updated, the all-gather of its bucket starts. AdamW (`ops/adamw.py`) of step t, from a gradient g:

    m = beta1 m + (1 - beta1) g              p = p - lr decay p
    v = beta2 v + (1 - beta2) g^2            p = p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

A step is good if its loss, gradient norm and (if asked) optimizer states are finite, and loss and norm are
not above `limits`. Everything that a step decides stays on the device as 0-d tensors: these flags, the number
of good steps, learning rates and weight decay (looked up in a table by that number, so a skipped step holds
the schedules) and the loss scale. The host reads them when it writes its log, one step late.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanomegatron.comm import all_reduce_
from nanomegatron.config.settings import OptimizerConfig, PrecisionConfig
from nanomegatron.dp import Bucket, ParamAndGradBuckets, wait_params
from nanomegatron.lr_schedule import LossScaler
from nanomegatron.ops.adamw import DECAY, DECOUPLED, FlatState, Segments, adamw_, adamw_flat_, sums_of_squares
from nanomegatron.ops.kernels import usable
from nanomegatron.param import ParamSpec

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # these use --decoupled-lr
FLOAT_MAX = torch.finfo(torch.float64).max  # what is not finite exceeds it
MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def segment_kind(spec: ParamSpec) -> int:
    """Return the flags of a parameter for `Segments`: DECAY if it decays, DECOUPLED for --decoupled-lr."""
    return DECAY * spec.decay | DECOUPLED * (spec.name in VOCABULARY)


class StepScalars(NamedTuple):
    """What the updates of a step share, fp32 on the device: kernels read them there."""

    step: torch.Tensor  # [], its number, from 1; a bad step has that of the last good one
    rates: torch.Tensor  # [3], its column of `step_values`: learning rate, the vocabulary's, weight decay
    grad_scale: torch.Tensor  # [], gradients are divided by it
    skip: torch.Tensor  # [], 1: nothing changes


class ShardState:
    """Main parameters and moments of this rank's shard of one bucket, flat, and their update by AdamW.

    On a GPU one kernel does the update. Torch's own update works on fp32 copies of bf16 moments, so it needs
    memory for those of one shard. For another update rule, or states on another `device`, `ShardUpdates`
    takes another class.
    """

    def __init__(self, bucket: Bucket, config: OptimizerConfig, device: torch.device | None = None) -> None:
        self.bucket = bucket
        self.config = config
        self.mixed = bucket.dtype != torch.float32
        # of fp32 parameters a view, no copy
        self.main = bucket.gathered.param_data[bucket.shard].float().to(device or bucket.device)
        self.exp_avg = torch.zeros_like(self.main, dtype=MOMENT_DTYPES[config.exp_avg_dtype])
        self.exp_avg_sq = torch.zeros_like(self.main, dtype=MOMENT_DTYPES[config.exp_avg_sq_dtype])
        ranges = [(piece.start, piece.stop, segment_kind(piece.param.spec)) for piece in bucket.slices]
        self.segments = Segments.merged(ranges, self.main.device)
        self.betas_eps = config.adam_beta1, config.adam_beta2, config.adam_eps

    def update(self, now: StepScalars) -> None:
        """Do one step: read the bucket's `grad_shard`, write this rank's shard of the tensor to gather.

        The host does not wait.
        """
        if usable(self.bucket.grad_shard, "adamw"):
            self.update_by_kernel(now)
        else:
            self.adamw(self.bucket.grad_shard.float(), now)
            self.publish()

    def update_by_kernel(self, now: StepScalars) -> None:
        """Do `update` in one kernel launch."""
        copy = self.bucket.gathered.shard if self.mixed else None
        state = FlatState(self.main, copy, self.bucket.grad_shard, self.exp_avg, self.exp_avg_sq)
        adamw_flat_(state, self.segments, now, self.betas_eps)

    def adamw(self, grads: torch.Tensor, now: StepScalars) -> None:
        """Update main parameters and moments from fp32 grads `[size/ranks]`, all on one device.

        Torch takes the weight decay as a number of the host: that of the settings.
        """
        moments = self.exp_avg.float(), self.exp_avg_sq.float()
        lr, decoupled_lr, _ = now.rates
        for kind in sorted({kind for *_, kind in self.segments.ranges}):
            parts = [slice(start, stop) for start, stop, k in self.segments.ranges if k == kind]
            main, g, m, v = ([x[part] for part in parts] for x in (self.main, grads, *moments))
            rate = decoupled_lr if kind & DECOUPLED else lr
            decay = self.config.weight_decay if kind & DECAY else 0.0
            adamw_(main, g, (m, v), now.step, rate, (*self.betas_eps, decay), now.grad_scale, now.skip)
        for kept, new in zip((self.exp_avg, self.exp_avg_sq), moments, strict=True):
            if kept.dtype != torch.float32:
                kept.copy_(new)

    def publish(self) -> None:
        """Convert the main parameters into this rank's shard of the tensor to gather."""
        if self.mixed:
            self.bucket.gathered.write(self.main, self.bucket.gathered.shard)


class ShardUpdates:
    """Updates the shards and starts their gathers, in this order. state: makes a shard's `ShardState`."""

    def __init__(self, state: Callable[[Bucket, OptimizerConfig], ShardState] = ShardState) -> None:
        self.state = state

    def step(self, shards: Iterable[ShardState], now: StepScalars) -> None:
        """Update all shards and start their gathers."""
        for shard in shards:
            shard.update(now)
            shard.bucket.start_gather()

    def cast_weights(self, shards: Iterable[ShardState]) -> None:
        """Nothing here: FP8 layers quantize their weights at first use."""


@dataclass(frozen=True)
class StepStats:
    """Numbers of one step, as 0-d device tensors; `part_norms` has one for each `Optimizer.part_names`."""

    grad_norm: torch.Tensor  # NaN also if optimizer states are not finite
    good: torch.Tensor  # 1 if the step has updated the parameters, else 0
    lr: torch.Tensor
    next_lr: torch.Tensor  # of the next step, if this one is good
    loss_scale: torch.Tensor
    part_norms: torch.Tensor


class StepLimits(NamedTuple):
    """What a step must keep to, besides a finite loss and gradient norm; else it is bad."""

    loss_and_norm: torch.Tensor | None = None  # fp64 [2], on the device: neither may be above
    finite_states: bool = False  # main parameters and moments must be finite, too


NO_LIMITS = StepLimits()


class Optimizer:
    """Clips by the global norm, scales and schedules, and updates this rank's shards of all buckets.

    lr_table: `step_values`, three numbers for each step of the run and for one step more. Norms count each
    part of a parameter once, on the rank that saves it; so one all-reduce of a number over all ranks is
    correct for dense parameters and for experts. A step gathers the parameters if they are sharded.
    """

    def __init__(
        self,
        buckets: ParamAndGradBuckets,
        config: OptimizerConfig,
        precision: PrecisionConfig,
        lr_table: list[list[float]],
        updates: ShardUpdates = ShardUpdates(),  # noqa: B008 (has no state of its own)
    ) -> None:
        self.buckets = buckets
        self.params = buckets.params
        self.config = config
        self.updates = updates
        self.shards = [self.updates.state(bucket, config) for bucket in reversed(buckets.all)]
        device = self.params[0].device
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        following = [*lr_table[0][1:], lr_table[0][-1]]
        self.lr_table = torch.tensor([*lr_table, following], dtype=torch.float64, device=device)
        self.scaler = LossScaler(precision, device)
        self.largest_finite = torch.full((2,), FLOAT_MAX, dtype=torch.float64, device=device)
        self.grads = [shard.bucket.grad_shard for shard in self.shards]
        pieces = [piece for _, piece in buckets.slices()]
        self.part_names = [piece.part.name for piece in pieces]
        counted = [float(piece.saver) for piece in pieces]
        self.counted = torch.tensor(counted, dtype=torch.float64, device=device)  # 0 for replicas
        ranges = [[(p.start, p.stop, 0) for p in reversed(shard.bucket.slices)] for shard in self.shards]
        self.segments = [Segments.from_ranges(of_shard, device) for of_shard in ranges]

    def step(self, loss: torch.Tensor, limits: StepLimits = NO_LIMITS) -> StepStats:
        """Update the parameters from the summed gradients, if the step is good.

        loss `[]`: the global loss, so that all ranks decide the same. FP8 weights are cast with the scales of
        `Scales.end_step`: call that first. Communicates the norm over all ranks, and the parameters.
        """
        squares = self._squares(self.grads)
        total = (squares * self.counted).sum()  # NaN if one is not finite, also of a replica
        if limits.finite_states:
            total = total.masked_fill(self.not_finite(), math.nan)
        norm = (self._norm(total) / self.scaler.scale).float()

        most = self.largest_finite if limits.loss_and_norm is None else limits.loss_and_norm
        good = (torch.stack((loss, norm)).abs() <= most).all().float()
        factor = self._clip_factor(norm)

        index = self.good_steps.clamp(max=self.lr_table.shape[1] - 1)
        column = self.lr_table.index_select(1, index[None])[:, 0]  # [:, index] would wait for the GPU
        self.good_steps += good.long()
        grad_scale = self.scaler.scale / factor
        now = StepScalars(self.good_steps.float(), column[:3].float(), grad_scale, 1.0 - good)
        self.updates.step(self.shards, now)
        self._finish_gathers()

        stats = StepStats(
            grad_norm=norm,
            good=good,
            lr=column[0],
            next_lr=column[3],
            loss_scale=self.scaler.scale,
            part_norms=squares.sqrt(),
        )
        self.scaler.update(good)
        return stats

    def _clip_factor(self, norm: torch.Tensor) -> torch.Tensor:
        """By what gradients of this norm `[]` are multiplied -> `[]`, at most 1; --clip-grad 0: always 1"""
        clip = self.config.clip_grad
        return (clip / (norm + 1e-6)).clamp(max=1.0) if clip > 0 else torch.ones_like(norm)

    def cast_weights(self) -> None:
        """Make the FP8 weights before the first step, as `step` does, so that no step also holds 16-bit ones.

        Communicates their amaxes, and the weights if they are gathered. All ranks call this.
        """
        self.updates.cast_weights(self.shards)
        self._finish_gathers()

    def _finish_gathers(self) -> None:
        if not self.buckets.overlap_gather:
            wait_params(self.params)

    def _squares(self, flat: list[torch.Tensor]) -> torch.Tensor:
        """Sums of squares of this rank's parts of the flat tensors `[size/ranks]` -> fp64 `[parts]`"""
        pairs = zip(flat, self.segments, strict=True)
        each = [sums_of_squares(x, at.on(x.device), count=False)[0] for x, at in pairs]
        return torch.cat([squares.to(self.counted.device) for squares in each])

    def _norm(self, total: torch.Tensor) -> torch.Tensor:
        return all_reduce_(total, self.buckets.world).sqrt()

    def not_finite(self) -> torch.Tensor:
        """Whether this rank's main parameters or moments have a non-finite value -> bool `[]`"""
        flat = [x for shard in self.shards for x in (shard.main, shard.exp_avg, shard.exp_avg_sq)]
        largest = torch._foreach_norm(flat, math.inf)  # NaN if there is one
        return ~torch.stack([x.to(self.counted.device, torch.float32) for x in largest]).isfinite().all()

    def grad_norm(self) -> torch.Tensor:
        """Norm of the summed gradients, as `step` finds it -> `[]`. All-reduces one number over all ranks."""
        total = (self._squares(self.grads) * self.counted).sum()
        return (self._norm(total) / self.scaler.scale).float()

    def params_norm(self) -> torch.Tensor:
        """L2 norm of all parameters, each counted once -> `[]`. All-reduces one number over all ranks."""
        return self._norm((self._squares([shard.main for shard in self.shards]) * self.counted).sum())

    def num_zeros(self) -> torch.Tensor:
        """Number of zero gradients, without padding -> `[]`. All-reduces one number over all ranks."""
        pairs = zip(self.grads, self.segments, strict=True)
        zeros = torch.cat([sums_of_squares(x, at)[1] for x, at in pairs])
        return all_reduce_((zeros * self.counted).sum().long(), self.buckets.world)

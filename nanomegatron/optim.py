"""AdamW with fp32 main parameters, clipping and loss scaling, without one host sync a step.

    gradients (summed)  ->  norm of each part  ->  global norm over all ranks  ->  clip factor, finite?
                                                                                           |
    main params (fp32)   <-  AdamW reads factor and flag from the device: a bad step changes nothing
    params (bf16/fp16)   <-  copied from the main params; in fp32 they are the same tensors

All of it happens on this rank's shards (`dp.py`), bucket by bucket in the order of the forward: as soon as
one is updated, its parameters set out to the other ranks. `optim_shard.py` has the update of one, on the
device or in host memory, `fast/fp8_gather.py` what it does for the weights of FP8 layers.

Everything that a step decides stays on the device as 0-d tensors: the finite flag, the number of good steps,
learning rates and weight decay (looked up in a table by that number, so a skipped step holds the schedules)
and the loss scale. The host reads them when it writes its log, one step late; only where it updates shards
itself (--optimizer-cpu-offload) it must wait for them.
"""

from dataclasses import dataclass

import torch

from nanomegatron.comm import all_reduce_
from nanomegatron.config.settings import OptimizerConfig, PrecisionConfig
from nanomegatron.dp import Buckets, Slice
from nanomegatron.lr_schedule import LossScaler
from nanomegatron.ops.adamw import Segments, sums_of_squares
from nanomegatron.optim_shard import Ferry, HostShard, ShardState


@dataclass(frozen=True)
class StepStats:
    """What a step did, as 0-d device tensors; `part_norms` has one for each of `Optimizer.part_names`."""

    grad_norm: torch.Tensor
    finite: torch.Tensor
    lr: torch.Tensor
    next_lr: torch.Tensor  # of the step after it, if this one is good
    loss_scale: torch.Tensor
    part_norms: torch.Tensor


class Optimizer:
    """AdamW over this rank's shards of all buckets.

    values: `step_values`, three numbers for each step of the run, and one more. Norms count each part of each
    parameter once: the rank that would save it does, whichever axes share it, so that one all-reduce of a
    number over all ranks is right for dense parameters and experts alike. A step gathers the parameters where
    they are cut over ranks.
    """

    def __init__(
        self,
        buckets: Buckets,
        config: OptimizerConfig,
        precision: PrecisionConfig,
        values: list[list[float]],
    ) -> None:
        self.buckets, self.params, self.config = buckets, buckets.params, config
        device = self.params[0].device
        self.ferry = Ferry(device, config.overlap_cpu_optimizer_d2h_h2d)
        self.shards, away = [], 0
        total = sum(len(bucket.param_shard) for bucket in buckets.all)
        for bucket in reversed(buckets.all):
            on_host = config.optimizer_cpu_offload and away < config.optimizer_offload_fraction * total
            away += len(bucket.param_shard) * on_host
            self.shards.append((HostShard if on_host else ShardState)(bucket, config, self.ferry))
        self.ferry.largest = max((len(shard.main) for shard in self.shards if shard.on_host), default=0)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        following = [*values[0][1:], values[0][-1]]
        self.values = torch.tensor([*values, following], dtype=torch.float64, device=device)
        self.scaler = LossScaler(precision, device)
        owned = [[s for s in reversed(shard.bucket.slices) if s.saver] for shard in self.shards]
        self.part_names = [piece.part.name for pieces in owned for piece in pieces]
        self.segments = [Segments.of(((s.start, s.stop, 0) for s in pieces), device) for pieces in owned]

    def step(self, loss: torch.Tensor) -> StepStats:
        """Update the parameters from the summed gradients, unless the loss or the norm is not finite.

        loss: 0-d, the global one, so that every rank decides alike. FP8 weights are cast with the scales of
        `Scales.end_step`, which is called before.
        """
        squares = self._over_parts(self._grads())
        norm = (self._norm(squares) / self.scaler.scale).float()
        finite = (norm.isfinite() & loss.isfinite()).float()
        clip = self.config.clip_grad
        factor = (clip / (norm + 1e-6)).clamp(max=1.0) if clip > 0 else torch.ones_like(norm)
        now = self.good_steps.clamp(max=self.values.shape[1] - 1)  # [...] would wait for the GPU
        values, next_lr = self.values.index_select(1, now[None])[:, 0].split((3, 1))
        self.good_steps += finite.long()
        told = self.good_steps.float(), values.float(), self.scaler.scale / factor, 1.0 - finite
        if away := [shard.bucket.grad_shard for shard in self.shards if shard.on_host]:
            self.ferry.begin(away)
            told_host = [number.cpu() for number in told]
        for shard in self.shards:
            shard.update(*(told_host if shard.on_host else told))
            if not shard.waits:
                shard.bucket.start_gather()
        self._cast_again()
        stats = StepStats(norm, finite, values[0], next_lr[0], self.scaler.scale, squares.sqrt())
        self.scaler.update(finite)
        return stats

    def cast_weights(self) -> None:
        """The casts of FP8 weights that `step` would make, before the first one: so that no step needs both.

        Communicates them where they are gathered, and their amaxes. All ranks call it alike.
        """
        if shards := [shard for shard in self.shards if shard.casts]:
            shards[0].casts.scales.forget_step()
        for shard in shards:
            shard.publish()
            if not shard.waits:
                shard.bucket.start_gather()
        self._cast_again()

    def _cast_again(self) -> None:
        """Cast the weights whose amaxes had to be agreed upon; then nothing is left to be sent."""
        if waiting := [shard for shard in self.shards if shard.waits]:
            waiting[0].casts.scales.scale_weights()
        for shard in waiting:
            shard.publish()
            shard.bucket.start_gather()
        for bucket in () if self.buckets.overlap_gather else self.buckets.all:
            bucket.wait_params()

    def _grads(self) -> list[torch.Tensor]:
        return [shard.bucket.grad_shard for shard in self.shards]

    def _over_parts(self, flat: list[torch.Tensor], zeros: bool = False) -> torch.Tensor:
        """Sums of squares, or numbers of zeros, of the parts that count here, fp64 `[parts]`."""
        pairs = zip(flat, self.segments, strict=True)
        found = [sums_of_squares(x, at.on(x.device), count=zeros)[zeros] for x, at in pairs]
        return torch.cat([sums.to(self.values.device) for sums in found])

    def _norm(self, squares: torch.Tensor) -> torch.Tensor:
        return all_reduce_(squares.sum(), self.buckets.world).sqrt()

    def params_norm(self) -> torch.Tensor:
        """L2 norm of all parameters, each once: 0-d. Communicates a number as the gradients' norm does."""
        return self._norm(self._over_parts([shard.main for shard in self.shards]))

    def num_zeros(self) -> torch.Tensor:
        """Gradients that are zero, padding not counted: 0-d. Communicates a number."""
        zeros = self._over_parts(self._grads(), zeros=True).sum().long()
        return all_reduce_(zeros, self.buckets.world)

    def reset_main(self) -> None:
        """Take the main parameters from the parameters again: after weights were loaded without them."""
        for shard in self.shards:
            shard.reset_main()

    def states(self) -> dict[str, list[tuple[Slice, torch.Tensor]]]:
        """What a checkpoint holds beside the parameters: by kind, flat ranges of parts, views."""
        kinds = (["main"] if self.shards[0].mixed else []) + ["exp_avg", "exp_avg_sq"]
        return {
            kind: [
                (piece, piece.of(getattr(shard, kind)))
                for shard in self.shards
                for piece in shard.bucket.slices
            ]
            for kind in kinds
        }

    def scalars(self) -> dict:
        """The numbers that a checkpoint holds. Waits for the device."""
        return {"good_steps": int(self.good_steps), "loss_scaler": self.scaler.state()}

    def load_scalars(self, saved: dict) -> None:
        """Take up `scalars()` again."""
        self.good_steps.fill_(saved["good_steps"])
        self.scaler.load(saved["loss_scaler"])

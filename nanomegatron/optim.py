"""AdamW with fp32 main parameters, its schedules, clipping and loss scaling, without one host sync a step.

    gradients (fp32, summed)  ->  norm of each part  ->  global norm over tp x pp  ->  clip factor, finite?
                                                                                         |
    main params (fp32)   <-  AdamW reads factor and flag from the device: a bad step changes nothing
    params (bf16/fp16)   <-  copied from the main params; in fp32 they are the same tensors

Everything that a step decides stays on the device as 0-d tensors: the finite flag, the number of good steps,
learning rates and weight decay (looked up in a table by that number, so a skipped step holds the schedules)
and the loss scale. The host reads them when it writes its log, one step late.

The schedules count samples, as Megatron's do: a step's learning rate is that of the samples before it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from nanomegatron import ops
from nanomegatron.comm import all_reduce_
from nanomegatron.config import Config, OptimizerConfig, PrecisionConfig
from nanomegatron.dp import flat_views
from nanomegatron.mesh import Axis

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # what --decoupled-lr is for


@dataclass(frozen=True)
class Schedule:
    """Learning rate against samples, with the lengths already in samples."""

    style: str
    lr: float
    min_lr: float
    warmup_init: float
    warmup: int
    decay: int
    wsd_style: str = "exponential"
    wsd_decay: int = 0

    @staticmethod
    def of(config: OptimizerConfig, length: int, global_batch_size: int) -> "Schedule":
        """The schedule of a run of `length` samples; an iteration counts for `global_batch_size` of them."""
        decay = config.lr_decay_samples or (config.lr_decay_iters or 0) * global_batch_size or length
        if config.lr_warmup_fraction is not None:
            warmup = int(config.lr_warmup_fraction * decay)
        else:
            warmup = config.lr_warmup_samples or config.lr_warmup_iters * global_batch_size
        wsd = config.lr_wsd_decay_samples or (config.lr_wsd_decay_iters or 0) * global_batch_size
        shape = (config.lr_decay_style, config.lr, config.min_lr, config.lr_warmup_init)
        return Schedule(*shape, warmup, decay, config.lr_wsd_decay_style, wsd)

    def at(self, samples: int) -> float:
        """Learning rate of the step that follows `samples` samples."""
        if self.warmup and samples <= self.warmup:
            return self.warmup_init + (self.lr - self.warmup_init) * samples / self.warmup
        if self.style == "constant":
            return self.lr
        if samples > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(samples, 1)))
        return self.min_lr + self._remaining(samples) * (self.lr - self.min_lr)

    def _remaining(self, samples: int) -> float:
        """The share of the way from min_lr up to lr, 1 at the end of the warm-up."""
        ratio = (samples - self.warmup) / max(1, self.decay - self.warmup)
        if self.style == "linear":
            return 1.0 - ratio
        if self.style == "cosine":
            return 0.5 * (math.cos(math.pi * ratio) + 1.0)
        start = self.decay - self.wsd_decay  # WSD: flat until its last part
        if samples <= start:
            return 1.0
        ratio = (samples - start) / self.wsd_decay
        return {
            "linear": 1.0 - ratio,
            "cosine": 0.5 * (math.cos(math.pi * ratio) + 1.0),
            "exponential": 2.0 * 0.5**ratio - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(ratio),
        }[self.wsd_style]


def weight_decay_at(config: OptimizerConfig, samples: int, length: int) -> float:
    """Weight decay of the step that follows `samples` of the run's `length` samples."""
    if config.weight_decay_incr_style == "constant":
        return config.weight_decay
    share = min(samples / length, 1.0)
    if config.weight_decay_incr_style == "cosine":
        share = 0.5 * (math.cos(math.pi * (1 - share)) + 1.0)
    return config.start_weight_decay + share * (config.end_weight_decay - config.start_weight_decay)


def step_values(config: Config, samples_before: list[int]) -> list[list[float]]:
    """Learning rate, that of the vocabulary's weights, and weight decay of every step of a run.

    samples_before: one more than there are steps. Lengths in iterations become samples by the full batch
    size even where a run grows into it, as in Megatron.
    """
    optimizer, batch, before = config.optimizer, config.data.global_batch_size, samples_before[:-1]
    length = config.run.train_samples or len(before) * batch
    schedule = Schedule.of(optimizer, length, batch)
    rates = vocabulary = [schedule.at(n) for n in before]
    if optimizer.decoupled_lr is not None:
        low = optimizer.min_lr if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr
        decoupled = replace(schedule, lr=optimizer.decoupled_lr, min_lr=low)
        vocabulary = [decoupled.at(n) for n in before]
    return [rates, vocabulary, [weight_decay_at(optimizer, n, length) for n in before]]


class LossScaler:
    """Dynamic loss scale of fp16, all on the device; a constant 1 for bf16 and fp32.

    A window of good steps doubles it; bad steps halve it once `hysteresis` have come. (arXiv 1710.03740)
    """

    def __init__(self, precision: PrecisionConfig, device: torch.device) -> None:
        self.dynamic = precision.fp16 and precision.loss_scale is None
        start = (precision.loss_scale or precision.initial_loss_scale) if precision.fp16 else 1.0
        self.window, self.minimum = precision.loss_scale_window, precision.min_loss_scale
        self.hysteresis = torch.tensor(float(precision.hysteresis), device=device)
        self.scale = torch.tensor(start, device=device)
        self.good_in_a_row = torch.zeros((), device=device)
        self.forgiven = self.hysteresis  # bad steps that do not halve the scale yet

    def update(self, finite: torch.Tensor) -> None:
        """Take note of one step; finite: 0-d, 1 or 0."""
        if not self.dynamic:
            return
        good, forgiven = (self.good_in_a_row + 1) * finite, self.forgiven - (1 - finite)
        halve, double = (forgiven <= 0) & (finite == 0), good >= self.window
        halved = (self.scale / 2).clamp(min=self.minimum)
        self.scale = torch.where(double, self.scale * 2, torch.where(halve, halved, self.scale))
        self.forgiven = torch.where(double, self.hysteresis, forgiven)
        self.good_in_a_row = good * ~double

    def state(self) -> list[float]:
        """What a checkpoint holds. Waits for the device."""
        return torch.stack((self.scale, self.good_in_a_row, self.forgiven)).tolist()

    def load(self, state: list[float]) -> None:
        """Take up `state()` again."""
        self.scale, self.good_in_a_row, self.forgiven = torch.tensor(state, device=self.scale.device)


@dataclass(frozen=True)
class StepStats:
    """What a step did, as 0-d device tensors; `part_norms` has one for each of `Optimizer.part_names`."""

    grad_norm: torch.Tensor
    finite: torch.Tensor
    lr: torch.Tensor
    loss_scale: torch.Tensor
    part_norms: torch.Tensor


class Optimizer:
    """AdamW over the parameters of this rank.

    values: `step_values`, three numbers for each step of the run. Norms count each part of each parameter
    once over the `model` axis (tp x pp): one all-reduce of a number.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        config: OptimizerConfig,
        precision: PrecisionConfig,
        values: list[list[float]],
        model_axis: Axis,
    ) -> None:
        self.params = [p for p in params if p.requires_grad]
        self.config, self.model_axis = config, model_axis
        device = self.params[0].device
        self.mixed = self.params[0].dtype != torch.float32
        self.main = [p.detach() for p in self.params]
        if self.mixed:
            _, self.main = flat_views(self.params, torch.float32)
            self.reset_main()
        _, self.exp_avg = flat_views(self.params, torch.float32)
        _, self.exp_avg_sq = flat_views(self.params, torch.float32)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.values = torch.tensor(values, dtype=torch.float64, device=device)
        self.scaler = LossScaler(precision, device)
        owned = [(part, p) for p in self.params for part in p.spec.parts if part.owner]
        self.part_names = [part.name for part, _ in owned]
        self._owned = owned
        kinds = [(p.spec.decay, p.spec.name in VOCABULARY) for p in self.params]
        self._groups = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)}

    def step(self, loss: torch.Tensor) -> StepStats:
        """Update the parameters from their `main_grad`, unless the loss or the norm is not finite.

        loss: 0-d, the global one, so that every rank decides alike.
        """
        grads = [part.view(p.main_grad) for part, p in self._owned]
        norms, norm = self._norm(grads)
        norm = (norm / self.scaler.scale).float()
        finite = (norm.isfinite() & loss.isfinite()).float()
        clip = self.config.clip_grad
        factor = (clip / (norm + 1e-6)).clamp(max=1.0) if clip > 0 else torch.ones_like(norm)
        now = self.good_steps.clamp(max=self.values.shape[1] - 1)  # [...] would wait for the GPU
        values = self.values.index_select(1, now[None])[:, 0]
        self.good_steps += finite.long()
        self._update(values.float(), self.scaler.scale / factor, 1.0 - finite)
        stats = StepStats(norm, finite, values[0], self.scaler.scale, norms)
        self.scaler.update(finite)
        return stats

    def _update(self, values: torch.Tensor, grad_scale: torch.Tensor, skip: torch.Tensor) -> None:
        config, step = self.config, self.good_steps.float()
        for (decays, vocabulary), group in self._groups.items():
            main, m, v = ([x[i] for i in group] for x in (self.main, self.exp_avg, self.exp_avg_sq))
            grads = [self.params[i].main_grad for i in group]
            lr, decay = values[int(vocabulary)], config.weight_decay if decays else 0.0
            if decays and config.weight_decay_incr_style != "constant":  # a kernel takes but a host's number
                decay = 0.0
                torch._foreach_mul_(main, 1.0 - lr * values[2] * (1.0 - skip))
            hyper = (config.adam_beta1, config.adam_beta2, config.adam_eps, decay)
            ops.adamw_(main, grads, (m, v), step, lr, hyper, grad_scale, skip)
        if self.mixed:
            torch._foreach_copy_([p.detach() for p in self.params], self.main)

    def _norm(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        norms = torch.stack(torch._foreach_norm(tensors, dtype=torch.float64))  # fp32 sums are off by 1e-5
        return norms, all_reduce_(norms.square().sum(), self.model_axis).sqrt()

    def params_norm(self) -> torch.Tensor:
        """L2 norm of all parameters, each once: 0-d. Communicates a number over the model axis."""
        main = dict(zip(map(id, self.params), self.main, strict=True))
        return self._norm([part.view(main[id(p)]) for part, p in self._owned])[1]

    def num_zeros(self) -> torch.Tensor:
        """Gradients that are zero, padding not counted: 0-d. Communicates a number over the model axis."""
        grads = [part.view(p.main_grad) for part, p in self._owned]
        return all_reduce_(sum(g.numel() - g.count_nonzero() for g in grads), self.model_axis)

    def reset_main(self) -> None:
        """Take the main parameters from the parameters again: after weights were loaded without them."""
        if self.mixed:
            torch._foreach_copy_(self.main, [p.detach() for p in self.params])

    def states(self) -> dict[str, list[torch.Tensor]]:
        """The tensors that a checkpoint holds, by kind, in the order of `params`."""
        main = {"main": self.main} if self.mixed else {}
        return {**main, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def scalars(self) -> dict:
        """The numbers that a checkpoint holds. Waits for the device."""
        return {"good_steps": int(self.good_steps), "loss_scaler": self.scaler.state()}

    def load_scalars(self, saved: dict) -> None:
        """Take up `scalars()` again."""
        self.good_steps.fill_(saved["good_steps"])
        self.scaler.load(saved["loss_scaler"])

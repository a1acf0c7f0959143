"""Values that change from step to step: learning rates, weight decay, and the loss scale of fp16.

    samples before a step   0 ... warmup ... decay        learning rate: up from `warmup_init`, then down

The schedules count samples, as Megatron's do: a step's learning rate follows from the samples before it. A
length in iterations is that of the samples of these iterations, also while batches still grow, where Megatron
takes lengths in samples only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from nanomegatron.config.settings import Config, OptimizerConfig, PrecisionConfig


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the samples so far; all lengths are in samples."""

    style: str
    lr: float
    min_lr: float
    warmup_init: float
    warmup: float  # with --lr-warmup-fraction perhaps no whole number
    decay: int
    wsd_style: str = "exponential"
    wsd_decay: int = 0

    @staticmethod
    def from_config(config: OptimizerConfig, length: int, samples_before: Sequence[int]) -> "Schedule":
        """The schedule of a run of `length` samples; samples_before: each iteration, and after the last."""

        def samples(iterations: int) -> int:
            beyond = iterations - (len(samples_before) - 1)
            if beyond <= 0:
                return samples_before[iterations]
            full_batch = samples_before[-1] - samples_before[-2]
            return samples_before[-1] + beyond * full_batch

        decay = config.lr_decay_samples or length
        wsd = config.lr_wsd_decay_samples or 0
        if config.lr_decay_iters:
            decay = samples(config.lr_decay_iters)
        if config.lr_wsd_decay_iters:
            end = config.lr_decay_iters or len(samples_before) - 1
            wsd = decay - samples(end - config.lr_wsd_decay_iters)
        warmup = config.lr_warmup_samples or samples(config.lr_warmup_iters)
        if config.lr_warmup_fraction is not None:
            warmup = config.lr_warmup_fraction * decay
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
        """The learning rate as a fraction of the way from min_lr (0) to lr (1, right after the warm-up)."""
        ratio = (samples - self.warmup) / (self.decay - self.warmup)
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


def schedules(config: Config, samples_before: list[int]) -> list[Callable[[int], float]]:
    """Return learning rate, that of the vocabulary's weights, and weight decay, by the samples before a step.

    samples_before: the samples before each step of the run, and after its last one.
    """
    optimizer, length = config.optimizer, config.run.train_samples or samples_before[-1]
    schedule = vocabulary = Schedule.from_config(optimizer, length, samples_before)
    if optimizer.decoupled_lr is not None:
        low = optimizer.min_lr if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr
        vocabulary = replace(schedule, lr=optimizer.decoupled_lr, min_lr=low)
    return [schedule.at, vocabulary.at, lambda samples: weight_decay_at(optimizer, samples, length)]


def step_values(config: Config, samples_before: list[int]) -> list[list[float]]:
    """Return the values of `schedules` for each step, and for one step more."""
    return [[at(samples) for samples in samples_before] for at in schedules(config, samples_before)]


class LossScaler:
    """Dynamic loss scale of fp16 (arXiv 1710.03740), on the device; a constant 1 for bf16 and fp32.

    A window of good steps doubles the scale; bad steps halve it, from the `hysteresis`-th on.
    """

    def __init__(self, precision: PrecisionConfig, device: torch.device) -> None:
        self.dynamic = precision.fp16 and precision.loss_scale is None
        start = (precision.loss_scale or precision.initial_loss_scale) if precision.fp16 else 1.0
        self.window, self.minimum = precision.loss_scale_window, precision.min_loss_scale
        self.hysteresis = torch.tensor(float(precision.hysteresis), device=device)
        self.scale = torch.tensor(start, device=device)
        self.good_in_a_row = torch.zeros((), device=device)
        self.hysteresis_left = self.hysteresis  # bad steps until the scale is halved

    def update(self, finite: torch.Tensor) -> None:
        """Adapt the scale to one step. finite `[]`: 1 or 0"""
        if not self.dynamic:
            return
        good, left = (self.good_in_a_row + 1) * finite, self.hysteresis_left - (1 - finite)
        halve, double = (left <= 0) & (finite == 0), good >= self.window
        halved = (self.scale / 2).clamp(min=self.minimum)
        self.scale = torch.where(double, self.scale * 2, torch.where(halve, halved, self.scale))
        self.hysteresis_left = torch.where(double, self.hysteresis, left)
        self.good_in_a_row = good * ~double

    def may_shrink(self, scale: float) -> bool:
        """Whether a bad step with this loss scale is part of the search for one that fits."""
        return self.dynamic and scale > self.minimum

    def state(self) -> list[float]:
        """Numbers for a checkpoint. The host waits for the device."""
        return torch.stack((self.scale, self.good_in_a_row, self.hysteresis_left)).tolist()

    def load(self, state: list[float]) -> None:
        """Restore `state()`."""
        self.scale, self.good_in_a_row, self.hysteresis_left = torch.tensor(state, device=self.scale.device)

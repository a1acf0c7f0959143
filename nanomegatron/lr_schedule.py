"""Values that change from step to step: the learning rate, and the loss scale of fp16.

Tests: tests/test_lr_schedule.py. Page: docs/life-of-a-step.md.

    samples before a step   0 ... warmup ... decay        learning rate: up from `warmup_init`, then down

The schedule counts samples, as Megatron's does: a step's learning rate follows from the samples before it. A
length in iterations is that of the samples of these iterations, also while batches still grow, where Megatron
takes lengths in samples only. Other shapes, and a weight decay that changes, are in variants/.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nanomegatron.config.settings import Config, OptimizerConfig, PrecisionConfig

Schedules = list[Callable[[int], float]]  # each: samples before a step -> the step's value


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the samples so far; all lengths are in samples."""

    style: str  # of --lr-decay-style: constant, linear, cosine
    lr: float
    min_lr: float
    warmup_init: float
    warmup: float  # with --lr-warmup-fraction perhaps no whole number
    decay: int

    @classmethod
    def from_config(cls, config: Config, samples_before: Sequence[int]) -> "Schedule":
        """The schedule of a run; samples_before: before each iteration, and after the last."""
        opt = config.optimizer
        decay = decay_samples(config, samples_before)
        warmup = warmup_samples(opt, samples_before, decay)
        return cls(opt.lr_decay_style, opt.lr, opt.min_lr, opt.lr_warmup_init, warmup, decay)

    def at(self, samples: int) -> float:
        """Learning rate of the step that follows `samples` samples."""
        if self.warmup and samples <= self.warmup:
            return self.warmup_init + (self.lr - self.warmup_init) * samples / self.warmup
        if self.style == "constant":
            return self.lr
        if samples > self.decay:
            return self.min_lr
        return self.after_warmup(samples)

    def after_warmup(self, samples: int) -> float:
        """Learning rate between warm-up and end of the decay: along a line, or half a cosine."""
        ratio = (samples - self.warmup) / (self.decay - self.warmup)
        remaining = {"linear": 1.0 - ratio, "cosine": cosine(ratio)}[self.style]
        return self.min_lr + remaining * (self.lr - self.min_lr)


def decay_samples(config: Config, samples_before: Sequence[int]) -> int:
    """Return the length of warm-up and decay together: as given, else that of the run."""
    opt = config.optimizer
    if opt.lr_decay_iters:
        return samples_of(opt.lr_decay_iters, samples_before)
    return opt.lr_decay_samples or config.run.train_samples or samples_before[-1]


def warmup_samples(opt: OptimizerConfig, samples_before: Sequence[int], decay: int) -> float:
    """Return the length of the warm-up. decay: the result of `decay_samples`."""
    if opt.lr_warmup_fraction is not None:
        return opt.lr_warmup_fraction * decay
    if opt.lr_warmup_samples:
        return opt.lr_warmup_samples
    return samples_of(opt.lr_warmup_iters, samples_before)


def samples_of(iterations: int, samples_before: Sequence[int]) -> int:
    """Samples of the first `iterations`; those beyond the last in `samples_before` have full batches."""
    beyond = iterations - (len(samples_before) - 1)
    if beyond <= 0:
        return samples_before[iterations]
    full_batch = samples_before[-1] - samples_before[-2]
    return samples_before[-1] + beyond * full_batch


def cosine(share: float) -> float:
    """Half a cosine: from 1 at 0 to 0 at 1."""
    return 0.5 * (math.cos(math.pi * share) + 1.0)


def step_values(schedules: Schedules, samples_before: Sequence[int]) -> list[list[float]]:
    """Return the values of three schedules for each step, and for one step more: `[3][steps + 1]`"""
    return [[schedule(samples) for samples in samples_before] for schedule in schedules]


class LossScaler:
    """Dynamic loss scale of fp16 (arXiv 1710.03740), on the device; a constant 1 for bf16 and fp32.

    A window of good steps doubles the scale; bad steps halve it, from the `hysteresis`-th on.
    """

    def __init__(self, precision: PrecisionConfig, device: torch.device) -> None:
        self.dynamic = precision.fp16 and precision.loss_scale is None
        start = (precision.loss_scale or precision.initial_loss_scale) if precision.fp16 else 1.0
        self.window = precision.loss_scale_window
        self.minimum = precision.min_loss_scale
        self.hysteresis = torch.tensor(float(precision.hysteresis), device=device)
        self.scale = torch.tensor(start, device=device)
        self.good_in_a_row = torch.zeros((), device=device)
        self.hysteresis_left = self.hysteresis  # bad steps until the scale is halved

    def update(self, good: torch.Tensor) -> None:
        """Adapt the scale to one step. good `[]`: 1 or 0"""
        if not self.dynamic:
            return
        in_a_row = (self.good_in_a_row + 1) * good
        left = self.hysteresis_left - (1 - good)
        halve = (left <= 0) & (good == 0)
        double = in_a_row >= self.window
        halved = (self.scale / 2).clamp(min=self.minimum)
        self.scale = torch.where(double, self.scale * 2, torch.where(halve, halved, self.scale))
        self.hysteresis_left = torch.where(double, self.hysteresis, left)
        self.good_in_a_row = in_a_row * ~double

"""Other result than `lr_schedule.Schedule`, for `--lr-decay-style` inverse-square-root and WSD.

    inverse-square-root   lr * sqrt(warmup / samples)                        (arXiv 1706.03762)
    WSD                   lr, then down over the last `wsd_decay` samples    (arXiv 2404.06395)

Both are Megatron's, at every sample: tests/test_optim.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanomegatron.config.settings import Config
from nanomegatron.lr_schedule import Schedule, cosine, samples_of


class InverseSquareRoot(Schedule):
    """A learning rate that falls with the root of the samples, to `min_lr` at the lowest."""

    def after_warmup(self, samples: int) -> float:
        """Learning rate between warm-up and end of the decay."""
        return max(self.min_lr, self.lr * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(samples, 1)))


@dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    """A learning rate that stays, and falls in the last `wsd_decay` samples before `decay`."""

    wsd_style: str = "exponential"
    wsd_decay: int = 0

    @classmethod
    def from_config(cls, config: Config, samples_before: Sequence[int]) -> "WarmupStableDecay":
        """The schedule of a run; samples_before: before each iteration, and after the last."""
        opt = config.optimizer
        schedule = super().from_config(config, samples_before)
        wsd = opt.lr_wsd_decay_samples or 0
        if opt.lr_wsd_decay_iters:
            end = opt.lr_decay_iters or len(samples_before) - 1
            wsd = schedule.decay - samples_of(end - opt.lr_wsd_decay_iters, samples_before)
        return replace(schedule, wsd_style=opt.lr_wsd_decay_style, wsd_decay=wsd)

    def after_warmup(self, samples: int) -> float:
        """Learning rate between warm-up and end of the decay."""
        start = self.decay - self.wsd_decay
        if samples <= start:
            return self.lr
        ratio = (samples - start) / self.wsd_decay
        remaining = {
            "linear": 1.0 - ratio,
            "cosine": cosine(ratio),
            "exponential": 2.0 * 0.5**ratio - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(ratio),
        }
        return self.min_lr + remaining[self.wsd_style] * (self.lr - self.min_lr)

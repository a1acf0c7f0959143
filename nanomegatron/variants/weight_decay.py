"""Other result than `optim.ShardState.adamw`, for `--weight-decay-incr-style`: a weight decay that changes.

    first sample: --start-weight-decay    ...a line or half a cosine...    last sample: --end-weight-decay

AdamW's kernel reads the decay of a step from the device. Torch's update takes only a number of the host, so
weights are decayed before it, by the same product. (Megatron; tests/test_lr_schedule.py)
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from nanomegatron.config.settings import Config
from nanomegatron.lr_schedule import cosine
from nanomegatron.ops.adamw import DECAY, DECOUPLED
from nanomegatron.optim import ShardState, StepScalars


def weight_decay_at(config: Config, samples_before: Sequence[int], samples: int) -> float:
    """Weight decay of the step that follows `samples`; samples_before: as in `Schedule.from_config`."""
    opt = config.optimizer
    share = min(samples / (config.run.train_samples or samples_before[-1]), 1.0)
    if opt.weight_decay_incr_style == "cosine":
        share = cosine(1 - share)
    return opt.start_weight_decay + share * (opt.end_weight_decay - opt.start_weight_decay)


def decay_by_rates(state: ShardState) -> None:
    """Make a shard's update by torch decay by the third of a step's rates, not by --weight-decay."""
    state.config = replace(state.config, weight_decay=0.0)
    state.adamw = partial(decayed_adamw, state)


def decayed_adamw(state: ShardState, grads: torch.Tensor, now: StepScalars) -> None:
    """Decay the main parameters, then update them and the moments from fp32 grads `[size/ranks]`."""
    for start, stop, kind in state.segments.ranges:
        if kind & DECAY:
            state.main[start:stop].mul_(1.0 - now.rates[kind & DECOUPLED] * now.rates[2] * (1.0 - now.skip))
    ShardState.adamw(state, grads, now)

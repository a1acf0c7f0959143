"""Other result than `lr_schedule.Schedule`, for `--decoupled-lr`: one of the vocabulary's weights.

Embedding and output layer (`optim.VOCABULARY`) have a peak and a minimum of their own; warm-up, decay and
shape are those of all. (Megatron; tests/test_lr_schedule.py)
"""

from dataclasses import replace

from nanomegatron.config.settings import OptimizerConfig
from nanomegatron.lr_schedule import Schedule


def decoupled(schedule: Schedule, config: OptimizerConfig) -> Schedule:
    """Return the schedule of the vocabulary's weights; schedule: that of the others."""
    low = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    return replace(schedule, lr=config.decoupled_lr, min_lr=low)

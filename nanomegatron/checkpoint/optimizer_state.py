"""The optimizer's state of a checkpoint: main parameters and moments of shards, good steps, the loss scale.

    main, exp_avg, exp_avg_sq    by kind: slices of named global tensors, and views of this rank's elements
    good_steps, loss_scaler      numbers, the same on all ranks

In fp32 the parameters are the main parameters, and are saved as such.
"""

import torch

from nanomegatron.dp import Slice
from nanomegatron.lr_schedule import LossScaler
from nanomegatron.optim import Optimizer


def optimizer_states(optimizer: Optimizer) -> dict[str, list[tuple[Slice, torch.Tensor]]]:
    """Return the states by kind -> slices, and views of their flat elements `[n]`"""
    kinds = ["main"] * optimizer.shards[0].mixed + ["exp_avg", "exp_avg_sq"]
    return {
        kind: [
            (piece, piece.shard_view(getattr(shard, kind)))
            for shard in optimizer.shards
            for piece in shard.bucket.slices
        ]
        for kind in kinds
    }


def optimizer_scalars(optimizer: Optimizer) -> dict:
    """Return the numbers. The host waits for the device."""
    return {"good_steps": int(optimizer.good_steps), "loss_scaler": scaler_numbers(optimizer.scaler)}


def scaler_numbers(scaler: LossScaler) -> list[float]:
    """Return the numbers of a loss scale. The host waits for the device."""
    return torch.stack((scaler.scale, scaler.good_in_a_row, scaler.hysteresis_left)).tolist()


def load_optimizer_scalars(optimizer: Optimizer, saved: dict) -> None:
    """Restore what `optimizer_scalars` returned."""
    scaler = optimizer.scaler
    optimizer.good_steps.fill_(saved["good_steps"])
    numbers = torch.tensor(saved["loss_scaler"], device=scaler.scale.device)
    scaler.scale, scaler.good_in_a_row, scaler.hysteresis_left = numbers


def reset_main(optimizer: Optimizer) -> None:
    """Copy the main parameters from the parameters, after loading weights without main parameters."""
    for shard in optimizer.shards:
        if shard.mixed:
            shard.main.copy_(shard.bucket.gathered.param_data[shard.bucket.shard])

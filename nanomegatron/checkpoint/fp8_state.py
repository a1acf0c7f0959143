"""The FP8 state of a checkpoint: delayed scaling's amaxes and scales, by the global name of the layer.

    NAME.fp8_history    [history, 3]    amaxes of x, w, g; row 0 is this step's
    NAME.fp8_scale      [3]

Other recipes have none: their scales are of the tensors themselves.
"""

from collections.abc import Mapping

import torch

from nanomegatron.fp8 import ROLES, Scales


def fp8_state(scales: Scales | None) -> dict[str, torch.Tensor]:
    """Copy each layer's state of x, w, g; {} without FP8 -> amaxes `[history, 3]`, scales `[3]`"""
    if scales is None or not scales.recipe.quantizer_class.keeps_history:
        return {}
    found = {}
    for name, history, scale in zip(
        scales.layers, scales.amax_history.split(len(ROLES), dim=1), scales.scale.split(len(ROLES))
    ):
        found[f"{name}.fp8_history"] = history.clone()
        found[f"{name}.fp8_scale"] = scale.clone()
    return found


def load_fp8_state(scales: Scales, state: Mapping[str, torch.Tensor]) -> None:
    """Restore what `fp8_state` returned. Zeros and ones come from a run in 16 bits, which has no history."""
    for name, history, scale in zip(
        scales.layers if state else (),
        scales.amax_history.split(len(ROLES), dim=1),
        scales.scale.split(len(ROLES)),
    ):
        history.copy_(state[f"{name}.fp8_history"])
        scale.copy_(state[f"{name}.fp8_scale"])
    scales.set_scale_inv(1.0 / scales.scale)
    scales.has_history = bool((scales.amax_history != 0).any() | (scales.scale != 1).any())
    scales.clear_weight_cache()

"""Rotary position embedding: each pair of features turns by position times its frequency.

    pair i of d/2          frequency base^(-2i/d): the first pairs turn fast, the last ones hardly at all
    rope                   that, on the first `rotary_percent` of a head's features
    Llama 3.1 scaling      pairs that turn less than once in 8192 positions are slowed by the factor, those
                           that turn more than 4 times are left alone, a ramp between
    yarn                   the same idea with the bounds `yarn_beta_slow` and `yarn_beta_fast` turns, the ramp
                           over the pair's number, and cos and sin larger, against a flatter softmax

A pair is (i, i + d/2), or with `rotary_interleaved` (2i, 2i + 1).
(arXiv 2104.09864; YaRN 2309.00071; Llama 3.1 as in its reference code; settings and defaults are Megatron's)
"""

import math

import torch

from nanomegatron.config import TransformerConfig

LLAMA3_CONTEXT, LLAMA3_SLOW, LLAMA3_FAST = 8192, 1.0, 4.0  # Llama 3.1's; positions and turns in them


def rope_angles(positions: torch.Tensor, config: TransformerConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * frequency, fp32, for the r features of a head that are rotated.

    positions `[s]` -> 2 x `[s, 1, 1, r/2]`, `[b, s]` -> 2 x `[s, b, 1, r/2]`.
    """
    size = 1.0
    if config.position_embedding_type == "yarn":
        size = _mscale(config, config.mscale) / _mscale(config, config.mscale_all_dim)
    places = positions[:, None] if positions.dim() == 1 else positions.t()
    angles = places.float()[:, :, None, None] * rope_frequencies(config, positions.device)
    return angles.cos() * size, angles.sin() * size


def rope_frequencies(config: TransformerConfig, device: torch.device | str = "cpu") -> torch.Tensor:
    """Radians that each pair turns from one position to the next, fp32 `[r/2]`."""
    features, base = int(config.head_dim * config.rotary_percent), config.rotary_base
    pairs = torch.arange(0, features, 2, dtype=torch.float32, device=device) / features
    frequencies = 1.0 / base**pairs
    if config.position_embedding_type == "yarn":
        ramp, factor = _yarn_ramp(config, features, device), config.rotary_scaling_factor
    elif config.use_rope_scaling:
        turns = LLAMA3_CONTEXT * frequencies / (2 * math.pi)
        ramp = ((turns - LLAMA3_SLOW) / (LLAMA3_FAST - LLAMA3_SLOW)).clamp(0, 1)
        factor = config.rope_scaling_factor
    else:
        return frequencies
    return frequencies / factor * (1 - ramp) + frequencies * ramp


def _yarn_ramp(config: TransformerConfig, features: int, device: torch.device | str) -> torch.Tensor:
    """1 for the pairs that turn often, 0 for those that hardly do."""

    def pair(turns: float) -> float:  # the pair that turns so often in the original context
        positions = config.yarn_original_max_position_embeddings / (turns * 2 * math.pi)
        return features * math.log(positions) / (2 * math.log(config.rotary_base))

    first, last = pair(config.yarn_beta_fast), pair(config.yarn_beta_slow)
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, features - 1)
    last += 0.001 * (first == last)
    numbers = torch.arange(features // 2, dtype=torch.float32, device=device)
    return 1 - ((numbers - first) / (last - first)).clamp(0, 1)


def _mscale(config: TransformerConfig, weight: float) -> float:
    return (
        0.1 * weight * math.log(config.rotary_scaling_factor) + 1.0
        if config.rotary_scaling_factor > 1
        else 1.0
    )


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first r features of each head in x `[s, b, n, d]`; cos, sin: `[s, 1 or b, 1, r/2]`."""
    turned, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    if interleaved:
        first, second = turned.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned.type_as(x), rest), dim=-1) if rest.shape[-1] else turned.type_as(x)

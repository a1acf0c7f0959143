"""Other result than `layers.output_logits`, for `--final-logit-softcapping`: between -cap and cap.

Other result than `cp.context_attention`, for `--attn-logit-softcapping`: so are attention scores.

    scores     q k^T / sqrt(d) -> cap * tanh(scores / cap) -> mask -> softmax       Mask.cap, ops/attention.py
    logits     x W^T           -> cap * tanh(logits / cap) -> cross entropy

Only the unfused attention computes bounded scores (`TransformerConfig.backend`), and over cp only all-to-all,
which gives it whole rows: a ring merges parts of a softmax whose scores no kernel bounds. The fused loss has
no bound either, and settings refuse it.
(Gemma 2, arXiv 2408.00118. tests/test_model.py, tests/test_tp_loss.py)
"""

import torch

from nanomegatron.cp import SequenceShard, context_attention
from nanomegatron.layers import OutputLayer, output_logits
from nanomegatron.ops.attention import Mask


def capped_logits(layer: OutputLayer, x: torch.Tensor) -> torch.Tensor:
    """Return bounded logits. x `[s, b, h]` or `[s/tp, b, h]` -> `[s, b, V/tp]`"""
    cap = layer.config.final_logit_softcapping
    return torch.tanh(output_logits(layer, x) / cap) * cap


def capped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shard: SequenceShard,
    layer: int,
    mask: Mask,
    backend: str,
    fused_softmax: bool = True,
) -> torch.Tensor:
    """Compute attention with scores within mask.cap; arguments and result as of `context_attention`.

    q `[s/cp, b, n, d]`, k, v `[s/cp, b, g, d]` -> `[s/cp, b, n*d]`; all-to-all. ValueError for other kinds.
    """
    if shard.types[layer] != "a2a":
        raise ValueError(f"--attn-logit-softcapping {mask.cap}: over cp needs a2a, not {shard.types[layer]}")
    return context_attention(q, k, v, shard, layer, mask, backend, fused_softmax)

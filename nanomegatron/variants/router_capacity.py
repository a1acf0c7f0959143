"""Other result than `router.Router`, for `--moe-expert-capacity-factor`: it drops copies over it.

    capacity 2, policy probs     token   0      1      2          position: the first ones
    id (prob)                            3 (.5) 3 (.9) 3 (.7)     3 3 3
    after dropping                       -1     3      3          3 3 -1

What is dropped passes the layer by on the residual stream. Each rank drops of its own tokens. Tested in
tests/test_router.py. (Switch, arXiv 2101.03961; GShard 2006.16668)
"""

import math

import torch

from nanomegatron.config.model import TransformerConfig
from nanomegatron.router import expert_capacity


@torch.no_grad()
def drop(probs: torch.Tensor, ids: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Return the ids, with -1 for copies over their expert's capacity. probs, ids `[t, k]` -> `[t, k]`

    An expert keeps the copies with the largest probs, or with the policy "position" the first tokens'.
    """
    t, capacity = len(ids), expert_capacity(len(ids), config)
    if capacity >= t:
        return ids
    rank = probs
    if config.moe_token_drop_policy == "position":
        rank = torch.arange(t, 0, -1.0, device=ids.device)[:, None].expand_as(probs)
    table = probs.new_full((t, config.num_experts), -math.inf).scatter(1, ids, rank)
    kept = torch.zeros_like(table, dtype=torch.bool).scatter(0, table.topk(capacity, dim=0).indices, True)
    return ids.where(kept.gather(1, ids), -1)

"""Other result than `router.best_experts`, for `--moe-router-group-topk`: the best of the best groups.

    E 8 in 4 groups    0 1 | 2 3 | 4 5 | 6 7      k 4, of 2 groups
    scores             9 1 | 5 6 | 2 3 | 0 8
    of a group          10 |  11 |   5 |   8      the sum of its k / 2 best
    taken              0 1   2 3

A token's experts come from few groups, so from few ranks. The losses still count the k best scores, as
Megatron's do. Tested in tests/test_router.py. (DeepSeek-V3, arXiv 2412.19437)
"""

import math

import torch

from nanomegatron.config.model import TransformerConfig


@torch.no_grad()
def best_of_groups(scores: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    """Return the k best experts of the best groups. scores `[t, E]` -> ids `[t, k]`

    A group is E / groups consecutive experts; its score is the sum of its k / limit best scores.
    """
    k, groups, limit = config.moe_router_topk, config.moe_router_num_groups, config.moe_router_group_topk
    worth = scores.unflatten(1, (groups, -1)).topk(k // limit).values.sum(-1)
    taken = torch.zeros_like(worth, dtype=torch.bool).scatter(1, worth.topk(limit).indices, True)
    scores = scores.masked_fill(~taken.repeat_interleave(scores.shape[1] // groups, 1), -math.inf)
    return scores.topk(k).indices

"""Other result than `router.compute_logits`, for `--moe-input-jitter-eps`: of inputs times random numbers.

These are from 1 - eps to 1 + eps, in training, and a function of seed, layer, sample, position and feature,
as dropout's masks are: the same under any layout and when recomputed. (Megatron draws them by each rank's
generator, in evaluation too.) Tested in tests/test_router.py. (Switch, arXiv 2101.03961)
"""

import torch

from nanomegatron.batch import Batch
from nanomegatron.ops import dropout
from nanomegatron.router import Router, compute_logits


def jittered_logits(router: Router, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the logits of jittered inputs. x `[t, h]` -> fp32 `[t, E]`"""
    if batch.dropout_seed is not None:
        x = jittered(router, x, batch, router.config.moe_input_jitter_eps)
    return compute_logits(router, x, batch)


def jittered(router: Router, x: torch.Tensor, batch: Batch, eps: float) -> torch.Tensor:
    """Multiply x `[t, n]` by the random numbers of this router's layer -> `[t, n]`"""
    site = -1 - router.config.num_layers - router.layer  # after attention's sites
    positions = batch.residual_positions
    rows = x.view(len(positions), -1, x.shape[1])
    return dropout.jitter(rows, eps, batch.dropout_seed, site, positions, batch.sample_ids).view_as(x)

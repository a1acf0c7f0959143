"""Other result than `router.compute_logits`, for `--moe-router-force-load-balancing`: random, for benchmarks.

The experts are then even in training, as those of a trained router nearly are. Logits keep the gradients that
they have without it. Random numbers are those of `router_jitter.py`, and the inputs may be jittered, too.
Tested in tests/test_router.py. (Megatron's flag of this name)
"""

from collections.abc import Callable

import torch

from nanomegatron.batch import Batch
from nanomegatron.router import Router
from nanomegatron.variants.router_jitter import jittered


def random_logits(
    router: Router, x: torch.Tensor, batch: Batch, compute_logits: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Return random numbers with the gradients of compute_logits. x `[t, h]` -> fp32 `[t, E]`"""
    logits = compute_logits(router, x, batch)
    if batch.dropout_seed is None:
        return logits
    return logits + (jittered(router, torch.ones_like(logits), batch, 1.0) - logits).detach()

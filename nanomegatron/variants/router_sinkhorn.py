"""Other result than `router.choose_experts`, for `--moe-router-load-balancing-type sinkhorn`.

    in training     the best by a table that gives each expert the same load
    else            the best by softmax(logits), for k = 1 by sigmoid(logits)
    probs           these scores of the chosen, as they are

The table covers a microbatch on one replica: the tokens of all tp and cp ranks, so it does not depend on the
layout. (Megatron's covers the tokens of one rank.) Ties go to the lower id. Of all router losses only z_loss
goes with it. Tested in tests/test_router.py. (arXiv 2202.01169)
"""

import torch

from nanomegatron.batch import Batch
from nanomegatron.comm import all_reduce
from nanomegatron.mesh import Axis
from nanomegatron.router import Router

SINKHORN_ROUNDS = 1000  # the most
SINKHORN_TOLERANCE = 1e-4  # the mean change at which they end


def sinkhorn_routing(
    router: Router, logits: torch.Tensor, batch: Batch, token_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by `sinkhorn` over tp x cp in training. logits `[t, E]` -> probs `[t, k]`, ids int64 `[t, k]`"""
    k = router.config.moe_router_topk
    scores = logits.sigmoid() if k == 1 else logits.softmax(-1)
    table = scores
    if batch.dropout_seed is not None:
        table = sinkhorn(logits, router.mesh.tp_cp, token_mask)
    ids = table.sort(descending=True, stable=True).indices[:, :k]
    return scores.gather(1, ids), ids


@torch.no_grad()
def sinkhorn(logits: torch.Tensor, axis: Axis, token_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Scale rows and columns of exp(logits) until all rows have one sum, and all columns another.

    logits `[t, E]` -> `[t, E]`, over the tokens of all ranks of the axis; token_mask `[t, 1]`: false for
    padding. Each round all-reduces E numbers, and the host waits for them. A few tokens with logits far apart
    would take thousands of rounds, hence the limit. fp64: equal entries stay equal in any order of ranks'
    sums.
    """
    table = logits.double().softmax(-1)
    least = torch.finfo(torch.float64).tiny
    tokens = table.new_ones(len(table)) if token_mask is None else token_mask[:, 0].double()
    n = all_reduce(tokens.sum(), axis).clamp(min=1)
    columns = table.new_ones(table.shape[1])
    for _ in range(SINKHORN_ROUNDS):
        rows = 1 / (n * (table @ columns))
        sums = all_reduce((tokens * rows) @ table, axis)
        before = columns
        columns = 1 / (len(columns) * sums.clamp(min=least))
        moved = (before - columns).abs().mean()
        if (moved / (1e-6 * columns.mean()).clamp(min=1)).item() <= SINKHORN_TOLERANCE:  # large: 1e-10 x
            break
    return (columns * table * rows[:, None]).float()

"""Sinkhorn's table: a choice of experts by it gives each of them the same load. (S-BASE, arXiv 2202.01169)"""

from collections.abc import Callable

import torch

ROUNDS = 1000  # at most


@torch.no_grad()
def sinkhorn(
    logits: torch.Tensor,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    real: torch.Tensor | None = None,
    tolerance: float = 1e-4,
) -> torch.Tensor:
    """exp(logits) `[t, E]` with rows and columns scaled until all rows have one sum, and all columns.

    Both are over the tokens of all ranks, or those that are `real` `[t, 1]`; `total` adds up the ranks'. In
    fp64, rounded to fp32 at the end: equal entries stay equal in whatever order ranks add. Adds up E numbers
    a round, on which the host waits, for at most ROUNDS: a few tokens with logits far apart would take
    thousands. (Megatron adds 1e-8 to each sum. Where experts are far from even this moves the scale of all
    columns every round, and 4,096 tokens take thousands in place of some dozens.)
    """
    table, least = logits.double().softmax(-1), torch.finfo(torch.float64).tiny
    tokens = table.new_ones(len(table)) if real is None else real[:, 0].double()
    count = total(tokens.sum()).clamp(min=1)
    columns = table.new_ones(table.shape[1])
    for _ in range(ROUNDS):
        rows = 1 / (count * (table @ columns))
        sums = total((tokens * rows) @ table)
        before, columns = columns, 1 / (len(columns) * sums.clamp(min=least))
        moved = (before - columns).abs().mean()
        if (moved / (1e-6 * columns.mean()).clamp(min=1)).item() <= tolerance:  # of large ones 1e-10
            break
    return (columns * table * rows[:, None]).float()

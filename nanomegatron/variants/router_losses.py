"""Other result than `router.aux_loss`, for `--moe-router-load-balancing-type`: seq_ and global_aux_loss.

P_e is expert e's mean score, f_e its share of the tokens' k choices, as in `router.py`.

    seq_aux_loss       E sum f_e P_e of each sample, their mean      f, P of a sample
    global_aux_loss    E sum f_e P_e                                 f of all replicas' microbatches so far in
                                                                     this step, P of a microbatch;
                                                                     Megatron's gradient is smaller by dp
Both are rows of `Router.loss_functions`. Tested in tests/test_moe_losses.py. (DeepSeek-V3, arXiv 2412.19437;
global balance 2501.11873)
"""

import torch

from nanomegatron.comm import all_reduce
from nanomegatron.router import LossInput, Router, count_copies, load_loss


def seq_aux_loss(router: Router, given: LossInput) -> torch.Tensor:
    """Return this rank's part times the microbatch's tokens `[]`; all-reduces `[samples, E]` over tp x cp."""
    counts = count_by_column(given.top, given.scores.shape[1], given.columns, given.token_mask)
    return load_loss(given.scores, all_reduce(counts, router.mesh.tp_cp))


def count_by_column(
    ids: torch.Tensor, experts: int, columns: int, of: torch.Tensor | None = None
) -> torch.Tensor:
    """`count_copies` of each column; the t tokens are `[s, columns]`. ids, of `[t, k]` -> `[columns, E]`"""
    column = torch.arange(len(ids), device=ids.device)[:, None] % columns
    return count_copies(column * experts + ids, columns * experts, of).view(columns, experts)


def global_aux_loss(router: Router, given: LossInput) -> torch.Tensor:
    """Return this rank's part times the microbatch's tokens `[]`; all-reduces `[E]` over all replicas."""
    copies = count_copies(given.top, given.scores.shape[1], given.token_mask)
    if router.config.sequence_parallel:  # without it tp ranks have the same tokens
        copies = all_reduce(copies, router.mesh.tp)
    router.global_counts += all_reduce(copies, router.mesh.dp_cp)
    return load_loss(given.scores, router.global_counts)


def add_global_counts(router: Router) -> None:
    """Give the router the counts `[E]` of all replicas' copies since `begin_step`."""
    router.register_buffer("global_counts", torch.zeros_like(router.counts), persistent=False)

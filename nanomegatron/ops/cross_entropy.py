"""Cross entropy over a shard of the vocabulary: the kernels of cuda/cross_entropy.cu, and their references.

    statistics of this rank's columns   ->   log-sum-exp over all ranks   ->   gradient, overwrites the logits

Letters in shapes: t tokens, V columns on this rank: first `real` columns of the vocabulary, then padding.
"""

import torch

from nanomegatron.ops.kernels import TYPES, check_fits, launch_kernel, usable

CHUNK_TOKENS = 2048  # tokens whose logits the reference converts to fp32 at once


def cross_entropy_stats_ref(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`cross_entropy_stats` in plain torch. logits `[t, V]`, labels `[t]` -> `[t]`, `[t]`, `[t]`"""
    if logits.shape[-1] == 0:
        zeros = torch.zeros(labels.shape, device=labels.device)
        return zeros - float("inf"), zeros, zeros
    logits32 = logits.float()
    maximum = logits32.amax(dim=-1)
    total = (logits32 - maximum[:, None]).exp_().sum(dim=-1)
    here = (labels >= 0) & (labels < logits.shape[-1])
    target = logits32.gather(-1, labels.where(here, labels.new_zeros(()))[:, None])[:, 0]
    return maximum, total, target.where(here, target.new_zeros(()))


def cross_entropy_grad_ref(
    logits: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """`cross_entropy_grad_` without padding columns, in plain torch: specification and oracle.

    logits `[t, V]`, labels, lse, grad `[t]` -> `[t, V]`
    """
    if logits.shape[-1] == 0:
        return logits
    result = (logits.float() - lse[:, None]).exp_()
    here = (labels >= 0) & (labels < logits.shape[-1])
    column = labels.where(here, labels.new_zeros(()))[:, None]
    result.scatter_add_(-1, column, -here[:, None].to(result.dtype))
    return result.mul_(grad[:, None]).to(logits.dtype)


def cross_entropy_stats(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Maximum, sum of exp(logit - maximum) and the label's logit of each row, in fp32.

    logits: `[t, V]`, rows may be strided; labels: `[t]` int64 -> `[t]`, `[t]`, `[t]`. A label outside 0..V-1
    (of another shard) gives the logit 0. With V = 0 (a shard of padding only) the results are -inf, 0, 0.
    Raises ValueError for other shapes, types or devices.
    """
    check_logits(logits, labels)
    if not usable(logits, "cross_entropy"):
        chunks = [
            cross_entropy_stats_ref(*chunk)
            for chunk in zip(logits.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS))
        ]
        return tuple(torch.cat(column) for column in zip(*chunks))
    if not _in_rows(logits):
        logits = logits.contiguous()
    stats, sizes = torch.empty(3, logits.shape[0], device=logits.device), (*logits.shape, logits.stride(0))
    launch_kernel("cross_entropy_stats", stats, logits, labels.contiguous(), *sizes, TYPES[logits.dtype])
    return stats.unbind()


def cross_entropy_grad_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    real: int | None = None,
) -> torch.Tensor:
    """grad * (exp(logits - lse) - onehot(labels)), in place; returns the logits, detached.

    logits: `[t, V]`, of which the first `real` columns count (all, if None) and the others become 0; labels:
    int64 `[t]`; lse, grad: `[t]` -> `[t, V]`. Autograd reports an error if these logits were saved for a
    backward.
    Raises ValueError for other shapes, types or devices.
    """
    check_logits(logits, labels, lse, grad)
    logits, real = logits.detach(), logits.shape[1] if real is None else real
    if not 0 <= real <= logits.shape[1]:
        raise ValueError(f"real {real}: of {logits.shape[1]} columns")
    if not usable(logits, "cross_entropy"):
        for x, *numbers in zip(*(t.split(CHUNK_TOKENS) for t in (logits, labels, lse, grad))):
            x[:, :real] = cross_entropy_grad_ref(x[:, :real], *numbers)
        logits[:, real:] = 0
        return logits
    if not _in_rows(logits):
        raise ValueError(
            f"logits with strides {logits.stride()}: columns must be neighbours, rows must not overlap"
        )
    numbers = labels.contiguous(), *(x.float().contiguous() for x in (lse, grad))
    sizes = len(logits), real, logits.shape[1], logits.stride(0), logits.stride(0), TYPES[logits.dtype]
    launch_kernel("cross_entropy_grad", logits, logits, *numbers, *sizes)
    torch.autograd.graph.increment_version(logits)
    return logits


def _in_rows(logits: torch.Tensor) -> bool:
    """Whether the columns are contiguous and rows do not overlap."""
    (rows, width), (stride, step) = logits.shape, logits.stride()
    return (step == 1 or width <= 1) and (stride >= width or rows <= 1)


def check_logits(logits: torch.Tensor, labels: torch.Tensor, *numbers: torch.Tensor) -> None:
    """Raise ValueError unless logits `[t, V]`, labels and numbers `[t]` fit together."""
    if logits.dim() != 2 or logits.shape[1] >= 2**30 or not logits.is_floating_point():
        raise ValueError(
            f"logits {logits.dtype} {list(logits.shape)}: must be floating, [t, V], V below 2^30"
        )
    check_fits("labels", labels, logits.shape[:1], torch.int64, logits.device)
    for x in numbers:
        check_fits("numbers", x, logits.shape[:1], x.dtype, logits.device)

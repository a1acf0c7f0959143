"""Embedding: look up rows of a table, and add gradients to them: cuda/embedding.cu, and the references.

    lookup              x[i, j] = table[ids[j, i] - first] * scale + positions[place of (j, i)]
    add_word_grad_      target[ids[j, i] - first] += grad[i, j]
    add_position_grad_  target[place of (j, i)] += grad[i, j]

The kernel adds the gradients of a row in fp32 in an order that only the ids determine, and rounds the sum
with the row once. Ids are sorted for it; nothing waits for the GPU, so a CUDA graph can capture all of it.
"""

import torch
import torch.nn.functional as F

from nanomegatron.ops.kernels import TYPES, check_fits, launch_kernel, usable

TOKENS_A_PART = 64  # tokens that a warp adds: TOKENS_A_PART in embedding.cu


def lookup(
    ids: torch.Tensor,
    table: torch.Tensor,
    first: int = 0,
    scale: float = 1.0,
    positions: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Look up ids `[b, s]`, counted from `first`, in the table `[v, h]` -> `[s, b, h]`. Not for autograd.

    Ids without a row give zeros. positions `[n, h]`: added to the others, those at places `[s]` or `[b, s]`.
    Raises ValueError if shapes or types do not fit.
    """
    _check(ids, table, positions, places)
    if not usable(table, "embedding"):
        return lookup_ref(ids, table, first, scale, positions, places)
    (b, s), (rows, h) = ids.shape, table.shape
    ids, table = ids.long().contiguous(), table.contiguous()
    count, stride = 0, 0
    if positions is not None:
        positions, places = positions.contiguous(), places.long().contiguous()
        count, stride = len(positions), s * (places.dim() - 1)
    out = table.new_empty(s, b, h)
    sizes = s, b, h, rows, first, count, stride, scale, TYPES[table.dtype]
    launch_kernel("embedding_lookup", out, table, positions, ids, places, *sizes)
    return out


def lookup_ref(ids, table, first=0, scale=1.0, positions=None, places=None) -> torch.Tensor:
    """`lookup` in plain torch: specification and oracle. ids `[b, s]`, table `[v, h]` -> `[s, b, h]`"""
    local, here = _local(ids, len(table), first)
    x = table[local] if scale == 1 else table[local] * scale
    if positions is not None:
        x = x + F.embedding(places[:, None] if places.dim() == 1 else places.t(), positions)
    return x.where(here[..., None], 0.0)


def _local(ids: torch.Tensor, rows: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of each token `[s, b]`, and whether it is the token's own.

    Tokens without a row are spread over all rows, so that none becomes a hot spot.
    """
    local = ids.t().contiguous() - first
    here = (local >= 0) & (local < rows)
    return torch.where(here, local, local.remainder(rows)), here


def add_word_grad_(
    target: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor, first: int = 0, beta: int = 1
) -> None:
    """Add grad `[s, b, h]` to the rows of target `[v, h]` that the ids `[b, s]` look up, if it has them.

    With gradients enabled (`create_graph`) this is plain torch, which has a derivative. beta 0: add to zeros.
    """
    if beta == 0:
        target.zero_()
    if not _usable(target, grad):
        local, here = _local(ids, len(target), first)
        values = (grad * here[..., None]).flatten(0, 1)
        target.index_put_((local.flatten(),), values.to(target.dtype), accumulate=True)
        return
    local = torch.empty(ids.t().shape, dtype=torch.int32, device=ids.device)
    torch.sub(ids.t(), first, out=local)
    _add_sorted_(target, local.flatten(), grad.flatten(0, 1)[:, None])


def add_position_grad_(target: torch.Tensor, places: torch.Tensor, grad: torch.Tensor, beta: int = 1) -> None:
    """Add grad `[s, b, h]` to the rows of target `[n, h]` at the places `[s]` or `[b, s]`, for all of a row.

    beta and `create_graph` as in `add_word_grad_`.
    """
    if beta == 0:
        target.zero_()
    if not _usable(target, grad):
        if places.dim() == 1:
            grad = grad.sum(1)
        rows = torch.ops.aten.embedding_dense_backward(grad, places.t(), len(target), -1, False)
        target.add_(rows)
    elif places.dim() == 1:
        _add_sorted_(target, places.int(), grad)
    else:
        _add_sorted_(target, places.t().int().flatten(), grad.flatten(0, 1)[:, None])


def _usable(target: torch.Tensor, grad: torch.Tensor) -> bool:
    plain = torch.is_grad_enabled() or not target.is_contiguous()
    return not plain and usable(grad, "embedding") and usable(target, "embedding")


def _add_sorted_(target: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor) -> None:
    """target[ids[i]] += grad[i].sum(0) by the kernel. target `[v, h]`, ids int32 `[n]`, grad `[n, r, h]`"""
    if target.dtype != torch.float32:
        grad = grad.to(target.dtype)
    n, r, h = grad.shape
    ids, order = ids.sort(stable=True)
    sums = torch.empty(-(-n * r // TOKENS_A_PART), 2, h, dtype=torch.float32, device=grad.device)
    sizes = n, r, len(target), h, TYPES[target.dtype], TYPES[grad.dtype]
    launch_kernel("embedding_add", target, sums, grad.contiguous(), ids, order, *sizes)


def _check(ids, table, positions, places) -> None:
    """Raise ValueError unless ids `[b, s]`, table `[v, h]`, positions `[n, h]` and places fit together."""
    integers = torch.int64, torch.int32
    if ids.dim() != 2 or ids.dtype not in integers or table.dim() != 2:
        given = f"{ids.dtype} {list(ids.shape)} for a table {list(table.shape)}"
        raise ValueError(f"ids {given}: must be int64 or int32 [b, s], for a table [v, h]")
    if positions is None:
        return
    check_fits("positions", positions, (len(positions), table.shape[1]), table.dtype, table.device)
    if places is None or places.dtype not in integers or places.shape not in (ids.shape, ids.shape[1:]):
        given = places if places is None else f"{places.dtype} {list(places.shape)}"
        raise ValueError(f"places {given}: must be int64 {list(ids.shape[1:])} or {list(ids.shape)}")

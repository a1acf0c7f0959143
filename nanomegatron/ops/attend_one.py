"""Attention of a new token to all before it, in a cache of keys: cuda/attend_one.cu, and its reference."""

import torch

from nanomegatron.ops.kernels import TYPES, launch_kernel, usable
from nanomegatron.ops.softmax import scaled_softmax

LEAST_KEYS = 256  # of a block, where less than FULL_GPU blocks would run
FULL_GPU = 264  # twice Hopper's multiprocessors
KeysValues = tuple[torch.Tensor, torch.Tensor]  # of keys and of values


def attend_one(
    q: torch.Tensor,
    new: KeysValues,
    cached: KeysValues,
    position: torch.Tensor,
    window: int | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """Put a token's key and value at its position into a cache; attend to those up to it. -> `[1, b, n*d]`

    q `[1, b, n, d]`, new `[1, b, g, d]`, cached `[t, b, g, d]`, position int64 `[1]`, on the device, below t.
    window: the number of keys seen before its own; cap: as in `attention.Mask`. Keys behind are not read.
    """
    (_, b, n, d), (t, _, g, _), pack = q.shape, cached[0].shape, 16 // q.element_size()
    rows = [x if x.stride()[2:] == (d, 1) else x.contiguous() for x in (q, *new)]
    fits = n // g in (1, 2, 4, 8) and d % pack == 0 and d // pack in (8, 16, 32) and b * g <= 65535
    whole = all(x.is_contiguous() for x in cached) and all(_packed(x, pack) for x in (*rows, *cached))
    if not fits or not whole or not usable(q, "attend_one"):
        return attend_one_ref(q, new, cached, position, window, cap)
    chunks = max(min(-(-FULL_GPU // (b * g)), t // LEAST_KEYS), 1)
    out = q.new_empty(1, b, n * d)
    parts = q.new_empty(b * n * chunks * (d + 2), dtype=torch.float32) if chunks > 1 else None
    sizes = (*(x.stride(1) for x in rows), b, n, g, d, t, chunks, -1 if window is None else window)
    args = (*rows, *cached, position, *sizes, d**-0.5, cap or 0.0, TYPES[q.dtype])
    launch_kernel("attend_one", out, parts, *args)
    return out


def _packed(x: torch.Tensor, pack: int) -> bool:
    """Whether every row of x `[s, b, heads, d]` begins at a multiple of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(1) % pack == 0


def attend_one_ref(
    q: torch.Tensor,
    new: KeysValues,
    cached: KeysValues,
    position: torch.Tensor,
    window: int | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """`attend_one` by two batched matmuls, keys behind hidden: specification and oracle.

    q `[1, b, n, d]`, position `[1]` -> `[1, b, n*d]`; new, cached as there. Scores have the type of q.
    """
    for rows, row in zip(cached, new, strict=True):
        rows.index_copy_(0, position, row)
    (_, b, n, d), (t, _, g, _) = q.shape, cached[0].shape
    key = torch.arange(t, device=q.device)
    hidden = key > position
    if window is not None:
        hidden = hidden | (key < position - window)
    k, v = (x.flatten(1, 2).transpose(0, 1) for x in cached)  # [b*g, t, d]
    scores = torch.bmm(q.reshape(b * g, n // g, d), k.transpose(1, 2)).view(b, n, 1, t)
    scale = d**-0.5
    if cap:
        scores, scale = torch.tanh(scores * (scale / cap)), cap
    probs, _ = scaled_softmax(scores, scale, hidden[None, None, None])
    return torch.bmm(probs.view(b * g, n // g, t), v).view(1, b, n * d)

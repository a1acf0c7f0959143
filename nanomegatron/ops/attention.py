"""Attention softmax(q k^T / sqrt(d)) v, of whole rows or in blocks, by the fastest available backend.

    backend    where                what                                      masks
    fused      Ampere, bf16/fp16    cuDNN's; on Hopper 2x as fast as flash    causal, full; the rest as flash
    flash      Ampere, bf16/fp16    torch's flash attention                   all
               CPU                  torch's blocked CPU kernel                all, in blocks
    unfused    anywhere             scores, softmax, dropout, matmul: the     all, s x s in memory
                                    oracle

`auto` takes the first of them that supports the device, dtype and dropout; calls that cuDNN does not support,
such as the largest heads, run as flash. A mask is causal or not, and may also hide keys further back than a
window (Mistral, arXiv 2310.06825) and the other documents of a packed sequence, given by cumulative lengths:

    documents  a a a a b b c c c c | d d d ...      two rows of ten tokens
    cu_seqlens 0       4   6         10  ...        first token of each, counted over all rows

With a causal mask and more keys than queries (several tokens behind a KV cache) the unfused path runs,
whatever was chosen: cuDNN and the CPU kernel align a causal mask to the first key, flash to the last. The
fused backends draw their own random numbers for attention dropout, so its mask depends on the layout; in the
unfused path it is a function of sample, head, query and key.

Keys may arrive in parts (context parallelism, cp.py). Each part gives a block of the scores
S = q k^T / sqrt(d), for which the kernels are called directly, forward and backward:

    forward     o = softmax(S) v      l = log sum exp(S)         of the keys in the block
    backward    P = exp(S - l)        D = rowsum(do * o)         o and l of all keys, here and in other blocks
                dv = P^T do    dS = P (do v^T - D)    dq = dS k / sqrt(d)    dk = dS^T q / sqrt(d)

So the gradients of the blocks add up to the whole gradients, and these calls save nothing for the backward.
(arXiv 2205.14135, 2307.08691; grouped queries 2305.13245)
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from nanomegatron.ops.softmax import scaled_softmax, scaled_softmax_ref

aten = torch.ops.aten
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, where the queries are the last s of t tokens and the keys all t; bounds."""

    causal: bool = True
    window: int | None = None  # number of keys seen before the query's own, with `causal`
    cu_seqlens: torch.Tensor | None = None  # int32 [documents + 1], over all b * s tokens, row by row
    max_seqlen: int | None = None  # length of the longest document
    cap: float | None = None  # bounds the scores, by cap * tanh(score / cap); only the unfused path does it

    def hidden(self, b: int, s: int, t: int, device: torch.device) -> torch.Tensor:
        """True where a query does not see a key. -> bool `[b, 1, s, t]` or `[1, 1, s, t]`"""
        hidden = Block(self.causal, self.window).hidden(s, t, device)[None, None]
        if self.cu_seqlens is not None:
            places = torch.arange(b * s, device=device, dtype=self.cu_seqlens.dtype)
            document = torch.searchsorted(self.cu_seqlens, places, right=True).view(b, 1, s)
            hidden = hidden | (document[..., None] != document[..., None, :])
        return hidden


def choose_backend(asked: str, device: torch.device, dtype: torch.dtype, dropout: float = 0.0) -> str:
    """The backend that runs for the setting `asked` (--attention-backend).

    Raises ValueError where the one asked for cannot run.
    """
    gpu, half = device.type == "cuda", dtype in (torch.bfloat16, torch.float16)
    old = gpu and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)
    possible = {
        "fused": gpu and half and not old,
        "flash": (gpu and half and not old) or (device.type == "cpu" and dropout == 0.0),
        "unfused": True,
    }
    if asked == "auto":
        return next(name for name, can in possible.items() if can)
    if not possible[asked]:
        rest = ", ".join(name for name, can in possible.items() if can)
        raise ValueError(
            f"--attention-backend {asked} cannot run {str(dtype).removeprefix('torch.')} on {device.type}"
            f"{' before Ampere' * old}{' with attention dropout' * bool(dropout)}; here: auto, {rest}"
        )
    return asked


def core_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    backend: str,
    mask: Mask = Mask(),
    dropout: float = 0.0,
    drop: Callable[[torch.Tensor], torch.Tensor] | None = None,
    fused_softmax: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q `[s, b, n, d]` over k, v `[t, b, g, d]`, n a multiple of g (query head i reads i*g/n).

    drop: applies dropout to the probabilities `[b, n, s, t]` of the unfused path; without it, and in other
    backends, torch's generator draws. fused_softmax: the unfused path uses the softmax kernel if available.
    -> the context `[s, b, n*d]` and the log-sum-exp fp32 `[b, n, s]`. Nothing is communicated.
    """
    (s, b, n, d), t = q.shape, k.shape[0]
    if mask.window is not None and mask.window >= t - 1:
        mask = replace(mask, window=None)
    if s == 1 and mask.window is None:
        mask = Mask(causal=False, cap=mask.cap)
    bounds = mask.cu_seqlens
    if backend == "unfused" or (s != t and mask.causal):
        context, lse = _masked_softmax(q, k, v, mask, drop or partial(F.dropout, p=dropout), fused_softmax)
    elif bounds is None:
        context, lse = attend(q, k, v, Block(mask.causal, mask.window), backend, dropout)
    else:  # all rows packed into one
        block = Block(mask.causal, mask.window, bounds, bounds, mask.max_seqlen, mask.max_seqlen)
        q, k, v = (x.transpose(0, 1).reshape(b * s, 1, *x.shape[2:]) for x in (q, k, v))
        context, lse = attend(q, k, v, block, backend, dropout)
        context, lse = context.view(b, s, n, d).transpose(0, 1), lse.view(n, b, s).transpose(0, 1)
    return context.reshape(s, b, n * d), lse


def _masked_softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, drop: Callable, fused: bool
) -> tuple:
    q, k, v = (one_per_query(x.permute(1, 2, 0, 3), q.shape[2]) for x in (q, k, v))  # [b, n, s, d]
    hidden = None
    if mask.cu_seqlens is not None:
        documents = replace(mask, causal=False, window=None)
        hidden = documents.hidden(q.shape[0], q.shape[2], k.shape[2], q.device)
    scores, scale = q @ k.transpose(-1, -2), q.shape[-1] ** -0.5
    if mask.cap:
        scores, scale = torch.tanh(scores * (scale / mask.cap)), mask.cap  # tanh keeps its result
    args = scores, scale, hidden, mask.causal, mask.window
    probs, lse = scaled_softmax(*args, inplace=not mask.cap) if fused else scaled_softmax_ref(*args)
    return (drop(probs) @ v).permute(2, 0, 1, 3), lse


@dataclass(frozen=True)
class Block:
    """Which keys a query sees: all, or if `causal` those up to its own (masks are aligned bottom-right).

    With cu_q and cu_k segment i of the queries sees only segment i of the keys, by the same rule. No segment
    is empty; if causal, each has at least as many keys as queries.
    """

    causal: bool = False
    window: int | None = None  # number of keys seen before the query's own, with `causal`
    cu_q: torch.Tensor | None = None  # int32 [segments + 1], cumulative lengths of query segments; b is 1
    cu_k: torch.Tensor | None = None  # the same of the key segments
    max_q: int = 0  # length of the longest query segment
    max_k: int = 0  # and key segment

    @staticmethod
    def packed(
        queries: Sequence[np.ndarray],
        keys: Sequence[np.ndarray],
        device: torch.device,
        causal: bool,
        window: int | None = None,
    ) -> "Block":
        """The block of segments packed one after the other; queries, keys: arrays (begin, end) of them."""
        lengths = [end - begin for begin, end in (queries, keys)]
        bounds = (to_device(np.append(0, x.cumsum()).astype(np.int32), device) for x in lengths)
        return Block(causal, window, *bounds, *(int(x.max()) for x in lengths))

    def hidden(self, s: int, t: int, device: torch.device) -> torch.Tensor:
        """True where a query does not see a key. -> bool `[s, t]`"""
        query, key = torch.arange(s, device=device)[:, None], torch.arange(t, device=device)
        own, hidden = query + (t - s), torch.zeros(s, t, dtype=torch.bool, device=device)
        if self.cu_q is not None:
            sides = (self.cu_q, query), (self.cu_k, key)
            i, j = (torch.searchsorted(cu, place.to(cu.dtype), right=True) for cu, place in sides)
            own, hidden = query + (self.cu_k - self.cu_q)[i], i != j
        if self.causal:
            hidden = hidden | (key > own)
        if self.window is not None:
            hidden = hidden | (key < own - self.window)
        return hidden


def ranges(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The indices of all rows in the segments: begin[0], begin[0] + 1, ..., end[0] - 1, begin[1], ..."""
    sizes = end - begin
    return np.repeat(end - sizes.cumsum(), sizes) + np.arange(sizes.sum())


def to_device(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy x to the device; the host does not wait. -> `[...]`"""
    tensor = torch.from_numpy(x)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, backend: str, dropout: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q `[s, b, n, d]` to k, v `[t, b, g, d]`, n a multiple of g (query head i reads i*g/n).

    Only the last dim must be contiguous. backend: a result of choose_backend. dropout: of the probabilities,
    ignored by the unfused backend. -> the output `[s, b, n, d]` and the log-sum-exp fp32 `[b, n, s]`
    """
    if backend == "unfused":
        return _unfused(q, k, v, block)
    if q.device.type == "cpu":
        return _cpu(q, k, v, block, dropout)
    if backend == "fused" and _cudnn_can(q, k, block):
        q, k, v = _heads_first(q, k, v)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, dropout, block.causal, False
        )
        return out.permute(2, 0, 1, 3), lse.view(lse.shape[:3])
    args, window = _flash_args(q, k, block, dropout)
    out, lse, *_ = aten._flash_attention_forward(*_rows(block, q, k, v), *args, False, **window)
    return (out.transpose(0, 1), lse) if block.cu_q is None else (out[:, None], lse[None])


def attend_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block: Block,
    backend: str,
) -> Grads:
    """This block's gradients of q `[s, b, n, d]` and k, v `[t, b, g, d]`, given dout `[s, b, n, d]`.

    out `[s, b, n, d]`, lse `[b, n, s]`: the results over all keys that the queries see, in all blocks.
    """
    if backend == "unfused":
        return _unfused_backward(dout, q, k, v, out, lse, block)
    if q.device.type == "cpu":
        return _cpu_backward(dout, q, k, v, out, lse, block)
    # The kernels assume a contiguous log-sum-exp. torch caches cuDNN's plans by the layouts of q, k and v:
    # a plan made for other strides of the output would be reused, and read the wrong numbers.
    dout, out, lse = (x.contiguous() for x in (dout, out, lse))
    random = (q.new_empty(2, dtype=torch.int64),) * 2  # the generator's state, not read without dropout
    if backend == "fused" and _cudnn_can(q, k, block):
        args = *random, None, None, None, q.shape[0], k.shape[0], 0.0, block.causal  # no bias, no segments
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            *_heads_first(dout, q, k, v, out), lse[..., None], *args
        )
        return tuple(x.permute(2, 0, 1, 3) for x in grads)
    args, window = _flash_args(q, k, block)
    lse = lse if block.cu_q is None else lse[0]
    grads = aten._flash_attention_backward(*_rows(block, dout, q, k, v, out), lse, *args, *random, **window)
    return tuple(x.transpose(0, 1) if block.cu_q is None else x[:, None] for x in grads)


def _cudnn_can(q: torch.Tensor, k: torch.Tensor, block: Block) -> bool:
    """Whether cuDNN supports this block; torch does not call it for a single key."""
    square = not block.causal or q.shape[0] == k.shape[0]
    return (
        block.window is None
        and block.cu_q is None
        and square
        and k.shape[0] > 1
        and q.shape[3] <= _cudnns_head(q.device)
    )


@functools.cache
def _cudnns_head(device: torch.device) -> int:
    """The largest head size for which cuDNN has a backward: on Hopper 256, at the latest from 9.19 on."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return 256 if hopper and torch.backends.cudnn.version() >= 91900 else 128


def _heads_first(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of the tensors: `[s, b, heads, d] -> [b, heads, s, d]`"""
    return (x.permute(1, 2, 0, 3) for x in tensors)


def _rows(block: Block, *tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of the tensors for flash: `[b, s, heads, d]`, or for packed segments `[s, heads, d]`."""
    return (x.transpose(0, 1) if block.cu_q is None else x[:, 0] for x in tensors)


def _flash_args(
    q: torch.Tensor, k: torch.Tensor, block: Block, dropout: float = 0.0
) -> tuple[tuple, dict[str, int]]:
    sizes = (q.shape[0], k.shape[0]) if block.cu_q is None else (block.max_q, block.max_k)
    window = {} if block.window is None else dict(window_size_left=block.window, window_size_right=0)
    return (block.cu_q, block.cu_k, *sizes, dropout, block.causal), window


def _cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, dropout: float
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (one_per_query(x, q.shape[2]) for x in _heads_first(q, k, v))
    parts = [
        aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], dropout, causal, attn_mask=bias
        )
        for rows, keys, causal, bias in _cpu_parts(block, q, k)
    ]
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
    return out.permute(2, 0, 1, 3), lse


def _cpu_backward(dout, q, k, v, out, lse, block: Block) -> Grads:
    groups, dtype = k.shape[2], q.dtype
    dout, q, k, v, out = (one_per_query(x, q.shape[2]) for x in _heads_first(dout, q, k, v, out))
    totals = [torch.zeros_like(x, dtype=_wide(x)) for x in (q, k, v)]
    for rows, keys, causal, bias in _cpu_parts(block, q, k):
        places = (dout, rows), (q, rows), (k, keys), (v, keys), (out, rows), (lse, rows)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x[:, :, at] for x, at in places), 0.0, causal, attn_mask=bias
        )
        for total, grad, at in zip(totals, grads, (rows, keys, keys), strict=True):
            total[:, :, at] += grad
    totals[1:] = (x.unflatten(1, (groups, -1)).sum(2) for x in totals[1:])
    return tuple(x.permute(2, 0, 1, 3).to(dtype) for x in totals)


def _cpu_parts(
    block: Block, q: torch.Tensor, k: torch.Tensor
) -> Iterator[tuple[slice, slice, bool, torch.Tensor | None]]:
    """(queries, keys, whether causal, bias or None) of each call of the CPU kernel; q, k `[b, n, s, d]`."""
    bounds = [(0, q.shape[2]), (0, k.shape[2])]
    if block.cu_q is not None:
        bounds = [x.tolist() for x in (block.cu_q, block.cu_k)]
    for (begin, end), (first, last) in zip(*map(itertools.pairwise, bounds), strict=True):
        if not block.causal or (block.window is None and end - begin == last - first):
            yield slice(begin, end), slice(first, last), block.causal, None
            continue
        size, own = max(block.window or 0, 64), last - end  # own: a query's own key is at its index + own
        for row in range(begin, end, size):
            stop = min(row + size, end)
            key = first if block.window is None else max(first, row + own - block.window)
            hidden = Block(True, block.window).hidden(stop - row, stop + own - key, q.device)
            bias = q.new_zeros(hidden.shape).masked_fill(hidden, -torch.inf)
            yield slice(row, stop), slice(key, stop + own), False, bias


def one_per_query(x: torch.Tensor, n: int) -> torch.Tensor:
    """Repeat each key or value head of x `[b, g, t, d]` for its n/g query heads. -> `[b, n, t, d]`"""
    return x if x.shape[1] == n else x.repeat_interleave(n // x.shape[1], dim=1)


def _unfused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, dtype = q.shape, q.dtype
    q, k, v = _grouped(k.shape[2], q, k, v)
    scores = _scores(q, k, block)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bgrst,tbgrd->sbgrd", (scores - lse[..., None]).exp(), v)
    return out.reshape(shape).to(dtype), lse.flatten(1, 2)


def _unfused_backward(dout, q, k, v, out, lse, block: Block) -> Grads:
    like = q, k, v
    dout, q, k, v, out = _grouped(k.shape[2], dout, q, k, v, out)
    probs = (_scores(q, k, block) - lse.unflatten(1, q.shape[2:4])[..., None]).exp()
    delta = torch.einsum("sbgrd,sbgrd->bgrs", dout, out)[..., None]
    dscores = probs * (torch.einsum("sbgrd,tbgrd->bgrst", dout, v) - delta) * q.shape[4] ** -0.5
    dq = torch.einsum("bgrst,tbgrd->sbgrd", dscores, k)
    dk, dv = (torch.einsum("bgrst,sbgrd->tbgd", x, y) for x, y in ((dscores, q), (probs, dout)))
    return tuple(grad.reshape(x.shape).to(x.dtype) for grad, x in zip((dq, dk, dv), like, strict=True))


def _scores(q: torch.Tensor, k: torch.Tensor, block: Block) -> torch.Tensor:
    """Scaled and masked scores `[b, groups, heads of a group, s, t]`."""
    scores = torch.einsum("sbgrd,tbgrd->bgrst", q, k) * q.shape[4] ** -0.5
    return scores.masked_fill(block.hidden(q.shape[0], k.shape[0], q.device), -torch.inf)


def _grouped(groups: int, *tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors as `[s, b, groups, heads of a group, d]`, in fp32 or wider."""
    return (x.unflatten(2, (groups, -1)).to(_wide(x)) for x in tensors)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)

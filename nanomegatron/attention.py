"""Core attention: softmax(q k^T / sqrt(d)) v, by the fastest implementation that is exact here.

    backend    where                what                                      masks
    fused      CUDA, bf16/fp16      cuDNN's; on Hopper twice torch's flash    causal, full; the rest as flash
    flash      CUDA, bf16/fp16      torch's flash attention                   all
               CPU                  torch's blocked CPU kernel                all, in blocks
    unfused    anywhere             scores, softmax, dropout, matmul: the     all, s x s in memory
                                    oracle

All return the log-sum-exp of the scores as well, which ring attention merges by. `auto` takes the first that
can do what is asked. A mask is causal or not, and may hide more: keys further back than a window (Mistral,
arXiv 2310.06825), and the other documents of a packed sequence, told by cumulative lengths:

    documents  a a a a b b c c c c | d d d ...      two rows of ten tokens
    cu_seqlens 0       4   6         10  ...        where each begins among all tokens, row by row

Where a mask meets more keys than queries (several tokens behind a cache) the unfused path runs whatever was
chosen: the kernels align the mask to the first key, not to the last. The fused ones draw attention dropout
by themselves, so its mask depends on the layout; in the unfused path it is a function of sample, head, query
and key. (arXiv 2205.14135; grouped queries 2305.13245)
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from nanomegatron.ops_softmax import scaled_softmax, scaled_softmax_ref

aten = torch.ops.aten


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: the last s of t tokens are queries, and all are keys."""

    causal: bool = True
    window: int | None = None  # so many keys before itself, with `causal`
    cu_seqlens: torch.Tensor | None = None  # int32 [documents + 1], over all b * s tokens, row by row
    max_seqlen: int | None = None  # of the longest document

    @property
    def simple(self) -> bool:
        """Causal or full, and nothing else."""
        return self.window is None and self.cu_seqlens is None

    def hidden(self, b: int, s: int, t: int, device: torch.device) -> torch.Tensor:
        """True where a query does not see a key, `[b or 1, 1, s, t]`."""
        query = torch.arange(t - s, t, device=device)[:, None]
        key = torch.arange(t, device=device)
        hidden = torch.zeros(1, 1, s, t, dtype=torch.bool, device=device)
        if self.causal:
            hidden = hidden | (key > query)
        if self.window is not None:
            hidden = hidden | (key < query - self.window)
        if self.cu_seqlens is not None:
            places = torch.arange(b * s, device=device, dtype=self.cu_seqlens.dtype)
            document = torch.searchsorted(self.cu_seqlens, places, right=True).view(b, 1, s)
            hidden = hidden | (document[..., None] != document[..., None, :])
        return hidden


def choose_backend(asked: str, device: torch.device, dtype: torch.dtype, dropout: float = 0.0) -> str:
    """The backend that runs for the setting `asked` (--attention-backend).

    Raises ValueError where the one asked for cannot run.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    possible = {
        "fused": device.type == "cuda" and half,
        "flash": (device.type == "cuda" and half) or (device.type == "cpu" and dropout == 0.0),
        "unfused": True,
    }
    if asked == "auto":
        return next(name for name, can in possible.items() if can)
    if not possible[asked]:
        rest = ", ".join(name for name, can in possible.items() if can)
        raise ValueError(
            f"--attention-backend {asked} cannot run {str(dtype).removeprefix('torch.')} on {device.type}"
            f"{' with attention dropout' if dropout else ''}; here: auto, {rest}"
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

    drop: the unfused path's dropout of the probabilities `[b, n, s, t]`; without it, and in the other paths,
    torch's generator draws. fused_softmax: the unfused path's softmax is one kernel where there is one.
    Returns the context `[s, b, n*d]` and the log-sum-exp `[b, n, s]`, fp32. Nothing is communicated.
    """
    s, b, n, d = q.shape
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, heads, s, d], as views
    t = k.shape[2]
    if mask.window is not None and mask.window >= t - 1:
        mask = replace(mask, window=None)
    if s == 1 and mask.window is None:
        mask = Mask(causal=False)
    if backend == "unfused" or (s != t and mask.causal):
        context, lse = _unfused(q, k, v, mask, drop or partial(F.dropout, p=dropout), fused_softmax)
    elif q.device.type == "cpu":
        context, lse = _cpu(q, k, v, mask, dropout)
    elif backend == "fused" and mask.simple:
        context, lse = _cudnn(q, k, v, mask.causal, dropout)
    else:
        context, lse = _flash(q, k, v, mask, dropout)
    return context.permute(2, 0, 1, 3).reshape(s, b, n * d), lse


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, dropout: float) -> tuple:
    context, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, dropout, causal, False)
    return context, lse.view(lse.shape[:3])


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, dropout: float) -> tuple:
    """torch's flash kernel; where documents are told, on the tokens of all rows in one `[b*s, heads, d]`."""
    b, n, s, _ = q.shape
    bounds, sizes = mask.cu_seqlens, (s, k.shape[2])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if bounds is not None:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        sizes = (mask.max_seqlen, mask.max_seqlen)
    window = {} if mask.window is None else dict(window_size_left=mask.window, window_size_right=0)
    context, lse, *_ = aten._flash_attention_forward(
        q, k, v, bounds, bounds, *sizes, dropout, mask.causal, False, **window
    )
    if bounds is not None:
        context, lse = context.unflatten(0, (b, s)), lse.view(n, b, s).transpose(0, 1)
    return context.transpose(1, 2), lse


def _cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, dropout: float) -> tuple:
    """torch's CPU kernel, document by document, and through a window block by block of queries."""
    k, v = _one_per_query(k, q), _one_per_query(v, q)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    if mask.simple:
        return kernel(q, k, v, dropout, mask.causal)
    s, window, pieces = q.shape[2], mask.window, []
    for rows, start, stop in _documents(mask, s):
        block = stop - start if window is None else max(window, 64)
        for first in range(start, stop, block):
            last = min(first + block, stop)
            earliest = start if window is None else max(start, first - window)
            bias = None
            if window is not None:
                hidden = Mask(window=window).hidden(1, last - first, last - earliest, q.device)
                bias = q.new_zeros(hidden.shape).masked_fill(hidden, float("-inf"))
            keys, values = (x[rows, :, earliest:last] for x in (k, v))
            causal = mask.causal and bias is None
            pieces.append(kernel(q[rows, :, first:last], keys, values, dropout, causal, attn_mask=bias))
    joined = (torch.cat(parts, dim=2) for parts in zip(*pieces))  # the rows, where documents are told, in one
    return tuple(x if x.shape[2] == s else torch.cat(x.split(s, dim=2)) for x in joined)


def _documents(mask: Mask, s: int) -> Iterator[tuple[slice, int, int]]:
    """(rows, first token, last token + 1) of each document; all rows at once where no documents are told."""
    if mask.cu_seqlens is None:
        yield slice(None), 0, s
    else:
        for begin, end in itertools.pairwise(mask.cu_seqlens.tolist()):
            yield slice(begin // s, begin // s + 1), begin % s, begin % s + end - begin


def _unfused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, drop: Callable, fused: bool
) -> tuple:
    k, v = _one_per_query(k, q), _one_per_query(v, q)
    hidden = None
    if mask.cu_seqlens is not None:
        documents = replace(mask, causal=False, window=None)
        hidden = documents.hidden(q.shape[0], q.shape[2], k.shape[2], q.device)
    scores, scale = q @ k.transpose(-1, -2), q.shape[-1] ** -0.5
    args = scores, scale, hidden, mask.causal, mask.window
    probs, lse = scaled_softmax(*args, inplace=True) if fused else scaled_softmax_ref(*args)
    return drop(probs) @ v, lse


def _one_per_query(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Key or value heads repeated until there is one for each query head. `[b, g, t, d] -> [b, n, t, d]`"""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)

"""Core attention: softmax(q k^T / sqrt(d)) v, by the fastest implementation that is exact here.

    backend    where                what                                      masks
    fused      CUDA, bf16/fp16      cuDNN's; on Hopper twice torch's flash    causal, full; the rest as flash
    flash      CUDA, bf16/fp16      torch's flash attention                   all
               CPU                  torch's blocked CPU kernel                all, in blocks
    unfused    anywhere             scores, softmax, dropout, matmul: the     all, s x s in memory
                                    oracle

All return the log-sum-exp of the scores as well, which ring attention merges by. attention_blocks.py calls
the kernels; what cuDNN cannot do, such as the largest heads, fused leaves to flash. `auto` takes the
first that can do what is asked. A mask is causal or not, and may hide more: keys further back than a window
(Mistral, arXiv 2310.06825), and the other documents of a packed sequence, told by cumulative lengths:

    documents  a a a a b b c c c c | d d d ...      two rows of ten tokens
    cu_seqlens 0       4   6         10  ...        where each begins among all tokens, row by row

Where a mask meets more keys than queries (several tokens behind a cache) the unfused path runs whatever was
chosen: most kernels align the mask to the first key, not to the last. The fused ones draw attention dropout
by themselves, so its mask depends on the layout; in the unfused path it is a function of sample, head, query
and key. (arXiv 2205.14135; grouped queries 2305.13245)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from nanomegatron.ops.attention_blocks import Block, attend, one_per_query
from nanomegatron.ops.softmax import scaled_softmax, scaled_softmax_ref


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: the last s of t tokens are queries, and all are keys."""

    causal: bool = True
    window: int | None = None  # so many keys before itself, with `causal`
    cu_seqlens: torch.Tensor | None = None  # int32 [documents + 1], over all b * s tokens, row by row
    max_seqlen: int | None = None  # of the longest document

    def hidden(self, b: int, s: int, t: int, device: torch.device) -> torch.Tensor:
        """True where a query does not see a key, `[b or 1, 1, s, t]`."""
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
    (s, b, n, d), t = q.shape, k.shape[0]
    if mask.window is not None and mask.window >= t - 1:
        mask = replace(mask, window=None)
    if s == 1 and mask.window is None:
        mask = Mask(causal=False)
    bounds = mask.cu_seqlens
    if backend == "unfused" or (s != t and mask.causal):
        context, lse = _unfused(q, k, v, mask, drop or partial(F.dropout, p=dropout), fused_softmax)
    elif bounds is None:
        context, lse = attend(q, k, v, Block(mask.causal, mask.window), backend, dropout)
    else:  # the tokens of all rows in one
        block = Block(mask.causal, mask.window, bounds, bounds, mask.max_seqlen, mask.max_seqlen)
        q, k, v = (x.transpose(0, 1).reshape(b * s, 1, *x.shape[2:]) for x in (q, k, v))
        context, lse = attend(q, k, v, block, backend, dropout)
        context, lse = context.view(b, s, n, d).transpose(0, 1), lse.view(n, b, s).transpose(0, 1)
    return context.reshape(s, b, n * d), lse


def _unfused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, drop: Callable, fused: bool
) -> tuple:
    q, k, v = (one_per_query(x.permute(1, 2, 0, 3), q.shape[2]) for x in (q, k, v))  # [b, n, s, d]
    hidden = None
    if mask.cu_seqlens is not None:
        documents = replace(mask, causal=False, window=None)
        hidden = documents.hidden(q.shape[0], q.shape[2], k.shape[2], q.device)
    scores, scale = q @ k.transpose(-1, -2), q.shape[-1] ** -0.5
    args = scores, scale, hidden, mask.causal, mask.window
    probs, lse = scaled_softmax(*args, inplace=True) if fused else scaled_softmax_ref(*args)
    return (drop(probs) @ v).permute(2, 0, 1, 3), lse

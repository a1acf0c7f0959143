"""Core attention: softmax(q k^T / sqrt(d)) v, by the fastest implementation that is exact here.

    backend    where                what
    fused      CUDA, bf16/fp16      cuDNN's attention; on Hopper about twice torch's flash kernel
    flash      CUDA, bf16/fp16      torch's flash attention
               CPU                  torch's blocked CPU kernel, the same algorithm
    unfused    anywhere             scores, `ops.scaled_softmax`, dropout, matmul: the oracle, s x s in memory

All return the log-sum-exp of the scores as well, which ring attention merges by. `auto` takes the first that
can do what is asked. Where a causal mask meets more keys than queries (several tokens behind a cache) the
unfused path runs whatever was chosen: the kernels align the mask to the first key, not to the last. The
fused ones draw attention dropout by themselves, so its mask depends on the layout; in the unfused path it
is a function of sample, head, query and key.
(arXiv 2205.14135; grouped queries 2305.13245)
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from nanomegatron import ops

aten = torch.ops.aten


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
    causal: bool = True,
    dropout: float = 0.0,
    drop: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q `[s, b, n, d]` over k, v `[t, b, g, d]`, n a multiple of g (query head i reads i*g/n).

    causal: query i sees keys up to i + t - s. drop: the unfused path's dropout of the probabilities
    `[b, n, s, t]`; without it, and in the other paths, torch's generator draws. Returns the context
    `[s, b, n*d]` and the log-sum-exp `[b, n, s]`, fp32. Nothing is communicated.
    """
    s, b, n, d = q.shape
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, heads, s, d], as views
    causal = causal and s > 1
    if causal and s != k.shape[2]:
        backend = "unfused"
    if backend == "unfused":
        context, lse = _unfused(q, k, v, causal, drop or partial(F.dropout, p=dropout))
    else:
        context, lse = {"fused": _cudnn, "flash": _flash}[backend](q, k, v, causal, dropout)
    return context.permute(2, 0, 1, 3).reshape(s, b, n * d), lse


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, dropout: float) -> tuple:
    context, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, dropout, causal, False)
    return context, lse.view(lse.shape[:3])


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, dropout: float) -> tuple:
    k, v = _one_per_query(k, q), _one_per_query(v, q)
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal)
    context, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False)
    return context, lse


def _unfused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, drop: Callable) -> tuple:
    k, v = _one_per_query(k, q), _one_per_query(v, q)
    probs, lse = ops.scaled_softmax(q @ k.transpose(-1, -2), q.shape[-1] ** -0.5, causal)
    return drop(probs) @ v, lse


def _one_per_query(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Key or value heads repeated until there is one for each query head. `[b, g, t, d] -> [b, n, t, d]`"""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)

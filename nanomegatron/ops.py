"""Ops in a few lines of torch; those that have a kernel are in ops_*.py.

There a function `..._ref` is the documentation of the op, its path on a CPU and the oracle that its kernel is
tested against. `python -m nanomegatron.ops` prints which path each op takes here, and why.

Letters in shapes: s sequence, b batch, h hidden, n heads, d head size, f ffn, V vocabulary.
"""

import sys

import torch
import torch.nn.functional as F

from nanomegatron.ops_mlp import SILU, gated
from nanomegatron.ops_report import report


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x = [gate; up]. `[..., 2f] -> [..., f]` (arXiv 2002.05202)"""
    return gated(x, SILU)


def gelu(x: torch.Tensor, tanh: bool = True) -> torch.Tensor:
    """GELU in its tanh form, as GPT-2 and Megatron's fused path have it, or exact. `[..., f] -> [..., f]`"""
    return F.gelu(x, approximate="tanh" if tanh else "none")


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2. `[..., f] -> [..., f]` (arXiv 2109.08668)"""
    return F.relu(x).square()


def dropout(
    x: torch.Tensor, p: float, seed: int, site: int, positions: torch.Tensor, sample_ids: torch.Tensor
) -> torch.Tensor:
    """Dropout whose mask is a function of (seed, sample, site, position, feature) and of nothing else.

    x: `[s, b, h]`, positions: `[s]`, sample_ids: `[b]`. The same under any layout and when recomputed; `site`
    numbers the places in the model. 24 bits decide, so p is met to 6e-8.
    """
    features = torch.arange(x.shape[-1], device=x.device)
    return _drop(x, p, _hashed(seed, site, sample_ids, positions[:, None]), features)


def jitter(
    x: torch.Tensor, eps: float, seed: int, site: int, positions: torch.Tensor, sample_ids: torch.Tensor
) -> torch.Tensor:
    """x times numbers from 1 - eps to 1 + eps, a function of what the mask of `dropout` is a function of."""
    features = torch.arange(x.shape[-1], device=x.device)
    bits = _bits(_hashed(seed, site, sample_ids, positions[:, None]), features)
    return x * (1.0 - eps + 2.0 * eps * (bits / 2**24)).to(x.dtype)


def attention_dropout(
    probs: torch.Tensor,
    p: float,
    seed: int,
    site: int,
    positions: tuple[torch.Tensor, torch.Tensor],
    sample_ids: torch.Tensor,
    heads: torch.Tensor,
) -> torch.Tensor:
    """Dropout of attention probabilities, a function of (seed, site, sample, head, query, key) alone.

    probs: `[b, n, s, t]`, positions: of the queries `[s]` and of the keys `[t]`, sample_ids: `[b]`,
    heads: `[n]`, as numbered over all ranks.
    """
    queries, keys = positions
    return _drop(probs, p, _hashed(seed, site, sample_ids[:, None, None], heads[:, None], queries), keys)


def _drop(x: torch.Tensor, p: float, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Zero a share p of x, by the counters `rows` (of x's shape without the last dim) and `columns`."""
    return x * (_bits(rows, columns) >= int(p * 2**24)).to(x.dtype) / (1.0 - p)


def _bits(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """24 random bits for each row and column."""
    return (_mix(rows[..., None] + columns) >> 20) & 0xFFFFFF


def _hashed(seed: int, site: int, *indices: torch.Tensor) -> torch.Tensor:
    """One well-mixed int64 for (seed, site) and each combination of the indices, which broadcast."""
    rows = (seed * 1_000_003 + site) * 0x9E3779B97F4A7C15 % 2**63
    for index in indices:
        rows = _mix(index + rows)
    return rows


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer on int64 tensors (products wrap; shifts are made logical by a mask)."""
    x = x * -7046029254386353131  # 0x9E3779B97F4A7C15, so that neighbours start far apart
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def adamw_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    moments: tuple[list[torch.Tensor], list[torch.Tensor]],
    step: torch.Tensor,
    lr: torch.Tensor,
    hyper: tuple[float, float, float, float],
    grad_scale: torch.Tensor,
    skip: torch.Tensor,
) -> None:
    """One AdamW step over fp32 tensors, in place, everything that changes read from the device.

    hyper: (beta1, beta2, eps, weight_decay). step: number of this update, from 1. The gradient is divided by
    `grad_scale` first (loss scale and clipping in one); where `skip` is 1 nothing changes. See `adamw_ref_`.
    """
    beta1, beta2, eps, weight_decay = hyper
    torch._fused_adamw_(
        params,
        grads,
        *moments,
        [],
        [step] * len(params),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=skip,
    )


def adamw_ref_(params, grads, moments, step, lr, hyper, grad_scale, skip) -> None:
    """`adamw_` as the paper writes it (arXiv 1711.05101), a tensor at a time: specification and oracle."""
    beta1, beta2, eps, weight_decay = hyper
    if skip:
        return
    for p, g, m, v in zip(params, grads, *moments, strict=True):
        g = g / grad_scale
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        p.mul_(1 - lr * weight_decay)
        p.sub_(lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps))


if __name__ == "__main__":
    sys.exit(report())

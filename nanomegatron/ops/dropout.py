"""Dropout and jitter whose random numbers are a function of counters, the same under any layout.

Letters in shapes: s sequence, b batch, h hidden, n heads.
"""

import torch


def dropout(
    x: torch.Tensor, p: float, seed: int, site: int, positions: torch.Tensor, sample_ids: torch.Tensor
) -> torch.Tensor:
    """Dropout whose mask is a function of (seed, sample, site, position, feature) only.

    x: `[s, b, h]`, positions: `[s]`, sample_ids: `[b]` -> `[s, b, h]`. The same under any layout and when
    recomputed. site: the number of this dropout in the model. p is exact to 6e-8, by 24 random bits.
    """
    features = torch.arange(x.shape[-1], device=x.device)
    return _drop(x, p, _hashed(seed, site, sample_ids, positions[:, None]), features)


def jitter(
    x: torch.Tensor, eps: float, seed: int, site: int, positions: torch.Tensor, sample_ids: torch.Tensor
) -> torch.Tensor:
    """Multiply x `[s, b, h]` by random numbers from 1 - eps to 1 + eps, of the same counters as `dropout`.

    positions: `[s]`, sample_ids: `[b]` -> `[s, b, h]`
    """
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
    """Dropout of attention probabilities, a function of (seed, site, sample, head, query, key).

    probs: `[b, n, s, t]`, positions: `[s]` of the queries and `[t]` of the keys, sample_ids: `[b]`, heads:
    `[n]`, their numbers over all ranks -> `[b, n, s, t]`
    """
    queries, keys = positions
    return _drop(probs, p, _hashed(seed, site, sample_ids[:, None, None], heads[:, None], queries), keys)


def _drop(x: torch.Tensor, p: float, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Zero a fraction p of x, by the counters `rows` (x's shape without the last dim) and `columns`."""
    return x * (_bits(rows, columns) >= int(p * 2**24)).to(x.dtype) / (1.0 - p)


def _bits(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """A 24-bit hash of each pair of row `[...]` and column `[n]` -> int64 `[..., n]`"""
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

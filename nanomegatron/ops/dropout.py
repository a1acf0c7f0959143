"""Dropout and jitter whose random numbers are a function of counters, the same under any layout.

Letters in shapes: s sequence, b batch, h hidden, n heads. The kernel of cuda/dropout.cu makes one pass of
bias, dropout and residual add; it has the mask of the reference to the bit, and rounds once, at the end.
"""

from dataclasses import dataclass

import torch

from nanomegatron.ops.kernels import TYPES, check_fits, launch_kernel, once, usable

PARTS = 8  # partial sums over rows per multiprocessor, in backwards, at most: as many blocks fit


@dataclass(frozen=True)
class Dropout:
    """The arguments of `dropout` besides x: positions `[s]`, sample_ids `[b]`"""

    p: float
    seed: int
    site: int
    positions: torch.Tensor
    sample_ids: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x `[s, b, h]` -> `[s, b, h]`, by plain torch"""
        return dropout(x, self.p, self.seed, self.site, self.positions, self.sample_ids)

    def check(self, x: torch.Tensor) -> None:
        """Raise ValueError unless x `[s, b, h]` fits int64 positions `[s]` and sample_ids `[b]`."""
        check_fits("positions", self.positions, x.shape[:1], torch.int64, x.device)
        check_fits("sample_ids", self.sample_ids, x.shape[1:-1], torch.int64, x.device)


def kernel_arguments(drop: Dropout | None) -> tuple[torch.Tensor | float | None, ...]:
    """What kernels need of a dropout -> positions `[s]`, sample_ids `[b]`; b, key, least bits, scale"""
    if drop is None:
        return None, None, 1, 0, 0, 1.0
    counters = drop.positions.contiguous(), drop.sample_ids.contiguous()
    key = _key(drop.seed, drop.site)
    return *counters, len(drop.sample_ids), key, int(drop.p * 2**24), 1.0 / (1.0 - drop.p)


def bias_dropout_add(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    drop: Dropout | None,
    fused: bool = True,
) -> torch.Tensor:
    """drop(x + bias) + residual, each of the three optional. fused: by the kernel, where it can.

    x, residual `[..., h]`, bias `[h]` -> `[..., h]`; with drop x is as `Dropout` says.

    Raises ValueError if shapes, types or devices do not fit.
    """
    check_branch(x, bias, residual, drop)
    one_pass = bias is not None or drop is not None  # else torch has it
    if fused and one_pass and usable(x, "bias_dropout_add"):
        return BiasDropoutAddFunction.apply(x, bias, residual, drop)
    return bias_dropout_add_ref(x, bias, residual, drop)


def apply_dropout(x: torch.Tensor, drop: Dropout | None, fused: bool = True) -> torch.Tensor:
    """drop(x), or x without one. fused: by the kernel of `bias_dropout_add`. x `[..., h]` -> `[..., h]`"""
    return bias_dropout_add(x, None, None, drop, fused)


def bias_dropout_add_ref(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, drop: Dropout | None
) -> torch.Tensor:
    """`bias_dropout_add` in plain torch, rounded after each step: specification and oracle.

    x, residual `[..., h]`, bias `[h]` -> `[..., h]`
    """
    x = x if bias is None else x + bias
    x = x if drop is None else drop(x)
    return x if residual is None else x + residual


def check_branch(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, drop: Dropout | None
) -> None:
    """Raise ValueError unless x, residual `[..., h]`, bias `[h]` and the counters of drop fit together."""
    check_fits("bias", bias, x.shape[-1:], x.dtype, x.device)
    check_fits("residual", residual, x.shape, x.dtype, x.device)
    if drop is not None:
        drop.check(x)


class BiasDropoutAddFunction(torch.autograd.Function):
    """`bias_dropout_add` by the kernel, of checked tensors."""

    @staticmethod
    def forward(ctx, x, bias, residual, drop):
        x, bias, residual = (None if t is None else t.contiguous() for t in (x, bias, residual))
        ctx.biased, ctx.drop = bias is not None, drop
        out, h = torch.empty_like(x), x.shape[-1]
        sizes = x.numel() // max(h, 1), h, TYPES[x.dtype]
        launch_kernel("bias_dropout_add", out, x, bias, residual, *sizes, *kernel_arguments(drop))
        return out

    @staticmethod
    @once
    def backward(ctx, grad):
        dx, dbias = branch_backward(grad, ctx.biased, ctx.drop)
        return dx, dbias, grad if ctx.needs_input_grad[2] else None, None


def branch_backward(
    grad: torch.Tensor, biased: bool, drop: Dropout | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of x and, if biased, of the bias, by the kernel. grad `[s, b, h]` -> `[s, b, h]`, `[h]`"""
    if drop is None and not biased:
        return grad, None
    grad, h, kind = grad.contiguous(), grad.shape[-1], TYPES[grad.dtype]
    rows, arguments = grad.numel() // max(h, 1), kernel_arguments(drop)
    dx = grad if drop is None else torch.empty_like(grad)
    if not biased:
        launch_kernel("bias_dropout_add", dx, grad, None, None, rows, h, kind, *arguments)
        return dx, None
    parts = min(rows, PARTS * torch.cuda.get_device_properties(grad.device).multi_processor_count)
    dbias, sums = grad.new_empty(h), grad.new_empty(parts, h, dtype=torch.float32)
    given = dbias, None if drop is None else dx, sums, grad, rows, h, parts, kind
    launch_kernel("bias_dropout_backward", *given, *arguments)
    return dx, dbias


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
    rows = _key(seed, site)
    for index in indices:
        rows = _mix(index + rows)
    return rows


def _key(seed: int, site: int) -> int:
    return (seed * 1_000_003 + site) * 0x9E3779B97F4A7C15 % 2**63


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer on int64 tensors (products wrap; shifts are made logical by a mask)."""
    x = x * -7046029254386353131  # 0x9E3779B97F4A7C15, so that neighbours start far apart
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)

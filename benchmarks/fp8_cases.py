"""Cases of casts to FP8, and of kernels that write FP8 themselves: norms, SwiGLU and its backward.

Casts are expected to the bit, so their error must be 0. Where torch makes bf16 first and casts that, its
results are off by up to one step of FP8, a quarter of the largest value in E5M2; ours round once.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.forms import Sizes, Way, case, forms
from benchmarks.kernel_cases import EPS
from benchmarks.session import Case
from nanomegatron.ops.fp8_cast import (
    BLOCK,
    Fp8Output,
    fp8_amax,
    fp8_cast,
    fp8_cast_blocks,
    fp8_cast_blocks_ref,
    fp8_cast_ref,
)
from nanomegatron.ops.fp8_fused import gated_backward_fp8, gated_fp8, norm_fp8
from nanomegatron.ops.swiglu import SILU, gated_ref

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def casts(s: Sizes) -> Iterator[Case]:
    """Bytes a value: amax 2, cast 3, with the transposed copy 4; block scales 4 / 128 more a copy."""
    for k in (s.hidden, s.ffn):
        values, x = s.tokens * k, s.normal(s.tokens, k)
        yield case(f"fp8 amax {k}", 2 * values, (x,), forms(ours_amax, largest), largest)
        inputs = x, lambda: torch.full((1,), 100.0, device=s.device)  # the largest are cut off
        ways, exact = forms(ours_cast("rowwise"), cast), lambda *x: exact_cast(*x)[::2]
        yield case(f"fp8 cast {k}", 3 * values, inputs, ways, exact, gate={"share": 0.85})
        ways, gate = forms(ours_cast("both"), cast_both), {"share": 0.75}
        yield case(f"fp8 cast+transpose {k}", 4 * values, inputs, ways, exact_cast, gate=gate)
    values, x = s.tokens * s.hidden, s.normal(s.tokens, s.hidden)
    scales = 4 * values // BLOCK
    for name, moved, squares, outputs, plain in (
        ("1x128", 3 * values + scales, False, "rowwise", lambda x: blocks(x, 1)),
        (
            "1x128 both",
            4 * values + 2 * scales,
            False,
            "both",
            lambda x: (*blocks(x, 1), *blocks(x.t().contiguous(), 1)),
        ),
        ("128x128 both", 4 * values, True, "both", squares_both),
    ):
        exact = exact_blocks(squares, outputs)
        yield case(f"fp8 blocks {name}", moved, (x,), forms(ours_blocks(squares, outputs), plain), exact)


def largest(x):
    return x.abs().amax().float()


def cast(x, scale, dtype=E4M3):
    """Row-major, and the amax."""
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype), largest(x)


def cast_both(x, scale, dtype=E4M3):
    """Row-major, transposed, and the amax."""
    q, amax = cast(x, scale, dtype)
    return q, q.t().contiguous(), amax


def blocks(x, high):
    """Of blocks high x 128, each with the scale of its own amax: values, and inverses of the scales."""
    (m, k), limit = x.shape, torch.finfo(E4M3).max
    parts = x.view(m // high, high, k // BLOCK, BLOCK)
    amax = parts.abs().amax(dim=(1, 3), keepdim=True).float()
    scale = torch.full_like(amax, limit) / amax  # a number over a tensor is rounded twice
    q = (parts.float() * scale).clamp(-limit, limit).to(E4M3).view(m, k)
    return q, (1.0 / scale)[:, 0, :, 0]


def squares_both(x):
    """128 x 128, which the transposed copy shares."""
    q, inverse = blocks(x, BLOCK)
    return q, inverse, q.t().contiguous(), inverse.t()


def exact_cast(x, scale):
    """The reference, which rounds once."""
    q = fp8_cast_ref(x, scale, E4M3)
    return q, q.t(), largest(x)


def exact_blocks(squares: bool, outputs: str) -> Callable:
    """The reference, of x and, for both, of its transpose."""
    sources = (lambda x: x, lambda x: x.t())[: 2 if outputs == "both" else 1]
    return lambda x: tuple(t for f in sources for t in fp8_cast_blocks_ref(f(x), E4M3, squares))


def ours_amax(x):
    amax = torch.zeros(1, device=x.device)

    def run():
        fp8_amax(x, amax)
        return amax[0]

    return run


def ours_cast(outputs: str) -> Way:
    """By one kernel, the amax too."""

    def way(x, scale):
        amax = torch.zeros(1, device=x.device)

        def run():
            results = fp8_cast(x, scale, E4M3, amax, outputs)
            return *(q for q in results if q is not None), amax[0]

        return run

    return way


def ours_blocks(squares: bool, outputs: str) -> Way:
    """By one kernel."""

    def run(x):
        pairs = fp8_cast_blocks(x, E4M3, squares, outputs)
        return tuple(t for pair in pairs if pair is not None for t in pair)

    return lambda x: lambda: run(x)


def fused_casts(s: Sizes) -> Iterator[Case]:
    """Bytes a value: the norm with its sum 8, SwiGLU 6 of the result, its backward 10 of the result."""
    t, h, f = s.tokens, s.hidden, s.ffn
    weight = lambda: 1 + s.normal(h, scale=0.1)()  # noqa: E731
    for name, moved, ours, plain, inputs in (
        ("add+rmsnorm to fp8", 8 * t * h, ours_norm, normed, (s.normal(t, h), s.normal(t, h), weight)),
        ("swiglu to fp8 fwd", 6 * t * f, ours_gated, gated, (s.normal(t, 2 * f),)),
        (
            "swiglu to fp8 bwd",
            10 * t * f,
            ours_gated_grad,
            gated_grad,
            (s.normal(t, f, scale=0.1), s.normal(t, 2 * f)),
        ),
    ):
        exact = lambda *x, plain=plain: plain(*(each.float() for each in x))  # noqa: E731  rounded once
        yield case(name, moved, inputs, forms(ours, plain), exact)


def normed(x, residual, weight):
    """RMSNorm of the sum, cast, and the sum."""
    total = x + residual
    return *cast_both(F.rms_norm(total, weight.shape, weight, EPS), 50.0), total


def gated(x):
    return cast_both(gated_ref(x, SILU), 20.0)


def gated_grad(grad, x):
    gate, up = x.chunk(2, dim=-1)
    s = torch.sigmoid(gate.float())
    dgate, dup = grad * up * (s + gate * s * (1 - s)), grad * gate * s
    return cast_both(torch.cat((dgate, dup), dim=-1).to(x.dtype), 1000.0, E5M2)


def output(x: torch.Tensor, dtype: torch.dtype, scale: float) -> Fp8Output:
    """Both copies and the amax."""
    numbers = torch.tensor([scale, 0.0], device=x.device)
    return Fp8Output(dtype, numbers[0], numbers[1], "both")


def ours_norm(x, residual, weight):
    into = output(x, E4M3, 50.0)

    def run():
        made = norm_fp8(x, residual, weight, None, EPS, False, into)
        return made.rowwise, made.columnwise, into.amax, made.total

    return run


def ours_gated(x):
    into = output(x, E4M3, 20.0)
    return lambda: (*gated_fp8(x, SILU, into), into.amax)


def ours_gated_grad(grad, x):
    into = output(x, E5M2, 1000.0)
    return lambda: (*gated_backward_fp8(grad, x, SILU, into), into.amax)

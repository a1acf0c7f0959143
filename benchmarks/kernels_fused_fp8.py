"""Cases of what is made in E4M3 or E5M2 at once, both layouts: norms, SwiGLU, its backward.

The others make it in bf16 and cast that: results of theirs are off by up to one step of FP8, a quarter of the
largest value in E5M2. Ours round once.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.kernels_common import Case, Sizes, case, compiled, forward
from nanomegatron.ops.fp8_cast import Fp8Output
from nanomegatron.ops.fp8_fused import gated_backward_fp8, gated_fp8, norm_fp8
from nanomegatron.ops.swiglu import SILU, gated_ref

E4M3, E5M2, EPS = torch.float8_e4m3fn, torch.float8_e5m2, 1e-5


def wanted(x: torch.Tensor, dtype: torch.dtype, scale: float) -> Fp8Output:
    """Both copies and the amax."""
    numbers = torch.tensor([scale, 0.0], device=x.device)
    return Fp8Output(dtype, numbers[0], numbers[1], "both")


def cast(y: torch.Tensor, dtype: torch.dtype, scale: float) -> tuple[torch.Tensor, ...]:
    """Row-major, transposed, and the amax."""
    limit = torch.finfo(dtype).max
    q = (y.float() * scale).clamp(-limit, limit).to(dtype)
    return q, q.t().contiguous(), y.abs().amax().float()


def normed(x, residual, weight):
    """RMSNorm of the sum, cast, and the sum."""
    total = x + residual
    return *cast(F.rms_norm(total, weight.shape, weight, EPS), E4M3, 50.0), total


def gated(x):
    """SwiGLU, cast."""
    return cast(gated_ref(x, SILU), E4M3, 20.0)


def gated_grad(grad, x):
    """Its gradient, cast."""
    gate, up = x.chunk(2, dim=-1)
    s = torch.sigmoid(gate.float())
    dgate, dup = grad * up * (s + gate * s * (1 - s)), grad * gate * s
    return cast(torch.cat((dgate, dup), dim=-1).to(x.dtype), E5M2, 1000.0)


def ours_norm(x, residual, weight):
    into = wanted(x, E4M3, 50.0)

    def run():
        made = norm_fp8(x, residual, weight, None, EPS, False, into)
        return made.rowwise, made.columnwise, into.amax, made.total

    return run


def ours_gated(x):
    into = wanted(x, E4M3, 20.0)
    return lambda: (*gated_fp8(x, SILU, into), into.amax)


def ours_gated_grad(grad, x):
    into = wanted(x, E5M2, 1000.0)
    return lambda: (*gated_backward_fp8(grad, x, SILU, into), into.amax)


def wide(way: Callable) -> Callable:
    """The results of a way in fp32 arithmetic, rounded once."""
    return lambda *inputs: way(*(x.float() for x in inputs))


def fused_casts(sizes: Sizes) -> Iterator[Case]:
    """Bytes a value: the norm with its sum 8, SwiGLU 6 of the result, its backward 10 of the result."""
    s, h, f = sizes.tokens, sizes.hidden, sizes.ffn

    def ways(ours: Callable, theirs: Callable) -> dict:
        return {"kernel": ours, "torch": forward(theirs), "compile": forward(compiled(theirs))}

    def of_norm():
        return sizes.normal(s, h), sizes.normal(s, h), 1 + 0.1 * sizes.normal(h)

    yield case("add+rmsnorm to fp8", 8 * s * h, of_norm, ways(ours_norm, normed), wide(normed))

    def of_unit():
        return (sizes.normal(s, 2 * f),)

    yield case("swiglu to fp8 fwd", 6 * s * f, of_unit, ways(ours_gated, gated), wide(gated))

    def of_grad():
        return 0.1 * sizes.normal(s, f), sizes.normal(s, 2 * f)

    yield case("swiglu to fp8 bwd", 10 * s * f, of_grad, ways(ours_gated_grad, gated_grad), wide(gated_grad))

"""Cases of casts to FP8, and of kernels that write FP8: norms, SwiGLU and its backward, that of the loss.

Casts are expected to the bit, so their error must be 0. Where torch makes bf16 first and casts that, its
results are off by up to one step of FP8, a quarter of the largest value in E5M2; ours round once. An input
`amax`, or n[1], starts as zero and then holds the largest |x|.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.forms import Sizes, case, forms, forward
from benchmarks.kernel_cases import EPS
from benchmarks.session import Case
from nanomegatron.ops.cross_entropy import cross_entropy_grad_ref
from nanomegatron.ops.fp8_cast import BLOCK, Fp8Output, fp8_amax, fp8_cast, fp8_cast_blocks, fp8_cast_ref
from nanomegatron.ops.fp8_fused import cross_entropy_grad_fp8, gated_backward_fp8, gated_fp8, norm_fp8
from nanomegatron.ops.swiglu import SILU, gated_ref

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def casts(s: Sizes) -> Iterator[Case]:
    """Bytes a value: amax 2, cast 3, with the transposed copy 4; block scales 4 / 128 more a copy."""
    amax, scale = lambda: torch.zeros((), device=s.device), lambda: torch.full((1,), 100.0, device=s.device)
    for k in (s.hidden, s.ffn):
        values, x = s.tokens * k, s.normal(s.tokens, k)
        ways = forms(forward(lambda x, amax: (fp8_amax(x, amax), amax)[1]), lambda x, _: largest(x))
        yield case(f"fp8 amax {k}", 2 * values, (x, amax), ways)
        inputs = x, scale, amax  # the largest values are cut off
        ways = forms(forward(ours_cast), cast)
        yield case(f"fp8 cast {k}", 3 * values, inputs, ways, cast)
        ways = forms(forward(lambda *x: ours_cast(*x, outputs="both")), cast_both)
        yield case(f"fp8 cast+transpose {k}", 4 * values, inputs, ways, cast_both)
    values, x = s.tokens * s.hidden, s.normal(s.tokens, s.hidden)
    scales = 4 * values // BLOCK
    for name, moved, given, plain in (
        ("1x128", 3 * values + scales, (False, "rowwise"), lambda x: blocks(x, 1)),
        ("1x128 both", 4 * values + 2 * scales, (False, "both"), rows_both),
        ("128x128 both", 4 * values, (True, "both"), squares_both),
    ):
        yield case(f"fp8 blocks {name}", moved, (x,), forms(forward(ours_blocks(*given)), plain), plain)


def largest(x):
    return x.abs().amax().float()


def cast(x, scale, amax=None, dtype=E4M3):
    """Row-major, rounded once, and the amax."""
    return fp8_cast_ref(x, scale, dtype), largest(x)


def cast_both(x, scale, amax=None, dtype=E4M3):
    """Row-major, transposed, and the amax."""
    q = fp8_cast_ref(x, scale, dtype)
    return q, q.t().contiguous(), largest(x)


def ours_cast(x, scale, amax, outputs="rowwise"):
    """By one kernel, the amax too."""
    return *(q for q in fp8_cast(x, scale, E4M3, amax, outputs) if q is not None), amax


def blocks(x, high):
    """Of blocks high x 128, each with the scale of its own amax: values, and inverses of the scales."""
    parts = x.view(len(x) // high, high, -1, BLOCK)
    amax = parts.abs().amax(dim=(1, 3), keepdim=True).float()
    scale = torch.full_like(amax, torch.finfo(E4M3).max) / amax  # a number over a tensor is rounded twice
    return fp8_cast_ref(parts, scale, E4M3).view(x.shape), (1.0 / scale)[:, 0, :, 0]


def rows_both(x):
    """1 x 128 along the rows, and along the columns, transposed."""
    return *blocks(x, 1), *blocks(x.t().contiguous(), 1)


def squares_both(x):
    """128 x 128, which the transposed copy shares."""
    q, scale_inv = blocks(x, BLOCK)
    return q, scale_inv, q.t().contiguous(), scale_inv.t()


def ours_blocks(squares: bool, outputs: str) -> Callable:
    """By one kernel."""
    return lambda x: tuple(t for pair in fp8_cast_blocks(x, E4M3, squares, outputs) if pair for t in pair)


def fused_casts(s: Sizes) -> Iterator[Case]:
    """Bytes a value: the norm with its sum 8, SwiGLU 6 of the result, its backward 10 of the result."""
    t, h, f = s.tokens, s.hidden, s.ffn
    x, unit, grad = s.normal(t, h), s.normal(t, 2 * f), s.normal(t, f, scale=0.1)
    weight = lambda: 1 + s.normal(h, scale=0.1)()  # noqa: E731

    into = lambda scale: lambda: torch.tensor([scale, 0.0], device=s.device)  # noqa: E731
    for name, moved, ours, plain, inputs in (
        ("add+rmsnorm to fp8", 8 * t * h, ours_norm, normed, (into(50.0), x, x, weight)),
        ("swiglu to fp8 fwd", 6 * t * f, ours_gated, gated, (into(20.0), unit)),
        ("swiglu to fp8 bwd", 10 * t * f, ours_gated_grad, gated_grad, (into(1000.0), grad, unit)),
    ):
        exact = lambda n, *x, plain=plain: plain(n, *(each.float() for each in x))  # noqa: E731
        yield case(name, moved, inputs, forms(forward(ours), plain), exact)
    labels, lse = lambda: torch.randint(s.vocab, (t,), device=s.device), lambda: 12 + s.normal(t)().float()
    inputs, ways = (into(1000.0), s.normal(t, s.vocab), labels, lse), forms(forward(ours_loss), loss_grad)
    yield case("cross entropy bwd to fp8", 4 * t * s.vocab, inputs, ways, loss_grad)


def normed(n, x, residual, weight):
    """RMSNorm of the sum, cast, and the sum."""
    total = x + residual
    return *cast_both(F.rms_norm(total, weight.shape, weight, EPS), n[0]), total


def gated(n, x):
    return cast_both(gated_ref(x, SILU), n[0])


def gated_grad(n, grad, x):
    gate, up = x.chunk(2, dim=-1)
    s = torch.sigmoid(gate.float())
    dgate, dup = grad * up * (s + gate * s * (1 - s)), grad * gate * s
    return cast_both(torch.cat((dgate, dup), dim=-1).to(x.dtype), n[0], dtype=E5M2)


def loss_grad(n, logits, labels, lse):
    return cast_both(cross_entropy_grad_ref(logits, labels, lse, torch.ones_like(lse)), n[0], dtype=E5M2)


def ours_loss(n, logits, labels, lse):
    """The log-sum-exp is that of a pass before."""
    given = logits, labels, lse, torch.ones_like(lse), logits.shape[1]
    return *cross_entropy_grad_fp8(*given, Fp8Output(E5M2, *n, "both")), n[1]


def ours_norm(n, x, residual, weight):
    made = norm_fp8(x, residual, weight, None, EPS, False, Fp8Output(E4M3, *n, "both"))
    return made.rowwise, made.columnwise, n[1], made.total


def ours_gated(n, x):
    return *gated_fp8(x, SILU, Fp8Output(E4M3, *n, "both")), n[1]


def ours_gated_grad(n, grad, x):
    return *gated_backward_fp8(grad, x, SILU, Fp8Output(E5M2, *n, "both")), n[1]

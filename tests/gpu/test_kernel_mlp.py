"""The gated unit's kernel against float64, and what a kernel must not do."""

import pytest
import torch

from nanomegatron.ops.kernels import kernels_unavailable
from nanomegatron.ops.swiglu import GELU, SILU, GatedFunction, gated_ref

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}  # rounding of the result
FACTORS = 2e-6  # of the product without the activation: near its zeros only that can be met


def run(function, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = function(x)
    y.backward(grad)
    return y.detach(), x.grad


def check(x: torch.Tensor, act: int) -> None:
    grad = torch.randn(*x.shape[:-1], x.shape[-1] // 2, device=GPU).to(x.dtype)
    ours = run(lambda x: GatedFunction.apply(x, act), x, grad)
    theirs = run(lambda x: gated_ref(x, act), x.double(), grad.double())
    gate, up = x.double().chunk(2, dim=-1)
    factors = gate * up, torch.cat((grad * up, grad * gate), dim=-1)
    for found, expected, factor in zip(ours, theirs, factors, strict=True):
        finite = expected.isfinite() & (expected.abs() < torch.finfo(x.dtype).max)
        assert torch.equal(found.isnan(), expected.to(x.dtype).isnan())
        error = (found.double() - expected)[finite].abs()
        limit = TOLERANCE[x.dtype] * expected.abs() + FACTORS * factor.abs() + torch.finfo(x.dtype).tiny
        assert (error <= limit[finite]).all(), (error / limit[finite]).max()
    again = run(lambda x: GatedFunction.apply(x, act), x, grad)
    for a, b in zip(ours, again, strict=True):  # the same bits every time
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_the_kernels_are_there():
    assert kernels_unavailable(torch.device("cuda", torch.cuda.current_device())) == ""


@pytest.mark.parametrize("act", [SILU, GELU])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape", [(8, 3, 64), (5, 2 * 13), (1, 2), (0, 16), (3, 0), (1000, 2 * 14336), (70001, 16)]
)
def test_against_float64(shape, dtype, act):
    check(torch.randn(shape, device=GPU).to(dtype) * 3, act)


@pytest.mark.parametrize("act", [SILU, GELU])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_strange_numbers(dtype, act):
    """Huge and tiny ones, and none that is a number, where and only where torch has none."""
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    values = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 88.0, -88.0, 1e4, -1e4, largest, -largest, tiny, float("nan")]
    )
    gate, up = torch.meshgrid(values, values.clamp(-1e2, 1e2), indexing="ij")
    check(torch.cat((gate.flatten()[None], up.flatten()[None]), -1).to(GPU, dtype), act)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_not_aligned(dtype):
    check(torch.randn(7 * 64 + 1, device=GPU).to(dtype)[1:].view(7, 64), SILU)


def test_nothing_is_written_beside():
    space = torch.full((3, 4, 32), 7.0, device=GPU)
    x = torch.randn(4, 64, device=GPU)
    torch.cuda.synchronize()
    from nanomegatron.ops.kernels import TYPES, launch_kernel

    launch_kernel("swiglu_forward", space[1], x, 4, 32, SILU, TYPES[x.dtype])
    assert (space[0] == 7).all() and (space[2] == 7).all()
    torch.testing.assert_close(space[1], gated_ref(x, SILU))


def test_more_than_two_to_the_31_elements():
    x = torch.randn(2**17 + 3, 2 * 8192, device=GPU, dtype=torch.bfloat16)
    y = GatedFunction.apply(x, SILU)
    for rows in (slice(0, 4), slice(2**17 - 1, None)):
        torch.testing.assert_close(y[rows], gated_ref(x[rows].float(), SILU).bfloat16(), rtol=1e-2, atol=1e-2)

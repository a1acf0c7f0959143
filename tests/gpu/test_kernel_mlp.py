"""The kernels of an MLP's activations against float64, and what a kernel must not do."""

import pytest
import torch

from nanomegatron.ops.bias import column_sums
from nanomegatron.ops.gelu import EXACT, SQUARED_RELU, TANH, BiasActFunction, bias_act_ref
from nanomegatron.ops.kernels import TYPES, kernels_unavailable, launch_kernel
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
    launch_kernel("swiglu_forward", space[1], x, 4, 32, SILU, TYPES[x.dtype])
    assert (space[0] == 7).all() and (space[2] == 7).all()
    torch.testing.assert_close(space[1], gated_ref(x, SILU))


def test_more_than_two_to_the_31_elements():
    x = torch.randn(2**17 + 3, 2 * 8192, device=GPU, dtype=torch.bfloat16)
    y = GatedFunction.apply(x, SILU)
    for rows in (slice(0, 4), slice(2**17 - 1, None)):
        torch.testing.assert_close(y[rows], gated_ref(x[rows].float(), SILU).bfloat16(), rtol=1e-2, atol=1e-2)


ACTS = TANH, EXACT, SQUARED_RELU
SHAPES = [(8, 3, 64), (5, 13), (1, 1), (0, 16), (3, 0), (1000, 3072), (70001, 16), (4097, 1032), (333, 2309)]


def biased(function, x: torch.Tensor, bias: torch.Tensor | None, grad: torch.Tensor) -> list[torch.Tensor]:
    """The result, the gradient of x and, with a bias, its gradient, fp32 or wider, over what was there."""
    x, given = x.detach().requires_grad_(), []
    bias = None if bias is None else bias.detach().requires_grad_()

    def accumulate(bias, write):
        given.append(torch.full_like(bias, torch.nan, dtype=torch.promote_types(bias.dtype, torch.float32)))
        write(given[0], 0)

    y = function(x, bias, accumulate)
    y.backward(grad)
    return [y.detach(), x.grad, *given]


def check_biased(x: torch.Tensor, bias: torch.Tensor | None, act: int) -> None:
    """Errors of the sums are relative to the sums of absolute values."""
    grad = torch.randn(x.shape, device=GPU).to(x.dtype)
    kernel = lambda x, bias, accumulate: BiasActFunction.apply(x, bias, act, accumulate)  # noqa: E731
    ours = biased(kernel, x, bias, grad)
    wide = [None if t is None else t.double() for t in (x, bias, grad)]
    theirs = biased(lambda *given: bias_act_ref(*given, act=act), *wide)
    at = wide[0] if bias is None else wide[0] + wide[1]
    factor = at * at if act == SQUARED_RELU else at
    factors = [factor.abs(), (grad * (2 * at if act == SQUARED_RELU else 1)).abs()]
    rounding = [TOLERANCE[x.dtype]] * 2
    if bias is not None:
        assert ours[2].dtype == torch.float32
        factors.append((theirs[1].abs() + factors[1]).sum_to_size(bias.shape))
        rounding.append(TOLERANCE[torch.float32])
    for found, expected, factor, step in zip(ours, theirs, factors, rounding, strict=True):
        most = torch.finfo(found.dtype).max
        finite = expected.isfinite() & (expected.abs() < most) & (factor < most)  # also what is added
        known = expected.isnan() | ~(factor >= most)  # sums of overflows of both signs are NaN
        assert torch.equal(found.isnan() & known, expected.isnan())
        error = (found.double() - expected)[finite].abs()
        limit = step * expected.abs() + FACTORS * factor + torch.finfo(x.dtype).tiny
        assert (error <= limit[finite]).all(), (error / limit[finite]).max()
    for a, b in zip(ours, biased(kernel, x, bias, grad), strict=True):  # the same bits every time
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_bias_and_activation(shape, dtype, act):
    for bias in (None, torch.randn(shape[-1:], device=GPU).to(dtype)):
        check_biased(torch.randn(shape, device=GPU).to(dtype) * 3, bias, act)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_strange_numbers_and_a_bias(dtype, act):
    """A column each, so that a bias's gradient is NaN where, and only where, its column has one."""
    largest, tiny, inf = torch.finfo(dtype).max, torch.finfo(dtype).tiny, float("inf")
    values = [0.0, -0.0, 1.0, -1.0, 5.0, -5.0, 9.0, -9.0, 13.0, -13.0, 88.0, -88.0, 1e4, -1e4]
    values = torch.tensor([*values, largest, -largest, tiny, inf, -inf, float("nan")])
    for repeat in (1, 2):  # by single elements, by packs
        x = values.repeat(3, repeat).to(GPU, dtype)
        check_biased(x, torch.zeros_like(x[0]), act)
        check_biased(x, None, act)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bias_and_activation_not_aligned(dtype):
    x = torch.randn(7 * 64 + 1, device=GPU).to(dtype)[1:].view(7, 64)
    for bias in (None, torch.randn(64, device=GPU).to(dtype), torch.randn(65, device=GPU).to(dtype)[1:]):
        check_biased(x, bias, TANH)
    check_biased(x.clone(), torch.randn(65, device=GPU).to(dtype)[1:], TANH)


def sums(x: torch.Tensor) -> torch.Tensor:
    """New sums in fp32, over what is no number."""
    return column_sums(x, torch.full(x.shape[-1:], torch.nan, device=GPU))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_column_sums(shape, dtype):
    """New ones in fp32; or added to what is there, in fp32 and in 16 bits, which rounds them once more."""
    x = torch.randn(shape, device=GPU).to(dtype)
    exact, limit = x.double().sum_to_size(shape[-1:]), x.double().abs().sum_to_size(shape[-1:]) * 2e-6
    found = sums(x)
    assert ((found - exact).abs() <= limit).all()
    assert torch.equal(found, sums(x))
    for kind in (torch.float32, dtype):
        before = torch.randn(shape[-1:], device=GPU).to(kind)
        target = before.clone()
        assert column_sums(x, target, 1) is target
        right = exact + before.double()
        assert ((target.double() - right).abs() <= limit + TOLERANCE[kind] * right.abs() + 1e-6).all()


def test_column_sums_of_any_strides():
    x = torch.randn(31, 5, 64, device=GPU)
    for view in (x[:, :, 1:9], x.transpose(0, 2), x.new_ones(()).expand(9, 7), x.flatten()[2:].view(-1, 3)):
        torch.testing.assert_close(sums(view), view.sum_to_size(view.shape[-1:]), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("f", [64, 37])
def test_bias_and_activation_write_nothing_beside(f):
    space = torch.full((7, 4, f), 7.0, device=GPU)
    x, grad, bias = (torch.randn(n, f, device=GPU) for n in (4, 4, 1))
    parts, dbias = space[5, :1], space[5, 3]
    launch_kernel("gelu_forward", space[1], x, bias, 4, f, TANH, TYPES[x.dtype])
    how = 4, f, 1, 1, TANH, TYPES[x.dtype], TYPES[x.dtype]
    launch_kernel("gelu_backward", space[3], dbias, parts, grad, x, bias, *how)
    assert (space[::2] == 7).all() and (space[5, 1:3] == 7).all()
    y, dx, sums = biased(lambda *given: bias_act_ref(*given, act=TANH), x, bias[0], grad)
    for ours, right in (space[1], y), (space[3], dx), (dbias, sums + 7):
        torch.testing.assert_close(ours, right)

"""The norms' reference against their definition, and what they refuse."""

import pytest
import torch

from nanomegatron.ops.norm import add_norm, norm, norm_backward

EPS = 1e-5


def defined(x, weight, bias, from_one):
    """The formulas, in the type of x."""
    if bias is None:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight + from_one)
    off = x - x.mean(-1, keepdim=True)
    return off / (off.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight + from_one) + bias


def inputs(dtype, biased, shape=(3, 2, 24)):
    x, residual = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(2))
    weight = torch.randn(shape[-1], dtype=dtype, requires_grad=True)
    bias = torch.randn(shape[-1], dtype=dtype, requires_grad=True) if biased else None
    return x, residual, weight, bias


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("from_one", [False, True])
def test_reference_is_the_definition(biased, from_one):
    x, residual, weight, bias = inputs(torch.float64, biased)
    torch.testing.assert_close(norm(x, weight, bias, EPS, from_one), defined(x, weight, bias, from_one))
    y, total = add_norm(x, residual, weight, bias, EPS, from_one)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(y, defined(x + residual, weight, bias, from_one))


@pytest.mark.parametrize("biased", [False, True])
def test_backward_as_the_kernel_has_it(biased):
    """dx, dw and db of norm_backward.cu, written with whole tensors."""
    x, residual, weight, bias = inputs(torch.float64, biased)
    y, total = add_norm(x, residual, weight, bias, EPS, True)
    dy, dtotal = torch.randn_like(y), torch.randn_like(y)
    torch.autograd.backward([y, total], [dy, dtotal])
    v = total.detach()
    mean = v.mean(-1, keepdim=True) if biased else 0.0
    rstd = ((v - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    n, g = (v - mean) * rstd, dy * (weight.detach() + 1)
    dx = g - n * (g * n).mean(-1, keepdim=True) - (g.mean(-1, keepdim=True) if biased else 0.0)
    torch.testing.assert_close(x.grad, rstd * dx + dtotal)
    torch.testing.assert_close(residual.grad, x.grad)
    torch.testing.assert_close(weight.grad, (dy * n).sum((0, 1)))
    if biased:
        torch.testing.assert_close(bias.grad, dy.sum((0, 1)))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("from_one", [False, True])
def test_backward_of_a_norm_made_elsewhere(from_one, biased):
    """From what such a forward keeps; with the gradient of the sum beside the norm, without, and it alone."""
    x, _, weight, bias = inputs(torch.float64, biased)
    leaves = [t for t in (x, weight, bias) if t is not None]
    dy, dtotal = torch.randn_like(x), torch.randn_like(x)
    expected = torch.autograd.grad(defined(x, weight, bias, from_one), leaves, dy)
    kept = (x, weight, bias, None, None)  # rstd and mean are for the kernel
    for beside in None, dtotal:
        found = [g for g in norm_backward(dy, beside, kept, EPS, from_one) if g is not None]
        total = expected[0] if beside is None else expected[0] + beside
        torch.testing.assert_close(found, [total, *expected[1:]])
    assert norm_backward(None, dtotal, kept, EPS, from_one) == (dtotal, None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_and_one_are_fp32(dtype):
    """Values whose squares would overflow or vanish in 16 bits, and a weight that 1 + w would round away."""
    weight = torch.full((64,), 2.0**-12)
    for size in (1e3, 1e-4):
        x = (torch.randn(5, 64) * size).to(dtype)
        wide = defined(x.double(), weight.double(), None, 1)
        torch.testing.assert_close(norm(x, weight, None, EPS, True), wide.to(dtype), rtol=2**-7, atol=1e-6)
    one = norm(torch.ones(1, 64), weight, None, 0.0, True)
    torch.testing.assert_close(one, torch.full_like(one, 1 + 2.0**-12), rtol=1e-7, atol=0)
    eps = torch.finfo(dtype).eps
    x, weight = torch.randn(500, 64).to(dtype), torch.full((64,), 0.375 * eps, dtype=dtype)
    share = norm(x, weight, None, EPS, True).double() / defined(x.double(), weight.double(), None, 1)
    assert abs(share.mean() - 1) < eps / 32, "1 + w, rounded to 16 bits, is 1"


def test_empty_and_one_column():
    y = norm(torch.zeros(0, 8), torch.ones(8), None, EPS)
    assert y.shape == (0, 8)
    y = norm(torch.tensor([[3.0]]), torch.tensor([2.0]), torch.tensor([5.0]), EPS)
    assert y.item() == 5


def test_what_does_not_fit_is_refused():
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    for bad, words in [
        ((x.long(), weight, None), "needs that type or fp32"),
        ((x.bfloat16(), weight.half(), None), "needs that type or fp32"),
        ((x, weight[:4], None), r"weight .* must be torch.float32 \[8\]"),
        ((x, weight[None], None), r"weight torch.float32 \[1, 8\]"),
        ((x, weight, weight[:4]), r"bias torch.float32 \[4\]"),
        ((x, weight, weight.half()), "bias torch.float16"),
        ((x, weight.to("meta"), None), "weight .* on meta"),
    ]:
        with pytest.raises(ValueError, match=words):
            norm(*bad, EPS)
    for residual in (x[:1], x.half()):
        with pytest.raises(ValueError, match="residual torch"):
            add_norm(x, residual, weight, None, EPS)

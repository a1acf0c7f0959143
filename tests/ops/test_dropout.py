"""Bias, dropout and residual add in one op: its reference against float64, and what it refuses."""

from dataclasses import replace

import pytest
import torch

from nanomegatron.ops import dropout as ops
from nanomegatron.ops.norm import add_norm, norm_ref

DROP = ops.Dropout(0.3, 1, 2, torch.arange(3, 8), torch.tensor([4, 9]))
SHAPE = 5, 2, 24


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("drop", [None, DROP], ids=["kept", "dropped"])
@pytest.mark.parametrize("biased", [False, True])
def test_the_reference_is_the_definition(biased, drop, added):
    """Values and gradients; the mask is `dropout`'s."""
    x, residual = (torch.randn(SHAPE, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = torch.randn(SHAPE[-1], dtype=torch.float64, requires_grad=True)
    factor = torch.ones(SHAPE, dtype=torch.float64)
    if drop is not None:
        factor = ops.dropout(factor, 0.3, 1, 2, torch.arange(3, 8), torch.tensor([4, 9]))
        assert set(factor.unique().tolist()) == {0.0, 1 / 0.7}
    given = x, bias if biased else None, residual if added else None
    out = ops.bias_dropout_add(*given, drop)
    torch.testing.assert_close(out, factor * (x + biased * bias) + added * residual)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, [t for t in given if t is not None], grad)
    wanted = grad * factor, *[(grad * factor).sum((0, 1))] * biased, *[grad] * added
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_before_a_norm_it_is_step_by_step(dtype):
    """Rounded after the bias, after dropout and after the sum, as separate ops round."""
    x, residual = (torch.randn(SHAPE).to(dtype) for _ in range(2))
    bias, weight = (torch.randn(SHAPE[-1]).to(dtype) for _ in range(2))
    total = DROP(x + bias) + residual
    y, found = add_norm(x, residual, weight, bias, 1e-5, False, bias, DROP)
    assert torch.equal(found, total) and torch.equal(y, norm_ref(total, weight, bias, 1e-5))


def test_kernels_get_the_counters_of_the_mask():
    """What cuda/dropout.cuh makes of them, in Python's integers."""
    positions, samples, batch, key, least, scale = ops.kernel_arguments(replace(DROP, seed=2**61))
    kept = ops.dropout(torch.ones(SHAPE), 0.3, 2**61, 2, positions, samples) > 0
    whole = 2**64 - 1

    def mix(i):
        i = i * 0x9E3779B97F4A7C15 & whole
        i = (i ^ i >> 30) * 0xBF58476D1CE4E5B9 & whole
        i = (i ^ i >> 27) * 0x94D049BB133111EB & whole
        return i ^ i >> 31

    for row in range(10):
        position, sample = positions[row // batch].item(), samples[row % batch].item()
        row_hash = mix(position + mix(sample + key & whole) & whole)
        bits = [mix(row_hash + c & whole) >> 20 & 0xFFFFFF for c in range(24)]
        assert [b >= least for b in bits] == kept.view(10, 24)[row].tolist()
    assert scale == 1 / 0.7 and ops.kernel_arguments(None)[0] is None


def test_what_does_not_fit_is_refused():
    x, bias = torch.zeros(SHAPE), torch.zeros(SHAPE[-1])
    for given, words in [
        ((x, bias[:4], None, None), r"bias torch.float32 \[4\]"),
        ((x, bias.half(), None, None), "bias torch.float16"),
        ((x, None, x[:1], None), "residual torch.float32"),
        ((x, None, x.to("meta"), None), "residual .* on meta: must be"),
        ((x[:2], None, None, DROP), r"positions .* must be torch.int64 \[2\]"),
        ((x.flatten(0, 1), None, None, DROP), r"positions .* must be torch.int64 \[10\]"),
        ((x, None, None, replace(DROP, positions=DROP.positions.int())), "positions torch.int32"),
    ]:
        with pytest.raises(ValueError, match=words):
            ops.bias_dropout_add(*given)
    with pytest.raises(ValueError, match="bias torch.float32"):
        add_norm(x, x, bias, None, 1e-5, False, bias[:4])

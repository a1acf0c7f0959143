"""The cross entropy kernels against float64: every shape, alignment and kind of number."""

import pytest
import torch

from nanomegatron.ops.cross_entropy import (
    cross_entropy_grad_,
    cross_entropy_grad_ref,
    cross_entropy_stats,
    cross_entropy_stats_ref,
)
from nanomegatron.ops.kernels import TYPES, launch_kernel

CUDA = torch.device("cuda", 0)
EPS = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-10}
DTYPES = list(EPS)
# tokens, columns, of them padding, and elements before the first: what is not aligned to 16 bytes
SHAPES = [
    (4, 128256, 0, 0),
    (9, 32064, 64, 0),
    (7, 50257, 3, 0),
    (5, 50258, 0, 1),
    (64, 1024, 0, 5),
    (3, 8193, 0, 3),
    (2, 65537, 0, 0),
    (3, 1, 0, 0),
    (5, 7, 2, 1),
    (70000, 9, 4, 0),
    (1, 300, 299, 2),
    (4, 24, 24, 0),
]
GUARD = 64


def guarded(t, width, offset, dtype):
    """Logits `[t, width]` that begin `offset` elements after a 16-byte boundary, inside a band of sevens."""
    band = torch.full((GUARD + offset + t * width + GUARD,), 7.0, dtype=dtype, device=CUDA)
    view = band[GUARD + offset : GUARD + offset + t * width].view(t, width)
    view.copy_(4 * torch.randn(t, width, device=CUDA))
    return band, view


def untouched(band, offset):
    return bool((band[: GUARD + offset] == 7).all() and (band[-GUARD:] == 7).all())


def labels_for(t, columns):
    labels = torch.randint(max(columns, 1), (t,), device=CUDA)
    labels[::3] = torch.tensor([-1, columns, 0, columns - 1, 2**40], device=CUDA).repeat(t)[
        : len(labels[::3])
    ]
    return labels


def exact_grad(x, labels, lse, grad):
    x, lse, grad = x.double(), lse.double()[:, None], grad.double()[:, None]
    columns = torch.arange(x.shape[1], device=CUDA)
    return grad * ((x - lse).exp() - (columns == labels[:, None]).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_statistics(shape, dtype):
    """Maximum and target are exact; the sum, of up to 128,256 terms in fp32, to 1e-5."""
    t, width, padding, offset = shape
    band, x = guarded(t, width, offset, dtype)
    before, columns = band.clone(), width - padding
    labels = labels_for(t, columns)
    x[:, columns:] = float("nan")
    maximum, total, target = cross_entropy_stats(x[:, :columns], labels)
    if columns == 0:
        assert (maximum == -float("inf")).all() and (total == 0).all() and (target == 0).all()
        return
    wide = x[:, :columns].double()
    assert torch.equal(maximum.double(), wide.amax(-1))
    exact = (wide - wide.amax(-1, keepdim=True)).exp().sum(-1)
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=0)
    here = (labels >= 0) & (labels < columns)
    picked = wide.gather(1, labels.clamp(0, columns - 1)[:, None])[:, 0]
    assert torch.equal(target.double(), picked.where(here, 0.0))
    x[:, columns:] = before[GUARD + offset : -GUARD].view(t, width)[:, columns:]
    assert torch.equal(band, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_over_the_logits(shape, dtype):
    """One rounding to the type, and 1e-5 of exp in fp32; near 0, where terms cancel, 1e-6."""
    t, width, padding, offset = shape
    band, x = guarded(t, width, offset, dtype)
    columns = width - padding
    labels, grad = labels_for(t, columns), torch.rand(t, device=CUDA)
    lse = x[:, :columns].float().logsumexp(-1) if columns else torch.zeros(t, device=CUDA)
    expected = exact_grad(x[:, :columns], labels, lse, grad)
    found = cross_entropy_grad_(x, labels, lse, grad, columns)
    assert found.data_ptr() == x.data_ptr() and (x[:, columns:] == 0).all() and untouched(band, offset)
    torch.testing.assert_close(x[:, :columns].double(), expected, rtol=EPS[dtype] + 1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offsets", [(0, 0), (3, 3), (0, 1), (5, 2)])
def test_gradient_beside_the_logits(offsets, dtype):
    """Into another tensor, aligned as the first or not, with rows further apart."""
    t, columns, width = 6, 9001, 9011
    (_, x), (band, out) = guarded(t, columns, offsets[0], dtype), guarded(t, width, offsets[1], dtype)
    given, labels, grad = x.clone(), labels_for(t, columns), torch.rand(t, device=CUDA)
    lse = x.float().logsumexp(-1)
    args = (labels, lse, grad, t, columns, columns + 4, width, columns, TYPES[dtype])
    right = out[:, columns + 4 :].clone()
    launch_kernel("cross_entropy_grad", out, x, *args)
    exact = exact_grad(x, labels, lse, grad)
    torch.testing.assert_close(out[:, :columns].double(), exact, rtol=EPS[dtype] + 1e-5, atol=1e-6)
    assert (out[:, columns : columns + 4] == 0).all() and torch.equal(out[:, columns + 4 :], right)
    assert torch.equal(x, given) and untouched(band, offsets[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [40, 5003])
def test_numbers_out_of_the_ordinary(columns, dtype):
    """As torch: infinities and NaN go where they go in the formula; huge numbers do not overflow."""
    inf, nan, huge = float("inf"), float("nan"), torch.finfo(dtype).max
    x = torch.randn(12, columns, device=CUDA)
    x[0], x[1], x[2] = -inf, inf, nan
    x[3, 7], x[4, columns - 1], x[5, 0] = inf, nan, -inf
    x[6], x[7], x[8] = huge, -huge, 1e-30
    x[9, ::2], x[9, 1::2] = huge, -huge
    x[10, 3:], x[11] = -inf, 11.0
    x = x.to(dtype)
    labels = torch.arange(12, device=CUDA)
    found, expected = cross_entropy_stats(x, labels), cross_entropy_stats_ref(x, labels)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0, equal_nan=True)
    lse, grad = found[0] + found[1].log(), torch.ones(12, device=CUDA)
    grad[8], grad[9], grad[4] = inf, nan, 0.0
    theirs = cross_entropy_grad_ref(x, labels, lse, grad)
    ours = cross_entropy_grad_(x, labels, lse, grad)
    torch.testing.assert_close(ours, theirs, rtol=2 * EPS[dtype] + 1e-5, atol=1e-6, equal_nan=True)


def test_no_rows():
    x, none = torch.zeros(0, 40, device=CUDA), torch.zeros(0, device=CUDA)
    assert [s.shape for s in cross_entropy_stats(x, none.long())] == [(0,)] * 3
    assert cross_entropy_grad_(x, none.long(), none, none).shape == (0, 40)


def test_numbers_of_other_types_and_strides():
    """What autograd hands down: one number for all tokens, doubles, every second label, columns apart."""
    x = torch.randn(8, 100, device=CUDA)
    labels = torch.randint(100, (16,), device=CUDA)[::2]
    lse = x.double().logsumexp(-1)
    grad = torch.ones((), device=CUDA).expand(8)
    turned = x.t().contiguous().t()
    for ours, same in zip(cross_entropy_stats(turned, labels), cross_entropy_stats(x, labels), strict=True):
        assert torch.equal(ours, same)
    with pytest.raises(ValueError, match="strides"):
        cross_entropy_grad_(turned, labels, lse, grad)
    expected = exact_grad(x, labels, lse, grad)
    torch.testing.assert_close(
        cross_entropy_grad_(x, labels, lse, grad).double(), expected, rtol=1e-5, atol=1e-6
    )


def test_twice_the_same_bits():
    x = torch.randn(300, 50257, device=CUDA).bfloat16()
    labels, grad = torch.randint(50257, (300,), device=CUDA), torch.rand(300, device=CUDA)
    first = torch.stack(cross_entropy_stats(x, labels))
    assert all(torch.equal(first, torch.stack(cross_entropy_stats(x, labels))) for _ in range(5))
    lse, other = first[0] + first[1].log(), x.clone()
    assert torch.equal(
        cross_entropy_grad_(x, labels, lse, grad), cross_entropy_grad_(other, labels, lse, grad)
    )


def test_shards_make_the_whole():
    """Statistics of two halves of the vocabulary give the loss of the whole."""
    x, labels = torch.randn(50, 4096, device=CUDA), torch.randint(4096, (50,), device=CUDA)
    halves = [cross_entropy_stats(x[:, first : first + 2048], labels - first) for first in (0, 2048)]
    lse = torch.stack([m + s.log() for m, s, _ in halves]).logsumexp(0)
    loss = lse - sum(target for *_, target in halves)
    exact = torch.nn.functional.cross_entropy(x.double(), labels, reduction="none")
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=1e-6)


def test_more_than_two_billion_logits():
    t, columns = 16800, 128256
    x = torch.empty(t, columns, dtype=torch.bfloat16, device=CUDA)
    assert x.numel() > 2**31
    for rows in x.split(800):
        rows.normal_()
    labels, grad = torch.randint(columns, (t,), device=CUDA), torch.rand(t, device=CUDA)
    maximum, total, target = cross_entropy_stats(x, labels)
    some = torch.tensor([0, 1, 8371, 8372, 16743, 16744, 16745, t - 1], device=CUDA)
    few = x[some].double()
    lse = maximum + total.log()
    torch.testing.assert_close(lse[some].double(), few.logsumexp(-1), rtol=1e-6, atol=0)
    assert torch.equal(target[some].double(), few.gather(1, labels[some, None])[:, 0])
    expected = exact_grad(few, labels[some], lse[some], grad[some])
    cross_entropy_grad_(x, labels, lse, grad)
    torch.testing.assert_close(x[some].double(), expected, rtol=2**-8 + 1e-5, atol=1e-6)

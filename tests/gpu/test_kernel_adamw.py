"""AdamW's kernel and the sums of squares against float64: every type, alignment and cut into segments."""

import itertools
import random

import pytest
import torch

from nanomegatron.ops.adamw import (
    CHUNK,
    DECAY,
    DECOUPLED,
    FlatState,
    Segments,
    adamw_flat_,
    adamw_flat_ref_,
    sums_of_squares,
)

CUDA = torch.device("cuda", 0)
HYPER = (0.9, 0.95, 1e-8)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
GUARD = 64


def scalars(step=3.0, values=(1e-2, 3e-3, 0.1), scale=8.0, skip=0.0):
    return tuple(torch.tensor(x, dtype=FP32, device=CUDA) for x in (step, values, scale, skip))


def banded(x, offset):
    """A copy that begins `offset` elements after a 16-byte boundary, between 64 sevens on each side."""
    band = torch.full((GUARD + offset + len(x) + GUARD,), 7, dtype=x.dtype, device=CUDA)
    view = band[GUARD + offset : GUARD + offset + len(x)]
    view.copy_(x)
    return view


def untouched(view):
    band = view._base
    begin = view.storage_offset()
    return bool((band[:begin] == 7).all() and (band[begin + len(view) :] == 7).all())


def state(n, main, grads=FP32, moments=(FP32, FP32), offset=0):
    """main: None or the type of the copy."""
    w = torch.randn(n, device=CUDA)
    given = (
        w,
        None if main is None else w.to(main),
        (8 * torch.randn(n, device=CUDA)).to(grads),
        (0.1 * torch.randn(n, device=CUDA)).to(moments[0]),
        (0.1 * torch.rand(n, device=CUDA)).to(moments[1]),
    )
    return FlatState(*(None if x is None else banded(x, offset) for x in given))


def copied(s):
    return FlatState(*(None if x is None else x.clone() for x in s.tensors))


def numbers(s):
    """main, exp_avg, exp_avg_sq in float64"""
    return [x.double() for x in (s.main, s.exp_avg, s.exp_avg_sq)]


def exact(s, segments, now):
    """The formula in float64 from the same state."""
    step, values, scale, _ = (x.double() for x in now)
    beta1, beta2, eps = HYPER
    w, m, v = numbers(s)
    for start, stop, kind in segments.ranges:
        at, lr = slice(start, stop), values[kind & DECOUPLED]
        g = s.grads[at].double() / scale
        m[at] = beta1 * m[at] + (1 - beta1) * g
        v[at] = beta2 * v[at] + (1 - beta2) * g * g
        moved = lr * (m[at] / (1 - beta1**step)) / ((v[at] / (1 - beta2**step)).sqrt() + eps)
        w[at] = w[at] * (1 - lr * (values[2] if kind & DECAY else 0.0)) - moved
    return w, m, v


def compare(s, expected):
    """fp32 to a few roundings; what is kept in bf16 to one of its own."""
    for found, right, kept in zip(numbers(s), expected, (s.main, s.exp_avg, s.exp_avg_sq), strict=True):
        rtol = 2**-8 if kept.dtype == BF16 else 1e-6
        torch.testing.assert_close(found, right, rtol=rtol, atol=3e-8)


KINDS = list(itertools.product([None, BF16, FP16], [FP32, BF16], [FP32, BF16], [FP32, BF16]))


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("main, grads, avg, avg_sq", KINDS)
def test_a_step(main, grads, avg, avg_sq, offset):
    n = 3 * CHUNK + 77
    s = state(n, main, grads, (avg, avg_sq), offset)
    ranges = [
        (0, 5, DECAY),
        (5, CHUNK + 2, 0),
        (CHUNK + 3, CHUNK + 4, 3),
        (CHUNK + 7, n - 3, DECOUPLED | DECAY),
    ]
    segments, before, now = Segments.from_ranges(ranges, CUDA), copied(s), scalars()
    expected = exact(s, segments, now)
    adamw_flat_(s, segments, now, HYPER)
    compare(s, expected)
    assert torch.equal(s.grads, before.grads) and all(untouched(x) for x in s.tensors if x is not None)
    if main in (BF16, FP16):
        for start, stop, _ in ranges:
            assert torch.equal(s.params[start:stop], s.main[start:stop].to(main))
    for gap in (slice(CHUNK + 2, CHUNK + 3), slice(CHUNK + 4, CHUNK + 7), slice(n - 3, n)):
        assert all(torch.equal(a[gap], b[gap]) for a, b in zip(s.tensors, before.tensors) if a is not None)


@pytest.mark.parametrize("main", [None, BF16])
def test_a_skipped_step_changes_nothing(main):
    s = state(1000, main)
    s.grads[3] = float("nan")
    before = copied(s)
    adamw_flat_(
        s,
        Segments.from_ranges([(0, 1000, DECAY)], CUDA),
        scalars(skip=1.0, scale=float("inf")),
        HYPER,
    )
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(s.tensors, before.tensors)
        if a is not None
    )


@pytest.mark.parametrize("main", [None, BF16])
def test_numbers_out_of_the_ordinary(main):
    """NaN and infinity go where the formula takes them; tiny second moments divide by eps, not by 0."""
    s = state(16, main)
    inf = float("inf")
    s.exp_avg.zero_(), s.exp_avg_sq.zero_()
    s.grads.copy_(torch.tensor([0.0, -0.0, inf, -inf, float("nan"), 1e30, -1e30, 1e-30] * 2, device=CUDA))
    s.main[8:] = torch.tensor([inf, -inf, float("nan"), 3e38, -3e38, 1e-40, 0.0, -0.0], device=CUDA)
    other, segments = copied(s), Segments.from_ranges([(0, 16, DECAY)], CUDA)
    adamw_flat_(s, segments, scalars(), HYPER)
    adamw_flat_ref_(other, segments, scalars(), HYPER)
    for ours, theirs in zip(numbers(s), numbers(other), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8, equal_nan=True)
    if main is not None:
        assert torch.equal(s.params.isnan(), other.params.isnan())
        torch.testing.assert_close(s.params, other.params, rtol=2**-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("step", [1.0, 2.0, 1000.0, 300000.0])
def test_bias_correction(step):
    """1 - 0.999 in fp32 is wrong by 5e-5."""
    s, segments, hyper = state(100, None), Segments.from_ranges([(0, 100, DECAY)], CUDA), (0.9, 0.999, 1e-8)
    s.main.zero_(), s.exp_avg.zero_(), s.exp_avg_sq.zero_()
    adamw_flat_(s, segments, scalars(step), hyper)
    g = s.grads.double() / 8
    unbias1, unbias2 = (1 - beta**step for beta in hyper[:2])
    moved = -1e-2 * (0.1 * g / unbias1) / ((0.001 * g * g / unbias2).sqrt() + 1e-8)
    torch.testing.assert_close(s.main.double(), moved, rtol=1e-6, atol=0)


def test_many_segments():
    """More than a block has threads, of odd lengths, some empty."""
    random.seed(0)
    ends = sorted(random.sample(range(1, 200_000), 901))
    ranges = [(a, b, i % 4) for i, (a, b) in enumerate(itertools.pairwise(ends)) if i % 7]
    ranges.insert(300, (ranges[300][0],) * 2 + (0,))
    s, segments = state(200_000, BF16, BF16, (BF16, FP32)), Segments.from_ranges(ranges, CUDA)
    expected, before = exact(s, segments, scalars()), copied(s)
    adamw_flat_(s, segments, scalars(), HYPER)
    compare(s, expected)
    inside = torch.zeros(200_000, dtype=torch.bool, device=CUDA)
    for start, stop, _ in ranges:
        inside[start:stop] = True
    assert torch.equal(s.params[~inside], before.params[~inside])
    sums, zeros = sums_of_squares(before.grads, segments)
    right = torch.stack([before.grads[a:b].double().square().sum() for a, b, _ in ranges])
    torch.testing.assert_close(sums, right, rtol=1e-12, atol=0)
    assert (zeros == torch.stack([(before.grads[a:b] == 0).sum() for a, b, _ in ranges])).all()


def test_nothing_to_do():
    s = state(8, None)
    before = copied(s)
    for ranges in ([], [(3, 3, 0)]):
        adamw_flat_(s, Segments.from_ranges(ranges, CUDA), scalars(), HYPER)
        sums, zeros = sums_of_squares(s.grads, Segments.from_ranges(ranges, CUDA))
        assert sums.tolist() == zeros.tolist() == [0.0] * len(ranges)
    assert torch.equal(s.main, before.main)


def test_twice_the_same_bits():
    s = state(50 * CHUNK + 11, BF16, FP32, (BF16, BF16))
    other, segments = copied(s), Segments.from_ranges([(1, 50 * CHUNK + 11, DECAY)], CUDA)
    first = torch.stack(sums_of_squares(s.grads, segments))
    assert all(torch.equal(first, torch.stack(sums_of_squares(s.grads, segments))) for _ in range(5))
    for one in (s, other):
        adamw_flat_(one, segments, scalars(), HYPER)
    assert all(torch.equal(a, b) for a, b in zip(s.tensors, other.tensors, strict=True))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_sums_of_squares(dtype, offset):
    n = 5 * CHUNK + 13
    x = banded(torch.randn(n, device=CUDA).to(dtype), offset)
    x[100:200] = 0
    ranges = [(0, 150, 0), (150, 151, 0), (151, 4 * CHUNK, 0), (4 * CHUNK + 3, n, 0), (150, n, 0)]
    sums, zeros = sums_of_squares(x, Segments.from_ranges(ranges, CUDA))
    exact = torch.stack([x[a:b].double().square().sum() for a, b, _ in ranges])
    torch.testing.assert_close(sums, exact, rtol=1e-12, atol=0)
    assert zeros.tolist() == [float((x[a:b] == 0).sum()) for a, b, _ in ranges]


def test_squares_of_large_and_broken_numbers():
    """fp32 would overflow at 1e19."""
    x = torch.tensor([1e30, -1e30, float("inf"), float("nan"), -0.0, 1e-30], device=CUDA)
    sums, zeros = sums_of_squares(x, Segments.from_ranges([(i, i + 1, 0) for i in range(6)], CUDA))
    torch.testing.assert_close(sums, x.double().square(), rtol=1e-12, atol=0, equal_nan=True)
    assert zeros.tolist() == [0, 0, 0, 0, 1, 0]


def test_more_than_two_billion_elements():
    """26 GB; what is worked on lies on both sides of element 2^31."""
    n = 2**31 + 5000
    s = FlatState(*(torch.zeros(n, dtype=t, device=CUDA) for t in (FP32, BF16, BF16, BF16, BF16)))
    begin = 2**31 - 3001
    tail = state(n - begin, BF16, BF16, (BF16, BF16))
    for x, y in zip(s.tensors, tail.tensors, strict=True):
        x[begin:].copy_(y)
    adamw_flat_(s, Segments.from_ranges([(0, 1000, 0), (begin, n, DECAY)], CUDA), scalars(), HYPER)
    adamw_flat_(tail, Segments.from_ranges([(0, n - begin, DECAY)], CUDA), scalars(), HYPER)
    assert all(torch.equal(x[begin:], y) for x, y in zip(s.tensors, tail.tensors, strict=True))
    sums, zeros = sums_of_squares(s.grads, Segments.from_ranges([(0, n, 0), (begin, n, 0)], CUDA))
    torch.testing.assert_close(sums, tail.grads.double().square().sum().expand(2), rtol=1e-12, atol=0)
    assert zeros[0] == begin + (tail.grads == 0).sum()

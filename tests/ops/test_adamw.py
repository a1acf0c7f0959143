"""AdamW over a flat shard: the reference against torch's, segments."""

import pytest
import torch

from nanomegatron.ops.adamw import (
    CHUNK,
    DECAY,
    DECOUPLED,
    FlatState,
    Segments,
    adamw_flat_,
    sums_of_squares,
)

CPU = torch.device("cpu")
HYPER = (0.9, 0.95, 1e-8)


def scalars(step=1.0, values=(1e-2, 3e-3, 0.1), scale=1.0, skip=0.0):
    return tuple(torch.tensor(x, dtype=torch.float32) for x in (step, values, scale, skip))


def state(n, params=None, moments=torch.float32):
    main = torch.randn(n)
    return FlatState(
        main,
        None if params is None else main.to(params),
        torch.randn(n),
        (0.1 * torch.randn(n)).to(moments),
        (0.1 * torch.rand(n)).to(moments),
    )


def copied(s):
    return FlatState(*(None if x is None else x.clone() for x in s.tensors))


def test_it_is_torchs_adamw():
    """Three steps of two groups with their own learning rate and decay, gradients scaled by 8."""
    n, s = 20, state(20)
    s.exp_avg.zero_(), s.exp_avg_sq.zero_()
    params = [s.main[:7].clone().requires_grad_(), s.main[9:].clone().requires_grad_()]
    groups = [
        dict(params=params[:1], lr=1e-2, weight_decay=0.1),
        dict(params=params[1:], lr=3e-3, weight_decay=0),
    ]
    theirs = torch.optim.AdamW(groups, betas=HYPER[:2], eps=HYPER[2])
    segments, gap = Segments.from_ranges([(0, 7, DECAY), (9, n, DECOUPLED)], CPU), s.main[7:9].clone()
    for step in (1.0, 2.0, 3.0):
        s.grads.copy_(torch.randn(n) * 8)
        params[0].grad, params[1].grad = s.grads[:7] / 8, s.grads[9:] / 8
        theirs.step()
        adamw_flat_(s, segments, scalars(step, scale=8.0), HYPER)
    torch.testing.assert_close(s.main[:7], params[0].detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(s.main[9:], params[1].detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(s.main[7:9], gap)


def test_a_skipped_step_changes_nothing():
    s = state(30, torch.bfloat16, torch.bfloat16)
    s.grads[3] = float("nan")
    before = copied(s)
    adamw_flat_(s, Segments.from_ranges([(0, 30, DECAY)], CPU), scalars(skip=1.0, scale=float("inf")), HYPER)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(s.tensors, before.tensors))


def test_blocks_of_segments_cover_them_once():
    """As adamw.cu finds its range: the last row of the table that begins at or before the block."""
    ranges = [
        (3, 5, 1),
        (5, 5, 0),
        (8, 8 + 2 * CHUNK, 2),
        (8 + 2 * CHUNK, 9 + 3 * CHUNK, 3),
        (4 * CHUNK - 1, 6 * CHUNK, 0),
    ]
    segments, seen = Segments.from_ranges(ranges, CPU), torch.zeros(6 * CHUNK)
    for block in range(segments.blocks):
        start, stop, first, kind = segments.table[int((segments.table[:, 2] <= block).sum()) - 1].tolist()
        base = start // 8 * 8 + (block - first) * CHUNK
        begin, end = max(start, base), min(stop, base + CHUNK)
        assert begin < end
        seen[begin:end] += 1 + kind
    for start, stop, kind in ranges:
        assert (seen[start:stop] == 1 + kind).all()
        seen[start:stop] = 0
    assert (seen == 0).all()


def test_neighbours_of_a_kind_are_merged():
    ranges = [(8, 12, 2), (0, 4, 2), (4, 8, 2), (14, 16, 2), (12, 13, 0)]
    assert Segments.merged(ranges, CPU).ranges == ((0, 12, 2), (12, 13, 0), (14, 16, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_squares(dtype):
    x = torch.randn(40).to(dtype)
    x[5:8] = 0
    sums, zeros = sums_of_squares(x, Segments.from_ranges([(30, 40, 0), (0, 10, 0), (12, 12, 0)], CPU))
    expected = [x[30:].double().norm() ** 2, x[:10].double().norm() ** 2, 0.0]
    torch.testing.assert_close(sums, torch.tensor(expected, dtype=torch.float64))
    assert zeros.tolist() == [0, 3, 0]
    assert sums_of_squares(x, Segments.from_ranges([], CPU))[0].shape == (0,)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(params=torch.zeros(8)), "must be fp32 and 16 bits"),
        (dict(main=torch.zeros(8).short()), "must be fp32 and 16 bits"),
        (dict(exp_avg=torch.zeros(8).half()), "the others fp32 or bf16"),
        (dict(grads=torch.zeros(7)), r"must be flat, contiguous, \[8\]"),
        (dict(grads=torch.zeros(16)[::2]), "contiguous"),
        (dict(grads=torch.zeros(2, 4)), "flat"),
    ],
)
def test_what_does_not_fit_is_refused(change, said):
    given = dict(main=torch.zeros(8), params=None, grads=torch.zeros(8), exp_avg=torch.zeros(8))
    s = FlatState(**(given | dict(exp_avg_sq=torch.zeros(8)) | change))
    with pytest.raises(ValueError, match=said):
        adamw_flat_(s, Segments.from_ranges([(0, 8, 0)], CPU), scalars(), HYPER)


def test_segments_and_numbers_that_do_not_fit_are_refused():
    s = state(8)
    with pytest.raises(ValueError, match="ends at 9, the tensors at 8"):
        adamw_flat_(s, Segments.from_ranges([(0, 9, 0)], CPU), scalars(), HYPER)
    with pytest.raises(ValueError, match="range 3..2"):
        Segments.from_ranges([(3, 2, 0)], CPU)
    with pytest.raises(ValueError, match="must be fp32"):
        adamw_flat_(s, Segments.from_ranges([(0, 8, 0)], CPU), scalars(values=(1.0,)), HYPER)
    with pytest.raises(ValueError, match="must be fp32"):
        adamw_flat_(s, Segments.from_ranges([(0, 8, 0)], CPU), tuple(x.double() for x in scalars()), HYPER)

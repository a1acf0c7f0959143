"""FP8 casts, amaxes and scales in plain torch: values by hand, and what is refused."""

import pytest
import torch

from nanomegatron.ops.fp8_cast import (
    FORMATS,
    LARGEST,
    Fp8Matrix,
    fp8_amax,
    fp8_cast,
    fp8_cast_blocks,
    fp8_cast_rows,
    fp8_decode,
    fp8_limit,
    fp8_scale,
    fp8_transpose,
    fp8_update,
)

E4M3, E5M2 = FORMATS
NAN, INF = float("nan"), float("inf")
CODED = torch.ones(2, 2).to(E4M3)


def test_casts_saturate_round_to_even_and_keep_what_is_no_number():
    x = torch.tensor([[1.0, 1.0625, 1.1875, 1e9, -1e9, INF, 0.0, NAN]])  # halfway: 1.0625 down, 1.1875 up
    row, flip = fp8_cast(x, torch.tensor(1.0), E4M3, outputs="both")
    assert row.float()[0, :7].tolist() == [1.0, 1.0, 1.25, 448.0, -448.0, 448.0, 0.0]
    assert row.float()[0, 7].isnan() and torch.equal(flip.view(torch.uint8), row.view(torch.uint8).t())
    row, none = fp8_cast(x, torch.tensor(2.0), E5M2)
    assert row.float()[0, :7].tolist() == [2.0, 2.0, 2.5, 57344.0, -57344.0, 57344.0, 0.0] and none is None


def test_an_amax_is_the_largest_so_far_whatever_the_scale():
    amax = torch.tensor(0.0)
    fp8_cast(torch.tensor([[1.0, -3.0]]), torch.tensor(100.0), E4M3, amax)
    assert amax == 3.0
    fp8_amax(torch.tensor([2.0]).bfloat16(), amax)
    fp8_amax(torch.empty(0), amax)
    assert amax == 3.0
    fp8_amax(torch.tensor([NAN, 1.0]), amax)
    assert amax.isnan()


def test_scales():
    amax = torch.tensor([0.0, INF, NAN, 7.0, 1e-45])
    scale, scale_inv = fp8_scale(amax, fp8_limit(E4M3))
    assert scale.tolist() == [1.0, 1.0, 1.0, 64.0, LARGEST] and torch.equal(scale_inv, 1.0 / scale)
    assert fp8_scale(torch.tensor(7.5), fp8_limit(E4M3), True)[0] == 32.0  # 59.7 rounded down
    assert fp8_scale(torch.tensor(7.0), fp8_limit(E4M3, margin=2))[0] == 16.0


def test_a_history_by_hand():
    """Four steps of two tensors, three deep, E4M3 and E5M2."""
    limits = torch.tensor([448.0, 57344.0])
    amaxes = [(7.0, 7.0), (3.5, 14.0), (INF, 0.0), (0.0, 3.5)]
    largest = [(7, 7), (7, 14), None, (3.5, 14)]  # the 7 has left; an infinite one keeps the scale once
    for most_recent in (False, True):
        history, scale, scale_inv = torch.zeros(3, 2), torch.ones(2), torch.ones(2)
        seen = []
        for now in amaxes:
            history[0] = torch.tensor(now)
            fp8_update(history, scale, scale_inv, limits, most_recent)
            assert history[0].tolist() == [0.0, 0.0] and torch.equal(scale_inv, 1 / scale)
            seen.append(scale.tolist())
        if most_recent:  # zero and infinite ones keep the scale
            assert seen == [[64.0, 8192.0], [128.0, 4096.0], [128.0, 4096.0], [128.0, 16384.0]]
        else:
            assert seen[:2] == [[448 / a, 57344 / b] for a, b in largest[:2]]
            assert seen[2] == [64.0, 4096.0] and seen[3] == [128.0, 4096.0]
        assert history.tolist() == [[0.0, 0.0], [0.0, 3.5], [0.0, 0.0]]


@pytest.mark.parametrize("length", [1, 2])
def test_a_history_of_one_is_the_step_itself(length):
    history, scale, scale_inv = torch.zeros(length, 1), torch.ones(1), torch.ones(1)
    for amax in (7.0, 3.5, 28.0):
        history[0] = amax
        fp8_update(history, scale, scale_inv, torch.tensor([448.0]), length == 2)
        assert scale == 448.0 / amax


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("squares", [False, True])
def test_blocks_have_their_own_scales(squares, power_of_two):
    x = torch.randn(200, 300)
    x[:, 128:256] *= 1000
    x[:128] *= 1e-3
    (row, scale_inv), (flip, flip_inverse) = fp8_cast_blocks(x, E4M3, squares, "both", power_of_two)
    assert row.shape == (200, 300) and flip.shape == (300, 200)
    assert scale_inv.shape == ((2, 3) if squares else (200, 3))
    assert flip_inverse.shape == ((3, 2) if squares else (300, 2))
    assert scale_inv.stride() == ((4, 1) if squares else (1, 200))
    for q, i, y in ((row, scale_inv, x), (flip, flip_inverse, x.t())):
        error = (fp8_decode(Fp8Matrix(q, i)) - y).abs()  # half a step of a value, or of its block's smallest
        assert (error <= y.abs() / 16 + i.repeat_interleave(128, 1)[:, : y.shape[1]].amax() * 2**-10).all()
        largest = q.float().abs().view(-1).max()
        assert largest <= 448.0 if power_of_two else largest == 448.0
    if squares:
        assert torch.equal(flip.view(torch.uint8), row.view(torch.uint8).t())
        assert torch.equal(flip_inverse, scale_inv.t())
    if power_of_two:
        assert torch.equal(scale_inv.log2(), scale_inv.log2().round())
    else:
        first = x[:128, :128] if squares else x[0, :128]
        torch.testing.assert_close(scale_inv[0, 0], first.abs().max() / 448.0)


def test_rows_have_their_own_scales():
    x = torch.tensor([[7.0, 7.5], [0.0, 0.0], [INF, 3.0], [NAN, 1e-3]])
    (row, scale_inv), (flip, flip_inverse) = fp8_cast_rows(x, E4M3, 448.0, "both")
    assert scale_inv.flatten().tolist() == [1 / 32, 1.0, 1.0, 1.0]  # 448 / 7.5 = 59.7, rounded down
    assert row.float()[:3].tolist() == [[224.0, 240.0], [0.0, 0.0], [448.0, 3.0]] and row[3, 0].isnan()
    assert flip_inverse.tolist() == [[1.0], [1 / 32]] and flip.shape == (2, 4)
    assert flip.float()[1].tolist() == [240.0, 0.0, 96.0, 2**-5]
    assert fp8_cast_rows(x[:1], E4M3, 448.0 / 4)[0][1] == 1 / 8


def test_what_has_been_cast_is_cast_as_what_it_stands_for():
    x = torch.randn(200, 300) * torch.randn(200, 1).exp()
    for q, scale_inv in (
        fp8_cast_rows(x, E5M2, 57344.0)[0],
        fp8_cast_blocks(x, E5M2, False)[0],
        fp8_cast_blocks(x, E5M2, True)[0],
    ):
        decoded = fp8_decode(Fp8Matrix(q, scale_inv))
        assert ((decoded - x).abs() <= x.abs() / 8 + 1e-6).all()
        for cast in (
            lambda *a: fp8_cast_rows(a[0], E5M2, 57344.0, "both", *a[1:]),
            lambda *a: fp8_cast_blocks(a[0], E5M2, False, "both", True, *a[1:]),
        ):
            for (a, b), (c, d) in zip(cast(q, scale_inv), cast(decoded), strict=True):
                assert torch.equal(a.view(torch.uint8), c.view(torch.uint8)) and torch.equal(b, d)
    assert (
        torch.equal(fp8_transpose(q).view(torch.uint8), q.view(torch.uint8).t())
        and fp8_transpose(q).is_contiguous()
    )


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (1, 1)])
def test_rows_that_are_small_or_empty(shape):
    (row, scale_inv), (flip, flip_inverse) = fp8_cast_rows(torch.zeros(shape), E5M2, 1.0, "both")
    assert row.shape == shape and flip.shape == fp8_transpose(row).shape == shape[::-1]
    assert scale_inv.tolist() == [[1.0]] * shape[0] and flip_inverse.tolist() == [[1.0]] * shape[1]


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (1, 1)])
def test_small_and_empty_ones(shape, squares):
    (row, scale_inv), (flip, _) = fp8_cast_blocks(torch.ones(shape), E5M2, squares, "both")
    assert (
        row.shape == shape
        and flip.shape == shape[::-1]
        and torch.equal(fp8_decode(Fp8Matrix(row, scale_inv)), torch.ones(shape))
    )


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: fp8_cast(torch.ones(2, 2), torch.ones(2), E4M3), "one fp32 element"),
        (lambda: fp8_cast(torch.ones(2, 2), torch.ones(1).double(), E4M3), "one fp32 element"),
        (lambda: fp8_cast(torch.ones(2), torch.ones(1), E4M3), "matrix"),
        (lambda: fp8_cast(torch.ones(2, 2).long(), torch.ones(1), E4M3), "matrix"),
        (lambda: fp8_cast(torch.ones(2, 2), torch.ones(1), torch.bfloat16), "E4M3"),
        (lambda: fp8_cast(torch.ones(2, 2), torch.ones(1), E4M3, outputs="columns"), "outputs"),
        (lambda: fp8_cast(torch.ones(2, 2), torch.ones(1), E4M3, torch.ones(2)), "one fp32 element"),
        (lambda: fp8_cast_blocks(torch.ones(2), E4M3, True), "matrix"),
        (lambda: fp8_cast_blocks(CODED, E4M3, False), "matrix"),
        (lambda: fp8_cast_blocks(CODED, E5M2, False, scale_inv=torch.ones(2, 1)), "is not cast to"),
        (lambda: fp8_cast_rows(CODED, E4M3, 448.0, scale_inv=torch.ones(3, 1)), "is not cast to"),
        (lambda: fp8_cast_rows(CODED, E4M3, 448.0, scale_inv=torch.ones(2, 1).half()), "is not cast to"),
        (lambda: fp8_cast_rows(torch.ones(2, 2), E4M3, 448.0, "column"), "outputs"),
        (lambda: fp8_transpose(torch.ones(2, 2)), "a matrix of FP8"),
        (lambda: fp8_scale(torch.ones(2).half(), 448.0), "fp32"),
        (lambda: fp8_update(torch.ones(2, 3), torch.ones(2), torch.ones(3), torch.ones(3)), "must be fp32"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()

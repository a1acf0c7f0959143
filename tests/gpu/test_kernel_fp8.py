"""FP8 casts, amaxes and scales by the kernels: the bytes of torch, whatever the shape, value and address."""

import pytest
import torch

from nanomegatron.ops.fp8_cast import (
    FORMATS,
    Fp8Matrix,
    fp8_amax,
    fp8_cast,
    fp8_cast_blocks,
    fp8_cast_blocks_ref,
    fp8_cast_ref,
    fp8_cast_rows,
    fp8_cast_rows_ref,
    fp8_decode,
    fp8_limit,
    fp8_scale,
    fp8_transpose,
    fp8_update,
    fp8_update_ref,
)
from nanomegatron.ops.kernels import FLOATS, TYPES, kernels_unavailable, launch_kernel, without_kernels

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NAN, INF = float("nan"), float("inf")
SHAPES = [
    (128, 128),
    (256, 4096),
    (272, 136),
    (16, 8),
    (144, 264),
    (130, 131),
    (127, 128),
    (128, 129),
    (129, 127),
]
SHAPES += [(1, 1), (1, 300), (300, 1), (0, 16), (16, 0), (5, 8), (8, 5), (17, 1000), (1000, 24), (2048, 1032)]
LONG = [(3, 8200), (2, 4099)]  # rows that a block reads in several turns
INVERSES = ["rows", "lines", "gathered", "squares"]  # of what has been cast before


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, device=GPU)


def same(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    """The same bytes, but for the sign of what is no number."""
    assert (found is None) == (expected is None)
    if found is None:
        return
    expected = expected.to(found.device)
    assert found.shape == expected.shape and found.dtype == expected.dtype and found.is_contiguous()
    nan = expected.float().isnan()
    assert torch.equal(found.float().isnan(), nan)
    wrong = (found.view(torch.uint8) != expected.view(torch.uint8)) & ~nan
    assert not wrong.any(), (int(wrong.sum()), wrong.nonzero()[:5])


def plainly(function, *args):
    """What plain torch gives, on the CPU."""
    with without_kernels():
        return function(*(a.cpu() if isinstance(a, torch.Tensor) else a for a in args))


def check_cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, outputs: str) -> None:
    amax, expected_amax = number(0.0), torch.tensor(0.0)
    found = fp8_cast(x, scale, dtype, amax, outputs)
    expected = plainly(fp8_cast, x, scale, dtype, expected_amax, outputs)
    for ours, theirs in zip(found, expected, strict=True):
        same(ours, theirs)
    torch.testing.assert_close(amax.cpu(), expected_amax, rtol=0, atol=0, equal_nan=True)


def check_parts(function, *args: torch.Tensor | str | float | None) -> None:
    """fp8_cast_rows or fp8_cast_blocks: casts, and inverses in their places."""
    for ours, theirs in zip(function(*args), plainly(function, *args), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            same(ours[0], theirs[0])
            assert torch.equal(ours[1].cpu(), theirs[1]) and ours[1].stride() == theirs[1].stride()


def spread(shape: tuple[int, int], kind: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers, rows and columns of different sizes."""
    sizes = torch.randn(shape[0], 1, device=GPU) + torch.randn(shape[1], device=GPU)
    return (torch.randn(shape, device=GPU) * sizes.exp()).to(kind)


def coded(shape: tuple[int, int], dtype: torch.dtype, inverses: str) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 with inverses that are no powers of two, but those of rows."""
    if inverses == "rows":
        return fp8_cast_rows_ref(spread(shape), dtype, 100.0)
    q, scale_inv = fp8_cast_blocks_ref(spread(shape), dtype, inverses == "squares")
    return q, scale_inv.contiguous() if inverses == "gathered" else scale_inv


def test_the_kernels_are_there():
    assert kernels_unavailable(torch.device("cuda", torch.cuda.current_device())) == ""


@pytest.mark.parametrize("outputs", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_cast(shape, kind, dtype, outputs):
    check_cast((torch.randn(shape, device=GPU) * 3).to(kind), number(37.5), dtype, outputs)


@pytest.mark.parametrize("outputs", ["rowwise", "both"])
@pytest.mark.parametrize("scale", [1.0, 1.37, 2.0**-9, 1e4, 2.0**126])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_all_values_of_16_bits(kind, dtype, scale, outputs):
    x = torch.arange(65536, dtype=torch.int32, device=GPU).short().view(kind).view(256, 256)
    check_cast(x, number(scale), dtype, outputs)
    check_cast(x.nan_to_num(), number(scale), dtype, outputs)


@pytest.mark.parametrize("dtype", FORMATS)
def test_all_halves_between_values(dtype):
    """Where rounding to even decides, and the neighbours of those places, in fp32."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()].unique()
    halves = (values[1:] + values[:-1]) / 2
    x = torch.cat((values, halves, halves.nextafter(number(INF).cpu()), halves.nextafter(-number(INF).cpu())))
    x = torch.cat((x, torch.tensor([INF, -INF, NAN, 0.0, -0.0, 1e-45, 3e38, 464.0, 465.0, 61440.0, 61441.0])))
    check_cast(x[None].to(GPU), number(1.0), dtype, "both")
    check_cast(x[:, None].to(GPU), number(1.0), dtype, "both")


@pytest.mark.parametrize("outputs", ["rowwise", "both"])
@pytest.mark.parametrize("kind", FLOATS)
def test_views_that_are_not_aligned(kind, outputs):
    data = torch.randn(64 * 256 + 1, device=GPU).to(kind)
    check_cast(data[1:].view(64, 256), number(2.0), FORMATS[0], outputs)
    check_cast(data[: 64 * 256].view(256, 64).t(), number(2.0), FORMATS[0], outputs)
    check_parts(fp8_cast_rows, data[1:].view(64, 256), FORMATS[0], 448.0, outputs)
    check_parts(fp8_cast_rows, data[: 64 * 256].view(256, 64).t(), FORMATS[0], 448.0, outputs)
    for squares in (False, True):
        check_parts(fp8_cast_blocks, data[1:].view(64, 256), FORMATS[0], squares, outputs, False)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks(shape, kind, dtype, squares, power_of_two):
    x = spread(shape, kind)
    for outputs in ("rowwise", "columnwise", "both"):
        check_parts(fp8_cast_blocks, x, dtype, squares, outputs, power_of_two)


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38, INF, -INF, NAN])
def test_blocks_of_strange_numbers(value, squares):
    x = torch.randn(256, 256, device=GPU)
    x[128:, :128] = value
    x[3, 200] = value
    for dtype in FORMATS:
        check_parts(fp8_cast_blocks, x, dtype, squares, "both", False)
        check_parts(fp8_cast_blocks, x, dtype, squares, "both", True)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("shape", SHAPES + LONG)
def test_rows(shape, kind, dtype):
    x = spread(shape, kind)
    for outputs in ("rowwise", "columnwise", "both"):
        check_parts(fp8_cast_rows, x, dtype, fp8_limit(dtype, 3), outputs)


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38, INF, -INF, NAN])
def test_rows_of_strange_numbers(value):
    x = spread((144, 264))
    x[3] = value
    x[:, 7] = value
    x[100, 200] = value
    for dtype in FORMATS:
        for outputs in ("rowwise", "both"):
            check_parts(fp8_cast_rows, x, dtype, 448.0, outputs)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_turned_bytes(shape, dtype):
    """All there are, also NaN and infinity."""
    bytes_ = torch.randint(256, (shape[0] * shape[1] + 1,), dtype=torch.uint8, device=GPU)
    for part in (bytes_[:-1], bytes_[1:]):  # the second is not aligned
        q = part.view(shape)
        assert torch.equal(fp8_transpose(q.view(dtype)).view(torch.uint8), q.t())


@pytest.mark.parametrize("inverses", INVERSES)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES + LONG)
def test_casts_of_casts(shape, dtype, inverses):
    q, scale_inv = coded(shape, dtype, inverses)
    for outputs in ("rowwise", "columnwise", "both"):
        check_parts(fp8_cast_rows, q, dtype, 448.0, outputs, scale_inv)
        for squares in (False, True):
            check_parts(fp8_cast_blocks, q, dtype, squares, outputs, not squares, scale_inv)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
def test_casts_of_all_casts(dtype, power_of_two):
    """Every byte with inverses up to where values overflow or become zero; a view that is not aligned."""
    every = torch.arange(256, dtype=torch.uint8, device=GPU).repeat(256, 1)
    scale_inv = 2.0 ** torch.linspace(-126, 126, 256, device=GPU)[:, None]
    scale_inv = scale_inv.log2().round().exp2() if power_of_two else scale_inv
    shifted = torch.cat((every.flatten()[:1], every.flatten()))[1:].view(256, 256)
    for q in (every, every.t().contiguous(), shifted):
        for outputs in ("rowwise", "both"):
            check_parts(fp8_cast_rows, q.view(dtype), dtype, 448.0, outputs, scale_inv)
            check_parts(fp8_cast_blocks, q.view(dtype), dtype, False, outputs, True, scale_inv)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000, 65536, 12_345_677])
def test_amax(n, kind):
    x = torch.randn(n + 1, device=GPU).to(kind)
    for part in (x[:n], x[1:]):
        amax = number(0.0)
        fp8_amax(part, amax)
        assert amax == part.abs().max().float()
    for place in (0, n // 2, n - 1):
        for value in (-100.0, -INF, NAN, -NAN):
            y, amax = x[:n].clone(), number(0.0)
            y[place] = value
            fp8_amax(y, amax)
            fp8_amax(x[:n], amax)  # the larger one stays
            assert amax.isnan() if value != value else amax == abs(value)


def test_scale_of_an_amax():
    amax = torch.tensor([0.0, 1e-45, 1e-38, 1e-30, 0.3, 1.0, 448.0, 1e30, 3.4e38, INF, NAN], device=GPU)
    amax = torch.cat((amax, torch.rand(1000, device=GPU)))
    for limit in (fp8_limit(FORMATS[0]), fp8_limit(FORMATS[1], 2)):
        for power_of_two in (False, True):
            found = fp8_scale(amax, limit, power_of_two)
            expected = plainly(fp8_scale, amax, limit, power_of_two)
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 500])
@pytest.mark.parametrize("length", [1, 2, 3, 31, 32, 33, 64, 65, 1024])
def test_history(length, n, most_recent):
    history = torch.rand(length, n) * 10
    scale, scale_inv = torch.ones(n), torch.ones(n)
    limits = torch.tensor([fp8_limit(FORMATS[i % 2]) for i in range(n)])
    ours = [x.to(GPU, copy=True) for x in (history, scale, scale_inv, limits)]
    for step in range(4):
        fp8_update(*ours, most_recent)
        fp8_update_ref(history, scale, scale_inv, limits, most_recent)
        for found, expected in zip(ours, (history, scale, scale_inv, limits), strict=True):
            assert torch.equal(found.cpu(), expected), step
        newest = torch.rand(n) * 10
        newest[step % n] = (NAN, INF, 0.0, 1e-45)[step]
        history[0] = newest
        ours[0][0] = newest.to(GPU)


@pytest.mark.parametrize("shape", [(144, 264), (130, 131), (256, 256)])
def test_nothing_beside_the_outputs_is_written(shape):
    """Bands of a pattern around each output, also where tiles overhang."""
    m, k = shape
    x, band = torch.randn(shape, device=GPU).bfloat16(), 4096
    down, across = -(-m // 128), -(-k // 128)

    def guarded(size: int, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.full((band + size * kind.itemsize + band,), 0x5A, dtype=torch.uint8, device=GPU)
        return whole, whole[band : band + size * kind.itemsize].view(kind)

    buffers = [guarded(m * k, FORMATS[0]) for _ in range(2)]
    sizes = down * across, down * across, across * m, down * k, m, k
    buffers += [guarded(size, torch.float32) for size in sizes]
    row, flip, *inverses = (inner for _, inner in buffers)
    guard, amax = guarded(m + k, torch.float32)
    amax.zero_()
    kinds = TYPES[x.dtype], TYPES[FORMATS[0]]
    launch_kernel("fp8_cast", x, row, None, number(1.0), number(0.0), m, k, *kinds)
    launch_kernel("fp8_cast", x, row, flip, number(1.0), number(0.0), m, k, *kinds)
    for squares in (1, 0):
        one, two = inverses[:2] if squares else inverses[2:4]
        where = m, k, across, down, squares
        launch_kernel("fp8_cast_blocks", x, None, 0, 0, row, one, flip, two, *where, 0, *kinds)
    one, two = inverses[4:]
    launch_kernel("fp8_cast_rows", x, None, 0, 0, row, one, None, None, None, m, k, 448.0, *kinds)
    launch_kernel("fp8_cast_rows", x, None, 0, 0, row, one, flip, two, amax, m, k, 448.0, *kinds)
    launch_kernel("fp8_transpose", row, flip, m, k)
    for whole, _ in [*buffers, (guard, amax)]:
        assert (whole[:band] == 0x5A).all() and (whole[-band:] == 0x5A).all()
    for scale_inv in inverses:  # and each element of what has no pattern of its own was
        assert (scale_inv.view(torch.int32) != 0x5A5A5A5A).all()


def test_the_same_bits_every_time():
    x = torch.randn(1000, 1032, device=GPU).bfloat16()
    ways = [lambda squares=s: fp8_cast_blocks(x, FORMATS[0], squares, "both") for s in (False, True)]
    for way in (*ways, lambda: fp8_cast_rows(x, FORMATS[0], 448.0, "both")):
        for (a, b), (c, d) in zip(way(), way(), strict=True):
            assert torch.equal(a.view(torch.uint8), c.view(torch.uint8)) and torch.equal(b, d)


@pytest.mark.parametrize("more", [0, 1])
def test_more_than_2_to_the_31_elements(more):
    m, k = 65536 + 16, 32768 + 8 + more
    x = torch.empty(m, k, dtype=torch.bfloat16, device=GPU).normal_()
    scale, amax = number(20.0), number(0.0)
    row, flip = fp8_cast(x, scale, FORMATS[0], amax, "both")
    alone, _ = fp8_cast(x, scale, FORMATS[0])
    assert amax == max(float(part.abs().max()) for part in x.split(4096))
    for start in range(0, m, 8192):
        expected = fp8_cast_ref(x[start : start + 8192], scale, FORMATS[0])
        same(row[start : start + 8192], expected)
        same(alone[start : start + 8192], expected)
        same(flip[:, start : start + 8192].contiguous(), expected.t().contiguous())
    assert torch.equal(fp8_transpose(row).view(torch.uint8), flip.view(torch.uint8))
    (row, scale_inv), (flip, flip_inverse) = fp8_cast_rows(x, FORMATS[0], 448.0, "both")
    for start in range(0, m, 8192):
        expected, inverses = fp8_cast_rows_ref(x[start : start + 8192], FORMATS[0], 448.0)
        same(row[start : start + 8192], expected)
        assert torch.equal(scale_inv[start : start + 8192], inverses)
    for start in range(0, k, 8192):
        expected, inverses = fp8_cast_rows_ref(x[:, start : start + 8192].t(), FORMATS[0], 448.0)
        same(flip[start : start + 8192], expected)
        assert torch.equal(flip_inverse[start : start + 8192], inverses)


@pytest.mark.parametrize("weights, k", [(False, 640), (True, 1024)])
def test_torch_multiplies_with_these_scales(weights, k):
    """1 x 128 times 1 x 128, or times 128 x 128 by fours, in the layouts that the GEMM asks for."""
    m, n = 256, 384
    x, w = torch.randn(m, k, device=GPU).bfloat16(), torch.randn(n, k, device=GPU).bfloat16()
    (a, a_inverse), _ = fp8_cast_blocks(x, FORMATS[0], False)
    (b, b_inverse), _ = fp8_cast_blocks(w, FORMATS[0], weights)
    y = torch._scaled_mm(a, b.t(), a_inverse, b_inverse.t(), out_dtype=torch.bfloat16)
    exact = fp8_decode(Fp8Matrix(a, a_inverse)).double() @ fp8_decode(Fp8Matrix(b, b_inverse)).double().t()
    assert (y.double() - exact).norm() < 4e-3 * exact.norm()

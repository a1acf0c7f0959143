"""Norms, gated units and AdamW with FP8 results, by the kernels, against float64: any shape and address."""

import pytest
import torch

from nanomegatron.ops.adamw import CHUNK
from nanomegatron.ops.dropout import kernel_arguments
from nanomegatron.ops.fp8_cast import FORMATS, fp8_cast_ref
from nanomegatron.ops.fp8_fused import gated_backward_fp8, gated_fp8, norm_fp8
from nanomegatron.ops.gelu import EXACT, SQUARED_RELU, TANH
from nanomegatron.ops.kernels import FLOATS, TYPES, kernels_unavailable, launch_kernel
from nanomegatron.ops.norm import NormFunction, norm_ref
from nanomegatron.ops.swiglu import GELU, SILU, gated_ref
from tests.ops.test_fp8_fused import (
    EPS,
    INF,
    NAN,
    adamw_case,
    biased_case,
    check_adamw,
    check_biased,
    check_gated,
    check_loss,
    check_norm,
    gated_case,
    loss_case,
    near,
    norm_case,
    unaligned,
    wanted,
)

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OUTPUTS = ("rowwise", "columnwise", "both")
E4M3, E5M2 = FORMATS
# Whole ones, kept in shared memory or too long for it (16 bits: over 7168, 14336 row-major); then odd ones.
NORMS = [(16, 8), (32, 64), (48, 264), (400, 1024), (4096, 4096), (176, 7168), (64, 8192), (32, 16384)]
NORMS += [
    (16, 32768),
    (17, 4096),
    (1, 8),
    (1, 1),
    (7, 130),
    (33, 67),
    (3, 40001),
    (900, 1025),
    (0, 64),
    (3, 0),
]
UNITS = [(128, 256), (16, 16), (4096, 2 * 1792), (144, 2 * 136), (5, 2 * 13), (2, 65, 48), (130, 2 * 131)]
UNITS += [(1, 2), (0, 16), (3, 0), (129, 2 * 128), (1000, 2 * 24), (300, 2 * 14336)]


def there(case):
    return tuple(None if x is None else x.to(GPU) for x in case)


def spec(dtype=E4M3, outputs="both", scale=37.5):
    return wanted(dtype, outputs, scale, device=GPU)


def same_bytes(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b is None or torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def test_the_kernels_are_there():
    assert kernels_unavailable(torch.device("cuda", torch.cuda.current_device())) == ""


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_norms(shape, kind, outputs):
    for i, (biased, add) in enumerate(((False, False), (False, True), (True, False), (True, True))):
        case = there(norm_case(*shape, kind, biased, add, wide=add != biased))
        if shape[1]:
            check_norm(case, add, spec(FORMATS[i % 2], outputs), also=i % 3 == 0)
        else:
            norm_fp8(*case, EPS, add, spec(FORMATS[i % 2], outputs))


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("h", [128, 1024, 4096])
def test_norms_of_views_that_are_not_aligned(h, kind):
    for add in (False, True):
        case = there(norm_case(48, h, kind, True, add))
        check_norm(tuple(map(unaligned, case)), False, spec(), also=True)
        check_norm((*case[:2], *map(unaligned, case[2:])), False, spec(), also=False)
    x = torch.randn(h, 48, device=GPU).to(kind).t()
    check_norm((x, None, case[2], None), True, spec(), also=True)


def test_a_large_mean():
    """The variance is of differences from the mean, not a difference of sums."""
    x, _, weight, bias = there(norm_case(64, 4096, torch.float32, True, False))
    x += 1000
    got = norm_fp8(x, None, weight, bias, EPS, False, wanted := spec(scale=10.0))
    exact = norm_ref(x.double(), weight.double(), bias.double(), EPS)
    near(got.rowwise, exact, wanted.scale, torch.float32, 1e-3)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("h", [128, 4096, 8192, 130])
def test_nan_and_inf_stay_in_their_row(h, biased):
    x, _, weight, bias = there(norm_case(64, h, torch.bfloat16, biased, False))
    clean = norm_fp8(x, None, weight, bias, EPS, False, spec())
    x[3, 5], x[17, h - 1], x[33, 0] = NAN, INF, -INF
    got = norm_fp8(x, None, weight, bias, EPS, False, wanted := spec())
    rows = torch.tensor([r for r in range(64) if r not in (3, 17, 33)], device=GPU)
    assert torch.equal(got.rowwise.view(torch.uint8)[rows], clean.rowwise.view(torch.uint8)[rows])
    assert torch.equal(got.columnwise.view(torch.uint8)[:, rows], clean.columnwise.view(torch.uint8)[:, rows])
    v = x.float()
    off = v - v.mean(-1, keepdim=True) if biased else v
    y = off * (off.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight + (bias if biased else 0)
    assert torch.equal(got.rowwise.float().isnan(), y.isnan()) and wanted.amax.isnan()


def test_saturation_and_amax_over_calls():
    x, _, weight, _ = there(norm_case(32, 256, torch.bfloat16, False, False))
    wanted = spec(scale=1e6)
    got = norm_fp8(x, None, weight, None, EPS, False, wanted)
    assert got.rowwise.float().abs().max() == 448 and not got.rowwise.float().isnan().any()
    first = wanted.amax.clone()
    norm_fp8(x / 2**20, None, weight * 0, None, EPS, False, wanted)
    assert wanted.amax == first  # the larger one stays


@pytest.mark.parametrize("h", [256, 4096])
def test_the_backward_takes_these_statistics(h):
    x, residual, weight, bias = there(norm_case(48, h, torch.bfloat16, True, True))
    got = norm_fp8(x, residual, weight, bias, EPS, False, spec(), also=True)
    leaves = [t.detach().requires_grad_() for t in (x, residual, weight, bias)]
    y, total = NormFunction.apply(*leaves, EPS, False)
    grad = torch.randn_like(x)
    y.backward(grad)
    dx, sums = torch.empty_like(x), torch.empty(2, 4, h, device=GPU)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
    sizes = 48, h, 4, 0, TYPES[x.dtype], TYPES[x.dtype]
    tensors = dx, None, dweight, dbias, None, sums, grad, None, got.total, got.rstd, got.mean, weight
    launch_kernel("norm_backward", *tensors, *sizes, *kernel_arguments(None))
    assert torch.equal(total, got.total)
    torch.testing.assert_close(got.out, y, rtol=2**-7, atol=2**-12)
    for ours, theirs in ((dx, leaves[0].grad), (dweight, leaves[2].grad), (dbias, leaves[3].grad)):
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("act", [TANH, EXACT, SQUARED_RELU])
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("shape", UNITS, ids=str)
def test_bias_and_activation(shape, kind, act, outputs):
    x, bias, grad = there(biased_case(shape, kind))
    for dtype in FORMATS:
        for each in bias, None:
            check_biased(x, each, grad, act, dtype, outputs)
    check_biased(*map(unaligned, (x, bias, grad)), act, outputs=outputs)


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("act", [SILU, GELU])
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("shape", UNITS, ids=str)
def test_gated_units(shape, kind, act, outputs):
    for dtype in FORMATS:
        check_gated(*there(gated_case(shape, kind)), act, dtype, outputs)


@pytest.mark.parametrize("kind", FLOATS)
def test_gated_units_of_views_that_are_not_aligned(kind):
    x, grad = there(gated_case((256, 512), kind))
    check_gated(unaligned(x), unaligned(grad), SILU)
    check_gated(x, unaligned(grad), GELU)


@pytest.mark.parametrize("act", [SILU, GELU])
@pytest.mark.parametrize("kind", FLOATS)
def test_gated_units_of_strange_numbers(kind, act):
    """No number where, and only where, torch in fp32 has none."""
    info = torch.finfo(kind)
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 88.0, -88.0, 1e4, -1e4, info.max, -info.max, info.tiny])
    values = torch.cat((values, torch.tensor([INF, -INF, NAN]))).to(GPU, kind)
    gate, up = torch.meshgrid(values, values.nan_to_num(1.0).clamp(-100, 100), indexing="ij")
    x = torch.cat((gate.flatten()[None], up.flatten()[None]), -1)
    wide = x.float().requires_grad_()
    y = gated_ref(wide, act)
    y.sum().backward()
    row, _ = gated_fp8(x, act, wanted := spec())
    assert torch.equal(row.float().isnan(), y.isnan()) and wanted.amax.isnan()
    finite = y.isfinite()
    near(row[finite], y.detach()[finite].double(), wanted.scale, kind, 1e-6)
    row, _ = gated_backward_fp8(torch.ones_like(x[:, : gate.numel()]), x, act, spec())
    assert torch.equal(row.float().isnan(), wide.grad.isnan())


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize(
    "shape", [(256, 50304, 50257), (1008, 4096, 4096), (130, 264, 257), (5, 13, 13)], ids=str
)
def test_gradients_of_losses(shape, kind, outputs):
    case = there(loss_case(*shape[:2], kind))
    check_loss(*case, shape[2], outputs=outputs)
    check_loss(unaligned(case[0]), *case[1:], shape[2], FORMATS[0], outputs)


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_adamw_with_a_copy_in_e4m3(offset):
    n = 3 * CHUNK + 77
    ranges = [(0, 5, 2), (5, CHUNK + 2, 0), (CHUNK + 3, CHUNK + 4, 3), (CHUNK + 9, CHUNK + 9, 0)]
    case = adamw_case(n, [*ranges, (CHUNK + 17, n - 3, 3)], offset, GPU)
    check_adamw(case)
    case = adamw_case(n, [*ranges, (CHUNK + 17, n - 3, 3)], offset, GPU)
    case[0].grads[3], case[0].main[CHUNK + 100] = NAN, INF
    check_adamw(case)


def test_the_same_bits_every_time():
    norm = there(norm_case(1008, 4096, torch.bfloat16, True, True))
    unit = there(gated_case((1008, 2 * 1032), torch.bfloat16))
    every = []
    for _ in range(3):
        wanted = [spec() for _ in range(3)]
        got = norm_fp8(*norm, EPS, False, wanted[0])
        now = [
            got.rowwise,
            got.columnwise,
            got.total,
            got.rstd,
            got.mean,
            *gated_fp8(unit[0], SILU, wanted[1]),
        ]
        now += [*gated_backward_fp8(unit[1], unit[0], SILU, wanted[2]), *(w.amax for w in wanted)]
        every.append(now)
        assert all(same_bytes(a, b) for a, b in zip(every[0], now, strict=True))


class Guarded:
    """Tensors between bands of a pattern, which must be there afterwards."""

    BAND = 4096

    def __init__(self):
        self.all = []

    def new(self, *shape, dtype):
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = torch.full((size + 2 * self.BAND,), 0x5A, dtype=torch.uint8, device=GPU)
        self.all.append((buffer, size))
        return buffer[self.BAND : self.BAND + size].view(dtype).view(shape)

    def check(self):
        for i, (buffer, size) in enumerate(self.all):
            outside = torch.cat([buffer[: self.BAND], buffer[self.BAND + size :]])
            assert outside.eq(0x5A).all(), f"tensor {i}: written outside"


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [s for s in NORMS if 0 < s[0] < 1000 and s[1]], ids=str)
def test_norms_write_nothing_outside(shape, kind):
    (rows, h), guarded = shape, Guarded()
    case = there(norm_case(rows, h, kind, True, True))
    row, flip = guarded.new(rows, h, dtype=E4M3), guarded.new(h, rows, dtype=E4M3)
    out, total = (guarded.new(rows, h, dtype=kind) for _ in range(2))
    rstd, mean = (guarded.new(rows, dtype=torch.float32) for _ in range(2))
    scale, amax = torch.ones((), device=GPU), guarded.new(1, dtype=torch.float32).zero_()
    types = 0, TYPES[kind], TYPES[kind], TYPES[E4M3]
    for pair in ((row, flip), (row, None), (None, flip)):
        launch_kernel("norm_fp8", *case, *pair, out, total, rstd, mean, scale, amax, rows, h, EPS, *types)
        guarded.check()
    assert same_bytes(row.t().contiguous(), flip)


@pytest.mark.parametrize("shape", [(144, 136), (130, 131), (256, 256), (5, 13)])
def test_gated_units_write_nothing_outside(shape):
    (rows, f), guarded = shape, Guarded()
    x, grad = there(gated_case((rows, 2 * f), torch.bfloat16))
    y, dx = ([guarded.new(*s, dtype=E4M3) for s in ((rows, k), (k, rows))] for k in (f, 2 * f))
    scale, amax = torch.ones((), device=GPU), guarded.new(1, dtype=torch.float32).zero_()
    kinds = rows, f, SILU, TYPES[x.dtype], TYPES[E4M3]
    for keep in (slice(0, 2), slice(0, 1), slice(1, 2)):
        some_y, some_dx = [None, None], [None, None]
        some_y[keep], some_dx[keep] = y[keep], dx[keep]
        launch_kernel("swiglu_fp8_forward", x, *some_y, scale, amax, *kinds)
        launch_kernel("swiglu_fp8_backward", grad, x, *some_dx, scale, amax, *kinds)
        guarded.check()
    assert same_bytes(y[0].t().contiguous(), y[1]) and same_bytes(dx[0].t().contiguous(), dx[1])


def test_more_than_two_to_the_31_elements():
    rows, h = 2**19 + 16, 4096 + 8
    x = torch.empty(rows, h, dtype=torch.bfloat16, device=GPU).normal_()
    weight = torch.randn(h, device=GPU).bfloat16()
    got = norm_fp8(x, None, weight, None, EPS, False, wanted := spec())
    for begin in (0, 2**18, 2**19 - 16):
        part = slice(begin, begin + 32)
        exact = norm_ref(x[part].double(), weight.double(), None, EPS)
        near(got.rowwise[part], exact, wanted.scale, x.dtype)
        near(got.columnwise[:, part].contiguous(), exact.t(), wanted.scale, x.dtype)
    del got
    x = x.view(rows * 2, h // 2)
    grad = torch.ones(rows * 2, h // 4, dtype=torch.bfloat16, device=GPU)
    y, dx = gated_fp8(x, SILU, wanted), gated_backward_fp8(grad, x, SILU, wanted)
    for begin in (0, 2**19, 2**20 - 16):
        part = slice(begin, begin + 32)
        wide = x[part].double().requires_grad_()
        exact = gated_ref(wide, SILU)
        exact.sum().backward()
        for pair, right in ((y, exact.detach()), (dx, wide.grad)):
            near(pair[0][part], right, wanted.scale, x.dtype)
            near(pair[1][:, part].contiguous(), right.t(), wanted.scale, x.dtype)


def test_the_bytes_of_a_norm_and_a_cast():
    """One kernel has the values and the amax of two, but where these norms round to another 16-bit number."""
    x, _, weight, _ = there(norm_case(512, 4096, torch.bfloat16, False, False))
    got = norm_fp8(x, None, weight, None, EPS, False, wanted := spec(scale=20.0), also=True)
    assert same_bytes(got.rowwise, fp8_cast_ref(got.out, wanted.scale, E4M3))
    assert wanted.amax == got.out.abs().max().float()
    plain = NormFunction.apply(x, None, weight, None, EPS, False)[0]
    assert (got.out != plain).double().mean() < 1e-4

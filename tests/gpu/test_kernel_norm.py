"""The kernels of cuda/norm*.cu against float64, with rows of every length that one of them is made for."""

import pytest
import torch

from nanomegatron.ops.dropout import kernel_arguments
from nanomegatron.ops.kernels import TYPES, kernels_unavailable, launch_kernel
from nanomegatron.ops.norm import NormFunction, add_norm, norm, norm_beside, norm_ref

CUDA = torch.device("cuda", 0)
EPS = 1e-5
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of the result alone
DTYPES = list(ROUNDING)

# Whole packs: lanes of a warp (2, 4, 8 packs a thread), blocks, one row and many, turns of the backward's
# ring. Then the plain kernels: odd lengths, one column, the longest.
SHAPES = [
    *[
        (1, 8),
        (5, 16),
        (37, 128),
        (300, 64),
        (20001, 128),
        (33, 256),
        (65, 512),
        (77, 520),
        (64, 1024),
        (4099, 768),
    ],
    *[
        (33, 1032),
        (19, 2048),
        (17, 2056),
        (40, 4096),
        (5000, 4096),
        (9, 5120),
        (13, 7168),
        (900, 8192),
        (5, 16384),
    ],
    *[
        (3, 32768),
        (700, 12288),
        (7, 1),
        (1, 1),
        (5, 3),
        (11, 130),
        (900, 67),
        (3, 4097),
        (2, 40001),
        (1500, 1025),
    ],
]


def close(ours, exact, what, sums=1.0, floor=0.0):
    """Off by the rounding of the result, and by fp32 arithmetic in proportion to the largest value."""
    assert ours.isfinite().all(), what
    info = torch.finfo(ours.dtype)
    floor += info.smallest_normal * info.eps  # of numbers that are not normal
    limit = ROUNDING[ours.dtype] * 1.01 * exact.abs() + 3e-6 * sums * exact.abs().max() + floor
    worst = ((ours.double() - exact).abs() / limit).max().item()
    assert worst <= 1, f"{what}: {worst} times the limit"


def tensors(rows, h, dtype, biased, wide=False, scale=1.0):
    """x, residual, weight, bias, dy, dtotal; the mean is not near 0."""
    kind = torch.float32 if wide else dtype
    x, residual, dy, dtotal = (torch.randn(rows, h, device=CUDA).to(dtype) for _ in range(4))
    x = ((x + 0.5) * scale).to(dtype)
    weight = (torch.randn(h, device=CUDA) * 0.5 + 1).to(kind)
    bias = torch.randn(h, device=CUDA).to(kind) if biased else None
    return x, residual, weight, bias, dy, dtotal


def ours(x, residual, weight, bias, dy, dtotal, from_one):
    """Outputs and gradients by the kernels."""
    assert kernels_unavailable(CUDA) == ""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, residual, weight, bias)]
    outs = NormFunction.apply(*leaves, EPS, from_one)
    outs = outs if residual is not None else outs[:1]
    torch.autograd.backward(outs, (dy, dtotal)[: len(outs)])
    return {
        "y": outs[0].detach(),
        "total": None if residual is None else outs[1].detach(),
        "dx": leaves[0].grad,
        "dresidual": None if residual is None else leaves[1].grad,
        "dweight": leaves[2].grad,
        "dbias": None if bias is None else leaves[3].grad,
    }


def exact(x, residual, weight, bias, dy, dtotal, from_one):
    """The same in float64, from the rounded sum."""
    total = x if residual is None else x + residual
    leaves = [None if t is None else t.double().requires_grad_() for t in (total, weight, bias)]
    y = norm_ref(*leaves, EPS, from_one)
    y.backward(dy.double())
    dx = leaves[0].grad + (0 if residual is None else dtotal.double())
    return {
        "y": y.detach(),
        "total": None if residual is None else total.double(),
        "dx": dx,
        "dresidual": None if residual is None else dx,
        "dweight": leaves[1].grad,
        "dbias": None if bias is None else leaves[2].grad,
    }


def compare(case, from_one=False):
    got, wanted = ours(*case, from_one), exact(*case, from_one)
    for what, value in got.items():
        assert (value is None) == (wanted[what] is None), what
        if value is not None:
            # a sum over rows is the sum of many errors, each in proportion to its term
            sums = max(1.0, case[0].shape[0] ** 0.5 / 8) if what in ("dweight", "dbias") else 1.0
            # a row of one value has nearly no dx: what is left of g - g
            close(value, wanted[what], what, sums, 1e-4 if case[0].shape[1] == 1 else 0.0)
    if case[1] is not None:
        assert torch.equal(got["total"], case[0] + case[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_match_float64(shape, dtype):
    """RMSNorm and LayerNorm, with and without the add, weights of both types."""
    for biased in (False, True):
        for add in (False, True):
            x, residual, *rest = tensors(*shape, dtype, biased, wide=add != biased)
            compare((x, residual if add else None, *rest), from_one=add)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 30.0, 1e4])
def test_tiny_and_huge_values(dtype, scale):
    for biased in (False, True):
        x, _, weight, bias, dy, dtotal = tensors(65, 1024, dtype, biased, scale=min(scale, 6e3))
        compare((x, None, weight, bias, dy, dtotal))


def test_a_large_mean():
    """The variance is of differences from the mean, not a difference of sums."""
    x, _, weight, bias, dy, dtotal = tensors(65, 1024, torch.float32, True)
    x += 1000
    got, wanted = (f(x, None, weight, bias, dy, dtotal, False) for f in (ours, exact))
    for what in ("y", "dx"):  # a value near 1000 has 6e-5 of rounding itself
        assert (got[what] - wanted[what]).abs().max() < 5e-4 * wanted[what].abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", [128, 1024, 4096])
def test_views_that_are_not_aligned(dtype, h):
    """Of x, residual and gradients (the plain kernels), of weights (copied), and ones not contiguous."""

    def off(t):
        base = torch.empty(t.numel() + 1, device=CUDA, dtype=t.dtype)
        base[1:] = t.flatten()
        return base[1:].view(t.shape)

    x, residual, weight, bias, dy, dtotal = tensors(37, h, dtype, True)
    compare((off(x), off(residual), off(weight), off(bias), off(dy), off(dtotal)))
    compare((x, residual, weight, bias, off(dy), dtotal))
    compare((x, off(residual), weight, None, dy, dtotal))
    compare((x, residual, off(weight), off(bias), dy, dtotal))
    flipped = torch.randn(h, 37, device=CUDA).to(dtype).t()
    compare((flipped, residual, weight, bias, dy[:1].expand(37, h), flipped))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(20001, 128), (600, 1024), (3000, 4096), (500, 16384), (300, 1025)], ids=str
)
def test_the_same_bits_twice(shape, dtype):
    case = tensors(*shape, dtype, True)
    first, second = (ours(*case, True) for _ in range(2))
    assert all(torch.equal(first[what], second[what]) for what in first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2000, 128), (60, 1024), (30, 4096), (33, 131)], ids=str)
def test_a_sum_apart_has_the_same_bits(shape, dtype):
    """As before a segment that is recomputed and before a stage: both gradients are added in the norm's."""
    for biased in (False, True):
        x, residual, weight, bias, dy, dtotal = tensors(*shape, dtype, biased)
        found = []
        for apart in (False, True):
            leaves = [t.clone().requires_grad_() for t in (x, residual, weight, bias) if t is not None]
            how = leaves[2], leaves[3] if biased else None, EPS
            if apart:
                y, total = norm_beside(leaves[0] + leaves[1], *how)
            else:
                y, total = add_norm(leaves[0], leaves[1], *how)
            found.append([y, total, *torch.autograd.grad((y, total), leaves, (dy, dtotal))])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("h", [128, 4096, 130])
def test_nan_and_inf_stay_in_their_row(h, biased):
    x, residual, weight, bias, dy, dtotal = tensors(70, h, torch.bfloat16, biased)
    clean = ours(x, residual, weight, bias, dy, dtotal, False)
    x[3, 5], x[17, h - 1], x[33, 0] = float("nan"), float("inf"), float("-inf")
    got = ours(x, residual, weight, bias, dy, dtotal, False)
    others = torch.tensor([r for r in range(70) if r not in (3, 17, 33)], device=CUDA)
    for what in ("y", "total", "dx"):
        assert torch.equal(got[what][others], clean[what][others]), what
    v = (x + residual).float()
    off = v - v.mean(-1, keepdim=True) if biased else v
    y = off * (off.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight + (bias if biased else 0)
    assert torch.equal(got["y"].isnan(), y.isnan())
    assert got["dx"][[3, 17, 33]].isnan().any(dim=1).all()
    assert got["dweight"].isnan().all() and (not biased or got["dbias"].isfinite().all())
    dy = dy.clone()
    dy[40, 2] = float("nan")
    got = ours(clean["total"], None, weight, bias, dy, dtotal, False)
    assert got["dx"][40].isnan().all() and got["dx"].isnan().sum() == h
    assert got["dweight"].isnan().sum() == 1 and got["dweight"][2].isnan()


def test_nothing_to_do():
    for shape in ((0, 64), (4, 0, 64), (0, 67)):
        x = torch.zeros(shape, device=CUDA, requires_grad=True)
        weight, bias = (torch.ones(shape[-1], device=CUDA, requires_grad=True) for _ in range(2))
        y = norm(x, weight, bias, EPS)
        y.sum().backward()
        assert y.shape == x.grad.shape == shape
        assert weight.grad.eq(0).all() and bias.grad.eq(0).all()
    x, weight = (
        torch.zeros(3, 0, device=CUDA, requires_grad=True),
        torch.zeros(0, device=CUDA, requires_grad=True),
    )
    norm(x, weight, None, EPS).sum().backward()
    assert x.grad.shape == (3, 0) and weight.grad.shape == (0,)


def test_an_output_that_nobody_uses():
    x, residual, weight, _, dy, dtotal = tensors(9, 256, torch.float32, False)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    add_norm(*leaves, None, EPS)[1].backward(dtotal)
    assert torch.equal(x.grad, dtotal) and torch.equal(residual.grad, dtotal) and weight.grad is None
    x.grad = residual.grad = None
    y, _ = add_norm(*leaves, None, EPS)
    y.backward(dy)
    wanted = exact(x.detach() + residual.detach(), None, weight.detach(), None, dy, None, False)
    close(x.grad, wanted["dx"], "dx")
    close(residual.grad, wanted["dx"], "dresidual")


def test_no_second_derivative():
    x = torch.randn(4, 64, device=CUDA, requires_grad=True)
    (grad,) = torch.autograd.grad(
        norm(x, torch.ones(64, device=CUDA), None, EPS).square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


class Guarded:
    """Tensors between bands of a pattern, which must be there afterwards."""

    BAND = 4096  # bytes before and after

    def __init__(self):
        self.all = []

    def new(self, *shape, dtype):
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = torch.full((size + 2 * self.BAND,), 0xA5, dtype=torch.uint8, device=CUDA)
        self.all.append((buffer, size))
        return buffer[self.BAND : self.BAND + size].view(dtype).view(shape)

    def check(self):
        for i, (buffer, size) in enumerate(self.all):
            outside = torch.cat([buffer[: self.BAND], buffer[self.BAND + size :]])
            assert outside.eq(0xA5).all(), f"tensor {i}: written outside"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] < 100], ids=str)
def test_nothing_is_written_outside(shape, dtype):
    rows, h = shape
    guarded, kind = Guarded(), TYPES[dtype]
    x, residual, weight, bias, dy, dtotal = tensors(rows, h, dtype, True)
    y, total, dx = (guarded.new(rows, h, dtype=dtype) for _ in range(3))
    rstd, mean = (guarded.new(rows, dtype=torch.float32) for _ in range(2))
    dweight, dbias = (guarded.new(h, dtype=dtype) for _ in range(2))
    for parts in (1, min(rows, 5), rows):  # fewer blocks than would like to run
        sums = guarded.new(2, parts, h, dtype=torch.float32)
        given = y, total, rstd, mean, x, residual, weight, bias, None
        launch_kernel("norm_forward", *given, rows, h, EPS, 0, kind, kind, *kernel_arguments(None))
        given = dx, None, dweight, dbias, None, sums, dy, dtotal, total, rstd, mean, weight
        launch_kernel("norm_backward", *given, rows, h, parts, 0, kind, kind, *kernel_arguments(None))
        guarded.check()
        wanted = exact(x, residual, weight, bias, dy, dtotal, False)
        for what, value in {"y": y, "total": total, "dx": dx, "dweight": dweight, "dbias": dbias}.items():
            close(value, wanted[what], what, floor=1e-4 if h == 1 else 0.0)
            if what != "total":
                value.fill_(7)


def test_more_than_two_to_the_31_elements():
    rows, h = 2**19 + 331, 4096
    x = torch.empty(rows, h, device=CUDA, dtype=torch.bfloat16).normal_().requires_grad_()
    weight = torch.randn(h, device=CUDA, requires_grad=True)
    y = norm(x, weight, None, EPS)
    y.backward(x.detach())
    dweight = torch.zeros(h, device=CUDA, dtype=torch.float64)
    for begin in [*range(0, rows, 2**15)]:
        part = x.detach()[begin : begin + 2**15].double()
        n = part * (part.square().mean(-1, keepdim=True) + EPS).rsqrt()
        dweight += (part * n).sum(0)
        if begin % 2**18 == 0:  # the first and the last, which are beyond 2^31, too
            wanted = exact(part.bfloat16(), None, weight.detach(), None, part.bfloat16(), None, False)
            close(y.detach()[begin : begin + 2**15], wanted["y"], f"y from row {begin}")
            close(x.grad[begin : begin + 2**15], wanted["dx"], f"dx from row {begin}")
    assert begin == 2**19
    close(weight.grad, dweight, "dweight", sums=8)

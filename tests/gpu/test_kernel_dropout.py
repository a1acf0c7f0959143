"""Bias, dropout and residual add, as one op and before a norm: the reference's mask, float64's values."""

import itertools

import pytest
import torch

from nanomegatron.ops.dropout import (
    BiasDropoutAddFunction,
    Dropout,
    bias_dropout_add_ref,
    kernel_arguments,
)
from nanomegatron.ops.kernels import TYPES, kernels_unavailable, launch_kernel
from nanomegatron.ops.norm import add_norm, norm, norm_beside
from tests.gpu.test_kernel_norm import DTYPES, EPS, Guarded, close, exact, tensors

CUDA = torch.device("cuda", 0)
# s, b, h: one pack, several rows a block, columns of several blocks, turns of the backward, odd rows
SHAPES = [(1, 1, 8), (5, 3, 16), (40, 2, 768), (300, 3, 64), (17, 4, 4096), (3, 2, 2056), (9, 1, 8200)]
SHAPES += [(7, 3, 5), (11, 1, 130), (2, 2, 4097), (1, 2, 1), (5, 1, 40001), (4096, 4, 768), (1030, 4, 4096)]
ANY = [*itertools.product((False, True), repeat=3)]  # bias, dropout, residual


def dropout(s, b, p=0.1, seed=5, site=3):
    """Of positions in any order, some below 0, and of samples from anywhere in a run."""
    positions = torch.randperm(s, device=CUDA) - s // 3
    return Dropout(p, seed, site, positions, torch.randperm(b, device=CUDA) * 2**33 + 11)


def randn(*shape, dtype):
    return torch.randn(shape, device=CUDA).to(dtype)


def gradients(outs, grads, *leaves):
    """Of the leaves; None where there is no leaf."""
    found = iter(torch.autograd.grad(outs, [t for t in leaves if t is not None], grads))
    return [None if t is None else next(found) for t in leaves]


def leaf(t, wanted=True):
    return t.detach().requires_grad_() if wanted else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, dtype):
    assert kernels_unavailable(CUDA) == ""
    x, residual, grad = (randn(*shape, dtype=dtype) for _ in range(3))
    bias, drop = randn(shape[-1], dtype=dtype), dropout(*shape[:2])
    for biased, dropped, added in ANY:
        case = leaf(x), leaf(bias, biased), leaf(residual, added)
        how = drop if dropped else None
        out = BiasDropoutAddFunction.apply(*case, how)
        dx, dbias, dresidual = gradients(out, grad, *case)
        wide = [None if t is None else leaf(t.double()) for t in case]
        wanted = bias_dropout_add_ref(*wide, how)
        found = gradients(wanted, grad.double(), *wide)
        close(out.detach(), wanted.detach(), "out")
        close(dx, found[0], "dx")
        assert not added or torch.equal(dresidual, grad)
        if biased:
            close(dbias, found[1], "dbias", max(1.0, (shape[0] * shape[1]) ** 0.5 / 8))


@pytest.mark.parametrize("p", [0.0, 1e-7, 0.1, 0.5, 0.999999])
@pytest.mark.parametrize("h", [768, 131])
def test_the_mask_is_the_references_to_the_bit(h, p):
    """Forward and backward, whatever the counters are; values are those of p to the last bit or two."""
    for seed, site in (0, 0), (1234, 25), (2**61, 7), (2**31 - 1, 1):
        drop = dropout(33, 4, p, seed, site)
        x = torch.ones(33, 4, h, device=CUDA, requires_grad=True)
        out = BiasDropoutAddFunction.apply(x, None, None, drop)
        (dx,) = torch.autograd.grad(out, x, torch.ones_like(x))
        kept = drop(torch.ones_like(x)) != 0
        assert torch.equal(out != 0, kept) and torch.equal(dx, out)
        torch.testing.assert_close(out[kept], (kept / (1 - p))[kept].float(), rtol=3e-7, atol=0)


def check_before_a_norm(shape, dtype, biased, x_biased, dropped):
    """add_norm with a bias of x, or dropout, or both."""
    s, b, h = shape
    x, residual, weight, bias, dy, dtotal = tensors(s * b, h, dtype, biased)
    x, residual, dy, dtotal = (t.view(shape) for t in (x, residual, dy, dtotal))
    x_bias, drop = randn(h, dtype=dtype) if x_biased else None, dropout(s, b) if dropped else None
    case = [None if t is None else leaf(t) for t in (x, residual, weight, bias, x_bias)]
    y, total = add_norm(*case[:4], EPS, True, case[4], drop)
    dx, dresidual, dweight, dbias, dx_bias = gradients((y, total), (dy, dtotal), *case)
    wide = (None if t is None else t.double() for t in (x, x_bias, residual))
    close(total.detach(), bias_dropout_add_ref(*wide, drop), "total")
    assert torch.equal(y, norm(total.detach(), weight, bias, EPS, True)), "not as recomputation has it"
    flat = total.detach().view(s * b, h), dy.view(s * b, h)
    wanted = exact(flat[0], None, weight, bias, flat[1], None, True)
    whole = wanted["dx"].view(shape) + dtotal.double()
    branch = dresidual.double()  # as it was rounded
    branch = branch if drop is None else drop(branch)
    floor, sums = 1e-4 if h == 1 else 0.0, max(1.0, (s * b) ** 0.5 / 8)
    close(y.detach().view(s * b, h), wanted["y"], "y")
    close(dx, branch, "dx", floor=floor)
    close(dresidual, whole, "dresidual", floor=floor)
    close(dweight, wanted["dweight"], "dweight", sums, floor)
    if biased:
        close(dbias, wanted["dbias"], "dbias", sums)
    if x_biased:
        close(dx_bias, branch.sum((0, 1)), "dx_bias", sums, 4 * floor)


# Lanes of a warp, teams, two packs a thread and four, more rows than blocks; the plain kernels.
BEFORE = [(1, 1, 8), (5, 3, 64), (40, 2, 768), (17, 2, 1032), (9, 2, 4096), (3, 3, 8192), (2, 2, 16384)]
BEFORE += [
    (7, 3, 5),
    (11, 1, 130),
    (2, 2, 4097),
    (1, 2, 32768),
    (4099, 3, 768),
    (500, 4, 4096),
    (300, 4, 1025),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", BEFORE, ids=str)
def test_before_a_norm(shape, dtype):
    for biased, x_biased, dropped in ANY:
        if x_biased or dropped:
            check_before_a_norm(shape, dtype, biased, x_biased, dropped)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300, 2, 128), (20, 3, 1024), (17, 1, 4096), (11, 3, 131)], ids=str)
def test_dropout_apart_has_the_same_bits(shape, dtype):
    """As at the end of a segment that is recomputed, whose sum is made there."""
    x, residual, dy, dtotal = (randn(*shape, dtype=dtype) for _ in range(4))
    weight, drop, found = randn(shape[-1], dtype=dtype), dropout(*shape[:2]), []
    for apart in (False, True):
        case = leaf(x), leaf(residual), leaf(weight)
        if apart:
            total = BiasDropoutAddFunction.apply(case[0], None, case[1], drop)
            y, total = norm_beside(total, case[2], None, EPS)
        else:
            y, total = add_norm(*case, None, EPS, False, None, drop)
        found.append([y, total, *torch.autograd.grad((y, total), case, (dy, dtotal))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", [64, 1024])
def test_views_that_are_not_aligned(dtype, h):
    """Of x, bias and residual, one of which is enough for the path of single values; and one with strides."""
    base = torch.randn(3 * 2 * h + 1, device=CUDA).to(dtype)
    x, shifted = base[:-1].view(3, 2, h), base[1:].view(3, 2, h)
    bias, drop = base[:h], dropout(3, 2)
    strided = x[..., :1].expand(3, 2, h)
    for given in (shifted, bias, x), (x, base[1 : h + 1], x), (x, bias, shifted), (strided, bias, x):
        wanted = bias_dropout_add_ref(*(t.double() for t in given), drop)
        close(BiasDropoutAddFunction.apply(*given, drop), wanted, "out")
        _, total = add_norm(given[0], given[2], base[:h], None, EPS, False, given[1], drop)
        close(total, wanted, "total")


def test_the_same_bits_twice():
    for shape in (300, 2, 64), (70, 2, 4096), (33, 1, 131):
        x, grad = (randn(*shape, dtype=torch.bfloat16) for _ in range(2))
        bias, drop = leaf(x[0, 0]), dropout(*shape[:2])
        for alone in (False, True):
            outs = [
                BiasDropoutAddFunction.apply(x, bias, None, drop)
                if alone
                else add_norm(x, x, x[-1, -1], None, EPS, False, bias, drop)[0]
                for _ in range(2)
            ]
            first, second = (torch.autograd.grad(out, bias, grad)[0] for out in outs)
            assert torch.equal(*outs) and torch.equal(first, second)


def test_what_is_not_a_number_stays_none_even_if_dropped():
    """As in the reference, where it is multiplied by 0."""
    x, drop = randn(6, 2, 64, dtype=torch.bfloat16), dropout(6, 2, 0.9)
    x[1, 1, 3], x[4, 0, 60:] = float("nan"), float("inf")
    found = BiasDropoutAddFunction.apply(x, None, x, drop)
    assert torch.equal(found.isnan(), bias_dropout_add_ref(x, None, x, drop).isnan())
    total = add_norm(x, x, x[0, 0].abs(), None, EPS, False, None, drop)[1]
    assert torch.equal(found.isnan(), total.isnan())


def test_the_sum_alone_and_nothing_to_do():
    x, residual, grad = (randn(6, 2, 64, dtype=torch.float32) for _ in range(3))
    case, drop = [leaf(x), leaf(residual), leaf(x[0, 0])], dropout(6, 2)
    total = add_norm(case[0], case[1], torch.ones(64, device=CUDA), None, EPS, False, case[2], drop)[1]
    dx, dresidual, dbias = torch.autograd.grad(total, case, grad)
    close(dx, drop(grad.double()), "dx")
    close(dbias, drop(grad.double()).sum((0, 1)), "dbias")
    assert torch.equal(dresidual, grad)
    for shape in (0, 2, 64), (3, 0, 5):
        empty, bias = torch.zeros(shape, device=CUDA, requires_grad=True), leaf(x[0, 0, : shape[-1]])
        out = BiasDropoutAddFunction.apply(empty, bias, None, dropout(*shape[:2]))
        out.sum().backward()
        assert out.shape == shape and bias.grad.eq(0).all()
        y, _ = add_norm(empty, empty, bias, None, EPS, False, bias, dropout(*shape[:2]))
        assert torch.autograd.grad(y.sum(), bias)[0].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3, 16), (20, 2, 64), (3, 2, 1032), (5, 1, 2056), (7, 3, 5)], ids=str)
def test_nothing_is_written_outside(shape, dtype):
    (s, b, h), kind, guarded = shape, TYPES[dtype], Guarded()
    rows, drop = s * b, dropout(s, b)
    x, residual, grad = (randn(rows, h, dtype=dtype) for _ in range(3))
    bias, how = randn(h, dtype=dtype), kernel_arguments(drop)
    y, total, dx, dropped = (guarded.new(rows, h, dtype=dtype) for _ in range(4))
    rstd, mean = (guarded.new(rows, dtype=torch.float32) for _ in range(2))
    dweight, dbias, dx_bias = (guarded.new(h, dtype=dtype) for _ in range(3))
    launch_kernel("bias_dropout_add", y, x, bias, residual, rows, h, kind, *how)
    guarded.check()
    for parts in (1, min(rows, 5), rows):
        one, three = (guarded.new(n, parts, h, dtype=torch.float32) for n in (1, 3))
        launch_kernel("bias_dropout_backward", dx_bias, dx, one, grad, rows, h, parts, kind, *how)
        guarded.check()
        wanted = drop(grad.double().view(shape))
        close(dx.view(shape), wanted, "dx")
        close(dx_bias, wanted.sum((0, 1)), "dbias")
        given = y, total, rstd, mean, x, residual, bias, bias, bias
        launch_kernel("norm_forward", *given, rows, h, EPS, 0, kind, kind, *how)
        given = dx, dropped, dweight, dbias, dx_bias, three, grad, None, total, rstd, mean, bias
        launch_kernel("norm_backward", *given, rows, h, parts, 0, kind, kind, *how)
        guarded.check()
        whole = exact(total, None, bias, bias, grad, None, False)["dx"].view(shape)
        close(dx.view(shape), whole, "dx")
        branch = drop(dx.double().view(shape))  # of dx as it was rounded
        close(dropped.view(shape), branch, "dropped")
        close(dx_bias, branch.sum((0, 1)), "dx_bias")


def test_more_than_two_to_the_31_elements():
    s, h = 2**19 + 331, 4096
    x = torch.ones(s, 1, h, device=CUDA, dtype=torch.bfloat16)
    drop = Dropout(0.5, 1, 1, torch.arange(s, device=CUDA), torch.zeros(1, dtype=torch.int64, device=CUDA))
    out = BiasDropoutAddFunction.apply(x, None, None, drop)
    for begin in (0, 2**19 - 64, s - 64):
        part = Dropout(0.5, 1, 1, drop.positions[begin : begin + 64], drop.sample_ids)
        assert torch.equal(out[begin : begin + 64], part(x[begin : begin + 64]))

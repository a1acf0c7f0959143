"""Routing tables to the bit, permute and unpermute by the kernels against float64, forward and backward."""

import pytest
import torch

from nanomegatron.ops.kernels import TYPES, kernels_unavailable, launch_kernel, without_kernels
from nanomegatron.ops.permute import Routing, permute, route, unpermute

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of the sum of |addends|
FIELDS = ("position", "source", "offsets", "counts")
# (tokens, k, experts, h): typical, odd widths, one column, no token, all kept by one expert
SIZES = [
    (512, 2, 8, 4096),
    (300, 8, 128, 2048),
    (100, 6, 64, 7168),
    (77, 5, 9, 131),
    (33, 3, 4, 1),
    (0, 2, 4, 64),
]
SIZES += [(9, 1, 1, 8), (64, 9, 16, 24), (16, 2, 4, 0), (5, 32, 256, 40)]


def ids_for(tokens: int, k: int, experts: int, dropped: bool = True) -> torch.Tensor:
    return torch.randint(-int(dropped), experts + int(dropped), (tokens, k), dtype=torch.int32, device=GPU)


def on_cpu(routing: Routing) -> Routing:
    return Routing(*(getattr(routing, field).cpu() for field in FIELDS))


def plainly(function, *args):
    """What plain torch gives, on the CPU."""
    moved = (on_cpu(a) if isinstance(a, Routing) else a for a in args)
    with without_kernels():
        return function(*(a.cpu() if isinstance(a, torch.Tensor) else a for a in moved))


def dense(routing: Routing, probs: torch.Tensor) -> torch.Tensor:
    """The matrix [rows, tokens] in float64 that permute multiplies with; unpermute, with its transpose."""
    rows = torch.zeros(len(routing.source), len(probs), dtype=torch.float64, device=probs.device)
    for t, row in enumerate(routing.position.tolist()):
        for j, place in enumerate(row):
            if place >= 0:
                rows[place, t] = probs[t, j]
    return rows


def near(found: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    """size: the same sum of absolute values."""
    assert found.shape == expected.shape and torch.isfinite(found).all()
    error = (found.double() - expected).abs()
    assert (error <= TOLERANCE[found.dtype] * size + 1e-7).all(), float(error.max())


def dots(x: torch.Tensor, z: torch.Tensor, routing: Routing) -> torch.Tensor:
    found = (x.double()[:, None] * z.double()[routing.position.long().clamp(min=0)]).sum(-1)
    return found * (routing.position >= 0)


def test_the_kernels_are_there():
    assert kernels_unavailable(torch.device("cuda", torch.cuda.current_device())) == ""


@pytest.mark.parametrize("multiple", [1, 16, 128])
@pytest.mark.parametrize("experts", [1, 3, 8, 128, 1000, 1024])
@pytest.mark.parametrize(
    "tokens, k", [(8192, 8), (1000, 2), (1025, 1), (1, 1), (31, 3), (0, 2), (128, 8), (40000, 6)]
)
def test_tables(tokens, k, experts, multiple):
    for dropped in (False, True):
        ids = ids_for(tokens, k, experts, dropped)
        ours, theirs = route(ids, experts, multiple), plainly(route, ids, experts, multiple)
        for field in FIELDS:
            assert torch.equal(getattr(ours, field).cpu(), getattr(theirs, field)), field


@pytest.mark.parametrize("expert", [0, 7, -1, 8, 2**31 - 1, -(2**31)])
def test_all_to_one_expert_or_to_none(expert):
    ids = torch.full((5000, 2), expert, dtype=torch.int32, device=GPU)
    ours, theirs = route(ids, 8, 16), plainly(route, ids, 8, 16)
    for field in FIELDS:
        assert torch.equal(getattr(ours, field).cpu(), getattr(theirs, field)), field


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", SIZES)
def test_against_float64(sizes, dtype, weighed):
    tokens, k, experts, h = sizes
    routing = route(ids_for(tokens, k, experts), experts, 16)
    rows = len(routing.source)
    probs = torch.rand(tokens, k, device=GPU) - 0.3 if weighed else None
    matrix = dense(routing, torch.ones(tokens, k, device=GPU) if probs is None else probs)
    x, dy = (torch.randn(tokens, h, device=GPU).to(dtype) for _ in range(2))
    z, dout = (torch.randn(rows, h, device=GPU).to(dtype) for _ in range(2))
    for function, value, grad, forward in ((permute, x, dout, matrix), (unpermute, z, dy, matrix.t())):
        given = [value.requires_grad_()] + ([probs.requires_grad_()] if weighed else [])
        out = function(value, routing, probs)
        grads = torch.autograd.grad(out, given, grad)
        again = torch.autograd.grad(function(value, routing, probs), given, grad)
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True)), "the same bits every time"
        value = value.detach().double()
        near(out, forward @ value, forward.abs() @ value.abs())
        near(grads[0], forward.t() @ grad.double(), forward.t().abs() @ grad.double().abs())
        if weighed and rows:
            a, b = (value, grad) if function is permute else (grad, value)
            expected, size = dots(a, b, routing), dots(a.abs(), b.abs(), routing)
            assert ((grads[1].double() - expected).abs() <= 1e-6 * size + 1e-7).all()
        if function is permute:
            assert (out[routing.source < 0] == 0).all(), "padding"


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_views_that_are_not_aligned(dtype):
    routing, probs = route(ids_for(50, 3, 4), 4, 8), torch.rand(50, 3, device=GPU)
    for function, rows in ((permute, 50), (unpermute, len(routing.source))):
        data = torch.randn(rows * 64 + 1, device=GPU).to(dtype)
        given = data[1:].view(rows, 64)
        turned = data[:-1].view(64, rows).t()
        for value in (given, turned):
            assert torch.equal(function(value, routing, probs), function(value.clone(), routing, probs))


def test_strange_numbers_stay_where_they_are():
    """NaN and infinity, of a token or of a probability, reach its own copies alone, as in torch."""
    routing = route(ids_for(40, 2, 4, False), 4, 8)
    x, probs = torch.randn(40, 16, device=GPU), torch.rand(40, 2, device=GPU)
    x[3], x[5, 1], x[7] = float("nan"), float("inf"), 3e38
    probs[9, 0], probs[11, 1] = float("nan"), float("inf")
    x[13], probs[13] = float("inf"), 0.0
    for function, value in ((permute, x), (unpermute, permute(x, routing))):
        ours, theirs = function(value, routing, probs), plainly(function, value, routing, probs)
        torch.testing.assert_close(ours.cpu(), theirs, equal_nan=True)


@pytest.mark.parametrize("h", [64, 37])
def test_nothing_beside_the_outputs_is_written(h):
    tokens, k, experts, band = 70, 3, 5, 1024
    ids = ids_for(tokens, k, experts)
    expected = route(ids, experts, 16)
    rows = len(expected.source)

    def guarded(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        size = torch.Size(shape).numel()
        whole = torch.full((size + 2 * band,), -77, dtype=dtype, device=GPU)
        return whole, whole[band : band + size].view(shape)

    shapes = [(tokens, k), (rows,), (experts + 1,), (experts,), (experts,)]
    tables = [guarded(*shape, dtype=torch.int32) for shape in shapes]
    launch_kernel("moe_route", ids, *(inner for _, inner in tables), tokens * k, experts, 16, rows)
    for field, (_, inner) in zip(FIELDS, tables, strict=False):
        assert torch.equal(inner, getattr(expected, field)), field
    x, z = torch.randn(tokens, h, device=GPU), torch.randn(rows, h, device=GPU)
    probs = torch.rand(tokens, k, device=GPU)
    outs = [guarded(rows, h), guarded(tokens, k), guarded(tokens, h), guarded(tokens, k)]
    out, dprobs, y, others = (inner for _, inner in outs)
    position, source, kind = expected.position, expected.source, TYPES[x.dtype]
    launch_kernel("moe_permute", x, out, probs, position, source, z, dprobs, tokens, k, rows, h, kind)
    launch_kernel("moe_unpermute", z, y, probs, position, x, others, tokens, k, h, kind)
    for whole, inner in (*tables, *outs):
        assert (whole[:band] == -77).all() and (whole[-band:] == -77).all()
        assert (inner != -77).all()
    torch.testing.assert_close(dprobs, others, rtol=1e-4, atol=1e-4)


def test_more_than_2_to_the_31_elements():
    tokens, k, h = 140_000, 2, 8192 + 8
    routing = route(ids_for(tokens, k, 8, False), 8, 128)
    x = torch.empty(tokens, h, dtype=torch.bfloat16, device=GPU).normal_()
    out = permute(x, routing)
    assert out.numel() > 2**31
    source = routing.source.long()
    for start in range(0, len(source), 16384):
        part = source[start : start + 16384]
        expected = x[part.clamp(min=0) // k] * (part >= 0)[:, None]
        assert torch.equal(out[start : start + 16384], expected)
    assert torch.equal(unpermute(out, routing, torch.full((tokens, k), 0.5, device=GPU)), x)

"""Embedding by the kernels against float64: rows that are looked up, and gradients added to their rows."""

import contextlib

import pytest
import torch
from torch import nn

from nanomegatron.config.settings import ParallelConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.ops.embedding import TOKENS_A_PART, add_position_grad_, add_word_grad_, lookup, lookup_ref
from nanomegatron.ops.kernels import TYPES, kernels_unavailable, launch_kernel, without_kernels
from nanomegatron.param import Init, ParamSpec, new_parameter, replica
from nanomegatron.tp import VocabParallelEmbedding
from tests.gpu.test_kernel_norm import Guarded

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FP32, BF16, FP16 = DTYPES = torch.float32, torch.bfloat16, torch.float16
ONE = Axis.single()
ROUNDING = {FP32: 2.0**-24, BF16: 2.0**-8, FP16: 2.0**-11}
# s, b, h, rows: of GPT-2, of Llama, odd widths, one column, one token, none
SHAPES = [(1024, 8, 768, 50304), (512, 4, 4096, 32000), (77, 5, 131, 50), (129, 3, 1, 9), (1, 1, 8, 1)]
SHAPES += [(0, 3, 16, 4), (40, 1, 1032, 12), (9, 7, 4, 300)]
KINDS = ["random", "one", "runs", "none"]


def ids_for(kind: str, s: int, b: int, rows: int) -> torch.Tensor:
    """int64 [b, s]; random: a third are other ranks'; runs: around the limits of parts; none: no own id."""
    n = s * b
    ids = torch.randint(-rows // 4 - 1, rows + rows // 4 + 1, (n,))
    if kind == "one":
        ids = torch.full((n,), rows // 2)
    elif kind == "none":
        ids = torch.where(ids < 0, ids, ids + rows)
    elif kind == "runs":
        sizes = [
            TOKENS_A_PART - 1,
            1,
            1,
            TOKENS_A_PART,
            2 * TOKENS_A_PART + 1,
            3,
            TOKENS_A_PART - 2,
            5 * TOKENS_A_PART,
            1,
        ]
        runs = [torch.full((size,), i % rows) for i, size in enumerate(sizes)]
        ids = torch.cat([*runs, ids])[:n][torch.randperm(n)]
    return ids.view(b, s).to(GPU)


def normal(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape, device=GPU).to(dtype)


def places_for(packed: bool, s: int, b: int, count: int) -> torch.Tensor:
    """[b, s] with repeats, or [s], all different and in any order."""
    if packed:
        return torch.randint(count, (b, s), device=GPU)
    return torch.randperm(count, device=GPU)[:s]


def test_the_kernels_are_there():
    assert kernels_unavailable(torch.device("cuda", torch.cuda.current_device())) == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_lookup(shape, dtype):
    """As float64 rounded after each operation, which are the bits of plain torch."""
    s, b, h, rows = shape
    ids, table, positions = (
        ids_for("random", s, b, rows),
        normal(rows, h, dtype=dtype),
        normal(s + 3, h, dtype=dtype),
    )
    for first, scale in ((0, 1.0), (rows // 3, 11.3125)):
        local = ids.t() - first
        here = (local >= 0) & (local < rows)
        words = (table.double()[local.clamp(0, rows - 1)] * scale).to(dtype).double()
        for places in (None, places_for(False, s, b, s + 3), places_for(True, s, b, s + 3)):
            added = words
            if places is not None:
                added = words + positions.double()[places[:, None] if places.dim() == 1 else places.t()]
            given = ids, table, first, scale, None if places is None else positions, places
            found = lookup(*given)
            assert torch.equal(found, added.to(dtype).where(here[..., None], 0.0))
            assert torch.equal(found, lookup_ref(*given))


def check_sum(before, found, rows, grad, kind):
    """found: before, with grad of type `kind`, `[..., h]`, added to its rows `[t]`, -1 for none."""
    own = rows >= 0
    rows, wide = rows[own], grad.flatten(0, -2)[own].to(kind).double()
    exact = before.double().index_add(0, rows, wide)
    size = before.double().abs().index_add(0, rows, wide.abs())
    error = (found.double() - exact).abs()
    # fp32 sums of up to 1000 tokens, in parts, and one rounding to the type of the target
    assert (error <= (2.0**-18 + ROUNDING[found.dtype]) * size + 1e-7).all(), float(error.max())
    untouched = torch.ones(len(before), dtype=torch.bool, device=before.device)
    untouched[rows] = False
    assert torch.equal(found[untouched], before[untouched])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_word_gradients(shape, dtype, kind):
    s, b, h, rows = shape
    ids, grad = ids_for(kind, s, b, rows), normal(s, b, h, dtype=dtype)
    for first, into in ((0, FP32), (1, dtype), (0, BF16)):
        before = normal(rows, h, dtype=into)
        found, again = before.clone(), before.clone()
        with torch.no_grad():
            add_word_grad_(found, ids, grad, first)
            add_word_grad_(again, ids, grad, first)
        assert torch.equal(found, again), "the same bits every time"
        local = (ids.t() - first).flatten()
        kept = local.where((local >= 0) & (local < rows), -1)
        check_sum(before, found, kept, grad, dtype if into is FP32 else into)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_position_gradients(shape, dtype):
    s, b, h, _ = shape
    grad = normal(s, b, h, dtype=dtype)
    repeated = torch.arange(s, device=GPU) % 3
    for places in (places_for(False, s, b, s + 5), places_for(True, s, b, s + 5), repeated):
        before = normal(s + 5, h)
        found, again = before.clone(), before.clone()
        with torch.no_grad():
            add_position_grad_(found, places, grad)
            add_position_grad_(again, places, grad)
        assert torch.equal(found, again), "the same bits every time"
        rows = places[:, None].expand(s, b) if places.dim() == 1 else places.t()
        check_sum(before, found, rows.flatten(), grad, dtype)


def test_a_hot_id_is_added_in_parts():
    """Sums of ones are exact below 2^24, however they are split; the others of the row stay."""
    for n in (
        TOKENS_A_PART - 1,
        TOKENS_A_PART,
        TOKENS_A_PART + 1,
        2 * TOKENS_A_PART,
        40 * TOKENS_A_PART + 7,
        300 * TOKENS_A_PART,
    ):
        target = torch.ones(3, 8, device=GPU)
        with torch.no_grad():
            add_word_grad_(
                target, torch.ones(1, n, dtype=torch.int64, device=GPU), torch.ones(n, 1, 8, device=GPU)
            )
        assert target.tolist() == [[1.0] * 8, [n + 1.0] * 8, [1.0] * 8]


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_that_are_not_aligned(dtype):
    ids, data = ids_for("runs", 150, 3, 20), normal(450 * 64 + 1, dtype=dtype)
    table, room = normal(20 * 64 + 1, dtype=dtype), torch.zeros(20 * 64 + 1, device=GPU)
    shifted = table[1:].view(20, 64)
    assert torch.equal(lookup(ids, shifted), lookup(ids, shifted.clone()))
    turned = table[:-1].view(64, 20).t()
    assert torch.equal(lookup(ids.t().contiguous().t(), turned), lookup(ids, turned.clone()))
    grad, plain = data[1:].view(150, 3, 64), torch.zeros(20, 64, device=GPU)
    with torch.no_grad():
        add_word_grad_(plain, ids, grad.clone())
        for target, given in ((torch.zeros_like(plain), grad), (room[1:].view(20, 64), grad.clone())):
            add_word_grad_(target, ids, given)
            assert torch.equal(target, plain)


def test_strange_numbers_stay_in_their_rows():
    ids = ids_for("random", 200, 2, 6)
    grad, target = normal(200, 2, 16), torch.zeros(6, 16, device=GPU)
    grad[(ids == 3).t()] = float("nan")
    grad[((ids < 0) | (ids >= 6)).t()] = float("inf")
    with torch.no_grad():
        add_word_grad_(target, ids, grad)
    assert target[3].isnan().all() and target[[0, 1, 2, 4, 5]].isfinite().all()
    table = normal(6, 16)
    table[2] = float("nan")
    found = lookup(ids, table, -100)
    assert torch.equal(found, torch.zeros_like(found)), "a rank without these ids"


@pytest.mark.parametrize("h", [64, 37])
def test_nothing_beside_the_outputs_is_written(h):
    s, b, rows, n = 70, 3, 11, 210
    ids, grad, table = ids_for("runs", s, b, rows), normal(s, b, h), normal(rows, h)
    guarded, parts = Guarded(), -(-n // TOKENS_A_PART)
    out, sums = guarded.new(s, b, h, dtype=FP32), guarded.new(parts, 2, h, dtype=FP32)
    target = guarded.new(rows, h, dtype=FP32)
    target.zero_()
    order = (ids.t().flatten()).sort(stable=True)
    launch_kernel("embedding_lookup", out, table, None, ids, None, s, b, h, rows, 0, 0, 0, 1.0, TYPES[FP32])
    keys = order.values.int()
    launch_kernel("embedding_add", target, sums, grad, keys, order.indices, n, 1, rows, h, 0, TYPES[FP32])
    guarded.check()
    assert torch.equal(out, lookup_ref(ids, table))


class Words(nn.Module):
    """Word and position embeddings, with gradients in a bucket."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        init = Init(dtype=dtype, device=GPU, std=0.5)
        self.words = VocabParallelEmbedding(50, 64, 24, ONE, init.at("words"))
        spec = ParamSpec((replica("positions", (40, 24), ONE),), (40, 24))
        self.positions = new_parameter(spec, init)
        self.buckets = ParamAndGradBuckets(self, ParallelConfig(), Mesh())

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.words(ids, 1.0, self.positions, places)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_a_model(dtype):
    """Kernels and plain torch give the same result and, but for the order of additions, main_grads."""
    ids, found = ids_for("random", 40, 3, 50).clamp(0, 49), []
    for plain in (False, True):
        model = Words(dtype)
        with without_kernels() if plain else contextlib.nullcontext():
            for places in (torch.arange(40, device=GPU), ids % 40):
                model.buckets.zero_grad_buffer()
                y = model(ids, places)
                y.backward((torch.arange(y.numel(), device=GPU) % 7 - 3).view(y.shape).to(dtype))
                model.buckets.finish_grad_sync()
                found += [(y.detach(), *(p.main_grad.clone() for p in model.parameters()))]
    for ours, theirs in ((found[0], found[2]), (found[1], found[3])):
        assert torch.equal(ours[0], theirs[0])
        for a, b in zip(ours, theirs, strict=True):  # small whole numbers, that any order adds exactly
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_graph_captures_both_passes():
    """Replayed with other ids and places: the bits of eager calls."""
    model, places = Words(BF16), places_for(True, 40, 3, 40)
    ids, grad = ids_for("random", 40, 3, 50), normal(40, 3, 24, dtype=BF16)

    def step() -> torch.Tensor:
        model.buckets.zero_grad_buffer()
        y = model(ids, places)
        y.backward(grad)
        return y

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for kind in ("one", "runs", "random"):
        ids.copy_(ids_for(kind, 40, 3, 50))
        places.copy_(places_for(True, 40, 3, 40))
        graph.replay()
        found = [captured.clone(), *(p.main_grad.clone() for p in model.parameters())]
        expected = [step(), *(p.main_grad for p in model.parameters())]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), kind


def test_more_than_2_to_the_31_elements():
    s, b, h, rows = 70_000, 4, 8192, 9
    ids = torch.arange(s * b, device=GPU).view(b, s) % rows
    table = normal(rows, h, dtype=BF16)
    out = lookup(ids, table)
    assert out.numel() > 2**31
    for at in (0, s // 2, s - 1):
        assert torch.equal(out[at], table[ids[:, at]])
    target = torch.zeros(rows, h, device=GPU)
    with torch.no_grad():
        add_word_grad_(target, ids, out.fill_(1.0))
    assert torch.equal(target[:, 0], ids.flatten().bincount().float()) and (target == target[:, :1]).all()

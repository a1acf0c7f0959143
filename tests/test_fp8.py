"""FP8 recipes: matmuls against float64 and error bounds, scales by hand and on two ranks, what is kept."""

import pytest
import torch

from nanomegatron import fp8
from nanomegatron.checkpoint.fp8_state import fp8_state, load_fp8_state
from nanomegatron.fp8 import E4M3, E5M2, RECIPES, Delayed, Fp8LayerState, Recipe, Scales
from nanomegatron.mesh import Axis
from nanomegatron.ops import fp8_cast as ops_fp8_cast
from nanomegatron.ops.fp8_cast import Fp8Matrix, fp8_decode
from nanomegatron.ops.fp8_matmul import _torch_scale, fp8_matmul
from tests.spmd import run_spmd

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")
UNIT = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17)}  # of a value, and near zero at scale 1


def new(name, *axes, others=(), **more):
    """Scales with a layer fc1, before the `others`, and that."""
    recipe = Recipe(RECIPES[name], **more)
    layers = [Fp8LayerState(layer, recipe) for layer in ("fc1", *others)]
    return Scales(recipe, layers, CPU, axes), layers[0]


def same(a, b):
    """Equal to the bit."""
    assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
    assert torch.equal(a.scale_inv, b.scale_inv)


def limit_of_error(x, cast):
    """The largest error that docs/fp8.md allows each value, in float64."""
    unit, least = UNIT[cast.data.dtype]
    scale = fp8_decode(Fp8Matrix(torch.ones_like(cast.data), cast.scale_inv)).double()
    return torch.maximum(unit * x.abs(), least * scale) * (1 + 2**-20)  # the scale is fp32, too


def operands(name, gradient=E5M2, shape=(48, 160, 32)):
    """x `[t, i]`, W `[o, i]` and g `[t, o]` with their casts, of values that differ in size."""
    t, i, o = shape
    scales, layer = new(name, gradient=gradient)
    x, w, g = torch.randn(t, i) * torch.rand(t, 1), 0.02 * torch.randn(o, i), 1e-4 * torch.randn(t, o)
    for _ in range(2):  # delayed: the second time with the scales of the first
        scales.end_step()
        casts = layer.x.quantize(x), layer.weight(w), layer.g.quantize(g)
    return (x, w, g), casts


PRODUCTS = {
    "y": lambda x, w, g: (x[0], w[0]),
    "dx": lambda x, w, g: (g[0], w[1]),
    "dw": lambda x, w, g: (g[1], x[1]),
}


@pytest.mark.parametrize("gradient", [E4M3, E5M2])
@pytest.mark.parametrize("name", RECIPES)
def test_matmuls_against_float64(name, gradient):
    """Exact for what was cast, but for the sum in fp32 and the result's rounding; else within the bound."""
    originals, casts = operands(name, gradient)
    both = [(value, value.t()) for value in originals]
    for which, pick in PRODUCTS.items():
        (a, b), (x, y) = pick(*casts), [value.double() for value in pick(*both)]
        assert a.data.is_contiguous() and b.data.is_contiguous()
        assert a.data.dtype == (E4M3 if which == "y" else gradient) and b.data.dtype == E4M3
        p, q = fp8_decode(a).double(), fp8_decode(b).double()
        error_a, error_b = limit_of_error(x, a), limit_of_error(y, b)
        assert ((p - x).abs() <= error_a).all() and ((q - y).abs() <= error_b).all()
        summed = len(p[0]) * 2.0**-24 * (p.abs() @ q.abs().t())
        bound = error_a @ y.abs().t() + x.abs() @ error_b.t() + error_a @ error_b.t()
        for dtype, rounding in (torch.float32, 2.0**-23), (torch.bfloat16, 2.0**-8):
            found, exact = fp8_matmul(a, b, dtype), p @ q.t()
            assert found.dtype == dtype
            assert ((found - exact).abs() <= summed + rounding * exact.abs()).all()
            assert ((found - x @ y.t()).abs() <= bound + summed + rounding * exact.abs()).all()
        assert torch.equal(fp8_matmul(a, b, torch.float32, fast=True), fp8_matmul(a, b, torch.float32))
        share = (exact - x @ y.t()).norm() / (x @ y.t()).norm()
        assert share < (0.045 if a.data.dtype == E4M3 else 0.07)  # far less than the bound, as signs vary


def test_scales_of_each_kind():
    """Shapes of inverses, and whose largest value reaches the format's."""
    (x, w, g), casts = operands("tensorwise")
    for value, cast, dtype in zip((x, w, g), casts, (E4M3, E4M3, E5M2), strict=True):
        assert cast.rowwise.scale_inv.shape == () and cast.rowwise.scale_inv == cast.columnwise.scale_inv
        torch.testing.assert_close(cast.rowwise.scale_inv, value.abs().max() / torch.finfo(dtype).max)
        assert cast.rowwise.data.float().abs().max() == torch.finfo(dtype).max
    (x, w, g), casts = operands("rowwise")
    for value, cast, dtype in zip((x, w, g), casts, (E4M3, E4M3, E5M2), strict=True):
        for original, copy in (value, cast.rowwise), (value.t(), cast.columnwise):
            assert copy.scale_inv.shape == (len(original), 1)
            least = original.abs().amax(1, keepdim=True) / torch.finfo(dtype).max
            assert torch.equal(copy.scale_inv, least.log2().ceil().exp2())
    (x, w, g), casts = operands("blockwise", shape=(48, 160, 256))
    shapes = [(48, 2), (160, 1), (2, 2), (2, 2), (48, 2), (256, 1)]
    assert [tuple(copy.scale_inv.shape) for cast in casts for copy in cast] == shapes
    assert casts[0].rowwise.scale_inv.t().is_contiguous()


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "delayed"])
def test_a_margin_leaves_room(name):
    scales, layer = new(name, margin=3)
    for _ in range(2):
        cast = layer.x.quantize(torch.full((2, 4), 3.5), "rowwise")
        scales.end_step()
    assert (
        cast.rowwise.data.float().unique() == 56.0
        and cast.rowwise.scale_inv.unique() == 0.0625
        and cast.columnwise is None
    )
    assert torch.equal(fp8_decode(cast.rowwise), torch.full((2, 4), 3.5))


# Of x, E4M3, two microbatches a step: the amaxes, then the scale that the next step has, for each way.
STEPS = [
    #  microbatches    recent 1    recent 3    max 3       max 3, margin 1
    ((3.5, 7.0), (448 / 7, 448 / 7, 448 / 7, 224 / 7)),
    ((14.0, 0.0), (448 / 14, 448 / 14, 448 / 14, 224 / 14)),
    ((0.0, 0.0), (448 / 14, 448 / 14, 448 / 14, 224 / 14)),  # zeros: recent keeps, max has the 14 still
    ((1.75, INF), (448 / 14, 448 / 14, 448 / 14, 224 / 14)),  # not finite: kept by all, and forgotten
    ((3.5, 1.0), (448 / 3.5, 448 / 3.5, 448 / 3.5, 224 / 3.5)),  # the 14 has left
    ((NAN, 28.0), (448 / 3.5, 448 / 3.5, 448 / 3.5, 224 / 3.5)),
    ((1.0, 1.75), (448 / 1.75, 448 / 1.75, 448 / 3.5, 224 / 3.5)),
    ((1.0, 1.0), (448.0, 448.0, 448 / 1.75, 224 / 1.75)),
    ((0.0, 0.0), (448.0, 448.0, 448 / 1.75, 224 / 1.75)),
    ((0.0, 0.0), (448.0, 448.0, 448.0, 224.0)),
    ((0.0, 0.0), (448.0, 448.0, 448.0, 224.0)),  # an empty history keeps the scale
]
WAYS = [
    {},
    {"amax_history_len": 3},
    {"amax_history_len": 3, "amax_compute_algo": "max"},
    {"amax_history_len": 3, "amax_compute_algo": "max", "margin": 1},
]


@pytest.mark.parametrize("way", range(4))
def test_a_history_by_hand(way):
    scales, layer = new("delayed", others=["another"], **WAYS[way])
    scales.has_history = True  # as after a step without amaxes
    scale = 1.0
    for amaxes, following in STEPS:
        for amax in amaxes:
            x = torch.tensor([[amax / 2, -amax]])
            for _ in range(2):  # a recomputed forward changes nothing, nor does an evaluation
                layer.x.quantize(1e3 * x, record=False)
                cast = layer.x.quantize(x).rowwise
                assert cast.scale_inv == 1 / torch.tensor(scale)
                expected = (x * scale).clamp(-448, 448).to(E4M3)
                assert torch.equal(cast.data.float().nan_to_num(9.0), expected.float().nan_to_num(9.0))
        scales.end_step()
        scale = following[way]
        assert scales.scale.tolist() == [scale, 1.0, 1.0, 1.0, 1.0, 1.0]
        assert (scales.scale_inv == 1 / scales.scale[:, None]).all() and scales.scale_inv.shape == (6, 4)


def test_the_first_step_casts_as_tensorwise_does():
    """It has no amaxes of earlier steps; those of its microbatches count for the next one, as always."""
    scales, layer = new("delayed", margin=1)
    batches = torch.randn(3, 8, 8) * 1e-6
    for x in batches:
        same(layer.g.quantize(x).rowwise, new("tensorwise", margin=1)[1].g.quantize(x).rowwise)
        layer.g.quantize(1e3 * x, record=False)
    scales.end_step()
    assert scales.has_history and scales.scale[2] == 57344 / 2 / batches.abs().max()
    again = new("delayed", margin=1)[0]
    load_fp8_state(again, fp8_state(new("delayed", margin=1)[0]))
    assert not again.has_history, "a run in 16 bits has no amaxes"
    load_fp8_state(again, fp8_state(scales))
    assert again.has_history


def test_gradients_have_their_own_limit():
    scales, layer = new("delayed", margin=1)
    layer.g.quantize(torch.full((1, 1), 7.0), "rowwise")
    layer.w.quantize(torch.full((1, 1), 14.0), "rowwise")
    scales.end_step()
    assert scales.scale.tolist() == [1.0, 16.0, 4096.0]


@pytest.mark.parametrize("name", RECIPES)
def test_weights_are_cast_once_a_step(name, monkeypatch):
    kernel, casts = {"rowwise": "fp8_cast_rows", "blockwise": "fp8_cast_blocks"}.get(name, "fp8_cast"), []
    place = fp8 if hasattr(fp8, kernel) else ops_fp8_cast
    before = getattr(place, kernel)
    monkeypatch.setattr(place, kernel, lambda *a, **k: casts.append(1) or before(*a, **k))
    scales, layer = new(name)
    weight = torch.nn.Parameter(torch.randn(32, 16))
    first = layer.weight(weight)
    assert layer.weight(weight) is first and len(casts) == 1 and not first.rowwise.scale_inv.requires_grad
    assert first.rowwise.data.shape == (32, 16) and first.columnwise.data.shape == (16, 32)
    for forget in scales.end_step, scales.clear_weight_cache:
        with torch.no_grad():
            weight.mul_(2.0)
        casts.clear()
        assert layer.weight(weight) is layer.weight(weight) is first  # until it is changed
        forget()
        first = layer.weight(weight)
        assert layer.weight(weight) is first and len(casts) == 1
        if name != "delayed":
            same(first.rowwise, new(name)[1].weight(weight).rowwise)


def agree(mesh, name, role):
    """Rank 1 has the larger values; scales and amaxes are those of both, and so is what is sent."""
    scales, layer = new(name, mesh.tp, mesh.dp_cp, others=["fc2"], amax_history_len=2)
    both = torch.arange(1.0, 9.0).view(4, 2)
    x, axis = both.chunk(2)[mesh.rank], mesh.tp if mesh.tp.size == 2 else mesh.dp_cp
    scales.has_history = True
    mesh.observer.counts.clear()
    cast = layer.weight(x, axis) if role == "w" else getattr(layer, role).quantize(x, "both", axis)
    sent = {} if name != "tensorwise" else {"calls": 1, "bytes": 4}
    assert {key[2]: count for key, count in mesh.observer.counts.items()} == sent
    if name == "tensorwise":
        whole = getattr(new(name)[1], role).quantize(both, "rowwise").rowwise
        same(cast.rowwise, Fp8Matrix(whole.data.chunk(2)[mesh.rank], whole.scale_inv))
    scales.end_step()
    if name == "delayed":
        assert mesh.observer.counts[axis.name, "all_reduce", "calls"] == 1
        assert mesh.observer.counts[axis.name, "all_reduce", "bytes"] == 6 * 4
        quantizer = getattr(layer, role)
        assert quantizer.scale == torch.finfo(quantizer.dtype).max / 8
        assert quantizer.scale == scales.scale["xwg".index(role)]
        before = scales.scale.clone()
        for rank in range(2):  # no rank keeps what is no number, whichever had it
            layer.g.quantize(torch.full((1, 1), NAN if mesh.rank == rank else 1.0), "rowwise")
            scales.end_step()
            assert torch.equal(scales.scale, before) and scales.amax_history.isfinite().all()
    return cast.rowwise.scale_inv, scales.scale, scales.amax_history


@pytest.mark.parametrize("role", ["x", "w", "g"])
@pytest.mark.parametrize("name", RECIPES)
def test_ranks_agree(name, role):
    first, second = run_spmd(agree, 2, name, role, tp=2 if role != "x" else 1)
    if name in ("delayed", "tensorwise"):
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)


def test_a_nan_on_one_rank():
    """The others' scale is 1, as that of the rank that has it."""
    assert run_spmd(with_nan, 2, tp=2) == [[1.0, 1.0], [1.0, 1.0]]


def with_nan(mesh):
    _, layer = new("tensorwise")
    x = [torch.full((2, 2), NAN if mesh.rank == rank else 3.0) for rank in range(2)]
    return [layer.x.quantize(each, "rowwise", mesh.tp).rowwise.scale_inv.item() for each in x]


@pytest.mark.parametrize("name", RECIPES)
def test_zeros_infinity_and_nan(name):
    _, layer = new(name)
    zeros = layer.x.quantize(torch.zeros(16, 16))
    for copy in zeros:
        assert (copy.scale_inv == 1.0).all() and not fp8_decode(copy).any()
    x = torch.ones(16, 16)
    x[3, 4], x[5, 6], x[7, 8] = INF, -INF, NAN
    row, flip = layer.x.quantize(x)
    for copy, what in (row, x), (flip, x.t()):
        found = fp8_decode(copy)
        assert torch.equal(found.isnan(), what.isnan())
        assert torch.equal(found[what == INF], torch.tensor([448.0]))
        assert torch.equal(found[what == -INF], torch.tensor([-448.0]))
        assert (found[what == 1.0] == 1.0).all()
    y = fp8_matmul(row, layer.x.quantize(torch.eye(16)).rowwise, torch.float32)
    assert y[7].isnan().all() and y.isnan().sum() == 16


def test_overflow_saturates_for_one_step():
    scales, layer = new("delayed")
    scales.has_history = True
    x = torch.full((1, 2), 1000.0)
    assert fp8_decode(layer.x.quantize(x, "rowwise").rowwise).tolist() == [[448.0, 448.0]]
    scales.end_step()
    torch.testing.assert_close(fp8_decode(layer.x.quantize(x, "rowwise").rowwise), x)


@pytest.mark.parametrize("name", RECIPES)
def test_an_outlier_costs_its_tensor_or_its_row_or_block(name):
    x = torch.ones(256, 256)
    x[0, 0], x[1, 0] = 448 * 2.0**10, -1.5
    scales, layer = new(name)
    layer.x.quantize(x)
    scales.end_step()
    found = fp8_decode(layer.x.quantize(x, "rowwise").rowwise)
    assert found[0, 0] == x[0, 0]
    lost = (found == 0.0).sum()
    if name in ("delayed", "tensorwise"):  # 1.0 is half the smallest step, and even is down; -1.5 is up
        assert lost == 256 * 256 - 2 and found[1, 0] == -2.0
    else:
        assert lost == (255 if name == "rowwise" else 127) and found[1, 0] == -1.5


def trained(recipe, names, steps=3):
    """Scales of these layers after some steps in which each has its own values."""
    scales = Scales(recipe, [Fp8LayerState(name, recipe) for name in names], CPU)
    for step in range(steps):
        for name, layer in scales.layers.items():
            for quantizer in layer.quantizers:
                value = float(len(name) + step + ord(quantizer.role))
                quantizer.quantize(torch.full((1, 1), value), "rowwise")
        scales.end_step()
    return scales


def test_state_is_loaded_by_name():
    recipe = Recipe(Delayed, amax_history_len=3, amax_compute_algo="max")
    scales = trained(recipe, ["a", "bb", "ccc"])
    state = fp8_state(scales)
    assert sorted(state) == sorted(
        f"{name}.fp8_{kind}" for name in scales.layers for kind in ("history", "scale")
    )
    other = trained(recipe, ["ccc", "a"], steps=1)
    weight = other.layers["a"].weight(torch.ones(2, 2))
    load_fp8_state(other, state)
    assert weight is not None and other.layers["a"].cached_weight is None
    assert all(torch.equal(value, state[name]) for name, value in fp8_state(other).items())
    assert (other.scale_inv == 1.0 / other.scale[:, None]).all()
    for both in scales, other:  # they go on alike; what was saved does not follow
        for _ in range(2):
            both.layers["ccc"].x.quantize(torch.full((1, 1), 2.0), "rowwise")
            both.end_step()
    assert all(torch.equal(value, fp8_state(scales)[name]) for name, value in fp8_state(other).items())
    assert not torch.equal(state["ccc.fp8_history"], fp8_state(scales)["ccc.fp8_history"])


def test_what_cannot_be_loaded_or_made():
    with pytest.raises(ValueError, match="names of their own.*fc1.*fc1"):
        new("delayed", others=["fc1"])
    with pytest.raises(ValueError, match="amax_compute_algo is most_recent or max"):
        Recipe(Delayed, amax_compute_algo="mean")
    with pytest.raises(ValueError, match="amax_history_len=0"):
        Recipe(Delayed, amax_history_len=0)
    with pytest.raises(ValueError, match="outputs: rowwise, columnwise, both"):
        new("delayed")[1].x.quantize(torch.ones(1, 1), "row")
    for name in "tensorwise", "rowwise", "blockwise":
        scales, _ = new(name)
        assert fp8_state(scales) == {}
        load_fp8_state(scales, {})
        scales.end_step()
    Scales(Recipe(Delayed), [], CPU, [Axis.single()]).end_step()  # a stage without layers


@pytest.mark.parametrize("role", ["x", "g"])
@pytest.mark.parametrize("name", RECIPES)
def test_requantizing_gives_the_transposed_cast(name, role):
    """Tensor scales: to the bit. Powers of two: nothing is rounded twice but near zero. Records no amax."""
    scales, layer = new(name)
    x = torch.randn(64, 160)
    getattr(layer, role).quantize(x)
    scales.end_step()
    rowwise, expected = getattr(layer, role).quantize(x)
    recorded = scales.amax_history.clone()
    columnwise = getattr(layer, role).transposed(rowwise)
    assert columnwise.data.is_contiguous() and columnwise.data.shape == (160, 64)
    assert torch.equal(scales.amax_history, recorded)
    if name in ("delayed", "tensorwise"):
        same(columnwise, expected)
    else:
        assert columnwise.scale_inv.shape == expected.scale_inv.shape
        least = limit_of_error(torch.zeros(160, 64), columnwise)
        assert ((fp8_decode(columnwise) - fp8_decode(rowwise).t()).abs() <= least).all()


def test_gathered_blocks_are_multiplied_as_they_come():
    """The GPU wants the first dim of 1 x 128 scales contiguous, which gathering undoes."""
    (x, w, _), casts = operands("blockwise", shape=(48, 160, 256))
    row = casts[0].rowwise
    gathered = Fp8Matrix(row.data, row.scale_inv.contiguous())
    assert not gathered.scale_inv.t().is_contiguous() and _torch_scale(gathered, True).t().is_contiguous()
    twos = casts[1].rowwise  # squares side by side that torch 2.11 would misread
    rows = _torch_scale(twos, True)
    assert rows.t().is_contiguous() and torch.equal(fp8_decode(Fp8Matrix(twos.data, rows)), fp8_decode(twos))
    _, fours = operands("blockwise", shape=(48, 512, 160))
    assert _torch_scale(fours[1].rowwise, True).stride() == fours[1].rowwise.scale_inv.stride() == (4, 1)
    assert torch.equal(
        fp8_matmul(gathered, casts[1].rowwise, torch.float32),
        fp8_matmul(row, casts[1].rowwise, torch.float32),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_cpu_a_tensors_scale_is_that_of_its_rows(dtype):
    """To the bit what torch gives for the scales of tensors, with its slow reference."""
    a, b = torch.randn(32, 64).to(E4M3), torch.randn(48, 64).to(E5M2)
    scales = torch.tensor(0.37), torch.tensor(1.23)
    expected = torch._scaled_mm(a, b.t(), *scales, out_dtype=dtype)
    assert torch.equal(fp8_matmul(Fp8Matrix(a, scales[0]), Fp8Matrix(b, scales[1]), dtype), expected)

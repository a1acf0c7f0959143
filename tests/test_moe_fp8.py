"""Experts in FP8: exactly what their casts give, near what they are without, and in training."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from nanomegatron.checkpoint.fp8_state import fp8_state
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.fast import fp8_experts
from nanomegatron.fast.discard_output import discarding_project
from nanomegatron.fast.fp8_experts import GroupedFp8LinearFunction, quantize_experts
from nanomegatron.fp8 import E4M3, E5M2, RECIPES, Fp8LayerState, Recipe, Rowwise, Scales
from nanomegatron.mesh import Mesh
from nanomegatron.moe import GroupedExperts
from nanomegatron.ops.fp8_cast import fp8_cast_rows, fp8_decode
from nanomegatron.ops.grouped_mm import Groups
from nanomegatron.ops.swiglu import activation
from nanomegatron.param import Init, ParamSpec, WeightGradStore, new_parameter, replica
from tests.checkpoints import ALONE
from tests.layouts import FIVE_STEPS, flags_of
from tests.layouts import fp8 as flags_of_recipe
from tests.report.test_fp8_stats import stats_of
from tests.spmd import run_spmd
from tests.test_moe_experts import BASE, INIT, KINDS, offsets_of, one, parameters
from tests.training import arguments, check_entered, train_on_a_rank

CPU, ROWWISE, REAL = torch.device("cpu"), Recipe(Rowwise), torch._scaled_grouped_mm
E, H = BASE.num_experts, BASE.hidden_size
ROWS = [(16, 32, 16, 48), (16, 0, 32, 0), (0, 0, 48, 0), (0, 0, 0, 0), (5, 1, 0, 7)]


def built(config=BASE, dtype=torch.float32, recipe=ROWWISE):
    """Experts in FP8, their buckets, their scales."""
    experts = GroupedExperts(config, Mesh(), replace(INIT, dtype=dtype), activation(config))
    scales = Scales(recipe, quantize_experts(experts, recipe), CPU)
    if "moe_act" in config.recompute_modules:
        experts.project = discarding_project
    return experts, ParamAndGradBuckets(experts, ParallelConfig(), ALONE), scales


def batch(sizes, extra=0, width=H, seed=1):
    """Rows with a few large ones, and as many zeros at the end that belong to no expert."""
    x = torch.randn(sum(sizes) + extra, width, generator=torch.Generator().manual_seed(seed))
    x[::3] *= 50
    x[sum(sizes) :] = 0
    return x


def rows_of(x):
    """x as it is once cast with a scale for each row."""
    return fp8_decode(fp8_cast_rows(x, E4M3, 448.0)[0]).double()


def columns_of(x):
    return rows_of(x.t().contiguous()).t()


def near(found, expected, rel):
    assert found.shape == expected.shape and torch.isfinite(found).all()
    error = (found.double() - expected.double()).norm()
    assert error <= rel * expected.double().norm() + 1e-12, float(error / expected.norm())


def layer(size, recipe):
    spec = ParamSpec((replica("w.weight", size, Mesh().etp),), size)
    model = torch.nn.Module()
    model.weight = new_parameter(spec, Init(seed=3, std=0.3))
    fp8 = Fp8LayerState("w.weight", recipe, E4M3)
    Scales(recipe, [fp8], CPU)
    return model.weight, ParamAndGradBuckets(model, ParallelConfig(), ALONE), fp8


@pytest.mark.parametrize("wgrad", [True, False], ids=["", "no wgrad"])
@pytest.mark.parametrize("known", [False, True], ids=["", "offsets known"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("sizes", ROWS, ids=str)
def test_a_layer_is_what_its_casts_give(sizes, transposed, known, wgrad):
    """All three products of decoded casts, in float64; of features experts share a scale."""
    i, o = 32, 48
    extra, offsets = 16, offsets_of(sizes)
    weight, buckets, fp8 = layer((E * i, o) if transposed else (E * o, i), Recipe(Rowwise, wgrad=wgrad))
    along, across = rows_of(weight.detach()).chunk(E), columns_of(weight.detach()).chunk(E)
    forward, back = (across, along) if transposed else (along, across)
    turn = (lambda w: w.t()) if transposed else (lambda w: w)  # to [o, i]
    total = torch.zeros_like(weight, dtype=torch.float64).chunk(E)
    buckets.zero_grad_buffer(2)
    for seed in range(2):
        x, g = batch(sizes, extra, i, seed), batch(sizes, extra, o, 9 + seed)
        groups, leaf = Groups(offsets, offsets.tolist() if known else None), x.clone().requires_grad_()
        y = GroupedFp8LinearFunction.apply(leaf, weight, groups.covering(len(x)), transposed, fp8, None, True)
        y.backward(g)
        kept_x, kept_g = (columns_of(x), columns_of(g)) if wgrad else (x.double(), g.double())
        for e, (a, b) in enumerate(itertools.pairwise(offsets.tolist())):
            near(y[a:b], rows_of(x[a:b]) @ turn(forward[e]).t(), 1e-6)
            near(leaf.grad[a:b], rows_of(g[a:b]) @ turn(back[e]), 1e-6)
            total[e].add_(turn(kept_g[a:b].t() @ kept_x[a:b]))
        assert not y[sum(sizes) :].any() and not leaf.grad[sum(sizes) :].any()
    near(weight.main_grad, torch.cat(total), 1e-6)


@pytest.mark.parametrize("sizes", ROWS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_stay_near_those_in_fp32(kind, sizes):
    """To 15 %, as do gradients through the layers of a model: values of 3 bits, some five products deep."""
    config = replace(BASE, **KINDS[kind])
    (experts, buckets, _), n = built(config), sum(sizes)
    params = [None if p is None else p.detach().clone().requires_grad_() for p in parameters(experts)]
    buckets.zero_grad_buffer(1)
    x, g = batch(sizes, 16) / 10, batch(sizes, 16, seed=2)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, offsets = experts(ours, offsets_of(sizes)), offsets_of(sizes).tolist()
    y.backward(g)
    parts = (one(config, params, i, theirs[a:b]) for i, (a, b) in enumerate(itertools.pairwise(offsets)))
    expected = torch.cat([*parts])
    expected.backward(g[:n])
    buckets.finish_grad_sync()
    near(y[:n], expected, 0.15)
    near(ours.grad[:n], theirs.grad[:n], 0.15)
    for p, q in zip(parameters(experts), params, strict=True):
        if p is not None:
            near(p.main_grad, q.grad if q.grad is not None else torch.zeros_like(q), 0.15)


def results(config, recipe=ROWWISE, known=False, later=False):
    """Everything that comes of a microbatch, and the shapes of what autograd kept."""
    (experts, buckets, _), kept, deferred = built(config, torch.bfloat16, recipe), [], WeightGradStore()
    for p in experts.parameters():
        p.wgrad_store = deferred if later else None
    buckets.zero_grad_buffer(1)
    for p in experts.parameters():
        p.main_grad.fill_(torch.nan)  # of the step before
    x = batch(ROWS[0]).bfloat16().requires_grad_()
    offsets = offsets_of(ROWS[0])
    keep = partial(lambda kept, t: kept.append((t.dtype, *t.shape)) or t, kept)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = experts(x, offsets, offsets.tolist() if known else None)
    with deferred.collect() as works:
        y.sum().backward()
    assert len(works) == 2 * later
    deferred.run(works)
    return [y.detach(), x.grad, *(p.main_grad for p in experts.parameters())], kept


@pytest.mark.parametrize("recipe", [Recipe(Rowwise), Recipe(Rowwise, wgrad=False)], ids=["", "no wgrad"])
def test_what_changes_no_bit(recipe):
    """Offsets on the host, recomputation, deferred weight gradients, and a loop.

    But the loop adds bf16 weight gradients before they are rounded.
    """
    again = replace(BASE, recompute_granularity="selective", recompute_modules=("moe_act",))
    expected, kept = results(BASE, recipe)
    loop = replace(BASE, moe_grouped_gemm=False)
    others = results(BASE, recipe, True), results(again, recipe), results(BASE, recipe, later=True)
    for found, _ in others:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for found, _ in (results(loop, recipe), results(loop, recipe, True)):
        assert all(torch.equal(a, b) for a, b in zip(found[:2], expected[:2], strict=True))
        for a, b in zip(found[2:], expected[2:], strict=True):
            assert torch.equal(a if recipe.wgrad else a.bfloat16().float(), b)
    inner = (E4M3, BASE.moe_ffn_size, sum(ROWS[0])) if recipe.wgrad else (torch.bfloat16, sum(ROWS[0]), 24)
    assert kept.count(inner) == others[1][1].count(inner) + 1
    assert kept.count((E4M3, H, sum(ROWS[0]))) == recipe.wgrad, "the first layer's input"


def on_the_gpu(a, b, scale_a, scale_b, offs, out_dtype=None, use_fast_accum=False):
    """`torch._scaled_grouped_mm` as its kernel finds what it reads, by strides; torch's own checks before."""
    tensors = a, b, scale_a, scale_b, offs
    shapes = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors)
    out = torch.empty_like(REAL(*shapes, out_dtype=out_dtype), device="cpu")
    assert all(t.data_ptr() % 16 == 0 and size % 16 == 0 for t in (a, b) for size in t.shape[-2:])
    starts, ends = [0, *offs[:-1].tolist()], offs.tolist()
    for e, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if b.dim() == 3:
            rows, columns, into = a[start:end], b[e], out[start:end]
            scales = scale_a[start:end], scale_b[e]
        else:
            assert end - start > 0 and (end - start) % 16 == 0, "an assertion on the device"
            rows, columns, into = a[:, start:end], b[start:end], out[e]
            scales = scale_a[e * len(a) :][: len(a)], scale_b[e * b.shape[1] :][: b.shape[1]]
        into.copy_((rows.float() @ columns.float()) * scales[0][:, None] * scales[1])
    return out


@pytest.mark.parametrize("kind", ["swiglu", "gelu, biases"])
@pytest.mark.parametrize("sizes", [(16, 32, 16, 48), (16, 16, 16, 1600)], ids=str)
def test_one_matmul_is_the_loop(kind, sizes, monkeypatch):
    """What the GPU's matmul is given, to roundings to bf16; the rows of no expert included."""
    config = replace(BASE, **KINDS[kind], moe_ffn_hidden_size=32)
    found = []
    for once in False, True:
        experts, buckets, _ = built(config, torch.bfloat16)
        monkeypatch.setattr(fp8_experts, "one_kernel", lambda x, groups, once=once: once)
        monkeypatch.setattr(torch, "_scaled_grouped_mm", on_the_gpu) if once else None
        x, g = (batch(sizes, 16, seed=seed).bfloat16() for seed in (1, 2))
        buckets.zero_grad_buffer(1)
        y = experts(x.requires_grad_(), offsets_of(sizes))
        y.backward(g)
        buckets.finish_grad_sync()
        found.append([y, x.grad, *(p.main_grad for p in experts.parameters())])
    for ours, theirs in zip(*found, strict=True):
        near(ours, theirs, 1e-2)


def test_gradients_are_e4m3_and_weights_are_cast_once(monkeypatch):
    """In the hybrid format too; only under rowwise, and with rows to multiples of 16."""
    experts, buckets, scales = built(recipe=Recipe(Rowwise, gradient=E5M2))
    assert list(scales.layers) == [f"{INIT.name}.{name}.weight" for name in ("linear_fc1", "linear_fc2")]
    assert experts.multiple == 16 and fp8_state(scales) == {}
    roles, types, multiply = [], set(), torch._scaled_mm

    def casting(quantizer, *args):
        roles.append(quantizer.role)
        return cast(quantizer, *args)

    def multiplying(a, b, *args, **how):
        types.update((a.dtype, b.dtype))
        return multiply(a, b, *args, **how)

    cast = Rowwise.cast
    monkeypatch.setattr(Rowwise, "cast", casting)
    monkeypatch.setattr(torch, "_scaled_mm", multiplying)
    buckets.zero_grad_buffer(2)
    for _ in range(2):
        experts(batch(ROWS[0]), offsets_of(ROWS[0])).sum().backward()
    assert types == {E4M3} and "".join(sorted(roles)) == "ggggwwxxxx"
    scales.end_step()
    with torch.no_grad():
        experts(batch(ROWS[0]), offsets_of(ROWS[0]))
    assert roles[-4:] == ["x", "w", "x", "w"]
    for name in {*RECIPES} - {"rowwise"}:
        experts, _, scales = built(recipe=Recipe(RECIPES[name]))
        assert experts.linear is GroupedExperts.linear and experts.multiple == 1 and not scales.layers


def test_statistics_know_the_format_of_gradients():
    """The scale that is reported is the smallest of those that rows were cast with."""
    recipe = Recipe(Rowwise, gradient=E5M2)
    experts, buckets, scales = built(recipe=recipe)
    linear = Fp8LayerState("decoder.layers.1.self_attention.linear_qkv.weight", recipe)
    scales = Scales(recipe, [*scales.layers.values(), linear], CPU)
    stats, g = stats_of(scales, Mesh()), batch(ROWS[0], seed=2)
    stats.begin()
    buckets.zero_grad_buffer(1)
    experts(batch(ROWS[0]), offsets_of(ROWS[0])).backward(g)
    linear.g.quantize(g, "rowwise")
    named = stats.by_name(stats.end_counting().tolist())
    for layer, dtype in ((f"{INIT.name}.linear_fc2", E4M3), (linear.name.removesuffix(".weight"), E5M2)):
        _, scale_inv = fp8_cast_rows(g, dtype, torch.finfo(dtype).max)[0]
        assert named[f"{layer}/g/scale"] == 1 / scale_inv.max() and named[f"{layer}/g/amax"] == g.abs().max()


OTHERS = [recipe for recipe in RECIPES if recipe != "rowwise"]
OVER_TP = "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall"


@pytest.mark.parametrize(
    "recipe", [r if r == "rowwise" else pytest.param(r, marks=pytest.mark.full) for r in RECIPES]
)
def test_it_trains_as_bf16_does(recipe, alone, sources, tmp_path):
    """Five steps over experts on two ranks: losses within 2 % of one process's in bf16, and falling."""
    sizes = flags_of_recipe(recipe).partition("blockwise")[2]
    found = losses_of("dp2ep2fp", arguments(sources, "moe", FIVE_STEPS, flags_of_recipe(recipe)), tmp_path)
    expected = [step["lm_loss"] for step in alone("moe", FIVE_STEPS, "--bf16" + sizes)["steps"]]
    np.testing.assert_allclose(found, expected, rtol=2e-2)
    assert found != expected and found[-1] < found[0] - 0.1


@pytest.mark.parametrize(
    "layout, more",
    [
        ("tp2spdp2ep2fp", OVER_TP),
        ("dp2ep2z1fp", ""),
        ("dp2ep2", ""),
        pytest.param("pp2zbdp2ep2", "", marks=pytest.mark.full),
    ],
)
def test_other_layouts_too(layout, more, alone, sources, tmp_path):
    found = losses_of(layout, arguments(sources, "moe", flags_of_recipe("rowwise"), more), tmp_path)
    expected = [step["lm_loss"] for step in alone("moe", "--bf16")["steps"]]
    np.testing.assert_allclose(found, expected, rtol=2e-2)
    assert found != expected


def losses_of(layout, argv, folder):
    """Of a run on several ranks, whose replicas stay equal to the bit."""
    world, flags = flags_of(layout)
    ranks = run_spmd(train_on_a_rank, world, [*argv, *flags.split()], str(folder), timeout=120)
    assert all(rank["alike"] for rank in ranks)
    if layout.endswith("fp") and "rowwise" in argv:
        check_entered(layout, "moe", "rowwise", ranks)
    return [step["lm_loss"] for step in ranks[0]["steps"]]

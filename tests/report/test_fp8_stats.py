"""Statistics of FP8 casts: counts by hand and for every recipe, what counts, and the way to the files."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.faults.exit import DONE
from nanomegatron.fp8 import E4M3, E5M2, RECIPES, Delayed, Fp8LayerState, Recipe, Scales, Tensorwise
from nanomegatron.launch import ending
from nanomegatron.mesh import Axis, Mesh, World
from nanomegatron.ops.fp8_cast import fp8_decode
from nanomegatron.report import plots
from nanomegatron.report.counters import KINDS, Fp8Stats, cast_losses
from nanomegatron.report.writers import read_jsonl
from tests.layouts import FIVE_STEPS, flags_of, fp8
from tests.spmd import run_spmd
from tests.training import Task, arguments

CPU, ALONE = torch.device("cpu"), Axis.single()
NAN, INF = float("nan"), float("inf")


def new(recipe: Recipe, *names: str) -> tuple:
    layers = [Fp8LayerState(name, recipe) for name in names or ("fc1.weight",)]
    scales = Scales(recipe, layers, CPU)
    return stats_of(scales, Mesh()), scales, *layers


def stats_of(scales: Scales, mesh: Mesh) -> Fp8Stats:
    return Fp8Stats(SimpleNamespace(model=SimpleNamespace(scales=scales), mesh=mesh))


def statistics(stats: Fp8Stats) -> dict:
    return stats.by_name(stats.end_counting().tolist())


def row(numbers: dict, tensor: str) -> list[float]:
    return [numbers[f"{tensor}/{kind}"] for kind in KINDS]


def test_counts_by_hand():
    """Delayed, scale 1: E4M3 goes to 448 and down to 2^-9, E5M2 to 57344 and down to 2^-16; ties to zero."""
    stats, scales, layer = new(Recipe(Delayed))
    scales.has_history = True
    layer.weight(weight := torch.tensor([[448.0, 449.0, 1.0, 0.0]]))  # of an evaluation before
    stats.begin()
    layer.x.quantize(torch.tensor([[500.0, -449.0, 448.0, 0.0], [2**-9, -(2**-10), 1e-5, 1.0]]))
    layer.x.quantize(torch.tensor([[1e4, -448.0, 448.0, 1e-4]]))  # another microbatch
    layer.x.quantize(torch.full((1, 4), 1e9), record=False)  # an evaluation, or about to be recomputed
    layer.x.quantize(torch.full((4, 1), 1e9), "columnwise")
    for _ in range(3):
        layer.weight(weight)
    layer.g.quantize(torch.tensor([[-57345.0, 57344.0, 2**-16, 2**-17]]))
    numbers = statistics(stats)
    assert list(numbers) == [f"fc1/{role}/{kind}" for role in "xwg" for kind in KINDS]
    assert row(numbers, "fc1/x") == [1.0, 1e4, 3 / 12, 3 / 12]
    assert row(numbers, "fc1/w") == [1.0, 449.0, 1 / 4, 0.0]
    assert row(numbers, "fc1/g") == [1.0, 57345.0, 1 / 4, 1 / 4]

    scales.end_step()
    stats.begin()
    layer.x.quantize(torch.tensor([[20000.0, 10.0]]))  # the scale is the last step's: the largest was 1e9
    numbers = statistics(stats)
    assert row(numbers, "fc1/x") == pytest.approx([448 / 1e9, 20000.0, 0.0, 1 / 2])
    assert row(numbers, "fc1/g") == pytest.approx([57344 / 57345, 0.0, 0.0, 0.0]), "nothing was cast"


@pytest.mark.parametrize("gradient", [E4M3, E5M2])
@pytest.mark.parametrize("name", RECIPES)
def test_losses_value_by_value(name, gradient):
    """Against x times the scale that each value has; blocks that are not whole, too."""
    torch.manual_seed(1)
    _, _, layer = new(Recipe(RECIPES[name], gradient))
    x = torch.randn(130, 150, dtype=torch.bfloat16) * torch.exp(8 * torch.randn(130, 150)).bfloat16()
    x[::3, 7], x[5], x[6, 3] = 0.0, 0.0, INF
    x[7, 3], x[8, :140] = NAN, -1e5
    for role in ("x", "w", "g"):
        cast = getattr(layer, role).quantize(x, "rowwise").rowwise
        scale = 1 / fp8_decode(cast._replace(data=torch.ones_like(x).to(cast.data.dtype))).double()
        top, scaled = torch.finfo(cast.data.dtype).max, x.double() * scale
        saturated = (scaled.abs() > top * 1.00001).sum()
        underflow = sum(q == 0 != v for q, v in zip(*(m.flatten().tolist() for m in (fp8_decode(cast), x))))
        assert [n.item() for n in cast_losses(x, cast)] == [saturated, underflow]
        assert saturated > 0 and underflow > 0


@pytest.mark.parametrize("name", [*RECIPES][1:])
def test_scales_of_the_values_themselves_do_not_saturate(name):
    torch.manual_seed(2)
    for i in range(40):
        stats, _, layer = new(Recipe(RECIPES[name], margin=i % 2))
        stats.begin()
        inputs = [torch.randn(32, 256) * 10 ** (-8 * torch.rand(()) - 2) for _ in range(3)]
        inputs[1][3] = 0.0  # the scale of zeros is 1, and is not reported
        casts = [layer.x.quantize(x).rowwise for x in inputs]
        scale, amax, saturated, underflow = row(statistics(stats), "fc1/x")
        assert saturated == 0.0 and amax == max(x.abs().max() for x in inputs)
        lost = sum(((fp8_decode(q) == 0) & (x != 0)).sum().item() for x, q in zip(inputs, casts, strict=True))
        assert underflow == lost / (3 * 32 * 256)
        inverses = torch.cat([q.scale_inv.flatten() for q in casts])
        assert scale == pytest.approx(1 / inverses[inverses < 1].max().item(), rel=1e-6)


def test_what_is_not_finite_is_told():
    stats, _, layer = new(Recipe(Tensorwise))
    stats.begin()
    layer.x.quantize(torch.tensor([[NAN, 1.0], [2.0, 0.0]]))
    layer.w.quantize(torch.tensor([[INF, 500.0], [2.0, 0.0]]))
    numbers = statistics(stats)
    assert row(numbers, "fc1/x") == [1.0, INF, 0.0, 0.0]
    assert row(numbers, "fc1/w") == [1.0, INF, 1 / 2, 0.0]


def test_other_steps_do_nothing(monkeypatch):
    """Only between `begin` and `end_counting` is there anything to call."""
    stats, scales, one, two = new(Recipe(Tensorwise), "a.weight", "b.weight")
    calls = []
    monkeypatch.setattr(stats, "_record", lambda slot, *_: calls.append(slot))
    weight, x = torch.randn(16, 16), torch.randn(16, 16)
    for recorded in (False, True, False):
        if recorded:
            stats.begin()
        assert bool(scales.stats_hook) is recorded
        one.x.quantize(x), two.weight(weight), two.g.quantize(x)
        if recorded:
            stats.end_counting()
        scales.end_step()
    assert calls == [0, 4, 5]


def test_names_of_a_pipeline_of_unequal_ranks():
    """Three ranks with two layers, none and one: everybody knows all, and has the same table."""
    tables = run_spmd(_on_a_stage, 3)
    assert tables[0] == tables[1] == tables[2]
    assert [key for key in tables[0] if key.endswith("x/amax")] == [
        "a/x/amax",
        "b/x/amax",
        "long name/x/amax",
    ]
    assert [row(tables[0], f"{name}/x")[1:3] for name in ("a", "b", "long name")] == [
        [1000.0, 1 / 2],
        [0.0, 0.0],
        [3000.0, 1 / 2],
    ]


def _on_a_stage(world: World) -> dict:
    mesh = Mesh.build(ParallelConfig(pipeline_model_parallel_size=3), world, CPU)
    names = (["a.weight", "b.weight"], [], ["long name.weight"])[mesh.pp.rank]
    recipe = Recipe(Delayed)
    layers = [Fp8LayerState(name, recipe) for name in names]
    scales = Scales(recipe, layers, CPU)
    scales.has_history = True
    stats = stats_of(scales, mesh)
    stats.begin()
    for layer in layers[:1]:
        layer.x.quantize(torch.tensor([[1.0, 1000.0 * (mesh.rank + 1)]]))
    return statistics(stats)


# Runs


def trained(world: World, argv: list[str], folder: str) -> tuple[list[dict], list[dict]]:
    """The steps, and the statistics, that a run wrote; without a sample and a picture."""
    ending.show_sample = plots.plot_loss = lambda *_: None
    os.chdir(folder)
    assert train.run_rank(world, argv) == DONE
    return read_jsonl("runs/test/metrics.jsonl"), read_jsonl("runs/test/fp8.jsonl")


def run_of(sources: Task, folder: Path, layout: str, *more: str) -> tuple[list[dict], list[dict]]:
    size, flags = (1, "") if layout == "one" else flags_of(layout)
    folder.mkdir(exist_ok=True)
    argv = arguments(sources, "llama", flags, FIVE_STEPS, "--global-batch-size 4", *more)
    return run_spmd(trained, size, argv, str(folder), timeout=120)[0]


def in_columns(records: list[dict]) -> dict[str, list[float]]:
    return {key: [float(record[key]) for record in records] for key in sorted(records[0])}


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("blockwise", marks=pytest.mark.full)])
def test_a_run_writes_them_and_is_none_the_wiser(recipe, sources, tmp_path):
    """Steps 2 and 4 of 5, four layers of four matrices; the run is the same to the bit, evaluated or not."""
    more = fp8(recipe), "--eval-interval 1 --eval-iters 1 --split 9,1,0 --recompute-activations"
    plain, none = run_of(sources, tmp_path / "plain", "one", *more)
    steps, stats = run_of(sources, tmp_path / "stats", "one", *more, "--log-fp8-stats 2")
    assert [s["lm_loss"] for s in steps] == [s["lm_loss"] for s in plain] and none == []
    assert [s["iteration"] for s in stats] == [2, 4] and [s["consumed_samples"] for s in stats] == [8, 16]
    assert not any("/" in key for step in steps for key in step)
    columns = in_columns(stats)
    layer = "decoder.layers.3.mlp.linear_fc2"
    assert len(columns) == 2 + 4 * 4 * 3 * 4 and f"{layer}/g/underflow" in columns
    for key, values in columns.items():
        if key.endswith(("saturated", "underflow")):
            assert all(0 <= value < 0.9 for value in values), key
        elif key.endswith(("amax", "scale")):
            assert all(0 < value < INF for value in values), key


@pytest.fixture(scope="module")
def told_by_one(sources, tmp_path_factory) -> dict[str, list[float]]:
    """Steps 2 and 4 of one process."""
    run = run_of(sources, tmp_path_factory.mktemp("one"), "one", fp8("delayed"), "--log-fp8-stats 2")
    return in_columns(run[1])


FULL = [pytest.param(layout, marks=pytest.mark.full) for layout in ("pp2v2rc", "dp2z1", "tp2pp2")]


@pytest.mark.parametrize("layout", ["pp2zbvfp", "tp2sp", *FULL])
def test_layouts_tell_the_same(layout, told_by_one, sources, tmp_path):
    """Pipelines and fast paths to the bit; where additions or sizes of microbatches differ, nearly."""
    expected = told_by_one
    found = in_columns(run_of(sources, tmp_path, layout, fp8("delayed"), "--log-fp8-stats 2")[1])
    if layout.startswith("pp"):
        assert found == expected
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        near = dict(abs=0.02) if key.endswith(("saturated", "underflow")) else dict(rel=0.25)
        assert found[key] == pytest.approx(values, **near), key


def test_a_resumed_run_has_one_clean_series(sources, tmp_path):
    more = fp8("tensorwise"), "--log-fp8-stats 1 --save ckpt"
    run_of(sources, tmp_path, "one", *more, "--exit-interval 3")
    (tmp_path / "runs/test/fp8.jsonl").open("a").write(
        json.dumps({"iteration": 4, "of": "no checkpoint"}) + "\n"
    )
    assert [s["iteration"] for s in run_of(sources, tmp_path, "one", *more)[1]] == [1, 2, 3, 4, 5]


def test_tensorboard_has_a_scalar_each(sources, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    _, stats = run_of(sources, tmp_path, "pp2", fp8("tensorwise"), "--log-fp8-stats 2 --tensorboard-dir tb")
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    tags = {tag for tag in events.Tags()["scalars"] if tag.startswith("fp8/")}
    assert tags == {f"fp8/{key}" for key in stats[0] if "/" in key}
    tag = "decoder.layers.2.self_attention.linear_qkv/w/amax"
    expected = [(s["iteration"], pytest.approx(s[tag])) for s in stats]
    assert [(e.step, e.value) for e in events.Scalars(f"fp8/{tag}")] == expected

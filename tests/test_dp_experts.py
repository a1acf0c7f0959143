"""Gradients of experts, which fewer ranks hold than dense parameters, against one process and plain torch."""

import itertools
import math

import pytest
import torch

from nanomegatron.checkpoint.checkpoint import load, module_states, save, state_pieces, training_pieces
from nanomegatron.checkpoint.folder import read_manifest
from nanomegatron.checkpoint.optimizer_state import (
    load_optimizer_scalars,
    optimizer_scalars,
    optimizer_states,
)
from nanomegatron.comm import all_reduce
from nanomegatron.report.banner import buckets_text
from tests import toy
from tests.checkpoint.test_checkpoint import tensors
from tests.checkpoints import ALONE
from tests.spmd import run_spmd, spmd
from tests.test_dp import CASES, STRATEGIES, as_flags
from tests.toy import train_step
from tests.toy_experts import EXPERTS, ExpertToy

# How experts lie over the ranks: ep over dp, cp and tp ranks, slices over etp, and with replicas or without.
LAYOUTS = [
    (2, dict(ep=2)),
    (4, dict(ep=2, cp=2)),
    (4, dict(ep=2, tp=2, etp=1)),
    (4, dict(ep=2, tp=2)),
    (4, dict(ep=2, etp=2)),
]
MORE_LAYOUTS = [
    (4, dict(ep=2)),
    (4, dict(ep=4, tp=2, etp=1)),
    (4, dict(tp=2, etp=1)),
]


def built(mesh, flags, dtype=torch.float32):
    return toy.built(mesh, flags, dtype, model=ExpertToy(mesh, dtype))


def parts(buckets) -> dict[str, tuple[int, torch.Tensor]]:
    """Of every part that this rank holds, the first row and the values."""
    pairs = [(part, p) for p in buckets.params for part in p.spec.parts]
    return {part.name: (part.start, part.local_view(p.detach()).clone()) for part, p in pairs}


def counted_names(optimizer) -> list[str]:
    return [name for name, n in zip(optimizer.part_names, optimizer.counted, strict=True) if n]


def train(mesh, flags, steps):
    """Norms, weights, and other numbers of the last step."""
    model, buckets, optimizer = built(mesh, flags)
    norms = [train_step(model, buckets, optimizer, mesh).item() for _ in range(steps)]
    buckets.wait_params()
    numbers = optimizer.params_norm().item(), optimizer.num_zeros().item()
    return norms, parts(buckets), numbers, counted_names(optimizer)


def train_all(mesh, cases, steps):
    return [train(mesh, as_flags(*case), steps) for case in cases]


def of_torch(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms and parts of one process, trained by plain torch."""
    model = ExpertToy()
    norms, _ = toy.torch_train(steps, model)
    return norms, {
        part.name: part.local_view(p.detach()) for p in model.parameters() for part in p.spec.parts
    }


FEW = [(strategy, *how) for strategy in STRATEGIES for how in ((False, None), (True, 700))]


@pytest.mark.parametrize(
    "world, layout", LAYOUTS + [pytest.param(*case, marks=pytest.mark.full) for case in MORE_LAYOUTS]
)
def test_every_way_to_cut_trains_like_torch(world, layout, full):
    """fp32: norms, weights, counts of zeros, and each part counted by one rank, or by those with a shard."""
    cases, steps = ([case for case in CASES if case[2] != 1], 3) if full else (FEW, 2)
    norms, whole = of_torch(steps)
    ranks = run_spmd(train_all, world, cases, steps, **layout)
    single = train(ALONE, {}, steps)
    assert single[2][1] > 0, "rows of the table that no sample reads"
    for case, each in zip(cases, zip(*ranks, strict=True), strict=True):
        for found, weights, numbers, _ in each:
            assert found == pytest.approx(norms, rel=1e-6), case
            assert numbers[0] == pytest.approx(single[2][0], rel=1e-6) and numbers[1] == single[2][1], case
            for name, (start, x) in weights.items():
                expected = whole[name][start : start + len(x)]
                assert (x - expected).norm() <= 1e-6 * expected.norm(), (case, name)
        names = [name for *_, named in each for name in named]
        assert set(names) == whole.keys()
        if case[0] == "no_shard":
            cut = max(1, layout.get("etp") or layout.get("tp", 1))
            assert len(names) == sum(cut if "experts" in name else 1 for name in whole)


@spmd(world=4, ep=2)
def test_experts_have_buckets_of_their_own(mesh):
    """Reduced and cut over edp: half as many ranks, each with twice the share."""
    for strategy, (overlap, size) in itertools.product(STRATEGIES, ((False, None), (True, 1))):
        mesh.observer.counts.clear()
        model, buckets, optimizer = built(mesh, as_flags(strategy, overlap, size))
        train_step(model, buckets, optimizer, mesh)
        for bucket in buckets.all:
            kinds = {p.spec.expert for p in bucket.params}
            assert len(kinds) == 1 and bucket.axis is (mesh.edp if kinds == {True} else mesh.dp_cp)
            assert bucket.shard_axis.size == (1 if strategy == "no_shard" else bucket.axis.size)
        expert = sum(bucket.size for bucket in buckets.all if bucket.params[0].spec.expert)
        kind = "all_reduce" if strategy == "no_shard" else "reduce_scatter"
        times = 3 if strategy == "optim_grads" else 1
        assert mesh.observer.counts["edp", kind, "bytes"] == 4 * expert * times
        assert mesh.observer.counts["world", "all_reduce", "calls"] == 1, "the norm"
        assert ("cut over 4 ranks (of experts 2)" in buckets_text(buckets)) == (strategy != "no_shard")


@pytest.mark.parametrize("strategy", STRATEGIES)
@spmd(world=4, ep=2, tp=2, etp=1)
def test_a_bad_gradient_of_an_expert_is_named(mesh, strategy):
    """By each rank that holds it; all skip the step."""
    model, buckets, optimizer = built(mesh, as_flags(strategy, False, None))
    train_step(model, buckets, optimizer, mesh)
    before = [shard.main.clone() for shard in optimizer.shards]
    held = [(b, piece) for b, piece in buckets.slices() if piece.part.name == "1.experts.3.fc1"]
    for bucket, piece in held:
        piece.shard_view(bucket.grad_shard)[-1] = math.nan
    stats = optimizer.step(torch.tensor(0.0))
    assert not stats.grad_norm.isfinite() and stats.good == 0
    named = zip(optimizer.part_names, stats.part_norms.tolist(), strict=True)
    bad = [name for name, norm in named if not math.isfinite(norm)]
    assert bad == ["1.experts.3.fc1"] * len(held)
    assert all_reduce(torch.tensor(len(bad)), mesh.world) > 0 and bool(held) <= (mesh.ep.rank == 1)
    assert all(torch.equal(a, b.main) for a, b in zip(before, optimizer.shards, strict=True))


# Checkpoints.


def trained_twice(mesh, strategy, root, i, dtype):
    """Loaded and saved at once; and loaded for one more step."""
    same = trained(mesh, strategy, root, f"same{i}", 0, dtype)
    return same, trained(mesh, strategy, root, f"next{i}", 1, dtype)


def trained(mesh, strategy, root, target, steps, dtype):
    """Resume from the newest checkpoint in root if there is one, make some steps, save; norms and biases."""
    model, buckets, optimizer = built(mesh, as_flags(strategy, False, 400), getattr(torch, dtype))

    def pieces():
        small = state_pieces(module_states(model), mesh)
        return training_pieces(buckets.params, optimizer_states(optimizer), mesh) + small

    if loaded := load(root, pieces(), mesh):
        load_optimizer_scalars(optimizer, loaded.state)
    norms = []
    for _ in range(steps):
        norms.append(train_step(model, buckets, optimizer, mesh).item())
        for i, layer in enumerate(model.layers):
            layer.bias += torch.arange(EXPERTS) * (i - 0.7)
    save(root.parent / target, 1 + steps, pieces(), optimizer_scalars(optimizer), "", mesh)
    return norms, [layer.bias.tolist() for layer in model.layers]


@pytest.mark.parametrize("dtype, layouts", [("float32", LAYOUTS[2:5:2]), ("bfloat16", LAYOUTS[3:4])])
def test_any_layout_of_experts_loads_any_other(tmp_path, dtype, layouts, full):
    """Saved over two experts' ranks: weights, states and biases to the bit, and the next step is the same."""
    saved = run_spmd(trained, 2, "optim", tmp_path / "none", "saved", 3, dtype, ep=2)
    biases = saved[0][1]
    assert biases[0][3] == pytest.approx(-6.3) and biases[1][3] == pytest.approx(2.7)
    (expected, _), *_ = run_spmd(trained, 2, "optim", tmp_path / "saved", "further", 1, dtype, ep=2)
    whole = tensors(tmp_path / "saved")
    names = {f"model/{i}.experts.{e}.fc{n}" for i in range(2) for e in range(EXPERTS) for n in (1, 2)}
    assert names | {"model/0.router.bias", "model/1.router.bias"} <= whole.keys()
    layouts = [(1, {}), (4, dict(ep=4)), *(LAYOUTS[1:] + MORE_LAYOUTS if full else layouts)]
    for i, ((world, layout), strategy) in enumerate(zip(layouts, itertools.cycle(STRATEGIES))):
        ranks = run_spmd(trained_twice, world, strategy, tmp_path / "saved", i, dtype, **layout)
        assert all(same[1] == biases for same, _ in ranks)
        same = tensors(tmp_path / f"same{i}")
        assert all(torch.equal(same[key], x) for key, x in whole.items()) and len(same) == len(whole)
        assert ranks[0][1][0] == pytest.approx(expected, rel=1e-6 if dtype == "float32" else 2e-2)


def test_a_checkpoint_without_biases_leaves_them(tmp_path):
    """Of a model that had none: noted, and everything else is loaded."""
    model, buckets, optimizer = built(ALONE, {})
    save(tmp_path, 1, training_pieces(buckets.params, {}, ALONE), {}, "", ALONE)
    assert "model/0.router.bias" not in read_manifest(tmp_path / "iter_0000001").tensors
    model.layers[0].bias.fill_(0.5)
    pieces = training_pieces(buckets.params, {}, ALONE) + state_pieces(module_states(model), ALONE)
    (note,) = load(tmp_path, pieces, ALONE).notes
    assert "has no model/0.router.bias of this shape: 2 such start from zero" in note
    assert model.layers[0].bias.tolist() == [0.5] * EXPERTS

"""Every layout trains the model that one process trains: the guard of all parallel code.

A layout is a word, `tp2dp2z1sp`: `layouts.py` tells how to read it.

Data are real: Python sources, as bytes. One process and the layout take five AdamW steps from the same seed.
"""

import os
import sysconfig
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from nanomegatron.comm import all_gather
from nanomegatron.data_indexed import IndexedDatasetBuilder
from nanomegatron.mesh import Mesh, World
from nanomegatron.metrics_log import RunLog
from tests.layouts import COMMON, DRAWN, MODELS, UNCUT, flags_of
from tests.spmd import run_spmd


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> str:
    """Prefix of a data set of modules of the Python standard library, a document each; "-lines": a line."""
    prefix = str(tmp_path_factory.mktemp("data") / "sources")
    texts = [p.read_bytes() for p in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py"))[:12]]
    lines = [line for text in texts for line in text.splitlines()]
    for name, documents in ((prefix, texts), (f"{prefix}-lines", lines)):
        with IndexedDatasetBuilder(name, np.uint16) as builder:
            for text in documents:
                builder.add_document(np.append(np.frombuffer(text, np.uint8), 256).astype(np.uint16))
            builder.finalize()
    return prefix


def train_on_a_rank(world: World, argv: list[str], folder: str) -> dict:
    """Five steps of this rank: loss and norm of each, its pieces of the first gradients and last weights."""
    os.chdir(folder)
    parsed, config = train.settings(argv, world)
    mesh = Mesh.build(config.parallel, world, torch.device("cpu"), config.model.num_kv_heads)
    run = train.set_up(parsed, config, mesh, RunLog(folder, config, mesh.rank))
    steps, gradients, update = [], [], run.optimizer.step

    def keep(loss: torch.Tensor):  # before the update, which may scale them
        gradients.append([piece_of(s, s.of(b.grad_shard)) for b, s in run.grads.slices()])
        return update(loss)

    run.optimizer.step = keep
    for _ in range(config.run.train_iters):
        told = train.train_step(run).read()[1]
        steps.append({name: told[name] for name in ("lm_loss", "grad_norm", "num_zeros")})
        if len(gradients) == 1:
            run.grads.wait_params()
            weights = weights_of(run)
        run.iteration += 1
    run.grads.wait_params()
    result = {"steps": steps, "gradients": gradients[0], "weights": weights, "last weights": weights_of(run)}
    return result | {"alike": alike(run)}


def piece_of(piece, data: torch.Tensor) -> tuple:
    """(name, offset and shape of the rank's slice of the tensor, place in the flattened slice, values)."""
    shape = piece.part.view(piece.param.detach()).shape
    return piece.part.name, piece.part.offset, tuple(shape), piece.at, data.float().clone()


def weights_of(run) -> list[tuple]:
    """Every part that this rank holds, as `piece_of` has it."""
    pairs = [(part, part.view(p.detach())) for p in run.optimizer.params for part in p.spec.parts]
    return [(part.name, part.offset, tuple(x.shape), 0, x.float().clone().flatten()) for part, x in pairs]


def alike(run) -> bool:
    """Whether replicas are equal to the bit: weights over dp x cp, of experts edp, whole ones over tp too."""
    mesh, same = run.mesh, True
    for param in run.optimizer.params:
        copies = all_gather(param.detach()[None], mesh.edp if param.spec.expert else mesh.dp_cp)
        same &= all(torch.equal(copies[0], copy) for copy in copies)
        for part in param.spec.parts:
            if part.replicas > 1:
                copies = all_gather(part.view(param.detach())[None], part.axis)
                groups = copies.split(part.replicas)
                same &= all(torch.equal(group[0], copy) for group in groups for copy in group)
            if param.spec.tied:
                copies = all_gather(param.detach()[None], mesh.embed)
                same &= torch.equal(copies[0], copies[-1])
    return bool(same)


def arguments(sources: str, model: str, *more: str) -> list[str]:
    path = sources + "-lines" * model.endswith("documents")
    return " ".join((COMMON, MODELS[model], "--data-path", path, *more)).split()


@pytest.fixture(scope="module")
def alone(sources, tmp_path_factory):
    """What one process does with a model, computed once each."""
    results = {}

    def result(model: str, *more: str) -> dict:
        key = (model, *more)
        if key not in results:
            folder = str(tmp_path_factory.mktemp("alone"))
            results[key] = run_spmd(train_on_a_rank, 1, arguments(sources, model, *more), folder)[0]
        return results[key]

    return result


def compare(found: list[tuple], whole: list[tuple], tolerance: float, but: Collection[str] = ()) -> None:
    """Every piece against the same place of one process's tensor; together they are the whole model."""
    tensors = {name: values.view(shape) for name, _, shape, _, values in whole}
    seen = dict.fromkeys(tensors, 0)
    for name, offset, shape, at, values in found:
        window = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        expected = tensors[name][window].flatten()[at : at + len(values)]
        if name not in but:
            assert (values - expected).norm() <= tolerance * expected.norm(), name
        seen[name] += len(values)
    assert all(seen[name] >= tensor.numel() for name, tensor in tensors.items())


KINDS = ("gradients", "weights", "last weights")


def without_gradient(gradients: list[tuple]) -> set[str]:
    """Key biases without a key norm: softmax does not see them. Theirs are rounding, as are their steps."""
    keys = {name for name, *_ in gradients if name.endswith("linear_qkv.k.bias")}
    if any("k_layernorm" in name for name, *_ in gradients):
        return set()
    assert all(values.norm() < 1e-5 for name, *_, values in gradients if name in keys)
    return keys


@pytest.mark.parametrize("layout, model", DRAWN)
def test_layout_trains_like_one_process(layout, model, alone, sources, tmp_path):
    """fp32: only the order of additions differs."""
    size, flags = flags_of(layout)
    expected = alone(model)
    ranks = run_spmd(train_on_a_rank, size, arguments(sources, model, flags), str(tmp_path), timeout=120)
    for key, tolerance in (("lm_loss", 1e-6), ("grad_norm", 1e-5)):
        ours, theirs = ([step[key] for step in run["steps"]] for run in (ranks[0], expected))
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, err_msg=key)
    assert expected["steps"][-1]["lm_loss"] < expected["steps"][0]["lm_loss"] - 0.1
    assert all(rank["alike"] for rank in ranks)
    nothing = without_gradient([piece for rank in ranks for piece in rank["gradients"]])
    for kind in KINDS:
        compare([piece for rank in ranks for piece in rank[kind]], expected[kind], 1e-5, nothing)
    if not nothing:  # rounding may be zero, or not
        assert ranks[0]["steps"][0]["num_zeros"] == expected["steps"][0]["num_zeros"]


@pytest.mark.parametrize(
    "layout, model",
    [
        ("tp2spov", "llama"),
        ("tp2dp2z1spovce", "gpt"),
        ("dp2z2rc", "qwen"),
        ("dp4z1bk", "gpt"),
        ("tp2dp2z1ovbkco", "llama"),
        ("pp2zbvdp2z1ovbk", "llama"),
        ("tp2pp2v2spovco", "gpt"),
        ("cp4", "documents"),
        ("tp2cp2a2aspov", "llama"),
        ("cp2dp2z1mx", "window"),
    ],
)
def test_bf16_stays_near_one_process(layout, model, alone, sources, tmp_path):
    """bf16 rounds what is sent, 8 bits at a time: losses to 0.3 %, norms to 2 %, gradients to 5 %."""
    size, flags = flags_of(layout)
    expected = alone(model, "--bf16")
    argv = arguments(sources, model, flags, "--bf16")
    ranks = run_spmd(train_on_a_rank, size, argv, str(tmp_path), timeout=120)
    for key, tolerance in (("lm_loss", 3e-3), ("grad_norm", 2e-2)):
        ours, theirs = ([step[key] for step in run["steps"]] for run in (ranks[0], expected))
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, err_msg=key)
    assert all(rank["alike"] for rank in ranks)
    gradients = [piece for rank in ranks for piece in rank["gradients"]]
    keys = {name for name, *_ in gradients if name.endswith("linear_qkv.k.bias")}
    compare(gradients, expected["gradients"], 5e-2, keys)


def initial_weights(world: World, argv: list[str], folder: str) -> list[tuple]:
    os.chdir(folder)
    parsed, config = train.settings(argv, world)
    mesh = Mesh.build(config.parallel, world, torch.device("cpu"), config.model.num_kv_heads)
    return weights_of(train.set_up(parsed, config, mesh, RunLog(folder, config, mesh.rank)))


@pytest.mark.parametrize("layout", ["tp2", "tp4sp", "tp2dp2z1", "dp4z2", "pp2v2", "tp2pp2zbv"])
@pytest.mark.parametrize("model", UNCUT)
def test_initial_weights_of_any_layout_are_one_processs(layout, model, sources, tmp_path):
    """To the bit; and what must differ does: slices of different ranks, layers, and parts."""
    size, flags = flags_of(layout)
    whole = run_spmd(initial_weights, 1, arguments(sources, model), str(tmp_path))[0]
    ranks = run_spmd(initial_weights, size, arguments(sources, model, flags), str(tmp_path))
    compare([piece for rank in ranks for piece in rank], whole, 0.0)
    drawn = {}
    for name, offset, _, _, values in (piece for rank in ranks for piece in rank):
        if values.numel() and values.std() > 0:
            same_place = drawn.setdefault(values.sum().item(), (name, offset))
            assert same_place == (name, offset), f"{name} {offset} has the values of {same_place}"
    assert len({name for name, _ in drawn.values()}) == sum(v.std() > 0 for *_, v in whole)

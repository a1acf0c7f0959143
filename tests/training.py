"""Runs of train.py's own parts on ranks of a test: data, number of steps, what is kept and compared.

Text is invented, so that it is the same on every machine (`golden.py` keeps results of it): words drawn as
in a language, few often and most seldom. The fast tier takes two steps of four samples, the full one five of
eight, as do single tests that ask for it.
"""

import gc
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
import pytest
import torch

import train
from nanomegatron import fast
from nanomegatron.checkpoint.checkpoint import offset_of
from nanomegatron.checkpoint.resume import Checkpoints
from nanomegatron.comm import all_gather
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder
from nanomegatron.mesh import Mesh, World
from nanomegatron.report.log import RunLog
from nanomegatron.report.steps import Reporter
from nanomegatron.report.traffic import Traffic
from tests.layouts import COMMON, ENTERED, FIVE_STEPS, MODELS, TWO_STEPS
from tests.spmd import run_spmd


class Task(NamedTuple):
    """Prefix of a data set ("-lines" behind it: with short documents), and the flags of how many steps."""

    prefix: str
    steps: str


def invented_text(characters: int, seed: int) -> bytes:
    """Lines of up to ten words of a vocabulary of 200, after Zipf's law."""
    random = np.random.RandomState(seed)  # its streams are frozen, on every machine
    words = [bytes(random.randint(97, 123, size=random.randint(1, 9)).tolist()) for _ in range(200)]
    often = 1.0 / np.arange(1, 201)
    drawn = random.choice(200, size=characters, p=often / often.sum())
    breaks = random.rand(characters) < 0.15
    text = b"".join(words[w] + (b"\n" if end else b" ") for w, end in zip(drawn, breaks, strict=True))
    return text[:characters]


@pytest.fixture(scope="session")
def sources(tmp_path_factory, full) -> Task:
    """Twelve documents, and their lines as documents."""
    prefix = str(tmp_path_factory.mktemp("data") / "sources")
    write_sources(prefix)
    return Task(prefix, FIVE_STEPS if full else TWO_STEPS)


def write_sources(prefix: str) -> None:
    """The data sets of `sources`."""
    texts = [invented_text(30_000, seed) for seed in range(12)]
    lines = [line for text in texts for line in text.splitlines()]
    for name, documents in ((prefix, texts), (f"{prefix}-lines", lines)):
        with IndexedDatasetBuilder(name, np.uint16) as builder:
            for text in documents:
                builder.add_document(np.append(np.frombuffer(text, np.uint8), 256).astype(np.uint16))
            builder.finalize()


def arguments(task: Task, model: str, *more: str) -> list[str]:
    """The command line of train.py for a model of tests/layouts.py; later flags win."""
    path = task.prefix + "-lines" * model.endswith("documents")
    return " ".join((COMMON, task.steps, MODELS[model], "--data-path", path, *more)).split()


def set_up(world: World, argv: list[str], folder: str):
    """The `Training` of a command line on this rank, in a folder."""
    os.chdir(folder)
    parsed, config = train.settings(argv, world)
    mesh = Mesh.build(
        config.parallel, world, torch.device("cpu"), config.model.num_kv_heads, observer=Traffic()
    )
    return train.set_up(parsed, config, mesh, RunLog(folder, config, mesh.rank))


def numbers_of(numbers: dict) -> dict:
    """Those of a step, on the host."""
    return {name: x.tolist() for name, x in numbers.items()}


def report_step(run) -> None:
    """One step, and at once its report."""
    reporter = run.observer(Reporter)
    reporter.report_previous(train.launch_step(run, reporter))
    reporter.report_previous()


def save_checkpoint(run) -> None:
    """Save a run as it is now."""
    run.observer(Checkpoints).save()


def train_on_a_rank(world: World, argv: list[str], folder: str) -> dict:
    """All steps of this rank: loss and norm of each, its pieces of the first gradients and last weights."""
    run = set_up(world, argv, folder)
    steps, gradients, update = [], [], run.optimizer.step

    def keep(*numbers):  # before the update, which may scale them
        gradients.append([piece_of(s, s.shard_view(b.grad_shard)) for b, s in run.buckets.slices()])
        return update(*numbers)

    run.optimizer.step = keep
    entered: set[str] = set()
    with no_garbage():
        for _ in range(run.config.run.train_iters):
            with fast_files(entered):
                numbers = numbers_of(train.train_step(run))
            steps.append({name: numbers[name] for name in ("lm_loss", "grad_norm", "num_zeros")})
            if len(gradients) == 1:
                run.buckets.wait_params()
                weights = weights_of(run)
            run.progress.iteration += 1
    run.buckets.wait_params()
    result = {"steps": steps, "gradients": gradients[0], "weights": weights, "last weights": weights_of(run)}
    return result | {"alike": alike(run), "entered": entered}


@contextmanager
def no_garbage() -> Iterator[None]:
    """Tensors made inside and left are not in circles, which --manual-gc would keep for long."""
    gc.freeze()
    gc.disable()
    yield
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    gc.enable()
    gc.unfreeze()
    left = [tuple(x.shape) for x in gc.garbage if isinstance(x, torch.Tensor)]
    gc.garbage.clear()
    assert not left, f"only Python's garbage collector frees these tensors: {left}"


@contextmanager
def fast_files(entered: set[str]) -> Iterator[None]:
    """Notes the modules of fast/ of which a function runs meanwhile."""
    here = str(Path(fast.__file__).parent)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(here):
            entered.add(Path(frame.f_code.co_filename).stem)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def check_entered(layout: str, model: str, kind: str, ranks: list[dict]) -> None:
    """The files of fast/ that layouts.py says this run enters."""
    entered = set().union(*(rank["entered"] for rank in ranks))
    expected = {name for name, cases in ENTERED.items() if (layout, model, kind) in cases}
    assert expected <= entered, f"not entered: {sorted(expected - entered)}"


def piece_of(piece, data: torch.Tensor) -> tuple:
    """(name, offset and shape of the rank's slice of the tensor, place in the flattened slice, values)."""
    shape = piece.part.local_view(piece.param.detach()).shape
    return piece.part.name, offset_of(piece.part), tuple(shape), piece.at, data.float().clone()


def weights_of(run) -> list[tuple]:
    """Every part that this rank holds, as `piece_of` has it."""
    pairs = [(part, part.local_view(p.detach())) for p in run.optimizer.params for part in p.spec.parts]
    return [(part.name, offset_of(part), tuple(x.shape), 0, x.float().clone().flatten()) for part, x in pairs]


def alike(run) -> bool:
    """Whether replicas are equal to the bit: weights over dp x cp, of experts edp, whole ones over tp too."""
    mesh, same = run.mesh, True
    for param in run.optimizer.params:
        copies = all_gather(param.detach()[None], mesh.edp if param.spec.expert else mesh.dp_cp)
        same &= all(torch.equal(copies[0], copy) for copy in copies)
        for part in param.spec.parts:
            if part.replicas > 1:
                copies = all_gather(part.local_view(param.detach())[None], part.axis)
                groups = copies.split(part.replicas)
                same &= all(torch.equal(group[0], copy) for group in groups for copy in group)
            if param.spec.tied:
                copies = all_gather(param.detach()[None], mesh.embed)
                same &= torch.equal(copies[0], copies[-1])
    return bool(same)


@pytest.fixture(scope="session")
def alone(sources, tmp_path_factory) -> Callable[..., dict]:
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


def without_gradient(gradients: list[tuple]) -> set[str]:
    """Key biases that softmax does not see, without key norm and rotation: rounding, as are their steps."""
    keys = ((name, values) for name, *_, values in gradients if name.endswith("linear_qkv.k.bias"))
    return {name for name, values in keys if values.norm() < 1e-5}

"""A run resumes from its checkpoint under any other layout, as if it had never been stopped."""

import json
from pathlib import Path

import pytest

import train
from nanomegatron.mesh import World
from nanomegatron.report.generate import Sampling, generate
from tests.layouts import flags_of
from tests.spmd import run_spmd
from tests.training import arguments, numbers_of, save_checkpoint, set_up


def resumed(world: World, argv: list[str], folder: str, save: str, iterations: int) -> list[dict]:
    """Steps and evaluation of a run up to `iterations` that takes up what `save` holds and is saved there."""
    run = set_up(world, [*argv, "--save", save], folder)
    steps = []
    while run.progress.iteration < iterations:
        numbers = numbers_of(train.train_step(run))
        steps.append({name: numbers[name] for name in ("lm_loss", "grad_norm")})
        run.progress.iteration += 1
    train.evaluate(run, lambda: False, "train")
    save_checkpoint(run)
    line = (Path(folder) / "evals.jsonl").read_text().splitlines()[-1] if run.mesh.rank == 0 else "{}"
    return [*steps, {"held out": json.loads(line).get("lm_loss")}]


def written(world: World, argv: list[str], folder: str, save: str) -> list[list[int]]:
    """What the model that `save` holds makes of two prompts, the likeliest tokens; on any rank."""
    run = set_up(world, [*argv, "--save", save], folder)
    return generate(run.model, [[100, 101, 102], [32]], 12, Sampling(temperature=0.0))


def test_ranks_that_share_rows_write_as_one_process_does(sources, tmp_path):
    """A model trained on two ranks continues prompts on them, and alone, from its checkpoint."""
    found = {}
    for layout in ("cp2", "one"):
        size, flags = (1, "") if layout == "one" else flags_of(layout)
        (tmp_path / layout).mkdir()
        where = arguments(sources, "llama", flags, SHORT), str(tmp_path / layout), str(tmp_path / "save")
        if layout == "cp2":
            run_spmd(resumed, size, *where, 3, timeout=120)
        found[layout] = run_spmd(written, size, *where, timeout=120)
    first, second = found["cp2"]
    assert first == second == found["one"][0] and [len(text) for text in first] == [15, 13]


CHANGES = [
    ("pp2v2", "tp2pp2zb", "gpt"),
    ("cp2", "cp2pp2", "documents"),
    ("one", "cp2dp2z1", "documents"),
    ("dp4ep4z1", "tp2spdp2ep2", "deep"),
]
MORE_CHANGES = [
    ("pp2v2", "tp2pp2zb", "llama"),
    *(("pp2zbv", "one", model) for model in ("gpt", "llama")),
    *(("one", "pp4", model) for model in ("gpt", "llama")),
    ("cp4ag", "one", "llama"),
    ("dp2ep2", "one", "deep"),
    ("one", "pp2dp2ep2", "moe"),
]
SHORT = "--global-batch-size 4 --train-iters 5"


@pytest.mark.parametrize(
    "first, second, model", CHANGES + [pytest.param(*case, marks=pytest.mark.full) for case in MORE_CHANGES]
)
def test_a_run_goes_on_under_another_layout(first, second, model, sources, tmp_path):
    """Its losses, and that of held-out data, are those of one process that was never stopped."""

    def run(layout: str, save: str, iterations: int) -> list[dict]:
        size, flags = (1, "") if layout == "one" else flags_of(layout)
        argv = arguments(sources, model, flags, SHORT, "--eval-iters 2")
        folder = tmp_path / f"{save} {iterations}"
        folder.mkdir()
        where = str(folder), str(tmp_path / save)
        return run_spmd(resumed, size, argv, *where, iterations, timeout=120)[0]

    straight = run("one", "straight", 4)
    stopped = run(first, "stopped", 2)[:-1] + run(second, "stopped", 4)
    for ours, theirs in zip(stopped, straight, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)

"""Runs whose weights die: what is published and removed, how they end, what the next start does."""

import json
from pathlib import Path

import pytest
import torch

from nanomegatron.checkpoint.folder import folders
from nanomegatron.faults.alive import repeat_step, why_dead
from nanomegatron.faults.exit import BAD_STEPS, DONE
from nanomegatron.faults.health import Health
from nanomegatron.faults.launch import launch
from nanomegatron.faults.streak import FILE
from nanomegatron.mesh import World
from nanomegatron.report.writers import read_jsonl
from tests.checkpoints import fast_ones
from tests.faults.test_health import parameters, started
from tests.launch.test_ending import signalled
from tests.spmd import run_spmd
from tests.test_train import arguments, corpus, output_of, run_train  # noqa: F401 (a fixture)
from tests.training import report_step

GOOD = "--train-iters 4 --save-interval 2 --lr-warmup-iters 0 --lr-decay-iters 40 --eval-iters 0"
DEADLY = "--lr 1e38 --clip-grad 0 --keep-last-k 2 --save-interval 1"  # step 5 is finite, its update deadly


@pytest.fixture
def folder(corpus, tmp_path) -> Path:  # noqa: F811
    """Of a run of four good steps."""
    output_of(tmp_path, arguments(corpus, GOOD), DONE)
    return tmp_path / "runs/test"


def files_of(folder: Path) -> dict[str, int]:
    """The files of all checkpoints, and when they were written."""
    return {str(path): path.stat().st_mtime_ns for path in folder.glob("ckpt/iter_*/*")}


def count_of(folder: Path) -> int:
    return json.loads((folder / "ckpt" / FILE).read_text())["count"]


def test_dead_weights_are_not_published_and_remove_nothing(corpus, folder, tmp_path):  # noqa: F811
    """A save after every step, the deadly one included; then once more, and with a rate that is sane."""
    before = files_of(folder)
    assert sorted(folders(folder / "ckpt")) == [2, 4]
    argv = arguments(corpus, GOOD, DEADLY, "--train-iters 30 --max-skipped-steps 3")
    said = output_of(tmp_path, argv, BAD_STEPS)
    assert "! step 5 is not saved: with its weights, which are finite, step 5 has loss" in said
    assert "! step 7 is not saved: 2 steps in a row were not finite" in said
    assert files_of(folder) == before and count_of(folder) == 3
    steps = read_jsonl(folder / "metrics.jsonl")
    assert [step["iteration"] for step in steps if step["skipped"]] == [6, 7, 8]
    said = output_of(tmp_path, argv, BAD_STEPS)  # the count continues: one bad step is enough
    status = json.loads((folder / "status.json").read_text())
    assert "resumed runs/test/ckpt, step 4" in said and (status["iteration"], status["exit_code"]) == (6, 16)
    assert "4 steps in a row were not finite, 3 of them before this start" in status["message"]
    assert "The first was step 6 (" in status["message"] and "Neither it nor a step" in status["message"]
    assert files_of(folder) == before and count_of(folder) == 4
    output_of(tmp_path, arguments(corpus, GOOD, "--train-iters 8"), DONE)
    losses = [float(step["lm_loss"]) for step in read_jsonl(folder / "metrics.jsonl")]
    assert len(losses) == 8 and max(losses) < 6 and not (folder / "ckpt" / FILE).exists()


def test_other_settings_begin_a_new_count(corpus, folder, tmp_path):  # noqa: F811
    for limit, last in ((2, 7), (3, 8)):
        argv = arguments(corpus, GOOD, DEADLY, f"--train-iters 30 --max-skipped-steps {limit}")
        output_of(tmp_path, argv, BAD_STEPS)
        assert json.loads((folder / "status.json").read_text())["iteration"] == last
        assert count_of(folder) == limit


@pytest.mark.parametrize("end", ["--train-iters 7", "--train-iters 5", "--train-iters 30 --exit-interval 7"])
def test_a_run_that_ends_in_bad_steps_says_so(end, corpus, folder, tmp_path):  # noqa: F811
    """Fewer than --max-skipped-steps; or none yet, and the last update was deadly."""
    before = files_of(folder)
    said = output_of(tmp_path, arguments(corpus, GOOD, DEADLY, end), BAD_STEPS)
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", BAD_STEPS)
    why = "with its weights, which are finite, step 5" if "5" in end else "2 steps in a row were not finite"
    assert f"the last, is not saved: {why}" in status["message"]
    assert files_of(folder) == before and "picture" not in said and "next  " not in said


def test_a_signal_in_bad_steps_saves_nothing(corpus, folder, tmp_path):  # noqa: F811
    """The scheduler gets its machine, with the code for starting again; the count of bad steps stays."""
    before = files_of(folder)
    argv = arguments(corpus, GOOD, DEADLY, "--train-iters 30 --save-interval 50")
    assert launch(signalled, 1, (argv, str(tmp_path), "train_step", 1, 1.0), timeout=40, threads=1) == [75]
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "preempted" and "resumes from step 4: nothing is saved" in status["message"]
    assert files_of(folder) == before and count_of(folder) == status["iteration"] - 5


# The step that is repeated before a save


REPEATED = {
    "dp2": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "fp8": (1, "--bf16 --fp8-format hybrid --ffn-hidden-size 192"),
    "fp16": (1, "--fp16 --initial-loss-scale 1024"),
    "experts": (
        1,
        "--num-experts 4 --moe-router-enable-expert-bias --moe-router-score-function sigmoid "
        "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01",
    ),
    "pp2v2": (2, "--num-layers 4 --pp 2 --vpp 2 --hidden-dropout 0.1"),
    "zero2": (2, "--data-parallel-sharding-strategy optim_grads --ddp-bucket-size 20000"),
}


@pytest.mark.parametrize("case", fast_ones(REPEATED, "fp8"))
def test_a_save_changes_nothing(case, corpus, tmp_path):  # noqa: F811
    """Losses of a run that saves each step, and of one that saves none, to the bit."""
    ranks, flags = REPEATED[case]
    losses = []
    for often in (1, 50):
        more = f"--train-iters 5 --lr-warmup-iters 0 --eval-iters 0 --save-interval {often}"
        place = tmp_path / str(often)
        place.mkdir()
        steps = run_spmd(run_train, ranks, arguments(corpus, more, flags), str(place))[0]
        losses.append([float(step["lm_loss"]).hex() + float(step["grad_norm"]).hex() for step in steps])
    assert len(losses[0]) == 5 and losses[0] == losses[1]


def test_weights_are_judged_by_loss_and_gradients(corpus, tmp_path, monkeypatch):  # noqa: F811
    """In fp16 with the smallest loss scale: one that is too large is no fault of the weights."""
    monkeypatch.chdir(tmp_path)
    run = started(World(), arguments(corpus, "--fp16 --train-iters 9 --lr-warmup-iters 0"), str(tmp_path))
    report_step(run)
    run.progress.iteration = 1
    health = run.observer(Health)
    assert run.optimizer.scaler.scale == 2**32 and not health.window  # step 1 has overflowed
    before = parameters(run)
    assert why_dead(run, health) == ""
    loss, norm = repeat_step(run, 1)
    assert 5 < loss < 6 and 0.1 < norm < 10
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(run), strict=True))
    assert run.progress.iteration == 1 and run.optimizer.scaler.scale == 2**32
    weight = run.model[0].layers[0].mlp.linear_fc1.weight
    with torch.no_grad():
        weight.fill_(6e4)  # finite
    assert "step 1 has loss" in why_dead(run, health)


def test_a_damaged_count_is_none(corpus, folder, tmp_path):  # noqa: F811
    for text in ("{", "[]", '{"settings": 1}', "\\0"):
        (folder / "ckpt" / FILE).write_text(text)
        output_of(tmp_path, arguments(corpus, GOOD), DONE)

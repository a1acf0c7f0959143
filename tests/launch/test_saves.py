"""Whole runs that save beside the training: the same checkpoints, and what a failed save does to a run."""

import json
import os
import time
from pathlib import Path

import pytest

import train
from nanomegatron.checkpoint import async_save, saver
from nanomegatron.checkpoint.async_save import START
from nanomegatron.faults.exit import DONE, SAVE_FAILED
from nanomegatron.launch import ending, rank
from nanomegatron.mesh import World
from nanomegatron.report import plots
from nanomegatron.report.writers import read_jsonl
from tests.checkpoint.test_async_save import NO_ROOM
from tests.checkpoints import fast_ones
from tests.spmd import run_spmd
from tests.test_train import arguments, corpus  # noqa: F401 (a fixture)

SIX = "--train-iters 6 --lr-warmup-iters 0 --save-interval 2 --eval-iters 0"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
SAYS_WHERE = ("async-save", "save =", "run-name")
BIASES = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"


def run_ranks(world: World, argv: list[str], folder: str, patch: str, pause: float = 0.0) -> int:
    """A rank of a run; on rank 1 the writer of checkpoints runs `patch` first. The exit code.

    pause: seconds that a step takes longer.
    """
    os.chdir(folder)
    usual = train.train_step
    train.train_step = lambda *given: time.sleep(pause) or usual(*given)
    plots.plot_loss = ending.show_sample = lambda *_: None
    saver.PAUSE = 0.0
    if world.rank:
        async_save.START = f"{patch}\n{START}"
    leave, code = os._exit, []
    rank.os._exit = code.append  # where it would leave without the exit handlers
    result = train.run_rank(world, argv)
    rank.os._exit = leave
    return code[0] if code else result


def parts_of(root: Path) -> dict[str, bytes]:
    """The files of all checkpoints; of manifests what is left without the setting that differs."""
    found = {}
    for path in sorted(root.glob("iter_*/*")):
        text = path.read_bytes()
        if path.name == "manifest.json":
            manifest = json.loads(text)
            lines = manifest["config"].splitlines()
            manifest["config"] = [line for line in lines if not line.startswith(SAYS_WHERE)]
            text = json.dumps(manifest).encode()
        if path.suffix != ".sha256":
            found[f"{path.parent.name}/{path.name}"] = text
    return found


CASES = {"sharded": SHARDED, "biases of routers": f"--num-experts 4 --moe-router-topk 2 {BIASES}"}


@pytest.mark.parametrize("case", fast_ones(CASES, "biases of routers"))
def test_training_beside_a_save_changes_nothing(case, corpus, tmp_path):  # noqa: F811
    """Checkpoints of every second step, to the byte, and the losses."""
    losses = []
    for kind in ("async", "no-async"):
        argv = arguments(corpus, SIX, CASES[case], f"--{kind}-save --save {kind} --run-name {kind}")
        folder = tmp_path / "runs" / kind
        assert run_spmd(run_ranks, 2, argv, str(tmp_path), "") == [DONE] * 2
        losses.append([step["lm_loss"] for step in read_jsonl(folder / "metrics.jsonl")])
        status = json.loads((folder / "status.json").read_text())
        assert (status["state"], status["checkpoint"], status["iteration"]) == ("done", kind, 6)
    files = parts_of(tmp_path / "async")
    assert files == parts_of(tmp_path / "no-async") and len(files) == 3 * 3
    assert losses[0] == losses[1] and len(losses[0]) == 6
    text = (tmp_path / "runs/async/log.txt").read_text()
    assert [text.count(f"saved   async, step {step}\n") for step in (2, 4, 6)] == [1, 1, 1]


def failed_run(prefix: str, folder: Path, flags: str, pause: float = 0.0) -> tuple[str, list[int]]:
    """A run whose writer on rank 1 has no room in any save: its log, and the steps that it made."""
    argv = arguments(prefix, SIX, SHARDED, "--async-save", flags)
    assert run_spmd(run_ranks, 2, argv, str(folder), NO_ROOM, pause) == [SAVE_FAILED] * 2
    status = json.loads((folder / "runs/test/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 4)
    assert "File too large" in status["message"] and " bytes, " in status["message"]
    text = (folder / "runs/test/log.txt").read_text()
    assert "saved   " not in text and not list((folder / "runs/test/ckpt").glob("iter_*"))
    return text, [step["iteration"] for step in read_jsonl(folder / "runs/test/metrics.jsonl")]


def test_a_writer_without_room_ends_the_run_at_once(corpus, tmp_path):  # noqa: F811
    """In a step after the save; not at the next save, nor at the end."""
    text, steps = failed_run(corpus, tmp_path, "--train-iters 12 --save-interval 3 --save-retries 0", 0.2)
    assert 3 <= len(steps) < 6 and "the checkpoint of iteration 3 was not saved" in text


def test_a_writer_without_room_is_a_warning_until_the_end(corpus, tmp_path):  # noqa: F811
    text, steps = failed_run(corpus, tmp_path, "--on-save-error warn --save-retries 1")
    assert steps == list(range(1, 7)) and text.count("; trying again") == 3
    assert text.count("the run continues, and the next save is due as usual") == 2


def test_the_flags_of_retention_reach_a_run(corpus, tmp_path):  # noqa: F811
    flags = "--train-iters 7 --lr-warmup-iters 0 --eval-iters 0 --save-interval 2 --keep-last-k 2"
    argv = arguments(corpus, flags, "--save-retain-interval 2 --non-persistent-save-interval 1")
    assert run_spmd(run_ranks, 1, argv, str(tmp_path), "") == [DONE]
    found = sorted((tmp_path / "runs/test/ckpt").glob("iter_*"))
    marked = [(int(path.name[5:]), (path / "non_persistent").exists()) for path in found]
    assert marked == [(2, False), (4, False), (5, True), (6, False), (7, False)]

"""What asks a run to save and leave, beside a signal amid a step, and what must not: the death of a peer."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

import train
from nanomegatron.checkpoint.resume import Checkpoints
from nanomegatron.faults.exit import BAD_CONFIG, DONE
from nanomegatron.faults.launch import launch
from nanomegatron.faults.signals import PREEMPTED
from nanomegatron.launch import ending
from nanomegatron.mesh import World
from nanomegatron.report import plots
from nanomegatron.report.writers import read_jsonl
from tests.test_train import arguments, corpus, output_of  # noqa: F401 (a fixture)

TEN = "--train-iters 10 --lr-warmup-iters 0"


def disturbed(world: World, argv: list[str], folder: str, what: str, step: int) -> int:
    """A rank of a run in which something happens when step + 1 begins, or while step is saved."""
    os.chdir(folder)
    saving = what == "signal in a save"
    module, name = (Checkpoints, "save") if saving else (train, "train_step")
    usual = getattr(module, name)

    def disturb(first, *more, **how):
        run = first.run if saving else first
        if run.progress.iteration == step:
            if what == "file" and world.rank == 1:
                Path("stop").touch()
            if what == "signal in a save" and world.rank == 1:
                signal.raise_signal(signal.SIGTERM)
            if what == "peer dies":
                if world.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                signal.raise_signal(signal.SIGTERM)  # torchrun sends it to those that are left
        return usual(first, *more, **how)

    save = Checkpoints.save

    def begun(checkpoints, *more, **how):
        Path(f"save-{checkpoints.run.progress.iteration}").touch()
        save(checkpoints, *more, **how)

    Checkpoints.save = begun
    setattr(module, name, disturb)
    plots.plot_loss = ending.show_sample = lambda *_: None
    return train.run_rank(world, argv)


def outcome(folder: Path, argv: list[str], what: str, step: int) -> tuple[list[int], dict, list[int]]:
    """Exit codes, status.json and the steps in metrics.jsonl."""
    codes = launch(disturbed, 2, (argv, str(folder), what, step), timeout=40, threads=1)
    steps = [record["iteration"] for record in read_jsonl(folder / "runs/test/metrics.jsonl")]
    return codes, json.loads((folder / "runs/test/status.json").read_text()), steps


def test_a_file_stops_the_run_as_a_signal_does(corpus, tmp_path):  # noqa: F811
    """Within two steps; until it is removed the same command is an error."""
    argv = arguments(corpus, TEN, "--exit-on-preemption-file stop")
    codes, status, steps = outcome(tmp_path, argv, "file", 3)
    assert codes == [PREEMPTED] * 2 and 4 <= len(steps) <= 6
    assert (status["state"], status["iteration"]) == ("preempted", steps[-1]) and status["checkpoint"]
    assert "stopped by --exit-on-preemption-file stop after step" in status["message"]
    said = output_of(tmp_path, argv, BAD_CONFIG)
    assert "--exit-on-preemption-file stop: exists already" in said and "remove it" in said
    (tmp_path / "stop").unlink()
    assert f"resumed runs/test/ckpt, step {steps[-1]}" in output_of(tmp_path, argv, DONE)


def test_a_signal_during_a_save(corpus, tmp_path):  # noqa: F811
    """The save is finished, and the run leaves at the next step's end."""
    codes, status, steps = outcome(
        tmp_path, arguments(corpus, TEN, "--save-interval 4"), "signal in a save", 4
    )
    assert codes == [PREEMPTED] * 2 and status["state"] == "preempted" and len(steps) <= 6
    assert status["iteration"] == steps[-1]
    saved = {path.name for path in (tmp_path / "runs/test/ckpt").glob("iter_*")}
    assert saved == {"iter_0000004", f"iter_{steps[-1]:07d}"}


@pytest.mark.parametrize("step", [3, 4])  # amid an interval, and right after a save
def test_the_death_of_a_peer_starts_no_save(step, corpus, tmp_path):  # noqa: F811
    """The rank that is left has got SIGTERM, but no step completes that could agree on a save."""
    begin = time.monotonic()
    codes, status, steps = outcome(tmp_path, arguments(corpus, TEN, "--save-interval 4"), "peer dies", step)
    assert codes == [1, -signal.SIGKILL] and time.monotonic() - begin < 15
    assert status["state"] == "failed" and len(steps) <= step
    folder = tmp_path / "runs/test"
    begun, names = ({path.name for path in tmp_path.glob(each)} for each in ("save-*", "**/iter_*"))
    assert begun == ({"save-4"} if step == 4 else set())
    assert names == ({"iter_0000004"} if step == 4 else set())
    assert (folder / "log.txt").read_text().count("saved ") == (step == 4)

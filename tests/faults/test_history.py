"""A run whose checkpoints are missing: exit code 3, and what knows of them; never random weights."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from nanomegatron.checkpoint.folder import LATEST, folders
from nanomegatron.faults.exit import DONE, NO_CHECKPOINT
from nanomegatron.faults.launch import launch
from nanomegatron.report.writers import read_jsonl, replace_file
from tests.test_train import arguments, corpus, output_of, run_and_die  # noqa: F401 (a fixture)

SIX = "--train-iters 6 --save-interval 2 --lr-warmup-iters 0 --lr-decay-iters 40 --eval-iters 0"
ANYWAY = "--no-exit-on-missing-checkpoint"
RUN = "runs/test"


@pytest.fixture(scope="module")
def six(corpus, tmp_path_factory) -> Path:  # noqa: F811
    """The folder in which a run of six steps has ended."""
    folder = tmp_path_factory.mktemp("six")
    output_of(folder, arguments(corpus, SIX), DONE)
    return folder


@pytest.fixture
def place(six, tmp_path) -> Path:
    return shutil.copytree(six, tmp_path / "place")


def steps_of(place: Path) -> list[int]:
    return [step["iteration"] for step in read_jsonl(place / RUN / "metrics.jsonl")]


def only_tracker(ckpt: Path) -> None:
    (ckpt.parent / "status.json").unlink()
    (ckpt.parent / "metrics.jsonl").unlink()
    for name in folders(ckpt).values():
        os.rename(name, name.with_suffix(".bak"))


def only_metrics(ckpt: Path) -> None:
    shutil.rmtree(ckpt)
    (ckpt.parent / "status.json").unlink()


STATUS = "runs/test/status.json says that step 6 has checkpoints in runs/test/ckpt"
MISSING = {
    "not mounted": (shutil.rmtree, "", f"{STATUS}; runs/test/ckpt has no checkpoint"),
    "renamed": (only_tracker, "", f"runs/test/ckpt/{LATEST} says that iteration 6 was saved"),
    "only metrics": (only_metrics, "", "runs/test/metrics.jsonl has steps up to 6, there is no status.json"),
    "another --save": (
        lambda _: None,
        "--save other",
        f"{STATUS}, --load runs/test/ckpt continues from there",
    ),
    "another --load": (shutil.rmtree, "--load kept", f"{STATUS}; runs/test/ckpt has no checkpoint"),
}


@pytest.mark.parametrize("case", MISSING)
def test_missing_checkpoints_are_no_new_run(case, corpus, six, place):  # noqa: F811
    """However often it is tried; records stay as they are. --no-exit-on-missing-checkpoint begins again."""
    lose, flags, text = MISSING[case]
    shutil.copytree(six / RUN / "ckpt", place / "kept")
    lose(place / RUN / "ckpt")
    steps, argv = steps_of(place), arguments(corpus, SIX, flags)
    for _ in range(2 if case == "not mounted" else 1):
        said = output_of(place, argv, NO_CHECKPOINT)
        assert text in said and ANYWAY in said and steps_of(place) == steps
    if case != "not mounted":
        return
    said = output_of(place, [*argv, ANYWAY, "--train-iters", "1"], DONE)
    assert f"{ANYWAY}: the run begins at step 1" in said and steps_of(place) == [1]
    assert "resumed runs/test/ckpt, step 1" in output_of(place, [*argv, ANYWAY], DONE)  # no effect now


def test_a_run_that_never_saved_begins_again(corpus, tmp_path):  # noqa: F811
    argv = arguments(corpus, SIX, "--save-interval 5")
    launch(run_and_die, 2, (argv, str(tmp_path), 4, signal.SIGKILL), timeout=40, threads=1)
    assert steps_of(tmp_path) and not folders(tmp_path / RUN / "ckpt")
    said = output_of(tmp_path, argv, DONE, ranks=2)
    assert "steps, of which none was saved: from step 1 again" in said
    assert steps_of(tmp_path) == [*range(1, 7)]


def test_the_newest_that_is_missing_is_named(corpus, place):  # noqa: F811
    shutil.rmtree(place / RUN / "ckpt/iter_0000006")
    said = output_of(place, arguments(corpus, SIX), DONE)
    assert f"! missing checkpoint: runs/test/ckpt/{LATEST} names iteration 6, which is not there" in said
    assert "2 iterations are lost" in said and "resumed runs/test/ckpt, step 4" in said


def test_links_are_followed_and_stay(corpus, place):  # noqa: F811
    """Of iterations, of the folder of checkpoints, of the run's, of a file. A disk that is gone: an error."""
    disk, run = place / "disk", place / RUN
    disk.mkdir()
    shutil.move(run / "ckpt", disk / "ckpt")
    (run / "ckpt").symlink_to(disk / "ckpt")
    for name in ("iter_0000004", "iter_0000006"):
        shutil.move(disk / "ckpt" / name, disk / name)
        (disk / "ckpt" / name).symlink_to(disk / name)
    shutil.move(run / "metrics.jsonl", disk / "metrics.jsonl")
    (run / "metrics.jsonl").symlink_to(disk / "metrics.jsonl")
    shutil.move(run, disk / "run")
    run.symlink_to(disk / "run")
    links = [run, run / "ckpt", run / "metrics.jsonl", run / "ckpt/iter_0000004", run / "ckpt/iter_0000006"]
    argv = arguments(corpus, SIX, "--train-iters 10 --keep-last-k 2")
    assert "resumed runs/test/ckpt, step 6" in output_of(place, argv, DONE)
    assert all(path.is_symlink() for path in links) and steps_of(place) == [*range(1, 11)]
    assert sorted(folders(run / "ckpt")) == [4, 6, 8, 10] and (disk / "iter_0000004/manifest.json").is_file()
    for name in ("iter_0000008", "iter_0000010"):
        shutil.rmtree(disk / "ckpt" / name)
    os.rename(disk / "iter_0000006", disk / "gone")
    said = output_of(place, argv, NO_CHECKPOINT)
    assert "iter_0000006 is a symbolic link to" in said and "mount or restore that" in said
    assert all(path.is_symlink() for path in links)


def test_a_record_behind_a_link_is_replaced_there(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "status.json").symlink_to("disk/status.json")
    for text in ("{}", json.dumps({"state": "done"})):
        replace_file(tmp_path / "status.json", text)
        assert (tmp_path / "status.json").is_symlink() and (tmp_path / "disk/status.json").read_text() == text

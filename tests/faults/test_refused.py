"""A start that is refused leaves no new folder; one of a run that is done leaves it as it is, and says so."""

import json
import shutil
from pathlib import Path

import pytest

import train
from nanomegatron.config.cli import parse
from nanomegatron.faults.exit import BAD_CONFIG, DONE, NO_CHECKPOINT
from nanomegatron.faults.lock import lock
from nanomegatron.faults.refused import absent_folders, undo_start
from nanomegatron.mesh import World
from nanomegatron.report.status import write_status
from tests.faults.test_history import RUN, place, six  # noqa: F401 (fixtures)
from tests.test_train import arguments, corpus, finished, output_of, start  # noqa: F401 (a fixture)

SIX = "--train-iters 6 --save-interval 2 --lr-warmup-iters 0 --lr-decay-iters 40"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


REFUSED = {
    "--vocab-size 99": (
        BAD_CONFIG,
        "--vocab-size 99: the tokenizer has 257 tokens; give at least that",
    ),
    "--load empty": (NO_CHECKPOINT, "--load empty: no checkpoint there"),
    "--eval-only --split 1,0,0": (BAD_CONFIG, "--eval-only: no validation and no test data"),
    "--save file/ckpt": (BAD_CONFIG, "--save file/ckpt: cannot write"),
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_refused_start_leaves_no_new_folder(flags, corpus, tmp_path):  # noqa: F811
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    code, message = REFUSED[flags]
    for more in [""] if "--save" in flags else ["", "--save elsewhere/ckpt"]:
        said = output_of(tmp_path, arguments(corpus, "--train-iters 9", flags, more), code)
        assert message in said
        assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


@pytest.mark.full
def test_nor_do_its_ranks(corpus, tmp_path):  # noqa: F811
    argv = arguments(corpus, "--train-iters 9 --vocab-size 99 --nproc 2")
    assert "give at least that" in finished(start(tmp_path, argv), BAD_CONFIG)
    assert not [*tmp_path.iterdir()]


def test_a_refused_start_changes_no_folder_that_was_there(corpus, place):  # noqa: F811
    """Records of the run go on, and its status stays."""
    before = contents(place)
    said = output_of(place, arguments(corpus, SIX, "--train-iters 8 --vocab-size 99"), BAD_CONFIG)
    assert "--vocab-size 99: the run in this folder has unset" in said and contents(place) == before
    output_of(place, arguments(corpus, SIX, "--train-iters 8 --load empty --ckpt-step 3"), BAD_CONFIG)
    after = contents(place)
    changed = {name for name in before if before[name] != after[name]}
    assert before.keys() == after.keys() and changed <= {
        f"{RUN}/{n}" for n in ("run.lock", "log.txt", "status.json")
    } | {f"{RUN}/ckpt/run.lock"}
    was, now = (json.loads(files[f"{RUN}/status.json"]) for files in (before, after))
    assert was | {"time": now["time"]} == now and now["exit_code"] == DONE


@pytest.mark.parametrize("code", [BAD_CONFIG, NO_CHECKPOINT, DONE])
def test_a_start_with_wrong_settings_leaves_the_status_of_a_run_that_is_there(code, tmp_path, monkeypatch):
    """One that finds no checkpoint is said there, and so is one that runs; under torchrun all are."""
    monkeypatch.chdir(tmp_path)
    path = Path("runs/mine/status.json")
    path.parent.mkdir(parents=True)
    earlier = dict(state="done", exit_code=0, iteration=6, checkpoint="runs/mine/ckpt")

    def ends(world, argv) -> int:
        write_status(path, earlier | dict(state="failed" if code else "done", exit_code=code, message="it"))
        return code

    monkeypatch.setattr(train, "run_rank", ends)
    for store in "", "tcp://here:1":
        write_status(path, earlier)
        monkeypatch.setattr(train.World, "from_environment", lambda store=store: World(0, 1, 0, store))
        assert train.main(["--mock-data", "--vocab-size", "99", "--run-name", "mine"]) == code
        facts = json.loads(path.read_text())
        expected = earlier if code == BAD_CONFIG and not store else facts
        assert {key: facts[key] for key in expected} == expected and ("message" in facts) == (
            expected == facts
        )
    path.write_text("of a run that holds the folder")
    with lock(path.parent.absolute()):
        write_status(path, dict(state="running", exit_code=BAD_CONFIG))
        undo_start(parse(["--run-name", "mine", "--save", "x"]).config, [], earlier)
    assert json.loads(path.read_text())["state"] == "running"


@pytest.mark.parametrize("what", ("in use", "has failed", "has steps", "has a file of the user"))
def test_folders_of_another_start_stay(what, tmp_path, monkeypatch):
    """One that came while this one looked: whatever this one ends with."""
    monkeypatch.chdir(tmp_path)
    config = parse(["--run-name", "run", "--save", "runs/run/ckpt"]).config
    absent = absent_folders(config)
    folder = tmp_path / "runs/run"
    assert absent == [folder / "ckpt", folder, tmp_path / "runs"]
    (folder / "ckpt").mkdir(parents=True)
    (folder / "log.txt").write_text("the other")
    held = lock(folder) if what == "in use" else None
    if what == "has failed":
        write_status(folder / "status.json", dict(state="failed", exit_code=1))
    elif what != "in use":
        (folder / ("metrics.jsonl" if what == "has steps" else "notes")).write_text("{}\n")
    undo_start(config, absent, {})
    assert folder.is_dir() and (folder / "log.txt").exists() == (what != "has a file of the user")
    if held:
        held.close()
        undo_start(config, absent, {})
        assert not (tmp_path / "runs").exists()


def test_a_run_that_is_done_says_so_at_once(corpus, tmp_path):  # noqa: F811
    """And how to go on: nothing is built or evaluated again, and no file changes."""
    argv = arguments(corpus, SIX)
    assert "validation at step 6" in output_of(tmp_path, argv, DONE)
    before = contents(tmp_path)
    for ranks in (1, 2):
        batch = ["--micro-batch-size", str(4 // ranks)]
        said = output_of(tmp_path, [*argv, *batch], DONE, ranks)
        *done, command = said.splitlines()
        assert command.startswith("next    nanomegatron generate --load runs/test/ckpt --prompt ")
        assert done == [
            "done    all 6 steps of runs/test are saved in runs/test/ckpt: nothing left to train",
            "note    a larger --train-iters goes further, another --run-name begins from step 1",
        ]
        assert contents(tmp_path) == before
    status = json.loads(before[f"{RUN}/status.json"])
    write_status(tmp_path / RUN / "status.json", status | dict(state="preempted"))  # in its last evaluation
    assert "validation at step 6" in output_of(tmp_path, argv, DONE)
    shutil.rmtree(tmp_path / RUN / "ckpt/iter_0000006")
    assert "resumed runs/test/ckpt, step 4" in output_of(tmp_path, argv, DONE)
    assert "resumed runs/test/ckpt, step 6" in output_of(tmp_path, [*argv, "--train-iters", "7"], DONE)

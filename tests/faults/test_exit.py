"""Who failed first, and what that rank has to say of it."""

import json
import os
import signal
import threading
import time

import pytest

import train
from nanomegatron.config.cli import build_config
from nanomegatron.faults import launch as mesh_launch
from nanomegatron.faults.exit import name_culprit
from nanomegatron.faults.launch import launch
from nanomegatron.faults.lock import lock
from nanomegatron.launch import data as run_data
from nanomegatron.launch import start as start_module
from nanomegatron.mesh import World
from nanomegatron.report import log as metrics_log
from nanomegatron.report import plots
from nanomegatron.report.status import write_status
from tests.test_train import arguments, corpus  # noqa: F401 (a fixture)


def fail_in_step_3(world: World, argv: list[str], folder: str, rank: int, how: str) -> int:
    """One rank of a run in which a rank fails in a way of its own."""
    usual = train.train_step

    def train_step(run, *limits):
        if run.progress.iteration == 2 and world.rank == rank:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                time.sleep(60)
            raise ValueError("a bug")
        return usual(run, *limits)

    train.train_step, plots.plot_loss = train_step, lambda *_: None
    os.chdir(folder)
    return train.run_rank(world, argv)


@pytest.mark.parametrize(
    "rank, how, culprit, behind",
    [
        (0, "killed", "rank 0 was killed by SIGKILL (out of memory?", "lost peer follows from it"),
        (1, "killed", "rank 1 was killed by SIGKILL (out of memory?", "lost peer follows from it"),
        (
            0,
            "raises",
            "rank 0 tp0 pp0 cp0 dp0 failed first: ValueError: a bug",
            "(in run_joined > train_or_evaluate",
        ),
        (1, "hangs", "rank 0 was the first to end, with exit code 1", "rank 1 still ran 1 s later"),
    ],
    ids=["killed", "killed-1", "raises", "hangs"],
)
def test_the_first_failure_is_named(
    rank,
    how,
    culprit,
    behind,
    corpus,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
):
    """By the launcher, last, and in status.json; a rank that only lost a peer says that."""

    def start(worker, nproc, args, **more):
        return launch(fail_in_step_3, nproc, (*args, str(tmp_path), rank, how), threads=1, **more)

    monkeypatch.setattr(start_module, "launch", start)
    monkeypatch.setattr(mesh_launch, "GRACE", 1.0)
    monkeypatch.chdir(tmp_path)
    argv = arguments(
        corpus,
        "--train-iters 9 --nproc 2",
        "--distributed-timeout-minutes 0.03 --hang-timeout-secs 60" * (how == "hangs"),
    )
    assert train.main(argv) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"nanomegatron train: {culprit}") and behind in last
    status = json.loads((tmp_path / "runs/test/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    logs = [tmp_path / "runs/test" / name for name in ("log.txt", "log.1.txt")]
    texts = [log.read_text() if log.exists() else "" for log in logs]
    assert status["message"].removesuffix(")") in last and "lost a peer" not in status["message"]
    place = "lost a peer in run_joined > train_or_evaluate > train > "
    assert place in texts[1 if how == "raises" else 1 - rank]
    assert sum("Traceback" in text for text in texts) == (how == "raises")


def test_what_an_earlier_run_said_is_not_repeated(tmp_path, capsys):
    """status.json is of the run before where no rank reached its log."""
    path = tmp_path / "status.json"
    write_status(path, dict(state="failed", message="yesterday's", rank="rank 0", iteration=4))
    facts = json.loads(path.read_text())
    name_culprit(tmp_path, "2999-01-01T00:00:00+00:00", 1, [0, -9], [])
    said = capsys.readouterr().err
    assert said.startswith("nanomegatron train: rank 1 was killed by SIGKILL (out of memory? see dmesg)")
    now = json.loads(path.read_text())
    assert (now["state"], f"nanomegatron train: {now['message']}\n", now["rank"]) == (
        "failed",
        said,
        "rank 1",
    )
    path.write_text(json.dumps(facts))
    name_culprit(tmp_path, "2001-01-01T00:00:00+00:00", 1, [0, -9], [])
    assert "rank 0 failed first: yesterday's" in capsys.readouterr().err
    hang = dict(state="failed", message="a hang: rank 0 has made no progress", rank="rank 1", iteration=4)
    write_status(path, hang)
    name_culprit(tmp_path, "2001-01-01T00:00:00+00:00", 0, [1, -9], [1])
    said = capsys.readouterr().err
    assert said == "nanomegatron train: rank 1 failed first: a hang: rank 0 has made no progress\n"


@pytest.mark.parametrize(
    "codes, running, said",
    [
        ([255, 255], [], "the process that starts the ranks was killed (out of memory? see dmesg)"),
        ([-9, -9], [0, 1], "a second signal came; ranks 0 1 still ran 10 s later and had to be stopped"),
        ([0, 255], [], "the process that starts the ranks"),
    ],
    ids=["fork server", "second signal", "fork server, late"],
)
def test_an_end_that_no_rank_has_written_down(codes, running, said, tmp_path, capsys):
    """The launcher does, as soon as the folder is free: rank 0 may still be leaving."""
    write_status(tmp_path / "status.json", dict(state="running", iteration=4))
    leaving = lock(tmp_path)
    threading.Timer(0.2, leaving.close).start()
    name_culprit(tmp_path, "2001-01-01T00:00:00+00:00", codes.index(max(codes, key=abs)), codes, running)
    facts = json.loads((tmp_path / "status.json").read_text())
    assert facts["state"] == "failed" and facts["exit_code"] == 1 and facts["iteration"] == 4
    assert said in facts["message"] and f"nanomegatron train: {facts['message']}\n" == capsys.readouterr().err


def fail_in_set_up(world: World, argv: list[str], folder: str, error: type) -> int:
    """Rank 1 fails, by itself and at once, while rank 0 is slow to say that the run has begun."""
    os.chdir(folder)
    write, choose = metrics_log.write_status, run_data.choose_tokenizer

    def late(path, facts):
        time.sleep(0.5 * (world.rank == 0 and facts["state"] == "running"))
        write(path, facts)

    def fails(*args):
        if world.rank == 1:
            raise error("only here")
        return choose(*args)

    metrics_log.write_status, run_data.choose_tokenizer = late, fails
    return train.run_rank(world, argv)


@pytest.mark.parametrize(
    "codes, code",
    [([0, 0], 0), ([75, 0], 75), ([1, 16], 16), ([3, -9], 3), ([0, -9], 1), ([75, -15], 1), ([1, 75], 1)],
)
def test_the_code_of_a_run_is_that_of_the_rank_that_says_why(codes, code, monkeypatch):
    monkeypatch.setattr(start_module, "launch", lambda *_, **__: codes)
    config = build_config({"run_name": "test", "nproc": 2})
    assert start_module.launch_ranks(config, [], print) == code


@pytest.mark.parametrize("error, code", [(ValueError, 2), (ZeroDivisionError, 1)])
def test_a_rank_that_fails_by_itself_at_once_has_its_say(error, code, corpus, tmp_path):  # noqa: F811
    """In status.json, which rank 0 does not write over, and in its log."""
    folder = tmp_path / "runs/test"
    write_status_before(folder)
    argv = arguments(corpus, "--train-iters 9")
    codes = launch(fail_in_set_up, 2, (argv, str(tmp_path), error), timeout=40, threads=1)
    assert codes[1] == code
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", code) and "only here" in status["message"]
    assert "only here" in (folder / "log.1.txt").read_text()


def write_status_before(folder):
    folder.mkdir(parents=True)
    write_status(folder / "status.json", dict(state="failed", message="yesterday's", rank="rank 0"))


def test_a_bug_in_training_is_no_bad_configuration(corpus, tmp_path):  # noqa: F811
    argv = arguments(corpus, "--train-iters 9")
    assert launch(fail_in_step_3, 1, (argv, str(tmp_path), 0, "raises"), timeout=60, threads=1) == [1]
    text = (tmp_path / "runs/test/log.txt").read_text()
    assert "Traceback" in text and text.rstrip().endswith("ValueError: a bug")
    status = json.loads((tmp_path / "runs/test/status.json").read_text())
    assert status["exit_code"] == 1 and status["message"].startswith("ValueError: a bug (in ")

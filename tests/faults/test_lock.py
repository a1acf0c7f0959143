"""The folders of a run: one run at a time, seen by all machines, damaged files named."""

import errno
import fcntl
import io
import os
import shutil
import threading
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import train
from nanomegatron.config.cli import ConfigError, from_toml
from nanomegatron.faults import lock as run_lock
from nanomegatron.faults.exit import BAD_CONFIG, DONE, SAVE_FAILED
from nanomegatron.faults.launch import launch
from nanomegatron.faults.lock import LOCK, lock, settings_in
from nanomegatron.mesh import World
from nanomegatron.report import plots
from nanomegatron.report.status import read_status
from nanomegatron.report.writers import read_jsonl
from tests.spmd import run_spmd
from tests.test_train import arguments, corpus  # noqa: F401 (a fixture)


def run_there(world: World, argv: list[str], folder: str, apart: bool = False) -> tuple[int, str]:
    """A rank of a run, `apart` from the others as on a machine of its own. Exit code, what it said."""
    place = Path(folder) / (f"host{world.rank}" if apart else ".")
    place.mkdir(exist_ok=True)
    os.chdir(place)
    run_lock.DYING, run_lock.STALE, plots.plot_loss = 1.0, 0.3, lambda *_: None
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = train.run_rank(world, argv)
    return code, said.getvalue()


SHORT = "--train-iters 2 --lr-warmup-iters 0 --eval-iters 1"


def test_machines_that_share_no_folder(corpus, tmp_path):  # noqa: F811
    """Found out before the first step; logs may lie apart, what is saved may not."""
    argv = arguments(corpus, SHORT)
    (code, said), (other, _) = run_spmd(run_there, 2, argv, str(tmp_path), True)
    assert code == other == BAD_CONFIG and "2 errors, nothing was started" in said
    host = os.uname().nodename
    assert f"--run-name test: runs/test of rank 0 is not the one on {host} (rank 1); start" in said
    assert "or give --run-folder-per-host" in said and not (tmp_path / "host1/runs").exists()
    for more in ([], ["--save", "runs/test"]):
        apart = [*argv, "--run-folder-per-host", *more]
        (code, said), _ = run_spmd(run_there, 2, apart, str(tmp_path), True)
        assert code == BAD_CONFIG and "1 error," in said and "; give --save a folder that all" in said
    shared = [*argv, "--run-folder-per-host", "--save", str(tmp_path / "ckpt")]
    assert [code for code, _ in run_spmd(run_there, 2, shared, str(tmp_path), True)] == [DONE] * 2
    assert (tmp_path / "ckpt/iter_0000002").exists() and (tmp_path / "host1/runs/test").exists()


def test_one_run_at_a_time(corpus, tmp_path):  # noqa: F811
    """The second leaves everything as it is, once the first has had time to die."""
    argv = arguments(corpus, SHORT)
    folder = tmp_path / "runs/test"
    with lock(folder, "--run-name test"):
        for more in ([], ["--eval-only"], ["--run-name", "other", "--save", str(folder)]):
            ((code, said),) = run_spmd(run_there, 1, [*argv, *more], str(tmp_path))
            assert code == BAD_CONFIG
            assert f"in use by pid {os.getpid()} on {os.uname().nodename} since 20" in said
        assert "give another --save" in said
        assert [path.name for path in folder.iterdir()] == [LOCK]
    dying = lock(folder, "--run-name test")
    threading.Timer(0.3, dying.close).start()
    assert [code for code, _ in run_spmd(run_there, 2, argv, str(tmp_path))] == [DONE] * 2
    with lock(folder / "ckpt", "--save"):  # which an evaluation only reads
        trained = (folder / "config.toml").read_text()
        assert run_spmd(run_there, 1, [*argv, "--eval-only"], str(tmp_path))[0][0] == DONE
    assert (folder / "config.toml").read_text() == trained
    assert from_toml((folder / "eval.toml").read_text()).run.eval_only
    assert read_jsonl(folder / "evals.jsonl")[-1]["batches"] == 1
    assert read_status(folder / "status.json", print)["checkpoint"] == "runs/test/ckpt"


def test_a_file_system_without_locks(monkeypatch, tmp_path):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    notes: list[str] = []
    lock(tmp_path, notes=notes).close()
    assert f"{tmp_path / LOCK}: no locks here ([Errno {errno.ENOLCK}] No locks available)" in notes[0]


def test_a_lock_or_settings_that_cannot_be_read(tmp_path, monkeypatch):
    """Stray bytes in the lock file, a folder without permission: messages, on all ranks alike."""
    with lock(tmp_path, "--run-name test"):
        (tmp_path / LOCK).write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match="is in use by"):
            lock(tmp_path, "--run-name test", wait=False)

    def denied(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied")

    warnings = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", denied)
        with pytest.raises(ConfigError, match="config.toml: .*Permission denied"):
            settings_in(tmp_path)
        assert read_status(tmp_path / "status.json", warnings.append) == {} and "Permission" in warnings[0]


def test_a_folder_that_cannot_be(corpus, tmp_path):  # noqa: F811
    """A run continues without its logs, though not without a place for what it saves."""
    (tmp_path / "file").write_text("in the way")
    argv = arguments(corpus, SHORT)
    ((code, said),) = run_spmd(run_there, 1, [*argv, "--save", "file/ckpt"], str(tmp_path))
    assert code == BAD_CONFIG and "--save file/ckpt: cannot write to file/ckpt (" in said
    assert "; give another folder" in said
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "runs").write_text("in the way, too")
    (code, said), _ = run_spmd(run_there, 2, [*argv, "--save", str(tmp_path / "ckpt")], str(tmp_path))
    assert code == DONE and "--run-name test: cannot write to runs/test (" in said
    assert (tmp_path / "ckpt/iter_0000002").exists()


def test_damaged_files_are_named(corpus, tmp_path):  # noqa: F811
    """Settings keep a run from starting; steps that cannot be read are counted, once."""
    argv, folder = (
        arguments(corpus, "--train-iters 3 --lr-warmup-iters 0 --eval-iters 0"),
        tmp_path / "runs/test",
    )
    ((code, _),) = run_spmd(run_there, 1, argv, str(tmp_path))
    assert code == DONE and not list(folder.glob("*.tmp"))
    whole = (folder / "config.toml").read_text()
    for torn in ("", whole[: len(whole) // 2], whole[: whole.index("\n# run")], "\0" * 99, b"\xff\xfe"):
        (folder / "config.toml").write_bytes(torn if isinstance(torn, bytes) else torn.encode())
        ((code, said),) = run_spmd(run_there, 1, argv, str(tmp_path))
        assert code == BAD_CONFIG and "runs/test/config.toml: damaged (" in said, said
        assert "remove the file" in said
    (folder / "config.toml").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], "\0" * 9, lines[2], "[]", lines[2][:20]]))
    ((code, said),) = run_spmd(run_there, 1, [*argv, "--train-iters", "4"], str(tmp_path))
    assert code == DONE and said.count("2 damaged lines left out, 2 steps are whole") == 1
    assert [step["iteration"] for step in read_jsonl(folder / "metrics.jsonl")] == [1, 3, 4]
    assert (folder / "config.toml").read_text() == whole.replace(
        "train-iters = 3", "train-iters = 4"
    ).replace("lr-decay-iters = 3", "lr-decay-iters = 4")


def held_in(folder: Path, number: int = 7) -> run_lock.Held:
    return run_lock.Held("--run-name test", folder, lock(folder, "--run-name test", number), number)


def test_what_has_become_of_a_folder(tmp_path, monkeypatch):
    """Removed, moved, another run's; but not where the file system has other numbers, or does not answer."""
    held = held_in(tmp_path / "run")
    assert held.lost() == ""
    stat = os.stat

    def away(error: int):
        def fails(path, **how):
            raise OSError(error, os.strerror(error))

        return fails

    for error in (errno.ESTALE, errno.EACCES, errno.EIO, errno.ETIMEDOUT):
        monkeypatch.setattr(Path, "stat", away(error))
        assert held.lost() == ""
    monkeypatch.setattr(Path, "stat", lambda path, **how: stat(tmp_path))  # another number of the file
    assert held.lost() == ""
    monkeypatch.undo()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert held.lost() == "was removed or moved"
    (tmp_path / "copy").rename(tmp_path / "run")
    assert held.lost() == ""
    held_in(tmp_path / "run", 8)
    assert held.lost().startswith(f"is used by another run (pid {os.getpid()} on ")
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "moved")
    assert held.lost() == "was removed or moved"


def lose_folder(world: World, argv: list[str], folder: str, how: str) -> int:
    """A rank of a run whose folder is lost as its third step begins."""
    os.chdir(folder)
    usual = train.train_step

    def train_step(run, *limits):
        if run.progress.iteration == 2 and world.rank == 0:
            if how == "removed":
                shutil.rmtree("runs/test")
            else:
                os.rename("runs/test", "moved")
            if how == "taken":
                run.log.taken = lock(Path("runs/test"), "--run-name test", 5)
                Path("runs/test/status.json").write_text("of the other run")
        return usual(run, *limits)

    train.train_step, plots.plot_loss = train_step, lambda *_: None
    if world.rank == 0:
        os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT), 1)
    return train.run_rank(world, argv)


@pytest.mark.parametrize("how, save", [("removed", []), ("moved", []), ("taken", ["--save", "saved"])])
def test_a_run_whose_folder_is_lost_stops(how, save, corpus, tmp_path):  # noqa: F811
    """At once, and writes nothing at its path; what still has a place is saved."""
    argv = [*arguments(corpus, "--train-iters 40 --lr-warmup-iters 0 --eval-iters 0"), *save]
    codes = launch(lose_folder, 2, (argv, str(tmp_path), how), timeout=60, threads=1)
    assert codes == [SAVE_FAILED] * 2
    said = (tmp_path / "said").read_text()
    what = "is used by another run (pid" if how == "taken" else "was removed or moved"
    assert f"--run-name test: {tmp_path / 'runs/test'} {what}" in said
    left = {path.name for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert left == ({LOCK, "status.json"} if how == "taken" else set())
    if how == "taken":
        assert (tmp_path / "runs/test/status.json").read_text() == "of the other run"
        assert len(list((tmp_path / "saved").glob("iter_*"))) == 1

"""The start of ranks: no signal is lost, what they need is imported once, and none is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nanomegatron.faults import launch as mesh_launch
from nanomegatron.faults.launch import launch, take_signals
from nanomegatron.faults.signals import PREEMPTED
from nanomegatron.mesh import World
from nanomegatron.report.log import LOST_PEER
from tests.checkpoint.test_security import processes
from tests.test_mesh import ROOT, alive, wait_until
from tests.test_train import arguments, corpus, finished, start, wait_for_step  # noqa: F401 (a fixture)


def held_back(world: World, folder: Path, launcher: int) -> int:
    """40 + its rank after a signal that came before its handlers. Rank 0 sends it: to all, or to itself."""
    (folder / str(world.rank)).touch()
    if world.rank == 0:
        wait_until((folder / "1").exists, 20)
        os.kill(launcher or os.getpid(), signal.SIGTERM)
    if world.rank == 0 or launcher:
        wait_until(lambda: signal.SIGTERM in signal.sigpending(), 20)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(40 + world.rank))
    take_signals()
    return 0


@pytest.mark.parametrize("to_all, codes", [(True, [40, 41]), (False, [40, 0])])
def test_a_signal_waits_until_a_rank_has_its_handlers(to_all, codes, tmp_path):
    found = launch(
        held_back, 2, (tmp_path, os.getpid() * to_all), timeout=30, hold=True, ok_codes=(0, 40, 41)
    )
    assert found == codes


def threads_here(world: World) -> int:
    """40 + the threads that this rank computes with."""
    return 40 + torch.get_num_threads()


def test_the_user_says_how_many_threads_compute(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert launch(threads_here, 1, ok_codes=(43,), timeout=30) == [43]
    assert launch(threads_here, 1, ok_codes=(41,), timeout=30, threads=1) == [41]


def never_listens(world: World, folder: Path, launcher: int) -> int:
    """Sends the launcher a signal, and then a second one."""
    (folder / str(world.rank)).touch()
    if world.rank == 0:
        wait_until((folder / "1").exists, 20)
        for _ in range(2):
            os.kill(launcher, signal.SIGTERM)
            time.sleep(mesh_launch.ECHO + 0.2)
    time.sleep(60)
    return 0


def test_a_second_signal_ends_ranks_that_do_not_listen(tmp_path, monkeypatch):
    monkeypatch.setattr(mesh_launch, "GRACE", 0.2)
    heard: list[tuple] = []
    args = tmp_path, os.getpid()
    codes = launch(never_listens, 2, args, timeout=30, hold=True, on_failure=lambda *end: heard.append(end))
    assert codes == [-signal.SIGKILL] * 2 and heard == [(0, codes, [0, 1])]


PROGRAM = """
import os, sys
from pathlib import Path
with open(os.environ["IMPORTED"], "a") as file:
    print(os.getpid(), file=file)
from nanomegatron.faults.launch import launch
from tests.test_mesh import write_pid_and_sleep

def rank(world, folder):
    world.last_words.append(Path(folder, f"last{world.rank}").touch)
    write_pid_and_sleep(world, folder)

def blame(first, codes, running):
    print(*codes, flush=True)
    sys.stdin.read()  # the launcher waits here

if __name__ == "__main__":
    launch(rank, 2, (".",), on_failure=blame)
"""


RUNNER = """
def rank(world, make):
    return make(world.rank)
"""
KINDS = """
import sys
from functools import partial
from runner import rank
from nanomegatron.faults.launch import launch

def more(by, number):
    return number + by

if __name__ == "__main__":
    sys.exit(launch(rank, 2, (partial(more, 1),), ok_codes=(1, 2)) != [1, 2])
"""


def test_a_function_of_the_program_can_be_an_argument(tmp_path):
    """As benchmarks/peers.py gives the kind of its model to ranks of another module."""
    (tmp_path / "runner.py").write_text(RUNNER)
    (tmp_path / "kinds.py").write_text(KINDS)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "kinds.py"], cwd=tmp_path, env=environment, check=True, timeout=100)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
def test_ranks_import_nothing_again_and_end_with_their_fork_server(tmp_path):
    """Launcher and server import the program, wherever it lies; ranks are forked with it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/program.py").write_text(PROGRAM)
    (tmp_path / "program.py").write_text("raise ImportError('another one, in the working directory')")
    command = [sys.executable, tmp_path / "bin/program.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "IMPORTED": str(tmp_path / "imported")}
    how = dict(cwd=tmp_path, env=environment, text=True, start_new_session=True)
    how |= dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    launcher = subprocess.Popen(command, **how)
    try:
        files = [tmp_path / f"pid{rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() for file in files), 60)
        ranks = [int(file.read_text()) for file in files]
        (server,) = {parent_of(pid) for pid in ranks}
        imported = [int(line) for line in (tmp_path / "imported").read_text().split()]
        assert sorted(imported) == sorted(
            [launcher.pid, launcher.pid, server]
        )  # as __main__, and by its name
        os.kill(server, signal.SIGKILL)
        assert launcher.stdout.readline().split() == [str(mesh_launch.UNSEEN)] * 2
        wait_until(lambda: not any(alive(pid) for pid in ranks), 10)  # before the launcher ends
        assert (tmp_path / "last0").exists() and (tmp_path / "last1").exists()
    finally:
        launcher.kill()
        launcher.communicate()


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    """Its ranks, once both are there: children of its fork server."""
    everyone = processes(launcher.pid)
    servers = [pid for pid in everyone if parent_of(pid) == launcher.pid]
    found = [pid for pid in everyone if parent_of(pid) in servers]
    return found if len(found) == 2 else []


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
@pytest.mark.parametrize("where", ["rank", "launcher", "group"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_moment_in_which_ranks_begin(where, number, corpus, tmp_path):  # noqa: F811
    """The run ends before its first step, and says so."""
    argv = arguments(corpus, "--train-iters 8 --nproc 2")
    process = start(tmp_path, argv, start_new_session=True)
    found: list[int] = []

    def both() -> bool:
        try:
            found[:] = ranks_of(process)
        except FileNotFoundError:  # a process has ended meanwhile
            return False
        return bool(found)

    wait_until(both, 60)
    if where == "rank":
        os.kill(found[1], number)
    else:
        (os.killpg if where == "group" else os.kill)(process.pid, number)
    assert "before the first step" in finished(process, PREEMPTED)
    status = json.loads((tmp_path / "runs/test/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("preempted", PREEMPTED)


@pytest.mark.full
@pytest.mark.parametrize("killed", ["launcher", "fork server"])
def test_the_end_is_written_down_when_the_launcher_dies(killed, corpus, tmp_path):  # noqa: F811
    argv = arguments(corpus, "--train-iters 100000 --nproc 2")
    process = start(tmp_path, argv, start_new_session=True)
    wait_for_step(tmp_path, 3, process)
    ranks = ranks_of(process)
    os.kill(process.pid if killed == "launcher" else parent_of(ranks[0]), signal.SIGKILL)
    finished(process, -signal.SIGKILL if killed == "launcher" else 1)
    wait_until(lambda: not any(alive(pid) for pid in ranks), 10)
    status = json.loads((tmp_path / "runs/test/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert "fork server, was killed" in status["message"] or status["message"].startswith(LOST_PEER)

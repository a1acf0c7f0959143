"""The hang watch-dog: who keeps the others waiting, said in time, with the stacks of all live ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train
from nanomegatron import comm
from nanomegatron import step as step_module
from nanomegatron.config.settings import Config, ParallelConfig
from nanomegatron.faults import launch as mesh_launch
from nanomegatron.faults.launch import launch
from nanomegatron.faults.watchdog import SILENT, Standstill, Watchdog, blame
from nanomegatron.mesh import Axis, Mesh, World
from nanomegatron.report import plots
from nanomegatron.report.log import RunLog
from nanomegatron.report.traffic import Traffic
from tests.test_train import arguments, corpus  # noqa: F401 (a fixture)

T = 1.0  # seconds


def sleep_in_python() -> None:
    time.sleep(60)


def hanging(world: World, argv: list[str], folder: str, rank: int, how: str) -> int:
    """A rank of a run in which one rank hangs in step 4. launching: as on a GPU, waits are not noted."""
    os.chdir(folder)
    if "launching" in how:
        Traffic.wait = lambda *_: nullcontext()
        start_step = Traffic.start_step
        Traffic.start_step = lambda self, launching: start_step(self, launching=True)
    usual = step_module.token_count

    def token_count(run, batches):
        if run.progress.iteration == 3 and world.rank == rank:
            Path("began").touch()
            if "stopped" in how:
                os.kill(os.getpid(), signal.SIGSTOP)
            sleep_in_python()
        return usual(run, batches)

    step_module.token_count, plots.plot_loss = token_count, lambda *_: None
    return train.run_rank(world, argv)


def outcome(folder: Path, argv: list[str], ranks: int, rank: int, how: str) -> tuple[list[int], str, float]:
    """Exit codes, the message in status.json, which blames the rank, and the seconds from the hang to it."""
    argv = [*argv, "--train-iters", "9", "--hang-timeout-secs", str(T)]
    codes = launch(hanging, ranks, (argv, str(folder), rank, how), timeout=60, threads=1)
    path = folder / "runs/test/status.json"
    status = json.loads(path.read_text())
    assert (status["state"], status["exit_code"], status["rank"]) == ("failed", 1, f"rank {rank}")
    assert status["iteration"] == 2  # step 3 was not yet reported
    return codes, status["message"], path.stat().st_mtime - (folder / "began").stat().st_mtime


HANGS = [(2, "", 1, "stopped"), (2, "", 0, "sleeps")]
HANGS += [(2, "", 1, "stopped, launching"), (2, "", 0, "sleeps, launching")]
X4 = [(4, "--tp 2 --pp 2", rank, "stopped") for rank in range(4)]


@pytest.mark.parametrize(
    "ranks, layout, rank, how", HANGS + [pytest.param(*each, marks=pytest.mark.full) for each in X4]
)
def test_a_rank_that_hangs_is_named(ranks, layout, rank, how, corpus, tmp_path, monkeypatch):  # noqa: F811
    """Within T and two seconds, and all others have left soon after."""
    monkeypatch.setattr(mesh_launch, "GRACE", 1.0)
    codes, message, seconds = outcome(tmp_path, arguments(corpus, layout), ranks, rank, how)
    assert T <= seconds < T + 2, message
    stopped = "stopped" in how
    expected = "does not answer: it is stopped" if stopped else "is in sleep_in_python (test_watchdog.py:"
    assert message.count(" bytes over ") < ranks, f"a communication is named twice: {message}"
    assert f"; rank {rank} on {os.uname().nodename} {expected}" in message and "made no progress" in message
    assert [code == 1 for code in codes] == [not (stopped and r == rank) for r in range(ranks)]
    stacks = {path.name: path.read_text() for path in (tmp_path / "runs/test").glob("hang.*.txt")}
    assert set(stacks) == {f"hang.{r}.txt" for r in range(ranks) if not (stopped and r == rank)}
    assert all("in train_step" in text for text in stacks.values())
    assert ("in sleep_in_python" in "".join(stacks.values())) == (not stopped)
    log = (tmp_path / "runs/test").glob("log*.txt")
    assert sum(message in path.read_text() for path in log) == 1


def out_of_order(world: World, folder: str, how: str, rank: int) -> int:
    """Four ranks, tp 2: one rank swaps two collectives, or skips one, in round 3."""
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    mesh = Mesh.build(parallel, world, torch.device("cpu"), observer=Traffic())
    config = replace(Config(parallel=parallel), run=replace(Config().run, hang_timeout_secs=T))
    x = torch.ones(256)
    with Watchdog(config, mesh, RunLog(folder, config, mesh.rank, mesh.label), world):
        for turn in range(4):
            mesh.observer.start_step()
            axes = [mesh.tp, mesh.world if how == "swaps" else mesh.dp]
            if turn == 3 and world.rank == rank:
                axes = axes[::-1] if how == "swaps" else axes[1:]
            for axis in axes:
                comm.all_reduce_(x, axis)
        comm.barrier(mesh.world)
    return 0


ORDERS = [("swaps", 1), *(("swaps", rank) for rank in (0, 2, 3)), *(("skips", rank) for rank in range(4))]


@pytest.mark.parametrize(
    "how, rank", [pytest.param(*each, marks=[pytest.mark.full] * bool(i)) for i, each in enumerate(ORDERS)]
)
def test_collectives_out_of_order(how, rank, tmp_path):
    """Kind, bytes, axis and number of what each rank waits in, and for whom; no rank waits longer."""
    begin = time.monotonic()
    assert launch(out_of_order, 4, (str(tmp_path), how, rank), timeout=30, threads=1) == [1] * 4
    assert time.monotonic() - begin < T + 6
    message = json.loads((tmp_path / "status.json").read_text())["message"]
    peer, replica = rank ^ 1, rank ^ 2  # over tp, over dp
    assert f"rank {peer} waits in all_reduce of 1024 bytes over tp, number 4, for rank {rank};" in message
    if how == "swaps":
        others = " ".join(str(r) for r in range(4) if r != peer)
        what = "all_reduce of 1024 bytes over world, number 4"
        assert f"ranks {others} wait in {what}, for rank {peer};" in message
    else:
        done, rest = (" ".join(map(str, sorted(pair))) for pair in ((rank, replica), (peer, peer ^ 2)))
        assert f"ranks {done} wait in barrier of 0 bytes over world, number 1, for ranks {rest};" in message
    for each in range(4):
        text = (tmp_path / f"hang.{each}.txt").read_text()
        assert "waits in " in text.splitlines()[0] and "in out_of_order" in text


SHORT = 0.6  # seconds


def slow(world: World, folder: str) -> int:
    """A slow start, SHORT and more without communication, a wait of half of it; then a store that hangs."""
    mesh = Mesh.build(ParallelConfig(), world, torch.device("cpu"), observer=Traffic())
    config = replace(Config(), run=replace(Config().run, hang_timeout_secs=SHORT))
    log = RunLog(folder, config, mesh.rank, mesh.label)
    with Watchdog(config, mesh, log, world):
        time.sleep(1.5 * SHORT * world.rank)
        comm.barrier(mesh.world)  # before the first step is done
        for _ in range(3):
            mesh.observer.start_step()
            comm.barrier(mesh.world)
        time.sleep(1.5 * SHORT + 0.5 * SHORT * world.rank)
        comm.barrier(mesh.world)
    time.sleep(0.2)
    stuck = Watchdog(config, mesh, log, world)
    stuck.beat = lambda: time.sleep(60)  # as a store whose machine is stopped
    with stuck:
        time.sleep(60 * world.rank)
        comm.barrier(mesh.world)
    return 0


@pytest.mark.full
def test_a_slow_run_is_no_hang_and_a_store_may_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(mesh_launch, "GRACE", 0.5)
    begin = time.monotonic()
    codes = launch(slow, 2, (str(tmp_path),), timeout=30, threads=1)
    assert time.monotonic() - begin > 4.5 * SHORT
    message = json.loads((tmp_path / "status.json").read_text())["message"]
    assert codes[0] == 1 and "the store of the ranks does not answer" in message and "barrier" in message


AGENT = """
import os, signal, sys, time
from pathlib import Path
from nanomegatron.config.settings import Config
from nanomegatron.faults.watchdog import Watchdog
from nanomegatron.mesh import Mesh, World
from nanomegatron.report.log import RunLog

if not (child := os.fork()):
    os.environ |= dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", TORCHELASTIC_RESTART_COUNT="0")
    log = RunLog(".", Config(), stream=open("said", "w"))
    with Watchdog(Config(), Mesh(), log, World.from_environment()):
        Path("watched").touch()
        time.sleep(60)
while not Path("watched").exists():
    time.sleep(0.01)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_does_not_outlive_torchruns_agent(tmp_path, monkeypatch):
    """Its lock on the run's folder would keep the same command from resuming."""
    command = [sys.executable, "-c", AGENT]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=60)
    rank, end = int(done.stdout), time.monotonic() + 5
    while time.monotonic() < end and Path(f"/proc/{rank}/exe").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{rank}/exe").exists()
    assert "torchrun was killed" in (tmp_path / "said").read_text()
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


def test_what_counts_as_standing_still(monkeypatch):
    """Only waits are limited by T; time in which the process was stopped is not counted."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    traffic, axis = Traffic(), Axis("dp", 2, 0, (0, 1))
    still = Standstill(traffic, 10.0, 600.0)

    def after(seconds: float) -> float:
        for _ in range(round(seconds / still.tick)):
            clock[0] += still.tick
            share = still.share()
        return share

    assert after(1000) == 0  # data building, before the first step
    x = [torch.ones(2)]
    with traffic.start(axis, "all_reduce", x):
        assert after(270) == pytest.approx(0.5, rel=0.01)  # of 0.9 x 600 s
    traffic.start_step(), traffic.start_step()
    assert after(50) == pytest.approx(50 / (10 * SILENT), rel=0.05)
    with traffic.wait(traffic.last):
        assert after(5) == pytest.approx(0.5, rel=0.06)
        clock[0] += 1000
        assert still.share() < 0.6
        assert after(4.75) == pytest.approx(1.0, rel=0.06)
        traffic.start(axis, "all_reduce", x)
        assert after(1) < 0.2


def test_who_is_to_blame():
    """First those that do not answer, then those that do not wait, then the groups that wait."""
    key = ["dp", 0, 3]
    waits = dict(host="a", place="x", call=["all_gather", 64, 7, key], numbers=[[key, 7]])
    behind = waits | dict(call=["send", 8, 2, ["pp", 2, 5]], numbers=[[key, 6], [["pp", 2, 5], 2]])
    busy = dict(host="b", place="f (x.py:3)", call=None, numbers=[[key, 6]])
    now = {rank: dict(beat, n=9) for rank, beat in enumerate((waits, busy, behind, waits, busy))}
    before = {rank: dict(beat, n=9 if rank == 4 else 5) for rank, beat in now.items()}
    groups = {"world": [tuple(range(6))], "dp": [(4, 5), (0, 1, 2, 3)]}
    assert blame(groups, before, now) == [
        "rank 4 on b does not answer: it is stopped, or its machine is lost",
        "rank 5 does not answer: it is stopped, or its machine is lost",
        "rank 1 on b is in f (x.py:3)",
        "ranks 0 3 wait in all_gather of 64 bytes over dp, number 7, for ranks 1 2",
        "rank 2 waits in send of 8 bytes over pp, number 2, for rank 5",
    ]

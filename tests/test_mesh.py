"""The grids against Megatron's own generator and literal goldens; the launcher: failures, kills, restarts."""

import datetime
import functools
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nanomegatron.comm import all_reduce
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.faults import launch as mesh_launch
from nanomegatron.faults.launch import launch
from nanomegatron.mesh import Axis, Mesh, World, axis_groups, link_ends, pick_device
from nanomegatron.report.traffic import Traffic
from tests.spmd import run_spmd, spmd

ROOT = Path(__file__).resolve().parent.parent


def parallel(tp=1, cp=1, pp=1, ep=1, etp=None):
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )


def splits(n, factors):
    """Every way to write n as a product of `count` factors, the last one what remains."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    for sizes in itertools.product(divisors, repeat=factors - 1):
        product = functools.reduce(int.__mul__, sizes)
        if n % product == 0:
            yield *sizes, n // product


@pytest.mark.parametrize("world", [8, 16])
def test_every_grid_is_megatrons(world):
    """Exactly its groups in its order, for all (tp, cp, pp, dp) and all (etp, ep, edp) folded over them."""
    state = pytest.importorskip("megatron.core.parallel_state")
    order = "tp-cp-ep-dp-pp"

    def ranks(tokens, **sizes):
        grid = state.RankGenerator(order=order, **sizes)
        return {name: [tuple(group) for group in grid.get_ranks(token)] for name, token in tokens.items()}

    dense = {name: name for name in ("tp", "cp", "dp", "pp")}
    dense |= {"dp_cp": "dp-cp", "tp_cp": "tp-cp"}
    for tp, cp, pp, dp in splits(world, 4):
        expected = ranks(dense, tp=tp, cp=cp, pp=pp, dp=dp, ep=1)
        expected["embed"] = [tuple(state.default_embedding_ranks(stages)) for stages in expected["pp"]]
        if pp == 1:
            assert axis_groups(parallel(tp, cp, pp), world)["embed"] == [(r,) for r in range(world)]
        for etp, ep, edp in splits(world // pp, 3):
            found = axis_groups(parallel(tp, cp, pp, ep, etp), world)
            folded = {"etp": "tp", "ep": "ep", "edp": "dp", "etp_ep": "tp-ep", "expert_pp": "pp"}
            expert = ranks(folded, tp=etp, ep=ep, dp=edp, pp=pp, cp=1)
            assert expert.pop("expert_pp") == found["pp"]
            assert found.pop("world") == [tuple(range(world))]
            assert found == expected | expert, (tp, cp, pp, etp, ep)


def test_groups_of_8_and_16_ranks():
    """As printed in Megatron's own documentation and measured there."""
    groups = axis_groups(parallel(tp=2, pp=2), 8)
    assert groups["tp"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups["dp"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups["pp"] == groups["embed"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    groups = axis_groups(parallel(tp=2, cp=2, pp=2), 16)
    assert groups["cp"] == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert groups["dp"][:2] == [(0, 4), (1, 5)] and groups["pp"][:2] == [(0, 8), (1, 9)]
    assert groups["dp_cp"][0] == (0, 2, 4, 6)
    groups = axis_groups(parallel(pp=4), 8)
    assert groups["pp"] == [(0, 2, 4, 6), (1, 3, 5, 7)] and groups["embed"] == [(0, 6), (1, 7)]
    groups = axis_groups(parallel(tp=2, cp=2, ep=4, etp=1), 8)  # experts span tp and cp ranks
    assert groups["ep"] == [(0, 1, 2, 3), (4, 5, 6, 7)] and groups["edp"][0] == (0, 4)


@pytest.mark.parametrize("sizes", [dict(tp=3), dict(tp=2, pp=8), dict(ep=3), dict(tp=4, ep=4)])
def test_grid_that_does_not_fill_the_world(sizes):
    with pytest.raises(ValueError, match="8 processes do not fill the grid"):
        axis_groups(parallel(**sizes), 8)


@pytest.mark.parametrize("size, vpp, rounds", [(64, 1, 4), (64, 2, 8), (63, 2, 8), (2, 1, 2)])
def test_links_connect_side_by_side(size, vpp, rounds):
    """However long the pipeline: a link connects when both of its ranks have connected those before it."""
    flags = dict(pipeline_model_parallel_size=size, num_virtual_stages_per_pipeline_rank=vpp)
    done = [0] * size
    for a, b in link_ends(ParallelConfig(**flags)):
        done[a] = done[b] = max(done[a], done[b]) + 1
    assert max(done) <= rounds


def two_meshes(world: World):
    """Sums of the ranks over every axis of two meshes, each in its own communicators."""
    cpu = torch.device("cpu")
    first = Mesh.build(parallel(tp=2, cp=2, pp=2, ep=2, etp=1), world, cpu, observer=Traffic())
    second = Mesh.build(parallel(tp=4), world, cpu, observer=Traffic())
    mine = torch.tensor([world.rank])
    for mesh, (tp, cp, dp) in (first, (2, 2, 1)), (second, (4, 1, 2)):
        at = mesh.tp.rank + tp * (mesh.cp.rank + cp * (mesh.dp.rank + dp * mesh.pp.rank))
        assert at == world.rank == mesh.rank
        for axis in vars(mesh).values():
            if isinstance(axis, Axis):
                assert axis.ranks[axis.rank] == world.rank and len(axis.ranks) == axis.size
                assert (axis.group is None) == (axis.size == 1)
                assert all_reduce(mine, axis).item() == sum(axis.ranks), axis
    assert second.tp.group is second.tp_cp.group, "equal groups share one communicator"
    assert ("tp", "all_reduce", "calls") in second.observer.counts and first.observer is not second.observer
    return first.label, second.tp.ranks, first.embed.ranks


def test_two_meshes_in_one_process():
    results = run_spmd(two_meshes, 8)
    assert results[0] == ("rank 0 tp0 pp0 cp0 dp0", (0, 1, 2, 3), (0, 4))
    assert results[7] == ("rank 7 tp1 pp1 cp1 dp0", (4, 5, 6, 7), (3, 7))


@spmd(world=4, tp=2, distributed_timeout_minutes=3)
def test_every_group_has_the_timeout(mesh):
    """torch gives a new group its own default, not that of the first one."""
    for axis in mesh.world, mesh.tp, mesh.dp:
        options = axis.group._get_backend(mesh.device).options
        assert options._timeout == datetime.timedelta(minutes=3), axis


def test_one_process_has_no_groups():
    mesh = Mesh.build(ParallelConfig(), World(), torch.device("cpu"))
    axes = [axis for axis in vars(mesh).values() if isinstance(axis, Axis)]
    assert len(axes) == 12 and all(axis.size == 1 and axis.group is None for axis in axes)
    assert not dist.is_initialized()
    Mesh.close()


def test_world_comes_from_torchruns_variables(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert World.from_environment() == World(0, 1, 0, "")
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert World.from_environment() == World(5, 8, 1, "env://")


# The launcher. A worker is a function of this module; what it returns is the exit code of its rank.


def leave_with(world: World, codes):
    return codes[world.rank]


def fail_or_sleep(world: World, failing):
    if world.rank != failing:
        time.sleep(60)
    return 3


def threads(world: World, expected):
    return 0 if torch.get_num_threads() == expected else 1


def wait_for_signal(world: World, folder):
    """0 after a SIGTERM; rank 0 sends one to the launcher once both can take it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(40 + world.rank))
    (folder / str(world.rank)).touch()
    if world.rank == 0:
        while not (folder / "1").exists():
            time.sleep(0.01)
        os.kill(int((folder / "launcher").read_text()), signal.SIGTERM)
    time.sleep(30)
    return 1


def write_pid_and_sleep(world: World, folder):
    path = Path(folder) / f"pid{world.rank}"
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
    time.sleep(60)
    return 0


def test_launch_returns_the_exit_codes():
    assert launch(leave_with, 3, ([0, 0, 0],), timeout=30) == [0, 0, 0]
    assert launch(leave_with, 3, ([0, 75, 2],), timeout=30) == [0, 75, 2]
    assert launch(threads, 2, (3,), timeout=30, threads=3) == [0, 0]


@pytest.mark.parametrize("early", [False, True])
def test_first_failure_stops_the_other_ranks(early, monkeypatch):
    """Also if it has ended before the launcher looks."""
    wait = mesh_launch._wait

    def wait_briefly(ranks, *more):
        if early:
            ranks[1].join()
        return wait(ranks, *more)

    monkeypatch.setattr(mesh_launch, "_wait", wait_briefly)
    monkeypatch.setattr(mesh_launch, "GRACE", 0.3)
    start = time.monotonic()
    heard: list[tuple] = []
    codes = launch(fail_or_sleep, 3, (1,), timeout=30, on_failure=lambda *end: heard.append(end))
    assert codes == [-signal.SIGKILL, 3, -signal.SIGKILL]
    assert heard == [(1, codes, [0, 2])]
    assert time.monotonic() - start < 15


def test_timeout_kills_all_ranks():
    start = time.monotonic()
    assert launch(fail_or_sleep, 2, (None,), timeout=0.5) == [-signal.SIGKILL] * 2
    assert time.monotonic() - start < 10


def test_sigterm_is_passed_on(tmp_path):
    (tmp_path / "launcher").write_text(str(os.getpid()))
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert launch(wait_for_signal, 2, (tmp_path,), timeout=20) == [40, 41]
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


def save_at_a_signal(world: World, folder):
    """75 half a second after a signal."""
    for number in mesh_launch.PASSED_ON:
        signal.signal(number, lambda *_: (time.sleep(0.5), os._exit(75)))
    write_pid_and_sleep(world, folder)


ALSO = [pytest.param(os.killpg, n, marks=pytest.mark.full) for n in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("send, number", [(os.killpg, signal.SIGUSR1), (os.kill, signal.SIGINT), *ALSO])
def test_a_signal_to_the_launcher_or_its_process_group_lets_ranks_save(send, number, tmp_path):
    """By timeout, systemd, Slurm, a terminal it reaches launcher, ranks and fork server at the same time."""
    with started_launcher("save_at_a_signal", tmp_path) as (launcher, _):
        send(launcher.pid, number)
        assert launcher.communicate(timeout=20)[0].split() == ["75", "75"]


def end_with_the_signal(world: World, folder):
    """The number of the signal that it gets."""
    for number in mesh_launch.passed_on():
        signal.signal(number, lambda number, _: os._exit(number))
    write_pid_and_sleep(world, folder)


@pytest.mark.parametrize("before, number", [((), signal.SIGHUP), (("nohup",), signal.SIGTERM)])
def test_a_lost_terminal_is_a_signal_but_not_under_nohup(before, number, tmp_path):
    with started_launcher("end_with_the_signal", tmp_path, *before) as (launcher, _):
        os.killpg(launcher.pid, signal.SIGHUP)
        time.sleep(0.5)
        launcher.terminate()
        assert launcher.communicate(timeout=20)[0].split() == [str(int(number))] * 2


def interrupted_once(world: World, folder):
    """75 half a second after KeyboardInterrupt; another one is a failure."""
    try:
        write_pid_and_sleep(world, folder)
    except KeyboardInterrupt:
        time.sleep(0.5)
    return 75


def test_ctrl_c_interrupts_a_rank_once(tmp_path):
    """Though it gets it from the terminal and from the launcher; `nanomegatron generate` ends so."""
    with started_launcher("interrupted_once", tmp_path) as (launcher, _):
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.communicate(timeout=20)[0].split() == ["75", "75"]


def test_a_rank_that_is_preempted_is_no_failure(monkeypatch):
    """The others have as long as they need."""
    monkeypatch.setattr(mesh_launch, "GRACE", 0.1)
    heard: list[tuple] = []
    how = dict(timeout=30, ok_codes=(0, 75), on_failure=lambda *end: heard.append(end))
    assert launch(leave_one_by_one, 2, (75,), **how) == [75, 75] and not heard
    assert launch(leave_one_by_one, 2, (3,), **how) == [3, -signal.SIGKILL] and heard[0][0] == 0


def leave_one_by_one(world: World, code):
    time.sleep(world.rank)
    return code


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")
def test_no_rank_outlives_a_killed_launcher():
    with tempfile.TemporaryDirectory() as folder:  # a short path: it will hold the fork server's socket
        kill_launcher(Path(folder))


@contextmanager
def started_launcher(worker, folder, *before):
    """A launcher in a process group of its own, which prints its ranks' exit codes; and the ranks' pids.

    before: a command that starts it. A lost terminal ends it, though the tests may run under nohup.
    """
    script = folder / "run.py"
    script.write_text(
        f"import sys\nfrom nanomegatron.faults.launch import launch\nfrom tests.test_mesh import {worker}\n"
        f"if __name__ == '__main__':\n    print(*launch({worker}, 2, (sys.argv[1],)))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    how = dict(env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    how["preexec_fn"] = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    launcher = subprocess.Popen([*before, sys.executable, str(script), str(folder)], **how)
    files = [folder / f"pid{rank}" for rank in range(2)]
    try:
        wait_until(lambda: all(file.exists() for file in files), 30)
        pids = [int(file.read_text()) for file in files]
        assert all(alive(pid) for pid in pids)
        yield launcher, pids
    finally:
        launcher.kill()
        launcher.communicate()


def kill_launcher(folder):
    with started_launcher("write_pid_and_sleep", folder) as (_, pids):
        pass
    wait_until(lambda: not any(alive(pid) for pid in pids), 10)


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def start_again(world: World, port, counts):
    """One start of a torchrun worker, with the variables that the agent sets; each counts by itself."""
    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(counts[world.rank]),
    }
    mesh = Mesh.build(parallel(tp=3), World.from_environment(), torch.device("cpu"))
    return all_reduce(torch.tensor(mesh.rank + 1), mesh.tp).item()


def test_restart_finds_no_address_of_the_dead():
    """The agent's store lives through all starts; each must connect to its own processes.

    A machine that is restarted because another one was does not count that.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for counts in ((0, 0, 0), (1, 1, 0), (1, 1, 0), (2, 2, 3)):
        assert run_spmd(start_again, 3, store.port, counts, timeout=20) == [6, 6, 6]


def test_device_asked_for_is_never_another(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device("auto", World()) == torch.device("cpu")
    with pytest.raises(ValueError, match="--device cuda: torch sees no GPU"):
        pick_device("cuda", World())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert pick_device("auto", World(rank=6, size=8, local_rank=2)) == torch.device("cuda", 2)
    assert pick_device("cpu", World()) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # where a launcher shows each rank its own
    assert pick_device("auto", World(rank=6, size=8, local_rank=2)) == torch.device("cuda", 0)


def test_an_axis_names_groups_that_were_not_made():
    axis = Axis("tp", 4, 0, (0, 1, 2, 3))
    assert axis.neighbours(4) is axis
    with pytest.raises(ValueError, match="tp: Mesh.build has made no groups of 2 ranks"):
        axis.neighbours(2)

"""Saves beside the training: the bytes of a synchronous save, and no failure of a writer goes unnoticed."""

import os
import re
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanomegatron.checkpoint import async_save, saver
from nanomegatron.checkpoint.async_save import START, AsyncSaver, HostBuffer
from nanomegatron.checkpoint.checkpoint import SaveError, latest
from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.folder import KEEP_ALL, Retention
from nanomegatron.checkpoint.saver import Saver
from nanomegatron.comm import any_rank
from nanomegatron.config.parallel import ParallelConfig
from nanomegatron.config.settings import CheckpointConfig
from nanomegatron.faults.launch import launch
from nanomegatron.mesh import Mesh, World
from tests.checkpoints import ALONE, cuts, expect_newest, save_alone, save_by_rank, two_by_two
from tests.spmd import run_spmd

SIZE = 8 * 12 * 8 + 20 + 4 * 6 * 2 * 4 + 4  # bytes of all that `cuts` gives
PATCH = """
import os, signal, time
from nanomegatron.checkpoint import blocks, folder, writer
"""


def contents(step: int) -> tuple[dict, str]:
    """State and config of iteration `step`, as in tests/checkpoints.py."""
    return {"consumed_samples": 4 * step}, f"step = {step}\n"


def started(mesh: Mesh, patch: str = "") -> AsyncSaver:
    """A saver on this rank whose writer runs `patch` before it serves."""
    first, last = START.rsplit("from nanomegatron", 1)
    async_save.START = f"{first}{PATCH}{patch}\nfrom nanomegatron{last}"
    return AsyncSaver(mesh, SIZE)


def begin(found: AsyncSaver, root: Path, step: int, keep: Retention = KEEP_ALL) -> list[Piece]:
    """Begin to save iteration `step`, then change what has been copied."""
    pieces = cuts(step, found.mesh.world.size, found.mesh.world.rank, 1)
    found.begin(root, step, pieces, *contents(step), keep)
    found.wait_copies()
    for piece in pieces:
        piece.data.fill_(7)
    return pieces


def heal(found: AsyncSaver) -> int:
    """Writers that start from here on are as usual; the process of the first one."""
    while found.process is None:
        time.sleep(0.001)
    async_save.START = START
    return found.process.pid


def save_both_ways(mesh: Mesh, root: Path) -> list[str]:
    """Iterations 10 and 20, one after another; notes."""
    save_by_rank(mesh, root / "sync", (10, 20), 1)
    found, notes = started(mesh), []
    for step in (10, 20):
        begin(found, root / "async", step)
        notes += found.join()
    found.close()
    assert found.process.wait(10) is not None
    return notes


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_bytes_are_those_of_a_synchronous_save(tmp_path):
    """Of every file, whatever happens to the tensors after their copies."""
    assert run_spmd(save_both_ways, 2, tmp_path, tp=2) == [[], []]
    files = files_of(tmp_path / "sync")
    assert files == files_of(tmp_path / "async") and len(files) == 2 * 4 + 1
    assert expect_newest(tmp_path / "async", 20) == []


def test_many_types_and_views_are_copied_in_order(tmp_path):
    """Strides, scalars, nothing at all: as the synchronous writer has them."""
    pieces = [
        Piece("odd", (3,), (0,), torch.tensor([True, False, True])),
        Piece("t", (7, 4), (0, 0), torch.randn(4, 7, dtype=torch.float64).t()),
        Piece("s", (), (), torch.tensor(3, dtype=torch.int16)),
        Piece("empty", (0, 4), (0, 0), torch.empty(0, 4)),
        Piece("half", (5,), (0,), torch.randn(10).bfloat16()[::2]),
    ]
    keep, found = Retention(), AsyncSaver(ALONE, sum(piece.data.nbytes for piece in pieces))
    found.begin(tmp_path / "async", 1, pieces, {}, "", keep)
    assert found.join() == []
    async_save.on_all_ranks(ALONE, lambda: None)
    saver.save(tmp_path / "sync", 1, pieces, {}, "", ALONE, keep)
    assert files_of(tmp_path / "sync") == files_of(tmp_path / "async")
    found.close()


# Failures of a writer.

SLOW = """
usual = blocks._write_at
def slow(*args):
    time.sleep({seconds})
    return usual(*args)
blocks._write_at = slow
"""
NO_ROOM = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))"


def fail_once(mesh: Mesh, root: Path, patch: str, kill: bool) -> str:
    """Rank 1's writer fails in its first save; the message. The save after that is as any other."""
    rank = mesh.world.rank
    found = started(mesh, patch if rank else "")
    begin(found, root, 30)
    process = heal(found)
    if kill and rank:
        time.sleep(0.3)
        os.kill(process, signal.SIGKILL)
    end = time.monotonic() + 20
    while not any_rank(found.failed, mesh.world, mesh.device):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert found.failed == bool(rank)  # rank 0's waits for the part of rank 1
    with pytest.raises(SaveError) as error:
        found.join()
    assert rank or not list(root.glob("*.tmp"))
    begin(found, root, 40)
    assert found.join() == []
    found.close()
    return str(error.value)


@pytest.mark.parametrize(
    "patch, kill, message",
    [
        (NO_ROOM, False, "OSError: [Errno 27] File too large"),
        (SLOW.format(seconds=60), True, "the writer process of rank 1 ended (exit code -9)"),
    ],
    ids=["raises", "killed"],
)
def test_a_writer_that_fails_fails_the_save_on_all_ranks(tmp_path, patch, kill, message):
    root = two_by_two(tmp_path)
    messages = run_spmd(fail_once, 2, root, patch, kill, tp=2)
    assert all(message in text for text in messages)
    need = sum(piece.data.nbytes for piece in cuts(1))
    assert f"iteration 30 was not saved in {root}" in messages[0] and f"it needs {need} bytes" in messages[0]
    assert latest(root) == 40 and not (root / "iter_0000030").exists()
    assert expect_newest(root, 40) == []


def die_in_writer(world: World, root: Path, step: int, patch: str) -> int:
    """A rank that is killed when its writer comes to some point."""
    found = started(Mesh.build(ParallelConfig(), world, torch.device("cpu")), patch)
    begin(found, root, step, Retention(2))
    (root / "writer").write_text(str(heal(found)))
    found.join()
    return 0


AT = """
def at(owner, name, call):
    usual, calls = getattr(owner, name), []
    def killing(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            os.kill({process}, signal.SIGKILL)
            time.sleep(60)
        return usual(*args, **kwargs)
    setattr(owner, name, killing)
import shutil
"""
KILLS = {  # where, in which call; what is saved; what is the newest then
    "before the shard": ("writer, 'write_rank', 1", 30, 20),
    "mid-shard": ("blocks, '_write_at', 1", 30, 20),
    "before a shard's fsync": ("os, 'fsync', 1", 30, 20),
    "before its part of the manifest": ("os, 'replace', 1", 30, 20),
    "before the manifest": ("folder, 'write_manifest', 1", 30, 20),
    "before rename": ("os, 'rename', 1", 30, 20),
    "before the root's fsync": ("folder, 'sync_folder', 2", 30, 30),
    "at latest": ("os, 'replace', 2", 30, 30),
    "mid-prune": ("shutil, 'rmtree', 1", 30, 30),
    "when replacing, between the renames": ("os, 'rename', 2", 20, 20),
}
FAST = ("mid-shard", "before rename")


@pytest.mark.parametrize(
    "point", [p if p in FAST else pytest.param(p, marks=pytest.mark.full) for p in KILLS]
)
def test_kill_while_a_writer_writes(tmp_path, point):
    """Of the rank: its writer ends by itself, what is published is whole, and it can be saved again."""
    root, (place, step, newest) = tmp_path / "ckpt", KILLS[point]
    for before in (10, 20):
        save_alone(root, before)
    patch = f"{AT.format(process='os.getppid()')}\nat({place})"
    assert launch(die_in_writer, 1, (root, step, patch), timeout=30) == [-signal.SIGKILL]
    end = time.monotonic() + 5
    while Path(f"/proc/{(root / 'writer').read_text()}").exists():
        assert time.monotonic() < end, "the writer outlives its rank"
        time.sleep(0.02)
    (root / "writer").unlink()
    assert expect_newest(root, newest) == []
    save_alone(root, 40)
    assert expect_newest(root, 40) == [] and not list(root.glob("*.tmp"))


@pytest.mark.full
@pytest.mark.parametrize("point", KILLS)
def test_kill_of_a_writer(tmp_path, point):
    """The rank notices it, and nothing that is published is harmed."""
    root, (place, step, newest) = tmp_path / "ckpt", KILLS[point]
    for before in (10, 20):
        save_alone(root, before)
    found = started(ALONE, f"{AT.format(process='os.getpid()')}\nat({place})")
    begin(found, root, step, Retention(2))
    heal(found)
    with pytest.raises(SaveError, match="writer process of rank 0 ended"):
        found.join()
    assert expect_newest(root, newest) == []
    assert found.join() == [] and expect_newest(root, step) == []
    found.close()


# What a run makes of it.


def saving(mesh: Mesh, root: Path, patch: str = "", **settings) -> tuple[Saver, list, list]:
    """A run's saver, the texts of its warnings and the iterations that it calls published."""
    saver.PAUSE = 0.0
    warnings: list[str] = []
    published: list[int] = []
    first, last = START.rsplit("from nanomegatron", 1)
    async_save.START = f"{first}{PATCH}{patch}\nfrom nanomegatron{last}"
    config = CheckpointConfig(save=str(root), save_interval=10, **({"async_save": True} | settings))
    pieces = cuts(None, mesh.world.size, mesh.world.rank, 1)
    return Saver(config, mesh, pieces, warnings.append, published.append), warnings, published


def save_step(found: Saver, step: int, **how: bool) -> None:
    pieces = cuts(step, found.mesh.world.size, found.mesh.world.rank, 1)
    found.save(step, pieces, *contents(step), **how)


def second_save_early(mesh: Mesh, root: Path) -> tuple[list[int], list[str]]:
    """The next save is due while a slow one is in flight: it waits for that."""
    found, warnings, published = saving(mesh, root, SLOW.format(seconds=0.3), keep_last_k=2)
    for step in (10, 20, 30):
        save_step(found, step)
        assert found.in_flight and found.saved == step - 10 and latest(root) == (step - 10 or None)
    found.finish(last=True)
    assert found.saved == 30
    found.close()
    return published, warnings


def test_a_second_save_waits_for_the_first(tmp_path):
    results = run_spmd(second_save_early, 2, tmp_path, tp=2)
    assert results == [([10, 20, 30], []), ([], [])]
    assert expect_newest(tmp_path, 30) == [] and not (tmp_path / "iter_0000010").exists()


def steps_with_a_failure(mesh: Mesh, root: Path, how: str, retries: int) -> tuple[list, int | None]:
    """Steps of a run, in each of which the flags are exchanged; rank 1's writer has no room in save 10."""
    found, warnings, published = saving(
        mesh, root, NO_ROOM if mesh.world.rank else "", on_save_error=how, save_retries=retries
    )
    save_step(found, 10)
    heal(found.writer)
    noticed = None
    flags: list[dict[str, bool]] = []
    for step in range(11, 20):
        now = found.before_sync()
        flags.append({name: any_rank(now[name] > 0, mesh.world, mesh.device) for name in now})
        try:
            found.after_step(SimpleNamespace(numbers=flags[max(0, len(flags) - 2)]))  # one step late
        except SaveError:
            return [*warnings, "ended"], step
        noticed = noticed or (step if warnings else None)
        time.sleep(0.1)
    save_step(found, 20)
    found.finish(last=True)
    found.close()
    expected = [20] if retries == 0 else [10, 20]
    assert published == (expected if mesh.world.rank == 0 else []) and found.saved == 20
    return warnings, noticed - 11 - [found["save_failed"] for found in flags].index(True)


@pytest.mark.parametrize("how, retries", [("warn", 0), ("warn", 1), ("exit", 1)])
def test_a_failed_save_is_noticed_in_the_next_step(tmp_path, how, retries):
    """By all ranks in the same step: tried again, or left out, and the run continues."""
    for warnings, late in run_spmd(steps_with_a_failure, 2, tmp_path, how, retries, tp=2):
        (warning,) = warnings
        end = "trying again" if retries else "the run continues, and the next save is due as usual"
        assert "File too large" in warning and end in warning
        assert late == 1
    assert expect_newest(tmp_path, 20) == []


def test_exit_ends_the_run_after_all_retries(tmp_path, monkeypatch):
    """In a synchronous save, too; at the end of a run whatever --on-save-error says."""
    (tmp_path / "file").write_text("")
    for asynchronous in (False, True):
        for how, last in (("exit", False), ("warn", True)):
            found, warnings, _ = saving(
                ALONE, tmp_path / "file" / "x", async_save=asynchronous, on_save_error=how, save_retries=2
            )
            with pytest.raises(SaveError, match="Not a directory"):
                save_step(found, 10, last=last)
            assert len(warnings) == 2 and all(text.endswith("; trying again") for text in warnings)
            found.close()
    found, warnings, published = saving(
        ALONE, tmp_path / "file" / "x", async_save=False, on_save_error="warn", save_retries=0
    )
    save_step(found, 10)
    assert len(warnings) == 1 and "the run continues" in warnings[0] and found.saved == 0
    assert published == []


def test_without_room_for_a_snapshot_saves_are_synchronous(tmp_path, monkeypatch):
    """Said once; the saves themselves succeed."""
    monkeypatch.setattr(async_save, "free_share", lambda: 0.05)
    found, warnings, published = saving(ALONE, tmp_path)
    for step in (10, 20):
        save_step(found, step)
    assert published == [10, 20] and found.saved == 20
    assert [re.sub(r"\d+", "N", text) for text in warnings] == [
        "--async-save: MemoryError: the host's memory has no room for N bytes a rank: saves are synchronous"
    ]
    assert expect_newest(tmp_path, 20) == []


def test_a_saver_without_intervals_or_on_a_cpu_has_no_writer(tmp_path):
    for settings in ({"async_save": None}, {"async_save": False}):
        assert saving(ALONE, tmp_path, **settings)[0].writer is None
    config = CheckpointConfig(save=str(tmp_path), async_save=True)
    assert Saver(config, ALONE, [], print, print).writer is None


def test_memory_for_a_snapshot_is_allocated_beforehand():
    buffer = HostBuffer(10**6, torch.device("cpu"))
    data = buffer.ready.result(10)
    assert os.fstat(buffer.descriptor).st_blocks * 512 >= 10**6 and len(data) == 10**6
    pieces = [SimpleNamespace(data=torch.zeros(3, 5)), SimpleNamespace(data=torch.zeros(4).bool())]
    views = buffer.views(pieces)
    views[1].fill_(True)
    assert data[60:64].tolist() == [1] * 4 and data[:60].eq(0).all() and views[0].shape == (3, 5)
    assert 0 < async_save.free_share() <= 1


def test_memory_is_page_locked_in_parts(monkeypatch):
    locked, unlocked, slept = {}, [], []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda begin, size, _: locked.update({begin: size}) or 0,
        cudaHostUnregister=unlocked.append,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(async_save, "LOCKED", 4096)
    monkeypatch.setattr(async_save.time, "sleep", slept.append)
    buffer = HostBuffer(10000, torch.device("cuda", 0))
    begin = buffer.ready.result(10).data_ptr()
    assert locked == {begin: 4096, begin + 4096: 4096, begin + 8192: 1808} and len(slept) == 3
    buffer.close()
    assert unlocked == [*locked][::-1]


def test_copies_are_cut_where_parts_begin(monkeypatch):
    """On a side stream, here without one: each piece is in its place, and no copy crosses a part."""
    monkeypatch.setattr(async_save, "LOCKED", 4096)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    buffer, sizes = HostBuffer(20000, torch.device("cpu")), []
    stream = SimpleNamespace(wait_stream=lambda _: None, record=lambda: None)
    parts = SimpleNamespace(mesh=ALONE, stream=stream, copied=stream, buffer=buffer)
    tensors = torch.randn(30, 40), torch.tensor(7.0), torch.randn(50, 30).t(), torch.ones(0), torch.randn(9)
    pieces = [SimpleNamespace(data=data) for data in tensors]
    views, begin = buffer.views(pieces), buffer.ready.result().data_ptr()
    assert [buffer.parts(view) for view in views[:2]] == [[1024, 176], [1]]

    def copy_(target: torch.Tensor, data: torch.Tensor, non_blocking: bool) -> None:
        first = target.data_ptr() - begin
        assert first // 4096 == (first + max(0, target.nbytes - 1)) // 4096 and non_blocking
        sizes.append(len(target))
        target[:] = data

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    AsyncSaver._copy(parts, zip(views, pieces, strict=True))
    monkeypatch.undo()
    assert all(torch.equal(view, data) for view, data in zip(views, tensors, strict=True))
    assert sum(sizes) == sum(data.numel() for data in tensors) and len(sizes) > len(tensors)

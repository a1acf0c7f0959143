"""Checkpoints: any layout loads any other to the bit, and no kill or full disk leaves half of one."""

import errno
import itertools
import math
import os
import random
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanomegatron.checkpoint.checkpoint import SaveError, latest, load, save
from nanomegatron.checkpoint.checkpoint import training_pieces as pieces_of
from nanomegatron.checkpoint.files import DTYPES, Piece
from nanomegatron.checkpoint.folder import read_manifest
from nanomegatron.checkpoint.manifest import CheckpointError, rectangles
from nanomegatron.checkpoint.optimizer_state import (
    load_optimizer_scalars,
    optimizer_scalars,
    optimizer_states,
)
from nanomegatron.comm import barrier
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.dp import Slice
from nanomegatron.faults.launch import launch
from nanomegatron.mesh import Axis, Mesh, World
from nanomegatron.param import Init, ParamSpec, new_parameter, replica, shard, stacked
from tests import toy
from tests.checkpoints import (
    ALONE,
    SHAPES,
    cuts,
    die_at,
    expect,
    expect_newest,
    load_by_rank,
    newest_files,
    random_tiles,
    save_alone,
    save_by_rank,
    tensor,
    two_by_two,
)
from tests.spmd import run_spmd


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Iterations 10 and 20; not to be changed."""
    return two_by_two(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def root(saved, tmp_path) -> Path:
    """A copy of these, to be changed."""
    return shutil.copytree(saved, tmp_path / "ckpt")


# Any layout loads any other.


@pytest.mark.parametrize("ranks, dim", [(4, 0), (2, 1), (3, 2)])
def test_two_ranks_save_and_others_load(saved, ranks, dim):
    assert run_spmd(load_by_rank, ranks, saved, 20, dim, tp=ranks) == [[]] * ranks
    assert expect_newest(saved, 20) == []


def test_random_cuts_load_random_cuts(tmp_path):
    rng = random.Random(5)
    for case in range(25):
        shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 5)))
        whole = torch.randn(shape)

        def pieces(source, shape=shape):
            for offset, tile in random_tiles(rng, shape, 4):
                view = source[tuple(slice(o, o + n) for o, n in zip(offset, tile))]
                yield Piece("t", shape, offset, view)

        save(tmp_path, case, pieces(whole), {}, "", ALONE)
        target = torch.full(shape, torch.nan)
        load(tmp_path, pieces(target), ALONE)
        assert torch.equal(whole, target)


def test_training_pieces_name_every_part():
    tp = Axis("tp", 2, 1, (0, 1))
    sizes = {"qkv.q": 8, "qkv.k": 4, "qkv.v": 4}
    spec = stacked(shard(name, (rows, 3), 0, tp) for name, rows in sizes.items())
    params = [
        new_parameter(spec, Init(std=1.0)),
        new_parameter(ParamSpec((replica("norm", (3,), tp),), (3,)), Init(), fill=1.0),
    ]
    flat = torch.arange(27.0)
    ranges = [(params[0], part, *part.flat_range((8, 3))) for part in spec.parts]
    ranges.append((params[1], params[1].spec.parts[0], 24, 27))
    slices = [Slice(param, part, 0, start, stop, part.owner) for param, part, start, stop in ranges]
    states = {"exp_avg": [(piece, piece.shard_view(flat)) for piece in slices]}
    pieces = pieces_of(params, states, ALONE)
    assert [piece.key for piece in pieces[:4]] == ["model/qkv.q", "model/qkv.k", "model/qkv.v", "model/norm"]
    assert [piece.key for piece in pieces[4:]] == [p.key.replace("model/", "exp_avg/") for p in pieces[:4]]
    for i in (1, 5):
        assert pieces[i].offset == (2, 0) and pieces[i].shape == (4, 3) and pieces[i].data.shape == (2, 3)
    assert pieces[5].data.tolist() == [[12, 13, 14], [15, 16, 17]]
    assert [piece.owner for piece in pieces] == 2 * [True, True, True, False]
    pieces[1].data.fill_(7)  # a view of the parameter
    assert params[0][4:6].eq(7).all() and not params[0][[3, 6]].eq(7).any()
    assert not any(p.owner for p in pieces_of(params, {}, SimpleNamespace(dp_cp=tp)))


@pytest.mark.parametrize("shape", [(7,), (4, 5), (3, 4, 5), (2, 3, 1, 4), (1, 6), (6, 1)])
def test_every_flat_range_is_rectangles(shape):
    """In order, none empty, of the very elements, and as few as there can be: 2 a dimension and 1."""
    size = math.prod(shape)
    for begin, end in itertools.combinations(range(size + 1), 2):
        found, boxes = [], list(rectangles(shape, begin, end))
        for offset, box in boxes:
            window = tuple(slice(o, o + n) for o, n in zip(offset, box, strict=True))
            found += torch.arange(size).view(shape)[window].flatten().tolist()
            assert math.prod(box)
        assert found == list(range(begin, end)) and len(boxes) <= 2 * len(shape) - 1
    assert list(rectangles(shape, 0, size)) == [((0,) * len(shape), shape)]


LAYOUTS = [(1, "no_shard"), (2, "optim"), (2, "no_shard"), (3, "optim_grads"), (4, "optim")]


def trained_twice(mesh: Mesh, strategy: str, root: Path, i: int, dtype: str) -> list[float]:
    """Loaded and saved at once; and loaded for one more step, of which it returns the norm."""
    trained(mesh, strategy, root, f"same{i}", 0, dtype)
    return trained(mesh, strategy, root, f"next{i}", 1, dtype)


def trained(mesh: Mesh, strategy: str, root: Path, target: str, steps: int, dtype: str) -> list[float]:
    """Resume from the newest checkpoint in root if there is one, make some steps, save; the norms."""
    flags = dict(overlap_param_gather=True, ddp_bucket_size=400, data_parallel_sharding_strategy=strategy)
    model, buckets, optimizer = toy.built(mesh, flags, getattr(torch, dtype))
    if loaded := load(root, pieces_of(buckets.params, optimizer_states(optimizer), mesh), mesh):
        load_optimizer_scalars(optimizer, loaded.state)
    norms = [toy.train_step(model, buckets, optimizer, mesh).item() for _ in range(steps)]
    buckets.wait_params()
    pieces = pieces_of(buckets.params, optimizer_states(optimizer), mesh)
    save(root.parent / target, 1 + steps, pieces, optimizer_scalars(optimizer), "", mesh)
    return norms


def tensors(root: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, whole."""
    manifest = read_manifest(next(root.glob("iter_*")))
    types = {name: dtype for dtype, name in DTYPES.items()}
    found = {key: torch.empty(t.shape, dtype=types[t.dtype]) for key, t in manifest.tensors.items()}
    load(root, [Piece(key, tuple(t.shape), (0,) * t.dim(), t) for key, t in found.items()], ALONE)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_sharding_loads_any_other(tmp_path, dtype, full):
    """States to the bit, and the step that follows is the one that the first run makes."""
    first = run_spmd(trained, 2, "optim", tmp_path / "none", "saved", 3, dtype)[0]
    (expected,) = set(run_spmd(trained, 2, "optim", tmp_path / "saved", "further", 1, dtype)[0])
    assert first != [expected]
    saved, further = tensors(tmp_path / "saved"), tensors(tmp_path / "further")
    kinds = {"model", "exp_avg", "exp_avg_sq"} | ({"main"} if dtype == "bfloat16" else set())
    assert {key.split("/")[0] for key in saved} == kinds
    some = LAYOUTS if full else LAYOUTS[::2] if dtype == "float32" else LAYOUTS[2:4]
    for i, (world, strategy) in enumerate(some):
        norms = run_spmd(trained_twice, world, strategy, tmp_path / "saved", i, dtype)
        same = tensors(tmp_path / f"same{i}")
        assert all(torch.equal(same[key], x) for key, x in saved.items()) and len(same) == len(saved)
        bound = 1e-6 if dtype == "float32" else 2e-3
        assert all(norm == pytest.approx([expected], rel=bound) for norm in norms), (world, strategy)
        after = tensors(tmp_path / f"next{i}")
        for key, x in further.items() if dtype == "float32" else ():
            assert (after[key] - x).norm() <= 2e-6 * x.norm(), key


# What does not fit is named at once.


def test_everything_that_does_not_fit_is_listed(root):
    pieces = [
        Piece("model/new", (3,), (0,), torch.ones(3)),
        Piece("model/w", (8, 6), (0, 0), torch.ones(8, 6)),
        Piece("model/b", (5,), (0,), torch.ones(5, dtype=torch.bfloat16)),
    ]
    with pytest.raises(CheckpointError) as error:
        load(root, pieces, ALONE)
    for line in (
        "model/new: missing, wanted [3]",
        "model/w: saved [8, 12], wanted [8, 6]",
        "model/b: saved as F32, wanted BF16; keep the type it was trained in, or --no-load-optim",
    ):
        assert line in str(error.value)
    assert all(piece.data.eq(1).all() for piece in pieces)
    load(root, pieces[2:], ALONE, cast=True)
    assert torch.equal(pieces[2].data, tensor("model/b", 20).bfloat16())


def test_no_checkpoint_and_no_such_step(root, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        assert load(folder, cuts(None), ALONE) is None
        assert latest(folder) is None
    with pytest.raises(CheckpointError, match=r"no iteration 15; it has \[10, 20\]"):
        load(root, cuts(None), ALONE, step=15)
    pieces = cuts(None)
    assert load(root, pieces, ALONE, step=10).notes == []
    expect(pieces, 10)


# Which checkpoint is used.


def test_all_ranks_fall_back_together(root):
    """The damage is in a file that one rank alone has hashed."""
    path = newest_files(root)[-1]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    notes = run_spmd(load_by_rank, 2, root, 10, 0, tp=2)
    assert notes[0] == notes[1] and path.name in notes[0][0]


def test_nothing_usable_lists_what_was_tried(root):
    for folder in root.glob("iter_*"):
        (folder / "rank_00001.safetensors").unlink()
    with pytest.raises(CheckpointError) as error:
        load(root, cuts(None), ALONE)
    for step in (10, 20):
        assert f"iter_00000{step}/rank_00001.safetensors: No such file" in str(error.value)


def test_names_that_are_no_checkpoint(root, tmp_path):
    outside = shutil.copytree(root / "iter_0000020", tmp_path / "outside")
    for name in ("iter_0000030.tmp", "iter_0000030.bak", "iter_30", "iter_00000030", "xiter_0000030"):
        shutil.copytree(outside, root / name)
    (root / "iter_0000050").write_text("a file")
    assert latest(root) == 20 and expect_newest(root, 20) == []
    os.rename(root / "iter_0000010", root / "iter_0000060")  # the manifest knows better
    assert "was saved as iteration 10" in expect_newest(root, 20)[0]


def test_leftovers_are_removed_and_not_what_they_link_to(root, tmp_path):
    outside = shutil.copytree(root / "iter_0000020", tmp_path / "outside")
    before = sorted(path.name for path in outside.iterdir())
    shutil.copytree(outside, root / "iter_0000025.tmp")
    (root / "iter_0000030.tmp").symlink_to(outside)
    save_alone(root, 30)
    assert expect_newest(root, 30) == []
    assert sorted(path.name for path in root.iterdir()) == [
        *(f"iter_00000{step}" for step in (10, 20, 30)),
        "latest_checkpointed_iteration.txt",
    ]
    assert sorted(path.name for path in outside.iterdir()) == before


def test_saving_again_replaces(root):
    """As after a fall-back: the damaged iteration is reached a second time."""
    newest_files(root)[0].write_text("{}")
    save_alone(root, 20)
    assert expect_newest(root, 20) == []


# Failures while saving.


def save_and_die(world: World, root: Path, step: int, place: str, call: int, format: str = "sharded") -> int:
    """A rank that is killed at the n-th call of the function at `place`."""
    die_at(place, call)
    save_alone(root, step, format)
    return 0


FILES, FOLDER = "nanomegatron.checkpoint.files.", "nanomegatron.checkpoint.folder."

KILLS = {  # where, in which call; what is saved; what is the newest then
    "after mkdir": ("nanomegatron.checkpoint.files.write_rank", 1, 30, 20),
    "mid-shard": (FILES + "host_bytes", 3, 30, 20),
    "before a shard's fsync": ("os.fsync", 1, 30, 20),
    "before the manifest": (FOLDER + "write_manifest", 1, 30, 20),
    "before the manifest's hash": ("os.fsync", 4, 30, 20),
    "before rename": ("os.rename", 1, 30, 20),
    "before the root's fsync": (FOLDER + "sync_folder", 2, 30, 30),
    "at latest": ("os.replace", 2, 30, 30),
    "when replacing, between the renames": ("os.rename", 2, 20, 20),
    "when replacing, before the old one goes": ("shutil.rmtree", 1, 20, 20),
}


@pytest.mark.parametrize("point", KILLS)
def test_kill_while_saving(root, point):
    place, call, step, newest = KILLS[point]
    assert launch(save_and_die, 1, (root, step, place, call), timeout=30) == [-signal.SIGKILL]
    assert expect_newest(root, newest) == []
    save_alone(root, 30)  # the same or a later iteration can be saved after it
    assert expect_newest(root, 30) == []
    assert not list(root.glob("*.tmp"))
    assert latest(root) == 30


def expect_save_error(root: Path, mesh: Mesh, step: int) -> str:
    """Save on this rank, assert that it fails and leaves no trace; returns the message."""
    first = mesh.world.rank == 0  # who removes the temporary folder, perhaps while others look
    before = {path: path.stat().st_mtime_ns for path in root.glob("iter_*/*")} if first else {}
    with pytest.raises(SaveError) as error:
        save_by_rank(mesh, root, (step,), 0)
    if first:
        assert before == {path: path.stat().st_mtime_ns for path in root.glob("iter_*/*")}
        assert not list(root.glob("*.tmp"))
    return str(error.value)


def save_with_little_room(mesh: Mesh, root: Path, limits: tuple) -> None:
    """Rank 1 may write files of `limit` bytes and no more; rank 0 has no limit."""
    unlimited = resource.RLIM_INFINITY
    for limit in limits:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit if mesh.world.rank else unlimited, unlimited))
            message = expect_save_error(root, mesh, 30)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
        assert "File too large" in message
        assert f"it needs {4 * sum(map(math.prod, SHAPES.values()))} bytes" in message
    save_by_rank(mesh, root, (30,), 0)


def test_full_disk_on_one_rank_fails_on_all(root, full):
    more = (8, 50, 200, 600) if full else ()
    run_spmd(save_with_little_room, 2, root, (0, 1, 100, 300, 500, 700, *more), tp=2)
    assert expect_newest(root, 30) == []


def test_too_little_room_is_seen_before_writing(root, monkeypatch):
    usage = shutil.disk_usage(root)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    message = expect_save_error(root, ALONE, 30)
    assert "No space left" in message and "100 are free" in message
    assert "free space there, or give another --save; the last good checkpoint is" in message
    assert message.endswith(str(newest_files(root)[0].parent))
    usage = usage._replace(total=0, free=0)  # of a file system without a limit: it does not tell
    save_alone(root, 30)
    assert expect_newest(root, 30) == []


CODES = [
    errno.EIO,
    errno.ENOSPC,
    *(pytest.param(n, marks=pytest.mark.full) for n in (errno.EROFS, errno.EACCES)),
]


@pytest.mark.parametrize("code", CODES)
def test_every_failing_fsync_is_an_error(root, monkeypatch, code):
    fsync = os.fsync
    for failing in range(1, 6):
        calls = itertools.count(1)

        def failing_fsync(descriptor, calls=calls, failing=failing):
            if next(calls) == failing:
                raise OSError(code, os.strerror(code))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", failing_fsync)
        assert os.strerror(code) in expect_save_error(root, ALONE, 30)
        assert expect_newest(root, 20) == []


def save_twice_the_same(mesh: Mesh, root: Path, offsets: list) -> None:
    data = torch.ones(4)
    with pytest.raises(SaveError, match="overlap|cover 4 of 8|elsewhere"):
        save(root, 1, [Piece("w", (8,), (offsets[mesh.world.rank],), data)], {}, "", mesh)
    assert mesh.world.rank or not list(root.iterdir())


def test_ranks_that_do_not_make_up_a_tensor(tmp_path):
    run_spmd(save_twice_the_same, 2, tmp_path, [0, 0], tp=2)
    with pytest.raises(SaveError, match="cover 4 of 8"):
        save(tmp_path, 1, [Piece("w", (8,), (4,), torch.ones(4))], {}, "", ALONE)
    with pytest.raises(SaveError, match="TypeError"):
        save(tmp_path, 1, [], {"not": {"JSON"}}, "", ALONE)
    assert latest(tmp_path) is None


def save_and_lose_a_rank(world: World, root: Path) -> int:
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2), world, torch.device("cpu"))
    barrier(mesh.world)  # both are connected
    if world.rank == 1:
        return save_and_die(world, root, 30, FILES + "host_bytes", 1)
    try:
        save_by_rank(mesh, root, (30,), 0)
    except RuntimeError:  # gloo's: the peer has gone
        return 5
    return 0


def test_killed_peer_publishes_nothing(root):
    assert launch(save_and_lose_a_rank, 2, (root,), timeout=30) == [5, -signal.SIGKILL]
    assert expect_newest(root, 20) == []

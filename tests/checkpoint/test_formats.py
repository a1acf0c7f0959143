"""Formats of a checkpoint folder: each returns to the bit, torch alone opens two of them, nothing is run."""

import errno
import itertools
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nanomegatron.checkpoint.checkpoint import SaveError, load, save
from nanomegatron.checkpoint.files import DTYPES, Piece
from nanomegatron.checkpoint.folder import Retention
from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.faults.launch import launch
from nanomegatron.mesh import Mesh
from tests.checkpoint.test_checkpoint import save_and_die
from tests.checkpoints import (
    ALONE,
    SHAPES,
    cuts,
    expect,
    expect_newest,
    load_by_rank,
    save_alone,
    save_by_rank,
    tensor,
)
from tests.spmd import run_spmd

FORMATS = ("sharded", "torch_dist", "torch")


def test_torch_alone_loads_torch_dist(tmp_path):
    """By global names into plain tensors, though ranks have cut them."""
    run_spmd(save_by_rank, 2, tmp_path, (20,), 1, "torch_dist", tp=2)
    found = {key: torch.zeros(shape) for key, shape in SHAPES.items()}
    dcp.load(found, checkpoint_id=tmp_path / "iter_0000020", no_dist=True)
    for key, data in found.items():
        assert torch.equal(data, tensor(key, 20)), key


@pytest.mark.parametrize("ranks, dim", [(4, 0), (3, 2)])
def test_other_layouts_load_torch_dist(tmp_path, ranks, dim):
    run_spmd(save_by_rank, 2, tmp_path, (20,), 1, "torch_dist", tp=2)
    assert run_spmd(load_by_rank, ranks, tmp_path, 20, dim, tp=ranks) == [[]] * ranks
    pieces = cuts(None)
    load(tmp_path, pieces, ALONE)
    expect(pieces, 20)


@pytest.mark.parametrize("format", FORMATS)
def test_every_dtype_returns_to_the_bit(tmp_path, format):
    """Odd sizes before larger items, a scalar, a view with strides; every bit pattern, so NaNs as well."""
    pieces = [Piece("odd", (3,), (0,), torch.tensor([True, False, True]))]
    for dtype, name in DTYPES.items():
        bits = torch.randint(0, 2 if dtype == torch.bool else 256, (4, 7 * dtype.itemsize), dtype=torch.uint8)
        data = bits.view(dtype)
        pieces += [Piece(f"t/{name}", (7, 4), (0, 0), data.t()), Piece(f"s/{name}", (), (), data[0, 0])]
    save(tmp_path, 1, pieces, {}, "", ALONE, format=format)
    wanted = [Piece(p.key, p.shape, p.offset, torch.zeros(p.shape, dtype=p.data.dtype)) for p in pieces]
    load(tmp_path, wanted, ALONE)
    for before, after in zip(pieces, wanted, strict=True):
        one, two = (x.data.contiguous().reshape(-1).view(torch.uint8) for x in (before, after))
        assert torch.equal(one, two), before.key


def load_under_another_layout(mesh: Mesh, root: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load_by_rank(mesh, root, 20, 0)
    return str(error.value)


def test_torch_is_for_the_same_layout(tmp_path):
    run_spmd(save_by_rank, 2, tmp_path, (20,), 1, "torch", tp=2)
    assert run_spmd(load_by_rank, 2, tmp_path, 20, 1, tp=2) == [[]] * 2
    plain = torch.load(tmp_path / "iter_0000020/rank_00001.pt", weights_only=True)
    assert torch.equal(plain["tensors"]["model/w[0:8,6:12]"], tensor("model/w", 20)[:, 6:])
    for message in run_spmd(load_under_another_layout, 4, tmp_path, tp=2):
        assert (
            f"{tmp_path}/iter_0000020: --ckpt-format torch, by tp 2, and this run is tp 2, dp 2; "
            "save it there with --ckpt-format sharded" in message
        )


# Failures while saving, and removing.


@pytest.mark.parametrize("format, fsyncs", [("torch_dist", 9), ("torch", 8)])
def test_every_failing_fsync_ends_a_save(tmp_path, monkeypatch, format, fsyncs):
    """Of files, `.metadata`, the manifest's parts, it and its hash, folders: what was published stays."""
    save(tmp_path, 10, cuts(10), {"consumed_samples": 40}, "step = 10\n", ALONE, format=format)
    fsync, calls = os.fsync, itertools.count(1)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (next(calls), fsync(descriptor))[1])
    save(tmp_path, 11, cuts(11), {}, "", ALONE, format=format)
    assert next(calls) == fsyncs + 1
    shutil.rmtree(tmp_path / "iter_0000011")
    for failing in range(1, 6 + (format == "torch_dist")):
        calls = itertools.count(1)

        def failing_fsync(descriptor, calls=calls, failing=failing):
            if next(calls) == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", failing_fsync)
        with pytest.raises(SaveError, match="No space left"):
            save(tmp_path, 20, cuts(20), {}, "", ALONE, format=format)
        assert expect_newest(tmp_path, 10) == [] and not list(tmp_path.glob("*.tmp"))


KILLS = {  # where, in which call; what is the newest then
    "mid-file": ("nanomegatron.checkpoint.torch_dist.elements_at", 3, 10),
    "before .metadata": ("nanomegatron.checkpoint.torch_dist.dcp_pickle", 1, 10),
    "before the manifest": ("nanomegatron.checkpoint.folder.write_manifest", 1, 10),
    "before rename": ("os.rename", 1, 10),
    "before the root's fsync": ("nanomegatron.checkpoint.folder.sync_folder", 2, 20),
}


@pytest.mark.parametrize("point", KILLS)
def test_kill_while_saving_torch_dist(tmp_path, point):
    place, call, newest = KILLS[point]
    save_alone(tmp_path, 10)
    assert launch(save_and_die, 1, (tmp_path, 20, place, call, "torch_dist"), timeout=30) == [-signal.SIGKILL]
    assert expect_newest(tmp_path, newest) == []
    save_alone(tmp_path, 20)
    assert expect_newest(tmp_path, 20) == [] and not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("format", FORMATS)
def test_old_checkpoints_are_removed(tmp_path, format):
    """Two stay, and a damaged one does not count."""
    for step in (10, 20, 30, 40):
        if step == 40:
            next((tmp_path / "iter_0000030").glob("*_0*.*")).write_bytes(b"")
        save(tmp_path, step, cuts(step), {}, "", ALONE, Retention(keep_last=2), format)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [f"iter_00000{n}" for n in (20, 30, 40)]

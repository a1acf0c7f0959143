"""Formats of a checkpoint folder: each returns to the bit, torch alone opens two of them, nothing is run."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nanomegatron.checkpoint.checkpoint import load, save
from nanomegatron.checkpoint.files import DTYPES, Piece
from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.mesh import Mesh
from tests.checkpoints import ALONE, SHAPES, cuts, expect, load_by_rank, save_by_rank, tensor
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
            "saved by tp 2, and this run is tp 2, dp 2; save it there with --ckpt-format sharded" in message
        )

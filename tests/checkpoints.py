"""For the tests of checkpoints: tensors whose values tell which iteration they are of, cut in any way.

python -m tests.checkpoints FOLDER [torch_dist | torch]     a small one of the format as it is: a golden
"""

import hashlib
import importlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from nanomegatron.checkpoint.checkpoint import load, save, state_pieces, training_pieces
from nanomegatron.checkpoint.files import Piece, host_bytes
from nanomegatron.checkpoint.folder import MANIFEST, MANIFEST_SUM
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.dp import Slice
from nanomegatron.mesh import Mesh, World
from nanomegatron.param import Init, ParamSpec, new_parameter, replica, shard
from tests.spmd import run_spmd

ALONE = Mesh.build(ParallelConfig(), World(), torch.device("cpu"))


SHAPES = {"model/w": (8, 12), "exp_avg/w": (8, 12), "model/b": (5,), "model/experts": (4, 6, 2), "step": ()}


def tensor(key: str, step: int) -> torch.Tensor:
    """The global tensor `key` as it is at iteration `step`."""
    return torch.randn(SHAPES[key], generator=torch.Generator().manual_seed(len(key) * 1000 + step))


def cut(key: str, ranks: int, rank: int, dim: int, data: torch.Tensor) -> Piece:
    """This rank's slice of `data`, cut along dim; whole, and the first rank's, where it does not divide."""
    shape = tuple(data.shape)
    if len(shape) <= dim or shape[dim] % ranks:
        return Piece(key, shape, (0,) * len(shape), data, owner=rank == 0)
    size = shape[dim] // ranks
    offset = tuple(rank * size if d == dim else 0 for d in range(len(shape)))
    return Piece(key, shape, offset, data.narrow(dim, rank * size, size))


def cuts(step: int | None, ranks: int = 1, rank: int = 0, dim: int = 0) -> list[Piece]:
    """A rank's pieces with the values of iteration `step`, or with zeros."""
    values = {key: torch.zeros(SHAPES[key]) if step is None else tensor(key, step) for key in SHAPES}
    return [cut(key, ranks, rank, dim, value) for key, value in values.items()]


def expect(pieces: list[Piece], step: int) -> None:
    """Assert that the pieces have the values of iteration `step`, to the bit."""
    for piece in pieces:
        region = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.data.shape))
        assert torch.equal(piece.data, tensor(piece.key, step)[region]), piece.key


def save_alone(root: Path, step: int, format: str = "sharded") -> None:
    save(root, step, cuts(step), {"consumed_samples": 4 * step}, f"step = {step}\n", ALONE, format=format)


def expect_newest(root: Path, step: int) -> list[str]:
    """Assert that iteration `step` is what a load finds; returns the notes."""
    pieces = cuts(None)
    loaded = load(root, pieces, ALONE)
    assert (loaded.iteration, loaded.state) == (step, {"consumed_samples": 4 * step})
    assert loaded.config == f"step = {step}\n"
    expect(pieces, step)
    return loaded.notes


def save_by_rank(mesh: Mesh, root: Path, steps: tuple, dim: int, format: str = "sharded") -> None:
    for step in steps:
        pieces = cuts(step, mesh.world.size, mesh.world.rank, dim)
        save(root, step, pieces, {"consumed_samples": 4 * step}, f"step = {step}\n", mesh, format=format)


def load_by_rank(mesh: Mesh, root: Path, step: int, dim: int) -> list[str]:
    pieces = cuts(None, mesh.world.size, mesh.world.rank, dim)
    loaded = load(root, pieces, mesh)
    assert loaded.iteration == step
    expect(pieces, step)
    return loaded.notes


def two_by_two(root: Path) -> Path:
    """Iterations 10 and 20 in root, each saved by two ranks that cut by columns."""
    run_spmd(save_by_rank, 2, root, (10, 20), 1, tp=2)
    return root


def newest_files(root: Path) -> list[Path]:
    return sorted((root / "iter_0000020").iterdir())


def random_tiles(rng: random.Random, shape: tuple, cuts_left: int) -> list[tuple]:
    """(offset, shape) of random rectangles that tile the shape."""
    dims = [d for d, n in enumerate(shape) if n > 1]
    if not cuts_left or not dims:
        return [((0,) * len(shape), shape)]
    dim = rng.choice(dims)
    at = rng.randrange(1, shape[dim])
    result = []
    for start, size in ((0, at), (at, shape[dim] - at)):
        part = (*shape[:dim], size, *shape[dim + 1 :])
        for offset, tile in random_tiles(rng, part, cuts_left - 1):
            result.append(((*offset[:dim], offset[dim] + start, *offset[dim + 1 :]), tile))
    return result


def fast_ones(names: Iterable[str], *fast: str) -> list:
    """Parameters of a test: all names, of which the fast tier takes some."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.full) for name in names]


def die_at(place: str, call: int) -> None:
    """Let this process be killed at the n-th call of the function at `place`."""
    owner, name = place.rsplit(".", 1)
    owner = importlib.import_module(owner)
    original, calls = getattr(owner, name), itertools.count(1)

    def dying(*args, **kwargs):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, dying)


# Kept checkpoints of every format of today's version: tests/goldens/checkpoint_v3, ...
# A new one is written by this file's command, and added to this list.

RELEASED = (3, "torch_dist", "torch")
KEPT_HASH = "6f2fc5c591805454647adae0ab73b3b84bf9171e0b099a0ec6454779b199ae44"  # `hash_of` each
GOLDENS = Path(__file__).parent / "goldens"
KEPT = {"model/w": (6, 10), "exp_avg/w": (6, 10), "model/norm": (7,), "exp_avg/norm": (7,), "fp8/scale": (2,)}


def kept(key: str) -> torch.Tensor:
    """The global tensor `key` of a kept checkpoint: weights in bf16, all numbers exact in it."""
    whole = torch.arange(math.prod(KEPT[key])).view(KEPT[key]) / 4.0 + list(KEPT).index(key)
    return whole.bfloat16() if key.startswith("model/") else whole


def golden(version: int | str) -> Path:
    """The kept checkpoint of a version of the sharded format, or of another format."""
    return GOLDENS / f"checkpoint_{'v' * isinstance(version, int)}{version}"


def kept_root(root: Path, version: int | str) -> Path:
    """A copy of the kept checkpoint, iteration 20, beside one of iteration 10 with numbers larger by 10."""
    pieces = [Piece(key, shape, (0,) * len(shape), kept(key) + 10) for key, shape in KEPT.items()]
    save(root, 10, pieces, {"consumed_samples": 40}, "step = 10\n", ALONE)
    return shutil.copytree(golden(version), root, dirs_exist_ok=True)


def expect_kept(root: Path, step: int) -> list[str]:
    """Assert that iteration `step` of the two is what a load finds, exactly; returns the notes."""
    pieces = [Piece(k, s, (0,) * len(s), torch.zeros(s, dtype=kept(k).dtype)) for k, s in KEPT.items()]
    loaded = load(root, pieces, ALONE)
    assert (loaded.iteration, loaded.state) == (step, {"consumed_samples": 4 * step})
    assert loaded.config == f"step = {step}\n"
    for piece in pieces:
        assert torch.equal(piece.data, kept(piece.key) + (20 - step)), piece.key
    return loaded.notes


def change_manifest(folder: Path, change: Callable) -> None:
    """Change the manifest in place, or give it another text, and its hash with it."""
    manifest = json.loads((folder / MANIFEST).read_text())
    text = change(manifest)
    sign(folder, text if isinstance(text, str) else json.dumps(manifest))


def sign(folder: Path, text: str) -> None:
    """Give it this manifest, and the hash of it."""
    (folder / MANIFEST).write_text(text)
    (folder / MANIFEST_SUM).write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  {MANIFEST}\n")


def write_kept(mesh: Mesh, root: Path, format: str = "sharded") -> None:
    """Save it by four ranks, tp 2: w is cut by rows, the optimizer's flat buckets in the middle of a row."""
    rows = 6 // mesh.tp.size
    params = [
        new_parameter(ParamSpec((shard("w", KEPT["model/w"], 0, mesh.tp),), (rows, 10)), Init()),
        new_parameter(ParamSpec((replica("norm", KEPT["model/norm"], mesh.tp),), (7,)), Init()),
    ]
    size = (10 * rows + 8) // mesh.dp.size  # of a bucket: 30 of w, 7 of norm, 1 of padding
    half = slice(size * mesh.dp.rank, size * mesh.dp.rank + size)
    ranges, begin = [], 0
    for param in params:
        (part,) = param.spec.parts
        param.data = part.global_view(kept(f"model/{part.name}")).clone()
        start, stop = max(begin, half.start), min(begin + param.numel(), half.stop)
        if start < stop:
            flat = part.global_view(kept(f"exp_avg/{part.name}")).flatten()[start - begin : stop - begin]
            ranges.append((Slice(param, part, start - begin, start, stop, part.owner), flat))
        begin += param.numel()
    pieces = training_pieces(params, {"exp_avg": ranges}, mesh)
    pieces += state_pieces({"fp8/scale": kept("fp8/scale")}, mesh)
    save(root, 20, pieces, {"consumed_samples": 80}, "step = 20\n", mesh, format=format)


def hash_of(folder: Path) -> str:
    """SHA-256 of all that a kept checkpoint holds, in the order of KEPT."""
    pieces = [Piece(k, s, (0,) * len(s), torch.zeros(s, dtype=kept(k).dtype)) for k, s in KEPT.items()]
    load(folder, pieces, ALONE)
    return hashlib.sha256(b"".join(bytes(host_bytes(piece.data)) for piece in pieces)).hexdigest()


if __name__ == "__main__":
    ranks = {"sharded": (4, 2), "torch_dist": (2, 1), "torch": (1, 1)}  # and tp
    format = sys.argv[2] if len(sys.argv) > 2 else "sharded"
    run_spmd(write_kept, ranks[format][0], Path(sys.argv[1]), format, tp=ranks[format][1])
    print(hash_of(Path(sys.argv[1])))

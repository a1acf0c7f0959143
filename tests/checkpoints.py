"""For the tests of checkpoints: tensors whose values tell which iteration they are of, cut in any way."""

import random
from pathlib import Path

import torch

from nanomegatron.checkpoint import Piece, load, save
from nanomegatron.config import ParallelConfig
from nanomegatron.mesh import Mesh, World
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


def save_alone(root: Path, step: int) -> None:
    save(root, step, cuts(step), {"consumed_samples": 4 * step}, f"step = {step}\n", ALONE)


def expect_newest(root: Path, step: int) -> list[str]:
    """Assert that iteration `step` is what a load finds; returns the notes."""
    pieces = cuts(None)
    loaded = load(root, pieces, ALONE)
    assert (loaded.iteration, loaded.state) == (step, {"consumed_samples": 4 * step})
    assert loaded.config_toml == f"step = {step}\n"
    expect(pieces, step)
    return loaded.notes


def save_by_rank(mesh: Mesh, root: Path, steps: tuple, dim: int) -> None:
    for step in steps:
        pieces = cuts(step, mesh.world.size, mesh.world.rank, dim)
        save(root, step, pieces, {"consumed_samples": 4 * step}, f"step = {step}\n", mesh)


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

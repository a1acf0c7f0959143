"""Tensors of the whole model, put together from the pieces that ranks have recorded.

    rank 0, tp 0     input of linear_fc2, samples 0 1, tokens 0-31, features 0-15     copy ()
    rank 1, tp 1                                               features 16-31         copy ()
    -> input of linear_fc2 [samples, tokens, features]

A tensor that several ranks hold whole has several copies, each named by axis and rank: copy (("tp", 1),).
Pieces of one copy are added, so partial sums (a gradient before its reduction) make the whole one, too.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

Copy = tuple[tuple[str, int], ...]  # (axis, rank on it) of each axis over which the tensor is replicated
Key = tuple[int, str, str]  # step, kind, name
Order = dict[tuple[str, str], tuple[int, int]]  # (kind, name) -> place in the forward: stage, number


class Recorded(NamedTuple):
    """A rank's part of a tensor of the whole model.

    place: int64, indices in each dim of the whole tensor; of a parameter one index in the flattened tensor.
    """

    step: int
    kind: str  # "input", "output", "output gradient", "weight gradient", ...
    name: str  # of the module or parameter, as in checkpoints
    rank: int
    copy: Copy
    place: list[torch.Tensor]
    shape: list[int]  # of the whole parameter; []: no parameter
    data: torch.Tensor


class Whole(NamedTuple):
    """A copy of a whole tensor in rows: `[samples, tokens, features]`; a parameter's, a vector as one row."""

    data: torch.Tensor
    ranks: torch.Tensor  # int16 like data: the rank that each element is from, -1: no rank had it


Wholes = dict[Key, dict[Copy, Whole]]


def save_pieces(pieces: list[Recorded], order: Order, path: Path) -> None:
    """Write what a rank has recorded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(([tuple(piece) for piece in pieces], order), path)


def load_pieces(folder: Path) -> tuple[list[Recorded], Order]:
    """Read all ranks' files of a folder: their pieces and the order of the forward."""
    pieces, order = [], {}
    for path in sorted(folder.glob("rank*")):
        saved, own_order = torch.load(path, weights_only=True)
        pieces += [Recorded(*piece) for piece in saved]
        order |= own_order
    return pieces, order


def assemble(pieces: Iterable[Recorded]) -> Wholes:
    """Put all pieces together: the copies of each tensor."""
    groups: dict[Key, dict[Copy, list[Recorded]]] = defaultdict(lambda: defaultdict(list))
    for piece in pieces:
        groups[piece[:3]][piece.copy].append(piece)
    whole = {}
    for key, copies in groups.items():
        every = [piece for each in copies.values() for piece in each]
        dims = zip(*(piece.place for piece in every), strict=True)
        sizes = [1 + max(int(i.max()) if len(i) else 0 for i in dim) for dim in dims]
        shape = every[0].shape
        if shape:
            sizes = [math.prod(shape)]
        whole[key] = {copy: _sum(each, sizes, shape or sizes) for copy, each in copies.items()}
    return whole


def _sum(pieces: list[Recorded], sizes: list[int], shape: list[int]) -> Whole:
    data, ranks = torch.zeros(sizes), torch.full(sizes, -1, dtype=torch.int16)
    for piece in pieces:
        at = torch.meshgrid(*piece.place, indexing="ij")
        data.index_put_(at, piece.data.float(), accumulate=True)
        ranks[at] = piece.rank
    rows = shape if len(shape) > 1 else [1, *shape]
    return Whole(data.view(rows), ranks.view(rows))

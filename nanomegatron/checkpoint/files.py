"""A checkpoint folder: rectangles of named tensors in safetensors files, and a manifest that lists them.

    iter_0000120/
        rank_00000.safetensors   the tensors of rank 0, each entry named like "model/w[0:2,0:4]"
        rank_00001.safetensors
        manifest.json            where each tensor is (checkpoint/manifest.py); checksums; state; config
        manifest.json.sha256     the manifest's own hash, in the format of `sha256sum -c`

    saved by two ranks, sharded by rows      loaded by rank 1 of 2, sharded by columns
        0 0 0 0   rank_00000                     . . # #   it overlaps both saved rectangles;
        0 0 0 0                                  . . # #   only the overlaps are read
        1 1 1 1   rank_00001                     . . # #
        1 1 1 1                                  . . # #

Rectangles are in coordinates of the global tensors: a reader need not know the layout of the writer. An
untrusted folder may be wrong but is not dangerous: nothing is unpickled, file names have one fixed form,
symbolic links are not followed, and every size is checked against that of the file. (Format:
huggingface.co/docs/safetensors)
"""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from nanomegatron.checkpoint.folder import write_rank
from nanomegatron.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    Range,
    Rectangle,
    SavedTensor,
    entry_name,
    rank_file,
    rectangles,
)

DTYPES = {  # safetensors' names
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """A rectangle of a global tensor that this rank holds: `data` is a view, filled in place by a load."""

    key: str  # "model/<parameter>", "exp_avg/<parameter>", ...
    shape: tuple[int, ...]  # of the global tensor
    offset: tuple[int, ...]
    data: torch.Tensor
    owner: bool = True  # this rank writes it; of the ranks that hold the same rectangle exactly one does
    optional: bool = False  # a load may leave it as it is
    range: tuple[Rectangle, int, int] | None = None  # the (box, begin, end) it is part of, if it is

    @property
    def entry(self) -> str:
        """The name of this rectangle in a rank's file."""
        return entry_name(self.key, Rectangle(self.offset, tuple(self.data.shape)))


# Rectangles: (offset, shape) in the coordinates of a global tensor.


def overlap(offset: Sequence, shape: Sequence, offset2: Sequence, shape2: Sequence) -> list | None:
    """Return (begin, end) of the intersection along each dim; None if it is empty."""
    ranges = [
        (max(a, b), min(a + n, b + m)) for a, n, b, m in zip(offset, shape, offset2, shape2, strict=True)
    ]
    return ranges if all(begin < end for begin, end in ranges) else None


# Writing.


def write_shard(
    folder: Path,
    rank: int,
    pieces: Iterable[Piece],
    slices: Callable[[Piece], Iterable[torch.Tensor]] = lambda piece: [piece.data],
) -> None:
    """Write the pieces to one safetensors file, synced to disk, and its part of the manifest to a .json file.

    One slice at a time is copied to the host, hashed and written. `pieces` has all rectangles of a range;
    slices: returns the elements of a piece, slice by slice, if `data` is without.
    Raises CheckpointError if two pieces are the same rectangle.
    """
    pieces = in_file_order(pieces)
    header, tensors = describe_shard(pieces, rank)
    elements = (host_bytes(x) for piece in pieces for x in slices(piece))
    write_rank(folder, rank, itertools.chain((header,), elements), tensors, {})


def in_file_order(pieces: Iterable[Piece]) -> list[Piece]:
    """Sort the pieces as their elements are in the file, one after another: each aligned to its own size."""
    return sorted(pieces, key=lambda piece: -piece.data.element_size())  # stable


def describe_shard(pieces: Iterable[Piece], rank: int) -> tuple[bytes, dict[str, SavedTensor]]:
    """Return the bytes before the elements of a rank's file, and its part of the manifest.

    pieces: in file order. Raises CheckpointError if two are the same rectangle.
    """
    entries: dict[str, torch.Tensor] = {}
    tensors: dict[str, SavedTensor] = {}
    for piece in pieces:
        name = piece.entry
        if name in entries:
            raise CheckpointError(f"{name} is given twice, and would overlap")
        entries[name] = piece.data
        saved = tensors.setdefault(piece.key, SavedTensor(DTYPES[piece.data.dtype], piece.shape, {}))
        whole = Rectangle(piece.offset, tuple(piece.data.shape))
        box, *ends = piece.range or (whole, 0, piece.data.numel())
        ranges = saved.boxes.setdefault(box, [])
        if (*ends, rank) not in ranges:
            ranges.append(Range(*ends, rank))
    return header_bytes(entries, {}), tensors


def header_bytes(tensors: Mapping[str, Any], metadata: dict[str, Any]) -> bytes:
    """Return what is before the elements of a safetensors file: the length of a table, and the table.

    tensors: in their order, with dtype, shape and nbytes.
    """
    header = dict(metadata)
    end = 0
    for name, x in tensors.items():
        offsets = (end, end + x.nbytes)
        header[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": offsets}
        end += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def host_bytes(x: torch.Tensor) -> Any:
    """The elements in C order, as bytes on the host; waits for the copy."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


# Reading.


Reader = Callable[[Path, Manifest, int], AbstractContextManager[Callable[[str, Rectangle, str], Any]]]


def fill_from(folder: Path, manifest: Manifest, pieces: Iterable[Piece], reader: Reader) -> None:
    """Fill each piece in place from its overlaps with the saved rectangles, and read nothing else.

    All keys of the pieces, with their shapes, must be in the manifest. `reader(folder, manifest, rank)` opens
    the file of a rank: a function of (key, rectangle, dtype) to what can be sliced. Raises CheckpointError.
    """
    jobs: dict[int, list] = {}
    for piece in pieces:
        for rank, r in stored(manifest.tensors[piece.key], piece.offset, piece.data.shape):
            found = overlap(*r, piece.offset, piece.data.shape)
            if found is not None:
                jobs.setdefault(rank, []).append((piece, r, found))
    for rank, copies in jobs.items():
        with reader(folder, manifest, rank) as entry:
            for piece, r, ranges in copies:
                saved = entry(piece.key, r, manifest.tensors[piece.key].dtype)
                source = tuple(slice(a - o, b - o) for (a, b), o in zip(ranges, r.offset))
                target = tuple(slice(a - o, b - o) for (a, b), o in zip(ranges, piece.offset))
                piece.data.detach()[target].copy_(saved[source])


@contextmanager
def shard_reader(folder: Path, manifest: Manifest, rank: int) -> Iterator[Callable]:
    """Open a rank's safetensors file: a `Reader`."""
    path = folder / rank_file("sharded", rank)
    with safe_open(path, "pt") as file:

        def entry(key: str, r: Rectangle, dtype: str) -> Any:
            name = entry_name(key, r)
            saved = file.get_slice(name)
            if (saved.get_dtype(), saved.get_shape()) != (dtype, list(r.shape)):
                raise CheckpointError(f"{path}: {name} is not {dtype} {list(r.shape)} there")
            return saved

        yield entry


def stored(saved: SavedTensor, offset: Sequence, shape: Sequence) -> Iterator[tuple[int, Rectangle]]:
    """Yield (rank, rectangle) of the entries of a tensor that may overlap with a slice of it."""
    for box, ranges in saved.boxes.items():
        if overlap(*box, offset, shape) is not None:
            for begin, end, rank in ranges:
                for corner, size in rectangles(box.shape, begin, end):
                    yield rank, Rectangle(tuple(a + b for a, b in zip(box.offset, corner)), size)

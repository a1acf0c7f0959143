"""Tensors that are read only while they are written, in slices of rows: a model of any size fits.

    model.safetensors  ->  at most 64 MiB of rows, cast if asked  ->  rank_00003.safetensors

One that is stored transposed, or in one piece of a Megatron-LM checkpoint, is read whole.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nanomegatron.checkpoint.files import DTYPES, Piece, header_bytes, host_bytes, write_shard
from nanomegatron.checkpoint.manifest import CheckpointError

SLICE = 64 * 2**20  # bytes


@dataclass(frozen=True)
class Stream:
    """A tensor that is not in memory: `rows(begin, end)` reads rows of its first dim, if it has one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[int, int], torch.Tensor]
    whole: bool = False  # a part takes as long to read as all

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the rows of each slice, in order."""
        count = self.shape[0] if self.shape else 1
        step = count if self.whole else max(1, SLICE * count // max(1, self.nbytes))
        for begin in range(0, count, step):
            yield begin, min(begin + step, count)

    def slices(self) -> Iterator[torch.Tensor]:
        """Read the tensor, slice by slice in order."""
        return itertools.starmap(self.rows, self.spans())

    def part(self, first: int, count: int) -> "Stream":
        """Return `count` of its rows."""
        shape = (count, *self.shape[1:])
        return replace(self, shape=shape, rows=lambda begin, end: self.rows(first + begin, first + end))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> "Stream":
        """Return one whose slices are changed as they are read, to this type."""
        return replace(self, dtype=dtype, rows=lambda begin, end: change(self.rows(begin, end)))


def joined(parts: Sequence[Stream], transposed: bool = False) -> Stream:
    """Return the parts one below the other; if `transposed`, the transpose of that."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def rows(begin: int, end: int) -> torch.Tensor:
        found, at = [], 0
        for part in parts:
            low, high = max(begin - at, 0), min(end - at, part.shape[0])
            found += [part.rows(low, high)] if low < high else []
            at += part.shape[0]
        return found[0] if len(found) == 1 else torch.cat(found)

    if transposed:
        return Stream(shape[::-1], parts[0].dtype, lambda begin, end: rows(0, shape[0]).t()[begin:end], True)
    return Stream(shape, parts[0].dtype, rows, any(part.whole for part in parts))


# Writing.


def write_streams(folder: Path, rank: int, tensors: Mapping[str, Stream]) -> None:
    """Write whole tensors, by their keys, as a rank's file of one of our checkpoints."""
    pieces = [
        Piece(
            key,
            stream.shape,
            (0,) * len(stream.shape),
            torch.empty(stream.shape, dtype=stream.dtype, device="meta"),
        )
        for key, stream in tensors.items()
    ]
    write_shard(folder, rank, pieces, lambda piece: tensors[piece.key].slices())


def safetensors_header(tensors: Mapping[str, Stream]) -> bytes:
    """Return the bytes before the first element of a safetensors file with these tensors in order."""
    return header_bytes(tensors, {"__metadata__": {"format": "pt"}})


def write_safetensors(path: Path, tensors: Mapping[str, Stream], header: bytes) -> None:
    """Write a file with this header. Raises CheckpointError unless it describes tensors of these."""
    entries = {name: entry for name, entry in json.loads(header[8:]).items() if name != "__metadata__"}
    with open(path, "xb") as file:
        file.write(header)
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            stream = tensors.get(name)
            found = stream and (DTYPES[stream.dtype], list(stream.shape))
            if found != (entry["dtype"], entry["shape"]):
                raise CheckpointError(
                    f"{path.name}: {name} is to be {entry['dtype']} {entry['shape']}, is {found}"
                )
            for x in stream.slices():
                file.write(host_bytes(x))

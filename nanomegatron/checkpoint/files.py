"""A checkpoint folder: rectangles of named tensors in safetensors files, and a manifest that lists them.

    iter_0000120/
        rank_00000.safetensors   the tensors of rank 0, each entry named like "model/w[0:2,0:4]"
        rank_00001.safetensors
        manifest.json            where each tensor is (checkpoint/manifest.py); files, SHA-256; state; config
        manifest.json.sha256     the manifest's own hash, in the format of `sha256sum -c`

    saved by two ranks, sharded by rows      loaded by rank 1 of 2, sharded by columns
        0 0 0 0   rank_00000                     . . # #   it overlaps both saved rectangles;
        0 0 0 0                                  . . # #   only the overlaps are read
        1 1 1 1   rank_00001                     . . # #
        1 1 1 1                                  . . # #

Rectangles are in coordinates of the global tensors: a reader need not know the layout of the writer. Tensor
formats do not detect a flipped bit, hence the hashes. An untrusted folder may be wrong but is not dangerous:
nothing is unpickled, file names have one fixed form, symbolic links are not followed, and every size is
checked against that of the file. (Format: huggingface.co/docs/safetensors)
"""

import hashlib
import itertools
import json
import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from nanomegatron.checkpoint.manifest import (
    DTYPES,
    CheckpointError,
    Manifest,
    Range,
    Rectangle,
    SavedFile,
    SavedTensor,
    check_manifest,
    entry_name,
    parse_manifest,
    rectangles,
    shard_name,
    to_json,
)

MANIFEST, MANIFEST_SUM = "manifest.json", "manifest.json.sha256"
MANIFEST_LIMIT = 64 * 2**20  # bytes; docs/parallel.md has the sizes for large models


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


def write_shard(folder: Path, rank: int, pieces: Iterable[Piece]) -> None:
    """Write the pieces to one safetensors file, synced to disk, and its part of the manifest to a .json file.

    One tensor at a time is copied to the host, hashed and written. `pieces` has all rectangles of a range.
    Raises CheckpointError if two pieces are the same rectangle.
    """
    pieces = sorted(pieces, key=lambda p: -p.data.element_size())  # stable; keeps every tensor aligned
    header: dict[str, Any] = {}
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.data.nbytes
        entry = {"dtype": DTYPES[piece.data.dtype], "shape": tuple(piece.data.shape)}
        header[piece.entry] = entry | {"data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    path = folder / shard_name(rank)
    with open(path, "xb") as file:
        for block in itertools.chain((len(text).to_bytes(8, "little"), text), map(raw_bytes, pieces)):
            digest.update(block)
            file.write(block)
        size = file.tell()
        sync(file)
    write_part(folder, rank, pieces, SavedFile(size, digest.hexdigest()))


def write_part(folder: Path, rank: int, pieces: Iterable[Piece], file: SavedFile) -> None:
    """Write a rank's part of the manifest: where its pieces are, and what its file must be.

    Raises CheckpointError if two pieces are the same rectangle.
    """
    tensors: dict[str, SavedTensor] = {}
    seen: set[str] = set()
    for piece in pieces:
        if piece.entry in seen:
            raise CheckpointError(f"{piece.entry} is given twice, and would overlap")
        seen.add(piece.entry)
        saved = tensors.setdefault(piece.key, SavedTensor(DTYPES[piece.data.dtype], piece.shape, {}))
        whole = Rectangle(piece.offset, tuple(piece.data.shape))
        box, *ends = piece.range or (whole, 0, piece.data.numel())
        ranges = saved.boxes.setdefault(box, [])
        if (*ends, rank) not in ranges:
            ranges.append(Range(*ends, rank))
    part = Manifest(0, {}, "", tensors, {rank: file})
    (folder / shard_name(rank)).with_suffix(".json").write_text(to_json(part))


def raw_bytes(piece: Piece) -> Any:
    """The piece's elements in C order, as bytes on the host; waits for the copy."""
    return piece.data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def write_text(path: Path, text: str) -> None:
    """Write a small file and sync it to disk."""
    with open(path, "wb") as file:
        file.write(text.encode())
        sync(file)


def sync(file: BinaryIO) -> None:
    """Wait until everything written to the file is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the folder's entries are on disk: files created in it, renames."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and its hash, synced to disk. Raises CheckpointError if it is too large."""
    text = to_json(manifest)
    if (size := len(text.encode())) > MANIFEST_LIMIT:
        hint = "larger buckets (--ddp-bucket-size) make fewer ranges"
        raise CheckpointError(f"{MANIFEST} of {size} bytes is larger than {MANIFEST_LIMIT}: {hint}")
    write_text(folder / MANIFEST, text)
    write_text(folder / MANIFEST_SUM, _sum_line(text.encode()))


def _sum_line(manifest: bytes) -> str:
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n"


# Reading.


def open_file(path: Path) -> BinaryIO:
    """Open a plain file for reading. Raises CheckpointError for anything else, symbolic links included."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path}: {os.strerror(error.errno)}") from None
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise CheckpointError(f"{path} is not a plain file")
    return file


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest, checked against its hash and for consistency; opens no other file.

    Raises CheckpointError.
    """
    path = Path(folder) / MANIFEST
    with open_file(path) as file, open_file(path.with_name(MANIFEST_SUM)) as sum_file:
        data, expected = file.read(MANIFEST_LIMIT + 1), sum_file.read(1024)
    if len(data) > MANIFEST_LIMIT:
        raise CheckpointError(f"{path} is larger than {MANIFEST_LIMIT} bytes")
    if expected != _sum_line(data).encode():
        raise CheckpointError(f"{path} is damaged: {MANIFEST_SUM} has another SHA-256")
    try:
        manifest = parse_manifest(data)
        check_manifest(manifest.tensors, manifest.files)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return manifest


def verify_file(path: Path, expected: SavedFile) -> None:
    """Raise CheckpointError unless the file has the size and the SHA-256 that the manifest gives."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            raise CheckpointError(f"{path} has {size} bytes, not {expected.bytes}")
        if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's")


Reader = Callable[[Path, Manifest, int], AbstractContextManager[Callable[[str, Rectangle, str], Any]]]


def describe_file(path: Path) -> SavedFile:
    """Read a file that was just written -> its size and SHA-256."""
    with open_file(path) as file:
        return SavedFile(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def fill(folder: Path, manifest: Manifest, pieces: Iterable[Piece], reader: Reader) -> None:
    """Fill each piece in place from its overlaps with the saved rectangles, and read nothing else.

    All keys of the pieces, with their shapes, must be in the manifest. `reader(folder, manifest, rank)` opens
    the file of a rank: a function of (key, rectangle, dtype) to what can be sliced. Raises CheckpointError.
    """
    jobs: dict[int, list] = {}
    for piece in pieces:
        for box, ranges in manifest.tensors[piece.key].boxes.items():
            for rank, r in _stored(box, ranges, piece.offset, piece.data.shape):
                found = overlap(r.offset, r.shape, piece.offset, piece.data.shape)
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
    path = folder / shard_name(rank)
    with open_file(path) as plain:
        if int.from_bytes(plain.read(8), "little") > manifest.header_limits[rank]:
            raise CheckpointError(f"{path}: its header is longer than the manifest accounts for")
    with safe_open(path, "pt") as file:

        def entry(key: str, r: Rectangle, dtype: str) -> Any:
            name = entry_name(key, r)
            saved = file.get_slice(name)
            if (saved.get_dtype(), saved.get_shape()) != (dtype, list(r.shape)):
                raise CheckpointError(f"{path}: {name} is not {dtype} {list(r.shape)} there")
            return saved

        yield entry


def _stored(
    box: Rectangle, ranges: list[Range], offset: Sequence, shape: Sequence
) -> Iterator[tuple[int, Rectangle]]:
    """Yield (rank, rectangle) of the entries of a box that may overlap with a slice of the tensor."""
    found = overlap(*box, offset, shape)
    if found is None:
        return
    first = last = 0  # of the overlap's elements, in the flattened box
    for (begin, end), o, n in zip(found, *box):
        first, last = first * n + begin - o, last * n + end - 1 - o
    at = bisect_right(ranges, first, key=lambda r: r.begin) - 1
    for begin, end, rank in itertools.takewhile(lambda r: r.begin <= last, ranges[max(at, 0) :]):
        for corner, size in rectangles(box.shape, begin, end):
            yield rank, Rectangle(tuple(a + b for a, b in zip(box.offset, corner)), size)

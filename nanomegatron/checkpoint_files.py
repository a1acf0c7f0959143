"""One checkpoint folder: rectangles of named tensors in safetensors files, and the manifest that lists them.

    iter_0000120/
        rank_00000.safetensors   what rank 0 wrote, each entry named like "model/w[0:2,0:4]"
        rank_00001.safetensors
        manifest.json            tensor -> dtype, shape, rectangles; file -> bytes, SHA-256; state; config
        manifest.json.sha256     the manifest's own hash, in the format of `sha256sum -c`

    saved by two ranks, cut by rows          wanted by rank 1 of 2, cut by columns
        0 0 0 0   rank_00000                     . . # #   it overlaps both saved rectangles;
        0 0 0 0                                  . . # #   of each the overlap alone is read
        1 1 1 1   rank_00001                     . . # #
        1 1 1 1                                  . . # #

All is said in coordinates of the global tensors, so no reader needs to know the layout that wrote. No tensor
format notices a flipped bit by itself, hence the hashes. A folder from a stranger can be wrong but never do
harm: nothing is unpickled, file names are of one fixed form, symbolic links are not followed, and no size is
believed before it is compared with that of the file. (Format: huggingface.co/docs/safetensors)
"""

import hashlib
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

FORMAT_VERSION = 1
MANIFEST, MANIFEST_SUM = "manifest.json", "manifest.json.sha256"
MANIFEST_LIMIT = 64 * 2**20  # bytes; a 400B model on thousands of ranks needs about a tenth
SHARD_NAME = re.compile(r"rank_[0-9]{5,7}\.safetensors")
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
ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}


class CheckpointError(Exception):
    """A checkpoint cannot be used; the text says which file or tensor, and why."""


def describe(error: BaseException) -> str:
    """The error in one line."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Piece:
    """A rectangle of a global tensor that this rank holds: `data` is a view, filled in place by a load."""

    key: str  # "model/<parameter>", "exp_avg/<parameter>", ...
    shape: tuple[int, ...]  # of the global tensor
    offset: tuple[int, ...]
    data: torch.Tensor
    owner: bool = True  # this rank writes it; of the ranks that hold the same rectangle exactly one does
    optional: bool = False  # a load may leave it as it is


@dataclass(frozen=True)
class Rectangle:
    """A saved slice of a global tensor: `key` is its name inside `file`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True)
class SavedTensor:
    """A global tensor; the rectangles tile it."""

    dtype: str
    shape: tuple[int, ...]
    rectangles: list[Rectangle]


@dataclass(frozen=True)
class SavedFile:
    """What a file must be like."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint folder."""

    iteration: int
    state: dict[str, Any]
    config: str  # the resolved configuration as TOML
    tensors: dict[str, SavedTensor]
    files: dict[str, SavedFile]
    format_version: int = FORMAT_VERSION


# Rectangles: (offset, shape) in the coordinates of a global tensor.


def overlap(offset: Sequence, shape: Sequence, offset2: Sequence, shape2: Sequence) -> list | None:
    """The (begin, end) of the intersection along each dim, or None where there is none."""
    ranges = [
        (max(a, b), min(a + n, b + m)) for a, n, b, m in zip(offset, shape, offset2, shape2, strict=True)
    ]
    return ranges if all(begin < end for begin, end in ranges) else None


def tiling_error(shape: tuple[int, ...], rectangles: Sequence[Rectangle]) -> str:
    """Why the rectangles do not cover a tensor of this shape exactly once; "" where they do."""
    for r in rectangles:
        inside = len(r.offset) == len(r.shape) == len(shape)
        if not inside or not all(0 <= o < o + n <= s for o, n, s in zip(r.offset, r.shape, shape)):
            return f"{r.key} of shape {list(r.shape)} is not inside {list(shape)}"
    covered, volume = sum(math.prod(r.shape) for r in rectangles), math.prod(shape)
    if covered != volume:
        return f"the rectangles cover {covered} of {volume} elements"
    if not shape:
        return ""
    # Inside and of the right volume in sum: they tile unless two overlap. A sweep along the dim with the
    # most cuts compares each rectangle with those that have begun before it and not yet ended.
    dim = max(range(len(shape)), key=lambda d: len({r.offset[d] for r in rectangles}))
    active: list[Rectangle] = []
    for r in sorted(rectangles, key=lambda r: r.offset[dim]):
        active = [a for a in active if a.offset[dim] + a.shape[dim] > r.offset[dim]]
        for a in active:
            if overlap(a.offset, a.shape, r.offset, r.shape):
                return f"{a.key} and {r.key} overlap"
        active.append(r)
    return ""


# Writing.


def write_shard(path: Path, pieces: Iterable[Piece]) -> tuple[dict[str, SavedTensor], SavedFile]:
    """Write the pieces as one safetensors file, to the disk, and return what the manifest says of it.

    Streams: one tensor at a time is copied to the host, hashed and written.
    """
    pieces = sorted(pieces, key=lambda p: -p.data.element_size())  # stable; keeps every tensor aligned
    header: dict[str, Any] = {}
    tensors: dict[str, SavedTensor] = {}
    end = 0
    for piece in pieces:
        shape, dtype = tuple(piece.data.shape), DTYPES[piece.data.dtype]
        key = f"{piece.key}[{','.join(f'{o}:{o + n}' for o, n in zip(piece.offset, shape))}]"
        saved = tensors.setdefault(piece.key, SavedTensor(dtype, piece.shape, []))
        saved.rectangles.append(Rectangle(piece.offset, shape, path.name, key))
        begin, end = end, end + piece.data.nbytes
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for block in itertools.chain((len(text).to_bytes(8, "little"), text), map(raw_bytes, pieces)):
            digest.update(block)
            file.write(block)
        size = file.tell()
        sync(file)
    return tensors, SavedFile(size, digest.hexdigest())


def raw_bytes(piece: Piece) -> Any:
    """The piece's elements in C order as bytes on the host."""
    return piece.data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def write_text(path: Path, text: str) -> None:
    """Write a small file, to the disk."""
    with open(path, "wb") as file:
        file.write(text.encode())
        sync(file)


def sync(file: BinaryIO) -> None:
    """Return when what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the folder's entries are on the disk: files made in it, renames."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(manifest: Manifest) -> str:
    """The manifest's text; one rank's part of it is written the same way."""
    return json.dumps(asdict(manifest))


def merge(indices: Iterable[Path]) -> tuple[dict[str, SavedTensor], dict[str, SavedFile]]:
    """What all ranks wrote. Raises CheckpointError where it does not make up whole tensors."""
    tensors: dict[str, SavedTensor] = {}
    files: dict[str, SavedFile] = {}
    for path in indices:
        index = json.loads(path.read_text())
        files |= {name: _file(name, entry) for name, entry in index["files"].items()}
        for key, entry in index["tensors"].items():
            mine = _tensor(entry)
            whole = tensors.setdefault(key, SavedTensor(mine.dtype, mine.shape, []))
            if (mine.dtype, mine.shape) != (whole.dtype, whole.shape):
                found = f"{mine.dtype} {mine.shape}, elsewhere {whole.dtype} {whole.shape}"
                raise CheckpointError(f"{path.name}: {key} is {found}")
            whole.rectangles.extend(mine.rectangles)
    _check_tensors(tensors, files)
    return tensors, files


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and its hash, to the disk."""
    text = to_json(manifest)
    write_text(folder / MANIFEST, text)
    write_text(folder / MANIFEST_SUM, _sum_line(text.encode()))


def _sum_line(manifest: bytes) -> str:
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n"


# Reading.


def open_file(path: Path) -> BinaryIO:
    """A plain file, opened for reading. Raises CheckpointError for anything else, symbolic links included."""
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
    """The manifest of a checkpoint folder, checked against its hash and in itself; opens no other file.

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
        return _parse(json.loads(data))
    except (CheckpointError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {describe(error)}") from None


def _parse(entry: dict) -> Manifest:
    version = entry["format_version"]
    if version != FORMAT_VERSION:
        raise CheckpointError(f"format_version {version!r}, this program reads {FORMAT_VERSION}: update it")
    if not isinstance(entry["state"], dict) or not isinstance(entry["config"], str):
        raise CheckpointError("state is not a table, or config not a text")
    files = {name: _file(name, value) for name, value in entry["files"].items()}
    tensors = {key: _tensor(value) for key, value in entry["tensors"].items()}
    _check_tensors(tensors, files)
    return Manifest(_size(entry["iteration"]), entry["state"], entry["config"], tensors, files)


def _file(name: str, entry: dict) -> SavedFile:
    if not SHARD_NAME.fullmatch(name):
        raise CheckpointError(f"file name {name[:80]!r} is not of the form rank_00000.safetensors")
    return SavedFile(_size(entry["bytes"]), str(entry["sha256"]))


def _tensor(entry: dict) -> SavedTensor:
    rectangles = [
        Rectangle(_sizes(r["offset"]), _sizes(r["shape"]), str(r["file"]), str(r["key"]))
        for r in entry["rectangles"]
    ]
    return SavedTensor(str(entry["dtype"]), _sizes(entry["shape"]), rectangles)


def _sizes(entry: list) -> tuple[int, ...]:
    if not isinstance(entry, list) or len(entry) > 16:
        raise CheckpointError(f"{str(entry)[:80]} is not a list of at most 16 sizes")
    return tuple(map(_size, entry))


def _size(value: int) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise CheckpointError(f"{str(value)[:80]} is not a size")
    return value


def _check_tensors(tensors: dict[str, SavedTensor], files: dict[str, SavedFile]) -> None:
    """Raise CheckpointError unless rectangles tile each tensor and can lie in the files that they name."""
    room = {name: file.bytes for name, file in files.items()}
    for key, tensor in tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{key}: unknown dtype {tensor.dtype!r}")
        for r in tensor.rectangles:
            room[r.file] = room.get(r.file, 0) - math.prod(r.shape) * ITEM_BYTES[tensor.dtype]
            if room[r.file] < 0:
                raise CheckpointError(f"{key}: {r.key} does not fit into {r.file[:80]!r}")
        if error := tiling_error(tensor.shape, tensor.rectangles):
            raise CheckpointError(f"{key}: {error}")


def verify_file(path: Path, expected: SavedFile) -> None:
    """Raise CheckpointError unless the file has the size and the SHA-256 that the manifest gives."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            raise CheckpointError(f"{path} has {size} bytes, not {expected.bytes}")
        if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's")


def fill(folder: Path, manifest: Manifest, pieces: Iterable[Piece]) -> None:
    """Copy into each piece what the saved rectangles hold of it, reading nothing else of the files.

    The manifest has the keys and shapes of the pieces. Raises CheckpointError.
    """
    header_limits = dict.fromkeys(manifest.files, 1024)
    for r in (r for tensor in manifest.tensors.values() for r in tensor.rectangles):
        header_limits[r.file] += 512 + len(json.dumps(r.key))
    jobs: dict[str, list] = {}
    for piece in pieces:
        for r in manifest.tensors[piece.key].rectangles:
            ranges = overlap(r.offset, r.shape, piece.offset, piece.data.shape)
            if ranges is not None:
                jobs.setdefault(r.file, []).append((piece, r, ranges))
    for name, copies in jobs.items():
        with open_file(folder / name) as plain:
            if int.from_bytes(plain.read(8), "little") > header_limits[name]:
                raise CheckpointError(f"{folder / name}: its header is longer than the manifest accounts for")
        with safe_open(folder / name, "pt") as file:
            for piece, r, ranges in copies:
                saved, dtype = file.get_slice(r.key), manifest.tensors[piece.key].dtype
                if (saved.get_dtype(), saved.get_shape()) != (dtype, list(r.shape)):
                    raise CheckpointError(f"{folder / name}: {r.key} is not {dtype} {list(r.shape)} there")
                source = tuple(slice(a - o, b - o) for (a, b), o in zip(ranges, r.offset))
                target = tuple(slice(a - o, b - o) for (a, b), o in zip(ranges, piece.offset))
                piece.data.detach()[target].copy_(saved[source])

"""The manifest of a checkpoint: which file has which elements of every global tensor.

A tensor is tiled by boxes, the rectangles of it that parameters of ranks hold. The ranks that shard the
optimizer's states of a box cut it flat, at the ends of buckets, so each has a range of its elements:

    . . . .
    . . a a    the rest of a row (in n dimensions: of a slice of dim 0)      a range is up to 2 n - 1
    b b b b    whole rows                                                    rectangles in n dimensions,
    c . . .    the beginning of a row                                        each an entry of the file

The JSON text (format_version 3), each list in one line and without spaces:

    "tensors": {"main/w": ["F32", 5], "exp_avg/w": ["F32", 5], ...}    dtype, which of the cuts
    "cuts":    [[shape, [offset, shape, rank, begin, end, rank, begin, end, ...], ...], ...]    boxes, ranges
    "files":   [[rank, bytes, sha256, crc32], ...]                     crc32: 8 hex digits for each block

Tensors with equal cuts share one entry: main weights and both moments. Names of entries and files follow from
the cuts. No torch here: the process that writes checkpoints (checkpoint/writer.py) starts without it.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

FORMAT_VERSION = 3
RANK_FILES = {  # --ckpt-format
    "sharded": "rank_{:05d}.safetensors",
    "torch_dist": "__{}_0.distcp",
    "torch": "rank_{:05d}.pt",
}
METADATA = ".metadata"  # of torch_dist
CRC_BLOCK = 16 * 2**20  # bytes of a file that have a CRC-32 of their own
OTHER_VERSION = "update the program, or go on with the one that wrote it"  # ends the error message
UNHASHED = "no hash says whether it is damaged"  # of a folder that another program saved
RANGES_LIMIT = 2**24  # twenty times what 405B parameters on 16,384 ranks need
MAX_DIMS = 6  # of a tensor: the time to check it doubles with each
ITEM_BYTES = {  # by safetensors' names of the types
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}


class CheckpointError(Exception):
    """A checkpoint cannot be used; the text says which file or tensor, and why."""


def describe_error(error: BaseException) -> str:
    """Describe an error in one line."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


class Rectangle(NamedTuple):
    """A slice of a global tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Range(NamedTuple):
    """Elements `begin` to `end` of a flattened box, in the file of `rank`."""

    begin: int
    end: int
    rank: int


@dataclass(frozen=True)
class SavedTensor:
    """A global tensor; its boxes tile it, and the ranges of each box, in order, tile the box."""

    dtype: str
    shape: tuple[int, ...]
    boxes: dict[Rectangle, list[Range]]


@dataclass(frozen=True)
class SavedFile:
    """The size and checksums that a file must have; `crc32` of each CRC_BLOCK, () of METADATA."""

    bytes: int
    sha256: str
    crc32: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint folder; `files` by rank."""

    iteration: int
    state: dict[str, Any]
    config: str  # the resolved configuration as TOML
    tensors: dict[str, SavedTensor]
    files: dict[int, SavedFile]
    format: dict[str, Any] = field(default_factory=dict)  # its "name", and what it needs; {}: sharded
    notes: list[str] = field(default_factory=list)  # of who opens or loads it, for the user

    @property
    def named_files(self) -> dict[str, SavedFile]:
        """The files beside the manifest, by name; {} if another program saved them."""
        if self.format.get("foreign"):
            return {}
        name = self.format.get("name", "sharded")
        more = {METADATA: _saved_file(*self.format["metadata"])} if "metadata" in self.format else {}
        return {rank_file(name, rank): file for rank, file in self.files.items()} | more


def rank_file(format: str, rank: int) -> str:
    """The name of a rank's file. Raises CheckpointError for an unknown format."""
    if format not in RANK_FILES:
        raise CheckpointError(f"format {str(format)[:80]!r} is not one of {', '.join(RANK_FILES)}")
    return RANK_FILES[format].format(rank)


def entry_name(key: str, rectangle: Rectangle) -> str:
    """The name of a slice of the tensor `key` in its file: "model/w[0:2,0:4]"."""
    return f"{key}[{','.join(f'{o}:{o + n}' for o, n in zip(*rectangle))}]"


def rectangles(shape: Sequence[int], begin: int, end: int) -> Iterator[Rectangle]:
    """Yield the rectangles, in order, that elements `begin` to `end` of a flattened tensor consist of."""
    if end - begin == math.prod(shape):
        yield Rectangle((0,) * len(shape), tuple(shape))
        return
    row = math.prod(shape[1:])
    zeros = (0,) * (len(shape) - 1)
    while begin < end:
        first, inside = divmod(begin, row)
        if inside == 0 and end - begin >= row:
            rows = (end - begin) // row
            yield Rectangle((first, *zeros), (rows, *shape[1:]))
            begin += rows * row
            continue
        stop = min(end, (first + 1) * row)
        for offset, size in rectangles(shape[1:], inside, stop - first * row):
            yield Rectangle((first, *offset), (1, *size))
        begin = stop


# Checks.


def tiling_error(shape: tuple[int, ...], boxes: Mapping[Rectangle, list[Range]]) -> str:
    """Return why the boxes, and their ranges in order, do not cover a tensor exactly once; "" if they do.

    The time is linear in their number. Boxes tile the tensor if their indicator functions sum to its own. A
    sum is determined by its differences along all dims, which for one box are +1 and -1 at its corners; so
    all of these must cancel except those of the whole tensor.
    """
    covered, volume = 0, math.prod(shape)
    for box, ranges in boxes.items():
        inside = len(box.offset) == len(box.shape) == len(shape)
        if not inside or not all(0 <= o < o + n <= s for o, n, s in zip(*box, shape)):
            return f"{entry_name('', box)} is not inside {list(shape)}"
        at, size = 0, math.prod(box.shape)
        for begin, end, _ in ranges:
            if begin < at or not begin < end <= size:
                return f"in {entry_name('', box)} elements {begin} to {end} of {size} are wrong or overlap"
            covered, at = covered + end - begin, end
    if covered != volume:
        return f"the files cover {covered} of {volume} elements"
    cut = [d for d, n in enumerate(shape) if any(box.shape[d] != n for box in boxes)]
    corners: Counter = Counter()
    whole = Rectangle((0,) * len(shape), shape)
    for sign, box in [(-1, whole)] * bool(boxes) + [(1, box) for box in boxes]:
        for far in itertools.product((0, 1), repeat=len(cut)):
            point = tuple(box.offset[d] + f * box.shape[d] for d, f in zip(cut, far))
            corners[point] += -sign if sum(far) % 2 else sign
    wrong = next((point for point, count in corners.items() if count), None)
    return "" if wrong is None else f"at {list(wrong)} along dims {cut} boxes overlap"


def check_manifest(tensors: dict[str, SavedTensor], files: dict[int, SavedFile]) -> None:
    """Raise CheckpointError unless files have each element exactly once, and are large enough for them."""
    cuts = {id(tensor.boxes): (key, tensor) for key, tensor in tensors.items()}  # shared ones once
    for key, tensor in cuts.values():
        if error := tiling_error(tensor.shape, tensor.boxes):
            raise CheckpointError(f"{key}: {error}")
    room, left = {rank: file.bytes for rank, file in files.items()}, RANGES_LIMIT
    for key, tensor in tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise CheckpointError(f"{key}: unknown dtype {tensor.dtype!r}")
        item = ITEM_BYTES[tensor.dtype]
        for ranges in tensor.boxes.values():
            left -= len(ranges)
            if left < 0:
                raise CheckpointError(f"{key}: by here it has more than {RANGES_LIMIT} ranges")
            for begin, end, rank in ranges:
                room[rank] = room.get(rank, 0) - (end - begin) * item
                if room[rank] < 0:
                    raise CheckpointError(f"{key}: its part does not fit into file {rank}")


# Writing.


def to_json(manifest: Manifest) -> str:
    """Return the JSON text of a manifest, or of one rank's part of it."""
    cuts: dict[str, int] = {}
    tensors = {}
    for key, tensor in manifest.tensors.items():
        boxes = [
            [*box, *(n for begin, end, rank in ranges for n in (rank, begin, end))]
            for box, ranges in tensor.boxes.items()
        ]
        tensors[key] = [tensor.dtype, cuts.setdefault(_dumps([tensor.shape, *boxes]), len(cuts))]
    rest = {
        "format_version": FORMAT_VERSION,
        "iteration": manifest.iteration,
        "state": manifest.state,
        "config": manifest.config,
        "files": [
            (rank, file.bytes, file.sha256, "".join(f"{crc:08x}" for crc in file.crc32))
            for rank, file in manifest.files.items()
        ],
        "tensors": tensors,
    }
    rest |= {"format": manifest.format} if manifest.format else {}
    return _dumps(rest)[:-1] + ',\n"cuts":[\n' + ",\n".join(cuts) + "]}\n"


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def merge(indices: Iterable[Path]) -> tuple[dict[str, SavedTensor], dict[int, SavedFile]]:
    """Merge the parts of all ranks -> tensors, files. Raises CheckpointError if tensors are not complete."""
    tensors: dict[str, SavedTensor] = {}
    files: dict[int, SavedFile] = {}
    for path in indices:
        part = parse_manifest(path.read_bytes())
        files |= part.files
        for key, mine in part.tensors.items():
            whole = tensors.setdefault(key, SavedTensor(mine.dtype, mine.shape, {}))
            if (mine.dtype, mine.shape) != (whole.dtype, whole.shape):
                raise CheckpointError(
                    f"{path.name}: {key} is {mine.dtype} {mine.shape}, elsewhere {whole.dtype} {whole.shape}"
                )
            for box, ranges in mine.boxes.items():
                whole.boxes.setdefault(box, []).extend(ranges)
    for tensor in tensors.values():
        for ranges in tensor.boxes.values():
            ranges.sort()
    check_manifest(tensors, files)
    return tensors, files


# Reading.


def parse_manifest(text: bytes) -> Manifest:
    """Parse a manifest, or one rank's part of it; `check_manifest` checks it.

    Raises CheckpointError.
    """
    try:
        entry = json.loads(text)
        version = _size(entry["format_version"])
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"format_version {version}, this program reads {FORMAT_VERSION}: {OTHER_VERSION}"
            )
        if not isinstance(entry["state"], dict) or not isinstance(entry["config"], str):
            raise CheckpointError("state is not a table, or config not a text")
        cuts = [_cut(*cut) for cut in entry["cuts"]]
        tensors = {
            key: SavedTensor(str(dtype), *cuts[_size(cut)]) for key, (dtype, cut) in entry["tensors"].items()
        }
        files = {_size(rank): _saved_file(*file) for rank, *file in entry["files"]}
        format = _format(entry.get("format", {}))
        return Manifest(_size(entry["iteration"]), entry["state"], entry["config"], tensors, files, format)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(describe_error(error)) from None


def _format(entry: dict[str, Any]) -> dict[str, Any]:
    """Raises CheckpointError for a format that is not known here."""
    rank_file(entry.get("name", "sharded"), 0)
    if "metadata" in entry:
        _saved_file(*entry["metadata"])
    if "foreign" in entry:
        raise CheckpointError("format: of another program, which writes no manifest")
    return entry


def _saved_file(size: int, sha256: str, crc32: str = "") -> SavedFile:
    """Raises CheckpointError unless there are CRC-32s of all blocks or of none."""
    if len(crc32) not in (0, 8 * -(-_size(size) // CRC_BLOCK)):
        raise CheckpointError(f"{len(crc32)} digits of CRC-32 are not those of {size} bytes")
    crcs = tuple(int(crc32[i : i + 8], 16) for i in range(0, len(crc32), 8))
    return SavedFile(size, str(sha256), crcs)


def _cut(shape: list, *boxes: list) -> tuple[tuple[int, ...], dict[Rectangle, list[Range]]]:
    found: dict[Rectangle, list[Range]] = {}
    for offset, size, *numbers in boxes:
        if not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
            raise CheckpointError(f"{str(numbers)[:80]} are not ranges")
        ranges = zip(numbers[1::3], numbers[2::3], numbers[::3], strict=True)
        found.setdefault(Rectangle(sizes(offset), sizes(size)), []).extend(itertools.starmap(Range, ranges))
    return sizes(shape), found


def sizes(entry: Sequence) -> tuple[int, ...]:
    """Raises CheckpointError unless these are a few sizes."""
    if not isinstance(entry, list | tuple) or len(entry) > MAX_DIMS:
        raise CheckpointError(f"{str(entry)[:80]} is not a list of at most {MAX_DIMS} sizes")
    return tuple(map(_size, entry))


def _size(value: int) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise CheckpointError(f"{str(value)[:80]} is not a size")
    return value

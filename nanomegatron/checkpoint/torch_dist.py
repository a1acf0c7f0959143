"""--ckpt-format torch_dist: a folder that torch.distributed.checkpoint reads too, beside our manifest.

    iter_0000120/
        __0_0.distcp    the rectangles of rank 0, each as torch.save writes a tensor, one behind the other
        __1_0.distcp
        .metadata       the table of contents for torch.distributed.checkpoint; never read here
        manifest.json   ours: as in files.py, and where in its file each rectangle is

    torch.distributed.checkpoint.load({"model/w": torch.empty(8, 12)}, checkpoint_id="iter_0000120")

Ranks write on their own, and rank 0 makes `.metadata` of the manifest. A load of ours maps the files into
memory and copies the slices that it needs. A folder without our manifest, saved by another program, gives its
weights: there `.metadata` is read by config/pickles.py, and each entry that is needed by archive.py. Nothing
is unpickled. No hash says whether such a folder is damaged.
"""

import io
import math
import mmap
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from nanomegatron.checkpoint.archive import Archive, elements_at
from nanomegatron.checkpoint.blocks import open_file, write_blocks
from nanomegatron.checkpoint.dcp_metadata import dcp_pickle
from nanomegatron.checkpoint.files import DTYPES, TORCH_DTYPES, Piece, describe_shard, write_rank
from nanomegatron.checkpoint.folder import MANIFEST, index_path
from nanomegatron.checkpoint.manifest import (
    METADATA,
    UNHASHED,
    CheckpointError,
    Manifest,
    Range,
    Rectangle,
    SavedFile,
    SavedTensor,
    check_manifest,
    entry_name,
    merge,
    parse_manifest,
    rank_file,
    sizes,
)
from nanomegatron.config.pickles import build_pickle

DISTCP = re.compile(r"__[0-9]{1,7}_[0-9]{1,7}\.distcp")
OURS = "nanomegatron"  # in the metadata of our folders, which are nothing without their manifest
ALIGNMENT = 64  # bytes; of the tensors in a file, as torch.save aligns them in its own
METADATA_LIMIT = 64 * 2**20  # bytes; reading takes about a second for 4 MiB
PICKLE_LIMIT = 64 * 2**10  # bytes of the pickle beside a tensor's elements


# Writing.


def plain_copy(piece: Piece) -> torch.Tensor:
    """Return the piece on the host with memory of its own: torch.save writes all that a view is of."""
    return piece.data.detach().cpu().clone(memory_format=torch.contiguous_format)


def write_distcp(
    folder: Path,
    rank: int,
    pieces: Iterable[Piece],
    copied: Callable[[Piece], torch.Tensor] = plain_copy,
) -> None:
    """Write the pieces to a rank's file, synced to disk, and its part of the manifest with their places.

    One tensor at a time is copied to the host, twice. copied: makes that copy, if `data` is without elements.
    """
    pieces, places = list(pieces), {}
    _, tensors = describe_shard(pieces, rank)

    def chunks() -> Iterator[memoryview]:
        begin = 0
        for piece in pieces:
            buffer = io.BytesIO()
            torch.save(copied(piece), buffer)
            size = buffer.seek(0, io.SEEK_END)
            with zipfile.ZipFile(buffer) as archive:
                (info,) = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
            places[piece.entry] = (begin, size, begin + elements_at(buffer.getbuffer(), info))
            buffer.seek(0, io.SEEK_END)
            begin += size + buffer.write(bytes(-size % ALIGNMENT))
            yield buffer.getbuffer()

    entries = {rank_file("torch_dist", rank): places}  # filled by chunks()
    write_rank(folder, rank, chunks(), tensors, {"name": "torch_dist", "entries": entries})


def write_metadata(
    folder: Path, ranks: int, by: str = OURS, objects: dict[str, tuple[str, int, int]] | None = None
) -> dict[str, Any]:
    """On rank 0: write `.metadata`; returns what the manifest says of the format, with all ranks' places.

    by: who saves. objects: pickles that are there too, as (file, begin, length).
    """
    indices = [index_path(folder, rank) for rank in range(ranks)]
    tensors, entries = merge(indices)[0], {}
    for path in indices:
        entries |= parse_manifest(path.read_bytes()).format["entries"]
    saved = write_blocks(folder / METADATA, [dcp_pickle(tensors, entries, by, objects or {})], 1)
    return {"metadata": [saved.bytes, saved.sha256], "entries": entries}


# Reading.


def open_distcp(folder: Path, name: str) -> BinaryIO:
    """Open a file in the folder. Raises CheckpointError for a name that may lead elsewhere."""
    if not DISTCP.fullmatch(name):
        raise CheckpointError(f"file name {name[:80]!r} is not of the form __0_0.distcp")
    return open_file(folder / name)


@contextmanager
def distcp_reader(folder: Path, manifest: Manifest, number: int) -> Iterator[Callable]:
    """Open a file, mapped into memory: a `Reader` of files.py."""
    name, places = list(manifest.format["entries"].items())[number]
    with open_distcp(folder, name) as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def entry(key: str, r: Rectangle, dtype: str) -> torch.Tensor:
        wanted = TORCH_DTYPES[dtype]
        try:
            begin, length, elements = places[entry_name(key, r)]
            if manifest.format.get("foreign"):
                return load_entry(mapped[begin : begin + length], wanted, r.shape)
            end = elements + math.prod(r.shape) * wanted.itemsize
            return torch.frombuffer(mapped[elements:end], dtype=torch.uint8).view(wanted).view(r.shape)
        except Exception as error:  # of any kind: the file may be anything
            why = str(error).partition("\n")[0][:200]
            raise CheckpointError(f"{folder / name}: {key} is not {dtype} {list(r.shape)} ({why})") from None

    yield entry


def load_entry(data: memoryview, dtype: torch.dtype, shape: tuple) -> torch.Tensor:
    """Return what torch.save wrote. Raises ValueError, or errors of any kind, if it is no such tensor."""
    buffer = io.BytesIO(data)
    archive = Archive(buffer, buffer.getbuffer(), PICKLE_LIMIT)
    saved = archive.tensor(archive.value)
    if saved is None or (saved.dtype, tuple(saved.shape)) != (dtype, tuple(shape)):
        raise ValueError("another dtype or shape")
    return saved


def read_foreign(folder: Path) -> Manifest:
    """Make a manifest of another program's `.metadata`: tensors, no state. Raises CheckpointError."""
    with open_file(folder / METADATA) as file:
        data = file.read(METADATA_LIMIT + 1)
    try:
        if len(data) > METADATA_LIMIT:
            raise CheckpointError(f"more than {METADATA_LIMIT} bytes")
        state = build_pickle(data).state
        if (about := state.get("storage_meta")) and about.state["save_id"] == OURS:
            raise CheckpointError(f"{MANIFEST} is missing beside it")
        tensors, entries = _foreign_tensors(state)
        files = {}
        for number, name in enumerate(entries):
            with open_distcp(folder, name) as file:
                files[number] = SavedFile(os.fstat(file.fileno()).st_size, "")
        check_manifest(tensors, files)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / METADATA}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / METADATA} lacks what it must have ({error!r})") from None
    step = int(re.sub("[^0-9]", "", folder.name) or 0)
    format = {"name": "torch_dist", "foreign": True, "entries": entries}
    return Manifest(step, {}, "", tensors, files, format, [f"{folder}: {UNHASHED}"])


def _foreign_tensors(state: dict) -> tuple[dict[str, SavedTensor], dict[str, dict]]:
    """The tensors of DCP's tables, each chunk a box, and where they are: {file: {entry: place}}."""
    places, tensors = {}, {}
    for index, place in state["storage_data"].items():
        if offset := index.state.get("offset"):
            extent = sizes((place.state["offset"], place.state["length"]))
            key = _text(index.state["fqn"]), sizes(offset.args[0])
            places[key] = _text(place.state["relative_path"]), (*extent, None)
    entries = {name: {} for name in sorted({name for name, _ in places.values()})}
    numbers = {name: number for number, name in enumerate(entries)}
    names = {str(dtype): name for dtype, name in DTYPES.items()}
    for key, saved in state["state_dict_metadata"].items():
        if not saved.name.endswith(".TensorStorageMetadata"):
            continue  # bytes: a pickle, which is never read
        dtype = names[saved.state["properties"].state[0].name]
        found = SavedTensor(dtype, sizes(*saved.state["size"].args), {})
        if not math.prod(found.shape):
            continue
        tensors[_text(key)] = found
        for chunk in saved.state["chunks"]:
            box = Rectangle(*(sizes(*chunk.state[part].args) for part in ("offsets", "sizes")))
            name, place = places[key, box.offset]
            entries[name][entry_name(key, box)] = place
            found.boxes[box] = [Range(0, math.prod(box.shape), numbers[name])]
    return tensors, entries


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"{type(value).__name__} where a name must be")
    return value

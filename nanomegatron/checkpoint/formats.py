"""The formats of a checkpoint folder, --ckpt-format: who writes and reads the files beside the manifest.

    sharded       rank_00000.safetensors       any layout loads it, nothing is a pickle       files.py
    torch_dist    __0_0.distcp, .metadata      any layout, and torch.distributed.checkpoint   torch_dist.py
    torch         rank_00000.pt                the layout that saved it, and torch.load       archive.py

The manifest of a folder has its format; without one it is `sharded`. All else is common to them.
"""

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nanomegatron.checkpoint.archive import open_archive
from nanomegatron.checkpoint.files import (
    TORCH_DTYPES,
    Piece,
    describe_shard,
    fill_from,
    shard_reader,
    write_rank,
    write_shard,
)
from nanomegatron.checkpoint.folder import MANIFEST, read_manifest
from nanomegatron.checkpoint.manifest import (
    METADATA,
    CheckpointError,
    Manifest,
    Rectangle,
    entry_name,
    rank_file,
)
from nanomegatron.checkpoint.megatron import megatron_reader
from nanomegatron.checkpoint.torch_dist import (
    PICKLE_LIMIT,
    distcp_reader,
    plain_copy,
    read_foreign,
    write_distcp,
)
from nanomegatron.mesh import Mesh


def fill(folder: Path, manifest: Manifest, pieces: Iterable[Piece]) -> None:
    """Fill each piece in place from what of it is saved (files.py). Raises CheckpointError."""
    fill_from(folder, manifest, pieces, READERS[manifest.format.get("name", "sharded")])


def layout_words(mesh: Mesh) -> str:
    """The sizes of the axes: "tp 2, dp 4"."""
    axes = [mesh.tp, mesh.cp, mesh.pp, mesh.dp, mesh.ep, *([mesh.etp] if mesh.ep.size > 1 else [])]
    return ", ".join(f"{axis.name} {axis.size}" for axis in axes if axis.size > 1) or "one process"


def check_layout(folder: Path, manifest: Manifest, mesh: Mesh) -> None:
    """Raise CheckpointError if only another layout can load this checkpoint."""
    saved, here = manifest.format.get("layout"), layout_words(mesh)
    if manifest.format.get("name") == "torch" and saved != here:
        raise CheckpointError(
            f"{folder}: --ckpt-format torch, by {saved}, and this run is {here}; save it there with "
            "--ckpt-format sharded or torch_dist, which any layout loads"
        )


def open_checkpoint(folder: Path) -> Manifest:
    """Read a folder's manifest, or make one of another program's metadata. Raises CheckpointError."""
    foreign = os.path.lexists(folder / METADATA) and not os.path.lexists(folder / MANIFEST)
    return read_foreign(folder) if foreign else read_manifest(folder)


# --ckpt-format torch: under another layout a rank would have to open the files of many others.


def write_torch(folder: Path, rank: int, pieces: Iterable[Piece]) -> None:
    """Write a rank's pieces as a dict of plain tensors, and a JSON text that says whose they are.

    The host holds two copies of all of them meanwhile.
    """
    pieces = list(pieces)
    buffer = io.BytesIO()
    _, table = describe_shard(pieces, rank)
    tensors = {piece.entry: plain_copy(piece) for piece in pieces}
    torch.save({"tensors": tensors, "about": json.dumps({"format": "torch", "rank": rank})}, buffer)
    write_rank(folder, rank, [buffer.getbuffer()], table, {"name": "torch"})


@contextmanager
def torch_reader(folder: Path, manifest: Manifest, rank: int) -> Iterator[Callable]:
    """Open a rank's file, mapped into memory: a `Reader` of files.py."""
    path = folder / rank_file("torch", rank)
    try:
        archive = open_archive(path, PICKLE_LIMIT * (1 + len(manifest.tensors)))
        tensors = {key: archive.tensor(value) for key, value in archive.value["tensors"].items()}
    except Exception as error:  # of any kind: the file may be anything
        raise CheckpointError(f"{path}: {str(error).partition(chr(10))[0][:200]}") from None

    def entry(key: str, r: Rectangle, dtype: str) -> torch.Tensor:
        saved = tensors.get(entry_name(key, r))
        if saved is None or (saved.dtype, tuple(saved.shape)) != (TORCH_DTYPES[dtype], tuple(r.shape)):
            raise CheckpointError(f"{path}: {entry_name(key, r)} is not {dtype} {list(r.shape)} there")
        return saved

    yield entry


WRITERS = {"sharded": write_shard, "torch_dist": write_distcp, "torch": write_torch}
READERS = {
    "sharded": shard_reader,
    "torch_dist": distcp_reader,
    "torch": torch_reader,
    "megatron": megatron_reader,
}

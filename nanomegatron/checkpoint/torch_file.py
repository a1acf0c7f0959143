"""--ckpt-format torch: one file a rank, the simplest to open, only for the layout that saved it.

    torch.load("iter_0000120/rank_00000.pt", weights_only=True)["tensors"]["model/w[0:2,0:4]"]

A file is a dict of plain tensors, and a JSON text that says which rank and layout it is of. Under another
layout a rank would have to open the files of many others; `sharded` and `torch_dist` are made for that.
"""

import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nanomegatron.checkpoint.blocks import open_file
from nanomegatron.checkpoint.files import TORCH_DTYPES, Piece, describe_shard, write_rank
from nanomegatron.checkpoint.manifest import CheckpointError, Manifest, Rectangle, entry_name, rank_file
from nanomegatron.checkpoint.torch_dist import check_archive, plain_copy


def write_torch(folder: Path, rank: int, pieces: Iterable[Piece]) -> None:
    """Write the pieces to a rank's file, synced to disk, and its part of the manifest.

    The host holds two copies of all of them meanwhile.
    """
    pieces, buffer = list(pieces), io.BytesIO()
    _, table = describe_shard(pieces, rank)
    tensors = {piece.entry: plain_copy(piece) for piece in pieces}
    torch.save({"tensors": tensors, "about": json.dumps({"format": "torch", "rank": rank})}, buffer)
    write_rank(folder, rank, [buffer.getbuffer()], table, {"name": "torch"})


@contextmanager
def torch_reader(folder: Path, manifest: Manifest, rank: int) -> Iterator[Callable]:
    """Open a rank's file, mapped into memory: a `Reader` of files.py."""
    path = folder / rank_file("torch", rank)
    try:
        with open_file(path) as file:
            check_archive(file, manifest.header_limits[rank])
        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["tensors"]
    except Exception as error:  # of any kind: the file may be anything
        raise CheckpointError(f"{path}: {str(error).partition(chr(10))[0][:200]}") from None

    def entry(key: str, r: Rectangle, dtype: str) -> torch.Tensor:
        saved = tensors.get(entry_name(key, r))
        found = isinstance(saved, torch.Tensor) and (saved.dtype, tuple(saved.shape))
        if found != (TORCH_DTYPES[dtype], tuple(r.shape)):
            raise CheckpointError(f"{path}: {entry_name(key, r)} is not {dtype} {list(r.shape)} there")
        return saved

    yield entry

"""Reads and writes `.metadata` of torch.distributed.checkpoint, a pickle of its tables.

    torch.Size((3, 4))    GLOBAL torch.Size, (3, 4), TUPLE1, REDUCE    ->    Record("torch.Size", ((3, 4),))

Unpickling calls what the file names. Here nothing is called (config/pickles.py), and names that are not in
ALLOWED are refused. Our own tables are torch's objects, pickled.
"""

import pickle
from typing import Any

import torch

from nanomegatron.checkpoint.files import DTYPES, TORCH_DTYPES, stored
from nanomegatron.checkpoint.manifest import CheckpointError, SavedTensor, entry_name, rank_file
from nanomegatron.config.pickles import build_pickle

METADATA_LIMIT = 64 * 2**20  # bytes; reading takes about a second for 4 MiB
DCP_CLASSES = "torch.distributed.checkpoint.metadata."
STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
DCP_NAMES = """
Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex
StorageMeta _MEM_FORMAT_ENCODING
""".split()
PLANS = "SavePlan WriteItem WriteItemType TensorWriteData".split()  # megatron-core adds them
ALLOWED = {f"{DCP_CLASSES}{name}" for name in DCP_NAMES} | {STORAGE_INFO, *map(str, DTYPES)}
ALLOWED |= {f"torch.distributed.checkpoint.planner.{name}" for name in PLANS}
ALLOWED |= {"torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib._local.PosixPath"}


def read_pickle(data: bytes) -> Any:
    """Return what the pickle builds. Raises CheckpointError for one with other names or operations."""
    try:
        return build_pickle(data, _allowed)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"no metadata of torch.distributed.checkpoint ({error!r})") from None


def _allowed(name: str) -> str:
    if name not in ALLOWED:
        raise CheckpointError(f"it names {name[:80]}, which is refused: a pickle may run what it names")
    return name


def dcp_pickle(
    tensors: dict[str, SavedTensor],
    entries: dict[str, dict],
    by: str,
    objects: dict[str, tuple[str, int, int]],
) -> bytes:
    """Return `.metadata` of tensors. entries: {file: {entry: (begin, length, elements)}}, of their chunks.

    by: who saves. objects: pickles that are there too, as (file, begin, length).
    """
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    table, places = {}, {}
    for key, saved in tensors.items():
        chunks = []
        for rank, r in stored(saved, (0,) * len(saved.shape), saved.shape):
            name = rank_file("torch_dist", rank)
            begin, length, _ = entries[name][entry_name(key, r)]
            places[dcp.MetadataIndex(key, r.offset, len(chunks))] = _StorageInfo(name, begin, length)
            chunks.append(dcp.ChunkStorageMetadata(torch.Size(r.offset), torch.Size(r.shape)))
        properties = dcp.TensorProperties(TORCH_DTYPES[saved.dtype])
        table[key] = dcp.TensorStorageMetadata(properties, torch.Size(saved.shape), chunks)
    for key, (name, begin, length) in objects.items():
        places[dcp.MetadataIndex(key)] = _StorageInfo(name, begin, length)
        table[key] = dcp.BytesStorageMetadata()
    planned = {key: (key,) for key in tensors}
    return pickle.dumps(dcp.Metadata(table, planned, places, dcp.StorageMeta(save_id=by)))

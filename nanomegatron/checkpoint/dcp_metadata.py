"""Writes `.metadata` of torch.distributed.checkpoint: its tables, which are torch's objects, pickled."""

import pickle

import torch

from nanomegatron.checkpoint.files import TORCH_DTYPES, stored
from nanomegatron.checkpoint.manifest import SavedTensor, entry_name, rank_file


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

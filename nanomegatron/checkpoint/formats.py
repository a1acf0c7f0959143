"""The formats of a checkpoint folder, --ckpt-format: who writes and reads the files beside the manifest.

    sharded       rank_00000.safetensors       any layout loads it, nothing is a pickle       files.py
    torch_dist    __0_0.distcp, .metadata      any layout, and torch.distributed.checkpoint   torch_dist.py
    torch         rank_00000.pt                the layout that saved it, and torch.load       torch_file.py

The manifest of a folder has its format; without one it is `sharded`. All else is common to them.
"""

import os
from collections.abc import Callable
from pathlib import Path

from nanomegatron.checkpoint.files import Reader, shard_reader, write_shard
from nanomegatron.checkpoint.folder import MANIFEST, read_manifest
from nanomegatron.checkpoint.manifest import METADATA, CheckpointError, Manifest
from nanomegatron.checkpoint.megatron import megatron_reader
from nanomegatron.checkpoint.torch_dist import distcp_reader, read_foreign, write_distcp
from nanomegatron.checkpoint.torch_file import torch_reader, write_torch
from nanomegatron.mesh import Mesh


def writer(format: str) -> Callable:
    """Return what writes a rank's file and its part of the manifest, from (folder, rank, pieces)."""
    return {"sharded": write_shard, "torch_dist": write_distcp, "torch": write_torch}[format]


def reader(manifest: Manifest) -> Reader:
    """Return what opens the file of a rank."""
    readers = {"sharded": shard_reader, "torch_dist": distcp_reader, "torch": torch_reader}
    readers["megatron"] = megatron_reader
    return readers[manifest.format.get("name", "sharded")]


def layout_words(mesh: Mesh) -> str:
    """The sizes of the axes: "tp 2, dp 4"."""
    axes = [mesh.tp, mesh.cp, mesh.pp, mesh.dp, mesh.ep, *([mesh.etp] if mesh.ep.size > 1 else [])]
    return ", ".join(f"{axis.name} {axis.size}" for axis in axes if axis.size > 1) or "one process"


def check_layout(folder: Path, manifest: Manifest, mesh: Mesh) -> None:
    """Raise CheckpointError if only another layout can load this checkpoint."""
    saved, here = manifest.format.get("layout"), layout_words(mesh)
    if manifest.format.get("name") == "torch" and saved != here:
        fix = "save it there with --ckpt-format sharded or torch_dist, which any layout loads"
        raise CheckpointError(f"{folder}: --ckpt-format torch, by {saved}, and this run is {here}; {fix}")


def open_checkpoint(folder: Path) -> Manifest:
    """Read a folder's manifest, or make one of another program's metadata. Raises CheckpointError."""
    foreign = os.path.lexists(folder / METADATA) and not os.path.lexists(folder / MANIFEST)
    return read_foreign(folder) if foreign else read_manifest(folder)

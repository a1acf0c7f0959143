"""The formats of a checkpoint folder, --ckpt-format: who writes and reads the files beside the manifest.

    sharded       rank_00000.safetensors       any layout loads it, nothing is a pickle       files.py
    torch_dist    __0_0.distcp, .metadata      any layout, and torch.distributed.checkpoint   torch_dist.py
    torch         rank_00000.pt                the layout that saved it, and torch.load       torch_file.py

The manifest of a folder has its format; without one it is `sharded`. All else is common to them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nanomegatron.checkpoint.files import MANIFEST, Reader, read_manifest, shard_reader, write_shard
from nanomegatron.checkpoint.manifest import CheckpointError, Manifest, SavedFile, shard_name
from nanomegatron.checkpoint.torch_dist import (
    METADATA,
    distcp_name,
    distcp_reader,
    read_foreign,
    write_distcp,
)
from nanomegatron.checkpoint.torch_file import torch_name, torch_reader, write_torch
from nanomegatron.mesh import Mesh


class Format(NamedTuple):
    """How a format names the file of a rank, writes it with its part of the manifest, and reads it."""

    name: Callable[[int], str]
    write: Callable
    reader: Reader


def ckpt_formats() -> dict[str, Format]:
    """The formats by name."""
    return {
        "sharded": Format(shard_name, write_shard, shard_reader),
        "torch_dist": Format(distcp_name, write_distcp, distcp_reader),
        "torch": Format(torch_name, write_torch, torch_reader),
    }


def format_entry(name: str, mesh: Mesh) -> dict[str, Any]:
    """Return the manifest's entry of a save in this format; {} for `sharded`."""
    extra = {"layout": layout_words(mesh)} if name == "torch" else {}
    return {} if name == "sharded" else {"name": name} | extra


def layout_words(mesh: Mesh) -> str:
    """The sizes of the axes: "tp 2, dp 4"."""
    axes = [mesh.tp, mesh.cp, mesh.pp, mesh.dp, mesh.ep, *([mesh.etp] if mesh.ep.size > 1 else [])]
    return ", ".join(f"{axis.name} {axis.size}" for axis in axes if axis.size > 1) or "one process"


def format_of(manifest: Manifest) -> Format:
    """The format of a folder. Raises CheckpointError if it is unknown."""
    name, known = manifest.format.get("name", "sharded"), ckpt_formats()
    if name not in known:
        raise CheckpointError(f"format {str(name)[:80]!r} is not one of {', '.join(known)}")
    return known[name]


def open_checkpoint(folder: Path) -> Manifest:
    """Read a folder's manifest, or make one of another program's metadata. Raises CheckpointError."""
    foreign = os.path.lexists(folder / METADATA) and not os.path.lexists(folder / MANIFEST)
    return read_foreign(folder) if foreign else read_manifest(folder)


def is_foreign(manifest: Manifest) -> bool:
    """Whether another program saved it: there are no hashes, and no state of a run."""
    return "entries" in manifest.format and "metadata" not in manifest.format


def files_of(manifest: Manifest) -> dict[str, SavedFile]:
    """Return what every file beside the manifest must be, by name; {} for another program's."""
    if is_foreign(manifest):
        return {}
    found = {format_of(manifest).name(rank): file for rank, file in manifest.files.items()}
    more = {METADATA: SavedFile(*manifest.format["metadata"])} if "metadata" in manifest.format else {}
    return found | more


def check_layout(manifest: Manifest, mesh: Mesh) -> None:
    """Raise CheckpointError if only another layout can load this checkpoint."""
    saved, here = manifest.format.get("layout"), layout_words(mesh)
    if manifest.format.get("name") == "torch" and saved != here:
        fix = "save it there with --ckpt-format sharded or torch_dist, which any layout loads"
        raise CheckpointError(f"--ckpt-format torch: saved by {saved}, and this run is {here}; {fix}")

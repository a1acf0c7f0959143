"""Loads a checkpoint of Megatron-LM on all ranks, each of which reads the slices that it holds."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from nanomegatron.checkpoint.checkpoint import agreed
from nanomegatron.checkpoint.files import Piece, fill
from nanomegatron.checkpoint.manifest import CheckpointError, Manifest
from nanomegatron.checkpoint.megatron import megatron_reader, open_megatron
from nanomegatron.config.model import TransformerConfig
from nanomegatron.mesh import Mesh


def open_on_all_ranks(folder: Path, model: TransformerConfig, vocab_size: int, mesh: Mesh) -> Manifest:
    """`open_megatron` on every rank. Raises CheckpointError on all of them."""
    return agreed(mesh, "", open_megatron, folder, model, vocab_size)


def load_megatron(folder: Path, manifest: Manifest, pieces: Iterable[Piece], mesh: Mesh) -> list[str]:
    """Fill the pieces, cast to their types; returns notes. Raises CheckpointError on all ranks.

    Main weights are filled from the weights if they are not saved, and fp32 weights from main weights if so.
    Optional pieces that the checkpoint lacks stay as they are.
    """
    pieces = [_best(piece, manifest) for piece in pieces if piece.data.numel()]
    there = [piece for piece in pieces if piece.key in manifest.tensors]
    if missing := [p.key for p in pieces if not (p.optional or p.key in manifest.tensors)]:
        raise CheckpointError(f"{folder}: {missing[0]} is missing, and {len(missing) - 1} more")
    agreed(mesh, f"{folder} cannot be read:", fill, folder, manifest, there, megatron_reader)
    return [f"{folder} has no hash that says whether it is damaged", *manifest.format["notes"]]


def _best(piece: Piece, manifest: Manifest) -> Piece:
    kind, _, name = piece.key.partition("/")
    main = f"main/{name}" in manifest.tensors
    if kind == "main" and not main:
        return replace(piece, key=f"model/{name}")
    whole = kind == "model" and piece.data.dtype == torch.float32
    return replace(piece, key=f"main/{name}") if whole and main else piece

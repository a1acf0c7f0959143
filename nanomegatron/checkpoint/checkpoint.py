"""Checkpoints: saved by global name and slice, published atomically, verified before use.

Each rank writes the slices it owns, so any layout loads what any other has saved (`checkpoint/files.py` has
the folder's format). The stages of a save, and the state that a kill in each of them leaves:

    make      iter_0000120.tmp/                       a leftover: ignored, removed by the next save
    write     one shard per rank, synced to disk      the same
    merge     rank 0 checks that the slices tile each tensor, and syncs the manifest to disk: the same
    rename    iter_0000120.tmp -> iter_0000120        from here on this is the newest checkpoint
    point     latest_checkpointed_iteration.txt       for people only; loading uses the folders' names

A published folder is never written to. Saving an iteration again replaces it: the old folder is renamed to
iter_0000120.old, which is used after a kill between the two renames, and removed afterwards.

The ranks exchange errors after each stage: an error on one (a full disk) is raised on all, and no rank waits
for one that has failed. All ranks must see the same `root`.
"""

import contextlib
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanomegatron.checkpoint import files, formats
from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.manifest import (
    DTYPES,
    UPDATE,
    CheckpointError,
    Manifest,
    Rectangle,
    describe_piece,
    merge,
    rectangles,
    shard_name,
)
from nanomegatron.checkpoint.strictness import fit
from nanomegatron.checkpoint.torch_dist import write_metadata
from nanomegatron.comm import all_gather_text, all_reduce
from nanomegatron.dp import Slice, reduction_axis
from nanomegatron.mesh import Axis, Mesh

EXPERTS = ".mlp.experts."
LATEST = "latest_checkpointed_iteration.txt"
PUBLISHED = re.compile(r"iter_([0-9]{7}|[1-9][0-9]{7,17})(\.old)?")
LEFTOVER = re.compile(r"iter_[0-9]{7,18}\.(tmp|old)")


class SaveError(Exception):
    """A checkpoint was not written; earlier ones are unchanged."""


@dataclass(frozen=True)
class Loaded:
    """The contents of a checkpoint besides tensors; `notes` are for the user."""

    iteration: int
    state: dict[str, Any]
    config_toml: str
    notes: list[str]


def training_pieces(
    params: Iterable[torch.nn.Parameter], states: dict[str, list[tuple[Slice, torch.Tensor]]], mesh: Mesh
) -> list[Piece]:
    """Return the pieces of the parameters, and of the optimizer's states: flat ranges of parts, by kind.

    Of the ranks that hold a parameter (dp x cp, edp) the first is the owner. A range of a part is cut into
    rectangles.
    """
    pieces = []
    for param in params:
        first = not reduction_axis(param, mesh).rank
        for part in param.spec.parts:
            data, owner = part.view(param.detach()), part.owner and first
            pieces.append(Piece(f"model/{part.name}", part.shape, part.offset, data, owner))
    for kind, ranges in states.items():
        for piece, flat in ranges:
            name, part = f"{kind}/{piece.part.name}", piece.part
            end = piece.at + len(flat)
            box = Rectangle(part.offset, tuple(part.view(piece.param).shape))
            for corner, shape in rectangles(box.shape, piece.at, end):
                offset = tuple(a + b for a, b in zip(part.offset, corner, strict=True))
                data, flat = flat[: math.prod(shape)].view(shape), flat[math.prod(shape) :]
                pieces.append(Piece(name, part.shape, offset, data, piece.saver, range=(box, piece.at, end)))
    return pieces


def state_pieces(states: Mapping[str, torch.Tensor], mesh: Mesh) -> list[Piece]:
    """Return the pieces of small tensors, by key, that are equal on all ranks of a pipeline stage.

    A load leaves a tensor unchanged if the checkpoint lacks it or has another shape.
    """
    first = mesh.tp.rank == mesh.dp_cp.rank == 0
    return [Piece(key, tuple(x.shape), (0,) * x.dim(), x, first, True) for key, x in states.items()]


def module_states(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the fp32 tensors of all modules' `states()`, such as routers' biases, by global name."""
    states = [module.states() for module in model.modules() if hasattr(module, "states")]
    return {f"model/{name}": x for found in states for name, x in found.items()}


# Saving.


def save(
    root: str | Path,
    iteration: int,
    pieces: Iterable[Piece],
    state: dict[str, Any],
    config: str,
    mesh: Mesh,
    format: str = "sharded",
) -> None:
    """Write and publish `root/iter_<iteration>`; every rank calls this with its pieces and the same `root`.

    Rank 0's `state` (JSON) and `config` (TOML) are saved; `format` is one of formats.py. Raises SaveError on
    all ranks if one fails.
    """
    root, first = Path(root), mesh.world.rank == 0
    owned = [piece for piece in pieces if piece.owner and piece.data.numel()]
    need = torch.tensor(sum(piece.data.nbytes for piece in owned), device=mesh.device)
    need = int(all_reduce(need, mesh.world))
    temporary = root / f"iter_{iteration:07d}.tmp"

    def stage(work: Callable | None, *args: Any) -> None:
        _, errors = _on_all_ranks(mesh, work, *args)
        if errors:
            if first:
                shutil.rmtree(temporary, ignore_errors=True)
            what = f"the checkpoint of iteration {iteration} was not saved in {root}"
            space = f"it needs {need} bytes, {_free(root)} are free; earlier ones are untouched"
            raise SaveError(f"{what}: {'; '.join(errors)} ({space})")

    stage(_make if first else None, temporary, need)
    stage(formats.ckpt_formats()[format].write, temporary, mesh.world.rank, owned)
    manifest = Manifest(iteration, state, config, {}, {}, formats.format_entry(format, mesh))
    stage(_publish if first else None, temporary, mesh.world.size, manifest)


def _make(temporary: Path, need: int) -> None:
    """Make the empty temporary folder, and remove the leftovers of earlier saves."""
    root = temporary.parent
    root.mkdir(parents=True, exist_ok=True)
    in_use = set(_folders(root).values())
    for path in [path for path in root.iterdir() if LEFTOVER.fullmatch(path.name)]:
        if path not in in_use:
            _remove(path)
    usage = shutil.disk_usage(root)
    if usage.total and usage.free < need:  # a file system without a limit may say 0 of both
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    temporary.mkdir()


def _publish(temporary: Path, ranks: int, manifest: Manifest) -> None:
    """On rank 0: add all ranks' parts to the manifest, then give the folder its final name."""
    indices = [(temporary / shard_name(rank)).with_suffix(".json") for rank in range(ranks)]
    tensors, saved = merge(indices)
    more = write_metadata(temporary, tensors, ranks) if manifest.format.get("name") == "torch_dist" else {}
    entry = manifest.format | more
    files.write_manifest(temporary, replace(manifest, tensors=tensors, files=saved, format=entry))
    for index in indices:
        index.unlink()
    files.sync_folder(temporary)
    root = temporary.parent
    final, aside = temporary.with_suffix(""), temporary.with_suffix(".old")
    if final.exists() or final.is_symlink():
        _remove(aside)
        os.rename(final, aside)
    os.rename(temporary, final)
    files.sync_folder(root)
    _remove(aside)
    hint = root / f"{LATEST}.tmp"
    files.write_text(hint, f"{manifest.iteration}\n")
    os.replace(hint, root / LATEST)
    files.sync_folder(root)


def _remove(path: Path) -> None:
    """Remove a folder, or a symbolic link in its place but not what it points to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _free(folder: Path) -> int:
    """Bytes free on the folder's file system; 0 if that is not known."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return 0


# Loading.


def latest(root: str | Path) -> int | None:
    """Return the newest iteration published in root, by the names of the folders; None if there is none."""
    return max(_folders(Path(root)), default=None)


def load(
    root: str | Path,
    pieces: Iterable[Piece],
    mesh: Mesh,
    step: int | None = None,
    cast: bool = False,
    strictness: str = "assume_ok_unexpected",
) -> Loaded | None:
    """Fill the pieces from the newest intact checkpoint in root; None if there is no checkpoint.

    Every rank calls this with its own pieces, for any layout of the saving run; of `mesh` only `world` and
    `device` are used. All files are hashed first, each by one rank. A damaged checkpoint is skipped with a
    note, unless `step` asks for it; one of a newer format is an error. `cast` allows a dtype other than the
    saved one. A piece that is `optional` is left unchanged, with a note, if no tensor of its shape was saved;
    for others `strictness` decides (strictness.py).

    Raises CheckpointError, on all ranks, if no checkpoint is usable, or if tensors are missing or differ in
    shape or dtype; it lists all of them, before any piece is filled.
    """
    pieces = [piece for piece in pieces if piece.data.numel()]
    folder, manifest, notes = _newest_intact(Path(root), mesh, step)
    if manifest is None:
        return None
    if pieces:
        formats.check_layout(manifest, mesh)
    if formats.is_foreign(manifest):
        notes = [*notes, f"{folder} has no manifest of ours: no hash says whether it is damaged"]
    shapes = {key: tuple(saved.shape) for key, saved in manifest.tensors.items()}
    new = {piece.key for piece in pieces if piece.optional and shapes.get(piece.key) != piece.shape}
    if new:
        notes = [*notes, f"{folder} has no {min(new)} of this shape: {len(new)} such start from zero"]
        pieces = [piece for piece in pieces if piece.key not in new]
    reader = formats.format_of(manifest).reader
    pieces, main, more = fit(manifest, pieces, mesh, strictness)
    _, errors = _on_all_ranks(mesh, _check_wanted, manifest, pieces, cast)
    if errors:
        raise CheckpointError("\n  ".join([f"{folder} does not fit this model:", *errors]))
    _, errors = _on_all_ranks(mesh, files.fill, folder, manifest, pieces + main, reader)
    if errors:
        raise CheckpointError("\n  ".join([f"{folder} cannot be read:", *errors]))
    return Loaded(manifest.iteration, manifest.state, manifest.config, notes + more)


def read_state(root: str | Path, mesh: Mesh, step: int | None = None) -> tuple[dict[str, Any], str] | None:
    """Return state and settings of the checkpoint that `load` tries first, read by rank 0; None if it cannot.

    Only the manifest is checked: `load` may find other files damaged and use an older checkpoint.
    """
    found, _ = _on_all_ranks(mesh, _first_manifest if mesh.world.rank == 0 else None, Path(root), step)
    text = json.dumps([found.state, found.config]) if found else ""
    text = all_gather_text(text, mesh.world, mesh.device)[0]
    return tuple(json.loads(text)) if text else None


def _first_manifest(root: Path, step: int | None) -> Manifest | None:
    for iteration, folder in sorted(_folders(root).items(), reverse=True):
        if step in (None, iteration):
            with contextlib.suppress(CheckpointError):
                return formats.open_checkpoint(folder)
    return None


def _newest_intact(root: Path, mesh: Mesh, step: int | None) -> tuple[Path, Manifest | None, list[str]]:
    """Return the checkpoint to load, verified, and notes on the damaged ones that were skipped."""
    # Rank 0's view of the folders is used: a rank with a stale view would load another checkpoint.
    folders, errors = _on_all_ranks(mesh, _folders if mesh.world.rank == 0 else None, root)
    if errors:
        raise CheckpointError(f"{root}: {errors[0]}")
    names = json.dumps({i: path.name for i, path in (folders or {}).items()})
    names = all_gather_text(names, mesh.world, mesh.device)[0]
    found = {int(i): name for i, name in json.loads(names).items()}
    if step is not None and step not in found:
        raise CheckpointError(f"{root} has no iteration {step}; it has {sorted(found) or 'none'}")
    bad: list[str] = []
    for iteration in sorted(found, reverse=True) if step is None else [step]:
        folder = root / found[iteration]
        manifest, errors = _on_all_ranks(mesh, _verified, folder, iteration, mesh.world)
        if not errors:
            lost = max(found) - iteration
            fell_back = f"loading iteration {iteration} instead: {lost} iterations are lost"
            return folder, manifest, [f"damaged checkpoint: {error}; {fell_back}" for error in bad]
        if any(error.endswith(UPDATE) for error in errors):
            raise CheckpointError("\n  ".join([f"{folder} cannot be read:", *errors]))
        bad += errors
    if bad:
        raise CheckpointError("\n  ".join([f"no usable checkpoint in {root}; tried", *bad]))
    return root, None, []


def _folders(root: Path) -> dict[int, Path]:
    """Return {iteration: folder} of all published folders, with an .old one only if nothing replaced it."""
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else []:  # "iter_0000120" before "iter_0000120.old"
        match = PUBLISHED.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found.setdefault(int(match[1]), path)
    return found


def _verified(folder: Path, iteration: int, world: Axis) -> Manifest:
    """Read the manifest and verify the hashes of this rank's share of the files. Raises CheckpointError."""
    manifest = formats.open_checkpoint(folder)
    if manifest.iteration != iteration:
        raise CheckpointError(f"{folder} was saved as iteration {manifest.iteration}")
    for name, expected in sorted(formats.files_of(manifest).items())[world.rank :: world.size]:
        files.verify_file(folder / name, expected)
    return manifest


def _check_wanted(manifest: Manifest, pieces: list[Piece], cast: bool) -> None:
    """Raise CheckpointError with a line for every piece that the checkpoint cannot fill."""
    errors = []
    for piece in pieces:
        saved, dtype = manifest.tensors.get(piece.key), DTYPES[piece.data.dtype]
        if saved is None:
            errors.append(f"{piece.key}: missing, wanted {list(piece.shape)}")
        elif saved.shape != piece.shape:
            errors.append(f"{piece.key}: saved {list(saved.shape)}, wanted {list(piece.shape)}")
        elif saved.dtype != dtype and not (cast or piece.key.startswith("exp_avg")):  # moments are rounded
            hint = "keep the type it was trained in, or --no-load-optim"
            errors.append(f"{piece.key}: saved as {saved.dtype}, wanted {dtype}; {hint}")
    has_experts = any(EXPERTS in key for key in manifest.tensors)
    if errors and has_experts != any(EXPERTS in piece.key for piece in pieces):
        hint = "it has no experts: --moe-use-upcycling makes them of its MLPs, in a new --run-name"
        if has_experts:
            hint = "it has experts, this model has none to read: see --num-experts, --moe-use-upcycling"
        errors.insert(0, hint)
    if errors:
        raise CheckpointError("\n".join(errors))


# All ranks together.


def _on_all_ranks(mesh: Mesh, work: Callable | None, *args: Any) -> tuple[Any, list[str]]:
    """Call `work(*args)` on this rank (None: nothing) -> its result, and the distinct errors of all ranks.

    Waits for all ranks. The errors are the same on every rank, so all continue or none does.
    """
    result, error = None, ""
    try:
        result = work(*args) if work else None
    except Exception as caught:  # any error: the other ranks wait for it
        error = describe_piece(caught)
    lines = [line for text in all_gather_text(error, mesh.world, mesh.device) for line in text.splitlines()]
    return result, list(dict.fromkeys(lines))

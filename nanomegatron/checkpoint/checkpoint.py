"""Checkpoints: saved by global name and slice, published atomically, verified before use.

Each rank writes the slices it owns, so any layout loads what any other has saved (`checkpoint/files.py` has
the folder's format). The stages of a save, and the state that a kill in each of them leaves:

    make      iter_0000120.tmp/                       a leftover: ignored, removed by the next run
    write     one shard per rank, synced to disk      the same
    publish   rank 0 checks that the slices tile each tensor, syncs the manifest to disk, renames the folder
    prune     rank 0 removes older checkpoints that need not stay (`checkpoint/folder.py` has both)

The ranks exchange errors after each stage: an error on one (a full disk) is raised on all, and no rank waits
for one that has failed. All ranks must see the same `root`. `checkpoint/async_save.py` does the same stages
beside the training, with the same bytes as a result.
"""

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanomegatron.checkpoint import folder, formats
from nanomegatron.checkpoint.blocks import verify_files
from nanomegatron.checkpoint.files import DTYPES, Piece
from nanomegatron.checkpoint.folder import KEEP_ALL, Retention, folders, latest
from nanomegatron.checkpoint.manifest import (
    OTHER_VERSION,
    CheckpointError,
    Manifest,
    Rectangle,
    describe_error,
    rectangles,
)
from nanomegatron.checkpoint.strictness import fit, some
from nanomegatron.checkpoint.torch_dist import write_metadata
from nanomegatron.comm import all_gather_text, all_reduce
from nanomegatron.dp import Slice, reduction_axis
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.param import Part

NO_STATES = (
    "saved without optimizer states (--no-save-optim); resume with --no-load-optim, or begin at step 0 "
    "with --finetune in a new run"
)


class SaveError(Exception):
    """A checkpoint was not written; earlier ones are unchanged."""


def offset_of(part: Part) -> tuple[int, ...]:
    """Where a part's slice begins in the global tensor."""
    return tuple(part.start if d == part.dim else 0 for d in range(len(part.shape)))


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
            data, owner = part.local_view(param.detach()), part.owner and first
            pieces.append(Piece(f"model/{part.name}", part.shape, offset_of(part), data, owner))
    for kind, ranges in states.items():
        for piece, flat in ranges:
            name, part = f"{kind}/{piece.part.name}", piece.part
            end = piece.at + len(flat)
            box = Rectangle(offset_of(part), tuple(part.local_view(piece.param).shape))
            for corner, shape in rectangles(box.shape, piece.at, end):
                offset = tuple(a + b for a, b in zip(offset_of(part), corner, strict=True))
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
    keep: Retention = KEEP_ALL,
    format: str = "sharded",
) -> list[str] | None:
    """Write and publish `root/iter_<iteration>`; every rank calls this with its pieces and the same `root`.

    Rank 0's `state` (JSON) and `config` (TOML) are saved; formats.py lists the formats. Then removes what
    `keep` says -> on rank 0 notes for the user on what could not be removed. Raises SaveError on all ranks.
    """
    first = mesh.world.rank == 0
    owned = owned_pieces(pieces)
    attempt = Attempt(mesh, Path(root), iteration, bytes_needed(owned, mesh))
    temporary = attempt.temporary
    attempt.stage(folder.make_folder if first else None, temporary, attempt.need)
    attempt.stage(formats.WRITERS[format], temporary, mesh.world.rank, owned)
    entry = {} if format == "sharded" else {"name": format}
    if format == "torch":
        entry["layout"] = formats.layout_words(mesh)
    if format == "torch_dist":
        entry |= attempt.stage(write_metadata if first else None, temporary, mesh.world.size) or {}
    contents = iteration, state, config, keep, entry
    return attempt.stage(folder.publish_folder if first else None, temporary, mesh.world.size, *contents)


@dataclass(frozen=True)
class Attempt:
    """To save an iteration, `need` bytes, in stages; an error on one rank ends it on all."""

    mesh: Mesh
    root: Path
    iteration: int
    need: int

    @property
    def temporary(self) -> Path:
        """The folder until it is published."""
        return self.root / f"iter_{self.iteration:07d}.tmp"

    def stage(self, work: Callable | None, *args: Any) -> Any:
        """Return the result of `on_all_ranks`. Raises SaveError on all ranks."""
        result, errors = on_all_ranks(self.mesh, work, *args)
        if errors:
            self.fail(errors)
        return result

    def fail(self, errors: list[str]) -> None:
        """Remove the folder. Raises SaveError: errors, bytes needed and free, the fix, the last good."""
        if self.mesh.world.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)
        raise SaveError(
            f"the checkpoint of iteration {self.iteration} was not saved in {self.root}: {'; '.join(errors)} "
            f"(it needs {self.need} bytes, {folder.free_bytes(self.root)} are free); free space there, or "
            f"give another --save; {folder.newest_in_words(self.root)}"
        )


def owned_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces that this rank writes."""
    return [piece for piece in pieces if piece.owner and piece.data.numel()]


def bytes_needed(owned: Iterable[Piece], mesh: Mesh) -> int:
    """Return the bytes of the pieces of all ranks. All-reduces a number over world."""
    need = torch.tensor(sum(piece.data.nbytes for piece in owned), device=mesh.device)
    return int(all_reduce(need, mesh.world))


# Loading.


def latest_for_all(root: str | Path, mesh: Mesh) -> int | None:
    """Return `latest` as rank 0 sees it. Communicates over world. Raises CheckpointError."""
    return from_rank_0(mesh, latest, Path(root))


def load(
    root: str | Path,
    pieces: Iterable[Piece],
    mesh: Mesh,
    step: int | None = None,
    cast: bool = False,
    integrity: bool = False,
    strictness: str = "assume_ok_unexpected",
) -> Manifest | None:
    """Fill the pieces from the newest intact checkpoint in root -> its manifest, with notes; None without one

    Every rank calls this with its own pieces, for any layout of the saving run; of `mesh` only `world` and
    `device` are used. All files are checked first, each by one rank: sizes and CRC-32s, with `integrity` also
    SHA-256. A damaged checkpoint is skipped with a note, unless `step` asks for it; one of a newer format is
    an error. `cast` allows a dtype other than the saved one. A piece that is `optional` is left unchanged,
    with a note, if no tensor of its shape was saved; about others `strictness` decides (strictness.py).

    Raises CheckpointError, on all ranks, if no checkpoint is usable, or if tensors are missing or differ in
    shape or dtype; it lists ten of them, before any piece is filled.
    """
    pieces = [piece for piece in pieces if piece.data.numel()]
    found, manifest, notes = _newest_intact(Path(root), mesh, step, integrity)
    if manifest is None:
        return None
    if pieces:
        formats.check_layout(found, manifest, mesh)
    notes = [*notes, *manifest.notes]
    shapes = {key: tuple(saved.shape) for key, saved in manifest.tensors.items()}
    new = {piece.key for piece in pieces if piece.optional and shapes.get(piece.key) != piece.shape}
    if new:
        notes = [*notes, f"{found} has no {min(new)} of this shape: {len(new)} such start from zero"]
        pieces = [piece for piece in pieces if piece.key not in new]
    pieces, main, more = fit(manifest, pieces, mesh, strictness)
    agreed(mesh, f"{found} does not fit this model:", _check_wanted, manifest, pieces, cast)
    agreed(mesh, f"{found} cannot be read:", formats.fill, found, manifest, pieces + main)
    return replace(manifest, notes=notes + more)


def read_state(root: str | Path, mesh: Mesh, step: int | None = None) -> list | None:
    """Return [state, settings] of the checkpoint that `load` tries first, read by rank 0; None without one.

    Only the manifest is checked: `load` may find other files damaged and use an older checkpoint.
    """
    return from_rank_0(mesh, _first_state, Path(root), step)


def _first_state(root: Path, step: int | None) -> tuple[dict[str, Any], str] | None:
    for _, name in _to_try(root, step):
        with contextlib.suppress(CheckpointError):
            manifest = formats.open_checkpoint(root / name)
            return manifest.state, manifest.config
    return None


def _newest_intact(
    root: Path, mesh: Mesh, step: int | None, integrity: bool
) -> tuple[Path, Manifest | None, list[str]]:
    """Return the checkpoint to load, verified, and notes on the damaged ones that were skipped."""
    # Rank 0's view of the folders is used: a rank with a stale view would load another checkpoint.
    found = from_rank_0(mesh, _to_try, root, step)
    bad: list[str] = []
    for iteration, name in found:
        path = root / name
        manifest, errors = on_all_ranks(mesh, _verified, path, iteration, mesh.world, integrity)
        if not errors:
            note = (
                f"damaged checkpoint: {'; '.join(some(bad, 3))}; loading iteration {iteration} instead: "
                f"{found[0][0] - iteration} iterations are lost"
            )
            return path, manifest, [note] if bad else []
        if path.is_symlink() or any(error.endswith(OTHER_VERSION) for error in errors):
            raise CheckpointError("\n  ".join([f"{path} cannot be read, and nothing in its place:", *errors]))
        bad += errors
    if bad:
        raise CheckpointError(
            f"no usable checkpoint in {root}: give another --load or --run-name, or remove the folder; tried"
            + "".join(f"\n  {line}" for line in some(bad))
        )
    return root, None, []


def _to_try(root: Path, step: int | None) -> list[tuple[int, str]]:
    """The iterations and folders that may be loaded, the newest first. Raises CheckpointError."""
    found = folders(root)
    if step is not None and step not in found:
        raise CheckpointError(f"{root} has no iteration {step}; it has {sorted(found) or 'none'}")
    if step is None:
        latest(root)  # raises if the newest is not there
    return [(i, path.name) for i, path in found.items() if step in (None, i)]


def _verified(path: Path, iteration: int, world: Axis, integrity: bool) -> Manifest:
    """Read the manifest and verify this rank's share of the files. Raises CheckpointError."""
    manifest = formats.open_checkpoint(path)
    if manifest.iteration != iteration:
        raise CheckpointError(f"{path} was saved as iteration {manifest.iteration}")
    share = sorted(manifest.named_files.items())[world.rank :: world.size]
    found = {path / name: file for name, file in share}
    verify_files(found, torch.get_num_threads(), integrity)
    return manifest


def _check_wanted(manifest: Manifest, pieces: list[Piece], cast: bool) -> None:
    """Raise CheckpointError with a line for every piece that the checkpoint cannot fill."""
    errors = []
    kinds = {key.partition("/")[0] for key in manifest.tensors}
    if "exp_avg" not in kinds and any(piece.key.startswith("exp_avg/") for piece in pieces):
        raise CheckpointError(NO_STATES)
    for piece in pieces:
        saved, dtype = manifest.tensors.get(piece.key), DTYPES[piece.data.dtype]
        if saved is None:
            errors.append(f"{piece.key}: missing, wanted {list(piece.shape)}")
        elif saved.shape != piece.shape:
            errors.append(f"{piece.key}: saved {list(saved.shape)}, wanted {list(piece.shape)}")
        elif saved.dtype != dtype and not (cast or piece.key.startswith("exp_avg")):  # moments are rounded
            hint = "keep the type it was trained in, or --no-load-optim"
            errors.append(f"{piece.key}: saved as {saved.dtype}, wanted {dtype}; {hint}")
    if errors:
        raise CheckpointError("\n".join(errors))


# Of Megatron-LM.


def load_megatron(folder: Path, manifest: Manifest, pieces: Iterable[Piece], mesh: Mesh) -> list[str]:
    """Fill the pieces from a checkpoint of Megatron-LM, cast to their types; returns notes.

    Main weights are filled from the weights if they are not saved, and fp32 weights from main weights if so.
    Optional pieces that the checkpoint lacks stay as they are. Raises CheckpointError on all ranks.
    """
    pieces = [_best(piece, manifest) for piece in pieces if piece.data.numel()]
    there = [piece for piece in pieces if piece.key in manifest.tensors]
    if missing := [p.key for p in pieces if not (p.optional or p.key in manifest.tensors)]:
        raise CheckpointError(f"{folder}: {missing[0]} is missing, and {len(missing) - 1} more")
    agreed(mesh, f"{folder} cannot be read:", formats.fill, folder, manifest, there)
    return manifest.notes


def _best(piece: Piece, manifest: Manifest) -> Piece:
    kind, _, name = piece.key.partition("/")
    main = f"main/{name}" in manifest.tensors
    if kind == "main" and not main:
        return replace(piece, key=f"model/{name}")
    whole = kind == "model" and piece.data.dtype == torch.float32
    return replace(piece, key=f"main/{name}") if whole and main else piece


# All ranks together.


def on_all_ranks(mesh: Mesh, work: Callable | None, *args: Any) -> tuple[Any, list[str]]:
    """Call `work(*args)` on this rank (None: nothing) -> its result, and the distinct errors of all ranks.

    Waits for all ranks. The errors are the same on every rank, so all continue or none does.
    """
    result, error = None, ""
    try:
        result = work(*args) if work else None
    except Exception as caught:  # any error: the other ranks wait for it
        error = describe_error(caught)
    lines = [line for text in all_gather_text(error, mesh.world, mesh.device) for line in text.splitlines()]
    return result, list(dict.fromkeys(lines))


def agreed(mesh: Mesh, title: str, work: Callable | None, *args: Any) -> Any:
    """Return the result of `on_all_ranks`. Raises CheckpointError on all, under a title, if a rank fails."""
    result, errors = on_all_ranks(mesh, work, *args)
    if errors:
        raise CheckpointError("\n  ".join(filter(None, [title, *some(errors)])))
    return result


def from_rank_0(mesh: Mesh, work: Callable, *args: Any) -> Any:
    """Return what `work(*args)` returns on rank 0, as JSON has it. Raises CheckpointError, on all ranks."""
    result = agreed(mesh, "", work if mesh.world.rank == 0 else None, *args)
    return json.loads(all_gather_text(json.dumps(result), mesh.world, mesh.device)[0])

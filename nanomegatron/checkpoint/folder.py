"""The folders of checkpoints: made, published atomically, found, and removed when newer ones replace them.

    make_folder     iter_0000120.tmp/                 a leftover if a kill comes: ignored, and removed
    publish_folder  manifest, synced to disk
                    iter_0000120.tmp -> iter_0000120  from here on this is the newest checkpoint
                    latest_checkpointed_iteration.txt for people only; loading uses the folders' names
    prune           iter_0000100 -> iter_0000100.tmp  a leftover again, then removed

A published folder is never written to. Saving an iteration again replaces it: the old folder is renamed to
iter_0000120.old, which is used after a kill between the two renames, and removed afterwards. A folder that
holds a file `non_persistent` is replaced by the next such folder (--non-persistent-save-interval).

A symbolic link in place of a folder is loaded from, but never replaced or removed, and counts as none of the
last ones. If the newest one points to nothing, such as a disk that is not mounted, nothing is loaded.

No torch here: the process that writes checkpoints (checkpoint/writer.py) starts without it.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nanomegatron.checkpoint.blocks import WRITE_THREADS, Bytes, open_file, write_blocks, write_text
from nanomegatron.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    SavedTensor,
    check_manifest,
    merge,
    parse_manifest,
    rank_file,
    to_json,
)
from nanomegatron.config.durable import sync_folder

MANIFEST, MANIFEST_SUM = "manifest.json", "manifest.json.sha256"
MANIFEST_LIMIT = 64 * 2**20  # bytes; docs/parallel.md has the sizes for large models
LATEST, NON_PERSISTENT = "latest_checkpointed_iteration.txt", "non_persistent"
PUBLISHED = re.compile(r"iter_([0-9]{7}|[1-9][0-9]{7,17})(\.old)?")
LEFTOVER = re.compile(rf"iter_[0-9]{{7,18}}\.(tmp|old)|{re.escape(LATEST)}\.tmp")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the last `keep_last` (None: all), and multiples of `interval` permanently.

    persistent: of the checkpoint that is saved; one that is not replaces the one of this kind before it.
    """

    keep_last: int | None = None
    interval: int | None = None
    persistent: bool = True


KEEP_ALL = Retention()

# Writing.


def make_folder(temporary: Path, need: int) -> None:
    """Make the empty temporary folder, and remove the leftovers of earlier saves. need: bytes.

    Raises OSError if fewer are free.
    """
    root = temporary.parent
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    usage = shutil.disk_usage(root)
    if usage.total and usage.free < need:  # a file system without a limit may say 0 of both
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    temporary.mkdir()


def remove_leftovers(root: Path) -> None:
    """Remove what killed saves have left, but an .old folder only if a whole one is there. Raises OSError."""
    in_use = set(folders(root).values())
    for path in [path for path in root.iterdir() if LEFTOVER.fullmatch(path.name)] if root.is_dir() else ():
        if path not in in_use and (path.suffix == ".tmp" or _is_whole(path.with_suffix(""))):
            _remove(path)


def free_bytes(folder: Path) -> int:
    """Bytes free on the folder's file system; 0 if that is not known."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return 0


def write_rank(
    folder: Path, rank: int, chunks: Iterable[Bytes], tensors: dict[str, SavedTensor], format: dict
) -> None:
    """Write a rank's file, synced to disk, then its part of the manifest at once. format: of Manifest."""
    saved = write_blocks(folder / rank_file(format.get("name", "sharded"), rank), chunks, WRITE_THREADS)
    index = index_path(folder, rank)
    write_text(index.with_suffix(".tmp"), to_json(Manifest(0, {}, "", tensors, {rank: saved}, format)))
    os.replace(index.with_suffix(".tmp"), index)


def publish_folder(
    temporary: Path,
    ranks: int,
    iteration: int,
    state: dict,
    config: str,
    keep: Retention = KEEP_ALL,
    format: dict | None = None,
) -> list[str]:
    """Merge the ranks' parts of the manifest, give the folder its final name, and `prune` -> notes

    format: of Manifest. Raises CheckpointError if a symbolic link has this name.
    """
    indices = [index_path(temporary, rank) for rank in range(ranks)]
    write_manifest(temporary, Manifest(iteration, state, config, *merge(indices), format or {}))
    if not keep.persistent:
        write_text(temporary / NON_PERSISTENT, "removed when the next checkpoint of this kind is saved\n")
    for index in indices:
        index.unlink()
    sync_folder(temporary)
    root = temporary.parent
    final, aside = temporary.with_suffix(""), temporary.with_suffix(".old")
    if final.is_symlink():
        raise CheckpointError(f"{final} is a symbolic link, which is not replaced: remove it")
    if final.exists():
        _remove(aside)
        os.rename(final, aside)
    os.rename(temporary, final)
    sync_folder(root)
    _remove(aside)
    hint = root / f"{LATEST}.tmp"
    write_text(hint, f"{iteration}\n")
    os.replace(hint, root / LATEST)
    sync_folder(root)
    return prune(root, iteration, keep)


def index_path(temporary: Path, rank: int) -> Path:
    """The file with a rank's part of the manifest, until that is merged."""
    return (temporary / rank_file("sharded", rank)).with_suffix(".json")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and its hash, synced to disk. Raises CheckpointError if it is too large."""
    text = to_json(manifest)
    if (size := len(text.encode())) > MANIFEST_LIMIT:
        raise CheckpointError(
            f"{MANIFEST} of {size} bytes is larger than {MANIFEST_LIMIT}: "
            "larger buckets (--ddp-bucket-size) make fewer ranges"
        )
    write_text(folder / MANIFEST, text)
    write_text(folder / MANIFEST_SUM, _sum_line(text.encode()))


def _sum_line(manifest: bytes) -> str:
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n"


# Removing.


def prune(root: Path, iteration: int, keep: Retention) -> list[str]:
    """Remove the checkpoints before `iteration`, just published, that need not stay -> notes on failures

    A damaged folder does not count as one of the last, so that undamaged ones are not removed for it.
    """
    try:
        dropped = superseded(root, iteration, keep)
        for path in dropped:
            os.rename(path, path.with_suffix(".tmp"))
        if dropped:
            sync_folder(root)  # no half of a folder has its final name, even if the power fails
        for path in dropped:
            shutil.rmtree(path.with_suffix(".tmp"))
    except OSError as error:
        return [f"an old checkpoint could not be removed: {error}"]
    return []


def superseded(root: Path, iteration: int, keep: Retention) -> list[Path]:
    """Return the folders before `iteration`, just published, that need not stay, the oldest first."""
    last = keep.keep_last or (2 if keep.interval else None)
    kept, replaced, result = int(keep.persistent), not keep.persistent, []
    for i, path in folders(root).items():
        if i >= iteration or path.is_symlink():  # later ones are of a run that began again before them
            continue
        if (path / NON_PERSISTENT).is_file():
            drop, replaced = replaced, True
        else:
            drop = last is not None and kept >= last and not (keep.interval and i % keep.interval == 0)
            kept += last is not None and not drop and _is_whole(path)
        result += [path] * drop
    return result[::-1]


def _is_whole(folder: Path) -> bool:
    """Whether manifest and sizes of files are right; checksums are not compared."""
    try:
        sizes = {name: file.bytes for name, file in read_manifest(folder).named_files.items()}
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (CheckpointError, OSError):
        return False


def _remove(path: Path) -> None:
    """Remove a folder, or a symbolic link in its place but not what it points to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


# Reading.


def folders(root: Path) -> dict[int, Path]:
    """Return {iteration: folder} of all published folders, the newest first.

    An .old one is among them only if nothing replaced it.
    """
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else []:  # "iter_0000120" before "iter_0000120.old"
        match = PUBLISHED.fullmatch(path.name)
        if match and path.is_dir():
            found.setdefault(int(match[1]), path)
    return dict(sorted(found.items(), reverse=True))


def newest_in_words(root: Path) -> str:
    """What a failed save leaves, for its message."""
    with contextlib.suppress(OSError, StopIteration):  # there is none
        return f"the last good checkpoint is {next(iter(folders(root).values()))}"
    return "there is no earlier checkpoint"


def latest(root: Path) -> int | None:
    """Return the newest iteration published in root; None if there is none.

    Raises CheckpointError if a newer one is a symbolic link to nothing.
    """
    newest = max(folders(root), default=None)
    for path in root.iterdir() if root.is_dir() else ():
        match = PUBLISHED.fullmatch(path.name)
        if match and path.is_symlink() and not path.exists() and int(match[1]) > (newest or -1):
            raise CheckpointError(
                f"{path} is a symbolic link to {os.readlink(path)}, which is not there: "
                "mount or restore that, or remove the link"
            )
    return newest


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest, checked against its hash and for consistency; opens no other file.

    Raises CheckpointError.
    """
    path = Path(folder) / MANIFEST
    with open_file(path) as file, open_file(path.with_name(MANIFEST_SUM)) as sum_file:
        data, expected = file.read(MANIFEST_LIMIT + 1), sum_file.read(1024)
    if len(data) > MANIFEST_LIMIT:
        raise CheckpointError(f"{path} is larger than {MANIFEST_LIMIT} bytes")
    if expected != _sum_line(data).encode():
        raise CheckpointError(f"{path} is damaged: {MANIFEST_SUM} has another SHA-256")
    try:
        manifest = parse_manifest(data)
        check_manifest(manifest.tensors, manifest.files)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return manifest

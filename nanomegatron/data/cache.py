"""A cache of arrays that take long to build: one process builds them while others wait, all map them.

A file's name is the hash of everything that the arrays depend on, so a changed setting never finds a stale
file. A description with the SHA-256 of each is written last; arrays that differ from it are rebuilt.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nanomegatron.config.user_files import read_json
from nanomegatron.data.indexed_dataset import file_hash, file_lock, publish


def cached_arrays(
    folder: str | Path | None,
    names: tuple[str, ...],
    description: dict[str, Any],
    build: Callable[[], tuple[np.ndarray, ...]],
) -> tuple[np.ndarray, ...]:
    """Return the arrays of `build`, one per name, mapped from files in `folder`; None: built in memory."""
    if folder is None:
        return build()
    folder, text = Path(folder), json.dumps({"arrays": names, **description})
    stem = hashlib.sha256(text.encode()).hexdigest()[:32]
    files = [folder / f"{stem}-{name}.npy" for name in names]
    record = folder / f"{stem}-description.json"
    if found := _load(files, record):
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / f"{stem}.lock"):
            if not _load(files, record):  # else another process was first
                for path, array in zip(files, build(), strict=True):
                    with publish(path) as temporary, open(temporary, "wb") as file:
                        np.save(file, array, allow_pickle=False)
                with publish(record) as temporary:
                    hashes = [file_hash(path) for path in files]
                    temporary.write_text(json.dumps({**json.loads(text), "sha256": hashes}))
    except OSError as error:
        raise ValueError(f"{folder}: cannot keep caches there ({error}); set --data-cache-path") from None
    return _load(files, record)


def _load(files: list[Path], record: Path) -> tuple[np.ndarray, ...] | None:
    """Return the mapped arrays; None if one is missing or differs from its SHA-256."""
    try:
        if read_json(record)["sha256"] != [file_hash(path) for path in files]:
            return None
        return tuple(np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray) for path in files)
    except (OSError, ValueError, KeyError, TypeError):
        return None

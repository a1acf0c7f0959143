"""Arrays that take long to make: made by one process, kept as files, mapped by all.

A file's name is the hash of everything the arrays depend on, so a changed setting never meets an old file.
Beside them lies a description with the SHA-256 of each, written last: a file that differs from it is rebuilt.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nanomegatron.data.indexed_dataset import file_hash, file_lock, publish


def cached_arrays(
    folder: str | Path | None,
    names: tuple[str, ...],
    description: dict[str, Any],
    build: Callable[[], tuple[np.ndarray, ...]],
) -> tuple[np.ndarray, ...]:
    """What `build` returns, one array a name: mapped from `folder`, or from memory if that is None."""
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
                    hashes = {"sha256": [file_hash(path) for path in files]}
                    temporary.write_text(json.dumps({**json.loads(text), **hashes}))
    except OSError as error:
        raise ValueError(f"{folder}: cannot keep caches there ({error}); set --data-cache-path") from None
    return _load(files, record)


def _load(files: list[Path], record: Path) -> tuple[np.ndarray, ...] | None:
    """Mapped arrays; None where one is missing or not what was written."""
    try:
        if json.loads(record.read_text())["sha256"] != [file_hash(path) for path in files]:
            return None
        return tuple(np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray) for path in files)
    except (OSError, ValueError, KeyError, TypeError):
        return None

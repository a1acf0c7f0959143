"""Waits until what was written is on the disk, and outlives a loss of power. The standard library alone."""

import os
from pathlib import Path
from typing import IO


def sync(file: IO) -> None:
    """Wait until everything written to the file is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the folder's entries are on disk: files created in it, renames."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

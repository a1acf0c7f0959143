"""The state of a run in status.json: what a run writes, also at its end on a full disk."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanomegatron.config.user_files import read_json
from nanomegatron.report.writers import replace_file, timestamp

STATUS_BLOCK = 4096  # bytes of a file that has any, on common file systems


def read_status(path: Path, warn: Callable[[str], None]) -> dict[str, Any]:
    """Read a status.json; {} if there is none, or, with a warning, if it is damaged."""
    try:
        return read_json(path) if path.is_file() else {}
    except (OSError, ValueError) as error:
        why = str(error).removeprefix(f"{path}: ")
        warn(f"{path}: damaged ({why}); read as if it were not there, and written again at the next change")
        return {}


def write_status(path: Path, facts: dict[str, Any]) -> None:
    """Write a status.json with these facts and the time; over the old one if there is no room for a new one.

    Most file systems (ext4, XFS, tmpfs; not Btrfs and ZFS) need no room to overwrite a file's first block.
    Raises OSError.
    """
    facts = facts | {"time": timestamp()}
    try:
        replace_file(path, json.dumps(facts, indent=1, default=str) + "\n")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.is_file():
            raise
        short = facts | {"message": str(facts.get("message"))[: STATUS_BLOCK // 8]}
        data = json.dumps(short, indent=1, default=str).encode() + b"\n"
        with open(path, "r+b", buffering=0) as file:  # it may be damaged if the machine fails meanwhile
            file.write(data.ljust(path.stat().st_size))
            file.truncate(len(data))
            os.fsync(file.fileno())

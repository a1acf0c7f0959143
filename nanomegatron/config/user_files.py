"""Reads small files that others have written, and shows their texts: nothing in them is trusted.

    read_bytes, read_text    a regular file, not a device or pipe without end; of at most `most` bytes
    read_json, parse_toml    an object without two values for a key; nested no deeper than the reader can go
    check_fields             that keys are there, and of their types
    escaped                  without the control characters that a terminal would obey

Whatever is wrong with a file is a ValueError of one line that begins with its path.
"""

import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

MOST_SETTINGS = 2**26  # of settings and records
MOST_VOCABULARY = 2**30  # of a tokenizer's file
LFS_POINTER = b"version https://git-lfs"
NESTED = "nested too deeply"
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
JSON_TYPES = {str: "a text", int: "a whole number", dict: "an object", list: "a list"}


def check_file(path: str | Path, most: int = MOST_SETTINGS) -> None:
    """Raise ValueError unless it is a regular file of at most `most` bytes; FileNotFoundError if none is.

    What git-lfs leaves in place of a large file that is still to be fetched is none.
    """
    start = b""
    try:
        info = os.stat(path)
        if stat.S_ISREG(info.st_mode):
            with open(path, "rb") as file:
                start = file.read(len(LFS_POINTER))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(info.st_mode):
        kind = "a folder" if stat.S_ISDIR(info.st_mode) else "a device, pipe or socket"
        raise ValueError(f"{path}: is {kind}; give a regular file")
    if info.st_size > most:
        raise ValueError(f"{path}: has {info.st_size} bytes; must have at most {most}")
    if start == LFS_POINTER:
        raise ValueError(f"{path}: a pointer of git-lfs, not the file itself; run git lfs pull there")


def read_bytes(path: str | Path, most: int = MOST_SETTINGS) -> bytes:
    """Return the contents of a regular file, at most `most` bytes. Raises as `check_file`."""
    check_file(path, most)
    with open(path, "rb") as file:
        return file.read(most)


def read_text(path: str | Path, most: int = MOST_SETTINGS) -> str:
    """Return the text of a regular file, which is UTF-8. Raises as `check_file`."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start})") from None


def read_json(path: str | Path, most: int = MOST_SETTINGS) -> dict[str, Any]:
    """Return the object in a JSON file. Raises as `check_file`."""
    found = read_json_value(path, most)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must be a JSON object, not {repr(found)[:40]}")
    return found


def read_json_value(path: str | Path, most: int = MOST_SETTINGS) -> Any:
    """Return what is in a JSON file, an object or not. Raises as `check_file`."""
    text = read_text(path, most)
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        why = NESTED if isinstance(error, RecursionError) else error
        raise ValueError(f"{path}: not JSON ({why})") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text. Raises ValueError."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(NESTED) from None


def check_fields(path: str | Path, table: dict[str, Any], kinds: dict[str, type]) -> None:
    """Raise ValueError if a key is not in a file's table, or its value is not of its type."""
    for name, kind in kinds.items():
        if name not in table:
            raise ValueError(f"{path}: has no {name!r}")
        if type(table[name]) is not kind:
            raise ValueError(f"{path}: {name} = {table[name]!r:.60}: must be {JSON_TYPES[kind]}")


def escaped(text: str, keep: str = "\n\t") -> str:
    """Return the text with control characters as \\x1b, but for those in `keep`."""
    return CONTROLS.sub(
        lambda found: found[0] if found[0] in keep else found[0].encode("unicode_escape").decode(), text
    )

"""PREFIX.json beside a pair of files: what preprocess.py says of it, checked before anything uses it.

idx_sha256, bin_sha256, bin_block_bytes    which files it belongs to
tokenizer, fingerprint, max_token          what made them, and the largest id
text_bytes, text_bytes_before              bytes of the text, in all and before some sequences
"""

from pathlib import Path
from typing import Any

from nanomegatron.config.user_files import check_fields, read_json

REQUIRED = {"idx_sha256": str, "fingerprint": str, "max_token": int, "tokenizer": dict}
OPTIONAL = {"text_bytes": int, "text_bytes_before": str, "bin_sha256": str, "bin_block_bytes": int}
WRITTEN_BY = (
    "nanomegatron preprocess did not write it so: run it again, or remove the file and give --tokenizer-type"
)


def read_sidecar(path: Path) -> dict[str, Any]:
    """Return what a PREFIX.json says. Raises ValueError, with the fix, if it is damaged."""
    try:
        found = read_json(path)
        check_fields(path, found, REQUIRED)
        check_fields(path, found, {name: kind for name, kind in OPTIONAL.items() if name in found})
        check_fields(path, found["tokenizer"], {"type": str})
        if found["max_token"] < 0:
            raise ValueError(f"{path}: max_token = {found['max_token']}: must be at least 0")
        text_bytes_before(path, found)
    except ValueError as error:
        raise ValueError(f"{error}; {WRITTEN_BY}") from None
    return found


def text_bytes_before(path: str | Path, sidecar: dict) -> list[int]:
    """Return the bytes of text before some sequences and in all, as PREFIX.json says; [] if it does not.

    Raises ValueError unless they are two or more numbers that grow.
    """
    if "text_bytes_before" not in sidecar:
        return [0, sidecar["text_bytes"]] if sidecar.get("text_bytes", 0) > 0 else []
    words = sidecar["text_bytes_before"].split()
    found = [int(word) for word in words if word.isascii() and word.isdecimal() and len(word) < 19]
    if not 1 < len(found) == len(words) or found != sorted(found):
        raise ValueError(
            f"{path}: text_bytes_before = {sidecar['text_bytes_before']!r:.60}: "
            "must be two or more numbers that grow"
        )
    return found

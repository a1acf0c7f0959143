"""Reads pairs of files whole and compares them with the hashes that preprocess.py has left in PREFIX.json.

Opening a pair to train on it reads only the index, since a terabyte of tokens takes too long: a changed
token would be trained on. `preprocess.py --verify-data` finds it, and where it is: each 64 MiB of PREFIX.bin
has a hash. Threads compute them in parallel.
"""

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

from nanomegatron.data import indexed_dataset

SHOW_EVERY = 5.0  # seconds between two lines of progress


def verify_pair(prefix: str, threads: int, report: Callable[[str], object]) -> tuple[list[str], str]:
    """Check a pair -> a line for each damage, a text on what was checked; `report` gets lines of progress."""
    start = time.monotonic()
    try:
        facts = indexed_dataset.IndexedDataset(prefix).sidecar()
        if facts is None or "bin_sha256" not in facts:
            return [], f"index and sizes are right; no hashes of tokens in {prefix}.json, they are unchecked"
        damage = _damaged_blocks(prefix, facts, threads, report)
    except ValueError as error:
        return [str(error)], "damaged"
    size = os.path.getsize(f"{prefix}.bin") / 1e6
    return damage, "damaged" if damage else f"whole, {size:,.1f} MB in {time.monotonic() - start:.1f} s"


def _damaged_blocks(
    prefix: str, facts: dict[str, Any], threads: int, report: Callable[[str], object]
) -> list[str]:
    """Hash all blocks of PREFIX.bin in threads -> a line for each stretch of blocks that differ."""
    path = f"{prefix}.bin"
    block = indexed_dataset.HASHED_BYTES
    size = os.path.getsize(path)
    starts = range(0, size, block)
    hashes = facts["bin_sha256"].split()
    if facts.get("bin_block_bytes") != block or len(hashes) != len(starts):
        return [f"{prefix}.json: damaged, it has {len(hashes)} hashes for the {len(starts)} blocks of {path}"]
    bad = []
    shown = time.monotonic()
    with open(path, "rb") as file, ThreadPoolExecutor(threads) as pool:
        found = pool.map(lambda start: sha256(os.pread(file.fileno(), block, start)).hexdigest(), starts)
        for i, (digest, expected) in enumerate(zip(found, hashes, strict=True)):
            bad += [i] * (digest != expected)
            if time.monotonic() - shown > SHOW_EVERY:
                shown = time.monotonic()
                report(f"{path}: {i * block / size:.0%} of {size / 1e9:,.1f} GB")
    lines = []
    for _, pairs in itertools.groupby(enumerate(bad), key=lambda pair: pair[1] - pair[0]):  # neighbours
        stretch = [number for _, number in pairs]
        lines.append(
            f"{path}: damaged in bytes {stretch[0] * block}..{min(size, (stretch[-1] + 1) * block)}: "
            f"another SHA-256 than in {prefix}.json; restore the file"
        )
    return lines

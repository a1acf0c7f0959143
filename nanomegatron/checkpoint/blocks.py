"""Files written and checked in blocks, by several threads: SHA-256 of a file, CRC-32 of each of its blocks.

    writing     chunks in order -> blocks of 16 MiB     threads: CRC-32 of a block, pwrite at its place
                                                        meanwhile SHA-256, block by block in order
    checking    threads: read a block, compare its CRC-32          SHA-256 on request, a thread a file

Tensor formats do not detect a flipped bit, hence the checksums. A CRC-32 (zlib.crc32, several times as fast
as SHA-256) finds every flipped bit and every burst of up to 32 bits for certain, and any other damage of a
block with probability 1 - 2^-32. Neither checksum protects from a forger, who changes it with the data.

No torch here: the process that writes checkpoints (checkpoint/writer.py) starts without it.
"""

import hashlib
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from nanomegatron.checkpoint.manifest import CRC_BLOCK, CheckpointError, SavedFile
from nanomegatron.config.durable import sync

WRITE_THREADS = 4  # a rank, besides that for SHA-256, which takes longest
Bytes = bytes | memoryview


def open_file(path: Path) -> BinaryIO:
    """Open a plain file for reading. Raises CheckpointError for anything else, symbolic links included."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path}: {os.strerror(error.errno)}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a plain file")
    return os.fdopen(descriptor, "rb")


# Writing.


def write_text(path: Path, text: str) -> None:
    """Write a small file and sync it to disk."""
    with open(path, "wb") as file:
        file.write(text.encode())
        sync(file)


def write_blocks(path: Path, chunks: Iterable[Bytes], threads: int) -> SavedFile:
    """Write the chunks, one after another, to a new file, synced to disk; returns its size and checksums."""
    digest = hashlib.sha256()
    size = 0
    crcs: list[Future] = []
    with open(path, "xb") as file:
        with ThreadPoolExecutor(threads) as writers:
            for block in blocks_of(chunks):
                crcs.append(writers.submit(_write_at, file.fileno(), block, size))
                digest.update(block)
                size += len(block)
                if len(crcs) > 2 * threads:
                    crcs[-2 * threads].result()  # no more blocks than these are in memory
        sync(file)
    return SavedFile(size, digest.hexdigest(), tuple(crc.result() for crc in crcs))


def blocks_of(chunks: Iterable[Bytes]) -> Iterator[Bytes]:
    """Yield the bytes of the chunks, in order, in blocks of CRC_BLOCK bytes; the last may be shorter."""
    parts, size = [], 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while len(view):
            parts.append(view[: CRC_BLOCK - size])
            size += len(parts[-1])
            view = view[len(parts[-1]) :]
            if size == CRC_BLOCK:
                yield parts[0] if len(parts) == 1 else b"".join(parts)
                parts, size = [], 0
    if parts:
        yield b"".join(parts)


def _write_at(descriptor: int, block: Bytes, at: int) -> int:
    """Write a block at an offset of a file -> its CRC-32"""
    rest = memoryview(block)
    while len(rest):
        written = os.pwrite(descriptor, rest, at)
        rest, at = rest[written:], at + written
    return zlib.crc32(block)


# Checking.


def verify_files(files: Mapping[Path, SavedFile], threads: int, integrity: bool = False) -> None:
    """Raise CheckpointError unless all files have the sizes and checksums that the manifest gives.

    CRC-32s are compared, and with `integrity` SHA-256 too; only this one where the format has no CRC-32s.
    """
    jobs = [(path, file, None) for path, file in files.items() if integrity or not file.crc32]
    jobs += [(path, file, i) for path, file in files.items() for i in range(len(file.crc32))]
    with ThreadPoolExecutor(threads) as pool:
        # Raises the first error, in the order of the files, and cancels the rest.
        list(pool.map(lambda job: _verify(*job), jobs))


def _verify(path: Path, expected: SavedFile, index: int | None) -> None:
    """Check a block of a file by its CRC-32, or with `index` None the file by its SHA-256."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            raise CheckpointError(f"{path} has {size} bytes, not {expected.bytes}")
        if index is None:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's")
            return
        begin = index * CRC_BLOCK
        end = min(begin + CRC_BLOCK, expected.bytes)
        file.seek(begin)
        data = file.read(end - begin)
        if len(data) < end - begin or zlib.crc32(data) != expected.crc32[index]:
            raise CheckpointError(
                f"{path} is damaged: the CRC-32 of bytes {begin} to {end - 1} is not the manifest's"
            )

"""Reads documents from files, in blocks that a worker takes apart. No torch.

    .jsonl .json      whole lines, 512 KiB of them      -, standard input, is JSON Lines too
    .txt              the file, a document
    .parquet .arrow   rows; columns.py
    a folder          of a Hugging Face data set; columns.py

All but the last two may be packed, .gz or .zst. Each document has its file and line, and an error in it is
reported as `file:line: reason`. A block knows the place behind it, where reading can go on another time.
"""

import contextlib
import glob
import gzip
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from nanomegatron.data.columns import COLUMN_FILES, Row, column_rows, folder_files
from nanomegatron.data.vocabulary import import_extra

CHUNK_BYTES, SKIP_BYTES = 1 << 19, 1 << 20
INPUT_NAMES = re.compile(r"(\.(jsonl|json|txt)(\.gz|\.zst)?|\.parquet|\.arrow)$", re.IGNORECASE)


class InputPlace(NamedTuple):
    """Where reading resumes: file number `file`, its line or row `number`, `byte` of the unpacked text.

    read: bytes of all files up to there, as they are on the disk; an estimate if they are packed.
    """

    file: int = 0
    number: int = 1
    byte: int = 0
    read: int = 0


class Line(NamedTuple):
    """One document as in the file: line `number`; 0 for a whole file of plain text."""

    path: str
    number: int
    raw: bytes

    def texts(self, keys: tuple[str, ...]) -> list[str]:
        """Parse the line and return its text under each key. Raises ValueError with file, line and reason."""
        try:
            text = self.raw.decode("utf-8-sig" if self.number <= 1 else "utf-8")
            if not self.number:
                return [text]
            document = json.loads(text)
            if not isinstance(document, dict):
                raise ValueError(
                    f"a JSON {type(document).__name__}, not an object such as {{{keys[0]!r}: ...}}"
                )
            texts = [*map(document.get, keys)]
            for key, text in zip(keys, texts):
                if not isinstance(text, str):
                    found = f"the keys are {', '.join(document)}: give --json-keys one"
                    if key in document:
                        found = f"it is {json.dumps(text)[:40]}: texts are JSON strings"
                    raise ValueError(f"no string under {key!r}; {found}")
                text.encode()  # half of a surrogate pair has no UTF-8
            return texts
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self}: {error}") from None

    def __str__(self) -> str:
        return f"{self.path}:{self.number}" if self.number else self.path


class DocumentBlock(NamedTuple):
    """Neighbours in a file: whole lines `raw`, `number` that of the first, 0 for plain text; or rows."""

    path: str
    number: int
    raw: bytes
    rows: list[Row]
    after: InputPlace

    def documents(self) -> Iterator[Line | Row]:
        """Yield its documents, without blank lines."""
        yield from self.rows
        if not self.number and not self.rows:
            yield Line(self.path, 0, self.raw)
            return
        for number, line in enumerate(self.raw.split(b"\n"), self.number):
            if line.strip():
                yield Line(self.path, number, line)


def input_files(patterns: Iterable[str]) -> list[str]:
    """Return the files that match each pattern, sorted by name. Raises ValueError."""
    files: list[str] = []
    for pattern in patterns:
        if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", pattern):
            raise ValueError(
                f"--input {pattern}: an address, and only files of this machine are read: copy it here "
                "(aws s3 cp, gcloud storage cp, hf download, curl -O), or pipe JSON Lines into --input -"
            )
        if pattern == "-" or Path(pattern).is_file():
            found = [pattern]
        elif Path(pattern).is_dir():
            found = folder_files(Path(pattern))
        else:
            found = sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
        if not found:
            raise ValueError(f"--input {pattern}: no such file")
        files += found
    if files.count("-") > 1:
        raise ValueError("--input -: standard input can be read once")
    for file in files:
        if file != "-" and not INPUT_NAMES.search(file):
            raise ValueError(
                f"--input {file}: must end in .jsonl, .json or .txt, optionally followed by .gz or .zst, "
                "or in .parquet or .arrow"
            )
        if file.lower().endswith(".zst"):
            import_extra("zstandard", f"--input {file}")
        if kind(file) in COLUMN_FILES:
            import_extra("pyarrow", f"--input {file}")
    return files


def kind(file: str) -> str:
    """'a.JSONL.gz' -> '.jsonl'."""
    return ".jsonl" if file == "-" else Path(file.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def size_of(file: str) -> int:
    """Bytes of a file; 0 for standard input, whose size is unknown."""
    return 0 if file == "-" else os.path.getsize(file)


def unpacked(path: str, raw: BinaryIO) -> BinaryIO:
    """Open the contents of `raw`, decompressed if `path` ends in .gz or .zst."""
    if path.lower().endswith(".gz"):
        return gzip.open(raw)
    if path.lower().endswith(".zst"):
        decompressor = import_extra("zstandard", f"--input {path}").ZstdDecompressor()
        return io.BufferedReader(decompressor.stream_reader(raw, read_across_frames=True))
    return raw


def blocks(
    files: list[str],
    keys: tuple[str, ...] = ("text",),
    start: InputPlace = InputPlace(),  # noqa: B008 (a constant)
) -> Iterator[DocumentBlock]:
    """Yield all files from `start` on in blocks of about CHUNK_BYTES."""
    done = sum(size_of(path) for path in files[: start.file])
    for index in range(start.file, len(files)):
        path, begin = files[index], start if index == start.file else InputPlace(index)
        size = size_of(path)
        if kind(path) in COLUMN_FILES:
            for rows, share in column_rows(path, keys, begin.number, CHUNK_BYTES):
                after = InputPlace(index, rows[-1].number + 1, 0, done + int(share * size))
                yield DocumentBlock(path, 0, b"", rows, after)
        else:
            yield from _text_blocks(path, begin, done)
        done += size


def _text_blocks(path: str, begin: InputPlace, done: int) -> Iterator[DocumentBlock]:
    """Yield the blocks of a file of text from a place on; done: bytes of the files before it."""
    index, number, byte, _ = begin
    stdin = path == "-"
    name = "standard input" if stdin else path
    with (
        contextlib.nullcontext(sys.stdin.buffer) if stdin else open(path, "rb") as raw,
        unpacked(path, raw) as file,
    ):
        try:
            for at in range(0, byte, SKIP_BYTES):
                file.read(min(SKIP_BYTES, byte - at))
            size = CHUNK_BYTES
            if kind(path) == ".txt":  # one document, of all there is
                size, number = -1, 0
            while data := file.read(size):
                data += file.readline()  # up to the end of its last line
                first, number, byte = number, number + data.count(b"\n"), byte + len(data)
                after = InputPlace(index, number, byte, done + (byte if stdin else raw.tell()))
                yield DocumentBlock(name, first, data, [], after)
        except Exception as error:  # of gzip, zlib or zstandard, whose errors have no class in common
            raise ValueError(f"{path}: damaged behind line {max(0, number - 1)} ({error})") from None


def documents(files: list[str], keys: tuple[str, ...] = ("text",)) -> Iterator[Line | Row]:
    """Yield the documents of all files: each non-blank line of a JSON file, a row, or a whole text file."""
    for block in blocks(files, keys):
        yield from block.documents()


def chunks(pieces: Iterable[DocumentBlock]) -> Iterator[list[DocumentBlock]]:
    """Yield lists of blocks of about CHUNK_BYTES in total: one task per small file would be slow."""
    chunk: list[DocumentBlock] = []
    size = 0
    for block in pieces:
        chunk.append(block)
        size += len(block.raw) + sum(row.size for row in block.rows) + 64
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk

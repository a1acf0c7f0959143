"""Tokens on disk: Megatron's pair of files, byte for byte, and a third with further facts. No torch.

    PREFIX.bin    the tokens of all documents back to back, in one integer type
    PREFIX.idx    "MMIDIDX\\0\\0"  u64 version 1  u8 type  u64 sequences  u64 documents + 1        34 bytes
                  i32 length of each sequence
                  i64 byte in PREFIX.bin where each begins
                  i64 first sequence of each document, and the number of sequences
                  (i8 mode of each sequence: only in multimodal data, which is read if all are 0, text)
    PREFIX.json   facts that the format lacks: the tokenizer, largest id, bytes of text, hashes (optional)

A document is one sequence, or none if it is empty. Both files are memory-mapped: a sample reads only its own
pages, and the processes of a machine share them.

A pair is never half written. It is written under temporary names and synced to disk; PREFIX.idx, without
which nothing loads, is renamed last. When a pair is opened, every number of the index is checked against the
sizes of the files.
"""

import contextlib
import functools
import hashlib
import json
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from nanomegatron.config.durable import sync, sync_folder
from nanomegatron.data.sidecar import read_sidecar

try:
    import fcntl
except ImportError:  # only on Unix
    fcntl = None

_MAGIC = b"MMIDIDX\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00"  # with the version, 1
_HEADER = struct.Struct("<17sBQQ")
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
HASHED_BYTES = 1 << 26  # of a .bin, which PREFIX.json has one hash for
_CHUNK = 1 << 24  # elements read at a time, so that checks and scans need little memory


def best_dtype(vocab_size: int) -> np.dtype:
    """Return the type in which Megatron stores ids: uint16 for a `vocab_size` below 65500, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedDatasetBuilder(contextlib.AbstractContextManager):
    """Writes a pair of files; as a context manager it removes them unless `finalize` was called."""

    def __init__(self, prefix: str | Path, dtype: np.dtype | type = np.int32) -> None:
        """Raises ValueError for a type that the format lacks, or if another process writes `prefix`."""
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        codes = {name: code for code, name in _TYPES.items()}
        if self.dtype.name not in codes:
            raise ValueError(
                f"{self.prefix}: tokens cannot be {self.dtype.name}; use one of {', '.join(codes)}"
            )
        self._code = codes[self.dtype.name]
        self.tokens, self.max_token = 0, -1
        self._lengths, self._documents = array("i"), array("q", [0])
        self._hashes: list[Any] = []  # SHA-256 of each HASHED_BYTES of the .bin
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        self._bin = open(self.prefix + ".bin.tmp", "ab")  # noqa: SIM115
        if not lock_file(self._bin, wait=False):
            self._bin.close()
            raise ValueError(f"{self.prefix}: another process is writing it")
        self._bin.truncate(0)

    def __exit__(self, *error: object) -> None:
        if not self._bin.closed:
            for suffix in (".bin.tmp", ".idx.tmp"):
                Path(self.prefix + suffix).unlink(missing_ok=True)
            self._bin.close()

    @property
    def documents(self) -> int:
        return len(self._documents) - 1

    @property
    def sequences(self) -> int:
        return len(self._lengths)

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one document; an empty one has no sequence."""
        self.add_documents(tokens, [len(tokens)])

    def add_documents(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Append documents of these lengths, whose tokens are concatenated.

        Raises ValueError for a token that the type cannot hold.
        """
        tokens, lengths = np.asarray(tokens), np.asarray(lengths, dtype=np.int64)
        if lengths.sum() != tokens.size or (lengths < 0).any() or lengths.max(initial=0) > np.iinfo("i4").max:
            raise ValueError(f"{self.prefix}: lengths {lengths} do not fit {tokens.size} tokens or 31 bits")
        if tokens.size:
            low, high, limits = int(tokens.min()), int(tokens.max()), np.iinfo(self.dtype)
            if tokens.dtype.kind not in "iu" or low < limits.min or high > limits.max:
                wrong = low if low < limits.min else high
                raise ValueError(
                    f"{self.prefix}: token {wrong} ({tokens.dtype}) does not fit {self.dtype.name}"
                )
            self.max_token = max(self.max_token, high)
            self._write(np.ascontiguousarray(tokens, dtype=self.dtype.newbyteorder("<")).view(np.uint8).data)
        self.tokens += tokens.size
        self._documents.frombytes((self.sequences + np.cumsum(lengths > 0, dtype=np.int64)).tobytes())
        self._lengths.frombytes(lengths[lengths > 0].astype(np.int32).tobytes())

    def _write(self, data: memoryview) -> None:
        """Write tokens behind the others, and add them to the hashes of their blocks."""
        self._bin.write(data)
        begin = self.tokens * self.dtype.itemsize
        while data:
            if begin % HASHED_BYTES == 0:
                self._hashes.append(hashlib.sha256())
            part = data[: HASHED_BYTES - begin % HASHED_BYTES]
            self._hashes[-1].update(part)
            begin += len(part)
            data = data[len(part) :]

    def finalize(self, sidecar: dict | None = None) -> None:
        """Sync the pair to disk and make it loadable; `sidecar` becomes PREFIX.json."""
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        index = hashlib.sha256()
        with open(self.prefix + ".idx.tmp", "wb") as file:
            for part in (
                _HEADER.pack(_MAGIC, self._code, len(lengths), len(self._documents)),
                lengths.astype("<i4"),
                pointers.astype("<i8"),
                np.array(self._documents, "<i8"),
            ):
                file.write(part)
                index.update(part)
            sync(file)
        sync(self._bin)
        # Until the index is renamed nothing loads: an older pair of this name is removed first.
        for suffix in (".idx", ".json"):
            Path(self.prefix + suffix).unlink(missing_ok=True)
        os.replace(self.prefix + ".bin.tmp", self.prefix + ".bin")
        if sidecar is not None:
            hashes = {
                "idx_sha256": index.hexdigest(),
                "bin_block_bytes": HASHED_BYTES,
                "bin_sha256": " ".join(digest.hexdigest() for digest in self._hashes),
            }
            with publish(self.prefix + ".json") as temporary:
                temporary.write_text(json.dumps({**sidecar, **hashes}, indent=2) + "\n", encoding="utf-8")
        os.replace(self.prefix + ".idx.tmp", self.prefix + ".idx")
        sync_folder(Path(self.prefix).parent)
        self._bin.close()


class IndexedDataset:
    """A pair of files, mapped into memory: `dataset[i]` is the i-th sequence, an array of `dtype`."""

    vocab_size: int | None = None  # if known, the ids of every sample are checked against it

    def __init__(self, prefix: str | Path) -> None:
        """Open and check a pair. Raises ValueError with file, value and rule for any inconsistency."""
        self.prefix = str(prefix)
        for suffix in (".idx", ".bin"):
            path = Path(self.prefix + suffix)
            if not path.is_file():
                hint = (
                    "the prefix is given without .bin or .idx"
                    if Path(self.prefix).is_file()
                    else "run nanomegatron preprocess"
                )
                raise ValueError(f"{path}: no such file; {hint}")
            if path.stat().st_size == 0:
                raise ValueError(f"{path}: 0 bytes; it must hold at least one token")
        index = _map(self.prefix + ".idx")
        code, sequences, documents = self._read_header(index)
        self.dtype = np.dtype(_TYPES[code])
        begin = _HEADER.size
        self.sequence_lengths = np.frombuffer(index, "<i4", sequences, begin)
        pointers = np.frombuffer(index, "<i8", sequences, begin + 4 * sequences)
        self.document_indices = np.frombuffer(index, "<i8", documents, begin + 12 * sequences)
        self._check_sequences(pointers)
        self._check_documents()
        self._pointers = pointers
        self._tokens = _map(self.prefix + ".bin").view(self.dtype.newbyteorder("<"))

    def _read_header(self, index: np.ndarray) -> tuple[int, int, int]:
        name = self.prefix + ".idx"
        if index.size < _HEADER.size:
            raise ValueError(f"{name}: {index.size} bytes; the header alone has {_HEADER.size}")
        magic, code, sequences, documents = _HEADER.unpack(index[: _HEADER.size].tobytes())
        if magic != _MAGIC:
            raise ValueError(f"{name}: begins with {magic!r}; an index of version 1 begins with {_MAGIC!r}")
        if code not in _TYPES:
            raise ValueError(f"{name}: type code {code}; integer types are {_TYPES}")
        size = _HEADER.size + 12 * sequences + 8 * documents
        if sequences and index.size == size + sequences:  # Megatron's multimodal data: a mode for each
            if (modes := np.unique(index[size:].view(np.int8)).tolist()) != [0]:
                raise ValueError(
                    f"{name}: Megatron's multimodal data, with sequences of the modes {str(modes)[:40]}; "
                    "only text, mode 0, can be trained on: write the text to a pair of its own"
                )
            size = index.size
        if size != index.size or not sequences:
            raise ValueError(
                f"{name}: {index.size} bytes; {sequences} sequences and {documents} document bounds take "
                f"{size}; one sequence is the least"
            )
        return code, sequences, documents

    def _check_sequences(self, pointers: np.ndarray) -> None:
        """Check that each sequence begins where the one before ended, and the last ends with the file."""
        name, begin = self.prefix + ".idx", 0
        for at in range(0, len(pointers), _CHUNK):
            lengths = self.sequence_lengths[at : at + _CHUNK]
            if lengths.min() < 0:
                raise ValueError(f"{name}: a sequence of {lengths.min()} tokens; lengths are 0 or more")
            ends = begin + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            expected = np.concatenate(([begin], ends[:-1]))
            wrong = np.flatnonzero(pointers[at : at + _CHUNK] != expected)
            if wrong.size:
                i = int(wrong[0])
                raise ValueError(
                    f"{name}: sequence {at + i} begins at byte {pointers[at + i]}; the one before it ends at "
                    f"{expected[i]}, and they lie back to back"
                )
            begin = int(ends[-1])
        size = Path(self.prefix + ".bin").stat().st_size
        if begin != size:
            raise ValueError(
                f"{self.prefix}.bin: {size} bytes; the last sequence in {name} ends at byte {begin}"
            )

    def _check_documents(self) -> None:
        bounds, sequences = self.document_indices, len(self.sequence_lengths)
        falls = any((np.diff(bounds[at : at + _CHUNK + 1]) < 0).any() for at in range(0, len(bounds), _CHUNK))
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != sequences or falls:
            raise ValueError(
                f"{self.prefix}.idx: document bounds {bounds[:1]}..{bounds[-1:]}; "
                f"they rise from 0 to the {sequences} sequences"
            )

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.get(i)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens of sequence i from `offset` on, or all that follow; a view of the file."""
        if not 0 <= i < len(self):
            raise IndexError(f"{self.prefix}: sequence {i} of {len(self)}")
        have = int(self.sequence_lengths[i])
        length = have - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > have:
            raise IndexError(
                f"{self.prefix}: tokens {offset}..{offset + length} of sequence {i}, which has {have}"
            )
        begin = int(self._pointers[i]) // self.dtype.itemsize + offset
        return self._tokens[begin : begin + length]

    @functools.cached_property
    def identity(self) -> str:
        """SHA-256 of the index, which identifies the lengths and their order, wherever the files are."""
        return file_hash(self.prefix + ".idx")

    def sidecar(self) -> dict | None:
        """Read PREFIX.json; None if it does not exist. Raises ValueError if it was written for other data."""
        path = Path(self.prefix + ".json")
        if not path.exists():
            return None
        found = read_sidecar(path)
        if found["idx_sha256"] != self.identity:
            raise ValueError(f"{path}: written for other data than {self.prefix}.idx, or that is damaged")
        return found

    def token_range(self) -> tuple[int, int]:
        """Smallest and largest token; reads all of PREFIX.bin."""
        parts = [self._tokens[at : at + _CHUNK] for at in range(0, self._tokens.size, _CHUNK)]
        return min(int(p.min()) for p in parts), max(int(p.max()) for p in parts)


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file, as hex digits; reads it in small pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def file_lock(path: str | Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; waits for other processes, and is released if this one dies."""
    with open(path, "ab") as file:
        lock_file(file)
        yield


def lock_file(file: IO, wait: bool = True) -> bool:
    """Lock a file until it is closed; returns False if another process holds it and `wait` is False.

    On a system without locks (Windows) nothing is locked; a file system without them raises OSError.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def publish(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to; if the body succeeds it is synced and renamed to `path`."""
    temporary = Path(f"{path}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(Path(path).parent)
    finally:
        temporary.unlink(missing_ok=True)


def _map(name: str) -> np.ndarray:
    return np.memmap(name, dtype=np.uint8, mode="r").view(np.ndarray)

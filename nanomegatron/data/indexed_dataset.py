"""Tokens on disk: Megatron's pair of files, byte for byte, and one beside it. No torch.

    PREFIX.bin    the tokens of all documents back to back, in one integer type
    PREFIX.idx    "MMIDIDX\\0\\0"  u64 version 1  u8 type  u64 sequences  u64 documents + 1        34 bytes
                  i32 length of each sequence
                  i64 byte in PREFIX.bin where each begins
                  i64 first sequence of each document, and the number of sequences
    PREFIX.json   what the format has no room for: which tokenizer, largest id, bytes of text (optional)

A document is one sequence, or none if it is empty. Both files are mapped, not read: a sample touches only its
own pages, and the processes of a machine share them.

A pair is never half there. It is written under other names, brought to disk, and PREFIX.idx, without which
nothing loads, takes its name last. And nothing is believed: every number of the index is checked against the
sizes of the files when a pair is opened.
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

try:
    import fcntl
except ImportError:  # it is Unix's
    fcntl = None

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_CHUNK = 1 << 24  # elements looked at in one go, so that checks and scans need little memory


def best_dtype(vocab_size: int) -> np.dtype:
    """The type Megatron stores ids below `vocab_size` in: uint16 below 65500, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedDatasetBuilder:
    """Writes a pair. A context manager, which removes what it wrote unless `finalize` made it loadable."""

    def __init__(self, prefix: str | Path, dtype: np.dtype | type = np.int32) -> None:
        """Raises ValueError for a type the format does not have, and if another process writes `prefix`."""
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        codes = {name: code for code, name in _TYPES.items()}
        if self.dtype.name not in codes:
            raise ValueError(
                f"{self.prefix}: tokens cannot be {self.dtype.name}; use one of {', '.join(codes)}"
            )
        self._code = codes[self.dtype.name]
        self.tokens, self.max_token = 0, -1
        self._lengths, self._documents = array("i"), array("q", [0])
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        self._bin = open(self.prefix + ".bin.tmp", "ab")  # noqa: SIM115
        if not lock_file(self._bin, wait=False):
            self._bin.close()
            raise ValueError(f"{self.prefix}: another process is writing it")
        self._bin.truncate(0)

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    @property
    def documents(self) -> int:
        return len(self._documents) - 1

    @property
    def sequences(self) -> int:
        return len(self._lengths)

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one document; an empty one is a document of no sequence."""
        self.add_documents(tokens, [len(tokens)])

    def add_documents(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Append documents of these lengths, their tokens one after the other.

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
            self._bin.write(np.ascontiguousarray(tokens, dtype=self.dtype.newbyteorder("<")).data)
        self.tokens += tokens.size
        self._documents.frombytes((self.sequences + np.cumsum(lengths > 0, dtype=np.int64)).tobytes())
        self._lengths.frombytes(lengths[lengths > 0].astype(np.int32).tobytes())

    def finalize(self, sidecar: dict | None = None) -> None:
        """Bring the pair to disk and make it loadable; `sidecar` becomes PREFIX.json."""
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        index = hashlib.sha256()
        with open(self.prefix + ".idx.tmp", "wb") as file:
            header = _HEADER.pack(_MAGIC, _VERSION, self._code, len(lengths), len(self._documents))
            for part in (
                header,
                lengths.astype("<i4"),
                pointers.astype("<i8"),
                np.array(self._documents, "<i8"),
            ):
                file.write(part)
                index.update(part)
            _sync(file)
        _sync(self._bin)
        # From here to the last line nothing loads: an older pair of this name goes first.
        for suffix in (".idx", ".json"):
            Path(self.prefix + suffix).unlink(missing_ok=True)
        os.replace(self.prefix + ".bin.tmp", self.prefix + ".bin")
        if sidecar is not None:
            text = json.dumps({**sidecar, "idx_sha256": index.hexdigest()}, indent=2) + "\n"
            with publish(self.prefix + ".json") as temporary:
                temporary.write_text(text, encoding="utf-8")
        os.replace(self.prefix + ".idx.tmp", self.prefix + ".idx")
        _sync_folder(self.prefix)
        self._bin.close()

    def abort(self) -> None:
        """Remove what was written, unless `finalize` has been through."""
        if not self._bin.closed:
            for suffix in (".bin.tmp", ".idx.tmp"):
                Path(self.prefix + suffix).unlink(missing_ok=True)
            self._bin.close()


class IndexedDataset:
    """A pair of files, mapped into memory: `dataset[i]` is the i-th sequence, an array of `dtype`."""

    vocab_size: int | None = None  # if known, every sample is checked to keep below it

    def __init__(self, prefix: str | Path) -> None:
        """Raises ValueError with file, value and rule for whatever does not hold together."""
        self.prefix = str(prefix)
        for suffix in (".idx", ".bin"):
            path = Path(self.prefix + suffix)
            if not path.is_file():
                hint = (
                    "the prefix is given without .bin or .idx"
                    if Path(self.prefix).is_file()
                    else "run preprocess.py"
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
        magic, version, code, sequences, documents = _HEADER.unpack(index[: _HEADER.size].tobytes())
        if magic != _MAGIC:
            raise ValueError(f"{name}: begins with {magic!r}; an index begins with {_MAGIC!r}")
        if version != _VERSION:
            raise ValueError(f"{name}: version {version}; only version {_VERSION} is known")
        if code not in _TYPES:
            raise ValueError(f"{name}: type code {code}; integer types are {_TYPES}")
        size = _HEADER.size + 12 * sequences + 8 * documents
        if size != index.size or not sequences:
            raise ValueError(
                f"{name}: {index.size} bytes; {sequences} sequences and {documents} document bounds take "
                f"{size}; one sequence is the least"
            )
        return code, sequences, documents

    def _check_sequences(self, pointers: np.ndarray) -> None:
        """Every sequence begins where the one before it ended, and the last ends with the file."""
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
            ends = f"{bounds[0]}..{bounds[-1]}" if len(bounds) else "none"
            raise ValueError(
                f"{self.prefix}.idx: document bounds {ends}; they rise from 0 to the {sequences} sequences"
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
        """SHA-256 of the index: same lengths in the same order, wherever the files lie."""
        return file_hash(self.prefix + ".idx")

    def sidecar(self) -> dict | None:
        """PREFIX.json, None where there is none. Raises ValueError if it was written for other data."""
        path = Path(self.prefix + ".json")
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            belongs = found["idx_sha256"] == self.identity
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not written by preprocess.py ({error!r}); remove it") from None
        if not belongs:
            raise ValueError(f"{path}: written for other data than {self.prefix}.idx; remove it")
        return found

    def token_range(self) -> tuple[int, int]:
        """Smallest and largest token, by reading all of PREFIX.bin."""
        parts = [self._tokens[at : at + _CHUNK] for at in range(0, self._tokens.size, _CHUNK)]
        return min(int(p.min()) for p in parts), max(int(p.max()) for p in parts)


class Samples:
    """What data sets of samples have in common."""

    indexed: Any  # an IndexedDataset, or what can be read like one
    sequences: tuple[int, int]  # those of it that they read: [start, stop)
    shuffle_index: np.ndarray  # the sample at each place of the order

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def checked(self, sample: np.ndarray, i: int) -> np.ndarray:
        """Sample i, int64, if its tokens are in the vocabulary. A GPU would stop without saying why."""
        limit = self.indexed.vocab_size
        if limit and sample.view(np.uint64).max() >= limit:
            raise ValueError(
                f"{self.indexed.prefix}.bin: tokens {sample.min()}..{sample.max()} in sample {i}, beyond the "
                f"vocabulary's 0..{limit - 1}: the file has changed since the run began; restore it"
            )
        return sample

    def bytes_per_token(self) -> float | None:
        """Bytes of text behind a token, on average over the sequences; None if PREFIX.json does not say.

        That has the bytes before some sequences (`marks`), between which they are in proportion to tokens.
        """
        text, whole = self.indexed.sidecar(), (0, len(self.indexed))
        if not text or ("text_bytes_before" not in text and tuple(self.sequences) != whole):
            return None
        before = [*map(int, text.get("text_bytes_before", f"0 {text['text_bytes']}").split())]
        if len(before) > whole[1] + 1:  # of other data than this
            return None
        tokens = np.concatenate(([0], self.indexed.sequence_lengths)).cumsum(dtype=np.int64)
        ends = tokens[list(self.sequences)]
        places = tokens[marks(whole[1], len(before) - 1)]
        return float(np.diff(np.interp(ends, places, before))[0] / np.diff(ends)[0])


def marks(count: int, parts: int = 1000) -> np.ndarray:
    """The first of each of `parts` equal parts of `count` sequences, or every sequence; and the end."""
    return np.rint(np.linspace(0, count, min(count, parts) + 1)).astype(np.int64)


def file_hash(path: str | Path) -> str:
    """SHA-256, read in small pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def file_lock(path: str | Path) -> Iterator[None]:
    """Hold `path` among the processes that ask; the system releases it when a process dies."""
    with open(path, "ab") as file:
        lock_file(file)
        yield


def lock_file(file: IO, wait: bool = True) -> bool:
    """Lock a file until it is closed; False where another process holds it and one is not to wait.

    A system without such locks lets everybody pass; a file system without raises OSError.
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
    """A temporary name to write to; it becomes `path`, whole and on disk, if the body succeeds."""
    temporary = Path(f"{path}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path)
    finally:
        temporary.unlink(missing_ok=True)


def _map(name: str) -> np.ndarray:
    return np.memmap(name, dtype=np.uint8, mode="r").view(np.ndarray)


def _sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: str | Path) -> None:
    """A rename lasts once its folder is on disk."""
    folder = os.open(Path(path).parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

"""Reads documents from files and tokenizes them with several processes, in order. No torch.

    blocks -> chunks -> in_order(encode) -> the writer
    reads     512 KiB   workers find the     writes them
                        lines, parse them
                        and tokenize

Only a few chunks per worker are in flight, so memory stays small for any size of input. Each document has its
file and line, and an error in it is reported as `file:line: reason`.
"""

import functools
import glob
import gzip
import io
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from nanomegatron.data.ascii_bpe import ascii_runs
from nanomegatron.data.indexed_dataset import best_dtype, publish
from nanomegatron.data.tokenizer import (
    EOD,
    Tokenizer,
    import_extra,
    tokenizer_from_spec,
)
from nanomegatron.data.vocabulary import byte_alphabet, write_ranks

CHUNK_BYTES, CHUNKS_PER_WORKER = 1 << 19, 4


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
            for key in keys:
                if not isinstance(document.get(key), str):
                    raise ValueError(f"no string under {key!r}; the keys are {', '.join(document)}")
                if not document[key].isascii():
                    document[key].encode()  # half of a surrogate pair has no UTF-8
            return [document[key] for key in keys]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self}: {error}") from None

    def __str__(self) -> str:
        return f"{self.path}:{self.number}" if self.number else self.path


class Encoded(NamedTuple):
    """The tokens of a chunk's documents under one key; tokens and bytes of text of each."""

    tokens: np.ndarray
    lengths: np.ndarray
    text_bytes: np.ndarray


class TextBlock(NamedTuple):
    """Whole lines of a file, `number` that of the first; 0 for a whole file of plain text."""

    path: str
    number: int
    raw: bytes

    def lines(self) -> Iterator[Line]:
        """Yield its documents, without blank lines."""
        if not self.number:
            yield Line(*self)
            return
        for number, line in enumerate(self.raw.split(b"\n"), self.number):
            if line.strip():
                yield Line(self.path, number, line)


def input_files(patterns: Iterable[str]) -> list[str]:
    """Return the files that match each pattern, sorted by name. Raises ValueError."""
    files = []
    for pattern in patterns:
        found = (
            [pattern]
            if Path(pattern).is_file()
            else sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
        )
        if not found:
            a_folder = f"a folder; give its files, such as '{pattern}/*.jsonl'"
            raise ValueError(f"--input {pattern}: {a_folder if Path(pattern).is_dir() else 'no such file'}")
        files += found
    for file in files:
        if kind(file) not in (".jsonl", ".json", ".txt"):
            raise ValueError(
                f"--input {file}: must end in .jsonl, .json or .txt, alone or before .gz or .zst"
            )
        if file.lower().endswith(".zst"):
            import_extra("zstandard", f"--input {file}")
    return files


def kind(file: str) -> str:
    """'a.JSONL.gz' -> '.jsonl'."""
    return Path(file.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def unpacked(path: str, raw: BinaryIO) -> BinaryIO:
    """Open the contents of `raw`, decompressed if `path` ends in .gz or .zst."""
    if path.lower().endswith(".gz"):
        return gzip.open(raw)
    if path.lower().endswith(".zst"):
        decompressor = import_extra("zstandard", f"--input {path}").ZstdDecompressor()
        return io.BufferedReader(decompressor.stream_reader(raw, read_across_frames=True))
    return raw


def blocks(files: Iterable[str], on_bytes: Callable[[int], None] = lambda count: None) -> Iterator[TextBlock]:
    """Yield all files in blocks of about CHUNK_BYTES; calls `on_bytes` with the bytes read so far."""
    done = 0
    for path in files:
        number = 1
        with open(path, "rb") as raw, unpacked(path, raw) as file:
            try:
                if kind(path) == ".txt":
                    yield TextBlock(path, 0, file.read())
                else:
                    while data := file.read(CHUNK_BYTES):
                        data += file.readline()  # up to the end of its last line
                        yield TextBlock(path, number, data)
                        number += data.count(b"\n")
                        on_bytes(done + raw.tell())
            except (gzip.BadGzipFile, EOFError, zlib.error, *_zstd_errors()) as error:
                raise ValueError(f"{path}: damaged behind line {number - 1} ({error})") from None
            done += raw.seek(0, os.SEEK_END)
            on_bytes(done)


def _zstd_errors() -> tuple[type, ...]:
    library = sys.modules.get("zstandard")
    return (library.ZstdError,) if library else ()


def lines(files: Iterable[str]) -> Iterator[Line]:
    """Yield the documents of all files: each non-blank line of a JSON file, or a whole text file."""
    for block in blocks(files):
        yield from block.lines()


def chunks(pieces: Iterable[TextBlock]) -> Iterator[list[TextBlock]]:
    """Yield lists of blocks of about CHUNK_BYTES in total: one task per small file would be slow."""
    chunk, size = [], 0
    for block in pieces:
        chunk.append(block)
        size += len(block.raw) + 64
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def encode_batch(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Encode texts -> all ids, and how many each text has; ASCII runs by `encode_ascii` if there is one."""
    if getattr(tokenizer, "encode_ascii", None) is None:
        ids = [tokenizer.encode(text) for text in texts]
        return np.array(list(itertools.chain.from_iterable(ids)), np.int64), np.array(
            [*map(len, ids)], np.int64
        )
    runs = [[text] if text.isascii() else ascii_runs(text) for text in texts]
    pieces = list(itertools.chain.from_iterable(runs))
    plain = np.array([piece.isascii() and "\0" not in piece for piece in pieces], bool)
    rest = {i: tokenizer.encode(pieces[i]) for i in np.flatnonzero(~plain).tolist()}
    ids, counts = tokenizer.encode_ascii([piece for piece, yes in zip(pieces, plain) if yes])
    lengths = np.zeros(len(pieces), np.int64)
    lengths[plain], lengths[~plain] = counts, [*map(len, rest.values())]
    ends = np.cumsum(lengths)
    if rest:
        mine, result = np.ones(ends[-1], bool), np.empty(ends[-1], np.uint32)
        for i, own in rest.items():
            place = slice(ends[i] - len(own), ends[i])
            mine[place], result[place] = False, own
        result[mine] = ids
        ids = result
    last = np.cumsum([*map(len, runs)], dtype=np.int64) - 1  # piece of each text
    return ids, np.diff(ends[last], prepend=0)


class Portable:
    """A tokenizer that each worker process rebuilds once from its spec, instead of unpickling it per task."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __reduce__(self) -> tuple:
        return _again, (json.dumps(self.tokenizer.spec), self.tokenizer.fingerprint)


@functools.cache
def _again(spec: str, fingerprint: str) -> Portable:
    tokenizer = tokenizer_from_spec(json.loads(spec))
    if tokenizer.fingerprint != fingerprint:
        raise ValueError(f"{spec}: the tokenizer's file changed while it was in use")
    return Portable(tokenizer)


def encode(
    chunk: list[TextBlock], portable: Portable, keys: tuple[str, ...], append_eod: bool
) -> tuple[list[Encoded], list[str]]:
    """Tokenize a chunk, in a worker -> its valid documents under each key, and errors for the others.

    As in Megatron an empty document stays empty, without an end-of-document token.
    """
    tokenizer = portable.tokenizer
    good, bad = [], []
    for line in itertools.chain.from_iterable(block.lines() for block in chunk):
        try:
            good.append((line, line.texts(keys)))
        except ValueError as error:
            bad.append(str(error))
    try:
        return _columns(tokenizer, good, keys, append_eod), bad
    except ValueError:  # the tokenizer refuses some texts: try one at a time to find which
        for document in list(good):
            try:
                _columns(tokenizer, [document], keys, append_eod)
            except ValueError as error:
                bad.append(f"{document[0]}: {error}")
                good.remove(document)
        return _columns(tokenizer, good, keys, append_eod), bad


def _columns(
    tokenizer: Tokenizer, documents: list[tuple[Line, list[str]]], keys: tuple[str, ...], append_eod: bool
) -> list[Encoded]:
    """Tokenize the documents' texts under each key."""
    result = []
    for k in range(len(keys)):
        texts = [texts[k] for _, texts in documents]
        ids, lengths = encode_batch(tokenizer, texts)
        ids = ids.astype(best_dtype(tokenizer.vocab_size))
        if append_eod:
            ends = np.cumsum(lengths)[lengths > 0]
            ids, lengths = np.insert(ids, ends, tokenizer.eod), lengths + (lengths > 0)
        sizes = [len(text) if text.isascii() else len(text.encode()) for text in texts]
        result.append(Encoded(ids, lengths, np.array(sizes, np.int64)))
    return result


def in_order(work: Callable, inputs: Iterable, workers: int) -> Iterator:
    """Yield work(x) for each x, in order, computed by `workers` processes; few inputs are read ahead.

    This process is one of them while the next result is not ready. The others are spawned, not forked:
    the caller may have threads.
    """
    if workers == 1:
        yield from map(work, inputs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers - 1, mp_context=context, initializer=_start_worker) as pool:
        inputs, pending = iter(inputs), deque()
        try:
            while True:
                room = 2 * workers * CHUNKS_PER_WORKER - len(pending)
                ahead = (workers - 1) * CHUNKS_PER_WORKER - sum(not future.done() for future in pending)
                pending.extend(pool.submit(work, x) for x in itertools.islice(inputs, min(ahead, room)))
                if not pending:
                    return
                if room > ahead and not pending[0].done() and (mine := next(inputs, None)) is not None:
                    pending.append(Future())
                    pending[-1].set_result(work(mine))
                else:
                    yield pending.popleft().result()
        except BrokenProcessPool:
            raise ValueError(
                "a worker process died, perhaps for lack of memory: use fewer --workers"
            ) from None
        finally:
            for future in pending:
                future.cancel()


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and exit if the parent is killed: the pool would wait forever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def train_tokenizer(texts: Iterable[str], vocab: int, output: Path) -> str:
    """Train a byte-level BPE of `vocab` entries, <|endoftext|> included; write `output` -> a line of report.

    Raises ValueError without the tokenizers library, and for fewer than 257 entries.
    """
    library = import_extra("tokenizers", "--train-tokenizer")
    if vocab < 257:
        raise ValueError(f"--train-tokenizer {vocab}: 257 entries are the least, the bytes and {EOD}")
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)  # splits as GPT-2 does
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab - 1,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    alphabet, entries = byte_alphabet(), model.get_vocab()
    output.parent.mkdir(parents=True, exist_ok=True)
    with publish(output) as temporary:
        write_ranks(temporary, (bytes(alphabet[c] for c in t) for t in sorted(entries, key=entries.get)))
    few = "" if len(entries) == vocab - 1 else f", not {vocab:,}: the text has no more pairs to merge"
    return f"{output}: {len(entries) + 1:,} entries with {EOD}{few}"

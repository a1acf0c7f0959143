"""Documents from files, tokenized by several processes in the order of the files. No torch.

    lines -> chunks -> in_order(encode) -> whoever writes
    reads    512 KiB   workers parse       adds them up
                       and tokenize

A few chunks a worker are under way, never more, so memory stays small whatever the size of the input. Each
document carries its file and line, and whatever is wrong with it is reported as `file:line: reason`.
"""

import functools
import glob
import gzip
import itertools
import json
import multiprocessing
import os
import signal
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanomegatron.data_indexed import best_dtype, publish
from nanomegatron.tokenizer import (
    EOD,
    Tokenizer,
    byte_alphabet,
    import_extra,
    tokenizer_from_spec,
    write_ranks,
)

CHUNK_BYTES, CHUNKS_PER_WORKER = 1 << 19, 4


class Line(NamedTuple):
    """One document as it stands in a file; `number` 0 is a whole file of plain text."""

    path: str
    number: int
    raw: bytes

    def texts(self, keys: tuple[str, ...]) -> list[str]:
        """Its text under each key. Raises ValueError with the place and the reason."""
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
                document[key].encode()  # half of a surrogate pair has no UTF-8
            return [document[key] for key in keys]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self}: {error}") from None

    def __str__(self) -> str:
        return f"{self.path}:{self.number}" if self.number else self.path


class Encoded(NamedTuple):
    """The documents of a chunk under one key."""

    tokens: np.ndarray
    lengths: np.ndarray
    text_bytes: int


def input_files(patterns: Iterable[str]) -> list[str]:
    """Files that the patterns match, each pattern's in order of name."""
    files = []
    for pattern in patterns:
        found = (
            [pattern]
            if Path(pattern).is_file()
            else sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
        )
        if not found:
            raise ValueError(f"--input {pattern}: no such file")
        files += found
    for file in files:
        if kind(file) not in (".jsonl", ".json", ".txt"):
            raise ValueError(f"--input {file}: must end in .jsonl, .json or .txt, with or without .gz")
    return files


def kind(file: str) -> str:
    """'a.JSONL.gz' -> '.jsonl'."""
    return Path(file.lower().removesuffix(".gz")).suffix


def lines(files: Iterable[str], on_bytes: Callable[[int], None] = lambda count: None) -> Iterator[Line]:
    """The documents of all files, blank lines left out; `on_bytes` learns how much of the files was read."""
    done = 0
    for path in files:
        number = 0
        with open(path, "rb") as raw, gzip.open(raw) if path.lower().endswith(".gz") else raw as file:
            try:
                if kind(path) == ".txt":
                    yield Line(path, 0, file.read())
                else:
                    for number, line in enumerate(file, 1):
                        if line.strip():
                            yield Line(path, number, line)
                        if number % 64 == 0:
                            on_bytes(done + raw.tell())
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise ValueError(f"{path}:{number + 1}: damaged gzip file ({error})") from None
            done += raw.seek(0, os.SEEK_END)
            on_bytes(done)


def chunks(documents: Iterable[Line]) -> Iterator[list[Line]]:
    """Lists of documents of about CHUNK_BYTES."""
    chunk, size = [], 0
    for line in documents:
        chunk.append(line)
        size += len(line.raw) + 64
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def encode(
    chunk: list[Line], keys: tuple[str, ...], spec: str, fingerprint: str, append_eod: bool
) -> list[Encoded]:
    """What a worker does. As in Megatron an empty document stays empty: no end-of-document token."""
    tokenizer = _worker_tokenizer(spec, fingerprint)
    ids = [[] for _ in keys]
    lengths, sizes = [[] for _ in keys], [0 for _ in keys]
    for line in chunk:
        for k, text in enumerate(line.texts(keys)):
            try:
                new = tokenizer.encode(text)
            except ValueError as error:
                raise ValueError(f"{line}: {error}") from None
            if new and append_eod:
                new.append(tokenizer.eod)
            ids[k] += new
            lengths[k].append(len(new))
            sizes[k] += len(text.encode())
    dtype = best_dtype(tokenizer.vocab_size)
    return [Encoded(np.array(i, dtype), np.array(n), size) for i, n, size in zip(ids, lengths, sizes)]


@functools.cache
def _worker_tokenizer(spec: str, fingerprint: str) -> Tokenizer:
    tokenizer = tokenizer_from_spec(json.loads(spec))
    if tokenizer.fingerprint != fingerprint:
        raise ValueError(f"{spec}: the tokenizer's file changed while it was in use")
    return tokenizer


def in_order(work: Callable, inputs: Iterable, workers: int) -> Iterator:
    """work(x) of every x, in order, from `workers` processes; few inputs are taken ahead of the results.

    The processes are spawned, not forked: whoever calls this may have threads.
    """
    if workers == 1:
        yield from map(work, inputs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
        inputs, pending = iter(inputs), deque()
        try:
            while True:
                ahead = workers * CHUNKS_PER_WORKER - len(pending)
                pending.extend(pool.submit(work, x) for x in itertools.islice(inputs, ahead))
                if not pending:
                    return
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise ValueError(
                "a worker process died, perhaps for lack of memory: use fewer --workers"
            ) from None
        finally:
            for future in pending:
                future.cancel()


def _start_worker() -> None:
    """Ctrl-C is the parent's to handle; and a pool would wait for ever for a parent that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def train_tokenizer(texts: Iterable[str], vocab: int, output: Path) -> str:
    """A byte-level BPE of `vocab` entries, <|endoftext|> included, to a tiktoken rank file; a line of report.

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

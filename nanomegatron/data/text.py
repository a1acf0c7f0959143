"""Tokenizes documents with several processes, in order. No torch.

    blocks -> chunks -> in_order(encode) -> DatasetOutput
    reads     512 KiB   workers find the     writes them
                        lines, parse them
                        and tokenize

Only a few chunks per worker are in flight, so memory stays small for any size of input.
"""

import functools
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanomegatron.data.indexed_dataset import best_dtype, publish
from nanomegatron.data.reading import DocumentBlock, InputPlace, Line, Row
from nanomegatron.data.tokenizer import Tokenizer, tokenizer_from_spec
from nanomegatron.data.vocabulary import EOD, byte_alphabet, import_extra, write_ranks

CHUNKS_PER_WORKER = 4


class Encoded(NamedTuple):
    """The tokens of a chunk's documents under one key; tokens and bytes of text of each."""

    tokens: np.ndarray
    lengths: np.ndarray
    text_bytes: np.ndarray


class Portable:
    """A tokenizer that a spawned worker rebuilds once from its spec, and a forked one has already."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        """special: special tokens in a text are those tokens."""
        self.tokenizer, self.special = tokenizer, special
        self._key = json.dumps(tokenizer.spec), tokenizer.fingerprint, special
        _portables()[self._key] = self

    def __reduce__(self) -> tuple:
        return _again, self._key


@functools.cache
def _portables() -> dict[tuple[str, str, bool], Portable]:
    """Those of this process."""
    return {}


def _again(spec: str, fingerprint: str, special: bool) -> Portable:
    if found := _portables().get((spec, fingerprint, special)):
        return found
    tokenizer = tokenizer_from_spec(json.loads(spec))
    if tokenizer.fingerprint != fingerprint:
        raise ValueError(f"{spec}: the tokenizer's file changed while it was in use")
    return Portable(tokenizer, special)


def encode(
    chunk: list[DocumentBlock], portable: Portable, keys: tuple[str, ...], append_eod: bool
) -> tuple[list[Encoded], list[str], InputPlace, int]:
    """Tokenize a chunk, in a worker -> its valid documents under each key, errors for the others, its end.

    The end is the place behind it, and the bytes read up to there.

    As in Megatron an empty document stays empty, without an end-of-document token.
    """
    good, bad, end = [], [], (chunk[-1].after, chunk[-1].read)
    for line in itertools.chain.from_iterable(block.documents() for block in chunk):
        try:
            good.append((line, line.texts(keys)))
        except ValueError as error:
            bad.append(str(error))
    try:
        return _columns(portable, good, keys, append_eod), bad, *end
    except ValueError:  # the tokenizer refuses some texts: try one at a time to find which
        for document in list(good):
            try:
                _columns(portable, [document], keys, append_eod)
            except ValueError as error:
                bad.append(f"{document[0]}: {error}")
                good.remove(document)
        return _columns(portable, good, keys, append_eod), bad, *end


def _columns(
    portable: Portable,
    documents: list[tuple[Line | Row, list[str]]],
    keys: tuple[str, ...],
    append_eod: bool,
) -> list[Encoded]:
    """Tokenize the documents' texts under each key."""
    result, tokenizer = [], portable.tokenizer
    for k in range(len(keys)):
        texts = [texts[k] for _, texts in documents]
        ids, lengths = tokenizer.encode_many(texts, portable.special)
        ids = ids.astype(best_dtype(tokenizer.vocab_size))
        if append_eod:
            ends = np.cumsum(lengths)[lengths > 0]
            ids, lengths = np.insert(ids, ends, tokenizer.eod), lengths + (lengths > 0)
        sizes = [len(text) if text.isascii() else len(text.encode()) for text in texts]
        result.append(Encoded(ids, lengths, np.array(sizes, np.int64)))
    return result


def in_order(work: Callable, inputs: Iterable, workers: int) -> Iterator:
    """Yield work(x) for each x, in order, computed by `workers` processes; few inputs are read ahead.

    This process is one of them while the next result is not ready. The others are forked before anything is
    read, or spawned where a fork is not safe: beside threads.
    """
    if workers == 1:
        yield from map(work, inputs)
        return
    safe = sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules
    context = multiprocessing.get_context("fork" if safe else "spawn")
    with ProcessPoolExecutor(workers - 1, context, _start_worker, (os.getpid(),)) as pool:
        pool.submit(os.getpid)  # starts them
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


def _start_worker(parent: int) -> None:
    """Leave Ctrl-C to the parent, and exit if the parent is killed: the pool would wait forever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
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

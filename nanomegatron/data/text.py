"""Tokenizes documents with several processes, in order. No torch.

    blocks -> chunks -> in_order(Encoder) -> DatasetOutput
    reads     512 KiB   workers find the     writes them
                        lines, parse them
                        and tokenize

Only a few chunks per worker are in flight, so memory stays small for any size of input.
"""

import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanomegatron.data.indexed_dataset import best_dtype, publish
from nanomegatron.data.reading import DocumentBlock, InputPlace, Line, Row
from nanomegatron.data.tokenizer import Tokenizer
from nanomegatron.data.vocabulary import EOD, byte_alphabet, import_extra, write_ranks

CHUNKS_PER_WORKER = 4


class Encoded(NamedTuple):
    """The tokens of a chunk's documents under one key; tokens and bytes of text of each."""

    tokens: np.ndarray
    lengths: np.ndarray
    text_bytes: np.ndarray


class Encoder(NamedTuple):
    """Tokenizes chunks, in a worker. special: special tokens in a text are those tokens.

    As in Megatron an empty document stays empty, without an end-of-document token.
    """

    tokenizer: Tokenizer
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = True
    special: bool = False

    def facts(self) -> dict[str, Any]:
        """What the .json says of how the ids were made."""
        found = {
            "parse_special_tokens": self.special,
            "prefix_ids": [*self.tokenizer.prefix_ids],
            "suffix_ids": [*self.tokenizer.suffix_ids],
        }
        return {"append_eod": self.append_eod} | {name: value for name, value in found.items() if value}

    def __call__(self, chunk: list[DocumentBlock]) -> tuple[list[Encoded], list[str], InputPlace]:
        """Return a chunk's valid documents under each key, errors for the others, and the place behind it."""
        good, bad, place = [], [], chunk[-1].after
        for line in itertools.chain.from_iterable(block.documents() for block in chunk):
            try:
                good.append((line, line.texts(self.keys)))
            except ValueError as error:
                bad.append(str(error))
        try:
            return self._columns(good), bad, place
        except ValueError:  # the tokenizer refuses some texts: try one at a time to find which
            for document in list(good):
                try:
                    self._columns([document])
                except ValueError as error:
                    bad.append(f"{document[0]}: {error}")
                    good.remove(document)
            return self._columns(good), bad, place

    def _columns(self, documents: list[tuple[Line | Row, list[str]]]) -> list[Encoded]:
        """Tokenize the documents' texts under each key."""
        result = []
        for k in range(len(self.keys)):
            texts = [texts[k] for _, texts in documents]
            ids, lengths = self.tokenizer.encode_many(texts, self.special)
            ids = ids.astype(best_dtype(self.tokenizer.vocab_size))
            if self.append_eod:
                ends = np.cumsum(lengths)[lengths > 0]
                ids, lengths = np.insert(ids, ends, self.tokenizer.eod), lengths + (lengths > 0)
            sizes = [len(text) if text.isascii() else len(text.encode()) for text in texts]
            result.append(Encoded(ids, lengths, np.array(sizes, np.int64)))
        return result


def in_order(work: Callable, inputs: Iterable, workers: int) -> Iterator:
    """Yield work(x) for each x, in order, computed by `workers` processes; few inputs are read ahead.

    This process is one of them while the others have enough to do. They have `work` from their start on, and
    are forked before anything is read, or spawned where a fork is not safe: beside threads.
    """
    if workers == 1:
        yield from map(work, inputs)
        return
    safe = sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules
    context = multiprocessing.get_context("fork" if safe else "spawn")
    with ProcessPoolExecutor(workers - 1, context, _start_worker, (work,)) as pool:
        pool.submit(os.getpid)  # starts them
        pending: deque[Future] = deque()
        try:
            for x in inputs:
                waiting = sum(not future.done() for future in pending)
                if waiting < (workers - 1) * CHUNKS_PER_WORKER:
                    future = pool.submit(_run_work, x)
                else:  # the others have enough to do
                    future = Future()
                    future.set_result(work(x))
                pending.append(future)
                while pending and (pending[0].done() or len(pending) == 2 * workers * CHUNKS_PER_WORKER):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise ValueError(
                "a worker process died, perhaps for lack of memory: use fewer --workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker(work: Callable) -> None:
    """Keep `work`; leave Ctrl-C to the parent, and exit if it is killed: the pool would wait forever."""
    _run_work.work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _run_work(x: Any) -> Any:
    """Do in a worker what it keeps."""
    return _run_work.work(x)


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

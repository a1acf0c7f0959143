"""Documents of very different lengths, which `measure.py dynamic` trains on.

Lengths are log-normal with a median of 1,024 tokens and a sigma of 1.7 (about as sources and web pages have
it), from 16 to 131,072; what is drawn outside is drawn again. The tokens are the bytes of Python's standard
library, end to end and repeated, cut to these lengths; 256 ends a document.
"""

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder

MEDIAN, SIGMA, SHORTEST = 1024, 1.7, 16
LONGEST, EOD = 131072, 256


def draw_lengths(count: int, longest: int = LONGEST, seed: int = 1234) -> np.ndarray:
    """Tokens of each document, int64 [count]; the first of more are the same, in every version of numpy."""
    random, lengths = np.random.RandomState(seed), np.empty(0, np.int64)
    while len(lengths) < count:
        drawn = np.rint(np.exp(random.normal(np.log(MEDIAN), SIGMA, 4096))).astype(np.int64)
        lengths = np.append(lengths, drawn[(drawn >= SHORTEST) & (drawn <= longest)])
    return lengths[:count]


def documents(lengths: Sequence[int]) -> Iterator[np.ndarray]:
    """Their tokens, uint16; each has one more than its length, the end, which is only a label."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text, at = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8), 0
    for length in lengths:
        yield np.append(np.take(text, np.arange(at, at + length), mode="wrap"), EOD).astype(np.uint16)
        at += length


def write(folder: Path, lengths: np.ndarray) -> None:
    """documents.bin and documents.idx, for --data-path FOLDER/documents."""
    with IndexedDatasetBuilder(folder / "documents", np.uint16) as builder:
        for document in documents(lengths):
            builder.add_document(document)
        builder.finalize()

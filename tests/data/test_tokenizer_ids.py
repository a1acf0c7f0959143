"""Ids are those of the tokenizer's library: 20,000 strange strings for each shape of a tokenizer.

By `encode`, by `encode_many` and in the .bin that preprocess.py writes; with special tokens as text, and with
--parse-special-tokens. A small draw in the fast tier, the whole with the mark `full`.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import preprocess
from nanomegatron.data.indexed_dataset import IndexedDataset
from nanomegatron.data.text import Encoder
from nanomegatron.data.tokenizer import EOD
from tests.tokenizer_shapes import SHAPES, SPECIAL, Shape, strange


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.__name__)
def shape(request, tmp_path_factory) -> Shape:
    return request.param(tmp_path_factory.mktemp(request.param.__name__))


def check(shape: Shape, texts: list[str], folder: Path, workers: int = 1) -> None:
    """One by one, all in one call, and in the .bin: with special tokens as text, and as tokens."""
    source = folder / "in.jsonl"
    source.write_bytes(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))
    for parse in (False, True):
        theirs = (shape.special or shape.plain) if parse else shape.plain
        expected = [list(theirs(text)) for text in texts]
        for text, ids in zip(texts, expected):
            assert parse or shape.ours.encode(text) == ids, repr(text)
        assert_many(shape, texts, parse)
        encoder = Encoder(shape.ours, append_eod=False, special=parse)
        preprocess.tokenize([str(source)], folder / "x", encoder, workers)
        data = IndexedDataset(f"{folder}/x_text_document")
        written = [data[i] for i in range(len(data))]
        some = [i for i, ids in enumerate(expected) if ids]  # a document without a token is no sequence
        assert_same([texts[i] for i in some], [expected[i] for i in some], written)
    if shape.special:
        assert [*map(shape.special, SPECIAL)] != [*map(shape.plain, SPECIAL)]


def assert_many(shape: Shape, texts: list[str], special: bool = False) -> None:
    """All in one call."""
    ids, counts = shape.ours.encode_many(texts, special)
    theirs = shape.special if special and shape.special else shape.plain
    assert_same(texts, [*map(theirs, texts)], np.split(ids, np.cumsum(counts)[:-1]))


def assert_same(texts: list[str], expected: list[list[int]], found: list[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for text, theirs, ours in zip(texts, expected, found):
        assert ours.tolist() == theirs, repr(text)


def test_strange_strings(shape, tmp_path):
    check(shape, strange(0, 500), tmp_path)


@pytest.mark.full
def test_many_strange_strings(shape, tmp_path):
    check(shape, strange(2, 20_000), tmp_path, workers=2)


# What the cache of words of earlier versions had wrong: a token of several blanks that is added, and blanks
# outside of ASCII before a newline in GPT-2's split.
BLANKS_AT_AN_END = ["a \nb", "a  ", "\nb", "\n", " x", "\u3000\nb", "\u00a0\t.", "\u2003\r\x1f", "\u0085\n0"]


def test_blanks_at_an_end(shape):
    assert_many(shape, BLANKS_AT_AN_END)


def test_halves_of_surrogate_pairs(shape):
    """tiktoken has U+FFFD for them; the others take no such text, and are not asked."""
    halves = ["\ud800", "a\udfff b", "\ud83d \ude00", "\udc00\ud800", f"x{EOD}\ud800"]
    if shape.takes_halves:
        assert_many(shape, halves)
        return
    for text in halves:
        with pytest.raises(ValueError, match="surrogates"):
            shape.ours.encode(text)
        with pytest.raises(ValueError, match="surrogates"):
            shape.ours.encode_many(["a", text])


def test_no_texts(shape):
    ids, counts = shape.ours.encode_many([])
    assert len(ids) == len(counts) == 0 and np.issubdtype(counts.dtype, np.integer)

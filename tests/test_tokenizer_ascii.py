"""Many texts at once against tiktoken, text by text."""

import random

import numpy as np
import pytest

from nanomegatron.data import ascii_bpe as tokenizer_ascii
from nanomegatron.data.text import encode_batch
from nanomegatron.data.tokenizer import build_tokenizer
from tests.test_tokenizer import TEXTS, corpus, gpt2_files, rank_file  # noqa: F401 (fixtures)

PARTS = [
    *"abst019.,_-+'\"",
    *("'s", "'t", "'ll", "'ve", "'re", "'S", "''", "'x", "don't", "we'll've", "\x1c", "\x7f", "\0", " 's"),
    *(" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "\x0b", "\x0c"),
    *("def", "return ", "import json\n", "x" * 20, "-" * 40, "internationalization", "<|endoftext|>"),
    *("\u00e9", "\u4f60\u597d", "\U0001f917", "\u00a0", "\u2003", "\u0085", "e\u0301", "\u0663"),
]


def compare(tokenizer, texts):
    ids, lengths = encode_batch(tokenizer, texts)
    expected = [tokenizer.encode(text) for text in texts]
    assert lengths.tolist() == [len(each) for each in expected], texts
    assert ids.tolist() == [i for each in expected for i in each], texts


@pytest.mark.parametrize("ascii_only", [True, False])
def test_random_texts(rank_file, ascii_only):  # noqa: F811
    """Every order of the pattern's classes: 3,000 chunks of up to eight texts."""
    tokenizer = build_tokenizer("TikTokenizer", str(rank_file))
    draw = random.Random(0)
    parts = [part for part in PARTS if part.isascii() and "\0" not in part] if ascii_only else PARTS
    for _ in range(3000):
        texts = ["".join(draw.choices(parts, k=draw.randrange(25))) for _ in range(draw.randrange(1, 9))]
        compare(tokenizer, texts)


def test_real_text(gpt2_files, corpus, monkeypatch):  # noqa: F811
    """Words meet again in later chunks, some at the place of others; a full table is emptied."""
    whole = "".join(corpus)
    chunks = [[whole[i : i + 700], whole[i + 700 : i + 2000]] for i in range(0, len(whole), 2000)]
    for bits in 21, 6:  # with 64 places words push each other out, and the table is emptied again and again
        monkeypatch.setattr(tokenizer_ascii, "BITS", bits)
        tokenizer = build_tokenizer("GPT2BPETokenizer", vocab_file=gpt2_files[0], merge_file=gpt2_files[1])
        for chunk in chunks + chunks[:5]:
            compare(tokenizer, chunk)
        compare(tokenizer, TEXTS)
        compare(tokenizer, [""])
        compare(tokenizer, ["", "", " "])


def test_words_that_no_place_can_hold(rank_file):  # noqa: F811
    tokenizer = build_tokenizer("TikTokenizer", str(rank_file))
    compare(tokenizer, ["a" * n for n in range(40)] + [" " + "b" * 16, "c" * 1000, " " * 30 + "x"] * 2)


def test_memory_is_bounded(rank_file, monkeypatch):  # noqa: F811
    monkeypatch.setattr(tokenizer_ascii, "BITS", 8)
    tokenizer = build_tokenizer("TikTokenizer", str(rank_file))
    for i in range(0, 30_000, 100):
        compare(tokenizer, [" ".join(f"w{n}" for n in range(i, i + 100))])
        assert len(tokenizer.encode_ascii._numbers) < 2**8 + 250


def test_other_patterns_are_tiktokens_alone(rank_file):  # noqa: F811
    tokenizer = build_tokenizer("Llama3Tokenizer", str(rank_file))
    assert tokenizer.encode_ascii is None
    compare(tokenizer, [*TEXTS, "12345'S don't\n\n  x"])


@pytest.mark.parametrize("kind", ["ByteTokenizer", "TikTokenizer"])
def test_no_texts(kind, rank_file):  # noqa: F811
    ids, lengths = encode_batch(build_tokenizer(kind, str(rank_file)), [])
    assert len(ids) == len(lengths) == 0 and np.issubdtype(lengths.dtype, np.integer)

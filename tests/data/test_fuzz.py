"""Five hundred damaged pairs of files: each is refused by name, or gives what the undamaged one gave.

What cannot be seen: another token within the vocabulary, in PREFIX.bin itself. No file keeps a sum over it,
as reading terabytes at every start would cost more than it saves; a token outside is seen when it is read
(data/test_loader.py).
"""

import random
import struct

import numpy as np
import pytest

from nanomegatron.config.settings import DataConfig
from nanomegatron.data.gpt_dataset import build_datasets
from nanomegatron.data.indexed_dataset import IndexedDataset
from nanomegatron.data.tokenizer import build_tokenizer
from tests.megatron_data import random_documents, write

TOKENIZER = build_tokenizer("NullTokenizer", vocab_size=127)
COUNT = 30
LENGTHS, POINTERS, BOUNDS = 34, 34 + 4 * COUNT, 34 + 12 * COUNT
ODD_NUMBERS = [0, 1, 2, 29, 31, 255, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def put(data, at, kind, value):
    data[at : at + struct.calcsize(kind)] = struct.pack(kind, value)


def header(draw, idx, bin):
    at, kind = draw.choice([(9, "<Q"), (17, "<B"), (18, "<Q"), (26, "<Q")])
    put(idx, at, kind, draw.choice(ODD_NUMBERS) % 256 ** struct.calcsize(kind))


def magic(draw, idx, bin):
    idx[draw.randrange(9)] ^= 1 << draw.randrange(8)


def length(draw, idx, bin):
    put(idx, LENGTHS + 4 * draw.randrange(COUNT), "<i", draw.choice([0, 1, -1, 100, 2**31 - 1, -(2**31)]))


def pointer(draw, idx, bin):
    put(idx, POINTERS + 8 * draw.randrange(COUNT), "<Q", draw.choice(ODD_NUMBERS))


def bound(draw, idx, bin):
    put(idx, BOUNDS + 8 * draw.randrange(COUNT + 1), "<Q", draw.choice(ODD_NUMBERS))


def flips(draw, idx, bin):
    for _ in range(draw.randint(1, 3)):
        idx[draw.randrange(len(idx))] ^= 1 << draw.randrange(8)


def size(draw, idx, bin):
    data = draw.choice([idx, bin])
    if draw.random() < 0.5:
        del data[draw.randrange(len(data)) :]
    else:
        data += draw.randbytes(draw.randint(1, 64))


def noise(draw, idx, bin):
    begin = draw.randrange(len(idx))
    idx[begin : begin + 40] = draw.randbytes(len(idx[begin : begin + 40]))


def moved_tokens(draw, idx, bin):
    """A consistent index, of other lengths: only the hash in PREFIX.json shows it."""
    i = draw.randrange(COUNT - 1)
    a, b = struct.unpack_from("<ii", idx, LENGTHS + 4 * i)
    put(idx, LENGTHS + 4 * i, "<i", a + 1)
    put(idx, LENGTHS + 4 * i + 4, "<i", b - 1)
    put(idx, POINTERS + 8 * i + 8, "<q", struct.unpack_from("<q", idx, POINTERS + 8 * i + 8)[0] + 2)


KINDS = [header, magic, length, pointer, bound, flips, size, noise, moved_tokens]


def read_all(prefix, cache):
    """Every sequence, and every sample of a run, by the way a run takes."""
    indexed = IndexedDataset(prefix)
    data = DataConfig(data_path=(str(prefix),), split="1", seq_length=8, data_cache_path=str(cache))
    samples = build_datasets(data, (60, 0, 0), 1, TOKENIZER)[0]
    return [indexed[i].tolist() for i in range(len(indexed))], [samples[i].tolist() for i in range(60)]


@pytest.mark.parametrize("known", [True, False], ids=["with PREFIX.json", "without"])
def test_five_hundred_damaged_pairs(tmp_path, known):
    about = dict(fingerprint=TOKENIZER.fingerprint, max_token=99, tokenizer=TOKENIZER.spec)
    write(tmp_path / "d", random_documents(2, COUNT, 9), sidecar=about if known else None)
    good = {suffix: (tmp_path / f"d.{suffix}").read_bytes() for suffix in ("idx", "bin")}
    expected, draw, harmless = read_all(tmp_path / "d", tmp_path / "cache"), random.Random(0), []
    for trial in range(500):
        damaged = {suffix: bytearray(data) for suffix, data in good.items()}
        kind = KINDS[trial % (len(KINDS) - (not known))]
        kind(draw, damaged["idx"], damaged["bin"])
        for suffix, data in damaged.items():
            (tmp_path / f"d.{suffix}").write_bytes(data)
        try:
            assert read_all(tmp_path / "d", tmp_path / "cache") == expected, kind.__name__
            harmless.append((kind.__name__, damaged != good))
        except ValueError as error:
            assert str(tmp_path / "d.") in str(error) and "\n" not in str(error), error
    changed = {name for name, really in harmless if really}
    # Samples are made of sequences alone; the bounds of documents, and the sign of a type, are not read.
    assert changed <= (set() if known else {"bound", "flips", "header"}) and len(harmless) < 100


def test_what_the_checks_are_for(tmp_path, monkeypatch):
    """Without them the same damage is read as if nothing were wrong."""
    documents = random_documents(2, COUNT, 9)
    write(tmp_path / "d", documents)
    monkeypatch.setattr(IndexedDataset, "_check_sequences", lambda self, pointers: None)
    idx = bytearray((tmp_path / "d.idx").read_bytes())
    put(idx, POINTERS + 8, "<q", 0)
    (tmp_path / "d.idx").write_bytes(idx)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(IndexedDataset(tmp_path / "d")[1], documents[1])

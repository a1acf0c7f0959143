"""The files and the samples, against goldens of Megatron's format and against megatron-core itself."""

import json
import multiprocessing
import random

import numpy as np
import pytest

from nanomegatron.config.settings import DataConfig
from nanomegatron.data.gpt_dataset import (
    GPTDataset,
    MockGPTLowLevelDataset,
    build_datasets,
    build_sample_index,
    split_ranges,
)
from nanomegatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, best_dtype
from nanomegatron.data.tokenizer import build_tokenizer
from tests.megatron_data import assert_same, megatron, random_documents, write

GOLDEN_IDX = """
4d4d49444944580000 0100000000000000 08 0300000000000000 0400000000000000 030000000100000002000000
000000000000000006000000000000000800000000000000
0000000000000000010000000000000002000000000000000300000000000000
"""


def test_golden_bytes(tmp_path):
    write(tmp_path / "d", [[1, 2, 3], [4], [5, 6]])
    assert (tmp_path / "d.idx").read_bytes() == bytes.fromhex(GOLDEN_IDX)
    assert (tmp_path / "d.bin").read_bytes() == bytes.fromhex("010002000300040005000600")
    assert [best_dtype(n).name for n in (257, 65499, 65500)] == ["uint16", "uint16", "int32"]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint8, np.int64])
def test_same_files_as_megatron_both_ways(tmp_path, dtype):
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    documents = random_documents(1, 40, 30, empty=True)
    ours = write(tmp_path / "ours", documents, dtype)
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        builder.add_document(document, [len(document)] if len(document) else [])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    read = theirs.IndexedDataset(str(tmp_path / "ours"))
    assert len(read) == len(ours) == sum(len(d) > 0 for d in documents)
    for i in range(len(read)):
        np.testing.assert_array_equal(read[i], ours[i])
        np.testing.assert_array_equal(read.get(i, 0, 1), ours.get(i, 0, 1))
    np.testing.assert_array_equal(read.document_indices, ours.document_indices)


def test_get_stays_inside(tmp_path):
    data = write(tmp_path / "d", [[1, 2, 3], [4]])
    assert data.get(0, 1).tolist() == [2, 3] and data.get(0, 1, 1).tolist() == [2]
    for arguments in [(2,), (-1,), (0, 0, 4), (0, -1), (1, 2)]:
        with pytest.raises(IndexError):
            data.get(*arguments)


@pytest.mark.parametrize("tokens", [[70_000], [-1], [0.5]])
def test_no_token_is_narrowed(tmp_path, tokens):
    """numpy would make 4464 of 70000 without a word."""
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
        with pytest.raises(ValueError, match=f"token .*{int(tokens[0])} .* does not fit uint16"):
            builder.add_document(np.array(tokens))
    assert list(tmp_path.iterdir()) == []


def test_a_document_beyond_2_gib(tmp_path):
    """2^29 int32 tokens, a hole in a file; the document behind it is found."""
    with IndexedDatasetBuilder(tmp_path / "d", np.int32) as builder:
        builder._lengths.append(2**29)
        builder._documents.append(1)
        builder._bin.truncate(4 * 2**29)
        builder.add_document([7, 8])
        builder.finalize()
    data = IndexedDataset(tmp_path / "d")
    assert len(data[0]) == 2**29 and data[1].tolist() == [7, 8]


def test_interrupted_writer_leaves_the_old_pair(tmp_path):
    write(tmp_path / "d", [[1, 2]])
    with pytest.raises(KeyboardInterrupt), IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
        builder.add_document([3])
        raise KeyboardInterrupt
    assert IndexedDataset(tmp_path / "d")[0].tolist() == [1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_two_writers(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "d") as builder:
        with pytest.raises(ValueError, match="another process is writing it"):
            IndexedDatasetBuilder(tmp_path / "d")
        builder.add_document([1])
        builder.finalize()
    assert IndexedDataset(tmp_path / "d")[0].tolist() == [1]


def set_bytes(at, new):
    return lambda data: data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize(
    "change, message",
    [
        (set_bytes(0, b"X"), r"begins with b'XMIDIDX"),
        (set_bytes(9, b"\2"), "an index of version 1 begins with"),
        (set_bytes(17, b"\7"), "type code 7"),
        (set_bytes(18, b"\4"), "4 sequences and 4 document bounds take 114"),
        (set_bytes(25, b"\xff"), r"102 bytes; 183\d* sequences"),
        (set_bytes(34, b"\xff\xff\xff\xff"), "a sequence of -1 tokens"),
        (set_bytes(34, b"\4"), "sequence 1 begins at byte 6; the one before it ends at 8"),
        (set_bytes(42, b"\3"), "12 bytes; the last sequence in .* ends at byte 14"),
        (set_bytes(70, b"\1"), r"document bounds \[1\]\.\.\[3\]; they rise from 0 to the 3 sequences"),
        (lambda data: data[:33], "33 bytes; the header alone has 34"),
        (lambda data: data + b"\0", "103 bytes"),
        (lambda data: b"", "0 bytes"),
    ],
)
def test_wrong_index_is_named(tmp_path, change, message):
    write(tmp_path / "d", [[1, 2, 3], [4], [5, 6]])
    path = tmp_path / "d.idx"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        IndexedDataset(tmp_path / "d")
    assert str(tmp_path / "d") in str(error.value)


def test_golden_sample_index():
    lengths, documents = np.array([3, 5, 2, 7, 4], np.int32), np.array([3, 0, 4, 2, 1], np.int32)
    index = build_sample_index(lengths, documents, seq_length=4, samples=5)
    assert index.tolist() == [[0, 0], [0, 4], [1, 1], [2, 2], [4, 0], [4, 4]] and index.dtype == np.int32


def test_golden_samples(tmp_path):
    indexed = write(tmp_path / "d", random_documents(0, 50, 20))
    assert indexed.sequence_lengths[:5].tolist() == [13, 2, 15, 18, 1]
    assert indexed.sequence_lengths.sum() == 487
    parts = split_ranges("90,8,2", 50)
    train, valid, test = (
        GPTDataset(indexed, part, n, 16, 1234, tmp_path) for part, n in zip(parts, (100, 10, 2))
    )
    assert (len(train), len(valid), len(test)) == (112, 11, 2)
    assert train.document_index[:10].tolist() == [32, 18, 23, 4, 21, 6, 33, 29, 17, 40]
    assert train.sample_index[:5].tolist() == [[0, 0], [0, 16], [1, 13], [4, 11], [6, 7]]
    assert train.shuffle_index[:10].tolist() == [29, 71, 81, 78, 10, 12, 52, 57, 0, 15]
    assert train[0][:16].tolist() == [91, 51, 4, 53, 50, 92, 52, 19, 35, 52, 31, 54, 59, 44, 50, 88]


@pytest.mark.parametrize("case", range(24))
def test_same_samples_as_megatron(tmp_path, case):
    """Random sizes, seeds, lengths and epochs: one epoch, many, last epoch shuffled apart or not."""
    draw = random.Random(case)
    documents = random_documents(case, draw.choice([30, 80, 300]), draw.choice([3, 20, 90]))
    indexed = write(tmp_path / "d", documents)
    seq_length, seed = draw.choice([2, 5, 8, 16]), draw.randrange(10_000)
    split = draw.choice(["969,30,1", "80,15,5", "99.5,0.5,0", "1,1,1", "100"])
    parts = split_ranges(split, len(indexed))
    if any(p and p[0] == p[1] for p in parts):  # a part without sequences: Megatron would never return
        split, parts = "100", split_ranges("100", len(indexed))
    tokens = [int(indexed.sequence_lengths[slice(*p)].sum()) if p else 0 for p in parts]
    sizes = [max(1, int(draw.choice([0.3, 1, 1.1, 1.7, 1.9, 3.5]) * n / seq_length)) for n in tokens]
    theirs = megatron(tmp_path / "d", sizes, seq_length, seed, split)
    for part, wanted, reference in zip(parts, sizes, theirs):
        if part:
            assert_same(GPTDataset(indexed, part, wanted, seq_length, seed), reference)


def test_sequences_of_no_token(tmp_path):
    """Megatron's builder can write them; the first cut is at (0, 0) nevertheless."""
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "d.bin"), dtype=np.uint16)
    for n in [0, 5, 0, 0, 7, 3, 0, 9, 0]:
        builder.add_document(np.arange(n), [n])
    builder.finalize(str(tmp_path / "d.idx"))
    for seed in range(8):
        reference = megatron(tmp_path / "d", [20, 0, 0], 4, seed, "1,0,0")[0]
        assert_same(GPTDataset(IndexedDataset(tmp_path / "d"), (0, 9), 20, 4, seed), reference)


def test_both_kinds_of_last_epoch_are_met(tmp_path):
    """So that the comparison above is one: 40 % of an epoch is shuffled apart, 90 % is not."""
    indexed = write(tmp_path / "d", [range(1, 11)] * 20)
    for part, apart in ((0.4, True), (0.9, False)):
        data = GPTDataset(indexed, (0, 20), int((1 + part) * 25), 8, 0)
        first = set(data.shuffle_index[:24].tolist()) == set(range(24))
        assert len(data) == 49 and first == apart
        assert_same(data, megatron(tmp_path / "d", [int((1 + part) * 25), 0, 0], 8, 0, "1,0,0")[0])


def test_same_mock_data_as_megatron():
    mock = MockGPTLowLevelDataset(127, 126)
    assert mock.sequence_lengths[:6].tolist() == [3484, 2609, 2094, 1105, 1261, 168]
    sizes = (1000, 64, 8)
    data = DataConfig(mock_data=True, seq_length=512)
    ours = build_datasets(data, sizes, 1234, build_tokenizer("NullTokenizer", vocab_size=127))
    for mine, reference in zip(ours, megatron(None, sizes, 512, 1234, None)):
        assert_same(mine, reference)


def test_split_ranges():
    """969,30,1 is (0, .969)(.969, .999)(.999, 1) of the sequences, rounded."""
    assert split_ranges("969,30,1", 1000) == ((0, 969), (969, 999), (999, 1000))
    assert split_ranges("99,1,0", 150) == ((0, 148), (148, 150), None)
    assert split_ranges("2", 7) == ((0, 7), None, None) and split_ranges("2,1", 4)[0] == (0, 3)
    for wrong in ("", "a,b", "1,2,3,4", "0,0,0", "-1,2", "nan,1"):
        with pytest.raises(ValueError, match="such as 969,30,1"):
            split_ranges(wrong, 10)


def build_in_process(folder, results):
    indexed = IndexedDataset(folder / "d")
    data = GPTDataset(indexed, (0, 200), 3000, 8, 5, folder / "cache")
    results.put((data[17].tolist(), len(data)))


def test_cache_is_built_once(tmp_path):
    indexed = write(tmp_path / "d", random_documents(3, 200, 50))
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    ranks = [context.Process(target=build_in_process, args=(tmp_path, results)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    expected = GPTDataset(indexed, (0, 200), 3000, 8, 5)
    assert [results.get(timeout=60) for _ in ranks] == [(expected[17].tolist(), len(expected))] * 3
    for rank in ranks:
        rank.join(60)
    files = sorted(p.name.split("-")[-1] for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock")
    assert files == ["description.json", "document_index.npy", "sample_index.npy", "shuffle_index.npy"]
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").glob("*.npy")}
    GPTDataset(indexed, (0, 200), 3000, 8, 5, tmp_path / "cache")
    assert stamps == {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").glob("*.npy")}
    GPTDataset(indexed, (0, 200), 3000, 8, 6, tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 6


@pytest.mark.parametrize("suffix", [".npy", ".json"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b"",
        lambda b: b"\x80\x04N.",
        lambda b: b[:-3],
        lambda b: b[:-5] + bytes([b[-5] ^ 1]) + b[-4:],
    ],
    ids=["emptied", "a pickle, never opened", "cut", "one bit"],
)
def test_damaged_cache_is_built_again(tmp_path, damage, suffix):
    indexed = write(tmp_path / "d", random_documents(3, 50, 50))
    expected = [x.tolist() for x in GPTDataset(indexed, (0, 50), 90, 8, 5, tmp_path / "cache")]
    for path in (tmp_path / "cache").glob(f"*{suffix}"):
        path.write_bytes(damage(path.read_bytes()))
    again = GPTDataset(indexed, (0, 50), 90, 8, 5, tmp_path / "cache")
    assert [x.tolist() for x in again] == expected


def test_build_datasets_from_one_path_or_three(tmp_path):
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    indexed = write(tmp_path / "d", random_documents(4, 100, 30))
    one = DataConfig(data_path=(str(tmp_path / "d"),), split="80,20,0", seq_length=8)
    train, valid, test = build_datasets(one, (50, 5, 5), 7, tokenizer)
    assert test is None and list((tmp_path / "cache").glob("*.npy"))
    np.testing.assert_array_equal(train[3], GPTDataset(indexed, (0, 80), 50, 8, 7)[3])
    np.testing.assert_array_equal(valid[3], GPTDataset(indexed, (80, 100), 5, 8, 7)[3])
    assert build_datasets(one, (50, 0, 0), 7, tokenizer)[1:] == (None, None)
    three = DataConfig(
        train_data_path=one.data_path,
        test_data_path=one.data_path,
        seq_length=8,
        data_cache_path=str(tmp_path / "x"),
    )
    train, valid, test = build_datasets(three, (50, 5, 5), 7, tokenizer)
    assert valid is None and list((tmp_path / "x").glob("*.npy"))
    np.testing.assert_array_equal(test[3], GPTDataset(indexed, (0, 100), 5, 8, 7)[3])


@pytest.mark.parametrize(
    "settings, sidecar, message",
    [
        (dict(), None, "no data: give --data-path"),
        (
            dict(data_path=("1", "d", "d", "d")),
            None,
            "--data-path 1 d d d: a weight above 0 before every prefix",
        ),
        (dict(data_path=("gone",)), None, "gone.idx: no such file; run nanomegatron preprocess"),
        (dict(data_path=("d.bin",)), None, "the prefix is given without .bin or .idx"),
        (dict(data_path=("d",), split="x"), None, "--split x"),
        (dict(data_path=("d",), seq_length=4096), None, "train data: .* takes --seq-length . 1 = 4097"),
        (dict(data_path=("d",), split="100,1,0", seq_length=8), None, "valid data: 0 tokens"),
        (dict(data_path=("big",)), None, r"big: holds token 100; .* NullTokenizer is 0..99"),
        (dict(data_path=("negative",)), None, "negative: holds token -1"),
        (dict(data_path=("d",)), dict(fingerprint="other", max_token=5), "made with .*which gives other ids"),
        (dict(data_path=("d",)), dict(fingerprint="ours", max_token=100), "holds token 100"),
    ],
)
def test_errors_before_the_first_step(tmp_path, monkeypatch, settings, sidecar, message):
    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    if sidecar:
        sidecar = {**sidecar, "tokenizer": {"type": "Other"}}
        sidecar["fingerprint"] = sidecar["fingerprint"].replace("ours", tokenizer.fingerprint)
    write("d", [[5] * 30] * 40, sidecar=sidecar)
    write("big", [[5] * 30, [99, 100]])
    write("negative", [[5] * 30, [-1]], np.int32)
    settings = {"seq_length": 8, **settings}
    with pytest.raises(ValueError, match=message):
        build_datasets(DataConfig(**settings), (10, 1, 0), 0, tokenizer)


def test_sidecar_of_other_data(tmp_path):
    about = {"tokens": 2, "fingerprint": "", "max_token": 2, "tokenizer": {"type": "ByteTokenizer"}}
    write(tmp_path / "d", [[1, 2]], sidecar=about)
    assert IndexedDataset(tmp_path / "d").sidecar()["tokens"] == 2
    old = json.loads((tmp_path / "d.json").read_text())
    write(tmp_path / "d", [[1, 2, 3]])
    assert IndexedDataset(tmp_path / "d").sidecar() is None
    (tmp_path / "d.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match="written for other data"):
        IndexedDataset(tmp_path / "d").sidecar()


def test_multimodal_data(tmp_path):
    """Megatron's index with a mode of each sequence: text alone is read, other modes are refused by name."""
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    documents = random_documents(1, 20, 30)
    for mode in 0, 1:
        prefix = f"{tmp_path}/{mode}"
        builder = theirs.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32, multimodal=True)
        for i, document in enumerate(documents):
            builder.add_document(document, [len(document)], [mode * (i == 7)])
        builder.finalize(f"{prefix}.idx")
    data = IndexedDataset(tmp_path / "0")
    assert all(np.array_equal(data[i], document) for i, document in enumerate(documents))
    said = r"1\.idx: Megatron's multimodal data, with .* modes \[0, 1\]; only text"
    with pytest.raises(ValueError, match=said):
        IndexedDataset(tmp_path / "1")

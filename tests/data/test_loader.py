"""Batches: what they hold, against megatron-core, and in which order, whatever processes and threads."""

import dataclasses
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanomegatron.config.settings import DataConfig
from nanomegatron.data.gpt_dataset import GPTDataset, MockGPTLowLevelDataset, build_datasets
from nanomegatron.data.loader import BatchLoader, load_batch
from nanomegatron.data.tokenizer import build_tokenizer
from tests.megatron_data import FLAGS, megatron, write

EOD = 126


def dataset(tmp_path, count=10):
    return GPTDataset(write(tmp_path / "d", [np.arange(1 + 4 * count)]), (0, 1), None, 4, 0)


def axis(rank=0, size=1):
    return SimpleNamespace(rank=rank, size=size)


def loader(data, settings=None, dp=None, **kwargs):
    return BatchLoader(
        data, settings or DataConfig(seq_length=4, **kwargs), EOD, dp or axis(), torch.device("cpu")
    )


def test_batches(tmp_path):
    data = dataset(tmp_path)
    batch = load_batch(data, np.array([8, 9, 10, 21]), DataConfig(), EOD).to("cpu")
    samples = np.stack([data[i] for i in (8, 9, 0, 1)])
    np.testing.assert_array_equal(batch.tokens, samples[:, :-1])
    np.testing.assert_array_equal(batch.labels, samples[:, 1:])
    assert batch.sample_ids.tolist() == [8, 9, 10, 21] and batch.positions.tolist() == [0, 1, 2, 3]
    assert batch.loss_mask.dtype == torch.float32 and batch.loss_mask.sum() == 16
    assert {batch.tokens.dtype, batch.labels.dtype, batch.positions.dtype, batch.sample_ids.dtype} == {
        torch.int64
    }
    assert batch.position_ids is batch.cu_seqlens is batch.max_seqlen is None
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    single = DataConfig(dataloader_type="single")
    assert load_batch(data, np.array([9]), single, EOD).sample_ids.tolist() == [9]
    with pytest.raises(ValueError, match="sample 10 of 10: the data is at its end"):
        load_batch(data, np.array([9, 10]), single, EOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.tokens = None


def documents_with_ends(seed):
    """They end with EOD; some hold it inside, some are nothing else, some are longer than a sample."""
    state = np.random.RandomState(seed)
    documents = [state.randint(1, 100, state.choice([0, 1, 2, 5, 17, 40])) for _ in range(50)]
    return [np.append(np.where(state.random(len(d)) < 0.05, EOD, d), EOD) for d in documents]


def flags_of(number):
    return {name: bool(number >> i & 1) for i, name in enumerate(FLAGS)}


def attention_mask(batch, row):
    """[s, s], True where a query may not look, spread out from the batch's cumulative lengths."""
    s = batch.tokens.shape[1]
    document = np.repeat(np.arange(len(batch.cu_seqlens) - 1), np.diff(batch.cu_seqlens))
    document = document.reshape(batch.tokens.shape)[row]
    allowed = np.tril(np.ones((s, s), bool)) & (document[:, None] == document[None, :])
    return ~allowed


def compare(batch, theirs, first, flags):
    for row in range(len(batch.tokens)):
        sample = theirs[first + row]
        np.testing.assert_array_equal(batch.tokens[row], sample["tokens"])
        np.testing.assert_array_equal(batch.labels[row], sample["labels"])
        np.testing.assert_array_equal(batch.loss_mask[row], sample["loss_mask"])
        ids = batch.position_ids[row] if flags["reset_position_ids"] else batch.positions
        np.testing.assert_array_equal(ids, sample["position_ids"])
        if flags["reset_attention_mask"]:
            np.testing.assert_array_equal(attention_mask(batch, row), sample["attention_mask"][0])


def batches_with_flags(tmp_path, flags, seed=3):
    prefix = tmp_path / "d"
    data = GPTDataset(write(prefix, documents_with_ends(seed)), (0, 50), 150, 12, seed)
    theirs = megatron(prefix, [150, 0, 0], 12, seed, "1", create_attention_mask=True, **flags)[0]
    settings = DataConfig(seq_length=12, micro_batch_size=3, num_workers=0, **flags)
    read = loader(data, settings)
    return [read.get(i) for i in range(0, 150, 3)], theirs


@pytest.mark.parametrize("number", range(8))
def test_same_masks_and_positions_as_megatron(tmp_path, number):
    flags = flags_of(number)
    batches, theirs = batches_with_flags(tmp_path, flags)
    for i, batch in enumerate(batches):
        compare(batch, theirs, 3 * i, flags)
        assert (batch.position_ids is not None) == flags["reset_position_ids"]
        if flags["reset_attention_mask"]:
            lengths = np.diff(batch.cu_seqlens)
            assert batch.cu_seqlens.dtype == torch.int32 and lengths.min() > 0
            assert batch.max_seqlen == lengths.max() <= 12 and lengths.sum() == 36
            assert {0, 12, 24, 36} <= set(batch.cu_seqlens.tolist())


@pytest.mark.parametrize(
    "change",
    [
        lambda b: dataclasses.replace(b, labels=b.labels.roll(1, 1)),
        lambda b: dataclasses.replace(b, loss_mask=b.loss_mask.roll(1, 1)),
        lambda b: dataclasses.replace(b, position_ids=b.position_ids.roll(1, 1)),
        lambda b: dataclasses.replace(b, cu_seqlens=(b.cu_seqlens - 1).clamp(min=0)),
        lambda b: dataclasses.replace(b, cu_seqlens=b.cu_seqlens[[0, -1]]),
    ],
    ids=["labels", "loss mask", "positions", "documents moved", "one document"],
)
def test_the_comparison_sees(tmp_path, change):
    batches, theirs = batches_with_flags(tmp_path, flags_of(7))
    with pytest.raises((AssertionError, ValueError)):
        for i, batch in enumerate(batches):
            compare(change(batch), theirs, 3 * i, flags_of(7))


def test_golden_documents():
    """Rows 5 9 E 7 | E E 3 4: every row starts a document, and an EOD belongs to what it ends."""
    rows = np.array([[5, 9, EOD, 7, 1], [EOD, EOD, 3, 4, 1]])
    batch = load_batch(rows, np.arange(2), DataConfig(**flags_of(7)), EOD)
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 5, 6, 8] and batch.max_seqlen == 3
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 0, 0, 1]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("dp, micro", [(1, 1), (1, 4), (2, 2), (4, 1), (8, 1)])
def test_every_sample_once_whatever_dp(tmp_path, dp, micro, workers):
    """Consumed 24: any number of processes and threads reads the same 32 in order, over the data's end."""
    data = dataset(tmp_path)
    loaders = [loader(data, dp=axis(r, dp), micro_batch_size=micro, num_workers=workers) for r in range(dp)]
    batches = [read.get(first) for first in range(24, 56, dp * micro) for read in loaders]
    assert torch.cat([b.sample_ids for b in batches]).tolist() == list(range(24, 56))
    expected = np.stack([data[i % 10] for i in range(24, 56)])
    np.testing.assert_array_equal(torch.cat([b.tokens for b in batches]), expected[:, :-1])
    np.testing.assert_array_equal(torch.cat([b.labels for b in batches]), expected[:, 1:])
    for read in loaders:
        read.close()


def test_resume_at_another_dp_and_batch_size(tmp_path):
    """Two ranks, batches of 4 and then 8, four ranks from there: nothing twice, nothing lost."""
    data, seen = dataset(tmp_path, 40), []
    for start, stop, dp, micro in [(0, 16, 2, 2), (16, 24, 2, 4), (24, 40, 4, 1)]:
        loaders = [loader(data, dp=axis(r, dp), micro_batch_size=micro) for r in range(dp)]
        seen += [read.get(i).tokens for i in range(start, stop, dp * micro) for read in loaders]
        for read in loaders:
            read.close()
    straight = loader(data, num_workers=0)
    np.testing.assert_array_equal(torch.cat(seen), torch.cat([straight.get(i).tokens for i in range(40)]))


def test_starts_over_where_it_is_asked(tmp_path):
    data = dataset(tmp_path)
    read = loader(data, num_workers=2)
    order = [0, 1, 2, 7, 8, 0, 0, 5, 6, 7]
    assert [read.get(i).sample_ids.item() for i in order] == order
    read.close()


class Slow:
    """A dataset that counts who reads it, and has one sample that cannot be read."""

    def __init__(self, bad=None):
        self.bad, self.threads, self.read = bad, set(), []

    def __len__(self):
        return 50

    def __getitem__(self, i):
        self.threads.add(threading.current_thread().name)
        self.read.append(i)
        if i == self.bad:
            raise OSError(5, f"sample {i} cannot be read")
        return np.full(5, i)


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_arrive_unchanged(workers):
    """At the sample that has them, not before; and those behind it can still be had."""
    read = loader(Slow(bad=3), num_workers=workers)
    assert [read.get(i).tokens[0, 0].item() for i in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="sample 3 cannot be read") as error:
            read.get(3)
        assert error.value.errno == 5
    assert read.get(4).tokens[0, 0].item() == 4
    read.close()


def test_the_end_of_the_data_is_not_met_by_reading_ahead():
    read = loader(Slow(), dataloader_type="single", num_workers=2)
    assert [read.get(i).sample_ids.item() for i in range(45, 50)] == [45, 46, 47, 48, 49]
    with pytest.raises(ValueError, match="sample 50 of 50: the data is at its end"):
        read.get(50)
    read.close()


def test_reads_ahead_in_threads_that_end():
    before = set(threading.enumerate())
    data = Slow()
    read = loader(data, num_workers=2)
    read.get(0)
    read.close()
    assert set(threading.enumerate()) == before
    assert data.read and "MainThread" not in data.threads and set(data.read) <= set(range(5))
    data = Slow()
    read = loader(data, num_workers=0)
    read.get(0)
    assert data.threads == {"MainThread"} and data.read == [0]
    read.close()


def test_mock_data_through_the_loader():
    settings = DataConfig(mock_data=True, seq_length=64, micro_batch_size=2, **flags_of(7))
    data = build_datasets(settings, (100, 0, 0), 5, build_tokenizer("NullTokenizer", vocab_size=127))[0]
    assert isinstance(data.indexed, MockGPTLowLevelDataset)
    read = loader(data, settings)
    for i in range(0, 100, 2):
        batch = read.get(i)
        np.testing.assert_array_equal(batch.tokens[1], data[i + 1][:-1])
        assert (batch.loss_mask == 0).sum() == (batch.tokens == EOD).sum()
    read.close()


def test_a_token_out_of_the_vocabulary_stops_the_run(tmp_path):
    """The file was checked when the run began; a later change is named, before a GPU fails."""
    write(tmp_path / "d", [[5] * 400])
    settings = DataConfig(data_path=(str(tmp_path / "d"),), split="1", seq_length=8)
    data = build_datasets(settings, (10, 0, 0), 0, build_tokenizer("NullTokenizer", vocab_size=100))[0]
    with open(tmp_path / "d.bin", "r+b") as file:
        file.write((300).to_bytes(2, "little"))
    read = loader(data, settings)
    with pytest.raises(
        ValueError, match=r"d.bin: tokens 5..300 in sample \d+, beyond .* 0..99: the file has"
    ):
        for i in range(len(data)):
            read.get(i)
    read.close()

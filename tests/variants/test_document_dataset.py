"""Whole documents as samples, and packs of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import long_tail
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import Config, DataConfig, ParallelConfig
from nanomegatron.data.gpt_dataset import build_datasets
from nanomegatron.data.indexed_dataset import IndexedDataset
from nanomegatron.data.tokenizer import build_tokenizer
from nanomegatron.pick_variants import batch_sharding, pick_dataset
from nanomegatron.variants.document_dataset import DocumentDataset
from nanomegatron.variants.document_packs import PackLoader, load_pack
from tests.megatron_data import random_documents, write

TOKENIZER = build_tokenizer("NullTokenizer", vocab_size=126)
EOD = TOKENIZER.eod


def documents_with_ends(seed, count, longest):
    return [np.append(document, EOD) for document in random_documents(seed, count, longest, empty=True)]


def dataset(tmp_path, documents, num_samples=None, seq_length=10, seed=5, **kwargs):
    indexed = write(tmp_path / "d", documents)
    return DocumentDataset(indexed, (0, len(indexed)), num_samples, seq_length, seed, **kwargs)


def pairs(document):
    return list(zip(document[:-1].tolist(), document[1:].tolist()))


def test_each_token_is_predicted_once_an_epoch(tmp_path):
    """Token and label, in their places: documents of 1 to 45 tokens in samples of up to ten."""
    documents = documents_with_ends(1, 80, 45)
    data = dataset(tmp_path, documents)
    expected = sorted(pair for document in documents for pair in pairs(document))
    assert sorted(pair for i in range(len(data)) for pair in pairs(data[i])) == expected
    lengths = [data.length(i) for i in range(len(data))]
    assert lengths == [len(data[i]) - 1 for i in range(len(data))]
    assert min(lengths) >= 1 and max(lengths) == 10
    assert len(data) == sum(-(-(len(d) - 1) // 10) for d in documents)
    assert all(data[i][-1] == EOD for i in range(len(data)) if lengths[i] < 10)


def test_epochs(tmp_path):
    """Every one has each sample once, in an order of its own, which more epochs behind it do not change."""
    documents = documents_with_ends(2, 30, 25)
    one, many = dataset(tmp_path, documents), dataset(tmp_path, documents, 100)
    n = len(one)
    assert len(many) == -(-100 // n) * n >= 100
    epochs = many.shuffle_index.reshape(-1, n)
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs.tolist())
    assert not np.array_equal(epochs[0], epochs[1])
    np.testing.assert_array_equal(one.shuffle_index, epochs[0])
    other = dataset(tmp_path, documents, seed=6)
    assert not np.array_equal(one.shuffle_index, other.shuffle_index)


def test_caches(tmp_path):
    documents = documents_with_ends(3, 30, 25)
    fresh, kept = dataset(tmp_path, documents, 50), tmp_path / "cache"
    for _ in range(2):
        cached = dataset(tmp_path, documents, 50, cache_folder=kept)
        np.testing.assert_array_equal(cached.shuffle_index, fresh.shuffle_index)
        np.testing.assert_array_equal(cached.ends, fresh.ends)
    assert len(list(kept.glob("*.npy"))) == 2
    dataset(tmp_path, documents, 50, seq_length=9, cache_folder=kept)
    dataset(tmp_path, documents, 50, seed=6, cache_folder=kept)
    assert len(list(kept.glob("*.npy"))) == 6


def test_errors(tmp_path):
    with pytest.raises(ValueError, match=r"d: no document of two tokens or more in sequences 0\.\.2"):
        dataset(tmp_path, [[3], [4]])
    data = dataset(tmp_path, [[3, 4, 5]])
    for i in (-1, 1):
        with pytest.raises(IndexError, match=f"sample {i} of 1"):
            data[i]
    data.indexed.vocab_size = 4
    with pytest.raises(ValueError, match=r"tokens 3\.\.5 in sample 0, beyond the vocabulary's 0\.\.3"):
        data[0]


def settings(path, **kwargs):
    return DataConfig(data_path=path, variable_seq_lengths=True, seq_length=10, **kwargs)


def test_splits_and_blends(tmp_path):
    """Parts of a file do not overlap; a blend has documents of both, and knows their lengths."""
    for name, seed in (("a", 1), ("b", 2)):
        write(tmp_path / name, documents_with_ends(seed, 100, 25))
    a, b = (str(tmp_path / name) for name in "ab")
    one = build_datasets(settings((a,), split="50,50"), (10, 10, 0), 1, TOKENIZER, kind=DocumentDataset)
    assert isinstance(one[0], DocumentDataset) and one[2] is None
    assert (one[0].sequences, one[1].sequences) == ((0, 50), (50, 100))
    both = settings(("0.3", a, "0.7", b), split="1")
    with pytest.raises(ValueError, match="give build_datasets the kind that pick_dataset returns"):
        build_datasets(both, (200, 0, 0), 1, TOKENIZER)
    (blend, *_) = build_datasets(both, (200, 0, 0), 1, TOKENIZER, kind=pick_dataset(both))
    assert len(blend) == 200 and blend.taken.tolist() == [60, 140]
    assert all(blend.length(i) == len(blend[i]) - 1 for i in range(200))


def test_golden_pack():
    """Two documents and two tokens of padding."""
    texts = [np.array([5, 6, 7, EOD]), np.array([8, EOD])]
    batch = load_pack(texts, np.array([30, 4]), 6, 100)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 0, 0]]
    assert batch.labels.tolist() == [[6, 7, EOD, EOD, 0, 0]]
    assert batch.loss_mask.tolist() == [[1, 1, 1, 1, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert batch.positions.tolist()[:4] == [3000, 3001, 3002, 400]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6] and batch.max_seqlen == 3
    full = load_pack(texts, np.array([30, 4]), 4, 100)
    assert full.cu_seqlens.tolist() == [0, 3, 4]
    padding = load_pack([], np.array([], np.int64), 4, 100)
    assert padding.cu_seqlens.tolist() == [0, 4] and padding.loss_mask.sum() == 0
    longer = load_pack([], np.array([], np.int64), 16, 10)
    assert longer.position_ids.max() == 9, "padding stays inside of what positions are learned for"


class Neighbours(SimpleNamespace):
    """The place of a rank on an axis of cp, as much of it as a loader asks for."""

    def neighbours(self, size):
        return Neighbours(size=size, rank=self.rank % size)


def loaders_of(data, dp, cp, count=8, **kwargs):
    """One for each rank."""
    parallel = ParallelConfig(
        context_parallel_size=cp, data_parallel_size=dp, dynamic_context_parallel=kwargs.pop("dynamic", False)
    )
    shape = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    config = Config(
        model=shape,
        parallel=parallel,
        data=DataConfig(variable_seq_lengths=True, seq_length=10, global_batch_size=count, **kwargs),
    )
    for rank in range(dp * cp):
        place = SimpleNamespace(rank=rank, size=dp * cp)
        mesh = SimpleNamespace(
            device=torch.device("cpu"), dp_cp=place, cp=Neighbours(rank=rank % cp, size=cp)
        )
        yield PackLoader(data, config, EOD, mesh, 128, batch_sharding(config, mesh.device))


def seen(batches):
    """(sample and place in it, token, label) of all that counts."""
    found = []
    for b in batches:
        columns = (b.positions[None], b.position_ids, b.tokens, b.labels)
        found += zip(*(x[b.loss_mask > 0].tolist() for x in columns))
    return sorted(found)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dp, cp, dynamic", [(1, 2, False), (3, 1, False), (1, 4, True), (2, 2, True)])
def test_ranks_together_read_what_one_reads(tmp_path, dp, cp, dynamic, workers):
    """Two epochs and a half, over the end of the data: each token of a batch on one rank and only there."""
    data = dataset(tmp_path, documents_with_ends(4, 12, 25))
    (alone,) = loaders_of(data, 1, 1)
    ranks = list(loaders_of(data, dp, cp, dynamic=dynamic, num_workers=workers))
    for first in range(0, 5 * len(data) // 2, 8):
        expected = seen(alone.batches(first, 8))
        batches = [batch for rank in ranks for batch in rank.batches(first, 8)]
        assert seen(batches) == expected
        assert len(expected) == sum(alone.lengths(first, 8))
        for batch in batches:
            assert len(batch.positions) <= max(10 // cp + 2, 2)
    for loader in (alone, *ranks):
        loader.close()


def test_starts_where_it_is_asked_and_reads_ahead(tmp_path):
    """Another place or batch size than was foreseen is as good."""
    data = dataset(tmp_path, documents_with_ends(4, 40, 25))
    (ahead,), (plain,) = loaders_of(data, 1, 1), loaders_of(data, 1, 1, num_workers=0)
    for first, count in [(0, 4), (4, 4), (8, 6), (14, 6), (0, 4), (0, 4)]:
        assert seen(ahead.batches(first, count)) == seen(plain.batches(first, count))
    ahead.close()


def test_end_of_document_tokens_and_the_end_of_the_data(tmp_path):
    data = dataset(tmp_path, [[3, EOD, 4, EOD], [5, 6]])
    (loader,) = loaders_of(data, 1, 1, eod_mask_loss=True, dataloader_type="single")
    assert sum(int(batch.loss_mask.sum()) for batch in loader.batches(0, 2)) == 3
    with pytest.raises(ValueError, match="sample 2 of 2: the data is at its end"):
        loader.batches(2, 1)
    loader.close()


def test_the_long_tail_collection(tmp_path):
    """Written as it is described, and the first of more are the same."""
    lengths = long_tail.draw_lengths(50, 2000)
    assert lengths.tolist() == long_tail.draw_lengths(9000, 2000)[:50].tolist()
    assert lengths.min() >= 16 and lengths.max() <= 2000 and 500 < np.median(lengths) < 1500
    long_tail.write(tmp_path, lengths)
    data = IndexedDataset(tmp_path / "documents")
    assert data.sequence_lengths.tolist() == [length + 1 for length in lengths]
    assert all(document[-1] == 256 and document[:-1].max() < 256 for document in data)

"""A run that is made longer keeps the order of its data: samples are added behind, in whole epochs."""

import functools
from collections import Counter

import numpy as np
import pytest

from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.checkpoint.source import data_samples
from nanomegatron.config.cli import to_toml
from nanomegatron.config.settings import CheckpointConfig, Config, DataConfig, RunConfig
from nanomegatron.data.blended_dataset import BlendedDataset
from nanomegatron.data.gpt_dataset import GPTDataset, build_datasets
from nanomegatron.data.tokenizer import build_tokenizer
from nanomegatron.pick_variants import pick_dataset
from nanomegatron.report.banner import epochs_text
from tests.checkpoints import ALONE, cuts, save, save_alone
from tests.megatron_data import random_documents, write

TOKENIZER = build_tokenizer("NullTokenizer", vocab_size=127)


def texts(data, count):
    return np.stack([data[i] for i in range(count)]).tolist()


@pytest.mark.parametrize("counts", [(60, 100), (60, 100, 150), (30, 31, 300), (60, 61, 62, 63, 260)])
def test_samples_are_added_behind(tmp_path, counts):
    """Of 36 or 37 an epoch: each run begins with all samples of the one before."""
    indexed = write(tmp_path / "d", random_documents(0, 30, 20))
    before = GPTDataset(indexed, (0, 30), counts[0], 8, 1234)
    assert texts(before, counts[0]) != texts(GPTDataset(indexed, (0, 30), counts[-1], 8, 1234), counts[0])
    for i in range(1, len(counts)):
        data = GPTDataset(indexed, (0, 30), counts[i], 8, 1234, tmp_path / "cache", before=counts[:i])
        assert len(data) >= max(counts[i], len(before))
        assert texts(data, len(before)) == texts(before, len(before))
        before = data
    shorter = GPTDataset(indexed, (0, 30), counts[0], 8, 1234, before=counts)
    assert texts(shorter, len(before)) == texts(before, len(before))


def test_what_is_added_is_whole_epochs_in_an_order_of_its_own(tmp_path):
    indexed = write(tmp_path / "d", random_documents(0, 30, 20))
    once = len(GPTDataset(indexed, (0, 30), None, 8, 7))
    first = GPTDataset(indexed, (0, 30), 2 * once, 8, 7)
    assert GPTDataset(indexed, (0, 30), None, 8, 7).epochs == 1 and first.epochs == 2
    assert [epochs_text(data) for data in (first, object())] == [" (2 epochs)", ""]
    both = GPTDataset(indexed, (0, 30), 4 * once, 8, 7, before=(2 * once,))
    added = both.document_index[len(first.document_index) :]
    assert set(Counter(added.tolist()).values()) == {len(added) // 30}
    assert added[: len(first.document_index)].tolist() != first.document_index[: len(added)].tolist()
    cuts_of_each = both.shuffle_index[: len(first)], both.shuffle_index[len(first) :]
    assert sorted(cuts_of_each[0]) == list(range(len(first)))
    assert sorted(cuts_of_each[1]) == list(range(len(first) + 1, len(both) + 1))  # a cut ends the first line
    where = [both.sample_index[cut] for cut in cuts_of_each[1]]
    assert all(len(first.document_index) <= place < len(both.document_index) for place, _ in where)
    once_more = GPTDataset(indexed, (0, 30), 4 * once, 8, 8, before=(2 * once,))
    assert once_more.document_index.tolist() != both.document_index.tolist()


WAYS = {
    "blend": dict(data_path=("0.7", "a", "0.3", "b")),
    "many": dict(data_path=tuple(w for i in range(12) for w in (("5" if i else "100"), "ab"[i % 2]))),
    "sizes": dict(data_path=("a", "b")),
    "documents": dict(data_path=("a",), variable_seq_lengths=True),
    "documents, blend": dict(data_path=("2", "a", "1", "b"), variable_seq_lengths=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_data_is_made_longer(tmp_path, monkeypatch, way):
    """Blends too, each of whose data sets is made longer, and documents."""
    monkeypatch.chdir(tmp_path)
    for name, seed in (("a", 1), ("b", 2)):
        write(name, random_documents(seed, 30, 20))
    data, held, counts = DataConfig(seq_length=8, split="90,10", **WAYS[way]), (5, 0), (60, 100, 400)
    seen, held_out = [], []
    for i in range(3):
        built = build_datasets(data, (counts[i], *held), 3, TOKENIZER, counts[:i], pick_dataset(data))
        seen.append([built[0][k % len(built[0])].tolist() for k in range(counts[i])])
        held_out.append([built[1][k].tolist() for k in range(5)])
    assert seen[1][:60] == seen[0] and seen[2][:100] == seen[1]
    assert held_out[0] == held_out[1] == held_out[2]


class Lines:
    """A data set of exactly as many samples as asked for, each known by what was asked for before it."""

    def __init__(self, name, *asked):
        self.samples, made = [], 0
        for i, count in enumerate(asked):
            self.samples += [(name, asked[:i], n) for n in range(made, count)]
            made = max(made, count)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i]


def test_a_blend_that_asked_again_is_made_longer():
    """Rounding up of forty weights takes more than half a percent on top, of either run."""
    build = [functools.partial(Lines, i) for i in range(40)]
    weights = [1.0] + [1e-6] * 39
    short = BlendedDataset(build, weights, 100)
    longer = BlendedDataset(build, weights, 300, None, (100,))
    assert [longer[i] for i in range(len(short))] == [short[i] for i in range(len(short))]
    assert len({longer[i] for i in range(len(longer))}) == len(longer) >= 300


def configuration(folder, **changes):
    data = DataConfig(data_path=("d",), seq_length=changes.pop("seq_length", 8), global_batch_size=4)
    run = RunConfig(eval_only=changes.pop("eval_only", False), train_iters=changes.pop("train_iters", None))
    return Config(data=data, run=run, checkpoint=CheckpointConfig(save=str(folder), **changes))


def test_the_counts_of_the_checkpoint_to_go_on_from(tmp_path):
    """The newest one's whose manifest can be read; a run that takes only weights begins a new order."""
    here, there, log = tmp_path / "here", tmp_path / "there", []
    assert data_samples(configuration(here), ALONE, log.append, 60) == [60]
    for step, counts in ((1, [60]), (2, [60, 100])):
        save(
            there,
            step,
            cuts(step),
            {"consumed_samples": 9, "data_samples": counts},
            to_toml(configuration(here)),
            ALONE,
        )
    found = [data_samples(configuration(here, load=str(there)), ALONE, log.append, n) for n in (80, 100, 150)]
    assert found == [[60, 100], [60, 100], [60, 100, 150]]
    assert data_samples(configuration(here, load=str(there), ckpt_step=1), ALONE, log.append, 150) == [
        60,
        150,
    ]
    for begin in (dict(finetune=True), dict(eval_only=True)):
        assert data_samples(configuration(here, load=str(there), **begin), ALONE, log.append, 150) == [150]
    assert data_samples(configuration(there, finetune=True), ALONE, log.append, 150) == [60, 100, 150]
    (there / "iter_0000002/manifest.json").write_text("{")
    assert data_samples(configuration(there), ALONE, log.append, 150) == [60, 150]
    assert log == []


@pytest.mark.parametrize("numbers", [None, "ab", ["a"], [[1]], [-5], [1.5], [True], {}])
def test_what_are_no_numbers_of_samples(tmp_path, numbers):
    """A stranger's checkpoint may be wrong, but is no traceback."""
    state = {"consumed_samples": 4, "data_samples": numbers}
    save(tmp_path / "bad", 1, cuts(1), state, to_toml(configuration(tmp_path)), ALONE)
    with pytest.raises(CheckpointError, match="bad: data_samples .* are not numbers of samples"):
        data_samples(configuration(tmp_path / "bad"), ALONE, print, 60)


def test_an_order_that_cannot_be_kept_is_said(tmp_path):
    log = []
    save_alone(tmp_path / "old", 1)
    assert data_samples(configuration(tmp_path / "old"), ALONE, log.append, 100) == [100]
    assert len(log) == 1 and "old does not say how many samples" in log[0]
    settings = to_toml(configuration(tmp_path))
    save(tmp_path / "other", 1, cuts(1), {"consumed_samples": 9, "data_samples": [60]}, settings, ALONE)
    changed = configuration(tmp_path, load=str(tmp_path / "other"), seq_length=16)
    assert data_samples(changed, ALONE, log.append, 100) == [60, 100]
    assert len(log) == 2 and "--seq-length: " in log[1] and "other was made with another" in log[1]
    save(tmp_path / "new", 0, cuts(0), {"consumed_samples": 0}, "", ALONE)
    assert data_samples(configuration(tmp_path / "new"), ALONE, log.append, 100) == [100] and len(log) == 2

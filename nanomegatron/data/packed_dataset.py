"""Whole documents as samples, and packs of them as microbatches: --variable-seq-lengths.

    document   t0 t1 t2 t3 t4 t5 t6        seven tokens, --seq-length 4
    sample     t0 t1 t2 t3                 labels t1 t2 t3 t4
                           t4 t5           labels t5 t6

A document longer than --seq-length is cut into several samples. Its last token is only a label; a document of
one token is no sample. A global batch takes samples in the order of the run, which depends only on seed and
consumed samples: every epoch has each sample once, in a different order.

Documents are assigned to ranks for each batch (`data/packing.py`) by their lengths, which are in the index:
every rank knows all lengths, and reads only the documents of its own packs. In a pack positions restart at
each document, attention does not cross documents, and the rest of the row is a document of padding, which has
no loss. End-of-document tokens inside a document have no effect.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanomegatron.batch import Batch
from nanomegatron.config.settings import Config
from nanomegatron.data.cache import cached_arrays
from nanomegatron.data.loader import Prefetching, numbers
from nanomegatron.data.packing import Pack, Ranks, cost, plan
from nanomegatron.data.samples import Samples
from nanomegatron.mesh import Axis, Mesh


class DocumentDataset(Samples):
    """Samples of up to `seq_length` tokens from the sequences [start, stop) of an indexed dataset."""

    def __init__(
        self,
        indexed: Any,
        sequences: tuple[int, int],
        num_samples: int | None,
        seq_length: int,
        seed: int,
        cache_folder: str | Path | None = None,
        before: Sequence[int] = (),
    ) -> None:
        """Arguments as of `GPTDataset`; `before` has no effect: further epochs do not change the order.

        Raises ValueError if no sequence has two tokens.
        """
        self.indexed, self.sequences, self.seq_length = indexed, sequences, seq_length
        self.lengths = indexed.sequence_lengths[slice(*sequences)]
        pieces = -(-np.maximum(self.lengths.astype(np.int64) - 1, 0) // seq_length)
        once = int(pieces.sum())
        if not once:
            raise ValueError(
                f"{indexed.prefix}: no document of two tokens or more in sequences "
                f"{sequences[0]}..{sequences[1]}"
            )
        epochs = max(1, -(-(num_samples or 1) // once))
        facts = dict(
            lengths=indexed.identity,
            sequences=sequences,
            whole_documents=True,
            seq_length=seq_length,
            seed=seed,
            epochs=epochs,
        )
        self.ends, self.shuffle_index = cached_arrays(
            cache_folder,
            ("sample_ends", "sample_order"),
            facts,
            lambda: (pieces.cumsum(), _epochs(once, epochs, seed)),
        )

    def _place(self, i: int) -> tuple[int, int, int]:
        """Return for sample i: its sequence, its offset there, and its tokens without the last label."""
        sample = int(self.shuffle_index[i])
        place = int(np.searchsorted(self.ends, sample, side="right"))
        offset = (sample - int(self.ends[place - 1]) * (place > 0)) * self.seq_length
        return self.sequences[0] + place, offset, min(self.seq_length, int(self.lengths[place]) - 1 - offset)

    def length(self, i: int) -> int:
        """The number of tokens of sample i, which equals that of its labels."""
        return self._place(i)[2]

    def tokens(self, i: int) -> np.ndarray:
        """The i-th sample, int64 [length + 1]."""
        sequence, offset, length = self._place(i)
        return self.indexed.get(sequence, offset, length + 1).astype(np.int64)


def _epochs(samples: int, epochs: int, seed: int) -> np.ndarray:
    """Concatenate `epochs` random permutations of range(samples)."""
    random = np.random.RandomState(seed)
    kind = np.uint32 if samples < 2**32 else np.int64
    return np.concatenate([random.permutation(samples).astype(kind) for _ in range(epochs)])


class PackLoader(Prefetching):
    """One rank's packs of global batches, on its device; a thread prefetches the next batch."""

    def __init__(
        self,
        dataset: Any,
        config: Config,
        eod: int,
        mesh: Mesh,
        padded_vocab_size: int,
        shard: Callable[[Batch, Axis], Batch],
    ) -> None:
        """config: resolved. dataset: a DocumentDataset, or a blend of them. shard: cuts packs over ranks."""
        super().__init__(min(1, config.data.num_workers), 1)
        self._dataset, self._data, self._shard = dataset, config.data, shard
        self._eod, self._mesh = eod, mesh
        self._cost = partial(cost, config.model, padded_vocab_size)
        self.ranks = Ranks.from_config(config)

    def batches(self, first_sample: int, count: int) -> list[Batch]:
        """Return this rank's packs of `count` documents from `first_sample` on.

        Waits for the thread that reads them; raises its error, ConfigError past the end of the data.
        """
        return [batch.to(self._mesh.device) for batch in self.take(first_sample, count)]

    def lengths(self, first_sample: int, count: int) -> list[int]:
        """Tokens of each of these documents. Raises ConfigError past the end of the data."""
        ids = np.arange(first_sample, first_sample + count)
        return [self._dataset.length(i) for i in numbers(self._dataset, ids, self._data)]

    def plan(self, first_sample: int, count: int) -> list[Pack]:
        """Return the packs of all ranks for these documents."""
        lengths = self.lengths(first_sample, count)
        return plan(lengths, [*map(self._cost, lengths)], self.ranks)

    def read(self, first_sample: int, count: int) -> list[Batch]:
        """Read the packs of this rank."""
        mine = [pack for pack in self.plan(first_sample, count) if pack.has(self._mesh.dp_cp.rank)]
        batches = []
        for pack in mine:
            ids = first_sample + np.array(pack.documents, np.int64)
            texts = [self._dataset[i] for i in numbers(self._dataset, ids, self._data)]
            tokens = self.ranks.tokens(pack.size, sum(map(len, texts)) - len(texts))
            batch = load_pack(texts, ids, tokens, self._data.seq_length)
            if self._data.eod_mask_loss:
                batch.loss_mask[batch.tokens == self._eod] = 0
            batches.append(self._shard(batch, self._mesh.cp.neighbours(pack.size)))
        pin = self._mesh.device.type == "cuda"
        return [batch.each(torch.Tensor.pin_memory) for batch in batches] if pin else batches


def load_pack(texts: Sequence[np.ndarray], ids: np.ndarray, tokens: int, seq_length: int) -> Batch:
    """Pack samples into a row of `tokens` tokens, with padding. ids: their numbers in the order of the run.

    For dropout masks, `positions` of the batch count tokens over the whole run, and `sample_ids` is 0.
    """
    lengths = [len(text) - 1 for text in texts]
    rest = tokens - sum(lengths)
    bounds = np.cumsum([0, *lengths, rest][: len(lengths) + 1 + (rest > 0)])
    row, labels = np.zeros((2, 1, tokens), np.int64)
    loss_mask = np.zeros((1, tokens), np.float32)
    place, sample = np.arange(tokens), np.full(tokens, -1)
    for text, number, begin, end in zip(texts, ids, bounds, bounds[1:]):
        row[0, begin:end], labels[0, begin:end] = text[:-1], text[1:]
        loss_mask[0, begin:end], sample[begin:end] = 1, number
    place = (place - np.repeat(bounds[:-1], np.diff(bounds))) % seq_length  # padding may be longer
    positions = sample * seq_length + place
    arrays = (row, positions, np.zeros(1, np.int64), labels, loss_mask, place[None], bounds.astype(np.int32))
    return Batch(*map(torch.from_numpy, arrays), int(np.diff(bounds).max()))

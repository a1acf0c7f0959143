"""Other result than `step.build_loaders`, for `--variable-seq-lengths`: packs of documents as microbatches.

    core    a microbatch is b rows of seq_length tokens          every rank has as many
    here    a microbatch is a row of documents of any length     ranks may have different numbers

Documents are assigned to ranks for each batch (`packing.py`) by their lengths, which are in the index: every
rank knows all lengths, and reads only the documents of its own packs. In a pack positions restart at each
document, attention does not cross documents, and the rest of the row is a document of padding, which has no
loss. End-of-document tokens inside a document have no effect. (Megatron-LM's packed sequences.
tests/variants/test_document_dataset.py)
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from nanomegatron.batch import Batch
from nanomegatron.config.settings import Config
from nanomegatron.data.loader import Prefetching, numbers
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.variants.packing import Pack, Ranks, cost, plan


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

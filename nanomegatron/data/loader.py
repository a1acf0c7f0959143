"""Batches of samples, prefetched during training.

A sample is identified by its number in the order of the run. The order depends on the consumed samples, never
on the number of processes, and a microbatch is a slice of it, cut by rank:

    order   ... 24 25 26 27 | 28 29 30 31 | ...     micro_batch_size 2, dp 2
    rank 0      24 25         28 29                 BatchLoader.get(24), get(28), ...
    rank 1            26 27         30 31

So a run resumes from the number of consumed samples, on any number of processes. Threads prefetch the next
microbatches while one is trained on. A microbatch is a function of its number, and they are returned in
order, so the number of threads changes no result.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from nanomegatron.batch import Batch
from nanomegatron.config.cli import ConfigError
from nanomegatron.config.settings import DataConfig


def numbers(dataset: Sequence[np.ndarray], sample_ids: np.ndarray, data: DataConfig) -> list[int]:
    """Return the positions in the dataset of samples of the run; `cyclic` starts over at its end.

    Raises ConfigError past the end of the data if `dataloader_type` is single.
    """
    if data.dataloader_type == "single" and sample_ids.max(initial=0) >= len(dataset):
        raise ConfigError(
            [
                f"sample {sample_ids.max()} of {len(dataset)}: the data is at its end; "
                "train fewer iterations or start over with --dataloader-type cyclic"
            ]
        )
    return (sample_ids % len(dataset)).tolist()


def load_batch(
    dataset: Sequence[np.ndarray], sample_ids: np.ndarray, data: DataConfig, eod: int, tokens_too: bool = True
) -> Batch:
    """Read samples into a Batch, without `tokens_too` only the document bounds (documents end at `eod`).

    Raises ConfigError past the end of the data if `dataloader_type` is single.
    """
    inside = numbers(dataset, sample_ids, data)
    if not tokens_too and not data.reset_attention_mask:  # nothing is read
        place = torch.arange(data.seq_length)
        return Batch(None, place, torch.from_numpy(sample_ids))
    text = np.stack([dataset[i] for i in inside])
    tokens, labels = (np.ascontiguousarray(t) for t in (text[:, :-1], text[:, 1:]))
    loss_mask, place = np.ones(tokens.shape, np.float32), np.arange(tokens.shape[1])
    if data.eod_mask_loss:
        loss_mask[tokens == eod] = 0
    documents: dict[str, Any] = {}
    if data.reset_position_ids or data.reset_attention_mask:
        begins = np.ones(tokens.shape, bool)  # where a document begins
        begins[:, 1:] = tokens[:, :-1] == eod
    if data.reset_position_ids:
        behind = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
        documents["position_ids"] = torch.from_numpy(place - behind)
    if data.reset_attention_mask:
        bounds = np.append(np.flatnonzero(begins), begins.size)
        documents["cu_seqlens"] = torch.from_numpy(bounds.astype(np.int32))
        documents["max_seqlen"] = int(np.diff(bounds).max())
    arrays = (tokens, place, sample_ids, labels, loss_mask)
    return Batch(*map(torch.from_numpy, arrays), **documents)


class Prefetching:
    """Threads that read batches ahead; without them nothing is."""

    def __init__(self, threads: int, most: int) -> None:
        """most: batches that are read ahead of the one that is asked for."""
        self._pool = ThreadPoolExecutor(threads, "batches") if threads else None
        self._most = most
        self._ahead: deque[Future] = deque()
        self._next: Any = None  # which batch is at the head of _ahead

    def take(self, first_sample: int, count: int) -> Any:
        """Return `read` of these samples, once the thread that has them is done; raises its error."""
        if self._pool is None:
            return self.read(first_sample, count)
        if self._next != (first_sample, count):
            self._drop()
        while len(self._ahead) <= self._most:
            first = first_sample + len(self._ahead) * count
            self._ahead.append(self._pool.submit(self.read, first, count))
        self._next = first_sample + count, count
        return self._ahead.popleft().result()

    def close(self) -> None:
        """Stop the threads."""
        self._drop()
        if self._pool:
            self._pool.shutdown()

    def _drop(self) -> None:
        while self._ahead:
            self._ahead.pop().cancel()


class BatchLoader(Prefetching):
    """One rank's microbatches on its device, prefetched by `num_workers` threads."""

    def __init__(
        self,
        dataset: Sequence[np.ndarray],
        data: DataConfig,
        eod: int,
        dp: Any,
        device: torch.device | str,
        tokens_too: bool = True,
        shard: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        """dp: has the `rank` and `size` of the ranks that share the data; shard: takes this rank's tokens."""
        super().__init__(data.num_workers, 2 * data.num_workers)
        self._dataset, self._data = dataset, data
        self._eod, self._dp = eod, dp
        self._tokens_too, self._shard = tokens_too, shard
        self._device = torch.device(device)

    def get(self, first_sample: int) -> Batch:
        """Return this rank's part of samples [first_sample, first_sample + micro_batch_size * dp.size).

        Waits for the thread that reads it; raises that thread's error, ConfigError past the end of the data.
        """
        step = self._data.micro_batch_size * self._dp.size
        return self.take(first_sample, step).to(self._device)

    def batches(self, first_sample: int, count: int) -> list[Batch]:
        """Return this rank's microbatches of `count` samples from `first_sample` on, as `get` does."""
        step = self._data.micro_batch_size * self._dp.size
        return [self.get(first_sample + n) for n in range(0, count, step)]

    def lengths(self, first_sample: int, count: int) -> list[int]:
        """The tokens of each of these samples."""
        return [self._data.seq_length] * count

    def read(self, first_sample: int, _: int) -> Batch:
        """Read this rank's part of the samples of a microbatch."""
        mine = first_sample + self._dp.rank * self._data.micro_batch_size
        ids = np.arange(mine, mine + self._data.micro_batch_size)
        batch = load_batch(self._dataset, ids, self._data, self._eod, self._tokens_too)
        batch = self._shard(batch)
        return batch.each(torch.Tensor.pin_memory) if self._device.type == "cuda" else batch

"""Batches of samples, read ahead of the training that uses them.

A sample's number in the order of the run is its identity. It depends on how much was consumed, never on how
many processes share the work, and a microbatch is a piece of the order, cut by rank:

    order   ... 24 25 26 27 | 28 29 30 31 | ...     micro_batch_size 2, dp 2
    rank 0      24 25         28 29                 BatchLoader.get(24), get(28), ...
    rank 1            26 27         30 31

So a run goes on from the number of consumed samples alone, on any number of processes. Threads read the next
microbatches while this one is trained on; each is a function of its number, and they are handed out in order,
so their count changes nothing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from nanomegatron.config.cli import ConfigError
from nanomegatron.config.settings import DataConfig
from nanomegatron.cp_shard import Shard
from nanomegatron.mesh import Axis


@dataclass(frozen=True)
class Batch:
    """One microbatch. A document ends with its end-of-document token, and every row starts one.

    A rank with neither the first nor the last pipeline stage has no use for the first three: None. Of rows
    that several ranks share all but sample_ids and cu_seqlens is of this rank's s/cp tokens.
    """

    tokens: torch.Tensor | None  # [b, s] int64
    labels: torch.Tensor | None  # [b, s] int64, the token that follows each
    loss_mask: torch.Tensor | None  # [b, s] float32, 1 where a label counts
    positions: torch.Tensor  # [s] int64, place in the sample
    sample_ids: torch.Tensor  # [b] int64, place in the order of the whole run
    position_ids: torch.Tensor | None = None  # [b, s] int64, place in the document; None: as `positions`
    cu_seqlens: torch.Tensor | None = None  # [documents + 1] int32, their bounds in the b * s tokens
    max_seqlen: int | None = None  # tokens of the longest document
    shard: Shard | None = None  # of rows that several ranks share

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The batch with every tensor changed."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: change(t) for n, t in found.items() if isinstance(t, torch.Tensor)})

    def cut(self, axis: Axis, types: Sequence[str]) -> "Batch":
        """The tokens that this rank of `axis` has of each row. types: as for `Shard`."""
        if axis.size == 1:
            return self
        bounds = None if self.cu_seqlens is None else self.cu_seqlens.numpy()
        shard = Shard(axis, len(self.positions), types, bounds)
        at = torch.from_numpy(shard.places)
        names = ("tokens", "labels", "loss_mask", "position_ids")
        rows = {name: x[:, at] for name in names if (x := getattr(self, name)) is not None}
        return replace(self, positions=self.positions[at], shard=shard, **rows)

    def to(self, device: torch.device | str) -> "Batch":
        """On `device`; the copy of pinned memory to a GPU does not wait."""
        return self.each(lambda t: t.to(device, non_blocking=True))


def numbers(dataset: Sequence[np.ndarray], sample_ids: np.ndarray, data: DataConfig) -> list[int]:
    """Where samples of the run are in the dataset; `cyclic` starts over at its end.

    Raises ConfigError past the end with `single`.
    """
    if data.dataloader_type == "single" and sample_ids.max(initial=0) >= len(dataset):
        at = f"sample {sample_ids.max()} of {len(dataset)}"
        fix = "train fewer iterations or start over with --dataloader-type cyclic"
        raise ConfigError([f"{at}: the data is at its end; {fix}"])
    return (sample_ids % len(dataset)).tolist()


def load_batch(
    dataset: Sequence[np.ndarray], sample_ids: np.ndarray, data: DataConfig, eod: int, tokens_too: bool = True
) -> Batch:
    """Read samples. Without tokens only where documents end. Raises ConfigError as `numbers`."""
    inside = numbers(dataset, sample_ids, data)
    by_document = data.reset_position_ids or data.reset_attention_mask
    if not tokens_too and not data.reset_attention_mask:  # nothing is read
        place = torch.arange(data.seq_length)
        return Batch(None, None, None, place, torch.from_numpy(sample_ids))
    text = np.stack([dataset[i] for i in inside])
    tokens, labels = (np.ascontiguousarray(t) for t in (text[:, :-1], text[:, 1:]))
    loss_mask, place = np.ones(tokens.shape, np.float32), np.arange(tokens.shape[1])
    if data.eod_mask_loss:
        loss_mask[tokens == eod] = 0
    documents: dict[str, Any] = {}
    if by_document:
        begins = np.ones(tokens.shape, bool)  # a document
        begins[:, 1:] = tokens[:, :-1] == eod
    if data.reset_position_ids:
        behind = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
        documents["position_ids"] = torch.from_numpy(place - behind)
    if data.reset_attention_mask:
        bounds = np.append(np.flatnonzero(begins), begins.size)
        documents["cu_seqlens"] = torch.from_numpy(bounds.astype(np.int32))
        documents["max_seqlen"] = int(np.diff(bounds).max())
    return Batch(*map(torch.from_numpy, (tokens, labels, loss_mask, place, sample_ids)), **documents)


class BatchLoader:
    """One rank's microbatches on its device, `num_workers` threads ahead of whoever asks."""

    def __init__(
        self,
        dataset: Sequence[np.ndarray],
        data: DataConfig,
        eod: int,
        dp: Any,
        device: torch.device | str,
        tokens_too: bool = True,
        cp: Axis = Axis.single("cp"),  # noqa: B008 (frozen)
        types: Sequence[str] = (),
    ) -> None:
        """dp: the rank's place among those that share the data, `rank` and `size`; cp, types: see `Shard`."""
        self._dataset, self._data, self._eod, self._dp = dataset, data, eod, dp
        self._tokens_too, self._cp, self._types = tokens_too, cp, types
        self._device = torch.device(device)
        self._ahead: deque[Future[Batch]] = deque()
        self._next = -1  # first sample of the microbatch at the head of _ahead
        self._pool = ThreadPoolExecutor(data.num_workers, "batches") if data.num_workers else None

    def get(self, first_sample: int) -> Batch:
        """This rank's part of the samples [first_sample, first_sample + micro_batch_size * dp.size).

        Raises what reading them raised, ValueError past the end of the data.
        """
        if self._pool is None:
            return self._read(first_sample).to(self._device)
        if first_sample != self._next:
            self._drop()
        step = self._data.micro_batch_size * self._dp.size
        while len(self._ahead) <= 2 * self._data.num_workers:
            self._ahead.append(self._pool.submit(self._read, first_sample + len(self._ahead) * step))
        self._next = first_sample + step
        return self._ahead.popleft().result().to(self._device)

    def close(self) -> None:
        """End the threads."""
        self._drop()
        if self._pool:
            self._pool.shutdown()

    def _read(self, first_sample: int) -> Batch:
        mine = first_sample + self._dp.rank * self._data.micro_batch_size
        ids = np.arange(mine, mine + self._data.micro_batch_size)
        batch = load_batch(self._dataset, ids, self._data, self._eod, self._tokens_too)
        batch = batch.cut(self._cp, self._types)
        return batch.each(torch.Tensor.pin_memory) if self._device.type == "cuda" else batch

    def _drop(self) -> None:
        while self._ahead:
            self._ahead.pop().cancel()

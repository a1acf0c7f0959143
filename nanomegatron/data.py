"""From documents of any length to training samples of one length, in an order that the seed alone decides.

GPTDataset lays all documents of a part end to end, `epochs` times, and cuts the line into samples that share
one token with their neighbour (the last label of one is the first input of the next):

    document index   3 0 4 2 1 ...         documents in random order, every one once an epoch
    line             |  doc 3  |doc 0|    doc 4    |   doc 2   |d 1| ...
    sample index     ^0     ^1     ^2     ^3     ^4     ^5         (place in document index, offset) of a cut
    shuffle index    4 1 5 0 2 ...         dataset[i] is the sample between cuts shuffle[i] and shuffle[i] + 1

The last epoch is shuffled by itself when little of it (under 80 %) will be seen: else some documents would
come once more than others from the start. The three indices are Megatron's to the bit, for the same seed; the
sample index, there a loop in C++, is a search in the running sum of lengths here. They are kept as .npy
files, made by one process and mapped by all.

A sample's number in the order of the run is its identity. It depends on how much was consumed, never on how
many processes share the work:

    microbatch_sample_ids -> load_batch -> Batch
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanomegatron.config import DataConfig
from nanomegatron.data_indexed import IndexedDataset, file_lock, publish
from nanomegatron.tokenizer import Tokenizer, build_tokenizer, tokenizer_from_spec

_INDICES = ("document_index", "sample_index", "shuffle_index")
_SPLITS = ("train", "valid", "test")


class GPTDataset:
    """Samples of `seq_length + 1` tokens from the sequences [start, stop) of an indexed dataset."""

    def __init__(
        self,
        indexed: "IndexedDataset | MockGPTLowLevelDataset",
        sequences: tuple[int, int],
        num_samples: int | None,
        seq_length: int,
        seed: int,
        cache_folder: str | Path | None = None,
    ) -> None:
        """At least `num_samples`, in whole epochs; None is one epoch. Without a folder nothing is cached.

        Raises ValueError if there are no tokens; fewer than a sample has are repeated, as in Megatron.
        """
        self.indexed, self.seq_length = indexed, seq_length
        lengths = indexed.sequence_lengths
        tokens = int(lengths[slice(*sequences)].sum(dtype=np.int64))
        if not tokens:
            raise ValueError(f"{indexed.prefix}: no tokens in sequences {sequences[0]}..{sequences[1]}")
        plan = _Plan.make(sequences, tokens, num_samples, seq_length, seed)
        if cache_folder is None:
            indices = plan.build(lengths)
        else:
            indices = _cached(plan, indexed, Path(cache_folder))
        self.document_index, self.sample_index, self.shuffle_index = indices

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, i: int) -> np.ndarray:
        """The i-th sample, int64 [seq_length + 1]."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)} in {self.indexed.prefix}")
        cut = int(self.shuffle_index[i])
        (first, begin), (last, end) = self.sample_index[cut : cut + 2].tolist()
        documents = self.document_index[first : last + 1].tolist()
        parts = []
        for place, document in enumerate(documents, first):
            offset = begin if place == first else 0
            length = end + 1 - offset if place == last else None
            parts.append(self.indexed.get(document, offset, length))
        return np.concatenate(parts, dtype=np.int64)


@dataclass(frozen=True)
class _Plan:
    """All that the three indices depend on, besides the lengths of the sequences."""

    sequences: tuple[int, int]
    tokens: int  # an epoch
    epochs: int
    samples: int
    together: int  # samples shuffled as one; those behind are the last epoch, by itself
    seq_length: int
    seed: int

    @classmethod
    def make(cls, sequences, tokens: int, num_samples: int | None, seq_length: int, seed: int) -> "_Plan":
        epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens))
        samples = together = (epochs * tokens - 1) // seq_length
        if epochs > 1:
            before = ((epochs - 1) * tokens - 1) // seq_length
            if num_samples - before < int(0.8 * ((tokens - 1) // seq_length)):
                together = before
        return cls(tuple(sequences), tokens, epochs, samples, together, seq_length, seed)

    def build(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Document index i32 [documents], sample index i32 [samples + 1, 2], shuffle index u32 [samples]."""
        random = np.random.RandomState(self.seed)
        once = np.arange(*self.sequences, dtype=np.int32)
        apart = int(self.together < self.samples)
        documents = np.concatenate(
            [_shuffled(np.tile(once, self.epochs - apart), random)]
            + [_shuffled(once, random) for _ in range(apart)]
        )
        index = build_sample_index(lengths, documents, self.seq_length, self.samples)
        kind = np.uint32 if self.samples < np.iinfo(np.uint32).max - 1 else np.int64
        shuffle = _shuffled(np.arange(self.together, dtype=kind), random)
        if apart:
            last = np.arange(self.together, self.samples, dtype=kind)
            shuffle = np.concatenate([shuffle, _shuffled(last, random)])
        return documents, index, shuffle

    def fits(self, indices: tuple[np.ndarray, ...]) -> bool:
        """Whether indices have this plan's sizes."""
        documents = self.epochs * (self.sequences[1] - self.sequences[0])
        return [i.shape for i in indices] == [(documents,), (self.samples + 1, 2), (self.samples,)]


def build_sample_index(
    lengths: np.ndarray, documents: np.ndarray, seq_length: int, samples: int
) -> np.ndarray:
    """Where the samples are cut: (place in `documents`, offset), i32 [samples + 1, 2].

    The sum of lengths up to and with a document is where it ends on the line. Cut k is at token
    k * seq_length, inside the first document that ends beyond it.
    """
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    cuts = np.arange(samples + 1, dtype=np.int64) * seq_length
    places = np.searchsorted(ends, cuts, side="right")
    kind = np.int32 if len(documents) <= np.iinfo(np.int32).max else np.int64
    index = np.empty((samples + 1, 2), kind)
    index[:, 0], index[:, 1] = places, cuts - ends[places] + lengths[documents[places]]
    index[0] = 0  # even where the first document is empty
    return index


def _shuffled(x: np.ndarray, random: np.random.RandomState) -> np.ndarray:
    x = x.copy()
    random.shuffle(x)
    return x


def _cached(plan: _Plan, indexed: IndexedDataset, folder: Path) -> tuple[np.ndarray, ...]:
    """The plan's indices, mapped from files in `folder`; the first of several processes makes them."""
    description = json.dumps({"indices": _INDICES, "lengths": indexed.identity, **vars(plan)})
    name = hashlib.sha256(description.encode()).hexdigest()[:32]
    files = [folder / f"{name}-{part}.npy" for part in _INDICES]
    if found := _load(files, plan):
        return found
    with _lock(folder, name):
        if not _load(files, plan):
            for path, array in zip(files, plan.build(indexed.sequence_lengths)):
                with publish(path) as temporary, open(temporary, "wb") as file:
                    np.save(file, array, allow_pickle=False)
            with publish(folder / f"{name}-description.json") as temporary:
                temporary.write_text(description)
    return _load(files, plan)


def _load(files: list[Path], plan: _Plan) -> tuple[np.ndarray, ...] | None:
    """Mapped arrays; None where one is missing or damaged."""
    try:
        found = tuple(np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray) for path in files)
    except (OSError, ValueError, EOFError):
        return None
    return found if plan.fits(found) else None


@contextlib.contextmanager
def _lock(folder: Path, name: str) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / f"{name}.lock"):
            yield
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot keep index caches there ({error}); set --data-cache-path"
        ) from None


class MockGPTLowLevelDataset:
    """Megatron's synthetic documents: 1 2 3 ... modulo the vocabulary, the end-of-document token last."""

    prefix = "mock data"

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size, self.eod = vocab_size, eod
        self.sequence_lengths = np.random.default_rng(0).integers(1, 4096, 100_000, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens of document i from `offset` on, or all that follow."""
        stop = int(self.sequence_lengths[i]) if length is None else offset + length
        tokens = np.arange(offset + 1, stop + 1) % self.vocab_size
        if stop == self.sequence_lengths[i] and stop > offset:
            tokens[-1] = self.eod
        return tokens


def split_ranges(split: str, count: int) -> tuple[tuple[int, int] | None, ...]:
    """'969,30,1' of `count` sequences -> [start, stop) of training, validation, test; None for a part of 0.

    Raises ValueError for anything but one to three numbers >= 0, not all 0.
    """
    try:
        weights = [float(part) for part in split.split(",")]
        weights += [0.0] * (3 - len(weights))
        if len(weights) != 3 or not all(0 <= w < math.inf for w in weights) or not any(weights):
            raise ValueError
    except ValueError:
        raise ValueError(f"--split {split}: one to three numbers >= 0, such as 969,30,1") from None
    # Megatron's order of additions: other roundings would move a boundary.
    parts = (np.array(weights) / np.sum(weights)).tolist()
    bounds = [0.0]
    for part in parts:
        bounds.append(bounds[-1] + part)
    ranges = [(round(low * count), round(high * count)) for low, high in zip(bounds, bounds[1:])]
    return tuple(r if w else None for r, w in zip(ranges, weights))


def build_datasets(
    data: DataConfig, num_samples: tuple[int, int, int], seed: int, tokenizer: Tokenizer
) -> tuple[GPTDataset | None, GPTDataset | None, GPTDataset | None]:
    """Training, validation and test data; None where no sample is asked for or the data has no such part.

    Raises ValueError, before any index is built, for data that is missing or damaged, was made by another
    tokenizer, holds ids outside the vocabulary or too few tokens.
    """
    sources: list[Any] = [None] * 3
    if data.mock_data:
        mock = MockGPTLowLevelDataset(tokenizer.vocab_size, tokenizer.eod)
        sources = [(mock, part, None) for part in split_ranges("1,1,1", len(mock))]
    elif path := _one_path(data.data_path, "--data-path"):
        indexed, cache = _open(path, data, tokenizer)
        sources = [(indexed, part, cache) for part in split_ranges(data.split, len(indexed))]
    else:
        flags = [f"--{split}-data-path" for split in _SPLITS]
        for i, paths in enumerate((data.train_data_path, data.valid_data_path, data.test_data_path)):
            if path := _one_path(paths, flags[i]):
                indexed, cache = _open(path, data, tokenizer)
                sources[i] = (indexed, (0, len(indexed)), cache)
    if not any(sources):
        raise ValueError("no data: give --data-path, --train-data-path or --mock-data")
    datasets: list[GPTDataset | None] = []
    for split, source, wanted in zip(_SPLITS, sources, num_samples):
        if not wanted or not source or not source[1]:
            datasets.append(None)
            continue
        indexed, part, cache = source
        tokens = int(indexed.sequence_lengths[slice(*part)].sum(dtype=np.int64))
        if tokens < data.seq_length + 1:
            raise ValueError(
                f"{split} data: {tokens} tokens in sequences {part[0]}..{part[1]} of {indexed.prefix}; a "
                f"sample takes --seq-length + 1 = {data.seq_length + 1}: use more data or another --split"
            )
        datasets.append(GPTDataset(indexed, part, wanted, data.seq_length, seed, cache))
    return tuple(datasets)


def choose_tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer that the flags name, or else the one that the data was made with.

    Raises ValueError where neither says which.
    """
    if data.tokenizer_type or data.mock_data:
        kind = data.tokenizer_type or "NullTokenizer"
        return build_tokenizer(kind, data.tokenizer_model, data.vocab_file, data.merge_file, data.vocab_size)
    prefix = (data.data_path or data.train_data_path)[0]
    sidecar = IndexedDataset(prefix).sidecar()
    if sidecar is None:
        raise ValueError(f"{prefix}.json does not say which tokenizer made the data: give --tokenizer-type")
    return tokenizer_from_spec(sidecar["tokenizer"], beside=Path(prefix).parent)


def _one_path(paths: tuple[str, ...], flag: str) -> str | None:
    if len(paths) > 1:
        raise ValueError(f"{flag} {' '.join(paths)}: one prefix, without a weight; blends are not there yet")
    return paths[0] if paths else None


def _open(path: str, data: DataConfig, tokenizer: Tokenizer) -> tuple[IndexedDataset, Path]:
    """A dataset that fits the tokenizer, and the folder of its index caches."""
    indexed = IndexedDataset(path)
    cache = Path(data.data_cache_path) if data.data_cache_path else Path(path).parent / "cache"
    sidecar = indexed.sidecar()
    if sidecar and sidecar["fingerprint"] != tokenizer.fingerprint:
        raise ValueError(
            f"{path}: made with {sidecar['tokenizer']}, which gives other ids than {tokenizer.spec}; "
            "leave --tokenizer-type away to use the data's, or run preprocess.py again"
        )
    low, high = (0, sidecar["max_token"]) if sidecar else _scanned_range(indexed, cache)
    if low < 0 or high >= tokenizer.vocab_size:
        raise ValueError(
            f"{path}: holds token {low if low < 0 else high}; the vocabulary of {tokenizer.spec['type']} is "
            f"0..{tokenizer.vocab_size - 1}: use the tokenizer that the data was made with"
        )
    return indexed, cache


def _scanned_range(indexed: IndexedDataset, cache: Path) -> tuple[int, int]:
    """Smallest and largest token of data without a sidecar; read once, then remembered in the cache."""
    stat = Path(indexed.prefix + ".bin").stat()
    version = f"{indexed.identity} {stat.st_size} {stat.st_mtime_ns}"
    name = hashlib.sha256(version.encode()).hexdigest()[:32]
    path = cache / f"{name}-token_range.json"
    with _lock(cache, name):
        if not path.is_file():
            with publish(path) as temporary:
                temporary.write_text(json.dumps(indexed.token_range()))
        low, high = json.loads(path.read_text())
    return low, high


@dataclass(frozen=True)
class Batch:
    """One microbatch."""

    tokens: torch.Tensor  # [b, s] int64
    labels: torch.Tensor  # [b, s] int64, the token that follows each
    loss_mask: torch.Tensor  # [b, s] float32, 1 where a label counts
    positions: torch.Tensor  # [s] int64
    sample_ids: torch.Tensor  # [b] int64, place in the order of the whole run

    def to(self, device: torch.device | str) -> "Batch":
        """On `device`; the copy to a GPU does not wait."""
        cuda = torch.device(device).type == "cuda"
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {n: (t.pin_memory() if cuda else t).to(device, non_blocking=cuda) for n, t in tensors.items()}
        return replace(self, **moved)


def microbatch_sample_ids(
    consumed_samples: int, microbatch: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> np.ndarray:
    """Ids of a rank's samples [micro_batch_size]: a microbatch is a piece of the order, cut by rank."""
    first = consumed_samples + (microbatch * dp_size + dp_rank) * micro_batch_size
    return np.arange(first, first + micro_batch_size, dtype=np.int64)


def load_batch(dataset: GPTDataset, sample_ids: np.ndarray, dataloader_type: str) -> Batch:
    """Read samples; `cyclic` starts over at the end of the dataset.

    Raises ValueError past the end with `single`.
    """
    if dataloader_type == "single" and sample_ids.max() >= len(dataset):
        raise ValueError(
            f"sample {sample_ids.max()} of {len(dataset)}: the data is at its end; train fewer iterations "
            "or start over with --dataloader-type cyclic"
        )
    text = torch.from_numpy(np.stack([dataset[int(i)] for i in sample_ids % len(dataset)]))
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return Batch(
        tokens=tokens,
        labels=labels,
        loss_mask=torch.ones(tokens.shape, dtype=torch.float32),
        positions=torch.arange(tokens.shape[1]),
        sample_ids=torch.from_numpy(sample_ids),
    )

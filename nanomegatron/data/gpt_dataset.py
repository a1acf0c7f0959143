"""Training samples of one length from documents of any length, in an order that seed and size determine.

GPTDataset concatenates all documents of a part, `epochs` times, and cuts this line into samples. Neighbours
share one token (the last label of one sample is the first input of the next):

    document index   3 0 4 2 1 ...         documents in random order, each once per epoch
    line             |  doc 3  |doc 0|    doc 4    |   doc 2   |d 1| ...
    sample index     ^0     ^1     ^2     ^3     ^4     ^5         (place in document index, offset) of a cut
    shuffle index    4 1 5 0 2 ...         dataset[i] is the sample between cuts shuffle[i] and shuffle[i] + 1

The last epoch is shuffled separately if under 80 % of it will be used: otherwise some documents would occur
more often than others from the start. The three indices equal Megatron's to the bit, for the same seed; the
sample index, a loop in C++ there, is a search in the cumulative sum of lengths here. They are cached
(data/cache.py).

The order depends on the number of samples: one epoch is shuffled differently from two. So a run that resumes
with more iterations keeps the line and appends another, with its own seed:

    60 requested     |  epochs 1, 2: 68 samples  |
    then 100         |  epochs 1, 2              |  epoch 3: 34 more  |

Several such datasets make a blend (blended_dataset.py); batches of both are prefetched (loader.py).
Whole documents as samples: variants/document_dataset.py.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from nanomegatron.config.settings import DataConfig
from nanomegatron.config.user_files import escaped, read_text
from nanomegatron.data.blended_dataset import Blend, BlendedDataset, parse_blend
from nanomegatron.data.cache import cached_arrays
from nanomegatron.data.identity import SPLITS
from nanomegatron.data.indexed_dataset import IndexedDataset
from nanomegatron.data.samples import Samples
from nanomegatron.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_from_spec


class GPTDataset(Samples):
    """Samples of `seq_length + 1` tokens from the sequences [start, stop) of an indexed dataset."""

    def __init__(
        self,
        indexed: "IndexedDataset | MockGPTLowLevelDataset",
        sequences: tuple[int, int],
        num_samples: int | None,
        seq_length: int,
        seed: int,
        cache_folder: str | Path | None = None,
        before: Sequence[int] = (),
    ) -> None:
        """At least `num_samples`, in whole epochs; None: one epoch. Without `cache_folder` nothing is cached.

        before: numbers of samples of the earlier runs that this one resumes; their samples keep their order.
        Raises ValueError if there are no tokens; fewer than one sample's are repeated, as in Megatron.
        """
        self.indexed, self.sequences, self.seq_length = indexed, sequences, seq_length
        lengths = indexed.sequence_lengths
        tokens = int(lengths[slice(*sequences)].sum(dtype=np.int64))
        if not tokens:
            raise ValueError(f"{indexed.prefix}: no tokens in sequences {sequences[0]}..{sequences[1]}")
        plans, have = [], 0
        for number in (*before, num_samples):
            if not plans or number > have:
                more, own = (number - have, (seed, len(plans))) if plans else (number, seed)
                plans.append(_plan_line(sequences, tokens, more, seq_length, own))
                have += plans[-1].samples
        self.document_index, self.sample_index, self.shuffle_index = cached_arrays(
            cache_folder,
            ("document_index", "sample_index", "shuffle_index"),
            {"lengths": indexed.identity, "lines": [vars(p) for p in plans]},
            lambda: _joined([_build_line(plan, lengths) for plan in plans]),
        )

    @property
    def epochs(self) -> int:
        """How often the samples go through the text; the last time perhaps not to its end."""
        return len(self.document_index) // (self.sequences[1] - self.sequences[0])

    def tokens(self, i: int) -> np.ndarray:
        """The i-th sample, int64 [seq_length + 1]."""
        cut = int(self.shuffle_index[i])
        (first, begin), (last, end) = self.sample_index[cut : cut + 2].tolist()
        documents = self.document_index[first : last + 1].tolist()
        parts = []
        for place, document in enumerate(documents, first):
            offset = begin if place == first else 0
            length = end + 1 - offset if place == last else None
            parts.append(self.indexed.get(document, offset, length))
        return np.concatenate(parts, dtype=np.int64)


def _plan_line(
    sequences: tuple[int, int], tokens: int, num_samples: int | None, seq_length: int, seed: Any
) -> SimpleNamespace:
    """Return all that the three indices of a line depend on, besides the lengths of the sequences.

    tokens: per epoch; together: samples shuffled together; the rest, of the last epoch, separately.
    """
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens))
    samples = together = (epochs * tokens - 1) // seq_length
    if epochs > 1:
        before = ((epochs - 1) * tokens - 1) // seq_length
        if num_samples - before < int(0.8 * ((tokens - 1) // seq_length)):
            together = before
    return SimpleNamespace(
        sequences=tuple(sequences),
        tokens=tokens,
        epochs=epochs,
        samples=samples,
        together=together,
        seq_length=seq_length,
        seed=seed,
    )


def _build_line(plan: SimpleNamespace, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Document index i32 [documents], sample index i32 [samples + 1, 2], shuffle index u32 [samples]."""
    random = np.random.RandomState(plan.seed)
    once = np.arange(*plan.sequences, dtype=np.int32)
    apart = int(plan.together < plan.samples)
    documents = np.concatenate(
        [random.permutation(np.tile(once, plan.epochs - apart))]
        + [random.permutation(once) for _ in range(apart)]
    )
    index = build_sample_index(lengths, documents, plan.seq_length, plan.samples)
    kind = np.uint32 if plan.samples < np.iinfo(np.uint32).max - 1 else np.int64
    shuffle = random.permutation(np.arange(plan.together, dtype=kind))
    if apart:
        last = np.arange(plan.together, plan.samples, dtype=kind)
        shuffle = np.concatenate([shuffle, random.permutation(last)])
    return documents, index, shuffle


def _joined(lines: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Concatenate the three indices of several lines; no sample spans two of them."""
    if len(lines) == 1:
        return lines[0]
    places = np.cumsum([0, *(len(documents) for documents, _, _ in lines)])
    cuts = np.cumsum([0, *(len(index) for _, index, _ in lines)])
    documents, indices, shuffles = zip(*lines)
    index = [index + np.array([place, 0]) for index, place in zip(indices, places)]
    shuffle = [shuffle + cut for shuffle, cut in zip(shuffles, cuts)]
    return np.concatenate(documents), np.concatenate(index), np.concatenate(shuffle)


def build_sample_index(
    lengths: np.ndarray, documents: np.ndarray, seq_length: int, samples: int
) -> np.ndarray:
    """Where the samples are cut: (place in `documents`, offset), i32 [samples + 1, 2].

    The sum of lengths up to and including a document is its end on the line. Cut k is at token
    k * seq_length, inside the first document that ends after it.
    """
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    cuts = np.arange(samples + 1, dtype=np.int64) * seq_length
    places = np.searchsorted(ends, cuts, side="right")
    kind = np.int32 if len(documents) <= np.iinfo(np.int32).max else np.int64
    index = np.empty((samples + 1, 2), kind)
    index[:, 0], index[:, 1] = places, cuts - ends[places] + lengths[documents[places]]
    index[0] = 0  # even where the first document is empty
    return index


class MockGPTLowLevelDataset:
    """Megatron's synthetic documents: 1 2 3 ... modulo the vocabulary, the end-of-document token last."""

    prefix = identity = "mock data"

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

    def sidecar(self) -> None:
        """None: there is no text that the tokens come from."""


def split_ranges(split: str, count: int) -> tuple[tuple[int, int] | None, ...]:
    """Divide `count` sequences by '969,30,1' -> [start, stop) of training, validation, test; None: empty.

    Raises ValueError for anything but one to three numbers >= 0, not all 0.
    """
    try:
        weights = [float(part) for part in split.split(",")]
        weights += [0.0] * (3 - len(weights))
        if len(weights) != 3 or not all(0 <= w < math.inf for w in weights) or not any(weights):
            raise ValueError
    except ValueError:
        raise ValueError(f"--split {split}: one to three numbers >= 0, such as 969,30,1") from None
    # Megatron's order of additions: another rounding would move a boundary.
    parts = (np.array(weights) / np.sum(weights)).tolist()
    bounds = itertools.accumulate(parts, initial=0.0)
    ranges = [(round(low * count), round(high * count)) for low, high in itertools.pairwise(bounds)]
    return tuple(r if w else None for r, w in zip(ranges, weights))


def build_datasets(
    data: DataConfig,
    num_samples: tuple[int, int, int],
    seed: int,
    tokenizer: Tokenizer,
    before: Sequence[int] = (),
    kind: Callable[..., Samples] = GPTDataset,
) -> tuple[Samples | BlendedDataset | None, ...]:
    """Return training, validation and test data; None if 0 samples are requested or the part is empty.

    before: numbers of training samples of the earlier runs that this one resumes. kind: the class of each
    data set, as `pick_variants.pick_dataset` returns it.
    Raises ValueError, before any index is built, for data that is missing or damaged, was made with another
    tokenizer, or has ids outside the vocabulary or too few tokens.
    """
    if data.variable_seq_lengths and kind is GPTDataset:
        raise ValueError("--variable-seq-lengths: give build_datasets the kind that pick_dataset returns")
    if data.mock_data:
        mock = MockGPTLowLevelDataset(tokenizer.vocab_size, tokenizer.eod)
        sources = [([(mock, part, None)], None) for part in split_ranges("1,1,1", len(mock))]
    else:
        sources = _sources(data, tokenizer)
    sources = [(parts if number else [], weights) for (parts, weights), number in zip(sources, num_samples)]
    for split, (parts, _) in zip(SPLITS, sources):
        for indexed, (start, stop), _ in parts:
            tokens = int(indexed.sequence_lengths[start:stop].sum(dtype=np.int64))
            if tokens < data.seq_length + 1 and not data.variable_seq_lengths:
                raise ValueError(
                    f"{split} data: {tokens} tokens in sequences {start}..{stop} of {indexed.prefix}, which "
                    f"has {len(indexed)}; a sample takes --seq-length + 1 = {data.seq_length + 1}: "
                    "use more data or another --split"
                    + ", or --eval-iters 0 to train without it"
                    * (split != "train")
                )

    def make(indexed, sequences, cache, *numbers):
        return kind(indexed, sequences, numbers[-1], data.seq_length, seed, cache, numbers[:-1])

    datasets = []
    for (parts, weights), number, earlier in zip(sources, num_samples, (before, (), ())):
        build = [functools.partial(make, *part) for part in parts]
        if len(parts) > 1 or (parts and weights):
            datasets.append(BlendedDataset(build, weights, number, parts[0][2], earlier))
        else:
            datasets.append(build[0](*earlier, number) if parts else None)
    return tuple(datasets)


def _sources(data: DataConfig, tokenizer: Tokenizer) -> list[tuple[list[tuple], list[float] | None]]:
    """Return for each split: (dataset, its sequences, cache folder) of each prefix, and the weights."""
    blends, one_list = _blends(data), data.data_path or data.data_args_path
    opened = {path: _open(path, data, tokenizer) for blend in blends for path in blend.prefixes}
    sources = []
    for i, (prefixes, weights) in enumerate(blends):
        parts = []
        for indexed, cache in (opened[path] for path in prefixes):
            part = split_ranges(data.split, len(indexed))[i] if one_list else (0, len(indexed))
            parts += [(indexed, part, cache)] if part else []
        sources.append((parts, weights))
    return sources


def _blends(data: DataConfig) -> list[Blend]:
    """Return the blend of each split; with --data-path all three are the same.

    Raises ValueError for no data, or a list that is no blend.
    """
    words, flag = data.data_path, "--data-path"
    if data.data_args_path:
        flag = f"--data-args-path {data.data_args_path}"
        words = read_text(data.data_args_path).split()
    if words:
        return [parse_blend(words, flag)] * 3
    each = [parse_blend(getattr(data, f"{split}_data_path"), f"--{split}-data-path") for split in SPLITS]
    if not any(blend.prefixes for blend in each):
        raise ValueError("no data: give --data-path, --train-data-path or --mock-data")
    return [blend if len(blend.prefixes) > 1 else blend._replace(weights=None) for blend in each]


def choose_tokenizer(data: DataConfig) -> Tokenizer:
    """Return the tokenizer that the flags name, or else the one that the data was made with.

    Raises ValueError if neither is known.
    """
    if not data.tokenizer_type and not data.mock_data:
        spec, prefix = tokenizer_of_data(data)
        try:
            return tokenizer_from_spec(spec, Path(prefix).parent)
        except ValueError as error:
            why = escaped(str(error), keep="")
            raise ValueError(f"{prefix}.json: the tokenizer that made the data: {why}") from None
    kind = data.tokenizer_type or "NullTokenizer"
    tokenizer = build_tokenizer(
        kind,
        data.tokenizer_model,
        data.vocab_file,
        data.merge_file,
        data.vocab_size,
        data.null_tokenizer_eod_id,
        data.tiktoken_pattern,
        data.tiktoken_num_special_tokens,
    )
    if kind == "HuggingFaceTokenizer":
        tokenizer.include_special_tokens(_special_tokens_around(data))
    return tokenizer


def _special_tokens_around(data: DataConfig) -> bool:
    """Whether special tokens are put around a text: as the flag says, or the data have it, or by default."""
    if data.tokenizer_hf_no_include_special_tokens:
        return False
    try:
        spec, _ = tokenizer_of_data(data)
    except (OSError, ValueError):  # no data, which is said when they are opened, or made elsewhere
        return True
    return spec.get("include_special_tokens", False)


def tokenizer_of_data(data: DataConfig) -> tuple[dict[str, Any], str]:
    """Return the description of the tokenizer that made the first data, and its prefix. Raises ValueError."""
    prefix = next(blend.prefixes[0] for blend in _blends(data) if blend.prefixes)
    sidecar = IndexedDataset(prefix).sidecar()
    if sidecar is None:
        raise ValueError(f"{prefix}.json does not say which tokenizer made the data: give --tokenizer-type")
    return sidecar["tokenizer"], prefix


def _open(path: str, data: DataConfig, tokenizer: Tokenizer) -> tuple[IndexedDataset, Path]:
    """Open a dataset and check it against the tokenizer -> (dataset, folder of its index caches)."""
    indexed = IndexedDataset(path)
    indexed.vocab_size = tokenizer.vocab_size
    cache = Path(data.data_cache_path) if data.data_cache_path else Path(path).parent / "cache"
    sidecar = indexed.sidecar()
    if sidecar and sidecar["fingerprint"] != tokenizer.fingerprint:
        raise ValueError(
            f"{path}.json: made with {str(sidecar['tokenizer']):.200}, which gives other ids than "
            f"{tokenizer.spec} now; all data need one tokenizer: leave --tokenizer-type away "
            "to use that of the first, or run nanomegatron preprocess again"
        )
    low, high = (0, sidecar["max_token"]) if sidecar else _scanned_range(indexed, cache)
    if low < 0 or high >= tokenizer.vocab_size:
        raise ValueError(
            f"{path}{'.json' * bool(sidecar)}: holds token {str(low if low < 0 else high):.40}; the "
            f"vocabulary of {tokenizer.spec['type']} is 0..{tokenizer.vocab_size - 1}: "
            "use the tokenizer that the data was made with"
        )
    return indexed, cache


def _scanned_range(indexed: IndexedDataset, cache: Path) -> list[int]:
    """Smallest and largest token of data without a sidecar; read once, then cached."""
    stat = Path(indexed.prefix + ".bin").stat()
    version = {"lengths": indexed.identity, "size": stat.st_size, "changed": stat.st_mtime_ns}
    scan = cached_arrays(cache, ("token_range",), version, lambda: (np.array(indexed.token_range()),))
    return scan[0].tolist()

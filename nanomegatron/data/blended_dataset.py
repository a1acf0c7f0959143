"""Several datasets blended by weight, so that every stretch of the run has the same mixture.

Sample n of the blend comes from the dataset that is furthest below its share:

    argmax over i of  weight_i * max(n, 1) - taken_i        the first of equals

    weights .5 .3 .2    dataset  0 1 2 0 1 0 2 0 1 0
                        sample   0 0 0 1 1 2 1 3 2 4

Each choice depends on all earlier ones, which suggests a loop. But the order soon becomes independent of its
start: numpy computes many stretches at once, each from a guess of the samples taken before it, and repeats
those whose guess differs from the end of the stretch before. Sizes and order equal Megatron's BlendedDataset.

A longer blend begins with the shorter one: with weights every dataset is extended (gpt_dataset.py), without
weights each has exactly one epoch.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanomegatron.data.cache import cached_arrays

_STRETCH = 512


class Blend(NamedTuple):
    """Prefixes of datasets and their weights; None: weighted by their sizes."""

    prefixes: list[str]
    weights: list[float] | None


def parse_blend(words: Sequence[str], flag: str) -> Blend:
    """`weight prefix weight prefix ...` or `prefix prefix ...`, distinguished as in Megatron.

    Raises ValueError if only some prefixes have a weight, or if a weight is not above 0.
    """
    weights = []
    for word in words[::2]:
        with contextlib.suppress(ValueError):
            weights.append(float(word))
    if len(words) % 2 or not weights:
        return Blend(list(words), None)
    if len(weights) < len(words) // 2 or not all(0 < w < math.inf for w in weights):
        raise ValueError(
            f"{flag} {' '.join(words)}: a weight above 0 before every prefix, as in 0.3 A 0.7 B, or none"
        )
    return Blend(list(words[1::2]), weights)


def blend_index(
    weights: Sequence[float], size: int, limits: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return dataset i16 `[size]` and sample i64 `[size]` of each position, and the samples of each dataset.

    limits: samples after which a dataset is no longer chosen.
    """
    share, most = np.array(weights, np.float64), np.array(limits if limits else [math.inf] * len(weights))
    first = np.arange(0, size, _STRETCH, dtype=np.float64)
    taken = np.floor(first[:, None] * share)
    by_lag = np.argsort(np.argsort(taken - first[:, None] * share, axis=1), axis=1)
    taken += by_lag < (first - taken.sum(1))[:, None]  # guess: rounded down, plus 1 for those furthest below
    datasets, todo = np.empty((len(first), _STRETCH), np.int16), np.arange(len(first))
    while todo.size:
        now, rows = taken[todo], np.arange(len(todo))
        for step in range(_STRETCH):
            lag = share * np.maximum(first[todo] + step, 1)[:, None] - now
            choice = np.where(now < most, lag, -math.inf).argmax(1)
            datasets[todo, step] = choice
            now[rows, choice] += 1
        todo, now = todo[todo + 1 < len(first)] + 1, now[todo + 1 < len(first)]
        wrong = (taken[todo] != now).any(1)
        taken[todo] = now
        todo = todo[wrong]
    datasets = datasets.ravel()[:size]
    samples, counts = np.empty(size, np.int64), np.bincount(datasets, minlength=len(weights))
    for i, count in enumerate(counts):
        samples[datasets == i] = np.arange(count)
    return datasets, samples, counts


class BlendedDataset:
    """At least `num_samples` samples of several datasets; without weights one epoch of each at most."""

    def __init__(
        self,
        build: Sequence[Callable[..., Any]],
        weights: Sequence[float] | None,
        num_samples: int,
        cache_folder: str | Path | None = None,
        before: Sequence[int] = (),
    ) -> None:
        """build[i](n) makes the i-th dataset with at least n samples; None: one epoch.

        before: as for `GPTDataset`; build[i](m, n) makes n samples that begin with those of build[i](m).
        """
        self.weights = None if weights is None else _normalized(weights)
        if weights is None:
            self.datasets = [make(None) for make in build]
            limits = [len(dataset) for dataset in self.datasets]
            size, weights = min(num_samples, sum(limits)), _normalized(limits)
        else:
            weights, limits = self.weights, None
            parts = [[math.ceil(n * w) for w in weights] for n in (*before, num_samples)]
            weights = _normalized(weights)  # again, as in Megatron: this changes last bits, and so ties
            size = max(map(sum, parts))
        self.dataset_index, self.dataset_sample_index, self.taken = cached_arrays(
            cache_folder,
            ("dataset_index", "dataset_sample_index", "taken"),
            {"weights": weights, "size": size, "limits": limits},
            lambda: blend_index(weights, size, limits),
        )
        if limits is None:
            stops = [np.bincount(self.dataset_index[: sum(p)], minlength=len(build)) for p in parts[:-1]]
            each = zip(build, zip(*parts), zip(*stops, self.taken))
            self.datasets = [_made_for(make, *numbers) for make, *numbers in each]

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.datasets[self.dataset_index[i]][int(self.dataset_sample_index[i])]

    def length(self, i: int) -> int:
        """Tokens of sample i; all datasets are a DocumentDataset."""
        return self.datasets[self.dataset_index[i]].length(int(self.dataset_sample_index[i]))

    def bytes_per_token(self) -> float | None:
        """Bytes of text per token, on average over the blend; None if it is unknown for one dataset."""
        each = [dataset.bytes_per_token() for dataset in self.datasets]
        return None if None in each else float(np.dot(each, self.taken) / len(self))


def _made_for(make: Callable[..., Any], parts: Sequence[int], taken: Sequence[int]) -> Any:
    """Make a dataset 0.5 % larger than the `parts` of each run, or with as many samples as are `taken`."""
    asked: list[int] = []
    for part, count in zip(parts, taken):
        asked.append(math.ceil(part * (1 + 0.005)))
        dataset = make(*asked)
        if count > len(dataset):  # 0.5 % was not enough; Megatron raises an error here
            asked[-1] = int(count)
            dataset = make(*asked)
    return dataset


def _normalized(weights: Sequence[float]) -> list[float]:
    """Shares that sum to 1, computed as in Megatron: another rounding would change the order of samples."""
    w = np.array(weights, np.float64)
    return (w / np.sum(w)).tolist()

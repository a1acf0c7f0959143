"""Several datasets mixed by weight, so that every stretch of the run has the mixture.

Sample n of the blend comes from the dataset that lags most behind its share:

    argmax over i of  weight_i * max(n, 1) - taken_i        the first of equals

    weights .5 .3 .2    dataset  0 1 2 0 1 0 2 0 1 0
                        sample   0 0 0 1 1 2 1 3 2 4

That depends on all choices before it, so it looks like a loop. But the order soon forgets how it began: many
stretches run side by side in numpy from a guess of what is taken by then, and those whose guess is not what
the stretch before them ends with run again. Sizes and order are Megatron's BlendedDataset's, to the bit.

A longer blend begins with the shorter one: with weights every dataset is made longer (gpt_dataset.py),
without them each has one epoch anyway.
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
    """Prefixes and their weights, None where the datasets' sizes decide."""

    prefixes: list[str]
    weights: list[float] | None


def parse_blend(words: Sequence[str], flag: str) -> Blend:
    """`weight prefix weight prefix ...` or `prefix prefix ...`, distinguished as in Megatron.

    Raises ValueError where some prefixes have a weight and some have none, or a weight is not above 0.
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
    """Dataset i16 [size] and sample i64 [size] of each place in the blend, and how often each is taken.

    A dataset that has given its limit of samples is left out from there on.
    """
    share, most = np.array(weights, np.float64), np.array(limits if limits else [math.inf] * len(weights))
    first = np.arange(0, size, _STRETCH, dtype=np.float64)
    taken = np.floor(first[:, None] * share)
    by_lag = np.argsort(np.argsort(taken - first[:, None] * share, axis=1), axis=1)
    taken += by_lag < (first - taken.sum(1))[:, None]  # the guess: floors, and one more for those behind most
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
    """`num_samples` or slightly more of several datasets; without weights, each once and by its size."""

    def __init__(
        self,
        build: Sequence[Callable[..., Any]],
        weights: Sequence[float] | None,
        num_samples: int,
        cache_folder: str | Path | None = None,
        before: Sequence[int] = (),
    ) -> None:
        """build[i](n) makes the i-th dataset with n samples at least, with one epoch for None.

        before: as for `GPTDataset`; build[i](m, n) makes n samples of which the first are those of m.
        """
        if weights is None:
            self.datasets = [make(None) for make in build]
            limits = [len(dataset) for dataset in self.datasets]
            size, weights = min(num_samples, sum(limits)), _normalized(limits)
        else:
            weights, limits = _normalized(weights), None
            parts = [[math.ceil(n * w) for w in weights] for n in (*before, num_samples)]
            weights = _normalized(weights)  # once more, as Megatron does: it moves last bits, and so ties
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
        """As that of the datasets, which are of documents."""
        return self.datasets[self.dataset_index[i]].length(int(self.dataset_sample_index[i]))

    def bytes_per_token(self) -> float | None:
        """Bytes of text behind a token, on average over the blend; None if one dataset does not know."""
        each = [dataset.bytes_per_token() for dataset in self.datasets]
        return None if None in each else float(np.dot(each, self.taken) / len(self))


def _made_for(make: Callable[..., Any], parts: Sequence[int], taken: Sequence[int]) -> Any:
    """A dataset of half a percent more samples than its parts, one a run, or of as many as are taken."""
    asked: list[int] = []
    for part, count in zip(parts, taken):
        asked.append(math.ceil(part * (1 + 0.005)))
        dataset = make(*asked)
        if count > len(dataset):  # the 0.5 % on top was not enough; Megatron stops here
            asked[-1] = int(count)
            dataset = make(*asked)
    return dataset


def _normalized(weights: Sequence[float]) -> list[float]:
    """Shares that add up to 1, by Megatron's order of operations: another rounding would change the order."""
    w = np.array(weights, np.float64)
    return (w / np.sum(w)).tolist()

"""What datasets of samples have in common: checked ids, and the bytes of text per token."""

from typing import Any

import numpy as np

from nanomegatron.data.sidecar import text_bytes_before


class Samples:
    """Base class of datasets of samples."""

    indexed: Any  # an IndexedDataset, or an object with the same methods
    sequences: tuple[int, int]  # the sequences that the samples come from: [start, stop)
    shuffle_index: np.ndarray  # the number of the sample at each position of the order

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, i: int) -> np.ndarray:
        """The i-th sample, int64. Raises ValueError for an id outside the vocabulary: a GPU would abort."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)} in {self.indexed.prefix}")
        sample = self.tokens(i)
        limit = self.indexed.vocab_size
        if limit and sample.view(np.uint64).max() >= limit:
            raise ValueError(
                f"{self.indexed.prefix}.bin: tokens {sample.min()}..{sample.max()} in sample {i}, beyond the "
                f"vocabulary's 0..{limit - 1}: the file has changed since the run began; restore it"
            )
        return sample

    def bytes_per_token(self) -> float | None:
        """Bytes of text per token, on average over the sequences; None if PREFIX.json does not have them.

        PREFIX.json has the bytes before some sequences (`marks`); between these they are interpolated.
        """
        text, whole = self.indexed.sidecar(), (0, len(self.indexed))
        if not text or ("text_bytes_before" not in text and tuple(self.sequences) != whole):
            return None
        before = text_bytes_before(f"{self.indexed.prefix}.json", text)
        if not 1 < len(before) <= whole[1] + 1:  # unknown, or written for other data
            return None
        tokens = np.concatenate(([0], self.indexed.sequence_lengths)).cumsum(dtype=np.int64)
        ends = tokens[list(self.sequences)]
        places = tokens[marks(whole[1], len(before) - 1)]
        return float(np.diff(np.interp(ends, places, before))[0] / np.diff(ends)[0]) or None


def marks(count: int, parts: int = 1000) -> np.ndarray:
    """Indices that cut `count` sequences into `parts` nearly equal parts (at most one each), 0 to count."""
    return np.rint(np.linspace(0, count, min(count, parts) + 1)).astype(np.int64)

"""Other result than `step.build_loaders`, for `--variable-seq-lengths`: whole documents as samples.

    document   t0 t1 t2 t3 t4 t5 t6        seven tokens, --seq-length 4
    sample     t0 t1 t2 t3                 labels t1 t2 t3 t4
                           t4 t5           labels t5 t6

A document longer than --seq-length is cut into several samples. Its last token is only a label; a document of
one token is no sample. A global batch takes samples in the order of the run, which depends only on seed and
consumed samples: every epoch has each sample once, in a different order. `document_packs.py` makes
microbatches of them. (Megatron-LM's packed sequences. tests/variants/test_document_dataset.py)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanomegatron.data.cache import cached_arrays
from nanomegatron.data.samples import Samples


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

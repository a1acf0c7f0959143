"""Which data a run is trained on: a checkpoint keeps it, and it is compared when a run resumes.

    {"train": [{"prefix": "corpus_text_document", "weight": 0.7, "sequences": [0, 9900],
                "idx": SHA-256 of .idx, "bytes": size of .bin, "bin": SHA-256 of 64 blocks of .bin}, ...],
     "valid": [...], "test": [...]}

Only contents are compared: moved or renamed files are the same data. Of a .bin 64 blocks at fixed places are
hashed, so that a terabyte takes milliseconds: that finds other data, not a changed token elsewhere, for which
`preprocess.py --verify-data` reads everything (data/verify.py).
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanomegatron.data.indexed_dataset import IndexedDataset

SPLITS = ("train", "valid", "test")
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # blocks of a .bin that are hashed, and bytes in each
FACTS = {  # fact of a pair -> how a change of it is reported
    "bytes": "size of .bin {} -> {} bytes",
    "idx": "SHA-256 of .idx {} -> {}",
    "bin": f"SHA-256 of {SAMPLES} blocks of .bin {{}} -> {{}}",
    "weight": "weight {} -> {}",
    "sequences": "sequences {} -> {} (--split)",
}


def data_identity(datasets: Sequence[Any]) -> dict[str, list[dict]]:
    """Return the facts of every pair of files in training, validation and test data (None: not built)."""
    found = {}
    for split, whole in zip(SPLITS, datasets, strict=True):
        if whole is not None:
            parts = getattr(whole, "datasets", [whole])  # of a blend
            weights = getattr(whole, "weights", None) or [None] * len(parts)
            found[split] = [_pair(part, weight) for part, weight in zip(parts, weights, strict=True)]
    return found


def _pair(dataset: Any, weight: float | None) -> dict[str, Any]:
    indexed, facts = dataset.indexed, {"weight": weight, "sequences": list(dataset.sequences)}
    if isinstance(indexed, IndexedDataset):
        path = f"{indexed.prefix}.bin"
        facts |= {"idx": indexed.identity, "bytes": os.path.getsize(path), "bin": sampled_hash(path)}
    return {"prefix": Path(indexed.prefix).name, **facts}


def sampled_hash(path: str) -> str:
    """SHA-256 of SAMPLES blocks at equal distances, from the first to the last bytes; of all if few."""
    digest, last = hashlib.sha256(), max(0, os.path.getsize(path) - SAMPLE_BYTES)
    with open(path, "rb", buffering=0) as file:
        for i in range(SAMPLES):
            file.seek(last * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def data_changes(saved: Any, now: dict[str, list[dict]]) -> list[str]:
    """Return a line for each difference of the data from the `saved` ones, of splits that both have."""
    try:
        both = [(split, saved[split], now[split]) for split in SPLITS if split in saved and split in now]
        return [line for pairs in both for line in _split_changes(*pairs)]
    except (AttributeError, TypeError, ValueError):
        return ["what the checkpoint says of its data is damaged"]


def trained_on(state: dict[str, Any]) -> str:
    """The names of the training data that a checkpoint's state has, for a message."""
    with suppress(KeyError, TypeError):
        return ", ".join(str(pair["prefix"]) for pair in state["data"]["train"])
    return "data that it does not name"


def _split_changes(split: str, saved: list[dict], now: list[dict]) -> list[str]:
    if len(saved) != len(now):
        names = [" ".join(str(pair.get("prefix")) for pair in pairs) for pairs in (saved, now)]
        return [f"{split} data: {len(saved)} data sets -> {len(now)} ({' -> '.join(names)})"]
    lines = []
    for i, (old, new) in enumerate(zip(saved, now, strict=True), 1):
        changed = [fact for fact in FACTS if old.get(fact) != new.get(fact)]
        facts = [FACTS[fact].format(_short(old.get(fact)), _short(new.get(fact))) for fact in changed]
        names = dict.fromkeys((str(old.get("prefix")), str(new.get("prefix"))))
        lines += [f"{split} data {i}, {' -> '.join(names)}: {'; '.join(facts)}"] * bool(facts)
    return lines


def _short(value: Any) -> str:
    """A fact in a message: 12 digits of a hash, a range as 0..40."""
    if isinstance(value, list):
        return "..".join(map(str, value))
    return "none" if value is None else str(value)[:12]

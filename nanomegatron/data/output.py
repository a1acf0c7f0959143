"""The data sets that preprocess.py writes, one for each key, and what an unfinished run leaves for the next.

    PREFIX_KEY_document.bin.tmp     the tokens so far
    PREFIX.unfinished/run.json      what the run was: files, keys, tokenizer
    PREFIX.unfinished/00000.npz     the tokens of 64 MiB of text, and the place in the input behind it

With --resume the tokens are also kept in shards, each synced to disk when it is complete. The next run writes
those of the shards again, up to the first that is damaged or missing, and reads the input from there on.
Nothing of this loads as a data set; the finished files are those of a run that was never interrupted, to the
byte.
"""

import contextlib
import json
import os
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nanomegatron.config.user_files import read_json
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder, best_dtype, publish
from nanomegatron.data.reading import InputPlace
from nanomegatron.data.samples import marks
from nanomegatron.data.text import Encoded, Encoder
from nanomegatron.data.tokenizer import ends_of_text, named_ids

SHARD_BYTES = 1 << 26  # of text
Chunk = tuple[list[Encoded], list[str], InputPlace]  # under each key, lines left out, the place behind it


class DatasetOutput:
    """Builds the data sets of a run; `place` is where reading resumes behind what they hold."""

    def __init__(self, prefix: str | Path, encoder: Encoder) -> None:
        self.prefix = str(prefix)
        self.encoder = encoder
        self._tokenizer = encoder.tokenizer
        self.place = InputPlace()
        self.skipped: list[str] = []
        self._sizes: list[list[np.ndarray]] = [[] for _ in encoder.keys]  # bytes of text of each sequence
        self._unfinished: Path | None = None  # the folder of shards
        self._shards = 0
        self._open: list[Chunk] = []  # the shard that is not complete
        self._start = time.monotonic()

    @contextlib.contextmanager
    def open(self, files: list[str], resume: bool) -> Iterator["DatasetOutput"]:
        """Open the builders; `resume`: go on from the shards of an earlier run, and keep this one's."""
        with contextlib.ExitStack() as stack:
            dtype = best_dtype(self._tokenizer.vocab_size)
            names = [f"{self.prefix}_{key}_document" for key in self.encoder.keys]
            self.builders = [stack.enter_context(IndexedDatasetBuilder(name, dtype)) for name in names]
            if resume:
                self._unfinished = Path(f"{self.prefix}.unfinished")
                self._check_run(files)
                self._take_up()
            yield self

    @property
    def documents(self) -> int:
        return self.builders[0].documents

    @property
    def tokens(self) -> int:
        return sum(builder.tokens for builder in self.builders)

    def add(self, parts: list[Encoded], skipped: list[str], place: InputPlace) -> None:
        """Write the documents of a chunk, and note which lines were left out."""
        self._write(parts, skipped, place)
        if self._unfinished:
            self._open.append((parts, skipped, place))
            if sum(int(part.text_bytes.sum()) for parts, _, _ in self._open for part in parts) >= SHARD_BYTES:
                self._keep_shard()

    def _write(self, parts: list[Encoded], skipped: list[str], place: InputPlace) -> None:
        self.skipped += skipped
        self.place = place
        for builder, part, sizes in zip(self.builders, parts, self._sizes):
            builder.add_documents(part.tokens, part.lengths)
            sizes.append(part.text_bytes[part.lengths > 0])

    def _keep_shard(self) -> None:
        """Write the open shard to the disk."""
        skipped = [line for _, lines, _ in self._open for line in lines]
        facts = {"place": np.array(self.place, np.int64), "skipped": json.dumps(skipped)}
        for k in range(len(self.encoder.keys)):
            columns = zip(*(parts[k] for parts, _, _ in self._open))
            facts |= {f"{name} {k}": np.concatenate(c) for name, c in zip(Encoded._fields, columns)}
        with publish(self._shard(self._shards)) as temporary, open(temporary, "wb") as file:
            np.savez(file, **facts)
        self._shards += 1
        self._open = []

    def _shard(self, number: int) -> Path:
        return self._unfinished / f"{number:05}.npz"

    def _check_run(self, files: list[str]) -> None:
        """Note what this run is. Raises ValueError if the shards there are of another one."""
        if "-" in files:
            raise ValueError("--resume: standard input cannot be read again; give files")
        status = [(os.path.abspath(file), os.stat(file)) for file in files]
        facts = {f"file {i + 1}": [name, s.st_size, s.st_mtime_ns] for i, (name, s) in enumerate(status)}
        facts |= {
            "keys": list(self.encoder.keys),
            **self.encoder.facts(),
            "tokenizer": self._tokenizer.fingerprint,
        }
        path = self._unfinished / "run.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with publish(path) as temporary:
                temporary.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        try:
            earlier = read_json(path)
        except ValueError:
            raise ValueError(f"{path}: damaged; remove {path.parent} to begin again") from None
        for name in [*facts, *earlier]:
            if (old := earlier.get(name)) != (new := facts.get(name)):
                raise ValueError(
                    f"--resume: {path.parent} is of a run with another {name}, {old} -> {new}; "
                    "give the same, or remove that folder to begin again"
                )

    def _take_up(self) -> None:
        """Write what complete shards hold, and drop those behind the first that is damaged."""
        while (chunk := read_shard(self._shard(self._shards), len(self.encoder.keys))) is not None:
            parts, skipped, place = chunk
            self._write(parts, skipped, place)
            self._shards += 1
        for path in self._unfinished.glob("*.npz"):
            if int(path.stem) >= self._shards:
                path.unlink()

    def finish(self) -> list[str]:
        """Make the data sets loadable -> a line of report for each. Raises ValueError without a token."""
        for builder in self.builders:
            if not builder.tokens:
                raise ValueError(
                    f"{builder.prefix}: {builder.documents} documents without a token: is --input empty?"
                )
        before = [np.concatenate(([0], *each)).cumsum() for each in self._sizes]  # each sequence, and in all
        for builder, text_bytes in zip(self.builders, before):
            builder.finalize(
                dict(
                    documents=builder.documents,
                    empty_documents=builder.documents - builder.sequences,
                    tokens=builder.tokens,
                    text_bytes=int(text_bytes[-1]),
                    text_bytes_before=" ".join(map(str, text_bytes[marks(builder.sequences)])),
                    max_token=builder.max_token,
                    **self.encoder.facts(),
                    tokenizer=self._tokenizer.spec,
                    fingerprint=self._tokenizer.fingerprint,
                )
            )
        if self.skipped:
            with publish(f"{self.prefix}.skipped") as temporary:
                temporary.write_text("\n".join(self.skipped) + "\n", encoding="utf-8")
        if self._unfinished:
            shutil.rmtree(self._unfinished)
        seconds = time.monotonic() - self._start
        left_out = [f"{self.prefix}.skipped: {len(self.skipped)} lines left out"] * bool(self.skipped)
        return left_out + [
            f"{b.prefix}: {b.documents:,} documents ({b.documents - b.sequences:,} empty), "
            f"{b.tokens:,} tokens, {size[-1] / b.tokens:.2f} bytes a token, {seconds:.1f} s{self._ends()}"
            for b, size in zip(self.builders, before)
        ]

    def _ends(self) -> str:
        """What the tokenizer puts around each document, for the report; "" if nothing."""
        text = ends_of_text(self._tokenizer)
        if self._tokenizer.suffix_ids and self.encoder.append_eod:
            text += f", then {named_ids(self._tokenizer, [self._tokenizer.eod])} of --append-eod"
        return f"; each document {text}" if text else ""


def read_shard(path: Path, keys: int) -> Chunk | None:
    """Return what a shard of `keys` keys holds, as `add` was given it; None if it is damaged or not there."""
    try:
        with np.load(path, allow_pickle=False) as file:  # compares checksums
            facts: dict[str, Any] = dict(file)
        parts = [Encoded._make(facts[f"{name} {k}"] for name in Encoded._fields) for k in range(keys)]
        return parts, json.loads(str(facts["skipped"])), InputPlace._make(facts["place"].tolist())
    except (OSError, ValueError, TypeError, LookupError, EOFError, zipfile.BadZipFile):
        return None

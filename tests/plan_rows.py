"""The training runs of plan_rows.toml, each with what its results file says was measured."""

import statistics
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.table import follow, load
from nanomegatron.config.check import resolve
from nanomegatron.config.cli import parse
from nanomegatron.config.settings import Config

SPEC = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SECONDS = {"median_ms": 1e-3, "ms": 1e-3, "step_ms": 1e-3, "step_time_ms": 1e-3, "step_s": 1}


@dataclass(frozen=True)
class Row:
    """A training run: flags that parse today, where it ran, and paths to what was measured."""

    file: str
    at: str
    flags: str
    gpu: str
    world: int
    vocab: int
    step: str
    peak: str
    peak_of: str  # "fullest" GPU or "rank 0"
    half: str | None = None
    left_out: str = ""
    superseded: str = ""
    no_time: str = ""
    no_memory: str = ""

    @property
    def name(self) -> str:
        return f"{self.file} {self.at}"

    @cached_property
    def config(self) -> Config:
        return resolve(parse(self.flags.split()).config, self.world)

    @property
    def tokens(self) -> int:
        """Those of a step."""
        return self.config.data.global_batch_size * self.config.data.seq_length

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None if they say nothing about the code of today."""
        if self.half is None or self.no_time:
            return None
        value = statistics.median(self.measured(self.step))
        return value * SECONDS[self.step] if self.step in SECONDS else self.tokens / value

    @property
    def peak_bytes(self) -> float | None:
        """Bytes that torch's allocator had given out at most, on the GPU of `peak_of`; or None."""
        return None if self.half is None or self.no_memory else max(self.measured(self.peak)) * 2**30

    def measured(self, what: str) -> list[float]:
        """The numbers of a path below the row's own, of all turns where there are several."""
        found = follow(load(self.file), [step for step in (*self.at.split("/"), what) if step])
        found = found if isinstance(found, list) else [found]
        return [x for turn in found for x in (turn if isinstance(turn, list) else [turn])]


def every_row() -> list[Row]:
    """All of the file."""
    rows = []
    for entry in SPEC["files"]:
        shared = {key: value for key, value in entry.items() if key != "rows"}
        rows += [Row(**shared | row) for row in entry["rows"]]
    return rows


def rows(half: str | None = None) -> list[Row]:
    """Those that a prediction can be compared with; half: "fit" or "check", None for both."""
    return [row for row in every_row() if row.half and half in (None, row.half)]

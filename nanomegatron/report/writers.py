"""Writers of a run's numbers: JSON lines, whole files, TensorBoard, Weights & Biases.

JSON has no NaN: numbers that are not finite are written as the strings "nan", "inf" and "-inf", which float()
accepts.
"""

import datetime
import importlib.util
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from nanomegatron.config.durable import sync
from nanomegatron.config.settings import Config
from nanomegatron.report.energy import ENERGY_TAGS, energy_scalars


class Lines:
    """A text file to which lines are appended; an incomplete one (full disk, kill) keeps its own line."""

    def __init__(self, path: Path):
        self.path = path
        self._file, self._cut = None, False

    def write(self, text: str) -> None:
        """Append a line, unbuffered. Raises OSError if that fails; a later call may succeed."""
        if self._file is None:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            self._cut = self.path.is_file() and not (self.path.read_bytes() or b"\n").endswith(b"\n")
        data = ("\n" * self._cut + text + "\n").encode(errors="replace")
        while data:
            written = self._file.write(data)
            self._cut, data = written < len(data), data[written:]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class JsonLines(Lines):
    """A file with one JSON object per line, in order of `iteration`."""

    _behind: int | None = None  # records after this iteration are still to be dropped

    def drop_after(self, iteration: int, warn: Callable[[str], None] = warnings.warn) -> None:
        """Keep the records up to `iteration`; lines that are damaged or incomplete are removed too.

        If that fails (OSError), `append` tries it again and writes only after it has succeeded.
        """
        self._behind = iteration
        self.keep(lambda record: record["iteration"] <= iteration, warn)
        self._behind = None

    def keep(
        self, wanted: Callable[[dict[str, Any]], bool], warn: Callable[[str], None] = warnings.warn
    ) -> None:
        """Drop all but the wanted records. Raises OSError."""
        self.close()
        if self.path.is_file():
            kept = [record for record in read_jsonl(self.path, warn) if wanted(record)]
            replace_file(self.path, "".join(json.dumps(record) + "\n" for record in kept))

    def append(self, record: dict[str, Any]) -> None:
        """Append a record. Raises OSError if that fails."""
        if self._behind is not None:
            self.drop_after(self._behind)
        self.write(json.dumps(plain(record), allow_nan=False))


def read_jsonl(path: str | Path, warn: Callable[[str], None] = warnings.warn) -> list[dict[str, Any]]:
    """Read the records of a .jsonl file; [] if there is no file.

    Lines that are no records are skipped with one warning; an incomplete last line without a warning.
    """
    records: list[dict[str, Any]] = []
    if not Path(path).is_file():
        return records
    damaged = 0
    for text in Path(path).read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and isinstance(record.get("iteration"), int | float):
            records.append(record)
        else:
            damaged += text.endswith("\n")
    if damaged:
        warn(f"{path}: {damaged} damaged line{'s' * (damaged > 1)} left out, {len(records)} steps are whole")
    return records


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path` atomically: readers, also after a crash, see the old or the new file.

    A symbolic link stays: what it points to is written.
    """
    with replacing(path.resolve()) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        sync(file)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager that gives a name beside `path`: what was made there takes its place at the end."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with NaN and infinities, which JSON lacks, as strings."""
    strange = {key for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return record | {key: str(record[key]) for key in strange}


# Extras: TensorBoard, Weights & Biases, tqdm


# Prefixes of tags that are logged by iteration only; all others also by samples.
BY_ITERATION = ("iteration-time", "throughput", "mfu", "skipped-train-samples", "fp8/", "experts/")
BY_ITERATION += ENERGY_TAGS
# Numbers of a step with experts, each the mean over layers (report/counters.py) -> tag.
EXPERT_TAGS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
    "moe_load_imbalance": "load-imbalance",
    "moe_dropped_share": "dropped-share",
}


def timestamp() -> str:
    """The current time, to the second, with the offset from UTC."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def overflow(record: dict[str, Any]) -> str:
    """Say that a step of fp16 was skipped for its loss scale; "" if it was not."""
    spoilt = math.isfinite(record["lm_loss"]) and not math.isfinite(record["grad_norm"])
    scale = record.get("loss_scale", 1.0)
    return too_large(scale) if spoilt and record.get("skipped") and scale != 1 else ""


def too_large(scale: float) -> str:
    """Say what an overflow under this loss scale means."""
    return f"loss scale {scale:.0f} too large, step skipped"


def step_scalars(record: dict[str, Any]) -> dict[str, Any]:
    """Return a step's numbers by Megatron's TensorBoard tags, None where unknown; times in seconds."""
    return {
        "lm loss": record["lm_loss"],
        "learning-rate": record["next_lr"],  # as in Megatron
        "grad-norm": record["grad_norm"],
        "iteration-time": record["step_time_ms"] / 1e3,
        "throughput": record["tflops_per_gpu"],
        "mfu": record["mfu"],
        **energy_scalars(record),
        "loss-scale": record.get("loss_scale"),
        "batch-size": record["global_batch_size"],
        "skipped-train-samples": record.get("skipped_samples") or None,
        "num-zeros": record.get("num_zeros"),
        "params-norm": record.get("params_norm"),
        **{tag: record.get(key) for key, tag in EXPERT_TAGS.items()},
    }


class TensorBoard:
    """A writer of scalars by tag, under the folder of --tensorboard-dir."""

    def __init__(self, folder: str, iteration: int):
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an earlier attempt wrote after the checkpoint.
        self.writer = SummaryWriter(folder, purge_step=iteration + 1)

    def add(self, scalars: dict[str, Any], record: dict[str, Any]) -> None:
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, record["iteration"])
            if not tag.startswith(BY_ITERATION) and record["consumed_samples"] is not None:
                self.writer.add_scalar(f"{tag} vs samples", value, record["consumed_samples"])

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A writer of scalars by tag, to the project of --wandb-project."""

    def __init__(self, folder: Path, config: Config):
        import wandb

        name, place = config.run.wandb_exp_name or folder.name, config.run.wandb_save_dir or str(folder)
        Path(place).mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=config.run.wandb_project,
            entity=config.run.wandb_entity,
            dir=place,
            name=name,
            config=asdict(config),
        )

    def add(self, scalars: dict[str, Any], record: dict[str, Any]) -> None:
        self.run.log(scalars, step=record["iteration"])

    def close(self) -> None:
        self.run.finish()


def spare_exit(*streams: TextIO | None) -> None:
    """Flush streams; one that fails is redirected to /dev/null, or Python's last flush sets the exit code."""
    for stream in filter(None, streams):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def progress_bar(done: int, total: int, stream: TextIO, **look: Any) -> Any:
    """Return a tqdm bar, with its arguments, if `stream` is a terminal and tqdm is installed; else None."""
    if not stream.isatty() or importlib.util.find_spec("tqdm") is None:
        return None
    from tqdm import tqdm

    look = dict(unit="step", dynamic_ncols=True, leave=False) | look
    return tqdm(initial=done, total=total, file=stream, **look)


def duration(seconds: float) -> str:
    """Format seconds as m:ss, h:mm:ss or "1 day, 2:03:04"."""
    return re.sub("^0:0?", "", str(datetime.timedelta(seconds=round(seconds))))

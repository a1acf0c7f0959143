"""The records of a run: a console for people, files for programs.

    runs/latest            a link to the newest run's folder
    runs/NAME/config.toml  its settings; config-to-N.toml: other ones it had up to iteration N
              eval.toml      those of --eval-only
              log.txt        rank 0's console, with Megatron's log line instead of the table
              log.R.txt      the lines of rank R, if it writes any
              hang.R.txt     its stacks, if the run has hung (faults/watchdog.py)
              metrics.jsonl  one JSON object per step: KEYS, and further numbers of the step
              evals.jsonl    one per evaluation
              fp8.jsonl      one per step of --log-fp8-stats: layer/tensor/kind, KINDS of counters.py
              experts.jsonl  one per step of --moe-per-layer-logging: layer/kind, kinds of ExpertLoad there
              status.json    running, done, stopped (as an --exit- flag says), preempted or failed; exit code,
                             last checkpoint, the cause

Only rank 0 writes numbers. Other ranks warn under their own name, the first that fails writes status.json. A
resumed run drops the steps after its checkpoint from the .jsonl files. `before`: status.json at the start.

Training does not depend on these records: if a file or the console cannot be written (a full disk, a closed
pipe), or a picture cannot be drawn, `attempt` warns once and later writes are tried again. An incomplete line
is left as it is, on its own line, and is no record.
"""

import datetime
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from nanomegatron.config.check import unseen_notes
from nanomegatron.config.settings import Config
from nanomegatron.config.user_files import escaped
from nanomegatron.report.energy import megatron_parts
from nanomegatron.report.status import read_status, write_status
from nanomegatron.report.writers import (
    EXPERT_TAGS,
    JsonLines,
    Lines,
    TensorBoard,
    WeightsAndBiases,
    duration,
    overflow,
    progress_bar,
    replace_file,
    replacing,
    spare_exit,
    step_scalars,
)

KEYS = """
iteration consumed_samples global_batch_size lm_loss grad_norm lr next_lr step_time_ms tokens_per_s
tflops_per_gpu mfu
""".split()
LOST_PEER = "lost a peer"  # start of the message of a failure that another rank caused
HANG = "a hang"  # start of the message of the watch-dog


class RunLog:
    """The records of one run. Every rank has a RunLog; methods for rank 0 do nothing on the others.

    Order of use: line() and warn() at any time, begin() once the first iteration is known, step() and
    evaluation() from then on, status() at each change, close() at the end.
    """

    def __init__(
        self,
        folder: str | Path,
        config: Config,
        rank: int = 0,
        label: str = "rank 0",
        stream: TextIO | None = None,
    ) -> None:
        """label: name of this rank in its warnings, such as "rank 3 tp1 dp0"; stream: None is sys.stdout."""
        self.folder, self.config = Path(folder), config
        self.rank, self.label, self.is_main = rank, label, rank == 0
        self.stream = stream or sys.stdout
        self.train_iters = 0
        self._text = Lines(self.folder / ("log.txt" if self.is_main else f"log.{rank}.txt"))
        self._failed: set[str] = set()
        self.folder_lost = False  # then no more files are written at its path
        self._series: list[JsonLines] = []
        self._beside = {
            kind: JsonLines(self.folder / f"{kind}.jsonl") for kind in ("evals", "fp8", "experts")
        }
        self._writers: list[Any] = []
        self._bar: Any = None
        self._interval: list[dict] = []
        self._titled = False  # the table
        self._first: int | None = None  # the iteration of the first record
        self._facts: dict[str, Any] = dict(exit_code=None, iteration=None, message="", checkpoint=None)
        with self.attempt(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.before = read_status(self.folder / "status.json", self.warn) if self.is_main else {}
        if self.before.get("state") == "running":
            self.line(
                "note    the run before wrote no end: it was killed with its launcher, or the disk was full"
            )
        self.status("running", **{key: self.before.get(key) for key in ("iteration", "checkpoint")})

    def begin(self, iteration: int, train_iters: int) -> None:
        """Open the series after `iteration` (0: new run); records of later iterations are dropped."""
        self.train_iters, self._facts["iteration"] = train_iters, iteration
        if not self.is_main:
            return
        extra = self.config.run.metrics_jsonl
        if extra:
            with self.attempt(str(Path(extra).parent)):
                Path(extra).parent.mkdir(parents=True, exist_ok=True)
        paths = [self.folder / "metrics.jsonl"] + ([Path(extra)] if extra else [])
        self._series = [JsonLines(path) for path in dict.fromkeys(path.absolute() for path in paths)]
        self.rewind(iteration)
        for note in unseen_notes(self.config.run, iteration):
            self.line(f"note    {note}")
        if self.config.run.tensorboard_dir:
            with self.attempt("TensorBoard"):
                self._writers.append(TensorBoard(self.config.run.tensorboard_dir, iteration))
        if self.config.run.wandb_project:
            with self.attempt("Weights & Biases"):
                self._writers.append(WeightsAndBiases(self.folder, self.config))
        with self.attempt("progress bar"):
            self._bar = progress_bar(iteration, train_iters, self.stream)

    def rewind(self, iteration: int) -> None:
        """Drop the records of later iterations from the series; rank 0 only."""
        for series in [*self._series, *self._beside.values()] if self.is_main else ():
            with self.attempt(str(series.path)):
                series.drop_after(iteration, self.warn)

    @contextmanager
    def attempt(self, what: str, alike: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Context manager for work a run can do without: an error is a warning, once for each `what`.

        alike: whether all ranks have the same error (matters for collectives); if not, it is raised.
        """
        try:
            yield
        except Exception as error:
            if not alike():
                raise
            if what not in self._failed:
                self._failed.add(what)
                why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                self.warn(f"{what}: {why}; the run continues without it")

    # Text

    def line(self, text: str = "") -> None:
        """Write a line to rank 0's console and to this rank's log file."""
        if self.is_main:
            self._console(text)
        self._file(text)

    def warn(self, text: str) -> None:
        """Write a line that starts with "!", on any rank, to the console and this rank's log file."""
        text = f"! {text}" if self.is_main else f"! [{self.label}] {text}"
        self._console(text)
        self._file(text)

    def _console(self, text: str) -> None:
        with self.attempt("console"):
            write = print if self._bar is None else self._bar.write
            write(escaped(text), file=self.stream)
            self.stream.flush()

    def _file(self, text: str) -> None:
        if self.folder_lost:
            return
        with self.attempt(str(self._text.path)):
            self._text.write(escaped(text))

    def replace(self, name: str, text: str) -> None:
        """Replace a file in the run's folder; an error is only a warning."""
        with self.attempt(str(self.folder / name)):
            replace_file(self.folder / name, text)

    def keep_settings(self, text: str, iteration: int) -> None:
        """Write config.toml; one with other settings stays as config-to-ITERATION.toml, where they ended."""
        path = self.folder / "config.toml"
        with self.attempt(str(path)):
            before = path.read_text(encoding="utf-8") if path.is_file() else text
            kept = self.folder / f"config-to-{iteration}.toml"
            if before != text and not kept.exists():
                replace_file(kept, before)
            replace_file(path, text)

    def mark_latest(self) -> None:
        """Let the link `latest` beside this run's folder point to it; rank 0 only."""
        link = self.folder.parent / "latest"
        if self.is_main:
            with self.attempt(str(link)), replacing(link) as new:
                new.symlink_to(self.folder.name)

    # Numbers

    def step(self, record: dict[str, Any]) -> None:
        """Record an iteration; write a line at the first, the last and every --log-interval.

        record: has all of KEYS (mfu is None if the GPU's peak is unknown), and may have `skipped`,
        `loss_scale`, `skipped_samples`, `num_zeros`, `params_norm`, `peak_mem_gib`, keys of EXPERT_TAGS, and
        `tflops_per_gpu_*` by other FLOP conventions, and those of energy.py.
        """
        self._facts["iteration"] = record["iteration"]
        if self._first is None:
            self._first = record["iteration"]
        if not self.is_main:
            return
        record = {key: record[key] for key in KEYS} | record
        for series in self._series:
            self._append(series, record)
        self._scalars(step_scalars(record), record)
        self._interval.append(record)
        if self._bar is not None:
            with self.attempt("console"):
                self._bar.update(1)
        if self.line_due(record["iteration"]):
            self.end_interval()

    def line_due(self, iteration: int) -> bool:
        """Whether a line comes after this step: the first, the last and every --log-interval; on any rank."""
        return iteration in (self._first, self.train_iters) or iteration % self.config.run.log_interval == 0

    def end_interval(self) -> None:
        """Write a line of the steps since the last one, if there are any: those before a stop."""
        if self._interval:
            mean = _mean(self._interval)
            self._interval = []
            if not self._titled:
                self._console("".join(table_cells(mean, self.train_iters)))
            self._titled = True
            self._console(table_row(mean, self.train_iters))
            self._file(megatron_line(mean, self.train_iters, self.config))

    def _append(self, series: JsonLines, record: dict[str, Any]) -> None:
        with self.attempt(str(series.path)):
            series.append(record)

    def _scalars(self, tags: dict[str, Any], record: dict[str, Any]) -> None:
        """Write numbers by tag, those that are known."""
        scalars = {tag: value for tag, value in tags.items() if value is not None}
        for writer in self._writers:
            with self.attempt(type(writer).__name__):
                writer.add(scalars, record)

    def details(self, kind: str, iteration: int, samples: int, numbers: dict[str, Any]) -> None:
        """Record a step's numbers per layer; kind: "fp8" or "experts"; samples: consumed so far.

        Lists are only written to the file.
        """
        if not self.is_main:
            return
        record = {"iteration": iteration, "consumed_samples": samples}
        self._append(self._beside[kind], record | numbers)
        tags = {f"{kind}/{name}": x for name, x in numbers.items() if not isinstance(x, list)}
        self._scalars(tags, record)

    def evaluation(
        self,
        iteration: int,
        split: str,
        loss: float,
        bpb: float | None = None,
        samples: int | None = None,
        batches: int | None = None,
    ) -> None:
        """Record an evaluation on "validation" or "test" data: Megatron's box in the log, and a console line.

        loss: in nats per token; bpb: in bits per byte of text, if known; samples: consumed so far; batches:
        the number evaluated.
        """
        if not self.is_main:
            return
        ppl = math.exp(min(20, loss))
        record = {
            "iteration": iteration,
            "split": split,
            "lm_loss": loss,
            "ppl": ppl,
            "bits_per_byte": bpb,
            "consumed_samples": samples,
            "batches": batches,
        }
        evals = self._beside["evals"]
        place = (iteration, split)
        with self.attempt(str(evals.path)):
            if self.config.run.eval_only:  # beside that of training at this step
                record["eval_only"] = True
            else:
                evals.keep(
                    lambda old: "eval_only" in old or (old["iteration"], old.get("split")) != place, self.warn
                )
            evals.append(record)
        tags = {f"lm loss {split}": loss, f"lm loss {split} ppl": ppl, f"bits per byte {split}": bpb}
        self._scalars(tags, record)
        box = (
            f" validation loss at iteration {iteration} on {split} set | lm loss value: {loss:.6E} | "
            f"lm loss PPL: {ppl:.6E} | " + (f"bits per byte: {bpb:.6E} | " if bpb is not None else "")
        )
        self._file("\n".join(["-" * len(box), box, "-" * len(box)]))
        bits = f", {bpb:.3f} bits per byte" if bpb is not None else ""
        self._console(f"{split} at step {iteration}: loss {loss:.4f}, perplexity {ppl:.4g}{bits}")

    def progress(self, what: str, total: int) -> Iterator[int]:
        """Yield 0 .. total - 1, and say how many are done with the time left: after 10 seconds or a tenth.

        The longer of the two counts, so that hours have ten lines. Nothing is said shortly before the end.
        """
        start = last = time.monotonic()
        for n in range(total):
            yield n
            now = time.monotonic()
            each = (now - start) / (n + 1)
            left = each * (total - n - 1)
            if self.is_main and now - last >= max(10, each * total / 10) and left > 5:
                self._console(f"{what}: {n + 1} of {total}, {duration(left)} left")
                last = now

    # State

    def status(self, state: str, **facts: Any) -> bool:
        """Write status.json: state and facts (iteration, exit_code, message, checkpoint), old facts included.

        Only rank 0 writes it, but any rank may report "failed". The first such report is kept, unless its
        message begins with LOST_PEER. Returns whether this report is kept.
        """
        path = self.folder / "status.json"
        if self.folder_lost or (state != "failed" and not self.is_main):
            return False
        if state == "failed":
            before = read_status(path, self.warn)
            if before.get("state") == "failed" and not str(before.get("message")).startswith(LOST_PEER):
                return False
            self._facts = before | {key: value for key, value in self._facts.items() if value}
            facts = {"rank": self.label} | facts
        self._facts |= facts
        with self.attempt(str(path)):
            write_status(path, self._facts | {"state": state})
        return True

    def close(self) -> None:
        """Flush and close all files and writers; a second call does nothing."""
        for thing in [self._bar, self._text, *self._beside.values(), *self._series, *self._writers]:
            if thing is not None:
                with self.attempt(f"closing {type(thing).__name__}"):
                    thing.close()
        self._bar = None
        self._writers = []
        spare_exit(self.stream, sys.stderr)


# Lines


def table_cells(mean: dict[str, Any], train_iters: int) -> dict[str, str]:
    """Return the title of each column of the console, as wide as the column, and its cell for an interval.

    A cell is `-` for an unknown value. With experts there is also the load of the busiest over the mean.
    """
    rate = mean["tokens_per_s"]
    flops = mean["tflops_per_gpu"]
    share = mean["mfu"]
    memory = mean.get("peak_mem_gib")
    speed = f"{rate / 1e6:.2f}M" if rate >= 1e6 else f"{rate / 1e3:.1f}k" if rate >= 1e3 else f"{rate:.0f}"
    cells = {
        "   step": str(mean["iteration"]),
        "     loss": f"{mean['lm_loss']:.4f}",
        "        lr": f"{mean['lr']:.2e}",
        " grad_norm": f"{mean['grad_norm']:.3f}",
        "   tok/s": speed,
        "     TF/s": f"{flops:.3g}" if flops < 1 else f"{flops:.1f}",
        "    MFU": "-" if share is None else f"{100 * share:.1f}%",
        " mem GiB": "-" if memory is None else f"{memory:.2f}",
    }
    if "moe_load_imbalance" in mean:
        cells["  busiest"] = f"{mean['moe_load_imbalance']:.2f}x"
    left = (train_iters - mean["iteration"]) * mean["step_time_ms"] / 1e3
    return cells | {"      eta": duration(left)}


def table_row(mean: dict[str, Any], train_iters: int) -> str:
    """Return the console's row for an interval, and what is to say of its steps."""
    cells = table_cells(mean, train_iters)
    row = "".join(cell.rjust(len(title)) for title, cell in cells.items())
    if said := mean.get("overflow"):
        return f"{row.replace('nan', '  -')}  {said}"
    if skipped := mean.get("skipped"):
        return f"{row}  {skipped} skipped step{'s' * (skipped > 1)} not in the loss"
    return row


def megatron_line(mean: dict[str, Any], train_iters: int, config: Config) -> str:
    """Return Megatron-LM's log line, for the tools that parse it, with MFU; --log-throughput adds TFLOP/s.

    Its learning rate is that of the next step, as in Megatron; console and metrics.jsonl have the step's own.
    As there, what an overflow of fp16 has spoilt is left out.
    """
    parts = [
        f" [{datetime.datetime.now():%Y-%m-%d %H:%M:%S.%f}] "
        f"iteration {mean['iteration']:8d}/{train_iters:8d}",
        f"consumed samples: {mean['consumed_samples']:12d}",
        *([f"skipped samples: {skipped:12d}"] if (skipped := mean.get("skipped_samples")) else []),
        f"elapsed time per iteration (ms): {mean['step_time_ms']:.1f}",
    ]
    if config.run.log_throughput:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {mean['tflops_per_gpu']:.1f}")
        others = {key: value for key, value in mean.items() if key.startswith("tflops_per_gpu_")}
        parts += [f"by {key.removeprefix('tflops_per_gpu_')}: {value:.1f}" for key, value in others.items()]
    parts += [
        *([f"MFU: {100 * mean['mfu']:.1f}%"] if mean["mfu"] is not None else []),
        *megatron_parts(mean),
        f"learning rate: {mean['next_lr']:.6E}",
        f"global batch size: {mean['global_batch_size']:5d}",
        f"lm loss: {mean['lm_loss']:.6E}",
        *(f"{tag.replace('-', ' ')}: {mean[key]:.6E}" for key, tag in EXPERT_TAGS.items() if key in mean),
        f"loss scale: {mean.get('loss_scale', 1.0):.1f}",
        f"grad norm: {mean['grad_norm']:.3f}",
        *([f"num zeros: {mean['num_zeros']:.0f}"] if "num_zeros" in mean else []),
        *([f"params norm: {mean['params_norm']:.3f}"] if "params_norm" in mean else []),
        f"number of skipped iterations: {mean['skipped']:3d}",
        f"number of nan iterations: {mean['nan']:3d}",
    ]
    spoilt = (": nan", ": NAN") if mean.get("overflow") else ()
    return " | ".join([part for part in parts if not part.endswith(spoilt)]) + " |"


def _mean(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a record for an interval: the mean loss of steps not skipped, the mean rates over time.

    Numbers of experts are means over all steps; all others are those of the last step.
    """
    milliseconds = sum(record["step_time_ms"] for record in records)
    losses = [record["lm_loss"] for record in records if not record.get("skipped")]
    mean = dict(records[-1])
    for key in [key for key in mean if key.startswith(("tokens_per_s", "tflops_per_gpu", "mfu"))]:
        if mean[key] is not None:
            mean[key] = sum(record[key] * record["step_time_ms"] for record in records) / milliseconds
    mean["lm_loss"] = sum(losses) / len(losses) if losses else math.nan
    mean |= {key: sum(r[key] for r in records) / len(records) for key in EXPERT_TAGS if key in mean}
    mean["step_time_ms"] = milliseconds / len(records)
    mean["skipped"] = sum(bool(record.get("skipped")) for record in records)
    mean["nan"] = sum(not math.isfinite(record["lm_loss"]) for record in records)
    mean["overflow"] = overflow(records[-1])
    return mean

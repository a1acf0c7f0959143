"""The command `compare`: a table and a picture of several runs, and how far losses at equal tokens differ."""

import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanomegatron.commands.runs import aligned, find_run, only_evaluated, state_of
from nanomegatron.config.cli import OF_ONE_RUN, build_config, from_toml
from nanomegatron.config.help import CommandParser
from nanomegatron.config.rules import values_of
from nanomegatron.config.settings import Config
from nanomegatron.config.user_files import escaped, read_text
from nanomegatron.report.plots import PALETTE, smoothed, smoothing_reach
from nanomegatron.report.schedule_draw import canvas
from nanomegatron.report.writers import read_jsonl

MARKERS = "osD^vP"  # of runs that overlap
Cells = list[list[str]]  # the header, which begins with the table's title, and rows, each with its name
TEXT_SETTINGS = "data_path train_data_path mock_data tokenizer_type tokenizer_model vocab_size".split()


class RecordedRun(NamedTuple):
    """What a run has recorded: steps by consumed tokens, and evaluations; with losses as numbers."""

    name: str
    folder: Path
    config: Config
    steps: dict[int, dict[str, Any]]
    evals: list[dict[str, Any]]

    def numbers(self, key: str) -> list[float]:
        """The finite values of a key over all steps; [nan] if there are none."""
        values = [float(step[key]) for step in self.steps.values() if step.get(key) is not None]
        return list(filter(math.isfinite, values)) or [math.nan]


def main(argv: list[str]) -> int:
    """Compare runs; returns 0, 1 if losses differ by more than --rtol, 2 if something cannot be read."""
    parser = CommandParser("nanomegatron compare", description=main.__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a name in runs/, or a folder; the first is the reference")
    add("--rtol", type=float, help="exit with code 1 if a loss differs by more from the first run's")
    add("--picture", "--png", type=Path, metavar="FILE", help="draw the losses: a .png, .svg or .pdf")
    args = parser.parse_args(argv)
    try:
        runs = [read_run(word) for word in trained(args.runs)]
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
        tables = [aligned(table, width) for table in (fact_table(runs), settings_table(runs))]
        words, largest = differences(runs)
        print("\n\n".join([*tables, *map(escaped, words)]))
        if args.picture:
            draw_curves(runs, args.picture).figure.savefig(args.picture)
            print(f"picture {args.picture}")
    except BrokenPipeError:
        raise  # for verbs.py
    except (ImportError, OSError, ValueError) as error:
        print(escaped(f"nanomegatron compare: {error}"), file=sys.stderr)
        return 2
    if args.rtol is not None and not largest <= args.rtol:
        print(f"--rtol {args.rtol:g}: the largest difference is {largest:.1e}", file=sys.stderr)
        return 1
    return 0


def trained(words: Sequence[str]) -> list[str]:
    """Leave out runs that have only evaluated, with a note; all if there is no other."""
    every = list(dict.fromkeys(words))
    found = [word for word in every if not only_evaluated(word)]
    for word in every if found else ():
        if word not in found:
            print(f"note    {escaped(word)} has trained nothing and is left out: see its evals.jsonl")
    return found or every


def read_run(word: str) -> RecordedRun:
    """Read the run in runs/WORD or WORD. Raises ValueError if there is none, or if it is damaged."""
    folder = find_run(word)
    try:
        config = from_toml(read_text(folder / "config.toml"))
        steps, evals = (read_jsonl(folder / f"{kind}.jsonl") for kind in ("metrics", "evals"))
        evals = [record for record in evals if "eval_only" not in record]
        for record in steps + evals:
            record |= {"lm_loss": float(record["lm_loss"]), "split": str(record.get("split"))}
            record["tokens"] = int(record.get("consumed_samples") or 0) * config.data.seq_length
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{word}: damaged settings or records ({error}); leave this run out") from None
    name = folder.resolve().name if folder.is_symlink() else word  # what runs/latest points to
    return RecordedRun(name, folder.resolve(), config, {step["tokens"]: step for step in steps}, evals)


def fact_table(runs: Sequence[RecordedRun]) -> Cells:
    """Return the results: a row per fact, a column per run."""
    end = max(set.intersection(*(set(run.steps) for run in runs)), default=0)
    table = [["results", "state", "steps", "tokens", f"loss at {amount(end) if end else 'equal'} tokens"]]
    table[0] += ["last validation loss", "ranks", "tokens/s, median", "MFU, median", "peak memory, GiB"]
    for run in runs:
        parallel, last = run.config.parallel, max(run.steps, default=0)
        facts = [
            f"{run.steps[last]['iteration'] if last else 0}/{run.config.run.train_iters}",
            f"{last:,}",
            f"{run.steps[end]['lm_loss'] if end else math.nan:.6f}",
            f"{([r['lm_loss'] for r in run.evals if r['split'] == 'validation'] or [math.nan])[-1]:.6f}",
            str(parallel.ranks_per_replica * (parallel.data_parallel_size or 1)),
            f"{statistics.median(run.numbers('tokens_per_s')):,.0f}",
            f"{statistics.median(run.numbers('mfu')):.1%}",
            f"{max(run.numbers('peak_mem_gib')):.2f}",
        ]
        table.append([run.name, state_of(run.folder), *("-" if f in ("nan", "nan%") else f for f in facts)])
    return [list(row) for row in zip(*table, strict=True)]


def settings_table(runs: Sequence[RecordedRun]) -> Cells:
    """Return the settings that differ between runs; of a single run those that are not the defaults."""
    every, title = [values_of(run.config) for run in runs], "settings that differ"
    if len(runs) == 1:
        every, title = [*every, values_of(build_config({}))], "settings other than the defaults"
    hidden = {key.replace("-", "_") for key in OF_ONE_RUN.split()} - {"data_parallel_size"}
    names = [k for k in every[0] if k not in hidden and any(values[k] != every[0][k] for values in every)]
    rows = [[k.replace("_", "-"), *(str(values[k]) for values in every[: len(runs)])] for k in names]
    return [[title, *(run.name for run in runs)], *(rows or [["none", *("" for _ in runs)]])]


def differences(runs: Sequence[RecordedRun]) -> tuple[list[str], float]:
    """Say how far losses differ from the first run's; returns lines and the largest, NaN without steps."""
    first, lines, largest = runs[0], [], 0.0 if len(runs) > 1 else math.nan
    for run in runs[1:]:
        both = sorted(first.steps.keys() & run.steps.keys())
        gaps = [(relative_gap(first.steps[t]["lm_loss"], run.steps[t]["lm_loss"]), t) for t in both]
        gap, at = max(gaps, default=(math.nan, 0))
        text = "no losses to compare at equal tokens"
        if gap == 0:
            text = f"losses are identical, over {len(both)} steps"
        elif both:
            text = (
                f"largest relative difference of losses over {len(both)} steps: {gap:.1e} "
                f"(at step {first.steps[at]['iteration']})"
            )
        sizes = [(r.config.data.seq_length, set(r.numbers("global_batch_size"))) for r in (first, run)]
        if sizes[0] != sizes[1]:
            text += "; batch or sequence differ: only steps that end at equal tokens are compared"
        texts = [[getattr(r.config.data, name) for name in TEXT_SETTINGS] for r in (first, run)]
        if texts[0] != texts[1]:
            text += "; data or tokenizer differ: losses of another text say nothing about the layout"
        lines.append(f"{run.name} and {first.name}: {text}")
        largest = math.nan if math.isnan(largest + gap) else max(largest, gap)
    return lines, largest


def relative_gap(a: float, b: float) -> float:
    """|a - b| / |a|; infinity if only one of them is finite, 0 if none is."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) / max(abs(a), 1e-300)
    return math.inf if math.isfinite(a) != math.isfinite(b) else 0.0


def draw_curves(runs: Sequence[RecordedRun], path: Path) -> Any:
    """Draw losses over tokens -> matplotlib's axes. Long runs are smoothed, over thin lines.

    Each run has a narrower line than the one before, so that one is seen on another that it equals.
    Raises ImportError without matplotlib.
    """
    long = any(smoothing_reach(len(run.steps)) for run in runs)
    title = f"training loss{', smoothed' if long else ' of each step'}; markers: validation"
    axes = canvas(path, (9, 5)).add_subplot(title=title)
    for i, run in enumerate(runs):
        color = PALETTE[i % len(PALETTE)]
        tokens = list(run.steps)
        losses = np.array([step["lm_loss"] for step in run.steps.values()], float)
        if smoothing_reach(len(tokens)):
            axes.plot(tokens, losses, color=color, linewidth=0.7, alpha=0.3)
            losses = smoothed(losses)
        axes.plot(tokens, losses, color=color, label=run.name, linewidth=min(2 * (len(runs) - i), 8))
        held_out = [r for r in run.evals if r["split"] == "validation"]
        axes.plot(
            [r["tokens"] for r in held_out],
            [r["lm_loss"] for r in held_out],
            linestyle="",
            color=color,
            marker=MARKERS[i % len(MARKERS)],
            markersize=max(5, 11 - 3 * i),
            markeredgecolor="black",
        )
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.xaxis.set_major_formatter(lambda x, _: amount(x) if x >= 0 else "")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, loc="upper right")
    return axes


def amount(tokens: float) -> str:
    """Format a number of tokens: 500, 61.44k, 1.5M, 3B."""
    sizes = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    return next((f"{tokens / size:.4g}{unit}" for size, unit in sizes if tokens >= size), f"{tokens:.4g}")

"""The command `runs`: a table of the runs in a folder, newest first; torch is not imported."""

import json
import math
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanomegatron.config.help import CommandParser, did_you_mean
from nanomegatron.config.user_files import escaped, parse_toml, read_text
from nanomegatron.data.indexed_dataset import lock_file
from nanomegatron.report.status import read_status

RECORDS = ("status.json", "metrics.jsonl", "evals.jsonl", "config.toml")  # a run has one of them
TAIL = 2**16  # bytes at the end of a .jsonl file, enough for its last record
AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def main(argv: list[str]) -> int:
    """List runs, newest first; died: it says running, but no process holds its lock. Returns 0; 2 without."""
    parser = CommandParser("nanomegatron runs", description=main.__doc__.partition(" Returns")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="where runs are; runs/")
    folder = parser.parse_args(argv).folder
    if not folder.is_dir() and folder != Path("runs"):
        why = "no such folder; give the one that training wrote runs to"
        print(f"nanomegatron runs: {folder}: {why}", file=sys.stderr)
        return 2
    rows, newest = [], (folder / "latest").resolve()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and not (path.is_symlink() and path.name == "latest"):
            try:
                rows.append(run_row(path, newest))
            except (OSError, ValueError, TypeError) as error:
                print(escaped(f"! {path}: {getattr(error, 'strerror', None) or error}"), file=sys.stderr)
    first = f"no runs in {folder.absolute()}; `nanomegatron train` makes one, in runs/ where it is started"
    print(run_table(rows) if rows else first)
    return 0


def find_run(word: str) -> Path:
    """Return the folder of a run, runs/WORD or WORD. Raises ValueError if neither has a config.toml."""
    folders = [path for path in (Path("runs") / word, Path(word)) if (path / "config.toml").is_file()]
    if not folders:
        hint = did_you_mean(word, [path.parent.name for path in Path("runs").glob("*/config.toml")])
        if only_evaluated(word):
            hint = f"; {word} has trained nothing: evals.jsonl and log.txt have what it evaluated"
        raise ValueError(f"no run, neither runs/{word} nor {word} has a config.toml{hint}")
    return folders[0]


def only_evaluated(word: str) -> bool:
    """Whether runs/WORD or WORD is a run of --eval-only: it has evaluations and no settings to train."""
    found = {path.name for folder in (Path("runs") / word, Path(word)) for path in folder.glob("*.*")}
    return "evals.jsonl" in found and "config.toml" not in found


def run_row(folder: Path, newest: Path) -> tuple[float, list[str]]:
    """Return a run's age in seconds and its cells without age. Raises ValueError if there is no whole run."""
    times = [path.stat().st_mtime for name in RECORDS if (path := folder / name).is_file()]
    if not times:
        raise ValueError(f"no run, it has none of {', '.join(RECORDS)}")
    step, held_out = last_record(folder / "metrics.jsonl"), last_record(folder / "evals.jsonl", "validation")
    losses = [number(record.get("lm_loss"), ".4f") for record in (step, held_out)]
    try:
        length = parse_toml(read_text(folder / "config.toml")).get("train-iters", "-")
    except FileNotFoundError:  # it has failed before it could begin
        length = "-"
    except ValueError as error:
        print(escaped(f"! {folder / 'config.toml'}: damaged ({error})"), file=sys.stderr)
        length = "-"
    cells = [folder.name + " *" * (folder.resolve() == newest), state_of(folder)]
    iteration = step.get("iteration", held_out.get("iteration", 0))
    cells += [f"{iteration}/{length}", *losses, number(step.get("tokens_per_s"), ",.0f")]
    return time.time() - max(times), cells


def state_of(folder: Path) -> str:
    """Return the state in status.json, or "died" if it says running and no process holds the run's lock."""
    facts = read_status(folder / "status.json", lambda text: print(escaped(f"! {text}"), file=sys.stderr))
    state = str(facts.get("state", "-"))
    with suppress(OSError):  # another user's file, or no locks here: status.json may be right
        if state == "running" and not (folder / "run.lock").is_file():
            return "died"
        if state == "running":
            with open(folder / "run.lock", "r+b") as file:
                return "died" if lock_file(file, wait=False) else state
    return state


def last_record(path: Path, split: str | None = None) -> dict[str, Any]:
    """Return the last whole record (of a split) of a .jsonl file, of which only the end is read; or {}.

    Those of --eval-only count where there is no other.
    """
    beside: dict[str, Any] = {}
    with suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError, AttributeError, RecursionError):
                record = json.loads(line)
                if record.get("split") == split and "eval_only" not in record:
                    return record
                if record.get("split") == split and not beside:
                    beside = record
    return beside


def run_table(rows: list[tuple[float, list[str]]]) -> str:
    """Return the rows, newest first, as aligned columns, within the width of a terminal."""
    table = [["run", "state", "step", "its loss", "last validation", "its tok/s", "age"]]
    for seconds, cells in sorted(rows, key=lambda row: row[0]):
        size, unit = next((pair for pair in AGES if seconds >= pair[0]), AGES[-1])
        table.append([*cells, f"{max(0, seconds) // size:.0f} {unit}"])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    return aligned(table, width) + "\n* runs/latest" * any(line[0].endswith(" *") for line in table)


def number(value: Any, form: str) -> str:
    """Format a number of a record, which may be a string such as "nan"; - if there is none."""
    return "-" if value is None else format(float(value), form)


def aligned(table: list[list[str]], width: float = math.inf) -> str:
    """Return a table as text, names to the left; columns beyond the width follow below, with the names."""
    table = [[escaped(cell, keep="") for cell in row] for row in table]
    widths, fit = [max(map(len, column)) for column in zip(*table, strict=True)], 2
    while fit < len(widths) and widths[0] + sum(2 + w for w in widths[1 : fit + 1]) <= width:
        fit += 1
    rows = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:fit], widths[1:fit])]) for row in table]
    rest = [[row[0], *row[fit:]] for row in table]
    return "\n".join(map(str.rstrip, rows)) + (f"\n\n{aligned(rest, width)}" if fit < len(widths) else "")

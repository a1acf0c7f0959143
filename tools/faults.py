"""The fault matrix: processes killed, files damaged, signals at any moment; the results, to the bit.

    python tools/faults.py                      all rows with all their cases, half an hour of Q1 among them
    python tools/faults.py K1 T1 --count 5      five cases of each of these rows
    python tools/faults.py K1 --seed 17 --count 1 --keep     one case, and its files stay
    python tools/faults.py --list               the rows
    python tools/faults.py --table              write the table of docs/reliability.md from the kept results

The rows are in tests/faults/rows.py. A case that fails is not run again, and the exit code is 1. Results are
kept in benchmarks/results/faults.json: a row is replaced by one of as many cases or more, or one that failed.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a file, it finds the package and the tests of its own checkout

import torch  # noqa: E402

from tests.faults.rows import ROWS, Row  # noqa: E402
from tests.faults.runs import Place  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
PAGE = ROOT / "docs" / "reliability.md"
MARKS = "<!-- the table of `make faults` -->", "<!-- its end -->"
GIVE_UP = 3  # failed cases after which a row is not continued


@dataclass
class Result:
    """The outcome of a row."""

    id: str
    wanted: int
    seed: int
    reached: int = 0
    seconds: float = 0.0
    kinds: Counter = field(default_factory=Counter)
    failure: str = ""  # the first one
    repeat: str = ""  # the command for it
    commit: str = ""
    date: str = ""


def run_row(row: Row, place: Place, seed: int, count: int, keep: bool) -> Result:
    """Run the cases of a row, from a seed on; of a whole row the one call."""
    count = 1 if row.whole else count
    result, failed = Result(row.id, count, seed, commit=commit(), date=str(datetime.date.today())), 0
    began = time.monotonic()
    for number in range(seed, seed + count):
        before = set(place.folder.iterdir())
        try:
            kind = row.run(place, number)
            result.kinds[kind] += 1
            result.reached += 1
        except Exception:
            failed += 1
            result.failure = result.failure or traceback.format_exc(limit=-3)
            result.repeat = result.repeat or f'make faults ARGS="{row.id} --seed {number} --count 1 --keep"'
        place.end_all()
        if not keep:
            clean(place, before, row.id)
        result.seconds = round(time.monotonic() - began, 1)
        show(line(row, result), end="\r")
        if failed == GIVE_UP:
            break
    show(line(row, result))
    return result


def clean(place: Place, before: set[Path], name: str) -> None:
    """Remove the folders of a case."""
    for path in set(place.folder.iterdir()) - before:
        if path.name.startswith(f"{name}-"):
            shutil.rmtree(path, ignore_errors=True)


def line(row: Row, result: Result) -> str:
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(result.kinds.items()))
    return f"{row.id:4}{result.reached:4} of {result.wanted:<4}{result.seconds:7.0f} s   {kinds[:90]}"


def show(text: str, end: str = "\n") -> None:
    """Print a line; one that will be written over, on terminals only."""
    if end == "\n" or sys.stdout.isatty():
        print(f"\r{text[:150]:<150}" if sys.stdout.isatty() else text, end=end, flush=True)


def commit() -> str:
    """The commit of this checkout, with a + where files differ from it."""
    head, changes = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    )
    return head + "+" * bool(changes)


def kept() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {"rows": []}


def keep_results(results: list[Result]) -> None:
    """Merge results into those that are kept."""
    rows = {row["id"]: row for row in kept()["rows"]}
    for result in results:
        if result.failure or result.wanted >= rows.get(result.id, {"wanted": 0})["wanted"]:
            rows[result.id] = vars(result)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"
    head = {
        "date": str(datetime.date.today()),
        "machine": machine,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    order = [row.id for row in ROWS if row.id in rows]
    RESULTS.write_text(json.dumps(head | {"rows": [rows[name] for name in order]}, indent=1) + "\n")


# The table


def table() -> str:
    """The rows in Markdown, each with the cases that were reached."""
    found = {row["id"]: row for row in kept()["rows"]}
    lines = ["| | fault | expected | cases | reached |", "|---|---|---|--:|---|"]
    for row in ROWS:
        cases = "its tests" if row.whole else row.all
        lines.append(f"| {row.id} | {row.fault} | {row.expected} | {cases} | {reached(row, found)} |")
    return "\n".join(lines)


def reached(row: Row, found: dict[str, dict]) -> str:
    """The last cell of a row."""
    if row.id not in found:
        return "not yet run"
    result = found[row.id]
    cases = f"{result['reached']} of {result['wanted']}"
    if row.whole:
        cases = " ".join(result["kinds"]) or "none"  # such as "12 tests"
    return f"{cases}, {result['date']}" + " **failed**" * bool(result["failure"])


def page() -> str:
    """The text of docs/reliability.md with the table as it must be."""
    begin, end = MARKS
    text = PAGE.read_text(encoding="utf-8")
    return re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{table()}\n{end}", text, flags=re.S)


# The program


def chosen(names: list[str]) -> list[Row]:
    """Rows by their names, or all. Raises SystemExit for a name that is none."""
    known = {row.id: row for row in ROWS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no row {', '.join(unknown)}; there are {' '.join(known)}")
    return [known[name] for name in names] or list(ROWS)


def campaign(rows: list[Row], args: argparse.Namespace) -> list[Result]:
    """Run rows one after the other, in a folder that stays if a case has failed."""
    folder = Path(tempfile.mkdtemp(prefix="nanomegatron-faults-"))
    place, results = Place(folder, args.minutes), []
    try:
        for row in rows:
            if why := row.skip():
                print(f"{row.id:4}not run: {why}", flush=True)
            else:
                results.append(run_row(row, place, args.seed, args.count or row.all, args.keep))
                if args.minutes >= row.minutes:
                    keep_results(results[-1:])
    finally:
        place.end_all()
        if args.keep:
            print(f"files: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return results


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="the fault matrix", epilog="see tests/faults/rows.py")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="such as K1; without: all")
    parser.add_argument("--count", type=int, help="cases of each row; without: all of them")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--minutes", type=float, default=30.0, help="of Q1")
    parser.add_argument("--keep", action="store_true", help="leave the files of the cases")
    parser.add_argument("--list", action="store_true", help="print the rows")
    parser.add_argument("--table", action="store_true", help="write the table of docs/reliability.md")
    args = parser.parse_args(argv)
    if args.table:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    rows = chosen(args.rows)
    if args.list:
        print("\n".join(f"{row.id:4}{row.all:4}  {row.fault}\n          {row.expected}" for row in rows))
        return 0
    began = time.monotonic()
    results = campaign(rows, args)
    failed = [result for result in results if result.failure]
    for result in failed:
        print(f"\n{result.id}, the first failure:\n{result.failure}\nagain: {result.repeat}")
    cases, minutes = sum(result.reached for result in results), (time.monotonic() - began) / 60
    print(f"\n{cases} cases passed in {minutes:.0f} minutes, {len(failed)} rows failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

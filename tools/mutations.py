"""Planted bugs: every one must be caught by the fast test that it names.

    python tools/mutations.py                   all of them, each against its test
    python tools/mutations.py --only zigzag     those with this word in their names
    python tools/mutations.py --draw 10         ten drawn ones against the whole fast tier
    python tools/mutations.py --table           the table of docs/testing.md, from the same files

tests/mutations/*.toml holds them: name, file, old text, new text, test. The old text occurs once in the file.
Two copies of the working tree are changed and put back, never the tree itself. A test that does not pass
without the bug, does not fail with it, or is not of the fast tier fails this program, too: exit code 1.
"""

import argparse
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests/mutations"
FAILED = 1, 2  # pytest's exit code where tests failed, and where two workers were stopped by that
PYTEST = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]


@dataclass(frozen=True)
class Mutation:
    """One planted bug: `old` becomes `new` in `file`, and `test` must notice."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def problem(self, root: Path) -> str:
        """What is wrong with the entry itself, or nothing."""
        path = root / self.file
        if not path.is_file():
            return f"{self.file} does not exist"
        found = path.read_text().count(self.old)
        if found != 1 or self.old == self.new:
            return f"the old text occurs {found} times in {self.file}, must be once and differ from the new"
        return "" if self.test else "no test is named"

    def apply(self, root: Path) -> None:
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


def load(folder: Path = FOLDER) -> list[Mutation]:
    """All entries, file by file. Raises TypeError where a key is missing or unknown."""
    tables = [tomllib.loads(path.read_text())["mutation"] for path in sorted(folder.glob("*.toml"))]
    strip = ("old", "new")
    return [
        Mutation(**{key: text.strip("\n") if key in strip else text for key, text in entry.items()})
        for table in tables
        for entry in table
    ]


def copy_tree(target: Path) -> Path:
    """The files of the working tree that git knows or would add. Exits if it is no checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        sys.exit(
            f"tools/mutations.py: {ROOT} is no git checkout, whose files are copied; git clone makes one"
        )
    names = listed.stdout.decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def run(command: list[str], folder: Path, timeout: float) -> tuple[int, str]:
    """Exit code and output; at the timeout everything that was started is killed, code 124."""
    pipe = subprocess.PIPE
    program = subprocess.Popen(
        command, cwd=folder, text=True, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = program.communicate(timeout=timeout)
        return program.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        return 124, program.communicate()[0]


def reason(output: str) -> str:
    """Why a test failed, from pytest's summary; else the last line."""
    summary = re.findall(r"^(?:FAILED|ERROR) .*? - (.*)$", output, re.M)
    return (summary or output.strip().splitlines() or [""])[-1][:110]


class Sandbox:
    """Copies of the tree, one for each of two workers."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.copies: queue.Queue[Path] = queue.Queue()
        for i in range(count):
            self.copies.put(copy_tree(folder / str(i)))

    def check(self, mutation: Mutation, tests: list[str], timeout: float) -> tuple[bool, str]:
        """Whether the tests catch the bug, and how."""
        copy = self.copies.get()
        path = copy / mutation.file
        before = path.read_text()
        try:
            mutation.apply(copy)
            code, output = run([*PYTEST, "-rfE", "-x", *tests], copy, timeout)
        finally:
            path.write_text(before)
            self.copies.put(copy)
        if code in FAILED and re.search("^FAILED ", output, re.M):
            return True, reason(output)
        what = {0: "the test passes", 5: "the test is not of the fast tier", 124: "no end in sight"}
        return False, what.get(code, f"pytest broke, exit code {code}: {reason(output)}")


def check_all(chosen: list[Mutation], whole_tier: bool) -> bool:
    """Print a line for each; whether all were caught."""
    good = True
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        sandbox = Sandbox(Path(name), 1 if whole_tier else 2)
        if not whole_tier:
            tests = sorted({mutation.test for mutation in chosen})
            code, output = run([*PYTEST, "-n", "2", "--dist", "worksteal", *tests], Path(name, "0"), 1200)
            if code:
                print(output, "\nwithout any bug the tests above must pass", sep="\n")
                return False
            print(f"without any bug: {output.strip().splitlines()[-1].strip('= ')}", flush=True)

        def one(mutation: Mutation) -> tuple[bool, str]:
            return sandbox.check(mutation, ["-n", "2"] if whole_tier else [mutation.test], 900)

        with ThreadPoolExecutor(sandbox.copies.qsize()) as pool:
            for mutation, (caught, how) in zip(chosen, pool.map(one, chosen)):
                print(f"{'caught ' if caught else 'MISSED '} {mutation.name}\n         {how}", flush=True)
                good &= caught
    return good


def table(mutations: list[Mutation]) -> str:
    """Markdown: what is broken, where, and who notices."""
    rows = ["| planted bug | in | caught by |", "|---|---|---|"]
    for mutation in mutations:
        test = mutation.test.removeprefix("tests/").replace("|", "\\|")
        rows.append(f"| {mutation.name} | `{Path(mutation.file).name}` | `{test}` |")
    return "\n".join(rows)


def main(argv: list[str]) -> int:
    """Check the entries, then run them; 1 if any is wrong or missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="those with this word in their names")
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="N drawn ones, all fast tests")
    parser.add_argument("--seed", type=int, default=1, help="which ones are drawn")
    parser.add_argument("--table", action="store_true", help="print the table of docs/testing.md")
    args = parser.parse_args(argv)
    chosen = [mutation for mutation in load() if args.only in mutation.name]
    if args.table:
        print(table(chosen))
        return 0
    if problems := [f"{m.name}: {problem}" for m in chosen if (problem := m.problem(ROOT))]:
        print("\n".join(problems))
        return 1
    if args.draw:
        chosen = random.Random(args.seed).sample(chosen, args.draw)
    good = check_all(chosen, whole_tier=bool(args.draw))
    print(f"{len(chosen)} planted bugs, {'all caught' if good else 'NOT all caught'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

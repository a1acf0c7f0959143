"""Plant bugs, and see whether `nanomegatron debug` names their modules.

    python tools/debug_bugs.py                          those of tests/debug_bugs.toml
    python tools/debug_bugs.py FILE ... --write         those of these files, and renew the results
    python tools/debug_bugs.py --only zigzag            those with this word in their names
    python tools/debug_bugs.py --table                  the table of docs/debugging.md, from the results

An entry has a name, a layout, a model of tests/layouts.py, the module (a pattern, or several with "|"), more
flags if need be, and file, old and new, or the name of an entry of tests/mutations. Each is planted in a copy
of the working tree. Exit code 1 if a module is not found.
"""

import argparse
import fnmatch
import json
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.layouts import TWO_STEPS  # noqa: E402
from tests.training import Task, arguments, write_sources  # noqa: E402
from tools.mutations import Mutation, copy_tree, load, run  # noqa: E402

FILES = [ROOT / "tests/debug_bugs.toml"]
RESULTS = ROOT / "benchmarks/results/2026-11-26-debug-bugs.json"


def entries(paths: list[Path]) -> list[tuple[dict, Mutation]]:
    """Each entry with its edit. Raises ValueError where that does not fit the code."""
    known, found = {mutation.name: mutation for mutation in load()}, []
    for path in paths:
        tables = tomllib.loads(path.read_text())
        for entry in tables.get("bug", []) + tables.get("mutation", []):
            edit = known.get(entry["name"])
            if "old" in entry:
                edit = Mutation(
                    entry["name"], entry["file"], entry["old"].strip("\n"), entry["new"].strip("\n"), "-"
                )
            if edit is None or (problem := edit.problem(ROOT)):
                raise ValueError(f"{entry['name']}: {problem if edit else 'no mutation has this name'}")
            usual = "moe" if "ep" in entry["layout"] else "llama"
            found.append((entry | {"model": entry.get("model", usual)}, edit))
    return found


def locate(entry: dict, edit: Mutation, copy: Path, data: str) -> dict:
    """Plant a bug in the copy, run the command, and undo it: what was found."""
    path = copy / edit.file
    before, result = path.read_text(), copy / "found.json"
    result.unlink(missing_ok=True)
    flags = arguments(Task(data, TWO_STEPS), entry["model"], entry.get("flags", ""))
    command = [sys.executable, "-m", "nanomegatron", "debug", "--a", entry.get("a", "tp1")]
    command += ["--b", entry["layout"], "--json", str(result), *flags]
    begin = time.monotonic()
    try:
        edit.apply(copy)
        code, output = run(["env", f"PYTHONPATH={copy}", *command], copy, 400)
    finally:
        path.write_text(before)
    found = json.loads(result.read_text()) if result.is_file() else {"module": f"exit code {code}"}
    if not result.is_file():
        print(output[-3000:], file=sys.stderr)
    module = found.get("module", "none")
    right = any(fnmatch.fnmatch(module, pattern.strip()) for pattern in entry["module"].split("|"))
    facts = {key: entry.get(key, "") for key in ("name", "layout", "model")}
    return facts | {
        "expected": entry["module"],
        "located": right,
        "found": found,
        "s": time.monotonic() - begin,
    }


def table(results: list[dict]) -> str:
    """Markdown: the bug, its layout, what the command names."""
    rows = ["| planted bug | layout, model | named |", "|---|---|---|"]
    for each in results:
        found = each["found"]
        named = f"`{found.get('module', 'none')}`, {found.get('kind', '-')}" + "" * each["located"]
        named += "" if each["located"] else f" (wrong: `{each['expected']}`)"
        rows.append(f"| {each['name']} | {each['layout']}, {each['model']} | {named} |")
    return "\n".join(rows)


def main(argv: list[str]) -> int:
    """Locate all bugs, or print the table; 1 if one is not located."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=FILES)
    parser.add_argument("--only", default="", metavar="WORD", help="those with this word in their names")
    parser.add_argument("--write", action="store_true", help=f"renew {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--table", action="store_true", help="print the table of docs/debugging.md")
    args = parser.parse_args(argv)
    if args.table:
        print(table(json.loads(RESULTS.read_text())["bugs"]))
        return 0
    results = []
    with tempfile.TemporaryDirectory(prefix="debug-bugs-") as name:
        copy, data = copy_tree(Path(name, "tree")), str(Path(name, "sources"))
        write_sources(data)
        for entry, edit in entries(args.files):
            if args.only in entry["name"]:
                results.append(each := locate(entry, edit, copy, data))
                word = "located" if each["located"] else "MISSED "
                print(f"{word} {each['name']}\n        {each['found']} in {each['s']:.0f} s", flush=True)
    located = sum(each["located"] for each in results)
    print(f"{located} of {len(results)} located")
    if args.write:
        RESULTS.write_text(json.dumps({"located": located, "bugs": results}, indent=1) + "\n")
    return 0 if located == len(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

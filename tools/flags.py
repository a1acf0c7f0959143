"""The reference of all flags, docs/flags.md, written from their declarations.

python tools/flags.py            is the page current? exit code 1 if not
python tools/flags.py --write    write it
"""

import argparse
import math
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a file, it finds the package of its own checkout

from nanomegatron.config.help import TOPICS  # noqa: E402
from nanomegatron.config.rules import BOUNDS, Rules, declared, flag  # noqa: E402
from nanomegatron.config.settings import Config  # noqa: E402

PAGE = ROOT / "docs" / "flags.md"
HEAD = """\
# Flags of training

All {count} flags of `nanomegatron train`, which is also `python train.py`. `python tools/flags.py --write`
makes the page from their declarations; `nanomegatron train --help TOPIC` prints a section of it, `--help
WORD` the flags with a word.

A key of a TOML file is a flag's name without the dashes in front. `--no-NAME` turns off a switch that is on
by default or by a file. `N` is a whole number, `X` any number, `...` one or more values. _fixed_: a run
that resumes in its folder must have the same value. Other flags of Megatron-LM's are taken with a note if
they change nothing here, or are an error that says so ([from Megatron](from-megatron.md)).

Flags lie over the file or preset of `--config`, or over the model of `--load`. Without both they lie over the
preset `tiny-cpu`, and a note says so. They do not where they give all three of `--num-layers`,
`--hidden-size` and `--num-attention-heads`: then what no flag gives has the default of this page.
"""
COLUMNS = "| flag | default | what it does | rules |\n|---|---|---|---|\n"
SIGNS = {bool: "", int: "N", float: "X", str: "VALUE"}


def page() -> str:
    """The text of docs/flags.md."""
    rows: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    for part, setting, value in declared(Config()):
        topic = next((name for name in TOPICS if re.search(TOPICS[name][1], flag(setting.name))), part)
        rows[topic].append(row(part, setting, value))
    found = {topic: lines for topic, lines in rows.items() if lines}
    links = " | ".join(f"[{topic}](#{topic})" for topic in found)
    titles = {topic: TOPICS[topic][0][:1].upper() + TOPICS[topic][0][1:] for topic in found}
    sections = [f"## {topic}\n\n{titles[topic]}.\n\n{COLUMNS}{''.join(found[topic])}" for topic in found]
    return "\n".join([HEAD.format(count=sum(map(len, found.values()))), links, "", *sections])


def row(part: str, setting: Any, value: Any) -> str:
    """A line of a table: names with the kind of value, the default, the help, and the rules."""
    rules = Rules(**setting.metadata)
    kind = (*typing.get_args(setting.type), setting.type)[0]
    sign = SIGNS[kind] + " ..." * isinstance(value, tuple)
    if rules.choices:
        sign = ", ".join(map(str, rules.choices)) + " ..." * isinstance(value, tuple)
    names = "<br>".join(f"`{name}`" for name in (flag(setting.name), *(f"--{a}" for a in rules.aliases)))
    text, _, follows = rules.help.partition("; default ")
    shown = "on" if value is True else "" if value in (None, ()) or value is False else f"`{words(value)}`"
    cells = (
        f"{names} {sign}".rstrip(),
        shown or code(follows),
        code(text),
        "<br>".join(rule_texts(part, rules)),
    )
    return f"| {' | '.join(escaped(cell) for cell in cells)} |\n"


def words(value: Any) -> str:
    """A value as it is given on a command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def escaped(text: str) -> str:
    """Text in a cell of a table, whose signs are no markup."""
    parts = re.split("(`[^`]*`)", text)
    parts[::2] = (part.replace("_fixed_", "_fixed_").replace("*", r"\*") for part in parts[::2])
    return "".join(parts).replace("|", r"\|")


def rule_texts(part: str, rules: Rules) -> Iterator[str]:
    """The rules of a setting in words: its bounds, what it needs, sets and excludes, whether it is fixed."""
    bounds = [
        f"{BOUNDS[n][0]} {code(b)}" for n in BOUNDS if (b := getattr(rules, n)) not in (None, 0, -math.inf)
    ]
    if bounds:
        yield " and ".join(bounds)
    if rules.required:
        yield "without it: that of `--config`, `--load` or `tiny-cpu`"
    if rules.count:
        yield f"{rules.count} values"
    if rules.part_of:
        yield f"needs {code(rules.part_of)}"
    for verb, conditions in (("needs", rules.needs), ("sets", rules.brings), ("not with", rules.excludes)):
        yield from (f"{verb} {text}" for text in in_words(conditions))
    yield from (f"`{value}` is Megatron's: {why}" for value, why in rules.refused.items())
    if rules.fast_path:
        yield "not with `--no-fast-paths`"
    if not (part not in ("model", "data") if rules.resumable is None else rules.resumable):
        yield "_fixed_"


def in_words(conditions: Any) -> Iterator[str]:
    """Each condition; one that holds for some values only ends with these."""
    if isinstance(conditions, dict):
        by_text: dict[str, list[str]] = {}
        for value, some in conditions.items():
            for text in in_words(some):
                by_text.setdefault(text, []).append(f"`{value}`")
        yield from (f"{text} (for {', '.join(values)})" for text, values in by_text.items())
    elif isinstance(conditions, str):
        yield from in_words((conditions,))
    else:
        yield from map(code, conditions)


def code(text: object) -> str:
    """A condition or bound with its flags as code: '--bf16 or --fp16' -> '`--bf16` or `--fp16`'."""
    return re.sub(r"--[\w-]+( N\b| \d[\w.]*)?", r"`\g<0>`", str(text))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="the reference of all flags, docs/flags.md")
    parser.add_argument("--write", action="store_true", help="write the page")
    write, text = parser.parse_args(argv).write, page()
    if write:
        PAGE.write_text(text, encoding="utf-8")
    current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
    print(
        f"{PAGE.relative_to(ROOT)} is current" if current else "docs/flags.md: python tools/flags.py --write"
    )
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

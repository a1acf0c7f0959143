"""The text of --help, and what an unknown word on a command line may mean. Its tables are in `help.toml`."""

import argparse
import dataclasses
import difflib
import re
import shutil
import textwrap
import tomllib
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

from nanomegatron.config.megatron import megatron_flags
from nanomegatron.config.rules import declared, flag
from nanomegatron.config.settings import Config
from nanomegatron.config.user_files import escaped

PRESETS = Path(__file__).resolve().parents[1] / "presets"
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TOPICS: dict[str, list[str]] = TABLES["topics"]  # the title and the pattern of each
OTHER_NAMES = {name: ours for ours, names in TABLES["other-names"].items() for name in names.split()}
WIDEST_LINE, PIPED, COLUMN = 110, (100, 24), 24  # columns: at most, without a terminal, before the text
MOST_SUGGESTED = 4  # flags that begin or end like a word


def help_text(topics: str = "") -> str:
    """Return the most used flags, "all" or those of some topics. Raises ValueError for an unknown topic."""
    short = topics == ""
    if short or topics == "all":
        blocks = {TABLES["usage"]: [*TABLES["flags"].items()], TABLES["presets"]: _presets(short)}
        for topic, (title, _) in TOPICS.items():
            blocks[f"{topic}: {title}"] = [row[1:] for row in _rows(short) if row[0] == topic]
    else:
        words = (word.lstrip("-").replace("_", "-").casefold() for word in topics.split())
        blocks = {f"{word}: {TOPICS.get(word, ('flags',))[0]}": _found(word) for word in words}
    texts = ([title, *(_entry(*row) for row in rows)] for title, rows in blocks.items() if rows)
    return "\n\n".join(map("\n".join, texts))


def _rows(short: bool = False) -> Iterator[tuple[str, str, str]]:
    """Yield of each setting, or of the most used: its topic, its flags with the value, its text."""
    for part, s, value in (row for row in declared(Config()) if row[1].metadata["most_used"] or not short):
        names = [*(f"--{alias}" for alias in s.metadata["aliases"]), flag(s.name)]
        kind, choices = (*typing.get_args(s.type), s.type)[0], ", ".join(map(str, s.metadata["choices"]))
        sign = {bool: "", int: " N", float: " X", str: "" if choices else " VALUE"}[kind]
        text, mark, follows = s.metadata["help"].partition("; default")  # choices stand before the default
        words = " ".join(map(str, value)) if isinstance(value, tuple) else value
        words = f"on (off: --no-{flag(s.name)[2:]})" if value is True else words
        default = "" if value in (None, ()) or value is False else f"; default {words}"
        left = ", ".join(names[:1] if short else names) + sign + " ..." * isinstance(value, tuple)
        text += f" [{choices}]" * bool(choices)
        topics = TABLES["short"] if short else TOPICS
        topic = next((name for name in topics if re.search(TOPICS[name][1], names[-1])), part)
        yield topic, left, f"{text}{mark}{follows}{default}"


def _found(word: str) -> list[tuple[str, str]]:
    """The flags of a topic; or the flag of this name and those that have the word, else whose text has it."""
    if word == "presets":
        return _presets()
    option, begins = OTHER_NAMES.get(word, flag(word)).split()[0], rf"(?i)\b{re.escape(word)}"
    name = rf"{re.escape(option)}\b(?!-)"
    has = TOPICS.get(word, ("", f"{begins}|{name}"))[1]
    found = [row[1:] for row in _rows() if row[0] == word or re.search(has, row[1])]
    found = found or [row[1:] for row in _rows() if re.search(begins, row[2])]
    if not found:
        what = f"no topic, and in no flag{did_you_mean(word, TOPICS) or ';'}"
        raise ValueError(f"--help {word}: {what} topics are all, presets, {', '.join(TOPICS)}")
    return sorted(found, key=lambda row: not re.search(name, row[0]))


def _entry(name: str, text: str) -> str:
    """A name and its text, beside it or below it."""
    left, indent = f"  {name}  ".ljust(COLUMN), " " * COLUMN
    above, left = ("", left) if len(left) <= COLUMN + 16 else (f"{left.rstrip()}\n", indent)
    width = min(max(shutil.get_terminal_size(PIPED).columns, 2 * COLUMN), WIDEST_LINE)
    return above + textwrap.TextWrapper(width, left, indent, break_on_hyphens=False).fill(text)


def _presets(short: bool = False) -> list[tuple[str, str]]:
    """The name of each preset and the first line of its file without its source; in short up to a colon."""
    first = {path.stem: path.read_text(encoding="utf-8").splitlines()[0] for path in PRESETS.glob("*.toml")}
    without = rf"^# | \(arXiv .*\)|\.$|{':.*' * short}"
    return [(name, re.sub(without, "", first[name])) for name in sorted(first)]


def suggest_flags(name: str, settings: dict[str, dataclasses.Field]) -> str:
    """Return the end of a message on an unknown flag: the flags it may mean, or how all are listed."""
    word, own = name.casefold().replace("_", "-"), {n: f"--{n}" for n in ("config", "print-config", "help")}
    for s in settings.values():
        shown = flag(s.name) + "".join(f" (--{alias})" for alias in s.metadata["aliases"])
        own |= dict.fromkeys((flag(s.name)[2:], *s.metadata["aliases"]), shown)
    known = {theirs: own.get(ours[2:], ours) for theirs, ours in OTHER_NAMES.items()} | own
    known = {name: flag(name) for name in megatron_flags()["spellings"] if " " not in name} | known
    word = word if word in known else word.removeprefix("no-")
    almost, close = (difflib.get_close_matches(word, known, 1, cutoff) for cutoff in (0.85, 0.7))
    parts = [key for key in own if key.startswith(word) or key.endswith(f"-{word}")]
    options = dict.fromkeys(known[k] for k in almost or parts * (len(parts) <= MOST_SUGGESTED) or close)
    others = "; --help all lists every flag, --help WORD those with a word"
    return f"; did you mean {', '.join(options)}?" if options else others


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Suggest the name most similar to an unknown word, as the end of a message; empty if none is."""
    folded = {name.casefold(): name for name in names}
    close = difflib.get_close_matches(word.casefold(), folded, 1)
    return f"; did you mean {folded[close[0]]}?" if close else ""


class CommandParser(argparse.ArgumentParser):
    """The flags of a command; what is wrong is one line with value, rule and fix, without the whole usage."""

    def error(self, message: str) -> typing.NoReturn:
        """Print what is wrong, and exit with code 2."""
        choice = r"argument ([^\s/]+)\S*: invalid choice: '(.*)' \(choose from (.*)\)"
        if match := re.fullmatch(choice, message):
            word, choices = match[2], [name.strip(" '") for name in match[3].split(",")]
            message = f"{match[1]} {word}: must be one of {', '.join(choices)}{did_you_mean(word, choices)}"
        elif not message.startswith("--"):
            word = message.partition("unrecognized arguments: ")[2].partition(" ")[0].partition("=")[0]
            message += did_you_mean(word, self._option_string_actions) or "; --help lists all flags"
        self.exit(2, escaped(f"{self.prog}: {message}") + "\n")

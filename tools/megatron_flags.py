"""The table of Megatron-LM's flags in docs/from-megatron.md, written from the tables that answer them.

python tools/megatron_flags.py            is the section current? exit code 1 if not
python tools/megatron_flags.py --write    write it
"""

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a file, it finds the package of its own checkout

from nanomegatron.config.megatron import hint_of, megatron_flags  # noqa: E402
from nanomegatron.config.rules import declared, flag  # noqa: E402
from nanomegatron.config.settings import Config  # noqa: E402

PAGE = ROOT / "docs" / "from-megatron.md"
SECTION = re.compile(r"(?ms)^## Its flags\n.*?(?=^## |\Z)")
HEAD = """\
## Its flags

`python tools/megatron_flags.py --write` makes this section from the tables that answer the flags
(`nanomegatron/config/megatron_flags.toml`): those of Megatron-LM's parser, some of older releases. Another
flag is an error that suggests one.
"""


def section() -> str:
    """The text of the section, its heading included."""
    known = megatron_flags()
    own = [flag(s.name)[2:] for _, s, _ in declared(Config())]
    same = [name for name in own if name not in known["own"] and name not in known["renamed"]]
    renamed = {theirs: f"`--{ours}`" for theirs, ours in known["spellings"].items()}
    renamed |= {theirs: f"`--{ours}`" for ours, theirs in known["renamed"].items() if theirs not in renamed}
    taken = {kind: _by_text((name, known["reasons"].get(name, "")) for name in known[kind]) for kind in TAKEN}
    refused = _by_text((name, hint_of(known, name)) for name in known["unsupported"])
    parts = [
        HEAD,
        f"**The same** ({len(same)}, explained in [the page of all flags](flags.md)): {_names(same)}.",
        f"**Spelled otherwise** ({len(renamed)}); both spellings are taken:",
        _table(("Megatron-LM", "here"), [(f"`--{name}`", renamed[name]) for name in sorted(renamed)]),
        f"**Not needed** ({sum(len(known[kind]) for kind in TAKEN)}), taken with a note:",
        _table(
            ("flags", "why"),
            [
                (_names(names), why if not text else f"{why}: {text}")
                for kind, why in TAKEN.items()
                for text, names in taken[kind].items()
            ],
        ),
        f"**Not here** ({len(known['unsupported'])}), an error that says so:",
        _table(("flags", "instead"), [(_names(names), text) for text, names in refused.items()]),
        f"**Only here** ({len(known['own'])}): {_names(known['own'])}.",
    ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n\n"


TAKEN = {"always_on": "always on", "not_needed": "changes no result here"}


def _by_text(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names with each text, those without one last."""
    found: dict[str, list[str]] = {}
    for name, text in pairs:
        found.setdefault(text, []).append(name)
    return dict(sorted(found.items(), key=lambda item: (item[0] == "", item[0])))


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`--{name}`" for name in sorted(names))


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {left} | {_code(right)} |" for left, right in rows)])


def _code(text: str) -> str:
    """A hint with its flags as code; those that are code already stay."""
    return text if "`" in text else re.sub(r"--[\w-]+( [A-Z][\w.]*)*", r"`\g<0>`", text)


def with_section(text: str) -> str:
    """The page with the current section in the place of the old one."""
    return SECTION.sub(lambda _: section(), text)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="the table of Megatron-LM's flags in docs/from-megatron.md")
    parser.add_argument("--write", action="store_true", help="write the section")
    write, text = parser.parse_args(argv).write, PAGE.read_text(encoding="utf-8")
    if write:
        PAGE.write_text(with_section(text), encoding="utf-8")
    current = SECTION.search(text) and PAGE.read_text(encoding="utf-8") == with_section(text)
    print(f"{PAGE.name} is current" if current else f"{PAGE.name}: python tools/megatron_flags.py --write")
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

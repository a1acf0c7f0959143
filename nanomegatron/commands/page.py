"""A run or a comparison as one HTML page: page.html with its text, tables and pictures; it loads nothing."""

import base64
import string
from collections.abc import Iterator, Sequence
from html import escape
from itertools import takewhile
from pathlib import Path

Curve = tuple[str, list, list]  # its name, the points of its line, single dots; each (tokens, loss)
Table = list[list[str]]  # the header, which begins with the table's title, and rows, each with its name


def run_page(
    words: Sequence[str],
    curves: Sequence[Curve],
    picture: bytes,
    tables: Sequence[Table],
    folders: list[Path],
) -> str:
    """Return the page: words (of differences), picture of the losses (PNG), tables, what each run has."""
    names = [name for name, _, _ in curves]
    ends = "; ".join(f"{name} ends at {line[-1][1]:.4f}" for name, line, _ in curves if line)
    parts = [*map(html_table, tables), *(part for folder in folders for part in _run_parts(folder))]
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(
        title=escape(" and ".join(names) if len(names) < 3 else f"{len(names)} runs"),
        words="".join(f"<p>{escape(text)}</p>\n" for text in words),
        picture=_picture(picture, f"Loss over tokens: {ends}") * bool(picture),
        body="\n".join(parts),
    )


def html_table(table: Table) -> str:
    """Return a table in a box that scrolls, also by keyboard."""
    title, text = escape(table[0][0].capitalize()), ""
    for name, *cells in table[1:]:
        data = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        text += f'<tr><th scope="row">{escape(name)}</th>{data}</tr>\n'
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in ["name", *table[0][1:]])
    head = f"<table><caption><h2>{title}</h2></caption>\n<thead><tr>{head}</tr></thead>"
    return _box(title, f"{head}\n<tbody>\n{text}</tbody></table>")


def _box(label: str, inside: str) -> str:
    return f'<div class="scroll" role="region" aria-label="{label}" tabindex="0">\n{inside}\n</div>'


def _run_parts(folder: Path) -> Iterator[str]:
    """Yield the first lines of a run's log.txt, up to its first step, and its pictures."""
    name, log = escape(folder.name), folder / "log.txt"
    if log.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        text = escape("\n".join(takewhile(lambda line: not line.startswith(" ["), lines)))
        yield f"<h2>First lines of {name}</h2>\n" + _box(f"First lines of {name}", f"<pre>{text}</pre>")
    for path in sorted(folder.glob("*.png")):
        yield _picture(path.read_bytes(), f"{path.name} of {folder.name}")


def _picture(data: bytes, words: str) -> str:
    """A picture under a heading, which is what its words have before a colon."""
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return f'<h2>{escape(words.partition(":")[0])}</h2>\n<img alt="{escape(words)}" src="{source}">'


def amount(tokens: float) -> str:
    """Format a number of tokens: 500, 61.44k, 1.5M, 3B."""
    sizes = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    return next((f"{tokens / size:.4g}{unit}" for size, unit in sizes if tokens >= size), f"{tokens:.4g}")

"""A run or a comparison as one HTML page: page.html with its text, tables and chart; it loads nothing."""

import base64
import math
import string
from collections.abc import Iterator, Sequence
from html import escape
from itertools import takewhile
from pathlib import Path

LOOKS = 6  # of curves, by the classes of page.html: colours and dashes
LEFT, TOP, RIGHT, BOTTOM = 64, 12, 836, 332  # of the chart in page.html
Curve = tuple[str, list, list]  # its name, the points of its line, single dots; each (tokens, loss)
Table = list[list[str]]  # the header, which begins with the table's title, and rows, each with its name


def run_page(
    words: Sequence[str], curves: Sequence[Curve], tables: Sequence[Table], folders: list[Path]
) -> str:
    """Return the page: words (of differences), chart, tables, first lines and pictures of the runs."""
    names = [name for name, _, _ in curves]
    key = '<svg viewBox="0 0 40 10" aria-hidden="true"><polyline class="c{}" points="0,5 40,5"/></svg>'
    values = {
        "title": escape(" and ".join(names) if len(names) < 3 else f"{len(names)} runs"),
        "words": "".join(f"<p>{escape(text)}</p>\n" for text in words),
        "ends": escape("; ".join(f"{name} ends at {line[-1][1]:.4f}" for name, line, _ in curves if line)),
        "chart": "\n".join(chart_lines(curves)),
        "legend": "".join(
            f"<li>{key.format(i % LOOKS)}{escape(name)}</li>\n" for i, name in enumerate(names)
        ),
        "body": "\n".join([*map(html_table, tables), *(part for f in folders for part in _run_parts(f))]),
    }
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(values)


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
        data, what = base64.b64encode(path.read_bytes()).decode(), f"{escape(path.name)} of {name}"
        yield f'<h2>{what}</h2>\n<img alt="{what}" src="data:image/png;base64,{data}">'


def chart_lines(curves: Sequence[Curve]) -> Iterator[str]:
    """Yield the SVG elements of grid, ticks and curves."""
    xs, ys = zip(*[point for _, *both in curves for points in both for point in points] or [(1, 1)])
    end, yticks = max(xs) or 1, nice_ticks(min(ys), max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        up = (y - yticks[0]) / (yticks[-1] - yticks[0])
        return round(LEFT + x / end * (RIGHT - LEFT), 1), round(BOTTOM + up * (TOP - BOTTOM), 1)

    for tick in (tick for tick in nice_ticks(0, end) if tick <= end):
        x = place(tick, 0)[0]
        yield f'<path class="grid" d="M{x} {BOTTOM}V{TOP}"/>'
        yield f'<text x="{x}" y="{BOTTOM + 18}" text-anchor="middle">{amount(tick)}</text>'
    for tick in yticks:
        y = place(0, tick)[1]
        yield f'<path class="grid" d="M{LEFT} {y}H{RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:.6g}</text>'
    for i, (_, line, dots) in enumerate(curves):
        points = " ".join("{},{}".format(*place(*point)) for point in line)
        yield f'<polyline class="c{i % LOOKS}" points="{points}"/>'
        for x, y in (place(*dot) for dot in dots):
            yield f'<circle class="c{i % LOOKS}" cx="{x}" cy="{y}" r="4.5"/>'


def nice_ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Return ticks at multiples of 1, 2 or 5 times a power of ten that enclose low and high."""
    raw = ((high - low) or abs(low) or 1) / about
    unit = 10 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= 0.999 * raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def amount(tokens: float) -> str:
    """Format a number of tokens: 500, 61.44k, 1.5M, 3B."""
    sizes = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    return next((f"{tokens / size:.4g}{unit}" for size, unit in sizes if tokens >= size), f"{tokens:.4g}")

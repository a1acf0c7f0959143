"""docs/benchmarks.md and the plots beside it, from the JSON in benchmarks/results/ and nothing else.

    python -m benchmarks.table            write them
    python -m benchmarks.table --check    exit code 1 if a file differs from what would be written

`tables.toml` says what stands where. A cell is a path into a results file, with keys and list items between
slashes:

    summary/bf16, 4/mfu                          keys
    rows/0/ms                                    an item by its number
    rows/case=32k&name=p2p/both_tflops           the one item that has these values
    runs/recipe=bf16&seed=*/curve                all items that have these values and a seed
    1:/step_time_ms                              a slice of the items
    {rows/0/ms} / {rows/1/ms} - 1                arithmetic with paths
    {/FILE:rows/0/ms}                            of another file

`$name` in a path is a field of the row. A list of numbers counts as its median.
"""

import argparse
import json
import re
import string
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
DOCS = ROOT / "docs"
SPEC = tomllib.loads((ROOT / "benchmarks/tables.toml").read_text(encoding="utf-8"))
PUBLISHED = "published.json"
COLOURS = "#333333 #0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9".split()


@dataclass(frozen=True)
class Cell:
    """A number of a results file, how it is written, and the files that it is from."""

    value: float
    unit: str
    format: str
    files: frozenset[str]

    def __str__(self) -> str:
        """The number as it stands in a table; the unit is in the head, or in the format."""
        text = re.sub(r"e([-+])0(?=\d)", r"e\1", self.format.format(self.value))
        return text.replace("0e+0", "0").replace("%", " %")


@cache
def load(name: str):
    """A results file; of a .jsonl a list of its lines."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)


def follow(data, steps: list[str]):
    """What a path leads to. Raises KeyError, naming the step, where it leads nowhere or to several items."""
    if not steps:
        return data
    step, rest = steps[0], steps[1:]
    if isinstance(data, dict):
        return follow(data[step], rest)
    if re.fullmatch(r"-?\d+", step):
        return follow(data[int(step)], rest)
    if match := re.fullmatch(r"(-?\d*):(-?\d*)", step):
        start, stop = (int(edge) if edge else None for edge in match.groups())
        return [follow(item, rest) for item in data[start:stop]]
    wanted = [pair.split("=", 1) for pair in step.split("&")]
    found = [x for x in data if all(k in x and v in ("*", str(x[k])) for k, v in wanted)]
    if "=*" in step and found:
        return [follow(item, rest) for item in found]
    if len(found) != 1:
        raise KeyError(f"{step}: {len(found)} items")
    return follow(found[0], rest)


def evaluate(path: str, fields: dict) -> tuple[np.ndarray, frozenset[str]]:
    """The number, or the array, of a path or a formula, and the files it is from."""
    names: dict[str, np.ndarray] = {}
    files = set()

    def look_up(match: re.Match) -> str:
        other = re.fullmatch(r"/([\w.-]+):(.*)", match[1])
        file, steps = (other[1], other[2]) if other else (fields["file"], match[1])
        files.add(file)
        names[name := f"v{len(names)}"] = np.array(follow(load(file), steps.split("/")), dtype=float)
        return name

    path = string.Template(path).substitute({key: str(value) for key, value in fields.items()})
    formula = re.sub(r"\{([^}]*)\}", look_up, path if "{" in path else f"{{{path}}}")
    return eval(formula, {"__builtins__": {}, "mean": np.mean}, names), frozenset(files)


def cell(column: dict, fields: dict) -> Cell:
    value, files = evaluate(column["path"], column | fields)
    unit, form = (fields.get(key, column[key]) for key in ("unit", "format"))
    return Cell(float(np.median(value)), unit, form, files)


def columns_of(table: dict) -> list[dict]:
    """A column by its name in [columns], or as it stands in the table."""
    return [SPEC["columns"][c] if isinstance(c, str) else c for c in table["columns"]]


def rows_of(table: dict) -> Iterator[dict]:
    """The rows with the fields of their table; `each` makes one of every item of a list or of a table."""
    common = {key: value for key, value in table.items() if isinstance(value, str)}
    for row in table["rows"]:
        fields = common | row
        if "each" not in fields:
            yield fields
            continue
        items = follow(load(fields["file"]), fields["each"].split("/"))
        for i, item in items.items() if isinstance(items, dict) else enumerate(items):
            yield fields | {"i": i, "label": fields["label"].format(**{"name": i} | item)}


def cells_of(table: dict, row: dict) -> list[Cell | str]:
    """A cell for each column: text that the row itself gives under the head, else the number of a path."""
    cells: list[Cell | str] = []
    for column in columns_of(table):
        if "text" in column or column["head"] in row.get("lacks", []):
            cells.append(row.get(column.get("text"), ""))
            continue
        try:
            cells.append(cell(column, row))
        except KeyError:
            if not column.get("optional"):
                raise
            cells.append("")
    return cells


def published(key: str) -> Cell:
    entry = load(PUBLISHED)[key]
    unit, form = entry.get("unit", "%"), entry.get("format", "{:.1%}")
    return Cell(entry["value"], unit, form, frozenset([PUBLISHED]))


def against(ours: Cell, keys: list[str]) -> str:
    """The published figures that a row is compared with, each with its source and what ours is beside it."""
    parts = []
    for key in keys:
        word = "better" if ours.value > published(key).value else "worse"
        parts.append(f"{word} than {published(key)}, [{load(PUBLISHED)[key]['short']}](#published)")
    return "; ".join(parts)


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("  ", " ")


def markdown(table: dict) -> str:
    """Title, paragraph, plot, command, rows, and the files that the numbers are from."""
    columns = columns_of(table)
    compared = any("published" in row for row in table["rows"])
    heads = [table.get("first", ""), *(c["head"] for c in columns), *(["best published"] if compared else [])]
    align = ["---", *("---" if "text" in c else "--:" for c in columns), *(["---"] if compared else [])]
    lines = [line(heads), f"|{'|'.join(align)}|"]
    files: set[str] = set()
    for row in rows_of(table):
        cells = cells_of(table, row)
        numbers = [c for c in cells if isinstance(c, Cell)]
        files.update(*(c.files for c in numbers))
        beside = [against(numbers[0], row["published"]) if "published" in row else ""] if compared else []
        lines.append(line([row["label"], *map(str, cells), *beside]))
    parts = [f"## {table['title']}", table["text"].strip()]
    plots = [plot for plot in SPEC["plots"] if plot["in"] == table["title"]]
    parts += [f"![{plot['title']}]({plot['out']})" for plot in plots]
    parts += ["    " + table["command"].strip().replace("\n", "\n    ")] if "command" in table else []
    links = ", ".join(f"[{name.rpartition('.')[0]}](../benchmarks/results/{name})" for name in sorted(files))
    return "\n\n".join([*parts, "\n".join(lines), f"Files: {links}."])


def published_table() -> str:
    """Every published figure that the scoreboard names: as its source gives it, and in this page's count."""
    lines = [line(["who", "what", "as published", "in this page's count", "source"]), "|---|---|---|--:|---|"]
    for key, entry in load(PUBLISHED).items():
        as_published = f"{entry['published']}, {entry['convention']}"
        row = [entry["short"], entry["what"], as_published, str(published(key)), entry["source"]]
        lines.append(line(row))
    return "\n\n".join(["## Published", SPEC["published"].strip(), "\n".join(lines)])


def page() -> str:
    titles = [table["title"] for table in SPEC["tables"]] + ["Published"]
    index = " | ".join(f"[{t}](#{re.sub('[^a-z0-9 -]', '', t.lower()).replace(' ', '-')})" for t in titles)
    return (
        "\n\n".join([SPEC["head"].strip(), index, *map(markdown, SPEC["tables"]), published_table()]) + "\n"
    )


def all_cells() -> Iterator[Cell]:
    """Every number that a document may state; a published one with the file of what is compared with it."""
    for table in SPEC["tables"]:
        for row in rows_of(table):
            cells = [c for c in cells_of(table, row) if isinstance(c, Cell)]
            yield from cells
            for other in map(published, row.get("published", [])):
                yield replace(other, files=other.files | cells[0].files)
    yield from (cell(entry, {}) for entry in SPEC["figures"].values())


def curve(panel: dict, series: dict) -> tuple[np.ndarray, np.ndarray]:
    """x and y of a series: the mean over its runs, each point with the `smooth` - 1 before it."""
    y = np.array(evaluate(series["y"], panel | series)[0])
    y = y.mean(axis=0) if y.ndim == 2 else y
    steps = np.arange(1, len(y) + 1) * panel.get("steps", 0) / len(y)
    x = np.array(evaluate(series["x"], panel | series)[0]) if "x" in series else steps
    y = np.array([y[max(0, i + 1 - panel.get("smooth", 1)) : i + 1].mean() for i in range(len(y))])
    shown = (x >= panel.get("start", 0)) & (y <= panel.get("range", [0, np.inf])[1])
    return x[shown], y[shown]


def ticks(low: float, high: float) -> np.ndarray:
    """Some five round numbers between two."""
    raw = (high - low) / 5
    power = 10 ** np.floor(np.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    return np.arange(np.ceil(low / step), np.floor(high / step + 1e-9) + 1) * step


def draw(panel: dict, left: int) -> list[str]:
    """A panel of 440 x 320 as SVG: grid, axes, series as lines (`dash`: of SVG) or dots, and a legend."""
    curves = [curve(panel, series) for series in panel["series"]]
    scale = np.log2 if panel.get("log") else np.asarray
    xs, ys = (np.concatenate(values) for values in zip(*curves))
    (x0, x1), (y0, y1) = (scale([xs.min(), xs.max()]), panel.get("range", [ys.min(), ys.max()]))
    place_x = lambda x: left + 60 + 365 * (scale(x) - x0) / (x1 - x0)  # noqa: E731
    place_y = lambda y: 275 - 235 * (y - y0) / (y1 - y0)  # noqa: E731
    text = '<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>'.format
    out = [text(left + 242, 24, "middle", panel["title"]), text(left + 242, 312, "middle", panel["xlabel"])]
    out.append(
        f'<g transform="rotate(-90 {left + 14} 158)">{text(left + 14, 158, "middle", panel["ylabel"])}</g>'
    )
    for y in ticks(y0, y1):
        out.append(f'<path d="M{left + 60} {place_y(y):.1f}h365" stroke="#e5e5e5"/>')
        out.append(text(left + 55, place_y(y) + 4, "end", f"{y:.6g}"))
    for x in [x for x in np.unique(xs) if np.log2(x) % 1 == 0] if panel.get("log") else ticks(x0, x1):
        out.append(text(place_x(x), 291, "middle", f"{x / 1024:.0f}k" if panel.get("log") else f"{x:.6g}"))
    for i, (series, (x, y)) in enumerate(zip(panel["series"], curves)):
        dots = series.get("style") == "dots"
        look = '7" stroke-linecap="round' if dots else f'1.6" stroke-dasharray="{series.get("dash", "none")}'
        points = [f"{a:.1f} {b:.1f}" for a, b in zip(place_x(x), place_y(y))]
        paths = [f"{point}h0" for point in points] if dots else ["L".join(points)]
        if "label" in series:
            x, y = panel.get("legend", [418, 48])
            y += 15 * sum("label" in s for s in panel["series"][:i])
            out.append(text(left + x - 36, y, "end", series["label"]))
            paths.append(f"{left + x - 15} {y - 4}h0" if dots else f"{left + x - 30} {y - 4}h30")
        stroke = f'fill="none" stroke="{COLOURS[series.get("colour", i)]}" stroke-width="{look}"'
        out += [f'<path d="M{path}" {stroke}/>' for path in paths]
    return out


def plot(spec: dict) -> str:
    panels = [part for i, panel in enumerate(spec["panels"]) for part in draw(panel, 440 * i)]
    size = f"{440 * len(spec['panels'])} 320"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif"'
    title, paper = f"<title>{spec['title']}</title>", '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head + ' font-size="12">', title, paper, *panels, "</svg>"]) + "\n"


def outputs() -> dict[Path, str]:
    plots = {DOCS / spec["out"]: plot(spec) for spec in SPEC["plots"]}
    return {DOCS / "benchmarks.md": page(), **plots}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file differs")
    check = parser.parse_args(argv).check
    made = outputs()
    changed = [path for path, text in made.items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in changed:
        print(f"{path.relative_to(ROOT)}: {'differs' if check else 'written'}")
        if not check:
            path.write_text(made[path], encoding="utf-8")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

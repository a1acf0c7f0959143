"""Every measured figure of a document is a number of a results file that the document names.

The numbers are the cells of benchmarks/tables.toml: its tables and its [figures], each a path into
benchmarks/results/. The file is named by the paragraph or the row; if these name none, by the section; else
by the document. A figure is a number with a unit, in text or in a table whose head has the unit; or with two
decimals, such as a loss.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks import table

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [
    path
    for path in DOCUMENTS
    if path.name not in ("log.md", "benchmarks.md", "planner.md", "layouts.md", "map.md")
]

# A unit as it is written, and the units of the cells that it stands for.
UNITS = {
    "%": ["%", "ratio"],
    "times": ["x", "ratio"],
    "us": ["us"],
    "ms": ["ms"],
    "s": ["s"],
    "GiB": ["GiB"],
    "MiB": ["MiB"],
    "MB/s": ["MB/s"],
    "GB/s": ["GB/s"],
    "TB/s": ["TB/s"],
    "TFLOP/s": ["TFLOP/s"],
    "tokens/s": ["tokens/s"],
    "M tokens/s": ["M/s"],
    "bytes a token": ["bytes a token"],
    "bytes": ["bytes", "bytes a token"],  # from a thousand on: "2 bytes a value" is a definition
    "GHz": [],
    "W": [],
    "": ["loss", "ratio", "x"],  # a number of two decimals or more
}

# What is no measurement: definitions, settings, peaks of hardware, assumptions that the text names as such.
ALLOWED = {
    "989.5 TFLOP/s": "the dense bf16 peak of an H100 or H200",
    "500 TFLOP/s": "context.md: a rate assumed for an estimate",
    "100 GB/s": "context.md: a bandwidth assumed for an estimate",
    "2.5 times": "context.md: FLOPs of attention's backward over its forward",
    "13 %": "fp8.md: a bound of the error of a product in E4M3",
    "20 %": "fp8.md: the same in E5M2",
    "85 %": "kernels.md: an aim",
    "64 MiB": "parallel.md: the largest manifest",
    "128 MiB": "data.md: a shard of --resume",
    "60 s": "parallel.md: how long ranks look for a run's file",
    "5 s": "parallel.md: how long a restart waits for its predecessor",
    "10 s": "parallel.md: how long a launcher waits for hanging ranks",
    "1 %": "testing.md: the tolerance of kept FP8 numbers",
    "1.5 %": "testing.md: the limit of the GPU gate",
    "10 %": "testing.md: its limit for GPT-2",
    "12 times": "life-of-a-step.md: messages of a step, counted",
    "196,608 bytes": "life-of-a-step.md: of a tensor, from its shape",
} | dict.fromkeys(
    "1.39 1.75 2.72 4.67 7.66 1.50 7.88".split(), "moe.md: d (ep - 1)/ep by the formula beside them"
)

NUMBER = r"(?<![\w.^)-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w^])"
UNIT = "|".join(sorted(map(re.escape, filter(None, UNITS)), key=len, reverse=True))
# One or several numbers, "1.11 and 1.13 times", before a unit.
FIGURE = re.compile(
    rf"({NUMBER}(?:(?:,| and| to| or|;| against|\s+instead of)\s+{NUMBER})*)\s*({UNIT})(?![\w/])"
)
BARE = re.compile(r"(?<![\w.^)-])[+-]?\d+\.\d{2,}(?![\w.^])")


def prose(text: str) -> str:
    """Text without code in it, addresses of links, dates and versions of programs."""
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)|<[^>\n]*>", " ~ ", text)
    text = re.sub(r"(Python|torch|Core)( up to)? \d+\.\d+", " ~ ", text)
    return re.sub(r"arXiv:? ?\d+\.\d+|\d{4}-\d\d-\d\d|\b\d+\.\d+\.\d+\S*", " ~ ", text)


def cited(text: str) -> set[str]:
    """The results files that a text names."""
    return {name for name in re.findall(r"[\w.-]+\.jsonl?", text) if (table.RESULTS / name).is_file()}


def blocks(text: str) -> Iterator[tuple[str, str, set[str]]]:
    """(head, text, files) of each paragraph, item of a list and row of a table, without blocks of code.

    Its files are those it names, or if it names none its section, or the document; and what others published.
    """
    all_cited = cited(text)
    text = re.sub(r"(?ms)^```.*?^```", "", text)
    text = re.sub(r"(?m)^    (?! *-).*$", "", text)
    published = cited(text) & {table.PUBLISHED}
    for section in re.split(r"(?m)^(?=## )", text):
        head = ""
        for block in re.split(r"\n(?=\s*\n|\s*[-*] |\|)|(?<=\|)\n", section):
            row = block.lstrip().startswith("|")
            yield head, block, (cited(block) or cited(section) or all_cited) | published
            head = (head or block) if row else ""


def figures(text: str) -> Iterator[tuple[str, str, set[str]]]:
    """(number, unit, files) of each figure of a document, unit "" for a bare number."""
    for head, block, files in blocks(text):
        block = prose(block)
        for numbers, unit in FIGURE.findall(block):
            found = re.findall(NUMBER, numbers)
            yield from ((number, unit, files) for number in found if unit != "bytes" or "," in number)
        yield from ((number, "", files) for number in BARE.findall(FIGURE.sub(" ", block)))
        for name, cell in zip(prose(head).split("|"), block.split("|")):
            if match := re.search(rf"(?<![\w/])({UNIT})$", name.strip()):
                found = re.findall(NUMBER, FIGURE.sub(" ", cell))
                yield from ((n, match[1], files) for n in found if match[1] != "bytes" or "," in n)


@cache
def cells() -> tuple[table.Cell, ...]:
    return tuple(table.all_cells())


def is_measured(number: str, unit: str, files: set[str]) -> bool:
    """Whether a cell that is from these files only is this number, rounded as it is written."""
    decimals = len(number.partition(".")[2])
    value = abs(float(number.replace(",", "")))
    for cell in cells():
        if cell.unit in UNITS[unit] and cell.files <= files:
            size = abs(cell.value) * (100 if unit == "%" else 1)
            if f"{size:.{decimals}f}" == f"{value:.{decimals}f}":
                return True
    return False


def unexplained(text: str) -> list[str]:
    """The figures of a document that are in none of the files it names."""
    return [
        f"{number} {unit}".strip()
        for number, unit, files in figures(text)
        if f"{number} {unit}".strip() not in ALLOWED and not is_measured(number, unit, files)
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_figures_are_measured(path):
    assert not unexplained(path.read_text(encoding="utf-8"))


def test_a_figure_that_is_not_measured_is_found():
    """Of a document with two files, in text, lists, heads of tables and as a bare number."""
    files = "`2026-11-21-parallel-one.json`, 2026-11-21-parallel-dp4-kernels.json"
    text = f"At 59.7 % and 58.3 %, 1,690.4 ms ({files})."
    assert not unexplained(text)
    assert unexplained(text.replace("59.7", "59.6")) == ["59.6 %"]
    assert unexplained(text.replace("1,690", "1,691")) == ["1,691.4 ms"]
    assert unexplained(text.replace("-parallel-one", "-parallel-other")) == ["59.7 %", "1,690.4 ms"]
    assert unexplained("| ms |\n|--:|\n| 1,690.4 |") == ["1,690.4 ms"]
    assert unexplained("a loss of 4.247") == ["4.247"]
    assert unexplained("1.11 and 1.13 times as fast") == ["1.11 times", "1.13 times"]


def test_a_changed_digit_is_found():
    """Each digit of each figure of all documents, one higher; a few give another number of the same files."""
    missed, changed = [], 0
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for number, unit, files in figures(text):
            if f"{number} {unit}".strip() in ALLOWED:
                continue
            for at, digit in enumerate(number):
                if digit.isdigit():
                    other = number[:at] + str((int(digit) + 1) % 10) + number[at + 1 :]
                    changed += 1
                    missed += [f"{path.name}: {number} -> {other} {unit}"] * is_measured(other, unit, files)
    assert changed > 400 and len(missed) < changed / 25, missed


def test_benchmarks_are_written_from_the_results():
    for path, text in table.outputs().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: python -m benchmarks.table"


def test_check_writes_nothing_and_fails_where_a_file_differs(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "outputs", lambda: {page: "new"})
    assert table.main(["--check"]) == 1 and not page.exists()
    assert table.main([]) == 0 and page.read_text() == "new" and table.main(["--check"]) == 0


def test_what_is_measured_changes_what_is_written(monkeypatch):
    """A number of a results file goes into the page: another number gives another page."""
    page, file = table.page(), "2026-11-21-parallel-one.json"
    other = table.json.loads((table.RESULTS / file).read_text(encoding="utf-8"))
    other["summary"]["kernels, 4"]["mfu"] += 0.001
    load = table.load
    monkeypatch.setattr(table, "load", lambda name: other if name == file else load(name))
    changed = [line for line in table.page().splitlines() if line not in page.splitlines()]
    assert len(changed) == 2 and all("59.8 %" in line for line in changed)


@pytest.mark.parametrize("step", ["name=b", "kind=x", "kind=y"])
def test_a_path_that_leads_nowhere_or_to_several_is_an_error(step):
    with pytest.raises(KeyError, match="items"):
        table.follow([{"name": "a", "kind": "x"}, {"name": "c", "kind": "x"}], [step])


def test_every_results_file_is_named():
    """By a document, by a file of fast/ or by a program that compares with it."""
    paths = [*DOCUMENTS, ROOT / "docs/benchmarks.md", *ROOT.glob("nanomegatron/**/*.py")]
    paths += [*ROOT.glob("benchmarks/*.toml"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("tools/*.py")]
    named = set().union(*(cited(path.read_text(encoding="utf-8")) for path in paths))
    assert {path.name for path in table.RESULTS.iterdir()} <= named


def test_named_results_files_exist():
    names = re.compile(r"(?<![\w.-])20\d\d-\d\d-\d\d-[\w-]+(?:\.\d[\w-]*)*\.jsonl?")
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        found = set(names.findall(path.read_text(encoding="utf-8")))
        assert found <= cited(path.read_text(encoding="utf-8")), path


def test_the_run_in_the_readme_is_the_kept_one():
    """Each line of the block that `make train` prints; "..." is what was left out."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    console = table.load("2026-11-28-make-train.json")["console"]
    block = next(part for part in text.split("```") if part.startswith("\nnanomegatron 0.2 |"))
    for line in block.strip("\n").splitlines():
        pattern = ".*".join(map(re.escape, line.split("...")))
        assert any(re.fullmatch(pattern, kept) for kept in console), line


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 1200


def test_the_log_is_short():
    """A new entry replaces what other pages say by now, or what is not worth trying again."""
    lines = (ROOT / "docs/log.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 400 and max(map(len, lines)) <= 120


def test_links_into_the_benchmarks_lead_to_a_title():
    titles = re.findall(r"(?m)^## (.*)$", table.page())
    anchors = {re.sub("[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    for path in [*DOCUMENTS, ROOT / "docs/benchmarks.md"]:
        text = path.read_text(encoding="utf-8")
        links = re.findall(r"\(benchmarks\.md#([^)]*)\)", text)
        links += re.findall(r"\(#([^)]*)\)", text) if path.name == "benchmarks.md" else []
        assert set(links) <= anchors, path

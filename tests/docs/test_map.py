"""docs/map.md: the files of the core, each with its test, page, counterpart in Megatron Core and papers."""

import ast
import re

import pytest

from tests.house.test_style import PACKAGE, ROOT

ROW = re.compile(
    r"\| [^|]+ \| \[(\w+)\.py\]\(\.\./nanomegatron/\1\.py\) \| \[([\w/]*test_\w+)\.py\]\(\.\./tests/\2\.py\) "
    r"\| \[[\w-]+\]\(([\w/-]+\.md)\) \| `([\w/.]+)` \| (.+) \|"
)
ROWS = ROW.findall((ROOT / "docs" / "map.md").read_text(encoding="utf-8"))
CORE = {s.module: s for s in PACKAGE if "." not in s.module and not s.stem.startswith("__")}

BY_TRAINING = ("build", "pick_fast_paths")  # their test runs train.py


def test_every_file_of_the_core_has_a_row():
    assert sorted(file for file, *_ in ROWS) == sorted(CORE)


@pytest.mark.parametrize("file, test, page, theirs, papers", ROWS)
def test_a_row_is_what_its_file_says(file, test, page, theirs, papers):
    docstring = ast.get_docstring(CORE[file].tree)
    assert docstring.splitlines()[2] == f"Tests: tests/{test}.py. Page: docs/{page}."
    named = sorted(set(re.findall(r"\b\d{4}\.\d{4,5}\b", docstring)))
    assert papers == (", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in named) or "-")
    if file not in BY_TRAINING:
        imports = rf"nanomegatron(\.| import [\w, ]*\b){file}\b"
        assert re.search(imports, (ROOT / "tests" / f"{test}.py").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / page).is_file()


@pytest.mark.parametrize("theirs", sorted({row[3] for row in ROWS}))
def test_the_counterpart_is_in_megatron_core(theirs):
    core = pytest.importorskip("megatron.core")
    assert any((ROOT / place / theirs).exists() for place in core.__path__)

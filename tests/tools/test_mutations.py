"""The planted bugs fit the code, name tests that are there, and are in the documents; and what runs them."""

import re
import subprocess
import sys

import pytest

from tools import mutations
from tools.mutations import FOLDER, ROOT, Mutation, load, table

ALL = load()


def test_every_bug_can_be_planted_and_names_a_test():
    problems = [f"{mutation.name}: {problem}" for mutation in ALL if (problem := mutation.problem(ROOT))]
    assert not problems, "\n".join(problems)
    for mutation in ALL:
        file, name = re.match(r"(tests/[\w/]+\.py)::(\w+)", mutation.test).groups()
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), mutation.test


def test_the_named_tests_are_of_the_fast_tier(request):
    """As far as this session has collected their files whole."""
    config, collected = request.config, {item.nodeid for item in request.session.items}
    if config.option.keyword or any("::" in arg for arg in config.args):
        pytest.skip("only some tests of a file were asked for")
    files = {node.split("::")[0] for node in collected}
    left_out = {m.test for m in ALL if m.test.split("::")[0] in files} - collected
    assert not left_out, f"{left_out}: not collected; name a test of the fast tier"


def test_no_bug_is_a_name_that_is_not_there(tmp_path):
    """It would be caught by whatever runs the line, and prove nothing."""
    for i, mutation in enumerate(ALL):
        path = ROOT / mutation.file
        if path.suffix == ".py":
            (tmp_path / f"{i}.py").write_text(path.read_text().replace(mutation.old, mutation.new))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F823", "-q", str(tmp_path)]
    found = subprocess.run(ruff, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_there_are_enough():
    assert len(ALL) >= 45 and len({mutation.name for mutation in ALL}) == len(ALL)
    assert (FOLDER / "fast.toml").read_text().count("[[mutation]]") >= 15


def test_the_documents_list_them():
    assert table(ALL) in (ROOT / "docs/testing.md").read_text(), "python tools/mutations.py --table"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A tiny one with a fast test and a full one; git knows neither."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "sums.py").write_text("def double(x):\n    return 2 * x\n")
    left_out = "items[:] = [item for item in items if item.name == 'test_two']"
    (tree / "conftest.py").write_text(f"def pytest_collection_modifyitems(items):\n    {left_out}\n")
    tests = "def test_two():\n    assert double(2) == 4\ndef test_full():\n    pass\n"
    (tree / "test_code.py").write_text(f"from sums import double\n{tests}")
    (tree / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    monkeypatch.setattr(mutations, "ROOT", tree)
    return tree


@pytest.mark.parametrize(
    "new, test, caught, expected",
    [
        ("3 * x", "test_two", True, "6"),
        ("x + 2", "test_two", False, "the test passes"),
        ("3 * x", "test_full", False, "not of the fast tier"),
        ("3 *", "test_two", False, "pytest broke"),
    ],
)
def test_a_bug_is_caught_or_not(new, test, caught, expected, project, tmp_path):
    sandbox = mutations.Sandbox(tmp_path / "copies", 1)
    mutation = Mutation("wrong", "sums.py", "2 * x", new, f"test_code.py::{test}")
    found, how = sandbox.check(mutation, [mutation.test], 60)
    assert found == caught and expected in how
    assert (tmp_path / "copies/0/sums.py").read_text() == (project / "sums.py").read_text()


def test_without_a_checkout_one_sentence_says_so(tmp_path, monkeypatch):
    (tmp_path / "tree").mkdir()
    monkeypatch.setattr(mutations, "ROOT", tmp_path / "tree")
    with pytest.raises(
        SystemExit, match=r"tree is no git checkout, whose files are copied; git clone makes one"
    ):
        mutations.Sandbox(tmp_path / "copies", 1)


def test_an_entry_that_does_not_fit_is_told(project):
    assert "occurs 2 times" in Mutation("", "sums.py", "x", "y", "t").problem(project)
    assert "occurs 0 times" in Mutation("", "sums.py", "z", "y", "t").problem(project)
    assert "does not exist" in Mutation("", "lost.py", "x", "y", "t").problem(project)
    assert "no test" in Mutation("", "sums.py", "2 * x", "y", "").problem(project)

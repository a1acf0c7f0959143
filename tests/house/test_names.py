"""One public name, one thing: a search for it leads to its only definition."""

import ast
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.house.test_style import PACKAGE, ROOT, Source, none


def defined(source: Source) -> Iterator[str]:
    """Public functions, classes and constants of a module."""
    for node in source.tree.body:
        names = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            stored = [n for target in node.targets for n in ast.walk(target)]
            names = [n.id for n in stored if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        elif isinstance(node, ast.AnnAssign):
            names = [node.target.id]
        yield from (name for name in names if not name.startswith("_"))


def defined_twice(sources: list[Source]) -> Iterator[str]:
    modules = defaultdict(set)
    for source in sources:
        for name in defined(source):
            modules[name].add(source.module)
    for name, where in modules.items():
        if len(where) > 1 and name != "main":  # `main` is what `python -m` of a module calls
            yield f"{name}: defined in {', '.join(sorted(where))}"


def methods_of(sources: list[Source]) -> Iterator[str]:
    for source in sources:
        for owner in source.classes:
            if any(isinstance(node, ast.FunctionDef) and node.name == "of" for node in owner.body):
                yield f"{source.module}.{owner.name}"


def test_no_public_name_is_defined_twice():
    """But by the shim, whose names are Megatron's."""
    none(defined_twice([source for source in PACKAGE if source.module != "megatron_api"]))


def test_no_method_is_called_of():
    assert not list(methods_of(PACKAGE))


@pytest.mark.parametrize(
    "code, expected",
    [
        ("def load(): ...", ["load: defined in a, b"]),
        ("class Load: ...", ["Load: defined in a, b"]),
        ("FIRST, SECOND = 1, 2", ["FIRST: defined in a, b", "SECOND: defined in a, b"]),
        ("limits: dict = {}", ["limits: defined in a, b"]),
        ("def _load(): ...\nTABLE = {}\nTABLE['x'] = 1", ["TABLE: defined in a, b"]),
    ],
)
def test_a_second_definition_is_found(code, expected):
    package = ROOT / "nanomegatron"
    assert list(defined_twice([Source(package / "a.py", code), Source(package / "b.py", code)])) == expected

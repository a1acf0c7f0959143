"""The imports that docs/api.md promises exist, and are all that the examples use."""

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def imports(code: str) -> set[tuple[str, str]]:
    """(module, name) of what is imported from the package."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    return {(n.module, a.name) for n in nodes if (n.module or "").startswith("nanomegatron") for a in n.names}


def promised() -> set[tuple[str, str]]:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.S)
    return imports(code)


def test_what_the_document_lists_can_be_imported():
    assert len(promised()) > 50
    missing = [f"{m}.{n}" for m, n in promised() if not hasattr(importlib.import_module(m), n)]
    assert not missing


def test_examples_use_nothing_else():
    for example in (ROOT / "examples").glob("*.py"):
        assert imports(example.read_text()) <= promised(), example.name

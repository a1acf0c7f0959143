"""The documents' links lead to files that exist, and links to code to the line of the name that they show."""

import pytest

from tools.links import ROOT, check, documents

CODE = """
SIZES = (1, 2)


class Model:
    width: int = 3

    def forward(self):
        size = 0
        def inner(): pass
"""


def test_every_link_leads_where_it_says():
    broken = [problem for path in documents() for problem in check(path, path.read_text())[1]]
    assert not broken, "\n".join(broken) + "\npython tools/links.py --write renews line numbers"


def test_links_to_code_are_found():
    """A check that finds no link would pass for ever: every wrong line of a real document is noticed."""
    path = ROOT / "docs/life-of-a-step.md"
    text = path.read_text()
    assert text.count(".py#L") >= 30
    renewed, problems = check(path, text.replace(".py#L", ".py#L9"))
    assert len(problems) == text.count(".py#L") and renewed == text


@pytest.mark.parametrize(
    "link, problem, renewed",
    [
        ("[SIZES](code.py#L2)", "", ""),
        ("[`Model`](code.py#L5)", "", ""),
        ("[Model.width](code.py#L6)", "", ""),
        ("[Model.forward()](code.py#L8)", "", ""),
        ("[Model.forward.inner](code.py#L10)", "", ""),
        ("[Model.forward](code.py#L1)", "is at #L8, not #L1", "[Model.forward](code.py#L8)"),
        ("[forward](code.py#L8)", "defines no forward", ""),
        ("[Model.forward.size](code.py#L9)", "defines no Model.forward.size", ""),
        ("[Model](doc.md#L1)", "defines no Model", ""),
        ("[code](lost.py)", "no such file", ""),
        ("![picture](lost.png)", "no such file", ""),
        ("[section](doc.md#head)", "", ""),
        ("[web](https://example.org/lost.py#L3)", "", ""),
        ("```\n[code](lost.py)\n```", "", ""),
    ],
)
def test_one_link(link, problem, renewed, tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    document = tmp_path / "doc.md"
    document.write_text(f"a\n\n{link}, b")
    text, problems = check(document, document.read_text())
    assert text == f"a\n\n{renewed or link}, b"
    assert len(problems) == bool(problem)
    assert all(each.startswith(f"{document}:3 ") and each.endswith(problem) for each in problems)

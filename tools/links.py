"""Links of the documents: each leads to a file, and one to code to the line where its name is defined.

    python tools/links.py            check README.md and docs/**/*.md; exit code 1 for broken links
    python tools/links.py --write    renew the line numbers, then check

A link to code is `[GPTModel.forward](../nanomegatron/model.py#L42)`. Its text is the qualified name of a
class, function, method or constant that the file defines. Links to the web are not checked, nor blocks of
code.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE_OR_LINK = re.compile(
    r"```.*?```|\[(?P<text>[^\[\]]+)\]\((?P<path>[^\s()#]+)(?:#(?P<at>[^\s()]+))?\)", re.S
)


def documents(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted(root.glob("docs/**/*.md"))]


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """(qualified name, line) of what a module or class defines, and of functions inside functions."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name, child.lineno
            yield from definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Assign | ast.AnnAssign) and isinstance(node, ast.Module | ast.ClassDef):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from (
                (prefix + target.id, child.lineno) for target in targets if isinstance(target, ast.Name)
            )


def check(document: Path, text: str) -> tuple[str, list[str]]:
    """The text of a document with the right line numbers, and what is wrong with its links, a line each."""
    problems = []

    def renew(match: re.Match) -> str:
        path, at = match["path"], match["at"]
        if path is None or re.match(r"[a-z]+:", path):
            return match[0]
        line = text.count("\n", 0, match.start()) + 1
        where, file = f"{document}:{line} [{match['text']}]({path})", document.parent / path
        if not file.exists():
            problems.append(f"{where}: there is no such file")
        elif re.fullmatch(r"L\d+", at or ""):
            name = match["text"].strip("`").removesuffix("()")
            tree = ast.parse(file.read_text(encoding="utf-8") if file.suffix == ".py" else "")
            lines = [f"L{n}" for defined, n in definitions(tree) if defined == name]
            if not lines:
                problems.append(f"{where}: {path} defines no {name}")
            elif at not in lines:
                problems.append(f"{where}: {name} is at #{lines[0]}, not #{at}")
                return match[0].replace(f"#{at})", f"#{lines[0]})")
        return match[0]

    return CODE_OR_LINK.sub(renew, text), problems


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="check the links of the documents")
    parser.add_argument("--write", action="store_true", help="renew the line numbers")
    write, broken = parser.parse_args(argv).write, []
    for document in documents():
        text = document.read_text(encoding="utf-8")
        renewed, problems = check(document, text)
        if write and renewed != text:
            document.write_text(renewed, encoding="utf-8")
            problems = check(document, renewed)[1]
        broken += problems
    print("\n".join(broken) or "all links lead where they should")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

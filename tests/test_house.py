"""The structure of the package: rooms and their budgets, the order of imports, what files of fast/ say."""

import ast
import re
from collections.abc import Iterator

from tests.test_style import PACKAGE, PROGRAMS, ROOT, SOURCES, Source, none

# Lines of a room, all counted; "" is the core. A feature pays from its own room.
BUDGETS = {
    "": 6597,
    "checkpoint": 4710,
    "commands": 1794,
    "config": 3866,
    "data": 3152,
    "debug": 1120,
    "fast": 3280,
    "faults": 1593,
    "ops": 3802,
    "plan": 2010,
    "report": 2612,
}

# Imports run strictly from lower to higher: a module may import those of the lines above its own, and in a
# room (whose name ends in /) those of its room.
RANKS = """
schedules batch
config/
flops faults.attempt core
mesh lr_schedule ops/ plan/
comm launch
param
tp dp cp router fp8 recompute
layers moe fp8_linear optim data/
attention
model
pp
fast/
checkpoint/ report/
faults/
build
run
generate step
faults.alive
checkpoint.resume
evaluate faults.recovery debug/
preprocess
train convert setup commands/
__main__
"""


def entry(module: str) -> str:
    """The entry of RANKS that a module belongs to: itself if it has one, else its room with a /."""
    room, dot, _ = module.partition(".")
    return f"{room}/" if dot and module not in RANKS.split() else module


def rank(module: str) -> int:
    return next((i for i, line in enumerate(RANKS.strip().splitlines()) if entry(module) in line.split()), -1)


def project_imports(source: Source, level: str) -> Iterator[tuple[int, str]]:
    """(line, module) for the project's own modules that a file imports, rooms as `fast.pieces`."""
    programs = {s.module for s in PROGRAMS}
    for line, name in source.imports(level):
        parts = name.removeprefix("nanomegatron.").split(".")
        if name.startswith("nanomegatron."):
            in_room = len(parts) > 1 and (ROOT / "nanomegatron" / parts[0]).is_dir()
            yield line, ".".join(parts[: 2 if in_room else 1])
        elif parts[0] in programs:
            yield line, parts[0]


def test_rooms_are_within_their_budgets():
    lines = dict.fromkeys(BUDGETS, 0)
    for s in PACKAGE:
        room, dot, _ = s.module.partition(".")
        lines[room if dot else ""] += len(s.lines)
    none(
        f"{room or 'the core'}: {n} lines, at most {BUDGETS[room]}"
        for room, n in lines.items()
        if n > BUDGETS[room]
    )


def test_every_module_has_a_rank():
    none(f"{s.name}:1 no place in RANKS" for s in SOURCES if s.stem != "__init__" and rank(s.module) < 0)


def test_imports_run_from_lower_to_higher():
    none(
        f"{s.name}:{line} {s.module} may not import {module} (same rank or higher)"
        for s in SOURCES
        for line, module in project_imports(s, "top")
        if entry(s.module) != entry(module) or "/" not in entry(module)
        if rank(module) >= rank(s.module)
    )


def test_no_import_cycles():
    """Modules of a room may import each other, so cycles are searched by module."""
    graph = {s.module: {m for _, m in project_imports(s, "top")} for s in SOURCES}

    def cycle(module: str, path: tuple) -> tuple:
        if module in path:
            return path[path.index(module) :] + (module,)
        return next(filter(None, (cycle(m, (*path, module)) for m in graph.get(module, ()))), ())

    none({" > ".join(found) for module in graph if (found := cycle(module, ()))})


def test_no_project_import_is_hidden():
    none(
        f"{s.name}:{line} imports {module} inside a function"
        for s in SOURCES
        for line, module in project_imports(s, "inside")
    )


def test_sources_are_found():
    assert {"config.settings", "mesh", "fast.pieces"} <= {s.module for s in PACKAGE}


def test_fast_files_name_what_they_equal_and_what_they_gain():
    """The first line names the form of the core, which exists; further down stands a file of results."""
    fast = [s for s in PACKAGE if entry(s.module) == "fast/" and s.stem != "__init__"]
    none(f"{s.name}:1 {why}" for s in fast if (why := lacks(ast.get_docstring(s.tree) or "")))


def lacks(docstring: str) -> str:
    """What the docstring of a file of fast/ does not say; "" if all is there."""
    first = re.match(r"Same result as `(\w+)\.(\w+)", docstring)
    if not first:
        return "does not open with Same result as `<core function>`"
    core = next((s for s in PACKAGE if s.module == first[1]), None)
    names = [n.name for n in core.functions + core.classes] if core else []
    if first[2] not in names:
        return f"{first[1]}.{first[2]} is nothing in the core"
    files = re.findall(r"benchmarks/results/[\w.-]+\.jsonl?", docstring)
    return "" if files and all((ROOT / f).is_file() for f in files) else "names no file of results"


def test_little_must_be_opened_to_read_a_part():
    """Core modules that one reaches by imports, and beside them at most 9 modules of rooms."""
    graph = {s.module: {m for _, m in project_imports(s, "top")} for s in SOURCES}
    model = reached("model", graph) | {"model"}
    for part, most in {"tp": 4, "dp": 4, "cp": 4, "fp8": 4, "moe": 7}.items():
        found = reached(part, graph) - {"_kernels"}
        core = {m for m in found if "." not in m}
        assert len(core) <= most and len(found - core) <= 9, f"{part}: {sorted(found)}"
    assert len(reached("pp", graph) - model) <= 6


def reached(module: str, graph: dict[str, set[str]]) -> set[str]:
    """All modules that a module imports, and those that these import."""
    found: set[str] = set()
    todo = [module]
    while todo:
        more = graph.get(todo.pop(), set()) - found
        found |= more
        todo += more
    return found

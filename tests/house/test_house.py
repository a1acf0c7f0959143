"""The structure of the package: rooms and their figures, the order of imports, what files of fast/ say."""

import ast
import re
from collections.abc import Iterator

import pytest

from nanomegatron.config.rules import declared
from nanomegatron.config.settings import Config
from tests.house.test_style import PACKAGE, PROGRAMS, ROOT, SOURCES, Source, none

# Today's figures of each room: its statements (`Source.statements`), and how often one of them does several
# things at once (`dense`). They may only fall; but what the targets allow, per 1,000 statements, a room may
# always have. The core shall have 3,000 statements. A feature pays from its own room: who moves code moves
# its figures.
TARGETS = {"core": (15, 35, 8, 5, 12), "other": (30, 45, 12, 10, 14)}
KINDS = ("a, b = x, y", "x if c else y", "f(*x)", ":=", "x or y")
TODAY = """
              statements  a, b = x, y  x if c else y   f(*x)      :=  x or y
checkpoint          2303           70            112      28      25      30
commands             904           30             69      24      11      21
config              2162           97            124       8      35      52
core                2994            3            103      16       7      22
data                1411           44             61      17       9       7
debug                571           17             36       4       4      11
fast                1716           85             69      28       8      12
faults              1019           36             40       3       4      14
launch               250            1             10       0       2       5
ops                 1533           78            138      73       2      21
plan                1143           85            103      11       7      26
programs             544            9             21       0       5       6
report              1575           37             62       6       9      18
variants             359            9             10       2       0       3
"""

# Imports run strictly from lower to higher: a module may import those of the lines above its own, and in a
# room (whose name ends in /) those of its room. Ideas stand below fast/ and variants/, these below build,
# then step, which all that looks on at it imports: checkpoint/, report/, faults/, debug/; launch/ and train
# put them together. mesh imports launch.world, and faults.launch stands by itself.
RANKS = """
schedules batch
config/
plan.flops launch.world core
mesh lr_schedule ops/ plan/
comm faults.launch
param
tp dp cp router fp8 recompute
layers moe fp8_linear zero2 optim data/
attention
model
pp
fast/ variants/ megatron_api
pick_variants
pick_fast_paths
build
step
checkpoint/ report/
faults/
run
step
faults.alive
checkpoint.resume
faults.recovery debug/
launch/
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


def room_of(source: Source) -> str:
    return "programs" if "/" not in source.name else source.room.rstrip("/") or "core"


def figures() -> dict[str, list[int]]:
    """Of each room what TODAY has."""
    found: dict[str, list[int]] = {}
    for s in SOURCES:
        kinds = [kind for _, kind in dense(s)]
        row = [len(s.statements), *map(kinds.count, KINDS)]
        found[room_of(s)] = [sum(pair) for pair in zip(found.get(room_of(s), [0] * 6), row)]
    return found


def dense(source: Source) -> Iterator[tuple[int, str]]:
    """(line, kind) of what does several things at once."""
    for n in ast.walk(source.tree):
        if (
            isinstance(n, ast.Assign)
            and isinstance(n.targets[0], ast.Tuple)
            and isinstance(n.value, ast.Tuple)
        ):
            yield n.lineno, "a, b = x, y"
        if isinstance(n, ast.Assign | ast.Return) and isinstance(n.value, ast.BoolOp):
            yield n.lineno, "x or y"
        if isinstance(n, ast.Call) and any(isinstance(a, ast.Starred) for a in n.args):
            yield n.lineno, "f(*x)"
        if isinstance(n, ast.IfExp):
            yield n.lineno, "x if c else y"
        if isinstance(n, ast.NamedExpr):
            yield n.lineno, ":="


def off_today(room: str, now: list[int], today: list[int]) -> Iterator[str]:
    """What has risen over its figure and its target, and what has fallen by a step without its figure."""
    targets = TARGETS.get(room, TARGETS["other"])
    free = [0, *(now[0] * target // 1000 for target in targets)]
    for what, n, recorded, target, step in zip(("statements", *KINDS), now, today, free, (50, 5, 5, 5, 5, 5)):
        if n > max(recorded, target):
            yield f"{room}: {n} {what}, at most {max(recorded, target)}"
        if recorded >= n + step and recorded > target:
            yield f"{room}: {n} {what}, the figure of {recorded} must fall"


def test_rooms_are_within_their_figures():
    head, *rows = TODAY.strip("\n").splitlines()
    today = {room: [int(n) for n in row] for room, *row in map(str.split, rows)}
    now = figures()
    found = [what for room, row in now.items() for what in off_today(room, row, today.get(room, [0] * 6))]
    lowest = {room: map(min, row, today.get(room, row)) for room, row in sorted(now.items())}
    table = [room.ljust(14) + "{:10}{:13}{:15}{:8}{:8}{:8}".format(*row) for room, row in lowest.items()]
    assert not found, "\n".join(["", *found, "what has fallen, in TODAY:", head, *table])


@pytest.mark.parametrize(
    "code, expected",
    [
        ("a, b = x, y", "a, b = x, y"),
        ("a, b = f()", ""),
        ("z = x if c else y", "x if c else y"),
        ("f(*x)", "f(*x)"),
        ("f(**x)", ""),
        ("f(n := 1)", ":="),
        ("z = x or y", "x or y"),
        ("if x or y: pass", ""),
    ],
)
def test_density_itself(code, expected):
    found = [kind for _, kind in dense(Source(ROOT / "nanomegatron" / "invented.py", code))]
    assert found == [expected] * bool(expected)


def test_figures_of_a_room_may_only_fall():
    """But up to the target all is free, and a fall of a few needs no new figure."""
    today = [1000, 40, 60, 20, 11, 5]
    assert not list(off_today("data", today, today))
    assert not list(off_today("data", [951, 36, 56, 16, 7, 13], today))
    assert list(off_today("data", [1001, 41, 61, 21, 12, 15], today)) == [
        "data: 1001 statements, at most 1000",
        "data: 41 a, b = x, y, at most 40",
        "data: 61 x if c else y, at most 60",
        "data: 21 f(*x), at most 20",
        "data: 12 :=, at most 11",
        "data: 15 x or y, at most 14",
    ]
    assert list(off_today("data", [950, 35, 60, 20, 11, 5], today)) == [
        "data: 950 statements, the figure of 1000 must fall",
        "data: 35 a, b = x, y, the figure of 40 must fall",
    ]


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


def test_the_full_tier_lists_tests_that_are_there(gone_from_full_tier):
    assert not gone_from_full_tier, "tests/full_tier.txt lists tests that are gone"


def test_fast_files_name_what_they_equal_and_what_they_gain():
    """The first line names the form of the core, which exists; further down stands a file of results."""
    fast = [s for s in PACKAGE if entry(s.module) == "fast/" and s.stem != "__init__"]
    none(f"{s.name}:1 {why}" for s in fast if (why := lacks(ast.get_docstring(s.tree) or "")))


def lacks(docstring: str) -> str:
    """What the docstring of a file of fast/ does not say; "" if all is there."""
    first = re.match(r"Same result as `(\w+)\.(\w+)", docstring)
    if not first:
        return "does not open with Same result as `<core function>`"
    if first[2] not in core_names(first[1]):
        return f"{first[1]}.{first[2]} is nothing in the core"
    files = re.findall(r"benchmarks/results/[\w.-]+\.jsonl?", docstring)
    return "" if files and all((ROOT / f).is_file() for f in files) else "names no file of results"


def test_variants_name_what_they_replace_their_flag_their_source_and_their_test():
    files = [s for s in PACKAGE if entry(s.module) == "variants/" and s.stem != "__init__"]
    none(f"{s.name}:1 {why}" for s in files if (why := unsaid(ast.get_docstring(s.tree) or "")))


def test_what_a_variant_does_not_say_is_found():
    said = "Other result than `router.best_experts`, for `--moe-router-topk`: tests/test_router.py (arXiv 1)"
    assert not unsaid(said)
    assert "does not open with" in unsaid(said.replace("Other", "Same"))
    assert "router.best_expert is nothing" in unsaid(said.replace("experts", "expert"))
    assert "no flag --moe" in unsaid(said.replace("--moe-router-topk", "--moe"))
    assert "names no test" in unsaid(said.replace("router.py", "routers.py"))
    assert "names no source" in unsaid(said.partition("(")[0])


def test_tests_stand_in_the_folders_of_the_rooms():
    """The core's in tests/ itself; what they share is no test, and stands there too."""
    rooms = {path.name for path in (ROOT / "nanomegatron").iterdir() if (path / "__init__.py").is_file()}
    others = {"benchmarks", "docs", "gpu", "house", "tools"}
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders <= rooms | others and others <= folders
    for path in (ROOT / "tests").glob("test_*.py"):
        word = path.stem.split("_")[1]
        assert not (ROOT / "nanomegatron" / word).is_dir(), f"{path.name} belongs in tests/{word}"


def unsaid(docstring: str) -> str:
    """What the docstring of a file of variants/ does not say; "" if all is there."""
    first = re.match(r"Other result than `(\w+)\.(\w+)(?:\.\w+)?`, for `--([\w-]+)", docstring)
    if not first:
        return "does not open with Other result than `<core function>`, for `--<flag>"
    if first[2] not in core_names(first[1]):
        return f"{first[1]}.{first[2]} is nothing in the core"
    if first[3].replace("-", "_").removeprefix("no_") not in {s.name for _, s, _ in declared(Config())}:
        return f"there is no flag --{first[3]}"
    tests = re.findall(r"tests/[\w/]*test_\w+\.py", docstring)
    if not tests or not all((ROOT / test).is_file() for test in tests):
        return "names no test that is there"
    return "" if re.search(r"arXiv \d|Megatron|transformers", docstring) else "names no source"


def core_names(module: str) -> set[str]:
    """The functions and classes of a module of the core."""
    core = next((s for s in PACKAGE if s.module == module), None)
    return {n.name for n in core.functions + core.classes} if core else set()


def test_little_must_be_opened_to_read_a_part():
    """Modules of the core, fast/ and variants/ that one reaches by imports; of other rooms at most 9."""
    graph = {s.module: {m for _, m in project_imports(s, "top")} for s in SOURCES}
    model = reached("model", graph) | {"model"}
    for part, most in {"tp": 4, "dp": 4, "cp": 4, "fp8": 4, "moe": 7, "model": 12}.items():
        found = reached(part, graph) - {"_kernels"}
        near = {m for m in found if "." not in m or m.startswith(("fast.", "variants."))}
        assert len(near) <= most, f"{part}: {sorted(near)}"
        assert len(found - near) <= 9 or part == "model", f"{part}: {sorted(found - near)}"
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

"""The house rules that a machine can check, with the standard library's ast alone; raise caps in the open."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Statements are logical lines: docstrings, imports, comments, blank lines and line breaks do not count.
MAX_FILE, MAX_FUNCTION, P90_FUNCTION = 280, 45, 17  # statements
MAX_FIELDS, MAX_ARGUMENTS, MAX_FORWARD, MAX_PARALLEL = 10, 8, 12, 3
MAX_LINES, MAX_LINE = 500, 110  # lines of a file, characters of a line

# What is over these limits today. Figures may only fall; within its limit a name leaves the list.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
WIDE_CLASSES = {
    "config.rules.Rules": 18,
    "fast.cuda_graphs.GraphedSteps": 13,
    "plan.cluster.Cluster": 14,
}
EXTRAS = set(
    "matplotlib pynvml tqdm tensorboard torch.utils.tensorboard wandb tokenizers sentencepiece".split()
)
DISTRIBUTED = {
    "launch.world",
    "mesh",
    "comm",
    "fast.peer_memory",
    "fast.peer_access",
    "checkpoint/",
    "commands.doctor",
}
# early and banner read what torchrun says; doctor reports what is set; setup looks for the compiler;
# preprocess keeps the tokenizers library from starting threads, profiler torch's profiler from printing
ENVIRONMENT = {
    "commands.doctor",
    "config.early",
    "launch.world",
    "preprocess",
    "report.banner",
    "report.profiler",
    "setup",
    "train",
}
INTERFACES = {"Protocol", "ABC", "Generic", "object"}  # being based on one of these is no inheritance


class Source:
    """One file: its text, its tree, and its place in the order of imports."""

    def __init__(self, path: Path, text: str | None = None) -> None:
        self.path, self.text = path, path.read_text(encoding="utf-8") if text is None else text
        self.name = str(path.relative_to(ROOT))
        self.lines, self.stem = self.text.splitlines(), path.stem
        self.module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("nanomegatron.")

    @property
    def room(self) -> str:
        """The folder of the package that it is in, with a /; "" for the core and programs."""
        room, dot, _ = self.module.partition(".")
        return f"{room}/" if dot else ""

    @functools.cached_property
    def tree(self) -> ast.Module:
        """Parsed when it is first asked for: ranks import this file for its names."""
        return ast.parse(self.text)

    @functools.cached_property
    def functions(self) -> list:
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]

    @functools.cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.ClassDef)]

    @functools.cached_property
    def statements(self) -> list[int]:
        """The line in which each statement ends."""
        ends = tokenize.generate_tokens(io.StringIO(self.text).readline)
        free = {line for node in ast.walk(self.tree) if is_free(node) for line in lines_of(node)}
        return [t.start[0] for t in ends if t.type == tokenize.NEWLINE and t.start[0] not in free]

    def size(self, node: ast.AST) -> int:
        """The statements of a function or a class, its first line among them."""
        return sum(line in lines_of(node) for line in self.statements)

    def imports(self, level: str) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of imports at the 'top' of the module or 'inside' functions and classes."""
        inside = {id(n) for f in self.functions + self.classes for n in ast.walk(f)}
        for node in ast.walk(self.tree):
            if (id(node) in inside) == (level == "inside"):
                if isinstance(node, ast.Import):
                    yield from ((node.lineno, alias.name) for alias in node.names)
                if isinstance(node, ast.ImportFrom):
                    base = ".".join(filter(None, ["nanomegatron" if node.level else "", node.module or ""]))
                    yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


PACKAGE = [Source(p) for p in sorted(ROOT.glob("nanomegatron/**/*.py"))]
PROGRAMS = [Source(p) for p in sorted(ROOT.glob("*.py"))]
SOURCES = PACKAGE + PROGRAMS
ASIDE = (ROOT / name for name in ("tests", "tools", "examples", "benchmarks"))
KERNELS = sorted([*ROOT.glob("cuda/*.c*"), *ROOT.glob("cuda/*.h"), *ROOT.glob("tests/*.h")])
PYTHON = SOURCES + [Source(p) for folder in ASIDE for p in sorted(folder.glob("**/*.py"))]


def none(violations: Iterator[str]) -> None:
    """Fail with one violation a line, each `file:line what`."""
    found = sorted(violations)
    assert not found, "\n" + "\n".join(found)


def lines_of(node: ast.AST) -> range:
    return range(node.lineno, node.end_lineno + 1)


def is_free(node: ast.AST) -> bool:
    """Imports and docstrings are no statements."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Import | ast.ImportFrom) or text and isinstance(node.value.value, str)


def above(what: str, found: Iterator[tuple[str, int]], most: int, today: dict[str, int]) -> Iterator[str]:
    """What of (name, size) is larger than `most` and than today, and what has shrunk without its figure."""
    largest: dict[str, int] = {}
    for name, size in found:
        largest[name] = max(size, largest.get(name, 0))
    for name in largest.keys() | today.keys():
        size, recorded = largest.get(name, 0), today.get(name, most)
        if size > recorded:
            yield f"{name}: {size} {what}, at most {recorded}"
        elif recorded > max(size, most):
            yield f"{name}: {size} {what}, its figure is {recorded}"
        elif name in today and size <= most:
            yield f"{name}: {size} {what}, within {most}: take it out of the list"


def test_files_are_short():
    none(f"{s.name}: {len(s.lines)} lines, at most {MAX_LINES}" for s in PYTHON if len(s.lines) > MAX_LINES)
    none(above("statements", ((s.name, len(s.statements)) for s in SOURCES), MAX_FILE, LONG_FILES))


def test_functions_are_short():
    found = ((f"{s.module}.{f.name}", s.size(f)) for s in SOURCES for f in s.functions)
    none(above("statements", found, MAX_FUNCTION, LONG_FUNCTIONS))


def test_most_functions_are_shorter():
    """The 90th percentile; the message lists what is beyond it, longest first."""
    sizes = sorted((s.size(f), f"{s.name}:{f.lineno} {f.name}") for s in SOURCES for f in s.functions)
    beyond = [f"{n} {where}" for n, where in reversed(sizes) if n > P90_FUNCTION]
    assert len(beyond) <= 0.1 * len(sizes), "\n" + "\n".join(beyond)


def test_data_classes_have_few_fields():
    """But settings, and three that hold what the whole run shares."""
    found = (
        (f"{s.module}.{c.name}", fields(c)) for s in SOURCES for c in s.classes if not is_wide(s, c.name)
    )
    none(above("fields", found, MAX_FIELDS, WIDE_CLASSES))


def is_wide(source: Source, name: str) -> bool:
    settings = source.room == "config/" and name.endswith("Config")
    return settings or name in ("Mesh", "Batch", "Paths")


def fields(node: ast.ClassDef) -> int:
    """The fields of a data class or a named tuple; 0 for other classes."""
    data = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    data |= any("NamedTuple" in ast.unparse(b) for b in node.bases)
    return data * sum(isinstance(n, ast.AnnAssign) for n in node.body)


def test_functions_take_few_arguments():
    """Not counted: what catches keywords that there are not, to answer them."""
    none(f"{s.name}:{line} {what}" for s in SOURCES for line, what in many_arguments(s))


def many_arguments(source: Source) -> Iterator[tuple[int, str]]:
    """Functions of more than 8 arguments; the forward of an autograd.Function, called by position, of 12."""
    free = ("self", "cls", "ctx", "megatron")
    functions = [c for c in source.classes if any("Function" in ast.unparse(b) for b in c.bases)]
    forwards = {f for c in functions for f in c.body if getattr(f, "name", "") == "forward"}
    for f in source.functions:
        names = [a for a in arguments(f) if a.arg not in free]
        most = MAX_FORWARD if f in forwards else MAX_ARGUMENTS
        if len(names) > most:
            yield f.lineno, f"{f.name}: {len(names)} arguments, at most {most}"


def arguments(function: ast.FunctionDef) -> list[ast.arg]:
    a = function.args
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, [a.vararg, a.kwarg])]


def test_inheritance_is_one_level_deep():
    """A class is based on nn.Module, Function, an exception or one plain class of ours, and that is all."""
    bases = {c.name: [ast.unparse(b) for b in c.bases] for s in SOURCES for c in s.classes}
    bases = {name: [re.sub(r"\[.*|.*\.", "", base) for base in above] for name, above in bases.items()}

    def depth(name: str) -> int:
        return max((1 + depth(b) for b in bases.get(name, ()) if b not in INTERFACES | {name}), default=0)

    none(
        f"{s.name}:{c.lineno} class {c.name}: {depth(c.name)} levels of inheritance, at most 1"
        for s in SOURCES
        for c in s.classes
        if depth(c.name) > 1
    )


def test_lines_are_short_and_ascii():
    files = [(s.name, s.lines) for s in PYTHON]
    files += [(str(p.relative_to(ROOT)), p.read_text(encoding="utf-8").splitlines()) for p in KERNELS]
    none(
        f"{name}:{i} {len(line)} characters, at most {MAX_LINE}{'' if line.isascii() else '; not ASCII'}"
        for name, lines in files
        for i, line in enumerate(lines, 1)
        if len(line) > MAX_LINE or not line.isascii()
    )


def test_few_values_are_assigned_at_once():
    none(f"{s.name}:{line} {what}" for s in PYTHON for line, what in long_assignments(s))


def long_assignments(source: Source) -> Iterator[tuple[int, str]]:
    """Parallel assignments, `a, b = x, y`, of many values: one has to count to find the pairs.

    Sizes, `s, b, h, d = 16, 2, 8, 4`, may be assigned together.
    """
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            values = node.value.elts
            pairs = isinstance(node.targets[0], ast.Tuple) and len(values) > MAX_PARALLEL
            if pairs and not all(isinstance(value, ast.Constant) for value in values):
                yield node.lineno, f"{len(values)} values assigned at once, at most {MAX_PARALLEL}"


def test_no_global_state():
    """No `global`, and nothing at module level that a function fills."""
    none(
        f"{s.name}:{n.lineno} global {', '.join(n.names)}"
        for s in SOURCES
        for n in ast.walk(s.tree)
        if isinstance(n, ast.Global)
    )
    none(
        f"{s.name}:{line} module-level {name} is changed in a function"
        for s in SOURCES
        for line, name in changed_in_functions(s)
    )


def changed_in_functions(source: Source) -> Iterator[tuple[int, str]]:
    """Module-level names that a function of the module stores into or calls a changing method of."""
    assigned = [t for n in source.tree.body if isinstance(n, ast.Assign) for t in n.targets]
    assigned += [n.target for n in source.tree.body if isinstance(n, ast.AnnAssign)]
    names = {t.id for t in assigned if isinstance(t, ast.Name)}
    changing = set("append extend add update pop clear setdefault insert remove popitem".split())
    for function in source.functions:
        local = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        local |= {a.arg for a in arguments(function)}
        for node in ast.walk(function):
            owner = None
            if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                owner = node.value
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in changing:
                owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in names - local:
                yield node.lineno, owner.id


def test_environment_is_read_in_few_places():
    none(
        f"{s.name}:{n.lineno} {ast.unparse(n)}: only {', '.join(sorted(ENVIRONMENT))} read the environment"
        for s in SOURCES
        if s.module not in ENVIRONMENT
        for n in ast.walk(s.tree)
        if isinstance(n, ast.Attribute) and ast.unparse(n) in ("os.environ", "os.getenv", "os.putenv")
    )


def test_torch_distributed_stays_below():
    none(
        f"{s.name}:{line} {name}: only {', '.join(sorted(DISTRIBUTED))} use torch.distributed"
        for s in SOURCES
        if not {s.module, s.room} & DISTRIBUTED
        for line, name in distributed_uses(s)
    )


def distributed_uses(source: Source) -> Iterator[tuple[int, str]]:
    for level in ("top", "inside"):
        yield from ((i, n) for i, n in source.imports(level) if n.startswith("torch.distributed"))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed"


def test_extras_are_imported_where_used():
    none(
        f"{s.name}:{line} {name} is an extra: import it in the function that needs it"
        for s in SOURCES
        for line, name in s.imports("top")
        if any(name == extra or name.startswith(extra + ".") for extra in EXTRAS)
    )


def test_package_init_is_empty():
    inits = [s for s in PACKAGE if s.stem == "__init__" and s.module != "__init__"]
    none(f"{s.name}:1 must stay empty" for s in inits if s.text.strip())


def test_public_names_are_documented():
    """Modules; public functions and classes at module level; public methods of public classes.

    A method of a few lines whose name says it all, and those every torch module has, need none.
    """
    none(
        f"{s.name}:{node.lineno} {name} has no docstring"
        for s in SOURCES
        for node, name in public_definitions(s)
        if not ast.get_docstring(node)
    )
    none(f"{s.name}:1 module has no docstring" for s in SOURCES if s.lines and not ast.get_docstring(s.tree))


def public_definitions(source: Source) -> Iterator[tuple[ast.AST, str]]:
    known = {"forward", "backward", "setup_context"}
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node, node.name
            for method in node.body if isinstance(node, ast.ClassDef) else []:
                public = isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
                if public and method.name not in known and len(lines_of(method)) > 5:
                    yield method, f"{node.name}.{method.name}"


FORBIDDEN_CALLS = {"eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "torch.jit.load"}
FORBIDDEN_CALLS |= {"torch.hub.load", "subprocess.getoutput", "subprocess.getstatusoutput"}
# The only value that a keyword may have, written out.
SAFE_KEYWORDS = {"allow_pickle": False, "shell": False, "trust_remote_code": False, "weights_only": True}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


# What may be done in one file, each with its reason.
UNSAFE_BY_DESIGN = {
    ("checkpoint.dcp_metadata", "import of pickle"),  # for its dumps, of tables of ours
    ("config.pickles", "import of pickle"),  # for its reader in Python, with which nothing can be called
    ("benchmarks.table", "eval"),  # formulas of our own table, without builtins
}


def test_nothing_runs_foreign_code():
    """No pickle, no eval, no shell: a data file or checkpoint can never do more than be wrong.

    In the whole tree but the tests, which plant pickles.
    """
    none(
        f"{s.name}:{line} {what}"
        for s in PYTHON
        if not s.module.startswith("tests.")
        for line, what in unsafe(s)
        if (s.module, what.partition(":")[0]) not in UNSAFE_BY_DESIGN
    )


def unsafe(source: Source) -> Iterator[tuple[int, str]]:
    for level in ("top", "inside"):
        for line, name in source.imports(level):
            if name.split(".")[0] in FORBIDDEN_IMPORTS or name == "torch.load":
                yield line, f"import of {name}: can run code from a file"
    for call in (n for n in ast.walk(source.tree) if isinstance(n, ast.Call)):
        name = ast.unparse(call.func)
        keywords = {k.arg: ast.unparse(k.value) for k in call.keywords}
        if name in FORBIDDEN_CALLS:
            yield call.lineno, f"{name}: can run code from a file"
        if name == "torch.load" and "weights_only" not in keywords:
            yield call.lineno, "torch.load without weights_only=True: can run code from a file"
        for key, safe in SAFE_KEYWORDS.items():
            if keywords.get(key, str(safe)) != str(safe):
                yield call.lineno, f"{name}({key}={keywords[key]})"
        if re.search(r"(gather|broadcast|scatter|send|recv)_object(_list)?$", name):
            yield call.lineno, f"{name}: object collectives are pickles"


def test_nothing_is_left_over():
    """No TODO, and no code in comments (a comment line that parses as a statement of code)."""
    none(
        f"{s.name}:{i} {line.strip()}"
        for s in PYTHON
        if s.path != Path(__file__).resolve()
        for i, line in enumerate(s.lines, 1)
        if re.search(r"#.*\b(TODO|FIXME|XXX|HACK)\b", line) or is_code(line.strip())
    )


CODE = re.compile(r"# +(\w[\w.\[\], ]* = \S|\w[\w.]*\(.*\)$|return \w|import \w+$|from \S+ import)")


def is_code(line: str) -> bool:
    try:
        return bool(CODE.match(line) and ast.parse(line.lstrip("# ")).body)
    except SyntaxError:
        return False


@pytest.mark.parametrize(
    "rule, code, expected",
    [
        (unsafe, "import pickle", "import of pickle"),
        (unsafe, "import torch\ntorch.load('x')", "torch.load without"),
        (unsafe, "torch.load('x', weights_only=True)", ""),
        (unsafe, "f(allow_pickle=True)", "allow_pickle"),
        (unsafe, "f(allow_pickle=chosen, shell=False)", "f(allow_pickle=chosen)"),
        (unsafe, "torch.load('x', weights_only=safe)", "torch.load(weights_only=safe)"),
        (unsafe, "from torch import load", "import of torch.load"),
        (unsafe, "subprocess.getoutput('ls')", "getoutput"),
        (unsafe, "dist.all_gather_object(a, b)", "object collectives"),
        (many_arguments, "def f(a, b, c, d, e, f, g, h, i): pass", "9 arguments, at most 8"),
        (many_arguments, "class F(Function):\n    def forward(ctx, a, b, c, d, e, f, g, h, i): pass", ""),
        (changed_in_functions, "seen = {}\ndef f(x):\n    seen[x] = 1", "seen"),
        (changed_in_functions, "seen = {}\ndef f(seen):\n    seen[1] = 1", ""),
        (long_assignments, "a, b, c, d = x, y, z, 4", "4 values"),
        (long_assignments, "a, b, c = x, y, z\na, b, c, d = f()\na, b, c, d = 1, 2, 3, 4", ""),
        (distributed_uses, "def f():\n    import torch.distributed as dist", "torch.distributed"),
        (distributed_uses, "torch.distributed.barrier()", "torch.distributed"),
        (distributed_uses, "import torch", ""),
    ],
)
def test_the_rules_themselves(rule, code, expected):
    """A rule that finds nothing because it looks at nothing would pass for ever."""
    found = [what for _, what in rule(Source(ROOT / "nanomegatron" / "invented.py", code))]
    assert expected in found[0] if expected else not found


def test_statements_are_counted():
    """Docstrings, imports, comments and line breaks are free; `else` and decorators are statements, too."""
    code = """
import os  # free
@cached
def f(x, y):
    'free'
    # free
    if x:
        return [x,
                y]
    else:
        return (y +
                x)
class C(NamedTuple):
    a: int
    "free"
    b: int = 0
"""
    source = Source(ROOT / "nanomegatron" / "invented.py", code)
    assert len(source.statements) == 9
    assert source.size(source.functions[0]) == 5 and fields(source.classes[0]) == 2


@pytest.mark.parametrize(
    "size, today, expected",
    [
        (45, {}, ""),
        (46, {}, "46 statements, at most 45"),
        (50, {"f": 50}, ""),
        (51, {"f": 50}, "51 statements, at most 50"),
        (49, {"f": 50}, "its figure is 50"),
        (45, {"f": 46}, "its figure is 46"),
        (44, {"f": 45}, "take it out of the list"),
    ],
)
def test_figures_may_only_fall(size, today, expected):
    found = list(above("statements", iter([("f", size), ("f", 1)]), 45, today))
    assert expected in found[0] if expected else not found

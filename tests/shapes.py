"""The shapes that docstrings state, read and compared with those of tensors at run time.

    x, y [s/tp, b, h], weight [o/tp, h], bias [o] or [o/tp] -> [s, b, o], lse [n, s, b]

A parameter's shape follows its name, or the last name of a list; "or" gives another one. Results
follow an arrow, in order. A dim is a number, a symbol, or arithmetic of symbols; `...` is any number of dims.
Sizes of axes are symbols (tp, cp, ep), known from the Axis that the function takes or its object has. Other
symbols have no value of their own, but within one call each means one number.
"""

import ast
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from types import CodeType, ModuleType

import torch

from nanomegatron.mesh import Axis

SHAPE = r"`*\[([^\[\]]*)\]`*"
SHAPES = rf"{SHAPE}(?:,? or {SHAPE})*"
DTYPE = r"(?:(?:bool|uint8|int32|int64|bf16|fp32|fp64) )?"
NAMED = re.compile(rf"((?:`*\w+`*(?:, | and ))*`*\w+`*)(?::\s+|\s+|`){DTYPE}{SHAPES}")
Shape = tuple[str, ...]


def dims_of(text: str) -> Shape:
    return tuple(dim.strip() for dim in text.split(",") if dim.strip())


def is_dim(dim: str) -> bool:
    """Whether it is `...` or arithmetic of symbols and whole numbers."""
    if dim == "...":
        return True
    try:
        nodes = list(ast.walk(ast.parse(dim, mode="eval").body))
    except SyntaxError:
        return False
    kinds = ast.BinOp | ast.Name | ast.Constant | ast.operator | ast.expr_context
    return all(isinstance(node, kinds) for node in nodes)


def alternatives(text: str) -> list[Shape]:
    """The shapes in `[a, b] or [c]`; those that are prose are no shapes."""
    found = [dims_of(inside) for inside in re.findall(SHAPE, text)]
    return [shape for shape in found if all(map(is_dim, shape))]


def parameters(doc: str) -> dict[str, list[Shape]]:
    """name -> the shapes stated for it."""
    found: dict[str, list[Shape]] = {}
    for match in NAMED.finditer(doc):
        for name in re.findall(r"\w+", re.sub(r"\band\b", "", match[1])):
            found.setdefault(name, []).extend(alternatives(match[0][len(match[1]) :]))
    return {name: shapes for name, shapes in found.items() if shapes}


def results(doc: str) -> list[list[Shape]]:
    """The shapes behind the last arrow of each paragraph, to the end of the sentence: one a result."""
    for paragraph in doc.split("\n\n"):
        _, arrow, behind = re.sub(r"\s+", " ", paragraph).partition("->")
        if arrow:
            sentence = re.split(r"[.;](?:\s|$)", behind.replace("...", "\0"))[0].replace("\0", "...")
            shapes = [alternatives(match[0]) for match in re.finditer(SHAPES, sentence)]
            if any(shapes):
                return shapes
    return []


def is_tensor(annotation: ast.expr | None) -> bool:
    text = "" if annotation is None else ast.unparse(annotation)
    return bool(re.search(r"\bTensor\b", text)) and "Callable" not in text


def missing(function: ast.FunctionDef, doc: str) -> list[str]:
    """The Tensor parameters without a stated shape, and `->` for a result without one."""
    args = function.args
    every = [arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg] if arg]
    stated = parameters(doc)
    absent = [arg.arg for arg in every if is_tensor(arg.annotation) and arg.arg not in stated]
    return absent + ["->"] * (is_tensor(function.returns) and not results(doc))


@functools.cache
def compiled(dim: str) -> tuple[CodeType, frozenset[str]]:
    """The code of a dim, which is names and arithmetic by `is_dim`, and its symbols."""
    names = {node.id for node in ast.walk(ast.parse(dim)) if isinstance(node, ast.Name)}
    return compile(dim, dim, "eval"), frozenset(names)


def value(dim: str, sizes: dict[str, Fraction]) -> Fraction | None:
    """None: it has a symbol without a value."""
    try:
        return Fraction(eval(compiled(dim)[0], {"__builtins__": {}}, sizes))
    except NameError:
        return None


def solve(dim: str, size: int, sizes: dict[str, Fraction]) -> bool:
    """Whether `dim` can be `size`; gives its one unknown symbol, which stands in it linearly, a value."""
    unknown = set(compiled(dim)[1] - sizes.keys())
    if not unknown:
        return value(dim, sizes) == size
    if len(unknown) == 1:
        name = unknown.pop()
        at = [value(dim, sizes | {name: Fraction(n)}) for n in (1, 2)]
        if at[1] == at[0]:
            return at[0] == size
        sizes[name] = 1 + (size - at[0]) / (at[1] - at[0])
    return True


def fits(shape: Shape, actual: tuple[int, ...], sizes: dict[str, Fraction]) -> bool:
    """Whether the tensor has that shape; `sizes` learns the symbols that it meets first."""
    if "..." in shape:
        at = shape.index("...")
        before, after = shape[:at], shape[at + 1 :]
        if len(actual) < len(before) + len(after):
            return False
        shape, actual = before + after, actual[:at] + actual[len(actual) - len(after) :]
    if len(shape) != len(actual):
        return False
    mine = dict(sizes)
    if all(solve(dim, size, mine) for dim, size in zip(shape, actual, strict=True)):
        sizes |= mine
        return True
    return False


def agree(pairs: list[tuple[tuple[int, ...], list[Shape]]], sizes: dict[str, Fraction]) -> bool:
    """Whether every tensor has one of its shapes, with one number for each symbol."""
    if not pairs:
        return True
    (actual, shapes), *others = pairs
    tries = [(shape, dict(sizes)) for shape in shapes]
    return any(fits(shape, actual, mine) and agree(others, mine) for shape, mine in tries)


def axis_sizes(values: list) -> dict[str, Fraction]:
    axes = [value for value in values if isinstance(value, Axis)]
    named = {axis.name: Fraction(axis.size) for axis in axes}
    tp = [named[name] for name in ("etp", "tp") if name in named]  # experts' layers are those of tp, over etp
    return named | ({"tp": tp[0]} if tp else {})


class Checker:
    """Compares calls with docstrings; collects the names of functions that were called, and of wrong ones."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.wrong: dict[str, str] = {}  # the first difference of each

    def wrapped(self, function: Callable, doc: str, name: str) -> Callable:
        stated, returned, signature = parameters(doc), results(doc), inspect.signature(function)

        @functools.wraps(function)
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            self.compare(name, given, result, stated, returned)
            return result

        return call

    def compare(self, name: str, given: dict, result, stated: dict, returned: list) -> None:
        owner = given.get("self")
        sizes = axis_sizes([*vars(owner).values()] if hasattr(owner, "__dict__") else [])
        sizes |= axis_sizes([*given.values()])
        sizes |= {key: Fraction(n) for key, n in given.items() if type(n) is int}
        pairs = [(key, given[key], stated[key]) for key in stated if isinstance(given.get(key), torch.Tensor)]
        several = result if isinstance(result, tuple) else (result,)
        if len(several) == len(returned):
            pairs += [("->", out, shapes) for out, shapes in zip(several, returned, strict=True) if shapes]
        pairs = [(key, tensor, shapes) for key, tensor, shapes in pairs if isinstance(tensor, torch.Tensor)]
        self.seen |= {name} if pairs else set()
        if not agree([(tuple(tensor.shape), shapes) for _, tensor, shapes in pairs], sizes):
            known = ", ".join(f"{symbol} {size}" for symbol, size in sizes.items())
            found = ", ".join(f"{key} {list(tensor.shape)} for {shapes}" for key, tensor, shapes in pairs)
            self.wrong.setdefault(name, f"{name}: {found}; {known}".replace("'", ""))


def documented(module: ModuleType) -> Iterator[tuple[object, str, Callable, str]]:
    """(where it lies, name, function, docstring) of the public functions and methods with stated shapes."""
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", "") != module.__name__:
            continue
        if inspect.isfunction(thing):
            yield module, name, thing, inspect.getdoc(thing) or ""
        elif inspect.isclass(thing):
            for method, raw in vars(thing).items():
                function = raw.__func__ if isinstance(raw, staticmethod) else raw
                if inspect.isfunction(function) and (method[0] != "_" or method == "__call__"):
                    doc = function.__doc__ or ""
                    if method in ("forward", "__call__"):
                        doc = inspect.cleandoc(thing.__doc__ or "") + "\n\n" + doc
                    yield thing, method, function, doc


@contextmanager
def checked(modules: list[ModuleType]) -> Iterator[Checker]:
    """`with checked(modules) as checker:` compares every call of their documented functions."""
    checker, undo = Checker(), []
    for module in modules:
        for owner, name, function, doc in list(documented(module)):
            if parameters(doc) or results(doc):
                short = f"{module.__name__.removeprefix('nanomegatron.')}.{function.__qualname__}"
                new: typing.Any = checker.wrapped(function, doc, short)
                places = [owner] if inspect.isclass(owner) else modules
                for place in places:
                    for key in [key for key, kept in vars(place).items() if kept is function] or [name]:
                        raw = vars(place).get(key)
                        if raw is function or isinstance(raw, staticmethod):
                            undo.append((place, key, raw))
                            setattr(place, key, staticmethod(new) if raw is not function else new)
    try:
        yield checker
    finally:
        for place, key, raw in reversed(undo):
            setattr(place, key, raw)

"""Docstrings state the shape of every tensor, with its sharding, and the tensors have these shapes."""

import ast
import importlib

import pytest

from nanomegatron.mesh import World
from tests.house.test_style import PACKAGE, none
from tests.layouts import flags_of, fp8
from tests.shapes import checked, missing
from tests.spmd import run_spmd
from tests.training import arguments, train_on_a_rank

ROOMS = ("", "ops/", "fast/")
MODULES = [s for s in PACKAGE if s.room in ROOMS and not s.stem.startswith("__")]
CLASS_DOC = ("forward", "__call__", "__init__")  # may leave their shapes to the docstring of their class


def test_every_tensor_of_a_public_function_has_its_shape_in_the_docstring():
    """Gradients of autograd functions have the shapes of what they are the gradients of."""

    def functions(source):
        for node in source.tree.body:
            if isinstance(node, ast.FunctionDef) and node.name[0] != "_":
                yield node.name, node, ast.get_docstring(node) or ""
            if isinstance(node, ast.ClassDef) and node.name[0] != "_":
                for inner in (n for n in node.body if isinstance(n, ast.FunctionDef)):
                    if inner.name in CLASS_DOC or inner.name[0] != "_" and inner.name != "backward":
                        doc = (ast.get_docstring(node) or "") if inner.name in CLASS_DOC else ""
                        yield f"{node.name}.{inner.name}", inner, f"{doc}\n\n{ast.get_docstring(inner) or ''}"

    none(
        f"{s.name}:{node.lineno} {name}: no [dims] for {', '.join(absent)}"
        for s in MODULES
        for name, node, doc in functions(s)
        if (absent := missing(node, doc))
    )


# Together these run the plain and the fast forms of tensor, context and expert parallelism, and FP8.
RUNS = [
    ("tp2sprs", "llama", "rowwise"),
    ("tp2spfp", "llama", "delayed"),
    ("tp2spovfp", "qwen", ""),
    ("pp2zbdp2z1", "qwen", ""),
    ("cp2", "documents", ""),
    ("cp4hifp", "llama", ""),
    ("tp2spep2etfp", "deep", ""),
]
MORE_RUNS = [
    ("tp2", "gpt", ""),
    ("tp2spcefp", "gpt", ""),
    ("cp2a2a", "qwen", ""),
    ("cp2agfp", "window", ""),
    ("dp2ep2", "moe", ""),
    ("dp2ep2eo", "deep", ""),
    ("cp2", "sinkhorn", ""),
]


def train_checked(world: World, argv: list[str], folder: str) -> tuple[set[str], set[str]]:
    """Names of the functions whose shapes were compared, and the differences found, on this rank."""
    modules = [importlib.import_module(f"nanomegatron.{s.module}") for s in PACKAGE if s.room != "commands/"]
    modules += [importlib.import_module("train")]
    with checked(modules) as checker:
        train_on_a_rank(world, argv, folder)
    return checker.seen, set(checker.wrong.values())


@pytest.mark.parametrize(
    "layout, model, recipe", RUNS + [pytest.param(*run, marks=pytest.mark.full) for run in MORE_RUNS]
)
def test_tensors_of_a_run_have_the_stated_shapes(layout, model, recipe, sources, tmp_path):
    size, flags = flags_of(layout)
    argv = arguments(sources, model, flags, fp8(recipe), "--train-iters 2")
    ranks = run_spmd(train_checked, size, argv, str(tmp_path), timeout=120)
    seen, wrong = (set().union(*found) for found in zip(*ranks, strict=True))
    none(sorted(wrong))
    assert len(seen) > 20, sorted(seen)

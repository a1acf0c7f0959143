"""What cases of kernels are made of: sizes, inputs, and copies of them that keep each call out of the L2.

A way is a function of the inputs that returns what is run. All forms of a case get copies of the same inputs.
A forward runs without autograd; a backward runs the graph of one forward again and again.
"""

import functools
import importlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.session import Case, Run

FAR = 512 * 2**20  # bytes that must pass before memory is used again: ten times the L2 of an H100
Way = Callable[..., Callable[[], object]]


@dataclass(frozen=True)
class Sizes:
    """Llama-3-8B's, with 8,192 tokens; the scores of its attention as a few GB allow."""

    device: str = "cuda"
    tokens: int = 8192
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    groups: int = 8
    head: int = 128
    vocab: int = 128256
    scores: tuple[tuple[int, int], ...] = ((32, 2048), (8, 8192))  # heads, length
    inner: tuple[tuple[int, int], ...] = ((65536, 3072), (8192, 3072))  # rows, features of GPT-2 124M
    experts: int = 8
    topk: int = 2
    elements: int = 500_000_000
    words: tuple[int, int] = (64, 1024)  # of the embedding, which is GPT-2's: rows, length
    words_hidden: int = 768
    words_vocab: int = 50304

    def normal(self, *shape: int, scale: float = 1.0, dtype=torch.bfloat16) -> Callable[[], torch.Tensor]:
        """What makes normal random numbers."""
        return lambda: torch.randn(shape, dtype=dtype, device=self.device).mul_(scale)


TINY = dict(tokens=128, hidden=128, ffn=256, vocab=96, elements=1000, scores=((2, 32), (1, 64)))
TINY |= dict(inner=((128, 96),), heads=4, groups=2, head=16, experts=4)
TINY |= dict(words=(3, 40), words_hidden=24, words_vocab=96)
SMALL = functools.partial(Sizes, **TINY)  # every case in seconds, on a CPU too


def case(
    name: str, moved: int, inputs: tuple, ways: dict[str, Way], exact: Callable | None = None, **finish
) -> Case:
    """A case of functions of tensors. inputs: what makes each; exact: None: torch's way in float64.

    finish: by name of a form what turns its results into the expected ones.
    """
    exact = exact or in_float64(ways["torch"])

    @functools.cache
    def made() -> tuple:
        torch.manual_seed(1)
        return tuple(make() for make in inputs)

    def build(form: str) -> Run:
        fresh = lambda: tuple(x.detach().clone() for x in made())  # noqa: E731
        return Run(alternating(moved, ways[form], fresh), finish=finish.get(form))

    built = {form: functools.partial(build, form) for form in ways}
    return Case(name, built, bytes=moved, expected=lambda: as_tuple(exact(*made())))


def alternating(moved: int, way: Way, fresh: Callable[[], tuple]) -> Callable[[], tuple]:
    """Copies of inputs and results that alternate, as many as need `FAR` bytes: none is still in the L2."""
    runs = [way(*fresh()) for _ in range(math.ceil(FAR / max(moved, FAR / 16)))]
    results, places = [None] * len(runs), itertools.cycle(range(len(runs)))

    def run() -> tuple:
        place = next(places)
        results[place] = None  # its memory is what this run gets
        with torch.no_grad():
            results[place] = as_tuple(runs[place]())
        return results[place]

    return run


def forms(ours: Way, plain: Callable, one_pass: Callable | None = None, grads: tuple = (), **peers: Way):
    """Ours, torch's functions, eager and compiled (`one_pass`, if another compiles to less), and peers."""
    way = functools.partial(backward, grads=grads) if grads else forward
    return {"ours": ours, "torch": way(plain), "compile": way(compiled(one_pass or plain)), **peers}


def passes(name: str, moved: tuple, inputs: tuple, grads: tuple, wanted: int, functions: tuple, **peers):
    """Two cases, forward and backward: the first `wanted` inputs have a gradient, the outputs' are `grads`.

    moved: bytes of each; functions: ours, torch's, and what torch.compile gets if it is another; peers: by
    name a way for each.
    """
    ours, *plain = functions
    given = wanted, len(grads)
    ways = forms(forward(ours), *plain), forms(backward(ours, given), *plain, grads=given)
    for i, word in enumerate(("fwd", "bwd")):
        found = ways[i] | {peer: pair[i] for peer, pair in peers.items()}
        yield case(f"{name} {word}", moved[i], (*inputs, *grads[: i * len(grads)]), found)


def forward(function: Callable) -> Way:
    """A way that calls a function of all inputs without autograd."""
    return lambda *inputs: lambda: function(*inputs)


def backward(function: Callable, grads: tuple[int, int]) -> Way:
    """The backward by itself, for the last inputs as gradients of the outputs.

    grads: how many of the first inputs have a gradient, how many of the last are gradients.
    """
    wanted, given = grads

    def way(*inputs: torch.Tensor) -> Callable[[], tuple]:
        leaves = [x.detach().requires_grad_() for x in inputs[:wanted]]
        with torch.enable_grad():
            results = as_tuple(function(*leaves, *inputs[wanted:-given]))
        return lambda: torch.autograd.grad(results, leaves, inputs[-given:], retain_graph=True)

    return way


def in_float64(way: Way) -> Callable[..., object]:
    """What a way gives in float64."""
    return lambda *inputs: way(*(x.double() if x.is_floating_point() else x for x in inputs))()


def wide(x: torch.Tensor) -> torch.Tensor:
    """At least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_tuple(results: torch.Tensor | tuple) -> tuple:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def compiled(function: Callable) -> Callable:
    """torch.compile for these very shapes, once. Its backward may run again, so it must keep its buffers."""

    @functools.cache
    def made() -> Callable:
        import torch._functorch.config

        torch._functorch.config.donated_buffer = False
        return torch.compile(function, dynamic=False)

    return lambda *args: made()(*args)


@functools.cache
def liger(function: str) -> Callable:
    """A function of Liger's, of the module of that name without _forward or _backward."""
    return getattr(importlib.import_module(f"liger_kernel.ops.{function.rpartition('_')[0]}"), function)

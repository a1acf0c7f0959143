"""What the cases of kernels_cases.py are made of: sizes, inputs, and the turns that keep them out of the L2.

All ways of a case are given copies of the same inputs, made when the way is. A forward runs without autograd.
A backward runs the graph of one forward again and again, ours as torch's; Liger's functions are called
themselves. What the host needs for it is not in the times (kernels.py), so that this is like for like.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

FAR = 512 * 2**20  # bytes that must pass before memory is used again: ten times the L2 of an H100
Run = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Sizes:
    """Llama-3-8B's, with 8,192 tokens; the scores of its attention as a few GB allow."""

    tokens: int = 8192
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    groups: int = 8
    head: int = 128
    vocab: int = 128256
    scores: tuple[tuple[int, int], ...] = ((32, 2048), (8, 8192))  # heads, length
    experts: int = 8
    topk: int = 2
    elements: int = 500_000_000
    device: str = "cuda"

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normal random numbers."""
        return torch.randn(shape, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Case:
    """One thing to do, and the ways to do it.

    A way makes what is run; `finish` of that name turns a result, untimed, into what `expected` has.
    """

    name: str
    floor: int
    ways: dict[str, Callable[[], Run]]
    expected: Callable[[], tuple[torch.Tensor, ...]]
    finish: dict[str, Callable[..., tuple]] = field(default_factory=dict)


def case(
    name: str, floor: int, inputs: Callable[[], tuple], ways: dict, expected: Callable, **finish
) -> Case:
    """A case whose ways and `expected` are functions of tensors, made once they are needed."""

    @functools.cache
    def made() -> tuple:
        torch.manual_seed(1)
        return inputs()

    def fresh() -> tuple:
        return tuple(x.detach().clone() for x in made())

    makes = {key: functools.partial(in_turns, floor, way, fresh) for key, way in ways.items()}
    return Case(name, floor, makes, lambda: expected(*made()), finish)


def in_turns(floor: int, way: Callable[..., Run], fresh: Callable[[], tuple]) -> Run:
    """Copies of inputs and results that take turns, as many as need `FAR` bytes: none is still in the L2."""
    runs = [way(*fresh()) for _ in range(math.ceil(FAR / max(floor, FAR / 16)))]
    results, turns = [None] * len(runs), itertools.cycle(range(len(runs)))

    def run() -> tuple:
        turn = next(turns)
        results[turn] = None  # its memory is what this run gets
        with torch.no_grad():
            results[turn] = runs[turn]()
        return results[turn]

    return run


def forward(function: Callable, *more) -> Callable[..., Run]:
    """A way that calls a function of all inputs (and of `more`) without autograd."""
    return lambda *inputs: lambda: as_tuple(function(*inputs, *more))


def backward(function: Callable, wanted: int, grads: int, *more) -> Callable[..., Run]:
    """A way that runs the backward alone: inputs are those with a gradient, others, and the last, `grads`."""

    def way(*inputs: torch.Tensor) -> Run:
        given, outer = inputs[:-grads], inputs[-grads:]
        leaves = [x.detach().requires_grad_() for x in given[:wanted]]
        with torch.enable_grad():
            results = as_tuple(function(*leaves, *given[wanted:], *more))
        return lambda: torch.autograd.grad(results, leaves, outer, retain_graph=True)

    return way


def exact(way: Callable[..., Run]) -> Callable[..., tuple]:
    """What a way gives in float64."""
    return lambda *inputs: way(*(x.double() if x.is_floating_point() else x for x in inputs))()


def as_tuple(results: torch.Tensor | tuple) -> tuple:
    """A tuple, also of one."""
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def compiled(function: Callable) -> Callable:
    """torch.compile for these very shapes, once. Its backward may run again, so it must keep its buffers."""

    @functools.cache
    def made() -> Callable:
        import torch._functorch.config

        torch._functorch.config.donated_buffer = False
        return torch.compile(function, dynamic=False)

    return lambda *args: made()(*args)

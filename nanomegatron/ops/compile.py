"""Ops as torch.compile and torch.export see them: opaque, with known shapes and a backward.

    eager       an autograd.Function, which calls the kernel's binding directly: the least time on the host
    compiled    a custom op of the same code, its backward another; functional, nothing is written in place

An op that in eager mode writes over its input, and torch says to whom, is out of place here: the compiler
plans memory by itself.
"""

from collections.abc import Callable

import torch


def functional(schema: str, run: Callable, fake: Callable) -> Callable:
    """The custom op `nanomegatron::...` of a schema. None among the results of `run` or `fake` becomes empty.

    run: computes; fake: returns tensors of the shapes and types that `run` would, from the same arguments.
    """

    def full(function: Callable) -> Callable:
        def call(*args):
            found = function(*args)
            if not isinstance(found, tuple):
                return found
            return tuple(args[0].new_empty(0) if t is None else t for t in found)

        return call

    name, bracket, rest = schema.partition("(")
    op = torch.library.custom_op(f"nanomegatron::{name}", full(run), mutates_args=(), schema=bracket + rest)
    op.register_fake(full(fake))
    return op


def differentiable(op: Callable, keep: Callable, backward: Callable) -> Callable:
    """Give a custom op its backward: `backward(*grads, *keep(*inputs, output))` -> a gradient an input."""

    def setup(ctx, inputs: tuple, output: tuple | torch.Tensor) -> None:
        kept = keep(*inputs, output)
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in kept))
        ctx.others = [None if isinstance(x, torch.Tensor) else x for x in kept]

    def run(ctx, *grads: torch.Tensor) -> tuple:
        kept = (x if x is not None else other for x, other in zip(ctx.saved_tensors, ctx.others))
        return backward(*grads, *kept)

    op.register_autograd(run, setup_context=setup)
    return op

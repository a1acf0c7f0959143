"""Activation recomputation: the forward drops activations, and the backward computes them again.

Tests: tests/test_recompute.py. Page: docs/parallel.md.

    granularity   what is kept                       what is recomputed, just before its own backward
    selective     all, except in named modules       core_attn: attention from q, k, v; mlp: the whole MLP
    full          the input of every N layers        these layers (uniform), or
                  the input of each of the first N   each of the first N, the others kept whole (block)

`recomputed` runs a function without autograd, saves its inputs, and in the backward runs it again with
autograd. Results are bitwise equal: hidden dropout depends only on counters, and for kernels that draw random
numbers the generator's state is restored. What only the next matmul saves, the outputs of norms and
activations (layernorm, mlp_act, moe_act), is recomputed by this matmul: `fast/discard_output.py`.
(arXiv 1604.06174; selective 2205.05198)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from nanomegatron.comm import all_gather, own_slice
from nanomegatron.mesh import Axis


class RecomputeFunction(torch.autograd.Function):
    """Compute run(*tensors); save only its inputs, sharded over `spread`."""

    @staticmethod
    def forward(ctx, run: Callable, spread: Axis, leaf: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """tensors `[...]` -> `[...]`. leaf `[0]`: makes autograd call backward even if no input needs it."""
        ctx.run = run
        ctx.spread = spread
        ctx.shapes = [x.shape for x in tensors]
        kept = tensors
        if spread.size > 1:
            kept = [own_slice(x.flatten(), spread).clone() for x in tensors]
        ctx.save_for_backward(*kept)
        ctx.random = None
        if tensors[0].is_cuda and not torch.cuda.is_current_stream_capturing():
            ctx.random = torch.cuda.get_rng_state(tensors[0].device)
        return run(*tensors)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads: list[list] = [[] for _ in ctx.shapes]
        leaf = torch.empty(0, requires_grad=True)
        with torch.enable_grad(), rng_state(grad.device, ctx.random):
            inputs = []
            needs_grad = ctx.needs_input_grad[3:]
            for x, shape, needed, found in zip(ctx.saved_tensors, ctx.shapes, needs_grad, grads, strict=True):
                x = all_gather(x.detach(), ctx.spread).view(shape)
                inputs.append(CaptureInputGrad.apply(x, leaf if needed else None, found))
            output = ctx.run(*inputs)
        torch.autograd.backward(output, grad)
        return None, None, None, *(found[0] if found else None for found in grads)


class CaptureInputGrad(torch.autograd.Function):
    """Return x `[...]` -> `[...]`; append its gradient to `grads`. (A leaf's would have the layout of x.)

    leaf `[0]`: makes autograd call backward even if x needs no gradient.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, leaf: torch.Tensor | None, grads: list) -> torch.Tensor:
        ctx.grads = grads
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.grads.append(grad)
        return None, None, None


def recomputed(
    run: Callable,
    *tensors: torch.Tensor,
    when: bool = True,
    spread: Axis = Axis.single(),  # noqa: B008 (frozen)
) -> torch.Tensor:
    """Compute run(*tensors); `when` true, save only the tensors, and let the backward run it again.

    tensors `[...]` -> `[...]`. The parameters that `run` uses get their gradients as usual. The saved tensors
    are sharded over `spread`, and all-gathered before the backward.
    """
    if not (when and torch.is_grad_enabled()):
        return run(*tensors)
    leaf = torch.empty(0, requires_grad=True)  # weights in `run` may need gradients though no input does
    return RecomputeFunction.apply(run, spread, leaf, *tensors)


@contextmanager
def rng_state(device: torch.device, state: torch.Tensor | None) -> Iterator[None]:
    """Context manager: inside, the device's CUDA RNG is in state `[n]` (None: as it is); then restored."""
    if state is None:
        yield
        return
    now = torch.cuda.get_rng_state(device)
    torch.cuda.set_rng_state(state, device)
    yield
    torch.cuda.set_rng_state(now, device)

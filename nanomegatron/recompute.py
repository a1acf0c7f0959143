"""Activation recomputation: what the backward needs is thrown away in the forward and made again.

    granularity   what is kept                       what is made again, just before its own backward
    selective     all, but of the modules named      core_attn: attention from q, k, v; mlp: the whole MLP;
                                                     layernorm, mlp_act: their outputs, from their inputs
    full          the input of every N layers        these layers (uniform), or
                  the input of each of the first N   each of the first N, the others kept whole (block)

Two mechanisms. `recomputed` runs a function without autograd, keeps its inputs, and in the backward runs it
again with autograd. `made_again` is for outputs that only the next matmul keeps: while that runs, autograd
gets a recipe in place of the tensor. The result is equal to the bit: hidden dropout depends on counters
alone, and for kernels that draw for themselves the generator's state is put back.
(arXiv 1604.06174; selective 2205.05198)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nanomegatron.comm import all_gather, own_slice
from nanomegatron.config.settings import TransformerConfig
from nanomegatron.mesh import Axis


def segments(config: TransformerConfig, num_layers: int) -> list[tuple[range, bool]]:
    """The layers of a stage in runs, and whether each run is recomputed as one."""
    if config.recompute_granularity != "full":
        return [(range(num_layers), False)]
    n = config.recompute_num_layers or 1
    if config.recompute_method == "uniform":
        return [(range(i, min(i + n, num_layers)), True) for i in range(0, num_layers, n)]
    n = min(n, num_layers)
    return [(range(i, i + 1), True) for i in range(n)] + [(range(n, num_layers), False)]


class RecomputeFunction(torch.autograd.Function):
    """run(*tensors) whose inputs alone are kept; each is cut over `spread` until the backward."""

    @staticmethod
    def forward(ctx, run: Callable, spread: Axis, _: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.spread, ctx.shapes = run, spread, [x.shape for x in tensors]
        cut = (own_slice(x.flatten(), spread).clone() if spread.size > 1 else x for x in tensors)
        ctx.save_for_backward(*cut)
        ctx.random = torch.cuda.get_rng_state(tensors[0].device) if tensors[0].is_cuda else None
        return run(*tensors)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept = zip(ctx.saved_tensors, ctx.shapes, ctx.needs_input_grad[3:], strict=True)
        grads: list[list] = [[] for _ in ctx.shapes]
        anchor = torch.empty(0, requires_grad=True)
        with torch.enable_grad(), _generator(grad.device, ctx.random):
            inputs = [
                Inlet.apply(all_gather(x.detach(), ctx.spread).view(shape), anchor if wanted else None, found)
                for (x, shape, wanted), found in zip(kept, grads, strict=True)
            ]
            output = ctx.run(*inputs)
        torch.autograd.backward(output, grad)
        return None, None, None, *(found[0] if found else None for found in grads)


class Inlet(torch.autograd.Function):
    """x itself; its gradient is left in `found` as it comes. (A leaf would lay it out like x: other bits.)"""

    @staticmethod
    def forward(ctx, x: torch.Tensor, anchor: torch.Tensor | None, found: list) -> torch.Tensor:
        ctx.found = found
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.found.append(grad)
        return None, None, None


def recomputed(run: Callable, *tensors: torch.Tensor, spread: Axis | None = None) -> torch.Tensor:
    """run(*tensors), keeping the tensors alone for the backward, over the ranks of `spread` where given.

    The parameters that `run` uses get their gradients as usual. With `spread` an all-gather of each tensor
    precedes the backward.
    """
    if not torch.is_grad_enabled():
        return run(*tensors)
    anchor = torch.empty(
        0, requires_grad=True
    )  # `run` may have weights to train where no input has a gradient
    return RecomputeFunction.apply(run, spread or Axis.single(), anchor, *tensors)


@contextmanager
def made_again(
    output: torch.Tensor, again: Callable[[], torch.Tensor], early: list[Callable] | None = None
) -> Iterator[None]:
    """While this lasts autograd does not keep `output`, or a view of all of it: `again` makes it anew.

    early: takes what does so before it is asked for, for who has the time.
    """
    place = output.data_ptr(), output.numel()  # autograd keeps `pack`, which must not keep `output`
    made: list[torch.Tensor] = []
    if early is not None and torch.is_grad_enabled():
        early.append(lambda: made.append(again()))

    def pack(x: torch.Tensor) -> Any:
        return x.shape if (x.data_ptr(), x.numel()) == place and x.is_contiguous() else x

    def unpack(kept: Any) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else (made.pop() if made else again()).view(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@contextmanager
def _generator(device: torch.device, state: torch.Tensor | None) -> Iterator[None]:
    """The device's generator in an earlier state, and afterwards where it was."""
    if state is None:
        yield
        return
    now = torch.cuda.get_rng_state(device)
    torch.cuda.set_rng_state(state, device)
    yield
    torch.cuda.set_rng_state(now, device)

"""Activation recomputation: the forward drops activations, and the backward computes them again.

    granularity   what is kept                       what is recomputed, just before its own backward
    selective     all, except in named modules       core_attn: attention from q, k, v; mlp: the whole MLP;
                                                     mlp_act: its output, from its input; layernorm likewise,
                                                     in `fast/fused_layer.py`
    full          the input of every N layers        these layers (uniform), or
                  the input of each of the first N   each of the first N, the others kept whole (block)

Two mechanisms. `recomputed` runs a function without autograd, saves its inputs, and in the backward runs it
again with autograd. A `Source` is for outputs that only the next matmul saves (of a norm, of an activation):
it is an attribute of the output that says how to compute it, and while the matmul runs (`keeping`), autograd
saves the source instead of the output. Results are bitwise equal: hidden dropout depends only on counters,
and for kernels that draw random numbers the generator's state is restored.
(arXiv 1604.06174; selective 2205.05198)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanomegatron.comm import all_gather, own_slice
from nanomegatron.mesh import Axis


@dataclass
class Source:
    """How a tensor was computed, in its attribute `source`; a layer that reads the tensor need not save it.

    make(x): computes it again; None: save the tensor. casts: its FP8 copies (`fp8.Quantized`), if its kernel
    has quantized it; the tensor itself is then a placeholder (`fast/fp8_producers.py`).
    """

    casts: Any = None
    make: Callable[[torch.Tensor], torch.Tensor] | None = None
    x: torch.Tensor | None = None

    @torch.enable_grad()  # so that FP8 copies for the backward are made, too
    def again(self) -> torch.Tensor:
        """Recompute the tensor -> `[...]`"""
        return self.make(self.x)


def source_of(x: torch.Tensor) -> Source:
    """Return the source of x `[...]`; an empty one if x has none."""
    return getattr(x, "source", None) or Source()


def with_source(y: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Let the readers of y = make(x) save x instead of y. x, y `[...]`"""
    if torch.is_grad_enabled():
        y.source = Source(source_of(y).casts, make, x.detach())


def saved_form(x: torch.Tensor) -> torch.Tensor:
    """The form in which a linear layer saves its input x `[...]` -> x `[...]`, or the bytes of an FP8 copy"""
    casts = source_of(x).casts
    return x if casts is None else casts.saved_form().data


@contextmanager
def keeping(x: torch.Tensor, prefetch: list[Callable] | None = None) -> Iterator[None]:
    """Context manager for the layer that reads x `[...]`: autograd saves the source of x instead of x.

    prefetch: appends a function that recomputes x early, to overlap the work with communication.
    """
    source = source_of(x)
    if source.make is None:
        yield
        return
    kept = saved_form(x)
    place = kept.data_ptr(), kept.numel()  # autograd holds `pack`, which must not hold x
    made: list[torch.Tensor] = []
    if prefetch is not None:
        prefetch.append(lambda: made.append(saved_form(source.again())))

    def pack(x: torch.Tensor) -> Any:
        return x.shape if (x.data_ptr(), x.numel()) == place and x.is_contiguous() else x

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        return (made.pop() if made else saved_form(source.again())).view(saved)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class RecomputeFunction(torch.autograd.Function):
    """Compute run(*tensors); save only its inputs or their sources, sharded over `spread`."""

    @staticmethod
    def forward(ctx, run: Callable, spread: Axis, leaf: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """tensors `[...]` -> `[...]`. leaf `[0]`: makes autograd call backward even if no input needs it."""
        ctx.run, ctx.spread, ctx.shapes = run, spread, [x.shape for x in tensors]
        sources = [source_of(x) for x in tensors]
        ctx.sources = [replace(source, casts=None) if source.make else source for source in sources]
        kept = [None if source.make else x for x, source in zip(tensors, sources, strict=True)]
        if spread.size > 1:
            kept = [own_slice(x.flatten(), spread).clone() for x in tensors]
        ctx.save_for_backward(*kept)
        random = tensors[0].is_cuda and not torch.cuda.is_current_stream_capturing()
        ctx.random = torch.cuda.get_rng_state(tensors[0].device) if random else None
        return run(*tensors)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads: list[list] = [[] for _ in ctx.shapes]
        leaf = torch.empty(0, requires_grad=True)
        with torch.enable_grad(), _generator(grad.device, ctx.random):
            inputs = []
            for i, (x, source) in enumerate(zip(ctx.saved_tensors, ctx.sources, strict=True)):
                if x is None:
                    x = source.again()
                    source = source_of(x)
                x = all_gather(x.detach(), ctx.spread).view(ctx.shapes[i])
                x = CaptureInputGrad.apply(x, leaf if ctx.needs_input_grad[3 + i] else None, grads[i])
                x.source = source
                inputs.append(x)
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


def recomputed(run: Callable, *tensors: torch.Tensor, spread: Axis | None = None) -> torch.Tensor:
    """Compute run(*tensors), saving only the tensors; the backward runs it again.

    tensors `[...]` -> `[...]`. The parameters that `run` uses get their gradients as usual. With `spread` the
    saved tensors are sharded over that axis, and all-gathered before the backward.
    """
    if not torch.is_grad_enabled():
        return run(*tensors)
    leaf = torch.empty(0, requires_grad=True)  # weights in `run` may need gradients though no input does
    return RecomputeFunction.apply(run, spread or Axis.single(), leaf, *tensors)


@contextmanager
def _generator(device: torch.device, state: torch.Tensor | None) -> Iterator[None]:
    """Context manager: inside, the device's CUDA RNG is in `state` (None: as it is); then it is restored."""
    if state is None:
        yield
        return
    now = torch.cuda.get_rng_state(device)
    torch.cuda.set_rng_state(state, device)
    yield
    torch.cuda.set_rng_state(now, device)

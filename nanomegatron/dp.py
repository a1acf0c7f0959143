"""Data parallelism: every replica sees other samples, their gradients are summed before the update.

    one flat fp32 buffer     [ output weight | layer n ... | layer 1 | embedding ]     reverse order of use
    param.main_grad          a view into it, where the layers add their gradients over all microbatches
    grad_sync                one all-reduce of the buffer over dp x cp, after the last microbatch

The loss is already divided by the token count of the whole global batch, so the sum over ranks is the exact
mean and nothing is averaged here. Dense gradients are summed over dp x cp: stated once, here.
(PyTorch DDP, arXiv 2006.15704; main_grad is Megatron-LM's)
"""

import functools
from collections.abc import Iterable

import torch
from torch import nn

from nanomegatron.comm import all_reduce_
from nanomegatron.mesh import Axis


def flat_views(params: Iterable[nn.Parameter], dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A zeroed flat buffer as large as all params together, and a view of it in the shape of each."""
    params = list(params)
    flat = torch.zeros(sum(p.numel() for p in params), dtype=dtype, device=params[0].device)
    pieces = flat.split([p.numel() for p in params])
    return flat, [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)]


class GradBuffer:
    """The gradients of a model in one flat fp32 buffer; gives each parameter `main_grad` and `grad_ready`."""

    def __init__(self, params: Iterable[nn.Parameter], dp_cp: Axis) -> None:
        self.params = list(params)[::-1]
        self.dp_cp = dp_cp
        self.flat, views = flat_views(self.params, torch.float32)
        self.ready: set[int] = set()
        for param, view in zip(self.params, views, strict=True):
            param.main_grad = view
            param.grad_ready = functools.partial(self.ready.add, id(param))
            if not param.spec.writes_grad:
                param.register_post_accumulate_grad_hook(_move_grad)

    def zero(self) -> None:
        """Forget all gradients: before the first microbatch of an iteration."""
        self.flat.zero_()
        self.ready.clear()

    def grad_sync(self) -> None:
        """Sum the gradients over dp x cp (one all-reduce, 4 bytes a parameter).

        Raises RuntimeError where a parameter got no gradient at all: a layer that is not used, or one that
        did not say `grad_ready`.
        """
        missing = [param.spec.name for param in self.params if id(param) not in self.ready]
        if missing:
            raise RuntimeError(f"no gradient for {', '.join(missing)}")
        all_reduce_(self.flat, self.dp_cp)


def _move_grad(param: nn.Parameter) -> None:
    """Add what autograd left in `.grad` to `main_grad`: for norms, biases and position embeddings."""
    param.main_grad.add_(param.grad)
    param.grad = None
    param.grad_ready()

"""Same result as `layers.run_mlp`; outputs of activations and norms are not kept for the backward.

Only the next matmul saves such an output, and its own input is saved anyway. So autograd saves the way to
compute it instead (`--recompute-modules` layernorm, mlp_act, moe_act):

    forward     y = act(x)     z = y W^T           saved: x, and in place of y what makes it again
    backward                   y = act(x) again    dW = dz^T y,  dy = dz W

`discard` is a context manager around whatever reads y. If y exists in FP8 only, its copies are recomputed.

Gain: Llama-3-8B with 32k tokens over four H200 takes 91.3 GiB of each at the peak, not 102.1 (cp 4, layernorm
and mlp_act; benchmarks/results/2026-11-22-cp-memory-four.json).
(As Megatron-LM's CheckpointWithoutOutput)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nanomegatron.fp8_linear import Fp8Input
from nanomegatron.layers import MLP
from nanomegatron.moe import GroupedExperts
from nanomegatron.ops.grouped_mm import Groups
from nanomegatron.param import accumulate


def saved_form(y: torch.Tensor | Fp8Input) -> torch.Tensor:
    """What a linear layer saves of its input y `[...]` -> y `[...]`, or the bytes of an FP8 copy"""
    return y.copies.saved_form().data if isinstance(y, Fp8Input) else y


@contextmanager
def discard(
    y: torch.Tensor | Fp8Input,
    make: Callable[[torch.Tensor], torch.Tensor | Fp8Input],
    x: torch.Tensor,
    prefetch: list[Callable] | None = None,
) -> Iterator[None]:
    """Context manager for what reads y = make(x): autograd saves x instead of y. x, y `[...]`

    prefetch: gets a function that makes y early, to overlap the work with communication.
    """
    if not torch.is_grad_enabled():
        yield
        return
    kept = saved_form(y)
    place = kept.data_ptr(), kept.numel()  # autograd holds `pack`, which must not hold y
    x = x.detach()
    made: list[torch.Tensor] = []

    @torch.enable_grad()  # so that FP8 copies for the backward are made, too
    def again() -> torch.Tensor:
        return saved_form(make(x))

    def pack(saved: torch.Tensor) -> Any:
        is_kept = (saved.data_ptr(), saved.numel()) == place and saved.is_contiguous()
        return saved.shape if is_kept else saved

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        return (made.pop() if made else again()).view(saved)

    if prefetch is not None:
        prefetch.append(lambda: made.append(again()))
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def discarding_mlp(mlp: MLP, x: torch.Tensor, linear_fc1: Callable, linear_fc2: Callable) -> torch.Tensor:
    """An `MLP.run` that discards the output of the activation.

    x `[s, b, h]` or `[s/tp, b, h]` -> `[s, b, h]` or `[s/tp, b, h]`
    """
    x, bias = linear_fc1(x)

    def activate(x: torch.Tensor) -> torch.Tensor:
        return mlp.activation(x, bias, accumulate)

    y = activate(x)
    with discard(y, activate, x):
        return linear_fc2(y)


def discarding_project(
    experts: GroupedExperts, x: torch.Tensor, groups: Groups, prefetch: list[Callable] | None = None
) -> torch.Tensor:
    """A `GroupedExperts.project` that discards the output of the activation. prefetch: as for `discard`.

    x `[r, 2*f/etp]` (gated) or `[r, f/etp]` -> `[r, h]`
    """
    y = experts.act(x)
    with discard(y, experts.act, x, prefetch):
        return experts.linear(y, experts.weight2, groups, transposed=True)

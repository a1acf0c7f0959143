"""Same result as `model.run_layers`, with the sums of the residual stream in the kernels of the norms.

    plain    y = attention(norm(x))        x = x + dropout(y + bias)        z = norm(x)        three passes
    fused    y = attention(normed)         z, x = add_norm(y, x, bias, dropout)                one

The output of a sublayer is not added at once: it is passed on, with its bias and dropout, as a `Branch` with
the residual stream x, to the next norm, whose kernel adds it and returns the norm and the sum. So a layer
takes the branch of the layer before, and its own last one is for the next layer; at the end of a segment it
is added. (As hidden_states, residual in vLLM; arXiv 2104.04473 fuses bias, dropout and add.)

What reads a weight here without its module waits for all gathered parameters of the layer first. Norms, and
the linear layers behind attention and MLP, are not called as modules: a layer of which a module has a hook
(debug/, a user's) runs in the plain form.

Gain: residual sum and RMSNorm of 8,192 x 4,096 take 69.4 us on an H200, in plain torch 1.34 times as long;
their backward takes 69.9 us, not 2.32 times that (benchmarks/results/2026-11-21-kernels-h200.json).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from nanomegatron.attention import Cache
from nanomegatron.batch import Batch
from nanomegatron.dp import wait_params
from nanomegatron.fast.cuda_graphs import has_hooks
from nanomegatron.fast.discard_output import discard
from nanomegatron.fp8_linear import Fp8Input, reads_only_fp8
from nanomegatron.layers import MLP, Norm
from nanomegatron.model import TransformerLayer
from nanomegatron.ops.dropout import Dropout, bias_dropout_add
from nanomegatron.ops.norm import add_norm, norm_beside
from nanomegatron.recompute import recomputed
from nanomegatron.tp import RowParallelLinear


class Branch(NamedTuple):
    """What is still to be added to the residual stream: y `[s, b, h]`, after its bias `[h]` and dropout."""

    y: torch.Tensor
    bias: torch.Tensor | None
    drop: Dropout | None

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """x + the branch. x `[s, b, h]` -> `[s, b, h]`"""
        return bias_dropout_add(self.y, self.bias, x, self.drop)


def fused_norm(
    norm: nn.Module, reader: nn.Module | None, x: torch.Tensor, branch: Branch | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x plus the branch, and this sum. x `[s, b, h]` -> `[s, b, h]`, `[s, b, h]`

    reader: the linear layer that reads the norm, if only one does; `fast/fp8_producers.py` quantizes for it.
    """
    fused = isinstance(norm, Norm) and norm.fused
    if branch is not None and fused:
        y, bias, drop = branch
        return add_norm(y, x, norm.weight, norm.bias, norm.eps, norm.from_one, bias, drop)
    if branch is not None:
        x = branch.add(x)
    if fused:
        return norm_beside(x, norm.weight, norm.bias, norm.eps, norm.from_one)
    return norm(x), x


@dataclass(frozen=True)
class FusedLayers:
    """A `GPTModel.run_layers`. norm: `fused_norm`, or what does the same.

    recompute: norms are not kept for the backward. run_layer: what takes the place of `layer`, as CUDA graphs
    of layers do (`fast/layer_graphs.py`). parts: of each layer, its modules and parameters.
    """

    norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = fused_norm
    recompute: bool = False
    run_layer: Callable[..., tuple[torch.Tensor, Branch | None]] | None = None
    parts: dict[nn.Module, tuple[list[nn.Module], list[nn.Parameter]]] = field(default_factory=dict)

    def __call__(
        self,
        layers: Sequence[TransformerLayer],
        x: torch.Tensor,
        batch: Batch,
        rotary: dict[str | None, tuple | None],
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """x `[s, b, h]` -> `[s, b, h]`, as `model.run_layers`"""
        run_layer = self.run_layer or self.layer
        branch = None
        for layer in layers:
            x, branch = run_layer(layer, x, branch, batch, rotary[layer.rotary_kind], cache)
        return x if branch is None else branch.add(x)

    def layer(
        self,
        layer: TransformerLayer,
        x: torch.Tensor,
        branch: Branch | None,
        batch: Batch,
        rotary: tuple | None,
        cache: Cache | None = None,
    ) -> tuple[torch.Tensor, Branch | None]:
        """Run a layer -> x `[s, b, h]` with `branch` and attention's added, and the branch of the MLP"""
        if layer not in self.parts:
            self.parts[layer] = list(layer.modules()), list(layer.parameters())
        modules, params = self.parts[layer]
        if any(map(has_hooks, modules)):
            x = x if branch is None else branch.add(x)
            return layer(x, batch, rotary, cache), None
        wait_params(params)

        attention = layer.self_attention
        mlp = layer.mlp
        dense = isinstance(mlp, MLP)
        adds_bias = not leaves_bias(layer)

        norm = layer.input_layernorm
        normed, x = self.norm(norm, attention.linear_qkv, x, branch)
        with self.discarding(norm, attention.linear_qkv, normed, x):
            packed = attention.linear_qkv(normed)
        linear_proj, bias = last_linear(attention.linear_proj, adds_bias)
        y = linear_proj(attention.attend(packed, batch, rotary, cache))
        branch = self.branch(layer, layer.post_attention_layernorm(y), bias, batch, 0)

        norm = layer.pre_mlp_layernorm
        reader = mlp.linear_fc1 if dense and not mlp.recompute else None
        normed, x = self.norm(norm, reader, x, branch)
        discarding = partial(self.discarding, norm, reader, normed, x)
        if dense:
            linear_fc2, bias = last_linear(mlp.linear_fc2, adds_bias)
            y = fused_mlp(mlp, normed, linear_fc2, discarding)
        else:
            bias = None
            with discarding():
                y = mlp(normed, batch)
        return x, self.branch(layer, layer.post_mlp_layernorm(y), bias, batch, 1)

    def discarding(
        self,
        norm: nn.Module,
        reader: nn.Module | None,
        normed: torch.Tensor | Fp8Input,
        total: torch.Tensor,
        always: bool = False,
    ) -> AbstractContextManager[None]:
        """For what reads normed, the norm of total `[s, b, h]`: with `recompute` or `always` it is not kept.

        normed `[s, b, h]`
        """
        if not isinstance(norm, Norm) or not (self.recompute or always):
            return nullcontext()
        return discard(normed, lambda x: self.norm(norm, reader, x, None)[0], total)

    def branch(
        self, layer: TransformerLayer, y: torch.Tensor, bias: torch.Tensor | None, batch: Batch, which: int
    ) -> Branch:
        """The branch of attention (0) or MLP (1), whose output is y `[s, b, h]` plus bias `[h]`."""
        dropout = layer.dropout
        if not dropout.fused:
            return Branch(dropout(y, batch, which), bias, None)
        if dropout.multiplier != 1:
            y = y * dropout.multiplier
        return Branch(y, bias, dropout.mask(batch, which))


def leaves_bias(layer: TransformerLayer) -> bool:
    """Whether biases are left to the sum: nothing comes between the linear layer and its dropout."""
    dropout = layer.dropout
    return dropout.fused and dropout.multiplier == 1 and isinstance(layer.post_mlp_layernorm, nn.Identity)


def last_linear(linear: RowParallelLinear, adds_bias: bool) -> tuple[Callable, torch.Tensor | None]:
    """The layer behind attention or MLP, and None; or the layer without its bias, and this bias `[h]`."""
    if adds_bias:
        return linear, None
    return lambda x: linear.linear(x, linear.weight, linear.tp, linear.comm), linear.bias


def fused_mlp(
    mlp: MLP,
    x: torch.Tensor | Fp8Input,
    linear_fc2: Callable[..., torch.Tensor],
    discarding: Callable[..., AbstractContextManager[None]],
) -> torch.Tensor:
    """mlp(x), the last layer by `linear_fc2`.

    x `[s, b, h]` or `[s/tp, b, h]` -> `[s, b, h]` or `[s/tp, b, h]`
    discarding: for what reads x (`FusedLayers.discarding`).
    """

    def linear_fc1(x: torch.Tensor | Fp8Input) -> tuple[torch.Tensor, torch.Tensor | None]:
        with discarding():
            return mlp.linear_fc1(x)

    if not mlp.recompute:
        return mlp.run(mlp, x, linear_fc1, linear_fc2)
    run = partial(mlp.run, mlp, linear_fc1=mlp.linear_fc1, linear_fc2=linear_fc2)
    with discarding(always=reads_only_fp8(mlp.linear_fc1)):  # which would read FP8, but x is kept in 16 bits
        return recomputed(run, x)

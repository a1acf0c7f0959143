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
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from nanomegatron.attention import Cache
from nanomegatron.batch import Batch
from nanomegatron.dp import wait_params
from nanomegatron.fast.cuda_graphs import has_hooks
from nanomegatron.layers import MLP, Norm
from nanomegatron.model import TransformerLayer
from nanomegatron.ops.dropout import Dropout, bias_dropout_add
from nanomegatron.ops.norm import add_norm, norm_beside
from nanomegatron.recompute import keeping, recomputed, source_of, with_source
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

        normed, x = self.normed(layer.input_layernorm, attention.linear_qkv, x, branch)
        context = attention.attend(normed, batch, rotary, cache)
        y, bias = project(attention.linear_proj, context, adds_bias)
        branch = self.branch(layer, layer.post_attention_layernorm(y), bias, batch, 0)

        reader = mlp.linear_fc1 if dense else None
        normed, x = self.normed(layer.pre_mlp_layernorm, reader, x, branch, becomes_input=mlp.recompute)
        y, bias = run_mlp(mlp, normed, adds_bias) if dense else (mlp(normed, batch), None)
        return x, self.branch(layer, layer.post_mlp_layernorm(y), bias, batch, 1)

    def normed(
        self,
        norm: nn.Module,
        reader: nn.Module | None,
        x: torch.Tensor,
        branch: Branch | None,
        becomes_input: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x plus the branch, and the sum. x `[s, b, h]` -> `[s, b, h]`, `[s, b, h]`

        The norm may be recomputed by its reader. becomes_input: it is the input of a function that is
        recomputed, which a placeholder cannot be.
        """
        y, total = self.norm(norm, reader, x, branch)
        again = self.recompute or (becomes_input and source_of(y).casts is not None)
        if again and isinstance(norm, Norm):
            with_source(y, lambda x: self.norm(norm, reader, x, None)[0], total)
        return y, total

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


def project(
    linear: RowParallelLinear, x: torch.Tensor, adds_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """linear(x), or without its bias, and the bias. x `[s, b, i/tp]` -> `[s, b, o]` or `[s/tp, b, o]`"""
    if adds_bias:
        return linear(x), None
    return linear.linear(x, linear.weight, linear.tp, linear.comm), linear.bias


def run_mlp(mlp: MLP, x: torch.Tensor, adds_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """mlp(x), or without the last bias, and this bias. x `[s, b, h]` -> `[s, b, h]` or `[s/tp, b, h]`"""
    if adds_bias:
        return mlp(x), None

    def run(x: torch.Tensor) -> torch.Tensor:
        y = mlp.hidden(x)
        with keeping(y):
            return project(mlp.linear_fc2, y, adds_bias=False)[0]

    return recomputed(run, x) if mlp.recompute else run(x), mlp.linear_fc2.bias

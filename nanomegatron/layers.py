"""The layers of a transformer besides attention: Norm, MLP, embedding, output layer.

Tests: tests/test_model.py. Page: docs/architecture.md.

    tokens [b, s] -> Embedding -> x [s, b, h] -> (Norm -> attention, Norm -> MLP) x n -> Norm -> OutputLayer

A layer's other forms are functions of the layer and its input. The `pick_` files set them in place of the
core's:

    MLP.run                        run_mlp                          FP8 operands made by the activation
    OutputLayer.linear             LinearFunction                   FP8, tiles that overlap with tp
    OutputLayer.compute_logits     output_logits                    variants/logit_softcaps.py
    OutputLayer.loss               logits_then_loss                 fast/fused_loss.py: both in pieces
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from nanomegatron.batch import Batch
from nanomegatron.config.model import TransformerConfig
from nanomegatron.mesh import Axis
from nanomegatron.ops.dropout import Dropout, apply_dropout
from nanomegatron.ops.norm import norm
from nanomegatron.ops.swiglu import activation
from nanomegatron.param import Init, accumulate, replicated, scaled_std, slot
from nanomegatron.recompute import recomputed
from nanomegatron.tp import (
    ColumnParallelLinear,
    LinearFunction,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)


def hidden_dropout(p: float, batch: Batch, site: int) -> Dropout | None:
    """The dropout of the residual stream at one place, with one mask under any layout; None: there is none.

    site: the number of this dropout in the model, from 0 (the embedding's).
    """
    if p == 0.0 or batch.dropout_seed is None:
        return None
    return Dropout(p, batch.dropout_seed, site, batch.residual_positions, batch.sample_ids)


class BranchDropout:
    """What the output of a layer's attention (0) or MLP (1) goes through before it is added to its input.

    A factor, --residual-multiplier, and dropout. y `[s, b, h]` -> `[s, b, h]`
    """

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        self.p = config.hidden_dropout
        self.multiplier = config.residual_multiplier
        self.layer = layer
        self.fused = config.bias_dropout_fusion

    def mask(self, batch: Batch, branch: int) -> Dropout | None:
        """The dropout of this branch, or None."""
        return hidden_dropout(self.p, batch, 2 * self.layer + 1 + branch)

    def __call__(self, y: torch.Tensor, batch: Batch, branch: int) -> torch.Tensor:
        if self.multiplier != 1:
            y = y * self.multiplier
        return apply_dropout(y, self.mask(batch, branch), self.fused)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim, replicated over `axis`. x `[..., h]` -> `[..., h]`

    partial_grad: the ranks of `axis` normalize different heads or slices of the sequence, so that each has a
    part of the gradient.
    """

    def __init__(
        self, config: TransformerConfig, size: int, axis: Axis, init: Init, partial_grad: bool = False
    ) -> None:
        super().__init__()
        self.eps = config.norm_epsilon
        self.from_one = config.apply_layernorm_1p
        self.fused = config.persist_layer_norm
        self.weight = replicated(init.at("weight"), (size,), axis, partial_grad, fill=1 - self.from_one)
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = replicated(init.at("bias"), (size,), axis, partial_grad, fill=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return norm(x, self.weight, self.bias, self.eps, self.from_one, self.fused)


def run_mlp(mlp: "MLP", x: torch.Tensor, linear_fc1: Callable, linear_fc2: Callable) -> torch.Tensor:
    """Linear layer, activation, linear layer.

    x `[s, b, h]` or `[s/tp, b, h]` -> `[s, b, h]` or `[s/tp, b, h]`
    linear_fc1, linear_fc2: those of the MLP, or what calls them otherwise.
    """
    x, bias = linear_fc1(x)
    return linear_fc2(mlp.activation(x, bias, accumulate))


class MLP(nn.Module):
    """Two-layer MLP, inner features sharded over tp. x `[s, b, h]` -> `[s, b, h]`; s/tp if s is sharded."""

    run: Callable[..., torch.Tensor] = slot(run_mlp)

    def __init__(
        self, config: TransformerConfig, tp: Axis, init: Init, ffn: int, recompute: bool = False
    ) -> None:
        """ffn: the number of inner features. recompute: all of it in the backward."""
        super().__init__()
        h = config.hidden_size
        inner = {"gate": ffn, "up": ffn} if config.gated else ffn
        bias = not config.disable_bias_linear
        self.config = config
        self.activation = activation(config)
        self.recompute = recompute
        self.linear_fc1 = ColumnParallelLinear(
            h,
            inner,
            tp,
            init.at("linear_fc1"),
            bias=bias,
            skip_bias_add=True,
            sequence_parallel=config.sequence_parallel,
        )
        self.linear_fc2 = RowParallelLinear(
            ffn,
            h,
            tp,
            init.at("linear_fc2", scaled_std(config.init_method_std, config.num_layers)),
            bias=bias,
            sequence_parallel=config.sequence_parallel,
        )

    def forward(self, x: torch.Tensor, batch: Batch | None = None) -> torch.Tensor:
        run = partial(self.run, self, linear_fc1=self.linear_fc1, linear_fc2=self.linear_fc2)
        return recomputed(run, x, when=self.recompute)


class Embedding(nn.Module):
    """Word and learned position embeddings. tokens `[b, s]` -> `[s, b, h]` or this rank's `[s/tp, b, h]`"""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        padded_vocab_size: int,
        max_sequence_length: int,
        weight: nn.Parameter,
        tp: Axis,
        init: Init,
    ) -> None:
        """weight: of the word embeddings."""
        super().__init__()
        self.p = config.hidden_dropout
        self.fused = config.bias_dropout_fusion
        # Rounded to the weights' type, as transformers does.
        self.multiplier = float(torch.tensor(config.embedding_multiplier, dtype=weight.dtype))
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            padded_vocab_size,
            config.hidden_size,
            tp,
            sequence_parallel=config.sequence_parallel,
            weight=weight,
        )
        self.position_embeddings = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = replicated(
                init.at("position_embeddings.weight"),
                (max_sequence_length, config.hidden_size),
                tp,
                partial_grad=config.sequence_parallel,
            )

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.word_embeddings(
            batch.tokens, self.multiplier, self.position_embeddings, batch.embedded_positions
        )
        return apply_dropout(x, hidden_dropout(self.p, batch, 0), self.fused)


def output_logits(layer: "OutputLayer", x: torch.Tensor) -> torch.Tensor:
    """x `[s, b, h]` or `[s/tp, b, h]` -> `[s, b, V/tp]`; communicates as a ColumnParallelLinear."""
    return layer.linear(x, layer.weight, layer.tp, "gather" if layer.sequence_sharded else "copy")


def logits_then_loss(
    layer: "OutputLayer", x: torch.Tensor, labels: torch.Tensor, loss_weights: torch.Tensor | None
) -> torch.Tensor:
    """Compute whole logits, then the loss of each token; loss_weights are for forms that fuse the two.

    x `[s, b, h]` or `[s/tp, b, h]`, labels, loss_weights `[b, s]` -> `[b, s]`; all-gathers over tp.
    """
    logits = layer.compute_logits(layer, x)
    return vocab_parallel_cross_entropy(logits, labels, layer.tp, layer.vocab_size)


class OutputLayer(nn.Module):
    """The projection to the vocabulary, tied to the embedding or with its own weight, and the loss."""

    linear: Callable[..., torch.Tensor] = slot(LinearFunction.apply)
    compute_logits: Callable[..., torch.Tensor] = slot(output_logits)
    loss: Callable[..., torch.Tensor] = slot(logits_then_loss)
    has_variants = False  # as of SelfAttention
    fp8: Any = None  # as of a ColumnParallelLinear

    def __init__(self, config: TransformerConfig, vocab_size: int, weight: nn.Parameter, tp: Axis) -> None:
        """weight: `[V/tp, h]`, V padded: rows from `vocab_size` on are padding; the loss ignores them."""
        super().__init__()
        self.vocab_size = vocab_size
        self.weight = weight
        self.tp = tp
        self.config = config

    @property
    def sequence_sharded(self) -> bool:
        """Whether x is this rank's `[s/tp, b, h]`."""
        return self.config.sequence_parallel and self.training

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None, loss_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """x `[s, b, h]` or `[s/tp, b, h]` -> logits `[s, b, V/tp]` or, with labels, the loss `[b, s]`

        labels, loss_weights `[b, s]`: as in `Batch`. Raises RuntimeError without `pick_variants`, if a
        flag asks for a variant.
        """
        self.config.check_variants("output layer", self.has_variants)
        if self.config.logits_scaling != 1:
            x = x / self.config.logits_scaling
        if labels is None:
            return self.compute_logits(self, x)
        return self.loss(self, x, labels, loss_weights)

"""The two ends of the model and what goes in: what a first and a last pipeline stage have beside layers.

    tokens [b, s] -> Embedding -> x [s, b, h] -> layers -> Norm -> OutputLayer -> loss [b, s] or logits

Which of it one GPTModel has, and which layers, is its `Stage`. The weight of a tied embedding is the output
weight too: one parameter where both ends are on one rank, else two copies, drawn alike, whose gradients are
summed over the two ranks.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from nanomegatron.comm import own_slice
from nanomegatron.config.settings import TransformerConfig
from nanomegatron.cp_shard import Shard
from nanomegatron.fast.fused_loss import fused_linear_cross_entropy, vocab_parallel_cross_entropy
from nanomegatron.mesh import Axis
from nanomegatron.ops.dropout import dropout
from nanomegatron.param import Init, ParamSpec, new_parameter, replica
from nanomegatron.router import MoeAxes
from nanomegatron.tp import VocabParallelEmbedding, vocab_parallel_logits


@dataclass(frozen=True)
class Tokens:
    """What the model reads: the tokens and where they stand.

    `tokens` `[b, s]`, `positions` `[s]` in the sample; `sample_ids` `[b]` number the samples in the global
    data order, and with `dropout_seed` determine the dropout masks (None: no dropout). `position_ids`
    `[b, s]` are given where they start over with each document; `cu_seqlens`, `max_seqlen` (ops/attention.py)
    where attention ends with it, of all tokens: padding is a document, too, at positions below 0.
    `loss_weights` `[b, s]` are the gradients that the losses will get, for --cross-entropy-loss-fusion;
    `aux_scale`, 0-d, is the gradient of the losses that even the load of experts, sums over tokens (None:
    there are none). The model itself fills in `residual_positions`, `[s/tp]`. With a `shard` all this but
    cu_seqlens is of the s/cp tokens that this rank has of a row.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    sample_ids: torch.Tensor | None = None
    dropout_seed: int | None = None
    position_ids: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None
    loss_weights: torch.Tensor | None = None
    shard: Shard | None = None
    aux_scale: torch.Tensor | None = None
    residual_positions: torch.Tensor | None = None

    @property
    def embedded_positions(self) -> torch.Tensor:
        """The positions that learned embeddings are of, `[s]` or `[b, s]`."""
        return self.positions if self.position_ids is None else self.position_ids

    @property
    def rotary_positions(self) -> torch.Tensor:
        """Those that queries and keys turn by: across documents it is the real distance that counts."""
        return self.positions if self.cu_seqlens is None else self.embedded_positions


@dataclass(frozen=True)
class Stage:
    """Which part of a model a GPTModel is; all of it by default.

    embed: the ranks that have the first and the last stage. word_embeddings: the weight of the embedding
    where another GPTModel of this rank has it. experts: the axes that mixtures of experts use.
    """

    layers: range | None = None
    pre_process: bool = True  # the embedding comes before the layers
    post_process: bool = True  # norm, output layer and loss come behind them
    embed: Axis | None = None
    word_embeddings: nn.Parameter | None = None
    experts: MoeAxes = MoeAxes()


def hidden_dropout(x: torch.Tensor, p: float, batch: Tokens, site: int) -> torch.Tensor:
    """Dropout of the residual stream, the same under any layout; `site` numbers the places from 0."""
    if p == 0.0 or batch.dropout_seed is None:
        return x
    return dropout(x, p, batch.dropout_seed, site, batch.residual_positions, batch.sample_ids)


class Embedding(nn.Module):
    """Word and learned position embeddings: tokens `[b, s]` -> `[s, b, h]`, or this rank's `[s/tp, b, h]`."""

    def __init__(
        self,
        config: TransformerConfig,
        sizes: tuple[int, int, int],
        weight: nn.Parameter,
        tp: Axis,
        init: Init,
    ) -> None:
        """sizes: vocabulary, padded vocabulary, positions; weight: of the words."""
        super().__init__()
        vocab_size, padded_size, positions = sizes
        h, cut = config.hidden_size, config.sequence_parallel
        self.p, self.tp, self.sequence_parallel = config.hidden_dropout, tp, cut
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, padded_size, h, tp, sequence_parallel=cut, weight=weight
        )
        self.position_embeddings = None
        if config.position_embedding_type == "learned_absolute":
            part = replica(f"{init.name}.position_embeddings.weight", (positions, h), tp, partial=cut)
            self.position_embeddings = new_parameter(ParamSpec((part,), (positions, h)), init)

    def forward(self, batch: Tokens) -> torch.Tensor:
        x = self.word_embeddings(batch.tokens)
        if self.position_embeddings is not None:
            places = batch.embedded_positions
            places = places[:, None] if places.dim() == 1 else places.t()
            if self.sequence_parallel and self.training:
                places = own_slice(places, self.tp)
            x = x + F.embedding(places, self.position_embeddings)
        return hidden_dropout(x, self.p, batch, 0)


class OutputLayer(nn.Module):
    """The projection to the vocabulary, tied to the embedding or with its own weight, and the loss."""

    def __init__(self, config: TransformerConfig, vocab_size: int, weight: nn.Parameter, tp: Axis) -> None:
        """weight: `[V/tp, h]`, columns past `vocab_size` are padding."""
        super().__init__()
        self.vocab_size, self.weight, self.tp = vocab_size, weight, tp
        self.fused, self.sequence_parallel = config.cross_entropy_loss_fusion, config.sequence_parallel

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None, loss_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Loss `[b, s]` for labels, or logits `[s, b, V/tp]`."""
        cut = self.sequence_parallel and self.training
        if labels is not None and self.fused:
            return fused_linear_cross_entropy(
                x, self.weight, labels, loss_weights, self.tp, self.vocab_size, cut
            )
        logits = vocab_parallel_logits(x, self.weight, self.tp, cut)
        if labels is None:
            return logits
        return vocab_parallel_cross_entropy(logits, labels, self.tp, self.vocab_size)

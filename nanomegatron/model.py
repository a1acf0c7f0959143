"""The transformer, one class a box of the usual drawing; families differ by configuration alone.

        tokens [b, s]
           |
       Embedding         word (+ learned position), dropout                  -> [s, b, h]
           |
       TransformerLayer  x num_layers
           |  x + dropout(SelfAttention(Norm(x)))     QKV -> (q, k norm) -> rotary -> core attention -> proj
           |  x + dropout(MLP(Norm(x)))               fc1 -> SwiGLU or GELU -> fc2
           |
       Norm
           |
       output layer      tied to the embedding or its own                    -> logits [s, b, V/tp]
           |
       vocab-parallel cross entropy against labels [b, s]                    -> loss of each token [b, s]

Activations are [s, b, h], the sequence first. With tensor parallelism every rank has the whole activations
and its share of the heads, features and vocabulary. Every weight has a global name,
`decoder.layers.3.mlp...`, which with the seed determines its initial value.
(Pre-norm decoder: GPT-2; Llama, arXiv 2302.13971)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanomegatron import ops
from nanomegatron.attention import Mask, choose_backend, core_attention
from nanomegatron.comm import copy_to
from nanomegatron.config import TransformerConfig
from nanomegatron.config import padded_vocab_size as default_padding
from nanomegatron.config_keywords import GPT_MODEL, answer
from nanomegatron.mesh import Axis
from nanomegatron.ops_rope import rope, rope_angles
from nanomegatron.param import Init, ParamSpec, new_parameter, replica, scaled_std
from nanomegatron.tp import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
    vocab_parallel_logits,
    vocab_spec,
)


@dataclass(frozen=True)
class Tokens:
    """What the model reads: the tokens and where they stand.

    `tokens` `[b, s]`, `positions` `[s]` in the sample; `sample_ids` `[b]` number the samples in the global
    data order, and with `dropout_seed` determine the dropout masks (None: no dropout). `position_ids`
    `[b, s]` are told where they start over with each document; `cu_seqlens`, `max_seqlen` (see attention.py)
    where attention ends with it.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    sample_ids: torch.Tensor | None = None
    dropout_seed: int | None = None
    position_ids: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None

    @property
    def embedded_positions(self) -> torch.Tensor:
        """The positions that the model sees, `[s]` or `[b, s]`."""
        return self.positions if self.position_ids is None else self.position_ids


Cache = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim; the weight is the same on every rank of `axis`."""

    def __init__(self, config: TransformerConfig, size: int, name: str, axis: Axis, init: Init) -> None:
        super().__init__()
        self.eps, self.from_one = config.norm_epsilon, config.apply_layernorm_1p
        self.weight = self._parameter(f"{name}.weight", size, axis, init, 0.0 if self.from_one else 1.0)
        with_bias = config.normalization == "LayerNorm"
        self.bias = self._parameter(f"{name}.bias", size, axis, init, 0.0) if with_bias else None

    @staticmethod
    def _parameter(name: str, size: int, axis: Axis, init: Init, value: float) -> nn.Parameter:
        spec = ParamSpec((replica(name, (size,), axis),), (size,), decay=False)
        return new_parameter(spec, init, fill=value)

    def forward(self, x: torch.Tensor, spread: Axis | None = None) -> torch.Tensor:
        """Normalize x `[..., size]`.

        spread: an axis whose ranks normalize different parts of the data (heads). Each then sees its part of
        the weight's gradient, and these are summed.
        """
        weight, bias = self.weight, self.bias
        if spread is not None:
            weight, bias = copy_to(weight, spread), bias if bias is None else copy_to(bias, spread)
        if self.from_one:
            weight = weight + 1
        if bias is None:
            return ops.rms_norm(x, weight, self.eps)
        return ops.layer_norm(x, weight, bias, self.eps)


class SelfAttention(nn.Module):
    """Causal self attention with grouped queries: `[s, b, h] -> [s, b, h]`, heads cut over tp."""

    def __init__(self, config: TransformerConfig, layer: int, tp: Axis, init: Init) -> None:
        super().__init__()
        name = f"decoder.layers.{layer}.self_attention"
        if config.num_kv_heads % tp.size:
            raise ValueError(f"{config.num_kv_heads} key/value heads do not divide by tp {tp.size}")
        self.layer, self.tp, self.head_dim = layer, tp, config.head_dim
        self.window, self.interleaved = config.windows[layer], config.rotary_interleaved
        self.dropout = config.attention_dropout
        heads, groups = config.num_attention_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            {"q": heads, "k": groups, "v": groups},
            tp,
            f"{name}.linear_qkv",
            init,
            config.init_method_std,
            bias=config.add_qkv_bias or not config.disable_bias_linear,
        )
        self.linear_proj = RowParallelLinear(
            heads,
            config.hidden_size,
            tp,
            f"{name}.linear_proj",
            init,
            scaled_std(config.init_method_std, config.num_layers),
            bias=not config.disable_bias_linear,
        )
        self.widths = [heads // tp.size, groups // tp.size, groups // tp.size]
        self.q_norm = self.k_norm = None
        if config.qk_layernorm:
            self.q_norm = Norm(config, config.head_dim, f"{name}.q_layernorm", tp, init)
            self.k_norm = Norm(config, config.head_dim, f"{name}.k_layernorm", tp, init)
        self.backend = choose_backend(
            config.attention_backend, init.device, init.dtype, config.attention_dropout
        )

    def forward(
        self, x: torch.Tensor, batch: Tokens, rotary: tuple | None, cache: Cache | None = None
    ) -> torch.Tensor:
        """rotary: cos and sin of the positions of x; cache: keeps this layer's keys and values."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)) for part in self.linear_qkv(x).split(self.widths, -1)
        )
        if self.q_norm is not None:
            q, k = self.q_norm(q, spread=self.tp), self.k_norm(k, spread=self.tp)
        if rotary is not None:
            q, k = rope(q, *rotary, self.interleaved), rope(k, *rotary, self.interleaved)
        if cache is not None:
            k, v = cache(self.layer, k, v)
        dropout, drop = 0.0, None
        if self.dropout and batch.dropout_seed is not None:
            local = q.shape[2]
            heads = torch.arange(self.tp.rank * local, (self.tp.rank + 1) * local, device=x.device)
            place = (batch.dropout_seed, -1 - self.layer, batch.positions, batch.sample_ids, heads)
            dropout, drop = self.dropout, lambda probs: ops.attention_dropout(probs, self.dropout, *place)
        mask = Mask(True, self.window, batch.cu_seqlens, batch.max_seqlen)
        context, _ = core_attention(q, k, v, self.backend, mask, dropout, drop)
        return self.linear_proj(context)


class MLP(nn.Module):
    """The two-layer feed-forward network: `[s, b, h] -> [s, b, h]`, inner features cut over tp."""

    def __init__(self, config: TransformerConfig, layer: int, tp: Axis, init: Init) -> None:
        super().__init__()
        name = f"decoder.layers.{layer}.mlp"
        ffn, bias = config.ffn_size, not config.disable_bias_linear
        inner = {"gate": ffn, "up": ffn} if config.swiglu else ffn
        std = config.init_method_std
        self.activation = (
            ops.swiglu if config.swiglu else ops.squared_relu if config.squared_relu else ops.gelu
        )
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size, inner, tp, f"{name}.linear_fc1", init, std, bias
        )
        std = scaled_std(std, config.num_layers)
        self.linear_fc2 = RowParallelLinear(
            ffn, config.hidden_size, tp, f"{name}.linear_fc2", init, std, bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x)))


class TransformerLayer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual: `[s, b, h] -> [s, b, h]`."""

    def __init__(self, config: TransformerConfig, layer: int, tp: Axis, init: Init) -> None:
        super().__init__()
        name, h = f"decoder.layers.{layer}", config.hidden_size
        self.layer, self.p = layer, config.hidden_dropout
        self.input_layernorm = Norm(config, h, f"{name}.input_layernorm", tp, init)
        self.self_attention = SelfAttention(config, layer, tp, init)
        self.pre_mlp_layernorm = Norm(config, h, f"{name}.pre_mlp_layernorm", tp, init)
        self.mlp = MLP(config, layer, tp, init)

    def forward(
        self, x: torch.Tensor, batch: Tokens, rotary: tuple | None, cache: Cache | None = None
    ) -> torch.Tensor:
        attention = self.self_attention(self.input_layernorm(x), batch, rotary, cache)
        x = x + hidden_dropout(attention, self.p, batch, 2 * self.layer + 1)
        mlp = self.mlp(self.pre_mlp_layernorm(x))
        return x + hidden_dropout(mlp, self.p, batch, 2 * self.layer + 2)


def hidden_dropout(x: torch.Tensor, p: float, batch: Tokens, site: int) -> torch.Tensor:
    """Dropout of x `[s, b, h]`, the same under any layout; `site` numbers the places in the model from 0."""
    if p == 0.0 or batch.dropout_seed is None:
        return x
    return ops.dropout(x, p, batch.dropout_seed, site, batch.positions, batch.sample_ids)


class Embedding(nn.Module):
    """Word and learned position embeddings: tokens `[b, s]` -> `[s, b, h]`."""

    def __init__(self, config: TransformerConfig, sizes: tuple[int, int, int], tp: Axis, init: Init) -> None:
        """sizes: vocabulary, padded vocabulary, positions."""
        super().__init__()
        vocab_size, padded_size, positions = sizes
        h, std = config.hidden_size, config.init_method_std
        self.p = config.hidden_dropout
        self.word_embeddings = VocabParallelEmbedding(vocab_size, padded_size, h, tp, init=init, std=std)
        self.position_embeddings = None
        if config.position_embedding_type == "learned_absolute":
            part = replica("embedding.position_embeddings.weight", (positions, h), tp)
            self.position_embeddings = new_parameter(ParamSpec((part,), (positions, h)), init, std)

    def forward(self, batch: Tokens) -> torch.Tensor:
        x = self.word_embeddings(batch.tokens)
        if self.position_embeddings is not None:
            places = batch.embedded_positions
            places = places[:, None] if places.dim() == 1 else places.t()
            x = x + F.embedding(places, self.position_embeddings)
        return hidden_dropout(x, self.p, batch, 0)


class GPTModel(nn.Module):
    """The whole decoder. With labels the loss of each token, without them this rank's logits."""

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: None = None,
        *,
        vocab_size: int,
        max_sequence_length: int,
        padded_vocab_size: int | None = None,
        tp: Axis | None = None,
        init: Init = Init(),  # noqa: B008 (frozen)
        **megatron: Any,
    ) -> None:
        """vocab_size: the tokens that exist; padded_vocab_size, a multiple of tp: the rows of the weights.

        Other keywords of Megatron's GPTModel are taken, or answered with a TypeError; so is a layer spec.
        """
        super().__init__()
        if transformer_layer_spec is not None:
            megatron["transformer_layer_spec"] = transformer_layer_spec
        answer("GPTModel", GPT_MODEL, (), megatron)
        self.config, self.vocab_size = config, vocab_size
        self.tp = tp = tp or Axis.single("tp")
        padded_vocab_size = padded_vocab_size or default_padding(vocab_size, 128, tp.size)
        sizes = (vocab_size, padded_vocab_size, max_sequence_length)
        self.embedding = Embedding(config, sizes, tp, init)
        self.layers = nn.ModuleList(TransformerLayer(config, i, tp, init) for i in range(config.num_layers))
        self.final_layernorm = Norm(config, config.hidden_size, "decoder.final_layernorm", tp, init)
        self.output_weight = self.embedding.word_embeddings.weight
        if config.untie_embeddings_and_output_weights:
            spec = vocab_spec("output_layer.weight", *sizes[:2], config.hidden_size, tp)
            self.output_weight = new_parameter(spec, init, config.init_method_std)

    def forward(
        self, batch: Tokens, labels: torch.Tensor | None = None, cache: Cache | None = None
    ) -> torch.Tensor:
        """labels `[b, s]` -> loss `[b, s]` fp32, the same on all tp ranks; none -> logits `[s, b, V/tp]`."""
        rotary = None
        if self.config.position_embedding_type in ("rope", "yarn"):
            rotary = rope_angles(batch.embedded_positions, self.config)
        x = self.embedding(batch)
        for layer in self.layers:
            x = layer(x, batch, rotary, cache)
        logits = vocab_parallel_logits(self.final_layernorm(x), self.output_weight, self.tp)
        if labels is None:
            return logits
        return vocab_parallel_cross_entropy(logits, labels, self.tp, self.vocab_size)

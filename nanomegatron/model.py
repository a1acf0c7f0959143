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

Activations are [s, b, h], the sequence first. With tensor parallelism every rank has its share of the heads,
features and vocabulary, and the whole residual stream or, with sequence parallelism, [s/tp, b, h] of it.
Every weight has a global name, `decoder.layers.3.mlp...`, which with the seed determines its initial value.
(Pre-norm decoder: GPT-2; Llama, arXiv 2302.13971)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanomegatron import ops
from nanomegatron.attention import Mask, choose_backend, core_attention
from nanomegatron.comm import own_slice
from nanomegatron.config import TransformerConfig
from nanomegatron.config import padded_vocab_size as default_padding
from nanomegatron.config_keywords import GPT_MODEL, answer
from nanomegatron.mesh import Axis
from nanomegatron.model_recompute import made_again, recomputed, segments
from nanomegatron.ops_rope import rope, rope_angles
from nanomegatron.param import Init, ParamSpec, new_parameter, replica, scaled_std
from nanomegatron.tp import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_logits,
    vocab_spec,
)
from nanomegatron.tp_loss import fused_linear_cross_entropy, vocab_parallel_cross_entropy


@dataclass(frozen=True)
class Tokens:
    """What the model reads: the tokens and where they stand.

    `tokens` `[b, s]`, `positions` `[s]` in the sample; `sample_ids` `[b]` number the samples in the global
    data order, and with `dropout_seed` determine the dropout masks (None: no dropout). `position_ids`
    `[b, s]` are told where they start over with each document; `cu_seqlens`, `max_seqlen` (see attention.py)
    where attention ends with it. `loss_weights` `[b, s]` are the gradients that the losses will get, for
    --cross-entropy-loss-fusion; the model itself fills in `residual_positions`, `[s/tp]`.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    sample_ids: torch.Tensor | None = None
    dropout_seed: int | None = None
    position_ids: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None
    loss_weights: torch.Tensor | None = None
    residual_positions: torch.Tensor | None = None

    @property
    def embedded_positions(self) -> torch.Tensor:
        """The positions that the model sees, `[s]` or `[b, s]`."""
        return self.positions if self.position_ids is None else self.position_ids


Cache = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim; the weight is the same on every rank of `axis`.

    partial: its ranks normalize different parts of the data (heads, or pieces of the sequence).
    """

    def __init__(
        self, config: TransformerConfig, size: int, axis: Axis, init: Init, partial: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.from_one = config.norm_epsilon, config.apply_layernorm_1p

        def parameter(kind: str, value: float) -> nn.Parameter:
            part = replica(f"{init.name}.{kind}", (size,), axis, partial)
            return new_parameter(ParamSpec((part,), (size,), decay=False), init, fill=value)

        self.weight = parameter("weight", 0.0 if self.from_one else 1.0)
        self.bias = parameter("bias", 0.0) if config.normalization == "LayerNorm" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1 if self.from_one else self.weight
        if self.bias is None:
            return ops.rms_norm(x, weight, self.eps)
        return ops.layer_norm(x, weight, self.bias, self.eps)


class SelfAttention(nn.Module):
    """Causal self attention with grouped queries: `[s, b, h] -> [s, b, h]`, heads cut over tp.

    With fewer key/value heads than tp ranks, neighbouring ranks share one. Under sequence parallelism input
    and output are `[s/tp, b, h]`.
    """

    def __init__(self, config: TransformerConfig, layer: int, tp: Axis, init: Init) -> None:
        super().__init__()
        self.layer, self.tp, self.head_dim = layer, tp, config.head_dim
        self.window, self.interleaved = config.windows[layer], config.rotary_interleaved
        self.dropout = config.attention_dropout
        self.recompute = config.recomputes("core_attn")
        heads, groups = config.num_attention_heads * config.head_dim, config.num_kv_heads * config.head_dim
        n, g = config.num_attention_heads, config.num_kv_heads
        if n % tp.size or (g % tp.size and tp.size % g):
            raise ValueError(
                f"{n} query, {g} key/value heads: both must divide by tp {tp.size}, or it by these"
            )
        copies = max(tp.size // g, 1)
        sizes = {"q": heads, "k": (groups, copies), "v": (groups, copies)}
        cut = config.sequence_parallel
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            sizes,
            tp,
            init.at("linear_qkv"),
            bias=config.add_qkv_bias or not config.disable_bias_linear,
            sequence_parallel=cut,
        )
        std = scaled_std(config.init_method_std, config.num_layers)
        self.linear_proj = RowParallelLinear(
            heads,
            config.hidden_size,
            tp,
            init.at("linear_proj", std),
            bias=not config.disable_bias_linear,
            sequence_parallel=cut,
        )
        self.widths = [heads // tp.size, groups * copies // tp.size, groups * copies // tp.size]
        self.q_norm = self.k_norm = None
        if config.qk_layernorm:
            self.q_norm = Norm(config, config.head_dim, tp, init.at("q_layernorm"), partial=True)
            self.k_norm = Norm(config, config.head_dim, tp, init.at("k_layernorm"), partial=True)
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
            q, k = self.q_norm(q), self.k_norm(k)
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

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return core_attention(q, k, v, self.backend, mask, dropout, drop)[0]

        context = recomputed(attend, q, k, v) if self.recompute else attend(q, k, v)
        return self.linear_proj(context)


class MLP(nn.Module):
    """The two-layer feed-forward network: `[s, b, h] -> [s, b, h]`, inner features cut over tp."""

    def __init__(self, config: TransformerConfig, tp: Axis, init: Init) -> None:
        super().__init__()
        h, ffn, bias, cut = (
            config.hidden_size,
            config.ffn_size,
            not config.disable_bias_linear,
            config.sequence_parallel,
        )
        inner = {"gate": ffn, "up": ffn} if config.swiglu else ffn
        self.activation = (
            ops.swiglu if config.swiglu else ops.squared_relu if config.squared_relu else ops.gelu
        )
        self.recompute = config.recomputes("mlp_act")
        self.linear_fc1 = ColumnParallelLinear(
            h, inner, tp, init.at("linear_fc1"), bias, sequence_parallel=cut
        )
        std = scaled_std(config.init_method_std, config.num_layers)
        self.linear_fc2 = RowParallelLinear(
            ffn, h, tp, init.at("linear_fc2", std), bias, sequence_parallel=cut
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _through(self.activation, self.linear_fc1(x), self.linear_fc2, self.recompute)


def _through(first: Callable, x: torch.Tensor, then: Callable, again: bool) -> torch.Tensor:
    """then(first(x)); with `again` the result of `first` is made anew in the backward."""
    y = first(x)
    if not again:
        return then(y)
    kept = x.detach()
    with made_again(y, lambda: first(kept)):
        return then(y)


class TransformerLayer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual: `[s, b, h] -> [s, b, h]`."""

    def __init__(self, config: TransformerConfig, layer: int, tp: Axis, init: Init) -> None:
        super().__init__()
        h, cut = config.hidden_size, config.sequence_parallel
        self.layer, self.p = layer, config.hidden_dropout
        self.recompute_norms, self.recompute_mlp = config.recomputes("layernorm"), config.recomputes("mlp")
        self.input_layernorm = Norm(config, h, tp, init.at("input_layernorm"), cut)
        self.self_attention = SelfAttention(config, layer, tp, init.at("self_attention"))
        self.pre_mlp_layernorm = Norm(config, h, tp, init.at("pre_mlp_layernorm"), cut)
        self.mlp = MLP(config, tp, init.at("mlp"))

    def forward(
        self, x: torch.Tensor, batch: Tokens, rotary: tuple | None, cache: Cache | None = None
    ) -> torch.Tensor:
        def attention(normed: torch.Tensor) -> torch.Tensor:
            return self.self_attention(normed, batch, rotary, cache)

        def mlp(normed: torch.Tensor) -> torch.Tensor:
            return recomputed(self.mlp, normed) if self.recompute_mlp else self.mlp(normed)

        y = _through(self.input_layernorm, x, attention, self.recompute_norms)
        x = x + hidden_dropout(y, self.p, batch, 2 * self.layer + 1)
        y = _through(self.pre_mlp_layernorm, x, mlp, self.recompute_norms)
        return x + hidden_dropout(y, self.p, batch, 2 * self.layer + 2)


def hidden_dropout(x: torch.Tensor, p: float, batch: Tokens, site: int) -> torch.Tensor:
    """Dropout of the residual stream, the same under any layout; `site` numbers the places from 0."""
    if p == 0.0 or batch.dropout_seed is None:
        return x
    return ops.dropout(x, p, batch.dropout_seed, site, batch.residual_positions, batch.sample_ids)


class Embedding(nn.Module):
    """Word and learned position embeddings: tokens `[b, s]` -> `[s, b, h]`, or this rank's `[s/tp, b, h]`."""

    def __init__(self, config: TransformerConfig, sizes: tuple[int, int, int], tp: Axis, init: Init) -> None:
        """sizes: vocabulary, padded vocabulary, positions."""
        super().__init__()
        vocab_size, padded_size, positions = sizes
        h, cut, init = config.hidden_size, config.sequence_parallel, init.at("embedding")
        self.p, self.tp, self.sequence_parallel = config.hidden_dropout, tp, cut
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, padded_size, h, tp, init.at("word_embeddings"), cut
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
        self.embedding = Embedding(config, sizes, tp, replace(init, std=config.init_method_std))
        decoder = init.at("decoder", config.init_method_std)
        self.layers = nn.ModuleList(
            TransformerLayer(config, i, tp, decoder.at(f"layers.{i}")) for i in range(config.num_layers)
        )
        final = decoder.at("final_layernorm")
        self.final_layernorm = Norm(config, config.hidden_size, tp, final, config.sequence_parallel)
        weight = self.embedding.word_embeddings.weight
        if config.untie_embeddings_and_output_weights:
            spec = vocab_spec("output_layer.weight", *sizes[:2], config.hidden_size, tp)
            weight = new_parameter(spec, decoder)
        else:
            weight.spec = replace(weight.spec, uses=2)
        self.output_layer = OutputLayer(config, vocab_size, weight, tp)

    def forward(
        self, batch: Tokens, labels: torch.Tensor | None = None, cache: Cache | None = None
    ) -> torch.Tensor:
        """labels `[b, s]` -> loss `[b, s]` fp32, the same on all tp ranks; none -> logits `[s, b, V/tp]`.

        Raises RuntimeError for a loss in eval mode that autograd follows, under sequence parallelism: the
        ranks would have whole gradients where `dp.py` adds up summands.
        """
        config, rotary = self.config, None
        whole = config.sequence_parallel and self.tp.size > 1 and not self.training
        if whole and labels is not None and torch.is_grad_enabled():
            raise RuntimeError("eval mode with sequence_parallel: use model.train(), or torch.no_grad()")
        if config.position_embedding_type in ("rope", "yarn"):
            rotary = rope_angles(batch.embedded_positions, config)
        cut = config.sequence_parallel and self.training
        batch = replace(
            batch, residual_positions=own_slice(batch.positions, self.tp) if cut else batch.positions
        )
        x = self.embedding(batch)
        spread = self.tp if config.distribute_saved_activations and not cut else None
        for layers, again in segments(config, len(self.layers)):

            def run(x: torch.Tensor, layers: range = layers) -> torch.Tensor:
                for i in layers:
                    x = self.layers[i](x, batch, rotary, cache)
                return x

            x = recomputed(run, x, spread=spread) if again else run(x)
        return self.output_layer(self.final_layernorm(x), labels, batch.loss_weights)

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

from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from nanomegatron.comm import own_slice
from nanomegatron.config.keywords import GPT_MODEL, answer
from nanomegatron.config.settings import TransformerConfig
from nanomegatron.config.settings import padded_vocab_size as default_padding
from nanomegatron.cp import context_attention
from nanomegatron.fast.fp8_producers import (
    GatedFp8Function,
    NormFp8Function,
    cast_for,
    fuses,
    takes_casts,
    through,
    wanted,
)
from nanomegatron.fp8 import Scales
from nanomegatron.layers import Embedding, OutputLayer, Stage, Tokens, hidden_dropout
from nanomegatron.mesh import Axis
from nanomegatron.moe import MoELayer
from nanomegatron.moe_experts import GroupedExperts
from nanomegatron.ops.attention import Mask, choose_backend, core_attention
from nanomegatron.ops.dropout import attention_dropout
from nanomegatron.ops.norm import add_norm, norm, norm_ref
from nanomegatron.ops.rope import rope, rope_angles, rope_packed, rope_ref
from nanomegatron.ops.swiglu import activation
from nanomegatron.param import Init, ParamSpec, new_parameter, replica, scaled_std
from nanomegatron.recompute import recomputed, segments
from nanomegatron.router import MoeAxes
from nanomegatron.tp import (
    ColumnParallelLinear,
    RowParallelLinear,
    vocab_spec,
)

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
        self.fused = config.persist_layer_norm

        def parameter(kind: str, value: float) -> nn.Parameter:
            part = replica(f"{init.name}.{kind}", (size,), axis, partial)
            return new_parameter(ParamSpec((part,), (size,), decay=False), init, fill=value)

        self.weight = parameter("weight", 0.0 if self.from_one else 1.0)
        self.bias = parameter("bias", 0.0) if config.normalization == "LayerNorm" else None

    def forward(self, x: torch.Tensor, to: ColumnParallelLinear | None = None) -> torch.Tensor:
        """to: who alone reads the result, which may then be there in FP8 alone (`fast/fp8_producers.py`)."""
        if self.fused and fuses(to):
            return NormFp8Function.apply(x, None, *self._how, to.fp8, wanted(to))
        return cast_for(to, (norm if self.fused else norm_ref)(x, *self._how))

    def after_sum(
        self, x: torch.Tensor, residual: torch.Tensor, to: ColumnParallelLinear | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of x + residual, and this sum."""
        if not self.fused:
            total = x + residual
            return self(total, to), total
        if fuses(to):
            return NormFp8Function.apply(x, residual, *self._how, to.fp8, wanted(to))
        y, total = add_norm(x, residual, *self._how)
        return cast_for(to, y), total

    @property
    def _how(self) -> tuple:
        return self.weight, self.bias, self.eps, self.from_one


class SelfAttention(nn.Module):
    """Causal self attention with grouped queries: `[s, b, h] -> [s, b, h]`, heads cut over tp.

    With fewer key/value heads than tp ranks, neighbouring ranks share one. Under sequence parallelism input
    and output are `[s/tp, b, h]`.
    """

    def __init__(self, config: TransformerConfig, layer: int, tp: Axis, init: Init) -> None:
        super().__init__()
        self.layer, self.tp, self.head_dim = layer, tp, config.head_dim
        self.window, self.interleaved = config.windows[layer], config.rotary_interleaved
        self.fused_rope, self.fused_softmax = config.rope_fusion, config.masked_softmax_fusion
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
        packed = self.linear_qkv(x)
        if rotary is not None and self.q_norm is None and self.fused_rope:
            q, k, v = rope_packed(packed, self.widths, self.head_dim, *rotary, self.interleaved)
        else:
            q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in packed.split(self.widths, -1))
            if self.q_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
            if rotary is not None:
                turn = rope if self.fused_rope else rope_ref
                q, k = turn(q, *rotary, self.interleaved), turn(k, *rotary, self.interleaved)
        if cache is not None:
            k, v = cache(self.layer, k, v)
        dropout, drop = 0.0, None
        if self.dropout and batch.dropout_seed is not None:
            local = q.shape[2]
            heads = torch.arange(self.tp.rank * local, (self.tp.rank + 1) * local, device=x.device)
            positions = (batch.positions, batch.positions)  # in training all that are keys are queries
            place = (batch.dropout_seed, -1 - self.layer, positions, batch.sample_ids, heads)
            dropout, drop = self.dropout, lambda probs: attention_dropout(probs, self.dropout, *place)
        mask = Mask(True, self.window, batch.cu_seqlens, batch.max_seqlen)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if batch.shard is not None:
                how = batch.shard, self.layer, mask, self.backend, self.fused_softmax
                return context_attention(q, k, v, *how)
            return core_attention(q, k, v, self.backend, mask, dropout, drop, self.fused_softmax)[0]

        context = recomputed(attend, q, k, v) if self.recompute else attend(q, k, v)
        return self.linear_proj(context)


class MLP(nn.Module):
    """The two-layer feed-forward network: `[s, b, h] -> [s, b, h]`, inner features cut over tp."""

    def __init__(self, config: TransformerConfig, tp: Axis, init: Init, size: int | None = None) -> None:
        """size: of the inner features, for shared experts."""
        super().__init__()
        h, ffn, bias, cut = (
            config.hidden_size,
            size or config.ffn_size,
            not config.disable_bias_linear,
            config.sequence_parallel,
        )
        inner = {"gate": ffn, "up": ffn} if config.swiglu else ffn
        self.activation = activation(config)
        self.fused = config.swiglu and config.bias_swiglu_fusion
        self.recompute = config.recomputes("mlp_act")
        self.linear_fc1 = ColumnParallelLinear(
            h, inner, tp, init.at("linear_fc1"), bias, sequence_parallel=cut
        )
        std = scaled_std(config.init_method_std, config.num_layers)
        self.linear_fc2 = RowParallelLinear(
            ffn, h, tp, init.at("linear_fc2", std), bias, sequence_parallel=cut
        )

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        """What the second layer reads, of what the first one gives."""
        first, second = self.linear_fc1, self.linear_fc2
        if self.fused and first.bias is None and fuses(first) and fuses(second):
            return GatedFp8Function.apply(x, first.fp8, second.fp8, *wanted(second))
        return cast_for(second, self.activation(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear_fc1(x)
        return through(self.activated(x), self.linear_fc2, self.activated, x if self.recompute else None)


class TransformerLayer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual: `[s, b, h] -> [s, b, h]`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        tp: Axis,
        init: Init,
        experts: MoeAxes = MoeAxes(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__()
        h, cut = config.hidden_size, config.sequence_parallel
        self.layer, self.p = layer, config.hidden_dropout
        sparse = config.num_experts is not None and config.moe_layers[layer]
        self.recompute_norms = config.recomputes("layernorm")
        self.recompute_mlp = config.recomputes("moe" if sparse else "mlp")
        self.input_layernorm = Norm(config, h, tp, init.at("input_layernorm"), cut)
        self.self_attention = SelfAttention(config, layer, tp, init.at("self_attention"))
        self.pre_mlp_layernorm = Norm(config, h, tp, init.at("pre_mlp_layernorm"), cut)
        inner, size = init.at("mlp"), config.moe_shared_expert_intermediate_size
        if sparse:
            shared = MLP(config, tp, inner.at("shared_experts"), size) if size else None
            self.mlp = MoELayer(config, layer, experts, inner, shared)
        else:
            self.mlp = MLP(config, tp, inner)

    def forward(
        self, x: torch.Tensor, batch: Tokens, rotary: tuple | None, cache: Cache | None = None
    ) -> torch.Tensor:
        def attention(normed: torch.Tensor) -> torch.Tensor:
            return self.self_attention(normed, batch, rotary, cache)

        fc1 = None if isinstance(self.mlp, MoELayer) else self.mlp.linear_fc1
        feed = self.mlp if fc1 is not None else partial(self.mlp, batch=batch)

        def mlp(normed: torch.Tensor) -> torch.Tensor:
            return recomputed(feed, normed) if self.recompute_mlp else feed(normed)

        again, qkv = self.recompute_norms, self.self_attention.linear_qkv
        first = partial(self.input_layernorm, to=qkv)
        y = through(first(x), attention, first, x if again else None)
        y = hidden_dropout(y, self.p, batch, 2 * self.layer + 1)
        second = partial(self.pre_mlp_layernorm, to=fc1)
        if self.recompute_mlp and takes_casts(fc1):  # what is recomputed cannot begin with a stand-in
            x = x + y
            y = recomputed(lambda total: self.mlp(second(total)), x)
        else:
            normed, x = self.pre_mlp_layernorm.after_sum(y, x, fc1)
            y = through(normed, mlp, second, x if again else None)
        return x + hidden_dropout(y, self.p, batch, 2 * self.layer + 2)


class GPTModel(nn.Module):
    """The decoder or a stage of it. With labels the loss of each token, without them this rank's logits."""

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
        stage: Stage = Stage(),  # noqa: B008 (frozen)
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
        self.padded_vocab_size = padded_vocab_size or default_padding(vocab_size, 128, tp.size)
        self.input_tensor: torch.Tensor | None = None
        self.pre_process, self.post_process = stage.pre_process, stage.post_process
        sizes = (vocab_size, self.padded_vocab_size, max_sequence_length)
        decoder = init.at("decoder", config.init_method_std)
        tied = not config.untie_embeddings_and_output_weights
        words, self.embedding = stage.word_embeddings, None
        if words is None and (stage.pre_process or (stage.post_process and tied)):
            name, ends = "embedding.word_embeddings.weight", stage.embed if tied else None
            words = new_parameter(vocab_spec(name, sizes[:2], config.hidden_size, tp, tied, ends), decoder)
        if stage.pre_process:
            start = init.at("embedding", config.init_method_std)
            self.embedding = Embedding(config, sizes, words, tp, start)
        layers = range(config.num_layers) if stage.layers is None else stage.layers
        self.layers = nn.ModuleList(
            TransformerLayer(config, i, tp, decoder.at(f"layers.{i}"), stage.experts) for i in layers
        )
        self.final_layernorm = self.output_layer = None
        if stage.post_process:
            final = decoder.at("final_layernorm")
            self.final_layernorm = Norm(config, config.hidden_size, tp, final, config.sequence_parallel)
            if not tied:
                spec = vocab_spec("output_layer.weight", sizes[:2], config.hidden_size, tp)
                words = new_parameter(spec, decoder)
            elif stage.pre_process or stage.word_embeddings is not None:
                words.spec = replace(words.spec, uses=2)
            self.output_layer = OutputLayer(config, vocab_size, words, tp)

    def use_fp8(self, scales: Scales, layers: Container[int]) -> None:
        """Multiply in FP8 in the layers of these numbers."""
        for layer in self.layers:
            for linear in layer.modules() if layer.layer in layers else ():
                if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                    linear.fp8 = linear.weight.fp8 = scales.layer(linear.weight.spec.name)
                elif isinstance(linear, GroupedExperts):
                    linear.use_fp8(scales)

    def set_input_tensor(self, x: torch.Tensor) -> None:
        """What the stage before has made, for the next forward of a stage without embedding: `[s, b, h]`."""
        self.input_tensor = x

    def forward(
        self, batch: Tokens, labels: torch.Tensor | None = None, cache: Cache | None = None
    ) -> torch.Tensor:
        """labels `[b, s]` -> loss `[b, s]` fp32, the same on all tp ranks; none -> logits `[s, b, V/tp]`.

        A stage that is not the last gives `[s, b, h]`, with sequence parallelism this rank's `[s/tp, b, h]`.
        Raises RuntimeError for a loss in eval mode that autograd follows, under sequence parallelism: the
        ranks would have whole gradients where `dp.py` adds up summands; and without a needed input tensor.
        """
        config, rotary = self.config, None
        whole = config.sequence_parallel and self.tp.size > 1 and not self.training
        if whole and labels is not None and torch.is_grad_enabled():
            raise RuntimeError("eval mode with sequence_parallel: use model.train(), or torch.no_grad()")
        if config.position_embedding_type in ("rope", "yarn"):
            rotary = rope_angles(batch.rotary_positions, config)
        cut = config.sequence_parallel and self.training
        batch = replace(
            batch, residual_positions=own_slice(batch.positions, self.tp) if cut else batch.positions
        )
        x, self.input_tensor = self.input_tensor, None
        if self.embedding is not None:
            x = self.embedding(batch)
        elif x is None:
            raise RuntimeError("this stage has no embedding: call set_input_tensor before each forward")
        spread = self.tp if config.distribute_saved_activations and not cut else None
        for layers, again in segments(config, len(self.layers)):

            def run(x: torch.Tensor, layers: range = layers) -> torch.Tensor:
                for i in layers:
                    x = self.layers[i](x, batch, rotary, cache)
                return x

            x = recomputed(run, x, spread=spread) if again else run(x)
        if self.output_layer is None:
            return x
        return self.output_layer(self.final_layernorm(x), labels, batch.loss_weights)

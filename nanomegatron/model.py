"""The transformer, one class for each box of the drawing; model families differ only in configuration.

Tests: tests/test_model.py. Page: docs/architecture.md.

        tokens [b, s]
           |
       Embedding         word (+ learned position), dropout                  -> [s, b, h]
           |
       TransformerLayer  x num_layers
           |  x + dropout(SelfAttention(Norm(x)))     QKV -> (q, k norm) -> rotary -> core attention -> proj
           |  x + dropout(MLP(Norm(x)))               fc1 -> SwiGLU or GELU -> fc2
           |                                          (Norm before, after, or both: --norm-placement)
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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from nanomegatron.attention import Cache, SelfAttention
from nanomegatron.batch import Batch
from nanomegatron.comm import own_slice
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import padded_vocab_size as default_padding
from nanomegatron.layers import MLP, BranchDropout, Embedding, Norm, OutputLayer
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.moe import MoELayer
from nanomegatron.ops.rope import rope_angles
from nanomegatron.ops.swiglu import activation
from nanomegatron.param import Init, new_parameter, slot
from nanomegatron.recompute import recomputed
from nanomegatron.tp import vocab_spec


class TransformerLayer(nn.Module):
    """Attention and MLP, each with norm and residual. x `[s, b, h]` -> `[s, b, h]`; s/tp if s is sharded.

    rotary_kind: which of the model's rotary embeddings it has (`TransformerConfig.rotary_kinds`).
    """

    def __init__(self, config: TransformerConfig, layer: int, mesh: Mesh, init: Init) -> None:
        super().__init__()
        self.layer = layer
        self.rotary_kind = config.rotary_kinds[layer]
        self.input_layernorm = norm_at("pre", config, mesh.tp, init.at("input_layernorm"))
        self.self_attention = SelfAttention(config, layer, mesh.tp, init.at("self_attention"))
        self.post_attention_layernorm = norm_at("post", config, mesh.tp, init.at("post_attention_layernorm"))
        self.pre_mlp_layernorm = norm_at("pre", config, mesh.tp, init.at("pre_mlp_layernorm"))
        self.post_mlp_layernorm = norm_at("post", config, mesh.tp, init.at("post_mlp_layernorm"))
        self.mlp = feed_forward(config, layer, mesh, init.at("mlp"))
        self.dropout = BranchDropout(config, layer)

    def forward(
        self, x: torch.Tensor, batch: Batch, rotary: tuple | None, cache: Cache | None = None
    ) -> torch.Tensor:
        y = self.self_attention(self.input_layernorm(x), batch, rotary, cache)
        x = x + self.dropout(self.post_attention_layernorm(y), batch, 0)
        y = self.mlp(self.pre_mlp_layernorm(x), batch)
        return x + self.dropout(self.post_mlp_layernorm(y), batch, 1)


def norm_at(place: str, config: TransformerConfig, tp: Axis, init: Init) -> nn.Module:
    """Build a norm before ("pre") or after ("post") attention or an MLP; nn.Identity where there is none."""
    if config.norm_placement not in (place, "both"):
        return nn.Identity()
    return Norm(config, config.hidden_size, tp, init, partial_grad=config.sequence_parallel)


def feed_forward(config: TransformerConfig, layer: int, mesh: Mesh, init: Init) -> nn.Module:
    """Build the MLP of a layer, or its experts."""
    if config.num_experts is None or not config.moe_layers[layer]:
        return MLP(config, mesh.tp, init, config.ffn_size, config.recomputes("mlp"))
    size = config.moe_shared_expert_intermediate_size
    shared = MLP(config, mesh.tp, init.at("shared_experts"), size) if size else None
    return MoELayer(config, layer, mesh, init, activation(config), shared)


def run_layers(
    layers: Sequence[TransformerLayer],
    x: torch.Tensor,
    batch: Batch,
    rotary: dict[str | None, tuple | None],
    cache: Cache | None = None,
) -> torch.Tensor:
    """Run one layer after the other. x `[s, b, h]` -> `[s, b, h]`. rotary: by `rotary_kind`."""
    for layer in layers:
        x = layer(x, batch, rotary[layer.rotary_kind], cache)
    return x


@dataclass(frozen=True)
class StageSpec:
    """The part of the model that a GPTModel holds; by default the whole model.

    word_embeddings: the weight of the embedding, if another GPTModel on this rank holds it.
    """

    layers: range | None = None
    pre_process: bool = True  # has the embedding
    post_process: bool = True  # has the final norm, output layer and loss
    word_embeddings: nn.Parameter | None = None


class GPTModel(nn.Module):
    """The decoder, or one pipeline stage of it.

    The last stage returns each token's loss, or without labels this tp rank's shard of the logits; a stage
    before it returns hidden states. run_layers: its one slot, with the arguments of the function above.
    """

    run_layers: Callable[..., torch.Tensor] = slot(run_layers)

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        max_sequence_length: int,
        padded_vocab_size: int | None = None,
        mesh: Mesh = Mesh(),  # noqa: B008 (frozen)
        init: Init = Init(),  # noqa: B008 (frozen)
        stage: StageSpec = StageSpec(),
    ) -> None:
        """vocab_size: number of tokens; padded_vocab_size: rows of the whole weights, a multiple of tp.

        mesh: weights are sharded over its axes tp, ep and etp; stages share tied embeddings over `embed`.
        """
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.tp = tp = mesh.tp
        self.padded_vocab_size = padded_vocab_size or default_padding(vocab_size, 128, tp.size)
        self.input_tensor: torch.Tensor | None = None
        self.pre_process = stage.pre_process
        self.post_process = stage.post_process
        sizes = (vocab_size, self.padded_vocab_size)
        decoder = init.at("decoder", config.init_method_std)
        tied = not config.untie_embeddings_and_output_weights
        embedding_weight = stage.word_embeddings
        if embedding_weight is None and (stage.pre_process or (stage.post_process and tied)):
            name = "embedding.word_embeddings.weight"
            embedding_weight = new_parameter(
                vocab_spec(name, sizes, config.hidden_size, tp, tied, mesh.embed), decoder
            )
        self.embedding = None
        if stage.pre_process:
            self.embedding = Embedding(
                config,
                vocab_size,
                self.padded_vocab_size,
                max_sequence_length,
                embedding_weight,
                tp,
                init.at("embedding", config.init_method_std),
            )
        layers = range(config.num_layers) if stage.layers is None else stage.layers
        self.layers = nn.ModuleList(
            TransformerLayer(config, i, mesh, decoder.at(f"layers.{i}")) for i in layers
        )
        self.final_layernorm = self.output_layer = None
        if stage.post_process:
            self.final_layernorm = Norm(
                config,
                config.hidden_size,
                tp,
                decoder.at("final_layernorm"),
                partial_grad=config.sequence_parallel,
            )
            output_weight = embedding_weight
            if not tied:
                spec = vocab_spec("output_layer.weight", sizes, config.hidden_size, tp)
                output_weight = new_parameter(spec, decoder)
            elif stage.pre_process or stage.word_embeddings is not None:
                output_weight.spec = replace(output_weight.spec, uses=2)
            self.output_layer = OutputLayer(config, vocab_size, output_weight, tp)

    def set_input_tensor(self, x: torch.Tensor) -> None:
        """Set the next forward's input x `[s, b, h]` or `[s/tp, b, h]`, the output of the previous stage."""
        self.input_tensor = x

    def forward(
        self, batch: Batch, labels: torch.Tensor | None = None, cache: Cache | None = None
    ) -> torch.Tensor:
        """labels `[b, s]` -> loss `[b, s]` or `[s, b, V/tp]` or `[s, b, h]` or `[s/tp, b, h]`

        Return the loss, fp32 and the same on all tp ranks; without labels the logits, with a cache those of
        the last token. A stage before the last returns the residual stream, with sequence_parallel sharded.
        Raises RuntimeError if a stage lacks its input tensor, and as `check_mode`.
        """
        self.check_mode(labels)
        config = self.config
        # The axis over which the residual stream is sharded along the sequence.
        stream = self.tp if config.sequence_parallel and self.training else Axis.single()
        rotary = self.rotary_of(batch)
        batch = replace(batch, residual_positions=own_slice(batch.positions, stream))
        x = self.input_tensor
        self.input_tensor = None
        if self.embedding is not None:
            x = self.embedding(batch)
        elif x is None:
            raise RuntimeError("this stage has no embedding: call set_input_tensor before each forward")
        spread = self.tp if config.distribute_saved_activations and stream.size == 1 else Axis.single()
        for segment, again in config.segments(len(self.layers)):
            layers = [self.layers[i] for i in segment]
            run = partial(self.run_layers, layers, batch=batch, rotary=rotary, cache=cache)
            x = recomputed(run, x, when=again, spread=spread)
        if self.output_layer is None:
            return x
        x = x if cache is None else x[-1:]
        return self.output_layer(self.final_layernorm(x), labels, batch.loss_weights)

    def rotary_of(self, batch: Batch) -> dict[str | None, tuple | None]:
        """Return cos and sin of positions, by `rotary_kind`: `[s, 1, 1, r/2]` or `[s, b, 1, r/2]` each."""
        rotary: dict[str | None, tuple | None] = {None: None}
        for kind in {layer.rotary_kind for layer in self.layers} - {None}:
            rotary[kind] = rope_angles(batch.rotary_positions, self.config, kind == "local")
        return rotary

    def check_mode(self, labels: torch.Tensor | None) -> None:
        """Raise RuntimeError for a loss in eval mode with gradients, under sequence parallelism.

        Such gradients would be whole on each rank, where `dp.py` sums partial ones. labels `[b, s]`
        """
        sharded = self.config.sequence_parallel and self.tp.size > 1
        if sharded and not self.training and labels is not None and torch.is_grad_enabled():
            raise RuntimeError("eval mode with sequence_parallel: use model.train(), or torch.no_grad()")

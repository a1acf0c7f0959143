"""The transformer, one class for each box of the drawing; model families differ only in configuration.

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

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from nanomegatron.attention import Cache, SelfAttention
from nanomegatron.batch import Batch
from nanomegatron.comm import own_slice
from nanomegatron.config.keywords import check_keywords
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import padded_vocab_size as default_padding
from nanomegatron.layers import MLP, Embedding, NoNorm, Norm, OutputLayer, hidden_dropout
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.moe import MoELayer
from nanomegatron.ops.dropout import Dropout, bias_dropout_add, bias_dropout_add_ref
from nanomegatron.ops.rope import rope_angles
from nanomegatron.ops.swiglu import activation
from nanomegatron.param import Init, new_parameter
from nanomegatron.recompute import recomputed
from nanomegatron.tp import vocab_spec


class Branch(NamedTuple):
    """What is still to be added to the residual stream: y `[s, b, h]`, after its bias `[h]` and dropout."""

    y: torch.Tensor
    bias: torch.Tensor | None
    drop: Dropout | None

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """x + the branch. x `[s, b, h]` -> `[s, b, h]`"""
        return bias_dropout_add(self.y, self.bias, x, self.drop)

    def add_and_norm(self, x: torch.Tensor, norm: Norm | NoNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """norm(x + the branch), in one pass if there is a kernel, and the sum.

        x `[s, b, h]` -> `[s, b, h]`, `[s, b, h]`
        """
        return norm.after_sum(self.y, x, self.bias, self.drop)


class TransformerLayer(nn.Module):
    """Attention and MLP, each with norm and residual. x `[s, b, h]`; s/tp if s is sharded.

    The branch of the layer before comes in and its own last one goes out, each added beside the next norm.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        tp: Axis,
        init: Init,
        mesh: Mesh = Mesh(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__()
        h, cut = config.hidden_size, config.sequence_parallel
        self.layer, self.p, self.multiplier = layer, config.hidden_dropout, config.residual_multiplier
        self.fused = config.bias_dropout_fusion
        # Whether biases are left to the residual add: where nothing comes between.
        apart = self.fused and self.multiplier == 1 and config.norm_placement == "pre"

        def norm(name: str, *places: str) -> Norm | NoNorm:
            there = config.norm_placement in ("both", *places)
            return Norm(config, h, tp, init.at(name), cut) if there else NoNorm()

        self.input_layernorm = norm("input_layernorm", "pre")
        self.self_attention = SelfAttention(config, layer, tp, init.at("self_attention"), apart)
        self.post_attention_layernorm = norm("post_attention_layernorm", "post")
        self.pre_mlp_layernorm = norm("pre_mlp_layernorm", "pre")
        self.post_mlp_layernorm = norm("post_mlp_layernorm", "post")
        for before in (self.input_layernorm, self.pre_mlp_layernorm):
            before.recompute = config.recomputes("layernorm")
        inner, size = init.at("mlp"), config.moe_shared_expert_intermediate_size
        self.sparse = config.num_experts is not None and config.moe_layers[layer]
        if self.sparse:
            shared = MLP(config, tp, inner.at("shared_experts"), size) if size else None
            self.mlp = MoELayer(config, layer, mesh, inner, activation(config), shared)
        else:
            self.mlp = MLP(config, tp, inner, skip_bias_add=apart)
        self.last = self.self_attention.linear_proj, None if self.sparse else self.mlp.linear_fc2

    def forward(
        self,
        x: torch.Tensor,
        batch: Batch,
        rotary: tuple | None,
        cache: Cache | None = None,
        branch: Branch | None = None,
    ) -> tuple[torch.Tensor, Branch]:
        """-> x `[s, b, h]` with `branch` and that of attention added, and the branch of the MLP"""
        norm = self.input_layernorm
        normed, x = norm.beside(x) if branch is None else branch.add_and_norm(x, norm)
        y = self.self_attention(normed, batch, rotary, cache)
        branch = self._branch(self.post_attention_layernorm(y), batch, 0)
        normed, x = branch.add_and_norm(x, self.pre_mlp_layernorm)
        y = self.mlp(normed, batch) if self.sparse else self.mlp(normed)
        return x, self._branch(self.post_mlp_layernorm(y), batch, 1)

    def _branch(self, y: torch.Tensor, batch: Batch, which: int) -> Branch:
        """The branch of attention (0) or MLP (1) with output y `[s, b, h]`."""
        y = y if self.multiplier == 1 else y * self.multiplier
        drop, linear = hidden_dropout(self.p, batch, 2 * self.layer + 1 + which), self.last[which]
        if not self.fused:
            return Branch(bias_dropout_add_ref(y, None, None, drop), None, None)
        return Branch(y, linear.bias if linear is not None and linear.skip_bias_add else None, drop)


@dataclass(frozen=True)
class Stage:
    """The part of the model that a GPTModel holds; by default the whole model.

    mesh: its axis `embed` is for tied embeddings, ep and etp for experts. word_embeddings: the weight of the
    embedding, if another GPTModel on this rank holds it.
    """

    layers: range | None = None
    pre_process: bool = True  # has the embedding
    post_process: bool = True  # has the final norm, output layer and loss
    mesh: Mesh = Mesh()
    word_embeddings: nn.Parameter | None = None


class GPTModel(nn.Module):
    """The decoder, or one pipeline stage of it.

    The last stage returns each token's loss, or without labels this tp rank's shard of the logits; a stage
    before it returns hidden states. run_layer: the function that calls a layer, with it and its arguments.
    """

    run_layer: Callable[..., tuple[torch.Tensor, Branch]] = staticmethod(TransformerLayer.__call__)

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
        stage: Stage = Stage(),
        **megatron: Any,
    ) -> None:
        """vocab_size: number of tokens; padded_vocab_size: rows of the whole weights, a multiple of tp.

        Other keywords of Megatron's GPTModel are accepted if they change nothing. Otherwise a TypeError says
        what to use instead; also for a layer spec.
        """
        super().__init__()
        if transformer_layer_spec is not None:
            megatron["transformer_layer_spec"] = transformer_layer_spec
        check_keywords("GPTModel", (), megatron)
        self.config, self.vocab_size = config, vocab_size
        self.tp = tp = tp or stage.mesh.tp
        self.padded_vocab_size = padded_vocab_size or default_padding(vocab_size, 128, tp.size)
        self.input_tensor: torch.Tensor | None = None
        self.pre_process, self.post_process = stage.pre_process, stage.post_process
        sizes = (vocab_size, self.padded_vocab_size, max_sequence_length)
        decoder = init.at("decoder", config.init_method_std)
        tied = not config.untie_embeddings_and_output_weights
        words, self.embedding = stage.word_embeddings, None
        if words is None and (stage.pre_process or (stage.post_process and tied)):
            name, ends = "embedding.word_embeddings.weight", stage.mesh.embed if tied else None
            words = new_parameter(vocab_spec(name, sizes[:2], config.hidden_size, tp, tied, ends), decoder)
        if stage.pre_process:
            start = init.at("embedding", config.init_method_std)
            self.embedding = Embedding(config, sizes, words, tp, start)
        layers = range(config.num_layers) if stage.layers is None else stage.layers
        self.layers = nn.ModuleList(
            TransformerLayer(config, i, tp, decoder.at(f"layers.{i}"), stage.mesh) for i in layers
        )
        kinds = config.rotary_kinds
        self.rotary_kinds = [kinds[i] for i in layers]
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

    def set_input_tensor(self, x: torch.Tensor) -> None:
        """Set the next forward's input x `[s, b, h]` or `[s/tp, b, h]`, the output of the previous stage."""
        self.input_tensor = x

    def forward(
        self, batch: Batch, labels: torch.Tensor | None = None, cache: Cache | None = None
    ) -> torch.Tensor:
        """labels `[b, s]` -> loss `[b, s]` or `[s, b, V/tp]` or `[s, b, h]` or `[s/tp, b, h]`

        Return the loss, fp32 and the same on all tp ranks; without labels the logits, with a cache those of
        the last token. A stage before the last returns the residual stream, with sequence_parallel sharded.
        Raises RuntimeError if a stage lacks its input tensor; and under sequence parallelism for a loss in
        eval mode with gradients, which would be whole on each rank, where `dp.py` sums partial gradients.
        """
        config, kinds = self.config, self.rotary_kinds
        whole = config.sequence_parallel and self.tp.size > 1 and not self.training
        if whole and labels is not None and torch.is_grad_enabled():
            raise RuntimeError("eval mode with sequence_parallel: use model.train(), or torch.no_grad()")
        places = batch.rotary_positions
        rotary = {kind: rope_angles(places, config, kind == "local") for kind in {*kinds} - {None}}
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
        for layers, again in config.segments(len(self.layers)):

            def run(x: torch.Tensor, layers: range = layers) -> torch.Tensor:
                branch = None
                for i in layers:
                    x, branch = self.run_layer(self.layers[i], x, batch, rotary.get(kinds[i]), cache, branch)
                return x if branch is None else branch.add(x)

            x = recomputed(run, x, spread=spread) if again else run(x)
        if self.output_layer is None:
            return x
        x = x if cache is None else x[-1:]
        return self.output_layer(self.final_layernorm(x), labels, batch.loss_weights)

"""The shape of a model: its settings, and Megatron's list of which layers have something.

value               --window-attn-skip-freq: a window     --moe-layer-freq: experts instead of an MLP
(none)              all layers                            all layers
N                   all but every N-th                    every N-th, from the first on
"([1]*5+[0])*4"     those with a 1                        those with a 1
"""

import ast
import dataclasses
import functools
import typing
from dataclasses import dataclass
from typing import Any

from nanomegatron.config.keywords import TRANSFORMER_CONFIG, answer

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")


@dataclass(frozen=True)
class Rules:
    """What is known of a setting beside its type and default."""

    help: str
    aliases: tuple[str, ...] = ()  # short names of the flag
    choices: tuple = ()
    refused: dict[str, str] = dataclasses.field(default_factory=dict)  # Megatron's other values, with a fix
    nargs: str = ""
    fast_path: bool = False  # it asks for a fast path, which --no-fast-paths forbids


def setting(default: Any, text: str, *aliases: str, **rules: Any) -> Any:
    """A dataclass field with its one-line help, short flag aliases and other `Rules`."""
    return dataclasses.field(default=default, metadata=vars(Rules(text, aliases, **rules)))


def with_megatron_keywords(cls: type) -> type:
    """A dataclass whose constructor takes, or answers, Megatron's keywords too."""
    own, fields = cls.__init__, dataclasses.fields(cls)
    names, lists = [f.name for f in fields], [f.name for f in fields if typing.get_origin(f.type) is tuple]

    @functools.wraps(own)
    def init(self: Any, *values: Any, **keywords: Any) -> None:
        strange = {name: keywords.pop(name) for name in list(keywords) if name not in names}
        answer(cls.__name__, TRANSFORMER_CONFIG, names, strange)
        for name in keywords.keys() & lists:  # Megatron's are lists, or one value
            value = keywords[name]
            keywords[name] = tuple(value) if isinstance(value, list | tuple) else (value,)
        own(self, *values, **keywords)

    cls.__init__ = init
    return cls


@with_megatron_keywords
@dataclass(frozen=True)
class TransformerConfig:
    """The shape of the model. Families (GPT, Llama, Mixtral, Qwen) differ by these values alone."""

    num_layers: int | None = setting(None, "number of transformer layers")
    hidden_size: int | None = setting(None, "width of the residual stream")
    num_attention_heads: int | None = setting(None, "number of query heads")
    ffn_hidden_size: int | None = setting(None, "inner width of the MLP; 4h, with --swiglu int(8h/3/64)*64")
    kv_channels: int | None = setting(None, "width of one attention head; hidden size / heads")
    num_query_groups: int = setting(0, "number of key/value heads; 0 means one per query head (MHA)")
    max_position_embeddings: int | None = setting(None, "longest sequence the model can see; --seq-length")
    position_embedding_type: str = setting(
        "learned_absolute",
        "how positions enter the model",
        choices=("learned_absolute", "rope", "yarn", "none"),
    )
    rotary_base: float = setting(10000.0, "base of the rotary frequencies")
    rotary_percent: float = setting(1.0, "share of each head's features that is rotated, the first ones")
    rotary_interleaved: bool = setting(False, "rotate neighbouring features instead of the two halves")
    rotary_seq_len_interpolation_factor: float = setting(
        1.0, "positions are divided by this, for contexts so many times as long (position interpolation)"
    )
    use_rope_scaling: bool = setting(False, "stretch the slow frequencies for long contexts (Llama 3.1)")
    rope_scaling_factor: float = setting(8.0, "how far --use-rope-scaling stretches")
    rotary_scaling_factor: float = setting(1.0, "how far yarn stretches the original context")
    yarn_original_max_position_embeddings: int = setting(4096, "context before yarn stretched it")
    yarn_beta_fast: float = setting(32.0, "yarn leaves frequencies alone that turn so often in that context")
    yarn_beta_slow: float = setting(1.0, "yarn stretches those in full that turn no more often than this")
    yarn_correction_range_round_to_int: bool = setting(True, "round the bounds between the two")
    mscale: float = setting(1.0, "yarn: weight of log(factor) in the size of cos and sin")
    mscale_all_dim: float = setting(0.0, "yarn: the same in their divisor")
    normalization: str = setting("LayerNorm", "kind of normalization", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = setting(1e-5, "added to the variance inside a norm")
    qk_layernorm: bool = setting(False, "normalize each query and key head (Qwen3)")
    apply_layernorm_1p: bool = setting(False, "norm weights are kept as their difference from 1")
    swiglu: bool = setting(False, "gated MLP with SiLU, as in Llama; GELU without")
    squared_relu: bool = setting(False, "squared ReLU in the MLP instead of GELU")
    disable_bias_linear: bool = setting(False, "no bias in the linear layers")
    add_qkv_bias: bool = setting(False, "bias in the QKV projection even with --disable-bias-linear")
    untie_embeddings_and_output_weights: bool = setting(False, "give the output layer its own weight")
    hidden_dropout: float = setting(0.0, "dropout on the residual branches and the embedding")
    attention_dropout: float = setting(0.0, "dropout on the attention probabilities")
    init_method_std: float = setting(0.02, "standard deviation of the initial weights")
    window_size: tuple[int, ...] = setting(
        (), "keys a query sees before itself, and behind: 4095,0; all without, -1 for all", nargs="*"
    )
    window_attn_skip_freq: str | None = setting(
        None, "every N-th layer sees all keys; or a list, 1 for a window: ([1]*5+[0])*4"
    )
    num_experts: int | None = setting(None, "experts of a layer, of which a token takes few; none without")
    moe_ffn_hidden_size: int | None = setting(None, "inner width of an expert; --ffn-hidden-size")
    moe_layer_freq: str = setting(
        "1", "every N-th layer has experts; or a list, 1 for those that have: [0]*1+[1]*23"
    )
    moe_router_topk: int = setting(2, "experts that a token takes")
    moe_router_score_function: str = setting(
        "softmax", "scores of the experts from the router's logits", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = setting(
        False, "softmax over all experts before the choice; over the chosen without"
    )
    moe_router_topk_scaling_factor: float | None = setting(
        None, "the weights of the chosen experts are multiplied by this"
    )
    moe_router_num_groups: int | None = setting(
        None, "groups of experts, for a choice limited to the best --moe-router-group-topk"
    )
    moe_router_group_topk: int | None = setting(None, "groups that a token's experts come from")
    moe_router_load_balancing_type: tuple[str, ...] = setting(
        ("aux_loss",),
        f"what evens the experts' load, one way or more: {', '.join(BALANCING)}; "
        "aux_loss and sinkhorn depend on the micro batch, global_aux_loss on dp, too",
        nargs="*",
    )
    moe_aux_loss_coeff: tuple[float, ...] = setting(
        (0.0,), "weight of the loss that evens the load, one for each way", nargs="*"
    )
    moe_z_loss_coeff: float | None = setting(None, "weight of the loss that keeps the router's logits small")
    moe_router_enable_expert_bias: bool = setting(
        False, "a bias for the choice alone evens the load, without a loss; with sigmoid scores"
    )
    moe_router_bias_update_rate: float = setting(1e-3, "how far that bias moves in a step")
    moe_router_dtype: str | None = setting(
        None, "type of the router's matmul; what follows it is in fp32 anyway", choices=("fp32", "fp64")
    )
    moe_input_jitter_eps: float | None = setting(None, "multiply the router's input by 1 - eps to 1 + eps")
    moe_router_force_load_balancing: bool = setting(
        False, "random experts for every token, to measure speed at an even load"
    )
    moe_token_dispatcher_type: str = setting(
        "allgather",
        "how tokens travel to experts of other ranks",
        choices=("allgather", "alltoall"),
        refused={"flex": "there is no DeepEP; use alltoall"},
    )
    moe_expert_capacity_factor: float | None = setting(
        None, "an expert takes this times its even share of the tokens, and drops others; all without"
    )
    moe_token_drop_policy: str = setting(
        "probs", "which it keeps: those of the largest weight, or the first", choices=("probs", "position")
    )
    moe_pad_expert_input_to_capacity: bool = setting(False, "every expert gets as many rows as it can take")
    moe_permute_fusion: bool = setting(True, "order tokens by expert, and back, each in one kernel")
    moe_grouped_gemm: bool = setting(True, "the matmuls of all experts of a rank in one call; or a loop")
    moe_shared_expert_intermediate_size: int | None = setting(
        None, "inner width of the experts that every token takes, all together; none without"
    )
    moe_shared_expert_gate: bool = setting(False, "each token weighs the shared experts by a sigmoid")
    moe_shared_expert_overlap: bool = setting(
        False,
        "shared experts work while tokens travel; with --moe-token-dispatcher-type alltoall",
        fast_path=True,
    )
    attention_backend: str = setting(
        "auto", "core attention implementation", choices=("auto", "fused", "flash", "unfused")
    )
    masked_softmax_fusion: bool = setting(True, "unfused attention: scale, mask and softmax in one kernel")
    rope_fusion: bool = setting(True, "rotate queries and keys in one kernel, where they lie")
    bias_gelu_fusion: bool = setting(
        True, "GELU in the tanh form of Megatron's fused kernel; exact GELU without it, or without biases"
    )
    bias_swiglu_fusion: bool = setting(True, "both halves of SwiGLU in one kernel")
    persist_layer_norm: bool = setting(True, "norms, with the residual's sum before them, in one kernel")
    sequence_parallel: bool = setting(False, "shard norms and dropout over the tp ranks", "sp")
    cross_entropy_loss_fusion: bool = setting(
        False,
        "output projection and loss in chunks, forward and backward at once: no logits in memory",
        fast_path=True,
    )
    recompute_granularity: str | None = setting(
        None,
        "make activations again in the backward: of some modules or of layers",
        choices=("selective", "full"),
    )
    recompute_modules: tuple[str, ...] = setting(
        ("core_attn",),
        "for selective: core_attn, mlp, mlp_act (SwiGLU or GELU), layernorm, moe, moe_act, shared_experts",
        nargs="*",
    )
    recompute_method: str | None = setting(
        None,
        "for full: every N layers as one, or the first N layers each",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = setting(None, "the N of --recompute-method")
    distribute_saved_activations: bool = setting(
        False, "for full: each tp rank keeps its share of what layers are made again from"
    )

    @property
    def num_kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        h = self.hidden_size
        return self.ffn_hidden_size or (int(8 * h / 3 / 64) * 64 if self.swiglu else 4 * h)

    @property
    def tanh_gelu(self) -> bool:
        """Which GELU: Megatron fuses it with a bias, where there is one, and then in its tanh form."""
        return self.bias_gelu_fusion and not self.disable_bias_linear

    @property
    def moe_ffn_size(self) -> int:
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def moe_layers(self) -> list[bool]:
        """For each layer whether it has experts."""
        if self.num_experts is None:
            return [False] * self.num_layers
        return [bool(n) for n in layer_pattern(str(self.moe_layer_freq), self.num_layers, first=True)]

    def recomputes(self, module: str) -> bool:
        """Whether --recompute-granularity selective names the module."""
        return self.recompute_granularity == "selective" and module in self.recompute_modules

    def segments(self, num_layers: int) -> list[tuple[range, bool]]:
        """The layers of a stage in runs, and whether each run is recomputed as one."""
        if self.recompute_granularity != "full":
            return [(range(num_layers), False)]
        n = self.recompute_num_layers or 1
        if self.recompute_method == "uniform":
            return [(range(i, min(i + n, num_layers)), True) for i in range(0, num_layers, n)]
        n = min(n, num_layers)
        return [(range(i, i + 1), True) for i in range(n)] + [(range(n, num_layers), False)]

    @property
    def windows(self) -> list[int | None]:
        """For each layer how many keys before itself a query sees; None for all."""
        if not self.window_size or self.window_size[0] < 0:
            return [None] * self.num_layers
        windowed = layer_pattern(self.window_attn_skip_freq, self.num_layers)
        return [self.window_size[0] if yes else None for yes in windowed]


def layer_pattern(text: str | None, num_layers: int, first: bool = False) -> list[int]:
    """Megatron's way to say which layers have something: 1 or 0 for each.

    None: all; "N": all but every N-th, or with `first` the first of every N alone; else a list of Python
    numbers joined by + and *: "([1]*5+[0])*4".
    Raises ValueError for anything else, and for a list of another length.
    """

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(int(n)):
                return n
            case ast.List(items):
                return [value(item) for item in items]
            case ast.BinOp(left, ast.Add(), right):
                return value(left) + value(right)
            case ast.BinOp(left, ast.Mult(), right):
                left, right = value(left), value(right)
                if isinstance(right, int) and right <= num_layers:
                    return left * right
        raise ValueError

    try:
        found = 1 if text is None else value(ast.parse(text, mode="eval").body)
        if isinstance(found, int) and found > 0 and first:
            return [int(i % found == 0) for i in range(num_layers)]
        if isinstance(found, int) and found > 0:
            return [1 if text is None else int((i + 1) % found != 0) for i in range(num_layers)]
        if len(found) == num_layers and set(found) <= {0, 1}:
            return found
    except (ValueError, SyntaxError, TypeError):
        pass
    raise ValueError(f"{text}: must be a number N, or a list of {num_layers} ones and zeros")

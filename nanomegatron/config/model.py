"""The settings of a model, and Megatron's patterns that choose some of its layers.

value               --window-attn-skip-freq: a window     --moe-layer-freq: experts instead of an MLP
(none)              all layers                            all layers
N                   all but every N-th                    every N-th, from the first on
"([1]*5+[0])*4"     those with a 1                        those with a 1

--no-rope-freq N leaves every N-th layer without rotary embedding, a list those with a 1.
"""

import ast
import functools
import math
from dataclasses import dataclass
from typing import Any

from nanomegatron.config.keywords import with_megatron_keywords
from nanomegatron.config.rules import common, setting

WIDEST = 2**20  # hidden size
MAX_EXPERTS = 1024  # as cuda/permute.cu has it
MOE, SHARED = "--num-experts", "--moe-shared-expert-intermediate-size"
CAPACITY, ALL_TO_ALL = "--moe-expert-capacity-factor", "--moe-token-dispatcher-type alltoall"
SINKHORN, SIGMOID = "--moe-router-load-balancing-type sinkhorn", "--moe-router-score-function sigmoid"
GROUPS, GROUP_TOPK = "--moe-router-num-groups", "--moe-router-group-topk"
BIAS, ROPE = "--moe-router-enable-expert-bias", "--position-embedding-type rope"
ROTARY, RMS = "--position-embedding-type rope or yarn", "--normalization RMSNorm"
moe = functools.partial(setting, part_of=MOE)
recompute = functools.partial(setting, part_of="--recompute-granularity full", resumable=True)
fusion = functools.partial(setting, True, resumable=True)


@with_megatron_keywords
@dataclass(frozen=True)
class TransformerConfig:
    """The shape of the model. Families (GPT, Llama, Mixtral, Qwen) differ only in these values."""

    num_layers: int | None = common(None, "number of transformer layers", at_most=10**4, required=True)
    hidden_size: int | None = common(None, "width of the residual stream", at_most=WIDEST, required=True)
    num_attention_heads: int | None = common(None, "number of query heads", at_most=WIDEST, required=True)
    ffn_hidden_size: int | None = common(
        None, "inner MLP width; default 4h, with --swiglu int(8h/3/64)*64 (h=hidden size)", at_most=8 * WIDEST
    )
    kv_channels: int | None = setting(
        None, "width of one attention head; default hidden size / heads", at_most=WIDEST
    )
    num_query_groups: int = common(0, "number of key/value heads; 0 means one per query head (MHA)")
    max_position_embeddings: int | None = setting(
        None, "maximum context length in tokens; default --seq-length", at_least="--seq-length"
    )
    position_embedding_type: str = common(
        "learned_absolute", "type of position embedding", choices="learned_absolute rope yarn none"
    )
    rotary_base: float = setting(10000.0, "base of the rotary frequencies")
    rotary_percent: float = setting(1.0, "fraction of each head's features to rotate", at_most=1)
    rotary_interleaved: bool = setting(False, "rotate neighbouring features instead of the two halves")
    rotary_seq_len_interpolation_factor: float = setting(1.0, "rope: divide positions by this", needs=ROPE)
    use_rope_scaling: bool = setting(False, "scale low frequencies for long contexts (Llama 3.1)", needs=ROPE)
    rope_scaling_factor: float = setting(8.0, "context extension factor of --use-rope-scaling")
    rotary_scaling_factor: float = setting(1.0, "yarn: extended context length / original")
    yarn_original_max_position_embeddings: int = setting(4096, "yarn: context length of the pretraining")
    yarn_beta_fast: float = setting(
        32.0, "yarn: keep frequencies with more turns than this (original context)", above="--yarn-beta-slow"
    )
    yarn_beta_slow: float = setting(1.0, "yarn: interpolate frequencies with fewer turns than this")
    yarn_correction_range_round_to_int: bool = setting(True, "yarn: round the two bounds to whole features")
    mscale: float = setting(
        1.0, "yarn: multiply cos and sin by 0.1 * mscale * log(factor) + 1", above=-math.inf
    )
    mscale_all_dim: float = setting(0.0, "yarn: like --mscale, but divides cos and sin", above=-math.inf)
    no_rope_freq: str | None = setting(
        None, "no rotary embedding in each N-th layer; or a list like [0]*3+[1], 1: none", needs=ROTARY
    )
    rotary_base_local: float | None = setting(
        None,
        "base of the rotary frequencies in layers with a window, which are not scaled (Gemma 3)",
        needs=(ROTARY, "--window-size"),
    )
    normalization: str = common("LayerNorm", "type of all norm layers", choices="LayerNorm RMSNorm")
    norm_epsilon: float = setting(1e-5, "added to the variance inside a norm")
    norm_placement: str = setting(
        "pre", "norms before attention and MLP, after them (OLMo 2), or both (Gemma)", choices="pre post both"
    )
    qk_layernorm: bool = setting(False, "normalize each query and key head (Qwen3)")
    qk_layernorm_all_heads: bool = setting(
        False, "normalize all query heads together, and all key heads (OLMo 2)", needs=("--qk-layernorm", RMS)
    )
    apply_layernorm_1p: bool = setting(False, "store norm weights as their difference from 1")
    swiglu: bool = common(False, "gated MLP with SiLU, as in Llama; default GELU", excludes="--squared-relu")
    geglu: bool = setting(False, "gated MLP with tanh GELU (Gemma)", excludes="--swiglu or --squared-relu")
    squared_relu: bool = setting(False, "squared ReLU in the MLP instead of GELU")
    disable_bias_linear: bool = common(False, "no bias in the linear layers")
    add_qkv_bias: bool = setting(False, "bias in the QKV projection even with --disable-bias-linear")
    untie_embeddings_and_output_weights: bool = common(False, "give the output layer its own weight")
    embedding_multiplier: float = setting(1.0, "multiply the word embeddings by this (Granite, Gemma)")
    residual_multiplier: float = setting(1.0, "multiply what attention and MLP add by this (Granite)")
    logits_scaling: float = setting(1.0, "divide the logits by this (Granite)")
    softmax_scale: float | None = setting(
        None, "multiply attention scores by this; default 1 / sqrt(--kv-channels)"
    )
    attn_logit_softcapping: float | None = setting(
        None,
        "bound attention scores: x to cap * tanh(x / cap) (Gemma 2)",
        excludes="--attention-backend fused or flash; only unfused bounds scores",
    )
    final_logit_softcapping: float | None = setting(
        None, "bound logits likewise", excludes="--cross-entropy-loss-fusion"
    )
    hidden_dropout: float = setting(0.0, "dropout on the residual branches and the embedding", below=1)
    attention_dropout: float = setting(0.0, "dropout on the attention probabilities", below=1)
    init_method_std: float = setting(0.02, "standard deviation of the initial weights", at_least=0)
    window_size: tuple[int, ...] = setting(
        (), "sliding window N 0: a query sees its own key and the N before it (-1: all)", count=2, at_least=-1
    )
    window_attn_skip_freq: str | None = setting(
        None, "full attention in each N-th layer; or a list like [1]*5+[0], 1: window", needs="--window-size"
    )
    num_experts: int | None = common(
        None,
        "experts of each MoE layer, over all ep ranks; default no MoE",
        at_most=MAX_EXPERTS,
        brings="--sequence-parallel if --tensor-model-parallel-size greater than 1",
    )
    moe_ffn_hidden_size: int | None = moe(None, "inner width of an expert; default --ffn-hidden-size")
    moe_layer_freq: str = moe("1", "MoE in each N-th layer; or a list like [0]*1+[1]*23, 1: MoE")
    moe_router_topk: int = moe(2, "experts per token", at_most=MOE, most_used=True)
    moe_router_score_function: str = moe("softmax", "function of router scores", choices="softmax sigmoid")
    moe_router_pre_softmax: bool = moe(False, "softmax before the top-k, not after it", excludes=SIGMOID)
    moe_router_topk_scaling_factor: float | None = moe(None, "multiply the routing weights by this")
    moe_router_num_groups: int | None = moe(
        None, "group-limited routing: number of groups of experts", needs=GROUP_TOPK, excludes=SINKHORN
    )
    moe_router_group_topk: int | None = moe(
        None, "group-limited routing: groups that a token is routed to", at_most=GROUPS, needs=GROUPS
    )
    moe_router_load_balancing_type: tuple[str, ...] = moe(
        ("aux_loss",),
        "balance experts by losses of a microbatch, a sequence (seq_) or a step (global_), or by sinkhorn",
        choices="aux_loss seq_aux_loss global_aux_loss sinkhorn none",
        excludes={"seq_aux_loss": "--variable-seq-lengths, which packs samples; give aux_loss"},
    )
    moe_aux_loss_coeff: tuple[float, ...] = moe((0.0,), "weight of each load balancing loss", at_least=0)
    moe_z_loss_coeff: float | None = moe(None, "weight of the router's z-loss", at_least=0)
    moe_router_enable_expert_bias: bool = moe(
        False,
        "balance experts by a bias in the choice of the top-k, without a loss (DeepSeek-V3)",
        needs=SIGMOID,
        excludes=SINKHORN,
    )
    moe_router_bias_update_rate: float = moe(1e-3, "step size of the expert bias", at_least=0, needs=BIAS)
    moe_router_dtype: str | None = moe(None, "router's matmul type; default the model's", choices="fp32 fp64")
    moe_input_jitter_eps: float | None = moe(
        None, "multiply router inputs by factors in 1 +- eps", at_least=0, below=1
    )
    moe_router_force_load_balancing: bool = moe(
        False, "route to random experts in training, to benchmark with a balanced load"
    )
    moe_token_dispatcher_type: str = moe(
        "allgather",
        "how tokens are sent to experts on other ranks",
        choices="allgather alltoall",
        refused={"flex": "there is no DeepEP; use alltoall"},
        resumable=True,
    )
    moe_expert_capacity_factor: float | None = moe(
        None, "drop tokens above this multiple of an expert's even share; default none", excludes=SINKHORN
    )
    moe_token_drop_policy: str = moe("probs", "tokens to keep", choices="probs position", needs=CAPACITY)
    moe_pad_expert_input_to_capacity: bool = moe(
        False, "pad each expert's tokens to the capacity", needs=CAPACITY, resumable=True
    )
    moe_permute_fusion: bool = moe(True, "permute and unpermute tokens in one kernel each", resumable=True)
    moe_grouped_gemm: bool = moe(True, "compute a rank's experts in one grouped matmul", resumable=True)
    moe_shared_expert_intermediate_size: int | None = moe(
        None,
        "total inner width of the shared experts; default none",
        excludes="--moe-use-upcycling; dense models have none",
    )
    moe_shared_expert_gate: bool = moe(False, "scale shared experts' output by a sigmoid gate", needs=SHARED)
    moe_shared_expert_overlap: bool = moe(
        False,
        "run the shared experts during dispatch and combine",
        needs=(SHARED, ALL_TO_ALL),
        fast_path=True,
        resumable=True,
    )
    attention_backend: str = setting(
        "auto", "core attention kernel", choices="auto fused flash unfused", resumable=True
    )
    masked_softmax_fusion: bool = fusion("unfused attention: scale, mask and softmax in one kernel")
    rope_fusion: bool = fusion("rotate queries and keys in place, in one kernel")
    bias_gelu_fusion: bool = setting(True, "GELU in its tanh form, where linear layers have biases")
    bias_swiglu_fusion: bool = fusion("SwiGLU in one kernel")
    bias_dropout_fusion: bool = fusion("bias and dropout of a branch in the kernel of the residual add")
    persist_layer_norm: bool = fusion("residual add and norm in one kernel")
    sequence_parallel: bool = common(
        False,
        "sequence parallelism: shard norms and dropout over tp, along the sequence",
        "sp",
        resumable=True,
    )
    cross_entropy_loss_fusion: bool = setting(
        False, "compute output layer and loss in chunks, without full logits", fast_path=True, resumable=True
    )
    recompute_granularity: str | None = common(
        None,
        "recompute activations in the backward: of some modules, or of whole layers",
        choices="selective full",
        needs={"selective": "--recompute-modules", "full": ("--recompute-method", "--recompute-num-layers")},
        brings={"full": ("--recompute-method uniform", "--recompute-num-layers 1")},
        resumable=True,
    )
    recompute_modules: tuple[str, ...] = recompute(
        ("core_attn",),
        "modules to recompute with --recompute-granularity selective",
        choices="core_attn mlp mlp_act layernorm moe moe_act shared_experts",
        part_of="--recompute-granularity selective",
        needs={"moe": MOE, "moe_act": MOE, "shared_experts": SHARED},
    )
    recompute_method: str | None = recompute(
        None, "recompute all layers in groups of N, or the first N of a stage", choices="uniform block"
    )
    recompute_num_layers: int | None = recompute(None, "number N of --recompute-method")
    distribute_saved_activations: bool = recompute(False, "shard saved inputs of recomputed layers over tp")

    @property
    def num_kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        h = self.hidden_size
        return self.ffn_hidden_size or (int(8 * h / 3 / 64) * 64 if self.gated else 4 * h)

    @property
    def gated(self) -> bool:
        """Whether the MLP's first layer has two parts, gate and up."""
        return self.swiglu or self.geglu

    @property
    def backend(self) -> str:
        """--attention-backend, or the only one that bounds scores."""
        return "unfused" if self.attn_logit_softcapping else self.attention_backend

    @property
    def tanh_gelu(self) -> bool:
        """Whether GELU has its tanh form, which Megatron's kernel for bias and GELU computes."""
        return self.bias_gelu_fusion and not self.disable_bias_linear

    @property
    def moe_ffn_size(self) -> int:
        return self.moe_ffn_hidden_size or self.ffn_size

    @functools.cached_property
    def moe_layers(self) -> list[bool]:
        """Whether each layer has experts."""
        if self.num_experts is None:
            return [False] * self.num_layers
        return [bool(n) for n in layer_pattern(str(self.moe_layer_freq), self.num_layers, first=True)]

    def check_variants(self, part: str, picked: bool) -> None:
        """Raise RuntimeError if flags ask for variants of a part of the model that nothing has picked."""
        if picked:
            return
        kinds = {"sinkhorn", "seq_aux_loss", "global_aux_loss"}
        asked = {
            "attention": {
                "--attn-logit-softcapping": self.attn_logit_softcapping,
                "--qk-layernorm-all-heads": self.qk_layernorm_all_heads,
            },
            "router": {
                "--moe-input-jitter-eps": self.moe_input_jitter_eps,
                "--moe-router-force-load-balancing": self.moe_router_force_load_balancing,
                "--moe-router-group-topk": self.moe_router_group_topk,
                "--moe-expert-capacity-factor": self.moe_expert_capacity_factor,
                "--moe-router-load-balancing-type": kinds.intersection(self.moe_router_load_balancing_type),
            },
            "output layer": {"--final-logit-softcapping": self.final_logit_softcapping},
        }[part]
        if flags := [flag for flag, value in asked.items() if value]:
            raise RuntimeError(
                f"{', '.join(flags)}: the {part} needs a variant; call pick_variants on the model"
            )

    def recomputes(self, module: str) -> bool:
        """Whether --recompute-granularity selective names the module."""
        return self.recompute_granularity == "selective" and module in self.recompute_modules

    def segments(self, num_layers: int) -> list[tuple[range, bool]]:
        """Divide the layers of a stage into runs -> (layers, whether recomputed as one) of each."""
        if self.recompute_granularity != "full":
            return [(range(num_layers), False)]
        n = self.recompute_num_layers or 1
        if self.recompute_method == "uniform":
            return [(range(i, min(i + n, num_layers)), True) for i in range(0, num_layers, n)]
        n = min(n, num_layers)
        return [(range(i, i + 1), True) for i in range(n)] + [(range(n, num_layers), False)]

    @property
    def windows(self) -> list[int | None]:
        """For each layer the number of keys before its own that a query sees; None: all."""
        if not self.window_size or self.window_size[0] < 0:
            return [None] * self.num_layers
        return [
            self.window_size[0] if windowed else None
            for windowed in layer_pattern(self.window_attn_skip_freq, self.num_layers)
        ]

    @property
    def rotary_kinds(self) -> list[str | None]:
        """Which rotary embedding each layer has: "global", "local" with --rotary-base-local, None: none."""
        if self.position_embedding_type not in ("rope", "yarn"):
            return [None] * self.num_layers
        text = None if self.no_rope_freq is None else str(self.no_rope_freq)
        rotated = layer_pattern(text, self.num_layers)
        if text and "[" in text:  # a list has a 1 where a number has a 0
            rotated = [1 - n for n in rotated]
        kinds = ["local" if self.rotary_base_local and w is not None else "global" for w in self.windows]
        return [kind if yes else None for kind, yes in zip(kinds, rotated, strict=True)]


@functools.lru_cache(maxsize=64)
def layer_pattern(text: str | None, num_layers: int, first: bool = False) -> list[int]:
    """Return 1 or 0 for each layer. A number N: 0 for every N-th; `first`: 1 for the first of every N.

    Raises ValueError for text that is neither a number nor a list of `num_layers` ones and zeros.
    """
    if text is None:
        return [1] * num_layers
    try:
        found = _value(ast.parse(text, mode="eval").body, num_layers)
        if isinstance(found, int) and found > 0:
            return [int(i % found == 0 if first else (i + 1) % found != 0) for i in range(num_layers)]
        if len(found) == num_layers and set(found) <= {0, 1}:
            return found
    except (ValueError, SyntaxError, TypeError):
        pass
    raise ValueError(f"{text}: must be a number N, or a list of {num_layers} ones and zeros")


def _value(node: ast.expr, limit: int) -> Any:
    """A number, or a list of Python numbers joined by + and *, none repeated more often than `limit`."""
    match node:
        case ast.Constant(int(n)):
            return n
        case ast.List(items):
            return [_value(item, limit) for item in items]
        case ast.BinOp(left, ast.Add(), right):
            return _value(left, limit) + _value(right, limit)
        case ast.BinOp(left, ast.Mult(), ast.Constant(int(n))) if n <= limit:
            return _value(left, limit) * n
    raise ValueError

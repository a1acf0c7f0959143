"""The FLOPs of a training step, and the share of the GPUs' peak that they reach.

Model FLOP/s utilisation (MFU, PaLM, arXiv:2204.02311 appendix B) is one division,

    MFU = FLOPs of the model for one step / (seconds * GPUs * peak FLOP/s of one GPU)

but its numerator is a matter of convention. All agree on 6 FLOPs per token and matrix weight (2 forward, 4
backward); they differ in which weights count and in how much of the S x S attention scores. Recomputation
never counts. Of the experts those that a token uses count, the router only with 6n. Keys outside a sliding
window count only in the full square; keys of other documents in a row always do (with --variable-seq-lengths
a document is a row). Llama-3-8B, GFLOPs per token:

    convention        weights                    attention     S 4096   S 8192   used by
    megatron          matmuls (LM head too)      causal half    48.25    51.47   Megatron; our headline
    full-attention    matmuls (LM head too)      full square    51.47    57.91   torchtitan, nanotron
    6n-causal         all, embedding, norms too  causal half    51.40    54.62   llm.c
    6n                all, embedding, norms too  full square    54.62    61.07   picotron, nanoGPT

The same run thus differs by up to 18.6 % between papers: never compare two MFUs without their conventions.
"""

import math
from collections.abc import Iterable
from functools import lru_cache

from nanomegatron.config import split
from nanomegatron.config.settings import Config, TransformerConfig

CONVENTIONS = ("megatron", "full-attention", "6n-causal", "6n")  # the first is the headline


def layer_matmul_parameters(model: TransformerConfig, tp: int = 1, ffn: int | None = None) -> int:
    """Count the matrix weights of a layer on one of `tp` ranks: QKV, projection, both MLP matrices.

    If there are fewer key/value heads than ranks, each rank holds one of them (replicated). ffn: width of the
    MLP, if not that of the dense layers.
    """
    h, ffn = model.hidden_size, (model.ffn_size if ffn is None else ffn) // tp
    query = model.num_attention_heads * model.head_dim // tp
    key_value = 2 * max(model.num_kv_heads // tp, 1) * model.head_dim
    return h * (query + key_value) + query * h + h * ffn * (3 if model.gated else 2)


def expert_parameters(model: TransformerConfig, experts: int, etp: int = 1) -> int:
    """Count the parameters of `experts` experts of a layer on one of `etp` ranks."""
    h, f, parts = model.hidden_size, model.moe_ffn_size // etp, 2 if model.gated else 1
    return experts * (h * f * (parts + 1) + (parts * f + h) * (not model.disable_bias_linear))


def parameter_count(
    model: TransformerConfig,
    vocab_size: int,
    tp: int = 1,
    layers: Iterable[int] | None = None,
    first: bool = True,
    last: bool = True,
    experts: int | None = None,
) -> int:
    """Count the parameters on one of `tp` ranks, those of the whole model with tp 1.

    Matrices and the biases of column-parallel layers are sharded, norms, positions and the other biases
    replicated. vocab_size: the tokenizer's or the padded one, whichever is to count. For a pipeline rank:
    its layers (None: all), and whether it has the first stage (embedding) and the last one (norm, output
    weight). experts: the number counted per layer (None: all); `moe_router_topk` for those of a token.
    """
    h, d = model.hidden_size, model.head_dim
    norm = h if model.normalization == "RMSNorm" else 2 * h  # weight, or weight and bias
    biases, parts = not model.disable_bias_linear, 2 if model.gated else 1
    norms = 4 if model.norm_placement == "both" else 2
    layer = layer_matmul_parameters(model, tp, 0) + norms * norm + h * biases
    if model.qk_layernorm:
        heads = (model.num_attention_heads, model.num_kv_heads) if model.qk_layernorm_all_heads else (1, 1)
        layer += sum(heads) * norm * d // h
    if model.add_qkv_bias or biases:
        layer += (model.num_attention_heads // tp + 2 * max(model.num_kv_heads // tp, 1)) * d

    def mlp(width: int) -> int:
        return width // tp * (h * (parts + 1) + parts * biases) + h * biases

    moe, dense, shared = 0, mlp(model.ffn_size), model.moe_shared_expert_intermediate_size
    if model.num_experts:
        moe = expert_parameters(model, model.num_experts if experts is None else experts)
        moe += (h + biases) * model.num_experts
        moe += mlp(shared) + h * model.moe_shared_expert_gate if shared else 0
    sparse, which = model.moe_layers, range(model.num_layers) if layers is None else layers
    total = sum(layer + (moe if sparse[i] else dense) for i in which)
    tables = first + last if model.untie_embeddings_and_output_weights else first or last
    positions = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
    ends = norm * last + h * (tables * vocab_size // tp + positions * first)
    return total + ends


@lru_cache(maxsize=64)
def flops_per_iteration(
    model: TransformerConfig,
    padded_vocab_size: int,
    seq_length: int,
    batch_size: int,
    convention: str = "megatron",
) -> int:
    """Count the model's FLOPs for forward and backward of `batch_size` sequences, over all ranks together.

    Raises ValueError for a convention that is not in CONVENTIONS (the module's docstring defines them).
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"FLOP convention {convention!r} is unknown; choose one of {', '.join(CONVENTIONS)}")
    if convention.startswith("6n"):
        weights = parameter_count(model, padded_vocab_size, experts=model.moe_router_topk)
    else:
        own = model.moe_router_topk * model.moe_ffn_size + (model.moe_shared_expert_intermediate_size or 0)
        layers = (layer_matmul_parameters(model, ffn=own if moe else None) for moe in model.moe_layers)
        weights = sum(layers) + model.hidden_size * padded_vocab_size
    # Scores and weighted sum are 2 * width multiply-adds for a query and each key that it sees.
    causal = convention in ("megatron", "6n-causal")
    keys = sum(_keys(seq_length, window if causal else None) for window in model.windows)
    attention = keys * (1 if causal else 2) * model.num_attention_heads * model.head_dim
    return 6 * batch_size * (seq_length * weights + attention)


def stage_layers(config: Config, padded_vocab_size: int) -> list[range]:
    """Return the layers of each stage of a resolved config; splits by cost count the output layer's FLOPs."""
    model, length = config.model, config.data.seq_length
    layers, whole = (flops_per_iteration(model, vocab, length, 1) for vocab in (0, padded_vocab_size))
    return split.stage_ranges(config.parallel, model.num_layers, (whole / layers - 1) * model.num_layers)


def _keys(s: int, window: int | None) -> int:
    """Return twice the keys that s queries see: s * s by the usual count, fewer with a window."""
    last = s if window is None else min(s, window + 1)
    return 2 * last * s - last * last


def mfu(flops: float, seconds: float, world: int, peak: float | None) -> float | None:
    """Share (0..1) of `world` devices' peak FLOP/s that a step reached; None if the peak is unknown."""
    return None if peak is None else flops / (seconds * world * peak)


def bits_per_byte(loss: float, tokens: int, num_bytes: int) -> float:
    """Convert a mean loss in nats per token to bits per byte of text, comparable across tokenizers."""
    return loss * tokens / (math.log(2) * num_bytes)

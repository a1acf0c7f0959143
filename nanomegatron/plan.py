"""What a run needs, before it starts: the memory of one rank.

Sixteen or eighteen bytes a parameter (ZeRO, arXiv:1910.02054, section 3.1), on every dp rank alike:

    type         weights   main weights   main_grad   Adam moments
    fp32            4           -             4            8
    bf16, fp16      2           4             4            8

and what the forward pass of one microbatch keeps for its backward, nothing being recomputed. A layer keeps,
in values a token, with n the query, g the key/value and f the FFN width of one tp rank:

    norm inputs        2h          these are the residual sums; a CPU's RMSNorm keeps x and x/rms, in fp32
    norm outputs       2h          which QKV and fc1 multiply
    QKV output         n + 2g      as long as attention or a q/k norm reads it in place
    q/k norm           n + g       only a CPU's RMSNorm, as above
    q, k, v            n + g       q and k where rotation or norm made new ones, v in the QKV output;
                       3n          `unfused` makes all anew, the others k and v too for grouped queries,
                                   a head for each query head; `fused` reads groups as they are
    attention output   n
    scores             heads * s   `unfused` alone: softmax in fp32, and in the type of the weights
    MLP                4f or 2f    SwiGLU: gate and up, silu(gate), product; GELU: before and after
    dropout masks      2h          with --hidden-dropout
    statistics         fp32        1 or 2 a norm (of each head, for a q/k norm), log-sum-exp of each head

At the end come the last norm, the logits with their gradient, and the loss in fp32, a chunk of tokens at a
time; there the memory is at its peak. (The same count for a model of 2022: arXiv:2205.05198, section 4.)
What torch itself takes is not in it: some 0.3 GiB of a process on a CPU, more of a GPU.
"""

import torch

from nanomegatron.attention import choose_backend
from nanomegatron.config import Config, TransformerConfig, padded_vocab_size
from nanomegatron.metrics import parameter_count
from nanomegatron.tp import CrossEntropyFunction


def memory(config: Config, vocab_size: int, device: torch.device | None = None) -> dict[str, float]:
    """Bytes of one rank by part at the peak of a step; config resolved, vocab_size without padding.

    device: where the run is to be, else what --device means on this machine. Nothing is sharded over dp.
    """
    tp, dtype = config.parallel.tensor_model_parallel_size, getattr(torch, config.dtype_name)
    device = device or _device(config)
    vocab = padded_vocab_size(vocab_size, config.data.make_vocab_size_divisible_by, tp)
    params = parameter_count(config.model, vocab, tp)
    return {
        "weights": params * dtype.itemsize,
        "main weights": params * 4 if dtype.itemsize < 4 else 0,
        "gradients": params * 4,
        "Adam moments": params * 8,
        "activations": activations(config, dtype, device),
        "logits and loss": logits_and_loss(config, vocab // tp, dtype),
    }


def describe(parts: dict[str, float]) -> str:
    """One line: the sum in GiB and the share of each part."""
    total = sum(parts.values())
    shares = ", ".join(f"{name} {100 * size / total:.0f} %" for name, size in parts.items() if size)
    return f"predicted peak per rank {total / 2**30:.2f} GiB ({shares})"


def activations(config: Config, dtype: torch.dtype, device: torch.device) -> float:
    """Bytes that one microbatch keeps from the embedding to the last norm."""
    model, e = config.model, dtype.itemsize
    tokens = config.data.seq_length * config.data.micro_batch_size
    layer = sum(saved_by_layer(config, dtype, device).values())
    last_norm = (_norm_input(model, dtype, device) + e) * model.hidden_size
    embedding_mask = e * model.hidden_size * (model.hidden_dropout > 0)
    return tokens * (model.num_layers * layer + last_norm + embedding_mask)


def saved_by_layer(config: Config, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Bytes a token that one layer keeps for its backward: the table of the module's docstring."""
    model, tp, e = config.model, config.parallel.tensor_model_parallel_size, dtype.itemsize
    heads, groups = model.num_attention_heads // tp, max(model.num_kv_heads // tp, 1)
    h, n, g = model.hidden_size, heads * model.head_dim, groups * model.head_dim
    backend = choose_backend(model.attention_backend, device, dtype, model.attention_dropout)
    kept = _norm_input(model, dtype, device)

    unfused = backend == "unfused"
    new_qk = unfused or model.qk_layernorm or model.position_embedding_type in ("rope", "yarn")
    new_kv = unfused or (g < n and backend != "fused")  # as wide as q
    copied = kept > e and e < 4  # norms keep fp32 copies of their inputs, not these
    numbers = 1 if model.normalization == "RMSNorm" else 2
    return {
        "norm inputs": 2 * kept * h,
        "norm outputs": 2 * e * h,
        "QKV output": e * (n + 2 * g) * (not new_kv or not new_qk or (model.qk_layernorm and not copied)),
        "q/k norm": (kept if copied else kept - e) * (n + g) * model.qk_layernorm,
        "q, k, v": e * (n * new_qk + 2 * n * new_kv + g * (new_qk and not new_kv)),
        "attention output": e * n,
        "scores": heads * config.data.seq_length * _score(model, e) * unfused,
        "MLP": e * (4 if model.swiglu else 2) * (model.ffn_size // tp),
        "dropout masks": 2 * e * h * (model.hidden_dropout > 0),
        "statistics": 4 * (numbers * (2 + (heads + groups) * model.qk_layernorm) + heads * (not unfused)),
    }


def logits_and_loss(config: Config, columns: int, dtype: torch.dtype) -> float:
    """Bytes of `columns` logits a token, their gradient, and the fp32 chunk from which the gradient comes."""
    tokens, e = config.data.seq_length * config.data.micro_batch_size, dtype.itemsize
    chunk = min(tokens, CrossEntropyFunction.chunk) * (8 if e < 4 else 4)
    return columns * (2 * e * tokens + chunk)


def _norm_input(model: TransformerConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes a value that a norm keeps: its input, or where torch has no fused kernel two fp32 tensors."""
    return 8 if model.normalization == "RMSNorm" and device.type == "cpu" else dtype.itemsize


def _score(model: TransformerConfig, e: int) -> int:
    """Bytes a score of unfused attention: fp32 softmax, its copy in 16 bits, dropout's mask and result."""
    return 4 + e * (e < 4) + (1 + e) * (model.attention_dropout > 0)


def _device(config: Config) -> torch.device:
    return torch.device("cuda" if config.run.device != "cpu" and torch.cuda.is_available() else "cpu")

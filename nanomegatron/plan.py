"""What a run needs, before it starts: the memory of one rank.

Bytes a parameter of this rank's share of the model (ZeRO, arXiv:1910.02054, section 3.1); d ranks share the
optimizer states with `optim` and `optim_grads`, the gradients too with `optim_grads`, which then needs some
buckets of gradients in use:

    type         weights   main weights   main_grad   Adam moments
    fp32            4           -             4           8/d
    bf16, fp16      2          4/d         4, 4/d         8/d        less with bf16 gradients and moments

and what the forward pass of one microbatch keeps for its backward. A layer keeps, in values a token, with n
the query, g the key/value and f the FFN width of one tp rank, and with sequence parallelism of those rows
marked * the tp-th part:

    norm inputs  *      2h          these are the residual sums; a CPU's RMSNorm keeps x and x/rms, in fp32
    norm outputs *      2h          which QKV and fc1 multiply; none if `layernorm` is made again
    QKV output          n + 2g      as long as attention or a q/k norm reads it in place
    q/k norm            n + g       only a CPU's RMSNorm, as above
    q, k, v             n + g       q and k where rotation or norm made new ones, v in the QKV output;
                        3n          `unfused` makes all anew, the others k and v too for grouped queries,
                                    a head for each query head; `fused` reads groups as they are
    attention output    n
    scores              heads * s   `unfused` alone: softmax in fp32, and in the type of the weights
    MLP                 4f or 2f    SwiGLU: gate and up, silu(gate), product; GELU: before and after; one f
                                    less if `mlp_act` is made again, none with `mlp`
    dropout masks *     2h          with --hidden-dropout
    statistics          fp32        1 or 2 a norm (of each head, for a q/k norm), log-sum-exp of each head

Layers that are recomputed as a whole keep their input alone, and one such group is whole again in the
backward. At the end come the last norm, the logits with their gradient, and the loss in fp32, a chunk of
tokens at a time, or with fused loss a chunk of all of it; there the memory is at its peak. (The same count
for a model of 2022: arXiv:2205.05198, section 4.)
What torch itself takes is not in it: some 0.3 GiB of a process on a CPU, more of a GPU.
"""

import torch

from nanomegatron.attention import choose_backend
from nanomegatron.config import Config, TransformerConfig, padded_vocab_size
from nanomegatron.dp import IN_FLIGHT, bucket_size
from nanomegatron.metrics import parameter_count
from nanomegatron.model_recompute import segments
from nanomegatron.tp_loss import CrossEntropyFunction, FusedLossFunction


def memory(config: Config, vocab_size: int, device: torch.device | None = None) -> dict[str, float]:
    """Bytes of one rank by part at the peak of a step; config resolved, vocab_size without padding.

    device: where the run is to be, else what --device means on this machine.
    """
    tp, dtype = config.parallel.tensor_model_parallel_size, getattr(torch, config.dtype_name)
    device = device or _device(config)
    vocab = padded_vocab_size(vocab_size, config.data.make_vocab_size_divisible_by, tp)
    params = parameter_count(config.model, vocab, tp)
    loss = logits_and_loss(config, vocab // tp, dtype)
    kept, again = activations(config, dtype, device)
    return {
        **states(config, params, dtype),
        "activations": kept,
        "logits and loss": loss,
        "layers made again": max(0, again - loss),
        "tp buffers": tp_buffers(config, dtype) if device.type == "cuda" else 0,
    }


def states(config: Config, params: int, dtype: torch.dtype) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer of a rank with so many parameters."""
    parallel, optimizer = config.parallel, config.optimizer
    ranks = (parallel.data_parallel_size or 1) * parallel.context_parallel_size
    shared = ranks if parallel.sharding != "no_shard" else 1
    here = 1 - optimizer.optimizer_offload_fraction * optimizer.optimizer_cpu_offload
    grads = params * getattr(torch, config.grad_dtype_name).itemsize
    if parallel.sharding == "optim_grads":
        some = 2 + (IN_FLIGHT if parallel.overlap_grad_reduce else 0)
        in_use = some * min(bucket_size(parallel, ranks), params)
        grads = params * 4 / ranks + min(params, in_use) * getattr(torch, config.grad_dtype_name).itemsize
    moments = sum(
        4 if kind == "fp32" else 2 for kind in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
    )
    return {
        "weights": params * dtype.itemsize,
        "main weights": params * 4 * here / shared if dtype.itemsize < 4 else 0,
        "gradients": grads,
        "Adam moments": params * moments * here / shared,
    }


def describe(parts: dict[str, float]) -> str:
    """One line: the sum in GiB and the share of each part."""
    total = sum(parts.values())
    shares = ", ".join(f"{name} {100 * size / total:.0f} %" for name, size in parts.items() if size)
    return f"predicted peak per rank {total / 2**30:.2f} GiB ({shares})"


def activations(config: Config, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Bytes that one microbatch keeps from the embedding to the last norm, and of a group made again."""
    model, e, cut = config.model, dtype.itemsize, _cut(config)
    tokens = config.data.seq_length * config.data.micro_batch_size
    layer = sum(saved_by_layer(config, dtype, device).values())
    last_norm = (_norm_input(model, dtype, device) + e) * model.hidden_size / cut
    embedding_mask = e * model.hidden_size / cut * (model.hidden_dropout > 0)
    spread = config.parallel.tensor_model_parallel_size if model.distribute_saved_activations else cut
    groups = segments(model, model.num_layers)
    kept = sum(e * model.hidden_size / spread if again else layer * len(run) for run, again in groups)
    most = max((len(run) for run, again in groups if again), default=0)
    return tokens * (kept + last_norm + embedding_mask), tokens * most * layer


def _cut(config: Config) -> int:
    """Over how many ranks the residual stream is cut along the sequence."""
    return config.parallel.tensor_model_parallel_size if config.model.sequence_parallel else 1


def saved_by_layer(config: Config, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Bytes a token that one layer keeps for its backward: the table of the module's docstring."""
    model, tp, e = config.model, config.parallel.tensor_model_parallel_size, dtype.itemsize
    heads, groups = model.num_attention_heads // tp, max(model.num_kv_heads // tp, 1)
    h, n, g = model.hidden_size / _cut(config), heads * model.head_dim, groups * model.head_dim
    backend = choose_backend(model.attention_backend, device, dtype, model.attention_dropout)
    kept = _norm_input(model, dtype, device)

    inner = (3 if model.swiglu else 1) + (not model.recomputes("mlp_act"))
    attends_again = model.recomputes("core_attn")
    unfused = backend == "unfused" and not attends_again
    new_qk = unfused or model.qk_layernorm or model.position_embedding_type in ("rope", "yarn")
    new_kv = unfused or (g < n and backend != "fused" and not attends_again)  # as wide as q
    copied = kept > e and e < 4  # norms keep fp32 copies of their inputs, not these
    numbers = 1 if model.normalization == "RMSNorm" else 2
    return {
        "norm inputs": 2 * kept * h,
        "norm outputs": 2 * e * h * (not model.recomputes("layernorm")),
        "QKV output": e * (n + 2 * g) * (not new_kv or not new_qk or (model.qk_layernorm and not copied)),
        "q/k norm": (kept if copied else kept - e) * (n + g) * model.qk_layernorm,
        "q, k, v": e * (n * new_qk + 2 * n * new_kv + g * (new_qk and not new_kv)),
        "attention output": e * n,
        "scores": heads * config.data.seq_length * _score(model, e) * unfused,
        "MLP": e * inner * (model.ffn_size // tp) * (not model.recomputes("mlp")),
        "dropout masks": 2 * e * h * (model.hidden_dropout > 0),
        "statistics": 4
        * (
            numbers * (2 + (heads + groups) * model.qk_layernorm)
            + heads * (not unfused and not attends_again)
        ),
    }


def logits_and_loss(config: Config, columns: int, dtype: torch.dtype) -> float:
    """Bytes of `columns` logits a token, their gradient, and the fp32 chunk from which the gradient comes.

    With fused loss of a chunk alone, and the gradient of the residual stream. Under sequence parallelism the
    last norm's output, gathered, and its gradient before it is scattered.
    """
    tokens, e = config.data.seq_length * config.data.micro_batch_size, dtype.itemsize
    whole = 2 * e * tokens * config.model.hidden_size if _cut(config) > 1 else 0
    if config.model.cross_entropy_loss_fusion:
        chunk = min(tokens, FusedLossFunction.chunk)
        return columns * chunk * (e + (8 if e < 4 else 4)) + (whole or e * tokens * config.model.hidden_size)
    chunk = min(tokens, CrossEntropyFunction.chunk) * (8 if e < 4 else 4)
    return columns * (2 * e * tokens + chunk) + whole


def tp_buffers(config: Config, dtype: torch.dtype) -> float:
    """Bytes that tp ranks share to send pieces: two halves for a gather, two for a reduce-scatter."""
    tp, tokens = (
        config.parallel.tensor_model_parallel_size,
        config.data.seq_length * config.data.micro_batch_size,
    )
    used = config.parallel.tp_comm_overlap and tp > 1
    return 2 * dtype.itemsize * config.model.hidden_size * tokens * (1 + 1 / tp) * used


def _norm_input(model: TransformerConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes a value that a norm keeps: its input, or where torch has no fused kernel two fp32 tensors."""
    return 8 if model.normalization == "RMSNorm" and device.type == "cpu" else dtype.itemsize


def _score(model: TransformerConfig, e: int) -> int:
    """Bytes a score of unfused attention: fp32 softmax, its copy in 16 bits, dropout's mask and result."""
    return 4 + e * (e < 4) + (1 + e) * (model.attention_dropout > 0)


def _device(config: Config) -> torch.device:
    return torch.device("cuda" if config.run.device != "cpu" and torch.cuda.is_available() else "cpu")

"""What a run is: seven small dataclasses, the only definition of every setting.

A field is a setting; its name with dashes is its flag, and its key in a TOML file:

    @dataclass(frozen=True)
    class OptimizerConfig:                      --weight-decay 0.1        (command line)
        weight_decay: float = ...               weight-decay = 0.1        (configs/*.toml)

Names, spellings and meanings are Megatron-LM's; `config_cli.py` turns the fields into flags, reads TOML
files and lists what Megatron has and we have not. `config_check.py` looks at a whole run at once and
reports everything that is wrong with it. No torch in any of the three: a bad command line is answered
before a second is spent.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any


def setting(default: Any, text: str, *aliases: str, choices: tuple = (), nargs: str = "") -> Any:
    """A dataclass field with its one-line help, short flag aliases and allowed values."""
    meta = {"help": text, "aliases": aliases, "choices": choices, "nargs": nargs}
    return dataclasses.field(default=default, metadata=meta)


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of the model. Families (GPT, Llama, Mistral, Qwen) differ by these values alone."""

    num_layers: int | None = setting(None, "number of transformer layers")
    hidden_size: int | None = setting(None, "width of the residual stream")
    num_attention_heads: int | None = setting(None, "number of query heads")
    ffn_hidden_size: int | None = setting(None, "inner width of the MLP; 4h, with --swiglu int(8h/3/64)*64")
    kv_channels: int | None = setting(None, "width of one attention head; hidden size / heads")
    num_query_groups: int = setting(0, "number of key/value heads; 0 means one per query head (MHA)")
    max_position_embeddings: int | None = setting(None, "longest sequence the model can see; --seq-length")
    position_embedding_type: str = setting(
        "learned_absolute", "how positions enter the model", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: float = setting(10000.0, "base of the rotary frequencies")
    normalization: str = setting("LayerNorm", "kind of normalization", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = setting(1e-5, "added to the variance inside a norm")
    qk_layernorm: bool = setting(False, "normalize each query and key head (Qwen3)")
    swiglu: bool = setting(False, "gated MLP with SiLU, as in Llama; GELU without")
    disable_bias_linear: bool = setting(False, "no bias in the linear layers")
    add_qkv_bias: bool = setting(False, "bias in the QKV projection even with --disable-bias-linear")
    untie_embeddings_and_output_weights: bool = setting(False, "give the output layer its own weight")
    hidden_dropout: float = setting(0.0, "dropout on the residual branches and the embedding")
    attention_dropout: float = setting(0.0, "dropout on the attention probabilities")
    init_method_std: float = setting(0.02, "standard deviation of the initial weights")
    attention_backend: str = setting(
        "auto", "core attention implementation", choices=("auto", "fused", "flash", "unfused")
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


@dataclass(frozen=True)
class ParallelConfig:
    """How the processes are laid out. data parallel = world / (tp * pp * cp)."""

    tensor_model_parallel_size: int = setting(1, "processes that share each layer", "tp")
    pipeline_model_parallel_size: int = setting(1, "pipeline stages", "pp")
    context_parallel_size: int = setting(1, "processes that share each sequence", "cp")
    expert_model_parallel_size: int = setting(1, "processes that share the experts", "ep")
    expert_tensor_parallel_size: int | None = setting(
        None, "processes that share each expert; as --tp", "etp"
    )
    data_parallel_size: int | None = setting(None, "checked against the world size when given", "dp")
    sequence_parallel: bool = setting(False, "shard norms and dropout over the tp ranks", "sp")
    distributed_backend: str | None = setting(None, "nccl on GPUs, gloo on CPUs", choices=("nccl", "gloo"))
    distributed_timeout_minutes: float = setting(10.0, "a collective that waits longer stops the run")


@dataclass(frozen=True)
class PrecisionConfig:
    """What is computed and kept in which type. fp32 unless said otherwise."""

    bf16: bool = setting(False, "bfloat16 weights and activations, float32 main weights and gradients")
    fp16: bool = setting(False, "float16 with dynamic loss scaling, float32 main weights and gradients")
    loss_scale: float | None = setting(None, "fixed loss scale for --fp16; dynamic without")
    initial_loss_scale: float = setting(2.0**32, "where the dynamic loss scale starts")
    min_loss_scale: float = setting(1.0, "the dynamic loss scale never goes below")
    loss_scale_window: int = setting(1000, "good steps before the loss scale doubles")
    hysteresis: int = setting(2, "bad steps before the loss scale halves")
    deterministic_mode: bool = setting(False, "only deterministic kernels on the GPU (always so on the CPU)")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its schedules and the length of training."""

    lr: float = setting(3e-4, "peak learning rate")
    min_lr: float = setting(0.0, "the schedule never goes below")
    lr_decay_style: str = setting(
        "cosine", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = setting(None, "iterations until --min-lr is reached; --train-iters")
    lr_decay_samples: int | None = setting(None, "the same in samples; --train-samples")
    lr_warmup_iters: int = setting(0, "iterations of linear warm-up")
    lr_warmup_samples: int = setting(0, "the same in samples")
    lr_warmup_fraction: float | None = setting(None, "the same as a fraction of the decay length")
    lr_warmup_init: float = setting(0.0, "learning rate at the start of the warm-up")
    lr_wsd_decay_style: str = setting(
        "exponential", "shape of WSD's last part", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = setting(None, "length of WSD's last part in iterations")
    lr_wsd_decay_samples: int | None = setting(None, "the same in samples")
    weight_decay: float = setting(0.01, "decoupled weight decay; biases and norms have none")
    adam_beta1: float = setting(0.9, "decay of the first moment")
    adam_beta2: float = setting(0.999, "decay of the second moment")
    adam_eps: float = setting(1e-8, "added to the root of the second moment")
    clip_grad: float = setting(1.0, "largest global gradient norm; 0 switches clipping off")


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how they are cut into batches."""

    data_path: tuple[str, ...] = setting((), "prefix of a .bin/.idx pair", nargs="*")
    train_data_path: tuple[str, ...] = setting((), "training prefix, instead of --data-path", nargs="*")
    valid_data_path: tuple[str, ...] = setting((), "validation prefix, with --train-data-path", nargs="*")
    test_data_path: tuple[str, ...] = setting((), "test prefix, with --train-data-path", nargs="*")
    split: str = setting("99,1,0", "parts of --data-path for training, validation, test")
    mock_data: bool = setting(False, "Megatron's synthetic counting documents; no file needed")
    data_cache_path: str | None = setting(None, "folder for the index caches; beside the data")
    dataloader_type: str = setting(
        "cyclic", "single stops at the end of the data, cyclic starts over", choices=("single", "cyclic")
    )
    seq_length: int = setting(1024, "tokens in a training sequence")
    micro_batch_size: int = setting(1, "sequences a process handles at a time")
    global_batch_size: int | None = setting(None, "sequences an iteration; --micro-batch-size * dp")
    tokenizer_type: str | None = setting(
        None,
        "kind of tokenizer; the one the data was made with",
        choices=(
            "ByteTokenizer",
            "NullTokenizer",
            "GPT2BPETokenizer",
            "TikTokenizer",
            "HuggingFaceTokenizer",
            "SentencePieceTokenizer",
        ),
    )
    tokenizer_model: str | None = setting(None, "tokenizer file, folder or tiktoken name")
    vocab_file: str | None = setting(None, "vocabulary of GPT2BPETokenizer (encoder.json)")
    merge_file: str | None = setting(None, "merges of GPT2BPETokenizer (vocab.bpe)")
    vocab_size: int | None = setting(None, "size of the model's vocabulary; the tokenizer's")
    make_vocab_size_divisible_by: int = setting(
        128, "the vocabulary is padded to a multiple of this times tp"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept, where, and what is taken up again."""

    save: str | None = setting(None, "folder for checkpoints; runs/NAME/ckpt")
    load: str | None = setting(None, "folder to continue from; it must hold a checkpoint")
    save_interval: int | None = setting(None, "iterations between checkpoints; only the last without")
    ckpt_format: str = setting("sharded", "layout on disk", choices=("sharded",))
    ckpt_step: int | None = setting(None, "load this iteration instead of the newest")
    finetune: bool = setting(False, "take the weights alone and start at iteration 0")
    no_load_optim: bool = setting(False, "do not load the optimizer state")
    no_save_optim: bool = setting(False, "do not save the optimizer state")


@dataclass(frozen=True)
class RunConfig:
    """Length, pace and records of a run."""

    nproc: int = setting(1, "processes to start on this machine; torchrun does it on a cluster")
    device: str = setting("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    run_name: str | None = setting(None, "folder below runs/; made from the settings without")
    seed: int = setting(1234, "seed of weights, data order and dropout")
    train_iters: int | None = setting(None, "iterations to train")
    train_samples: int | None = setting(None, "sequences to train, instead of --train-iters")
    eval_interval: int = setting(1000, "iterations between evaluations")
    eval_iters: int = setting(100, "global batches in an evaluation; 0 for none")
    exit_interval: int | None = setting(None, "save and leave when the iteration is a multiple of this")
    exit_duration_in_mins: float | None = setting(None, "save and leave after so many minutes")
    log_interval: int = setting(10, "iterations between console lines")
    log_throughput: bool = setting(False, "add model FLOP/s in every convention to the log line")
    log_comm: bool = setting(False, "print calls and bytes of every kind of communication per step")
    metrics_jsonl: str | None = setting(None, "one JSON object a step; runs/NAME/metrics.jsonl")
    tensorboard_dir: str | None = setting(None, "TensorBoard folder, with Megatron's tags")
    wandb_project: str | None = setting(None, "Weights & Biases project")


@dataclass(frozen=True)
class Config:
    """One run, whole."""

    model: TransformerConfig = TransformerConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()

    @property
    def dtype_name(self) -> str:
        """torch's name of the type of weights and activations."""
        return "bfloat16" if self.precision.bf16 else "float16" if self.precision.fp16 else "float32"


def padded_vocab_size(vocab_size: int, multiple: int, tp: int) -> int:
    """vocab_size rounded up to a multiple of `multiple * tp`, so that every tp rank holds as many rows."""
    step = multiple * tp
    return -(-vocab_size // step) * step

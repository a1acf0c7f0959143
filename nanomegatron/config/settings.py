"""What a run is: seven small dataclasses, the only definition of every setting (config/model.py has one).

A field is a setting; its name with dashes is its flag, and its key in a TOML file:

    @dataclass(frozen=True)
    class OptimizerConfig:                      --weight-decay 0.1        (command line)
        weight_decay: float = ...               weight-decay = 0.1        (configs/*.toml)

Names, spellings and meanings are Megatron-LM's; `config/cli.py` turns the fields into flags, reads TOML
files and lists what Megatron has and we have not. `config/check.py` looks at a whole run at once and
reports everything that is wrong with it. No torch in any of the three: a bad command line is answered
before a second is spent.
"""

from dataclasses import dataclass
from pathlib import Path

from nanomegatron.config.model import TransformerConfig, setting
from nanomegatron.config.split import split_layers
from nanomegatron.schedules import CHUNKS, NAMES, placement

CP_TYPES = ("p2p", "a2a", "allgather", "a2a+p2p")
FP8_REFUSED = {
    "mxfp8": "blocks of 32 with scales that are powers of two need a Blackwell GPU; use blockwise",
    "custom": "there are no recipes from outside; use delayed, tensorwise, rowwise or blockwise",
}


@dataclass(frozen=True)
class ParallelConfig:
    """How the processes are laid out. data parallel = world / (tp * cp * pp)."""

    tensor_model_parallel_size: int = setting(1, "processes that share each layer", "tp")
    pipeline_model_parallel_size: int = setting(1, "processes that share the layers, in turn", "pp")
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None, "cut the layers of each pipeline rank into pieces of so many, which take turns"
    )
    num_virtual_stages_per_pipeline_rank: int | None = setting(None, "the same by their number", "vpp")
    microbatch_group_size_per_virtual_pipeline_stage: int | None = setting(
        None, "microbatches a piece takes before it is the next one's turn; --pp"
    )
    pipeline_schedule: str | None = setting(
        None, "what each pipeline rank does when; 1f1b, with --vpp interleaved", choices=NAMES
    )
    pipeline_split: str = setting(
        "even",
        "as many layers for each pipeline rank, or as much work, where the output layer counts",
        choices=("even", "flops"),
    )
    decoder_first_pipeline_num_layers: int | None = setting(
        None, "layers of the first pipeline rank; the others share what is left"
    )
    decoder_last_pipeline_num_layers: int | None = setting(None, "layers of the last pipeline rank")
    account_for_embedding_in_pipeline_split: bool = setting(
        False, "the embedding counts as a layer when they are shared out"
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False, "the output layer and the loss count as a layer when they are shared out"
    )
    context_parallel_size: int = setting(1, "processes that share each sequence", "cp")
    cp_comm_type: tuple[str, ...] = setting(
        ("p2p",), "how their queries meet all keys, one way or one a layer: " + ", ".join(CP_TYPES), nargs="*"
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = setting(
        (), "for a2a+p2p: how many next to each other by a2a, how many such groups by p2p", nargs="2"
    )
    dynamic_context_parallel: bool = setting(
        False, "long documents on all cp ranks, short ones on few; with --variable-seq-lengths"
    )
    max_seqlen_per_dp_cp_rank: int | None = setting(
        None, "for --dynamic-context-parallel: tokens that a rank takes at a time; --seq-length / cp"
    )
    expert_model_parallel_size: int = setting(1, "processes that share the experts", "ep")
    expert_tensor_parallel_size: int | None = setting(
        None, "processes that share each expert; as --tp", "etp"
    )
    overlap_moe_expert_parallel_comm: bool = setting(
        False,
        "tokens of one half of a microbatch travel while experts work on the other; with alltoall",
        fast_path=True,
    )
    data_parallel_size: int | None = setting(None, "checked against the world size when given", "dp")
    fast_paths: bool | None = setting(
        None, "the fast paths that can run here, or only the core's plain forms; by default only GPUs do"
    )
    tp_comm_overlap: bool = setting(
        False, "send pieces over tp while matmuls work on others; with --sp", fast_path=True
    )
    use_distributed_optimizer: bool = setting(
        False, "cut optimizer states over the dp ranks; as --data-parallel-sharding-strategy optim"
    )
    data_parallel_sharding_strategy: str | None = setting(
        None,
        "what is cut over the dp ranks: nothing, optimizer states, or gradients too",
        choices=("no_shard", "optim", "optim_grads"),
    )
    overlap_grad_reduce: bool = setting(False, "sum gradients over dp bucket by bucket during the backward")
    overlap_param_gather: bool = setting(False, "gather parameters bucket by bucket during the forward")
    ddp_bucket_size: int | None = setting(
        None, "elements in a bucket; all in one, or max(40M, 1M x dp) where there is use for several"
    )
    ddp_average_in_collective: bool = setting(False, "average gradients over dp where Megatron does")
    grad_reduce_in_bf16: bool = setting(False, "keep and sum gradients in bf16 instead of fp32")
    peer_memory: bool = setting(True, "GPUs of a machine copy into each other's memory; without: NCCL does")
    distributed_backend: str | None = setting(None, "nccl on GPUs, gloo on CPUs", choices=("nccl", "gloo"))
    distributed_timeout_minutes: float = setting(10.0, "a collective that waits longer stops the run")

    @property
    def sharding(self) -> str:
        """What is cut over the dp ranks."""
        return self.data_parallel_sharding_strategy or (
            "optim" if self.use_distributed_optimizer else "no_shard"
        )

    @property
    def schedule(self) -> str:
        """The name of the pipeline schedule."""
        several = (self.num_virtual_stages_per_pipeline_rank or 1) > 1
        return self.pipeline_schedule or ("interleaved" if several else "1f1b")

    @property
    def chunks(self) -> int:
        """Pieces of the model that a pipeline rank holds; `resolve` has made a number of their size."""
        return self.num_virtual_stages_per_pipeline_rank or CHUNKS.get(self.pipeline_schedule, 1)

    @property
    def model_parallel_size(self) -> int:
        """Processes that share one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def ranks_per_replica(self) -> int:
        """Processes that work on one microbatch: there are world / so many data-parallel replicas."""
        return self.model_parallel_size * self.context_parallel_size

    def cp_types(self, num_layers: int) -> list[str]:
        """How each layer's attention communicates over cp, of CP_TYPES (all_gather is Megatron's code's)."""
        types = [name.replace("all_gather", "allgather") for name in self.cp_comm_type]
        return types * num_layers if len(types) == 1 else types

    def stage_layers(self, num_layers: int, head: float = 1.0) -> list[range]:
        """The layers of every pipeline stage, of a resolved config.

        head: for --pipeline-split flops what the output layer costs, in layers.

        Raises: ValueError with a fix for what does not divide.
        """
        return split_layers(
            num_layers,
            placement(self.schedule, self.pipeline_model_parallel_size, self.chunks),
            first=self.decoder_first_pipeline_num_layers,
            last=self.decoder_last_pipeline_num_layers,
            embedding=self.account_for_embedding_in_pipeline_split,
            loss=self.account_for_loss_in_pipeline_split,
            head=head if self.pipeline_split == "flops" else None,
        )


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
    fp8_format: str | None = setting(
        None,
        "matmuls of the layers in FP8, with --bf16: all in E4M3, or gradients in E5M2",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = setting(
        "delayed",
        "FP8 scales: a tensor's of earlier steps, or of now, a row's, a block's of 128",
        choices=("delayed", "tensorwise", "rowwise", "blockwise"),
        refused=FP8_REFUSED,
    )
    fp8_margin: int = setting(0, "FP8 scales are 2^margin smaller than the largest value allows")
    fp8_amax_history_len: int = setting(1, "delayed: steps whose largest values are kept")
    fp8_amax_compute_algo: str = setting(
        "most_recent", "delayed: the last step's counts, or the largest", choices=("max", "most_recent")
    )
    fp8_wgrad: bool = setting(True, "weight gradients in FP8 too; --no-fp8-wgrad for bf16")
    fp8_param_gather: bool = setting(
        False, "gather parameters over dp as FP8; with a sharded optimizer", fast_path=True
    )
    first_last_layers_bf16: bool = setting(False, "the first and the last layers stay in bf16")
    num_layers_at_start_in_bf16: int = setting(1, "how many of the first with --first-last-layers-bf16")
    num_layers_at_end_in_bf16: int = setting(1, "how many of the last")

    @property
    def fp8_multiple(self) -> int:
        """What all sizes of FP8 matmuls are multiples of."""
        return 128 if self.fp8_recipe == "blockwise" else 16

    def fp8_layers(self, num_layers: int) -> range:
        """The layers whose matmuls are in FP8."""
        if self.fp8_format is None:
            return range(0)
        first, last = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        return range(first, num_layers - last) if self.first_last_layers_bf16 else range(num_layers)


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
    lr_warmup_fraction: float | None = setting(None, "a fraction of the decay length, not rounded to samples")
    lr_warmup_init: float = setting(0.0, "learning rate at the start of the warm-up")
    lr_wsd_decay_style: str = setting(
        "exponential", "shape of WSD's last part", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = setting(None, "length of WSD's last part in iterations")
    lr_wsd_decay_samples: int | None = setting(None, "the same in samples")
    decoupled_lr: float | None = setting(
        None, "peak learning rate of the embedding and the output layer; --lr"
    )
    decoupled_min_lr: float | None = setting(None, "their smallest learning rate; --min-lr")
    weight_decay: float = setting(0.01, "decoupled weight decay; biases and norms have none")
    start_weight_decay: float | None = setting(None, "weight decay at the start, instead of --weight-decay")
    end_weight_decay: float | None = setting(None, "weight decay at the end")
    weight_decay_incr_style: str = setting(
        "constant", "how it goes from one to the other", choices=("constant", "linear", "cosine")
    )
    adam_beta1: float = setting(0.9, "decay of the first moment")
    adam_beta2: float = setting(0.999, "decay of the second moment")
    adam_eps: float = setting(1e-8, "added to the root of the second moment")
    clip_grad: float = setting(1.0, "largest global gradient norm; 0 switches clipping off")
    use_precision_aware_optimizer: bool = setting(False, "allow the types below to be other than fp32")
    main_grads_dtype: str = setting("fp32", "type of accumulated gradients", choices=("fp32", "bf16"))
    exp_avg_dtype: str = setting("fp32", "type of Adam's first moment", choices=("fp32", "bf16"))
    exp_avg_sq_dtype: str = setting("fp32", "type of Adam's second moment", choices=("fp32", "bf16"))
    optimizer_cpu_offload: bool = setting(
        False, "keep main weights and moments in host memory, update there", fast_path=True
    )
    optimizer_offload_fraction: float = setting(1.0, "share of them that --optimizer-cpu-offload moves")
    overlap_cpu_optimizer_d2h_h2d: bool = setting(False, "copy one bucket while the host updates another")


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how they are cut into batches."""

    data_path: tuple[str, ...] = setting(
        (), "prefixes of .bin/.idx pairs: one, several by size, or weight prefix weight prefix ...", nargs="*"
    )
    data_args_path: str | None = setting(None, "file that holds what --data-path would say")
    train_data_path: tuple[str, ...] = setting((), "the same for training alone", nargs="*")
    valid_data_path: tuple[str, ...] = setting((), "for validation, with --train-data-path", nargs="*")
    test_data_path: tuple[str, ...] = setting((), "for the test, with --train-data-path", nargs="*")
    split: str = setting("99,1,0", "parts of --data-path for training, validation, test")
    mock_data: bool = setting(False, "Megatron's synthetic counting documents; no file needed")
    data_cache_path: str | None = setting(None, "folder for the index caches; beside the data")
    dataloader_type: str = setting(
        "cyclic", "single stops at the end of the data, cyclic starts over", choices=("single", "cyclic")
    )
    num_workers: int = setting(2, "threads that read ahead; 0 reads when asked")
    reset_position_ids: bool = setting(
        False, "learned positions start over behind every end-of-document token; rotary ones go on"
    )
    reset_attention_mask: bool = setting(False, "no attention across end-of-document tokens")
    eod_mask_loss: bool = setting(False, "no loss where the input is an end-of-document token")
    variable_seq_lengths: bool = setting(
        False, "samples are whole documents of up to --seq-length tokens, several packed into a microbatch"
    )
    seq_length: int = setting(1024, "tokens in a training sequence")
    micro_batch_size: int = setting(1, "sequences a process handles at a time")
    global_batch_size: int | None = setting(None, "sequences an iteration; --micro-batch-size * dp")
    rampup_batch_size: tuple[int, ...] = setting(
        (), "first batch size, increment, samples until --global-batch-size is reached", nargs="3"
    )
    step_batch_size_schedule: str | None = setting(
        None, 'batch sizes and the token they begin at, instead of --global-batch-size: "0:768 250B:1536"'
    )
    tokenizer_type: str | None = setting(
        None,
        "kind of tokenizer; the one the data was made with",
        choices=(
            "ByteTokenizer",
            "NullTokenizer",
            "GPT2BPETokenizer",
            "TikTokenizer",
            "Llama3Tokenizer",
            "HuggingFaceTokenizer",
            "SentencePieceTokenizer",
            "Llama2Tokenizer",
        ),
    )
    tokenizer_model: str | None = setting(None, "tokenizer file, folder or tiktoken name")
    vocab_file: str | None = setting(None, "vocabulary of GPT2BPETokenizer (encoder.json)")
    merge_file: str | None = setting(None, "merges of GPT2BPETokenizer (vocab.bpe)")
    vocab_size: int | None = setting(
        None,
        "ids, that of the end of a document too (unlike Megatron 0.16's NullTokenizer); the tokenizer's",
    )
    null_tokenizer_eod_id: int | None = setting(None, "id that ends a document; NullTokenizer's last one")
    make_vocab_size_divisible_by: int = setting(
        128, "the vocabulary is padded to a multiple of this times tp"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept, where, and what is taken up again."""

    save: str | None = setting(None, "folder for checkpoints; runs/NAME/ckpt")
    load: str | None = setting(None, "folder to continue from: with a checkpoint, unless it is --save")
    save_interval: int | None = setting(None, "iterations between checkpoints; only the last without")
    ckpt_format: str = setting("sharded", "layout on disk", choices=("sharded",))
    ckpt_step: int | None = setting(None, "load this iteration instead of the newest")
    finetune: bool = setting(False, "take the weights alone and start at iteration 0")
    no_load_optim: bool = setting(False, "do not load the optimizer state")
    moe_use_upcycling: bool = setting(
        False, "--load holds a model without experts: each expert starts as its MLP; needs --save"
    )
    no_save_optim: bool = setting(False, "do not save the optimizer state")


@dataclass(frozen=True)
class RunConfig:
    """Length, pace and records of a run."""

    nproc: int = setting(1, "processes to start on this machine; torchrun does it on a cluster")
    device: str = setting("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    run_name: str | None = setting(None, "folder below runs/; made from the settings without")
    run_folder_per_host: bool = setting(
        False, "each machine has a runs/NAME of its own, for what its ranks log; --save must be shared"
    )
    seed: int = setting(1234, "seed of weights, data order and dropout")
    train_iters: int | None = setting(None, "iterations to train")
    train_samples: int | None = setting(None, "sequences to train, instead of --train-iters")
    eval_interval: int = setting(1000, "iterations between evaluations")
    eval_iters: int = setting(100, "global batches in an evaluation; 0 for none")
    exit_interval: int | None = setting(None, "save and leave when the iteration is a multiple of this")
    exit_duration_in_mins: float | None = setting(None, "save and leave after so many minutes")
    log_interval: int = setting(10, "iterations between console lines")
    log_throughput: bool = setting(False, "add model FLOP/s in every convention to the log line")
    eval_only: bool = setting(False, "evaluate what --load holds on validation and test data, and stop")
    iterations_to_skip: tuple[int, ...] = setting(
        (), "iterations whose samples are passed over: no training on them", nargs="*"
    )
    timing_log_level: int = setting(0, "1 times the parts of a step, 2 every microbatch", choices=(0, 1, 2))
    timing_log_option: str = setting(
        "minmax",
        "over ranks: the longest, the shortest and longest, or each",
        choices=("max", "minmax", "all"),
    )
    log_params_norm: bool = setting(False, "log the norm of all parameters")
    log_num_zeros_in_grad: bool = setting(False, "log how many gradients are zero")
    log_comm: bool = setting(False, "print calls and bytes of every kind of communication per step")
    moe_per_layer_logging: bool = setting(False, "log the router's losses and the experts' load by layer")
    log_fp8_stats: int = setting(0, "log scale, amax, saturation and underflow of FP8 every N steps; 0 never")
    trace_dir: str | None = setting(None, "folder for pictures of what each rank did in some steps")
    trace_iterations: tuple[int, ...] = setting((3,), "the steps that --trace-dir shows", nargs="*")
    profile: bool = setting(False, "torch's profiler around some steps; a trace file a rank")
    profile_step_start: int = setting(10, "the step --profile begins with")
    profile_step_end: int = setting(12, "the step it ends before")
    profile_ranks: tuple[int, ...] = setting((0,), "the ranks it looks at", nargs="*")
    record_memory_history: bool = setting(False, "write who allocated what on the GPU, for torch's viewer")
    memory_snapshot_path: str = setting("snapshot.pickle", "file of --record-memory-history")
    metrics_jsonl: str | None = setting(None, "one JSON object a step; runs/NAME/metrics.jsonl")
    tensorboard_dir: str | None = setting(None, "TensorBoard folder, with Megatron's tags")
    wandb_project: str | None = setting(None, "Weights & Biases project")

    @property
    def folder(self) -> Path:
        """runs/NAME, where everything that a run writes is found."""
        return Path("runs") / self.run_name


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

    @property
    def sequence_cut(self) -> int:
        """Over how many tp ranks the residual stream is cut along the sequence."""
        return self.parallel.tensor_model_parallel_size if self.model.sequence_parallel else 1

    @property
    def grad_dtype_name(self) -> str:
        """torch's name of the type in which gradients are added up and summed over dp."""
        bf16 = self.parallel.grad_reduce_in_bf16 or self.optimizer.main_grads_dtype == "bf16"
        return "bfloat16" if bf16 else "float32"


def padded_vocab_size(vocab_size: int, multiple: int, tp: int) -> int:
    """vocab_size rounded up to a multiple of `multiple * tp`, so that every tp rank holds as many rows."""
    step = multiple * tp
    return -(-vocab_size // step) * step

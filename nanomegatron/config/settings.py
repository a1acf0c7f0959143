"""What a run is: eight small dataclasses, the only definition of every setting.

A field is a setting; its name with dashes is its flag, and its key in a TOML file:

    @dataclass(frozen=True)
    class OptimizerConfig:                      --weight-decay 0.1        (command line)
        weight_decay: float = ...               weight-decay = 0.1        (presets/*.toml)

Names and meanings are Megatron-LM's. The settings of parallelism are in `config/parallel.py`, those of the
model in `config/model.py`, those of bad steps in `config/faults.py`. `config/rules.py` has what else a field
declares, `config/cli.py` turns the fields into flags and reads TOML files, `config/check.py` reports
everything that is wrong with a run at once. No torch in any of them: a bad command line is answered in less
than a second.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path

from nanomegatron.config.faults import FaultConfig
from nanomegatron.config.model import TransformerConfig, moe
from nanomegatron.config.parallel import ONE_SIZE, SHARDED, ParallelConfig
from nanomegatron.config.rules import common, setting

MOST_ITERS, MOST_SEQUENCES = 2 * 10**7, 2**24  # per run (`samples_before` lists all iterations); per batch
TOKENIZERS = {  # kind -> what it needs
    "ByteTokenizer": (),
    "NullTokenizer": "--vocab-size",
    "GPT2BPETokenizer": ("--vocab-file", "--merge-file"),
    "TikTokenizer": "--tokenizer-model",
    "Llama3Tokenizer": "--tokenizer-model",
    "HuggingFaceTokenizer": "--tokenizer-model",
    "SentencePieceTokenizer": "--tokenizer-model",
    "Llama2Tokenizer": "--tokenizer-model",
}
# Conditions that several settings have, or that are long
ENDS_IN_BF16 = "--first-last-layers-bf16"
DELAYED, CURRENT = "--fp8-recipe delayed", "--fp8-recipe tensorwise or rowwise or blockwise"
VARIES, OFFLOAD = "--weight-decay-incr-style linear or cosine", "--optimizer-cpu-offload"
TOKENIZER, PRECISION_AWARE = "--tokenizer-type", "--use-precision-aware-optimizer"
fp8 = functools.partial(setting, part_of="--fp8-format")
moment = functools.partial(
    setting, choices="fp32 bf16", needs=PRECISION_AWARE, excludes=f"{OFFLOAD}, which keeps moments in fp32"
)


@dataclass(frozen=True)
class PrecisionConfig:
    """The types of computation and storage; fp32 by default."""

    bf16: bool = common(False, "bfloat16 weights and activations, fp32 main weights", excludes="--fp16")
    fp16: bool = common(False, "float16 weights and activations, fp32 main weights, dynamic loss scaling")
    loss_scale: float | None = setting(None, "fixed loss scale; default dynamic", needs="--fp16")
    initial_loss_scale: float = setting(2.0**32, "initial dynamic loss scale")
    min_loss_scale: float = setting(1.0, "smallest dynamic loss scale")
    loss_scale_window: int = setting(1000, "finite steps before the loss scale doubles")
    hysteresis: int = setting(2, "non-finite steps before the loss scale halves")
    deterministic_mode: bool = setting(False, "only deterministic kernels on the GPU (always so on the CPU)")
    fp8_format: str | None = common(
        None,
        "use FP8 in matmuls: E4M3 for all, or E5M2 for output gradients; default no FP8",
        choices="e4m3 hybrid",
        needs="--bf16, the type of all else",
        brings="--bf16",
    )
    fp8_recipe: str = fp8(
        "delayed",
        "one FP8 scale per tensor (from earlier steps, or its own amax), per row, or per block of 128",
        choices="delayed tensorwise rowwise blockwise",
        refused={
            "mxfp8": "blocks of 32 with scales that are powers of two need a Blackwell GPU; use blockwise",
            "custom": "there are no recipes from outside; use one of these, or add a class to fp8.py",
        },
        most_used=True,
    )
    fp8_margin: int = fp8(0, "divide FP8 scales by 2^margin")
    fp8_amax_history_len: int = fp8(1, "delayed: steps in the amax history", at_most=1024, needs=DELAYED)
    fp8_amax_compute_algo: str = fp8(
        "most_recent",
        "delayed: scale by the largest amax of the history, or by the last",
        choices="max most_recent",
        needs=DELAYED,
    )
    fp8_wgrad: bool = fp8(True, "compute weight gradients in FP8, not in bf16")
    fp8_param_gather: bool = fp8(
        False,
        "all-gather parameters in FP8",
        needs=SHARDED,
        excludes="--fp8-recipe rowwise or blockwise, whose rows or blocks shards cut; "
        "use delayed or tensorwise",
        fast_path=True,
    )
    fp8_output_proj: bool = fp8(
        False,
        "multiply in FP8 in the output layer, too",
        excludes="--cross-entropy-loss-fusion, whose chunks of logits have no scales",
    )
    first_last_layers_bf16: bool = fp8(False, "keep the first and last layers in bf16", needs=CURRENT)
    num_layers_at_start_in_bf16: int = fp8(
        1, "layers at the start that --first-last-layers-bf16 keeps", at_least=0, needs=ENDS_IN_BF16
    )
    num_layers_at_end_in_bf16: int = fp8(
        1, "layers at the end that --first-last-layers-bf16 keeps", at_least=0, needs=ENDS_IN_BF16
    )

    @property
    def fp8_multiple(self) -> int:
        """The number that must divide all sizes of FP8 matmuls."""
        return 128 if self.fp8_recipe == "blockwise" else 16

    @property
    def fp8_experts(self) -> bool:
        """Whether experts multiply in FP8: torch's grouped matmul takes a scale a row alone."""
        return self.fp8_format is not None and self.fp8_recipe == "rowwise"

    def optimizer_casts(self, sharded: bool) -> bool:
        """Whether the optimizer casts FP8 weights; sharded: it holds only shards of them."""
        return self.fp8_param_gather if sharded else self.fp8_recipe == "delayed"

    def fp8_layers(self, num_layers: int) -> range:
        """The layers whose matmuls are in FP8."""
        if self.fp8_format is None:
            return range(0)
        first, last = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        return range(first, num_layers - last) if self.first_last_layers_bf16 else range(num_layers)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its schedules and the length of training."""

    lr: float = common(3e-4, "peak learning rate", at_least=0)
    min_lr: float = common(0.0, "minimum learning rate, at the end of the decay", at_most="--lr")
    lr_decay_style: str = common(
        "cosine", "shape of the learning rate decay", choices="constant linear cosine inverse-square-root WSD"
    )
    lr_decay_iters: int | None = setting(None, "iterations until --min-lr is reached; default --train-iters")
    lr_decay_samples: int | None = setting(None, "samples until --min-lr is reached; default --train-samples")
    lr_warmup_iters: int = common(0, "iterations of linear warm-up", excludes="--lr-warmup-fraction")
    lr_warmup_samples: int = setting(0, "samples of linear warm-up", excludes="--lr-warmup-fraction")
    lr_warmup_fraction: float | None = setting(None, "warm-up as a share of the decay", at_least=0, at_most=1)
    lr_warmup_init: float = setting(0.0, "learning rate at the start of the warm-up", at_most="--lr")
    lr_wsd_decay_style: str = setting(
        "exponential", "WSD: shape of the final decay", choices="exponential linear cosine minus_sqrt"
    )
    lr_wsd_decay_iters: int | None = setting(None, "WSD: iterations of the final decay")
    lr_wsd_decay_samples: int | None = setting(None, "WSD: samples of the final decay")
    decoupled_lr: float | None = setting(None, "learning rate of embedding and output layer; default --lr")
    decoupled_min_lr: float | None = setting(
        None,
        "minimum learning rate of embedding and output layer; default --min-lr",
        at_least=0,
        at_most="--decoupled-lr",
        needs="--decoupled-lr",
    )
    weight_decay: float = common(0.01, "weight decay of AdamW; none on biases and norms", at_least=0)
    start_weight_decay: float | None = setting(None, "weight decay at the start", at_least=0, needs=VARIES)
    end_weight_decay: float | None = setting(
        None, "weight decay at the end", at_least="--start-weight-decay", needs=VARIES
    )
    weight_decay_incr_style: str = setting(
        "constant",
        "how weight decay changes from start to end",
        choices="constant linear cosine",
        needs=dict.fromkeys(("linear", "cosine"), ("--start-weight-decay", "--end-weight-decay")),
    )
    adam_beta1: float = setting(0.9, "decay of Adam's first moment", at_least=0, below=1)
    adam_beta2: float = setting(0.999, "decay of Adam's second moment", at_least=0, below=1)
    adam_eps: float = setting(1e-8, "added to the square root of Adam's second moment")
    clip_grad: float = common(1.0, "clip gradients to this global norm; 0: no clipping", at_least=0)
    use_precision_aware_optimizer: bool = setting(False, "allow main gradients and moments in bf16")
    main_grads_dtype: str = setting(
        "fp32",
        "type of the main (accumulated) gradients",
        choices="fp32 bf16",
        needs=(PRECISION_AWARE, "--bf16"),
    )
    exp_avg_dtype: str = moment("fp32", "type of Adam's first moment")
    exp_avg_sq_dtype: str = moment("fp32", "type of Adam's second moment")
    optimizer_cpu_offload: bool = setting(
        False,
        "keep optimizer states in host memory",
        needs="--bf16 or --fp16; fp32 weights are the main weights",
        brings="--bf16",
        fast_path=True,
    )
    optimizer_offload_fraction: float = setting(
        1.0, "fraction of optimizer states to offload", at_most=1, needs=OFFLOAD
    )
    overlap_cpu_optimizer_d2h_h2d: bool = setting(
        False, "copy a bucket between GPU and host while another is updated", needs=OFFLOAD
    )


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how they are cut into batches."""

    data_path: tuple[str, ...] = common((), "prefixes of .bin/.idx pairs; to blend: WEIGHT PREFIX ...")
    data_args_path: str | None = setting(
        None, "file with the arguments of --data-path", excludes=("--data-path", "--train-data-path")
    )
    train_data_path: tuple[str, ...] = setting((), "--data-path for training", excludes="--data-path")
    valid_data_path: tuple[str, ...] = setting((), "--data-path for validation", needs="--train-data-path")
    test_data_path: tuple[str, ...] = setting((), "--data-path for the test", needs="--train-data-path")
    split: str = common("99,1,0", "shares of --data-path for training, validation, test")
    mock_data: bool = common(
        False,
        "use synthetic documents",
        needs="--vocab-size or --tokenizer-type",
        excludes=("--data-path", "--data-args-path", "--train-data-path"),
    )
    data_cache_path: str | None = setting(
        None, "folder of cached sample indices; default beside the data", resumable=True, names_run=False
    )
    dataloader_type: str = setting("cyclic", "stop at the data's end, or start over", choices="single cyclic")
    num_workers: int = setting(
        2,
        "threads per rank that prefetch batches; 0: no prefetching",
        at_least=0,
        at_most=1024,
        resumable=True,
        names_run=False,
    )
    reset_position_ids: bool = setting(False, "restart learned positions after every end-of-document token")
    reset_attention_mask: bool = setting(False, "no attention across end-of-document tokens")
    eod_mask_loss: bool = setting(False, "no loss where the input is an end-of-document token")
    variable_seq_lengths: bool = setting(False, "pack whole documents up to --seq-length", excludes=ONE_SIZE)
    seq_length: int = common(1024, "tokens in a training sequence", at_most=2**31)
    micro_batch_size: int = common(1, "sequences in a microbatch", at_most=MOST_SEQUENCES, resumable=True)
    global_batch_size: int | None = common(
        None, "sequences in an iteration; default --micro-batch-size x dp", at_most=MOST_SEQUENCES
    )
    rampup_batch_size: tuple[int, ...] = setting(
        (), "ramp up the global batch size: first size, increment, samples of the ramp", count=3
    )
    step_batch_size_schedule: str | None = setting(None, 'global batch by consumed tokens: "0:768 250B:1536"')
    tokenizer_type: str | None = common(
        None, "tokenizer; default the one that made the data", choices=(*TOKENIZERS,), needs=TOKENIZERS
    )
    tokenizer_model: str | None = common(None, "tokenizer file, folder or tiktoken name", needs=TOKENIZER)
    vocab_file: str | None = setting(None, "vocabulary of GPT2BPETokenizer (encoder.json)", needs=TOKENIZER)
    merge_file: str | None = setting(
        None,
        "merges of GPT2BPETokenizer (vocab.bpe)",
        needs=TOKENIZER,
        brings="--tokenizer-type GPT2BPETokenizer",
    )
    vocab_size: int | None = setting(
        None, "number of token ids, end-of-document included; default the tokenizer's", at_most=2**31
    )
    tiktoken_pattern: str | None = setting(
        None, "TikTokenizer: splitting pattern of Megatron's JSON vocabulary; default v2", choices="v1 v2"
    )
    tiktoken_num_special_tokens: int | None = setting(
        None,
        "number of special tokens in Megatron's JSON vocabulary; default 1000",
        needs="--tokenizer-type TikTokenizer",
    )
    tokenizer_hf_no_include_special_tokens: bool = setting(
        False,
        "no special tokens such as <s> around a text; default as the data",
        needs="--tokenizer-type HuggingFaceTokenizer",
    )
    null_tokenizer_eod_id: int | None = setting(None, "end-of-document id; default the last", above=-math.inf)
    make_vocab_size_divisible_by: int = setting(
        128, "pad the vocabulary to multiples of this x tp", resumable=True
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, where, and what is loaded."""

    save: str | None = common(None, "folder for checkpoints; default runs/NAME/ckpt")
    load: str | None = common(None, "folder to resume from; it must hold a checkpoint unless it is --save")
    save_interval: int | None = common(None, "iterations between checkpoints; default only at the end")
    ckpt_format: str = setting(
        "sharded",
        "format to save in; a load detects it: any layout loads sharded and torch_dist, torch only its own",
        choices="sharded torch_dist torch",
        refused=dict.fromkeys(("torch_dcp", "fsdp_dtensor"), "of parameters sharded over dp; use sharded"),
    )
    ckpt_step: int | None = setting(None, "load this iteration instead of the newest", at_least=0)
    exit_on_missing_checkpoint: bool = setting(
        True, "exit with code 3 where the run's records know of checkpoints and --save has none"
    )
    finetune: bool = setting(False, "load only the weights, start at iteration 0", needs="--load")
    no_load_optim: bool = setting(False, "do not load the optimizer state", needs="--load")
    moe_use_upcycling: bool = moe(False, "copy --load's dense MLP to each expert", needs=("--load", "--save"))
    no_save_optim: bool = setting(False, "do not save the optimizer state")
    allow_data_change: bool = setting(False, "resume on other data than those of the checkpoint")
    dist_ckpt_strictness: str = setting(
        "assume_ok_unexpected",
        "tensors that only the model or only the checkpoint has: errors, or noted and left as they are",
        choices="assume_ok_unexpected log_unexpected log_all raise_unexpected raise_all ignore_all",
        refused=dict.fromkeys(
            ("return_unexpected", "return_all"),
            "nothing here could be given the names; log_unexpected or log_all prints them",
        ),
    )
    override_opt_param_scheduler: bool = setting(
        False,
        "the schedule of the command line is used, as it always is",
        excludes="--use-checkpoint-opt-param-scheduler",
    )
    use_checkpoint_opt_param_scheduler: bool = setting(
        False, "take the schedule of learning rate and weight decay from the checkpoint"
    )
    verify_integrity: bool = setting(False, "compare SHA-256 of checkpoint files too when loading")
    async_save: bool | None = setting(
        None, "write checkpoints of the save intervals beside the training; default only on GPUs"
    )
    keep_last_k: int | None = setting(None, "keep the last K checkpoints; default all", at_least=2)
    save_retain_interval: int | None = setting(
        None, "keep checkpoints of multiples of N permanently, of others the last 2 or --keep-last-k"
    )
    non_persistent_save_interval: int | None = setting(
        None, "iterations between checkpoints of which each replaces the one before"
    )
    on_save_error: str = setting(
        "exit", "when a save has failed: exit with code 4, or warn and continue", choices="exit warn"
    )
    save_retries: int = setting(2, "how often a failed save is tried again", at_least=0)


@dataclass(frozen=True)
class RunConfig:
    """Length, pace and records of a run."""

    nproc: int | None = common(
        None,
        "processes to start on this machine; default 2 for small models on a CPU with 2 threads, else 1",
        at_most=4096,
    )
    device: str = common(
        "auto",
        "where to compute",
        choices="auto cpu cuda",
        refused={"mps": "Apple's GPUs are not supported; leave it out, which means the CPU there"},
    )
    megatron_defaults: bool = setting(
        False, "use Megatron's defaults (docs/from-megatron.md)", names_run=True
    )
    run_name: str | None = common(None, "folder name in runs/; default made from the settings")
    run_folder_per_host: bool = setting(False, "each machine has its own runs/NAME; --save must be shared")
    elastic: bool = setting(
        False, "resume on any number of processes: the run keeps its global batch", names_run=True
    )
    seed: int = common(1234, "random seed", at_least=0, below=2**32, resumable=False, names_run=True)
    train_iters: int | None = common(
        None, "iterations to train; default 1000", at_most=MOST_ITERS, names_run=True
    )
    train_samples: int | None = setting(None, "sequences to train, instead of --train-iters", names_run=True)
    eval_interval: int = common(1000, "iterations between evaluations")
    eval_iters: int | None = common(
        None,
        "global batches in an evaluation, 0 for none; default a tenth of --train-iters, but 1 to 100",
        at_least=0,
        at_most=MOST_ITERS,
    )
    exit_interval: int | None = setting(None, "save and exit when the iteration is a multiple of this")
    exit_duration_in_mins: float | None = setting(None, "save and exit after this time in minutes")
    exit_on_preemption_file: str | None = setting(None, "save and exit once this file exists")
    hang_timeout_secs: float | None = setting(
        None, "end the run if a rank waits this long for others; default 0.9 x --distributed-timeout-minutes"
    )
    check_replicas: int = setting(0, "compare the parameters of replicas every N steps; 0 never")
    log_interval: int = common(10, "iterations between console lines")
    log_straggler: bool = setting(False, "log computing and waiting times over ranks; warn of slow ranks")
    log_throughput: bool = setting(False, "add model FLOP/s in every convention to the log line")
    eval_only: bool = setting(False, "evaluate --load and stop", needs="--eval-iters greater than 0")
    iterations_to_skip: tuple[int, ...] = setting((), "iterations whose samples are skipped", names_run=True)
    timing_log_level: int = setting(0, "timers: 0 no, 1 phases, 2 also forward, backward", choices=(0, 1, 2))
    timing_log_option: str = setting("minmax", "which times over ranks to print", choices="max minmax all")
    debug_nan: bool = setting(False, "stop at the first module whose result is not finite; slow")
    log_params_norm: bool = setting(False, "log the norm of all parameters")
    log_num_zeros_in_grad: bool = setting(False, "log the number of gradient elements that are zero")
    log_comm: bool = setting(False, "print calls and bytes of every kind of communication per step")
    moe_per_layer_logging: bool = moe(False, "log router losses and expert load of each layer")
    log_fp8_stats: int = fp8(0, "log scale, amax, saturation and underflow of FP8 every N steps; 0 never")
    trace_dir: str | None = setting(None, "folder for timelines of traced steps", needs="--trace-iterations")
    trace_iterations: tuple[int, ...] = setting((3,), "iterations to trace")
    profile: bool = setting(False, "run torch's profiler for some steps; one trace file per rank")
    profile_step_start: int = setting(10, "first step to profile", at_least=0)
    profile_step_end: int = setting(12, "step before which the profile ends")
    profile_ranks: tuple[int, ...] = setting((0,), "ranks to profile", at_least=0)
    manual_gc: bool = setting(True, "collect Python's garbage on all ranks after the same steps")
    manual_gc_interval: int = setting(50, "steps from one collection to the next; 0 never", at_least=0)
    empty_unused_memory_level: int = setting(
        0, "empty torch's GPU cache: 1 after the backward, 2 also after the optimizer", choices=(0, 1, 2)
    )
    record_memory_history: bool = setting(False, "record GPU allocations for pytorch.org/memory_viz")
    memory_snapshot_path: str = setting("snapshot.pickle", "file that --record-memory-history writes")
    metrics_jsonl: str | None = setting(None, "second file for what runs/NAME/metrics.jsonl has")
    tensorboard_dir: str | None = common(None, "TensorBoard folder, with Megatron's tags")
    wandb_project: str | None = common(None, "Weights & Biases project")
    wandb_entity: str | None = setting(None, "wandb team or user", needs="--wandb-project")
    wandb_exp_name: str | None = setting(None, "wandb run name; default --run-name", needs="--wandb-project")
    wandb_save_dir: str | None = setting(None, "wandb folder; default runs/NAME", needs="--wandb-project")

    @property
    def folder(self) -> Path:
        """runs/NAME: the folder of all files that a run writes."""
        return Path("runs") / self.run_name


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    model: TransformerConfig = TransformerConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    faults: FaultConfig = FaultConfig()
    run: RunConfig = RunConfig()

    @property
    def dtype_name(self) -> str:
        """torch's name of the type of weights and activations."""
        return "bfloat16" if self.precision.bf16 else "float16" if self.precision.fp16 else "float32"

    @property
    def sequence_cut(self) -> int:
        """The number of tp ranks that shard the residual stream along the sequence."""
        return self.parallel.tensor_model_parallel_size if self.model.sequence_parallel else 1

    @property
    def grad_dtype_name(self) -> str:
        """torch's name of the type in which gradients are accumulated and reduced over dp."""
        bf16 = self.parallel.grad_reduce_in_bf16 or self.optimizer.main_grads_dtype == "bf16"
        return "bfloat16" if bf16 else "float32"


def padded_vocab_size(vocab_size: int, multiple: int, tp: int) -> int:
    """vocab_size rounded up to a multiple of `multiple * tp`, so that all tp ranks hold equally many rows."""
    step = multiple * tp
    return -(-vocab_size // step) * step

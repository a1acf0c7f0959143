"""A whole run looked at before it starts: what is wrong with it, and the values that follow from others.

Everything here is a function of the settings, the number of processes and, for input files, of what exists.
A message has the flag and its value, the rule, and what to change:

    --num-attention-heads 6: must divide by --tensor-model-parallel-size 4; nearest 4 or 8
"""

import contextlib
import hashlib
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanomegatron.config.batch import samples_before, stages
from nanomegatron.config.check_data import data_errors
from nanomegatron.config.check_fp8 import fp8_errors, gpu_errors
from nanomegatron.config.check_moe import RECOMPUTED, moe_errors
from nanomegatron.config.check_parallel import context_errors, fast_path_errors, multiple, parallel_errors
from nanomegatron.config.check_pipeline import pipeline_errors, with_virtual_stages
from nanomegatron.config.cli import SHAPE, flag, sections
from nanomegatron.config.model import layer_pattern
from nanomegatron.config.settings import Config, TransformerConfig

# Settings that change neither what is trained nor how it is laid out: they have no part in a run's name.
RECORDS = """
save load save_interval ckpt_format ckpt_step finetune no_load_optim no_save_optim nproc device run_name
run_folder_per_host eval_interval eval_iters eval_only exit_interval exit_duration_in_mins log_interval
log_throughput log_comm
log_params_norm log_num_zeros_in_grad timing_log_level timing_log_option metrics_jsonl tensorboard_dir
wandb_project data_cache_path num_workers distributed_backend distributed_timeout_minutes trace_dir
trace_iterations profile profile_step_start profile_step_end profile_ranks record_memory_history
memory_snapshot_path log_fp8_stats moe_per_layer_logging moe_use_upcycling fast_paths
""".split()
# Settings of model and data that may change when a run goes on.
CHANGEABLE = """
data_cache_path micro_batch_size num_workers attention_backend make_vocab_size_divisible_by sequence_parallel
cross_entropy_loss_fusion recompute_granularity recompute_modules recompute_method recompute_num_layers
distribute_saved_activations masked_softmax_fusion rope_fusion bias_swiglu_fusion persist_layer_norm
moe_permute_fusion moe_grouped_gemm moe_token_dispatcher_type moe_shared_expert_overlap
moe_pad_expert_input_to_capacity
""".split()
POSITIVE = """
num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels max_position_embeddings rotary_base
rotary_percent rotary_seq_len_interpolation_factor rope_scaling_factor rotary_scaling_factor yarn_beta_fast
yarn_beta_slow yarn_original_max_position_embeddings decoupled_lr iterations_to_skip
norm_epsilon tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
expert_model_parallel_size expert_tensor_parallel_size data_parallel_size distributed_timeout_minutes
loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis adam_eps seq_length micro_batch_size
global_batch_size vocab_size make_vocab_size_divisible_by nproc train_iters train_samples save_interval
exit_interval exit_duration_in_mins log_interval lr_decay_iters lr_decay_samples lr_wsd_decay_iters
lr_wsd_decay_samples eval_interval ddp_bucket_size optimizer_offload_fraction recompute_num_layers
num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank trace_iterations
microbatch_group_size_per_virtual_pipeline_stage decoder_first_pipeline_num_layers
decoder_last_pipeline_num_layers max_seqlen_per_dp_cp_rank hierarchical_context_parallel_sizes
num_experts moe_ffn_hidden_size moe_router_topk moe_router_topk_scaling_factor moe_router_num_groups
moe_router_group_topk moe_expert_capacity_factor moe_shared_expert_intermediate_size
""".split()
NOT_NEGATIVE = """
num_query_groups lr min_lr decoupled_min_lr lr_warmup_iters lr_warmup_samples lr_warmup_init weight_decay
start_weight_decay end_weight_decay clip_grad eval_iters init_method_std ckpt_step seed num_workers
profile_step_start fp8_margin num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 log_fp8_stats
moe_z_loss_coeff moe_router_bias_update_rate
""".split()
SHARES = "hidden_dropout attention_dropout adam_beta1 adam_beta2 moe_input_jitter_eps".split()  # 0 <= x < 1


def validate(config: Config, world_size: int, device_type: str = "cpu", gpu: tuple = ()) -> list[str]:
    """All that is wrong with a run of `world_size` processes, a message each; `gpu`: compute capability."""
    errors = list(_ranges(config))
    layout = (parallel_errors, fast_path_errors, context_errors, pipeline_errors, moe_errors)
    checks = (_model, *layout, _recompute, _batch, _precision, _optimizer, _schedule, _length)
    for check in (*checks, data_errors, _checkpoint, _extras, _outputs, _profile, fp8_errors):
        try:
            errors += check(config, world_size, device_type)
        except (TypeError, ZeroDivisionError):
            if not errors:
                raise  # only a number that is missing or out of range, and told above, may be in the way
    return [*errors, *gpu_errors(config, gpu)]


def _ranges(config: Config) -> Iterator[str]:
    for name, value in _values(config).items():
        if value is None:
            if name in SHAPE:
                yield f"{flag(name)}: missing; give all of {', '.join(map(flag, SHAPE))}, or a --config"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{flag(name)} {value}: must be a finite number"
        elif isinstance(value, tuple) and name in POSITIVE and min(value, default=1) < 1:
            yield f"{flag(name)} {' '.join(map(str, value))}: each must be greater than 0"
        elif name in POSITIVE and not isinstance(value, tuple) and not value > 0:
            yield f"{flag(name)} {value}: must be greater than 0"
        elif name in NOT_NEGATIVE and not value >= 0:
            yield f"{flag(name)} {value}: must be at least 0"
        elif name in SHARES and not 0 <= value < 1:
            yield f"{flag(name)} {value}: must be at least 0 and less than 1"


def _model(config: Config, *_: Any) -> Iterator[str]:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, model.num_kv_heads
    if model.kv_channels is None:
        yield from multiple("hidden_size", model.hidden_size, flag("num_attention_heads"), heads)
    if heads % groups:
        near = [g for g in range(1, heads + 1) if heads % g == 0]
        nearest = min(near, key=lambda g: abs(g - groups))
        yield f"--num-query-groups {groups}: must divide --num-attention-heads {heads}; nearest {nearest}"
    tp_flag = flag("tensor_model_parallel_size")
    yield from multiple("num_attention_heads", heads, tp_flag, tp)
    if groups % tp and tp % groups and heads % tp == 0:
        near = [g for g in range(1, heads + 1) if heads % g == 0 and (g % tp == 0 or tp % g == 0)]
        nearest = min(near, key=lambda g: abs(g - groups))
        yield f"--num-query-groups {groups}: must divide {tp_flag} {tp} or divide by it; nearest {nearest}"
    if model.num_experts is None:
        yield from multiple("ffn_hidden_size", model.ffn_size, tp_flag, tp)
    yield from _positions(config)
    if model.swiglu and model.squared_relu:
        yield "--swiglu --squared-relu: only one of the two"
    try:
        layer_pattern(model.window_attn_skip_freq, model.num_layers)
    except ValueError as error:
        yield f"--window-attn-skip-freq {error}"
    if model.window_attn_skip_freq is not None and not model.window_size:
        yield f"--window-attn-skip-freq {model.window_attn_skip_freq}: needs --window-size"
    window = " ".join(map(str, model.window_size))
    if window and (len(model.window_size) != 2 or model.window_size[0] < -1 or model.window_size[1]):
        yield f"--window-size {window}: must be two numbers, keys before (-1 for all) and 0, such as 4095 0"


def _positions(config: Config) -> Iterator[str]:
    model, kind = config.model, config.model.position_embedding_type
    rotated = int(model.head_dim * model.rotary_percent)
    if model.rotary_percent > 1:
        yield f"--rotary-percent {model.rotary_percent}: must be at most 1"
    elif kind in ("rope", "yarn") and (rotated % 2 or not rotated):
        share = "" if model.rotary_percent == 1 else f" x --rotary-percent {model.rotary_percent} = {rotated}"
        yield f"head size {model.head_dim}{share}: must be even for {kind}; set {flag('kv_channels')}"
    if model.use_rope_scaling and kind != "rope":
        yield f"--use-rope-scaling: needs --position-embedding-type rope, not {kind}"
    if (factor := model.rotary_seq_len_interpolation_factor) != 1 and kind != "rope":
        name = f"--rotary-seq-len-interpolation-factor {factor}"
        yield f"{name}: needs --position-embedding-type rope, not {kind}"
    if model.yarn_beta_fast <= model.yarn_beta_slow:
        yield f"--yarn-beta-fast {model.yarn_beta_fast}: must exceed --yarn-beta-slow {model.yarn_beta_slow}"
    length, longest = config.data.seq_length, model.max_position_embeddings
    if longest is not None and longest < length:
        yield f"--seq-length {length}: must not exceed --max-position-embeddings {longest}; raise that"


def _batch(config: Config, world: int, _: str) -> Iterator[str]:
    data, copy = config.data, config.parallel.ranks_per_replica
    dp = world // copy
    unit = 1 if data.variable_seq_lengths else dp * data.micro_batch_size  # documents are shared out anyhow
    names = ("step_batch_size_schedule", "rampup_batch_size", "global_batch_size")
    given = [name for name in names if getattr(data, name) not in (None, ())]
    name = given[0] if given else names[-1]
    value = getattr(data, name)
    words = f"{flag(name)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
    try:
        sizes = [size for _, size in stages(data, dp)]
    except ValueError as error:
        yield f"{words}: {error}"
        return
    if name == names[0] and given[1:] and data.global_batch_size != sizes[-1]:  # which `resolve` fills in
        yield f"{words}: gives every batch size; leave {' and '.join(map(flag, given[1:]))} out"
    elif world % copy == 0:
        bad = next((size for size in sizes if size % unit), unit)
        yield from multiple(name, bad, f"--micro-batch-size {data.micro_batch_size} x dp {dp} =", unit)


def _precision(config: Config, _: int, device: str) -> Iterator[str]:
    if config.precision.bf16 and config.precision.fp16:
        yield "--bf16 --fp16: only one of the two"
    if config.precision.loss_scale and not config.precision.fp16:
        yield f"--loss-scale {config.precision.loss_scale}: is for --fp16"
    if config.model.attention_dropout and config.model.attention_backend == "flash" and device == "cpu":
        yield "--attention-backend flash: has no attention dropout on a CPU; use auto or unfused"
    if config.model.attention_backend == "fused" and (device == "cpu" or config.dtype_name == "float32"):
        yield "--attention-backend fused: needs a GPU and --bf16 or --fp16; use auto"


def _optimizer(config: Config, *_: Any) -> Iterator[str]:
    opt, names = config.optimizer, ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    given = [f"{flag(name)} {getattr(opt, name)}" for name in names if getattr(opt, name) != "fp32"]
    if given and not opt.use_precision_aware_optimizer:
        yield f"{', '.join(given)}: needs --use-precision-aware-optimizer"
    if config.grad_dtype_name == "bfloat16" and not config.precision.bf16:
        name = "grad-reduce-in-bf16" if config.parallel.grad_reduce_in_bf16 else "main-grads-dtype bf16"
        yield f"--{name}: needs --bf16"
    fraction = opt.optimizer_offload_fraction
    if fraction > 1:
        yield f"--optimizer-offload-fraction {fraction}: must be at most 1"
    if opt.optimizer_cpu_offload:
        if config.dtype_name == "float32":
            yield "--optimizer-cpu-offload: needs --bf16 or --fp16; in fp32 the weights are the main weights"
        if moments := [text for text in given if "exp-avg" in text]:
            yield f"{', '.join(moments)}: moments in host memory are fp32 (--optimizer-cpu-offload)"
    elif fraction < 1 or opt.overlap_cpu_optimizer_d2h_h2d:
        name = "optimizer-offload-fraction" if fraction < 1 else "overlap-cpu-optimizer-d2h-h2d"
        yield f"--{name}: needs --optimizer-cpu-offload"


def _recompute(config: Config, *_: Any) -> Iterator[str]:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    full, known = (
        model.recompute_granularity == "full",
        ("core_attn", "mlp", "mlp_act", "layernorm", *RECOMPUTED),
    )
    if strange := [name for name in model.recompute_modules if name not in known]:
        yield f"--recompute-modules {' '.join(strange)}: must be of {', '.join(known)}"
    selective, usual = model.recompute_granularity == "selective", TransformerConfig().recompute_modules
    if selective and not model.recompute_modules:
        yield f"--recompute-modules: must name one or more of {', '.join(known)}"
    elif not selective and model.recompute_modules != usual:
        yield "--recompute-modules: needs --recompute-granularity selective"
    given = [
        name for name in ("recompute_method", "recompute_num_layers") if getattr(model, name) is not None
    ]
    if full and len(given) < 2:
        yield "--recompute-granularity full: needs --recompute-method and --recompute-num-layers"
    elif given and not full:
        yield f"{flag(given[0])}: needs --recompute-granularity full"
    if model.distribute_saved_activations and not full:
        yield "--distribute-saved-activations: needs --recompute-granularity full"
    elif model.distribute_saved_activations:
        yield from multiple("hidden_size", model.hidden_size, flag("tensor_model_parallel_size"), tp)


def _schedule(config: Config, *_: Any) -> Iterator[str]:
    opt, run = config.optimizer, config.run
    if opt.min_lr > opt.lr:
        yield f"--min-lr {opt.min_lr}: must not exceed --lr {opt.lr}"
    low = opt.min_lr if opt.decoupled_min_lr is None else opt.decoupled_min_lr
    if opt.decoupled_lr is None and opt.decoupled_min_lr is not None:
        yield f"--decoupled-min-lr {low}: needs --decoupled-lr"
    elif opt.decoupled_lr is not None and low > opt.decoupled_lr:
        yield f"--decoupled-lr {opt.decoupled_lr}: must be at least --decoupled-min-lr (or --min-lr) {low}"
    start, end, style = opt.start_weight_decay, opt.end_weight_decay, opt.weight_decay_incr_style
    if style == "constant" and (start is not None or end is not None):
        yield "--start-weight-decay, --end-weight-decay: need --weight-decay-incr-style linear or cosine"
    elif style != "constant" and (start is None or end is None or start > end):
        need = f"needs --start-weight-decay ({start}) and an --end-weight-decay ({end}) no smaller"
        yield f"--weight-decay-incr-style {style}: {need}"
    if opt.lr_warmup_init > opt.lr:
        yield f"--lr-warmup-init {opt.lr_warmup_init}: must not exceed --lr {opt.lr}"
    names = ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples")
    if len(given := [flag(name) for name in names if getattr(opt, name)]) > 1:
        yield f"{', '.join(given)}: the warm-up is given {len(given)} times; give one"
    fraction = opt.lr_warmup_fraction
    if fraction is not None and not 0 <= fraction <= 1:
        yield f"--lr-warmup-fraction {fraction}: must be between 0 and 1"
    by_samples = run.train_samples is not None
    other, own = ("iters", "samples") if by_samples else ("samples", "iters")
    for name in ("lr_decay_", "lr_warmup_", "lr_wsd_decay_"):
        if value := getattr(opt, name + other):
            yield f"{flag(name + other)} {value}: the run is counted in {own}; use {flag(name + own)}"
    decay = getattr(opt, f"lr_decay_{own}") or getattr(run, f"train_{own}")
    warmup, wsd = getattr(opt, f"lr_warmup_{own}"), getattr(opt, f"lr_wsd_decay_{own}")
    if decay and warmup >= decay and warmup:
        yield f"--lr-warmup-{own} {warmup}: must be less than the decay's {decay}; see --lr-decay-{own}"
    if opt.lr_decay_style == "WSD" and not wsd:
        yield f"--lr-decay-style WSD: needs --lr-wsd-decay-{own}, the length of its last part"
    if decay and wsd and wsd + warmup > decay:
        yield f"--lr-wsd-decay-{own} {wsd}: with the warm-up's {warmup} longer than the decay's {decay}"


def _length(config: Config, world: int, _: str) -> Iterator[str]:
    run, data = config.run, config.data
    if run.train_iters and run.train_samples:
        by_samples = replace(config, run=replace(run, train_iters=None))
        dp = world // config.parallel.ranks_per_replica
        with contextlib.suppress(ValueError):  # told by _batch
            if len(samples_before(by_samples, dp)) != run.train_iters + 1:  # which `resolve` fills in
                both = f"--train-iters {run.train_iters} --train-samples {run.train_samples}"
                yield f"{both}: give one of the two"
    if run.seed >= 2**32:
        yield f"--seed {run.seed}: must be less than 4294967296, for numpy's generator of the data order"
    if run.run_name is not None and (not run.run_name.strip(".") or "/" in run.run_name):
        yield f"--run-name {run.run_name}: must be the name of a folder in runs/, without a slash"
    batch, grows = data.global_batch_size, data.rampup_batch_size or data.step_batch_size_schedule
    if run.train_samples and batch and not grows:
        yield from multiple("train_samples", run.train_samples, flag("global_batch_size"), batch)
    if run.eval_only and not run.eval_iters:
        yield "--eval-only: needs --eval-iters, the number of global batches to evaluate"


def _checkpoint(config: Config, *_: Any) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.load is None:
        for name in ("finetune", "no_load_optim"):
            if getattr(checkpoint, name):
                yield f"{flag(name)}: needs --load"


def _extras(config: Config, *_: Any) -> Iterator[str]:
    for name, package in (("tensorboard_dir", "tensorboard"), ("wandb_project", "wandb")):
        if (value := getattr(config.run, name)) and importlib.util.find_spec(package) is None:
            yield f"{flag(name)} {value}: needs the package {package}: pip install {package}"


def _outputs(config: Config, *_: Any) -> Iterator[str]:
    for name in ("metrics_jsonl", "memory_snapshot_path", "tensorboard_dir", "trace_dir"):
        if value := getattr(config.run, name):
            is_file = name in ("metrics_jsonl", "memory_snapshot_path")
            folder = Path(value).parent if is_file else Path(value)
            while not folder.exists():
                folder = folder.parent
            if is_file and Path(value).is_dir():
                yield f"{flag(name)} {value}: is a folder; give the name of a file"
            elif not folder.is_dir():
                yield f"{flag(name)} {value}: {folder} is a file; give another folder"


def _profile(config: Config, world: int, device: str) -> Iterator[str]:
    run = config.run
    if run.trace_dir is not None and not run.trace_iterations:
        yield f"--trace-dir {run.trace_dir}: needs --trace-iterations, the steps to show"
    if run.profile and run.profile_step_end <= run.profile_step_start:
        start = f"--profile-step-start {run.profile_step_start}"
        yield f"--profile-step-end {run.profile_step_end}: must exceed {start}; the step itself is not seen"
    if run.profile and (strange := [rank for rank in run.profile_ranks if not 0 <= rank < world]):
        yield f"--profile-ranks {' '.join(map(str, strange))}: must be of the processes 0 to {world - 1}"
    if run.record_memory_history and device != "cuda":
        yield "--record-memory-history: needs a GPU, whose allocations it records"


def resolve(config: Config, world_size: int) -> Config:
    """The same run with the values that follow from others filled in; `config` must be valid."""
    model, data, run, opt = config.model, config.data, config.run, config.optimizer
    dp = world_size // config.parallel.ranks_per_replica
    _, batch = stages(data, dp)[-1]
    iters = run.train_iters or len(samples_before(config, dp)) - 1
    return replace(
        config,
        model=replace(
            model,
            num_query_groups=model.num_kv_heads,
            kv_channels=model.head_dim,
            ffn_hidden_size=model.ffn_size,
            moe_ffn_hidden_size=model.moe_ffn_size if model.num_experts else None,
            max_position_embeddings=model.max_position_embeddings or data.seq_length,
        ),
        parallel=replace(
            with_virtual_stages(config),
            data_parallel_size=dp,
            ddp_bucket_size=_bucket_size(config, dp),
        ),
        optimizer=opt,
        data=replace(data, global_batch_size=batch),
        run=replace(run, train_iters=iters),
    )


def remarks(config: Config) -> list[str]:
    """What was asked for and is so already, or in part."""
    notes, data, precision = [], config.data, config.precision
    if precision.fp8_format and config.model.num_experts and precision.fp8_recipe != "rowwise":
        why = "torch multiplies groups in FP8 with scales of rows alone (--fp8-recipe rowwise)"
        notes.append(f"--fp8-recipe {precision.fp8_recipe}: experts multiply in bf16, the rest in FP8; {why}")
    if config.model.distribute_saved_activations and config.model.sequence_parallel:
        notes.append("--distribute-saved-activations: with --sequence-parallel they are cut as they are")
    if data.variable_seq_lengths and (data.reset_position_ids or data.reset_attention_mask):
        which = "--reset-position-ids, --reset-attention-mask: with --variable-seq-lengths"
        notes.append(f"{which} documents end where the data has it, not at end-of-document tokens")
    return notes


def _bucket_size(config: Config, dp: int) -> int | None:
    """Updates that take memory for a bucket, on the device or the host, want more than one."""
    opt = config.optimizer
    in_16_bits = "bf16" in (opt.main_grads_dtype, opt.exp_avg_dtype, opt.exp_avg_sq_dtype)
    wanted = opt.optimizer_cpu_offload or in_16_bits or config.parallel.grad_reduce_in_bf16
    return config.parallel.ddp_bucket_size or (max(40_000_000, 1_000_000 * dp) if wanted else None)


def default_run_name(config: Config, preset: str | None) -> str:
    """A name for runs/: the preset's, and eight digits for all that decides the result and the layout."""
    text = repr({name: value for name, value in _values(config).items() if name not in RECORDS})
    return f"{preset or 'run'}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def must_match(earlier: Config, config: Config) -> list[str]:
    """What keeps `config` from going on in the folder of `earlier`: another model, data, batch or seed."""
    names = {s.name for part, s in sections() if part in ("model", "data")} - set(CHANGEABLE) | {"seed"}
    pairs = zip(_values(earlier).items(), _values(config).values(), strict=True)
    return [
        f"{flag(name)} {new}: the run in this folder has {old}"
        for (name, old), new in pairs
        if name in names and old != new
    ]


def _values(config: Config) -> dict[str, Any]:
    """Every setting by name."""
    return {s.name: getattr(getattr(config, part), s.name) for part, s in sections()}

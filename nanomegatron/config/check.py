"""Checks of a whole run before it starts, and the values that follow from other settings.

Everything here is a function of the settings, the number of processes and which input files exist.
`config/rules.py` checks each setting by its declaration; this module, `check_layout` and `check_model` check
settings against each other. A message has the flag and its value, the rule, and what to change:

    --num-attention-heads 6: must be a multiple of --tensor-model-parallel-size 4; nearest 4 or 8
"""

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from nanomegatron.config.batch import samples_before, stages
from nanomegatron.config.check_layout import layout_errors, multiple, with_virtual_stages
from nanomegatron.config.check_model import data_errors, fp8_errors, model_errors
from nanomegatron.config.parallel import ParallelConfig
from nanomegatron.config.rules import beyond_limits, broken_rules, flag, spelled, those_that_hold
from nanomegatron.config.settings import MOST_ITERS, Config, RunConfig
from nanomegatron.config.user_files import escaped

MOST_EVALUATED = 100  # global batches in an evaluation, by default: Megatron's number


def validate(config: Config, world_size: int, device_type: str = "cpu", gpu: tuple = ()) -> list[str]:
    """Return a message for each error in a run of `world_size` processes; gpu: its compute capability."""
    errors = list(broken_rules(config))
    if beyond_limits(config):
        return errors
    for check in (
        model_errors(config, device_type),
        layout_errors(config, world_size, device_type),
        batch_errors(config, world_size),
        schedule_errors(config),
        data_errors(config),
        record_errors(config, world_size, device_type),
        fp8_errors(config, gpu),
    ):
        try:
            errors += check
        except (TypeError, ValueError, ZeroDivisionError):
            if not errors:
                raise  # expected only after a missing or out-of-bounds value, which is reported above
    return errors


def batch_errors(config: Config, world: int) -> Iterator[str]:
    """Yield the errors in the batch sizes and the length of the run."""
    data, run, copy = config.data, config.run, config.parallel.ranks_per_replica
    dp = world // copy
    names = ("step_batch_size_schedule", "rampup_batch_size", "global_batch_size")
    given = [name for name in names if getattr(data, name) not in (None, ())] or [names[-1]]
    words = spelled(given[0], getattr(data, given[0]))
    try:
        sizes = [size for _, size in stages(data, dp)]
    except ValueError as error:
        yield f"{words}: {error}"
        return
    # A microbatch may contain any number of documents.
    unit = 1 if data.variable_seq_lengths else dp * data.micro_batch_size
    if given[0] == names[0] and given[1:] and data.global_batch_size != sizes[-1]:  # which `resolve` fills in
        yield f"{words}: gives every batch size; leave {' and '.join(map(flag, given[1:]))} out"
    elif world % copy == 0:
        bad = next((size for size in sizes if size % unit), unit)
        of = f"--micro-batch-size {data.micro_batch_size} x dp {dp} ="
        if run.elastic and bad % unit:
            whole = math.gcd(*sizes)
            some = [str(n * copy) for n in range(1, 2 * dp) if whole % (n * data.micro_batch_size) == 0]
            fix = f"{' or '.join(some) or 'no number of'} processes can share it"
            yield f"{flag(given[0])} {bad}: must be a multiple of {of} {unit}; {fix}"
        else:
            yield from multiple(flag(given[0]), bad, of, unit)
    if run.train_samples and run.train_samples > MOST_ITERS * min(sizes):
        iters = run.train_samples // min(sizes)
        yield f"--train-samples {run.train_samples}: {iters} iterations; must be at most {MOST_ITERS}"
    elif run.train_iters and run.train_samples and min(sizes) > 0:
        by_samples = replace(config, run=replace(run, train_iters=None))
        if len(samples_before(by_samples, dp)) != run.train_iters + 1:  # which `resolve` fills in
            yield f"--train-iters {run.train_iters} --train-samples {run.train_samples}: give one of the two"


def schedule_errors(config: Config) -> Iterator[str]:
    """Yield the errors in the learning rate's schedule."""
    opt, run = config.optimizer, config.run
    decoupled = opt.decoupled_lr is not None and opt.decoupled_min_lr is None
    other, own = ("iters", "samples") if run.train_samples is not None else ("samples", "iters")
    for name in ("lr_decay_", "lr_warmup_", "lr_wsd_decay_"):
        if value := getattr(opt, name + other):
            yield f"{flag(name + other)} {value}: the run is counted in {own}; use {flag(name + own)}"
    decay = getattr(opt, f"lr_decay_{own}") or getattr(run, f"train_{own}")
    warmup, wsd = getattr(opt, f"lr_warmup_{own}"), getattr(opt, f"lr_wsd_decay_{own}")
    yield from those_that_hold(
        (
            decoupled and opt.min_lr > opt.decoupled_lr,
            f"--decoupled-lr {opt.decoupled_lr}: must be at least --min-lr {opt.min_lr}",
        ),
        (
            decay and warmup >= decay and warmup,
            f"--lr-warmup-{own} {warmup}: must be less than the decay's {decay}; see --lr-decay-{own}",
        ),
        (
            opt.lr_decay_style == "WSD" and not wsd,
            f"--lr-decay-style WSD: needs --lr-wsd-decay-{own}, the length of its last part",
        ),
        (
            decay and wsd and wsd + warmup > decay,
            f"--lr-wsd-decay-{own} {wsd}: with the warm-up's {warmup} longer than the decay's {decay}",
        ),
    )


def record_errors(config: Config, world: int, device: str) -> Iterator[str]:
    """Yield the errors in a run's name, packages, files and steps, and in what it does about bad steps."""
    run = config.run
    if run.run_name is not None and not _names_a_folder(run.run_name):
        yield (
            f"--run-name {escaped(run.run_name, keep='')[:200]}: must be the name of a folder in runs/, "
            "of printable characters without a slash, of at most 200 bytes, and not latest, a link there"
        )
    for name, package in (("tensorboard_dir", "tensorboard"), ("wandb_project", "wandb")):
        if (value := getattr(run, name)) and importlib.util.find_spec(package) is None:
            yield f"{flag(name)} {value}: needs the package {package}: pip install {package}"
    for name in ("metrics_jsonl", "memory_snapshot_path", "tensorboard_dir", "trace_dir"):
        if value := getattr(run, name):
            path = Path(value)
            is_file = name in ("metrics_jsonl", "memory_snapshot_path")
            folder = next(above for above in (path, *path.parents)[is_file:] if above.exists())
            if is_file and path.is_dir():
                yield f"{flag(name)} {value}: is a folder; give the name of a file"
            elif not folder.is_dir():
                yield f"{flag(name)} {value}: {folder} is a file; give another folder"
    file = run.exit_on_preemption_file
    mode = config.faults.rerun_mode
    strange = [rank for rank in run.profile_ranks if rank >= world]
    exact = config.precision.deterministic_mode or device != "cuda"
    yield from those_that_hold(
        (
            file and Path(file).exists(),
            f"--exit-on-preemption-file {file}: exists already, so the run would end at once; remove it",
        ),
        (
            run.profile and run.profile_step_end <= run.profile_step_start,
            f"--profile-step-end {run.profile_step_end}: must exceed --profile-step-start "
            f"{run.profile_step_start}; the step itself is not seen",
        ),
        (
            run.profile and strange,
            f"--profile-ranks {' '.join(map(str, strange))}: must be of the processes 0 to {world - 1}",
        ),
        (
            mode != "disabled" and not exact,
            f"--rerun-mode {mode}: add --deterministic-mode, so that a step run again gives the same bits",
        ),
        (
            run.record_memory_history and device != "cuda",
            "--record-memory-history: needs a GPU, whose allocations it records",
        ),
    )


def _names_a_folder(name: str) -> bool:
    """Whether a folder in runs/ may have this name on every file system, and be shown in every terminal."""
    if "/" in name or name.strip(".") in ("", "latest"):
        return False
    return name.isprintable() and len(name.encode()) <= 200


def resolve(config: Config, world_size: int) -> Config:
    """Return the config with the values that follow from others filled in; `config` must be valid."""
    model, data, run = config.model, config.data, config.run
    dp = world_size // config.parallel.ranks_per_replica
    _, batch = stages(data, dp)[-1]
    iters = run.train_iters or len(samples_before(config, dp)) - 1
    held_out = min(MOST_EVALUATED, max(1, iters // 10))
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
        parallel=resolve_parallel(config, dp),
        data=replace(data, global_batch_size=batch),
        run=replace(
            run, train_iters=iters, eval_iters=held_out if run.eval_iters is None else run.eval_iters
        ),
    )


def unseen_notes(run: RunConfig, done: int) -> Iterator[str]:
    """Yield notes on records of steps that a run does not have which continues after step `done`."""
    left = range(done + 1, run.train_iters + 1)
    profiled = range(run.profile_step_start, run.profile_step_end)
    for name, wanted, steps in (
        ("trace_iterations", run.trace_dir, run.trace_iterations),
        ("profile_step_start", run.profile, profiled),
    ):
        if wanted and left and not any(step in left for step in steps):
            given = spelled(name, getattr(run, name))
            yield f"{given}: nothing is recorded, the steps to come are {left[0]} to {left[-1]}"


def run_notes(config: Config) -> list[str]:
    """Return notes on settings that have no effect, or only a partial one."""
    run = config.run
    data = config.data
    checkpoint = config.checkpoint
    model = config.model
    parallel = config.parallel
    precision = config.precision
    samples = run.train_samples or 0
    batch = data.global_batch_size or 1
    hang = run.hang_timeout_secs or 0
    limit = 60 * parallel.distributed_timeout_minutes
    return those_that_hold(
        (
            precision.fp8_format and model.num_experts and precision.fp8_recipe != "rowwise",
            f"--fp8-recipe {precision.fp8_recipe}: experts multiply in bf16, the rest in FP8; "
            "torch has grouped FP8 matmuls only with scales per row (--fp8-recipe rowwise)",
        ),
        (
            model.distribute_saved_activations and model.sequence_parallel,
            "--distribute-saved-activations: with --sequence-parallel they are sharded already",
        ),
        (
            data.variable_seq_lengths and (data.reset_position_ids or data.reset_attention_mask),
            "--reset-position-ids, --reset-attention-mask: with --variable-seq-lengths "
            "documents end where the data has it, not at end-of-document tokens",
        ),
        (
            data.tiktoken_pattern and data.tokenizer_type != "TikTokenizer",
            f"--tiktoken-pattern {data.tiktoken_pattern}: only --tokenizer-type TikTokenizer has one",
        ),
        (
            checkpoint.async_save and checkpoint.ckpt_format != "sharded",
            f"--async-save: a save in --ckpt-format {checkpoint.ckpt_format} is waited for; sharded is not",
        ),
        (
            hang and hang >= limit,
            f"--hang-timeout-secs {hang:g}: collectives end after {limit:g} s, before a rank is named "
            "(--distributed-timeout-minutes)",
        ),
        (
            run.check_replicas and parallel.data_parallel_size == parallel.ranks_per_replica == 1,
            f"--check-replicas {run.check_replicas}: a single process has no replica",
        ),
        (
            not data.rampup_batch_size and samples % batch,
            f"--train-samples {samples}: {samples // batch * batch} are trained, in batches of {batch}",
        ),
    )


def resolve_parallel(config: Config, dp: int) -> ParallelConfig:
    """The same of the layout alone: buckets have a size if the update needs temporary memory for each."""
    parallel, opt = with_virtual_stages(config), config.optimizer
    in_16_bits = "bf16" in (opt.main_grads_dtype, opt.exp_avg_dtype, opt.exp_avg_sq_dtype)
    wanted = opt.optimizer_cpu_offload or in_16_bits or parallel.grad_reduce_in_bf16
    bucket = parallel.finite_bucket_size(dp) if wanted else parallel.ddp_bucket_size
    return replace(parallel, data_parallel_size=dp, ddp_bucket_size=bucket)

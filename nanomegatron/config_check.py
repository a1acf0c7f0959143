"""A whole run looked at before it starts: what is wrong with it, and the values that follow from others.

Everything here is a function of the settings, the number of processes and, for input files, of what exists.
A message has the flag and its value, the rule, and what to change:

    --num-attention-heads 6: must divide by --tensor-model-parallel-size 4; nearest 4 or 8
"""

import dataclasses
import hashlib
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanomegatron.config import Config
from nanomegatron.config_cli import SHAPE, flag, sections

# Settings that change neither what is trained nor how it is laid out: they have no part in a run's name.
RECORDS = """
save load save_interval ckpt_format ckpt_step finetune no_load_optim no_save_optim nproc device run_name
eval_interval eval_iters exit_interval exit_duration_in_mins log_interval log_throughput log_comm
metrics_jsonl tensorboard_dir wandb_project data_cache_path distributed_backend distributed_timeout_minutes
""".split()
POSITIVE = """
num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels max_position_embeddings rotary_base
norm_epsilon tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
expert_model_parallel_size expert_tensor_parallel_size data_parallel_size distributed_timeout_minutes
loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis adam_eps seq_length micro_batch_size
global_batch_size vocab_size make_vocab_size_divisible_by nproc train_iters train_samples save_interval
exit_interval exit_duration_in_mins log_interval lr_decay_iters lr_decay_samples lr_wsd_decay_iters
lr_wsd_decay_samples eval_interval
""".split()
NOT_NEGATIVE = """
num_query_groups lr min_lr lr_warmup_iters lr_warmup_samples lr_warmup_init weight_decay clip_grad eval_iters
init_method_std ckpt_step seed
""".split()
SHARES = "hidden_dropout attention_dropout adam_beta1 adam_beta2".split()  # 0 <= x < 1
NOT_BUILT = {
    "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
}


def validate(config: Config, world_size: int, device_type: str = "cpu") -> list[str]:
    """Everything that is wrong with a run of `world_size` processes, a message each; none if it can start."""
    errors = list(_ranges(config))
    for check in (_model, _parallel, _batch, _precision, _schedule, _length, _data, _checkpoint, _extras):
        try:
            errors += check(config, world_size, device_type)
        except (TypeError, ZeroDivisionError):
            if not errors:
                raise  # only a number that is missing or out of range, and told above, may be in the way
    return errors


def _ranges(config: Config) -> Iterator[str]:
    for part, setting in sections():
        name, value = setting.name, getattr(getattr(config, part), setting.name)
        if value is None:
            if name in SHAPE:
                yield f"{flag(name)}: missing; give all of {', '.join(map(flag, SHAPE))}, or a --config"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{flag(name)} {value}: must be a finite number"
        elif name in POSITIVE and not value > 0:
            yield f"{flag(name)} {value}: must be greater than 0"
        elif name in NOT_NEGATIVE and not value >= 0:
            yield f"{flag(name)} {value}: must be at least 0"
        elif name in SHARES and not 0 <= value < 1:
            yield f"{flag(name)} {value}: must be at least 0 and less than 1"


def _multiple(name: str, value: int, of: str, unit: int) -> Iterator[str]:
    """An error if `value` is no multiple of `unit`, with the nearest values that are."""
    if value % unit:
        near = [n for n in (value // unit * unit, (value // unit + 1) * unit) if n]
        yield f"{flag(name)} {value}: must divide by {of} {unit}; nearest {' or '.join(map(str, near))}"


def _model(config: Config, *_: Any) -> Iterator[str]:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, model.num_kv_heads
    if model.kv_channels is None:
        yield from _multiple("hidden_size", model.hidden_size, flag("num_attention_heads"), heads)
    if heads % groups:
        near = [g for g in range(1, heads + 1) if heads % g == 0]
        nearest = min(near, key=lambda g: abs(g - groups))
        yield f"--num-query-groups {groups}: must divide --num-attention-heads {heads}; nearest {nearest}"
    tp_flag = flag("tensor_model_parallel_size")
    yield from _multiple("num_attention_heads", heads, tp_flag, tp)
    if groups % tp and model.num_query_groups and heads % tp == 0:
        yield (
            f"--num-query-groups {groups}: must divide by {tp_flag} {tp} (key/value heads are not replicated "
            f"in this version); use a {tp_flag} that divides it"
        )
    yield from _multiple("ffn_hidden_size", model.ffn_size, tp_flag, tp)
    if model.position_embedding_type == "rope" and model.head_dim % 2:
        yield f"head size {model.head_dim}: must be even for rope; set {flag('kv_channels')}"
    length, longest = config.data.seq_length, model.max_position_embeddings
    if longest is not None and longest < length:
        yield f"--seq-length {length}: must not exceed --max-position-embeddings {longest}; raise that"


def _parallel(config: Config, world: int, device: str) -> Iterator[str]:
    parallel = config.parallel
    for name, kind in NOT_BUILT.items():
        if (size := getattr(parallel, name)) > 1:
            yield f"{flag(name)} {size}: {kind} parallelism is not in this version; leave it at 1"
    if parallel.expert_tensor_parallel_size not in (None, 1, parallel.tensor_model_parallel_size):
        yield f"--expert-tensor-parallel-size {parallel.expert_tensor_parallel_size}: there are no experts"
    tp = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and tp > 1:
        yield "--sequence-parallel: is not in this version; leave it out"
    if world % tp:
        fits = [n for n in range(1, world + 1) if world % n == 0]
        yield (
            f"--tensor-model-parallel-size {tp}: must divide the number of processes, {world}; use "
            f"--nproc {-(-world // tp) * tp} or a size of {', '.join(map(str, fits))}"
        )
    elif parallel.data_parallel_size not in (None, world // tp):
        yield (
            f"--data-parallel-size {parallel.data_parallel_size}: {world} processes / tp {tp} give "
            f"{world // tp}; start {parallel.data_parallel_size * tp} processes (--nproc) or leave it out"
        )
    if parallel.distributed_backend == "nccl" and device != "cuda":
        yield "--distributed-backend nccl: needs GPUs; leave it out for gloo"


def _batch(config: Config, world: int, _: str) -> Iterator[str]:
    data, tp = config.data, config.parallel.tensor_model_parallel_size
    if data.global_batch_size and world % tp == 0:
        unit = data.micro_batch_size * (world // tp)
        product = f"--micro-batch-size {data.micro_batch_size} x dp {world // tp} ="
        yield from _multiple("global_batch_size", data.global_batch_size, product, unit)


def _precision(config: Config, _: int, device: str) -> Iterator[str]:
    if config.precision.bf16 and config.precision.fp16:
        yield "--bf16 --fp16: only one of the two"
    if config.precision.loss_scale and not config.precision.fp16:
        yield f"--loss-scale {config.precision.loss_scale}: is for --fp16"
    if config.model.attention_dropout and config.model.attention_backend == "flash" and device == "cpu":
        yield "--attention-backend flash: has no attention dropout on a CPU; use auto or unfused"
    if config.model.attention_backend == "fused" and (device == "cpu" or config.dtype_name == "float32"):
        yield "--attention-backend fused: needs a GPU and --bf16 or --fp16; use auto"


def _schedule(config: Config, *_: Any) -> Iterator[str]:
    opt, run = config.optimizer, config.run
    if opt.min_lr > opt.lr:
        yield f"--min-lr {opt.min_lr}: must not exceed --lr {opt.lr}"
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


def _length(config: Config, *_: Any) -> Iterator[str]:
    run, batch = config.run, config.data.global_batch_size
    same = batch and run.train_iters and run.train_iters * batch == run.train_samples  # as `resolve` fills in
    if run.train_iters and run.train_samples and not same:
        yield f"--train-iters {run.train_iters} --train-samples {run.train_samples}: give one of the two"
    if run.seed >= 2**32:
        yield f"--seed {run.seed}: must be less than 4294967296, for numpy's generator of the data order"
    if run.run_name is not None and (not run.run_name.strip(".") or "/" in run.run_name):
        yield f"--run-name {run.run_name}: must be the name of a folder in runs/, without a slash"
    if run.train_samples and batch:
        yield from _multiple("train_samples", run.train_samples, flag("global_batch_size"), batch)


def _data(config: Config, *_: Any) -> Iterator[str]:
    data = config.data
    per_split = [n for n in ("train_data_path", "valid_data_path", "test_data_path") if getattr(data, n)]
    sources = [flag(n) for n in ("data_path", "mock_data") if getattr(data, n)] + [
        "--train-data-path"
    ] * bool(per_split)
    if len(sources) > 1:
        yield f"{', '.join(sources)}: data from {len(sources)} places; give one"
    if per_split and not data.train_data_path:
        yield f"{flag(per_split[0])}: needs --train-data-path too"
    for name in ("data_path", *per_split):
        for prefix in getattr(data, name):
            if missing := [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(prefix + end).is_file()]:
                yield f"{flag(name)} {prefix}: no file {' and '.join(missing)}; make them with preprocess.py"
    try:
        weights = [float(word) for word in data.split.split(",")]
    except ValueError:
        weights = []
    if not 0 < len(weights) <= 3 or not all(0 <= w < math.inf for w in weights) or not weights[0]:
        yield f"--split {data.split}: must be up to three numbers, the first greater than 0, such as 99,1,0"
    if data.mock_data and not (data.vocab_size or data.tokenizer_type):
        yield "--mock-data: needs --vocab-size (with the NullTokenizer), or a --tokenizer-type"
    yield from _tokenizer(config)


def _tokenizer(config: Config) -> Iterator[str]:
    data, kind = config.data, config.data.tokenizer_type
    needs = {
        "GPT2BPETokenizer": ("vocab_file", "merge_file"),
        "NullTokenizer": ("vocab_size",),
        "TikTokenizer": ("tokenizer_model",),
        "HuggingFaceTokenizer": ("tokenizer_model",),
        "SentencePieceTokenizer": ("tokenizer_model",),
    }.get(kind, ())
    for name in needs:
        if not getattr(data, name):
            yield f"--tokenizer-type {kind}: needs {flag(name)}"
    for name in ("vocab_file", "merge_file", "tokenizer_model"):
        value = getattr(data, name)
        if value and kind is None:
            yield f"{flag(name)} {value}: needs --tokenizer-type"
        elif value and not Path(value).exists() and not (kind == "TikTokenizer" and "/" not in value):
            yield f"{flag(name)} {value}: no such file"


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


def resolve(config: Config, world_size: int) -> Config:
    """The same run with the values that follow from others filled in; `config` must be valid."""
    model, data, run, opt = config.model, config.data, config.run, config.optimizer
    dp = world_size // config.parallel.tensor_model_parallel_size
    batch = data.global_batch_size or data.micro_batch_size * dp
    iters = run.train_iters or (run.train_samples // batch if run.train_samples else 1000)
    return replace(
        config,
        model=replace(
            model,
            num_query_groups=model.num_kv_heads,
            kv_channels=model.head_dim,
            ffn_hidden_size=model.ffn_size,
            max_position_embeddings=model.max_position_embeddings or data.seq_length,
        ),
        parallel=replace(config.parallel, data_parallel_size=dp),
        optimizer=opt,
        data=replace(data, global_batch_size=batch),
        run=replace(run, train_iters=iters),
    )


def default_run_name(config: Config, preset: str | None) -> str:
    """A name for runs/: the preset's, and eight digits for all that decides the result and the layout."""
    text = repr({f"{part}.{s.name}": getattr(getattr(config, part), s.name) for part, s in _identity()})
    return f"{preset or 'run'}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _identity() -> Iterator[tuple[str, dataclasses.Field]]:
    return ((part, setting) for part, setting in sections() if setting.name not in RECORDS)


def must_match(earlier: Config, config: Config) -> list[str]:
    """What keeps `config` from going on in the folder of `earlier`: another model, data, batch or seed."""
    names = {s.name for part, s in sections() if part in ("model", "data")} - {
        "data_cache_path",
        "micro_batch_size",
    }
    names = names - {"attention_backend", "make_vocab_size_divisible_by"} | {"seed"}
    pairs = [
        (
            setting.name,
            getattr(getattr(earlier, part), setting.name),
            getattr(getattr(config, part), setting.name),
        )
        for part, setting in sections()
        if setting.name in names
    ]
    return [f"{flag(name)} {new}: the run in this folder has {old}" for name, old, new in pairs if old != new]

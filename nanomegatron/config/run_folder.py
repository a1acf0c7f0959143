"""The folder of a run: its name, and what may change when the run resumes in it.

runs/tiny-cpu-tp2-lr4e-3     preset, layout, flags; the same command resumes
runs/tiny-cpu-elastic        not the number of processes: so does the same command on more or fewer
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

from nanomegatron.config.check import batch_errors, resolve
from nanomegatron.config.cli import ConfigError, Parsed, saved_settings
from nanomegatron.config.rules import declared, flag, items, spelled, values_of
from nanomegatron.config.settings import Config

# Settings that follow from the number of processes if they are not given.
BY_PROCESSES = ("global_batch_size", "ddp_bucket_size", "train_iters")
MOST_IN_NAME = 100  # characters of a default --run-name
# Settings that say where data and tokenizer are: their contents are compared when the checkpoint is loaded.
PLACES = set("data_path data_args_path train_data_path valid_data_path test_data_path".split())
PLACES |= {"tokenizer_model", "vocab_file", "merge_file"}
WHICH_DATA = PLACES | {"split", "mock_data", "tokenizer_type"}
LAYOUT_AXES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "data_parallel_size": "dp",
}


def with_run_name(config: Config, parsed: Parsed) -> Config:
    """Return the resolved config of a command line with --run-name and --save filled in."""
    preset = f"{parsed.preset}/" if parsed.own_file else parsed.preset
    name = config.run.run_name or default_run_name(config, preset, parsed.given)
    folder = config.checkpoint.save or str(Path("runs") / name / "ckpt")
    return replace(
        config, run=replace(config.run, run_name=name), checkpoint=replace(config.checkpoint, save=folder)
    )


def default_run_name(config: Config, preset: str | None, given: Iterable[str]) -> str:
    """Return a folder name that says preset, layout, flags and start: "tiny-cpu-tp2-lr4e-3".

    config: resolved. given: the settings that are set by flags. A "/" marks what the name does not say in
    full, such as "mine/" for the file of a user, which may change. Such a name, and one that is too long,
    ends in a hash of all settings that decide result and layout.
    """
    named = {}
    for part, setting, value in declared(config):
        names_run = setting.metadata["names_run"]
        if names_run or (names_run is None and part not in ("checkpoint", "run")):
            named[setting.name] = value
    if config.run.elastic:
        for name in ("data_parallel_size", *(name for name in BY_PROCESSES if name not in given)):
            named.pop(name)
    layout = [f"{axis}{n}" for name, axis in LAYOUT_AXES.items() if (n := named.get(name) or 1) > 1]
    flags = [_named_flag(name, named[name]) for name in named if name in given and name not in LAYOUT_AXES]
    checkpoint, preset = config.checkpoint, preset or "run"
    if goes_on := _same_folder(checkpoint.load, f"runs/{preset.rstrip('/')}/ckpt"):
        preset = preset.rstrip("/")
    if checkpoint.load and not (config.run.eval_only or _same_folder(checkpoint.load, checkpoint.save)):
        step = checkpoint.ckpt_step
        named |= {"load": checkpoint.load, "ckpt_step": step}
        if checkpoint.finetune or not goes_on:
            flags.append("finetune/" if checkpoint.finetune else "load/")
        flags += [] if step is None else [f"ckpt-step{step}"]
    whole = "-".join([preset, *layout, *flags])
    name = re.sub(r"[^\w.+-]+", "_", whole.replace("/-", "-").rstrip("/"))[:MOST_IN_NAME]
    return name if name == whole else f"{name}-{hashlib.sha256(repr(named).encode()).hexdigest()[:8]}"


def _same_folder(one: str | None, other: str | None) -> bool:
    return None not in (one, other) and Path(one).resolve() == Path(other).resolve()


def _named_flag(name: str, value: object) -> str:
    """A setting in a folder's name: lr4e-3, bf16, no-swiglu; of a path its end, marked as incomplete."""
    if isinstance(value, bool):
        return spelled(name, value)[2:]
    small = [isinstance(x, float) and 0 < abs(x) < 0.01 for x in items(value)]
    words = [f"{Decimal(repr(x)):e}" if few else str(x) for x, few in zip(items(value), small, strict=True)]
    return flag(name)[2:] + "-".join(word.split("/")[-1] + "/" * ("/" in word) for word in words)


def resumed(config: Config, parsed: Parsed, earlier: Config | None, world_size: int) -> Config:
    """Return a resolved config as it is in a folder that holds the settings `earlier`, None if it is new.

    --elastic takes the global batch from there. Notes say what else differs. Raises ConfigError if a run may
    not change that, or the processes cannot share the batch.
    """
    asked = parsed.config.data.global_batch_size or parsed.config.data.step_batch_size_schedule
    if config.run.elastic and not asked and (batch := _batch_to_keep(config, earlier)):
        kept = replace(parsed.config, data=replace(config.data, global_batch_size=batch))
        if errors := [*batch_errors(kept, world_size)]:
            raise ConfigError(errors)
        config = with_run_name(resolve(kept, world_size), parsed)
    if earlier is None:
        return config
    if errors := resume_conflicts(earlier, config):
        batch, before = (c.data.global_batch_size for c in (config, earlier))
        fixes = [f"--elastic keeps --global-batch-size {before} on any number of processes"]
        fixes = fixes * (batch != before and not asked) + ["choose another --run-name"]
        raise ConfigError([*errors, f"{config.run.folder} holds another run: {', or '.join(fixes)}"])
    if not config.run.eval_only:
        parsed.notes.extend(f"changed {change}" for change in changed_settings(earlier, config))
    return config


def _batch_to_keep(config: Config, earlier: Config | None) -> int | None:
    """The global batch size of the run that --elastic resumes; None if it is a new one."""
    if earlier:
        return earlier.data.global_batch_size
    checkpoint = config.checkpoint
    folders = [checkpoint.save, *([] if checkpoint.finetune else [checkpoint.load])]
    return next(filter(None, (saved_settings(folder).get("global-batch-size") for folder in folders)), None)


def changed_settings(earlier: Config, config: Config) -> list[str]:
    """Return a line for each setting that a run has changed since `earlier`: "--lr 0.001 -> 0.0005"."""
    before = values_of(earlier)
    return [
        f"{flag(s.name)} {_value(before[s.name])} -> {_value(value)}"
        for _, s, value in declared(config)
        if value != before[s.name]
    ]


def _value(value: object) -> str:
    return "unset" if value in (None, ()) else " ".join(map(str, items(value)))


def resume_conflicts(earlier: Config, config: Config) -> list[str]:
    """Return errors for changes from `earlier` that a resumed run may not have: model, data, batch, seed."""
    before, errors = values_of(earlier), []
    free = WHICH_DATA if config.checkpoint.allow_data_change else PLACES
    for part, setting, value in declared(config):
        resumable, old = setting.metadata["resumable"], before[setting.name]
        resumable = part not in ("model", "data") if resumable is None else resumable
        if value != old and not resumable and setting.name not in free:
            errors.append(f"{flag(setting.name)} {value}: the run in this folder has {_value(old)}")
    return errors

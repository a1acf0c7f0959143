"""From a command line of train.py to the settings of a run, all errors at once; no rank has started yet.

parse -> (--auto-layout) -> validate -> data, or by default the embedded text -> resolve -> earlier run
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import ConfigError, Parsed, parse
from nanomegatron.config.hf import is_hf_folder
from nanomegatron.config.megatron_args import megatron_folder
from nanomegatron.config.rules import spelled
from nanomegatron.config.run_folder import resumed, with_run_name
from nanomegatron.config.settings import Config, DataConfig
from nanomegatron.faults.lock import settings_in
from nanomegatron.mesh import World, pick_device
from nanomegatron.plan.flops import parameter_count
from nanomegatron.report.layout import chosen_layout

MOST_SHARED = 50_000_000  # parameters of a model that takes two processes by default: each keeps all of them


def with_processes(argv: list[str]) -> list[str]:
    """Return a command line of train.py, with `--nproc 2` where it leaves that open and two are faster.

    They are for a small model on a CPU with several threads (docs/log.md), if the batch can be shared.
    """
    config = parse(argv).config
    on_cpu = config.run.device == "cpu" or not torch.cuda.is_available()
    chosen = config.run.nproc or World.from_environment().rendezvous  # by --nproc, or by torchrun
    if chosen or not on_cpu or torch.get_num_threads() < 2 or validate(config, 2, "cpu"):
        return argv
    size = parameter_count(resolve(config, 2).model, config.data.vocab_size or 0)
    return argv if size > MOST_SHARED else [*argv, "--nproc", "2"]


def read_settings(argv: list[str], world: World, embedded: Callable[[], Any]) -> tuple[Parsed, Config]:
    """Return the parsed command line and the resolved configuration of the whole run.

    embedded: `preprocess.prepare_embedded`. Raises ConfigError (a ValueError) that lists all errors at once.
    """
    parsed = parse(argv)
    config = parsed.config
    size = world.size if world.size > 1 else config.run.nproc or 1
    device = pick_device(config.run.device, world)
    fp8_on_gpu = config.precision.fp8_format and device.type == "cuda"
    gpu = torch.cuda.get_device_capability(device) if fp8_on_gpu else ()
    if config.parallel.auto_layout and not parsed.errors:
        data = with_text(parsed, embedded)
        parsed = chosen_layout(replace(parsed, config=replace(config, data=data)), size, device)
        config = parsed.config
    if errors := [*parsed.errors, *validate(config, size, device.type, gpu)]:
        raise ConfigError(errors)
    config = replace(config, data=with_text(parsed, embedded))
    config = with_run_name(resolve(config, size), parsed)
    return parsed, resumed(config, parsed, settings_in(config.run.folder), size)


def with_text(parsed: Parsed, embedded: Callable[[], Any]) -> DataConfig:
    """Return the given data settings, or by default the embedded text; ConfigError if that cannot be used."""
    data = parsed.config.data
    load = parsed.config.checkpoint.load
    if data.data_path or data.data_args_path or data.train_data_path or data.mock_data:
        return data
    if load and (is_hf_folder(load) or megatron_folder(load, parsed.config.checkpoint.ckpt_step)):
        raise ConfigError(
            [
                f"--load {load}: give --data-path, data that nanomegatron preprocess made with its tokenizer "
                f"(of Hugging Face: --tokenizer-type HuggingFaceTokenizer --tokenizer-model {load})"
            ]
        )
    given = {"tokenizer_type": data.tokenizer_type, "split": data.split}
    changed = [spelled(name, value) for name, value in given.items() if value != getattr(DataConfig, name)]
    if changed:
        own = "the built-in text has a tokenizer and a split of its own"
        raise ConfigError([f"{' '.join(changed)}: give --data-path; {own}"])
    text = embedded()
    note = f"; {text.note}" if text.note else ""
    parsed.notes.append(f"text: the Python standard library's own sources{note}")
    return replace(
        data,
        train_data_path=(text.train_prefix,),
        valid_data_path=(text.valid_prefix,),
        tokenizer_type=text.tokenizer_type,
        tokenizer_model=text.tokenizer_model,
    )

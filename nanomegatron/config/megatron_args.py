"""The settings of a Megatron-LM checkpoint: its `args`, of which those that describe the model are read.

    release/ or iter_0000120/     torch_dist: __0_0.distcp, .metadata, metadata.json, common.pt
                                  torch:      mp_rank_00/model_optim_rng.pt
    latest_checkpointed_iteration.txt

`args` is an argparse.Namespace in a pickle (config/pickles.py reads it, nothing is called). Its names are
those of our settings, but for a few. A checkpoint that megatron-core's own functions saved has no args: flags
say what the model is.
"""

import os
import re
import types
import typing
import zipfile
from pathlib import Path
from typing import Any

from nanomegatron.config.check_model import hub_hint
from nanomegatron.config.pickles import Record, build_pickle
from nanomegatron.config.rules import declared
from nanomegatron.config.settings import Config

PICKLE_BYTES = 64 * 2**20  # bytes of a pickle
TRACKER = "latest_checkpointed_iteration.txt"
LEGACY = "mp_rank_*/model_optim_rng.pt"
ABSENT = "multi_latent_attention mtp_num_layers hybrid_override_pattern is_hybrid_model qk_l2_norm"


def megatron_folder(root: str | Path, step: int | None = None) -> Path | None:
    """Return the folder of a Megatron-LM checkpoint: root, or one in it that its tracker or `step` names.

    None if root has none, or one that nanomegatron has saved.
    """
    folder = Path(root)
    if step is not None:
        folder /= f"iter_{step:07d}"
    elif os.path.isfile(folder / TRACKER):
        with open(folder / TRACKER, "rb") as file:
            text = file.read(20).decode(errors="replace").strip()
        folder /= f"iter_{int(text):07d}" if text.isdecimal() else "release"
    distributed = os.path.isfile(folder / "metadata.json") and os.path.isfile(folder / ".metadata")
    if (distributed or any(folder.glob(LEGACY))) and not (folder / "manifest.json").exists():
        return folder
    return None


def may_be_checkpoint(path: Path) -> bool:
    """Whether something is there that one of the readers of checkpoints may take, whole or damaged."""
    kinds = ("iter_*", "release", TRACKER, "*.safetensors", "*.index.json", "*.distcp", "mp_rank_*")
    return any(any(path.glob(kind)) for kind in kinds)


def checkpoint_folder(root: str) -> str:
    """Return `root`, or root/ckpt if that has checkpoints and root, the folder of a run, has none."""
    inner = Path(root, "ckpt")
    return str(inner) if may_be_checkpoint(inner) and not may_be_checkpoint(Path(root)) else root


def why_no_checkpoint(root: str | Path, step: int | None = None) -> str:
    """What is at `root` in place of a checkpoint and what to give instead, as the end of a message; or ""."""
    root = Path(root)
    if root.is_file():
        return "; it is a file: give the folder that the checkpoint is"
    if not root.exists():
        near = hub_hint(str(root), lambda path: may_be_checkpoint(Path(checkpoint_folder(str(path)))))
        return near or "; there is no such folder"
    inner = [folder for folder in (root / "ckpt", root / "hf") if may_be_checkpoint(folder)]
    if inner and not any(root.glob("iter_*")):
        return f"; it holds {inner[0].name}/: give {inner[0]}"
    if re.fullmatch(r"iter_\d{7,18}", root.name) and (root / "manifest.json").is_file():
        return f"; it is one iteration: give {root.parent}, with --ckpt-step {int(root.name[5:])}"
    if pickle := next((path.name for path in sorted(root.glob("pytorch_model*.bin"))), ""):
        return f"; {pickle} is a pickle, which is not read: save it again with transformers' save_pretrained"
    if (root / "metrics.jsonl").is_file() or (root.parent / "metrics.jsonl").is_file():
        return "; the run there has saved none yet: Ctrl-C saves and stops it, --save-interval saves sooner"
    if (root / "config.json").is_file():
        return "; it has a config.json and no weights: copy model.safetensors there too"
    there = sorted(path.name for path in root.glob("*") if re.fullmatch(r"release|iter_\d+", path.name))
    if not there:
        return ""
    wanted = f"its {TRACKER} names none of them" if step is None else f"--ckpt-step {step} is none of them"
    return f"; it has {', '.join(there[-4:])}, and {wanted}: give {root / there[-1]}"


def pickled_state(folder: Path) -> dict[str, Any]:
    """Return what torch.save wrote, args and more, with a Record for each object. Raises ValueError."""
    paths = [path for path in (folder / "common.pt", *sorted(folder.glob(LEGACY))) if path.is_file()]
    if not paths:
        return {}
    try:
        with zipfile.ZipFile(paths[0]) as archive:
            (info,) = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > PICKLE_BYTES:
                raise ValueError(f"its pickle is compressed, or larger than {PICKLE_BYTES} bytes")
            state = build_pickle(archive.read(info))
    except zipfile.BadZipFile:
        raise ValueError(f"{paths[0]}: cut short, or no file of torch.save since torch 1.6") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{paths[0]}: {error}") from None
    return state if isinstance(state, dict) else {}


def args_of_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the args that a checkpoint's state has; {} if it has none."""
    args = state.get("args")
    return args.state if isinstance(args, Record) and isinstance(args.state, dict) else {}


def megatron_progress(folder: Path) -> tuple[int, int | None]:
    """Return the iteration of a checkpoint and the samples consumed by then. Raises ValueError."""
    state = pickled_state(folder)
    iteration, samples = state.get("iteration"), args_of_state(state).get("consumed_train_samples")
    if not isinstance(iteration, int):
        iteration = int(re.sub(r"\D", "", folder.name) or 0)
    return iteration, samples if isinstance(samples, int) else None


def megatron_settings(folder: Path) -> dict[str, Any]:
    """Return our settings for the model of a checkpoint's args; {} if it has none. Raises ValueError."""
    args = args_of_state(pickled_state(folder))
    try:
        return settings_of_args(args) if args.get("num_layers") else {}
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def args_of_settings(config: Config, vocab_size: int) -> dict[str, Any]:
    """Return Megatron's args for the model of a config: what `settings_of_args` reads, and sizes."""
    model, size = config.model, config.data.make_vocab_size_divisible_by
    args = {s.name: value for part, s, value in declared(config) if part == "model" and value is not None}
    args = {name: list(v) if isinstance(v, tuple) else v for name, v in args.items()}
    return args | {
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_dim,
        "add_bias_linear": not model.disable_bias_linear,
        "group_query_attention": model.num_kv_heads != model.num_attention_heads,
        "num_query_groups": model.num_kv_heads,
        "window_size": tuple(model.window_size) or None,
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
        "bf16": config.precision.bf16,
        "fp16": config.precision.fp16,
        "vocab_size": vocab_size,
        "padded_vocab_size": -(-vocab_size // size) * size,
        "make_vocab_size_divisible_by": size,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }


def settings_of_args(args: dict[str, Any]) -> dict[str, Any]:
    """Return our settings for Megatron's args. Raises ValueError for a model that is not here."""
    if found := [name for name in ABSENT.split() if args.get(name)]:
        raise ValueError(f"{', '.join(found)}: a model with this is not here")
    settings = {}
    for part, setting, _ in declared(Config()):
        value, rules = args.get(setting.name), setting.metadata
        plain = isinstance(value, bool | int | float | str | list | tuple)
        if part == "model" and plain and not (rules["resumable"] or rules["fast_path"]):
            settings[setting.name] = found = _converted(setting.type, value)
            words, choices = found if isinstance(found, tuple) else [found], rules["choices"]
            if choices and not set(words) <= set(choices):
                raise ValueError(f"{setting.name} {str(value)[:80]!r}: here are {', '.join(choices)}")
    settings |= {
        "disable_bias_linear": not args.get("add_bias_linear", True),
        "num_query_groups": args.get("num_query_groups", 0) if args.get("group_query_attention") else 0,
        "bf16": bool(args.get("bf16")),
        "fp16": bool(args.get("fp16")),
    }
    if not args.get("num_experts"):
        settings = {k: v for k, v in settings.items() if not k.startswith(("moe", "num_experts"))}
    if size := args.get("vocab_size") or args.get("padded_vocab_size"):
        settings["vocab_size"] = size
    return settings


def _converted(kind: Any, value: Any) -> Any:
    """Return the value as the type of a setting: a number or a list may be a text or a tuple here."""
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
    if typing.get_origin(kind) is not tuple:
        return kind(value)
    element = typing.get_args(kind)[0]
    return tuple(element(v) for v in (value if isinstance(value, list | tuple) else [value]))

"""From a command line and TOML files to one `Config`, with everything that is wrong told at once.

    configs/base.toml  <-  extends  --  configs/mine.toml  <-  --config  --  flags
                                                  the right one holds where several set a value

Flags are the fields of `settings.py`: `--hidden-size 64`, `--hidden_size=64`, `--swiglu`, `--no-swiglu`,
`--tp 2`. Keys of a file are the same names. Megatron's other flags are known too (`megatron_flags.toml`):
those that change nothing here are noted, those that ask for what is not here are errors, and nothing is
ignored in silence.
"""

import dataclasses
import difflib
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanomegatron.config.hf import is_hf_folder, read_folder
from nanomegatron.config.settings import Config

PRESETS = Path(__file__).resolve().parents[2] / "configs"
DEFAULT_PRESET = "tiny-cpu"
SHAPE = ("num_layers", "hidden_size", "num_attention_heads")
# Megatron's other spellings of a setting: flag -> (field, value; None: the flag's own argument)
SPELLINGS = {
    "use_rotary_position_embeddings": ("position_embedding_type", "rope"),
    "persistent_save_interval": ("save_interval", None),
    "skip_train": ("eval_only", "true"),
    "accumulate_allreduce_grads_in_fp32": ("grad_reduce_in_bf16", "false"),
    "recompute_activations": ("recompute_granularity", "selective"),
    "cpu_offload_optimizer": ("optimizer_cpu_offload", None),
    "dp_comm_overlap_bucket_size": ("ddp_bucket_size", None),
    "disable_fp8_wgrad": ("fp8_wgrad", "false"),
    "hybrid_context_parallel": ("dynamic_context_parallel", None),
}
# Ways to say one thing: a flag puts away what a file said in another way. fields of one way | of another
ALTERNATIVES = """
train_iters | train_samples
lr_decay_iters | lr_decay_samples
lr_warmup_iters | lr_warmup_samples | lr_warmup_fraction
lr_wsd_decay_iters | lr_wsd_decay_samples
bf16 | fp16
swiglu | squared_relu
data_path | data_args_path | train_data_path valid_data_path test_data_path | mock_data
global_batch_size rampup_batch_size | step_batch_size_schedule
num_layers_per_virtual_pipeline_stage | num_virtual_stages_per_pipeline_rank
"""
MOST_USED = """
config num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size position_embedding_type
normalization swiglu disable_bias_linear untie_embeddings_and_output_weights tensor_model_parallel_size
context_parallel_size pipeline_model_parallel_size pipeline_schedule num_virtual_stages_per_pipeline_rank
data_parallel_size nproc device bf16 fp16 fp8_format fp8_recipe lr min_lr lr_decay_style lr_warmup_iters
weight_decay clip_grad data_path split mock_data seq_length micro_batch_size global_batch_size tokenizer_type
tokenizer_model train_iters eval_interval eval_iters save load save_interval run_name seed log_interval
metrics_jsonl
""".split()


class ConfigError(ValueError):
    """What is wrong with a command line or a file, a message each."""

    def __init__(self, messages: Iterable[str]) -> None:
        self.messages = list(messages)
        super().__init__("\n".join(self.messages))


@dataclass(frozen=True)
class Parsed:
    """A command line, read: the settings, what is to be told to the user, and what was asked for."""

    config: Config
    notes: list[str]
    preset: str | None = None  # name of the file the settings come from
    action: str = "train"  # or "help", "help all", "print-config"
    errors: tuple[str, ...] = ()


def sections() -> Iterator[tuple[str, dataclasses.Field]]:
    """Every setting with the part of Config that it belongs to, in order."""
    for part in dataclasses.fields(Config):
        for setting in dataclasses.fields(part.type):
            yield part.name, setting


def flag(name: str) -> str:
    """'hidden_size' -> '--hidden-size'."""
    return "--" + name.replace("_", "-")


def parse(argv: list[str]) -> Parsed:
    """Read a command line; what cannot be read is in `errors`, and the settings are those of the rest."""
    reader = _Reader()
    reader.read_flags(argv)
    preset, load = reader.config_file, reader.values.get("load")
    if preset is None and not reader.values.keys() & set(SHAPE):
        preset = load if load and is_hf_folder(load) else DEFAULT_PRESET
        what = f"that of --load {preset}" if preset == load else f"the preset {preset}"
        reader.notes.append(f"no model is given: {what} ({flag('config')} names another)")
    from_file = _Reader()
    if preset is not None and reader.action.split()[0] != "help":
        from_file.read_file(find_preset(preset))
    values = put_away(from_file.values, reader.values) | reader.values
    reader.errors += unmet(argv, values)
    name = find_preset(preset).resolve().name.removesuffix(".toml") if preset else None
    errors = (*from_file.errors, *reader.errors)
    return Parsed(build(values), reader.notes, name, reader.action, errors)


def put_away(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """`earlier` without what `later` says in another way."""
    ways = [[way.split() for way in line.split("|")] for line in ALTERNATIVES.strip().splitlines()]
    said = {name for name, value in later.items() if value or (value == 0 and value is not False)}
    gone = {
        name
        for line in ways
        for chosen in line
        if said.intersection(chosen)
        for way in line
        if way is not chosen
        for name in way
    }
    return {name: value for name, value in earlier.items() if name not in gone}


def unmet(argv: list[str], values: dict[str, Any]) -> Iterator[str]:
    """What two switches of Megatron-LM need beside them; they set nothing themselves."""
    switches = {word.replace("_", "-") for word in argv if word.startswith("--")}
    if "--group-query-attention" in switches and not values.get("num_query_groups"):
        yield "--group-query-attention: needs the number of key/value heads; give --num-query-groups"
    learned = values.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    if "--no-position-embedding" in switches and learned:
        yield "--no-position-embedding: needs --position-embedding-type rope or none"


def build(values: dict[str, Any]) -> Config:
    """A Config with these fields set and the others at their defaults."""
    parts: dict[str, dict] = {}
    for part, setting in sections():
        if setting.name in values:
            parts.setdefault(part, {})[setting.name] = values[setting.name]
    types_of = {part.name: part.type for part in dataclasses.fields(Config)}
    return Config(**{part: types_of[part](**fields) for part, fields in parts.items()})


def find_preset(name: str) -> Path:
    """What --config means: a path, the name of a file in configs/, or a folder with a config.json."""
    candidates = [Path(name), PRESETS / name, PRESETS / f"{name}.toml"]
    found = (path for path in candidates if path.is_file() or (path / "config.json").is_file())
    return next(found, candidates[0])


@dataclass
class _Reader:
    """Collects values, notes and errors from flags or from a file."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    config_file: str | None = None
    action: str = "train"

    def __post_init__(self) -> None:
        self.settings = {setting.name: setting for _, setting in sections()}
        self.aliases = {alias: name for name, s in self.settings.items() for alias in s.metadata["aliases"]}

    def read_flags(self, argv: list[str]) -> None:
        """`--name value ...`, `--name=value`, `--name`; what follows a flag up to the next one is its."""
        groups: list[list[str]] = []
        for word in argv:
            if word.startswith("--") or word == "-h":
                groups.append(word.split("=", 1) if "=" in word else [word])
            elif groups:
                groups[-1].append(word)
            else:
                self.errors.append(f"{word}: not a flag; flags begin with --, see --help")
        for word, *arguments in groups:
            self._flag(word, word.lstrip("-").replace("-", "_"), arguments)

    def _flag(self, word: str, name: str, arguments: list[str]) -> None:
        name = self.aliases.get(name, name)
        if name in SPELLINGS:
            name, value = SPELLINGS[name]
            arguments = [value] if value is not None else arguments
        if name in ("help", "h"):
            self.action = " ".join(["help", *arguments])
        elif name == "print_config":
            self.action = "print-config"
        elif name == "config":
            if len(arguments) == 1:
                self.config_file = arguments[0]
            else:
                self.errors.append(f"{' '.join((word, *arguments))}: takes one file or preset")
        elif name in self.settings:
            self._set(name, arguments)
        elif name.startswith("no_") and self._is_switch(name[3:]) and not arguments:
            self.values[name[3:]] = False
        else:
            self._megatron(word, name, arguments)

    def _is_switch(self, name: str) -> bool:
        return name in self.settings and self.settings[name].type in (bool, bool | None)

    def _set(self, name: str, arguments: list[str]) -> None:
        setting = self.settings[name]
        try:
            self.values[name] = convert(setting, arguments)
        except ValueError as error:
            self.errors.append(f"{flag(name)} {' '.join(arguments)}".rstrip() + f": {error}")

    def _megatron(self, word: str, name: str, arguments: list[str]) -> None:
        known = megatron_flags()
        name = name.replace("_", "-")
        if name in known["unsupported"]:
            prefixes = [prefix for prefix in known["hints"] if name.startswith(prefix)]
            hint = known["hints"][max(prefixes, key=len)] if prefixes else "leave it out"
            self.errors.append(f"{word}: a flag of Megatron-LM for something that is not here; {hint}")
            return
        for kind, text in (("always_on", "always on"), ("not_needed", "not needed here")):
            if name in known[kind]:
                wanted = known[kind][name]
                if isinstance(wanted, str) and arguments != [wanted]:
                    self.errors.append(f"{word} {' '.join(arguments)}: here only {wanted}")
                elif wanted in (0, 1) and len(arguments) != wanted:
                    self.errors.append(f"{word} {' '.join(arguments)}: takes {wanted} values")
                else:
                    self.notes.append(f"{word}: {text}")
                return
        self.errors.append(f"{word}: unknown flag{self._nearest(name)}")

    def _nearest(self, name: str) -> str:
        names = map(flag, (*self.settings, *self.aliases, "config", "print_config", "help"))
        return did_you_mean(flag(name), names) or "; --help all lists every flag"

    def read_file(self, path: Path, seen: tuple[Path, ...] = ()) -> None:
        """A TOML file and those it extends, or the config.json of a Hugging Face folder."""
        if (path / "config.json").is_file():
            try:
                self.values |= read_folder(path)[1]
            except ValueError as error:
                self.errors += str(error).splitlines()
            return
        if path.resolve() in seen:
            self.errors.append(f"{path}: extends itself through {', '.join(p.name for p in seen)}")
            return
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            names = ", ".join(sorted(p.stem for p in PRESETS.glob("*.toml")))
            self.errors.append(f"--config {path}: no such file; presets are {names}")
            return
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            self.errors.append(f"{path}: {error}")
            return
        base = table.pop("extends", None)
        if base is not None and not isinstance(base, str):
            self.errors.append(f"{path}: extends = {base!r}: must be the name of a file")
        elif base:
            self.read_file(path.parent / base, (*seen, path.resolve()))
        self.read_table(table, str(path))

    def read_table(self, table: dict[str, Any], source: str) -> None:
        """The keys of a TOML file."""
        for key, value in table.items():
            name = key.replace("-", "_")
            name = self.aliases.get(name, name)
            if name not in self.settings:
                self.errors.append(f"{source}: unknown key {key}{self._nearest(name)}")
                continue
            words = value if isinstance(value, list) else [value]
            try:
                self.values[name] = convert(self.settings[name], [_word(w) for w in words])
            except ValueError as error:
                self.errors.append(f"{source}: {key} = {value!r}: {error}")


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def convert(setting: dataclasses.Field, words: list[str]) -> Any:
    """The value of a setting from the words behind its flag. Raises ValueError with what is expected."""
    kind = setting.type
    names = {int: "a whole number", float: "a number"}
    if typing.get_origin(kind) is tuple:
        item, *_ = typing.get_args(kind)
        if item is not str:
            words = re.findall(r"[^\s,()\[\]]+", " ".join(words))  # Megatron writes some as "(127,0)"
        count = setting.metadata["nargs"]
        if count.isdigit() and len(words) not in (0, int(count)):
            raise ValueError(f"takes {count} values")
        try:
            return tuple(map(item, words))
        except ValueError:
            raise ValueError(f"each must be {names[item]}") from None
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if kind is bool:
        if words not in ([], ["true"], ["false"]):
            raise ValueError("a switch, it takes no value")
        return words != ["false"]
    if len(words) != 1:
        raise ValueError("takes one value")
    try:
        value = kind(words[0])
    except ValueError:
        raise ValueError(f"must be {names[kind]}") from None
    choices = setting.metadata["choices"]
    if choices and value not in choices:
        if value in setting.metadata["refused"]:
            raise ValueError(setting.metadata["refused"][value])
        raise ValueError(
            f"must be one of {', '.join(map(str, choices))}{did_you_mean(words[0], map(str, choices))}"
        )
    return value


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The name that is nearest to a word that is none, as the end of a message; empty if none is near."""
    folded = {name.casefold(): name for name in names}
    close = difflib.get_close_matches(word.casefold(), folded, 1)
    return f"; did you mean {folded[close[0]]}?" if close else ""


def megatron_flags() -> dict[str, Any]:
    """Megatron-LM's flags that are no setting here.

    always_on and not_needed map a flag to the number of its values or to the one value that is meant,
    unsupported is a set, hints maps prefixes of its members to phrases.
    """
    table = tomllib.loads((Path(__file__).parent / "megatron_flags.toml").read_text())
    return table | {"unsupported": set(table["unsupported"])}


def to_toml(config: Config) -> str:
    """All settings that are not None as TOML, readable by --config."""
    lines, last = [], ""
    for part, setting in sections():
        value = getattr(getattr(config, part), setting.name)
        if value is None:
            continue
        if part != last:
            lines.append(f"\n# {part}")
            last = part
        lines.append(f"{setting.name.replace('_', '-')} = {_toml(value)}")
    return "\n".join(lines).lstrip() + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)


def from_toml(text: str) -> Config:
    """The Config that `to_toml` has written. Raises ConfigError."""
    reader = _Reader()
    reader.read_table(tomllib.loads(text), "config")
    if reader.errors:
        raise ConfigError(reader.errors)
    return build(reader.values)


def help_text(everything: bool) -> str:
    """The flags with their help and defaults: the most used, or all."""
    lines = [
        "python train.py [--config FILE] [--flag value ...]",
        "  --config FILE                        settings from a TOML file, a preset of configs/ by name, or",
        "                                       a Hugging Face folder's config.json",
        "  --print-config                       print the resolved settings as TOML, and stop",
        "  --help all                           every flag"
        if not everything
        else "  --help  the most used flags",
    ]
    last = ""
    for part, setting in sections():
        if not everything and setting.name not in MOST_USED:
            continue
        if part != last:
            lines.append(f"\n{part}")
            last = part
        names = ", ".join([flag(setting.name), *(f"--{alias}" for alias in setting.metadata["aliases"])])
        choices = setting.metadata["choices"]
        tail = f" [{'|'.join(map(str, choices))}]" if choices else ""
        value = setting.default
        words = " ".join(map(str, value)) if isinstance(value, tuple) else value
        default = "" if value in (None, (), False) else f" ({words})"
        lines.append(f"  {names:<36} {setting.metadata['help']}{tail}{default}")
    return "\n".join(lines)

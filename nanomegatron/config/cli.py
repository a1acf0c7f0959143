"""Parses a command line and TOML files into one `Config`, and reports all errors at once.

    base.toml  <-  extends  --  mine.toml  <-  --config  --  flags
                                                  of several values the rightmost is used

Without --config and --load the flags lie over the preset tiny-cpu, unless they give the whole shape:
--num-layers, --hidden-size and --num-attention-heads.

Flags are the fields of `settings.py`: `--hidden-size 64`, `--hidden_size=64`, `--swiglu`, `--no-swiglu`,
`--tp 2`. Keys of a file are the same names. Megatron's other flags are known too (`config/megatron.py`):
those that change nothing here give a note, those for features that do not exist here an error, and none is
silently ignored.
"""

import dataclasses
import json
import os
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanomegatron.config.help import PRESETS, did_you_mean, suggest_flags
from nanomegatron.config.hf import is_hf_folder, read_folder
from nanomegatron.config.megatron import answer, megatron_flags, missing_companions
from nanomegatron.config.megatron_args import checkpoint_folder, megatron_folder, megatron_settings
from nanomegatron.config.rules import brought, declared, flag, spelled
from nanomegatron.config.settings import Config
from nanomegatron.config.user_files import MOST_VOCABULARY, parse_toml, read_json, read_text

DEFAULT_PRESET = "tiny-cpu"
MOST_BASES = 20  # files that extend each other in a row
# Alternative settings: a flag drops the file's values of the other fields in its line. one way | another
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
# Keys of a run's config.toml that a run with the same settings does not take from it.
OF_ONE_RUN = """
run-name save nproc data-parallel-size metrics-jsonl trace-dir tensorboard-dir
wandb-exp-name wandb-save-dir
"""
OF_ANY_LAYOUT = (
    "seed train-iters train-samples eval-interval eval-iters"  # of the run, taken with a checkpoint
)
MEGATRON_DEFAULTS = {
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "lr_decay_style": "linear",
    "dataloader_type": "single",
    "split": "969,30,1",
    "eval_iters": 100,
}


class ConfigError(ValueError):
    """The errors in a command line or a file; `messages` has one line for each."""

    def __init__(self, messages: Iterable[str]) -> None:
        self.messages = list(messages)
        super().__init__("\n".join(self.messages))


@dataclass(frozen=True)
class Parsed:
    """A parsed command line: the settings, notes for the user, and the action."""

    config: Config
    notes: list[str]
    preset: str | None = None  # name of the file the settings come from
    action: str = "train"  # or "help", "help TOPIC", "print-config"
    errors: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()  # settings that flags have set
    own_file: bool = False  # the settings come from a file or a checkpoint, not from a preset of the package
    unread: frozenset[str] = frozenset()  # flags whose values are unknown because of errors
    base: str = ""  # the note on the default preset below flags that give a part of a shape


def parse(argv: list[str]) -> Parsed:
    """Parse a command line. Errors of single flags are in `errors`; the settings are those of the others."""
    reader = _Reader()
    reader.read_flags(argv)
    preset, load = reader.config_file, reader.values.get("load")
    if load:
        reader.values["load"] = load = checkpoint_folder(load)
    if preset is None and (preset := hf_settings(load)):
        reader.notes.append(f"the model is that of --load {load}, but for other flags")
    shape = [name for name, setting in reader.settings.items() if setting.metadata["required"]]
    missing = [flag(name) for name in shape if name not in reader.values.keys() | reader.unread]
    from_file, saved, base = _Reader(), {}, ""
    if preset is None and missing and (saved := saved_settings(load)):
        from_file.read_table(saved, load)
        reader.notes.append(
            f"model, data and training are those of --load {load}, but for other flags; --micro-batch-size "
            "and the layout are not taken from there"
        )
    elif preset is None and load and (theirs := megatron_folder(load, reader.values.get("ckpt_step"))):
        from_file.read_megatron(theirs, model_given=not missing)
        saved = from_file.values
    elif preset is None and missing:
        preset = DEFAULT_PRESET
        if len(missing) < len(shape):
            own = f"give {' and '.join(missing)} for a model of your own, or --config NAME for another preset"
            base = f"no {' and no '.join(missing)}: what no flag says is the preset {preset}'s; {own}"
        reader.notes.append(base or f"no model is given: the preset {preset} (--config names another)")
    if preset is not None and reader.action.split()[0] != "help":
        from_file.read_file(find_preset(preset), f"--config {preset}")
    reader.notes += from_file.notes
    given = frozenset(reader.values)
    reader.scale_min_lr(from_file.values)
    values = drop_alternatives(from_file.values, reader.values) | reader.values
    if values.get("megatron_defaults"):
        values = MEGATRON_DEFAULTS | values
    elif reader.megatron_notes and (differ := MEGATRON_DEFAULTS.keys() - values.keys()):
        theirs = ", ".join(
            spelled(name, MEGATRON_DEFAULTS[name]) for name in MEGATRON_DEFAULTS if name in differ
        )
        reader.notes.append(f"Megatron-LM's defaults differ: {theirs}; --megatron-defaults takes them")
    config = reader.with_companions(values)
    errors = (*from_file.errors, *reader.errors, *missing_companions(megatron_flags(), argv, config))
    path = find_preset(preset).resolve() if preset else Path(load).resolve() if saved else Path()
    name = (path.parent if path.name in ("hf", "ckpt", "config.toml") else path).name.removesuffix(".toml")
    unread = frozenset(map(flag, (from_file.unread - values.keys()) | reader.unread))
    own = bool(name) and PRESETS not in path.parents
    return Parsed(config, reader.notes, name or None, reader.action, errors, given, own, unread, base)


def hf_settings(load: str | None) -> str | None:
    """Return the folder with the config.json of --load: itself, or the one that convert.py kept; or None."""
    if load and is_hf_folder(load):
        return load
    return f"{load}/hf" if load and os.path.isfile(Path(load) / "hf" / "config.json") else None


def saved_settings(load: str | None) -> dict[str, Any]:
    """Return the settings that decide the result of the run that saved --load; {} if there is no checkpoint.

    Layout, records and what only makes a run faster are not among them.
    """
    try:
        step = int(read_text(Path(load or "") / "latest_checkpointed_iteration.txt"))
        manifest = read_json(Path(load) / f"iter_{step:07}" / "manifest.json", MOST_VOCABULARY)
        saved = parse_toml(manifest["config"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}  # loading it says what is wrong
    decide = [
        s.name.replace("_", "-")
        for part, s, _ in declared(Config())
        if part in ("model", "data", "precision", "optimizer")
        and not (s.metadata["resumable"] or s.metadata["fast_path"])
    ]
    return {key: value for key, value in saved.items() if key in {*decide, *OF_ANY_LAYOUT.split()}}


def drop_alternatives(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Return `earlier` without the values to which `later` sets an alternative."""
    said = {name for name, value in later.items() if value or (value == 0 and value is not False)}
    dropped = set()
    for line in ALTERNATIVES.strip().splitlines():
        ways = [set(way.split()) for way in line.split("|")]
        if any(said & way for way in ways):
            dropped.update(*(way for way in ways if not said & way))
    return {name: value for name, value in earlier.items() if name not in dropped}


def build_config(values: dict[str, Any]) -> Config:
    """Return a Config with these fields set and the others at their defaults."""
    parts = {part.name: part.type for part in dataclasses.fields(Config)}
    for part, kind in parts.items():
        parts[part] = kind(**{name: values[name] for name in kind.__dataclass_fields__ & values.keys()})
    return Config(**parts)


def find_preset(name: str, beside: Path = Path(), readers: tuple[Path, ...] = ()) -> Path:
    """Return the file or folder that --config names, or `extends` in the last of `readers` (not itself)."""
    paths = [folder / file for folder in (beside, PRESETS) for file in (name, f"{name}.toml")]
    found = [path for path in paths if os.path.isfile(path) or os.path.isfile(path / "config.json")]
    return next((path for path in found if path.resolve() not in readers), (found or paths)[0])


@dataclass
class _Reader:
    """Collects values, notes and errors from flags or from a file."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)  # settings whose values could not be read
    config_file: str | None = None
    action: str = "train"
    megatron_notes: int = 0  # on flags that only Megatron has

    def __post_init__(self) -> None:
        self.settings = {setting.name: setting for _, setting, _ in declared(Config())}
        self.aliases = {alias: name for name, s in self.settings.items() for alias in s.metadata["aliases"]}

    def read_flags(self, argv: list[str]) -> None:
        """Read `--name value ...`, `--name=value`, `--name`: the words up to the next flag are its values."""
        groups: list[list[str]] = []
        for word in argv:
            if word.startswith("--") or word == "-h":
                groups.append(word.split("=", 1) if "=" in word else [word])
            elif groups:
                groups[-1].append(word)
            else:
                self.errors.append(f"{word}: not a flag; flags begin with --, see --help")
        for word, *arguments in groups:
            name, spellings = word.lstrip("-").replace("_", "-"), megatron_flags()["spellings"]
            if meant := spellings.get(" ".join([name, *arguments])):  # of this value, or of a flag without
                name, *arguments = meant.split()
            elif name in spellings:
                name, *value = spellings[name].split()
                arguments = value + arguments
            self._flag(word, name.replace("-", "_"), arguments)

    def _flag(self, word: str, name: str, arguments: list[str]) -> None:
        name = self.aliases.get(name, name)
        positive = name.removeprefix("no_")
        switched_off = self.settings.get(self.aliases.get(positive, positive))
        if name in ("help", "h"):
            self.action = " ".join(["help", *arguments])
        elif name == "print_config":
            self.action = "print-config"
        elif name == "config" and len(arguments) == 1 and arguments[0]:
            self.config_file = arguments[0]
        elif name == "config":
            what = "an empty value; give" if arguments == [""] else "takes"
            self.errors.append(f"{' '.join((word, *arguments)).rstrip()}: {what} one file or preset")
        elif name in self.settings and typing.get_origin(self.settings[name].type) is tuple and not arguments:
            self.errors.append(f"{word}: takes at least one value")
        elif name in self.settings:
            self._set(name, arguments, " ".join([flag(name), *arguments]).rstrip())
        elif switched_off and switched_off.type in (bool, bool | None) and not arguments:
            self.values[switched_off.name] = False
        else:
            note, error = answer(megatron_flags(), word, name.replace("_", "-"), arguments)
            if note:
                self.notes.append(note)
                self.megatron_notes += 1
            else:
                self.errors.append(error or f"{word}: unknown flag{suggest_flags(name, self.settings)}")

    def _set(self, name: str, words: list[str], source: str) -> None:
        try:
            self.values[name] = convert(self.settings[name], words)
        except ValueError as error:
            self.errors.append(f"{source}: {error}")
            self.unread.add(name)

    def scale_min_lr(self, base: dict[str, Any]) -> None:
        """If --lr is given without --min-lr and below the file's min-lr, scale min-lr in proportion to lr."""
        lr, low = self.values.get("lr"), base.get("min_lr", 0.0)
        if lr is not None and "min_lr" not in self.values and 0 <= lr < low <= base.get("lr", low):
            self.values["min_lr"] = low * lr / base.get("lr", low)
            self.notes.append(f"--min-lr {self.values['min_lr']:g}: {low:g} scaled with --lr")

    def with_companions(self, values: dict[str, Any]) -> Config:
        """Return the config with the settings that others imply (`Rules.brings`), each with a note."""
        config, companions = build_config(values), _Reader()
        for option, owner in brought(config, self.values):
            companions.read_flags(option.split())
            self.notes.append(f"{option}: set, which {owner} needs")
        return build_config(values | companions.values) if companions.values else config

    def read_file(self, path: Path, named: str, seen: tuple[Path, ...] = ()) -> None:
        """Read a file and those it extends, or a Hugging Face folder; `named` (where) is for errors."""
        try:
            if (path / "config.json").is_file():
                self.values |= read_folder(path)[1]
                return
            table = read_toml(path, named, seen)
        except ValueError as error:
            self.errors += str(error).splitlines()
            self.unread |= self.settings.keys()
            return
        base, seen = table.pop("extends", None), (*seen, path.resolve())
        if base is not None:
            self.read_file(find_preset(str(base), path.parent, seen), f"{path}: extends {base}", seen)
        if (path.parent / "status.json").is_file():  # the folder of a run
            left = [key for key in OF_ONE_RUN.split() if table.pop(key, None) is not None]
            self.notes.append(f"{path}: taken without {', '.join(left)}, which are that run's own")
        self.read_table(table, str(path))

    def read_megatron(self, folder: Path, model_given: bool) -> None:
        """Take the model of a Megatron-LM checkpoint, if it says that; else flags have to."""
        try:
            self.values |= megatron_settings(folder)
        except ValueError as error:
            self.errors += str(error).splitlines()
        if self.values:
            self.notes.append(f"the model is that of --load {folder}, but for other flags")
        elif not (self.errors or model_given):
            self.errors.append(f"--load {folder}: it has no args; give its model by flags or --config NAME")

    def read_table(self, table: dict[str, Any], source: str) -> None:
        """Read the keys of a TOML file; `source` names the file in errors."""
        for key, value in table.items():
            name = key.replace("-", "_")
            name = self.aliases.get(name, name)
            spelling = megatron_flags()["spellings"].get(name.replace("_", "-"), "").split()
            if spelling and value is True:
                self.read_flags([f"--{spelling[0]}", *spelling[1:]])
            elif name in self.settings:
                words = value if isinstance(value, list) else [value]
                words = [str(w).lower() if isinstance(w, bool) else str(w) for w in words]
                self._set(name, words, f"{source}: {key} = {value!r}")
            elif isinstance(value, dict):
                self.errors.append(f"{source}: [{key}] is a table; write its keys without one, at the top")
            else:
                self.errors.append(f"{source}: unknown key {key}{suggest_flags(name, self.settings)}")


def read_toml(path: Path, named: str, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Return the table of a file. Raises ValueError with what is wrong; arguments as in `read_file`."""
    if path.resolve() in seen:
        raise ValueError(f"{path}: extends itself through {', '.join(p.name for p in seen)}")
    if len(seen) == MOST_BASES:
        raise ValueError(f"{seen[0]}: extends more than {MOST_BASES} files in a row")
    try:
        text = read_text(path)
    except FileNotFoundError:
        names = sorted(p.stem for p in PRESETS.glob("*.toml"))
        hint = did_you_mean(path.name.removesuffix(".toml"), names) or ";"
        raise ValueError(f"{named}: no such file or preset{hint} presets are {', '.join(names)}") from None
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; a line of TOML is `name = value`, with text in quotes") from None


def convert(setting: dataclasses.Field, words: list[str]) -> Any:
    """Convert the words after a flag to its value. Raises ValueError with what is expected."""
    kind, rules = setting.type, setting.metadata
    number = {int: "a whole number", float: "a number"}
    several = typing.get_origin(kind) is tuple
    if any(not word.strip() for word in words):
        raise ValueError("an empty value; give one, or leave the flag out")
    if isinstance(kind, types.UnionType) and words == ["None"]:  # as scripts in Python print it
        return None
    if several or isinstance(kind, types.UnionType):
        kind = typing.get_args(kind)[0]
    if kind is bool:
        if words not in ([], ["true"], ["false"]):
            raise ValueError("a switch, it takes no value")
        return words != ["false"]
    if kind is str:  # an argument of a script that quoted it twice
        words = [w[1:-1] if len(w) > 2 and w[0] == w[-1] and w[0] in "'\"" else w for w in words]
    if several and kind is not str:
        words = re.findall(r"[^\s,()\[\]]+", " ".join(words))  # Megatron writes some as "(127,0)"
    if rules["count"] and len(words) not in (0, rules["count"]):
        raise ValueError(f"takes {rules['count']} values")
    if not several and len(words) != 1:
        raise ValueError("takes one value")
    try:
        values = tuple(map(kind, words))
    except ValueError:
        raise ValueError(f"{'each ' * several}must be {number[kind]}") from None
    if kind is int and any(abs(value) >= 2**63 for value in values):
        raise ValueError(f"{'each ' * several}must be below 2^63")
    choices = [str(choice) for choice in rules["choices"]]
    for word in words if choices else ():
        if word not in choices:
            must = f"{'each ' * several}must be one of {', '.join(choices)}{did_you_mean(word, choices)}"
            raise ValueError(rules["refused"].get(word, must))
    return values if several else values[0]


def to_toml(config: Config) -> str:
    """All settings that are not None as TOML, readable by --config."""
    parts: dict[str, list[str]] = {}
    for part, setting, value in declared(config):
        if value is not None:
            parts.setdefault(f"# {part}", []).append(
                f"{setting.name.replace('_', '-')} = {toml_value(value)}"
            )
    return "\n\n".join("\n".join([part, *lines]) for part, lines in parts.items()) + "\n"


def toml_value(value: Any) -> str:
    """A switch, a finite number, a text or a list of these as TOML, which writes them as JSON does."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def from_toml(text: str) -> Config:
    """Return the Config that `to_toml` wrote. Raises ConfigError."""
    reader = _Reader()
    reader.read_table(parse_toml(text), "config")
    if reader.errors:
        raise ConfigError(reader.errors)
    return build_config(reader.values)

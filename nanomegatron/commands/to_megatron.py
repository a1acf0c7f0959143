"""`nanomegatron to-megatron RUN`: the command of Megatron-LM that trains what a run here has trained.

    nanomegatron to-megatron tiny-cpu > pretrain.sh     runs/tiny-cpu/config.toml as flags of pretrain_gpt.py

A flag is written where the value is not Megatron's default, or where the defaults of the two differ. What
Megatron-LM has no flag for stands above the command, in lines that begin with #.
"""

import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nanomegatron.commands.runs import find_run
from nanomegatron.config.check import resolve
from nanomegatron.config.cli import MEGATRON_DEFAULTS, OF_ONE_RUN, from_toml
from nanomegatron.config.help import CommandParser
from nanomegatron.config.megatron import megatron_flags, refused_together
from nanomegatron.config.rules import Rules, declared, flag, holds, items, spelled, values_of
from nanomegatron.config.settings import Config
from nanomegatron.config.user_files import escaped, read_text
from nanomegatron.data.gpt_dataset import tokenizer_of_data

GPUS = 8  # of a machine
BYTE_IDS = 257  # token ids of ByteTokenizer
ALWAYS = ("--calculate-per-token-loss", "--attention-softmax-in-fp32")  # as it is here
# Settings of one run, or of how it follows another.
NOT_ASKED = {*OF_ONE_RUN.replace("-", "_").split(), *"load ckpt_step finetune no_load_optim device".split()}
SPEC_NAMES = {  # of a tokenizer's description -> setting
    "type": "tokenizer_type",
    "model": "tokenizer_model",
    "eod": "null_tokenizer_eod_id",
    "pattern": "tiktoken_pattern",
    "special": "tiktoken_num_special_tokens",
}
FIRST_LINES = """\
Weights are drawn otherwise in Megatron-LM, so that losses agree in their course, not in their digits.
--save, --load: left out; convert.py --target megatron-core writes its checkpoints."""


def main(argv: list[str]) -> int:
    """Print the command of a run; returns 0, or 2 if there is no such run."""
    parser = CommandParser("nanomegatron to-megatron", description=__doc__.partition("\n")[0])
    parser.add_argument("run", metavar="RUN", help="a name in runs/, or a folder with a config.toml")
    word = parser.parse_args(argv).run
    try:
        print(script(with_tokenizer(from_toml(read_text(find_run(word) / "config.toml")))))
    except (OSError, ValueError) as error:
        print(escaped(f"nanomegatron to-megatron: {word}: {error}"), file=sys.stderr)
        return 2
    return 0


def with_tokenizer(config: Config) -> Config:
    """Add the tokenizer that made the data, if the run has it from there and the data are still there."""
    data = config.data
    if data.tokenizer_type is not None or data.mock_data:
        return config
    try:
        spec, _ = tokenizer_of_data(data)
    except (OSError, ValueError):
        return config
    values = {SPEC_NAMES.get(name, name): value for name, value in spec.items()}
    values.pop("include_special_tokens", None)  # Megatron's default
    values["vocab_size"] = data.vocab_size or values.get("vocab_size")
    return replace(config, data=replace(data, **values))


def script(config: Config) -> str:
    """The command as text of a shell, what it lacks in comments before it."""
    world = config.parallel.ranks_per_replica * (config.parallel.data_parallel_size or 1)
    flags, lacking = command(resolve(config, world))
    nodes = f"--nnodes {world // GPUS} " if world > GPUS and world % GPUS == 0 else ""
    launch = f"CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun {nodes}--nproc-per-node {GPUS if nodes else world}"
    comments = [f"# {line}" for line in [*FIRST_LINES.splitlines(), *lacking]]
    return "\n".join([*comments, " \\\n    ".join([f"{launch} pretrain_gpt.py", *map(shlex.join, flags)])])


def command(config: Config) -> tuple[list[list[str]], list[str]]:
    """Return Megatron-LM's flags for a resolved config, each with its values, and lines on what it lacks."""
    flags, lacking = [], []
    for name, value in _wanted(config):
        words, why = _translated(name, value, config)
        flags += [words] * bool(words)
        lacking += [f"{spelled(name, value)}: {why}"] * bool(why)
    lacking += [f"{words}: Megatron-LM stops" for words in refused_together(config)]
    data, model, parallel = config.data, config.model, config.parallel
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    if model.num_experts and not model.disable_bias_linear and etp > 1:
        lacking.append(
            f"{spelled('expert_tensor_parallel_size', etp)}: Megatron-LM has biases of experts only with 1"
        )
    if data.tokenizer_type is None and data.vocab_size is None:
        lacking.append("--tokenizer-type: the one that made the data (its .json says which) is to be added")
    elif data.tokenizer_type in (None, "NullTokenizer"):
        flags += [["--tokenizer-type", "NullTokenizer"]] * (data.tokenizer_type is None)
        lacking.append(
            f"--vocab-size {data.vocab_size}: NullTokenizer there adds one, for the end of document"
        )
    if not (data.data_path or data.data_args_path or data.train_data_path or data.mock_data):
        lacking.append("--data-path: the run has none; it is to be added")
    return [*flags, *([word] for word in ALWAYS)], lacking


def _wanted(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the settings that count and are not Megatron's defaults."""
    values, written = values_of(config), megatron_flags()["written"]
    for _, s, value in declared(config):
        rules, differs = Rules(**s.metadata), flag(s.name)[2:] in written or s.name in MEGATRON_DEFAULTS
        counts = not rules.part_of or holds(rules.part_of, values)
        if value not in (None, ()) and counts and s.name not in NOT_ASKED and (differs or value != s.default):
            yield s.name, value


def _number(value: Any) -> str:
    """A value as it is given; whole numbers without a fraction, which some of Megatron's flags refuse."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _translated(name: str, value: Any, config: Config) -> tuple[list[str], str]:
    """Return Megatron's flag of a setting with its values, [] if there is none, and what is to be said."""
    known, key = megatron_flags(), flag(name)[2:]
    words = spelled(name, value).split(" ")[:1]
    words += map(_number, () if isinstance(value, bool) else items(value))
    match name, value:
        case (
            ("num_query_groups", config.model.num_attention_heads)
            | ("num_virtual_stages_per_pipeline_rank", 1)
            | ("pipeline_schedule", "1f1b" | "interleaved")
            | ("ckpt_format", "sharded")
        ):
            return [], ""
        case "num_query_groups", _:
            return ["--group-query-attention", *words], ""
        case "train_iters", _ if config.run.train_samples:
            return [], ""
        case "window_size", _:
            return [words[0], ",".join(map(str, value))], ""
        case "dataloader_type", _:
            return [words[0], "single"], "--dataloader-type single reads in this order there" * (
                value == "cyclic"
            )
        case "data_parallel_sharding_strategy", _:
            same = "--use-distributed-optimizer" if value != "no_shard" else ""
            return [same] * bool(same), "gradients stay whole there" * (value == "optim_grads")
        case "tokenizer_type", _ if value in known["own-tokenizers"]:
            size = [] if config.data.vocab_size else ["--vocab-size", str(BYTE_IDS)]
            why = "NullTokenizer takes the ids of the data as they are; it adds one to --vocab-size"
            return [words[0], "NullTokenizer", *size * (value == "ByteTokenizer")], why
        case "rampup_batch_size", _:
            counted = "" if config.run.train_samples else "only in runs of --train-samples there, and "
            return words, f"{counted}ignored since core 0.19, which has --step-batch-size-schedule"
    if key in known["own"]:
        return [], "no flag of Megatron-LM"
    return ["--" + known["renamed"].get(words[0][2:], words[0][2:]), *words[1:]], ""

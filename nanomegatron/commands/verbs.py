"""`nanomegatron VERB ...`, also as `python -m nanomegatron VERB ...`: all commands of the project.

    train, preprocess, convert    the programs train.py, preprocess.py and convert.py
    the others                    a module with `main(argv)`, imported when it is run

The programs lie beside the package in a checkout, and in its folder programs/ where it is installed.
"""

import importlib
import runpy
import sys
from pathlib import Path

from nanomegatron import __version__
from nanomegatron.config.help import did_you_mean

PACKAGE = Path(__file__).resolve().parents[1]
# Verb: the program or module, and what it does.
COMMANDS = {
    "train": ("train.py", "train a model, on one process or on all ranks of torchrun"),
    "preprocess": ("preprocess.py", "tokenize text into Megatron's .bin/.idx files"),
    "convert": ("convert.py", "convert checkpoints from and to Hugging Face's and Megatron's"),
    "generate": ("nanomegatron.commands.generate_args", "continue a text with a trained model"),
    "plan": ("nanomegatron.commands.plan", "choose a layout: memory and time of a step, without a GPU"),
    "schedules": ("nanomegatron.commands.schedules", "print or draw a pipeline schedule"),
    "runs": ("nanomegatron.commands.runs", "list the runs here: state, step, loss, age"),
    "compare": ("nanomegatron.commands.compare", "compare runs: settings, losses, speed, a picture, a page"),
    "debug": ("nanomegatron.commands.debug", "run two layouts; name the first module that differs"),
    "to-megatron": ("nanomegatron.commands.to_megatron", "print the Megatron-LM command of a run"),
    "doctor": ("nanomegatron.commands.doctor", "check this machine, and name what mends it"),
    "ops": ("nanomegatron.ops.__main__", "the path of every op here, and why"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command that the first argument names; returns its exit code, 2 for an unknown one."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "--version":
        print(f"nanomegatron {__version__}")
        return 0
    if name in COMMANDS:
        where = COMMANDS[name][0]
        if where.endswith(".py"):
            return run_program(where, rest)
        try:
            code = importlib.import_module(where).main(rest)
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # the reader has read enough, as `head` does
            importlib.import_module("nanomegatron.report.writers").spare_exit(sys.stdout)
            return 0
    if name in ("-h", "--help") and rest:  # a topic of the flags
        return main(["train", "--help", *rest])
    if name in ("-h", "--help"):
        print(overview())
        return 0
    hint = did_you_mean(name, COMMANDS)
    print(f"nanomegatron: no command {name!r}{hint}\n\n{overview()}", file=sys.stderr)
    return 2


def overview() -> str:
    """One line for each command."""
    lines = ["usage: nanomegatron VERB ...    (python -m nanomegatron VERB is the same)", ""]
    lines += [f"  {verb:<12}{what}" for verb, (_, what) in COMMANDS.items()]
    return "\n".join([*lines, "", "nanomegatron VERB --help: the flags of a command"])


def run_program(name: str, argv: list[str]) -> int:
    """Run train.py, preprocess.py or convert.py as `python NAME` does."""
    installed = PACKAGE / "programs" / name
    path = installed if installed.is_file() else PACKAGE.parent / name
    sys.path.insert(0, str(path.parent))  # train.py imports preprocess.py
    sys.argv = [str(path), *argv]
    runpy.run_path(str(path), run_name="__main__")  # ends with sys.exit
    return 0

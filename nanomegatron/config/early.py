"""Answers a command line before torch is imported, in a fraction of a second: help, and most errors."""

import os
import sys

from nanomegatron.config.check import validate
from nanomegatron.config.cli import ConfigError, Parsed, help_text, parse


def early_answer(argv: list[str]) -> int | None:
    """Print help or errors and return the exit code; None for a command line that may be right.

    Without `--device` only errors that hold both on CPUs and on GPUs are reported. Under torchrun only rank 0
    prints.
    """
    parsed, first = parse(argv), os.environ.get("RANK", "0") == "0"
    if parsed.action.startswith("help"):
        if first:
            print(help_text(everything=parsed.action == "help all"))
        return 0
    if errors := early_errors(parsed):
        if first:
            print_errors(ConfigError(errors))
        return 2
    return None


def processes_of_torchrun() -> int:
    """The number of processes that torchrun has started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def early_errors(parsed: Parsed) -> list[str]:
    """Return the errors that a command line has on every device that it may run on."""
    run, world = parsed.config.run, processes_of_torchrun()
    kinds = ("cpu", "cuda") if run.device == "auto" else (run.device,)
    size = world if world > 1 else run.nproc
    found, *others = (validate(parsed.config, size, kind) for kind in kinds)
    return [*parsed.errors, *(error for error in found if all(error in other for other in others))]


def print_errors(error: ValueError) -> None:
    """Print one line for each error to stderr."""
    messages = getattr(error, "messages", [str(error)])
    print(f"train.py: {len(messages)} error{'s' * (len(messages) > 1)}, nothing was started", file=sys.stderr)
    for message in messages:
        print(f"  {message}", file=sys.stderr)

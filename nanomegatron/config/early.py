"""Answers a command line before torch is imported, in a fraction of a second: help, settings, most errors."""

import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import ConfigError, Parsed, parse, to_toml
from nanomegatron.config.help import help_text
from nanomegatron.config.user_files import escaped


def early_answer(argv: list[str]) -> int | None:
    """Print help, settings or errors and return the exit code; None for a command line that may be right.

    Without `--device` only errors that hold both on CPUs and on GPUs are reported. Under torchrun only rank 0
    prints. The settings are those that follow from files, flags and the number of processes: no data is read.
    """
    parsed, rank, text = parse(argv), int(os.environ.get("RANK", 0)), ""
    try:
        if parsed.action.startswith("help"):
            text = help_text(parsed.action[len("help ") :])
        elif errors := early_errors(parsed):
            raise ConfigError(errors)
        elif parsed.action == "print-config":
            text = to_toml(resolve(parsed.config, processes_of_torchrun(parsed.config.run.nproc))).rstrip()
        if text and rank == 0:
            print(text, flush=True)
    except ValueError as error:
        print_errors(error, rank)
        if parsed.base and rank == 0:
            print(f"  note    {parsed.base}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has read enough, as `head` does; nothing is left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if text else None


def answer_without_torch(argv: list[str]) -> None:
    """Exit with the `early_answer`, if there is one; else let Ctrl-C end the import of torch that follows."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the import would swallow a KeyboardInterrupt
    answered = early_answer(argv)
    if answered is not None:
        sys.exit(answered)


def processes_of_torchrun(without: int | None = None) -> int:
    """The number of processes that torchrun has started, if several; else `without`, or 1."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    return world if world > 1 else without or 1


def early_errors(parsed: Parsed) -> list[str]:
    """Return the errors that a command line has on every device, and not those that follow from others."""
    run = parsed.config.run
    kinds, size = ("cpu", "cuda") if run.device == "auto" else (run.device,), processes_of_torchrun(run.nproc)
    found, *others = (validate(parsed.config, size, kind) for kind in kinds)
    found = [error for error in found if parsed.unread.isdisjoint(re.findall(r"--[\w-]+", error))]
    return [*parsed.errors, *(error for error in found if all(error in other for other in others))]


def print_errors(error: ValueError, rank: int) -> None:
    """Print one line for each error to stderr, on rank 0."""
    messages = getattr(error, "messages", [str(error)])
    title = f"nanomegatron train: {len(messages)} error{'s' * (len(messages) > 1)}, nothing was started"
    text = "\n  ".join([title, *map(escaped, messages)])
    tell_torchrun(text)
    if rank == 0:
        print(text, file=sys.stderr)


def tell_torchrun(message: str) -> None:
    """Write why this rank fails where torchrun looks: the summary that ends its output shows the message."""
    with suppress(KeyError, OSError):  # torchrun has not started it
        facts = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": facts}))

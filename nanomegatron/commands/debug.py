"""`nanomegatron debug`: run two layouts on the same data, and name the first module that differs.

    nanomegatron debug --a tp1 --b tp2pp2sp --config tiny-cpu --seq-length 32 --global-batch-size 8
    nanomegatron debug --b tp2 --reference hf FOLDER --data-path my_text_document

Layouts are words such as tp2pp2sp (docs/debugging.md); other flags are those of `nanomegatron train`. Ranks
are processes of this machine. Exit code 0: no difference; 1: there is one; 2: wrong flags, or layout a fails.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from nanomegatron.config.cli import parse
from nanomegatron.config.help import CommandParser
from nanomegatron.config.hf import is_hf_folder
from nanomegatron.config.rules import flag
from nanomegatron.config.user_files import escaped
from nanomegatron.debug.layouts import flags_of
from nanomegatron.debug.run import Layout, checked, compare_layouts


def main(argv: list[str]) -> int:
    """Compare two layouts, or a layout with transformers; returns the exit code."""
    parser = CommandParser(
        "nanomegatron debug",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--a", default="tp1", metavar="LAYOUT", help="the layout that is right; default one process")
    add("--b", default="tp1", metavar="LAYOUT", help="the layout to compare with it")
    add("--reference", nargs=2, metavar=("hf", "FOLDER"), help="compare with transformers, not with --a")
    add("--steps", type=int, default=2, metavar="N", help="steps to run; default 2")
    add("--json", type=Path, metavar="FILE", help="also write what was found as JSON")
    args, flags = parser.parse_known_args(argv)
    try:
        folder = folder_of(args)
        flags += ["--load", folder] if folder else []
        a, b = (layout_run(word, flags, 1 if folder else args.steps) for word in (args.a, args.b))
        found = compare_layouts(a, b, folder)
    except (ValueError, RuntimeError) as error:
        print(
            "nanomegatron debug:",
            *map(escaped, getattr(error, "messages", [str(error)])),
            sep="\n  ",
            file=sys.stderr,
        )
        return 2
    what = f"transformers of {folder}, the first step" if folder else f"{args.a}, {args.steps} steps"
    print(f"{args.b} and {what}:")
    print(*(found.describe() if found else ["no tensor differs by more than rounding explains"]), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(found.facts() if found else {}) + "\n", encoding="utf-8")
    return 1 if found else 0


def folder_of(args: argparse.Namespace) -> str | None:
    """The folder of --reference. Raises ValueError for what would fail later: that, --steps, --json."""
    kind, folder = args.reference or ("hf", None)
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: must be at least 1")
    if kind != "hf":
        raise ValueError(f"--reference {kind}: takes `hf FOLDER`, a folder of transformers")
    if folder and not is_hf_folder(folder):
        raise ValueError(f"--reference hf {folder}: has no config.json with safetensors; save a model there")
    if args.json and (args.json.is_dir() or not os.access(args.json.parent, os.W_OK)):
        raise ValueError(f"--json {args.json}: cannot be written; give a file in a folder that can")
    return folder


def layout_run(word: str, flags: list[str], steps: int) -> Layout:
    """The command line of a layout. Raises ValueError with all errors."""
    size, own = flags_of(word)
    parsed = parse(flags)
    if both := parsed.given & {"nproc", *parse(own.split()).given}:
        raise ValueError(f"{' '.join(map(flag, sorted(both)))}: give it in the words of --a and --b, as tp2")
    data = parsed.config.data
    given = data.mock_data or data.data_path or data.data_args_path or data.train_data_path
    more = [] if given else ["--mock-data"]
    if not given and not data.tokenizer_type and not data.vocab_size:
        more += ["--tokenizer-type", "ByteTokenizer"]
    device = "cuda" if torch.cuda.device_count() >= size else "cpu"
    argv = ["--distributed-timeout-minutes", "1", "--device", device, *flags, *more, *own.split()]
    argv += ["--train-iters", str(steps), "--eval-iters", "0"]
    return Layout(word, argv, size, checked(argv, size, device))

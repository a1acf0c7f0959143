"""`nanomegatron debug`: run two layouts on the same data, and name the first module that differs, and how.

    nanomegatron debug --a tp1 --b tp2pp2sp --config tiny-cpu --seq-length 32 --global-batch-size 8
    nanomegatron debug --b tp2 --reference hf FOLDER --data-path my_text_document

Layouts are words such as tp2pp2sp (docs/debugging.md); other flags are those of `nanomegatron train`. Ranks
are processes of this machine, on GPUs if it has enough. Exit code 0: no difference; 1: there is one; 2: wrong
flags, or the reference fails.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from nanomegatron.config.cli import parse
from nanomegatron.debug.layouts import flags_of
from nanomegatron.debug.run import Layout, checked, compare_layouts


def main(argv: list[str]) -> int:
    """Compare two layouts, or a layout with transformers; returns the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("nanomegatron debug", None, __doc__, formatter_class=form)
    parser.allow_abbrev = False
    add = parser.add_argument
    add("--a", default="tp1", metavar="LAYOUT", help="the layout that is right; default one process")
    add("--b", default="tp1", metavar="LAYOUT", help="the layout to compare with it")
    add(
        "--reference",
        nargs=2,
        metavar=("hf", "FOLDER"),
        help="compare with transformers' model, not with --a",
    )
    add("--steps", type=int, default=2, metavar="N", help="steps to run; default 2")
    add("--json", type=Path, metavar="FILE", help="also write what was found as JSON")
    args, flags = parser.parse_known_args(argv)
    try:
        if args.steps < 1 or (args.reference and args.reference[0] != "hf"):
            raise ValueError("--steps must be at least 1, and --reference is `hf FOLDER`")
        folder = args.reference and args.reference[1]
        flags += ["--load", folder] if folder else []
        a, b = (layout_run(word, flags, args.steps) for word in (args.a, args.b))
        found = compare_layouts(a, b, folder)
    except (ValueError, RuntimeError) as error:
        print("nanomegatron debug:", *getattr(error, "messages", [error]), sep="\n  ", file=sys.stderr)
        return 2
    what = f"{args.b} and " + (f"transformers' model of {folder}" if folder else args.a)
    print(f"{what}, {args.steps} steps:")
    print(*(found.describe() if found else ["no tensor differs by more than rounding explains"]), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(found.facts() if found else {}) + "\n", encoding="utf-8")
    return 1 if found else 0


def layout_run(word: str, flags: list[str], steps: int) -> Layout:
    """The command line of a layout. Raises ValueError with all errors."""
    size, own = flags_of(word)
    data = parse(flags).config.data
    given = data.mock_data or data.data_path or data.data_args_path or data.train_data_path
    more = [] if given else ["--mock-data"]
    if not given and not data.tokenizer_type and not data.vocab_size:
        more += ["--tokenizer-type", "ByteTokenizer"]
    device = "cuda" if torch.cuda.device_count() >= size else "cpu"
    argv = [
        "--distributed-timeout-minutes",
        "1",
        *flags,
        *more,
        *own.split(),
        "--train-iters",
        str(steps),
        "--eval-iters",
        "0",
    ]
    argv += ["--device", device] if "--device" not in flags else []
    checked(argv, size, device)
    return Layout(argv, size)

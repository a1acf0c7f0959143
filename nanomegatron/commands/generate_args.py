"""The command line of `generate`; errors are reported before torch is imported."""

import argparse
import importlib
import sys
from pathlib import Path

from nanomegatron.config.early import processes_of_torchrun
from nanomegatron.config.help import CommandParser
from nanomegatron.config.megatron_args import checkpoint_folder, why_no_checkpoint
from nanomegatron.config.sampling import DEFAULT, Sampling
from nanomegatron.config.settings import DataConfig
from nanomegatron.config.user_files import escaped

TOKENIZER_FLAGS = DataConfig.__dataclass_fields__["tokenizer_type"].metadata["choices"]


def main(argv: list[str]) -> int:
    """Generate; returns 3 if there is no checkpoint, exits with code 2 if the command line is wrong."""
    world_size = processes_of_torchrun()
    args = parse_args(argv, world_size)
    args.load = checkpoint_folder(args.load)
    if world_size == 1 and not Path(args.load).is_dir():
        why = f"no checkpoint in {args.load}{why_no_checkpoint(args.load)}"
        print(escaped(f"nanomegatron generate: {why}"), file=sys.stderr)
        return 3
    return importlib.import_module("nanomegatron.commands.generate").run(args)


def parse_args(argv: list[str], world_size: int = 1) -> argparse.Namespace:
    """Parse the command line; exits with code 2 if it is wrong. `world_size`: processes of torchrun."""
    parser = CommandParser(
        prog="nanomegatron generate",
        description="Continue a text.",
        epilog="example: nanomegatron generate --load runs/python --prompt 'def '",
    )
    add = parser.add_argument
    add("--load", required=True, help="folder of a run, runs/NAME, of checkpoints or of a Hugging Face model")
    add("--ckpt-step", type=int, help="iteration to load; default the newest")
    add(
        "--prompt",
        action="append",
        default=[],
        help="text to continue, may be repeated; none: read stdin, one prompt a line",
    )
    add("--max-new-tokens", type=int, default=200, help="longest continuation; default 200 tokens")
    add(
        "--temperature",
        type=float,
        default=DEFAULT.temperature,
        help="0: always the likeliest token; default 0.8",
    )
    add("--top-k", type=int, default=DEFAULT.top_k, help="choose among the K likeliest, 0: all; default 40")
    add("--top-p", type=float, default=DEFAULT.top_p, help="among the likeliest of this share; default 0.95")
    add("--seed", type=int, default=DEFAULT.seed, help="of the random choices; default 0")
    add("--num-samples", type=int, default=1, help="continuations of each prompt; default 1")
    add("--nproc", type=int, help="processes to start on this machine; default --tp x --pp")
    add(
        "--tp",
        "--tensor-model-parallel-size",
        type=int,
        help="processes that share each layer; default --nproc / --pp",
    )
    add("--pp", "--pipeline-model-parallel-size", type=int, default=1, help="pipeline stages; default 1")
    add(
        "--tokenizer-type",
        choices=TOKENIZER_FLAGS,
        metavar="TYPE",
        help="a tokenizer; default the checkpoint's",
    )
    for flag in ("--tokenizer-model", "--vocab-file", "--merge-file"):
        add(flag, metavar="FILE", help="of --tokenizer-type")
    add("--vocab-size", type=int, help="of --tokenizer-type, where its file does not say it")
    add(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="no special tokens around a prompt, such as <s> before it",
    )
    add(
        "--parse-special-tokens",
        action="store_true",
        help="read <s> and the like in a prompt as the tokens that they name, not as text",
    )
    add(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="where to compute; default auto: a GPU if there is one",
    )
    args = parser.parse_args(argv)
    args.nproc = world_size if world_size > 1 else args.nproc or (args.tp or 1) * args.pp
    args.tp = args.tp or args.nproc // max(args.pp, 1)
    try:
        args.sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed).check()
        for flag, value in (("max-new-tokens", args.max_new_tokens), ("num-samples", args.num_samples)):
            if value < 1:
                raise ValueError(f"--{flag} {value}: give 1 or more")
        if args.tp * args.pp != args.nproc or min(args.tp, args.pp) < 1:
            raise ValueError(
                f"--tp {args.tp} --pp {args.pp} on {args.nproc} processes: their product must be that number"
            )
        for flag in ("tokenizer_model", "vocab_file", "merge_file"):
            if not args.tokenizer_type and (file := getattr(args, flag)):
                raise ValueError(f"--{flag.replace('_', '-')} {file}: give --tokenizer-type as well")
    except ValueError as error:
        parser.error(str(error))
    if not args.prompt and args.nproc > 1:
        parser.error("only a single process reads prompts from stdin: give --prompt")
    return args

"""Convert checkpoints to and from Hugging Face folders, equal to the bit, and Megatron-LM's.

    python convert.py --source hf --target nanomegatron --input-path Llama-3.1-8B --output-path llama
    python train.py --load llama --finetune --config llama/hf ...
    python convert.py --source nanomegatron --target hf --input-path runs/NAME/ckpt --output-path exported
    python convert.py --source megatron-core --target hf --input-path THEIRS --output-path exported
    python convert.py --source nanomegatron --target megatron-core --input-path runs/NAME/ckpt --output-path M

`nanomegatron` is a checkpoint of this program. `megatron-core`, or `megatron`, is one of Megatron-LM (written
as torch_dist). If one says nothing of its model, flags or --config do (`--num-layers 32 ...`).

    Llama-3.1-8B/                              llama/
        model-00001-of-00004.safetensors           iter_0000000/    the weights under our names, types kept
        model.safetensors.index.json               hf/              every other file of the folder, and the
        config.json, tokenizer.json, ...                            headers of the weight files

With hf/ the conversion back gives the same files, byte for byte. A model trained here has no such folder: its
config.json is generated. Tensors are read and written in slices of 64 MiB, so that a model of any size
converts, and the output gets its name only when it is complete: an interrupted conversion leaves nothing that
loads. --dtype casts the weights; --verify reads the output again and compares it with the input, to the bit.
(`train.py --load` takes a folder of any kind as it is.) Exit codes: 0 done, 2 wrong arguments or input.
"""

import argparse
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nanomegatron.config.help import CommandParser
from nanomegatron.config.user_files import escaped

LAYOUT_FLAGS = [
    f"--{end}{kind}-parallel-size" for end in ("target-", "") for kind in ("tensor", "pipeline", "expert")
]
LAYOUT_FLAGS += [f"--{kind}-model-parallel-size" for kind in ("tensor", "pipeline", "expert")]
SPELLINGS = {"megatron": "megatron-core", "torch_dist": "megatron-core"}
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line, `model`: flags of one. argparse exits with code 2; raises ValueError too."""
    more = (
        "A Megatron-LM checkpoint without args needs flags of its model: --num-layers 32 ..., --config NAME."
    )
    p = CommandParser(prog="nanomegatron convert", description=__doc__.splitlines()[0], epilog=more)
    kinds = ("hf", "nanomegatron", "megatron-core", "megatron")
    p.add_argument("--source", required=True, choices=kinds, help="what --input-path holds")
    p.add_argument("--target", required=True, choices=(*kinds, "torch_dist"), help="what is to be written")
    p.add_argument("--input-path", "--load-dir", required=True, help="folder to read")
    p.add_argument("--output-path", "--save-dir", required=True, help="folder to make")
    p.add_argument("--ckpt-step", type=int, help="iteration to read; the newest")
    p.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="type of the weights; as they are")
    p.add_argument("--max-shard-size", type=size, help="largest weight file of a Hugging Face folder; 5GB")
    p.add_argument(
        "--verify", action="store_true", help="read the output again and compare it with the input"
    )
    for flag in LAYOUT_FLAGS:
        p.add_argument(flag, type=int, dest="layout", help=argparse.SUPPRESS)
    args, args.model = p.parse_known_args(argv)
    args.source, args.target = (SPELLINGS.get(kind, kind) for kind in (args.source, args.target))
    if args.model and args.source != "megatron-core":
        p.error(f"unrecognized arguments: {' '.join(args.model)}")
    target = Path(args.output_path)
    if args.max_shard_size and args.target != "hf":
        raise ValueError("--max-shard-size: is for --target hf; leave it out")
    if args.ckpt_step is not None and args.source == "hf":
        raise ValueError("--ckpt-step: a Hugging Face folder has no iterations; leave it out")
    if args.source == args.target:
        raise ValueError(f"--source {args.source} --target {args.target}: nothing to convert")
    if not os.path.isdir(args.input_path):
        raise ValueError(f"--input-path {args.input_path}: no such folder")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"--output-path {target}: exists; give a new folder")
    return args


def size(text: str) -> int:
    """Parse 5GB or 500MB."""
    if not (match := re.fullmatch(r"([1-9]\d*)([KMG]?)B?", text.strip().upper())):
        raise argparse.ArgumentTypeError(f"{text}: give a size such as 5GB or 500MB")
    return int(match[1]) * UNITS[match[2]]


def refused(error: Exception) -> int:
    """Print an error; returns its exit code."""
    print(escaped(f"nanomegatron convert: {error}"), file=sys.stderr)
    return 2


if __name__ == "__main__":  # wrong arguments are reported before torch is imported
    try:
        arguments(sys.argv[1:])
    except ValueError as error:
        sys.exit(refused(error))

import torch

from nanomegatron.checkpoint.convert_source import SourceModel, open_hf, open_ours, open_theirs
from nanomegatron.checkpoint.convert_target import compare, write_hf, write_ours, write_theirs
from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.config.durable import sync
from nanomegatron.report.writers import duration, progress_bar

SHARD_SIZE = 5 * 10**9  # bytes
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(argv: list[str] | None = None) -> int:
    """Convert, and print notes on what was left out; returns the exit code."""
    try:
        args = arguments(argv)
    except ValueError as error:
        return refused(error)
    source, target = Path(args.input_path), Path(args.output_path).absolute()
    temporary = target.with_name(f"{target.name}.tmp{os.getpid()}")
    made = [folder for folder in target.parents if not folder.exists()]
    try:
        remove_leftovers(target)
        temporary.mkdir(parents=True)
        notes = list(convert(args, source, temporary, target))
        for path in filter(Path.is_file, temporary.rglob("*")):
            with open(path, "rb+") as file:
                sync(file)
        os.replace(temporary, target)
    except (ValueError, OSError, CheckpointError) as error:
        return refused(error)
    except KeyboardInterrupt:
        print("nanomegatron convert: interrupted, nothing is written", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # up to one that holds something
            for folder in made:
                folder.rmdir()
    if args.target == "megatron-core":
        notes.append(
            "torch_dist, which Megatron-LM loads; --target nanomegatron writes a checkpoint for here"
        )
    if args.layout:
        notes.append("the flags of a layout are needless: any layout loads what is written")
    print(escaped("\n".join([f"{target} is written", *notes])))
    return 0


def remove_leftovers(target: Path) -> None:
    """Remove what conversions to this folder have left that were killed."""
    for path in target.parent.glob(f"{target.name}.tmp*"):
        pid = path.name.removeprefix(f"{target.name}.tmp")
        try:
            os.kill(int(pid), 0)  # no signal: only whether there is such a process
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except (ValueError, OSError):
            pass  # no folder of ours, or somebody else's process


def convert(args: argparse.Namespace, source: Path, temporary: Path, target: Path) -> Iterator[str]:
    """Write the target to `temporary`, which becomes `target`; yields notes."""
    opened = open_source(args.source, source, args.model, args.ckpt_step)
    yield from opened.notes
    if args.dtype:
        opened = opened.cast(DTYPES[args.dtype])
    free = shutil.disk_usage(temporary).free
    need = opened.nbytes(("model/", "hf/") if args.target == "hf" else "")
    if need > free:
        raise ValueError(f"--output-path {target}: it needs {need} bytes, {free} are free there")
    with progress("written", need) as report:
        moving = opened.counted(report)
        match args.target:
            case "hf":
                keep = not args.dtype and args.max_shard_size is None
                yield from write_hf(moving, temporary, args.max_shard_size or SHARD_SIZE, keep)
            case "megatron-core":
                yield from write_theirs(moving, temporary)
            case _:
                yield from write_ours(moving, temporary, target, keep=not args.dtype)
    if args.verify:
        with progress("verified", opened.nbytes(("model/", "hf/"))) as report:
            compare(opened, open_source(args.target, temporary, args.model).counted(report))
        cast = f" cast to {args.dtype}" if args.dtype else ""
        yield f"verified: all {len(opened.tensors)} weights are those of {source}{cast}, to the bit"


def open_source(kind: str, root: Path, flags: list[str], step: int | None = None) -> SourceModel:
    """Open a folder of this kind. flags: of Megatron-LM's model. Raises ValueError, CheckpointError."""
    match kind:
        case "hf":
            return open_hf(root)
        case "nanomegatron":
            return open_ours(root, step)
    return open_theirs(root, step, flags)


@contextmanager
def progress(what: str, total: int, every: float = 10.0) -> Iterator[Callable[[int], None]]:
    """Show how many bytes are done, the rate and the time left: a bar on a terminal, else lines on stderr."""
    bar = progress_bar(0, total, sys.stderr, unit="B", unit_scale=True, desc=what)
    start = last = time.monotonic()
    done = 0

    def report(nbytes: int) -> None:
        nonlocal done, last
        done += nbytes
        if bar is not None:
            bar.update(nbytes)
        elif (now := time.monotonic()) - last >= every:
            rate, last = done / (now - start), now
            left = duration(max(0, total - done) / rate)
            text = f"{what} {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, {left} left"
            print(text, file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        if bar is not None:
            bar.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` removes what is begun
    sys.exit(main(sys.argv[1:]))

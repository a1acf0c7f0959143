"""What FP8 does to the loss: runs of train.py in bf16 and in every FP8 recipe, from several seeds each.

    python benchmarks/fp8_losses.py --model demo --out demo.json      a small model on a CPU
    python benchmarks/fp8_losses.py --model 125m --out 125m.json      GPT-2's smallest on GPUs, a run on each
    python benchmarks/fp8_losses.py ... --jobs 8 --only bf16 --only "delayed --fp8-amax-history-len 16"
    python benchmarks/fp8_losses.py ... -- --deterministic-mode       what follows -- goes to every run
    python benchmarks/fp8_losses.py --from demo.json 125m.json --draw losses.svg      no training

The text is train.py's own, the sources of Python's standard library. A seed decides the first weights and the
order of the text, so that runs of one seed differ by rounding alone, and bf16's seeds among themselves by all
that is left to chance. Two numbers say how a run ended: its training loss, the mean of the last 50 steps, and
its loss on all of the validation text after the last.

`within` compares them with the smallest and the largest of bf16's seeds, and nothing is added to that range:
at or between the two is "yes", else "below", better than every bf16 run, or "above", worse than every one. It
is said of the mean over a recipe's seeds, and counted over the seeds one by one. Three runs span little: a
fourth seed of bf16 itself would lie between them one time in two. What FP8 costs is in the differences to
bf16 with the same seeds: their mean, the smallest, the largest.

Speed is a run's median over its last nine tenths; runs that share a GPU or a CPU slow each other down. One
that fails is told with its last lines, the others go on, and the exit code is 1. Results of one model and the
same flags, such as other seeds, are put together by --from. `--small` takes seconds, on CPUs.
"""

import argparse
import datetime
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.children import in_slots, write_runs  # noqa: E402
from benchmarks.fp8_losses_report import FINALS, LAST, NAMES, compared, draw, pieces, report  # noqa: E402
from nanomegatron.data.indexed_dataset import IndexedDataset  # noqa: E402
from nanomegatron.ops.kernels import usable  # noqa: E402
from nanomegatron.report.writers import read_jsonl  # noqa: E402
from preprocess import prepare_embedded  # noqa: E402

MODELS = {  # flags of train.py, length of a sequence, sequences a step, steps
    "demo": ("--config tiny-cpu --hidden-size 256", 256, 8, 600),  # the preset's 192 is not in blocks of 128
    "125m": ("--config gpt2-124m --micro-batch-size 16 --lr-warmup-fraction 0.1", 1024, 16, 1000),
}
SMALL = "--num-layers 1 --hidden-size 128 --num-attention-heads 2 --ffn-hidden-size 256 --micro-batch-size 2"
ALIKE = (
    "train_iters",
    "flags",
    "data",
    "tokens",
    "device",
    "kernels",
    "torch",
)  # in results that are put together


class Child:
    """One run of train.py, in a folder that goes away with it."""

    def __init__(self, recipe: str, seed: int, flags: list[str], environment: dict[str, str]) -> None:
        name, *more = recipe.split()
        fp8 = [] if name == "bf16" else ["--fp8-format", "hybrid", "--fp8-recipe", name]
        self.recipe, self.seed, self.begin = recipe, seed, time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="fp8-losses-"))
        command = [sys.executable, str(ROOT / "train.py"), "--run-name", "one", "--seed", str(seed)]
        with open(self.folder / "console", "wb") as console:
            self.process = subprocess.Popen(
                [*command, *fp8, *more, *flags],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
            )

    def result(self) -> dict:
        """What the run has told, once it has ended: its losses, or its last lines."""
        code, run = self.process.wait(), self.folder / "runs" / "one"
        told = {"recipe": self.recipe, "seed": self.seed, "seconds": round(time.monotonic() - self.begin, 1)}
        steps, evals = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "evals.jsonl")
        if code or not steps or not evals:
            lines = (self.folder / "console").read_text(errors="replace").splitlines()
            return told | {"exit_code": code, "failed": [line for line in lines if line.strip()][-12:]}
        losses = np.array([float(step["lm_loss"]) for step in steps])
        speeds = [step["tokens_per_s"] for step in steps[len(steps) // 10 :]]
        return told | {
            "train_loss": float(losses[-LAST:].mean()),
            "valid_loss": float(evals[-1]["lm_loss"]),
            "tokens_per_s": statistics.median(speeds),
            "skipped": sum(step["skipped"] for step in steps),
            "peak_gib": steps[-1]["peak_mem_gib"],
            "curve": [round(float(part.mean()), 5) for part in pieces(losses)],
        }

    def close(self) -> None:
        """End the run if it has not, and leave nothing behind."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def run_all(args: argparse.Namespace, flags: list[str]) -> Iterator[dict]:
    """The result of every run as it ends; `args.jobs` at a time, one seed after another."""
    todo = [(recipe, seed) for seed in args.seeds for recipe in args.only]

    def start(what: tuple[str, int], slot: int) -> Child:
        return Child(*what, flags, environment(args, slot))

    for child in in_slots(todo, args.jobs, start):
        yield child.result()


def environment(args: argparse.Namespace, slot: int) -> dict[str, str]:
    """A child's: its threads, which do not spin where others may want the core, and one GPU or none."""
    gpu = args.gpus[slot % len(args.gpus)] if args.gpus else ""
    threads = {"OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return {**os.environ, **threads, "CUDA_VISIBLE_DEVICES": gpu}


def prefixes(args: argparse.Namespace) -> dict[str, str]:
    """Training and validation data; the standard library's is made here, before any run wants it."""
    if not args.data:
        text = prepare_embedded(ROOT / "data")
        args.data = [text.train_prefix, text.valid_prefix]
    return {split: str(Path(path).resolve()) for split, path in zip(("train", "valid"), args.data)}


def common_flags(args: argparse.Namespace, valid_tokens: int) -> list[str]:
    """What train.py is told in every run, but for the data. Nothing but weights is saved, at the end."""
    words, length, batch, _ = MODELS[args.model]
    if args.small:
        words, length, batch = f"{words} {SMALL}", 64, 4
    steps, whole = args.train_iters, max(1, (valid_tokens - 1) // (length * batch))
    words += f" --bf16 --seq-length {length} --global-batch-size {batch} --train-iters {steps}"
    words += f" --eval-iters {min(whole, 2) if args.small else whole} --eval-interval {steps}"
    words += f" --save-interval {steps} --no-save-optim --log-interval {max(1, steps // 10)}"
    return [*words.split(), "--device", "cuda" if args.gpus else "cpu", *args.flags]


def train(args: argparse.Namespace) -> dict:
    """Make all runs; the result, which is in --out."""
    begin, paths = time.monotonic(), prefixes(args)
    tokens = {split: int(IndexedDataset(path).sequence_lengths.sum()) for split, path in paths.items()}
    flags = common_flags(args, tokens["valid"])
    result = dict(
        date=datetime.datetime.now().isoformat(timespec="seconds"),
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if args.gpus else "cpu",
        kernels=bool(args.gpus) and usable(torch.empty(1, device="cuda"), "fp8_cast"),  # ours, else torch's
        gpus=len(args.gpus),
        jobs=args.jobs,
        threads=args.threads,
        model=args.model + ", small" * args.small,
        train_iters=args.train_iters,
        flags=" ".join(flags),
        data={split: Path(path).name for split, path in paths.items()},
        tokens=tokens,
        runs=[],
    )
    data = ["--train-data-path", paths["train"], "--valid-data-path", paths["valid"]]
    write(args.out, result)  # an error now, if there will be one
    for run in run_all(args, [*data, *flags]):
        result["runs"].append(run)
        result["runs"].sort(key=lambda run: (args.only.index(run["recipe"]), run["seed"]))
        result["seconds"] = round(time.monotonic() - begin, 1)
        write(args.out, result)
        losses = ", ".join(f"{words} {run[key]:.4f}" for key, words in FINALS.items() if key in run)
        how = losses or f"FAILED: {' '.join(run['failed'][-1:])}"
        print(f"{run['recipe']}, seed {run['seed']}: {how}, {run['seconds']} s", flush=True)
    return result


def write(path: Path, result: dict) -> None:
    """The JSON, with a line a run, and what the runs come to."""
    write_runs(path, result, compared(result["runs"]))


def together(paths: list[Path]) -> list[dict]:
    """One result a model, with all its runs; one that failed is forgotten where it was made again.

    Raises SystemExit where results do not go together, or hold one run twice.
    """
    found: dict[str, dict] = {}
    for path in paths:
        result = json.loads(path.read_text())
        first = found.setdefault(result["model"], result)
        if first is not result:
            for key in ALIKE:
                if first[key] != result[key]:
                    raise SystemExit(f"{path}: {key} {result[key]}; in {paths[0]} and so on {first[key]}")
            first["runs"] += result["runs"]
    for model, result in found.items():
        good = [(run["recipe"], run["seed"]) for run in result["runs"] if "failed" not in run]
        if twice := {f"{recipe}, seed {seed}" for recipe, seed in good if good.count((recipe, seed)) > 1}:
            raise SystemExit(f"{model}: more than one run of {'; '.join(sorted(twice))}")
        again = [run for run in result["runs"] if "failed" in run and (run["recipe"], run["seed"]) in good]
        result["runs"] = [run for run in result["runs"] if run not in again]
    return list(found.values())


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="demo")
    parser.add_argument("--out", type=Path, help="JSON file, written anew after every run")
    parser.add_argument("--draw", type=Path, metavar="FILE.svg", help="the curves as a picture")
    parser.add_argument("--from", type=Path, nargs="+", dest="results", metavar="JSON", help="train nothing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", action="append", help=f"{', '.join(NAMES)}, and flags; may be repeated")
    parser.add_argument("--train-iters", type=int, help="steps; demo 600, 125m 1000")
    parser.add_argument("--jobs", type=int, help="runs at a time; one a GPU, or what the cores allow")
    parser.add_argument("--threads", type=int, default=4, help="of a run")
    parser.add_argument("--data", nargs=2, metavar=("TRAIN", "VALID"), help="prefixes of other text")
    parser.add_argument("--small", action="store_true", help="a tiny model on CPUs, one seed")
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:cut])
    args.flags, args.only = argv[cut + 1 :], list(dict.fromkeys(args.only or NAMES))
    if not args.results and not args.out:
        parser.error("give --out FILE.json, or --from FILE.json ...")
    if unknown := [name for name in args.only if name.split()[:1] not in [[known] for known in NAMES]]:
        parser.error(f"--only {', '.join(unknown)}: there are {', '.join(NAMES)}")
    if args.small:
        args.seeds = args.seeds[:1]
    args.train_iters = args.train_iters or (8 if args.small else MODELS[args.model][3])
    count = 0 if args.small or args.model == "demo" else torch.cuda.device_count()
    named = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    args.gpus = (named or [str(i) for i in range(count)]) if count else []
    some = args.jobs or len(args.gpus) or len(os.sched_getaffinity(0)) // args.threads
    args.jobs = min(max(1, some), len(args.only) * len(args.seeds))
    return args


def main(argv: list[str]) -> int:
    """Train, or read what was trained; draw and report. The exit code is 1 where a run has failed."""
    args = arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an exception: no run outlives this program
    results = together(args.results) if args.results else [train(args)]
    if args.draw:
        try:
            draw(args.draw, results)
        except ImportError:
            print('--draw needs matplotlib: pip install -e ".[viz]"', file=sys.stderr)
    for result in results:
        report(result)
    return int(any("failed" in run for result in results for run in result["runs"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

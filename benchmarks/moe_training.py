"""What experts do to the loss, and balancing to their load: runs of train.py, dense and with experts.

    python benchmarks/moe_training.py --out moe.json --draw moe.svg     every way, two seeds, on a CPU
    python benchmarks/moe_training.py ... --only dense --only "aux loss --num-experts 16" --seeds 1
    python benchmarks/moe_training.py ... -- --train-iters 300          what follows -- goes to every run
    python benchmarks/moe_training.py --from moe.json --draw moe.svg --heat load.png      no training

The text is train.py's own, the sources of Python's standard library. All runs see as many tokens, those of
one seed the same ones in the same order, and take as much work for a token, but for the router's matmul:

    dense           the preset tiny-cpu at the learning rate of tiny-moe-cpu
    dense preset    the same at its own, which is twice as high
    aux loss        tiny-moe-cpu: each MLP is 16 experts of a quarter of its width, four for each token
    no balancing    the same without the loss that evens the load
    expert bias     the same by sigmoid scores, with biases for the choice instead of a loss

Of each run the JSON has the loss on all of the validation text after the last step, the training loss, the
number of parameters, and over the steps how many times its even share the busiest expert has, the mean over
the layers; of one seed also every expert's load. `--small` takes seconds.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import shutil
import signal
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
from benchmarks.moe_training_report import COLUMNS, LAST, draw, heat, pieces, report, summary  # noqa: E402
from nanomegatron.data.indexed_dataset import IndexedDataset  # noqa: E402
from nanomegatron.report.writers import read_jsonl  # noqa: E402
from preprocess import prepare_embedded  # noqa: E402

NONE = "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0"
BIAS = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2"
)
PRESETS = ("tiny-cpu", "tiny-moe-cpu")
RUNS = {  # flags of train.py
    "dense": "--config tiny-cpu --lr 2e-3 --min-lr 1e-4",
    "dense preset": "--config tiny-cpu",
    "no balancing": f"--config tiny-moe-cpu {NONE}",
    "aux loss": "--config tiny-moe-cpu",
    "expert bias": f"--config tiny-moe-cpu {NONE} {BIAS}",
}
SMALL = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 512 --num-attention-heads 2 --seq-length 64"
ALIKE = ("flags", "presets", "data", "tokens", "torch")  # in results that are put together


def way_of(name: str) -> str:
    """The one of RUNS that a name begins with; flags may follow."""
    return max((way for way in RUNS if name.startswith(way)), key=len)


class Child:
    """One run of train.py, in a folder that goes away with it."""

    def __init__(self, name: str, seed: int, flags: list[str], threads: int) -> None:
        way = way_of(name)
        more = self.flags = [*RUNS[way].split(), *shlex.split(name.removeprefix(way))]
        if not way.startswith("dense"):
            more.append("--moe-per-layer-logging")
        self.name, self.seed, self.begin = name, seed, time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="moe-training-"))
        command = [sys.executable, str(ROOT / "train.py"), "--run-name", "one", "--seed", str(seed)]
        alone = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
        with open(self.folder / "console", "wb") as console:
            self.process = subprocess.Popen(
                [*command, *more, *flags],
                cwd=self.folder,
                env={**os.environ, **alone},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
            )

    def result(self, loads: bool) -> dict:
        """What the run has told, once it has ended: its losses and loads, or its last lines."""
        code, run = self.process.wait(), self.folder / "runs" / "one"
        told = {"run": self.name, "seed": self.seed, "flags": " ".join(self.flags)}
        told["seconds"] = round(time.monotonic() - self.begin, 1)
        steps, evals = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "evals.jsonl")
        lines = (self.folder / "console").read_text(errors="replace").splitlines()
        if code or not steps or not evals:
            return told | {"exit_code": code, "failed": [line for line in lines if line.strip()][-12:]}
        losses = np.array([float(step["lm_loss"]) for step in steps])
        last = steps[-1]
        told |= {
            "valid_loss": float(evals[-1]["lm_loss"]),
            "bits_per_byte": evals[-1]["bits_per_byte"],
            "train_loss": float(losses[-LAST:].mean()),
            "tflop_a_step": last["tflops_per_gpu"] * last["step_time_ms"] / 1e3,
            "model": next(line for line in lines if line.startswith("model ")).split(" | ")[1],
            "steps": len(steps),
            "curve": [round(float(part.mean()), 4) for part in pieces(losses)],
        }
        busy = np.array([step.get("moe_load_imbalance", np.nan) for step in steps])
        if np.isfinite(busy).all():
            told |= {"busiest": [round(float(part.mean()), 3) for part in pieces(busy)]}
            told |= {"busiest_last": float(busy[-LAST:].mean()), "busiest_most": float(busy.max())}
            told |= {"load": load(read_jsonl(run / "experts.jsonl"))} if loads else {}
        return told

    def close(self) -> None:
        """End the run if it has not, and leave nothing behind."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def load(records: list[dict]) -> dict[str, list[list[int]]]:
    """By layer the tokens of each expert, summed over some neighbouring steps."""
    layers = [key for key in records[0] if key.endswith("/tokens")]
    tables = {key: np.array([record[key] for record in records]) for key in layers}
    return {key: [part.sum(0).tolist() for part in pieces(table, COLUMNS)] for key, table in tables.items()}


def run_all(args: argparse.Namespace, flags: list[str]) -> Iterator[dict]:
    """The result of every run as it ends; `args.jobs` at a time, one seed after another."""
    todo = [(name, seed) for seed in args.seeds for name in args.only]
    children = in_slots(todo, args.jobs, lambda what, _: Child(*what, flags, args.threads))
    for child in children:
        yield child.result(loads=child.seed == args.seeds[0])


def common_flags(args: argparse.Namespace) -> list[str]:
    """What train.py is told in every run, but for the data: one evaluation, of all the text, and one save."""
    words = [*SMALL.split(), "--global-batch-size", "4"] if args.small else []
    words += "--device cpu --no-save-optim --eval-interval 100000 --save-interval 100000".split()
    steps = ["--train-iters", "8"] if args.small else []
    return [*words, *steps, *args.flags]


def train(args: argparse.Namespace, argv: list[str]) -> dict:
    """Make all runs; the result, which is in --out."""
    begin = time.monotonic()
    if args.data:
        paths, tokenizer = args.data, []
    else:
        text = prepare_embedded(ROOT / "data")
        paths = [text.train_prefix, text.valid_prefix]
        tokenizer = ["--tokenizer-type", text.tokenizer_type, "--tokenizer-model", str(text.tokenizer_model)]
    data = dict(zip(("train", "valid"), (str(Path(path).resolve()) for path in paths), strict=True))
    flags = common_flags(args)
    result = dict(
        date=datetime.datetime.now().isoformat(timespec="seconds"),
        command=shlex.join(["python", "benchmarks/moe_training.py", *argv]),
        torch=torch.__version__,
        python=platform.python_version(),
        device="cpu",
        cores=len(os.sched_getaffinity(0)),
        jobs=args.jobs,
        threads=args.threads,
        flags=" ".join(flags),
        presets={name: (ROOT / "configs" / f"{name}.toml").read_text() for name in PRESETS},
        data={split: Path(path).name for split, path in data.items()},
        tokens={split: int(IndexedDataset(p).sequence_lengths.sum()) for split, p in data.items()},
        runs=[],
    )
    write(args.out, result)  # an error now, if there will be one
    where = [word for split, path in data.items() for word in (f"--{split}-data-path", path)]
    for run in run_all(args, [*where, *tokenizer, *flags]):
        result["runs"].append(run)
        result["runs"].sort(key=lambda run: (args.only.index(run["run"]), run["seed"]))
        result["seconds"] = round(time.monotonic() - begin, 1)
        write(args.out, result)
        how = f"FAILED: {' '.join(run['failed'][-1:])}" if "failed" in run else f"{run['valid_loss']:.4f}"
        print(f"{run['run']}, seed {run['seed']}: {how}, {run['seconds']} s", flush=True)
    return result


def write(path: Path, result: dict) -> None:
    """The JSON, with a line a run, and what the runs come to."""
    write_runs(path, result, summary(result["runs"]))


def together(paths: list[Path]) -> dict:
    """One result with the runs of all files, as RUNS has them. Raises SystemExit where they do not agree."""
    results = [json.loads(path.read_text()) for path in paths]
    first = results[0]
    for path, result in zip(paths[1:], results[1:], strict=True):
        for key in ALIKE:
            if first[key] != result[key]:
                raise SystemExit(f"{path}: {key} {result[key]}; in {paths[0]} {first[key]}")
        first["runs"] += result["runs"]
    made = [(run["run"], run["seed"]) for run in first["runs"]]
    if len(made) > len(set(made)):
        raise SystemExit(f"{', '.join(map(str, paths))}: a run is in more than one of them")
    first["runs"].sort(key=lambda run: (list(RUNS).index(way_of(run["run"])), run["run"], run["seed"]))
    return first


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file, written anew after every run")
    parser.add_argument("--draw", type=Path, metavar="FILE.svg", help="losses and loads as a picture")
    parser.add_argument("--heat", type=Path, metavar="FILE.png", help="every expert's load as a picture")
    parser.add_argument("--from", type=Path, nargs="+", dest="results", metavar="JSON", help="train nothing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", action="append", help=f"{', '.join(RUNS)}, and flags; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="of a run")
    parser.add_argument("--data", nargs=2, metavar=("TRAIN", "VALID"), help="prefixes of other text")
    parser.add_argument("--small", action="store_true", help="a tiny model, one seed")
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:cut])
    args.flags, args.only = argv[cut + 1 :], list(dict.fromkeys(args.only or RUNS))
    if not args.results and not args.out:
        parser.error("give --out FILE.json, or --from FILE.json ...")
    if unknown := [name for name in args.only if not name.startswith(tuple(RUNS))]:
        parser.error(f"--only {', '.join(unknown)}: there are {', '.join(RUNS)}")
    args.seeds = args.seeds[:1] if args.small else args.seeds
    return args


def main(argv: list[str]) -> int:
    """Train, or read what was trained; draw and report. The exit code is 1 where a run has failed."""
    args = arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an exception: no run outlives this program
    result = together(args.results) if args.results else train(args, argv)
    try:
        if args.draw:
            draw(args.draw, result)
        if args.heat:
            heat(args.heat, result)
    except ImportError:
        print('pictures need matplotlib: pip install -e ".[viz]"', file=sys.stderr)
    report(result)
    return int(any("failed" in run for run in result["runs"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

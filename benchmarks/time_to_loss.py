"""GPT-2 124M: time to the loss that a nanoGPT-like peer reaches in some minutes; one GPU.

    python -m benchmarks.time_to_loss --data train.bin.xz --valid val.bin --seed 1 --out 1.json
    python -m benchmarks.time_to_loss --data train.bin.xz --valid val.bin --out all.json         three seeds
    python -m benchmarks.time_to_loss --join 1.json 2.json 3.json --out all.json

    peer   build, 20 steps |                 | steps | evaluate |                  | ...    peers_gpt2.py
    ours                   | build, 20 steps |                  | steps | evaluate | ...    train.train_step
           warm-up, apart                      counted: steps alone, by the host, which waits for the GPU

Both train in this process by turns, from the same weights on the same rows in the same order, with AdamW's
same settings and the same learning rate at each iteration. The peer's speed in its warm-up decides how many
iterations its minutes have, and by that the schedule of both. The target is the lowest validation loss of the
peer; ours ends at the first evaluation at or below it, or after 1.3 times the iterations.

    share                 our seconds over the peer's to that loss, ours interpolated between evaluations
    share_at_evaluation   the same to the end of our interval of evaluation
    share_with_warm_up    with build, compilation, capture of graphs and first steps of each side

Files hold uint16 ids of GPT-2's tokenizer, one after another, .xz or plain. Row i is the tokens i s to
i s + s, so each is predicted once; rows begin again at the end. The held-out rows are the same each time.
"""

import argparse
import contextlib
import json
import lzma
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import train
from benchmarks import report
from benchmarks.peers_gpt2 import KINDS
from nanomegatron.batch import Batch
from nanomegatron.config.batch import samples_before
from nanomegatron.config.settings import Config
from nanomegatron.data.loader import BatchLoader
from nanomegatron.lr_schedule import step_values
from nanomegatron.mesh import Mesh, World, pick_device
from nanomegatron.pick_variants import pick_schedules
from nanomegatron.report.evaluate import evaluate
from nanomegatron.report.log import RunLog
from nanomegatron.report.steps import Reporter
from nanomegatron.report.traffic import Traffic
from nanomegatron.report.writers import read_jsonl
from nanomegatron.step import build_loaders
from tools.gpu_gate import commit_of

MODEL = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --vocab-size 50257 --seq-length 1024 "
MODEL += "--bf16"
SMALL = "--device cpu --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
SMALL += "--vocab-size 96 --seq-length 16 --make-vocab-size-divisible-by 8 --no-bf16"
TRAINING = "--lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 "
TRAINING += "--clip-grad 1.0 --mock-data --tokenizer-type NullTokenizer --save-interval 100000000 "
TRAINING += "--run-name loss --log-interval 100"
LONGEST = 1.3  # of the peer's iterations


# Data


class Rows(Sequence):
    """Rows of `length` + 1 tokens, int64, one behind the other; they share a token."""

    def __init__(self, path: Path, length: int, most: int | None = None) -> None:
        if path.suffix == ".xz":
            self.tokens = np.frombuffer(lzma.decompress(path.read_bytes()), np.uint16)
        else:
            self.tokens = np.fromfile(path, np.uint16)
        self.length, self.count = length, (len(self.tokens) - 1) // length
        if self.count < (most or 1):
            raise SystemExit(f"{path}: {self.count} rows of {length} tokens; at least {most or 1} are needed")
        self.count = most or self.count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> np.ndarray:
        return self.tokens[i * self.length : (i + 1) * self.length + 1].astype(np.int64)

    def bytes_per_token(self) -> None:
        """None: the file has no text."""


def rows_of(batch: Batch) -> torch.Tensor:
    """Tokens and the last label -> `[b, s + 1]`"""
    return torch.cat((batch.tokens, batch.labels[:, -1:]), dim=1)


# The two sides


class Side(Protocol):
    """Who trains."""

    def steps(self, count: int) -> list[float]:
        """Train some iterations -> their losses; all is done when it returns."""

    def validate(self) -> float:
        """The mean loss over the held-out rows."""


class PeerSide:
    """peers_gpt2.py, its learning rate set before each step; it is evaluated without compilation."""

    def __init__(self, kind: str, config: Config, mesh: Mesh, rows: Rows, held: Rows) -> None:
        self.peer, self.mesh, self.iteration = KINDS[kind](config, mesh), mesh, 0
        self.loaders = [BatchLoader(data, config.data, 0, mesh.dp, mesh.device) for data in (rows, held)]
        self.held = len(held)
        self.follow(config)

    def follow(self, config: Config) -> None:
        """Take the schedule of another configuration."""
        table = samples_before(config, 1)
        self.data, self.rates = config.data, step_values(pick_schedules(config, table), table)[0]

    def batches(self, loader: BatchLoader, first: int, count: int) -> list[torch.Tensor]:
        return [rows_of(loader.get(first + i)) for i in range(0, count, self.data.micro_batch_size)]

    def steps(self, count: int) -> list[float]:
        losses, size = [], self.data.global_batch_size
        for _ in range(count):
            for group in self.peer.optimizer.param_groups:
                group["lr"] = self.rates[self.iteration]
            losses.append(self.peer.step(self.batches(self.loaders[0], self.iteration * size, size)))
            self.iteration += 1
        return torch.stack(losses).tolist()

    @torch.no_grad()
    def validate(self) -> float:
        model = getattr(self.peer.model, "_orig_mod", self.peer.model)
        with self.peer.context():
            losses = [model(tokens) for tokens in self.batches(self.loaders[1], 0, self.held)]
        return torch.stack(losses).double().mean().item()


class OurSide:
    """train.py: its set_up, train_step and reports, and the project's own evaluation."""

    def __init__(self, words: list[str], mesh: Mesh, rows: Rows, held: Rows) -> None:
        parsed, config = train.settings(words, World.from_environment())
        log = RunLog(config.run.folder, config, mesh.rank, mesh.label)
        self.run = train.set_up(parsed, config, mesh, log)
        self.run.data.datasets = (rows, held, None)
        self.run.data.loaders = build_loaders(config, mesh, self.run.model, (rows, held, None), 0)
        self.run.optimizer.cast_weights()

    def steps(self, count: int) -> list[float]:
        run, reports = self.run, []
        reporter = run.observer(Reporter)
        for _ in range(count):  # as in train.train: a step's numbers are read while the next is in flight
            reports.append(train.launch_step(self.run, reporter))
            run.progress.iteration += 1
            reporter.report_previous(reports[-1])
        reporter.flush()
        return [report.read()["lm_loss"] for report in reports]

    def validate(self) -> float:
        evaluate(self.run, lambda: False)
        return read_jsonl(self.run.log.folder / "evals.jsonl")[-1]["lm_loss"]


# A seed


class Course:
    """A side, and what has been measured of it. curve: [counted seconds, iteration, validation loss]"""

    def __init__(self, make: Any, warm: int) -> None:
        begin = time.perf_counter()
        self.side: Side = make()
        half = warm // 2
        self.first = self.side.steps(warm - half)
        middle = time.perf_counter()
        self.first += self.side.steps(half)
        end = time.perf_counter()
        self.warm_up, self.step_s = end - begin, (end - middle) / half
        self.iteration, self.seconds, self.curve = warm, 0.0, []

    def go_on(self, count: int) -> float:
        """Some iterations and an evaluation, which is not counted; its loss."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        self.side.steps(count)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - begin
        self.iteration += count
        loss = self.side.validate()
        if not math.isfinite(loss):
            raise SystemExit(f"validation loss {loss} at iteration {self.iteration}")
        self.curve.append([round(self.seconds, 4), self.iteration, round(loss, 5)])
        return loss


def words_of(args: argparse.Namespace, iterations: int, micro: int) -> list[str]:
    """Flags of train.py; the schedule ends at `iterations`, the run may go on."""
    words = f"{SMALL if args.small else MODEL} {TRAINING} --seed {args.seed} --micro-batch-size {micro} "
    words += f"--global-batch-size {args.batch} --train-iters {math.ceil(LONGEST * iterations) + 1} "
    words += f"--lr-decay-iters {iterations} --lr-warmup-iters {args.lr_warmup} "
    words += f"--eval-iters {args.held // args.batch} {args.flags}"
    return shlex.split(words)


def run_seed(args: argparse.Namespace, begin: float) -> dict[str, Any]:
    """Both sides by turns: the row of the JSON. The working folder gets files of train.py."""
    world = World.from_environment()
    config = train.settings(words_of(args, 10**5, args.peer_micro), world)[1]
    device = pick_device(config.run.device, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = Mesh.build(config.parallel, world, device, observer=Traffic())
    rows = Rows(args.data, config.data.seq_length)
    held = Rows(args.valid, config.data.seq_length, args.held)
    peer = Course(lambda: PeerSide(args.peer, config, mesh, rows, held), args.warm)
    most = args.iterations or max(2 * args.lr_warmup, round(60 * args.minutes / peer.step_s))
    print(f"peer: {1e3 * peer.step_s:.1f} ms a step, {most} iterations", flush=True)
    peer.side.follow(train.settings(words_of(args, most, args.peer_micro), world)[1])
    ours = Course(lambda: OurSide(words_of(args, most, args.micro), mesh, rows, held), args.warm)
    every = max(1, most // args.evaluations)
    while peer.iteration < most:
        count = min(every, most - peer.iteration)
        losses = peer.go_on(count), ours.go_on(count)
        print("iteration {}: peer {:.4f}, ours {:.4f}".format(peer.iteration, *losses), flush=True)
    target = min(loss for *_, loss in peer.curve)
    late = begin + args.limit
    while crossing(ours.curve, target) is None and ours.iteration + every <= LONGEST * most:
        if time.perf_counter() > late:
            break
        ours.go_on(every)
    tokens = args.batch * config.data.seq_length
    found = row(args, tokens, peer, ours, target) | {"rows": len(rows), "iterations": most}
    Mesh.close()
    return found


def crossing(curve: list[list], target: float) -> tuple[float, float] | None:
    """(seconds, interpolated; seconds at the evaluation) to a loss at or below `target`; None: never."""
    for before, after in zip([curve[0], *curve], curve):
        if after[2] <= target:
            drop = before[2] - after[2]
            share = (before[2] - target) / drop if drop > 0 else 1.0
            return before[0] + share * (after[0] - before[0]), after[0]
    return None


def row(args: argparse.Namespace, tokens: int, peer: Course, ours: Course, target: float) -> dict[str, Any]:
    """What the JSON says of a seed; tokens: of an iteration."""
    theirs = next(seconds for seconds, _, loss in peer.curve if loss == target)
    reached = crossing(ours.curve, target)
    found = {"name": f"seed {args.seed}", "problems": [], "batch": args.batch, "target": target}
    found |= {"peer_s": theirs, "peer_last_loss": peer.curve[-1][2]}
    found |= {"ours_loss_at_peers_end": next(p[2] for p in ours.curve if p[1] == peer.iteration)}
    for name, side in (("peer", peer), ("ours", ours)):
        done = side.iteration - args.warm
        found |= {f"{name}_warm_up_s": round(side.warm_up, 3), f"{name}_ms": 1e3 * side.seconds / done}
        found |= {f"{name}_tokens_per_s": tokens * done / side.seconds, f"{name}_first_losses": side.first}
    if reached is None:
        found["problems"].append(f"ours did not reach {target} in {ours.seconds:.1f} s")
    else:
        warm = peer.warm_up, ours.warm_up
        found |= {"ours_s": reached[0], "ours_evaluated_s": reached[1], "share": reached[0] / theirs}
        found["share_at_evaluation"] = reached[1] / theirs
        found["share_with_warm_up"] = (reached[0] + warm[1]) / (theirs + warm[0])
    found |= {"peer_curve": peer.curve, "ours_curve": ours.curve}
    return found


# All seeds


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the seeds."""
    found = {}
    for key in ("share", "share_at_evaluation", "share_with_warm_up", "peer_ms", "ours_ms"):
        values = [case[key] for case in cases if key in case]
        if values:
            found[key] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return found


def text(result: dict[str, Any]) -> str:
    """The numbers that count, a line a seed."""
    lines = []
    for case in result["cases"]:
        lines += [f"{case['name']}: {problem}" for problem in case["problems"]]
        if "share" in case:
            line = "{name}: loss {target:.4f}: peer {peer_s:.1f} s, ours {ours_s:.1f} s: {share:.3f}; "
            line += "a step {peer_ms:.1f} and {ours_ms:.1f} ms; at the peer's end ours "
            line += "{ours_loss_at_peers_end:.4f}; with warm-up ({peer_warm_up_s:.0f} and "
            lines.append((line + "{ours_warm_up_s:.0f} s) {share_with_warm_up:.3f}").format(**case))
    for key, values in result["summary"].items():
        lines.append(f"{key}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
    return "\n".join(lines)


def joined(paths: list[Path]) -> dict[str, Any]:
    """The results of several commands as one; a later file's seed replaces an earlier one's."""
    results = [json.loads(path.read_text()) for path in paths]
    cases = {case["name"]: case for result in results for case in result["cases"]}
    return results[0] | {"cases": [cases[name] for name in sorted(cases)]}


def arguments(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, metavar="FILE", help="training tokens, uint16")
    add("--valid", type=Path, metavar="FILE", help="held-out tokens, uint16")
    add("--out", type=Path, required=True, metavar="FILE.json")
    add("--join", type=Path, nargs="+", metavar="FILE.json", help="merge results, and measure nothing")
    add("--seed", type=int, help="this one alone; default 1, 2 and 3, each in a process")
    add("--minutes", type=float, default=4.0, help="of the peer's training")
    add("--iterations", type=int, help="in place of the minutes")
    add("--limit", type=float, default=570.0, help="seconds of a seed, after which ours ends")
    add("--batch", type=int, default=32, help="rows of an iteration")
    add("--micro", type=int, help="rows of our microbatches; --batch")
    add("--peer-micro", type=int, help="rows of the peer's microbatches; --batch")
    add("--peer", choices=KINDS, default="reduce-overhead")
    add("--held", type=int, default=128, help="rows of an evaluation")
    add("--evaluations", type=int, default=60)
    add("--warm", type=int, default=20, help="iterations that belong to the warm-up")
    add("--lr-warmup", type=int, default=200, help="iterations")
    add("--flags", default="", help="more flags of train.py, for both")
    add("--small", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args(words)
    args.micro, args.peer_micro = args.micro or args.batch, args.peer_micro or args.batch
    if not args.join and not (args.data and args.valid):
        parser.error("give --data and --valid, or --join")
    if args.held % args.batch or args.lr_warmup < args.warm or args.warm < 2:
        parser.error("--held is a multiple of --batch, and 2 <= --warm <= --lr-warmup")
    return args


def one_seed(args: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """The result of a seed, measured in this process."""
    begin = time.perf_counter()
    args.data, args.valid = args.data.absolute(), args.valid.absolute()
    cuda = torch.cuda.is_available() and not args.small
    result = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "command": shlex.join(["python", "-m", "benchmarks.time_to_loss", *words]),
        "commit": commit_of(Path(__file__).parent),
        "small": args.small,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "flags": f"{SMALL if args.small else MODEL} {TRAINING} {args.flags}".strip(),
        "peer": args.peer,
    }
    with tempfile.TemporaryDirectory(prefix="time-to-loss-", ignore_cleanup_errors=True) as folder:
        with contextlib.chdir(folder):
            case = run_seed(args, begin)
    return result | {"seconds": round(time.perf_counter() - begin, 1), "cases": [case]}


def main(words: list[str]) -> int:
    """Measure a seed or three, or join; exit code 1 if ours did not reach the peer's loss."""
    args = arguments(words)
    args.out = args.out.absolute()
    if args.join:
        result = joined(args.join)
    elif args.seed is not None:
        result = one_seed(args, words)
    else:
        paths = [args.out.with_suffix(f".{seed}.json") for seed in (1, 2, 3)]
        for seed, path in enumerate(paths, 1):
            again = [*words, "--seed", str(seed), "--out", str(path)]
            subprocess.run([sys.executable, "-m", "benchmarks.time_to_loss", *again])
        result = joined([path for path in paths if path.exists()])
    result["summary"] = summary(result["cases"])
    report.write(args.out, result)
    print(text(result), flush=True)
    return int(any(case["problems"] for case in result["cases"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

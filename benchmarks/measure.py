"""Measure training: the cases of a part (cases.py), each a run of train.py or of a peer, one after another.

    python -m benchmarks.measure tp --out tp.json                        four GPUs; --gpus 2 for two
    python -m benchmarks.measure fp8 --out fp8.json --only "bf16, 1" --only "fp8 delayed, 1"
    python -m benchmarks.measure dp --out dp.json --old ../before        also train.py of another checkout
    python -m benchmarks.measure fp8-losses --out losses.json --repetitions 3       a seed a repetition
    python -m benchmarks.measure ep --list                               its cases, and run nothing

    repetition 1   case A | case B | case C     torchrun train.py FLAGS --metrics-jsonl steps.jsonl
    repetition 2   case A | case B | case C     warm-up steps | timed steps | ended before anything is saved

All numbers are those that a program writes for itself in metrics.jsonl: a step's time is between events on
the GPU of rank 0, from its batch to its update, and the next step is launched meanwhile. The median of all
repetitions counts; where steps have different numbers of tokens, their sum over the sum of their times. MFU
is Megatron's count over the dense bf16 peak, peak memory that of torch's allocator on rank 0; `used_gib` is
what nvidia-smi says of each GPU at the end, NCCL's and CUDA's share and the allocator's cache included. Of
pipelines a further step is traced: the bubble, idle over busy time of its ops, measured and planned. With
--profile more are profiled: milliseconds by class of kernels, exposed communication (tools/kernel_times.py).

All cases of a part train on the same tokens from the same weights, so that first losses must be equal: one
that differs from the case it is `like`, or that fails, is a problem, and the exit code is 1. A case that
does not fit in memory by the planner (plan/memory.py) is left out. Every case is in the JSON as soon as it
has run; report.py prints the tables again. `--small` takes tiny models on CPUs, to test all of it.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import long_tail, report
from benchmarks.cases import LOSSES, PARTS, Case, cases_of
from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import ConfigError, parse
from nanomegatron.plan.layer import Machine
from nanomegatron.plan.memory import memory_of_ranks
from nanomegatron.report.writers import read_jsonl
from preprocess import prepare_embedded
from tools import kernel_times
from tools.gpu_gate import Case as GateCase
from tools.gpu_gate import build_kernels, commit_of, judge, launcher

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 1800  # seconds for a case that is ended by this program
OUTSIDE = 5.0  # GiB of a GPU that torch's allocator does not have: CUDA's, NCCL's, gaps
PROFILED = 3  # steps


def gpus() -> list[dict[str, Any]]:
    """Name, memory and used memory, GiB, of the GPUs of this machine."""
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    if not shutil.which(asked[0]):
        return []
    rows = subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()
    values = (row.rsplit(",", 2) for row in rows)
    return [
        dict(name=name, total=float(total) / 1024, used=float(used) / 1024) for name, total, used in values
    ]


# A run of a case


def command(case: Case, checkout: Path, small: bool, *more: str) -> list[str]:
    """The words that start it, in a folder whose runs/case and steps.jsonl are its own."""
    script, *kind = case.program.split()
    ranks = ["--nproc", str(case.gpus)] if small else []
    start = [*launcher(1 if small else case.gpus), str(checkout / script), *kind, *shlex.split(case.flags)]
    return [*start, *more, *ranks, "--run-name", "case", "--metrics-jsonl", "steps.jsonl"]


def run_steps(case: Case, checkout: Path, small: bool, profile: bool = False) -> dict[str, Any]:
    """The numbers of its timed steps, and the losses of all; `problem`: why there are none."""
    steps, ours = case.warm + case.timed, case.program == "train.py"
    traced = ours and "--pp " in case.flags
    last = steps + traced  # steps behind the timed ones, since to draw them takes time
    words = ["--train-iters", str(steps + PROFILED + 3)]  # of all alike: the order of samples depends on it
    words += ["--trace-dir", "trace", "--trace-iterations", str(last)] if traced else []
    if profile and ours:
        first, last = last + 1, last + PROFILED
        words += f"--profile --profile-step-start {first} --profile-step-end {last + 1}".split()
    with tempfile.TemporaryDirectory(prefix="measure-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with running(command(case, checkout, small, *words), folder) as process:
            end = time.monotonic() + TIMEOUT
            ended = False
            while len(read_jsonl(folder / "steps.jsonl")) < last:
                if ended or time.monotonic() > end:
                    return {"problem": last_words(folder)}
                time.sleep(0.1)
                ended = process.poll() is not None
            used = [round(gpu["used"], 2) for gpu in gpus()]
        records = read_jsonl(folder / "steps.jsonl")[:steps]
        text = (folder / "runs/case/log.txt").read_text() if traced else ""
        kernels = kernel_times.table(folder / "runs/case/profile-rank0.json", PROFILED)
    timed = records[case.warm :]
    turn = {"step_ms": [round(step["step_time_ms"], 3) for step in timed]}
    turn |= {"loss": [step["lm_loss"] for step in records]} | speed(timed)
    turn |= {"peak_gib": round(max(step["peak_mem_gib"] for step in timed), 3), "used_gib": used}
    if "moe_load_imbalance" in timed[-1]:
        turn["imbalance"] = timed[-1]["moe_load_imbalance"]
    bubbles = re.findall(r"(planned|measured) \S+ ms, bubble (\S+) %", text)
    turn |= {"bubble_percent": {kind: float(x) for kind, x in bubbles}} if bubbles else {}
    return turn | ({"profile": kernels} if kernels else {})


@contextmanager
def running(words: list[str], folder: Path) -> Iterator[subprocess.Popen]:
    """A program with its output in folder/console; it and its ranks are killed at the end."""
    how = dict(cwd=folder, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True)
    with (folder / "console").open("wb") as console:
        process = subprocess.Popen(words, stdout=console, **how)
    try:
        yield process
    finally:
        for pid in [*descendants(process.pid), process.pid]:  # ranks have process groups of their own
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, and those that these have."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            yield child
            yield from descendants(child)


def last_words(folder: Path) -> str:
    """The end of what a program has printed."""
    lines = (folder / "console").read_text(errors="replace").splitlines()
    return "\n".join([line for line in lines if line.strip()][-12:]) or "no output"


def speed(steps: list[dict]) -> dict[str, float | None]:
    """Each of `report.SPEEDS` over some steps: of their median time if they have equally many tokens."""
    times = [step["step_time_ms"] for step in steps]
    tokens = [step["tokens_per_s"] * step["step_time_ms"] for step in steps]
    alike = max(tokens) - min(tokens) < 1e-6 * max(tokens)
    total = statistics.median(times) * len(times) if alike else sum(times)
    work = {key: [step[key] and step[key] * step["step_time_ms"] for step in steps] for key in report.SPEEDS}
    return {key: None if None in values else sum(values) / total for key, values in work.items()}


def run_whole(case: Case, checkout: Path, small: bool, *more: str) -> dict[str, Any]:
    """The losses of a run to its end; `problem`: why there are none."""
    with tempfile.TemporaryDirectory(prefix="measure-", ignore_cleanup_errors=True) as name:
        folder, begin = Path(name), time.monotonic()
        with running(command(case, checkout, small, *more), folder) as process:
            code = process.wait()
        steps, evals = (read_jsonl(folder / at) for at in ("steps.jsonl", "runs/case/evals.jsonl"))
        if code or not steps or not evals:
            return {"problem": f"exit code {code}: {last_words(folder)}"}
    found = report.losses_of(steps) | {"seconds": round(time.monotonic() - begin, 1)}
    found |= {key: evals[-1].get(key) for key in ("lm_loss", "bits_per_byte")}
    return found | {"valid_loss": found.pop("lm_loss")} | speed(steps[len(steps) // 10 :])


# All cases


class Session:
    """The cases that are measured in one go, and the result as it grows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin, self.cases = args, time.monotonic(), chosen(args)
        on_cpus = all("--device cpu" in case.flags for case in self.cases)
        self.devices = [] if on_cpus else gpus()
        most = max(case.gpus for case in self.cases)
        if not on_cpus and len(self.devices) < most:
            raise SystemExit(f"{most} GPUs are needed, {len(self.devices)} are here; --gpus N, or --small")
        self.checkouts = {"new": ROOT} | ({"old": args.old.resolve()} if args.old else {})
        kernels = bool(self.devices) and build_kernels({"old": ROOT, **self.checkouts})
        self.machine = Machine(gpu=bool(self.devices), kernels=kernels)
        self.turns = {case.name: {side: [] for side in self.checkouts} for case in self.cases}
        self.result = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "command": shlex.join(["python", "-m", "benchmarks.measure", *args.words]),
            "commit": {side: commit_of(at) for side, at in self.checkouts.items()},
            "part": args.part,
            "small": args.small,
            "torch": version("torch"),
            "device": self.devices[0]["name"] if self.devices else "cpu",
            "kernels": kernels,
        }

    def run(self, data: list[str], documents: str) -> None:
        """Every case once a repetition; of two checkouts every other time the old one first."""
        for repetition in range(self.args.repetitions):
            for case in self.cases:
                given = case._replace(flags=case.flags.replace("{documents}", documents))
                sides = [side for side in self.checkouts if side == "new" or case.program == "train.py"]
                for side in sides[:: -1 if repetition % 2 else 1]:
                    turn = self.turn(given, self.checkouts[side], repetition, data)
                    self.turns[case.name][side].append(turn)
                    self.write()
                    since = f"{self.result['seconds']:6.0f} s"
                    print(f"{since}  {side} {case.name}: {in_short(turn)}", flush=True)

    def turn(self, case: Case, checkout: Path, repetition: int, data: list[str]) -> dict[str, Any]:
        """One run of it."""
        try:
            predicted = self.predicted(case, data)
        except ConfigError as error:
            return {"problem": str(error)}
        if self.devices and predicted > self.devices[0]["total"] - OUTSIDE:
            return {"left_out": f"does not fit: {predicted:.1f} GiB by the plan"}
        if self.args.part in LOSSES:
            seed = self.args.first_seed + repetition
            turn = run_whole(case, checkout, self.args.small, "--seed", str(seed), *data) | {"seed": seed}
        else:
            turn = run_steps(case, checkout, self.args.small, self.args.profile)
        return turn | ({"predicted_gib": round(predicted, 6)} if predicted else {})

    def predicted(self, case: Case, data: list[str]) -> float:
        """Peak memory by the planner, GiB, of the rank that needs most; 0 of peers, which it does not know.

        Raises ConfigError.
        """
        steps = [] if self.args.part in LOSSES else ["--train-iters", "9"]
        parsed = parse([*shlex.split(case.flags), *data, *steps])
        device = "cuda" if self.devices else "cpu"
        if errors := [*parsed.errors, *validate(parsed.config, case.gpus, device)]:
            raise ConfigError(errors)
        config = resolve(parsed.config, case.gpus)
        if case.program != "train.py" or not config.data.vocab_size:
            return 0.0
        ranks = memory_of_ranks(config, config.data.vocab_size, self.machine)
        return max(sum(parts.values()) for parts in ranks) / 2**30

    def write(self) -> None:
        """The JSON so far, a line a case."""
        summary = report.summary if self.args.part not in LOSSES else report.losses_summary
        rows = summary(self.cases, {name: turns["new"] for name, turns in self.turns.items()})
        for case, row in zip(self.cases, rows):
            old = self.turns[case.name].get("old", [])
            if old and len(old) == len(self.turns[case.name]["new"]) and self.args.part not in LOSSES:
                row["against_old"] = against(case, self.turns[case.name])
        self.result |= {"seconds": round(time.monotonic() - self.begin, 1), "cases": rows}
        report.write(self.args.out, self.result)


def against(case: Case, turns: dict[str, list[dict]]) -> dict:
    """The row of the GPU gate (tools/gpu_gate.py) on both checkouts."""
    sides = {
        side: [
            turn if "problem" in turn else turn | {"loss": turn["loss"][-1], "left_gib": 0.0} for turn in some
        ]
        for side, some in turns.items()
    }
    return judge(GateCase(case.name, case.flags, case.warm, case.timed), sides, 1.5)


def in_short(turn: dict[str, Any]) -> str:
    """A run, in a line."""
    if "step_ms" in turn:
        return f"{statistics.median(turn['step_ms']):.1f} ms, first loss {float(turn['loss'][0]):.4f}"
    if "valid_loss" in turn:
        return f"validation loss {float(turn['valid_loss']):.4f}, {turn['seconds']} s"
    return turn.get("left_out") or f"FAILED: {turn['problem'].splitlines()[-1][:200]}"


def chosen(args: argparse.Namespace) -> list[Case]:
    """The cases that were asked for. Raises SystemExit for unknown names."""
    known = {case.name: case for case in cases_of(args.part, args.gpus, args.small)}
    if unknown := [name for name in args.only if name not in known]:
        raise SystemExit(f"--only {', '.join(unknown)}: there are {'; '.join(known)}")
    names = args.only or [name for name, case in known.items() if case.usual]
    steps = {} if args.steps is None else {"timed": args.steps}
    return [known[n]._replace(flags=f"{known[n].flags} {args.flags}".strip(), **steps) for n in names]


def text_flags(args: argparse.Namespace) -> list[str]:
    """The text of *-losses: --data, or the sources of Python's standard library."""
    if args.part not in LOSSES:
        return []
    if args.data:
        paths, tokenizer = args.data, []
    else:
        text = prepare_embedded(ROOT / "data")
        paths = [text.train_prefix, text.valid_prefix]
        tokenizer = ["--tokenizer-type", text.tokenizer_type, "--tokenizer-model", str(text.tokenizer_model)]
    train, valid = (str(Path(path).resolve()) for path in paths)
    return ["--train-data-path", train, "--valid-data-path", valid, *tokenizer]


def arguments(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, help="JSON file, written after every run")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="may be repeated")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--gpus", type=int, help="of the parts with several; 4")
    parser.add_argument("--repetitions", type=int, default=1, help="of all cases, in turn")
    parser.add_argument("--first-seed", type=int, default=1, help="of *-losses; one more each repetition")
    parser.add_argument("--steps", type=int, help="timed steps of each run")
    parser.add_argument("--profile", action="store_true", help="of train.py: kernels of a further step")
    parser.add_argument("--flags", default="", help="of train.py, for every case")
    parser.add_argument("--data", nargs=2, metavar=("TRAIN", "VALID"), help="prefixes of text for *-losses")
    parser.add_argument("--old", type=Path, help="another checkout, to run beside this one")
    parser.add_argument("--small", action="store_true", help="tiny models on CPUs, two ranks")
    args = parser.parse_args(words)
    args.words, args.gpus = words, args.gpus or (2 if args.small else 4)
    if not args.list and not args.out:
        parser.error("give --out FILE.json, or --list")
    return args


def main(words: list[str]) -> int:
    """Measure one part; exit code 1 where a case failed or trained something else."""
    args = arguments(words)
    if args.list:
        for case in cases_of(args.part, args.gpus, args.small):
            print(f"{case.name}{'' if case.usual else ' (only if named)'}: {case.program} {case.flags}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an exception: no run outlives this program
    session = Session(args)
    session.write()  # an error now, if there will be one
    with tempfile.TemporaryDirectory(prefix="measure-data-") as folder:
        if args.part == "dynamic":
            count, longest = (160, 128) if args.small else (4096, long_tail.LONGEST)
            long_tail.write(Path(folder), long_tail.draw_lengths(count, longest))
        session.run(text_flags(args), f"{folder}/documents")
    print(report.tables(session.result))
    return int(any(row["problems"] for row in session.result["cases"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

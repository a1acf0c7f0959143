"""How kernels and layers are measured: cases are data; one timing loop, one file of results.

A case is one thing to compute and the forms that compute it: ours, torch's, torch.compile's, a library's. All
forms of a case are built and warmed up, then interleaved, A B C A B C. A sample is as many calls as take a
given time (kernels 1 ms, layers 5 ms), between two events on the stream; the median of the samples counts.

    host  [queue n calls       ]                  launches are not in the times, as in training, where the
    GPU   [sleep               ][meet][n calls]   host is ahead; a form that waits for the GPU shows that
                                      ^-----^     meet: an all-reduce of the ranks; the slowest rank counts

GB/s and TFLOP/s are of what the case must move or compute at least, so a form that moves more shows; shares
are of the bandwidth of a 1 GiB copy and of the dense bf16 peak, `share_of_size` is of a copy of as many bytes
as the case moves: few bytes are copied at a lower rate. `error` is of the first call's results: the largest
difference to what is expected, relative to the largest expected value. A form that fails is left out; the
JSON, written after each case, says why. `factor`: the time of a form over the first form's.
"""

import argparse
import datetime
import functools
import gc
import itertools
import json
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from nanomegatron.comm import all_gather, all_reduce_, any_rank
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.mesh import Mesh, World, pick_device
from nanomegatron.plan.gpus import device_peak
from nanomegatron.report.timers import Clock
from nanomegatron.report.traffic import Traffic
from tools.gpu_gate import commit_of

WARM_UP = 2  # calls of a form before it is timed
CLOCK, MAX_SLEEP = 2e9, 50e-3  # of the GPU, in Hz; seconds that it sleeps at most


@dataclass
class Run:
    """One form of a case, built."""

    call: Callable[[], object]
    prepare: Callable[[], object] | None = None  # before every call, untimed; a sample is then one call
    finish: Callable[..., tuple] | None = None  # turns results into what is expected
    part: Callable[[torch.Tensor], torch.Tensor] | None = None  # of what is expected: this rank's
    alone: bool = False  # by each rank for itself: the mean of their times counts, and there is no error
    facts: dict = field(default_factory=dict)  # what else the JSON says

    def once(self) -> object:
        """Prepared, and called."""
        if self.prepare:
            self.prepare()
        return self.call()


class Case(NamedTuple):
    """What is computed, and what builds each of the forms that compute it."""

    name: str
    forms: dict[str, Callable[[], Run | Callable[[], object]]]
    bytes: float = 0.0
    flops: float = 0.0
    expected: Callable[[], tuple[torch.Tensor, ...]] | None = None


class Session:
    """Everything that is measured by one command."""

    def __init__(self, args: argparse.Namespace, world: World, parallel: ParallelConfig) -> None:
        self.args, self.world = args, world
        self.device = pick_device("auto", world)
        self.cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        if self.cuda:
            torch.cuda.set_device(self.device)  # before there are communicators
        self.mesh = Mesh.build(parallel, world, self.device, observer=Traffic())
        self.flag = torch.zeros(1, device=self.device)
        name = torch.cuda.get_device_name(self.device) if self.cuda else "cpu"
        self.peak = device_peak(name, "bfloat16")
        now, commit = datetime.datetime.now(), commit_of(Path(__file__).parent)
        self.result = dict(date=now.isoformat(timespec="seconds"), command=args.command, commit=commit)
        self.result |= dict(device=name, ranks=world.size, small=args.small, torch=torch.__version__)
        if self.cuda:
            self.result |= dict(nccl=torch.cuda.nccl.version(), cudnn=torch.backends.cudnn.version())
        self.result |= dict(peak_flops=self.peak, cases={})
        self.copies: dict[int, float] = {}

    def run(self, cases: Iterable[Case]) -> None:
        """Those whose names begin as the command line says. Raises SystemExit for a name of none."""
        cases, wanted = list(cases), tuple(self.args.names or [""])
        known = [case.name for case in cases]
        if unknown := [word for word in wanted if not any(name.startswith(word) for name in known)]:
            raise SystemExit(f"no case begins with {', '.join(unknown)}; there are {', '.join(known)}")
        cases = [case for case in cases if case.name.startswith(wanted)]
        while cases:
            case = cases.pop(0)
            self.result["cases"][case.name] = found = self.measure(case)
            if not self.world.rank:
                print(*(line(case.name, *row) for row in found["forms"].items()), sep="\n", flush=True)
                if self.args.out:
                    self.args.out.write_text(json.dumps(self.result, indent=1) + "\n")
            del case  # with all of its tensors
            self.free()

    def measure(self, case: Case) -> dict:
        """Build, compare, warm up and time all forms of a case: what the JSON says of it."""
        rows, runs = {}, {}
        expected = case.expected() if case.expected else None
        for name, build in case.forms.items():
            if self.args.form and name not in self.args.form:
                continue
            run, problem = self.attempt(build)
            if not problem:
                run = run if isinstance(run, Run) else Run(run)
                row, problem = self.attempt(functools.partial(self.start, run, expected))
            if problem:
                rows[name] = {"failed": problem}
                continue
            if "error" in row:
                row["error"] = self.over_ranks([row["error"]]).max().item()  # NaN if there is one
            rows[name], runs[name] = row, run
        expected = None
        for name, (ms, host) in self.times(runs).items():
            rows[name] |= self.rates(case, ms) | {"host_ms": 1e3 * host}
            rows[name]["factor"] = rows[name]["ms"] / rows[next(iter(runs))]["ms"]
        return {"forms": rows}

    def attempt(self, action: Callable[[], object]) -> tuple[object, str]:
        """Its result when all is done, and on every rank what went wrong on one; "" if nothing did.

        Where one rank fails while others wait for it in a collective, the timeout of that ends the run.
        """
        result, problem = None, ""
        try:
            result = action()
            self.synchronize()
        except Exception as failure:  # whatever it is: the others are still to be measured
            problem = f"{type(failure).__name__}: {failure}"[:300]
            print(f"rank {self.world.rank}: {traceback.format_exc()[-2000:]}", file=sys.stderr)
        if any_rank(bool(problem), self.mesh.world, self.device):
            result, problem = None, problem or "on another rank"
            self.free()
        return result, problem

    def start(self, run: Run, expected: tuple | None) -> dict:
        """What the first two calls of a form say: its error, peak memory, and bytes sent by kind."""
        row, results = dict(run.facts), run.once()
        if expected is not None and not run.alone:
            row["error"] = error(run, results, expected)
        results = None
        self.mesh.observer.counts.clear()
        before = torch.cuda.memory_allocated() if self.cuda else 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        run.once()
        if self.cuda:
            row["peak_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
        sent = Counter()
        for (_, kind, unit), number in self.mesh.observer.counts.items():
            sent[kind] += number * (unit == "bytes")
        return row | (dict(sent_bytes=dict(sent), sent_mib=sent.total() / 2**20) if sent else {})

    def times(self, runs: dict[str, Run]) -> dict[str, tuple[list[float], float]]:
        """Milliseconds a call of each sample, of the slowest rank; seconds the host needs to queue a call."""
        plans = {name: self.plan(run) for name, run in runs.items()}
        found = {name: [] for name in runs}
        for _ in range(self.args.samples):
            for name, (count, host) in plans.items():
                found[name].append(self.sample(runs[name], count, 2 * host * count))
        for name, samples in found.items():
            ms = self.over_ranks(samples)
            found[name] = (ms.mean(0) if runs[name].alone else ms.amax(0)).tolist(), plans[name][1]
        return found

    def plan(self, run: Run) -> tuple[int, float]:
        """Warm up -> calls of a sample, and the host's seconds for one; the same on all ranks."""
        for _ in range(WARM_UP):
            run.once()
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(3):
            run.once()
        host = (time.perf_counter() - begin) / 3
        ms = self.sample(run, 1 if run.prepare else 3, 6 * host)
        count = 1 if run.prepare else max(1, round(self.args.sample_ms / max(ms, 1e-3)))
        count, host = self.over_ranks([count, host]).amax(0).tolist()
        return int(count), host

    def sample(self, run: Run, count: int, sleep: float) -> float:
        """Milliseconds a call, of `count` in a row, queued while the GPU sleeps for some seconds."""
        if run.prepare:
            run.prepare()
        if self.cuda:
            torch.cuda._sleep(int(CLOCK * min(sleep, MAX_SLEEP)))
        all_reduce_(self.flag, self.mesh.world)
        clock = Clock(self.device)
        for _ in range(count):
            run.call()
        return clock.stop().milliseconds() / count

    def rates(self, case: Case, ms: list[float]) -> dict:
        """The median, and what it means in GB/s or TFLOP/s, and of the peak where that is known."""
        row = dict(ms=statistics.median(ms), min_ms=min(ms), max_ms=max(ms))
        if case.bytes:
            row["gb_per_s"] = case.bytes / row["ms"] / 1e6
            row |= {"share": 1e9 * row["gb_per_s"] / self.bandwidth} if self.cuda else {}
            row |= {"share_of_size": self.copy_ms(int(case.bytes)) / row["ms"]} if self.cuda else {}
        if case.flops:
            row["tflops"] = case.flops / row["ms"] / 1e9
            row |= {"share": 1e12 * row["tflops"] / self.peak} if self.peak else {}
        return row

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes a second that a copy of 1 GiB reads and writes."""
        x = torch.empty(2**30, dtype=torch.uint8, device=self.device)
        y = torch.empty_like(x)
        ms, _ = self.times({"copy": Run(lambda: y.copy_(x))})["copy"]
        self.result["copy_bytes_per_s"] = 2 * x.numel() / statistics.median(ms) * 1e3
        return self.result["copy_bytes_per_s"]

    def copy_ms(self, moved: int) -> float:
        """Milliseconds of a copy whose reads and writes are `moved` bytes, other ones in every call."""
        half = max(1, moved // 2)
        if half > 2**30:
            return 1e3 * moved / self.bandwidth
        if half not in self.copies:
            x = torch.empty(2, max(2, 2**30 // half), half, dtype=torch.uint8, device=self.device)
            turn = itertools.cycle(range(x.shape[1]))

            def copy() -> None:
                i = next(turn)
                x[0, i].copy_(x[1, i])

            ms, _ = self.times({"copy": Run(copy)})["copy"]
            self.copies[half] = statistics.median(ms)
        return self.copies[half]

    def over_ranks(self, numbers: list[float]) -> torch.Tensor:
        """Every rank's, `[ranks, n]` fp64."""
        mine = torch.tensor([numbers], dtype=torch.float64, device=self.device)
        return all_gather(mine, self.mesh.world).cpu()

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Return the memory of what is no longer referred to; compiled code may refer to it."""
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def error(run: Run, results: object, expected: tuple[torch.Tensor, ...]) -> float:
    """The largest of all results; NaN if there is one. Raises ValueError for other shapes or numbers."""
    found, errors = results if isinstance(results, tuple) else (results,), []
    for x, whole in zip(run.finish(*found) if run.finish else found, expected, strict=True):
        y = run.part(whole) if run.part else whole
        if x.shape != y.shape:
            raise ValueError(f"{list(x.shape)} instead of {list(y.shape)}")
        x, y = (t.detach().float().double() if t.dtype.itemsize == 1 else t.detach().double() for t in (x, y))
        errors.append((x - y).abs().max() / y.abs().max())
    return torch.stack(errors).max().item()


def line(name: str, form: str, row: dict) -> str:
    """A form's numbers, or why it failed."""
    numbers = [f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float)]
    return f"{name}, {form}: {', '.join(numbers) or row['failed'][:120]}"


def arguments(doc: str, argv: list[str], parts: Iterable[str]) -> argparse.Namespace:
    """The command line of layers.py."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    add = parser.add_argument
    add("part", choices=parts)
    add("names", nargs="*", metavar="NAME", help="cases whose names begin so; none: all")
    add("--out", type=Path, metavar="FILE.json")
    add("--flags", default="", help="moe, experts, transformers: of train.py")
    add("--lengths", type=int, nargs="*", default=[32, 64, 128], help="cp: rows in thousands of tokens")
    add("--small", action="store_true", help="tiny shapes and few samples, on CPUs too")
    add("--form", action="append", default=[], help="this form only; may be repeated")
    add("--samples", type=int, help="of each form; 15, --small 2")
    args = parser.parse_intermixed_args(argv)
    args.samples = args.samples or (2 if args.small else 15)
    args.sample_ms = 0.1 if args.small else 1.0 if args.part == "kernels" else 5.0
    args.out, args.command = args.out and args.out.absolute(), " ".join(argv)
    return args

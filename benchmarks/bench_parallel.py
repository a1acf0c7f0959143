"""Parallel training side by side with PyTorch's own: Llama-3-8B's shape, sequences of 8192, bf16.

    torchrun --nproc-per-node 4 benchmarks/bench_parallel.py --part tp --out tp.json
    torchrun --nproc-per-node 4 benchmarks/bench_parallel.py --part dp --out dp.json [--profile fsdp]
    python benchmarks/bench_parallel.py --part one --out one.json [--profile kernels]
    python benchmarks/bench_parallel.py --part fp8 --out fp8.json [--only bf16 --only "fp8 delayed"]
    torchrun ... --part tp --only tp --only "tp fp8"; --part dp --only "dp fp8" --only "fsdp torchao"

contenders.py says who is measured and which of them are in memory at once, a phase. Within a phase they take
a step in turn, A B C A B C, after warm-up rounds. Ours is built as train.py builds it, the peers are in
peers.py; all update with AdamW, clip the global norm and get the same random tokens.

A step's time is between two events on the GPU, of the slowest rank; the host never waits between steps, so
what one step leaves under way counts in the next, as in training. MFU is Megatron's count (causal attention
at half, vocabulary not padded) over the device's dense bf16 peak. Peak memory is what a contender holds plus
what its step adds, by torch's allocator: symmetric memory and NCCL's own are not in it.

A contender that cannot be built, or whose first step fails, is left out and its traceback is in the JSON,
which is written anew after every phase; so are torchao's where it is not installed. `--small` runs all of it
in seconds, on CPUs too.
"""

import argparse
import dataclasses
import datetime
import gc
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.contenders import COMMON, Contender, Phase, contenders, phases  # noqa: E402
from benchmarks.kernel_times import profiled  # noqa: E402
from nanomegatron.comm import all_reduce_, barrier  # noqa: E402
from nanomegatron.config.settings import ParallelConfig  # noqa: E402
from nanomegatron.mesh import Mesh, World, pick_device  # noqa: E402
from nanomegatron.ops.kernels import kernels_unavailable  # noqa: E402
from nanomegatron.plan.gpus import device_peak  # noqa: E402
from nanomegatron.plan.layer import Machine  # noqa: E402
from nanomegatron.plan.memory import memory  # noqa: E402
from nanomegatron.report.timers import Clock  # noqa: E402

POOL = 8  # microbatches of random tokens that are taken in turn


@dataclass
class Lane:
    """A contender that has been built."""

    contender: Contender
    runner: object = None
    held: int = 0  # bytes that it keeps between steps
    peak: int = 0
    steps: int = 0
    clocks: list[Clock] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)


class FailedSomewhere(Exception):
    """Something did not work on one of the ranks; the text is this rank's traceback."""


class Sitting:
    """Everything that is measured in one go on one machine."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        self.args, self.device, self.begin = args, pick_device("auto", world), time.monotonic()
        self.cuda = self.device.type == "cuda"
        if self.cuda:
            torch.cuda.set_device(self.device)
        self.mesh = Mesh.build(ParallelConfig(distributed_timeout_minutes=4), world, self.device)
        self.known = contenders(args.part, world, self.device, args.small)
        if unknown := {*args.only, *args.profile} - self.known.keys():
            raise SystemExit(f"no contender {', '.join(sorted(unknown))}; there are {', '.join(self.known)}")
        self.pools: dict[int, list[torch.Tensor]] = {}
        name = torch.cuda.get_device_name(self.device) if self.cuda else "cpu"
        self.peak = device_peak(name, "bfloat16")
        self.result = {
            "date": datetime.datetime.now().isoformat(timespec="seconds"),
            "part": args.part,
            "small": args.small,
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if self.cuda else None,
            "cudnn": torch.backends.cudnn.version() if self.cuda else None,
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or [name],
            "ranks": world.size,
            "peak_flops": self.peak,
            "flags": COMMON,
            "contenders": {},
            "phases": [],
        }

    @property
    def planned_on(self) -> Machine:
        """What the planner has to know of this machine."""
        return Machine(gpu=self.cuda, kernels=not kernels_unavailable(self.device))

    def run(self, phase: Phase) -> None:
        """Build, warm up, time, profile and free the contenders of a phase."""
        since, before = time.monotonic(), self.allocated()
        most, note = max(phase.microbatches), {"names": phase.names}
        lanes = [lane for name in phase.names if (lane := self.start(self.known[name], most))]
        for count in phase.microbatches:
            for timed, rounds in ((False, phase.warm), (True, phase.timed)):
                self.settle()
                begin = time.perf_counter()
                for _ in range(rounds):
                    for lane in lanes:
                        self.step(lane, count)
                machine = self.machine() if timed else None
                self.settle()
                what = f"{count} microbatches, {'timed' if timed else 'warm'}"
                note[f"{what}, s"] = time.perf_counter() - begin
                if machine:
                    note[f"{what}, clocks"] = machine.communicate()[0].splitlines()
                medians = {lane.contender.name: self.record(lane, count, timed) for lane in lanes}
                if timed:
                    note[f"{count} microbatches, median ms"] = medians
        for lane in lanes:
            if lane.contender.name in self.args.profile:
                count = phase.microbatches[0]
                found = profiled(lambda lane=lane, n=count: self.step(lane, n), self.mesh.rank)
                if found:
                    self.entry(lane.contender)["profile"] = {"microbatches": count, **found}
        lanes = lane = None
        self.free()
        note |= {"s": time.monotonic() - since, "left_in_memory_gib": gib(self.allocated() - before)}
        self.result["phases"].append(note)

    def start(self, contender: Contender, microbatches: int) -> Lane | None:
        """Build a contender in the first way whose first step works on every rank."""
        entry = self.entry(contender)
        for how, build in contender.builds.items():
            torch.manual_seed(1234)
            lane, before = Lane(contender), self.allocated()
            try:
                self.together(lambda lane=lane, build=build: setattr(lane, "runner", build()))
                lane.held = self.allocated() - before
                self.together(lambda lane=lane: self.step(lane, microbatches))
            except FailedSomewhere as failure:
                entry.setdefault("errors", {})[how] = str(failure)
            else:
                entry["built"] = how
                lane.clocks, lane.losses = [], []
                return lane
            lane = None
            self.free()
        return None

    def together(self, action: Callable[[], None]) -> None:
        """Do it on every rank, to its end; raises FailedSomewhere on all where it fails on one.

        Where one rank fails while others wait for it in a collective, the timeout of that ends the run.
        """
        problem = ""
        try:
            action()
            if self.cuda:
                torch.cuda.synchronize()
        except Exception:  # whatever it is: the others are still to be measured
            problem = traceback.format_exc()
            print(f"rank {self.mesh.rank}: {problem[-3000:]}", file=sys.stderr)
        failed = torch.tensor(float(bool(problem)), device=self.device)
        if all_reduce_(failed, self.mesh.world, "max").item():
            raise FailedSomewhere(problem or "on another rank")

    def entry(self, contender: Contender) -> dict:
        """What the JSON says of a contender."""
        config = contender.config
        told = dict(
            flags=contender.flags,
            model=dataclasses.asdict(config.model),
            parallel=dataclasses.asdict(config.parallel),
            turns=[],
        )
        if "ours" in contender.builds:
            parts = memory(config, config.data.vocab_size, self.planned_on)
            told["predicted_gib"] = {"sum": gib(sum(parts.values())), **{k: gib(v) for k, v in parts.items()}}
        return self.result["contenders"].setdefault(contender.name, told)

    def step(self, lane: Lane, count: int) -> None:
        """One step of `count` microbatches; the host waits for nothing."""
        pool = self.tokens(lane.contender)
        batches = [pool[(lane.steps * count + i) % POOL] for i in range(count)]
        before = self.allocated()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        clock = Clock(self.device)
        lane.losses.append(lane.runner.step(batches))
        lane.clocks.append(clock.stop())
        lane.steps += 1
        if self.cuda:
            lane.peak = max(lane.peak, lane.held + torch.cuda.max_memory_allocated() - before)
        lane.held += self.allocated() - before

    def tokens(self, contender: Contender) -> list[torch.Tensor]:
        """Random microbatches for a replica, the same whoever it belongs to."""
        if contender.replica not in self.pools:
            data = contender.config.data
            generator = torch.Generator(self.device).manual_seed(1000 + contender.replica)
            shape = (POOL, data.micro_batch_size, data.seq_length + 1)
            tokens = torch.randint(data.vocab_size, shape, generator=generator, device=self.device)
            self.pools[contender.replica] = list(tokens)
        return self.pools[contender.replica]

    def record(self, lane: Lane, count: int, timed: bool) -> float:
        """Put the steps since the last record into the JSON; gives their median, in milliseconds.

        Communicates their times over all ranks.
        """
        ms = torch.tensor([clock.milliseconds() for clock in lane.clocks], device=self.device)
        peak = lane.peak + getattr(lane.runner, "shared_bytes", 0)
        most = torch.tensor([float(peak)], dtype=torch.float64, device=self.device)
        turn = {"microbatches": count, "timed": timed}
        turn["step_ms"] = all_reduce_(ms, self.mesh.world, "max").tolist()
        turn["loss"] = torch.stack(lane.losses).tolist()
        turn["peak_gib"] = gib(all_reduce_(most, self.mesh.world, "max").item())
        self.entry(lane.contender)["turns"].append(turn)
        lane.clocks, lane.losses, lane.peak = [], [], 0
        return statistics.median(turn["step_ms"])

    def machine(self) -> subprocess.Popen | None:
        """Ask for clocks, temperatures and power: after the last launch, while the last steps are at work."""
        asked = "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw,memory.used"
        if not self.cuda or self.mesh.rank:
            return None
        return subprocess.Popen(
            ["nvidia-smi", asked, "--format=csv,noheader"], stdout=subprocess.PIPE, text=True
        )

    def allocated(self) -> int:
        """Bytes that torch's tensors take on this GPU now."""
        return torch.cuda.memory_allocated() if self.cuda else 0

    def settle(self) -> None:
        """Let everything end on all ranks."""
        if self.cuda:
            torch.cuda.synchronize()
        barrier(self.mesh.world)

    def free(self) -> None:
        """Give back the memory of what is not referred to any more; compiled code may refer to it."""
        self.settle()
        torch._dynamo.reset()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def in_time(self) -> bool:
        """Whether rank 0 has time for another phase."""
        late = torch.tensor(time.monotonic() - self.begin > 60 * self.args.minutes, device=self.device)
        return not all_reduce_(late.float(), self.mesh.world, "max").item()

    def summary(self) -> None:
        """Write the JSON, with the medians of all timed steps of each contender."""
        self.result["summary"] = rows = {}
        for name, entry in self.result["contenders"].items():
            for count in sorted({turn["microbatches"] for turn in entry["turns"]}):
                turns = [t for t in entry["turns"] if t["timed"] and t["microbatches"] == count]
                ms = [step for turn in turns for step in turn["step_ms"]]
                median = statistics.median(ms)
                row = dict(median_ms=median, min_ms=min(ms), max_ms=max(ms), steps=len(ms))
                row["turns_ms"] = [statistics.median(turn["step_ms"]) for turn in turns]
                row |= self.known[name].numbers(count, median, self.peak)
                row["peak_gib"] = max(turn["peak_gib"] for turn in turns)
                row["loss"] = turns[-1]["loss"][-1]
                rows[f"{name}, {count}"] = row
        self.result["seconds"] = round(time.monotonic() - self.begin, 1)
        if self.mesh.rank == 0:
            Path(self.args.out).write_text(json.dumps(self.result, indent=1) + "\n")


def gib(count: float) -> float:
    """Bytes in GiB."""
    return round(count / 2**30, 3)


def report(result: dict) -> None:
    """Print what was measured, the profile last but for the table."""
    for name, entry in result["contenders"].items():
        if profile := entry.get("profile"):
            print(f"\n{name}, {profile['microbatches']}: milliseconds of a step {profile['ms']}")
            for kernel, ms in list(profile["longest_ms"].items())[:12]:
                print(f"{ms:10.3f}  {kernel}")
        for how, text in entry.get("errors", {}).items():
            lines = [line for line in text.splitlines() if line[:1].strip()]  # not the indented ones
            print(f"\n{name} failed ({how}): {' '.join(lines[1:])[:400] or text}")
    rows = result["summary"]
    one = next((row["mfu"] for name, row in rows.items() if name.startswith("one gpu")), None)
    print(f"\n{result['date']}  torch {result['torch']}  {result['ranks']} x {result['devices'][0]}")
    head = "median ms    min    max  steps   tok/s/GPU   MFU %  of one gpu  peak GiB  predicted   loss"
    print(f"{'contender, microbatches':<28} {head}")
    for name, row in rows.items():
        entry = result["contenders"][name.rpartition(",")[0]]
        share = f"{row['mfu'] / one:10.3f}" if one else f"{'-':>10}"
        percent = f"{100 * row['mfu']:7.2f}" if row["mfu"] else f"{'-':>7}"
        times = f"{row['median_ms']:9.1f} {row['min_ms']:6.0f} {row['max_ms']:6.0f} {row['steps']:6d}"
        predicted = entry.get("predicted_gib", {}).get("sum")
        print(
            f"{name:<28} {times} {row['tokens_per_s_per_gpu']:11.0f} {percent}  {share}"
            f" {row['peak_gib']:9.1f} {'-' if predicted is None else predicted:>10}  {row['loss']:.3f}"
        )
    for name, row in rows.items():
        count = name.rpartition(", ")[2]
        alike = [n for n in rows if n.endswith(f", {count}") and not n.startswith("one gpu") and n != name]
        if alike and not name.startswith("one gpu"):
            ratios = (f"{n.rpartition(',')[0]} {row['median_ms'] / rows[n]['median_ms']:.3f}" for n in alike)
            print(f"times as fast as {name}: {'  '.join(ratios)}")
    for phase in result["phases"]:
        for what, medians in phase.items():
            if what.endswith("median ms") and len(medians) > 1:
                first, base = next(iter(medians.items()))
                ratios = "  ".join(f"{name} {base / ms:.3f}" for name, ms in list(medians.items())[1:])
                print(f"in turn, {what.partition(',')[0]}, times as fast as {first}: {ratios}")
    print(f"{result['seconds']} s in all, written to JSON")


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("tp", "dp", "one", "fp8"), required=True)
    parser.add_argument("--out", required=True, help="JSON file")
    parser.add_argument("--small", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--only", action="append", default=[], help="run this; may be repeated")
    parser.add_argument("--profile", action="append", default=[], help="list the kernels of this one too")
    parser.add_argument("--minutes", type=float, default=7.0, help="no phase is begun later than this")
    return parser.parse_args(argv)


def main(argv: list[str], world: World | None = None) -> None:
    """Measure one part; every rank calls this."""
    args = arguments(argv)
    sitting = Sitting(args, world or World.from_environment())
    for phase in phases(args.part, args.small, args.only):
        if sitting.in_time():
            sitting.run(phase)
            sitting.summary()
    if sitting.mesh.rank == 0:
        report(sitting.result)
    Mesh.close()


if __name__ == "__main__":
    main(sys.argv[1:])

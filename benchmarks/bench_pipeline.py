"""Pipeline parallelism side by side with torch.distributed.pipelining: Llama-3-8B, sequences of 8192, bf16.

    torchrun --nproc-per-node 4 benchmarks/bench_pipeline.py

contenders_pipeline.py says who is measured; `one gpu` is our model with eight layers on every GPU by itself,
which is what there is to reach.

One contender is in memory at a time: built, warmed up, timed at 8 and at 16 microbatches, recorded for a step
of each, freed. The most important come first, and best and rival twice in turn. A step is forward, backward,
clipping and AdamW, timed as in bench_parallel.py, to which this adds what a pipeline has: the bubble, idle
over busy time, recorded, planned (every op taking the median time of its kind and stage) and by the formula
for equal ops; that of the busiest rank, for which all others wait, alone; memory of every rank, beside how
many microbatches of its layers the schedule keeps until their backward. `--trace-dir` draws a step of each.

All contenders begin with the same weights and tokens: first losses that differ end the run with an error,
behind the tables. A contender that cannot be built, or whose first step fails, is left out and its traceback
is in the JSON, which is written anew after every one; where some ranks fail and others wait for them, the
timeout of the messages ends the run. `--small` runs all of it in seconds, on CPUs too.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import bench_parallel  # noqa: E402
from benchmarks.bench_parallel import Lane, gib  # noqa: E402
from benchmarks.contenders import Contender, Phase  # noqa: E402
from benchmarks.contenders_pipeline import Ours, Pipelined, contenders, pipeline_mesh  # noqa: E402
from nanomegatron.comm import all_gather  # noqa: E402
from nanomegatron.mesh import Axis, Mesh, World  # noqa: E402
from nanomegatron.plan.memory import memory_of_ranks  # noqa: E402
from nanomegatron.pp import NoTracer  # noqa: E402
from nanomegatron.report.timers import Clock  # noqa: E402
from nanomegatron.report.trace import Tracer  # noqa: E402
from nanomegatron.schedules import Event, Op, simulate  # noqa: E402

ALIKE = 2e-3  # by how much first losses in bf16 may differ
ORDER = [  # and whether at all counts of microbatches, or the last alone
    ("interleaved 4", True),
    ("torch interleaved 4", False),
    ("1f1b", True),
    ("interleaved 4", False),
    ("torch interleaved 4", True),
    *((name, True) for name in ("zb-v", "1f1b flops", "zb-h1", "interleaved 2", "torch 1f1b")),
    ("torch interleaved 4, eager", False),
    *((name, True) for name in ("torch zb-v", "torch interleaved zero bubble 4")),
]


class Stamps(NoTracer):
    """When every op of a step began and ended on this rank."""

    def __init__(self, device: torch.device) -> None:
        self.clock, self.device, self.marks = Clock(device).align(), device, {}

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        start = self.clock.now()
        yield
        self.marks[op] = start, self.clock.now()

    def gather(self, lists: list[list[Op]], pp: Axis) -> list[list[Event]]:
        """Every rank's ops in milliseconds, by the clock of their machine. Communicates the times."""
        mine = [[self.clock.seconds(mark) for mark in self.marks[op]] for op in lists[pp.rank]]
        table = 1e3 * torch.tensor([mine], dtype=torch.float64, device=self.device)
        times = all_gather(table, pp).tolist()
        return [
            [Event(rank, op, *pair) for op, pair in zip(ops, pairs, strict=True)]
            for rank, (ops, pairs) in enumerate(zip(lists, times, strict=True))
        ]


class Sitting(bench_parallel.Sitting):
    """Everything that is measured in one go on one machine."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        usual = argparse.Namespace(**vars(args) | dict(part="dp", only=[], profile=[]))
        super().__init__(usual, world)
        self.args, self.pipeline = args, pipeline_mesh(world, self.device)
        one = {"one gpu": self.known["one gpu"]}
        self.known = one | contenders(self.pipeline, args.small, args.num_layers)
        if unknown := {*args.only, *args.profile} - self.known.keys():
            raise SystemExit(f"no contender {', '.join(sorted(unknown))}; there are {', '.join(self.known)}")
        self.result |= dict(part="pipeline", skipped=[], first_loss={})

    def run(self, phase: Phase) -> None:
        """As there, with a look at the memory that torch's allocator does not know of: NCCL's, CUDA's."""
        super().run(phase)
        outside = 0.0
        if self.cuda:
            free, total = torch.cuda.mem_get_info()
            outside = float(total - free - torch.cuda.memory_reserved())
        self.result["phases"][-1]["outside_torch_gib"] = [gib(n) for n in self.of_ranks(outside)]

    def entry(self, contender: Contender) -> dict:
        """As there, with the memory predicted for every rank."""
        told = super().entry(contender)
        if "predicted_gib" in told and isinstance(contender, Pipelined):
            parts = memory_of_ranks(contender.config, contender.config.data.vocab_size, self.planned_on)
            told["predicted_gib_of_ranks"] = [gib(sum(part.values())) for part in parts]
        return told

    def step(self, lane: Lane, count: int) -> None:
        """As there; the first loss of every contender is kept."""
        super().step(lane, count)
        if lane.steps == 1 and isinstance(lane.contender, Pipelined):
            self.result["first_loss"].setdefault(lane.contender.name, float(lane.losses[0]))

    def record(self, lane: Lane, count: int, timed: bool) -> None:
        """As there, with the peak of every rank, and what each did in a further step."""
        peaks = [gib(n) for n in self.of_ranks(float(lane.peak))]
        super().record(lane, count, timed)
        turn = self.entry(lane.contender)["turns"][-1] | dict(peak_gib_of_ranks=peaks)
        if timed and isinstance(lane.runner, Ours):
            turn["timeline"] = self.timeline(lane, count)
        self.entry(lane.contender)["turns"][-1] = turn

    def timeline(self, lane: Lane, count: int) -> dict:
        """One more step with every op recorded: its bubble, and what is said of it beforehand."""
        model, stamps = lane.runner.model, Stamps(self.device)
        lists = model.plan(count)[0]
        lane.runner.tracer = stamps
        self.step(lane, count)
        if self.args.trace_dir and count == self.args.microbatches[0]:
            folder = Path(self.args.trace_dir) / lane.contender.name.replace(" ", "-")
            lane.runner.tracer = tracer = Tracer(self.pipeline, folder, [count])
            tracer.begin(count, lists, model.placed)
            self.step(lane, count)
            tracer.end()
        lane.runner.tracer = None
        lane.clocks, lane.losses, lane.peak = [], [], 0
        runs = stamps.gather(lists, self.pipeline.pp)
        costs: dict[tuple[str, int], list[float]] = {}
        for event in (event for run in runs for event in run):
            place = event.op.kind, model.placed[event.rank][event.op.chunk]
            costs.setdefault(place, []).append(event.end - event.start)
        medians = {place: statistics.median(times) for place, times in costs.items()}
        planned = simulate(lists, model.placed, medians)
        total = max(run[-1].end for run in runs) - min(run[0].start for run in runs)
        busy = [sum(event.end - event.start for event in run) for run in runs]
        return {
            "bubble": len(busy) * total / sum(busy) - 1,
            "bubble_planned": planned.bubble,
            "bubble_theory": theory(model.name, len(runs), count, len(model)),
            "bubble_of_busiest": total / max(busy) - 1,
            "ms": total,
            "ms_planned": planned.total,
            "ms_busy": busy,
            "ms_of_an_op": {f"{kind} of stage {stage}": ms for (kind, stage), ms in medians.items()},
            "kept": [peak / len(model) for peak in planned.peak_until_backward],
            "kept_until_weight": [peak / len(model) for peak in planned.peak_until_weight],
        }

    def of_ranks(self, number: float) -> list[float]:
        """Everybody's number."""
        mine = torch.tensor([number], dtype=torch.float64, device=self.device)
        return all_gather(mine, self.mesh.world).tolist()


def theory(name: str, stages: int, microbatches: int, chunks: int) -> float:
    """The bubble of a schedule whose ops take equal time (the table of schedules.py)."""
    less = {"interleaved": chunks, "zb-h1": 3, "zb-v": 6}.get(name, 1)
    return (stages - 1) / (less * microbatches)


def phases(args: argparse.Namespace) -> list[Phase]:
    """What is run in which order; with --only those names in place of the usual ones."""
    one = Phase(["one gpu"], (2,), *((1, 2) if args.small else (3, 10)))
    rounds, counts = (1, 2) if args.small else (1, 6), tuple(args.microbatches)
    order = [(name, True) for name in args.only] or ORDER
    return [one, *(Phase([name], counts if both else counts[-1:], *rounds) for name, both in order)]


SPEED = "median ms      min      max steps tok/s/GPU  MFU % of one  x 1f1b  x torch    loss"


def speed(rows: dict, name: str) -> str:
    """A line on a row of the summary: times, and how many times as fast as the yardsticks it is."""
    row, count = rows[name], name.rpartition(", ")[2]
    one = rows.get("one gpu, 2", {}).get("mfu")
    ratios = [f"{row['mfu'] / one:.3f}" if one else "-"]
    for other in ("1f1b", "torch interleaved 4"):
        yardstick = rows.get(f"{other}, {count}")
        ratios.append(f"{yardstick['median_ms'] / row['median_ms']:.3f}" if yardstick else "-")
    percent = f"{100 * row['mfu']:.2f}" if row["mfu"] else "-"
    times = f"{row['median_ms']:9.1f} {row['min_ms']:8.1f} {row['max_ms']:8.1f} {row['steps']:5d}"
    return (
        f"{name:<36} {times} {row['tokens_per_s_per_gpu']:9.0f} {percent:>6} {ratios[0]:>6} {ratios[1]:>7}"
        f" {ratios[2]:>8} {row['loss']:7.3f}"
    )


SHAPE = "bubble %: recorded planned busiest theory   GiB/predicted/microbatches kept, of each rank"


def shape(result: dict, name: str) -> str:
    """A line on the same row: its bubble and its memory."""
    contender, _, count = name.rpartition(", ")
    entry = result["contenders"][contender]
    turn = next(t for t in entry["turns"] if t["timed"] and t["microbatches"] == int(count))
    seen, peaks = turn.get("timeline"), turn["peak_gib_of_ranks"]
    parts = ("bubble", "bubble_planned", "bubble_of_busiest", "bubble_theory")
    percent = [f"{100 * seen[part]:.1f}" if seen else "-" for part in parts]
    memory = [f"{peak:.1f}" for peak in peaks]
    if seen:
        triples = zip(peaks, entry["predicted_gib_of_ranks"], seen["kept"], strict=True)
        memory = ["{:.1f}/{:.1f}/{:.2f}".format(*triple) for triple in triples]
    bubble = f"{percent[0]:>18} {percent[1]:>7} {percent[2]:>7} {percent[3]:>6}"
    return f"{name:<36} {bubble}   {'  '.join(memory)}"


def report(result: dict) -> None:
    """Print what was measured, what failed, what was left out."""
    for name, entry in result["contenders"].items():
        for how, text in entry.get("errors", {}).items():
            print(f"{name} failed ({how}): {text.strip().splitlines()[-1][:300]}")
    for left in result["skipped"]:
        print(f"no time was left for {left}")
    rows = result["summary"]
    print(f"\n{result['date']}  torch {result['torch']}  {result['ranks']} x {result['devices'][0]}")
    for head, lines in (
        (SHAPE, [shape(result, name) for name in rows]),
        (SPEED, [speed(rows, name) for name in rows]),
    ):
        print("\n".join([f"{'contender, microbatches':<36} {head}", *lines, ""]))
    print(f"{result['seconds']} s in all, written to JSON")


def difference(losses: dict[str, float]) -> str:
    """What is wrong with the first losses; "" if they are alike."""
    low, high = min(losses, key=losses.get, default=None), max(losses, key=losses.get, default=None)
    if low is None or losses[high] - losses[low] <= ALIKE * losses[low]:
        return ""
    return f"first losses differ: {low} {losses[low]:.4f}, {high} {losses[high]:.4f}; one computes wrongly"


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file; benchmarks/results/pipeline_DEVICE_Ngpu.json")
    parser.add_argument("--small", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--num-layers", type=int, help="32, with --small 16; fewer for fewer GPUs")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16], help="of a step, ascending")
    parser.add_argument("--only", action="append", default=[], help="run this; may be repeated")
    parser.add_argument("--profile", action="append", default=[], help="list the kernels of this one too")
    parser.add_argument("--trace-dir", help="folder for pictures of a step with the fewest microbatches")
    parser.add_argument("--seconds", type=float, default=450, help="no contender is begun later than this")
    args = parser.parse_args(argv)
    args.minutes, args.num_layers = args.seconds / 60, args.num_layers or (16 if args.small else 32)
    return args


def default_file(device: str, ranks: int) -> str:
    """Where the JSON goes."""
    return str(ROOT / "benchmarks/results" / f"pipeline_{device.split()[-1].lower()}_{ranks}gpu.json")


def main(argv: list[str], world: World | None = None) -> None:
    """Measure all; every rank calls this."""
    sitting = Sitting(arguments(argv), world or World.from_environment())
    args, result = sitting.args, sitting.result
    args.out = args.out or default_file(result["devices"][0], result["ranks"])
    for phase in phases(args):
        if sitting.in_time():
            sitting.run(phase)
        else:
            result["skipped"].append(f"{phase.names[0]}, {phase.microbatches}")
        sitting.summary()
        if sitting.mesh.rank == 0:  # in case that what follows stops the run
            rows = [name for name in result["summary"] if name.rpartition(", ")[0] in phase.names]
            print("\n".join(speed(result["summary"], name) for name in rows), flush=True)
    if sitting.mesh.rank == 0:
        report(result)
    Mesh.close()
    if problem := difference(result["first_loss"]):
        raise SystemExit(problem)


if __name__ == "__main__":
    main(sys.argv[1:])

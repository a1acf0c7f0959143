"""Context parallelism: attention alone, training on long rows, memory by length, documents of all lengths.

    torchrun --nproc-per-node 4 benchmarks/bench_cp.py --part attention
    torchrun --nproc-per-node 4 benchmarks/bench_cp.py --part train [--only 64k] [--add "NAME=32 8 FLAGS"]
    torchrun --nproc-per-node 4 benchmarks/bench_cp.py --part memory [--lengths 512 --step-seconds 300]
    torchrun --nproc-per-node 4 benchmarks/bench_cp.py --part dynamic --data PREFIX [--profile dynamic]
    python benchmarks/bench_cp.py --from FILE.json ... [--draw memory.svg]      tables of earlier runs

`attention` is here: one causal row, Llama-3-8B's heads, bf16, forward and backward, by everyone in
contenders_cp.py; the other parts are in bench_cp_training.py. A contender's turn is one forward and its
backward. All take turns, A B C A B C, after warm-up rounds. Before each the ranks meet, and the GPU waits for
as long as the host needs to queue what follows: as in training, where the host is ahead, launches are not in
the times, and only who waits for the GPU in between shows it. A time is that of the slowest rank, for `one
gpu` the mean of the ranks, which is stricter; the median of the turns counts. FLOPs are 4 s^2 / 2 of a causal
row and feature forward, 2.5 times that backward, whoever computes; the share is of the rate that `one gpu`
reaches. The first results at the shortest length are compared with attention on one GPU, in parts of the
largest value: `error`.

What cannot be built, fails or runs out of memory is left out, its traceback is in the JSON, and the others
go on, if it failed on all ranks; where some wait for others, the timeout of their messages ends the run. The
JSON is written anew after every case or run, to --out or to benchmarks/results/DATE-cp-PART.json. `--small`
takes seconds, on CPUs too, where attention is in fp32.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import bench_cp_training, bench_parallel, contenders_cp  # noqa: E402
from benchmarks.bench_cp_report import attention_lines, draw, report  # noqa: E402
from benchmarks.bench_parallel import FailedSomewhere, gib  # noqa: E402
from benchmarks.contenders_cp import Case, Way  # noqa: E402
from benchmarks.kernel_times import profiled  # noqa: E402
from nanomegatron.comm import all_gather, all_reduce_  # noqa: E402
from nanomegatron.config.settings import ParallelConfig  # noqa: E402
from nanomegatron.mesh import Mesh, World, pick_device  # noqa: E402
from nanomegatron.plan.gpus import device_peak  # noqa: E402
from nanomegatron.report.timers import Clock  # noqa: E402

CLOCK, MOST = 2e9, 50e-3  # of the GPU, in Hz; seconds it is kept waiting at most
TURNS = 4  # in a profile


@dataclass
class Lane:
    """A contender that has been built, and its part of the row."""

    way: Way
    inputs: list[torch.Tensor]  # q, k, v
    grad: torch.Tensor  # of the output
    host: float = 0.0  # seconds to queue a turn
    clocks: list[tuple[Clock, Clock]] = field(default_factory=list)  # forward; forward and backward


class Sitting(bench_parallel.Sitting):
    """Everything that is measured in one go on one machine."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        self.args, self.world, self.begin = args, world, time.monotonic()
        self.device = pick_device("auto", world)
        self.cuda = self.device.type == "cuda"
        if self.cuda:
            torch.cuda.set_device(self.device)
        if args.part == "attention":
            self.mesh = contenders_cp.attention_mesh(world, self.device)
        else:
            self.mesh = Mesh.build(ParallelConfig(distributed_timeout_minutes=4), world, self.device)
        name = torch.cuda.get_device_name(self.device) if self.cuda else "cpu"
        self.peak, self.meshes = device_peak(name, "bfloat16"), {}
        self.result = {
            "date": datetime.datetime.now().isoformat(timespec="seconds"),
            "part": args.part,
            "small": args.small,
            "command": args.command,
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if self.cuda else None,
            "cudnn": torch.backends.cudnn.version() if self.cuda else None,
            "device": name,
            "ranks": world.size,
            "peak_flops": self.peak,
            "rows": [],
            "skipped": [],
        }

    def run(self) -> None:
        """The part that was asked for."""
        bench_cp_training.run(self)

    def write(self) -> None:
        """The JSON, by rank 0."""
        self.result["seconds"] = round(time.monotonic() - self.begin, 1)
        if self.world.rank == 0:
            self.args.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def say(self, line: str) -> None:
        """A line on the console, in case that what follows ends the run."""
        if self.world.rank == 0:
            print(line, flush=True)

    def of_ranks(self, numbers: list) -> torch.Tensor:
        """Everybody's numbers, ranks first, float64."""
        mine = torch.tensor([numbers], dtype=torch.float64, device=self.device)
        return all_gather(mine, self.mesh.world).cpu()


class AttentionSitting(Sitting):
    """The part `attention`."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        super().__init__(args, world)
        self.torchs, self.flag = contenders_cp.TorchRing(self.mesh), torch.zeros(1, device=self.device)
        self.ring = contenders_cp.fast_ring(self.mesh)

    def run(self) -> None:
        """All cases; the results of those of the shortest row are compared. Raises SystemExit for a name."""
        cases = contenders_cp.cases(self.args.small, self.args.lengths, self.args.documents)
        known = [*contenders_cp.contenders(contenders_cp.Case("", 0), self.mesh, self.torchs, self.ring)]
        if unknown := {*self.args.only, *self.args.profile} - {*known}:
            raise SystemExit(f"no contender {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        try:
            for case in cases:
                if self.in_time():
                    self.measure(case, compare=case.s == min(c.s for c in cases))
                else:
                    self.result["skipped"].append(case.name)
                self.write()
        finally:
            self.torchs.close()

    def measure(self, case: Case, compare: bool) -> None:
        """Build, compare, warm up and time all contenders of a case."""
        whole, expected, lanes, machine = self.inputs(case), None, {}, None
        if compare:
            way = contenders_cp.one_gpu(case, case.s, self.device)
            expected = self.turn(self.lane(way, whole))
        for name, builds in contenders_cp.contenders(case, self.mesh, self.torchs, self.ring).items():
            if not self.args.only or name in self.args.only:
                row = {"case": case.name, "s": case.s, "name": name}
                self.result["rows"].append(row)
                if lane := self.start(row, builds, whole, expected):
                    lanes[name] = row, lane
        whole = expected = None
        self.free()
        for timed, rounds in ((False, self.args.warm), (True, self.args.iters)):
            for _, lane in lanes.values():
                lane.clocks.clear()
            for i in range(rounds):
                for _, lane in lanes.values():
                    self.turn(lane)
                machine = self.machine() if timed and i + 1 == rounds else None
                self.settle()
        for name, (row, lane) in lanes.items():
            self.record(case, row, lane)
            if name in self.args.profile:
                found = profiled(lambda lane=lane: self.turns(lane), self.world.rank, 1)
                row["profile"] = found and {"turns": TURNS, **found}
        if machine:
            self.result.setdefault("clocks", {})[case.name] = machine.communicate()[0].splitlines()
        self.say("\n".join(attention_lines([r for r in self.result["rows"] if r["case"] == case.name])))
        lanes = lane = None
        self.free()

    def inputs(self, case: Case) -> list[torch.Tensor]:
        """q, k, v and the gradient of the output of a whole row, the same on all ranks."""
        generator = torch.Generator(self.device).manual_seed(1)
        how = dict(generator=generator, device=self.device, dtype=contenders_cp.dtype_of(self.device))
        heads = (case.heads, case.groups, case.groups, case.heads)
        return [torch.randn(case.s, 1, n, case.head, **how) for n in heads]

    def lane(self, way: Way, whole: list[torch.Tensor]) -> Lane:
        """What a way needs of the row."""
        places = torch.from_numpy(way.places).to(self.device)
        *inputs, grad = (x[places] for x in whole)
        return Lane(way, [x.requires_grad_() for x in inputs], grad)

    def start(self, row: dict, builds: dict, whole: list, expected: tuple | None) -> Lane | None:
        """Build a contender in the first way whose first turns work on every rank."""
        for how, build in builds.items():
            lanes, results = [], []
            try:
                self.together(lambda lanes=lanes, build=build: lanes.append(self.lane(build(), whole)))
                self.together(lambda lanes=lanes: self.turn(lanes[0]))
                self.mesh.traffic.clear()
                before = self.allocated()
                if self.cuda:
                    torch.cuda.reset_peak_memory_stats()
                self.together(lambda lanes=lanes, results=results: results.extend(self.turn(lanes[0])))
            except FailedSomewhere as failure:
                row.setdefault("errors", {})[how] = str(failure)
                lanes.clear(), results.clear()
                self.free()
                continue
            most = torch.cuda.max_memory_allocated() - before if self.cuda else 0
            row |= {"built": how, "peak_gib": gib(most), "sent_bytes": sent(self.mesh)}
            if expected is not None and not lanes[0].way.alone:
                row["error"] = self.of_ranks([error(results, expected, lanes[0].way.places)]).max().item()
            return lanes[0]
        return None

    def turns(self, lane: Lane) -> None:
        """Several in a row, which the host queues as fast as it can."""
        for _ in range(TURNS):
            self.turn(lane, wait=False)

    def turn(self, lane: Lane, wait: bool = True) -> tuple[torch.Tensor, ...]:
        """A forward and its backward: the output, and the gradients of q, k and v."""
        if self.cuda and wait:
            torch.cuda._sleep(int(CLOCK * min(2 * lane.host, MOST)))
        all_reduce_(self.flag, self.mesh.world)
        begin = time.perf_counter()
        both, forward = Clock(self.device), Clock(self.device)
        out = lane.way.run(*lane.inputs)
        forward.stop()
        grads = torch.autograd.grad(out, lane.inputs, lane.grad.view(out.shape))
        lane.clocks.append((forward, both.stop()))
        lane.host = time.perf_counter() - begin
        return out.detach(), *grads

    def record(self, case: Case, row: dict, lane: Lane) -> None:
        """Times of the turns since the warm-up, and the speed. Communicates the times over all ranks."""
        ms = self.of_ranks([[clock.milliseconds() for clock in pair] for pair in lane.clocks])
        told = ms.mean(0) if lane.way.alone else ms.amax(0)
        row["forward_ms"], row["both_ms"] = told.T.tolist()
        row["host_ms"] = 1e3 * lane.host
        share = 1 if lane.way.alone else self.world.size
        flops = case.flops(len(lane.way.places) if lane.way.alone else None)
        for part, count in zip(("forward", "both"), flops, strict=True):
            row[f"{part}_tflops"] = count / share / statistics.median(row[f"{part}_ms"]) / 1e9


def sent(mesh: Mesh) -> dict[str, int]:
    """Bytes by kind of communication over cp and its parts since the counts were cleared, of rank 0."""
    found: dict[str, int] = {}
    for (axis, kind, unit), number in mesh.traffic.items():
        if axis.startswith("cp") and unit == "bytes":
            found[kind] = found.get(kind, 0) + number
    return found


def error(found: Sequence, expected: Sequence, places: np.ndarray) -> float:
    """The largest difference to what is expected at these places, in parts of the largest value there is."""
    at = torch.from_numpy(places).to(found[0].device)
    worst = 0.0
    for mine, whole in zip(found, expected, strict=True):
        there = whole[at].float()
        gap = (mine.float().reshape(there.shape) - there).abs().max() / whole.abs().max()
        worst = max(worst, gap.item())
    return worst


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("attention", "train", "memory", "dynamic"))
    parser.add_argument("--out", type=Path, help="JSON file; benchmarks/results/DATE-cp-PART.json")
    parser.add_argument("--from", type=Path, nargs="+", dest="results", metavar="JSON", help="no measuring")
    parser.add_argument("--draw", type=Path, metavar="FILE.svg", help="memory by length as a picture")
    parser.add_argument("--small", action="store_true", help="tiny shapes and few turns")
    parser.add_argument("--only", action="append", default=[], help="this contender; may be repeated")
    parser.add_argument("--profile", action="append", default=[], help="list the kernels of this one too")
    parser.add_argument("--iters", type=int, help="timed turns or steps; attention 10, memory 1, else 5")
    parser.add_argument("--warm", type=int, help="turns or steps before them; 2, 0, 1")
    parser.add_argument("--minutes", type=float, default=7.0, help="nothing is begun later than this")
    parser.add_argument("--lengths", type=int, nargs="*", help="of the rows, in thousands of tokens")
    parser.add_argument("--documents", type=int, nargs="*", default=[32], help="rows of documents of mean 4k")
    bench_cp_training.add_arguments(parser)
    args = parser.parse_args(argv)
    if not args.results and not args.part:
        parser.error("give --part, or --from FILE.json ...")
    warm, iters = {"attention": (2, 10), "memory": (0, 1)}.get(args.part, (1, 5))
    args.warm = warm if args.warm is None else args.warm
    args.iters = args.iters or (min(iters, 2) if args.small else iters)
    if args.lengths is None:
        args.lengths = [32, 64, 128] if args.part == "attention" else [16, 32, 64, 128, 256]
    args.layers = args.layers or (8 if args.part == "dynamic" else 32)
    if args.part == "dynamic" and not args.data:
        parser.error("--part dynamic needs --data PREFIX, documents of all lengths")
    args.data = args.data and str(Path(args.data).absolute())
    today = datetime.date.today().isoformat()
    args.out = (args.out or ROOT / f"benchmarks/results/{today}-cp-{args.part}.json").absolute()
    args.command = " ".join(argv)
    return args


def results_of(args: argparse.Namespace, kind: type[Sitting], world: World | None) -> list[dict]:
    """What is measured now, on rank 0, or was measured. Every rank calls this."""
    if not args.part:
        return [json.loads(path.read_text()) for path in args.results]
    world = world or World.from_environment()
    sitting = kind(args, world)
    sitting.run()
    sitting.write()
    Mesh.close()
    return [] if world.rank else [sitting.result]


def main(argv: list[str], world: World | None = None) -> None:
    """Measure one part, or read what was measured; draw and report. Every rank calls this."""
    args = arguments(argv)
    results = results_of(args, AttentionSitting if args.part == "attention" else Sitting, world)
    if args.draw and results:
        try:
            draw(args.draw, results)
        except ImportError:
            print('--draw needs matplotlib: pip install -e ".[viz]"', file=sys.stderr)
    for result in results:
        report(result)


if __name__ == "__main__":
    main(sys.argv[1:])

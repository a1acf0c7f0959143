"""Mixtures of experts: training, one layer and its pieces, matmuls of experts, and beside transformers.

    torchrun --nproc-per-node 4 benchmarks/bench_moe.py --part train [--add "NAME=qwen FLAGS"]
    torchrun --nproc-per-node 4 benchmarks/bench_moe.py --part layer
    python benchmarks/bench_moe.py --part experts
    python benchmarks/bench_moe.py --part peers
    python benchmarks/bench_moe.py --from FILE.json ...                    tables of earlier runs

`train` steps slices of two models as train.py builds them, experts over all ranks, and, where it is
installed, transformers' model under FSDP2 (peers_moe.py). The other parts are in contenders_moe.py: forward
and backward of one layer with experts over all ranks, or of pieces of it by themselves; each matmul of a
rank's experts, in a loop and grouped; our layer and transformers' on one GPU.

All of a case take turns, A B C A B C, after warm-up rounds. Before each the ranks meet and the GPU waits
until the host is ahead, as in training, so launches are not in the times, but waits for the GPU in between
are. A time is between two events on the GPU, of the slowest rank; the median of the turns counts. Tokens are
random. In training a new router does not spread them evenly, and a rank waits for the busiest: `imbalance`
is what the busiest expert has over the mean. The runs called even choose at random, as Megatron's benchmarks.

What fails is left out, its traceback is in the JSON, written anew after each case to --out or to
benchmarks/results/DATE-moe-PART.json. `--small` takes seconds, on CPUs too.
"""

import argparse
import contextlib
import datetime
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import bench_cp, bench_cp_training, contenders_moe, peers_moe  # noqa: E402
from benchmarks.bench_cp_report import in_short, preamble, run_line  # noqa: E402
from benchmarks.bench_parallel import FailedSomewhere, gib  # noqa: E402
from benchmarks.contenders_moe import MODELS, SMALL, Turn  # noqa: E402
from benchmarks.kernel_times import profiled  # noqa: E402
from nanomegatron.comm import all_reduce_  # noqa: E402
from nanomegatron.flops import flops_per_iteration, mfu  # noqa: E402
from nanomegatron.mesh import World  # noqa: E402
from nanomegatron.report.timers import Clock  # noqa: E402

COMMON = "--mock-data --tokenizer-type NullTokenizer --bf16 --train-iters 1000 --eval-iters 0 --lr 1e-4 "
COMMON += "--lr-decay-style constant --lr-warmup-iters 0 --distributed-timeout-minutes 4 "
COMMON += bench_cp_training.ALL
RUNS = {  # model, flags; the first four are usual
    "mixtral": ("mixtral", ""),
    "qwen": ("qwen", ""),
    "mixtral even": ("mixtral", "--moe-router-force-load-balancing"),
    "qwen even": ("qwen", "--moe-router-force-load-balancing"),
    "mixtral allgather": ("mixtral", "--moe-token-dispatcher-type allgather"),
    "mixtral halves": ("mixtral", "--overlap-moe-expert-parallel-comm"),
    "mixtral loop": ("mixtral", "--no-moe-grouped-gemm"),
    "mixtral fp8": ("mixtral", "--fp8-format hybrid --fp8-recipe rowwise"),
    "qwen allgather": ("qwen", "--moe-token-dispatcher-type allgather"),
    "qwen halves": ("qwen", "--overlap-moe-expert-parallel-comm"),
    "qwen fp8": ("qwen", "--fp8-format hybrid --fp8-recipe rowwise"),
}
PEERS = {"mixtral transformers": "mixtral", "qwen transformers": "qwen"}
USUAL = ["mixtral", "qwen", "mixtral even", "qwen even", *PEERS]
MICROBATCHES = 4
WAIT = 20_000_000  # cycles that the GPU is kept waiting, 10 ms


class Sitting(bench_cp.Sitting):
    """Everything that is measured in one go on one machine."""

    def run(self) -> None:
        """The part that was asked for, or what of it has --only in its name."""
        if self.args.part == "train":
            with tempfile.TemporaryDirectory(prefix="bench-moe-") as folder, contextlib.chdir(folder):
                return self.train()
        for case, builds in contenders_moe.cases(self).items():
            if not self.in_time():
                self.result["skipped"].append(case)
            elif not self.args.only or self.args.only in case:
                self.in_turn(case, builds)
            self.write()

    def train(self) -> None:
        """One run after the other."""
        runs, args = dict(RUNS), self.args
        added = dict(text.split("=", 1) for text in args.add)
        runs |= {name: ("".join(text.split()[:1]), text.partition(" ")[2]) for name, text in added.items()}
        every = [*runs, *PEERS]
        wanted = [n for n in every if args.only in n] if args.only else [*added] or USUAL
        for name in wanted:
            if not self.in_time():
                self.result["skipped"].append(name)
                continue
            model, flags = runs.get(name) or (PEERS[name], "")
            row, argv = self.new_row(name, model, flags)
            if name in PEERS:
                self.train_peer(row, argv)
            else:
                bench_cp_training.measure(self, [row], [argv], args.iters)
            self.write()

    def new_row(self, name: str, model: str, flags: str) -> tuple[dict, list[str]]:
        """A run: what is known beforehand, and its command line."""
        shape = MODELS[model]
        words = f"{shape.flags} {SMALL if self.args.small else shape.slice} {COMMON}"
        batch = shape.micro_batch * self.world.size * MICROBATCHES
        words += f" --micro-batch-size {shape.micro_batch} --global-batch-size {batch} --ep {self.world.size}"
        words += f" --run-name moe-{len(self.result['rows'])} {flags} {self.args.flags}"
        row = {"name": name, "model": model, "flags": " ".join(words.split())}
        self.result["rows"].append(row)
        config = bench_cp_training.config_of(words.split(), self)
        row |= {"seq_length": config.data.seq_length, "layers": config.model.num_layers}
        row |= bench_cp_training.beforehand(config, self)
        return row, words.split()

    def train_peer(self, row: dict, argv: list[str]) -> None:
        """The same by transformers, of which each rank takes as many samples."""
        config, clocks, made = bench_cp_training.config_of(argv, self), [], []
        vocab, data = config.data.vocab_size, config.data
        generator = torch.Generator(self.device).manual_seed(1000 + self.world.rank)
        shape = MICROBATCHES, data.micro_batch_size, data.seq_length + 1
        batches = [*torch.randint(vocab, shape, generator=generator, device=self.device)]

        def steps(count: int) -> None:
            for _ in range(count):
                clock = Clock(self.device)
                row["loss"] = [made[0].step(batches)]
                clocks.append(clock.stop())

        for how, build in peers_moe.BUILDS.items():
            made.clear(), clocks.clear(), self.free()
            try:
                self.together(lambda build=build: made.append(build(config, self.device)))
                self.together(lambda: steps(self.args.warm))
                clocks.clear()
                self.together(lambda: steps(self.args.iters))
            except FailedSomewhere as failure:
                row.setdefault("errors", {})[how] = str(failure)
                continue
            ms = self.of_ranks([clock.milliseconds() for clock in clocks]).amax(0).tolist()
            seconds, ranks = statistics.median(ms) / 1e3, self.world.size
            flops = flops_per_iteration(config.model, vocab, data.seq_length, data.global_batch_size)
            speed = data.global_batch_size * data.seq_length / seconds
            row |= {"built": how, "step_ms": ms, "mfu": mfu(flops, seconds, ranks, self.peak)}
            row |= {
                "tokens_per_s": speed,
                "tokens_per_s_per_gpu": speed / ranks,
                "loss": [row["loss"][0].item()],
            }
            row["peak_gib"] = gib(torch.cuda.max_memory_allocated() if self.cuda else 0)
            break
        self.say(run_line(row))
        made.clear()
        self.free()

    def in_turn(self, case: str, builds: dict[str, Callable[[], Turn]]) -> None:
        """Build, warm up and time all of a case."""
        lanes, flag = {}, torch.zeros(1, device=self.device)
        for name, build in builds.items():
            row = {"case": case, "name": name, "ms": []}
            self.result["rows"].append(row)
            made: list[Turn] = []
            try:
                self.together(lambda made=made, build=build: made.append(build()))
                self.together(lambda made=made: (made[0].prepare(), made[0].run()))
            except FailedSomewhere as failure:
                row.setdefault("errors", {})[name] = str(failure)
            else:
                lanes[name] = row, made[0]
        for i in range(self.args.warm + self.args.iters):
            for row, turn in lanes.values():
                turn.prepare()
                if self.cuda:
                    torch.cuda._sleep(WAIT)
                all_reduce_(flag, self.mesh.world)
                clock = Clock(self.device)
                turn.run()
                clock.stop()
                if i >= self.args.warm:
                    row["ms"].append(clock)
            self.settle()
        for row, turn in lanes.values():
            row["ms"] = self.of_ranks([clock.milliseconds() for clock in row["ms"]]).amax(0).tolist()
            row |= turn.told
            if row["name"] in self.args.profile:
                turn.prepare()
                row["profile"] = profiled(turn.run, self.world.rank, 1)
            if turn.flops:
                row["flops"] = turn.flops
                row["tflops"] = turn.flops / statistics.median(row["ms"]) / 1e9
        self.say("\n".join(case_lines([row for row in self.result["rows"] if row["case"] == case])))
        lanes = turn = None
        self.free()


def case_lines(rows: list[dict]) -> list[str]:
    """Lines of the table for one case; shares are of the first time."""
    lines, first = [], None
    for row in rows:
        if not row["ms"]:
            lines.append(
                f"| {row['case']} | {row['name']} | failed: {in_short(row['errors'][row['name']])[-160:]} |"
            )
            continue
        ms = statistics.median(row["ms"])
        first = first or ms
        rate = f"{row['tflops']:.0f}" if "tflops" in row else ""
        error = f"{row['error']:.1e}" if "error" in row else ""
        lines.append(f"| {row['case']} | {row['name']} | {ms:.3f} | {ms / first:.3f} | {rate} | {error} |")
    return lines


def report(result: dict) -> None:
    """Print all that is known, the table last."""
    rows = result["rows"]
    preamble(result, "bench_moe.py")
    if result["part"] == "train":
        print("| run | tokens | layers | ms a step | tokens/s/GPU | MFU | peak GiB (plan) | loss | uneven |")
        print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
        for row in rows:
            print(run_line(row), f"{row['imbalance']:.2f} |" if "imbalance" in row else "- |")
        return
    print("| case | what | ms | of the first | TFLOP/s | error |\n|---|---|--:|--:|--:|--:|")
    for case in dict.fromkeys(row["case"] for row in rows):
        print(*case_lines([row for row in rows if row["case"] == case]), sep="\n")


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("train", "layer", "experts", "peers"))
    parser.add_argument("--out", type=Path, help="JSON file; benchmarks/results/DATE-moe-PART.json")
    parser.add_argument("--from", type=Path, nargs="+", dest="results", metavar="JSON", help="no measuring")
    parser.add_argument("--small", action="store_true", help="tiny shapes and few turns")
    parser.add_argument("--only", default="", help="what has this in its name")
    parser.add_argument("--profile", action="append", default=[], help="list the kernels of this one too")
    parser.add_argument("--iters", type=int, help="timed turns or steps; 10, train 5")
    parser.add_argument("--warm", type=int, default=2, help="turns or steps before them")
    parser.add_argument("--minutes", type=float, default=7.0, help="nothing is begun later than this")
    parser.add_argument("--flags", default="", help="train: of train.py, for every run")
    parser.add_argument(
        "--add", action="append", default=[], metavar="'NAME=mixtral FLAGS'", help="train: one more"
    )
    args = parser.parse_args(argv)
    if not args.results and not args.part:
        parser.error("give --part, or --from FILE.json ...")
    args.iters = args.iters or (2 if args.small else 5 if args.part == "train" else 10)
    today = datetime.date.today().isoformat()
    args.out = (args.out or ROOT / f"benchmarks/results/{today}-moe-{args.part}.json").absolute()
    args.command = " ".join(argv)
    return args


def main(argv: list[str], world: World | None = None) -> None:
    """Measure one part, or read what was measured. Every rank calls this."""
    args = arguments(argv)
    for result in bench_cp.results_of(args, Sitting, world):
        report(result)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Every kernel beside torch, torch.compile and Liger, as a share of the bandwidth that a copy reaches.

    python benchmarks/kernels.py [--only swiglu] [--ways kernel,torch] [--out FILE] [--table FILE]
    python benchmarks/kernels.py --read FILE --table FILE        the table of an earlier run

The shapes are Llama-3-8B's with 8,192 tokens, in bf16 (kernels_cases.py). All ways to do one thing take
turns: a sample is as many launches as take a millisecond, between two events; the median of 15 counts. The
GPU is kept busy while the host queues a sample, so the host's own time, autograd's included, is not in
it; only a way that waits for the GPU shows that. Inputs and results take turns too, so that none is found in
the L2. The floor is what must be read and written at least, in bytes; GB/s and the share of a copy's
bandwidth are of it, so whoever moves more shows. The error is against float64 of the same inputs, relative to
the largest value.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.kernels_cases import Case, cases  # noqa: E402
from benchmarks.kernels_table import gates, table  # noqa: E402

SAMPLES, SAMPLE_MS = 15, 1.0
CLOCK, MOST = 2e9, 50e-3  # of the GPU, in Hz; seconds it is kept busy at most
PART = 2**26  # elements that are compared at once


def milliseconds(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median time of each, measured in turns."""
    plans, found = {}, {name: [] for name in ways}
    for name, run in ways.items():
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            run()
        host = (time.perf_counter() - began) / 5
        count = max(1, round(SAMPLE_MS / max(once(run, 5, 10 * host), 1e-3)))
        plans[name] = run, count, 2 * host * count
    for _ in range(SAMPLES):
        for name, plan in plans.items():
            found[name].append(once(*plan))
    return {name: statistics.median(times) for name, times in found.items()}


def once(run: Callable[[], object], count: int, busy: float) -> float:
    """Milliseconds a launch, of so many in a row, queued while the GPU is busy for some seconds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(CLOCK * min(busy, MOST)))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def copy_bandwidth() -> float:
    """Bytes a second that a copy of 1 GiB reads and writes."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / (milliseconds({"copy": lambda: y.copy_(x)})["copy"] / 1e3)


def measure(case: Case, bandwidth: float, wanted: list[str]) -> dict:
    """Times and errors of all ways of one case; a way that fails tells why."""
    ways, row = {}, {"case": case.name, "floor_bytes": case.floor, "ways": {}}
    expected = case.expected()
    for name, make in case.ways.items():
        if wanted and name not in wanted:
            continue
        try:
            run = make()
            row["ways"][name] = {"error": error(case, name, run, expected)}
            for _ in range(3):
                run()
            ways[name] = run
        except Exception as problem:  # one way that does not run here must not end the rest
            row["ways"][name] = {"failed": f"{type(problem).__name__}: {problem}"[:300]}
    del expected
    torch.cuda.empty_cache()
    for name, ms in milliseconds(ways).items():
        rate = case.floor / (ms / 1e3)
        row["ways"][name] |= {"us": 1e3 * ms, "gb_per_s": rate / 1e9, "share": rate / bandwidth}
    return row


def error(case: Case, name: str, run: Callable[[], tuple], expected: tuple[torch.Tensor, ...]) -> float:
    """The largest of all results of the first run. Raises ValueError for other shapes."""
    finish = case.finish.get(name, lambda *results: results)
    pairs = zip(finish(*run()), expected, strict=True)
    return torch.tensor([relative(*pair) for pair in pairs]).max().item()  # NaN if there is one


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest value. Raises ValueError for other shapes."""
    if found.shape != expected.shape:
        raise ValueError(f"{list(found.shape)} instead of {list(expected.shape)}")
    differences, largest = [], []
    for a, b in zip(*(t.detach().reshape(-1).split(PART) for t in (found, expected))):
        a, b = (t.float().double() for t in (a, b)) if a.dtype.itemsize == 1 else (a.double(), b.double())
        differences.append((a - b).abs().max())
        largest.append(b.abs().max())
    return (torch.stack(differences).max() / torch.stack(largest).max()).item()


def main(argv: list[str]) -> None:
    """Measure, print, write the JSON and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="cases whose name begins so")
    parser.add_argument("--ways", default="", help="of kernel, torch, compile, liger, megatron, with commas")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--read", type=Path, help="JSON file to take instead of measuring")
    parser.add_argument("--table", type=Path, help="Markdown file to write")
    args = parser.parse_args(argv)
    result = json.loads(args.read.read_text()) if args.read else measured(args)
    if args.table:
        args.table.write_text(table(result))
    print("\ngates")
    print("\n".join(gates(result["rows"])))


def measured(args: argparse.Namespace) -> dict:
    """What the JSON holds; it is written again after each case."""
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s | {torch.cuda.get_device_name()} | torch {torch.__version__}")
    result = dict(
        date=datetime.datetime.now().isoformat(timespec="seconds"),
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        copy_bytes_per_s=bandwidth,
        rows=[],
    )
    for case in cases():
        if args.only and not any(case.name.startswith(word) for word in args.only):
            continue
        row = measure(case, bandwidth, args.ways.split(",") if args.ways else [])
        for name, told in row["ways"].items():
            numbers = told.get("failed") or (
                f"{told['us']:9.1f} us {told['gb_per_s']:7.0f} GB/s {100 * told['share']:5.1f} % "
                f"error {told['error']:.1e}"
            )
            print(f"{case.name:<30} {name:<10} {numbers}", flush=True)
        result["rows"].append(row)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1))
        del case  # with all of its tensors
        torch.compiler.reset()  # the next shapes are no reason to compile for any
        torch.cuda.empty_cache()
    return result


if __name__ == "__main__":
    main(sys.argv[1:])

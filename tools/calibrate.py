"""Measure this machine, and write a cluster for the planner: `python tools/calibrate.py FILE.toml`.

Then `nanomegatron plan --cluster FILE.toml` plans for it.

Measured on one GPU, in less than two minutes: matmuls in bf16 and in FP8, attention, copies, and copies to
the next GPU if there is one. Each runs for a while before it is timed, so that the clock is that of the power
limit. The network, and what a machine lacks, keep the values of the nearest cluster there is. Without a GPU
the same is measured with small sizes, which says little about training on GPUs.
"""

import argparse
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import torch

from nanomegatron.config.cli import toml_value
from nanomegatron.ops.attention import Mask, choose_backend, core_attention
from nanomegatron.plan.auto import cluster_of
from nanomegatron.plan.cluster import CLUSTERS, RAMP, ROW_RAMP, load_cluster

WARM_SECONDS = 1.0  # that a kernel runs before it is timed, and again while it is


def calibrate(path: Path) -> None:
    """Measure, and write `path`. Raises ValueError if it does not end in .toml or exists."""
    if path.suffix != ".toml" or path.exists():
        raise ValueError(f"{path}: must be a new file whose name ends in .toml")
    gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if gpu else "cpu"
    base = CLUSTERS / f"{cluster_of(name).name}.toml"
    values = tomllib.loads(base.read_text(encoding="utf-8"))
    device, seconds = torch.device("cuda", 0) if gpu else torch.device("cpu"), WARM_SECONDS if gpu else 0.05
    for key, measured in measurements(device, seconds).items():
        values[key] = values[key] | measured if isinstance(measured, dict) else measured
    path.write_text(
        as_toml(values, f"# Measured on {name} with torch {torch.__version__}; the rest is of {base.name}.")
    )
    load_cluster(str(path))
    print(path.read_text())


def measurements(device: torch.device, seconds: float) -> dict:
    """What is measured, in the units and by the names of a cluster's file."""
    gpu = device.type == "cuda"
    size, row = (8192, 8192) if gpu else (256, 256)
    kind = torch.bfloat16 if gpu else torch.float32

    def timed(run: Callable[[], object]) -> float:
        for _ in range(2):  # until it is warm, then for the result
            count, begin = 0, time.perf_counter()
            while time.perf_counter() - begin < seconds:
                run()
                count += 1
                if gpu and count % 8 == 0:
                    torch.cuda.synchronize()
            if gpu:
                torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count

    x = torch.randn(size, size, device=device).to(kind)
    rate = 2 * size**3 / timed(lambda: x @ x) * (size + RAMP) / size / 1e12
    found: dict = {"bandwidth": round(2 * x.nbytes / timed(x.clone) / 1e9, 3)}
    found["matmul"] = {"bf16" if gpu else "fp32": round(rate, 4)}
    if gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        a, one = x.to(torch.float8_e4m3fn), torch.ones((), device=device)
        fp8 = 2 * size**3 / timed(lambda: torch._scaled_mm(a, a.t(), one, one, out_dtype=kind)) / 1e12
        found["matmul"] |= dict.fromkeys(("delayed", "tensorwise"), round(fp8, 4))
    found["attention"] = {}
    for d in (64, 128):
        q = torch.randn(row, 1, 2048 // d, d, device=device).to(kind).requires_grad_()
        backend = choose_backend("auto", device, kind)

        def forward(q: torch.Tensor = q, backend: str = backend) -> torch.Tensor:
            return core_attention(q, q, q, backend, Mask(True))[0]

        flops = 2 * row * row * 2048
        one_way, both = timed(forward), timed(lambda: forward().sum().backward())
        reached = row / (row + ROW_RAMP)
        rates = flops / one_way / reached, 2 * flops / max(both - one_way, one_way / 2) / reached
        found["attention"][str(d)] = [round(r / 1e12, 4) for r in rates]
    if gpu and torch.cuda.device_count() > 1:
        there = torch.empty_like(x, device=torch.device("cuda", 1))
        found["nvlink"] = {"bandwidth": round(0.8 * x.nbytes / timed(lambda: there.copy_(x)) / 1e9, 1)}
    return found


def as_toml(values: dict, first: str) -> str:
    """The text of a cluster's file: numbers, then tables."""
    plain = [f"{key} = {toml_value(value)}" for key, value in values.items() if not isinstance(value, dict)]
    tables = [
        "\n".join([f"\n[{key}]", *(f"{name} = {toml_value(item)}" for name, item in value.items())])
        for key, value in values.items()
        if isinstance(value, dict)
    ]
    return "\n".join([first, *plain, *tables, ""])


def main(argv: list[str] | None = None) -> int:
    """Measure, and write the file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the cluster's file, new, .toml")
    try:
        calibrate(parser.parse_args(argv).file)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

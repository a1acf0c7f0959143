"""Tensor-parallel linear layers with their collectives in pieces, beside NCCL before or behind the matmul.

    torchrun --standalone --nproc-per-node 4 benchmarks/bench_tp_overlap.py

The four linear layers of a Llama-3-8B block, bf16, one sequence of 8192, sequence parallel. Prints a table of
milliseconds, the slowest rank's median, and writes benchmarks/results/DATE-tp-overlap-tpN.json. `alone` is
the matmul without any communication; `fused` torch's own symmetric-memory operation; `collectives` what the
pieces do where GPUs cannot reach each other's memory; `host` the time the host needs to launch ours.
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
import torch.distributed as dist
import torch.distributed._symmetric_memory

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanomegatron.comm import all_gather, all_reduce, barrier, reduce_scatter  # noqa: E402
from nanomegatron.config.settings import ParallelConfig  # noqa: E402
from nanomegatron.fast.peer_access import PeerAccess  # noqa: E402
from nanomegatron.fast.tp_overlap import OverlappedLinear, gather_matmul, matmul_scatter  # noqa: E402
from nanomegatron.mesh import Axis, Mesh, World  # noqa: E402
from nanomegatron.tp import LinearFunction  # noqa: E402

# hidden size, features of all ranks together, and what the layer does over tp
LAYERS = {
    "qkv": (4096, 6144, "gather"),
    "gate+up": (4096, 28672, "gather"),
    "o": (4096, 4096, "scatter"),
    "down": (4096, 14336, "scatter"),
}


def median(call: Callable, axis: Axis, calls: int = 12, rounds: int = 8) -> tuple[float, float]:
    """Milliseconds of a call, on the device and for the host to launch it; the slowest rank's."""
    for _ in range(4):
        call()
    device, host, ahead = [], [], 0.0
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        barrier(axis)
        torch.cuda._sleep(int(ahead * 2.5e6))  # cycles, 2e6 a ms: the host gets ahead, and is timed apart
        begin.record()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        ahead = (time.perf_counter() - start) * 1e3
        end.record()
        end.synchronize()
        host.append(ahead / calls)
        device.append(begin.elapsed_time(end) / calls)
    both = torch.tensor([statistics.median(device[1:]), statistics.median(host)], device="cuda")
    return tuple(all_reduce(both, axis, "max").tolist())


def fused(kind: str, x: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor:
    """torch's own pipelined operations."""
    ops, name = torch.ops.symm_mem, axis.group.group_name
    if kind == "gather":
        return ops.fused_all_gather_matmul(x, [weight], 0, name)[1][0]
    return ops.fused_matmul_reduce_scatter(x, weight, "sum", 0, name)


def contestants(layer: str, rows: int, tp: Axis, peers: PeerAccess) -> dict[str, Callable]:
    """Forward, and forward with backward, by name."""
    hidden, features, kind = LAYERS[layer]
    width, gathers = features // tp.size, kind == "gather"
    i, o = (hidden, width) if gathers else (width, hidden)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, weight = draw(rows // tp.size if gathers else rows, i), draw(o, i).requires_grad_()
    whole, w, leaf = draw(rows, i), weight.detach().t(), x.clone().requires_grad_()
    grad = draw(rows if gathers else rows // tp.size, o)
    ours = gather_matmul if gathers else matmul_scatter

    def both(linear: Callable) -> None:
        weight.grad = leaf.grad = None
        linear(leaf, weight, tp, kind).backward(grad)

    def nccl() -> torch.Tensor:
        return all_gather(x, tp) @ w if gathers else reduce_scatter(x @ w, tp)

    def alone() -> None:
        y = whole @ w
        y.t() @ whole, y @ w.t()

    return {
        "forward alone": lambda: whole @ w,
        "forward NCCL": nccl,
        "forward fused": lambda: fused(kind, x, w, tp),
        "forward collectives": lambda: ours(x, w, tp),
        "forward ours": lambda: ours(x, w, tp, peers),
        "both alone": alone,
        "both NCCL": lambda: both(LinearFunction.apply),
        "both collectives": lambda: both(OverlappedLinear(None)),
        "both ours": lambda: both(OverlappedLinear(peers)),
    }


def main() -> None:
    """All layers, all contestants; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192, help="sequence length x microbatch size")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    place = World.from_environment()
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    config = ParallelConfig(tensor_model_parallel_size=place.size)
    mesh = Mesh.build(config, place, device)
    peers = PeerAccess.build(mesh, config)
    path, table = peers.describe(mesh.tp), {}
    for layer in LAYERS:
        for name, call in contestants(layer, args.rows, mesh.tp, peers).items():
            ms, host = median(call, mesh.tp)
            table[f"{layer} {name}"] = dict(ms=round(ms, 4), host_ms=round(host, 4))
            if not place.rank:
                print(f"{layer:8} {name:20} {ms:8.3f} ms   host {host:6.3f} ms", flush=True)
    if not place.rank:
        date = datetime.date.today().isoformat()
        versions = dict(torch=torch.__version__, nccl=".".join(map(str, torch.cuda.nccl.version())))
        result = dict(gpu=torch.cuda.get_device_name(), tp=place.size, rows=args.rows, path=path, **versions)
        target = args.out / f"{date}-tp-overlap-tp{place.size}.json"
        target.write_text(json.dumps(result | dict(table=table), indent=1) + "\n")
    dist.barrier()
    Mesh.close()


if __name__ == "__main__":
    main()

"""How long it takes to make the process groups of a run.

    python benchmarks/bench_groups.py --ranks 64 --pp 32 --tp 2 --connect 0.1

Every rank is a process of this machine (gloo over loopback). The time is that of `Mesh.build` on the slowest
rank. --connect: seconds that a rank sleeps for each group that it is in, as NCCL would take to connect it.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanomegatron.config.settings import ParallelConfig
from nanomegatron.launch import launch
from nanomegatron.mesh import Mesh, World


def build(world: World, parallel: ParallelConfig, connect: float, folder: str) -> int:
    """What each rank does: build the mesh, and write the seconds that it took to a file."""
    new_group, made = dist.new_group, []

    def slow(ranks: tuple[int, ...], **options: Any) -> Any:
        group = new_group(ranks, **options)
        if world.rank in ranks:
            made.append(ranks)
            time.sleep(connect)
        return group

    dist.new_group = slow
    start = time.monotonic()
    Mesh.build(parallel, world, torch.device("cpu"))
    result = {"seconds": time.monotonic() - start, "groups": len(made)}
    Path(folder, f"{world.rank}.json").write_text(json.dumps(result))
    Mesh.close()
    return 0


def main() -> None:
    """Print the time of the slowest rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--connect", type=float, default=0.0)
    for name in ("tp", "cp", "pp", "ep", "vpp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    args = parser.parse_args()
    parallel = ParallelConfig(
        tensor_model_parallel_size=args.tp,
        context_parallel_size=args.cp,
        pipeline_model_parallel_size=args.pp,
        expert_model_parallel_size=args.ep,
        num_virtual_stages_per_pipeline_rank=args.vpp,
    )
    with tempfile.TemporaryDirectory() as folder:
        codes = launch(build, args.ranks, (parallel, args.connect, folder), timeout=600, threads=1)
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if any(codes):
        sys.exit(f"exit codes {codes}")
    seconds, groups = (max(rank[key] for rank in found) for key in ("seconds", "groups"))
    print(f"{args.ranks} ranks, at most {groups} groups a rank: {seconds:.1f} s")


if __name__ == "__main__":
    main()

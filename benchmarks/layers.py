"""Layers on one GPU or several: tensor and context parallel, experts, FP8.

    torchrun --nproc-per-node 4 -m benchmarks.layers tp [NAME...] --out FILE.json [--small]
    torchrun --nproc-per-node 4 -m benchmarks.layers cp --lengths 32 64 128 --out FILE.json
    torchrun --nproc-per-node 4 -m benchmarks.layers moe [--flags "FLAGS OF train.py"] --out FILE.json
    python -m benchmarks.layers experts | transformers | fp8 --out FILE.json

What each part has is in layer_cases.py (tp, fp8), context_cases.py (cp) and moe_cases.py; how it is measured
stands in session.py. NAME: what the names of cases begin with.
"""

import sys

from benchmarks import context_cases, layer_cases, moe_cases
from benchmarks.session import Session, arguments
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.mesh import Mesh, World

CASES = {
    "tp": layer_cases.tp_cases,
    "cp": context_cases.cases,
    "moe": moe_cases.layer_cases,
    "experts": moe_cases.matmul_cases,
    "transformers": moe_cases.peer_cases,
    "fp8": layer_cases.fp8_cases,
}


def main(argv: list[str], world: World | None = None) -> None:
    """Measure one part; every rank calls this."""
    args, world = arguments(__doc__, argv, CASES), world or World.from_environment()
    parallel = ParallelConfig(distributed_timeout_minutes=4)
    if args.part == "tp":
        parallel = ParallelConfig(tensor_model_parallel_size=world.size, distributed_timeout_minutes=4)
    elif args.part == "cp":
        parallel = context_cases.parallel(world)
    session = Session(args, world, parallel)
    session.run(CASES[args.part](session))
    Mesh.close()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Kernels and layers, beside torch, torch.compile and libraries, on one GPU or several.

    python -m benchmarks.layers kernels [NAME...] [--form ours --form torch] --out FILE.json [--small]
    python -m benchmarks.layers experts | transformers | fp8 --out FILE.json
    torchrun --nproc-per-node 4 -m benchmarks.layers tp --out FILE.json
    torchrun --nproc-per-node 4 -m benchmarks.layers cp --lengths 32 64 128 --out FILE.json
    torchrun --nproc-per-node 4 -m benchmarks.layers moe [--flags "FLAGS OF train.py"] --out FILE.json

NAME: what the names of cases begin with. kernels: every kernel, as a share of the bandwidth that a copy
reaches; the shapes are Llama-3-8B's with 8,192 tokens, in bf16 (forms.py), and no call finds its inputs in
the L2. What the others have is in layer_cases.py (tp, fp8), context_cases.py (cp) and moe_cases.py; how all
is measured stands in session.py.
"""

import itertools
import sys
from collections.abc import Iterator

from benchmarks import context_cases, layer_cases, moe_cases
from benchmarks.attention_cases import ropes, softmaxes
from benchmarks.forms import SMALL, Sizes
from benchmarks.fp8_cases import casts, fused_casts
from benchmarks.kernel_cases import (
    adamws,
    branches,
    cross_entropies,
    embeddings,
    gelus,
    norms,
    permutes,
    swiglus,
)
from benchmarks.session import Case, Session, arguments
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.mesh import Mesh, World


def kernels(session: Session) -> Iterator[Case]:
    """One after the other; nothing of it is on the GPU but what a form has made and holds."""
    sizes = (SMALL if session.args.small else Sizes)(device=session.device.type)
    groups = (
        norms,
        branches,
        softmaxes,
        ropes,
        swiglus,
        gelus,
        cross_entropies,
        casts,
        fused_casts,
        adamws,
        permutes,
        embeddings,
    )
    return itertools.chain.from_iterable(group(sizes) for group in groups)


CASES = {
    "kernels": kernels,
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
    parallel = {"cp": context_cases.parallel(world.size)}
    parallel["tp"] = ParallelConfig(tensor_model_parallel_size=world.size)
    session = Session(args, world, parallel.get(args.part, ParallelConfig()))
    session.run(CASES[args.part](session))
    Mesh.close()


if __name__ == "__main__":
    main(sys.argv[1:])

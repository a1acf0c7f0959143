"""Every kernel beside torch, torch.compile and Liger, as a share of the bandwidth that a copy reaches.

    python -m benchmarks.kernels [NAME...] [--form ours --form torch] --out FILE.json [--small]

NAME: what the names of cases begin with, "swiglu". The shapes are Llama-3-8B's with 8,192 tokens, in bf16
(forms.py); how it is measured stands in session.py. No call finds its inputs in the L2.
"""

import itertools
import sys
from collections.abc import Iterator

from benchmarks.attention_cases import ropes, softmaxes
from benchmarks.forms import SMALL, Sizes
from benchmarks.fp8_cases import casts, fused_casts
from benchmarks.kernel_cases import adamws, cross_entropies, norms, permutes, swiglus
from benchmarks.session import Case, Session, arguments
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.mesh import World

GROUPS = norms, softmaxes, ropes, swiglus, cross_entropies, casts, fused_casts, adamws, permutes


def cases(sizes: Sizes) -> Iterator[Case]:
    """One after the other; nothing of it is on the GPU but what a form has made and holds."""
    return itertools.chain.from_iterable(group(sizes) for group in GROUPS)


def main(argv: list[str]) -> None:
    """Measure, print, write the JSON."""
    args = arguments(__doc__, argv)
    session = Session(args, World(), ParallelConfig())
    session.run(cases((SMALL if args.small else Sizes)(device=session.device.type)))


if __name__ == "__main__":
    main(sys.argv[1:])

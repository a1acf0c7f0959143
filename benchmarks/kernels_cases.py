"""All cases that kernels.py measures, in the order of its table."""

from collections.abc import Iterator

from benchmarks.kernels_adamw import adamws
from benchmarks.kernels_attention import ropes, softmaxes
from benchmarks.kernels_common import Case, Sizes
from benchmarks.kernels_fp8 import casts
from benchmarks.kernels_fused_fp8 import fused_casts
from benchmarks.kernels_loss import cross_entropies
from benchmarks.kernels_mlp import permutes, swiglus
from benchmarks.kernels_norm import norms

__all__ = ["Case", "Sizes", "cases"]
GROUPS = norms, softmaxes, ropes, swiglus, cross_entropies, casts, fused_casts, adamws, permutes


def cases(sizes: Sizes | None = None) -> Iterator[Case]:
    """One after the other; nothing of it is on the GPU but what a way has made and holds."""
    for group in GROUPS:
        yield from group(sizes or Sizes())

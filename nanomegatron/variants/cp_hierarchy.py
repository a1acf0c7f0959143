"""Other result than `cp.context_attention`, for `--hierarchical-context-parallel-sizes`: two levels of ranks.

a2a+p2p, for two levels of networks: neighbours, inside a machine, exchange heads for tokens; between their
groups, over machines, runs the ring. A group is treated as one rank, and has neighbouring chunks: groups are
zigzag, too, with larger chunks of fewer heads.

    cp 4, groups of 2    chunk   0  1  2  3 | 4  5  6  7
                         rank    0  1  2  3 | 3  2  1  0
                         group   0  0  1  1 | 1  1  0  0

The result is another than the plain ring's by rounding: its steps are others. Each rank sends what a2a sends
over its neighbours, then what p2p sends over groups. Attention between groups is any function of one level:
the plain ring, `fast/ring.py`, or for a window that of `cp_windows.py`; documents come as `cp_documents.py`
cuts them. (LoongTrain, arXiv 2406.18485; Megatron-LM. tests/test_cp.py)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from nanomegatron.cp import SequenceShard, ulysses_attention
from nanomegatron.ops.attention import Mask


@dataclass(frozen=True)
class TwoLevels:
    """`SelfAttention.context_attention` over `axis.levels`.

    between: attention over one level, for groups as its ranks. Layers that communicate otherwise than by
    a2a+p2p take only it.
    """

    between: Callable[..., torch.Tensor]

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shard: SequenceShard,
        layer: int,
        mask: Mask,
        backend: str,
        fused_softmax: bool = True,
    ) -> torch.Tensor:
        """Compute causal attention as `cp.context_attention`; communicates over both levels.

        q `[s/cp, b, n, d]`, k, v `[s/cp, b, g, d]` -> `[s/cp, b, n*d]`
        """
        if shard.types[layer] != "a2a+p2p":
            return self.between(q, k, v, shard, layer, mask, backend, fused_softmax)
        inner, _ = shard.axis.levels
        first = shard.axis.rank - inner.rank
        order = shard.cached(SequenceShard.order_of, range(first, first + inner.size))
        over_groups = partial(
            self.between,
            shard=shard.cached(groups_of),
            layer=layer,
            mask=mask,
            backend=backend,
            fused_softmax=fused_softmax,
        )
        return ulysses_attention(q, k, v, inner, order, over_groups)


def groups_of(shard: SequenceShard) -> SequenceShard:
    """Return the same row over the outer level, whose ranks are groups: the chunks of a group are one."""
    inner, outer = shard.axis.levels
    bounds = shard.bounds[..., :: inner.size]
    return replace(shard, axis=outer, bounds=bounds, types=["p2p"] * len(shard.types))

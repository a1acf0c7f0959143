"""Other result than `cp.context_attention`, for `--window-size`: a layer whose queries see the nearest keys.

A query sees its own key and the `window` before it. A layer with a window gathers keys in place of passing
them round, and each of a rank's chunks attends once:

    chunk of queries             begin ......... end       one causal call, with the window
    its keys    begin - window ................. end       not before the row (or the document) begins

All-to-all attention has whole rows, and takes the window as one process does. Two levels of ranks gather
between groups (`cp_hierarchy.py`). (Windows: Mistral, arXiv 2310.06825. tests/test_cp.py; steps:
tests/test_cp_shard.py)
"""

from dataclasses import replace

import torch

from nanomegatron.cp import AttentionBlock, GatherFunction, SequenceShard, context_attention
from nanomegatron.ops.attention import Block, Mask
from nanomegatron.variants.cp_documents import DocumentShard


def windowed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shard: SequenceShard,
    layer: int,
    mask: Mask,
    backend: str,
    fused_softmax: bool = True,
) -> torch.Tensor:
    """Compute attention within mask.window; arguments, result and communication as of `context_attention`.

    q `[s/cp, b, n, d]`, k, v `[s/cp, b, g, d]` -> `[s/cp, b, n*d]`; p2p communicates as allgather.
    """
    if shard.types[layer] == "a2a":
        return context_attention(q, k, v, shard, layer, mask, backend, fused_softmax)
    blocks = shard.cached(window_blocks, mask.window)
    return GatherFunction.apply(q, k, v, shard.axis, blocks, shard.row_order, backend).flatten(2)


def window_blocks(shard: SequenceShard, window: int) -> list[AttentionBlock]:
    """Return blocks, as `SequenceShard.gathered_blocks`, for keys in the windows of this rank's queries."""
    if isinstance(shard, DocumentShard):
        return shard.blocks_within(window)
    return [
        replace(x, keys=slice(max(0, x.keys.start - window), x.keys.stop), kind=Block(True, window))
        for x in shard.gathered_blocks
        if x.kind.causal  # each chunk with its own keys
    ]

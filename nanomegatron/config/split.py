"""Which layers each stage of a pipeline has.

    Llama-3-8B: 32 layers, 4 pipeline ranks                     layers of the ranks    busiest, in layers
    even                                                        8 8 8 8                10.4
    by cost, the output layer being worth 2.4 layers            9 9 8 6                 9.0
    the same, 2 virtual stages per rank: 0 to 3, then 4 to 7    5 5 4 4, 4 4 4 2        9.0

All ranks wait for the busiest one. --pipeline-model-parallel-layout gives any other split. The even split and
its four settings are Megatron's. Some versions of Megatron dropped layers that did not divide evenly: here
that is an error.
"""

import re
from functools import lru_cache
from itertools import accumulate, chain

from nanomegatron.config.parallel import FLOPS, LAYOUT, ParallelConfig
from nanomegatron.schedules import embedding_ranks, owners, placement

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
MOST_LETTERS = 100_000


def stage_ranges(parallel: ParallelConfig, num_layers: int, head: float = 1.0) -> list[range]:
    """Return the layers of each pipeline stage; `parallel` is of a resolved config.

    head: the cost of the output layer in layers, for --pipeline-split flops.

    Raises ValueError, with a fix, if the layers do not divide by the stages.
    """
    return split_layers(
        num_layers,
        placement(parallel.schedule, parallel.pipeline_model_parallel_size, parallel.chunks),
        first=parallel.decoder_first_pipeline_num_layers,
        last=parallel.decoder_last_pipeline_num_layers,
        embedding=parallel.account_for_embedding_in_pipeline_split,
        loss=parallel.account_for_loss_in_pipeline_split,
        head=head if parallel.pipeline_split == "flops" else None,
        layout=parallel.pipeline_model_parallel_layout,
    )


def split_layers(
    num_layers: int,
    placed: list[list[int]],
    *,
    first: int | None = None,
    last: int | None = None,
    embedding: bool = False,
    loss: bool = False,
    head: float | None = None,
    layout: str | None = None,
) -> list[range]:
    """Return the layers of each stage, in order; a stage may have none.

    placed: `schedules.placement`. Layers are divided among ranks, then among a rank's virtual stages.
    first, last: layers on the rank of the first and of the last stage; the other ranks share the rest.
    embedding, loss: count as a layer each, so that the first and the last stage have one layer less.
    head: the cost of the output layer in layers. Each layer then goes to the rank with the least cost so far.

    layout: --pipeline-model-parallel-layout, which names the layers of each stage.

    Raises ValueError, with a fix, if layers do not divide or a rank has no work.
    """
    if layout is not None:
        sizes = layout_sizes(layout)
        if sum(sizes) != num_layers:
            raise ValueError(f"{LAYOUT} {layout}: has {sum(sizes)} layers (t), not --num-layers {num_layers}")
        for rank in set(range(len(placed))) - set(embedding_ranks(placed)):
            if not any(sizes[stage] for stage in placed[rank]):
                raise ValueError(f"{LAYOUT} {layout}: leaves nothing for pipeline rank {rank}")
    elif head is None:
        counts = _even(num_layers, embedding + loss, placed, (first, last))
        sizes = [counts[rank] // len(placed[rank]) for _, rank in sorted(owners(placed).items())]
        sizes[0] -= embedding
        sizes[-1] -= loss
    else:
        sizes = _by_cost(num_layers, tuple(map(tuple, placed)), head)
    assert sum(sizes) == num_layers
    return [range(end - size, end) for end, size in zip(accumulate(sizes), sizes)]


def layout_sizes(layout: str) -> list[int]:
    """Layers of each stage of --pipeline-model-parallel-layout: "Ett|(t|)*2L" -> [2, 1, 1, 0].

    Parsed as in Megatron: "|" ends a stage, commas are ignored, (...)*n is expanded first, then a letter*n.

    Raises ValueError for what Megatron refuses, and for "m": there is no multi-token prediction.
    """
    text = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d{1,6})", r"(.)\*(\d{1,6})"):
        if sum(len(part) * int(times) for part, times in re.findall(repeated, text)) > MOST_LETTERS:
            raise ValueError(f"{LAYOUT} {layout:.60}: is longer than {MOST_LETTERS} layers and stages")
        text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
    if unknown := re.search("[^EtL|]", text):
        why = "there is no multi-token prediction" if unknown[0] == "m" else "must be E, t, L, | or (...)*n"
        raise ValueError(f"{LAYOUT} {layout:.60}: {unknown[0]!r}: {why}")
    if not re.fullmatch("E[t|]*L", text):
        raise ValueError(f"{LAYOUT} {layout:.60}: must begin with its only E and end with its only L")
    return [stage.count("t") for stage in text.split("|")]


def _even(
    num_layers: int, more: int, placed: list[list[int]], given: tuple[int | None, int | None]
) -> list[int]:
    """Return the layers of each rank, and `more` that count as layers; given: for the first and last rank."""
    ranks, chunks, ends = len(placed), len(placed[0]), embedding_ranks(placed)
    if given[1] is not None and ends[0] == ends[1]:
        raise ValueError(f"{LAST} {given[1]}: the last stage is on rank {ends[1]}, as the first; use {FIRST}")
    words = " ".join(f"{name} {count}" for name, count in zip((FIRST, LAST), given) if count is not None)
    fixed = {rank: count for rank, count in zip(ends, given) if count is not None}
    if any(count < 1 or count % chunks for count in fixed.values()):
        raise ValueError(f"{words}: must be a multiple of the {chunks} pieces of a pipeline rank")
    rest, left = ranks - len(fixed), num_layers + more - sum(fixed.values())
    if not rest and left:
        raise ValueError(f"--num-layers {num_layers}: {words} make {num_layers - left}; leave one out")
    unit = max(1, rest * chunks)
    if left % unit or rest and left < 1:
        counted = f"--num-layers {num_layers}" + f" + {more}" * bool(more) + f" less {words}" * bool(words)
        by = f"{rest} pipeline ranks" + f" x {chunks} pieces" * (chunks > 1)
        below = max(left, 0) // unit * unit
        near = " or ".join(str(num_layers + n - left) for n in (below, below + unit) if n)
        other = f", or {FLOPS}" * (not words and num_layers >= ranks)
        raise ValueError(f"{counted}: must be a multiple of {by}; nearest --num-layers {near}{other}")
    return [fixed.get(rank, left // max(1, rest)) for rank in range(ranks)]


@lru_cache(maxsize=256)
def _by_cost(num_layers: int, placed: tuple[tuple[int, ...], ...], head: float) -> list[int]:
    """Return the layers of each stage: divided among the ranks, then among the stages of each rank."""
    last = max(map(max, placed))
    starts = [[head if stage == last else 0.0 for stage in stages] for stages in placed]
    counts = _share_out(num_layers, [sum(start) for start in starts])
    for rank, (count, start) in enumerate(zip(counts, starts)):
        if count + sum(start) == 0:
            fix = f"use --pipeline-model-parallel-size {num_layers + 1} or less"
            nothing = f"leave nothing for pipeline rank {rank} of {len(placed)}"
            raise ValueError(f"--num-layers {num_layers}: {nothing}; {fix}")
    shares = [_share_out(count, start) for count, start in zip(counts, starts)]
    return [count for _, count in sorted(zip(chain(*placed), chain(*shares)))]


def _share_out(layers: int, loads: list[float]) -> list[int]:
    """Give each layer to the entry with the least load (the first of equals) -> layers of each entry."""
    counts = [0] * len(loads)
    for _ in range(layers):
        counts[min(range(len(loads)), key=lambda i: loads[i] + counts[i])] += 1
    return counts

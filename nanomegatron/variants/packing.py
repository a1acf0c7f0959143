"""Other result than `step.build_loaders`, for `--dynamic-context-parallel`: which ranks get which documents.

Documents are concatenated into *packs*; a group of ranks shards a pack as one row (`cp.py`):

    cp 4       rank 0   1   2   3
    fixed      [a   a   a   a]  [b c   b c   b c   b c]  [d ...      every pack over all of cp
    dynamic    [a   a   a   a]                                       a long document over all
               [b   b] [c   c]                                       shorter ones over the fewest
               [d e][f] [g] [h i j]                                  that hold them: less communication

A group has 1, 2, 4, ... neighbouring ranks of one replica, and takes packs of up to `limit` tokens per rank.
Each rank processes the packs of large groups before those of small ones. So the ranks of a group have
processed the same packs before and arrive together: no rank waits within a step, and no two packs wait for
each other.

Documents are assigned in order of length, longest first, each to the smallest groups that can hold it, and of
these to the least busy one. If that group would exceed its share of the batch by more than SLACK, larger ones
are tried, and the group that would finish first gets it. The plan is a function of the arguments, so every
rank computes the same one. (The idea is that of Megatron-LM's hybrid_cp_schedule.
tests/variants/test_document_packs.py)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nanomegatron.config.settings import Config, TransformerConfig
from nanomegatron.plan.flops import flops_per_iteration

# How much longer a FLOP of attention takes than one of a matmul: on an H200 torch's flash attention reaches
# 290 TFLOP/s of 650, and computes seven products where six are counted.
ATTENTION = 2.5
SLACK = 1.02  # times the least possible load of the busiest rank: below this no document gets more ranks


@dataclass(frozen=True)
class Ranks:
    """The ranks that share the work, numbered cp fastest, and the tokens of a pack that each may hold."""

    dp: int
    cp: int
    limit: int  # maximum tokens of a pack on one rank, rounded up to a multiple of `align`
    align: int = 1  # must divide a rank's tokens of each pack
    dynamic: bool = False  # groups of any size up to cp; else all of cp

    @classmethod
    def from_config(cls, config: Config) -> "Ranks":
        """The ranks of a resolved config."""
        parallel, precision = config.parallel, config.precision
        cp = parallel.context_parallel_size
        unit = config.sequence_cut * (precision.fp8_multiple if precision.fp8_format else 1)
        limit = parallel.max_seqlen_per_dp_cp_rank or math.ceil(config.data.seq_length / cp)
        align = math.lcm(unit, 2 if cp > 1 else 1)  # a rank's two chunks are equal
        return cls(parallel.data_parallel_size or 1, cp, limit, align, parallel.dynamic_context_parallel)

    @property
    def sizes(self) -> list[int]:
        """The possible numbers of ranks in a group, ascending."""
        powers = (1 << i for i in range(self.cp.bit_length())) if self.dynamic else ()
        return [n for n in powers if n < self.cp and self.cp % n == 0] + [self.cp]

    def tokens(self, size: int, length: int) -> int:
        """Tokens of a pack of `length` tokens on `size` ranks with padding; at least one unit."""
        unit = size * self.align
        return max(-(-length // unit), 1) * unit

    def room(self, size: int) -> int:
        """Maximum tokens of a pack on a group of `size` ranks."""
        return self.tokens(size, size * self.limit)


@dataclass(frozen=True)
class Pack:
    """Documents, by number in the batch, and the `size` ranks from `first` on that work on them."""

    documents: tuple[int, ...]
    first: int
    size: int

    def has(self, rank: int) -> bool:
        """Whether `rank` works on this pack."""
        return self.first <= rank < self.first + self.size


def cost(model: TransformerConfig, padded_vocab_size: int, length: int) -> float:
    """The time of a document, forward and backward, in FLOPs of matmuls."""
    whole, token = (flops_per_iteration(model, padded_vocab_size, n, 1) for n in (length, 1))
    return length * token + ATTENTION * (whole - length * token)


def plan(lengths: Sequence[int], costs: Sequence[float], ranks: Ranks) -> list[Pack]:
    """Return all packs of a batch of documents of `lengths` tokens, in the order in which ranks process them.

    costs: the time of each document on one rank, in any unit; n ranks take 1/n of it. Every rank has at least
    one pack, if only of padding; without `dynamic` all ranks have the same number.
    Raises ValueError for a document that is too long for cp ranks.
    """
    packs = [
        Pack(documents, group * size, size)
        for size, group, members in assign_documents(
            np.asarray(lengths), np.asarray(costs, np.float64), ranks
        )
        for documents in _filled(members, lengths, ranks.room(size))
    ]
    unit = 1 if ranks.dynamic else ranks.cp
    firsts = range(0, ranks.dp * ranks.cp, unit)
    counts = [sum(pack.has(first) for pack in packs) for first in firsts]
    least = 1 if ranks.dynamic else max(counts)
    padding = [
        Pack((), first, unit) for first, n in zip(firsts, counts, strict=True) for _ in range(n, least)
    ]
    return sorted(packs + padding, key=lambda pack: -pack.size)  # stable


def assign_documents(
    lengths: np.ndarray, costs: np.ndarray, ranks: Ranks
) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (size, index among the groups of that size, documents) of each group with documents."""
    if lengths.max() > ranks.room(ranks.cp):
        raise ValueError(
            f"a document of {lengths.max()} tokens is too long for --context-parallel-size {ranks.cp} x "
            f"--max-seqlen-per-dp-cp-rank {ranks.limit}; raise one of the two"
        )
    busy = np.zeros(ranks.dp * ranks.cp)
    least = max(math.fsum(costs) / len(busy), costs.max() / ranks.cp)  # no plan ends earlier
    most = SLACK * least
    groups: dict[tuple[int, int], list[int]] = {}
    for i in np.argsort(-lengths, kind="stable").tolist():
        choices = []
        for size in (n for n in ranks.sizes if lengths[i] <= ranks.room(n)):
            ends = busy.reshape(-1, size).max(1)
            group = int(ends.argmin())
            choices.append((ends[group] + costs[i] / size, size, group))
            if choices[-1][0] <= most:
                break
        end, size, group = min(choices)
        busy[group * size : (group + 1) * size] += costs[i] / size
        most = max(most, end)
        groups.setdefault((size, group), []).append(i)
    for (size, group), members in sorted(groups.items()):
        yield size, group, members


def _filled(documents: list[int], lengths: Sequence[int], room: int) -> list[tuple[int, ...]]:
    """Fill few packs with documents, longest first: each goes to the first pack with room for it."""
    packs: list[list[int]] = []
    free: list[int] = []
    for i in documents:
        place = next((p for p, left in enumerate(free) if left >= lengths[i]), len(packs))
        if place == len(packs):
            packs.append([])
            free.append(room)
        packs[place].append(i)
        free[place] -= int(lengths[i])
    return [tuple(pack) for pack in packs]

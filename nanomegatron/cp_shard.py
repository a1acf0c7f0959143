"""Which tokens of a row each context-parallel rank has, and what its attention has to do.

A causal query sees what comes before it, so equal slices would be unequal work. Each document (the whole row,
where documents are not told) is cut into 2 * cp chunks, and rank r has the chunks r and 2cp - 1 - r of it:

    cp 4     chunk   0  1  2  3 | 4  5  6  7           zigzag: every rank's queries see as many keys
             rank    0  1  2  3 | 3  2  1  0           a rank's tokens are in the order of the row

What is left when a document's tokens are divided by 2 * cp goes one by one to the ranks, each document going
on where the one before it stopped: no rank has a token more than another and nothing is padded.

Two ranks' chunks p, 2cp-1-p (queries) and j, 2cp-1-j (keys) meet in one of three ways, and in none of them is
a score computed to be thrown away:

    j = p        both know the same chunks                  causal, as if the two chunks were one sequence
    j < p        only chunk j comes before the queries      all queries x the first half of the keys
    j > p        chunk p is before all of these keys        the second half of the queries x all keys

A *step* is such a meeting: some queries, some keys, and the block of scores between them. In a *round* two
ranks' keys have come; if both are met in the same way it is one step. Ranks next to each other, taken as
one, have chunks next to each other: groups of them are cut zigzag, too, with fewer, longer chunks. (Zigzag:
Megatron-LM's context parallelism; arXiv 2310.01889 for the ring, 2407.21783 for documents)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nanomegatron.comm import Leg, Legs
from nanomegatron.mesh import Axis
from nanomegatron.ops.attention_blocks import Block

ALL = slice(None)
ROUND = 2  # others whose keys come at a time
Selection = slice | torch.Tensor  # of dim 0: what there is, or the numbers of the chosen ones


class Step(NamedTuple):
    """Attention of some queries to some keys; `rows`: where `ops_merge.merge_rows` puts what they get."""

    queries: Selection
    keys: Selection
    block: Block
    rows: Selection


class Round(NamedTuple):
    """What a rank does with the keys of a few others, in its first round with its own; ranks may be groups.

    Those keys alone come that its queries see, of one rank behind the other: for a step they are a slice.
    """

    steps: list[Step]
    keys: list[Selection]
    """Own ones that go to others, for each leg of theirs."""
    rows: list[Selection]
    """Where `merge_rows` adds the gradients of these."""
    there: Legs
    """Of keys."""
    back: Legs
    """Of their gradients."""


class Shard:
    """This rank's tokens of a row that the ranks of an axis share; `types`: how each layer communicates.

    `places`: int64 `[s/size]`, where in the row they are. What the methods return for a device is made once,
    and copied there without waiting.
    """

    def __init__(
        self, axis: Axis, s: int, types: Sequence[str], cu_seqlens: np.ndarray | None = None
    ) -> None:
        """cu_seqlens: where documents begin; tokens behind the last bound are one more (padding).

        Raises ValueError for a row that does not divide.
        """
        if s % (2 * axis.size):
            raise ValueError(f"{s} tokens do not divide into twice {axis.size} context-parallel chunks")
        self.axis, self.types, self.s, self.told = axis, types, s, cu_seqlens is not None
        bounds = np.array([0, s]) if cu_seqlens is None else np.append(np.asarray(cu_seqlens, np.int64), s)
        self.starts = bounds[:-1]
        self.bounds = self.starts[:, None] + chunk_bounds(np.diff(bounds), axis.size)
        self.places = self.held(axis.rank)
        self._made: dict[tuple, Any] = {}

    def halves(self, rank: int, group: int = 1) -> np.ndarray:
        """Bounds of the two chunks that the rank-th `group` of ranks has of each document: `[docs, 2, 2]`."""
        bounds = self.bounds[:, ::group]
        return np.stack((bounds[:, rank : rank + 2], bounds[:, -2 - rank :][:, :2]), axis=1)

    def held(self, rank: int, group: int = 1) -> np.ndarray:
        """The places in the row, ascending, of the tokens that the rank-th `group` of ranks has."""
        return ranges(*self.halves(rank, group).reshape(-1, 2).T)

    def ring(self, group: int, device: torch.device) -> list[Round]:
        """What this group of ranks does; the keys of `ROUND` others come at a time, of nearer ones first."""

        def make(give: Callable) -> list[Round]:
            size = self.axis.size // group
            rounds = [[0], *(range(i, min(i + ROUND, size)) for i in range(1, size, ROUND))]
            return [self._round(by, group, give) for by in rounds]

        return self._once(("ring", group), device, make)

    def gathered(self, group: int, window: int | None, device: torch.device) -> list[Step]:
        """What this group of ranks does with all keys, in the order of the row."""

        def make(give: Callable) -> list[Step]:
            halves, half = self.halves(self.axis.rank // group, group), self.s * group // self.axis.size // 2
            begin, end = halves.reshape(-1, 2).T
            first = np.repeat(self.starts, 2)
            if window is not None:
                first = np.maximum(first, begin - window)
            if self.told:
                block = _packed(end - begin, end - first, True, window, give)
                seen = end > begin
                return [Step(ALL, give(ranges(first[seen], end[seen])), block, ALL)]
            steps = []
            for i in range(2):
                queries = slice(i * half, (i + 1) * half)
                if window is not None:
                    steps.append(Step(queries, slice(first[i], end[i]), Block(True, window), queries))
                    continue
                steps.append(Step(queries, slice(begin[i], end[i]), Block(True), queries))
                if begin[i]:
                    steps.append(Step(queries, slice(0, begin[i]), Block(), queries))
            return steps

        return self._once(("gathered", group, window), device, make)

    def order(self, group: int, among: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Permutations of the tokens of `among` groups of ranks, laid one after the other.

        The first puts them in the order of the row, the second undoes it. The groups are those around this
        rank: among = 1 is this one alone.
        """

        def make(give: Callable) -> tuple[torch.Tensor, torch.Tensor]:
            first = self.axis.rank // (group * among) * among
            there = np.concatenate([self.held(first + i, group) for i in range(among)])
            order = np.argsort(there)
            return give(order), give(np.argsort(order))

        return self._once(("order", group, among), device, make)

    def _round(self, by: Sequence[int], group: int, give: Callable) -> Round:
        """With the keys of the groups of ranks that are so far before this one."""
        size, own, tokens = self.axis.size // group, self.axis.rank // group, len(self.places) * group

        def seen(queries: int, keys: int) -> slice | np.ndarray:
            return self._sides(queries % size, keys % size, group)[1]

        def leg(to: int, sign: int, i: int) -> Leg:
            """The i-th that ends there: of keys (1), or of gradients of keys that others have seen (-1)."""
            pairs = [(to, to - d) if sign > 0 else (to + d, to) for d in by]
            rows = [len(np.arange(tokens)[seen(*pair)]) for pair in pairs]
            return Leg(sign * by[i], rows[i], (sum(rows[:i]), sum(rows)))

        def legs(sign: int) -> Legs:
            away = [(i, d) for i, d in enumerate(by) if d]
            both = ((leg(own + sign * d, sign, i) for i, d in away), (leg(own, sign, i) for i, _ in away))
            return Legs(*([leg for leg in found if leg.rows] for found in both))

        steps: list[Step] = []
        for i, d in enumerate(by):
            _, rows, (begin, _) = leg(own, 1, i)
            if rows:
                steps.append(self._meet(own, (own - d) % size, slice(begin, begin + rows), group, give))
        if not self.told and all(step.queries == steps[0].queries for step in steps):  # then they are one
            steps = [steps[0]._replace(keys=slice(0, steps[-1].keys.stop))]
        to_others = [keys for d in by if d and len(np.arange(tokens)[keys := seen(own + d, own)])]
        keys = [keys if isinstance(keys, slice) else give(keys) for keys in to_others]
        return Round(steps, keys, [_rows(keys, tokens, give) for keys in to_others], legs(1), legs(-1))

    def _meet(self, own: int, other: int, keys: slice, group: int, give: Callable) -> Step:
        """The queries of one group of ranks and keys of another, which are there."""
        queries, _, lengths = self._sides(own, other, group)
        if lengths is None:
            return Step(queries, keys, Block(own == other), queries)
        block, tokens = _packed(*lengths, own == other, None, give), len(self.places) * group
        chosen = ALL if len(queries) == tokens else give(queries)
        return Step(chosen, keys, block, _rows(queries, tokens, give))

    def _sides(self, own: int, other: int, group: int) -> tuple:
        """Queries of a group of ranks that see keys of another, these keys, and how many of each by document.

        Slices, and None, or where documents are told the numbers of the tokens.
        """

        def make(_: Callable) -> tuple:
            q, k = slice(int(other > own), 2), slice(0, 1 if other < own else 2)  # of the two chunks
            if not self.told:
                half = len(self.places) * group // 2
                return *(slice(half * part.start, half * part.stop) for part in (q, k)), None
            sizes = [np.diff(self.halves(rank, group))[..., 0] for rank in (own, other)]
            lengths = [size[:, part].sum(1) for size, part in zip(sizes, (q, k), strict=True)]
            seen = np.logical_and(*lengths)  # documents of which there are both
            return *(_chosen(size, part, seen) for size, part in zip(sizes, (q, k), strict=True)), lengths

        return self._once(("sides", own, other, group), None, make)

    def _once(self, key: tuple, device: torch.device | None, make: Callable) -> Any:
        def give(x: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            x = torch.from_numpy(x).to(dtype)
            return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x

        if (key, device) not in self._made:
            self._made[key, device] = make(give)
        return self._made[key, device]


def chunk_bounds(lengths: np.ndarray, size: int) -> np.ndarray:
    """Where the chunks of documents begin and end, in each document: `[docs]` -> `[docs, 2 * size + 1]`.

    Sizes differ by one at most; where all lengths together divide by `size`, its ranks have equally much.
    """
    each, extra = np.divmod(np.asarray(lengths, np.int64)[:, None], 2 * size)
    turn = (np.arange(size) - (extra.cumsum(0) - extra)) % size  # the rank's in the dealing out
    first, second = each + (turn < extra), each + (turn < extra - size)
    sizes = np.concatenate((0 * each, first, second[:, ::-1]), axis=1)
    return sizes.cumsum(1)


def ranges(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """begin[0], begin[0] + 1, ..., end[0] - 1, begin[1], ..."""
    sizes = end - begin
    return np.repeat(end - sizes.cumsum(), sizes) + np.arange(sizes.sum())


def _chosen(sizes: np.ndarray, part: slice, seen: np.ndarray) -> np.ndarray:
    """The numbers of a rank's tokens in the chunks `part` of the documents `seen`; sizes `[docs, 2]`."""
    end = sizes.cumsum().reshape(sizes.shape)
    return ranges((end - sizes)[seen, part.start], end[seen, part.stop - 1])


def _packed(q: np.ndarray, k: np.ndarray, causal: bool, window: int | None, give: Callable) -> Block:
    """The block between packed segments of such lengths; where one has no tokens there is none."""
    q, k = q[(q > 0) & (k > 0)], k[(q > 0) & (k > 0)]
    bounds = (give(np.append(0, x.cumsum()), torch.int32) for x in (q, k))
    return Block(causal, window, *bounds, int(q.max()), int(k.max()))


def _rows(chosen: slice | np.ndarray, among: int, give: Callable) -> Selection:
    """Of each of so many tokens its number among the chosen, or -1; a slice is one as it is."""
    if isinstance(chosen, slice):
        return chosen
    rows = np.full(among, -1)
    rows[chosen] = np.arange(len(chosen))
    return give(rows)

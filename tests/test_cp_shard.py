"""How rows are spread over context-parallel ranks: every score computed once, by equal shares."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from nanomegatron.cp import SequenceShard
from nanomegatron.mesh import Axis
from nanomegatron.ops.attention import Mask, ranges
from nanomegatron.variants.cp_documents import DocumentShard, chunk_bounds
from nanomegatron.variants.cp_hierarchy import TwoLevels, groups_of
from nanomegatron.variants.cp_windows import window_blocks

CPU = torch.device("cpu")
ROWS = {  # lengths of documents in rows of 48
    "one": None,
    "forced to one": [48],
    "several": [20, 3, 1, 17, 7],
    "short": [1] * 10 + [2] * 9 + [20],
    "padding behind the last": [30, 5],
    "one without tokens": [24, 0, 24],
}


def shard_of(axis, s, types, cu_seqlens, device=CPU):
    """The shard of a row, or of one that is a pack of documents."""
    if cu_seqlens is None:
        return SequenceShard.of_row(axis, s, types, device)
    return DocumentShard.of_documents(axis, s, types, device, cu_seqlens)


def shards(size, lengths, s=48):
    """One for each rank."""
    cu_seqlens = None if lengths is None else np.cumsum([0, *lengths]).astype(np.int32)
    axes = [Axis("cp", size, rank, tuple(range(size))) for rank in range(size)]
    return [shard_of(axis, s, ("p2p",), cu_seqlens) for axis in axes]


def shards_of_groups(size, group, lengths):
    """One for each group of neighbours, as its first rank has it."""
    found = shards(size, lengths)[::group]
    for i, shard in enumerate(found):
        inner = Axis("cp", group, 0, shard.axis.ranks[i * group :][:group])
        outer = Axis("cp across", size // group, i, shard.axis.ranks[::group])
        shard.axis = replace(shard.axis, levels=(inner, outer))
    return [groups_of(shard) for shard in found]


def scores_of(step, queries, keys, seen):
    """Add the scores of a step to `seen`, `[s, s]`, query by query as its block defines them."""
    queries, keys = (
        torch.from_numpy(x)[at].numpy() for x, at in ((queries, step.queries), (keys, step.keys))
    )
    block = step.kind
    bounds = [[0, len(queries)], [0, len(keys)]]
    if block.cu_q is not None:
        bounds = [block.cu_q.tolist(), block.cu_k.tolist()]
        sizes = np.diff(bounds)
        assert sizes.min() > 0 and [block.max_q, block.max_k] == sizes.max(1).tolist()
        assert (bounds[0][-1], bounds[1][-1]) == (len(queries), len(keys))
    for (q0, q1), (k0, k1) in zip(*(itertools.pairwise(x) for x in bounds), strict=True):
        s, t = q1 - q0, k1 - k0
        hidden = Mask(block.causal, block.window).hidden(1, s, t, CPU)[0, 0].numpy()
        seen[np.ix_(queries[q0:q1], keys[k0:k1])] += ~hidden


def expected_scores(lengths, window=None, s=48):
    ends = np.cumsum(lengths or [s])
    document = np.searchsorted(ends, np.arange(s), side="right")
    hidden = Mask(True, window).hidden(1, s, s, CPU)[0, 0].numpy()
    return (~hidden & (document[:, None] == document[None])).astype(int)


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("size, group", [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (3, 1)])
def test_a_ring_computes_every_score_once(size, group, lengths):
    parts, seen = shards_of_groups(size, group, lengths), np.zeros((48, 48), int)
    for own, shard in enumerate(parts):
        for i, step in enumerate(shard.ring_blocks):
            other = (own - i) % len(parts)
            scores_of(step, shard.token_indices(own), shard.token_indices(other), seen)
    assert (seen == expected_scores(lengths)).all()


@pytest.mark.parametrize("window", [None, 0, 5, 30])
@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("size, group", [(2, 1), (4, 1), (4, 2), (8, 1), (3, 1)])
def test_gathered_keys_give_every_score_once(size, group, lengths, window):
    seen = np.zeros((48, 48), int)
    for shard in shards_of_groups(size, group, lengths):
        steps = shard.gathered_blocks if window is None else window_blocks(shard, window)
        for step in steps:
            scores_of(step, shard.positions, np.arange(48), seen)
    assert (seen == expected_scores(lengths, window)).all()


def test_layers_with_other_windows_have_other_steps():
    """Of one row: a shard keeps the plan of each."""
    shard = shards(2, ROWS["several"])[0]
    first, second = (shard.cached(window_blocks, window) for window in (5, 9))
    assert first[0].kind.window == 5 and second[0].kind.window == 9
    assert shard.cached(window_blocks, 5) is first


def test_layers_share_the_plans_of_a_hierarchy():
    """Of one microbatch."""
    x = torch.zeros(24, 1, 2, 8)
    groups = []

    def between(q, k, v, shard, **_):
        groups.append(shard)
        return q.flatten(2)

    shard = shards(2, ROWS["several"])[0]
    shard.types = ("a2a+p2p", "a2a+p2p")
    shard.axis = replace(shard.axis, levels=(Axis.single("cp"), shard.axis))
    for layer in (0, 1):
        TwoLevels(between)(x, x, x, shard, layer, Mask(), "flash")
    assert groups[0] is groups[1] and len(shard.plans) == 2


@pytest.mark.parametrize("lengths", [None, ROWS["several"]])
@pytest.mark.parametrize("size, group", [(4, 2), (8, 2), (8, 4), (4, 4)])
def test_a_group_has_the_tokens_of_its_ranks(size, group, lengths):
    ranks = shards(size, lengths)
    for i, shard in enumerate(shards_of_groups(size, group, lengths)):
        each = [rank.positions for rank in ranks[i * group :][:group]]
        assert shard.positions.tolist() == sorted(np.concatenate(each))


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_tokens_are_shared_out_equally_and_in_order(size, lengths):
    places = [shard.positions for shard in shards(size, lengths)]
    assert all(len(x) == 48 // size and (np.diff(x) > 0).all() for x in places)
    assert sorted(np.concatenate(places)) == list(range(48))


def test_work_is_equal():
    """Scores of a rank: of one document equal, of many within some of each document's ends."""
    lengths = [1500, 40, 333, 900, 7, 1316]
    for documents, spread in ((None, 0), (lengths, 0.005)):
        work = [
            expected_scores(documents, s=4096)[shard.positions].sum() for shard in shards(8, documents, 4096)
        ]
        assert max(work) - min(work) <= spread * np.mean(work)
    plain = [expected_scores(None, s=4096)[i * 512 : (i + 1) * 512].sum() for i in range(8)]
    assert max(plain) > 1.8 * np.mean(plain), "equal slices are not"


def test_no_score_is_computed_to_be_thrown_away():
    """Blocks are full but for the one of a rank's own keys, which is causal."""
    for shard in shards(4, None):
        own, *others = shard.ring_blocks
        assert own.kind.causal and not any(step.kind.causal for step in others)
        sizes = [len(shard.positions[step.queries]) * (step.keys.stop - step.keys.start) for step in others]
        assert sizes == [12 * 12 / 2] * 3


@pytest.mark.parametrize("lengths", [None, [20, 3, 1, 17, 7]])
def test_orders_of_gathered_tokens(lengths):
    for shard in [*shards(4, lengths), *shards_of_groups(4, 2, lengths)]:
        size = shard.axis.size
        for ranks in (range(size), range(size // 2), range(size // 2, size), range(1)):
            there = np.concatenate([shard.token_indices(rank) for rank in ranks])
            order, inverse = shard.order_of(ranks)
            assert (np.diff(there[order]) > 0).all() and (there[order][inverse] == there).all()
        assert torch.equal(shard.row_order.to_row, shard.order_of(range(size)).to_row)
        assert shard.row_order is shard.row_order, "made once"


def test_chunks_of_any_lengths():
    chance = np.random.default_rng(3)
    for size in (1, 2, 3, 4, 8):
        lengths = chance.integers(0, 60, 50)
        lengths[-1] += -lengths.sum() % size
        sizes = np.diff(chunk_bounds(lengths, size))
        assert (sizes.sum(1) == lengths).all() and (np.ptp(sizes, axis=1) <= 1).all()
        held = sizes[:, :size] + sizes[:, size:][:, ::-1]
        assert (held.sum(0) == lengths.sum() // size).all()
    assert ranges(np.array([3, 9, 5]), np.array([5, 9, 8])).tolist() == [3, 4, 5, 6, 7]


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="42 tokens do not divide into 2 x 4 context-parallel chunks"):
        shards(4, None, 42)

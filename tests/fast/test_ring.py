"""The fast ring: plans that fit together, and messages or shared memory to the bit alike."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from nanomegatron.config.settings import ParallelConfig
from nanomegatron.fast import transfers
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.ring import Ring, plan_rounds
from nanomegatron.fast.transfers import start_transfers
from tests.peer_files import CPU, FileMemory
from tests.spmd import run_spmd, spmd
from tests.test_cp import CASES, FORMS, on_a_rank
from tests.test_cp_shard import ROWS, expected_scores, scores_of, shards, shards_of_groups


def rounds_of(size, group, lengths):
    """The rounds of each group of ranks."""
    return [plan_rounds(shard) for shard in shards_of_groups(size, group, lengths)]


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("size, group", [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (3, 1)])
def test_rounds_compute_every_score_once(size, group, lengths):
    rings, seen = rounds_of(size, group, lengths), np.zeros((48, 48), int)
    tokens = [shard.positions for shard in shards_of_groups(size, group, lengths)]
    for own, ring in enumerate(rings):
        for i, this in enumerate(ring):
            keys = [tokens[own]] * (i == 0)
            for transfer in this.there.recvs:
                other = (own - transfer.by) % len(rings)
                sender = rings[other][i]
                sent = sender.keys[[x.by for x in sender.there.sends].index(transfer.by)]
                keys.append(tokens[other][sent].reshape(-1))
            for step in this.steps:
                scores_of(step, tokens[own], np.concatenate(keys), seen)
    assert (seen == expected_scores(lengths)).all()


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("size, group", [(2, 1), (4, 1), (4, 2), (8, 1), (3, 1)])
def test_transfers_fit_together(size, group, lengths):
    """What one sends another takes, at the place and of the size that it says; gradients likewise."""
    rings = rounds_of(size, group, lengths)
    n, tokens = len(rings), np.arange(48 * group // size)
    for own, ring in enumerate(rings):
        assert not any((*ring[0].there, *ring[0].back)) and not ring[0].keys
        for i, this in enumerate(ring):
            for kind in ("there", "back"):
                sends, recvs = getattr(this, kind)
                assert all(x in getattr(rings[(own + x.by) % n][i], kind).recvs for x in sends)
                assert all(x in getattr(rings[(own - x.by) % n][i], kind).sends for x in recvs)
            assert [x.by for x in this.there.sends] == [-x.by for x in this.back.recvs]
            for transfer, keys, places in zip(this.back.recvs, this.keys, this.key_places, strict=True):
                places = places if isinstance(places, slice) else places.argsort()[(places < 0).sum() :]
                sent, added = (tokens[x].reshape(-1) for x in (keys, places))
                assert 0 < transfer.rows == len(sent) and (added == sent).all()


def test_two_ranks_that_are_met_alike_are_one_step():
    for shard in shards(4, None):
        steps = [step for this in plan_rounds(shard) for step in this.steps]
        assert len(steps) == {0: 3, 1: 4, 2: 3, 3: 3}[shard.axis.rank]
        sizes = [
            len(shard.positions[step.queries]) * (step.keys.stop - step.keys.start) for step in steps[1:]
        ]
        assert sum(sizes) == 3 * 12 * 12 / 2


def test_a_shard_is_planned_once_and_forgotten_with_it():
    ring, (shard, other) = Ring(PeerAccess({})), shards(2, [20, 28])
    first = ring.rounds(shard)
    assert ring.rounds(shard) is first is not ring.rounds(other)
    assert len(ring.plans) == 2
    del shard
    assert len(ring.plans) == 1


def by_memory(mesh, names, folder):
    """Cases one after the other, by messages and then in memory that the ranks share."""
    expected = [on_a_rank(mesh, "p2p", CASES[name], "fast") for name in names]
    folders = iter((folder / "keys", folder / "gradients"))

    def files(axis, device, kind, slots):
        (place := next(folders)).mkdir(exist_ok=True)
        return FileMemory(axis, kind, place, slots)

    shared = {"fast": Ring(PeerAccess({"cp": ""}))}
    with patch.object(transfers, "PeerMemory", files), patch.dict(FORMS, shared):
        found = [on_a_rank(mesh, "p2p", CASES[name], "fast") for name in names]  # before one is looked at
    for name, (_, ours, bytes_), (_, theirs, sent) in zip(names, found, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True)), name
        assert bytes_ == sent


RINGS = ["grouped", "heads of 256", "bf16", "documents", "grouped", "unfused"]


@pytest.mark.parametrize(
    "size, names",
    [(2, RINGS), (4, RINGS), (8, RINGS[:1]), pytest.param(8, RINGS, marks=pytest.mark.full)],
    ids=["2", "4", "8", "8 all"],
)
def test_a_ring_in_shared_memory_is_that_of_messages(size, names, tmp_path):
    """To the bit, as memory is used again for what is larger, smaller and of other types."""
    run_spmd(by_memory, size, names, tmp_path, cp=size)


@spmd(world=2, cp=2, dynamic_context_parallel=True)
def test_groups_that_come_and_go_share_no_memory(mesh):
    """torch would wait for a rank that has met fewer others."""
    peers = PeerAccess.build(mesh, ParallelConfig(context_parallel_size=2, dynamic_context_parallel=True))
    assert "change from batch to batch" in peers.error(mesh.cp)
    assert peers.error(mesh.tp) == "no GPU"
    assert peers.ring(mesh.cp, CPU, "keys", 0, 1).func is start_transfers

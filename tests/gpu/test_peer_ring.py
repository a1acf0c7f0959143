"""Tensors sent round a ring by copy engines, with every rank late at another place."""

import pytest
import torch

from nanomegatron.cp_shard import Shard
from nanomegatron.fast.peer_memory import PeerRing, ring_shift
from tests.gpu.ranks import all_right, dawdler, needs_two, run_on_gpus

SIZES = [(3 * 2**17, torch.bfloat16), (2**19, torch.float32), (100, torch.bfloat16), (2**19, torch.bfloat16)]


def storm(mesh, device):
    """Two rings at a time, as keys and their gradients, the legs of which are of different lengths.

    What has come by the first is read at once, by the second when all has. A stale element is another number.
    """
    (size, rank), dawdle, flags = (mesh.cp.size, mesh.cp.rank), dawdler(mesh.rank), []
    for turn in range(60):
        s, dtype = SIZES[turn % len(SIZES)]
        own = torch.full((2, s, 2), rank + turn % 7, device=device, dtype=dtype).unbind(0)
        rounds = Shard(mesh.cp, size * s, ("p2p",)).ring(1, device)
        how = mesh.cp, device
        keys = ring_shift(*how, "keys", 4 * own[0].nbytes, 1)
        back = ring_shift(*how, "gradients of keys", 4 * own[0].nbytes, len(rounds) - 1)
        assert isinstance(keys.func.__self__, PeerRing) and keys.func.__self__ is not back.func.__self__
        kept = []
        for this in rounds[1:]:
            dawdle()
            coming = keys([[x[chosen] for x in own] for chosen in this.keys], own, this.there)
            dawdle()
            expected = [((rank - leg.by) % size + turn % 7, *leg[1:]) for leg in this.there.coming]
            found = coming.wait()
            flags += [same(x, expected) for x in found]
            answers = [x * size + rank for x in found]
            parts = [[x[begin : begin + rows] for x in answers] for _, rows, (begin, _) in expected]
            pending = back(parts, own, this.back)
            dawdle()
            sent = rank + turn % 7
            values = [(sent * size + (rank - leg.by) % size, *leg[1:]) for leg in this.back.coming]
            kept.append((pending.wait(), values))
        flags += [same(x, values) for parts, values in kept for x in parts]
    all_right(flags)


def same(x, legs):
    """Whether the rows of each leg have its value; a leg: value, rows, (begin, rows of all)."""
    expected = torch.cat([torch.full((rows, 2), value, device=x.device) for value, rows, _ in legs])
    return (x == expected).all()


@needs_two
@pytest.mark.parametrize("world", [2, 4])
def test_late_ranks_hand_on_in_turn(world):
    run_on_gpus(world, storm, context_parallel_size=world)

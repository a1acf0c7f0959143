"""Tensors sent round a ring by copy engines, with every rank late at another place."""

import pytest
import torch

from nanomegatron.comm_symmetric import PeerRing, ring_shift
from nanomegatron.ops_merge import MOST
from tests.gpu.ranks import all_right, dawdler, needs_two, run_on_gpus

SIZES = [(3 * 2**18, torch.bfloat16), (2**20, torch.float32), (100, torch.bfloat16), (2**20, torch.bfloat16)]


def storm(mesh, device):
    """Two rings at a time, as keys and their gradients, of which ranks send parts of different sizes.

    What has come by the first is read at once, by the second when all has. A stale element is another number.
    """
    (size, rank), dawdle, flags = (mesh.cp.size, mesh.cp.rank), dawdler(mesh.rank), []
    for turn in range(60):
        n, dtype = SIZES[turn % len(SIZES)]
        like = [torch.empty(n, 2, device=device, dtype=dtype) for _ in range(2)]
        keys, back = (ring_shift(mesh.cp, like, *how) for how in (("keys",), ("gradients of keys", MOST)))
        assert isinstance(keys.func.__self__, PeerRing) and keys.func.__self__ is not back.func.__self__
        kept = []
        for by in range(1, size):
            dawdle()
            coming = keys([x.fill_(rank + turn % 7) for x in like], by, n)
            dawdle()
            flags += [(x == (rank - by) % size + turn % 7).all() for x in coming.wait()]
            found = [x[: n // (1 + rank % 2)] * size + by for x in like]
            other = (rank + by) % size
            pending = back(found, -by, n // (1 + other % 2))
            dawdle()
            kept.append((pending.wait(), (other + turn % 7) * size + by))
        flags += [(x == value).all() for parts, value in kept for x in parts]
    all_right(flags)


@needs_two
@pytest.mark.parametrize("world", [2, 4])
def test_late_ranks_hand_on_in_turn(world):
    run_on_gpus(world, storm, context_parallel_size=world)

"""Tensors handed on around a ring by copy engines, with every rank late at another place."""

import pytest
import torch

from nanomegatron.comm_symmetric import PeerRing, ring_shift
from tests.gpu.ranks import all_right, dawdler, needs_two, run_on_gpus

SIZES = [(3 * 2**18, torch.bfloat16), (2**20, torch.float32), (100, torch.bfloat16), (2**20, torch.bfloat16)]


def storm(mesh, device):
    """Two rings at a time, as keys and their gradients: what has come is read, added to and handed on.

    Small whole numbers, so that every sum is exact in both types; a stale element is another number.
    """
    axis, dawdle, flags = mesh.cp, dawdler(mesh.rank), []
    rings = [ring_shift(axis, device, name) for name in ("keys", "gradients of keys")]
    assert all(isinstance(ring.__self__, PeerRing) for ring in rings)
    for step in range(60):
        n, dtype = SIZES[step % len(SIZES)]
        keys = torch.full((n,), axis.rank + step % 7, device=device, dtype=dtype)
        sums = torch.zeros(n, device=device)
        for hop in range(axis.size):
            dawdle()
            coming = [ring(x) for ring, x in zip(rings, (keys, sums.add_(1)), strict=True)]
            dawdle()
            keys, sums = (pending.wait() for pending in coming)
            flags.append((keys == (axis.rank - hop - 1) % axis.size + step % 7).all())
            flags.append((sums == hop + 1).all())
    all_right(flags)


@needs_two
@pytest.mark.parametrize("world", [2, 4])
def test_late_ranks_hand_on_in_turn(world):
    run_on_gpus(world, storm, context_parallel_size=world)

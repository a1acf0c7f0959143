"""Tensors handed on around a ring by copy engines, with every rank late at another place."""

import random
import sys
import time
import traceback

import pytest
import torch

from nanomegatron.comm_symmetric import PeerRing, ring_shift
from nanomegatron.config import ParallelConfig
from nanomegatron.mesh import Mesh
from nanomegatron.mesh_launch import launch

GPUS = min(4, torch.cuda.device_count())
SIZES = [(3 * 2**18, torch.bfloat16), (2**20, torch.float32), (100, torch.bfloat16), (2**20, torch.bfloat16)]


def storm(axis, device):
    """Two rings at a time, as keys and their gradients: what has come is read, added to and handed on.

    Small whole numbers, so that every sum is exact in both types; a stale element is another number.
    """
    dice = random.Random(100 + axis.rank)
    rings = [ring_shift(axis, device, name) for name in ("keys", "gradients of keys")]
    assert all(isinstance(ring.__self__, PeerRing) for ring in rings)
    flags = []

    def dawdle():
        torch.cuda._sleep(dice.choice((0, 0, 20_000, 400_000)))
        time.sleep(dice.choice((0, 0, 0, 0.001)))

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
    wrong = [k for k, flag in enumerate(torch.stack(flags).tolist()) if not flag]
    assert not wrong, f"{len(wrong)} of {len(flags)} wrong, the first: {wrong[:9]}"


def worker(place):
    """A context-parallel rank."""
    try:
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        storm(Mesh.build(ParallelConfig(context_parallel_size=place.size), place, device).cp, device)
        Mesh.close()
    except BaseException:  # a rank's own words, before the launcher stops the others
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("world", [2, 4])
def test_late_ranks_hand_on_in_turn(world):
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs")
    assert launch(worker, world, (), timeout=120) == [0] * world

"""Shards summed and gathered by copy engines, with every rank late at another place."""

import random
import sys
import time
import traceback

import pytest
import torch

from nanomegatron.comm_symmetric import PeerShards
from nanomegatron.config import ParallelConfig
from nanomegatron.mesh import Mesh
from nanomegatron.mesh_launch import launch

GPUS = min(4, torch.cuda.device_count())
SIZES = [(128 * 4, torch.float32), (3 * 2**20, torch.float32), (5 * 2**20, torch.bfloat16)]


def storm(axis, device):
    """100 steps as training has them: write, reduce, update the own shard, gather, read, write anew.

    Small whole numbers, so that every sum is exact in both types; a stale element is another number.
    """
    dice = random.Random(100 + axis.rank)
    PeerShards.PIECE = 2**18  # several pieces a shard
    size = sum(n * dtype.itemsize for n, dtype in SIZES)
    peers = PeerShards(axis, device, 2 * size)
    grads, params = ([peers.zeros(n, dtype) for n, dtype in SIZES] for _ in range(2))
    flags = []

    def dawdle():
        torch.cuda._sleep(dice.choice((0, 0, 20_000, 400_000)))
        time.sleep(dice.choice((0, 0, 0, 0.001)))

    for step in range(100):
        op = "avg" if step % 3 == 0 else "sum"
        peers.settle()
        pending = []
        for k, grad in enumerate(grads):
            dawdle()
            grad.copy_(torch.arange(len(grad), device=device) % 7 * (axis.rank + 1) + step % 5 + k)
            pending.append(peers.start_reduce_scatter(grad, op))
        gathers = []
        for k, (param, reduced) in enumerate(zip(params, pending)):
            shard = reduced.wait()
            at = torch.arange(len(grads[k]), device=device).view(axis.size, -1)[axis.rank] % 7
            ranks = axis.size * (axis.size + 1) // 2
            expected = at * ranks + axis.size * (step % 5 + k)
            flags.append((shard.float() * (axis.size if op == "avg" else 1) == expected).all())
            dawdle()
            param.view(axis.size, -1)[axis.rank].fill_(axis.rank + step % 11)
            gathers.append(peers.start_all_gather(param))
        for param, gather in zip(params, gathers):
            dawdle()
            gather.wait()
            ranks = torch.arange(axis.size, device=device)[:, None] + step % 11
            flags.append((param.view(axis.size, -1) == ranks).all())
    wrong = [k for k, flag in enumerate(torch.stack(flags).tolist()) if not flag]
    assert not wrong, f"{len(wrong)} of {len(flags)} wrong, the first: {wrong[:9]}"


def worker(place):
    """A data-parallel rank."""
    try:
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        storm(Mesh.build(ParallelConfig(), place, device).dp, device)
        Mesh.close()
    except BaseException:  # a rank's own words, before the launcher stops the others
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("world", [2, 4])
def test_late_ranks_read_and_write_in_turn(world):
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs")
    assert launch(worker, world, (), timeout=120) == [0] * world

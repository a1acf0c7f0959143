"""Shards summed and gathered by copy engines, with every rank late at another place."""

import pytest
import torch

from nanomegatron.fast.dp_peer import PeerShards
from tests.gpu.ranks import all_right, dawdler, needs_two, run_on_gpus

SIZES = [(128 * 4, torch.float32), (3 * 2**20, torch.float32), (5 * 2**20, torch.bfloat16)]


def storm(mesh, device):
    """100 steps as training has them: write, reduce, update the own shard, gather, read, write again.

    Small whole numbers, so that every sum is exact in both types; a stale element is another number.
    """
    axis, dawdle = mesh.dp, dawdler(mesh.rank)
    PeerShards.PIECE = 2**18  # several pieces a shard
    size = sum(n * dtype.itemsize for n, dtype in SIZES)
    peers = PeerShards(axis, device, 2 * size)
    grads, params = ([peers.zeros(n, dtype) for n, dtype in SIZES] for _ in range(2))
    flags = []

    for step in range(100):
        op = "avg" if step % 3 == 0 else "sum"
        peers.wait_for_readers()
        pending = []
        for k, grad in enumerate(grads):
            dawdle()
            grad.copy_(torch.arange(len(grad), device=device) % 7 * (axis.rank + 1) + step % 5 + k)
            pending.append(peers.start_reduce(grad, op))
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
    all_right(flags)


@needs_two
@pytest.mark.parametrize("world", [2, 4])
def test_late_ranks_read_and_write_in_turn(world):
    run_on_gpus(world, storm)

"""Pipelined gathers and reduce-scatters over GPUs' own memory, with every rank late at another place."""

import random

import pytest
import torch

from nanomegatron.config.settings import ParallelConfig
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.tp_overlap import gather_matmul, matmul_scatter, start_gather_rows
from tests.gpu.ranks import all_right, dawdler, needs_two, run_on_gpus

SHAPES = [(64, 128, 96), (256, 512, 384), (40, 1024, 64), (2048, 512, 256)]  # rows of a rank, i, o


def close(found, expected):
    """No element is off by as much as a stale one would be; stays on the device."""
    return (found.float() - expected.float()).abs().amax() < 0.1 * expected.float().std()


def turn(axis, peers, generator, shape, dtype, dawdle):
    """One call of each on rows that all ranks can draw; what is wrong comes back as flags on the device."""
    n, i, o = shape
    device = generator.device

    def draw(*size):
        return torch.randn(*size, device=device, generator=generator).to(dtype)

    xs, weight = draw(axis.size, n, i), draw(o, i).t()
    parts, weights = draw(axis.size, n * axis.size, i), draw(axis.size, i, o)
    whole = xs.flatten(0, 1)
    product, own = whole @ weight, slice(axis.rank * n, (axis.rank + 1) * n)
    total = sum(parts[rank, own].float() @ weights[rank].float() for rank in range(axis.size))
    dawdle()
    pending = start_gather_rows(xs[axis.rank], axis, peers)
    dawdle()
    y = matmul_scatter(parts[axis.rank], weights[axis.rank], axis, peers)
    if dawdle():
        z, gathered = gather_matmul(xs[axis.rank], weight, axis, peers)
        late = pending.wait()
    else:
        late = pending.wait()
        z, gathered = gather_matmul(xs[axis.rank], weight, axis, peers)
    return [
        (late == whole).all(),
        (gathered == whole).all(),
        close(z, product),
        close(y, total),
    ]


def storm(mesh, device):
    """200 turns of all shapes and two types; a rank dawdles on its GPU or its host, each by its own dice."""
    torch.backends.cuda.matmul.allow_tf32 = False
    peers = PeerAccess.build(mesh, ParallelConfig())
    assert peers.describe(mesh.tp) == "GPU copy engines"
    axis, dawdle, same = mesh.tp, dawdler(mesh.rank), random.Random(0)
    generator = torch.Generator(device).manual_seed(0)

    flags = []
    for _ in range(200):
        shape, dtype = same.choice(SHAPES), same.choice((torch.bfloat16, torch.float32))
        flags += turn(axis, peers, generator, shape, dtype, dawdle)
    all_right(flags)
    torch.cuda.set_sync_debug_mode("error")
    x = torch.ones(64, 128, device=device)
    gather_matmul(x, x.t(), axis, peers)
    matmul_scatter(x, x.t(), axis, peers)
    start_gather_rows(x, axis, peers).wait()
    torch.cuda.set_sync_debug_mode("default")


@needs_two
@pytest.mark.parametrize("world, tp", [(2, 2), (4, 4), (4, 2)])
def test_late_ranks_overwrite_nothing(world, tp):
    run_on_gpus(world, storm, tensor_model_parallel_size=tp)

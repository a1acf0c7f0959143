"""Pipelined gathers and reduce-scatters against whole ones: over collectives, and over memory in common.

On the CPU ranks the memory that GPUs would share is a file that all of them map, and the copies are deferred
until somebody waits for them: what the real ones may do at worst.
"""

import random
import time

import pytest
import torch

from nanomegatron.comm import all_gather, reduce_scatter
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.tp_overlap import gather_matmul, matmul_scatter, start_gather_rows
from nanomegatron.mesh import Axis
from nanomegatron.report.traffic import Traffic
from tests.peer_files import FileMemory
from tests.spmd import run_spmd, spmd

CPU = torch.device("cpu")


def share_files(axis, folder):
    """Access of these ranks to each other's memory."""
    peers = PeerAccess({axis.name: ""})
    for kind in ("all_gather", "reduce_scatter"):
        peers.buffers[axis.name, kind] = FileMemory(axis, kind, folder)
    return peers


def draw(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agrees(axis, peers, seed, n, i=24, o=16, dtype=torch.float32):
    """All three on rows drawn from this seed, like the whole collectives, sending as much."""
    exact = {torch.float32: dict(rtol=1e-6, atol=1e-5), torch.bfloat16: dict(rtol=2e-2, atol=0.1)}[dtype]
    x, weight = draw(seed + axis.rank, n, i, dtype=dtype), draw(seed, o, i, dtype=dtype).t()
    rows = draw(seed + 50 + axis.rank, n * axis.size, i, dtype=dtype)
    axis.observer.counts.clear()
    whole = all_gather(x, axis)
    expected = whole @ weight, reduce_scatter(rows @ weight.contiguous(), axis)
    sent = {key: size for key, size in axis.observer.counts.items() if key[2] == "bytes"}
    axis.observer.counts.clear()
    y, gathered = gather_matmul(x, weight, axis, peers)
    assert torch.equal(gathered, whole)
    torch.testing.assert_close(y, expected[0], **exact)
    torch.testing.assert_close(matmul_scatter(rows, weight, axis, peers).wait(), expected[1], **exact)
    assert {key: size for key, size in axis.observer.counts.items() if key[2] == "bytes"} == sent
    assert torch.equal(start_gather_rows(x.view(n, 2, -1), axis, peers).wait(), whole.view(-1, 2, i // 2))
    assert torch.equal(gathered, whole), "the caller's to keep"


def all_shapes(mesh, folder):
    peers = share_files(mesh.tp, folder) if folder else PeerAccess({})
    for seed, n in enumerate((4, 1, 5, 64, 4)):  # memory grows meanwhile
        agrees(mesh.tp, peers, 1000 * seed, n)
    agrees(mesh.tp, peers, 7000, 8, dtype=torch.bfloat16)
    expected = "GPU copy engines" if folder else "asynchronous collectives (no GPU)"
    assert peers.describe(mesh.tp) == expected


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("files", [False, True], ids=["collectives", "memory"])
def test_pieces_make_the_whole(world, files, tmp_path):
    run_spmd(all_shapes, world, str(tmp_path) if files else "", tp=world)


@spmd(world=3, tp=3)
def test_one_barrier_a_call_is_enough(mesh, tmp_path):
    """Ranks that dawdle each at another place: no rank overwrites what another has still to read."""
    axis, n, i = mesh.tp, 4, 8
    peers = share_files(axis, tmp_path)
    dawdle, weight = random.Random(axis.rank), draw(0, i, i)
    for turn in range(0, 600, 10):
        time.sleep(dawdle.choice((0, 0, 0.003)))
        xs = [draw(turn + rank, n, i) for rank in range(axis.size)]
        parts = [draw(5000 + turn + rank, n * axis.size, i) for rank in range(axis.size)]
        pending = start_gather_rows(xs[axis.rank], axis, peers)
        reduced = matmul_scatter(parts[axis.rank], weight, axis, peers)
        later = [gather_matmul(k * xs[axis.rank], weight, axis, peers)[1] for k in (2, 3) if turn % 20]
        time.sleep(dawdle.choice((0, 0, 0.003)))
        assert torch.equal(pending.wait(), torch.cat(xs))
        assert all(torch.equal(found, k * torch.cat(xs)) for k, found in zip((2, 3), later))
        own = slice(axis.rank * n, (axis.rank + 1) * n)
        torch.testing.assert_close(
            reduced.wait(), sum(part @ weight for part in parts)[own], rtol=1e-5, atol=1e-5
        )


@spmd(world=2, tp=2)
def test_odd_rows_are_refused(mesh):
    with pytest.raises(ValueError, match="5 rows must be a multiple of tp 2"):
        matmul_scatter(torch.zeros(5, 2), torch.zeros(2, 2), mesh.tp)


def test_alone_nothing_is_sent():
    axis, x, weight = Axis("tp", 1, 0, (0,), observer=Traffic()), draw(1, 3, 4), draw(2, 4, 5)
    y, gathered = gather_matmul(x, weight, axis)
    assert torch.equal(y, x @ weight) and gathered is x and start_gather_rows(x, axis).wait() is x
    assert torch.equal(matmul_scatter(x, weight, axis).wait(), x @ weight) and not axis.observer.counts

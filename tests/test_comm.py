"""Collectives against one process that knows all inputs; each differentiable pair by its adjoint identity."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanomegatron import comm
from nanomegatron.mesh import Axis, AxisObserver
from nanomegatron.report.traffic import Traffic, ledger
from tests.spmd import run_spmd, spmd

# The state of input and output over the axis; I is the same on every rank and counts once.
PAIRS = {
    "copy_to": "IR",
    "reduce_from": "PI",
    "gather_seq": "VR",
    "scatter_seq": "PV",
    "gather_from": "VI",
    "split_to": "IV",
    "all_to_all": "VV",
}


def of_rank(rank, shape=(4, 3, 8), dtype=torch.float64):
    """What rank `rank` holds; every rank can make it, so each knows the right answer by itself."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank), dtype=dtype)


def plain_collectives(mesh):
    axis, n = mesh.tp, mesh.tp.size
    xs = [of_rank(rank) for rank in range(n)]
    mine, stack = xs[axis.rank].clone(), torch.stack(xs)

    def check(found, expected):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
        assert torch.equal(mine, xs[axis.rank]), "works out of place"

    check(comm.all_reduce(mine, axis), stack.sum(0))
    check(comm.all_reduce(mine, axis, "max"), stack.amax(0))
    check(comm.all_reduce(mine, axis, "min"), stack.amin(0))
    check(comm.all_reduce(mine.transpose(0, 2), axis), stack.sum(0).transpose(0, 2))
    check(comm.all_gather(mine, axis), torch.cat(xs))
    check(comm.all_gather(mine, axis, dim=-1), torch.cat(xs, -1))
    check(comm.all_gather(mine.transpose(0, 1), axis, dim=1), torch.cat([x.transpose(0, 1) for x in xs], 1))
    check(comm.reduce_scatter(mine, axis), stack.sum(0).chunk(n)[axis.rank])
    check(comm.all_to_all(mine, axis), torch.cat([x.chunk(n)[axis.rank] for x in xs]))
    check(comm.own_slice(mine, axis, dim=2), mine.chunk(n, 2)[axis.rank])
    check(comm.broadcast_(mine.clone(), axis, source=1), xs[1])
    check(comm.all_reduce_(mine.clone(), axis), stack.sum(0))
    comm.barrier(axis)
    with pytest.raises(ValueError, match=rf"\(3, 2\) must be a multiple of the {n} ranks of tp"):
        comm.reduce_scatter(torch.zeros(3, 2), axis)


@pytest.mark.parametrize("size", [2, 4])
def test_plain_collectives(size):
    run_spmd(plain_collectives, size, tp=size)


@spmd(world=4, tp=4)
def test_uneven_swap(mesh):
    """Rank r sends (r + 2q) % 4 rows to rank q: some blocks are empty."""
    axis = mesh.tp
    rows = [[(r + 2 * q) % 4 for q in range(4)] for r in range(4)]
    blocks = [of_rank(r, (sum(rows[r]), 3)).split(rows[r]) for r in range(4)]
    received = [rows[r][axis.rank] for r in range(4)]
    found = comm.all_to_all(torch.cat(blocks[axis.rank]), axis, rows[axis.rank], received)
    assert torch.equal(found, torch.cat([blocks[r][axis.rank] for r in range(4)]))
    assert torch.equal(comm.all_to_all(found, axis, received, rows[axis.rank]), torch.cat(blocks[axis.rank]))


@spmd(world=4, tp=2)
def test_source_of_a_broadcast_is_a_rank_of_the_axis(mesh):
    found = comm.broadcast_(torch.tensor([mesh.rank]), mesh.tp, source=1)
    assert found.item() == mesh.tp.ranks[1]


def adjoint_of_each_pair(mesh):
    """sum <f(x), y> = sum <x, f'(y)>; the values of f are checked too, or f = 0 would do."""
    axis, n = mesh.tp, mesh.tp.size

    def tensor(state, shape, salt):
        return of_rank(salt if state == "I" else salt + axis.rank, shape)

    def total(a, b, state):
        dot = (a * b).sum() / (n if state == "I" else 1)
        return comm.all_reduce(dot, axis).item()

    xs = [of_rank(r) for r in range(n)]
    forward = {
        "copy_to": xs[0],
        "reduce_from": sum(xs),
        "gather_seq": torch.cat(xs),
        "scatter_seq": sum(xs).chunk(n)[axis.rank],
        "gather_from": torch.cat(xs, -1),
        "split_to": xs[0].chunk(n)[axis.rank],
        "all_to_all": torch.cat([x.chunk(n)[axis.rank] for x in xs]),
    }
    for name, (before, after) in PAIRS.items():
        x = tensor(before, (4, 3, 8), 0).requires_grad_()
        out = getattr(comm, name)(x, axis)
        torch.testing.assert_close(out.detach(), forward[name], rtol=0, atol=1e-14)
        y = tensor(after, out.shape, 50)
        out.backward(y)
        left, right = total(out.detach(), y, after), total(x.detach(), x.grad, before)
        assert abs(left - right) <= 1e-12 * abs(left), (name, left, right)
        if before == "I":
            assert torch.equal(x.grad, comm.broadcast_(x.grad.clone(), axis)), f"{name}: gradients differ"


@pytest.mark.parametrize("size", [2, 4])
def test_pairs_are_adjoint(size):
    run_spmd(adjoint_of_each_pair, size, tp=size)


def test_axis_of_one_rank_is_the_identity():
    """The very same object comes back, and nothing is counted."""
    axis, x = Axis("tp", 1, 0, (0,), observer=Traffic()), of_rank(0).requires_grad_()
    plain = ("all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "own_slice", "broadcast_")
    for name in (*plain, *PAIRS):
        assert getattr(comm, name)(x, axis) is x, name
    comm.barrier(axis)
    assert not axis.observer.counts


@spmd(world=4, tp=2)
def test_ledger_counts_calls_and_bytes(mesh):
    """Of the whole tensor on one rank; per axis, and backward passes as well."""
    x = torch.ones(4, 6, requires_grad=True)  # 96 bytes
    comm.copy_to(x, mesh.tp).sum().backward()
    comm.gather_seq(x, mesh.tp).sum().backward()
    comm.all_gather(torch.ones(5, dtype=torch.float64), mesh.dp)
    comm.all_reduce(x.detach(), mesh.dp, "max")
    comm.all_to_all(x.detach().bfloat16(), mesh.tp)
    comm.all_reduce(x.detach(), mesh.pp)  # size 1
    assert dict(mesh.observer.counts) == {
        ("tp", "all_reduce", "calls"): 1,
        ("tp", "all_reduce", "bytes"): 96,
        ("tp", "all_gather", "calls"): 1,
        ("tp", "all_gather", "bytes"): 192,
        ("tp", "reduce_scatter", "calls"): 1,
        ("tp", "reduce_scatter", "bytes"): 192,
        ("tp", "all_to_all", "calls"): 1,
        ("tp", "all_to_all", "bytes"): 48,
        ("dp", "all_gather", "calls"): 1,
        ("dp", "all_gather", "bytes"): 80,
        ("dp", "all_reduce", "calls"): 1,
        ("dp", "all_reduce", "bytes"): 96,
    }


@spmd(world=2, tp=2)
def test_an_observer_sees_starts_and_waits(mesh):
    """A wait is seen while it lasts, and once; barriers and waits for the device are waits, too."""
    traffic, inside = mesh.observer, []
    clock = SimpleNamespace(stop=lambda: "stopped")
    traffic.new_clock = lambda: inside.append(traffic.waiting[0]) or clock
    x = torch.ones(4)
    pending = comm.start_all_reduce_(x, mesh.tp)
    started = traffic.last
    assert str(started) == "all_reduce of 16 bytes over tp, number 1"
    assert traffic.waiting is None and not inside
    assert pending.wait() is x and pending.wait() is x
    assert inside == [started] and traffic.waiting is None
    assert comm.read(x, mesh.tp) == [2.0] * 4
    comm.barrier(mesh.tp)
    assert inside == [started, started, traffic.last]
    assert str(traffic.last) == "barrier of 0 bytes over tp, number 2"
    assert traffic.end_step() == (
        {("tp", "all_reduce", "calls"): 1, ("tp", "all_reduce", "bytes"): 16},
        ["stopped"] * 3,
    )
    unseen = replace(mesh.tp, observer=AxisObserver())
    assert comm.read(comm.all_reduce(x, unseen), unseen) == [4.0] * 4
    assert len(inside) == 3


def test_ledger_is_a_table():
    traffic = {("tp", "all_reduce", "calls"): 2, ("tp", "all_reduce", "bytes"): 3 * 2**20}
    traffic |= {("world", "all_reduce", "calls"): 1, ("world", "all_reduce", "bytes"): 16}
    assert ledger(traffic) == [
        "    tp all_reduce          2 calls        3,145,728 bytes a step",
        " world all_reduce          1 calls               16 bytes a step",
    ]

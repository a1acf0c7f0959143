"""Tokens to the ranks of their experts and back: any layout against every token's sum in one process."""

import functools
import itertools
import time
import weakref

import pytest
import torch

from nanomegatron.config.settings import TransformerConfig
from nanomegatron.fast import moe_dispatch, moe_pieces
from nanomegatron.fast.moe_dispatch import DISPATCHERS, Journey, OnTheWay, cut, dispatcher, exchange, tables
from nanomegatron.ops.permute import Routing, route
from nanomegatron.router import MoeAxes
from tests.moe_routers import dispatch
from tests.spmd import run_spmd, spmd

E, K, H, F = 4, 3, 5, 4
LAYOUTS = {
    "one": (1, {}),
    "ep2": (2, {"ep": 2}),
    "ep4": (4, {"ep": 4}),
    "etp2": (2, {"tp": 2, "etp": 2}),
    "ep2 etp2": (4, {"tp": 2, "ep": 2, "etp": 2}),
    "ep2 tp2": (4, {"tp": 2, "ep": 2, "etp": 1}),  # and edp 2
}


def random_ids(generator, t, dropped):
    """k different experts a token, some of which are dropped."""
    ids = torch.rand(t, E, generator=generator).topk(K).indices
    return ids.where(torch.rand(t, K, generator=generator) >= dropped, -1).int()


def crafted(name, rank, generator):
    """ids of a rank's tokens, as many on each."""
    ids = random_ids(generator, 6, 0.3 if name in ("drops", "capacity", "small capacity") else 0.0)
    if name == "one expert":
        ids = torch.tensor([2, -1, -1], dtype=torch.int32).repeat(6, 1)
    if name == "one idle":
        ids = ids.where(ids != 1, -1)
    if name == "nothing":
        ids.fill_(-1)
    if name == "only of rank 1":
        ids = ids if rank == 1 else torch.full_like(ids, -1)
    if name == "no tokens":
        ids = ids[:0]
    if name == "uneven":
        ids = random_ids(generator, (5, 0, 11, 1)[rank], 0.1)
    return kept(ids, CAPACITY.get(name))


CASES = ["random", "drops", "one expert", "one idle", "nothing", "only of rank 1", "no tokens", "uneven"]
CASES += ["capacity", "small capacity"]
CAPACITY = {"capacity": 6, "small capacity": 3}


def batches(case, ranks):
    """What each rank has: x, probs, ids, and the gradient of its result."""
    generator = torch.Generator().manual_seed(CASES.index(case))
    for rank in range(ranks):
        ids = crafted(case, rank, generator)
        t = len(ids)
        x, grad = (torch.randn(t, H, generator=generator) for _ in range(2))
        yield x, torch.rand(t, K, generator=generator), ids, grad


def weights():
    """Of all experts `[E, F, H]`, `[E, F, H]`."""
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(E, F, H, generator=generator) for _ in range(2)]


def kept(ids, capacity):
    """ids where each expert takes its first copies alone, as the router has them."""
    if capacity is None:
        return ids
    ids, taken = ids.clone(), [0] * E
    for copy in ids.flatten().split(1):  # views
        e = int(copy)
        if e >= 0:
            taken[e] += 1
            if taken[e] > capacity:
                copy.fill_(-1)
    return ids


def oracle(each, w1, w2):
    """Results of all ranks' tokens, a token and an expert at a time, and all gradients, in float64."""
    w1, w2 = (w.double().requires_grad_() for w in (w1, w2))
    found = []
    for x, probs, ids, grad in each:
        x, probs = x.double().requires_grad_(), probs.double().requires_grad_()
        y = [torch.zeros(H, dtype=torch.float64) + 0 * x.sum() for _ in x]
        for t, row in enumerate(ids.tolist()):
            for j, e in enumerate(row):
                if e >= 0:
                    y[t] = y[t] + probs[t, j] * (torch.tanh(w1[e] @ x[t]) @ w2[e])
        y = torch.stack(y) if y else 0 * x
        (y * grad.double()).sum().backward()
        zeros = torch.zeros_like(probs)
        found.append((y.detach(), x.grad, zeros if probs.grad is None else probs.grad))
    none = torch.zeros_like(w1)
    return found, [none if w.grad is None else w.grad for w in (w1, w2)]


def mine(axes, w):
    """This rank's slice of the weights of all experts."""
    local = E // axes.ep.size
    w = w[axes.ep.rank * local :][:local]
    return w.chunk(axes.etp.size, 1)[axes.etp.rank].clone().requires_grad_()


def experts_of(w1, w2, rows, offsets):
    """A loop over this rank's experts; NaN in rows that are nobody's."""
    ends = offsets.tolist()
    assert len(ends) == len(w1) + 1 and ends[0] == 0 and ends[-1] <= len(rows)
    parts = [torch.tanh(rows[a:b] @ w1[i].t()) @ w2[i] for i, (a, b) in enumerate(itertools.pairwise(ends))]
    return torch.cat([*parts, rows[ends[-1] :] * torch.nan])


def near(found, expected, rel=2e-6):
    found, expected = found.double(), expected.double()
    assert found.shape == expected.shape
    assert (found - expected).norm() <= rel * expected.norm() + 1e-12, (found - expected).abs().max()


WAYS = [(1, 1), (4, 2)], [(4, 1), (1, 2)]  # multiple and parts of cases in turn


def every_case(mesh, kinds=tuple(DISPATCHERS), full=False):
    axes = MoeAxes.of(mesh)
    ranks, rank = axes.etp_ep.size, axes.etp_ep.rank
    oracles = [(each, oracle(each, *weights())) for each in (list(batches(case, ranks)) for case in CASES)]
    for (i, case), kind, turn in itertools.product(enumerate(CASES), kinds, range(4 if full else 2)):
        if case == "uneven" and kind == "allgather":
            continue
        capacity, (multiple, parts) = CAPACITY.get(case), (WAYS[i % 2] + WAYS[1 - i % 2])[turn]
        each, (results, grads) = oracles[i]
        x, probs, ids, grad = each[rank]
        x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
        w1, w2 = (mine(axes, w) for w in weights())
        how, y = (capacity, multiple, parts == 1), []
        for way, *part in zip(
            dispatcher(kind, axes).of(cut(ids, parts), E, axes, *how), cut(x, parts), cut(probs, parts)
        ):
            rows, offsets, ends, _ = way.start_send(*part, way.set_out(part[0], axes))()
            assert offsets.dtype == torch.int32 and all(n % multiple == 0 for n in offsets.tolist())
            assert ends == (None if ranks == 1 and not capacity else offsets.tolist())
            if capacity:
                assert len(set(offsets.diff().tolist())) == 1, "padded"
            elif multiple == 1 and ranks > 1:
                assert offsets[-1] == len(rows), "no row too many"
            y.append(way.start_back(experts_of(w1, w2, rows, offsets))())
        y = torch.cat(y)
        y.backward(grad)
        for ours, theirs in zip((y.detach(), x.grad, probs.grad), results[rank], strict=True):
            near(ours, theirs)
        for ours, theirs in zip((w1, w2), grads, strict=True):
            near(ours.grad, mine(axes, theirs).detach(), 1e-5)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.full) if name == "etp2" else name for name in LAYOUTS]
)
def test_every_way_is_the_sum_over_each_tokens_experts(layout, full):
    world, sizes = LAYOUTS[layout]
    run_spmd(every_case, world, tuple(DISPATCHERS), full, **sizes, timeout=120)


def scale(rows, offsets, first=0):
    """Experts whose results are the same to the bit whatever rows stand beside: 0.3, 1.3, ... times each."""
    factors = torch.arange(first, first + len(offsets) - 1) + 0.3
    factors = factors.repeat_interleave(offsets.diff(), output_size=int(offsets[-1]))
    return (rows * factors[:, None]).type_as(rows)


def send(kind, x, probs, ids, axes):
    """The way of x, and what has come."""
    (way,) = dispatcher(kind, axes).of([ids], E, axes)
    return way, way.start_send(x, probs, way.set_out(x, axes))()


def bits(mesh, tokens):
    """16 bits: the result and gradient of the rank's share of the tokens."""
    axes, found = MoeAxes.of(mesh), []
    for seed in range(8):
        x, probs, ids = (v.chunk(axes.ep.size)[axes.ep.rank] for v in sixteen_bits(seed, tokens))
        x = x.clone().requires_grad_()
        way, (rows, offsets, *_) = send("alltoall", x, probs, ids, axes)
        y = way.start_back(scale(rows[: offsets[-1]], offsets, axes.ep.rank * (E // axes.ep.size)))()
        y.sum().backward()
        found.append((y.detach(), x.grad))
    return found


def sixteen_bits(seed, tokens):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    return x, torch.rand(tokens, K, generator=generator), random_ids(generator, tokens, 0.2)


@pytest.mark.parametrize("ep", [pytest.param(2, marks=pytest.mark.full), 4])
def test_each_ranks_part_of_a_sum_is_rounded_once(ep):
    """To the bit what one process has that adds the parts of each rank's experts."""
    ranks = run_spmd(bits, ep, 24, ep=ep)
    for seed, parts in enumerate(zip(*ranks, strict=True)):
        x, probs, ids = sixteen_bits(seed, 24)
        each = []
        for rank in range(ep):
            theirs = ids.where(ids // (E // ep) == rank, -1)
            leaf = x.clone().requires_grad_()
            way, (rows, offsets, *_) = send("alltoall", leaf, probs, theirs, MoeAxes())
            end = int(offsets[-1])
            assert end < len(rows) and (rows[end:] == 0).all(), "dropped copies leave rows that nobody reads"
            y = way.start_back(torch.cat((scale(rows[:end], offsets), rows[end:])))()
            y.sum().backward()
            each.append((y.detach(), leaf.grad))
        for expected, pieces in zip(zip(*each, strict=True), zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat(pieces), torch.stack(expected).float().sum(0).bfloat16())


@pytest.mark.parametrize("seed", range(20))
def test_tables_with_a_capacity(seed):
    """Each expert has its first copies, in their order, and padding; what is dropped is nowhere."""
    generator = torch.Generator().manual_seed(seed)
    t, capacity, multiple = (int(torch.randint(1, n, (), generator=generator)) for n in (40, 12, 5))
    ids = torch.randint(-2, E + 2, (t, K), dtype=torch.int32, generator=generator)
    found, plain = tables(ids, E, multiple, capacity), route(ids, E)
    rows = -(-capacity // multiple) * multiple
    assert found.offsets.tolist() == [rows * i for i in range(E + 1)]
    assert found.counts.tolist() == plain.counts.clamp(max=rows).tolist()
    for i in range(E):
        copies = plain.source[plain.offsets[i] : plain.offsets[i + 1]][:rows]
        expected = torch.full((rows,), -1, dtype=torch.int32)
        expected[: len(copies)] = copies
        assert torch.equal(found.source[i * rows : (i + 1) * rows], expected)
    for copy, row in enumerate(found.position.flatten().tolist()):
        assert row == -1 if copy not in found.source else found.source[row] == copy
    assert all(v.dtype == torch.int32 for v in vars(found).values())


@spmd(world=3)
def test_exchange_of_uneven_blocks(mesh):
    """Block (i, j) from rank i to j has 2i + j - 2 rows, if any; the gradient goes the same way back."""
    size = [[max(2 * i + j - 2, 0) for j in range(3)] for i in range(3)]
    rank, axis = mesh.world.rank, mesh.world
    send, receive = size[rank], [row[rank] for row in size]
    x = torch.cat([torch.full((n, 2), 10.0 * rank + j) for j, n in enumerate(send)]).requires_grad_()
    y = exchange(x, axis, send, receive)
    assert torch.equal(y, torch.cat([torch.full((n, 2), 10.0 * i + rank) for i, n in enumerate(receive)]))
    (y * y).sum().backward()
    assert torch.equal(x.grad, 2 * x)
    assert torch.equal(exchange(x, mesh.tp, [len(x)], [len(x)]), x)


def of_config(first, rows, offsets):
    return scale(rows, offsets, first)


class Experts:
    """What a Journey asks of GroupedExperts."""

    multiple = 1

    def __init__(self, axes, **settings):
        self.config = TransformerConfig(hidden_size=H, num_experts=E, moe_router_topk=K, **settings)
        self.run = functools.partial(of_config, axes.ep.rank * (E // axes.ep.size))

    def __call__(self, rows, offsets, ends, soon=None, early=None):
        assert (ends is None or ends == offsets.tolist()) and soon is None, "x has no gradient"
        return self.run(rows, offsets)


@spmd(world=2, ep=2)
def test_sizes_are_read_after_other_work_is_launched(mesh):
    axes, said = MoeAxes.of(mesh), []
    experts = Experts(axes)
    ids, x, probs = torch.arange(3, dtype=torch.int32).repeat(4, 1), torch.randn(4, H), torch.ones(4, K)
    read = OnTheWay.read

    def reading(self):
        said.append("read")
        return read(self)

    OnTheWay.read, block = reading, Routing.block
    Routing.block = lambda *args: said.append("block") or block(*args)
    for kind in DISPATCHERS:
        y = dispatch(x, probs, ids, experts, axes, kind, lambda: said.append("meanwhile"))
        torch.testing.assert_close(y, x * (0.3 + 1.3 + 2.3))
    assert said == ["meanwhile", "block", "block", "read", "meanwhile", "read"]
    Routing.block = block
    padded = Experts(axes, moe_expert_capacity_factor=1.4, moe_pad_expert_input_to_capacity=True)
    for kind in DISPATCHERS:
        traffic = mesh.traffic.copy()
        journey = Journey(x, padded, axes, kind)
        journey.route(ids)
        (way,), (ahead,) = journey.ways, journey.ahead
        rows, offsets, ends, _ = way.start_send(x, probs, ahead)()
        assert offsets.tolist() == [0, 10, 20] and len(rows) == 20, "ceil(4 * 3 / 4 * 1.4) of each rank"
        sent = mesh.traffic - traffic
        asked = [(name, n) for (_, name, what), n in sent.items() if what == "calls"]
        assert asked == ([("all_to_all", 2)] if kind == "alltoall" else [("all_gather", 3)])
        torch.testing.assert_close(way.start_back(padded(rows, offsets, ends))(), x * (0.3 + 1.3 + 2.3))
    assert len(said) == 6, "nothing is asked where sizes are known"


def test_one_rank_asks_for_nothing(monkeypatch):
    monkeypatch.setattr(OnTheWay, "__init__", None)
    axes = MoeAxes()
    ids, x = torch.arange(3, dtype=torch.int32).repeat(4, 1), torch.randn(4, H)
    for kind in DISPATCHERS:
        y = dispatch(x, torch.ones(4, K), ids, Experts(axes), axes, kind)
        torch.testing.assert_close(y, x * (0.3 + 1.3 + 2.3))


@spmd(world=2, ep=2)
def test_what_has_come_is_let_go_of(mesh):
    """While experts work there is none of the tokens as they have come, nor as they went."""
    axes, there = MoeAxes.of(mesh), []
    kept, experts = moe_dispatch.permute_ref, Experts(axes, moe_permute_fusion=False)
    gather = moe_pieces.gather_pieces

    def noting(x, routing):
        y = kept(x, routing)
        there.extend(map(weakref.ref, (x, y)))
        return y

    def gathering(*args):
        found = gather(*args)
        there.append(weakref.ref(found[0]))
        return found

    def working(rows, offsets):
        def others():
            found = [ref() for ref in there]
            return [v.shape for v in found if v is not None and v is not rows and v is not x]

        patience = time.monotonic() + 5  # gloo's own threads let go of what has come a little later
        while others() and time.monotonic() < patience:
            time.sleep(0.01)
        assert not others()
        return run(rows, offsets)

    run, experts.run = experts.run, working
    moe_dispatch.permute_ref, moe_pieces.gather_pieces = noting, gathering
    ids, x, probs = random_ids(torch.Generator(), 6, 0.0), torch.randn(6, H), torch.ones(6, K)
    for kind in DISPATCHERS:
        dispatch(x, probs, ids, experts, axes, kind)
        assert there
        there.clear()


@spmd(world=4, ep=2, etp=2)
def test_what_is_sent(mesh):
    """alltoall: each token once to a rank of ep, and over etp; allgather: all tokens, both ways."""
    axes, t = MoeAxes.of(mesh), 8
    ids = random_ids(torch.Generator().manual_seed(mesh.rank), t, 0.5)
    sent = {}
    for kind in DISPATCHERS:
        mesh.traffic.clear()
        x, probs = (torch.randn(t, n, requires_grad=True) for n in (H, K))
        way, (rows, *_) = send(kind, x, probs, ids, axes)
        way.start_back(rows)().sum().backward()
        sent[kind] = {key: n for key, n in mesh.traffic.items() if key[2] == "calls"}
        sent[kind, "bytes"] = mesh.traffic["ep", "all_to_all", "bytes"]
    assert sent["alltoall"] == {
        ("etp_ep", "all_gather", "calls"): 1,
        ("ep", "all_to_all", "calls"): 6,  # probs and ids, x, the sums; gradients of these three
        ("etp", "all_to_all", "calls"): 6,
    }
    go, come = (
        sum(tokens(mesh, *pair)) for pair in ((mesh.ep.ranks[mesh.ep.rank], None), (None, mesh.ep.rank))
    )
    assert 0 < go < 2 * t, "some to one rank, others to both"
    assert sent["alltoall", "bytes"] == 4 * (go * (2 * K + 2 * H) + come * (2 * K + 2 * H))
    assert sent["allgather"] == {
        ("etp_ep", "all_gather", "calls"): 4,  # ids, x, probs; in the backward dy
        ("etp_ep", "reduce_scatter", "calls"): 3,  # the sums; gradients of x, probs
    }


def tokens(mesh, source, target):
    """Tokens from a rank of the world to one of the ep axis, each None for all."""
    for rank in mesh.ep.ranks if source is None else [source]:
        ids = random_ids(torch.Generator().manual_seed(rank), 8, 0.5)
        for there in range(mesh.ep.size) if target is None else [target]:
            yield int((ids // (E // mesh.ep.size) == there).any(1).sum())

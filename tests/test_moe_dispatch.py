"""Tokens to the ranks of their experts and back: any layout against every token's sum in one process."""

import itertools
import time
import weakref

import pytest
import torch

from nanomegatron import moe
from nanomegatron.comm import all_to_all
from nanomegatron.config.model import TransformerConfig
from nanomegatron.fast import moe_pieces
from nanomegatron.fast.host_copy import AsyncHostCopy
from nanomegatron.fast.moe_dispatch import OverlappedMoe, start_exchange
from nanomegatron.mesh import Mesh
from nanomegatron.moe import route_and_combine
from nanomegatron.ops.permute import Routing, route
from tests.moe_routers import dispatch
from tests.spmd import run_spmd, spmd

KINDS = "allgather", "alltoall"
FORMS = {"plain": route_and_combine, "overlapped": OverlappedMoe(None), "halves": OverlappedMoe(None, True)}
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


class Experts:
    """What a dispatch asks of GroupedExperts: rows times a number of their expert, 0.3, 1.3, ...

    These are the same to the bit whatever rows stand beside.
    """

    multiple = 1

    def __init__(self, axes, **settings):
        shape = dict(hidden_size=H, num_experts=E, moe_router_topk=K)
        self.config, self.mesh = TransformerConfig(**shape | settings), axes
        self.weight1 = torch.nn.Parameter(torch.zeros(1))

    def __call__(self, rows, offsets, ends=None):
        assert ends is None or ends == offsets.tolist()
        return self.run(rows, offsets)

    def run(self, rows, offsets):
        first = self.mesh.ep.rank * (E // self.mesh.ep.size)
        factors = torch.arange(first, first + len(offsets) - 1) + 0.3
        factors = factors.repeat_interleave(offsets.diff(), output_size=int(offsets[-1]))
        y = (rows[: offsets[-1]] * factors[:, None]).type_as(rows)
        return torch.cat((y, rows[offsets[-1] :]))


class TwoLayers(Experts):
    """MLPs in a loop over this rank's experts; NaN in rows that belong to none."""

    def __init__(self, axes, multiple, capacity):
        factors = {6: 1.3, 3: 0.6}  # of 6 tokens
        more = {} if capacity is None else dict(moe_expert_capacity_factor=factors[capacity])
        super().__init__(axes, moe_pad_expert_input_to_capacity=capacity is not None, **more)
        self.multiple, self.padded = multiple, capacity is not None
        self.weights = [mine(axes, w) for w in weights()]

    def __call__(self, rows, offsets, ends=None):
        assert offsets.dtype == torch.int32 and all(n % self.multiple == 0 for n in offsets.tolist())
        assert (
            ends is None
            if self.mesh.etp_ep.size == 1 and not self.padded
            else ends in (None, offsets.tolist())
        )
        if self.padded:
            assert len(set(offsets.diff().tolist())) == 1
        elif self.multiple == 1 and self.mesh.etp_ep.size > 1:
            assert offsets[-1] == len(rows), "no row too many"
        (w1, w2), bounds = self.weights, offsets.tolist()
        assert len(bounds) == len(w1) + 1 and bounds[0] == 0 and bounds[-1] <= len(rows)
        pairs = enumerate(itertools.pairwise(bounds))
        parts = [torch.tanh(rows[a:b] @ w1[i].t()) @ w2[i] for i, (a, b) in pairs]
        return torch.cat([*parts, rows[bounds[-1] :] * torch.nan])


def mine(axes, w):
    """This rank's slice of the weights of all experts."""
    local = E // axes.ep.size
    w = w[axes.ep.rank * local :][:local]
    return w.chunk(axes.etp.size, 1)[axes.etp.rank].clone().requires_grad_()


def near(found, expected, rel=2e-6):
    found, expected = found.double(), expected.double()
    assert found.shape == expected.shape
    assert (found - expected).norm() <= rel * expected.norm() + 1e-12, (found - expected).abs().max()


def every_case(mesh, kinds=KINDS, forms=FORMS, full=False):
    """Each case in every form, with multiples 1 and 4 in turn, or both."""
    axes = mesh
    ranks, rank = axes.etp_ep.size, axes.etp_ep.rank
    oracles = [(each, oracle(each, *weights())) for each in (list(batches(case, ranks)) for case in CASES)]
    settings = itertools.product(enumerate(CASES), kinds, enumerate(forms.items()), range(1 + full))
    for (i, case), kind, (j, (form, run)), turn in settings:
        capacity, multiple = CAPACITY.get(case), (1, 4)[(i + j + turn) % 2]
        if (case == "uneven" and kind == "allgather") or (form == "halves" and capacity):
            continue
        each, (results, grads) = oracles[i]
        x, probs, ids, grad = each[rank]
        x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
        experts = TwoLayers(axes, multiple, capacity)
        y = dispatch(x, probs, ids, experts, kind, run)
        y.backward(grad)
        for ours, theirs in zip((y.detach(), x.grad, probs.grad), results[rank], strict=True):
            near(ours, theirs)
        for ours, theirs in zip(experts.weights, grads, strict=True):
            near(ours.grad, mine(axes, theirs).detach(), 1e-5)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.full) if name == "etp2" else name for name in LAYOUTS]
)
def test_every_way_is_the_sum_over_each_tokens_experts(layout, full):
    world, sizes = LAYOUTS[layout]
    run_spmd(every_form, world, full, **sizes, timeout=120)


def every_form(mesh, full):
    every_case(mesh, full=full)


def bits(mesh, tokens, form):
    """16 bits: the result and gradient of the rank's share of the tokens."""
    axes, found = mesh, []
    for seed in range(8):
        x, probs, ids = (v.chunk(axes.ep.size)[axes.ep.rank] for v in sixteen_bits(seed, tokens))
        x = x.clone().requires_grad_()
        y = dispatch(x, probs, ids, Experts(axes), "alltoall", FORMS[form])
        y.sum().backward()
        found.append((y.detach(), x.grad))
    return found


def sixteen_bits(seed, tokens):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    return x, torch.rand(tokens, K, generator=generator), random_ids(generator, tokens, 0.2)


@pytest.mark.parametrize("ep", [pytest.param(2, marks=pytest.mark.full), 4])
@pytest.mark.parametrize("form", ["plain", "overlapped"])
def test_each_ranks_part_of_a_sum_is_rounded_once(ep, form):
    """To the bit what one process has that adds the parts of each rank's experts."""
    ranks = run_spmd(bits, ep, 24, form, ep=ep)
    for seed, parts in enumerate(zip(*ranks, strict=True)):
        x, probs, ids = sixteen_bits(seed, 24)
        each = []
        for rank in range(ep):
            theirs = ids.where(ids // (E // ep) == rank, -1)
            leaf = x.clone().requires_grad_()
            y = dispatch(leaf, probs, theirs, Experts(Mesh()), "alltoall")
            y.sum().backward()
            each.append((y.detach(), leaf.grad))
        for expected, pieces in zip(zip(*each, strict=True), zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat(pieces), torch.stack(expected).float().sum(0).bfloat16())


def test_choices_travel_as_they_are():
    """Ids of any size by their bits, -1 for dropped copies and in padding; gradients of probs alone."""
    ids = torch.tensor([[0, 2**31 - 1, -1], [3, -1, 2**24 + 1]], dtype=torch.int32)
    probs = torch.rand(2, K, requires_grad=True)
    way = moe.AllToAllDispatch(Experts(Mesh()))
    to_ranks = route(torch.tensor([[0], [0]], dtype=torch.int32).expand(2, K), 1, 1, 8)
    sent = way.permute(moe.pack_choices(probs, ids), to_ranks)
    assert sent.shape == (8, 2 * K) and sent.dtype == torch.float32
    came, found = moe.unpack_choices(sent)
    assert found.dtype == torch.int32 and found.tolist() == [
        *ids.repeat_interleave(K, 0).tolist(),
        *[[-1] * K] * 2,
    ]
    assert torch.equal(came[:6], probs.repeat_interleave(K, 0)) and not came[6:].any()
    came.sum().backward()
    assert torch.equal(probs.grad, torch.full((2, K), float(K)))


@pytest.mark.parametrize("seed", range(20))
def test_routing_to_a_capacity(seed):
    """Each expert has its first copies, in their order, and padding; what is dropped is nowhere."""
    generator = torch.Generator().manual_seed(seed)
    t, capacity, multiple = (int(torch.randint(1, n, (), generator=generator)) for n in (40, 12, 5))
    ids = torch.randint(-2, E + 2, (t, K), dtype=torch.int32, generator=generator)
    found, plain = route(ids, E, multiple, capacity), route(ids, E)
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
    for exchange in all_to_all, lambda *args: start_exchange(*args)():
        x = torch.cat([torch.full((n, 2), 10.0 * rank + j) for j, n in enumerate(send)]).requires_grad_()
        y = exchange(x, axis, send, receive)
        assert torch.equal(y, torch.cat([torch.full((n, 2), 10.0 * i + rank) for i, n in enumerate(receive)]))
        (y * y).sum().backward()
        assert torch.equal(x.grad, 2 * x)
        assert torch.equal(exchange(x, mesh.tp, [len(x)], [len(x)]), x)


@spmd(world=2, ep=2)
def test_sizes_are_read_after_other_work_is_launched(mesh):
    axes, said = mesh, []
    ids, x, probs = torch.arange(3, dtype=torch.int32).repeat(4, 1), torch.randn(4, H), torch.ones(4, K)
    read = AsyncHostCopy.read

    def reading(self):
        said.append("read")
        return read(self)

    def shared(x):
        said.append("shared")
        return 0 * x

    AsyncHostCopy.read, block = reading, Routing.block
    Routing.block = lambda *args: said.append("block") or block(*args)
    for kind in KINDS:
        y = dispatch(x, probs, ids, Experts(axes), kind, FORMS["overlapped"], lambda x: shared(x))
        torch.testing.assert_close(y, x * (0.3 + 1.3 + 2.3))
        said.append("|")
    assert " ".join(said) == "shared block block read block | shared read |"
    Routing.block = block
    said.clear()
    padded = Experts(axes, moe_expert_capacity_factor=1.4, moe_pad_expert_input_to_capacity=True)
    for kind in KINDS:
        traffic = mesh.observer.counts.copy()
        y = dispatch(x, probs, ids, padded, kind, FORMS["overlapped"])
        torch.testing.assert_close(y, x * (0.3 + 1.3 + 2.3))
        asked = [
            (name, n) for (_, name, what), n in (mesh.observer.counts - traffic).items() if what == "calls"
        ]
        back = {"allgather": [("all_gather", 3), ("reduce_scatter", 1)], "alltoall": [("all_to_all", 3)]}
        assert asked == back[kind]
    assert not said, "nothing is asked where sizes are known"


def test_one_rank_asks_for_nothing(monkeypatch):
    monkeypatch.setattr(AsyncHostCopy, "__init__", None)
    monkeypatch.setattr(Routing, "cut_to_size", None)
    ids, x = torch.arange(3, dtype=torch.int32).repeat(4, 1), torch.randn(4, H)
    for kind, run in itertools.product(KINDS, FORMS.values()):
        y = dispatch(x, torch.ones(4, K), ids, Experts(Mesh()), kind, run)
        torch.testing.assert_close(y, x * (0.3 + 1.3 + 2.3))


@spmd(world=2, ep=2)
def test_what_has_come_is_released(mesh):
    """While experts work there is none of the tokens as they have come, nor as they were sent."""
    there = []
    permute, gather = moe.permute, moe_pieces.gather_pieces
    experts = Experts(mesh, moe_permute_fusion=False)

    def noting(x, routing, fused):
        y = permute(x, routing, fused=fused)
        there.extend(map(weakref.ref, (x, y)))
        return y

    def gathering(*args):
        found = gather(*args)
        there.append(weakref.ref(found[0]))
        return found

    def working(rows, offsets):
        def others():
            found = [ref() for ref in there]
            mine = x.data_ptr(), probs.data_ptr(), rows.data_ptr()
            return [v.shape for v in found if v is not None and v.data_ptr() not in mine]

        patience = time.monotonic() + 5  # gloo's own threads release received tensors a little later
        while others() and time.monotonic() < patience:
            time.sleep(0.01)
        assert not others()
        return run(rows, offsets)

    run, experts.run = experts.run, working
    moe.permute, moe_pieces.gather_pieces = noting, gathering
    ids, x, probs = random_ids(torch.Generator(), 6, 0.0), torch.randn(6, H), torch.ones(6, K)
    for kind, form in itertools.product(KINDS, ("plain", "overlapped")):
        dispatch(x, probs, ids, experts, kind, FORMS[form])
        assert there
        there.clear()


@spmd(world=4, ep=2, etp=2)
def test_what_is_sent(mesh):
    """alltoall: each token once to a rank of ep, and over etp; allgather: all tokens, both ways."""
    axes, t, sent = mesh, 8, {}
    ids = random_ids(torch.Generator().manual_seed(mesh.rank), t, 0.5)
    for kind, form in itertools.product(KINDS, ("plain", "overlapped")):
        mesh.observer.counts.clear()
        x, probs = (torch.randn(t, n, requires_grad=True) for n in (H, K))
        dispatch(x, probs, ids, Experts(axes), kind, FORMS[form]).sum().backward()
        sent[kind, form] = {key[:2]: n for key, n in mesh.observer.counts.items() if key[2] == "calls"}
        sent[kind, form, "bytes"] = mesh.observer.counts["ep", "all_to_all", "bytes"]
    exchanges = 6  # probs and ids, x, the sums; gradients of these three
    both = {("ep", "all_to_all"): exchanges, ("etp", "all_to_all"): exchanges}
    assert sent["alltoall", "overlapped"] == {("etp_ep", "all_gather"): 1} | both
    sizes = {("ep", "all_to_all"): exchanges + 1, ("etp", "all_gather"): 1}
    assert sent["alltoall", "plain"] == both | sizes
    go, come = (
        sum(tokens(mesh, *pair)) for pair in ((mesh.ep.ranks[mesh.ep.rank], None), (None, mesh.ep.rank))
    )
    assert 0 < go < 2 * t, "some to one rank, others to both"
    size = 4 * (go * (2 * K + 2 * H) + come * (2 * K + 2 * H))
    assert sent["alltoall", "overlapped", "bytes"] == size
    assert sent["alltoall", "plain", "bytes"] == size + 4 * mesh.ep.size
    for form in ("plain", "overlapped"):
        assert sent["allgather", form] == {
            ("etp_ep", "all_gather"): 4,  # ids, x, probs; in the backward dy
            ("etp_ep", "reduce_scatter"): 3,  # the sums; gradients of x, probs
        }


def tokens(mesh, source, target):
    """Tokens from a rank of the world to one of the ep axis, each None for all."""
    for rank in mesh.ep.ranks if source is None else [source]:
        ids = random_ids(torch.Generator().manual_seed(rank), 8, 0.5)
        for there in range(mesh.ep.size) if target is None else [target]:
            yield int((ids // (E // mesh.ep.size) == there).any(1).sum())

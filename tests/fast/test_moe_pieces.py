"""Tokens in blocks of ranks: over memory in common as by collectives, in which order, and what ranks late do.

The memory is that of `peer_files.py`, as in fast/test_tp_overlap.py.
"""

import itertools
import random
import time
from dataclasses import replace

import pytest
import torch

from nanomegatron import router as moe_router
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.fast import moe_pieces
from nanomegatron.fast.moe_dispatch import AllGatherInPieces, OverlappedMoe
from nanomegatron.fast.pieces import scatter_pieces
from nanomegatron.mesh import Mesh
from nanomegatron.ops.permute import permute, permute_block, route, unpermute, unpermute_block
from nanomegatron.param import WeightGradStore, accumulate, is_deferred
from tests.fast.test_moe_dispatch import (
    CONFIG,
    DROPS,
    HALVES,
    LATE,
    OVERLAPPED,
    PLAIN,
    check,
    layer_of,
    trained,
)
from tests.fast.test_tp_overlap import share_files
from tests.gpu.ranks import Dawdled
from tests.moe_routers import batch_of, dispatch
from tests.spmd import run_spmd, spmd
from tests.test_moe_dispatch import E, Experts, H, every_case, near, random_ids

GATHER = replace(CONFIG, moe_token_dispatcher_type="allgather")
LAYOUTS = {"ep2": (2, {"ep": 2}), "ep4": (4, {"ep": 4}), "etp2": (2, {"tp": 2, "etp": 2})}
LAYOUTS["ep2 etp2"] = 4, {"tp": 2, "ep": 2, "etp": 2}


def in_memory(mesh, folder):
    peers = share_files(mesh.etp_ep, folder)
    every_case(mesh, ("allgather",), {"overlapped": OverlappedMoe(peers)})
    assert all(peers.memory(mesh.etp_ep, mesh.device, kind).size for kind in ("all_gather", "reduce_scatter"))


@pytest.mark.parametrize("layout", ["ep2", "etp2", "ep2 etp2", pytest.param("ep4", marks=pytest.mark.full)])
def test_memory_in_common_does_as_well(layout, tmp_path):
    world, sizes = LAYOUTS[layout]
    run_spmd(in_memory, world, str(tmp_path), timeout=120, **sizes)


def layers(mesh, folder):
    """Halves go by collectives nevertheless."""
    s, peers = 6 * mesh.tp.size, share_files(mesh.etp_ep, folder)
    memory = peers.memory(mesh.etp_ep, mesh.device, "reduce_scatter")
    for more in ({}, DROPS):
        config = replace(GATHER, **more)
        plain = trained(mesh, config, PLAIN, s=s)
        check(plain, trained(mesh, replace(CONFIG, **more), PLAIN, s=s), rel=5e-6)
        check(trained(mesh, config, OVERLAPPED, s=s), plain, rel=0)
        check(trained(mesh, config, HALVES, s=s), plain, rel=5e-6)
    sixteen = [trained(mesh, config, form, s=s, dtype=torch.bfloat16) for form in (PLAIN, OVERLAPPED)]
    check(*sixteen, rel=0)
    copied = OverlappedMoe(peers)
    found = trained(mesh, config, copied, s=s)
    check(found, plain, rel=5e-6)
    begun = memory.slot
    check(trained(mesh, config, OverlappedMoe(peers, halves=True), s=s), plain, rel=5e-6)
    assert memory.size and memory.slot == begun, "not used"
    for how in (dict(late=True), dict(again=True), dict(again=True, late=True)):
        check(trained(mesh, config, copied, s=s, **how), found, rel=0)
    check(trained(mesh, replace(config, **LATE), copied, s=s), found, rel=0)


@pytest.mark.parametrize("layout", ["ep2", "ep2 etp2", pytest.param("ep4", marks=pytest.mark.full)])
def test_layers_by_all_ways(layout, tmp_path):
    world, sizes = LAYOUTS[layout]
    run_spmd(layers, world, str(tmp_path), timeout=120, **sizes)


@spmd(world=4, ep=4)
def test_late_ranks(mesh, tmp_path, full):
    """Calls of all sizes, with or without a backward; each rank is late at another place."""
    axes, dice, same = mesh, random.Random(mesh.rank), random.Random(0)
    peers, experts = share_files(mesh.etp_ep, tmp_path), Experts(axes)
    run = experts.run

    def dawdle():
        time.sleep(dice.choice((0, 0, 0.003)))

    experts.run = lambda rows, offsets: Dawdled.apply(run(Dawdled.apply(rows, dawdle), offsets), dawdle)
    for turn in range(40 if full else 16):
        t = same.choice((1, 3, 8, 40)) if turn else 2
        generator = torch.Generator().manual_seed(100 * turn + mesh.rank)
        x, grad = (torch.randn(t, H, generator=generator) for _ in range(2))
        ids = random_ids(generator, t, 0.3)
        probs, found = torch.rand(ids.shape, generator=generator), []
        for form in (OverlappedMoe(peers), OVERLAPPED):
            leaf, weights = x.clone().requires_grad_(), probs.clone().requires_grad_()
            dawdle()
            rows = Dawdled.apply(leaf, dawdle)
            y = dispatch(rows, weights, ids, experts, "allgather", form, pause=dawdle)
            if turn % 4:
                y.backward(grad)
            found.append([v for v in (y.detach(), leaf.grad, weights.grad) if v is not None])
        for ours, theirs in zip(*found, strict=True):
            near(ours, theirs)
    assert peers.describe(axes.etp_ep) == "GPU copy engines"


class Noting:
    """What is waited for, and says so."""

    def __init__(self, waited, word, log):
        self.waited, self.word, self.log = waited, word, log

    def wait(self):
        self.log.append(self.word)
        return self.waited.wait()


FORWARD = "gather router losses come come activate experts scatter sum"
BACKWARD = "gather activate come come experts scatter weights router sum"


def ordered(mesh, folder):
    """x is sent before the router, ids before its losses; gradients are summed behind weights' and its.

    Activations are recomputed while the gradients of the result travel.
    """
    log, queues = [], []
    peers = share_files(mesh.etp_ep, folder) if folder else None
    gather, scatter, run = moe_pieces.gather_pieces, moe_pieces.scatter_pieces, WeightGradStore.run
    config = replace(GATHER, recompute_granularity="selective", recompute_modules=("moe_act",))
    of_gate, layer = moe_router.GateFunction.backward, layer_of(mesh, config, OverlappedMoe(peers))

    def gathering(*args):
        log.append("gather")
        gathered, arrivals = gather(*args)
        coming = [(rows, Noting(arrival, "come", log)) for rows, arrival in arrivals]
        return gathered, coming if folder else coming * 2  # there are two pieces, or one

    def scattering(*args):
        log.append("scatter")
        return Noting(scatter(*args), "sum", log)

    def running(works):
        assert len(works) == 1
        log.append("weights")
        run(works)

    def gate(ctx, grad):
        log.append("router")
        return of_gate(ctx, grad)

    def tell(word):
        return lambda *_: log.append(word)

    def combining(self, rows, recompute):
        queues.append(recompute)
        return combine(self, rows, recompute)

    def before(owner, name, word):
        """Note each call of a method."""
        method = getattr(owner, name)
        setattr(owner, name, lambda *args: log.append(word) or method(*args))

    moe_pieces.gather_pieces, moe_pieces.scatter_pieces = gathering, scattering
    combine, AllGatherInPieces.start_combine = AllGatherInPieces.start_combine, combining
    WeightGradStore.run, moe_router.GateFunction.backward = staticmethod(running), staticmethod(gate)
    ParamAndGradBuckets(layer, ParallelConfig(), mesh).zero_grad_buffer(1)
    before(layer.router, "choose", "router")
    before(layer.router, "balance", "losses")
    before(layer.experts, "act", "activate")
    layer.experts.register_forward_hook(tell("experts"))
    layer.experts.register_full_backward_pre_hook(tell("experts"))
    x = torch.randn(4, 2, layer.experts.config.hidden_size, requires_grad=True)
    y = layer(x, batch_of(2, 4, aux_scale=1.0))
    assert " ".join(log) == FORWARD
    log.clear()
    assert len(queues[0]) == 1
    y.sum().backward()
    assert " ".join(log) == BACKWARD and x.grad is not None
    assert queues == [[]], "released"


@pytest.mark.parametrize("files", [False, True], ids=["collectives", "memory"])
def test_the_order_in_which_all_is_launched(files, tmp_path):
    run_spmd(ordered, 2, str(tmp_path) if files else "", ep=2)


def in_step(mesh, folder):
    """Of three and more ranks none pushes before all have a block to push; the own one is made last."""
    axis, log = mesh.etp_ep, []
    rank, size = mesh.etp_ep.rank, mesh.etp_ep.size
    peers = share_files(axis, folder)
    memory = peers.memory(axis, mesh.device, "reduce_scatter")
    barrier, copy = memory.barrier_before_copies, memory.copy
    memory.barrier_before_copies = lambda ready: log.append("barrier") or barrier(ready)
    memory.copy = lambda *copies: log.append("copy") or copy(*copies)

    def make(to, out):
        log.append(to)
        out.fill_(10 * rank + to)

    found = scatter_pieces(make, torch.empty(2 * size, 3), axis, peers).wait()
    assert (found == 10 * sum(range(size)) + size * rank).all()
    first, *others = [(rank + step) % size for step in range(1, size)]
    assert log == [first, *["barrier"] * (size > 2), *others, rank, "copy"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_push_in_step(ranks, tmp_path):
    run_spmd(in_step, ranks, str(tmp_path), ep=ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_blocks_make_the_whole(seed, dtype):
    """Blocks of tokens in any order, some of none; rows of padding are zeroed once."""
    generator = torch.Generator().manual_seed(seed)
    t, k, multiple = (int(torch.randint(1, n, (), generator=generator)) for n in (20, 4, 5))
    ids = torch.randint(-1, E, (t, k), dtype=torch.int32, generator=generator)
    if seed == 0:
        ids.fill_(-1)
    routing, probs = route(ids, E, multiple), torch.rand(t, k, generator=generator)
    x, z = (torch.randn(n, H, generator=generator).to(dtype) for n in (t, len(routing.source)))
    leaf = probs.clone().requires_grad_()
    (dots,) = torch.autograd.grad(unpermute(z, routing, leaf), leaf, x)
    ends = sorted(int(torch.randint(t + 1, (), generator=generator)) for _ in range(3))
    blocks = [slice(*pair) for pair in itertools.pairwise([0, *ends, t])]
    random.Random(seed).shuffle(blocks)
    for weights in (None, probs):
        out, y = torch.full_like(z, torch.nan), torch.full_like(x, torch.nan)
        found = torch.full_like(probs, torch.nan)
        for i, block in enumerate(blocks):
            given = None if weights is None else weights[block]
            one = routing.block(block)
            one = one if i else replace(one, source=routing.source)
            found[block] = permute_block(out, x[block], one, given, z)
            assert permute_block(out, x[block], one, given) is None
            unpermute_block(y[block], z, routing.block(block), given)
        assert torch.equal(out, permute(x, routing, weights)) and torch.equal(
            y, unpermute(z, routing, weights)
        )
        torch.testing.assert_close(found, dots)


def test_what_does_not_fit_is_refused():
    routing = route(torch.zeros(4, 1, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match="a matrix of 2 rows"):
        permute_block(torch.zeros(4, 3), torch.zeros(3, 3), routing.block(slice(0, 2)))
    with pytest.raises(ValueError, match="a matrix of 2 rows"):
        unpermute_block(torch.zeros(3, 3), torch.zeros(4, 3), routing.block(slice(0, 2)))


@pytest.mark.parametrize("form", [PLAIN, OVERLAPPED], ids=["plain", "overlapped"])
def test_one_rank_alone(form):
    x = torch.randn(5, H, requires_grad=True)
    ids = torch.arange(3, dtype=torch.int32).repeat(5, 1)
    how = () if form is PLAIN else (form,)
    y = dispatch(x, torch.ones(5, 3), ids, Experts(Mesh()), "allgather", *how)
    torch.testing.assert_close(y, x * (0.3 + 1.3 + 2.3))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 3.9))


def test_a_pipeline_that_defers_all_work_defers_that_of_experts():
    """Their own store, under which a grouped matmul runs at once, does not take its place meanwhile."""
    weight, pipeline = torch.nn.Parameter(torch.zeros(2, 2)), WeightGradStore()
    weight.wgrad_store = pipeline
    own = moe_pieces.OverlappedWgrads(weight, beside_nccl=True)
    with pipeline.collect() as works:
        own.collect()
        assert is_deferred(weight)
        accumulate(weight, lambda out, beta: out.fill_(1))
        own.stop()
        own.run()
        assert len(works) == 1 and weight.grad is None
    WeightGradStore.run(works)
    assert torch.equal(weight.grad, torch.ones(2, 2))

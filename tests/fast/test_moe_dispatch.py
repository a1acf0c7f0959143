"""What runs while tokens travel: the order, and that it changes nothing; the plain form beside the others."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from nanomegatron.build import buckets_class
from nanomegatron.checkpoint.checkpoint import offset_of
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.fast import moe_dispatch
from nanomegatron.fast.discard_output import discarding_project
from nanomegatron.fast.fused_layer import FusedLayers, fused_norm
from nanomegatron.fast.host_copy import AsyncHostCopy
from nanomegatron.fast.moe_dispatch import OverlappedMoe, split_rows
from nanomegatron.layers import MLP
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.model import TransformerLayer
from nanomegatron.moe import MoELayer
from nanomegatron.ops.swiglu import activation
from nanomegatron.param import Init, WeightGradStore, accumulate
from nanomegatron.pick_variants import pick_variants
from nanomegatron.recompute import recomputed
from tests.checkpoints import ALONE
from tests.moe_routers import batch_of, dispatch
from tests.spmd import run_spmd, spmd

E, H, K = 4, 16, 2
CONFIG = TransformerConfig(
    num_layers=2,
    hidden_size=H,
    num_attention_heads=2,
    swiglu=True,
    disable_bias_linear=True,
    num_experts=E,
    moe_ffn_hidden_size=24,
    moe_router_topk=K,
    moe_token_dispatcher_type="alltoall",
    moe_router_load_balancing_type=("seq_aux_loss",),
    moe_aux_loss_coeff=(0.1,),
    moe_z_loss_coeff=0.01,
    moe_shared_expert_intermediate_size=8,
    moe_shared_expert_gate=True,
)
LATE = dict(moe_shared_expert_overlap=True)
DROPS = dict(moe_expert_capacity_factor=0.6)
LAYOUTS = {
    "ep2": (2, {"ep": 2}),
    "ep4": (4, {"ep": 4}),
    "ep2 etp2": (4, {"tp": 2, "ep": 2, "etp": 2}),
    "ep4 tp2": (4, {"tp": 2, "ep": 4, "etp": 1}),
}
BATCH = 4  # microbatches


PLAIN, OVERLAPPED, HALVES = None, OverlappedMoe(None), OverlappedMoe(None, halves=True)


def layer_of(mesh, config, form=OVERLAPPED, dtype=torch.float32):
    """A layer with experts; its shared ones count their calls."""
    init = Init(seed=3, name="decoder.layers.1.mlp", std=0.3, dtype=dtype)
    size = config.moe_shared_expert_intermediate_size
    shared = MLP(config, mesh.tp, init.at("shared_experts"), size) if size else None
    layer = MoELayer(config, 1, mesh, init, activation(config), shared)
    pick_variants(layer, mesh.cp)
    if form is not None:
        form.install(layer)
    if "moe_act" in config.recompute_modules:
        layer.experts.project = partial(discarding_project, prefetch=form.prefetch if form else None)
    layer.calls = []
    if shared is not None:
        shared.register_forward_hook(lambda *_: layer.calls.append(torch.is_grad_enabled()))
    return layer


def trained(mesh, config, form=OVERLAPPED, s=6, again=False, late=False, parallel=None, dtype=torch.float32):
    """Results, gradients of inputs, of weights by name, counts of the router; microbatches of s tokens.

    again: the layer is recomputed in the backward. late: weight gradients are deferred.
    """
    config = replace(config, sequence_parallel=mesh.tp.size > 1)
    layer = layer_of(mesh, config, form, dtype)
    parallel = parallel or ParallelConfig()
    buckets = buckets_class(parallel)(layer, parallel, mesh)
    buckets.zero_grad_buffer(BATCH // mesh.dp_cp.size)
    layer.router.begin_step()
    deferred, found = WeightGradStore(), []
    for p in layer.parameters():
        p.wgrad_store = deferred
    for i in range(mesh.dp.rank, BATCH, mesh.dp.size):
        x, grad = torch.randn(2, s, 2, H, generator=torch.Generator().manual_seed(i)).to(dtype)
        x, grad = (v.chunk(mesh.tp.size)[mesh.tp.rank].clone() for v in (x, grad))
        batch = batch_of(2, len(x), aux_scale=0.5)

        def run(x, batch=batch):
            return layer(x, batch)

        x.requires_grad_()
        y = recomputed(run, x) if again else run(x)
        with deferred.collect() if late else nullcontext(()) as works:
            y.backward(grad)
        assert not late or any(p is layer.experts.weight1 for p, _ in works)
        WeightGradStore.run(works)
        found += [y.detach(), x.grad]
    buckets.finish_grad_sync()
    grads = {}
    for bucket, piece in buckets.slices():
        name = f"{piece.part.name} {offset_of(piece.part)} {piece.at}"
        grads[name] = piece.shard_view(bucket.grad_shard).clone()
    return found, grads, [layer.router.counts.clone(), layer.router.dropped.clone()]


def near(found, expected, rel=2e-6):
    assert found.shape == expected.shape
    assert (found - expected).norm() <= rel * expected.norm() + 1e-7, (found - expected).abs().max()


def check(found, expected, rel=2e-6):
    """To the bit with rel 0."""
    assert set(found[1]) == set(expected[1]) and expected[1]
    pairs = list(zip(found[0], expected[0], strict=True))
    pairs += [(grad, expected[1][name]) for name, grad in found[1].items()]
    for ours, theirs in pairs:
        assert torch.equal(ours, theirs) if rel == 0 else near(ours, theirs, rel) is None
    assert all(torch.equal(*pair) for pair in zip(found[2], expected[2], strict=True))


def same(mesh, drops):
    """Each form and late shared experts against the plain one; tokens of a rank: many, odd, one or two."""
    for more, n in itertools.product(({}, DROPS) if drops else ({},), (6, 5, 1)):
        s = n * mesh.tp.size
        config = replace(CONFIG, **more)
        plain = trained(mesh, config, PLAIN, s=s)
        check(trained(mesh, config, OVERLAPPED, s=s), plain, rel=0)
        check(trained(mesh, replace(config, **LATE), OVERLAPPED, s=s), plain, rel=0)
        halves = trained(mesh, config, HALVES, s=s)
        check(halves, plain)
        check(trained(mesh, replace(config, **LATE), HALVES, s=s), halves, rel=0)
        assert not more or s == mesh.tp.size or plain[2][1].any(), "some are dropped"
        sixteen = [trained(mesh, config, form, s=s, dtype=torch.bfloat16) for form in (PLAIN, OVERLAPPED)]
        check(*sixteen, rel=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_form_gives_the_same(layout, full):
    """All layouts meet each kind of batch; the fast tier takes two of four for drops."""
    world, sizes = LAYOUTS[layout]
    run_spmd(same, world, full or layout in ("ep2", "ep4 tp2"), **sizes, timeout=120)


def of_rank(mesh, *args):
    """What `trained` gives of a rank, with its gradients whole."""
    found, grads, _ = trained(mesh, *args)
    return found, grads, mesh.dp.rank


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_train_as_one_process(layout):
    """Results and gradients of all tokens, and every slice of the gradients of weights."""
    world, sizes = LAYOUTS[layout]
    config, tp = replace(CONFIG, **LATE), sizes.get("tp", 1)
    expected, whole, _ = trained(ALONE, config, HALVES)
    plain = trained(ALONE, config, PLAIN)
    check((expected, whole, plain[2]), plain)
    ranks = run_spmd(of_rank, world, config, HALVES, **sizes, timeout=120)
    dp = world // tp
    for i, theirs in enumerate(expected):
        microbatch, kind = divmod(i, 2)
        members = [found for found, _, rank in ranks if rank == microbatch % dp]
        assert len(members) == tp
        near(torch.cat([found[microbatch // dp * 2 + kind] for found in members]), theirs, 1e-5)
    names = {name.split()[0] for name in whole}
    seen = set()
    for _, grads, _ in ranks:
        for name, grad in grads.items():
            part = name.split()[0]
            if tp == 1 or "router" in name or "gate_weight" in name:
                near(grad, whole[name], 1e-5)
            seen.add(part)
    assert seen == names


def with_everything(mesh):
    """Recomputed, deferred, in small buckets reduced early; biases, whose gradients autograd adds up."""
    plain = trained(mesh, CONFIG, HALVES)
    check(trained(mesh, CONFIG, HALVES, late=True), plain, rel=0)
    check(trained(mesh, CONFIG, HALVES, again=True), plain, rel=0)
    for module in "shared_experts", "moe_act":
        config = replace(CONFIG, recompute_granularity="selective", recompute_modules=(module,))
        check(trained(mesh, config, HALVES), plain, rel=0)
        check(trained(mesh, replace(config, **LATE), HALVES, again=True, late=True), plain, rel=0)
        check(trained(mesh, config, OVERLAPPED), trained(mesh, config, PLAIN, late=True), rel=0)
    parallel = ParallelConfig(ddp_bucket_size=300, overlap_grad_reduce=True)
    check(trained(mesh, CONFIG, HALVES, parallel=parallel), plain)
    sharded = replace(parallel, data_parallel_sharding_strategy="optim_grads")
    check(trained(mesh, CONFIG, HALVES, parallel=sharded), trained(mesh, CONFIG, PLAIN, parallel=sharded))
    biased = replace(CONFIG, disable_bias_linear=False, swiglu=False)
    check(trained(mesh, biased, HALVES), trained(mesh, biased, PLAIN))


def test_it_goes_with_everything():
    run_spmd(with_everything, 2, ep=2, timeout=120)


@pytest.mark.parametrize("halves", [False, True])
def test_a_weight_has_a_contribution_of_each_half(halves):
    layer = layer_of(ALONE, replace(CONFIG, disable_bias_linear=False), HALVES if halves else OVERLAPPED)
    uses = {name: p.spec.uses for name, p in layer.named_parameters()}
    twice = {"experts.weight1", "experts.weight2"} if halves else set()
    assert {name for name, n in uses.items() if n == 2} == twice and set(uses.values()) <= {1, 2}


@pytest.mark.parametrize("form", [PLAIN, OVERLAPPED], ids=["plain", "overlapped"])
def test_shared_experts_are_recomputed(form):
    again = replace(CONFIG, recompute_granularity="selective", recompute_modules=("shared_experts",))
    kept = {}
    for config in (CONFIG, again):
        layer, sizes = layer_of(ALONE, config, form), []
        x = torch.randn(6, 2, H).requires_grad_()

        def pack(t, sizes=sizes):
            sizes.append(t.shape)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = layer(x, batch_of(2, 6))
        forward = list(layer.calls)
        y.sum().backward()
        kept[config] = (forward, layer.calls[len(forward) :], (6, 2, 8) in sizes, x.grad is not None)
    assert kept[CONFIG] == ([True], [], True, True)
    assert kept[again] == ([False], [True], False, True)


@pytest.mark.parametrize("shared", [None, 8])
def test_norms_before_experts_are_recomputed(shared):
    """Nothing keeps what the router and the shared experts read, flattened or not."""
    parts = dict(moe_shared_expert_intermediate_size=shared, moe_shared_expert_gate=shared is not None)
    again = dict(recompute_granularity="selective", recompute_modules=("layernorm",))
    found = []
    for more in ({}, again):
        config, calls = replace(CONFIG, **parts, **more), []
        layer = TransformerLayer(config, 1, Mesh(), Init(seed=3, name="decoder.layers.1", std=0.3))
        pick_variants(layer, Axis.single("cp"))
        x = torch.randn(6, 2, H, generator=torch.Generator().manual_seed(1)).requires_grad_()

        def counted(norm, *args, calls=calls, layer=layer):
            calls.append(norm is layer.pre_mlp_layernorm)
            return fused_norm(norm, *args)

        run = FusedLayers(counted, recompute=config.recomputes("layernorm"))
        y = run([layer], x, batch_of(2, 6), {None: None})
        calls.clear()
        y.sum().backward()
        assert sum(calls) == (3 if shared else 1) * bool(more)
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


class Noted(torch.autograd.Function):
    """x itself, once it is noted in `log`, and again in the backward; there also the gradient of a weight."""

    @staticmethod
    def forward(ctx, x, word, log, weight=None):
        ctx.word, ctx.log, ctx.weight = word, log, weight
        log.append(word)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(ctx.word)
        if ctx.weight is not None:
            accumulate(ctx.weight, lambda out, beta: ctx.log.append("weights"))
        return grad, None, None, None


class Experts:
    """What a dispatch asks of GroupedExperts: each row is noted and doubled, and an activation discarded."""

    multiple = 1

    def __init__(self, axes, log, prefetch, **settings):
        self.mesh, self.log, self.config = axes, log, replace(CONFIG, **settings)
        self.prefetch = prefetch
        self.weight1 = torch.nn.Parameter(torch.zeros(1, 1))

    def __call__(self, rows, offsets, ends):
        assert ends == offsets.tolist() and ends[-1] == len(rows)
        self.prefetch.append(lambda: self.log.append("again"))
        return 2 * Noted.apply(rows, "experts", self.log, self.weight1)


class Way:
    """Stands for `comm.Pending` and notes its end."""

    def __init__(self, pending, number, log):
        self.pending, self.number, self.log = pending, number, log

    def wait(self):
        assert self.pending.works, "in flight"
        self.log.append(f"end {self.number}")
        return self.pending.wait()


# Exchanges are numbered as they begin.
AGAIN = "begin 2 again end 2"  # of one half at a time, not before its experts
ALONE_ = f"shared read begin 0 end 0 experts begin 1 end 1 | {AGAIN} experts begin 3 weights end 3 shared"
SHARED = f"read begin 0 shared end 0 experts begin 1 end 1 | {AGAIN} experts begin 3 shared weights end 3"
TURNS = "end 0 experts begin 2 end 1 experts begin 3 end 2 end 3"
BACK = "begin 4 begin 5 end 4 experts begin 6 end 5 experts begin 7"
LEFT = "weights end 6 weights end 7"
IN_HALVES = f"shared read begin 0 read begin 1 {TURNS} | {BACK} {LEFT} shared"
BOTH = f"read begin 0 read begin 1 shared {TURNS} | {BACK} shared {LEFT}"
ORDERS = [(OVERLAPPED, {}, ALONE_), (OVERLAPPED, LATE, SHARED), (HALVES, {}, IN_HALVES), (HALVES, LATE, BOTH)]


@spmd(world=2, ep=2)
def test_the_order_in_which_all_is_launched(mesh):
    """Work stands between begin and end of exchanges, in the backward too; sizes come by one message."""
    begin, read, made = moe_dispatch.start_all_to_all, AsyncHostCopy.read, []

    def start_all_to_all(x, *args, **how):
        if x.shape[1] != H:  # ids or probs
            return begin(x, *args, **how)
        n = sum(word.startswith("begin") for word in log)
        log.append(f"begin {n}")
        return Way(begin(x, *args, **how), n, log)

    def reading(self):
        log.append("read")
        made.append(self)
        return read(self)

    moe_dispatch.start_all_to_all, AsyncHostCopy.read = start_all_to_all, reading
    for form, settings, order in ORDERS:
        log: list[str] = []
        x = torch.randn(5, H, requires_grad=True)
        probs, ids = torch.rand(5, K), torch.rand(5, E).topk(K).indices.int()
        experts = Experts(mesh, log, form.prefetch, **settings)
        made.clear()
        mesh.observer.counts.clear()
        y = dispatch(
            x, probs, ids, experts, "alltoall", form, lambda x, log=log: Noted.apply(x, "shared", log)
        )
        torch.testing.assert_close(y, x * (1 + 2 * probs.sum(1, keepdim=True)))
        assert mesh.observer.counts["etp_ep", "all_gather", "calls"] == len(set(made)) == 1
        log.append("|")
        y.sum().backward()
        assert " ".join(log) == order
        torch.testing.assert_close(x.grad, (1 + 2 * probs.sum(1, keepdim=True)).expand_as(x))


@pytest.mark.parametrize("rows", range(6))
def test_halves_of_any_number(rows):
    x = torch.arange(rows)
    first, second = split_rows(x, 2)
    assert torch.equal(torch.cat((first, second)), x) and 0 <= len(second) - len(first) <= 1
    assert split_rows(x, 1)[0] is x


def test_a_half_without_tokens():
    """One process, with nothing to exchange."""
    for rows in range(3):
        x, seen = torch.randn(rows, H, requires_grad=True), []

        class Triple(Experts):
            def __call__(self, rows, offsets, ends, seen=seen):
                seen.append(len(rows))
                return 3 * rows

        ids = torch.zeros(rows, 1, dtype=torch.int32)
        y = dispatch(x, torch.ones(rows, 1), ids, Triple(Mesh(), [], []), "alltoall", HALVES)
        assert torch.equal(y, 3 * x) and seen == [rows // 2, rows - rows // 2]
        y.sum().backward()
        assert (x.grad == 3).all()

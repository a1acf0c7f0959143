"""Experts of a rank against a loop in float64; cut, deferred and recomputed; behind both dispatchers."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from nanomegatron.checkpoint.checkpoint import offset_of
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.fast.discard_output import discarding_project
from nanomegatron.fast.moe_pieces import AdditionStore
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.moe import GroupedExperts, accumulate_grouped
from nanomegatron.ops import grouped_mm
from nanomegatron.ops.grouped_mm import Groups, fits
from nanomegatron.ops.swiglu import activation
from nanomegatron.param import Init, WeightGradStore
from tests.checkpoints import ALONE
from tests.moe_routers import dispatch
from tests.spmd import run_spmd

E, H, FFN = 4, 16, 24
BASE = TransformerConfig(
    num_layers=2,
    hidden_size=H,
    num_attention_heads=2,
    num_experts=E,
    moe_ffn_hidden_size=FFN,
    swiglu=True,
    disable_bias_linear=True,
)
KINDS = {
    "swiglu": {},
    "plain swiglu": dict(bias_swiglu_fusion=False),
    "gelu": dict(swiglu=False),
    "squared relu": dict(swiglu=False, squared_relu=True),
    "biases": dict(disable_bias_linear=False),
    "gelu, biases": dict(swiglu=False, disable_bias_linear=False),
}
INIT = Init(seed=5, name="decoder.layers.1.mlp.experts", std=0.3)
ROWS = [(5, 0, 3, 9), (0, 0, 17, 0), (0, 4, 1, 0), (0, 0, 0, 0)]  # of each expert


def offsets_of(sizes):
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)


def built(config, axes=None, dtype=torch.float32, mesh=ALONE):
    experts = GroupedExperts(config, axes or Mesh(), replace(INIT, dtype=dtype), activation(config))
    if "moe_act" in config.recompute_modules:
        experts.project = discarding_project
    for bias in (experts.bias1, experts.bias2):
        if bias is not None:  # else they are 0
            for part in bias.spec.parts:
                view = part.local_view(bias.data)
                view.copy_(
                    torch.arange(part.start, part.start + len(view)) * 0.01
                    + int(part.name.split(".")[5]) * 0.1
                )
    return experts, ParamAndGradBuckets(experts, ParallelConfig(), mesh)


def activated(config, x):
    if config.swiglu:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    if config.squared_relu:
        return F.relu(x) ** 2
    return F.gelu(x, approximate="none" if config.disable_bias_linear else "tanh")


def one(config, params, i, x):
    """Expert i of a rank that has all of them, x `[r, h]`."""
    w1, w2, b1, b2 = (None if p is None else p.chunk(E)[i] for p in params)
    x = x @ w1.t() if b1 is None else x @ w1.t() + b1
    y = activated(config, x) @ w2
    return y if b2 is None else y + b2


def parameters(experts):
    return [experts.weight1, experts.weight2, experts.bias1, experts.bias2]


def in_float64(experts):
    return [None if p is None else p.detach().double().requires_grad_() for p in parameters(experts)]


def near(found, expected, rel):
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).norm()
    assert error <= rel * expected.double().norm() + 1e-12, float(error / expected.norm())


def check(config, experts, buckets, sizes, rel, extra=2, known=False):
    """Forward and backward in two microbatches; `extra` rows at the end belong to no expert.

    known: the host has the offsets.
    """
    offsets, params = offsets_of(sizes), in_float64(experts)
    buckets.zero_grad_buffer(2)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x, grad = (torch.randn(sum(sizes) + extra, H, generator=generator) for _ in range(2))
        x, grad = x.to(experts.weight1.dtype), grad.to(experts.weight1.dtype)
        grad[sum(sizes) :] = 0
        theirs, ours = x.double().requires_grad_(), x.requires_grad_()
        y, n = experts(ours, offsets, offsets.tolist() if known else None), sum(sizes)
        parts = [one(config, params, i, theirs[a:b]) for i, (a, b) in enumerate(itertools.pairwise(offsets))]
        expected = torch.cat(parts)
        y.backward(grad)
        expected.backward(grad[:n].double())
        near(y[:n], expected, rel)
        near(ours.grad[:n], theirs.grad[:n], rel)
    buckets.finish_grad_sync()
    for p, q in zip(parameters(experts), params, strict=True):
        if p is not None:
            near(p.main_grad, q.grad, rel)


@pytest.mark.parametrize("sizes", ROWS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_against_a_loop_in_float64(kind, sizes):
    config = replace(BASE, **KINDS[kind])
    for dtype, rel in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        for grouped, known, extra in itertools.product((True, False), (True, False), (0, 2)):
            experts, buckets = built(replace(config, moe_grouped_gemm=grouped), dtype=dtype)
            check(config, experts, buckets, sizes, rel, extra, known)


def test_it_is_torchs_grouped_matmul_where_that_fits(monkeypatch):
    """In bf16 all six at once; by the expert where these are known to have much to do."""
    calls, real = [], torch._grouped_mm
    monkeypatch.setattr(torch, "_grouped_mm", lambda *a, **k: calls.append(a[1].dim()) or real(*a, **k))

    def run(config, sizes=(5, 0, 3, 9), dtype=torch.bfloat16, known=False):
        calls.clear()
        experts, _ = built(config, dtype=dtype)
        x, offsets = torch.randn(sum(sizes), H, dtype=dtype, requires_grad=True), offsets_of(sizes)
        experts(x, offsets, offsets.tolist() if known else None).sum().backward()
        return calls

    assert run(BASE) == run(BASE, known=True) == [3, 3, 3, 2, 3, 2]
    monkeypatch.setattr(grouped_mm, "LARGE", 8 * H * FFN)
    assert run(BASE, (16, 0, 8, 8)) == run(BASE)
    assert run(BASE, (16, 0, 8, 8), known=True) == []
    assert run(BASE, (16, 0, 8, 7), known=True) == [3, 3, 2], "the second layer is half as large"
    assert run(replace(BASE, moe_grouped_gemm=False)) == run(BASE, dtype=torch.float32) == []
    assert run(replace(BASE, moe_ffn_hidden_size=20)) == run(BASE, (0, 0, 0, 0)) == []
    assert fits(torch.empty(1, 8, dtype=torch.bfloat16), 8, 16)
    assert not fits(torch.empty(1, 8, dtype=torch.bfloat16), 12, 16)


def test_both_ways_to_weight_gradients():
    """Rounded to bf16 and added, or added in fp32: equal to a rounding, over many microbatches."""
    found = []
    for grouped in True, False:
        experts, buckets = built(replace(BASE, moe_grouped_gemm=grouped), dtype=torch.bfloat16)
        check(BASE, experts, buckets, (5, 0, 3, 9), 2e-2)
        found.append(experts.weight1.main_grad.clone())
    near(found[0], found[1], 5e-3)


def test_gradients_go_to_autograd_without_buckets():
    for dtype in torch.float32, torch.bfloat16:
        experts = GroupedExperts(BASE, Mesh(), replace(INIT, dtype=dtype), activation(BASE))
        twin, buckets = built(BASE, dtype=dtype)
        buckets.zero_grad_buffer(1)
        x, offsets = torch.randn(17, H).to(dtype), offsets_of((5, 0, 3, 9))
        for each in experts, twin:
            each(x, offsets).float().square().sum().backward()
        for p, q in zip(experts.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.main_grad.to(dtype)) and q.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_experts_without_rows_get_zeros(dtype):
    """Over what the step before has left; a later microbatch keeps what they have."""
    experts, buckets = built(BASE, dtype=dtype)
    buckets.zero_grad_buffer(2)
    for p in experts.parameters():
        p.main_grad.fill_(torch.nan)
    idle, found = [True, False, False, False], []
    for sizes in (0, 5, 3, 9), (0, 12, 5, 0):
        experts(torch.randn(17, H).to(dtype), offsets_of(sizes)).sum().backward()
        found.append([p.main_grad.view(E, -1).clone() for p in experts.parameters()])
        assert all([not grad.any() for grad in p] == idle and p.isfinite().all() for p in found[-1])
    assert all(torch.equal(p[3], q[3]) for p, q in zip(*found))


@pytest.mark.parametrize("beside_nccl", [False, True])
def test_a_grouped_matmul_does_not_run_beside_nccl(beside_nccl):
    """It runs at once, and only the addition later; a pipeline, which waits for nothing, defers both."""
    weight, made = torch.nn.Parameter(torch.zeros(6, 4)), []
    weight.wgrad_store = AdditionStore() if beside_nccl else WeightGradStore()

    def multiply():
        made.append("matmul")
        return torch.ones(2, 3, 4)

    with weight.wgrad_store.collect() as works:
        assert accumulate_grouped(weight, multiply) is None and len(works) == 1
    assert made == ["matmul"] * beside_nccl and weight.grad is None
    WeightGradStore.run(works)
    assert made == ["matmul"] and (weight.grad == 1).all()
    assert (accumulate_grouped(weight, multiply) == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weight_gradients_can_be_deferred(dtype):
    """A backward leaves two works, and the gradients are the same to the bit once these are done."""
    now, buckets = built(BASE, dtype=dtype)
    later, others = built(BASE, dtype=dtype)
    x, offsets, deferred = torch.randn(17, H).to(dtype), offsets_of((5, 0, 3, 9)), WeightGradStore()
    for group in buckets, others:
        group.zero_grad_buffer(1)
    for p in later.parameters():
        p.wgrad_store = deferred
    now(x, offsets).sum().backward()
    with deferred.collect() as works:
        later(x, offsets).sum().backward()
    assert len(works) == 2 and all((p.main_grad == 0).all() for p in later.parameters())
    deferred.run(works)
    others.finish_grad_sync()
    for p, q in zip(now.parameters(), later.parameters(), strict=True):
        assert torch.equal(p.main_grad, q.main_grad) and p.main_grad.any()


@pytest.mark.parametrize("sizes", ROWS, ids=str)
@pytest.mark.parametrize("kind", ["swiglu", "gelu, biases"])
def test_activations_recomputed(kind, sizes):
    """The same bits, and what the second layer reads is not kept."""
    config, results = replace(BASE, **KINDS[kind]), []
    again = replace(config, recompute_granularity="selective", recompute_modules=("moe_act",))
    for settings in config, again:
        for dtype in torch.float32, torch.bfloat16:
            (experts, buckets), kept = built(settings, dtype=dtype), []
            buckets.zero_grad_buffer(1)
            x = torch.randn(sum(sizes), H, generator=torch.Generator().manual_seed(1)).to(dtype)
            x.requires_grad_()
            keep = partial(lambda kept, t: kept.append(t.shape) or t, kept)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                y = experts(x, offsets_of(sizes))
            y.sum().backward()
            grads = [p.main_grad for p in experts.parameters()]
            results.append((y.detach(), x.grad, *grads, kept))
    for plain, made in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain[:-1], made[:-1], strict=True))
        inner = (sum(sizes), FFN)
        assert plain[-1].count(inner) == made[-1].count(inner) + 1


def axes_of(ep=1, etp=1, i=0, j=0):
    """Of rank (i, j) without anybody to talk to."""
    return Mesh(ep=Axis("ep", ep, i, tuple(range(ep))), etp=Axis("etp", etp, j, tuple(range(etp))))


@pytest.mark.parametrize("kind", ["swiglu", "gelu, biases"])
def test_ranks_hold_slices_of_the_same_experts(kind):
    """By name, to the bit, each of them by one rank of ep and etp."""
    config = replace(BASE, **KINDS[kind])
    whole = GroupedExperts(config, Mesh(), INIT, activation(config))
    names = [part.name for p in whole.parameters() for part in p.spec.parts]
    inner = ["linear_fc1.gate", "linear_fc1.up"] if config.swiglu else ["linear_fc1"]
    layers = [f"{layer}.weight" for layer in inner] + ["linear_fc2.weight_t"]
    if not config.disable_bias_linear:
        layers += [f"{layer}.bias" for layer in (*inner, "linear_fc2")]
    assert sorted(names) == sorted(f"{INIT.name}.{i}.{layer}" for i in range(E) for layer in layers)
    expected = {part.name: part.local_view(p) for p in whole.parameters() for part in p.spec.parts}
    for ep, etp in ((2, 1), (4, 1), (1, 2), (2, 3)):
        seen = {}
        for i, j in itertools.product(range(ep), range(etp)):
            for p in GroupedExperts(config, axes_of(ep, etp, i, j), INIT, activation(config)).parameters():
                assert p.spec.expert and p.spec.decay == (p.dim() == 2)
                assert sum(part.local_view(p).numel() for part in p.spec.parts) == p.numel()
                for part in p.spec.parts:
                    assert torch.equal(part.local_view(p), part.global_view(expected[part.name]))
                    assert part.shape == expected[part.name].shape
                    if part.owner:
                        seen[part.name] = seen.get(part.name, 0) + part.local_view(p).numel()
        assert seen == {name: t.numel() for name, t in expected.items()}
    std1, std2 = (expected[f"{INIT.name}.0.{layer}"].std() for layer in (layers[0], "linear_fc2.weight_t"))
    assert 0.27 < std1 < 0.33 and 0.009 < std2 < 0.011, "the second: 0.02 / sqrt(2 * 2 layers)"


def test_what_does_not_divide_is_refused():
    for axes in axes_of(ep=3), axes_of(etp=5):
        with pytest.raises(ValueError, match="4 experts of 24 features must be multiples of"):
            GroupedExperts(BASE, axes, INIT, activation(BASE))


def test_spans_are_of_experts_with_rows():
    assert Groups(offsets_of((5, 0, 3))).spans == [(0, 0, 5), (2, 5, 8)]
    assert Groups(offsets_of((0, 0))).spans == Groups(offsets_of((5, 0)), [0, 0, 0]).spans == []


# Behind the dispatchers.

LAYOUTS = {
    "ep2": (2, {"ep": 2}),
    "ep4": (4, {"ep": 4}),
    "etp2": (2, {"tp": 2, "etp": 2}),
    "ep2 etp2": (4, {"tp": 2, "ep": 2, "etp": 2}),
    "ep2 edp2": (4, {"tp": 2, "ep": 2, "etp": 1}),
}
WAYS = list(itertools.product(("allgather", "alltoall"), ("swiglu", "gelu, biases")))
TOKENS, TOPK = 24, 2


def layer(mesh, way, kind, capacity):
    """This rank's tokens through its experts; result, gradients of x and probs, slices of main_grad."""
    config = replace(BASE, **KINDS[kind], moe_router_topk=TOPK)
    if capacity:
        config = replace(config, moe_expert_capacity_factor=4.0, moe_pad_expert_input_to_capacity=True)
    axes = mesh
    experts, buckets = built(config, axes, mesh=mesh)
    generator = torch.Generator().manual_seed(7)
    x, grad = (torch.randn(TOKENS, H, generator=generator) for _ in range(2))
    probs = torch.rand(TOKENS, TOPK, generator=generator)
    ids = torch.rand(TOKENS, E, generator=generator).topk(TOPK).indices.int()
    ids[::5, 1] = -1
    x, probs, ids, grad = (v.chunk(mesh.world.size)[mesh.rank].clone() for v in (x, probs, ids, grad))
    x.requires_grad_(), probs.requires_grad_()
    buckets.zero_grad_buffer(1)
    y = dispatch(x, probs, ids, experts, way)
    y.backward(grad)
    buckets.finish_grad_sync()
    grads = {
        part.name: (offset_of(part), part.local_view(p.main_grad))
        for p in experts.parameters()
        for part in p.spec.parts
    }
    return y.detach(), x.grad, probs.grad, grads


def layers(mesh):
    return [layer(mesh, *way, capacity) for way in WAYS for capacity in (False, True)]


@pytest.fixture(scope="module")
def alone():
    return layers(ALONE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_one_process(layout, alone):
    """fp32: results, gradients of tokens and probabilities, and of weights after the sum over edp."""
    world, sizes = LAYOUTS[layout]
    ranks = run_spmd(layers, world, **sizes)
    for expected, each in zip(alone, zip(*ranks, strict=True), strict=True):
        for whole, *parts in zip(expected[:3], *(found[:3] for found in each), strict=True):
            near(torch.cat(parts), whole, 1e-6)
        seen = set()
        for found in each:
            for name, (offset, grad) in found[3].items():
                _, whole = expected[3][name]
                for dim, start in enumerate(offset):
                    whole = whole.narrow(dim, start, grad.shape[dim])
                near(grad, whole, 2e-6)
                seen.add((name, offset))
        assert {name for name, _ in seen} == set(expected[3])


def test_one_process_is_the_sum_over_each_tokens_experts(alone):
    """The oracle of the others, in float64."""
    generator = torch.Generator().manual_seed(7)
    x, grad = (torch.randn(TOKENS, H, generator=generator).double() for _ in range(2))
    probs = torch.rand(TOKENS, TOPK, generator=generator).double()
    ids = torch.rand(TOKENS, E, generator=generator).topk(TOPK).indices
    ids[::5, 1] = -1
    x.requires_grad_(), probs.requires_grad_()
    for (_, kind), found in zip((way for way in WAYS for _ in range(2)), alone, strict=True):
        config = replace(BASE, **KINDS[kind])
        experts, _ = built(config)
        params = in_float64(experts)
        run = partial(one, config, params)
        rows = [
            sum(probs[t, j] * run(e, x[t : t + 1])[0] for j, e in enumerate(row) if e >= 0)
            for t, row in enumerate(ids.tolist())
        ]
        y = torch.stack(rows)
        dx, dprobs = torch.autograd.grad(y, (x, probs), grad)
        for ours, theirs in zip(found[:3], (y, dx, dprobs), strict=True):
            near(ours, theirs, 2e-6)

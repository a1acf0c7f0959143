"""Experts by torch's grouped matmul on a GPU, against float64; both dispatchers; when the host waits."""

import itertools
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.fast import fp8_experts
from nanomegatron.fast.fp8_experts import quantize_experts
from nanomegatron.fast.host_copy import AsyncHostCopy
from nanomegatron.fast.moe_dispatch import OverlappedMoe
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.faults.launch import launch
from nanomegatron.fp8 import Recipe, Rowwise, Scales
from nanomegatron.mesh import Mesh, World
from nanomegatron.moe import GroupedExperts, route_and_combine
from nanomegatron.ops import grouped_mm
from nanomegatron.ops.fp8_cast import fp8_decode
from nanomegatron.ops.permute import route
from nanomegatron.ops.swiglu import activation
from nanomegatron.param import Init
from tests.moe_routers import dispatch

GPU = torch.device("cuda")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
E, H, FFN, TOPK = 8, 256, 384, 2
BASE = TransformerConfig(
    num_layers=2,
    hidden_size=H,
    num_attention_heads=4,
    num_experts=E,
    moe_router_topk=TOPK,
    moe_ffn_hidden_size=FFN,
    swiglu=True,
    disable_bias_linear=True,
)
SIZES = [
    (128,) * 8,
    (5, 0, 333, 1, 0, 64, 17, 9),
    (0, 0, 0, 0, 0, 0, 0, 1000),
    (1,) + (0,) * 7,
    (0,) * 8,
]
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float32: 1e-5}
FORMS = {"plain": route_and_combine, "overlapped": OverlappedMoe(None)}


def built(mesh, config=BASE, dtype=torch.bfloat16, axes=None):
    init = Init(seed=5, name="experts", std=0.1, device=mesh.device, dtype=dtype)
    experts = GroupedExperts(replace(config, init_method_std=0.1), axes or mesh, init, activation(config))
    return experts, ParamAndGradBuckets(experts, ParallelConfig(), mesh)


@pytest.fixture(scope="module")
def alone():
    return Mesh.build(ParallelConfig(), World(), torch.device("cuda", torch.cuda.current_device()))


def one(w1, w2, x):
    gate, up = (x @ w1.t()).chunk(2, -1)
    return (F.silu(gate) * up) @ w2


def near(found, expected, rel):
    assert found.shape == expected.shape and torch.isfinite(found).all()
    error = (found.double() - expected.double()).norm()
    assert error <= rel * expected.double().norm() + 1e-12, float(error / expected.norm())


@pytest.mark.parametrize("grouped, known", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_float64(alone, sizes, dtype, grouped, known, monkeypatch):
    """Three microbatches; rows beyond the last expert's belong to none, and strange ones do not spread.

    known: by the host, and so in a loop, however few they are.
    """
    monkeypatch.setattr(grouped_mm, "LARGE", 0)
    experts, buckets = built(alone, replace(BASE, moe_grouped_gemm=grouped), dtype)
    ends = [0, *itertools.accumulate(sizes)]
    offsets = torch.tensor(ends, dtype=torch.int32, device=GPU)
    weights = [p.detach().double().requires_grad_() for p in (experts.weight1, experts.weight2)]
    buckets.zero_grad_buffer(3)
    for extra in 0, 3, 0:
        n = sum(sizes)
        x, grad = (torch.randn(n + extra, H, device=GPU).to(dtype) for _ in range(2))
        x[n:], grad[n:] = torch.nan, torch.nan
        theirs, ours = x[:n].double().requires_grad_(), x.requires_grad_()
        y = experts(ours, offsets, ends if known else None)
        y.backward(grad)
        pairs = enumerate(itertools.pairwise(offsets.tolist()))
        parts = [one(*(w.chunk(E)[i] for w in weights), theirs[a:b]) for i, (a, b) in pairs]
        expected = torch.cat(parts)
        expected.backward(grad[:n].double())
        near(y[:n], expected, TOLERANCE[dtype])
        near(ours.grad[:n], theirs.grad, TOLERANCE[dtype])
    buckets.finish_grad_sync()
    for p, w in zip((experts.weight1, experts.weight2), weights, strict=True):
        near(p.main_grad, w.grad, TOLERANCE[dtype])


FP8_SIZES = [(128,) * 8, (16, 16, 336, 16, 16, 64, 32, 16), (16,) * 7 + (1600,), (0,) * 8]
IN_A_LOOP = [(0, 0, 320, 0, 16, 64, 0, 16), (0,) * 7 + (1600,)]  # which need not give each expert rows


def decoded(a, b, dtype, fast=False):
    return (fp8_decode(a).double() @ fp8_decode(b).double().t()).to(dtype)


def of_fp8(device, recipe, sizes, grouped, known):
    """Result and gradients of experts in FP8 on a device, in two microbatches, which are always the same."""
    alone = Mesh.build(ParallelConfig(), World(), device)
    experts, buckets = built(alone, replace(BASE, moe_grouped_gemm=grouped))
    found, n = [], sum(sizes)
    Scales(recipe, quantize_experts(experts, recipe), device)
    for param in experts.parameters():  # devices draw differently
        values = torch.randn(param.shape, generator=torch.Generator().manual_seed(len(param)))
        param.data.copy_(0.1 * values)
    ends = [0, *itertools.accumulate(sizes)]
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    buckets.zero_grad_buffer(2)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x, grad = (torch.randn(n + 32, H, generator=generator).bfloat16() for _ in range(2))
        x[n:], grad[n:] = 0, 0
        x = x.to(device).requires_grad_()
        y = experts(x, offsets, ends if known else None)
        y.backward(grad.to(device))
        found += [y.detach()[:n].cpu(), x.grad[:n].cpu()]
    buckets.finish_grad_sync()
    return found + [p.main_grad.cpu() for p in experts.parameters()]


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper")
@pytest.mark.parametrize("wgrad", [True, False], ids=["", "no wgrad"])
@pytest.mark.parametrize("sizes", [*FP8_SIZES, *IN_A_LOOP], ids=str)
def test_fp8_is_what_its_casts_give(sizes, wgrad, monkeypatch):
    """torch's grouped matmul, a loop, and a loop of what the casts stand for in float64.

    Rounding to bf16 between the two layers makes some casts another value of 3 bits.
    """
    recipe = Recipe(Rowwise, wgrad=wgrad)
    with monkeypatch.context() as patch:
        patch.setattr(fp8_experts, "fp8_matmul", decoded)
        expected = of_fp8(GPU, recipe, sizes, False, False)
    for grouped, known in itertools.product({False, sizes in FP8_SIZES}, (False, True)):
        for ours, theirs in zip(of_fp8(GPU, recipe, sizes, grouped, known), expected, strict=True):
            near(ours, theirs, 2e-2)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_fp8_behind_dispatchers_never_waits(alone, kind, form):
    """One rank, tokens that leave experts without any: near bf16, and no wait for sizes."""
    experts, buckets = built(alone)
    x, probs, ids, grad = routed(500, 0.3, GPU)
    args = x, probs, ids.where(ids > 2, ids % 2), grad
    buckets.zero_grad_buffer(3)
    expected = run(experts, form, kind, *args)
    recipe = Recipe(Rowwise)
    Scales(recipe, quantize_experts(experts, recipe), GPU)
    run(experts, form, kind, *args)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(experts, form, kind, *args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(found, expected, strict=True):
        near(ours, theirs, 0.15)


def routed(t, dropped, device):
    """x, probs, ids, and the gradient of the result."""
    x, grad = (torch.randn(t, H, device=device).bfloat16() for _ in range(2))
    ids = torch.rand(t, E, device=device).topk(TOPK).indices.int()
    ids = ids.where(torch.rand(t, TOPK, device=device) >= dropped, -1)
    return x.requires_grad_(), torch.rand(t, TOPK, device=device).requires_grad_(), ids, grad


def run(experts, form, kind, x, probs, ids, grad):
    """y, and the gradients of x and probs."""
    y = dispatch(x, probs, ids, experts, kind, FORMS[form])
    return y.detach(), *torch.autograd.grad(y, (x, probs), grad)


PADDED = dict(moe_expert_capacity_factor=8.0, moe_pad_expert_input_to_capacity=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
@pytest.mark.parametrize("settings", [{}, PADDED], ids=["dropless", "padded"])
def test_one_rank_never_waits(alone, kind, settings, form):
    """Forward and backward; with the kernels, as in plain torch."""
    experts, buckets = built(alone, replace(BASE, **settings))
    args = routed(500, 0.2 if settings else 0.0, GPU)
    buckets.zero_grad_buffer(3)
    run(experts, form, kind, *args)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(experts, form, kind, *args)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    plain = replace(experts.config, moe_permute_fusion=False, moe_grouped_gemm=False)
    experts.config = plain
    for ours, theirs in zip(found, run(experts, form, kind, *args), strict=True):
        near(ours, theirs, TOLERANCE[torch.bfloat16])


def test_routing_to_a_capacity():
    for seed in range(10):
        torch.manual_seed(seed)
        ids = torch.randint(-1, E + 1, (300, TOPK), dtype=torch.int32)
        ours, theirs = route(ids.to(GPU), E, 16, 50), route(ids, E, 16, 50)
        for name, table in vars(theirs).items():
            assert torch.equal(getattr(ours, name).cpu(), table), name


LAYOUTS = {"ep2": (2, dict(ep=2)), "etp2": (2, dict(tp=2, etp=2)), "ep4": (4, dict(ep=4))}
LAYOUTS["ep2 etp2"] = 4, dict(tp=2, ep=2, etp=2)
NAMES = {
    "tp": "tensor_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def layouts(world: World, sizes: dict, folder: Path) -> int:
    """All ranks' tokens, drawn alike on each, through shared experts and through a copy of all of them."""
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    try:
        mesh = Mesh.build(ParallelConfig(**{NAMES[k]: n for k, n in sizes.items()}), world, device)
        compare(mesh)
        Mesh.close()
    except BaseException:
        (folder / f"error{world.rank}").write_text(traceback.format_exc())
        return 1
    return 0


def compare(mesh):
    overlapped = OverlappedMoe(PeerAccess.build(mesh, ParallelConfig()))
    single = Mesh.build(ParallelConfig(), World(), mesh.device)
    for settings, dropped, kind in itertools.product(
        ({}, PADDED), (0.0, 0.3, 1.0), ("allgather", "alltoall")
    ):
        config = replace(BASE, **settings)
        (experts, buckets), (whole, others) = built(mesh, config), built(single, config)
        torch.manual_seed(3)
        each = [routed(400, dropped, mesh.device) for _ in range(mesh.world.size)]
        buckets.zero_grad_buffer(3)
        others.zero_grad_buffer(mesh.world.size)
        ours = run_once(experts, route_and_combine, kind, each[mesh.rank])
        overtaking = run_twice(experts, overlapped, kind, each[mesh.rank])
        for rank, args in enumerate(each):
            expected = run_once(whole, route_and_combine, kind, args)
            if rank == mesh.rank:
                for found in (*zip(ours, expected, strict=True), *zip(overtaking, expected, strict=True)):
                    near(*found, 2e-2)
        buckets.finish_grad_sync()
        for p, q in zip(experts.parameters(), whole.parameters(), strict=True):
            places = {part.name: (part, q.main_grad) for part in q.spec.parts}
            for part in p.spec.parts:
                other, grads = places[part.name]
                near(part.local_view(p.main_grad), 3 * part.global_view(other.view(grads)), 2e-2)


def run_once(experts, form, kind, args):
    """As `run`, with the weights' gradients."""
    x, probs, ids, grad = args
    x, probs = (v.detach().requires_grad_() for v in (x, probs))
    y = dispatch(x, probs, ids, experts, kind, form)
    y.backward(grad)
    return y.detach(), x.grad, probs.grad


def run_twice(experts, form, kind, args):
    """The second time the host may wait for nothing but sizes, which it does by an event."""
    first = run_once(experts, form, kind, args)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run_once(experts, form, kind, args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    return second


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_over_nccl(layout, tmp_path):
    world, sizes = LAYOUTS[layout]
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    codes = launch(layouts, world, (sizes, tmp_path), timeout=300)
    errors = [path.read_text() for path in sorted(tmp_path.glob("error*"))]
    assert codes == [0] * world, "\n".join(errors)


def test_sizes_are_on_their_way_before_they_are_read():
    """Pinned memory and an event; nothing that is launched in between is waited for."""
    numbers = torch.arange(5, device=GPU)
    way = AsyncHostCopy(numbers)
    assert way.numbers.is_pinned() and way.event is not None
    torch.cuda._sleep(2_000_000_000)  # a second
    busy = torch.cuda.Event()
    busy.record()
    assert way.read() == [0, 1, 2, 3, 4] and not busy.query()
    torch.cuda.synchronize()

"""Linear layers in FP8: against float64 of what was cast, alike under every layout; what is sent and kept."""

import pytest
import torch

from nanomegatron.config.parallel import ParallelConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.fast.fp8_overlap import OverlappedFp8Matmuls
from nanomegatron.fp8 import RECIPES, Delayed, Recipe, Scales, Tensorwise
from nanomegatron.fp8_linear import use_fp8
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.ops.fp8_cast import fp8_decode
from nanomegatron.param import Init, WeightGradStore
from nanomegatron.tp import ColumnParallelLinear, LinearFunction, RowParallelLinear
from tests.fast.test_tp_overlap import share_files
from tests.spmd import run_spmd

H, F, S, B = 64, 128, 16, 2
ONE = Axis.single("tp")


def layers(tp, sequence_parallel, recipe, dtype=torch.float32, matmuls=None):
    """A column-row pair, the weights of which are slices of the same ones for every tp."""
    init = Init(dtype=dtype, std=0.1)
    fc1 = ColumnParallelLinear(H, F, tp, init.at("fc1"), bias=False, sequence_parallel=sequence_parallel)
    fc2 = RowParallelLinear(F, H, tp, init.at("fc2"), bias=False, sequence_parallel=sequence_parallel)
    states = [use_fp8(layer, recipe) for layer in (fc1, fc2)]
    for fp8 in states:
        fp8.matmuls = matmuls or fp8.matmuls
    return Scales(recipe, states, torch.device("cpu"), [tp]), fc1, fc2


def whole(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(S, B, H, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("wgrad", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_one_layer_multiplies_what_was_cast(name, wgrad):
    """To fp32's rounding the three products of the decoded tensors, in float64."""
    recipe = Recipe(RECIPES[name], wgrad=wgrad)
    _, fc1, _ = layers(ONE, False, recipe)
    x, grad = torch.randn(256, 1, H), torch.randn(256, 1, F)
    leaf = x.clone().requires_grad_()
    y = fc1(leaf)
    y.backward(grad)
    other = layers(ONE, False, recipe)[1].fp8
    (xr, xf), (gr, gf), (wr, wf) = (
        [fp8_decode(c).double() for c in getattr(other, role).quantize(t.flatten(0, -2))]
        for t, role in ((x, "x"), (grad, "g"), (fc1.weight, "w"))
    )
    dw = gf @ xf.t() if wgrad else grad.flatten(0, -2).double().t() @ x.flatten(0, -2).double()
    for found, exact in ((y, xr @ wr.t()), (leaf.grad, gr @ wf.t()), (fc1.weight.grad, dw)):
        torch.testing.assert_close(
            found.double().reshape(exact.shape), exact, rtol=1e-5, atol=1e-5 * exact.abs().max()
        )


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_is_near_its_exact_self(name):
    """Behind two matmuls, one of E5M2: within a tenth of each result's norm."""
    _, fc1, fc2 = layers(ONE, False, Recipe(RECIPES[name]))
    x, grad = whole()
    found, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    fc2(fc1(found)).backward(grad)
    w1, w2 = (layer.weight.detach().double().requires_grad_() for layer in (fc1, fc2))
    (exact @ w1.t() @ w2.t()).backward(grad.double())
    for a, b in ((found.grad, exact.grad), (fc1.weight.grad, w1.grad), (fc2.weight.grad, w2.grad)):
        assert (a - b).norm() <= 0.1 * b.norm()


def run_layers(mesh, name, sequence_parallel, deferred=False, matmuls=None, wgrad=True):
    """Two steps of the pair on this rank's share; y, dx and dW of each, whole."""
    tp = mesh.tp
    recipe = Recipe(RECIPES[name], amax_history_len=2, amax_compute_algo="max", wgrad=wgrad)
    scales, fc1, fc2 = layers(tp, sequence_parallel, recipe, matmuls=matmuls)
    own = slice(tp.rank * S // tp.size, (tp.rank + 1) * S // tp.size) if sequence_parallel else slice(None)
    later = WeightGradStore()
    found = []
    for step in range(2):
        x, grad = whole(step)
        leaf = x[own].clone().requires_grad_()
        fc1.weight.grad = fc2.weight.grad = None
        if deferred:
            for layer in (fc1, fc2):
                layer.weight.wgrad_store = later
            y = fc2(fc1(leaf))
            with later.collect() as works:
                y.backward(grad[own])
            assert fc1.weight.grad is None and len(works) == 2
            later.run(works)
        else:
            y = fc2(fc1(leaf))
            y.backward(grad[own])
        found.append([y.detach(), leaf.grad, fc1.weight.grad, fc2.weight.grad])
        scales.end_step()
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
def test_one_scale_a_tensor_gives_the_same_under_every_layout(name, sequence_parallel):
    (expected,) = run_spmd(run_layers, 1, name, False)
    for rank, found in enumerate(run_spmd(run_layers, 2, name, sequence_parallel, tp=2)):
        own = slice(rank * S // 2, (rank + 1) * S // 2) if sequence_parallel else slice(None)
        features = slice(rank * F // 2, (rank + 1) * F // 2)
        for ours, theirs in zip(found, expected, strict=True):
            parts = theirs[0][own], theirs[1][own], theirs[2][features], theirs[3][:, features]
            for a, b in zip(ours, parts, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@pytest.mark.parametrize("name", ["rowwise", "blockwise"])
def test_other_scales_are_near_under_every_layout(name):
    (expected,) = run_spmd(run_layers, 1, name, False)
    for rank, found in enumerate(run_spmd(run_layers, 2, name, True, tp=2)):
        own = slice(rank * S // 2, (rank + 1) * S // 2)
        features = slice(rank * F // 2, (rank + 1) * F // 2)
        for ours, theirs in zip(found, expected, strict=True):
            parts = theirs[0][own], theirs[1][own], theirs[2][features], theirs[3][:, features]
            for a, b in zip(ours, parts, strict=True):
                assert (a - b).norm() <= 0.1 * b.norm()


@pytest.mark.parametrize("name", RECIPES)
def test_weight_gradients_may_be_put_off(name):
    now, later = (run_spmd(run_layers, 1, name, False, wait)[0] for wait in (False, True))
    for a, b in zip(now, later, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_step_begins_with_gradients_of_its_own(name, kind):
    """Of a step's two microbatches the sum, whatever the step before has left in the buffer."""
    _, fc1, _ = layers(ONE, False, Recipe(RECIPES[name]))
    buckets, found = ParamAndGradBuckets(fc1, ParallelConfig(), Mesh(), kind), []
    for numbers in ((0,), (1,), (0, 1)):
        buckets.zero_grad_buffer(len(numbers))
        for number in numbers:
            fc1(whole(number)[0].requires_grad_()).square().sum().backward()
        found.append(fc1.weight.main_grad.clone())
    near = dict(rtol=1e-5, atol=1e-5) if kind == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    assert found[0].norm() > 1
    torch.testing.assert_close(found[2], found[0] + found[1], **near)
    assert not torch.allclose(found[1], found[0], **near)


def overlapped_and_plain(mesh, name, wgrad, folder):
    """The pair in pieces, by memory that ranks share or by collectives, and at once; what both have sent."""
    tp, found = mesh.tp, []
    peers = share_files(tp, folder) if folder else None
    for matmuls in (OverlappedFp8Matmuls(peers), None):
        for deferred in (False, True):
            tp.observer.counts.clear()
            steps = run_layers(mesh, name, True, deferred, matmuls, wgrad)
            found.append((steps, {key: n for key, n in tp.observer.counts.items() if key[2] == "bytes"}))
    return found


@pytest.mark.parametrize(
    "size, files", [(2, False), (4, True), (1, False)], ids=["collectives", "memory", "alone"]
)
@pytest.mark.parametrize("name, wgrad", [*((name, True) for name in RECIPES), ("rowwise", False)])
def test_pieces_make_the_same(name, wgrad, size, files, tmp_path):
    """Every piece of rows with its own scales; but for rounding in sums over ranks, as many bytes sent."""
    for ranks in run_spmd(overlapped_and_plain, size, name, wgrad, str(tmp_path) * files, tp=size):
        (expected, sent), *others = reversed(ranks)
        for steps, bytes_sent in others:
            assert bytes_sent == sent
            for a, b in zip(sum(steps, []), sum(expected, []), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * b.abs().max().item())


def sent(mesh, fp8):
    _, fc1, fc2 = layers(mesh.tp, True, Recipe(Delayed), torch.bfloat16)
    if not fp8:
        fc1.linear = fc2.linear = LinearFunction.apply
    x = whole()[0][: S // 2].bfloat16().requires_grad_()
    mesh.tp.observer.counts.clear()
    fc2(fc1(x)).sum().backward()
    return mesh.tp.observer.counts["tp", "all_gather", "bytes"]


def test_an_evaluation_raises_no_amax():
    """The scales of a training step do not depend on what was evaluated before."""
    scales, layer, _ = layers(ONE, False, Recipe(Delayed))
    for trains in (False, True):
        with torch.set_grad_enabled(trains):
            layer(torch.full((S, B, H), 7.0))
        assert layer.fp8.x.amax == 7.0 * trains


def test_the_sequence_is_gathered_in_fp8():
    half, whole_bytes = (run_spmd(sent, 2, fp8, tp=2)[0] for fp8 in (True, False))
    assert half == whole_bytes / 2 > 0


def test_the_fp8_copy_is_what_is_kept():
    _, fc1, _ = layers(ONE, False, Recipe(Tensorwise), torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fc1(torch.randn(S, B, H, dtype=torch.bfloat16).requires_grad_())
    assert sum(t.numel() * t.element_size() for t in kept) == S * B * H + 4

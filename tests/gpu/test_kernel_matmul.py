"""Matmuls by every algorithm of cuBLASLt's list, against float64, and the tuner that chooses one."""

import pytest
import torch

from nanomegatron.fp8 import Recipe, Scales
from nanomegatron.mesh import Axis
from nanomegatron.ops import matmul as ops_matmul
from nanomegatron.ops import tuner as ops_tuner
from nanomegatron.ops.fp8_matmul import add_fp8_product_, fp8_matmul
from nanomegatron.ops.kernels import kernels_unavailable, without_kernels
from nanomegatron.ops.matmul import A_TRANSPOSED, ADD, B_TRANSPOSED, BY_ESTIMATE, Problem, candidates, matmul
from nanomegatron.ops.tuner import Tuner, tuner_unavailable
from nanomegatron.tp import LinearFunction

GPU, TP = torch.device("cuda"), Axis.single("tp")
BF16, FP32 = torch.bfloat16, torch.float32
able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = pytest.mark.skipif(not able, reason="needs a GPU from Ampere on")
has_fp8 = pytest.mark.skipif(not able or torch.cuda.get_device_capability() < (8, 9), reason="needs FP8")
SHAPES = (256, 128, 512), (1000, 520, 2056), (16, 4096, 64), (8192, 768, 768)  # m, n, k


@pytest.fixture(autouse=True)
def ready():
    assert not kernels_unavailable(GPU) and not tuner_unavailable(GPU)


def normal(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=GPU) * scale).to(dtype)


def tuner(folder, time=None, writes=True) -> Tuner:
    return Tuner(folder / "gemm.json", "this GPU", writes, time)


def largest_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("flags", range(8))
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_all_candidates_are_right(dtype, flags, shape):
    """Within a rounding of the result's type, whatever is transposed or added to."""
    m, n, k = shape
    a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype, scale=k**-0.5)
    for out_type in (dtype, FP32):
        before = normal(m, n, dtype=out_type)
        exact = a.double() @ b.double() + (before.double() if flags & ADD else 0)
        stored = [
            x.t().contiguous() if flags & flag else x for x, flag in ((a, A_TRANSPOSED), (b, B_TRANSPOSED))
        ]
        problem = Problem(m, n, k, dtype, dtype, out_type, flags)
        count = candidates(problem, before, *stored)
        assert count > 0
        for choice in (BY_ESTIMATE, *range(count)):
            out = before.clone() if flags & ADD else torch.full_like(before, float("nan"))
            matmul(problem, choice, out, *stored)
            limit = 1e-4 if out_type == FP32 else 5e-3  # a split along k in 16 bits would be far off
            assert largest_error(out, exact) < limit, (choice, count)


@has_fp8
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("out_type", [BF16, FP32], ids=str)
def test_all_candidates_of_fp8_are_right(out_type, fast):
    layer = Scales(Recipe("tensorwise"), GPU).add_layer("layer")
    a, b = layer.cast(normal(512, 2048), "g").rowwise, layer.cast(normal(768, 2048), "w").rowwise
    exact = (a.data.float().double() * a.inverse) @ (b.data.float().double() * b.inverse).t()
    flags = B_TRANSPOSED | ops_matmul.FAST * fast | ADD * (out_type == FP32)
    problem = Problem(512, 768, 2048, a.data.dtype, b.data.dtype, out_type, flags)
    out = torch.zeros(512, 768, device=GPU, dtype=out_type)
    given = out, a.data, b.data, a.inverse, b.inverse
    for choice in (BY_ESTIMATE, *range(candidates(problem, *given))):
        out.zero_()
        matmul(problem, choice, *given)
        assert largest_error(out, exact) < 1e-2, choice  # Hopper sums FP8 in less than fp32


def test_a_linear_layer_computes_the_same(tmp_path):
    """As torch's to the rounding of bf16, whatever is fastest; the file spares the next run the times."""
    x, weight, grad = (
        normal(512, 4, 1024).requires_grad_(),
        normal(768, 1024, scale=0.03),
        normal(512, 4, 768),
    )
    weight.requires_grad_()

    def results(chosen: Tuner | None = None) -> tuple[torch.Tensor, ...]:
        y = LinearFunction.apply(x, weight, TP, "copy", None, chosen)
        return y, *torch.autograd.grad(y, (x, weight), grad)

    first = tuner(tmp_path)
    plain, tuned = results(), results(first)
    for ours, theirs in zip(tuned, plain):
        assert largest_error(ours, theirs.double()) < 1e-2
    assert len(first.problems) == 3  # dW without a bucket, too
    again = tuner(tmp_path, time=None, writes=False)
    again.time = lambda run, count: pytest.fail("timed again")
    assert all(map(torch.equal, results(again), tuned))
    assert "3 known" in again.describe()


def test_times_are_of_the_candidates(tmp_path):
    """All are positive; the chosen one's is not beyond the first one's."""
    seen = []

    def time(run, count):
        seen.append(ops_tuner.time_under_load(run, count))
        return seen[-1]

    chosen, a, b = tuner(tmp_path, time), normal(4096, 4096), normal(4096, 4096)
    y = chosen.product(a, b)
    assert largest_error(y, (a @ b).double()) < 1e-2
    (tuned,) = chosen.problems.values()
    assert min(seen[0]) > 0 and len(seen[0]) == tuned.candidates and tuned.first == seen[0][0]
    assert tuned.time == seen[0][tuned.choice] <= tuned.first
    chosen.product(a, b)
    assert len(seen) == 1


@has_fp8
def test_fp8_layers_compute_the_same(tmp_path):
    layer, chosen = Scales(Recipe("tensorwise"), GPU).add_layer("layer"), tuner(tmp_path)
    a, b = layer.cast(normal(1024, 2048), "x").rowwise, layer.cast(normal(768, 2048), "w").rowwise
    for fast in (False, True):
        ours, theirs = (fp8_matmul(a, b, BF16, fast, each) for each in (chosen, None))
        assert largest_error(ours, theirs.double()) < 1e-2
    outs = torch.zeros(2, 1024, 768, device=GPU)
    for out, each in zip(outs, (chosen, None)):
        add_fp8_product_(out, a, b, tuner=each)
    assert largest_error(outs[0], outs[1].double()) < 1e-3 and len(chosen.problems) == 3


def test_a_graph_can_hold_it(tmp_path):
    """What is known is captured with its algorithm, what is not as torch's; nothing is timed meanwhile."""
    chosen, a, b = tuner(tmp_path), normal(256, 512), normal(512, 128)
    chosen.product(a, b)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chosen.product(a, b)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        y, z = chosen.product(a, b), chosen.product(a[:128], b)
    assert len(chosen.problems) == 1
    a.copy_(normal(256, 512))
    graph.replay()
    exact = a.double() @ b.double()
    assert largest_error(y, exact) < 5e-3 and largest_error(z, exact[:128]) < 5e-3


def test_kernels_switched_off(tmp_path):
    chosen, a, b = tuner(tmp_path), normal(256, 512), normal(512, 128)
    with without_kernels():
        assert torch.equal(chosen.product(a, b), a @ b)
    assert not chosen.problems

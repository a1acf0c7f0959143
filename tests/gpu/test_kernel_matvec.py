"""A matrix times one vector, by the kernel, against float64."""

import pytest
import torch

from nanomegatron.ops.kernels import TYPES, launch_kernel
from nanomegatron.ops.matvec import matvec
from tests.gpu.test_kernel_norm import Guarded

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
DTYPES = tuple(ROUNDING)
SHAPES = [(6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (768, 3072), (50304, 768)]
SMALL = [(1, 8), (9, 64), (3, 2048), (5, 2048 + 72), (17, 33), (8, 1), (2, 3000), (4, 0), (0, 16)]


def check(shape, dtype) -> None:
    """Errors of rounding the result, and of fp32 sums, relative to the sizes that were added."""
    (m, k), generator = shape, torch.Generator(GPU).manual_seed(0)
    weight = torch.randn(m, k, device=GPU, generator=generator).to(dtype)
    x = torch.randn(1, 1, k, device=GPU, generator=generator).to(dtype)
    found = matvec(x, weight)
    assert found.shape == (1, 1, m) and found.dtype == dtype
    exact = (x.double() @ weight.double().t())[0, 0]
    size = (x.double().abs() @ weight.double().abs().t())[0, 0]
    error = (found[0, 0].double() - exact).abs()
    assert (error <= ROUNDING[dtype] * exact.abs() + 1e-6 * size).all()
    assert torch.equal(found, matvec(x, weight))


@pytest.mark.parametrize("shape", SHAPES + SMALL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(shape, dtype):
    check(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_aligned(dtype):
    """Weight or x, and x of any stride."""
    m, k = 6, 64
    weight, x = torch.randn(m * k + 1, device=GPU).to(dtype), torch.randn(2 * k + 1, device=GPU).to(dtype)
    for w, v in [
        (weight[1:].view(m, k), x[:k]),
        (weight[:-1].view(m, k), x[1 : k + 1]),
        (weight[:-1].view(m, k), x[: 2 * k : 2]),
    ]:
        exact = v.double() @ w.double().t()
        error = (matvec(v, w).double() - exact).abs()
        assert (
            error <= ROUNDING[dtype] * exact.abs() + 1e-6 * (v.abs().double() @ w.abs().double().t())
        ).all()


def test_not_finite():
    weight = torch.ones(4, 16, device=GPU)
    weight[1, 3] = torch.nan
    weight[2, 4] = torch.inf
    weight[3, 5:7] = torch.tensor([torch.inf, -torch.inf])
    found = matvec(torch.ones(16, device=GPU), weight)
    assert found[0] == 16 and found[2] == torch.inf and found[[1, 3]].isnan().all()


@pytest.mark.parametrize("k", [64, 37])
def test_writes_nothing_beside(k):
    guarded, x, weight = Guarded(), torch.randn(k, device=GPU), torch.randn(11, k, device=GPU)
    out = guarded.new(11, dtype=torch.float32)
    launch_kernel("matvec", out, weight, x, 11, k, TYPES[torch.float32])
    guarded.check()
    torch.testing.assert_close(out, x @ weight.t(), atol=1e-5, rtol=1e-5)

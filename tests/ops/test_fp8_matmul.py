"""FP8 matmuls that add: what they compute in plain torch, what is refused, and what cuBLASLt is asked for."""

import functools
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nanomegatron import fp8_linear
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.ops import fp8_matmul as ops_fp8_matmul
from nanomegatron.ops import kernels as ops_kernels
from nanomegatron.ops.fp8_cast import FORMATS, Fp8Matrix
from nanomegatron.ops.fp8_matmul import add_fp8_product_, fp8_matmul
from nanomegatron.ops.matmul import WORKSPACE, missing
from nanomegatron.param import accumulate, replica, stacked
from tests import cuda_on_cpu, fake_cublaslt
from tests.checkpoints import ALONE
from tests.fake_cublaslt import FILES, made

CPU = torch.device("cpu")
E4M3, E5M2 = FORMATS
PAIRS = (E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)
SHAPES = (16, 16, 16), (32, 16, 48), (16, 80, 144), (272, 48, 32)  # m, n, k


def case(shape, pair=PAIRS[0], device=CPU) -> list[torch.Tensor]:
    """out, a, a_inverse, b, b_inverse: whole numbers and powers of two, so that all sums are exact."""
    m, n, k = shape
    draw = functools.partial(torch.randint, device=device)
    a, b = (draw(-2, 3, (rows, k)).float().to(dtype) for rows, dtype in zip((m, n), pair))
    inverses = torch.tensor(0.5, device=device), torch.tensor(4.0, device=device)
    return [draw(-9, 10, (m, n)).float(), a, inverses[0], b, inverses[1]]


def add(out, a, a_inverse, b, b_inverse, function: Callable = add_fp8_product_, **how) -> None:
    """`add_fp8_product_` of the tensors of a case."""
    return function(out, Fp8Matrix(a, a_inverse), Fp8Matrix(b, b_inverse), **how)


def wanted(out, a, a_inverse, b, b_inverse, times: int = 1) -> torch.Tensor:
    """By the definition, in float64."""
    a, b = a.float().double() * a_inverse, b.float().double() * b_inverse
    return out.double() + times * (a @ b.t())


def test_one_row_is_multiplied_on_a_cpu():
    """As when a text is generated at a run's end: torch's kernel wants scales of rows with strides of 1."""
    _, *given = case((1, 16, 32))
    y = fp8_matmul(Fp8Matrix(*given[:2]), Fp8Matrix(*given[2:]), torch.float32)
    assert torch.equal(y.double(), wanted(torch.zeros(1, 16), *given))


def check(given: list[torch.Tensor], fast: bool = False) -> None:
    """Added twice, to the bit; then put in place of what no sum would leave."""
    expected = wanted(*given, times=2)
    for _ in range(2):
        assert add(*given, fast=fast) is None
    assert torch.equal(given[0].double(), expected)
    alone = wanted(torch.zeros_like(given[0]), *given[1:])
    add(given[0].fill_(torch.nan), *given[1:], fast=fast, overwrite=True)
    assert torch.equal(given[0].double(), alone)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_added(shape, pair, fast):
    check(case(shape, pair), fast)


def check_bf16(device: torch.device) -> None:
    """Into bf16, which has few of these numbers: the product is rounded, then its sum with `out`."""
    for pair in PAIRS:
        given = case((48, 32, 144), pair, device)
        given[0], given[2] = given[0].bfloat16(), given[2] * 7
        before, product = given[0].clone(), wanted(torch.zeros_like(given[0]), *given[1:])
        assert (product != product.bfloat16()).any()
        add(*given)
        assert torch.equal(given[0], before + product.bfloat16())
        add(*given, overwrite=True)
        assert torch.equal(given[0], product.bfloat16())


def test_sums_in_bf16():
    check_bf16(CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_adds_to_gradients_of_either_type(dtype, monkeypatch):
    """Two microbatches, of which the first overwrites; no product is made to be added afterwards."""
    monkeypatch.setattr(fp8_linear, "fp8_matmul", None)
    weight = nn.Parameter(torch.zeros(32, 48, dtype=torch.bfloat16))
    weight.spec = stacked([replica("weight", (32, 48), ALONE.dp)])
    buckets = ParamAndGradBuckets(nn.ParameterList([weight]), ParallelConfig(), ALONE, dtype)
    buckets.zero_grad_buffer(2)
    weight.main_grad.fill_(torch.nan)  # of the step before
    _, g, g_inverse, x, x_inverse = case((32, 48, 144), PAIRS[2])
    g_fp8, x_fp8 = Fp8Matrix(g, g_inverse), Fp8Matrix(x, x_inverse)
    for _ in range(2):
        accumulate(weight, lambda out, beta: fp8_linear.write_weight_grad(out, beta, g_fp8, x_fp8))
    product = wanted(torch.zeros(32, 48), g, g_inverse, x, x_inverse).to(dtype)
    assert weight.main_grad.dtype == dtype and torch.equal(weight.main_grad, product + product)


def test_gradients_by_scales_of_rows_are_added_unrounded():
    """Products in fp32 where the gradient is, against float64."""
    g, x = (torch.randn(rows, 144).to(E4M3) for rows in (32, 48))
    scales = [torch.rand(rows, 1) + 0.5 for rows in (32, 48)]
    out = torch.ones(32, 48)
    fp8_linear.write_weight_grad(out, 1, Fp8Matrix(g, scales[0]), Fp8Matrix(x, scales[1]))
    expected = wanted(torch.ones(32, 48), g, scales[0], x, scales[1])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_any_numbers():
    a, b = (torch.randn(rows, 256).to(dtype) for rows, dtype in ((32, E5M2), (48, E4M3)))
    given = torch.randn(32, 48), a, torch.tensor(0.013), b, torch.tensor(1.7)
    expected = wanted(*given)
    add(*given)
    assert (given[0] - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("shape", [(16, 32, 0), (0, 16, 16), (16, 0, 16)])
def test_nothing_to_add(shape):
    given = case(shape)
    before = given[0].clone()
    add(*given)
    assert torch.equal(given[0], before)
    add(*given, overwrite=True)
    assert not given[0].any()


def shifted(x: torch.Tensor, elements: int) -> torch.Tensor:
    """A copy that begins `shift` elements after where memory is aligned."""
    room = torch.empty(x.numel() + elements, dtype=x.dtype, device=x.device)
    return room[elements:].view(x.shape).copy_(x)


def test_what_is_refused():
    out, a, a_inverse, b, b_inverse = given = case((32, 16, 48))

    def refuses(text: str, **others: torch.Tensor) -> None:
        names = "out", "a", "a_inverse", "b", "b_inverse"
        with pytest.raises(ValueError, match=text):
            add(**(dict(zip(names, given)) | others))

    refuses("float32 .= torch.float8_e5m2 x torch.float8_e5m2: must be fp32", a=a.to(E5M2), b=b.to(E5M2))
    refuses("float16 .= torch.float8_e4m3fn", out=out.half())
    refuses("x torch.float32: must be", b=b.float())
    refuses(r"\[32, 16\], \[32, 48\], \[48, 16\]\]: must be \[m, n\]", b=b.t().contiguous())
    refuses(r"\[16, 32\], \[32, 48\]", out=out.t().contiguous())
    refuses("of multiples of 16", out=out[:24], a=a[:24])
    refuses("of multiples of 16", a=a[:, :40].contiguous(), b=b[:, :40].contiguous())
    refuses(r"\[16, 3, 16\]\]: must be", b=b.view(16, 3, 16))
    refuses("b must be contiguous", b=case((16, 16, 96))[3][:, ::2])
    refuses("out must be contiguous", out=out.t().contiguous().t())
    refuses("a must be contiguous, on cpu", a=a.to("meta"))
    refuses("out must be .* aligned to 16 bytes", out=shifted(out, 3))
    refuses("a must be .* aligned to 16 bytes", a=shifted(a.view(torch.uint8), 8).view(E4M3))
    refuses("a_inverse must be .* aligned to 16 bytes", a_inverse=torch.ones(8)[1])
    refuses("b_inverse must be one fp32 element, not torch.float32 .16, 1.", b_inverse=torch.ones(16, 1))
    refuses("a_inverse must be one fp32 element", a_inverse=a_inverse.double())


def test_without_the_library_torch_multiplies(monkeypatch):
    """One warning says so."""

    def ready():
        raise RuntimeError("no such file")

    monkeypatch.setattr(ops_kernels, "_kernels", SimpleNamespace(matmul_ready=ready))
    monkeypatch.setattr(ops_fp8_matmul, "usable", lambda *_: True)
    missing.cache_clear()
    with pytest.warns(UserWarning, match="added in a separate pass: no such file") as warned:
        check(case(SHAPES[1]))
    assert len(warned) == 1 and missing() == "no such file"
    missing.cache_clear()


# The calls of cuda/matmul.cu, compiled for the CPU, of a library that only checks and multiplies.

emulated = fake_cublaslt.emulated


@pytest.fixture
def module(monkeypatch):
    """The extension with this file alone, in place of the real one."""
    monkeypatch.setattr(ops_fp8_matmul, "add_fp8_product_ref_", None)
    with fake_cublaslt.installed(monkeypatch, ops_fp8_matmul) as module:
        yield module


@emulated
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_library_is_asked_for_the_same(module, pair, fast):
    before = made("matmuls")
    for shape in SHAPES:
        check(case(shape, pair), fast)
    assert made("matmuls") == before + 3 * len(SHAPES) and made("handles") == 1
    check_bf16(CPU)


@emulated
def test_an_algorithm_is_looked_for_once(module):
    given = case((64, 48, 32))
    before = made("searches")
    for scale_inv in (0.25, 8.0, 1.0):  # what is read, and where a scale is, changes from call to call
        given[1].copy_(given[1].roll(1, 0))
        given[2] = torch.tensor(scale_inv)
        check(given)
    assert made("searches") == before + 2  # to add, to overwrite
    check(given, fast=True)
    out, a, a_inverse, b, b_inverse = given
    for m, n, k in (32, 48, 32), (64, 32, 32), (64, 48, 16):  # in the same memory
        x, y, z = (t.flatten()[: r * c].view(r, c) for t, r, c in ((out, m, n), (a, m, k), (b, n, k)))
        check([x, y, a_inverse, z, b_inverse])
    assert made("searches") == before + 10


@emulated
def test_less_aligned_memory_is_told(module):
    out, a, a_inverse, b, b_inverse = case((64, 16, 32))
    for elements in (4, 8, 16):
        a_there = shifted(a.view(torch.uint8), 4 * elements).view(a.dtype)
        check([shifted(out, elements), a_there, shifted(a_inverse, 4), shifted(b, 16), b_inverse])


@emulated
def test_errors_of_the_library_have_its_words(module):
    out, a, a_inverse, b, b_inverse = case((32, 16, 48))
    launch = cuda_on_cpu.launcher(module)
    rest = torch.empty(1024), WORKSPACE, 32, 16, 48
    with pytest.raises(RuntimeError) as error:
        launch("matmul", out, a, a_inverse, b, b_inverse, *rest, 4, 4, 0, 1, 0)
    words = "matmul: cublasLtMatmulAlgoGetHeuristic: CUBLAS_STATUS_NOT_SUPPORTED"
    assert str(error.value) == f"{words}, [32, 48] E5M2 x [48, 16] E5M2"
    with pytest.raises(RuntimeError, match="cublasLtMatmul: CUBLAS_STATUS_INVALID_VALUE, "):
        launch("matmul", out, a, torch.ones(8)[1], b, b_inverse, *rest, 3, 3, 0, 1, 0)


@pytest.mark.skipif(cuda_on_cpu.cuda_home() is None, reason="no CUDA headers here")
def test_a_missing_library_is_named():
    """In a process that has loaded none."""
    script = f"""
import importlib.util as util
spec = util.spec_from_file_location("it._kernels", {cuda_on_cpu.build(*FILES).__file__!r})
module = util.module_from_spec(spec)
spec.loader.exec_module(module)
for call in module.matmul_ready, lambda: module.matmul(*[0] * 16):
    try:
        call()
    except RuntimeError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if not done.stdout:
        pytest.skip("this machine has a cuBLASLt")
    first, second = done.stdout.splitlines()
    assert first.startswith("torch has loaded no cuBLASLt of CUDA 12 or 13, and there is none to load: ")
    assert "libcublasLt.so.13: cannot open" in first and "libcublasLt.so.12: " in first
    assert first == second

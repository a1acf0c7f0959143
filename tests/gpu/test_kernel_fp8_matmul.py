"""FP8 matmuls that add, by cuBLASLt, against float64: any shape, stream and place."""

import pytest
import torch

from nanomegatron.ops import fp8_matmul as ops_fp8_matmul
from nanomegatron.ops import matmul as ops_matmul
from nanomegatron.ops.fp8_cast import FORMATS, fp8_cast, fp8_limit, fp8_scale
from nanomegatron.ops.fp8_matmul import add_fp8_product_ref_
from nanomegatron.ops.kernels import kernels_unavailable, launch_kernel, without_kernels
from nanomegatron.ops.matmul import WORKSPACE, missing, workspace
from tests.ops.test_fp8_matmul import PAIRS, SHAPES, add, case, check, check_bf16, shifted, wanted

GPU = torch.device("cuda")
E4M3, E5M2 = FORMATS
able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not able, reason="needs a GPU with FP8")
LLAMA = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)  # dW of Llama-3-8B: qkv, proj, fc1, fc2
ODD = (1040, 528, 2064), (16, 4096, 16), (4096, 16, 4096), (16, 16, 16384), (48, 8208, 80)


@pytest.fixture(autouse=True)
def by_the_library(monkeypatch):
    """Torch's matmul is not there to fall back on."""
    assert not kernels_unavailable(GPU) and not missing()
    monkeypatch.setattr(ops_fp8_matmul, "add_fp8_product_ref_", None)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_small_and_odd_shapes(pair, fast):
    for shape in (*SHAPES, *ODD):
        check(case(shape, pair, GPU), fast)


@pytest.mark.parametrize("tokens", [4096, 16384])
@pytest.mark.parametrize("shape", LLAMA, ids=str)
def test_layers_of_llama(shape, tokens):
    check(case((*shape, tokens), PAIRS[2], GPU))


def cast(rows: int, k: int, dtype: torch.dtype, size: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers as training casts them, and the inverse of their scale."""
    x = torch.randn(rows, k, device=GPU) * size
    scale, scale_inv = fp8_scale(x.abs().amax(), fp8_limit(dtype))
    return fp8_cast(x, scale, dtype)[0], scale_inv


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_any_numbers(pair):
    """As near to float64 as torch's matmul is."""
    (a, a_inverse), (b, b_inverse) = cast(1024, 8192, pair[0], 1e-3), cast(512, 8192, pair[1], 2.0)
    out = torch.randn(1024, 512, device=GPU) * 0.1
    given, other = (out, a, a_inverse, b, b_inverse), out.clone()
    exact = wanted(*given)
    add(*given)
    add(other, *given[1:], function=add_fp8_product_ref_)
    found, theirs = ((x - exact).norm() / exact.norm() for x in (out, other))
    assert found < 2e-3 and found < 3 * theirs + 1e-6, (found, theirs)


def test_sums_in_bf16():
    check_bf16(GPU)


def test_what_is_no_number_gets_there():
    out, a, a_inverse, b, b_inverse = case((32, 48, 64), PAIRS[2], GPU)
    a = a.float()
    a[3, 5], out[7, 9] = float("nan"), float("inf")
    add(out, a.to(E5M2), a_inverse, b, b_inverse)
    assert out[3].isnan().all() and out.isnan().sum() == 48 and out[7, 9] == float("inf")


def test_the_same_bits_every_time():
    (a, a_inverse), (b, b_inverse) = cast(512, 16384, E5M2, 1.0), cast(512, 16384, E4M3, 1.0)
    first, second = torch.ones(2, 512, 512, device=GPU)
    for out in (first, second):
        add(out, a, a_inverse, b, b_inverse)
    assert torch.equal(first, second)


@pytest.mark.parametrize("elements", [4, 8, 16, 32])
def test_places_that_are_aligned_to_16_bytes(elements):
    """As views of a bucket are."""
    out, a, a_inverse, b, b_inverse = case((272, 528, 1040), PAIRS[2], GPU)
    a, b = (shifted(x.view(torch.uint8), 4 * elements).view(x.dtype) for x in (a, b))
    check([shifted(out, elements), a, shifted(a_inverse, 4), b, shifted(b_inverse, elements)])


def test_scales_that_are_not_aligned_are_refused():
    out, a, a_inverse, b, b_inverse = case((32, 16, 48), device=GPU)
    with pytest.raises(ValueError, match="b_inverse must .* aligned to 16"):
        add(out, a, a_inverse, b, torch.ones(8, device=GPU)[1])


def test_two_formats_of_5_bits_are_refused():
    out, a, a_inverse, b, b_inverse = case((32, 16, 48), (E5M2, E5M2), GPU)
    with pytest.raises(ValueError, match="must be fp32"):
        add(out, a, a_inverse, b, b_inverse)
    rest = workspace(out.device), WORKSPACE, 32, 16, 48
    with pytest.raises(RuntimeError, match="AlgoGetHeuristic: CUBLAS_STATUS_.*E5M2 x .48, 16. E5M2"):
        launch_kernel("matmul", out, a, a_inverse, b, b_inverse, *rest, 4, 4, 0, 1, 0)


def test_the_stream_of_the_moment():
    """What it is given comes from that stream alone, late; another stream has a workspace of its own."""
    given, stream = case((512, 256, 4096), PAIRS[2], GPU), torch.cuda.Stream()
    expected, a = wanted(*given, times=2), given[1].clone()
    given[1].view(torch.uint8).zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        add(*given)  # of zeros, so that nothing is made for the first time below
        stream.synchronize()
        torch.cuda._sleep(50_000_000)
        given[1].copy_(a)
        for _ in range(2):
            add(*given)
        work = workspace(given[0].device)
    assert not stream.query()  # nothing has waited
    assert work is not workspace(given[0].device)
    stream.synchronize()
    assert torch.equal(given[0].double(), expected)


def test_two_streams_at_once():
    (a, a_inverse), (b, b_inverse) = cast(64, 65536, E5M2, 1.0), cast(64, 65536, E4M3, 1.0)
    outs, streams = torch.zeros(3, 64, 64, device=GPU), [torch.cuda.Stream() for _ in range(2)]
    for _ in range(20):
        add(outs[2], a, a_inverse, b, b_inverse)
    torch.cuda.synchronize()
    for _ in range(20):
        for out, stream in zip(outs, streams):
            with torch.cuda.stream(stream):
                add(out, a, a_inverse, b, b_inverse)
    torch.cuda.synchronize()
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[2])


def test_a_graph_can_hold_it():
    given = case((256, 512, 1024), PAIRS[2], GPU)
    expected = wanted(*given, times=4)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        add(*given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        add(*given)
    add(*case((256, 512, 1024), PAIRS[2], GPU))  # elsewhere in between
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(given[0].double(), expected)


def test_nothing_is_allocated():
    given = case((512, 256, 1024), PAIRS[2], GPU)
    add(*given)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    add(*given)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_another_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    for device in ("cuda:1", "cuda:0"):
        check(case((64, 48, 32), PAIRS[2], torch.device(device)))


def test_kernels_switched_off(monkeypatch):
    monkeypatch.setattr(ops_fp8_matmul, "add_fp8_product_ref_", add_fp8_product_ref_)
    monkeypatch.setattr(ops_matmul, "launch_kernel", None)
    with without_kernels():
        check(case((64, 48, 32), PAIRS[2], GPU))

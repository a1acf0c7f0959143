"""cuda/softmax.cu against float64: values, gradients, masks, odd shapes and numbers, guards."""

import pytest
import torch

from nanomegatron.ops.kernels import TYPES, kernels_unavailable, launch_kernel
from nanomegatron.ops.softmax import scaled_softmax, scaled_softmax_ref

CUDA = torch.device("cuda", 0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RELATIVE = {torch.float32: 3e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}  # rounding, and __expf in fp32
ABSOLUTE = {
    torch.float32: 1e-6,
    torch.bfloat16: 1e-6,
    torch.float16: 2e-7,
}  # the last for halves without exponent
NAN, INF = float("nan"), float("inf")
SHAPES = [
    (2, 3, 5, 7),  # scalars
    (1, 2, 64, 64),
    (2, 2, 33, 1024),  # the last of a warp in 16 bits
    (1, 1, 7, 1032),
    (1, 3, 4, 1023),
    (2, 1, 4, 1),
    (1, 1, 9, 4),  # more queries than keys
    (1, 2, 300, 2048),
    (1, 2, 5, 4104),
    (1, 1, 3, 4099),  # scalars, online
    (1, 2, 3, 16384),  # the last in registers
    (1, 2, 3, 16392),
    (2, 1, 2, 20001),
    (1, 1, 2, 65536),
]
MASKS = [(False, None), (True, None), (True, 3), (True, 1000), (False, 5), (True, 0)]
HIDDEN = [(1, 1, 1, 1), (1, 1, 1, 0), (0, 1, 1, 1), (0, 0, 1, 1), (1, 0, 1, 1), (1, 0, 0, 1)]  # 0: broadcast


@pytest.fixture(autouse=True)
def built():
    if kernels_unavailable(CUDA):
        pytest.skip(kernels_unavailable(CUDA))


def guarded(shape, dtype, shift=0):
    """A tensor among known numbers, `shift` elements from an aligned address, and whether they are intact."""
    size = torch.Size(shape).numel()
    room = torch.full((size + 128 + shift,), 77.0, dtype=dtype, device=CUDA)

    def intact() -> bool:
        return bool((room[: 64 + shift] == 77).all() and (room[64 + shift + size :] == 77).all())

    return room[64 + shift : 64 + shift + size].view(shape), intact


def compare(dtype, shape, causal, window, hidden=None, scale=0.25, shift=0):
    """Forward and backward by the kernel's own interface, guard bands around all that it writes."""
    scores, _ = guarded(shape, dtype, shift)
    grad, _ = guarded(shape, dtype, shift)
    scores.copy_(torch.randn(shape, device=CUDA) * 4 / scale)
    grad.copy_(torch.randn(shape, device=CUDA))
    out, out_intact = guarded(shape, dtype, shift)
    lse, lse_intact = guarded(shape[:3], torch.float32)
    dx, dx_intact = guarded(shape, dtype, shift)
    mask = (None, 0, 0, 0)
    if hidden is not None:
        hidden = hidden.expand(shape)
        hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
        mask = (hidden, *hidden.stride()[:3])
    args = (scale, *shape, int(causal), -1 if window is None else window, *mask, TYPES[dtype])
    launch_kernel("softmax_forward", out, lse, scores, *args)
    launch_kernel("softmax_backward", dx, grad, out, *args)
    assert out_intact() and lse_intact() and dx_intact()

    wide = scores.double().requires_grad_()
    probs, expected_lse = scaled_softmax_ref(wide, scale, hidden, causal, window)
    (right,) = torch.autograd.grad(probs, wide, grad.double())
    bounds = dict(rtol=RELATIVE[dtype], atol=ABSOLUTE[dtype], equal_nan=True)
    torch.testing.assert_close(out.double(), probs.detach(), **bounds)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5, equal_nan=True)
    bounds["atol"] = (
        8 * RELATIVE[dtype] * scale * probs.detach().nan_to_num().max().item()
    )  # y is rounded already
    torch.testing.assert_close(dx.double(), right, **bounds)

    again, lse_again, dx_again = scores, torch.empty_like(lse), grad  # in place, twice the same bits
    launch_kernel("softmax_forward", again, lse_again, scores, *args)
    launch_kernel("softmax_backward", dx_again, grad, out, *args)
    for a, b in ((again, out), (lse_again, lse), (dx_again, dx)):
        assert torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, dtype):
    for causal, window in MASKS:
        compare(dtype, shape, causal, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_by_any_mask(shape, dtype):
    for full in HIDDEN:
        hidden = torch.rand([size if f else 1 for size, f in zip(shape, full)], device=CUDA) < 0.5
        compare(dtype, shape, False, None, hidden)
        compare(dtype, shape, True, 700, hidden)
    hidden[:] = True
    compare(dtype, shape, False, None, hidden)  # no query sees a key


@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_views(dtype):
    for shape in SHAPES[:8]:
        compare(dtype, shape, True, None, shift=1)
    room = torch.rand(2 * 64 * 64 + 1, device=CUDA) < 0.5
    compare(dtype, (2, 3, 64, 64), False, None, room[1:].view(2, 1, 64, 64))
    compare(dtype, (2, 3, 64, 60), False, None, room[: 2 * 64 * 64].view(2, 1, 64, 64)[..., 1:61])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [7, 64, 2048, 16400])
def test_odd_numbers(t, dtype):
    huge = 60000.0 if dtype == torch.float16 else 3e38
    for values in (
        [huge, -huge],
        [huge, huge],
        [NAN],
        [INF],
        [-INF],
        [INF, -INF],
        [INF, NAN],
        [1e-7],
        [-INF] * t,
    ):
        scores = torch.randn(1, 2, 4, t, device=CUDA).to(dtype)
        scores[0, 0, 1, : len(values)] = torch.tensor(values, device=CUDA).to(dtype)
        for causal in (False, True):
            found, lse = scaled_softmax(scores, 0.5, None, causal)
            right, right_lse = scaled_softmax_ref(scores.double(), 0.5, None, causal, None)
            bounds = dict(rtol=RELATIVE[dtype], atol=ABSOLUTE[dtype], equal_nan=True)
            torch.testing.assert_close(found.double(), right, **bounds)
            torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5, equal_nan=True)
    scores = torch.randn(1, 2, 4, t, device=CUDA).to(dtype).requires_grad_()
    grad = torch.randn_like(scores)
    grad[0, 0, 1, 2], grad[0, 1, 3, 1] = NAN, INF
    (dx,) = torch.autograd.grad(scaled_softmax(scores, 0.5)[0], scores, grad)
    assert (
        dx[0, 0, 1].isnan().all()
        and dx[0, 0, [0, 2, 3]].isfinite().all()
        and not dx[0, 1, 3].isfinite().any()
    )


def test_hidden_gradients_do_not_count():
    scores = torch.randn(1, 1, 4, 64, device=CUDA, requires_grad=True)
    grad = torch.randn_like(scores)
    grad[0, 0, 0, 61:] = NAN  # what query 0, at place 60, does not see
    (dx,) = torch.autograd.grad(scaled_softmax(scores, 1.0, None, True)[0], scores, grad)
    assert dx.isfinite().all() and (dx[0, 0, 0, 61:] == 0).all() and (dx[0, 0, 0, :61] != 0).all()


@pytest.mark.parametrize("inplace", [False, True])
def test_in_a_graph(inplace):
    """Through autograd, from a product that is not kept, with views and broadcast gradients."""
    q, k = torch.randn(2, 2, 3, 40, 16, device=CUDA).unbind(0)
    q, k = q.requires_grad_(), k.requires_grad_()
    hidden = (torch.rand(2, 1, 40, 40, device=CUDA) < 0.3).transpose(-1, -2)
    scores = q @ k.transpose(-1, -2)
    probs, lse = scaled_softmax(scores, 0.25, hidden, True, 9, inplace)
    assert (probs.data_ptr() == scores.data_ptr()) == inplace and not lse.requires_grad
    expected, right_lse = scaled_softmax_ref(q @ k.transpose(-1, -2), 0.25, hidden, True, 9)
    weight = torch.randn(40, device=CUDA)
    given, right = ((y.nan_to_num() @ weight).sum(dim=0).sum() for y in (probs, expected))
    torch.testing.assert_close(lse, right_lse)
    for found, other in zip(
        torch.autograd.grad(given, (q, k)), torch.autograd.grad(right, (q, k)), strict=True
    ):
        torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_nothing_to_do():
    for shape in ((0, 2, 3, 4), (2, 2, 0, 4), (1, 1, 3, 0)):
        probs, lse = scaled_softmax(torch.zeros(shape, device=CUDA), 1.0)
        assert probs.shape == shape and (lse == -INF).all()


def test_more_elements_than_32_bits_count():
    shape = (2, 9, 8192, 16384)
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB")
    scores = torch.randn(shape, device=CUDA, dtype=torch.bfloat16)
    last = scores[1, 8, -64:].clone()[None, None]
    probs, lse = scaled_softmax(scores, 1.0, None, True, inplace=True)
    expected, expected_lse = scaled_softmax_ref(last.double(), 1.0, None, True, None)
    torch.testing.assert_close(probs[1:, 8:, -64:].double(), expected, rtol=5e-3, atol=1e-6)
    torch.testing.assert_close(lse[1:, 8:, -64:].double(), expected_lse, rtol=1e-5, atol=1e-5)
    grad = torch.randn(shape, device=CUDA, dtype=torch.bfloat16)
    wide = grad[1:, 8:, -64:].double()
    args = (1.0, *shape, 1, -1, None, 0, 0, 0, TYPES[torch.bfloat16])
    launch_kernel("softmax_backward", grad, grad, probs, *args)
    y = probs[1:, 8:, -64:].double()
    right = y * (wide - (wide * y).sum(-1, keepdim=True))
    torch.testing.assert_close(grad[1:, 8:, -64:].double(), right, rtol=5e-3, atol=1e-6)

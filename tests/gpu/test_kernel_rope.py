"""cuda/rope.cu against float64: both pairings, partial heads, strides, and what it may not touch."""

import pytest
import torch

from nanomegatron.ops.kernels import TYPES, kernels_unavailable, launch_kernel
from nanomegatron.ops.rope import rope, rope_packed, rope_ref

CUDA = torch.device("cuda", 0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHAPES = [  # s, b, n, g, d, r
    (64, 2, 32, 8, 128, 128),
    (5, 3, 4, 2, 64, 32),  # partial
    (7, 1, 3, 1, 80, 80),
    (7, 2, 5, 5, 96, 24),
    (3, 2, 2, 1, 30, 30),  # scalars
    (3, 2, 2, 1, 31, 6),
    (2, 1, 1, 1, 6, 2),
    (9, 2, 71, 1, 64, 64),
    (4, 1, 2, 2, 1024, 1024),
    (2, 1, 1, 1, 1200, 1100),  # scalars, more pairs than threads
    (1, 1, 128, 16, 16, 16),
]


@pytest.fixture(autouse=True)
def built():
    if kernels_unavailable(CUDA):
        pytest.skip(kernels_unavailable(CUDA))


def angles(s, b, half):
    turns = torch.randn(s, b, 1, half, device=CUDA) * 100
    return turns.cos(), turns.sin()


def wide(x, tables, interleaved):
    return rope_ref(x.double(), *(table.double() for table in tables), interleaved)


def close(found, right, dtype):
    torch.testing.assert_close(
        found.double(), right, rtol=RELATIVE[dtype], atol=RELATIVE[dtype], equal_nan=True
    )


def split(packed, n, g, d):
    return [part.unflatten(-1, (-1, d)) for part in packed.split([n * d, g * d, g * d], -1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed(shape, interleaved, dtype):
    s, b, n, g, d, r = shape
    for per_sample in (False, True):
        tables = angles(s, b if per_sample else 1, r // 2)
        source = torch.randn(s, b, (n + 2 * g) * d, device=CUDA, dtype=dtype, requires_grad=True)
        exact = source.detach().double().requires_grad_()
        q, k, v = split(exact, n, g, d)
        right = [wide(q, tables, interleaved), wide(k, tables, interleaved), v]
        found = rope_packed(source * 1.0, [n * d, g * d, g * d], d, *tables, interleaved)
        for a, e in zip(found, right, strict=True):
            close(a, e.detach(), dtype)
        grads = [torch.randn_like(a) for a in found]
        grads[1] = torch.randn(b, g, s, d, device=CUDA, dtype=dtype).permute(
            2, 0, 1, 3
        )  # as attention gives them
        grads[2] = torch.randn(s, b, d, g, device=CUDA, dtype=dtype).transpose(-1, -2)
        (given,) = torch.autograd.grad(found, source, grads)
        (expected,) = torch.autograd.grad(right, exact, [grad.double() for grad in grads])
        close(given, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_plain_and_strided(interleaved, dtype):
    for s, b, n, g, d, r in SHAPES:
        tables = angles(s, b, r // 2)
        packed = torch.randn(s, b, (n + 2 * g) * d + 1, device=CUDA, dtype=dtype, requires_grad=True)
        for shift in (0, 1):  # the second unaligned
            x = packed[..., shift : shift + n * d].unflatten(-1, (n, d))
            exact = x.detach().double().requires_grad_()
            found, right = rope(x, *tables, interleaved), wide(exact, tables, interleaved)
            close(found, right.detach(), dtype)
            grad = torch.randn_like(found)
            (given,) = torch.autograd.grad(found, packed, grad)
            (expected,) = torch.autograd.grad(right, exact, grad.double())
            close(given[..., shift : shift + n * d].unflatten(-1, (n, d)), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_nothing_else_is_touched(shift, interleaved, dtype):
    """Guards around the buffer, values, the last features; turned back it is what it was."""
    s, b, n, g, d, r = 6, 2, 8, 2, 64, 32
    room = torch.randn(s * b * (n + 2 * g) * d + 128 + shift, device=CUDA, dtype=dtype)
    before, size = room.clone(), s * b * (n + 2 * g) * d
    heads = room[64 + shift : 64 + shift + size].view(s, b, n + 2 * g, d)
    cos, sin = angles(s, 1, r // 2)
    q, k = heads.split([n, g, g], dim=2)[:2]
    args = (heads, *heads.stride()[:3], q, *q.stride()[:3], k, *k.stride()[:3], None, 0, 0, 0, cos, sin)
    sizes = (s, b, n, g, 0, d, r, 1, int(interleaved))
    launch_kernel("rope", *args, *sizes, 0, TYPES[dtype])
    old = before[64 + shift : 64 + shift + size].view_as(heads)
    assert torch.equal(heads[:, :, n + g :], old[:, :, n + g :]) and torch.equal(heads[..., r:], old[..., r:])
    assert torch.equal(room[: 64 + shift], before[: 64 + shift])
    assert torch.equal(room[64 + shift + size :], before[64 + shift + size :])
    assert not torch.equal(heads[:, :, : n + g, :r], old[:, :, : n + g, :r])
    again = before.clone()
    other = again[64 + shift : 64 + shift + size].view_as(heads)
    launch_kernel(
        "rope", other, *args[1:4], other, *args[5:8], other[:, :, n:], *args[9:], *sizes, 0, TYPES[dtype]
    )
    assert torch.equal(again, room)  # twice the same bits
    launch_kernel("rope", *args, *sizes, 1, TYPES[dtype])
    close(heads, old.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_odd_numbers(interleaved, dtype):
    nan, inf = float("nan"), float("inf")
    huge = 30000.0 if dtype == torch.float16 else 1e38
    x = torch.randn(4, 1, 2, 64, device=CUDA).to(dtype)
    x[0, 0, 0, :6] = torch.tensor([nan, inf, -inf, huge, -huge, 1e-7], device=CUDA).to(dtype)
    tables = angles(4, 1, 32)
    found, right = rope(x, *tables, interleaved), wide(x, tables, interleaved)
    close(found, right.to(dtype).double(), dtype)


def test_nothing_to_do():
    for shape in ((0, 2, 3, 8), (2, 0, 3, 8)):
        x = torch.zeros(shape, device=CUDA)
        assert rope(x, *angles(shape[0], 1, 4)).shape == shape
    x = torch.randn(3, 2, 2, 8, device=CUDA)
    assert torch.equal(rope(x, *angles(3, 1, 0)), x)  # no feature turns


def test_more_elements_than_32_bits_count():
    s, b, n, g, d = 131072, 3, 32, 8, 128
    if torch.cuda.mem_get_info()[0] < 8e9:
        pytest.skip("needs 8 GB")
    packed = torch.randn(s, b, (n + 2 * g) * d, device=CUDA, dtype=torch.bfloat16)
    tables = angles(s, b, d // 2)
    last = packed[-8:].clone()
    q, k, v = rope_packed(packed, [n * d, g * d, g * d], d, *tables)
    right = split(last, n, g, d)
    ends = [table[-8:] for table in tables]
    close(q[-8:], wide(right[0], ends, False), torch.bfloat16)
    close(k[-8:], wide(right[1], ends, False), torch.bfloat16)
    assert torch.equal(v[-8:], right[2])

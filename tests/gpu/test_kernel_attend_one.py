"""Attention of a new token to a cache, by the kernel, against float64."""

import itertools

import pytest
import torch

from nanomegatron.ops.attend_one import attend_one

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROUNDING = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
DTYPES = tuple(ROUNDING)
SHAPES = [(1, 32, 8, 128), (8, 12, 12, 64), (64, 32, 8, 128), (2, 16, 2, 256), (3, 8, 4, 96)]
SMALL = [
    (2, 4, 2, 64),
    (1, 4, 4, 128),
    (1, 8, 1, 32),
    (2, 4, 1, 64),
    (1, 2, 2, 256),
    (2, 3, 1, 64),
    (1, 2, 1, 20),
]
PLACES = [(0, 8), (7, 8), (5, 300), (299, 300), (520, 600), (100, 600)]  # position, rows of the cache
KINDS = [(None, None), (40, None), (None, 3.0), (0, 2.0)]  # window, cap


def made(shape, t: int, dtype) -> tuple:
    """q, k, v as views of a packed projection, and a cache whose later rows are not numbers to be read."""
    b, n, g, d = shape
    packed = torch.randn(1, b, (n + 2 * g) * d, device=GPU).to(dtype)
    q, k, v = (x.unflatten(-1, (-1, d)) for x in packed.split([n * d, g * d, g * d], -1))
    return q * 2 if n == 3 else q, k, v, torch.randn(2, t, b, g, d, device=GPU).to(dtype)


def exact(q, k, v, cache, p: int, window, cap) -> torch.Tensor:
    """The definition, in float64; k and v are in the cache."""
    first = 0 if window is None else max(p - window, 0)
    keys, values = cache[:, first : p + 1].double().repeat_interleave(q.shape[2] // k.shape[2], 3)
    scores = torch.einsum("bnd,tbnd->bnt", q[0].double(), keys) * q.shape[3] ** -0.5
    scores = cap * torch.tanh(scores / cap) if cap else scores
    return torch.einsum("bnt,tbnd->bnd", scores.softmax(-1), values).flatten(1)[None]


def check(shape, place, dtype, window=None, cap=None, factor=1.0, run=attend_one) -> None:
    """factor: of the allowed error, where scores are rounded."""
    p, t = place
    q, k, v, cache = made(shape, t, dtype)
    cache[:, p + 1 :] = 1e4  # what must not be seen
    before = cache.clone()
    found = run(q, (k, v), tuple(cache), torch.tensor([p], device=GPU), window, cap)
    before[:, p] = torch.stack((k[0], v[0]))
    assert torch.equal(cache, before), "the new row, and no other"
    expected = exact(q, k, v, cache, p, window, cap)
    assert found.shape == expected.shape and found.dtype == dtype
    bound = factor * ROUNDING[dtype] * cache[1, : p + 1].abs().max().item()
    assert (found.double() - expected).abs().max() <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES + SMALL, ids=str)
def test_against_float64(shape, dtype):
    for place, kind in itertools.product(PLACES, KINDS):
        check(shape, place, dtype, *kind, factor=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_texts_in_chunks(dtype):
    """The position moves, the launch is the same: as in a CUDA graph."""
    for p in (0, 255, 256, 4000, 8191):
        check((1, 32, 8, 128), (p, 8192), dtype)
        check((1, 32, 8, 128), (p, 8192), dtype, window=1000)


def test_a_number_that_is_none_is_passed_on():
    q, k, v, cache = made((2, 4, 2, 64), 16, torch.float32)
    cache[0, 3, 1, 0] = torch.nan
    out = attend_one(q, (k, v), tuple(cache), torch.tensor([5], device=GPU))[0].unflatten(-1, (4, 64))
    assert out[1, :2].isnan().all() and not out[0].isnan().any() and not out[1, 2:].isnan().any()

"""Attention of a new token to a cache: the reference, and the kernel run by the emulator, against float64."""

import pytest
import torch

from nanomegatron.ops import attend_one as ops_attend_one
from tests import cuda_on_cpu
from tests.gpu import test_kernel_attend_one as attend


@pytest.fixture(params=["reference", "kernel"])
def launched(request, monkeypatch) -> list | None:
    """The numbers of chunks with which the kernel was launched; None: the reference runs."""
    if request.param == "reference":
        monkeypatch.setattr(attend, "GPU", torch.device("cpu"))
        return None
    if cuda_on_cpu.cuda_home() is None:
        pytest.skip("no CUDA headers here")
    cuda_on_cpu.run_here(monkeypatch, ("attend_one",), ops_attend_one, attend)
    found, launch = [], ops_attend_one.launch_kernel
    monkeypatch.setattr(ops_attend_one, "launch_kernel", lambda *a: found.append(a[17]) or launch(*a))
    return found


@pytest.mark.parametrize("shape", attend.SMALL, ids=str)
@pytest.mark.parametrize("dtype", attend.DTYPES)
def test_against_float64(dtype, shape, launched):
    kinds = [*zip(attend.PLACES, attend.KINDS)]
    for place, kind in [*kinds, (attend.PLACES[4], (None, None)), (attend.PLACES[5], (300, 5.0))]:
        check = shape, place, dtype, *kind
        attend.check(*check, factor=1 if launched is not None and dtype != torch.float32 else 8)
    if launched is not None:
        packs = shape[3] / (4 if dtype == torch.float32 else 8)
        assert (len(launched) > 0) == (shape[1] // shape[2] != 3 and packs in (8, 16, 32))
        assert not launched or set(launched) == {1, 2}  # chunks of the cache


def test_a_number_that_is_none_is_passed_on(launched):
    attend.test_a_number_that_is_none_is_passed_on()


def test_a_cache_that_is_not_aligned(launched):
    q, k, v, cache = attend.made((1, 4, 2, 64), 8, torch.float32)
    flat = torch.zeros(cache.numel() + 1)
    moved = flat[1:].view_as(cache).copy_(cache)
    places = torch.tensor([5])
    expected = attend.attend_one(q, (k, v), tuple(cache), places)
    torch.testing.assert_close(attend.attend_one(q, (k, v), tuple(moved), places), expected)
    assert torch.equal(moved, cache)

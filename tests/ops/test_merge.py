"""Rows joined with rows: the reference, and the kernel run by the emulator, against float64."""

import pytest
import torch

from nanomegatron.ops import grouped_mm as ops_grouped_mm
from nanomegatron.ops import merge as ops_merge
from tests import cuda_on_cpu
from tests.gpu import test_kernel_merge as merge


@pytest.fixture(params=["reference", "kernel"])
def run_here(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr(merge, "GPU", torch.device("cpu"))
    elif cuda_on_cpu.cuda_home() is None:
        pytest.skip("no CUDA headers here")
    else:
        cuda_on_cpu.run_here(monkeypatch, ("merge",), ops_merge, ops_grouped_mm, merge)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kind", merge.KINDS)
@pytest.mark.parametrize("dtype", merge.DTYPES)
def test_against_float64(dtype, kind, weighted, run_here):
    for shape in merge.SHAPES:
        for first in {dtype, torch.float32}:
            for out in {dtype, torch.float32}:
                merge.check(shape, dtype, first, out, weighted, ("all", kind))


@pytest.mark.parametrize("weighted", [True, False])
def test_of_any_strides(weighted, run_here):
    merge.test_of_any_strides(weighted)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("number", range(1, merge.MAX_PARTS + 1))
def test_one_to_four_parts_that_may_leave_places_out(number, weighted, run_here):
    merge.test_one_to_four_parts_that_may_leave_places_out(number, weighted)


def test_parts_are_the_whole(run_here):
    merge.test_parts_are_the_whole()


@pytest.mark.parametrize("size", [8, 4097])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_in_place(dtype, size, run_here):
    merge.test_a_sum_in_place(dtype, size)


@pytest.mark.parametrize("k", [1, 2, 4, 5])
@pytest.mark.parametrize("shape", [(3, 8), (5, 7), (65, 40)])
@pytest.mark.parametrize("dtype", merge.DTYPES)
def test_sum_of_parts(dtype, shape, k, run_here):
    merge.test_sum_of_parts(dtype, shape, k)

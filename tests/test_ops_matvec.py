"""A matrix times one vector: the reference, and the kernel run by the emulator, against float64."""

import pytest
import torch

from nanomegatron.ops import matvec as ops_matvec
from tests import cuda_on_cpu
from tests.gpu import test_kernel_matvec as matvec
from tests.gpu import test_kernel_norm as norm


@pytest.fixture(params=["reference", "kernel"])
def run_here(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr(matvec, "GPU", torch.device("cpu"))
    elif cuda_on_cpu.cuda_home() is None:
        pytest.skip("no CUDA headers here")
    else:
        cuda_on_cpu.run_here(monkeypatch, ("matvec",), ops_matvec, matvec, norm)


@pytest.mark.parametrize("shape", matvec.SMALL, ids=str)
@pytest.mark.parametrize("dtype", matvec.DTYPES)
def test_against_float64(shape, dtype, run_here):
    matvec.check(shape, dtype)


@pytest.mark.parametrize("dtype", matvec.DTYPES)
def test_not_aligned(dtype, run_here):
    matvec.test_not_aligned(dtype)


def test_not_finite(run_here):
    matvec.test_not_finite()


@pytest.mark.parametrize("run_here", ["kernel"], indirect=True)
@pytest.mark.parametrize("k", [64, 37])
def test_writes_nothing_beside(k, run_here):
    matvec.test_writes_nothing_beside(k)


def test_other_shapes_and_types():
    weight = torch.randn(3, 4)
    for x in (torch.randn(2, 4), torch.randn(5), torch.randn(4).half()):
        with pytest.raises(ValueError, match="is not one row for torch.float32 .3, 4."):
            ops_matvec.matvec(x, weight)

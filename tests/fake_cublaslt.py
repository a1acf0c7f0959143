"""cuda/matmul.cu on the CPU, with the cuBLASLt of fake_cublaslt.cpp, which only checks and multiplies."""

import contextlib
import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nanomegatron.ops import kernels as ops_kernels
from nanomegatron.ops import matmul as ops_matmul
from tests import cuda_on_cpu

FILES = ("matmul",)
emulated = pytest.mark.skipif(
    cuda_on_cpu.cuda_home() is None or torch.version.cuda is not None,
    reason="no CUDA headers here, or torch has loaded the library itself",
)


@functools.cache
def library() -> ctypes.CDLL:
    """Loaded as torch loads the real one: under its name."""
    name = "libcublasLt.so.13"
    path = Path(tempfile.mkdtemp()) / name
    source = cuda_on_cpu.ROOT / "tests/fake_cublaslt.cpp"
    flags = f"-std=c++17 -O1 -Wall -Wextra -Wno-unused-parameter -Werror -shared -fPIC -Wl,-soname,{name}"
    subprocess.run(["g++", *flags.split(), str(source), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def made(what: str) -> int:
    """A counter of the library: handles, searches or matmuls."""
    return ctypes.c_int.in_dll(library(), what).value


@contextlib.contextmanager
def installed(monkeypatch, *modules: ModuleType) -> Iterator[ModuleType]:
    """The extension with this file alone, in place of the real one, for `modules` too."""
    library()
    module = cuda_on_cpu.build(*FILES)
    cuda_on_cpu.run_here(monkeypatch, FILES, ops_matmul, *modules)
    monkeypatch.setattr(ops_kernels, "_kernels", module)
    monkeypatch.setattr(ops_matmul, "workspace", lambda device: torch.empty(1024, device=device))
    ops_matmul.missing.cache_clear()
    yield module
    ops_matmul.missing.cache_clear()

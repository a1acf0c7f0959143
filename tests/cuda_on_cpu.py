"""The kernels of cuda/ compiled for the CPU, so that their arithmetic and indices are tested where no GPU is.

The sources are taken as they are, but for what is no C++: assembly, and `extern __shared__`, which becomes a
pointer that the emulator (cuda_on_cpu.h) gives. The emulator has its own `launch`.
"""

import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from nanomegatron.ops.kernels import FLOATS, without_kernels

ROOT = Path(__file__).resolve().parent.parent
CUDA, EMULATOR = ROOT / "cuda", ROOT / "tests/cuda_on_cpu.h"
SANITIZER = ["-fsanitize=alignment,bounds", "-fno-sanitize-recover=all"]  # ends the program with a message


ASSEMBLY = (  # what the kernels have of it, and the same in C++
    (
        r'asm\("max\.NaN\.f32 [^:]*: "=f"\((\w+)\) : "f"\((\w+)\), "f"\((\w+)\)\);',
        r"\1 = emulated::max_nan(\2, \3);",
    ),
    (
        r'asm volatile\("cp\.async\.cg\.shared\.global [^;]*;" ::"r"\(at\), "l"\(from\)[^;]*;',
        "*to = *from;",
    ),
    (r'asm volatile\("cp\.async\.(?:commit|wait)_group[^;]*;"[^;]*;', ";"),
)


def as_cpp(text: str) -> str:
    """CUDA C++ as C++."""
    for assembly, plain in ASSEMBLY:
        text = re.sub(assembly, plain, text)
    shared = r"extern __shared__ (?:alignas\(\d+\) |__align__\(\d+\) )?(\w[\w:]*) (\w+)\[\];"
    return re.sub(shared, r"\1* \2 = emulated::shared_memory<\1>();", text)


@functools.cache
def cuda_home() -> Path | None:
    """Where CUDA's headers are."""
    found = [*Path("/usr/local").glob("cuda*/include/cuda_bf16.h")]
    found += [*Path(sysconfig.get_path("purelib"), "nvidia").glob("**/include/cuda_bf16.h")]
    return found[0].parent if found else None


def build(*names: str, folder: Path | None = None) -> ModuleType:
    """The Python module of these .cu files (without ending), or of all, for the CPU.

    What is compiled is kept, by a hash of all that it was made of: several processes may build at once.
    """
    names = names or tuple(sorted(path.stem for path in CUDA.glob("*.cu")))
    folder = folder or Path(tempfile.gettempdir()) / "nanomegatron-cuda-on-cpu"
    folder.mkdir(parents=True, exist_ok=True)
    sources = {name: as_cpp((CUDA / f"{name}.cu").read_text()) for name in names}
    defined = set(re.findall(r"^void (\w+)\(", "\n".join(sources.values()), re.M))
    header = (CUDA / "kernels.h").read_text()
    declared = set(re.findall(r"^void (\w+)\(", header, re.M))
    weak = re.sub(r"^void ", "__attribute__((weak)) void ", header, flags=re.M)
    bindings = (CUDA / "bindings.cpp").read_text()  # with that, one object for any set of files
    bindings = bindings.replace('#include "kernels.h"', weak)
    with ThreadPoolExecutor(2) as pool:
        texts = {**sources, "bindings": bindings}
        objects = list(pool.map(lambda name: _compiled(name, texts[name], folder), texts))
    library = folder / f"{_stamp(*map(str, objects))}.so"
    _make(library, ["g++", *SANITIZER, "-shared", *map(str, objects)])
    # pybind11 keeps modules by name: another library needs another one
    spec = importlib.util.spec_from_file_location(f"{library.stem}._kernels", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in (declared - defined) & vars(module).keys():  # of files that are not built
        delattr(module, name)
    return module


def _compiled(name: str, text: str, folder: Path) -> Path:
    """The object file of one translated source."""
    import pybind11

    python = [
        f"-I{sysconfig.get_path('include')}",
        f"-I{pybind11.get_include()}",
        '-DKERNEL_ARCHS="cpu"',
        "-O0",
    ]
    checked = ["-include", str(EMULATOR), *SANITIZER, "-O1", "-U_FORTIFY_SOURCE"]  # which forbids our longjmp
    flags = f"-std=c++17 -fPIC -w -I{CUDA} -I{cuda_home()}".split()
    flags += python if name == "bindings" else checked
    headers = [
        path.read_text() for path in (*sorted(CUDA.glob("*.h")), *sorted(CUDA.glob("*.cuh")), EMULATOR)
    ]
    anywhere = [flag.replace(str(ROOT), "") for flag in flags]  # the same for every checkout
    source = folder / f"{name}-{_stamp(text, *headers, *anywhere)}.cpp"
    if not source.exists():
        part = source.with_suffix(f".{os.getpid()}")
        part.write_text(text)
        part.replace(source)
    _make(source.with_suffix(".o"), ["g++", *flags, "-c", str(source)])
    return source.with_suffix(".o")


def _stamp(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _make(path: Path, command: list[str]) -> None:
    """Run a compiler for a file, unless it is there; half a file is never seen, and none is made twice."""
    with open(path.with_suffix(f"{path.suffix}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}{path.suffix}")
            subprocess.run([*command, "-o", str(part)], check=True)
            part.replace(path)


def launcher(module: ModuleType):
    """What `ops_kernels.launch_kernel` is, with kernels that run here: for tests to put in its place."""

    def launch(name: str, *args: torch.Tensor | float | None) -> None:
        numbers = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        getattr(module, name)(*numbers, None)

    return launch


@functools.cache
def _built(names: tuple[str, ...]) -> ModuleType:
    return build(*names)


def run_here(monkeypatch, names: tuple[str, ...], *modules: ModuleType) -> None:
    """Until a test ends, `modules` (ops_*.py, tests of tests/gpu) launch the kernels of these files here."""

    def kernels_unavailable(device: torch.device) -> str:
        return "they are switched off" if without_kernels.off else ""

    here = {
        "launch_kernel": launcher(_built(names)),
        "usable": lambda x, op="", types=FLOATS: x.dtype in types and not without_kernels.off,
        "kernels_unavailable": kernels_unavailable,
        "CUDA": torch.device("cpu"),
        "GPU": torch.device("cpu"),
    }
    for module in modules:
        for name in here.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, here[name])
    properties = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

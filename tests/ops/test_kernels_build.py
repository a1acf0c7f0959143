"""The CUDA extension compiles as it is shipped, without a GPU: warnings are errors, no hot kernel spills."""

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pybind11
import pytest
import torch
from setuptools import Distribution
from setuptools.errors import PlatformError

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("train.py", "preprocess.py", "convert.py")
SPILLS = {"80": 32, "89": 32, "90a": 0}  # bytes a kernel may spill, by architecture
CACHE = (
    Path(tempfile.gettempdir()) / f"nanomegatron-kernels-{os.getuid()}"
)  # objects, by what they are made of


def setup_of(folder: Path):
    """setup.py of a copy of the project, as a module."""
    spec = importlib.util.spec_from_file_location("setup_of_the_kernels", folder / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SETUP = setup_of(ROOT)
needs_nvcc = pytest.mark.skipif(bool(SETUP.build_error(SETUP.find_cuda(), ["90a"])), reason="no nvcc here")


class Kernels(NamedTuple):
    """cuda/ as setup.py compiles it: the extension, and what the compilers said."""

    file: Path
    log: str


@pytest.fixture(scope="module")
def archs(full) -> list[str]:
    """Hopper alone in the fast tier."""
    return list(SPILLS) if full else ["90a"]


@pytest.fixture(scope="module")
def kernels(archs, tmp_path_factory) -> Kernels:
    """Objects with the sources, headers, flags and compilers of an earlier run are taken from there."""
    folder, cuda = tmp_path_factory.mktemp("objects"), SETUP.find_cuda()
    sources = [ROOT / "cuda/bindings.cpp", *sorted((ROOT / "cuda").glob("*.cu"))]
    rules = SETUP.rules(cuda, archs, sources, folder / "_kernels.so", strict=True)
    headers = [path.read_text() for path in sorted((ROOT / "cuda").glob("*.*h"))]
    versions = [SETUP._output_of(program, "--version") for program in (cuda / "bin/nvcc", "g++")]
    same = [rules.split("\nbuild ")[0].replace(str(ROOT), ""), *headers, *versions, pybind11.__version__]
    stamps = {f"{path.name}.o": stamp(path.name, path.read_text(), *same) for path in sources}
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may want the same
        for name, known in stamps.items():
            if (CACHE / f"{known}.o").exists():
                shutil.copy(CACHE / f"{known}.o", folder / name)
                rules = re.sub(rf"^build {re.escape(name)}: .*\n", "", rules, flags=re.M)
        (folder / "build.ninja").write_text(rules)
        printed = ninja(folder)
        assert (folder / "_kernels.so").is_file(), printed
        for part in re.split(r"^\[\d+/\d+\] ", printed, flags=re.M)[1:]:
            if compiled := re.search(r" -o (\S+\.o)$", part.splitlines()[0]):
                known = CACHE / stamps[compiled[1]]
                known.with_suffix(".log").write_text(part)
                shutil.copy(folder / compiled[1], known.with_suffix(".part"))
                known.with_suffix(".part").replace(known.with_suffix(".o"))  # half a file is never seen
        log = "".join((CACHE / f"{known}.log").read_text() for known in stamps.values())
    return Kernels(folder / "_kernels.so", log)


def stamp(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def loaded(file: Path):
    spec = importlib.util.spec_from_file_location("built._kernels", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_nvcc
def test_it_loads_and_names_its_archs(kernels, archs):
    module = loaded(kernels.file)
    assert module.archs == " ".join(f"sm_{arch}" for arch in archs)
    declared = set(re.findall(r"^void (\w+)\(", (ROOT / "cuda/kernels.h").read_text(), re.M))
    assert declared == {name for name in dir(module) if callable(getattr(module, name)) and name[0] != "_"}


@needs_nvcc
@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=[pytest.mark.full] * (arch != "90a")) for arch in SPILLS]
)
def test_no_kernel_spills(kernels, arch):
    entry = rf"Compiling entry function '(\w+)' for 'sm_{arch}'\n.*\n.*?(\d+) bytes spill stores"
    found = re.findall(entry, kernels.log)
    assert len(found) > 10
    spilled = [f"{name}: {size} bytes" for name, size in found if int(size) > SPILLS[arch]]
    assert not spilled, "\n".join(spilled)


def test_kernels_wait_for_the_one_before():
    """All launches let a kernel begin before the one before it has ended: common.cuh's `launch`."""
    sources = "".join(path.read_text() for path in sorted((ROOT / "cuda").glob("*.cu*")))
    first = re.findall(r"^__global__ [^{]*\{\s*([^;]*;)", sources, re.M)
    assert len(first) > 40 and set(first) == {"wait_for_previous_kernel();"}
    assert not re.findall(r"^[^/\n]*<<<", sources, re.M)


BINDINGS = """#include <Python.h>
int one();
PyMODINIT_FUNC PyInit__kernels() {
    static PyModuleDef about = {PyModuleDef_HEAD_INIT, "_kernels", "", -1, 0, 0, 0, 0, 0};
    PyObject* module = PyModule_Create(&about);
    PyModule_AddStringConstant(module, "archs", KERNEL_ARCHS);
    PyModule_AddIntConstant(module, "one", one());
    return module;
}
"""


# Imports all of an installed package, from its folder alone, and prints the names.
EVERY_MODULE = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import nanomegatron
assert nanomegatron.__file__.startswith(sys.argv[1]), nanomegatron.__file__
for module in pkgutil.walk_packages(nanomegatron.__path__, "nanomegatron."):
    if not module.name.endswith(("__main__", "_kernels")):
        print(importlib.import_module(module.name).__name__)
"""


def small_project(tree: Path) -> Path:
    """A copy of the project that has one small kernel."""
    shutil.copytree(
        ROOT / "nanomegatron",
        tree / "nanomegatron",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", *PROGRAMS):
        shutil.copy(ROOT / name, tree)
    (tree / "cuda").mkdir()
    (tree / "cuda/bindings.cpp").write_text(BINDINGS)
    (tree / "cuda/one.cu").write_text("__global__ void f(float* x) { *x = 1; }\nint one() { return 1; }\n")
    return tree


@needs_nvcc
def test_wheel_and_sdist(tmp_path):
    """pip builds a copy of the project that has one small kernel; the sdist holds all sources.

    The wheel has the programs and the presets: `nanomegatron train` works from it.
    """
    tree = small_project(tmp_path / "project with blanks")
    (tree / "setup.cfg").write_text("[build_ext]\narchs = 80,90a\nstrict = true\n")
    run(tree, "-m", "pip", "wheel", *"-q --no-deps --no-build-isolation -w dist .".split())
    (wheel,) = tree.glob("dist/*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if "/_kernels." in name)
        archive.extractall(elsewhere := tmp_path / "elsewhere")
    module = loaded(elsewhere / name)
    assert (module.archs, module.one) == ("sm_80 sm_90a", 1)
    found = set(subprocess.check_output([sys.executable, "-c", EVERY_MODULE, elsewhere], text=True).split())
    sources = (ROOT / "nanomegatron").rglob("*.py")
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources}
    assert found >= {name for name in names if not name.endswith(("__init__", "__main__"))}
    preset = run(elsewhere, "-m", *"nanomegatron train --config llama3-8b --print-config".split())
    assert "hidden-size = 4096" in preset
    shutil.copytree(ROOT / "cuda", tree / "cuda", dirs_exist_ok=True)
    run(tree, "setup.py", "-q", "sdist")
    (sdist,) = tree.glob("dist/*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {Path(name).name for name in archive.getnames()}
    assert {*PROGRAMS, *(path.name for path in (ROOT / "cuda").iterdir())} <= packed


@needs_nvcc
@pytest.mark.full
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
@pytest.mark.parametrize("switch, built", [("", 0), ("0", 0), ("1", 1)])
def test_pip_builds_no_kernels_beside_a_torch_for_cpus(monkeypatch, tmp_path, switch, built):
    """Unless it is asked to."""
    tree = small_project(tmp_path / "project")
    monkeypatch.setenv(SETUP.SWITCH, switch)
    said = run(tree, "-m", *"pip wheel -v --no-deps --no-build-isolation -w dist .".split())
    (wheel,) = tree.glob("dist/*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert sum("/_kernels." in name for name in archive.namelist()) == built
    assert ("compiling 2 files of cuda/ for sm_" in said) == built
    assert ("torch here has no CUDA (NANOMEGATRON_BUILD_KERNELS=1 builds them" in said) == (switch == "")


def run(folder: Path, *words: str) -> str:
    """A Python command that must succeed, and what it said."""
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def compile_one(folder: Path, code: str) -> str:
    """What ninja says of folder/cuda/one.cu, compiled and linked into folder/one.so."""
    shutil.copy(ROOT / "setup.py", folder)
    (folder / "cuda").mkdir(exist_ok=True)
    (folder / "cuda/one.cu").write_text(code)
    setup = setup_of(folder)
    rules = setup.rules(setup.find_cuda(), ["90a"], [folder / "cuda/one.cu"], folder / "one.so")
    (folder / "build.ninja").write_text(rules)
    return ninja(folder)


def ninja(folder: Path, *words: str) -> str:
    """What ninja says of a folder's build.ninja."""
    done = subprocess.run([*SETUP.ninja(), "-C", str(folder), *words], capture_output=True, text=True)
    return done.stdout + done.stderr


@needs_nvcc
def test_a_mistake_is_shown_whole(tmp_path):
    printed = compile_one(tmp_path, "__global__ void f() { int unused; undeclared(); }\n")
    assert 'identifier "undeclared" is undefined' in printed


@needs_nvcc
def test_a_checkout_may_have_blanks_in_its_path(tmp_path):
    folder = tmp_path / "a checkout"
    (folder / "cuda").mkdir(parents=True)
    (folder / "cuda/one.h").write_text("#define ONE 1.0f\n")
    printed = compile_one(folder, '#include "one.h"\n__global__ void f(float* x) { *x = ONE; }\n')
    assert (folder / "one.so").is_file(), printed
    assert "no work to do" in ninja(folder, "-n")
    (folder / "cuda/one.h").write_text("#define ONE 2.0f\n")
    assert "one.cu.o" in ninja(folder, "-n")


@needs_nvcc
def test_a_toolkit_may_be_in_a_folder_with_blanks(tmp_path):
    (tmp_path / "my cuda").symlink_to(SETUP.find_cuda())
    rules = SETUP.rules(tmp_path / "my cuda", ["90a"], [Path("/a b/x.cu")], Path("/c d/x.so"))
    assert f"command = '{tmp_path}/my cuda/bin/nvcc' " in rules
    assert f"'-I{tmp_path}/my cuda/include'" in rules and f"'-L{tmp_path}/my cuda/lib64'" in rules
    assert "\nbuild x.cu.o: cu /a$ b/x.cu\nbuild /c$ d/x.so: link x.cu.o\n" in rules


@needs_nvcc
def test_warnings_are_errors_where_asked_and_cxx_counts(monkeypatch):
    where = SETUP.find_cuda(), ["90a"], [Path("x.cu"), Path("y.cpp")], Path("x.so")
    monkeypatch.delenv("CXX", raising=False)
    assert "-Werror" not in SETUP.rules(*where) and SETUP.rules(*where, strict=True).count("-Werror") == 3
    monkeypatch.setenv("CXX", "clang++")
    rules = SETUP.rules(*where)
    assert "g++ " not in rules.replace("clang++", "") and rules.count("command = clang++ ") == 2
    assert " -ccbin clang++ " in rules
    monkeypatch.setenv("CXX", "ccache g++")
    assert SETUP.rules(*where).count("command = ccache g++ ") == 2


def program(path: Path, *lines: str) -> None:
    """A shell script that prints some lines."""
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    path.chmod(0o755)


GPUS = {"8.6 10.0 8.6": "86 100a", "7.5 8.9 9.0": "89 90a", "7.0": "", "": "90a", "no-driver": "90a"}


@pytest.mark.parametrize("printed, archs", GPUS.items())
def test_the_gpus_here_say_what_is_built(monkeypatch, tmp_path, printed, archs):
    program(tmp_path / "bin/nvidia-smi", *printed.split())
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert SETUP.archs_here() == archs.split()


def test_old_compilers_and_old_gpus_get_no_kernels(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    program(old / "bin/nvcc", "Cuda compilation tools, release 11.8, V11.8.89")
    program(new / "bin/nvcc", "Cuda compilation tools, release 12.0, V12.0.76")
    assert SETUP.build_error(None, ["90a"]).startswith("no nvcc in CUDA_HOME")
    assert "is release 11.8, CUDA 12.0 is needed" in SETUP.build_error(old, ["90a"])
    assert "older than sm_80" in SETUP.build_error(new, [])
    assert SETUP.build_error(new, ["80"]) is None


INSTALLS = """
pip      |          |          | no GPU | no GPU here, and no torch with CUDA (NANOMEGATRON_BUILD_KERNELS=1
pip      |          |          | 9.0    |
pip      |          | cpu      | 9.0    | torch here has no CUDA (NANOMEGATRON_BUILD_KERNELS=1 builds
pip      |          | cuda     | no GPU |
pip      | switch 1 | cpu      | no GPU |
pip      | switch 0 | cuda     | 9.0    | NANOMEGATRON_BUILD_KERNELS=0: installed without CUDA kernels
make     |          | cpu      | no GPU |
make     | switch 0 | cpu      | no GPU | NANOMEGATRON_BUILD_KERNELS=0: installed without CUDA kernels
"""
VERSIONS = {"cpu": "cuda: Optional[str] = None\n", "cuda": "cuda: Optional[str] = '13.0'\n"}


@pytest.mark.parametrize(
    "case", INSTALLS.strip().splitlines(), ids=lambda case: ",".join(case.split("|")[:4]).replace(" ", "")
)
def test_kernels_are_built_where_torch_can_use_them(monkeypatch, tmp_path, capsys, case):
    """And where they are asked for. pip installs torch after the build, and hides one that is there."""
    how, switch, kind, gpus, said = (cell.strip() for cell in case.split("|"))
    program(tmp_path / "bin/nvidia-smi", gpus)
    (tmp_path / "torch").mkdir()
    if kind:
        (tmp_path / "torch/version.py").write_text(f"__version__ = '2.13.0'\n{VERSIONS[kind]}hip = None\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv(SETUP.SWITCH, switch.removeprefix("switch "))
    monkeypatch.setattr(SETUP, "find_spec", lambda name: None if name == "torch" else name)
    monkeypatch.setattr(SETUP.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(SETUP, "build_error", lambda *_: None)
    monkeypatch.setattr(SETUP.build_ext, "run", lambda command: None)
    words = {"pip": ["bdist_wheel"], "make": ["-q", "build_ext", "--inplace"]}[how]
    command = SETUP.BuildKernels(Distribution({"script_args": words}))
    command.extensions = [SETUP.Extension("none", [])]
    command.get_ext_fullpath = lambda name: str(tmp_path / name)
    command.run()
    printed = capsys.readouterr().err
    assert said in printed and bool(printed) == bool(said) == (command.extensions == [])


def test_the_torch_of_this_interpreter_is_seen():
    assert SETUP.torch_has_cuda() == (torch.version.cuda is not None)


@pytest.mark.parametrize(
    "value, said", [("1", "=1: no nvcc in CUDA_HOME"), ("yes", "=yes: must be 1, 0 or not")]
)
def test_a_switch_that_cannot_be_obeyed_is_an_error(monkeypatch, value, said):
    monkeypatch.setenv(SETUP.SWITCH, value)
    monkeypatch.setattr(SETUP, "find_cuda", lambda: None)
    with pytest.raises(PlatformError, match=f"NANOMEGATRON_BUILD_KERNELS{said}"):
        SETUP.BuildKernels(Distribution()).run()


@pytest.mark.parametrize("where", ["--build-lib={}/lib", "--inplace"])
def test_without_a_compiler_the_package_is_installed_and_says_so(where, tmp_path):
    """Called from another folder; an extension that an earlier build left must go."""
    elsewhere = tmp_path / "elsewhere"
    stale = "nanomegatron/_kernels" + sysconfig.get_config_var("EXT_SUFFIX")
    for folder in (elsewhere, tmp_path / "nanomegatron", tmp_path / "lib/nanomegatron"):
        folder.mkdir(parents=True)
    (tmp_path / "nanomegatron/__init__.py").touch()
    (tmp_path / ("" if where == "--inplace" else "lib") / stale).touch()
    shutil.copy(ROOT / "setup.py", tmp_path)
    script = "import setup; setup.find_cuda = lambda: None; setup.main()"
    command = [sys.executable, "-c", script, "-q", "build_ext", where.format(tmp_path)]
    environment = os.environ | {"PYTHONPATH": ":".join([str(tmp_path), *sys.path]), SETUP.SWITCH: ""}
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "installed without CUDA kernels" in done.stderr, done.stderr
    assert not list(tmp_path.glob("**/*.so"))


@pytest.mark.parametrize("missing", ["pybind11", "ninja"])
def test_a_missing_build_tool_is_named(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)  # as if not installed
    monkeypatch.setattr(SETUP.shutil, "which", lambda name: None)
    monkeypatch.setattr(SETUP, "build_error", lambda *_: None)
    monkeypatch.setenv(SETUP.SWITCH, "1")
    with pytest.raises(PlatformError, match="pip install pybind11 ninja"):
        SETUP.BuildKernels(Distribution()).run()

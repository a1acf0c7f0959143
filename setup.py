"""Builds the package with its programs, and `nanomegatron._kernels` where torch can use it.

    pip install .            with kernels where torch has CUDA; where torch is not there yet, with a GPU
    pip install -e .         the same, in the checkout; again after a change in cuda/
    NANOMEGATRON_BUILD_KERNELS=1 pip install .                   with kernels, or an error; 0: without
    python setup.py build_ext --inplace                          with kernels, in the checkout
    python setup.py build_ext --inplace --archs 80,89,90a        what a wheel is for
    python setup.py build_ext --inplace --strict                 warnings are errors

They are for the GPU of this machine, or sm_90a (Hopper) where there is none.

cuda/*.cu  --nvcc, side by side-->  objects  --g++-->  nanomegatron/_kernels.*.so

Nothing of torch is included or linked, so the extension is built without it and fits any. nvcc is taken
from CUDA_HOME, from PATH, or from NVIDIA's pip packages, g++ from CXX if that is set. Without nvcc, with one
older than CUDA 12.0, or with only GPUs older than sm_80 (Ampere), the package is installed without them, says
so, and runs torch's own operations instead.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, PlatformError

ROOT = Path(__file__).resolve().parent
SWITCH = "NANOMEGATRON_BUILD_KERNELS"


def find_cuda() -> Path | None:
    """The folder that has bin/nvcc; None where there is no compiler."""
    places = [
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        _above(shutil.which("nvcc")),
        "/usr/local/cuda",
        *Path(sysconfig.get_path("purelib"), "nvidia").glob("cu*"),
    ]
    return next((Path(place) for place in places if place and Path(place, "bin", "nvcc").is_file()), None)


def _above(nvcc: str | None) -> Path | None:
    """nvcc's toolkit: where its own driver says it is, since the program in PATH may be a script."""
    if nvcc is None:
        return None
    top = re.search(r"TOP=(.+)", _output_of(nvcc, "--dryrun", "-c", "-x", "cu", os.devnull))
    return Path(top[1].strip()).resolve() if top else Path(nvcc).resolve().parent.parent


def gpus_here() -> set[int]:
    """Compute capabilities of the GPUs of this machine: 90 is Hopper."""
    answer = _output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    return {int(major + minor) for major, minor in re.findall(r"^(\d+)\.(\d)\s*$", answer, re.M)}


def archs_here() -> list[str]:
    """Of the GPUs here that can run the kernels, as nvcc has them ("90a"); Hopper's where there is no GPU."""
    numbers = gpus_here() or {90}
    # "a": what only this one generation has
    return [f"{number}{'a' * (number >= 90)}" for number in sorted(numbers) if number >= 80]


def torch_has_cuda() -> bool | None:
    """Whether the torch that is installed here has CUDA, which its version.py says; None without a torch.

    pip hides installed packages from a build, but not their folder. It installs torch after the build.
    """
    seen = find_spec("torch")
    folders = [Path(seen.origin).parent] if seen and seen.origin else []
    folders.append(Path(sysconfig.get_path("purelib"), "torch"))
    for file in (folder / "version.py" for folder in folders):
        if file.is_file():
            return bool(re.search(r"""^cuda\b.*=\s*['"]""", file.read_text(), re.M))
    return None


def unused_here() -> str | None:
    """Why nothing here would run the kernels, or None."""
    if torch_has_cuda() is False:
        return "torch here has no CUDA"
    if torch_has_cuda() is None and not gpus_here():
        return "no GPU here, and no torch with CUDA"
    return None


def build_error(cuda: Path | None, archs: list[str]) -> str | None:
    """What keeps this machine from having the kernels, or None."""
    if cuda is None:
        return "no nvcc in CUDA_HOME, PATH or pip packages"
    release = re.search(r"release (\d+)\.\d+", _output_of(cuda / "bin/nvcc", "--version"))
    if release is None or int(release[1]) < 12:
        version = release[0] if release else "of an unknown release"
        return f"{cuda}/bin/nvcc is {version}, CUDA 12.0 is needed (CUDA_HOME names another)"
    return None if archs else "the GPUs here are older than sm_80 (Ampere)"


def _output_of(*command: str | Path) -> str:
    """What a program prints; nothing where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


class BuildPackage(build_py):
    """Puts the programs into the installed package, where `nanomegatron train` finds them."""

    def run(self) -> None:
        """Copy the package, and train.py, preprocess.py and convert.py into its folder programs/."""
        super().run()
        target = Path(self.build_lib, "nanomegatron", "programs")
        for name in () if self.editable_mode else ("train.py", "preprocess.py", "convert.py"):
            target.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(ROOT / name), str(target / name))


class BuildKernels(build_ext):
    """Compiles every .cu by itself, two and more at a time."""

    user_options = [
        *build_ext.user_options,
        ("archs=", None, "architectures, as 80,89,90a"),
        ("strict", None, "warnings are errors"),
    ]
    boolean_options = [*build_ext.boolean_options, "strict"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.archs, self.strict = None, False

    def run(self) -> None:
        """Compile and link; or say why not, and remove what an earlier build left. Raises PlatformError."""
        switch = os.environ.get(SWITCH, "")
        if switch not in ("", "0", "1"):
            raise PlatformError(f"{SWITCH}={switch}: must be 1, 0 or not set; 1 builds the CUDA kernels")
        self.cuda = find_cuda()
        self.codes = self.archs.replace(",", " ").split() if self.archs else archs_here()
        asked = bool(switch or self.archs or "build_ext" in (self.distribution.script_args or ()))
        reason = f"{SWITCH}=0" if switch == "0" else build_error(self.cuda, self.codes)
        if switch == "1" and reason:
            raise PlatformError(f"{SWITCH}=1: {reason}")
        if not (asked or reason) and (reason := unused_here()):
            reason += f" ({SWITCH}=1 builds them)"
        if reason:
            print(f"{reason}: installed without CUDA kernels", file=sys.stderr)
            for ext in self.extensions:
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            self.extensions = []
        elif not (find_spec("pybind11") and (shutil.which("ninja") or find_spec("ninja"))):
            raise PlatformError(
                "the CUDA kernels are built with pybind11 and ninja: pip install pybind11 ninja"
            )
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Raises CompileError with all that the compiler said."""
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(self.build_temp).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        sources = [ROOT / source for source in ext.sources]
        (folder / "build.ninja").write_text(rules(self.cuda, self.codes, sources, target, self.strict))
        archs = ", ".join(f"sm_{arch}" for arch in self.codes)
        print(f"compiling {len(sources)} files of cuda/ for {archs}; {SWITCH}=0 leaves them out", flush=True)
        done = subprocess.run([*ninja(), "-C", str(folder)], capture_output=True, text=True)
        (folder / "build.log").write_text(done.stdout + done.stderr)
        if done.returncode:
            raise CompileError(f"the CUDA kernels do not compile:\n{done.stdout}{done.stderr}")
        print(f"built {target.name} for {archs} with {self.cuda}")


def ninja() -> list[str]:
    """The program, or the module that brings it."""
    program = shutil.which("ninja")
    return [program] if program else [sys.executable, "-m", "ninja"]


def rules(cuda: Path, archs: list[str], sources: list[Path], target: Path, strict: bool = False) -> str:
    """What ninja is to do, in the folder of the objects. Paths may have blanks."""
    import pybind11

    cxx = shlex.split(os.environ.get("CXX") or "g++")
    warnings = ["-Wall", "-Wextra", *["-Werror"] * strict]
    nvcc = [
        *(cuda / "bin/nvcc", "-std=c++17", "-O3", "-Xptxas", "-v", *["-Werror", "all-warnings"] * strict),
        *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs),
        *("-Xcompiler", ",".join(["-fPIC", *warnings]), f"-I{ROOT / 'cuda'}"),
    ]
    if os.environ.get("CXX") and len(cxx) == 1:  # "ccache g++" is more than nvcc takes
        nvcc += ["-ccbin", *cxx]
    named = " ".join(f"sm_{arch}" for arch in archs)
    cpp = [
        *(*cxx, "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", *warnings),
        # Headers of others are not ours to warn about; CUDA's may be in /usr/include, which -isystem breaks.
        *(f"-isystem{path}" for path in (sysconfig.get_path("include"), pybind11.get_include())),
        *(f"-I{path}" for path in (cuda / "include", ROOT / "cuda")),
        f'-DKERNEL_ARCHS="{named}"',
    ]
    libs = [
        *(f"-L{path}" for path in (cuda / "lib64", cuda / "lib", *sorted(cuda.glob("targets/*/lib")))),
        *("-lcudart_static", "-ldl", "-lrt", "-lpthread"),
    ]
    compiled = "-MD -MF $out.d -c $in -o $out\n  depfile = $out.d"
    lines = [
        f"rule cu\n  command = {_words(nvcc)} {compiled}",
        f"rule cpp\n  command = {_words(cpp)} {compiled}",
        f"rule link\n  command = {_words(cxx)} -shared $in -o $out {_words(libs)}",
    ]
    objects = [f"{source.name}.o" for source in sources]
    lines += [
        f"build {_path(name)}: {source.suffix[1:]} {_path(source)}" for name, source in zip(objects, sources)
    ]
    return "\n".join([*lines, f"build {_path(target)}: link {' '.join(map(_path, objects))}", ""])


def _words(command: list[str | Path]) -> str:
    """Words of a command, for the shell and then for ninja."""
    return shlex.join(map(str, command)).replace("$", "$$")


def _path(path: str | Path) -> str:
    """A path of a build line, for ninja, which quotes $in and $out for the shell itself."""
    return re.sub(r"([$ :])", r"$\1", str(path))


def main() -> None:
    """What pip and the command line run."""
    os.chdir(ROOT)  # setuptools looks for pyproject.toml and the package in the current folder
    sources = ["cuda/bindings.cpp", *sorted(f"cuda/{path.name}" for path in Path("cuda").glob("*.cu"))]
    commands = {"build_py": BuildPackage, "build_ext": BuildKernels}
    setup(ext_modules=[Extension("nanomegatron._kernels", sources)], cmdclass=commands)


if __name__ == "__main__":
    main()

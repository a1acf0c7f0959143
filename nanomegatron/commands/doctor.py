"""`nanomegatron doctor`: what a run finds on this machine, what each missing thing costs, and what mends it.

ok    as it should be       note  a run works, but slower or without something       bad   no run works
"""

import importlib
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanomegatron import __version__
from nanomegatron.config.help import CommandParser

GIB = 2**30
CPU_ONLY = "training runs on the CPU"
TORCH = "pip install --force-reinstall 'torch>=2.11,<3'"
EXPECTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
Findings = Iterator[tuple[str, ...]]  # mark, name, what was found; its cost and what mends it, where not ok


def main(argv: list[str]) -> int:
    """Print the report; returns 0 if a run can work here, else 1."""
    parser = CommandParser(prog="nanomegatron doctor", description="Check this machine.")
    parser.parse_args(argv)
    found = [*examine()]
    marks = Counter(mark for mark, *_ in found)
    print(f"nanomegatron {__version__} in {Path(__file__).resolve().parents[1]}")
    print(*(as_text(*finding) for finding in found), sep="\n")
    print(f"{'no' if marks['bad'] else 'a'} run works here: {marks['bad']} bad, {marks['note']} to note")
    return 1 if marks["bad"] else 0


def _rated(good: bool, name: str, found: str, *cost_and_fix: str, mark: str = "note") -> tuple[str, ...]:
    return ("ok", name, found) if good else (mark, name, found, *cost_and_fix)


def as_text(mark: str, name: str, found: str, cost: str = "", fix: str = "") -> str:
    """A finding in one line, or in more where the terminal is narrow."""
    words = found + f": {cost}" * bool(cost) + f" -> {fix}" * bool(fix)
    width, begin = min(shutil.get_terminal_size((110, 24)).columns, 110), f"{mark:<6}{name:<14}"
    return textwrap.TextWrapper(max(width, 40), begin, " " * 20, break_on_hyphens=False).fill(words)


def examine() -> Findings:
    """Yield all findings; a check that raises is one, as is torch that cannot be imported."""
    torch, gpus, checks = None, 0, {"Python": _python()}
    try:
        torch = importlib.import_module("torch")
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except Exception as error:
        yield "bad", "torch", f"{type(error).__name__}: {error}", "nothing runs", TORCH
    else:
        checks |= {"torch": _torch(torch), "kernels": _kernels(torch, gpus), "peers": _messages(torch, gpus)}
    checks |= {"GPU": _gpus(torch, gpus), "packages": _packages(), "disk": _disk()}
    for name, check in (checks | {"machine": _machine(torch, gpus), "limits": _limits(gpus)}).items():
        try:
            yield from check
        except Exception as error:
            yield "note", name, f"cannot be checked, {type(error).__name__}: {error}"


def _python() -> Findings:
    yield "ok", "Python", f"{platform.python_version()}, {sys.executable}, {platform.platform(terse=True)}"
    shown = sorted(name for name in os.environ if name.startswith(tuple(EXPECTED["variables"])))
    if shown:
        yield "ok", "variables", " ".join(f"{name}={os.environ[name]}" for name in shown)


def _torch(torch: Any) -> Findings:
    hip, cuda = getattr(torch.version, "hip", None), torch.version.cuda
    build = f"ROCm {hip}, which is not tested" if hip else f"CUDA {cuda}" if cuda else "CPUs only"
    fits = (2, 11) <= tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (3, 0)
    found, least = f"{torch.__version__}, built for {build}", "2.11 or later is needed, below 3"
    yield _rated(fits, "torch", found, least, TORCH, mark="bad")


def _gpus(torch: Any, gpus: int) -> Findings:
    """The driver, and one line for all GPUs of a kind."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    asked = shutil.which(command[0]) and subprocess.run(command, capture_output=True, text=True, timeout=30)
    there = [line.split(", ") for line in asked.stdout.splitlines()] if asked and not asked.returncode else []
    if there:
        yield "ok", "driver", there[0][-1]
    if gpus:
        cards = map(torch.cuda.get_device_properties, range(gpus))
        kinds = Counter((c.name, round(c.total_memory / GIB), 10 * c.major + c.minor) for c in cards)
        yield from (_rate_card(n, *card, torch.cuda.get_arch_list()) for card, n in kinds.items())
    elif there and torch:
        fix = "a newer driver, torch for an older CUDA, or another CUDA_VISIBLE_DEVICES"
        found = f"{len(there)} x {there[0][0]}, which torch cannot use, built for CUDA {torch.version.cuda}"
        yield "note", "GPU", found, CPU_ONLY, fix if torch.version.cuda else TORCH
    else:
        apple = torch and torch.backends.mps.is_available()
        yield "note", "GPU", "Apple's, which is not used" if apple else "none found", CPU_ONLY


def _rate_card(n: int, name: str, size: int, sm: int, codes: list[str]) -> tuple[str, ...]:
    """codes: those in torch: compute_90 runs on all later GPUs, sm_90 on those of the same major number."""
    found = f"{n} x {name}, {size} GiB, sm_{sm}"
    numbers = [(code.startswith("compute"), int(re.sub(r"\D", "", code))) for code in codes]
    if codes and not any(code <= sm and (later or code // 10 == sm // 10) for later, code in numbers):
        fix = "torch for an older CUDA, or --device cpu"
        return "bad", "GPU", found, f"torch has no code for it, but for {' '.join(codes)}", fix
    old = "before Ampere: plain torch without kernels, FP8 and flash attention; bf16 is slow"
    return _rated(sm >= 80, "GPU", found + "; no FP8, which needs sm_89" * (80 <= sm < 89), old, "--fp16")


def _messages(torch: Any, gpus: int) -> Findings:
    """Between processes: torch's backends, and whether GPUs reach each other's memory."""
    dist, lack = torch.distributed, ("torch is built without it: no run of several processes", TORCH)
    gloo, nccl = (dist.is_available() and has() for has in (dist.is_gloo_available, dist.is_nccl_available))
    yield _rated(gloo, "gloo", "between CPUs", *lack)
    if gpus:
        yield _rated(nccl, "NCCL", ".".join(map(str, torch.cuda.nccl.version() if nccl else ())), *lack)
    pairs = [*itertools.permutations(range(gpus), 2)]
    cut = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    found = f"GPUs {' '.join(cut[:6])}{' ...' * (len(cut) > 6)} do not" if cut else f"all {gpus} GPUs"
    if pairs:
        yield _rated(not cut, "peers", f"{found} reach each other's memory", "they send by NCCL, slower")


def _kernels(torch: Any, gpus: int) -> Findings:
    kernels = importlib.import_module("nanomegatron.ops.kernels")
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places += Path(sysconfig.get_path("purelib"), "nvidia").glob("cu*")
    nvcc = shutil.which("nvcc") or any(p and Path(p, "bin", "nvcc").is_file() for p in places)
    tools = {"nvcc (CUDA toolkit)": nvcc, "g++": shutil.which("g++"), "pybind11": find_spec("pybind11")}
    tools["ninja"] = shutil.which("ninja") or find_spec("ninja")
    lacks = ", ".join(name for name, there in tools.items() if not there)
    found = f"built for {kernels._kernels.archs}" if kernels._kernels else "not built"
    why = next(filter(None, (kernels.kernels_unavailable(torch.device("cuda", i)) for i in range(gpus))), "")
    if not gpus:
        builds = bool(nvcc and torch.version.cuda and not kernels._kernels)  # for other machines
        found += ", not used on CPUs" + f"; to build them {lacks or 'nothing'} is missing" * builds
    fix = f"install {lacks}; then " * bool(lacks) + "pip install . in the checkout"
    yield _rated(not why, "kernels", why or found, "plain torch, slower", "" if "Ampere" in why else fix)


def _packages() -> Findings:
    required, optional = EXPECTED["required"], EXPECTED["optional"]
    for name in required:
        try:
            importlib.import_module(name)
        except Exception as error:
            yield "bad", name, f"{type(error).__name__}: {error}", "nothing runs", f"pip install {name}"
    there = {d.name: d.version for d in distributions() if d.name in (*required, *optional)}
    yield "ok", "packages", ", ".join(map(" ".join, sorted(there.items())))
    for name in sorted(optional.keys() - there):
        yield "note", name, "not installed", optional[name], f"pip install {name}"


def _disk() -> Findings:
    for folder in map(Path, ("runs", "data")):
        place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        try:
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            yield "bad", f"{folder}/", str(error), "no run can write its files", "cd FOLDER"
        free, cost = shutil.disk_usage(place).free / GIB, "a checkpoint takes 12 bytes a parameter"
        yield _rated(free > 10, f"{folder}/", f"{free:,.1f} GiB free at {place}", cost, "--save FOLDER")


def _machine(torch: Any, gpus: int) -> Findings:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = importlib.import_module("nanomegatron.report.banner").host_memory() / GIB if torch else 0
    yield "ok", "machine", f"{cores} cores" + f", {memory:,.0f} GiB of memory" * (0 < memory < 1e9)
    if (shared := Path("/dev/shm")).is_dir():
        size, cost = shutil.disk_usage(shared).total / GIB, "too little for NCCL"
        yield _rated(size >= 1 or not gpus, str(shared), f"{size:,.2f} GiB", cost, "docker run --ipc=host")


def _limits(gpus: int) -> Findings:
    import resource  # which Windows has not

    for letter, (name, text, enough, value, cost) in EXPECTED["limits"].items():
        limits = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        soft, hard = (float("inf") if n == resource.RLIM_INFINITY else n for n in limits)
        set_to = f"ulimit -{letter} {value if hard == float('inf') else hard}"
        fix = set_to if hard >= enough else "raise it in /etc/security/limits.conf"
        fine = soft >= enough or (letter == "l" and not gpus)
        yield _rated(fine, f"ulimit -{letter}", f"{soft:,.0f} {text}", cost, fix)

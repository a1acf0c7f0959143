"""`nanomegatron doctor`: the lines of this machine, and of machines that are imitated here."""

import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from nanomegatron.commands import doctor
from nanomegatron.commands.doctor import main
from nanomegatron.ops import kernels
from tests.house.test_style import ROOT

GIB = 2**30
CODES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120".split()


def lines(capsys, code: int = 0) -> dict[str, str]:
    """What the command finds, by the name of the finding, its mark first."""
    assert main([]) == code
    printed = capsys.readouterr().out
    found = [*doctor.examine()]
    assert all(f"{mark:<6}{name:<14}" in printed for mark, name, *_ in found)
    return {name: " | ".join([mark, *words]) for mark, name, *words in found}


@pytest.fixture
def gpus(monkeypatch) -> Callable:
    """A function that imitates GPUs: their names and capabilities, and the pairs without peer access."""

    def imitate(*cards: tuple[str, tuple[int, int]], cut: tuple = ()) -> None:
        found = [SimpleNamespace(name=n, major=c[0], minor=c[1], total_memory=16 * GIB) for n, c in cards]
        answers = {
            "is_available": lambda: True,
            "device_count": lambda: len(found),
            "get_device_properties": lambda i: found[i],
            "get_device_capability": lambda device: cards[torch.device(device).index][1],
            "get_arch_list": lambda: CODES,
            "can_device_access_peer": lambda a, b: (a, b) not in cut,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        monkeypatch.setattr(kernels, "_kernels", SimpleNamespace(archs="sm_80 sm_90a"))
        kernels._unfit.cache_clear()

    yield imitate
    kernels._unfit.cache_clear()


def test_this_machine_fits_one_screen():
    command = [sys.executable, "-m", "nanomegatron", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    first, *rest, last = done.stdout.splitlines()
    assert first.startswith("nanomegatron 0.") and last.startswith("a run works here: 0 bad, ")
    assert len(rest) <= 30 and max(map(len, rest)) <= 110
    assert {line.split()[0] for line in rest if line[0] != " "} <= {"ok", "note"}
    assert "cannot be checked" not in done.stdout
    names = {line[6:16].strip() for line in rest}
    assert {"Python", "torch", "GPU", "gloo", "kernels", "packages", "runs/", "data/", "ulimit -n"} <= names


def test_a_wrong_flag_has_exit_code_2(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--fix"])


def test_torch_that_cannot_be_imported_is_a_line(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main([]) == 1
    text = capsys.readouterr().out
    assert "bad   torch         ModuleNotFoundError: import of torch halted" in text
    assert "-> pip install --force-reinstall 'torch>=2.11,<3'" in " ".join(text.split())
    assert "ok    runs/" in text and "cannot be checked" not in text
    assert text.splitlines()[-1].startswith("no run works here: 1 bad")


def test_old_torch_is_bad(capsys, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert lines(capsys, 1)["torch"].startswith("bad | 2.9.1+cu128, built for")


def test_a_missing_package_has_its_cost_and_its_command(capsys, monkeypatch):
    found = [d for d in doctor.distributions() if d.name != "matplotlib"]
    monkeypatch.setattr(doctor, "distributions", lambda: found)
    assert lines(capsys)["matplotlib"] == (
        "note | not installed | no picture is drawn | pip install matplotlib"
    )
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert lines(capsys, 1)["tiktoken"].endswith("nothing runs | pip install tiktoken")


@pytest.mark.parametrize(
    "card, code, expected",
    [
        (("H100", (9, 0)), 0, "ok | 1 x H100, 16 GiB, sm_90"),
        (("A100", (8, 0)), 0, "ok | 1 x A100, 16 GiB, sm_80; no FP8, which needs sm_89"),
        (("L4", (8, 9)), 0, "ok | 1 x L4, 16 GiB, sm_89"),
        (("later", (13, 0)), 0, "ok | 1 x later, 16 GiB, sm_130"),
        (("T4", (7, 5)), 0, "note | 1 x T4, 16 GiB, sm_75 | before Ampere: plain torch without kernels"),
        (("V100", (7, 0)), 1, "bad | 1 x V100, 16 GiB, sm_70 | torch has no code for it, but for sm_75"),
        (("Thor", (11, 0)), 1, "bad | 1 x Thor, 16 GiB, sm_110 | torch has no code for it, but for sm_75"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_gpus_of_each_generation(card, code, expected, gpus, capsys):
    gpus(card)
    found = lines(capsys, code)
    assert found["GPU"].startswith(expected) and (found["GPU"] == expected or " | " in expected[7:])
    assert "peers" not in found and found["NCCL"] == "ok | 2.28.3"


def test_kernels_of_another_gpu_are_noted(gpus, capsys, monkeypatch):
    gpus(("H100", (9, 0)))
    assert lines(capsys)["kernels"] == "ok | built for sm_80 sm_90a"
    monkeypatch.setattr(kernels, "_kernels", None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.os, "environ", {})
    monkeypatch.setattr(doctor.Path, "is_file", lambda path: False)
    kernels._unfit.cache_clear()
    found = lines(capsys)["kernels"]
    assert found.startswith("note | the extension is not built")
    assert found.endswith("slower | install nvcc (CUDA toolkit), g++; then pip install . in the checkout")


def test_without_a_gpu_kernels_are_only_for_a_machine_that_can_build_them(capsys, monkeypatch):
    """Such as the login node of a cluster: with nvcc, and torch for CUDA."""
    monkeypatch.setattr(kernels, "_kernels", None)
    monkeypatch.setattr(doctor, "find_spec", lambda name: name != "pybind11")
    found = {}
    for cuda in None, "13.0":
        for nvcc in None, "/usr/bin/nvcc":
            monkeypatch.setattr(torch.version, "cuda", cuda)
            monkeypatch.setattr(shutil, "which", lambda name, nvcc=nvcc: nvcc if name == "nvcc" else name)
            monkeypatch.setattr(doctor.Path, "is_file", lambda path: False)
            found[cuda, nvcc] = "".join(f[2] for f in doctor._kernels(torch, 0))
    assert found.pop(("13.0", "/usr/bin/nvcc")).endswith(
        "not used on CPUs; to build them pybind11 is missing"
    )
    assert set(found.values()) == {"not built, not used on CPUs"}


def test_gpus_without_peer_access_are_named(gpus, capsys):
    gpus(*[("H100", (9, 0))] * 2)
    assert lines(capsys)["peers"] == "ok | all 2 GPUs reach each other's memory"
    gpus(*[("H100", (9, 0))] * 2, cut=((0, 1), (1, 0)))
    found = lines(capsys)
    assert found["peers"].startswith("note | GPUs 0-1 1-0 do not reach each other's memory")
    assert found["GPU"] == "ok | 2 x H100, 16 GiB, sm_90"


def test_a_gpu_that_torch_cannot_use(tmp_path, capsys, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA T4, 450.1'\necho 'NVIDIA T4, 450.1'\n")
    program.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = lines(capsys)
    assert found["driver"] == "ok | 450.1"
    assert (
        found["GPU"].startswith("note | 2 x NVIDIA T4, which torch cannot use")
        and doctor.TORCH in found["GPU"]
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "CUDA 13.0" in (text := lines(capsys)["GPU"]) and "a newer driver" in text


def test_apples_gpu_is_not_used(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert lines(capsys)["GPU"] == "note | Apple's, which is not used | training runs on the CPU"


def test_low_limits_have_their_command(capsys, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (256, resource.RLIM_INFINITY))
    found = lines(capsys)
    assert found["ulimit -n"].startswith("note | 256 open files | ")
    assert found["ulimit -n"].endswith("| ulimit -n 65536")
    assert found["ulimit -l"].startswith("ok"), "no GPU here, no InfiniBand"
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (256, 512))
    assert lines(capsys)["ulimit -n"].endswith("| raise it in /etc/security/limits.conf")


def test_a_folder_where_nothing_can_be_written_is_bad(capsys, monkeypatch):
    def refuse(dir: object) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert main([]) == 1
    assert "bad   runs/         [Errno 13] Permission denied" in capsys.readouterr().out


def test_a_check_that_fails_is_a_note_and_the_others_run(capsys, monkeypatch):
    def broken(path: object) -> None:
        raise RuntimeError("no statvfs here")

    monkeypatch.setattr(shutil, "disk_usage", broken)
    found = lines(capsys)
    assert found["disk"] == "note | cannot be checked, RuntimeError: no statvfs here"
    assert found["machine"].startswith("note") or "cores" in found["machine"]
    assert "ulimit -n" in found

"""GPUs before Ampere and Apple's, imitated: what runs on them is plain torch, and a run says so."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanomegatron.config.check_model import fp8_errors
from nanomegatron.config.cli import parse
from nanomegatron.config.model import TransformerConfig
from nanomegatron.mesh import Mesh
from nanomegatron.ops import kernels
from nanomegatron.ops.attention import choose_backend
from nanomegatron.ops.kernels import kernels_unavailable
from nanomegatron.ops.paths import describe_kernels
from nanomegatron.plan.layer import Machine
from nanomegatron.plan.memory import memory
from nanomegatron.report.banner import machine_of

CUDA = torch.device("cuda", 0)
MODEL = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)


@pytest.fixture(params=[(7, 0), (7, 5), (8, 0), (9, 0)], ids=["V100", "T4", "A100", "H100"])
def capability(request, monkeypatch):
    """The compute capability of the GPU that is imitated; kernels are built for the last two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: request.param)
    monkeypatch.setattr(kernels, "_kernels", SimpleNamespace(archs="sm_80 sm_90a"))
    kernels._unfit.cache_clear()
    yield request.param
    kernels._unfit.cache_clear()


def test_kernels_begin_with_ampere(capability, monkeypatch):
    old, sm = capability < (8, 0), "sm_{}{}".format(*capability)
    assert kernels_unavailable(CUDA).startswith(f"they need Ampere (sm_80), this GPU is {sm}" if old else "")
    assert bool(kernels_unavailable(CUDA)) == old
    line = describe_kernels(CUDA, MODEL)
    assert line.startswith("none, they need Ampere" if old else "sm_80 sm_90a: rms_norm")
    assert ("--fp16" in line) == old, "bf16 is slow there"
    monkeypatch.setattr(kernels, "_kernels", None)
    kernels._unfit.cache_clear()
    why = kernels_unavailable(CUDA)
    assert ("pip install" in why) == (not old), "installing them would not help an old GPU"


def test_kernels_fit_the_generation(monkeypatch, capability):
    for archs, fits in {"sm_80": (8, 0), "sm_90a": (9, 0), "sm_86": None}.items():
        monkeypatch.setattr(kernels, "_kernels", SimpleNamespace(archs=archs))
        kernels._unfit.cache_clear()
        assert (kernels_unavailable(CUDA) == "") == (capability == fits)


def test_attention_before_ampere_is_unfused(capability):
    old = capability < (8, 0)
    assert choose_backend("auto", CUDA, torch.float16) == ("unfused" if old else "fused")
    if old:
        with pytest.raises(
            ValueError, match=r"flash cannot run float16 on cuda before Ampere; here: auto, unf"
        ):
            choose_backend("flash", CUDA, torch.float16)
    else:
        assert choose_backend("flash", CUDA, torch.float16) == "flash"


def test_the_plan_knows_that_attention_is_unfused(capability):
    mesh = replace(Mesh(), device=CUDA)
    machine, config = machine_of(mesh.device), parse(["--fp16", "--micro-batch-size", "1"]).config
    new = Machine(gpu=True, kernels=machine.kernels, fused=True)
    more = sum(memory(config, 4096, machine).values()) - sum(memory(config, 4096, new).values())
    scores = config.model.num_attention_heads * config.data.seq_length**2 * 2  # bytes of a layer's, in fp16
    assert more >= config.model.num_layers * scores if capability < (8, 0) else more == 0


def test_fp8_before_ada_is_an_error(capability):
    config = parse("--fp8-format hybrid --bf16".split()).config
    errors = [error for error in fp8_errors(config, capability) if "capability" in error]
    assert len(errors) == (capability < (8, 9))
    assert not errors or "here it is {}.{}; leave it out".format(*capability) in errors[0]


def test_apples_gpu_is_named_where_it_is_not_used(monkeypatch):
    cpu = torch.device("cpu")
    assert "Apple" not in describe_kernels(cpu, MODEL)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert describe_kernels(cpu, MODEL).startswith("none for cpu (Apple's GPU is not used): torch's fused")
    (error,) = parse(["--device", "mps"]).errors
    assert error == "--device mps: Apple's GPUs are not supported; leave it out, which means the CPU there"

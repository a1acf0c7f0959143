"""A layer and a loss by all kernels beside plain torch, their dispatch, and tools/kernel_errors.py."""

import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nanomegatron import tp
from nanomegatron.mesh import Axis
from nanomegatron.ops import kernels as ops_kernels
from nanomegatron.ops import norm as ops_norm
from nanomegatron.ops import paths as ops_report
from nanomegatron.ops import rope as ops_rope
from nanomegatron.ops import softmax as ops_softmax
from nanomegatron.ops import swiglu as ops_mlp
from nanomegatron.ops.kernels import FLOATS, kernels_unavailable, without_kernels

CUDA = torch.device("cuda", 0)
TP = Axis("tp", 1, 0, (0,))
S, B, N, D = 37, 2, 4, 64
H = N * D
RELATIVE = {torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # fp32 products may be TF32


@pytest.fixture(autouse=True)
def fresh():
    assert kernels_unavailable(CUDA) == ""


class Block(torch.nn.Module):
    """A layer and a loss by all kernels that the model has in it."""

    def __init__(self, dtype, biased=False):
        super().__init__()
        linear = dict(bias=False, dtype=dtype, device=CUDA)
        self.qkv, self.proj = torch.nn.Linear(H, 2 * H, **linear), torch.nn.Linear(H, H, **linear)
        self.fc1, self.fc2 = torch.nn.Linear(H, 4 * H, **linear), torch.nn.Linear(2 * H, H, **linear)
        self.head = torch.nn.Linear(H, 72, **linear)
        self.one, self.two = (torch.nn.Parameter(torch.ones(H, dtype=dtype, device=CUDA)) for _ in range(2))
        self.bias = torch.nn.Parameter(torch.zeros(H, dtype=dtype, device=CUDA)) if biased else None
        turns = torch.arange(float(S), device=CUDA)[:, None, None, None] * 0.1 ** torch.arange(
            D // 2, device=CUDA
        )
        self.angles = turns.cos(), turns.sin()

    def forward(self, x, labels):
        y = ops_norm.norm(x, self.one, self.bias, 1e-5)
        q, k, v = ops_rope.rope_packed(self.qkv(y), [H, H // 2, H // 2], D, *self.angles)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, *(t.repeat_interleave(2, 2) for t in (k, v))))
        probs, _ = ops_softmax.scaled_softmax(q @ k.mT, D**-0.5, None, True, inplace=True)
        y = self.proj((probs @ v).permute(2, 0, 1, 3).flatten(2))
        y, total = ops_norm.add_norm(y, x, self.two, self.bias, 1e-5)
        y = total + self.fc2(ops_mlp.gated(self.fc1(y), ops_mlp.SILU))
        return tp.vocab_parallel_cross_entropy(
            self.head(ops_norm.norm(y, self.one, None, 1e-5)), labels, TP, 70
        )


def given(dtype):
    generator = torch.Generator(CUDA).manual_seed(1)
    x = torch.randn(S, B, H, device=CUDA, dtype=dtype, generator=generator)
    return x, torch.randint(70, (B, S), device=CUDA, generator=generator)


def step(block, x, labels):
    """Losses, and gradients of x and all parameters."""
    x = x.detach().requires_grad_()
    losses = block(x, labels)
    return [losses.detach(), *torch.autograd.grad(losses.mean(), [x, *block.parameters()])]


def close(found, expected, dtype):
    for a, b in zip(found, expected, strict=True):
        assert (a.float() - b.float()).norm() <= RELATIVE[dtype] * b.float().norm()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_kernels_have_the_numbers_of_plain_torch(dtype, biased):
    torch.manual_seed(0)
    block, inputs = Block(dtype, biased), given(dtype)
    found = step(block, *inputs)
    with without_kernels():
        close(found, step(block, *inputs), dtype)


def test_a_second_derivative_is_refused_by_name():
    x = given(torch.float32)[0].requires_grad_()
    (first,) = torch.autograd.grad(ops_mlp.gated(x, ops_mlp.SILU).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"GatedFunction is once_differentiable.*without_kernels\(\)"):
        first.sum().backward()
    with without_kernels():
        (first,) = torch.autograd.grad(ops_mlp.gated(x, ops_mlp.SILU).sum(), x, create_graph=True)
        first.square().sum().backward()
    assert x.grad.isfinite().all() and x.grad.any()


def test_the_switch_holds_in_what_is_computed_again(monkeypatch):
    """A checkpoint's second forward runs on autograd's thread for the GPU."""
    launched = []
    monkeypatch.setattr("nanomegatron.ops.swiglu.launch_kernel", lambda name, *_: launched.append(name))
    x = torch.randn(4, 64, device=CUDA, requires_grad=True)
    with without_kernels():
        checkpoint(ops_mlp.gated, x, ops_mlp.SILU, use_reentrant=False).sum().backward()
    assert not launched
    ops_mlp.gated(x, ops_mlp.SILU)
    assert launched == ["swiglu_forward"]


def test_float64_is_told():
    x = torch.randn(4, 64, device=CUDA, dtype=torch.float64)
    ops_kernels._tell.cache_clear()
    with pytest.warns(UserWarning, match="gated of torch.float64 on cuda:0 runs in plain torch"):
        ops_mlp.gated(x, ops_mlp.SILU)


def test_self_test():
    assert set(ops_report.paths(CUDA).values()) >= {"kernel"} and ops_report.paths(CUDA)["rope"] == "kernel"
    result = subprocess.run([sys.executable, "-m", "nanomegatron.ops"], capture_output=True, text=True)
    assert result.returncode == 0 and "the kernels run" in result.stdout, result.stdout + result.stderr
    result = subprocess.run([sys.executable, "-m", "tools.kernel_errors"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAILED" not in result.stdout and result.stdout.count(" OK") == len(ops_report.KERNELS)

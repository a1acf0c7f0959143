"""The autograd functions around kernels: what they launch, their numbers, and when plain torch runs instead.

The kernels are stand-ins in plain torch that compute from nothing but what a launch hands over.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from nanomegatron.ops import cross_entropy as ops_loss
from nanomegatron.ops import dropout as ops
from nanomegatron.ops import gelu as ops_gelu
from nanomegatron.ops import kernels as ops_kernels
from nanomegatron.ops import norm as ops_norm
from nanomegatron.ops import rope as ops_rope
from nanomegatron.ops import softmax as ops_softmax
from nanomegatron.ops import swiglu as ops_mlp
from tests.ops import test_gelu, test_rope, test_softmax
from tests.ops.test_softmax import named

OPS = [ops, ops_gelu, ops_loss, ops_mlp, ops_norm, ops_rope, ops_softmax]
aten = torch.ops.aten


def norm_kernel(name: str, *args) -> None:
    a = named(name, args)
    rows, h, one = a["rows"], a["h"], a["from_one"]
    if name == "norm_forward":
        x = a["x"].detach().view(rows, h)
        if a["residual"] is not None:
            x = x + a["residual"].detach().view(rows, h)
            a["total"].view(rows, h).copy_(x)
        mean = 0.0
        if a["bias"] is not None:
            a["mean"].copy_(mean := x.mean(-1))
            mean = mean[:, None]
        a["rstd"].copy_(((x - mean).square().mean(-1) + a["eps"]).rsqrt())
        y = (x - mean) * a["rstd"][:, None] * (a["weight"].detach() + one)
        a["out"].view(rows, h).copy_(y if a["bias"] is None else y + a["bias"].detach())
        return
    x, dy, rstd = a["x"].view(rows, h), a["grad"].view(rows, h), a["rstd"][:, None]
    n = (x if a["mean"] is None else x - a["mean"][:, None]) * rstd
    g = dy * (a["weight"] + one)
    dx = g - n * (g * n).mean(-1, keepdim=True)
    if a["mean"] is not None:
        dx -= g.mean(-1, keepdim=True)
        a["dbias"].copy_(dy.sum(0))
    a["dweight"].copy_((dy * n).sum(0))
    more = 0.0 if a["grad_total"] is None else a["grad_total"].view(rows, h)
    a["dx"].view(rows, h).copy_(dx * rstd + more)


def gated_kernel(name: str, *args) -> None:
    a = named(name, args)
    x = a["x"].detach().view(a["rows"], 2 * a["f"])
    gate, up = x.chunk(2, dim=-1)
    if name == "swiglu_forward":
        a["out"].view(up.shape).copy_(ops_mlp.gated_ref(x, a["gated"]))
        return
    silu, grad = a["gated"] == ops_mlp.SILU, a["grad"].view(up.shape)
    dgate = aten.silu_backward(grad * up, gate)
    if not silu:
        dgate = aten.gelu_backward(grad * up, gate, approximate="tanh")
    dup = grad * ops_mlp.gated_ref(torch.cat((gate, torch.ones_like(up)), -1), a["gated"])
    a["dx"].view(x.shape).copy_(torch.cat((dgate, dup), -1))


def loss_kernel(name: str, *args) -> None:
    a = named(name, args)
    logits = a["logits"].detach()
    assert logits.stride(0) == a["stride"]
    if name == "cross_entropy_stats":
        a["out"].copy_(torch.stack(ops_loss.cross_entropy_stats_ref(logits, a["labels"])))
        return
    part = logits[:, : a["columns"]].clone()
    a["out"].zero_()
    a["out"][:, : a["columns"]] = ops_loss.cross_entropy_grad_ref(part, a["labels"], a["lse"], a["grad"])


@pytest.fixture
def kernels(monkeypatch):
    """All launches of the modules counted, and computed here."""
    launches = []
    stand_ins = {
        ops_norm: norm_kernel,
        ops_mlp: gated_kernel,
        ops_gelu: test_gelu.fake,
        ops_loss: loss_kernel,
        ops_rope: test_rope.fake,
        ops_softmax: test_softmax.fake,
    }

    def counted(kernel):
        def launch(name, *args):
            launches.append(name)
            kernel(name, *args)

        return launch

    for module, kernel in stand_ins.items():
        monkeypatch.setattr(module, "launch_kernel", counted(kernel))
    for module in OPS:
        monkeypatch.setattr(module, "usable", lambda *x: True)
    device = type("Properties", (), {"multi_processor_count": 2})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *x: device)
    return launches


def tables(s=5, half=4):
    return torch.randn(s, 1, 1, half).cos(), torch.randn(s, 1, 1, half).sin()


HIDDEN = torch.arange(5 * 6).view(1, 1, 5, 6) % 4 == 1
COS, SIN = tables()
LABELS = torch.tensor([3, 0, 5, -1, 2, 99])


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        maximum, total, target = ops_loss.cross_entropy_stats(logits, LABELS)
        lse = maximum + total.log()
        ctx.save_for_backward(logits, lse)
        return lse - target

    @staticmethod
    @ops_kernels.once
    def backward(ctx, grad):
        logits, lse = ctx.saved_tensors
        return ops_loss.cross_entropy_grad_(logits, LABELS, lse, grad, 10)


CASES = {  # function, reference, shapes of what they take
    "rms_norm": (
        lambda x, w: ops_norm.norm(x, w, None, 1e-5),
        lambda x, w: ops_norm.norm_ref(x, w, None, 1e-5),
        ((3, 2, 8), (8,)),
    ),
    "layer_norm": (
        lambda *a: ops_norm.norm(*a, 1e-5),
        lambda *a: ops_norm.norm_ref(*a, 1e-5),
        ((3, 2, 8), (8,), (8,)),
    ),
    "norm": (
        lambda *a: ops_norm.norm(*a, 1e-5, True),
        lambda *a: ops_norm.norm_ref(*a, 1e-5, True),
        ((6, 8), (8,), (8,)),
    ),
    "add_norm": (
        lambda *a: ops_norm.add_norm(*a, None, 1e-5),
        lambda x, y, w: (ops_norm.norm_ref(x + y, w, None, 1e-5), x + y),
        ((3, 2, 8), (3, 2, 8), (8,)),
    ),
    "add_norm, the sum alone": (
        lambda *a: ops_norm.add_norm(*a, 1e-5)[1],
        lambda x, y, w, b: x + y + 0 * (w + b),
        ((3, 2, 8), (3, 2, 8), (8,), (8,)),
    ),
    "swiglu": (
        partial(ops_mlp.gated, act=ops_mlp.SILU),
        lambda x: ops_mlp.gated_ref(x, ops_mlp.SILU),
        ((3, 2, 8),),
    ),
    "geglu": (
        lambda x: ops_mlp.gated(x.transpose(0, 1), ops_mlp.GELU),
        lambda x: ops_mlp.gated_ref(x.transpose(0, 1), ops_mlp.GELU),
        ((3, 2, 8),),
    ),
    **test_gelu.CASES,
    "rope": (
        lambda x: ops_rope.rope(x, COS, SIN, True),
        lambda x: ops_rope.rope_ref(x, COS, SIN, True),
        ((5, 2, 3, 10),),
    ),
    "rope_packed": (
        lambda x: ops_rope.rope_packed(x * 1.0, [16, 8, 8], 8, COS, SIN),
        lambda x: (
            ops_rope.rope_ref(x[..., :16].unflatten(-1, (2, 8)), COS, SIN),
            ops_rope.rope_ref(x[..., 16:24].unflatten(-1, (1, 8)), COS, SIN),
            x[..., 24:].unflatten(-1, (1, 8)),
        ),
        ((5, 2, 32),),
    ),
    "scaled_softmax": (
        lambda x: ops_softmax.scaled_softmax(x, 0.3, HIDDEN, True, 3),
        lambda x: ops_softmax.scaled_softmax_ref(x, 0.3, HIDDEN, True, 3),
        ((2, 3, 5, 6),),
    ),
    "scaled_softmax in place": (
        lambda x: ops_softmax.scaled_softmax(x * 1.0, 0.3, None, True, None, True)[0],
        lambda x: ops_softmax.scaled_softmax_ref(x, 0.3, None, True, None)[0],
        ((2, 3, 5, 6),),
    ),
    "cross_entropy": (
        lambda x: Loss.apply(x[:, :10]),
        lambda x: (
            F.cross_entropy(x[:, :10], LABELS.where((LABELS >= 0) & (LABELS < 10), 0), reduction="none")
            + (x[:, 0] * ((LABELS < 0) | (LABELS >= 10)))
        ),
        ((6, 12),),
    ),
}


def results(function, inputs):
    """Results, and gradients of all that has one for the same weights."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    found = function(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    live = [y for y in found if y.requires_grad]
    weights = [torch.linspace(-1, 2, y.numel()).view(y.shape) for y in live]
    grads = torch.autograd.grad(live, leaves, weights, allow_unused=True)
    return [*found, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves))]


@pytest.mark.parametrize("case", CASES)
def test_functions_have_the_references_numbers(case, kernels):
    function, reference, shapes = CASES[case]
    inputs = [torch.randn(shape) for shape in shapes]
    torch.testing.assert_close(results(function, inputs), results(reference, inputs), rtol=1e-5, atol=1e-5)
    assert kernels[-1].endswith(("backward", "grad", "rope")) or case == "add_norm, the sum alone"


# Dispatch


@pytest.mark.parametrize("case", CASES)
def test_a_second_derivative_is_refused_by_name(case, kernels):
    function, _, shapes = CASES[case]
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    found = function(*leaves)
    found = found[0] if isinstance(found, tuple) else found
    first = torch.autograd.grad(found.sum(), leaves, create_graph=True, allow_unused=True)
    if case == "add_norm, the sum alone":
        first = first[:2]
    with pytest.raises(RuntimeError, match=r"(Function|Loss) is once_differentiable.*without_kernels\(\)"):
        sum(grad.square().sum() for grad in first if grad is not None).backward()


def test_references_have_second_derivatives(monkeypatch):
    """What the message says to do."""
    monkeypatch.setattr(ops_mlp, "usable", lambda *x: not ops_kernels.without_kernels.off)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    with ops_kernels.without_kernels():
        assert torch.autograd.gradgradcheck(partial(ops_mlp.gated, act=ops_mlp.SILU), (x,))
    assert not ops_kernels.without_kernels.off


def test_the_switch_holds_on_every_thread_and_nests(monkeypatch):
    import threading

    monkeypatch.setattr(ops_kernels, "_unfit", lambda device: "")
    seen, cpu = [], torch.device("cpu")
    with pytest.raises(KeyError), ops_kernels.without_kernels():
        with ops_kernels.without_kernels():
            pass
        thread = threading.Thread(target=lambda: seen.append(ops_kernels.kernels_unavailable(cpu)))
        thread.start()
        thread.join()
        raise KeyError
    assert seen == ["they are switched off"] and ops_kernels.kernels_unavailable(cpu) == ""


class OnGpu:
    """As much of a tensor on a GPU as is asked for."""

    is_cuda = True

    def __init__(self, dtype, device):
        self.dtype, self.device = dtype, torch.device(device)


def test_plain_torch_on_a_gpu_is_never_silent(monkeypatch, recwarn):
    monkeypatch.setattr(ops_kernels, "_unfit", lambda device: "no such file" if device.index else "")
    assert ops_kernels.usable(OnGpu(torch.bfloat16, "cuda:0"), "one") and not recwarn.list
    with ops_kernels.without_kernels():
        assert not ops_kernels.usable(OnGpu(torch.bfloat16, "cuda:0"), "one") and not recwarn.list
    for _ in range(3):
        assert not ops_kernels.usable(OnGpu(torch.float64, "cuda:0"), "one")
        assert not ops_kernels.usable(OnGpu(torch.bfloat16, "cuda:1"), "two")
    warned = [str(warning.message) for warning in recwarn.list]
    assert len(warned) == 2
    assert "one of torch.float64 on cuda:0 runs in plain torch" in warned[0] and "fp32, bf16" in warned[0]
    assert "two of torch.bfloat16 on cuda:1" in warned[1] and warned[1].endswith("no such file")
    assert not ops_kernels.usable(torch.zeros(1), "one") and len(recwarn.list) == 2


def test_gated_of_an_odd_size_is_refused():
    with pytest.raises(ValueError, match=r"\[2, 5\].*two halves"):
        ops_mlp.gated(torch.zeros(2, 5), ops_mlp.SILU)

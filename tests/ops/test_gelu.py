"""Activations with a bias, and sums that are gradients of biases, in plain torch; the kernels: tests/gpu."""

import pytest
import torch
import torch.nn.functional as F

from nanomegatron.ops.bias import add_bias, column_sums
from nanomegatron.ops.gelu import EXACT, SQUARED_RELU, TANH, bias_act, bias_act_ref
from tests.ops.test_softmax import named

PLAIN = {
    TANH: lambda x: F.gelu(x, approximate="tanh"),
    EXACT: F.gelu,
    SQUARED_RELU: lambda x: F.relu(x).square(),
}


def fake(name: str, *args) -> None:
    """What the launch of a kernel writes, from nothing but what it gets."""
    a = named(name, args)
    x, bias = (None if t is None else t.detach() for t in (a["x"], a["bias"]))
    if name == "gelu_forward":
        a["out"].copy_(bias_act_ref(x, bias, act=a["act"]))
        return
    x, how = x if bias is None else x + bias, "none" if a["act"] == EXACT else "tanh"
    dx = torch.ops.aten.gelu_backward(a["grad"], x, approximate=how)
    if a["act"] == SQUARED_RELU:
        dx = 2 * a["grad"] * x.relu()
    a["dx"].copy_(dx)
    if bias is not None:
        a["dbias"].copy_(dx.sum_to_size(bias.shape))


CASES = {  # for ops/test_kernels.py
    "gelu with a bias": (
        lambda x, b: bias_act(x.transpose(0, 1), b, act=EXACT),
        lambda x, b: F.gelu(x.transpose(0, 1) + b),
        ((3, 2, 8), (8,)),
    ),
    "squared_relu": (lambda x: bias_act(x, act=SQUARED_RELU), PLAIN[SQUARED_RELU], ((3, 2, 8),)),
}


@pytest.mark.parametrize("act", PLAIN)
def test_the_bits_are_those_of_a_sum_and_an_activation(act):
    """Gradients, too, in every type; autograd adds a bias's over the other dims."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, bias, grad = (torch.randn(shape).to(dtype) for shape in ((5, 3, 8), (8,), (5, 3, 8)))
        for given in ([x, bias], [x]):
            results = []
            for function in (lambda *a: bias_act(*a, act=act), lambda *a: PLAIN[act](sum(a[1:], a[0]))):
                leaves = [t.clone().requires_grad_() for t in given]
                y = function(*leaves)
                results.append([y.detach(), *torch.autograd.grad(y, leaves, grad)])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_owner_gets_the_sums():
    """Added to what is there; autograd then gets what the owner returns."""
    x, bias, target = torch.randn(4, 8).requires_grad_(), torch.randn(8).requires_grad_(), torch.ones(8)
    for function in (lambda *a: bias_act(*a, act=TANH), add_bias):
        for beta, before in ((1, 1.0), (0, torch.nan)):
            target.fill_(before)

            def owner(given, write, beta=beta):
                assert given is bias
                write(target, beta)
                return target

            dx, dbias = torch.autograd.grad(function(x, bias, owner).sum(), (x, bias))
            assert torch.equal(target, beta + dx.sum(0)) and torch.equal(target, dbias)
    frozen = bias.detach()
    add_bias(x, frozen, lambda *_: 1 / 0).sum().backward()
    assert frozen.grad is None and add_bias(x, None) is x


def test_second_derivatives():
    x, bias = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, bias)]
    assert torch.autograd.gradgradcheck(lambda x, b: bias_act(x, b, act=TANH), leaves)
    assert torch.autograd.gradgradcheck(lambda x: column_sums(x, torch.empty_like(x[0])).square(), x)


def test_another_bias_is_refused():
    x = torch.zeros(5, 8)
    for bias in (torch.zeros(1), torch.zeros(8, 1), torch.zeros(8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"bias torch.* on cpu: must be torch.float32 \[8\] on cpu"):
            bias_act(x, bias, act=TANH)

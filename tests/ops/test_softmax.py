"""The softmax of attention scores: its reference against float64, its checks, what it hands to the kernel."""

import re
from pathlib import Path

import pytest
import torch

from nanomegatron.ops import softmax as ops_softmax
from nanomegatron.ops.attention import Mask
from nanomegatron.ops.softmax import scaled_softmax, scaled_softmax_ref

HEADER = (Path(__file__).parents[2] / "cuda" / "kernels.h").read_text()


def named(name: str, args: tuple) -> dict:
    """What a kernel gets, by the names in kernels.h (the stream comes last, from `launch_kernel`)."""
    declared = re.search(rf"void {name}\((.*?)\);", HEADER, re.DOTALL)[1].split(",")
    names = [parameter.split()[-1] for parameter in declared]
    assert names[-1] == "stream" and len(args) == len(names) - 1
    return dict(zip(names, args))


def fake(name: str, *args) -> None:
    """The kernel in torch, from nothing but what it is given."""
    a = named(name, args)
    shape = tuple(a[key] for key in "bnst")
    hidden = None
    if a["hidden"] is not None:
        hidden = a["hidden"].as_strided(shape, (a["hidden_b"], a["hidden_n"], a["hidden_s"], 1))
    window = None if a["window"] < 0 else a["window"]
    mask = (hidden, bool(a["causal"]), window)
    if name == "softmax_forward":
        probs, lse = scaled_softmax_ref(a["x"].detach(), a["scale"], *mask)
        a["out"].copy_(probs)
        a["lse"].copy_(lse)
    else:
        y, grad = a["y"], a["grad"]
        seen = scaled_softmax_ref(torch.zeros(shape), 1.0, *mask)[0] > 0
        a["dx"].copy_(a["scale"] * y * (grad - (grad * y * seen).sum(-1, keepdim=True)) * seen)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(ops_softmax, "usable", lambda *x: True)
    monkeypatch.setattr(ops_softmax, "launch_kernel", fake)


def by_hand(scores, scale, hidden):
    wide = (scores.double() * scale).masked_fill(hidden, float("-inf"))
    return wide.softmax(-1), wide.logsumexp(-1)


@pytest.mark.parametrize("causal, window", [(False, None), (True, None), (True, 2), (False, 1), (True, 0)])
@pytest.mark.parametrize("s, t", [(6, 6), (3, 8), (1, 5)])
def test_places_are_those_of_the_attention_mask(s, t, causal, window):
    scores = torch.randn(2, 3, s, t)
    hidden = Mask(causal, window).hidden(2, s, t, scores.device)
    probs, lse = by_hand(scores, 0.3, hidden)
    found, found_lse = scaled_softmax(scores, 0.3, None, causal, window)
    torch.testing.assert_close(found.double(), probs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found_lse.double(), lse, rtol=1e-5, atol=1e-6)
    assert (found[hidden.expand_as(found)] == 0).all() and found_lse.dtype == torch.float32
    more = torch.rand(2, 1, s, t) < 0.3
    more[..., t - s :].diagonal(dim1=-2, dim2=-1).fill_(False)  # each sees itself
    again = scaled_softmax(scores, 0.3, more, causal, window)[0]
    torch.testing.assert_close(again.double(), by_hand(scores, 0.3, hidden | more)[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("hidden", ["none", "b", "n", "1", "row", "all"])
def test_function_gives_the_references_gradients(hidden, inplace, kernel, monkeypatch):
    shape = {
        "b": (2, 1, 4, 6),
        "n": (1, 3, 4, 6),
        "1": (1, 1, 4, 6),
        "row": (2, 1, 1, 6),
        "all": (2, 3, 4, 6),
    }
    mask = None if hidden == "none" else torch.rand(shape[hidden]) < 0.4
    if mask is not None:
        mask[..., 0] = False
    x, grad = torch.randn(2, 3, 4, 6, requires_grad=True), torch.randn(2, 3, 4, 6)
    scores = x * 1.0
    probs, lse = scaled_softmax(scores, 0.7, mask, True, None, inplace)
    assert (probs is scores) == inplace and not lse.requires_grad
    (dx,) = torch.autograd.grad(probs, x, grad)
    expected, expected_lse = scaled_softmax_ref(x, 0.7, mask, True, None)
    torch.testing.assert_close(probs, expected)
    torch.testing.assert_close(lse, expected_lse)
    torch.testing.assert_close(dx, torch.autograd.grad(expected, x, grad)[0])


def test_views_that_are_not_contiguous(kernel):
    x = torch.randn(2, 3, 6, 4, requires_grad=True)
    scores = x.transpose(-1, -2)
    hidden = (torch.rand(2, 1, 6, 4) < 0.3).transpose(-1, -2)
    probs, _ = scaled_softmax(scores, 0.5, hidden, inplace=True)
    expected, _ = scaled_softmax_ref(scores, 0.5, hidden, False, None)
    torch.testing.assert_close(probs, expected)
    given, other = (
        torch.autograd.grad(y.sum(dim=0).pow(2).sum(), x, retain_graph=True)[0] for y in (probs, expected)
    )
    torch.testing.assert_close(given, other)


def test_gradient_has_no_gradient(kernel):
    x = torch.randn(1, 1, 2, 3, requires_grad=True)
    (dx,) = torch.autograd.grad(scaled_softmax(x, 1.0)[0].pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_rows_that_see_nothing():
    probs, lse = scaled_softmax(
        torch.randn(1, 1, 3, 2), 1.0, causal=True
    )  # the first query is before all keys
    assert probs[0, 0, 0].isnan().all() and lse[0, 0, 0] == float("-inf")
    assert probs[0, 0, 1:].isfinite().all()
    probs, lse = scaled_softmax(torch.randn(2, 2, 0, 3), 1.0)
    assert probs.shape == (2, 2, 0, 3) and lse.shape == (2, 2, 0)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(hidden=torch.zeros(1, 1, 4, 6)), "hidden torch.float32"),
        (dict(hidden=torch.zeros(1, 1, 4, 5, dtype=torch.bool)), "for scores"),
        (dict(hidden=torch.zeros(4, 6, dtype=torch.bool)), "for scores"),
        (dict(hidden=torch.zeros(1, 1, 4, 6, dtype=torch.bool, device="meta")), "on meta"),
        (dict(window=-1), "window of -1"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        scaled_softmax(torch.randn(2, 3, 4, 6), 1.0, **settings)
    with pytest.raises(ValueError, match="are .b, n, s, t."):
        scaled_softmax(torch.randn(3, 4, 6), 1.0)

"""Attention backends against a softmax written out in float64, one query at a time."""

import math

import pytest
import torch

from nanomegatron import attention
from nanomegatron.attention import choose_backend, core_attention

CASES = {
    "causal": dict(),
    "full": dict(causal=False),
    "grouped": dict(n=6, g=2),
    "one key head": dict(n=4, g=1),
    "grouped, full": dict(n=4, g=2, causal=False),
    "more keys, full": dict(s=3, t=8, causal=False),
    "cache": dict(s=3, t=8, g=2),
    "one token and a cache": dict(s=1, t=8, g=2),
}


def naive(q, k, v, causal):
    """The definition: `[s, b, n, d]` and `[t, b, g, d]` -> `[s, b, n*d]`, log-sum-exp `[b, n, s]`."""
    (s, _, n, d), (t, _, g, _) = q.shape, k.shape
    context, lse = [], []
    for i in range(s):
        seen = i + t - s + 1 if causal else t
        keys, values = (x[:seen].repeat_interleave(n // g, dim=2) for x in (k, v))
        scores = (q[i] * keys).sum(-1) / math.sqrt(d)  # [seen, b, n]
        lse.append(scores.logsumexp(0))
        context.append((scores.softmax(0)[..., None] * values).sum(0).flatten(1))
    return torch.stack(context), torch.stack(lse, -1)


@pytest.mark.parametrize("backend", ["flash", "unfused"])
@pytest.mark.parametrize("case", CASES)
def test_against_the_definition(backend, case):
    sizes = dict(s=40, b=2, n=4, g=4, d=8, causal=True) | CASES[case]
    s, b, n, g, d, causal = (sizes[name] for name in ("s", "b", "n", "g", "d", "causal"))
    t = sizes.get("t", s)
    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((s, b, n, d), (t, b, g, d), (t, b, g, d))]
    context, lse = core_attention(*inputs, backend, causal)
    expected, expected_lse = naive(*(x.double() for x in inputs), causal)
    assert context.shape == (s, b, n * d) and lse.shape == (b, n, s) and lse.dtype == torch.float32
    torch.testing.assert_close(context.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(context)
    grads = [torch.autograd.grad((y * weight).sum(), inputs) for y in (context, expected)]
    for found, exact in zip(*grads, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def test_token_by_token_equals_all_at_once():
    """Each token alone against the keys so far, as generation does it."""
    q, k, v = torch.randn(3, 9, 2, 4, 8)
    whole, _ = core_attention(q, k, v, "flash")
    steps = [core_attention(q[i : i + 1], k[: i + 1], v[: i + 1], "flash")[0] for i in range(9)]
    torch.testing.assert_close(torch.cat(steps), whole)
    chunks = [core_attention(q[i : i + 3], k[: i + 3], v[: i + 3], "flash")[0] for i in (0, 3, 6)]
    torch.testing.assert_close(torch.cat(chunks), whole)


def test_dropout_of_the_probabilities():
    """Values of 1 make the context the sum of the kept probabilities, 1 on average."""
    q, k = torch.randn(2, 64, 8, 4, 8)
    context, lse = core_attention(q, k, torch.ones_like(k), "unfused", dropout=0.5)
    assert context.std() > 0.05 and abs(context.mean() - 1) < 0.05
    assert torch.equal(lse, core_attention(q, k, k, "unfused")[1]), "the log-sum-exp knows no dropout"


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    "device, dtype, dropout, expected",
    [
        (CPU, torch.float32, 0.0, "flash"),
        (CPU, torch.bfloat16, 0.0, "flash"),
        (CPU, torch.float32, 0.1, "unfused"),
        (CUDA, torch.bfloat16, 0.0, "fused"),
        (CUDA, torch.float16, 0.1, "fused"),
        (CUDA, torch.float32, 0.0, "unfused"),
    ],
)
def test_auto_takes_the_fastest_that_can(device, dtype, dropout, expected):
    assert choose_backend("auto", device, dtype, dropout) == expected


def test_backend_asked_for_is_taken_or_refused():
    for name in "flash", "unfused":
        assert choose_backend(name, CPU, torch.float32) == name
        assert choose_backend(name, CUDA, torch.bfloat16, 0.1) == name
    with pytest.raises(
        ValueError, match="backend fused cannot run float32 on cpu; here: auto, flash, unfused"
    ):
        choose_backend("fused", CPU, torch.float32)
    with pytest.raises(
        ValueError, match="flash cannot run bfloat16 on cpu with attention dropout; here: auto, unf"
    ):
        choose_backend("flash", CPU, torch.bfloat16, 0.1)
    with pytest.raises(ValueError, match="backend flash cannot run float32 on cuda"):
        choose_backend("flash", CUDA, torch.float32)


def test_only_the_unfused_backend_holds_all_scores(monkeypatch):
    """One query over a cache sees all keys: it needs no mask, and the flash kernel does."""
    monkeypatch.setattr(attention.ops, "scaled_softmax", None)
    q = torch.randn(8, 1, 2, 8)
    for queries in q, q[:1]:
        assert core_attention(queries, q, q, "flash")[0].isfinite().all()

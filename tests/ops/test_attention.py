"""Attention backends against a softmax written out in float64, one query at a time."""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanomegatron.ops import attention
from nanomegatron.ops.attention import Mask, choose_backend, core_attention

CASES = {
    "causal": dict(),
    "full": dict(causal=False),
    "grouped": dict(n=6, g=2),
    "one key head": dict(n=4, g=1),
    "grouped, full": dict(n=4, g=2, causal=False),
    "more keys, full": dict(s=3, t=8, causal=False),
    "cache": dict(s=3, t=8, g=2),
    "one token and a cache": dict(s=1, t=8, g=2),
    "window": dict(window=7),
    "window of a block": dict(s=200, window=64, g=2),
    "window of nothing but itself": dict(window=0),
    "window as long as it is": dict(window=39),
    "window of all keys but one": dict(window=38),
    "one token, a window of all keys but one": dict(s=1, t=8, window=6),
    "window and a cache": dict(s=3, t=8, g=2, window=2),
    "one token, window and a cache": dict(s=1, t=8, window=2),
    "bounded": dict(g=2, cap=1.5),
    "bounded, window and a cache": dict(s=3, t=8, window=2, cap=0.5),
    "bounded, one token and a cache": dict(s=1, t=8, g=2, cap=0.5),
    "documents": dict(lengths=(4, 36, 1, 1, 30, 8)),
    "documents, full": dict(lengths=(40, 13, 27), causal=False, g=2),
    "documents of a row": dict(lengths=(40, 40)),
    "documents and a window": dict(lengths=(25, 15, 3, 37), window=5, g=1),
}


def naive(q, k, v, causal, window, lengths, cap=None):
    """The definition: `[s, b, n, d]` and `[t, b, g, d]` -> `[s, b, n*d]`, log-sum-exp `[b, n, s]`."""
    (s, b, n, d), (t, _, g, _) = q.shape, k.shape
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).view(b, t)
    context, lse = q.new_zeros(s, b, n, d), q.new_zeros(b, n, s)
    for row, i, head in itertools.product(range(b), range(s), range(n)):
        own = i + t - s
        seen = [
            j
            for j in range(t)
            if not (causal and j > own)
            and not (window is not None and own - j > window)
            and documents[row, j] == documents[row, own]
        ]
        scores = k[seen, row, head * g // n] @ q[i, row, head] / math.sqrt(d)
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        lse[row, head, i] = scores.logsumexp(0)
        context[i, row, head] = scores.softmax(0) @ v[seen, row, head * g // n]
    return context.flatten(2), lse


BACKENDS = "flash", "unfused"


@pytest.mark.parametrize(
    "case, backend",  # only the unfused one bounds scores
    [(case, kind) for case in CASES for kind in BACKENDS if kind == "unfused" or "cap" not in CASES[case]],
)
def test_against_the_definition(case, backend):
    sizes = dict(s=40, b=2, n=4, g=4, d=8, causal=True) | CASES[case]
    s, b, n, g, d, causal = (sizes[name] for name in ("s", "b", "n", "g", "d", "causal"))
    t, lengths, window, cap = sizes.get("t", s), *(sizes.get(name) for name in ("lengths", "window", "cap"))
    mask = Mask(causal, window, cap=cap)
    if lengths:
        bounds = torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32)
        mask = Mask(causal, window, bounds, max(lengths))
    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((s, b, n, d), (t, b, g, d), (t, b, g, d))]
    context, lse = core_attention(*inputs, backend, mask)
    expected, expected_lse = naive(*(x.double() for x in inputs), causal, window, lengths or [t] * b, cap)
    assert context.shape == (s, b, n * d) and lse.shape == (b, n, s) and lse.dtype == torch.float32
    torch.testing.assert_close(context.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(context)
    grads = [torch.autograd.grad((y * weight).sum(), inputs) for y in (context, expected)]
    for found, exact in zip(*grads, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [Mask(), Mask(window=2)], ids=["causal", "window"])
def test_token_by_token_equals_all_at_once(mask):
    """Each token alone against the keys so far, as generation does it."""
    q, k, v = torch.randn(3, 9, 2, 4, 8)
    whole, _ = core_attention(q, k, v, "flash", mask)
    steps = [core_attention(q[i : i + 1], k[: i + 1], v[: i + 1], "flash", mask)[0] for i in range(9)]
    torch.testing.assert_close(torch.cat(steps), whole)
    chunks = [core_attention(q[i : i + 3], k[: i + 3], v[: i + 3], "flash", mask)[0] for i in (0, 3, 6)]
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
    monkeypatch.setattr(attention, "scaled_softmax", None)
    q = torch.randn(8, 1, 2, 8)
    for queries in q, q[:1]:
        assert core_attention(queries, q, q, "flash")[0].isfinite().all()


class Largest(TorchDispatchMode):
    """How many elements the largest tensor that is made has."""

    elements = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        sizes = [x.numel() for x in (made if isinstance(made, tuple) else (made,)) if torch.is_tensor(x)]
        self.elements = max(self.elements, *sizes, 0)
        return made


def test_no_mask_is_as_large_as_the_scores():
    """The largest tensor made for 2,048 tokens, their mask by document and by window, is a block of them."""
    s = 2048
    q = torch.randn(s, 1, 2, 8)
    documents = dict(cu_seqlens=torch.tensor([0, 100, 1500, s], dtype=torch.int32), max_seqlen=1400)
    for backend, mask, most in [
        ("flash", Mask(window=64), s * 64),
        ("flash", Mask(**documents), s * 64),
        ("flash", Mask(window=32, **documents), s * 64),
        ("unfused", Mask(window=64), 2 * s * s),
    ]:
        with Largest() as largest:
            core_attention(q, q, q, backend, mask)
        assert largest.elements <= most and (backend == "flash" or largest.elements == most)

"""Blocks of attention against a softmax written out in float64 and its autograd, whole and merged."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanomegatron.ops.attention import Block, attend, attend_backward
from tests.ops.test_attention import Largest

CASES = {
    "full": dict(),
    "full, fewer keys": dict(t=9),
    "full, more keys, grouped": dict(t=150, g=2),
    "full, one key": dict(t=1, g=1),
    "causal": dict(causal=True),
    "causal, grouped": dict(causal=True, g=2),
    "causal, one key head": dict(causal=True, n=3, g=1),
    "causal, more keys": dict(causal=True, t=53, g=2),
    "causal, more queries than the CPU takes at once": dict(causal=True, s=150, t=163),
    "causal, one query": dict(causal=True, s=1, t=8),
    "window": dict(causal=True, window=7),
    "window, more keys": dict(causal=True, window=7, t=53, g=2),
    "window of one": dict(causal=True, window=0),
    "window longer than the keys": dict(causal=True, window=90),
    "window of a block of queries": dict(causal=True, window=70, s=150, t=181, g=1),
    "segments": dict(lengths=((4, 9), (20, 3), (1, 1), (15, 30)), g=2),
    "one segment": dict(lengths=((40, 17),)),
    "causal segments": dict(causal=True, lengths=((4, 9), (20, 20), (1, 1), (15, 30))),
    "causal segments as long": dict(causal=True, lengths=((4, 4), (20, 20), (1, 1), (15, 15)), n=6, g=3),
    "windowed segments": dict(causal=True, window=5, lengths=((4, 9), (70, 75), (1, 3), (15, 15)), g=1),
    "heads of 64": dict(causal=True, d=64),
    "heads of 80": dict(causal=True, t=45, d=80, g=2),
    "heads of 128": dict(d=128, g=1),
    "heads of 256": dict(causal=True, lengths=((30, 30), (10, 12)), d=256, g=2),
}


def sizes_of(case: dict) -> tuple[int, ...]:
    """(s, t, b, n, g, d)."""
    sizes = dict(s=40, b=1 if "lengths" in case else 2, n=4, d=8) | case
    if "lengths" in case:
        sizes["s"], sizes["t"] = map(sum, zip(*case["lengths"], strict=True))
    return tuple({"t": sizes["s"], "g": sizes["n"], **sizes}[name] for name in "stbngd")


def block_of(case: dict, device: str = "cpu") -> Block:
    block = Block(case.get("causal", False), case.get("window"))
    if "lengths" not in case:
        return block
    lengths = list(zip(*case["lengths"], strict=True))
    bounds = (torch.tensor((0, *itertools.accumulate(x)), dtype=torch.int32, device=device) for x in lengths)
    return Block(block.causal, block.window, *bounds, *map(max, lengths))


def sees(case: dict) -> torch.Tensor:
    """The definition, key by key: `[s, t]`."""
    s, t, *_ = sizes_of(case)
    seen = torch.zeros(s, t, dtype=torch.bool)
    row = first = 0
    for queries, keys in case.get("lengths", ((s, t),)):
        for i, j in itertools.product(range(queries), range(keys)):
            back = keys - queries + i - j  # how far the key is behind the query; its own is 0
            window = case.get("window")
            seen[row + i, first + j] = not case.get("causal") or (
                back >= 0 and (window is None or back <= window)
            )
        row, first = row + queries, first + keys
    return seen


def naive(q, k, v, seen):
    """`[s, b, n, d]`, `[t, b, g, d]` -> output `[s, b, n, d]`, log-sum-exp `[b, n, s]`; head by head."""
    heads = [i * k.shape[2] // q.shape[2] for i in range(q.shape[2])]
    outs, lses = [], []
    for i, j in enumerate(heads):
        scores = torch.einsum("sbd,tbd->bst", q[:, :, i], k[:, :, j]) * q.shape[3] ** -0.5
        scores = scores.masked_fill(~seen.to(q.device), -torch.inf)
        outs.append(torch.einsum("bst,tbd->sbd", scores.softmax(-1), v[:, :, j]))
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs, 2), torch.stack(lses, 1)


def exact(q, k, v, dout, seen) -> list[torch.Tensor]:
    """Output, log-sum-exp and the three gradients in float64."""
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = naive(*inputs, seen)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, dout.double())]


def found(q, k, v, dout, block, backend) -> list[torch.Tensor]:
    out, lse = attend(q, k, v, block, backend)
    return [out, lse, *attend_backward(dout, q, k, v, out, lse, block, backend)]


def draw(case: dict, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """q, k, v and the gradient of the output."""
    s, t, b, n, g, d = sizes_of(case)
    shapes = (s, b, n, d), (t, b, g, d), (t, b, g, d), (s, b, n, d)
    return tuple(torch.randn(shape, dtype=dtype, device=device) for shape in shapes)


def compare(ours, right, rtol: float, atol: float) -> None:
    for x, y in zip(ours, right, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x.double(), y, rtol=rtol, atol=atol)


@pytest.mark.parametrize("backend", ["flash", "unfused"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_the_definition(backend, case):
    """Forward and backward of every kind of block."""
    inputs = draw(case)
    ours = found(*inputs, block_of(case), backend)
    assert all(x.dtype == torch.float32 for x in ours)
    compare(ours, exact(*inputs, sees(case)), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_unfused_is_exact_in_double_precision(case):
    inputs = draw(case, torch.float64)
    compare(found(*inputs, block_of(case), "unfused"), exact(*inputs, sees(case)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", ["flash", "unfused"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bf16(backend, case):
    """8 bits: outputs are rounded, and in kernels the probabilities; the log-sum-exp is fp32."""
    inputs = draw(case, torch.bfloat16)
    ours = found(*inputs, block_of(case), backend)
    assert [x.dtype for x in ours] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 3]
    for x, y in zip(ours, exact(*inputs, sees(case)), strict=True):
        alone = sizes_of(case)[1] == 1 or case.get("window") == 0  # one key: dS is 0, but for rounding
        assert (x.double() - y).norm() <= 1e-2 * y.norm() + 1e-2 * alone


@pytest.mark.parametrize("backend", ["flash", "unfused"])
@pytest.mark.parametrize(
    "name", ["full", "causal, grouped", "causal, more keys", "window", "causal segments"]
)
def test_views(backend, name):
    """Slices of a packed projection and of what all queries have; a gradient that was broadcast."""
    case = CASES[name]
    s, t, b, n, g, d = sizes_of(case)
    packed = torch.randn(s + t + 2, b, (n + 2 * g) * d).split((n * d, g * d, g * d), dim=2)
    q, k, v = (x.unflatten(2, (-1, d)) for x in packed)
    q, k, v = q[1 : s + 1], k[2 : t + 2], v[2 : t + 2]
    dout = torch.randn(b, n, d).expand(s, b, n, d)
    right = exact(q, k, v, dout, sees(case))
    compare(found(q, k, v, dout, block_of(case), backend), right, rtol=1e-4, atol=2e-5)
    out, lse = (torch.randn(s + 8, b, n, d), torch.randn(b, n, s + 8))  # those of more queries
    out[3 : s + 3], lse[:, :, 3 : s + 3] = right[:2]
    grads = attend_backward(dout, q, k, v, out[3 : s + 3], lse[..., 3 : s + 3], block_of(case), backend)
    compare(grads, right[2:], rtol=1e-4, atol=2e-5)


def halves(case: dict, at: int) -> list[tuple[slice | torch.Tensor, dict]]:
    """The keys cut in two, behind `at` of each segment: which they are, and what queries do with them."""
    if "lengths" not in case:
        t = sizes_of(case)[1]
        return [(slice(0, at), dict(case, t=at, causal=False)), (slice(at, t), dict(case, t=t - at))]
    ends = list(itertools.accumulate(keys for _, keys in case["lengths"]))
    starts = [end - keys for end, (_, keys) in zip(ends, case["lengths"], strict=True)]
    cut = [start + at for start in starts]
    first = [(q, at) for q, _ in case["lengths"]]
    second = [(q, keys - at) for q, keys in case["lengths"]]
    numbers = [
        torch.cat([torch.arange(*x) for x in zip(*ends, strict=True)])
        for ends in ((starts, cut), (cut, ends))
    ]
    return [(numbers[0], dict(case, lengths=first, causal=False)), (numbers[1], dict(case, lengths=second))]


MERGED = {
    "full": (dict(t=50, g=2), 17),
    "causal": (dict(causal=True, s=20, t=50, g=2), 30),
    "causal, more keys in both": (dict(causal=True, s=20, t=50, g=1), 13),
    "segments": (dict(lengths=((7, 9), (20, 5), (15, 30)), g=2), 4),
    "causal segments": (dict(causal=True, lengths=((4, 9), (20, 24), (1, 6)), g=2), 4),
}


@pytest.mark.parametrize("backend", ["flash", "unfused"])
@pytest.mark.parametrize("case, at", MERGED.values(), ids=MERGED)
def test_blocks_add_up(backend, case, at):
    """Two blocks of disjoint keys, merged by their log-sum-exps, and the gradients by what is merged."""
    q, k, v, dout = draw(case)
    right = exact(q, k, v, dout, sees(case))
    parts = [(keys, block_of(part)) for keys, part in halves(case, at)]
    results = [attend(q, k[keys], v[keys], block, backend) for keys, block in parts]
    lse = torch.stack([lse for _, lse in results]).logsumexp(0)
    out = sum(out * (part - lse).exp().permute(2, 0, 1)[..., None] for out, part in results)
    dq, dk, dv = torch.zeros_like(q), torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
    for keys, block in parts:
        more, dk[keys], dv[keys] = attend_backward(dout, q, k[keys], v[keys], out, lse, block, backend)
        dq += more
    compare((out, lse, dq, dk, dv), right, rtol=1e-4, atol=2e-5)


def test_hidden_is_what_is_not_seen():
    for case in CASES.values():
        s, t, *_ = sizes_of(case)
        assert torch.equal(~block_of(case).hidden(s, t, torch.device("cpu")), sees(case))


def test_no_mask_is_as_large_as_the_scores():
    """What the CPU's kernel cannot do alone it does for 64 queries at a time, or a window of them."""
    s, d = 2048, 8
    bounds = torch.tensor([0, 100, s], dtype=torch.int32)
    for block, t, keys in [
        (Block(True), s + 700, s + 700),
        (Block(True, 64), s + 700, 128),
        (
            Block(True, None, bounds, torch.tensor([0, 300, s + 700], dtype=torch.int32), s - 100, s + 400),
            s + 700,
            s + 400,
        ),
        (Block(True, 32, bounds, bounds, s - 100, s - 100), s, 96),
    ]:
        q, k = torch.randn(s, 1, 2, d), torch.randn(t, 1, 2, d)
        with Largest() as largest:
            found(q, k, k, q, block, "flash")
        assert largest.elements <= max(64 * keys, 2 * t * d)


class Calls(TorchDispatchMode):
    """What is called, of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if "attention" in str(op):
            self.made.append((str(op).split(".")[1], op, args, kwargs or {}))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["fused", "flash"])
@pytest.mark.parametrize("name", CASES)
def test_what_the_gpu_is_asked(backend, name):
    """On tensors without data: the ops take what they are given, and the right one is called."""
    case = CASES[name]
    s, t, b, n, g, d = sizes_of(case)
    packed = torch.empty(s + t + 8, b, (n + 2 * g) * d, dtype=torch.bfloat16, device="meta")
    q, k, v = (x.unflatten(2, (-1, d)) for x in packed.split((n * d, g * d, g * d), dim=2))
    q, k, v = q[:s], k[:t], v[:t]
    with Calls() as calls:
        out, lse = attend(q, k, v, block_of(case, "meta"), backend)
        out, lse = out.new_empty(s + 8, b, n, d)[:s], lse.new_empty(b, n, s + 8)[..., :s]
        dout = out.new_empty(b, n, d).expand(s, b, n, d)
        grads = attend_backward(dout, q, k, v, out, lse, block_of(case, "meta"), backend)
    assert out.shape == q.shape and lse.shape == (b, n, s) and lse.dtype == torch.float32
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    simple = "window" not in case and "lengths" not in case and not (case.get("causal") and s != t)
    cudnn = backend == "fused" and simple and d <= 128 and t > 1
    kernel = "scaled_dot_product_cudnn_attention" if cudnn else "flash_attention_forward"
    other = "scaled_dot_product_cudnn_attention_backward" if cudnn else "flash_attention_backward"
    assert [call[0].removeprefix("_") for call in calls.made] == [kernel, other]
    for _, op, args, kwargs in calls.made:
        named = dict(zip((a.name for a in op._schema.arguments), args), **kwargs)
        assert named.get("is_causal", False) == case.get("causal", False) and not named.get("dropout_p")
        assert named.get("window_size_left") == case.get("window")
        assert named.get("window_size_right") == (0 if "window" in case else None)
        if "lengths" in case:
            assert (named["max_q"], named["max_k"]) == tuple(map(max, zip(*case["lengths"], strict=True)))
            assert named["cum_seq_q"].shape == named["cum_seq_k"].shape == (len(case["lengths"]) + 1,)
        elif "max_q" in named:
            assert (named["max_q"], named["max_k"], named["cum_seq_q"]) == (s, t, None)
        if "grad_out" in named:
            assert named["logsumexp"].is_contiguous() and named["logsumexp"].numel() == b * n * s
            for x in named["grad_out"], named["out"]:
                assert (
                    x.permute(2, 0, 1, 3) if cudnn else x if x.dim() == 3 else x.transpose(0, 1)
                ).is_contiguous()

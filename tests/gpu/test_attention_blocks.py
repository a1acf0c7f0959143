"""Blocks of attention by the GPU's kernels: against scores in fp32, against autograd's path, and merged."""

import pytest
import torch

from nanomegatron.ops.attention import Block, Mask, _cudnn_can, attend, attend_backward, core_attention
from tests.test_attention_blocks import CASES, block_of, draw, exact, found, halves, sees

CUDA = torch.device("cuda", 0)
LONGER = {
    "full": dict(s=200, t=500, n=8, g=2, d=64),
    "causal": dict(causal=True, s=512, n=8, g=2, d=128),
    "causal, more keys": dict(causal=True, s=130, t=700, n=8, g=2, d=128),
    "window": dict(causal=True, window=100, s=300, t=411, n=8, g=1, d=64),
    "segments": dict(lengths=((100, 3), (1, 300), (257, 129)), n=8, g=2, d=128),
    "causal segments": dict(causal=True, lengths=((100, 300), (1, 1), (257, 257)), n=8, g=8, d=64),
    "windowed segments": dict(
        causal=True, window=64, lengths=((100, 164), (1, 9), (257, 300)), n=8, g=2, d=128
    ),
    **{f"heads of {d}": dict(causal=True, s=320, n=4, g=2, d=d) for d in (80, 192, 256)},
    **{f"full, heads of {d}": dict(s=200, t=320, n=4, g=2, d=d) for d in (96, 192, 256)},
}
EVERY = {name: dict(case, d=case.get("d", 64)) for name, case in CASES.items()} | {
    f"longer: {name}": case for name, case in LONGER.items()
}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # 2^-9 and 2^-12, each rounded a few times


def error(ours: torch.Tensor, right: torch.Tensor) -> float:
    """Of the norm, or of what elements of 0.01 have: where a query sees but one key, dq and dk are zero."""
    return (
        (ours.double() - right.double()).norm() / max(right.double().norm(), 0.01 * right.numel() ** 0.5)
    ).item()


@pytest.mark.parametrize("name", EVERY)
def test_unfused_in_fp32(name):
    """The reference of the rest."""
    inputs = draw(EVERY[name], device=CUDA)
    for ours, right in zip(
        found(*inputs, block_of(EVERY[name], CUDA), "unfused"), exact(*inputs, sees(EVERY[name])), strict=True
    ):
        torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["bf16", "fp16"])
@pytest.mark.parametrize("backend", ["fused", "flash"])
@pytest.mark.parametrize("name", EVERY)
def test_against_fp32(name, backend, dtype):
    block, inputs = block_of(EVERY[name], CUDA), draw(EVERY[name], dtype, CUDA)
    ours = found(*inputs, block, backend)
    assert [x.dtype for x in ours] == [dtype, torch.float32, dtype, dtype, dtype]
    right = found(*(x.float() for x in inputs), block, "unfused")
    for what, x, y in zip(("out", "lse", "dq", "dk", "dv"), ours, right, strict=True):
        assert x.shape == y.shape
        assert error(x, y) < TOLERANCE[dtype], what


@pytest.mark.parametrize("backend", ["fused", "flash"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("mask", [Mask(), Mask(False), Mask(window=50)], ids=["causal", "full", "window"])
def test_as_exact_as_autograd(mask, d, backend):
    """One block of all keys: the very kernels that autograd calls, or their like."""
    q, k, v, dout = draw(dict(s=384, n=8, g=2, d=d), torch.bfloat16, CUDA)
    block = Block(mask.causal, mask.window)
    ours = found(q, k, v, dout, block, backend)
    right = found(*(x.float() for x in (q, k, v, dout)), block, "unfused")
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    context, lse = core_attention(*inputs, backend, mask)
    theirs = [context.view(q.shape), lse, *torch.autograd.grad(context, inputs, dout.flatten(2))]
    for x, other, y in zip(ours, theirs, right, strict=True):
        assert error(x, y) < 1.1 * error(other, y) + 1e-5


@pytest.mark.parametrize("backend", ["fused", "flash"])
@pytest.mark.parametrize(
    "case, at",
    [
        (dict(causal=True, s=256, t=512, n=8, g=2, d=128), 256),  # the rest of the keys is a square: cuDNN's
        (dict(s=256, t=500, n=8, g=2, d=64), 200),
        (dict(causal=True, lengths=((100, 300), (64, 128), (257, 400)), n=8, g=2, d=128), 60),
    ],
    ids=["causal", "full", "segments"],
)
def test_blocks_add_up(case, at, backend):
    """Gradients by what two blocks merged to, about as exact as those of the whole block."""
    q, k, v, dout = draw(case, torch.bfloat16, CUDA)
    right = found(*(x.float() for x in (q, k, v, dout)), block_of(case, CUDA), "unfused")
    whole = found(q, k, v, dout, block_of(case, CUDA), "flash")
    parts = [
        (keys if isinstance(keys, slice) else keys.to(CUDA), block_of(part, CUDA))
        for keys, part in halves(case, at)
    ]
    results = [attend(q, k[keys], v[keys], block, backend) for keys, block in parts]
    lse = torch.stack([lse for _, lse in results]).logsumexp(0)
    out = sum(o.float() * (part - lse).exp().permute(2, 0, 1)[..., None] for o, part in results).bfloat16()
    dq, dk, dv = torch.zeros_like(q, dtype=torch.float32), torch.empty_like(k), torch.empty_like(v)
    for keys, block in parts:
        more, dk[keys], dv[keys] = attend_backward(dout, q, k[keys], v[keys], out, lse, block, backend)
        dq += more
    for x, other, y in zip((out, lse, dq, dk, dv), whole, right, strict=True):
        assert error(x, y) < min(1.5 * error(other, y) + 1e-5, 1e-2)


@pytest.mark.parametrize("backend", ["fused", "flash"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("block", [Block(), Block(True), Block(True, 40)], ids=["full", "causal", "window"])
def test_views(block, d, backend):
    """Results for some queries of more, and layouts that differ from those of the call before."""
    s, b, n, g = 256, 2, 8, 2
    widths = n * d, g * d, g * d
    packed = torch.randn(2 * s, b, sum(widths), device=CUDA, dtype=torch.bfloat16).split(widths, dim=2)
    packed = [x.unflatten(2, (-1, d)) for x in packed]
    outs, lses = (
        torch.randn(2 * s, b, n, d, device=CUDA, dtype=torch.bfloat16),
        torch.randn(b, n, 2 * s, device=CUDA),
    )
    gradients = (
        torch.randn_like(outs),
        torch.randn_like(outs.transpose(0, 1)).transpose(0, 1),
        torch.randn_like(outs[:1]).expand_as(outs),
    )
    for dout in gradients:
        for half in slice(0, s), slice(s, 2 * s):
            for q, k, v in packed, [x.contiguous() for x in packed]:
                q, k = q[half], k[half]
                v, own = v[half], dout[half]
                right = found(*(x.float() for x in (q, k, v, own)), block, "unfused")
                outs[half], lses[..., half] = attend(q, k, v, block, backend)
                given = outs[half], lses[..., half]
                grads = attend_backward(own, q, k, v, *given, block, backend)
                for x, y in zip((*given, *grads), right, strict=True):
                    assert error(x, y) < 1e-2


@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_head_sizes(d, capsys):
    """Every size works; says what cuDNN does if it is asked. (Once: torch keeps failed plans, too.)"""
    q, k, v, dout = draw(dict(causal=True, s=512, n=8, g=2, d=d), torch.bfloat16, CUDA)
    right = found(*(x.float() for x in (q, k, v, dout)), Block(True), "unfused")
    errors = {
        kind: [error(*xy) for xy in zip(found(q, k, v, dout, Block(True), kind), right, strict=True)]
        for kind in ("fused", "flash")
    }
    assert max(map(max, errors.values())) < 1e-2
    heads_first = [x.permute(1, 2, 0, 3).requires_grad_() for x in (q, k, v)]
    params = torch.backends.cuda.SDPAParams(*heads_first, None, 0.0, True, True)
    try:
        out, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(*heads_first, None, True, 0.0, True)[:2]
        grads = torch.autograd.grad(out, heads_first, dout.permute(1, 2, 0, 3))
        said = max(error(x.permute(2, 0, 1, 3), y) for x, y in zip(grads, right[2:], strict=True))
        said = f"runs both ways, error of the gradients {said:.1e}"
    except RuntimeError as e:
        said = f"fails: {str(e).splitlines()[0][:90]}"
    with capsys.disabled():
        print(
            f"\nheads of {d}: fused is {'cuDNN' if _cudnn_can(q, k, Block(True)) else 'flash'}, errors "
            f"{max(errors['fused']):.1e}, flash {max(errors['flash']):.1e}; cuDNN "
            f"{torch.backends.cudnn.version()} {said}; torch would "
            f"{'' if torch.backends.cuda.can_use_cudnn_attention(params) else 'not '}choose it"
        )


@pytest.mark.parametrize("case", ["window", "segments"])
def test_no_mask_of_all_pairs(case):
    """32,768 queries and keys: scores of one head alone would take 2 GiB."""
    s = 32768
    bounds = torch.tensor([0, 20000, 30000, s], dtype=torch.int32, device=CUDA)
    block = Block(True, 1023) if case == "window" else Block(True, None, bounds, bounds, 20000, 20000)
    q = torch.randn(s, 1, 8, 64, device=CUDA, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found(q, q, q, q, block, "fused")
    assert torch.cuda.max_memory_allocated() - before < 1 << 30

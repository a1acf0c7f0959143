"""Every op, forward and backward, against its formula written out in float64 or another of torch's own."""

import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from nanomegatron.config.model import TransformerConfig
from nanomegatron.ops import adamw as ops_adamw
from nanomegatron.ops import dropout as ops
from nanomegatron.ops import gelu as ops_gelu
from nanomegatron.ops import kernels as ops_kernels
from nanomegatron.ops import norm as ops_norm
from nanomegatron.ops import paths as ops_report
from nanomegatron.ops import swiglu as ops_mlp
from nanomegatron.ops.cross_entropy import cross_entropy_grad_ref, cross_entropy_stats_ref
from nanomegatron.ops.softmax import scaled_softmax
from tools import kernel_errors

F64 = torch.float64


def randn(*shape, scale=1.0):
    return (scale * torch.randn(shape, dtype=F64)).requires_grad_()


def compare(found, expected, inputs, tolerance=1e-12):
    """Values, and the gradients of a random weighting of them, from two graphs over the same inputs."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    weight = torch.randn_like(found)
    grads = [torch.autograd.grad((y * weight).sum(), inputs) for y in (found, expected)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_rms_norm():
    x, w = randn(3, 2, 16), randn(16)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * w
    compare(ops_norm.norm(x, w, None, 1e-2), expected, (x, w))


def test_layer_norm():
    x, w, b = randn(3, 2, 16), randn(16), randn(16)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-2).sqrt() * w + b
    compare(ops_norm.norm(x, w, b, 1e-2), expected, (x, w, b))


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_statistics_of_bf16_norms_are_fp32(op):
    """Within one rounding of the exact result; sums in bf16 would be off by many."""
    x, w = (torch.randn(8, 1024) + 4).bfloat16(), torch.ones(1024).bfloat16()
    bias = torch.zeros_like(w) if op == "layer_norm" else None
    found = ops_norm.norm(x, w, bias, 1e-5)
    exact = ops_norm.norm(x.double(), w.double(), None if bias is None else bias.double(), 1e-5)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()


def test_swiglu_and_gelu():
    x = randn(5, 12)
    gate, up = x[:, :6], x[:, 6:]
    compare(ops_mlp.gated(x, ops_mlp.SILU), gate / (1 + (-gate).exp()) * up, (x,))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    compare(ops_gelu.bias_act_ref(x, act=ops_gelu.TANH), 0.5 * x * (1 + inner.tanh()), (x,))
    compare(ops_gelu.bias_act_ref(x, act=ops_gelu.EXACT), 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), (x,))


@pytest.mark.parametrize("s, t, masked", [(5, 5, False), (5, 5, True), (3, 7, True), (1, 4, True)])
def test_scaled_softmax(s, t, masked):
    scores = torch.randn(2, 3, s, t, requires_grad=True)
    hidden = torch.rand(2, 1, s, t) < 0.5
    hidden[..., 0] = False  # every query sees a key
    wide = scores.double() * 0.3
    wide = wide.where(~hidden, -1e30) if masked else wide
    probs, lse = scaled_softmax(scores, 0.3, hidden if masked else None)
    compare(probs.double(), wide.softmax(-1), (scores,), 1e-6)
    torch.testing.assert_close(lse.double(), wide.logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert lse.dtype == torch.float32


# Dropout


def mask(p=0.3, seed=1, site=2, s=64, b=4, h=96, first=0, sample=0):
    positions, samples = torch.arange(first, first + s), torch.arange(sample, sample + b)
    return ops.dropout(torch.ones(s, b, h), p, seed, site, positions, samples) > 0


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_dropout_rate_and_scale(p):
    x = torch.randn(128, 4, 256)
    y = ops.dropout(x, p, 3, 0, torch.arange(128), torch.arange(4))
    kept = y != 0
    assert abs(kept.float().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / x.numel()) + 1e-9
    torch.testing.assert_close(y[kept], x[kept] / (1 - p))
    for dims in (0, 1), (0, 2), (1, 2):  # no feature, sample or position is favoured
        rates = kept.float().mean(dims)
        assert (rates - (1 - p)).abs().max() < 6 * math.sqrt(p * (1 - p) * rates.numel() / x.numel()) + 1e-6


def test_dropout_mask_belongs_to_the_token():
    """However samples and positions are spread over calls, a token's mask is the same."""
    whole = mask()
    assert torch.equal(whole, mask())
    assert torch.equal(whole[:, 2:], mask(b=2, sample=2))
    assert torch.equal(whole[16:32], mask(s=16, first=16))
    x, order = torch.ones(64, 4, 96), torch.randperm(64)
    shuffled = ops.dropout(x, 0.3, 1, 2, order, torch.arange(4)) > 0
    assert torch.equal(whole[order], shuffled)


@pytest.mark.parametrize(
    "other",
    [
        dict(seed=2),
        dict(site=3),
        dict(first=1),
        dict(sample=1),
        dict(seed=2**61),
        dict(seed=2, site=1),  # the same sum
    ],
)
def test_dropout_masks_are_independent(other):
    """Two masks agree as often as chance has it: p^2 + (1-p)^2."""
    agree = (mask() == mask(**other)).float().mean().item()
    assert agree == pytest.approx(0.58, abs=0.02)


def test_dropout_gradient_has_the_same_mask():
    x = torch.randn(8, 2, 16, requires_grad=True)
    y = ops.dropout(x, 0.25, 1, 1, torch.arange(8), torch.arange(2))
    y.sum().backward()
    torch.testing.assert_close(x.grad, (y != 0) / 0.75)


# Cross entropy


def test_cross_entropy_statistics_and_gradient():
    logits, labels = torch.randn(7, 11, requires_grad=True), torch.randint(11, (7,))
    maximum, total, target = cross_entropy_stats_ref(logits, labels)
    lse = total.log() + maximum
    loss = F.cross_entropy(logits.double(), labels, reduction="none")
    torch.testing.assert_close((lse - target).double(), loss, rtol=1e-6, atol=1e-6)
    weight = torch.rand(7)
    (expected,) = torch.autograd.grad((loss * weight).sum(), logits)
    found = cross_entropy_grad_ref(logits, labels, lse, weight)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_cross_entropy_of_another_shards_label():
    """Below or above the shard: logit 0, and no -1 in the gradient."""
    logits, labels = torch.randn(3, 5), torch.tensor([-2, 5, 4])
    maximum, total, target = cross_entropy_stats_ref(logits, labels)
    assert target.tolist() == [0.0, 0.0, logits[2, 4].item()]
    lse = logits.logsumexp(-1)
    grad = cross_entropy_grad_ref(logits, labels, lse, torch.ones(3))
    torch.testing.assert_close(grad[:2], logits.softmax(-1)[:2])
    assert grad[2].sum().abs() < 1e-6


def test_cross_entropy_of_a_shard_of_padding():
    empty, labels = torch.zeros(3, 0), torch.zeros(3, dtype=torch.int64)
    maximum, total, target = cross_entropy_stats_ref(empty, labels)
    assert maximum.isneginf().all() and (total == 0).all() and (target == 0).all()
    assert cross_entropy_grad_ref(empty, labels, total, total).shape == (3, 0)


def test_cross_entropy_of_large_bf16_logits():
    logits = torch.tensor([[3000.0, 2990.0, -3000.0]]).bfloat16()
    maximum, total, target = cross_entropy_stats_ref(logits, torch.tensor([1]))
    assert maximum.dtype == torch.float32
    exact = logits.double().logsumexp(-1) - logits[0, 1].double()
    torch.testing.assert_close((total.log() + maximum - target).double(), exact, rtol=1e-6, atol=1e-6)


# AdamW

HYPER = (0.9, 0.95, 1e-8, 0.1)


def adam_state(n=3):
    params = [torch.randn(4, i + 1) for i in range(n)]
    return params, ([torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params])


def update(op, params, moments, grads, step, lr, scale=1.0, skip=0.0):
    """Grads are copied, since the fused kernel may write the divided gradient back."""
    numbers = torch.tensor([step, lr, scale, skip])
    op(params, [g.clone() for g in grads], moments, numbers[0], numbers[1], HYPER, *numbers[2:])


def adamw_of_the_paper(params, grads, moments, step, lr, hyper, grad_scale, skip) -> None:
    """AdamW as the paper writes it (arXiv 1711.05101), a tensor at a time."""
    beta1, beta2, eps, weight_decay = hyper
    if skip:
        return
    for p, g, m, v in zip(params, grads, *moments, strict=True):
        g = g / grad_scale
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        p.mul_(1 - lr * weight_decay)
        p.sub_(lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps))


@pytest.mark.parametrize("op", [ops_adamw.adamw_, adamw_of_the_paper])
def test_adamw_is_torchs(op):
    """Ten steps with a changing learning rate; gradients come multiplied by a loss scale that changes too."""
    params, moments = adam_state()
    twins = [p.clone().requires_grad_() for p in params]
    oracle = torch.optim.AdamW(twins, betas=HYPER[:2], eps=HYPER[2], weight_decay=HYPER[3], foreach=False)
    for step in range(1, 11):
        grads = [torch.randn_like(p) for p in params]
        oracle.param_groups[0]["lr"] = lr = 0.1 / step
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad
        oracle.step()
        scale = 4.0 ** (step % 3)  # AdamW would not notice a constant one
        update(op, params, moments, [g * scale for g in grads], step, lr, scale)
        torch.testing.assert_close(params, [t.detach() for t in twins], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", [ops_adamw.adamw_, adamw_of_the_paper])
def test_skipped_step_changes_nothing(op):
    params, moments = adam_state()
    update(op, params, moments, params, 1, 0.1)
    before = [t.clone() for t in (*params, *moments[0], *moments[1])]
    update(op, params, moments, [torch.full_like(p, torch.nan) for p in params], 2, 0.1, torch.nan, skip=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, (*params, *moments[0], *moments[1]), strict=True))
    update(op, params, moments, params, 2, 0.1)
    assert not torch.equal(before[0], params[0])


CPU = torch.device("cpu")


def test_paths_are_named_for_every_op():
    paths = ops_report.paths(CPU)
    assert set(paths) == {*ops_report.KERNELS, *ops_report.TORCHS}
    assert set(ops_report.KERNELS) == set(kernel_errors.cases(CPU))
    assert paths["rope"] == "torch reference (there are none for cpu)"
    assert (
        paths["rms_norm"].startswith("torch fused")
        and paths["gelu"] == "torch fused (there are none for cpu)"
    )


def test_paths_with_kernels(monkeypatch):
    monkeypatch.setattr(ops_kernels, "_unfit", lambda device: "")
    assert {ops_report.paths(CPU)[op] for op in ops_report.KERNELS} == {"kernel"}
    with ops_kernels.without_kernels():
        assert ops_report.paths(CPU)["adamw_"] == "torch fused (they are switched off)"


def test_the_line_of_a_run_says_what_has_no_kernel_and_why(monkeypatch):
    model, gpu = TransformerConfig(), torch.device("cuda", 0)
    assert ops_report.describe_kernels(CPU, model) == (
        "none for cpu: torch's fused rms_norm, layer_norm, adamw_, gelu; reference for the rest"
    )
    monkeypatch.setattr(ops_kernels, "_unfit", lambda device: "the extension is not built")
    assert ops_report.describe_kernels(gpu, model).startswith(
        "none, the extension is not built: torch's fused "
    )
    monkeypatch.setattr(ops_kernels, "_unfit", lambda device: "")
    monkeypatch.setattr(ops_kernels, "_kernels", SimpleNamespace(archs="sm_90a"))
    rest = ["torch reference (has no kernel): attention_dropout"]
    assert ops_report.describe_kernels(gpu, model).split(" | ") == [
        f"sm_90a: {', '.join(ops_report.KERNELS)}",
        *rest,
    ]
    printed = ops_report.describe_kernels(
        gpu, replace(model, rope_fusion=False, persist_layer_norm=False)
    ).split(" | ")
    assert printed[0].startswith("sm_90a: bias_dropout_add, swiglu, ") and printed[3:] == rest
    assert printed[1] == "torch fused (switched off): rms_norm, layer_norm"
    assert printed[2] == "torch reference (switched off): add_norm, rope"


def test_module_reports_what_is_built():
    command = [sys.executable, "-m", "nanomegatron.ops"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("built ") and not result.stderr
    assert all(f"\n{op} " in result.stdout for op in ops_report.paths(CPU))


def test_self_test_finds_what_is_wrong(capsys, monkeypatch):
    assert kernel_errors.self_test(CPU)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == list(ops_report.KERNELS)
    assert all(line.endswith(" OK") for line in printed)
    monkeypatch.setattr(kernel_errors, "gated", lambda x, act: 1.1 * kernel_errors.gated_ref(x, act))
    monkeypatch.setattr(kernel_errors, "scaled_softmax", lambda x, *_: (x * torch.nan, x[..., 0]))
    monkeypatch.setattr(kernel_errors, "rope", lambda x, *_: x.view(3))
    assert not kernel_errors.self_test(CPU)
    printed = capsys.readouterr().out.splitlines()
    failed = [line.split()[0] for line in printed if line.endswith(" FAILED")]
    assert failed == ["rope", "swiglu", "scaled_softmax"]
    assert sum("invalid for input of size" in line for line in printed) == 3


def test_attention_dropout_belongs_to_sample_head_query_and_key():
    """Any part of the heads, samples, queries or keys has its part of the mask, at the rate asked for."""
    samples, heads, tokens = torch.arange(5, 9), torch.arange(6), torch.arange(32)
    whole = ops.attention_dropout(torch.ones(4, 6, 32, 32), 0.3, 1, -2, (tokens, tokens), samples, heads)
    places = (tokens[8:16], tokens[4:])
    part = ops.attention_dropout(torch.ones(2, 3, 8, 28), 0.3, 1, -2, places, samples[[3, 1]], heads[3:])
    assert torch.equal(part, whole[[3, 1], 3:, 8:16, 4:])
    assert whole.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert (whole == 0).float().mean() == pytest.approx(0.3, abs=0.01)
    for dim in range(4):  # no two slices alike along any dim
        slices = whole.movedim(dim, 0).flatten(1)
        assert len(slices.unique(dim=0)) == len(slices)

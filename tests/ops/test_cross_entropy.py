"""Cross entropy over a part of the vocabulary: the reference against float64, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from nanomegatron.ops import cross_entropy as ops_loss


def problem(t=6, v=11, dtype=torch.float32):
    return (3 * torch.randn(t, v)).to(dtype), torch.randint(v, (t,))


def test_statistics():
    logits, labels = problem()
    maximum, total, target = ops_loss.cross_entropy_stats(logits, labels)
    loss = F.cross_entropy(logits.double(), labels, reduction="none")
    torch.testing.assert_close((maximum + total.log() - target).double(), loss, rtol=1e-5, atol=1e-6)


def test_labels_of_other_shards():
    logits, labels = problem()
    labels[:3] = torch.tensor([-1, 11, 2**40])
    assert (ops_loss.cross_entropy_stats(logits, labels)[2][:3] == 0).all()
    lse, given = logits.logsumexp(-1), logits.clone()
    found = ops_loss.cross_entropy_grad_(logits, labels, lse, torch.ones(6))
    torch.testing.assert_close(found[:3], given[:3].softmax(-1))


@pytest.mark.parametrize("real", [None, 11, 8])
def test_gradient_over_the_logits(real):
    logits, labels = problem()
    columns = 11 if real is None else real
    labels %= columns
    weights, x = torch.rand(6), logits[:, :columns].double().requires_grad_()
    loss = F.cross_entropy(x, labels, reduction="none")
    (expected,) = torch.autograd.grad((loss * weights).sum(), x)
    args = (labels, x.logsumexp(-1).detach().float(), weights, real)
    found = ops_loss.cross_entropy_grad_(logits, *args)
    assert found.data_ptr() == logits.data_ptr() and (logits[:, columns:] == 0).all()
    torch.testing.assert_close(logits[:, :columns].double(), expected, rtol=1e-5, atol=1e-6)


def test_a_shard_of_padding():
    logits, labels = problem()
    maximum, total, target = ops_loss.cross_entropy_stats(logits[:, :0], labels)
    assert (maximum == -float("inf")).all() and (total == 0).all() and (target == 0).all()
    assert (ops_loss.cross_entropy_grad_(logits, labels, total, total, 0) == 0).all()


def test_a_second_backward_is_refused():
    """A backward that kept the logits raises, for they are gone."""
    x = torch.randn(4, 5, requires_grad=True)
    logits = x * 1.0
    y = logits.exp()
    weighted = (logits * y).sum()
    ops_loss.cross_entropy_grad_(logits, torch.zeros(4).long(), torch.zeros(4), torch.ones(4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weighted.backward()


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(logits=torch.zeros(6)), r"must be floating, \[t, V\]"),
        (dict(logits=torch.zeros(6, 3).int()), "must be floating"),
        (dict(labels=torch.zeros(6).int()), "must be torch.int64"),
        (dict(labels=torch.zeros(5).long()), r"labels .*\[5\].*must be .*\[6\]"),
        (dict(lse=torch.zeros(6, 1)), r"\[6, 1\].*must be .*\[6\]"),
        (dict(grad=torch.zeros(6, device="meta")), "on meta"),
        (dict(real=12), "real 12: of 11 columns"),
        (dict(real=-1), "real -1"),
    ],
)
def test_what_does_not_fit_is_refused(change, said):
    logits, labels = problem()
    given = dict(logits=logits, labels=labels, lse=torch.zeros(6), grad=torch.zeros(6), real=None)
    with pytest.raises(ValueError, match=said):
        ops_loss.cross_entropy_grad_(**(given | change))

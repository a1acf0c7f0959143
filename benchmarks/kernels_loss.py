"""Cases of cross entropy over the whole vocabulary, logits `[tokens, vocab]` in bf16.

"torch" takes the logits to fp32, as is the custom; "torch bf16" leaves that to torch's kernels, whose loss is
rounded to bf16. Ours and Liger's write the gradient over the logits, so later calls see gradients: as many
bytes, and finite.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.kernels_common import Case, Sizes, backward, case, compiled, forward
from nanomegatron.ops.cross_entropy import cross_entropy_grad_, cross_entropy_stats

ROWS = 512  # that float64 is taken to at once


def losses(logits, labels):
    """Of each token, by fp32."""
    return F.cross_entropy(logits.float(), labels, reduction="none")


def mean(logits, labels):
    """Their mean."""
    return F.cross_entropy(logits.float(), labels)


def mean16(logits, labels):
    """The same, straight from bf16."""
    return F.cross_entropy(logits, labels)


def cross_entropies(sizes: Sizes) -> Iterator[Case]:
    """Bytes a logit: statistics 2, gradient 4, both 6."""
    t, vocab = sizes.tokens, sizes.vocab

    def inputs():
        logits = sizes.normal(t, vocab)
        return logits, torch.randint(vocab, (t,), device=sizes.device)

    def ours(logits, labels):
        return lambda: cross_entropy_stats(logits, labels)

    def of_stats(maximum, total, target):
        return (maximum + total.log() - target,)

    ways = {
        "kernel": ours,
        "torch": forward(losses),
        "compile": forward(compiled(losses)),
        "liger": liger_losses,
    }
    floor = 2 * t * vocab
    yield case("cross entropy fwd", floor, inputs, ways, lambda *x: (exact_losses(*x),), kernel=of_stats)

    def with_grad():
        return *inputs(), torch.ones((), device=sizes.device)

    ways = {
        "kernel": ours_grad,
        "torch": backward(mean, 1, 1),
        "torch bf16": bf16_backward,
        "compile": backward(compiled(mean), 1, 1),
    }
    yield case("cross entropy grad", 2 * floor, with_grad, ways, lambda *x: (exact_grad(*x[:2]),))
    ways = {
        "kernel": ours_both,
        "torch": both(mean),
        "torch bf16": both(mean16),
        "compile": both(compiled(mean)),
        "liger": liger_both,
    }

    def expected(logits, labels):
        return exact_losses(logits, labels).mean(), exact_grad(logits, labels)

    yield case("cross entropy fwd+bwd", 3 * floor, inputs, ways, expected)


def exact_losses(logits, labels):
    """In float64, some rows at a time."""
    rows = (logits.split(ROWS), labels.split(ROWS))
    return torch.cat([F.cross_entropy(x.double(), y, reduction="none") for x, y in zip(*rows)])


def exact_grad(logits, labels):
    """Of the mean, in float64."""
    result = torch.empty_like(logits, dtype=torch.float64)
    for out, x, y in zip(result.split(ROWS), logits.split(ROWS), labels.split(ROWS)):
        out.copy_(x.double().softmax(dim=-1))
        out.scatter_add_(1, y[:, None], torch.full_like(out[:, :1], -1.0))
    return result.div_(len(labels))


def both(function):
    """A way that runs forward and backward."""

    def way(logits, labels):
        logits.requires_grad_()

        def run():
            with torch.enable_grad():
                loss = function(logits, labels)
            return loss.detach(), *torch.autograd.grad(loss, logits)

        return run

    return way


def bf16_backward(logits, labels, grad):
    """The loss and its gradient are of bf16 too."""
    return backward(mean16, 1, 1)(logits, labels, grad.bfloat16())


def ours_grad(logits, labels, grad):
    """The second pass alone."""
    maximum, total, _ = cross_entropy_stats(logits, labels)
    lse, grads = maximum + total.log(), (grad / len(labels)).expand(len(labels)).contiguous()
    return lambda: (cross_entropy_grad_(logits, labels, lse, grads),)


def ours_both(logits, labels):
    """Both passes, and what Python makes of the statistics between them."""
    grads = torch.full((len(labels),), 1 / len(labels), device=logits.device)

    def run():
        maximum, total, target = cross_entropy_stats(logits, labels)
        lse = maximum + total.log()
        return (lse - target).mean(), cross_entropy_grad_(logits, labels, lse, grads)

    return run


LIGER = None, -100, 0.0, 0.0  # weight, ignored label, z loss, label smoothing


def liger_losses(logits, labels):
    """Without gradients, a loss a token."""
    from liger_kernel.ops.cross_entropy import cross_entropy_forward

    return lambda: cross_entropy_forward(logits, labels, *LIGER, "none", None, False)[:1]


def liger_both(logits, labels):
    """Loss and gradient in one kernel; the gradient from above is 1, so the backward has nothing to do."""
    from liger_kernel.ops.cross_entropy import cross_entropy_backward, cross_entropy_forward

    logits.requires_grad_()
    one = torch.ones((), device=logits.device)

    def run():
        loss, *_, grad = cross_entropy_forward(logits, labels, *LIGER, "mean", None, False)
        return loss, cross_entropy_backward(grad, one).detach()

    return run

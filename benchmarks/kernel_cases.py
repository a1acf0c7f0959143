"""Cases of the kernels of norms, the MLP, the loss, the optimizer, the order of experts and embeddings.

Bytes are what must be read and written at least; inputs are bf16. Weights of norms are below 1, so that
gradients in place never grow; cross entropy's gradient, ours and Liger's, takes the place of the logits, so
later calls see gradients: as many bytes, and finite.
"""

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.forms import Sizes, backward, case, compiled, forms, forward, in_float64, liger, passes, wide
from benchmarks.session import Case
from nanomegatron.ops.adamw import DECAY, FlatState, Segments, adamw_flat_, sums_of_squares
from nanomegatron.ops.bias import column_sums
from nanomegatron.ops.cross_entropy import cross_entropy_grad_, cross_entropy_stats
from nanomegatron.ops.dropout import Dropout, bias_dropout_add, bias_dropout_add_ref
from nanomegatron.ops.embedding import add_position_grad_, add_word_grad_, lookup
from nanomegatron.ops.gelu import TANH, bias_act
from nanomegatron.ops.norm import add_norm, norm
from nanomegatron.ops.permute import Routing, permute, route_ref, unpermute
from nanomegatron.ops.swiglu import SILU
from nanomegatron.ops.swiglu import gated as gated_kernel

EPS = 1e-5
RMS = EPS, 0.0, "llama"  # Liger's: with Llama's casts, as by default


def norms(s: Sizes) -> Iterator[Case]:
    """Forward 4 bytes a value, 8 with the add; backward 6 and 8."""
    x, bias, values = s.normal(s.tokens, s.hidden), s.normal(s.hidden), s.tokens * s.hidden

    weight = lambda: torch.rand(s.hidden, device=s.device).mul(0.4).add(0.5).bfloat16()  # noqa: E731

    ours = lambda x, w, b=None: norm(x, w, b, EPS)  # noqa: E731
    ours_add = lambda x, w, residual: add_norm(x, residual, w, None, EPS)  # noqa: E731
    moved = 4 * values, 6 * values
    peer = forward(lambda x, w: liger("rms_norm_forward")(x, w, *RMS, None)[0]), liger_rms_backward
    yield from passes("rms norm", moved, (x, weight), (x,), 2, (ours, rms), liger=peer)
    peer = forward(lambda x, w, b: liger("layer_norm_forward")(x, w, b, EPS)[0]), liger_layer_backward
    yield from passes("layer norm", moved, (x, weight, bias), (x,), 3, (ours, layer), liger=peer)
    moved = 8 * values, 8 * values
    peer = forward(lambda x, w, r: liger("fused_add_rms_norm_forward")(x, r, w, *RMS)[:2]), liger_add_backward
    yield from passes("add+rms norm", moved, (x, weight, x), (x, x), 2, (ours_add, add_rms), liger=peer)


def branches(s: Sizes) -> Iterator[Case]:
    """What ends a branch: bias, dropout and residual add, as one op and before a norm, x `[tokens/4, 4, h]`.

    As one op 6 bytes a value, backward 4, without dropout 2; before a norm 8 and 8, with dropout 10.
    """
    shape = s.tokens // 4, 4, s.hidden
    x, bias, values = s.normal(*shape), s.normal(s.hidden), s.tokens * s.hidden
    weight = lambda: torch.rand(s.hidden, device=s.device).mul(0.4).add(0.5).bfloat16()  # noqa: E731
    counters = torch.arange(shape[0], device=s.device), torch.arange(4, device=s.device)
    for words, drop, more in (("bias+", None, 0), ("bias+dropout+", Dropout(0.1, 5, 3, *counters), 2)):
        ours = lambda x, b, r, drop=drop: bias_dropout_add(x, b, r, drop)  # noqa: E731
        plain = lambda x, b, r, drop=drop: bias_dropout_add_ref(x, b, r, drop)  # noqa: E731
        moved = 6 * values, (2 + more) * values
        yield from passes(f"{words}add", moved, (x, bias, x), (x,), 2, (ours, plain))
        ours = lambda x, r, b, w, c, drop=drop: add_norm(x, r, w, c, EPS, False, b, drop)  # noqa: E731
        normed = functools.partial(add_layer, plain)
        moved, given = (8 * values, (8 + more) * values), (x, x, bias, weight, bias)
        yield from passes(f"{words}add+layer norm", moved, given, (x, x), 5, (ours, normed))


def add_layer(add, x, residual, bias, w, b):
    total = add(x, bias, residual)
    return layer(total, w, b), total


def rms(x, w):
    return F.rms_norm(x, w.shape, w, EPS)


def layer(x, w, b):
    return F.layer_norm(x, w.shape, w, b, EPS)


def add_rms(x, w, residual):
    total = x + residual
    return rms(total, w), total


def liger_rms_backward(x, w, grad):
    """In place, as by default: dx over grad. Else it fills dx with zeros first."""
    _, x, rstd, block, warps, mode = liger("rms_norm_forward")(x, w, *RMS, None)
    return lambda: liger("rms_norm_backward")(grad, x, w, rstd, 0.0, mode, block, warps, True, None)


def liger_layer_backward(x, w, b, grad):
    _, x, mean, rstd, *_ = liger("layer_norm_forward")(x, w, b, EPS)
    return lambda: liger("layer_norm_backward")(grad, x, w, b, mean, rstd)


def liger_add_backward(x, w, residual, grad, grad_total):
    _, total, rstd, block, warps, stages, mode = liger("fused_add_rms_norm_forward")(x, residual, w, *RMS)
    given = grad, grad_total, total, w, rstd, 0.0, mode, block, warps, stages, False
    return lambda: liger("fused_add_rms_norm_backward")(*given)[::2]


def swiglus(s: Sizes) -> Iterator[Case]:
    """x `[tokens, 2 ffn]`: 6 bytes a value of the result, backward 10.

    Liger's gate and up are two tensors, which is not counted against it. Its gradients take their place, and
    are the inputs of its next call: hence a small one from above.
    """
    x, grad, values = s.normal(s.tokens, 2 * s.ffn), s.normal(s.tokens, s.ffn, scale=0.1), s.tokens * s.ffn

    def liger_forward(x):
        a, b = (part.contiguous() for part in x.chunk(2, dim=-1))
        return lambda: liger("swiglu_forward")(a, b)[2]

    def liger_backward(x, grad):
        a, b = (part.contiguous() for part in x.chunk(2, dim=-1))
        return lambda: liger("swiglu_backward")(a, b, grad)

    ours = functools.partial(gated_kernel, act=SILU)
    ways = forms(forward(ours), gated, liger=liger_forward)
    yield case("swiglu fwd", 6 * values, (x,), ways)
    ways = forms(backward(ours, (1, 1)), gated, grads=(1, 1), liger=liger_backward)
    joined = lambda a, b: (torch.cat((a, b), dim=-1),)  # noqa: E731
    yield case("swiglu bwd", 10 * values, (x, grad), ways, liger=joined)


def gated(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


LIGER_LOSS = None, -100, 0.0, 0.0  # weight, ignored label, z loss, label smoothing


def gelus(s: Sizes) -> Iterator[Case]:
    """x `[rows, f]` of GPT-2's MLP, and a bias: 4 bytes a value, backward 6; the sums over rows: 2."""
    ours = functools.partial(bias_act, act=TANH)
    plain = lambda x, b: F.gelu(x + b, approximate="tanh")  # noqa: E731
    for rows, f in s.inner:
        x, bias, name = s.normal(rows, f), s.normal(f), f"{rows} x {f}"
        moved = 4 * rows * f, 6 * rows * f
        yield from passes(f"bias+gelu {name}", moved, (x, bias), (x,), 2, (ours, plain))
        sums = torch.empty(f, device=s.device)
        ways = forms(forward(lambda x, sums=sums: column_sums(x, sums)), lambda x: x.sum(0))
        yield case(f"column sums {name}", 2 * rows * f, (x,), ways)


def cross_entropies(s: Sizes) -> Iterator[Case]:
    """Logits `[tokens, vocab]`, bytes each: statistics 2, with the gradient 6.

    torch takes them to fp32, as is the custom; "torch bf16" leaves that to its kernels and rounds the loss.
    """
    moved = 2 * s.tokens * s.vocab
    inputs = s.normal(s.tokens, s.vocab), lambda: torch.randint(s.vocab, (s.tokens,), device=s.device)
    losses, given = functools.partial(mean, reduction="none"), (*LIGER_LOSS, "none", None, False)
    peer = forward(lambda *x: liger("cross_entropy_forward")(*x, *given)[0])  # without gradients
    ways = forms(forward(cross_entropy_stats), losses, liger=peer)
    of_stats = lambda maximum, total, target: (maximum + total.log() - target,)  # noqa: E731
    yield case("cross entropy fwd", moved, inputs, ways, ours=of_stats)
    ways = {"ours": ours_both, "torch": both(mean), "torch bf16": both(F.cross_entropy)}
    ways |= {"compile": both(compiled(mean)), "liger": liger_both}
    yield case("cross entropy fwd+bwd", 3 * moved, inputs, ways)


def mean(logits, labels, reduction="mean"):
    return F.cross_entropy(wide(logits), labels, reduction=reduction)


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


def ours_both(logits, labels):
    """Both passes, and what Python makes of the statistics between them."""
    grads = torch.full((len(labels),), 1 / len(labels), device=logits.device)

    def run():
        maximum, total, target = cross_entropy_stats(logits, labels)
        lse = maximum + total.log()
        return (lse - target).mean(), cross_entropy_grad_(logits, labels, lse, grads)

    return run


def liger_both(logits, labels):
    """Loss and gradient in one kernel; the gradient from above is 1, so the backward has nothing to do."""
    logits.requires_grad_()
    one = torch.ones((), device=logits.device)

    def run():
        loss, *_, grad = liger("cross_entropy_forward")(logits, labels, *LIGER_LOSS, "mean", None, False)
        return loss, liger("cross_entropy_backward")(grad, one).detach()

    return run


HYPER = 0.9, 0.95, 1e-8  # beta1, beta2, eps
LR, WEIGHT_DECAY, STEP = 1e-4, 0.1, 10.0


def adamws(s: Sizes) -> Iterator[Case]:
    """30 bytes an element: 16 read, 14 written, gradients and moments in fp32. The norm: 4."""
    n, flat = s.elements, s.normal(s.elements, dtype=torch.float32)
    second, step = lambda: flat().square_(), lambda: torch.full((), STEP, device=s.device)
    ways = forms(ours_adamw, fused, stepped)
    yield case(
        "adamw", 30 * n, (flat, s.normal(n), flat, flat, second, step), ways, in_float64(forward(stepped))
    )

    def squares(grads):
        segments = Segments.from_ranges([(0, n, 0)], grads.device)
        return lambda: sums_of_squares(grads, segments)

    ways = forms(squares, lambda x: torch.linalg.vector_norm(x))
    yield case("gradient norm", 4 * n, (flat,), ways, ours=lambda sums, _: (sums.sum().sqrt(),))


def stepped(main, params, grads, exp_avg, exp_avg_sq, step):
    """AdamW in place, a line at a time: compiled it is one pass."""
    beta1, beta2, eps = HYPER
    exp_avg.mul_(beta1).add_(grads, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
    root = (exp_avg_sq / (1 - beta2**step)).sqrt() + eps
    main.mul_(1 - LR * WEIGHT_DECAY).sub_(LR * (exp_avg / (1 - beta1**step)) / root)
    params.copy_(main)
    return main, params, exp_avg, exp_avg_sq


def fused(main, params, grads, exp_avg, exp_avg_sq, step):
    """torch's kernel and a copy. With a gradient scale it would write the gradients too, so there is none."""
    beta1, beta2, eps = HYPER
    settings = dict(lr=LR, beta1=beta1, beta2=beta2, weight_decay=WEIGHT_DECAY, eps=eps)
    settings |= dict(amsgrad=False, maximize=False, grad_scale=None, found_inf=None)
    torch._fused_adamw_([main], [grads], [exp_avg], [exp_avg_sq], [], [step], **settings)
    params.copy_(main)
    return main, params, exp_avg, exp_avg_sq


def ours_adamw(main, params, grads, exp_avg, exp_avg_sq, step):
    """One segment; scale and skip are read from the device."""
    state = FlatState(main, params, grads, exp_avg, exp_avg_sq)
    segments = Segments.from_ranges([(0, len(main), DECAY)], main.device)
    values = torch.tensor([LR, LR, WEIGHT_DECAY], device=main.device)
    given = step, values, torch.ones_like(step), torch.zeros_like(step)

    def run():
        adamw_flat_(state, segments, given, HYPER)
        return main, params, exp_avg, exp_avg_sq

    return run


def permutes(s: Sizes) -> Iterator[Case]:
    """x `[t, h]`, k copies: 2 h t (k + 1); backward k more, which the probabilities' gradients read."""
    t, h, k = s.tokens, s.hidden, s.topk
    routing = routed(s)
    source, position = routing.source.long(), routing.position.long()
    token = source // k
    x, z, probs = s.normal(t, h), s.normal(t * k, h), lambda: torch.rand(t, k, device=s.device)

    def ours(z, probs):
        return unpermute(z, routing, probs)

    def added(z, probs):  # rows times their probabilities, added to their tokens
        rows = (z * probs.flatten()[source, None]).to(z.dtype)
        return z.new_zeros(len(probs), z.shape[1]).index_add_(0, token, rows)

    def gathered(z, probs):  # the same with no atomics
        return (z[position] * probs[:, :, None]).sum(dim=1).to(z.dtype)

    ways = forms(forward(lambda x: permute(x, routing)), lambda x: x.index_select(0, token))
    yield case("moe permute", 2 * h * t * (k + 1), (x,), ways)
    ways = forms(forward(ours), added, gathered)
    yield case("moe unpermute", 2 * h * t * (k + 1), (z, probs), ways)
    ways = forms(backward(ours, (2, 1)), added, grads=(2, 1))
    yield case("moe unpermute bwd with probs", 2 * h * t * (2 * k + 1), (z, probs, x), ways)


def routed(s: Sizes) -> Routing:
    """Each token to `topk` different experts, at random; no padding."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.rand(s.tokens, s.experts, generator=generator).topk(s.topk).indices.int()
    made = vars(route_ref(ids, s.experts, 1, ids.numel()))
    return Routing(**{name: table.to(s.device) for name, table in made.items()})


def embeddings(s: Sizes) -> Iterator[Case]:
    """GPT-2's 124M, `words` ids: of a text, whose frequencies fall as 1 / rank, with learned positions.

    Bytes: a row a token, and each row of a table that is looked up once; backward the gradient once, and each
    of these rows in fp32, read and written.
    """
    (b, length), h, rows = s.words, s.words_hidden, s.words_vocab
    weights = 1 / torch.arange(1.0, rows + 1)
    ids = weights.multinomial(b * length, replacement=True, generator=torch.Generator().manual_seed(3))
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(4))[ids].view(b, length).to(s.device)
    places, distinct = torch.arange(length, device=s.device), len(ids.unique()) + length
    tables, grad = (s.normal(rows, h), s.normal(length, h)), s.normal(length, b, h)

    def ours(table, positions):
        return lookup(ids, table, 0, 1.0, positions, places)

    def plain(table, positions):
        return table[ids.t()] + F.embedding(places[:, None], positions)

    yield case("embedding fwd", 2 * h * (b * length + distinct), tables, forms(forward(ours), plain))

    def added(words, others, grad):
        add_word_grad_(words, ids, grad)
        add_position_grad_(others, places, grad)
        return words, others

    def put(words, others, grad):
        words.index_put_((ids.t().flatten(),), wide(grad).flatten(0, 1), accumulate=True)
        others.add_(wide(grad.sum(1)))
        return words, others

    wides = (s.normal(rows, h, dtype=torch.float32), s.normal(length, h, dtype=torch.float32))
    moved = 2 * h * b * length + 8 * h * distinct
    yield case("embedding bwd", moved, (*wides, grad), forms(forward(added), put))

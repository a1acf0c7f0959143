"""Cases of the MLP and of the mixture of experts: SwiGLU, permute and unpermute."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.kernels_common import Case, Sizes, backward, case, compiled, exact, forward
from nanomegatron.ops.permute import Routing, permute, route_ref, unpermute
from nanomegatron.ops.swiglu import swiglu


def gated(x):
    """silu(gate) * up"""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglus(sizes: Sizes) -> Iterator[Case]:
    """x `[tokens, 2 ffn]`: 6 bytes a value of the result, backward 10."""
    s, f = sizes.tokens, sizes.ffn

    def inputs():
        return (sizes.normal(s, 2 * f),)

    def with_grad():  # a small one: Liger's gradients are the inputs of its next backward
        return sizes.normal(s, 2 * f), 0.1 * sizes.normal(s, f)

    ways = {
        "kernel": forward(swiglu),
        "torch": forward(gated),
        "compile": forward(compiled(gated)),
        "liger": liger_swiglu,
    }
    yield case("swiglu fwd", 6 * s * f, inputs, ways, exact(ways["torch"]))
    ways = {
        "kernel": backward(swiglu, 1, 1),
        "torch": backward(gated, 1, 1),
        "compile": backward(compiled(gated), 1, 1),
        "liger": liger_swiglu_backward,
    }
    yield case("swiglu bwd", 10 * s * f, with_grad, ways, exact(ways["torch"]), liger=together)


def together(a, b):
    """Gate and up in one."""
    return (torch.cat((a, b), dim=-1),)


def liger_swiglu(x):
    """Of gate and up that lie apart."""
    from liger_kernel.ops.swiglu import swiglu_forward

    a, b = (part.contiguous() for part in x.chunk(2, dim=-1))
    return lambda: swiglu_forward(a, b)[2:]


def liger_swiglu_backward(x, grad):
    """Its gradients are written over gate and up; that they lie apart is not counted against it."""
    from liger_kernel.ops.swiglu import swiglu_backward

    a, b = (part.contiguous() for part in x.chunk(2, dim=-1))
    return lambda: swiglu_backward(a, b, grad)


def taken(x, token):
    """Rows in the order of experts."""
    return x.index_select(0, token)


def taken_times(x, probs, token, source):
    """The same, each times its probability."""
    return (x.index_select(0, token) * probs.flatten()[source, None]).to(x.dtype)


def added(z, probs, token, source):
    """Rows times their probabilities, added to their tokens."""
    rows = (z * probs.flatten()[source, None]).to(z.dtype)
    return z.new_zeros(len(probs), z.shape[1]).index_add_(0, token, rows)


def gathered(z, probs, position):
    """The same with no atomics, where it is compiled in one pass."""
    return (z[position] * probs[:, :, None]).sum(dim=1).to(z.dtype)


def gathered_backward(x, probs, grad, position):
    """The backward of `taken_times` so."""
    rows = grad[position].float()
    return (rows * probs[:, :, None]).sum(dim=1).to(x.dtype), (rows * x[:, None]).sum(dim=-1)


def routed(sizes: Sizes) -> Routing:
    """Each token to `topk` different experts, at random; no padding."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.rand(sizes.tokens, sizes.experts, generator=generator).topk(sizes.topk).indices.int()
    made = vars(route_ref(ids, sizes.experts, 1, ids.numel()))
    return Routing(**{name: table.to(sizes.device) for name, table in made.items()})


def permutes(sizes: Sizes) -> Iterator[Case]:
    """x `[t, h]`, k copies: 2 h t (k + 1); with what the probabilities' gradients read besides, backward."""
    t, h, k = sizes.tokens, sizes.hidden, sizes.topk
    routing = routed(sizes)
    source, position = routing.source.long(), routing.position.long()
    token = source // k

    def x():
        return sizes.normal(t, h)

    def z():
        return sizes.normal(t * k, h)

    def probs():
        return torch.rand(t, k, device=sizes.device)

    ways = {
        "kernel": forward(permute, routing),
        "torch": forward(taken, token),
        "compile": forward(compiled(taken), token),
    }
    yield case("moe permute", 2 * h * t * (k + 1), lambda: (x(),), ways, exact(ways["torch"]))

    def ours(z, probs):
        return unpermute(z, routing, probs)

    ways = {
        "kernel": forward(ours),
        "torch": forward(added, token, source),
        "compile": forward(compiled(gathered), position),
    }
    yield case("moe unpermute", 2 * h * t * (k + 1), lambda: (z(), probs()), ways, exact(ways["torch"]))

    def ours_times(x, probs):
        return permute(x, routing, probs)

    ways = {
        "kernel": backward(ours_times, 2, 1),
        "torch": backward(taken_times, 2, 1, token, source),
        "compile": forward(compiled(gathered_backward), position),
    }
    floor = 2 * h * t * (k + 2)
    inputs = lambda: (x(), probs(), z())  # noqa: E731
    yield case("moe permute bwd with probs", floor, inputs, ways, exact(ways["torch"]))
    ways = {
        "kernel": backward(ours, 2, 1),
        "torch": backward(added, 2, 1, token, source),
        "compile": backward(compiled(added), 2, 1, token, source),
    }
    floor = 2 * h * t * (2 * k + 1)
    inputs = lambda: (z(), probs(), x())  # noqa: E731
    yield case("moe unpermute bwd with probs", floor, inputs, ways, exact(ways["torch"]))

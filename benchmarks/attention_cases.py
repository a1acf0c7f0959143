"""Cases of attention's parts: softmax of scores, and RoPE.

Liger's softmax knows no mask and no scale, so it is no peer. Megatron's fused ones need its compiled
extension; "megatron" is the unfused path that it takes without.
"""

import functools
import math
from collections.abc import Iterator

import torch

from benchmarks.forms import Sizes, backward, case, forms, forward, liger, passes, wide
from benchmarks.session import Case
from nanomegatron.ops.rope import rope_packed, rope_ref
from nanomegatron.ops.softmax import scaled_softmax


def softmaxes(s: Sizes) -> Iterator[Case]:
    """Bytes a score: forward 4, backward 6; causal, what is hidden is only written: about 3 and 4.

    A mask costs a byte a score of one head, in the forward: the backward could see it by the zeros.
    """
    for (heads, n), kind in (*((size, "causal") for size in s.scores), (s.scores[0], "mask")):
        causal, scale, scores = kind == "causal", s.head**-0.5, heads * n * n
        seen = heads * n * (n + 1) // 2 if causal else scores
        inputs = s.normal(1, heads, n, n, scale=8.0), functools.partial(hidden_of, n, causal, s.device)

        def ours(x, hidden, scale=scale, causal=causal):
            return scaled_softmax(x, scale, None if causal else hidden, causal=causal)[0]

        def masked(x, hidden, scale=scale):
            return (wide(x) * scale).masked_fill(hidden, -math.inf).softmax(dim=-1).to(x.dtype)

        def by_place(x, hidden, masked=masked):  # the mask follows from the place: none is read, compiled
            places = torch.arange(x.shape[-1], device=x.device)
            return masked(x, places > places[:, None])

        def megatron(x, hidden, scale=scale):
            return (x.float() * scale).masked_fill(hidden, -10000.0).softmax(dim=-1).to(x.dtype)

        moved = 2 * seen + 2 * scores + (0 if causal else n * n), 4 * seen + 2 * scores
        functions, grads = (ours, masked, by_place if causal else masked), (s.normal(1, heads, n, n),)
        peer = forward(megatron), backward(megatron, (1, 1))
        yield from passes(f"softmax {n} {kind}", moved, inputs, grads, 1, functions, megatron=peer)


def hidden_of(n: int, causal: bool, device: str) -> torch.Tensor:
    """A mask of what is hidden, `[1, 1, n, n]`: the later, or three in ten at random."""
    if causal:
        return torch.ones(n, n, dtype=torch.bool, device=device).triu(1)[None, None]
    return (torch.rand(n, n, device=device) < 0.3).fill_diagonal_(False)[None, None]


def ropes(s: Sizes) -> Iterator[Case]:
    """packed `[s, 1, (n + 2g) d]`: 4 bytes a value of q and k; backward also of v, which is packed with them.

    The tables of cos and sin, 4 d bytes a token, are not counted. Ours rotates the same memory at every call;
    Liger's q and k are separate tensors: of a packed projection it would first copy them.
    """
    n, g, d = s.heads, s.groups, s.head
    widths = [n * d, g * d, g * d]
    angles = torch.arange(s.tokens)[:, None] / 500000.0 ** (torch.arange(0, d, 2) / d)
    tables = (lambda t=t: t.to(s.device)[:, None, None] for t in (angles.cos(), angles.sin()))
    inputs = s.normal(s.tokens, 1, sum(widths)), *tables

    def rotated(packed, cos, sin):
        q, k, v = (part.unflatten(-1, (-1, d)) for part in packed.split(widths, dim=-1))
        return rope_ref(q, cos, sin), rope_ref(k, cos, sin), v

    def ours(packed, *args):  # in place, so not of a leaf
        return rope_packed(packed.view_as(packed), widths, d, *args)

    def liger_forward(packed, cos, sin):
        parts = (x.unflatten(-1, (-1, d)).transpose(0, 1) for x in packed.split(widths, dim=-1)[:2])
        q, k = (x.contiguous().transpose(1, 2) for x in parts)
        given = q, k, *liger_tables(cos, sin)
        return lambda: tuple(x.permute(2, 0, 1, 3) for x in liger("rope_forward")(*given)[:2])

    def liger_backward(packed, cos, sin, dq, dk, dv):
        """In place, then packed as autograd would pack it."""
        grads = [x.transpose(0, 1).contiguous().transpose(1, 2) for x in (dq, dk)]
        given = *grads, *liger_tables(cos, sin)

        def run():
            parts = (x.permute(2, 0, 1, 3).flatten(2) for x in liger("rope_backward")(*given)[:2])
            return torch.cat((*parts, dv.flatten(2)), dim=-1)

        return run

    turned = lambda function: lambda *args: function(*args)[:2]  # noqa: E731
    ways = forms(forward(turned(ours)), turned(rotated), liger=liger_forward)
    yield case("rope fwd", 4 * s.tokens * (n + g) * d, inputs, ways)
    ways = forms(backward(ours, (1, 3)), rotated, grads=(1, 3), liger=liger_backward)
    inputs = *inputs, *(s.normal(s.tokens, 1, heads, d) for heads in (n, g, g))
    yield case("rope bwd", 4 * s.tokens * (n + 2 * g) * d, inputs, ways)


def liger_tables(cos, sin):
    """`[1, s, d]`, fp32 as ours."""
    return [torch.cat((t, t), dim=-1)[:, 0].transpose(0, 1).contiguous() for t in (cos, sin)]

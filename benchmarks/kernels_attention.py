"""Cases of attention's parts: softmax of scores, and RoPE.

Liger's softmax knows no mask and no scale, so it is no peer. Megatron's fused ones need its compiled
extension; "megatron" is the unfused path that it takes without: to fp32, times the scale, masked_fill of
-10000, softmax, back to bf16.
"""

import math
from collections.abc import Iterator

import torch

from benchmarks.kernels_common import Case, Sizes, backward, case, compiled, exact, forward
from nanomegatron.ops.rope import rope_packed, rope_ref
from nanomegatron.ops.softmax import scaled_softmax


def masked(scores, hidden, scale):
    """With a mask that is there."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    return (scores.to(wide) * scale).masked_fill(hidden, float("-inf")).softmax(dim=-1).to(scores.dtype)


def causal(scores, hidden, scale):
    """With a mask that follows from the place: nothing of it need be read, where this is compiled."""
    places = torch.arange(scores.shape[-1], device=scores.device)
    return masked(scores, places > places[:, None], scale)


def megatron(scores, hidden, scale):
    """Megatron-LM's unfused path."""
    return (scores.float() * scale).masked_fill(hidden, -10000.0).softmax(dim=-1).to(scores.dtype)


def ours(scores, hidden, scale):
    """The kernel, with an arbitrary mask."""
    return scaled_softmax(scores, scale, hidden)[0]


def ours_causal(scores, hidden, scale):
    """The kernel, which sees from the place what is hidden."""
    return scaled_softmax(scores, scale, causal=True)[0]


def softmaxes(sizes: Sizes) -> Iterator[Case]:
    """Bytes a score: forward 4, backward 6; causal, what is hidden is only written: about 3 and 4.

    A mask costs a byte a score of one head, in the forward: the backward could tell it by the zeros.
    """
    for (heads, s), kind in (*((size, "causal") for size in sizes.scores), (sizes.scores[0], "mask")):
        scale, scores = 1 / math.sqrt(sizes.head), heads * s * s
        seen = heads * s * (s + 1) // 2 if kind == "causal" else scores
        mask = s * s if kind == "mask" else 0

        def inputs(heads=heads, s=s, kind=kind, grads=0):
            hidden = torch.ones(s, s, dtype=torch.bool, device=sizes.device).triu(1)
            if kind == "mask":
                hidden = torch.rand(s, s, device=sizes.device) < 0.3
                hidden.fill_diagonal_(False)
            grad = [sizes.normal(1, heads, s, s) for _ in range(grads)]
            return 8 * sizes.normal(1, heads, s, s), hidden[None, None], *grad

        functions = {
            "kernel": ours_causal if kind == "causal" else ours,
            "torch": masked,
            "compile": compiled(causal if kind == "causal" else masked),
            "megatron": megatron,
        }
        ways = {name: forward(function, scale) for name, function in functions.items()}
        floor = 2 * seen + 2 * scores + mask
        yield case(f"softmax fwd {s} {kind}", floor, inputs, ways, exact(ways["torch"]))
        ways = {name: backward(function, 1, 1, scale) for name, function in functions.items()}

        def with_grad(inputs=inputs):
            return inputs(grads=1)

        floor = 4 * seen + 2 * scores
        yield case(f"softmax bwd {s} {kind}", floor, with_grad, ways, exact(ways["torch"]))


def turned(packed, cos, sin, widths, d):
    """Queries and keys, turned, in memory of their own, and values."""
    q, k, v = (part.unflatten(-1, (-1, d)) for part in packed.split(widths, dim=-1))
    return rope_ref(q, cos, sin), rope_ref(k, cos, sin), v


def turned_alone(*args):
    """Queries and keys, turned."""
    return turned(*args)[:2]


def ropes(sizes: Sizes) -> Iterator[Case]:
    """packed `[s, 1, (n + 2g) d]`: 4 bytes a value of q and k; backward also of v, which is packed with them.

    The tables of cos and sin, 4 d bytes a token, are not counted.
    """
    s, n, g, d = sizes.tokens, sizes.heads, sizes.groups, sizes.head
    widths = [n * d, g * d, g * d]

    def inputs():
        angles = torch.arange(s)[:, None] / 500000.0 ** (torch.arange(0, d, 2) / d)
        tables = (t.float().to(sizes.device)[:, None, None] for t in (angles.cos(), angles.sin()))
        return sizes.normal(s, 1, sum(widths)), *tables

    def with_grads():
        return *inputs(), *(sizes.normal(s, 1, heads, d) for heads in (n, g, g))

    def ours(packed, cos, sin):  # turns the same memory on at every call
        return lambda: rope_packed(packed, widths, d, cos, sin)[:2]

    ways = {
        "kernel": ours,
        "torch": forward(turned_alone, widths, d),
        "compile": forward(compiled(turned_alone), widths, d),
        "liger": liger_rope(widths, d),
    }
    expected = exact(ways["torch"])
    yield case("rope fwd", 4 * s * (n + g) * d, inputs, ways, expected, liger=liger_layout)

    def ours_packed(packed, *args):  # in place, so not of a leaf
        return rope_packed(packed.view_as(packed), widths, d, *args)

    ways = {
        "kernel": backward(ours_packed, 1, 3),
        "torch": backward(turned, 1, 3, widths, d),
        "compile": backward(compiled(turned), 1, 3, widths, d),
        "liger": liger_rope_backward,
    }
    yield case("rope bwd", 4 * s * (n + 2 * g) * d, with_grads, ways, exact(ways["torch"]))


def liger_layout(q, k):
    """`[b, n, s, d]` -> `[s, b, n, d]`"""
    return tuple(x.permute(2, 0, 1, 3) for x in (q, k))


def liger_tables(cos, sin):
    """`[1, s, d]`, fp32 as ours."""
    return tuple(torch.cat((t, t), dim=-1)[:, 0].transpose(0, 1).contiguous() for t in (cos, sin))


def liger_rope(widths, d):
    """In place, of q and k that lie apart: of a packed projection it would first copy them."""

    def way(packed, cos, sin):
        from liger_kernel.ops.rope import rope_forward

        parts = (x.unflatten(-1, (-1, d)).transpose(0, 1) for x in packed.split(widths, dim=-1)[:2])
        q, k = (x.contiguous().transpose(1, 2) for x in parts)
        tables = liger_tables(cos, sin)
        return lambda: rope_forward(q, k, *tables)[:2]

    return way


def liger_rope_backward(packed, cos, sin, dq, dk, dv):
    """In place, then packed as autograd would pack it."""
    from liger_kernel.ops.rope import rope_backward

    grads = [x.transpose(0, 1).contiguous().transpose(1, 2) for x in (dq, dk)]
    tables, dv = liger_tables(cos, sin), dv.flatten(2)

    def run():
        turned = (x.permute(2, 0, 1, 3).flatten(2) for x in rope_backward(*grads, *tables)[:2])
        return (torch.cat((*turned, dv), dim=-1),)

    return run

"""Cases of casts to E4M3, of activations in bf16: their expected results are bits, so the error must be 0."""

from collections.abc import Iterator

import torch

from benchmarks.kernels_common import Case, Sizes, case, compiled, forward
from nanomegatron.ops.fp8_cast import fp8_amax, fp8_cast, fp8_cast_blocks, fp8_cast_blocks_ref, fp8_cast_ref

E4M3, LARGEST, BLOCK = torch.float8_e4m3fn, 448.0, 128


def amaxed(x):
    """The largest |x|."""
    return x.abs().amax().float()


def cast(x, scale):
    """Row-major, and the amax."""
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(E4M3), amaxed(x)


def cast_both(x, scale):
    """Row-major, transposed, and the amax."""
    q, amax = cast(x, scale)
    return q, q.t().contiguous(), amax


def blocks(x, high):
    """Of blocks high x 128, each with the scale of its own amax: values, and inverses of the scales."""
    m, k = x.shape
    parts = x.view(m // high, high, k // BLOCK, BLOCK)
    amax = parts.abs().amax(dim=(1, 3), keepdim=True).float()
    scale = torch.full_like(amax, LARGEST) / amax  # a number over a tensor is rounded twice
    q = (parts.float() * scale).clamp(-LARGEST, LARGEST).to(E4M3).view(m, k)
    return q, (1.0 / scale)[:, 0, :, 0]


def lines_both(x):
    """1 x 128 along the rows, and along the columns, transposed."""
    return *blocks(x, 1), *blocks(x.t().contiguous(), 1)


def squares_both(x):
    """128 x 128, which the transposed copy shares."""
    q, inverse = blocks(x, BLOCK)
    return q, inverse, q.t().contiguous(), inverse.t()


def three(ours, theirs, *more) -> dict:
    """Ways: ours, torch's and the same compiled."""
    return {
        "kernel": ours,
        "torch": forward(theirs, *more),
        "compile": forward(compiled(theirs), *more),
    }


def casts(sizes: Sizes) -> Iterator[Case]:
    """Bytes a value: amax 2, cast 3, with the transposed copy 4; block scales 4 / 128 more a copy."""

    def amax_of(x):
        amax = torch.zeros(1, device=x.device)

        def run():
            fp8_amax(x, amax)
            return (amax[0],)

        return run

    for k in (sizes.hidden, sizes.ffn):
        values = sizes.tokens * k

        def x(k=k):
            return sizes.normal(sizes.tokens, k)

        yield case(f"fp8 amax {k}", 2 * values, lambda x=x: (x(),), three(amax_of, amaxed), exact_amax)

        def with_scale(x=x):  # the largest are cut off
            return x(), torch.full((1,), 100.0, device=sizes.device)

        ways = three(ours_cast("rowwise"), cast)
        yield case(f"fp8 cast {k}", 3 * values, with_scale, ways, lambda *x: exact_cast(*x)[::2])
        ways = three(ours_cast("both"), cast_both)
        yield case(f"fp8 cast+transpose {k}", 4 * values, with_scale, ways, exact_cast)
    yield from block_casts(sizes)


def block_casts(sizes: Sizes) -> Iterator[Case]:
    """Scales a block."""
    values, lines = sizes.tokens * sizes.hidden, sizes.tokens * sizes.hidden // BLOCK

    def inputs():
        return (sizes.normal(sizes.tokens, sizes.hidden),)

    ways = three(ours_blocks(False, "rowwise"), blocks, 1)
    floor = 3 * values + 4 * lines
    yield case("fp8 blocks 1x128", floor, inputs, ways, lambda x: fp8_cast_blocks_ref(x, E4M3, False))
    ways = three(ours_blocks(False, "both"), lines_both)
    yield case("fp8 blocks 1x128 both", 4 * values + 8 * lines, inputs, ways, exact_blocks(False))
    ways = three(ours_blocks(True, "both"), squares_both)
    yield case("fp8 blocks 128x128 both", 4 * values, inputs, ways, exact_blocks(True))


def exact_amax(x):
    """One of the values."""
    return (x.double().abs().amax(),)


def exact_cast(x, scale):
    """The reference, which rounds once."""
    q = fp8_cast_ref(x, scale, E4M3)
    return q, q.t(), *exact_amax(x)


def exact_blocks(squares):
    """The reference, of x and of its transpose."""
    return lambda x: (
        *fp8_cast_blocks_ref(x, E4M3, squares),
        *fp8_cast_blocks_ref(x.t(), E4M3, squares),
    )


def ours_cast(outputs):
    """By one kernel, the amax too."""

    def way(x, scale):
        amax = torch.zeros(1, device=x.device)

        def run():
            results = fp8_cast(x, scale, E4M3, amax, outputs)
            return *(q for q in results if q is not None), amax[0]

        return run

    return way


def ours_blocks(squares, outputs):
    """By one kernel."""

    def way(x):
        def run():
            pairs = fp8_cast_blocks(x, E4M3, squares, outputs)
            return tuple(t for pair in pairs if pair is not None for t in pair)

        return run

    return way

"""Cases of the optimizer, flat: AdamW, and the norm of the gradients."""

from collections.abc import Iterator

import torch

from benchmarks.kernels_common import Case, Sizes, case, compiled, forward
from nanomegatron.ops.adamw import DECAY, FlatState, Segments, adamw_flat_, sums_of_squares

HYPER, LR, WEIGHT_DECAY, STEP = (0.9, 0.95, 1e-8), 1e-4, 0.1, 10.0


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
    told = dict(lr=LR, beta1=beta1, beta2=beta2, weight_decay=WEIGHT_DECAY, eps=eps)
    told |= dict(amsgrad=False, maximize=False, grad_scale=None, found_inf=None)
    torch._fused_adamw_([main], [grads], [exp_avg], [exp_avg_sq], [], [step], **told)
    params.copy_(main)
    return main, params, exp_avg, exp_avg_sq


def ours(main, params, grads, exp_avg, exp_avg_sq, step):
    """One segment; scale and skip are read from the device."""
    state = FlatState(main, params, grads, exp_avg, exp_avg_sq)
    segments = Segments.of([(0, len(main), DECAY)], main.device)
    values = torch.tensor([LR, LR, WEIGHT_DECAY], device=main.device)
    told = step, values, torch.ones_like(step), torch.zeros_like(step)

    def run():
        adamw_flat_(state, segments, told, HYPER)
        return main, params, exp_avg, exp_avg_sq

    return run


def adamws(sizes: Sizes) -> Iterator[Case]:
    """30 bytes an element: 16 read, 14 written, gradients and moments in fp32. The norm: 4."""
    n = sizes.elements

    def inputs():
        main, grads, exp_avg, exp_avg_sq = (sizes.normal(n, dtype=torch.float32) for _ in range(4))
        step = torch.full((), STEP, device=sizes.device)
        return main, main.bfloat16(), grads, exp_avg, exp_avg_sq.square_(), step

    def expected(*state):  # a part at a time, or float64 needs more memory than all the rest
        flat = [x.split(2**20) for x in state[:-1]]
        pieces = (stepped(*(x.double() for x in piece), state[-1].double()) for piece in zip(*flat))
        return tuple(torch.cat(column) for column in zip(*pieces))

    ways = {"kernel": ours, "torch": forward(fused), "compile": forward(compiled(stepped))}
    yield case("adamw", 30 * n, inputs, ways, expected)

    def squares(grads):
        segments = Segments.of([(0, n, 0)], grads.device)
        return lambda: sums_of_squares(grads, segments)

    def root(sums, zeros):
        return (sums.sum().sqrt(),)

    ways = {
        "kernel": squares,
        "torch": forward(torch.linalg.vector_norm),
        "compile": forward(compiled(norm)),
    }
    gradients = lambda: (sizes.normal(n, dtype=torch.float32),)  # noqa: E731
    yield case("gradient norm", 4 * n, gradients, ways, exact_norm, kernel=root)


def norm(x):
    """As a user has it."""
    return torch.linalg.vector_norm(x)


def exact_norm(x):
    """In float64, a piece at a time."""
    return (torch.stack([torch.linalg.vector_norm(piece.double()) for piece in x.split(2**24)]).norm(),)

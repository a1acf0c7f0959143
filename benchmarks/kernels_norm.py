"""Cases of the norms. x `[tokens, hidden]`; weights below 1, so that gradients in place never grow."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.kernels_common import Case, Sizes, backward, case, compiled, exact, forward
from nanomegatron.ops.norm import add_norm, norm

EPS = 1e-5


def rms(x, w):
    """RMSNorm, torch's own kernel."""
    return F.rms_norm(x, w.shape, w, EPS)


def layer(x, w, b):
    """LayerNorm, torch's own kernel."""
    return F.layer_norm(x, w.shape, w, b, EPS)


def add_rms(x, w, residual):
    """RMSNorm of a sum, and the sum."""
    total = x + residual
    return rms(total, w), total


OURS = {
    rms: lambda x, w: norm(x, w, None, EPS),
    layer: lambda x, w, b: norm(x, w, b, EPS),
    add_rms: lambda x, w, residual: add_norm(x, residual, w, None, EPS),
}


def norms(sizes: Sizes) -> Iterator[Case]:
    """Forward 4 bytes a value, 8 with the add; backward 6 and 8."""
    values = sizes.tokens * sizes.hidden

    def row() -> torch.Tensor:
        return sizes.normal(sizes.tokens, sizes.hidden)

    def weight() -> torch.Tensor:
        return torch.rand(sizes.hidden, device=sizes.device).mul(0.4).add(0.5).bfloat16()

    for name, function, wanted, inputs in (
        ("rms norm", rms, 2, lambda: (row(), weight())),
        ("layer norm", layer, 3, lambda: (row(), weight(), sizes.normal(sizes.hidden))),
        ("add+rms norm", add_rms, 2, lambda: (row(), weight(), row())),
    ):
        count = 2 if function is add_rms else 1  # tensors added and written, and gradients that come
        ways = {
            "kernel": forward(OURS[function]),
            "torch": forward(function),
            "compile": forward(compiled(function)),
            "liger": LIGER[function][0],
        }
        yield case(f"{name} fwd", 4 * count * values, inputs, ways, exact(ways["torch"]))
        ways = {
            "kernel": backward(OURS[function], wanted, count),
            "torch": backward(function, wanted, count),
            "compile": backward(compiled(function), wanted, count),
            "liger": LIGER[function][1],
        }
        floor = (4 + 2 * count) * values
        yield case(f"{name} bwd", floor, both(inputs, row, count), ways, exact(ways["torch"]))


def both(inputs, row, count):
    """Inputs and gradients."""
    return lambda: (*inputs(), *(row() for _ in range(count)))


def liger_rms(x, w):
    """With Llama's casts, as by default."""
    from liger_kernel.ops.rms_norm import rms_norm_forward

    return lambda: rms_norm_forward(x, w, EPS, 0.0, "llama", None)[:1]


def liger_rms_backward(x, w, grad):
    """In place, as by default: dx over grad. Else it fills dx with zeros first."""
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward

    _, x, rstd, block, warps, mode = rms_norm_forward(x, w, EPS, 0.0, "llama", None)
    return lambda: rms_norm_backward(grad, x, w, rstd, 0.0, mode, block, warps, True, None)


def liger_layer(x, w, b):
    """Out of place."""
    from liger_kernel.ops.layer_norm import layer_norm_forward

    return lambda: layer_norm_forward(x, w, b, EPS)[:1]


def liger_layer_backward(x, w, b, grad):
    """Out of place."""
    from liger_kernel.ops.layer_norm import layer_norm_backward, layer_norm_forward

    _, x, mean, rstd, *_ = layer_norm_forward(x, w, b, EPS)
    return lambda: layer_norm_backward(grad, x, w, b, mean, rstd)


def liger_add(x, w, residual):
    """Norm and sum."""
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

    return lambda: fused_add_rms_norm_forward(x, residual, w, EPS, 0.0, "llama")[:2]


def liger_add_backward(x, w, residual, grad, grad_total):
    """Out of place, as by default."""
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_backward, fused_add_rms_norm_forward

    _, total, rstd, block, warps, stages, mode = fused_add_rms_norm_forward(x, residual, w, EPS, 0.0, "llama")
    sizes = 0.0, mode, block, warps, stages, False
    return lambda: fused_add_rms_norm_backward(grad, grad_total, total, w, rstd, *sizes)[::2]


LIGER = {
    rms: (liger_rms, liger_rms_backward),
    layer: (liger_layer, liger_layer_backward),
    add_rms: (liger_add, liger_add_backward),
}

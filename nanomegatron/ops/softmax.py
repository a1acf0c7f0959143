"""Softmax of attention scores, scaled and masked: the kernel of cuda/softmax.cu, and its reference.

The causal mask and the window are computed from positions, without an s x t mask in memory; `hidden` is an
additional mask. The probabilities and `hidden` are saved for the backward.
"""

import torch

from nanomegatron.ops.kernels import TYPES, launch_kernel, once, usable


def scaled_softmax(
    scores: torch.Tensor,
    scale: float,
    hidden: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scores * scale) over the keys that a query sees, computed in fp32, and its log-sum-exp.

    scores `[b, n, s, t]`, hidden bool `[b, n, s, t]` or `[...]` -> `[b, n, s, t]`, fp32 `[b, n, s]`

    Query i has position i + t - s. It sees no key after its position if `causal`, none more than `window`
    before it, and none where `hidden` is True (bool, broadcast to the scores). A query that sees no key gives
    NaN and the log-sum-exp -inf; the gradient of a hidden score is zero. The probabilities have the dtype of
    the scores; the log-sum-exp has no gradient. inplace: scores may be overwritten, unless they are a view or
    a leaf that requires grad.

    Raises ValueError if the shapes or types do not fit.
    """
    if scores.dim() != 4:
        raise ValueError(f"scores are [b, n, s, t], not {list(scores.shape)}")
    if window is not None and window < 0:
        raise ValueError(f"a window of {window} keys")
    if hidden is not None:
        sizes = zip(hidden.shape, scores.shape)
        if (
            hidden.dim() != 4
            or hidden.dtype != torch.bool
            or hidden.device != scores.device
            or any(size not in (1, full) for size, full in sizes)
        ):
            raise ValueError(
                f"hidden {hidden.dtype} {list(hidden.shape)} on {hidden.device} for scores "
                f"{list(scores.shape)} on {scores.device}: must be bool, and broadcast to the scores"
            )
        hidden = hidden.expand(scores.shape)
    if not usable(scores, "scaled_softmax"):
        return scaled_softmax_ref(scores, scale, hidden, causal, window)
    own = not (scores._is_view() or (scores.is_leaf and scores.requires_grad))  # else autograd forbids it
    return SoftmaxFunction.apply(scores, scale, hidden, causal, window, inplace and own)


def scaled_softmax_ref(
    scores: torch.Tensor, scale: float, hidden: torch.Tensor | None, causal: bool, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scaled_softmax` in plain torch. scores, hidden `[b, n, s, t]` -> `[b, n, s, t]`, lse `[b, n, s]`"""
    s, t = scores.shape[-2:]
    place = torch.arange(t - s, t, device=scores.device)[:, None]
    key = torch.arange(t, device=scores.device)
    unseen = [hidden] if hidden is not None else []
    unseen += [key > place] if causal else []
    unseen += [key < place - window] if window is not None else []
    scores32 = (scores if scores.dtype == torch.float64 else scores.float()) * scale
    for where in unseen:
        scores32 = scores32.masked_fill(where, float("-inf"))
    return scores32.softmax(dim=-1).type_as(scores), scores32.detach().logsumexp(dim=-1)


class SoftmaxFunction(torch.autograd.Function):
    """`scaled_softmax` by the kernel. scores `[b, n, s, t]`"""

    @staticmethod
    def forward(
        ctx, scores: torch.Tensor, scale: float, hidden, causal: bool, window, inplace: bool
    ) -> tuple:
        ctx.args = scale, causal, window
        x = scores.contiguous()
        out = x if inplace else torch.empty_like(x)
        lse = x.new_empty(x.shape[:-1], dtype=torch.float32)
        sees = _sees(x, scale, hidden, causal, window)
        launch_kernel("softmax_forward", out, lse, x, *sees, TYPES[x.dtype])
        if not x.shape[-1]:
            lse.fill_(-torch.inf)  # an empty row has nothing to launch for
        if out is scores:
            ctx.mark_dirty(scores)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(out, hidden)
        return out, lse

    @staticmethod
    @once
    def backward(ctx, grad: torch.Tensor, _) -> tuple:
        out, hidden = ctx.saved_tensors
        dx = torch.empty_like(out)  # grad may be used elsewhere too, so it is not overwritten
        sees = _sees(out, ctx.args[0], hidden, *ctx.args[1:])
        launch_kernel("softmax_backward", dx, grad.contiguous(), out, *sees, TYPES[out.dtype])
        return dx, None, None, None, None, None


def _sees(x: torch.Tensor, scale: float, hidden: torch.Tensor | None, causal: bool, window) -> tuple:
    """The kernel's arguments: scale, shape, masks; of `hidden` address and strides, 0 if broadcast."""
    if hidden is not None and hidden.stride(-1) != 1:
        hidden = hidden.contiguous()
    mask = (None, 0, 0, 0) if hidden is None else (hidden, *hidden.stride()[:3])
    return (scale, *x.shape, int(causal), -1 if window is None else window, *mask)

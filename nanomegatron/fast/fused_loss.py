"""Same result as `tp.vocab_parallel_cross_entropy` of the logits: projection, loss and gradients by chunks.

The plain form writes all logits, and its backward a gradient of the same size.
Here (`--cross-entropy-loss-fusion`) both are computed for one chunk of tokens at a time, and communication
overlaps with the matmuls of the next chunk:

    time ->        chunk 1                                            chunk 2
    matmuls        [ x W^T ]            [ dx = d W ][ dW += d^T x ]   [ x W^T ] ...
    vocabulary              [loss][ d ]
    collectives           [stats]                   [ reduce dx                ]

    peak in bf16, bytes     unfused                                fused
    logits, then gradient   2 s b V/tp                             2 chunk V/tp
    a chunk in fp32         8 chunk V/tp                           8 chunk V/tp     (torch; kernels need none)
    8,192 tokens, V 128,256, tp 1, chunk 2,048:  4.2 GB            2.6 GB

Kernels that keep the fp32 in registers need only the logits: 2.1 GB against 0.5 GB.

Gain: memory, at the same speed. 16 layers of Llama-3-8B on 4 H200, tp 4: 23.6 GiB in 237.6 ms a step against
24.0 GiB in 235.6 ms (benchmarks/results/2026-11-21-parallel-tp4-kernels.json).
(Fused with the projection: Liger, arXiv 2410.10989)
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from nanomegatron.comm import Pending, start_all_gather, start_all_reduce_, start_reduce_scatter
from nanomegatron.layers import OutputLayer
from nanomegatron.mesh import Axis
from nanomegatron.ops.cross_entropy import cross_entropy_grad_, cross_entropy_stats
from nanomegatron.ops.kernels import once
from nanomegatron.param import add_product
from nanomegatron.tp import WHOLE_LOGITS, combine_lse, vocab_range


class FusedLossFunction(torch.autograd.Function):
    """Loss of each token and, in the same pass, its gradients; see `fused_linear_cross_entropy`.

    x `[s, b, h]` or `[s/tp, b, h]`, weight `[V/tp, h]`, labels, loss_weights `[1, s*b]` or `[tp, s*b/tp]`
    -> `[1, s*b]` or `[tp, s*b/tp]`

    If x is sharded along the sequence, the others have a row for each rank's tokens. A chunk has equally many
    tokens of each rank, so that each is gathered, and its gradient scattered, separately. Without
    `loss_weights` no gradients are computed.
    """

    chunk = 2048  # tokens

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        weight: nn.Parameter,
        labels: torch.Tensor,
        loss_weights: torch.Tensor | None,
        tp: Axis,
        real: int,
    ) -> torch.Tensor:
        ranks = labels.shape[0]
        step = max(1, FusedLossFunction.chunk // ranks)
        pieces = x.flatten(0, 1).split(step)
        gathered = [start_all_gather(piece, tp) if ranks > 1 else Pending(piece) for piece in pieces]
        reduce = start_reduce_scatter if ranks > 1 else start_all_reduce_
        out = ctx.dw = None
        beta = 0
        if loss_weights is not None and hasattr(weight, "bucket"):
            out, beta = weight.bucket.grad_buffer(weight)
        elif loss_weights is not None:
            out = ctx.dw = torch.empty_like(weight, dtype=torch.float32)
        columns = [t.split(step, 1) for t in (labels, loss_weights) if t is not None]
        ctx.shape = x.shape
        losses, ctx.dx = [], []
        for rows, *numbers in zip(gathered, *columns, strict=True):
            numbers = [column.flatten() for column in numbers]
            loss, dx = chunk_loss(rows.wait(), weight, numbers, (out, beta), reduce, tp, real)
            beta = 1
            losses.append(loss.view(ranks, -1))
            ctx.dx.append(dx)
        ctx.weight = weight  # not saved by ctx: hooks on saved tensors would return it without its bucket
        ctx.save_for_backward(loss_weights)
        return torch.cat(losses, 1)

    @staticmethod
    @partial(once, instead=WHOLE_LOGITS)
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (loss_weights,), weight = ctx.saved_tensors, ctx.weight
        torch._assert_async(
            (grad == loss_weights).all(),
            "the gradient of the loss is not loss_weights: put every factor (mask, 1/tokens, loss scale) "
            "into loss_weights, and use (loss * loss_weights).sum().backward()",
        )
        if ctx.dx is None:
            raise RuntimeError("second backward: the fused loss gives its gradients once; run it again")
        dx, dw = ctx.dx, ctx.dw
        ctx.dx = ctx.dw = None
        if dw is None:
            weight.bucket.count(weight)
        dx = torch.cat([piece.wait() for piece in dx]).view(ctx.shape)
        return dx, dw if dw is None else dw.to(weight.dtype), *[None] * 4


def chunk_loss(
    rows: torch.Tensor,
    weight: torch.Tensor,
    numbers: list[torch.Tensor],
    buffer: tuple[torch.Tensor | None, int],
    reduce: Callable[[torch.Tensor, Axis], Pending],
    tp: Axis,
    real: int,
) -> tuple[torch.Tensor, Pending | None]:
    """Losses of a chunk, and dx in flight through `reduce` (None without loss weights); writes dW to buffer.

    rows `[t, h]`, weight `[V/tp, h]`, numbers `[t]` -> `[t]`, and dx `[t, h]` before it is reduced. numbers:
    labels, counted from this rank's first row of weight, and loss weights if gradients are needed. buffer
    `[V/tp, h]`: out, and beta. A separate function, so that its logits are freed before the next chunk's are
    made.
    """
    labels, *loss_weights = numbers
    logits = rows @ weight.t()
    lse, picked = combine_lse(*cross_entropy_stats(logits[:, :real], labels), tp)
    if not loss_weights:
        return lse - picked, None
    grad = cross_entropy_grad_(logits, labels, lse, *loss_weights, real)
    dx = reduce(grad @ weight, tp)
    out, beta = buffer
    add_product(out, grad, rows, beta)
    return lse - picked, dx


def fused_output_loss(
    layer: OutputLayer, x: torch.Tensor, labels: torch.Tensor, loss_weights: torch.Tensor | None
) -> torch.Tensor:
    """`fused_linear_cross_entropy` as an `OutputLayer.loss`.

    x `[s, b, h]` or `[s/tp, b, h]`, labels, loss_weights `[b, s]` -> `[b, s]`
    """
    return fused_linear_cross_entropy(
        x, layer.weight, labels, loss_weights, layer.tp, layer.vocab_size, layer.sequence_sharded
    )


def fused_linear_cross_entropy(
    x: torch.Tensor,
    weight: nn.Parameter,
    labels: torch.Tensor,
    loss_weights: torch.Tensor | None,
    tp: Axis,
    vocab_size: int,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """-log softmax(x W^T)[label] of each token, fp32, equal on all ranks of tp, a chunk of logits at a time.

    x `[s, b, h]` or `[s/tp, b, h]`, weight `[V/tp, h]`, labels, loss_weights `[b, s]` -> `[b, s]`
    x is the same on all ranks or, with `sequence_parallel`, sharded over them. Rows of the whole weight from
    `vocab_size` on are padding.

    If autograd records, gradients are computed here, in the forward, so the factor of each token's loss must
    be known: `loss_weights` is all of it (mask, 1/tokens, loss scale), and the loss is used as
    `(loss * loss_weights).sum().backward()`, once. The weight's gradient is added to `main_grad` here and
    reported once, in the backward: zero gradients before the forward, run a backward after each forward that
    autograd records, and do not recompute this. Without a bucket it is summed in fp32 for autograd.
    Communicates over tp, per chunk: an all-gather of 2 numbers per token, an all-reduce of dx; with
    `sequence_parallel` an all-gather of x and a reduce-scatter of dx.

    Raises ValueError if gradients are needed without `loss_weights`; in the backward RuntimeError (on a GPU
    a device-side assertion, for which the host does not wait) if the loss's gradient is not `loss_weights`.
    """
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if wanted and loss_weights is None:
        raise ValueError("loss_weights None: --cross-entropy-loss-fusion needs them to train; see Batch")
    first, real = vocab_range(weight.shape[0], tp, vocab_size)
    ranks = tp.size if sequence_parallel else 1
    labels, loss_weights = labels.t(), loss_weights.t().float() if wanted else None
    given = [None if t is None else t.reshape(ranks, -1) for t in (labels - first, loss_weights)]
    return FusedLossFunction.apply(x, weight, *given, tp, real).view(labels.shape).t()

"""Same result as `layers.Norm` and `layers.run_mlp` with FP8 layers that quantize their own inputs.

Here a tensor that only such a layer reads is quantized where it is computed, if possible in the same kernel:

    x ----- norm ---------- normed ----- linear_qkv, linear_fc1
    h ----- act(gate) up -- y ---------- linear_fc2                 h [s, b, 2f]: the output of linear_fc1
      <---- dh -----------------------                             its gradient, read by linear_fc1's backward
    z ----- cross entropy -- loss                                   z [s, b, V]: logits of an FP8 output layer
      <---- dz                                                      theirs, read by this layer's backward

normed, y, dh and dz need to exist in FP8 only. Autograd gets a placeholder: a tensor of the right shape and
type without memory; its elements are one expanded NaN, so that reading it does not go unnoticed. Copies of
normed and y go with it to the linear layer (`fp8_linear.Fp8Input`), those of dh and dz into a list that this
layer was given for them. For the backward it saves the transposed FP8 copy, half the bytes of bf16.

With delayed scaling the scales are known before: casts are fused into the norm, the activation, its backward
and that of the loss. These round to 16 bits first, as the plain form does: FP8 values and the amaxes in the
history are those of the plain form, under every recipe.

Gain: of the tensors that linear layers read, half the memory for the backward, and no pass for the cast: on
an H200 sum, norm and cast take 124 us in one kernel, SwiGLU and cast 173 us at 96 % of a copy's bandwidth
(benchmarks/results/2026-11-21-kernels-fused-fp8.json).
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

from nanomegatron.fast.cuda_graphs import has_hooks
from nanomegatron.fast.discard_output import discard
from nanomegatron.fast.fused_layer import Branch, fused_norm
from nanomegatron.fp8 import Fp8LayerState, Quantized
from nanomegatron.fp8_linear import Fp8Input, input_copies, quantize_input, reads_only_fp8
from nanomegatron.layers import MLP, Norm, OutputLayer, run_mlp
from nanomegatron.mesh import Axis
from nanomegatron.ops.cross_entropy import cross_entropy_stats
from nanomegatron.ops.dropout import bias_dropout_add
from nanomegatron.ops.fp8_fused import (
    bias_act_backward_fp8,
    bias_act_fp8,
    cross_entropy_grad_fp8,
    gated_backward_fp8,
    gated_fp8,
    logits_grad_ref,
    norm_fp8,
)
from nanomegatron.ops.gelu import bias_act_ref
from nanomegatron.ops.kernels import once
from nanomegatron.ops.norm import norm_backward, norm_ref
from nanomegatron.ops.swiglu import SILU, gated_backward_ref, gated_ref, plain_act
from nanomegatron.param import accumulate
from nanomegatron.tp import combine_lse, vocab_parallel_cross_entropy, vocab_range


def copies_for(linear: nn.Module) -> tuple[str, bool]:
    """The copies of its input that an FP8 layer needs, and whether autograd records."""
    trains = torch.is_grad_enabled()
    return input_copies(linear.fp8, linear.comm, trains), trains


def quantized_for(linear: nn.Module, x: torch.Tensor) -> Fp8Input:
    """Quantize x `[..., i]` for the layer, the only one that reads it."""
    y, copies = CastFp8Function.apply(x, linear.fp8, linear.tp, linear.comm, torch.is_grad_enabled())
    return Fp8Input(y, copies)


def quantizing_norm(
    norm: nn.Module, reader: nn.Module | None, x: torch.Tensor, branch: Branch | None
) -> tuple[torch.Tensor | Fp8Input, torch.Tensor]:
    """A `FusedLayers.norm`: if only an FP8 layer reads the result, it is in FP8.

    x `[s, b, h]` or `[s/tp, b, h]` -> the norm, and the sum `[..., h]`
    """
    if reader is None or not reads_only_fp8(reader) or not isinstance(norm, Norm):
        return fused_norm(norm, reader, x, branch)
    if not (norm.fused and reader.fp8.x.has_scale):
        y, total = fused_norm(norm, reader, x, branch)
        return quantized_for(reader, y), total
    residual = None
    if branch is not None:
        residual = x
        x = bias_dropout_add(branch.y, branch.bias, None, branch.drop)  # not in the kernel
    copies, trains = copies_for(reader)
    y, total, casts = NormFp8Function.apply(
        x, residual, norm.weight, norm.bias, norm.eps, norm.from_one, reader.fp8, copies, trains
    )
    return Fp8Input(y, casts), total


def quantizing_mlp(
    mlp: MLP,
    x: torch.Tensor | Fp8Input,
    linear_fc1: Callable,
    linear_fc2: Callable,
    discards: bool = False,
) -> torch.Tensor:
    """An `MLP.run` with the input of `linear_fc2` in FP8, and the gradient of the output of `linear_fc1`.

    x `[s, b, h]` or `[s/tp, b, h]` -> `[s, b, h]` or `[s/tp, b, h]`
    discards: as `discard_output.discarding_mlp`. With a hook on a linear layer, which would see placeholders,
    each layer quantizes its own input.
    """
    if has_hooks(mlp.linear_fc1) or has_hooks(mlp.linear_fc2):
        return run_mlp(mlp, x, linear_fc1, linear_fc2)
    grad_copies: list[Quantized] = []
    if reads_only_fp8(mlp.linear_fc1):
        given = x if isinstance(x, Fp8Input) else Fp8Input(x)
        x = given._replace(grad_copies=grad_copies)
    x, bias = linear_fc1(x)

    def activate(x: torch.Tensor) -> Fp8Input:
        return quantizing_activate(mlp, x, bias, grad_copies)

    y = activate(x)
    with discard(y, activate, x) if discards else nullcontext():
        return linear_fc2(y)


def quantizing_activate(
    mlp: MLP, x: torch.Tensor, bias: torch.Tensor | None, grad_copies: list[Quantized]
) -> Fp8Input:
    """The activation of x plus the bias, in FP8; if both layers allow it, its backward fills grad_copies.

    x `[..., f]` or `[..., 2*f]` (gated), bias `[f]` -> `[..., f]`, where f is this rank's f/tp
    """
    first, second = mlp.linear_fc1, mlp.linear_fc2
    if reads_only_fp8(first) and first.fp8.g.has_scale and second.fp8.x.has_scale:
        copies, trains = copies_for(second)
        if mlp.config.swiglu and mlp.config.bias_swiglu_fusion and first.bias is None:
            y, casts = GatedFp8Function.apply(x, first.fp8, second.fp8, copies, trains, grad_copies)
            return Fp8Input(y, casts)
        act = plain_act(mlp.config)
        if act is not None:
            y, casts = BiasActFp8Function.apply(
                x, bias, act, first.fp8, second.fp8, copies, trains, grad_copies
            )
            return Fp8Input(y, casts)
    return quantized_for(second, mlp.activation(x, bias, accumulate))


def quantizing_loss(
    head: OutputLayer, x: torch.Tensor, labels: torch.Tensor, loss_weights: torch.Tensor | None
) -> torch.Tensor:
    """An `OutputLayer.loss` that quantizes the gradient of the logits.

    x `[s, b, h]` or `[s/tp, b, h]`, labels, loss_weights `[b, s]` -> `[b, s]`
    """
    grad_copies: list[Quantized] = []
    logits = head.compute_logits(head, Fp8Input(x, None, grad_copies))
    if not head.fp8.g.has_scale:
        return vocab_parallel_cross_entropy(logits, labels, head.tp, head.vocab_size)
    return CrossEntropyFp8Function.apply(logits, labels, head.tp, head.vocab_size, head.fp8, grad_copies)


def fp8_placeholder(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A NaN tensor without storage -> `[...]`, of `shape`, with the type and device of `like` `[...]`"""
    return _nan(like.dtype, like.device).expand(shape)


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device)


class CastFp8Function(torch.autograd.Function):
    """A cast that is not fused: x `[..., k]` -> a placeholder `[..., k]`, the copies of `quantize_input`"""

    @staticmethod
    def forward(ctx, x: torch.Tensor, fp8: Fp8LayerState, axis: Axis | None, comm: str, trains: bool):
        return fp8_placeholder(x, x.shape), quantize_input(fp8, x, axis, comm, trains)

    @staticmethod
    def backward(ctx, grad: torch.Tensor, _) -> tuple[torch.Tensor | None, ...]:
        return grad, None, None, None, None


class NormFp8Function(torch.autograd.Function):
    """`ops.norm.norm` or, with a residual, `add_norm`, for a linear layer.

    x, residual `[..., h]`, weight, bias `[h]` -> a placeholder `[..., h]`, the sum, or x `[..., h]`, and the
    copies. fp8: the layer's state; copies, trains: what `copies_for` returns for it.
    """

    @staticmethod
    def forward(
        ctx,
        x,
        residual,
        weight,
        bias,
        eps: float,
        from_one: bool,
        fp8: Fp8LayerState,
        copies: str,
        trains: bool,
    ):
        output = fp8.x.fused_output(copies, trains)
        made = norm_fp8(x, residual, weight, bias, eps, from_one, output)
        x = x if residual is None else made.total
        casts = Quantized.with_scale((made.rowwise, made.columnwise), fp8.x.scale_inv)
        fp8.x.record_stats(lambda: norm_ref(x, weight, bias, eps, from_one).flatten(0, -2), casts, trains)
        ctx.save_for_backward(x, weight, bias, made.rstd, made.mean)
        ctx.eps, ctx.from_one = eps, from_one
        ctx.set_materialize_grads(False)
        total = x.view_as(x) if residual is None else x
        return fp8_placeholder(x, x.shape), total, casts

    @staticmethod
    @once
    def backward(ctx, grad, grad_total, _):
        dx, dweight, dbias = norm_backward(grad, grad_total, ctx.saved_tensors, ctx.eps, ctx.from_one)
        return dx, dx if ctx.needs_input_grad[1] else None, dweight, dbias, *[None] * 5


class GatedFp8Function(torch.autograd.Function):
    """SwiGLU between two linear layers: x `[..., 2*f]` -> a placeholder `[..., f]`, and its copies

    The backward returns a placeholder for the gradient, and puts the copies into grad_copies. before, after:
    states of the two layers; copies, trains: what `copies_for` returns for the second.
    """

    @staticmethod
    def forward(
        ctx, x, before: Fp8LayerState, after: Fp8LayerState, copies: str, trains: bool, grad_copies: list
    ):
        output = after.x.fused_output(copies, trains)
        casts = Quantized.with_scale(gated_fp8(x, SILU, output), after.x.scale_inv)
        after.x.record_stats(lambda: gated_ref(x, SILU).flatten(0, -2), casts, trains)
        ctx.save_for_backward(x)
        ctx.before = before
        ctx.grad_copies = grad_copies
        return fp8_placeholder(x, (*x.shape[:-1], x.shape[-1] // 2)), casts

    @staticmethod
    @once
    def backward(ctx, grad, _):
        (x,), before = ctx.saved_tensors, ctx.before
        output = before.g.fused_output("both")
        casts = Quantized.with_scale(gated_backward_fp8(grad, x, SILU, output), before.g.scale_inv)
        before.g.record_stats(lambda: gated_backward_ref(grad, x, SILU).flatten(0, -2), casts)
        ctx.grad_copies.append(casts)
        return fp8_placeholder(x, x.shape), *[None] * 5


class BiasActFp8Function(torch.autograd.Function):
    """An activation without a gate between two linear layers: x `[..., f]`, bias `[f]` -> a placeholder.

    The rest is as in `GatedFp8Function`. The bias's gradient is made beside that of x, before the cast.
    """

    @staticmethod
    def forward(
        ctx,
        x,
        bias,
        act: int,
        before: Fp8LayerState,
        after: Fp8LayerState,
        copies: str,
        trains: bool,
        grad_copies: list,
    ):
        output = after.x.fused_output(copies, trains)
        casts = Quantized.with_scale(bias_act_fp8(x, bias, act, output), after.x.scale_inv)
        after.x.record_stats(lambda: bias_act_ref(x, bias, act=act).flatten(0, -2), casts, trains)
        ctx.save_for_backward(x)
        ctx.bias, ctx.act = bias, act
        ctx.before = before
        ctx.grad_copies = grad_copies
        return fp8_placeholder(x, x.shape), casts

    @staticmethod
    @once
    def backward(ctx, grad, _):
        (x,), bias = ctx.saved_tensors, ctx.bias
        output = ctx.before.g.fused_output("both")

        def write(out: torch.Tensor | None, beta: int) -> None:
            pair = bias_act_backward_fp8(grad, x, bias, ctx.act, output, out, beta)
            ctx.grad_copies.append(Quantized.with_scale(pair, ctx.before.g.scale_inv))

        trained = bias is not None and bias.requires_grad
        dbias = accumulate(bias, write) if trained else write(None, 0)
        return fp8_placeholder(x, x.shape), dbias, *[None] * 6


class CrossEntropyFp8Function(torch.autograd.Function):
    """`tp.vocab_parallel_cross_entropy` of logits `[s, b, V/tp]`, labels `[b, s]` -> `[b, s]`

    The backward returns a placeholder for the gradient, and puts the copies into grad_copies. head: the state
    of the layer that makes the logits.
    """

    @staticmethod
    def forward(ctx, logits, labels, tp: Axis, vocab_size: int, head: Fp8LayerState, grad_copies: list):
        first, real = vocab_range(logits.shape[-1], tp, vocab_size)
        rows, own = logits.flatten(0, 1), labels.t().flatten() - first
        lse, target = combine_lse(*cross_entropy_stats(rows[:, :real], own), tp)
        ctx.save_for_backward(logits, own, lse)
        ctx.real, ctx.head = real, head
        ctx.grad_copies = grad_copies
        return (lse - target).view(labels.t().shape).t()

    @staticmethod
    @once
    def backward(ctx, grad):
        (logits, own, lse), head = ctx.saved_tensors, ctx.head
        given = logits.flatten(0, 1), own, lse, grad.t().flatten(), ctx.real
        output = head.g.fused_output("both")
        casts = Quantized.with_scale(cross_entropy_grad_fp8(*given, output), head.g.scale_inv)
        head.g.record_stats(lambda: logits_grad_ref(*given), casts)
        ctx.grad_copies.append(casts)
        return fp8_placeholder(logits, logits.shape), *[None] * 5

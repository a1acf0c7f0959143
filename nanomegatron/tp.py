"""Tensor parallelism: each layer's matrices sharded over the ranks of one axis.

Tests: tests/test_tp.py. Page: docs/parallel.md.

                x  [s, b, h]                                x  [s/tp, b, h]   with sequence parallelism
                |  on every rank, nothing sent              |  all-gather the sequence
        W1 [o/tp, h]   output features are sharded                                  ColumnParallelLinear
                |                                           |
        W2 [h, o/tp]   input features are sharded: each rank makes a partial sum    RowParallelLinear
                |  all-reduce                               |  reduce-scatter over the sequence
                y  [s, b, h]                                y  [s/tp, b, h]

Such a pair needs one all-reduce forward and one backward. With sequence parallelism (residual stream, norms
and dropout sharded along the sequence) each is an all-gather and a reduce-scatter, which send the same bytes;
the backward gathers x once more. The vocabulary is sharded, too: a rank looks up its rows of the embedding
(then all-reduce) and computes its columns of the logits; the loss all-gathers two numbers per token:

    one token's logits       | rank 0: lse, target | rank 1: lse, target | ...      each over its own columns
    the same on all ranks    loss = log sum exp(lse) - sum target                   (0 for others' labels)

A linear layer does three matmuls. Its backward gives the weight gradient to `accumulate` (`param.py`), which
adds it to `main_grad`. Communication overlaps with a matmul that does not need its result (X: gathered x);
only "scatter" must gather dy before both matmuls:

    time ->            comm "copy"                               comm "gather"
    matmuls            [ dx = dy W ][ main_grad += dy^T x ]      [ dx = dy W ][ main_grad += dy^T X ]
    collectives                     [ all-reduce dx       ]      [ gather x  ][ reduce-scatter dx    ]

If a pipeline defers weight gradients, the last matmul runs later (and x is gathered then, not before).
In eval mode nothing is sharded along the sequence, so that generation can use any length.
(Megatron-LM, arXiv 1909.08053; sequence parallelism 2205.05198)
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nanomegatron.comm import (
    Pending,
    all_gather,
    all_reduce_,
    own_slice,
    reduce_from,
    reduce_scatter,
    scatter_seq,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)
from nanomegatron.mesh import Axis
from nanomegatron.ops.bias import bias_grad
from nanomegatron.ops.cross_entropy import cross_entropy_grad_, cross_entropy_stats
from nanomegatron.ops.embedding import add_position_grad_, add_word_grad_, lookup
from nanomegatron.ops.kernels import once
from nanomegatron.param import (
    Init,
    ParamSpec,
    accumulate,
    add_product,
    is_deferred,
    new_parameter,
    replicated,
    shard,
    slot,
    stacked,
)

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]  # y, or (y, bias) with skip_bias_add
WHOLE_LOGITS = "torch.nn.functional.cross_entropy of whole logits"  # which allows a second backward


class LinearFunction(torch.autograd.Function):
    """y = x W^T + bias for a local weight `[m, n]`, with the communication of its place in a column-row pair.

    x `[..., n]`, bias `[m]` or None -> `[..., m]`, in these shapes:

    comm        x                 y                 forward                       backward
    "copy"      [s, b, i]         [s, b, o/tp]      -                             all-reduce dx
    "gather"    [s/tp, b, i]      [s, b, o/tp]      gather x                      gather x, reduce-scatter dx
    "sum"       [s, b, i/tp]      [s, b, o]         all-reduce y                  -
    "scatter"   [s, b, i/tp]      [s/tp, b, o]      reduce-scatter y              gather dy

    The bias is added last, to sums over ranks once; where nothing is summed a GPU's matmul adds it. For the
    backward it saves its input x: with "gather" only the local shard.
    """

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        weight: torch.Tensor,
        axis: Axis,
        comm: str,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # hooks on saved tensors may lose `bucket`
        ctx.bias = bias
        ctx.axis = axis
        ctx.comm = comm
        if comm == "gather":
            x = all_gather(x, axis)
        if x.is_cuda and comm in ("copy", "gather"):
            return F.linear(x, weight, bias)
        y = x @ weight.t()
        if comm == "scatter":
            y = reduce_scatter(y, axis)
        elif comm == "sum":
            y = all_reduce_(y, axis)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        axis = ctx.axis
        gathering = None  # x, for dW: beside dx, or if deferred by dW's own `write`
        if ctx.comm == "gather" and not is_deferred(ctx.weight):
            gathering = start_all_gather(x, axis)
        dbias = bias_grad(ctx.bias, dy, accumulate)
        if ctx.comm == "scatter":
            dy = all_gather(dy, axis)
        dx = dy @ ctx.weight
        reduced = start_input_grad_sum(dx, axis, ctx.comm)

        def write(out: torch.Tensor, beta: int) -> None:
            inputs = x
            if ctx.comm == "gather":
                inputs = all_gather(x, axis) if gathering is None else gathering.wait()
            add_product(out, dy, inputs, beta)

        dw = accumulate(ctx.weight, write)
        return reduced.wait(), dw, None, None, dbias


def start_input_grad_sum(dx: torch.Tensor, axis: Axis, comm: str) -> Pending:
    """Begin to sum the input gradient dx `[s, b, i]` of a linear layer over the ranks that used its input."""
    if comm == "copy":
        return start_all_reduce_(dx, axis)
    if comm == "gather":
        return start_reduce_scatter(dx, axis)
    return Pending(dx)


class ColumnParallelLinear(nn.Module):
    """Output features sharded over tp. x `[s, b, i]` or `[s/tp, b, i]` -> `[s, b, o/tp]`

    `output_size` is a number, or the sizes of the parts of a fused layer by name ({"q": 64, "k": 16, "v":
    16}): each part is sharded separately, so a rank's output is [q; k; v] of its own heads. A size (16, 2) is
    sharded over tp/2 groups of 2 neighbouring ranks, which hold the same slice. With `sequence_parallel` x
    is `[s/tp, b, i]` and gathered; `skip_bias_add` returns (y, bias) instead of their sum. linear: the
    function (x, weight, axis, comm, bias) -> y, with the communication of `LinearFunction`; fp8: its
    `fp8.Fp8LayerState`, if any. `fp8_linear.use_fp8` sets both.
    """

    linear: Callable[..., torch.Tensor] = slot(LinearFunction.apply)
    fp8: Any = None

    def __init__(
        self,
        input_size: int,
        output_size: int | dict[str, int | tuple[int, int]],
        tp: Axis,
        init: Init = Init(name="linear"),  # noqa: B008 (frozen)
        bias: bool = True,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.skip_bias_add = skip_bias_add
        sizes = output_size if isinstance(output_size, dict) else {"": output_size}
        self.sizes = {part: size if isinstance(size, tuple) else (size, 1) for part, size in sizes.items()}
        for part, (size, copies) in self.sizes.items():
            if size * copies % tp.size or tp.size % copies:
                of = f"{size} output features" + f", {copies} ranks each," * (copies > 1)
                raise ValueError(f"{init.name}.{part}: {of} must be a multiple of tp {tp.size}")
        self.weight = new_parameter(self._spec("weight", (input_size,), init), init)
        self.bias = new_parameter(self._spec("bias", (), init), init, fill=0.0) if bias else None

    def _spec(self, kind: str, rest: tuple[int, ...], init: Init) -> ParamSpec:
        parts = []
        for part, (size, copies) in self.sizes.items():
            name = ".".join(word for word in (init.name, part, kind) if word)
            parts.append(shard(name, (size, *rest), 0, self.tp, copies=copies))
        return stacked(parts)

    @property
    def comm(self) -> str:
        """The communication of this layer, as in the table of `LinearFunction`: "copy" or "gather"."""
        return "gather" if self.sequence_parallel and self.training else "copy"

    def forward(self, x: torch.Tensor) -> Output:
        if self.skip_bias_add:
            return self.linear(x, self.weight, self.tp, self.comm), self.bias
        return self.linear(x, self.weight, self.tp, self.comm, self.bias)


class RowParallelLinear(nn.Module):
    """Input features sharded over tp. x `[s, b, i/tp]` -> `[s, b, o]` or `[s/tp, b, o]`

    With `sequence_parallel` y is `[s/tp, b, o]`. The bias is replicated and added after the reduction.
    linear, fp8: as in ColumnParallelLinear.
    """

    linear: Callable[..., torch.Tensor] = slot(LinearFunction.apply)
    fp8: Any = None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp: Axis,
        init: Init = Init(name="linear"),  # noqa: B008 (frozen)
        bias: bool = True,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        if input_size % tp.size:
            raise ValueError(f"{init.name}: {input_size} input features must be a multiple of tp {tp.size}")
        part = shard(f"{init.name}.weight", (output_size, input_size), 1, tp)
        spec = ParamSpec((part,), (output_size, input_size // tp.size))
        self.weight = new_parameter(spec, init)
        self.bias = replicated(init.at("bias"), (output_size,), tp, sequence_parallel, 0.0) if bias else None

    @property
    def comm(self) -> str:
        """The communication of this layer, as in the table of `LinearFunction`: "sum" or "scatter"."""
        return "scatter" if self.sequence_parallel and self.training else "sum"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x, self.weight, self.tp, self.comm, self.bias)


def vocab_spec(
    name: str,
    sizes: tuple[int, int],
    hidden_size: int,
    tp: Axis,
    tied: bool = False,
    ends: Axis = Axis.single(),  # noqa: B008 (frozen)
) -> ParamSpec:
    """Return the spec of a `[padded/tp, hidden]` weight: a row per token of the vocabulary, then zero rows.

    sizes: (vocabulary, padded vocabulary). tied: embedding and output layer share it; if the ranks of the
    first and the last stage, `ends`, are two, each has a copy, and the gradients of both are summed.
    """
    rows = sizes[1] // tp.size
    part = shard(name, (sizes[0], hidden_size), 0, tp, local_size=rows)
    if tied and ends.size > 1:
        part = replace(part, partial=ends)
    return ParamSpec((part,), (rows, hidden_size), tied=tied)


class EmbeddingFunction(torch.autograd.Function):
    """Look up ids `[b, s]` in the local table `[V/tp, h]`, zeros for ids of other ranks -> `[s, b, h]`

    The rank that has an id adds its position embedding, too, so the sum over tp only adds zeros: positions
    `[n, h]`, at position_ids `[s]` or `[b, s]`. sequence_axis: that over which the sequence is sharded; each
    of its ranks computes the gradient of positions for its slice.
    """

    @staticmethod
    def forward(
        ctx,
        ids: torch.Tensor,
        table: torch.Tensor,
        first: int,
        scale: float,
        positions: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        sequence_axis: Axis,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids, position_ids)
        ctx.table = table
        ctx.positions = positions
        ctx.first = first
        ctx.scale = scale
        ctx.sequence_axis = sequence_axis
        return lookup(ids, table, first, scale, positions, position_ids)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ids, position_ids = ctx.saved_tensors
        first = ctx.first
        scale = ctx.scale
        axis = ctx.sequence_axis

        def write_words(out: torch.Tensor, beta: int) -> None:
            add_word_grad_(out, ids, grad if scale == 1 else grad * scale, first, beta)

        def write_positions(out: torch.Tensor, beta: int) -> None:
            add_position_grad_(out, own_slice(position_ids.t(), axis).t(), own_slice(grad, axis), beta)

        words = accumulate(ctx.table, write_words)
        others = accumulate(ctx.positions, write_positions)
        return None, words, None, None, others, None, None


class VocabParallelEmbedding(nn.Module):
    """Embedding whose rows are sharded over tp. ids `[b, s]` -> `[s, b, h]` or `[s/tp, b, h]`

    All-reduces its output over tp, or with `sequence_parallel` reduce-scatters it. weight: an existing one
    to share. scale: a factor of the rows; positions `[n, h]`: added, those at position_ids `[s]` or `[b, s]`.
    """

    def __init__(
        self,
        vocab_size: int,
        padded_size: int,
        hidden_size: int,
        tp: Axis,
        init: Init = Init(name="embedding.word_embeddings"),  # noqa: B008 (frozen)
        sequence_parallel: bool = False,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        spec = vocab_spec(f"{init.name}.weight", (vocab_size, padded_size), hidden_size, tp)
        self.weight = new_parameter(spec, init) if weight is None else weight

    def forward(
        self,
        ids: torch.Tensor,
        scale: float = 1.0,
        positions: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        first = self.tp.rank * self.weight.shape[0]
        look_up = partial(EmbeddingFunction.apply, ids, self.weight, first, scale, positions, position_ids)
        if self.sequence_parallel and self.training:
            return scatter_seq(look_up(self.tp), self.tp)
        return reduce_from(look_up(Axis.single()), self.tp)


def vocab_range(width: int, tp: Axis, vocab_size: int) -> tuple[int, int]:
    """Return the token of this rank's first logit column, and how many of its `width` are no padding."""
    first = tp.rank * width
    return first, min(max(vocab_size - first, 0), width)


def combine_lse(
    maximum: torch.Tensor, total: torch.Tensor, target: torch.Tensor, tp: Axis
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the shards' `cross_entropy_stats` into log-sum-exp and label's logit of the whole rows.

    maximum, total, target `[t]` -> `[t]`, `[t]`. One all-gather over tp, so that every rank adds the same
    numbers in the same order.
    """
    shards = all_gather(torch.stack((maximum + total.log(), target))[None], tp)
    return shards[:, 0].logsumexp(0), shards[:, 1].sum(0)


class CrossEntropyFunction(torch.autograd.Function):
    """Loss of each token from logits that are sharded over tp; see `vocab_parallel_cross_entropy`.

    logits `[t, V/tp]`, labels `[t]`, counted from this rank's first column -> `[t]` fp32. Saves the logits
    and one log-sum-exp per token; fp32 logits of the whole sequence never exist. The backward overwrites the
    logits with their gradient. The columns after the first `real` ones are padding.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, labels: torch.Tensor, tp: Axis, real: int) -> torch.Tensor:
        maximum, total, target = cross_entropy_stats(logits[:, :real], labels)
        lse, target = combine_lse(maximum, total, target, tp)
        ctx.save_for_backward(logits, labels, lse)
        ctx.real = real
        return lse - target

    @staticmethod
    @partial(once, instead=WHOLE_LOGITS)
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, labels, lse = ctx.saved_tensors
        return cross_entropy_grad_(logits, labels, lse, grad, ctx.real), None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, tp: Axis, vocab_size: int
) -> torch.Tensor:
    """Return -log softmax(logits)[label] of each token, fp32, the same on all ranks of tp.

    logits `[s, b, V/tp]`, labels `[b, s]` -> `[b, s]`. Logits from `vocab_size` on are padding and are
    ignored, so the loss does not depend on tp. One all-gather over tp: `2*s*b` numbers from each rank.
    """
    first, real = vocab_range(logits.shape[-1], tp, vocab_size)
    if logits.is_leaf and logits.requires_grad:  # the backward must not overwrite the caller's tensor
        logits = logits.clone()
    loss = CrossEntropyFunction.apply(logits.flatten(0, 1), labels.t().flatten() - first, tp, real)
    return loss.view(labels.t().shape).t()

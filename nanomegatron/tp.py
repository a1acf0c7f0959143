"""Tensor parallelism: each layer's matrices cut over the ranks of one axis, the activations replicated.

                x (same on every rank)                      an MLP or an attention block
                |  copy_to            <- backward: sum the input gradients
        W1 cut by rows of output      each rank makes its own features          ColumnParallelLinear
                |
        W2 cut by columns of input    each rank makes a summand                 RowParallelLinear
                |  reduce_from        <- forward: sum the summands
                y (same on every rank)

One all-reduce forward and one backward for such a pair. The vocabulary is cut the same way: the embedding
looks up its own rows and sums, the output layer makes its own columns of the logits, and the loss needs three
numbers a token from each rank (maximum, sum of exponentials, the label's logit), never the logits themselves.

A linear layer does three matmuls, and its backward writes the weight gradient where the contract of
`param.py` wants it:

        forward  y = x W^T        input gradient  dx = dy W        weight gradient  main_grad += dy^T x

(Megatron-LM, arXiv 1909.08053)
"""

import torch
from torch import nn

from nanomegatron import ops
from nanomegatron.comm import all_reduce, copy_to, reduce_from
from nanomegatron.mesh import Axis
from nanomegatron.param import Init, ParamSpec, Part, contribute, new_parameter, replica, shard


class LinearFunction(torch.autograd.Function):
    """y = x W^T for a local weight. x `[..., i]`, weight `[o, i]`, y `[..., o]`; nothing is communicated."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        return grad @ weight, accumulate_weight_grad(weight, x, grad)


def accumulate_weight_grad(weight: nn.Parameter, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    """The weight gradient grad^T x, summed over all rows, into `main_grad`. x `[..., i]`, grad `[..., o]`

    On a GPU the matmul adds into the fp32 buffer by itself; torch has no CPU kernel for that.
    """
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or x.dtype == torch.float32 or not x.is_cuda:
        return contribute(weight, lambda: grad.t() @ x)
    torch.addmm(main_grad, grad.t(), x, out_dtype=torch.float32, out=main_grad)
    weight.grad_ready()
    return None


class ColumnParallelLinear(nn.Module):
    """Linear layer whose output features are cut over tp. x `[s, b, i]` -> `[s, b, o/tp]`

    `output_size` is a number, or the sizes of the parts of a fused layer by name ({"q": .., "k": .., "v":
    ..}): each part is cut by itself, so a rank's output is its own [q; k; v]. Backward all-reduces the input
    gradient over tp.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int | dict[str, int],
        tp: Axis,
        name: str = "linear",
        init: Init = Init(),  # noqa: B008 (frozen)
        std: float = 0.02,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.tp = tp
        sizes = output_size if isinstance(output_size, dict) else {"": output_size}
        for part, size in sizes.items():
            if size % tp.size:
                raise ValueError(f"{name}.{part}: {size} output features do not divide by tp {tp.size}")
        self.weight = new_parameter(self._spec(name, "weight", sizes, (input_size,)), init, std)
        self.bias = new_parameter(self._spec(name, "bias", sizes, ()), init, fill=0.0) if bias else None

    def _spec(self, name: str, kind: str, sizes: dict[str, int], rest: tuple[int, ...]) -> ParamSpec:
        parts, rows = [], 0
        for part, size in sizes.items():
            full_name = ".".join(word for word in (name, part, kind) if word)
            parts.append(shard(full_name, (size, *rest), 0, self.tp, local_start=rows))
            rows += size // self.tp.size
        is_weight = kind == "weight"
        return ParamSpec(tuple(parts), (rows, *rest), writes_grad=is_weight, decay=is_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = LinearFunction.apply(copy_to(x, self.tp), self.weight)
        return y if self.bias is None else y + self.bias


class RowParallelLinear(nn.Module):
    """Linear layer whose input features are cut over tp. x `[s, b, i/tp]` -> `[s, b, o]`

    Forward all-reduces the output over tp; the bias is replicated and added after that.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp: Axis,
        name: str = "linear",
        init: Init = Init(),  # noqa: B008 (frozen)
        std: float = 0.02,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.tp = tp
        if input_size % tp.size:
            raise ValueError(f"{name}: {input_size} input features do not divide by tp {tp.size}")
        part = shard(f"{name}.weight", (output_size, input_size), 1, tp)
        spec = ParamSpec((part,), (output_size, input_size // tp.size), writes_grad=True)
        self.weight = new_parameter(spec, init, std)
        spec = ParamSpec((replica(f"{name}.bias", (output_size,), tp),), (output_size,), decay=False)
        self.bias = new_parameter(spec, init, fill=0.0) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = reduce_from(LinearFunction.apply(x, self.weight), self.tp)
        return y if self.bias is None else y + self.bias


def vocab_spec(name: str, vocab_size: int, padded_size: int, hidden_size: int, tp: Axis) -> ParamSpec:
    """A `[padded_size/tp, hidden]` weight whose rows are the vocabulary, zero rows at the end."""
    rows = padded_size // tp.size
    part: Part = shard(name, (vocab_size, hidden_size), 0, tp, local_size=rows)
    return ParamSpec((part,), (rows, hidden_size), writes_grad=True)


class EmbeddingFunction(torch.autograd.Function):
    """Rows of a local table; ids outside it give zeros. ids `[b, s]`, table `[V/tp, h]` -> `[s, b, h]`"""

    @staticmethod
    def forward(ctx, ids: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
        local = ids.t() - first
        here = (local >= 0) & (local < table.shape[0])
        # Foreign ids are spread over the rows: their gradient is zero, and no row becomes a hot spot.
        local = torch.where(here, local, local.remainder(table.shape[0]))
        ctx.save_for_backward(local, here, table)
        return table[local] * here[..., None]

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[None, torch.Tensor | None, None]:
        local, here, table = ctx.saved_tensors
        rows, grad = local.flatten(), (grad * here[..., None]).flatten(0, 1)
        if getattr(table, "main_grad", None) is None:
            return None, torch.zeros_like(table).index_put_((rows,), grad, accumulate=True), None
        table.main_grad.index_put_((rows,), grad.to(table.main_grad.dtype), accumulate=True)
        table.grad_ready()
        return None, None, None


class VocabParallelEmbedding(nn.Module):
    """Embedding whose rows are cut over tp. ids `[b, s]` -> `[s, b, h]`, all-reduced over tp."""

    def __init__(
        self,
        vocab_size: int,
        padded_size: int,
        hidden_size: int,
        tp: Axis,
        name: str = "embedding.word_embeddings",
        init: Init = Init(),  # noqa: B008 (frozen)
        std: float = 0.02,
    ) -> None:
        super().__init__()
        self.tp = tp
        spec = vocab_spec(f"{name}.weight", vocab_size, padded_size, hidden_size, tp)
        self.weight = new_parameter(spec, init, std)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = self.tp.rank * self.weight.shape[0]
        return reduce_from(EmbeddingFunction.apply(ids, self.weight, first), self.tp)


def vocab_parallel_logits(x: torch.Tensor, weight: torch.Tensor, tp: Axis) -> torch.Tensor:
    """This rank's columns of the logits. x `[s, b, h]`, weight `[V/tp, h]` -> `[s, b, V/tp]`

    Backward all-reduces the gradient of x over tp.
    """
    return LinearFunction.apply(copy_to(x, tp), weight)


class CrossEntropyFunction(torch.autograd.Function):
    """Loss of each token from logits that are cut over tp; see `vocab_parallel_cross_entropy`.

    Works through the tokens in chunks, so that fp32 logits of the whole sequence never exist, and keeps the
    logits and one log-sum-exp a token. Of the columns the first `real` are vocabulary, the others padding.
    """

    chunk = 2048  # tokens

    @staticmethod
    def forward(ctx, logits: torch.Tensor, labels: torch.Tensor, tp: Axis, real: int) -> torch.Tensor:
        chunks = zip(*(x.split(CrossEntropyFunction.chunk) for x in (logits[:, :real], labels)), strict=True)
        stats = [ops.cross_entropy_stats(*chunk) for chunk in chunks]
        maximum, total, target = (torch.cat(column) for column in zip(*stats, strict=True))
        highest = all_reduce(maximum, tp, "max")
        total, target = all_reduce(torch.stack((total * (maximum - highest).exp(), target)), tp)
        lse = total.log() + highest
        ctx.save_for_backward(logits, labels, lse)
        ctx.real = real
        return lse - target

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, labels, lse = ctx.saved_tensors
        result = torch.zeros_like(logits) if ctx.real < logits.shape[-1] else torch.empty_like(logits)
        columns = (result[:, : ctx.real], logits[:, : ctx.real], labels, lse, grad)
        for out, *chunk in zip(*(x.split(CrossEntropyFunction.chunk) for x in columns), strict=True):
            out.copy_(ops.cross_entropy_grad(*chunk))
        return result, None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, tp: Axis, vocab_size: int
) -> torch.Tensor:
    """-log softmax(logits)[label] of each token, fp32, the same on all ranks of tp.

    logits: `[s, b, V/tp]`, labels: `[b, s]` -> `[b, s]`. Columns past `vocab_size` are padding and take no
    part, so the loss does not depend on tp. Two all-reduces over tp: `s*b` maxima, then `2*s*b` sums.
    """
    b, s = labels.shape
    width = logits.shape[-1]
    first = tp.rank * width
    real = min(max(vocab_size - first, 0), width)
    loss = CrossEntropyFunction.apply(logits.flatten(0, 1), labels.t().flatten() - first, tp, real)
    return loss.view(s, b).t()

"""A small network for the tests of data parallelism: every kind of parameter and gradient, nothing else.

    ids -> table (tied, padded vocabulary) -> layers of odd sizes: norm weight, matrix, bias -> table -> loss

Matrices write their gradients themselves, norms and biases leave them to autograd, the table has two
contributions. Without buckets all gradients go to autograd, so that plain torch can train a twin.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanomegatron.build import buckets_class
from nanomegatron.config.settings import OptimizerConfig, ParallelConfig, PrecisionConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.optim import Optimizer
from nanomegatron.param import Init, ParamSpec, accumulate, add_product, new_parameter, replica, shard

VOCAB, WIDTH, SAMPLES, LENGTH = 13, 10, 12, 5
ONE = Axis.single()


class Times(torch.autograd.Function):
    """x W^T, whose weight gradient goes where the contract says."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, accumulate(weight, lambda out, beta: add_product(out, grad, x, beta))


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, table):
        ctx.save_for_backward(ids, table)
        return table[ids]

    @staticmethod
    def backward(ctx, grad):
        ids, table = ctx.saved_tensors
        hot = F.one_hot(ids.flatten(), len(table)).to(grad.dtype)
        return None, accumulate(table, lambda out, beta: add_product(out, hot, grad.flatten(0, -2), beta))


def parameter(name: str, shape: tuple, dtype=torch.float32, fill=None, **spec) -> nn.Parameter:
    part = replica(name, shape, ONE)
    spec = {"decay": len(shape) > 1} | spec
    return new_parameter(ParamSpec((part,), shape, **spec), Init(dtype=dtype, std=0.2), fill)


class Embedding(nn.Module):
    def __init__(self, dtype) -> None:
        super().__init__()
        part = shard("embedding.word_embeddings.weight", (VOCAB, WIDTH), 0, ONE, local_size=16)
        spec = ParamSpec((part,), (16, WIDTH), uses=2, tied=True)
        self.weight = new_parameter(spec, Init(dtype=dtype, std=0.2))

    def forward(self, ids):
        return Lookup.apply(ids, self.weight)


class Layer(nn.Module):
    def __init__(self, i: int, width: int, dtype) -> None:
        super().__init__()
        self.norm = parameter(f"{i}.norm", (WIDTH,), dtype, 1.0)
        self.inner = parameter(f"{i}.inner", (width, WIDTH), dtype)
        self.outer = parameter(f"{i}.outer", (WIDTH, width), dtype)
        self.bias = parameter(f"{i}.bias", (width,), dtype, 0.1)

    def forward(self, x):
        return x + Times.apply(torch.tanh(Times.apply(x * self.norm, self.inner) + self.bias), self.outer)


class Output(nn.Module):
    def __init__(self, weight) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x, labels):
        logits = Times.apply(x, self.weight)[..., :VOCAB].float()
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


class Toy(nn.Module):
    """`widths`: of the inner layers. ids `[b, s]` and labels -> the summed loss."""

    def __init__(self, widths=(7, 129, 33), dtype=torch.float32) -> None:
        super().__init__()
        self.embedding = Embedding(dtype)
        self.layers = nn.ModuleList(Layer(i, width, dtype) for i, width in enumerate(widths))
        self.output = Output(self.embedding.weight)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(x, labels)


def samples() -> torch.Tensor:
    return torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3))


CONFIG = OptimizerConfig(lr=0.02, weight_decay=0.1, clip_grad=1.0, adam_eps=1e-4)
RATES = [[0.02 / (n + 1) for n in range(9)]] * 3


def built(mesh: Mesh, flags: dict, dtype=torch.float32, config=CONFIG, grad_dtype=torch.float32, model=None):
    """A network, a new one if not given, with its buckets and optimizer; flags: of ParallelConfig."""
    model = model or Toy(dtype=dtype)
    parallel = ParallelConfig(**flags)
    buckets = buckets_class(parallel)(model, parallel, mesh, grad_dtype)
    return model, buckets, Optimizer(buckets, config, PrecisionConfig(), RATES)


def train_step(
    model: nn.Module, buckets: ParamAndGradBuckets, optimizer: Optimizer, mesh: Mesh, microbatches: int = 3
):
    """One step on this rank's share of the samples; returns the norm of the gradients."""
    axis = getattr(model, "axis", mesh.dp_cp)
    mine = samples()[axis.rank :: axis.size]
    buckets.zero_grad_buffer(microbatches)
    for data in mine.tensor_split(microbatches):
        loss = model(data[:, :-1], data[:, 1:]) * (buckets.loss_factor / (SAMPLES * LENGTH))
        loss.backward()
    buckets.finish_grad_sync()
    return optimizer.step(torch.tensor(0.0)).grad_norm


def torch_train(steps: int, model: nn.Module | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same with torch's own AdamW and clipping, all samples at once: norms and weights."""
    model, norms = model or Toy(), []
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == matrices], "weight_decay": decay}
        for matrices, decay in ((True, CONFIG.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=CONFIG.adam_eps)
    for step in range(steps):
        adamw.zero_grad()
        data = samples()
        (model(data[:, :-1], data[:, 1:]) / (SAMPLES * LENGTH)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CONFIG.clip_grad).item())
        for group in adamw.param_groups:
            group["lr"] = RATES[0][step]
        adamw.step()
    return norms, {name: p.detach() for name, p in model.named_parameters()}

"""A small network with experts, for the tests of their gradients, norms and checkpoints.

    ids -> table -> two layers: x + sum over experts of p_e(x) fc2_e(tanh(fc1_e(x))) -> output -> loss

Every rank has samples of its own, tensor-parallel ones too, as under sequence parallelism: gradients of dense
parameters are summands over tp. Each rank holds some experts, or over etp a slice of each, and works for the
tokens of all ranks of ep and etp. The routers keep a bias that no gradient reaches.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanomegatron.comm import gather_seq, scatter_seq
from nanomegatron.mesh import Mesh
from nanomegatron.param import (
    Init,
    ParamSpec,
    accumulate,
    add_product,
    new_parameter,
    replica,
    shard,
    stacked,
)
from tests.checkpoints import ALONE
from tests.toy import VOCAB, WIDTH, Lookup, Times

EXPERTS, INNER = 4, 6


def dense(name: str, shape: tuple, mesh: Mesh, dtype) -> nn.Parameter:
    part = replica(name, shape, mesh.tp, partial_grad=True)
    return new_parameter(ParamSpec((part,), shape), Init(dtype=dtype, std=0.4))


def experts(name: str, mesh: Mesh, dtype) -> nn.Parameter:
    """`[experts / ep * INNER / etp, WIDTH]`: the slices of this rank's experts, one after the other."""
    own = EXPERTS // mesh.ep.size
    names = [name.format(mesh.ep.rank * own + i) for i in range(own)]
    parts = [shard(name, (INNER, WIDTH), 0, mesh.etp) for name in names]
    return new_parameter(stacked(parts, expert=True), Init(dtype=dtype, std=0.4))


class Layer(nn.Module):
    def __init__(self, i: int, mesh: Mesh, dtype) -> None:
        super().__init__()
        self.name, self.mesh = f"{i}.router", mesh
        self.router = dense(f"{self.name}.weight", (EXPERTS, WIDTH), mesh, dtype)
        self.fc1 = experts(f"{i}.experts.{{}}.fc1", mesh, dtype)
        self.fc2 = experts(f"{i}.experts.{{}}.fc2", mesh, dtype)
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def states(self) -> dict[str, torch.Tensor]:
        return {f"{self.name}.bias": self.bias}

    def forward(self, x):
        """x: `[tokens, WIDTH]` of this rank."""
        axes, own = (self.mesh.etp, self.mesh.ep), EXPERTS // self.mesh.ep.size
        probs, tokens = torch.softmax(Times.apply(x, self.router).float() + self.bias, -1).to(x.dtype), x
        for axis in axes:
            probs, tokens = gather_seq(probs, axis), gather_seq(tokens, axis)
        inner = torch.tanh(Times.apply(tokens, self.fc1)).unflatten(-1, (own, -1))
        mine = probs.chunk(self.mesh.ep.size, -1)[self.mesh.ep.rank]
        y = TimesTransposed.apply((inner * mine[..., None]).flatten(-2), self.fc2)
        for axis in reversed(axes):
            y = scatter_seq(y, axis)
        return x + y


class TimesTransposed(torch.autograd.Function):
    """x W, for a weight that is kept transposed."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), accumulate(weight, lambda out, beta: add_product(out, x, grad, beta))


class ExpertToy(nn.Module):
    """ids `[b, s]` and labels -> the summed loss of this rank's tokens."""

    def __init__(self, mesh: Mesh = ALONE, dtype=torch.float32) -> None:
        super().__init__()
        self.axis = mesh.world  # whose ranks have samples of their own
        self.table = dense("table", (VOCAB + 3, WIDTH), mesh, dtype)
        self.layers = nn.ModuleList(Layer(i, mesh, dtype) for i in range(2))
        self.output = dense("output", (VOCAB, WIDTH), mesh, dtype)

    def forward(self, ids, labels):
        x = Lookup.apply(ids, self.table).flatten(0, -2)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(Times.apply(x, self.output).float(), labels.flatten(), reduction="sum")

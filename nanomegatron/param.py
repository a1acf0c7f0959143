"""What a parameter is: a slice of a global tensor with a name, determined by (seed, name).

No other module knows how a weight is cut. Initialisation, checkpoints, conversion, norms and the memory
planner all read `param.spec`:

    fused QKV of rank 1 of 2, local [6, h]           global tensors, each with a name of its own
        rows 0-3   part "...linear_qkv.q"   ----->   q  [8, h]   rows 4-7
        row  4     part "...linear_qkv.k"   ----->   k  [2, h]   row  1
        row  5     part "...linear_qkv.v"   ----->   v  [2, h]   row  1

Fused tensors lay their parts one after the other, never interleaved. A part may be held by several ranks (a
norm by all of the axis, a key/value head by some when there are fewer heads than ranks); the first of them is
its owner, who saves it and counts it in a norm. Where each of them uses it for its own share of the tokens or
heads, each gets a summand of its gradient: `partial`. Rows that only pad the local tensor belong to no part.

The gradient contract. `dp.py` puts a parameter into a bucket, where its `main_grad` is a view. Linear layers
and the embedding write gradients themselves: they add to `main_grad(param)`, report each contribution to the
bucket, and return None to autograd (`accumulate_grad`); every other gradient is moved from `.grad` by a hook.
No hook may sit on a weight whose layer writes its gradient (`spec.writes_grad`): torch runs it even when the
gradient is None. Such layers compute weight gradients through `run_or_defer` (`WeightGradStore`).
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from nanomegatron.mesh import Axis


@dataclass(frozen=True)
class Part:
    """One named global tensor inside a local one, and the slice of it that is here."""

    name: str
    shape: tuple[int, ...]  # of the global tensor, without padding
    axis: Axis = field(default_factory=Axis.single)
    dim: int = 0  # the dimension that is cut over the axis
    start: int = 0  # of this rank's slice along dim, clipped to the global tensor; of a replica all of it
    stop: int = 0
    local_start: int = 0  # where the part begins in the local tensor, along dim 0 if it is one of several
    replicas: int = 1  # neighbouring ranks of the axis that hold the same slice
    partial: Axis | None = None  # each of its ranks gets a summand of the gradient; `dp.py` sums them

    @property
    def owner(self) -> bool:
        """This rank is the first that holds the slice."""
        return self.axis.rank % self.replicas == 0 and (self.partial is None or self.partial.rank == 0)

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the slice begins in the global tensor."""
        return tuple(self.start if d == self.dim else 0 for d in range(len(self.shape)))

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The slice inside the tensor local `[...]`, without padding -> `[...]`, a view"""
        return local.narrow(self.dim, self.local_start, self.stop - self.start)

    def span(self, local_shape: tuple[int, ...]) -> tuple[int, int]:
        """(begin, end) of the slice inside the flattened local tensor, if it is contiguous."""
        if self.dim != 0:
            return 0, math.prod(local_shape)
        row = math.prod(local_shape[1:])
        return self.local_start * row, (self.local_start + self.stop - self.start) * row

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The slice of the global tensor whole `[...]` -> `[...]`, a view"""
        return whole.narrow(self.dim, self.start, self.stop - self.start)


@dataclass(frozen=True)
class ParamSpec:
    """The parts of a local tensor, and how its gradient comes to `main_grad`."""

    parts: tuple[Part, ...]
    local_shape: tuple[int, ...]
    writes_grad: bool = False  # the layer adds to main_grad itself and says so
    uses: int = 1  # contributions in a microbatch: 2 for tied embeddings on one rank, experts of halves
    tied: bool = False  # embedding and output weight in one
    decay: bool = True  # takes part in weight decay: everything but biases and norms
    expert: bool = False  # of experts: its gradients are summed over edp instead of dp x cp

    @property
    def name(self) -> str:
        """The parts' common name, for messages."""
        words = zip(*(part.name.split(".") for part in self.parts))
        return ".".join(each[0] for each in words if len(set(each)) == 1)


@dataclass(frozen=True)
class Init:
    """How new parameters come to be: for a whole model, or with a name and deviation for one layer of it."""

    seed: int = 1234
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    name: str = ""
    std: float = 0.02

    def at(self, name: str, std: float | None = None) -> "Init":
        """The same for a layer inside this one."""
        path = f"{self.name}.{name}" if self.name else name
        return replace(self, name=path, std=self.std if std is None else std)


def shard(
    name: str,
    shape: tuple[int, ...],
    dim: int,
    axis: Axis,
    local_size: int | None = None,
    replicas: Axis | None = None,
) -> Part:
    """The part that this rank holds when `dim` is cut over the axis into slices of `local_size`.

    Equal cuts without a size. The neighbouring ranks `replicas` hold the same slice (key/value heads, when
    there are fewer than ranks), each with a summand of its gradient. Slices that overrun the global tensor
    are clipped to it (padded vocabulary).
    """
    copies = replicas.size if replicas else 1
    local_size = local_size or shape[dim] * copies // axis.size
    start = min(axis.rank // copies * local_size, shape[dim])
    stop = min(start + local_size, shape[dim])
    return Part(name, shape, axis, dim, start, stop, replicas=copies, partial=replicas)


def replica(name: str, shape: tuple[int, ...], axis: Axis, partial: bool = False) -> Part:
    """The part of a tensor that every rank of the axis holds whole, with its gradient or a summand of it."""
    return Part(name, shape, axis, stop=shape[0], replicas=axis.size, partial=axis if partial else None)


def stacked(parts: Iterable[Part], expert: bool = False) -> ParamSpec:
    """Parts one after the other along dim 0, of a linear layer's weight `[n, i]`, or of its bias `[n]`."""
    placed, rows = [], 0
    for part in parts:
        placed.append(replace(part, local_start=rows))
        rows += part.stop - part.start
    shape = (rows, *placed[0].shape[1:])
    is_weight = len(shape) == 2
    return ParamSpec(tuple(placed), shape, writes_grad=is_weight, decay=is_weight, expert=expert)


def new_parameter(spec: ParamSpec, init: Init, fill: float | None = None) -> nn.Parameter:
    """A parameter that is this rank's slice of the same global tensors under any layout.

    Each part is drawn whole in fp32 on `init.device` by a generator seeded with (seed, name), then cut and
    cast: equal to the bit on one kind of device. `fill` sets a constant instead; padding is zero.
    """
    local = torch.zeros(spec.local_shape, dtype=init.dtype, device=init.device)
    for part in spec.parts:
        if fill is not None:
            part.view(local).fill_(fill)
        elif init.device.type != "meta":
            part.view(local).copy_(part.of(draw_normal(part.name, part.shape, init)))
    param = nn.Parameter(local)
    param.spec = spec
    return param


def draw_normal(name: str, shape: tuple[int, ...], init: Init) -> torch.Tensor:
    """The whole global tensor `name` -> `[...]`, fp32, normal with mean 0 and deviation `init.std`"""
    digest = hashlib.sha256(f"{init.seed}:{name}".encode()).digest()
    generator = torch.Generator(init.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, device=init.device).normal_(0.0, init.std, generator=generator)


def main_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Where gradients of the parameter are added now -> `[...]` of its shape, or None without a bucket.

    A bucket that frees its gradients between microbatches allocates them.
    """
    bucket = getattr(param, "bucket", None)
    if bucket is None:
        return None
    bucket.alloc_grads()
    return param.main_grad


class WeightGradStore:
    """Weight gradients that are computed later than the backward which reaches them.

    A pipeline defers all of a backward and fills its bubbles with them (zero bubble, arXiv 2401.10241); a
    mixture of experts those of one layer, to compute them while other gradients are in flight. The store of
    a parameter, `param.wgrad_store`, defers its work while it has a queue.
    """

    def __init__(self, beside_nccl: bool = False) -> None:
        """beside_nccl: defer only work that shares the GPU with NCCL's kernels."""
        self.queue: list[tuple[nn.Parameter, Callable]] | None = None
        self.beside_nccl = beside_nccl

    @contextmanager
    def collect(self) -> Iterator[list]:
        """A backward in here puts its weight-gradient work into the list, for `run`."""
        self.queue = works = []
        yield works
        self.queue = None

    @staticmethod
    @torch.no_grad()
    def run(works: list[tuple[nn.Parameter, Callable]]) -> None:
        """Compute deferred weight gradients, in the order of the backward."""
        for param, work in works:
            if (grad := work()) is not None:  # there is no bucket
                param.grad = grad if param.grad is None else param.grad + grad


def is_deferred(param: nn.Parameter, beside_nccl: bool = False) -> bool:
    """Whether weight-gradient work of this parameter is deferred now; beside_nccl: as of `run_or_defer`."""
    store = getattr(param, "wgrad_store", None)
    return store is not None and store.queue is not None and (beside_nccl or not store.beside_nccl)


def run_or_defer(
    param: nn.Parameter, work: Callable[[], torch.Tensor | None], beside_nccl: bool = False
) -> torch.Tensor | None:
    """Run `work` now, or leave it in the parameter's store -> the gradient `[...]` for autograd, or None.

    beside_nccl: the work shares the GPU with NCCL's kernels (a grouped matmul does not: its thread blocks
    expect all multiprocessors from the start, and end later by as much as they wait).
    """
    if not is_deferred(param, beside_nccl):
        return work()
    param.wgrad_store.queue.append((param, work))
    return None


def accumulate_grad(param: nn.Parameter, grad: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Add a contribution to `main_grad` and report it -> None, or without a bucket `[...]` for autograd."""
    target, made = main_grad(param), grad()
    if target is None:
        return made
    return run_or_defer(param, lambda: param.bucket.add(param, made), beside_nccl=True)


def accumulate_weight_grad(weight: nn.Parameter, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    """Add the weight gradient grad^T x to `main_grad`. x `[..., i]`, grad `[..., o]` -> `[o, i]` or None"""
    x, grad, target = x.flatten(0, -2), grad.flatten(0, -2), main_grad(weight)
    if target is None:
        return grad.t() @ x
    add_product(target, grad, x)
    weight.bucket.ready(weight)
    return None


def add_product(target: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
    """target += grad^T x; the sums are rounded to the target's type only.

    target `[o, i]`, grad `[t, o]`, x `[t, i]`. On a GPU the matmul itself accumulates; torch has no CPU
    kernel that adds 16 bits into fp32.
    """
    if not x.is_cuda:
        wide = torch.promote_types(x.dtype, target.dtype)
        target.add_(grad.to(wide).t() @ x.to(wide))
    elif target.dtype == x.dtype:
        torch.addmm(target, grad.t(), x, out=target)
    else:
        torch.addmm(target, grad.t(), x, out_dtype=target.dtype, out=target)


def scaled_std(std: float, num_layers: int) -> float:
    """Standard deviation for layers that write into the residual stream (GPT-2; Megatron's scaled init)."""
    return std / math.sqrt(2.0 * num_layers)

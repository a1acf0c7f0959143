"""Parameters as slices of named global tensors, whose initial values depend only on (seed, name).

Only `param.spec` says how a weight is sharded. Initialisation, checkpoints, conversion, norms and the memory
planner all read it:

    fused QKV of rank 1 of 2, local [6, h]           global tensors, each with a name of its own
        rows 0-3   part "...linear_qkv.q"   ----->   q  [8, h]   rows 4-7
        row  4     part "...linear_qkv.k"   ----->   k  [2, h]   row  1
        row  5     part "...linear_qkv.v"   ----->   v  [2, h]   row  1

A fused tensor holds its parts one after the other, never interleaved. Several ranks may hold the same part (a
norm: all of the axis; a key/value head: some, when heads are fewer than ranks); the first of them is its
owner, which saves it and counts it in norms. If each of them uses it for its own tokens or heads, each has a
partial sum of its gradient: `partial`. Rows that only pad the local tensor belong to no part.

The gradient contract. `dp.py` puts a parameter into a bucket, where its `main_grad` is a view. Linear layers
and the embedding write gradients themselves: they add to `main_grad(param)`, report each contribution to the
bucket, and return None to autograd (`accumulate_grad`); every other gradient is moved from `.grad` by a hook.
The first contribution of a step overwrites the last step's gradient: a matmul that can do so asks
`grad_to_write`; for others `main_grad` zeroes it before they add. (0 + x is x, but for the sign of zero.)
No hook may sit on a parameter whose layer writes its gradient (`spec.writes_grad`): torch runs it even when
the gradient is None. Such layers compute weight gradients through `run_or_defer` (`WeightGradStore`).
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from nanomegatron.mesh import Axis


@dataclass(frozen=True)
class Part:
    """This rank's slice of one named global tensor, and its place in the local tensor."""

    name: str
    shape: tuple[int, ...]  # of the global tensor, without padding
    axis: Axis = field(default_factory=Axis.single)
    dim: int = 0  # the dimension that is sharded over the axis
    start: int = 0  # the slice along dim is [start, stop), clipped to the global tensor
    stop: int = 0
    local_start: int = 0  # where the part begins in the local tensor, along dim 0 if it is one of several
    replicas: int = 1  # neighbouring ranks of the axis that hold the same slice
    partial: Axis | None = None  # ranks that each have a partial sum of the gradient; `dp.py` reduces it

    @property
    def owner(self) -> bool:
        """Whether this rank is the first of those that hold the slice."""
        return self.axis.rank % self.replicas == 0 and (self.partial is None or self.partial.rank == 0)

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the slice begins in the global tensor."""
        return tuple(self.start if d == self.dim else 0 for d in range(len(self.shape)))

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The slice inside the tensor local `[...]`, without padding -> `[...]`, a view"""
        return local.narrow(self.dim, self.local_start, self.stop - self.start)

    def span(self, local_shape: tuple[int, ...]) -> tuple[int, int]:
        """(begin, end) of the slice in the flattened local tensor; the whole tensor if `dim` is not 0."""
        if self.dim != 0:
            return 0, math.prod(local_shape)
        row = math.prod(local_shape[1:])
        return self.local_start * row, (self.local_start + self.stop - self.start) * row

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the global tensor whole `[...]` -> `[...]`, a view"""
        return whole.narrow(self.dim, self.start, self.stop - self.start)


@dataclass(frozen=True)
class ParamSpec:
    """The parts of a local tensor, and how its gradient gets into `main_grad`."""

    parts: tuple[Part, ...]
    local_shape: tuple[int, ...]
    writes_grad: bool = False  # the layer adds to main_grad itself and reports it to the bucket
    uses: int = 1  # contributions per microbatch: 2 for tied embeddings on one rank, experts run in halves
    tied: bool = False  # used as embedding and as output weight
    decay: bool = True  # takes part in weight decay: everything but biases and norms
    expert: bool = False  # a weight of experts: gradients are summed over edp instead of dp x cp

    @property
    def name(self) -> str:
        """The parts' common name, for messages."""
        words = zip(*(part.name.split(".") for part in self.parts))
        return ".".join(each[0] for each in words if len(set(each)) == 1)


@dataclass(frozen=True)
class Init:
    """How to initialize new parameters: those of a model, or with `name` and `std` those of one layer."""

    seed: int = 1234
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    name: str = ""
    std: float = 0.02

    def at(self, name: str, std: float | None = None) -> "Init":
        """Return the Init of the sublayer `name`; std: its own, else this one's."""
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
    """Return this rank's part when `dim` is sharded over the axis in slices of `local_size` (None: equal).

    The neighbouring ranks `replicas` hold the same slice (of key/value heads, when there are fewer heads than
    ranks), each with a partial sum of its gradient. Slices past the end of the global tensor are clipped
    (padded vocabulary).
    """
    copies = replicas.size if replicas else 1
    local_size = local_size or shape[dim] * copies // axis.size
    start = min(axis.rank // copies * local_size, shape[dim])
    stop = min(start + local_size, shape[dim])
    return Part(name, shape, axis, dim, start, stop, replicas=copies, partial=replicas)


def replica(name: str, shape: tuple[int, ...], axis: Axis, partial: bool = False) -> Part:
    """Return the part that every rank of the axis holds whole; partial: each has a partial gradient."""
    return Part(name, shape, axis, stop=shape[0], replicas=axis.size, partial=axis if partial else None)


def stacked(parts: Iterable[Part], expert: bool = False) -> ParamSpec:
    """Return the spec of a linear layer's weight `[n, i]` or bias `[n]`, its parts stacked along dim 0."""
    placed, rows = [], 0
    for part in parts:
        placed.append(replace(part, local_start=rows))
        rows += part.stop - part.start
    shape = (rows, *placed[0].shape[1:])
    is_weight = len(shape) == 2
    return ParamSpec(tuple(placed), shape, writes_grad=is_weight, decay=is_weight, expert=expert)


def new_parameter(spec: ParamSpec, init: Init, fill: float | None = None) -> nn.Parameter:
    """Create this rank's slice of a parameter whose global values are the same under any layout.

    Each part is drawn whole in fp32 on `init.device` by a generator seeded with (seed, name), then sliced and
    cast: bitwise equal on one kind of device. `fill` sets a constant instead; padding is zero.
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
    """Return the buffer to add gradients to -> `[...]` in the parameter's shape, or None without a bucket.

    Zeroes it before the first contribution of a step.
    """
    target, overwrite = grad_to_write(param)
    return target.zero_() if overwrite else target


def grad_to_write(param: nn.Parameter) -> tuple[torch.Tensor | None, bool]:
    """`main_grad`, and whether the caller must overwrite it, as the first contribution of a step -> `[...]`

    If the bucket frees its gradients between microbatches, this allocates them again.
    """
    bucket = getattr(param, "bucket", None)
    if bucket is None:
        return None, False
    bucket.alloc_grads()
    return param.main_grad, bucket.first_write(param)


class WeightGradStore:
    """Queues weight gradients, to compute them later than the backward of their layer.

    A pipeline defers all of a backward and fills its bubbles with them (zero bubble, arXiv 2401.10241); a
    mixture of experts defers those of one layer, to overlap them with communication. `param.wgrad_store`, the
    store of a parameter, defers its work while the store has a queue.
    """

    def __init__(self, beside_nccl: bool = False) -> None:
        """beside_nccl: defer only work that can run beside NCCL's kernels."""
        self.queue: list[tuple[nn.Parameter, Callable]] | None = None
        self.beside_nccl = beside_nccl

    @contextmanager
    def collect(self) -> Iterator[list]:
        """Context manager: a backward inside queues its weight-gradient work in the list, for `run`."""
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
    """Whether weight-gradient work of this parameter is deferred now; beside_nccl: as in `run_or_defer`."""
    store = getattr(param, "wgrad_store", None)
    return store is not None and store.queue is not None and (beside_nccl or not store.beside_nccl)


def run_or_defer(
    param: nn.Parameter, work: Callable[[], torch.Tensor | None], beside_nccl: bool = False
) -> torch.Tensor | None:
    """Run `work` now, or queue it in the parameter's store -> the gradient `[...]` for autograd, or None.

    beside_nccl: the work can overlap NCCL's kernels; a store that asks for such work runs any other at once.
    (A grouped matmul cannot: its thread blocks need all multiprocessors at once, and would wait for NCCL's.)
    """
    if not is_deferred(param, beside_nccl):
        return work()
    param.wgrad_store.queue.append((param, work))
    return None


def accumulate_grad(param: nn.Parameter, grad: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Add grad() to `main_grad` and report it, or defer that -> None, or without a bucket grad() `[...]`"""
    if (bucket := getattr(param, "bucket", None)) is None:
        return grad()
    bucket.alloc_grads()
    made = grad()
    return run_or_defer(param, lambda: bucket.add(param, made), beside_nccl=True)


def accumulate_into(param: nn.Parameter, add: Callable[[torch.Tensor], None]) -> torch.Tensor | None:
    """Let add(target) add to `main_grad` and report it, or defer that -> None, or without a bucket `[...]`"""

    def sums(target: torch.Tensor | None) -> torch.Tensor:
        add(made := torch.zeros_like(param) if target is None else target)
        return made

    return run_or_defer(param, lambda: accumulate_sums(param, sums))


def accumulate_sums(
    param: nn.Parameter, sums: Callable[[torch.Tensor | None], torch.Tensor]
) -> torch.Tensor | None:
    """Let sums(target) add to `main_grad` and report it -> None, or without a bucket sums(None) `[...]`"""
    target = main_grad(param)
    grad = sums(target)
    if target is None:
        return grad
    param.bucket.ready(param)
    return None


def accumulate_weight_grad(
    weight: nn.Parameter, x: torch.Tensor, grad: torch.Tensor, tuner: Any = None
) -> torch.Tensor | None:
    """Add the weight gradient grad^T x to `main_grad`. x `[..., i]`, grad `[..., o]` -> `[o, i]` or None"""
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)
    target, overwrite = grad_to_write(weight)
    if target is None:
        return grad.t() @ x
    add_product(target, grad, x, overwrite, tuner)
    weight.bucket.ready(weight)
    return None


def product(a: torch.Tensor, b: torch.Tensor, tuner: Any = None) -> torch.Tensor:
    """a b, by torch or with the algorithm of an `ops.tuner.Tuner`. a `[..., k]`, b `[k, n]` -> `[..., n]`"""
    return a @ b if tuner is None else tuner.product(a, b)


def add_product(
    target: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, overwrite: bool = False, tuner: Any = None
) -> None:
    """target += grad^T x, or with `overwrite` target = grad^T x; sums are rounded once, to the target's type.

    target `[o, i]`, grad `[t, o]`, x `[t, i]`. On a GPU the matmul itself accumulates into target, and reads
    nothing of it to overwrite it; torch has no CPU matmul of 16-bit inputs that adds to fp32. tuner: an
    `ops.tuner.Tuner`, or None.
    """
    if tuner is not None and tuner.add_product(target, grad, x, overwrite):
        return
    beta = 0 if overwrite else 1
    if not x.is_cuda:
        wide = torch.promote_types(x.dtype, target.dtype)
        made = grad.to(wide).t() @ x.to(wide)
        target.copy_(made) if overwrite else target.add_(made)
    elif target.dtype == x.dtype:
        torch.addmm(target, grad.t(), x, beta=beta, out=target)
    else:
        torch.addmm(target, grad.t(), x, beta=beta, out_dtype=target.dtype, out=target)


def scaled_std(std: float, num_layers: int) -> float:
    """std / sqrt(2 num_layers): for layers that write into the residual stream (Megatron's scaled init)."""
    return std / math.sqrt(2.0 * num_layers)

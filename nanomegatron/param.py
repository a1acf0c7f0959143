"""Parameters as slices of named global tensors, whose initial values depend only on (seed, name).

Tests: tests/test_param.py. Page: docs/life-of-a-step.md.

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

The gradient contract. The backward that makes a parameter's gradient calls `accumulate(param, write)`, and
returns the result to autograd. `write(out, beta)` makes out = beta * out + gradient:

    accumulate  --->  now   bucket.grad_buffer            out: main_grad, a view into a bucket (`dp.py`)
        |                   write(out, beta)              beta 0: the step's first overwrites the last step's
        |                   bucket.count                  a bucket that is full may start to reduce
        `--->  later        the same, when a pipeline, or the experts' exchange, runs its queue

beta is chosen, and memory allocated, when `write` runs, not when it is queued: which of the uses of a tied
weight comes first is known only then. With beta 0 also rows that get nothing are cleared (idle experts, words
that no one said). 1-D parameters (biases, norms) are never deferred: their gradients are made beside that of
x. Without a bucket out is a new tensor, which autograd gets. What only autograd makes (of plain torch ops) a
hook of the bucket moves from `.grad`, by the same function. Few need the steps apart: the fused loss writes
in its forward and counts in its backward; a CUDA graph that is replayed writes, and Python only counts.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from nanomegatron.mesh import Axis

Write = Callable[[torch.Tensor, int], None]  # write(out, beta): out = beta * out + gradient


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

    def local_view(self, local: torch.Tensor) -> torch.Tensor:
        """The slice inside the tensor local `[...]`, without padding -> `[...]`, a view"""
        return local.narrow(self.dim, self.local_start, self.stop - self.start)

    def flat_range(self, local_shape: tuple[int, ...]) -> tuple[int, int]:
        """(begin, end) of the slice in the flattened local tensor; the whole tensor if `dim` is not 0."""
        if self.dim != 0:
            return 0, math.prod(local_shape)
        row = math.prod(local_shape[1:])
        return self.local_start * row, (self.local_start + self.stop - self.start) * row

    def global_view(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the global tensor whole `[...]` -> `[...]`, a view"""
        return whole.narrow(self.dim, self.start, self.stop - self.start)


@dataclass(frozen=True)
class ParamSpec:
    """The parts of a local tensor, and what its gradient and the optimizer need to know of it."""

    parts: tuple[Part, ...]
    local_shape: tuple[int, ...]
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
    copies: int = 1,
) -> Part:
    """Return this rank's part when `dim` is sharded over the axis in slices of `local_size` (None: equal).

    `copies` neighbouring ranks hold the same slice (of key/value heads, when there are fewer heads than
    ranks), each with a partial sum of its gradient. Slices past the end of the global tensor are clipped
    (padded vocabulary).
    """
    if local_size is None:
        local_size = shape[dim] * copies // axis.size
    start = min(axis.rank // copies * local_size, shape[dim])
    stop = min(start + local_size, shape[dim])
    holders = axis.neighbours(copies) if copies > 1 else None
    return Part(name, shape, axis, dim, start, stop, replicas=copies, partial=holders)


def replica(name: str, shape: tuple[int, ...], axis: Axis, partial_grad: bool = False) -> Part:
    """Return the part that every rank holds whole; partial_grad: each has a partial sum of its gradient."""
    return Part(name, shape, axis, stop=shape[0], replicas=axis.size, partial=axis if partial_grad else None)


def stacked(parts: Iterable[Part], expert: bool = False) -> ParamSpec:
    """Return the spec of a linear layer's weight `[n, i]` or bias `[n]`, its parts stacked along dim 0."""
    placed = []
    rows = 0
    for part in parts:
        placed.append(replace(part, local_start=rows))
        rows += part.stop - part.start
    shape = (rows, *placed[0].shape[1:])
    return ParamSpec(tuple(placed), shape, decay=len(shape) == 2, expert=expert)


def new_parameter(spec: ParamSpec, init: Init, fill: float | None = None) -> nn.Parameter:
    """Create this rank's slice of a parameter whose global values are the same under any layout.

    Each part is drawn whole in fp32 on `init.device` by a generator seeded with (seed, name), then sliced and
    cast: bitwise equal on one kind of device. `fill` sets a constant instead; padding is zero.
    """
    local = torch.zeros(spec.local_shape, dtype=init.dtype, device=init.device)
    for part in spec.parts:
        if fill is not None:
            part.local_view(local).fill_(fill)
        elif init.device.type != "meta":
            part.local_view(local).copy_(part.global_view(draw_normal(part.name, part.shape, init)))
    param = nn.Parameter(local)
    param.spec = spec
    return param


def replicated(
    init: Init, shape: tuple[int, ...], axis: Axis, partial_grad: bool = False, fill: float | None = None
) -> nn.Parameter:
    """Create a parameter that every rank of the axis holds, as `replica` says; only matrices decay."""
    part = replica(init.name, shape, axis, partial_grad)
    return new_parameter(ParamSpec((part,), shape, decay=len(shape) == 2), init, fill)


def draw_normal(name: str, shape: tuple[int, ...], init: Init) -> torch.Tensor:
    """The whole global tensor `name` -> `[...]`, fp32, normal with mean 0 and deviation `init.std`"""
    digest = hashlib.sha256(f"{init.seed}:{name}".encode()).digest()
    generator = torch.Generator(init.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, device=init.device).normal_(0.0, init.std, generator=generator)


def slot(function: Callable) -> staticmethod:
    """What a module calls as its own, until `pick_variants.py` or `pick_fast_paths.py` gives it another.

    On a GPU most are replaced: see `pick_fast_paths.install`.
    """
    return staticmethod(function)


def accumulate(param: nn.Parameter | None, write: Write) -> torch.Tensor | None:
    """Add a gradient to that of `param`, now or deferred -> None, or without a bucket the gradient `[...]`

    `write(out, beta)` makes out `[...]`, of the parameter's shape, beta * out + gradient; beta is 0 or 1.
    Nothing is to be done for a frozen parameter, and for None.
    """
    if param is None or not param.requires_grad:
        return None
    if is_deferred(param):
        param.wgrad_store.queue.append((param, write))
        return None
    return write_now(param, write)


def write_now(param: nn.Parameter, write: Write) -> torch.Tensor | None:
    """Write and count a contribution to the gradient of `param` -> None, or without a bucket it, `[...]`"""
    bucket = getattr(param, "bucket", None)
    if bucket is None:
        out = torch.empty_like(param)
        write(out, 0)
        return out
    out, beta = bucket.grad_buffer(param)
    write(out, beta)
    bucket.count(param)
    return None


def add_grad(out: torch.Tensor, grad: torch.Tensor, beta: int) -> None:
    """What `write` does with a gradient that is there: out = beta * out + grad. out, grad `[...]`"""
    if beta == 0:
        out.copy_(grad)
    else:
        out.add_(grad)


class WeightGradStore:
    """Queues weight gradients, to compute them later than the backward of their layer.

    A pipeline defers all of a backward and fills its bubbles with them (zero bubble, arXiv 2401.10241); a
    mixture of experts defers those of one layer, to overlap them with communication. `param.wgrad_store`, the
    store of a parameter, defers its work while the store has a queue.
    """

    grouped_matmuls = True  # they, too, can run where the queue does

    def __init__(self) -> None:
        self.queue: list[tuple[nn.Parameter, Write]] | None = None

    @contextmanager
    def collect(self) -> Iterator[list]:
        """Context manager: a backward inside queues its weight gradients in the list, for `run`."""
        self.queue = works = []
        yield works
        self.queue = None

    def takes(self, param: nn.Parameter) -> bool:
        """Whether what is added to the gradient of param `[...]` is queued: of matrices, not of vectors."""
        return self.queue is not None and param.dim() > 1

    @staticmethod
    @torch.no_grad()
    def run(works: list[tuple[nn.Parameter, Write]]) -> None:
        """Compute deferred weight gradients, in the order of the backward.

        Communicates what they wait for (under sequence parallelism a layer's input, over tp), and starts the
        reductions of the buckets that they fill.
        """
        for param, write in works:
            grad = write_now(param, write)
            if grad is not None:  # there is no bucket
                param.grad = grad if param.grad is None else param.grad + grad


def is_deferred(param: nn.Parameter) -> bool:
    """Whether `accumulate` now queues what it adds to the gradient of this parameter `[...]`."""
    store = getattr(param, "wgrad_store", None)
    return store is not None and store.takes(param)


def add_product(out: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, beta: int = 1) -> None:
    """out = beta * out + dy^T x, rounded once, to the type of out. out `[o, i]`, dy `[..., o]`, x `[..., i]`

    On a GPU the matmul itself adds to out, and with beta 0 reads nothing of it; torch has no CPU matmul of
    16-bit inputs that adds to fp32.
    """
    dy = dy.flatten(0, -2)
    x = x.flatten(0, -2)
    if not x.is_cuda:
        wide = torch.promote_types(x.dtype, out.dtype)
        add_grad(out, dy.to(wide).t() @ x.to(wide), beta)
    elif out.dtype == x.dtype:
        out.addmm_(dy.t(), x, beta=beta)
    else:
        torch.addmm(out, dy.t(), x, beta=beta, out_dtype=out.dtype, out=out)


def scaled_std(std: float, num_layers: int) -> float:
    """std / sqrt(2 num_layers): for layers that write into the residual stream (Megatron's scaled init)."""
    return std / math.sqrt(2.0 * num_layers)

"""Collectives over one axis of the mesh: plain ones, and pairs that autograd can differentiate.

Tests: tests/test_comm.py. Page: docs/parallel.md.

Every function takes an `Axis` and is the identity on an axis of size 1. Functions are out of place, except
those whose name ends in _ or that get an `out`; `start_...` returns a Pending. Over an axis, a tensor is in
one of four states. Each differentiable function takes it from one state to another:

    I   the same on every rank, gradient the same      (a replicated weight)
    R   the same on every rank, gradient partial       (the input of a column-parallel matmul)
    V   a different slice on every rank                (a shard)
    P   a partial sum on every rank                    (the result of a row-parallel matmul)

    name              forward                    backward                   state
    copy_to           identity                   all-reduce                 I -> R
    reduce_from       all-reduce                 identity                   P -> I
    gather_seq        all-gather, dim 0          reduce-scatter, dim 0      V -> R
    scatter_seq       reduce-scatter, dim 0      all-gather, dim 0          P -> V
    gather_from       all-gather, last dim       own slice                  V -> I
    scatter_to        own slice, last dim        all-gather                 I -> V
    split_to          own slice, dim 0           all-gather, dim 0          I -> V
    all_to_all        blocks of dim 0 swapped    blocks swapped back        V -> V    as start_all_to_all

Each backward is the adjoint of its forward, `sum <f(x), y> = sum <x, f'(y)>` over the ranks; a tensor that
is the same everywhere counts once. (Megatron's f and g, arXiv 1909.08053; sequence parallelism 2205.05198.)

`axis.observer` sees each collective and the whole tensor on this rank: the input of an all-reduce,
reduce-scatter or all-to-all, the output of an all-gather. Only this module calls torch's collectives, so a
renamed collective is fixed in one place.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # torch before 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

from nanomegatron.mesh import Axis, Link


def _check_divides(x: torch.Tensor, axis: Axis, dim: int) -> None:
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"dim {dim} of {tuple(x.shape)} must be a multiple of the {axis.size} ranks of {axis.name}"
        )


@dataclass(eq=False)
class Pending:
    """Communication in flight: do not change its input or use its result before `wait` has returned.

    works: torch's Work handles, or objects with the same methods; sent `[...]`: input buffers to keep until
    then. On a GPU the current stream waits, not the host. waiting: entered meanwhile, of `axis.observer`.
    """

    result: Any
    works: Sequence = ()
    sent: Sequence = ()
    waiting: AbstractContextManager = nullcontext()

    def wait(self) -> Any:
        """Wait, and return the result; a second call returns immediately."""
        if self.works:
            with self.waiting:
                for work in self.works:
                    work.wait()
        self.works = ()
        self.sent = ()
        return self.result

    @property
    def done(self) -> bool:
        """Whether `wait` would return immediately. Gloo reports completion only through `wait`."""
        return all(work.is_completed() for work in self.works)


def start_send(x: torch.Tensor, link: Link) -> Pending:
    """Begin to send x `[...]` over a link; the receiver gets messages in the order in which they are sent."""
    x = x.contiguous()
    waiting = link.axis.observer.start(link.axis, "send", [x])
    return Pending(x, [dist.isend(x, link.axis.ranks[1], group=link.axis.group)], [x], waiting)


def start_receive(empty: Callable[[], torch.Tensor], link: Link) -> Pending:
    """Begin to receive the next message of a link into `empty()`, a buffer of the message's shape and type.

    On a GPU the receive runs on the link's stream. Until the message arrives, every call that synchronizes
    the GPU blocks (loading a kernel is one): launch the kernels that the message depends on first.
    """
    with torch.cuda.stream(link.stream) if link.stream else nullcontext():
        out = empty()
        waiting = link.axis.observer.start(link.axis, "receive", [out])
        work = dist.irecv(out, link.axis.ranks[0], group=link.axis.group)
    if link.stream:
        out.record_stream(torch.cuda.current_stream())
    return Pending(out, [work], (), waiting)


def start_messages(
    sends: Sequence[tuple[torch.Tensor, int]],
    receives: Sequence[tuple[torch.Tensor, int]],
    result: Any,
    axis: Axis,
) -> Pending:
    """Begin to send and receive several tensors over an axis; `wait` of the Pending returns `result`.

    sends, receives `[...]`: pairs of a contiguous tensor and the other rank, taken modulo the axis's size.
    Messages between two ranks arrive in the order in which they are started.
    """
    sent = [x for x, _ in sends]
    waiting = axis.observer.start(axis, "send", sent)
    messages = [
        *(dist.P2POp(dist.isend, x, axis.ranks[to % axis.size], axis.group) for x, to in sends),
        *(dist.P2POp(dist.irecv, x, axis.ranks[of % axis.size], axis.group) for x, of in receives),
    ]
    works = dist.batch_isend_irecv(messages) if messages else []
    return Pending(result, works, sent, waiting)


def start_ring_exchange(x: torch.Tensor, axis: Axis) -> Pending:
    """Begin to send x `[...]` to the next rank of the axis and to receive the previous rank's, the result."""
    if axis.size == 1:
        return Pending(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return start_messages([(x.contiguous(), axis.rank + 1)], [(out, axis.rank - 1)], out, axis)


def start_all_reduce_(x: torch.Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Begin to reduce x `[...]` over the axis in place."""
    if axis.size == 1:
        return Pending(x)
    waiting = axis.observer.start(axis, "all_reduce", [x])
    work = dist.all_reduce(x, _reduction(x, axis, op), group=axis.group, async_op=True)
    return Pending(x, [work], (), waiting)


def start_all_gather(x: torch.Tensor, axis: Axis, out: torch.Tensor | None = None) -> Pending:
    """Begin to concatenate the ranks' x `[n, ...]` along dim 0, into out `[n*size, ...]`.

    x may be this rank's slice of `out`; on an axis of size 1 it is `out`.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    if out is None:
        out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    waiting = axis.observer.start(axis, "all_gather", [out])
    return Pending(out, [all_gather_single(out, x, group=axis.group, async_op=True)], [x], waiting)


def start_reduce_scatter(
    x: torch.Tensor, axis: Axis, out: torch.Tensor | None = None, op: str = "sum"
) -> Pending:
    """Begin to reduce x `[n, ...]` and write this rank's slice along dim 0 into out `[n/size, ...]`.

    x may be overwritten; `out` may be this rank's slice of it; on an axis of size 1 it is x.
    """
    if axis.size == 1:
        return Pending(x)
    _check_divides(x, axis, 0)
    waiting = axis.observer.start(axis, "reduce_scatter", [x])
    x = x.contiguous()
    if out is None:
        out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    work = reduce_scatter_single(out, x, _reduction(x, axis, op), group=axis.group, async_op=True)
    return Pending(out, [work], [x], waiting)


def start_all_to_all(
    x: torch.Tensor,
    axis: Axis,
    send: list[int] | None = None,
    receive: list[int] | None = None,
    rows: int = 0,
) -> Pending:
    """Begin an all-to-all of x `[n, ...]` along dim 0: rank r gets every rank's r-th block, in rank order.

    Blocks are equal, or `send[r]` rows go to rank r and `receive[r]` rows come from it. The result has
    at least `rows` rows; those after the received ones are undefined.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    waiting = axis.observer.start(axis, "all_to_all", [x])
    received = x.shape[0] if receive is None else sum(receive)
    out = x.new_empty((max(received, rows), *x.shape[1:]))
    work = dist.all_to_all_single(out[:received], x, receive, send, group=axis.group, async_op=True)
    return Pending(out, [work], [x], waiting)


def _reduction(x: torch.Tensor, axis: Axis, op: str) -> dist.ReduceOp:
    """Return torch's sum, avg, max or min. Gloo has no avg: divides x in place and returns sum."""
    if op == "avg" and dist.get_backend(axis.group) == "gloo":
        x.div_(axis.size)
        op = "sum"
    return getattr(dist.ReduceOp, op.upper())


def all_reduce_(x: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """Reduce x `[...]` over the axis in place -> x `[...]`. For buffers with no other use."""
    return start_all_reduce_(x, axis, op).wait()


def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """x `[...]` reduced over the axis -> `[...]`, the same on every rank."""
    return x if axis.size == 1 else all_reduce_(x.clone(memory_format=torch.contiguous_format), axis, op)


def all_gather(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    """The ranks' x `[n, ...]` concatenated -> `[n*size, ...]`, or along another dim."""
    parts = start_all_gather(x, axis).wait()
    return parts if dim == 0 or axis.size == 1 else torch.cat(parts.chunk(axis.size), dim)


def reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's slice along dim 0 of x `[n, ...]` summed over the axis -> `[n/size, ...]`"""
    return start_reduce_scatter(x, axis).wait()


def own_slice(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    """This rank's slice of x `[n, ...]` -> `[n/size, ...]`, or along another dim. Communicates nothing."""
    if axis.size == 1:
        return x
    _check_divides(x, axis, dim)
    return x.chunk(axis.size, dim)[axis.rank].contiguous()


def broadcast_(x: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Overwrite x `[...]` with the x of the axis's rank `source` -> x `[...]`"""
    if axis.size > 1:
        with axis.observer.start(axis, "broadcast", [x]):
            dist.broadcast(x, axis.ranks[source], group=axis.group)
    return x


def read(x: torch.Tensor, axis: Axis) -> Any:
    """Return the numbers of x `[...]`, which the axis's ranks have just communicated; the host waits."""
    with axis.observer.wait():
        return x.tolist()


def any_rank(flag: bool, axis: Axis, device: torch.device) -> bool:
    """Whether the flag is set on any rank of the axis: an all-reduce, for which the host waits."""
    return bool(read(all_reduce_(torch.tensor(float(flag), device=device), axis), axis))


def all_gather_text(text: str, axis: Axis, device: torch.device) -> list[str]:
    """Gather every rank's text, in the order of the axis: lengths first, then bytes. The host waits."""
    data = torch.tensor(list(text.encode(errors="backslashreplace")), dtype=torch.uint8, device=device)
    sizes = read(all_gather(torch.tensor([len(data)], device=device), axis), axis)
    if not any(sizes):
        return [""] * len(sizes)
    padded = torch.nn.functional.pad(data, (0, max(sizes) - len(data)))
    rows = read(all_gather(padded[None], axis), axis)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def barrier(axis: Axis) -> None:
    """Return when every rank of the axis has called this."""
    if axis.size > 1:
        with axis.observer.start(axis, "barrier", []):
            dist.barrier(group=axis.group)


def _pair(name: str, forward: Callable, backward: Callable) -> Callable[..., torch.Tensor]:
    """A differentiable function of (x, axis, *args) from two plain ones, each the other's adjoint."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, axis: Axis, *args: Any) -> torch.Tensor:
            ctx.args = axis, *args
            return forward(x, *ctx.args)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            return backward(grad, *ctx.args), *(None for _ in ctx.args)

    def apply(x: torch.Tensor, axis: Axis, *args: Any) -> torch.Tensor:
        if axis.size == 1:
            return x
        return Pair.apply(x, axis, *args)

    Pair.__name__ = Pair.__qualname__ = apply.__name__ = name
    return apply


def _same(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x.view_as(x)


def _exchange(
    x: torch.Tensor, axis: Axis, send: list[int] | None = None, receive: list[int] | None = None
) -> torch.Tensor:
    return start_all_to_all(x, axis, send, receive).wait()


def _exchange_back(
    grad: torch.Tensor, axis: Axis, send: list[int] | None = None, receive: list[int] | None = None
) -> torch.Tensor:
    return _exchange(grad, axis, receive, send)


copy_to = _pair("copy_to", _same, all_reduce)
reduce_from = _pair("reduce_from", all_reduce, _same)
gather_seq = _pair("gather_seq", all_gather, reduce_scatter)
scatter_seq = _pair("scatter_seq", reduce_scatter, all_gather)
gather_from = _pair("gather_from", partial(all_gather, dim=-1), partial(own_slice, dim=-1))
scatter_to = _pair("scatter_to", partial(own_slice, dim=-1), partial(all_gather, dim=-1))
split_to = _pair("split_to", own_slice, all_gather)
all_to_all = _pair("all_to_all", _exchange, _exchange_back)  # takes (x, axis) or (x, axis, send, receive)

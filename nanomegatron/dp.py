"""Data parallelism: each replica sees different samples, and gradients are summed before the update.

Tests: tests/test_dp.py. Page: docs/parallel.md.

Gradients are summed over d ranks: those of dp x cp, for experts those of edp.

    parameters in reverse order of use, laid into flat buckets

    bucket 0   [ output weight | layer n | pad ]    full first in the backward: reduced first
    bucket 1   [ layer n-1 | ... | layer 1 | pad ]
    bucket 2   [ embedding | pad ]                  read first in the forward: updated and gathered first

A bucket has one flat tensor of parameters and one of gradients; every `param.data` and `param.main_grad` is a
view. Each of d ranks owns a shard of every bucket and updates that shard only (ZeRO, arXiv 1910.02054):

    strategy       shard   gradients                                      bytes a parameter: bf16, grad, fp32
    no_shard       all     all-reduced after the last microbatch          2 + 4 + 12
    optim          1/d     reduce-scattered after the last microbatch     2 + 4 + 12/d

(`zero2.py` reduces after every microbatch.) `Optimizer.step` updates the shards and starts the all-gather of
parameters. Experts have their own buckets.

The loss is already divided by the token count of the whole global batch, so the sum over ranks is the exact
mean; with averaging the loss is multiplied by d (`loss_factor`), which the average divides out. A bucket is
full when it has all gradient contributions of a microbatch (`spec.uses` from each parameter).
(PyTorch DDP, arXiv 2006.15704; main_grad is Megatron-LM's)
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from nanomegatron.comm import Pending, all_reduce_, start_all_gather, start_all_reduce_, start_reduce_scatter
from nanomegatron.config.parallel import ParallelConfig
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.param import Part, accumulate, add_grad

PARAM_ALIGN, SHARD_ALIGN = 64, 128  # in elements: a parameter's begin and a shard's length are multiples


@dataclass(frozen=True)
class Slice:
    """The elements of one part of a parameter that a rank's shard of a bucket holds: a flattened range."""

    param: nn.Parameter
    part: Part
    at: int  # where the range begins in the flattened local slice of the part
    start: int  # the range in the shard is [start, stop)
    stop: int
    saver: bool  # this rank, of those that hold the range, saves it and counts it in norms

    def shard_view(self, shard: torch.Tensor) -> torch.Tensor:
        """The range, a view: shard `[size/ranks]` -> `[stop - start]`"""
        return shard[self.start : self.stop]


def lay_out(params: Iterable[nn.Parameter], multiple: int) -> tuple[list[int], int]:
    """Return where each parameter begins in a flat tensor, and its length, a multiple of `multiple`."""
    begins = []
    end = 0
    for param in params:
        begins.append(math.ceil(end / PARAM_ALIGN) * PARAM_ALIGN)
        end = begins[-1] + param.numel()
    return begins, math.ceil(end / multiple) * multiple


def reduction_axis(param: nn.Parameter, mesh: Mesh) -> Axis:
    """Return the ranks over which a parameter's gradient is summed: edp for experts, else dp x cp."""
    return mesh.edp if param.spec.expert else mesh.dp_cp


def split_into_buckets(params: Iterable[nn.Parameter], size: float) -> list[list[nn.Parameter]]:
    """Split the parameters into lists of at least `size` elements; the last may have fewer.

    A tied embedding, whose gradient is complete only at the end, gets its own list and delays no other. If
    two pipeline stages hold it, both thus shard it equally, so that they can sum the gradients of the shards.
    """
    lists = []
    full = False
    for param in params:
        single = param.spec.tied and (size < math.inf or param.spec.parts[0].partial is not None)
        if not lists or full or single:
            lists.append([])
        lists[-1].append(param)
        full = single or sum(p.numel() for p in lists[-1]) >= size
    return lists


class ShardComm:
    """Reduces gradients over an axis, each rank's shard to this rank, and gathers the updated shards.

    axis: the ranks that sum gradients. shard_axis: those that divide the update. size: bytes of all tensors
    of `zeros` together.
    """

    description = "collectives"  # for the banner
    shared_bytes = 0  # memory that torch's allocator does not count

    def __init__(self, axis: Axis, device: torch.device, size: int) -> None:
        self.axis = axis
        self.shard_axis = axis
        self.device = device

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a whole flat tensor -> `[size]`, to be sharded. All ranks call this in the same order."""
        return torch.zeros(size, dtype=dtype, device=self.device)

    def start_reduce(self, whole: torch.Tensor, op: str) -> Pending:
        """Begin to reduce whole `[size]` over the axis; the result holds this rank's shard of it."""
        own = whole.chunk(self.axis.size)[self.axis.rank]
        return start_reduce_scatter(whole, self.axis, own, op)

    def start_all_gather(self, whole: torch.Tensor) -> Pending:
        """Begin to gather the other ranks' shards of whole `[size]`, in place."""
        own = whole.chunk(self.shard_axis.size)[self.shard_axis.rank]
        return start_all_gather(own, self.shard_axis, whole)

    def wait_for_readers(self) -> None:
        """Make the current stream wait for other ranks that read this rank's tensors; not needed here."""


class ReplicaComm(ShardComm):
    """Without sharding: all-reduces gradients; each rank does the whole update, and nothing is gathered."""

    def __init__(self, axis: Axis, device: torch.device, size: int) -> None:
        super().__init__(axis, device, size)
        self.shard_axis = Axis.single()

    def start_reduce(self, whole: torch.Tensor, op: str) -> Pending:
        """Begin to reduce whole `[size]` over the axis, in place."""
        return start_all_reduce_(whole, self.axis, op)


class GatheredParams:
    """The tensor that is all-gathered after an update: the parameters. (FP8 gathers bytes.)

    whole: the flat tensor that is gathered, `[size]`; shard: this rank's slice of it. param_data: all the
    bucket's parameters, `[size]`, None while they are freed.
    """

    itemsize: int | None = None  # bytes of an element of `whole`; None: those of a parameter
    note = ""  # for the banner

    def __init__(self, bucket: "Bucket") -> None:
        self.whole = bucket.comm.zeros(bucket.size, bucket.dtype)
        self.shard = self.whole[bucket.shard]
        self.param_data = self.whole

    def write(self, main: torch.Tensor, out: torch.Tensor) -> None:
        """Convert this rank's fp32 main parameters to the type of `shard`: main, out `[size/ranks]`."""
        out.copy_(main)

    def free_params(self) -> None:
        """Free the parameters if `whole` replaces them during a step; not so here."""

    def rebuild_params(self) -> None:
        """Rebuild freed parameters. All ranks call it together."""


class Bucket:
    """Some parameters and their gradients in flat tensors; `param.bucket` is the bucket of a parameter.

    After the sum `grad_shard` has the gradients of this rank's shard.
    """

    keeps_grads = True  # whole, from step to step, in memory of `comm`
    grads: torch.Tensor | None  # `[size]`, None while they have no memory
    grad_shard: torch.Tensor

    def __init__(
        self,
        params: list[nn.Parameter],
        comm: ShardComm,
        gathered_class: type[GatheredParams],
        buckets: "ParamAndGradBuckets",
    ) -> None:
        self.params = params
        self.axis = comm.axis
        self.shard_axis = comm.shard_axis
        self.comm = comm
        self.buckets = buckets
        self.device = params[0].device
        self.dtype = params[0].dtype
        self.begins, self.size = lay_out(params, SHARD_ALIGN * self.axis.size)
        length = self.size // self.shard_axis.size
        self.shard = slice(self.shard_axis.rank * length, (self.shard_axis.rank + 1) * length)
        self.slices = list(self._slices())
        self.mean_factor = 1.0  # makes the mean over `axis` the sum, of a loss that loss_factor multiplies
        if buckets.op == "avg":
            self.mean_factor = self.axis.size / buckets.loss_factor  # not 1 for experts
        self.pending_gather: Pending | None = None
        self.gathered = gathered_class(self)  # allocates the parameters
        self._move_params()
        self.init_grads()
        self.start_step(1)

    def _move_params(self) -> None:
        """Make each parameter a view of `param_data`; have what autograd makes moved to its gradient."""
        for param, view in zip(self.params, self.views(self.gathered.param_data), strict=True):
            view.copy_(param.detach())
            param.data = view
            param.bucket = self
            param.register_post_accumulate_grad_hook(_move_grad)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of each parameter's elements in flat `[size]` -> `[...]`, in its shape."""
        return [flat[b : b + p.numel()].view(p.shape) for b, p in zip(self.begins, self.params, strict=True)]

    def init_grads(self) -> None:
        """Allocate the gradients, and `grad_shard` in them."""
        self.set_grads(self.comm.zeros(self.size, self.buckets.grad_dtype))
        self.grad_shard = self.grads[self.shard]

    def set_grads(self, grads: torch.Tensor) -> None:
        """Make grads `[size]` the gradients, and each `main_grad` a view of them."""
        self.grads = grads
        for param, view in zip(self.params, self.views(grads), strict=True):
            param.main_grad = view

    def start_step(self, microbatches: int) -> None:
        """Reset the counts, for a step of `microbatches`; a parameter's first contribution overwrites."""
        self.microbatches = microbatches
        self.counts = Counter()
        self.done = 0  # microbatches of which every parameter has all contributions
        self.lacking = len(self.params)  # parameters without all of microbatch done + 1
        self.unwritten = set(self.params)  # with gradients of the last step

    def grad_buffer(self, param: nn.Parameter) -> tuple[torch.Tensor, int]:
        """Where to write a gradient -> `[...]`, and beta, 0 for a parameter's first one of a step"""
        beta = 0 if param in self.unwritten else 1
        self.unwritten.discard(param)
        return param.main_grad, beta

    def count(self, param: nn.Parameter) -> None:
        """Count a contribution that has been written. Raises RuntimeError for one too many."""
        self.unwritten.discard(param)
        self.counts[param] += 1
        if self.counts[param] > self.microbatches * param.spec.uses:
            raise RuntimeError(
                f"{param.spec.name}: gradient number {self.counts[param]}, where each of {self.microbatches} "
                f"microbatches has {param.spec.uses}; give zero_grad_buffer() the number that follows"
            )
        if self.counts[param] == (self.done + 1) * param.spec.uses:
            self.lacking -= 1
        if self.lacking == 0:
            self.done += 1
            self.lacking = len(self.missing(self.done + 1))
            self.buckets.on_full(self)

    def missing(self, microbatches: int) -> list[nn.Parameter]:
        """Return the parameters without all contributions of the first `microbatches`."""
        return [p for p in self.params if self.counts[p] < microbatches * p.spec.uses]

    def start_reduce(self, op: str) -> Pending:
        """Begin to sum the gradients over the axis; the result holds this rank's shard."""
        for look in self.buckets.before_reduce.values():
            look(self)
        return self.comm.start_reduce(self.grads, op)

    def start_gather(self) -> None:
        """Begin to all-gather the shards, after each rank has updated its own."""
        self.pending_gather = self.comm.start_all_gather(self.gathered.whole)

    def _slices(self) -> Iterator[Slice]:
        saver = self.shard_axis.size > 1 or self.axis.rank == 0
        for first, param in zip(self.begins, self.params, strict=True):
            for part in param.spec.parts:
                begin, end = (first + n for n in part.flat_range(param.spec.local_shape))
                start = max(begin, self.shard.start)
                stop = min(end, self.shard.stop)
                if start < stop:
                    yield Slice(
                        param,
                        part,
                        at=start - begin,
                        start=start - self.shard.start,
                        stop=stop - self.shard.start,
                        saver=part.owner and saver,
                    )


def wait_params(params: Iterable[nn.Parameter], *_: object) -> None:
    """Wait for the gathers of these parameters that are in flight. What reads parameters calls it first:

    a module in a forward pre-hook (`*_` are the hook's arguments); fused layers and CUDA graphs, which read
    weights without the forward of their modules, by themselves (`fast/fused_layer.py`).
    """
    for param in params:
        bucket = getattr(param, "bucket", None)
        if bucket is not None and bucket.pending_gather is not None:
            bucket.pending_gather.wait()
            bucket.pending_gather = None


def _move_grad(param: nn.Parameter) -> None:
    """Accumulate what autograd has left in `.grad`; nothing if the one who made the gradient has done so."""
    grad, param.grad = param.grad, None
    if grad is not None:
        accumulate(param, lambda out, beta: add_grad(out, grad, beta))


class ParamAndGradBuckets:
    """All parameters and gradients of a model in buckets; sums gradients over replicas, gathers parameters.

        zero_grad_buffer(microbatches=8)
        forward and backward, 8 times
        finish_grad_sync()
        optimizer.step(loss)

    Moves the parameters into flat tensors, so nothing else may hold views of them. The caller multiplies the
    loss by `loss_factor`. `all` is in the order in which gradients become ready. shard_comm: makes the
    `ShardComm` of an axis; gathered: (param, axis) -> a class like `GatheredParams`.
    """

    bucket_class = Bucket

    def __init__(
        self,
        model: nn.Module,
        parallel: ParallelConfig,
        mesh: Mesh,
        grad_dtype: torch.dtype = torch.float32,
        shard_comm: Callable[[Axis, torch.device, int], ShardComm] = ShardComm,
        gathered: Callable[[nn.Parameter, Axis], type[GatheredParams]] | None = None,
    ) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.strategy = parallel.sharding
        self.grad_dtype = grad_dtype
        self.overlap_reduce = parallel.overlap_grad_reduce
        self.overlap_gather = parallel.overlap_param_gather
        self.world = mesh.world
        self.op = "avg" if parallel.ddp_average_in_collective else "sum"
        self.loss_factor = mesh.dp_cp.size if parallel.ddp_average_in_collective else 1
        self.in_flight: list[tuple[Bucket, Pending]] = []
        self.before_reduce: dict[str, Callable[[Bucket], None]] = {}  # to see gradients before the sum
        self.all: list[Bucket] = []
        self.comms: list[ShardComm] = []
        self._build_buckets(parallel, mesh, shard_comm, gathered)
        self.shared_bytes = sum(comm.shared_bytes for comm in self.comms)
        self.partial = self._partial_grads()
        if self.overlap_gather:
            self._wait_in_forward_hooks(model)

    def _build_buckets(
        self, parallel: ParallelConfig, mesh: Mesh, shard_comm: Callable, gathered: Callable | None
    ) -> None:
        """Move the parameters into buckets: those that are summed over the same ranks, of one type."""
        make_comm = ReplicaComm if self.strategy == "no_shard" else shard_comm
        ready_order = {param: i for i, param in enumerate(reversed(self.params))}
        groups: dict[tuple, list[nn.Parameter]] = {}
        for param in ready_order:
            axis = reduction_axis(param, mesh)
            kind = gathered(param, axis) if gathered else GatheredParams
            groups.setdefault((axis, param.dtype, kind), []).append(param)

        for (axis, dtype, kind), params in groups.items():
            members = split_into_buckets(params, parallel.bucket_size(axis.size))
            elements = sum(lay_out(m, SHARD_ALIGN * axis.size)[1] for m in members)
            grad_itemsize = self.grad_dtype.itemsize if self.bucket_class.keeps_grads else 0
            itemsize = (kind.itemsize or dtype.itemsize) + grad_itemsize
            comm = make_comm(axis, params[0].device, elements * itemsize)
            self.comms.append(comm)
            self.all += [self.bucket_class(m, comm, kind, self) for m in members]

        self.all.sort(key=lambda bucket: ready_order[bucket.params[-1]])

    def _partial_grads(self) -> dict[Axis, list[torch.Tensor]]:
        """This rank's gradients that still lack other ranks' tokens or heads, by the axis to sum over."""
        partial: dict[Axis, list[torch.Tensor]] = {}
        for bucket, piece in self.slices():
            if piece.part.partial is not None:
                partial.setdefault(piece.part.partial, []).append(piece.shard_view(bucket.grad_shard))
        return partial

    def _wait_in_forward_hooks(self, model: nn.Module) -> None:
        """Let each module wait for its own parameters; what reads them past it calls `wait_params` itself."""
        for module in model.modules():
            if own := list(module.parameters(recurse=False)):
                module.register_forward_pre_hook(functools.partial(wait_params, own))

    def zero_grad_buffer(self, microbatches: int = 1) -> None:
        """Let first contributions overwrite; call it before the first of an iteration's `microbatches`."""
        self.finish_reductions()
        for comm in self.comms:
            comm.wait_for_readers()
        for bucket in self.all:
            bucket.gathered.free_params()
            bucket.start_step(microbatches)

    def on_full(self, bucket: Bucket) -> None:
        """Called when a bucket has all contributions of a microbatch."""
        if bucket.done == bucket.microbatches and self.overlap_reduce:
            self.in_flight.append((bucket, bucket.start_reduce(self.op)))

    def start_reductions(self) -> None:
        """Start the sums of all buckets, unless each has started in the backward."""
        if not self.overlap_reduce:
            self.in_flight.extend([(bucket, bucket.start_reduce(self.op)) for bucket in self.all])

    def finish_reductions(self) -> None:
        """Wait for the sums in flight; a mean over dp x cp is made one of the sum over edp for experts."""
        for bucket, pending in self.in_flight:
            pending.wait()
            if bucket.mean_factor != 1.0:
                bucket.grad_shard.mul_(bucket.mean_factor)
        self.in_flight.clear()

    def finish_grad_sync(self) -> None:
        """Finish the sums over replicas, then those of partial gradients; then each `grad_shard` is final.

        Communicates the gradients once over dp x cp or edp, and the shard's partial gradients in one
        all-reduce per axis: tp (norms under sequence parallelism), ranks that share a key/value head, `embed`
        (tied embeddings). Raises RuntimeError for missing gradients (a layer was not used, or has not called
        `accumulate`), and for parameters whose gather was not waited for: they were read without the forward
        of the module that owns them.
        """
        if missing := [p.spec.name for b in self.all for p in b.missing(b.microbatches)]:
            raise RuntimeError(f"no gradient for {', '.join(missing)}, or not one in each microbatch")
        if early := [p.spec.name for bucket in self.all if bucket.pending_gather for p in bucket.params]:
            raise RuntimeError(f"{', '.join(early)}: read without the forward of the module that owns them")
        self.start_reductions()
        self.finish_reductions()
        for axis, pieces in self.partial.items():
            summed = all_reduce_(torch.cat(pieces), axis)
            torch._foreach_copy_(pieces, list(summed.split([len(piece) for piece in pieces])))

    def wait_params(self) -> None:
        """On all ranks: wait for gathers, and rebuild freed parameters, until `zero_grad_buffer`."""
        wait_params(self.params)
        for bucket in self.all:
            bucket.gathered.rebuild_params()

    def slices(self) -> Iterator[tuple[Bucket, Slice]]:
        """Yield (bucket, slice) for all that this rank's shards hold, in the order of the forward."""
        for bucket in reversed(self.all):
            for piece in reversed(bucket.slices):
                yield bucket, piece

"""Data parallelism: every replica sees other samples, their gradients are summed before the update.

    parameters in reverse order of use, laid into flat buckets

    bucket 0   [ output weight | layer n | . ]      full first in the backward: reduced first
    bucket 1   [ layer n-1 | ... | layer 1 | . ]
    bucket 2   [ embedding | . ]                    read first in the forward: updated and gathered first

A bucket has one flat tensor of parameters and one of gradients; every `param.data` and `param.main_grad` is a
view. Each of d ranks is given a shard of every bucket, which it alone updates (ZeRO, arXiv 1910.02054):

    strategy       shard   gradients                                      bytes a parameter in bf16
    no_shard       all     all-reduced                                    2 + 4 + 12
    optim          1/d     reduce-scattered after the last microbatch     2 + 4 + 12/d
    optim_grads    1/d     reduce-scattered after every microbatch        2 + 16/d, and a few buckets in use

`optim_grads` takes memory for a bucket's gradients when the first of them is written, adds what the reduction
gives to the shard's fp32 sum, and gives the memory back. Both all-gather the parameters after the update.
The weights of FP8 layers have buckets of their own, of whose casts `dp_bucket.py` tells, and so have those of
experts: an expert is on fewer ranks than a dense weight, and those that hold it share all of its work (edp).

The loss is already divided by the token count of the whole global batch, so the sum over ranks is the exact
mean; averaging in the collective undoes itself (`grad_scale`). A bucket is full when every parameter has had
all its contributions (`spec.uses` a microbatch). (PyTorch DDP, arXiv 2006.15704; main_grad is Megatron-LM's)
"""

import functools
import math
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from nanomegatron.comm import Pending, all_reduce_
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.dp_bucket import SHARD_ALIGN, Bucket, Slice, fp8_layer, lay_out, written_in_fp8
from nanomegatron.fast.peer_memory import PeerShards
from nanomegatron.mesh import Axis, Mesh

IN_FLIGHT = 2  # reductions of `optim_grads` under way, each with a bucket's gradients


def reduction_axis(param: nn.Parameter, mesh: Mesh) -> Axis:
    """Whose ranks hold a parameter, each with a summand of its gradient: of dense ones all of dp x cp."""
    return mesh.edp if param.spec.expert else mesh.dp_cp


def split(params: Iterable[nn.Parameter], size: float) -> Iterator[list[nn.Parameter]]:
    """The parameters in lists of at least `size` elements, the last perhaps of fewer.

    A tied embedding, full at the very end, holds up nobody else; and where two pipeline stages have one, both
    cut it up alike, since they sum their shards' gradients.
    """
    current: list[nn.Parameter] = []
    for param in params:
        alone = param.spec.tied and (size < math.inf or param.spec.parts[0].partial is not None)
        if alone and current:
            yield current
            current = []
        current.append(param)
        if alone or sum(p.numel() for p in current) >= size:
            yield current
            current = []
    if current:
        yield current


def bucket_size(parallel: ParallelConfig, ranks: int) -> float:
    """Elements of a bucket; without a wish large enough to keep a network busy, or everything in one."""
    many = parallel.overlap_grad_reduce or parallel.overlap_param_gather or parallel.sharding == "optim_grads"
    return parallel.ddp_bucket_size or (max(40_000_000, 1_000_000 * ranks) if many else math.inf)


class Buckets:
    """All gradients of a model in buckets, summed over the replicas; and the parameters, gathered from them.

    buckets.zero(microbatches=8)   forward and backward, 8 times   buckets.grad_sync()   optimizer.step(loss)

    Re-points the parameters into flat tensors, so nothing else may hold views of them. `grad_scale` is to be
    multiplied into the loss. The order of `all` is that in which gradients become ready.
    """

    def __init__(
        self,
        model: nn.Module,
        parallel: ParallelConfig,
        mesh: Mesh,
        grad_dtype: torch.dtype = torch.float32,
        peer_access=None,
    ) -> None:
        self.peer_access = peer_access
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.strategy, self.grad_dtype = parallel.sharding, grad_dtype
        self.overlap_reduce, self.overlap_gather = parallel.overlap_grad_reduce, parallel.overlap_param_gather
        self.pooled = self.strategy == "optim_grads"
        sharded = self.strategy != "no_shard"
        self.world = mesh.world
        self.op = "avg" if parallel.ddp_average_in_collective else "sum"
        self.grad_scale = mesh.dp_cp.size if parallel.ddp_average_in_collective else 1
        self.flying: deque[tuple[Bucket, Pending]] = deque()
        self.all: list[Bucket] = []
        self.peers: list[PeerShards] = []
        groups: dict[tuple, list[nn.Parameter]] = {}
        for param in reversed(self.params):
            kind = reduction_axis(param, mesh), param.dtype, fp8_layer(param) is not None
            groups.setdefault(kind, []).append(param)
        for (axis, *_), params in groups.items():
            shards = axis if sharded else Axis.single()
            members = list(split(params, bucket_size(parallel, axis.size)))
            peers = self._peers(members, shards)
            self.all += [Bucket(m, axis, shards, grad_dtype, self.pooled, self._full, peers) for m in members]
        place = {param: i for i, param in enumerate(reversed(self.params))}
        self.all.sort(key=lambda bucket: max(place[param] for param in bucket.params))
        self.partial: dict[Axis, list[torch.Tensor]] = {}
        for bucket, piece in self.slices():
            if piece.part.partial is not None:
                self.partial.setdefault(piece.part.partial, []).append(piece.of(bucket.grad_shard))
        for module in model.modules() if self.overlap_gather else ():
            needed = dict.fromkeys(p.bucket for p in module.parameters(recurse=False) if p.requires_grad)
            if needed:
                module.register_forward_pre_hook(functools.partial(_wait, tuple(needed)))

    def _peers(self, members: list[list[nn.Parameter]], shards: Axis) -> PeerShards | None:
        """Memory that copy engines can move shards in, where that is asked to hide and the GPUs allow it."""
        device = self.params[0].device
        overlap = self.overlap_reduce or self.overlap_gather
        if shards.size == 1 or not overlap or self.peer_access is None or self.peer_access.error(shards):
            return None
        size = 0
        for params in members:
            elements = lay_out(params, SHARD_ALIGN * shards.size)[1]
            each = 1 if written_in_fp8(params, shards) else params[0].dtype.itemsize
            size += elements * (each + self.grad_dtype.itemsize * (not self.pooled))
        self.peers.append(PeerShards(shards, device, size))
        return self.peers[-1]

    def slices(self) -> Iterator[tuple[Bucket, Slice]]:
        """What this rank's shards hold, in the order of the forward."""
        for bucket in reversed(self.all):
            for piece in reversed(bucket.slices):
                yield bucket, piece

    def zero(self, microbatches: int = 1) -> None:
        """Forget all gradients: before the first of `microbatches` of an iteration."""
        self._land()
        for peers in self.peers:
            peers.settle()
        for bucket in self.all:
            bucket.release()
            bucket.grad_shard.zero_() if self.pooled else bucket.grads.zero_()
            bucket.expect(microbatches)

    def _full(self, bucket: Bucket, last: bool) -> None:
        if self.pooled or (last and self.overlap_reduce):
            self.flying.append((bucket, bucket.reduce(self.op)))
        if self.pooled:
            bucket.close()
            self._land(IN_FLIGHT if self.overlap_reduce else 0)

    def _land(self, left: int = 0) -> None:
        """Take in the results of reductions, the oldest first, until `left` are under way."""
        while len(self.flying) > left:
            bucket, pending = self.flying.popleft()
            summed = pending.wait()
            share = bucket.axis.size / self.grad_scale if self.op == "avg" else 1.0  # for experts less than 1
            if self.pooled:
                bucket.grad_shard.add_(summed, alpha=share)
            elif share != 1.0:
                bucket.grad_shard.mul_(share)

    def grad_sync(self) -> None:
        """Finish the sums over replicas of what has not been summed yet; then those of partial gradients.

        Afterwards each bucket's `grad_shard` is final. Communicates, a rank, the gradients once (a
        microbatch, with optim_grads) over dp x cp, or edp, and the shard's norms and the like in one piece
        over tp.
        Raises RuntimeError where gradients are missing: of a layer that is not used, or one that did not say
        that they are ready. And where parameters were used that may not have been there: those of a module
        whose own forward has not run.
        """
        if missing := [name for bucket in self.all for name in bucket.missing()]:
            raise RuntimeError(f"no gradient for {', '.join(missing)}, or not one in each microbatch")
        if early := [p.spec.name for bucket in self.all if bucket.gather for p in bucket.params]:
            raise RuntimeError(f"{', '.join(early)}: read without the forward of the module that owns them")
        if not (self.overlap_reduce or self.pooled):
            self.flying.extend([(bucket, bucket.reduce(self.op)) for bucket in self.all])
        self._land()
        for axis, pieces in self.partial.items():
            summed = all_reduce_(torch.cat(pieces), axis)
            torch._foreach_copy_(pieces, list(summed.split([len(piece) for piece in pieces])))

    def wait_params(self) -> None:
        """Make sure that all parameters are there, until `zero`: for whoever reads them without a forward.

        Communicates those of which FP8 casts were gathered: all ranks call it alike.
        """
        for bucket in self.all:
            bucket.wait_params()
            bucket.restore()

    @property
    def shared_bytes(self) -> int:
        """Memory that peers read and write, which torch's allocator does not count."""
        return sum(peers.size for peers in self.peers)

    def describe(self) -> str:
        """What is cut, summed and gathered how, in a line; "" where nothing is out of the ordinary."""
        what = {"optim": "optimizer states", "optim_grads": "optimizer states and gradients"}
        said = []
        if self.strategy in what:
            sizes = {bucket.params[0].spec.expert: bucket.shards.size for bucket in self.all}
            experts = f" (of experts {sizes[True]})" if True in sizes else ""
            said.append(f"{what[self.strategy]} cut over {sizes[False]} ranks{experts}")
        if len(self.all) > 1:
            largest = max(bucket.size for bucket in self.all)
            said.append(f"{len(self.all)} buckets of up to {largest:,} elements")
        if self.grad_dtype != torch.float32:
            said.append(f"gradients in {str(self.grad_dtype).removeprefix('torch.')}")
        said += ["gradients reduced during the backward"] * self.overlap_reduce
        said += ["parameters gathered during the forward"] * self.overlap_gather
        if self.overlap_reduce or self.overlap_gather:
            shards = next((bucket.shards for bucket in self.all if bucket.shards.size > 1), None)
            if shards and self.peer_access:
                said += [f"by {self.peer_access.describe(shards, 'collectives')}"]
        how = "cast by the optimizer" if self.strategy == "no_shard" else "gathered as bytes"
        said += [f"FP8 weights {how}"] * any(bucket.fp8 is not None for bucket in self.all)
        return ", ".join(said + ["averaged by the collective"] * (self.op == "avg"))


def _wait(buckets: tuple[Bucket, ...], *_: object) -> None:
    for bucket in buckets:
        bucket.wait_params()

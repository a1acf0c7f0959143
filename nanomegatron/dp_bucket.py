"""A bucket: some parameters and their gradients, flat, with the shard of them that this rank updates.

    data      [ fc2 of layer n | fc1 | . | proj | . | qkv | . ]     parameters; begin at multiples of 64
    grads     [                                               ]     at the same places, in fp32
    fp8       [                                               ]     at the same places, a byte each, or None

The weights of FP8 layers have buckets of their own. Where the optimizer casts them (`fp8.py` says when), it
writes `fp8`. The casts are what is gathered, and from then on they alone are kept: in 16 bits a weight is
made again of the main weights when somebody asks for it (`Buckets.wait_params`), and until then it is all
NaN, so that nobody reads an old one unnoticed.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from nanomegatron.comm import Pending, start_all_gather, start_all_reduce_, start_reduce_scatter
from nanomegatron.fast.peer_memory import PeerShards
from nanomegatron.fp8 import E4M3, Fp8Linear
from nanomegatron.mesh import Axis
from nanomegatron.param import Part, main_grad

PARAM_ALIGN, SHARD_ALIGN = 64, 128  # where a parameter begins; what a shard's length is a multiple of


@dataclass(frozen=True)
class Slice:
    """What a rank's shard of a bucket holds of one part of a parameter: a range of its flattened elements."""

    param: nn.Parameter
    part: Part
    at: int  # where the range begins in the flattened local slice of the part
    start: int  # and where it is in the shard
    stop: int
    saver: bool  # of the ranks that hold this range, the one that saves it and counts it in a norm

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """The range, flat: a view."""
        return shard[self.start : self.stop]


def fp8_layer(param: nn.Parameter) -> Fp8Linear | None:
    """The FP8 layer whose weight this is."""
    return getattr(param, "fp8", None)


def written_in_fp8(params: list[nn.Parameter], shards: Axis) -> bool:
    """Whether the optimizer casts the parameters of a bucket, which it does of none but those in bf16."""
    layer, mixed = fp8_layer(params[0]), params[0].dtype == torch.bfloat16
    return layer is not None and mixed and layer.recipe.cast_by_optimizer(shards.size > 1)


class Bucket:
    """Some parameters and their gradients, flat; every parameter knows its own as `param.bucket`.

    axis: the ranks that sum gradients; shards: those that share the update, an axis of one for no sharding.
    `full(bucket, last)` is called when all parameters have a further microbatch's gradient, `last` after that
    of the last one. With `pooled`, gradients have memory between `open` and `close` only. `fp8`: bytes of the
    casts that the optimizer writes, None where it does not. `write_shard(out)`: set by the optimizer, writes
    this rank's shard of the parameters while `data` is None.
    """

    write_shard: Callable[[torch.Tensor], None]

    def __init__(
        self,
        params: list[nn.Parameter],
        axis: Axis,
        shards: Axis,
        grad_dtype: torch.dtype,
        pooled: bool,
        full: Callable[["Bucket", bool], None],
        peers: PeerShards | None = None,
    ) -> None:
        self.params, self.axis, self.shards = params, axis, shards
        self.grad_dtype, self.full, self.pooled, self.peers = grad_dtype, full, pooled, peers
        self.begins, self.size = lay_out(params, SHARD_ALIGN * axis.size)
        self.device, self.dtype = params[0].device, params[0].dtype
        self.layers = [fp8_layer(param) for param in params]
        casts = written_in_fp8(params, shards)
        self.fp8 = self._zeros(self.size, torch.uint8, shared=True) if casts else None
        self.data: torch.Tensor | None = self._zeros(self.size, self.dtype, shared=not casts)
        for param, view in zip(params, self._views(self.data), strict=True):
            view.copy_(param.detach())
            param.data, param.bucket = view, self
            if not param.spec.writes_grad:
                param.register_post_accumulate_grad_hook(_move_grad)
        length = self.size // shards.size
        self.shard = slice(shards.rank * length, (shards.rank + 1) * length)
        self.slices = list(self._slices())
        self.uses = sum(param.spec.uses for param in params)
        self.grads: torch.Tensor | None = None
        self.gather: Pending | None = None
        if pooled:
            self.close()
            self.grad_shard = torch.zeros(length, device=self.device)
        else:
            self.open()
            self.grad_shard = self.grads[self.shard]
        self.expect(1)

    def _zeros(self, size: int, dtype: torch.dtype, shared: bool) -> torch.Tensor:
        if self.peers is not None and shared:
            return self.peers.zeros(size, dtype)
        return torch.zeros(size, dtype=dtype, device=self.device)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[b : b + p.numel()].view(p.shape) for b, p in zip(self.begins, self.params, strict=True)]

    def _slices(self) -> Iterator[Slice]:
        saver = self.shards.size > 1 or self.axis.rank == 0
        for first, param in zip(self.begins, self.params, strict=True):
            for part in param.spec.parts:
                begin, end = (first + n for n in part.span(param.spec.local_shape))
                start, stop = max(begin, self.shard.start), min(end, self.shard.stop)
                if start < stop:
                    place = (start - begin, start - self.shard.start, stop - self.shard.start)
                    yield Slice(param, part, *place, part.owner and saver)

    def open(self) -> None:
        """Let there be zeroed gradients to add to, if there are none."""
        if self.grads is None:
            self.grads = self._zeros(self.size, self.grad_dtype, shared=not self.pooled)
            for param, view in zip(self.params, self._views(self.grads), strict=True):
                param.main_grad = view

    def close(self) -> None:
        """Let go of the gradients."""
        self.grads = None
        for param in self.params:
            param.main_grad = None

    def expect(self, microbatches: int) -> None:
        """Begin to count contributions anew."""
        self.counts, self.seen, self.microbatches = Counter(), 0, microbatches

    def ready(self, param: nn.Parameter) -> None:
        """A contribution to the gradient of `param` has been added. Raises RuntimeError for one too many."""
        self.counts[param] += 1
        if self.counts[param] > self.microbatches * param.spec.uses:
            raise RuntimeError(
                f"{param.spec.name}: gradient number {self.counts[param]}, where each of {self.microbatches} "
                f"microbatches has {param.spec.uses}; tell zero() how many microbatches follow"
            )
        self.seen += 1
        if self.seen % self.uses == 0:
            self.full(self, self.seen == self.microbatches * self.uses)

    def missing(self) -> list[str]:
        """Parameters that have not had all their contributions."""
        return [p.spec.name for p in self.params if self.counts[p] < self.microbatches * p.spec.uses]

    def reduce(self, op: str) -> Pending:
        """Begin to sum the gradients over the axis; the result holds this rank's shard."""
        if self.shards.size < self.axis.size:
            return start_all_reduce_(self.grads, self.axis, op)
        if self.peers is not None and not self.pooled:
            return self.peers.start_reduce_scatter(self.grads, op)
        return start_reduce_scatter(self.grads, self.axis, self.grads[self.shard], op)

    @property
    def param_shard(self) -> torch.Tensor:
        """This rank's shard of the parameters."""
        return self.data[self.shard]

    def start_gather(self) -> None:
        """Begin to fetch what other ranks have updated: the parameters, or the casts that stand for them."""
        flat = self.data if self.fp8 is None else self.fp8
        if self.peers is not None:
            self.gather = self.peers.start_all_gather(flat)
        else:
            self.gather = start_all_gather(flat[self.shard], self.shards, flat)
        for layer, cast in zip(self.layers, self._views(flat)) if flat is self.fp8 else ():
            layer.take(cast.view(E4M3))
        self.release()

    def wait_params(self) -> None:
        """Make sure that the parameters are there."""
        if self.gather is not None:
            self.gather.wait()
            self.gather = None

    def release(self) -> None:
        """Let go of the parameters in 16 bits where there are casts of them as they are."""
        if self.fp8 is None or self.data is None or self.layers[0].taken is None:
            return
        self.data, nan = None, torch.full((), torch.nan, dtype=self.dtype, device=self.device)
        for param in self.params:
            param.data = nan.expand(param.shape)

    def restore(self) -> None:
        """Make them again, if they have been let go of."""
        if self.data is None:
            self.data = torch.zeros(self.size, dtype=self.dtype, device=self.device)
            self.write_shard(self.param_shard)
            start_all_gather(self.param_shard, self.shards, self.data).wait()
            for param, view in zip(self.params, self._views(self.data), strict=True):
                param.data = view


def _move_grad(param: nn.Parameter) -> None:
    """Add what autograd left in `.grad` to `main_grad`: for norms, biases and position embeddings."""
    main_grad(param).add_(param.grad)
    param.grad = None
    param.bucket.ready(param)


def lay_out(params: Iterable[nn.Parameter], multiple: int) -> tuple[list[int], int]:
    """Where each parameter begins in a flat tensor, and the tensor's length, a multiple of `multiple`."""
    begins, end = [], 0
    for param in params:
        begins.append(math.ceil(end / PARAM_ALIGN) * PARAM_ALIGN)
        end = begins[-1] + param.numel()
    return begins, math.ceil(end / multiple) * multiple

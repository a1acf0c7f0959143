"""Same result as `comm.start_all_gather` and the like, by copy engines that access other GPUs' memory.

Every GPU of an axis has buffers that its peers read and write directly, over NVLink, while matmuls run.

`PeerMemory` is for activations, which tp ranks send as they are computed, and for keys and values, which cp
ranks send each other (`transfers.py`).

    rank 0                  rank 1                  call       n              n + 1          n + 2
    [ slot 0 | slot 1 ]     [ slot 0 | slot 1 ]     slot       0              1              0
         ^                       |                  stream   --work--barrier--work--barrier--work--barrier->
         +--- a copy engine -----+

The copies run on a stream of their own and take no multiprocessor from the matmuls. NVLink multicast is not
used. Buffers come from torch's symmetric memory and grow on demand; growing synchronizes all ranks.
`peer_access.py` finds the axes that can use this.

Gain: on 4 H200 a tp layer's gather and matmul in 1.53 ms where NCCL before it takes 2.06
(benchmarks/results/2026-11-21-tp-overlap-tp4.json).
"""

import math
from typing import Any

import torch

try:
    import torch.distributed._symmetric_memory as symmetric
except ImportError:  # a private module of torch, which may disappear
    symmetric = None

from nanomegatron.mesh import Axis


def share_memory(axis: Axis, device: torch.device, *shape: int) -> tuple[Any, list[torch.Tensor]]:
    """Allocate shared memory of `shape` bytes on each rank of the axis, and map that of all ranks here.

    -> torch's handle, which has a barrier, and each rank's memory, uint8 `[...]`. All ranks call it together.
    """
    own = symmetric.empty(math.prod(shape), dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, axis.group.group_name)
    return handle, [handle.get_buffer(rank, shape, torch.uint8) for rank in range(axis.size)]


class PeerMemory:
    """Buffers of one kind of collective over an axis, as drawn above, and the stream of its copies.

    **Why one barrier a call is enough.** Every call works in one slot, slots alternate, and a call has one
    barrier. `begin` orders a rank's call after all work of its previous call, copies included. So once a
    rank has passed the barrier of call n + 1, no rank writes into the slot of call n on behalf of call n any
    more. With two slots call n + 2, which is after that barrier, may write into the slot of call n, here and
    on the peers, before its own barrier, if the data of call n is not needed after the barrier of call n + 1;
    with more slots, that many calls later. As for every collective, all ranks make the same calls, in the
    same order and of the same sizes.

    `kind` is its name for `axis.observer`. A call is `begin`, work with `views`, `record` and `copy`, and one
    `barrier`: data read after it was written by all ranks before it. A `barrier_before_copies` comes, on all
    ranks, between the previous call's barrier and this one's. Views and events are made once and reused,
    which saves host time (0.14 ms per call instead of 0.2). An event that is recorded again stands for more
    work of the same stream, never for less.
    """

    def __init__(self, axis: Axis, device: torch.device, kind: str, slots: int = 2) -> None:
        self.axis, self.device, self.kind = axis, device, kind
        self.slots, self.slot = slots, 0
        self.size = 0  # bytes of a slot
        self.memory: list[torch.Tensor] = []  # of each rank, [slots, size] bytes
        self._views: dict[tuple, list[torch.Tensor]] = {}

    def begin(self, size: int, *sent: torch.Tensor) -> None:
        """Begin a call that needs `size` bytes on every rank. sent `[...]`: tensors that the observer sees"""
        for x in sent:
            self.axis.observer.start(self.axis, self.kind, [x])
        if size > self.size:
            self.memory, self.size = self.allocate(size), size
            self._views.clear()
        self.wait_copies()
        self.slot = (self.slot + 1) % self.slots

    def views(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """The beginning of this call's slot on each rank -> `[...]`, of this shape and type"""
        key = self.slot, shape, dtype
        if key not in self._views:
            if len(self._views) > 100:  # of sequences of all lengths
                self._views.clear()
            size = math.prod(shape) * dtype.itemsize
            self._views[key] = [m[self.slot, :size].view(dtype).view(shape) for m in self.memory]
        return self._views[key]

    def allocate(self, size: int) -> list[torch.Tensor]:
        """Allocate new slots -> those of each rank, uint8 `[slots, size]`. The device first finishes.

        All ranks call it together; the caller frees the old slots, which by then no rank uses any more.
        """
        torch.cuda.synchronize(self.device)
        self.stream = torch.cuda.Stream(self.device, priority=-1)
        self.ready = [torch.cuda.Event() for _ in range(self.axis.size)]
        self.done = [torch.cuda.Event() for _ in range(self.axis.size)]
        self.last = self.done[0]
        self.handle, memory = share_memory(self.axis, self.device, self.slots, size)
        return memory

    def record(self, k: int) -> torch.cuda.Event:
        """An event after the current stream's work so far, for `copy` to wait for. k: 0 ... axis.size - 1"""
        self.ready[k].record()
        return self.ready[k]

    def copy(self, *copies: tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]) -> list[torch.cuda.Event]:
        """Start out.copy_(source) after the event, for each (event, out, source) -> events of the ends

        copies `[...]`: both tensors of one shape.
        """
        self.done += [torch.cuda.Event() for _ in copies[len(self.done) :]]
        with torch.cuda.stream(self.stream):
            for (ready, out, source), done in zip(copies, self.done):
                ready.wait(self.stream)
                out.copy_(source)
                done.record(self.stream)
        self.last = self.done[len(copies) - 1]
        return self.done[: len(copies)]

    def wait_copies(self) -> None:
        """Make the current stream wait until all copies begun are done."""
        self.last.wait()

    def barrier_before_copies(self, ready: torch.cuda.Event) -> None:
        """Make later copies wait until every rank has reached its event."""
        with torch.cuda.stream(self.stream):
            ready.wait(self.stream)
            self.handle.barrier(channel=0)

    def barrier(self) -> None:
        """Make the current stream wait until the streams of all ranks have reached this point."""
        self.handle.barrier(channel=0)

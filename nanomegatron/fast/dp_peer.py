"""Same result as `dp.ShardComm`, up to rounding in sums of three or more: shards copied by copy engines.

In memory that the GPUs of one machine share, on a separate stream:

    reduce-scatter    barrier; copy my shard of every peer's tensor, a piece at a time; add the pieces to mine
    all-gather        barrier; copy every peer's shard from its tensor into mine

NCCL's kernels take multiprocessors from the matmuls they overlap with; here only the additions do. Gain,
Llama-3-8B, four H200, optimizer states sharded, one microbatch: 883 ms a step, 927 without overlap
(benchmarks/results/2026-11-21-parallel-dp4.json). In an earlier run NCCL's overlap saved 6 ms of 933, that of
copy engines 40 to 44 (docs/log.md, "Gradients and parameters beside a step").
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanomegatron.comm import Pending
from nanomegatron.dp import ShardComm
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.peer_memory import share_memory
from nanomegatron.mesh import Axis


class PeerShards:
    """Flat tensors of which each rank owns a shard, in one block of shared memory per rank.

    All copies run on one stream in the order of the calls, so after a barrier the peers have finished all
    earlier calls. `wait_for_readers` makes sure that no peer still copies from a tensor that is about to be
    overwritten; a shard that is written between a reduce-scatter and the next all-gather is safe by that
    order.
    """

    PIECE = 2**24  # elements
    ALIGN = 128  # bytes; the number of elements of a shard is a multiple of it, too

    def __init__(self, axis: Axis, device: torch.device, size: int) -> None:
        """size: bytes on each rank for all tensors together. All ranks of the axis call it together."""
        self.axis, self.shard_axis, self.device = axis, axis, device
        self.shared_bytes, self.used = size, 0
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.handle, self.arenas = share_memory(axis, device, size)
        self.tensors: dict[int, list[torch.Tensor]] = {}  # by this rank's address: those of all ranks
        self.others = [(axis.rank + step) % axis.size for step in range(1, axis.size)]
        self.buffers: dict[torch.dtype, torch.Tensor] = {}
        self.readers_done, self.reading = torch.cuda.Event(), False
        self.collectives = ShardComm(axis, device, 0)

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of zeros in shared memory -> `[size]`; all ranks call it together, in one order."""
        nbytes = size * dtype.itemsize
        begin, self.used = self.used, self.used + -(-nbytes // self.ALIGN) * self.ALIGN
        views = [arena[begin : begin + nbytes].view(dtype) for arena in self.arenas]
        self.tensors[views[self.axis.rank].data_ptr()] = views
        return views[self.axis.rank].zero_()

    def start_reduce(self, whole: torch.Tensor, op: str) -> Pending:
        """Start to reduce whole `[size]`, giving this rank's shard; by collectives if not from `zeros`."""
        if whole.data_ptr() not in self.tensors:
            return self.collectives.start_reduce(whole, op)
        self.axis.observer.start(self.axis, "reduce_scatter", [whole])
        ranks, mine = self.tensors[whole.data_ptr()], self._shard(whole, self.axis.rank)
        if whole.dtype not in self.buffers:
            self.buffers[whole.dtype] = whole.new_empty(len(self.others), self.PIECE)
        with self._after_barrier():
            for begin in range(0, len(mine), self.PIECE):
                piece = mine[begin : begin + self.PIECE]
                copies = self.buffers[whole.dtype][:, : len(piece)]
                for out, rank in zip(copies, self.others):
                    out.copy_(self._shard(ranks[rank], self.axis.rank)[begin : begin + self.PIECE])
                piece.add_(copies.sum(0))
            if op == "avg":
                mine.div_(self.axis.size)
            self.reading = True
            return Pending(mine, [self.stream.record_event()])

    def start_all_gather(self, whole: torch.Tensor) -> Pending:
        """Start to fetch the other ranks' shards of whole `[size]`, by collectives if not from `zeros`."""
        if whole.data_ptr() not in self.tensors:
            return self.collectives.start_all_gather(whole)
        self.axis.observer.start(self.axis, "all_gather", [whole])
        ranks = self.tensors[whole.data_ptr()]
        with self._after_barrier():
            for rank in self.others:
                self._shard(whole, rank).copy_(self._shard(ranks[rank], rank))
            return Pending(whole, [self.stream.record_event()])

    def wait_for_readers(self) -> None:
        """Make the current stream wait until no peer reads from the tensors that were last reduced."""
        if self.reading:
            with self._after_barrier():
                pass
        self.readers_done.wait()

    def _shard(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        return whole.view(self.axis.size, -1)[rank]

    @contextmanager
    def _after_barrier(self) -> Iterator[None]:
        """Use the stream of the copies, after the work launched so far on all ranks' current streams."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self.handle.barrier(channel=0)
            if self.reading:
                self.readers_done.record()
                self.reading = False
            yield


def peer_shard_comm(peers: PeerAccess, axis: Axis, device: torch.device, size: int) -> PeerShards | ShardComm:
    """The `shard_comm` of an axis: `PeerShards` if its ranks share memory, else `ShardComm`.

    size: bytes of all tensors. All ranks of the axis call it together.
    """
    shared = axis.size > 1 and not peers.error(axis)
    comm = (PeerShards if shared else ShardComm)(axis, device, size)
    comm.description = peers.describe(axis, "collectives")
    return comm

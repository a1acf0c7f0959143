"""Same result as `dp.ShardComm`, to the rounding of sums of three and more: shards moved by copy engines.

In memory that the GPUs of one machine share, on a stream of its own:

    reduce-scatter    barrier; of every peer's tensor copy my shard, a piece at a time; add the pieces to mine
    all-gather        barrier; copy every peer's shard from its tensor into mine

NCCL's kernels take multiprocessors from the matmuls that they overlap with; here only the sums do. Gain,
Llama-3-8B, four H200, optimizer states sharded, one microbatch: 883 ms a step, 927 without overlap
(benchmarks/results/2026-11-21-parallel-dp4.json). In an earlier run NCCL's overlap took 6 ms off 933, that of
copy engines 40 to 44 (docs/log.md, "Gradients and parameters beside a step").
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanomegatron.comm import Pending, count_traffic
from nanomegatron.dp import ShardComm
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.peer_memory import share_memory
from nanomegatron.mesh import Axis


class PeerShards:
    """Flat tensors of which each rank owns a shard, in one block of shared memory a rank.

    All copies run in one stream in the order of the calls, so a barrier means that the peers have done what
    was asked of them before. `wait_for_readers` makes sure that no peer still copies from what is about to be
    overwritten; a shard that is written between a reduce-scatter and the gather after it is safe by that
    order.
    """

    description = "GPU copy engines"
    PIECE = 2**24  # elements
    ALIGN = 128  # bytes: shards are multiples of as many elements

    def __init__(self, axis: Axis, device: torch.device, size: int) -> None:
        """size: bytes on each rank for all tensors together. All ranks of the axis take part."""
        self.axis, self.device = axis, device
        self.shared_bytes, self.used = size, 0
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.handle, self.arenas = share_memory(axis, device, size)
        self.tensors: dict[int, list[torch.Tensor]] = {}  # by address: the ranks' own
        self.others = [(axis.rank + step) % axis.size for step in range(1, axis.size)]
        self.buffers: dict[torch.dtype, torch.Tensor] = {}
        self.readers_done, self.reading = torch.cuda.Event(), False
        self.collectives = ShardComm(axis, device, 0)

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor that all ranks make together -> `[size]`; later ones lie behind it."""
        nbytes = size * dtype.itemsize
        begin, self.used = self.used, self.used + -(-nbytes // self.ALIGN) * self.ALIGN
        views = [arena[begin : begin + nbytes].view(dtype) for arena in self.arenas]
        self.tensors[views[self.axis.rank].data_ptr()] = views
        return views[self.axis.rank].zero_()

    def start_reduce_scatter(self, whole: torch.Tensor, op: str) -> Pending:
        """Begin to reduce whole `[size]`, by collectives if not of `zeros`; the result: this rank's shard."""
        if whole.data_ptr() not in self.tensors:
            return self.collectives.start_reduce_scatter(whole, op)
        count_traffic(self.axis, "reduce_scatter", whole)
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
        """Begin to fetch the other ranks' shards of whole `[size]`; by collectives if not of `zeros`."""
        if whole.data_ptr() not in self.tensors:
            return self.collectives.start_all_gather(whole)
        count_traffic(self.axis, "all_gather", whole)
        ranks = self.tensors[whole.data_ptr()]
        with self._after_barrier():
            for rank in self.others:
                self._shard(whole, rank).copy_(self._shard(ranks[rank], rank))
            return Pending(whole, [self.stream.record_event()])

    def wait_for_readers(self) -> None:
        """Hold up the current stream until no peer reads what it is to reduce."""
        if self.reading:
            with self._after_barrier():
                pass
        self.readers_done.wait()

    def _shard(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        return whole.view(self.axis.size, -1)[rank]

    @contextmanager
    def _after_barrier(self) -> Iterator[None]:
        """Work in the stream of the copies, behind what the current stream has been given, on all ranks."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self.handle.barrier(channel=0)
            if self.reading:
                self.readers_done.record()
                self.reading = False
            yield


class PeerShardComm:
    """Makes the `shard_comm` of each axis for `dp.Buckets`: `PeerShards` where its ranks share memory."""

    def __init__(self, peers: PeerAccess) -> None:
        self.peers = peers

    def __call__(self, axis: Axis, device: torch.device, size: int) -> PeerShards | ShardComm:
        """size: bytes of all tensors. All ranks of the axis call it together."""
        if axis.size == 1 or (error := self.peers.error(axis)):
            return ShardComm(axis, device, size, error if axis.size > 1 else "")
        return PeerShards(axis, device, size)

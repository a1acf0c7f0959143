"""Other result than `cp.SequenceShard`, for `--reset-attention-mask` and `--variable-seq-lengths` over ranks.

A row is a pack of documents, which do not see each other. Each is cut zigzag by itself. The remainder of its
length modulo 2 * cp is distributed one token per rank, round robin across documents: ranks have equal numbers
of tokens, without padding, and a short document may have no tokens on some ranks.

    cp 2    documents of 8, 5 and 3 tokens      0 0 1 1 1 1 0 0 | 0 0 1 1 0 | 1 1 0       rank of each token

A step of the ring is one call of the kernel, with cumulative lengths of the documents' queries and keys. So
is attention to gathered keys: each chunk sees those from the beginning of its document on, or of its window.
A rank of the axis may be a group of neighbours, whose chunks are neighbours (`cp_hierarchy.py`).
(Packs with cumulative lengths over zigzag chunks: Megatron-LM. tests/test_cp_shard.py, tests/test_cp.py)
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from nanomegatron.batch import Batch
from nanomegatron.cp import AttentionBlock, SequenceShard
from nanomegatron.mesh import Axis
from nanomegatron.ops.attention import Block, Grads, ranges, to_device
from nanomegatron.ops.merge import ALL


class EmptyBlock(AttentionBlock):
    """No query here sees a key there: all results are empty, and no kernel is called."""

    def forward(
        self, q: torch.Tensor, kv: Sequence[torch.Tensor], backend: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> `[0, b, n, d]`, `[b, n, 0]`"""
        return q[:0], q.new_empty(*q.shape[1:3], 0)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        kv: Sequence[torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
        backend: str,
    ) -> Grads:
        """-> `[0, b, n, d]`, `[0, b, g, d]`, `[0, b, g, d]`"""
        return q[:0], kv[0][:0], kv[1][:0]


class DocumentShard(SequenceShard):
    """This rank's tokens of a row of documents. bounds: int64 `[docs, 2 * size + 1]`, those of the chunks."""

    @staticmethod
    def of_documents(
        axis: Axis, s: int, types: Sequence[str], device: torch.device, cu_seqlens: np.ndarray
    ) -> "DocumentShard":
        """cu_seqlens: bounds of the documents in the row; tokens past the last one are a document of padding.

        Raises ValueError as `SequenceShard`.
        """
        ends = np.append(np.asarray(cu_seqlens, np.int64), s)
        bounds = ends[:-1, None] + chunk_bounds(np.diff(ends), axis.size)
        return DocumentShard(axis, bounds, types, device)

    def chunks(self, rank: int) -> np.ndarray:
        """Return (begin, end) in the row of a rank's two chunks of each document: `[docs, 2, 2]`."""
        return np.stack((self.bounds[:, rank : rank + 2], self.bounds[:, -2 - rank :][:, :2]), axis=1)

    def token_indices(self, rank: int) -> np.ndarray:
        """Return the positions of a rank's tokens in the row, ascending."""
        begin, end = self.chunks(rank).reshape(-1, 2).T
        return ranges(begin, end)

    def segments(self, own: int, other: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which queries of rank `own` see keys of rank `other`, and which keys, as in `SequenceShard`.

        Both are (begin, end) among the tokens of their rank, for each document that has both: `[2, docs]`.
        """
        q_sizes, k_sizes = (np.diff(self.chunks(rank))[..., 0] for rank in (own, other))
        q_ends, k_ends = (sizes.cumsum().reshape(sizes.shape) for sizes in (q_sizes, k_sizes))
        queries = np.stack(((q_ends - q_sizes)[:, int(other > own)], q_ends[:, 1]))
        keys = np.stack(((k_ends - k_sizes)[:, 0], k_ends[:, int(other >= own)]))
        both = (queries[0] < queries[1]) & (keys[0] < keys[1])
        return queries[:, both], keys[:, both]

    def query_key_rows(self, own: int, other: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of these queries and keys."""
        queries, keys = self.segments(own, other)
        return ranges(queries[0], queries[1]), ranges(keys[0], keys[1])

    def block(self, other: int) -> AttentionBlock:
        """Return attention to the keys of rank `other`, of all documents that both have tokens of."""
        queries, keys = self.segments(self.axis.rank, other)
        if not queries.size:
            return EmptyBlock(slice(0, 0), slice(0, 0), Block())
        block = Block.packed(queries, keys, self.device, self.axis.rank == other)
        rows = (to_device(ranges(begin, end), self.device) for begin, end in (queries, keys))
        return AttentionBlock(next(rows), next(rows), block)

    @cached_property
    def gathered_blocks(self) -> list[AttentionBlock]:
        """The one block for the keys of all ranks in the order of the row."""
        return self.blocks_within(None)

    def blocks_within(self, window: int | None) -> list[AttentionBlock]:
        """Return the one block for gathered keys, only those in the windows of this rank's queries."""
        begin, end = self.chunks(self.axis.rank).reshape(-1, 2).T
        first = np.repeat(self.bounds[:, 0], 2)
        if window is not None:
            first = np.maximum(first, begin - window)
        begin, first, end = (x[begin < end] for x in (begin, first, end))
        block = Block.packed((begin, end), (first, end), self.device, True, window)
        return [AttentionBlock(ALL, to_device(ranges(first, end), self.device), block)]


def chunk_bounds(lengths: np.ndarray, size: int) -> np.ndarray:
    """Cut each document into 2 * size chunks: lengths `[docs]` -> bounds in it `[docs, 2 * size + 1]`.

    The chunks of a document differ by one token at most; all ranks have equal numbers of tokens if the sum of
    lengths is divisible by `size`.
    """
    each, extra = np.divmod(np.asarray(lengths, np.int64)[:, None], 2 * size)
    turn = (np.arange(size) - (extra.cumsum(0) - extra)) % size  # each rank's turn to get an extra token
    first = each + (turn < extra)
    second = each + (turn < extra - size)
    sizes = np.concatenate((0 * each, first, second[:, ::-1]), axis=1)
    return sizes.cumsum(1)


def shard_documents(batch: Batch, axis: Axis, types: Sequence[str], device: torch.device) -> Batch:
    """Return this rank's tokens `[b, s/cp]` of a batch, as `cp.shard_batch`, but of each document."""
    if axis.size == 1:
        return batch
    cu_seqlens = batch.cu_seqlens.numpy()
    return batch.part(DocumentShard.of_documents(axis, len(batch.positions), types, device, cu_seqlens))

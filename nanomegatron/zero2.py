"""ZeRO-2 (`optim_grads`): gradients, too, are kept as shards, and reduced after every microbatch.

Tests: tests/test_dp.py. Page: docs/parallel.md.

    first contribution to a bucket    allocates its gradients, once earlier microbatches are reduced
    last contribution                 starts its reduce-scatter, which frees them; at most IN_FLIGHT hold any
    reduced shard                     is added to `grad_shard`, an fp32 sum over the microbatches

    microbatch            1                               2
    bucket 0    [backward][reduce]                [backward][reduce]
    bucket 1              [backward][reduce]                [backward][reduce]
    gradients   of 0      0 and 1   of 1          of 0      0 and 1   of 1

A rank keeps 2 + 16/d bytes a parameter (bf16, fp32 sums and states), not the 2 + 4 + 12/d of dp.py, and a few
buckets in use. Gradients travel once per microbatch, not once per step. (arXiv 1910.02054)
"""

from typing import NamedTuple

import torch
from torch import nn

from nanomegatron.comm import Pending
from nanomegatron.dp import Bucket, ParamAndGradBuckets

IN_FLIGHT = 2  # reductions in flight at most; each holds a bucket's gradients


class Zero2Bucket(Bucket):
    """A bucket whose gradients have memory only from `alloc_grads` to `free_grads`, in each microbatch."""

    keeps_grads = False
    buckets: "Zero2Buckets"

    def init_grads(self) -> None:
        """Allocate the sum of this rank's shard, and no gradients yet."""
        self.grad_shard = torch.zeros(self.size // self.shard_axis.size, device=self.device)
        self.free_grads()

    def alloc_grads(self) -> None:
        """Allocate zeroed gradients, after those of earlier microbatches are reduced."""
        in_flight = self.buckets.in_flight
        while in_flight and in_flight[0].microbatch <= self.done:
            self.buckets.finish_oldest()
        self.set_grads(torch.zeros(self.size, dtype=self.buckets.grad_dtype, device=self.device))

    def free_grads(self) -> None:
        """Drop the gradients; a reduction in flight keeps them until it is done."""
        self.grads = None
        for param in self.params:
            param.main_grad = None

    def start_step(self, microbatches: int) -> None:
        """Reset the counts and the sum, for a step of `microbatches`."""
        super().start_step(microbatches)
        self.grad_shard.zero_()

    def grad_buffer(self, param: nn.Parameter) -> tuple[torch.Tensor, int]:
        """Allocate if need be -> where to write a gradient `[...]`, and beta 1: its memory is zeroed"""
        if self.grads is None:
            self.alloc_grads()
        return param.main_grad, 1

    def count(self, param: nn.Parameter) -> None:
        """Count a contribution that has been written. Raises RuntimeError for one too many.

        If it was written before the gradients were last freed (by the fused loss), allocates them again.
        """
        if self.grads is None:
            self.alloc_grads()
        super().count(param)


class Reduction(NamedTuple):
    """The reduce-scatter of a bucket's gradients of one microbatch, from 1."""

    bucket: Bucket
    microbatch: int
    pending: Pending


class Zero2Buckets(ParamAndGradBuckets):
    """Buckets that reduce-scatter every microbatch's gradients over dp x cp or edp, and add the shards up.

    With --overlap-grad-reduce up to `IN_FLIGHT` reductions run beside the backward.
    """

    bucket_class = Zero2Bucket
    in_flight: list[Reduction]  # the oldest first

    def on_full(self, bucket: Bucket) -> None:
        """Called when a bucket has all contributions of a microbatch: start its reduction, free it."""
        self.in_flight.append(Reduction(bucket, bucket.done, bucket.start_reduce(self.op)))
        bucket.free_grads()
        most = IN_FLIGHT if self.overlap_reduce else 0
        while len(self.in_flight) > most:
            self.finish_oldest()

    def start_reductions(self) -> None:
        """Nothing: each bucket's has started when it was full."""

    def finish_reductions(self) -> None:
        """Wait for all reductions in flight."""
        while self.in_flight:
            self.finish_oldest()

    def finish_oldest(self) -> None:
        """Wait for the oldest reduction, and add its shard to the sum over the microbatches."""
        bucket, _, pending = self.in_flight.pop(0)
        bucket.grad_shard.add_(pending.wait(), alpha=bucket.mean_factor)

"""The memory that gradients, their sums over replicas and the optimizer's update take beside the states.

    in the backward    optim_grads: buckets in use, and those in flight
    sums, gathers      a CPU's gloo sums a copy of what it reduce-scatters, and all-gathers into another
                       tensor; NCCL does neither
    gradient norm      a CPU's torch casts one part of the gradients at a time to fp64
    update             without the kernel fp32 copies of 16-bit gradients and moments, of one bucket

The second half happens when no activations are left, so it matters to models that are large beside a
microbatch. A run has its peak in the one half or in the other.
"""

import math
from typing import NamedTuple

from nanomegatron.config.settings import Config
from nanomegatron.flops import expert_parameters, layer_matmul_parameters
from nanomegatron.plan.layer import Sizes

REDUCTIONS = 2  # of buckets in flight, with --overlap-grad-reduce: dp.IN_FLIGHT


class Group(NamedTuple):
    """Parameters of a rank that the same ranks share: the dense ones, or those of experts."""

    params: int
    ranks: int  # that sum their gradients, and with sharding divide their states
    fp8: int = 0  # of these, those in FP8

    def bucket(self, config: Config) -> int:
        """Return the elements of its largest bucket, as dp.bucket_size has them."""
        parallel = config.parallel
        overlaps = parallel.overlap_grad_reduce or parallel.overlap_param_gather
        if overlaps or parallel.ddp_bucket_size or parallel.sharding == "optim_grads":
            return min(self.params, parallel.bucket_size(self.ranks))
        return self.params


def pooled_gradients(
    config: Config, sizes: Sizes, groups: list[Group], layers: list[int], rows: int
) -> float:
    """Return the bytes of the buckets in use in a layer's backward, with `optim_grads`.

    layers: the rank's; rows: of its output layer, with whose gradient a backward begins.
    """
    model, parallel = config.model, config.parallel
    if parallel.sharding != "optim_grads" or config.run.eval_only:
        return 0.0
    buckets = parallel.bucket_size(sizes.shards(config)[0]) * (2 + REDUCTIONS * parallel.overlap_grad_reduce)
    widths = {sizes.tp * sizes.ffn(model.moe_layers[layer]) for layer in layers}
    largest = max((layer_matmul_parameters(model, sizes.tp, width) for width in widths), default=0)
    experts = expert_parameters(model, sizes.local_experts, sizes.etp) if model.num_experts else 0
    in_use = max(buckets, largest + experts, rows * model.hidden_size)
    return min(in_use, sum(group.params for group in groups)) * sizes.grad_item


def copies_in_backward(config: Config, sizes: Sizes, groups: list[Group], microbatches: int) -> float:
    """Return the bytes of gloo's copies when a backward begins, with `optim_grads`.

    With overlap the last buckets of the microbatch before are in flight. A bucket that has all gradients is
    reduced when no activations are left: `in_the_end`.
    """
    if config.parallel.sharding != "optim_grads" or not _copies(config, sizes):
        return 0.0
    several = any(group.params > group.bucket(config) for group in groups)
    if not (several or (config.parallel.overlap_grad_reduce and microbatches > 1)):
        return 0.0
    return _in_flight(config, groups) * sizes.grad_item


def in_the_end(config: Config, sizes: Sizes, groups: list[Group], largest: int) -> float:
    """Return the most bytes beside the states behind the last backward: of sums, norm, update or gathers.

    largest: elements of the largest part of a parameter.
    """
    parallel, optimizer = config.parallel, config.optimizer
    copies, pooled = _copies(config, sizes), parallel.sharding == "optim_grads"
    if config.run.eval_only:
        return 0.0
    params = sum(group.params for group in groups)
    summed = 2 * _in_flight(config, groups) if pooled else params  # or all buckets at once
    gathers = params * sizes.item * copies
    if sizes.machine.kernels:
        return max(summed * sizes.grad_item * copies, gathers)
    shards = [group.ranks if parallel.sharding != "no_shard" else 1 for group in groups]
    cast = sum(kind == "bf16" for kind in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype))
    cast += sizes.grad_item < 4 and not pooled  # the sums in shards are fp32
    updates = [
        group.bucket(config) * (4 * cast / ranks - sizes.item * copies)
        for group, ranks in zip(groups, shards, strict=True)
    ]
    most = max(group.params / ranks for group, ranks in zip(groups, shards, strict=True))
    norm = 8 * min(largest, most) * (not sizes.machine.gpu)
    return max(summed * sizes.grad_item * copies, norm, gathers + max(0, *updates))


def _copies(config: Config, sizes: Sizes) -> bool:
    """Whether collectives on buckets make copies: those of gloo on shards."""
    return not sizes.machine.gpu and config.parallel.sharding != "no_shard" and max(sizes.shards(config)) > 1


def _in_flight(config: Config, groups: list[Group]) -> int:
    """Return the elements of the reductions in flight at most, with `optim_grads`."""
    number = REDUCTIONS if config.parallel.overlap_grad_reduce else 1
    buckets = []
    for group in groups:
        size = group.bucket(config)
        buckets += [size] * min(number, math.ceil(group.params / max(size, 1)))
    return min(sum(sorted(buckets)[-number:]), sum(group.params for group in groups))

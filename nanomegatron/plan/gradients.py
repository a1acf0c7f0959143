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
from nanomegatron.plan.flops import expert_parameters, layer_matmul_parameters
from nanomegatron.plan.layer import Sizes

REDUCTIONS = 2  # of buckets in flight, with --overlap-grad-reduce: zero2.IN_FLIGHT


class ParamGroup(NamedTuple):
    """Parameters of a rank that the same ranks share: the dense ones, or those of experts."""

    params: int
    ranks: int  # that sum their gradients, and with sharding divide their states
    fp8: int = 0  # of these, those in FP8

    def bucket(self, config: Config) -> int:
        """Return the elements of its largest bucket."""
        return min(self.params, config.parallel.bucket_size(self.ranks))

    def shards(self, config: Config) -> int:
        """Return the ranks that divide its optimizer states."""
        return 1 if config.parallel.sharding == "no_shard" else self.ranks


def in_backward(
    config: Config, sizes: Sizes, groups: list[ParamGroup], layers: list[int], rows: int, microbatches: int
) -> tuple[float, float]:
    """Return the bytes of the buckets in use in a layer's backward, with `optim_grads`, and of gloo's copies.

    layers: the rank's; rows: of its output layer, with whose gradient a backward begins. (Without overlap
    that is behind the loss, whose temporaries are gone then: this much too much.) Copies: with overlap the
    last buckets of the microbatch before are in flight when a backward begins; a group's only bucket is
    reduced when no activations are left.
    """
    model, parallel = config.model, config.parallel
    if parallel.sharding != "optim_grads":
        return 0.0, 0.0
    buckets = parallel.bucket_size(sizes.shards(config)[0]) * (2 + REDUCTIONS * parallel.overlap_grad_reduce)
    widths = {sizes.tp * sizes.ffn(model.moe_layers[layer]) for layer in layers}
    largest = max((layer_matmul_parameters(model, sizes.tp, width) for width in widths), default=0)
    experts = expert_parameters(model, sizes.local_experts, sizes.etp) if model.num_experts else 0
    in_use = max(buckets, largest + experts, rows * model.hidden_size)
    dense, sparse = groups
    pool = min(in_use, dense.params + sparse.params) * sizes.grad_item
    if sizes.machine.gpu or not _copies(config, sizes):
        return pool, 0.0
    several = any(group.params > group.bucket(config) for group in groups)
    copied = several or (parallel.overlap_grad_reduce and microbatches > 1)
    return pool, _in_flight(config, groups) * sizes.grad_item * copied


def in_the_end(config: Config, sizes: Sizes, groups: list[ParamGroup], rows: int) -> float:
    """Return the most bytes beside the states behind the last backward: of sums, norm, update or gathers.

    rows: of the vocabulary, on this rank.
    """
    optimizer, sharding = config.optimizer, config.parallel.sharding
    if sizes.machine.gpu and sizes.machine.kernels:
        return 0.0
    params, copies = sum(group.params for group in groups), _copies(config, sizes)
    summed = 2 * _in_flight(config, groups) if sharding == "optim_grads" else params  # or all buckets at once
    cast = sum(kind == "bf16" for kind in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype))
    cast += sizes.grad_item < 4 and sharding != "optim_grads"  # whose sums in shards are fp32
    updates, largest = [0.0], 0.0
    for group in groups:
        shards = group.shards(config)
        updates.append(group.bucket(config) * (4 * cast / shards - sizes.item * copies))
        largest = max(largest, group.params / shards)
    norm = 8 * min(largest, _largest_part(sizes, rows)) * (not sizes.machine.gpu)
    return max(summed * sizes.grad_item * copies, norm, params * sizes.item * copies + max(updates))


def _largest_part(sizes: Sizes, rows: int) -> int:
    """Return the elements of the largest part of a parameter."""
    widths = (sizes.ffn(moe) for moe in {*sizes.model.moe_layers})
    experts = sizes.expert_ffn * any(sizes.model.moe_layers)
    return max(rows, sizes.n, experts, *widths) * sizes.model.hidden_size


def _copies(config: Config, sizes: Sizes) -> bool:
    """Whether collectives on buckets make copies: those of gloo on shards."""
    return not sizes.machine.gpu and config.parallel.sharding != "no_shard" and max(sizes.shards(config)) > 1


def _in_flight(config: Config, groups: list[ParamGroup]) -> int:
    """Return the elements of the reductions in flight at most, with `optim_grads`."""
    number = REDUCTIONS if config.parallel.overlap_grad_reduce else 1
    buckets = []
    for group in groups:
        size = group.bucket(config)
        buckets += [size] * min(number, math.ceil(group.params / max(size, 1)))
    return min(sum(sorted(buckets)[-number:]), sum(group.params for group in groups))

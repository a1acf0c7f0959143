"""Predict the time of a training step before it starts: by part, on the pipeline rank that computes longest.

    pipeline rank   | F0 | F1 | F2 |        | B0 | ...        ops of `schedules.py`, their seconds from
                                    bubble                    `layer_time.py`
    at its end      | reduce gradients | AdamW | gather parameters |

    bubble              the step of the simulated pipeline less the ops of that rank and less the messages
    pp messages         of a microbatch, forward through all stages and back: nothing is computed beside them
    dp communication    gradients reduced and parameters gathered over dp x cp (experts: over edp). With the
                        overlap flags all but a bucket of each runs beside the last backward and the first
                        forward, whose kernels then take CONTENTION of that time longer. optim_grads reduces
                        in each microbatch: beside its backward, REDUCTIONS buckets beside the next forward
    optimizer           34 bytes a parameter: gradient (twice), main weight, moments, weight, less where these
                        are in bf16; over the host's link and memory with --optimizer-cpu-offload
    launches            what the host needs beyond the GPU's time, unless in one graph; gaps behind dispatches

A pipeline of many microbatches is simulated with fewer; each further one takes the busiest rank's time.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from nanomegatron.config.check_layout import graph_impl
from nanomegatron.config.settings import Config, padded_vocab_size
from nanomegatron.plan.cluster import Cluster
from nanomegatron.plan.flops import flops_per_iteration, stage_layers
from nanomegatron.plan.gpus import device_peak
from nanomegatron.plan.gradients import REDUCTIONS, ParamGroup
from nanomegatron.plan.layer import ITEMSIZE, Sizes, sizes_of
from nanomegatron.plan.layer_time import (
    EXPERT_KERNELS,
    LAYER_GRAPHS,
    LAYER_KERNELS,
    StageTime,
    layer_times,
    stage_time,
)
from nanomegatron.plan.memory import OpOrder, known_schedule, param_groups, pipeline_order
from nanomegatron.plan.room import Planned
from nanomegatron.schedules import Timeline, simulate

STEP_PARTS = ("matmuls", "attention", "other kernels", "launches", "tp communication", "cp communication")
STEP_PARTS += ("ep communication", "dp communication", "pp messages", "bubble", "optimizer")
CONTENTION = 0.2  # of hidden communication's time, by which kernels beside it take longer
STEP_BYTES = 34  # of the optimizer, a parameter
IDLE_KERNELS = {"allgather": 36, "alltoall": 72}  # launched while the GPU waits, as the host has read sizes


class StepTime(NamedTuple):
    """Seconds of a step by part; communication hidden behind compute is none of them."""

    parts: dict[str, float]
    run: Planned
    cluster: Cluster

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all GPUs."""
        data = self.run.config.data
        return data.global_batch_size * data.seq_length / self.total

    @property
    def tflops_per_gpu(self) -> float:
        """TFLOP/s of a GPU by Megatron's count."""
        config, vocab = self.run.config, padded_vocab(self.run)
        data = config.data
        flops = flops_per_iteration(config.model, vocab, data.seq_length, data.global_batch_size)
        return flops / self.total / self.run.world / 1e12

    @property
    def mfu(self) -> float:
        """Share of the dense peak, in the type of the weights."""
        peak = device_peak(self.cluster.gpu, self.run.config.dtype_name) or self.cluster.peak
        return self.tflops_per_gpu * 1e12 / peak


def padded_vocab(run: Planned) -> int:
    """Return the size of the padded vocabulary."""
    parallel, data = run.config.parallel, run.config.data
    multiple = data.make_vocab_size_divisible_by
    return padded_vocab_size(run.vocab_size, multiple, parallel.tensor_model_parallel_size)


def stage_times(run: Planned, cluster: Cluster) -> tuple[OpOrder, list[StageTime]]:
    """Return the order of a step's ops, and what each stage computes of a microbatch."""
    config, sizes, vocab = run.config, sizes_of(run.config, run.machine), padded_vocab(run)
    layers, times = stage_layers(config, vocab), layer_times(sizes, cluster)
    likes, last = [times.like[own.start : own.stop] for own in layers], len(layers) - 1
    stages = [stage_time(times, like, vocab // sizes.tp, i == 0, i == last) for i, like in enumerate(likes)]
    rows = config.data.micro_batch_size * (config.parallel.data_parallel_size or 1)
    microbatches = max(1, config.data.global_batch_size // rows)
    return pipeline_order(config)._replace(microbatches=microbatches), stages


def step_time(run: Planned, cluster: Cluster, simulated: bool = True) -> StepTime:
    """Predict the step of a run on a cluster's GPUs; the bubble at least, where it is not simulated."""
    config, sizes, vocab = run.config, sizes_of(run.config, run.machine), padded_vocab(run)
    (order, stages), layers = stage_times(run, cluster), stage_layers(config, vocab)
    seconds, microbatches, last = [s.seconds for s in stages], order.microbatches, len(stages) - 1
    slowest = max(order.stages, key=lambda rank: sum(sum(seconds[stage]) for stage in rank))
    micro = sum((stages[stage].ops for stage in slowest), Counter())
    parts = Counter({part: x * microbatches for part, x in micro.items()})
    busy = parts.total()
    if order.pp > 1:
        parts += pipeline_waits(config, cluster, sizes, order, seconds, simulated)
    own = [layer for stage in slowest for layer in layers[stage]]
    parts["launches"] = launches(run, cluster, own, microbatches, busy)
    groups = param_groups(config, sizes, vocab, own, (0 in slowest, last in slowest))
    forward = sum(seconds[stage][0] for stage in slowest)
    backward = micro.total() - forward
    exposed = data_parallel(config, sizes, cluster, groups, forward, backward, microbatches)
    parts["dp communication"] += exposed
    parts["optimizer"] = optimizer(config, cluster, groups)
    return StepTime({part: parts[part] for part in STEP_PARTS}, run, cluster)


def pipeline_waits(
    config: Config, cluster: Cluster, sizes: Sizes, order: OpOrder, seconds: list[tuple], simulated: bool
) -> Counter:
    """Return what a pipeline adds. seconds: of F, B and W of each stage."""
    fewer = min(order.microbatches, 2 * order.pp + order.microbatches % order.pp)
    message, scale = message_time(config, cluster, sizes), max(map(max, seconds))
    costs = tuple(tuple(round(x / scale, 2) for x in ops) for ops in seconds)
    busiest = fewer * max(sum(sum(costs[stage]) for stage in stages) for stages in order.stages)
    given = order._replace(microbatches=fewer), costs, round(message / scale, 3)
    waits = scale * ((simulated_ops(*given).total if simulated else least_time(*given)) - busiest)
    messages = min(waits, 2 * (len(seconds) - 1) * message)
    return Counter({"bubble": max(0.0, waits - messages), "pp messages": max(0.0, messages)})


def message_time(config: Config, cluster: Cluster, sizes: Sizes) -> float:
    """Return the seconds of a message between pipeline ranks."""
    link = cluster.link(2, sizes.tp * sizes.shards(config)[0])
    return sizes.value * sizes.model.hidden_size / config.sequence_cut / link.bandwidth + link.latency


def timeline(run: Planned, cluster: Cluster) -> Timeline:
    """Simulate the ops of all pipeline ranks, in seconds; at most two microbatches for each rank."""
    order, stages = stage_times(run, cluster)
    few = order._replace(microbatches=min(order.microbatches, 2 * order.pp))
    message = message_time(run.config, cluster, sizes_of(run.config, run.machine))
    return simulated_ops(few, [stage.seconds for stage in stages], message)


def simulated_ops(order: OpOrder, costs: Sequence[tuple[float, float, float]], message: float) -> Timeline:
    """Simulate a pipeline. costs: of F, B and W of each stage."""
    by_op = {(kind, stage): cost for stage, ops in enumerate(costs) for kind, cost in zip("FBW", ops)}
    by_op |= {("BW", stage): b + w for stage, (_, b, w) in enumerate(costs)}
    return simulate(known_schedule(order), order.stages, by_op, message)


def least_time(order: OpOrder, costs: tuple[tuple[float, float, float], ...], message: float) -> float:
    """Return what `simulated_ops` takes at least.

    A microbatch runs through all stages and back. The ops of a rank run behind an F of each stage before its
    first, and ahead of a B of each unless W is deferred.
    """
    plain = not order.name.startswith("zb")  # else W is deferred, and two stages in a row may share a rank
    ahead = [0.0, *accumulate(f + message * plain for f, _, _ in costs)]
    behind = [0.0, *accumulate(b + (w + message) * plain for _, b, w in costs)]
    least = ahead[-1] + behind[-1] - 2 * message * plain
    for stages in order.stages:
        alone = order.microbatches * sum(sum(costs[stage]) for stage in stages)
        least = max(least, ahead[stages[0]] + alone + behind[stages[0]] * plain)
    return least


def launches(run: Planned, cluster: Cluster, own: list[int], microbatches: int, busy: float) -> float:
    """Return the seconds that the GPU waits for the host. own: the layers of its rank."""
    config, parallel = run.config, run.config.parallel
    if (impl := graph_impl(config, run.world)) == "full_iteration":
        return 0.0
    of_layer = LAYER_GRAPHS if impl == "local" else sum(LAYER_KERNELS)
    sparse = sum(map(config.model.moe_layers.__getitem__, own))
    kernels = len(own) * of_layer + sparse * sum(EXPERT_KERNELS) + 30
    ranks = parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or 1)
    waits = sparse * IDLE_KERNELS[config.model.moe_token_dispatcher_type] * (ranks > 1)
    return microbatches * (cluster.launch * waits + max(0.0, kernels * cluster.launch - busy / microbatches))


def data_parallel(
    config: Config,
    sizes: Sizes,
    cluster: Cluster,
    groups: list[ParamGroup],
    forward: float,
    backward: float,
    microbatches: int,
) -> float:
    """Return the exposed seconds of reducing gradients and gathering parameters.

    groups: of the rank, dense and experts'; forward, backward: its seconds of F, of B and W, in a microbatch.
    """
    parallel = config.parallel
    grad, item = ITEMSIZE[config.grad_dtype_name], sizes.item
    item = 1 if parallel.sharding != "no_shard" and config.precision.optimizer_casts(True) else item
    strides = sizes.tp, sizes.etp * parallel.expert_model_parallel_size
    reduce = gather = writes = 0.0
    for (count, ranks, _), stride in zip(groups, strides, strict=True):
        back = grad if parallel.sharding == "no_shard" else item
        reduce += cluster.collective(count * grad, ranks, stride) + cluster.move(count * grad) * (ranks > 1)
        gather += cluster.collective(count * back, ranks, stride) + cluster.move(count * back) * (ranks > 1)
        writes += cluster.move(count * grad + count / ranks * (grad + 8))  # zeros, and the sum of the shard
    behind = backward * parallel.overlap_grad_reduce, forward * parallel.overlap_param_gather
    params = sum(group.params for group in groups)
    buckets = max(1, params // parallel.bucket_size(groups[0].ranks))
    hidden = sum(min(x * (1 - 1 / (1 + buckets)), y) for x, y in zip((reduce, gather), behind, strict=True))
    if parallel.sharding == "optim_grads":
        in_forward = min(forward, reduce * min(1, REDUCTIONS / buckets))
        hidden += (microbatches - 1) * min(reduce, backward + in_forward) * parallel.overlap_grad_reduce
        reduce = (reduce + writes) * microbatches
    return reduce + gather - hidden + CONTENTION * hidden


def optimizer(config: Config, cluster: Cluster, groups: list[ParamGroup]) -> float:
    """Return the seconds of the norm of the gradients and AdamW."""
    offload = config.optimizer
    own = sum(group.params / group.shards(config) for group in groups)
    there = offload.optimizer_offload_fraction * offload.optimizer_cpu_offload
    on_host = own * there * (6 / cluster.host_link + STEP_BYTES / cluster.host_bandwidth)
    grad = "fp32" if config.parallel.sharding == "optim_grads" else config.grad_dtype_name
    twice = offload.exp_avg_dtype, offload.exp_avg_sq_dtype, grad  # each moved twice; sums in shards are fp32
    moved = STEP_BYTES - 4 * sum(kind.startswith("bf") for kind in twice)
    return cluster.move(moved * own * (1 - there)) + on_host

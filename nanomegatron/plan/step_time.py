"""Predict the time of a training step before it starts: by part, on the pipeline rank that computes longest.

    pipeline rank   | F0 | F1 | F2 |        | B0 | ...        ops of `schedules.py`, their seconds from
                                    bubble                    `layer_time.py`
    at its end      | reduce gradients | AdamW | gather parameters |

    bubble              the step of the simulated pipeline less the ops of that rank and less the messages
    pp messages         of a microbatch, forward through all stages and back: nothing is computed beside them
    dp communication    gradients reduced and parameters gathered over dp x cp (experts: over edp). With the
                        overlap flags all but a bucket of each runs beside the last backward and the first
                        forward, whose kernels then take CONTENTION of that time longer
    optimizer           34 bytes a parameter: gradient (twice), main weight, moments, weight; over the host's
                        link and memory with --optimizer-cpu-offload
    launches            what the host needs beyond the GPU's time, where no CUDA graph runs; and the gaps
                        behind each dispatch of tokens, whose sizes the host has to read

A pipeline of many microbatches is simulated with fewer; each further one takes the busiest rank's time.
"""

import math
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from nanomegatron.config.check_layout import graph_conflict
from nanomegatron.config.settings import Config, padded_vocab_size
from nanomegatron.flops import flops_per_iteration, parameter_count, stage_layers
from nanomegatron.plan.cluster import Cluster
from nanomegatron.plan.fast import optimizer_casts
from nanomegatron.plan.layer import ITEMSIZE, Sizes
from nanomegatron.plan.layer_time import EXPERT_KERNELS, LAYER_KERNELS, NOTHING, LayerTimes, OpTime
from nanomegatron.plan.memory import expert_weights, known_schedule
from nanomegatron.plan.room import Planned
from nanomegatron.schedules import placement, simulate

STEP_PARTS = ("matmuls", "attention", "other kernels", "launches", "tp communication", "cp communication")
STEP_PARTS += ("ep communication", "dp communication", "pp messages", "bubble", "optimizer")
CONTENTION = 0.2  # of hidden communication's time, by which kernels beside it take longer
STEP_BYTES = 34  # of the optimizer, a parameter
IDLE_KERNELS = {"allgather": 36, "alltoall": 72}  # launched while the GPU waits, as the host has read sizes


class StepTime(NamedTuple):
    """Seconds of a step by part, and of communication hidden behind compute, by axis."""

    parts: dict[str, float]
    hidden: dict[str, float]
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
        """Share of the dense bf16 peak."""
        return self.tflops_per_gpu * 1e12 / self.cluster.peak


def padded_vocab(run: Planned) -> int:
    """Return the size of the padded vocabulary."""
    parallel, data = run.config.parallel, run.config.data
    multiple = data.make_vocab_size_divisible_by
    return padded_vocab_size(run.vocab_size, multiple, parallel.tensor_model_parallel_size)


def step_time(run: Planned, cluster: Cluster, limit: float = math.inf) -> StepTime:
    """Predict the step of a run on a cluster's GPUs; its bubble only if it is below `limit` without one."""
    config, parallel = run.config, run.config.parallel
    sizes, vocab = Sizes(config, run.machine), padded_vocab(run)
    layers, times = stage_layers(config, vocab), LayerTimes(sizes, cluster)
    stages = [stage_ops(times, stage, vocab // sizes.tp, layers) for stage in range(len(layers))]
    microbatches = max(1, config.data.global_batch_size // config.data.micro_batch_size // replicas(config))
    placed = placement(parallel.schedule, parallel.pipeline_model_parallel_size, parallel.chunks)
    per_rank = [sum((op for stage in rank for op in stages[stage]), NOTHING) for rank in placed]
    slowest = max(range(len(placed)), key=lambda rank: per_rank[rank].total)
    busy = per_rank[slowest] * microbatches
    parts, hidden = Counter(busy.parts), Counter(busy.hidden)
    if len(placed) > 1 and busy.total < limit:
        parts += pipeline_waits(config, cluster, sizes, [[op.total for op in ops] for ops in stages])
    parts["launches"] = launches(run, cluster, layers, placed[slowest], microbatches, busy.total)
    own = [layer for stage in placed[slowest] for layer in layers[stage]]
    ends = 0 in placed[slowest], len(layers) - 1 in placed[slowest]
    params = parameter_count(config.model, vocab, sizes.tp, own, *ends, experts=0), expert_weights(sizes, own)
    reduced, beside = data_parallel(sizes, cluster, params, per_rank[slowest], stages, placed[slowest])
    parts["dp communication"] += reduced
    hidden["dp communication"] += beside
    parts["optimizer"] = optimizer(config, cluster, sizes, params)
    return StepTime({part: parts[part] for part in STEP_PARTS}, dict(hidden), run, cluster)


def replicas(config: Config) -> int:
    """Return the size of dp."""
    return config.parallel.data_parallel_size or 1


def stage_ops(times: LayerTimes, stage: int, columns: int, layers: list[range]) -> list[OpTime]:
    """Return F, B and W of a stage for one microbatch."""
    model, ops = times.sizes.model, [NOTHING] * 3
    for run, again in model.segments(len(layers[stage])):
        for number, count in Counter(times.like(layers[stage][i]) for i in run).items():
            forward, backward, weight = (op * count for op in times.layer(number))
            backward = backward + forward if again else backward
            ops = [a + b for a, b in zip(ops, (forward, backward, weight), strict=True)]
    ends = times.ends(columns, stage == 0, stage == len(layers) - 1)
    return [a + b for a, b in zip(ops, ends, strict=True)]


def pipeline_waits(config: Config, cluster: Cluster, sizes: Sizes, seconds: list[list[float]]) -> Counter:
    """Return what a pipeline adds. seconds: of F, B and W of each stage."""
    parallel = config.parallel
    pp, name, chunks = parallel.pipeline_model_parallel_size, parallel.schedule, parallel.chunks
    microbatches = max(1, config.data.global_batch_size // config.data.micro_batch_size // replicas(config))
    fewer = min(microbatches, 2 * pp + microbatches % pp)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    stride = sizes.tp * parallel.context_parallel_size * replicas(config)
    message = sizes.value * sizes.model.hidden_size / config.sequence_cut
    link = cluster.link(2, stride)
    message = message / link.bandwidth + link.latency
    scale = max(map(max, seconds))
    costs = tuple(tuple(round(x / scale, 2) for x in ops) for ops in seconds)
    waits = idle(name, pp, fewer, chunks, group, costs, round(message / scale, 3)) * scale
    messages = min(waits, 2 * (len(seconds) - 1) * message)
    return Counter({"bubble": max(0.0, waits - messages), "pp messages": max(0.0, messages)})


@lru_cache(maxsize=4096)
def idle(name: str, pp: int, microbatches: int, chunks: int, group: int | None, costs: tuple, message: float):
    """Return the time of a simulated pipeline less that of its busiest rank, in the unit of the costs."""
    lists, placed = known_schedule(name, pp, microbatches, chunks, group), placement(name, pp, chunks)
    by_op = {(kind, stage): cost for stage, ops in enumerate(costs) for kind, cost in zip("FBW", ops)}
    by_op |= {("BW", stage): b + w for stage, (_, b, w) in enumerate(costs)}
    busiest = max(sum(sum(costs[stage]) for stage in stages) for stages in placed) * microbatches
    return simulate(lists, placed, by_op, message).total - busiest


def launches(
    run: Planned, cluster: Cluster, layers: list[range], stages: list[int], microbatches: int, busy: float
) -> float:
    """Return the seconds that the GPU waits for the host."""
    config, parallel = run.config, run.config.parallel
    if parallel.cuda_graph_impl != "none" and not graph_conflict(config, run.world):
        return 0.0
    own = [config.model.moe_layers[layer] for stage in stages for layer in layers[stage]]
    kernels = len(own) * sum(LAYER_KERNELS) + sum(own) * sum(EXPERT_KERNELS) + 30
    ranks = parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or 1)
    waits = sum(own) * IDLE_KERNELS[config.model.moe_token_dispatcher_type] * (ranks > 1)
    return cluster.launch * microbatches * waits + max(0.0, kernels * cluster.launch * microbatches - busy)


def data_parallel(
    sizes: Sizes, cluster: Cluster, params: tuple[int, int], micro: OpTime, stages: list, own: list[int]
) -> tuple[float, float]:
    """Return the exposed and the hidden seconds of reducing gradients and gathering parameters.

    params: of the rank, dense ones and experts'; micro: its ops of one microbatch.
    """
    config, parallel = sizes.config, sizes.parallel
    dp_cp = replicas(config) * parallel.context_parallel_size
    edp = max(1, dp_cp * sizes.tp // (parallel.expert_model_parallel_size * sizes.etp))
    grad, item = ITEMSIZE[config.grad_dtype_name], sizes.item
    item = 1 if parallel.sharding != "no_shard" and optimizer_casts(config, True) else item
    strides = sizes.tp, sizes.etp * parallel.expert_model_parallel_size
    reduce = gather = 0.0
    for count, ranks, stride in zip(params, (dp_cp, edp), strides, strict=True):
        back = grad if parallel.sharding == "no_shard" else item
        reduce += cluster.collective(count * grad, ranks, stride) + cluster.move(count * grad) * (ranks > 1)
        gather += cluster.collective(count * back, ranks, stride) + cluster.move(count * back) * (ranks > 1)
    forward = sum(stages[stage][0].total for stage in own)
    behind = (micro.total - forward) * parallel.overlap_grad_reduce, forward * parallel.overlap_param_gather
    buckets = max(1, sum(params) // parallel.bucket_size(dp_cp)) if any(behind) else 1
    hidden = sum(min(x * (1 - 1 / (1 + buckets)), y) for x, y in zip((reduce, gather), behind, strict=True))
    return reduce + gather - hidden + CONTENTION * hidden, hidden


def optimizer(config: Config, cluster: Cluster, sizes: Sizes, params: tuple[int, int]) -> float:
    """Return the seconds of the norm of the gradients and AdamW. params: dense ones and experts'."""
    parallel, offload = config.parallel, config.optimizer
    dp_cp = replicas(config) * parallel.context_parallel_size
    edp = max(1, dp_cp * sizes.tp // (parallel.expert_model_parallel_size * sizes.etp))
    sharded = parallel.sharding != "no_shard"
    own = params[0] / (dp_cp if sharded else 1) + params[1] / (edp if sharded else 1)
    there = offload.optimizer_offload_fraction * offload.optimizer_cpu_offload
    on_host = own * there * (6 / cluster.host_link + STEP_BYTES / cluster.host_bandwidth)
    return cluster.move(STEP_BYTES * own * (1 - there)) + on_host

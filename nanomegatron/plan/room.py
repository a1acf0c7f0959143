"""Whether a run's memory fits: the parts as a table, and what would make room, the cheapest changes first."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import build_config
from nanomegatron.config.rules import values_of
from nanomegatron.config.settings import Config
from nanomegatron.plan.layer import Machine
from nanomegatron.plan.memory import memory_of_ranks

# Flags that may need less memory, and the settings that they change.
CHANGES = {
    "--bf16": dict(bf16=True, fp16=False),
    "--use-distributed-optimizer": dict(use_distributed_optimizer=True),
    "--recompute-granularity selective --recompute-modules layernorm mlp_act": dict(
        recompute_granularity="selective", recompute_modules=("layernorm", "mlp_act")
    ),
    **{f"--micro-batch-size {n}": dict(micro_batch_size=n) for n in (32, 16, 8, 4, 2, 1)},
    "--recompute-granularity full": dict(recompute_granularity="full", recompute_modules=("core_attn",))
    | dict(recompute_method="uniform", recompute_num_layers=1),
    "--data-parallel-sharding-strategy optim_grads": dict(data_parallel_sharding_strategy="optim_grads"),
    **{f"--tp {n} --sp": dict(tensor_model_parallel_size=n, sequence_parallel=True) for n in (2, 4, 8)},
    **{f"--pp {n}": dict(pipeline_model_parallel_size=n) for n in (2, 4, 8)},
    "--optimizer-cpu-offload": dict(optimizer_cpu_offload=True),
}


class Planned(NamedTuple):
    """A resolved run on `world` ranks of a kind of machine; `shared` of them take its memory together."""

    config: Config
    vocab_size: int  # without padding
    machine: Machine = Machine()
    world: int = 1
    shared: int = 1

    @property
    def need(self) -> float:
        """The bytes of the rank that needs most, or of all that share a machine."""
        each = [sum(parts.values()) for parts in memory_of_ranks(*self[:3])]
        return max(*each, sum(each) / len(each) * self.shared)

    @property
    def busiest(self) -> "Planned":
        """The run if all tokens choose the experts of one ep rank: as if all were padded to its load."""
        model, parallel = self.config.model, self.config.parallel
        if not model.num_experts or model.moe_pad_expert_input_to_capacity:
            return self
        ep, k = parallel.expert_model_parallel_size, model.moe_router_topk
        load = min(k, model.num_experts // ep) * ep / k
        load = min(load, model.moe_expert_capacity_factor or load)  # the rest is dropped
        load = dict(moe_expert_capacity_factor=load, moe_pad_expert_input_to_capacity=True)
        return self._replace(config=replace(self.config, model=replace(model, **load)))

    def changed(self, flags: str) -> "Planned":
        """Return the run with one of CHANGES, on more GPUs if need be; itself if they conflict."""
        config = build_config(values_of(self.config) | {"data_parallel_size": None} | CHANGES[flags])
        gpu, world = self.machine.gpu, math.lcm(self.world, config.parallel.ranks_per_replica)
        elsewhere = not gpu and (world > self.world or "cpu" in flags)
        if elsewhere or validate(config, world, "cuda" if gpu else "cpu"):
            return self
        return self._replace(config=resolve(config, world), world=world)


def check_room(run: Planned, room: float) -> str:
    """Return a note with a table if a run needs over `room` bytes, or "". Raises ValueError over twice."""
    if run.need <= room:
        return ""
    text = f"memory: about {run.need / 2**30:.2f} GiB are needed, and this machine has {room / 2**30:.2f}"
    table = memory_table(memory_of_ranks(*run[:3]))
    text = "\n".join([text, *table, *left_out(run), *remedies(run, room)])
    if run.need > 2 * room:  # which no inaccuracy of the plan explains
        raise ValueError(text)
    return text


def memory_table(ranks: list[dict[str, float]]) -> Iterator[str]:
    """Yield the lines of a table of each pipeline rank's parts; of over 8 the first, largest and last."""
    totals = [sum(parts.values()) for parts in ranks]
    shown = range(n) if (n := len(ranks)) <= 8 else sorted({0, totals.index(max(totals)), n - 1})
    columns = [(f"pp {i}" * (n > 1), ranks[i] | {"together": totals[i]}) for i in shown]
    yield f"  {'GiB of a rank':<25}" + "".join(f"{name:>9}" for name, _ in columns)
    for part in columns[0][1]:
        if max(parts[part] for _, parts in columns) >= max(totals) / 200:
            yield f"  {part:<25}" + "".join(f"{parts[part] / 2**30:>9.2f}" for _, parts in columns)


def left_out(run: Planned) -> Iterator[str]:
    """Yield the lines below the table: what it does not have, and what experts take at most."""
    own = "CUDA's and NCCL's" if run.machine.gpu else "its libraries', 0.3 GiB a process"
    yield f"  left out: torch's own memory and {own}"
    if more := run.busiest.need - run.need:
        most = f"up to {more / 2**30:.2f} GiB more, if all tokens choose those of one rank"
        yield f"  experts evenly loaded; {most}"


def remedies(run: Planned, room: float) -> Iterator[str]:
    """Yield the lines of a table of changes that save 1 % or more, down to the one that makes room."""
    together, heading = run, ["  GiB needed    with those above   with"]
    for flags in CHANGES:
        one, joined = run.changed(flags), together.changed(flags)
        if min(one.need / run.need, joined.need / together.need) > 0.99:
            continue
        together = joined if joined.need <= together.need else together
        more = f" on {joined.world} GPUs" * (joined.world > run.world) + ", fits" * (together.need <= room)
        yield from heading
        heading = []
        yield f"{one.need / 2**30:>12.2f}{together.need / 2**30:>20.2f}   {flags}{more}"
        if together.need <= room:
            return
    yield "  no change of settings makes room: take a smaller model, or more ranks to divide it"

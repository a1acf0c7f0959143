"""Choose a layout: try all that divide a model over some GPUs, keep those that fit, take the fastest.

    settings that no flag has set      values tried
    tp                                 1, 2, 4, 8 inside a node, with sequence parallelism and overlap
    pp, schedule, virtual stages       whatever the layers allow: 1f1b, interleaved, zb-v; split by FLOPs
    cp                                 while a rank keeps ROW tokens
    ep, etp                            whatever divides the experts; etp 1 or tp
    sharding of dp                     optimizer states, with both overlaps, where there are replicas
    micro batch                        1, 2, 4, .. up to TOKENS tokens, until one is LONGER
    recomputation, sharded gradients,  the first line of ROOM of which a way fits, and its fastest way: from
    optimizer states on the host       nothing to whole layers again and states on the host

A layout with more dimensions has to be faster: COMPLEXITY for each. The best are checked as any command line
is (`config.check.validate`); so is what is printed.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from nanomegatron.config.check import resolve, resolve_parallel, validate
from nanomegatron.config.cli import ConfigError, Parsed, build_config
from nanomegatron.config.parallel import ParallelConfig
from nanomegatron.config.rules import spelled, values_of
from nanomegatron.config.settings import Config
from nanomegatron.plan.cluster import Cluster
from nanomegatron.plan.flops import parameter_count
from nanomegatron.plan.layer import Machine
from nanomegatron.plan.memory import memory
from nanomegatron.plan.room import Planned
from nanomegatron.plan.step_time import StepTime, step_time

SIMULATED = 10  # layouts, the best, whose bubbles are simulated, as are those of all that may be as good
EXPERT_WIDTH = 2048  # features of an expert that an etp rank keeps at least
ROW = 8192  # tokens of a row that a cp rank keeps at least
LONGER = 1.05  # times the step with microbatches half as large
TOKENS = 65536  # of a microbatch at most
POWERS = [2**i for i in range(15)]
COMPLEXITY = 0.005  # of a step's time that a further dimension has to gain
FILLED = 0.9  # of a GPU's memory; the rest is for CUDA, NCCL and what torch cannot use
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=("layernorm", "mlp_act"))
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
TENSOR_PARALLEL: dict[str, Any] = dict(sequence_parallel=True, tp_comm_overlap=True)
SHARDED_STATES = dict(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
SHARDED_GRADS = dict(data_parallel_sharding_strategy="optim_grads")
HOST_STATES = dict(optimizer_cpu_offload=True)
ROOM: tuple[tuple[dict[str, Any], ...], ...] = (
    ({},),
    (SELECTIVE,),
    (SELECTIVE | SHARDED_GRADS, FULL),
    (FULL | SHARDED_GRADS,),
    (SELECTIVE | HOST_STATES, FULL | HOST_STATES),
)
AXIS_SIZES = dict(
    tp="tensor_model_parallel_size",
    pp="pipeline_model_parallel_size",
    vpp="num_virtual_stages_per_pipeline_rank",
    cp="context_parallel_size",
    ep="expert_model_parallel_size",
)


@dataclass(frozen=True)
class Candidate:
    """A layout: what it sets, the bytes of the rank that needs most by part, and its step if it fits."""

    changes: dict[str, Any]
    run: Planned
    memory: dict[str, float]
    step: StepTime | None = None

    @property
    def need(self) -> float:
        """Bytes of the rank that needs most."""
        return sum(self.memory.values())

    @property
    def rank(self) -> float:
        """What candidates are compared by: seconds of a step, more for each further dimension."""
        parallel = self.run.config.parallel
        several = sum(getattr(parallel, name) not in (None, 1) for name in AXIS_SIZES.values())
        return self.step.total * (1 + COMPLEXITY * (several + len(self.changes.keys() & {*FULL})))

    @property
    def word(self) -> str:
        """The layout as a word: tp4 pp2 dp8."""
        parallel = self.run.config.parallel
        sizes = {short: getattr(parallel, name) or 1 for short, name in AXIS_SIZES.items()}
        sizes["dp"] = parallel.data_parallel_size
        words = [f"{short}{size}" for short, size in sizes.items() if size > 1] or ["one GPU"]
        schedule = parallel.pipeline_schedule
        return " ".join(words + [schedule] * (schedule not in (None, "1f1b", "interleaved")))

    @property
    def micro(self) -> int:
        """Rows of a microbatch."""
        return self.run.config.data.micro_batch_size

    def flags(self) -> str:
        """The flags that set it, but for sizes of 1."""
        return " ".join(spelled(*c) for c in self.changes.items() if c[1] is True or c[1] != 1)


class Search:
    """A search of layouts on `world` GPUs. parsed: its `given` settings stay; vocab: without padding."""

    def __init__(
        self,
        parsed: Parsed,
        vocab: int,
        world: int,
        cluster: Cluster,
        machine: Machine = Machine(),  # noqa: B008 (frozen)
        room: float | None = None,
    ) -> None:
        """room: bytes that a rank may take; default FILLED of a GPU."""
        self.config, self.given = parsed.config, parsed.given
        self.values = values_of(parsed.config) | dict(data_parallel_size=None)
        self.parts: dict[tuple, Config] = {}  # resolved, by dp and the changes but for those of the layout
        self.vocab, self.world, self.cluster = vocab, world, cluster
        self.machine, self.room = machine, room or FILLED * cluster.memory_gb * 2**30

    def run(self) -> tuple[list[Candidate], list[Candidate]]:
        """Return the layouts that fit, the best first, and those that do not, the smallest first.

        Larger microbatches are not tried where one needs whole layers recomputed, or is LONGER.
        """
        fits: list[Candidate] = []
        others: list[Candidate] = []
        sizes = [n for n in POWERS if n == 1 or n * self.config.data.seq_length <= TOKENS]
        sizes = [self.values["micro_batch_size"]] if "micro_batch_size" in self.given else sizes
        for changes, replicas in self._layouts():
            shorter = math.inf
            for micro in sizes:
                if (self.values["global_batch_size"] or 0) % (replicas * micro):
                    break
                found = self.fitting(changes | {"micro_batch_size": micro})
                if found is not None:
                    (fits if found.step else others).append(found)
                if found is None or found.step is None or "recompute_method" in found.changes:
                    break
                if found.step.total > LONGER * shorter:
                    break
                shorter = found.step.total
        return by_rank(fits), sorted(others, key=lambda candidate: candidate.need)

    def _choices(self, short: str, allowed: Callable[[int], bool]) -> list[int]:
        name = AXIS_SIZES[short]
        return [self.values[name] or 1] if name in self.given else [n for n in POWERS if allowed(n)]

    def _layouts(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield settings and dp of layouts whose sizes divide, if weights and gradients fit two GPUs."""
        model, data = self.config.model, self.config.data
        width = math.gcd(model.num_attention_heads, model.ffn_size)
        tps = self._choices("tp", lambda n: width % n == 0 and n <= self.cluster.gpus_per_node)
        cps = self._choices("cp", lambda n: n == 1 or data.seq_length // n >= ROW)
        eps = self._choices("ep", lambda n: (model.num_experts or 1) % n == 0 and n <= 64)
        weights, given_dp = 6 * model_size(self.config, self.vocab), self.config.parallel.data_parallel_size
        for tp, cp, ep in itertools.product(tps, cps, eps):
            etps = {1, tp if model.moe_ffn_size >= EXPERT_WIDTH * tp else 1} if model.num_experts else {None}
            for pp, pipeline in self._pipelines(self.world // (tp * cp)):
                dp, left = divmod(self.world, tp * cp * pp)
                small = weights <= 2 * self.room * tp * pp * ep
                if left or (given_dp or dp) != dp or not small:
                    continue
                fitting = {etp for etp in etps if (dp * tp * cp) % (ep * (etp or 1)) == 0}
                changes = {AXIS_SIZES["tp"]: tp, AXIS_SIZES["cp"]: cp, AXIS_SIZES["ep"]: ep} | pipeline
                changes |= TENSOR_PARALLEL | dict(tp_comm_overlap=self.machine.gpu) if tp > 1 else {}
                changes |= SHARDED_STATES if dp * cp > 1 else {}
                for etp in fitting:
                    yield changes | (dict(expert_tensor_parallel_size=etp) if tp > 1 and etp else {}), dp

    def _pipelines(self, most: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield pp up to `most` with a schedule and virtual stages; every stage has a layer at least."""
        layers = self.config.model.num_layers
        for pp in (pp for pp in self._choices("pp", lambda n: n <= 32) if pp <= min(most, layers)):
            ways: list[dict[str, Any]] = [{}]
            if pp > 1 and not self.given & {"pipeline_schedule", AXIS_SIZES["vpp"]}:
                ways += [{AXIS_SIZES["vpp"]: n} for n in (2, 4, 8) if pp * n <= layers]
                ways += [dict(pipeline_schedule="zb-v")] * (2 * pp <= layers)
            for way in ways:
                yield pp, {AXIS_SIZES["pp"]: pp} | way | (dict(pipeline_split="flops") if pp > 1 else {})

    def fitting(self, changes: dict[str, Any]) -> Candidate | None:
        """Return the layout with the least of ROOM that makes it fit; without a step where none does.

        None: sizes that no layout of this model has.
        """
        tried: list[Candidate] = []
        for ways in ROOM:
            before = [c.changes for c in tried]
            kept = [settings for way in ways if (settings := self._kept(changes | way)) not in before]
            try:
                new = [self.candidate(settings) for settings in kept]
            except ValueError:
                return None
            fits = [c for c in new if c.need <= self.room]
            if fits:
                return min(map(self.timed, fits), key=lambda c: c.step.total)
            tried += new
        return min(tried, key=lambda c: c.need)

    def timed(self, candidate: Candidate) -> Candidate:
        """Return a candidate with its step, whose bubble is the least one."""
        return replace(candidate, step=step_time(candidate.run, self.cluster, simulated=False))

    def candidate(self, changes: dict[str, Any]) -> Candidate:
        """Return the layout with these changes, and its memory. Raises ValueError if there is none."""
        run = Planned(self._resolved(changes), self.vocab, self.machine, self.world)
        return Candidate(changes, run, memory(*run[:3]))

    def errors(self, candidate: Candidate) -> list[str]:
        """Return what the checks of a command line say of its settings."""
        config = build_config(self.values | candidate.changes)
        return validate(config, self.world, "cuda" if self.machine.gpu else "cpu")

    def valid(self, candidates: list[Candidate], count: int) -> list[Candidate]:
        """Return the first `count` that no check refuses, the best, then the others by their times.

        Raises ConfigError if all are refused.
        """
        allowed = itertools.islice((c for c in candidates if not self.errors(c)), count)
        if not (found := [*allowed]) and candidates:
            raise ConfigError(self.errors(candidates[0]))
        return found[:1] + sorted(found[1:], key=lambda candidate: candidate.step.total)

    def _kept(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return the changes to what is not given. Gradients are sharded only where it shards the states."""
        sharded = changes.keys() >= SHARDED_STATES.keys() and not self.given & SHARDED_STATES.keys()
        left = self.given if sharded else self.given | SHARDED_GRADS.keys()
        return {name: value for name, value in changes.items() if name not in left}

    def _resolved(self, changes: dict[str, Any]) -> Config:
        """Return `resolve` of the settings with changes; only the layout is made for each of them."""
        own = {name: value for name, value in changes.items() if name in ParallelConfig.__dataclass_fields__}
        parallel = replace(self.config.parallel, data_parallel_size=None, **own)
        dp = self.world // parallel.ranks_per_replica
        parts = dp, *(change for change in changes.items() if change[0] not in own)
        if parts not in self.parts:
            self.parts[parts] = resolve(build_config(self.values | changes), self.world)
        config = replace(self.parts[parts], parallel=parallel)
        return replace(config, parallel=resolve_parallel(config, dp))


def by_rank(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates, the best first; with bubbles that are least ones where SIMULATED are better."""
    found, exact = sorted(candidates, key=lambda candidate: candidate.rank), []
    for i, candidate in enumerate(found):
        if len(exact) >= SIMULATED and candidate.rank > exact[SIMULATED - 1]:
            break
        found[i] = replace(candidate, step=step_time(candidate.run, candidate.step.cluster))
        bisect.insort(exact, found[i].rank)
    return sorted(found, key=lambda candidate: candidate.rank)


def disadvantage(other: Candidate, best: Candidate, room: float) -> str:
    """Return in a line why a layout lost: more than `room` bytes, or the parts of a step that take longer."""
    if other.step is None:
        part = max(other.memory, key=lambda name: other.memory[name])
        size = other.memory[part] / 2**30
        return f"does not fit: {other.need / 2**30:.1f} of {room / 2**30:.1f} GiB, {part} {size:.1f}"
    if other.step.total <= best.step.total:
        gain = 1 - other.step.total / best.step.total
        return f"faster by {gain:.1%}, less than its further dimensions have to gain"
    longer = {name: s / best.step.total for name, s in other.step.parts.items()}
    longer = {name: share - best.step.parts[name] / best.step.total for name, share in longer.items()}
    most = [name for name in sorted(longer, key=lambda name: -longer[name])[:2] if longer[name] > 5e-4]
    again = "whole layers again, " * (
        FULL.items() <= other.changes.items() and not FULL.items() <= best.changes.items()
    )
    parts = ", ".join(f"{name} +{longer[name]:.1%}" for name in most)
    return f"slower by {other.step.total / best.step.total - 1:.1%}: {again}{parts}"


def model_size(config: Config, vocab: int) -> int:
    """Count the parameters of a config that need not be resolved."""
    positions = config.model.max_position_embeddings or config.data.seq_length
    return parameter_count(replace(config.model, max_position_embeddings=positions), vocab)


def usual_batch(parsed: Parsed, vocab: int, world: int) -> int:
    """Return the rows of a step where none are set: 1 M tokens, 4 M from 15 billion parameters on."""
    large = model_size(parsed.config, vocab) >= 15e9
    data = parsed.config.data
    unit = world * (data.micro_batch_size if "micro_batch_size" in parsed.given else 1)
    return math.ceil(2 ** (22 if large else 20) / data.seq_length / unit) * unit

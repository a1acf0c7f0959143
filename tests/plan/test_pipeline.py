"""The memory model of pipelines: it agrees with torch's allocator on what every rank holds, op by op."""

import bisect
import itertools
import operator
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.build import build
from nanomegatron.config.settings import Config, ParallelConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from nanomegatron.pick_fast_paths import install, paths_for
from nanomegatron.plan.flops import stage_layers
from nanomegatron.plan.layer import Sizes
from nanomegatron.plan.memory import (
    ChunkMemory,
    StageChunk,
    chunk_memory,
    chunks_kept,
    describe_memory,
    memory,
    memory_of_ranks,
    peak_moments,
    pipeline_order,
)
from nanomegatron.pp import ModelChunks, NoTracer, run_schedule
from nanomegatron.schedules import Op, placement, schedule
from tests.plan.test_memory import CPU, CUDA, FULL, LAYOUTS, LLAMA3_8B, TINY, config
from tests.spmd import run_spmd

SCHEDULES = {
    "gpipe": dict(pipeline_schedule="gpipe"),
    "1f1b": {},
    "interleaved": dict(num_virtual_stages_per_pipeline_rank=2),
    "zb-h1": dict(pipeline_schedule="zb-h1"),
    "zb-v": dict(pipeline_schedule="zb-v"),
}
VOCAB = 256


class Marked(NoTracer):
    """Names the ops in the profiler's record."""

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        with torch.profiler.record_function("op"):
            yield


def allocated(mesh, config: Config) -> dict:
    """Of this rank the parameters, and bytes allocated: the most during, and those behind each op."""
    torch.manual_seed(0)
    kind = getattr(torch, config.dtype_name)
    stages = install(build(config, mesh, VOCAB, VOCAB, Init(dtype=kind)), paths_for(config, mesh))
    buckets = ParamAndGradBuckets(stages, config.parallel, mesh)
    s, b = config.data.seq_length, config.data.micro_batch_size
    labels = torch.randint(VOCAB, (b, s))
    weights = torch.full((b, s), 1 / (b * s))
    batch = Batch(labels, torch.arange(s), torch.arange(b), dropout_seed=1, loss_weights=weights)

    def step(chunk: GPTModel, _: int) -> torch.Tensor:
        out = chunk(batch, labels)
        return (out * weights).sum() if chunk.post_process else out

    microbatches = config.data.global_batch_size // b
    buckets.zero_grad_buffer(microbatches)
    with torch.profiler.profile(profile_memory=True) as record:
        run_schedule(stages, step, microbatches, stages.shape(s, b), tracer=Marked())
    events = sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event for event in events if event.name() == "[memory]"]
    times = [event.start_ns() for event in changes]
    sizes = [0, *itertools.accumulate(event.nbytes() for event in changes)]
    most, behind = [], []
    for op in (event for event in events if event.name() == "op"):
        begin, end = (bisect.bisect(times, op.start_ns() + span) for span in (0, op.duration_ns()))
        most.append(max(sizes[begin : end + 1]))
        behind.append(sizes[end])
    return {"params": sum(p.numel() for p in stages.parameters()), "most": most, "behind": behind}


def pipeline(family: str, name: str, pp: int, **changes) -> Config:
    """Two layers a chunk, microbatches large beside the weights; two microbatches a rank."""
    chunks = 2 if name in ("interleaved", "zb-v") else 1
    model = replace(TINY[family], num_layers=2 * pp * chunks, max_position_embeddings=64, **changes)
    run = config(model, 64, 8)
    parallel = replace(run.parallel, pipeline_model_parallel_size=pp, **SCHEDULES[name])
    return replace(run, parallel=parallel, data=replace(run.data, global_batch_size=8 * 2 * pp))


def memory_of_ops(ops: list[Op], chunks: list[ChunkMemory]) -> Iterator[tuple[Counter, Counter]]:
    """Yield the bytes by part that microbatches take at each op of a rank: at most in it, and afterwards."""
    held: Counter = Counter()
    for op in ops:
        chunk, before = chunks[op.chunk], held
        if op.kind == "F":
            held = before + chunk.kept
            yield held + chunk.forward, held
        elif op.kind == "W":
            held = before - chunk.deferred
            yield before, held
        else:
            held = before - chunk.kept + (chunk.deferred if op.kind == "B" else Counter())
            ends = held + chunk.ending if op.kind == "B" else held
            yield max(before + chunk.backward, ends, key=lambda parts: sum(parts.values())), held


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("number", [1, 4, 11])
def test_moments_of_ops_have_the_peak_whatever_the_bytes(name, number):
    """Of each rank by itself, and of those that have as many layers of each kind together."""
    run = pipeline("llama", name, 4)
    order = pipeline_order(run)._replace(microbatches=number)
    placed, rng = placement(name, 4, order.chunks), random.Random(0)
    last = 4 * order.chunks - 1
    kinds = tuple(StageChunk(3 + (i % 3 == 0), i == 0, i == last) for i in range(last + 1))
    alike = tuple(layer % 2 for layer in range(sum(kind.layers for kind in kinds)))
    for _ in range(5):
        chunks = {
            kind: ChunkMemory(*(Counter({part: rng.choice((0, 1, 5, 30))}) for part in "abcde"))
            for kind in set(kinds)
        }
        sizes = [sum(part.values()) for kind in sorted(chunks) for part in chunks[kind]]
        peaks = []
        for ops, stages in zip(schedule(name, 4, number, order.chunks, None), placed, strict=True):
            walk = memory_of_ops(ops, [chunks[kinds[stage]] for stage in stages])
            peaks.append(max(sum(during.values()) for during, _ in walk))
        for merged in ((), alike):
            ranks = peak_moments(order, kinds, merged)
            found = [max(sum(map(operator.mul, m, sizes)) for m in moments) for *_, moments in ranks]
            assert max(found) == max(peaks) and (merged or found == peaks)
        assert [len(own) for own, *_ in peak_moments(order, kinds)] == [
            sum(kinds[stage].layers for stage in stages) for stages in placed
        ]


def chunks_of(run: Config, stages: list[int]) -> list[ChunkMemory]:
    layers = stage_layers(run, VOCAB)
    chunks = [StageChunk(len(layers[i]), i == 0, i == len(layers) - 1) for i in stages]
    return [chunk_memory(Sizes(run, CPU), chunk, VOCAB) for chunk in chunks]


FUSED = dict(cross_entropy_loss_fusion=True)
PIPELINES = [
    ("llama", "gpipe", 2, {}),
    ("llama", "1f1b", 4, {}),
    ("llama", "interleaved", 2, {}),
    ("llama", "zb-v", 4, {}),
    ("gpt2, dropout", "zb-h1", 2, {}),
    ("llama", "zb-v", 2, FULL),
    ("llama", "zb-h1", 2, FUSED),
]
MORE_PIPELINES = [
    *(("llama", name, 2, {}) for name in ("1f1b", "zb-h1", "zb-v")),
    *(("llama", name, 4, {}) for name in ("gpipe", "interleaved", "zb-h1")),
    *(("gpt2, dropout", name, 2, {}) for name in ("1f1b", "zb-v")),
    *(("llama", name, 2, FULL) for name in ("1f1b", "zb-h1")),
    ("llama", "gpipe", 2, FUSED),
]


@pytest.mark.parametrize(
    "family, name, pp, changes",
    PIPELINES + [pytest.param(*case, marks=pytest.mark.full) for case in MORE_PIPELINES],
)
def test_every_rank_of_a_pipeline_holds_what_was_planned(family, name, pp, changes):
    """Parameters; bytes behind every op, with no more than some messages on top; and the peak.

    gloo keeps what was sent until a link has as many messages as forwards are open: two links, and what the
    executor has in hand. That is less than any op adds or takes away, but for recomputed layers.
    """
    run = pipeline(family, name, pp, **changes)
    parallel, message = run.parallel, 64 * 8 * 64 * 2
    lists = schedule(name, pp, 2 * pp, parallel.chunks)
    placed = placement(name, pp, parallel.chunks)
    found = run_spmd(allocated, pp, run, pp=pp, **SCHEDULES[name])
    ranks, kept = memory_of_ranks(run, VOCAB, CPU), chunks_kept(run)
    assert memory(run, VOCAB, CPU) in ranks
    for rank, (seen, parts) in enumerate(zip(found, ranks, strict=True)):
        chunks = chunks_of(run, placed[rank])
        smallest = min(sum(part.values()) for chunk in chunks for part in (chunk.kept, chunk.deferred))
        slack = (2 * kept[rank] + 5) * message
        assert slack < smallest or changes is FULL
        held = [sum(behind.values()) for _, behind in memory_of_ops(lists[rank], chunks)]
        assert parts["weights"] == 2 * seen["params"]
        assert all(-message / 4 < b - h < slack for b, h in zip(seen["behind"], held, strict=True))
        planned = sum(parts.values()) - sum(list(parts.values())[:4])
        least = 8 if changes is FULL else 4  # planned, but not there: the last norm, or a second neighbour's
        assert -least * message < max(seen["most"]) - planned < slack


def deferred_on_a_rank(mesh, models):
    return [[deferred_of(mesh, replace(model, num_layers=n)) for n in (2, 3)] for model in models]


def deferred_of(mesh, model):
    """Bytes a token that the work of a backward on weight gradients holds, every storage once."""
    init = Init(dtype=torch.bfloat16)
    sizes = dict(vocab_size=128, max_sequence_length=32, padded_vocab_size=128)
    stages = ModelChunks([GPTModel(model, mesh=mesh, init=init, **sizes)])
    labels = torch.zeros(4, 32, dtype=torch.long)
    with stages.wgrad_store.collect() as works:
        stages[0](Batch(labels, torch.arange(32), torch.arange(4), dropout_seed=1), labels).sum().backward()
    cells = [work for _, work in works]
    for x in cells:  # functions in functions
        cells += [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]
    tensors = [x for x in cells if isinstance(x, torch.Tensor) and not isinstance(x, torch.nn.Parameter)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values()) / (32 * 4)


@pytest.mark.parametrize("family", ["llama", "gpt2, dropout", "qwen3"])
def test_what_is_deferred_until_w(family):
    """Of a further layer exactly, on two tensor-parallel ranks; of the ends with token ids, and places."""
    models = [replace(TINY[family], **changes) for changes in LAYOUTS.values()]
    found = run_spmd(deferred_on_a_rank, 2, models, tp=2)[0]
    for layout, model, (two, three) in zip(LAYOUTS, models, found, strict=True):
        run = config(model, 32, 4, 2)
        chunks = [chunk_memory(Sizes(run, CPU), StageChunk(n), 128 // 2) for n in (2, 3)]
        planned = [sum(chunk.deferred.values()) / (32 * 4) for chunk in chunks]
        assert planned[1] - planned[0] == three - two, layout
        places = 8 / 4 if model.position_embedding_type == "learned_absolute" else 0  # of 4 rows at once
        assert planned[0] + 8 + places == two, layout


def test_llama3_8b_in_four_stages():
    """Rank r of 1f1b keeps 4 - r microbatches of its 8 layers; the states are its own parameters'."""
    run = config(LLAMA3_8B, 8192, 1)
    run = replace(run, data=replace(run.data, global_batch_size=16))
    run = replace(run, parallel=ParallelConfig(pipeline_model_parallel_size=4, data_parallel_size=2))
    ranks, table, layer = memory_of_ranks(run, 128256, CUDA), 128256 * 4096, 218112000
    params = [8 * layer + table, 8 * layer, 8 * layer, 8 * layer + 4096 + table]
    assert sum(params) == 8030261248
    assert [parts["weights"] + parts["Adam moments"] for parts in ranks] == [10 * n for n in params]
    token = 2 * (4 * 4096 + 6144 + 5120 + 4096 + 4 * 14336) + 4 * (2 + 32)
    norm = [0, 0, 0, 2 * 2 * 4096]
    kept = [8192 * ((4 - rank) * 8 * token + norm[rank]) for rank in range(4)]
    assert [parts["activations"] for parts in ranks] == kept
    assert [parts["logits and loss"] for parts in ranks] == [0, 0, 0, 128256 * (2 * 8192 + 8 * 2048)]
    assert [parts["messages"] / (8192 * 4096 * 2) for parts in ranks] == [3, 5, 5, 3]
    ring = replace(run, parallel=replace(run.parallel, num_virtual_stages_per_pipeline_rank=2))
    ring = memory_of_ranks(ring, 128256, CUDA)  # whose last rank sends to the first
    assert [parts["messages"] / (8192 * 4096 * 2) for parts in ring] == [5, 5, 5, 5]
    assert chunks_kept(run) == [4, 3, 2, 1]
    assert memory(run, 128256, CUDA) == ranks[0]


def test_gpipe_keeps_every_microbatch():
    """Of the largest batch that there will be; 64 sequences for 2 replicas are 8 microbatches of 4."""
    run = pipeline("llama", "gpipe", 2)
    data = replace(run.data, micro_batch_size=4, global_batch_size=64, rampup_batch_size=(16, 16, 1000))
    run = replace(run, data=data, parallel=replace(run.parallel, data_parallel_size=2))
    assert chunks_kept(run) == [8, 8]
    one = replace(run, data=replace(data, rampup_batch_size=(), global_batch_size=8))
    pairs = [(parts["activations"], parts["logits and loss"]) for parts in memory_of_ranks(run, VOCAB, CPU)]
    single = [(parts["activations"], parts["logits and loss"]) for parts in memory_of_ranks(one, VOCAB, CPU)]
    assert [many[0] / few[0] for many, few in zip(pairs, single)] == [8, 8]
    assert pairs[1][1] - single[1][1] == 7 * 2 * VOCAB * 4 * 64


def test_description_of_a_pipeline():
    ranks = [{"weights": 2**30}, {"weights": 2**30, "messages": 2**30}, {"weights": 2**30}]
    assert (
        describe_memory(*ranks) == "predicted peak of pipeline rank 1 2.00 GiB (weights 50 %, messages 50 %)"
    )

"""The memory model against published figures and against what the real model keeps.

Of a pipeline the record of torch's allocator tells what every rank holds during and behind each op.
"""

import bisect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.build import build
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import Config, DataConfig, OptimizerConfig, ParallelConfig, PrecisionConfig
from nanomegatron.dp import Buckets
from nanomegatron.flops import parameter_count, stage_layers
from nanomegatron.mesh import Axis
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from nanomegatron.plan import layer as plan_layer
from nanomegatron.plan import memory as plan
from nanomegatron.plan.memory import Needs, Piece, chunks_kept, describe, memory, memory_of_ranks, needs, walk
from nanomegatron.pp import NoTracer, Stages, execute
from nanomegatron.schedules import Op, placement, schedule
from tests.spmd import run_spmd

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LLAMA = dict(
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
LLAMA3_8B = TransformerConfig(32, 4096, 32, 14336, num_query_groups=8, **LLAMA)


def config(model: TransformerConfig, s: int, b: int, tp: int = 1, dtype: str = "bf16") -> Config:
    return Config(
        model=model,
        parallel=ParallelConfig(tensor_model_parallel_size=tp),
        precision=PrecisionConfig(**{dtype: True} if dtype != "fp32" else {}),
        data=DataConfig(seq_length=s, micro_batch_size=b, make_vocab_size_divisible_by=64),
    )


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch) -> None:
    """Also where there are some; with them: test_model_kernels.py."""
    for module in (plan, plan_layer):
        monkeypatch.setattr(module, "why_not", lambda device: "not wanted")


def test_llama3_8b():
    """8,030,261,248 parameters; what its layers keep as the table adds up by hand."""
    parts = memory(config(LLAMA3_8B, 8192, 1), 128256, CUDA)
    states = [parts[name] for name in ("weights", "main weights", "gradients", "Adam moments")]
    assert [size / 8030261248 for size in states] == [2, 4, 4, 8]
    token = 2 * (4 * 4096 + 6144 + 5120 + 4096 + 4 * 14336) + 4 * (2 + 32)
    assert parts["activations"] == 8192 * (32 * token + 2 * 2 * 4096)
    assert parts["logits and loss"] == 128256 * (2 * 8192 + 8 * 2048)
    fp32 = memory(config(LLAMA3_8B, 8192, 1, dtype="fp32"), 128256, CPU)
    assert sum(list(fp32.values())[:4]) == 16 * 8030261248


def test_tp_halves_what_it_shards():
    one, two = (memory(config(LLAMA3_8B, 8192, 1, tp), 128256, CUDA) for tp in (1, 2))
    norms = 65 * 4096
    assert two["weights"] == (one["weights"] - 2 * norms) / 2 + 2 * norms
    assert two["logits and loss"] == one["logits and loss"] / 2
    whole = 8192 * (32 * (2 * 4 * 4096 + 4 * 2) + 2 * 2 * 4096)  # norms, before and after: on every rank
    assert two["activations"] - whole == (one["activations"] - whole) / 2


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "qwen2"])
def test_parameters_are_those_of_the_model(family, tp):
    model = TINY[family]
    axis = Axis("tp", tp, tp - 1, tuple(range(tp)), None)
    sizes = dict(vocab_size=100, max_sequence_length=32, padded_vocab_size=128)
    built = GPTModel(model, tp=axis, init=Init(device=torch.device("meta")), **sizes)
    assert sum(p.numel() for p in built.parameters()) == parameter_count(model, 128, tp)


TINY = {
    "gpt2": TransformerConfig(2, 64, 8, max_position_embeddings=32),
    "gpt2, dropout": TransformerConfig(2, 64, 8, max_position_embeddings=32, hidden_dropout=0.1),
    "squared relu": TransformerConfig(2, 64, 8, max_position_embeddings=32, squared_relu=True),
    "llama": TransformerConfig(2, 64, 8, 160, num_query_groups=2, **LLAMA),
    "llama, MHA": TransformerConfig(2, 64, 8, 160, **LLAMA),
    "llama, unfused": TransformerConfig(
        2, 64, 8, 160, num_query_groups=2, attention_backend="unfused", **LLAMA
    ),
    "qwen3": TransformerConfig(2, 64, 8, 160, 16, 2, qk_layernorm=True, **LLAMA),
    "qwen2": TransformerConfig(2, 64, 8, 160, num_query_groups=2, add_qkv_bias=True, **LLAMA),
    "grouped, no rotation": TransformerConfig(2, 64, 8, num_query_groups=2, max_position_embeddings=32),
}


def bytes_kept(model: TransformerConfig, s: int, b: int, dtype: torch.dtype, tp=None, scales=None) -> int:
    """What autograd holds after a forward pass of the real model, every storage once, parameters apart."""
    built = GPTModel(
        model, vocab_size=128, max_sequence_length=s, padded_vocab_size=128, tp=tp, init=Init(dtype=dtype)
    )
    if scales is not None:
        built.use_fp8(scales, range(model.num_layers))
    parameters = {p.untyped_storage().data_ptr() for p in built.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    tokens = torch.randint(0, 128, (b, s), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens, torch.arange(s), torch.arange(b), dropout_seed=1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = built(batch, tokens)
    assert loss.shape == (b, s)
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in parameters)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", TINY)
def test_activations_are_what_the_model_keeps(family, dtype):
    s, b = 32, 4
    run = config(TINY[family], s, b, dtype=dtype)
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    two, three = (bytes_kept(replace(TINY[family], num_layers=layers), s, b, kind) for layers in (2, 3))
    more = replace(run, model=replace(run.model, num_layers=3))
    layer = memory(more, 128, CPU)["activations"] - memory(run, 128, CPU)["activations"]
    assert layer == pytest.approx(three - two, rel=0.005)
    logits = 128 * s * b * kind.itemsize
    assert memory(run, 128, CPU)["activations"] + logits == pytest.approx(two, rel=0.01)


FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
LAYOUTS = {
    "tp": {},
    "sequence": dict(sequence_parallel=True),
    "full": FULL,
    "full, sequence": dict(sequence_parallel=True, **FULL),
    "full, spread": dict(distribute_saved_activations=True, **FULL),
    "block": dict(FULL, recompute_method="block"),
    "attention": dict(recompute_granularity="selective", recompute_modules=("core_attn",)),
    "mlp": dict(recompute_granularity="selective", recompute_modules=("mlp",)),
}


def kept_on_a_rank(mesh, models):
    """Bytes a token of two and of three layers of each."""
    return [
        [bytes_kept(replace(m, num_layers=n), 32, 4, torch.bfloat16, mesh.tp) / (32 * 4) for n in (2, 3)]
        for m in models
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2, dropout", "llama, unfused", "qwen3"])
def test_activations_of_two_ranks(family):
    """What a further layer keeps, and the whole, in bf16 on two tensor-parallel ranks, in every layout."""
    models = [replace(TINY[family], **changes) for changes in LAYOUTS.values()]
    found = run_spmd(kept_on_a_rank, 2, models, tp=2)[0]
    for layout, model, (two, three) in zip(LAYOUTS, models, found, strict=True):
        run = config(model, 32, 4, 2)
        planned = [
            memory(replace(run, model=replace(model, num_layers=n)), 128, CPU)["activations"] / (32 * 4)
            for n in (2, 3)
        ]  # a CPU's statistics are in bf16; of the whole half of 128 logits, too, and tokens, labels
        assert planned[1] - planned[0] == pytest.approx(three - two, abs=12), layout
        assert planned[0] + 2 * 64 == pytest.approx(two, abs=50), layout


def test_states_are_shared_as_the_strategies_say():
    """Bytes a parameter in bf16 of four replicas: 18, 6 + 12/4, 2 + 16/4 and buckets; bf16; on the host."""

    def per_parameter(optimizer=None, **parallel):
        optimizer = optimizer or OptimizerConfig()
        run = config(LLAMA3_8B, 8192, 1)
        kind = ParallelConfig(data_parallel_size=4, **parallel)
        parts = memory(replace(run, parallel=kind, optimizer=optimizer), 128256, CUDA)
        return sum(list(parts.values())[:4]) / 8030261248

    assert per_parameter() == 18
    assert per_parameter(use_distributed_optimizer=True) == 9
    pool = 2 * 40e6 * 4 / 8030261248
    assert per_parameter(data_parallel_sharding_strategy="optim_grads") == pytest.approx(6 + pool)
    half = OptimizerConfig(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", main_grads_dtype="bf16")
    assert per_parameter(half) == 12
    assert per_parameter(OptimizerConfig(optimizer_cpu_offload=True)) == 6
    assert per_parameter(OptimizerConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)) == 12


def test_buffers_of_overlapped_collectives():
    run = config(replace(LLAMA3_8B, sequence_parallel=True), 8192, 1, 4)
    run = replace(run, parallel=replace(run.parallel, tp_comm_overlap=True))
    assert memory(run, 128256, CUDA)["room for pieces"] == 2 * 2 * 4096 * 8192 * 1.25


def test_a_fused_loss_keeps_no_logits():
    run = config(replace(LLAMA3_8B, cross_entropy_loss_fusion=True), 8192, 1)
    assert memory(run, 128256, CUDA)["logits and loss"] == 128256 * 10 * 2048 + 2 * 4096 * 8192


def test_description():
    parts = {"weights": 2**30, "main weights": 0, "activations": 3 * 2**30}
    assert describe(parts) == "predicted peak per rank 4.00 GiB (weights 25 %, activations 75 %)"


# Pipelines

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
    stages = build(config, mesh, VOCAB, VOCAB, Init(dtype=kind))
    buckets = Buckets(stages, config.parallel, mesh)
    s, b = config.data.seq_length, config.data.micro_batch_size
    labels = torch.randint(VOCAB, (b, s))
    weights = torch.full((b, s), 1 / (b * s))
    batch = Batch(labels, torch.arange(s), torch.arange(b), dropout_seed=1, loss_weights=weights)

    def step(chunk: GPTModel, _: int) -> torch.Tensor:
        out = chunk(batch, labels)
        return (out * weights).sum() if chunk.post_process else out

    microbatches = config.data.global_batch_size // b
    buckets.zero(microbatches)
    with torch.profiler.profile(profile_memory=True) as record:
        execute(stages, step, microbatches, stages.shape(s, b), tracer=Marked())
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
    """Two layers a chunk, and microbatches large beside the weights, whose copies are not planned.

    There are two microbatches a rank.
    """
    chunks = 2 if name in ("interleaved", "zb-v") else 1
    model = replace(TINY[family], num_layers=2 * pp * chunks, max_position_embeddings=64, **changes)
    run = config(model, 64, 8)
    parallel = replace(run.parallel, pipeline_model_parallel_size=pp, **SCHEDULES[name])
    return replace(run, parallel=parallel, data=replace(run.data, global_batch_size=8 * 2 * pp))


def chunks_of(run: Config, stages: list[int]) -> list[Needs]:
    layers = stage_layers(run, VOCAB)
    pieces = [Piece(len(layers[i]), i == 0, i == len(layers) - 1) for i in stages]
    return [needs(run, piece, VOCAB, CPU) for piece in pieces]


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

    gloo keeps what was sent until a wire has as many messages as forwards are open: two wires, and what the
    executor has in hand. That is less than any op adds or takes away, but for layers that are made again.
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
        smallest = min(sum(part.values()) for chunk in chunks for part in (chunk.kept, chunk.put_off))
        slack = (2 * kept[rank] + 5) * message
        assert slack < smallest or changes is FULL
        held = [sum(behind.values()) for _, behind in walk(lists[rank], chunks)]
        assert parts["weights"] == 2 * seen["params"]
        assert all(-message / 4 < b - h < slack for b, h in zip(seen["behind"], held, strict=True))
        planned = sum(parts.values()) - sum(list(parts.values())[:4])
        least = 8 if changes is FULL else 2  # the last norm, let go of by then, is planned beside the layers
        assert -least * message < max(seen["most"]) - planned < slack


def put_off_on_a_rank(mesh, models):
    return [[put_off_of(mesh, replace(model, num_layers=n)) for n in (2, 3)] for model in models]


def put_off_of(mesh, model):
    """Bytes a token that the work of a backward on weight gradients holds, every storage once."""
    init = Init(dtype=torch.bfloat16)
    sizes = dict(vocab_size=128, max_sequence_length=32, padded_vocab_size=128)
    stages = Stages([GPTModel(model, tp=mesh.tp, init=init, **sizes)])
    labels = torch.zeros(4, 32, dtype=torch.long)
    with stages.wgrad_store.collect() as works:
        stages[0](Batch(labels, torch.arange(32), torch.arange(4), dropout_seed=1), labels).sum().backward()
    cells = [cell.cell_contents for _, work in works for cell in work.__closure__]
    tensors = [x for x in cells if isinstance(x, torch.Tensor) and not isinstance(x, torch.nn.Parameter)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values()) / (32 * 4)


@pytest.mark.parametrize("family", ["llama", "gpt2, dropout", "qwen3"])
def test_what_is_put_off_until_w(family):
    """Of a further layer exactly, on two tensor-parallel ranks; of the ends with token ids and a mask."""
    models = [replace(TINY[family], **changes) for changes in LAYOUTS.values()]
    found = run_spmd(put_off_on_a_rank, 2, models, tp=2)[0]
    for layout, model, (two, three) in zip(LAYOUTS, models, found, strict=True):
        run = config(model, 32, 4, 2)
        planned = [sum(needs(run, Piece(n), 128 // 2, CPU).put_off.values()) / (32 * 4) for n in (2, 3)]
        assert planned[1] - planned[0] == three - two, layout
        assert planned[0] + 9 == two, layout


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
    assert describe(*ranks) == "predicted peak of pipeline rank 1 2.00 GiB (weights 50 %, messages 50 %)"

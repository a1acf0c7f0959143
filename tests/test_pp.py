"""Pipelines against one process: the same sums in the same order, so gradients are equal to the bit.

The model is Llama-like with weights of its own in the output layer; where the embedding is tied, a sum of two
ranks' gradients takes the place of one rank's, and only rounding may differ.
"""

import functools
import gc
import weakref
from dataclasses import replace

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.build import build
from nanomegatron.comm import barrier, start_receive, start_send
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import Config, DataConfig, OptimizerConfig, ParallelConfig
from nanomegatron.data.loader import BatchLoader
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.mesh import Axis
from nanomegatron.model import GPTModel, StageSpec
from nanomegatron.param import Init
from nanomegatron.plan.flops import stage_layers
from nanomegatron.pp import ModelChunks, run_schedule, warm_up
from nanomegatron.report.generate import Sampling, generate
from tests.spmd import run_spmd, spmd

VOCAB, PADDED, LENGTH, MICRO, M = 61, 64, 16, 2, 6
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
GPT = {"hidden_dropout": 0.1}
LAYOUTS = {
    "gpipe": dict(pipeline_schedule="gpipe"),
    "1f1b": {},
    "interleaved": dict(num_virtual_stages_per_pipeline_rank=2),
    "in groups": dict(
        num_virtual_stages_per_pipeline_rank=2, microbatch_group_size_per_virtual_pipeline_stage=5
    ),
    "zb-h1": dict(pipeline_schedule="zb-h1"),
    "zb-v": dict(pipeline_schedule="zb-v"),
}


def config_of(family: dict, parallel: ParallelConfig, **more) -> Config:
    shape = dict(num_layers=8, hidden_size=32, num_attention_heads=4, max_position_embeddings=LENGTH)
    model = TransformerConfig(**shape, init_method_std=0.1, **family, **more)
    return Config(model, parallel, data=DataConfig(seq_length=LENGTH))


def stages_of(mesh, family: dict, schedule: dict, **more) -> ModelChunks:
    """This rank's chunks; schedule: settings of ParallelConfig."""
    parallel = ParallelConfig(pipeline_model_parallel_size=mesh.pp.size, **schedule)
    config = config_of(family, parallel, **more)
    return build(config, mesh, VOCAB, PADDED, Init(seed=5, std=0.1))


def microbatch(i: int) -> tuple[Batch, torch.Tensor]:
    text = torch.randint(VOCAB, (MICRO, LENGTH + 1), generator=torch.Generator().manual_seed(i))
    ids = torch.arange(MICRO) + MICRO * i
    return Batch(text[:, :-1], torch.arange(LENGTH), ids, dropout_seed=3), text[:, 1:]


def gradients(mesh, family: dict, schedule: dict, bucketed: bool = True, microbatches=M, **more) -> dict:
    """Loss of each microbatch, and the gradient of every part that this rank holds, by name."""
    stages = stages_of(mesh, family, schedule, **more)
    alone = ParallelConfig(pipeline_model_parallel_size=mesh.pp.size)
    buckets = ParamAndGradBuckets(stages, alone, mesh) if bucketed else None
    losses = []

    def step(chunk: GPTModel, i: int) -> torch.Tensor:
        batch, labels = microbatch(i)
        if not chunk.pre_process and not chunk.post_process:
            batch = replace(batch, tokens=None)  # never read
        out = chunk(batch, labels)
        if not chunk.post_process:
            return out
        losses.append(out.mean().item())
        return out.mean()

    if bucketed:
        buckets.zero_grad_buffer(microbatches)
    run_schedule(stages, step, microbatches, stages.shape(LENGTH, MICRO))
    if bucketed:
        buckets.finish_grad_sync()
        grads = {s.part.name: s.shard_view(b.grad_shard).clone() for b, s in buckets.slices()}
    else:
        grads = {part.name: part.local_view(p.grad) for p in stages.parameters() for part in p.spec.parts}
    return {"losses": losses, "grads": grads}


@functools.cache
def of_one_process(family: str, bucketed: bool = True) -> dict:
    """`gradients` of one process, computed once."""
    return run_spmd(gradients, 1, FAMILIES[family], {}, bucketed)[0]


FAMILIES = {"llama": LLAMA, "gpt": GPT}
AGAIN = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def gradients_twice(mesh, schedule: dict) -> list[dict]:
    """As they are, and with recomputed layers."""
    return [gradients(mesh, LLAMA, schedule, **more) for more in ({}, AGAIN)]


def some(names, *fast: str) -> list:
    """The schedules, of which the fast tier has some."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.full) for name in names]


@pytest.mark.parametrize(
    "size, schedule",
    [(2, name) for name in LAYOUTS]
    + [(4, name) for name in ("in groups", "zb-h1", "zb-v")]
    + [pytest.param(4, name, marks=pytest.mark.full) for name in ("gpipe", "1f1b", "interleaved")],
)
def test_gradients_are_those_of_one_process_to_the_bit(size, schedule):
    """Recomputed layers change no bit either."""
    whole = of_one_process("llama")
    each = run_spmd(gradients_twice, size, LAYOUTS[schedule], pp=size, **LAYOUTS[schedule])
    for ranks in zip(*each, strict=True):
        assert [x for rank in ranks for x in rank["losses"]] == whole["losses"] and len(whole["losses"]) == M
        found = {name: grad for rank in ranks for name, grad in rank["grads"].items()}
        assert found.keys() == whole["grads"].keys()
        assert sum(len(rank["grads"]) for rank in ranks) == len(found), "each part on one rank"
        for name, grad in whole["grads"].items():
            assert torch.equal(found[name], grad.flatten()), name
            assert grad.norm() > 0


@pytest.mark.parametrize("schedule", some(["1f1b", "interleaved", "zb-h1", "zb-v"], "interleaved", "zb-v"))
def test_tied_embedding_is_one_parameter(schedule):
    """Both copies have the sum of the gradients; on one rank (zb-v) there is one copy, with both uses."""
    whole = of_one_process("gpt")["grads"]
    ranks = run_spmd(gradients, 2, GPT, LAYOUTS[schedule], pp=2, **LAYOUTS[schedule])
    words = [g for rank in ranks for n, g in rank["grads"].items() if n.endswith("word_embeddings.weight")]
    assert len(words) == (1 if schedule == "zb-v" else 2) and all(torch.equal(words[0], w) for w in words)
    for rank in ranks:
        for name, grad in rank["grads"].items():
            if "linear_qkv.k.bias" not in name:  # whose gradient is rounding
                assert (grad - whole[name]).norm() <= 1e-5 * whole[name].norm(), name


@pytest.mark.parametrize(
    "family, schedule",
    [
        ("llama", "zb-h1"),
        ("gpt", "zb-v"),
        pytest.param("llama", "zb-v", marks=pytest.mark.full),
        pytest.param("gpt", "zb-h1", marks=pytest.mark.full),
    ],
)
def test_weight_gradients_are_put_off_without_buckets_too(family, schedule):
    """Without buckets autograd's `.grad` gets them; tied copies on two ranks then have a summand each."""
    whole = of_one_process(family, False)["grads"]
    ranks = run_spmd(gradients, 2, FAMILIES[family], LAYOUTS[schedule], False, pp=2, **LAYOUTS[schedule])
    total = {}
    for name, grad in (item for rank in ranks for item in rank["grads"].items()):
        total[name] = total[name] + grad if name in total else grad
    for name, grad in whole.items():
        if "linear_qkv.k.bias" not in name:
            assert (total[name] - grad).norm() <= 1e-5 * grad.norm(), name


@spmd(world=2, pp=2, pipeline_schedule="zb-v")
def test_warm_up_runs_every_op_without_messages(mesh):
    """One rank after the other, so that a receive would hang."""
    stages = stages_of(mesh, LLAMA, LAYOUTS["zb-v"])
    buckets = ParamAndGradBuckets(stages, ParallelConfig(pipeline_model_parallel_size=2), mesh)

    def step(chunk: GPTModel, i: int) -> torch.Tensor:
        out = chunk(*microbatch(i))
        return out.mean() if chunk.post_process else out

    for rank in range(2):
        if rank == mesh.pp.rank:
            buckets.zero_grad_buffer()
            warm_up(stages, step, stages.shape(LENGTH, MICRO))
        barrier(mesh.pp)
    buckets.finish_grad_sync()  # raises where a gradient is missing


def works_of_backward(mesh) -> list[str]:
    """Which weights a B leaves for its W, of a rank with everything, and that W alone changes main_grad."""
    stages = stages_of(mesh, GPT, {})
    buckets = ParamAndGradBuckets(stages, ParallelConfig(), mesh)
    buckets.zero_grad_buffer()
    batch, labels = microbatch(0)
    with stages.wgrad_store.collect() as works:
        stages[0](batch, labels).mean().backward()
    before = [bool(p.main_grad.any()) for p, _ in works]
    assert not any(before)
    stages.wgrad_store.run(works)
    assert all(bool(p.main_grad.any()) for p, _ in works)
    buckets.finish_grad_sync()  # all have said that they are ready
    return [p.spec.name for p, _ in works]


def test_every_matrix_can_be_put_off():
    names = run_spmd(works_of_backward, 1)[0]
    kinds = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    assert all(sum(kind in name for name in names) == 8 for kind in kinds)
    assert names.count("embedding.word_embeddings.weight") == 2, "as output weight and as embedding"


@spmd(world=2, pp=2, num_virtual_stages_per_pipeline_rank=2)
def test_messages_of_a_pair_come_in_order(mesh):
    """Both ways at once, with both neighbours the same rank: gloo would mix what shares a communicator."""
    me, peer = mesh.pp.rank, 1 - mesh.pp.rank
    out, back = mesh.p2p_links[me, peer], mesh.p2p_links[peer, me]
    assert set(mesh.p2p_links) == {(0, 1), (1, 0)} and out.axis.group is not back.axis.group
    sent = [start_send(torch.full((50_000,), 100.0 * me + i), out) for i in range(20)]
    for i in range(20):
        x = start_receive(lambda: torch.empty(50_000), back).wait()
        assert (x == 100.0 * peer + i).all(), f"message {i} is {x[0]}"
    for pending in sent:
        pending.wait()
    assert mesh.observer.counts["pp", "send", "calls"] == 20


@pytest.mark.parametrize(
    "size, loop", [(2, False), (4, True), pytest.param(4, False, marks=pytest.mark.full)]
)
def test_links_are_those_that_the_schedule_uses(size, loop):
    flags = dict(num_virtual_stages_per_pipeline_rank=2) if loop else {}
    found = run_spmd(links, size, pp=size, **flags)
    ring = {(r, (r + 1) % size) for r in range(size if loop else size - 1)}
    expected = ring | {(b, a) for a, b in ring}
    assert {tuple(pair) for pairs in found for pair in pairs} == expected
    assert all(rank in pair for rank, pairs in enumerate(found) for pair in pairs)


def links(mesh) -> list:
    return [list(pair) for pair in mesh.p2p_links]


def alive_outputs(mesh, schedule: dict) -> int:
    """The most outputs that live at the beginning of an op."""
    stages = stages_of(mesh, LLAMA, schedule)
    outputs, most = [], 0
    gc.freeze()  # else each collection goes through all of torch

    def step(chunk: GPTModel, i: int) -> torch.Tensor:
        nonlocal most
        gc.collect()
        most = max(most, sum(output() is not None for output in outputs))
        batch, labels = microbatch(i)
        out = chunk(batch, labels)
        outputs.append(weakref.ref(out.untyped_storage()))
        return out.mean() if chunk.post_process else out

    run_schedule(stages, step, 12, stages.shape(LENGTH, MICRO))
    del stages
    return most


def test_outputs_are_let_go_of():
    """Not kept for the backward: at most as many as are on their way, and gloo cannot tell of all of them."""
    first, last = run_spmd(alive_outputs, 2, {}, pp=2)
    assert first <= 3 and last == 0


def text_of(mesh, family: dict, schedule: dict, more: dict) -> list[list[int]]:
    stages = stages_of(mesh, family, schedule, **more)
    prompts = [[5, 9, 2, 40], [3], [12, 50, 8]]
    greedy = generate(stages, prompts, 5, Sampling(temperature=0))
    return greedy + generate(stages, prompts, 5, Sampling(temperature=0.9, top_k=30, seed=1))


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_text_is_one_processs(family, full):
    """Schedules of the same placement write in the same way."""
    names = LAYOUTS if full else ("interleaved", "zb-v") if family == "llama" else ("1f1b",)
    family = {key: value for key, value in FAMILIES[family].items() if key != "hidden_dropout"}
    whole = run_spmd(text_of, 1, family, {}, {})[0]
    for schedule in names:
        flags = LAYOUTS[schedule]
        assert run_spmd(text_of, 2, family, flags, {}, pp=2, **flags) == [whole] * 2, schedule
    flags = LAYOUTS["interleaved"]
    cut = dict(sequence_parallel=True)
    assert run_spmd(text_of, 4, family, flags, cut, pp=2, tp=2, **flags) == [whole] * 4


def text_of_empty_stages(mesh, schedule: dict) -> list[list[int]]:
    """Rank 0 has both ends of the model and no layer between them."""
    parallel = ParallelConfig(pipeline_model_parallel_size=mesh.pp.size, pipeline_split="flops", **schedule)
    config = config_of({}, parallel)
    config = replace(config, model=replace(config.model, num_layers=2, init_method_std=0.3))
    stages = build(config, mesh, 3000, 3072, Init(seed=5))
    assert mesh.pp.size == 1 or mesh.pp.rank or not any(len(chunk.layers) for chunk in stages)
    return generate(stages, [[1, 2, 3], [7]], 8, Sampling(temperature=0))


def test_generated_text_of_a_rank_without_layers():
    """It must count positions, too."""
    whole = run_spmd(text_of_empty_stages, 1, {})[0]
    flags = LAYOUTS["zb-v"]
    assert run_spmd(text_of_empty_stages, 2, flags, pp=2, **flags) == [whole] * 2


class Unread:
    """A data set that must not be read."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int):
        raise AssertionError("read")


def test_ranks_in_the_middle_read_no_data():
    data = DataConfig(seq_length=LENGTH, micro_batch_size=2, num_workers=0)
    one = Axis.single()
    batch = BatchLoader(Unread(), data, 0, one, "cpu", tokens_too=False).get(6)
    assert batch.tokens is None and batch.labels is None and batch.loss_mask is None
    assert batch.sample_ids.tolist() == [6, 7] and torch.equal(batch.positions, torch.arange(LENGTH))
    with pytest.raises(AssertionError, match="read"):
        BatchLoader(Unread(), data, 0, one, "cpu").get(6)


def test_a_stage_says_what_it_misses():
    config = config_of(LLAMA, ParallelConfig()).model
    stage = StageSpec(range(2, 4), pre_process=False)
    second = GPTModel(config, vocab_size=VOCAB, max_sequence_length=LENGTH, stage=stage)
    assert [layer.layer for layer in second.layers] == [2, 3]
    with pytest.raises(RuntimeError, match="call set_input_tensor before each forward"):
        second(*microbatch(0))


def test_split_by_cost_counts_the_head():
    """Llama-3-8B: the output layer is worth 2.3 layers at this length."""
    model = TransformerConfig(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        ffn_hidden_size=14336,
        swiglu=True,
    )
    parallel = ParallelConfig(pipeline_model_parallel_size=4, pipeline_split="flops")
    config = Config(model, parallel, optimizer=OptimizerConfig(), data=DataConfig(seq_length=8192))
    assert [len(layers) for layers in stage_layers(config, 128256)] == [9, 9, 8, 6]

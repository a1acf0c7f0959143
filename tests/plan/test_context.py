"""The memory model of rows that several ranks share: by arithmetic, and what real ranks keep of a layer."""

import itertools
from dataclasses import replace

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.config.settings import Config, DataConfig, ParallelConfig, PrecisionConfig
from nanomegatron.cp import SequenceShard, context_attention
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from nanomegatron.pick_variants import attention_over_cp
from nanomegatron.plan.layer import CPMode, Sizes, attention_in_flight, saved_by_layer
from nanomegatron.plan.memory import memory, memory_of_ranks
from nanomegatron.variants.packing import Ranks
from tests.plan.test_memory import CPU, CUDA, FULL, LLAMA3_8B, TINY, config
from tests.spmd import run_spmd

BF16 = torch.bfloat16


def shared(run: Config, cp: int, *types: str, **parallel) -> Config:
    """The run with its rows over cp ranks."""
    given = dict(context_parallel_size=cp, cp_comm_type=types or ("p2p",), **parallel)
    return replace(run, parallel=replace(run.parallel, **given))


def handed_on(tokens: int, ranks: int) -> int:
    """Bytes of 8 heads' keys and values in bf16: of two ranks in two slots, and one a round for gradients."""
    return 2 * (2 + 1 + ranks // 2) * tokens * 2 * 1024 * 2


@pytest.mark.parametrize("types", [("p2p",), ("allgather",)])
def test_four_ranks_take_rows_four_times_as_long(types):
    """Llama-3-8B: what a rank keeps is that of one process with its tokens; the states are shared by all."""
    one = memory(config(LLAMA3_8B, 8192, 1), 128256, CUDA)
    parts = memory(shared(config(LLAMA3_8B, 32768, 1), 4, *types), 128256, CUDA)
    assert parts == one | {"messages": handed_on(8192, 4) * ("p2p" in types)}
    optim = memory(shared(config(LLAMA3_8B, 32768, 1), 4, use_distributed_optimizer=True), 128256, CUDA)
    assert optim["Adam moments"] == one["Adam moments"] / 4 == 2 * 8030261248
    half = memory(shared(config(LLAMA3_8B, 32768, 1), 8), 128256, CUDA)
    assert half["activations"] == one["activations"] / 2


def test_heads_that_have_come_are_kept_in_their_order():
    """QKV output 6144, q and k rotated 5120, output 4096; by heads 4096 + 2 * 1024, output twice."""
    token = 2 * (4 * 4096 + 4 * 14336) + 4 * (2 + 32)
    for types, cp, width in [
        (("p2p",), 4, 6144 + 5120 + 4096),
        (("a2a",), 4, 6144 + 2 * 4096),
        (("a2a",), 16, 4096 + 2 * 16 * 128 + 2 * 4096),  # each of 8 key/value heads on two ranks
        (("a2a",) * 8 + ("p2p",) * 24, 4, (6144 + 2 * 4096) / 4 + (6144 + 5120 + 4096) * 3 / 4),
    ]:
        run = shared(config(LLAMA3_8B, 8192 * cp, 1), cp, *types)
        assert memory(run, 128256, CUDA)["activations"] == 8192 * (32 * (token + 2 * width) + 2 * 2 * 4096)
    both = shared(config(LLAMA3_8B, 65536, 1), 8, "a2a+p2p", hierarchical_context_parallel_sizes=(2, 4))
    assert sum(saved_by_layer(Sizes(both, CUDA)).values()) == token + 2 * (6144 + 2 * 4096)


def test_modes_of_layers():
    model = replace(TINY["llama"], num_layers=4, window_size=(7, 0), window_attn_skip_freq="2")
    types = ("p2p", "a2a", "a2a+p2p", "allgather")
    run = shared(config(model, 64, 1), 8, *types, hierarchical_context_parallel_sizes=(4, 2))
    modes = [CPMode(1, 8, True), CPMode(8, 1), CPMode(4, 2, True), CPMode(1, 8, True)]
    assert Sizes(run, CUDA).cp_modes == modes
    alone = Sizes(config(model, 64, 1), CUDA)
    assert alone.cp_modes == [CPMode(gathered=i % 2 == 0) for i in range(4)]
    assert attention_in_flight(alone) == 0


def in_flight(run: Config) -> float:
    return attention_in_flight(Sizes(run, CUDA))


def test_what_is_in_flight():
    """Bytes a token of Llama-3-8B in bf16, 4096 features of queries and 1024 of keys."""
    run = config(LLAMA3_8B, 8192, 1)
    all_keys = 8 * 4096 + 8 * (2 * 2 + 4 * 4) * 1024
    assert in_flight(shared(run, 8, "allgather")) == all_keys
    assert in_flight(shared(run, 8, "p2p", *["allgather"] * 31)) == all_keys
    windowed = replace(run, model=replace(run.model, window_size=(4095, 0)))
    assert in_flight(shared(windowed, 8)) == all_keys
    assert in_flight(shared(run, 8)) == in_flight(shared(run, 8, "a2a")) == 0
    unfused = replace(run, model=replace(run.model, attention_backend="unfused"))
    assert in_flight(shared(unfused, 8)) == 3 * 4 * 32 * 1024
    assert in_flight(shared(unfused, 8, "allgather")) == all_keys + 12 * 32 * 8192


@pytest.mark.parametrize("types, cp", [("p2p", 32), ("allgather", 8), ("allgather", 32)])
def test_the_keys_of_many_ranks_are_more_than_an_mlp(types, cp):
    """The larger of the gradients inside an MLP and, with what it kept gone, of attention; behind no loss."""
    parallel = dict(pipeline_model_parallel_size=4)
    run = shared(config(LLAMA3_8B, 2048 * cp, 1), cp, types, **parallel)
    parts = memory_of_ranks(run, 128256, CUDA)[0]
    mlp, attention = 2 * 2 * 14336, in_flight(run) - 4 * 2 * 14336  # the input of fc2 is gone
    assert (attention > mlp) == (types == "allgather")
    assert parts["backward of a layer"] == 2048 * max(mlp, attention)
    assert parts["messages"] == 3 * 2048 * 2 * 4096 + handed_on(2048, cp) * (types == "p2p")


def test_packs_of_documents():
    """A rank takes as many tokens as it may: but for padding what the data has."""
    data = DataConfig(seq_length=8000, variable_seq_lengths=True)
    fixed = Config(model=LLAMA3_8B, data=data, parallel=ParallelConfig(context_parallel_size=4))
    dynamic = shared(fixed, 4, dynamic_context_parallel=True, max_seqlen_per_dp_cp_rank=3001)
    in_fp8 = replace(dynamic, precision=PrecisionConfig(bf16=True, fp8_format="hybrid"))
    for run, tokens in (fixed, 2000), (dynamic, 3001), (in_fp8, 3001):
        assert Sizes(run, CUDA).tokens == tokens
        assert Ranks.from_config(run).room(1) == pytest.approx(tokens, rel=0.01)


def kept_on_a_rank(mesh, cases, types) -> list[float]:
    return [kept_of_a_layer(mesh, *case, types) for case in cases]


def kept_of_a_layer(mesh, model, dtype, types) -> float:
    """Bytes a token that autograd holds of a further layer, every storage once."""
    s, b, found = 32, 8, []
    for layers in (2, 3):
        built = GPTModel(
            replace(model, num_layers=layers),
            vocab_size=128,
            max_sequence_length=s,
            padded_vocab_size=128,
            mesh=mesh,
            init=Init(dtype=dtype),
        )
        for layer in built.layers:
            attention = layer.self_attention
            attention.context_attention = attention_over_cp(context_attention, attention.mask, mesh.cp)
        shard = SequenceShard.of_row(mesh.cp, s, types * layers, mesh.device)
        places = torch.from_numpy(shard.positions)
        tokens = torch.randint(0, 128, (b, s), generator=torch.Generator().manual_seed(0))[:, places]
        batch = Batch(tokens, places, torch.arange(b), dropout_seed=1, shard=shard)
        parameters = {p.untyped_storage().data_ptr() for p in built.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(x: torch.Tensor, kept: dict = kept) -> torch.Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            built(batch, tokens).sum()
        found.append(sum(x.nbytes() for pointer, x in kept.items() if pointer not in parameters))
    return (found[1] - found[0]) / (b * s // mesh.cp.size)


AGAIN = dict(recompute_granularity="selective", recompute_modules=("core_attn",))
KEPT = {
    "p2p": [(name, {}) for name in ("llama", "llama, unfused", "qwen3", "gpt2")],
    "a2a": [(name, {}) for name in ("llama", "llama, unfused", "qwen3", "gpt2")] + [("llama", AGAIN)],
    "allgather": [("llama", {})],
    "a2a+p2p": [("llama", {})],
}
KEPT["p2p"] += [("llama", AGAIN), ("llama", FULL)]


@pytest.mark.parametrize("kind", KEPT)
def test_a_rank_keeps_what_was_planned(kind):
    """Models of several kinds, in fp32 and bf16, on the same ranks."""
    sizes = dict(hierarchical_context_parallel_sizes=(2, 2)) if kind == "a2a+p2p" else {}
    cp, cases, planned = 4 if sizes else 2, [], []
    for (family, changes), dtype in itertools.product(KEPT[kind], (torch.float32, BF16)):
        model = replace(TINY[family], max_position_embeddings=32, **changes)
        run = shared(config(model, 32, 8, dtype="bf16" if dtype == BF16 else "fp32"), cp, kind, **sizes)
        more = replace(run, model=replace(model, num_layers=3))
        layer = memory(more, 128, CPU)["activations"] - memory(run, 128, CPU)["activations"]
        cases.append((model, dtype))
        planned.append(layer / (8 * 32 // cp))
    found = run_spmd(kept_on_a_rank, cp, cases, (kind,), cp=cp, cp_comm_type=(kind,), **sizes)
    for case, expected, *ranks in zip(cases, planned, *found, strict=True):
        assert ranks == pytest.approx([expected] * cp, rel=0.025), case


def test_groups_of_several_sizes_have_no_memory_to_hand_keys_on():
    run = shared(config(LLAMA3_8B, 8192, 1), 4)
    found = [memory(run, 128256, device)["messages"] for device in (CUDA, CPU)]
    assert found == [handed_on(2048, 4), 0]
    dynamic = shared(run, 4, dynamic_context_parallel=True)
    assert memory(dynamic, 128256, CUDA)["messages"] == 0

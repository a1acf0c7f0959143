"""The memory model against published figures and against what the real model keeps."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from nanomegatron import zero2
from nanomegatron.batch import Batch
from nanomegatron.build import quantize_layers
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import Config, DataConfig, OptimizerConfig, ParallelConfig, PrecisionConfig
from nanomegatron.fast import ring
from nanomegatron.fast.fp8_producers import quantizing_norm
from nanomegatron.fast.fused_layer import FusedLayers
from nanomegatron.fast.fused_loss import FusedLossFunction, fused_output_loss
from nanomegatron.fast.moe_dispatch import OverlappedMoe
from nanomegatron.fp8 import Scales
from nanomegatron.layers import logits_then_loss
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.model import GPTModel
from nanomegatron.ops import cross_entropy
from nanomegatron.ops.attention import choose_backend
from nanomegatron.param import Init
from nanomegatron.pick_fast_paths import Paths, install
from nanomegatron.pick_variants import pick_variants
from nanomegatron.plan import fast as plan_fast
from nanomegatron.plan import gradients as plan_gradients
from nanomegatron.plan import memory as plan_memory
from nanomegatron.plan.flops import parameter_count
from nanomegatron.plan.layer import ITEMSIZE, Machine, Sizes
from nanomegatron.plan.memory import describe_memory, memory
from nanomegatron.pp import ModelChunks
from tests.spmd import run_spmd

CPU, CUDA = Machine(gpu=False, kernels=False), Machine(kernels=False)  # with kernels: ops/test_paths.py
ALONE = Mesh()
LLAMA = dict(
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
GEMMA = LLAMA | dict(
    swiglu=False,
    geglu=True,
    norm_placement="both",
    apply_layernorm_1p=True,
    qk_layernorm=True,
    softmax_scale=0.3,
    embedding_multiplier=8.0,
)
LLAMA3_8B = TransformerConfig(32, 4096, 32, 14336, num_query_groups=8, **LLAMA)


def config(model: TransformerConfig, s: int, b: int, tp: int = 1, dtype: str = "bf16") -> Config:
    return Config(
        model=model,
        parallel=ParallelConfig(tensor_model_parallel_size=tp),
        precision=PrecisionConfig(**{dtype: True} if dtype != "fp32" else {}),
        data=DataConfig(seq_length=s, micro_batch_size=b, make_vocab_size_divisible_by=64),
    )


def test_numbers_are_those_of_the_code_that_allocates():
    assert cross_entropy.CHUNK_TOKENS == plan_memory.LOSS_CHUNK
    assert FusedLossFunction.chunk == plan_fast.FUSED_LOSS_CHUNK
    assert ring.ROUND == plan_fast.RING_ROUND
    assert zero2.IN_FLIGHT == plan_gradients.REDUCTIONS
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZE} == ITEMSIZE


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_backend_is_the_one_that_runs(dtype, dropout):
    run = config(replace(LLAMA3_8B, attention_dropout=dropout), 8192, 1, dtype=dtype)
    for machine, device in (CPU, "cpu"), (CUDA, "cuda"):
        runs = choose_backend("auto", torch.device(device), getattr(torch, run.dtype_name), dropout)
        assert Sizes(run, machine).backend == runs


def test_no_torch_is_needed_to_plan():
    code = "import sys, nanomegatron.plan.memory; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


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


def test_recomputed_layers_keep_the_input_of_their_group():
    for layers, inputs in (1, 32), (2, 16), (5, 7):
        model = replace(LLAMA3_8B, **FULL | {"recompute_num_layers": layers})
        kept = memory(config(model, 8192, 1), 128256, CUDA)["activations"]
        assert kept == 8192 * 2 * 4096 * (inputs + 2)  # in bf16; the last norm, before and after


def test_tp_halves_what_it_shards():
    one, two = (memory(config(LLAMA3_8B, 8192, 1, tp), 128256, CUDA) for tp in (1, 2))
    norms = 65 * 4096
    assert two["weights"] == (one["weights"] - 2 * norms) / 2 + 2 * norms
    assert two["logits and loss"] == one["logits and loss"] / 2
    whole = 8192 * (32 * (2 * 4 * 4096 + 4 * 2) + 2 * 2 * 4096)  # norms, before and after: on every rank
    assert two["activations"] - whole == (one["activations"] - whole) / 2


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "qwen2", "gemma"])
def test_parameters_are_those_of_the_model(family, tp):
    model = TINY[family]
    axis = Axis("tp", tp, tp - 1, tuple(range(tp)), None)
    sizes = dict(vocab_size=100, max_sequence_length=32, padded_vocab_size=128)
    built = GPTModel(model, mesh=Mesh(tp=axis), init=Init(device=torch.device("meta")), **sizes)
    pick_variants(built, Axis.single("cp"))
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
    "gemma": TransformerConfig(2, 64, 8, 160, 16, 2, **GEMMA),
    "olmo2": TransformerConfig(2, 64, 8, 160, norm_placement="post", **LLAMA),
    "bounded": TransformerConfig(2, 64, 8, 160, attn_logit_softcapping=2.0, **LLAMA),
    "grouped, no rotation": TransformerConfig(2, 64, 8, num_query_groups=2, max_position_embeddings=32),
}


def bytes_kept(
    model: TransformerConfig, s: int, b: int, dtype: torch.dtype, mesh=ALONE, recipe=None, fp8=()
) -> int:
    """What autograd holds after a forward pass of the real model, every storage once, parameters apart.

    recipe: of FP8, if any; fp8: a list for the states of the layers.
    """
    built = GPTModel(
        model, vocab_size=128, max_sequence_length=s, padded_vocab_size=128, mesh=mesh, init=Init(dtype=dtype)
    )
    pick_variants(built, Axis.single("cp"))
    if recipe is not None:
        fp8.extend(quantize_layers(built, recipe, range(model.num_layers)))
        Scales(recipe, fp8, torch.device("cpu"))
    loss = fused_output_loss if model.cross_entropy_loss_fusion else logits_then_loss
    moe = OverlappedMoe(None) if model.moe_shared_expert_overlap else None  # as `paths_for` on a CPU
    layers = FusedLayers(quantizing_norm, model.recomputes("layernorm"))
    discards = model.recompute_modules
    install(ModelChunks([built]), Paths(layers=layers, producers=True, loss=loss, moe=moe, discards=discards))
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
    assert layer == pytest.approx(three - two, rel=0.025)
    logits = 128 * s * b * kind.itemsize
    assert memory(run, 128, CPU)["activations"] + logits == pytest.approx(two, rel=0.025)


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
        [bytes_kept(replace(m, num_layers=n), 32, 4, torch.bfloat16, mesh) / (32 * 4) for n in (2, 3)]
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
        ]
        assert planned[1] - planned[0] == pytest.approx(three - two, rel=0.02), layout
        assert planned[0] + 2 * 64 == pytest.approx(two, rel=0.02, abs=50), layout  # half the logits; tokens


def test_states_are_shared_as_the_strategies_say():
    """Bytes a parameter in bf16 of four replicas: 18, 6 + 12/4, 2 + 16/4 and buckets; bf16; on the host."""

    def per_parameter(optimizer=None, replicas=4, **parallel):
        optimizer = optimizer or OptimizerConfig()
        run = config(LLAMA3_8B, 8192, 1)
        kind = ParallelConfig(data_parallel_size=replicas, **parallel)
        parts = memory(replace(run, parallel=kind, optimizer=optimizer), 128256, CUDA)
        return sum(list(parts.values())[:4]) / 8030261248

    assert per_parameter() == 18
    assert per_parameter(use_distributed_optimizer=True) == 9
    both = dict(data_parallel_sharding_strategy="optim_grads")
    buckets = (2 + zero2.IN_FLIGHT) * ParallelConfig(**both).bucket_size(300)
    for ranks, overlap, pool in (4, False, 128256 * 4096), (300, True, buckets):
        found = per_parameter(replicas=ranks, overlap_grad_reduce=overlap, **both)
        assert found == pytest.approx(2 + 16 / ranks + pool * 4 / 8030261248)
    only = replace(config(LLAMA3_8B, 8192, 1), parallel=ParallelConfig(data_parallel_size=4, **both))
    only = memory(replace(only, run=replace(only.run, eval_only=True)), 128256, CUDA)
    assert only["weights"] == 2 * 8030261248 and "gradients" not in only
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
    assert describe_memory(parts) == "predicted peak per rank 4.00 GiB (weights 25 %, activations 75 %)"

"""Builds this rank's part of the model, its optimizer, and what runs its forwards and backwards.

Tests: tests/test_layouts.py. Page: docs/architecture.md.

    build              this rank's stages of GPTModel (`model.py`), with the variants that its flags ask for
        quantize       the linear layers that multiply in FP8
    install            the fast paths, before parameters go into buckets (`pick_fast_paths.py`)
    build_optimizer    parameters and gradients in buckets, and what updates them
    build_executor     the loop over forwards and backwards, or the CUDA graphs in its place
"""

from collections.abc import Callable, Container, Iterator

import torch
from torch import nn

from nanomegatron.config.parallel import ParallelConfig
from nanomegatron.config.settings import Config
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.fast.fp8_experts import quantize_experts
from nanomegatron.fast.offload import host_state
from nanomegatron.fp8 import Fp8LayerState, Recipe, Scales, recipe_of
from nanomegatron.fp8_linear import use_fp8
from nanomegatron.mesh import Mesh
from nanomegatron.model import GPTModel, StageSpec
from nanomegatron.moe import GroupedExperts
from nanomegatron.optim import Optimizer
from nanomegatron.param import Init
from nanomegatron.pick_fast_paths import Paths
from nanomegatron.pick_variants import pick_variants
from nanomegatron.plan.flops import stage_layers
from nanomegatron.pp import ModelChunks, run_schedule
from nanomegatron.schedules import placement
from nanomegatron.tp import ColumnParallelLinear, RowParallelLinear
from nanomegatron.variants.weight_decay import decay_by_rates
from nanomegatron.zero2 import Zero2Buckets

BUCKETS = {"optim_grads": Zero2Buckets}  # by --data-parallel-sharding-strategy; others: ParamAndGradBuckets


def build(config: Config, mesh: Mesh, vocab_size: int, padded_vocab_size: int, init: Init) -> ModelChunks:
    """Build this rank's chunks of the model of a resolved config: new weights, variants, no fast paths."""
    parallel = config.parallel
    stages_of_ranks = placement(parallel.schedule, mesh.pp.size, parallel.chunks)
    chunks: list[GPTModel] = []
    for stage in stages_of_ranks[mesh.pp.rank]:
        chunk = GPTModel(
            config.model,
            vocab_size=vocab_size,
            max_sequence_length=config.model.max_position_embeddings,
            padded_vocab_size=padded_vocab_size,
            mesh=mesh,
            init=init,
            stage=stage_spec(config, stage, padded_vocab_size, chunks),
        )
        pick_variants(chunk, mesh.cp)
        chunks.append(chunk)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    model = ModelChunks(chunks, mesh, parallel.schedule, group)
    if config.precision.fp8_layers(config.model.num_layers):
        quantize(model, config, mesh, init.device)
    return model


def stage_spec(config: Config, stage: int, padded_vocab_size: int, earlier: list[GPTModel]) -> StageSpec:
    """Return what a stage has: its layers, and whether it begins or ends the model.

    earlier: this rank's chunks of earlier stages; with one the last stage may share its word embeddings.
    """
    layers_of_stages = stage_layers(config, padded_vocab_size)
    last = stage == len(layers_of_stages) - 1
    shared_words = None
    if last and earlier and earlier[0].embedding is not None:
        shared_words = earlier[0].embedding.word_embeddings.weight
    return StageSpec(layers_of_stages[stage], stage == 0, last, shared_words)


def quantize(model: ModelChunks, config: Config, mesh: Mesh, device: torch.device) -> None:
    """Make layers multiply in FP8: those of --fp8-format, and with --fp8-output-proj the output layer."""
    precision = config.precision
    recipe = recipe_of(precision)
    states: list[Fp8LayerState] = []
    for chunk in model:
        states += quantize_layers(chunk, recipe, precision.fp8_layers(config.model.num_layers))
        head = chunk.output_layer
        if precision.fp8_output_proj and head is not None:
            states.append(use_fp8(head, recipe))
    model.scales = Scales(recipe, states, device, (mesh.tp, mesh.dp_cp))


def quantize_layers(chunk: GPTModel, recipe: Recipe, numbers: Container[int]) -> Iterator[Fp8LayerState]:
    """Make linear layers and experts multiply in FP8 in the layers of these numbers; yield their states."""
    in_fp8 = [layer for layer in chunk.layers if layer.layer in numbers]
    for layer in in_fp8:
        for module in layer.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                yield use_fp8(module, recipe)
            elif isinstance(module, GroupedExperts):
                yield from quantize_experts(module, recipe)


def build_optimizer(
    model: nn.Module, config: Config, mesh: Mesh, lr_table: list[list[float]], paths: Paths
) -> tuple[ParamAndGradBuckets, Optimizer]:
    """Put the gradients of a model into buckets and make its optimizer. lr_table: `step_values`."""
    dtype = getattr(torch, config.grad_dtype_name)
    make_buckets = buckets_class(config.parallel)
    buckets = make_buckets(model, config.parallel, mesh, dtype, paths.shard_comm, paths.gathered)
    make_state = paths.state
    if config.optimizer.optimizer_cpu_offload:
        make_state = host_state(buckets, config.optimizer, make_state)
    updates = paths.updates(make_state)
    optimizer = Optimizer(buckets, config.optimizer, config.precision, lr_table, updates)
    if config.optimizer.weight_decay_incr_style != "constant":
        for shard in optimizer.shards:
            decay_by_rates(shard)
    return buckets, optimizer


def buckets_class(parallel: ParallelConfig) -> type[ParamAndGradBuckets]:
    """Return the class of buckets for --data-parallel-sharding-strategy."""
    return BUCKETS.get(parallel.sharding, ParamAndGradBuckets)


def build_executor(
    config: Config, paths: Paths, model: ModelChunks, buckets: ParamAndGradBuckets, say: Callable[[str], None]
) -> Callable[..., None]:
    """Return what runs the forwards and backwards of a training step; say: takes lines for the log."""
    if not paths.graphs:
        return run_schedule
    return paths.graphs(run_schedule, buckets, model.scales, say, config.parallel.cuda_graph_warmup_steps)

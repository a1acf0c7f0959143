"""The one place that builds a model and picks its fast paths and variants.

Tests: tests/test_layouts.py. Page: docs/architecture.md.

    the model       build         GPTModel = embedding, layers, output layer (`model.py`): of a pipeline each
                                  rank has some stages of it
    FP8             quantize      the linear layers that multiply in FP8
    variants        pick_...      what a flag of the model or the data asks for and the core has not: another
                                  result, one function each for attention, router, output layer
    fast paths      fast_paths    the same result, faster: one row for each slot of `Paths`
                    install       sets them on the model, before its parameters go into buckets
    the training    build_optimizer, build_schedule, build_executor, batch_sharding

A slot is an attribute of the module that uses it; the default is the core's form. `--fast-paths` takes all
fast paths that can run, `--no-fast-paths` none. Without either, fast paths run on GPUs, and on CPUs those
that have a flag of their own which is set.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from nanomegatron.attention import SelfAttention
from nanomegatron.batch import Batch
from nanomegatron.config.check_layout import graph_impl
from nanomegatron.config.parallel import ParallelConfig
from nanomegatron.config.settings import Config
from nanomegatron.cp import context_attention, shard_batch
from nanomegatron.dp import ParamAndGradBuckets, ShardComm
from nanomegatron.fast.cuda_graphs import GraphedSteps
from nanomegatron.fast.decode import decoder
from nanomegatron.fast.discard_output import discard_activations
from nanomegatron.fast.dp_peer import PeerShardComm
from nanomegatron.fast.fp8_experts import quantize_experts
from nanomegatron.fast.fp8_gather import CastUpdates, cast_state, gathered_casts
from nanomegatron.fast.fp8_overlap import OverlappedFp8Matmuls
from nanomegatron.fast.fp8_producers import quantizing_loss, quantizing_mlp, quantizing_norm
from nanomegatron.fast.fused_layer import FusedLayers
from nanomegatron.fast.fused_loss import fused_output_loss
from nanomegatron.fast.layer_graphs import GraphedLayers
from nanomegatron.fast.moe_dispatch import OverlappedMoe
from nanomegatron.fast.offload import host_state
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.ring import Ring
from nanomegatron.fast.tp_overlap import OverlappedLinear
from nanomegatron.fp8 import Scales, recipe_of
from nanomegatron.fp8_linear import Fp8Matmuls, accepts_fp8, use_fp8
from nanomegatron.layers import MLP, OutputLayer, logits_then_loss
from nanomegatron.lr_schedule import Schedule, Schedules
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.model import GPTModel, StageSpec, run_layers
from nanomegatron.moe import GroupedExperts, MoELayer
from nanomegatron.ops.attention import Mask
from nanomegatron.optim import Optimizer, ShardState, ShardUpdates
from nanomegatron.param import Init
from nanomegatron.plan.flops import stage_layers
from nanomegatron.pp import ModelChunks, execute
from nanomegatron.router import Router
from nanomegatron.schedules import placement
from nanomegatron.tp import ColumnParallelLinear, RowParallelLinear
from nanomegatron.variants.cp_documents import shard_documents
from nanomegatron.variants.cp_hierarchy import TwoLevels
from nanomegatron.variants.cp_windows import windowed_attention
from nanomegatron.variants.decoupled_lr import decoupled
from nanomegatron.variants.logit_softcaps import capped_attention, capped_logits
from nanomegatron.variants.lr_styles import InverseSquareRoot, WarmupStableDecay
from nanomegatron.variants.qk_norm_all_heads import HeadsNorm
from nanomegatron.variants.router_capacity import drop
from nanomegatron.variants.router_forced_balance import random_logits
from nanomegatron.variants.router_groups import best_of_groups
from nanomegatron.variants.router_jitter import jittered_logits
from nanomegatron.variants.router_losses import add_global_counts, global_aux_loss, seq_aux_loss
from nanomegatron.variants.router_sinkhorn import sinkhorn_routing
from nanomegatron.variants.weight_decay import decay_by_rates, weight_decay_at
from nanomegatron.zero2 import Zero2Buckets

BUCKETS = {"optim_grads": Zero2Buckets}  # by --data-parallel-sharding-strategy; others: ParamAndGradBuckets
LR_STYLES = {"inverse-square-root": InverseSquareRoot, "WSD": WarmupStableDecay}  # others: Schedule
GRAPHS = {"none": None, "local": GraphedLayers, "full_iteration": GraphedSteps}  # by --cuda-graph-impl


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
            init=init,
            stage=stage_spec(config, mesh, stage, padded_vocab_size, chunks),
        )
        pick_variants(chunk, mesh.cp)
        chunks.append(chunk)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    model = ModelChunks(chunks, mesh, parallel.schedule, group)
    if config.precision.fp8_layers(config.model.num_layers):
        quantize(model, config, mesh, init.device)
    return model


def stage_spec(
    config: Config, mesh: Mesh, stage: int, padded_vocab_size: int, earlier: list[GPTModel]
) -> StageSpec:
    """Return what a stage has: its layers, and whether it begins or ends the model.

    earlier: this rank's chunks of earlier stages; with one the last stage may share its word embeddings.
    """
    layers_of_stages = stage_layers(config, padded_vocab_size)
    last = stage == len(layers_of_stages) - 1
    shared_words = None
    if last and earlier and earlier[0].embedding is not None:
        shared_words = earlier[0].embedding.word_embeddings.weight
    return StageSpec(layers_of_stages[stage], stage == 0, last, mesh, shared_words)


def quantize(model: ModelChunks, config: Config, mesh: Mesh, device: torch.device) -> None:
    """Make layers multiply in FP8: those of --fp8-format, and with --fp8-output-proj the output layer."""
    precision = config.precision
    model.scales = Scales(recipe_of(precision), device, (mesh.tp, mesh.dp_cp))
    for chunk in model:
        quantize_layers(chunk, model.scales, precision.fp8_layers(config.model.num_layers))
        head = chunk.output_layer
        if precision.fp8_output_proj and head is not None:
            use_fp8(head, model.scales.add_layer(head.weight.spec.name))


def quantize_layers(chunk: GPTModel, scales: Scales, numbers: Container[int]) -> None:
    """Make linear layers and experts multiply in FP8 in the layers of these numbers."""
    in_fp8 = [layer for layer in chunk.layers if layer.layer in numbers]
    for layer in in_fp8:
        for module in layer.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                use_fp8(module, scales.add_layer(module.weight.spec.name))
            elif isinstance(module, GroupedExperts):
                quantize_experts(module, scales)


def pick_variants(model: nn.Module, cp: Axis) -> None:
    """Set on a new model, before its weights are loaded, what its config asks for of variants/."""
    for module in model.modules():
        if isinstance(module, Router):
            pick_router(module)
        elif isinstance(module, SelfAttention):
            pick_attention(module, cp)
        elif isinstance(module, OutputLayer):
            module.has_variants = True
            if module.config.final_logit_softcapping:
                module.compute_logits = capped_logits


def pick_attention(attention: SelfAttention, cp: Axis) -> None:
    """Set what attention does otherwise than the core: bounds, ranks of cp, norms of queries and keys."""
    config = attention.config
    attention.has_variants = True
    attention.mask = replace(attention.mask, cap=config.attn_logit_softcapping)
    attention.context = attention_over_cp(context_attention, attention.mask, cp)
    if config.qk_layernorm_all_heads:
        attention.q_norm = HeadsNorm(attention.q_norm, config.num_attention_heads * config.head_dim)
        attention.k_norm = HeadsNorm(attention.k_norm, config.num_kv_heads * config.head_dim)


def attention_over_cp(context: Callable, mask: Mask, cp: Axis) -> Callable:
    """Return `SelfAttention.context` of a layer with this mask: `context`, or what takes its place."""
    if mask.cap:
        return capped_attention
    if mask.window is not None:
        context = windowed_attention
    if cp.levels:
        context = TwoLevels(context)
    return context


def pick_router(router: Router) -> None:
    """Set what a router does otherwise than the core: logits, a choice of experts, drops, losses."""
    config = router.config
    router.has_variants = True
    if config.moe_input_jitter_eps:
        router.compute_logits = jittered_logits
    if config.moe_router_force_load_balancing:
        router.compute_logits = partial(random_logits, compute_logits=router.compute_logits)
    if config.moe_router_group_topk:
        router.best_experts = best_of_groups
    if "sinkhorn" in config.moe_router_load_balancing_type:
        router.choose_experts = sinkhorn_routing
    if config.moe_expert_capacity_factor:
        router.drop = drop
    if "global_aux_loss" in router.losses:
        add_global_counts(router)
    router.loss_functions = {
        **router.loss_functions,
        "seq_aux_loss": seq_aux_loss,
        "global_aux_loss": global_aux_loss,
    }


@dataclass(frozen=True)
class Paths:
    """The fast paths of a run, each by the attribute that it replaces; None: the core's form."""

    layers: Callable = run_layers  # GPTModel.run_layers
    linear: Callable | None = None  # (x, weight, axis, comm) -> y, for parallel linear and output layers
    fp8: Fp8Matmuls = Fp8Matmuls()  # Fp8LayerState.matmuls
    context: Callable | None = None  # SelfAttention.context, attention over the ranks of cp
    producers: bool = False  # MLP.run, OutputLayer.loss also quantize for the FP8 layer behind
    discards: tuple[str, ...] = ()  # modules as in --recompute-modules: MLP.run, GroupedExperts.project
    moe: OverlappedMoe | None = None  # MoELayer.run
    loss: Callable = logits_then_loss  # OutputLayer.loss
    shard_comm: Callable = ShardComm  # (axis, device, size) -> the communication of ParamAndGradBuckets
    gathered: Callable | None = None  # (param, shards axis) -> class of what ParamAndGradBuckets gather
    state: Callable = ShardState  # (bucket, config) -> main parameters and moments of a shard
    updates: type[ShardUpdates] = ShardUpdates  # updates the shards and starts their gathers
    graphs: type[GraphedSteps] | None = None  # what launches CUDA graphs in place of `pp.execute`
    decoder: Callable | None = None  # ModelChunks.decoder, for generation
    peers: PeerAccess = PeerAccess({})  # how these paths reach other GPUs' memory


def paths_for(config: Config, mesh: Mesh, fast: bool | None = None) -> Paths:
    """Choose the fast paths of a run. fast: all that can run, or none; None: as the flags and device say.

    Communicates over world on GPUs: every rank must call it with the same arguments.
    """
    if fast is None:
        fast = config.parallel.fast_paths
    peers = PeerAccess.build(mesh, config.parallel)
    recomputed = config.model.recomputes
    paths = Paths(discards=tuple(filter(recomputed, config.model.recompute_modules)), peers=peers)
    if recomputed("layernorm"):
        paths = replace(paths, layers=FusedLayers(recompute=True))
    if fast is False:
        return paths
    on_gpu = mesh.device.type == "cuda"
    rows = fast_paths(config, peers, mesh.world.size, on_gpu, fast or on_gpu)
    return replace(paths, **{slot: path for slot, taken, path in rows if taken})


def fast_paths(
    config: Config, peers: PeerAccess, world: int, on_gpu: bool, default: bool
) -> list[tuple[str, bool, object]]:
    """Return a row for each slot of `Paths`: its name, whether this run takes the path, the path.

    default: whether a run takes the paths that have no flag of their own.
    """
    parallel = config.parallel
    model = config.model
    moe_halves = parallel.overlap_moe_expert_parallel_comm
    moe_flags = moe_halves or model.moe_shared_expert_overlap
    dp_overlap = parallel.overlap_grad_reduce or parallel.overlap_param_gather
    fp8_gather = default or config.precision.fp8_param_gather
    return [
        ("layers", default, FusedLayers(quantizing_norm, model.recomputes("layernorm"))),
        ("linear", parallel.tp_comm_overlap, OverlappedLinear(peers)),
        ("fp8", parallel.tp_comm_overlap, OverlappedFp8Matmuls(peers)),
        ("context", default, Ring(peers)),
        ("producers", default, True),
        ("moe", model.num_experts and (default or moe_flags), OverlappedMoe(peers, moe_halves)),
        ("loss", model.cross_entropy_loss_fusion, fused_output_loss),
        ("shard_comm", default and dp_overlap, PeerShardComm(peers)),
        ("gathered", fp8_gather, gathered_casts),
        ("state", fp8_gather, cast_state),
        ("updates", fp8_gather, CastUpdates),
        ("graphs", on_gpu, GRAPHS[graph_impl(config, world)]),
        ("decoder", parallel.cuda_graph_impl != "none", decoder),
    ]


def install(stages: ModelChunks, paths: Paths) -> ModelChunks:
    """Set the fast paths on a model's modules; call it before its parameters are put into buckets."""
    stages.decoder = paths.decoder
    for chunk in stages:
        chunk.run_layers = paths.layers
    discard_activations(stages, paths.discards)
    for module in stages.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | OutputLayer):
            if module.fp8:
                module.fp8.matmuls = paths.fp8
            elif paths.linear:
                module.linear = paths.linear
        if isinstance(module, OutputLayer):
            module.loss = paths.loss
            if paths.producers and accepts_fp8(module) and not module.config.final_logit_softcapping:
                module.loss = quantizing_loss
        elif isinstance(module, SelfAttention) and paths.context:
            module.context = attention_over_cp(paths.context, module.mask, stages.cp)
        elif isinstance(module, MoELayer) and paths.moe:
            paths.moe.install(module)
        elif isinstance(module, MLP) and paths.producers and accepts_fp8(module.linear_fc2):
            module.run = partial(quantizing_mlp, discards="mlp_act" in paths.discards)
    return stages


def build_optimizer(
    model: nn.Module, config: Config, mesh: Mesh, lr_table: list[list[float]], paths: Paths
) -> tuple[ParamAndGradBuckets, Optimizer]:
    """Put the gradients of a model into buckets and make its optimizer. lr_table: `step_values`."""
    dtype = getattr(torch, config.grad_dtype_name)
    kind = buckets_class(config.parallel)
    buckets = kind(model, config.parallel, mesh, dtype, paths.shard_comm, paths.gathered)
    state = paths.state
    if config.optimizer.optimizer_cpu_offload:
        state = host_state(buckets, config.optimizer, state)
    optimizer = Optimizer(buckets, config.optimizer, config.precision, lr_table, paths.updates(state))
    if config.optimizer.weight_decay_incr_style != "constant":
        for shard in optimizer.shards:
            decay_by_rates(shard)
    return buckets, optimizer


def buckets_class(parallel: ParallelConfig) -> type[ParamAndGradBuckets]:
    """Return the class of buckets for --data-parallel-sharding-strategy."""
    return BUCKETS.get(parallel.sharding, ParamAndGradBuckets)


def build_schedule(config: Config, samples_before: Sequence[int]) -> Schedule:
    """Return the schedule of the learning rate. samples_before: as in `lr_schedule.schedules`."""
    return LR_STYLES.get(config.optimizer.lr_decay_style, Schedule).from_config(config, samples_before)


def pick_schedules(config: Config, samples_before: Sequence[int]) -> Schedules:
    """Return what `lr_schedule.schedules` does, for all settings."""
    optimizer = config.optimizer
    schedule = vocabulary = build_schedule(config, samples_before)
    if optimizer.decoupled_lr is not None:
        vocabulary = decoupled(schedule, optimizer)
    if optimizer.weight_decay_incr_style != "constant":
        return [schedule.at, vocabulary.at, partial(weight_decay_at, config, samples_before)]
    return [schedule.at, vocabulary.at, lambda samples: optimizer.weight_decay]


def build_executor(
    config: Config, paths: Paths, stages: ModelChunks, grads: ParamAndGradBuckets, say: Callable[[str], None]
) -> Callable[..., None]:
    """Return what runs the forwards and backwards of a training step; say: takes lines for the log."""
    if not paths.graphs:
        return execute
    return paths.graphs(execute, grads, stages.scales, say, config.parallel.cuda_graph_warmup_steps)


def batch_sharding(config: Config) -> Callable[..., Batch]:
    """Return what cuts a batch over the ranks of an axis: (batch, axis) -> this rank's tokens `[b, s/cp]`"""
    types = config.parallel.cp_types(config.model.num_layers)
    if config.data.reset_attention_mask or config.data.variable_seq_lengths:
        return partial(shard_documents, types=types)
    return partial(shard_batch, types=types)

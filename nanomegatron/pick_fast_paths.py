"""Picks the fast paths of a run from `fast/`: the same result, sooner or in less memory.

Tests: tests/test_layouts.py. Page: docs/architecture.md.

    paths_for     which paths this run takes: `Paths`, with a slot for each
    install       sets them on the modules of a model, in place of the core's forms

`--fast-paths` takes all that can run, `--no-fast-paths` none, but for what --recompute-modules asks for.
Without either, fast paths run on GPUs, and on CPUs those that have a flag of their own which is set.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from nanomegatron.attention import SelfAttention
from nanomegatron.config.check_layout import graph_impl
from nanomegatron.config.settings import Config
from nanomegatron.dp import ShardComm
from nanomegatron.fast.cuda_graphs import GraphedSteps
from nanomegatron.fast.decode import decoder
from nanomegatron.fast.discard_output import discarding_mlp, discarding_project
from nanomegatron.fast.dp_peer import peer_shard_comm
from nanomegatron.fast.fp8_gather import CastUpdates, cast_state, gathered_casts
from nanomegatron.fast.fp8_overlap import OverlappedFp8Matmuls
from nanomegatron.fast.fp8_producers import quantizing_loss, quantizing_mlp, quantizing_norm
from nanomegatron.fast.fused_layer import FusedLayers, fused_norm
from nanomegatron.fast.fused_loss import fused_output_loss
from nanomegatron.fast.layer_graphs import GraphedLayers
from nanomegatron.fast.moe_dispatch import OverlappedMoe
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.ring import Ring
from nanomegatron.fast.split_gate import SplitGateFunction
from nanomegatron.fast.tp_overlap import overlapped_linear
from nanomegatron.fp8_linear import Fp8Matmuls, reads_only_fp8
from nanomegatron.layers import MLP, OutputLayer, logits_then_loss, run_mlp
from nanomegatron.mesh import Mesh
from nanomegatron.model import run_layers
from nanomegatron.moe import GroupedExperts, MoELayer
from nanomegatron.optim import ShardState, ShardUpdates
from nanomegatron.pick_variants import attention_over_cp
from nanomegatron.pp import ModelChunks
from nanomegatron.router import GateFunction, Router
from nanomegatron.tp import ColumnParallelLinear, RowParallelLinear

GRAPHS = {"none": None, "local": GraphedLayers, "full_iteration": GraphedSteps}  # by --cuda-graph-impl


@dataclass(frozen=True)
class Paths:
    """The fast paths of a run, by what reads them, each with the attribute that it replaces.

    None: the core's form.
    """

    # what `install` sets on modules
    layers: Callable = run_layers  # GPTModel.run_layers
    linear: Callable | None = None  # (x, weight, axis, comm) -> y, for parallel linear and output layers
    fp8: Fp8Matmuls = Fp8Matmuls()  # Fp8LayerState.matmuls
    context_attention: Callable | None = None  # SelfAttention.context_attention, over the ranks of cp
    gate: Callable = GateFunction.apply  # Router.gate
    moe: OverlappedMoe | None = None  # MoELayer.run, MoELayer.dispatcher
    loss: Callable = logits_then_loss  # OutputLayer.loss
    producers: bool = False  # OutputLayer.loss, MLP.run also quantize for the FP8 layer behind
    discards: tuple[str, ...] = ()  # modules as in --recompute-modules: MLP.run, GroupedExperts.project
    decoder: Callable | None = None  # ModelChunks.decoder, for generation

    # what `build.build_optimizer` makes buckets and optimizer of
    shard_comm: Callable = ShardComm  # (axis, device, size) -> the communication of ParamAndGradBuckets
    gathered: Callable | None = None  # (param, axis) -> class of what ParamAndGradBuckets gather
    state: Callable = ShardState  # (bucket, config) -> main parameters and moments of a shard
    updates: type[ShardUpdates] = ShardUpdates  # updates the shards and starts their gathers

    # what `build.build_executor` runs
    graphs: type[GraphedSteps] | None = None  # what launches CUDA graphs in place of `pp.run_schedule`

    # what the banner describes
    peers: PeerAccess = PeerAccess({})  # how these paths reach other GPUs' memory


def paths_for(config: Config, mesh: Mesh, fast: bool | None = None) -> Paths:
    """Choose the fast paths of a run. fast: all that can run, or none; None: as the flags and device say.

    Communicates over world on GPUs: every rank must call it with the same arguments.
    """
    parallel = config.parallel
    model = config.model
    on_gpu = mesh.device.type == "cuda"
    if fast is None:
        fast = parallel.fast_paths
    take = on_gpu if fast is None else fast  # paths without a flag of their own
    peers = PeerAccess.build(mesh, parallel)
    paths = Paths(discards=tuple(filter(model.recomputes, model.recompute_modules)), peers=peers)

    if take or model.recomputes("layernorm"):
        norm = quantizing_norm if take else fused_norm
        paths = replace(paths, layers=FusedLayers(norm, model.recomputes("layernorm")))
    if fast is False:
        return paths

    if take:
        paths = replace(paths, context_attention=Ring(peers), gate=SplitGateFunction.apply, producers=True)

    if parallel.tp_comm_overlap:
        paths = replace(paths, linear=partial(overlapped_linear, peers), fp8=OverlappedFp8Matmuls(peers))
    halves = parallel.overlap_moe_expert_parallel_comm
    if model.num_experts and (take or halves or model.moe_shared_expert_overlap):
        paths = replace(paths, moe=OverlappedMoe(peers, halves))
    if model.cross_entropy_loss_fusion:
        paths = replace(paths, loss=fused_output_loss)
    if take and (parallel.overlap_grad_reduce or parallel.overlap_param_gather):
        paths = replace(paths, shard_comm=partial(peer_shard_comm, peers))
    if take or config.precision.fp8_param_gather:
        gathered = partial(gathered_casts, parallel.sharding != "no_shard")
        paths = replace(paths, gathered=gathered, state=cast_state, updates=CastUpdates)
    if on_gpu:
        paths = replace(paths, graphs=GRAPHS[graph_impl(config, mesh.world.size)])
    if parallel.cuda_graph_impl != "none":
        paths = replace(paths, decoder=decoder)
    return paths


def install(stages: ModelChunks, paths: Paths) -> ModelChunks:
    """Set the fast paths on a model's modules; call it before its parameters are put into buckets."""
    stages.decoder = paths.decoder
    for chunk in stages:
        chunk.run_layers = paths.layers
    for module in stages.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | OutputLayer):
            if module.fp8:
                module.fp8.matmuls = paths.fp8
            elif paths.linear:
                module.linear = paths.linear
        if isinstance(module, OutputLayer):
            quantizes = reads_only_fp8(module) and not module.config.final_logit_softcapping
            module.loss = quantizing_loss if paths.producers and quantizes else paths.loss
        elif isinstance(module, SelfAttention) and paths.context_attention:
            module.context_attention = attention_over_cp(paths.context_attention, module.mask, stages.cp)
        elif isinstance(module, MLP):
            module.run = mlp_run(module, paths)
        elif isinstance(module, MoELayer) and paths.moe:
            paths.moe.install(module)
        elif isinstance(module, GroupedExperts) and "moe_act" in paths.discards:
            module.project = partial(discarding_project, prefetch=paths.moe and paths.moe.prefetch)
        elif isinstance(module, Router):
            module.gate = paths.gate
    return stages


def mlp_run(mlp: MLP, paths: Paths) -> Callable[..., torch.Tensor]:
    """Return `MLP.run`, which quantizes or discards the output of the activation, or does both or neither."""
    if paths.producers and reads_only_fp8(mlp.linear_fc2):
        return partial(quantizing_mlp, discards="mlp_act" in paths.discards)
    if "mlp_act" in paths.discards:
        return discarding_mlp
    return run_mlp

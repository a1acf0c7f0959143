"""Picks what a run's flags or data ask for and the core has not: another result, from `variants/`.

Tests: tests/test_router.py. Page: docs/architecture.md.

Each is a whole function or class in the place of the core's: an attribute of the module that uses it, or
what a function here returns. A module says with `has_variants` that it has been through `pick_variants`; one
that has not refuses the flags that it cannot follow.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from nanomegatron.attention import SelfAttention
from nanomegatron.batch import Batch
from nanomegatron.config.settings import Config, DataConfig
from nanomegatron.cp import context_attention, shard_batch
from nanomegatron.data.gpt_dataset import GPTDataset
from nanomegatron.data.loader import BatchLoader
from nanomegatron.data.samples import Samples
from nanomegatron.layers import OutputLayer
from nanomegatron.lr_schedule import Schedule, Schedules
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.ops.attention import Mask
from nanomegatron.pp import ModelChunks
from nanomegatron.router import Router
from nanomegatron.variants.cp_documents import shard_documents
from nanomegatron.variants.cp_hierarchy import TwoLevels
from nanomegatron.variants.cp_windows import windowed_attention
from nanomegatron.variants.decoupled_lr import decoupled
from nanomegatron.variants.document_dataset import DocumentDataset
from nanomegatron.variants.document_packs import PackLoader
from nanomegatron.variants.logit_softcaps import capped_attention, capped_logits
from nanomegatron.variants.lr_styles import InverseSquareRoot, WarmupStableDecay
from nanomegatron.variants.qk_norm_all_heads import HeadsNorm
from nanomegatron.variants.router_capacity import drop
from nanomegatron.variants.router_forced_balance import random_logits
from nanomegatron.variants.router_groups import best_of_groups
from nanomegatron.variants.router_jitter import jittered_logits
from nanomegatron.variants.router_losses import add_global_counts, global_aux_loss, seq_aux_loss
from nanomegatron.variants.router_sinkhorn import sinkhorn_routing
from nanomegatron.variants.weight_decay import weight_decay_at

LR_STYLES = {"inverse-square-root": InverseSquareRoot, "WSD": WarmupStableDecay}  # others: Schedule


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
    attention.context_attention = attention_over_cp(context_attention, attention.mask, cp)
    if config.qk_layernorm_all_heads:
        attention.q_norm = HeadsNorm(attention.q_norm, config.num_attention_heads * config.head_dim)
        attention.k_norm = HeadsNorm(attention.k_norm, config.num_kv_heads * config.head_dim)


def attention_over_cp(context: Callable, mask: Mask, cp: Axis) -> Callable:
    """Return the `context_attention` of a layer with this mask: `context`, or what takes its place."""
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
    if "seq_aux_loss" in router.losses:
        router.loss_functions = router.loss_functions | {"seq_aux_loss": seq_aux_loss}
    if "global_aux_loss" in router.losses:
        router.loss_functions = router.loss_functions | {"global_aux_loss": global_aux_loss}
        add_global_counts(router)


def build_schedule(config: Config, samples_before: Sequence[int]) -> Schedule:
    """Return the schedule of the learning rate. samples_before: as in `pick_schedules`."""
    return LR_STYLES.get(config.optimizer.lr_decay_style, Schedule).from_config(config, samples_before)


def pick_schedules(config: Config, samples_before: Sequence[int]) -> Schedules:
    """Return learning rate, that of the vocabulary's weights, and weight decay, by the samples before a step.

    samples_before: the samples before each step of the run, and after its last one.
    """
    optimizer = config.optimizer
    schedule = vocabulary = build_schedule(config, samples_before)
    if optimizer.decoupled_lr is not None:
        vocabulary = decoupled(schedule, optimizer)
    if optimizer.weight_decay_incr_style != "constant":
        return [schedule.at, vocabulary.at, partial(weight_decay_at, config, samples_before)]
    return [schedule.at, vocabulary.at, lambda samples: optimizer.weight_decay]


def batch_sharding(config: Config, device: torch.device) -> Callable[..., Batch]:
    """Return what cuts a batch over the ranks of an axis: (batch, axis) -> this rank's tokens `[b, s/cp]`

    device: of the model.
    """
    types = config.parallel.cp_types(config.model.num_layers)
    if config.data.reset_attention_mask or config.data.variable_seq_lengths:
        return partial(shard_documents, types=types, device=device)
    return partial(shard_batch, types=types, device=device)


def pick_dataset(data: DataConfig) -> type[Samples]:
    """Return the class of the data sets that `build_datasets` makes."""
    return DocumentDataset if data.variable_seq_lengths else GPTDataset


def build_loader(
    dataset: Any, config: Config, mesh: Mesh, model: ModelChunks, eod: int
) -> BatchLoader | PackLoader:
    """Make the loader of this rank's microbatches of a dataset. config: resolved."""
    shard = batch_sharding(config, mesh.device)
    if config.data.variable_seq_lengths:
        return PackLoader(dataset, config, eod, mesh, model[0].padded_vocab_size, shard)
    return BatchLoader(
        dataset,
        config.data,
        eod,
        mesh.dp,
        mesh.device,
        tokens_too=model.reads_tokens,
        shard=partial(shard, axis=mesh.cp),
    )

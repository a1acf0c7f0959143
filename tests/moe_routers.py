"""Routers for tests, dispatch with a router's choice given, and Megatron's functions."""

import functools
from types import SimpleNamespace

import pytest
import torch

from nanomegatron import router
from nanomegatron.comm import all_reduce
from nanomegatron.config.model import TransformerConfig
from nanomegatron.fast.moe_dispatch import AllGatherInPieces, AsyncAllToAll, OverlappedMoe
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.moe import AllGatherDispatch, AllToAllDispatch, route_and_combine
from nanomegatron.param import Init
from nanomegatron.pick_variants import pick_router
from nanomegatron.router import LossInput, Router, RouterOutput

S, H, E = 8, 6, 8
GROUPS = dict(router_num_groups=4, router_group_topk=2)
SIGMOID = dict(router_score_function="sigmoid")


@functools.cache
def megatron():
    return pytest.importorskip("megatron.core.transformer.moe.moe_utils")


def settings(topk=2, **given):
    names = {name if hasattr(TransformerConfig, name) else f"moe_{name}": v for name, v in given.items()}
    shape = dict(num_layers=2, hidden_size=H, num_attention_heads=2, num_experts=E, moe_router_topk=topk)
    return TransformerConfig(**shape | {"disable_bias_linear": True} | names)


def router_of(config, axes=None, weight=None, **init):
    init = Init(name="decoder.layers.0.mlp.router", std=1.0, **init)
    router = Router(config, 0, axes or Mesh(), init)
    if weight is not None:
        router.weight.data.copy_(weight)
    pick_router(router)
    return router


def choose(logits, config, bias=None, seed=None):
    """What a router of this config and bias chooses by logits `[t, E]`: probs, ids, before any is dropped."""
    router = router_of(config)
    router.expert_bias = bias
    return router.choose_experts(router, logits, batch_of(seed=seed), None)


def z_loss(logits):
    """The loss of all tokens with logits `[t, E]`."""
    return router.z_loss(None, LossInput(None, None, logits, None, 1))


class FixedRouter:
    """A router whose choice is given; each step of it pauses."""

    def __init__(self, probs, ids, pause):
        self.probs, self.ids, self.pause = probs, ids, pause

    def __call__(self, x, batch):
        return self.probs, self.ids

    def choose(self, x, batch):
        self.pause()
        return RouterOutput(self.probs, self.ids, self.ids.long(), None, None)

    def balance(self, output, batch):
        self.pause()
        return self.probs


def dispatch(x, probs, ids, experts, kind, run=route_and_combine, shared=None, pause=lambda: None):
    """Tokens x `[t, h]` to their experts and back, by the core's form or by another `run` of a MoELayer."""
    alltoall = kind == "alltoall" and experts.mesh.etp_ep.size > 1
    layer = SimpleNamespace(router=FixedRouter(probs, ids, pause), experts=experts, shared_experts=shared)
    layer.dispatcher = (AllToAllDispatch if alltoall else AllGatherDispatch)(experts)
    layer.apply_shared_experts = shared
    if isinstance(run, OverlappedMoe):
        layer.dispatcher = functools.partial(
            AsyncAllToAll if alltoall else AllGatherInPieces, layer.dispatcher, run.peers
        )
    return run(layer, x[:, None], None)[:, 0]


def batch_of(samples=1, s=S, aux_scale=None, seed=None, first=0):
    scale = None if aux_scale is None else torch.tensor(aux_scale)
    places = dict(sample_ids=torch.arange(first, first + samples), residual_positions=torch.arange(s))
    no_packs = dict(cu_seqlens=None, max_seqlen=None, shard=None)
    return SimpleNamespace(aux_scale=scale, dropout_seed=seed, **no_packs, **places)


def sum_counts(routers):
    """Copies routed and dropped on all ranks, `[2, layers, E]`."""
    mine = torch.stack([torch.stack([getattr(r, name) for r in routers]) for name in ("counts", "dropped")])
    config, mesh = routers[0].config, routers[0].mesh
    tokens = mesh.tp if config.sequence_parallel else Axis.single()  # ranks with others
    return all_reduce(all_reduce(mine, tokens), mesh.dp_cp)


def close(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)

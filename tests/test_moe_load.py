"""The table of experts' load against sums by hand, and its report."""

import pytest
import torch
from torch import nn

from nanomegatron.config.model import TransformerConfig
from nanomegatron.param import Init
from nanomegatron.report.counters import ExpertLoad
from nanomegatron.router import Router, move_expert_biases
from tests.checkpoints import ALONE
from tests.spmd import spmd

CONFIG = TransformerConfig(
    num_layers=5,
    hidden_size=8,
    num_attention_heads=2,
    num_experts=4,
    moe_layer_freq="[1,0,1,1,0]",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_aux_loss_coeff=(0.01,),
    moe_z_loss_coeff=0.001,
    sequence_parallel=True,
)
LAYERS = (0, 2, 3)


def routers(mesh, layers) -> nn.ModuleList:
    """As after a step: in layer i, rank r has routed r + e + 10 i tokens to expert e, and dropped r."""
    made = nn.ModuleList()
    for layer in layers:
        init = Init(name=f"decoder.layers.{layer}.mlp.router")
        router = Router(CONFIG, layer, mesh, init)
        router.counts += torch.arange(4) + mesh.rank + 10 * layer
        router.dropped += mesh.rank
        router.values += torch.tensor([1.0 + layer, 2.0 + layer])
        made.append(router)
    return made


@spmd(world=8, tp=2, pp=2)
def test_table_is_the_sum_over_all_ranks(mesh):
    """Each stage has some layers, perhaps none; biases move up for experts below the mean."""
    own = (LAYERS, ())[mesh.pp.rank]
    model = routers(mesh, own)
    load = ExpertLoad(model, CONFIG, mesh)
    table = load.end(6)
    move_expert_biases(load.routers, load.own_kept_tokens(table))
    ranks = range(4)  # of the first stage
    for row, layer in zip(table, LAYERS, strict=True):
        tokens = [sum(rank + e + 10 * layer for rank in ranks) for e in range(4)]
        losses = [4 * (1.0 + layer) / 6, 4 * (2.0 + layer) / 6]
        assert row.tolist() == pytest.approx([*tokens, *[sum(ranks)] * 4, *losses])
    for router in model:
        assert router.expert_bias.tolist() == pytest.approx([1e-3, 1e-3, -1e-3, -1e-3])
    assert mesh.traffic["world", "all_reduce", "calls"] == 1
    load.begin()
    assert not load.end(1).any()


def test_what_is_told():
    load = ExpertLoad(routers(ALONE, LAYERS), CONFIG, ALONE)
    table = [
        [2.0, 4.0, 6.0, 4.0, 0.0, 0.0, 2.0, 2.0, 1.5, 9.0],
        [4.0] * 4 + [0.0] * 4 + [1.0, 1.0],
        [0.0] * 10,
    ]
    by_name = load.by_name(table)
    first = {"moe_load_imbalance": 1.5, "moe_dropped_share": 0.25, "aux_loss": 1.5, "z_loss": 9.0}
    assert by_name.items() >= {f"decoder.layers.0/{kind}": x for kind, x in first.items()}.items()
    assert by_name["decoder.layers.0/tokens"] == [2, 4, 6, 4] and len(by_name) == 3 * 5
    assert by_name["decoder.layers.2/moe_load_imbalance"] == 1.0
    means = load.means(table)
    assert means == pytest.approx(
        {"moe_load_imbalance": 2.5 / 3, "moe_dropped_share": 0.25 / 3}
        | {"aux_loss": 2.5 / 3, "z_loss": 10 / 3}
    )


def test_biases_are_states_by_global_name():
    (router,) = routers(ALONE, [2])
    assert list(router.states()) == ["decoder.layers.2.mlp.router.expert_bias"]
    assert next(iter(router.states().values())) is router.expert_bias

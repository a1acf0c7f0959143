"""The table of experts' load against sums by hand, and its report."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import train
from nanomegatron.config.model import TransformerConfig
from nanomegatron.param import Init
from nanomegatron.report.counters import ExpertLoad
from nanomegatron.router import Router, kept_tokens, move_expert_biases
from tests.checkpoints import ALONE
from tests.spmd import run_spmd, spmd
from tests.training import arguments, numbers_of, set_up

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


def load_of(routers, config, mesh) -> ExpertLoad:
    run = SimpleNamespace(config=SimpleNamespace(model=config), mesh=mesh)
    return ExpertLoad(SimpleNamespace(model=SimpleNamespace(routers=[*routers]), **vars(run)))


@spmd(world=8, tp=2, pp=2)
def test_table_is_the_sum_over_all_ranks(mesh):
    """Each stage has some layers, perhaps none; biases move up for experts below the mean."""
    own = (LAYERS, ())[mesh.pp.rank]
    model = routers(mesh, own)
    load = load_of(model, CONFIG, mesh)
    table = load.table(6)
    calls = mesh.observer.counts["world", "all_reduce", "calls"]
    if own:
        move_expert_biases([*model], kept_tokens([*model]))
    ranks = range(4)  # of the first stage
    for row, layer in zip(table, LAYERS, strict=True):
        tokens = [sum(rank + e + 10 * layer for rank in ranks) for e in range(4)]
        losses = [4 * (1.0 + layer) / 6, 4 * (2.0 + layer) / 6]
        assert row.tolist() == pytest.approx([*tokens, *[sum(ranks)] * 4, *losses])
    for router in model:
        assert router.expert_bias.tolist() == pytest.approx([1e-3, 1e-3, -1e-3, -1e-3])
    assert calls == 1
    for router in model:
        router.begin_step()
    assert not load.table(1).any()


@spmd(world=2, tp=2)
def test_ranks_with_the_same_tokens_count_them_once(mesh):
    """Without sequence parallelism each rank of tp routes all tokens of its replica."""
    config = replace(CONFIG, sequence_parallel=False)
    router = Router(config, 2, mesh, Init(name="decoder.layers.2.mlp.router"))
    router.counts += torch.tensor([4, 0, 1, 3])
    router.dropped += torch.tensor([1, 0, 0, 0])
    router.values += torch.tensor([6.0, 2.0])
    table = load_of([router], config, mesh).table(4)
    assert table[1].tolist() == [4, 0, 1, 3, 1, 0, 0, 0, 1.5, 0.5] and not table[[0, 2]].any()


def three_steps(world, argv, folder):
    """Tokens of each step, the table of experts after it, and the biases of the routers."""
    run, found = set_up(world, argv, folder), []
    for _ in range(3):
        tokens = run.next_global_batch().tokens
        table = numbers_of(train.train_step(run))["experts"]
        biases = [router.expert_bias.clone() for router in run.model.routers]
        found.append((tokens, torch.tensor(table, dtype=torch.float64), torch.stack(biases)))
        run.progress.iteration += 1
    return found


def test_a_training_step_counts_anew_and_moves_the_biases(sources, tmp_path):
    """Each token goes to three of eight experts; the biases follow each step's tokens, not those so far."""
    argv = arguments(sources, "deep", "--moe-router-bias-update-rate 0.125 --train-iters 3")
    biases = torch.zeros(4, 8)
    for tokens, table, found in run_spmd(three_steps, 1, argv, str(tmp_path))[0]:
        counts = table[:, :8]
        assert counts.sum(1).tolist() == [3 * tokens] * 4
        biases += 0.125 * (counts.mean(1, keepdim=True) - counts).sign()
        assert torch.equal(found, biases)


def test_what_is_told():
    load = load_of(routers(ALONE, LAYERS), CONFIG, ALONE)
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

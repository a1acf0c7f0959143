"""The router's choice against Megatron's functions, transformers' routers, and loops by hand."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanomegatron.build import build
from nanomegatron.comm import own_slice
from nanomegatron.fast.split_gate import SplitGateFunction
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.ops import dropout as ops
from nanomegatron.param import Init, WeightGradStore
from nanomegatron.pick_variants import pick_router
from nanomegatron.router import GateFunction, Router, count_copies, expert_capacity, move_expert_biases
from nanomegatron.variants import router_sinkhorn
from nanomegatron.variants.router_capacity import drop
from nanomegatron.variants.router_groups import best_of_groups
from nanomegatron.variants.router_sinkhorn import SINKHORN_ROUNDS, sinkhorn
from tests.config.test_moe import config_of
from tests.moe_routers import (
    GROUPS,
    SIGMOID,
    E,
    H,
    S,
    batch_of,
    choose,
    close,
    megatron,
    router_of,
    settings,
    sum_counts,
)
from tests.spmd import run_spmd

GATES = GateFunction, SplitGateFunction


def table(probs, ids):
    """Megatron's form: `[t, E]`, zero where an expert is not chosen."""
    return torch.zeros(len(ids), E).scatter(1, ids.long(), probs)


# The choice


@pytest.mark.parametrize(
    "given",
    [
        {},
        dict(topk=3, router_pre_softmax=True),
        dict(topk=1, router_pre_softmax=True),
        dict(topk=E),
        dict(topk=4, router_topk_scaling_factor=2.5, **GROUPS),
        dict(topk=2, router_pre_softmax=True, **GROUPS),
        SIGMOID,
        dict(topk=1, **SIGMOID),
        dict(topk=3, router_topk_scaling_factor=2.5, bias=True, **SIGMOID),
        dict(topk=4, bias=True, **SIGMOID, **GROUPS),
    ],
)
def test_choice_is_megatrons(given):
    bias = torch.randn(E) if given.get("bias") else None
    config = settings(**{name: value for name, value in given.items() if name != "bias"})
    logits = torch.randn(40, E, requires_grad=True)
    expected, mask = megatron().topk_routing_with_score_function(
        logits,
        config.moe_router_topk,
        config.moe_router_pre_softmax,
        config.moe_router_num_groups,
        config.moe_router_group_topk,
        config.moe_router_topk_scaling_factor,
        config.moe_router_score_function,
        bias,
    )
    probs, ids = choose(logits, config, bias)
    assert probs.shape == ids.shape == (40, config.moe_router_topk)
    assert torch.equal(table(torch.ones_like(probs), ids).bool(), mask)
    found = table(probs, ids)
    close(found, expected)
    weight = torch.randn_like(found)
    grads = [torch.autograd.grad((y * weight).sum(), logits)[0] for y in (found, expected)]
    close(*grads)


def test_the_bias_moves_the_choice_alone():
    config, logits = settings(topk=1, **SIGMOID), torch.randn(20, E)
    bias = torch.zeros(E)
    bias[3] = 10.0
    probs, ids = choose(logits, config, bias)
    assert (ids == 3).all()
    close(probs[:, 0], logits[:, 3].sigmoid())


def test_experts_come_from_few_groups():
    """By loops: the groups are those of the largest sums of their k / groups best."""
    config, scores = settings(topk=4, **GROUPS), torch.randn(30, E)
    for row, ids in zip(scores.numpy(), best_of_groups(scores, config).numpy(), strict=True):
        groups = row.reshape(4, -1)
        best = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(1))[:2]
        assert {*ids} == {2 * g + i for g in best for i in range(2)}


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn(topk):
    config, logits = settings(topk, router_load_balancing_type=("sinkhorn",)), 3 * torch.randn(64, E)
    found, expected = sinkhorn(logits, Axis.single()), megatron().sinkhorn(logits)
    close(found, expected)
    scores = logits.sigmoid() if topk == 1 else logits.softmax(-1)
    for seed in (1, None):
        best = (scores if seed is None else expected).topk(topk).indices
        probs, ids = choose(logits, config, seed=seed)
        assert torch.equal(ids, best)
        close(probs, scores.gather(1, best))
    router, x = router_of(config), torch.randn(64, H)
    for batch in (batch_of(seed=1), batch_of()):
        logits = router.compute_logits(router, x, batch)
        scores = logits.sigmoid() if topk == 1 else logits.softmax(-1)
        table = sinkhorn(logits, Axis.single()) if batch.dropout_seed else scores
        best = table.topk(topk).indices.int()
        assert torch.equal(router(x, batch)[1], best), "held-out data: as in generation"
    columns = found.sum(0)
    close(columns, columns.mean().expand(E), 1e-3)


@pytest.fixture
def sums(monkeypatch):
    """A list with an entry for each sum over ranks."""
    found = []
    monkeypatch.setattr(router_sinkhorn, "all_reduce", lambda x, axis: found.append(axis) or x)
    return found


def test_sinkhorn_of_uneven_experts_ends_soon(sums):
    """The wider logits are, the more rounds it takes: still few, and the table is even."""
    for spread, most in ((1, 10), (5, 100), (20, 1000)):
        sums.clear()
        logits = spread * (torch.randn(256, E) + torch.randn(E))
        columns = sinkhorn(logits, Axis.single()).sum(0)
        assert 1 < len(sums) < most
        close(columns, columns.mean().expand(E), 1e-4)


def test_sinkhorn_gives_up_in_time(sums, monkeypatch):
    """Few tokens with logits far apart: the table is not even then, but a choice there is."""
    monkeypatch.setattr(router_sinkhorn, "SINKHORN_TOLERANCE", -1.0)
    logits = 50 * torch.randn(4, E, generator=torch.Generator().manual_seed(0))
    assert sinkhorn(logits, Axis.single()).isfinite().all()
    assert len(sums) == 1 + SINKHORN_ROUNDS


def sinkhorn_on_ranks(mesh, x, weight, real):
    """The experts of this rank's tokens; real `[t]`: 0 for padding."""
    config = settings(router_load_balancing_type=("sinkhorn",), sequence_parallel=True)
    router, mine = router_of(config, mesh, weight), own_slice(x, mesh.tp_cp)
    batch = batch_of(s=len(mine), seed=1)
    if not real.all():
        batch.cu_seqlens, batch.residual_positions = torch.zeros(2), own_slice(real, mesh.tp_cp) - 1
    return router(mine, batch)[1]


@pytest.mark.parametrize("padding", [0, 5])
def test_sinkhorn_of_all_tokens_of_a_microbatch(padding):
    """Ranks choose as one, padding counts nowhere, of twins (experts of equal weights) the first is best."""
    x, weight = torch.randn(32, H) + 0.5, torch.randn(E // 2, H).repeat(2, 1)
    real = (torch.arange(32) >= padding).long()
    found = torch.cat(run_spmd(sinkhorn_on_ranks, 4, x, weight, real, tp=2, cp=2))[padding:]
    table = megatron().sinkhorn(x[padding:].double() @ weight.double().t())
    close(table[:, : E // 2], table[:, E // 2 :], 1e-12)
    best = table[:, : E // 2].argmax(1)
    assert torch.equal(found.long(), torch.stack((best, best + E // 2), 1))


@pytest.mark.parametrize("family, normalized", [("mixtral", True), ("qwen3_moe", True), ("qwen3_moe", False)])
def test_probabilities_are_those_of_transformers(family, normalized):
    transformers = pytest.importorskip("transformers")
    if family == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter as Their

        kind, name = transformers.MixtralConfig, "num_local_experts"
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter as Their

        kind, name = transformers.Qwen3MoeConfig, "num_experts"
    extra = {} if family == "mixtral" else dict(norm_topk_prob=normalized)
    theirs = Their(kind(hidden_size=H, num_experts_per_tok=3, **{name: E}, **extra))
    torch.nn.init.normal_(theirs.weight)
    ours = router_of(settings(3, router_pre_softmax=not normalized), weight=theirs.weight.data)
    x = torch.randn(50, H)
    _, expected, best = theirs(x)
    probs, ids = ours(x, batch_of())
    assert torch.equal(ids.long(), best) and ids.dtype == torch.int32
    close(probs, expected)


# Capacity


def test_capacity():
    for tokens, topk, factor in [(64, 2, 1.0), (63, 2, 1.25), (5, 1, 0.3)]:
        config = settings(topk, expert_capacity_factor=factor)
        assert expert_capacity(tokens, config) == megatron().get_capacity(tokens * topk, E, factor)


@pytest.mark.parametrize("factor", [0.25, 1.0, 1.5, E])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_copies_over_the_capacity_are_dropped(policy, factor):
    config = settings(3, expert_capacity_factor=factor, token_drop_policy=policy)
    probs, ids = choose(2 * torch.randn(32, E), config)
    capacity = expert_capacity(32, config)
    kept = drop(probs, ids, config)
    assert ((kept == ids) | (kept == -1)).all()
    for e in range(E):
        at = [(t, j) for t, j in (ids == e).nonzero().tolist()]
        first = sorted(at, key=lambda place: -probs[place].item() if policy == "probs" else place)
        assert {*first[:capacity]} == {(t, j) for t, j in (kept == e).nonzero().tolist()}
    dense = table(probs, ids)
    if policy == "probs":  # among equals, as by position, Megatron's choice is torch.topk's
        how = dict(router_topk=3, capacity_factor=factor, drop_policy=policy)
        expected, mask = megatron().apply_router_token_dropping(dense, dense > 0, **how)
        close(table(probs * (kept >= 0), ids), expected)
        assert mask.sum() == (kept >= 0).sum()
    if factor == E:
        assert kept is ids


def test_all_tokens_to_one_expert():
    config = settings(1, router_pre_softmax=True, expert_capacity_factor=2.0, token_drop_policy="position")
    probs, ids = choose(torch.eye(E)[5].expand(16, E) * 9, config)
    assert count_copies(ids, E).tolist() == [0] * 5 + [16, 0, 0]
    kept = drop(probs, ids, config)
    assert (kept[:, 0] == 5).tolist() == [True] * 4 + [False] * 12


def test_the_router_counts_what_it_drops():
    config = settings(2, expert_capacity_factor=0.5, token_drop_policy="position")
    router, x = router_of(config), torch.randn(32, H)
    for _ in range(2):
        probs, ids = router(x, batch_of())
    routed = choose(x @ router.weight.t(), config)[1]
    assert torch.equal(router.counts, 2 * torch.bincount(routed.flatten(), minlength=E))
    assert torch.equal(router.dropped, 2 * torch.bincount(routed[ids < 0], minlength=E))
    assert router.counts.sum() == 2 * 32 * 2 and 0 < router.dropped.sum() == 2 * (ids < 0).sum()
    close(probs, choose(x @ router.weight.t(), config)[0])
    assert sum_counts([router, router]).shape == (2, 2, E)
    router.begin_step()
    assert not router.counts.any() and not router.dropped.any()


# The matmul


@pytest.mark.parametrize("dtype, tolerance", [(None, 1e-2), ("fp32", 1e-6), ("fp64", 1e-6)])
def test_type_of_the_matmul(dtype, tolerance):
    """A model in bf16; the exact product is that of the rounded inputs."""
    router = router_of(settings(router_dtype=dtype), dtype=torch.bfloat16)
    x = torch.randn(50, H).bfloat16().requires_grad_()
    logits = router.compute_logits(router, x, batch_of())
    exact = x.detach().double() @ router.weight.detach().double().t()
    assert logits.dtype == torch.float32 and router.weight.dtype == torch.bfloat16
    close(logits.double(), exact, tolerance)
    assert router(x, batch_of())[0].dtype == torch.float32
    wide = GateFunction.apply(x, router.weight, torch.float64)
    assert wide.dtype == torch.float32  # no matmul adds a product of fp64 to main_grad
    grad = torch.randn(50, E)
    logits.backward(grad)
    assert x.grad.dtype == router.weight.grad.dtype == torch.bfloat16
    close(router.weight.grad.double(), grad.double().t() @ x.detach().double(), 3e-2)
    close(x.grad.double(), grad.double() @ router.weight.detach().double(), 3e-2)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("later", [False, True])
def test_weight_gradient_goes_into_main_grad(later, gate):
    router, x = router_of(settings(), dtype=torch.bfloat16), torch.randn(10, H).bfloat16()
    weight, added = router.weight, []
    weight.main_grad, weight.wgrad_store = torch.ones(E, H), WeightGradStore()
    weight.bucket = SimpleNamespace(grad_buffer=lambda p: (p.main_grad, 1), count=added.append)
    y, grad = gate.apply(x, weight, torch.float32), torch.randn(10, E)
    if later:
        with weight.wgrad_store.collect() as works:
            y.backward(grad)
        assert torch.equal(weight.main_grad, torch.ones(E, H))
        WeightGradStore.run(works)
    else:
        y.backward(grad)
    close(weight.main_grad, 1 + grad.t() @ x.float())
    assert added == [weight] and weight.grad is None


def test_the_parameter():
    """Replicated over tp; a rank's tokens give a summand of its gradient under sequence parallelism."""
    for cut in (False, True):
        tp = Axis("tp", 2, 1, (0, 1))
        (part,) = router_of(settings(sequence_parallel=cut), Mesh(tp=tp)).weight.spec.parts
        assert part.name == "decoder.layers.0.mlp.router.weight" and part.shape == (E, H)
        assert part.replicas == 2 and part.partial is (tp if cut else None)


# Jitter


def test_jitter():
    x, place = torch.ones(64, 4, 32), (torch.arange(64), torch.arange(4))
    y = ops.jitter(x, 0.1, 5, -7, *place)
    assert 0.9 <= y.min() < 0.901 and 1.099 < y.max() <= 1.1 and abs(y.mean() - 1) < 1e-3
    close(y.std().item(), 0.2 / 12**0.5, 1e-3)
    order = torch.randperm(64)
    assert torch.equal(ops.jitter(x, 0.1, 5, -7, order, place[1]), y[order])
    for other in (ops.jitter(x, 0.1, 5, -8, *place), ops.jitter(x, 0.1, 6, -7, *place)):
        correlation = ((y - 1) * (other - 1)).mean() / (y - 1).square().mean()
        assert abs(correlation) < 0.05


def test_jitter_of_a_token_is_the_same_on_any_rank():
    router, x = router_of(settings(input_jitter_eps=0.2)), torch.randn(S, 4, H)
    whole, batch = (
        router.compute_logits(router, x.flatten(0, 1), batch_of(4, seed=1)).view(S, 4, E),
        batch_of(2, seed=1),
    )
    batch.sample_ids, batch.residual_positions = torch.tensor([2, 3]), torch.arange(3, 6)
    close(router.compute_logits(router, x[3:6, 2:].flatten(0, 1), batch).view(3, 2, E), whole[3:6, 2:])
    plain = x @ router.weight.t()
    close(router.compute_logits(router, x.flatten(0, 1), batch_of(4)).view(S, 4, E), plain)
    assert (whole - plain).abs().min() > 0


def test_every_layer_jitters_by_random_numbers_of_its_own():
    config, x = settings(input_jitter_eps=0.2), torch.ones(512, H)
    batch = batch_of(4, s=128, seed=3)
    off = []
    for layer in range(config.num_layers):
        router = Router(config, layer, Mesh(), Init(name="router", std=1.0))
        router.weight.data.copy_(torch.eye(E, H))
        pick_router(router)
        off.append(router.compute_logits(router, x, batch)[:, :H] - 1)
    for one, other in itertools.combinations(off, 2):
        assert one.abs().max() > 0.19 and abs((one * other).mean() / one.square().mean()) < 0.1


def test_forced_choices_are_even_and_pass_gradients():
    """Random ones, the same when recomputed; logits have the gradients that they have without."""
    router, x = (
        router_of(settings(router_force_load_balancing=True), weight=torch.ones(E, H)),
        torch.randn(512, H),
    )
    batch = batch_of(4, s=128, seed=3)
    (_, ids), (_, again) = router(x.requires_grad_(), batch), router(x, batch)
    assert torch.equal(ids, again)
    assert count_copies(ids.long(), E).float().div(512 * 2 / E).sub(1).abs().max() < 0.2
    logits = router.compute_logits(router, x, batch)
    grad = torch.randn_like(logits)
    close(torch.autograd.grad(logits, x, grad)[0], grad @ router.weight)
    plain = router(x, batch_of(4, s=128))[1]
    assert (plain == plain[:1]).all(), "outside of training the weights choose"


def test_forced_choices_pass_gradients_to_jittered_inputs():
    """Both flags at once: logits are random, their gradients those of the jittered inputs."""
    both = router_of(
        settings(router_force_load_balancing=True, input_jitter_eps=0.3), weight=torch.ones(E, H)
    )
    jitters = router_of(settings(input_jitter_eps=0.3), weight=torch.ones(E, H))
    x, batch, found = torch.randn(16, H, requires_grad=True), batch_of(2, seed=3), []
    grad = torch.randn(16, E)
    for router in (both, jitters):
        logits = router.compute_logits(router, x, batch)
        found.append(torch.autograd.grad(logits, x, grad)[0])
    close(*found)
    assert not torch.allclose(found[0], grad @ both.weight, rtol=1e-2)


JITTER, FORCED = "--moe-input-jitter-eps 0.1 ", "--moe-router-force-load-balancing "
LIMIT = "--moe-router-num-groups 2 --moe-router-group-topk 1 "
TYPE = "--moe-router-load-balancing-type "
SLOTS = {
    "": "compute_logits choose_experts best_experts none",
    JITTER: "jittered_logits choose_experts best_experts none",
    FORCED: "random_logits choose_experts best_experts none",
    JITTER + FORCED: "random_logits(jittered_logits) choose_experts best_experts none",
    f"{LIMIT}{TYPE}seq_aux_loss": "compute_logits choose_experts best_of_groups none",
    f"{LIMIT}{JITTER}{TYPE}seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.1": (
        "jittered_logits choose_experts best_of_groups none"
    ),
    f"{JITTER}{TYPE}sinkhorn": "jittered_logits sinkhorn_routing best_experts none",
    f"{FORCED}{LIMIT}--moe-expert-capacity-factor 1": "random_logits choose_experts best_of_groups drop",
}


@pytest.mark.parametrize("flags", SLOTS)
def test_a_built_model_has_the_variants_of_its_flags(flags):
    config = config_of(f"--num-experts 4 --max-position-embeddings 64 {flags}")
    init = Init(device=torch.device("meta"))
    routers = [m for m in build(config, Mesh(), 64, 64, init).modules() if isinstance(m, Router)]
    assert len(routers) == config.model.num_layers
    for router in routers:
        logits, found = router.compute_logits, ""
        if hasattr(logits, "keywords"):
            inner = logits.keywords["compute_logits"].__name__
            logits, found = logits.func, f"({inner})" * (inner != "compute_logits")
        dropping = "none" if router.drop is None else router.drop.__name__
        slots = [
            logits.__name__ + found,
            router.choose_experts.__name__,
            router.best_experts.__name__,
            dropping,
        ]
        assert " ".join(slots) == SLOTS[flags]
        assert set(router.losses) <= set(router.loss_functions)
        assert hasattr(router, "global_counts") == ("global_aux_loss" in router.losses)


@pytest.mark.parametrize("gate", GATES)
def test_fp32_gradients_of_16_bit_weights(gate):
    """Split: by matmuls of 16 bits, each of which sees a third of the gradient's bits."""
    x, weight = torch.randn(300, 40).bfloat16(), torch.nn.Parameter(torch.randn(E, 40).bfloat16())
    weight.main_grad = torch.full((E, 40), torch.nan)
    weight.bucket = SimpleNamespace(grad_buffer=lambda p: (p.main_grad, 0), count=lambda _: None)
    grad = torch.randn(300, E) * 1e-3
    leaf = x.clone().requires_grad_()
    y = gate.apply(leaf, weight, torch.float32)
    assert y.dtype == torch.float32
    close(y.double(), x.double() @ weight.detach().double().t(), 1e-5)
    y.backward(grad)
    exact = grad.double() @ weight.detach().double()
    assert (leaf.grad - exact).norm() < 2.5e-3 * exact.norm(), "rounded once"
    dw = grad.double().t() @ x.double()
    assert (weight.main_grad - dw).norm() < 1e-6 * dw.norm()


@pytest.mark.parametrize(
    "given, dtype", [(torch.float32, "fp32"), (torch.bfloat16, None), (torch.float16, "fp32")]
)
def test_other_types_are_not_split(given, dtype):
    found = []
    for gate in GATES:
        router = router_of(settings(router_dtype=dtype), dtype=given)
        router.gate = gate.apply
        x = torch.randn(50, H, generator=torch.Generator().manual_seed(1)).to(given).requires_grad_()
        logits = router.compute_logits(router, x, batch_of())
        logits.square().sum().backward()
        found.append((logits.detach(), x.grad, router.weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


# The bias


def test_bias_moves_towards_idle_experts():
    large = 2**24
    counts = torch.tensor([[10, 2, 4, 0], [3, 3, 3, 3], [large + 1, large - 1, large, large]])
    config = SimpleNamespace(moe_router_bias_update_rate=0.1)
    for kind in (torch.int64, torch.float64):
        routers = [SimpleNamespace(config=config, expert_bias=torch.zeros(4)) for _ in counts]
        move_expert_biases(routers, counts.to(kind))
        moved = torch.stack([router.expert_bias for router in routers])
        close(moved, torch.tensor([[-0.1, 0.1, 0.0, 0.1], [0.0] * 4, [-0.1, 0.1, 0.0, 0.0]]))


def test_bias_evens_the_load():
    config = settings(router_enable_expert_bias=True, router_bias_update_rate=1e-2, **SIGMOID)
    router, x = router_of(config), torch.randn(256, H) + 1.0
    heaviest = []
    for _ in range(300):
        router.begin_step()
        router(x, batch_of())
        heaviest.append(router.counts.max() / router.counts.float().mean())
        move_expert_biases([router], sum_counts([router])[0])
    assert heaviest[0] > 1.5 and heaviest[-1] < 1.15
    assert router.expert_bias.dtype == torch.float32 and "expert_bias" in router.state_dict()


def counts_on_ranks(mesh):
    router = router_of(settings(sequence_parallel=True), mesh)
    router.counts += mesh.rank
    return sum_counts([router, router])


def test_counts_of_all_ranks():
    for found in run_spmd(counts_on_ranks, 4, tp=2):
        assert (found[0] == 6).all() and found.shape == (2, 2, E)


def test_flags_without_their_variants_are_refused():
    """A model that is built by hand would else route as the core does, without a word."""
    config = settings(router_load_balancing_type=("seq_aux_loss",), aux_loss_coeff=(0.1,))
    router = Router(config, 0, Mesh(), Init(name="router", std=1.0))
    with pytest.raises(RuntimeError, match="load-balancing-type: .*call pick_variants on the model"):
        router(torch.zeros(4, config.hidden_size), None)

"""The router's losses against Megatron's and by hand, and how ranks' shares of them add up."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nanomegatron.comm import own_slice
from nanomegatron.recompute import recomputed
from nanomegatron.router import count_copies, load_loss
from nanomegatron.variants.router_losses import count_by_column
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
    z_loss,
)
from tests.spmd import run_spmd


def test_counts_of_columns():
    ids = torch.tensor([[0, 1], [2, 3], [0, 2], [2, 7]])  # tokens of samples 0, 1, 0, 1
    assert count_by_column(ids, E, 2).tolist() == [[2, 1, 1, 0, 0, 0, 0, 0], [0, 0, 2, 1, 0, 0, 0, 1]]
    assert count_copies(ids, E, ids == 2).tolist() == [0, 0, 3, 0, 0, 0, 0, 0]


def test_losses_by_hand():
    logits = torch.randn(20, E)
    scores = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(1, keepdims=True)
    ids = logits.topk(2).indices
    f = np.bincount(ids.flatten().numpy(), minlength=E) / 40
    expected = E * sum(f[e] * scores[:, e].mean() for e in range(E))
    assert load_loss(torch.tensor(scores), count_copies(ids, E)).item() == pytest.approx(
        20 * expected, rel=1e-6
    )
    squares = [np.log(np.exp(row).sum()) ** 2 for row in logits.numpy()]
    assert z_loss(logits).item() == pytest.approx(sum(squares), rel=1e-6)
    even = load_loss(torch.full((8, E), 1 / E), torch.full((E,), 2))
    assert even.item() == pytest.approx(8.0)


COEFFS = dict(aux_loss=0.3, seq_aux_loss=0.5, global_aux_loss=0.7)


def losses_of(*kinds, z=None, **given):
    """A config with these losses."""
    names, coeffs = tuple(kinds) or ("none",), tuple(COEFFS[kind] for kind in kinds) or (0.0,)
    how = dict(router_load_balancing_type=names, aux_loss_coeff=coeffs, z_loss_coeff=z)
    return settings(**how, **given)


def expected_losses(config, logits, running):
    """Megatron's losses of one replica's microbatch, logits `[s, b, E]`; running: the global counts."""
    m, k, (s, b, _) = megatron(), config.moe_router_topk, logits.shape
    flat = logits.reshape(-1, E)
    mask, scores = m.compute_routing_scores_for_aux_loss(flat, k, config.moe_router_score_function)
    found = 0.0
    for kind, coeff in zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, strict=True):
        if kind == "aux_loss":
            found += m.switch_load_balancing_loss_func(scores, mask.sum(0), s * b, k, E, coeff)
        elif kind == "seq_aux_loss":
            columns = (x.reshape(s, -1) for x in (scores, mask))
            probs, counts = next(columns), next(columns).sum(0)
            found += m.switch_load_balancing_loss_func(probs, counts, s, k, E, coeff) / b
        elif kind == "global_aux_loss":  # of this replica alone: the counts are scaled to its tokens
            counts = running * (s * b * k / running.sum())
            found += m.switch_load_balancing_loss_func(scores, counts, s * b, k, E, coeff)
    if config.moe_z_loss_coeff:
        found += m.z_loss_func(flat, config.moe_z_loss_coeff)
    return found


def reference(config, x, weight, mix, dp, micro, scale):
    """One process: gradients of weight and x `[s, samples, h]`, and the mean of all losses."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits, step, total = x @ weight.t(), micro * dp, 0.0
    probs, ids = choose(logits.reshape(-1, E), config)
    main = (probs * mix.reshape(-1, E).gather(1, ids)).sum()
    scores = logits.softmax(-1) if config.moe_router_score_function == "softmax" else logits.sigmoid()
    chosen = torch.zeros_like(logits).scatter(-1, scores.topk(config.moe_router_topk).indices, 1.0)
    for first in range(0, x.shape[1], step):
        running = chosen[:, : first + step].sum((0, 1))
        for replica in range(first, first + step, micro):
            total += expected_losses(config, logits[:, replica : replica + micro], running)
    mean = total / (x.shape[1] // micro)
    (main + scale * mean).backward()
    return weight.grad, x.grad, mean.detach()


def on_rank(mesh, given, tensors, micro, scale, again):
    """This rank's gradients of weight and x, its share of the losses' mean, and its counts."""
    kinds, z, more, cut = given
    config = losses_of(*kinds, z=z, sequence_parallel=cut, **more)
    x, weight, mix = tensors
    axis = mesh.tp_cp if cut else mesh.cp
    local, mix = own_slice(x, axis).clone().requires_grad_(), own_slice(mix, axis)
    router = router_of(config, mesh, weight)
    router.begin_step()
    for first in range(mesh.dp.rank * micro, x.shape[1], micro * mesh.dp.size):
        batch = batch_of(micro, len(local), scale / x.shape[:2].numel())

        def run(tokens, batch=batch, first=first):
            probs, ids = router(tokens.flatten(0, 1), batch)
            weights = mix[:, first : first + micro].flatten(0, 1)
            return (probs * weights.gather(1, ids.long())).sum()

        piece = local[:, first : first + micro]
        (recomputed(run, piece) if again else run(piece)).backward()
    losses = list(router.losses.values())
    mean = (router.values * torch.tensor(losses)).sum() / x.shape[:2].numel()
    return router.weight.grad, local.grad, mean, sum_counts([router])


ALL = ("aux_loss", "seq_aux_loss", "global_aux_loss")
LAYOUTS = [
    (1, {}, True),
    (2, dict(tp=2), True),
    (2, dict(tp=2), False),
    (2, dict(cp=2), True),
    (2, {}, True),
    (4, dict(tp=2, cp=2), True),
    (4, dict(tp=2), True),
    (4, dict(cp=2), True),
]


def check_layout(world, sizes, cut, config, micro, again=False):
    torch.manual_seed(1)
    samples, scale = 4, 3.0
    x, weight, mix = torch.randn(S, samples, H), torch.randn(E, H), torch.randn(S, samples, E)
    tp, cp = sizes.get("tp", 1), sizes.get("cp", 1)
    dp = world // (tp * cp)
    kinds, z, more = config
    expected = reference(losses_of(*kinds, z=z, **more), x, weight, mix, dp, micro, scale)
    given = (kinds, z, more, cut)
    found = run_spmd(on_rank, world, given, (x, weight, mix), micro, scale, again, **sizes)
    if not cut:  # the tp ranks have the same tokens, and each all of the gradient
        found = found[::tp]
    ways = 1 if not cut else tp
    close(sum(rank[0] for rank in found), expected[0], 1e-5)
    pieces = [sum(rank[1] for rank in found[i :: cp * ways]) for i in range(cp * ways)]
    close(torch.cat(pieces), expected[1], 1e-5)  # a replica has no gradient for the others' samples
    close(sum(rank[2] for rank in found), expected[2], 1e-5)
    for rank in found:
        assert rank[3][0].sum() == S * samples * 2 and not rank[3][1].any()
        assert torch.equal(rank[3], found[0][3])


@pytest.mark.parametrize("world, sizes, cut", LAYOUTS)
def test_shares_of_ranks_add_up(world, sizes, cut):
    check_layout(world, sizes, cut, (ALL, 0.2, {}), 1)


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_samples_may_be_cut_anyhow_for_seq_aux_loss(micro):
    """The gradient is that of all samples at once."""
    torch.manual_seed(2)
    config, x, weight = losses_of("seq_aux_loss", z=0.1), torch.randn(S, 4, H), torch.randn(E, H)
    expected = reference(config, x, weight, torch.ones(S, 4, E), 1, 4, 2.0)
    close(reference(config, x, weight, torch.ones(S, 4, E), 1, micro, 2.0)[0], expected[0])
    check_layout(2, dict(tp=2), True, (("seq_aux_loss",), 0.1, {}), micro)


@pytest.mark.parametrize(
    "more", [SIGMOID, dict(router_enable_expert_bias=True, **SIGMOID), GROUPS | dict(router_group_topk=1)]
)
def test_losses_count_the_best_scores(more):
    """Not the choice that a bias or groups make."""
    config = losses_of("aux_loss", z=0.1, **more)
    x, weight = torch.randn(S, 2, H), torch.randn(E, H)
    router = router_of(config, weight=weight)
    if router.expert_bias is not None:
        router.expert_bias.normal_()
    router(x.flatten(0, 1), batch_of(2, aux_scale=1.0))
    expected = expected_losses(config, x @ weight.t(), None)
    close((router.values * torch.tensor([*router.losses.values()])).sum() / (2 * S), expected)


def test_recomputation_counts_once_and_changes_nothing():
    check_layout(2, dict(tp=2), True, (ALL, 0.2, {}), 1, again=True)


@pytest.mark.parametrize("again", [False, True])
def test_what_is_counted(again):
    config = losses_of(*ALL, z=0.1)
    router, x, batch = router_of(config), torch.randn(S, H, requires_grad=True), batch_of(aux_scale=1.0)
    run = (lambda x: recomputed(lambda x: router(x, batch)[0], x)) if again else lambda x: router(x, batch)[0]
    run(x).sum().backward()
    assert router.counts.sum() == S * 2 and router.global_counts.sum() == S * 2 and router.values.all()
    kept = {name: b.clone() for name, b in router.named_buffers()}
    with torch.no_grad():
        router(x, batch)
    router.eval()(x, batch)
    router.train()
    assert all(torch.equal(b, kept[name]) for name, b in router.named_buffers())
    router.begin_step()
    assert not any(b.any() for b in router.buffers())


def test_without_a_scale_there_are_no_losses():
    router, x = router_of(losses_of(*ALL, z=0.1)), torch.randn(S, H)
    router(x, batch_of())[0].sum().backward()
    plain = router_of(settings(), weight=router.weight.data)
    plain(x, batch_of())[0].sum().backward()
    close(router.weight.grad, plain.weight.grad)
    assert not router.values.any() and router.counts.sum() == S * 2 and not plain.losses


def test_nothing_waits_for_the_device():
    """Fake tensors have no values: reading one fails."""
    given = dict(router_group_topk=1, router_num_groups=2, input_jitter_eps=0.1, router_dtype="fp32")
    config = losses_of(*ALL, z=0.1, expert_capacity_factor=1.0, **given)
    with FakeTensorMode(allow_non_fake_inputs=False):
        router = router_of(config)
        router.begin_step()
        x = torch.randn(S * 2, H, requires_grad=True)
        batch = batch_of(2, aux_scale=1.0, seed=3)
        probs, ids = router(x, batch)
        probs.sum().backward()
        sum_counts([router])
    assert ids.shape == (S * 2, 2)

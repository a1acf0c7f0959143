"""Experts with packs of documents (--variable-seq-lengths): what routers count and what their losses are."""

import numpy as np
import pytest
import torch

from nanomegatron.router import count_copies, load_loss
from tests.moe_routers import E, H, batch_of, close, router_of, settings, z_loss
from tests.spmd import run_spmd
from tests.variants.test_document_packs import arguments, documents, outcome, train_on_a_rank

__all__ = ["documents"]  # a fixture

SIZES = "--num-experts 4 --moe-ffn-hidden-size 24 --moe-z-loss-coeff 0.01"
MODELS = {
    "bias": f"{SIZES} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.05 --moe-token-dispatcher-type alltoall",
    "losses": f"{SIZES} --moe-router-load-balancing-type aux_loss global_aux_loss "
    "--moe-aux-loss-coeff 0.02 0.05",
    "sinkhorn": f"{SIZES} --moe-router-load-balancing-type sinkhorn",
}
# What evens the load is of a pack, but for the bias: equal where packs are, on any ranks of one replica.
FAST = [
    ("bias", 2, "--dp 2 --ep 2"),
    ("bias", 4, "--cp 2 --dp 2 --ep 4 --use-distributed-optimizer"),
    ("losses", 4, "--cp 2 --tp 2 --sp --etp 1 --ep 2"),
]
MORE = [
    ("bias", 2, "--dp 2"),
    ("bias", 4, "--tp 2 --sp --dp 2 --ep 2 --etp 2"),
    ("losses", 2, "--cp 2 --ep 2"),
    ("sinkhorn", 4, "--cp 2 --tp 2 --sp --etp 1 --ep 2"),
]


@pytest.fixture(scope="module")
def alone(documents, tmp_path_factory):
    """What one process does with a model, computed once each."""
    made = {}

    def result(model: str) -> tuple:
        if model not in made:
            folder = tmp_path_factory.mktemp("alone")
            run_spmd(train_on_a_rank, 1, arguments(documents, MODELS[model]), str(folder))
            made[model] = outcome(folder)
        return made[model]

    return result


@pytest.mark.parametrize(
    "model, world, flags", FAST + [pytest.param(*case, marks=pytest.mark.full) for case in MORE]
)
def test_layouts_train_alike(model, world, flags, alone, documents, full, tmp_path):
    """Losses, norms, held-out losses; the routers' losses, and how busy the busiest expert is."""
    argv = arguments(documents, MODELS[model], flags)
    run_spmd(train_on_a_rank, world, argv, str(tmp_path), timeout=150)
    (steps, evals), (expected, expected_evals) = outcome(tmp_path), alone(model)
    kinds = ["lm_loss", "grad_norm", "z_loss", "moe_load_imbalance"]
    kinds += ["aux_loss", "global_aux_loss"] * (model == "losses")
    for key in kinds:
        ours, theirs = ([step[key] for step in side] for side in (steps, expected))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6 if key == "lm_loss" else 1e-5, err_msg=key)
    for ours, theirs in zip(evals, expected_evals, strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-6)
    assert not full or expected[-1]["lm_loss"] < expected[0]["lm_loss"] - 0.1


@pytest.mark.parametrize("padding", [0, 3, 8])
def test_padding_counts_nowhere(padding):
    """Losses, gradients and counts are those of the tokens alone; of nothing but padding they are zeros."""
    kinds = ("aux_loss", "global_aux_loss")
    how = dict(router_load_balancing_type=kinds, aux_loss_coeff=(0.3, 0.5), z_loss_coeff=0.2)
    config = settings(expert_capacity_factor=0.5, token_drop_policy="position", **how)
    router, x = router_of(config), torch.randn(8, H, requires_grad=True)
    batch, real = batch_of(s=8, aux_scale=1.0), 8 - padding
    batch.residual_positions = torch.cat((torch.arange(real), torch.arange(padding) - 50))
    batch.cu_seqlens = torch.tensor([0, real, 8])
    probs, kept = router(x, batch)
    (probs * 0).sum().backward()
    y = x.detach()[:real].clone().requires_grad_()
    logits = y @ router.weight.detach().t()
    ids = logits.topk(2).indices
    counts, scores = count_copies(ids, E), logits.softmax(-1)
    losses = [load_loss(scores, counts), load_loss(scores, counts), z_loss(logits)]
    close(router.values, torch.stack(losses).detach())
    sum(a * b for a, b in zip((0.3, 0.5, 0.2), losses, strict=True)).backward()
    close(x.grad[:real], y.grad)
    assert not x.grad[real:].any() and torch.equal(router.counts, counts)
    assert torch.equal(router.dropped, count_copies(ids, E, kept[:real] < 0))

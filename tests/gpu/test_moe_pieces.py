"""Tokens of experts over GPUs' own memory against collectives, with every rank late at another place."""

import random
from dataclasses import replace

import pytest
import torch

from nanomegatron.config.model import TransformerConfig
from nanomegatron.fast.moe_dispatch import Journey
from nanomegatron.fast.pieces import in_any_order, overlap_path
from nanomegatron.router import MoeAxes
from tests.gpu.ranks import Dawdled, all_right, dawdler, needs_two, run_on_gpus
from tests.gpu.test_tp_overlap import close

H, E, K = 512, 16, 4
TOKENS = [64, 1024, 40, 4096, 1, 512]  # of a rank; memory grows on the way
LAYOUTS = {
    "2 ep2": (2, {"expert_model_parallel_size": 2}),
    "4 ep4": (4, {"expert_model_parallel_size": 4}),
    "4 ep2": (4, {"expert_model_parallel_size": 2}),
    "4 ep2 etp2": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
        },
    ),
}


class Experts:
    """What a Journey asks of GroupedExperts: rows times a number of their expert, and what is left to do."""

    multiple = 1

    def __init__(self, axes, dawdle):
        self.config = TransformerConfig(hidden_size=H, num_experts=E, moe_router_topk=K)
        self.first, self.dawdle, self.whole = axes.ep.rank * (E // axes.ep.size), dawdle, None

    def __call__(self, rows, offsets, ends, soon, early):
        self.whole = soon.whole
        factors = torch.arange(len(offsets) - 1, device=rows.device) + self.first - 0.7 * E / 2
        factors = factors.repeat_interleave(offsets.diff(), output_size=ends[-1])[:, None].to(rows.dtype)
        return Dawdled.apply(Dawdled.apply(rows, self.dawdle) * factors / 8, self.dawdle)


def turn(axes, generator, tokens, dawdle):
    """By both ways; flags on the device."""
    device = generator.device
    x, grad = (torch.randn(tokens, H, device=device, generator=generator).bfloat16() for _ in range(2))
    ids = torch.rand(tokens, E, device=device, generator=generator).topk(K).indices.int()
    ids = ids.where(torch.rand(tokens, K, device=device, generator=generator) > 0.2, -1)
    probs, found = torch.rand(tokens, K, device=device, generator=generator), []
    for among in (axes, replace(axes, etp_ep=in_any_order(axes.etp_ep))):
        experts, leaf, weights = Experts(axes, dawdle), x.clone().requires_grad_(), probs.clone()
        weights.requires_grad_()
        dawdle()
        journey = Journey(Dawdled.apply(leaf, dawdle), experts, among, "allgather")
        dawdle()
        journey.route(ids)
        dawdle()
        y = journey.sums(weights)
        y.backward(grad)
        assert experts.whole == (among is axes)
        found.append((y.detach(), leaf.grad, weights.grad))
    return [close(*pair) if tokens > 1 else torch.isfinite(pair[0]).all() for pair in zip(*found)]


def storm(mesh, device):
    """120 turns of all sizes, forward and backward; then one where the host may wait for sizes alone."""
    axes, dawdle, same = MoeAxes.of(mesh), dawdler(mesh.rank), random.Random(0)
    assert overlap_path(axes.etp_ep) == "GPU copy engines"
    generator, flags = torch.Generator(device).manual_seed(mesh.rank), []
    for _ in range(120):
        flags += turn(axes, generator, same.choice(TOKENS), dawdle)
    all_right(flags)
    torch.cuda.set_sync_debug_mode("error")
    turn(axes, generator, 512, lambda: None)
    torch.cuda.set_sync_debug_mode("default")


@needs_two
@pytest.mark.parametrize("layout", LAYOUTS)
def test_late_ranks_overwrite_nothing(layout):
    world, sizes = LAYOUTS[layout]
    run_on_gpus(world, storm, **sizes)

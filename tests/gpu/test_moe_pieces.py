"""Tokens of experts over GPUs' own memory against collectives, with every rank late at another place."""

import random

import pytest
import torch

from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.fast.moe_dispatch import OverlappedMoe
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.moe import route_and_combine
from tests.gpu.ranks import Dawdled, all_right, dawdler, needs_two, run_on_gpus
from tests.gpu.test_tp_overlap import close
from tests.moe_routers import dispatch

H, E, K = 512, 16, 4
TOKENS = [64, 1024, 40, 4096, 1, 512]  # of a rank; memory grows meanwhile
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
    """What a dispatch asks of GroupedExperts: rows times a number of their expert."""

    multiple = 1

    def __init__(self, axes, dawdle):
        self.config, self.mesh = TransformerConfig(hidden_size=H, num_experts=E, moe_router_topk=K), axes
        self.first, self.dawdle = axes.ep.rank * (E // axes.ep.size), dawdle
        self.weight1 = torch.nn.Parameter(torch.zeros(1))

    def __call__(self, rows, offsets, ends):
        factors = torch.arange(len(offsets) - 1, device=rows.device) + self.first - 0.7 * E / 2
        factors = factors.repeat_interleave(offsets.diff(), output_size=ends[-1])[:, None].to(rows.dtype)
        return Dawdled.apply(Dawdled.apply(rows, self.dawdle) * factors / 8, self.dawdle)


def turn(axes, forms, generator, tokens, dawdle):
    """In both forms; flags on the device."""
    device = generator.device
    x, grad = (torch.randn(tokens, H, device=device, generator=generator).bfloat16() for _ in range(2))
    ids = torch.rand(tokens, E, device=device, generator=generator).topk(K).indices.int()
    ids = ids.where(torch.rand(tokens, K, device=device, generator=generator) > 0.2, -1)
    probs, found = torch.rand(tokens, K, device=device, generator=generator), []
    for form in forms:
        leaf, weights = x.clone().requires_grad_(), probs.clone().requires_grad_()
        dawdle()
        rows, experts = Dawdled.apply(leaf, dawdle), Experts(axes, dawdle)
        y = dispatch(rows, weights, ids, experts, "allgather", form, pause=dawdle)
        y.backward(grad)
        found.append((y.detach(), leaf.grad, weights.grad))
    compared = zip(found[0], found[-1])
    return [close(*pair) if tokens > 1 else torch.isfinite(pair[0]).all() for pair in compared]


def storm(mesh, device):
    """120 turns of all sizes, forward and backward; then one where the host may wait for sizes alone."""
    axes, dawdle, same = mesh, dawdler(mesh.rank), random.Random(0)
    peers = PeerAccess.build(mesh, ParallelConfig())
    assert peers.describe(axes.etp_ep) == "GPU copy engines"
    copied = OverlappedMoe(peers)
    generator, flags = torch.Generator(device).manual_seed(mesh.rank), []
    for _ in range(120):
        flags += turn(axes, (copied, route_and_combine), generator, same.choice(TOKENS), dawdle)
    all_right(flags)
    torch.cuda.set_sync_debug_mode("error")
    turn(axes, (copied,), generator, 512, lambda: None)
    torch.cuda.set_sync_debug_mode("default")


@needs_two
@pytest.mark.parametrize("layout", LAYOUTS)
def test_late_ranks_overwrite_nothing(layout):
    world, sizes = LAYOUTS[layout]
    run_on_gpus(world, storm, **sizes)

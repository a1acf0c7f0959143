"""Tests on several GPUs, a process each, that are late now and then."""

import random
import sys
import time
import traceback
from collections.abc import Callable

import pytest
import torch

from nanomegatron.config.settings import ParallelConfig
from nanomegatron.faults.launch import launch
from nanomegatron.mesh import Mesh
from nanomegatron.report.traffic import Traffic

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def run_on_gpus(world: int, body: Callable[[Mesh, torch.device], None], **parallel) -> None:
    """body(mesh, device), a function of a module, on `world` GPUs; a skip where there are fewer."""
    if world > torch.cuda.device_count():
        pytest.skip(f"needs {world} GPUs")
    assert launch(_rank, world, (body, ParallelConfig(**parallel)), timeout=120) == [0] * world


def _rank(place, body, parallel) -> int:
    try:
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        body(Mesh.build(parallel, place, device, observer=Traffic()), device)
        Mesh.close()
    except BaseException:  # a rank's own words, before the launcher stops the others
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


def dawdler(rank: int) -> Callable[[], bool]:
    """What keeps a rank's GPU or its host, by dice of its own; and then a toss of a coin."""
    dice = random.Random(100 + rank)

    def dawdle() -> bool:
        torch.cuda._sleep(dice.choice((0, 0, 20_000, 400_000)))
        time.sleep(dice.choice((0, 0, 0, 0.001)))
        return dice.random() < 0.5

    return dawdle


class Dawdled(torch.autograd.Function):
    """x itself, after a while, in the backward too."""

    @staticmethod
    def forward(ctx, x, dawdle):
        ctx.dawdle = dawdle
        dawdle()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.dawdle()
        return grad, None


def all_right(flags: list[torch.Tensor]) -> None:
    """Fails where one is not."""
    wrong = [k for k, flag in enumerate(torch.stack(flags).tolist()) if not flag]
    assert not wrong, f"{len(wrong)} of {len(flags)} wrong, the first: {wrong[:9]}"

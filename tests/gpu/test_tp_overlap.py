"""Pipelined gathers and reduce-scatters over GPUs' own memory, with every rank late at another place."""

import random

import numpy as np
import pytest
import torch

from nanomegatron.config.settings import ParallelConfig
from nanomegatron.fast.fp8_overlap import OverlappedFp8Matmuls
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.tp_overlap import gather_matmul, matmul_scatter, start_gather_rows
from nanomegatron.fp8 import RECIPES, Fp8LayerState, Recipe, Scales
from nanomegatron.fp8_linear import Fp8Matmuls
from tests.gpu.ranks import all_right, dawdler, needs_two, run_on_gpus
from tests.gpu.test_layouts import train

HOW = "", " --tp-comm-overlap"
SHAPES = [(64, 128, 96), (256, 512, 384), (40, 1024, 64), (2048, 512, 256)]  # rows of a rank, i, o


def close(found, expected):
    """No element is off by as much as a stale one would be; stays on the device."""
    return (found.float() - expected.float()).abs().amax() < 0.1 * expected.float().std()


def turn(axis, peers, generator, shape, dtype, dawdle):
    """One call of each on rows that all ranks can draw; what is wrong comes back as flags on the device."""
    n, i, o = shape
    device = generator.device

    def draw(*size):
        return torch.randn(*size, device=device, generator=generator).to(dtype)

    xs, weight = draw(axis.size, n, i), draw(o, i).t()
    parts, weights = draw(axis.size, n * axis.size, i), draw(axis.size, i, o)
    whole = xs.flatten(0, 1)
    product, own = whole @ weight, slice(axis.rank * n, (axis.rank + 1) * n)
    total = sum(parts[rank, own].float() @ weights[rank].float() for rank in range(axis.size))
    dawdle()
    pending = start_gather_rows(xs[axis.rank], axis, peers)
    dawdle()
    reduced = matmul_scatter(parts[axis.rank], weights[axis.rank], axis, peers)
    if dawdle():
        z, gathered = gather_matmul(xs[axis.rank], weight, axis, peers)
        late = pending.wait()
    else:
        late = pending.wait()
        z, gathered = gather_matmul(xs[axis.rank], weight, axis, peers)
    return [
        (late == whole).all(),
        (gathered == whole).all(),
        close(z, product),
        close(reduced.wait(), total),
    ]


def storm(mesh, device):
    """200 turns of all shapes and two types; a rank dawdles on its GPU or its host, each by its own dice."""
    torch.backends.cuda.matmul.allow_tf32 = False
    peers = PeerAccess.build(mesh, ParallelConfig())
    assert peers.describe(mesh.tp) == "GPU copy engines"
    axis, dawdle, same = mesh.tp, dawdler(mesh.rank), random.Random(0)
    generator = torch.Generator(device).manual_seed(0)

    flags = []
    for _ in range(200):
        shape, dtype = same.choice(SHAPES), same.choice((torch.bfloat16, torch.float32))
        flags += turn(axis, peers, generator, shape, dtype, dawdle)
    all_right(flags)
    torch.cuda.set_sync_debug_mode("error")
    x = torch.ones(64, 128, device=device)
    gather_matmul(x, x.t(), axis, peers)
    matmul_scatter(x, x.t(), axis, peers).wait()
    start_gather_rows(x, axis, peers).wait()
    torch.cuda.set_sync_debug_mode("default")


@needs_two
@pytest.mark.parametrize("world, tp", [(2, 2), (4, 4), (4, 2)])
def test_late_ranks_overwrite_nothing(world, tp):
    run_on_gpus(world, storm, tensor_model_parallel_size=tp)


def fp8_pieces(mesh, device):
    """The matmuls of FP8 layers in pieces and at once: the same bytes, the same sums but for rounding."""
    axis, peers = mesh.tp, PeerAccess.build(mesh, ParallelConfig())
    plain, pieces = Fp8Matmuls(), OverlappedFp8Matmuls(peers)
    torch.manual_seed(axis.rank)
    for name in RECIPES:
        recipe = Recipe(RECIPES[name])
        fp8 = Fp8LayerState("layer", recipe)
        Scales(recipe, [fp8], device, [axis])
        for n, i, o in ((64, 128, 256), (1024, 1024, 512)):
            x, weight = torch.randn(n, i, device=device), torch.randn(o, i, device=device)
            a = fp8.x.quantize(x.bfloat16(), "rowwise", axis).rowwise
            b = fp8.w.quantize(weight.bfloat16(), "rowwise", axis).rowwise
            for turn in range(3):
                how = a, b, axis, torch.bfloat16, turn == 1
                gathers = [matmuls.start_gather(a, axis) for matmuls in (pieces, plain)]
                sums = [matmuls.matmul_scatter(*how) for matmuls in (pieces, plain)]
                found = [gather.wait().data.view(torch.uint8) for gather in gathers]
                assert close(*(pending.wait() for pending in sums))
                (y, rows), (whole, _) = (matmuls.gather_matmul(*how) for matmuls in (pieces, plain))
                found.append(rows.data.view(torch.uint8))
                assert close(y, whole) and all(torch.equal(x, found[0]) for x in found)


@needs_two
@pytest.mark.parametrize("world", [2, 4])
def test_fp8_pieces_make_the_same(world):
    run_on_gpus(world, fp8_pieces, tensor_model_parallel_size=world)


@needs_two
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_layers_in_fp8_train_alike_in_pieces(recipe, tmp_path):
    flags = f"--tp 2 --sp --bf16 --fp8-format hybrid --fp8-recipe {recipe}"
    flags += " --hidden-size 512 --ffn-hidden-size 1024"  # a rank's parts divide by blocks
    runs = [train(tmp_path, f"run{len(how)}", 2, flags + how) for how in HOW]
    for key, near in (("lm_loss", 2e-3), ("grad_norm", 5e-2)):
        np.testing.assert_allclose(*([step[key] for step in run] for run in runs), rtol=near, err_msg=key)
    said = [(tmp_path / "runs" / f"run{len(how)}" / "log.txt").read_text() for how in HOW]
    assert ["tp matmuls in pieces, sent by GPU copy engines" in text for text in said] == [False, True]

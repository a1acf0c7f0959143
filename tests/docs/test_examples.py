"""The examples run as their first lines say, and do what they are for."""

import io
import math
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

import train
from nanomegatron.comm import all_gather
from nanomegatron.mesh import World
from nanomegatron.report.steps import Reporter
from tests.spmd import run_spmd
from tests.training import arguments, set_up, sources  # noqa: F401 (a fixture)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/custom_loop.py"
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def numbers(text: str) -> list[list[float]]:
    """Loss and gradient norm of each step that examples/custom_loop.py prints."""
    lines = re.findall(r"^step +\d+  loss (\S+)  gradient norm (\S+)$", text, re.MULTILINE)
    return [[float(number) for number in line] for line in lines]


def by_torchrun(processes: int) -> list[list[float]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*LAUNCHER, str(processes), EXAMPLE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return numbers(done.stdout)


def run_example(world: World) -> str:
    """The program on a rank; what it prints."""
    World.from_environment = staticmethod(lambda: world)
    with redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(ROOT / EXAMPLE), run_name="__main__")
    return said.getvalue()


def test_custom_loop(full):
    """tp 2 learns, from an even guess among 100 tokens down; tp 2 x dp 2 learns the same."""
    start = by_torchrun if full else lambda ranks: numbers(run_spmd(run_example, ranks)[0])
    two, four = start(2), start(4)
    losses = [loss for loss, _ in two]
    assert len(losses) == 20 and abs(losses[0] - math.log(100)) < 0.2
    assert losses[-1] < 0.3 * losses[0]
    for here, there in zip(two, four, strict=True):
        assert here == pytest.approx(there, abs=3e-3)


def run_quick_start(world: World, folder: str) -> str:
    """The quick start on a rank, in a folder; what it prints."""
    os.chdir(folder)
    World.from_environment = staticmethod(lambda: world)
    with redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(ROOT / "examples" / "quick_start.py"), run_name="__main__")
    return said.getvalue()


def test_quick_start(tmp_path):
    """Five losses, the same on one rank, at tp 2 and at tp 2 x dp 2; a checkpoint that is read."""
    losses = []
    for ranks in (1, 2, 4):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        said = run_spmd(run_quick_start, ranks, str(folder))[0]
        assert said.endswith("Successfully loaded the model from ckpt/\n")
        assert (folder / "ckpt" / "iter_0000005" / "manifest.json").is_file()
        losses.append([float(loss) for loss in re.findall(r"lm loss (\S+)", said)])
    assert len(losses[0]) == 5 and abs(losses[0][0] - math.log(100)) < 0.1 and losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=2e-4) == losses[2]


def test_custom_loop_is_short():
    assert len((ROOT / "examples" / "custom_loop.py").read_text().splitlines()) <= 60


def noise_on_a_rank(world: World, argv: list[str], folder: str) -> tuple[list[torch.Tensor], float]:
    """All ranks' own gradients of each of two steps, and the noise scale that the example makes of them."""
    noise_scale = runpy.run_path(str(ROOT / "examples" / "noise_scale.py"))["NoiseScale"]
    run = set_up(world, argv, folder)
    own: list[torch.Tensor] = []
    run.buckets.before_reduce["test"] = lambda bucket: own.append(bucket.grads.double().clone())
    run.observers.insert(0, noise_scale(run))
    reporter = run.observer(Reporter)
    gradients = []
    for _ in range(2):
        step = reporter.launch(train.train_step)
        run.progress.iteration += 1
        reporter.report_previous(step)
        gradients.append(all_gather(torch.cat(own)[None], run.mesh.world))
        own.clear()
    reporter.report_previous()
    return gradients, step.numbers["noise_scale"]


def test_noise_scale_is_that_of_the_ranks_gradients(sources, tmp_path):  # noqa: F811
    """Of 4 samples on 2 ranks: from gradients of 2 and of 4 samples, the averages of two steps."""
    argv = arguments(sources, "gpt", "--global-batch-size 4 --train-iters 3")
    for gradients, noise in run_spmd(noise_on_a_rank, 2, argv, str(tmp_path)):
        signal = variance = 0.0
        for each in gradients:
            of_two = (2 * each).square().sum(1).mean()
            of_four = each.sum(0).square().sum()
            signal = 0.9 * signal + 0.1 * (4 * of_four - 2 * of_two) / 2
            variance = 0.9 * variance + 0.1 * (of_two - of_four) / (1 / 2 - 1 / 4)
        assert noise == pytest.approx((variance / signal).item(), rel=1e-4)

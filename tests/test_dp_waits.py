"""With --overlap-param-gather every module waits for its own parameters, before it reads them."""

import pytest

import train
from nanomegatron.mesh import World
from tests.training import arguments, set_up, sources  # noqa: F401


@pytest.mark.parametrize("fast", ["--no-fast-paths", "--fast-paths"])
def test_every_module_waits_for_its_own_parameters(fast, sources, tmp_path):  # noqa: F811
    """A bucket for each parameter, so that none is waited for by a neighbour: finish_grad_sync would tell."""
    flags = "--use-distributed-optimizer --overlap-param-gather --ddp-bucket-size 1 --hidden-dropout 0.1"
    flags = f"{flags} {fast}"
    run = set_up(World(), arguments(sources, "gpt", flags, "--train-iters 3"), tmp_path)
    assert len(run.buckets.all) == len(run.buckets.params)
    for _ in range(3):
        train.train_step(run)
        run.progress.iteration += 1

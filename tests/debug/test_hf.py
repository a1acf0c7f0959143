"""`nanomegatron debug --reference hf`: transformers' model is the reference of ours, module by module."""

import pytest

from nanomegatron.attention import SelfAttention
from nanomegatron.config.cli import parse
from nanomegatron.debug.run import SEEDS, first_difference, record_rank
from nanomegatron.faults.launch import launch
from nanomegatron.mesh import World
from tests.hf_models import Folders
from tests.spmd import start_fork_server

ATTENTION = "decoder.layers.0.self_attention"


def swapped(world: World, argv: list[str], folder, *more) -> int:
    """A rank that takes queries for keys."""
    usual = SelfAttention._queries_keys_values

    def exchanged(self, x, rotary):
        q, k, v = usual(self, x, rotary)
        return k, q, v

    SelfAttention._queries_keys_values = exchanged
    return record_rank(world, argv, folder, *more)


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.full), "llama"])
@pytest.mark.parametrize(
    "worker, module", [(record_rank, None), (swapped, "decoder.layers.0.self_attention")]
)
def test_transformers_is_a_reference(name, worker, module, tmp_path_factory):
    """Equal shapes of queries and keys, so that nothing but values separates them."""
    _, folder = Folders(tmp_path_factory)(name)
    flags = f"--load {folder} --seq-length 16 --global-batch-size 2 --mock-data --device cpu --train-iters 1"
    argv, out = flags.split(), tmp_path_factory.mktemp("hf")
    start_fork_server()
    assert launch(record_rank, 1, (argv, out / "a", SEEDS, str(folder)), threads=1) == [0]
    assert launch(worker, 2, ([*argv, "--tp", "2"], out / "b"), threads=1) == [0, 0]
    difference = first_difference(out, parse(argv).config)
    assert (difference and difference.module) == module, difference.describe()

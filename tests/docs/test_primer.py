"""docs/primer.md: its tables are of the package, and what its ranks hold adds up to the model."""

import pytest

from tools.primer_page import EXPERTS, LAYOUT, MODEL, main, ranks_of

EMBEDDING = 4096 * 192
NORMS = 192 * 9  # two in each of four layers, and the last


def test_the_page_is_current():
    assert main([]) == 0, "python tools/primer_page.py --write"


@pytest.mark.parametrize(
    "flags, world, more",
    [
        (MODEL, 1, 0),
        (f"{MODEL} {LAYOUT}", 8, EMBEDDING + NORMS),  # a copy for the output layer; norms on both tp ranks
        (f"{MODEL} --tp 2 --cp 2 --use-distributed-optimizer", 4, NORMS),
    ],
)
def test_each_value_is_updated_once(flags, world, more):
    model = EMBEDDING + NORMS + 4 * (4 * 192 * 192 + 3 * 512 * 192)
    ranks = ranks_of(flags, world)
    assert sum(rank.updated for rank in ranks) == model + more
    assert {layer for rank in ranks for layer in rank.layers} == {0, 1, 2, 3}


def test_experts_have_fewer_replicas():
    """Each of four ranks has half of the experts; it updates half of these, and a fourth of the rest."""
    ranks = ranks_of(f"{EXPERTS} --ep 2 --use-distributed-optimizer", 4)
    experts = 4 * 16 * 3 * 128 * 192
    rest = EMBEDDING + NORMS + 4 * (4 * 192 * 192 + 16 * 192)
    held = [sum(param.numel() for param in rank.model.parameters()) for rank in ranks]
    assert held == [rest + experts // 2] * 4
    assert sum(rank.updated for rank in ranks) == rest + experts

"""For all tests: two tiers, one thread, the same random numbers, the fork server that ranks start from.

make test         the fast tier: every idea, every planted bug (tools/mutations.py)
make test-full    everything: the tests marked `full`, which are more of the same, and longer runs
"""

from pathlib import Path

import pytest
import torch

from tests.spmd import start_fork_server
from tests.training import alone, sources

__all__ = ["alone", "sources"]  # fixtures of several files, made once

GONE = pytest.StashKey[list[str]]()  # what full_tier.txt lists and no file has


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the full tier: every layout and grid, longer runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list) -> None:
    """Tests in tests/gpu are skipped where there is no GPU; the fast tier leaves out those marked full.

    So does it with those of full_tier.txt; a run of the whole suite fails if one of these is gone.
    """
    listed = set((Path(__file__).parent / "full_tier.txt").read_text().splitlines()[1:])
    whole = config.args == config.getini("testpaths")
    config.stash[GONE] = sorted(listed - {item.nodeid for item in items}) if whole else []
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.full)
    gpu = [item for item in items if "gpu" in item.path.parent.parts]
    if gpu and not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """As in the ranks: sums are then taken in the same order, and test processes do not fight for cores."""
    torch.set_num_threads(1)
    start_fork_server()


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether this is the full tier, for tests that then take more steps."""
    return pytestconfig.getoption("--full")


@pytest.fixture
def gone_from_full_tier(pytestconfig: pytest.Config) -> list[str]:
    """What full_tier.txt lists and no file has; empty where not the whole suite is run."""
    return pytestconfig.stash[GONE]


@pytest.fixture(autouse=True)
def seed() -> None:
    """No test depends on which ran before; ranks start from the same seed."""
    torch.manual_seed(0)

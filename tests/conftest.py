"""For all tests: one thread, the same random numbers, and the fork server that ranks start from."""

import pytest
import torch

from tests.spmd import start_fork_server


def pytest_collection_modifyitems(items: list) -> None:
    """Tests in tests/gpu are skipped where there is no GPU."""
    gpu = [item for item in items if "gpu" in item.path.parent.parts]
    if gpu and not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """As in the ranks: sums are then taken in the same order, and test processes do not fight for cores."""
    torch.set_num_threads(1)
    start_fork_server()


@pytest.fixture(autouse=True)
def seed() -> None:
    """No test depends on which ran before; ranks start from the same seed."""
    torch.manual_seed(0)

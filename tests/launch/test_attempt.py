"""The name of a start: all ranks of it have the same one, whatever dead ranks have left in the store."""

import datetime
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from nanomegatron.launch.world import name_of_start

LONG, SHORT = datetime.timedelta(seconds=10), datetime.timedelta(seconds=0.1)


def test_every_start_has_a_name_of_its_own():
    """Ranks come late, and dead ones have left words: of a start that ended early, and of a whole one."""
    store, names = dist.HashStore(), []
    store.set("here/1", "of a rank that died in its start")
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(name_of_start, store, 0, 3, LONG)
            time.sleep(0.05)
            others = [pool.submit(name_of_start, store, rank, 3, LONG) for rank in (2, 1)]
            (name,) = {one.result() for one in (first, *others)}
        names.append(name)
    assert len(set(names)) == 3


def test_ranks_that_do_not_come_are_named():
    store = dist.HashStore()
    store.set("here/2", "of a dead rank")
    with pytest.raises(TimeoutError, match="2 ranks have not joined in .*, among them 1"):
        name_of_start(store, 0, 3, SHORT)

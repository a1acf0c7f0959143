"""What is released on purpose: GPU memory that torch caches, Python's circles of objects.

--empty-unused-memory-level 1: cached memory after forward and backward; 2: also after the update, before the
next step. Python's garbage collection, after the same steps on all ranks: --manual-gc, --manual-gc-interval.

    Python's own   rank 0    | step 1 | step 2 .. collect .. | step 3 | ...
                   rank 1    | step 1 | step 2     waits     | step 3 | ...
    --manual-gc    both      | step 1 | ... | step 50 | collect | step 51 | ...

Only objects that refer to each other in a circle need a collector. Python's runs when enough new objects have
been made, on each rank at a time of its own; through all that there are it takes 0.1 s with torch loaded, in
which the host launches nothing. What set-up made is not looked through again (`gc.freeze`). A training step
makes no such circles, which tests watch in every layout; a changed one may.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from nanomegatron.batch import Batch
from nanomegatron.config.settings import RunConfig
from nanomegatron.step import GlobalBatch, LocalNumbers, Observer


@contextmanager
def manual_gc(config: RunConfig) -> Iterator[Callable[[int], None]]:
    """Context manager for a loop of steps -> the function to call after each, with its iteration."""
    interval = config.manual_gc_interval
    if not config.manual_gc:
        yield lambda iteration: None
        return
    gc.freeze()
    gc.disable()
    try:
        yield lambda iteration: gc.collect() if interval and iteration % interval == 0 else None
    finally:
        gc.enable()
        gc.unfreeze()


class EmptyCache(Observer):
    """--empty-unused-memory-level: releases the GPU memory that torch caches."""

    def __init__(self, level: int) -> None:
        self.level = level

    def before_step(self, batch: GlobalBatch, microbatches: list[Batch]) -> None:
        if self.level >= 2:
            torch.cuda.empty_cache()

    def before_sync(self) -> LocalNumbers:
        if self.level >= 1:
            torch.cuda.empty_cache()
        return {}

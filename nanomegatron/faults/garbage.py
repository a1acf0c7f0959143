"""Python's garbage collection, after the same steps on all ranks: --manual-gc, --manual-gc-interval.

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

from nanomegatron.config.settings import RunConfig


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

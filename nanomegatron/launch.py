"""Start the ranks of one machine, for `--nproc` and for the tests; on a cluster torchrun does it.

    launcher  -->  fork server (has imported torch, has run no operation)  -->  rank 0, rank 1, ...

Ranks come from a fork server, so one starts in milliseconds, and no thread pool is ever forked: a rank forked
from a process that has computed with threads hangs. They rendezvous through a file in a temporary folder and
communicate over the loopback interface. If one fails the others are stopped, and none outlives the launcher.
If the system has no fork, each rank is a new interpreter, which takes seconds.
"""

import importlib
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from nanomegatron.mesh import World

GRACE = 10.0  # seconds that the other ranks have to exit once one has failed
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def launch(
    worker: Callable[..., int],
    nproc: int,
    args: tuple = (),
    timeout: float | None = None,
    threads: int | None = None,
    blame: Callable[[int, list[int], list[int]], None] | None = None,
    fine: tuple[int, ...] = (0,),
) -> list[int]:
    """Run `worker(world, *args)` in nproc processes of this machine and return their exit codes.

    `worker` is a module-level function that returns an exit code. GRACE seconds after a rank fails the others
    are killed; after `timeout` seconds all are. Signals of PASSED_ON are passed on to them: they get one that
    is sent to the process group, as Ctrl-C is, twice. Each computes with `threads` threads (its share of the
    cores). If a rank has failed, `blame(rank, codes, running)` gets the first one, all exit codes, and the
    ranks that had to be killed; codes in `fine` are no failure.
    """
    heard = passed_on()
    context = _context()
    threads = threads or max(1, (os.cpu_count() or 1) // nproc)
    with tempfile.TemporaryDirectory(prefix="nanomegatron-") as folder:
        places = [World(rank, nproc, rank, f"file://{folder}/store") for rank in range(nproc)]
        ranks = [
            context.Process(target=_run_rank, args=(worker, place, threads, heard, args), name=f"rank{i}")
            for i, place in enumerate(places)
        ]
        for process in ranks:
            process.start()

        def pass_on(number: int, _: Any) -> None:
            for process in ranks:
                if process.is_alive():
                    with suppress(ProcessLookupError):  # it has just ended
                        os.kill(process.pid, number)

        try:
            with _handlers(dict.fromkeys(heard, pass_on)):
                first = _wait(ranks, timeout, fine)
                running = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        finally:
            for process in ranks:  # all at once, or the last would still report that the first went away
                if process.is_alive():
                    process.kill()
            for process in ranks:
                process.join()
    codes = [process.exitcode for process in ranks]
    if blame and first is not None:
        blame(first, codes, running)
    return codes


def passed_on() -> list[int]:
    """Return the signals of PASSED_ON that are heard: not SIGHUP under nohup."""
    return [n for n in PASSED_ON if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def _context() -> multiprocessing.context.BaseContext:
    """Return the multiprocessing context: a fork server, or spawn if the system has no fork.

    The server ignores signals that the whole process group gets: it reports to the launcher how ranks end,
    and without it the launcher would take all of them for dead.
    """
    try:
        context = multiprocessing.get_context("forkserver")
        server = importlib.import_module("multiprocessing.forkserver")
    except (ValueError, ImportError):
        return multiprocessing.get_context("spawn")
    context.set_forkserver_preload(["__main__", "torch", "nanomegatron.launch"])
    with _handlers(dict.fromkeys(PASSED_ON, signal.SIG_IGN)):
        server.ensure_running()
    return context


@contextmanager
def _handlers(handlers: dict[int, Any]) -> Iterator[None]:
    """Install these signal handlers inside; does nothing outside the main thread."""
    main = threading.current_thread() is threading.main_thread()
    old = {number: signal.signal(number, handler) for number, handler in handlers.items() if main}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _run_rank(worker: Callable[..., int], place: World, threads: int, heard: list[int], args: tuple) -> None:
    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes from the launcher, too
        raise KeyboardInterrupt

    for number in heard:  # the server ignores them
        signal.signal(number, interrupt if number == signal.SIGINT else signal.SIG_DFL)
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()

    def leave_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)  # the launcher was killed: no rank may live on and write into the run's folder

    threading.Thread(target=leave_with_parent, daemon=True).start()
    sys.exit(worker(place, *args))


def _wait(ranks: list, timeout: float | None, fine: tuple[int, ...]) -> int | None:
    """Return when all ranks have ended, GRACE seconds after one has failed, or at the timeout.

    Returns the rank that failed first, or None. Of several at once it is one that a signal killed: the others
    may have failed because they lost it.
    """
    end, first = time.monotonic() + (timeout or math.inf), None
    while True:
        alive = [process.sentinel for process in ranks if process.is_alive()]
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode not in (None, *fine)]
        if first is None and failed:  # before the wait: it may have failed already
            first = min(failed, key=lambda rank: (ranks[rank].exitcode > 0, rank))
            end = min(end, time.monotonic() + GRACE)
        left = max(0.0, end - time.monotonic())
        if not alive or not multiprocessing.connection.wait(alive, None if left == math.inf else left):
            return first

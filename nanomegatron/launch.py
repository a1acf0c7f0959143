"""Starting the ranks of one machine, for `--nproc` and for the tests; on a cluster torchrun does it.

    launcher  -->  fork server (has imported torch, has run no operation)  -->  rank 0, rank 1, ...

Ranks come from a fork server, so one starts in milliseconds, and no thread pool is ever forked: a rank forked
from a process that has computed with threads hangs. They meet through a file in a temporary folder and talk
over the loopback interface. If one fails the others are stopped, and none outlives the launcher, which has
seen who failed first. Where the system has no fork, each rank is a new interpreter, which takes seconds.
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
from collections.abc import Callable
from typing import Any

import torch

from nanomegatron.mesh import World

GRACE = 10.0  # seconds for the other ranks to end by themselves once one has failed


def launch(
    worker: Callable[..., int],
    nproc: int,
    args: tuple = (),
    timeout: float | None = None,
    threads: int | None = None,
    blame: Callable[[int, list[int], str], None] | None = None,
    fine: tuple[int, ...] = (0,),
) -> list[int]:
    """Run `worker(world, *args)` in nproc processes of this machine and return their exit codes.

    `worker` is a module-level function that returns an exit code. The first rank to fail gets the others
    stopped; SIGTERM to this process is passed on; after `timeout` seconds all are killed. Each rank computes
    with `threads` threads (the cores, shared out). `blame(rank, codes, what)` hears at the end which failed
    first, and in words how; a rank that ends with one of the codes `fine` has not.
    """
    context = _context()
    threads = threads or max(1, (os.cpu_count() or 1) // nproc)
    with tempfile.TemporaryDirectory(prefix="nanomegatron-") as folder:
        places = [World(rank, nproc, rank, f"file://{folder}/store") for rank in range(nproc)]
        ranks = [
            context.Process(target=_run_rank, args=(worker, place, threads, args), name=f"rank{place.rank}")
            for place in places
        ]
        for process in ranks:
            process.start()
        passed_on = _pass_on_sigterm(ranks)
        try:
            first = _wait(ranks, timeout, fine)
            running = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        finally:
            passed_on()
            _stop(ranks)
    codes = [process.exitcode for process in ranks]
    if blame and first is not None:
        blame(first, codes, _end_of(first, codes[first], running))
    return codes


def _context() -> multiprocessing.context.BaseContext:
    """What starts processes: a fork server, where there is fork.

    The server ignores SIGTERM, which a scheduler sends to a whole process group: the launcher learns from it
    how ranks end, and would take all of them for dead without it.
    """
    try:
        context = multiprocessing.get_context("forkserver")
        server = importlib.import_module("multiprocessing.forkserver")
    except (ValueError, ImportError):
        return multiprocessing.get_context("spawn")
    context.set_forkserver_preload(["__main__", "torch", "nanomegatron.launch"])
    if threading.current_thread() is threading.main_thread():
        old = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            server.ensure_running()
        finally:
            signal.signal(signal.SIGTERM, old)
    return context


def _run_rank(worker: Callable[..., int], place: World, threads: int, args: tuple) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server ignores it
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()

    def leave_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)  # the launcher was killed: no rank may live on and write into the run's folder

    threading.Thread(target=leave_with_parent, daemon=True).start()
    sys.exit(worker(place, *args))


def _pass_on_sigterm(ranks: list) -> Callable[[], None]:
    """Send SIGTERM on to the ranks while they run; SIGINT reaches them from the terminal by itself."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def pass_on(*_: Any) -> None:
        for process in ranks:
            if process.is_alive():
                os.kill(process.pid, signal.SIGTERM)

    old = signal.signal(signal.SIGTERM, pass_on), signal.signal(signal.SIGINT, signal.SIG_IGN)
    return lambda: (signal.signal(signal.SIGTERM, old[0]), signal.signal(signal.SIGINT, old[1]))


def _wait(ranks: list, timeout: float | None, fine: tuple[int, ...]) -> int | None:
    """Return when all ranks have ended, GRACE seconds after one has failed, or at the timeout.

    The result is the first that failed. Of several at once it is one that a signal killed: the others may
    have ended because they lost it.
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


def _end_of(rank: int, code: int, running: list[int]) -> str:
    """How the first rank that failed ended, and which were still running behind it, if any."""
    signals = {number.value: number.name for number in signal.Signals}
    if code < 0:
        hint = " (out of memory? see dmesg)" if -code == signal.SIGKILL else ""
        ended = f"rank {rank} was killed by {signals.get(-code, f'signal {-code}')}{hint}"
    else:
        ended = f"rank {rank} was the first to end, with exit code {code}"
    if running:
        others = f"rank{'s' * (len(running) > 1)} {' '.join(map(str, running))}"
        return f"{ended}; {others} still ran {GRACE:.0f} s later and had to be stopped: look there for a hang"
    return f"{ended}; what other ranks say of a lost peer follows from it"


def _stop(ranks: list) -> None:
    for process in ranks:  # all at once, or the last would still report that the first went away
        if process.is_alive():
            process.kill()
    for process in ranks:
        process.join()

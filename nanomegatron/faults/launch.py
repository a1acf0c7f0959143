"""Start the ranks of one machine, for `--nproc` and for the tests; on a cluster torchrun does it.

    launcher  -->  fork server (has imported the program, has run no operation)  -->  rank 0, rank 1, ...

Ranks come from a fork server, so one starts in milliseconds, and no thread pool is ever forked: a rank forked
from a process that has computed with threads hangs. They rendezvous through a file in a temporary folder and
communicate over the loopback interface. If one fails the others are stopped, and none outlives the launcher.
A system without fork (none that has POSIX signals) runs only one rank.

A signal is never lost. Before there are ranks it ends the launcher; from then on the launcher notes it and
passes it on. The fork server blocks signals, and so do its ranks at first: a signal that comes
before a rank has its handlers waits in the kernel, and is delivered when the rank unblocks it.
"""

import importlib.util
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from multiprocessing import connection, reduction, resource_tracker
from pathlib import Path
from typing import Any

import torch

from nanomegatron.launch.world import threads_given
from nanomegatron.mesh import World

GRACE = 10.0  # seconds that ranks have to exit once one has failed, or after a second signal
SMALL = 10_000_000  # parameters of a model that one thread computes as fast as several
ECHO = 1.0  # seconds in which two signals count as one: from the launcher, and to the process group
UNSEEN = 255  # exit code of a rank whose own one is not known: the fork server was killed
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def launch(
    worker: Callable[..., int],
    nproc: int,
    args: tuple = (),
    timeout: float | None = None,
    threads: int | None = None,
    on_failure: Callable[[int, list[int], list[int]], None] | None = None,
    ok_codes: tuple[int, ...] = (0,),
    hold: bool = False,
) -> list[int]:
    """Run `worker(world, *args)` in nproc processes of this machine and return their exit codes.

    `worker` is a module-level function that returns an exit code. GRACE seconds after a rank fails the others
    are killed; after `timeout` seconds all are. Signals of PASSED_ON are passed on to them: they get one that
    is sent to the process group, as Ctrl-C is, twice. GRACE seconds after a second one those that are left
    are killed. hold: a rank gets no signal until the worker calls `take_signals`. Each computes with
    `threads` threads (OMP_NUM_THREADS, else its share of the cores). If a rank has failed,
    `on_failure(rank, codes, running)` gets the first one, all exit codes, and the ranks that had to be
    killed; codes in `ok_codes` are no failure.
    """
    worker = _by_real_name(worker)
    context = _context(worker)
    threads = threads or threads_given() or max(1, (os.cpu_count() or 1) // nproc)
    signals = passed_on()
    with tempfile.TemporaryDirectory(prefix="nanomegatron-") as folder, _noted(signals) as notes:
        places = [World(rank, nproc, rank, f"file://{folder}/store") for rank in range(nproc)]
        ranks = [
            context.Process(
                target=_run_rank, args=(worker, place, threads, signals, hold, args), name=f"rank{i}"
            )
            for i, place in enumerate(places)
        ]
        try:
            with _blocked(), _without_main(worker, args):
                for process in ranks:
                    process.start()
            first = _wait(ranks, timeout, ok_codes, notes)
            running = [rank for rank, process in enumerate(ranks) if process.is_alive()]
            if first is None and running:
                first = running[0]
        finally:
            begun = [process for process in ranks if process.pid is not None]
            for process in begun:  # all at once, or the last would still report that the first went away
                if process.is_alive():
                    process.kill()
            for process in begun:
                process.join()
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.close()  # a rank that still lives, since the fork server was killed, ends by that
    if on_failure and first is not None:
        on_failure(first, codes, running)
    return codes


def one_thread_if_small(parameters: int) -> None:
    """Let this process compute with one thread if its model is SMALL, unless OMP_NUM_THREADS is set.

    Several wait for each other in each operation, which takes many times as long where others use the cores.
    """
    if parameters <= SMALL and not threads_given():
        torch.set_num_threads(1)


def passed_on() -> list[int]:
    """Return the signals of PASSED_ON that are signals: not SIGHUP under nohup."""
    return [n for n in PASSED_ON if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def hold_signals() -> None:
    """Hold back the signals of PASSED_ON until `take_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)


def take_signals() -> None:
    """Let in the signals that this process has held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)


def start_fork_server(preload: list[str]) -> None:
    """Start the process that ranks are forked from, if there is none; it imports these modules.

    It blocks signals that the whole process group gets: it reports to the launcher how ranks end, and without
    it they would all seem dead. Raises ImportError if the system has none.
    """
    server = importlib.import_module("multiprocessing.forkserver")
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    with _blocked():
        resource_tracker.ensure_running()  # by itself: it unblocks some signals afterwards
    with _blocked():
        server.ensure_running()


def _context(worker: Callable[..., int]) -> multiprocessing.context.BaseContext:
    """Return the multiprocessing context, with a fork server that is ready.

    The server imports the worker's module, and with it all that ranks need.
    """
    context = multiprocessing.get_context("forkserver")
    with _chdir_to_sources(worker):
        start_fork_server(["nanomegatron.faults.launch", worker.__module__])
    ready = context.Process(target=int)  # a signal before it has started ends the launcher
    with _without_main(worker):
        ready.start()
    ready.join()
    return context


def _by_real_name(worker: Callable[..., int]) -> Callable[..., int]:
    """Return a worker of `__main__`, the program that was started, as a function of the module in its file.

    The fork server imports that by its name; `__main__` would run in every rank.
    """
    file = getattr(sys.modules["__main__"], "__file__", None)
    if worker.__module__ != "__main__" or file is None:
        return worker
    name = Path(file).resolve().stem
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != Path(file).resolve():
        return worker
    return getattr(importlib.import_module(name), worker.__name__)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _blocked() -> Iterator[None]:
    """Hold back the signals of PASSED_ON inside; a process that is started there does so from its start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _chdir_to_sources(worker: Callable[..., int]) -> Iterator[None]:
    """Go where the worker's module is imported from: the fork server finds modules in its own folder only."""
    file = getattr(sys.modules.get(worker.__module__), "__file__", None)
    if file is None or not _is_main_thread():
        yield
        return
    with chdir(Path(file).resolve().parents[worker.__module__.count(".")]):
        yield


@contextmanager
def _without_main(*given: Any) -> Iterator[None]:
    """Let what starts inside not run the file of `__main__` again, unless something given is of that file."""
    main = sys.modules["__main__"]
    try:
        if _is_main_thread():
            sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                reduction.ForkingPickler.dumps(given)
            except Exception:  # a function of `__main__` is not found in the empty module
                sys.modules["__main__"] = main
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _noted(numbers: list[int]) -> Iterator[list[int]]:
    """Note these signals inside: yields a list with a file descriptor that has a byte for each; or empty.

    Empty outside the main thread. What a handler does may come amid anything; a byte is read when it suits.
    """
    if not _is_main_thread():
        yield []
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield [reader]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def _run_rank(
    worker: Callable[..., int], place: World, threads: int, signals: list[int], hold: bool, args: tuple
) -> None:
    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes from the launcher, too
        raise KeyboardInterrupt

    for number in signals:
        signal.signal(number, interrupt if number == signal.SIGINT else signal.SIG_DFL)
    if not hold:
        take_signals()
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()

    def leave_with_parent() -> None:
        connection.wait([parent.sentinel])  # until the launcher was killed, or the fork server
        threading.Timer(1.0, os._exit, (1,)).start()  # no rank may live on and write into the run's folder
        for say in place.last_words:
            say()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    sys.exit(worker(place, *args))


def _wait(ranks: list, timeout: float | None, ok_codes: tuple[int, ...], notes: list[int]) -> int | None:
    """Pass on noted signals until all ranks have ended, GRACE seconds after a failure, or at the timeout.

    notes: as `_noted` yields it. Returns the rank that failed first, or None. Of several at once it is one
    that a signal killed: the others may have failed because they lost it.
    """
    end, first = time.monotonic() + (timeout or math.inf), None
    asked = math.inf  # when the first signal came
    while True:
        alive = [process for process in ranks if process.is_alive()]
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode not in (None, *ok_codes)]
        if first is None and failed:  # before the wait: it may have failed already
            first = min(failed, key=lambda rank: (ranks[rank].exitcode > 0, rank))
            end = min(end, time.monotonic() + GRACE)
        left = None if end == math.inf else max(0.0, end - time.monotonic())
        waited = [*notes, *(process.sentinel for process in alive)]
        if not alive or not (ready := connection.wait(waited, left)):
            return first
        noted = os.read(notes[0], 512) if notes and notes[0] in ready else b""
        for number in filter(PASSED_ON.__contains__, noted):
            asked = min(asked, time.monotonic())
            if time.monotonic() - asked > ECHO:
                end = min(end, time.monotonic() + GRACE)
            for process in alive:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(process.pid, number)

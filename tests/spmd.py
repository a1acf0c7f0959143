"""Tests that run on several ranks: the body of a test is what every rank does.

    @spmd(world=4, tp=2)
    def test_sum(mesh):                                  # tp 2, dp 2: built from these sizes
        total = all_reduce(torch.tensor([mesh.rank]), mesh.world)
        assert total.item() == 6

    sums = run_spmd(add_ranks, 4, "some", "arguments")   # a module-level function; results in rank order

A body whose first argument is called `world` gets the bare `World` instead and builds what it likes. The
other arguments come from pytest (parameters, fixtures) and travel to the ranks, so they must be picklable.

Ranks start from the fork server of `faults/launch.py` in milliseconds, meet through a file in a temporary
folder on the loopback interface (nothing to clash with), and compute with one thread. Each leaves its
result or its traceback in that folder; a rank still running at the timeout leaves its threads' stacks.
Where several ranks fail, the lowest speaks, unless all it can tell is that a peer went away. Of several
pytest processes at once one runs a test of four ranks or more, the others wait with theirs.
"""

import faulthandler
import fcntl
import functools
import importlib
import inspect
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from nanomegatron.config.settings import ParallelConfig
from nanomegatron.faults import launch as mesh_launch
from nanomegatron.faults.launch import launch
from nanomegatron.mesh import Mesh, World
from nanomegatron.report.traffic import Traffic

SHORT = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
# What a rank would import lazily, seconds each; torch.testing alone pulls 500 modules.
PRELOAD = ["torch", "torch.testing", "torch._dynamo", "pytest", "tests.spmd", "tests.training"]
MANY = 4  # ranks that take all of a small machine: two such tests at once only hold each other up
PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def spmd(world: int, timeout: float = 60, **parallel: Any) -> Callable:
    """Run the decorated test on `world` ranks of a mesh of these sizes (tp=2, or ParallelConfig's names)."""

    def decorate(body: Callable) -> Callable:
        signature = inspect.signature(body)

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            values = [arguments[name] for name in test.__signature__.parameters]
            run_spmd(test, world, *values, timeout=timeout, **parallel)

        # pytest looks for fixtures named like the arguments: the first is ours.
        test.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        return test

    return decorate


def run_spmd(body: Callable, world: int, *args: Any, timeout: float = 60, **parallel: Any) -> list:
    """What `body(mesh, *args)` returned on each rank; tensors, numbers, text and containers of them.

    Raises AssertionError with the traceback of the lowest rank that failed, or with the stacks of all ranks
    that were still running after `timeout` seconds.
    """
    start_fork_server()
    config = ParallelConfig(**{SHORT.get(name, name): value for name, value in parallel.items()})
    with tempfile.TemporaryDirectory(prefix="spmd-") as name:
        folder = Path(name)
        with one_at_a_time() if world >= MANY else nullcontext():
            call = (body.__module__, body.__qualname__, args, config, folder, time.time() + timeout)
            codes = launch(_rank, world, call, timeout=timeout + 1, threads=1)
        _raise_failure(folder, codes, timeout)
        results = [torch.load(folder / f"result{rank}", weights_only=True) for rank in range(world)]
    return results


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait until no other process of this user runs a test of many ranks."""
    with open(Path(tempfile.gettempdir()) / f"nanomegatron-tests-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def start_fork_server() -> None:
    """Start the process that ranks fork from, with the slow imports done; it lives as long as the tests."""
    mesh_launch.start_fork_server(PRELOAD)


def _rank(
    place: World, module: str, name: str, args: tuple, config: ParallelConfig, folder: Path, end: float
) -> int:
    """One rank: the body, found by name, and its outcome as a file."""
    with open(folder / f"stacks{place.rank}", "w") as stacks:
        faulthandler.dump_traceback_later(max(0.1, end - time.time()), file=stacks)
        try:
            torch.manual_seed(0)
            body = functools.reduce(getattr, name.split("."), importlib.import_module(module))
            body = inspect.unwrap(body)
            bare = next(iter(inspect.signature(body).parameters), "") == "world"
            first = place if bare else Mesh.build(config, place, torch.device("cpu"), observer=Traffic())
            torch.save(body(first, *args), folder / f"result{place.rank}")
            Mesh.close()
        except BaseException:  # SystemExit too: a rank that leaves early has failed
            (folder / f"error{place.rank}").write_text(traceback.format_exc())
            return 1
        finally:
            faulthandler.cancel_dump_traceback_later()
    return 0


def _raise_failure(folder: Path, codes: list[int], timeout: float) -> None:
    errors = {rank: folder / f"error{rank}" for rank in range(len(codes))}
    errors = {rank: path.read_text() for rank, path in errors.items() if path.exists()}
    if errors:
        rank = min(errors, key=lambda r: (any(text in errors[r] for text in PEER_GONE), r))
        raise AssertionError(f"rank {rank} of {len(codes)} failed (failed: {sorted(errors)})\n{errors[rank]}")
    if any(codes):
        failed = [rank for rank, code in enumerate(codes) if code]
        stacks = "".join(f"--- rank {rank}\n{(folder / f'stacks{rank}').read_text()}" for rank in failed)
        raise AssertionError(
            f"ranks {failed} of {len(codes)} left no result within {timeout} s "
            f"(exit codes {codes}; -9: killed at the timeout)\n{stacks}"
        )

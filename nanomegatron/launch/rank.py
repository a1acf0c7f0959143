"""What surrounds the work of one process: how it joins the run, works, and leaves.

join     settings -> mesh -> locks -> log, handlers of signals
work     watchdog -> set_up -> work
leave    close log and mesh -> exit code
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from nanomegatron import comm
from nanomegatron.config.cli import Parsed
from nanomegatron.config.early import print_errors
from nanomegatron.config.settings import Config
from nanomegatron.faults.exit import BAD_CONFIG, BAD_STEPS, DONE, report_failure
from nanomegatron.faults.history import is_done
from nanomegatron.faults.launch import hold_signals
from nanomegatron.faults.lock import claim
from nanomegatron.faults.signals import PREEMPTED, Preempted, Signals, preempted
from nanomegatron.faults.watchdog import Watchdog
from nanomegatron.mesh import Mesh, World, pick_device
from nanomegatron.report.layout import out_of_memory_advice
from nanomegatron.report.log import RunLog
from nanomegatron.report.plots import draw_pictures
from nanomegatron.report.traffic import Traffic
from nanomegatron.step import Training


@dataclass
class Joined:
    """What a process has when it has joined the run. locks: closed at its end, the watchdog's among them."""

    parsed: Parsed
    config: Config
    mesh: Mesh
    log: RunLog
    signals: Signals
    locks: ExitStack


def on_rank(
    world: World,
    argv: list[str],
    settings: Callable,
    set_up: Callable[..., Training],
    work: Callable[[Training], int],
) -> int:
    """Do everything that one process does; return its exit code.

    settings: (argv, world) -> the parsed command line and the configuration; set_up: (parsed, configuration,
    mesh, log, signals) -> the training, for which work returns the exit code.
    """
    try:
        joined = join(world, argv, settings)
    except ValueError as error:
        print_errors(error, world.rank)
        return BAD_CONFIG
    if joined is None:
        return DONE
    code = run_joined(joined, world, set_up, work)
    leave(joined, world, code)
    return code


def join(world: World, argv: list[str], settings: Callable) -> Joined | None:
    """Join the run; None: there is nothing left to do. Raises ValueError for bad settings."""
    parsed, config = settings(argv, world)
    device = pick_device(config.run.device, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = Mesh.build(config.parallel, world, device, config.model.num_kv_heads, Traffic())
    if is_done(config, mesh):
        Mesh.close()
        return None
    locks = claim(config, mesh, parsed.notes)
    hold_signals()  # from before status.json says "running" until there are handlers
    log = RunLog(config.run.folder, config, mesh.rank, mesh.label)
    signals = Signals(log, config.run.exit_on_preemption_file, locks)
    return Joined(parsed, config, mesh, log, signals, locks)


def run_joined(
    joined: Joined, world: World, set_up: Callable[..., Training], work: Callable[[Training], int]
) -> int:
    """Set up the training and do its work; return the exit code, also of a failure, which is reported."""
    mesh = joined.mesh
    log = joined.log
    run = None
    try:
        joined.locks.enter_context(Watchdog(joined.config, mesh, log, world))
        comm.barrier(mesh.world)  # status.json says that the run has begun before a rank reports a failure
        run = set_up(joined.parsed, joined.config, mesh, log, joined.signals)
        log.mark_latest()
        code = work(run)
        for loader in filter(None, run.data.loaders):
            loader.close()
        return code
    except Preempted as signalled:
        return preempted(log, str(signalled))
    except BaseException as error:
        if isinstance(error, torch.OutOfMemoryError):
            error.add_note(out_of_memory_advice(joined.config, mesh))
        code = report_failure(log, error, begun=run is not None)
        if code == BAD_STEPS:
            draw_pictures(log)
        return code


def leave(joined: Joined, world: World, code: int) -> None:
    """Close the log and the process groups; after a failure that other ranks do not have, exit here."""
    joined.log.close()
    if code == 1 or (code not in (DONE, PREEMPTED) and world.size > 1):
        os._exit(code)  # peers may wait in a collective for ever: leave without the exit handlers
    joined.locks.close()
    Mesh.close()

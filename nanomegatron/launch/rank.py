"""What surrounds the work of one process: settings, mesh, locks, log, signals, and how it ends.

settings -> mesh -> locks -> log, handlers of signals -> watchdog -> set_up -> work -> exit code
"""

import os
from collections.abc import Callable

import torch

from nanomegatron import comm
from nanomegatron.config.early import print_errors
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
        parsed, config = settings(argv, world)
        device = pick_device(config.run.device, world)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        mesh = Mesh.build(config.parallel, world, device, config.model.num_kv_heads, Traffic())
        if is_done(config, mesh):
            Mesh.close()
            return DONE
        locks = claim(config, mesh, parsed.notes)
        hold_signals()  # from before status.json says "running" until there are handlers
        log = RunLog(config.run.folder, config, mesh.rank, mesh.label)
        signals = Signals(log, config.run.exit_on_preemption_file, locks)
    except ValueError as error:
        print_errors(error, world.rank)
        return BAD_CONFIG
    run = None
    try:
        locks.enter_context(Watchdog(config, mesh, log, world))
        comm.barrier(mesh.world)  # status.json says that the run has begun before a rank reports a failure
        run = set_up(parsed, config, mesh, log, signals)
        log.mark_latest()
        code = work(run)
        for loader in filter(None, run.data.loaders):
            loader.close()
    except Preempted as signalled:
        code = preempted(log, str(signalled))
    except BaseException as error:
        if isinstance(error, torch.OutOfMemoryError):
            error.add_note(out_of_memory_advice(config, mesh))
        code = report_failure(log, error, begun=run is not None)
        if code == BAD_STEPS:
            draw_pictures(log)
    log.close()
    if code == 1 or (code not in (DONE, PREEMPTED) and world.size > 1):
        os._exit(code)  # peers may wait in a collective for ever: leave without the exit handlers
    locks.close()
    Mesh.close()
    return code

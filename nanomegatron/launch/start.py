"""Start a run: here, in processes of this machine (--nproc), or as one rank of torchrun's."""

import functools
from collections.abc import Callable

from nanomegatron.config.early import early_answer, print_errors
from nanomegatron.config.settings import Config
from nanomegatron.faults.exit import BAD_CONFIG, DONE, EXIT_CODES, name_culprit
from nanomegatron.faults.launch import launch
from nanomegatron.faults.refused import REFUSED, absent_folders, undo_start
from nanomegatron.faults.signals import PREEMPTED
from nanomegatron.mesh import World
from nanomegatron.report.status import read_status
from nanomegatron.report.writers import timestamp


def start_run(argv: list[str], settings: Callable, run_rank: Callable[[World, list[str]], int]) -> int:
    """Check all settings, then call run_rank here or in --nproc processes; return the exit code.

    settings: (argv, world) -> the parsed command line and the configuration. run_rank: of a module's top.
    """
    world = World.from_environment()
    if (answered := early_answer(argv)) is not None:
        return answered
    try:
        _, config = settings(argv, world)
    except ValueError as error:
        print_errors(error, world.rank)
        return BAD_CONFIG
    absent = absent_folders(config)
    earlier = read_status(config.run.folder / "status.json", lambda _: None)
    alone = (config.run.nproc or 1) == 1 or world.size > 1
    code = run_rank(world, argv) if alone else launch_ranks(config, argv, run_rank)
    if code in REFUSED and not world.rendezvous:  # torchrun's scripts read status.json
        undo_start(config, absent, earlier)
    return code


def launch_ranks(config: Config, argv: list[str], run_rank: Callable[[World, list[str]], int]) -> int:
    """Run in --nproc processes of this machine; return the exit code of the run."""
    blame = functools.partial(name_culprit, config.run.folder, timestamp())
    codes = launch(
        run_rank, config.run.nproc, (argv,), on_failure=blame, ok_codes=(DONE, PREEMPTED), hold=True
    )
    named = (code for code in EXIT_CODES if code in codes)
    return next(named, 1 if set(codes) - {DONE, PREEMPTED} else max(codes))

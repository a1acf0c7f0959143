"""Train a model: the whole run, in the order in which it happens.

    python train.py                                  a small model, Python's own sources as text
    python train.py --nproc 4 --tp 2                 the same on four processes of this machine
    python train.py --nproc 8 --config llama3-8b --data-path my_text_document
    python train.py --load FOLDER --eval-only        no training: the loss of a checkpoint

    main -> settings (all errors at once) -> run_rank on each process -> set_up -> train -> finish
                                                                          |
                                                     train_step: batches, forward, backward, sync, update

Exit codes: 0 done, 1 a failure with a traceback, 2 bad configuration or data, 3 no usable checkpoint, 4 save
failed, 16 bad steps at the end, 17 faulty machine, 75 pre-empted and saved. torchrun turns every failure into
1, so the code is also written to runs/NAME/status.json. One run at a time writes into a folder, which all
machines must see (faults/lock.py).

SIGTERM and Ctrl-C end a run at its next safe point, in set-up, training and evaluation (faults/signals.py).
An error in a log, the sample or a picture does not end the run (RunLog.attempt in report/log.py).
"""

import sys
from collections.abc import Sequence
from functools import partial

from nanomegatron.config.early import answer_without_torch

if __name__ == "__main__":
    answer_without_torch(sys.argv[1:])

import torch

from nanomegatron.build import build, build_executor, build_optimizer
from nanomegatron.checkpoint.resume import Checkpoints, load_checkpoint
from nanomegatron.checkpoint.source import with_saved_schedule
from nanomegatron.config.batch import samples_before
from nanomegatron.config.check import run_notes
from nanomegatron.config.cli import Parsed, to_toml
from nanomegatron.config.settings import Config, padded_vocab_size
from nanomegatron.debug.nan import stop_at_nan
from nanomegatron.faults.garbage import manual_gc
from nanomegatron.faults.health import Health
from nanomegatron.faults.history import check_history
from nanomegatron.faults.recovery import roll_back, validated_step
from nanomegatron.faults.replicas import check_replicas
from nanomegatron.faults.signals import NO_SIGNALS, Signals, Stops
from nanomegatron.launch.data import build_data
from nanomegatron.launch.ending import evaluate_only, finish
from nanomegatron.launch.observers import add_observers
from nanomegatron.launch.rank import on_rank
from nanomegatron.launch.settings import read_settings, with_processes
from nanomegatron.launch.start import start_run
from nanomegatron.lr_schedule import step_values
from nanomegatron.mesh import Mesh, World
from nanomegatron.param import Init
from nanomegatron.pick_fast_paths import install, paths_for
from nanomegatron.pick_variants import pick_schedules
from nanomegatron.report.banner import banner, buckets_text, check_memory, data_lines, paths_text
from nanomegatron.report.evaluate import evaluate
from nanomegatron.report.log import RunLog
from nanomegatron.report.profiler import Profile
from nanomegatron.report.steps import Reporter, StepReport
from nanomegatron.step import (
    Observer,
    Progress,
    Training,
    build_loaders,
    due,
    train_step,
    warm_up_step,
)
from preprocess import prepare_embedded

settings = partial(read_settings, embedded=prepare_embedded)


def main(argv: list[str]) -> int:
    """Check all settings, then run here or in --nproc processes of this machine; return the exit code."""
    return start_run(argv, settings, run_rank)


def run_rank(world: World, argv: list[str], observers: Sequence[type[Observer]] = ()) -> int:
    """Do everything that one process does; return its exit code. observers: as for `set_up`."""
    return on_rank(world, argv, settings, partial(set_up, observers=observers), train_or_evaluate)


def train_or_evaluate(run: Training) -> int:
    """Do the work of a run; return the exit code."""
    return evaluate_only(run) if run.config.run.eval_only else train(run)


def set_up(
    parsed: Parsed,
    config: Config,
    mesh: Mesh,
    log: RunLog,
    signals: Signals = NO_SIGNALS,
    observers: Sequence[type[Observer]] = (),
) -> Training:
    """Build data, model, optimizer, observers; load the newest checkpoint. Raises Preempted on a signal.

    observers: classes of further ones, each made of the training.
    """
    signals.check(mesh)
    profile = Profile(config.run, mesh, log)  # before anything takes memory
    deterministic = config.precision.deterministic_mode or mesh.device.type == "cpu"
    torch.set_deterministic_debug_mode("error" if deterministic else "default")  # imports no compiler
    if not config.run.eval_only:
        check_history(config, mesh, log)

    config = with_saved_schedule(config, mesh)
    progress = Progress(samples_before(config, mesh.dp.size))
    data = build_data(config, mesh, log, progress.samples_before[-1])
    signals.check(mesh)

    vocab_size = config.data.vocab_size or data.tokenizer.vocab_size
    padded = padded_vocab_size(vocab_size, config.data.make_vocab_size_divisible_by, mesh.tp.size)
    notes = [*parsed.notes, *run_notes(config), *check_memory(config, mesh, vocab_size)]
    paths = paths_for(config, mesh)
    for line in banner(config, mesh, vocab_size, padded, paths_text(paths, config, mesh), notes):
        log.line(line)
    for line in data_lines(config, data.datasets, progress.samples_before[-1], log.folder):
        log.line(line)

    init = Init(config.run.seed, getattr(torch, config.dtype_name), mesh.device)
    model = install(build(config, mesh, vocab_size, padded, init), paths)
    data.loaders = build_loaders(config, mesh, model, data.datasets, data.tokenizer.eod)
    if config.run.eval_only:
        run = Training(config, mesh, log, data, model, progress)
        run.observers.append(Stops(run, signals))
        load_checkpoint(run, None)
        signals.check(mesh)
        return run

    lr_table = step_values(pick_schedules(config, progress.samples_before), progress.samples_before)
    buckets, optimizer = build_optimizer(model, config, mesh, lr_table, paths)
    sharding = buckets_text(buckets)
    if sharding:
        log.line(f"dp      {sharding}")
    executor = build_executor(config, paths, model, buckets, log.line)
    run = Training(config, mesh, log, data, model, progress, buckets, optimizer)
    add_observers(run, profile, signals, observers)
    run.run_schedule = partial(executor, tracer=run.observer(Reporter).tracer)
    signals.check(mesh)
    load_checkpoint(run, run.observer(Health))
    if mesh.rank == 0:
        log.keep_settings(to_toml(config), progress.iteration)
    signals.check(mesh)
    return run


def train(run: Training) -> int:
    """Run all iterations; return the exit code. A step's numbers are read while the next one is in flight."""
    config = run.config.run
    progress = run.progress
    reporter = run.observer(Reporter)
    begin(run)
    with manual_gc(config) as collect:
        while progress.iteration < config.train_iters and not progress.stop:
            if progress.iteration + 1 in {*config.iterations_to_skip, *progress.skipped_iterations}:
                skip_step(run, reporter)
            else:
                step = launch_step(run, reporter)
                progress.iteration += 1
                reporter.report_previous(step)
            do_what_is_due(run, reporter)
            collect(progress.iteration)
    reporter.flush()
    run.log.end_interval()
    run.observer(Checkpoints).save_last()
    return finish(run)


def begin(run: Training) -> None:
    """Prepare the first step."""
    config = run.config.run
    progress = run.progress
    run.log.begin(progress.iteration, config.train_iters)
    run.observer(Checkpoints).saver.saved = progress.iteration
    if progress.iteration >= config.train_iters:
        run.log.line(f"nothing left to train: step {progress.iteration} is done; --train-iters goes further")
    elif run.mesh.device.type == "cuda" and run.mesh.pp.size > 1:
        warm_up_step(run)
    run.optimizer.cast_weights()
    if config.debug_nan:
        stop_at_nan(run.model, run.buckets, run.mesh)
    missed = progress.evaluated < progress.iteration < config.train_iters
    if missed and due(config.eval_interval, progress.iteration):
        evaluate(run, run.observer(Stops).now)  # it was due when a signal stopped the run


def launch_step(run: Training, reporter: Reporter) -> StepReport:
    """Launch a step; with --rerun-mode once more if its numbers are suspicious."""
    limits = run.observer(Health).step_limits(run.progress.iteration + 1)
    if run.config.faults.rerun_mode == "validate_results":
        return validated_step(run, partial(reporter.launch, train_step), limits)
    return reporter.launch(train_step, limits)


def skip_step(run: Training, reporter: Reporter) -> None:
    """Leave the samples of an iteration unread (--iterations-to-skip, or after a rollback)."""
    progress = run.progress
    consumed = progress.consumed_samples
    progress.iteration += 1
    reporter.report_previous()
    unread = progress.consumed_samples - consumed
    progress.skipped_samples += unread
    run.log.line(f"skipped step {progress.iteration}, {unread} samples unread")


def do_what_is_due(run: Training, reporter: Reporter) -> None:
    """After an iteration: check replicas, evaluate, save, stop, roll back to before a spike of the loss."""
    config = run.config.run
    progress = run.progress
    iteration = progress.iteration
    if due(config.check_replicas, iteration):
        reporter.flush()
        run.buckets.wait_params()
        check_replicas(run.model.parameters(), run.mesh, iteration)
    if due(config.exit_interval, iteration):
        progress.stop = f"--exit-interval {config.exit_interval}"
    if due(config.eval_interval, iteration) and iteration < config.train_iters:
        reporter.flush()
        evaluate(run, run.observer(Stops).now)
    run.observer(Checkpoints).save_if_due()
    if progress.stop or iteration == config.train_iters:
        reporter.flush()
    if run.observer(Health).spike is not None:
        roll_back(run)


if __name__ == "__main__":
    sys.exit(main(with_processes(sys.argv[1:])))

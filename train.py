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

import functools
import os
import shlex
import signal
import sys
from dataclasses import replace

from nanomegatron.config.early import early_answer, print_errors

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the import of torch would swallow a KeyboardInterrupt
if __name__ == "__main__" and (answered := early_answer(sys.argv[1:])) is not None:
    sys.exit(answered)  # without the time to import torch

import torch

from nanomegatron import comm
from nanomegatron.build import build, build_executor, build_optimizer, install, paths_for, pick_schedules
from nanomegatron.checkpoint.resume import load_checkpoint, new_saver, save_if_due, save_last
from nanomegatron.checkpoint.source import check_tokenizer, data_samples, with_saved_schedule
from nanomegatron.config.batch import samples_before
from nanomegatron.config.check import resolve, run_notes, validate
from nanomegatron.config.cli import ConfigError, Parsed, parse, to_toml
from nanomegatron.config.hf import is_hf_folder
from nanomegatron.config.megatron_args import megatron_folder
from nanomegatron.config.rules import spelled
from nanomegatron.config.run_folder import resumed, with_run_name
from nanomegatron.config.settings import Config, DataConfig, padded_vocab_size
from nanomegatron.data.gpt_dataset import build_datasets, choose_tokenizer
from nanomegatron.data.identity import data_identity
from nanomegatron.debug.nan import stop_at_nan
from nanomegatron.faults.exit import BAD_CONFIG, BAD_STEPS, DONE, EXIT_CODES, name_culprit, report_failure
from nanomegatron.faults.garbage import manual_gc
from nanomegatron.faults.health import Health
from nanomegatron.faults.history import check_history, is_done
from nanomegatron.faults.launch import hold_signals, launch
from nanomegatron.faults.lock import claim, settings_in
from nanomegatron.faults.recovery import roll_back, validated_step
from nanomegatron.faults.refused import REFUSED, absent_folders, undo_start
from nanomegatron.faults.signals import NO_SIGNALS, PREEMPTED, Preempted, Signals, preempted
from nanomegatron.faults.streak import Streak
from nanomegatron.faults.watchdog import Watchdog
from nanomegatron.generate import show_sample
from nanomegatron.lr_schedule import step_values
from nanomegatron.mesh import Mesh, World, pick_device
from nanomegatron.param import Init
from nanomegatron.plan.flops import parameter_count
from nanomegatron.report.banner import banner, buckets_text, check_memory, data_lines
from nanomegatron.report.evaluate import evaluate, evaluate_only
from nanomegatron.report.layout import chosen_layout, out_of_memory_advice
from nanomegatron.report.log import RunLog
from nanomegatron.report.plots import draw_pictures
from nanomegatron.report.profiler import Profile
from nanomegatron.report.status import read_status
from nanomegatron.report.steps import Reporter, StepReport
from nanomegatron.report.timers import Clock
from nanomegatron.report.writers import timestamp
from nanomegatron.router import move_expert_biases
from nanomegatron.run import Run, due
from nanomegatron.step import (
    build_loaders,
    empty_unused_memory,
    forward_step,
    step_batches,
    token_count,
    warm_up_step,
)
from preprocess import prepare_embedded

MOST_SHARED = 50_000_000  # parameters of a model that takes two processes by default: each keeps all of them

# Settings. Nothing here needs another process or a GPU.


def with_processes(argv: list[str]) -> list[str]:
    """Return a command line of train.py, with `--nproc 2` where it leaves that open and two are faster.

    They are for a small model on a CPU with several threads (docs/log.md), if the batch can be shared.
    """
    config = parse(argv).config
    on_cpu = config.run.device == "cpu" or not torch.cuda.is_available()
    chosen = config.run.nproc or World.from_environment().rendezvous  # by --nproc, or by torchrun
    if chosen or not on_cpu or torch.get_num_threads() < 2 or validate(config, 2, "cpu"):
        return argv
    size = parameter_count(resolve(config, 2).model, config.data.vocab_size or 0)
    return argv if size > MOST_SHARED else [*argv, "--nproc", "2"]


def main(argv: list[str]) -> int:
    """Check all settings, then run here or in --nproc processes of this machine; return the exit code."""
    world = World.from_environment()
    if (answered := early_answer(argv)) is not None:
        return answered
    try:
        _, config = settings(argv, world)
    except ValueError as error:
        print_errors(error, world.rank)
        return BAD_CONFIG
    absent, earlier = absent_folders(config), read_status(config.run.folder / "status.json", lambda _: None)
    alone = (config.run.nproc or 1) == 1 or world.size > 1
    code = run_rank(world, argv) if alone else launch_ranks(config, argv)
    if code in REFUSED and not world.rendezvous:  # torchrun's scripts read status.json
        undo_start(config, absent, earlier)
    return code


def launch_ranks(config: Config, argv: list[str]) -> int:
    """Run in --nproc processes of this machine; return the exit code of the run."""
    blame = functools.partial(name_culprit, config.run.folder, timestamp())
    codes = launch(
        run_rank, config.run.nproc, (argv,), on_failure=blame, ok_codes=(DONE, PREEMPTED), hold=True
    )
    named = (code for code in EXIT_CODES if code in codes)
    return next(named, 1 if set(codes) - {DONE, PREEMPTED} else max(codes))


def settings(argv: list[str], world: World) -> tuple[Parsed, Config]:
    """Return the parsed command line and the resolved configuration of the whole run.

    Raises ConfigError (a ValueError) that lists all errors at once.
    """
    parsed = parse(argv)
    config = parsed.config
    size = world.size if world.size > 1 else config.run.nproc or 1
    device = pick_device(config.run.device, world)
    fp8_on_gpu = config.precision.fp8_format and device.type == "cuda"
    gpu = torch.cuda.get_device_capability(device) if fp8_on_gpu else ()
    if config.parallel.auto_layout and not parsed.errors:
        with_data = replace(parsed, config=replace(config, data=with_text(parsed)))
        parsed = chosen_layout(with_data, size, device)
        config = parsed.config
    if errors := [*parsed.errors, *validate(config, size, device.type, gpu)]:
        raise ConfigError(errors)
    config = with_run_name(resolve(replace(config, data=with_text(parsed)), size), parsed)
    return parsed, resumed(config, parsed, settings_in(config.run.folder), size)


def with_text(parsed: Parsed) -> DataConfig:
    """Return the given data settings, or by default the embedded text; ConfigError if that cannot be used."""
    data, load = parsed.config.data, parsed.config.checkpoint.load
    if data.data_path or data.data_args_path or data.train_data_path or data.mock_data:
        return data
    if load and is_hf_folder(load):
        raise ConfigError(
            [
                f"--load {load}: give --data-path, data that nanomegatron preprocess made with "
                f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {load}"
            ]
        )
    if load and megatron_folder(load, parsed.config.checkpoint.ckpt_step):
        raise ConfigError([f"--load {load}: give --data-path, data made with the tokenizer of that model"])
    given = [
        spelled(name, value)
        for name, value in {"tokenizer_type": data.tokenizer_type, "split": data.split}.items()
        if value != getattr(DataConfig, name)
    ]
    if given:
        raise ConfigError(
            [f"{' '.join(given)}: give --data-path; the built-in text has a tokenizer and a split of its own"]
        )
    text = prepare_embedded()
    parsed.notes.append(
        "text: the Python standard library's own sources" + f"; {text.note}" * bool(text.note)
    )
    return replace(
        data,
        train_data_path=(text.train_prefix,),
        valid_data_path=(text.valid_prefix,),
        tokenizer_type=text.tokenizer_type,
        tokenizer_model=text.tokenizer_model,
    )


# One process of the run.


def run_rank(world: World, argv: list[str]) -> int:
    """Do everything that one process does; return its exit code."""
    try:
        parsed, config = settings(argv, world)
        device = pick_device(config.run.device, world)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        mesh = Mesh.build(config.parallel, world, device, config.model.num_kv_heads)
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
        code = evaluate_only(run) if config.run.eval_only else train(run)
        for loader in filter(None, run.loaders):
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


def set_up(parsed: Parsed, config: Config, mesh: Mesh, log: RunLog, signals: Signals = NO_SIGNALS) -> Run:
    """Build tokenizer, data, model, optimizer; load the newest checkpoint. Raises Preempted on a signal."""
    signals.check(mesh)
    profile = Profile(config.run, mesh, log)  # before anything takes memory
    deterministic = config.precision.deterministic_mode or mesh.device.type == "cpu"
    torch.set_deterministic_debug_mode("error" if deterministic else "default")  # imports no compiler
    if not config.run.eval_only:
        check_history(config, mesh, log)
    config = with_saved_schedule(config, mesh)
    data, before = config.data, samples_before(config, mesh.dp.size)
    tokenizer = choose_tokenizer(data)
    check_tokenizer(config, mesh, tokenizer)
    vocab_size = data.vocab_size or tokenizer.vocab_size
    if tokenizer.vocab_size > vocab_size:
        other = ", or data of the tokenizer that the model of --load has" if config.checkpoint.load else ""
        raise ValueError(
            f"--vocab-size {vocab_size}: the tokenizer has {tokenizer.vocab_size} tokens; "
            f"give at least that{other}"
        )
    held_out = config.run.eval_iters * data.global_batch_size
    asked = data_samples(config, mesh, log.warn, 0 if config.run.eval_only else before[-1])
    wanted = (asked[-1], held_out, held_out)
    datasets = build_datasets(data, wanted, config.run.seed, tokenizer, asked[:-1])
    if config.run.eval_only and not any(datasets[1:]):
        raise ConfigError(["--eval-only: no validation and no test data; see --split and --valid-data-path"])
    signals.check(mesh)
    padded = padded_vocab_size(vocab_size, data.make_vocab_size_divisible_by, mesh.tp.size)
    notes = [*parsed.notes, *run_notes(config), *check_memory(config, mesh, vocab_size)]
    paths = paths_for(config, mesh)
    for line in banner(config, mesh, vocab_size, padded, paths.describe(config, mesh), notes):
        log.line(line)
    for line in data_lines(config, datasets, before[-1], log.folder):
        log.line(line)
    init = Init(config.run.seed, getattr(torch, config.dtype_name), mesh.device)
    model = install(build(config, mesh, vocab_size, padded, init), paths)
    loaders = build_loaders(config, mesh, model, datasets, tokenizer.eod)
    grads = optimizer = reporter = health = None
    if not config.run.eval_only:
        grads, optimizer = build_optimizer(
            model, config, mesh, step_values(config, before, pick_schedules), paths
        )
        reporter = Reporter(config, mesh, log, model, grads)
        health = Health(config.faults, mesh, log, optimizer, Streak(config, mesh, log))
    parts = (config, mesh, log, tokenizer, datasets, loaders, model, grads, optimizer)
    known = data_identity(datasets) if mesh.rank == 0 else {}
    run = Run(*parts, before, asked, profile, reporter, health, signals, known)
    if grads:
        run.forward_backward = build_executor(config, paths, model, grads, log.line)
    if grads and (sharding := buckets_text(grads)):
        log.line(f"dp      {sharding}")
    run.saver = None if config.run.eval_only else new_saver(run)
    signals.check(mesh)
    load_checkpoint(run)
    if mesh.rank == 0 and not config.run.eval_only:
        log.keep_settings(to_toml(config), run.iteration)
    signals.check(mesh)
    return run


# Training.


def train(run: Run) -> int:
    """Run all iterations; return the exit code. A step's numbers are read while the next one is in flight."""
    config = run.config.run
    run.log.begin(run.iteration, config.train_iters)
    run.saver.saved = run.iteration
    if run.iteration >= config.train_iters:
        run.log.line(f"nothing left to train: step {run.iteration} is done; --train-iters goes further")
    elif run.model.on_gpu and run.mesh.pp.size > 1:
        warm_up_step(run)
    run.optimizer.cast_weights()
    if config.debug_nan:
        stop_at_nan(run.model, run.buckets, run.mesh)
    if run.evaluated < run.iteration < config.train_iters and due(config.eval_interval, run.iteration):
        evaluate(run)  # it was due when a signal stopped the run
    step = train_step
    if run.config.faults.rerun_mode == "validate_results":
        step = functools.partial(validated_step, train_step=train_step)
    with manual_gc(config) as collect:
        while run.iteration < config.train_iters and not run.stop:
            run.profile.step(run.iteration + 1)
            skip = run.iteration + 1 in {*config.iterations_to_skip, *run.skipped_iterations}
            previous, run.pending = run.pending, None if skip else step(run)
            consumed = run.consumed_samples
            run.iteration += 1
            run.report(previous)
            run.check_replicas()
            if skip:
                unread = run.consumed_samples - consumed
                run.skipped_samples += unread
                run.log.line(f"skipped step {run.iteration}, {unread} samples unread")
            if due(config.exit_interval, run.iteration):
                run.stop = f"--exit-interval {config.exit_interval}"
            if due(config.eval_interval, run.iteration) and run.iteration < config.train_iters:
                evaluate(run)
            save_if_due(run)
            if run.stop or run.iteration == config.train_iters:
                run.flush_report()
            if run.health.spike is not None:
                roll_back(run)
                run.stop = run.stop if run.preempted else ""  # its step is due again
            collect(run.iteration)
    run.flush_report()
    run.log.end_interval()
    run.profile.close()
    save_last(run)
    return finish(run)


def train_step(run: Run) -> StepReport:
    """Do one iteration: gradient of the mean loss over the global batch's unmasked tokens, and the update.

    Communicates the token count and the gradients over dp_cp; loss, stop flags, gradient norm, expert load
    and (if logged) counts of FP8 casts over world; parameters if they are sharded; besides, what the model
    and the pipeline communicate. The host does not wait.
    """
    mesh, config, data = run.mesh, run.config.run, run.config.data
    timers, tracer = run.reporter.timers, run.reporter.tracer
    fp8_stats, expert_load = run.reporter.fp8_stats, run.reporter.expert_load
    clock, batch = Clock(mesh.device), run.next_batch()
    run.health.set_limits(batch.iteration)
    torch.manual_seed(config.seed + 1_000_003 * run.iteration + mesh.rank)  # dropout of the fused kernels
    with timers("batch-generator", level=2):
        microbatches = list(step_batches(run, run.loaders[0], batch.first, batch.size))
    mesh.traffic.start_step(launching=mesh.device.type == "cuda")
    if expert_load:
        expert_load.begin()
    if counts_casts := due(config.log_fp8_stats, batch.iteration):
        run.buckets.wait_params()  # the weights, which are cast again to be counted
        fp8_stats.begin()
    run.buckets.zero_grad_buffer(len(microbatches))
    loss = torch.zeros((), device=mesh.device)
    step = forward_step(run, microbatches, token_count(run, microbatches), loss)
    tracer.begin(batch.iteration, run.model.plan(len(microbatches))[0], run.model.placed)
    with timers("forward-backward"):
        shape = run.model.shape(data.seq_length // mesh.cp.size, data.micro_batch_size)
        run.forward_backward(run.model, step, len(microbatches), shape, tracer=tracer)
    empty_unused_memory(run, level=1)
    with timers("all-grads-sync"):
        run.buckets.finish_grad_sync()
    local_loss = loss if run.model.is_loss_rank else torch.zeros_like(loss)  # counted once per dp_cp rank
    stop_flags = torch.tensor(run.stop_flags(), dtype=torch.float32, pin_memory=mesh.device.type == "cuda")
    shared = torch.cat((local_loss[None], stop_flags.to(mesh.device, non_blocking=True)))
    comm.all_reduce_(shared, mesh.world)
    run.saver.wait_copies()  # from here on the states change
    extras = {"num_zeros": run.optimizer.num_zeros()} if config.log_num_zeros_in_grad else {}
    if expert_load:
        table = extras["experts"] = expert_load.end(batch.tokens)
        if run.config.model.moe_router_enable_expert_bias:
            move_expert_biases(expert_load.routers, expert_load.own_kept_tokens(table))
    if counts_casts:
        extras["fp8"] = fp8_stats.end()
    with timers("optimizer"):
        if run.model.scales is not None:
            run.model.scales.end_step()
        stats = run.optimizer.step(shared[0], run.health.checks_states(batch.iteration))
    empty_unused_memory(run, level=2)
    if config.log_params_norm:
        extras["params_norm"] = run.optimizer.params_norm()
    report = StepReport(batch, shared, stats, extras, clock, timers.take(), mesh.traffic)
    tracer.end()  # after the step's clock has stopped: drawing takes a second
    for line in tracer.summary:
        run.log.line(f"trace   {line}")
    return report


# The end.


def finish(run: Run) -> int:
    """Evaluate at the end of training, log a sample and pictures, print the next command -> the exit code."""
    config, log = run.config, run.log
    run.signals.check_folders(run.mesh)
    if run.stop and not run.preempted:
        log.line(f"stopped by {run.stop} after step {run.iteration} of {config.run.train_iters}")
    if energy := run.reporter.energy.summary():
        log.line(f"energy  {energy}")
    if not run.stop or run.iteration == config.run.train_iters:
        evaluate(run, "validation")
        evaluate(run, "test")
    if run.preempted:
        where = "resumes from there"
        if run.saver.saved < run.iteration:
            where = f"resumes from step {run.saver.saved}: nothing is saved while steps are not finite"
        code = preempted(
            log,
            f"stopped by {run.stop} after step {run.iteration}; the same command {where}",
            iteration=run.iteration,
        )
        draw_pictures(log)  # the run is saved and its state is written, should a second signal come now
        return code
    draw_pictures(log)
    command = ""  # after mock data, which is no text
    if not config.data.mock_data:
        prompt = show_sample(run.model, run.tokenizer, run.datasets[1] or run.datasets[0], run.mesh, log)
        command = f"nanomegatron generate --load {shlex.quote(config.checkpoint.save)}"
        command += f" --prompt {shlex.quote(prompt)}" if prompt else ""
        log.line(f"next    {command}")
    log.status("stopped" if run.stop else "done", exit_code=DONE, iteration=run.iteration, next=command)
    return DONE


if __name__ == "__main__":
    sys.exit(main(with_processes(sys.argv[1:])))

"""The end of a run: the last evaluations, a sample, pictures, the next command, the exit code."""

import shlex

from nanomegatron.checkpoint.resume import Checkpoints
from nanomegatron.config.cli import to_toml
from nanomegatron.faults.exit import DONE
from nanomegatron.faults.signals import Stops, preempted
from nanomegatron.report.evaluate import evaluate
from nanomegatron.report.generate import show_sample
from nanomegatron.report.plots import draw_pictures
from nanomegatron.step import Training


def finish(run: Training) -> int:
    """Evaluate at the end of training, log a sample and pictures, print the next command -> the exit code."""
    config = run.config
    log = run.log
    progress = run.progress
    stops = run.observer(Stops)
    stops.signals.check_folders(run.mesh)
    if progress.stop and not progress.preempted:
        log.line(f"stopped by {progress.stop} after step {progress.iteration} of {config.run.train_iters}")
    for observer in run.observers:
        observer.end()
    if not progress.stop or progress.iteration == config.run.train_iters:
        evaluate(run, stops.now, "validation")
        evaluate(run, stops.now, "test")
    if progress.preempted:
        code = end_preempted(run)
        draw_pictures(log)  # the run is saved and its state is written, should a second signal come now
        return code
    draw_pictures(log)
    command = ""  # after mock data, which is no text
    if not config.data.mock_data:
        texts = run.data.datasets[1] or run.data.datasets[0]
        prompt = show_sample(run.model, run.data.tokenizer, texts, run.mesh, log)
        command = f"nanomegatron generate --load {shlex.quote(config.checkpoint.save)}"
        if prompt:
            command += f" --prompt {shlex.quote(prompt)}"
        log.line(f"next    {command}")
    log.status(
        "stopped" if progress.stop else "done", exit_code=DONE, iteration=progress.iteration, next=command
    )
    return DONE


def end_preempted(run: Training) -> int:
    """Say that a signal has ended the training, and from where it resumes -> the exit code."""
    progress = run.progress
    saved = run.observer(Checkpoints).saver.saved
    where = "resumes from there"
    if saved < progress.iteration:
        where = f"resumes from step {saved}: nothing is saved while steps are not finite"
    text = f"stopped by {progress.stop} after step {progress.iteration}; the same command {where}"
    return preempted(run.log, text, iteration=progress.iteration)


def evaluate_only(run: Training) -> int:
    """--eval-only: evaluate the loaded model on validation and test data -> the exit code."""
    if run.mesh.rank == 0:
        run.log.replace("eval.toml", to_toml(run.config))  # config.toml is of a run that trains here
    stops = run.observer(Stops)
    for split in ("validation", "test"):
        evaluate(run, stops.now, split)
    if run.progress.preempted:
        stops.signals.check_folders(run.mesh)
        return preempted(run.log, f"stopped by {run.progress.stop}; the same command starts again")
    run.log.status("done", exit_code=DONE, iteration=run.progress.iteration)
    return DONE

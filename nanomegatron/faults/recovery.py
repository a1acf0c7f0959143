"""What follows a suspicious step: the step once more, or a return to the last checkpoint.

--rerun-mode validate_results    The host waits for each step before it launches the next. The device has not
    updated anything in a step that is not finite or a spike (faults/health.py), so the same step can be run
    once more, from the same weights, samples and random numbers. On healthy machines it gives the same
    gradients to the bit. If a rank's own gradients differ, before any sum over replicas, its machine is
    faulty: exit code 17. If they are equal, settings or data are the cause: the run continues as without
    this mode.

--on-spike rollback    The run returns to its last checkpoint and later skips the samples of the spike and of
    the BEFORE steps before it, as PaLM did by hand (arXiv 2204.02311, section 5.1).
"""

import socket
from collections.abc import Callable

import torch

from nanomegatron.checkpoint.checkpoint import latest_for_all
from nanomegatron.checkpoint.resume import Checkpoints, load_checkpoint
from nanomegatron.comm import all_gather_text
from nanomegatron.faults.alive import small_state
from nanomegatron.faults.health import BadSteps, Health, MachineFault
from nanomegatron.optim import StepLimits
from nanomegatron.report.steps import Reporter, StepReport
from nanomegatron.step import Training

BEFORE = 7  # steps before a spike whose samples are skipped, too
MOST_ROLLBACKS = 3  # to the same checkpoint


def validated_step(
    run: Training, launch: Callable[[StepLimits], StepReport], limits: StepLimits
) -> StepReport:
    """Launch a step, and once more if its numbers are suspicious; the host waits for the step.

    Raises MachineFault on all ranks if a rank's own gradients differ. Gathers texts over world to know.
    """
    rewind, sums = small_state(run), []
    health = run.observer(Health)
    run.buckets.before_reduce["again"] = lambda bucket: (
        sums.append(  # of the bits, which differs if one value does
            bucket.grads.view(torch.int16).sum(dtype=torch.int64)
        )
    )
    first = launch(limits)
    numbers = first.judged()
    if not health.suspicious(numbers):
        return first
    before, iteration = sums.copy(), run.progress.iteration + 1
    sums.clear()
    rewind()
    if run.config.faults.on_spike == "warn":
        limits = limits._replace(loss_and_norm=None)  # a spike is updated this time
    second = launch(limits)
    second.read()  # waits
    same = [torch.equal(a, b) for a, b in zip(before, sums, strict=True)]
    text = "" if all(same) else f"{run.mesh.label} ({socket.gethostname()})"
    if faulty := [text for text in all_gather_text(text, run.mesh.world, run.mesh.device) if text]:
        raise MachineFault(
            f"step {iteration}: loss {numbers.loss}, gradient norm {numbers.grad_norm}; run again from the "
            f"same state it gave other gradients on {', '.join(faulty)}, so that machine is faulty. "
            "That step was not saved: run the same command without that machine"
        )
    run.log.line(
        f"step {iteration} again (loss {numbers.loss:.6g}, gradient norm {numbers.grad_norm:.6g}): "
        "the same to the bit on every rank, so not a fault of a machine"
    )
    return second


def roll_back(run: Training) -> None:
    """Return to the last checkpoint, and skip the samples around the spike from then on.

    Raises BadSteps, on all ranks, if there is no checkpoint, or after MOST_ROLLBACKS from the same one.
    """
    health = run.observer(Health)
    spike = health.spike
    progress = run.progress
    skipped = progress.skipped_iterations
    run.observer(Reporter).flush()
    run.observer(Checkpoints).saver.finish()
    folder = run.config.checkpoint.save
    newest = latest_for_all(folder, run.mesh)
    if newest is None:
        raise BadSteps(
            f"step {spike}: a spike, and no checkpoint to return to in {folder}: "
            "give --save-interval, or --on-spike skip"
        )
    progress.rollbacks[newest] += 1
    if progress.rollbacks[newest] > MOST_ROLLBACKS:
        raise BadSteps(f"step {spike}: a spike after {MOST_ROLLBACKS} returns to step {newest}; see --lr")
    load_checkpoint(run, health)
    around = range(max(newest, spike - BEFORE - 1) + 1, spike + 1)
    progress.skipped_iterations |= skipped | set(around)
    if not progress.preempted:
        progress.stop = ""  # a step that was to be the last is due again
    run.log.rewind(progress.iteration)
    run.log.warn(f"rolled back to step {newest}; the samples of steps {around[0]} to {spike} will be skipped")

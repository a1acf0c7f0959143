"""Whether weights are alive: a checkpoint of finite but dead ones is never published.

    step 11     loss 3.9, an update with a far too high --lr: weights of 1e36, all finite
    save        step 11 once more, with the new weights and without an update: loss nan, so nothing is saved

An update is judged only by the step that follows, and the backward may overflow where the loss is finite. So
before a save the last good step is repeated: its numbers were finite with the weights before. Afterwards all
is as it was, to the bit. It takes the time of a step without the update.
"""

import math
from collections.abc import Callable

import torch

from nanomegatron import comm
from nanomegatron.checkpoint.checkpoint import module_states
from nanomegatron.checkpoint.fp8_state import fp8_state, load_fp8_state
from nanomegatron.faults.health import Health
from nanomegatron.step import Training


def why_dead(run: Training, health: Health) -> str:
    """Return what is wrong with the weights; "" if they are alive. All ranks call this; the host waits."""
    finished = health.last_good or run.progress.iteration
    repeated = min(max(finished, 1), len(run.progress.samples_before) - 1)
    loss, norm = repeat_step(run, repeated)
    if math.isfinite(loss) and math.isfinite(norm):
        return ""
    return (
        f"with its weights, which are finite, step {repeated} has loss {loss}, gradient norm {norm}: "
        "an update has made them unusable (see --lr, --clip-grad)"
    )


def small_state(run: Training) -> Callable[[], None]:
    """Copy the small state that even a step without an update changes -> a function that restores it.

    That is FP8 scales, biases of routers and the loss scale. The parameters are not copied.
    """
    scales, scaler = run.model.scales, run.optimizer.scaler
    modules = {name: x.clone() for name, x in module_states(run.model).items()}
    fp8 = fp8_state(scales)
    numbers = scaler.scale, scaler.good_in_a_row, scaler.hysteresis_left  # replaced, not written to

    def restore() -> None:
        for name, x in module_states(run.model).items():
            x.copy_(modules[name])
        if scales is not None:
            load_fp8_state(scales, fp8)
        scaler.scale, scaler.good_in_a_row, scaler.hysteresis_left = numbers

    return restore


def repeat_step(run: Training, iteration: int) -> tuple[float, float]:
    """Return loss and gradient norm of an iteration's samples with the weights as they are; no update.

    The loss scale of fp16 is the smallest, with which healthy gradients do not overflow. Communicates as a
    step does.
    """
    now = run.progress.iteration
    restore = small_state(run)
    scaler = run.optimizer.scaler
    run.progress.iteration = iteration - 1
    if scaler.dynamic:
        scaler.scale = torch.full_like(scaler.scale, scaler.minimum)
    microbatches = run.read(run.next_global_batch())
    run.mesh.observer.start_step(launching=run.mesh.device.type == "cuda")
    run.buckets.zero_grad_buffer(len(microbatches))
    local = run.forward_backward(microbatches)
    run.buckets.finish_grad_sync()
    total = comm.all_reduce_(local, run.mesh.world)
    loss, norm = comm.read(torch.stack((total, run.optimizer.grad_norm())), run.mesh.world)
    run.mesh.observer.end_step()
    run.progress.iteration = now
    restore()
    run.optimizer.cast_weights()
    return loss, norm

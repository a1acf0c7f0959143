"""The mean loss of a model over held-out data: the same samples every time."""

from collections.abc import Callable

import torch

from nanomegatron import comm
from nanomegatron.batch import Batch
from nanomegatron.model import GPTModel
from nanomegatron.plan.flops import bits_per_byte
from nanomegatron.pp import run_schedule
from nanomegatron.step import Training


def add_losses(total: torch.Tensor, chunk: GPTModel, batch: Batch) -> torch.Tensor:
    """Run a microbatch; the last stage adds the sum of its losses and its tokens to total `[2]`."""
    output = chunk(batch, batch.labels)
    if chunk.post_process:
        total.add_(torch.stack(((output * batch.loss_mask).sum(), batch.loss_mask.sum())))
    return output


@torch.no_grad()
def evaluate(run: Training, stopped: Callable[[], bool], split: str = "validation") -> None:
    """Log the mean loss over the first --eval-iters global batches of held-out data, the same every time.

    No step may be in flight. stopped: on all ranks, whether the training ends for a signal; before each batch
    it is asked, and if so no loss is logged: the run that resumes evaluates first.
    """
    config = run.config
    which = ("train", "validation", "test").index(split)
    loader = run.data.loaders[which]
    if loader is None or run.progress.preempted:
        return
    total = torch.zeros(2, dtype=torch.float64, device=run.mesh.device)
    batch_size = config.data.global_batch_size
    iteration = run.progress.iteration
    for n in run.log.progress(f"{split} at step {iteration}", config.run.eval_iters):
        batches = loader.batches(n * batch_size, batch_size)
        if stopped():
            run.log.line(f"{split} at step {iteration}: given up after {n} batches")
            return
        run.mesh.observer.start_step(launching=run.mesh.device.type == "cuda")
        run_schedule(
            run.model,
            lambda chunk, i, batches=batches: add_losses(total, chunk, batches[i]),
            len(batches),
            run.message_shape,
            forward_only=True,
        )
        run.mesh.observer.end_step()
        if config.run.empty_unused_memory_level >= 1:
            torch.cuda.empty_cache()
    loss, tokens = comm.read(
        comm.all_reduce_(total if run.model.is_loss_rank else torch.zeros_like(total), run.mesh.world),
        run.mesh.world,
    )
    loss = loss / max(tokens, 1)
    length = run.data.datasets[which].bytes_per_token()
    bpb = None if length is None else bits_per_byte(loss, 1, length)
    run.log.evaluation(iteration, split, loss, bpb, run.progress.consumed_samples, config.run.eval_iters)
    run.progress.evaluated = iteration

"""The mean loss of a model over held-out data: the same samples every time."""

import torch

from nanomegatron import comm
from nanomegatron.batch import Batch
from nanomegatron.config.cli import to_toml
from nanomegatron.faults.exit import DONE
from nanomegatron.faults.signals import preempted
from nanomegatron.model import GPTModel
from nanomegatron.plan.flops import bits_per_byte
from nanomegatron.pp import execute
from nanomegatron.run import Run
from nanomegatron.step import empty_unused_memory, forward_microbatch, step_batches


@torch.no_grad()
def evaluate(run: Run, split: str = "validation") -> None:
    """Log the mean loss over the first --eval-iters global batches of held-out data, the same every time.

    After a signal on any rank it returns before the next batch and logs no loss; the caller ends the run, and
    the one that resumes evaluates first.
    """
    run.flush_report()
    config = run.config
    which = ("train", "validation", "test").index(split)
    if (loader := run.loaders[which]) is None or run.preempted:
        return
    total = torch.zeros(2, dtype=torch.float64, device=run.mesh.device)
    batch_size = config.data.global_batch_size
    shape = run.model.shape(config.data.seq_length // run.mesh.cp.size, config.data.micro_batch_size)
    for n in run.log.progress(f"{split} at step {run.iteration}", config.run.eval_iters):
        batches = list(step_batches(run, loader, n * batch_size, batch_size))
        if run.ends_by_signal():
            run.log.line(f"{split} at step {run.iteration}: given up after {n} batches")
            return

        def step(chunk: GPTModel, i: int, batches: list[Batch] = batches) -> torch.Tensor:
            output = forward_microbatch(chunk, batches[i])
            mask = batches[i].loss_mask
            if chunk.post_process:
                total.add_(torch.stack(((output * mask).sum(), mask.sum())))
            return output

        run.mesh.traffic.start_step(launching=run.mesh.device.type == "cuda")
        execute(run.model, step, len(batches), shape, forward_only=True)
        run.mesh.traffic.end_step()
        empty_unused_memory(run, level=1)
    loss, tokens = comm.read(
        comm.all_reduce_(total if run.model.is_loss_rank else torch.zeros_like(total), run.mesh.world),
        run.mesh.world,
    )
    loss = loss / max(tokens, 1)
    length = run.datasets[which].bytes_per_token()
    bpb = None if length is None else bits_per_byte(loss, 1, length)
    run.log.evaluation(run.iteration, split, loss, bpb, run.consumed_samples, config.run.eval_iters)
    run.evaluated = run.iteration


def evaluate_only(run: Run) -> int:
    """--eval-only: evaluate the loaded model on validation and test data; return the exit code."""
    if run.mesh.rank == 0:
        run.log.replace("eval.toml", to_toml(run.config))  # config.toml is of a run that trains here
    for split in ("validation", "test"):
        evaluate(run, split)
    if run.preempted:
        run.signals.check_folders(run.mesh)
        return preempted(run.log, f"stopped by {run.stop}; the same command starts again")
    run.log.status("done", exit_code=DONE, iteration=run.iteration)
    return DONE

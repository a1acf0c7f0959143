"""The parts of an iteration: this rank's microbatches, and the loss on the last pipeline stage.

Tests: tests/test_train.py. Page: docs/life-of-a-step.md.

    global batch of an iteration, in the order of the data
        microbatch 0            microbatch 1            ...
        dp 0 | dp 1 | ...       dp 0 | dp 1 | ...               each dp rank reads its own part

The loss is the mean over the unmasked tokens of the whole global batch, however they are spread over the
microbatches: each token's loss is weighted by mask / tokens, with the tokens of dp x cp counted beforehand.
Packs of documents are another kind of microbatch; ranks may have different numbers (data/packed_dataset.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from nanomegatron import comm
from nanomegatron.batch import Batch
from nanomegatron.build import batch_sharding
from nanomegatron.config.settings import Config
from nanomegatron.data.loader import BatchLoader
from nanomegatron.data.packed_dataset import PackLoader
from nanomegatron.mesh import Mesh
from nanomegatron.model import GPTModel
from nanomegatron.pp import ModelChunks, warm_up
from nanomegatron.run import Run


def build_loaders(config: Config, mesh: Mesh, model: ModelChunks, datasets: tuple, eod: int) -> tuple:
    """Make the loader of this rank's microbatches for each dataset; None stays None. config: resolved."""
    shard = batch_sharding(config)
    if config.data.variable_seq_lengths:
        vocab = model[0].padded_vocab_size
        return tuple(d and PackLoader(d, config, eod, mesh, vocab, shard) for d in datasets)
    sharing = (mesh.device, model.reads_tokens, partial(shard, axis=mesh.cp))
    return tuple(d and BatchLoader(d, config.data, eod, mesh.dp, *sharing) for d in datasets)


def step_batches(
    run: Run, loader: BatchLoader | PackLoader, first_sample: int, batch_size: int
) -> Iterator[Batch]:
    """Yield this rank's microbatches of the global batch that begins at `first_sample`, on the device."""
    if isinstance(loader, PackLoader):
        yield from loader.batches(first_sample, batch_size)
        return
    for sample in range(0, batch_size, run.config.data.micro_batch_size * run.mesh.dp.size):
        yield loader.get(first_sample + sample)


def forward_microbatch(
    chunk: GPTModel,
    batch: Batch,
    weights: torch.Tensor | None = None,
    dropout_seed: int | None = None,
    aux_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a chunk: the last stage's loss of each token, fp32, or activations -> `[b, s]` or `[s, b, h]`

    weights `[b, s]`: by which the caller multiplies the losses; aux_scale `[]`: that of router losses.
    """
    batch = replace(batch, dropout_seed=dropout_seed, loss_weights=weights, aux_scale=aux_scale)
    return chunk(batch, batch.labels)


def token_count(run: Run, batches: list[Batch]) -> torch.Tensor | None:
    """Count the global batch's unmasked tokens, all-reduced over dp_cp -> int64 `[]` on the last stage"""
    if not run.model.has_loss:
        return None
    local = sum(batch.loss_mask.sum(dtype=torch.int64) for batch in batches)
    return comm.all_reduce_(local, run.mesh.dp_cp).clamp(min=1)


@dataclass
class ForwardStep:
    """What `pp.execute` runs in training: chunk, microbatch i -> its loss `[]`, or activations `[s, b, h]`

    The last stage adds the loss to total `[]`. scale `[]`: of the losses; tokens `[]`: the result of
    `token_count`; aux_scale `[]`: as in `Batch`.
    """

    batches: list[Batch]
    seed: int
    scale: torch.Tensor
    tokens: torch.Tensor | None
    total: torch.Tensor
    aux_scale: torch.Tensor | None = None

    def __call__(self, chunk: GPTModel, i: int) -> torch.Tensor:
        batch = self.batches[i]
        if not chunk.post_process:
            return forward_microbatch(chunk, batch, None, self.seed, self.aux_scale)
        weights = batch.loss_mask * (self.scale / self.tokens)
        loss = forward_microbatch(chunk, batch, weights, self.seed, self.aux_scale)
        self.total.add_((loss.detach() * batch.loss_mask).sum() / self.tokens)
        return (loss * weights).sum()


def forward_step(
    run: Run, batches: list[Batch], tokens: torch.Tensor | None, total: torch.Tensor
) -> ForwardStep:
    """Return the function that `pp.execute` runs on these microbatches.

    The last stage adds the loss to total `[]`. tokens `[]`: the result of `token_count`.
    """
    scale = run.optimizer.scaler.scale * run.buckets.grad_scale
    aux_scale = None  # routers' losses: the mean over all tokens
    if run.config.model.num_experts is not None:
        aux_scale = scale / run.next_batch().tokens
    return ForwardStep(batches, run.config.run.seed, scale, tokens, total, aux_scale)


def empty_unused_memory(run: Run, level: int) -> None:
    """Release the GPU memory that torch caches if --empty-unused-memory-level is at least `level`."""
    if run.config.run.empty_unused_memory_level >= level:
        torch.cuda.empty_cache()


def warm_up_step(run: Run) -> None:
    """Run a microbatch through each chunk without messages, and discard its gradients. See pp.warm_up."""
    data = run.config.data
    batches = [run.loaders[0].get(run.consumed_samples)]
    total = torch.zeros((), device=run.mesh.device)
    run.buckets.zero_grad_buffer(1)
    step = forward_step(run, batches, token_count(run, batches), total)
    warm_up(run.model, step, run.model.shape(data.seq_length // run.mesh.cp.size, data.micro_batch_size))
    run.buckets.finish_grad_sync()
    if run.model.scales is not None:
        run.model.scales.discard_step()

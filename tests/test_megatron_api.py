"""megatron_api.forward_backward, with forward steps as those for Megatron's get_forward_backward_func()."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nanomegatron.config.settings import ParallelConfig
from nanomegatron.cp import shard_batch
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.megatron_api import forward_backward
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from nanomegatron.pp import ModelChunks
from tests.spmd import run_spmd
from tests.test_pp import (
    LAYOUTS,
    LENGTH,
    LLAMA,
    MICRO,
    PADDED,
    VOCAB,
    M,
    config_of,
    microbatch,
    some,
    stages_of,
)


def megatron_step(iterator, chunk):
    """A forward step as Megatron's users write it."""
    batch, labels = next(iterator)
    output = chunk(batch, labels)

    def loss_func(losses: torch.Tensor):
        return losses.sum(), torch.tensor(losses.numel()), {"lm loss": losses.sum().item()}

    return output, loss_func


def with_forward_backward(mesh, schedule: dict) -> list[dict]:
    return [megatron_run(mesh, schedule, forward_only) for forward_only in (False, True)]


def megatron_run(mesh, schedule: dict, forward_only: bool) -> dict:
    stages = stages_of(mesh, LLAMA, schedule)
    iterators = [map(microbatch, range(M)) for _ in stages]
    reports = forward_backward(
        forward_step_func=megatron_step,
        data_iterator=iterators if len(stages) > 1 else iterators[0],
        model=stages,
        num_microbatches=M,
        seq_length=LENGTH,
        micro_batch_size=MICRO,
        forward_only=forward_only,
    )
    grads = {
        s.name: s.local_view(p.grad) for p in stages.parameters() if p.grad is not None for s in p.spec.parts
    }
    return {"losses": [r["lm loss"] for r in reports], "grads": grads}


@pytest.mark.parametrize("schedule", some(LAYOUTS, "1f1b", "in groups", "zb-v"))
def test_forward_backward_is_megatrons(schedule):
    """The mean over tokens and microbatches; what the loss function reports comes from the last stage."""
    sizes = dict(vocab_size=VOCAB, max_sequence_length=LENGTH, padded_vocab_size=PADDED)
    model = GPTModel(config_of(LLAMA, ParallelConfig()).model, init=Init(seed=5), **sizes)
    losses = [model(*microbatch(i)) for i in range(M)]
    (sum(loss.mean() for loss in losses) / M).backward()
    each = run_spmd(with_forward_backward, 2, LAYOUTS[schedule], pp=2, **LAYOUTS[schedule])
    ranks, without = zip(*each, strict=True)
    last = 0 if schedule == "zb-v" else 1
    torch.testing.assert_close(ranks[last]["losses"], [loss.sum().item() for loss in losses])
    assert ranks[1 - last]["losses"] == []
    found = {name: grad for rank in ranks for name, grad in rank["grads"].items()}
    for param in model.parameters():
        for part in param.spec.parts:
            torch.testing.assert_close(found[part.name], part.local_view(param.grad), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(without[last]["losses"], [loss.sum().item() for loss in losses])
    assert not without[0]["grads"] and not without[1]["grads"]


def mean_step(iterator, chunk):
    """The older form: the loss is a mean already."""
    batch, labels = next(iterator)
    return chunk(batch, labels), lambda losses: (losses.mean(), {})


def summed_over_dp(mesh, forward_step, average: bool) -> dict[str, torch.Tensor]:
    """Gradients of which each dp rank made those of every second microbatch."""
    stages = stages_of(mesh, LLAMA, {})
    buckets = ParamAndGradBuckets(stages, ParallelConfig(ddp_average_in_collective=average), mesh)
    buckets.zero_grad_buffer(M // 2)
    forward_backward(
        forward_step_func=forward_step,
        data_iterator=map(microbatch, range(mesh.dp.rank, M, 2)),
        model=stages,
        num_microbatches=M // 2,
        seq_length=LENGTH,
        micro_batch_size=MICRO,
    )
    buckets.finish_grad_sync()
    return {param.spec.name: param.main_grad for param in stages.parameters()}


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("forward_step", [megatron_step, mean_step])
def test_gradients_are_the_mean_over_dp(forward_step, average):
    """Megatron's DistributedDataParallel divides by the ranks of dp x cp; a forward step does not."""
    sizes = dict(vocab_size=VOCAB, max_sequence_length=LENGTH, padded_vocab_size=PADDED)
    model = GPTModel(config_of(LLAMA, ParallelConfig()).model, init=Init(seed=5, std=0.1), **sizes)
    (sum(model(*microbatch(i)).mean() for i in range(M)) / M).backward()
    for found in run_spmd(summed_over_dp, 2, forward_step, average):
        for param in model.parameters():
            torch.testing.assert_close(found[param.spec.name], param.grad, rtol=1e-4, atol=1e-7)


def under_cp(mesh) -> list[float]:
    """The loss of each microbatch, of this rank's half of the tokens."""
    stages = stages_of(mesh, LLAMA, LAYOUTS["1f1b"])

    def half(i: int):
        batch, labels = microbatch(i)
        batch = shard_batch(replace(batch, labels=labels), mesh.cp, ["p2p"] * 8, mesh.device)
        return batch, batch.labels

    reports = forward_backward(
        forward_step_func=megatron_step,
        data_iterator=map(half, range(M)),
        model=stages,
        num_microbatches=M,
        seq_length=LENGTH,
        micro_batch_size=MICRO,
    )
    return [r["lm loss"] for r in reports]


def test_forward_backward_takes_the_length_of_whole_rows():
    """Under context parallelism too, as Megatron's does: messages have the tokens of a rank."""
    sizes = dict(vocab_size=VOCAB, max_sequence_length=LENGTH, padded_vocab_size=PADDED)
    model = GPTModel(config_of(LLAMA, ParallelConfig()).model, init=Init(seed=5), **sizes)
    expected = [model(*microbatch(i)).sum().item() for i in range(M)]
    *_, first, second = sorted(run_spmd(under_cp, 4, pp=2, cp=2), key=len)
    np.testing.assert_allclose(np.add(first, second), expected, rtol=1e-5)


def test_forward_backward_wants_an_iterator_for_each_chunk():
    chunks = [GPTModel(config_of(LLAMA, ParallelConfig()).model, vocab_size=VOCAB, max_sequence_length=16)]
    stages = ModelChunks(chunks * 2, name="gpipe")
    with pytest.raises(ValueError, match="one for each of the 2 chunks"):
        forward_backward(
            forward_step_func=megatron_step,
            data_iterator=iter([]),
            model=stages,
            num_microbatches=1,
            seq_length=16,
            micro_batch_size=1,
        )

"""A training and its step: batches, forward and backward, gradients summed, update.

Tests: tests/test_step.py. Page: docs/life-of-a-step.md.

    global batch of an iteration, in the order of the data
        microbatch 0            microbatch 1            ...
        dp 0 | dp 1 | ...       dp 0 | dp 1 | ...               each dp rank reads its own part

The loss is the mean over the unmasked tokens of the whole global batch, however they are spread over the
microbatches: each token's loss is weighted by mask / tokens, with the tokens of dp x cp counted beforehand.
Packs of documents are another kind of microbatch; ranks may have different numbers (`variants/`).

What only looks on (log, timers, trace, statistics, health) is an `Observer`:

    next_batches                 read this rank's microbatches
                                                                    before_step
    forward_backward             the loss and this rank's gradients
                                                                    before_sync -> numbers of this rank
    finish_grad_sync             gradients summed over replicas
                                                                    before_update -> numbers of all ranks
    sum_over_world               one all-reduce, of the loss and of what before_sync returned
    end_step, Optimizer.step     move scales, expert biases, parameters
                                                                    after_step, a step later; end
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from nanomegatron import comm
from nanomegatron.batch import Batch
from nanomegatron.config.settings import Config
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.mesh import Mesh
from nanomegatron.model import GPTModel
from nanomegatron.optim import NO_LIMITS, Optimizer, StepLimits
from nanomegatron.pick_variants import build_loader
from nanomegatron.pp import ModelChunks, run_schedule, warm_up

Numbers = dict[str, torch.Tensor]  # on the device, by name; the same on every rank
LocalNumbers = dict[str, torch.Tensor | float]  # of this rank: 0-d tensors on the device, or floats
Kind = TypeVar("Kind")


def train_step(run: "Training", limits: StepLimits = NO_LIMITS) -> Numbers:
    """Do one iteration: gradient of the mean loss over the global batch's unmasked tokens, and the update.

    limits: beyond which nothing is updated. Communicates the token count and the gradients over dp_cp; loss
    and the numbers of `before_sync` in one all-reduce, and the gradient norm, over world; parameters if they
    are sharded; besides, what the model, the pipeline and observers communicate. The host waits for data,
    and in layers of experts for numbers of rows.
    """
    batches = run.next_batches()
    run.buckets.zero_grad_buffer(len(batches))
    loss = run.forward_backward(batches)
    to_sum = run.before_sync(loss)
    run.buckets.finish_grad_sync()
    return run.update(to_sum, limits)


def forward_step(run: "Training", batches: list[Batch], total: torch.Tensor) -> "ForwardStep":
    """Return the function that `pp.run_schedule` runs on these microbatches; counts their tokens over dp_cp.

    The last stage adds the loss to total `[]`.
    """
    scale = run.optimizer.scaler.scale * run.buckets.loss_factor  # the latter: see dp.py
    aux_scale = None  # routers' losses: the mean over all tokens
    if run.config.model.num_experts is not None:
        aux_scale = scale / run.next_global_batch().tokens
    return ForwardStep(batches, run.config.run.seed, scale, token_count(run, batches), total, aux_scale)


@dataclass
class ForwardStep:
    """What `pp.run_schedule` runs in training: chunk, microbatch i -> loss `[]`, or activations `[s, b, h]`

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
        batch = replace(self.batches[i], dropout_seed=self.seed, aux_scale=self.aux_scale)
        if not chunk.post_process:
            return chunk(batch)
        weights = batch.loss_mask * (self.scale / self.tokens)
        losses = chunk(replace(batch, loss_weights=weights), batch.labels)  # fp32 [b, s]
        self.total.add_((losses.detach() * batch.loss_mask).sum() / self.tokens)
        return (losses * weights).sum()


def token_count(run: "Training", batches: list[Batch]) -> torch.Tensor | None:
    """Count the global batch's unmasked tokens, all-reduced over dp_cp -> int64 `[]` on the last stage"""
    if not run.model.has_loss:
        return None
    local = sum(batch.loss_mask.sum(dtype=torch.int64) for batch in batches)
    return comm.all_reduce_(local, run.mesh.dp_cp).clamp(min=1)


def sum_over_world(mesh: Mesh, local: LocalNumbers) -> Numbers:
    """Sum numbers over all ranks, in one all-reduce. local: this rank's.

    Floats get to the device in one copy, for which the host does not wait.
    """
    tensors = {name: x for name, x in local.items() if isinstance(x, torch.Tensor)}
    floats = {name: x for name, x in local.items() if name not in tensors}
    host = torch.tensor([*floats.values()], dtype=torch.float32, pin_memory=mesh.device.type == "cuda")
    values = [x.float()[None] for x in tensors.values()]
    values.append(host.to(mesh.device, non_blocking=True))
    total = comm.all_reduce_(torch.cat(values), mesh.world)
    return dict(zip((*tensors, *floats), total, strict=True))


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of an iteration, [first, end), and the number of samples of each length in tokens."""

    iteration: int
    first: int
    end: int
    lengths: Counter[int]  # length -> samples; documents count without padding

    @property
    def size(self) -> int:
        return self.end - self.first

    @property
    def tokens(self) -> int:
        """The number of tokens, masked ones included, padding excluded."""
        return sum(length * n for length, n in self.lengths.items())


class Observer:
    """Looks on at a training: a step gives the same result without it. Its numbers are logged by name.

    It may end the run, with `Progress.stop` or by raising.
    """

    def before_step(self, batch: GlobalBatch, microbatches: list[Batch]) -> None:
        """This rank's microbatches are read; nothing of the step is launched."""

    def before_sync(self) -> LocalNumbers:
        """Gradients are complete, unless they were summed sooner -> numbers to sum over all ranks, by name

        The step sums them, with the loss: every rank gives the same names.
        """
        return {}

    def before_update(self) -> Numbers:
        """Gradients are summed over their replicas, nothing is updated -> numbers that need no sum `[...]`

        An observer itself communicates here what it needs of other ranks.
        """
        return {}

    def after_step(self, step: Any) -> None:
        """The numbers of a step are on the host; the next one may be launched. step: `steps.StepReport`"""

    def end(self) -> None:
        """The training has ended; not called if it has failed."""


@dataclass
class Progress:
    """How far a training is."""

    samples_before: list[int]  # consumed before each iteration, and after the last
    iteration: int = 0  # the last finished one
    skipped_samples: int = 0  # not read, or of a spike without an update
    skipped_iterations: set[int] = field(default_factory=set)  # by rollbacks, not by --iterations-to-skip
    evaluated: int = 0  # the step of the last complete evaluation; a signal may have deferred one
    rollbacks: Counter[int] = field(default_factory=Counter)  # to each checkpoint, by iteration
    stop: str = ""  # why the run ends early; "": it does not
    preempted: bool = False  # it ends because of a signal

    @property
    def consumed_samples(self) -> int:
        return self.samples_before[min(self.iteration, len(self.samples_before) - 1)]


@dataclass
class TrainingData:
    """What a model is trained on; tuples are of training, validation and test; None: there is none."""

    tokenizer: Any
    datasets: tuple
    loaders: tuple
    samples: list[int]  # that the training data was built for, by each run so far
    identity: dict = field(default_factory=dict)  # on rank 0: hashes of the data (data/identity.py)


@dataclass
class Training:
    """All that a training consists of on one rank. Without an optimizer and buckets it only evaluates."""

    config: Config
    mesh: Mesh
    log: Any  # report.log.RunLog
    data: TrainingData
    model: ModelChunks
    progress: Progress
    buckets: ParamAndGradBuckets | None = None
    optimizer: Optimizer | None = None
    run_schedule: Callable[..., None] = run_schedule  # or what launches CUDA graphs in its place
    observers: list[Observer] = field(default_factory=list)  # they get each event in this order

    def observer(self, kind: type[Kind]) -> Kind:
        """Return the observer of this class."""
        return next(observer for observer in self.observers if isinstance(observer, kind))

    def next_global_batch(self) -> GlobalBatch:
        """Return the global batch of the next iteration."""
        done = self.progress.iteration
        first = self.progress.samples_before[done]
        end = self.progress.samples_before[done + 1]
        lengths = self.data.loaders[0].lengths(first, end - first)
        return GlobalBatch(done + 1, first, end, Counter(lengths))

    def read(self, batch: GlobalBatch) -> list[Batch]:
        """Read this rank's microbatches of a global batch of the training data."""
        return self.data.loaders[0].batches(batch.first, batch.size)

    def next_batches(self) -> list[Batch]:
        """Begin the next iteration -> this rank's microbatches, on the device."""
        seed = self.config.run.seed + 1_000_003 * self.progress.iteration + self.mesh.rank
        torch.manual_seed(seed)  # dropout of the fused kernels
        batch = self.next_global_batch()
        microbatches = self.read(batch)
        for observer in self.observers:
            observer.before_step(batch, microbatches)
        return microbatches

    def forward_backward(self, batches: list[Batch]) -> torch.Tensor:
        """Run forward and backward of all microbatches -> this rank's part of the loss `[]`

        The parts of all ranks add up to it: tp ranks of the last stage have the same one, which one of them
        returns. Communicates the token count over dp_cp, and what the model and the pipeline do.
        """
        loss = torch.zeros((), device=self.mesh.device)
        run_chunk = forward_step(self, batches, loss)
        self.model.begin_step()
        self.run_schedule(self.model, run_chunk, len(batches), self.message_shape)
        return loss if self.model.is_loss_rank else torch.zeros_like(loss)

    def before_sync(self, loss: torch.Tensor) -> LocalNumbers:
        """Return what `sum_over_world` sums: this rank's part of the loss `[]`, and what observers add."""
        to_sum: LocalNumbers = {"lm_loss": loss}
        for observer in self.observers:
            to_sum |= observer.before_sync()
        return to_sum

    def update(self, to_sum: LocalNumbers, limits: StepLimits) -> Numbers:
        """Sum the numbers of all ranks, and update all parameters, if the step is within its limits.

        Communicates over world, and the parameters if they are sharded. The numbers of `before_update` are
        not summed.
        """
        numbers: Numbers = {}
        for observer in self.observers:
            numbers |= observer.before_update()
        numbers |= sum_over_world(self.mesh, to_sum)
        self.model.end_step()
        stats = self.optimizer.step(numbers["lm_loss"], limits)
        return numbers | vars(stats)

    @property
    def message_shape(self) -> tuple[int, int, int]:
        """The shape of a message between pipeline stages."""
        data = self.config.data
        return self.model.shape(data.seq_length // self.mesh.cp.size, data.micro_batch_size)


def build_loaders(config: Config, mesh: Mesh, model: ModelChunks, datasets: tuple, eod: int) -> tuple:
    """Make the loader of this rank's microbatches for each dataset; None stays None. config: resolved."""
    return tuple(dataset and build_loader(dataset, config, mesh, model, eod) for dataset in datasets)


def warm_up_step(run: Training) -> None:
    """Run a microbatch through each chunk without messages, and discard its gradients. See pp.warm_up."""
    batches = [run.data.loaders[0].get(run.progress.consumed_samples)]
    total = torch.zeros((), device=run.mesh.device)
    run.buckets.zero_grad_buffer(1)
    run_chunk = forward_step(run, batches, total)
    warm_up(run.model, run_chunk, run.message_shape)
    run.buckets.finish_grad_sync()
    if run.model.scales is not None:
        run.model.scales.clear_step()


def due(interval: int | None, iteration: int) -> bool:
    """Whether an action that is due every `interval` iterations (None: never) is due after this one."""
    return bool(interval) and iteration % interval == 0

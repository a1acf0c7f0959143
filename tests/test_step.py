"""A step and its observers, by an observer that notes its events, on two ranks of tp and dp."""

import torch

import train
from nanomegatron.step import Observer
from tests.spmd import run_spmd
from tests.training import arguments, numbers_of, set_up, sources  # noqa: F401 (a fixture)


class Notes(Observer):
    """Notes each event, with what can be seen of the training then."""

    def __init__(self, run) -> None:
        self.run = run
        self.said = []

    def note(self, event: str) -> None:
        grads = torch.stack([bucket.grads.float().norm() for bucket in self.run.buckets.all]).norm()
        weights = torch.stack([param.detach().float().norm() for param in self.run.buckets.params]).norm()
        self.said.append((event, grads.item(), weights.item()))

    def before_step(self, batch, microbatches) -> None:
        self.said.append((batch.iteration, batch.size, len(microbatches)))

    def before_sync(self) -> dict:
        self.note("before_sync")
        return {"ranks": 1.0, "sum_of_ranks": torch.tensor(float(self.run.mesh.rank))}

    def before_update(self) -> dict:
        self.note("before_update")
        return {"table": torch.arange(3)}


def one_step(world, argv, folder) -> tuple[list, dict, float]:
    run = set_up(world, argv, folder)
    notes = Notes(run)
    run.observers.append(notes)
    numbers = numbers_of(train.train_step(run))
    notes.note("after")
    return notes.said, numbers, run.config.data.global_batch_size


def test_observers_get_the_events_of_a_step_in_order(sources, tmp_path):  # noqa: F811
    """Gradients before the sum over dp, then after it; weights still as they were; numbers of all ranks."""
    argv = arguments(sources, "gpt", "--tp 2 --train-iters 2 --lr-warmup-iters 0")
    (alone,) = run_spmd(
        one_step, 1, arguments(sources, "gpt", "--train-iters 2 --lr-warmup-iters 0"), tmp_path
    )
    for said, numbers, size in run_spmd(one_step, 4, argv, str(tmp_path)):
        (iteration, samples, microbatches), sync, update, after = said
        assert (iteration, samples) == (1, size) and microbatches >= 1
        assert [sync[0], update[0]] == ["before_sync", "before_update"]
        assert sync[1] != update[1] and sync[2] == update[2] != after[2]
        assert (numbers["ranks"], numbers["sum_of_ranks"], numbers["table"]) == (4.0, 6.0, [0, 1, 2])
        assert abs(numbers["lm_loss"] - alone[1]["lm_loss"]) < 1e-5

"""--manual-gc: Python's garbage is collected after the steps that --manual-gc-interval says, and only there.

That a step leaves none is seen in every layout that tests train (`training.no_garbage`).
"""

import gc
import weakref

import pytest
import torch

import train
from nanomegatron.config.settings import RunConfig
from nanomegatron.faults.garbage import manual_gc
from nanomegatron.mesh import World
from tests.training import arguments, no_garbage, set_up, sources  # noqa: F401


class Circle:
    """What only a collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("interval, freed_after", [(3, [3, 6]), (1, [1, 2, 3, 4, 5, 6]), (0, [])])
def test_circles_are_freed_at_the_interval(interval, freed_after):
    found = []
    with manual_gc(RunConfig(manual_gc_interval=interval)) as collect:
        assert not gc.isenabled()
        for iteration in range(1, 7):
            circle = weakref.ref(Circle())
            collect(iteration)
            if circle() is None:
                found.append(iteration)
    assert found == freed_after
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_python_collects_by_itself_afterwards_and_without_the_flag():
    with pytest.raises(KeyError), manual_gc(RunConfig()):
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0
    with manual_gc(RunConfig(manual_gc=False, manual_gc_interval=1)) as collect:
        circle = weakref.ref(Circle())
        collect(1)
        assert gc.isenabled() and circle() is not None


@pytest.mark.parametrize("flag, automatic", [("", False), ("--no-manual-gc", True)])
def test_training_goes_by_it(flag, automatic, sources, tmp_path, monkeypatch):  # noqa: F811
    run = set_up(World(), arguments(sources, "llama", "--train-iters 2", flag), tmp_path)
    step, seen = train.train_step, []
    monkeypatch.setattr(train, "train_step", lambda *given: (seen.append(gc.isenabled()), step(*given))[1])
    monkeypatch.setattr(train, "finish", lambda run: 0)
    assert train.train(run) == 0
    assert seen == [automatic] * 2 and gc.isenabled()


def test_a_tensor_in_a_circle_is_seen():
    """The check that every layout's training runs under."""
    with pytest.raises(AssertionError, match=r"frees these tensors: \[\(5,\)\]"), no_garbage():
        circle = Circle()
        circle.tensor = torch.zeros(5)
        del circle

"""What this rank communicates and waits for: for --log-comm, --log-straggler and the hang watch-dog.

    comm.py      observer.start(axis, kind, tensors)    calls and bytes of the step; the last communication
                 with what it has returned              what this rank waits for; a clock of the wait
    steps.py     start_step, end_step                   begin and end of what the log counts

Bytes are those of the whole tensor on one rank: the input of an all-reduce, reduce-scatter or all-to-all, the
output of an all-gather. A message counts where it is sent. It costs no operation of torch and no wait.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nanomegatron.mesh import Axis, AxisObserver


class Call(NamedTuple):
    """A communication that this rank has started; number: of those over this axis so far in the run."""

    kind: str
    size: int  # bytes
    number: int
    axis: tuple[str, int, int]  # its `key`

    def __str__(self) -> str:
        return f"{self.kind} of {self.size} bytes over {self.axis[0]}, number {self.number}"


@dataclass(eq=False)
class Traffic(AxisObserver):
    """Counts the current step's communication, and knows what this rank waits for.

    launching: the host only launches work on a GPU, so it stands still only if that work does. waits: with
    `new_clock` (`report/timers.py`), a stopped clock for each wait in this step.
    """

    counts: Counter = field(default_factory=Counter)  # calls and bytes by (axis's name, kind, unit)
    steps: int = 0  # and evaluation batches so far
    launching: bool = False
    numbers: Counter = field(default_factory=Counter)  # of communications so far, by axis
    last: Call | None = None  # started
    waiting: tuple[Call | None, float] | None = None  # for what, and since when
    new_clock: Callable[[], Any] | None = None
    waits: list[Any] = field(default_factory=list)

    def start(self, axis: Axis, kind: str, tensors: Sequence[torch.Tensor]) -> AbstractContextManager:
        """Count the communication of tensors `[...]`, one call each -> what its wait enters"""
        size = sum(x.numel() * x.element_size() for x in tensors)
        if kind not in ("receive", "barrier"):
            self.counts[axis.name, kind, "calls"] += len(tensors)
            self.counts[axis.name, kind, "bytes"] += size
        self.numbers[axis.key] += 1
        self.last = Call(kind, size, self.numbers[axis.key], axis.key)
        return self.wait(self.last)

    @contextmanager
    def wait(self, call: Call | None = None) -> Iterator[None]:
        """Context manager: wait for a communication inside; None: for the device, thus for any of them."""
        self.waiting = call or self.last, time.monotonic()
        clock = self.new_clock and self.new_clock()
        try:
            yield
        finally:
            self.waiting = None
        if clock:
            self.waits.append(clock.stop())

    def start_step(self, launching: bool = False) -> None:
        """Forget the counts and waits before this step or evaluation batch, whose data are there."""
        self.counts.clear()
        self.waits = []
        self.launching = launching
        self.steps += 1

    def end_step(self) -> tuple[dict, list[Any]]:
        """All of the step is launched -> its counts and waits"""
        self.launching = False
        return dict(self.counts), self.waits


def ledger(traffic: dict[tuple[str, str, str], int]) -> list[str]:
    """Return a step's counts (`Traffic.end_step`) as lines of a table, one per kind of communication."""
    return [
        f"{axis:>6} {kind:<14} {traffic[axis, kind, 'calls']:6d} calls "
        f"{traffic[axis, kind, 'bytes']:16,d} bytes a step"
        for axis, kind in sorted({key[:2] for key in traffic})
    ]

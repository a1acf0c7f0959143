"""Times the parts of a step, by the GPU's own clock if there is one.

timers.phase("forward-backward")          two events on the stream; the host does not wait
step's clocks --- one step late ---> sums over the log interval --- one all-gather ---> Megatron's lines
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from nanomegatron.comm import all_gather
from nanomegatron.mesh import Axis


class Clock:
    """A device's own clock: events on a GPU's streams, the host's time on a CPU.

    Create it at the start of a span and stop it at its end; `now` records further marks. None of these wait
    for the device, but reading a mark does.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.begin = self.end = self.now()

    def now(self, stream: torch.cuda.Stream | None = None) -> Any:
        """Record a mark; on a GPU an event, timed when the stream (None: the current one) reaches it."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream())
        return event

    def stop(self) -> "Clock":
        self.end = self.now()
        return self

    def milliseconds(self) -> float:
        """The length of the span; waits until the device has reached its end."""
        if not self.cuda:
            return 1e3 * (self.end - self.begin)
        self.end.synchronize()
        return self.begin.elapsed_time(self.end)

    def align(self) -> "Clock":
        """Relate the device's clock to the host's, for `seconds`; waits for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
            before = time.perf_counter()
            self.base = self.now()
            self.base.synchronize()
            self.base_time = (before + time.perf_counter()) / 2
        return self

    def seconds(self, mark: Any) -> float:
        """Convert a mark to seconds of the host's clock, after `align`; waits until the device reached it."""
        if not self.cuda:
            return mark
        mark.synchronize()
        return self.base_time + self.base.elapsed_time(mark) / 1e3


def marked(name: str) -> AbstractContextManager:
    """Context manager: a range of this name in the trace of --profile, if it records."""
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(name)
    return nullcontext()


class Timers:
    """Times named parts of a step up to a level of detail: 1 parts of a step, 2 those of microbatches."""

    def __init__(self, level: int, option: str, device: torch.device) -> None:
        self.level, self.option, self.device = level, option, device
        self._clocks: list[tuple[str, Clock]] = []
        self._sums, self._steps = Counter(), 0
        self._phase = ExitStack()

    def phase(self, name: str = "", level: int = 1) -> None:
        """End the phase of the step that is being timed, and begin the next, if there is one."""
        self._phase.close()
        if name:
            self._phase.enter_context(self(name, level))

    @contextmanager
    def __call__(self, name: str, level: int = 1) -> Iterator[None]:
        """Context manager: time its body, if `level` is within the configured level; mark it in a profile."""
        with marked(name):
            if level > self.level:
                yield
                return
            clock = Clock(self.device)
            self._clocks.append((name, clock))
            yield
            clock.stop()

    def take(self) -> list[tuple[str, Clock]]:
        """Return and clear the clocks of the step that has just been launched."""
        clocks, self._clocks = self._clocks, []
        return clocks

    def add(self, clocks: list[tuple[str, Clock]]) -> None:
        """Add the times of one step's clocks; waits for the device."""
        self._steps += 1
        for name, clock in clocks:
            self._sums[name] += clock.milliseconds()

    def text(self, world: Axis) -> str:
        """Return mean milliseconds since the last call, in Megatron's format. All-gathers them over world."""
        mine = torch.tensor([[*self._sums.values()]], dtype=torch.float64, device=self.device) / self._steps
        table = dict(zip(self._sums, all_gather(mine, world).T.tolist(), strict=True))
        self._sums, self._steps = Counter(), 0
        if self.option == "all":
            ranks = {name: enumerate(ms) for name, ms in table.items()}
            rows = [f"  {n}:" + "".join(f"\n     rank {r:2d}: {t:.2f}" for r, t in ranks[n]) for n in ranks]
            return "\n".join(["times across ranks (ms):", *rows])
        head, form = {"max": ("max", "{1:.2f}"), "minmax": ("(min, max)", "({0:.2f}, {1:.2f})")}[self.option]
        rows = [f"    {name + ' ':.<48}: {form.format(min(ms), max(ms))}" for name, ms in table.items()]
        return "\n".join([f"{head} time across ranks (ms):", *rows])

"""How long the parts of a step take, by the GPU's own clock where there is one.

with timers("forward-backward"):          two events on the stream; the host does not wait
step's clocks --- one step late ---> sums over the log interval --- one all-gather ---> Megatron's lines
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nanomegatron.comm import all_gather
from nanomegatron.mesh import Axis


class Clock:
    """A device's own clock: events on a GPU's streams, on a CPU the host's time.

    Made at the beginning of a span and stopped at its end; `now` leaves further marks. None of these wait for
    the device, reading a mark does.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.begin = self.end = self.now()

    def now(self, stream: torch.cuda.Stream | None = None) -> Any:
        """A mark: on a GPU when the stream (None: the current one) comes to this point."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream())
        return event

    def stop(self) -> "Clock":
        self.end = self.now()
        return self

    def milliseconds(self) -> float:
        """The span; waits until the device has reached its end."""
        if not self.cuda:
            return 1e3 * (self.end - self.begin)
        self.end.synchronize()
        return self.begin.elapsed_time(self.end)

    def align(self) -> "Clock":
        """Relate the device's clock to the host's, for `seconds`; waits for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
            _, self.base, self.base_time = min((self._base() for _ in range(5)), key=lambda found: found[0])
        return self

    def _base(self) -> tuple[float, torch.cuda.Event, float]:
        """How far apart two looks at the host's clock are, an event between them, and the time of that."""
        before, event = time.perf_counter(), self.now()
        event.synchronize()
        after = time.perf_counter()
        return after - before, event, (before + after) / 2

    def seconds(self, mark: Any) -> float:
        """The moment of a mark on the host's clock; waits until the device has reached it."""
        if not self.cuda:
            return mark
        mark.synchronize()
        return self.base_time + self.base.elapsed_time(mark) / 1e3


class Timers:
    """Named parts of a step up to a level of detail: 1 for the parts, 2 for every microbatch's."""

    def __init__(self, level: int, option: str, device: torch.device) -> None:
        self.level, self.option, self.device = level, option, device
        self._clocks: list[tuple[str, Clock]] = []
        self._sums, self._steps = Counter(), 0

    @contextmanager
    def __call__(self, name: str, level: int = 1) -> Iterator[None]:
        """Time what is inside, unless that is more detail than was asked for."""
        if level > self.level:
            yield
            return
        self._clocks.append((name, clock := Clock(self.device)))
        yield
        clock.stop()

    def take(self) -> list[tuple[str, Clock]]:
        """The clocks of the step that has just been launched."""
        clocks, self._clocks = self._clocks, []
        return clocks

    def add(self, clocks: list[tuple[str, Clock]]) -> None:
        """Read the clocks of one step."""
        self._steps += 1
        for name, clock in clocks:
            self._sums[name] += clock.milliseconds()

    def text(self, world: Axis) -> str:
        """Milliseconds a step since the last call in Megatron's format. Communicates a number a name."""
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

"""Clocks that can be compared: of a GPU with its host's, of hosts with one another.

    event on a GPU  --- time since a base event, whose moment on the host's clock is known --->  host
    host            --- none within a machine; else by how far apart a barrier lets go --->      rank 0's host

Nothing waits while a step runs: `Clock.now` leaves a mark, `Clock.seconds` reads it afterwards.
"""

import hashlib
import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanomegatron.comm import all_gather, barrier
from nanomegatron.mesh import Axis


class Clock:
    """Moments on a device, by the host's clock. Making one waits for the device, for the base event."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.synchronize(device)
            _, self.base, self.base_time = min((self._base() for _ in range(5)), key=lambda found: found[0])

    def _base(self) -> tuple[float, torch.cuda.Event, float]:
        """How far apart two looks at the host's clock are, an event between them, and the time of that."""
        before, event = time.perf_counter(), self.now()
        event.synchronize()
        after = time.perf_counter()
        return after - before, event, (before + after) / 2

    def now(self, stream: torch.cuda.Stream | None = None) -> Any:
        """A mark: on a GPU when the stream (None: the current one) comes to this point."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream())
        return event

    def seconds(self, mark: Any) -> float:
        """The moment of a mark on the host's clock; waits until a GPU has come to it."""
        if not self.cuda:
            return mark
        mark.synchronize()
        return self.base_time + self.base.elapsed_time(mark) / 1e3


def machine() -> int:
    """A number that the processes of one machine share, and with it `time.perf_counter` (CLOCK_MONOTONIC)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname() + (boot.read_text() if boot.exists() else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def clock_offsets(world: Axis, device: torch.device, rounds: int = 9) -> list[float]:
    """By how many seconds each rank's clock is ahead of rank 0's. Communicates a few numbers a rank."""
    machines = all_gather(torch.tensor([machine()], device=device), world).tolist()
    if len(set(machines)) == 1:
        return [0.0] * world.size
    exits = []
    for _ in range(rounds):
        barrier(world)
        exits.append(time.perf_counter())
    table = torch.tensor([exits], dtype=torch.float64, device=device)
    return offsets(all_gather(table, world).tolist(), machines)


def offsets(exits: Sequence[Sequence[float]], machines: Sequence[int]) -> list[float]:
    """The same from when each rank left some barriers, `exits[rank][round]`, by its own clock.

    The first of a machine to leave stands for it: a process may get its turn late, never early. The median
    leaves out the rounds in which all of a machine were late.
    """
    first = {
        name: [min(times) for times in zip(*(e for e, of in zip(exits, machines) if of == name))]
        for name in set(machines)
    }
    ahead = {
        name: statistics.median(mine - zero for mine, zero in zip(times, first[machines[0]]))
        for name, times in first.items()
    }
    return [ahead[name] for name in machines]

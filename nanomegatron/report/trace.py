"""Traces a training step: times of every rank's ops and messages, gathered by rank 0.

    begin          with op(F0.1): ...         receive, received         end
      |            [============]                   |                    |
    base event     mark       mark            mark: it arrived      gather, align, write

A mark is an event on a GPU's stream, or the time on a CPU (`timers.Clock`); the host never waits for the
device during the step. A message starts at the end of the op that sends it, on the sender's clock, and ends
at its arrival: on a GPU when the transfer ends, on a CPU when the receiver's wait ends.

Chosen iterations are written as a picture, the planned timeline above the measured one, and as a trace for
Perfetto (`trace_draw.py`). Others are not recorded. On a GPU every op is always an NVTX range, and in the
trace of --profile a range, with the name that it has everywhere here: F1.4 is the forward through chunk 1 of
microbatch 4.

    event on a GPU  --- time since a base event, whose time on the host's clock is known --->    host
    host            --- offset 0 within a machine; else from the exits of barriers --->          rank 0's host
"""

import json
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nanomegatron.comm import Pending, all_gather_text, barrier
from nanomegatron.config.settings import Config
from nanomegatron.mesh import Axis, AxisObserver, Mesh
from nanomegatron.pp import NoTracer
from nanomegatron.report.timers import Clock, marked
from nanomegatron.report.trace_draw import Recording, op_name
from nanomegatron.schedules import Event, Message, Op

TIMERS = {"F": "forward-compute", "B": "backward-compute", "BW": "backward-compute", "W": "weight-compute"}


@dataclass
class _Step:
    """One rank's marks of a step that is being recorded."""

    iteration: int
    lists: list[list[Op]]
    placed: list[list[int]]
    clock: Clock
    ops: dict[Op, tuple[Any, Any]] = field(default_factory=dict)
    arrivals: dict[Message, Any] = field(default_factory=dict)


class Tracer(NoTracer):
    """Records the times of a rank's ops and messages in the chosen iterations.

    timers: `timers(name, level=2)` is entered around every op, recorded or not (`timers.Timers`).
    """

    def __init__(
        self,
        mesh: Mesh,
        iterations: Collection[int],
        timers: Callable[..., AbstractContextManager] | None = None,
    ) -> None:
        self.mesh = mesh
        self.iterations = iterations
        self.timers = timers or (lambda name, level: nullcontext())
        self.detailed = getattr(timers, "level", 0) >= 2
        self.cuda = mesh.device.type == "cuda"
        self._step: _Step | None = None
        self._streams = defaultdict(lambda: torch.cuda.Stream(mesh.device))  # by sender

    def begin(self, iteration: int, lists: list[list[Op]], placed: list[list[int]]) -> None:
        """Start a step whose ops are `lists` (`schedules.py`); call on all ranks before its first op."""
        self._step = None
        if iteration in self.iterations:
            self._step = _Step(iteration, lists, placed, Clock(self.mesh.device).align())

    @property
    def watches(self) -> bool:
        """Whether this step's ops are recorded, or timed one by one."""
        return self._step is not None or self.detailed

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        """Context manager around the computation of an op, after its message has arrived."""
        with (
            torch.cuda.nvtx.range(op_name(op)) if self.cuda else nullcontext(),
            marked(op_name(op)),
            self.timers(TIMERS[op.kind], level=2),
        ):
            start = self._step and self._step.clock.now()
            yield
            if self._step:
                self._step.ops[op] = start, self._step.clock.now()

    def receive(self, message: Message, pending: Pending) -> None:
        """Record the arrival of a message on a GPU; call just before this rank waits for it.

        A separate stream waits for it too. There is one for each sender: with one for all, a message would
        seem to arrive after those of other ranks that are still in flight.
        """
        if self._step and self.cuda:
            with torch.cuda.stream(stream := self._streams[message.source]):
                for work in pending.works:
                    work.wait()
                self._step.arrivals[message] = self._step.clock.now(stream)

    def received(self, message: Message) -> None:
        """Record the arrival of a message on a CPU; call just after the wait."""
        if self._step and not self.cuda:
            self._step.arrivals[message] = self._step.clock.now()

    def end(self) -> Recording | None:
        """End the step, on all ranks -> what was recorded, on rank 0; None elsewhere, and if nothing was.

        A recorded step waits for the device, and all-gathers the times as text.
        """
        step = self._step
        self._step = None
        if step is None:
            return None
        mesh = self.mesh
        seconds = step.clock.seconds
        ops = [[seconds(mark) for mark in step.ops[op]] for op in step.lists[mesh.pp.rank]]
        arrivals = [(message, seconds(mark)) for message, mark in step.arrivals.items()]
        world = replace(mesh.world, observer=AxisObserver())  # not counted as traffic of the step
        mine = mesh.label, machine(), barrier_exits(world), ops, arrivals
        texts = all_gather_text(json.dumps(mine), world, mesh.device)
        if mesh.rank > 0:
            return None
        return _recording(mesh, step, [json.loads(text) for text in texts])


def _recording(mesh: Mesh, step: _Step, ranks: list[list]) -> Recording:
    """Convert what each rank has gathered to a Recording, in milliseconds since the first op began."""
    labels, machines, exits, ops, arrivals = zip(*ranks)
    ahead = offsets(exits, machines)
    first = min(times[0][0] - late for times, late in zip(ops, ahead))
    apart = len(ranks) // mesh.pp.size  # ranks next to each other in a pipeline: pp varies slowest
    events, came = [], []
    for rank, late in enumerate(ahead):
        zero = first + late  # on this rank's clock
        planned = zip(step.lists[rank // apart], ops[rank])
        events.append([Event(rank, op, *(1e3 * (time - zero) for time in times)) for op, times in planned])
        came.append({Message(*message): 1e3 * (time - zero) for message, time in arrivals[rank]})
    drawn = mesh.pp.ranks if mesh.pp.size > 1 else mesh.dp_cp.ranks[:8]
    return Recording(step.iteration, step.lists, step.placed, labels, drawn, events, came)


def trace_title(name: str, config: Config, mesh: Mesh) -> str:
    """Return a line with the run's name, its model, its layout and its schedule."""
    model, chunks = config.model, config.parallel.chunks
    layout = " ".join(f"{axis.name}{axis.size}" for axis in (mesh.tp, mesh.pp, mesh.dp, mesh.cp, mesh.ep))
    how = config.parallel.schedule + f", {chunks} chunks a rank" * (chunks > 1)
    how = how if mesh.pp.size > 1 else "no pipeline"
    return f"{name}: {model.num_layers} layers, hidden {model.hidden_size} | {layout} | {how}"


def machine() -> str:
    """Return a text that identifies the machine, whose processes share one `time.perf_counter`."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text() if boot.exists() else "")


def barrier_exits(world: Axis, rounds: int = 9) -> list[float]:
    """Return the times at which this rank leaves barriers, on its own clock."""
    exits = []
    for _ in range(rounds):
        barrier(world)
        exits.append(time.perf_counter())
    return exits


def offsets(exits: Sequence[Sequence[float]], machines: Sequence[str]) -> list[float]:
    """Return the seconds by which each rank's clock is ahead of rank 0's.

    exits: `exits[rank][round]`, the times at which ranks left barriers, each on its own clock.

    The first process of a machine to leave represents it: a process may be scheduled late, never early. The
    median excludes the rounds in which all processes of a machine were late.
    """
    times = torch.tensor(exits, dtype=torch.float64)
    same = [torch.tensor([other == machine for other in machines]) for machine in machines]
    first = torch.stack([times[ranks].amin(0) for ranks in same])
    return (first - first[0]).median(1).values.tolist()

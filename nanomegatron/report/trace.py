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

import hashlib
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nanomegatron.comm import Pending, all_gather, barrier
from nanomegatron.config.settings import Config
from nanomegatron.mesh import Axis, AxisObserver, Mesh
from nanomegatron.pp import NoTracer
from nanomegatron.report.timers import Clock, marked
from nanomegatron.report.trace_draw import Recording, op_name, write
from nanomegatron.schedules import Event, Message, Op, messages

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
    """Records the times of a rank's ops and messages in the chosen iterations; without a folder, in none.

    timers: `timers(name, level=2)` is entered around every op, recorded or not (`timers.Timers`).
    attempt: `attempt("trace")` is entered around the drawing (`log.RunLog.attempt`), under a `trace_title`.
    After `end`, `summary` on rank 0 has the lines for the log.
    """

    def __init__(
        self,
        mesh: Mesh,
        folder: Path | None,
        iterations: Collection[int],
        timers: Callable[..., AbstractContextManager] | None = None,
        attempt: Callable[[str], AbstractContextManager] = nullcontext,
        title: str = "",
    ) -> None:
        self.mesh, self.folder, self.iterations = mesh, folder, iterations
        self.timers = timers or (lambda name, level: nullcontext())
        self.detailed = getattr(timers, "level", 0) >= 2
        self.cuda = mesh.device.type == "cuda"
        self.summary: list[str] = []
        self.attempt, self.title = attempt, title
        self._step: _Step | None = None
        self._streams = defaultdict(lambda: torch.cuda.Stream(mesh.device))  # by sender

    def begin(self, iteration: int, lists: list[list[Op]], placed: list[list[int]]) -> None:
        """Start a step whose ops are `lists` (`schedules.py`); call on all ranks before its first op."""
        self.summary, self._step = [], None
        if self.folder is not None and iteration in self.iterations:
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

    def end(self) -> list[Path]:
        """End the step, on all ranks -> paths that rank 0 wrote; empty elsewhere, or if not recorded.

        A recorded step waits for the device and all-gathers the marks: 2 numbers per op, 1 per message.
        """
        step, self._step = self._step, None
        if step is None:
            return []
        exchanges = messages(step.lists, step.placed)
        receives = [[message for exchange in ours for message in exchange.receives] for ours in exchanges]
        table = self._gather(step, receives)
        if self.mesh.rank > 0:
            return []
        paths: list[Path] = []
        with self.attempt("trace"):
            self.folder.mkdir(parents=True, exist_ok=True)
            recording = replace(_recording(self.mesh, step, receives, table), title=self.title)
            paths, self.summary = write(recording, self.folder)
        return paths

    def _gather(self, step: _Step, receives: list[list[Message]]) -> list[list[float]]:
        """Return a row for each rank, in seconds on rank 0's clock: starts and ends of ops, then arrivals."""
        mesh, read = self.mesh, step.clock.seconds
        mine = [read(mark) for op in step.lists[mesh.pp.rank] for mark in step.ops[op]]
        mine += [read(step.arrivals[message]) for message in receives[mesh.pp.rank]]
        width = max(2 * len(ops) + len(received) for ops, received in zip(step.lists, receives))
        row = torch.full((1, width), torch.nan, dtype=torch.float64)
        row[0, : len(mine)] = torch.tensor(mine, dtype=torch.float64)
        world = replace(mesh.world, observer=AxisObserver())  # not counted as traffic of the step
        table = all_gather(row.to(mesh.device), world).cpu()
        ahead = torch.tensor(clock_offsets(world, mesh.device), dtype=torch.float64)
        return (table - ahead[:, None]).tolist()


def _recording(mesh: Mesh, step: _Step, receives: list[list[Message]], table: list[list[float]]) -> Recording:
    """Convert the table to a Recording, in milliseconds since the first op began."""
    apart = len(table) // mesh.pp.size  # ranks next to each other in a pipeline: pp varies slowest
    zero = min(row[0] for row in table)
    events, arrivals = [], []
    for rank, row in enumerate(table):
        times = [1e3 * (time - zero) for time in row]
        ops, received = step.lists[rank // apart], receives[rank // apart]
        events.append([Event(rank, op, *times[2 * i : 2 * i + 2]) for i, op in enumerate(ops)])
        arrivals.append(dict(zip(received, times[2 * len(ops) :])))
    labels = [_label(mesh, rank) for rank in range(len(table))]
    drawn = mesh.pp.ranks if mesh.pp.size > 1 else mesh.dp_cp.ranks[:8]
    return Recording(step.iteration, step.lists, step.placed, labels, drawn, events, arrivals)


def trace_title(name: str, config: Config, mesh: Mesh) -> str:
    """Return a line with the run's name, its model, its layout and its schedule."""
    model, chunks = config.model, config.parallel.chunks
    layout = " ".join(f"{axis.name}{axis.size}" for axis in (mesh.tp, mesh.pp, mesh.dp, mesh.cp, mesh.ep))
    how = config.parallel.schedule + f", {chunks} chunks a rank" * (chunks > 1)
    how = how if mesh.pp.size > 1 else "no pipeline"
    return f"{name}: {model.num_layers} layers, hidden {model.hidden_size} | {layout} | {how}"


def _label(mesh: Mesh, rank: int) -> str:
    """Return a rank's coordinates in the mesh, such as "rank 3 tp1 cp0 dp1 pp0"."""
    words = [f"rank {rank}"]
    for axis in (mesh.tp, mesh.cp, mesh.dp, mesh.pp):
        rank, place = divmod(rank, axis.size)
        words.append(f"{axis.name}{place}")
    return " ".join(words)


def machine() -> int:
    """Return a number that identifies the machine, whose processes share one `time.perf_counter`."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname() + (boot.read_text() if boot.exists() else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def clock_offsets(world: Axis, device: torch.device, rounds: int = 9) -> list[float]:
    """Return the seconds by which each rank's clock is ahead of rank 0's. Does barriers and all-gathers."""
    machines = all_gather(torch.tensor([machine()], device=device), world).tolist()
    exits = []
    for _ in range(rounds):
        barrier(world)
        exits.append(time.perf_counter())
    table = torch.tensor([exits], dtype=torch.float64, device=device)
    return offsets(all_gather(table, world).tolist(), machines)


def offsets(exits: Sequence[Sequence[float]], machines: Sequence[int]) -> list[float]:
    """Compute `clock_offsets` from the times `exits[rank][round]` when ranks left barriers, on their clocks.

    The first process of a machine to leave represents it: a process may be scheduled late, never early. The
    median excludes the rounds in which all processes of a machine were late.
    """
    first = {}
    for machine in set(machines):
        ranks = [times for times, of in zip(exits, machines) if of == machine]
        first[machine] = list(map(min, zip(*ranks)))
    ahead = {
        machine: statistics.median(mine - zero for mine, zero in zip(times, first[machines[0]]))
        for machine, times in first.items()
    }
    return [ahead[machine] for machine in machines]

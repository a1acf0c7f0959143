"""Finds ranks that are slow: --log-straggler, by windows of --log-interval steps.

    a step of rank 0    | compute    | wait                  | compute | wait        |
    a step of rank 1    | compute, 200 ms more               | compute | wait        |   rank 0 waits for it

A rank's time of computation is the time of its step without its waits: what is in `Pending.wait` and blocking
collectives, by the device's own clock (on a GPU two events on the stream that waits). So transfers that are
not hidden count as wait, and a slow rank has much computation and little wait. What ranks do between steps
(saving, evaluation, reading the log) is not in it; waits inside the copies of peer memory (`fast/`) count as
computation.

The log has the medians over the steps of a window. A rank is slow if the computation of its fastest step is
over SLOW times the median of the other ranks of its pipeline stage (other stages have other layers), and over
EXCESS more: steps that other programs interrupt do not count, nor does noise in very short ones. Slow in
WINDOWS windows in a row is a warning. A stage that has only one rank is logged, but not compared.
"""

import functools
import math
import socket
import statistics

import torch

from nanomegatron.comm import all_gather, all_gather_text, read
from nanomegatron.mesh import Mesh
from nanomegatron.report.log import RunLog
from nanomegatron.report.steps import StepReport
from nanomegatron.report.timers import Clock
from nanomegatron.step import Observer

SLOW, WINDOWS = 1.5, 3
EXCESS = 50.0  # milliseconds


class Stragglers(Observer):
    """Collects the times of this rank's steps; logs those of all ranks once in a window."""

    def __init__(self, mesh: Mesh, log: RunLog, window: int) -> None:
        """window: steps. Gathers the ranks' names over world."""
        self.mesh, self.log, self.window = mesh, log, window
        text = f"{mesh.pp.rank} {mesh.label} on {socket.gethostname()}"
        rows = [row.split(" ", 1) for row in all_gather_text(text, mesh.world, mesh.device)]
        self.stages, self.names = [int(stage) for stage, _ in rows], [name for _, name in rows]
        self.times: list[tuple[float, float]] = []  # milliseconds of computation and of waits
        self.slow = [0] * len(rows)  # windows in a row
        mesh.observer.new_clock = functools.partial(Clock, mesh.device)

    def after_step(self, step: StepReport) -> None:
        """Add a step that has ended; the last of a window gathers three numbers over world, and logs."""
        wait = sum(clock.milliseconds() for clock in step.waits)
        self.times.append((step.clock.milliseconds() - wait, wait))
        if step.batch.iteration % self.window == 0:
            self.close_window(step.batch.iteration)

    def close_window(self, iteration: int) -> None:
        """Log the window that ends with this iteration, and the ranks that are slow."""
        medians = [statistics.median(column) for column in zip(*self.times, strict=True)]
        mine = [[*medians, min(compute for compute, _ in self.times)]]
        table = all_gather(torch.tensor(mine, dtype=torch.float64, device=self.mesh.device), self.mesh.world)
        compute, wait, fastest = read(table.T, self.mesh.world)
        self.times = []
        self.log.line(f"ranks   compute {spread(compute)}, wait {spread(wait)}")
        for rank, usual in enumerate(medians_of_others(fastest, self.stages)):
            own = fastest[rank]
            is_slow = own > SLOW * usual and own > usual + EXCESS
            self.slow[rank] = self.slow[rank] + 1 if is_slow else 0
            if self.slow[rank] >= WINDOWS and self.log.is_main:
                self.log.warn(
                    f"step {iteration}: straggler {self.names[rank]}: at least {own:.1f} ms of computation a "
                    f"step, {own / usual:.2f}x the median of its stage's other ranks, for {self.slow[rank]} "
                    f"windows of {self.window} steps"
                )


def medians_of_others(compute: list[float], stages: list[int]) -> list[float]:
    """Return for each rank the median time of the other ranks of its stage; infinite if there are none."""
    result = []
    for rank, stage in enumerate(stages):
        others = [x for r, x in enumerate(compute) if r != rank and stages[r] == stage]
        result.append(max(statistics.median(others), 1e-3) if others else math.inf)
    return result


def spread(milliseconds: list[float]) -> str:
    """Return 'min 10.0 (rank 3) median 10.2 max 11.0 ms (rank 0)'."""
    low, high = min(milliseconds), max(milliseconds)
    middle = statistics.median(milliseconds)
    return (
        f"min {low:.1f} (rank {milliseconds.index(low)}) median {middle:.1f} "
        f"max {high:.1f} ms (rank {milliseconds.index(high)})"
    )

"""Draws the recording of a step: a picture, plan above measurement; a trace for Perfetto; a summary.

    planned    rank 0  [F0][F1]      [BW0=][BW1=]     every op takes its kind's and stage's measured median
               rank 1      [F0][BW0=][F1][BW1=]
    measured   rank 0  [F0][F1 ]        [BW0=][BW1==]
                          \\__            /            thin lines: messages, from the end of the op that
               rank 1        [F0][BW0==][F1] ...      sends to the arrival

Both are `schedules.Timeline`s, so that their bubbles mean the same: idle over busy time of all ranks drawn.
The trace is in Chrome's format, which https://ui.perfetto.dev opens: a process per rank, a thread for its ops
and one for the messages of each other rank, arrows from the op that sends to the op that receives.
"""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanomegatron.report.schedule_draw import HEIGHT, bars, canvas, legend
from nanomegatron.schedules import Event, Message, Op, Timeline, messages, simulate, timeline_of

SHORT = 0.01  # of a step; a wait that is less above plan is not in the summary
CONTENT = {"F": "activations", "B": "the gradient"}


@dataclass(frozen=True)
class Recording:
    """The ops of all ranks in one step; times in milliseconds since the first op began."""

    iteration: int
    lists: list[list[Op]]  # planned ops by pipeline rank: `schedules.schedule`
    placed: list[list[int]]
    labels: list[str]  # by rank of the world
    drawn: Sequence[int]  # ranks with a row in the picture: of a pipeline, or else of dp
    events: list[list[Event]]  # by rank of the world, like `arrivals`
    arrivals: list[dict[Message, float]]

    @property
    def apart(self) -> int:
        """The distance of neighbouring pipeline ranks in the world; pp varies slowest."""
        return len(self.labels) // len(self.lists)

    @property
    def first(self) -> float:
        """The start of the first op of the ranks drawn; other dp ranks may have started earlier."""
        return min(self.events[rank][0].start for rank in self.drawn)

    def sender(self, rank: int, message: Message) -> int:
        """Return the rank of the world that sent `message` to `rank`."""
        return rank % self.apart + self.apart * message.source

    def timelines(self) -> tuple[Timeline, Timeline]:
        """Return the planned and the measured timeline of the ranks drawn; rows are numbered from 0."""
        runs = [[e._replace(rank=row) for e in self.events[rank]] for row, rank in enumerate(self.drawn)]
        stages = [self.placed[rank // self.apart] for rank in self.drawn]
        costs = medians(itertools.chain(*runs), lambda e: (e.op.kind, stages[e.rank][e.op.chunk]))
        copies = len(self.drawn) // len(self.lists)  # dp ranks: all do the same ops, without messages
        planned = simulate(self.lists * copies, self.placed * copies, costs)
        runs = [[e._replace(start=e.start - self.first, end=e.end - self.first) for e in run] for run in runs]
        return planned, timeline_of(runs)

    def sent(self) -> Iterator[tuple[Message, Event, float, Event]]:
        """Yield each message with the op that sent it, the time of its arrival, and the op that uses it."""
        exchanges = messages(self.lists, self.placed)
        runs = [[*zip(events, exchanges[rank // self.apart])] for rank, events in enumerate(self.events)]
        senders = [{exchange.sends: event for event, exchange in run} for run in runs]
        users = [{exchange.uses: event for event, exchange in run} for run in runs]
        for rank, arrivals in enumerate(self.arrivals):
            for message, time in arrivals.items():
                yield message, senders[self.sender(rank, message)][message], time, users[rank][message]


def medians(events: Iterable[Event], key: Callable[[Event], tuple]) -> dict[tuple, float]:
    """Return the median time of the ops that have a key, for each key."""
    took: dict[tuple, list[float]] = {}
    for event in events:
        took.setdefault(key(event), []).append(event.end - event.start)
    return {key: statistics.median(times) for key, times in took.items()}


def op_name(op: Op) -> str:
    """Return kind, chunk and microbatch, such as F1.4, for pictures, traces and NVTX ranges."""
    return f"{op.kind}{op.chunk}.{op.microbatch}"


def write(recording: Recording, folder: Path, title: str = "") -> list[str]:
    """Write iteration-N.json, and with matplotlib .svg and .png -> lines for the log.

    title: of the picture, `trace.trace_title`.
    """
    planned, measured = recording.timelines()
    lines = describe_trace(recording, planned, measured)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"iteration-{recording.iteration}"
    paths = [stem.with_suffix(suffix) for suffix in (".json", ".svg", ".png")]
    paths[0].write_text(json.dumps({"traceEvents": chrome(recording), "displayTimeUnit": "ms"}))
    try:
        picture(recording, title, (planned, measured), lines[1:], paths[1:])
    except ImportError as error:
        lines.append(str(error))
        del paths[1:]
    return [*lines, f"wrote {', '.join(map(str, paths))}; https://ui.perfetto.dev shows the .json"]


def describe_trace(recording: Recording, planned: Timeline, measured: Timeline) -> list[str]:
    """Return lines on bubbles, ops' medians on each rank, and the waits furthest above plan.

    Times are of the pipeline's ops: a step's reduction of gradients and its optimizer are not recorded.
    """
    took = medians(measured.events, lambda e: (e.rank, e.op.kind))
    costs = []
    for row, rank in enumerate(recording.drawn):
        words = [f"{kind} {time:.3g}" for (at, kind), time in took.items() if at == row]
        costs.append(f"rank {rank} {', '.join(words)}")
    found = waits(recording, planned, measured)
    return [
        f"iteration {recording.iteration}: {_total('planned', planned)} | {_total('measured', measured)}",
        "only ops: F forward, B backward for inputs, W for weights, BW for both; "
        "no reduction of gradients, no optimizer",
        f"an op takes, in ms, median: {'; '.join(costs)}",
        "the waits furthest above plan:" if found else "hardly a wait above plan",
        *found,
    ]


def _total(what: str, timeline: Timeline) -> str:
    ideal = timeline.total / (1 + timeline.bubble)  # the mean time that a rank computes
    bubble = f"bubble {100 * timeline.bubble:.1f} % of ideal time {ideal:.4g} ms"
    return f"{what} {timeline.total:.4g} ms, {bubble}"


def waits(recording: Recording, planned: Timeline, measured: Timeline) -> list[str]:
    """Return a line for each of the three waits of the ranks drawn that are furthest above plan."""
    exchanges = messages(recording.lists, recording.placed)
    uses = [x.uses for rank in recording.drawn for x in exchanges[rank // recording.apart]]
    found = []
    for gap, plan, event, used in zip(_gaps(measured), _gaps(planned), measured.events, uses):
        if gap - plan <= SHORT * measured.total:
            continue
        rank = recording.drawn[event.rank]
        reason = "though what it needs was there"
        if recording.arrivals[rank].get(used, -math.inf) - recording.first > event.start - gap / 2:
            reason = f"for {CONTENT[used.kind]} from rank {recording.sender(rank, used)}"
        op = event.op
        line = (
            f"rank {rank} waited {gap:.3g} ms (planned {plan:.3g}) before {op_name(op)} "
            f"(chunk {op.chunk}, microbatch {op.microbatch}) {reason}"
        )
        found.append((plan - gap, line))
    return [line for _, line in sorted(found)[:3]]


def _gaps(timeline: Timeline) -> list[float]:
    """Return the idle time before each event."""
    ends = [None, *timeline.events]
    same = [before is not None and before.rank == e.rank for before, e in zip(ends, timeline.events)]
    return [e.start - (b.end if s else 0.0) for b, e, s in zip(ends, timeline.events, same)]


def picture(
    recording: Recording,
    title: str,
    timelines: tuple[Timeline, Timeline],
    lines: list[str],
    paths: Sequence[Path],
) -> None:
    """Draw both timelines on one time axis, the messages of the measured one, and `lines` below.

    Raises ImportError without matplotlib.
    """
    from matplotlib.lines import Line2D

    row = {rank: i for i, rank in enumerate(recording.drawn)}
    figure = canvas(f"the picture of iteration {recording.iteration}", (14, 1.8 + 0.4 * (2 * len(row) + 3)))
    above, below = figure.subplots(2, 1, sharex=True)
    span = max(timeline.total for timeline in timelines)
    for axes, timeline, what in zip((above, below), timelines, ("planned", "measured")):
        bars(axes, timeline, span)
        axes.set_yticks(range(len(row)), row)
        axes.set_title(_total(what, timeline), fontsize=9, loc="left")
    below.set(xlabel="time (ms)")
    look = dict(color="dimgrey", linewidth=0.8, zorder=0.7)  # behind the bars
    sent = [found for found in recording.sent() if found[3].rank in row]
    for _, event, arrived, user in sent:
        edge = HEIGHT / 2 if row[user.rank] > row[event.rank] else -HEIGHT / 2
        times = event.end - recording.first, arrived - recording.first
        below.plot(times, (row[event.rank] + edge, row[user.rank] - edge), **look)
    legend(above, timelines[0], [Line2D([], [], label="message", **look)] if sent else [])
    kind = "pipeline of dp 0, tp 0, cp 0" if len(recording.lists) > 1 else "ranks of dp; no pipeline"
    microbatches = 1 + max(op.microbatch for op in recording.lists[0])
    heading = f"{title}\niteration {recording.iteration}: {kind}, {microbatches} microbatches"
    figure.suptitle(heading.strip(), fontsize=10, x=0.01, ha="left")
    figure.supxlabel("\n".join(lines), fontsize=8, x=0.04, ha="left")
    for path in paths:
        figure.savefig(path)


def chrome(recording: Recording) -> list[dict[str, Any]]:
    """Return the events of all ranks in Chrome's trace format, in microseconds."""
    found = []
    for rank, events in enumerate(recording.events):
        found.append(_called("process_name", rank, 0, recording.labels[rank]))
        found.append(_called("thread_name", rank, 0, "compute"))
        for event in events:
            stage = recording.placed[rank // recording.apart][event.op.chunk]
            args = event.op._asdict() | dict(stage=stage)
            found.append(_slice(op_name(event.op), rank, 0, (event.start, event.end), args))
    lanes: dict[tuple[int, int], list[float]] = {}  # (receiver, sender): when each of its threads is free
    for number, (message, sender, arrived, user) in enumerate(recording.sent()):
        ends = lanes.setdefault((user.rank, sender.rank), [])
        lane = next((i for i, end in enumerate(ends) if end <= sender.end), len(ends))
        thread = 1 + sender.rank + lane * len(recording.labels)
        if lane == len(ends):
            ends.append(0.0)
            found.append(_called("thread_name", user.rank, thread, f"from rank {sender.rank}"))
        ends[lane] = arrived
        name = f"{CONTENT[message.kind]} of {op_name(sender.op)}"
        span = sender.end, max(sender.end, arrived)
        found.append(_slice(name, user.rank, thread, span, message._asdict()))
        inside = sender.end - min(1e-3, (sender.end - sender.start) / 2)  # an arrow begins within a slice
        arrow = dict(name="message", cat="message", id=number, tid=0)
        found.append(arrow | dict(ph="s", pid=sender.rank, ts=1e3 * inside))
        found.append(arrow | dict(ph="f", bp="e", pid=user.rank, ts=1e3 * user.start))
    return found


def _called(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return dict(ph="M", name=what, pid=process, tid=thread, args=dict(name=name))


def _slice(name: str, process: int, thread: int, span: tuple[float, float], args: dict) -> dict[str, Any]:
    return dict(
        ph="X", name=name, pid=process, tid=thread, ts=1e3 * span[0], dur=1e3 * (span[1] - span[0]), args=args
    )

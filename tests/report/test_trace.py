"""Traces: a fake executor that sleeps by a simulated timeline must be found again in what is written."""

import contextlib
import json
import re
import statistics
import sys
import time
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

from nanomegatron.comm import Pending, barrier
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.mesh import Mesh, World
from nanomegatron.report import timers, trace
from nanomegatron.report.trace import machine, offsets
from nanomegatron.report.trace_draw import Recording, write
from nanomegatron.schedules import Op, messages, placement, schedule, simulate
from tests.spmd import run_spmd

UNIT, TRAVEL = 0.01, 0.5  # seconds of a unit of cost; units that a message takes
COSTS = {"F": 1, "B": 1, "W": 1, "BW": 2}
now = time.perf_counter


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - now()))


def pretend(mesh: Mesh, tracer: trace.Tracer, seen: list, step: tuple[str, int, int]) -> list:
    """A step in which ops and messages take the time that the simulator gives them, or as long as it took.

    Returns, of what the tracer has seen on its clock: start and end of every op; who sent what, and arrivals.
    """
    (name, microbatches, chunks), rank, stages = step, mesh.pp.rank, mesh.pp.size
    lists, placed = schedule(name, stages, microbatches, chunks), placement(name, stages, chunks)
    exchanges, plan = messages(lists, placed), simulate(lists, placed, COSTS, TRAVEL).events
    sends = dict(zip((x.sends for of_rank in exchanges for x in of_rank), plan))
    mine = [event for event in plan if event.rank == rank]
    ops, arrivals = [], []
    tracer.begin(3, lists, placed)
    barrier(mesh.world)
    zero = now()
    for op, exchange, event in zip(lists[rank], exchanges[rank], mine):
        for message in exchange.receives:
            tracer.receive(message, Pending(torch.empty(0)))
            sleep_until(zero + UNIT * (sends[message].end + TRAVEL))
            waited = now()
            tracer.received(message)
            assert waited <= seen[-1] <= now()
            arrivals.append([list(message), seen[-1]])
        sleep_until(zero + UNIT * event.start)
        times = [now()]
        with tracer.op(op):
            times.append(now())
            sleep_until(zero + UNIT * event.end)
            times.append(now())
        start, end = seen[-2:]
        assert times[0] <= start <= times[1] and times[2] <= end <= now()
        ops.append([start, end])
    return [ops, arrivals]


def record(mesh: Mesh, folder: str, step: tuple[str, int, int], skew: float) -> list:
    seen = []  # by a clock that all ranks have; the tracer gets another time

    def perf_counter() -> float:
        seen.append(now())
        return seen[-1] - skew * mesh.rank

    timers.time = trace.time = types.SimpleNamespace(perf_counter=perf_counter)
    if skew:
        trace.machine = lambda: str(mesh.rank)
    tracer = trace.Tracer(mesh, (3,))
    stamps = pretend(mesh, tracer, seen, step)
    before = Counter(mesh.observer.counts)
    recording = tracer.end()
    assert before == mesh.observer.counts and tracer.end() is None
    assert (recording is None) == (mesh.rank > 0)
    lines = write(recording, Path(folder)) if recording else []
    return [lines, *stamps]


CASES = {
    "1f1b": (4, 1, ("1f1b", 4, 1), 0.0),
    "other machines": (3, 1, ("1f1b", 4, 1), 1000.0),
    "interleaved, dp 2": (2, 2, ("interleaved", 3, 2), 0.0),
    "zero bubble": (2, 1, ("zb-v", 4, 2), 0.0),
    "no pipeline, dp 2": (1, 2, ("1f1b", 3, 1), 0.0),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.full) if case == "1f1b" else case for case in CASES]
)
def test_what_happened_is_written(case, tmp_path):
    """All ops and messages of all ranks, when they were; both bubbles."""
    pytest.importorskip("matplotlib")
    stages, copies, step, skew = CASES[case]
    slack = 0.05 if skew else 1e-6  # seconds: how well barriers align clocks while others use the machine
    recorded = run_spmd(record, stages * copies, str(tmp_path), step, skew, pp=stages)
    lines, ops, arrivals = zip(*recorded)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {f"iteration-3.{suffix}" for suffix in ("json", "svg", "png")}
    name, microbatches, chunks = step
    lists, placed = schedule(name, stages, microbatches, chunks), placement(name, stages, chunks)
    events = json.loads((tmp_path / "iteration-3.json").read_text())["traceEvents"]
    check_ops(events, ops, [lists, placed], slack)
    check_messages(events, ops, arrivals, slack)
    drawn = range(0, stages * copies, copies) if stages > 1 else range(copies)
    check_summary(lines[0], [ops[rank] for rank in drawn], [lists, placed], slack)
    named = re.findall(r"rank (\d+)", " ".join(lines[0][1:]))
    assert (named or stages == 1) and {int(rank) for rank in named} <= set(drawn)
    picture = (tmp_path / "iteration-3.svg").read_text()
    assert picture.index("planned") < picture.index("measured")


def check_ops(events: list[dict], ops: list, asked: list, slack: float) -> None:
    """Each rank's slices are its list; when they were, in microseconds."""
    (lists, placed), zero = asked, min(stamps[0][0] for stamps in ops)
    slices = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    for rank, stamps in enumerate(ops):
        row = rank * len(lists) // len(ops)
        mine = sorted((e for e in slices if e["pid"] == rank), key=lambda e: e["ts"])
        for found, op, (start, end) in zip(mine, lists[row], stamps, strict=True):
            assert found["name"] == f"{op.kind}{op.chunk}.{op.microbatch}"
            assert found["args"] == op._asdict() | dict(stage=placed[row][op.chunk])
            assert found["ts"] / 1e6 == pytest.approx(start - zero, abs=slack)
            assert till(found) / 1e6 == pytest.approx(end - zero, abs=slack)


def check_messages(events: list[dict], ops: list, arrivals: list, slack: float) -> None:
    """A slice on the receiver from the end of the sender's op; an arrow from there to the op that uses it."""
    zero = min(stamps[0][0] for stamps in ops)
    slices = [e for e in events if e["ph"] == "X" and e["tid"] > 0]
    came = {(rank, *message): time for rank, of_rank in enumerate(arrivals) for message, time in of_rank}
    assert {(e["pid"], *e["args"].values()) for e in slices} == came.keys() and len(slices) == len(came)
    computed = {(e["pid"], e["name"]): e for e in events if e["ph"] == "X" and e["tid"] == 0}
    arrows = find_arrows(events, list(computed.values()))
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    free = Counter()
    for e in sorted(slices, key=lambda e: e["ts"]):
        thread = e["pid"], e["tid"]
        op = computed[int(threads[thread].removeprefix("from rank ")), e["name"].split(" of ")[1]]
        assert arrows[op["pid"], op["name"], e["pid"]] == 1
        assert e["ts"] == pytest.approx(till(op))
        arrival = 1e6 * (came[e["pid"], *e["args"].values()] - zero)
        assert till(e) == pytest.approx(max(e["ts"], arrival), abs=1e6 * slack)
        assert free[thread] <= e["ts"] + 1e-3  # slices of a thread do not overlap
        free[thread] = till(e)


def find_arrows(events: list[dict], computed: list[dict]) -> Counter:
    """Rank and name of the op at the beginning, rank at the end; from stage to neighbouring stage."""
    arrows = Counter()
    starts, ends = ([e for e in events if e["ph"] == ph] for ph in "sf")
    for start, end in zip(starts, ends, strict=True):
        (op,) = [e for e in computed if e["pid"] == start["pid"] and e["ts"] <= start["ts"] < till(e)]
        (user,) = [e for e in computed if (e["pid"], e["ts"]) == (end["pid"], end["ts"])]
        assert start["id"] == end["id"] and op["args"]["microbatch"] == user["args"]["microbatch"]
        assert op["args"]["stage"] - user["args"]["stage"] == (-1 if op["args"]["kind"] == "F" else 1)
        arrows[op["pid"], op["name"], user["pid"]] += 1
    return arrows


def check_summary(lines: list[str], ops: list, asked: list, slack: float) -> None:
    """Totals and bubbles: of the plan with the median of each kind and stage, of the stamps."""
    (lists, placed), copies = asked, len(ops) // len(asked[0])
    took: dict[tuple[str, int], list[float]] = {}
    for of_rank, stages, stamps in zip(lists * copies, placed * copies, ops, strict=True):
        for op, (start, end) in zip(of_rank, stamps, strict=True):
            took.setdefault((op.kind, stages[op.chunk]), []).append(end - start)
    plan = simulate(lists, placed, {key: statistics.median(times) for key, times in took.items()})
    total = max(stamps[-1][1] for stamps in ops) - min(stamps[0][0] for stamps in ops)
    busy = sum(sum(times) for times in took.values())
    expected = [(plan.total, plan.bubble), (total, (len(ops) * total - busy) / busy)]
    found = re.findall(r"([\d.]+) ms, bubble ([\d.]+) %", lines[0])
    for (milliseconds, percent), (seconds, bubble) in zip(found, expected, strict=True):
        assert float(milliseconds) / 1e3 == pytest.approx(seconds, rel=1e-3, abs=2 * slack)
        assert float(percent) / 100 == pytest.approx(bubble, abs=1e-3 + 2 * slack * (1 + bubble) / seconds)


def till(event: dict) -> float:
    return event["ts"] + event["dur"]


def test_offsets():
    """Two machines, one 500 s behind; any rank may be late by chance, and a whole machine now and then."""
    torch.manual_seed(0)
    late = torch.rand(5, 9) * torch.tensor([[0.0], [0.3], [0.0], [0.2], [0.2]])
    late[3:, 4] += 5
    exits = torch.arange(9.0).double() + late
    exits[1] -= 500
    exits[3:] -= 500
    found = offsets(exits.tolist(), ["a", "b", "a", "b", "b"])
    best = late[[1, 3, 4]].min(0).values.median().item()  # what the clock cannot resolve
    assert found[0] == found[2] == 0
    assert found[1] == found[3] == found[4] == pytest.approx(best - 500, abs=1e-6) and best < 0.1


def test_machine_is_that_of_all_processes_here():
    assert machine() == machine() > ""


class Asked:
    """Stands in for timers; what was asked of it."""

    def __init__(self) -> None:
        self.names = []

    def __call__(self, name: str, level: int):
        self.names.append((name, level))
        return contextlib.nullcontext()


def test_other_iterations_leave_nothing():
    """The timers work whatever is recorded; nothing is gathered."""
    mesh = alone()
    lists, placed = schedule("zb-h1", 1, 1), placement("zb-h1", 1)
    tracer = trace.Tracer(mesh, (3,), asked := Asked())
    tracer.begin(2, lists, placed)
    for op in [*lists[0], Op("BW", 0, 0)]:
        with tracer.op(op):
            pass
    assert tracer.end() is None
    names = ["forward-compute", "backward-compute", "weight-compute", "backward-compute"]
    assert asked.names == [(name, 2) for name in names]


class FakeStream:
    """A stream of a GPU: the time to which what was launched on it keeps it busy."""

    def __init__(self, *_) -> None:
        self.time = 0.0


class FakeGpu:
    """torch.cuda, as much as a trace needs, with streams whose time passes as ordered; a wait takes none."""

    def __init__(self, monkeypatch) -> None:
        self.main, self.ranges, gpu = FakeStream(), [], self
        self.current = self.main

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: FakeStream) -> None:
                self.time = stream.time

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, later: "Event") -> float:
                return later.time - self.time

        @contextlib.contextmanager
        def on(stream: FakeStream):
            gpu.current, before = stream, gpu.current
            yield
            gpu.current = before

        faked = dict(Event=Event, Stream=FakeStream, stream=on, synchronize=lambda device: None)
        for name, value in (faked | dict(current_stream=lambda: gpu.current)).items():
            monkeypatch.setattr(torch.cuda, name, value)
        noted = lambda name: gpu.ranges.append(name) or contextlib.nullcontext()  # noqa: E731
        monkeypatch.setattr(torch.cuda.nvtx, "range", noted)

    def work(self, time: float):
        """A message that comes then."""
        return types.SimpleNamespace(wait=lambda: setattr(self.current, "time", max(self.current.time, time)))


def test_gpu(monkeypatch):
    """What came is stamped when it came: before it is used, and before what others send comes."""
    gpu, mesh = FakeGpu(monkeypatch), types.SimpleNamespace(rank=0, device=torch.device("cuda"))
    tracer = trace.Tracer(mesh, (1,))
    lists, placed = schedule("interleaved", 3, 3, 2), placement("interleaved", 3, 2)
    tracer.begin(1, lists, placed)
    wanted = [messages(lists, placed)[1][i].uses for i in range(3)]
    other = wanted[0]._replace(source=2)
    times = {wanted[0]: 5.0, other: 3.0, wanted[1]: 9.0}
    for message, moment in times.items():
        gpu.main.time += 4  # busy until 4, 9, 13: an earlier message's arrival is not when it is waited for
        pending = Pending(torch.empty(0), [gpu.work(moment)])
        tracer.receive(message, pending)
        pending.wait()
        tracer.received(message)
    with tracer.op(lists[1][0]):
        gpu.main.time += 2
    step = tracer._step
    found = {message: step.clock.seconds(mark) for message, mark in step.arrivals.items()}
    start, end = map(step.clock.seconds, step.ops[lists[1][0]])
    base = step.clock.base_time
    assert {m: pytest.approx(1e3 * (t - base), abs=1e-6) for m, t in found.items()} == times
    assert [1e3 * (t - base) for t in (start, end)] == pytest.approx([13, 15], abs=1e-6)
    tracer.begin(2, lists, placed)
    with tracer.op(lists[1][1]):
        pass
    assert gpu.ranges == ["F0.0", "F0.1"]  # recorded or not


def alone() -> Mesh:
    return Mesh.build(ParallelConfig(), World(), torch.device("cpu"))


def recording(late: float = 0.0, microbatches: int = 2) -> Recording:
    """Two ranks of 1f1b, rank 0's last backward waits for a gradient that comes `late`."""
    lists, placed = schedule("1f1b", 2, microbatches), placement("1f1b", 2)
    events = [[e for e in simulate(lists, placed).events if e.rank == rank] for rank in (0, 1)]
    exchanges = messages(lists, placed)
    ends = {x.sends: e.end for of_rank, run in zip(exchanges, events) for x, e in zip(of_rank, run)}
    arrivals = [{m: ends[m] for x in of_rank for m in x.receives} for of_rank in exchanges]
    last = events[0][-1]
    events[0][-1] = last._replace(start=last.start + late, end=last.end + late)
    arrivals[0][[*arrivals[0]][-1]] += late
    return Recording(9, lists, placed, ["rank 0", "rank 1"], (0, 1), events, arrivals)


def test_words(tmp_path):
    """1f1b of two ranks, two microbatches: 9 units, a third of them idle, and 0.5 more."""
    lines = write(recording(0.5), tmp_path)
    planned, measured = "planned 9 ms, bubble 50.0 %", "measured 9.5 ms, bubble 58.3 %"
    assert lines[0] == f"iteration 9: {planned} of ideal time 6 ms | {measured} of ideal time 6 ms"
    assert "BW for both" in lines[1] and "no optimizer" in lines[1]
    assert lines[2].endswith("rank 0 F 1, BW 2; rank 1 F 1, BW 2")
    assert lines[3:5] == [
        "the waits furthest above plan:",
        "rank 0 waited 1.5 ms (planned 1) before BW0.1 (chunk 0, microbatch 1) for the gradient from rank 1",
    ]
    early = recording(0.5)
    early.arrivals[0][[*early.arrivals[0]][-1]] = 6.1
    assert "BW0.1 (chunk 0, microbatch 1) though what it needs was there" in write(early, tmp_path)[4]


def test_plan_takes_the_median_of_each_kind_and_stage():
    """Not their nominal cost, and not that of the one op in three that took ten times as long."""
    slow = recording(microbatches=3)
    for run in slow.events:
        for i, e in enumerate(run):
            cost = {"F": 2, "BW": 7}[e.op.kind] * (2 if e.rank else 1) * (10 if e.op.microbatch == 1 else 1)
            run[i] = e._replace(start=100 * i, end=100 * i + cost)
    planned, measured = slow.timelines()
    busy = 3 * (4 + 14)  # of rank 1, which waits for one forward, and rank 0 for its last gradient
    assert planned.total == 2 + busy + 7 and planned.bubble == pytest.approx(
        (2 * 63 - 1.5 * busy) / (1.5 * busy)
    )
    busy = (2 + 20 + 2 + 7 + 70 + 7) * 3
    assert measured.total == 514 and measured.bubble == pytest.approx((2 * 514 - busy) / busy)


def test_a_wait_beyond_plan_is_named(tmp_path):
    """Short as it is, and no wait that is as planned."""
    slow = recording()
    slow.events[1] = [slow.events[1][0]] + [
        e._replace(start=e.start + 0.3, end=e.end + 0.3) for e in slow.events[1][1:]
    ]
    assert "rank 1 waited 0.3 ms (planned 0) before BW0.0 " in write(slow, tmp_path)[4]
    planned = write(recording(), tmp_path)
    assert planned[3] == "hardly a wait above plan" and "waited" not in str(planned)


def test_the_longest_wait_comes_first(tmp_path):
    slow = recording()
    for at, late in (1, 0.3), (2, 0.9):
        behind = [e._replace(start=e.start + late, end=e.end + late) for e in slow.events[1][at:]]
        slow.events[1] = slow.events[1][:at] + behind
    longest, shorter = write(slow, tmp_path)[4:6]
    assert "waited 0.9 ms (planned 0) before F0.1 " in longest and "waited 0.3 ms (planned 0)" in shorter


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    lines = write(recording(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-9.json"]
    assert f"wrote {tmp_path}/iteration-9.json;" in lines[-1]
    assert lines[-2] == "the picture of iteration 9 needs matplotlib: pip install matplotlib"


def test_picture(tmp_path):
    """Both timelines are there, in the colours of the schedules; messages are drawn on the lower alone."""
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    write(recording(0.5), tmp_path)
    pixels = imread(tmp_path / "iteration-9.png")[..., :3]
    blue, grey = (
        (abs(pixels - torch.tensor(rgb).numpy() / 255) < 0.01).all(-1) for rgb in ([0, 114, 178], [105] * 3)
    )
    rows = blue.any(1).nonzero()[0]
    middle = (rows[0] + rows[-1]) // 2
    legend = 20 * 20
    assert blue[:middle].sum() == pytest.approx(blue[middle:].sum(), rel=0.15, abs=legend)
    assert grey[middle:].sum() > 2 * grey[:middle].sum()

"""Pipeline schedules as pure data: the ops of each rank in order, the messages between ranks, a simulator.

Tests: tests/test_schedules.py. Page: docs/pipeline.md.

    name         bubble / ideal time      peak activations, in microbatches of a rank's layers   source
    gpipe        (p-1) / m                m                                                      1811.06965
    1f1b         (p-1) / m                p                                                      2006.09503
    interleaved  (p-1) / (v m)            p (1 + (p-1) / (p v)), for groups of p microbatches    2104.04473
    zb-h1        (p-1) / (3 m)            p                                                      2401.10241
    zb-v         (p-1) / (6 m)            p                                                      2405.15362

p ranks, m microbatches, v model chunks per rank; equal times of F, B and W; m >= p, for zb-v m >= 2p - 1.
Sources are arXiv numbers. Nothing here needs torch or a second process. To print and draw a schedule:

    nanomegatron schedules --schedule interleaved --stages 4 --microbatches 8 --chunks 2

In the pictures a row is a rank and a cell a unit of time; F0b is the forward of microbatch 0 through chunk b.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, chain, count
from typing import NamedTuple


class Op(NamedTuple):
    """One unit of work: F forward, B gradient of the input, W gradient of the weights, BW both at once."""

    kind: str
    chunk: int
    microbatch: int

    @property
    def result_kind(self) -> str:
        """F activations, B the gradient of the input (of a BW, too), W the gradient of the weights."""
        return self.kind[0]


class Message(NamedTuple):
    """What a stage gives another: activations (F) to the next one, their gradients (B) to the one before.

    It is for the stage `stage`. If both stages are on one rank, it stays there: `is_local`.
    """

    source: int
    destination: int
    kind: str
    stage: int
    microbatch: int

    @property
    def link(self) -> tuple[int, int]:
        """The ranks (source, destination), whose messages arrive in the order in which they are sent."""
        return self.source, self.destination

    @property
    def is_local(self) -> bool:
        return self.source == self.destination


class Exchange(NamedTuple):
    """An op's messages: those to receive from other ranks before it, its input, its result.

    Links (ordered pairs of ranks) are FIFO: before an op's message the earlier ones of the link are received
    and kept for the ops that use them.
    """

    receives: tuple[Message, ...]
    uses: Message | None  # None: the op begins with tokens, with the loss, or is a W
    sends: Message | None  # None: no other stage needs the result


class Event(NamedTuple):
    """An op with its start and end time."""

    rank: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The result of `simulate`. Bubbles are idle / busy time; peaks count the activations of one chunk."""

    events: list[Event]  # rank by rank, in order
    total: float
    bubbles: list[float]  # of each rank
    bubble: float  # of all ranks together
    peak_until_backward: list[int]  # of each rank: most forwards whose input gradient is not computed yet
    peak_until_weight: list[int]  # of each rank: most forwards whose weight gradient is not computed yet


# Every schedule takes the microbatches of a chunk in order, so these functions omit the microbatch: "F" of
# a chunk is its forward for the next microbatch. With fewer microbatches than fill the pipeline they write
# the order for as many as fill it, n, and `schedule` drops the ops of those that are not there.
KindAndChunk = tuple[str, int]


def gpipe(microbatches: int, chunks: int) -> list[KindAndChunk]:
    """All forwards, then all backwards; with chunks, one chunk after the other (breadth first, 2211.05953).

    rank 0  F0  F1  F2  .   .   .   .   .   .   BW0==== BW1==== BW2====
    rank 1  .   F0  F1  F2  .   .   .   BW0==== BW1==== BW2====
    rank 2  .   .   F0  F1  F2  BW0==== BW1==== BW2====
    """
    forwards = [("F", chunk) for chunk in range(chunks) for _ in range(microbatches)]
    backwards = [("BW", chunk) for chunk in reversed(range(chunks)) for _ in range(microbatches)]
    return forwards + backwards


def one_f_one_b(rank: int, stages: int, microbatches: int) -> list[KindAndChunk]:
    """One forward for each later rank, then alternately a forward and a backward, then the other backwards.

    rank 0  F0  F1  F2  .   .   .   .   BW0==== F3  BW1==== .   BW2==== .   BW3====
    rank 1  .   F0  F1  .   .   BW0==== F2  BW1==== F3  BW2==== .   BW3====
    rank 2  .   .   F0  BW0==== F1  BW1==== F2  BW2==== F3  BW3====
    """
    ahead = stages - 1 - rank
    n = max(microbatches, stages)
    forward = ("F", 0)
    backward = ("BW", 0)
    warm_up = [forward] * ahead
    steady = [forward, backward] * (n - ahead)
    cool_down = [backward] * ahead
    return warm_up + steady + cool_down


def interleaved(
    rank: int, stages: int, microbatches: int, chunks: int, group: int | None = None
) -> list[KindAndChunk]:
    """1f1b with `chunks` model chunks per rank, in groups of `group` microbatches (None: `stages`).

    A group runs through chunk 0, then chunk 1 ...; backwards do the same from the last chunk down. The order
    is Megatron's for all sizes that Megatron accepts. Megatron refuses a last group of fewer than `stages`
    microbatches, as it can deadlock; here these are divided among the other groups, with the same bubble.

    rank 0  F0a  F1a  F0b  F1b  .    .    BW0b===== .    BW1b===== BW0a===== BW1a=====
    rank 1  .    F0a  F1a  F0b  BW0b===== F1b  BW1b===== BW0a===== BW1a=====
    """
    sizes = _group_sizes(microbatches, stages, group or stages)
    forwards = [("F", chunk) for size in sizes for chunk in range(chunks) for _ in range(size)]
    backwards = [("BW", chunk) for size in sizes for chunk in reversed(range(chunks)) for _ in range(size)]
    ahead = min(2 * (stages - 1 - rank) + (chunks - 1) * max(stages, *sizes), len(forwards))
    steady = [op for pair in zip(forwards[ahead:], backwards) for op in pair]
    return forwards[:ahead] + steady + backwards[len(forwards) - ahead :]


def _group_sizes(microbatches: int, stages: int, group: int) -> list[int]:
    """Return the groups' sizes: `group`; less for the last if it fills the pipeline or is the only one."""
    full, rest = divmod(microbatches, group)
    if full and rest < stages:
        return [group + rest // full + (i < rest % full) for i in range(full)]
    return [group] * full + [rest]


def zb_h1(rank: int, stages: int, microbatches: int) -> list[KindAndChunk]:
    """1f1b with deferred weight gradients, more of them on later ranks, to fill the bubble at the end.

    rank 0  F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
    rank 1  .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
    rank 2  .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """
    ahead = stages - 1 - rank
    n = max(microbatches, stages)
    f, b, w = [(kind, 0) for kind in "FBW"]
    warm_up = [f] * ahead
    deferring = [f, b] * rank
    steady = [f, b, w] * (n - stages + 1)
    cool_down = [b, w] * ahead
    deferred = [w] * rank
    return warm_up + deferring + steady + cool_down + deferred


def zb_v(rank: int, stages: int, microbatches: int) -> list[KindAndChunk]:
    """Two chunks per rank, placed down the ranks and up again, so that the loss is on the first rank.

    rank 0  F0a F1a F2a F0b B0b W0b F1b B1b W1b B0a W0a F2b B2b W2b B1a W1a B2a W2a
    rank 1  .   F0a F0b F1a F1b B0b W0b F2a B0a W0a F2b B1b W1b B1a B2b B2a W1a W2b W2a
    """
    n = max(microbatches, 2 * stages - 1)
    left = stages - rank  # ranks from this one to the tip of the V
    fa, ba, wa = [(kind, 0) for kind in "FBW"]
    fb, bb, wb = [(kind, 1) for kind in "FBW"]
    warm_up = [fa] * (2 * left - 1)  # until the first microbatch is back at this rank
    filling = [fb, fa] * rank + [fb, bb, wb] * left
    steady = [fa, ba, wa, fb, bb, wb] * (n - 2 * stages + 1 + rank)
    cool_down = [ba, wa, fb, bb, wb] * (left - 1)
    deferring = [ba, bb] * rank + [ba, wa] * left
    deferred = [wb] * rank + [wa] * rank
    return warm_up + filling + steady + cool_down + deferring + deferred


NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
CHUNKS = {"1f1b": 1, "zb-h1": 1, "zb-v": 2}  # per rank; the other schedules take any number


def schedule(
    name: str, stages: int, microbatches: int, chunks: int = 1, group: int | None = None
) -> list[list[Op]]:
    """Return the ops of each pipeline rank, in order.

    stages: number of pipeline ranks. chunks: model chunks per rank: any number for gpipe and interleaved;
    zb-v always has two.
    group: for interleaved, the microbatches that a chunk runs before the next chunk does; None: `stages`.

    Raises ValueError for an unknown name, or for numbers that the schedule does not take.
    """
    _check(name, stages, chunks)
    if microbatches < 1:
        raise ValueError(f"{microbatches} microbatches: a schedule needs at least one")
    if group is not None and (name != "interleaved" or group < stages):
        raise ValueError(f"{name} in groups of {group}: only for interleaved, of at least {stages} (stages)")
    order = {
        "gpipe": lambda rank: gpipe(microbatches, chunks),
        "1f1b": lambda rank: one_f_one_b(rank, stages, microbatches),
        "interleaved": lambda rank: interleaved(rank, stages, microbatches, chunks, group),
        "zb-h1": lambda rank: zb_h1(rank, stages, microbatches),
        "zb-v": lambda rank: zb_v(rank, stages, microbatches),
    }[name]
    return [_numbered(order(rank), microbatches) for rank in range(stages)]


def _check(name: str, stages: int, chunks: int) -> None:
    if name not in NAMES:
        raise ValueError(f"schedule {name!r}: must be one of {', '.join(NAMES)}")
    if stages < 1 or chunks < 1:
        raise ValueError(f"{stages} stages of {chunks} chunks: at least one of each")
    if chunks > CHUNKS.get(name, chunks):
        raise ValueError(f"{name} with {chunks} chunks a rank: interleaved and gpipe take more chunks")


def _numbered(order: list[KindAndChunk], microbatches: int) -> list[Op]:
    """Give the ops their microbatches; drop ops past the last one, which only gave the order its shape."""
    following = defaultdict(count)
    ops = [Op(kind, chunk, next(following[kind, chunk])) for kind, chunk in order]
    return [op for op in ops if op.microbatch < microbatches]


def placement(name: str, stages: int, chunks: int = 1) -> list[list[int]]:
    """`[rank][chunk]` -> stage of the model, 0 ... stages * chunks - 1; a V for zb-v, else a loop."""
    _check(name, stages, chunks)
    if name == "zb-v":
        return [[rank, 2 * stages - 1 - rank] for rank in range(stages)]
    return [[chunk * stages + rank for chunk in range(chunks)] for rank in range(stages)]


def owners(placed: list[list[int]]) -> dict[int, int]:
    """Return {stage: rank}."""
    return {stage: rank for rank, stages in enumerate(placed) for stage in stages}


def embedding_ranks(placed: list[list[int]]) -> tuple[int, int]:
    """The ranks of the first and of the last stage, which computes the loss; for zb-v the same rank."""
    rank_of = owners(placed)
    return rank_of[0], rank_of[len(rank_of) - 1]


def messages(lists: list[list[Op]], placed: list[list[int]]) -> list[list[Exchange]]:
    """The messages of every op of every rank, derived from lists and placement, so that both ends agree.

    The sender's list gives the order of the messages on a link.

    Raises ValueError if an op uses a message that is never sent, or no op uses one that is sent.
    """
    rank_of = owners(placed)
    sends = [[sent_by(op, stages[op.chunk], rank_of) for op in ops] for ops, stages in zip(lists, placed)]
    links = defaultdict(deque)  # messages in the order in which they are sent
    for sent in filter(None, chain(*sends)):
        if not sent.is_local:
            links[sent.link].append(sent)
    exchanges = []
    kept = set()  # received, and not used yet
    for ops, stages, rank_sends in zip(lists, placed, sends):
        exchanges.append([])
        for op, sent in zip(ops, rank_sends):
            used = used_by(op, stages[op.chunk], rank_of)
            receives = []
            while used and not used.is_local and used not in kept:
                if not links[used.link]:
                    raise ValueError(f"{used} is never sent")
                receives.append(links[used.link].popleft())
                kept.add(receives[-1])
            kept.discard(used)
            exchanges[-1].append(Exchange(tuple(receives), used, sent))
    if unused := [*kept, *chain(*links.values())]:
        raise ValueError(f"messages that no op uses: {sorted(unused)}")
    return exchanges


def sent_by(op: Op, stage: int, rank_of: dict[int, int]) -> Message | None:
    """The message with the result of an op on a stage, for the next stage (F) or the one before (B)."""
    return used_by(op, stage + 1 if op.kind == "F" else stage - 1, rank_of)


def used_by(op: Op, stage: int, rank_of: dict[int, int]) -> Message | None:
    """The message that an op on a stage needs, from the stage before it (F) or after it (B).

    None if one of the two stages does not exist, and for W, which stays in its stage.
    """
    source = stage - 1 if op.kind == "F" else stage + 1
    if op.kind == "W" or source not in rank_of or stage not in rank_of:
        return None
    return Message(rank_of[source], rank_of[stage], op.result_kind, stage, op.microbatch)


def simulate(
    lists: list[list[Op]],
    placed: list[list[int]],
    costs: Mapping[str | tuple[str, int], float] | None = None,
    message_time: float = 0.0,
) -> Timeline:
    """Run the lists, each op as soon as its rank is free and its inputs have arrived.

    costs: time of an op of each kind (None: F = B = W = 1; BW = B + W unless given), and of (kind, stage) for
    stages that differ. Messages take `message_time`, overlapped with ops; between chunks of one rank they
    take none.

    Raises ValueError on a deadlock, with the waiting ranks and ops.
    """
    costs = {"F": 1, "B": 1, "W": 1} | dict(costs or {})
    costs.setdefault("BW", costs["B"] + costs["W"])
    rank_of = owners(placed)
    done = {}
    runs = [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        waiting = []
        for rank, (ops, run) in enumerate(zip(lists, runs)):
            while len(run) < len(ops):
                op = ops[len(run)]
                stage = placed[rank][op.chunk]
                needs = _needs(op, stage, rank_of)
                if missing := [need for need in needs if need not in done]:
                    waiting.append((rank, op, missing))
                    break
                ready = [done[need] + message_time * (rank_of[need[1]] != rank) for need in needs]
                start = max([run[-1].end if run else 0, *ready])
                run.append(Event(rank, op, start, start + costs.get((op.kind, stage), costs[op.kind])))
                done[op.result_kind, stage, op.microbatch] = run[-1].end
                moved = True
    if waiting:
        waits = (f"rank {rank} at {op} waits for {missing}" for rank, op, missing in waiting)
        raise ValueError(f"deadlock: {'; '.join(waits)} (kind, stage, microbatch)")
    return timeline_of(runs)


def _needs(op: Op, stage: int, rank_of: dict[int, int]) -> list[tuple[str, int, int]]:
    """(kind, stage, microbatch) of the ops whose results an op needs; a BW counts as the B in it."""
    if op.kind == "W":
        return [("B", stage, op.microbatch)]
    needs = [("F", stage - 1 if op.kind == "F" else stage, op.microbatch)]
    if op.kind != "F":
        needs.append(("B", stage + 1, op.microbatch))
    return [need for need in needs if need[1] in rank_of]


def timeline_of(runs: list[list[Event]]) -> Timeline:
    """Return the Timeline of the events of each rank, in order."""
    total = max(run[-1].end for run in runs)
    busy = [sum(event.end - event.start for event in run) for run in runs]
    return Timeline(
        events=[event for run in runs for event in run],
        total=total,
        bubbles=[(total - time) / time for time in busy],
        bubble=(len(runs) * total - sum(busy)) / sum(busy),
        peak_until_backward=[most_open([event.op for event in run]) for run in runs],
        peak_until_weight=[most_open([event.op for event in run], ("W", "BW")) for run in runs],
    )


def most_open(ops: list[Op], last: tuple[str, str] = ("B", "BW")) -> int:
    """The largest number of a rank's forwards (each of one chunk) that wait for their `last` op at a time."""
    return max(accumulate((op.kind == "F") - (op.kind in last) for op in ops), default=0)

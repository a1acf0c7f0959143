"""The hang watch-dog: a thread in each process that ends a run in which a rank waits too long for others.

    main thread      step, communications, waits ----> mesh.observer: steps, numbers, what it waits for
    watch-dog        every tick: heartbeat of this rank -> store; has another rank found a hang?
                     this rank has waited for T / 2: read all heartbeats; for T: read them again, report, end
    guard            T + LATE, in case that the store does not answer: report without the other ranks, end

T is --hang-timeout-secs, by default a bit less than torch's own timeout. Until the first step is done it is
at least that default. Only a rank that waits, for a communication or for a GPU that does one, is in a hang;
or one that launches a step's work on a GPU: it waits there once it is a thousand launches ahead. Data
building, saving and steps of a CPU are not limited, but for a rank that has started neither a step nor a
communication for SILENT x T. Time in which the process itself was stopped does not count.

A rank whose heartbeat is the same as T / 2 ago does not answer: it is stopped, or its machine is lost. One
that answers and does not wait is named with the function that it is in. All others are named with what they
wait for, and for which ranks: those that have started fewer communications over that axis. One that launches
waits if there are such ranks. Every live rank writes the stacks of its threads to runs/NAME/hang.RANK.txt,
status.json says "failed", and all leave.
"""

import datetime
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanomegatron.config.settings import Config
from nanomegatron.mesh import Mesh, World
from nanomegatron.report.log import HANG, RunLog
from nanomegatron.report.traffic import Call, Traffic

SHARE = 0.9  # of torch's timeout of collectives: the default of T
SILENT = 10  # times T: without a step and without a communication
LAST_WORD = 0.3  # seconds in which rank 0 has its say before it sees that the others leave
LATE = 1.5  # seconds in which the report must be done
MOST = 8  # ranks, or groups of them, that a message lists
Beat = dict[str, Any]  # n, host, place, call (a `Call`) or None, waits, numbers by axis


class Standstill:
    """Measures how long a rank has stood still, as a share of the time that it may; call it every `tick`."""

    def __init__(self, traffic: Traffic, asked: float | None, timeout: float) -> None:
        """asked: --hang-timeout-secs; timeout: of collectives, in seconds."""
        self.traffic, self.default = traffic, SHARE * timeout
        self.limit = asked or self.default
        self.tick = min(max(self.limit / 40, 0.1), 5.0)
        self.state, self.seconds, self.before = (0, None, None), 0.0, time.monotonic()

    def share(self) -> float:
        """Return the share: 1 is a hang."""
        state = self.traffic.steps, self.traffic.last, self.traffic.waiting
        now = time.monotonic()
        self.seconds += min(now - self.before, 2 * self.tick)
        if state != self.state:
            self.state, self.seconds = state, 0.0
        self.before = now
        started = self.traffic.steps > 1
        if self.traffic.waiting is None and not self.traffic.launching:
            return self.seconds / (SILENT * self.limit) if started else 0.0
        return self.seconds / (self.limit if started else max(self.limit, self.default))


class Watchdog:
    """Watches this rank from `with` to its end. A single process is watched only if T is given."""

    def __init__(self, config: Config, mesh: Mesh, log: RunLog, world: World) -> None:
        """world: its launcher; the process ends with it, and status.json says so."""
        asked, minutes = config.run.hang_timeout_secs, config.parallel.distributed_timeout_minutes
        self.mesh, self.log = mesh, log
        self.agent = world.agent
        world.last_words.append(lambda: self.orphaned("the launcher, or its fork server,"))
        self.standstill = lambda: Standstill(mesh.observer, asked, 60 * minutes)
        self.limit, self.tick = self.standstill().limit, self.standstill().tick
        self.wanted = mesh.world.size > 1 or asked is not None
        self.store = mesh.connect_store() if self.wanted else None
        self.host, self.beats = socket.gethostname(), 0
        self.closed, self.ending = threading.Event(), threading.Lock()
        works = (self.watch, self.guard) if self.wanted else (self.guard,) if self.agent else ()
        self.threads = [threading.Thread(target=work, daemon=True) for work in works]

    def __enter__(self) -> "Watchdog":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        for thread in self.threads:
            thread.join(1.0)  # longer only if the store does not answer

    def watch(self) -> None:
        """The thread that uses the store, each call of which may block for ever."""
        standstill, earlier = self.standstill(), None
        with suppress(RuntimeError):
            self.beat()  # at once: it says the host, also of a rank that is soon stopped
        while not self.closed.wait(self.tick):
            share = standstill.share()
            with suppress(RuntimeError):  # torch's, if the store is gone: the guard is left
                self.beat()
                if self.store.check(["hang"]):
                    self.end(lambda: ("", ""))
                if share < 0.5:
                    earlier = None
                elif earlier is None:
                    earlier = self.all_beats()
                if share >= 1:
                    self.end(lambda before=earlier: self.report(before, self.all_beats()))

    def guard(self) -> None:
        """The thread that ends the process if `watch` does not, or if torchrun's agent was killed."""
        standstill = self.standstill()
        while not self.closed.wait(min(self.tick, 1.0)):
            if self.agent and os.getppid() != self.agent:
                threading.Timer(1.0, os._exit, (1,)).start()  # whatever else blocks
                self.orphaned("torchrun")
                os._exit(1)
            if self.wanted and (standstill.share() - 1) * self.limit >= LATE:
                self.end(lambda: self.report({}, {}))

    def orphaned(self, parent: str) -> None:
        """Log that the parent was killed; rank 0, which holds the folder's lock, puts it into status.json."""
        text = f"{parent} was killed (out of memory? see dmesg): this process ends, too"
        if self.mesh.rank:
            time.sleep(LAST_WORD)
        elif not self.closed.is_set():
            self.log.status("failed", exit_code=1, message=text)
        self.log.warn(text)

    # Heartbeats

    def beat(self) -> None:
        """Publish what this rank does, a `Beat`."""
        self.beats += 1
        traffic, waiting = self.mesh.observer, self.mesh.observer.waiting
        call = waiting[0] if waiting else traffic.last if traffic.launching else None
        mine = dict(
            n=self.beats,
            host=self.host,
            place=place(),
            call=call,
            waits=waiting is not None,
            numbers=list(traffic.numbers.items()),
        )
        self.store.set(f"beat/{self.mesh.rank}", json.dumps(mine))

    def all_beats(self) -> dict[int, Beat]:
        """Return the last heartbeat of each rank that has published one, without calls that wait for none."""
        keys = {rank: f"beat/{rank}" for rank in range(self.mesh.world.size)}
        beats = {r: json.loads(self.store.get(key)) for r, key in keys.items() if self.store.check([key])}
        for beat in beats.values():
            if beat["call"] and not (beat["waits"] or late(beat["call"], self.mesh.groups, beats)):
                beat["call"] = None
        return beats

    # The end

    def end(self, report: Callable[[], tuple[str, str]]) -> None:
        """Write the stacks and, on the first rank of all, the report; end the process within some ticks.

        report: returns who is to blame, and the text; "" if another rank was the first.
        """
        if not self.ending.acquire(blocking=False):
            return
        wait = 2 * self.tick + 0.5
        threading.Timer(wait + 1.0, os._exit, (1,)).start()  # whatever else blocks
        self.dump_stacks()
        who, text = report()
        if text and self.claim():
            self.log.status("failed", exit_code=1, message=text, rank=who)
            self.log.warn(text)
        with suppress(RuntimeError):
            self.store.set("hang", "")
            self.store.set(f"hang/{self.mesh.rank}", "")
            keys = [f"hang/{rank}" for rank in range(self.mesh.world.size)]
            self.store.wait(keys, datetime.timedelta(seconds=wait))
        os._exit(1)

    def claim(self) -> bool:
        """Whether this rank is the first to report; if the store does not answer, it does."""
        first: list[int] = []
        thread = threading.Thread(target=lambda: first.append(self.store.add("hang/first", 1)), daemon=True)
        thread.start()
        thread.join(0.5)
        return first in ([], [1])

    def dump_stacks(self) -> None:
        """Write what this rank does, and the stacks of all its threads, to a file of its own."""
        path = Path(self.log.folder) / f"hang.{self.mesh.rank}.txt"
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            traffic = self.mesh.observer
            doing = f"waits in {traffic.waiting[0]}" if traffic.waiting else f"in {place()}"
            file.write(f"{self.mesh.label} on {self.host}: {doing}; last started: {traffic.last}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def report(self, before: dict[int, Beat], now: dict[int, Beat]) -> tuple[str, str]:
        """Return who keeps this rank waiting, by the heartbeats of T / 2 ago and of now, and a text on it."""
        waiting, ranks = self.mesh.observer.waiting, range(self.mesh.world.size)
        who, words = "", [f"{HANG}: {self.mesh.label} has made no progress for {self.limit:g} s"]
        if len(ranks) > 1 and now:
            who = listed(silent(ranks, before, now) or [r for r in now if now[r]["call"] is None])
            words += blame(self.mesh.groups, before, now)
        elif waiting and waiting[0]:
            words[0] += f", in {waiting[0]}"
        if len(ranks) > 1 and not now:
            words.append("the store of the ranks does not answer: is its machine lost?")
        stacks = f"the stacks of all live ranks are in {self.log.folder}/hang.*.txt"
        return who or self.mesh.label, "; ".join([*words, stacks])


def place() -> str:
    """Return the function that the main thread is in, without torch's own."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame and frame.f_back and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return (
        f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})" if frame else "?"
    )


def silent(ranks: Iterable[int], before: dict[int, Beat], now: dict[int, Beat]) -> list[int]:
    """Return the ranks that do not answer."""
    return [r for r in ranks if r not in now or now[r]["n"] == before.get(r, {}).get("n")]


def blame(groups: dict[str, list], before: dict[int, Beat], now: dict[int, Beat]) -> list[str]:
    """Return a text for each rank that does not answer, that does not wait, and for each awaited call.

    groups: of all axes, as in Mesh.
    """
    lost = silent(groups["world"][0], before, now)
    alive = {rank: beat for rank, beat in now.items() if rank not in lost}
    texts = [f"{named(r, now)} does not answer: it is stopped, or its machine is lost" for r in lost]
    texts += [f"{named(r, now)} is in {b['place']}" for r, b in alive.items() if b["call"] is None][:MOST]
    calls: dict[Call, list[int]] = {}
    for rank, beat in alive.items():
        if beat["call"]:
            kind, size, number, key = beat["call"]
            calls.setdefault(Call(kind, size, number, tuple(key)), []).append(rank)
    for call, ranks in calls.items():
        behind = late(call, groups, now)
        for_whom = f", for {listed(behind)}" if behind else ""
        texts.append(f"{listed(ranks)} wait{'s' * (len(ranks) == 1)} in {call}{for_whom}")
    return texts[:MOST] + [f"and {len(texts) - MOST} more"] * (len(texts) > MOST)


def late(call: Iterable, groups: dict[str, list], beats: dict[int, Beat]) -> list[int]:
    """Return the ranks of a call's axis that have not started it. call: as in `Beat`."""
    *_, number, (name, *ends) = call
    group = next((g for g in groups.get(name, ()) if [g[0], g[-1]] == ends), ends)  # or a link
    numbers = {r: n for r, beat in beats.items() for key, n in beat["numbers"] if key == [name, *ends]}
    return [rank for rank in group if numbers.get(rank, 0) < number]


def named(rank: int, beats: dict[int, Beat]) -> str:
    """Return 'rank 3 on HOST', as far as the host is known."""
    return f"rank {rank} on {beats[rank]['host']}" if rank in beats else f"rank {rank}"


def listed(ranks: Iterable[int]) -> str:
    """Return 'rank 3', 'ranks 0 1 2', or the first of many; "" of none."""
    if not (ranks := list(ranks)):
        return ""
    more = f" and {len(ranks) - MOST} more" * (len(ranks) > MOST)
    return f"rank{'s' * (len(ranks) > 1)} {' '.join(map(str, ranks[:MOST]))}{more}"

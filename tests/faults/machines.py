"""Rows M1 and L1, on two machines: network namespaces that a cable (veth) joins. Needs root."""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from random import Random

from tests.faults.kills import restarted_equal
from tests.faults.runs import ROOT, STEPS, Job, MissedError, Place, is_alive, spawn, tail

ADDRESS = "10.77.0."
NAMED = 30.0  # seconds in which a cut cable is named
LAYOUTS_APART = {"dp2": 1, "pp2": 1, "tp2sp": 1, "tp2pp2": 2}  # and the ranks on each machine


def ip(*words: str) -> None:
    """Run the command `ip`. Raises CalledProcessError with what it said."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@cache
def not_permitted() -> str:
    """Why no second machine can be made here, or nothing."""
    try:
        with two_machines():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        return f"needs root and `ip netns`: {why.strip()}"


@contextmanager
def two_machines() -> Iterator[list[str]]:
    """Make two machines and the cable between them; yields their names."""
    names = [f"fault{os.getpid()}{letter}" for letter in "ab"]
    cable = [f"fc{os.getpid() % 10**6}{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for number, (name, end) in enumerate(zip(names, cable), 1):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "link", "set", end, "name", "cable")
            ip("-n", name, "addr", "add", f"{ADDRESS}{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start_apart(place: Place, case: str, layout: str, machines: list[str], flags: str = "") -> Job:
    """Start a run on both machines."""
    each, (_, argv) = LAYOUTS_APART[layout], place.arguments(layout, flags)
    folder = place.folder / case
    folder.mkdir(exist_ok=True)
    agents = []
    for number, name in enumerate(machines):
        agent = (
            f"-m torch.distributed.run --nnodes 2 --nproc-per-node {each} --node-rank {number} "
            f"--rdzv-id {case} --rdzv-backend c10d --rdzv-endpoint {ADDRESS}1:29500 "
            f"--rdzv-conf is_host={number == 0} --local-addr {ADDRESS}{number + 1} --max-restarts 3"
        )
        inside = ("ip", "netns", "exec", name, "env", "GLOO_SOCKET_IFNAME=cable")
        words = [*agent.split(), str(ROOT / "train.py"), *argv]
        agents.append(spawn(words, folder, inside, f"out{number}.txt"))
    return place.started(Job(folder, agents, "torchrun"))


def m1(place: Place, seed: int) -> str:
    """SIGKILL to a random rank of two machines at a random moment: both start again, to equal bits."""
    rng, layout = Random(f"M1 {seed}"), list(LAYOUTS_APART)[seed % len(LAYOUTS_APART)]
    pace, size = place.reference(layout).pace, 2 * LAYOUTS_APART[layout]
    with two_machines() as machines:
        for number in range(5):
            job = start_apart(place, f"M1-{seed}.{number}", layout, machines)
            try:
                ranks = job.reach(rng.randrange(STEPS - 1), 2 * pace * rng.random(), size)
                rank = rng.choice(sorted(ranks))
                job.kill(ranks[rank])
            except MissedError:
                job.wait()
                continue
            where = restarted_equal(place, job, layout).removeprefix("torchrun, ")
            return f"machine {rank // LAYOUTS_APART[layout]}, {where}"
    raise AssertionError("the runs were over too soon")


def l1(place: Place, seed: int) -> str:
    """The cable is cut in a step: within 30 seconds the ranks behind it are named, and all have ended."""
    rng, layout = Random(f"L1 {seed}"), list(LAYOUTS_APART)[seed % len(LAYOUTS_APART)]
    each = LAYOUTS_APART[layout]
    with two_machines() as machines:
        flags = "--train-iters 100000 --save-interval 1000 --hang-timeout-secs 10"
        job = start_apart(place, f"L1-{seed}", layout, machines, flags)
        ranks = job.reach(rng.randrange(3, 20), rng.random() * 0.1, 2 * each)
        ip("-n", machines[0], "link", "set", "cable", "down")
        began = time.monotonic()
        lost = "|".join(str(rank) for rank in range(each, 2 * each))
        named = rf"rank ({lost})\b[^;]* does not answer"
        while not re.search(named, (job.folder / "out0.txt").read_text()):
            assert time.monotonic() - began < NAMED, (
                f"nothing is named in {NAMED} seconds: {tail(job.text())}"
            )
            time.sleep(0.1)
        seconds = time.monotonic() - began
        for pid in ranks.values():
            while is_alive(pid):
                assert time.monotonic() - began < NAMED, f"ranks are there after {NAMED} seconds"
                time.sleep(0.1)
        job.end()
    return f"named after {seconds:.0f} seconds"

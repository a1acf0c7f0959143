"""Row Q1: one run for half an hour with a fault each minute; the same command restarts it until it ends."""

import signal
import time
from collections import Counter
from random import Random

from nanomegatron.faults.signals import PREEMPTED
from tests.faults.damage import files_of, flip
from tests.faults.hooks import Hooks
from tests.faults.runs import FIVE, LAYOUTS, Job, MissedError, Place, iterations, tail

SLEEP = 0.25  # seconds that a step takes longer than in the undisturbed run, which is thereby much shorter
FAULTS = (
    "a rank killed",
    "all ranks killed",
    "the launcher killed",
    "SIGTERM",
    "SIGTERM to a rank",
    "a rank stopped for some seconds",
    "a rank killed and a bit flipped",
)
BETWEEN = 60.0  # seconds from fault to fault, on average


def q1(place: Place, seed: int) -> str:
    """A random fault each minute; the run ends by itself, equal to the undisturbed one."""
    rng, layout, case = Random(f"Q1 {seed}"), FIVE[seed % 5], f"Q1-{seed}"
    steps = max(20, int(60 * place.minutes / (SLEEP + 0.05)))
    flags = f"--train-iters {steps} --save-interval {max(2, min(20, steps // 10))}"
    place.reference(layout, flags, seconds=30 * place.minutes + 60)
    between, counts = min(BETWEEN, 10 * place.minutes), Counter()
    end = time.monotonic() + 180 * place.minutes + 60
    while True:
        job = place.start(case, layout, flags, hooks=Hooks(step=SLEEP))
        while not job.over():
            assert time.monotonic() < end, "it comes to no end"
            calm(job, rng.expovariate(1 / between))
            fault = rng.choice(FAULTS)
            counts[fault] += disturb(job, rng, fault, LAYOUTS[layout][0])
        code = job.wait()
        if code == 0:
            break
        assert code in (1, PREEMPTED, -signal.SIGKILL), f"exit code {code}: {tail(job.text())}"
        job.end()  # the ranks of a launcher that was killed
    place.expect_equal(case, layout, flags)
    assert sum(counts.values()), "it has met no fault"
    kinds = ", ".join(f"{n} x {name}" for name, n in counts.items() if n)
    return f"{place.minutes:g} minutes, {sum(counts.values())} faults: {kinds}"


def calm(job: Job, seconds: float) -> None:
    """Let the run go on for some time, or to its end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not job.over():
        time.sleep(0.02)


def disturb(job: Job, rng: Random, fault: str, size: int) -> bool:
    """Do one of FAULTS to a run; False if it is not there to be disturbed."""
    ranks, launcher = sorted(job.ranks().values()), job.processes[0].pid
    if len(ranks) < size or job.over():
        return False
    hit, number = {
        "all ranks killed": (ranks, signal.SIGKILL),
        "the launcher killed": ([launcher], signal.SIGKILL),
        "SIGTERM": ([launcher], signal.SIGTERM),
        "SIGTERM to a rank": ([rng.choice(ranks)], signal.SIGTERM),
    }.get(fault, ([rng.choice(ranks)], signal.SIGKILL))
    try:
        if fault == "a rank stopped for some seconds":
            job.kill(hit[0], signal.SIGSTOP)
            time.sleep(rng.uniform(0.2, 5))
            job.kill(hit[0], signal.SIGCONT)
            return True
        for pid in hit:
            job.kill(pid, number)
    except MissedError:
        return fault == "all ranks killed"  # the first death has taken the others along
    job.wait()
    if fault == "a rank killed and a bit flipped" and len(iterations(job.folder)) > 1:
        path = rng.choice(files_of(job.folder))
        flip(path, rng.randrange(path.stat().st_size), rng.randrange(8))
    return True

"""Rows K1 to K5: processes die at random moments and inside saves; the same command gives the same bits."""

import re
import signal
from random import Random

from tests.faults.hooks import POINTS, Death, Hooks
from tests.faults.runs import (
    CKPT,
    EVERY,
    FIVE,
    LAYOUTS,
    STEPS,
    Job,
    MissedError,
    Place,
    expect_same_losses,
    iterations,
    losses_of,
    newest,
    status,
    tail,
)

DRAWS = 8  # moments that are drawn until one falls into the run


def draw(
    place: Place, case: str, rng: Random, layout: str, how: str = "launcher"
) -> tuple[Job, dict[int, int]]:
    """Start a run and wait for a random moment: in set-up, a step or a save -> the run, its processes."""
    pace = place.reference(layout).pace
    for number in range(DRAWS):
        job = place.start(f"{case}.{number}", layout, how=how)
        steps = rng.randrange(STEPS - 1)
        delay = rng.random() * (2 * pace if steps else 0.3)
        try:
            return job, job.reach(steps, delay, LAYOUTS[layout][0])
        except MissedError:
            job.wait()
    raise AssertionError(f"none of {DRAWS} moments fell into the run")


def where(job: Job) -> str:
    """In what a run was when it was killed, as the files tell."""
    if list((job.folder / CKPT).glob("*.tmp")):
        return "in a save"
    return "in a step" if job.records() else "in set-up"


def expect_resumed(place: Place, job: Job, log: str, before: dict[int, str]) -> None:
    """It went on where its newest checkpoint was; no more steps came again than lie between saves."""
    found = [int(step) for step in re.findall(rf"(?m)^resumed {re.escape(str(CKPT))}, step (\d+)", log)]
    resumed, done = (found[-1] if found else 0), max(before, default=0)
    assert done - resumed <= EVERY, f"{done} steps were done, resumed at {resumed}: more than {EVERY} again"


def rerun_equal(place: Place, job: Job, layout: str, how: str = "launcher") -> None:
    """The same command again: it resumes from what is there, and ends as if nothing had happened."""
    before = losses_of(job.folder)
    expect_same_losses(before, place.reference(layout).outcome.losses)
    log = place.rerun(job.folder.name, layout, how=how)
    expect_resumed(place, job, log, before)
    place.expect_equal(job.folder.name, layout)


def k1(place: Place, seed: int) -> str:
    """SIGKILL to a random rank at a random moment: one in five under torchrun, which restarts by itself."""
    rng, layout = Random(f"K1 {seed}"), FIVE[seed % 5]
    how = "torchrun" if seed // 5 % 5 == 4 else "launcher"
    job, ranks = draw(place, f"K1-{seed}", rng, layout, how)
    job.kill(rng.choice(sorted(ranks.values())))
    if how == "torchrun":
        return restarted_equal(place, job, layout)
    assert (code := job.wait(20)) == 1, f"exit code {code} of a run of which a rank was killed"
    moment = where(job)
    rerun_equal(place, job, layout)
    return moment


def restarted_equal(place: Place, job: Job, layout: str) -> str:
    """After a kill torchrun starts all ranks again, and the run ends as if nothing had happened."""
    moment, before = where(job), losses_of(job.folder)
    expect_same_losses(before, place.reference(layout).outcome.losses)
    assert (code := job.wait()) == 0, f"torchrun's exit code is {code}: {tail(job.text())}"
    expect_resumed(place, job, (job.folder / "runs/run/log.txt").read_text(), before)
    place.expect_equal(job.folder.name, layout)
    return f"torchrun, {moment}"


def k2(place: Place, seed: int) -> str:
    """Death at a point of a save, of each layout; the newest complete checkpoint is loaded, saves go on."""
    rng, layout, point = Random(f"K2 {seed}"), FIVE[seed % 5], POINTS[seed // 5 % len(POINTS)]
    removal, first = point == POINTS[-1], point in POINTS[:3]
    flags = "--keep-last-k 2" if removal else ""
    size = LAYOUTS[layout][0]
    rank = rng.randrange(size) if first else 0
    iteration = rng.choice(range(4 * EVERY if removal else EVERY, STEPS + 1, EVERY))
    at = rng.randrange(1, place.reference(layout).shards[rank])
    case = f"K2-{seed}"
    if removal and not flags:
        damage_newest(place, case, layout, iteration)
    job = place.start(case, layout, flags, hooks=Hooks(death=Death(point, rank, iteration, at)))
    code = job.wait()
    assert code == 1, f"exit code {code}: it did not die {point} of rank {rank}: {tail(job.text())}"
    died = f"rank {rank} was killed by SIG{'XFSZ' if point == 'amid a shard' else 'KILL'}"
    assert died in job.text(), f"{died}: {tail(job.text())}"
    published = point in POINTS[5:]
    expected = iteration if published else iteration - EVERY
    assert max(iterations(job.folder), default=0) == expected, f"published: {iterations(job.folder)}"
    before = losses_of(job.folder)
    log = place.rerun(case, layout, flags)
    resumed = re.findall(r"(?m)^resumed .*, step (\d+)", log)
    assert int(resumed[-1] if expected else 0) == expected, f"resumed at {resumed}, expected {expected}"
    expect_same_losses(before, place.reference(layout).outcome.losses)
    place.expect_equal(case, layout)
    left = [path.name for path in (job.folder / CKPT).iterdir() if path.suffix in (".tmp", ".old")]
    assert expected == STEPS or not left, f"the saves that followed have left {left}"
    return point


def damage_newest(place: Place, case: str, layout: str, iteration: int) -> None:
    """Run to an iteration and damage its checkpoint: saving it again removes the damaged folder."""
    code = place.start(case, layout, f"--exit-interval {iteration}").wait()
    assert code == 0, f"exit code {code}"
    shard = newest(place.folder / case) / "rank_00000.safetensors"
    with open(shard, "r+b") as file:
        file.truncate(shard.stat().st_size // 2)


def k3(place: Place, seed: int) -> str:
    """SIGKILL to the agent and all ranks, then the same command: half of them under torchrun."""
    rng, layout = Random(f"K3 {seed}"), FIVE[seed % 5]
    how = "torchrun" if seed // 5 % 2 else "launcher"
    job, ranks = draw(place, f"K3-{seed}", rng, layout, how)
    for pid in rng.sample([job.processes[0].pid, *ranks.values()], len(ranks) + 1):
        try:
            job.kill(pid)
        except MissedError:
            continue  # the death of the launcher takes its ranks along
    assert job.wait(5) == -signal.SIGKILL
    job.end()
    moment = where(job)
    rerun_equal(place, job, layout, how)
    return f"{how}, {moment}"


def kill_each(place: Place, job: Job, rng: Random, layout: str, kills: int) -> None:
    """Kill a rank of each attempt, later in the run each time."""
    pace = place.reference(layout).pace
    for attempt in range(kills):
        steps = rng.randrange(2 * attempt + 1, 2 * attempt + 3)
        ranks = job.reach(steps, rng.random() * pace, LAYOUTS[layout][0], attempt)
        job.kill(rng.choice(sorted(ranks.values())))


def k4(place: Place, seed: int) -> str:
    """Three kills with three restarts; two kills with one restart: then status.json names the checkpoints."""
    rng, layout = Random(f"K4 {seed}"), FIVE[seed // 2 % 5]
    exhausted = bool(seed % 2)
    job = place.start(f"K4-{seed}", layout, how="torchrun", restarts=1 if exhausted else 3)
    kill_each(place, job, rng, layout, 2 if exhausted else 3)
    if not exhausted:
        restarted_equal(place, job, layout)
        return "three kills"
    assert job.wait() != 0, "more kills than restarts, and exit code 0"
    facts = status(job.folder)
    assert facts["state"] != "done" and facts["checkpoint"] == str(CKPT), facts
    assert iterations(job.folder), "no checkpoint is left"
    rerun_equal(place, job, layout, "torchrun")
    return "more kills than restarts"


def k5(place: Place, seed: int) -> str:
    """Plain torchrun --standalone --max-restarts=3: the restarted ranks find each other."""
    rng, layout = Random(f"K5 {seed}"), FIVE[seed % 4]
    job = place.start(f"K5-{seed}", layout, how="torchrun")
    ranks = job.reach(rng.randrange(1, 7), 0.0, LAYOUTS[layout][0])
    job.kill(rng.choice(sorted(ranks.values())))
    return restarted_equal(place, job, layout)

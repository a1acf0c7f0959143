"""Rows T1 to T4: signals. Wanted ones save and end with exit code 75; the death of a peer saves nothing."""

import os
import signal
import time
from random import Random

from nanomegatron.faults.signals import ECHO, PREEMPTED
from tests.faults.hooks import Hooks
from tests.faults.kills import draw
from tests.faults.runs import (
    CKPT,
    FIVE,
    LAYOUTS,
    STEPS,
    Job,
    MissedError,
    Place,
    expect_same_losses,
    iterations,
    losses_of,
    status,
    tail,
)

OUT = 25.0  # seconds in which all are out after SIGTERM
LOST = 5.0  # after the death of a peer
PHASES = ("set-up", "a step", "an evaluation", "a save", "a step under torchrun")
EVALUATES = "--eval-interval 3 --eval-iters 30"
TERMINATE = signal.SIGTERM


def expect_saved(place: Place, job: Job, layout: str, nothing: bool = False) -> int:
    """A run that was stopped by a signal has saved its last step -> that step (0: it had not begun)."""
    facts, folder = status(job.folder), job.folder
    assert facts["state"] == "preempted", f"{facts}: {tail(job.text())}"
    done, saved = losses_of(folder), iterations(folder)
    expect_same_losses(done, place.reference(layout).outcome.losses)
    if nothing or not done:
        assert not done and not saved, f"{len(done)} steps, saved {saved}: nothing was begun"
        return 0
    assert max(done) == saved[-1] == facts["iteration"], f"{max(done)} steps done, saved {saved}: {facts}"
    return saved[-1]


def t1(place: Place, seed: int) -> str:
    """SIGTERM to the launcher or torchrun, in each phase of a run; out in time, nothing lost."""
    rng, layout, phase = Random(f"T1 {seed}"), FIVE[seed // 5 % 5], PHASES[seed % 5]
    how = "torchrun" if phase == PHASES[4] else "launcher"
    flags = EVALUATES if phase == "an evaluation" else ""
    case, job = stopped_in(place, f"T1-{seed}", layout, flags, phase, rng)
    began = time.monotonic()
    job.kill(job.processes[0].pid, TERMINATE)
    code, seconds = job.wait(OUT), time.monotonic() - began
    assert code != 0 if how == "torchrun" else code == PREEMPTED, f"exit code {code}: {tail(job.text())}"
    assert seconds < OUT and not job.ranks(), f"it took {seconds:.1f} seconds"
    expect_saved(place, job, layout, nothing=phase == "set-up")
    place.rerun(case, layout, flags, how)
    place.expect_equal(case, layout)
    return phase


def stopped_in(place: Place, case: str, layout: str, flags: str, phase: str, rng: Random) -> tuple[str, Job]:
    """Start a run and wait until it is in a phase."""
    size, pace = LAYOUTS[layout][0], place.reference(layout).pace
    if phase.startswith("a step"):
        how = "torchrun" if phase == PHASES[4] else "launcher"
        for number in range(8):
            job = place.start(f"{case}.{number}", layout, flags, how)
            try:
                job.reach(rng.randrange(1, STEPS - 3), rng.random() * pace, size)
                return job.folder.name, job
            except MissedError:
                job.wait()
        raise AssertionError("the runs were over too soon")
    function = {"set-up": "build_datasets", "an evaluation": "evaluate", "a save": "save_checkpoint"}[phase]
    hooks = Hooks(slow=(("build_datasets", 0.3),)) if phase == "set-up" else Hooks()
    job = place.start(case, layout, flags, hooks=hooks)
    job.until(lambda: (job.folder / f"in_{function}").exists())
    return case, job


def t2(place: Place, seed: int) -> str:
    """SIGTERM to one rank: all save the same step."""
    rng, layout = Random(f"T2 {seed}"), FIVE[seed % 5]
    _, job = stopped_in(place, f"T2-{seed}", layout, "", "a step", rng)
    rank, pid = rng.choice(sorted(job.ranks().items()))
    job.kill(pid, TERMINATE)
    assert (code := job.wait(OUT)) == PREEMPTED, f"exit code {code}: {tail(job.text())}"
    expect_saved(place, job, layout)
    place.rerun(job.folder.name, layout)
    place.expect_equal(job.folder.name, layout)
    return f"rank {rank}"


def t3(place: Place, seed: int) -> str:
    """A rank is killed, the others get SIGTERM, as by torchrun: they are out at once and publish nothing."""
    rng, layout = Random(f"T3 {seed}"), FIVE[seed % 5]
    how = "torchrun" if seed // 5 % 2 else "launcher"
    job, ranks = draw(place, f"T3-{seed}", rng, layout, how)
    for pid in ranks.values():
        job.kill(pid, signal.SIGSTOP)
    before, began = saves(job), time.monotonic()
    victim = rng.choice(sorted(ranks))
    job.kill(ranks.pop(victim))
    for pid in ranks.values():
        job.kill(pid, TERMINATE)
        job.kill(pid, signal.SIGCONT)
    while any(map(_runs, ranks.values())):
        assert time.monotonic() - began < LOST, f"ranks are there {LOST} seconds later: {tail(job.text())}"
        time.sleep(0.01)
    if how == "launcher":
        assert (code := job.wait()) == 1, f"exit code {code}"
    else:
        job.end()
    after = saves(job)
    assert after <= before | {name.removesuffix(".tmp") for name in before}, f"saves {before} became {after}"
    return f"{how}, {'in a save' if any(name.endswith('.tmp') for name in before) else 'no save begun'}"


def saves(job: Job) -> set[str]:
    """Names of the checkpoints that are there, and of the one that is being written."""
    return {path.name for path in (job.folder / CKPT).glob("iter_*")}


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def t4(place: Place, seed: int) -> str:
    """Ctrl-C, which a terminal sends to all processes: once saves, twice leaves at once."""
    rng, layout, twice = Random(f"T4 {seed}"), FIVE[seed // 4 % 5], bool(seed % 2)
    if seed % 4 == 2:
        return interrupted_command(place, f"T4-{seed}")
    hooks = Hooks(slow=(("save_checkpoint", 4 * ECHO),)) if twice else Hooks()
    job = place.start(f"T4-{seed}", layout, hooks=hooks)
    job.reach(2 if twice else rng.randrange(1, STEPS - 3), 0.0, LAYOUTS[layout][0])
    if twice:
        job.until(lambda: (job.folder / "in_save_checkpoint").exists())

    def press() -> None:
        for pid in [job.processes[0].pid, *job.ranks().values()]:
            job.kill(pid, signal.SIGINT)

    press()
    if twice:
        time.sleep(1.2 * ECHO)
        press()
    return pressed(place, job, layout, twice, "launcher")


def interrupted_command(place: Place, case: str) -> str:
    """The same on the command itself, whose processes are one group."""
    layout, flags = "dp2", EVALUATES
    place.reference(layout, how="command")
    job = place.start(case, layout, flags, "command")
    job.until(lambda: len(job.records()) >= 4)
    os.killpg(job.processes[0].pid, signal.SIGINT)
    return pressed(place, job, layout, False, "command", flags)


def pressed(place: Place, job: Job, layout: str, twice: bool, how: str, flags: str = "") -> str:
    """What follows."""
    began = time.monotonic()
    code, seconds = job.wait(OUT), time.monotonic() - began
    if twice:
        assert code not in (0, PREEMPTED) and seconds < ECHO, f"exit code {code} after {seconds:.1f} seconds"
        assert "second signal" in status(job.folder)["message"], status(job.folder)
        expect_same_losses(losses_of(job.folder), place.reference(layout).outcome.losses)
    else:
        assert code == PREEMPTED, f"exit code {code}: {tail(job.text())}"
        expect_saved(place, job, layout)
    place.rerun(job.folder.name, layout, flags, how)
    place.expect_equal(job.folder.name, layout, how=how)
    return "twice" if twice else f"once, {how}"

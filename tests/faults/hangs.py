"""Row H1: a rank is stopped (SIGSTOP), as on a machine that hangs; the watch-dog names it."""

import re
import signal
import time
from random import Random

from tests.faults.runs import LAYOUTS, RUN, Place, status, tail

LIMIT, LATE = 10, 2.0  # seconds: of --hang-timeout-secs, and until the report stands behind them


def h1(place: Place, seed: int) -> str:
    """Each rank of tp x pp in turn: named in time, with the stacks of every live rank."""
    rng, layout, victim = Random(f"H1 {seed}"), "tp2pp2", seed % 4
    size = LAYOUTS[layout][0]
    flags = f"--train-iters 100000 --save-interval 1000 --hang-timeout-secs {LIMIT}"
    job = place.start(f"H1-{seed}", layout, flags)
    ranks = job.reach(rng.randrange(3, 20), 0.05 * rng.random(), size)
    job.kill(ranks[victim], signal.SIGSTOP)
    began = time.monotonic()
    while not (found := re.search(r"a hang: .*", job.text())):
        assert time.monotonic() - began < LIMIT + LATE, f"nothing is said: {tail(job.text())}"
        time.sleep(0.05)
    assert f"rank {victim} " in found[0] and "does not answer" in found[0], found[0]
    assert (code := job.wait(30)) == 1, f"exit code {code}"
    facts, folder = status(job.folder), job.folder / RUN
    assert facts["state"] == "failed" and "does not answer" in facts["message"], facts
    dumps = {path.name for path in folder.glob("hang.*.txt")}
    assert dumps == {f"hang.{rank}.txt" for rank in range(size) if rank != victim}, dumps
    assert all("train_step" in path.read_text() for path in folder.glob("hang.*.txt"))
    return f"rank {victim}"

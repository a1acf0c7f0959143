"""Rows D1, D2 and X2: the same command gives the same bits, however often it is stopped on its way."""

import json
import shutil
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np

from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder
from tests.faults.hooks import Hooks
from tests.faults.runs import LAYOUTS, Place, tail

RECOMPUTE = (
    "",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-activations --recompute-modules core_attn mlp_act layernorm",
)
TWENTY = "--train-iters 20 --save-interval 100"  # the last step is always saved
EPOCHS, KILLS = 3, 5
TOKENS, LENGTH = 1537, 32  # of an epoch, and of a sample: 3 x 1537 tokens are 144 samples and a rest of 3


def d1(place: Place, seed: int) -> str:
    """The same command twice, with dropout."""
    layout = list(LAYOUTS)[seed % len(LAYOUTS)]
    place.rerun(f"D1-{seed}", layout)
    place.expect_equal(f"D1-{seed}", layout)
    return layout


def d2(place: Place, seed: int) -> str:
    """Stopped after one of 20 steps and resumed, with and without recomputation."""
    stop, recompute = 1 + seed % 20, RECOMPUTE[seed // 20 % 3]
    layout, flags = ("dp2", "tp2sp", "pp2")[seed % 3], f"{TWENTY} {recompute}"
    case = f"D2-{seed}"
    job = place.start(case, layout, f"{flags} --exit-interval {stop}")
    assert job.wait() == 0 and len(job.records()) == stop, f"stopped elsewhere: {tail(job.text())}"
    log = place.rerun(case, layout, flags)
    assert stop == 20 or f"step {stop}" in log.rpartition("resumed ")[2].splitlines()[0]
    place.expect_equal(case, layout, flags)
    return f"recomputation {('off', 'full', 'selective')[seed // 20 % 3]}"


def x2(place: Place, seed: int) -> str:
    """Three epochs with five kills: no sample is lost, none comes twice, and all come in the same order."""
    rng, case = Random(f"X2 {seed}"), f"X2-{seed}"
    folder = place.folder / case
    folder.mkdir()
    write_counted(str(folder / "counted"))
    steps = (EPOCHS * TOKENS - 1) // LENGTH // 4
    flags = (
        f"--data-path {folder / 'counted'} --tokenizer-type NullTokenizer --vocab-size {TOKENS} --split 1 "
        f"--train-iters {steps} --save-interval 3"
    )
    hooks = Hooks(ledger=True)
    for number in range(KILLS):
        job = place.start(case, "dp2", flags, hooks=hooks)
        ranks = job.reach(number * steps // (KILLS + 1) + rng.randrange(1, 4), 0.02 * rng.random(), 2)
        job.kill(rng.choice(sorted(ranks.values())))
        job.wait()
    job = place.start(case, "dp2", flags, hooks=hooks)
    assert (code := job.wait()) == 0, f"exit code {code}: {tail(job.text())}"
    seen = ledger(folder)
    places = [place for step in sorted(seen) for place in sorted(seen[step])]
    assert places == list(range(4 * steps)), "places in the order of the run are missing or come twice"
    counts = Counter(token for step in seen.values() for tokens in step.values() for token in tokens)
    rest = EPOCHS * TOKENS - 4 * steps * LENGTH
    short = sum(EPOCHS - counts[token] for token in range(TOKENS))
    assert max(counts.values()) <= EPOCHS and short == rest, f"tokens that lack: {short}, expected {rest}"
    straight = place.folder / f"{case}-straight"
    straight.mkdir()
    assert place.start(straight.name, "dp2", flags, hooks=hooks).wait() == 0
    assert ledger(straight) == seen, "the undisturbed run reads in another order"
    shutil.rmtree(straight)
    return f"{4 * steps} samples"


def write_counted(prefix: str) -> None:
    """Documents whose tokens are numbers of which none comes twice."""
    random, tokens = np.random.RandomState(1), np.arange(TOKENS, dtype=np.uint16)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for document in np.split(tokens, np.sort(random.choice(np.arange(1, TOKENS), 39, replace=False))):
            builder.add_document(document)
        builder.finalize()


def ledger(folder: Path) -> dict[int, dict[int, list[int]]]:
    """What each step has read: iteration -> place in the run's order -> tokens; replays read the same."""
    seen: dict[int, dict[int, list[int]]] = {}
    for path in sorted(folder.glob("ledger*.jsonl")):
        for line in path.read_text().splitlines():
            iteration, places, rows = json.loads(line)
            for at, tokens in zip(places, rows, strict=True):
                before = seen.setdefault(iteration, {}).setdefault(at, tokens)
                assert before == tokens, f"step {iteration} was repeated with other data"
    return seen

"""Rows S1 to S3: files of a checkpoint are damaged, cut, missing or foreign; nothing wrong is ever loaded.

Row N5: an update makes weights that are finite and dead; they are never saved.
"""

import hashlib
import json
import re
import shutil
from functools import cache
from pathlib import Path
from random import Random

import torch

from nanomegatron.checkpoint.checkpoint import load
from nanomegatron.checkpoint.manifest import FORMAT_VERSION
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.faults.exit import BAD_STEPS, NO_CHECKPOINT
from nanomegatron.mesh import Mesh, World
from tests.faults.runs import ALIVE, CKPT, EVERY, FIVE, RUN, STEPS, Place, iterations, newest, status, tail

LAST, BEFORE = STEPS, STEPS - EVERY
WHOLE_RUNS = 20  # of this number of flipped bits one is put before a whole run, the others before a load


@cache
def alone() -> Mesh:
    return Mesh.build(ParallelConfig(), World(), torch.device("cpu"))


def finished(place: Place, case: str, layout: str) -> Path:
    """A copy of the folder of the undisturbed run."""
    place.reference(layout)
    number = list(place.references).index((layout, "", "launcher"))
    folder = place.folder / case
    return shutil.copytree(place.folder / f"reference{number}", folder, dirs_exist_ok=True)


def files_of(folder: Path) -> list[Path]:
    """The files of the newest checkpoint."""
    return sorted(path for path in newest(folder).rglob("*") if path.is_file())


def loaded(folder: Path) -> tuple[int, list[str]]:
    """The iteration that a load takes, and what it says."""
    found = load(folder / CKPT, [], alone())
    return found.iteration, found.notes


def expect_fallback(folder: Path, name: str) -> None:
    """The checkpoint before the newest is loaded, and the damaged file is named."""
    iteration, notes = loaded(folder)
    assert iteration == BEFORE, f"{name} is damaged, and iteration {iteration} is loaded"
    assert len(notes) == 1 and name in notes[0] and f"loading iteration {BEFORE}" in notes[0], notes


def s1(place: Place, seed: int) -> str:
    """One flipped bit, anywhere in any file of the newest checkpoint."""
    rng, layout = Random(f"S1 {seed}"), FIVE[seed % 5]
    case = f"S1-{seed}" if seed % WHOLE_RUNS == 0 else f"S1-{layout}"
    folder = place.folder / case
    if seed % WHOLE_RUNS == 0 or not folder.exists():
        finished(place, case, layout)
    path = rng.choice(files_of(folder))
    at, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
    flip(path, at, bit)
    kind = re.sub(r"rank_\d+", "rank_N", path.name)
    try:
        expect_fallback(folder, path.name)
        if seed % WHOLE_RUNS == 0:
            expect_warned(place, case, layout, path)
    finally:
        if path.exists() and seed % WHOLE_RUNS:
            flip(path, at, bit)
    return kind


def flip(path: Path, at: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def expect_warned(place: Place, case: str, layout: str, path: Path) -> None:
    """A run warns of the file, resumes from the checkpoint before, and saves the damaged one again."""
    log = place.rerun(case, layout)
    warned = [line for line in log.splitlines() if line.startswith("! damaged checkpoint")]
    assert len(warned) == 1 and path.name in warned[0], warned
    assert f"resumed {CKPT}, step {BEFORE}" in log
    place.expect_equal(case, layout)


def s2(place: Place, seed: int) -> str:
    """Each file of the newest checkpoint cut to 0 bytes, to 1, to half, by 1; each file removed."""
    layout = FIVE[seed % 5]
    folder = finished(place, f"S2-{seed}", layout)
    cases = 0
    for path in files_of(folder):
        data = path.read_bytes()
        for size in sorted({0, 1, len(data) // 2, len(data) - 1}):
            path.write_bytes(data[:size])
            expect_fallback(folder, path.name)
            cases += 1
        path.unlink()
        expect_fallback(folder, path.name)
        path.write_bytes(data)
        cases += 1
    assert loaded(folder) == (LAST, [])
    for hint in (folder / CKPT).glob("latest*"):  # for people: without it the newest is found
        hint.write_text("")
        assert loaded(folder) == (LAST, [])
        hint.unlink()
        assert loaded(folder) == (LAST, [])
    return f"{cases} of {layout}"


UNUSABLE = ("all damaged", "--load of a folder that is not there", "an empty folder", "a newer format")


def s3(place: Place, seed: int) -> str:
    """No checkpoint can be used: exit code 3, what was tried, and no step from random weights."""
    what, layout = UNUSABLE[seed % 4], FIVE[seed // 4 % 5]
    case = f"S3-{seed}"
    folder, flags = place.folder / case, ""
    if what == "all damaged":
        folder = finished(place, case, layout)
        for iteration in iterations(folder):
            flip(folder / CKPT / f"iter_{iteration:07d}" / "rank_00000.safetensors", 100, 3)
        said = [f"iter_{iteration:07d}" for iteration in iterations(folder)]
    elif what == "a newer format":
        folder = finished(place, case, layout)
        rewrite_manifest(newest(folder))
        said = [newest(folder).name, f"format_version {FORMAT_VERSION + 1}", "update the program"]
    else:
        folder.mkdir()
        if what == "an empty folder":
            (folder / "there").mkdir()
        flags, said = "--load there", ["--load there: no checkpoint"]
    (folder / RUN / "metrics.jsonl").unlink(missing_ok=True)
    job = place.start(case, layout, flags)
    code = job.wait()
    assert code == NO_CHECKPOINT, f"exit code {code}: {tail(job.text())}"
    missing = [text for text in said if text not in job.text()]
    assert not missing, f"it does not say {missing}: {tail(job.text())}"
    assert not job.records(), "it has trained"
    return what


DEADLY = "--train-iters 60 --lr 1e38 --clip-grad 0 --save-interval 5 --keep-last-k 2"


def n5(place: Place, seed: int) -> str:
    """From step 12 on every step is bad, in four starts by torchrun: nothing is published or removed."""
    case, layout = f"N5-{seed}", FIVE[seed % 5]
    folder = finished(place, case, layout)
    before = {path: path.read_bytes() for path in sorted((folder / CKPT).glob("iter_*/*"))}
    job = place.start(case, layout, DEADLY, how="torchrun")
    assert job.wait(2 * ALIVE) != 0, f"exit code 0: {tail(job.text())}"
    facts = status(folder)
    assert (facts["state"], facts["exit_code"], facts["iteration"]) == ("failed", BAD_STEPS, LAST + 2), facts
    assert "13 steps in a row were not finite, 12 of them before" in facts["message"], facts
    after = {path: path.read_bytes() for path in sorted((folder / CKPT).glob("iter_*/*"))}
    assert before == after, f"checkpoints have changed: {iterations(folder)}"
    place.rerun(case, layout, "--train-iters 12")
    assert all(float(record["lm_loss"]) < 7 for record in job.records()), "losses of dead weights"
    return layout


def rewrite_manifest(folder: Path) -> None:
    """Give a manifest the number of a newer format, and the hash that fits."""
    path = folder / "manifest.json"
    entry = json.loads(path.read_text())
    entry["format_version"] = FORMAT_VERSION + 1
    path.write_text(json.dumps(entry))
    line = f"{hashlib.sha256(path.read_bytes()).hexdigest()}  manifest.json\n"
    path.with_name("manifest.json.sha256").write_text(line)

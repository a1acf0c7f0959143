"""tools/gpu_gate.py, whole, with tiny cases on CPUs: what passes, what fails, and that it says why."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu_gate import MAX_LOSS_CHANGE, Case, cases_of, chosen, judge
from tools.gpu_gate_worker import DROPPED, Ended, Steps, find

ROOT = Path(__file__).resolve().parents[2]
CASE = Case("some", "--flag 1", 1, 3)
SLOWER = """
import time
plain_settings, plain_step = settings, train_step

def settings(argv, world):
    settings.other = "--swiglu" in argv  # trains another model, the other case only takes longer
    return plain_settings([*argv, *(["--vocab-size", "48"] if settings.other else [])], world)

def train_step(*args):
    time.sleep(0 if settings.other else 0.5)
    return plain_step(*args)
"""
BROKEN = """
plain_attend = attend

def attend(q, k, *args, **keywords):
    if k.shape[2] < q.shape[2]:  # in blocks alone
        raise RuntimeError("broken on purpose")
    return plain_attend(q, k, *args, **keywords)
"""


def checkout(folder: Path) -> Path:
    """A copy of what a run needs of this one."""
    shutil.copytree(ROOT / "nanomegatron", folder / "nanomegatron")
    (folder / "tools").mkdir()
    for name in ("train.py", "preprocess.py", "tools/gpu_gate.py", "tools/gpu_gate_worker.py"):
        shutil.copy2(ROOT / name, folder / name)
    return folder


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def gate(new: Path, old: Path, *flags: str) -> tuple[int, dict, str]:
    """Exit code, JSON and console of a comparison with a limit that noise does not reach."""
    out = new / "gate.json"
    command = [sys.executable, new / "tools/gpu_gate.py", "--tiny", "--old", old, "--out", out, *flags]
    command = [*map(str, command), "--repetitions", "1"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    return done.returncode, json.loads(out.read_text()) if out.exists() else {}, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.full)])
def test_same_code_passes(ranks, tmp_path):
    """Two ranks a checkout: by torchrun."""
    new, old = checkout(tmp_path / "new"), checkout(tmp_path / "old")
    code, result, text = gate(new, old, "--gpus", ranks, "--limit", "1e6")
    assert code == 0 and result["passed"], text
    assert result["old"]["folder"] == str(old) and {"device", "torch", "date"} < result.keys()
    for row in result["cases"]:
        assert row["passed"] and not row["problems"] and row["name"] in text
        sliced = row["name"] == "tiny swiglu"
        assert row["old"]["loss"] == row["new"]["loss"]
        assert len(row["new"]["step_ms"][0]) == (6 if sliced else 3)
        assert row["ratio"] == row["new"]["ms"] / row["old"]["ms"]
        assert row["old"]["ops"] == row["new"]["ops"] and (row["old"]["ops"] > 50 or "blocks" in row["name"])
    assert not [path for path in old.rglob("*") if path.name in ("ckpt", "runs")]


def test_what_fails(tmp_path):
    """A slow case, one that trains something else, and a worker that dies: all are named."""
    new = checkout(tmp_path / "new")
    append(new / "train.py", SLOWER)
    blocks = next(path for path in new.rglob("attention*.py") if "\ndef attend(" in path.read_text())
    append(blocks, BROKEN)
    code, result, text = gate(new, ROOT, "--limit", "300")
    slow, other, broken = result["cases"]
    assert code == 1 and not result["passed"]
    assert "% slower, limit 300 %" in slow["problems"][0] and len(slow["problems"]) == 1
    assert "other losses" in other["problems"][-1] and "not comparable" in broken["problems"][0]
    assert all(re.search(rf"^{row['name']} .* FAILED: ", text, re.M) for row in result["cases"]), text
    assert "new checkout, tiny blocks: died" in text and "Traceback" in text and "broken on purpose" in text


def turns(*ms: float, loss: float = 2.0) -> list[dict]:
    return [{"step_ms": [9 * x, x, x], "loss": loss, "peak_gib": 1.0, "left_gib": 0.0} for x in ms]


@pytest.mark.parametrize(
    "old, new, problem",
    [
        (turns(10, 11, 12), turns(11.1, 30, 11), ""),
        (turns(10, 11, 12), turns(11.2, 30, 11), "1.8 % slower"),
        (turns(10), turns(5), ""),
        (turns(10), turns(10, loss=2 + 1.9 * MAX_LOSS_CHANGE), ""),
        (turns(10), turns(10, loss=2 + 2.1 * MAX_LOSS_CHANGE), "other losses"),
        (turns(10), turns(10, loss=float("nan")), "other losses"),
        (turns(10), [{"problem": "out of memory"}], "not comparable; new checkout: out of memory"),
        ([{"problem": "out of memory"}], [{"problem": "out of memory"}], "old checkout: out of memory; new"),
        (turns(10), [], "not comparable"),
    ],
)
def test_judge(old, new, problem):
    row = judge(CASE, {"old": old, "new": new}, 1.5)
    assert problem in "; ".join(row["problems"]) and row["passed"] == (not problem) == (not row["problems"])


def test_more_ops_fail_where_times_say_nothing():
    old, new = ([turn | {"ops": ops} for turn in turns(10)] for ops in (1000, 1016))
    assert judge(CASE, {"old": old, "new": new}, 1.5)["problems"] == [
        "FAILED: a step has 1016 ops of torch instead of 1000, limit 1.5 %"
    ]
    assert judge(CASE, {"old": new, "new": old}, 1.5)["passed"]
    assert judge(CASE._replace(limit=10), {"old": turns(10), "new": turns(10.9)}, 1.5)["passed"]


def test_several_cases_are_chosen_by_words():
    names = [case.name for case in chosen(cases_of(1, False), ["gpt2", "moe"])]
    assert names == ["gpt2, micro batch 8", "gpt2, micro batch 64", "qwen3 moe, ep 1"]


def test_slices_are_judged_by_their_fastest_step():
    """Others on the host disturb most of the steps."""
    case = Case("sliced", "--flag 1", 1, 2, slices=3)
    measured = {"old": turns(10, 30), "new": turns(40, 10.1, 50)}
    assert judge(case, measured, 1.5)["passed"]
    row = judge(case, measured | {"new": turns(40, 11, 50)}, 1.5)
    assert row["ratio"] == pytest.approx(1.1) and "10.0 % slower" in row["problems"][0]


def test_where_a_sliced_training_pauses():
    """After the warm-up and after each slice but the last; the first steps of a slice do not count."""

    class Driver:
        def tell(self, content):
            pauses.append(len(steps.records))

        def hear(self):
            return {}

    for case, paused, counted in (
        (Case("sliced", "", 3, 2, slices=2), [3, 5 + DROPPED], [(3, 5), (5 + DROPPED, 7 + DROPPED)]),
        (Case("whole", "", 3, 2), [], [(3, 5)]),
    ):
        steps, pauses = Steps(case, Driver()), []
        with pytest.raises(Ended):
            for i in range(99):
                steps({"i": i})
        dropped = DROPPED if case.slices else 0
        assert pauses == paused and len(steps.records) == steps.last + 1
        assert [x["i"] for x in steps.timed()] == [i + dropped for span in counted for i in range(*span)]


def test_find():
    assert find("loads", "json.nowhere", "nowhere", "json.decoder", "json") is json.loads
    with pytest.raises(Ended, match="this checkout has no dump in json.decoder or json.nowhere"):
        find("dump", "json.decoder", "json.nowhere")


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_cases_are_valid(gpus):
    """No flag of a case is unknown, and none contradicts another, as on Hopper GPUs."""
    from nanomegatron.config.check import validate
    from nanomegatron.config.cli import parse

    for case in cases_of(gpus, False):
        assert not case.slices or (case.kind == "train" and case.warm)
        if case.kind == "train":
            parsed = parse(f"{case.flags} --train-iters 9 --run-name gate".split())
            assert [*parsed.errors, *validate(parsed.config, gpus, "cuda", (9, 0))] == [], case.name

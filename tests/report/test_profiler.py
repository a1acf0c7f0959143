"""Profiles: which steps of which ranks are recorded, what is written, what is said."""

import contextlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from nanomegatron.config.check import unseen_notes
from nanomegatron.config.settings import ParallelConfig, RunConfig
from nanomegatron.faults.exit import DONE
from nanomegatron.mesh import Mesh, World
from nanomegatron.report import plots
from nanomegatron.report.profiler import Profile
from tests.spmd import run_spmd


def log_of(folder: Path, said: list[str]) -> SimpleNamespace:
    """What a profile needs of a RunLog."""
    return SimpleNamespace(folder=folder, line=said.append, attempt=contextlib.nullcontext)


def steps(mesh: Mesh, folder: Path, first: int, last: int, run: RunConfig) -> list[str]:
    """Iterations first ... last, each with an operator that a trace shows by name."""
    said = []
    profile = Profile(run, mesh, log_of(folder, said))
    for iteration in range(first, last + 1):
        profile.before_step(SimpleNamespace(iteration=iteration), [])
        with torch.profiler.record_function(f"iteration {iteration}"):
            torch.ones(2, 2) @ torch.ones(2, 2)
    profile.end()
    profile.end()  # once is enough
    return said


def recorded(path: Path) -> list[int]:
    """The iterations in a trace."""
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    assert "aten::mm" in names
    seen = sorted({int(name.split()[1]) for name in names if name.startswith("iteration ")})
    assert sorted({int(name[13:]) for name in names if name.startswith("ProfilerStep#")}) == seen
    return seen


@pytest.fixture
def mesh() -> Mesh:
    return Mesh.build(ParallelConfig(), World(), torch.device("cpu"))


@pytest.mark.parametrize(
    "first, last, expected",
    [
        (1, 6, [3, 4]),
        (4, 6, [4]),  # a run that resumes from a checkpoint
        (1, 3, [3]),  # one that ends before
        (5, 6, None),
    ],
)
def test_steps_from_start_to_before_end(mesh, tmp_path, first, last, expected):
    run = RunConfig(profile=True, profile_step_start=3, profile_step_end=5, profile_ranks=(0,))
    first_line, *said = steps(mesh, tmp_path, first, last, run)
    assert f"will record steps 3 to 4: {tmp_path}/profile-rank0.json" in first_line
    path = tmp_path / "profile-rank0.json"
    assert (recorded(path) if path.exists() else None) == expected
    assert len(said) == (expected is not None) and all(str(path) in line for line in said)


def on_ranks(mesh: Mesh, folder: str) -> list[str]:
    run = RunConfig(profile=True, profile_step_start=1, profile_step_end=2, profile_ranks=(1,))
    return steps(mesh, Path(folder), 1, 2, run)


def test_ranks(tmp_path):
    said = run_spmd(on_ranks, 2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["profile-rank1.json"]
    assert [len(lines) for lines in said] == [1, 2]  # the log shows rank 0's: where all files are


def train_there(world: World, argv: list[str], folder: str) -> int:
    os.chdir(folder)
    plots.plot_loss = lambda *_: None  # to load matplotlib takes a second
    return train.run_rank(world, argv)


def test_a_run_is_profiled_and_drawn(tmp_path):
    """As the flags say, by train.py itself; to draw a step is no part of its time."""
    argv = (
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-layers 4 --hidden-size 32 "
        "--num-attention-heads 4 --seq-length 32 --global-batch-size 4 --train-iters 4 --eval-iters 0 --pp 2 "
        "--vpp 2 --device cpu --run-name test --profile --profile-step-start 2 --profile-step-end 3 "
        "--profile-ranks 1 --trace-dir pictures --trace-iterations 2 4 --timing-log-level 2 --log-interval 3"
    )
    assert run_spmd(train_there, 2, argv.split(), str(tmp_path)) == [DONE] * 2
    for iteration in (2, 4):
        path = tmp_path / f"pictures/test/iteration-{iteration}.json"
        events = json.loads(path.read_text())["traceEvents"]
        names = [event["name"] for event in events if event.get("ph") == "X" and event["tid"] == 0]
        assert sorted(names) == sorted(
            2 * [f"{k}{c}.{i}" for k in ("F", "BW") for c in (0, 1) for i in range(4)]
        )
    assert len(list((tmp_path / "pictures/test").glob("*.json"))) == 2
    assert [path.name for path in (tmp_path / "runs/test").glob("profile-*")] == ["profile-rank1.json"]
    log = (tmp_path / "runs/test/log.txt").read_text()
    assert log.count("/       4 | consumed") == 3
    assert log.count("(min, max) time across ranks") == 3, "below each line"
    assert (
        log.count("bubble") == 4
        and "backward-compute" in log
        and "steps 2 to 2: runs/test/profile-rank1.json" in log
    )
    events = json.loads((tmp_path / "runs/test/profile-rank1.json").read_text())["traceEvents"]
    spans = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation"}
    first, last = spans["ProfilerStep#2"]
    for name in ("forward-backward", "F0.0", "BW1.3", "forward-compute", "all-grads-sync", "optimizer"):
        start, end = spans[name]
        assert first < start < end < last, f"{name} lies within its step"
    assert "ProfilerStep#3" not in spans


def test_nothing_unless_asked(mesh, tmp_path):
    assert steps(mesh, tmp_path, 1, 20, RunConfig()) == [] and not list(tmp_path.iterdir())


def test_memory_history_needs_a_gpu(mesh, tmp_path):
    """As the check of the settings says; nothing is written without one."""
    assert steps(mesh, tmp_path, 1, 2, RunConfig(record_memory_history=True)) == []
    assert not list(tmp_path.iterdir())


def test_memory_history(tmp_path, monkeypatch):
    """On a GPU: recorded from the beginning, written at the end and when memory runs out, by rank."""
    done, memory = [], torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **keys: done.append(keys))
    monkeypatch.setattr(memory, "_dump_snapshot", done.append)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", done.append, raising=False)
    mesh, said = SimpleNamespace(rank=3, device=torch.device("cuda")), []
    run = RunConfig(record_memory_history=True, memory_snapshot_path="m.pickle")
    profile = Profile(run, mesh, log_of(tmp_path, said))
    profile.before_step(SimpleNamespace(iteration=1), [])
    begin, observer = done
    assert begin == dict(max_entries=100_000)
    observer(0, 1, 2, 3)
    profile.end()
    profile.end()
    observer(0, 1, 2, 3)  # torch has no way to take it off
    paths = [str(tmp_path / f"m-rank3{when}.pickle") for when in ("-out-of-memory", "")]
    assert done[2:] == [*paths, dict(enabled=None)]
    assert len(said) == 2
    for path, line in zip(paths, said):
        assert path in line and "a pickle" in line and "https://pytorch.org/memory_viz alone" in line


@pytest.mark.parametrize(
    "done, settings, said",
    [
        (2, {}, []),  # step 3 is to come
        (3, {}, ["--trace-iterations 3: nothing is recorded, the steps to come are 4 to 12"]),
        (3, dict(trace_dir=None), []),
        (0, dict(trace_iterations=(20, 30)), ["--trace-iterations 20 30: nothing is recorded, the steps"]),
        (11, dict(profile=True), ["--trace-iterations 3", "--profile-step-start 10: nothing is recorded"]),
        (10, dict(profile=True, trace_dir=None), []),
        (12, {}, []),  # nothing left to train, which is said
    ],
)
def test_records_of_steps_that_a_run_does_not_have_are_said(done, settings, said):
    run = RunConfig(**(dict(train_iters=12, trace_dir="traces", trace_iterations=(3,)) | settings))
    notes = [*unseen_notes(run, done)]
    assert len(notes) == len(said) and all(map(str.startswith, notes, said))

"""How a run ends: signals at any time, disks and consoles that take nothing, and what may fail beside it."""

import json
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import train
from nanomegatron.faults import exit as run_exit
from nanomegatron.faults import signals as run_signals
from nanomegatron.faults.exit import BAD_CONFIG, DONE
from nanomegatron.faults.launch import launch
from nanomegatron.faults.signals import PREEMPTED
from nanomegatron.launch import data as run_data
from nanomegatron.launch import ending
from nanomegatron.mesh import World
from nanomegatron.report import evaluate, plots
from nanomegatron.report import generate as run_sample
from nanomegatron.report.writers import read_jsonl
from tests.test_train import arguments, corpus, output_of  # noqa: F401 (a fixture)

FOUR = "--train-iters 4 --lr-warmup-iters 0"
LONG = f"{FOUR} --eval-interval 2 --eval-iters 6000"  # an evaluation takes minutes


def signalled(world: World, argv: list[str], folder: str, where: str, times: int, echo: float) -> int:
    """A rank that gets SIGINT, rank 1 or both ranks, when it comes to a function of the program."""
    os.chdir(folder)
    run_signals.ECHO = echo
    name, _, ranks = where.partition(" of ")
    module = next(m for m in (train, evaluate, run_data) if hasattr(m, name))
    usual = getattr(module, name)

    def gets_it(*args, **kwargs):
        if str(world.rank) in (ranks or "01"):
            setattr(module, name, usual)
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return usual(*args, **kwargs)

    setattr(module, name, gets_it)
    plots.plot_loss, ending.show_sample = lambda *_: Path("drawn"), lambda *_: None
    return train.run_rank(world, argv)


def signals(
    folder: Path, argv: list[str], where: str, ranks: int = 2, times: int = 1, echo: float = 1.0
) -> tuple[list, dict]:
    """Exit codes of all ranks, and status.json."""
    codes = launch(signalled, ranks, (argv, str(folder), where, times, echo), timeout=40, threads=1)
    return codes, json.loads((folder / "runs/test/status.json").read_text())


def test_a_signal_ends_an_evaluation(corpus, tmp_path):  # noqa: F811
    """In the middle of training, the last one, --eval-only: given up, not logged; what is new is saved."""
    argv = arguments(corpus, LONG)
    codes, status = signals(tmp_path, argv, "add_losses of 1")
    assert codes == [PREEMPTED] * 2
    assert (status["state"], status["iteration"]) == ("preempted", 2) and status["checkpoint"]
    end = [*argv, "--eval-interval", "100"]
    codes, status = signals(tmp_path, end, "add_losses", ranks=1)
    assert (codes, status["state"], status["iteration"]) == ([PREEMPTED], "preempted", 4)
    steps = [record["iteration"] for record in read_jsonl(tmp_path / "runs/test/metrics.jsonl")]
    assert steps == [1, 2, 3, 4] and (tmp_path / "runs/test/log.txt").read_text().count("saved ") == 2
    codes, status = signals(tmp_path, [*argv, "--eval-only"], "add_losses", ranks=1)
    assert (codes, status["state"], status["exit_code"]) == ([PREEMPTED], "preempted", 75)
    assert not (tmp_path / "runs/test/evals.jsonl").exists()


def test_stopped_runs_have_the_evaluations_of_others(corpus, tmp_path, full):  # noqa: F811
    """By a signal at a step that has one, in an evaluation, by --exit-interval at a step with and without."""
    (tmp_path / "whole").mkdir()
    argv = arguments(corpus, f"{FOUR} --eval-interval 2 --eval-iters 2 --micro-batch-size 4")
    argv += ["--split", "80,10,10"]
    output_of(tmp_path / "whole", argv, DONE)
    whole = read_jsonl(tmp_path / "whole/runs/test/evals.jsonl")
    assert [(e["iteration"], e["split"]) for e in whole] == [
        (2, "validation"),
        (4, "validation"),
        (4, "test"),
    ]
    for where in ("train_step", "3", *["add_losses", "2"] * full):
        folder = tmp_path / where
        folder.mkdir()
        if where.isdecimal():
            output_of(folder, [*argv, "--exit-interval", where, "--log-interval", "99"], DONE)
            log = (folder / "runs/test/log.txt").read_text()
            assert log.index(f" iteration {where:>8}/") < log.index("saved "), "the last row comes first"
        else:
            codes, status = signals(folder, argv, where, ranks=1)
            assert (codes, status["iteration"]) == ([PREEMPTED], 2)
            assert not (folder / "runs/test/evals.jsonl").exists()
        output_of(folder, argv, DONE)
        assert read_jsonl(folder / "runs/test/evals.jsonl") == whole, where


@pytest.mark.parametrize("where", ["choose_tokenizer of 1", "load_checkpoint of 01"])
def test_a_signal_before_the_first_step(where, corpus, tmp_path):  # noqa: F811
    codes, status = signals(tmp_path, arguments(corpus, FOUR), where)
    assert codes == [PREEMPTED] * 2
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    assert "nothing to save" in status["message"]
    assert not (tmp_path / "runs/test/metrics.jsonl").exists()


def test_a_second_signal_leaves_at_once_and_says_so(corpus, tmp_path):  # noqa: F811
    """But one that reaches it twice at the same time, by the launcher and as one of a group, is one."""
    codes, status = signals(tmp_path, arguments(corpus, FOUR), "train_step", ranks=1, times=2)
    assert (codes, status["state"], status["iteration"]) == ([PREEMPTED], "preempted", 2)
    assert (tmp_path / "runs/test/log.txt").read_text().endswith("\npicture drawn\n")  # also of such a run
    codes, status = signals(tmp_path, arguments(corpus, FOUR), "train_step", ranks=1, times=2, echo=0.0)
    assert codes == [-signal.SIGINT]
    assert (status["state"], status["exit_code"]) == ("failed", 130) and "SIGINT" in status["message"]


def without_files(world: World, argv: list[str], folder: str) -> int:
    """A run whose console is a broken pipe, and whose files take nothing but checkpoints."""
    os.chdir(folder)
    unread, console = os.pipe()
    os.close(unread)
    os.dup2(console, 1)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    plots.plot_loss = lambda *_: 1 / 0
    return train.run_rank(world, argv)


def test_a_run_needs_no_log(corpus, tmp_path):  # noqa: F811
    """A full disk (/dev/full), status.json in the way, no reader of the console, no matplotlib that works."""
    folder = tmp_path / "runs/test"
    (folder / "status.json").mkdir(parents=True)
    for name in ("log.txt", "metrics.jsonl"):
        (folder / name).symlink_to("/dev/full")
    argv = arguments(corpus, "--train-iters 2 --lr-warmup-iters 0 --save-interval 1")
    assert launch(without_files, 2, (argv, str(tmp_path)), timeout=40, threads=1) == [DONE] * 2
    assert (folder / "ckpt").is_dir() and len(read_jsonl(folder / "evals.jsonl")) == 1
    (tmp_path / "other/latest_checkpointed_iteration.txt").mkdir(parents=True)
    argv += ["--save", "other", "--train-iters", "3", "--load", str(folder / "ckpt")]
    assert launch(without_files, 1, (argv, str(tmp_path)), timeout=40, threads=1) == [run_exit.SAVE_FAILED]


def test_what_is_shown_fails_no_run(corpus, tmp_path):  # noqa: F811
    """A model of ids continues ids; what cannot be drawn or recorded is named, once each."""
    numbers = "--tokenizer-type NullTokenizer --vocab-size 257 --train-iters 3 --lr-warmup-iters 0"
    more, named = "--trace-dir /proc/trace --trace-iterations 1 2", ["trace", "loss.png"]
    if find_spec("tensorboard"):
        more, named = f"{more} --tensorboard-dir /proc/events", [*named, "TensorBoard"]
    folder = tmp_path / "runs/test"
    (folder / "loss.png").mkdir(parents=True)
    said = output_of(tmp_path, arguments(corpus, numbers, more), DONE, ranks=2, picture=True)
    samples = [line.split()[1:] for line in said.splitlines() if line.startswith("sample ")]
    assert len(samples) == 1 and all(word.isdecimal() for words in samples for word in words)
    assert [said.count(f"! {name}: ") for name in named] == [1] * len(named)
    held_out = " ".join(samples[0])
    assert f"next    nanomegatron generate --load runs/test/ckpt --prompt '{held_out[:12]}" in said
    assert json.loads((folder / "status.json").read_text())["state"] == "done"


def sample_fails(world: World, argv: list[str], folder: str, name: str, ranks: str) -> int:
    """A run in whose sample a function fails on some ranks."""
    os.chdir(folder)
    if str(world.rank) in ranks:
        setattr(run_sample, name, lambda *_, **__: 1 / 0)
    plots.plot_loss = lambda *_: None
    run_sample.all_ranks_arrive.__defaults__ = (1.0,)  # seconds
    return train.run_rank(world, argv)


@pytest.mark.parametrize("name, ranks", [("prompts_of", "1"), ("generate", "01")])
def test_a_sample_that_fails_fails_no_run(name, ranks, corpus, tmp_path):  # noqa: F811
    """Before anything is sent on any rank, amid it on all alike."""
    argv = arguments(corpus, "--train-iters 1 --lr-warmup-iters 0 --tp 2")
    codes = launch(sample_fails, 2, (argv, str(tmp_path), name, ranks), timeout=40, threads=1)
    text = "".join(path.read_text() for path in (tmp_path / "runs/test").glob("log*.txt"))
    assert codes == [DONE] * 2 and text.count("sample: ZeroDivisionError") == len(ranks)


def test_a_rank_that_fails_amid_a_sample_stops_the_others(corpus, tmp_path):  # noqa: F811
    """It leaves as it would in a step, so that the launcher stops what still waits for it."""
    argv = arguments(corpus, "--train-iters 1 --lr-warmup-iters 0 --tp 2")
    assert launch(sample_fails, 2, (argv, str(tmp_path), "generate", "1"), timeout=40, threads=1)[1] == 1
    assert (tmp_path / "runs/test/ckpt").is_dir()


def test_the_first_lines_stand_before_the_model_is_built(corpus, tmp_path, monkeypatch, capsys):  # noqa: F811
    """A large model takes long to build: until then one sees what it will be, and its data."""
    monkeypatch.chdir(tmp_path)
    printed = []

    def no_build(*_) -> None:
        printed.append(capsys.readouterr().out)
        raise ValueError("not built")

    monkeypatch.setattr(train, "build", no_build)
    assert train.main(arguments(corpus)) == BAD_CONFIG
    assert [line.split(" ")[0] for line in printed[0].splitlines() if not line.startswith("note")] == [
        "nanomegatron",
        "model",
        "memory",
        "",
        "kernels",
        "data",
        "files",
    ]
    lines = [line for line in printed[0].splitlines() if line.startswith(("memory", " "))]
    memory = " ".join(map(str.strip, lines))
    assert "predicted peak" in memory and "; the column mem GiB is the whole process" in memory
    assert max(map(len, lines)) <= 120

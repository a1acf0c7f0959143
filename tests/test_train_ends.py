"""How a run ends: disks and consoles that take nothing, and what may fail beside it."""

import json
import os
import sys
from importlib.util import find_spec

import pytest

import train
from nanomegatron import run_sample
from nanomegatron.mesh import Mesh, World
from nanomegatron.mesh_launch import launch
from nanomegatron.metrics_writers import read_jsonl
from tests.test_train import arguments, corpus, told  # noqa: F401 (a fixture)


def without_files(world: World, argv: list[str], folder: str) -> int:
    """A run whose console is a broken pipe, and whose files take nothing but checkpoints."""
    os.chdir(folder)
    unread, console = os.pipe()
    os.close(unread)
    os.dup2(console, 1)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    train.plot_loss = lambda *_: 1 / 0
    return train.run_rank(world, argv)


def test_a_run_needs_no_log(corpus, tmp_path):  # noqa: F811
    """A full disk (/dev/full), status.json in the way, no reader of the console, no matplotlib that works."""
    folder = tmp_path / "runs/test"
    (folder / "status.json").mkdir(parents=True)
    for name in ("log.txt", "metrics.jsonl"):
        (folder / name).symlink_to("/dev/full")
    argv = arguments(corpus, "--train-iters 2 --lr-warmup-iters 0 --save-interval 1")
    assert launch(without_files, 2, (argv, str(tmp_path)), timeout=40, threads=1) == [train.DONE] * 2
    assert (folder / "ckpt").is_dir() and len(read_jsonl(folder / "evals.jsonl")) == 1
    (tmp_path / "file").write_text("in the way")
    argv += ["--save", "file/ckpt", "--train-iters", "3", "--load", str(folder / "ckpt")]
    assert launch(without_files, 1, (argv, str(tmp_path)), timeout=40, threads=1) == [train.SAVE_FAILED]


def test_what_is_shown_fails_no_run(corpus, tmp_path):  # noqa: F811
    """Data of ids alone continues ids; what cannot be drawn or recorded is named, once each."""
    numbers = "--tokenizer-type NullTokenizer --vocab-size 257 --train-iters 3 --lr-warmup-iters 0"
    more, named = "--trace-dir file/trace --trace-iterations 1 2", ["trace", "loss.png"]
    if find_spec("tensorboard"):
        more, named = f"{more} --tensorboard-dir file/events", [*named, "TensorBoard"]
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "runs/test"
    (folder / "loss.png").mkdir(parents=True)
    said = told(tmp_path, arguments(corpus, numbers, more), train.DONE, ranks=2, picture=True)
    samples = [line.split()[1:] for line in said.splitlines() if line.startswith("sample ")]
    assert len(samples) == 2 and all(word.isdecimal() for words in samples for word in words)
    assert [said.count(f"! {name}: ") for name in named] == [1] * len(named) and "--prompt 0" in said
    assert json.loads((folder / "status.json").read_text())["state"] == "done"


def sample_fails(world: World, argv: list[str], folder: str, name: str, ranks: str) -> int:
    """A run in whose sample a function fails on some ranks."""
    os.chdir(folder)
    if str(world.rank) in ranks:
        setattr(run_sample, name, lambda *_, **__: 1 / 0)
    train.plot_loss = lambda *_: None
    Mesh.meet.__defaults__ = (1.0,)  # seconds
    return train.run_rank(world, argv)


@pytest.mark.parametrize("name, ranks", [("prompts_of", "1"), ("generate", "01")])
def test_a_sample_that_fails_fails_no_run(name, ranks, corpus, tmp_path):  # noqa: F811
    """Before anything is sent on any rank, amid it on all alike."""
    argv = arguments(corpus, "--train-iters 1 --lr-warmup-iters 0 --tp 2")
    codes = launch(sample_fails, 2, (argv, str(tmp_path), name, ranks), timeout=40, threads=1)
    text = "".join(path.read_text() for path in (tmp_path / "runs/test").glob("log*.txt"))
    assert codes == [train.DONE] * 2 and text.count("sample: ZeroDivisionError") == len(ranks)


def test_a_rank_that_fails_amid_a_sample_stops_the_others(corpus, tmp_path):  # noqa: F811
    """It leaves as it would in a step, so that the launcher stops what still waits for it."""
    argv = arguments(corpus, "--train-iters 1 --lr-warmup-iters 0 --tp 2")
    assert launch(sample_fails, 2, (argv, str(tmp_path), "generate", "1"), timeout=40, threads=1)[1] == 1
    assert (tmp_path / "runs/test/ckpt").is_dir()

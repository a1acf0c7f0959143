"""A run resumes on the data it was trained on: known by contents, wherever the files are."""

import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import preprocess
import train
from nanomegatron.checkpoint.resume import warn_once
from nanomegatron.config.settings import DataConfig
from nanomegatron.data import identity
from nanomegatron.data.gpt_dataset import MockGPTLowLevelDataset, build_datasets
from nanomegatron.data.identity import data_changes, data_identity, sampled_hash
from nanomegatron.data.tokenizer import build_tokenizer
from nanomegatron.faults.exit import BAD_CONFIG, DONE
from nanomegatron.faults.launch import launch
from nanomegatron.mesh import World
from nanomegatron.report import plots
from tests.megatron_data import random_documents, write
from tests.spmd import run_spmd
from tests.test_train import arguments, corpus, output_of  # noqa: F401 (a fixture)

TOKENIZER = build_tokenizer("NullTokenizer", vocab_size=127)


def known(counts: tuple[int, int, int] = (30, 4, 4), **settings) -> dict:
    """The identity of data, as a checkpoint returns it."""
    data = DataConfig(seq_length=8, **{"split": "80,10,10", **settings})
    return json.loads(json.dumps(data_identity(build_datasets(data, counts, 1, TOKENIZER))))


@pytest.fixture
def pairs(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        write(tmp_path / name, random_documents(seed, 90, 30))
    return tmp_path


def test_moved_data_are_the_same(pairs):
    (pairs / "elsewhere").mkdir()
    for before, after in (("a", "elsewhere/x"), ("b", "elsewhere/y")):
        for end in ("bin", "idx"):
            shutil.copy(f"{before}.{end}", f"{after}.{end}")
    one, other = (known(data_path=("3", a, "7", b)) for a, b in ("ab", ("elsewhere/x", "elsewhere/y")))
    assert one != other and data_changes(one, other) == []
    assert data_changes(one, known(data_path=(".3", "a", ".7", "b"))) == []
    assert set(one) == {"train", "valid", "test"} and one["train"][1]["prefix"] == "b"


def longer(pairs: Path) -> None:
    write(pairs / "a", [*random_documents(0, 90, 30), [5]])


def other_tokens(pairs: Path) -> None:
    write(pairs / "a", [document + 1 for document in random_documents(0, 90, 30)])


def other_lengths(pairs: Path) -> None:
    whole = np.concatenate(random_documents(0, 90, 30))
    write(pairs / "a", [whole[:1], *np.array_split(whole[1:], 89)])


SIZE = sum(map(len, random_documents(0, 90, 30))) * 2


@pytest.mark.parametrize(
    "change, settings, parts",
    [
        (longer, {}, [f"train data 1, a: size of .bin {SIZE} -> {SIZE + 2} bytes; SHA-256 of .idx "]),
        (other_tokens, {}, ["train data 1, a: SHA-256 of 64 blocks of .bin ", "valid data 1, a: ", "test "]),
        (other_lengths, {}, ["train data 1, a: SHA-256 of .idx ", "valid data 1, a: ", "test "]),
        (None, {"data_path": (".5", "a", ".5", "b")}, ["1, a: weight 0.3 -> 0.5", "2, b: weight 0.7 -> 0.5"]),
        (None, {"data_path": ("a", "b")}, ["train data 1, a: weight 0.3 -> none"]),
        (None, {"data_path": (".3", "b", ".7", "a")}, ["train data 1, a -> b: size of .bin"]),
        (None, {"data_path": ("a",)}, ["train data: 2 data sets -> 1 (a b -> a)"]),
        (None, {"split": "70,20,10"}, ["train data 1, a: sequences 0..72 -> 0..63 (--split)"]),
    ],
)
def test_what_differs_is_said(pairs, change, settings, parts):
    settings = {"data_path": (".3", "a", ".7", "b"), **settings}
    before = known(data_path=(".3", "a", ".7", "b"))
    if change:
        change(pairs)
    found = data_changes(before, known(**settings))
    assert all(any(part in line for line in found) for part in parts), found
    assert not change or not any(" 2, b" in line for line in found)


def test_mock_data_are_known(pairs):
    sets = [SimpleNamespace(indexed=MockGPTLowLevelDataset(9, 8), sequences=(0, 99)) for _ in range(3)]
    assert data_changes(data_identity(sets), data_identity(sets)) == []
    mock, files = data_identity(sets), known(data_path=("a", "b"))
    assert data_changes(files, mock)[0] == "train data: 2 data sets -> 1 (a b -> mock data)"


def test_what_was_not_built_is_not_compared(pairs):
    """Without evaluation there is no validation data to compare."""
    both, train_alone = known(data_path=("a",)), known((30, 0, 0), data_path=("a",))
    assert set(train_alone) == {"train"} and data_changes(both, train_alone) == []
    assert len(data_changes(known(data_path=("b",)), train_alone)) == 1


@pytest.mark.parametrize(
    "damaged", [3, "train", {"train": 3}, {"train": [3]}, {"train": [None]}, [["train"]]]
)
def test_a_damaged_identity_is_no_traceback(pairs, damaged):
    found = data_changes(damaged, known(data_path=("a",)))
    assert len(found) <= 1 and (found or damaged == [["train"]])


def test_blocks_at_both_ends_and_between_are_hashed(tmp_path, monkeypatch):
    """Of a file as long as a disk, in no time; of a short one everything."""
    monkeypatch.setattr(identity, "SAMPLE_BYTES", 16)
    draw, path = random.Random(0), tmp_path / "x.bin"
    for size, share in ((64 * 16, 1.0), (640 * 16, 0.05)):
        data = draw.randbytes(size)
        path.write_bytes(data)
        before, seen = sampled_hash(path), 0
        for at in [0, size - 1, *draw.sample(range(size), 100)]:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            differs = sampled_hash(path) != before
            assert differs or 0 < at < size - 1
            seen += differs
        assert share * 102 <= seen <= 102 and (share == 1.0) == (seen == 102)
    os.truncate(path, 2**40)  # a hole
    assert sampled_hash(path) != before


# Whole runs.


def resume(world: World, argv: list[str], folder: str) -> int:
    os.chdir(folder)
    plots.plot_loss = lambda *_: None
    return train.run_rank(world, argv)


def test_a_run_resumes_only_on_its_data(corpus, tmp_path):  # noqa: F811
    """Moved: it resumes. Of other contents: an error on all ranks before a step, or on request a warning."""
    for end in (".bin", ".idx"):
        shutil.copy(corpus + end, tmp_path / f"moved{end}")
    flags = "--lr-warmup-iters 0 --eval-iters 1 --num-layers 1"
    output_of(tmp_path, arguments(corpus, flags, "--train-iters 1"), DONE)
    moved = arguments(corpus, flags, "--data-path moved")
    said = output_of(tmp_path, [*moved, "--train-iters", "2"], DONE)
    assert "resumed runs/test/ckpt, step 1" in said and "! " not in said and "other data" not in said

    tokens = np.fromfile(tmp_path / "moved.bin", np.uint16)
    np.where(tokens == 97, 98, tokens).astype(np.uint16).tofile(tmp_path / "moved.bin")
    argv = [*moved, "--train-iters", "3"]
    assert launch(resume, 2, (argv, str(tmp_path)), timeout=60, threads=1) == [BAD_CONFIG] * 2
    log = (tmp_path / "runs/test/log.txt").read_text()
    assert "runs/test/ckpt was trained on other data: give the same" in log and "--allow-data-change" in log
    assert "train data 1, moved: SHA-256 of 64 blocks of .bin " in log
    codes = launch(resume, 2, ([*argv, "--allow-data-change"], str(tmp_path)), timeout=60, threads=1)
    assert codes == [DONE] * 2
    assert "! runs/test/ckpt was trained on other data: train data 1" in (
        log := (tmp_path / "runs/test/log.txt").read_text()
    )
    assert log.count("resumed runs/test/ckpt") == 2
    assert "on other data: train data 1" not in (tmp_path / "runs/test/log.1.txt").read_text()
    said = output_of(tmp_path, [*moved, "--train-iters", "4"], DONE)  # what it was trained on last
    assert "resumed runs/test/ckpt, step 3" in said and "other data" not in said


def notes_of_ranks(mesh) -> list[str]:
    """What each rank warns of."""
    said: list[str] = []
    run = SimpleNamespace(mesh=mesh, log=SimpleNamespace(warn=said.append))
    warn_once(run, [["all", "first"], ["all"], ["all", "own"]][mesh.rank])
    return said


def test_what_all_ranks_have_is_said_once():
    assert run_spmd(notes_of_ranks, 3) == [["all", "first"], [], ["own"]]


@pytest.mark.full
def test_another_tokenizer_or_split_is_other_data(corpus, tmp_path):  # noqa: F811
    """Where only weights are loaded any data may be used."""
    flags = "--lr-warmup-iters 0 --eval-iters 0 --num-layers 1"
    output_of(tmp_path, arguments(corpus, flags, "--train-iters 1"), DONE)
    load = [*arguments(corpus, flags, "--train-iters 2"), "--load", "runs/test/ckpt", "--run-name"]
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "257"]
    said = output_of(tmp_path, [*load, "a", *null], BAD_CONFIG)
    assert (
        "was trained on words, with tokenizer {'type': 'ByteTokenizer'}, not {'type': 'NullTokenizer'" in said
    )
    said = output_of(tmp_path, [*load, "b", "--split", "80,20,0"], BAD_CONFIG)
    assert "train data 1, words: sequences 0..36 -> 0..32 (--split)" in said
    said = output_of(tmp_path, [*load, "c", *null, "--finetune"], DONE)
    assert "! runs/test/ckpt was trained on other data: tokenizer" in said
    in_folder = [*arguments(corpus, flags, "--train-iters 2"), "--split", "80,20,0"]
    said = output_of(tmp_path, in_folder, BAD_CONFIG)
    assert "--split 80,20,0: the run in this folder has 90,10,0" in said
    assert "resumed" in output_of(tmp_path, [*in_folder, "--allow-data-change"], DONE)


@pytest.mark.full
def test_the_embedded_text_may_be_made_again(tmp_path, monkeypatch):
    """As `make train` does after `make clean`: the same contents."""
    found = []
    for place in ("one", "two"):
        made = preprocess.prepare_embedded(tmp_path / place, report=lambda line: None)
        data = DataConfig(train_data_path=(made.train_prefix,), valid_data_path=(made.valid_prefix,))
        tokenizer = build_tokenizer(made.tokenizer_type, made.tokenizer_model)
        found.append(data_identity(build_datasets(data, (9, 9, 0), 1, tokenizer)))
    assert found[0]["train"][0]["prefix"] == found[1]["train"][0]["prefix"]
    assert data_changes(*found) == []

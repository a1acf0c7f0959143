"""--elastic: the same command resumes on more or fewer processes, with the same batches in the same order."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import train
from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import ConfigError, parse, to_toml
from nanomegatron.config.run_folder import resumed, with_run_name
from nanomegatron.faults.exit import BAD_CONFIG, DONE
from nanomegatron.faults.launch import launch
from nanomegatron.launch import ending
from nanomegatron.mesh import World
from nanomegatron.report import plots
from nanomegatron.report.writers import read_jsonl
from nanomegatron.step import Training
from tests.data.test_identity import resume
from tests.megatron_data import write
from tests.spmd import run_spmd
from tests.test_train import ROOT, arguments, corpus, output_of  # noqa: F401 (a fixture)

DEFAULT = (
    "--config tiny-cpu --mock-data --vocab-size 99 --elastic --micro-batch-size 2 --global-batch-size None"
)


def configured(flags: str, world: int, earlier=None):
    """The command line's configuration on a number of processes, and the notes."""
    parsed = parse(flags.split())
    assert validate(parsed.config, world) == [] and not parsed.errors
    config = with_run_name(resolve(parsed.config, world), parsed)
    return resumed(config, parsed, earlier, world), parsed.notes


# Settings.


def test_the_batch_is_that_of_the_folder():
    """Not the default on these processes; dp follows from them, and so does the number of microbatches."""
    first, _ = configured(DEFAULT, 4)
    assert (first.data.global_batch_size, first.parallel.data_parallel_size) == (8, 4)
    for world in (1, 2, 4):
        later, notes = configured(DEFAULT, world, first)
        assert (later.data.global_batch_size, later.parallel.data_parallel_size) == (8, world)
        assert (f"changed --data-parallel-size 4 -> {world}" in notes) == (world != 4)
        assert later.run.run_name == first.run.run_name and later.run.run_name.endswith("-elastic")
    assert configured(f"{DEFAULT} --tp 2", 2, first)[0].data.global_batch_size == 8
    assert configured(f"{DEFAULT} --micro-batch-size 8", 1, first)[0].data.global_batch_size == 8


def test_without_it_another_batch_is_an_error():
    plain = DEFAULT.replace("--elastic ", "--run-name x ")
    first, _ = configured(plain, 4)
    with pytest.raises(ConfigError) as error:
        configured(plain, 2, first)
    assert error.value.messages[0] == "--global-batch-size 4: the run in this folder has 8"
    assert "--elastic keeps --global-batch-size 8 on any number" in error.value.messages[1]
    given = plain.replace("--global-batch-size None", "--global-batch-size 8")
    assert configured(given, 2, first)[0].data.global_batch_size == 8
    with pytest.raises(ConfigError) as error:
        configured(given.replace("-size 8", "-size 16"), 2, first)
    assert len(error.value.messages) == 2  # another batch was asked for


@pytest.mark.parametrize(
    "world, flags, can",
    [
        (
            3,
            "",
            "--global-batch-size 8: must be a multiple of --micro-batch-size 2 x dp 3 = 6; 1 or 2 or 4 ",
        ),
        (8, "", "--micro-batch-size 2 x dp 8 = 16; 1 or 2 or 4 processes can share it"),
        (6, "--tp 2", "--micro-batch-size 2 x dp 3 = 6; 2 or 4 or 8 processes can share it"),
        (1, "--micro-batch-size 3", "--micro-batch-size 3 x dp 1 = 3; no number of processes can share it"),
    ],
)
def test_processes_that_can_share_the_batch_are_named(world, flags, can):
    """Where the batch is that of the folder, and where it is given."""
    first, _ = configured(DEFAULT, 4)
    with pytest.raises(ConfigError) as error:
        configured(f"{DEFAULT} {flags}", world, first)
    (message,) = error.value.messages
    assert can in message
    parsed = parse(f"{DEFAULT} {flags} --global-batch-size 8".split())
    assert any(can in message for message in validate(parsed.config, world))


def test_a_ramp_is_shared_in_all_its_sizes():
    ramp = DEFAULT.replace("-size None", "-size 12") + " --rampup-batch-size 4 4 48"
    found = validate(parse(ramp.split()).config, 3)
    assert any("= 6; 1 or 2 processes can share it" in message for message in found)


def test_names_without_the_number_of_processes():
    flags = "--config tiny-cpu --data-path a/b --train-samples 64"  # a name that ends in a hash of all
    names = [
        with_run_name(
            resolve(parse(f"{flags} {more}".split()).config, world), parse(f"{flags} {more}".split())
        )
        for more in ("--elastic", "")
        for world in (1, 2, 4)
    ]
    names = [config.run.run_name for config in names]
    assert len(set(names[:3])) == 1 and len(set(names)) == 4


def test_the_batch_is_that_of_the_checkpoint_of_save_or_load(tmp_path, monkeypatch):
    """Where the run's folder is gone, or --load names another checkpoint; --finetune starts at step 0."""
    monkeypatch.chdir(tmp_path)
    first, _ = configured(DEFAULT, 4)
    folder = tmp_path / "ckpt/iter_0000007"
    folder.mkdir(parents=True)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("7\n")
    (folder / "manifest.json").write_text(f'{{"config": {json.dumps(to_toml(first))}}}')
    for where in ("--save ckpt", "--load ckpt", "--save ckpt --load other"):
        assert configured(f"{DEFAULT} {where}", 2)[0].data.global_batch_size == 8
    assert configured(f"{DEFAULT} --load ckpt --finetune", 2)[0].data.global_batch_size == 4
    assert configured(f"{DEFAULT} --save other", 2)[0].data.global_batch_size == 4


# Whole runs.

SMALL = (
    "--num-layers 1 --lr-warmup-iters 0 --lr-decay-iters 20 --eval-iters 0 --split 1 --global-batch-size None"
)
WORLDS = [
    (4, 2, 3),
    (2, 3, 3),
    (1, 5, 6),
    (2, 6, 6),
    (4, 8, 9),
    (1, 9, 9),
]  # processes, last step, --train-iters


def ledger(world: World, argv: list[str], folder: str) -> list[list[int]]:
    """Step, number and tokens of each sample that this rank trains on."""
    next_batches, found = Training.next_batches, []

    def kept(run):
        batches = next_batches(run)
        for batch in batches:
            rows = zip(batch.sample_ids.tolist(), batch.tokens.tolist(), strict=True)
            found.extend([run.progress.iteration + 1, number, *tokens] for number, tokens in rows)
        return batches

    Training.next_batches = kept
    os.chdir(folder)
    plots.plot_loss = ending.show_sample = lambda *_: None
    assert train.run_rank(world, argv) == DONE
    return found


def trained(prefix: str, folder: Path, stages: list[tuple]) -> list[list[int]]:
    """The ledger of a run of several starts, in the order of the samples; batches of 8, a microbatch each."""
    rows, micro = [], 8 // stages[0][0]
    for processes, end, iters in stages:
        more = f"--elastic --micro-batch-size {micro} --train-iters {iters} --exit-interval {end}"
        argv = arguments(prefix, SMALL, more)
        rows += [row for rank in run_spmd(ledger, processes, argv, str(folder)) for row in rank]
    return sorted(rows)


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([(2, 1, 3), (1, 2, 3), (2, 3, 3)], id="2-1-2"),
        pytest.param([(4, 1, 3), (2, 2, 3), (4, 3, 3)], id="4-2-4", marks=pytest.mark.full),
        pytest.param(WORLDS, id="three epochs", marks=pytest.mark.full),
    ],
)
def test_changes_of_the_number_of_processes_lose_and_repeat_nothing(stages, tmp_path):
    """Epochs of 24 samples: each has each document once, in the order of as many processes as at first.

    Their losses differ only by the order of additions. (25 documents: the last one of an epoch is a label.)
    """
    prefix, rows = str(tmp_path / "d"), {}
    write(prefix, [np.full(32, 97 + i) for i in range(25)])
    undisturbed = [(stages[0][0], iters, iters) for iters in sorted({stage[2] for stage in stages})]
    for name, each in (("one", undisturbed), ("other", stages)):
        (tmp_path / name).mkdir()
        rows[name] = trained(prefix, tmp_path / name, each)
    assert rows["other"] == rows["one"]
    epochs = stages[-1][2] // 3
    assert [row[:2] for row in rows["one"]] == [[1 + i // 8, i] for i in range(24 * epochs)]
    for at in range(0, 24 * epochs, 24):
        documents = {tuple(row[2:]) for row in rows["other"][at : at + 24]}
        assert len(documents) == 24 and all(len(set(tokens)) == 1 for tokens in documents)
    steps = [read_jsonl(tmp_path / name / "runs/test/metrics.jsonl") for name in rows]
    ours, theirs = ([[step[key] for key in ("lm_loss", "lr")] for step in run] for run in steps)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    log = (tmp_path / "other/runs/test/log.txt").read_text()
    changes = sum(one[0] != two[0] for one, two in pairwise(stages))
    assert log.count("note    changed --data-parallel-size ") == changes
    assert f"resumed runs/test/ckpt, step {stages[-2][1]}\n" in log


def test_a_batch_that_cannot_be_shared_is_said_at_once(corpus, tmp_path):  # noqa: F811
    """By `--nproc`, before a process is started; exit code 2, and the run resumes as it was."""
    argv = arguments(corpus, SMALL, "--elastic --train-iters 2 --exit-interval 1")
    assert launch(resume, 2, (argv, str(tmp_path)), timeout=60, threads=1) == [DONE] * 2
    said = output_of(tmp_path, [*argv, "--nproc", "3"], BAD_CONFIG)
    assert "x dp 3 = 6; 1 or 2 processes can share it" in said
    assert "resumed runs/test/ckpt, step 1" in output_of(tmp_path, argv, DONE)


@pytest.mark.full
def test_torchrun_starts_again_with_fewer_processes(corpus, tmp_path):  # noqa: F811
    """Another WORLD_SIZE, and a count of restarts, as `--nnodes 1:4` gives where a machine is lost."""
    losses = {}
    for name, worlds in (("one", (2, 2)), ("other", (2, 1))):
        (tmp_path / name).mkdir()
        for end, world in enumerate(worlds, 1):
            flags = f"--elastic --train-iters 2 --exit-interval {end}"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            command += [str(world), str(ROOT / "train.py"), *arguments(corpus, SMALL, flags)]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                command, cwd=tmp_path / name, env=environment, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
        steps = read_jsonl(tmp_path / name / "runs/test/metrics.jsonl")
        losses[name] = [step["lm_loss"] for step in steps]
    assert losses["other"] == pytest.approx(losses["one"], rel=1e-6) and len(losses["one"]) == 2

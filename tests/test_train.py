"""The whole program: every layout trains one model, a killed run resumes to the bit, exit codes."""

import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from nanomegatron.checkpoint.checkpoint import offset_of
from nanomegatron.config.model import TransformerConfig
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder
from nanomegatron.faults import exit as run_exit
from nanomegatron.faults.exit import BAD_CONFIG, DONE
from nanomegatron.faults.launch import launch
from nanomegatron.faults.signals import PREEMPTED
from nanomegatron.mesh import Mesh, World
from nanomegatron.report import plots
from nanomegatron.report.banner import expected_first_loss
from nanomegatron.report.log import RunLog
from nanomegatron.report.traffic import Traffic
from nanomegatron.report.writers import read_jsonl
from tests.spmd import run_spmd
from tests.training import report_step, save_checkpoint

ROOT = Path(__file__).resolve().parent.parent
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --swiglu --seq-length 32 "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --micro-batch-size 2 "
    "--global-batch-size 8 --lr 3e-3 --lr-warmup-iters 5 --eval-iters 2 --device cpu --run-name test"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """Prefix of a small data set of bytes: 40 documents of words that repeat, so there is much to learn."""
    prefix = str(tmp_path_factory.mktemp("data") / "words")
    random = np.random.RandomState(0)
    words = [random.randint(97, 123, size=random.randint(2, 7)) for _ in range(50)]
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(40):
            text = np.concatenate([np.append(words[random.randint(50)], 32) for _ in range(100)])
            builder.add_document(np.append(text, 256))
        builder.finalize()
    return prefix


def arguments(corpus: str, *more: str) -> list[str]:
    data = ["--data-path", corpus, "--tokenizer-type", "ByteTokenizer", "--split", "90,10,0"]
    return [*MODEL.split(), *data, *" ".join(more).split()]


def run_train(world: World, argv: list[str], folder: str) -> list[dict]:
    """One rank of a run in `folder`; the steps it logged. No picture: to load matplotlib takes a second."""
    os.chdir(folder)
    plots.plot_loss = lambda *_: None
    assert train.run_rank(world, argv) == DONE
    return read_jsonl("runs/test/metrics.jsonl")


def logged_rates(folder: Path) -> dict[int, float]:
    """The learning rate of every Megatron line in log.txt, by iteration."""
    text = (folder / "runs/test/log.txt").read_text()
    lines = re.findall(r"iteration +(\d+)/.* learning rate: (\S+) ", text)
    return {int(iteration): float(rate) for iteration, rate in lines}


def run_told(world: World, argv: list[str], folder: str, picture: bool) -> tuple[int, str]:
    """train.py as a user starts it, on one process or a rank of several: exit code, and all it said."""
    os.chdir(folder)
    said = io.StringIO()
    plots.plot_loss = plots.plot_loss if picture else lambda *_: None
    with redirect_stdout(said), redirect_stderr(said):
        code = train.main(argv) if world.size == 1 else train.run_rank(world, argv)
    return code, said.getvalue()


def output_of(folder: Path, argv: list[str], code: int, ranks: int = 1, picture: bool = False) -> str:
    """What train.py says, which must end with this code."""
    found, said = run_spmd(run_told, ranks, argv, str(folder), picture)[0]
    assert found == code and "Traceback" not in said, said
    return said


def first_gradients(world: World, argv: list[str], folder: str) -> dict:
    """This rank's slices of all gradients of the first step: name -> (offset, global shape, slice)."""
    os.chdir(folder)
    parsed, config = train.settings(argv, world)
    mesh = Mesh.build(config.parallel, world, torch.device("cpu"), observer=Traffic())
    run = train.set_up(parsed, config, mesh, RunLog(folder, config, mesh.rank))
    train.train_step(run)
    parts = [(part, p) for p in run.buckets.params for part in p.spec.parts]
    return {
        part.name: (offset_of(part), part.shape, part.local_view(p.main_grad).clone()) for part, p in parts
    }


LAYOUTS = {
    "dp2": (2, ""),
    "dp4": (4, ""),
    "tp2": (2, "--tp 2"),
    "tp2sp": (2, "--tp 2 --sequence-parallel"),  # to the sample at the end, whose sequences have any length
    "tp2dp2": (4, "--tp 2"),
    "dp4z1": (4, "--use-distributed-optimizer --overlap-grad-reduce --ddp-average-in-collective"),
    "tp2dp2z2": (
        4,
        "--tp 2 --data-parallel-sharding-strategy optim_grads --overlap-grad-reduce --overlap-param-gather "
        "--ddp-bucket-size 20000",
    ),
}


@pytest.fixture(scope="module")
def iters(full) -> int:
    return 50 if full else 12


@pytest.fixture(scope="module")
def alone(corpus, iters, tmp_path_factory) -> list[dict]:
    folder = str(tmp_path_factory.mktemp("alone"))
    return run_spmd(run_train, 1, arguments(corpus, f"--train-iters {iters}"), folder)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_like_one_process(layout, corpus, iters, alone, tmp_path):
    """fp32, 12 steps (50 in the full tier): only the order of additions differs, some 1e-7 a step."""
    world, flags = LAYOUTS[layout]
    argv = arguments(corpus, f"--train-iters {iters}", flags)
    steps = run_spmd(run_train, world, argv, str(tmp_path))[0]
    assert len(steps) == len(alone) == iters
    expected = expected_first_loss(TransformerConfig(hidden_size=64), 257)
    assert steps[0]["lm_loss"] == pytest.approx(expected, rel=0.01)
    assert steps[-1]["lm_loss"] < 0.8 * steps[0]["lm_loss"]  # it learns
    for key, tolerance in (("lm_loss", 1e-6), ("grad_norm", 1e-5), ("lr", 0)):
        ours, theirs = (np.array([step[key] for step in run]) for run in (steps, alone))
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, err_msg=key)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "z" not in name])  # each rank has all
def test_first_gradients_equal_one_process(layout, corpus, tmp_path):
    flags = "--train-iters 1 --lr-warmup-iters 0 --clip-grad 0 --hidden-dropout 0.1 --attention-dropout 0.1"
    world, more = LAYOUTS[layout]
    whole = run_spmd(first_gradients, 1, arguments(corpus, flags), str(tmp_path))[0]
    for rank in run_spmd(first_gradients, world, arguments(corpus, flags, more), str(tmp_path)):
        for name, (offset, _, piece) in rank.items():
            window = tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))
            expected = whole[name][2][window]
            assert (piece - expected).norm() <= 1e-5 * expected.norm(), name


def start(folder: Path, argv: list[str], prefix: tuple[str, ...] = (), **more) -> subprocess.Popen:
    command = [*prefix, sys.executable, str(ROOT / "train.py"), *argv]
    more |= dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, cwd=folder, **more)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    metrics, end = folder / "runs/test/metrics.jsonl", time.monotonic() + 60
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)


def finished(process: subprocess.Popen, code: int) -> str:
    output, _ = process.communicate(timeout=90)
    assert process.returncode == code, output
    return output


SHORT = "--train-iters 12 --save-interval 4 --hidden-dropout 0.1"
SERIES = ("iteration", "consumed_samples", "lm_loss", "grad_norm", "lr")


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return run_spmd(run_train, 2, arguments(corpus, SHORT), str(folder))[0]


def compare(folder: Path, undisturbed: list[dict]) -> None:
    steps = read_jsonl(folder / "runs/test/metrics.jsonl")
    assert [[s[key] for key in SERIES] for s in steps] == [[s[key] for key in SERIES] for s in undisturbed]


def run_and_die(world: World, argv: list[str], folder: str, step: int, number: int) -> int:
    """A rank that gets a signal, rank 1 alone or SIGINT all, when it begins a step."""
    usual = train.train_step

    def train_step(run, *limits):
        if run.progress.iteration == step and (world.rank == 1 or number == signal.SIGINT):
            os.kill(os.getpid(), number)
        return usual(run, *limits)

    train.train_step, plots.plot_loss = train_step, lambda *_: None
    os.chdir(folder)
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_DFL)  # under nohup the tests ignore it, and so would the run
    return train.run_rank(world, argv)


def test_killed_run_goes_on_to_the_bit(corpus, undisturbed, tmp_path):
    """Twice: in a step that follows a save, and in one that does not."""
    argv = arguments(corpus, SHORT)
    for step in (4, 10):
        codes = launch(run_and_die, 2, (argv, str(tmp_path), step, signal.SIGKILL), timeout=60, threads=1)
        assert codes[1] == -signal.SIGKILL
    assert "resumed" in output_of(tmp_path, argv, DONE, ranks=2)
    compare(tmp_path, undisturbed)
    assert "nothing left to train" in output_of(tmp_path, argv, DONE, ranks=2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signal_saves_and_leaves(number, corpus, undisturbed, tmp_path):
    """One rank's is enough; a terminal sends Ctrl-C to all."""
    argv = arguments(corpus, SHORT)
    codes = launch(run_and_die, 2, (argv, str(tmp_path), 5, number), timeout=60, threads=1)
    assert codes == [PREEMPTED] * 2
    status = json.loads((tmp_path / "runs/test/status.json").read_text())
    assert status["exit_code"] == PREEMPTED and 5 < status["iteration"] < 12
    run_spmd(run_train, 2, argv, str(tmp_path))
    compare(tmp_path, undisturbed)


KILLED = [pytest.param(number, marks=pytest.mark.full) for number in (signal.SIGINT, signal.SIGKILL)]


@pytest.mark.parametrize("number", [signal.SIGTERM, *KILLED])
def test_the_program_leaves_with_its_ranks(number, corpus, tmp_path):
    """`python train.py --nproc 2`, from the command line to the exit code."""
    argv = arguments(corpus, SHORT)
    process = start(tmp_path, [*argv, "--nproc", "2", "--train-iters", "100000"], start_new_session=True)
    wait_for_step(tmp_path, 5, process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal sends Ctrl-C to all
    else:
        process.send_signal(number)
    output = finished(process, -number if number == signal.SIGKILL else PREEMPTED)
    if number != signal.SIGKILL:
        assert "the same command resumes from there" in output
        status = json.loads((tmp_path / "runs/test/status.json").read_text())
        assert status["exit_code"] == PREEMPTED


def test_configuration_errors_come_at_once_and_once(tmp_path):
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    flags = "--nproc 2 --tp 3 --num-layers 2 --hidden-size 50 --num-attention-heads 4 --sp --num-experts 8"
    flags += " --moe-router-topk 9"
    output = finished(start(tmp_path, flags.split()), BAD_CONFIG)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime < 6  # whatever else the machine does
    for beginning in ("--hidden-size 50:", "--tensor-model-parallel-size 3:", "--moe-router-topk 9:"):
        assert output.count(f"  {beginning}") == 1
    assert "Traceback" not in output and not (tmp_path / "runs").exists()


def test_load_of_nothing_is_an_error(corpus, tmp_path):
    (tmp_path / "empty").mkdir()
    output = output_of(tmp_path, arguments(corpus, "--train-iters 9 --load empty"), run_exit.NO_CHECKPOINT)
    assert "--load empty" in output


def test_save_and_load_may_be_one_folder_from_the_first_launch(corpus, tmp_path):
    """As in Megatron's launch scripts: nothing there yet is a beginning, however the folder is named."""
    (tmp_path / "link").symlink_to(tmp_path)
    flags = "--save ckpt --lr-warmup-iters 0 --eval-iters 0 --load"
    for iters, load in ((1, tmp_path / "link/ckpt"), (2, "./runs/../ckpt")):
        output = output_of(tmp_path, arguments(corpus, f"--train-iters {iters} {flags} {load}"), DONE)
        assert ("from scratch" in output) == (iters == 1)
        assert ("resumed ckpt, step 1" in output) == (iters == 2)
    argv = arguments(corpus, "--train-iters 1 --lr-warmup-iters 0 --save none --load none")
    for more in ("--finetune", "--eval-only --eval-iters 1", "--ckpt-step 3"):  # these want what is there
        output = output_of(tmp_path, [*argv, "--run-name", "other", *more.split()], run_exit.NO_CHECKPOINT)
        assert "none" in output and "from scratch:" not in output


def test_save_that_fails_is_told(corpus, tmp_path):
    """At the start if it can be seen then."""
    (tmp_path / "file").write_text("in the way")
    output = output_of(tmp_path, arguments(corpus, "--train-iters 9 --save file/ckpt"), BAD_CONFIG)
    assert "--save file/ckpt: cannot write" in output and not (tmp_path / "runs/test/status.json").exists()
    (tmp_path / "ckpt/latest_checkpointed_iteration.txt").mkdir(parents=True)  # a folder in the way
    output_of(tmp_path, arguments(corpus, "--train-iters 9 --save ckpt"), run_exit.SAVE_FAILED)


def test_what_cannot_go_on_is_an_error(corpus, tmp_path):
    """Another batch size would repeat or skip samples, a step back would meet newer checkpoints again."""
    argv = arguments(corpus, "--train-iters 8 --save-interval 3")
    output_of(tmp_path, argv, DONE)
    other = ["--run-name", "other", "--load", "runs/test/ckpt"]
    output = output_of(tmp_path, [*argv, *other, "--global-batch-size", "4"], BAD_CONFIG)
    assert "--global-batch-size 4" in output and "64 samples in 8 iterations" in output
    output = output_of(tmp_path, [*argv, "--ckpt-step", "3"], BAD_CONFIG)
    assert "--ckpt-step 3" in output and "holds iteration 8" in output
    output = output_of(tmp_path, [*argv, *other, "--ckpt-step", "3"], DONE, ranks=2)
    assert (
        "resumed runs/test/ckpt, step 3" in output
        and "not the same bits" in output
        and "layout one process -> dp 2" in output
    )
    ours, theirs = (read_jsonl(tmp_path / f"runs/{name}/metrics.jsonl") for name in ("other", "test"))
    np.testing.assert_allclose([s["lm_loss"] for s in ours], [s["lm_loss"] for s in theirs[3:]], rtol=1e-6)
    output = output_of(tmp_path, [*argv, "--hidden-size", "128"], BAD_CONFIG)
    assert "--hidden-size 128: the run in this folder has 64" in output


def test_exit_interval_saves_and_resumes(corpus, iters, alone, tmp_path):
    argv = arguments(corpus, f"--train-iters {iters}")
    output = output_of(tmp_path, [*argv, "--exit-interval", "5"], DONE, picture=True)
    assert "after step 5" in output and ("\npicture " in output or not find_spec("matplotlib"))
    status = json.loads((tmp_path / "runs/test/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", DONE)
    steps = run_spmd(run_train, 1, argv, str(tmp_path))[0]
    assert [step["lm_loss"] for step in steps] == [step["lm_loss"] for step in alone]


def test_any_sharding_goes_on_with_any_other(corpus, iters, alone, tmp_path):
    """One run, handed on every two steps; evaluations in between read the parameters without a step."""
    stages = [
        (1, "--use-distributed-optimizer"),
        (4, f"{LAYOUTS['dp4z1'][1]} --ddp-bucket-size 10000 --overlap-param-gather --eval-interval 1"),
        LAYOUTS["tp2dp2z2"],
        (2, ""),
        (2, "--data-parallel-sharding-strategy optim_grads"),
    ]
    for i, (world, flags) in enumerate(stages):
        argv = arguments(corpus, f"--train-iters {iters} --exit-interval {2 * (i + 1)}", flags)
        steps = run_spmd(run_train, world, argv, str(tmp_path))[0]
        assert len(steps) == 2 * (i + 1)
    for key, tolerance in (("lm_loss", 1e-6), ("grad_norm", 1e-5), ("lr", 0)):
        ours, theirs = ([step[key] for step in run] for run in (steps, alone[:10]))
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, err_msg=key)
    text = (tmp_path / "runs/test/log.txt").read_text()
    assert (
        "optimizer states and gradients cut over 2 ranks" in text and "sharding optim -> optim_grads" in text
    )


def save_at_once(world: World, argv: list[str], folder: str) -> None:
    """A save right after a step, when parameters are still on their way."""
    os.chdir(folder)
    parsed, config = train.settings(argv, world)
    mesh = Mesh.build(config.parallel, world, torch.device("cpu"), observer=Traffic())
    run = train.set_up(parsed, config, mesh, RunLog(folder, config, mesh.rank))
    train.train_step(run)
    assert all(bucket.pending_gather for bucket in run.buckets.all)
    save_checkpoint(run)
    assert not any(bucket.pending_gather for bucket in run.buckets.all)


def test_save_waits_for_parameters(corpus, tmp_path):
    flags = "--train-iters 9 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    run_spmd(save_at_once, 2, arguments(corpus, flags), str(tmp_path))


def bad_steps(world: World, argv: list[str], folder: str) -> tuple[str, list[bool]]:
    """Two infinite gradients, then none: the log, and what each step has changed."""
    os.chdir(folder)
    parsed, config = train.settings(argv, world)
    mesh = Mesh.build(config.parallel, world, torch.device("cpu"), observer=Traffic())
    run = train.set_up(parsed, config, mesh, RunLog(folder, config))
    weight, sync, changed = run.model[0].layers[1].mlp.linear_fc2.weight, run.buckets.finish_grad_sync, []

    def spoil() -> None:
        sync()
        weight.main_grad[3, 4] = float("inf")

    for finish_grad_sync in (spoil, spoil, sync):
        run.buckets.finish_grad_sync = finish_grad_sync
        moments = [shard.exp_avg for shard in run.optimizer.shards]
        before = [x.clone() for x in (*run.buckets.params, *moments, run.optimizer.good_steps)]
        report_step(run)
        after = [*run.buckets.params, *moments, run.optimizer.good_steps]
        changed.append(not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        run.progress.iteration += 1
    return Path("log.txt").read_text(), changed


def test_step_that_is_not_finite_changes_nothing_and_is_named(corpus, tmp_path):
    text, changed = run_spmd(bad_steps, 1, arguments(corpus, "--train-iters 9"), str(tmp_path))[0]
    assert changed == [False, False, True]
    assert "step 1 (samples 0 to 7): loss 5.5" in text
    assert "; not finite: gradient of decoder.layers.1.mlp.linear_fc2.weight" in text
    assert "step 2 (samples 8 to 15): loss" in text
    assert "step 3 (" not in text


def test_fp16_skips_steps_until_the_loss_scale_fits(corpus, tmp_path):
    argv = arguments(corpus, "--train-iters 40 --fp16 --lr-warmup-iters 0 --log-interval 1")
    steps = run_spmd(run_train, 1, argv, str(tmp_path))[0]
    skipped = [step["skipped"] for step in steps]
    scales = [step["loss_scale"] for step in steps]
    assert skipped[0] == 1 and scales[0] == 2**32 and sum(skipped) < 30 and not any(skipped[-5:])
    assert scales[-1] < 2**32 and steps[sum(skipped)]["lm_loss"] > steps[-1]["lm_loss"]
    log = (tmp_path / "runs/test/log.txt").read_text()
    assert "step 1 (samples 0 to 7): loss scale 4294967296 too large, step skipped\n" in log
    first_good = skipped.index(0)
    assert len({step["lr"] for step in steps[: first_good + 1]}) == 1  # the schedule waits for finite steps
    rates = logged_rates(tmp_path)  # Megatron's line has the rate of the step that follows
    assert [rates[i + 1] for i in range(39)] == pytest.approx([step["lr"] for step in steps[1:]], rel=1e-6)

"""Settings of a run as a whole: growing batches, evaluation alone, skipped iterations, what is logged."""

import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from nanomegatron.config.settings import DataConfig
from nanomegatron.data.gpt_dataset import GPTDataset, build_datasets
from nanomegatron.data.indexed_dataset import IndexedDataset
from nanomegatron.data.loader import BatchLoader
from nanomegatron.data.tokenizer import NullTokenizer
from nanomegatron.faults import exit as run_exit
from nanomegatron.faults.exit import BAD_CONFIG, DONE
from nanomegatron.mesh import Axis, World
from nanomegatron.report import plots
from nanomegatron.report.writers import read_jsonl
from nanomegatron.step import Training, token_count
from tests.spmd import run_spmd
from tests.test_train import arguments, corpus, logged_rates, run_train  # noqa: F401 (a fixture)

RAMP = "--train-samples 96 --rampup-batch-size 4 4 24 --global-batch-size 12 --eval-iters 0"
SERIES = ("iteration", "consumed_samples", "global_batch_size", "lm_loss", "grad_norm", "lr")


def series(steps: list[dict]) -> list[tuple]:
    return [tuple(step[key] for key in SERIES) for step in steps]


@pytest.fixture(scope="module")
def ramp(corpus, tmp_path_factory) -> tuple[Path, list[dict]]:  # noqa: F811
    folder = tmp_path_factory.mktemp("ramp")
    more = "--lr-warmup-iters 0 --lr-warmup-samples 20 --save-interval 4 --micro-batch-size 1"
    return folder, run_spmd(run_train, 1, arguments(corpus, RAMP, more), str(folder))[0]


LARGE = "--config gpt2-124m --vocab-size 50257"


@pytest.mark.parametrize(
    "flags, threads, two",
    [("", 2, True), ("", 8, True), ("", 1, False), ("--tp 2", 2, True), ("--tp 3 --lrr", 2, False)]
    + [("--nproc 1", 2, False), ("--nproc 4 --tp 2", 2, False), (LARGE, 2, False)]
    + [("--global-batch-size 3 --micro-batch-size 1", 2, False), ("--config tiny-moe-cpu --ep 2", 2, True)],
)
def test_a_small_model_takes_two_processes_of_a_cpu(flags, threads, two, monkeypatch):
    """Where the command line leaves it open, one process has threads to spare, and both get samples."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.delenv("RANK", raising=False)
    argv = flags.split()
    assert train.with_processes(argv) == [*argv, *["--nproc", "2"] * two]
    with monkeypatch.context() as torchrun:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            torchrun.setenv(name, value)
        assert train.with_processes(argv) == argv
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert train.with_processes(argv) == argv
    cpu = [*argv, "--device", "cpu"]
    assert train.with_processes(cpu) == [*cpu, *["--nproc", "2"] * two]


def test_cached_memory_is_given_back(corpus, tmp_path, monkeypatch):  # noqa: F811
    """Level 1: once in each of 2 steps and 2 evaluations of a batch; 2: after the optimizer, too."""
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    for level in (0, 1, 2):
        more = f"--train-iters 2 --lr-warmup-iters 0 --eval-iters 1 --eval-interval 1 --run-name {level}"
        argv = arguments(corpus, more, f"--empty-unused-memory-level {level}")
        assert train.main(argv) == DONE
        assert len(calls) == (0, 4, 6)[level]
        calls.clear()


def test_batches_grow(ramp):
    """Two increments of 12 samples each; rates count samples, speeds the step's own batch."""
    folder, steps = ramp
    sizes = [step["global_batch_size"] for step in steps]
    assert sizes == [4, 4, 4, 8, 8, 12, 12, 12, 12, 12]
    assert [step["consumed_samples"] for step in steps] == np.cumsum(sizes).tolist()
    assert [step["lr"] for step in steps[:6]] == pytest.approx(
        [0, 6e-4, 12e-4, 18e-4, 3e-3, 3e-3 * (0.5 + 0.5 * math.cos(math.pi * 8 / 76))], rel=1e-6
    )
    last = 3e-3 * (0.5 + 0.5 * math.cos(math.pi * 68 / 76))
    assert logged_rates(folder) == pytest.approx({1: steps[1]["lr"], 10: last}, rel=1e-6)
    for step in steps:
        tokens = step["tokens_per_s"] * step["step_time_ms"] / 1e3
        assert tokens == pytest.approx(32 * step["global_batch_size"])
    text = (folder / "runs/test/log.txt").read_text()
    assert "batch   4 from sample 0, 8 from sample 12, 12 from sample 24 | 88 samples in all" in text
    assert "| global batch size:     4 |" in text and "| global batch size:    12 |" in text


@pytest.mark.parametrize(
    "world, tolerance", [(1, 0), (2, 1e-6), pytest.param(4, 1e-6, marks=pytest.mark.full)]
)
def test_a_ramp_goes_on_in_its_middle(world, tolerance, ramp, corpus, tmp_path):  # noqa: F811
    """From step 4, where batches are 8 and soon 12, on any number of replicas."""
    folder, steps = ramp
    more = "--lr-warmup-iters 0 --lr-warmup-samples 20 --micro-batch-size 1 --run-name other"
    argv = arguments(corpus, RAMP, more, f"--load {folder}/runs/test/ckpt --ckpt-step 4")
    assert run_spmd(run_there, world, argv, str(tmp_path)) == [DONE] * world
    resumed = read_jsonl(tmp_path / "runs/other/metrics.jsonl")
    ours, theirs = np.array(series(resumed)), np.array(series(steps[4:]))
    np.testing.assert_allclose(ours, theirs, rtol=tolerance)
    if world == 1:
        assert series(resumed) == series(steps[4:])


def run_there(world: World, argv: list[str], folder: str) -> int:
    os.chdir(folder)
    plots.plot_loss = lambda *_: None  # to load matplotlib takes a second
    return train.run_rank(world, argv)


def evaluations(folder: Path, name: str = "test") -> list[tuple]:
    records = read_jsonl(folder / f"runs/{name}/evals.jsonl")
    return [(r["iteration"], r["split"], r["lm_loss"], r["ppl"]) for r in records]


def test_eval_only_is_the_evaluation_of_the_run(corpus, tmp_path):  # noqa: F811
    """After the run and from elsewhere; nothing of the run changes; without a checkpoint it says so."""
    argv = arguments(corpus, "--train-iters 6 --split 80,10,10 --eval-interval 4")
    assert run_spmd(run_there, 1, [*argv, "--eval-only"], str(tmp_path)) == [run_exit.NO_CHECKPOINT]
    assert run_spmd(run_there, 1, argv, str(tmp_path)) == [DONE]
    end = evaluations(tmp_path)
    assert [(i, split) for i, split, *_ in end] == [(4, "validation"), (6, "validation"), (6, "test")]
    assert all(ppl == pytest.approx(math.exp(loss)) for *_, loss, ppl in end) and end[1][2] != end[2][2]
    files = ("config.toml", "metrics.jsonl", "evals.jsonl")
    before = [(tmp_path / "runs/test" / file).read_text() for file in files]
    assert run_spmd(run_there, 1, [*argv, "--eval-only"], str(tmp_path)) == [DONE]
    *same, evals = [(tmp_path / "runs/test" / file).read_text() for file in files]
    assert same == before[:2] and evals.startswith(before[2])
    assert evaluations(tmp_path)[3:] == end[1:], "beside those of training, the same"
    other = [*argv, "--skip-train", "--run-name", "other", "--load", str(tmp_path / "runs/test/ckpt")]
    assert run_spmd(run_there, 2, other, str(tmp_path)) == [DONE] * 2
    for ours, theirs in zip(evaluations(tmp_path, "other"), end[1:], strict=True):
        assert ours[:2] == theirs[:2] and ours[2] == pytest.approx(theirs[2], rel=1e-6)
    assert not (tmp_path / "runs/other/metrics.jsonl").exists()
    status = json.loads((tmp_path / "runs/other/status.json").read_text())
    assert (status["state"], status["exit_code"], status["iteration"]) == ("done", 0, 6)


def without_samples(world: World, argv: list[str], folder: str, first: int, count: int) -> list[dict]:
    """A run whose data lacks `count` samples from `first` on."""
    batches = BatchLoader.batches

    def fewer(loader, sample, size):
        return batches(loader, sample + count * (sample >= first), size)

    BatchLoader.batches = fewer
    return run_train(world, argv, folder)


def test_skipped_iterations_leave_their_samples_out(corpus, tmp_path):  # noqa: F811
    """Steps 3 and 4 of 10: what follows is what a run without their samples does, schedule and all."""
    flags = "--lr-decay-iters 20 --eval-iters 0 --log-interval 1"
    argv = arguments(corpus, "--train-iters 10 --iterations-to-skip 3 4", flags)
    ours = run_spmd(run_train, 1, argv, str(tmp_path))[0]
    (tmp_path / "other").mkdir()
    argv = arguments(corpus, "--train-iters 8", flags)
    theirs = run_spmd(without_samples, 1, argv, str(tmp_path / "other"), 16, 16)[0]
    assert [step["iteration"] for step in ours] == [1, 2, 5, 6, 7, 8, 9, 10]
    assert [step["consumed_samples"] for step in ours] == [8, 16, 40, 48, 56, 64, 72, 80]
    for key in ("lm_loss", "grad_norm", "lr"):
        assert [step[key] for step in ours] == [step[key] for step in theirs]
    assert [step["skipped_samples"] for step in ours] == [0, 0] + [16] * 6
    text = (tmp_path / "runs/test/log.txt").read_text()
    assert "| consumed samples:           40 | skipped samples:           16 |" in text


def consumed(world: World, argv: list[str], folder: str) -> list[list[int]]:
    """The rows that a run trains on, in its order."""
    next_batches, rows = Training.next_batches, []

    def kept(run):
        found = next_batches(run)
        rows.extend(row for batch in found for row in batch.tokens.tolist())
        return found

    Training.next_batches = kept
    run_train(world, argv, folder)
    return rows


def test_a_longer_run_keeps_the_order_of_the_data(corpus, tmp_path):  # noqa: F811
    """52 samples, then 100, then 152, of 30 an epoch: within an epoch none is lost or comes again."""
    flags = "--split 5,95,0 --global-batch-size 4 --num-layers 1 --eval-iters 0 --lr-decay-iters 50"
    rows = []
    for iters in (13, 25, 38):
        argv = arguments(corpus, flags, f"--train-iters {iters}")
        rows += run_spmd(consumed, 1, argv, str(tmp_path))[0]
    expected = GPTDataset(IndexedDataset(corpus), (0, 2), 152, 32, 1234, before=(52, 100))
    assert rows == [expected[i][:-1].tolist() for i in range(152)]
    first = GPTDataset(IndexedDataset(corpus), (0, 2), 52, 32, 1234)
    assert rows[: len(first)] == [sample[:-1].tolist() for sample in first]
    assert 52 < len(first) < 100, "a run ends within an epoch, which the next one continues"
    assert "resumed" in (log := (tmp_path / "runs/test/log.txt").read_text()) and "samples may" not in log


def test_tokens_are_counted_past_what_fp32_holds():
    """2^24 + 1 is no number of fp32."""
    masks = torch.ones(1, 1).expand(64, 2**18), torch.ones(1, 1), torch.zeros(1, 4)
    run = SimpleNamespace(model=SimpleNamespace(has_loss=True), mesh=SimpleNamespace(dp_cp=Axis.single()))
    assert int(token_count(run, [SimpleNamespace(loss_mask=mask) for mask in masks])) == 2**24 + 1


def test_norms_timers_and_tags(corpus, tmp_path):  # noqa: F811
    """What is logged on request, on two ranks; the run itself is none the wiser."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    flags = "--train-iters 5 --log-interval 2 --eval-iters 1 --lr-warmup-iters 2"
    flags += " --untie-embeddings-and-output-weights"
    plain = run_spmd(run_train, 2, arguments(corpus, flags), str(tmp_path))[0]
    (tmp_path / "more").mkdir()
    more = "--log-params-norm --log-num-zeros-in-grad --timing-log-level 2 --tensorboard-dir tb"
    steps = run_spmd(run_train, 2, arguments(corpus, flags, more), str(tmp_path / "more"))[0]
    assert series(steps) == series(plain) and "params_norm" not in plain[0]
    unseen = 64 * (257 - 26 - 2)  # gradients of bytes that are no letter, no space and no end
    assert all(unseen <= step["num_zeros"] < unseen + 640 for step in steps)
    norms = [step["params_norm"] for step in steps]
    assert norms == sorted(norms) and 0 < norms[0] < norms[-1]

    text = (tmp_path / "more/runs/test/log.txt").read_text()
    assert text.count("(min, max) time across ranks (ms):") == text.count("/       5 | consumed") == 4
    names = "batch-generator forward-backward forward-compute backward-compute all-grads-sync optimizer"
    for name in names.split():
        assert text.count(f"\n    {name + ' ':.<48}: (") == 4
    assert (
        f"| num zeros: {steps[3]['num_zeros']:.0f} | params norm: {norms[3]:.3f} | number of skipped" in text
    )

    events = event_accumulator.EventAccumulator(str(tmp_path / "more/tb"))
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    both = ["lm loss", "learning-rate", "batch-size", "loss-scale", "grad-norm", "num-zeros", "params-norm"]
    both += ["lm loss validation", "lm loss validation ppl"]
    assert {*both, *(f"{tag} vs samples" for tag in both), "iteration-time", "throughput"} <= scalars
    assert [(e.step, e.value) for e in events.Scalars("num-zeros vs samples")] == [
        (step["consumed_samples"], step["num_zeros"]) for step in steps
    ]


def test_a_hugging_face_folder_is_evaluated_and_trained_on(tmp_path):
    """Loss and perplexity are those of transformers; training begins at step 0 and resumes from its own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=99, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "hf")
    flags = "--load hf --mock-data --vocab-size 99 --seq-length 16 --micro-batch-size 1 --global-batch-size 4"
    argv = f"{flags} --eval-iters 2 --device cpu --run-name test --train-iters 2 --lr-warmup-iters 0".split()
    assert run_spmd(run_there, 2, [*argv, "--eval-only", "--tp", "2"], str(tmp_path)) == [DONE] * 2
    data = build_datasets(DataConfig(mock_data=True, seq_length=16), (0, 8, 8), 1234, NullTokenizer(99))
    for dataset, (iteration, _, loss, _) in zip(data[1:], evaluations(tmp_path), strict=True):
        samples = torch.from_numpy(np.stack([dataset[i] for i in range(8)]))
        with torch.no_grad():
            logits = model(samples[:, :-1]).logits.flatten(0, 1).double()
        expected = torch.nn.functional.cross_entropy(logits, samples[:, 1:].flatten())
        assert loss == pytest.approx(expected.item(), rel=1e-6) and iteration == 0
    staged = [*argv, "--eval-only", "--pp", "2", "--attention-backend", "flash", "--run-name", "staged"]
    assert run_spmd(run_there, 2, staged, str(tmp_path)) == [DONE] * 2
    lines = (tmp_path / "runs/staged/evals.jsonl").read_text().splitlines()
    found = [json.loads(line)["lm_loss"] for line in lines]
    assert found == pytest.approx([loss for _, _, loss, _ in evaluations(tmp_path)], rel=1e-6)
    assert run_spmd(run_there, 1, argv, str(tmp_path)) == [DONE]
    assert run_spmd(run_there, 1, [*argv, "--train-iters", "3"], str(tmp_path)) == [DONE]
    text = (tmp_path / "runs/test/log.txt").read_text()
    assert "was trained with" not in text
    other = [*argv, "--run-name", "other", "--rotary-base", "500"]
    assert run_spmd(run_there, 1, other, str(tmp_path)) == [DONE]
    said = "--rotary-base 500.0: hf was trained with 10000.0"
    assert said in (tmp_path / "runs/other/log.txt").read_text()
    for flags in ["--load", "hf"], ["--tokenizer-type", "ByteTokenizer"]:  # the text at hand is in other ids
        assert run_spmd(run_there, 1, flags, str(tmp_path)) == [BAD_CONFIG]
    assert not (tmp_path / "data").exists()
    assert text.count("loaded  hf, ") == 2 and text.count("resumed runs/test/ckpt, step 2") == 1
    assert [step["iteration"] for step in read_jsonl(tmp_path / "runs/test/metrics.jsonl")] == [1, 2, 3]


SHARED = "--seq-length 32 --micro-batch-size 2 --train-iters 4 --lr-warmup-iters 0 --log-interval 1"
SHARED += " --rotary-seq-len-interpolation-factor 2"
WINDOW = "--window-size 7 0 --window-attn-skip-freq 2"


@pytest.fixture(scope="module")
def shared_alone(corpus, tmp_path_factory) -> dict[str, list[dict]]:  # noqa: F811
    """What one process does, by the model's flags."""
    folders = {model: str(tmp_path_factory.mktemp("alone")) for model in ("", WINDOW)}
    return {m: run_spmd(run_train, 1, arguments(corpus, SHARED, m), f)[0] for m, f in folders.items()}


@pytest.mark.parametrize(
    "flags, model, line",
    [
        ("", "", "zigzag over 2 ranks by p2p (ring)"),
        ("--cp-comm-type p2p a2a", "", "by p2p (ring) in 1 of 2 layers, a2a (heads) in 1 of 2 layers"),
        ("", WINDOW, "by p2p (ring) | 1 of 2 layers with a window: keys gathered, no ring"),
        ("--cp-comm-type all_gather", WINDOW, "zigzag over 2 ranks by allgather (all keys)"),
        (
            "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1",
            "",
            "by a2a+p2p (heads, ring: 2 x 1)",
        ),
    ],
)
def test_the_first_lines_tell_how_rows_are_shared(
    flags,
    model,
    line,
    corpus,  # noqa: F811
    shared_alone,
    tmp_path,
):
    """And the run is that of one process."""
    ours = run_spmd(run_train, 2, arguments(corpus, SHARED, model, "--cp 2", flags), str(tmp_path))[0]
    text = (tmp_path / "runs/test/log.txt").read_text()
    assert text.count("\ncp      ") == 1 and f"{line}\n" in text and " dp1 cp2 " in text
    np.testing.assert_allclose(series(ours), series(shared_alone[model]), rtol=1e-5)


@pytest.mark.parametrize(
    "flags, paths",
    [
        ("--fast-paths", "ep tokens in blocks, sent by asynchronous collectives (no GPU)"),
        ("--fast-paths --moe-token-dispatcher-type alltoall", "ep tokens sent by asynchronous all-to-all"),
        ("--no-fast-paths", "plain (--no-fast-paths)"),
        ("", None),
    ],
)
def test_the_first_lines_tell_how_tokens_go_to_experts(flags, paths, corpus, tmp_path):  # noqa: F811
    experts = (
        "--num-experts 4 --moe-router-topk 2 --ep 2 --micro-batch-size 2 --train-iters 1 --lr-warmup-iters 0"
    )
    run_spmd(run_train, 2, arguments(corpus, experts, flags), str(tmp_path))
    text = (tmp_path / "runs/test/log.txt").read_text()
    assert re.findall(r"^paths   (.*)$", text, re.MULTILINE) == ([paths] if paths else [])

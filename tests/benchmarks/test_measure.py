"""The runner of training benchmarks: cases are valid command lines, and small ones run to their end."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from benchmarks import cases, long_tail, measure, peer_program
from benchmarks.cases import LOSSES, PARTS, Case, cases_of
from nanomegatron.config.check import validate
from nanomegatron.config.cli import parse
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder
from nanomegatron.mesh import World
from nanomegatron.report import plots
from tests.benchmarks.test_peers import KINDS, without_compilation

ROOT = Path(__file__).resolve().parents[2]


class Forked:
    """A process as subprocess.Popen has it, for `python PROGRAM ...`: its ranks come from the fork server."""

    def __init__(self, command: list[str], *, cwd: Path, stdout, **_) -> None:
        assert command[0] == sys.executable
        ranks = int(command[command.index("--nproc") + 1]) if "--nproc" in command else 1
        context, worlds = multiprocessing.get_context("forkserver"), range(ranks)
        worlds = (
            [World(rank, ranks, rank, f"file://{cwd}/store") for rank in worlds] if ranks > 1 else [World()]
        )
        arguments = command[1:], str(cwd), stdout.name
        self.ranks = [context.Process(target=run_there, args=(world, *arguments)) for world in worlds]
        for process in self.ranks:
            process.start()
        self.pid = self.ranks[0].pid

    def poll(self) -> int | None:
        codes = [process.exitcode for process in self.ranks]
        return None if None in codes else max(codes)

    def wait(self) -> int:
        self.ranks[0].join()
        for process in self.ranks[1:]:
            if self.ranks[0].exitcode < 0:
                process.kill()
            process.join()
        return self.poll()


def run_there(world: World, command: list[str], folder: str, console: str) -> None:
    """A rank of `PROGRAM FLAGS`; by itself all that the program does."""
    os.chdir(folder)
    with open(console, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    plots.plot_loss = plots.plot_experts = lambda *_: None  # to load matplotlib takes a second
    script, argv = str(Path(command[0]).relative_to(ROOT)), command[1:]
    without_compilation()
    if script == "train.py":
        sys.exit(train.run_rank(world, argv) if world.size > 1 else train.main(argv))
    if world.size == 1:
        sys.exit(peer_program.main(KINDS[script], argv))
    sys.exit(peer_program.run_rank(world, KINDS[script][argv[0]], argv[1:]))


STAND_IN = SimpleNamespace(
    Popen=Forked, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT, run=subprocess.run
)


@pytest.fixture(autouse=True)
def forked(full, monkeypatch) -> None:
    """The full tier starts every run as a user does."""
    if not full:
        monkeypatch.setattr(measure, "subprocess", STAND_IN)


def measured(out: Path, *words: str, code: int = 0) -> dict[str, dict]:
    """The rows of a small measurement, by case."""
    assert measure.main([*words, "--small", "--out", str(out)]) == code
    return {row["name"]: row for row in json.loads(out.read_text())["cases"]}


def only(*names: str) -> list[str]:
    return [f"--only={name}" for name in names]


# Cases


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_cases_are_valid_command_lines(part, small, tmp_path):
    """For 4 GPUs, and small for 2 ranks; names differ, and the case that one is like stands before it."""
    long_tail.write(tmp_path, long_tail.draw_lengths(20, 128))
    seen: set[str] = set()
    for case in cases_of(part, 2 if small else 4, small):
        words = case.flags.replace("{documents}", str(tmp_path / "documents")).split()
        parsed = parse(words if part in LOSSES else [*words, "--train-iters", "9"])
        device = "cpu" if "cpu" in words else "cuda"
        errors = [*parsed.errors, *validate(parsed.config, case.gpus, device)]
        errors = [error for error in errors if "Hopper" not in error]
        assert not errors, case.name
        assert case.name not in seen and case.like in {"", *seen}
        assert (ROOT / case.program.split()[0]).is_file() and device == ("cpu" if small else device)
        seen.add(case.name)
    assert any(case.usual for case in cases_of(part, 4, False))


def test_list_prints_all_cases(capsys):
    assert measure.main(["tp", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(cases_of("tp", 4, False)) and "--tp 4" in lines[1]
    assert lines[-1].startswith("tp fp8 overlap (only if named): train.py")


@pytest.mark.parametrize(
    "words, error",
    [
        (["tp"], "give --out"),
        (["sp", "--out", "x"], "invalid choice: 'sp'"),
        (["tp", "--out", "x", "--only", "megatron"], "--only megatron: there are one gpu; tp;"),
        (["tp", "--out", "x"], "4 GPUs are needed, 0 are here"),
    ],
)
def test_bad_arguments(words, error, capsys, monkeypatch):
    monkeypatch.setattr(measure, "gpus", list)
    with pytest.raises(SystemExit) as failed:
        measure.main(words)
    assert error in capsys.readouterr().err + str(failed.value)


# Parts


def test_tensor_parallel_part(tmp_path, full, capsys):
    names = ["tp", "tp overlap"] + ["tp fp8", "dtensor", "dtensor async"] * full
    rows = measured(
        tmp_path / "tp.json", "tp", "--repetitions", "2", "--steps", "3", *only("one gpu", *names)
    )
    assert list(rows) == ["one gpu", *names] and rows["one gpu"]["gpus"] == 1
    for name in names:
        row = rows[name]
        assert [len(times) for times in row["step_ms"]] == [3, 3] and row["loss"][0] == row["loss"][1]
        assert len(row["loss"][0]) == 4 and not row["problems"] and row["gpus"] == 2
        assert row["tokens_per_s_per_gpu"] == pytest.approx(2 * 32e3 / row["median_ms"] / 2, rel=0.5)
        assert name == "tp" or row["loss_change"] <= 2e-3
        assert row["peak_gib"] > 0 and (row["predicted_gib"] is None) == ("dtensor" in name)
    printed = capsys.readouterr().out
    assert "| tp overlap | 2 |" in printed and "benchmarks.measure tp" in printed


@pytest.mark.full
def test_data_parallel_part(tmp_path, full):
    names = ["dp overlap, 4", "fsdp, 4"] + ["dp fp8, 4", "dp fp8 gather, 4", "fsdp kept, 4"] * full
    rows = measured(tmp_path / "dp.json", "dp", *only(*names))
    assert not any(row["problems"] for row in rows.values())
    if full:
        assert rows["dp fp8, 4"]["loss"] == rows["dp fp8 gather, 4"]["loss"] != rows["dp overlap, 4"]["loss"]


@pytest.mark.full
def test_parts_of_one_gpu(tmp_path):
    """Without kernels the same losses; every recipe learns in its own way. torchao need not be installed."""
    rows = measured(tmp_path / "one.json", "one", *only("kernels, 4", "no kernels, 4", "compile, 4"))
    assert rows["no kernels, 4"]["loss"] == rows["kernels, 4"]["loss"] and "loss_change" in rows["compile, 4"]
    names = ["bf16, 1", *(f"fp8 {recipe}, 1" for recipe in cases.RECIPES)]
    rows = measured(tmp_path / "fp8.json", "fp8", *only(*names))
    assert len({str(rows[name]["loss"]) for name in names}) >= len(names) - 1
    assert measured(tmp_path / "offload.json", "offload")["offload"]["median_ms"] > 0


@pytest.mark.full
def test_pipeline_part(tmp_path, full):
    """Bubbles of a traced step, which is none of the timed ones, nor are those that are profiled."""
    names = ["zb-v, 8"] + ["1f1b, 8", "torch zb-v, 8", "torch interleaved 4, 8"] * full
    rows = measured(tmp_path / "pp.json", "pp", "--profile", *only(*names))
    row = rows["zb-v, 8"]
    assert row["bubble_percent"]["measured"] > 0 and row["bubble_percent"]["planned"] > 0
    assert len(row["step_ms"][0]) == 2 and len(row["loss"][0]) == 3
    for name in names[2:]:
        assert rows[name]["loss"][0] == pytest.approx(row["loss"][0], rel=2e-3)


def test_context_parallel_part(tmp_path, full):
    names = ["32k", "32k a2a"] + ["64k", "32k allgather"] * full
    rows = measured(tmp_path / "cp.json", "cp", *only(*names))
    assert rows["32k a2a"]["loss_change"] <= 2e-3 and not any(row["problems"] for row in rows.values())


@pytest.mark.full
def test_part_of_documents(tmp_path):
    """The same documents a step, hence the same loss; tokens are those of documents, without padding."""
    rows = measured(tmp_path / "dynamic.json", "dynamic")
    fixed, dynamic = rows["fixed"], rows["dynamic"]
    assert dynamic["loss"][0] == pytest.approx(fixed["loss"][0], rel=2e-3)
    tokens = [row["tokens_per_s"] * sum(row["step_ms"][0]) / 1e3 for row in (fixed, dynamic)]
    assert tokens[0] == pytest.approx(tokens[1], rel=1e-4) and tokens[0] < 2 * 6 * 128


@pytest.mark.full
def test_part_of_experts(tmp_path, full):
    """A router that is forced is more even."""
    names = ["mixtral", "mixtral even"] + ["qwen", "qwen allgather", "qwen transformers"] * full
    rows = measured(tmp_path / "ep.json", "ep", *only(*names))
    assert rows["mixtral"]["imbalance"] > rows["mixtral even"]["imbalance"] >= 1
    assert not any(row["problems"] for row in rows.values())


@pytest.mark.full
def test_part_of_long_rows(tmp_path):
    rows = measured(
        tmp_path / "long.json", "long", *only("nothing recomputed, 16k", "layers recomputed, 16k")
    )
    assert all(len(row["step_ms"][0]) == 2 for row in rows.values())


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> list[str]:
    """Words of their own for the parts of losses, in bytes."""
    folder, random = tmp_path_factory.mktemp("text"), np.random.RandomState(0)
    words = [random.randint(97, 123, size=random.randint(2, 7)) for _ in range(50)]
    for name in ("train", "valid"):
        with IndexedDatasetBuilder(str(folder / name), np.uint16) as builder:
            for _ in range(10):
                document = np.concatenate([np.append(words[random.randint(50)], 32) for _ in range(100)])
                builder.add_document(np.append(document, 256))
            builder.finalize()
    return ["--data", f"{folder}/train", f"{folder}/valid", "--flags", "--tokenizer-type ByteTokenizer"]


def test_fp8_losses(tmp_path, text, full):
    """From the same weights and text, a seed a repetition: first losses are alike, the last are lower."""
    names = ["bf16", "fp8 delayed", *(f"fp8 {recipe}" for recipe in cases.RECIPES[1:] * full)]
    rows = measured(
        tmp_path / "fp8.json", "fp8-losses", *text, *only(*names), "--repetitions", "1" + "" * full
    )
    base = rows["bf16"]["runs"][0]
    for name in names:
        (run,) = rows[name]["runs"]
        assert run["seed"] == 1 and len(run["curve"]) == run["steps"] == 8
        assert run["train_loss"] == pytest.approx(np.mean(run["curve"]), abs=1e-5)
        assert run["curve"][0] == pytest.approx(base["curve"][0], abs=0.01)
        assert run["valid_loss"] < run["curve"][0] - 0.05
    gap = rows["fp8 delayed"]["valid_loss"]["difference"]
    assert gap == pytest.approx(rows["fp8 delayed"]["runs"][0]["valid_loss"] - base["valid_loss"], abs=1e-5)


@pytest.mark.full
def test_moe_losses(tmp_path, text, full):
    """Experts are as much work as dense layers; their load is counted."""
    names = ["dense", "aux loss"] + ["dense preset", "no balancing", "expert bias"] * full
    words = ["moe-losses", *text, *only(*names), "--first-seed", "5"]
    rows = measured(tmp_path / "moe.json", *words)
    dense, sparse = (rows[name]["runs"][0] for name in names[:2])
    assert sparse["seed"] == dense["seed"] == 5 and "busiest" not in dense
    assert len(sparse["busiest"]) == 8 and min(sparse["busiest"]) >= 1
    assert sparse["curve"][0] == pytest.approx(dense["curve"][0], abs=0.1)
    assert len({row["runs"][0]["valid_loss"] for row in rows.values()}) == len(names)


# What goes wrong


def test_what_fails_is_left_out(tmp_path, monkeypatch, capsys):
    """A bad flag, a program that ends, another loss: the others run, and the exit code is 1."""
    flags = f"{cases.LLAMA} --micro-batch-size 1 --global-batch-size 1"
    made = [
        Case("good", flags),
        Case("bad flag", f"{flags} --cp-comm-type p3p"),
        Case("no program", flags, program="benchmarks/peers.py none"),
        Case("other seed", f"{flags} --seed 7", like="good", tolerance=1e-6),
    ]
    monkeypatch.setitem(cases.PARTS, "one", lambda n: made)
    rows = measured(tmp_path / "bad.json", "one", code=1)
    assert rows["good"]["median_ms"] > 0 and not rows["good"]["problems"]
    assert "p3p" in rows["bad flag"]["problems"][0]
    assert "the first word says who trains" in rows["no program"]["problems"][0]
    assert rows["other seed"]["problems"] == ["first loss is not that of good"]
    assert "no program: the first word" in capsys.readouterr().out


def test_what_does_not_fit_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "gpus", lambda: [dict(name="NVIDIA H200", total=40.0, used=1.0)] * 4)
    monkeypatch.setattr(measure, "build_kernels", lambda checkouts: True)
    out = tmp_path / "long.json"
    assert measure.main(["long", "--out", str(out), "--only", "nothing recomputed, 512k"]) == 0
    (row,) = json.loads(out.read_text())["cases"]
    assert row["left_out"].startswith("does not fit:") and "median_ms" not in row and not row["problems"]


def test_beside_another_checkout(tmp_path, capsys):
    """The same code has the same losses; the row of the GPU gate is in the JSON."""
    words = ["one", "--old", str(ROOT), *only("kernels, 1"), "--steps", "1"]
    assert measure.main([*words, "--small", "--out", str(tmp_path / "old.json")]) == 0
    result = json.loads((tmp_path / "old.json").read_text())
    row = result["cases"][0]["against_old"]
    assert row["ratio"] == row["new"]["ms"] / row["old"]["ms"] and row["old"]["loss"] == row["new"]["loss"]
    assert (
        result["commit"]["old"] == result["commit"]["new"]
        and f"| {row['ratio']:.3f} |" in capsys.readouterr().out
    )


def test_no_run_outlives_the_program(tmp_path, text):
    words = [
        "-m",
        "benchmarks.measure",
        "fp8-losses",
        "--small",
        *text[:-1],
        f"{text[-1]} --train-iters 100000",
    ]
    process = subprocess.Popen(
        [sys.executable, *words, "--only", "bf16", "--out", str(tmp_path / "x.json")],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    limit = time.monotonic() + 120
    while not list(tmp_path.glob("measure-*/runs/case/status.json")) and time.monotonic() < limit:
        time.sleep(0.1)
    assert list(tmp_path.glob("measure-*/runs"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) != 0
    assert not list(tmp_path.glob("measure-*"))
    here = str(tmp_path).encode()
    assert not [p for p in Path("/proc").glob("[0-9]*/cwd") if here in bytes(p.resolve())]


# Numbers


def test_speed_of_steps():
    """Of the median time where all steps have as many tokens, else of all."""

    def step(ms: float, tokens: float) -> dict:
        return dict(step_time_ms=ms, tokens_per_s=1e3 * tokens / ms, tflops_per_gpu=6 * tokens / ms, mfu=None)

    alike = measure.speed([step(10, 100), step(10, 100), step(40, 100)])
    assert alike == {"tokens_per_s": pytest.approx(1e4), "tflops_per_gpu": pytest.approx(60), "mfu": None}
    assert measure.speed([step(10, 100), step(30, 500)])["tokens_per_s"] == pytest.approx(15e3)

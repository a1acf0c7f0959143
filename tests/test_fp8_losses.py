"""The comparison of losses in FP8 and bf16: a small real one, and what is said of made-up runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fp8_losses
from benchmarks import fp8_losses_report as report
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder
from tests.test_moe_training import STAND_IN

NAN = float("nan")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", autouse=True)
def forked(full) -> None:
    """The full tier starts every run as a user does."""
    with pytest.MonkeyPatch.context() as patch:
        if not full:
            patch.setattr(fp8_losses, "subprocess", STAND_IN)
        yield


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    """What every small comparison is told: this text, in bytes, and two runs at a time."""
    folder, random = tmp_path_factory.mktemp("text"), np.random.RandomState(0)
    words = [random.randint(97, 123, size=random.randint(2, 7)) for _ in range(50)]
    for name in ("train", "valid"):
        with IndexedDatasetBuilder(str(folder / name), np.uint16) as builder:
            for _ in range(10):
                text = np.concatenate([np.append(words[random.randint(50)], 32) for _ in range(100)])
                builder.add_document(np.append(text, 256))
            builder.finalize()
    return f"--small --jobs 2 --threads 1 --data {folder}/train {folder}/valid".split()


def compare(flags: list[str], out: Path, *more: str) -> tuple[int, dict]:
    """The exit code and what is in the JSON."""
    code = fp8_losses.main([*flags, "--out", str(out), *more, "--", "--tokenizer-type", "ByteTokenizer"])
    return code, json.loads(out.read_text())


@pytest.fixture(scope="module")
def small(flags, tmp_path_factory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("small") / "small.json"
    code, result = compare(flags, out)
    assert code == 0
    return out, result


def made_up(recipe: str, losses: dict[int, float]) -> list[dict]:
    rest = dict(skipped=0, tokens_per_s=1000.0)
    return [
        dict(recipe=recipe, seed=seed, train_loss=x, valid_loss=x, curve=[9.0, x], **rest)
        for seed, x in losses.items()
    ]


def written(path: Path, runs: list[dict], **facts) -> Path:
    result = dict(
        date="today", torch="2", device="cpu", kernels=False, jobs=1, model="demo", train_iters=2, flags=""
    )
    fp8_losses.write(path, result | dict(data={}, tokens={"train": 1}) | facts | {"runs": runs})
    return path


def test_all_recipes_train(small):
    """From the same weights and text: the first losses are alike, the last have come down."""
    result = small[1]
    assert [(run["recipe"], run["seed"]) for run in result["runs"]] == [(name, 1) for name in report.NAMES]
    curves = {run["recipe"]: run["curve"] for run in result["runs"]}
    for run in result["runs"]:
        assert len(run["curve"]) == result["train_iters"] == 8
        assert run["train_loss"] == pytest.approx(np.mean(run["curve"]), abs=1e-5)
        assert run["curve"][0] == pytest.approx(curves["bf16"][0], abs=0.01)
        assert run["valid_loss"] < run["curve"][0] - 0.05
    # Small scales may move no bit: then blockwise gives what another recipe does, on some processors.
    assert len({run["valid_loss"] for run in result["runs"]}) >= len(report.NAMES) - 1
    assert "--bf16" in result["flags"] and result["data"] == {"train": "train", "valid": "valid"}
    assert result["summary"]["rowwise"]["train_loss"]["difference"]["mean"] == pytest.approx(
        result["runs"][3]["train_loss"] - result["runs"][0]["train_loss"]
    )


def test_a_run_that_fails_is_told(small, flags, tmp_path, capsys):
    """The others go on, and end as they did before, to the bit."""
    bad = "tensorwise --fp8-amax-history-len 7"
    code, result = compare(flags, tmp_path / "bad.json", "--only", bad, "--only", "bf16")
    assert code == 1
    failed, good = result["runs"]
    assert (failed["exit_code"], len(failed["failed"])) == (2, 2)
    for name in ("curve", "train_loss", "valid_loss"):
        assert good[name] == small[1]["runs"][0][name]
    told = capsys.readouterr().out
    assert f"{bad}, seed 1 FAILED with exit code 2; its end:\n    train.py: 1 error" in told
    assert "needs --fp8-recipe delayed" in told and told.count("| bf16 |") == 2


def test_a_run_does_not_outlive_the_program(flags, tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "fp8_losses.py"), *flags, "--train-iters", "100000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [
            *command,
            "--only",
            "bf16",
            "--out",
            str(tmp_path / "x.json"),
            "--",
            "--tokenizer-type",
            "ByteTokenizer",
        ],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    limit = time.monotonic() + 120
    while not list(tmp_path.glob("fp8-losses-*/runs/one/status.json")) and time.monotonic() < limit:
        time.sleep(0.1)
    assert list(tmp_path.glob("fp8-losses-*"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) != 0
    assert not list(tmp_path.glob("fp8-losses-*"))
    here = str(tmp_path).encode()
    assert not [p for p in Path("/proc").glob("[0-9]*/cwd") if here in bytes(p.resolve())]


def test_within_is_the_range_of_bf16_and_no_more():
    runs = made_up("bf16", {1: 2.0, 2: 2.2, 3: 2.1}) + made_up("delayed", {1: 1.9, 2: 2.2, 3: 2.21})
    row = report.compared(runs)["delayed"]["valid_loss"]
    assert row["within"] == "yes" and row["seeds_within"] == 1  # 2.2 is on the border
    assert row["difference"] == pytest.approx({"mean": 0.01 / 3, "min": -0.1, "max": 0.11})
    assert [report.within(x, [2.0, 2.2]) for x in (1.99, 2.0, 2.2, 2.21, NAN)] == [
        *("below", "yes", "yes", "above", "no")
    ]
    assert "2.0000 to 2.2000 | - | - | - | 1.0 |" in report.table(runs)
    assert "| +0.0033 (-0.1000 to +0.1100) | yes | 1 of 3 |" in report.table(runs)


def test_seeds_that_only_one_has():
    runs = made_up("bf16", {1: 2.0, 2: 2.2}) + made_up("delayed", {2: 2.3, 3: 2.1})
    row = report.compared(runs)["delayed"]["train_loss"]
    assert (row["within"], row["seeds_within"]) == ("yes", 1)
    assert row["difference"] == pytest.approx({"mean": 0.1, "min": 0.1, "max": 0.1})
    assert "within" not in report.compared(made_up("bf16", {1: 2.0}) + runs[2:])["delayed"]["train_loss"]
    assert "difference" not in report.compared(runs[2:])["delayed"]["train_loss"]


def test_a_loss_that_is_not_finite_is_never_within(tmp_path):
    runs = made_up("bf16", {1: 2.0, 2: 2.2}) + made_up("rowwise", {1: 2.1, 2: NAN})
    path = written(tmp_path / "nan.json", runs)
    assert "NaN" not in path.read_text()
    (result,) = fp8_losses.together([path])
    row = report.compared(result["runs"])["rowwise"]["train_loss"]
    assert (row["within"], row["seeds_within"]) == ("no", 1)


def test_results_are_put_together(tmp_path, capsys):
    failed = dict(recipe="delayed", seed=2, exit_code=1, failed=["x"])
    first = written(tmp_path / "1.json", [*made_up("bf16", {1: 2.0}), failed])
    second = written(tmp_path / "2.json", made_up("bf16", {2: 2.2}) + made_up("delayed", {2: 2.1}))
    assert fp8_losses.main(["--from", str(first)]) == 1
    assert fp8_losses.main(["--from", str(first), str(second)]) == 0
    assert "| bf16 | training loss | 2 | 2.1000 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="more than one run of bf16, seed 2"):
        fp8_losses.together([second, second])
    with pytest.raises(SystemExit, match="train_iters 3; in .*1.json and so on 2"):
        fp8_losses.together([first, written(tmp_path / "3.json", [], train_iters=3)])


def test_picture(small, tmp_path):
    """A row a model; the same bytes every time."""
    pytest.importorskip("matplotlib")
    other = written(tmp_path / "other.json", made_up("bf16", {1: 2.0, 2: 2.1}), model="125m")
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in pictures:
        assert fp8_losses.main(["--from", str(small[0]), str(other), "--draw", str(path)]) == 0
    text = pictures[0].read_text()
    assert text.startswith("<?xml") and text == pictures[1].read_text()
    for words in ("demo, small, cpu, 1 seed<", "125m, cpu, 2 seeds", "blockwise", "seeds of bf16"):
        assert words in text


def test_without_matplotlib(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert fp8_losses.main(["--from", str(small[0]), "--draw", str(tmp_path / "a.svg")]) == 0
    told = capsys.readouterr()
    assert told.err == '--draw needs matplotlib: pip install -e ".[viz]"\n' and "| bf16 |" in told.out


def test_means_of_the_steps_before():
    assert report.trailing(np.array([4.0, 2.0, 6.0, 8.0]), 2).tolist() == [4.0, 3.0, 4.0, 7.0]


@pytest.mark.parametrize(
    "argv, error",
    [
        ([], "give --out"),
        (["--out", "x", "--only", "fp16"], "--only fp16: there are bf16, delayed"),
        (["--out", "x", "--only", ""], "there are bf16"),
    ],
)
def test_bad_arguments(argv, error, capsys):
    with pytest.raises(SystemExit):
        fp8_losses.arguments(argv)
    assert error in capsys.readouterr().err


def test_runs_are_spread_over_gpus(monkeypatch):
    monkeypatch.setattr(fp8_losses.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    args = fp8_losses.arguments("--model 125m --out x --jobs 4".split())
    gpus = [fp8_losses.environment(args, slot)["CUDA_VISIBLE_DEVICES"] for slot in range(args.jobs)]
    assert gpus == ["4", "6", "4", "6"] and fp8_losses.common_flags(args, 164_492)[-2:] == [
        "--device",
        "cuda",
    ]
    assert "--eval-iters 10 " in " ".join(fp8_losses.common_flags(args, 164_492))
    args = fp8_losses.arguments("--model demo --out x --threads 1 --seeds 1 --only bf16".split())
    assert (args.jobs, args.gpus, fp8_losses.environment(args, 0)["CUDA_VISIBLE_DEVICES"]) == (1, [], "")

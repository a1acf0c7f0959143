"""The comparison of training with and without experts: a small real one, and what is said of made-up runs."""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from subprocess import DEVNULL, STDOUT, check_output
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from benchmarks import moe_training
from benchmarks import moe_training_report as report
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder

BYTES = ("--", "--tokenizer-type", "ByteTokenizer")


class Forked:
    """A process as subprocess.Popen has it, for `python train.py ...`: from the fork server, in no time."""

    def __init__(self, command: list[str], *, cwd: Path, stdout, **_) -> None:
        assert command[0] == sys.executable and Path(command[1]).name == "train.py"
        arguments = command[2:], str(cwd), stdout.name
        self.process = multiprocessing.get_context("forkserver").Process(target=train_there, args=arguments)
        self.process.start()
        self.kill = self.process.kill

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int:
        self.process.join()
        return self.process.exitcode


def train_there(argv: list[str], folder: str, console: str) -> None:
    os.chdir(folder)
    with open(console, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    train.plot_loss = train.plot_experts = lambda *_: None  # to load matplotlib takes a second
    sys.exit(train.main(argv))


STAND_IN = SimpleNamespace(Popen=Forked, DEVNULL=DEVNULL, STDOUT=STDOUT, check_output=check_output)


@pytest.fixture(scope="module", autouse=True)
def forked(full) -> None:
    """The full tier starts every run as a user does."""
    with pytest.MonkeyPatch.context() as patch:
        if not full:
            patch.setattr(moe_training, "subprocess", STAND_IN)
        yield


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    """What every small comparison is told: this text, in bytes, and two runs at a time."""
    folder, random = tmp_path_factory.mktemp("text"), np.random.RandomState(0)
    for name in ("train", "valid"):
        with IndexedDatasetBuilder(str(folder / name), np.uint16) as builder:
            for _ in range(10):
                builder.add_document(np.append(random.randint(97, 123, size=400), 256).astype(np.uint16))
            builder.finalize()
    return f"--small --jobs 2 --data {folder}/train {folder}/valid".split()


@pytest.fixture(scope="module")
def small(flags, tmp_path_factory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("small") / "small.json"
    assert moe_training.main([*flags, "--out", str(out), *BYTES]) == 0
    return out, json.loads(out.read_text())


def made_up(name: str, losses: dict[int, float], **more) -> list[dict]:
    rest = dict(model="1 M", bits_per_byte=1.0, train_loss=1.0, tflop_a_step=0.5, steps=2, curve=[2.0, 1.0])
    return [dict(run=name, seed=seed, valid_loss=x, **rest, **more) for seed, x in losses.items()]


def test_equal_work_and_text(small):
    """All begin alike; experts are more parameters at the same FLOPs, and their load is counted whole."""
    dense, preset, *sparse = small[1]["runs"]
    assert [run["run"] for run in small[1]["runs"]] == list(moe_training.RUNS)
    assert preset["flags"] == "--config tiny-cpu" and preset["curve"][0] == dense["curve"][0]
    assert "busiest" not in dense and dense["tflop_a_step"] > 0
    for run in sparse:
        assert run["tflop_a_step"] == pytest.approx(dense["tflop_a_step"], rel=1e-6)
        assert float(run["model"].split()[0]) > 1.5 * float(dense["model"].split()[0])
        assert run["curve"][0] == pytest.approx(dense["curve"][0], abs=0.1)
        assert len(run["curve"]) == len(run["busiest"]) == run["steps"] == 8
        assert list(run["load"]) == [f"decoder.layers.{i}/tokens" for i in range(2)]
        loads = np.array(list(run["load"].values()))
        assert loads.shape == (2, 8, 16) and (loads.sum(2) == 4 * 4 * 64).all()
        most = loads.max(2).mean(0) / (loads.sum(2)[0] / loads.shape[2])
        assert run["busiest"] == pytest.approx(most, abs=1e-3)
    assert len({run["valid_loss"] for run in sparse}) == 3
    assert small[1]["command"].startswith("python benchmarks/moe_training.py")


def test_a_run_that_fails_is_told(flags, tmp_path, capsys):
    bad = "aux loss --moe-router-topk 17"
    code = moe_training.main([*flags, "--out", str(tmp_path / "bad.json"), "--only", bad, *BYTES])
    told = capsys.readouterr().out
    assert code == 1 and f"{bad}, seed 1 FAILED with exit code 2; its end:\n    train.py: 1 error" in told
    assert json.loads((tmp_path / "bad.json").read_text())["runs"][0]["exit_code"] == 2


def test_against_dense_of_the_same_seed():
    runs = made_up("dense", {1: 4.0, 2: 4.2}) + made_up("aux loss", {2: 4.1, 3: 3.9}, busiest_last=1.25)
    row = report.summary(runs)["aux loss"]
    assert row["seeds"] == [2, 3] and row["against_dense"] == pytest.approx({2: -0.1})
    assert "| dense | 1 M | 0.5000 | 4.000, 4.200 | - | 1.000 | - |" in report.table(runs)
    assert "| aux loss | 1 M | 0.5000 | 4.100, 3.900 | -0.100 | 1.000 | 1.25, 1.25 |" in report.table(runs)
    assert "against_dense" not in report.summary(runs[2:])["aux loss"]


def test_pictures(small, tmp_path):
    """The same bytes every time; a panel for the first and the last layer of each run."""
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    for name in "ab":
        names = "--draw", str(tmp_path / f"{name}.svg"), "--heat", str(tmp_path / f"{name}.png")
        assert moe_training.main(["--from", str(small[0]), *names]) == 0
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert all(words in text for words in (*moe_training.RUNS, "training loss, cpu, 1 seed"))
    height, width = imread(tmp_path / "a.png").shape[:2]
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert width == 800 and 800 < height < 1000


def test_without_matplotlib(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert moe_training.main(["--from", str(small[0]), "--draw", str(tmp_path / "a.svg")]) == 0
    told = capsys.readouterr()
    assert told.err == 'pictures need matplotlib: pip install -e ".[viz]"\n' and "| aux loss |" in told.out


def test_results_are_put_together(small, tmp_path):
    other = small[1] | {"runs": made_up("dense", {7: 4.0})}
    moe_training.write(tmp_path / "other.json", other)
    runs = moe_training.together([small[0], tmp_path / "other.json"])["runs"]
    assert [run["run"] for run in runs] == ["dense", *moe_training.RUNS]
    assert [run["seed"] for run in runs] == [1, 7, 1, 1, 1, 1]
    with pytest.raises(SystemExit, match="more than one"):
        moe_training.together([small[0], small[0]])
    moe_training.write(tmp_path / "other.json", other | {"torch": "1.0"})
    with pytest.raises(SystemExit, match="other.json: torch 1.0; in"):
        moe_training.together([small[0], tmp_path / "other.json"])


@pytest.mark.parametrize(
    "argv, error", [([], "give --out"), (["--out", "x", "--only", "sparse"], "there are dense, dense preset")]
)
def test_bad_arguments(argv, error, capsys):
    with pytest.raises(SystemExit):
        moe_training.arguments(argv)
    assert error in capsys.readouterr().err

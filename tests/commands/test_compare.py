"""`nanomegatron runs` and `nanomegatron compare`: states, tables, differences of losses, the picture."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nanomegatron.commands import compare, runs
from nanomegatron.config.cli import build_config, to_toml
from nanomegatron.faults.lock import lock
from tests.house.test_style import ROOT

MODEL = dict(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, train_iters=40)


def write_run(name: str, losses: list[float], batch: int = 4, state: str = "done", **settings) -> Path:
    """Write the records of a run in runs/NAME."""
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    config = build_config(
        MODEL | dict(run_name=name, save=f"runs/{name}/ckpt", data_parallel_size=1) | settings
    )
    (folder / "config.toml").write_text(to_toml(config))
    rows = []
    for i, loss in enumerate(losses, 1):
        rows.append(dict(iteration=i, consumed_samples=i * batch, global_batch_size=batch, lm_loss=loss))
        rows[-1] |= dict(tokens_per_s=100.0 * i, mfu=0.25, peak_mem_gib=0.5 + i, step_time_ms=1.0)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = dict(iteration=len(losses), split="validation", lm_loss=2.5, ppl=12.0, bits_per_byte=None)
    held_out["consumed_samples"] = len(losses) * batch
    test = held_out | dict(split="test", lm_loss=9.5)
    (folder / "evals.jsonl").write_text(f"{json.dumps(held_out)}\n{json.dumps(test)}\n")
    (folder / "status.json").write_text(json.dumps({"state": state}))
    return folder


def age(folder: Path, seconds: float) -> None:
    """Let all files of a run be this old."""
    for path in folder.iterdir():
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def listed(capsys) -> list[list[str]]:
    assert runs.main([]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


# runs


def test_runs_are_listed_newest_first(capsys):
    age(write_run("old", [4.0, 3.0]), 7300)
    write_run("new", [4.0, 3.5, 3.25], state="preempted")
    age(write_run("middle", [4.0], train_iters=7), 130)
    (Path("runs") / "latest").symlink_to("new")
    header, *rows, mark = listed(capsys)
    assert header == "run state step its loss last validation its tok/s age".split()
    assert rows[0][:8] == ["new", "*", "preempted", "3/40", "3.2500", "2.5000", "300", "0"]
    assert rows[1] == "middle done 1/7 4.0000 2.5000 100 2 min".split()
    assert rows[2] == "old done 2/40 3.0000 2.5000 200 2 h".split()
    assert mark == ["*", "runs/latest"] and len(rows) == 3


def test_a_run_without_its_lock_has_died(capsys):
    write_run("killed", [4.0], state="running")
    write_run("copied", [4.0], state="running")
    write_run("alive", [4.0], state="running")
    lock(Path("runs/killed"), wait=False).close()
    with lock(Path("runs/alive"), wait=False):
        states = {row[0]: row[1] for row in listed(capsys)[1:]}
    assert states == {"killed": "died", "copied": "died", "alive": "running"}


def test_damaged_folders_are_named_and_the_others_listed(capsys):
    write_run("good", [4.0])
    (write_run("torn", [4.0, 3.0]) / "config.toml").write_text("num-layers = ")
    (write_run("cut", [4.0, 3.0]) / "status.json").write_text('{"state": "do')
    with open("runs/cut/metrics.jsonl", "a") as file:
        file.write('{"iteration": 3, "lm_l')
    Path("runs/empty").mkdir()
    write_run("wrong", ["high"])
    assert runs.main([]) == 0
    out, err = capsys.readouterr()
    rows = {line.split()[0]: line.split()[1:5] for line in out.splitlines()[1:]}
    assert rows == {
        "good": ["done", "1/40", "4.0000", "2.5000"],
        "torn": ["done", "2/-", "3.0000", "2.5000"],
        "cut": ["-", "2/40", "3.0000", "2.5000"],
    }
    for text in ("runs/torn/config.toml: damaged", "runs/cut/status.json: damaged", "runs/empty: no run"):
        assert text in err
    assert "runs/wrong: could not convert string to float" in err


def test_long_metrics_are_read_from_their_end(capsys):
    write_run("long", [5.0] * 3000 + [1.25])
    assert Path("runs/long/metrics.jsonl").stat().st_size > 2 * runs.TAIL
    assert listed(capsys)[1][2:4] == ["3001/40", "1.2500"]


def test_runs_without_a_folder_and_without_runs(capsys):
    assert runs.main(["nowhere"]) == 2
    assert "nanomegatron runs: nowhere: no such folder; give" in capsys.readouterr().err
    for make in (
        lambda: None,
        Path("runs").mkdir,
    ):  # where nothing was ever trained, and where all is removed
        make()
        assert runs.main([]) == 0
        how = "`nanomegatron train` makes one, in runs/ where it is started"
        assert capsys.readouterr() == (f"no runs in {Path.cwd()}/runs; {how}\n", "")


def test_columns_beyond_the_terminal_follow_below():
    table = [["name", "first", "second"], ["row", "1", "22"]]
    assert runs.aligned(table) == "name  first  second\nrow       1      22"
    assert runs.aligned(table, 18) == "name  first\nrow       1\n\nname  second\nrow       22"


@pytest.mark.parametrize("verb", ("runs", "compare"))
def test_torch_is_not_imported(verb):
    code = f"import sys, nanomegatron.commands.{verb}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# compare


def compared(capsys, *words: str, code: int = 0) -> str:
    assert compare.main([*words]) == code
    return capsys.readouterr().out


def row_of(out: str, name: str) -> list[str]:
    return next(line for line in out.splitlines() if line.startswith(name))[len(name) :].split()


def test_two_layouts_in_one_table(capsys):
    write_run("a", [4.0, 3.0, 2.0])
    evals = write_run("b", [4.0, 3.0, 2.0 + 2e-6, 1.5], tensor_model_parallel_size=2, nproc=2) / "evals.jsonl"
    earlier = dict(iteration=1, split="validation", lm_loss=7.5)
    evals.write_text(f"{json.dumps(earlier)}\n{evals.read_text()}")
    out = compared(capsys, "a", "runs/b")
    assert row_of(out, "results") == ["a", "runs/b"] and row_of(out, "ranks") == ["1", "2"]
    assert row_of(out, "steps") == ["3/40", "4/40"] and row_of(out, "tokens ") == ["96", "128"]
    assert row_of(out, "loss at 96 tokens") == ["2.000000", "2.000002"]
    assert row_of(out, "last validation loss") == ["2.500000", "2.500000"]
    assert row_of(out, "tokens/s, median") == ["200", "250"] and row_of(out, "MFU, median") == ["25.0%"] * 2
    assert row_of(out, "peak memory, GiB") == ["3.50", "4.50"]
    differing = out[out.index("settings that differ") : out.index("runs/b and a")]
    assert [line.split() for line in differing.split("\n")[1:-2]] == [
        ["tensor-model-parallel-size", "1", "2"]
    ]
    assert "runs/b and a: largest relative difference of losses over 3 steps: 1.0e-06 (at step 3)" in out
    assert [path.name for path in Path().iterdir()] == ["runs"]  # nothing that was not asked for
    assert "\npicture losses.png\n" in compared(capsys, "a", "runs/b", "--png", "losses.png")
    assert Path("losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("rtol, code", [("1e-5", 0), ("1e-7", 1), ("0", 1), ("nan", 1)])
def test_rtol_is_the_exit_code(rtol, code):
    write_run("a", [4.0, 3.0])
    write_run("b", [4.0, 3.0 + 3e-6])
    assert compare.main(["a", "b", "--rtol", rtol]) == code


def test_the_worst_of_several_runs_counts():
    for name, loss in (("a", 3.0), ("b", 3.3), ("c", 3.0)):
        write_run(name, [4.0, loss])
    assert compare.main(["a", "b", "c", "--rtol", "0.05"]) == 1
    assert compare.main(["a", "c", "--rtol", "0"]) == 0


@pytest.mark.parametrize(
    "a, b, gap",
    [(2.0, 2.5, 0.25), (2.0, math.nan, math.inf), (math.inf, 2.0, math.inf), (math.nan, math.inf, 0.0)]
    + [(0.0, 0.0, 0.0)],
)
def test_relative_gap(a, b, gap):
    assert compare.relative_gap(a, b) == gap


def test_latest_is_called_by_its_name(capsys):
    write_run("a", [4.0])
    Path("runs/latest").symlink_to("a")
    assert row_of(compared(capsys, "latest"), "results") == ["a"]


def test_the_largest_difference_is_named_with_its_step(capsys):
    first = [4.0, 3.5, 3.0, 2.5]
    write_run("a", first)
    write_run("rounded", [4.0, 3.5 + 2e-6, 3.0 + 3e-5, 2.5])
    write_run("other", [4.0, 3.6, 3.0, 2.5])
    write_run("equal", first)
    out = compared(capsys, "a", "rounded", "other", "equal")
    lines = [line.partition("difference of losses ")[2] for line in out.splitlines() if " and a: " in line]
    assert "equal and a: losses are identical, over 4 steps" in out.splitlines()
    assert lines == ["over 4 steps: 1.0e-05 (at step 3)", "over 4 steps: 2.9e-02 (at step 2)", ""]


def test_a_loss_that_is_lost_in_one_run_differs():
    write_run("a", [4.0, 3.0])
    write_run("b", [4.0, "nan"])
    assert compare.main(["a", "b", "--rtol", "1e9"]) == 1


def test_other_batch_sizes_are_compared_at_equal_tokens(capsys):
    write_run("small", [4.0, 3.0, 2.5, 2.25], batch=4)
    write_run("large", [3.5, 2.25 * 1.01], batch=8, global_batch_size=8)
    out = compared(capsys, "small", "large")
    assert "over 2 steps: 1.7e-01 (at step 2); batch or sequence differ: only steps that end at equal" in out
    assert row_of(out, "loss at 128 tokens") == ["2.250000", "2.272500"]


def test_losses_of_other_data_are_not_compared_without_a_word(capsys):
    write_run("mine", [4.0, 3.0])
    write_run("theirs", [3.5, 2.5], mock_data=True)
    assert "; data or tokenizer differ: losses of another text" in compared(capsys, "mine", "theirs")


def test_runs_without_common_steps_prove_nothing(capsys):
    write_run("a", [4.0], batch=3)
    write_run("b", [4.0], batch=4)
    out = compared(capsys, "a", "b", "--rtol", "1", code=1)
    assert "b and a: no losses to compare" in out and row_of(out, "loss at equal tokens") == ["-", "-"]


def test_a_run_that_is_not_there_gets_the_nearest(capsys):
    write_run("gpt-tp2", [4.0])
    assert compare.main(["gpt-tp"]) == 2
    assert "gpt-tp has a config.toml; did you mean gpt-tp2?" in capsys.readouterr().err


def test_a_run_that_has_only_evaluated_is_left_out(capsys):
    folder = write_run("a", [4.0])
    write_run("b", [4.0])
    more = dict(iteration=1, split="validation", lm_loss=7.5, eval_only=True)
    with open(folder / "evals.jsonl", "a") as file:
        file.write(json.dumps(more) + "\n")
    assert runs.last_record(folder / "evals.jsonl", "validation")["lm_loss"] == 2.5
    (Path("runs") / "seen").mkdir()
    (Path("runs") / "seen" / "evals.jsonl").write_text(json.dumps(more) + "\n")
    assert runs.last_record(Path("runs/seen/evals.jsonl"), "validation") == more
    out = compared(capsys, "a", "seen", "b")
    assert "7.5" not in out
    assert "seen has trained nothing and is left out" in out and "b and a: losses are identical" in out
    assert compare.main(["seen"]) == 2
    assert "seen has trained nothing: evals.jsonl and log.txt" in capsys.readouterr().err


def test_damaged_settings_are_an_error(capsys):
    (write_run("a", [4.0]) / "config.toml").write_text("no-such-key = 1")
    assert compare.main(["a"]) == 2
    assert "a: damaged settings or records (config: unknown key no-such-key" in capsys.readouterr().err


def test_the_picture_has_each_step_and_a_smoothed_line(tmp_path):
    pytest.importorskip("matplotlib")
    for name, length in ("a", 200), ("b", 200), ("short", 20):
        write_run(name, [3.0 + (-1) ** i for i in range(length)])
    two = [compare.read_run(name) for name in "ab"]
    axes = compare.draw_curves(two, tmp_path / "x.png")
    assert [line.get_label() for line in axes.lines if not line.get_label().startswith("_")] == ["a", "b"]
    thin, smooth = axes.lines[:2]
    assert np.ptp(thin.get_ydata()) == 2 and np.ptp(smooth.get_ydata()[10:]) < 0.4
    assert smooth.get_linewidth() > axes.lines[4].get_linewidth(), "runs that agree are both seen"
    assert "smoothed" in axes.get_title()
    assert axes.lines[2].get_xydata().tolist() == [[200 * 4 * 8, 2.5]], "the last validation"
    axes = compare.draw_curves([compare.read_run("short")], tmp_path / "x.png")
    assert "of each step" in axes.get_title()


def test_a_picture_needs_matplotlib_and_nothing_else_does(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write_run("a", [4.0])
    write_run("b", [4.0])
    assert compare.main(["a", "b"]) == 0
    out, err = capsys.readouterr()
    assert "b and a: losses are identical" in out and not err
    assert compare.main(["a", "b", "--picture", "x.png"]) == 2
    out, err = capsys.readouterr()
    assert "losses are identical" in out and err.count("\n") == 1 and "needs matplotlib" in err


def test_a_picture_as_svg_names_its_runs():
    write_run("first-run", [4.0, 3.0])
    assert compare.main(["first-run", "--picture", "x.svg"]) == 0
    assert "first-run" in Path("x.svg").read_text() and not Path("compare.png").exists()


def test_amounts_of_tokens():
    found = [compare.amount(n) for n in (0, 500, 61440, 1_500_000, 3e9, 2e12)]
    assert found == ["0", "500", "61.44k", "1.5M", "3B", "2T"]


def test_names_of_one_run_are_settings():
    """A renamed setting would silently be listed as a difference."""
    names = {s.name for part in dataclasses.fields(build_config({})) for s in dataclasses.fields(part.type)}
    assert {key.replace("-", "_") for key in compare.OF_ONE_RUN.split()} <= names

"""The files and lines of a run, read back."""

import io
import json
import math
import re
import sys
import time
import types

import pytest

from nanomegatron.config.check import record_errors
from nanomegatron.config.settings import Config, DataConfig, RunConfig
from nanomegatron.report.log import KEYS, RunLog
from nanomegatron.report.writers import EXPERT_TAGS, read_jsonl, step_scalars
from tests.spmd import run_spmd
from tests.training import arguments, report_step, set_up


def config(**run) -> Config:
    run = {"log_interval": 10, "train_iters": 100} | run
    return Config(data=DataConfig(global_batch_size=8, seq_length=32), run=RunConfig(**run))


def record(iteration: int, **changes) -> dict:
    values = (iteration, 8 * iteration, 8, 5.0 - iteration / 50, 1.5, 3e-4, 2e-4, 20.0, 12800.0, 0.25, None)
    return dict(zip(KEYS, values, strict=True)) | changes


def started(folder, iteration: int = 0, **run) -> RunLog:
    log = RunLog(folder, config(**run), stream=io.StringIO())
    log.begin(iteration, 100)
    return log


def test_console_has_fixed_columns(tmp_path):
    log = started(tmp_path)
    log.line("a banner")
    for i in range(1, 21):
        log.step(record(i, peak_mem_gib=1.25, mfu=0.4 if i <= 10 else 0.6))
    lines = log.stream.getvalue().splitlines()
    assert lines[0] == "a banner"
    assert lines[1].split() == "step loss lr grad_norm tok/s TF/s MFU mem GiB eta".split()
    assert [line.split()[0] for line in lines[2:]] == ["1", "10", "20"]
    mean = sum(5.0 - i / 50 for i in range(11, 21)) / 10
    assert lines[4].split() == [
        "20",
        f"{mean:.4f}",
        "3.00e-04",
        "1.500",
        "12.8k",
        "0.25",
        "60.0%",
        "1.25",
        "0:02",
    ]
    assert len({len(line) for line in lines[1:]}) == 1 and len(lines[1]) <= 120
    assert "\r" not in log.stream.getvalue() and "\x1b" not in log.stream.getvalue()


def test_a_loss_scale_that_is_too_large_is_said_in_words(tmp_path):
    """Megatron-LM's line leaves out what an overflow has spoilt; metrics.jsonl has the numbers."""
    log, nan = started(tmp_path), float("nan")
    log.step(record(1, grad_norm=nan, skipped=1, loss_scale=2.0**32))
    row = log.stream.getvalue().splitlines()[-1]
    assert row.endswith("  loss scale 4294967296 too large, step skipped") and "nan" not in row
    assert row.split()[:4] == ["1", "-", "3.00e-04", "-"]
    line = (tmp_path / "log.txt").read_text().splitlines()[-1]
    assert "nan" not in line.replace("nan iterations", "").lower() and "loss scale: 4294967296.0 |" in line
    assert math.isnan(float(read_jsonl(tmp_path / "metrics.jsonl")[0]["grad_norm"]))
    other = started(tmp_path / "other")
    other.step(record(1, grad_norm=nan, skipped=1, loss_scale=1.0))
    assert "nan" in other.stream.getvalue() and "too large" not in other.stream.getvalue()


def test_log_has_megatrons_lines(tmp_path):
    log = started(tmp_path, log_throughput=True)
    log.step(record(1, lm_loss=float("nan"), skipped=1, loss_scale=1024.0))
    for i in range(2, 11):
        log.step(record(i, lm_loss=2.0, mfu=0.5, tflops_per_gpu_6n=0.5))
    log.evaluation(10, "validation", 2.0, 1.5)
    first, second, rule, box, rule2 = (tmp_path / "log.txt").read_text().splitlines()
    assert re.fullmatch(
        r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration        1/     100 \| .*\|", first
    )
    assert "| consumed samples:            8 | elapsed time per iteration (ms): 20.0 |" in first
    assert "| lm loss: NAN | loss scale: 1024.0 |" in first
    assert first.endswith("| number of skipped iterations:   1 | number of nan iterations:   1 |")
    assert "MFU" not in first
    assert (
        "| throughput per GPU (TFLOP/s/GPU): 0.2 | by 6n: 0.5 | MFU: 50.0% | learning rate: 2.000000E-04"
        in second
    )
    assert (
        "| global batch size:     8 | lm loss: 2.000000E+00 | loss scale: 1.0 | grad norm: 1.500 |" in second
    )
    assert rule == rule2 == "-" * len(box)
    assert box.startswith(
        " validation loss at iteration 10 on validation set | lm loss value: 2.000000E+00 | lm"
    )
    assert "lm loss PPL: 7.389056E+00 | " in box
    assert log.stream.getvalue().splitlines()[-1] == (
        "validation at step 10: loss 2.0000, perplexity 7.389, 1.500 bits per byte"
    )


def test_steps_before_a_stop_have_a_line(tmp_path):
    log = started(tmp_path)
    for i in range(1, 14):
        log.step(record(i, lm_loss=float(i)))
    log.end_interval()
    log.end_interval()
    rows = [line.split() for line in log.stream.getvalue().splitlines()[1:]]
    assert [row[0] for row in rows] == ["1", "10", "13"] and rows[-1][1] == "12.0000"


def test_a_line_says_which_steps_its_loss_leaves_out(tmp_path):
    log = started(tmp_path)
    for i in range(1, 11):
        log.step(record(i, lm_loss=math.nan if i in (4, 5) else 2.0, skipped=int(i in (4, 5))))
    first, last = log.stream.getvalue().splitlines()[1:]
    assert last.split()[1] == "2.0000" and last.endswith("  2 skipped steps not in the loss")
    assert "skipped" not in first


def test_series_is_one_json_object_a_step(tmp_path):
    log = started(tmp_path / "run", metrics_jsonl=str(tmp_path / "deep" / "extra.jsonl"))
    log.step(record(1, lm_loss=0.1 + 0.2, grad_norm=float("inf")))
    log.step(record(2, skipped=1))
    text = (tmp_path / "run" / "metrics.jsonl").read_text()  # complete without close()
    assert text == (tmp_path / "deep" / "extra.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert list(lines[0]) == list(KEYS) and list(lines[1]) == [*KEYS, "skipped"]
    assert lines[0]["lm_loss"] == 0.1 + 0.2 and lines[0]["mfu"] is None
    assert float(lines[0]["grad_norm"]) == math.inf
    with pytest.raises(KeyError, match="grad_norm"):
        log.step({key: value for key, value in record(3).items() if key != "grad_norm"})


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    log = started(tmp_path)
    for i in range(1, 8):
        log.step(record(i))
        log.evaluation(i, "validation", 3.0)
    log.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 8, "lm_l')  # killed while writing
    log = started(tmp_path, iteration=5)
    log.step(record(6, lm_loss=1.0))
    log.evaluation(5, "validation", 3.0)
    assert [(r["iteration"], r["lm_loss"]) for r in read_jsonl(tmp_path / "metrics.jsonl")] == [
        *((i, record(i)["lm_loss"]) for i in range(1, 6)),
        (6, 1.0),
    ]
    assert [r["iteration"] for r in read_jsonl(tmp_path / "evals.jsonl")] == [1, 2, 3, 4, 5]
    started(tmp_path, iteration=0)
    assert read_jsonl(tmp_path / "metrics.jsonl") == read_jsonl(tmp_path / "evals.jsonl") == []


def test_an_evaluation_by_itself_does_not_replace_that_of_training(tmp_path):
    started(tmp_path).evaluation(5, "validation", 3.0, batches=4)
    for loss in (2.5, 2.0):
        started(tmp_path, eval_only=True, iteration=5).evaluation(5, "validation", loss, batches=2)
    evals = read_jsonl(tmp_path / "evals.jsonl")
    assert [(e["lm_loss"], e["batches"], e.get("eval_only")) for e in evals] == [
        (3.0, 4, None),
        (2.5, 2, True),
        (2.0, 2, True),
    ]


def test_other_ranks_warn_and_keep_their_own_log(tmp_path):
    main = started(tmp_path)
    other = RunLog(tmp_path, config(), 3, "rank 3 tp1 dp0", io.StringIO())
    other.begin(0, 100)
    other.step(record(1))
    other.evaluation(1, "validation", 1.0)
    assert not (tmp_path / "log.3.txt").exists() and read_jsonl(tmp_path / "metrics.jsonl") == []
    other.line("only in the file")
    other.warn("disk is full")
    main.warn("slow")
    assert other.stream.getvalue() == "! [rank 3 tp1 dp0] disk is full\n"
    assert (tmp_path / "log.3.txt").read_text() == "only in the file\n! [rank 3 tp1 dp0] disk is full\n"
    assert main.stream.getvalue() == (tmp_path / "log.txt").read_text() == "! slow\n"


def test_status_keeps_facts_and_the_first_failure(tmp_path):
    def status() -> dict:
        return json.loads((tmp_path / "status.json").read_text())

    main = started(tmp_path)
    other = RunLog(tmp_path, config(), 1, "rank 1 tp1", io.StringIO())
    assert status()["state"] == "running" and status()["exit_code"] is None
    main.status("running", iteration=40, checkpoint=tmp_path / "ckpt")
    other.status("done", exit_code=0)  # not its business
    assert status()["state"] == "running"
    other.status("failed", exit_code=1, message="out of memory")
    main.status("failed", exit_code=1, message="lost a peer")
    written = status()
    assert (written["state"], written["exit_code"], written["message"]) == ("failed", 1, "out of memory")
    assert (written["iteration"], written["checkpoint"], written["rank"]) == (
        40,
        str(tmp_path / "ckpt"),
        "rank 1 tp1",
    )
    again = started(tmp_path)
    assert status()["state"] == "running" and status()["message"] == ""
    for label, message in (("rank 2", "lost a peer in step"), ("rank 1", "a bug"), ("rank 3", "lost a peer")):
        RunLog(tmp_path, config(), 1, label, io.StringIO()).status("failed", exit_code=1, message=message)
    assert (status()["rank"], status()["message"]) == ("rank 1", "a bug")
    again = started(tmp_path)
    again.status("preempted", exit_code=75)
    assert status()["exit_code"] == 75
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]  # no temporary left


def test_damaged_records_are_left_out_and_named(tmp_path):
    (tmp_path / "status.json").write_text('{"state": "fai')
    other = RunLog(tmp_path, config(), 1, "rank 1", io.StringIO())
    other.status("failed", exit_code=1, message="a bug")
    assert json.loads((tmp_path / "status.json").read_text())["message"] == "a bug"
    assert f"! [rank 1] {tmp_path / 'status.json'}: damaged (" in other.stream.getvalue()
    path = tmp_path / "x.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2}\n{"itera')
    assert [r["iteration"] for r in read_jsonl(path, pytest.fail)] == [1, 2]  # a kill does that
    path.write_text('{"iteration": 1}\n\0\0\n{"iteration": "x"}\n{"iteration": 4}\n')
    with pytest.warns(UserWarning, match=r"x.jsonl: 2 damaged lines left out, 2 steps are whole"):
        assert [r["iteration"] for r in read_jsonl(path)] == [1, 4]


def test_bar_on_a_terminal_only(tmp_path):
    pytest.importorskip("tqdm")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    log = RunLog(tmp_path, config(), stream=Terminal())
    log.begin(40, 100)
    log.step(record(50))
    log.close()
    text = log.stream.getvalue()
    assert "40/100" in text and "\r" in text
    assert any(line.split()[:1] == ["50"] for line in text.splitlines())


@pytest.mark.parametrize("batch, lines", [(0.05, 0), (3.0, 4), (60.0, 9)])
def test_a_long_evaluation_says_how_far_it_is(tmp_path, monkeypatch, batch, lines):
    """Every 10 seconds, or ten times; the time left is that of the batches left at the mean rate."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    log = started(tmp_path)
    done = []
    for n in log.progress("validation at step 7", 19):
        clock[0] += batch
        done.append(n)
    assert done == list(range(19))
    said = log.stream.getvalue().splitlines()
    assert len(said) == lines
    if lines == 4:
        assert said[0] == "validation at step 7: 4 of 19, 0:45 left"
    assert not (tmp_path / "log.txt").exists()  # only for people


def test_tensorboard_has_megatrons_tags(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = started(tmp_path, tensorboard_dir=str(tmp_path / "tb"))
    log.step(record(1, loss_scale=2.0))
    log.step(record(2))
    log.evaluation(2, "validation", 3.0, 1.5)
    log.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert {
        *(
            "lm loss",
            "learning-rate",
            "grad-norm",
            "throughput",
            "batch-size",
            "iteration-time",
            "loss-scale",
        ),
        *("lm loss vs samples", "lm loss validation", "lm loss validation ppl"),
    } <= set(events.Tags()["scalars"])
    assert [(e.step, e.value) for e in events.Scalars("batch-size")] == [(1, 8.0), (2, 8.0)]
    assert [e.step for e in events.Scalars("lm loss vs samples")] == [8, 16]
    assert [e.value for e in events.Scalars("iteration-time")] == pytest.approx([0.02, 0.02])


def test_wandb_gets_the_same_scalars(tmp_path, monkeypatch):
    class Wandb:
        calls: list = []

        def init(self, **kwargs):
            self.calls.append(kwargs)
            return types.SimpleNamespace(
                log=lambda s, step: self.calls.append((step, s)), finish=lambda: None
            )

    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    log = started(tmp_path / "name", wandb_project="project")
    log.step(record(1))
    log.close()
    init, (step, scalars) = Wandb.calls
    assert (init["project"], init["name"], init["config"]["data"]["seq_length"]) == ("project", "name", 32)
    assert step == 1 and scalars["lm loss"] == 4.98 and scalars["batch-size"] == 8
    there = str(tmp_path / "elsewhere")
    asked = dict(wandb_project="project", wandb_entity="team", wandb_exp_name="mine", wandb_save_dir=there)
    started(tmp_path / "other", **asked).close()
    assert [Wandb.calls[-1][key] for key in ("name", "dir", "entity")] == ["mine", there, "team"]


def test_a_missing_extra_is_named_before_a_run_begins(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    asked = config(wandb_project="p", tensorboard_dir="tb")
    assert [*record_errors(asked, 1, "cpu")] == [
        "--tensorboard-dir tb: needs the package tensorboard: pip install tensorboard",
        "--wandb-project p: needs the package wandb: pip install wandb",
    ]
    assert not [*record_errors(config(), 1, "cpu")]


# Experts


def busy(iteration: int) -> dict:
    return record(
        iteration, moe_load_imbalance=1.0 + iteration, moe_dropped_share=0.25, aux_loss=float(iteration)
    )


def good_bad_good(world, argv, folder):
    """Three steps, the loss of the second NaN, with their reports."""
    run = set_up(world, argv, folder)
    run.log.begin(0, 3)
    update = run.optimizer.step
    for bad in (False, True, False):
        run.optimizer.step = lambda loss, *more, bad=bad: update(loss * (math.nan if bad else 1.0), *more)
        report_step(run)
        run.progress.iteration += 1
    return [
        {name: step[name] for name in ("skipped", "lr", "next_lr")}
        for step in read_jsonl(run.log.folder / "metrics.jsonl")
    ]


def test_a_bad_step_holds_the_schedule(sources, tmp_path):
    """The next learning rate in the log is the one that the next step has: here the same once more."""
    argv = arguments(sources, "llama", "--train-iters 3 --lr-warmup-iters 0 --lr-decay-style linear")
    (steps,) = run_spmd(good_bad_good, 1, argv, str(tmp_path))
    assert [step["skipped"] for step in steps] == [0, 1, 0]
    rates = [(step["lr"], step["next_lr"]) for step in steps]
    assert rates[0][1] == rates[1][0] == rates[1][1] == rates[2][0] > rates[2][1]


def test_a_step_with_experts_tells_how_even_their_load_is(tmp_path):
    """A column on the console, Megatron's names in the log: means over the steps of an interval."""
    log = started(tmp_path)
    for i in range(1, 12):
        log.step(busy(i))
    log.close()
    header, first, second = log.stream.getvalue().splitlines()
    assert header.split()[-2:] == ["busiest", "eta"] and len(header) == len(first) == len(second)
    assert first.split()[-2] == "2.00x" and second.split()[-2] == f"{sum(range(3, 12)) / 9:.2f}x"
    line = (tmp_path / "log.txt").read_text().splitlines()[1]
    mean = sum(range(2, 11)) / 9
    written = (
        f"load_balancing_loss: {mean:.6E} | load imbalance: {1 + mean:.6E} | dropped share: 2.500000E-01 |"
    )
    assert f"| {written} loss scale" in line
    assert read_jsonl(tmp_path / "metrics.jsonl")[10]["moe_load_imbalance"] == 12.0
    assert step_scalars(busy(3)).items() >= {"load_balancing_loss": 3.0, "load-imbalance": 4.0}.items()
    assert {step_scalars(record(3))[tag] for tag in EXPERT_TAGS.values()} == {None}


def test_details_of_layers_have_a_file_of_their_own(tmp_path):
    """Lists are in the file alone; a resumed run drops what came after its checkpoint."""
    log, written = started(tmp_path), []
    log._writers.append(types.SimpleNamespace(add=lambda *what: written.append(what), close=lambda: None))
    for i in (1, 2):
        log.details("experts", i, 8 * i, {"decoder.layers.0/tokens": [3, 5], "decoder.layers.0/z_loss": 0.5})
    log.details("fp8", 2, 16, {"a/x/amax": 2.0})
    log.close()
    at = {"iteration": 2, "consumed_samples": 16}
    assert read_jsonl(tmp_path / "fp8.jsonl") == [at | {"a/x/amax": 2.0}]
    assert written[1:] == [({"experts/decoder.layers.0/z_loss": 0.5}, at), ({"fp8/a/x/amax": 2.0}, at)]
    assert read_jsonl(tmp_path / "experts.jsonl")[1]["decoder.layers.0/tokens"] == [3, 5]
    started(tmp_path, iteration=1)
    assert [r["iteration"] for r in read_jsonl(tmp_path / "experts.jsonl")] == [1]
    assert read_jsonl(tmp_path / "fp8.jsonl") == []

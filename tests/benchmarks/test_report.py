"""What benchmarks/report.py says of made-up runs: numbers, tables, the picture of losses."""

import json

import numpy as np
import pytest

from benchmarks import report
from benchmarks.cases import Case

FACTS = dict(date="today", command="python", part="tp", small=False, torch="2", device="cpu")


def turn(*step_ms: float, loss: float = 4.0, **more) -> dict:
    speed = dict(tokens_per_s=1e3, tflops_per_gpu=1.0, mfu=0.5)
    facts = dict(peak_gib=2.0, used_gib=[3.0], predicted_gib=2.1)
    return dict(step_ms=[*step_ms], loss=[loss, 3.0]) | speed | facts | more


def run(seed: int, loss: float, **more) -> dict:
    return dict(seed=seed, valid_loss=loss, train_loss=loss, steps=4, curve=[9.0, 5.0, loss, loss]) | more


def written(path, rows: list[dict], **facts):
    report.write(path, FACTS | facts | dict(cases=rows))
    return json.loads(path.read_text())


def test_medians_of_all_repetitions(tmp_path):
    cases = [Case("one gpu", "--a"), Case("tp", "--b", 2), Case("late", "--c", like="tp")]
    slow, fast = (turn(*ms, tokens_per_s=16e3 / of, mfu=8 / of) for of, *ms in ((35, 30, 40), (1.5, 1, 2)))
    turns = {"one gpu": [turn(1.0, mfu=0.8)], "tp": [fast, slow], "late": []}
    one, tp, late = report.summary(cases, turns)
    assert tp["median_ms"] == 16.0 and tp["step_ms"] == [[1.0, 2.0], [30.0, 40.0]]
    assert tp["tokens_per_s_per_gpu"] == 500 and "median_ms" not in late
    found = report.tables(written(tmp_path / "x.json", [one, tp, late]))
    assert "| tp | 2 | 16.0 | 500 | 50.0 % | 0.625 | 2.0 (2.1) | 4.0000 to 3.0000 | - | - |" in found
    assert "| late | 1 | not run |" in found


@pytest.mark.parametrize("loss, problem", [(4.004, False), (4.02, True), (float("nan"), True)])
def test_first_losses_are_compared(loss, problem):
    """NaN stands as a word in metrics.jsonl."""
    word = report.finite(loss)
    cases = [Case("tp", ""), Case("dtensor", "", like="tp")]
    _, row = report.summary(cases, {"tp": [turn(1.0)], "dtensor": [turn(1.0), turn(1.0, loss=word)]})
    assert row["problems"] == ["first loss is not that of tp"] * problem


def test_bubbles_and_failures_are_printed(tmp_path):
    cases, bubble = [Case("zb-v", ""), Case("1f1b", "")], {"planned": 15.4, "measured": 41.6}
    turns = {"zb-v": [turn(1.0, bubble_percent=bubble)], "1f1b": [{"problem": "no memory"}]}
    found = report.tables(written(tmp_path / "x.json", report.summary(cases, turns)))
    assert "zb-v: a bubble of 15.4 % planned, 41.6 % measured" in found
    assert "1f1b: no memory" in found and "| 1f1b | 1 | FAILED |" in found


def losses(**turns: list[dict]) -> dict[str, dict]:
    cases = [Case(name, "") for name in turns]
    return {row["name"]: row for row in report.losses_summary(cases, turns)}


def test_within_is_the_range_of_the_first_and_no_more():
    rows = losses(bf16=[run(1, 2.0), run(2, 2.2), run(3, 2.1)], fp8=[run(1, 1.9), run(2, 2.2), run(3, 2.21)])
    found = rows["fp8"]["valid_loss"]
    assert found["within"] and found["difference"] == pytest.approx(0.01 / 3, abs=1e-6)
    assert found["differences"] == pytest.approx([-0.1, 0.0, 0.11])
    assert "within" not in rows["bf16"]["valid_loss"]
    assert losses(bf16=[run(1, 2.0), run(2, 2.2)], fp8=[run(1, 2.2)])["fp8"]["valid_loss"][
        "within"
    ]  # the border
    assert not losses(bf16=[run(1, 2.0), run(2, 2.2)], fp8=[run(1, 2.21)])["fp8"]["valid_loss"]["within"]


def test_seeds_that_only_one_has():
    found = losses(bf16=[run(1, 2.0), run(2, 2.2)], fp8=[run(2, 2.3), run(3, 2.1)])["fp8"]["train_loss"]
    assert found["differences"] == pytest.approx([0.1]) and found["mean"] == pytest.approx(2.2)
    found = losses(bf16=[run(1, 2.0)], fp8=[run(2, 2.3)])["fp8"]["train_loss"]
    assert "difference" not in found and "within" not in found


def test_a_loss_that_is_not_finite_is_never_within(tmp_path):
    rows = losses(bf16=[run(1, 2.0), run(2, 2.2)], fp8=[run(1, 2.1), run(2, "nan")])
    assert not rows["fp8"]["valid_loss"]["within"] and rows["fp8"]["valid_loss"]["mean"] == "nan"
    assert "| fp8 | validation loss | 2.1000, nan | nan | +nan | no |" in report.tables(
        written(tmp_path / "nan.json", [*rows.values()])
    )
    assert "NaN" not in (tmp_path / "nan.json").read_text()


def test_curves_of_whole_runs():
    steps = [dict(lm_loss=9.0 - i / 100, skipped=i == 3, moe_load_imbalance=1.5) for i in range(600)]
    found = report.losses_of(steps)
    assert len(found["curve"]) == report.POINTS and found["curve"][0] == pytest.approx(8.99)
    assert found["train_loss"] == pytest.approx(np.mean([s["lm_loss"] for s in steps[-50:]]), abs=1e-5)
    assert found["skipped"] == 1 and found["busiest_last"] == 1.5
    assert report.losses_of([dict(lm_loss="nan", skipped=1)])["train_loss"] == "nan"


def test_tables_of_a_file(tmp_path, capsys):
    rows = losses(bf16=[run(1, 2.0), run(2, 2.1)], delayed=[run(1, 2.1)])
    written(tmp_path / "losses.json", [*rows.values()], part="fp8-losses")
    report.main([str(tmp_path / "losses.json")])
    assert "| bf16 | validation loss | 2.0000, 2.1000 |" in capsys.readouterr().out

"""Published runs with their layouts: do the flags mean them, and do their own numbers agree?"""

import dataclasses
import json
import re

import pytest

from benchmarks.table import RESULTS
from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import parse
from nanomegatron.config.settings import Config
from nanomegatron.plan.flops import flops_per_iteration, parameter_count
from nanomegatron.plan.gpus import device_peak

ROWS = json.loads((RESULTS / "published-layouts.json").read_text(encoding="utf-8"))["rows"]
PLANNED = {key: row for key, row in ROWS.items() if "flags" in row}
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "virtual_stages": "num_virtual_stages_per_pipeline_rank",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}
planned = pytest.mark.parametrize("key", PLANNED)


def config(row: dict) -> Config:
    return resolve(parse(row["flags"].split()).config, row["gpus"])


@pytest.mark.parametrize("key", ROWS)
def test_rows_say_what_was_published_and_where(key):
    row = ROWS[key]
    assert row["source"] and row["convention"] and row["read"] and row["published"]
    assert ("flags" in row) != ("why_not" in row)
    layout = row["layout"]
    if layout["dp"] and layout["tp"] and layout["pp"]:
        assert layout["dp"] * layout["tp"] * layout["pp"] * layout["cp"] == row["gpus"]


@planned
def test_flags_mean_the_run(key):
    """All that was published; the rest is in `assumed`."""
    row = ROWS[key]
    parsed = parse(row["flags"].split())
    assert [*parsed.errors, *validate(parsed.config, row["gpus"], "cuda", (9, 0))] == []
    run, assumed = config(row), row.get("assumed", {})
    model = dataclasses.asdict(run.model) | {"vocab_size": run.data.vocab_size}
    assert {name: model[name] for name in row["shape"]} == row["shape"]
    for word, size in row["layout"].items():
        found = getattr(run.parallel, SIZES[word]) or 1
        assert found == (size or 1) or size is None and word in assumed, word
    assert run.data.seq_length == row["seq_length"]
    for word, size in (
        ("micro_batch", run.data.micro_batch_size),
        ("global_batch", run.data.global_batch_size),
    ):
        assert size == (row[word] or int(re.match(r"\d+", assumed[word])[0]))
    assert bool(run.precision.fp8_format) == ("FP8" in row["precision"])


@planned
def test_numbers_of_a_source_agree(key):
    """Time and rate, by the FLOPs of the shape as the source counts them: wrong sizes show here."""
    row, run = ROWS[key], config(ROWS[key])
    given, peak = row["published"], device_peak(f"NVIDIA {row['gpu']}", "bfloat16")
    tokens = run.data.global_batch_size * run.data.seq_length / row["gpus"]
    if "seconds" in given and "tokens_per_s_per_gpu" in given:
        assert given["seconds"] * given["tokens_per_s_per_gpu"] == pytest.approx(tokens, rel=0.003)
    seconds = given.get("seconds") or tokens / given.get("tokens_per_s_per_gpu", float("inf"))
    if seconds and row["count"]:
        rate = given["tflops"] * 1e12 if "tflops" in given else given["mfu"] * peak
        sizes = row["shape"]["vocab_size"], run.data.seq_length, run.data.global_batch_size
        flops = flops_per_iteration(run.model, *sizes, row["count"]) / row["gpus"]
        assert flops / seconds == pytest.approx(rate, rel=0.005)


@planned
def test_models_are_as_large_as_they_are_called(key):
    """Of the GPTs whose sizes are in their names; parameters without the positions, in billions."""
    row = ROWS[key]
    name, _, size = row["model"].partition(" ")
    if name == "GPT" and size != "7B":
        named = float(size[:-1]) * (1000 if size[-1] == "T" else 1)
        found = parameter_count(config(row).model, row["shape"]["vocab_size"]) / 1e9
        assert found == pytest.approx(named, rel=0.03)


def test_most_can_be_planned():
    """Among them each kind of layout; those of which a size is missing are not."""
    assert len(PLANNED) > len(ROWS) / 2
    for word in SIZES:
        assert any((row["layout"][word] or 1) > 1 for row in PLANNED.values()), word
    assert {row["gpu"] for row in PLANNED.values()} == {"H100", "H200", "A100"}

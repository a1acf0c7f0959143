"""Are the rows for the planner the runs that were measured, all of them, and their halves the rule's?"""

import dataclasses
import hashlib
import re
from collections import Counter

import pytest

from benchmarks.table import RESULTS, follow, load
from nanomegatron.config.check import validate
from nanomegatron.config.cli import parse
from nanomegatron.config.settings import Config, padded_vocab_size
from nanomegatron.plan.flops import flops_per_iteration
from nanomegatron.plan.gpus import device_peak
from tests.plan_rows import SECONDS, SPEC, Row, every_row, rows

ROWS = every_row()
PEAK = device_peak("NVIDIA H200", "bfloat16")  # H100's too
EVEN = 1.5  # share of the busiest expert, over what it would have if all had the same
TIMES = {*SECONDS, "tokens_per_s", "median_tokens_per_s"} - {"ms"}
SINCE = {  # no row sets them, and their defaults were others
    *("distributed_timeout_minutes", "ddp_bucket_size", "data_parallel_sharding_strategy"),
}
each = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@each
def test_flags_mean_a_run_today(row):
    parsed = parse(row.flags.split())
    assert [*parsed.errors, *validate(parsed.config, row.world, "cuda", (9, 0))] == []
    assert "--config" in row.flags and len(row.flags.split("--config")) == 2


@each
def test_measurements_are_found(row):
    """Those of rows that are left out too; the device is the file's, the half the rule's."""
    assert row.gpu in str(device(row.file)) or row.file.endswith("l")
    usable = not (row.left_out or row.superseded)
    assert bool(row.left_out) + bool(row.superseded) + bool(row.half) == 1
    if usable:
        byte = hashlib.sha256(f"{row.file} {row.at}".encode()).digest()[0]
        assert row.half == ("check" if byte % 2 else "fit")
        assert row.step_s is not None or row.peak_bytes is not None
    assert row.step_s is None or 1e-3 < row.step_s < 1000
    assert row.peak_bytes is None or 2**30 < row.peak_bytes < 141e9


def test_halves_are_of_some_size():
    counts = Counter(row.half for row in rows())
    assert counts.keys() == {"fit", "check"} and min(counts.values()) > 30
    assert {row.name for row in rows("fit")}.isdisjoint(row.name for row in rows("check"))


@each
def test_flags_are_those_of_the_measurement(row):
    """As far as a file says them: flags, the settings they gave, tokens of a step."""
    entry = follow(load(row.file), row.at.split("/")) if row.at else load(row.file)
    recorded = entry.get("tokens_per_s") if isinstance(entry, dict) else None
    if recorded and row.step in SECONDS and "tokens" not in entry:
        seconds = follow(entry, [row.step]) * SECONDS[row.step]
        assert recorded * seconds == pytest.approx(row.tokens, rel=1e-4)
    if isinstance(entry, dict) and "mfu" in entry and "tokens" not in entry:
        floating_point = entry["mfu"] * PEAK / entry["tokens_per_s_per_gpu"] * row.tokens
        assert floating_point == pytest.approx(flops(row), rel=1e-4)
    if row.at.startswith("summary/"):
        contender = load(row.file)["contenders"][row.at.removeprefix("summary/").rsplit(", ", 1)[0]]
        for room in "model", "parallel":
            today = dataclasses.asdict(getattr(row.config, room))
            then = {key: value for key, value in contender[room].items() if key in today}
            assert different(today, then) == set()
    elif row.at.startswith(("rows/", "cases/")):
        flags = follow(load(row.file), row.at.split("/")[:2])["flags"]
        assert core(row.config) == core(dataclasses.replace(row, flags=flags).config)


def flops(row: Row) -> float:
    """Of a step, as its program counted them: that of the summaries with no padding of the vocabulary."""
    data, tp = row.config.data, row.config.parallel.tensor_model_parallel_size
    padded = padded_vocab_size(row.vocab, data.make_vocab_size_divisible_by, tp)
    vocab = row.vocab if row.at.startswith("summary/") else padded
    return flops_per_iteration(row.config.model, vocab, data.seq_length, data.global_batch_size)


def core(config: Config) -> tuple:
    """What affects time or memory."""
    data, optimizer = config.data, config.optimizer
    sizes = data.seq_length, data.micro_batch_size, data.global_batch_size, data.variable_seq_lengths
    states = optimizer.optimizer_cpu_offload, optimizer.main_grads_dtype, optimizer.exp_avg_dtype
    parallel = dataclasses.replace(config.parallel, distributed_timeout_minutes=10)
    return config.model, parallel, config.precision, sizes, states, data.make_vocab_size_divisible_by


def different(today: dict, then: dict) -> set[str]:
    """Names of settings; lists of a JSON file are tuples here."""
    plain = lambda value: list(value) if isinstance(value, tuple) else value  # noqa: E731
    return {key for key, value in then.items() if plain(today[key]) != value} - SINCE


def device(file: str) -> str:
    data = load(file)
    return str(data.get("device") or data.get("devices") or "") if isinstance(data, dict) else ""


def measurements(file: str) -> set[str]:
    """Where a results file has training runs of this project's code that were measured."""
    data = load(file)
    if file.endswith("l"):
        return {"1:"}
    if "contenders" in data:
        ours = {name for name, built in data["contenders"].items() if built["built"] == "ours"}
        return {f"summary/{case}" for case in data["summary"] if case.rsplit(", ", 1)[0] in ours}
    if "recipe" in str(data.get("runs", ""))[:20]:
        measured = {run["recipe"] for run in data["runs"] if run.get("tokens_per_s")}
        return {f"runs/recipe={recipe}&seed=*" for recipe in measured}
    found = {
        f"rows/name={row['name']}" for row in data.get("rows", ()) if row.get("step_ms") and of_ours(row)
    }
    for case in data.get("cases", ()):
        part = "/new" if "new" in case else "/runs/seed=*" if "runs" in case else ""
        runs = "--config" in case["flags"] and "--gemm-autotune" not in case["flags"]  # which is gone
        if runs and of_ours(case) and (part or case.get("median_ms")):
            found.add(f"cases/name={case['name']}{part}")
    return found or {key for key, value in data.items() if "step_s" in str(value)} or {""}


def of_ours(entry: dict) -> bool:
    return entry.get("program", "train.py") == "train.py" and "transformers" not in entry["name"]


def test_every_run_that_was_measured_is_a_row():
    wanted = {}
    for path in sorted(RESULTS.iterdir()):
        keys = {*re.findall(r'"(\w+)":', path.read_text(encoding="utf-8"))}
        if TIMES & keys and "cpu" not in device(path.name):
            wanted[path.name] = measurements(path.name)
    assert {entry["file"]: {row["at"] for row in entry["rows"]} for entry in SPEC["files"]} == wanted
    assert len(ROWS) == sum(map(len, wanted.values()))


def test_of_the_same_run_only_the_newest_counts():
    names = {row.name: row for row in ROWS}
    for row in ROWS:
        if row.superseded:
            newer = names[row.superseded]
            assert newer.half and same(newer) == same(row), row.name
            assert (newer.file[:10], date(newer.file)) >= (row.file[:10], date(row.file)), row.name
    counts = Counter(same(row) for row in rows())
    assert max(counts.values()) == 1


def same(row: Row) -> tuple:
    return core(row.config), row.gpu, row.world, row.vocab


def date(file: str) -> str:
    return load(file)["date"]


def test_uneven_experts_are_left_out_by_their_load():
    uneven = {row.name for row in ROWS if (busiest(row) or 1) > EVEN}
    assert uneven == {row.name for row in ROWS if "busiest" in row.left_out}
    assert any(1 < (busiest(row) or 0) <= EVEN for row in rows())


def busiest(row: Row) -> float | None:
    """Tokens of the busiest expert over those of the mean one, where a file says it."""
    if not row.at.startswith("rows/"):
        return None
    return follow(load(row.file), row.at.split("/")).get("imbalance")

"""The benchmark of context parallelism, tiny and on CPUs: it runs to its end, and all compute the same."""

import json
import math
import weakref

import numpy as np
import pytest
import torch

import train
from benchmarks import bench_cp, bench_cp_report, bench_cp_training, contenders_cp, long_tail
from nanomegatron.cp import Shard
from nanomegatron.mesh import Axis, World
from tests.spmd import run_spmd


def bench(world: World, *argv: str) -> None:
    bench_cp.main(["--small", *argv], world)


def measured(ranks: int, out, *argv: str) -> dict:
    run_spmd(bench, ranks, "--out", str(out), *argv, timeout=150)
    return json.loads(out.read_text())


def rows_sent(bounds, ranks: int) -> int:
    """By rank 0, of keys that others' queries see, forth and in the backward, and of gradients of others'."""
    places = []
    for rank in range(ranks):
        axis = Axis("cp", ranks, rank, tuple(range(ranks)))
        places.append(Shard(axis, bounds[-1], ["p2p"], np.array(bounds)).places)
    document = [np.searchsorted(bounds, own, side="right") for own in places]

    def seen(queries: int, keys: int) -> int:
        after = places[queries][:, None] > places[keys]
        return (after & (document[queries][:, None] == document[keys])).any(0).sum()

    return sum(2 * seen(other, 0) + seen(0, other) for other in range(1, ranks))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_attention_part(ranks, tmp_path):
    """Everybody's output and gradients are those of one process, and what is sent is what context.md says."""
    argv = "--part attention --lengths 16 --documents 16 --iters 3 --profile p2p".split()
    result = measured(ranks, tmp_path / "attention.json", *argv)
    rows = {(row["case"], row["name"]): row for row in result["rows"]}
    ours = ["p2p", "a2a", "allgather", "a2a+p2p"][: 3 + (ranks == 4)]
    everybody = ["one gpu", *ours, "plain ring", "equal slices", "torch allgather", "torch alltoall"]
    assert [name for case, name in rows if case == "16k"] == everybody
    assert [name for case, name in rows if case == "16k, documents"] == ["one gpu", *ours, "plain ring"]
    assert not any("errors" in row for row in result["rows"]) and not result["skipped"]
    for (_, name), row in rows.items():
        assert name == "one gpu" or row["error"] < 5e-6, name
        assert len(row["forward_ms"]) == len(row["both_ms"]) == 3
        assert all(0 < a < b for a, b in zip(row["forward_ms"], row["both_ms"], strict=True))
    s, n, g, d, size = 1024, 8, 2, 16, 4
    keys, heads = 2 * g * d * size * s // ranks, size * d * s // ranks
    both = ranks * (n + 2 * max(g, ranks)) // ranks  # in blocks for each rank, where key heads are copied
    for case in ("16k", "16k, documents"):
        sent = {name: rows[case, name]["sent_bytes"] for name in ours}
        if "documents" in case:
            bounds = contenders_cp.document_bounds(s, s // 4)
            assert sent["p2p"] == {"send": rows_sent(bounds, ranks) * 2 * g * d * size}
        else:  # of rank 0: half of its keys, twice, and gradients of all of the others
            assert sent["p2p"] == {"send": 2 * (ranks - 1) * keys}
        assert rows[case, "plain ring"]["sent_bytes"] == {"send": (3 * ranks - 2) * keys}  # always all
        assert sent["allgather"] == {"all_gather": 2 * ranks * keys, "reduce_scatter": ranks * keys}
        assert sent["a2a"] == {"all_to_all": 2 * (both + n) * heads}
    assert rows["16k", "equal slices"]["sent_bytes"] == rows["16k", "plain ring"]["sent_bytes"]


def test_rates_are_of_the_same_flops():
    """32 heads of 128: 4 s^2 / 2 * 4096 forward; a row of s / sqrt(N) tokens has an N-th."""
    case = contenders_cp.Case("128k", 131072)
    assert case.flops() == (pytest.approx(2 * 131072**2 * 4096), pytest.approx(7 * 131072**2 * 4096))
    assert case.flops(65536)[1] == pytest.approx(case.flops()[1] / 4)
    told = contenders_cp.Case("documents", 10, bounds=(0, 2, 3, 10))
    assert told.flops()[0] == 2 * (4 + 1 + 49) * 4096
    bounds = contenders_cp.document_bounds(32768, 4096)
    assert len(bounds) == 9 and bounds[0] == 0 and bounds[-1] == 32768 and min(np.diff(bounds)) > 0


class Broken:
    def __init__(self, *_) -> None:
        raise ZeroDivisionError("no such kernel")


def bench_with_failures(world: World, out: str) -> None:
    """Ours cannot be built on one rank, torch's fails in its first turn, the next case finds no time."""
    argv = ["--small", "--part", "attention", "--lengths", "4", "--documents", "--out", out]
    usual, contenders = contenders_cp.contenders, {}

    def changed(*args):
        contenders.update(usual(*args))
        one = contenders["one gpu"]["ours"]
        contenders["p2p"] = {"bad": lambda: one() if world.rank else Broken(), **contenders["p2p"]}
        contenders["torch allgather"] = {"bad": lambda: contenders_cp.Way(one().places, Broken)}
        return contenders

    contenders_cp.contenders = changed
    bench_cp.main(argv, world)


def test_what_fails_is_left_out(tmp_path):
    run_spmd(bench_with_failures, 2, str(tmp_path / "cp.json"), timeout=100)
    result = json.loads((tmp_path / "cp.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert "no such kernel" in rows["p2p"]["errors"]["bad"] and rows["p2p"]["built"] == "ours"
    assert "no such kernel" in rows["torch allgather"]["errors"]["bad"]
    assert "both_ms" not in rows["torch allgather"] and "both_ms" in rows["torch alltoall"]
    assert "no such kernel" in bench_cp_report.failure(rows["torch allgather"])


def test_no_time_is_no_case(tmp_path):
    argv = "--part attention --lengths 4 8 --documents --minutes 0".split()
    result = measured(2, tmp_path / "cp.json", *argv)
    assert result["skipped"] == ["4k", "8k"] and not result["rows"]


def test_train_part(tmp_path):
    """However the ranks communicate, the loss is the same; --add and --flags are train.py's."""
    argv = ["--part", "train", "--only", "32k", "--only", "128k all layers", "--flags", "--lr 1e-3"]
    ways = {"a2a": "--cp-comm-type a2a", "allgather": "--cp-comm-type allgather"}
    argv += [f"--add={name}=32 2 {flags}" for name, flags in ways.items()]
    argv += ["--add", "8 layers=32 8 --num-layers 8", "--add", "odd=32 2 --cp-comm-type p3p"]
    result = measured(2, tmp_path / "train.json", *argv)
    rows = {row["name"]: row for row in result["rows"]}
    assert "p3p" in rows["odd"]["errors"]["run"] and "mfu" not in rows["odd"]
    for name in ways:
        assert rows[name]["loss"] == pytest.approx(rows["32k"]["loss"], rel=2e-3)  # bf16
    row = rows["32k"]
    assert row["layers"] == 2 and row["seq_length"] == 128 and row["tokens"] == [128, 128]
    assert row["tokens_per_s_per_gpu"] == pytest.approx(64e3 / np.median(row["step_ms"]))
    assert row["predicted_gib"]["sum"] > 0 and "--lr 1e-3" in row["flags"]
    assert rows["128k all layers"]["seq_length"] == 512 and "--recompute" in rows["128k all layers"]["flags"]
    assert rows["8 layers"]["loss"] != row["loss"]


def test_memory_part(tmp_path, capsys):
    out = tmp_path / "memory.json"
    result = measured(2, out, "--part", "memory", "--lengths", "32", "16")
    rows = result["rows"]
    lengths = [(row["again"], row["seq_length"]) for row in rows]
    assert lengths == [(again, s) for again in bench_cp_training.AGAIN for s in (64, 128)]
    assert all(len(row["step_ms"]) == 1 and "left_out" not in row for row in rows)
    by_name = {row["name"]: row["predicted_gib"]["sum"] for row in rows}
    assert by_name["nothing again, 32k"] > by_name["nothing again, 16k"]
    bench_cp.main(["--from", str(out)])
    assert capsys.readouterr().out.splitlines()[-1] == "layers again: trained on rows of 128 tokens"


def bench_and_look(world: World, out: str) -> list[bool]:
    """Whether the model of a run is still there when the next one is built, and when all have ended.

    The second one runs out of memory.
    """
    models, alive = [], []
    usual, step = bench_cp_training.Training.__init__, train.train_step

    def train_step(run):
        told = step(run)
        if "a2a" in run.config.parallel.cp_comm_type:
            raise torch.OutOfMemoryError("too much")
        return told

    def init(self, *args) -> None:
        alive.append(any(model() is not None for model in models))
        usual(self, *args)
        models.append(weakref.ref(self.run.model))

    bench_cp_training.Training.__init__, train.train_step = init, train_step
    bench(world, "--part", "train", "--only", "32k", "--only", "32k a2a", "--only", "64k", "--out", out)
    return [*alive, any(model() is not None for model in models)]


def test_runs_leave_nothing_in_memory(tmp_path):
    out = tmp_path / "train.json"
    assert run_spmd(bench_and_look, 2, str(out), timeout=100) == [[False] * 4] * 2
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert "too much" in bench_cp_report.run_line(rows["32k a2a"])
    assert "mfu" in rows["32k"] and "mfu" in rows["64k"] and "mfu" not in rows["32k a2a"]


def test_dynamic_part(tmp_path, capsys):
    """The same documents a step, hence the same loss; tokens are those of documents, without padding."""
    lengths = long_tail.draw_lengths(160, longest=128)
    long_tail.write(tmp_path, lengths)
    data = ["--data", str(tmp_path / "documents"), "--longest", "32", "--batch", "6"]
    result = measured(2, tmp_path / "dynamic.json", "--part", "dynamic", *data)
    fixed, dynamic = result["rows"]
    assert fixed["tokens"] == dynamic["tokens"] and len(set(fixed["tokens"])) > 1
    assert sum(fixed["tokens"]) < lengths.sum()
    assert dynamic["loss"] == pytest.approx(fixed["loss"], rel=2e-3)  # bf16
    seconds = sum(dynamic["step_ms"]) / 1e3
    assert dynamic["tokens_per_s"] == pytest.approx(sum(dynamic["tokens"]) / seconds)
    bench_cp_report.report(result)
    gain = sum(fixed["step_ms"]) / sum(dynamic["step_ms"])
    assert f"dynamic is {gain:.3f} times as fast as fixed" in capsys.readouterr().out.splitlines()[-1]


def test_dynamic_part_needs_documents(capsys):
    with pytest.raises(SystemExit):
        bench_cp.main(["--part", "dynamic"])
    assert "--data PREFIX" in capsys.readouterr().err


def test_picture_of_memory(tmp_path):
    pytest.importorskip("matplotlib")
    rows = []
    for again, more in (("nothing again", 2), ("layers again", 1)):
        for s in (16384, 32768, 65536):
            predicted = {"sum": 60 + more * s / 1024}
            row = dict(again=again, seq_length=s, layers=32, predicted_gib=predicted, name=f"{again}, {s}")
            rows.append(row | (dict(mfu=0.5, peak_gib=predicted["sum"] + 1) if s < 65536 else {}))
    facts = dict(part="memory", ranks=4, device="NVIDIA H200", capacity_gib=135.0, longest={})
    bench_cp_report.draw(tmp_path / "memory.svg", [facts | dict(rows=rows)])
    text = (tmp_path / "memory.svg").read_text()
    assert "nothing again" in text and "64k" in text and "4 x NVIDIA H200" in text


def test_longest_row_by_prediction(monkeypatch):
    """The search ends at the last eight thousand tokens that fit."""
    sitting = type("Sitting", (), {"result": {"rows": []}, "args": type("Args", (), {"layers": 2})})()

    def row(_, name, thousands, *rest):
        sitting.result["rows"].append({})
        return {"predicted_gib": {"sum": 10.0 + thousands / 10}}, []

    monkeypatch.setattr(bench_cp_training, "new_row", row)
    assert bench_cp_training.longest(sitting, "", 20 * 2**30) == 96
    assert not sitting.result["rows"] and math.isclose(20, 10 + 100 / 10)

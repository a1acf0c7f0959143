"""The benchmarks of FP8, tiny and on a CPU: they run to their end, and their ways compute what they say."""

import json

import pytest
import torch

from benchmarks import bench_fp8
from nanomegatron.fp8 import RECIPES

CPU = torch.device("cpu")


def test_every_line_runs(tmp_path, capsys):
    out = tmp_path / "fp8.json"
    bench_fp8.main(["--small", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    names = ["matmul y", "matmul dx", "matmul dW", "sum", "cast x", "cast w", "cast g", "layer"]
    assert sorted((row["name"], row["layer"]) for row in rows) == sorted(
        (name, layer) for name in names for layer in ("qkv", "proj", "fc1", "fc2")
    )
    for row in rows:
        for way, told in row["ways"].items():
            assert told.keys() == {"ms", "gb_per_s" if row["name"].startswith("cast") else "tflops"}, way
    assert "| layer | all | blockwise |" in capsys.readouterr().out


def test_only_some(tmp_path):
    out = tmp_path / "fp8.json"
    bench_fp8.main(["--small", "--only", "layer", "--only", "fc2", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["name"], row["layer"], list(row["ways"])) == ("layer", "fc2", ["bf16", *RECIPES])


@pytest.mark.parametrize("make", [bench_fp8.matmuls, bench_fp8.whole_layers])
def test_all_ways_compute_the_same(make):
    """Within a tenth of the result's norm; of a layer, the input gradient."""
    torch.manual_seed(1)
    for line in make(bench_fp8.layers(True, CPU)[0]):
        results = {name: run() for name, run in line.ways.items()}
        results = {name: (r[0] if isinstance(r, tuple) else r).float() for name, r in results.items()}
        exact = results["bf16"]
        if line.name == "layer":
            assert exact.shape == (128, 1, 128)
        for name, found in results.items():
            assert (found - exact).norm() < 0.1 * exact.norm(), (line.name, name)


def test_weight_gradients_are_added():
    """All but the first microbatch's, which takes their place."""
    torch.manual_seed(1)
    (line,) = bench_fp8.sums(bench_fp8.layers(True, CPU)[1])
    first = line.ways["first"]().clone()
    for name in ("bf16", "add fp32", "add bf16", "add bf16, fast", "block, add fp32", "block, add bf16"):
        main = line.ways["first"]()
        line.ways[name]()
        assert (main - 2 * first).norm() < 0.1 * first.norm(), name
    assert torch.equal(line.ways["first"](), first)


def test_what_fails_is_told():
    line = bench_fp8.Line("x", "y", 1, {"bf16": lambda: None, "bad": lambda: [][0]})
    row = bench_fp8.measure(line)
    assert row["ways"]["bad"] == {"failed": "IndexError: list index out of range"}
    assert "| x | y | bad | failed |" in bench_fp8.table([row])
    assert "bad" not in bench_fp8.together([row])[0]["ways"]


def test_what_cannot_be_made_is_told(monkeypatch):
    monkeypatch.setitem(bench_fp8.MAKE, "sum", lambda layer: iter([layer.nothing]))
    (row,) = bench_fp8.measured("sum", bench_fp8.layers(True, CPU)[0])
    assert row["layer"] == "qkv" and "no attribute 'nothing'" in row["ways"]["all"]["failed"]

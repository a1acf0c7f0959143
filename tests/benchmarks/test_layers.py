"""The benchmarks of layers, tiny and on CPUs: they run to their end, and all forms compute the same."""

import json

import numpy as np
import pytest
import torch

from benchmarks import context_cases, layer_cases, layers
from benchmarks.context_cases import Row, document_bounds
from benchmarks.session import Session, arguments
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.fp8 import RECIPES
from nanomegatron.mesh import Axis, World
from tests.spmd import run_spmd
from tests.test_cp_shard import shard_of


def bench(world: World, *argv: str) -> None:
    layers.main([*argv, "--small"], world)


def measured(ranks: int, out, *argv: str) -> dict:
    """What the JSON says of each form of each case, all of which have run."""
    run_spmd(bench, ranks, *argv, "--out", str(out), timeout=150)
    result = json.loads(out.read_text())
    assert result["ranks"] == ranks
    cases = {name: case["forms"] for name, case in result["cases"].items()}
    for name, rows in cases.items():
        for form, row in rows.items():
            on_cpu = form == "torch fused"  # has no kernel there
            assert on_cpu or 0 < row["min_ms"] <= row["ms"] <= row["max_ms"], (name, form, row)
    return cases


def test_tensor_parallel(tmp_path):
    """A layer that gathers before its matmul, and one that reduces behind it."""
    cases = measured(2, tmp_path / "tp.json", "tp", "qkv", "fc2")
    assert list(cases) == [f"{name} {passes}" for name in ("qkv", "fc2") for passes in ("fwd", "fwd+bwd")]
    for name, rows in cases.items():
        assert "symm_mem" in rows.get("torch fused", {"failed": "symm_mem"})["failed"]
        assert rows["ours"]["error"] < 1e-5 and rows["collectives"]["error"] < 1e-5, name


def rows_sent(bounds, ranks: int) -> int:
    """By rank 0, of keys that others' queries see, forth and in the backward, and of gradients of others'."""
    places = []
    for rank in range(ranks):
        axis = Axis("cp", ranks, rank, tuple(range(ranks)))
        places.append(shard_of(axis, bounds[-1], ["p2p"], np.array(bounds)).positions)
    document = [np.searchsorted(bounds, own, side="right") for own in places]

    def seen(queries: int, keys: int) -> int:
        after = places[queries][:, None] > places[keys]
        return (after & (document[queries][:, None] == document[keys])).any(0).sum()

    return sum(2 * seen(other, 0) + seen(0, other) for other in range(1, ranks))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel(ranks, tmp_path):
    """Everybody's output and gradients are those of one process, and what is sent is what context.md says."""
    cases = measured(ranks, tmp_path / "cp.json", *"cp --lengths 16 --samples 3".split())
    ours = ["p2p", "a2a", "allgather", "a2a+p2p"][: 3 + (ranks == 4)]
    forms = [*ours, "equal slices", "one gpu"]  # torch's attention is for GPUs
    assert list(cases) == ["16k fwd", "16k fwd+bwd", "16k, documents fwd", "16k, documents fwd+bwd"]
    for name, rows in cases.items():
        assert list(rows) == ([*ours, "one gpu"] if "documents" in name else forms)
        assert all(row["error"] < 5e-6 for form, row in rows.items() if form != "one gpu"), name
    s, n, g, d, size = 1024, 8, 2, 16, 4
    keys, heads = 2 * g * d * size * s // ranks, size * d * s // ranks
    both = ranks * (n + 2 * max(g, ranks)) // ranks  # in blocks for each rank, where key heads are copied
    for name in ("16k fwd+bwd", "16k, documents fwd+bwd"):
        sent = {form: row["sent_bytes"] for form, row in cases[name].items() if "sent_bytes" in row}
        if "documents" in name:
            bounds = document_bounds(s, s // 4)
            assert sent["p2p"] == {"send": rows_sent(bounds, ranks) * 2 * g * d * size}
        else:  # of rank 0: half of its keys, twice, and gradients of all of the others
            assert sent["p2p"] == {"send": 2 * (ranks - 1) * keys}
            assert sent["equal slices"] == {"send": (3 * ranks - 2) * keys}  # always all
        assert sent["allgather"] == {"all_gather": 2 * ranks * keys, "reduce_scatter": ranks * keys}
        assert sent["a2a"] == {"all_to_all": 2 * (both + n) * heads}


def test_rates_are_of_the_same_flops():
    """32 heads of 128: 4 s^2 / 2 * 4096 forward; a row of s / sqrt(N) tokens has an N-th."""
    row = Row(131072)
    assert row.flops() == pytest.approx(2 * 131072**2 * 4096)
    assert Row(65536).flops() == pytest.approx(row.flops() / 4)
    assert Row(10, bounds=(0, 2, 3, 10)).flops() == 2 * (4 + 1 + 49) * 4096
    bounds = document_bounds(32768, 4096)
    assert len(bounds) == 9 and bounds[0] == 0 and bounds[-1] == 32768 and min(np.diff(bounds)) > 0


def broken() -> None:
    raise ZeroDivisionError("no such kernel")


def bench_with_failures(world: World, out: str) -> None:
    """The ring cannot be built on one rank, allgather fails in its first call."""
    usual = context_cases.ways

    def changed(*args):
        forms = usual(*args)
        p2p = forms["p2p"]
        forms["p2p"] = lambda backward: p2p(backward) if world.rank else broken()
        return forms | {"allgather": lambda backward: broken}

    context_cases.ways = changed
    layers.main(["cp", "--small", "--lengths", "4", "--out", out, "4k fwd"], world)


def test_what_fails_is_left_out(tmp_path):
    run_spmd(bench_with_failures, 2, str(tmp_path / "cp.json"), timeout=100)
    rows = json.loads((tmp_path / "cp.json").read_text())["cases"]["4k fwd"]["forms"]
    failed = {"failed": "ZeroDivisionError: no such kernel"}
    assert rows["p2p"] == rows["allgather"] == failed
    assert "ms" in rows["a2a"] and "ms" in rows["one gpu"]


def test_experts_over_ranks(tmp_path):
    cases = measured(2, tmp_path / "moe.json", "moe", "qwen")
    assert list(cases["qwen layer"]) == ["alltoall", "halves", "allgather", "experts"]
    assert list(cases["qwen pieces"]) == ["router", "dispatch", "dispatch, allgather"]
    tokens, h = 4 * 32, 64
    f, k = 32, 8  # Qwen's choice of 8
    for row in cases["qwen layer"].values():
        assert row["tflops"] * row["ms"] * 1e9 == pytest.approx(18 * tokens * k * h * f)
        assert row["factor"] == row["ms"] / cases["qwen layer"]["alltoall"]["ms"]


@pytest.mark.full
def test_matmuls_of_experts(tmp_path):
    """Every matmul in every way; FLOPs of a rank do not depend on ep."""
    cases = measured(1, tmp_path / "experts.json", "experts", "mixtral")
    layers = [f"mixtral ep {ep} fc{layer}" for ep in (1, 2, 4) for layer in (1, 2)]
    assert list(cases) == [f"{layer} {product}" for layer in layers for product in ("y", "dW")]
    rows = 2 * 32 * 2  # two sequences, two experts a token
    for name, forms in cases.items():
        assert list(forms) == ["loop", "grouped", "fp8"]
        flops = 2 * rows * 64 * 32 * (2 if "fc1" in name else 1)
        assert all(row["tflops"] * row["ms"] * 1e9 == pytest.approx(flops) for row in forms.values())


@pytest.mark.full
def test_transformers(tmp_path):
    """Ours and transformers' compute the same, to what bf16 and near ties of the choice leave."""
    pytest.importorskip("transformers")
    cases = measured(1, tmp_path / "peers.json", "transformers")
    for rows in (cases["mixtral"], cases["qwen"]):
        assert list(rows) == ["ours", "transformers, grouped", "transformers, loop"]
        assert all(row["difference"] < 1e-2 for form, row in rows.items() if form != "ours")


def test_fp8(tmp_path):
    kinds = ["matmul y", "matmul dx", "matmul dW", "layer"]
    cases = measured(1, tmp_path / "fp8.json", "fp8", "fc2")
    assert list(cases) == [f"fc2 {kind}" for kind in kinds]
    assert list(cases["fc2 matmul y"]) == ["bf16", "tensorwise", "rowwise", "blockwise"]
    assert list(cases["fc2 layer"]) == ["bf16", *RECIPES]


def test_fp8_computes_the_same():
    """Within a tenth of the result's norm; of a layer, the input gradient."""
    session = Session(arguments("fp8", ["fp8", "--small"], ["fp8"]), World(), ParallelConfig())
    cases = [case for case in layer_cases.fp8_cases(session) if case.name.startswith("qkv")]
    for case in cases:
        torch.manual_seed(1)
        results = {form: build()().float() for form, build in case.forms.items()}
        exact = results["bf16"]
        assert len(results) > 3 and exact.norm() > 0
        for form, found in results.items():
            assert (found - exact).norm() < 0.1 * exact.norm(), (case.name, form)
    assert exact.shape == (128, 1, 128)

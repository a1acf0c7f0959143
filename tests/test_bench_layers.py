"""The benchmarks of layers, tiny and on CPUs: they run to their end, and all forms compute the same."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import context_cases, layer_cases, layers
from benchmarks.context_cases import Row, document_bounds
from nanomegatron.cp import Shard
from nanomegatron.fp8 import RECIPES
from nanomegatron.mesh import Axis, World
from tests.spmd import run_spmd


def bench(world: World, *argv: str) -> None:
    layers.main([*argv, "--small"], world)


def measured(ranks: int, out, *argv: str) -> dict:
    """What the JSON says of each form of each case, all of which have run."""
    run_spmd(bench, ranks, *argv, "--out", str(out), timeout=150)
    result = json.loads(out.read_text())
    assert result["ranks"] == ranks and not result["skipped"]
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
        places.append(Shard(axis, bounds[-1], ["p2p"], np.array(bounds)).places)
    document = [np.searchsorted(bounds, own, side="right") for own in places]

    def seen(queries: int, keys: int) -> int:
        after = places[queries][:, None] > places[keys]
        return (after & (document[queries][:, None] == document[keys])).any(0).sum()

    return sum(2 * seen(other, 0) + seen(0, other) for other in range(1, ranks))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_context_parallel(ranks, tmp_path):
    """Everybody's output and gradients are those of one process, and what is sent is what context.md says."""
    cases = measured(ranks, tmp_path / "cp.json", *"cp --lengths 16 --samples 3".split())
    ours = ["p2p", "a2a", "allgather", "a2a+p2p"][: 3 + (ranks == 4)]
    forms = [*ours, "plain ring", "equal slices", "torch allgather", "torch alltoall", "one gpu"]
    assert list(cases) == ["16k fwd", "16k fwd+bwd", "16k, documents fwd", "16k, documents fwd+bwd"]
    for name, rows in cases.items():
        assert list(rows) == ([*ours, "plain ring", "one gpu"] if "documents" in name else forms)
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
            assert sent["equal slices"] == sent["plain ring"]
        assert sent["plain ring"] == {"send": (3 * ranks - 2) * keys}  # always all
        assert sent["allgather"] == {"all_gather": 2 * ranks * keys, "reduce_scatter": ranks * keys}
        assert sent["a2a"] == {"all_to_all": 2 * (both + n) * heads}


def test_rates_are_of_the_same_flops():
    """32 heads of 128: 4 s^2 / 2 * 4096 forward; a row of s / sqrt(N) tokens has an N-th."""
    row = Row(131072)
    assert row.flops() == pytest.approx(2 * 131072**2 * 4096)
    assert row.flops(65536) == pytest.approx(row.flops() / 4)
    assert Row(10, bounds=(0, 2, 3, 10)).flops() == 2 * (4 + 1 + 49) * 4096
    bounds = document_bounds(32768, 4096)
    assert len(bounds) == 9 and bounds[0] == 0 and bounds[-1] == 32768 and min(np.diff(bounds)) > 0


def broken() -> None:
    raise ZeroDivisionError("no such kernel")


def bench_with_failures(world: World, out: str) -> None:
    """Ours cannot be built on one rank, torch's fails in its first call."""
    usual = context_cases.ways

    def changed(*args):
        forms = usual(*args)
        p2p = forms["p2p"]
        forms["p2p"] = lambda backward: p2p(backward) if world.rank else broken()
        return forms | {"torch allgather": lambda backward: broken}

    context_cases.ways = changed
    layers.main(["cp", "--small", "--lengths", "4", "--out", out, "4k fwd"], world)


def test_what_fails_is_left_out(tmp_path):
    run_spmd(bench_with_failures, 2, str(tmp_path / "cp.json"), timeout=100)
    rows = json.loads((tmp_path / "cp.json").read_text())["cases"]["4k fwd"]["forms"]
    failed = {"failed": "ZeroDivisionError: no such kernel"}
    assert rows["p2p"] == rows["torch allgather"] == failed
    assert "ms" in rows["a2a"] and "ms" in rows["torch alltoall"]


def test_experts_over_ranks(tmp_path):
    cases = measured(2, tmp_path / "moe.json", "moe", "qwen")
    plain = ["alltoall", "alltoall, plain", "halves", "allgather", "allgather, plain", "experts"]
    assert list(cases["qwen layer"]) == plain
    assert list(cases["qwen pieces"]) == ["router", "dispatch", "dispatch, allgather"]
    tokens, h = 4 * 32, 64
    f, k = 32, 8  # Qwen's choice of 8
    for row in cases["qwen layer"].values():
        assert row["tflops"] * row["ms"] * 1e9 == pytest.approx(18 * tokens * k * h * f)
        assert row["factor"] == row["ms"] / cases["qwen layer"]["alltoall"]["ms"]


def test_matmuls_of_experts(tmp_path):
    """Every matmul in every way; FLOPs of a rank do not depend on ep."""
    cases = measured(1, tmp_path / "experts.json", "experts", "mixtral")
    layers = [f"mixtral ep {ep} fc{layer}" for ep in (1, 2, 4) for layer in (1, 2)]
    assert list(cases) == [f"{layer} {product}" for layer in layers for product in ("y", "dx", "dW")]
    rows = 2 * 32 * 2  # two sequences, two experts a token
    for name, forms in cases.items():
        assert list(forms) == ["loop", "grouped", "fp8"]
        flops = 2 * rows * 64 * 32 * (2 if "fc1" in name else 1)
        assert all(row["tflops"] * row["ms"] * 1e9 == pytest.approx(flops) for row in forms.values())


def test_transformers(tmp_path):
    """Ours and transformers' compute the same, to what bf16 and near ties of the choice leave."""
    pytest.importorskip("transformers")
    cases = measured(1, tmp_path / "peers.json", "transformers")
    for rows in (cases["mixtral"], cases["qwen"]):
        assert list(rows) == ["ours", "transformers, grouped", "transformers, loop"]
        assert all(row["difference"] < 1e-2 for form, row in rows.items() if form != "ours")


def test_groups(tmp_path):
    rows = measured(
        4, tmp_path / "g.json", "groups", "--flags", "--tp 2 --pp 2", "--samples", "1", "--warm", "0"
    )["groups"]
    assert rows["slow"]["ms"] > rows["gloo"]["ms"] + 100 * 2  # at least two groups a rank


TINY = SimpleNamespace(args=SimpleNamespace(small=True), device=torch.device("cpu"), cuda=False)


def fp8_forms(name: str) -> dict:
    """By name what is run of a case, built."""
    torch.manual_seed(1)
    (case,) = (case for case in layer_cases.fp8_cases(TINY) if case.name == name)
    return {form: build() for form, build in case.forms.items()}


def test_fp8(tmp_path):
    kinds = ["matmul y", "matmul dx", "matmul dW", "sum", "layer"]
    names = [f"{layer} {kind}" for layer in ("qkv", "proj", "fc1", "fc2") for kind in kinds]
    assert [case.name for case in layer_cases.fp8_cases(TINY)] == [*names, "kept"]
    cases = measured(1, tmp_path / "fp8.json", "fp8", "fc2", "kept")
    assert list(cases) == [f"fc2 {kind}" for kind in kinds] + ["kept"]
    assert list(cases["fc2 layer"]) == list(cases["kept"]) == ["bf16", *RECIPES]


@pytest.mark.parametrize("kind", ["matmul y", "matmul dx", "matmul dW", "layer"])
def test_fp8_computes_the_same(kind):
    """Within a tenth of the result's norm; of a layer, the input gradient."""
    results = {form: run().float() for form, run in fp8_forms(f"qkv {kind}").items()}
    exact = results["bf16"]
    assert len(results) > 4 and (kind != "layer" or exact.shape == (128, 1, 128))
    for form, found in results.items():
        assert (found - exact).norm() < 0.1 * exact.norm(), form


def test_weight_gradients_are_added():
    """All but the first microbatch's, which takes their place."""
    runs = fp8_forms("proj sum")
    first = runs["first"]().clone()
    for form in ("bf16", "add fp32", "add bf16", "block, add fp32", "add in the matmul"):
        main = runs["first"]()
        runs[form]()
        assert (main - 2 * first).norm() < 0.1 * first.norm(), form
    assert torch.equal(runs["first"](), first)

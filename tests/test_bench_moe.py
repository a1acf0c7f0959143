"""The benchmark of mixtures of experts, tiny and on CPUs: it runs to its end, and all compute the same."""

import json

import pytest

from benchmarks import bench_moe
from nanomegatron.mesh import World
from tests.spmd import run_spmd


def bench(world: World, *argv: str) -> None:
    bench_moe.main(["--small", *argv], world)


def measured(ranks: int, out, *argv: str) -> dict:
    run_spmd(bench, ranks, "--out", str(out), *argv, timeout=150)
    result = json.loads(out.read_text())
    assert not any("errors" in row for row in result["rows"]) and not result["skipped"]
    return result


def names(result: dict, case: str) -> list[str]:
    return [row["name"] for row in result["rows"] if row["case"] == case]


@pytest.mark.full
def test_train_part_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    result = measured(2, tmp_path / "peers.json", "--part", "train", "--only", "transformers")
    assert [row["name"] for row in result["rows"]] == [*bench_moe.PEERS]


def test_train_part(tmp_path, capsys):
    """Runs of one's own; a router that is forced is more even."""
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    argv = ["--add", f"again=mixtral {flags}", "--add", "even=qwen --moe-router-force-load-balancing"]
    result = measured(2, tmp_path / "added.json", "--part", "train", *argv)
    again, even = result["rows"]
    assert flags in again["flags"] and again["imbalance"] > even["imbalance"] >= 1
    for row in result["rows"]:
        assert len(row["step_ms"]) == 2 and row["tokens_per_s"] > 0 and 4 < row["loss"][-1] < 5
    bench_moe.main(["--from", str(tmp_path / "added.json")])
    assert "| again | 32 | 2 |" in capsys.readouterr().out


def test_layer_part(tmp_path):
    result = measured(2, tmp_path / "layer.json", "--part", "layer", "--only", "qwen", "--profile", "router")
    pieces = ["router", "dispatch", "dispatch, allgather", "experts"]
    whole = ["alltoall", "alltoall, plain", "halves", "allgather", "allgather, plain"]
    assert names(result, "qwen") == [*whole, *pieces]
    rows = {row["name"]: row for row in result["rows"]}
    assert all(len(row["ms"]) == 2 and min(row["ms"]) > 0 for row in rows.values())
    tokens, h = 4 * 32, 64
    f, k = 32, 8  # Qwen's choice of 8
    assert rows["alltoall"]["flops"] == rows["experts"]["flops"] == 18 * tokens * k * h * f


def test_experts_part(tmp_path):
    """Every matmul in every way; FLOPs of a rank do not depend on ep."""
    result = measured(1, tmp_path / "experts.json", "--part", "experts", "--only", "mixtral")
    cases = [f"mixtral ep {ep} fc{layer}" for ep in (1, 2, 4) for layer in (1, 2)]
    assert list(dict.fromkeys(row["case"] for row in result["rows"])) == cases
    ways = [f"{kind}, {how}" for kind in ("y", "dx", "dW") for how in ("loop", "grouped", "fp8")]
    assert all(names(result, case) == ways for case in cases)
    rows = 2 * 32 * 2  # two sequences, two experts a token
    for row in result["rows"]:
        assert row["flops"] == 2 * rows * 64 * 32 * (2 if row["case"].endswith("fc1") else 1)


def test_peers_part(tmp_path):
    """Ours and transformers' compute the same, to what bf16 and near ties of the choice leave."""
    pytest.importorskip("transformers")
    result = measured(1, tmp_path / "peers.json", "--part", "peers")
    ways = ["ours", "transformers, grouped", "transformers, loop"]
    assert names(result, "mixtral") == names(result, "qwen") == ways
    assert all(row["error"] < 1e-2 for row in result["rows"] if row["name"] != "ours")

"""The benchmark of pipelines, tiny and on CPUs: it runs to its end, and its peers compute what we do."""

import json

import pytest
import torch

from benchmarks import bench_pipeline, contenders, contenders_pipeline
from benchmarks.peers_pipeline import PipelinePeer
from nanomegatron.mesh import Mesh, World
from tests.spmd import run_spmd

CPU = torch.device("cpu")
TRAIN = "--no-bf16 --lr 1e-2 --weight-decay 0.1 --clip-grad 0.5"


def losses_of_all(world: World) -> dict[str, list[float]]:
    """Four steps of every contender and of one process, in fp32, from the same weights on the same tokens."""
    random = torch.Generator().manual_seed(5)
    steps = [[torch.randint(96, (1, 17), generator=random) for _ in range(4)] for _ in range(4)]
    mesh = contenders_pipeline.pipeline_mesh(world, CPU)
    alone = Mesh(world.rank, CPU)

    def config(flags: str, ranks: int = world.size):
        return contenders_pipeline.config_of(f"{TRAIN} {flags}", ranks, CPU, True, 4 * world.size)

    runners = {"one process": lambda: contenders.Ours(config("", 1), alone)}
    for name, flags in contenders_pipeline.OURS.items():
        runners[name] = lambda flags=flags: contenders_pipeline.Ours(config(flags), mesh)
    for name, (flags, kind, _) in contenders_pipeline.TORCH.items():
        runners[name] = lambda flags=flags, kind=kind: PipelinePeer(config(flags), mesh, kind, None)
    found = {}
    for name, build in runners.items():
        runner = build()
        found[name] = [runner.step(batches).item() for batches in steps]
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_all_train_alike(ranks):
    """Losses of four AdamW steps."""
    results = run_spmd(losses_of_all, ranks, timeout=100)
    assert all(found == results[0] for found in results)
    one = results[0].pop("one process")
    assert max(one) - min(one) > 0.01  # the update has an effect
    for name, losses in results[0].items():
        assert losses == pytest.approx(one, rel=2e-6), name


def bench(world: World, *argv: str) -> None:
    bench_pipeline.main(["--small", "--num-layers", str(4 * world.size), *argv], world)


@pytest.mark.parametrize(
    "ranks, counts, rival",
    [
        (2, [2, 4], "torch zb-v"),
        pytest.param(2, [2, 4], "torch interleaved 4", marks=pytest.mark.full),
        pytest.param(4, [8], "torch zb-v", marks=pytest.mark.full),
    ],
)
def test_runs_to_its_end(ranks, counts, rival, tmp_path):
    names = ["zb-v", rival, "zb-v"]
    argv = ["--out", str(tmp_path / "pp.json"), "--microbatches", *map(str, counts)]
    run_spmd(bench, ranks, *argv, *(f"--only={name}" for name in names), timeout=100)
    result = json.loads((tmp_path / "pp.json").read_text())
    assert [phase["names"] for phase in result["phases"]] == [["one gpu"], *([name] for name in names)]
    assert not any("errors" in entry for entry in result["contenders"].values())
    assert result["contenders"][rival]["built"] == ("eager" if rival == "torch zb-v" else "compiled")
    turns = [t for t in result["contenders"]["zb-v"]["turns"] if t["timed"]]
    assert [(t["microbatches"], len(t["step_ms"])) for t in turns] == [(m, 2) for m in counts] * 2
    seen, m = turns[-1]["timeline"], counts[-1]
    assert seen["bubble"] >= seen["bubble_of_busiest"] > 0 and seen["bubble_planned"] > 0
    assert seen["bubble_theory"] == pytest.approx((ranks - 1) / (6 * m))
    assert seen["kept"] == [ranks] * ranks  # the table in schedules.py
    assert turns[0]["loss"] == turns[len(counts)]["loss"]  # built anew, it does the same
    first = result["first_loss"]
    assert first[rival] == pytest.approx(first["zb-v"], rel=2e-3)  # bf16
    row, config = result["summary"][f"zb-v, {m}"], result["contenders"]["zb-v"]
    assert row["steps"] == 4 and row["tokens_per_s"] == pytest.approx(m * 16e3 / row["median_ms"])
    assert config["parallel"]["pipeline_model_parallel_size"] == ranks
    assert len(turns[0]["peak_gib_of_ranks"]) == ranks and not result["skipped"]
    assert len(config["predicted_gib_of_ranks"]) == ranks


class Broken:
    def step(self, batches):
        raise ZeroDivisionError("no such kernel")


def bench_with_failures(world: World, out: str) -> None:
    """One contender cannot be built on one rank, another fails in its first step, a third is too late."""
    args = bench_pipeline.arguments(["--small", "--num-layers", "4", "--microbatches", "2", "--out", out])
    sitting = bench_pipeline.Sitting(args, world)
    sitting.known["1f1b"].builds["ours"] = lambda: {0: Broken()}[world.rank]
    sitting.known["torch 1f1b"].builds.clear()
    sitting.known["torch 1f1b"].builds["bad"] = Broken
    for name in ("1f1b", "torch 1f1b", "1f1b flops"):
        sitting.run(contenders.Phase([name], (2,), 1, 1))
    sitting.summary()


def test_what_fails_is_left_out(tmp_path, capsys):
    run_spmd(bench_with_failures, 2, str(tmp_path / "pp.json"), timeout=100)
    result = json.loads((tmp_path / "pp.json").read_text())
    assert list(result["summary"]) == ["1f1b flops, 2"]
    assert result["contenders"]["1f1b"]["errors"] == {"ours": "on another rank"}
    bench_pipeline.report(result)
    printed = capsys.readouterr().out
    assert "torch 1f1b failed (bad): ZeroDivisionError: no such kernel" in printed


def test_no_time_is_no_contender(tmp_path):
    run_spmd(bench, 2, "--out", str(tmp_path / "pp.json"), "--seconds", "0", timeout=100)
    result = json.loads((tmp_path / "pp.json").read_text())
    assert not result["phases"] and len(result["skipped"]) == 1 + len(bench_pipeline.ORDER)
    assert {name for name, _ in bench_pipeline.ORDER} == {
        *contenders_pipeline.OURS,
        *contenders_pipeline.TORCH,
    }


def test_wrong_losses_are_told():
    assert not bench_pipeline.difference({"a": 12.0, "b": 12.02})
    assert "a 12.0000, c 12.0300" in bench_pipeline.difference({"b": 12.02, "a": 12.0, "c": 12.03})
    assert not bench_pipeline.difference({})


def test_mfu_counts_all_gpus():
    """Llama-3-8B, 51.47 GFLOPs a token, one sequence a second on four GPUs of 1 PFLOP/s."""
    config = contenders_pipeline.config_of(contenders_pipeline.OURS["zb-v"], 4, CPU, False, 32)
    row = contenders_pipeline.Pipelined("", "", config, 0, {}).numbers(16, 16e3, 1e15)
    assert row["mfu"] == pytest.approx(51.47e9 * 8192 / 4e15, rel=1e-3)
    assert row["tokens_per_s_per_gpu"] == 2048

"""The benchmark of parallel training, tiny and on CPUs: it runs to its end, its peers compute what we do."""

import json

import pytest
import torch

from benchmarks import bench_parallel, contenders, kernel_times, peers
from nanomegatron.config.check import resolve
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import Config, DataConfig, OptimizerConfig, ParallelConfig
from nanomegatron.fp8 import RECIPES
from nanomegatron.mesh import Mesh
from tests.spmd import run_spmd

MODEL = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    normalization="RMSNorm",
    swiglu=True,
    position_embedding_type="rope",
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)


def weights(model) -> dict[str, torch.Tensor]:
    """This rank's weights of our model, by the peers' names."""
    found = {
        "embedding.weight": model.embedding.word_embeddings.weight,
        "norm.weight": model.final_layernorm.weight,
        "output.weight": model.output_layer.weight,
    }
    for i, layer in enumerate(model.layers):
        for theirs, name in peers.OURS.items():
            found[f"blocks.{i}.{theirs}.weight"] = layer.get_submodule(name).weight
    return found


@torch.no_grad()
def take(peer: peers.Peer, given: dict[str, torch.Tensor], mesh: Mesh, cut: bool) -> None:
    """Give a peer our weights; `cut`: it holds a slice of rows where we hold all."""
    for name, param in peer.model.named_parameters():
        local, value = param.to_local(), given.pop(name.replace("_orig_mod.", ""))
        local.copy_(value.chunk(mesh.world.size)[mesh.rank] if cut else value)
    assert not given


def losses_of_both(mesh: Mesh, kind: str) -> list[list[float]]:
    tp = mesh.tp.size
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5, lr_decay_style="constant")
    config = Config(
        model=TransformerConfig(**{**vars(MODEL), "sequence_parallel": tp > 1}),
        parallel=ParallelConfig(tensor_model_parallel_size=tp, use_distributed_optimizer=True),
        optimizer=optimizer,
        data=DataConfig(vocab_size=64, seq_length=8, make_vocab_size_divisible_by=8),
    )
    config = resolve(config, mesh.world.size)
    ours, cpu = contenders.Ours(config, mesh), torch.device("cpu")
    if kind == "dtensor":
        peer = peers.tensor_parallel(config, cpu, False, None)
    else:
        peer = peers.fully_sharded(config, cpu, kind == "kept", None)
    take(peer, weights(ours.model), mesh, kind != "dtensor")
    random = torch.Generator().manual_seed(mesh.dp.rank)
    steps = [[torch.randint(64, (1, 9), generator=random) for _ in range(2)] for _ in range(4)]
    both = [[run.step(batches) for batches in steps] for run in (ours, peer)]
    theirs = torch.stack(both[1])
    torch.distributed.all_reduce(theirs)
    return [torch.stack(both[0]).tolist(), (theirs / mesh.world.size).tolist()]


@pytest.mark.parametrize(
    "kind, tp", [("dtensor", 2), ("fsdp", 1), pytest.param("kept", 1, marks=pytest.mark.full)]
)
def test_peers_train_as_we_do(kind, tp):
    """Losses of four AdamW steps from the same weights on the same tokens, in fp32."""
    ours, theirs = run_spmd(losses_of_both, 2, kind, tp=tp, timeout=200)[0]
    assert theirs == pytest.approx(ours, rel=2e-6)
    assert max(ours) - min(ours) > 0.01  # the update has an effect


def bench(world, *argv: str) -> None:
    bench_parallel.main(["--small", *argv], world)


def test_tensor_parallel_part(tmp_path):
    out = str(tmp_path / "tp.json")
    names = ["tp", "tp fp8", "dtensor async"]
    run_spmd(bench, 2, "--part", "tp", "--out", out, *(f"--only={name}" for name in names), timeout=200)
    result = json.loads((tmp_path / "tp.json").read_text())
    assert [phase["names"] for phase in result["phases"]] == [["one gpu"], names, ["one gpu"]]
    assert not any("errors" in entry for entry in result["contenders"].values())
    turns = {name: entry["turns"] for name, entry in result["contenders"].items()}
    assert [(t["timed"], len(t["step_ms"])) for t in turns["tp"]] == [(False, 1), (True, 2)]
    assert len(turns["one gpu"]) == 4
    losses = {name: [loss for turn in turns[name][:2] for loss in turn["loss"]] for name in turns}
    assert losses["tp"] == pytest.approx(losses["one gpu"], rel=2e-3)  # bf16
    assert losses["tp fp8"] == pytest.approx(losses["tp"], rel=0.01) and losses["tp fp8"] != losses["tp"]
    row = result["summary"]["tp, 2"]
    assert row["steps"] == 2 and row["tokens_per_s_per_gpu"] == pytest.approx(32e3 / row["median_ms"])


def test_data_parallel_part(full, tmp_path):
    out = str(tmp_path / "dp.json")
    names = ["dp overlap", "fsdp", "dp", *["dp fp8", "dp fp8 gather"] * full, "dp overlap"]
    run_spmd(bench, 2, "--part", "dp", "--out", out, *(f"--only={name}" for name in names), timeout=200)
    result = json.loads((tmp_path / "dp.json").read_text())
    turns = {name: entry["turns"] for name, entry in result["contenders"].items()}
    assert [turn["microbatches"] for turn in turns["dp overlap"]] == [1, 1, 4, 4] * 2
    assert [turn["loss"] for turn in turns["dp overlap"]] == [turn["loss"] for turn in turns["dp"]] * 2
    assert result["summary"]["dp overlap, 4"]["steps"] == 4 and result["summary"]["fsdp, 4"]["steps"] == 2
    if full:
        losses = [[turn["loss"] for turn in turns[name]] for name in ("dp fp8", "dp fp8 gather")]
        assert losses[0] == losses[1] != [[] for _ in losses[0]]


def test_part_of_one_gpu(tmp_path):
    """Two sequences a microbatch: without kernels the same losses."""
    run_spmd(bench, 1, "--part", "one", "--out", str(tmp_path / "one.json"), timeout=200)
    result = json.loads((tmp_path / "one.json").read_text())
    turns = {name: entry["turns"] for name, entry in result["contenders"].items()}
    assert [t["microbatches"] for t in turns["kernels"]] == [1, 1, 4, 4] * 2
    assert [t["loss"] for t in turns["no kernels"]] == [t["loss"] for t in turns["kernels"][:4]]
    assert result["summary"]["compile, 4"]["steps"] == 2
    row = result["summary"]["kernels, 1"]
    assert row["tokens_per_s"] == pytest.approx(2 * 16e3 / row["median_ms"])


def test_part_of_fp8(tmp_path):
    """All recipes learn, each in its own way; torchao need not be installed."""
    run_spmd(bench, 1, "--part", "fp8", "--out", str(tmp_path / "fp8.json"), timeout=200)
    result = json.loads((tmp_path / "fp8.json").read_text())
    entries, rows = result["contenders"], result["summary"]
    assert [phase["names"] for phase in result["phases"]] == contenders.PAIRS["fp8"]
    ours = ["bf16", *(f"fp8 {recipe}" for recipe in RECIPES)]
    found = [[loss for turn in entries[name]["turns"][:4] for loss in turn["loss"]] for name in ours]
    *each, rowwise, blockwise = found
    assert len({tuple(losses) for losses in (*each, rowwise)}) == len(ours) - 1
    # Scales that are powers of two move a bit only of values that are next to nothing in E4M3.
    assert blockwise[:3] == rowwise[:3] and blockwise == pytest.approx(rowwise, rel=1e-4)
    for losses in found:
        assert losses == pytest.approx(found[0], rel=0.01)
    for name in ("torchao tensorwise", "torchao rowwise"):
        missing = [text for text in entries[name].get("errors", {}).values() if "torchao" in text]
        assert len(missing) == 2 or rows[f"{name}, 4"]["steps"] == 2
    medians = result["phases"][0]["4 microbatches, median ms"]
    assert medians["bf16"] == rows["bf16, 4"]["median_ms"] and list(medians) == ["bf16", "fp8 delayed"]
    assert rows["fp8 delayed, 4"]["steps"] == 6


def scales_after(world, steps: int) -> list[float]:
    known = contenders.contenders("fp8", world, torch.device("cpu"), True)
    ours = known["fp8 delayed"].builds["ours"]()
    for _ in range(steps):
        ours.step([torch.randint(96, (2, 65), generator=torch.Generator().manual_seed(1))])
    assert all(layer.cached_weight is None for layer in ours.scales.layers.values())
    return ours.scales.scale.tolist()


def test_scales_follow_the_steps():
    """Every layer's x, w and g have a scale of the step before; weights have one before the first, too."""
    (before,), (after,) = (run_spmd(scales_after, 1, steps, timeout=100) for steps in (0, 1))
    assert before[0::3] == before[2::3] == [1.0] * 2 * 4 and all(scale > 1 for scale in before[1::3])
    assert all(scale > 1 for scale in after)


class Broken:
    def step(self, batches):
        raise ZeroDivisionError("no such kernel")


def bench_with_failures(world, out: str) -> None:
    """One contender cannot be built on one rank in the first way; another fails in its first step."""
    args = bench_parallel.arguments(["--small", "--part", "dp", "--out", out])
    sitting = bench_parallel.Sitting(args, world)
    good = sitting.known["dp"].builds.pop("ours")
    sitting.known["dp"].builds.update(bad=lambda: {0: Broken()}[world.rank], ours=good)
    sitting.known["fsdp"].builds.clear()
    sitting.known["fsdp"].builds["bad"] = Broken
    sitting.run(contenders.Phase(["dp", "fsdp"], (1,), 1, 1))
    sitting.summary()


def test_what_fails_is_left_out(tmp_path):
    run_spmd(bench_with_failures, 2, str(tmp_path / "dp.json"), timeout=100)
    result = json.loads((tmp_path / "dp.json").read_text())
    assert list(result["summary"]) == ["dp, 1"]
    assert result["contenders"]["dp"]["built"] == "ours"
    assert result["contenders"]["dp"]["errors"] == {"bad": "on another rank"}
    assert "no such kernel" in result["contenders"]["fsdp"]["errors"]["bad"]


def event(name: str, start: float, duration: float, stream: int = 7) -> dict:
    return {"name": name, "ts": start, "dur": duration, "args": {"stream": stream}}


def test_kernels_are_sorted_and_hidden_communication_is_not_exposed():
    """Two steps of 1000 us; the second has 100 us of a gather under a matmul, and 200 us of 300 exposed."""
    step = [
        event("nvjet_hsh_128x256", 0, 400),
        event("ncclDevKernel_AllGather", 100, 100, 20),
        event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 400, 100),
        event("ncclDevKernel_ReduceScatter", 450, 150, 20),
        event("Memcpy DtoD (Device -> Device)", 600, 100, 21),
        event("Memcpy DtoD (Device -> Device)", 700, 50),
        event("triton_poi_fused_add_adam_like_gemm", 750, 50),
        event("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 900, 100),
    ]
    later = [{**e, "ts": e["ts"] + 1000} for e in step]
    found = kernel_times.table(step + later, 2)["ms"]
    expected = {
        "period": 1.0,
        "gemm": 0.4,
        "attention": 0.1,
        "communication": 0.35,
        "other": 0.1,
        "optimizer": 0.1,
        "communication busy": 0.35,
        "communication exposed": 0.2,
        "idle": 0.1,
    }
    assert found == pytest.approx(expected)


def test_overlapping_stretches_count_once():
    assert kernel_times.union([(5, 9), (0, 3), (2, 4), (4, 5)]) == [(0, 9)]
    assert kernel_times.length(kernel_times.union([(0, 3), (1, 2), (10, 11)])) == 4

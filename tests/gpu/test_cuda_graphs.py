"""CUDA graphs of microbatches, and of layers, on a GPU: 50 steps, equal to the bit to those without."""

import pytest
import torch

import train
from nanomegatron.fast.cuda_graphs import GraphedSteps
from nanomegatron.fast.layer_graphs import GraphedLayers
from nanomegatron.mesh import Mesh, World
from nanomegatron.report.evaluate import evaluate
from nanomegatron.report.log import RunLog
from nanomegatron.report.traffic import Traffic
from tests.gpu.ranks import needs_two
from tests.gpu.test_layouts import ALL
from tests.gpu.test_layouts import train as train_by_layout
from tests.gpu.test_on_gpu import CUDA, FLAGS, corpus  # noqa: F401
from tests.training import numbers_of

GPT = "--normalization LayerNorm --no-swiglu --position-embedding-type learned_absolute "
GPT += "--no-disable-bias-linear"
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
WAYS = {
    "gpt, dropout, ramp-up": "--bf16 --hidden-dropout 0.1 --rampup-batch-size 4 4 64 --global-batch-size 12",
    "fp16, loss scale found": "--fp16 --initial-loss-scale 4294967296",
    "fused loss, attention dropout": "--bf16 --cross-entropy-loss-fusion --attention-dropout 0.1",
    "fp8 delayed": f"{FP8} delayed --fp8-amax-history-len 4",
    "fp8 tensorwise": f"{FP8} tensorwise",
    "fp8 blockwise, recomputed": f"{FP8} blockwise {FULL}",
    "overlap, sharded": "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}

IMPLS = {"full_iteration": GraphedSteps, "local": GraphedLayers}
CASES = [(way, impl) for way in WAYS for impl in IMPLS if impl != "local" or "recomputed" not in way]


def trained(argv: list[str], folder) -> tuple[list, list[torch.Tensor], object]:
    """Losses, norms and good steps of 50 steps with an evaluation between; the parameters; the executor."""
    parsed, config = train.settings(argv, World())
    log = RunLog(folder, config)
    mesh = Mesh.build(config.parallel, World(), CUDA, observer=Traffic())
    run = train.set_up(parsed, config, mesh, log)
    run.optimizer.cast_weights()
    found = []
    for _ in range(50):
        numbers = numbers_of(train.train_step(run))
        found.append([numbers[name] for name in ("lm_loss", "grad_norm", "good")])
        run.progress.iteration += 1
        if run.progress.iteration == 20:
            evaluate(run, lambda: False)
    run.buckets.wait_params()
    for loader in filter(None, run.data.loaders):
        loader.close()
    return found, [param.detach().clone() for param in run.buckets.params], run.run_schedule.func


@pytest.mark.parametrize("way, impl", CASES)
def test_graphs_train_alike_to_the_bit(way, impl, corpus, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    argv = [*FLAGS, *corpus, "--train-iters", "60", "--deterministic-mode", *WAYS[way].split()]
    argv += GPT.split() if way.startswith("gpt") else []
    plain, weights, _ = trained([*argv, "--cuda-graph-impl", "none"], tmp_path)
    found, others, graphs = trained([*argv, "--cuda-graph-impl", impl], tmp_path)
    number = 2 if impl == "full_iteration" else 4  # in a first and a later microbatch, each of two layers
    assert type(graphs) is IMPLS[impl] and len(graphs.graphs) == number and not graphs.said
    differ = [i for i, (a, b) in enumerate(zip(plain, found)) if str(a) != str(b)]
    assert not differ, (differ[:5], plain[differ[0]], found[differ[0]])
    assert all(torch.equal(a, b) for a, b in zip(weights, others))
    assert sum(good for *_, good in found) > 30


@needs_two
def test_replicas_communicate_between_graphs_of_microbatches(tmp_path):
    """Two GPUs, four microbatches, nothing overlapped; equal to the bit."""
    flags = "--bf16 --use-distributed-optimizer --micro-batch-size 1 --train-iters 30 --deterministic-mode"
    assert_alike(tmp_path, flags, "full_iteration")


@needs_two
@pytest.mark.parametrize("precision", ["--bf16", f"{FP8} delayed", f"{FP8} tensorwise", f"{FP8} blockwise"])
def test_replicas_communicate_between_graphs_of_layers(precision, tmp_path):
    """Two GPUs, one microbatch, which gathers parameters and reduces gradients; equal to the bit."""
    flags = f"{precision} --use-distributed-optimizer {ALL} --micro-batch-size 4 --train-iters 30"
    assert_alike(tmp_path, f"{flags} --deterministic-mode", "local")


def assert_alike(folder, flags: str, impl: str) -> None:
    """30 steps on two GPUs without graphs and with them: the same losses and norms, and they are there."""
    runs = [train_by_layout(folder, one, 2, f"{flags} --cuda-graph-impl {one}") for one in ("none", impl)]
    plain, graphs = ([(step["lm_loss"], step["grad_norm"]) for step in run] for run in runs)
    assert plain == graphs and len(plain) == 30
    said = [(folder / "runs" / one / "log.txt").read_text() for one in ("none", impl)]
    assert ["launched as" in text and "from here on" in text for text in said] == [False, True]


def test_a_hook_runs_without_a_graph(corpus, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    argv = [*FLAGS, *corpus, "--train-iters", "20", "--bf16"]
    parsed, config = train.settings(argv, World())
    mesh = Mesh.build(config.parallel, World(), CUDA, observer=Traffic())
    run = train.set_up(parsed, config, mesh, RunLog(tmp_path, config))
    seen = []
    for step in range(8):
        if step == 5:
            run.model[0].layers[1].register_forward_hook(lambda *_: seen.append(1))
        train.train_step(run)
        run.progress.iteration += 1
    assert len(seen) == 3 * 2 and "layers.1 has a hook" in " ".join(run.run_schedule.func.said)

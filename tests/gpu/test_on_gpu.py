"""What only a GPU can show: matmuls that accumulate, no host sync, a fast start."""

import json
import time

import numpy as np
import pytest
import torch

import train
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.faults.exit import DONE
from nanomegatron.mesh import Axis, Mesh, World
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from nanomegatron.report.log import RunLog
from nanomegatron.report.speed import peak_memory
from nanomegatron.report.steps import Reporter
from nanomegatron.report.traffic import Traffic
from nanomegatron.tp import ColumnParallelLinear
from tests.training import numbers_of

CUDA = torch.device("cuda", 0)
FLAGS = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --num-query-groups 2 --swiglu --seq-length 128 "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --micro-batch-size 4 "
    "--global-batch-size 8 --lr 1e-3 --lr-warmup-iters 2 --eval-iters 2 --run-name test"
).split()


@pytest.fixture
def corpus(tmp_path) -> list[str]:
    random, prefix = np.random.RandomState(0), str(tmp_path / "words")
    words = [random.randint(97, 123, size=random.randint(2, 7)) for _ in range(50)]
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(40):
            builder.add_document(np.concatenate([words[random.randint(50)] for _ in range(200)]))
        builder.finalize()
    return ["--data-path", prefix, "--tokenizer-type", "ByteTokenizer", "--split", "90,10,0"]


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_accumulates_in_the_bucket(grad_dtype):
    init = Init(device=CUDA, dtype=torch.bfloat16)
    layer = ColumnParallelLinear(512, 768, Axis.single(), init, bias=False)
    mesh = Mesh.build(ParallelConfig(), World(), CUDA, observer=Traffic())
    buckets = ParamAndGradBuckets(layer, ParallelConfig(), mesh, grad_dtype)
    buckets.zero_grad_buffer(3)
    xs = [torch.randn(64, 2, 512, device=CUDA, dtype=torch.bfloat16) for _ in range(3)]
    for x in xs:
        layer(x).sum().backward()
    buckets.finish_grad_sync()
    exact = sum(x.double().flatten(0, 1).sum(0) for x in xs).expand(768, 512)
    bound = 1e-6 if grad_dtype == torch.float32 else 1e-2
    assert layer.weight.grad is None and layer.weight.main_grad.dtype == grad_dtype
    assert (layer.weight.main_grad.double() - exact).norm() < bound * exact.norm()


WAYS = {
    "selective": "--recompute-activations --recompute-modules core_attn mlp_act layernorm",
    "mlp": "--recompute-activations --recompute-modules core_attn mlp",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


def one_step(flags, tmp_path):
    """Gradients of the first step, and peak bytes above what was there before it."""
    parsed, config = train.settings(flags, World())
    mesh = Mesh.build(config.parallel, World(), CUDA, observer=Traffic())
    run = train.set_up(parsed, config, mesh, RunLog(tmp_path, config))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = numbers_of(train.train_step(run))["lm_loss"]
    return loss, [bucket.grad_shard.clone() for bucket in run.buckets.all], peak_memory(CUDA) - before


@pytest.mark.parametrize("way", WAYS)
def test_recomputed_gradients_are_the_same_to_the_bit(way, corpus, tmp_path, monkeypatch):
    """The fused kernel's own dropout included: its generator is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    flags = [*FLAGS, *corpus, "--bf16", "--train-iters", "3", "--hidden-dropout", "0.1", "--num-layers", "6"]
    flags += ["--attention-dropout", "0.1", "--deterministic-mode"]
    loss, grads, most = one_step(flags, tmp_path)
    again, found, less = one_step([*flags, *WAYS[way].split()], tmp_path)
    assert loss == again and all(torch.equal(a, b) for a, b in zip(grads, found, strict=True))
    assert less < most


def test_fused_loss_is_the_loss(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [*FLAGS, *corpus, "--bf16", "--train-iters", "3"]
    loss, grads, _ = one_step(flags, tmp_path)
    fused, found, _ = one_step([*flags, "--cross-entropy-loss-fusion"], tmp_path)
    assert fused == pytest.approx(loss, rel=1e-4)
    assert all((a - b).norm() < 0.02 * a.norm() for a, b in zip(grads, found, strict=True))


def trained_on(gradients: list, flags: list[str], folder) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of 30 steps and the last main parameters; gradients are kept in the list, or taken from it."""
    folder.mkdir()
    parsed, config = train.settings(flags, World())
    mesh = Mesh.build(config.parallel, World(), CUDA, observer=Traffic())
    run = train.set_up(parsed, config, mesh, RunLog(folder, config))
    update, losses, given = run.optimizer.step, [], len(gradients) > 0

    def step(*numbers):
        here = [bucket.grad_shard for bucket in run.buckets.all]
        if given:
            torch._foreach_copy_(here, gradients[run.progress.iteration])
        else:
            gradients.append([grads.clone() for grads in here])
        return update(*numbers)

    run.optimizer.step = step
    for _ in range(30):
        losses.append(numbers_of(train.train_step(run))["lm_loss"])
        run.progress.iteration += 1
    return losses, [shard.main.cpu() for shard in run.optimizer.shards]


def test_states_on_the_host_train_alike(corpus, tmp_path, monkeypatch):
    """AdamW of the CPU rounds otherwise than the GPU's. A run of its own would amplify that: a few bf16
    parameters round to the other side, and each step's gradients feel it (1e-3 of a loss after 11 steps, as
    much as torch's AdamW on the GPU gives). So all runs get the gradients of the first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    flags = [*FLAGS, *corpus, *"--bf16 --train-iters 30 --deterministic-mode --ddp-bucket-size 5000".split()]
    runs = {"here": "", "away": "--optimizer-cpu-offload", "ahead": AHEAD, "half": f"{AHEAD} {HALF}"}
    gradients = []
    found = {
        name: trained_on(gradients, [*flags, *more.split()], tmp_path / name) for name, more in runs.items()
    }
    losses, main = found["here"]
    for name in ("away", "ahead", "half"):
        np.testing.assert_allclose(found[name][0], losses, rtol=1e-4, err_msg=name)
        for ours, theirs in zip(found[name][1], main, strict=True):
            assert (ours - theirs).norm() <= 1e-6 * theirs.norm(), name
    assert found["away"][0] == found["ahead"][0]


AHEAD = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"
HALF = "--optimizer-offload-fraction 0.5"


def test_step_does_not_wait_for_the_gpu(corpus, tmp_path, monkeypatch):
    """CUDA reports every synchronizing call between the launch of two steps."""
    monkeypatch.chdir(tmp_path)
    argv = [*FLAGS, *corpus, *"--bf16 --train-iters 8 --hidden-dropout 0.1 --check-states-interval 2".split()]
    parsed, config = train.settings(argv, World())
    mesh = Mesh.build(config.parallel, World(), CUDA, observer=Traffic())
    run = train.set_up(parsed, config, mesh, RunLog(tmp_path, config))
    run.log.begin(0, 8)
    reporter = run.observer(Reporter)
    reporter.report_previous(train.launch_step(run, reporter))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            run.progress.iteration += 1
            reporter.report_previous(
                train.launch_step(run, reporter)
            )  # waits for the step before, by an event
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reporter.flush()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_run_learns_and_resumes_to_the_bit(precision, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [*FLAGS, *corpus, precision, "--train-iters", "60", "--deterministic-mode"]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert train.main([*argv, "--run-name", "straight"]) == DONE
    assert train.main([*argv, "--exit-interval", "40"]) == DONE
    assert train.main(argv) == DONE
    straight, broken = (
        [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("straight", "test")
    )
    assert [step["lm_loss"] for step in straight] == [step["lm_loss"] for step in broken]
    assert straight[-1]["lm_loss"] < 0.7 * straight[0]["lm_loss"]


def test_llama3_8b_initialises_in_seconds():
    if torch.cuda.get_device_properties(CUDA).total_memory < 30e9:
        pytest.skip("needs 30 GB")
    config = TransformerConfig(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        ffn_hidden_size=14336,
        swiglu=True,
        normalization="RMSNorm",
        position_embedding_type="rope",
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
    )
    begin = time.monotonic()
    model = GPTModel(
        config,
        vocab_size=128256,
        max_sequence_length=8192,
        padded_vocab_size=128256,
        init=Init(device=CUDA, dtype=torch.bfloat16),
    )
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 10
    assert sum(p.numel() for p in model.parameters()) == 8030261248

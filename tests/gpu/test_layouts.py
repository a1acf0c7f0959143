"""Layouts over NCCL and NVLink against one GPU: as tests/test_layouts.py has it for processes of a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --num-query-groups 2 --swiglu --seq-length 256 "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --hidden-dropout 0.1 "
    "--global-batch-size 8 --lr 1e-3 --lr-warmup-iters 2 --eval-iters 0 --train-iters 10 --mock-data "
    "--vocab-size 1000 --tokenizer-type NullTokenizer --untie-embeddings-and-output-weights"
)
# fp32 alone: rounding to bf16 changes which experts are chosen
EXPERTS = (
    MODEL.replace("--seq-length 256", "--seq-length 128").replace("--train-iters 10", "--train-iters 6")
    + " --num-experts 4 --moe-ffn-hidden-size 128 --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 1e-3"
    " --moe-shared-expert-intermediate-size 128 --moe-shared-expert-gate"
)
ALL = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 300000"
LAYOUTS = {
    "tp2sp": (2, "--tp 2 --sp"),
    "tp2spov": (2, "--tp 2 --sp --tp-comm-overlap"),
    "dp2z1ov": (2, f"--use-distributed-optimizer {ALL}"),
    "dp2z2av": (2, f"--data-parallel-sharding-strategy optim_grads {ALL} --ddp-average-in-collective"),
    "tp2spce": (2, "--tp 2 --sp --cross-entropy-loss-fusion"),
    "tp4spov": (4, "--tp 4 --sp --tp-comm-overlap"),
    "tp2dp2z1spov": (4, f"--tp 2 --sp --tp-comm-overlap --use-distributed-optimizer {ALL}"),
    "dp4z1ov": (4, f"--use-distributed-optimizer {ALL}"),
    "pp2": (2, "--pp 2"),
    "pp2v2": (2, "--pp 2 --vpp 2"),
    "pp2zb": (2, "--pp 2 --pipeline-schedule zb-h1"),
    "pp2zbv": (2, "--pp 2 --pipeline-schedule zb-v"),
    "pp4zbv": (4, "--pp 4 --pipeline-schedule zb-v --pipeline-split flops"),
    "tp2pp2v2spov": (4, "--tp 2 --pp 2 --vpp 2 --sp --tp-comm-overlap"),
    "pp2v2dp2z1ov": (4, f"--pp 2 --vpp 2 --use-distributed-optimizer {ALL}"),
    "cp2": (2, "--cp 2"),
    "cp2mx": (2, "--cp 2 --cp-comm-type a2a p2p allgather p2p --recompute-activations"),
    "cp4hi": (4, "--cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"),
    "tp2cp2spov": (4, "--tp 2 --cp 2 --sp --tp-comm-overlap"),
    "cp2pp2zb": (4, "--cp 2 --pp 2 --pipeline-schedule zb-h1"),
    "cp2dp2z1ov": (4, f"--cp 2 --use-distributed-optimizer {ALL}"),
}
TO_ALL = "--moe-token-dispatcher-type alltoall"
EXPERT_LAYOUTS = {
    "ep2": (2, "--ep 2"),
    "ep2all": (2, f"--ep 2 {TO_ALL}"),
    "ep2z1ov": (2, f"--ep 2 --use-distributed-optimizer {ALL}"),
    "ep2eoso": (2, f"--ep 2 {TO_ALL} --overlap-moe-expert-parallel-comm --moe-shared-expert-overlap"),
    "tp2spep2et": (2, "--tp 2 --sp --ep 2 --etp 1"),
    "ep4": (4, f"--ep 4 {TO_ALL}"),
    "ep2tp2": (4, f"--tp 2 --sp --ep 2 {TO_ALL}"),
    "ep2cp2pp2": (4, "--cp 2 --pp 2 --ep 2"),
}


def train(folder: Path, name: str, processes: int, flags: str, model: str = MODEL) -> list[dict]:
    command = [sys.executable, str(ROOT / "train.py"), "--nproc", str(processes), "--run-name", name]
    done = subprocess.run(
        [*command, *model.split(), *flags.split()], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    results = {}

    def result(precision: str, model: str = MODEL) -> list[dict]:
        if (precision, model) not in results:
            folder = tmp_path_factory.mktemp("alone")
            results[precision, model] = train(folder, "alone", 1, precision, model)
        return results[precision, model]

    return result


@pytest.mark.parametrize("precision", ["", "--bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpus_train_like_one(layout, precision, alone, tmp_path):
    """fp32 to 1e-5; bf16, where rounding is 4e-3, losses to 1e-3 and norms to 2e-2."""
    processes, flags = LAYOUTS[layout]
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    steps, expected = train(tmp_path, "run", processes, f"{precision} {flags}"), alone(precision)
    for key, fp32, bf16 in (("lm_loss", 1e-5, 1e-3), ("grad_norm", 1e-4, 2e-2)):
        ours, theirs = ([step[key] for step in run] for run in (steps, expected))
        np.testing.assert_allclose(ours, theirs, rtol=bf16 if precision else fp32, err_msg=key)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_gpus_train_experts_like_one(layout, alone, tmp_path):
    """fp32: losses to 1e-5, those of routers and norms to 1e-4."""
    processes, flags = EXPERT_LAYOUTS[layout]
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    steps, expected = train(tmp_path, "run", processes, flags, EXPERTS), alone("", EXPERTS)
    for key in ("lm_loss", "grad_norm", "aux_loss", "z_loss"):
        ours, theirs = ([step[key] for step in run] for run in (steps, expected))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5 if key == "lm_loss" else 1e-4, err_msg=key)

"""The presets for GPUs fit the memory that they name, on any of their vocabularies, and start."""

import math
import subprocess
import sys

import pytest

from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import parse
from nanomegatron.config.help import PRESETS
from nanomegatron.config.settings import Config
from nanomegatron.plan.flops import parameter_count
from nanomegatron.plan.layer import Machine
from nanomegatron.plan.memory import memory

# Preset: GB of the GPU, largest vocabulary, millions of parameters with the vocabulary of GPT-2 or Llama 3.
FITTED = {
    "gpt2-8gb": (8, 65536, 50257, 124),
    "gpt2-24gb": (24, 131072, 50257, 355),
    "llama-40gb": (40, 131072, 128256, 1236),
    "llama-80gb": (80, 131072, 128256, 3213),
    "demo-gpu": (12, 4096, 4096, 88),
}


def preset(flags: str, gpus: int = 1) -> Config:
    """The settings of a preset on `gpus` GPUs; they have no error."""
    parsed = parse(["--config", *flags.split()])
    assert [*parsed.errors, *validate(parsed.config, gpus, "cuda", (9, 0))] == []
    return resolve(parsed.config, gpus)


@pytest.mark.parametrize("name", FITTED)
def test_presets_fit_the_gpu_that_they_name(name):
    """15 % of the memory are left with the kernels, for torch itself; 10 % without."""
    size, vocab, usual, millions = FITTED[name]
    run = preset(name)
    assert run.data.vocab_size is None  # the data's
    assert round(parameter_count(run.model, usual) / 1e6) == millions
    for kernels, share in (True, 0.85), (False, 0.9):
        assert sum(memory(run, vocab, Machine(kernels=kernels)).values()) <= share * size * 2**30


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("name", FITTED)
def test_a_batch_is_the_same_on_any_of_the_usual_numbers_of_gpus(name, gpus):
    data = preset(name, gpus).data
    tokens = data.global_batch_size * data.seq_length
    assert math.log2(tokens) == (17 if name == "demo-gpu" else 19)
    preset(f"{name} --fp8-format hybrid", gpus)


def test_the_gpu_demo_trains(tmp_path):
    """Two of its steps on a CPU, of its model with fewer layers, on synthetic tokens."""
    flags = "--config demo-gpu --device cpu --mock-data --vocab-size 256 --num-layers 1 --seq-length 64"
    flags += " --global-batch-size 2 --micro-batch-size 1 --train-iters 2 --eval-iters 0 --run-name demo"
    command = [sys.executable, str(PRESETS.parents[1] / "train.py"), *flags.split()]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / "runs/demo/metrics.jsonl").read_text().count('"lm_loss"') == 2


def test_every_preset_begins_with_its_description():
    for path in PRESETS.glob("*.toml"):
        assert path.read_text(encoding="utf-8").startswith("# "), path

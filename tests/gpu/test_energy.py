"""Energy on a real GPU: its counter grows with what it does, and reading it takes no time."""

import re
import time

import torch

import train
from nanomegatron.faults.exit import DONE
from nanomegatron.mesh import Mesh
from nanomegatron.report import plots
from nanomegatron.report.energy import ENERGY_KEYS, LEAST, Meter
from nanomegatron.report.speed import machine_gpus
from nanomegatron.report.writers import read_jsonl

CUDA = torch.device("cuda", 0)
FLAGS = (
    "--num-layers 2 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --micro-batch-size 8 "
    "--global-batch-size 8 --bf16 --mock-data --vocab-size 50257 --eval-iters 0 --no-save-optim"
).split()


def watts(meter: Meter, seconds: float, work: bool) -> float:
    """Mean power over some seconds in which the GPU does matmuls, or nothing."""
    x = torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    (before,), start = meter.millijoules(), time.monotonic()
    while time.monotonic() - start < seconds:
        if work:
            x @ x
            torch.cuda.synchronize()
        else:
            time.sleep(0.01)
    (after,) = meter.millijoules()
    return (after - before) / 1e3 / (time.monotonic() - start)


def test_the_counter_of_this_gpu_grows_with_its_work():
    meter = Meter(machine_gpus(Mesh(device=CUDA)))
    idle, busy = watts(meter, 2, work=False), watts(meter, 2, work=True)
    assert 20 < idle < 0.8 * busy and busy < 1500, (idle, busy)


def test_reading_takes_no_time():
    meter = Meter(machine_gpus(Mesh(device=CUDA)))
    times = []
    for _ in range(50):
        start = time.perf_counter()
        meter.millijoules()
        times.append(time.perf_counter() - start)
    assert sorted(times)[25] < 5e-3, sorted(times)


def test_a_run_says_its_energy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plots, "plot_loss", lambda *_: None)
    assert train.main([*FLAGS, *"--train-iters 400 --log-interval 20 --run-name test".split()]) == DONE
    steps = read_jsonl(tmp_path / "runs/test/metrics.jsonl")
    found = [step for step in steps if ENERGY_KEYS[0] in step]
    assert sum(step["step_time_ms"] for step in steps[1:]) / 1e3 > LEAST and found
    for step in found:
        tokens = 8 * 1024 / (step["step_time_ms"] / 1e3)
        assert (
            100 < step[ENERGY_KEYS[1]] < 1500
            and 0.5 < step[ENERGY_KEYS[0]] * tokens / step[ENERGY_KEYS[1]] < 2
        )
    text = (tmp_path / "runs/test/log.txt").read_text()
    assert re.search(r"^energy  \S+ mJ/token, \d+ W a GPU over \d+ steps$", text, re.M), text

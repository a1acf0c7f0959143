"""The package imports and trains where a system lacks what not all have.

Hidden from every process: file locks, memory limits, torch's symmetric memory; of a single one fork, too.
Others are absent here anyway: CUDA, and extras, which no module imports at its top (house/test_style.py).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HIDE = """
import sys
for name in ("fcntl", "resource", "torch.distributed._symmetric_memory"):
    sys.modules[name] = None
"""
NO_FORK = """
import multiprocessing, multiprocessing.context, os
sys.modules["multiprocessing.forkserver"] = None
for name in ("fork", "forkserver"):
    multiprocessing.context._concrete_contexts.pop(name)
multiprocessing.set_start_method("spawn")
del os.fork
"""
FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --global-batch-size 4 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 32 --train-iters 2 --eval-iters 0 "
    "--device cpu --run-name run"
)


@pytest.mark.parametrize("nproc, more", [(1, ""), (2, "--fast-paths --use-distributed-optimizer")])
def test_it_trains(nproc, more, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE + NO_FORK * (nproc == 1))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, ROOT / "train.py", *FLAGS.split(), *more.split(), "--nproc", str(nproc)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nanomegatron generate" not in done.stdout  # random tokens are no text
    steps = (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(step)["iteration"] for step in steps] == [1, 2]

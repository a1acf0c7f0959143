"""Runs with --gemm-autotune: losses as with torch, what is timed, what the log says, what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from nanomegatron.build import paths_for
from nanomegatron.mesh import World
from nanomegatron.ops import fp8_matmul as ops_fp8_matmul
from nanomegatron.ops import tuner as ops_tuner
from nanomegatron.ops.tuner import Tuner
from tests import fake_cublaslt
from tests.spmd import run_spmd
from tests.test_config_check import GOOD, errors_of
from tests.training import arguments, set_up, sources  # noqa: F401 (sources: a fixture)

SECOND = [2.0, 1.0, 2.0, 2.0]  # milliseconds: the second algorithm is the fastest


def trained(world: World, argv: list[str], folder: str, tuned: bool) -> dict:
    """Three steps on the CPU. tuned: by a library that multiplies here, of which the times are invented."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops_tuner, "ADDRESS_BYTES", 16)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        if not tuned:
            return steps(set_up(world, argv, folder))
        chosen = Tuner(Path(folder) / "gemm.json", "this CPU", world.rank == 0, lambda run, count: SECOND)
        patch.setattr(train, "paths_for", lambda *given: replace(paths_for(*given), tuner=chosen))
        with fake_cublaslt.installed(patch, ops_tuner, ops_fp8_matmul):
            found = steps(set_up(world, argv, folder))
        return found | {"problems": [str(problem) for problem in chosen.problems]}


def steps(run) -> dict:
    """Losses and gradient norms; reports come a step late, as in training."""
    numbers, tables = [], []
    for _ in range(3):
        numbers.append(train.train_step(run).read()[1])
        run.iteration += 1
        tables.append(run.tuner.table(100.0) if run.tuner else [])
    return {"numbers": [(n["lm_loss"], n["grad_norm"]) for n in numbers], "tables": tables}


@fake_cublaslt.emulated
@pytest.mark.parametrize(
    "flags, ranks",
    [
        pytest.param("--tp 2 --sequence-parallel", 2, marks=pytest.mark.full),
        (
            "--cross-entropy-loss-fusion --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            1,
        ),
        pytest.param("--fp8-format hybrid --fp8-recipe tensorwise", 1, marks=pytest.mark.full),
    ],
)
def test_a_run_trains_as_with_torch(flags, ranks, sources, tmp_path):  # noqa: F811
    """All matmuls of the model's linear layers and of its head are timed, once, and counted in one step."""
    argv = arguments(sources, "llama", "--bf16 --train-iters 3", flags)
    plain, *_ = run_spmd(trained, ranks, argv, str(tmp_path), False, timeout=100)
    found, *others = run_spmd(trained, ranks, argv, str(tmp_path), True, timeout=100)
    np.testing.assert_allclose(found["numbers"], plain["numbers"], rtol=5e-3)
    assert all(other["problems"] == found["problems"] for other in others)
    problems = found["problems"]
    sums, written = ([p for p in problems if p.endswith(f" {sign} float32")] for sign in ("+=", "="))
    assert len(problems) == 10 + len(sums) + len(written), problems
    assert len(sums) == len(written) == 5
    # In FP8 all but the three of the head.
    assert sum("float8" in problem for problem in problems) == (16 if "fp8" in flags else 0)
    first, lines, last = found["tables"]
    assert first == last == [] and len(lines) == len(problems) + 1
    layers, microbatches = 4, int(argv[argv.index("--global-batch-size") + 1])
    calls = {problem: int(line.split()[-2]) for problem, line in zip(problems, lines)}
    # The first microbatch of a step overwrites the gradient of each weight, the others add to it.
    assert sum(calls[p] for p in written) == 4 * layers + 1
    assert sum(calls[p] for p in sums) == (4 * layers + 1) * (microbatches - 1)
    assert all(": 2.0000 -> 1.0000 ms, algorithm 2 of 4, " in line for line in lines[:-1])
    total = sum(calls.values())
    gain = f"a gain of {total:.2f} % of 100.0 ms"
    assert lines[-1] == f"all: {2 * total:.2f} -> {total:.2f} ms a step, {gain}"
    assert ops_tuner.read_times(tmp_path / "gemm.json")[0]["this CPU"].keys() == set(problems)


@pytest.mark.parametrize(
    "flags, why",
    [
        ("--deterministic-mode", "not with --deterministic-mode, whose bits depend on no measurement"),
        ("--variable-seq-lengths", "not with --variable-seq-lengths, where every size would be timed"),
        ("--no-fast-paths", "not with --no-fast-paths, being a fast path"),
    ],
)
def test_what_it_does_not_go_with(flags, why):
    assert f"--gemm-autotune: {why}; leave one out" in errors_of(f"{GOOD} --gemm-autotune {flags}")


def test_pieces_of_matmuls_are_not_timed():
    flags = "--gemm-autotune --tp-comm-overlap --sequence-parallel --tp 2"
    (error,) = errors_of(f"{GOOD} {flags}", 2)
    assert error == "--gemm-autotune: not with --tp-comm-overlap, whose matmuls are in pieces; leave one out"


def test_a_file_needs_the_flag():
    (error,) = errors_of(f"{GOOD} --gemm-autotune-file here.json")
    assert error == "--gemm-autotune-file here.json: needs --gemm-autotune"


def described(world: World, argv: list[str], folder: str) -> tuple[str, bool]:
    """The line of the banner about paths, and whether there is a tuner."""
    run = set_up(world, argv, folder)
    lines = (Path(folder) / "log.txt").read_text().splitlines()
    return [line for line in lines if line.startswith("paths ")], run.tuner is None


def test_without_a_gpu_the_log_says_so(sources, tmp_path):  # noqa: F811
    argv = arguments(sources, "llama", "--bf16 --gemm-autotune")
    (found,) = run_spmd(described, 1, argv, str(tmp_path))
    assert found == (["paths   torch's matmuls: there are none for cpu"], True)

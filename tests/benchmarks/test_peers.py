"""Peers of the training benchmarks compute what train.py does: from the same weights on the same tokens."""

import os
from pathlib import Path

import pytest

import train
from benchmarks import peer_program, peers, peers_gpt2, peers_moe, peers_pipeline
from benchmarks.cases import EXPERTS, GPT2, PEERS, STAGES, Case, cases_of
from nanomegatron.mesh import World
from nanomegatron.report import plots
from nanomegatron.report.writers import read_jsonl
from tests.spmd import run_spmd

KINDS = {PEERS: peers.KINDS, GPT2: peers_gpt2.KINDS, STAGES: peers_pipeline.KINDS, EXPERTS: peers_moe.KINDS}
UPDATES = "--lr 1e-2 --weight-decay 0.1 --clip-grad 0.5 --train-iters 4 --no-save-optim"
FP32 = f"{UPDATES} --no-bf16"


def without_compilation() -> None:
    """In this process: to compile takes a quarter of a minute, and changes no result in fp32."""
    peers.compiled = peers_pipeline.compiled = lambda what, *_, **__: what


def trained(world: World, case: Case, flags: str, folder: str) -> list[dict]:
    """The steps of a case on this rank, with flags of its own."""
    os.chdir(folder)
    name = case.name.replace(" ", "-").replace(",", "")
    argv = f"{case.flags} {flags} --run-name {name} --metrics-jsonl {name}.jsonl".split()
    without_compilation()
    plots.plot_loss = lambda *_: None
    script, *kind = case.program.split()
    if kind:
        assert peer_program.run_rank(world, KINDS[script][kind[0]], argv) == 0
    else:
        assert train.run_rank(world, argv) == 0
    return read_jsonl(f"{name}.jsonl") if world.rank == 0 else []


def losses(part: str, name: str, folder: Path, flags: str = FP32) -> tuple[list[float], list[float]]:
    """Of a case, and of the one that it must be like."""
    known = {case.name: case for case in cases_of(part, 2, True)}
    case, found = known[name], []
    for one in (case, known[case.like]):
        steps = run_spmd(trained, one.gpus, one, flags, str(folder), timeout=200)[0]
        assert [step["iteration"] for step in steps] == [1, 2, 3, 4]
        assert all(
            step["tokens_per_s"] * step["step_time_ms"] > 0 and step["peak_mem_gib"] > 0 for step in steps
        )
        found.append([step["lm_loss"] for step in steps])
    return found[0], found[1]


FEW = [("one", "compile, 4"), ("tp", "dtensor"), ("dp", "fsdp, 4"), ("pp", "torch zb-v, 8")]
MORE = [
    ("gpt2", "compile, 8"),
    ("gpt2", "reduce-overhead, 8"),
    ("dp", "fsdp kept, 4"),
    ("pp", "torch 1f1b, 8"),
]
MORE += [("pp", f"torch interleaved {kind}, 8") for kind in ("4", "4, eager", "zero bubble 4")]


@pytest.mark.parametrize("part, name", [*FEW, *(pytest.param(*m, marks=pytest.mark.full) for m in MORE)])
def test_peers_train_as_we_do(part, name, tmp_path):
    """Losses of four AdamW steps, in fp32."""
    theirs, ours = losses(part, name, tmp_path)
    assert theirs == pytest.approx(ours, rel=2e-6)
    assert max(ours) - min(ours) > 0.01  # the update has an effect


@pytest.mark.full
def test_transformers_learn(tmp_path):
    """Their own weights, our tokens: losses that come down as ours do."""
    pytest.importorskip("transformers")
    case = next(case for case in cases_of("ep", 2, True) if case.name == "qwen transformers")
    steps = run_spmd(trained, 2, case, f"{UPDATES} --lr 1e-3", str(tmp_path), timeout=200)[0]
    first, *_, last = (step["lm_loss"] for step in steps)
    assert 4 < last < first < 5


def test_unknown_kinds_are_named(capsys):
    assert peer_program.main(peers.KINDS, ["fsdp3"]) == 2
    assert "compile, torchao-tensorwise" in capsys.readouterr().err


def test_errors_in_flags_are_told(capsys):
    assert peer_program.main(peers.KINDS, ["fsdp", "--seq-lenght", "8"]) == 2
    assert "--seq-lenght" in capsys.readouterr().err

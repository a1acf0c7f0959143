"""--check-replicas: a flipped bit on one rank is found within K steps, and the rank is named."""

import json
import os
import re
from pathlib import Path

import pytest
import torch

import train
from nanomegatron.faults.exit import DONE
from nanomegatron.faults.launch import launch
from nanomegatron.faults.replicas import differing, fingerprint
from nanomegatron.faults.signals import PREEMPTED
from nanomegatron.launch import ending
from nanomegatron.mesh import World
from nanomegatron.report import plots
from tests.test_train import arguments, corpus  # noqa: F401 (a fixture)


def flips_a_bit(world: World, argv: list[str], folder: str, rank: int, name: str) -> int:
    """A rank of a run in which one bit of a weight flips after step 3, on one rank; -1: on none."""
    os.chdir(folder)
    usual = train.train_step

    def train_step(run, *limits):
        report = usual(run, *limits)
        if run.progress.iteration == 2 and world.rank == rank:
            part, param = next(
                (s, p) for p in run.buckets.params for s in p.spec.parts if s.name.endswith(name)
            )
            run.buckets.wait_params()
            part.local_view(param.data).view(torch.int32).flatten()[-1:].bitwise_xor_(
                1 << 12
            )  # not lost in rounding
        return report

    train.train_step = train_step
    plots.plot_loss = ending.show_sample = lambda *_: None
    return train.run_rank(world, argv)


def outcome(folder: Path, argv: list[str], ranks: int, rank: int, name: str) -> tuple[list[int], dict]:
    argv = [*argv, *"--train-iters 8 --lr-warmup-iters 0 --eval-iters 0 --save-interval 2".split()]
    codes = launch(flips_a_bit, ranks, (argv, str(folder), rank, name), timeout=60, threads=1)
    return codes, json.loads((folder / "runs/test/status.json").read_text())


CASES = [  # layout, rank, parameter, ranks that are named
    ("", 2, "linear_proj.weight", "2"),
    ("--tp 2", 3, "final_layernorm.weight", "3"),  # the only one that is suspected over tp and over dp
    ("--tp 2", 2, "linear_fc2.weight", "0 2"),  # there are two replicas
]
MORE = [
    ("--use-distributed-optimizer --check-replicas 1", 1, "word_embeddings.weight", "1"),
    ("--tp 2 --sequence-parallel", 0, "final_layernorm.weight", "0"),
    ("--tp 4", 2, "linear_qkv.k.weight", "2 3"),  # two key/value heads, each on two ranks
    ("--pp 2", 2, "word_embeddings.weight", "2"),  # tied: on both stages, and both replicas
    ("--cp 2", 3, "linear_proj.weight", "3"),
    ("--num-experts 4 --ep 2", 1, "router.weight", "1"),
    ("--num-experts 4 --ep 2", 1, "linear_fc2.weight_t", "1 3"),
    ("", 0, "word_embeddings.weight", "0"),
    ("", 3, "linear_qkv.k.weight", "3"),
    ("--tp 2", 0, "final_layernorm.weight", "0"),
    ("--tp 2 --sequence-parallel", 1, "linear_proj.weight", "1 3"),
    ("--cp 2 --check-replicas 1", 0, "final_layernorm.weight", "0"),
    ("--pp 2 --use-distributed-optimizer --check-replicas 1", 1, "linear_fc2.weight", "0 1"),
]


@pytest.mark.parametrize(
    "layout, rank, name, named", CASES + [pytest.param(*each, marks=pytest.mark.full) for each in MORE]
)
def test_a_flipped_bit_is_named_within_k_steps(layout, rank, name, named, corpus, tmp_path):  # noqa: F811
    """It flips in step 3; the next step that is compared is not saved."""
    argv = arguments(corpus, "--check-weight-hash-across-dp-replicas-interval 2", layout)
    codes, status = outcome(tmp_path, argv, 4, rank, name)
    assert len(set(codes)) == 1 and codes[0] not in (DONE, PREEMPTED)
    message = status["message"]
    assert (
        status["state"] == "failed"
        and f"replicas differ after step {3 if '--check' in layout else 4}: " in message
    )
    found = re.findall(
        r"rank (\d) tp\d pp\d cp\d dp\d on (\S+) holds other bits than ranks? [\d ]+ in ", message
    )
    assert found == [(each, os.uname().nodename) for each in named.split()]
    assert name in message
    assert [path.name for path in (tmp_path / "runs/test/ckpt").glob("iter_*")] == ["iter_0000002"]


@pytest.mark.parametrize("layout", ["--tp 2 --pp 2 --use-distributed-optimizer"])
def test_equal_replicas_are_equal(layout, corpus, tmp_path):  # noqa: F811
    codes, status = outcome(tmp_path, arguments(corpus, layout, "--check-replicas 1"), 4, -1, "")
    assert codes == [DONE] * 4 and status["iteration"] == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(3, 5), (9000,), (2, 4096), (1,)])
def test_fingerprint(dtype, shape):
    """Each bit matters, and so does the place of a value."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]).flatten()
    before = fingerprint(x).tolist()
    for place in {0, len(bits) // 2, len(bits) - 1}:
        for bit in range(8 * x.element_size() - 1):
            bits[place : place + 1].bitwise_xor_(1 << bit)
            assert fingerprint(x).tolist() != before
            bits[place : place + 1].bitwise_xor_(1 << bit)
    assert fingerprint(x).tolist() == before
    if len(bits) > 1 and bits[0] != bits[-1]:
        bits[[0, -1]] = bits[[-1, 0]]
        now = fingerprint(x).tolist()
        assert now[0] == before[0] and now[1] != before[1]


def test_fingerprint_of_nothing_and_of_columns():
    assert fingerprint(torch.empty(0, 7)).tolist() == [0, 0]
    x = torch.randn(6, 10)
    assert torch.equal(fingerprint(x[:, 2:5]), fingerprint(x[:, 2:5].clone()))


def test_majority():
    assert differing([(1, 2), (1, 2), (1, 3)]) == [2] and differing([(1, 2), (1, 3)]) == [0, 1]
    assert differing([(1, 1)] * 4) == [] and differing([(1, 1), (1, 1), (2, 2), (2, 2)]) == [0, 1, 2, 3]

"""--auto-layout, and what an error for lack of memory says."""

import json
import re

import pytest
import torch

import train
from nanomegatron.config.check import resolve
from nanomegatron.config.cli import ConfigError, parse
from nanomegatron.launch import rank
from nanomegatron.plan.auto import with_best_layout
from nanomegatron.plan.cluster import load_cluster
from nanomegatron.plan.layer import Machine
from nanomegatron.plan.search import Search

ROOM = 72 * 2**30
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 96 --mock-data "
TINY += "--tokenizer-type NullTokenizer --train-iters 2 --eval-iters 0 --device cpu --run-name auto --lr 1e-3"


def test_it_is_the_best_of_the_search():
    parsed = parse("--config llama3-70b --global-batch-size 256 --auto-layout".split())
    chosen = with_best_layout(parsed, 128256, 64, "NVIDIA H100 80GB HBM3", Machine(), ROOM)
    search = Search(parsed, 128256, 64, load_cluster("h100"))
    best = search.valid(search.run()[0], 1)[0]
    assert resolve(chosen.config, 64).parallel == best.run.config.parallel
    assert f"--auto-layout chose {best.word}: " in chosen.notes[-1] and "next " in chosen.notes[-1]


def test_flags_win():
    parsed = parse(
        "--config llama3-8b --tp 4 --micro-batch-size 2 --global-batch-size 64 --auto-layout".split()
    )
    config = with_best_layout(parsed, 128256, 8, "h100", Machine(), ROOM).config
    assert config.parallel.tensor_model_parallel_size == 4 and config.data.micro_batch_size == 2


def test_nothing_fits():
    parsed = parse("--config llama3-8b --global-batch-size 8 --auto-layout".split())
    with pytest.raises(ConfigError, match="no layout of 1 ranks fits: one GPU does not fit: "):
        with_best_layout(parsed, 128256, 1, "h100", Machine(), ROOM / 2)


def test_a_run_on_cpus_chooses_and_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(f"{TINY} --auto-layout --nproc 2".split()) == 0
    log = (tmp_path / "runs/auto/log.txt").read_text()
    assert "--auto-layout chose dp2: --global-batch-size" in log and "tp1 pp1 dp2" in log


def test_an_error_for_lack_of_memory_names_what_takes_less(tmp_path, monkeypatch, capfd):
    def too_large(run):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "train", too_large)
    monkeypatch.setattr(rank.os, "_exit", lambda code: None)
    assert train.main(TINY.split()) == 1
    message = json.loads((tmp_path / "runs/auto/status.json").read_text())["message"]
    assert "CUDA out of memory" in message and re.search(r"cheapest first:\n.*\n.*   --", message)
    out, err = capfd.readouterr()
    assert "the cheapest first:" in out + err

"""`nanomegatron debug` and --debug-nan: planted bugs are named, clean layouts have no difference."""

import json
import os
import re
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

import train
from nanomegatron import dp, layers, optim, tp
from nanomegatron.commands.debug import main
from nanomegatron.config.cli import parse
from nanomegatron.data.loader import BatchLoader
from nanomegatron.debug import run as debug_run
from nanomegatron.debug.compare import Difference
from nanomegatron.debug.layouts import flags_of
from nanomegatron.debug.record import module_names
from nanomegatron.debug.run import SEEDS, first_difference, record_rank
from nanomegatron.faults.health import BadSteps
from nanomegatron.faults.launch import launch
from nanomegatron.mesh import World
from tests.house.test_style import ROOT
from tests.layouts import TWO_STEPS
from tests.spmd import run_spmd, start_fork_server
from tests.training import arguments, set_up
from tools.debug_bugs import RESULTS, entries, table

BUGS = ROOT / "tests/debug_bugs.toml"
SMALL = "--num-layers 2 --seq-length 16"  # the smallest with two stages and two documents


def no_sum(world: World, *args) -> int:
    """A rank whose row-parallel layers leave out the sum over tp."""
    tp.all_reduce_ = lambda x, axis: x
    return record_rank(world, *args)


def no_gradient_sum(world: World, *args) -> int:
    """A rank whose gradients are not summed over replicas."""
    dp.start_all_reduce_ = lambda x, *_: dp.Pending(x)
    return record_rank(world, *args)


def wrong_norm_backward(world: World, *args) -> int:
    """A rank of the second stage whose norms' input gradients have the wrong sign."""

    class Flip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -grad

    usual = layers.Norm.forward
    if world.rank == 1:
        layers.Norm.forward = lambda norm, x: usual(norm, Flip.apply(x))
    return record_rank(world, *args)


def wrong_rank(world: World, *args) -> int:
    """A rank of dp that reads the samples of its neighbour."""
    if world.rank == 1:
        usual = BatchLoader.batches
        BatchLoader.batches = lambda loader, first, size: usual(loader, first + 1, size)
    return record_rank(world, *args)


def decay_by_shard(world: World, *args) -> int:
    """Ranks, of which the second decays its weights a hundred times as much."""
    usual = optim.adamw_

    def update(main, grad, moments, step, lr, numbers, *more):
        numbers = (*numbers[:-1], numbers[-1] * (1 + 99 * world.rank))
        return usual(main, grad, moments, step, lr, numbers, *more)

    optim.adamw_ = update
    return record_rank(world, *args)


@pytest.fixture(scope="module")
def found(sources, tmp_path_factory):
    """(layout, model, worker, flags) -> the difference from one process, whose record is kept."""
    kept = {}
    start_fork_server()

    def compare(layout: str, model: str, worker=record_rank, *more: str) -> Difference | None:
        whole = arguments(sources, model, TWO_STEPS, SMALL, *more)
        size, flags = flags_of(layout)
        argv = arguments(sources, model, TWO_STEPS, SMALL, flags, *more)
        if (model, *more) not in kept:
            kept[model, *more] = folder = tmp_path_factory.mktemp("reference")
            assert launch(record_rank, 1, (whole, folder, SEEDS), threads=1, timeout=120) == [0]
        folder = tmp_path_factory.mktemp("run")
        os.symlink(kept[model, *more], folder / "a")
        launch(worker, size, (argv, folder / "b"), threads=1, timeout=120)
        return first_difference(folder, parse(whole).config)

    return compare


@pytest.mark.parametrize(
    "layout, model, worker, module, kind",
    [
        ("tp2", "llama", no_sum, "decoder.layers.0.self_attention.linear_proj", "output"),
        ("dp2", "llama", no_gradient_sum, "dp", "reduced gradient"),
        ("pp2", "gpt", wrong_norm_backward, "decoder.final_layernorm", "input gradient"),
        ("dp2", "gpt", wrong_rank, "batch", ""),
        ("dp2z1", "llama", decay_by_shard, "optimizer", "updated weight"),
    ],
)
def test_a_planted_bug_is_named(found, layout, model, worker, module, kind):
    difference = found(layout, model, worker)
    assert difference is not None and difference.module == module
    assert kind in difference.key[1], difference.describe()
    assert difference.error > 1e3 * difference.noise


CLEAN = [("tp2pp2sp", "gpt", ""), ("dp2ep2", "moe", "--bf16 --moe-layer-freq 1"), ("cp2", "documents", "")]


MORE_CLEAN = [
    ("tp4", "llama"),
    ("tp2spovfp", "llama"),
    ("tp2sprs", "olmo"),
    ("tp4spcefp", "gpt"),
    ("tp2dp2z2spovcercfp", "qwen"),
    ("dp2z1ovbkfp", "gpt"),
    ("dp4z2ovbkfp", "llama"),
    ("pp2zbvfp", "llama"),
    ("pp4zb", "gpt"),
    ("pp2v2cp2cers", "llama"),
    ("pp2uneven", "llama"),
    ("cp4fp", "qwen"),
    ("cp4hi", "documents"),
    ("cp2agfp", "window"),
    ("tp2cp2a2asprs", "softcap"),
    ("tp2cp2pp2zbvspfp", "llama"),
    ("dp2ep2eofp", "deep"),
    ("tp2spep2etfp", "deep"),
    ("dp4ep4rmfp", "moe"),
    ("pp2v2dp2ep2ovbkav", "moe"),
    ("cp2ep2", "moe-documents"),
    ("cp2", "sinkhorn"),
]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["", "--bf16"])
@pytest.mark.parametrize("layout, model", MORE_CLEAN)
def test_nothing_is_named_in_clean_code_of_any_layout(found, layout, model, precision):
    difference = found(layout, model, record_rank, precision, "--num-layers 4 --seq-length 32")
    assert difference is None, difference.describe()


@pytest.mark.parametrize("layout, model, more", CLEAN)
def test_nothing_is_named_in_clean_code(found, layout, model, more):
    difference = found(layout, model, record_rank, more)
    assert difference is None, difference.describe()


def no_sum_but_lines(world: World, argv: list[str], folder: Path, *more) -> int:
    """The same; what it prints is in the file of --save."""
    with open(argv[argv.index("--save") + 1], "a") as f, redirect_stderr(f):
        return no_sum(world, argv, folder, *more)


def test_the_command_writes_what_it_finds(sources, tmp_path, capsys, monkeypatch):
    """Run in this process, with ranks that lack a sum; and the same as text, and a line for each run."""
    monkeypatch.setattr(debug_run, "record_rank", no_sum_but_lines)
    flags = arguments(sources, "llama", TWO_STEPS, SMALL, "--save", str(tmp_path / "lines"))
    assert main(["--b", "tp2", "--steps", "1", "--json", str(tmp_path / "found"), *flags]) == 1
    assert "first difference: decoder.layers.0.self_attention.linear_proj" in capsys.readouterr().out
    facts = json.loads((tmp_path / "found").read_text())
    assert facts["ranks"] == [0, 1] and facts["kind"] == "output" and facts["step"] == 1
    lines = ["layout a: run 1 of 3", "layout a: run 2 of 3", "layout a: run 3 of 3", "layout b: run 1 of 1"]
    assert (tmp_path / "lines").read_text().splitlines() == lines


@pytest.mark.parametrize(
    "argv, said",
    [
        ("--b tp2xy", "'xy' is no word"),
        ("--b tp2s", "not made of words"),
        ("--b tp3 --config tiny-cpu", "--num-attention-heads 4"),
        ("--steps 0", "at least 1"),
        ("--config tiny-cpu --bf16 --fp8-format hybrid", "give --no-fast-paths"),
        ("--config tiny-cpu --variable-seq-lengths", "packs differ by layout"),
        ("--reference jax x", "--reference jax: takes `hf FOLDER`"),
        ("--reference hf /nonexist --config tiny-cpu", "--reference hf /nonexist: has no config.json"),
        ("--b tp2 --config tiny-cpu --json /nonexist/found.json", "--json /nonexist/found.json: cannot be"),
        (
            "--b tp2 --config tiny-cpu --tp 4",
            "--tensor-model-parallel-size: give it in the words of --a",
        ),
        ("--b dp2 --config tiny-cpu --nproc 4", "--nproc: give it in the words"),
        ("--config tiny-cpu --b=", "layout '' is not made of words"),
        ("--config tiny-cpu --b sp", "sp cuts sequences over tp"),
        ("--config tiny-cpu --b dp1", "--b dp1 is the same as --a tp1"),
        ("", "--b tp1 is the same as --a tp1: give another layout, such as --b tp2"),
    ],
)
def test_wrong_flags_are_errors(argv, said, capsys, monkeypatch):
    """Before anything is run."""
    monkeypatch.setattr(debug_run, "launch", None)
    assert main(argv.split()) == 2 and said in capsys.readouterr().err


def test_the_document_has_the_kept_results():
    """At least 28 of 30 in the right module, and each of the chosen ones among them."""
    kept = json.loads(RESULTS.read_text())
    assert table(kept["bugs"]) in (ROOT / "docs/debugging.md").read_text(), "tools/debug_bugs.py --table"
    assert kept["located"] == sum(bug["located"] for bug in kept["bugs"]) >= 28 / 30 * len(kept["bugs"])
    assert {entry["name"] for entry, _ in entries([BUGS])} <= {bug["name"] for bug in kept["bugs"]}


def test_the_planted_bugs_fit_the_code():
    found = entries([BUGS, BUGS.with_stem("debug_bugs_unseen")])
    assert len(found) == 30 and {"module", "layout", "model"} <= set(found[0][0])


# --debug-nan.


def train_with_nan(world: World, argv: list[str], folder: str, where: str) -> int:
    """A training in which rank 1 makes a number that is not finite: in or between modules, or a gradient."""
    run = set_up(world, [*argv, "--debug-nan"], folder)
    norm = module_at(run, "decoder.layers.1.pre_mlp_layernorm")
    after, add_product = module_at(run, "decoder.layers.1.mlp.linear_fc2"), tp.add_product
    if where == "forward" and world.rank == 1:
        norm.weight.data[3] = float("inf")
    if where == "backward" and world.rank == 1:
        usual = norm.forward
        norm.forward = lambda x: usual(NanGrad.apply(x))
    if where == "before linear_fc2" and world.rank == 1:
        after.register_forward_pre_hook(lambda _, args: (args[0] * float("nan"),))
    if where == "behind linear_fc1" and world.rank == 1:
        after.register_forward_pre_hook(lambda _, args: (NanGrad.apply(args[0]),))
    if where == "weight" and world.rank == 1:
        tp.add_product = lambda out, dy, *more: add_product(
            out, dy * float("nan") if out is after.weight.main_grad else dy, *more
        )
    try:
        train.train(run)
    except BadSteps as error:
        Path(folder, f"said{world.rank}").write_text(str(error))
        os._exit(16)
    return 0


def module_at(run, name: str) -> torch.nn.Module:
    return next(m for chunk in run.model for m, n in module_names(chunk).items() if n == name)


class NanGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * float("nan")


@pytest.mark.parametrize(
    "where, axis, said",
    [
        ("forward", "dp", "the output of decoder.layers.1.pre_mlp_layernorm is"),
        ("backward", "dp", "the gradient that decoder.layers.1.pre_mlp_layernorm returns for input is"),
        ("before linear_fc2", "tp", "the input of decoder.layers.1.mlp.linear_fc2 is"),
        ("behind linear_fc1", "tp", "the gradient of the output of decoder.layers.1.mlp.linear_fc1 is"),
        ("weight", "dp", "the gradient of decoder.layers.1.mlp.linear_fc2.weight is"),
        ("weight", "tp", "the gradient of decoder.layers.1.mlp.linear_fc2.weight is"),
    ],
)
def test_the_first_module_that_is_not_finite_is_named(sources, tmp_path, where, axis, said):
    """On the rank that has it, before a sum over ranks brings it to others."""
    again = "--rerun-mode validate_results" * (where == "weight")  # which looks at the same gradients
    argv = arguments(sources, "llama", TWO_STEPS, SMALL, f"--{axis} 2", again)
    start_fork_server()
    assert launch(train_with_nan, 2, (argv, str(tmp_path), where), threads=1, timeout=60)[1] == 16
    text = (tmp_path / "said1").read_text()
    assert f"--debug-nan: {said} not finite on rank 1 " in text and not (tmp_path / "said0").exists()
    assert where == "weight" or re.search(r"input 0: (no finite|min -\d.*max \d.*absmax)", text), text
    assert ("1 infinite of 32" in text) == (where == "forward"), text


def test_no_hooks_without_the_flag(sources, tmp_path):
    run = run_spmd(count_hooks, 1, arguments(sources, "llama", TWO_STEPS, SMALL), str(tmp_path))
    assert run == [0]


def count_hooks(world: World, argv: list[str], folder: str) -> int:
    run = set_up(world, argv, folder)
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in run.model.modules())

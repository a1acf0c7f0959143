"""Command lines of Megatron-LM's users: each starts, or is refused with a reason (megatron_scripts.toml).

Each script's flags are checked as they are, for the processes that it asks for. At a reduced size, with
invented data in place of the script's paths, those that start train two steps; in the fast tier some of them.
"""

import math
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import train
from nanomegatron.config.check import validate
from nanomegatron.config.cli import parse
from nanomegatron.faults.exit import BAD_CONFIG
from nanomegatron.mesh import Mesh, World
from tests import training
from tests.spmd import run_spmd

TABLES = tomllib.loads((Path(__file__).parents[1] / "megatron_scripts.toml").read_text(encoding="utf-8"))
SCRIPTS = TABLES["scripts"]
STARTING = [name for name, script in SCRIPTS.items() if "refused" not in script]
REFUSED = [name for name in SCRIPTS if name not in STARTING]
FAST = (  # of STARTING, trained in the fast tier too: fp16, recomputation, FP8, a ramp, experts, 1p norms
    "examples/gpt3/train_gpt3_175b_distributed.sh",
    "examples/gpt3/train_gpt3_857m_distributed.sh",
    "examples/pretrain_gpt.sh",
    "examples/llama/train_llama3_8b_h100_fp8.sh",
    "examples/mixtral/train_mixtral_8x7b_distributed.sh",
    "tests/functional_tests/test_cases/moe/gpt3_mcore_tp2_cp2_pp2_ep2_te_4experts2parallel/model_config.yaml",
    "yanring/Megatron-MoE-ModelZoo: model_configs/benchmarking/Qwen3-30B-A3B.yaml",
)
# What only the machine of the script has: its files, and packages that are extras.
THERE = r": no such (file|folder)|: no file |: needs the package |holds no checkpoint"
# Left out at a reduced size: paths, layout, lengths, records, what needs a GPU or more layers.
REPLACED = """data-path data-impl vocab-file merge-file tokenizer-type tokenizer-model tokenizer-library
tiktoken-pattern vocab-size mock-data split data-cache-path save load finetune no-load-optim save-interval
save-retain-interval tensorboard-dir wandb-project wandb-entity wandb-exp-name wandb-save-dir num-workers
train-iters train-samples lr-decay-iters lr-decay-samples lr-warmup-iters lr-warmup-samples eval-iters
rampup-batch-size exit-interval profile profile-step-start profile-step-end distributed-backend
attention-backend tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size
expert-model-parallel-size expert-tensor-parallel-size num-layers-per-virtual-pipeline-stage
account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split moe-layer-freq""".split()
REDUCED = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --kv-channels 16
--seq-length 32 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 2
--eval-iters 0 --mock-data --vocab-size 100 --split 99,1,0 --num-workers 0 --nproc 1 --device cpu
--run-name script"""
IF_GIVEN = {  # added only to the flags of scripts that have the first
    "num-query-groups": "--num-query-groups 2",
    "num-experts": "--num-experts 4 --moe-ffn-hidden-size 32",
    "rampup-batch-size": "--rampup-batch-size 2 2 2",
}


def groups(name: str) -> list[list[str]]:
    """The flags of a script, each with its values, those of the table that it builds on first."""
    table = TABLES.get(name) or SCRIPTS[name.removeprefix("scripts.")]
    own = re.split(r" (?=--)", " " + table["flags"].replace("\n", " ").strip())
    return [*(groups(table["with"]) if "with" in table else []), *(shlex.split(g) for g in own if g.strip())]


def words(name: str) -> list[str]:
    return [word for group in groups(name) for word in group]


def errors_of(name: str) -> list[str]:
    """What is wrong with a script at its full size, on the GPUs that it asks for."""
    parsed = parse(words(name))
    errors = [*parsed.errors, *validate(parsed.config, SCRIPTS[name]["ranks"], "cuda", (9, 0))]
    return [error for error in errors if not re.search(THERE, error)]


def reduced(name: str) -> list[str]:
    """A script's flags with other data and lengths, for a small model on one process."""
    given = {re.split("=", group[0])[0].removeprefix("--") for group in groups(name)}
    kept = [group for group in groups(name) if group[0].removeprefix("--") not in REPLACED]
    more = [flags for flag, flags in IF_GIVEN.items() if flag in given]
    topk = [int(group[1]) for group in kept if group[0] == "--moe-router-topk"]
    more += ["--moe-router-topk 2"] * any(k > 2 for k in topk)
    return [*(word for group in kept for word in group), *" ".join([REDUCED, *more]).split()]


def test_each_flag_of_a_parser_is_answered():
    """But those that it takes only to say which others to use; the suggestions here say that, too."""
    errors = parse([f"--{name}" for name in TABLES["parser"].split()]).errors
    unknown = [error for error in errors if "unknown flag" in error]
    suggested = ["--batch-size", "--warmup", "--model-parallel-size"]
    assert [error.split(":")[0] for error in unknown] == suggested and all(
        "did you mean" in e for e in unknown
    )
    assert len(TABLES["parser"].split()) > 250


def test_there_are_enough_scripts():
    assert len(SCRIPTS) >= 50 and len(STARTING) >= 25 and len(REFUSED) >= 15
    assert set(FAST) <= set(STARTING)


@pytest.mark.parametrize("name", STARTING)
def test_a_script_starts_at_its_full_size(name):
    assert errors_of(name) == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_is_refused_with_its_reasons(name):
    errors = errors_of(name)
    for reason in SCRIPTS[name]["refused"]:
        assert [error for error in errors if error.startswith(reason)], errors


def test_a_refused_script_ends_with_exit_code_2(capsys):
    assert train.main(words(REFUSED[0])) == BAD_CONFIG == 2
    assert SCRIPTS[REFUSED[0]]["refused"][0] in capsys.readouterr().err


@pytest.mark.parametrize("name", STARTING)
def test_a_script_at_a_reduced_size_is_right(name):
    parsed = parse(reduced(name))
    assert [*parsed.errors, *validate(parsed.config, 1)] == []


def first_losses(world: World, scripts: dict[str, list[str]], folder: str) -> dict[str, list[float]]:
    """The losses of two steps of each command line."""
    losses = {}
    for name, argv in scripts.items():
        run = training.set_up(world, argv, folder)
        losses[name] = []
        for _ in range(2):
            losses[name].append(float(train.train_step(run)["lm_loss"]))
            run.progress.iteration += 1
        Mesh.close()
    return losses


ALL = pytest.param([*STARTING], marks=pytest.mark.full)


@pytest.mark.parametrize("names", [FAST, ALL], ids=["some", "all"])
def test_scripts_train(names, tmp_path):
    commands = {name: reduced(name) for name in names}
    (losses,) = run_spmd(first_losses, 1, commands, str(tmp_path), timeout=180)
    for name in names:
        assert losses[name][0] == pytest.approx(math.log(100), rel=0.05), name
        assert 0 < losses[name][1] < 6, name

"""Checkpoints of Megatron-LM, against megatron-core: what it saves is read, what is written it loads."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import convert
from nanomegatron.batch import Batch
from nanomegatron.checkpoint import megatron_write, streams
from nanomegatron.checkpoint.checkpoint import load, module_states, save, state_pieces, training_pieces
from nanomegatron.checkpoint.files import Piece, fill_from
from nanomegatron.checkpoint.megatron import megatron_reader, open_megatron
from nanomegatron.commands.generate import load_model
from nanomegatron.config.cli import build_config, to_toml
from nanomegatron.config.megatron_args import args_of_settings
from nanomegatron.data.indexed_dataset import IndexedDatasetBuilder
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from tests.checkpoints import ALONE
from tests.megatron_models import LENGTH, MODELS, PADDED, POSITIONS, VOCAB, pattern, tokens
from tests.megatron_oracle import Oracle
from tests.megatron_routers import compare
from tests.spmd import run_spmd
from tests.test_train import run_train

EXACT = 1e-6
# One layer spec for all layers: any stage has them. (Megatron has no experts with biases under tp.)
WIDE = [name for name in MODELS if name not in ("qwen-moe", "gpt-moe")]


@pytest.fixture(scope="module")
def oracle():
    pytest.importorskip("megatron.core.dist_checkpointing")
    with Oracle() as found:
        yield found


def settings(name: str) -> dict:
    return MODELS[name] | {"vocab_size": VOCAB, "max_position_embeddings": POSITIONS}


def flags(name: str) -> list[str]:
    found = []
    for key, value in settings(name).items():
        word = key.replace("_", "-")
        found += [f"--{'no-' * (value is False)}{word}"] if isinstance(value, bool) else [f"--{word}={value}"]
    return found


def model_of(name: str) -> GPTModel:
    """Ours, with random weights."""
    config = build_config(settings(name)).model
    return GPTModel(
        config, vocab_size=VOCAB, max_sequence_length=POSITIONS, init=Init(device=torch.device("cpu"))
    )


def pieces_of(model: GPTModel) -> list:
    return training_pieces(model.parameters(), {}, ALONE) + state_pieces(module_states(model), ALONE)


@torch.no_grad()
def logits_of(model: GPTModel) -> torch.Tensor:
    return model(Batch(tokens(), torch.arange(LENGTH)))[..., :VOCAB].transpose(0, 1)


def run(source: str, target: str, here: Path, there: Path, *more: str) -> int:
    paths = ("--input-path", str(here), "--output-path", str(there))
    return convert.main(["--source", source, "--target", target, *paths, *more])


@pytest.mark.parametrize("name", MODELS)
def test_what_megatron_saves_computes_the_same_here(oracle, tmp_path, name):
    expected = oracle("save", name, tmp_path / "theirs")
    assert run("megatron-core", "nanomegatron", tmp_path / "theirs", tmp_path / "ours", *flags(name)) == 0
    model = model_of(name)
    assert (logits_of(model) - expected).abs().max() > 0.01
    load(tmp_path / "ours", pieces_of(model), ALONE)
    assert (logits_of(model) - expected).abs().max() < EXACT


@pytest.mark.parametrize("name", MODELS)
def test_megatron_loads_what_is_written(oracle, tmp_path, name, monkeypatch):
    monkeypatch.setattr(streams, "SLICE", 2000)  # of 15 rows
    model = model_of(name)
    for param in model.parameters():
        if param.dim() < 2:
            torch.nn.init.normal_(param, 1, 0.1)
    config = to_toml(build_config(settings(name)))
    save(tmp_path / "ours", 3, pieces_of(model), {"iteration": 3, "consumed_samples": 0}, config, ALONE)
    assert run("nanomegatron", "megatron-core", tmp_path / "ours", tmp_path / "theirs", "--verify") == 0
    assert (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").read_text() == "3"
    found = oracle("load", name, tmp_path / "theirs" / "iter_0000003")
    assert (found - logits_of(model)).abs().max() < EXACT


@pytest.mark.parametrize("first, last", [(0, 40), pytest.param(40, 600, marks=pytest.mark.full)])
def test_routers_by_chance_are_megatrons(oracle, first, last):
    for seed in range(first, last):
        compare(oracle, seed)


def args_of(name: str) -> dict:
    """Megatron's args of a model, as its own parser names them, with some that are none of ours."""
    config = build_config(settings(name))
    more = {"padded_vocab_size": PADDED, "params_dtype": torch.float32, "data_path": ["a", "b"], "rank": 0}
    return args_of_settings(config, VOCAB) | more


def test_the_legacy_format_is_read_without_unpickling(oracle, tmp_path):
    expected = oracle("legacy", "qwen", tmp_path / "theirs" / "iter_0000007", args_of("qwen"))
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("7")
    with torch.no_grad():
        assert (logits_of(load_model(tmp_path / "theirs", ALONE)[0][0]) - expected).abs().max() < EXACT
    assert run("megatron-core", "nanomegatron", tmp_path / "theirs", tmp_path / "ours") == 0
    model = model_of("qwen")
    load(tmp_path / "ours", pieces_of(model), ALONE)
    assert (logits_of(model) - expected).abs().max() < EXACT


def test_to_and_from_hugging_face(oracle, tmp_path):
    """From Megatron's folder at once, and to one: transformers computes what megatron-core does."""
    transformers = pytest.importorskip("transformers")
    expected = oracle("save", "llama", tmp_path / "theirs", args_of("llama"))
    assert run("megatron-core", "hf", tmp_path / "theirs", tmp_path / "hf") == 0
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
        assert (model(tokens()).logits - expected).abs().max() < EXACT
    assert run("hf", "megatron-core", tmp_path / "hf", tmp_path / "again") == 0
    found = oracle("load", "llama", tmp_path / "again" / "release")
    assert torch.equal(found, expected)


@pytest.fixture(scope="module")
def spread():
    """Four ranks: tp 2, pp 2."""
    pytest.importorskip("megatron.core.dist_checkpointing")
    with Oracle(tp=2, pp=2) as found:
        yield found


@pytest.mark.full
@pytest.mark.parametrize("how", ["save", "legacy"])
@pytest.mark.parametrize("name", WIDE)
def test_what_four_ranks_save(oracle, spread, tmp_path, name, how):
    """The model of two tp ranks and two stages, read here and read by megatron-core on one rank."""
    spread(how, name, tmp_path / "theirs", args_of(name))
    assert run("megatron-core", "nanomegatron", tmp_path / "theirs", tmp_path / "ours") == 0
    model = model_of(name)
    load(tmp_path / "ours", pieces_of(model), ALONE)
    if how == "save":
        expected = oracle("load", name, tmp_path / "theirs")
    else:
        assert run("nanomegatron", "megatron-core", tmp_path / "ours", tmp_path / "again") == 0
        expected = oracle("load", name, tmp_path / "again" / "release")
    assert (logits_of(model) - expected).abs().max() < EXACT


def test_what_does_not_fit_is_named(oracle, tmp_path, capsys):
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    oracle("save", "llama", theirs)

    def refused(message: str, *more: str) -> None:
        assert run("megatron-core", "nanomegatron", theirs, out, *more) == 2
        assert message in capsys.readouterr().err
        assert sorted(tmp_path.iterdir()) == [theirs]

    refused("it has no args; give its model by flags or --config")
    fit = flags("llama")
    refused("linear_qkv.weight: is [2, 64, 32], wanted [2, 96, 32]; see", *fit, "--num-query-groups=4")
    refused("mlp.linear_fc1.weight: is [2, 96, 32], wanted [2, 128, 32]; see", *fit, "--ffn-hidden-size=64")
    refused("is [2, 64, 32], wanted [3, 64, 32]; see --num-layers", *fit, "--num-layers=3")
    refused("is [128, 32], wanted [129, 32]", *fit, "--vocab-size=129")
    refused("output_layer.weight [128, 32]: this model has", *fit, "--no-untie-embeddings-and-output-weights")
    refused("pre_mlp_layernorm.bias: missing", *fit, "--normalization=LayerNorm")
    refused("--foo: unknown flag", *fit, "--foo")
    (theirs / "__0_0.distcp").write_bytes(b"")
    refused("does not fit into", *fit)


def test_each_kind_of_folder_is_told_from_the_other(oracle, tmp_path, capsys):
    oracle("save", "gpt", tmp_path / "theirs")
    assert run("megatron", "nanomegatron", tmp_path / "theirs", tmp_path / "ours", *flags("gpt")) == 0
    assert run("nanomegatron", "hf", tmp_path / "theirs", tmp_path / "out") == 2
    assert "is of Megatron-LM; give --source megatron-core" in capsys.readouterr().err
    assert run("megatron", "hf", tmp_path / "ours", tmp_path / "out") == 2
    assert "is of nanomegatron, give --source nanomegatron" in capsys.readouterr().err


STEPS = (
    "--seq-length 16 --global-batch-size 2 --micro-batch-size 1 --eval-iters 1 --lr 1e-3 --weight-decay 0.1 "
    "--lr-decay-style constant --clip-grad 0 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --device cpu "
    "--run-name test --tokenizer-type NullTokenizer --vocab-size 128 --split 90,10,0 --train-iters 6"
)


@pytest.fixture(scope="module")
def repeated(tmp_path_factory) -> str:
    """Prefix of data whose samples are equal."""
    prefix = str(tmp_path_factory.mktemp("data") / "repeated")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(20):
            builder.add_document(pattern().repeat(10).numpy())
        builder.finalize()
    return prefix


def losses_of(folder: Path, data: str, ranks: int, *more: str) -> list[float]:
    """lm_loss of each step of train.py."""
    argv = [*STEPS.split(), "--data-path", data, *" ".join(more).split()]
    folder.mkdir()
    return [step["lm_loss"] for step in run_spmd(run_train, ranks, argv, str(folder))[0]]


@pytest.mark.parametrize(
    "name, layout",
    [
        ("llama", ""),
        pytest.param("llama", "--tp 2", marks=pytest.mark.full),
        pytest.param("llama", "--pp 2", marks=pytest.mark.full),
        pytest.param("llama", "--use-distributed-optimizer", marks=pytest.mark.full),
        pytest.param("gpt", "--tp 2", marks=pytest.mark.full),
        pytest.param("mixtral", "--ep 2", marks=pytest.mark.full),
    ],
)
def test_training_continues_with_the_losses_that_megatron_has(oracle, repeated, tmp_path, name, layout):
    """With its optimizer states from the next step on, and without them from the first."""
    args = args_of(name) | {"vocab_size": PADDED, "consumed_train_samples": 6}
    expected = oracle("train", name, tmp_path / "theirs" / "iter_0000003", args, 3, 3)
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("3")
    load, ranks = f"--load {tmp_path / 'theirs'}", 2 if layout else 1
    losses = losses_of(tmp_path / "run", repeated, ranks, load, layout)
    assert losses == pytest.approx(expected, abs=EXACT)
    assert run("megatron-core", "nanomegatron", tmp_path / "theirs", tmp_path / "ours", "--verify") == 0
    losses = losses_of(tmp_path / "converted", repeated, ranks, f"--load {tmp_path / 'ours'}", layout)
    assert losses == pytest.approx(expected, abs=EXACT)
    losses = losses_of(tmp_path / "tuned", repeated, ranks, load, layout, "--finetune")
    assert losses[0] == pytest.approx(expected[0], abs=EXACT) and len(losses) == 6
    assert abs(losses[2] - expected[2]) > 1e-4


DECAYS = (
    "--lr-decay-style cosine --lr-warmup-iters 2 --min-lr 1e-4 --clip-grad 1.0 --save-interval 3 "
    "--weight-decay-incr-style linear --start-weight-decay 0.0 --end-weight-decay 0.2"
)
ADAM = {"lr": 1e-3, "min_lr": 1e-4, "weight_decay": 0.2, "adam_beta2": 0.95, "clip_grad": 1.0}
SCHEDULE = {"init_lr": 0.0, "max_lr": 1e-3, "min_lr": 1e-4, "lr_decay_style": "cosine"}
SCHEDULE |= {"lr_warmup_steps": 4, "lr_decay_steps": 12, "wd_incr_steps": 12}
SCHEDULE |= {"start_wd": 0.0, "end_wd": 0.2, "wd_incr_style": "linear"}


def test_megatron_continues_with_the_losses_that_are_had_here(
    oracle, repeated, tmp_path, monkeypatch, capsys
):
    """With our states, step and schedule, as we do; other moments, step or betas give other losses."""
    model = [flag for flag in flags("llama") if "vocab" not in flag]
    expected = losses_of(tmp_path / "run", repeated, 1, DECAYS, *model)[3:]
    saved = tmp_path / "run/runs/test/ckpt"
    folder = tmp_path / "theirs" / "iter_0000003"

    def converted() -> list[float]:
        shutil.rmtree(tmp_path / "theirs", ignore_errors=True)
        assert run("nanomegatron", "megatron-core", saved, tmp_path / "theirs", "--ckpt-step", "3") == 0
        return oracle("resume", "llama", folder, ADAM, SCHEDULE, 3)

    assert converted() == pytest.approx(expected, abs=EXACT)
    assert "weights only" not in capsys.readouterr().out
    again = losses_of(tmp_path / "again", repeated, 1, DECAYS, f"--load {folder}")
    assert again == pytest.approx(expected, abs=EXACT)
    common = torch.load(folder / "common.pt", weights_only=False)
    assert common["args"].consumed_train_samples == 6 and common["opt_param_scheduler"]["num_steps"] == 6
    for change in ({"step": 30}, {"betas": (0.9, 0.5)}, {"eps": 1e-3}):
        groups = [group | change for group in common["optimizer"]["optimizer"]["param_groups"]]
        torch.save(
            common | {"optimizer": common["optimizer"] | {"optimizer": {"param_groups": groups}}},
            folder / "common.pt",
        )
        found = oracle("resume", "llama", folder, ADAM, SCHEDULE, 3)
        assert abs(found[2] - expected[2]) > 10 * EXACT, change
    usual = megatron_write.their_stream
    for lost in ("exp_avg", "exp_avg_sq"):

        def without(kind, parts, streams, lost=lost):
            found = usual(kind, parts, streams)
            return found.map(torch.zeros_like, found.dtype) if kind == lost else found

        monkeypatch.setattr(megatron_write, "their_stream", without)
        assert abs(converted()[2] - expected[2]) > 10 * EXACT, lost


def saved_with_states(name: str, folder: Path, **more: Any) -> dict[str, torch.Tensor]:
    """Save a checkpoint of ours with random optimizer states; returns these."""
    pieces, random = pieces_of(model_of(name)), torch.Generator().manual_seed(7)
    shapes = {p.key.removeprefix("model/"): p.shape for p in pieces if "expert_bias" not in p.key}
    kinds = ("main", "exp_avg", "exp_avg_sq")
    states = {
        f"{kind}/{key}": torch.rand(shape, generator=random)
        for key, shape in shapes.items()
        for kind in kinds
    }
    pieces += [Piece(key, tuple(x.shape), (0,) * x.dim(), x) for key, x in states.items()]
    optimizer = {"good_steps": 3, "loss_scaler": [4096.0, 5.0, 1.0]}
    state = {"iteration": 3, "consumed_samples": 6, "optimizer": optimizer}
    training = {"lr": 1e-3, "min_lr": 1e-4, "train_iters": 6, "global_batch_size": 2, "lr_warmup_iters": 2}
    training |= {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.2}
    training |= {"bf16": True} | more
    save(folder, 3, pieces, state, to_toml(build_config(settings(name) | training)), ALONE)
    return states


def check_states_of_megatron(their: Oracle, name: str, folder: Path, **more: Any) -> None:
    """Megatron's optimizer has our states to the bit: it loads them, and what it saves is read here."""
    expected = saved_with_states(name, folder / "ours", **more)
    assert run("nanomegatron", "megatron-core", folder / "ours", folder / "theirs") == 0
    adam = ADAM | {"fp16": more.get("fp16", False)}
    their("resume", name, folder / "theirs/iter_0000003", adam, SCHEDULE, 0)
    again = folder / "theirs/iter_0000003-again"
    manifest = open_megatron(again, build_config(settings(name)).model, VOCAB)
    assert expected.keys() <= manifest.tensors.keys()
    found = {key: torch.empty_like(x) for key, x in expected.items()}
    fill_from(
        again,
        manifest,
        [Piece(key, tuple(x.shape), (0,) * x.dim(), x) for key, x in found.items()],
        megatron_reader,
    )
    assert not [key for key in expected if not torch.equal(found[key], expected[key])]


FAST = ("gpt", "mixtral", "qwen-moe")


@pytest.mark.parametrize("name", FAST)
def test_megatron_has_our_optimizer_states(oracle, tmp_path, name):
    check_states_of_megatron(oracle, name, tmp_path)


def test_megatron_has_our_loss_scale(oracle, tmp_path):
    check_states_of_megatron(oracle, "gpt", tmp_path, bf16=False, fp16=True)
    common = torch.load(tmp_path / "theirs/iter_0000003-again/common.pt", weights_only=False)
    assert common["optimizer"]["grad_scaler"] == {"scale": 4096, "growth_tracker": 5, "hysteresis_tracker": 1}


@pytest.mark.full
@pytest.mark.parametrize("name", WIDE)
def test_megatron_has_our_optimizer_states_on_four_ranks(spread, tmp_path, name):
    check_states_of_megatron(spread, name, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixtral", "qwen-moe"])
def test_megatron_has_our_optimizer_states_on_two_expert_ranks(tmp_path, name):
    """There it has two optimizers, one of which is for experts, and two replicas of all else."""
    pytest.importorskip("megatron.core.dist_checkpointing")
    with Oracle(ep=2) as apart:
        check_states_of_megatron(apart, name, tmp_path / "a", expert_model_parallel_size=2)
        check_legacy_states(apart, name, tmp_path / "b", bf16=False)


def check_legacy_states(their: Oracle, name: str, folder: Path, bf16: bool) -> None:
    """The legacy format gives the states that torch_dist does, to the bit."""
    their("legacy-states", name, folder / "theirs", args_of(name), {"lr": 1e-3}, bf16, False)
    model, found = build_config(settings(name)).model, []
    for path in (folder / "theirs", folder / "theirs-dist"):
        manifest = open_megatron(path, model, VOCAB)
        kept = {key: saved for key, saved in manifest.tensors.items() if not key.startswith("model/")}
        found.append({key: torch.empty(saved.shape) for key, saved in kept.items()})
        pieces = [Piece(key, tuple(x.shape), (0,) * x.dim(), x) for key, x in found[-1].items()]
        fill_from(path, manifest, pieces, megatron_reader)
    assert found[0].keys() == found[1].keys() and len(found[0]) > 10
    assert ("main/decoder.final_layernorm.weight" in found[0]) == bf16
    assert not [key for key, x in found[0].items() if not torch.equal(x, found[1][key])]


@pytest.mark.parametrize("name", [*FAST, "qwen"])
def test_legacy_optimizer_states_are_those_of_torch_dist(oracle, tmp_path, name):
    check_legacy_states(oracle, name, tmp_path, bf16=name in FAST)


@pytest.mark.full
@pytest.mark.parametrize("name", WIDE)
def test_legacy_optimizer_states_of_four_ranks(spread, tmp_path, name):
    check_legacy_states(spread, name, tmp_path, bf16=name in FAST)


def test_training_continues_from_the_legacy_format(oracle, repeated, tmp_path):
    """With the optimizer's states; those of a distributed one, in a file of their own, are not read."""
    args = args_of("llama") | {"vocab_size": PADDED, "consumed_train_samples": 6}
    adam = {"lr": 1e-3, "weight_decay": 0.1, "adam_beta2": 0.95, "clip_grad": 0.0}
    folder = tmp_path / "theirs" / "iter_0000003"
    expected = oracle("legacy-states", "llama", folder, args, adam, False, False)
    losses = losses_of(tmp_path / "run", repeated, 1, f"--load {folder}")
    assert losses == pytest.approx(expected, abs=EXACT)
    losses = losses_of(tmp_path / "tuned", repeated, 1, f"--load {folder} --finetune")
    assert abs(losses[2] - expected[2]) > 1e-4
    oracle("legacy-states", "llama", tmp_path / "other", args, adam, False, True)
    for name, why in (("other", "in distrib_optim.pt; save as torch_dist"), ("other-dist", "a distributed")):
        manifest = open_megatron(tmp_path / name, build_config(settings("llama")).model, VOCAB)
        assert not any(key.startswith("exp_avg/") for key in manifest.tensors)
        assert f"its weights only, no optimizer states: they are {why}" in manifest.notes[1]

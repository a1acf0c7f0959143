"""Megatron-LM's args as settings of ours and back, and its pickles, of which nothing is called."""

import argparse
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanomegatron.checkpoint.checkpoint import load, save
from nanomegatron.checkpoint.manifest import CheckpointError
from nanomegatron.checkpoint.megatron import open_megatron
from nanomegatron.config.cli import build_config, to_toml
from nanomegatron.config.hf import effective
from nanomegatron.config.megatron_args import args_of_settings, megatron_settings, settings_of_args
from tests.checkpoint.test_megatron import model_of, pieces_of, run, saved_with_states, settings
from tests.checkpoints import ALONE
from tests.megatron_models import MODELS, VOCAB


def test_args_that_are_not_ours(tmp_path):
    """Lists and numbers of Megatron's parser become our types; what a model here cannot be is named."""
    args = {"num_layers": 2, "num_experts": 4, "moe_layer_freq": [0, 1], "moe_aux_loss_coeff": 0.01}
    args |= {"moe_router_load_balancing_type": "aux_loss", "rotary_base": 500000, "window_size": [7, 0]}
    args |= {"moe_token_dispatcher_type": "flex", "recompute_granularity": "full", "padded_vocab_size": 256}
    found = settings_of_args(args)
    assert found["moe_aux_loss_coeff"] == (0.01,) and found["moe_router_load_balancing_type"] == ("aux_loss",)
    assert build_config(found).model.moe_layers == [False, True]
    assert found["window_size"] == (7, 0) and isinstance(found["rotary_base"], float)
    assert not {"moe_token_dispatcher_type", "recompute_granularity"} & found.keys()
    assert found["vocab_size"] == 256
    with pytest.raises(ValueError, match="position_embedding_type 'mrope': here are learned_absolute"):
        settings_of_args(args | {"position_embedding_type": "mrope"})
    with pytest.raises(ValueError, match="multi_latent_attention: a model with this is not here"):
        settings_of_args(args | {"multi_latent_attention": True})


class Canary:
    """Unpickling this makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


def test_a_pickle_is_not_executed(tmp_path):
    """Whatever is beside the args, in either format: nothing of it is called."""
    args = argparse.Namespace(num_layers=2, hidden_size=32, thing=Canary(tmp_path / "x"))
    for name in ("a/common.pt", "b/mp_rank_00/model_optim_rng.pt"):
        (tmp_path / name).parent.mkdir(parents=True)
        torch.save({"args": args, "model": {"x": 1}}, tmp_path / name)
        folder = tmp_path / name[0]
        assert megatron_settings(folder)["hidden_size"] == 32
    with pytest.raises(CheckpointError, match="b does not fit this model"):
        open_megatron(tmp_path / "b", build_config(settings("gpt")).model, VOCAB)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    torch.load(tmp_path / "b/mp_rank_00/model_optim_rng.pt", weights_only=False)
    assert (tmp_path / "x").is_dir()


@pytest.mark.parametrize("name", MODELS)
def test_args_give_the_model_back(name):
    config = build_config(settings(name))
    found = build_config(settings_of_args(args_of_settings(config, VOCAB)))
    assert effective(found.model) == effective(config.model)
    assert found.data.vocab_size == VOCAB


def test_a_misfit_is_listed_once(tmp_path):
    """Not again for each of the optimizer's states of the tensor."""
    saved_with_states("llama", tmp_path / "ours")
    assert run("nanomegatron", "megatron-core", tmp_path / "ours", tmp_path / "theirs") == 0
    model = replace(build_config(settings("llama")).model, ffn_hidden_size=8)
    with pytest.raises(CheckpointError) as error:
        open_megatron(tmp_path / "theirs/iter_0000003", model, VOCAB)
    _, *lines = str(error.value).splitlines()
    names = [line.split(":")[0].rpartition("decoder.")[2] for line in lines]
    assert len(names) == len({*names}) and {"linear_fc1" in n or "linear_fc2" in n for n in names} == {True}


@pytest.mark.parametrize(
    "more, message",
    [
        ({"norm_placement": "both"}, "--norm-placement both"),
        (
            {"num_experts": 4, "moe_shared_expert_intermediate_size": 24},
            "--moe-shared-expert-intermediate-size 24 without --disable-bias-linear",
        ),
    ],
)
def test_a_model_that_megatron_has_not_is_not_written(tmp_path, capsys, monkeypatch, more, message):
    """Of the first its loader would leave out norms without a word; the second it does not build."""
    monkeypatch.setitem(MODELS, "other", MODELS["gpt"] | more)
    config = to_toml(build_config(settings("other")))
    state = {"iteration": 3, "consumed_samples": 0}
    save(tmp_path / "ours", 3, pieces_of(model_of("other")), state, config, ALONE)
    assert run("nanomegatron", "megatron-core", tmp_path / "ours", tmp_path / "theirs") == 2
    assert f"Megatron-LM has no model of {message}; give another --target" in capsys.readouterr().err
    assert not (tmp_path / "theirs").exists()


@pytest.mark.filterwarnings("ignore")
def test_megatron_builds_no_shared_experts_with_biases():
    experts = pytest.importorskip("megatron.core.transformer.moe.shared_experts")
    sizes = dict(num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=2)
    config = experts.TransformerConfig(**sizes, moe_shared_expert_intermediate_size=8)
    with pytest.raises(AssertionError, match="bias is not supported in the shared experts"):
        experts.SharedExpertMLP(config, None, gate=False)


def test_a_checkpoint_that_lacks_a_tensor(tmp_path, capsys):
    """It is neither loaded nor written for Megatron; both name the first that is missing."""
    state, config = {"iteration": 3, "consumed_samples": 0}, to_toml(build_config(settings("gpt-moe")))
    pieces = [piece for piece in pieces_of(model_of("gpt-moe")) if not piece.key.endswith("router.bias")]
    save(tmp_path / "ours", 3, pieces, state, config, ALONE)
    with pytest.raises(CheckpointError, match=r"decoder.layers.0.mlp.router.bias: missing, wanted \[4\]"):
        load(tmp_path / "ours", pieces_of(model_of("gpt-moe")), ALONE)
    assert run("nanomegatron", "megatron-core", tmp_path / "ours", tmp_path / "theirs") == 2
    assert "lacks decoder.layers.0.mlp.router.bias, which its model has" in capsys.readouterr().err

"""Megatron's own example code: what its constructors are given is taken, or answered."""

import dataclasses
import importlib
import re

import pytest
import torch

from nanomegatron import megatron_api
from nanomegatron.batch import Batch
from nanomegatron.config.cli import MEGATRON_DEFAULTS
from nanomegatron.config.keywords import megatron_keywords
from nanomegatron.config.rules import items
from nanomegatron.config.settings import ParallelConfig, PrecisionConfig, RunConfig, TransformerConfig
from nanomegatron.megatron_api import GPTModel
from nanomegatron.mesh import Mesh

LINEARS = ("ColumnParallelLinear", "RowParallelLinear")
SHAPE = dict(num_layers=2, hidden_size=12, num_attention_heads=4)


def test_megatrons_first_example_runs():
    config = TransformerConfig(**SHAPE, use_cpu_initialization=True, pipeline_dtype=torch.float32)
    assert config == TransformerConfig(**SHAPE)
    model = GPTModel(config=config, transformer_layer_spec=None, vocab_size=100, max_sequence_length=64)
    loss = model(Batch(torch.arange(64).view(1, 64), torch.arange(64)), torch.arange(64).view(1, 64))
    assert loss.shape == (1, 64) and model.output_layer.weight.shape == (128, 12)
    assert TransformerConfig(**SHAPE, num_query_groups=0).num_kv_heads == 4


def test_defaults_are_those_of_megatron_core():
    """Of what decides a result, but for those that --megatron-defaults takes."""
    core = pytest.importorskip("megatron.core.transformer.transformer_config")
    theirs = {f.name: f.default for f in dataclasses.fields(core.TransformerConfig)}
    theirs["norm_epsilon"] = theirs["layernorm_epsilon"]
    compared = 0
    for field in dataclasses.fields(TransformerConfig):
        known = isinstance(theirs.get(field.name), bool | int | float | str)
        if known and not (field.metadata["required"] or field.metadata["resumable"]):
            ours = MEGATRON_DEFAULTS.get(field.name, field.default)
            assert str(theirs[field.name]) in map(str, items(ours)), field.name
            compared += 1
    assert compared >= 15


@pytest.mark.parametrize(
    "keyword, replacement",
    [
        (dict(fp8=True), r"fp8=True: use PrecisionConfig\(bf16=True, fp8_format='e4m3'\) or 'hybrid'"),
        (dict(fp8="hybrid", fp8_recipe="tensorwise"), r"PrecisionConfig\(fp8_recipe=...\)"),
        (dict(fp8_param=True, fp8_wgrad=False), "fp8_param_gather=True.*; fp8_wgrad=False: use Precision"),
        (dict(fp8_dot_product_attention=True), "core attention stays in bf16"),
        (dict(tensor_model_parallel_size=2), "tensor_model_parallel_size=2: use ParallelConfig"),
        (dict(pipeline_model_parallel_size=2), "pipeline_model_parallel_size=2: use ParallelConfig"),
        (dict(virtual_pipeline_model_parallel_size=2), "num_virtual_stages_per_pipeline_rank"),
        (dict(num_layers_in_first_pipeline_stage=1), "decoder_first_pipeline_num_layers"),
        (dict(account_for_loss_in_pipeline_split=True), "use ParallelConfig"),
        (dict(context_parallel_size=2), "context_parallel_size=2: use ParallelConfig"),
        (dict(cp_comm_type="a2a"), r"ParallelConfig\(cp_comm_type=...\)"),
        (dict(cp_comm_type=["p2p", "a2a"]), r"cp_comm_type=\['p2p', 'a2a'\]: use ParallelConfig"),
        (dict(hierarchical_context_parallel_sizes=[2, 2]), "use ParallelConfig"),
        (dict(hybrid_context_parallel=True), r"ParallelConfig\(dynamic_context_parallel=True\)"),
        (dict(max_seqlen_per_dp_cp_rank=4096), "use ParallelConfig"),
        (dict(add_bias_linear=False), "disable_bias_linear"),
        (dict(params_dtype=torch.bfloat16), r"Init\(dtype"),
        (dict(layernorm_epsilon=1e-6), "norm_epsilon"),
        (dict(hiden_dropout=0.1), "hiden_dropout: unknown; did you mean hidden_dropout"),
        (
            dict(num_moe_experts=8, bf16=True),
            "num_moe_experts=8: use num_experts; bf16=True: use PrecisionConf",
        ),
        (dict(expert_model_parallel_size=2), r"ParallelConfig\(expert_model_parallel_size=...\)"),
        (
            dict(overlap_moe_expert_parallel_comm=True),
            r"ParallelConfig\(overlap_moe_expert_parallel_comm=...\)",
        ),
        (dict(moe_layer_recompute=True), "recompute_modules=.'moe',"),
        (dict(moe_enable_deepep=True), "moe_token_dispatcher_type='alltoall'"),
        (dict(moe_per_layer_logging=True), r"RunConfig\(moe_per_layer_logging=...\)"),
        (dict(moe_apply_probs_on_input=True), "weights of experts are applied"),
    ],
)
def test_a_keyword_that_asks_for_more_names_its_replacement(keyword, replacement):
    with pytest.raises(TypeError, match=replacement):
        TransformerConfig(**SHAPE, **keyword)


def test_defaults_of_megatrons_keywords_are_taken():
    TransformerConfig(
        **SHAPE, fp8_recipe="delayed", fp8_interval=4, fp8_wgrad=True, first_last_layers_bf16=False
    )
    TransformerConfig(**SHAPE, fp8=None, bf16=False, tensor_model_parallel_size=1, num_moe_experts=None)
    TransformerConfig(**SHAPE, context_parallel_size=1, cp_comm_type="p2p", hybrid_context_parallel=False)
    TransformerConfig(**SHAPE, add_bias_linear=True, layernorm_zero_centered_gamma=False)


def test_one_value_stands_for_a_list_of_one():
    """As Megatron has it; and its lists, and numbers of layers."""
    config = TransformerConfig(**SHAPE, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1)
    assert config.moe_router_load_balancing_type == ("aux_loss",) and config.moe_aux_loss_coeff == (0.1,)
    config = TransformerConfig(
        **SHAPE, recompute_modules=["mlp", "moe"], num_experts=4, moe_layer_freq=[0, 1]
    )
    assert config.recompute_modules == ("mlp", "moe") and config.moe_layers == [False, True]
    assert TransformerConfig(**SHAPE, num_experts=4, moe_layer_freq=2).moe_layers == [True, False]


def test_the_keywords_that_moved_are_settings():
    """What the answers name is there."""
    for part in (ParallelConfig, PrecisionConfig, RunConfig, TransformerConfig):
        names, used = {setting.name for setting in dataclasses.fields(part)}, set()
        known = megatron_keywords()
        for instead, *_ in (known["TransformerConfig"] | known["GPTModel"]).values():
            for text in re.findall(rf"{part.__name__}\((.*?)\)", instead):
                used.update(re.findall(r"(\w+)=", text))
        assert used and used <= names


@pytest.mark.parametrize("keyword", [dict(pre_process=False), dict(post_process=False), dict(vp_stage=0)])
def test_a_piece_of_the_model_is_a_stage(keyword):
    with pytest.raises(TypeError, match=f"{next(iter(keyword))}=.*: use stage=StageSpec"):
        GPTModel(TransformerConfig(**SHAPE), vocab_size=8, max_sequence_length=4, **keyword)
    model = GPTModel(
        TransformerConfig(**SHAPE),
        vocab_size=8,
        max_sequence_length=4,
        pre_process=True,
        post_process=True,
        vp_stage=None,
    )
    assert len(model.layers) == 2


@pytest.mark.parametrize(
    "keyword",
    [
        dict(rotary_percent=0.5),
        dict(seq_len_interpolation_factor=2.0),
        dict(transformer_layer_spec=object()),
    ],
)
def test_what_the_config_says_is_not_said_to_the_model(keyword):
    with pytest.raises(TypeError, match=f"{next(iter(keyword))}=.*: use .*TransformerConfig"):
        GPTModel(TransformerConfig(**SHAPE), vocab_size=8, max_sequence_length=4, **keyword)


def test_the_tables_are_megatrons_keywords_and_none_of_ours():
    pytest.importorskip("megatron.core")
    import inspect

    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel as TheirModel
    from megatron.core.transformer import TransformerConfig as TheirConfig

    for name in LINEARS:
        theirs = inspect.signature(getattr(tensor_parallel, name)).parameters
        ours = inspect.signature(getattr(megatron_api, name)).parameters
        assert theirs.keys() - ours.keys() == megatron_keywords()[name].keys()
    config, model = (set(inspect.signature(of).parameters) for of in (TheirConfig, TheirModel))
    known = megatron_keywords()
    ours, taken = known["TransformerConfig"].keys(), set(known["taken"])
    assert ours <= config and known["GPTModel"].keys() <= model and taken <= config | model
    assert not (ours | taken) & inspect.signature(TransformerConfig).parameters.keys()


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_layer_with_megatrons_arguments(name):
    layer, axis = getattr(megatron_api, name), Mesh().tp
    how = {"gather_output": False} if name[0] == "C" else {"input_is_parallel": True}
    theirs = dict(config=TransformerConfig(**SHAPE), init_method=torch.nn.init.zeros_, bias=True, **how)
    words = rf"{name}\(config=.*: use tp=mesh.tp.*; init_method=.*: use init=Init\(std=...\), a normal"
    with pytest.raises(TypeError, match=words):
        layer(8, 16, **theirs)
    with pytest.raises(TypeError, match="biass: unknown; did you mean bias"):
        layer(8, 16, axis, biass=True)
    assert layer(8, 16, axis, stride=1, is_expert=False, tp_group=None, **how).weight.shape == (16, 8)


@pytest.mark.parametrize(
    "statement, ours",
    [
        ("from nanomegatron import parallel_state", "nanomegatron.mesh.Mesh"),
        ("from nanomegatron import get_forward_backward_func", "nanomegatron.megatron_api.forward_backward"),
        ("from nanomegatron.core import parallel_state, dist_checkpointing", "nanomegatron.mesh.Mesh"),
        (
            "from nanomegatron.core.pipeline_parallel.schedules import get_forward_backward_func",
            "nanomegatron.megatron_api.forward_backward",
        ),
        (
            "from nanomegatron.core.tensor_parallel import ColumnParallelLinear",
            "nanomegatron.megatron_api.Column",
        ),
        ("import nanomegatron.core.models.gpt", "nanomegatron.megatron_api.GPTModel"),
    ],
)
def test_an_import_of_megatrons_names_ours(statement, ours):
    with pytest.raises(ImportError, match=re.escape(ours)):
        exec(statement)


def test_other_imports_are_what_they_are():
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from nanomegatron import nothing")
    assert not hasattr(importlib.import_module("nanomegatron"), "nothing")
    exec("from nanomegatron import schedules")


def test_what_the_answers_to_imports_name_is_there():
    known = megatron_keywords()["imports"]
    for theirs, ours in known.items():
        path = re.match(r"[\w.]+", ours)[0].rstrip(".")
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(f"nanomegatron.{module}"), name), theirs

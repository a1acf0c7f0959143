"""config.json of Hugging Face models, read and written; transformers is the oracle."""

import json

import pytest
import torch

from nanomegatron.config.cli import build_config, parse
from nanomegatron.config.hf import read_folder, settings_of, to_hf
from tests.hf_models import (
    FAMILIES,
    LINEAR,
    LLAMA,
    LLAMA3,
    VOCAB,
    YARN,
    Folders,
    old_spelling,
    their_logits,
    transformers,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Folders:
    return Folders(tmp_path_factory)


@pytest.mark.parametrize("name", FAMILIES)
def test_both_spellings_mean_the_same(folders, name):
    table = json.loads((folders(name)[1] / "config.json").read_text())
    assert "torch_dtype" not in table and "rope_theta" not in table
    assert settings_of(old_spelling(dict(table))) == settings_of(table)
    assert settings_of(table | {"dtype": "bfloat16"})["bf16"]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_what_is_written_is_the_same_model_to_transformers(folders, name):
    theirs, folder = folders(name)
    table = to_hf(build_config(read_folder(folder)[1]))
    assert table["model_type"] in (name.split("-")[0], "llama")  # a Mistral without a window is a Llama
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(table)))
    again = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    again.load_state_dict(theirs.state_dict())
    assert torch.equal(their_logits(name, again), their_logits(name, theirs))
    assert to_hf(build_config(settings_of(json.loads(config.to_json_string(use_diff=False))))) == table


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "bert"}, "model_type = 'bert': here are gpt2, llama"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': here is 'silu'"),
        ({"attention_bias": True}, "attention_bias = True, mlp_bias = False: here is a llama without either"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias = True"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type = 'dynamic': here are default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_type = 'linear', factor = None: must be above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 4}}, "'linear' with beta_fast: here"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "'low_freq_factor': 2.0"),
        ({"rope_parameters": LLAMA3 | {"factor": None}}, "factor = None: must be"),
        ({"rope_parameters": YARN | {"attention_factor": 1.0}}, "attention_factor = 1.0: here is 1.13862"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: here is 1.0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size = None: must be a number"),
        ({"hidden_size": "32"}, "hidden_size = '32': must be a number"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True: must be a number"),
        ({"torch_dtype": "int8"}, "dtype = 'int8'"),
        ({"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "sliding_window = None"),
        ({"model_type": "gpt2", "hidden_size": None}, "n_embd = None"),
        ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts = 0: must be a number"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "rope_type = 'longrope': here are"),
        ({"model_type": "granite", "embedding_multiplier": 0}, "embedding_multiplier = 0: must be a number"),
        ({"model_type": "olmo2", "attention_bias": True}, "here is a olmo2 without"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers = .1.: here are 1 and 0, one a"),
        ({"model_type": "smollm3", "use_sliding_window": True}, "use_sliding_window = True: here is False"),
        (
            {"model_type": "gemma2", "hidden_activation": "gelu"},
            "hidden_activation = 'gelu': here is 'gelu_p",
        ),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0: must be a number"),
        ({"model_type": "gemma2", "sliding_window": None}, "sliding_window = None: must be a number above 0"),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"full_attention": {}, "sliding_attention": LINEAR},
            },
            "sliding_attention .*'linear'.* here with rope_type = 'default'",
        ),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 3.0},
            "attn_logit_softcapping = 3.0: here is None",
        ),
        ({"model_type": "gemma3"}, "model_type = 'gemma3': here are"),
        ({"model_type": "qwen2_moe", "qkv_bias": False}, "qkv_bias = False: here is True"),
        ({"model_type": "qwen2_moe", "layer_types": ["full_attention"]}, "layer_types = .*: here are"),
        ({"model_type": "qwen2_moe", "shared_expert_intermediate_size": None}, "_size = None: must be"),
    ],
)
def test_what_this_model_has_not_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        settings_of(LLAMA | {"model_type": "llama"} | change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rotary_interleaved": True}, "llama is without rotary_interleaved = True"),
        ({"qk_layernorm": True, "position_embedding_type": "none"}, "position_embedding_type = 'none'"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p = True"),
        ({"swiglu": False}, "swiglu = False"),
        (
            {"num_experts": 4, "moe_router_score_function": "sigmoid"},
            "without moe_router_score_function = 'sig",
        ),
        ({"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_layer_freq": "2"}, "without"),
        ({"num_experts": 4, "moe_router_topk_scaling_factor": 2.0}, "moe_router_topk_scaling_factor = 2.0"),
        (
            {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2.0},
            "llama is without rotary_seq_len_interpolation_factor = 2.0",
        ),
    ],
)
def test_a_model_of_no_family_is_refused(change, message):
    llama = settings_of(LLAMA | {"model_type": "llama"})
    with pytest.raises(ValueError, match=message):
        to_hf(build_config(llama | change))


def test_how_it_was_trained_is_no_part_of_a_model(folders):
    """Settings that change memory and speed alone stay in the checkpoint."""
    settings = read_folder(folders(next(iter(FAMILIES)))[1])[1]
    training = dict(sequence_parallel=True, cross_entropy_loss_fusion=True, recompute_granularity="full")
    training |= dict(recompute_method="block", recompute_num_layers=1, distribute_saved_activations=True)
    training |= dict(recompute_modules=("mlp",), hidden_dropout=0.1, bias_swiglu_fusion=False)
    training |= dict(rope_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False)
    assert to_hf(build_config(settings | training)) == to_hf(build_config(settings))
    settings = read_folder(folders("qwen3_moe")[1])[1]
    training |= dict(moe_aux_loss_coeff=0.1, moe_token_dispatcher_type="alltoall", moe_grouped_gemm=False)
    training |= dict(moe_expert_capacity_factor=2.0, moe_router_dtype="fp32", moe_z_loss_coeff=0.1)
    assert to_hf(build_config(settings | training)) == to_hf(build_config(settings))


def test_position_interpolation_is_the_linear_scaling():
    settings = settings_of(LLAMA | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 8}})
    assert settings["rotary_seq_len_interpolation_factor"] == 8.0 and not settings.get("use_rope_scaling")
    assert to_hf(build_config(settings))["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    plain = settings | {"rotary_seq_len_interpolation_factor": 1.0}
    assert to_hf(build_config(plain))["rope_scaling"] is None


def test_layer_types_make_a_pattern():
    table = LLAMA | {"model_type": "qwen3", "num_hidden_layers": 6, "use_sliding_window": True}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    settings = settings_of(table | {"layer_types": kinds, "sliding_window": 5})
    assert settings["window_attn_skip_freq"] == "[1]*2+[0]*1+[1]*2+[0]*1"
    assert to_hf(build_config(settings))["layer_types"] == kinds


def test_which_layers_have_experts():
    """Both keys of Qwen, and either spelling of their number; what is left out is as transformers has it."""
    table = LLAMA | {"model_type": "qwen3_moe", "num_hidden_layers": 6, "num_local_experts": 16}
    settings = settings_of(table | {"mlp_only_layers": [3], "decoder_sparse_step": 2})
    assert settings["moe_layer_freq"] == "[0]*1+[1]*1+[0]*3+[1]*1" and settings["num_experts"] == 16
    assert build_config(settings).model.moe_layers == [False, True, False, False, False, True]
    assert to_hf(build_config(settings))["mlp_only_layers"] == [0, 2, 3, 4]
    assert "moe_layer_freq" not in settings_of(table) and settings_of(table)["moe_router_topk"] == 8
    for family in ("mixtral", "qwen2_moe", "qwen3_moe"):
        bare = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"} | {"model_type": family}
        whole = transformers.AutoConfig.for_model(**bare).to_dict()
        assert settings_of(bare) == settings_of(whole), family


# The command line.


def test_load_and_config_take_the_shape_of_a_folder(folders):
    folder = str(folders("mistral")[1])
    loaded, named = (
        parse(["--load", folder, "--lr", "1e-4"]),
        parse(["--config", folder, "--seq-length", "32"]),
    )
    assert not loaded.errors + named.errors
    assert loaded.config.model == named.config.model == build_config(read_folder(folder)[1]).model
    assert any("that of --load" in note for note in loaded.notes)
    assert (named.config.data.seq_length, named.config.data.vocab_size) == (32, VOCAB)
    assert (
        parse(["--load", folder, "--num-layers", "3"]).config.model.hidden_size
        == loaded.config.model.hidden_size
    )
    assert parse(["--load", "nowhere"]).preset == "tiny-cpu"
    assert parse(["--config", folder, "--num-layers", "3"]).config.model.num_layers == 3
    link = folders("mistral")[1].with_name("Llama-3.1-8B.toml")
    link.symlink_to(folder)
    assert parse(["--config", str(link)]).preset == folders("mistral")[1].name
    assert parse(["--config", "llama3-8b"]).preset == "llama3-8b"


def test_a_config_json_that_is_wrong_is_an_error_of_the_command_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "llama", "hidden_act": "gelu"}))
    (error,) = parse(["--config", str(tmp_path)]).errors
    assert error == f"{tmp_path}/config.json: hidden_act = 'gelu': here is 'silu'"

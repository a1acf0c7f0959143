"""Each key of config.json counts as for transformers, or is refused by name; transformers is the oracle.

A tiny model of each family gets another value of one key at a time (or of a few that go together), of its own
keys and of those of other families, null and left out too. transformers makes a model of that config.json;
ours with the same weights has the same logits, or our reading refuses the key.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.config.cli import build_config
from nanomegatron.config.hf import FAMILIES, settings_of
from tests.hf_models import (
    FAMILIES as MODELS,
)
from tests.hf_models import (
    LINEAR,
    LLAMA3,
    YARN,
    data,
    ours,
    random_model,
    save,
    their_logits,
    transformers,
)

# What no model of text reads, or only its training: any value passes.
UNREAD = """
transformers_version architectures output_hidden_states return_dict chunk_size_feed_forward is_encoder_decoder
id2label label2id problem_type use_cache bos_token_id eos_token_id pad_token_id pretraining_tp
resid_pdrop embd_pdrop attn_pdrop attention_dropout router_jitter_noise router_aux_loss_coef
output_router_logits reorder_and_upcast_attn
summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
""".split()
# What transformers' code for all models reads of any config.json that has it: no field of its class.
OF_ANY = """
torch_dtype is_causal per_layer_config quantization_config rope_scaling rope_theta partial_rotary_factor
original_max_position_embeddings head_dim layer_types rope_local_base_freq sliding_window_pattern
""".split()
ROTARY = [family for family in FAMILIES if family != "gpt2"]
TYPES = ["sliding_attention", "full_attention"]
DEFAULT = {"rope_type": "default", "rope_theta": 300.0}
OLD = {"type": "linear", "factor": 8.0}
# Other values of keys whose type says too little.
VALUES = {
    "activation_function": ["gelu", "relu2", "relu", "silu"],
    "hidden_act": ["gelu", "gelu_pytorch_tanh", "relu2"],
    "hidden_activation": ["gelu", "silu"],
    "dtype": ["bfloat16", "float16", "float64"],
    "torch_dtype": ["bfloat16", "float64"],
    "head_dim": [8, 12, 16, 0],
    "hidden_size": [48, 40, 0],
    "num_attention_heads": [2, 8, 0],
    "num_key_value_heads": [1, 4, 3, 0],
    "n_head": [2, 8],
    "num_hidden_layers": [1, 3, 4, 0],
    "n_inner": [40, 0],
    "initializer_range": [0.5],
    "is_causal": [False, True],
    "layer_types": [TYPES, TYPES[::-1], TYPES[:1] * 2, TYPES[1:] * 2, TYPES * 2, TYPES[1:]],
    "max_window_layers": [0, 1, 2, 28],
    "mlp_only_layers": [[0], [1], [], [7]],
    "no_rope_layers": [[0, 1], [1, 0, 1, 1, 0, 0], [], [1]],
    "num_experts_per_tok": [1, 2],
    "original_max_position_embeddings": [16, 4096],
    "partial_rotary_factor": [0.5, 0.0, 1.0],
    "per_layer_config": [{"0": {"intermediate_size": 24}}],
    "quantization_config": [{"quant_method": "fp8"}],
    "rope_local_base_freq": [50.0, 0],
    "rope_parameters": [{}, DEFAULT, YARN, LLAMA3, LINEAR, OLD, DEFAULT | {"partial_rotary_factor": 0.0}],
    "rope_scaling": [{}, DEFAULT, YARN, LLAMA3, LINEAR, OLD, {"type": "dynamic", "factor": 2.0}],
    "rope_theta": [50.0, 1e6, 0],
    "sliding_window": [3, 9, 0],
    "sliding_window_pattern": [2, 3, 1, 0],
    "use_bidirectional_attention": [True, False],
}
# A few keys together.
TOGETHER = [
    {"rope_scaling": scaling, "rope_parameters": parameters} | beside
    for scaling, parameters in [
        (LINEAR, DEFAULT), (OLD, YARN), (YARN, LINEAR), (DEFAULT, LINEAR), ({}, LINEAR), (None, YARN),
        (OLD, None),
    ]
    for beside in ({}, {"rope_theta": 77.0})
]  # fmt: skip
TOGETHER += [
    {"rope_parameters": rope} | beside
    for rope in (YARN, LLAMA3, {"type": "yarn", "factor": 4.0})
    for beside in (
        {"original_max_position_embeddings": 8, "rope_theta": 77.0},
        {"original_max_position_embeddings": 8192, "max_position_embeddings": 16384},
        {"max_position_embeddings": 16384},
    )
]
TOGETHER += [
    {"rope_parameters": YARN | change}
    for change in [
        {"truncate": None}, {"truncate": False}, {"beta_fast": 0}, {"beta_slow": None}, {"mscale": 0.7},
        {"mscale": 0.7, "mscale_all_dim": 1.1}, {"attention_factor": None}, {"attention_factor": 1.0},
        {"original_max_position_embeddings": None}, {"rope_theta": None}, {"partial_rotary_factor": 0.5},
    ]
]  # fmt: skip
TOGETHER += [
    {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": DEFAULT}},
    {"rope_parameters": {"full_attention": DEFAULT}, "rope_scaling": OLD, "rope_theta": 77.0},
    {"rope_parameters": {"full_attention": {}}, "rope_scaling": OLD, "rope_local_base_freq": 77.0},
    {"rope_parameters": {"sliding_attention": DEFAULT}, "rope_theta": 77.0},
    {"rope_parameters": {"full_attention": YARN | {"truncate": False}, "sliding_attention": DEFAULT}},
    {"rope_parameters": {"full_attention": YARN}, "original_max_position_embeddings": 8},
    {"rope_parameters": None, "rope_scaling": LINEAR, "rope_theta": 77.0, "rope_local_base_freq": 50.0},
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": None},
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0, "layer_types": None},
    {"use_sliding_window": True, "sliding_window": 5, "layer_types": TYPES},
    {"use_sliding_window": True, "sliding_window": None, "layer_types": None},
    {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0, "layer_types": None},
    {"sliding_window_pattern": 1, "sliding_window": 5, "layer_types": None},
    {"sliding_window_pattern": 3, "num_hidden_layers": 4, "layer_types": None},
    {"num_experts": 3, "num_local_experts": 4},
    {"n_embd": 48, "hidden_size": 32},
    {"mlp_only_layers": None, "decoder_sparse_step": 0},
    {"dtype": None, "torch_dtype": "bfloat16"},
]
# Those of one family each whose reading was another once.
ONCE_WRONG = {
    "gpt2": {"hidden_size": 48},
    "llama": {"is_causal": False},
    "mistral": {"max_window_layers": 1},
    "qwen2": {"sliding_window_pattern": 2, "layer_types": None},
    "qwen3": {"rope_scaling": OLD, "rope_parameters": DEFAULT},
    "mixtral": {"norm_topk_prob": False},
    "qwen2_moe": {"rope_scaling": OLD, "rope_parameters": YARN},
    "qwen3_moe": {"num_experts": 3, "num_local_experts": 4},
    "phi3": {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.0}},
    "smollm3": {
        "rope_parameters": LLAMA3,
        "original_max_position_embeddings": 4096,
        "max_position_embeddings": 16384,
    },
    "granite": {"rope_parameters": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 8},
    "olmo2": {"rope_parameters": YARN, "original_max_position_embeddings": 4096},
    "gemma2": {"rope_scaling": LINEAR, "rope_parameters": DEFAULT},
    "gemma3_text": {"rope_parameters": {"full_attention": DEFAULT}, "rope_scaling": LINEAR},
}


def model_of(family: str) -> str:
    """The name of the family's first tiny model."""
    return next(name for name in MODELS if name.split("-")[0] == family)


def class_of(family: str) -> type:
    return transformers.CONFIG_MAPPING[family]


def base_of(family: str) -> dict[str, Any]:
    """config.json of the family's tiny model, with all keys but those of RoPE."""
    config = transformers.AutoConfig.for_model(family, **MODELS[model_of(family)])
    table = json.loads(config.to_json_string(use_diff=False))
    if family in ROTARY:
        table.pop("rope_parameters")
    if family == "phi3":
        table["partial_rotary_factor"] = 0.5
    return table


def read_by(family: str) -> set[str]:
    entry = FAMILIES[family]
    keys = {key.rstrip("?") for key in entry["keys"].values()}
    return keys | {*entry["left_out"], *entry["nullable"], *entry["only"], *entry.get("aliases", ())}


def others(key: str, now: Any) -> list[Any]:
    """Other values of a key."""
    if key in VALUES:
        return VALUES[key]
    if isinstance(now, bool):
        return [not now]
    if isinstance(now, int | float):
        return [now + 1, 2 * now, type(now)(0)]
    return [True, False, 2, 0.5]


def changes(family: str) -> Iterator[tuple[dict[str, Any], str | None]]:
    """(keys that change, a key that is left out)"""
    table = base_of(family)
    fields = {field.name for field in dataclasses.fields(class_of(family))}
    aliases = set(FAMILIES[family].get("aliases", ()))
    foreign = {key for one in FAMILIES for key in read_by(one)} - fields - aliases - set(OF_ANY)
    for key in sorted(fields | aliases | set(OF_ANY) | foreign):
        now = table.get(key)
        values = [value for value in [*others(key, now), None] if value != now or key not in table]
        values = values[:1] if key in foreign or key in UNREAD else values
        yield from (({key: value}, None) for value in values)
        if key in table:
            yield {}, key
    yield from ((change, None) for change in TOGETHER if family in ROTARY or "n_embd" in change)


class Case:
    """A family's base model: its config.json, settings and the logits of transformers."""

    def __init__(self, family: str, folder) -> None:
        self.family, self.folder = family, folder
        self.settings = settings_of(base_of(family))

    @functools.cached_property
    def logits(self) -> torch.Tensor:
        """Those of the base model, which ours has too."""
        table = base_of(self.family)
        model, logits = self.theirs(table)
        assert self.error(table, model, logits) <= 1e-4
        return logits

    def theirs(self, table: dict[str, Any]) -> tuple[Any, torch.Tensor] | None:
        """transformers' model, and its logits; None if it makes none of this."""
        apart = ("model_type", "dtype", "torch_dtype")  # always in fp32
        keys = {key: value for key, value in table.items() if key not in apart}
        try:
            model = random_model(self.family, json.loads(json.dumps(keys)), seed=3).float()
            return model, their_logits(self.name(table), model)
        except Exception:  # of many kinds
            return None

    @staticmethod
    def name(table: dict[str, Any]) -> str:
        return "llama-3.1" if (table.get("max_position_embeddings") or 0) >= 8192 else ""

    def names(self, change: dict[str, Any], left_out: str | None) -> set[str]:
        """The names of what has changed: keys, those of their tables, what they stand for, our flags."""
        entry, names = FAMILIES[self.family], {*change, *([left_out] if left_out else [])}
        for table in [*change.values()]:
            names |= table.keys() if isinstance(table, dict) else set()
        names |= {key for name, key in entry.get("aliases", {}).items() if name in names}
        flags = {key.rstrip("?"): name for name, key in entry["keys"].items()}
        return names | {flags[name].replace("_", "-") for name in names & flags.keys()}

    def problem(self, change: dict[str, Any], left_out: str | None) -> str | None:
        """What is wrong with our reading of the changed config.json, if anything is."""
        table = base_of(self.family) | change
        table.pop(left_out, None)
        try:
            settings = settings_of(table)
            build_config(settings)
        except ValueError as error:
            named = any(name in str(error) for name in self.names(change, left_out))
            return None if named or not self.theirs(table) else f"refused without its name: {error}"
        if (found := self.theirs(table)) is None:
            return None
        model, logits = found
        same = settings == self.settings and logits.shape == self.logits.shape
        error = difference(self.logits, logits) if same else self.error(table, model, logits)
        return None if error <= 1e-4 else f"logits differ by {error:.2g}"

    def error(self, table: dict[str, Any], model: Any, logits: torch.Tensor) -> float:
        """How much our logits differ from those of transformers' model of this config.json."""
        save(model, self.folder)
        (self.folder / "config.json").write_text(json.dumps(table))
        tokens, _, positions = data(self.name(table))
        found = ours(self.folder)(Batch(tokens, positions))[..., : logits.shape[-1]].transpose(0, 1)
        return difference(found, logits)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, relative to the largest value expected."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", ONCE_WRONG)
@torch.no_grad()
def test_keys_that_were_read_otherwise(tmp_path, family):
    assert Case(family, tmp_path).problem(ONCE_WRONG[family], None) is None


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_key_counts_as_for_transformers(tmp_path, family):
    case, wrong = Case(family, tmp_path), []
    for change, left_out in changes(family):
        if problem := case.problem(change, left_out):
            wrong.append(f"{change or 'without ' + left_out}: {problem}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_keys_read_and_their_defaults_are_those_of_transformers_class(family):
    """Every field of the class is read or does not count, no other is; defaults are the class's own."""
    entry, kind = FAMILIES[family], class_of(family)
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    aliases = entry.get("aliases", {})
    assert fields.keys() - read_by(family) <= set(UNREAD)
    assert read_by(family) - fields.keys() - set(aliases) <= set(OF_ANY)
    assert {
        **aliases,
        **dict.fromkeys(kind.attribute_map),
    }.keys() - fields.keys() == aliases.keys() - fields.keys()
    defaults = entry["left_out"] | dict.fromkeys(set(entry["nullable"]) - entry["left_out"].keys())
    for key in fields.keys() & defaults.keys():
        assert defaults[key] == fields[key], key
    for key in fields.keys() & entry["only"].keys():
        allowed = entry["only"][key]
        assert fields[key] in allowed or (fields[key] is None and (not allowed or False in allowed)), key
    theta = getattr(kind, "default_theta", None)
    theta = theta if isinstance(theta, dict) else {"global": theta}
    if family in ROTARY:
        assert entry["left_out"]["rope_theta"] == theta["global"]
        assert entry["left_out"].get("rope_local_base_freq") == theta.get("local")

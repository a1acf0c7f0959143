"""Hugging Face's config.json and our settings, both ways.

    {"model_type": "llama", "num_hidden_layers": 32, "hidden_act": "silu", ...}       config.json
           |  settings_of                      ^  to_hf
           v                                   |
    {"num_layers": 32, "swiglu": True, ...}    Config

`settings_of` reads the keys that transformers reads for a family (hf_families.toml declares them), with its
defaults for missing ones, in the spellings of transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5
(rope_parameters, dtype), and refuses what this model does not compute. What transformers does not read counts
for nothing; dropout, which only training uses, is left to the run's flags. `to_hf` writes the config.json of
the first family that, read back, gives the same model.
"""

import dataclasses
import itertools
import math
import os
import tomllib
from pathlib import Path
from typing import Any

from nanomegatron.config.rules import declared
from nanomegatron.config.settings import Config, TransformerConfig
from nanomegatron.config.user_files import read_json

HF_TABLES = tomllib.loads((Path(__file__).parent / "hf_families.toml").read_text())
YARN, LLAMA3 = HF_TABLES["yarn"], HF_TABLES["llama3"]
ROPE_NAMES = {"rope_type", "type", "rope_theta"}
HF_DTYPES = {"float32": {}, "bfloat16": {"bf16": True}, "float16": {"fp16": True}}
# Prefixes of the settings that only training uses, besides the resumable ones.
TRAINING = """
hidden_dropout attention_dropout init_method_std moe_aux moe_z_loss moe_input moe_router_bias moe_router_dtype
moe_router_force moe_token moe_expert_capacity
""".split()
# Prefixes of the settings that have no effect with a type of position embedding.
UNUSED = {
    "rope": ("yarn", "mscale", "rotary_scaling"),
    "yarn": ("use_rope", "rope_scaling"),
    "none": ("yarn", "mscale", "rotary", "use_rope", "rope_scaling"),
    "learned_absolute": ("yarn", "mscale", "rotary", "use_rope", "rope_scaling"),
}
_SETTINGS = {s.name: s for _, s, _ in declared(Config())}


def _merged(entry: dict[str, Any]) -> dict[str, Any]:
    """A family's tables, with those of what it is like."""
    found = _merged((HF_TABLES["bases"] | HF_TABLES["families"])[entry["like"]]) if "like" in entry else {}
    for name, value in entry.items():
        if isinstance(value, dict):
            value = found.get(name, {}) | value
        elif name == "nullable":
            value = found.get(name, []) + value
        found[name] = value
    return found


FAMILIES = {name: _merged(entry) for name, entry in HF_TABLES["families"].items()}


def is_hf_folder(path: str | Path) -> bool:
    """Whether this is a Hugging Face folder: a config.json beside safetensors files or their index."""
    weights = ("*.safetensors", "*.safetensors.index.json")
    return os.path.isfile(Path(path) / "config.json") and any(any(Path(path).glob(w)) for w in weights)


def read_folder(folder: str | Path) -> tuple[str, dict[str, Any]]:
    """Read a folder's config.json -> its family, our settings. Raises ValueError."""
    path = Path(folder) / "config.json"
    try:
        table = read_json(path)
        settings = settings_of(table)
    except (OSError, ValueError) as error:
        lines = [line.removeprefix(f"{path}: ") for line in str(error).splitlines()]
        raise ValueError("\n".join(f"{path}: {line}" for line in lines)) from None
    return table["model_type"], settings


def settings_of(hf: dict[str, Any]) -> dict[str, Any]:
    """Return our settings for a config.json. Raises ValueError with a line for each unsupported key."""
    family, errors = hf.get("model_type"), []
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model_type = {family!r:.80}: here are {', '.join(FAMILIES)}")
    hf, settings = _heeded(hf, family), dict(FAMILIES[family].get("settings", {}))
    for key, values in FAMILIES[family]["only"].items():
        nothing = hf.get(key) is None and (not values or False in values)
        if key in hf and hf[key] not in values and not nothing:
            errors.append(f"{key} = {hf[key]!r:.80}: here is {' or '.join(map(repr, values)) or None}")
    for name, key in FAMILIES[family]["keys"].items():
        value, kind = hf.get(key.rstrip("?")), _SETTINGS[name].type
        kind = float if kind == float | None else kind
        if value is not None and _is_positive(value, kind):
            settings[name] = float(value) if kind is float else value
        elif value is not None or not key.endswith("?"):
            errors.append(f"{key.rstrip('?')} = {value!r:.80}: must be a number above 0")
    for part in (_plain, _rope, _windows, _experts) if not errors else ():
        try:
            settings |= part(hf, family)
        except (ValueError, TypeError, AttributeError) as error:
            errors.append(str(error))
    if errors:
        raise ValueError("\n".join(errors))
    return settings


def _heeded(hf: dict, family: str) -> dict[str, Any]:
    """What transformers reads of a config.json, with its defaults, and what it makes of the keys of RoPE."""
    entry = FAMILIES[family]
    hf = hf | {key: hf[other] for other, key in entry.get("aliases", {}).items() if other in hf}
    defaults = dict.fromkeys(entry["nullable"]) | entry["left_out"]
    read = {*defaults, *entry["only"], *(key.rstrip("?") for key in entry["keys"].values())}
    hf = defaults | {key: value for key, value in hf.items() if key in read}
    return _with_one_rope(hf, family) if "rope_parameters" in read else hf


def _with_one_rope(hf: dict, family: str) -> dict[str, Any]:
    """The keys of RoPE as one table under "rope", by the precedence of transformers.

    rope_scaling, if it is set, counts instead of rope_parameters (of Gemma 3: over its full_attention), and
    what is beside them only for what they leave out; but the trained length beside them counts first.
    """
    tables = {key: hf[key] or {} for key in ("rope_scaling", "rope_parameters")}
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(f"{key} = {table!r:.80}: must be a table")
    rope = tables["rope_scaling"] or tables["rope_parameters"]
    trained = hf["original_max_position_embeddings"]
    if family == "gemma3_text":
        rope, local = _rope_of_gemma3(**tables)
        hf = hf | {"rope_local_base_freq": local.get("rope_theta", hf["rope_local_base_freq"])}
        trained = None
    rope = {"rope_theta": hf["rope_theta"], "rope_type": rope.get("type", "default")} | rope
    rope.pop("type", None)
    share = rope.pop("partial_rotary_factor", hf["partial_rotary_factor"])
    if share not in (None, 1) and "rotary_percent" not in FAMILIES[family]["keys"]:
        raise ValueError(f"partial_rotary_factor = {share!r:.80}: here is 1.0")
    if trained is not None:
        rope["original_max_position_embeddings"] = trained
    rope.setdefault("original_max_position_embeddings", hf.get("max_position_embeddings"))
    return hf | {"partial_rotary_factor": share, "rope": rope}


def _rope_of_gemma3(rope_scaling: dict, rope_parameters: dict) -> tuple[dict, dict]:
    """The tables of its layers without and with a window. Raises ValueError."""
    names = ("full_attention", "sliding_attention")
    if strange := rope_parameters.keys() - set(names):
        raise ValueError(
            f"rope_parameters with {', '.join(sorted(strange))}: here with {' and '.join(names)}"
        )
    default = {"rope_type": "default"}
    full, local = (default if rope_parameters.get(n) is None else rope_parameters[n] for n in names)
    if not isinstance(full, dict) or not isinstance(local, dict):
        raise ValueError(f"rope_parameters = {rope_parameters!r:.80}: must be tables")
    if local.get("rope_type", local.get("type", "default")) != "default" or local.keys() - ROPE_NAMES:
        raise ValueError(f"sliding_attention {local}: here with rope_type = 'default'")
    full = full | rope_scaling
    if not full.get("truncate", True):
        raise ValueError(f"full_attention with truncate = {full['truncate']!r:.80}: here is True")
    return full, local


def _is_positive(value: Any, kind: Any) -> bool:
    numbers = int | float if kind is float else int
    return isinstance(value, numbers) and not isinstance(value, bool) and 0 < value < 2**63


def _positive(key: str, value: Any, kind: Any) -> Any:
    """Return the value of a key. Raises ValueError if it is no number above 0."""
    if not _is_positive(value, kind):
        raise ValueError(f"{key} = {value!r:.80}: must be a number above 0")
    return value


def _plain(hf: dict, family: str) -> dict[str, Any]:
    """The settings of precision, activation, tied weights, biases (Llama: in all linear layers or none)."""
    key = "torch_dtype" if hf["dtype"] is None else "dtype"
    dtype = str(hf[key] or "float32").removeprefix("torch.")
    if dtype not in HF_DTYPES:
        raise ValueError(f"{key} = {dtype!r}: here are {', '.join(HF_DTYPES)}")
    biases = {key: bool(hf.get(key)) for key in ("attention_bias", "mlp_bias")}
    both = FAMILIES[family].get("biases", False)
    if any(biases.values()) and not (all(biases.values()) and both):
        given = ", ".join(f"{key} = {value}" for key, value in biases.items())
        raise ValueError(f"{given}: here is a {family} without{' either or with both' * both}")
    settings = HF_DTYPES[dtype] | {"untie_embeddings_and_output_weights": not hf["tie_word_embeddings"]}
    if family.startswith("gemma"):
        width = _positive("query_pre_attn_scalar", hf["query_pre_attn_scalar"], float)
        settings |= {"embedding_multiplier": math.sqrt(hf["hidden_size"]), "softmax_scale": width**-0.5}
    if family == "gpt2":
        kind = hf["activation_function"]
        return settings | {"squared_relu": kind == "relu2", "bias_gelu_fusion": kind != "gelu"}
    return settings | {"disable_bias_linear": not any(biases.values())}


def _rope(hf: dict, family: str) -> dict[str, Any]:
    """The rotary settings."""
    if "rope" not in hf:
        return {}
    rope = dict(hf["rope"])
    base = _positive("rope_theta", rope.pop("rope_theta"), float)
    kind = rope.pop("rope_type")
    kinds = FAMILIES[family].get("rope", list(HF_TABLES["rope"]))
    if kind not in kinds:
        raise ValueError(f"rope_type = {kind!r}: here are {', '.join(kinds)}")
    if kind != "default" and not _is_positive(rope.get("factor"), float):
        raise ValueError(f"rope_type = {kind!r}, factor = {rope.get('factor')!r}: must be above 0")
    known = {*HF_TABLES["rope"][kind], "original_max_position_embeddings"}
    if strange := {key for key, value in rope.items() if value is not None} - known:
        raise ValueError(f"rope_type = {kind!r} with {', '.join(sorted(strange))}: here without")
    settings = {"position_embedding_type": "rope", "rotary_base": float(base)}
    if family == "smollm3":
        settings |= _without_rope(hf)
    if kind == "llama3":
        if wrong := {key: rope.get(key) for key, value in LLAMA3.items() if rope.get(key) != value}:
            raise ValueError(f"rope_type = 'llama3' with {wrong}: here with {LLAMA3}")
        settings |= {"use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    elif kind == "linear":
        settings["rotary_seq_len_interpolation_factor"] = float(rope["factor"])
    return settings | (_yarn(rope) if kind == "yarn" else {})


def _without_rope(hf: dict) -> dict[str, Any]:
    """The layers without rotary embedding: a list with a 0 for each, or else each of an interval."""
    layers = hf["num_hidden_layers"]
    every = _positive("no_rope_layer_interval", hf["no_rope_layer_interval"], int)
    rotated = hf["no_rope_layers"]
    if rotated is None:
        rotated = [int((i + 1) % every != 0) for i in range(layers)]
    if len(rotated) < layers or not set(rotated) <= {0, 1}:
        raise ValueError(f"no_rope_layers = {rotated!r:.80}: here are 1 and 0, one a layer")
    rotated = rotated[:layers]
    return {} if all(rotated) else {"no_rope_freq": _pattern([not yes for yes in rotated])}


def _yarn(rope: dict) -> dict[str, Any]:
    weights = ("mscale", "mscale_all_dim")  # only both together count
    unset = {key for key in ("beta_fast", "beta_slow") if not rope.get(key)}  # 0 too
    unset |= set(weights) if not all(rope.get(key) for key in weights) else set()
    defaults = {key: _SETTINGS[name].default for key, name in YARN.items()}
    values = defaults | {key: value for key, value in rope.items() if key not in unset}
    _positive("original_max_position_embeddings", values["original_max_position_embeddings"], int)
    up, down = (1 + 0.1 * values[key] * math.log(max(values["factor"], 1)) for key in weights)
    given = rope.get("attention_factor")
    if given is not None and not math.isclose(given, up / down, rel_tol=1e-6):
        raise ValueError(f"attention_factor = {given}: here is {up / down} for factor {values['factor']}")
    settings = {name: type(defaults[key])(values[key]) for key, name in YARN.items()}
    return settings | {"position_embedding_type": "yarn"}


def _windows(hf: dict, family: str) -> dict[str, Any]:
    """The sliding window and its layers. Hugging Face's width counts the query's own key, ours does not."""
    layers, kinds = hf.get("num_hidden_layers", 0), hf.get("layer_types")
    window, chosen = FAMILIES[family].get("window"), FAMILIES[family].get("layer_types")
    on = window == "always" or (window == "switch" and hf["use_sliding_window"])
    width = hf["sliding_window"] if on else None
    windowed = [False] * layers
    if width is not None or family.startswith("gemma"):
        windowed = _usual_windows(hf, family, layers)
    if kinds is not None:
        known = {"full_attention": False, "sliding_attention": True}
        asked = [known.get(kind) for kind in kinds]
        if None in asked or len(asked) != layers or (not chosen and asked != windowed):
            raise ValueError(f"layer_types = {kinds!r:.80}: here are {' and '.join(known)}, one a layer")
        windowed = asked
    if not any(windowed):
        return {"rotary_base_local": None} if "rope_local_base_freq" in hf else {}
    _positive("sliding_window", width, int)
    pattern = {} if all(windowed) else {"window_attn_skip_freq": _pattern(windowed)}
    return {"window_size": (width - 1, 0)} | pattern


def _usual_windows(hf: dict, family: str, layers: int) -> list[bool]:
    """Whether each layer has the window where layer_types does not say it."""
    bound = hf.get("max_window_layers", 0)
    if family == "qwen2_moe":
        return [i % 2 == 0 and i < bound for i in range(layers)]
    if family.startswith("gemma"):
        every = _positive("sliding_window_pattern", hf.get("sliding_window_pattern", 2), int)
        return [(i + 1) % every != 0 for i in range(layers)]
    return [i >= bound for i in range(layers)]


def _experts(hf: dict, family: str) -> dict[str, Any]:
    """Which layers have experts, and whether the weights of those chosen sum to 1, as Mixtral's do."""
    if "num_experts" not in FAMILIES[family]["keys"]:
        return {}
    dense = hf.get("mlp_only_layers")
    step = hf.get("decoder_sparse_step", 1)
    if not isinstance(dense, list | None):
        raise ValueError(f"mlp_only_layers = {dense!r:.80}: must be a list of layers")
    _positive("decoder_sparse_step", step, int)
    experts, chosen = (FAMILIES[family]["keys"][name] for name in ("num_experts", "moe_router_topk"))
    if hf[chosen] > hf[experts]:
        raise ValueError(f"{chosen} = {hf[chosen]}: must be at most {experts} = {hf[experts]}")
    on = [i not in (dense or ()) and (i + 1) % step == 0 for i in range(hf["num_hidden_layers"])]
    settings = {} if all(on) else {"moe_layer_freq": _pattern(on)}
    return settings | {"moe_router_pre_softmax": not hf.get("norm_topk_prob", True)}


def _pattern(layers: list[bool]) -> str:
    """The layers as Megatron's list: two True and a False are "[1]*2+[0]*1"."""
    return "+".join(f"[{int(on)}]*{len(list(group))}" for on, group in itertools.groupby(layers))


def to_hf(config: Config, eod: int | None = None) -> dict[str, Any]:
    """The config.json of a resolved run's model; `eod`: the token that ends a document.

    Raises ValueError, with the settings that differ, if no family computes the same.
    """
    wanted, in_the_way = effective(config.model), {}
    # Without its key a family may have a padding token that this vocabulary has not.
    tokens = {"bos_token_id": eod, "eos_token_id": eod, "pad_token_id": None}
    for family in FAMILIES:
        hf = _written(config, family) | tokens
        keys = FAMILIES[family]["keys"].items()
        if any(hf[key] is None for name, key in keys if name.startswith(("num_experts", "moe"))):
            continue  # a family with experts, or shared ones
        if hf.get("rope_scaling") and "rope" in FAMILIES[family]:
            continue  # a family whose RoPE cannot be scaled
        settings = settings_of(hf)
        fields = {f.name for f in dataclasses.fields(TransformerConfig)} & settings.keys()
        found = effective(TransformerConfig(**{name: settings[name] for name in fields}))
        in_the_way[family] = [f"{k} = {v!r:.80}" for k, v in wanted.items() if found.get(k) != v]
        if not in_the_way[family]:
            return hf
    near, what = min(in_the_way.items(), key=lambda item: len(item[1]))
    raise ValueError(f"no Hugging Face family here has this model; {near} is without {', '.join(what)}")


def _written(config: Config, family: str) -> dict[str, Any]:
    """This model's config.json as `family`, in the spelling of transformers 4, which 5 reads too."""
    model, windows = config.model, config.model.windows
    values = vars(model) | effective(model) | {"vocab_size": config.data.vocab_size}
    values["ffn_hidden_size"] = model.moe_ffn_size if family == "mixtral" else model.ffn_size
    values["rotary_base_local"] = values["rotary_base_local"] or model.rotary_base
    hf = {
        "architectures": [FAMILIES[family]["class"]],
        "model_type": family,
        "torch_dtype": config.dtype_name,
        **{key.rstrip("?"): values[name] for name, key in FAMILIES[family]["keys"].items()},
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }
    if family == "gpt2":
        gelu = "gelu_new" if model.tanh_gelu else "gelu"
        return hf | {"activation_function": "relu2" if model.squared_relu else gelu}
    only = FAMILIES[family]["only"]
    hf |= {key: only[key][0] for key in ("hidden_act", "hidden_activation") if key in only}
    hf |= {"rope_theta": model.rotary_base, "rope_scaling": None}
    if family.startswith("gemma"):
        hf["query_pre_attn_scalar"] = max(round(values["softmax_scale"] ** -2), 1)
    if family == "smollm3":
        hf["no_rope_layers"] = [int(kind is not None) for kind in model.rotary_kinds]
    if model.position_embedding_type == "yarn":
        hf["rope_scaling"] = {"rope_type": "yarn"} | {key: getattr(model, name) for key, name in YARN.items()}
    elif model.use_rope_scaling:
        hf["rope_scaling"] = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **LLAMA3}
    elif (factor := model.rotary_seq_len_interpolation_factor) != 1:
        hf["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    if FAMILIES[family].get("biases"):
        hf |= dict.fromkeys(("attention_bias", "mlp_bias"), not model.disable_bias_linear)
    if not (window := FAMILIES[family].get("window")):
        return hf
    width = next((window + 1 for window in windows if window is not None), None)
    hf["sliding_window"] = width
    if window == "always" and not FAMILIES[family].get("layer_types"):
        return hf
    if model.num_experts:
        dense = [i for i, experts in enumerate(model.moe_layers) if not experts]
        hf |= {"norm_topk_prob": not model.moe_router_pre_softmax, "mlp_only_layers": dense}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    if family.startswith("gemma"):  # which wants a width even where no layer has a window
        return hf | {"layer_types": kinds, "sliding_window": width or model.max_position_embeddings}
    first = kinds.index("sliding_attention") if width else model.num_layers
    return hf | {"use_sliding_window": bool(width), "max_window_layers": first, "layer_types": kinds}


def effective(model: TransformerConfig) -> dict[str, Any]:
    """Return the settings on which the model's function depends, with derived ones filled in."""
    resumable = (name for name, s in _SETTINGS.items() if s.metadata["resumable"])
    kinds = model.rotary_kinds
    unused = ("window_attn", *TRAINING, *resumable, *UNUSED[model.position_embedding_type])
    if not model.use_rope_scaling:
        unused += ("rope_scaling",)
    values = {k: v for k, v in dataclasses.asdict(model).items() if not k.startswith(unused)}
    if model.num_experts:
        values |= {
            "moe_layer_freq": model.moe_layers,
            "moe_ffn_hidden_size": model.moe_ffn_size,
            "moe_router_load_balancing_type": "sinkhorn" in model.moe_router_load_balancing_type,
            "moe_router_topk_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        }
    else:
        values = {k: v for k, v in values.items() if not k.startswith("moe")}
    return values | {
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": None if all(model.moe_layers) else model.ffn_size,
        "add_qkv_bias": model.add_qkv_bias or not model.disable_bias_linear,
        "squared_relu": model.squared_relu and not model.gated,
        "bias_gelu_fusion": model.tanh_gelu and not (model.gated or model.squared_relu),
        "window_size": model.windows,
        "no_rope_freq": [kind is None for kind in kinds],
        "rotary_base_local": model.rotary_base_local if "local" in kinds else None,
        "softmax_scale": model.softmax_scale or model.head_dim**-0.5,
    }

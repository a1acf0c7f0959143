"""Hugging Face's config.json and our settings, both ways.

    {"model_type": "llama", "num_hidden_layers": 32, "hidden_act": "silu", ...}       config.json
           |  settings_of                      ^  to_hf
           v                                   |
    {"num_layers": 32, "swiglu": True, ...}    Config

`settings_of` reads the spellings of transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5
(rope_parameters, dtype), fills in a family's defaults for missing keys, and refuses what this model does
not compute; dropout, which only training uses, is left to the run's flags. `to_hf` writes the
config.json of the first family that, read back, gives the same model.
"""

import dataclasses
import itertools
import json
import math
import tomllib
from pathlib import Path
from typing import Any

from nanomegatron.config.rules import declared
from nanomegatron.config.settings import Config, TransformerConfig

HF_TABLES = tomllib.loads((Path(__file__).parent / "hf_families.toml").read_text())
FAMILIES, YARN, LLAMA3 = HF_TABLES["families"], HF_TABLES["yarn"], HF_TABLES["llama3"]
HF_DTYPES = {"float32": {}, "bfloat16": {"bf16": True}, "float16": {"fp16": True}}
# Prefixes of the settings that only training uses, besides the resumable ones.
TRAINING = """
hidden_dropout attention_dropout init_method_std moe_aux moe_z_loss moe_input moe_router_bias moe_router_dtype
moe_router_force moe_token moe_expert_capacity
""".split()
_SETTINGS = {s.name: s for _, s, _ in declared(Config())}


def family_table(family: str, table: str) -> dict[str, Any]:
    """Return a family's table settings, keys or left_out, with the entries of the family that it is like."""
    entry = FAMILIES[family]
    return FAMILIES.get(entry.get("like"), {}).get(table, {}) | entry.get(table, {})


def is_hf_folder(path: str | Path) -> bool:
    """Whether this is a Hugging Face folder: a config.json beside safetensors files or their index."""
    weights = ("*.safetensors", "*.safetensors.index.json")
    return (Path(path) / "config.json").is_file() and any(any(Path(path).glob(w)) for w in weights)


def read_folder(folder: str | Path) -> tuple[str, dict[str, Any]]:
    """Read a folder's config.json -> its family, our settings. Raises ValueError."""
    path = Path(folder) / "config.json"
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        settings = settings_of(table if isinstance(table, dict) else {})
    except (OSError, ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError("\n".join(f"{path}: {line}" for line in why.splitlines())) from None
    return table["model_type"], settings


def settings_of(hf: dict[str, Any]) -> dict[str, Any]:
    """Return our settings for a config.json. Raises ValueError with a line for each unsupported key."""
    family, errors = hf.get("model_type"), []
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model_type = {family!r:.80}: here are {', '.join(FAMILIES)}")
    hf, settings = family_table(family, "left_out") | _flat(hf, family), family_table(family, "settings")
    read = {key.rstrip("?") for key in family_table(family, "keys").values()}
    for key, values in (HF_TABLES["only"] | family_table(family, "only")).items():
        if (value := hf.get(key)) is not None and value not in values and key not in read:
            errors.append(f"{key} = {value!r:.80}: here is {' or '.join(map(repr, values)) or None}")
    for name, key in family_table(family, "keys").items():
        value, kind = hf.get(key.rstrip("?")), _SETTINGS[name].type
        kind = float if kind == float | None else kind
        if value is not None and _positive(value, kind):
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


def _flat(hf: dict, family: str) -> dict[str, Any]:
    """What transformers 5 writes otherwise, under the keys of 4: experts, and what is in rope_parameters."""
    if family.endswith("moe") and "num_local_experts" in hf:
        hf = {"num_experts": hf["num_local_experts"]} | hf
    rope = hf.get("rope_parameters")
    if not isinstance(rope, dict):
        return hf
    full, local = rope.get("full_attention"), rope.get("sliding_attention") or {}
    if isinstance(full, dict) and isinstance(local, dict):
        if local.get("rope_type", "default") != "default":
            raise ValueError(f"sliding_attention {local}: here with rope_type = 'default'")
        theta = local.get("rope_theta", hf.get("rope_local_base_freq"))
        hf, rope = hf | {"rope_local_base_freq": theta} if theta else hf, full
    rope = dict(rope)
    if share := rope.pop("partial_rotary_factor", None):
        hf = hf | {"partial_rotary_factor": share}
    return hf | {"rope_parameters": rope}


def _positive(value: Any, kind: Any) -> bool:
    numbers = int | float if kind is float else int
    return isinstance(value, numbers) and not isinstance(value, bool) and 0 < value < 2**63


def _plain(hf: dict, family: str) -> dict[str, Any]:
    """The settings of precision, activation, tied weights, biases (Llama: in all linear layers or none)."""
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in HF_DTYPES:
        raise ValueError(f"dtype = {dtype!r}: here are {', '.join(HF_DTYPES)}")
    biases = {key: bool(hf.get(key)) for key in ("attention_bias", "mlp_bias")}
    both = FAMILIES[family].get("biases", False)
    if any(biases.values()) and not (all(biases.values()) and both):
        given = ", ".join(f"{key} = {value}" for key, value in biases.items())
        raise ValueError(f"{given}: here is a {family} without{' either or with both' * both}")
    settings = HF_DTYPES[dtype] | {"untie_embeddings_and_output_weights": not hf.get("tie_word_embeddings")}
    if family.startswith("gemma"):
        if not _positive(width := hf["query_pre_attn_scalar"], float):
            raise ValueError(f"query_pre_attn_scalar = {width!r:.80}: must be a number above 0")
        settings |= {"embedding_multiplier": math.sqrt(hf["hidden_size"]), "softmax_scale": width**-0.5}
    if family == "gpt2":
        kind = hf["activation_function"]
        which = {"squared_relu": True} if kind == "relu2" else {"bias_gelu_fusion": kind != "gelu"}
        return settings | {"squared_relu": False} | which
    return settings | {"disable_bias_linear": not any(biases.values())}


def _rope(hf: dict, family: str) -> dict[str, Any]:
    """The rotary settings: rope_parameters of transformers 5, or else rope_scaling and rope_theta of 4."""
    if family == "gpt2":
        return {}
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    base = rope.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0
    kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", kind)
    if kind not in HF_TABLES["rope"]:
        raise ValueError(f"rope_type = {kind!r}: here are {', '.join(HF_TABLES['rope'])}")
    if "original_max_position_embeddings" in HF_TABLES["rope"][kind]:
        rope.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
    if kind != "default" and not _positive(rope.get("factor"), float):
        raise ValueError(f"rope_type = {kind!r}, factor = {rope.get('factor')!r}: must be above 0")
    rope = {key: value for key, value in rope.items() if value is not None}
    if strange := rope.keys() - HF_TABLES["rope"][kind]:
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
    layers, every = hf["num_hidden_layers"], hf["no_rope_layer_interval"]
    if not _positive(every, int):
        raise ValueError(f"no_rope_layer_interval = {every!r:.80}: must be a number above 0")
    rotated = hf.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    if len(rotated) < layers or not set(rotated) <= {0, 1}:
        raise ValueError(f"no_rope_layers = {rotated!r:.80}: here are 1 and 0, one a layer")
    rotated = rotated[:layers]
    return {} if all(rotated) else {"no_rope_freq": _pattern([not yes for yes in rotated])}


def _yarn(rope: dict) -> dict[str, Any]:
    weights = ("mscale", "mscale_all_dim")  # only both together count
    if not all(rope.get(key) for key in weights):
        rope = {key: value for key, value in rope.items() if key not in weights}
    defaults = {key: _SETTINGS[name].default for key, name in YARN.items()}
    values = defaults | rope
    up, down = (1 + 0.1 * values[key] * math.log(max(values["factor"], 1)) for key in weights)
    if not math.isclose(given := rope.get("attention_factor", up / down), up / down, rel_tol=1e-6):
        raise ValueError(f"attention_factor = {given}: here is {up / down} for factor {values['factor']}")
    settings = {name: type(defaults[key])(values[key]) for key, name in YARN.items()}
    return settings | {"position_embedding_type": "yarn"}


def _windows(hf: dict, family: str) -> dict[str, Any]:
    """The sliding window and its layers. Hugging Face's width counts the query's own key, ours does not."""
    layers, kinds = hf.get("num_hidden_layers", 0), hf.get("layer_types")
    window, every = FAMILIES[family].get("window"), hf.get("sliding_window_pattern", 0)
    on = window == "always" or (window == "switch" and hf.get("use_sliding_window"))
    width = hf.get("sliding_window") if on else None
    first = 0 if family == "qwen3_moe" else hf.get("max_window_layers", 0)
    windowed = [width is not None and i >= first for i in range(layers)]
    if every:
        windowed = [(i + 1) % every != 0 for i in range(layers)]
    if kinds is not None or (family == "qwen2_moe" and width is not None):
        known = {"full_attention": False, "sliding_attention": True}
        asked = [known.get(kind) for kind in kinds or ()]
        fixed = not FAMILIES[family].get("layer_types")
        if None in asked or len(asked) != layers or (fixed and asked != windowed):
            raise ValueError(f"layer_types = {kinds!r:.80}: here are {' and '.join(known)}, one a layer")
        windowed = asked
    if not any(windowed):
        return {"rotary_base_local": None} if every else {}
    if not _positive(width, int):
        raise ValueError(f"sliding_window = {width!r}: must be a number above 0")
    pattern = {} if all(windowed) else {"window_attn_skip_freq": _pattern(windowed)}
    return {"window_size": (width - 1, 0)} | pattern


def _experts(hf: dict, family: str) -> dict[str, Any]:
    """Which layers have experts, and whether the weights of those chosen sum to 1, as Mixtral's do."""
    if "num_experts" not in family_table(family, "keys"):
        return {}
    dense, step = hf.get("mlp_only_layers") or (), hf.get("decoder_sparse_step") or 1
    on = [i not in dense and (i + 1) % step == 0 for i in range(hf["num_hidden_layers"])]
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
        keys = family_table(family, "keys").items()
        if any(hf[key] is None for name, key in keys if name.startswith(("num_experts", "moe"))):
            continue  # a family with experts, or shared ones
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
    hf = {"architectures": [FAMILIES[family]["class"]], "model_type": family}
    hf["torch_dtype"] = config.dtype_name
    hf |= {key.rstrip("?"): values[name] for name, key in family_table(family, "keys").items()}
    hf["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
    if family == "gpt2":
        gelu = "gelu_new" if model.tanh_gelu else "gelu"
        return hf | {"activation_function": "relu2" if model.squared_relu else gelu}
    only = HF_TABLES["only"] | family_table(family, "only")
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
    kind, unused = model.position_embedding_type, ("window_attn", *TRAINING, *resumable)
    unused += () if kind == "yarn" else ("yarn", "mscale", "rotary_scaling")
    unused += () if kind == "rope" else ("use_rope",)
    unused += () if kind == "rope" and model.use_rope_scaling else ("rope_scaling",)
    unused += () if kind in ("rope", "yarn") else ("rotary",)
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

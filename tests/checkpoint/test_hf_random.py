"""Drawn configurations of every family: Hugging Face -> ours -> Hugging Face; transformers is the oracle.

A draw takes sizes, heads, biases, positions, windows, experts and ties that the family has, the type of the
weights, one file or several, the keys of transformers 4 or 5, and leaves out keys that are at their default.
"""

import contextlib
import io
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import convert
from nanomegatron.batch import Batch
from nanomegatron.checkpoint.checkpoint import load, save
from nanomegatron.checkpoint.files import Piece
from nanomegatron.commands.generate import load_model
from nanomegatron.config.cli import from_toml, to_toml
from nanomegatron.config.hf import FAMILIES
from tests.checkpoints import ALONE
from tests.hf_models import LLAMA3, old_spelling, random_model, transformers
from tests.hf_models import save as save_theirs

LENGTH = 24
DRAWS = [(seed, sorted(FAMILIES)[seed % len(FAMILIES)]) for seed in range(30)]
FAST = (4, 8, 10, 13, 28, 29)
# Keys that stay even where they are at their default.
KEPT = {
    "model_type",
    "architectures",
    "dtype",
    "torch_dtype",
    "layer_types",
    "rope_parameters",
    "rope_scaling",
}


def gpt2(rng: random.Random) -> dict:
    heads = rng.choice((1, 2, 3, 4))
    return {
        "n_embd": heads * rng.choice((8, 12)),
        "n_head": heads,
        "n_layer": rng.randint(1, 3),
        "n_positions": 64,
        "n_inner": rng.choice((None, 40, 72)),
        "activation_function": rng.choice(("gelu_new", "gelu_pytorch_tanh", "gelu", "relu2")),
        "layer_norm_epsilon": rng.choice((1e-5, 1e-4)),
        "tie_word_embeddings": rng.random() < 0.5,
    }


def rope(rng: random.Random, kinds: tuple = ("default", "linear", "llama3", "yarn")) -> dict:
    kind, base = rng.choice(kinds), {"rope_theta": rng.choice((1e4, 5e5, 2e6))}
    if kind == "llama3":
        return base | LLAMA3 | {"factor": rng.choice((4.0, 8.0, 32.0))}
    found = base | {"rope_type": kind} | ({} if kind == "default" else {"factor": rng.choice((2.0, 4.0))})
    if kind == "yarn":
        found |= {"original_max_position_embeddings": 16}
        found |= rng.choice(({}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"truncate": False}))
        found |= rng.choice(({}, {"mscale": 0.7, "mscale_all_dim": 1.1}))
    return found


def decoder(family: str, rng: random.Random) -> dict:
    """What all but GPT-2 have."""
    groups, each = rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    layers, width = rng.randint(1, 4), rng.choice((8, 12, 16))
    found = {
        "hidden_size": groups * each * width,
        "intermediate_size": rng.choice((40, 56, 72)),
        "num_hidden_layers": layers,
        "num_attention_heads": groups * each,
        "num_key_value_heads": groups,
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-4)),
        "tie_word_embeddings": rng.random() < 0.5,
        "initializer_range": rng.choice((0.02, 0.01)),
        "pad_token_id": None,
        "rope_parameters": rope(rng),
    }
    found["max_position_embeddings"] = 16384 if found["rope_parameters"]["rope_type"] == "llama3" else 64
    if rng.random() < 0.5 or family.startswith(("gemma", "qwen3", "mixtral")):
        found["head_dim"] = rng.choice((8, 12, 20))
    if FAMILIES[family].get("biases") and rng.random() < 0.4:
        found |= {"attention_bias": True, "mlp_bias": True}
    return found | windows(family, rng, layers) | experts(family, rng, layers) | own(family, rng, layers)


def windows(family: str, rng: random.Random, layers: int) -> dict:
    kind, width = FAMILIES[family].get("window"), rng.randint(3, 15)
    types = [rng.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
    if family.startswith("gemma"):
        return {"sliding_window": width} | ({"layer_types": types} if rng.random() < 0.6 else {})
    if kind is None or rng.random() < 0.4:
        return {"sliding_window": None} if kind == "always" else {}
    if kind == "always":
        return {"sliding_window": width}
    found = {"sliding_window": width, "use_sliding_window": True}
    if family in ("qwen2", "qwen3"):
        return found | rng.choice(({"max_window_layers": rng.randint(0, layers - 1)}, {"layer_types": types}))
    return found | ({"layer_types": types} if family == "qwen2_moe" else {})


def experts(family: str, rng: random.Random, layers: int) -> dict:
    if "num_experts" not in FAMILIES[family].get("keys", {}):
        return {}
    number = rng.randint(2, 8)
    found = {FAMILIES[family]["keys"]["num_experts"]: number, "num_experts_per_tok": rng.randint(1, number)}
    if family == "mixtral":
        return found
    found |= {"moe_intermediate_size": rng.choice((16, 24)), "norm_topk_prob": rng.random() < 0.5}
    found |= rng.choice(({}, {"mlp_only_layers": [rng.randrange(layers)]} if layers > 1 else {}))
    found |= {"decoder_sparse_step": 2} if layers == 4 and rng.random() < 0.5 else {}
    return found | ({"shared_expert_intermediate_size": 40} if family == "qwen2_moe" else {})


def own(family: str, rng: random.Random, layers: int) -> dict:
    """What only this family has."""
    match family:
        case "granite":
            names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
            found = {name: rng.choice((1.0, 0.4, 2.5)) for name in names}
            return found | {"attention_multiplier": rng.choice((0.1, 0.4))}  # at 1 fp32 itself errs by 1e-4
        case "smollm3":
            one = {"no_rope_layer_interval": rng.randint(2, 4)}
            return rng.choice((one, {"no_rope_layers": [rng.randint(0, 1) for _ in range(layers)]}))
        case "phi3":
            share = {"partial_rotary_factor": rng.choice((0.5, 0.75, 1.0))}
            return {"rope_parameters": rope(rng, ("default",)) | share, "max_position_embeddings": 64}
        case "gemma2" | "gemma3_text":
            found = {"final_logit_softcapping": rng.choice((None, 3.0, 30.0))}
            found |= {"query_pre_attn_scalar": rng.choice((12, 20, 256))}
            if family == "gemma2":
                return found | {"attn_logit_softcapping": rng.choice((None, 3.0, 30.0))}
            kinds = {"full_attention": rope(rng, ("default", "linear", "yarn"))}
            kinds["full_attention"].pop("truncate", None)  # transformers looks for it one level higher
            kinds["sliding_attention"] = rope(rng, ("default",))
            return found | {"rope_parameters": kinds, "max_position_embeddings": 64}
    return {}


def respell(table: dict, family: str, rng: random.Random) -> dict:
    """Perhaps the keys of transformers 4, and some of those left out that are at their default."""
    usual = transformers.AutoConfig.for_model(family).to_dict()
    if rng.random() < 0.5:
        table, usual = old_spelling(table), old_spelling(usual)
        if family.endswith("moe") and "num_local_experts" in table:
            table["num_experts"] = table.pop("num_local_experts")
    left_out = [k for k in table.keys() - KEPT if table[k] == usual.get(k, ...) and rng.random() < 0.5]
    return {key: value for key, value in table.items() if key not in left_out}


def folder_of(seed: int, family: str, path: Path) -> None:
    """A folder as a download has it."""
    rng = random.Random(seed)
    settings = gpt2(rng) if family == "gpt2" else decoder(family, rng)
    model = random_model(family, settings | {"vocab_size": rng.randint(60, 130)}, seed)
    model = model.to(rng.choice((torch.float32, torch.bfloat16, torch.float16)))
    save_theirs(model, path, **rng.choice(({}, {"max_shard_size": "20KB"})))
    config = path / "config.json"
    config.write_text(json.dumps(respell(json.loads(config.read_text()), family, rng)))


def of_transformers(path: Path):
    """The model of a folder, in fp32, with nothing missing or left over."""
    with contextlib.redirect_stderr(io.StringIO()):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    assert not any(info.values()), info
    return model


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of all files of a folder by name; in a checkpoint of ours without its range of rows."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= {key.split("[")[0]: tensor for key, tensor in load_file(file).items()}
    return found


def run(source: Path, target: Path, to: str = "nanomegatron") -> None:
    kinds = ("hf", to) if to == "nanomegatron" else ("nanomegatron", to)
    paths = ("--input-path", str(source), "--output-path", str(target))
    assert convert.main(["--source", kinds[0], "--target", kinds[1], *paths]) == 0


def forget(source: Path, target: Path, **precision) -> None:
    """The checkpoint again without what it kept of the folder, as a model that was trained here."""
    found = load(source, [], ALONE)
    config = from_toml(found.config)
    config = replace(config, precision=replace(config.precision, **precision))
    tensors = {k: t for k, t in weights(source / "iter_0000000").items() if k.startswith("model/")}
    pieces = [Piece(key, tuple(t.shape), (0,) * t.dim(), t) for key, t in tensors.items()]
    save(target, 0, pieces, found.state | {"hf": {}}, to_toml(config), ALONE)


def same_tensors(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(
        t.dtype == other[key].dtype and torch.equal(t, other[key]) for key, t in one.items()
    )


@pytest.mark.parametrize(
    "seed, family",
    [
        pytest.param(*draw, id=f"{draw[0]}-{draw[1]}", marks=[] if draw[0] in FAST else pytest.mark.full)
        for draw in DRAWS
    ],
)
@torch.no_grad()
def test_round_trip(tmp_path, seed, family):
    theirs, ours, again = (tmp_path / name for name in ("theirs", "ours", "again"))
    folder_of(seed, family, theirs)
    model = of_transformers(theirs)
    start = 5000 if model.config.to_dict().get("max_position_embeddings") == 16384 else 0
    tokens = torch.randint(
        model.config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(seed)
    )
    positions = torch.arange(start, start + LENGTH)
    expected = model(tokens, position_ids=positions[None], use_cache=False).logits

    run(theirs, ours)
    run(ours, again, "hf")
    names = sorted(path.name for path in theirs.iterdir())
    assert sorted(path.name for path in again.iterdir()) == names
    assert all((again / name).read_bytes() == (theirs / name).read_bytes() for name in names)

    forget(ours, tmp_path / "bare")
    run(tmp_path / "bare", tmp_path / "written", "hf")
    other = of_transformers(tmp_path / "written")
    found = other(tokens, position_ids=positions[None], use_cache=False).logits
    run(tmp_path / "written", tmp_path / "back")
    assert same_tensors(*(weights(tmp_path / name / "iter_0000000") for name in ("bare", "back")))
    if other.config.model_type == family:
        assert same_tensors(weights(tmp_path / "written"), weights(theirs))
    if other.config.model_type == family and "tanh" not in getattr(model.config, "activation_function", ""):
        assert torch.equal(found, expected)
    else:  # the same function under the name of another family, or of another activation
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))

    forget(ours, tmp_path / "fp32", bf16=False, fp16=False)
    [stage], _, _ = load_model(tmp_path / "fp32", ALONE)
    logits = stage(Batch(tokens, positions))[..., : model.config.vocab_size].transpose(0, 1)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()

"""For the tests of Hugging Face models: tiny ones of every family, random, made by transformers."""

import contextlib
import io
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanomegatron.batch import Batch
from nanomegatron.checkpoint import hf
from nanomegatron.config.cli import build_config
from nanomegatron.config.hf import read_folder
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from nanomegatron.pick_variants import pick_variants

transformers = pytest.importorskip("transformers")

LENGTH, VOCAB = 40, 97
LLAMA = dict(
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    vocab_size=VOCAB,
)
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 16}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES = {
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=VOCAB),
    "gpt2-untied-relu2": dict(
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        vocab_size=VOCAB,
        n_inner=72,
        tie_word_embeddings=False,
        activation_function="relu2",
    ),
    "gpt2-gelu": dict(
        n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=VOCAB, activation_function="gelu"
    ),
    "llama": LLAMA | dict(rope_theta=1e4, rms_norm_eps=1e-5, num_key_value_heads=4),
    "llama-3.1": LLAMA | dict(rope_parameters=LLAMA3, max_position_embeddings=16384),
    "llama-linear": LLAMA | dict(rope_parameters=LINEAR),
    "llama-yarn": LLAMA | dict(rope_parameters=YARN, tie_word_embeddings=True, head_dim=12),
    "llama-biases": LLAMA | dict(attention_bias=True, mlp_bias=True),
    "mistral": LLAMA | dict(sliding_window=7, head_dim=16),
    "mistral-tied": LLAMA | dict(tie_word_embeddings=True, sliding_window=None),
    "qwen2": LLAMA | dict(use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": LLAMA | dict(head_dim=20, rms_norm_eps=1e-4),
    "qwen3-tied": LLAMA | dict(head_dim=8, tie_word_embeddings=True),
}
FAMILIES |= {
    "llama-3.2": LLAMA
    | dict(rope_parameters=LLAMA3 | {"factor": 32.0}, tie_word_embeddings=True, head_dim=16),
    "phi3": LLAMA | dict(rope_parameters=PARTIAL, pad_token_id=None, sliding_window=11),
    "phi3-mha": LLAMA
    | dict(rope_parameters=PARTIAL, pad_token_id=None, num_key_value_heads=4, tie_word_embeddings=True),
}
GRANITE = dict(
    embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.4, logits_scaling=8.0
)
GEMMA = LLAMA | dict(
    num_hidden_layers=4, head_dim=12, query_pre_attn_scalar=20, sliding_window=9, pad_token_id=None
)
FAMILIES |= {
    "smollm3": LLAMA | dict(num_hidden_layers=5, pad_token_id=None, no_rope_layer_interval=3),
    "smollm3-biases": LLAMA
    | dict(
        no_rope_layers=[0, 1],
        attention_bias=True,
        mlp_bias=True,
        pad_token_id=None,
        tie_word_embeddings=False,
    ),
    "granite": LLAMA | GRANITE,
    "granite-tied": LLAMA | GRANITE | dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "olmo2": LLAMA | dict(pad_token_id=None),
    "olmo2-mha": LLAMA | dict(pad_token_id=None, num_key_value_heads=4, rope_parameters=LLAMA3),
    "gemma2": GEMMA | dict(attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
    "gemma3_text": GEMMA | dict(layer_types=["sliding_attention"] * 2 + ["full_attention"] * 2),
    "gemma3_text-linear": GEMMA
    | dict(
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "full_attention": LINEAR | {"rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    ),
}
QWEN_MOE = LLAMA | dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24)
FAMILIES |= {
    "mixtral": LLAMA | dict(num_local_experts=4),
    "mixtral-window": LLAMA | dict(num_local_experts=5, num_experts_per_tok=3, sliding_window=7, head_dim=12),
    "qwen2_moe": QWEN_MOE | dict(shared_expert_intermediate_size=40, decoder_sparse_step=2),
    "qwen3_moe": QWEN_MOE | dict(norm_topk_prob=True, head_dim=12, tie_word_embeddings=True),
    "qwen3_moe-raw": QWEN_MOE | dict(mlp_only_layers=[0], use_sliding_window=True, sliding_window=9),
}
# Where Llama 3.1's scaling makes a difference.
FIRST_POSITION = dict.fromkeys(("llama-3.1", "llama-3.2", "olmo2-mha"), 5000)


class Folders:
    """name -> (the Hugging Face model with random weights, its folder), made when first asked for."""

    def __init__(self, factory) -> None:
        self.factory, self.made = factory, {}

    def __call__(self, name: str) -> tuple:
        if name not in self.made:
            self.made[name] = hugging_face(name), self.factory.mktemp(name)
            save(*self.made[name])
        return self.made[name]


def hugging_face(name: str, **changes):
    """A model of the family with random weights, norms and biases included, large enough to tell apart."""
    return random_model(name.split("-")[0], FAMILIES[name] | changes, seed=len(name))


def random_model(family: str, settings: dict, seed: int):
    """The same of these keys of config.json."""
    config = transformers.AutoConfig.for_model(family, **settings)
    generator = torch.Generator().manual_seed(seed)
    with contextlib.redirect_stderr(io.StringIO()):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            norm = p.dim() == 1 and key.endswith("weight")
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + norm)
    return model


def save(model, folder, **how) -> None:
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.save_pretrained(folder, **how)


def old_spelling(table: dict) -> dict:
    """As transformers 4 wrote it."""
    rope = dict(table.pop("rope_parameters", None) or {})
    if local := rope.get("sliding_attention"):
        table["rope_local_base_freq"], rope = local["rope_theta"], dict(rope["full_attention"])
    if share := rope.pop("partial_rotary_factor", None):
        table["partial_rotary_factor"] = share
    if rope:
        table["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        name = "rope_type" if local else "type"  # of Gemma 3
        table["rope_scaling"] = rope | {name: kind} if kind != "default" else None
    return table | {"torch_dtype": table.pop("dtype")}


def by_files(family: str, tensors: dict) -> dict:
    """Tensors by their names in files; of all a layer's experts transformers itself has one."""
    found = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            for i, both in enumerate(tensor):
                pair = zip(("gate_proj", "up_proj"), both.chunk(2), strict=True)
                found |= {f"{stem}.experts.{i}.{k}.weight": half for k, half in pair}
        elif kind == "down_proj":
            found |= {f"{stem}.experts.{i}.down_proj.weight": one for i, one in enumerate(tensor)}
        else:
            found[name] = tensor
    if family != "mixtral":
        return found
    for theirs, name in (
        ("gate_proj", "w1"),
        ("up_proj", "w3"),
        ("down_proj", "w2"),
        (".mlp.", ".block_sparse_moe."),
    ):
        found = {key.replace(theirs, name): tensor for key, tensor in found.items()}
    return found


def ours(folder, tp: Axis | None = None, dtype=torch.float32, experts=None, **changes) -> GPTModel:
    """Our model of the folder's config.json with its weights."""
    config = build_config(read_folder(folder)[1] | changes)
    sizes = dict(vocab_size=config.data.vocab_size, max_sequence_length=config.model.max_position_embeddings)
    mesh = replace(experts or Mesh(), tp=tp or Axis.single("tp"))
    model = GPTModel(config.model, **sizes, mesh=mesh, init=Init(dtype=dtype))
    pick_variants(model, Axis.single("cp"))
    hf.load_weights(folder, model.parameters(), config.model, config.data.vocab_size)
    return model


def data(name: str = "") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens and labels [2, LENGTH], positions [LENGTH]."""
    ids = torch.randint(VOCAB, (2, 2, LENGTH), generator=torch.Generator().manual_seed(5))
    ids[0, 0, 0] = 0  # whose embedding some tests change
    return ids[0], ids[1], torch.arange(LENGTH) + FIRST_POSITION.get(name, 0)


def their_logits(name: str, model) -> torch.Tensor:
    """[b, s, V]"""
    tokens, _, positions = data(name)
    return model(tokens, position_ids=positions[None], use_cache=False).logits


@torch.no_grad()
def logit_error(name: str, model: GPTModel, expected: torch.Tensor) -> float:
    """Largest difference of our logits from theirs, relative to the largest of theirs."""
    tokens, _, positions = data(name)
    logits = model(Batch(tokens, positions))[..., :VOCAB].transpose(0, 1)
    return float((logits - expected).abs().max() / expected.abs().max())


def rewrite(folder, target, change, metadata=None) -> None:
    """The folder again, after `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    target.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, target / "model.safetensors", metadata)
    (target / "config.json").write_text((folder / "config.json").read_text())

"""Hugging Face -> ours -> Hugging Face gives every file to the bit; ours computes what transformers does."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import convert
from nanomegatron.checkpoint.checkpoint import load, save, training_pieces
from nanomegatron.checkpoint.convert_target import new_files
from nanomegatron.checkpoint.files import Piece
from nanomegatron.checkpoint.hf import Folder, folder_tokenizer
from nanomegatron.checkpoint.optimizer_state import optimizer_states
from nanomegatron.commands.generate import load_model
from nanomegatron.config.cli import build_config, from_toml, parse, to_toml
from nanomegatron.config.hf import is_hf_folder, read_folder
from nanomegatron.config.settings import DataConfig
from nanomegatron.data.tokenizer import build_tokenizer
from nanomegatron.data.vocabulary import write_ranks
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.mesh import Axis
from nanomegatron.model import GPTModel
from nanomegatron.optim import Optimizer
from nanomegatron.param import Init
from nanomegatron.pick_variants import pick_variants
from nanomegatron.report.generate import Sampling, generate
from tests.checkpoints import ALONE
from tests.hf_models import FAMILIES, VOCAB, data, hugging_face, logit_error, rewrite, transformers
from tests.hf_models import save as save_theirs


def run(source: Path, target: Path, to: str = "nanomegatron", *flags: str) -> int:
    kinds = ("hf", to) if to == "nanomegatron" else ("nanomegatron", to)
    paths = ("--input-path", str(source), "--output-path", str(target))
    return convert.main(["--source", kinds[0], "--target", kinds[1], *paths, *flags])


def files(folder: Path) -> dict[str, str]:
    """name -> SHA-256 of everything in a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def byte_tokenizer(folder: Path) -> None:
    """A tokenizer.json of single letters."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {chr(33 + i): i for i in range(VOCAB - 4)} | {"</s>": VOCAB - 4}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="</s>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip_of_one_file(tmp_path, name):
    save_theirs(hugging_face(name), tmp_path / "theirs")
    byte_tokenizer(tmp_path / "theirs")
    assert run(tmp_path / "theirs", tmp_path / "ours") == 0
    assert run(tmp_path / "ours", tmp_path / "again", "hf") == 0
    assert files(tmp_path / "again") == files(tmp_path / "theirs")
    assert {"model.safetensors", "config.json", "generation_config.json"} <= files(tmp_path / "again").keys()


@pytest.mark.parametrize("name", ["gpt2", "llama-biases", "qwen3-tied", "mixtral", "qwen2_moe", "phi3"])
def test_round_trip_of_shards_in_bf16(tmp_path, name):
    model = hugging_face(name).bfloat16()
    save_theirs(model, tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    assert run(tmp_path / "theirs", tmp_path / "ours") == 0
    config = from_toml(load(tmp_path / "ours", [], ALONE).config)
    assert (
        config.dtype_name == "bfloat16"
        and config.model == build_config(read_folder(tmp_path / "theirs")[1]).model
    )
    assert run(tmp_path / "ours", tmp_path / "again", "hf") == 0
    assert files(tmp_path / "again") == files(tmp_path / "theirs")


def test_round_trip_of_an_old_file(tmp_path):
    """Names without a prefix, masks among the weights, a copy of the tied head, metadata, another type."""
    save_theirs(hugging_face("gpt2"), tmp_path / "new")

    def age(tensors: dict) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("transformer.")] = tensors.pop(key)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril().bool()
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()
        tensors["h.1.ln_1.weight"] = tensors["h.1.ln_1.weight"].half()

    rewrite(tmp_path / "new", tmp_path / "theirs", age, metadata={"format": "pt", "made by": "hand"})
    assert run(tmp_path / "theirs", tmp_path / "ours") == 0
    assert run(tmp_path / "ours", tmp_path / "again", "hf") == 0
    assert files(tmp_path / "again") == files(tmp_path / "theirs")


@pytest.mark.parametrize("name", ["gpt2", "mistral", "qwen3-tied", "smollm3", "gemma2", "gemma3_text"])
@torch.no_grad()
def test_generate_takes_what_was_converted(tmp_path, name):
    """The model, its tokenizer, and its greedy continuation are those of transformers."""
    theirs = hugging_face(name)
    save_theirs(theirs, tmp_path / "theirs")
    byte_tokenizer(tmp_path / "theirs")
    assert run(tmp_path / "theirs", tmp_path / "ours") == 0
    model, tokenizer, _ = load_model(tmp_path / "ours", ALONE)
    tokens, _, positions = data(name)
    expected = theirs(tokens, position_ids=positions[None], use_cache=False).logits
    assert logit_error(name, model[0], expected) < 1e-5
    prompt = tokenizer.encode("abc")
    assert len(prompt) == 3 and tokenizer.decode(prompt) == "a b c"
    more = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert generate(model, [prompt], 8, Sampling(temperature=0)) == more.tolist()


def test_settings_of_the_kept_folder(tmp_path):
    save_theirs(hugging_face("mistral"), tmp_path / "theirs")
    assert run(tmp_path / "theirs", tmp_path / "ours") == 0
    assert not is_hf_folder(tmp_path / "ours")
    assert (
        parse(["--config", str(tmp_path / "ours/hf")]).config.model
        == build_config(read_folder(tmp_path / "theirs")[1]).model
    )
    state = load(tmp_path / "ours", [], ALONE).state
    assert state["tokenizer"] == {"type": "NullTokenizer", "vocab_size": VOCAB}  # none there
    assert (state["iteration"], state["consumed_samples"]) == (0, 0)


def trained_here(root: Path, dtype=torch.float32, format="sharded", **shape) -> GPTModel:
    """A checkpoint of iteration 7, as train.py saves one."""
    shape = dict(num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=64) | shape
    config = build_config(shape | {"bf16": dtype == torch.bfloat16})
    config = replace(config, data=DataConfig(tokenizer_type="ByteTokenizer"))
    init = Init(seed=3, dtype=dtype)
    model = GPTModel(config.model, vocab_size=VOCAB, max_sequence_length=64, init=init)
    pick_variants(model, Axis.single("cp"))
    buckets = ParamAndGradBuckets(model, config.parallel, ALONE)
    states = optimizer_states(Optimizer(buckets, config.optimizer, config.precision, [[0.0]] * 3))
    for _, flat in states.get("main", ()):
        flat += 1e-5  # as after a step: not what the weights are
    tokenizer = build_tokenizer("ByteTokenizer")
    state = {"iteration": 7, "tokenizer": tokenizer.spec, "tokenizer_fingerprint": tokenizer.fingerprint}
    pieces = training_pieces(buckets.params, states, ALONE)
    save(root, 7, pieces, state, to_toml(config), ALONE, format=format)
    return model


LLAMA = dict(
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    disable_bias_linear=True,
    num_query_groups=2,
)
GEMMA = LLAMA | dict(
    swiglu=False,
    geglu=True,
    norm_placement="both",
    apply_layernorm_1p=True,
    embedding_multiplier=32**0.5,
    softmax_scale=20**-0.5,
    window_size=(5, 0),
)
SHAPES = {
    "gpt2": {},
    "llama": LLAMA
    | dict(untie_embeddings_and_output_weights=True, use_rope_scaling=True, rope_scaling_factor=4.0),
    "mistral": LLAMA | dict(window_size=(7, 0), kv_channels=12),
    "qwen2": LLAMA | dict(add_qkv_bias=True),
    "qwen3": LLAMA | dict(qk_layernorm=True, window_size=(5, 0), window_attn_skip_freq="2"),
    "phi3": LLAMA | dict(rotary_percent=0.5),
    "smollm3": LLAMA | dict(no_rope_freq="2"),
    "granite": LLAMA | dict(embedding_multiplier=3.0, softmax_scale=0.25, residual_multiplier=0.5),
    "olmo2": LLAMA | dict(norm_placement="post", qk_layernorm=True, qk_layernorm_all_heads=True),
    "gemma2": GEMMA | dict(attn_logit_softcapping=2.0, window_attn_skip_freq="[1]*1+[0]*1"),
    "gemma3_text": GEMMA | dict(qk_layernorm=True, rotary_base_local=100.0, window_attn_skip_freq="2"),
    "mixtral": LLAMA | dict(num_experts=4, moe_ffn_hidden_size=24, window_size=(7, 0)),
    "qwen2_moe": LLAMA
    | dict(
        add_qkv_bias=True,
        num_experts=6,
        moe_layer_freq="2",
        moe_router_pre_softmax=True,
        moe_shared_expert_intermediate_size=20,
        moe_shared_expert_gate=True,
    ),
    "qwen3_moe": LLAMA | dict(qk_layernorm=True, num_experts=6, moe_router_topk=3, moe_ffn_hidden_size=16),
}


@pytest.mark.parametrize("family", SHAPES)
@torch.no_grad()
def test_a_model_trained_here_is_one_of_transformers(tmp_path, family):
    format = {"gpt2": "torch_dist", "qwen2": "torch"}.get(family, "sharded")
    model = trained_here(tmp_path / "ckpt", format=format, **SHAPES[family])
    assert run(tmp_path / "ckpt", tmp_path / "theirs", "hf") == 0
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()) and theirs.config.model_type == family
    tokens, _, positions = data()
    expected = theirs(tokens, position_ids=positions[None], use_cache=False).logits
    assert logit_error("", model, expected) < 1e-5
    assert theirs.config.eos_token_id == 256

    assert run(tmp_path / "theirs", tmp_path / "back") == 0
    params = [torch.nn.Parameter(torch.zeros_like(p)) for p in model.parameters()]
    for new, old in zip(params, model.parameters(), strict=True):
        new.spec = old.spec
    load(tmp_path / "back", training_pieces(params, {}, ALONE), ALONE)
    assert all(torch.equal(new, old) for new, old in zip(params, model.parameters(), strict=True))


def test_a_tokenizer_without_a_file_there_is_named_as_generate_takes_it(tmp_path):
    """A text that is given without it is refused, and the flags are named there, too."""
    write_ranks(tmp_path / "bytes.tiktoken", [bytes([i]) for i in range(256)])
    flags = f"--tokenizer-type TikTokenizer --tokenizer-model {tmp_path}/bytes.tiktoken"
    tokenizer = build_tokenizer("TikTokenizer", str(tmp_path / "bytes.tiktoken"))
    sizes = dict(num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=64)
    config = build_config(sizes)
    source = SimpleNamespace(
        root=tmp_path, config=config, vocab_size=257, state={"tokenizer": tokenizer.spec}
    )
    assert new_files(source)[1] == [
        f"without a tokenizer: a TikTokenizer has no file; generate takes {flags}"
    ]
    with pytest.raises(ValueError, match="'def': without a tokenizer text is ids.*with --tokenizer-type and"):
        folder_tokenizer(tmp_path, 257).encode("def")


@pytest.mark.parametrize(
    "shape, message",
    [
        (LLAMA | {"rotary_interleaved": True}, "llama is without rotary_interleaved = True"),
        ({"position_embedding_type": "none"}, "gpt2 is without position_embedding_type = 'none'"),
    ],
)
def test_a_model_of_no_family_is_refused(tmp_path, capsys, shape, message):
    trained_here(tmp_path / "ckpt", **shape)
    assert run(tmp_path / "ckpt", tmp_path / "theirs", "hf") == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_bad_input_leaves_nothing_behind(tmp_path, capsys):
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    save_theirs(hugging_face("llama"), theirs)
    before = files(tmp_path)

    def refused(source: Path, target: Path, to: str, message: str) -> None:
        assert run(source, target, to) == 2
        assert message in capsys.readouterr().err
        assert files(tmp_path).keys() == before.keys() and not out.exists()

    refused(tmp_path / "nowhere", out, "nanomegatron", "nowhere: no such folder")
    refused(theirs, out, "hf", "no checkpoint there")
    refused(theirs, theirs, "nanomegatron", "exists; give a new folder")
    config = theirs / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 3}))
    refused(theirs, out, "nanomegatron", "model.layers.2.input_layernorm.weight: missing")
    config.write_text("{")
    refused(theirs, out, "nanomegatron", "config.json: not JSON (Expecting")
    weights = theirs / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    refused(theirs, out, "nanomegatron", "config.json")
    assert convert.main("--source hf --target hf --input-path a --output-path b".split()) == 2
    assert "nothing to convert" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["hf/config.json", "hf/model.safetensors.header", "iter_0000000/rank_00000.safetensors"]
)
def test_damage_is_found(tmp_path, capsys, name):
    save_theirs(hugging_face("qwen3"), tmp_path / "theirs")
    assert run(tmp_path / "theirs", tmp_path / "ours") == 0
    path = tmp_path / "ours" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert run(tmp_path / "ours", tmp_path / "again", "hf") == 2
    assert name in capsys.readouterr().err and not (tmp_path / "again").exists()


def test_the_step_that_is_asked_for(tmp_path):
    trained_here(tmp_path / "ckpt")
    save(tmp_path / "ckpt", 9, [Piece("x", (1,), (0,), torch.ones(1))], {}, to_toml(build_config({})), ALONE)
    assert run(tmp_path / "ckpt", tmp_path / "theirs", "hf", "--ckpt-step", "7") == 0
    assert run(tmp_path / "ckpt", tmp_path / "other", "hf", "--ckpt-step", "8") == 2


def own_memory() -> int:
    """Bytes of this process that are no file's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def test_weights_are_not_read_before_they_are_wanted(tmp_path):
    """The tensors of a folder are views of its files, so that one at a time is in memory."""
    save_theirs(hugging_face("llama"), tmp_path)
    save_file({f"x{i}": torch.ones(2**21) for i in range(16)}, tmp_path / "model.safetensors")
    before = own_memory()
    there = Folder(tmp_path)
    assert sum(tensor.nbytes for tensor in there.tensors.values()) == 2**27
    assert sum(float(tensor.sum()) for tensor in there.tensors.values()) == 2**25
    assert own_memory() - before < 2**24

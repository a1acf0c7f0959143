"""Weights of Hugging Face models: transformers computes the same logits and gradients from the same files."""

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.checkpoint import hf
from nanomegatron.config.cli import build_config
from nanomegatron.config.hf import is_hf_folder, read_folder
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from tests.hf_models import FAMILIES, VOCAB, Folders, by_files, data, logit_error, ours, rewrite, their_logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Folders:
    return Folders(tmp_path_factory)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(folders, name):
    theirs, folder = folders(name)
    model = ours(folder)
    expected = their_logits(name, theirs)
    assert logit_error(name, model, expected.detach()) < 1e-5

    tokens, labels, positions = data(name)
    theirs.zero_grad()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    model(Batch(tokens, positions), labels).mean().backward()
    family = read_folder(folder)[0]
    grads = by_files(family, {key: p.grad for key, p in theirs.named_parameters()})
    total = sum(grad.norm() ** 2 for grad in grads.values()) ** 0.5
    parts = [(part, p.grad) for p in model.parameters() for part in p.spec.parts]
    places = hf.places([part.name for part, _ in parts], family)
    assert {place.name for place in places.values()} == set(grads)
    for part, grad in parts:
        want = places[part.name].ours(grads[places[part.name].name])
        if part.name.endswith("k.bias") and name.startswith(
            "gpt2"
        ):  # adds alike to a query's scores: no effect
            assert max(part.view(grad).norm(), want.norm()) < 1e-6 * total
        else:
            assert (part.view(grad) - want).norm() <= 1e-4 * want.norm(), part.name
            assert want.norm() > 1e-4 * total, part.name


# The comparison itself: what is a little wrong must not pass.


def swap_heads(model: GPTModel) -> None:
    attention = model.layers[1].self_attention
    heads = attention.linear_qkv.weight[: attention.widths[0]].view(4, -1)
    heads[[0, 1]] = heads[[1, 0]].clone()


@pytest.mark.parametrize("name", ["gpt2", "mistral", "qwen3"])
@torch.no_grad()
def test_two_swapped_heads_are_seen(folders, name):
    theirs, folder = folders(name)
    model = ours(folder)
    swap_heads(model)
    assert logit_error(name, model, their_logits(name, theirs)) > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "llama-biases", "qwen2", "qwen3", "mixtral", "qwen2_moe"])
@torch.no_grad()
def test_every_wrong_tensor_is_seen(folders, name):
    """One tensor of ours at a time: its bias dropped, two neighbours of its weight exchanged."""
    theirs, folder = folders(name)
    expected, model = their_logits(name, theirs), ours(folder)
    for param in model.parameters():
        for part in param.spec.parts:
            right = param.clone()
            if part.name.endswith("bias") or part.shape[0] == 1:
                part.view(param).zero_()
            else:
                part.view(param)[[0, 1]] = part.view(right)[[1, 0]]
            if not (part.name.endswith("k.bias") and name == "gpt2"):
                assert logit_error(name, model, expected) > 1e-4, part.name
            param.copy_(right)
    assert logit_error(name, model, expected) < 1e-5


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama", {"rotary_base": 9e3}),
        ("llama", {"norm_epsilon": 1e-3}),
        ("llama-3.1", {"use_rope_scaling": False}),
        ("llama-yarn", {"position_embedding_type": "rope"}),
        ("llama-yarn", {"mscale": 0.0}),
        ("mistral", {"window_size": (7, 0)}),
        ("mistral", {"window_size": ()}),
        ("qwen2", {"window_attn_skip_freq": "[1]*1+[0]*1"}),
        ("gpt2-untied-relu2", {"squared_relu": False}),
        ("gpt2", {"bias_gelu_fusion": False}),
        ("gpt2-gelu", {"bias_gelu_fusion": True}),
        ("mixtral", {"moe_router_pre_softmax": True}),
        ("mixtral", {"moe_router_topk": 3}),
        ("qwen2_moe", {"moe_router_pre_softmax": False}),
        ("qwen3_moe", {"moe_router_topk_scaling_factor": 1.1}),
    ],
)
@torch.no_grad()
def test_every_wrong_setting_is_seen(folders, name, changes):
    theirs, folder = folders(name)
    assert logit_error(name, ours(folder, **changes), their_logits(name, theirs)) > 1e-4


# Loading.


@pytest.mark.parametrize("name", ["gpt2", "llama-biases", "qwen3-tied"])
def test_tensor_parallel_ranks_load_their_slices(folders, name):
    _, folder = folders(name)
    whole = {part.name: part.view(p) for p in ours(folder).parameters() for part in p.spec.parts}
    for rank in range(2):
        for param in ours(folder, tp=Axis("tp", 2, rank, (0, 1))).parameters():
            for part in param.spec.parts:
                assert torch.equal(part.view(param), part.of(whole[part.name])), part.name


@pytest.mark.parametrize("name, ep, etp", [("qwen2_moe", 3, 1), ("mixtral", 1, 2), ("qwen3_moe-raw", 2, 2)])
def test_expert_ranks_load_their_slices(folders, name, ep, etp):
    _, folder = folders(name)
    whole = {part.name: part.view(p) for p in ours(folder).parameters() for part in p.spec.parts}
    found = {key: [] for key in whole if ".experts." in key}
    for i in range(ep * etp):
        axes = Mesh(ep=Axis("ep", ep, i // etp, ()), etp=Axis("etp", etp, i % etp, ()))
        for param in ours(folder, experts=axes).parameters():
            for part in param.spec.parts:
                assert torch.equal(part.view(param), part.of(whole[part.name])), part.name
                if part.name in found:
                    found[part.name].append(part.view(param))
    for key, slices in found.items():
        assert torch.equal(torch.cat(slices), whole[key]), key


def test_names_of_experts():
    """Files keep a name for each expert, and the second weight as [h, f]."""
    layer = "decoder.layers.11.mlp"
    ours = [f"{layer}.experts.23.linear_fc1.{kind}.weight" for kind in ("gate", "up")]
    ours += [f"{layer}.experts.23.linear_fc2.weight_t", f"{layer}.router.weight"]
    mixtral, qwen = hf.places(ours, "mixtral"), hf.places(ours, "qwen3_moe")
    moe = "model.layers.11.block_sparse_moe"
    assert [place.name for place in mixtral.values()] == [
        f"{moe}.{name}.weight" for name in ("experts.23.w1", "experts.23.w3", "experts.23.w2", "gate")
    ]
    names = ("experts.23.gate_proj", "experts.23.up_proj", "experts.23.down_proj", "gate")
    assert [p.name for p in qwen.values()] == [f"model.layers.11.mlp.{name}.weight" for name in names]
    assert [p.transposed for p in qwen.values()] == [False, False, True, False]
    assert qwen[ours[2]].shape([24, 32]) == [32, 24]
    assert torch.equal(qwen[ours[2]].ours(torch.arange(6).view(2, 3)), torch.tensor([[0, 3], [1, 4], [2, 5]]))
    shared = f"{layer}.shared_experts"
    parts = ("linear_fc1.gate.weight", "linear_fc1.up.weight", "linear_fc2.weight", "gate_weight")
    found = hf.places([f"{shared}.{name}" for name in parts], "qwen2_moe")
    names = [f"shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")] + [
        "shared_expert_gate"
    ]
    assert [p.name for p in found.values()] == [f"model.layers.11.mlp.{name}.weight" for name in names]
    assert not any(place.transposed for place in found.values())
    with pytest.raises(ValueError, match="family llama has nothing like it"):
        hf.places(ours, "llama")
    with pytest.raises(ValueError, match="expert_bias: the Hugging Face family"):
        hf.places([f"{layer}.router.x.expert_bias"], "mixtral")


def test_experts_that_do_not_fit_are_said(folders, tmp_path):
    _, folder = folders("qwen2_moe")
    with pytest.raises(ValueError) as error:
        ours(folder, num_experts=7, moe_ffn_hidden_size=16, moe_shared_expert_intermediate_size=32)
    lines = str(error.value)
    assert "mlp.gate.weight: is [6, 32], wanted [7, 32]; see --hidden-size, --num-experts\n" in lines
    assert (
        "experts.0.up_proj.weight: is [24, 32], wanted [16, 32]; see --hidden-size, --num-experts, --moe-ffn"
        in lines
    )
    rewrite(folder, tmp_path / "bad", drop("model.layers.1.mlp.shared_expert.up_proj.weight"))
    with pytest.raises(
        ValueError, match="shared_expert.up_proj.weight: missing, .* see --num-layers, --moe-shared"
    ):
        ours(tmp_path / "bad")


def test_weights_are_cast_and_it_is_said(folders, tmp_path):
    _, folder = folders("llama")
    config = build_config(read_folder(folder)[1])
    model = GPTModel(config.model, vocab_size=VOCAB, max_sequence_length=64, init=Init(dtype=torch.bfloat16))
    assert hf.load_weights(folder, model.parameters(), config.model, VOCAB) == ["weights cast from float32"]
    full = ours(folder)
    for half, whole in zip(model.parameters(), full.parameters(), strict=True):
        assert torch.equal(half, whole.bfloat16())


def test_old_files_of_gpt2(folders, tmp_path):
    """Without the model's prefix, with the buffers and the tied head that old versions saved."""
    theirs, folder = folders("gpt2")

    def age(tensors: dict) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("transformer.")] = tensors.pop(key)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()

    rewrite(folder, tmp_path / "old", age)
    with torch.no_grad():
        assert logit_error("gpt2", ours(tmp_path / "old"), their_logits("gpt2", theirs)) < 1e-5


def drop(name):
    return lambda tensors: tensors.pop(name)


def replace(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    "change, message",
    [
        (drop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight: missing, wanted"),
        (drop("model.norm.weight"), "model.norm.weight: missing, wanted .32.; see --num-layers"),
        (replace("model.layers.2.x", torch.ones(2)), "model.layers.2.x: not in this model"),
        (
            replace("model.layers.0.self_attn.k_proj.weight", torch.ones(32, 32)),
            r"is \[32, 32\], wanted \[16, 32\]; see .*--num-query-groups",
        ),
        (replace("model.norm.weight", torch.ones(32, dtype=torch.int8)), "is torch.int8, wanted"),
        (replace("lm_head.weight", torch.ones(VOCAB, 32)), "lm_head.weight: is no copy"),
    ],
)
def test_what_does_not_fit_is_said(folders, tmp_path, change, message):
    _, folder = folders("mistral-tied")
    rewrite(folder, tmp_path / "bad", change)
    with pytest.raises(ValueError, match=message):
        ours(tmp_path / "bad")


def test_everything_that_does_not_fit_is_said_at_once(folders):
    _, folder = folders("llama")
    with pytest.raises(ValueError) as error:
        ours(folder, num_layers=3, ffn_hidden_size=64)
    assert "mlp.gate_proj.weight: is [56, 32], wanted [64, 32]; see --hidden-size, --ffn-hidden-size" in str(
        error.value
    )
    assert str(error.value).endswith("... and 7 more")


def test_bad_folders(folders, tmp_path):
    (tmp_path / "config.json").write_text((folders("llama")[1] / "config.json").read_text())
    assert not is_hf_folder(tmp_path)
    with pytest.raises(ValueError, match="no model.safetensors, .* pickle"):
        ours(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="not an index"):
        ours(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 40)
    assert is_hf_folder(tmp_path)
    with pytest.raises(ValueError, match="model.safetensors: .*header"):
        ours(tmp_path)

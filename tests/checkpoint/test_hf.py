"""Weights of Hugging Face models: transformers computes the same logits and gradients from the same files."""

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.checkpoint import hf
from nanomegatron.comm import all_gather, all_reduce
from nanomegatron.config.cli import build_config
from nanomegatron.config.hf import is_hf_folder, read_folder
from nanomegatron.config.model import TransformerConfig
from nanomegatron.layers import Embedding
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.model import GPTModel, StageSpec
from nanomegatron.param import Init
from nanomegatron.pick_variants import pick_variants
from tests.hf_models import FAMILIES, VOCAB, Folders, by_files, data, logit_error, ours, rewrite, their_logits
from tests.spmd import run_spmd


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Folders:
    return Folders(tmp_path_factory)


def test_words_are_multiplied_by_a_number_of_their_type():
    """Gemma's multiplier, a root of the hidden size, is rounded to bf16 before: to the bit."""
    modeling = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    multiplier, weight = 1152**0.5, torch.randn(31, 16).bfloat16()
    theirs = modeling.Gemma3TextScaledWordEmbedding(31, 16, 0, embed_scale=multiplier).bfloat16()
    theirs.weight.data.copy_(weight)
    config = TransformerConfig(1, 16, 2, embedding_multiplier=multiplier, position_embedding_type="rope")
    weight, one = torch.nn.Parameter(weight), Axis.single()
    tokens = torch.arange(30).view(2, 15)
    found = Embedding(config, 31, 31, 15, weight, one, Init())(Batch(tokens, torch.arange(15)))
    assert torch.equal(found, theirs(tokens).transpose(0, 1))
    assert not torch.equal(found, (weight[tokens] * multiplier).transpose(0, 1)), "the rounding shows"


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
    places = hf.places({part.name: part.shape for part, _ in parts}, family)
    assert {place.name for place in places.values()} == set(grads)
    kinds = [layer.rotary_kind for layer in model.layers]
    plain = [f"layers.{i}." for i, kind in enumerate(kinds) if kind is None]
    for part, grad in parts:
        want = places[part.name].ours(grads[places[part.name].name])
        if part.name.endswith("k.bias") and any(layer in part.name for layer in plain):
            # Not rotated it adds alike to a query's scores: no effect.
            assert max(part.local_view(grad).norm(), want.norm()) < 1e-6 * total
        else:
            assert (part.local_view(grad) - want).norm() <= 1e-4 * want.norm(), part.name
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


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-biases", "qwen2", "qwen3", "mixtral", "qwen2_moe", "phi3", "olmo2", "gemma3_text"]
)
@torch.no_grad()
def test_every_wrong_tensor_is_seen(folders, name):
    """One tensor of ours at a time: its bias dropped, two neighbours of its weight exchanged."""
    theirs, folder = folders(name)
    expected, model = their_logits(name, theirs), ours(folder)
    for param in model.parameters():
        for part in param.spec.parts:
            right = param.clone()
            if part.name.endswith("bias") or part.shape[0] == 1:
                part.local_view(param).zero_()
            else:
                part.local_view(param)[[0, 1]] = part.local_view(right)[[1, 0]]
            if not (part.name.endswith("k.bias") and name == "gpt2"):
                assert logit_error(name, model, expected) > 1e-4, part.name
            param.copy_(right)
    assert logit_error(name, model, expected) < 1e-5


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama", {"rotary_base": 9e3}),
        ("llama", {"rotary_interleaved": True}),
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
        ("phi3", {"rotary_percent": 1.0}),
        ("smollm3", {"no_rope_freq": None}),
        ("smollm3", {"no_rope_freq": "[1]*2+[0]*1+[1]*2"}),
        ("granite", {"embedding_multiplier": 1.0}),
        ("granite", {"residual_multiplier": 1.0}),
        ("granite", {"softmax_scale": None}),
        ("granite", {"logits_scaling": 1.0}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"apply_layernorm_1p": False}),
        ("gemma3_text", {"rotary_base_local": None}),
        ("gemma3_text", {"geglu": False, "swiglu": True}),
        ("gemma3_text-linear", {"rotary_seq_len_interpolation_factor": 1.0}),
    ],
)
@torch.no_grad()
def test_every_wrong_setting_is_seen(folders, name, changes):
    theirs, folder = folders(name)
    assert logit_error(name, ours(folder, **changes), their_logits(name, theirs)) > 1e-4


# Over ranks.

NEW = ["phi3", "smollm3", "granite", "olmo2", "gemma2", "gemma3_text", "llama-3.2", "mixtral", "qwen2_moe"]


def theirs_by_name(folders, name: str) -> tuple:
    """logits `[b, s, V]`, and the gradient of each of our global tensors."""
    theirs, folder = folders(name)
    theirs.zero_grad()
    logits = their_logits(name, theirs)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), data(name)[1].flatten()).backward()
    family, config = read_folder(folder)[0], build_config(read_folder(folder)[1])
    grads = by_files(family, {key: p.grad for key, p in theirs.named_parameters()})
    parts = hf.model_parts(config.model, config.data.vocab_size)
    places = hf.places({part.name: part.shape for part in parts}, family)
    return logits.detach(), {key: place.ours(grads[place.name]) for key, place in places.items()}


def check_slices(model: GPTModel, expected: dict) -> None:
    """The gradients of this rank's parameters are slices of the whole ones."""
    for part, grad in ((part, part.local_view(p.grad)) for p in model.parameters() for part in p.spec.parts):
        want = part.global_view(expected[part.name])
        total = all_reduce(grad, part.partial) if part.partial else grad
        assert (total - want).norm() <= 1e-4 * want.norm(), part.name


def compare_over_tp(mesh, cases: dict) -> None:
    for name, (folder, logits, grads) in cases.items():
        model = ours(folder, tp=mesh.tp, sequence_parallel=True)
        tokens, labels, positions = data(name)
        with torch.no_grad():
            found = all_gather(model.eval()(Batch(tokens, positions)).permute(2, 1, 0).contiguous(), mesh.tp)
        found = found.permute(1, 2, 0)[..., :VOCAB]
        assert (found - logits).abs().max() < 1e-5 * logits.abs().max(), name
        model.train()(Batch(tokens, positions), labels).mean().backward()
        check_slices(model, grads)


def compare_over_ep(mesh, cases: dict) -> None:
    """Each rank has one of the two rows, and half of the experts."""
    for name, (folder, logits, grads) in cases.items():
        model, row = ours(folder, experts=mesh), slice(mesh.ep.rank, mesh.ep.rank + 1)
        tokens, labels, positions = data(name)
        batch = Batch(tokens[row], positions)
        with torch.no_grad():
            found = model(batch)[..., :VOCAB].transpose(0, 1)
        assert (found - logits[row]).abs().max() < 1e-5 * logits.abs().max(), name
        (model(batch, labels[row]).mean() / 2).backward()
        for param in model.parameters():
            for part in param.spec.parts:
                want, grad = part.global_view(grads[part.name]), part.local_view(param.grad)
                grad = grad if param.spec.expert else all_reduce(grad, mesh.dp)
                assert (grad - want).norm() <= 1e-4 * want.norm(), part.name


@pytest.mark.full
def test_expert_parallel_ranks_compute_what_transformers_does(folders):
    names = ["mixtral", "qwen2_moe", "qwen3_moe"]
    cases = {name: (str(folders(name)[1]), *theirs_by_name(folders, name)) for name in names}
    run_spmd(compare_over_ep, 2, cases, ep=2)


def test_tensor_parallel_ranks_compute_what_transformers_does(folders):
    names = [name for name in NEW if not name.endswith(("moe", "mixtral"))]
    cases = {name: (str(folders(name)[1]), *theirs_by_name(folders, name)) for name in names}
    run_spmd(compare_over_tp, 2, cases, tp=2)


@pytest.mark.parametrize("name", NEW)
def test_pipeline_stages_compute_what_transformers_does(folders, name):
    expected, grads = theirs_by_name(folders, name)
    config = build_config(read_folder(folders(name)[1])[1])
    tokens, labels, positions = data(name)
    layers, x = config.model.num_layers, None
    sizes = dict(vocab_size=VOCAB, max_sequence_length=config.model.max_position_embeddings)
    stages = [StageSpec(range(layers - 1), post_process=False), StageSpec(range(layers - 1, layers), False)]
    models = [GPTModel(config.model, **sizes, stage=stage) for stage in stages]
    for model in models:
        pick_variants(model, Axis.single("cp"))
        hf.load_weights(folders(name)[1], model.parameters(), config.model, VOCAB)
    x = models[0](Batch(tokens, positions))
    models[1].set_input_tensor(x)
    losses = models[1](Batch(tokens, positions), labels)
    want = torch.nn.functional.cross_entropy(expected.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(losses, want, rtol=1e-5, atol=1e-5)
    losses.mean().backward()
    found = {}
    for param in (param for model in models for param in model.parameters()):
        for part in param.spec.parts:  # a tied weight is in both stages
            found[part.name] = found.get(part.name, 0) + part.local_view(param.grad)
    assert found.keys() == grads.keys()
    for key, want in grads.items():
        assert (found[key] - want).norm() <= 1e-4 * want.norm(), key


# Loading.


@pytest.mark.parametrize("name", ["gpt2", "llama-biases", "qwen3-tied"])
def test_tensor_parallel_ranks_load_their_slices(folders, name):
    _, folder = folders(name)
    whole = {part.name: part.local_view(p) for p in ours(folder).parameters() for part in p.spec.parts}
    for rank in range(2):
        for param in ours(folder, tp=Axis("tp", 2, rank, (0, 1))).parameters():
            for part in param.spec.parts:
                assert torch.equal(part.local_view(param), part.global_view(whole[part.name])), part.name


@pytest.mark.parametrize("name, ep, etp", [("qwen2_moe", 3, 1), ("mixtral", 1, 2), ("qwen3_moe-raw", 2, 2)])
def test_expert_ranks_load_their_slices(folders, name, ep, etp):
    _, folder = folders(name)
    whole = {part.name: part.local_view(p) for p in ours(folder).parameters() for part in p.spec.parts}
    found = {key: [] for key in whole if ".experts." in key}
    for i in range(ep * etp):
        axes = Mesh(ep=Axis("ep", ep, i // etp, ()), etp=Axis("etp", etp, i % etp, ()))
        for param in ours(folder, experts=axes).parameters():
            for part in param.spec.parts:
                assert torch.equal(part.local_view(param), part.global_view(whole[part.name])), part.name
                if part.name in found:
                    found[part.name].append(part.local_view(param))
    for key, slices in found.items():
        assert torch.equal(torch.cat(slices), whole[key]), key


def test_names_of_experts():
    """Files keep a name for each expert, and the second weight as [h, f]."""
    layer = "decoder.layers.11.mlp"
    ours = [f"{layer}.experts.23.linear_fc1.{kind}.weight" for kind in ("gate", "up")]
    ours += [f"{layer}.experts.23.linear_fc2.weight_t", f"{layer}.router.weight"]
    shapes = dict(zip(ours, ([3, 2], [3, 2], [3, 2], [4, 2]), strict=True))
    mixtral, qwen = hf.places(shapes, "mixtral"), hf.places(shapes, "qwen3_moe")
    moe = "model.layers.11.block_sparse_moe"
    assert [place.name for place in mixtral.values()] == [
        f"{moe}.{name}.weight" for name in ("experts.23.w1", "experts.23.w3", "experts.23.w2", "gate")
    ]
    names = ("experts.23.gate_proj", "experts.23.up_proj", "experts.23.down_proj", "gate")
    assert [p.name for p in qwen.values()] == [f"model.layers.11.mlp.{name}.weight" for name in names]
    assert [p.transposed for p in qwen.values()] == [False, False, True, False]
    assert qwen[ours[2]].shape([3, 2]) == [2, 3]
    assert torch.equal(qwen[ours[2]].ours(torch.arange(6).view(2, 3)), torch.tensor([[0, 3], [1, 4], [2, 5]]))
    shared = f"{layer}.shared_experts"
    parts = ("linear_fc1.gate.weight", "linear_fc1.up.weight", "linear_fc2.weight", "gate_weight")
    found = hf.places({f"{shared}.{name}": [3, 2] for name in parts}, "qwen2_moe")
    names = [f"shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")] + [
        "shared_expert_gate"
    ]
    assert [p.name for p in found.values()] == [f"model.layers.11.mlp.{name}.weight" for name in names]
    assert not any(place.transposed for place in found.values())
    with pytest.raises(ValueError, match="family llama has nothing like it"):
        hf.places(shapes, "llama")
    with pytest.raises(ValueError, match="expert_bias: the Hugging Face family"):
        hf.places({f"{layer}.router.x.expert_bias": [4]}, "mixtral")


def test_parts_of_one_tensor_have_their_own_numbers_of_rows():
    """Phi-3's: q, k and v one after the other, with fewer keys than queries."""
    layer = "decoder.layers.1.self_attention.linear_qkv"
    shapes = {f"{layer}.{part}.weight": (rows, 2) for part, rows in (("q", 4), ("k", 1), ("v", 1))}
    found = hf.places(shapes, "phi3")
    assert {place.name for place in found.values()} == {"model.layers.1.self_attn.qkv_proj.weight"}
    theirs = torch.arange(12).view(6, 2)
    ours = [place.ours(theirs) for place in found.values()]
    assert [part.tolist() for part in ours] == [theirs[:4].tolist(), [[8, 9]], [[10, 11]]]
    for place in found.values():
        assert place.shape([4, 2]) == [6, 2]


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
    with pytest.raises(ValueError, match="no model.safetensors; it has a config.json and no weights: copy"):
        ours(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="no model.safetensors; pytorch_model.bin is a pickle"):
        ours(tmp_path)
    for n in (1, 2):
        (tmp_path / f"model-{n}.safetensors").touch()
    with pytest.raises(ValueError, match="2 .safetensors files, and no model.safetensors.index.json"):
        ours(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="not an index"):
        ours(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 40)
    assert is_hf_folder(tmp_path)
    with pytest.raises(ValueError, match="model.safetensors: .*header"):
        ours(tmp_path)

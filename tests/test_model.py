"""The transformer against a second one written with torch's own functions, and against itself cut over tp."""

import itertools
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch
import torch.nn.functional as F

from nanomegatron.batch import Batch
from nanomegatron.comm import all_reduce
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import padded_vocab_size
from nanomegatron.layers import Norm
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.model import GPTModel
from nanomegatron.param import Init
from nanomegatron.pick_variants import pick_variants
from nanomegatron.variants.qk_norm_all_heads import HeadsNorm
from tests.spmd import run_spmd

VOCAB, SEQUENCE = 61, 12
GPT2 = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
ALONE = Mesh()
LLAMA = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=8,
    ffn_hidden_size=48,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
# What the families of today rarely have, all at once.
VARIED = TransformerConfig(
    **{
        **vars(LLAMA),
        "swiglu": False,
        "squared_relu": True,
        "apply_layernorm_1p": True,
        "rotary_percent": 0.5,
        "rotary_interleaved": True,
        "rotary_base": 100.0,
        "window_size": (3, 0),
        "window_attn_skip_freq": "[1]+[0]",
        "num_query_groups": 2,
    }
)
# Norms on both sides of a branch, whose biases and multiplier come before the second one; or no norm there.
SANDWICH = replace(GPT2, norm_placement="both", residual_multiplier=0.4)
MULTIPLIED = replace(GPT2, norm_placement="post", embedding_multiplier=3.0, logits_scaling=1.6)
# The same families with all that a layout can get wrong: key norms, biases, dropout.
GPT2_TP = replace(GPT2, qk_layernorm=True, hidden_dropout=0.1, attention_dropout=0.1)
LLAMA_TP = TransformerConfig(
    **{
        **vars(LLAMA),
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    }
)


def build(config, mesh=ALONE, vocab=VOCAB, scale=1.0):
    """A model whose parameters are all away from their special initial values 0 and 1."""
    padded = padded_vocab_size(vocab, 4, 4)
    sizes = dict(vocab_size=vocab, max_sequence_length=SEQUENCE, padded_vocab_size=padded)
    model = GPTModel(config, mesh=mesh, init=Init(seed=3), **sizes)
    for param in model.parameters():
        for part in param.spec.parts:
            generator = torch.Generator().manual_seed(crc32(part.name.encode()))
            noise = torch.randn(part.shape, generator=generator)
            part.local_view(param.data).add_(part.global_view(scale * noise))
    return model


@pytest.mark.parametrize("config", [GPT2_TP, LLAMA_TP])
def test_matrices_decay_and_nothing_else_does(config):
    """Weight decay pulls no bias and no norm's weight to zero."""
    for param in build(config).parameters():
        assert param.spec.decay == (param.dim() > 1), param.spec.name


def batch(b=3, dropout_seed=None, vocab=VOCAB):
    tokens = torch.randint(vocab, (b, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    positions, samples = torch.arange(SEQUENCE), torch.arange(10, 10 + b)
    return Batch(tokens[:, :-1], positions, samples, dropout_seed=dropout_seed), tokens[:, 1:]


def parts_of(model, value=lambda p: p.detach()):
    return {part.name: part.local_view(value(p)) for p in model.parameters() for part in p.spec.parts}


NORMS = ("input", "post_attention", "pre_mlp", "post_mlp")


class Reference:
    """The same decoder from the same weights by name, batch first, with nothing of the project in it."""

    def __init__(self, config, weights):
        self.config = config
        self.weights = {name: w.clone().requires_grad_() for name, w in weights.items()}

    def linear(self, x, name):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x, name):
        w, b = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        if self.config.apply_layernorm_1p:
            w = 1 + w
        return F.rms_norm(x, w.shape, w, 1e-5) if b is None else F.layer_norm(x, w.shape, w, b, 1e-5)

    def rotate(self, x):
        """x `[b, n, s, d]`; pairs (i, i + r/2), or (2i, 2i + 1), as complex numbers."""
        r = int(x.shape[-1] * self.config.rotary_percent)
        rates = self.config.rotary_base ** (-torch.arange(r // 2, dtype=torch.float64) / (r // 2))
        angles = torch.arange(x.shape[2])[:, None] * rates
        one, other = slice(0, r // 2), slice(r // 2, r)
        if self.config.rotary_interleaved:
            one, other = slice(0, r, 2), slice(1, r, 2)
        turned = torch.complex(x[..., one], x[..., other]) * torch.polar(torch.ones_like(angles), angles)
        result = x.clone()
        result[..., one], result[..., other] = turned.real.float(), turned.imag.float()
        return result

    def attention(self, x, name, window):
        def heads(part):
            y = self.linear(x, f"{name}.linear_qkv.{part}")
            return y.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

        q, k, v = heads("q"), heads("k"), heads("v")
        if self.config.position_embedding_type == "rope":
            q, k = self.rotate(q), self.rotate(k)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if window is not None:
            seen = seen.triu(-window)
        y = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        return self.linear(y.transpose(1, 2).flatten(2), f"{name}.linear_proj")

    def mlp(self, x, name):
        if self.config.swiglu:
            gate, up = (self.linear(x, f"{name}.linear_fc1.{part}") for part in ("gate", "up"))
            return self.linear(F.silu(gate) * up, f"{name}.linear_fc2")
        y = self.linear(x, f"{name}.linear_fc1")
        y = F.relu(y) ** 2 if self.config.squared_relu else F.gelu(y, approximate="tanh")
        return self.linear(y, f"{name}.linear_fc2")

    def branch(self, x, module, before, after):
        """What a branch adds: norms where there are weights for them, then the multiplier."""
        x = self.norm(x, before) if f"{before}.weight" in self.weights else x
        y = module(x)
        y = self.norm(y, after) if f"{after}.weight" in self.weights else y
        return y * self.config.residual_multiplier

    def logits(self, tokens):
        words = self.weights["embedding.word_embeddings.weight"]
        x = words[tokens] * self.config.embedding_multiplier
        if self.config.position_embedding_type == "learned_absolute":
            x = x + self.weights["embedding.position_embeddings.weight"][: tokens.shape[1]]
        window = self.config.window_size[0] if self.config.window_size else None
        for i in range(self.config.num_layers):
            layer, sees = f"decoder.layers.{i}", window if i == 0 else None
            attend = partial(self.attention, name=f"{layer}.self_attention", window=sees)
            mlp = partial(self.mlp, name=f"{layer}.mlp")
            norms = [f"{layer}.{place}_layernorm" for place in NORMS]
            x = x + self.branch(x, attend, *norms[:2])
            x = x + self.branch(x, mlp, *norms[2:])
        x = self.norm(x, "decoder.final_layernorm") / self.config.logits_scaling
        return F.linear(x, self.weights.get("output_layer.weight", words))


@pytest.mark.parametrize(
    "config",
    [GPT2, LLAMA, VARIED, SANDWICH, MULTIPLIED],
    ids=["gpt2", "llama", "varied", "sandwich", "multiplied"],
)
def test_logits_loss_and_gradients_are_the_references(config):
    model = build(config, scale=0.1)
    inputs, labels = batch()
    reference = Reference(config, parts_of(model))
    expected = reference.logits(inputs.tokens)
    logits = model(inputs)[..., :VOCAB].transpose(0, 1)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    loss = model(inputs, labels)
    expected = F.cross_entropy(expected.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.mean().backward()
    expected.mean().backward()
    found = parts_of(model, lambda p: p.grad)
    assert found.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        assert distance(found[name], weight.grad) < 1e-4, name


def distance(a, b):
    """Relative; a gradient that is zero but for rounding (a key bias without a key norm) counts as equal."""
    return 0.0 if max(a.norm(), b.norm()) < 1e-7 else (a - b).norm() / b.norm()


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_initial_loss_is_that_of_guessing(config):
    """ln(vocabulary), whatever it is padded to."""
    inputs, labels = batch(16)
    for padded in 64, 256:
        loss = GPTModel(
            config,
            vocab_size=VOCAB,
            max_sequence_length=SEQUENCE,
            padded_vocab_size=padded,
            init=Init(seed=3),
        )(inputs, labels).mean()
        assert loss.item() == pytest.approx(math.log(VOCAB), rel=0.03)


@pytest.mark.parametrize("from_one", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_begin_as_they_are_without_a_weight(kind, from_one):
    """Their weights are 1, or with --apply-layernorm-1p 0, to which 1 is added."""
    config = replace(GPT2, normalization=kind, apply_layernorm_1p=from_one)
    x = torch.randn(3, 2, 32)
    expected = F.layer_norm(x, (32,), eps=1e-5) if kind == "LayerNorm" else F.rms_norm(x, (32,), eps=1e-5)
    torch.testing.assert_close(Norm(config, 32, Axis.single(), Init(name="norm"))(x), expected)


@pytest.mark.parametrize("from_one", [False, True])
def test_a_norm_over_all_heads_is_one_of_their_features(from_one):
    config = replace(GPT2, normalization="RMSNorm", apply_layernorm_1p=from_one)
    norm = HeadsNorm(Norm(config, 8, Axis.single(), Init(name="norm")), 32)
    x = torch.randn(3, 2, 4, 8)
    norm.weight.data.normal_()
    expected = F.rms_norm(x.flatten(-2), (32,), norm.weight + from_one, eps=1e-5).view_as(x)
    torch.testing.assert_close(norm(x), expected)


def test_norms_over_all_heads_are_picked_behind_the_constructor():
    """In place of those of each head, with their names and types; a model without them is refused."""
    config = replace(LLAMA, qk_layernorm=True, qk_layernorm_all_heads=True)
    init = Init(dtype=torch.bfloat16)
    model = GPTModel(config, vocab_size=VOCAB, max_sequence_length=SEQUENCE, padded_vocab_size=64, init=init)
    names = [part.name for p in model.parameters() for part in p.spec.parts]
    inputs, labels = batch()
    with pytest.raises(RuntimeError, match="call pick_variants on the model"):
        model(inputs, labels)
    pick_variants(model, Axis.single("cp"))
    assert [part.name for p in model.parameters() for part in p.spec.parts] == names
    for layer in model.layers:
        q, k = layer.self_attention.q_norm.weight, layer.self_attention.k_norm.weight
        assert (len(q), len(k)) == (64, 32) and q.dtype == k.dtype == torch.bfloat16
        assert (q == 1).all() and not q.spec.decay and q.spec.parts[0].name.endswith("q_layernorm.weight")
    assert model(inputs, labels).isfinite().all()


def test_bounded_scores_need_whole_rows_over_cp():
    """A ring would bound nothing; settings refuse it, too, but not a model made by hand."""
    model = build(replace(LLAMA, attn_logit_softcapping=2.0))
    with pytest.raises(RuntimeError, match="--attn-logit-softcapping: the attention needs a variant"):
        model(*batch())
    pick_variants(model, Axis.single("cp"))
    inputs = replace(batch()[0], shard=SimpleNamespace(types=("p2p", "p2p")))
    with pytest.raises(ValueError, match="over cp needs a2a, not p2p"):
        model(inputs)


def cut_over_tp(mesh, config):
    """Loss and the gradient of every part as on one process, dropout included."""
    inputs, labels = batch(dropout_seed=7)
    inputs = replace(inputs, loss_weights=torch.full(labels.shape, 1 / labels.numel()))
    losses, grads = [], []
    for axis in Axis.single(), mesh.tp:
        model = build(config if axis is mesh.tp else replace(config, **PLAIN), Mesh(tp=axis), scale=0.1)
        losses.append(model(inputs, labels))
        (losses[-1] * inputs.loss_weights).sum().backward()
        parts = [(part, part.local_view(p.grad)) for p in model.parameters() for part in p.spec.parts]
        for part, grad in parts:
            grad.copy_(all_reduce(grad, part.partial or Axis.single()))
        grads.append({part.name: (part, grad) for part, grad in parts})
    assert distance(losses[1], losses[0]) < 1e-6
    with torch.no_grad():
        assert distance(model(batch()[0], labels), losses[0]) > 1e-3, "dropout took place"
    assert grads[0].keys() == grads[1].keys()
    for name, (part, grad) in grads[1].items():
        assert distance(grad, part.global_view(grads[0][name][1])) < 1e-5, name


PLAIN = dict(sequence_parallel=False, cross_entropy_loss_fusion=False, recompute_granularity=None)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
VARIANTS = {
    "": {},
    "sequence": dict(sequence_parallel=True),
    "fused loss": dict(cross_entropy_loss_fusion=True),
    "fused loss, sequence": dict(cross_entropy_loss_fusion=True, sequence_parallel=True),
    "recompute": FULL,
    "recompute, sequence": dict(sequence_parallel=True, **FULL),
    "recompute, spread": dict(distribute_saved_activations=True, **FULL),
    "recompute, spread, sequence": dict(distribute_saved_activations=True, sequence_parallel=True, **FULL),
}


def all_cut_over_tp(mesh, configs):
    for config in configs:
        cut_over_tp(mesh, config)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("config", [GPT2_TP, LLAMA_TP], ids=["gpt2", "llama"])
def test_tensor_parallel_is_one_process(config, tp):
    run_spmd(all_cut_over_tp, tp, [replace(config, **more) for more in VARIANTS.values()], tp=tp)


def loss_in_eval_mode(mesh):
    model = build(replace(LLAMA, sequence_parallel=True), mesh).eval()
    inputs, labels = batch()
    with torch.no_grad():
        expected = build(LLAMA, mesh)(inputs, labels)
        torch.testing.assert_close(model(inputs, labels), expected)
    with pytest.raises(RuntimeError, match=r"use model.train\(\)"):
        model(inputs, labels)


def test_no_gradients_in_eval_mode():
    """Whole sequences there, so each rank would have the whole gradient of a norm, not a summand."""
    run_spmd(loss_in_eval_mode, 2, tp=2)


def test_ranks_that_share_a_head_are_one_process():
    """Fewer key/value heads than ranks, with their norms and biases."""
    pairs = ((1, "sequence"), (2, ""), (2, "sequence"))
    configs = [replace(LLAMA_TP, num_query_groups=heads, **VARIANTS[variant]) for heads, variant in pairs]
    run_spmd(all_cut_over_tp, 4, configs, tp=4)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_initial_weights_do_not_depend_on_tp(config):
    """The slices of 2 and 4 ranks are those of the whole model, to the bit."""
    whole = parts_of(GPTModel(config, vocab_size=VOCAB, max_sequence_length=SEQUENCE, padded_vocab_size=64))
    for size in 2, 4:
        for rank in range(size):
            model = GPTModel(
                config,
                vocab_size=VOCAB,
                max_sequence_length=SEQUENCE,
                padded_vocab_size=64,
                mesh=Mesh(tp=Axis("tp", size, rank, tuple(range(size)))),
            )
            for param in model.parameters():
                for part in param.spec.parts:
                    assert torch.equal(part.local_view(param), part.global_view(whole[part.name])), (
                        part.name,
                        rank,
                    )


def test_output_projections_start_smaller():
    """0.02, and by sqrt(2 layers) less where a layer writes into the residual stream."""
    config = TransformerConfig(num_layers=8, hidden_size=128, num_attention_heads=4)
    for name, weight in parts_of(
        GPTModel(config, vocab_size=VOCAB, max_sequence_length=SEQUENCE, padded_vocab_size=64)
    ).items():
        if name.endswith("weight") and "norm" not in name:
            std = 0.005 if "proj" in name or "fc2" in name else 0.02
            assert weight.std().item() == pytest.approx(std, rel=0.05), name


def test_a_token_sees_no_later_one():
    model = build(LLAMA, scale=0.1)
    inputs, _ = batch()
    changed = inputs.tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % VOCAB
    found = model(Batch(changed, inputs.positions))
    expected = model(inputs)
    torch.testing.assert_close(found[:6], expected[:6], rtol=1e-5, atol=1e-5)
    assert (found[6:] - expected[6:]).abs().max() > 0.1


@pytest.mark.parametrize("config", [GPT2, LLAMA, VARIED], ids=["gpt2", "llama", "varied"])
@pytest.mark.parametrize("backend", ["flash", "unfused"])
def test_packed_documents_are_as_each_alone(config, backend):
    """Where positions start over and attention ends with a document, its neighbours make no difference."""
    lengths = (5, 7, 1, 2, 9)  # two rows of 12
    model = build(TransformerConfig(**{**vars(config), "attention_backend": backend}), scale=0.1)
    inputs, labels = batch(2)
    starts = torch.tensor((0, 5, 12, 13, 15, 24))
    position_ids = torch.cat([torch.arange(n) for n in lengths]).view(2, SEQUENCE)
    packed = dict(position_ids=position_ids, cu_seqlens=starts.int(), max_seqlen=max(lengths))
    found = model(Batch(inputs.tokens, inputs.positions, **packed), labels).flatten()
    for begin, end in itertools.pairwise(starts.tolist()):
        tokens, own = (x.flatten()[begin:end][None] for x in (inputs.tokens, labels))
        alone = model(Batch(tokens, torch.arange(end - begin)), own)[0]
        torch.testing.assert_close(found[begin:end], alone, rtol=1e-5, atol=1e-5)
    across = model(inputs, labels)
    assert not torch.allclose(found, across.flatten(), atol=1e-2), "they see each other else"
    learned = model.embedding.position_embeddings is not None  # rotary positions go on with attention
    assert torch.equal(model(replace(inputs, position_ids=position_ids), labels), across) != learned


def test_every_dropout_has_its_own_mask(monkeypatch):
    """One on the embedding, two and the attention's a layer; numbered alike on every layout."""
    sites = []
    for name in ("nanomegatron.ops.dropout.dropout", "nanomegatron.attention.attention_dropout"):
        monkeypatch.setattr(name, lambda x, p, seed, site, *_, **__: sites.append((p, seed, site)) or x)
    build(GPT2_TP)(batch(dropout_seed=7)[0])
    assert sites == [(0.1, 7, site) for site in (0, -1, 1, 2, -2, 3, 4)]


def test_evaluation_has_no_dropout():
    """Both kinds of dropout follow the seed in the batch; none means none."""
    for kind in ("attention_dropout", "hidden_dropout"):
        model = build(TransformerConfig(**{**vars(GPT2), kind: 0.5}), scale=0.1)
        plain, expected = batch()[0], build(GPT2, scale=0.1)(batch()[0])
        torch.testing.assert_close(model(plain), expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(batch(dropout_seed=1)[0]), expected, rtol=1e-2, atol=1e-2)


LAYER = "decoder.layers.0"
NAMES = {
    "gpt2": [
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        f"{LAYER}.input_layernorm.weight",
        f"{LAYER}.input_layernorm.bias",
        *(f"{LAYER}.self_attention.linear_qkv.{part}.weight" for part in "qkv"),
        *(f"{LAYER}.self_attention.linear_qkv.{part}.bias" for part in "qkv"),
        f"{LAYER}.self_attention.linear_proj.weight",
        f"{LAYER}.self_attention.linear_proj.bias",
        f"{LAYER}.pre_mlp_layernorm.weight",
        f"{LAYER}.pre_mlp_layernorm.bias",
        f"{LAYER}.mlp.linear_fc1.weight",
        f"{LAYER}.mlp.linear_fc1.bias",
        f"{LAYER}.mlp.linear_fc2.weight",
        f"{LAYER}.mlp.linear_fc2.bias",
        "decoder.final_layernorm.weight",
        "decoder.final_layernorm.bias",
    ],
    "qwen3": [
        "embedding.word_embeddings.weight",
        f"{LAYER}.input_layernorm.weight",
        *(f"{LAYER}.self_attention.linear_qkv.{part}.weight" for part in "qkv"),
        f"{LAYER}.self_attention.linear_proj.weight",
        f"{LAYER}.self_attention.q_layernorm.weight",
        f"{LAYER}.self_attention.k_layernorm.weight",
        f"{LAYER}.pre_mlp_layernorm.weight",
        f"{LAYER}.mlp.linear_fc1.gate.weight",
        f"{LAYER}.mlp.linear_fc1.up.weight",
        f"{LAYER}.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ],
}


@pytest.mark.parametrize("family", NAMES)
def test_global_names(family):
    """They seed the weights and name them in checkpoints: a change of one breaks every older run."""
    config = GPT2 if family == "gpt2" else TransformerConfig(**{**vars(LLAMA), "qk_layernorm": True})
    model = GPTModel(
        TransformerConfig(**{**vars(config), "num_layers": 1}),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        padded_vocab_size=64,
    )
    names = [part.name for p in model.parameters() for part in p.spec.parts]
    assert sorted(names) == sorted(NAMES[family])


def test_global_names_are_unique():
    model = GPTModel(LLAMA, vocab_size=VOCAB, max_sequence_length=SEQUENCE, padded_vocab_size=64)
    names = [part.name for p in model.parameters() for part in p.spec.parts]
    assert len(set(names)) == len(names) == 2 * 9 + 3

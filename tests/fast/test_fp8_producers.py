"""Norms and gated units that quantize for the FP8 layer behind them, against layers that do it themselves."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.config.model import TransformerConfig
from nanomegatron.fast.fp8_producers import fp8_placeholder, quantizing_mlp, quantizing_norm
from nanomegatron.fast.fused_layer import FusedLayers
from nanomegatron.fp8 import RECIPES, Recipe, Scales
from nanomegatron.fp8_linear import use_fp8
from nanomegatron.mesh import Mesh
from nanomegatron.model import TransformerLayer, run_layers
from nanomegatron.ops.cross_entropy import cross_entropy_grad_
from nanomegatron.ops.fp8_cast import Fp8Output
from nanomegatron.ops.fp8_fused import (
    bias_act_backward_fp8,
    bias_act_fp8,
    cross_entropy_grad_fp8,
    gated_backward_fp8,
    gated_fp8,
    norm_fp8,
)
from nanomegatron.ops.gelu import EXACT, SQUARED_RELU, TANH, bias_act
from nanomegatron.ops.norm import add_norm
from nanomegatron.ops.swiglu import GELU, SILU, gated
from nanomegatron.param import Init
from nanomegatron.tp import LinearFunction
from tests.ops.test_fp8_fused import (
    DTYPES,
    E5M2,
    EPS,
    biased_case,
    gated_case,
    loss_case,
    norm_case,
    wanted,
)

CPU = torch.device("cpu")


def config_of(**more):
    known = {"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4}
    llama = {"swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True}
    return TransformerConfig(**known, **(llama | more))


GPT2 = {"swiglu": False, "normalization": "LayerNorm", "disable_bias_linear": False}
MODELS = [{}, GPT2 | {"hidden_dropout": 0.1}, GPT2 | {"squared_relu": True, "disable_bias_linear": True}]


def layer_of(recipe, dtype=torch.float32, early=True, **more):
    """A layer in FP8, its scales, and what runs it; early: norms and units quantize."""
    config = config_of(**more)
    layer = TransformerLayer(config, 0, Mesh(), Init(3, dtype, CPU, "layer"))
    recipe = Recipe(RECIPES[recipe])
    attention, mlp = layer.self_attention, layer.mlp
    linears = attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2
    scales = Scales(recipe, [use_fp8(linear, recipe) for linear in linears], CPU)
    if not early:
        return layer, scales, run_layers
    mlp.run = partial(quantizing_mlp, discards=config.recomputes("mlp_act"))
    return layer, scales, FusedLayers(quantizing_norm, config.recomputes("layernorm"))


def steps(layer, scales, run, count=3, saved=None):
    """Losses and gradients of some steps; saved: a list for the bytes that autograd keeps in the last one."""
    torch.manual_seed(0)
    found = []
    batch = Batch(torch.zeros(2, 32, dtype=torch.long), torch.arange(32), torch.arange(2), dropout_seed=1)
    batch = replace(batch, residual_positions=batch.positions)
    for step in range(count):
        x = torch.randn(32, 2, 64).to(layer.input_layernorm.weight.dtype).requires_grad_()
        layer.zero_grad()
        kept: dict[int, int] = {}

        def pack(t, kept=kept):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = run([layer], x, batch, {None: None})
        if saved is not None and step == count - 1:
            saved.append(sum(kept.values()))
        (y.float() * torch.linspace(-1, 1, 64)).sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        scales.end_step()
    return found


def near(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * b.abs().max().item())


@pytest.mark.parametrize("model", MODELS, ids=["llama", "gpt2", "squared relu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_as_layers_that_quantize_themselves(recipe, model):
    """In fp32 a fused cast and one after it round alike: all is equal but for the order of some sums."""
    fused = steps(*layer_of(recipe, **model))
    for got, expected in zip(fused, steps(*layer_of(recipe, early=False, **model)), strict=True):
        near(got, expected)


@pytest.mark.parametrize("model", MODELS, ids=["llama", "gpt2", "squared relu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_amaxes_and_scales_are_those_of_layers_that_quantize_themselves(recipe, model):
    """To the bit, in bf16: what a fused cast sees, rounded to FP8 and kept as amax, is what another would."""
    fused, its, run = layer_of(recipe, torch.bfloat16, **model)
    plain, own, run_plain = layer_of(recipe, torch.bfloat16, early=False, **model)
    for got, expected in zip(steps(fused, its, run), steps(plain, own, run_plain), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(its.amax_history, own.amax_history) and torch.equal(its.scale, own.scale)


@pytest.mark.parametrize("modules", ["layernorm", "mlp_act", "mlp", "layernorm mlp_act", "layernorm mlp"])
@pytest.mark.parametrize("model", MODELS[:2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_casts_are_the_same_to_the_bit(recipe, model, modules):
    """And take less memory: what a recomputed norm or unit gives is not kept, not in FP8 either."""
    whole, less = [], []
    modules, dtype = modules.split(), torch.bfloat16
    recompute = {"recompute_granularity": "selective", "recompute_modules": modules}
    expected = steps(*layer_of(recipe, dtype, **model), saved=whole)
    found = steps(*layer_of(recipe, dtype, **recompute, **model), saved=less)
    for a, b in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert less[0] < whole[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_kept_for_the_backward_is_half(recipe):
    """Of what linear layers read, 64 rows: normed, context, normed again with 64 features, y with 96."""
    kept = []
    steps(*layer_of(recipe, torch.bfloat16), saved=kept)
    layer, scales, run = layer_of(recipe, torch.bfloat16, early=False)
    for linear in *layer.self_attention.children(), *layer.mlp.children():
        linear.linear = LinearFunction.apply
    steps(layer, scales, run, saved=kept)
    attention_too = 64 * 64  # the context is kept by attention, too, whichever layer reads it
    saved = 64 * (64 + 64 + 96) - attention_too
    if recipe == "delayed":  # fused: nor is there anything of plain torch's unit and norm
        assert kept[1] - kept[0] > saved
    else:
        assert kept[1] - kept[0] == pytest.approx(saved, abs=64 * 24)


@pytest.mark.parametrize("name", ["linear_fc1", "linear_fc2"])
@pytest.mark.parametrize("model", MODELS[:2], ids=["llama", "gpt2"])
def test_hooks_see_no_placeholder(model, name):
    """With one, each layer quantizes its own input, to the same bits."""
    expected = steps(*layer_of("delayed", torch.bfloat16, **model))
    layer, scales, run = layer_of("delayed", torch.bfloat16, **model)
    seen = []

    def look(module, inputs, output):
        seen.append(inputs[0].isfinite().all())

    layer.mlp.get_submodule(name).register_forward_hook(look)
    found = steps(layer, scales, run)
    assert len(seen) == 3 and all(seen)
    for a, b in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_reading_a_placeholder_gives_nan():
    x = fp8_placeholder(torch.zeros(2, 3), (2, 3))
    assert x.isnan().all() and x.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_references_are_casts_of_the_ops_without_fp8(dtype):
    """To the bit, with their amax: values, and gradients as autograd makes them."""

    def same(pair, spec: Fp8Output, plain: torch.Tensor) -> None:
        expected = wanted(E5M2)
        row, flip = expected.cast(plain.detach().flatten(0, -2))
        for found, right in zip((*pair, spec.amax), (row, flip, expected.amax), strict=True):
            assert torch.equal(found.float(), right.float())

    x, residual, weight, bias = norm_case(6, 24, dtype, True, True)
    got = norm_fp8(x, residual, weight, bias, EPS, False, spec := wanted(E5M2))
    same((got.rowwise, got.columnwise), spec, add_norm(x, residual, weight, bias, EPS)[0])
    for act in (SILU, GELU):
        x, grad = gated_case((3, 2, 20), dtype)
        y = gated(x.requires_grad_(), act)
        same(gated_fp8(x, act, spec := wanted(E5M2)), spec, y)
        dx = torch.autograd.grad(y, x, grad)[0]
        same(gated_backward_fp8(grad, x, act, spec := wanted(E5M2)), spec, dx)
    for act in (TANH, EXACT, SQUARED_RELU):
        x, bias, grad = (t.requires_grad_() for t in biased_case((3, 2, 20), dtype))
        y = bias_act(x, bias, act=act)
        same(bias_act_fp8(x, bias, act, spec := wanted(E5M2)), spec, y)
        dx, db = torch.autograd.grad(y, (x, bias), grad)
        dbias = torch.empty_like(bias)
        pair = bias_act_backward_fp8(grad, x, bias, act, spec := wanted(E5M2), dbias)
        same(pair, spec, dx)
        assert torch.equal(dbias, db)
    logits, labels, lse, grad = loss_case(6, 20, dtype)
    pair = cross_entropy_grad_fp8(logits, labels, lse, grad, 17, spec := wanted(E5M2))
    same(pair, spec, cross_entropy_grad_(logits, labels, lse, grad, 17))

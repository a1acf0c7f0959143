"""Which GELU an MLP has, that of Megatron's fused kernel (tanh) or the exact one: against Megatron's MLP."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanomegatron.config.model import TransformerConfig
from nanomegatron.layers import MLP
from nanomegatron.mesh import Axis, Mesh
from nanomegatron.moe import GroupedExperts
from nanomegatron.ops.swiglu import activation
from nanomegatron.param import Init

CONFIG = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, ffn_hidden_size=24)
CASES = {  # settings, whether Megatron fuses bias and GELU: its arguments.py
    "fused": ({}, True),
    "apart": (dict(bias_gelu_fusion=False), False),
    "no biases": (dict(disable_bias_linear=True), False),
}


class Linear(nn.Module):
    """A layer as Megatron's MLP builds it, with our weights; `skip_bias_add`: gives (y, bias)."""

    def __init__(self, *sizes, layer, **_):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return x @ self.layer.weight.t(), self.layer.bias


@pytest.fixture(scope="module")
def megatron():
    """Its MLP with the layers of ours; its fused functions are not compiled, which takes long."""
    mlp = pytest.importorskip("megatron.core.transformer.mlp")
    config = pytest.importorskip("megatron.core.transformer").TransformerConfig

    def built(ours: MLP, biases: bool, fused: bool) -> nn.Module:
        shape = dict(num_layers=1, hidden_size=8, num_attention_heads=1, ffn_hidden_size=24)
        how = config(**shape, add_bias_linear=biases, bias_activation_fusion=fused)
        layers = {
            name: mlp.ModuleSpec(module=Linear, params={"layer": layer})
            for name, layer in ours.named_children()
        }
        return mlp.MLP(how, mlp.MLPSubmodules(**layers), tp_group=SimpleNamespace(size=lambda: 1))

    with torch.compiler.set_stance("force_eager"):
        yield built


@pytest.mark.parametrize("case", CASES)
def test_it_is_megatrons(case, megatron):
    settings, fused = CASES[case]
    config = replace(CONFIG, **settings)
    torch.manual_seed(0)
    ours, x = MLP(config, Axis.single(), Init(std=1.0), config.ffn_size), torch.randn(5, 2, 8)
    for bias in (ours.linear_fc1.bias, ours.linear_fc2.bias):
        if bias is not None:
            nn.init.normal_(bias)
    theirs = megatron(ours, not config.disable_bias_linear, fused)
    expected = sum(part for part in theirs(x) if part is not None)
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-5)
    scores = torch.ones(5, 2)  # what Megatron's experts are multiplied by; fused, they have no GELU
    if fused:
        with pytest.raises(ValueError, match="Only support fusion"):
            theirs(x, scores)
    else:
        found = sum(part for part in theirs(x, scores) if part is not None)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("case", CASES)
def test_experts_have_the_same(case):
    settings, fused = CASES[case]
    config, x = replace(CONFIG, num_experts=2, **settings), torch.linspace(-4, 4, 97)
    experts = GroupedExperts(config, Mesh(), Init(name="decoder.layers.0.mlp.experts"), activation(config))
    expected = F.gelu(x, approximate="tanh" if fused else "none")
    assert torch.equal(experts.act(x), expected) and torch.equal(activation(config)(x), expected)
    assert (F.gelu(x) - F.gelu(x, approximate="tanh")).abs().max() > 4e-4  # so equal says which

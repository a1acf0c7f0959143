"""The planned memory of FP8 training against what autograd holds."""

from dataclasses import replace

import pytest
import torch

from nanomegatron.config.model import TransformerConfig
from nanomegatron.fp8 import RECIPES, Recipe, Tensorwise
from nanomegatron.plan.memory import memory
from tests.plan.test_memory import CPU, LLAMA, TINY, bytes_kept, config


@pytest.mark.parametrize("modules", [(), ("mlp",)])
@pytest.mark.parametrize("family", ["llama", "gpt2", "squared relu"])
def test_activations_in_fp8(family, modules):
    recompute = dict(recompute_granularity="selective", recompute_modules=modules) if modules else {}
    model = replace(TINY[family], **recompute)
    run = config(model, 32, 4)
    run = replace(run, precision=replace(run.precision, fp8_format="hybrid", fp8_recipe="tensorwise"))
    more, kept = replace(run, model=replace(model, num_layers=3)), []
    for shape in (run.model, more.model):
        kept.append(bytes_kept(shape, 32, 4, torch.bfloat16, recipe=Recipe(Tensorwise), fp8=[]))
    layer = memory(more, 128, CPU)["activations"] - memory(run, 128, CPU)["activations"]
    assert layer == pytest.approx(kept[1] - kept[0], rel=0.01)


SPARSE = TransformerConfig(
    2,
    64,
    8,
    160,
    num_query_groups=2,
    num_experts=4,
    moe_ffn_hidden_size=96,
    max_position_embeddings=32,
    **LLAMA,
)
SHARED = dict(moe_shared_expert_intermediate_size=48)
ACT = dict(recompute_granularity="selective", recompute_modules=("moe_act",))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("changes", [{}, SHARED, ACT], ids=["", "shared", "moe_act"])
def test_experts_in_fp8(changes, recipe):
    """A layer's activations, in FP8 with rows of padding, and the casts of its weights."""
    model, kept = replace(SPARSE, **changes), []
    runs = [config(replace(model, num_layers=layers), 32, 16) for layers in (2, 3)]
    runs = [
        replace(run, precision=replace(run.precision, fp8_format="hybrid", fp8_recipe=recipe)) for run in runs
    ]
    for run in runs:
        layers = []
        kept.append(bytes_kept(run.model, 32, 16, torch.bfloat16, recipe=Recipe(RECIPES[recipe]), fp8=layers))
        casts = [layer.cached_weight for layer in layers]
        assert memory(run, 128, CPU)["FP8 weights"] == sum(c.data.numel() for pair in casts for c in pair)
    two, three = (memory(run, 128, CPU)["activations"] for run in runs)
    assert three - two == pytest.approx(kept[1] - kept[0], rel=0.02)

"""The planned memory of FP8 training against what autograd holds."""

from dataclasses import replace

import pytest
import torch

from nanomegatron.fp8 import Recipe, Scales
from nanomegatron.plan import memory
from tests.test_plan import CPU, TINY, bytes_kept, config


@pytest.mark.parametrize("modules", [(), ("mlp",)])
@pytest.mark.parametrize("family", ["llama", "gpt2", "squared relu"])
def test_activations_in_fp8(family, modules):
    recompute = dict(recompute_granularity="selective", recompute_modules=modules) if modules else {}
    model = replace(TINY[family], **recompute)
    run = config(model, 32, 4)
    run = replace(run, precision=replace(run.precision, fp8_format="hybrid", fp8_recipe="tensorwise"))
    two, three = (
        bytes_kept(
            replace(model, num_layers=layers), 32, 4, torch.bfloat16, scales=Scales(Recipe("tensorwise"), CPU)
        )
        for layers in (2, 3)
    )
    more = replace(run, model=replace(model, num_layers=3))
    layer = memory(more, 128, CPU)["activations"] - memory(run, 128, CPU)["activations"]
    assert layer == pytest.approx(three - two, rel=0.008)

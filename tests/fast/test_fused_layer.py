"""Layers with their sums in the kernels of norms, `fast/fused_layer.py`, beside plain ones, to the bit."""

from dataclasses import replace

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.fast.fused_layer import FusedLayers
from nanomegatron.model import GPTModel, run_layers
from tests.ops.test_paths import DROPOUT, GPT2, LLAMA, QWEN, step

BIASES = replace(LLAMA, disable_bias_linear=False)
EXPERTS = replace(
    BIASES,
    num_experts=4,
    moe_router_topk=2,
    moe_layer_freq="[0,1]",
    moe_shared_expert_intermediate_size=16,
    hidden_dropout=0.1,
)


def selective(config, *modules: str):
    return replace(config, recompute_granularity="selective", recompute_modules=modules)


CONFIGS = {
    "biases": BIASES,
    "dropout and multiplier": replace(DROPOUT, residual_multiplier=0.3),
    "norms after": replace(DROPOUT, norm_placement="post"),
    "norms on both sides": replace(BIASES, norm_placement="both"),
    "1 + weight": replace(QWEN, apply_layernorm_1p=True),
    "gpt2": replace(GPT2, hidden_dropout=0.1),
    "experts": EXPERTS,
    "mlp recomputed": selective(DROPOUT, "mlp"),
    "mlp_act recomputed": selective(DROPOUT, "mlp_act"),
    "layernorm recomputed": selective(BIASES, "layernorm"),
    "full": replace(DROPOUT, recompute_granularity="full", recompute_method="uniform"),
    "without fusion": replace(DROPOUT, persist_layer_norm=False, bias_dropout_fusion=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_are_those_of_plain_layers(name):
    fused, plain = (step(CONFIGS[name], fused) for fused in (True, False))
    assert all(torch.equal(*pair) for pair in zip(fused, plain, strict=True))


@pytest.mark.parametrize("module", ["input_layernorm", "self_attention.linear_proj", "mlp.linear_fc2"])
def test_a_layer_with_a_hook_runs_in_the_plain_form(module):
    """A hook sees its module in any form; the layers around it, and the loss, are as before."""
    tokens = torch.arange(2 * 13).view(2, 13) * 5 % 61
    batch = Batch(tokens[:, :-1], torch.arange(12), torch.arange(2), dropout_seed=3)
    model = GPTModel(replace(DROPOUT, num_layers=3), vocab_size=61, max_sequence_length=12)
    losses = []
    for way in (run_layers, FusedLayers()):
        seen = []
        model.run_layers = way
        hook = (
            model.layers[1].get_submodule(module).register_forward_hook(lambda *_, seen=seen: seen.append(1))
        )
        losses.append(model(batch, tokens[:, 1:]))
        hook.remove()
        assert seen == [1]
    assert torch.equal(*losses)

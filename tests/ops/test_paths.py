"""A model with the kernels of its layers and without: the same losses and gradients, chosen by settings."""

from dataclasses import replace

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.config.cli import parse
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.run_folder import resume_conflicts
from nanomegatron.fast.fused_layer import FusedLayers
from nanomegatron.model import GPTModel
from nanomegatron.ops import bias as ops_bias
from nanomegatron.ops import cross_entropy as ops_loss
from nanomegatron.ops import dropout as ops_dropout
from nanomegatron.ops import gelu as ops_gelu
from nanomegatron.ops import norm as ops_norm
from nanomegatron.ops import rope as ops_rope
from nanomegatron.ops import softmax as ops_softmax
from nanomegatron.ops import swiglu as ops_mlp
from nanomegatron.ops.paths import SWITCHES
from nanomegatron.pick_fast_paths import Paths, install
from nanomegatron.plan.layer import Machine
from nanomegatron.plan.memory import memory
from nanomegatron.pp import ModelChunks
from tests import cuda_on_cpu
from tests.plan import test_memory as test_plan

MODULES = ops_norm, ops_dropout, ops_rope, ops_mlp, ops_softmax
LLAMA = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    attention_backend="unfused",
)
QWEN = replace(LLAMA, qk_layernorm=True, add_qkv_bias=True)
GPT2 = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, attention_backend="unfused")
DROPOUT = replace(LLAMA, disable_bias_linear=False, hidden_dropout=0.1)
# What the ops of a layer say to `usable`, by the switch that keeps them from asking.
ASK = {
    "masked_softmax_fusion": {"scaled_softmax"},
    "rope_fusion": {"rope"},
    "bias_swiglu_fusion": {"gated"},
    "bias_dropout_fusion": {"bias_dropout_add"},
    "persist_layer_norm": {"norm", "add_norm"},
}


def step(config: TransformerConfig, fused: bool = True) -> list[torch.Tensor]:
    """Losses, and all gradients of their sum; fused: of `FusedLayers`, else of the plain layers."""
    tokens = torch.arange(2 * 13).view(2, 13) * 5 % 61
    model = GPTModel(config, vocab_size=61, max_sequence_length=12)
    if fused:
        layers = FusedLayers(recompute=config.recomputes("layernorm"))
        install(ModelChunks([model]), Paths(layers, discards=config.recompute_modules))
    batch = Batch(tokens[:, :-1], torch.arange(12), torch.arange(2), dropout_seed=3)
    losses = model(batch, tokens[:, 1:])
    losses.sum().backward()
    return [losses.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_is_a_flag_and_may_change_when_a_run_goes_on(switch):
    flags = ["--config", "tiny-cpu"]
    usual, other = (parse([*flags, *more]) for more in ([], [f"--no-{switch.replace('_', '-')}"]))
    assert not other.errors and other.notes == usual.notes
    assert other.config.model == replace(usual.config.model, **{switch: False})
    assert resume_conflicts(usual.config, other.config) == []


@pytest.mark.parametrize("config", [LLAMA, QWEN, DROPOUT], ids=["llama", "qwen", "dropout"])
@pytest.mark.parametrize("switch", [None, *SWITCHES])
def test_a_switch_puts_its_kernels_aside_and_changes_no_number(switch, config, monkeypatch):
    usual, asked = step(config, fused=False), set()
    for module in MODULES:
        monkeypatch.setattr(module, "usable", lambda x, op="": bool(asked.add(op)))
    found = step(config if switch is None else replace(config, **{switch: False}))
    fused = ASK["bias_dropout_fusion"] if config is not DROPOUT else set()
    assert asked == set.union(*ASK.values()) - ASK.get(switch, set()) - fused
    for ours, theirs in zip(found, usual, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.skipif(cuda_on_cpu.cuda_home() is None, reason="no CUDA headers here")
@pytest.mark.parametrize(
    "config", [LLAMA, QWEN, replace(GPT2, hidden_dropout=0.1)], ids=["llama", "qwen", "gpt2"]
)
def test_a_model_on_kernels_is_the_one_without(config, monkeypatch):
    """All kernels of a forward and backward together, run by the emulator."""
    usual = step(config, fused=False)
    names = "swiglu gelu column_sums norm norm_backward dropout softmax rope cross_entropy".split()
    cuda_on_cpu.run_here(monkeypatch, tuple(names), *MODULES, ops_loss, ops_bias, ops_gelu)
    for ours, theirs in zip(step(config), usual, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_memory_of_llama3_8b_on_kernels():
    """No silu(gate), queries and keys in the packed projection, no logits in fp32."""

    def planned(**switches: bool) -> dict[str, float]:
        model = replace(test_plan.LLAMA3_8B, **switches)
        return memory(test_plan.config(model, 8192, 1), 128256, Machine(gpu=True, kernels=True))

    token, parts = 2 * (4 * 4096 + 6144 + 4096 + 3 * 14336) + 4 * (2 + 32), planned()
    assert parts["activations"] == 8192 * (32 * token + 2 * 2 * 4096)
    assert parts["logits and loss"] == 128256 * 2 * 8192
    more = planned(rope_fusion=False, bias_swiglu_fusion=False)["activations"] - parts["activations"]
    assert more == 8192 * 32 * 2 * (5120 + 14336)
    assert planned(hidden_dropout=0.1) == parts  # masks are computed again
    more = planned(hidden_dropout=0.1, bias_dropout_fusion=False)["activations"] - parts["activations"]
    assert more == 8192 * (32 * 2 + 1) * 2 * 4096

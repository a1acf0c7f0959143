"""FLOP conventions, parameters and peaks against published figures."""

import itertools
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanomegatron.config.settings import Config, RunConfig, TransformerConfig
from nanomegatron.plan import flops as metrics
from nanomegatron.plan.flops import CONVENTIONS, bits_per_byte, flops_per_iteration, parameter_count
from nanomegatron.plan.gpus import device_peak
from nanomegatron.report.speed import speed_of

LLAMA = dict(
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
GPT2_SMALL = TransformerConfig(12, 768, 12, max_position_embeddings=1024)
LLAMA2_7B = TransformerConfig(32, 4096, 32, 11008, **LLAMA)
LLAMA3_8B = TransformerConfig(32, 4096, 32, 14336, num_query_groups=8, **LLAMA)
LLAMA3_70B = TransformerConfig(80, 8192, 64, 28672, num_query_groups=8, **LLAMA)
MISTRAL_7B = LLAMA3_8B
QWEN3_8B = TransformerConfig(36, 4096, 32, 12288, 128, 8, qk_layernorm=True, **LLAMA)
MIXTRAL = TransformerConfig(32, 4096, 32, 14336, num_query_groups=8, num_experts=8, **LLAMA)
QWEN3_30B = TransformerConfig(
    48,
    2048,
    32,
    6144,
    128,
    4,
    qk_layernorm=True,
    num_experts=128,
    moe_router_topk=8,
    moe_ffn_hidden_size=768,
    **LLAMA,
)
QWEN15_MOE = TransformerConfig(
    24,
    2048,
    16,
    add_qkv_bias=True,
    num_experts=60,
    moe_router_topk=4,
    moe_ffn_hidden_size=1408,
    moe_shared_expert_intermediate_size=5632,
    moe_shared_expert_gate=True,
    **LLAMA,
)
QWEN25_05B = TransformerConfig(
    24,
    896,
    14,
    4864,
    num_query_groups=2,
    add_qkv_bias=True,
    **LLAMA | {"untie_embeddings_and_output_weights": False},
)


def test_flops_are_megatrons_to_the_last_one():
    assert flops_per_iteration(GPT2_SMALL, 50304, 1024, 1) == 817184636928
    assert flops_per_iteration(LLAMA3_8B, 128256, 8192, 1) == 421645529382912
    assert flops_per_iteration(LLAMA3_8B, 128256, 8192, 24) == 24 * 421645529382912
    assert flops_per_iteration(MIXTRAL, 32000, 4096, 1) == 326477644038144


def test_of_experts_those_of_a_token_are_work():
    """Dense and sparse layers, shared experts; their weights, and with 6n the router's and the gate's too."""
    shape = dict(num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=192, **LLAMA)
    sparse = dict(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=96)
    dense, model = TransformerConfig(**shape), TransformerConfig(**shape, **sparse)
    for s, convention in itertools.product((1, 32), ("megatron", "full-attention")):
        assert len({flops_per_iteration(m, 128, s, 1, convention) for m in (dense, model)}) == 1
    more = replace(model, moe_layer_freq="[0]*1+[1]*3", moe_shared_expert_intermediate_size=32)
    extra = 3 * 3 * 64 * 32
    assert flops_per_iteration(more, 128, 1, 1) - flops_per_iteration(dense, 128, 1, 1) == 6 * extra
    extra += 3 * (64 * 8 + 64)
    more = replace(more, moe_shared_expert_gate=True)
    assert (
        flops_per_iteration(more, 128, 1, 1, "6n") - flops_per_iteration(dense, 128, 1, 1, "6n") == 6 * extra
    )


def test_keys_outside_the_window_are_no_work():
    """One layer in three sees all: counted key by key, all squares as by definition half a key short."""
    s, window = 64, 9
    model = TransformerConfig(3, 48, 4, window_size=(window, 0), window_attn_skip_freq="3")
    plain = TransformerConfig(3, 48, 4)
    outside = sum(1 for query in range(s) for key in range(query + 1) if query - key > window)
    half_a_key = (s - (window + 1)) / 2  # the usual count has s * s / 2 keys, not s * (s + 1) / 2
    saved = flops_per_iteration(plain, 128, s, 1) - flops_per_iteration(model, 128, s, 1)
    assert saved == 2 * 12 * 48 * (outside - half_a_key)
    square = [flops_per_iteration(m, 128, s, 1, "full-attention") for m in (plain, model)]
    assert square[0] == square[1]


@pytest.mark.parametrize(
    "convention, at_4096, at_8192",
    [
        ("megatron", 48.25, 51.47),
        ("full-attention", 51.47, 57.91),
        ("6n-causal", 51.40, 54.62),
        ("6n", 54.62, 61.07),
    ],
)
def test_conventions_at_llama3_8b(convention, at_4096, at_8192):
    per_token = [flops_per_iteration(LLAMA3_8B, 128256, s, 1, convention) / s / 1e9 for s in (4096, 8192)]
    assert per_token == pytest.approx([at_4096, at_8192], abs=0.005)
    assert convention in CONVENTIONS


def test_unknown_convention_names_the_known_ones():
    with pytest.raises(ValueError, match="'mfu' is unknown.*megatron, full-attention"):
        flops_per_iteration(LLAMA3_8B, 128256, 8192, 1, "mfu")


@pytest.mark.parametrize(
    "model, vocab, count",
    [
        (GPT2_SMALL, 50257, 124439808),
        (LLAMA2_7B, 32000, 6738415616),
        (LLAMA3_8B, 128256, 8030261248),
        (LLAMA3_70B, 128256, 70553706496),
        (MISTRAL_7B, 32000, 7241732096),
        (QWEN3_8B, 151936, 8190735360),
        (QWEN25_05B, 151936, 494032768),
        (MIXTRAL, 32000, 46702792704),
        (QWEN3_30B, 151936, 30532122624),
        (QWEN15_MOE, 151936, 14315784192),
    ],
)
def test_parameter_counts_are_the_published_ones(model, vocab, count):
    assert parameter_count(model, vocab) == count


def test_parameters_that_a_token_takes():
    """12.9 B of Mixtral, 3.3 B of Qwen3 30B-A3B, 2.7 B of Qwen1.5-MoE."""
    assert parameter_count(MIXTRAL, 32000, experts=2) == 12879925248
    assert parameter_count(QWEN3_30B, 151936, experts=8) == 3353032704
    assert parameter_count(QWEN15_MOE, 151936, experts=4) / 1e9 == pytest.approx(2.7, abs=0.05)
    assert parameter_count(LLAMA3_8B, 128256, experts=2) == 8030261248


def test_peaks_and_mfu():
    assert (
        device_peak("NVIDIA H200", "bfloat16") == device_peak("NVIDIA H100 80GB HBM3", "float16") == 989.5e12
    )
    assert device_peak("NVIDIA H100 PCIe", "bfloat16") == 756.5e12
    assert device_peak("NVIDIA H200 NVL", "bfloat16") == 835.5e12  # half of the data sheet's, which is sparse
    assert device_peak("NVIDIA A100-SXM4-80GB", "float32") == 156e12
    for unknown in ("cpu", "NVIDIA GeForce RTX 4090 D", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA H20"):
        assert device_peak(unknown, "bfloat16") is None
    # Megatron-Bridge's Llama-3-8B row: 14,451 tokens/s on each of 8 GPUs is published as 744 TFLOP/s, 75.2 %.
    seconds = 128 * 8192 / (8 * 14451)
    assert metrics.mfu(
        flops_per_iteration(LLAMA3_8B, 128256, 8192, 128), seconds, 8, 989.5e12
    ) == pytest.approx(0.752, abs=5e-4)
    assert metrics.mfu(1e12, 1.0, 1, None) is None


def test_a_rank_has_a_key_value_head_of_its_own_at_least():
    """Eight heads on 16 ranks, each with two of the 32 query heads, of 128 features."""
    own = 4096 * (256 + 128 + 128) + 256 * 4096 + 3 * 4096 * 14336 // 16
    assert metrics.layer_matmul_parameters(LLAMA3_8B, 16) == own


def test_speed_of_a_step_of_several_ranks():
    """24 rows of Llama-3-8B in two seconds on four: a rank has a quarter of the FLOPs, the run all tokens."""
    axis, device = SimpleNamespace(size=4), torch.device("cpu")
    config = Config(model=LLAMA3_8B, run=RunConfig(log_throughput=True))
    speed = speed_of(config, SimpleNamespace(world=axis, device=device), 128256, Counter({8192: 24}), 2.0)
    assert speed["tflops_per_gpu"] == pytest.approx(24 * 421.645529382912 / 2 / 4)
    assert speed["tokens_per_s"] == 24 * 8192 / 2 and speed["step_time_ms"] == 2000 and speed["mfu"] is None
    other = 57.91e9 * 24 * 8192 / 2 / 4 / 1e12
    assert speed["tflops_per_gpu_full-attention"] == pytest.approx(other, rel=1e-4)


def test_bits_per_byte():
    assert bits_per_byte(math.log(256), tokens=1000, num_bytes=1000) == pytest.approx(8)  # uniform bytes
    assert bits_per_byte(math.log(4096), tokens=100, num_bytes=400) == pytest.approx(3)


def test_no_torch_is_needed_to_count():
    code = "import sys, nanomegatron.plan.flops, nanomegatron.report.log; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"

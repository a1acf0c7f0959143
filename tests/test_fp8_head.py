"""The output layer in FP8 (--fp8-output-proj): matmuls, tied and untied, under layouts, and memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nanomegatron.config.check import resolve, validate
from nanomegatron.config.cli import parse
from nanomegatron.fast.fp8_producers import quantizing_loss
from nanomegatron.fp8 import Delayed, Recipe, Scales, Tensorwise
from nanomegatron.fp8_linear import use_fp8
from nanomegatron.layers import OutputLayer, logits_then_loss
from nanomegatron.mesh import Axis
from nanomegatron.ops.fp8_cast import fp8_decode
from nanomegatron.param import Init, new_parameter
from nanomegatron.plan.layer import Machine
from nanomegatron.plan.memory import memory
from nanomegatron.tp import vocab_spec
from tests.layouts import FIVE_STEPS, flags_of, fp8
from tests.plan.test_memory import TINY, config
from tests.spmd import run_spmd
from tests.training import arguments, compare, train_on_a_rank

HEAD = "--fp8-output-proj --make-vocab-size-divisible-by 16"


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_are_those_of_the_casts(tied):
    """Against float64 products of what was cast; a tied weight stays whole for the embedding."""
    model = replace(TINY["llama"], hidden_size=32)
    spec = vocab_spec("output_layer.weight", (90, 96), 32, Axis.single(), tied)
    weight = new_parameter(spec, Init(dtype=torch.bfloat16))
    layer, recipe = OutputLayer(model, 90, weight, Axis.single()), Recipe(Tensorwise)
    fp8 = use_fp8(layer, recipe)
    scales = Scales(recipe, [fp8], weight.device)
    assert hasattr(weight, "fp8") is not tied
    x = torch.randn(8, 2, 32, dtype=torch.bfloat16, requires_grad=True)
    logits, dy = layer(x, None, None), torch.randn(8, 2, 96, dtype=torch.bfloat16)
    logits.backward(dy)
    assert list(scales.layers) == ["output_layer.weight"]
    w = fp8_decode(fp8.weight(weight).rowwise).double()
    rows, grads = (
        fp8_decode(quantizer.quantize(t.flatten(0, 1)).rowwise).double()
        for t, quantizer in ((x, fp8.x), (dy, fp8.g))
    )
    for found, exact in ((logits, rows @ w.t()), (x.grad, grads @ w), (weight.grad, grads.t() @ rows)):
        found = found.double().reshape(exact.shape)
        assert (found - exact).norm() <= 2**-8 * exact.norm() and not torch.equal(found, exact)
    assert (logits.flatten(0, 1) - x.flatten(0, 1) @ weight.t()).norm() > 1e-3  # it is not bf16's


@pytest.mark.parametrize(
    "model, recipe, layout",
    [
        ("llama", "delayed", "tp2spfp"),
        ("gpt", "tensorwise", "pp2zb"),
        pytest.param("llama", "tensorwise", "dp2z1fp", marks=pytest.mark.full),
        pytest.param("gpt", "rowwise", "tp2pp2zbsprs", marks=pytest.mark.full),
        pytest.param("llama", "delayed", "pp2zbvfp", marks=pytest.mark.full),
    ],
)
def test_layouts_stay_near_one_process(model, recipe, layout, alone, sources, tmp_path):
    size, flags = flags_of(layout)
    settings = f"{fp8(recipe)} {HEAD}"
    ranks = run_spmd(train_on_a_rank, size, arguments(sources, model, flags, settings), str(tmp_path))
    expected = alone(model, settings)
    losses = [[step["lm_loss"] for step in run["steps"]] for run in (ranks[0], expected)]
    np.testing.assert_allclose(*losses, rtol=1e-2)
    if model == "llama":
        gradients = [piece for rank in ranks for piece in rank["gradients"]]
        compare(gradients, expected["gradients"], 0.15)


def test_it_trains_as_with_a_head_in_bf16(alone):
    found, expected = (
        [step["lm_loss"] for step in alone("llama", f"{fp8('delayed')} {more}", FIVE_STEPS)["steps"]]
        for more in (HEAD, "--make-vocab-size-divisible-by 16")
    )
    np.testing.assert_allclose(found, expected, rtol=2e-2)
    assert found != expected and found[-1] < found[0] - 0.1


def test_settings_that_it_needs():
    """FP8, sizes of its format, and logits of the whole microbatch."""
    cases = {
        "": "--fp8-output-proj: needs --fp8-format",
        "--fp8-format hybrid --cross-entropy-loss-fusion": "not with --cross-entropy-loss-fusion",
        "--fp8-format hybrid --make-vocab-size-divisible-by 8": "nearest --make-vocab-size-divisible-by 16",
    }
    for flags, why in cases.items():
        run = parse(f"--mock-data --config gpt2-124m --fp8-output-proj {flags}".split()).config
        assert any(why in error for error in validate(run, 1)), (flags, validate(run, 1))


@pytest.mark.parametrize("tied", [False, True])
def test_planned_memory(tied):
    """Both copies of the weight, beside 16 bits if tied; the casts of a microbatch's gradient of logits."""
    run = config(replace(TINY["llama"], untie_embeddings_and_output_weights=not tied), 32, 4, dtype="bf16")
    run = replace(run, precision=replace(run.precision, fp8_format="hybrid", fp8_recipe="delayed"))
    head = replace(run, precision=replace(run.precision, fp8_output_proj=True))
    machine = Machine(gpu=True, kernels=True)
    before, after = (memory(resolve(r, 1), 128, machine) for r in (run, head))
    weights = 128 * run.model.hidden_size
    assert after["FP8 weights"] - before["FP8 weights"] == 2 * weights
    assert before["weights"] - after["weights"] == (0 if tied else 2 * weights)
    assert after["logits and loss"] - before["logits and loss"] == 2 * 128 * 32 * 4


@pytest.mark.parametrize("real", [96, 90])
def test_a_gradient_of_logits_that_the_loss_casts_is_the_plain_ones_to_the_bit(real):
    """In the second step of delayed scaling, in bf16."""
    model, found = replace(TINY["llama"], hidden_size=32), []
    for fast in (False, True):
        torch.manual_seed(1)
        init = Init(std=0.3, dtype=torch.bfloat16)
        weight = new_parameter(vocab_spec("out.weight", (real, 96), 32, Axis.single()), init)
        layer, recipe = OutputLayer(model, real, weight, Axis.single()), Recipe(Delayed)
        scales = Scales(recipe, [use_fp8(layer, recipe)], weight.device)
        layer.loss = quantizing_loss if fast else logits_then_loss
        for _ in range(2):
            x, weight.grad = torch.randn(16, 2, 32).bfloat16().requires_grad_(), None
            labels, weights = torch.randint(real, (2, 16)), torch.rand(2, 16)
            loss = layer(x, labels, None)
            (loss * weights).sum().backward()
            scales.end_step()
        found.append((loss.detach(), x.grad, weight.grad, scales.scale.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

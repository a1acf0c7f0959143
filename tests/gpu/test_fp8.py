"""FP8 linear layers on a GPU: every recipe against float64, and shapes that cuBLAS does not take."""

import pytest
import torch

from nanomegatron.fp8 import E4M3, E5M2, RECIPES, Fp8LayerState, Recipe, Scales
from nanomegatron.fp8_linear import use_fp8
from nanomegatron.mesh import Axis
from nanomegatron.ops.fp8_cast import fp8_decode
from nanomegatron.ops.fp8_matmul import fp8_matmul
from nanomegatron.param import Init
from nanomegatron.tp import ColumnParallelLinear

GPU = torch.device("cuda")


def off(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("gradient", [E5M2, E4M3])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(640, 512, 384), (256, 768, 2304), (1024, 4096, 256)], ids=str)
def test_a_layer_is_near_float64(recipe, gradient, shape):
    """Random values are off by 2.6 % in E4M3 and 5.2 % in E5M2, products by both."""
    t, i, o = shape
    recipe = Recipe(RECIPES[recipe], gradient)
    init = Init(dtype=torch.bfloat16, device=GPU, name="linear")
    linear = ColumnParallelLinear(i, o, Axis.single("tp"), init, bias=False)
    scales = Scales(recipe, [use_fp8(linear, recipe)], GPU)
    for _ in range(2):  # delayed: the second time with the scales of the first
        x = torch.randn(t, 1, i, device=GPU).bfloat16().requires_grad_()
        g, linear.weight.grad = 1e-3 * torch.randn(t, 1, o, device=GPU).bfloat16(), None
        y = linear(x)
        y.backward(g)
        scales.end_step()
    x64, g64, w = x.detach().double()[:, 0], g.double()[:, 0], linear.weight.detach().double()
    limit = 0.045 if gradient == E4M3 else 0.07
    assert off(y[:, 0], x64 @ w.t()) < 0.045
    assert off(x.grad[:, 0], g64 @ w) < limit
    assert off(linear.weight.grad, g64.t() @ x64) < limit


@pytest.mark.parametrize("k", [128, 384, 768, 1024])
@pytest.mark.parametrize("m", [1, 3, 16, 100, 1024])
@pytest.mark.parametrize("recipe", RECIPES)
def test_matmuls_of_any_number_of_rows(recipe, m, k):
    """As in generating; and of blocks whose number does not divide by 4."""
    recipe = Recipe(RECIPES[recipe])
    layer = Fp8LayerState("a", recipe)
    Scales(recipe, [layer], GPU)
    x, w = torch.randn(m, k, device=GPU).bfloat16(), torch.randn(256, k, device=GPU).bfloat16()
    a, b = layer.x.quantize(x, "rowwise").rowwise, layer.w.quantize(w, "rowwise").rowwise
    y = fp8_matmul(a, b, torch.bfloat16)
    assert y.shape == (m, 256) and off(y, fp8_decode(a).double() @ fp8_decode(b).double().t()) < 4e-3

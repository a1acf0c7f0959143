"""The kernels of layers, run by the emulator of cuda_on_cpu.h: where no GPU is, and in CI.

What they give is checked by the functions of tests/gpu, against float64. A thread is a fiber here, so sizes
are small: some for each variant of a kernel. What only a GPU shows (speed, races, memory spaces, more than
2^31 elements) is seen only there. The other kernels: ops/test_kernels_on_cpu_training.py.
"""

import itertools

import pytest
import torch

from nanomegatron.ops import bias as ops_bias
from nanomegatron.ops import dropout as ops_dropout
from nanomegatron.ops import embedding as ops_embedding
from nanomegatron.ops import gelu as ops_gelu
from nanomegatron.ops import norm as ops_norm
from nanomegatron.ops import rope as ops_rope
from nanomegatron.ops import softmax as ops_softmax
from nanomegatron.ops import swiglu as ops_mlp
from nanomegatron.ops.kernels import TYPES
from tests import cuda_on_cpu
from tests.gpu import test_kernel_dropout as dropout
from tests.gpu import test_kernel_embedding as embedding
from tests.gpu import test_kernel_mlp as mlp
from tests.gpu import test_kernel_norm as norm
from tests.gpu import test_kernel_rope as rope
from tests.gpu import test_kernel_softmax as softmax

pytestmark = pytest.mark.skipif(cuda_on_cpu.cuda_home() is None, reason="no CUDA headers here")
FILES = "swiglu", "gelu", "column_sums", "norm", "norm_backward", "dropout", "softmax", "rope", "embedding"
MODULES = ops_bias, ops_gelu, ops_mlp, ops_norm, ops_dropout, ops_softmax, ops_rope, ops_embedding, mlp, norm
MODULES += softmax, rope, embedding, dropout
FP32, BF16, FP16 = DTYPES = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def run_here(monkeypatch):
    cuda_on_cpu.run_here(monkeypatch, FILES, *MODULES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", [ops_mlp.SILU, ops_mlp.GELU])
@pytest.mark.parametrize("shape", [(5, 2, 128), (3, 26), (40, 1040), (300, 80), (2, 9000), (0, 16), (1, 2)])
def test_gated(shape, act, dtype):
    mlp.check(torch.randn(shape).to(dtype) * 3, act)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_not_aligned(dtype):
    mlp.test_not_aligned(dtype)


@pytest.mark.parametrize("act", [ops_mlp.SILU, ops_mlp.GELU])
def test_gated_strange_numbers(act):
    """Not numbers, zeros and infinities, where torch has them in float64: in fp32 its GELU overflows."""
    nan, inf = float("nan"), float("inf")
    gate = torch.tensor([0.0, -0.0, 88.0, -88.0, 1e4, -1e4, 3e38, -3e38, 1e-38, inf, -inf, nan])
    x = torch.cartesian_prod(gate, torch.tensor([0.0, 1.0, -3.0, 1e30, inf, nan])).t().reshape(1, -1)
    grad = torch.randn(1, x.shape[1] // 2)
    found = mlp.run(lambda x: ops_mlp.GatedFunction.apply(x, act), x, grad)
    wanted = mlp.run(lambda x: ops_mlp.gated_ref(x, act), x.double(), grad.double())
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("f", [64, 37])
def test_gated_writes_nothing_beside(f):
    guarded, x, grad = norm.Guarded(), torch.randn(5, 2 * f), torch.randn(5, f)
    y, dx = guarded.new(5, f, dtype=FP32), guarded.new(5, 2 * f, dtype=FP32)
    ops_mlp.launch_kernel("swiglu_forward", y, x, 5, f, ops_mlp.SILU, TYPES[FP32])
    ops_mlp.launch_kernel("swiglu_backward", dx, grad, x, 5, f, ops_mlp.SILU, TYPES[FP32])
    guarded.check()
    right = mlp.run(lambda x: ops_mlp.gated_ref(x, ops_mlp.SILU), x, grad)
    for ours, theirs in zip((y, dx), right, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(5, 2, 128), (3, 37), (90, 520), (300, 8), (2, 2309), (0, 16), (3, 0), (1, 1)]
)
def test_bias_and_activation(shape, dtype):
    for act in mlp.ACTS:
        mlp.test_bias_and_activation(shape, dtype, act)
    mlp.test_column_sums(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_activation_of_any_numbers_and_views(dtype):
    for act in mlp.ACTS:
        mlp.test_strange_numbers_and_a_bias(dtype, act)
    mlp.test_bias_and_activation_not_aligned(dtype)


def test_bias_and_activation_write_nothing_beside():
    for f in (64, 37):
        mlp.test_bias_and_activation_write_nothing_beside(f)
    mlp.test_column_sums_of_any_strides()


# Lanes of a warp with 2, 4 and 8 packs each, teams of rows and loops over them, blocks; the plain kernels.
NORM_SHAPES = [(1, 8), (37, 64), (16500, 8), (33, 256), (65, 512), (7, 520), (9, 1024), (130, 1032)]
NORM_SHAPES += [(5, 2048), (5, 2056), (4, 4104), (130, 3), (7, 1), (11, 130), (2, 4097)]
LONG = [((2, 8192), FP32), ((2, 8196), FP32)]  # the last, and one that is too long
MORE = [((2, 16384), BF16), ((2, 16388), FP32), *((s, FP16) for s in NORM_SHAPES[3:-1])]  # as BF16's packs
MORE = [pytest.param(*case, marks=pytest.mark.full) for case in MORE]
CASES = [(s, d) for s in NORM_SHAPES for d in (FP32, BF16)] + [(s, FP16) for s in NORM_SHAPES[:3]]


@pytest.mark.parametrize("shape, dtype", [*CASES, (NORM_SHAPES[-1], FP16), *LONG, *MORE], ids=str)
def test_norm(shape, dtype):
    norm.test_norms_match_float64(shape, dtype)


@pytest.mark.parametrize("h, dtype", [(64, BF16), (4096, BF16), (8192, FP32), (12288, FP32), (67, FP32)])
def test_a_sum_that_is_normalized_again_gives_the_same_bits(h, dtype):
    """As recomputation does, which keeps the sum."""
    x, residual, weight = torch.randn(3, h).to(dtype), torch.randn(3, h).to(dtype), torch.randn(h).to(dtype)
    for bias in (None, weight):
        out, total = ops_norm.add_norm(x, residual, weight, bias, 1e-5)
        assert torch.equal(out, ops_norm.norm(total, weight, bias, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300, 128), (20, 1024), (33, 131)])
def test_a_sum_apart_has_the_same_bits(shape, dtype):
    norm.test_a_sum_apart_has_the_same_bits(shape, dtype)


def test_a_norm_of_a_view_keeps_no_copy():
    packed = torch.randn(5, 2, 3, 64).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()), lambda t: t):
        ops_norm.norm(packed[:, :, :2], torch.ones(64), None, 1e-5)
    assert packed.data_ptr() in kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (37, 128), (33, 256), (17, 1024), (9, 2056), (5, 3), (7, 130)])
def test_norm_writes_nothing_beside(shape, dtype):
    norm.test_nothing_is_written_outside(shape, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16, pytest.param(FP16, marks=pytest.mark.full)])
def test_norm_of_any_numbers_and_views(dtype):
    for scale in (1e-4, 1e4):
        norm.test_tiny_and_huge_values(dtype, scale)
    for h in (128, 1024):
        norm.test_views_that_are_not_aligned(dtype, h)
    for shape in ((300, 128), (60, 1024), (20, 4096), (33, 131)):
        norm.test_the_same_bits_twice(shape, dtype)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("h", [128, 4096, 130])
def test_norm_keeps_nan_in_its_row(h, biased):
    norm.test_nan_and_inf_stay_in_their_row(h, biased)


def test_norm_of_a_large_mean_and_of_nothing():
    norm.test_a_large_mean()
    norm.test_nothing_to_do()
    norm.test_an_output_that_nobody_uses()


SHORT_ROWS = [shape for shape in dropout.SHAPES[:11] if shape[2] < 4096]
LONG_ROWS = [(s, BF16) for s in dropout.SHAPES[:11] if s[2] >= 4096]


@pytest.mark.parametrize("shape, dtype", [*itertools.product(SHORT_ROWS, DTYPES), *LONG_ROWS], ids=str)
def test_dropout(shape, dtype):
    dropout.test_values_and_gradients(shape, dtype)


@pytest.mark.parametrize("h, p", [(131, 0.0), (96, 1e-7), (131, 0.1), (96, 0.999999)])
def test_dropout_mask(h, p):
    dropout.test_the_mask_is_the_references_to_the_bit(h, p)


SHORT = [shape for shape in dropout.BEFORE[:10] if shape[2] < 4096]
MORE = [*((s, FP16) for s in SHORT), *((s, FP32) for s in dropout.BEFORE[:10] if s[2] >= 4096)]
MORE = [pytest.param(*case, marks=pytest.mark.full) for case in [*MORE, ((2, 2, 16384), BF16)]]
CASES = [*itertools.product(SHORT, (FP32, BF16)), ((5, 1, 4096), BF16), ((2, 1, 8192), BF16)]


@pytest.mark.parametrize("shape, dtype", [*CASES, *MORE], ids=str)
def test_dropout_before_a_norm(shape, dtype):
    dropout.test_before_a_norm(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300, 1, 128), (7, 3, 1024), (11, 3, 131)])
def test_dropout_apart_has_the_same_bits(shape, dtype):
    dropout.test_dropout_apart_has_the_same_bits(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_writes_nothing_beside(dtype):
    for shape in (5, 3, 16), (20, 2, 64), (3, 2, 1032), (5, 1, 2056), (7, 3, 5):
        dropout.test_nothing_is_written_outside(shape, dtype)
    dropout.test_views_that_are_not_aligned(dtype, 64)


def test_dropout_of_odd_numbers_and_of_nothing():
    dropout.test_the_same_bits_twice()
    dropout.test_what_is_not_a_number_stays_none_even_if_dropped()
    dropout.test_the_sum_alone_and_nothing_to_do()


# Several rows a block, a block a row, the last in registers, one too long; each by packs and by scalars.
SOFTMAX_SHAPES = [(2, 3, 5, 7), (1, 2, 30, 64), (2, 1, 4, 1), (1, 1, 9, 4), (1, 2, 3, 1024), (1, 1, 5, 1032)]
SOFTMAX_SHAPES += [(1, 3, 2, 1023), (1, 2, 3, 4104), (1, 1, 3, 4099), (1, 1, 2, 16384), (1, 1, 2, 16392)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SOFTMAX_SHAPES, ids=str)
def test_softmax(shape, dtype):
    softmax.test_values_and_gradients(shape, dtype)
    softmax.test_hidden_by_any_mask(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_not_aligned(dtype):
    for shape in SOFTMAX_SHAPES[:7]:
        softmax.compare(dtype, shape, True, None, shift=1)
    room = torch.rand(2 * 16 * 64 + 1) < 0.5
    softmax.compare(dtype, (2, 3, 16, 64), False, None, room[1:].view(2, 1, 16, 64))
    softmax.compare(dtype, (2, 3, 16, 60), False, None, room[:-1].view(2, 1, 16, 64)[..., 1:61])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [7, 64, 2048, 16400])
def test_softmax_of_odd_numbers(t, dtype):
    softmax.test_odd_numbers(t, dtype)


@pytest.mark.parametrize("inplace", [False, True])
def test_softmax_in_a_graph(inplace):
    softmax.test_in_a_graph(inplace)
    softmax.test_hidden_gradients_do_not_count()
    softmax.test_nothing_to_do()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved, dtype):
    for shape in rope.SHAPES[1:]:
        rope.test_packed(shape, interleaved, dtype)
    rope.test_plain_and_strided(interleaved, dtype)
    rope.test_odd_numbers(interleaved, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_rope_touches_nothing_else(shift, interleaved, dtype):
    rope.test_nothing_else_is_touched(shift, interleaved, dtype)


def test_rope_of_nothing():
    rope.test_nothing_to_do()


def test_rope_does_not_write_over_elements_that_are_shared():
    one, tables = torch.randn(7, 1, 48), [torch.randn(7, 1, 1, 8) for _ in range(2)]
    shared = ops_rope.rope_packed(one.expand(7, 3, 48), [16, 16, 16], 16, *tables)
    apart = ops_rope.rope_packed(one.repeat(1, 3, 1), [16, 16, 16], 16, *tables)
    assert all(torch.equal(a, b) for a, b in zip(shared, apart, strict=True))


def test_softmax_in_place_leaves_views_and_leaves_alone():
    leaf = torch.randn(1, 2, 5, 64, requires_grad=True)
    for scores in (leaf, leaf[:, :1]):
        before = scores.detach().clone()
        ops_softmax.scaled_softmax(scores, 0.5, inplace=True)[0].sum().backward()
        assert torch.equal(scores.detach(), before)


# Packs and scalars, columns of two blocks; none, one and many parts.
EMBEDDING_SHAPES = [(77, 5, 131, 50), (129, 3, 1, 9), (1, 1, 8, 1), (0, 3, 16, 4), (70, 1, 520, 12)]
EMBEDDING_SHAPES += [(9, 7, 4, 300), (100, 7, 24, 5)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", EMBEDDING_SHAPES, ids=str)
def test_embedding(shape, dtype):
    embedding.test_lookup(shape, dtype)
    for kind in embedding.KINDS:
        embedding.test_word_gradients(shape, dtype, kind)
    embedding.test_position_gradients(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_in_a_model(dtype):
    embedding.test_in_a_model(dtype)
    embedding.test_views_that_are_not_aligned(dtype)


def test_embedding_of_a_hot_id_and_of_strange_numbers():
    embedding.test_a_hot_id_is_added_in_parts()
    embedding.test_strange_numbers_stay_in_their_rows()
    for h in (64, 37):
        embedding.test_nothing_beside_the_outputs_is_written(h)

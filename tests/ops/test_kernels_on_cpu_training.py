"""The kernels of loss, optimizer, FP8 and experts, run by the emulator: see ops/test_kernels_on_cpu.py."""

import pytest
import torch

from nanomegatron.ops import adamw as ops_adamw
from nanomegatron.ops import cross_entropy as ops_loss
from nanomegatron.ops import fp8_cast as ops_fp8
from nanomegatron.ops import permute as ops_moe
from tests import cuda_on_cpu
from tests.gpu import test_kernel_adamw as adamw
from tests.gpu import test_kernel_fp8 as fp8
from tests.gpu import test_kernel_loss as loss
from tests.gpu import test_kernel_moe as moe

pytestmark = pytest.mark.skipif(cuda_on_cpu.cuda_home() is None, reason="no CUDA headers here")
FILES = "cross_entropy", "adamw", "fp8_cast", "fp8_rows", "fp8_scale", "permute"
MODULES = ops_loss, ops_adamw, ops_fp8, ops_moe, loss, adamw, fp8, moe
FP32, BF16, FP16 = DTYPES = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def run_here(monkeypatch):
    cuda_on_cpu.run_here(monkeypatch, FILES, *MODULES)


# tokens, columns, of them padding, elements before the first; the long ones need several turns, and blocks
LOSS_SHAPES = [(9, 1040, 16, 0), (4, 4107, 3, 1), (3, 8193, 0, 3), (2, 33000, 0, 1), (2, 16500, 0, 0)]
LOSS_SHAPES += [(5, 1024, 0, 5), (3, 1, 0, 0), (5, 7, 2, 1), (1, 300, 299, 2), (4, 24, 24, 0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", LOSS_SHAPES, ids=str)
def test_cross_entropy(shape, dtype):
    loss.test_statistics(shape, dtype)
    loss.test_gradient_over_the_logits(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_of_any_numbers_and_views(dtype):
    for offsets in ((0, 0), (3, 3), (0, 1), (5, 2)):
        loss.test_gradient_beside_the_logits(offsets, dtype)
    for columns in (40, 5003):
        loss.test_numbers_out_of_the_ordinary(columns, dtype)


def test_cross_entropy_of_shards_and_of_nothing():
    loss.test_shards_make_the_whole()
    loss.test_numbers_of_other_types_and_strides()
    loss.test_no_rows()


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_adamw(offset):
    for kinds in adamw.KINDS:
        adamw.test_a_step(*kinds, offset)


@pytest.mark.parametrize("main", [None, BF16])
def test_adamw_of_any_numbers(main):
    adamw.test_a_skipped_step_changes_nothing(main)
    adamw.test_numbers_out_of_the_ordinary(main)


def test_adamw_in_pieces():
    adamw.test_many_segments()
    adamw.test_nothing_to_do()


def test_adamw_over_steps():
    for step in (1.0, 2.0, 1000.0, 300000.0):
        adamw.test_bias_correction(step)


def test_adamw_is_deterministic():
    adamw.test_twice_the_same_bits()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares(dtype):
    for offset in (0, 1, 4):
        adamw.test_sums_of_squares(dtype, offset)
    adamw.test_squares_of_large_and_broken_numbers()


# By packs (k a multiple of 8, m of 16) and by bytes, whole tiles and tiles that overhang.
FP8_SHAPES = [shape for shape in fp8.SHAPES if shape[0] * shape[1] < 50_000] + [(48, 4096)]
E4M3, E5M2 = fp8.FORMATS


def in_both(shapes: list[tuple], *few: tuple) -> list:
    """Every shape with E4M3; with E5M2, which differs in the rounding alone, few of them in the fast tier."""
    more = [pytest.param(s, E5M2, marks=[pytest.mark.full] * (s not in few)) for s in shapes]
    return [*((s, E4M3) for s in shapes), *more]


@pytest.mark.parametrize("shape, dtype", in_both(FP8_SHAPES, (16, 0), (5, 8), (129, 127)), ids=str)
def test_fp8(shape, dtype):
    for kind in DTYPES:
        for outputs in ("rowwise", "columnwise", "both"):
            fp8.test_cast(shape, kind, dtype, outputs)
        for squares in (False, True):
            fp8.test_blocks(shape, kind, dtype, squares, squares == (kind is BF16))
        fp8.test_rows(shape, kind, dtype)


@pytest.mark.parametrize("kind", DTYPES)
def test_fp8_of_long_rows(kind):
    for shape in fp8.LONG:
        fp8.test_rows(shape, kind, fp8.FORMATS[0])


OF_FP8 = [(272, 136), (144, 264), (130, 131), (1, 300), (300, 1), (3, 8200)]


@pytest.mark.parametrize("shape, dtype", in_both(OF_FP8, (144, 264), (1, 300)), ids=str)
def test_fp8_of_fp8(shape, dtype):
    for inverses in fp8.INVERSES:
        fp8.test_casts_of_casts(shape, dtype, inverses)
    fp8.test_turned_bytes(shape, dtype)


@pytest.mark.parametrize("dtype", fp8.FORMATS)
def test_fp8_of_all_fp8(dtype):
    for power_of_two in (False, True):
        fp8.test_casts_of_all_casts(dtype, power_of_two)


@pytest.mark.parametrize("dtype", fp8.FORMATS)
def test_fp8_of_all_values(dtype):
    fp8.test_all_halves_between_values(dtype)
    for kind, scale in ((BF16, 1.37), (FP16, 1.0), (BF16, 2.0**126), (FP16, 1e4)):
        for outputs in ("rowwise", "both"):
            fp8.test_all_values_of_16_bits(kind, dtype, scale, outputs)


@pytest.mark.parametrize("squares", [False, True])
def test_fp8_of_strange_blocks(squares):
    for value in (0.0, 1e-45, 1e-38, 3e38, fp8.INF, -fp8.INF, fp8.NAN):
        fp8.test_blocks_of_strange_numbers(value, squares)
        if squares:
            fp8.test_rows_of_strange_numbers(value)


@pytest.mark.parametrize("kind", DTYPES)
def test_fp8_amax_and_views(kind):
    for n in (1, 7, 8, 9, 1000, 200_003):  # the last: more than the blocks there are take at once
        fp8.test_amax(n, kind)
    for outputs in ("rowwise", "both"):
        fp8.test_views_that_are_not_aligned(kind, outputs)


@pytest.mark.parametrize("shape", [(144, 264), (130, 131), (256, 256)])
def test_fp8_writes_nothing_beside(shape):
    fp8.test_nothing_beside_the_outputs_is_written(shape)


def test_fp8_scales():
    fp8.test_scale_of_an_amax()
    for length in (1, 2, 31, 32, 33, 65):
        for n in (1, 32, 33):
            for most_recent in (False, True):
                fp8.test_history(length, n, most_recent)


@pytest.mark.parametrize("experts", [1, 8, 129, 1024])
def test_moe_tables(experts):
    for multiple in (1, 16):
        for tokens, k in ((600, 8), (1025, 1), (31, 3), (1, 1), (0, 2)):  # the first two: several blocks
            moe.test_tables(tokens, k, experts, multiple)


def test_moe_all_to_one_expert_or_to_none():
    for expert in (0, 7, -1, 8, 2**31 - 1, -(2**31)):
        moe.test_all_to_one_expert_or_to_none(expert)


MOE_SIZES = [
    (20, 2, 8, 2560),
    (8, 8, 128, 1048),
    (20, 5, 9, 131),
    (16, 9, 16, 24),
    (33, 3, 4, 1),
    (0, 2, 4, 64),
]
MOE_SIZES += [(9, 1, 1, 8), (16, 2, 4, 0), (3, 32, 256, 40)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighed", [False, True])
def test_moe(weighed, dtype, full):
    for sizes in MOE_SIZES if full or dtype is not FP16 else MOE_SIZES[2:]:
        moe.test_against_float64(sizes, dtype, weighed)
    moe.test_views_that_are_not_aligned(dtype)


@pytest.mark.parametrize("h", [64, 37])
def test_moe_writes_nothing_beside(h):
    moe.test_nothing_beside_the_outputs_is_written(h)


def test_moe_keeps_strange_numbers_where_they_are():
    moe.test_strange_numbers_stay_where_they_are()

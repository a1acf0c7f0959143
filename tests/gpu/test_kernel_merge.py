"""Rows joined with rows, by the kernel, against float64."""

import itertools

import pytest
import torch

from nanomegatron.ops.grouped_mm import add_grouped_
from nanomegatron.ops.merge import ALL, MAX_PARTS, PartialRows, merge_rows, sum_parts

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
WEIGHTS = 4e-6  # log-sum-exps of some tens have that much left behind the point
DTYPES = tuple(ROUNDING)
SHAPES = [(6, 2, 3, 16), (5, 1, 2, 7), (40, 1, 4, 128), (1, 1, 1, 1)]
KINDS = ["all", "begin", "end", "some"]  # of the places a part has rows for


def exact(parts, shape):
    """The definition, a row at a time; also the sum of the parts' sizes, weighted alike."""
    s, b, n, _ = shape
    out, size = (torch.zeros(shape, dtype=torch.float64, device=GPU) for _ in range(2))
    whole = torch.full((b, n, s), -torch.inf, dtype=torch.float64, device=GPU)
    for part, places in parts:
        if part.lse is not None:
            whole[..., places] = torch.logaddexp(whole[..., places], part.lse.double())
    for part, places in parts:
        weight = torch.ones((), dtype=torch.float64, device=GPU)
        if part.lse is not None:
            weight = torch.where(part.lse.isinf(), 0, (part.lse.double() - whole[..., places]).exp())
            weight = weight.permute(2, 0, 1)[..., None]
        out[places] += weight * part.rows.double()
        size[places] += weight * part.rows.double().abs()
    return out, size, whole if parts[0][0].lse is not None else None


def part_of(shape, kind, dtype, weighted):
    """One with such places, and these as a list."""
    s, b, n, d = shape
    at = {"all": ALL, "begin": slice(0, (s + 1) // 2), "end": slice(s // 2, s), "some": None}[kind]
    places = list(range(s))[at] if at is not None else torch.randperm(s)[: (s + 1) // 2].tolist()
    if at is None:
        at = torch.full((s,), -1, dtype=torch.int64)
        at[places] = torch.arange(len(places))
        at = at.to(GPU)
    rows, lse = torch.randn(len(places), b, n, d, device=GPU).to(dtype), None
    if weighted:
        lse = torch.randn(b, n, len(places), device=GPU) * 5
        lse.view(-1)[-1] = -torch.inf
    return PartialRows(rows, at, lse), places


def check(shape, dtype, first_type, out_type, weighted, kinds, strided=False):
    """kinds: of each part."""
    made = [part_of(shape, kind, dtype if i else first_type, weighted) for i, kind in enumerate(kinds)]
    expected, size, total = exact(made, shape)
    parts = [part for part, _ in made]
    if strided:
        parts = [
            PartialRows(
                p.rows.transpose(0, 1).contiguous().transpose(0, 1),
                p.at,
                p.lse if p.lse is None else p.lse.transpose(0, 2).contiguous().transpose(0, 2),
            )
            for p in parts
        ]
    outs = [torch.full(shape, torch.nan, device=GPU, dtype=out_type)]
    if strided:
        outs.append(outs[0].transpose(0, 1).contiguous().transpose(0, 1))
    if kinds[0] == "all" and first_type == out_type and not strided:
        outs.append(parts[0].rows)  # in place: last, since it is gone then
    for out in outs:
        lse = merge_rows(parts, out)
        least = torch.finfo(out_type).tiny * ROUNDING[out_type]  # below it numbers have fewer bits
        assert ((out.double() - expected).abs() <= (ROUNDING[out_type] + WEIGHTS) * size + least).all()
        assert (lse is not None) == weighted
        if weighted:
            torch.testing.assert_close(lse.double(), total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(dtype, shape, kind, weighted):
    for first, out in itertools.product({dtype, torch.float32}, repeat=2):
        check(shape, dtype, first, out, weighted, ("all", kind))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("number", range(1, MAX_PARTS + 1))
def test_one_to_four_parts_that_may_leave_places_out(number, weighted):
    for kinds in itertools.combinations_with_replacement(KINDS, number):
        check((6, 2, 3, 16), torch.bfloat16, torch.bfloat16, torch.bfloat16, weighted, kinds)


@pytest.mark.parametrize("weighted", [True, False])
def test_of_any_strides(weighted):
    for first, out in itertools.product((torch.bfloat16, torch.float32), repeat=2):
        check((6, 2, 3, 16), torch.bfloat16, first, out, weighted, ("all", "end"), strided=True)


def test_of_many_rows():
    bf16 = torch.bfloat16
    check((3000, 1, 32, 128), bf16, torch.float32, bf16, True, ("all", "end"))
    check((3000, 1, 32, 128), bf16, bf16, bf16, True, ("all", "begin", "begin", "end"))


def test_parts_are_the_whole():
    """Three parts of the keys, merged in any order, in turn and at once, are softmax over all of them."""
    scores, values = torch.randn(4, 1, 2, 9, device=GPU), torch.randn(9, 32, device=GPU)
    whole, out = scores.softmax(-1) @ values, torch.empty(4, 1, 2, 32, device=GPU)
    for order in itertools.permutations([slice(0, 2), slice(2, 3), slice(3, 9)]):
        parts = [scores[..., keys] for keys in order]
        lses = [part.logsumexp(-1).permute(1, 2, 0).contiguous() for part in parts]
        parts = [part.softmax(-1) @ values[keys] for part, keys in zip(parts, order, strict=True)]
        parts = [PartialRows(rows, ALL, lse) for rows, lse in zip(parts, lses, strict=True)]
        merge_rows(parts, out)
        torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
        two = PartialRows(torch.empty_like(out))
        two = two._replace(lse=merge_rows(parts[:2], two.rows))
        merge_rows([two, parts[2]], two.rows)
        torch.testing.assert_close(two.rows, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [8, 4096, 4097, 3_000_008])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_in_place(dtype, size):
    """As torch's, to the bit."""
    total, part = torch.randn(size, device=GPU), torch.randn(size, device=GPU).to(dtype)
    expected = total + part
    add_grouped_(total, part)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("k", [1, 2, 4, 5])
@pytest.mark.parametrize("shape", [(3, 8), (5, 7), (65, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_parts(dtype, shape, k):
    """Rounded once."""
    parts, out = torch.randn(k, *shape, device=GPU).to(dtype), torch.empty(shape, device=GPU, dtype=dtype)
    sum_parts(parts, out)
    error = ROUNDING[dtype] * parts.double().abs().sum(0) + torch.finfo(dtype).tiny
    assert ((out.double() - parts.double().sum(0)).abs() <= error).all()

"""Rows joined with rows, by the kernel, against float64."""

import itertools

import pytest
import torch

from nanomegatron.ops_merge import add_, merge_rows

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
WEIGHTS = 4e-6  # log-sum-exps of some tens have that much left behind the point
DTYPES = tuple(ROUNDING)
SHAPES = [(6, 2, 3, 16), (5, 1, 2, 7), (40, 1, 4, 128), (1, 1, 1, 1)]


def exact(first, part, places, lse):
    """The definition, a row at a time; places: of part's rows."""
    out, whole = first.double().clone(), None if lse is None else lse[0].double().clone()
    for j, i in enumerate(places):
        if lse is None:
            out[i] += part[j].double()
            continue
        a, b = lse[0][..., i].double(), lse[1][..., j].double()
        total = torch.logaddexp(a, b)
        weights = (torch.where(x.isinf(), 0, (x - total).exp())[..., None] for x in (a, b))
        out[i] = next(weights) * out[i] + next(weights) * part[j].double()
        whole[..., i] = total
    return out, whole


def check(shape, part_type, first_type, out_type, weighted, kind, strided=False):
    s, b, n, d = shape
    first = torch.randn(shape, device=GPU).to(first_type)
    at = {"all": slice(None), "end": slice(s // 2, s), "some": None}[kind]
    places = list(range(s))[at] if at is not None else torch.randperm(s)[: (s + 1) // 2].tolist()
    if at is None:
        at = torch.full((s,), -1, dtype=torch.int64)
        at[places] = torch.arange(len(places))
        at = at.to(GPU)
    part = torch.randn(len(places), b, n, d, device=GPU).to(part_type)
    lse = None
    if weighted:
        lse = torch.randn(b, n, s, device=GPU) * 5, torch.randn(b, n, len(places), device=GPU) * 5
        lse[0].view(-1)[0] = lse[0].view(-1)[-1] = lse[1].view(-1)[-1] = -torch.inf
    expected, total = exact(first, part, places, lse)
    size, _ = exact(first.abs(), part.abs(), places, lse)
    if strided:
        first, part = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (first, part))
        lse = lse and tuple(x.transpose(0, 2).contiguous().transpose(0, 2) for x in lse)
    found, lse_found = merge_rows(first, part, at, lse, out_type)
    assert (found is first) == (first_type == out_type == torch.float32), "overwritten, or left alone"
    assert found.dtype == out_type and found.shape == first.shape
    assert ((found.double() - expected).abs() <= (ROUNDING[out_type] + WEIGHTS) * size + 1e-30).all()
    if weighted:
        torch.testing.assert_close(lse_found.double(), total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kind", ["all", "end", "some"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(dtype, shape, kind, weighted):
    for first, out in itertools.product({dtype, torch.float32}, repeat=2):
        check(shape, dtype, first, out, weighted, kind)


@pytest.mark.parametrize("weighted", [True, False])
def test_of_any_strides(weighted):
    for first, out in itertools.product((torch.bfloat16, torch.float32), repeat=2):
        check((6, 2, 3, 16), torch.bfloat16, first, out, weighted, "end", strided=True)


def test_of_many_rows():
    check((3000, 1, 32, 128), torch.bfloat16, torch.float32, torch.bfloat16, True, "end")


def test_parts_in_turn_are_the_whole():
    """Three parts of the keys, merged in any order, are softmax over all of them."""
    scores, values = torch.randn(4, 1, 2, 9, device=GPU), torch.randn(9, 32, device=GPU)
    whole = scores.softmax(-1) @ values
    for order in itertools.permutations([slice(0, 2), slice(2, 3), slice(3, 9)]):
        rows, lse = None, None
        for keys in order:
            seen = scores[..., keys]
            part, more = seen.softmax(-1) @ values[keys], seen.logsumexp(-1).permute(1, 2, 0).contiguous()
            if rows is None:
                rows, lse = part, more
            else:
                rows, lse = merge_rows(rows, part, slice(None), (lse, more), torch.float32)
        torch.testing.assert_close(rows, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [8, 4096, 4097, 3_000_008])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_in_place(dtype, size):
    """As torch's, to the bit."""
    total, part = torch.randn(size, device=GPU), torch.randn(size, device=GPU).to(dtype)
    expected = total + part
    add_(total, part)
    assert torch.equal(total, expected)

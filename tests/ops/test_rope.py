"""Rotary embedding against its definition by complex numbers, and against megatron-core's tables.

What the kernel is handed is shown by a stand-in that computes from nothing else.
"""

import pytest
import torch

from nanomegatron.config.model import TransformerConfig
from nanomegatron.ops import rope as ops_rope
from nanomegatron.ops.rope import rope, rope_angles, rope_frequencies, rope_packed, rope_ref
from tests.ops.test_softmax import named

ROPE = dict(position_embedding_type="rope")
YARN = dict(position_embedding_type="yarn", rotary_scaling_factor=4.0)
MEGATRON = {
    "plain": ROPE,
    "half": dict(ROPE, rotary_percent=0.5),
    "base": dict(ROPE, rotary_base=500000.0, rotary_interleaved=True),
    "llama 3.1": dict(ROPE, rotary_base=500000.0, use_rope_scaling=True),
    "llama 3.2": dict(ROPE, use_rope_scaling=True, rope_scaling_factor=32.0),
    "interpolated": dict(ROPE, rotary_seq_len_interpolation_factor=4.0),
    "interpolated, by a fraction": dict(ROPE, rotary_seq_len_interpolation_factor=2.7, rotary_percent=0.5),
    "interpolated and scaled": dict(ROPE, rotary_seq_len_interpolation_factor=3.0, use_rope_scaling=True),
    "yarn": dict(YARN, yarn_original_max_position_embeddings=128),
    "yarn, own bounds": dict(YARN, yarn_beta_fast=16.0, yarn_beta_slow=2.0, mscale=0.7, mscale_all_dim=0.3),
    "yarn, not rounded": dict(YARN, yarn_correction_range_round_to_int=False),
    "yarn, bounds meet": dict(YARN, yarn_beta_fast=1.0, yarn_original_max_position_embeddings=2),
    "yarn, factor 1": dict(YARN, rotary_scaling_factor=1.0),
}


def config(**settings):
    return TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1, **settings)


@pytest.mark.parametrize("case", MEGATRON)
def test_tables_and_rotation_are_megatrons(case, monkeypatch):
    pytest.importorskip("megatron.core")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # where it would move its tables
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    ours = config(**MEGATRON[case])
    common = dict(
        kv_channels=64,
        rotary_percent=ours.rotary_percent,
        rotary_interleaved=ours.rotary_interleaved,
        rotary_base=ours.rotary_base,
        use_cpu_initialization=True,
    )
    size = 1.0
    if ours.position_embedding_type == "yarn":
        theirs = YarnRotaryEmbedding(
            **common,
            scaling_factor=ours.rotary_scaling_factor,
            original_max_position_embeddings=ours.yarn_original_max_position_embeddings,
            beta_fast=ours.yarn_beta_fast,
            beta_slow=ours.yarn_beta_slow,
            mscale=ours.mscale,
            mscale_all_dim=ours.mscale_all_dim,
            correction_range_round_to_int=ours.yarn_correction_range_round_to_int,
        )
        angles, size = theirs.get_emb(40)
    else:
        scaling = dict(rope_scaling=ours.use_rope_scaling, rope_scaling_factor=ours.rope_scaling_factor)
        scaling["seq_len_interpolation_factor"] = ours.rotary_seq_len_interpolation_factor
        theirs = rotary_pos_embedding.RotaryEmbedding(**common, **scaling)
        angles = theirs.get_emb(40)
        torch.testing.assert_close(rope_frequencies(ours), theirs.inv_freq, rtol=1e-6, atol=0)
    x = torch.randn(40, 2, 3, 64)
    expected = rope_utils._apply_rotary_pos_emb_bshd(x, angles, ours.rotary_interleaved, mscale=size)
    found = rope(x, *rope_angles(torch.arange(40), ours), ours.rotary_interleaved)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if case not in ("plain", "yarn, factor 1"):
        assert not torch.allclose(found, rope(x, *rope_angles(torch.arange(40), config(**ROPE))), atol=1e-3)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_pair_is_a_complex_number_that_turns(interleaved):
    positions, features = torch.tensor([0, 1, 2, 7, 30, 31]), 32
    x = torch.randn(6, 2, 3, 64, dtype=torch.float64)
    rates = torch.tensor([100.0 ** (-2 * i / features) for i in range(features // 2)], dtype=torch.float64)
    turn = torch.polar(torch.ones(6, features // 2, dtype=torch.float64), positions[:, None] * rates)
    even, odd = (slice(0, 32, 2), slice(1, 32, 2)) if interleaved else (slice(0, 16), slice(16, 32))
    turned = torch.complex(x[..., even], x[..., odd]) * turn[:, None, None]
    expected = x.clone()
    expected[..., even], expected[..., odd] = turned.real, turned.imag
    cos, sin = rope_angles(positions, config(rotary_base=100.0, rotary_percent=0.5, **ROPE))
    assert cos.dtype == torch.float32 and cos.shape == (6, 1, 1, features // 2)
    found = rope(x, cos.double(), sin.double(), interleaved)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert rope(x.bfloat16(), cos, sin, interleaved).dtype == torch.bfloat16


def test_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 64)

    def score(i, j):
        turned = [rope(x, *rope_angles(torch.tensor([p]), config(**ROPE))) for x, p in ((q, i), (k, j))]
        return (turned[0] * turned[1]).sum().item()

    assert score(5, 2) == pytest.approx(score(103, 100), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-2)


def test_every_row_may_have_its_own_positions():
    rows = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    x = torch.randn(5, 2, 1, 64)
    found = rope(x, *rope_angles(rows, config(**ROPE)))
    for b in range(2):
        alone = rope(x[:, b : b + 1], *rope_angles(rows[b], config(**ROPE)))
        assert torch.equal(found[:, b : b + 1], alone)


# The kernel's face


def fake(name: str, *args) -> None:
    a = named(name, args)
    s, b = a["s"], a["b"]
    d, half = a["d"], a["r"] // 2

    def heads(part: str, count: int) -> torch.Tensor:
        x = a[part].detach()
        strides = [a[f"{part}_{dim}"] for dim in "sbh"]
        return x.as_strided((s, b, count, d), (*strides, 1), x.storage_offset())

    cos, sin = (a[table].view(s, a["table_b"], 1, half) for table in ("cos", "sin"))
    sin = -sin if a["inverse"] else sin
    parts = []
    for part, count in (("q", a["n"]), ("k", a["g"]), ("v", a["values"])):
        if count:
            x = heads(part, count)
            parts.append(x.clone() if part == "v" else rope_ref(x, cos, sin, bool(a["interleaved"])))
    result = torch.cat(parts, dim=2)
    heads("out", result.shape[2]).copy_(result)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(ops_rope, "usable", lambda *x: True)
    monkeypatch.setattr(ops_rope, "launch_kernel", fake)


def tables(s, b, half):
    return torch.randn(s, b, 1, half), torch.randn(s, b, 1, half)


def compare(results, expected, source):
    """Values, and gradients of `source` for the same random gradients."""
    grads = [torch.randn_like(x) for x in expected]
    for found, right in zip(results, expected, strict=True):
        torch.testing.assert_close(found, right)
    given = torch.autograd.grad(results, source, grads)
    torch.testing.assert_close(given, torch.autograd.grad(expected, source, grads, retain_graph=True))


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [2, 4])
def test_packed_function(half, interleaved, per_sample, kernel):
    s, b, n, g, d = 5, 2, 4, 2, 8
    angles, widths = tables(s, b if per_sample else 1, half), [n * d, g * d, g * d]
    source = torch.randn(s, b, (n + 2 * g) * d, requires_grad=True)
    q, k, v = (part.unflatten(-1, (-1, d)) for part in source.split(widths, -1))
    expected = [rope_ref(q, *angles, interleaved), rope_ref(k, *angles, interleaved), v]
    packed = source * 1.0
    found = rope_packed(packed, widths, d, *angles, interleaved)
    assert all(x.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr() for x in found)
    compare(found, expected, source)
    transposed = (source.transpose(0, 1).contiguous() * 1.0).transpose(0, 1)  # [b, s] in memory
    compare(rope_packed(transposed, widths, d, *angles, interleaved), expected, source)


@pytest.mark.parametrize("interleaved", [False, True])
def test_plain_function(interleaved, kernel):
    x, angles = torch.randn(5, 2, 3, 8, requires_grad=True), tables(5, 2, 3)
    compare([rope(x, *angles, interleaved)], [rope_ref(x, *angles, interleaved)], x)
    part = torch.randn(5, 2, 40, requires_grad=True)
    view = part[..., 8:32].unflatten(-1, (3, 8))
    compare([rope(view, *angles, interleaved)], [rope_ref(view, *angles, interleaved)], part)
    crossed = x.transpose(2, 3).contiguous().transpose(2, 3)  # heads, not features, side by side
    compare([rope(crossed, *angles, interleaved)], [rope_ref(crossed, *angles, interleaved)], x)


def test_packed_without_a_kernel_and_without_a_gradient(monkeypatch):
    packed, angles = torch.randn(5, 2, 32), tables(5, 1, 4)
    before = packed.clone()
    plain = rope_packed(packed, [16, 8, 8], 8, *angles)
    assert torch.equal(packed, before)
    monkeypatch.setattr(ops_rope, "usable", lambda *x: True)
    monkeypatch.setattr(ops_rope, "launch_kernel", fake)
    with torch.no_grad():
        for found, right in zip(rope_packed(packed, [16, 8, 8], 8, *angles), plain, strict=True):
            torch.testing.assert_close(found, right)


def test_who_kept_the_packed_projection_is_told(kernel):
    source = torch.randn(5, 2, 32, requires_grad=True)
    packed = source.exp()  # keeps its result
    q, _, _ = rope_packed(packed, [16, 8, 8], 8, *tables(5, 1, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q.sum().backward()
    with pytest.raises(ValueError, match="a leaf"):
        rope_packed(source, [16, 8, 8], 8, *tables(5, 1, 4))


@pytest.mark.parametrize(
    "cos, sin",
    [
        (torch.zeros(4, 1, 1, 4), torch.zeros(4, 1, 1, 4)),
        (torch.zeros(5, 3, 1, 4), torch.zeros(5, 3, 1, 4)),
        (torch.zeros(5, 1, 1, 4), torch.zeros(5, 1, 1, 3)),
        (torch.zeros(5, 1, 1, 5), torch.zeros(5, 1, 1, 5)),
        (torch.zeros(5, 1, 4), torch.zeros(5, 1, 4)),
        (torch.zeros(5, 1, 1, 4).bfloat16(), torch.zeros(5, 1, 1, 4).bfloat16()),
        (torch.zeros(5, 1, 1, 4, device="meta"), torch.zeros(5, 1, 1, 4, device="meta")),
    ],
)
def test_tables_that_do_not_fit_are_refused(cos, sin, kernel):
    with pytest.raises(ValueError, match="tables"):
        rope(torch.zeros(5, 2, 3, 8), cos, sin)
    with pytest.raises(ValueError, match="tables"):
        rope_packed(torch.zeros(5, 2, 32), [16, 8, 8], 8, cos, sin)

"""Attention over rows shared by 2, 3, 4 and 8 ranks, plain and fast, against one process and torch's own."""

import itertools
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch

from nanomegatron import cp
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import Config, DataConfig
from nanomegatron.cp import SequenceShard, context_attention, shard_batch
from nanomegatron.data.loader import BatchLoader, load_batch
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.ring import Ring
from nanomegatron.mesh import Axis
from nanomegatron.ops.attention import Mask, core_attention
from nanomegatron.pick_variants import attention_over_cp, batch_sharding
from tests.spmd import run_spmd, spmd
from tests.test_cp_shard import CPU, shard_of

KINDS = ["p2p", "allgather", "a2a", "a2a+p2p"]
FORMS = {"plain": context_attention, "fast": Ring(PeerAccess({}))}
S = 48
CASES = {
    "heads": dict(),
    "grouped": dict(g=2, b=2),
    "one key head": dict(g=1),
    "heads of 64": dict(n=8, g=4, d=64),
    "heads of 256": dict(d=256, b=1),
    "documents": dict(lengths=[20, 3, 1, 17, 7], b=1, g=2),
    "padding": dict(lengths=[30, 5], b=1),
    "window": dict(window=5, b=2),
    "window of half": dict(window=24, g=2),
    "documents and a window": dict(lengths=[25, 1, 22], window=7, b=1, g=2),
    "unfused": dict(backend="unfused", g=2),
    "unfused documents": dict(backend="unfused", lengths=[20, 3, 1, 17, 7], b=1),
    "bf16": dict(dtype=torch.bfloat16, b=2, g=2),
}

FEW = ["grouped", "documents", "padding", "documents and a window", "unfused", "bf16"]


def whole(case):
    """q, k, v, a gradient `[s, b, heads, d]`, and the mask, the same on every rank."""
    sizes = dict(b=1, n=8, g=8, d=8, lengths=None, window=None, backend="flash", dtype=torch.float32) | case
    b, n, g, d, lengths = (sizes[name] for name in ("b", "n", "g", "d", "lengths"))
    generator = torch.Generator().manual_seed(7)
    inputs = [torch.randn(S, b, heads, d, generator=generator).to(sizes["dtype"]) for heads in (n, g, g)]
    grad = torch.randn(S, b, n * d, generator=generator).to(sizes["dtype"])
    bounds = None if lengths is None else np.cumsum([0, *lengths]).astype(np.int32)
    mask = Mask(True, sizes["window"])
    if bounds is not None:
        ends = np.unique(np.append(bounds, S)).astype(np.int32)  # one process knows of padding, too
        mask = replace(mask, cu_seqlens=torch.from_numpy(ends), max_seqlen=int(np.diff(ends).max()))
    return inputs, grad, mask, bounds, sizes["backend"]


def attention_alone(case):
    """The context and the three gradients of one process, in float32."""
    inputs, grad, mask, _, backend = whole(case)
    inputs = [x.float().requires_grad_() for x in inputs]
    context, _ = core_attention(*inputs, backend, mask)
    return context.detach(), *torch.autograd.grad(context, inputs, grad.float())


def on_a_rank(mesh, kind, case, form="plain"):
    """This rank's share of both, and where it is in the row; then the bytes sent."""
    inputs, grad, mask, bounds, backend = whole(case)
    shard = shard_of(mesh.cp, S, (kind,), bounds)
    at = torch.from_numpy(shard.positions)
    inputs = [x[at].requires_grad_() for x in inputs]
    mesh.observer.counts.clear()
    attention = attention_over_cp(FORMS[form], mask, mesh.cp)
    context = attention(*inputs, shard, 0, mask, backend)
    grads = torch.autograd.grad(context, inputs, grad[at])
    return at, [context.detach(), *grads], {k: v for k, v in mesh.observer.counts.items() if k[2] == "bytes"}


def levels(size, kind):
    return {"hierarchical_context_parallel_sizes": (2, size // 2)} if kind == "a2a+p2p" else {}


def in_both_forms(mesh, kind, names):
    """By case and form."""
    return [{form: on_a_rank(mesh, kind, CASES[name], form) for form in FORMS} for name in names]


@pytest.mark.parametrize(
    "size, kind", [(4, kind) for kind in KINDS] + [(2, "p2p"), (2, "a2a"), (3, "p2p"), (8, "p2p")]
)
def test_attention_over_ranks_is_that_of_one(size, kind, full):
    """The forms of the ring add in another order, and round gradients of keys at other places."""
    names = list(CASES) if size == 4 or full else FEW
    each = run_spmd(in_both_forms, size, kind, names, cp=size, **levels(size, kind))
    for name, *ranks in zip(names, *each, strict=True):
        exact = attention_alone(CASES[name])
        plain, fast = (gathered([rank[form] for rank in ranks], exact) for form in FORMS)
        limit = 1e-2 if CASES[name].get("dtype") == torch.bfloat16 else 1e-6
        for what, *values in zip(("context", "dq", "dk", "dv"), exact, plain, fast, strict=True):
            for found, expected in itertools.combinations(values, 2):
                error = (found - expected).norm() / expected.norm()
                assert error <= limit, f"{name}, {what}: {error}"
        if "p2p" not in kind or CASES[name].get("window"):
            assert all(torch.equal(*pair) for pair in zip(plain, fast, strict=True)), name


def gathered(ranks, like):
    """The context and the gradients of whole rows, in float32."""
    found = [torch.full_like(x, torch.nan) for x in like]
    for at, parts, _ in ranks:
        for whole, part in zip(found, parts, strict=True):
            whole[at] = part.float()
    return found


@pytest.mark.parametrize("sizes", [(2, 4), pytest.param((4, 2), marks=pytest.mark.full)])
def test_two_levels_of_eight(sizes):
    exact = attention_alone(CASES["documents"])
    mesh = dict(cp=8, hierarchical_context_parallel_sizes=sizes)
    ranks = run_spmd(in_both_forms, 8, "a2a+p2p", ["documents"], **mesh)
    for form in FORMS:
        for found, expected in zip(gathered([rank[0][form] for rank in ranks], exact), exact, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_sent():
    """Key and value heads go as they are, not one a query head; gradients are added up in fp32."""
    case = dict(n=8, g=2, d=8, dtype=torch.bfloat16)
    kv = 2 * 12 * 2 * 8  # of a rank: two tensors, 12 tokens, 2 heads
    for kind, form, expected in [
        ("p2p", "plain", {"send": 2 * 3 * kv * 2 + 4 * kv * 4}),
        ("p2p", "fast", {"send": 2 * 3 * kv / 2 * 2 + 3 * kv * 2}),  # of rank 0: halves of k, v; gradients
        ("allgather", "plain", {"all_gather": 2 * 4 * kv * 2, "reduce_scatter": 4 * kv * 4}),
        ("a2a", "plain", {"all_to_all": 2 * (12 * 8 * (8 + 2 * 4) + 12 * 8 * 8) * 2}),  # a copy for each rank
    ]:
        _, _, sent = run_spmd(on_a_rank, 4, kind, case, form, cp=4)[0]
        assert {name: size for (_, name, _), size in sent.items()} == expected, kind


@spmd(world=2, cp=2)
def test_the_next_keys_are_under_way_while_these_are_used(mesh):
    """Every message begins before the attention to keys that are here."""
    events = []

    def noting(event, function):
        return lambda *a, **how: (events.append(event), function(*a, **how))[1]

    with (
        patch.object(cp, "attend", noting("attend", cp.attend)),
        patch.object(cp, "attend_backward", noting("backward", cp.attend_backward)),
        patch.object(cp, "start_ring_exchange", noting("send", cp.start_ring_exchange)),
    ):
        on_a_rank(mesh, "p2p", CASES["heads"])
    assert events == ["send", "attend", "attend", "send", "backward", "send", "backward", "send"]
    events.clear()

    def noting_ring(*which, real=PeerAccess.ring, **how):
        return noting("send", real(*which, **how))

    with (
        patch.object(cp, "attend", noting("attend", cp.attend)),
        patch.object(cp, "attend_backward", noting("backward", cp.attend_backward)),
        patch.object(PeerAccess, "ring", noting_ring),
    ):
        on_a_rank(mesh, "p2p", CASES["heads"], "fast")
    assert events == ["send", "attend", "attend", "send", "backward", "backward", "send"]


def softmax_by_heads(mesh):
    """Whether each call of the attention of whole rows was asked for the fused softmax."""
    asked, real = [], cp.core_attention

    def noting(*args, fused_softmax=True, **more):
        asked.append(fused_softmax)
        return real(*args, fused_softmax=fused_softmax, **more)

    shard, x = SequenceShard.of_row(mesh.cp, 8, ("a2a",), CPU), torch.randn(4, 1, 2, 8)
    with patch.object(cp, "core_attention", noting):
        for fused in (True, False):
            cp.context_attention(x, x, x, shard, 0, Mask(True, None), "unfused", fused)
    return asked


def test_all_to_all_attention_heeds_the_choice_of_softmax():
    assert run_spmd(softmax_by_heads, 2, cp=2) == [[True, False]] * 2


def test_a_ring_of_one_group():
    """Both ranks swap heads, and no rank to send keys to."""
    expected = attention_alone(CASES["grouped"])
    sizes = dict(hierarchical_context_parallel_sizes=(2, 1))
    ranks = run_spmd(in_both_forms, 2, "a2a+p2p", ["grouped"], cp=2, **sizes)
    for i, exact in enumerate(expected):
        for at, parts, _ in (found for rank in ranks for found in rank[0].values()):
            torch.testing.assert_close(parts[i], exact[at], rtol=1e-5, atol=1e-5)


@spmd(world=4, cp=4)
def test_heads_that_cannot_be_shared_out(mesh):
    for n, g, sizes in ((6, 6, "6 query, 6"), (12, 3, "12 query, 3")):
        shard = SequenceShard.of_row(mesh.cp, S, ("a2a",), CPU)
        q, k = torch.randn(12, 1, n, 8), torch.randn(12, 1, g, 8)
        with pytest.raises(ValueError, match=f"{sizes} key/value heads cannot be divided over 4 ranks"):
            context_attention(q, k, k, shard, 0, Mask(), "flash")


@spmd(world=4, cp=4)
def test_torchs_ring_attention_computes_the_same(mesh):
    """Its templates with the CPU's kernel, on the same places: it cuts rows zigzag, too, by the same rule."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    aten = torch.ops.aten
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    inputs, grad, _, _, _ = whole(dict(b=2))
    at, ours, _ = on_a_rank(mesh, "p2p", dict(b=2))
    q, k, v = (x[at].permute(1, 2, 0, 3).contiguous() for x in inputs)
    grad = grad[at].unflatten(-1, (8, 8)).permute(1, 2, 0, 3).contiguous()
    out, lse = theirs._templated_ring_attention(
        mesh.cp.group, 2, kernel, q, k, v, is_causal=True, dropout_p=0.0
    )
    known = (grad, "grad_out", q, k, v, out, lse)
    grads = theirs._templated_ring_attention_backward(mesh.cp.group, 2, backward, *known, True, dropout_p=0.0)
    ours[0] = ours[0].unflatten(-1, (8, 8))
    for a, b in zip(ours, (out, *grads), strict=True):
        torch.testing.assert_close(a, b.permute(2, 0, 1, 3), rtol=1e-5, atol=1e-5)


class Text:
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return (np.arange(33) * 7 + i) % 11


def settings(documents):
    return DataConfig(
        seq_length=32,
        micro_batch_size=1 if documents else 2,
        reset_position_ids=documents,
        reset_attention_mask=documents,
        num_workers=0,
    )


def cut_batch(mesh, documents):
    model = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    shard = partial(batch_sharding(Config(model=model, data=settings(documents)), CPU), axis=mesh.cp)
    batch = BatchLoader(Text(), settings(documents), 0, mesh.dp, "cpu", True, shard).get(0)
    assert torch.equal(batch.positions, torch.from_numpy(batch.shard.positions))
    names = ("tokens", "labels", "loss_mask") + ("position_ids",) * documents
    return batch.positions, {name: getattr(batch, name) for name in names}


@pytest.mark.parametrize("documents", [False, True])
def test_batches_are_cut(documents):
    """Ranks together have the batch of one process, each its own places of it."""
    data = settings(documents)
    whole = load_batch(Text(), np.arange(data.micro_batch_size), data, 0)
    ranks = run_spmd(cut_batch, 4, documents, cp=4)
    assert sorted(torch.cat([at for at, _ in ranks]).tolist()) == list(range(32))
    for at, parts in ranks:
        for name, part in parts.items():
            assert torch.equal(part, getattr(whole, name)[:, at]), name


def test_the_core_refuses_what_variants_compute():
    """It would let queries see too many keys."""
    axis = Axis("cp", 2, 0, (0, 1))
    x = torch.randn(4, 1, 2, 8)
    for kind, window in (("p2p", 3), ("allgather", 3), ("a2a+p2p", None)):
        with pytest.raises(ValueError, match="is a variant, which pick_variants.py picks"):
            shard = SequenceShard.of_row(axis, 8, (kind,), CPU)
            context_attention(x, x, x, shard, 0, Mask(True, window), "flash")
    batch = load_batch(Text(), np.arange(1), settings(documents=True), 0)
    with pytest.raises(ValueError, match="documents over several ranks"):
        shard_batch(batch, axis, ("p2p",), CPU)
    assert shard_batch(batch, Axis.single("cp"), ("p2p",), CPU) is batch

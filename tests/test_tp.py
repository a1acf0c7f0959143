"""Tensor-parallel layers on 1, 2 and 4 ranks against dense torch with the same global weights."""

import pytest
import torch
import torch.nn.functional as F

from nanomegatron import tp as tp_module
from nanomegatron.comm import all_gather
from nanomegatron.dp import GradBuffer
from nanomegatron.mesh import Axis
from nanomegatron.param import Init, draw
from nanomegatron.tp import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
    vocab_parallel_logits,
)
from tests.spmd import run_spmd

INIT = Init(seed=5)
SIZES = [1, 2, 4]


def on_ranks(body, size):
    """The body on every rank of a tp axis; one process needs none."""
    run_spmd(body, size, tp=size)


def fill(*modules):
    """Draw every parameter anew (biases start at zero); return the global tensors as leaves."""
    whole = {}
    for param in (p for module in modules for p in module.parameters()):
        for part in param.spec.parts:
            whole[part.name] = draw(part.name, part.shape, INIT, 0.5).requires_grad_()
            part.view(param.data).copy_(part.of(whole[part.name].detach()))
    return whole


def same_grads(whole, *modules, tolerance=1e-5):
    """Every part's gradient is its slice of the dense one; padding rows have none."""
    for param in (p for module in modules for p in module.parameters()):
        for part in param.spec.parts:
            torch.testing.assert_close(
                part.view(param.grad), part.of(whole[part.name].grad), rtol=tolerance, atol=tolerance
            )
        inside = sum(part.view(param.grad).abs().sum() for part in param.spec.parts)
        torch.testing.assert_close(inside, param.grad.abs().sum())


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def mlp(mesh):
    fc1 = ColumnParallelLinear(6, 16, mesh.tp, "fc1", INIT)
    fc2 = RowParallelLinear(16, 6, mesh.tp, "fc2", INIT)
    whole = fill(fc1, fc2)
    assert fc1.weight.shape == (16 // mesh.tp.size, 6) and fc2.weight.shape == (6, 16 // mesh.tp.size)
    x = torch.randn(5, 2, 6, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    y = fc2(F.gelu(fc1(x)))
    inner = F.gelu(F.linear(twin, whole["fc1.weight"], whole["fc1.bias"]))
    expected = F.linear(inner, whole["fc2.weight"], whole["fc2.bias"])
    close(y, expected)
    grad = torch.randn(5, 2, 6)
    y.backward(grad)
    expected.backward(grad)
    close(x.grad, twin.grad)
    same_grads(whole, fc1, fc2)


@pytest.mark.parametrize("size", SIZES)
def test_mlp(size):
    on_ranks(mlp, size)


def fused_parts(mesh):
    """A rank's output is its own [q; k; v], each a slice of the dense projection."""
    layer = ColumnParallelLinear(6, {"q": 16, "k": 8, "v": 4}, mesh.tp, "qkv", INIT)
    whole, n, rank = fill(layer), mesh.tp.size, mesh.tp.rank
    x = torch.randn(3, 2, 6)
    parts = layer(x).split([16 // n, 8 // n, 4 // n], -1)
    for name, part in zip("qkv", parts, strict=True):
        dense = F.linear(x, whole[f"qkv.{name}.weight"], whole[f"qkv.{name}.bias"])
        close(part, dense.chunk(n, -1)[rank])
        (dense * torch.arange(dense.shape[-1])).sum().backward()
        (part * torch.arange(dense.shape[-1]).chunk(n)[rank]).sum().backward(retain_graph=True)
    same_grads(whole, layer)


@pytest.mark.parametrize("size", SIZES)
def test_fused_parts(size):
    on_ranks(fused_parts, size)


def embedding_and_logits(mesh):
    """Vocabulary 9 padded to 16, tied: rank 3 of 4 holds padding alone. Ids fall into every shard."""
    layer = VocabParallelEmbedding(9, 16, 6, mesh.tp, init=INIT)
    (table,) = fill(layer).values()
    ids = torch.tensor([[0, 8, 3, 3], [5, 1, 8, 7]])
    x = layer(ids)
    close(x, table[ids].transpose(0, 1))
    logits = vocab_parallel_logits(x, layer.weight, mesh.tp)
    assert logits.shape == (4, 2, 16 // mesh.tp.size)
    dense = table[ids].transpose(0, 1) @ table.t()
    close(all_gather(logits.detach(), mesh.tp, dim=-1)[..., :9], dense)
    weight = torch.randn(4, 2, 16)
    weight[..., 9:] = 0
    (dense * weight[..., :9]).sum().backward()
    (logits * weight.chunk(mesh.tp.size, -1)[mesh.tp.rank]).sum().backward()
    same_grads({"embedding.word_embeddings.weight": table}, layer)


@pytest.mark.parametrize("size", SIZES)
def test_embedding_and_tied_logits(size):
    on_ranks(embedding_and_logits, size)


def cross_entropy(mesh, vocab, chunk):
    """Padding columns hold large numbers, which must play no part; the chunks cut the 10 tokens unevenly."""
    tp_module.CrossEntropyFunction.chunk = chunk
    whole = 3 * torch.randn(5, 2, 16)
    whole[..., vocab:] = 100.0
    labels = torch.randint(vocab, (2, 5))
    labels[0, :2] = torch.tensor([0, vocab - 1])
    logits = whole.chunk(mesh.tp.size, -1)[mesh.tp.rank].clone().requires_grad_()
    dense = whole[..., :vocab].double().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, labels, mesh.tp, vocab)
    expected = F.cross_entropy(dense.permute(1, 2, 0), labels, reduction="none")
    assert loss.shape == (2, 5) and loss.dtype == torch.float32
    close(loss.double(), expected)
    weight = torch.rand(2, 5)
    (loss * weight).sum().backward()
    (expected * weight).sum().backward()
    padded = F.pad(dense.grad, (0, 16 - vocab)).chunk(mesh.tp.size, -1)[mesh.tp.rank]
    close(logits.grad.double(), padded)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab, chunk", [(16, 2048), (13, 4), (9, 10)])
def test_cross_entropy(size, vocab, chunk):
    """All columns real; a padded last shard; with 4 ranks and 9 words a last shard of nothing but padding."""
    run_spmd(cross_entropy, size, vocab, chunk, tp=size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_sums_microbatches(dtype):
    """main_grad after two microbatches is autograd's .grad of both, and autograd's own stays empty."""
    init, axis = Init(dtype=dtype), Axis.single("tp")

    def make():
        return torch.nn.ModuleList(
            [
                VocabParallelEmbedding(9, 12, 6, axis, init=init, std=0.5),
                ColumnParallelLinear(6, 8, axis, "fc1", init, 0.5),
                RowParallelLinear(8, 6, axis, "fc2", init, 0.5),
            ]
        )

    model, twin = make(), make()
    buffer = GradBuffer(model.parameters(), Axis.single("dp_cp"))
    for _ in range(2):
        ids, weight = torch.randint(9, (2, 4)), torch.randn(4, 2, 6).to(dtype)
        for layers in model, twin:
            embedding, fc1, fc2 = layers
            (fc2(F.gelu(fc1(embedding(ids)))) * weight).sum().backward()
    buffer.grad_sync()
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is None and p.main_grad.dtype == torch.float32
        torch.testing.assert_close(p.main_grad, q.grad.float(), rtol=tolerance, atol=tolerance)


def test_bf16_microbatches_add_up_in_fp32():
    """256 + 1 is 256 in bf16; the fp32 buffer keeps the 1."""
    layer = ColumnParallelLinear(1, 1, Axis.single(), "fc", Init(dtype=torch.bfloat16), bias=False)
    GradBuffer(layer.parameters(), Axis.single())
    for value in 256.0, 1.0:
        layer(torch.full((1, 1, 1), value, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.main_grad.item() == 257.0


def test_sizes_that_do_not_divide_are_refused():
    axis = Axis("tp", 4, 0, (0, 1, 2, 3))
    with pytest.raises(ValueError, match="qkv.k: 6 output features do not divide by tp 4"):
        ColumnParallelLinear(8, {"q": 8, "k": 6}, axis, "qkv")
    with pytest.raises(ValueError, match="proj: 10 input features do not divide by tp 4"):
        RowParallelLinear(10, 8, axis, "proj")


def test_weight_decay_is_for_matrices():
    axis = Axis.single()
    for layer in ColumnParallelLinear(4, 4, axis), RowParallelLinear(4, 4, axis):
        assert layer.weight.spec.decay and not layer.bias.spec.decay

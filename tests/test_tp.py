"""Tensor-parallel layers on 1, 2 and 4 ranks against dense torch with the same global weights."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from nanomegatron import megatron_api
from nanomegatron.comm import all_gather, all_reduce, own_slice
from nanomegatron.config.model import TransformerConfig
from nanomegatron.fast.discard_output import discarding_mlp
from nanomegatron.fast.tp_overlap import overlapped_linear
from nanomegatron.layers import MLP, run_mlp
from nanomegatron.mesh import Axis
from nanomegatron.param import Init, ParamSpec, draw_normal, new_parameter, replica
from nanomegatron.tp import (
    ColumnParallelLinear,
    LinearFunction,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from tests.spmd import run_spmd

INIT = Init(seed=5)
SIZES = [1, 2, 4]


def on_ranks(body, size):
    """The body on every rank of a tp axis; one process needs none."""
    run_spmd(body, size, tp=size)


def fill(*modules):
    """Draw every parameter (biases start at zero); return the global tensors as leaves."""
    whole = {}
    for param in (p for module in modules for p in module.parameters()):
        for part in param.spec.parts:
            whole[part.name] = draw_normal(part.name, part.shape, replace(INIT, std=0.5)).requires_grad_()
            part.local_view(param.data).copy_(part.global_view(whole[part.name].detach()))
    return whole


def same_grads(whole, *modules, tolerance=1e-5):
    """Every part's gradient is its slice of the dense one; padding rows have none."""
    for param in (p for module in modules for p in module.parameters()):
        summed(param, param.grad)
        for part in param.spec.parts:
            torch.testing.assert_close(
                part.local_view(param.grad),
                part.global_view(whole[part.name].grad),
                rtol=tolerance,
                atol=tolerance,
            )
        inside = sum(part.local_view(param.grad).abs().sum() for part in param.spec.parts)
        torch.testing.assert_close(inside, param.grad.abs().sum())


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def summed(param, grad):
    """A gradient, once the ranks that hold the same slice have put their summands together."""
    for part in param.spec.parts:
        if part.partial is not None:
            part.local_view(grad).copy_(all_reduce(part.local_view(grad), part.partial))
    return grad


def mlp(mesh, how):
    """As Megatron's users call it: cut along the sequence or not, pipelined, bias apart."""
    cut, overlap = "sequence" in how, "overlap" in how
    tp = mesh.tp
    fc1 = ColumnParallelLinear(6, 16, tp, INIT.at("fc1"), sequence_parallel=cut)
    apart = partial(megatron_api.RowParallelLinear, skip_bias_add=True)
    kind = apart if "apart" in how else RowParallelLinear
    fc2 = kind(16, 6, tp, INIT.at("fc2"), sequence_parallel=cut)
    if overlap:
        fc1.linear = fc2.linear = partial(overlapped_linear, None)
    whole = fill(fc1, fc2)
    assert fc1.weight.shape == (16 // mesh.tp.size, 6) and fc2.weight.shape == (6, 16 // mesh.tp.size)
    twin = torch.randn(8, 2, 6).requires_grad_()
    mine = (lambda x: own_slice(x, mesh.tp)) if cut else (lambda x: x)
    x = mine(twin.detach()).clone().requires_grad_()
    y = fc2(F.gelu(fc1(x)))
    if "apart" in how:
        y, bias = y
        assert bias is fc2.bias
        y = y + bias
    inner = F.gelu(F.linear(twin, whole["fc1.weight"], whole["fc1.bias"]))
    expected = F.linear(inner, whole["fc2.weight"], whole["fc2.bias"])
    close(y, mine(expected))
    grad = torch.randn(8, 2, 6)
    y.backward(mine(grad))
    expected.backward(grad)
    close(x.grad, mine(twin.grad))
    same_grads(whole, fc1, fc2)
    kinds = {kind for _, kind, what in mesh.observer.counts if what == "calls"}
    assert mesh.tp.size == 1 or kinds == ({"all_gather", "reduce_scatter"} if cut else set()) | {"all_reduce"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "how", ["plain", "bias apart", "sequence", "sequence, bias apart", "sequence, overlap"]
)
def test_mlp(how, size):
    run_spmd(mlp, size, how, tp=size)


def whole_in_and_out(mesh):
    """gather_output and input_is_parallel=False: each layer alone is a dense one on every rank."""
    column = megatron_api.ColumnParallelLinear(6, 16, mesh.tp, INIT.at("column"), gather_output=True)
    row = megatron_api.RowParallelLinear(16, 6, mesh.tp, INIT.at("row"), input_is_parallel=False)
    whole = fill(column, row)
    twin = torch.randn(5, 2, 6).requires_grad_()
    x = twin.detach().clone().requires_grad_()
    inner = F.linear(twin, whole["column.weight"], whole["column.bias"])
    expected = F.linear(torch.sin(inner), whole["row.weight"], whole["row.bias"])
    apart = megatron_api.ColumnParallelLinear(
        6, 16, mesh.tp, INIT.at("column"), gather_output=True, skip_bias_add=True
    )
    apart.load_state_dict(column.state_dict())
    close(sum(apart(x.detach())), inner)
    y = column(x)
    close(y, inner)
    y = row(torch.sin(y))
    close(y, expected)
    grad = torch.randn(5, 2, 6)
    y.backward(grad)
    expected.backward(grad)
    close(x.grad, twin.grad)
    same_grads(whole, column, row)


@pytest.mark.parametrize("size", SIZES)
def test_gather_output_and_whole_input(size):
    on_ranks(whole_in_and_out, size)


def test_fused_output_cannot_be_gathered():
    sizes = {"q": 8, "k": 8}
    with pytest.raises(ValueError, match="qkv: gather_output would mix the parts q, k"):
        megatron_api.ColumnParallelLinear(6, sizes, Axis.single(), Init(name="qkv"), gather_output=True)


def shared_heads(mesh):
    """Two heads of 3 features on 4 ranks: neighbours hold the same one, and together its gradient."""
    layer = ColumnParallelLinear(6, {"q": 12, "k": (6, 2)}, mesh.tp, INIT.at("qk"))
    whole, rank = fill(layer), mesh.tp.rank
    x = torch.randn(4, 2, 6)
    q, k = layer(x).split([3, 3], -1)
    dense_q, dense_k = (F.linear(x, whole[f"qk.{n}.weight"], whole[f"qk.{n}.bias"]) for n in "qk")
    close(q, dense_q.chunk(4, -1)[rank])
    close(k, dense_k.chunk(2, -1)[rank // 2])
    (q * k).sum().backward()
    (
        dense_q.unflatten(-1, (4, 3)) * dense_k.unflatten(-1, (2, 1, 3)).expand(-1, -1, 2, 2, 3).flatten(2, 3)
    ).sum().backward()
    same_grads(whole, layer)


def test_fewer_heads_than_ranks():
    run_spmd(shared_heads, 4, tp=4)


def fused_parts(mesh):
    """A rank's output is its own [q; k; v], each a slice of the dense projection."""
    layer = ColumnParallelLinear(6, {"q": 16, "k": 8, "v": 4}, mesh.tp, INIT.at("qkv"))
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


def embedding_and_logits(mesh, cut):
    """Vocabulary 9 padded to 16, tied: rank 3 of 4 holds padding alone. Ids fall into every shard."""
    layer = VocabParallelEmbedding(9, 16, 6, mesh.tp, INIT.at("embedding.word_embeddings"), cut)
    (table,) = fill(layer).values()
    ids = torch.tensor([[0, 8, 3, 3], [5, 1, 8, 7]])
    x = layer(ids)
    close(x, own_slice(table[ids].transpose(0, 1), mesh.tp) if cut else table[ids].transpose(0, 1))
    logits = LinearFunction.apply(x, layer.weight, mesh.tp, "gather" if cut else "copy")
    assert logits.shape == (4, 2, 16 // mesh.tp.size)
    dense = table[ids].transpose(0, 1) @ table.t()
    close(all_gather(logits.detach(), mesh.tp, dim=-1)[..., :9], dense)
    weight = torch.randn(4, 2, 16)
    weight[..., 9:] = 0
    (dense * weight[..., :9]).sum().backward()
    (logits * weight.chunk(mesh.tp.size, -1)[mesh.tp.rank]).sum().backward()
    same_grads({"embedding.word_embeddings.weight": table}, layer)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cut", [False, True])
def test_embedding_and_tied_logits(cut, size):
    run_spmd(embedding_and_logits, size, cut, tp=size)


def words_and_positions(mesh, cut, packed):
    """The rank that has an id adds its position, which changes no bit; gradients are the dense ones."""
    layer = VocabParallelEmbedding(9, 16, 6, mesh.tp, INIT.at("embedding.word_embeddings"), cut)
    part = replica("positions", (5, 6), mesh.tp, partial_grad=cut)
    layer.positions = new_parameter(ParamSpec((part,), (5, 6)), INIT.at("positions"))
    whole = fill(layer)
    table, positions = whole["embedding.word_embeddings.weight"], whole["positions"]
    ids = torch.tensor([[0, 8, 3, 3], [5, 1, 8, 7]])
    places = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]]) if packed else torch.tensor([4, 1, 2, 0])
    dense = table[ids.t()] * 1.3 + positions[places.t() if packed else places[:, None]]
    x, weight = layer(ids, 1.3, layer.positions, places), torch.randn(4, 2, 6)
    assert torch.equal(x, own_slice(dense, mesh.tp) if cut else dense)
    (dense * weight).sum().backward()
    (x * (own_slice(weight, mesh.tp) if cut else weight)).sum().backward()
    same_grads(whole, layer)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cut", [False, True])
def test_words_and_positions(cut, size):
    for packed in (False, True):
        run_spmd(words_and_positions, size, cut, packed, tp=size)


def eval_mode(mesh):
    """Generating takes any length: in eval mode nothing is cut along the sequence."""
    fc1 = ColumnParallelLinear(6, 16, mesh.tp, INIT.at("fc1"), sequence_parallel=True).eval()
    fc2 = RowParallelLinear(16, 6, mesh.tp, INIT.at("fc2"), sequence_parallel=True).eval()
    whole = fill(fc1, fc2)
    x = torch.randn(3, 1, 6)
    inner = F.linear(x, whole["fc1.weight"], whole["fc1.bias"])
    close(fc2(fc1(x)), F.linear(inner, whole["fc2.weight"], whole["fc2.bias"]))


def test_eval_mode_takes_whole_sequences():
    on_ranks(eval_mode, 2)


class Bucket:
    """What layers see of a bucket: fp32 `main_grad`, and somebody to tell of each contribution."""

    def __init__(self, *params):
        self.accumulated = []
        self.left = []  # to autograd
        for param in params:
            param.bucket, param.main_grad = self, torch.zeros(param.shape)
            param.register_post_accumulate_grad_hook(self.move)

    def grad_buffer(self, param):
        return param.main_grad, 1

    def move(self, param):
        if param.grad is not None:
            self.left.append(param)
            param.main_grad += param.grad
            param.grad = None

    def count(self, param):
        self.accumulated.append(param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_sums_microbatches(dtype):
    """main_grad after two microbatches is autograd's .grad of both, and autograd's own stays empty."""
    init, axis = Init(dtype=dtype, std=0.5), Axis.single("tp")

    def make():
        return torch.nn.ModuleList(
            [
                VocabParallelEmbedding(9, 12, 6, axis, init.at("embedding")),
                ColumnParallelLinear(6, 8, axis, init.at("fc1")),
                RowParallelLinear(8, 6, axis, init.at("fc2")),
            ]
        )

    model, twin = make(), make()
    Bucket(*model.parameters())
    for _ in range(2):
        ids, weight = torch.randint(9, (2, 4)), torch.randn(4, 2, 6).to(dtype)
        for layers in model, twin:
            embedding, fc1, fc2 = layers
            (fc2(F.gelu(fc1(embedding(ids)))) * weight).sum().backward()
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is None and p.main_grad.dtype == torch.float32
        torch.testing.assert_close(p.main_grad, q.grad.float(), rtol=tolerance, atol=tolerance)


def test_bf16_microbatches_add_up_in_fp32():
    """256 + 1 is 256 in bf16; the fp32 buffer keeps the 1."""
    layer = ColumnParallelLinear(1, 1, Axis.single(), Init(dtype=torch.bfloat16), bias=False)
    bucket = Bucket(layer.weight)
    for value in 256.0, 1.0:
        layer(torch.full((1, 1, 1), value, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.main_grad.item() == 257.0 and bucket.accumulated == [layer.weight] * 2


@pytest.mark.parametrize("run", [run_mlp, discarding_mlp])
@pytest.mark.parametrize("how", [{}, dict(squared_relu=True), dict(swiglu=True)])
def test_biases_report_each_contribution(how, run):
    """Once a microbatch, by the layer or the activation; one that the caller adds is left to autograd."""
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, ffn_hidden_size=24, **how)
    mlp, twin = (MLP(config, Axis.single(), replace(INIT, std=0.5), 24) for _ in range(2))
    mlp.run = run
    bucket, weight = Bucket(*mlp.parameters()), torch.randn(5, 2, 8)
    for _ in range(2):
        x = torch.randn(5, 2, 8)
        for module in mlp, twin:
            (module(x) * weight).sum().backward()
    assert Counter(bucket.accumulated) == dict.fromkeys(mlp.parameters(), 2) and not bucket.left
    for p, q in zip(mlp.parameters(), twin.parameters(), strict=True):
        close(p.main_grad, q.grad)
    for kind in ColumnParallelLinear, megatron_api.RowParallelLinear:
        layer = kind(4, 4, Axis.single(), skip_bias_add=True)
        bucket = Bucket(*layer.parameters())
        sum(layer(torch.randn(5, 2, 4))).sum().backward()
        assert bucket.accumulated == [layer.weight] and bucket.left == [layer.bias]


def test_sizes_that_do_not_divide_are_refused():
    axis = Axis("tp", 4, 0, (0, 1, 2, 3))
    with pytest.raises(ValueError, match="qkv.k: 6 output features must be a multiple of tp 4"):
        ColumnParallelLinear(8, {"q": 8, "k": 6}, axis, Init(name="qkv"))
    with pytest.raises(ValueError, match="proj: 10 input features must be a multiple of tp 4"):
        RowParallelLinear(10, 8, axis, Init(name="proj"))


def test_weight_decay_is_for_matrices():
    axis = Axis.single()
    for layer in ColumnParallelLinear(4, 4, axis), RowParallelLinear(4, 4, axis):
        assert layer.weight.spec.decay and not layer.bias.spec.decay

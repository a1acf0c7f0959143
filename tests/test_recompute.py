"""Activation recomputation: the same gradients to the bit, and less that is kept."""

from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nanomegatron.batch import Batch
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.fast.discard_output import discard, discarding_mlp
from nanomegatron.fast.fused_layer import FusedLayers
from nanomegatron.layers import MLP, run_mlp
from nanomegatron.mesh import Axis, Mesh, World
from nanomegatron.model import GPTModel, run_layers
from nanomegatron.param import Init
from nanomegatron.pick_fast_paths import Paths, install
from nanomegatron.pp import ModelChunks
from nanomegatron.recompute import recomputed, rng_state

ALONE = Mesh.build(ParallelConfig(), World(), torch.device("cpu"))
BASE = TransformerConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    swiglu=True,
    qk_layernorm=True,
)
SELECTIVE = ["core_attn", "mlp", "mlp_act", "layernorm"]
WAYS = {
    **{name: dict(recompute_granularity="selective", recompute_modules=(name,)) for name in SELECTIVE},
    "all of them": dict(recompute_granularity="selective", recompute_modules=tuple(SELECTIVE)),
    **{
        f"{method} {n}": dict(recompute_granularity="full", recompute_method=method, recompute_num_layers=n)
        for method, n in (("uniform", 1), ("uniform", 3), ("block", 2), ("block", 9))
    },
}


def train_once(config, dtype):
    """Loss, all gradients, and the bytes that autograd keeps between forward and backward."""
    model = GPTModel(config, vocab_size=61, max_sequence_length=16, init=Init(seed=3, dtype=dtype, std=0.1))
    layers = FusedLayers(recompute=True) if config.recomputes("layernorm") else run_layers
    install(ModelChunks([model]), Paths(layers, discards=config.recompute_modules))
    buckets = ParamAndGradBuckets(model, ParallelConfig(), ALONE)
    data = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1))
    inputs = Batch(data[:, :-1], torch.arange(16), torch.arange(2), dropout_seed=7)
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def count(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        loss = model(inputs, data[:, 1:])
    loss.mean().backward()
    buckets.finish_grad_sync()
    return loss, {name: p.main_grad for name, p in model.named_parameters()}, sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_equal_to_the_bit(way, kind, dtype):
    plain = replace(BASE, normalization=kind)
    expected, grads, _ = train_once(plain, dtype)
    loss, found, _ = train_once(replace(plain, **WAYS[way]), dtype)
    assert torch.equal(loss, expected)
    for name, grad in grads.items():
        assert torch.equal(found[name], grad), name


def test_recomputed_norms_are_not_kept():
    """Two norms of each of four layers, in fp32."""
    whole, less = (train_once(replace(BASE, **more), torch.float32)[2] for more in ({}, WAYS["layernorm"]))
    assert whole - less == 4 * 2 * 32 * 32 * 4


def test_full_keeps_the_inputs_of_layers_alone():
    """What autograd keeps in all, by number of layers: four inputs for uniform 1, two for uniform 2."""
    h, tokens = 32 * 4, 32
    sizes = {}
    for n in 1, 2, 4:
        more = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=n)
        sizes[n] = train_once(replace(BASE, hidden_dropout=0.0, **more), torch.float32)[2]
    assert sizes[1] - sizes[2] == 2 * h * tokens and sizes[2] - sizes[4] == h * tokens


@pytest.mark.parametrize("kept", [True, False])
def test_outputs_made_again_are_not_kept(kept):
    """What the matmul alone keeps is gone before the backward, which calls for it once."""
    weight, x = torch.randn(5, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    calls = []

    def first(x):
        calls.append(1)
        return torch.sin(x)

    y = first(x)
    memory = StorageWeakRef(y.untyped_storage())
    if kept:
        z = y @ weight.t()
    else:
        with discard(y, first, x):
            z = y @ weight.t()
    del y
    assert memory.expired() != kept and len(calls) == 1
    z.sum().backward()
    assert len(calls) == (1 if kept else 2)
    assert torch.equal(weight.grad, torch.autograd.grad((torch.sin(x) @ weight.t()).sum(), weight)[0])


def test_outputs_made_early():
    """They may be recomputed ahead of the backward that reads them; without autograd they never are."""
    weight, x = torch.randn(5, 8, requires_grad=True), torch.randn(6, 8)
    calls, early = [], []

    def first(x):
        calls.append(1)
        return torch.sin(x)

    for keeps in (False, True):
        with torch.set_grad_enabled(keeps):
            y = torch.sin(x)
            with discard(y, first, x, early):
                z = y @ weight.t()
        assert len(early) == keeps
    early.pop()()
    assert len(calls) == 1
    for times in (1, 2):
        (grad,) = torch.autograd.grad(z.sum(), weight, retain_graph=True)
        torch.testing.assert_close(grad, torch.sin(x).sum(0).expand_as(weight))
        assert len(calls) == times


def test_a_recomputed_activation_has_its_bias():
    """The bias of the first layer is part of what the second one reads."""
    grads = []
    for run in run_mlp, discarding_mlp:
        config = replace(BASE, swiglu=False)
        mlp = MLP(config, Axis.single(), Init(std=0.3), config.ffn_size)
        mlp.run = run
        torch.nn.init.constant_(mlp.linear_fc1.bias, 0.7)
        x = torch.linspace(-1, 1, 6 * 2 * 32).view(6, 2, 32).requires_grad_()
        grads.append(torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)) and len(grads[0]) == 5


def test_random_numbers_are_drawn_again_and_then_go_on(monkeypatch):
    """As torch's own checkpoint does it; the generator of a CPU stands in for that of a GPU."""
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, _: torch.set_rng_state(state))
    state = torch.get_rng_state()
    first, _, third = (torch.rand(4) for _ in range(3))
    torch.set_rng_state(state)
    torch.rand(8)
    with rng_state(torch.device("cpu"), state):
        assert torch.equal(torch.rand(4), first)
    assert torch.equal(torch.rand(4), third)


def test_recomputed_inputs():
    """Inputs that want no gradient are fine, and without autograd nothing is kept."""
    x, mask = torch.randn(4, requires_grad=True), torch.rand(4)
    y = recomputed(lambda a, b: (a * b).exp(), x, mask)
    y.sum().backward()
    assert torch.equal(x.grad, (mask * (x * mask).exp()).detach()) and mask.grad is None
    with torch.no_grad():
        assert not recomputed(lambda a: a * 2, x).requires_grad


@pytest.mark.parametrize("way", ["uniform 1", "all of them"])
def test_layers_train_behind_a_frozen_embedding(way):
    """Where no input has a gradient the weights have theirs nevertheless."""
    grads = []
    for more in {}, WAYS[way]:
        model = GPTModel(replace(BASE, **more), vocab_size=61, max_sequence_length=16, init=Init(seed=3))
        model.embedding.requires_grad_(False)
        tokens = torch.arange(32).view(2, 16)
        model(Batch(tokens, torch.arange(16)), tokens).mean().backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)) and len(grads[0]) > 20


@pytest.mark.parametrize(
    "way, expected",
    [
        ({}, [(range(4), False)]),
        (WAYS["core_attn"], [(range(4), False)]),
        (WAYS["uniform 3"], [(range(3), True), (range(3, 4), True)]),
        (WAYS["block 2"], [(range(1), True), (range(1, 2), True), (range(2, 4), False)]),
        (WAYS["block 9"], [(range(i, i + 1), True) for i in range(4)] + [(range(4, 4), False)]),
    ],
)
def test_segments(way, expected):
    assert replace(BASE, **way).segments(4) == expected

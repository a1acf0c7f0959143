"""The first contribution of a step overwrites the last step's gradient: the bits of adding it to zeros."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.build import buckets_class
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.fast.fused_loss import fused_output_loss
from nanomegatron.mesh import Mesh
from nanomegatron.model import GPTModel
from nanomegatron.param import Init, WeightGradStore, accumulate, add_grad, add_product
from tests.checkpoints import ALONE
from tests.toy import built, train_step

GPT2 = TransformerConfig(num_layers=2, hidden_size=20, num_attention_heads=4, attention_backend="unfused")
CONFIGS = {
    "tied": GPT2,
    "untied": replace(GPT2, untie_embeddings_and_output_weights=True),
    "recompute": replace(GPT2, recompute_granularity="full", recompute_method="uniform"),
    "experts": replace(GPT2, num_experts=3, moe_router_topk=2),
    # With 24 tokens in a microbatch, and 48 in a step, some are idle in one, some in both.
    "idle experts": replace(GPT2, num_experts=50, moe_router_topk=1, moe_ffn_hidden_size=8),
}
SIZE = dict(vocab_size=61, max_sequence_length=12)


def spoil(buckets: ParamAndGradBuckets) -> None:
    """NaN in all gradients, but not in the padding between them."""
    for bucket in buckets.all:
        for param in bucket.params:
            if param.main_grad is not None:
                param.main_grad.fill_(math.nan)


def zeroed(buckets: ParamAndGradBuckets, microbatches: int) -> None:
    """`zero_grad_buffer` as by one pass over each bucket: all contributions are added."""
    buckets.zero_grad_buffer(microbatches)
    for bucket in buckets.all:
        if bucket.grads is not None:
            bucket.grads.zero_()
        bucket.unwritten.clear()


def gradients(
    config: TransformerConfig, begin, way: str, dtype: torch.dtype, grad_dtype: torch.dtype
) -> ParamAndGradBuckets | GPTModel:
    """The buckets behind a step of two microbatches after a step that left NaN; begin: zero or zeroed.

    begin None: the model, without buckets.
    """
    torch.manual_seed(1)
    model = GPTModel(config, **SIZE, init=Init(dtype=dtype))
    if "fused" in way:
        model.output_layer.loss = fused_output_loss
    strategy = "optim_grads" if "pooled" in way else "no_shard"
    parallel = ParallelConfig(data_parallel_sharding_strategy=strategy, ddp_bucket_size=1000)
    buckets, store = begin and buckets_class(parallel)(model, parallel, Mesh(), grad_dtype), WeightGradStore()
    for param in model.parameters():
        param.wgrad_store = store
    if buckets:
        spoil(buckets)
        begin(buckets, 2)
    losses = []
    for tokens in (torch.randint(61, (2, 2, 13))).unbind():
        weights = torch.full((2, 12), 1 / 24)
        batch = Batch(tokens[:, :-1], torch.arange(12), torch.arange(2), loss_weights=weights)
        losses.append((model(batch, tokens[:, 1:]) * weights).sum())
        if "ahead" in way and len(losses) == 1:
            continue  # both forwards before the first backward, as in a pipeline
        while losses:
            with store.collect() if way == "deferred" else nullcontext([]) as works:
                losses.pop(0).backward()
            store.run(works)
    if buckets:
        buckets.finish_grad_sync()
    return buckets or model


@pytest.mark.parametrize("way", ["now", "deferred", "fused"])
def test_a_tied_weight_gets_the_gradients_of_both_uses(way):
    """Those that autograd adds up without buckets, whichever of head and embedding is first."""
    buckets = gradients(GPT2, ParamAndGradBuckets.zero_grad_buffer, way, torch.float32, torch.float32)
    model = gradients(GPT2, None, "now", torch.float32, torch.float32)
    for p, q in zip(buckets.params, model.parameters(), strict=True):
        torch.testing.assert_close(p.main_grad, q.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["now", "deferred", "pooled", "fused", "fused ahead", "fused ahead pooled"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_bits_of_adding_to_zeros(name, way):
    """With fp32 and bf16 weights and gradients. Tied, the head overwrites and the embedding adds."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for types in (fp32, fp32), (bf16, fp32), (bf16, bf16):
        found = gradients(CONFIGS[name], ParamAndGradBuckets.zero_grad_buffer, way, *types)
        expected, padding = gradients(CONFIGS[name], zeroed, way, *types), 0
        for bucket, twin in zip(found.all, expected.all, strict=True):
            ours, beside = bucket.grad_shard, torch.ones(bucket.size, dtype=torch.bool)
            assert ours.isfinite().all() and torch.equal(ours, twin.grad_shard)
            for begin, param in zip(bucket.begins, bucket.params, strict=True):
                beside[begin : begin + param.numel()] = False
            assert not ours[beside].any(), "padding stays zero"
            padding += beside.sum()
        assert padding > 100


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_a_skipped_step_leaves_nothing(strategy):
    """A step whose gradients are NaN changes no weight, and the next is that of a run without it."""
    runs = []
    for spoiled in (False, True):
        model, buckets, optimizer = built(ALONE, {"data_parallel_sharding_strategy": strategy})
        if spoiled:
            buckets.zero_grad_buffer(1)
            (model(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])) * math.nan).backward()
            buckets.finish_grad_sync()
            assert not optimizer.step(torch.tensor(0.0)).grad_norm.isfinite()
        norm = train_step(model, buckets, optimizer, ALONE)
        buckets.wait_params()
        runs.append([norm, *(p.detach().clone() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_only_the_first_overwrites():
    """Whether it is written in two steps, by a matmul, or left to autograd."""
    model, buckets, _ = built(ALONE, {})
    first, second, third = (layer.inner for layer in model.layers)
    for microbatches in (1, 2):
        spoil(buckets)
        buckets.zero_grad_buffer(3)
        for n in range(1, 4):
            out, beta = first.bucket.grad_buffer(first)
            assert beta == (n > 1) and out is first.main_grad
            rows, columns = out.shape
            add_product(out, torch.ones(2, rows), torch.ones(2, columns), beta)
            first.bucket.count(first)
            accumulate(second, lambda out, beta: add_grad(out, torch.ones_like(out), beta))
            third.sum().backward()
            assert (first.main_grad == 2 * n).all() and (second.main_grad == n).all()
            assert (third.main_grad == n).all(), microbatches
            assert all(p.bucket.counts[p] == n for p in (first, second, third))
        assert model.embedding.weight.main_grad.isnan().all(), "what has no contribution is not touched"


def test_a_counted_gradient_is_not_overwritten():
    """A replayed graph writes, and Python only counts: what follows adds to it."""
    model, buckets, _ = built(ALONE, {})
    param = model.layers[0].inner
    buckets.zero_grad_buffer(2)
    param.main_grad.fill_(1.0)  # by the graph
    param.bucket.count(param)
    accumulate(param, lambda out, beta: add_grad(out, torch.ones_like(out), beta))
    assert (param.main_grad == 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_overwrites_what_is_no_number(dtype):
    grad, x = torch.randn(6, 3).to(dtype), torch.randn(6, 5).to(dtype)
    target, sums = torch.full((3, 5), math.nan), torch.zeros(3, 5)
    add_product(target, grad, x, beta=0)
    add_product(sums, grad, x)
    assert torch.equal(target, sums) and target.isfinite().all()
    exact = grad.double().t() @ x.double()  # sums of 16-bit inputs are rounded once, to the target's type
    torch.testing.assert_close(sums.double(), exact, rtol=1e-6, atol=1e-6)

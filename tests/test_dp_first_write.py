"""The first contribution of a step overwrites the last step's gradient: the bits of adding it to zeros."""

import math
from dataclasses import replace

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import ParallelConfig
from nanomegatron.dp import Buckets
from nanomegatron.fast.fused_loss import fused_linear_cross_entropy
from nanomegatron.mesh import Mesh
from nanomegatron.model import GPTModel
from nanomegatron.param import Init, WeightGradStore, add_product, grad_to_write, main_grad
from tests.checkpoints import ALONE
from tests.toy import built, train_step

GPT2 = TransformerConfig(num_layers=2, hidden_size=20, num_attention_heads=4, attention_backend="unfused")
CONFIGS = {
    "tied": GPT2,
    "untied": replace(GPT2, untie_embeddings_and_output_weights=True),
    "recompute": replace(GPT2, recompute_granularity="full", recompute_method="uniform"),
    "experts": replace(GPT2, num_experts=3, moe_router_topk=2),
}
SIZE = dict(vocab_size=61, max_sequence_length=12)


def spoil(buckets: Buckets) -> None:
    """NaN in all gradients, but not in the padding between them."""
    for bucket in buckets.all:
        for param in bucket.params:
            if param.main_grad is not None:
                param.main_grad.fill_(math.nan)


def zeroed(buckets: Buckets, microbatches: int) -> None:
    """`zero` as by one pass over each bucket: all contributions are added."""
    buckets.zero(microbatches)
    for bucket in buckets.all:
        if bucket.grads is not None:
            bucket.grads.zero_()
        bucket.stale.clear()


def gradients(
    config: TransformerConfig, begin, way: str, dtype: torch.dtype, grad_dtype: torch.dtype
) -> list:
    """Flat gradients of a step of two microbatches after a step that left NaN. begin: zero or zeroed."""
    torch.manual_seed(1)
    model = GPTModel(config, **SIZE, init=Init(dtype=dtype))
    if way == "fused loss":
        model.output_layer.loss = fused_linear_cross_entropy
    strategy = "optim_grads" if way == "pooled" else "no_shard"
    parallel = ParallelConfig(data_parallel_sharding_strategy=strategy, ddp_bucket_size=5000)
    buckets, store = Buckets(model, parallel, Mesh(), grad_dtype), WeightGradStore()
    for param in model.parameters():
        param.wgrad_store = store
    spoil(buckets)
    begin(buckets, 2)
    for tokens in (torch.randint(61, (2, 2, 13))).unbind():
        weights = torch.full((2, 12), 1 / 24)
        batch = Batch(tokens[:, :-1], torch.arange(12), torch.arange(2), loss_weights=weights)
        loss = (model(batch, tokens[:, 1:]) * weights).sum()
        if way == "deferred":
            with store.collect() as works:
                loss.backward()
            store.run(works)
        else:
            loss.backward()
    buckets.grad_sync()
    return buckets


@pytest.mark.parametrize("way", ["now", "deferred", "fused loss", "pooled"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_bits_of_adding_to_zeros(name, way):
    """With fp32 and bf16 weights and gradients. Tied, the head overwrites and the embedding adds."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for types in (fp32, fp32), (bf16, fp32), (bf16, bf16):
        found = gradients(CONFIGS[name], Buckets.zero, way, *types)
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
            buckets.zero(1)
            (model(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])) * math.nan).backward()
            buckets.grad_sync()
            assert not optimizer.step(torch.tensor(0.0)).grad_norm.isfinite()
        norm = train_step(model, buckets, optimizer, ALONE)
        buckets.wait_params()
        runs.append([norm, *(p.detach().clone() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_only_the_first_overwrites():
    """Of any way to write: by a matmul, by `Bucket.add`, or by adding to what `main_grad` has zeroed."""
    model, buckets, _ = built(ALONE, {})
    first, second, third = (layer.inner for layer in model.layers)
    for microbatches in (1, 2):
        spoil(buckets)
        buckets.zero(3)
        for n in range(1, 4):
            target, overwrite = grad_to_write(first)
            assert overwrite == (n == 1) and target is first.main_grad
            rows, columns = target.shape
            add_product(target, torch.ones(2, rows), torch.ones(2, columns), overwrite)
            buckets.all[0].add(second, torch.ones_like(second))
            main_grad(third).add_(1.0)
            assert (first.main_grad == 2 * n).all() and (second.main_grad == n).all()
            assert (third.main_grad == n).all(), microbatches
        assert model.embedding.weight.main_grad.isnan().all(), "what has no contribution is not touched"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_overwrites_what_is_no_number(dtype):
    grad, x = torch.randn(6, 3).to(dtype), torch.randn(6, 5).to(dtype)
    target, sums = torch.full((3, 5), math.nan), torch.zeros(3, 5)
    add_product(target, grad, x, overwrite=True)
    add_product(sums, grad, x)
    assert torch.equal(target, sums) and target.isfinite().all()

"""Optimizer states in host memory: the same run to the bit, whatever is moved there and in which order."""

from types import SimpleNamespace

import pytest
import torch

from nanomegatron.batch import Batch
from nanomegatron.checkpoint.optimizer_state import optimizer_states
from nanomegatron.config.model import TransformerConfig
from nanomegatron.config.settings import OptimizerConfig, ParallelConfig, PrecisionConfig
from nanomegatron.dp import ParamAndGradBuckets
from nanomegatron.fast.offload import HostShard, HostStaging, host_state
from nanomegatron.mesh import Mesh, World
from nanomegatron.model import GPTModel
from nanomegatron.optim import Optimizer, ShardUpdates, StepScalars
from nanomegatron.param import Init

ALONE = Mesh.build(ParallelConfig(), World(), torch.device("cpu"))
MODEL = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2)
RATES = [[0.01 / (n + 1) for n in range(9)]] * 3


def run(optimizer_config, bucket_size=700, bad_step=None):
    """Five steps in bf16: weights, states and norms."""
    model = GPTModel(MODEL, vocab_size=29, max_sequence_length=8, init=Init(dtype=torch.bfloat16))
    buckets = ParamAndGradBuckets(model, ParallelConfig(ddp_bucket_size=bucket_size), ALONE)
    offload = optimizer_config.optimizer_cpu_offload
    updates = ShardUpdates(host_state(buckets, optimizer_config)) if offload else ShardUpdates()
    optimizer = Optimizer(buckets, optimizer_config, PrecisionConfig(bf16=True), RATES, updates)
    data = torch.randint(29, (5, 4, 9), generator=torch.Generator().manual_seed(1))
    norms = []
    for step, batch in enumerate(data):
        buckets.zero_grad_buffer()
        model(Batch(batch[:, :-1], torch.arange(8)), batch[:, 1:]).mean().backward()
        buckets.finish_grad_sync()
        loss = torch.tensor(float("nan") if step == bad_step else 1.0)
        norms.append(optimizer.step(loss).grad_norm.item())
    states = {
        kind: [flat.clone() for _, flat in pieces] for kind, pieces in optimizer_states(optimizer).items()
    }
    return [p.detach().clone() for p in model.parameters()], states, norms, optimizer


@pytest.mark.parametrize("bad_step", [None, 2])
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("fraction, bucket_size", [(1.0, 700), (0.5, 700), (1.0, 10**9)])
def test_updates_on_the_host_are_the_same(fraction, bucket_size, prefetch, bad_step):
    weights, states, norms, plain = run(OptimizerConfig(weight_decay=0.1), bucket_size, bad_step)
    moved = OptimizerConfig(
        weight_decay=0.1,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=fraction,
        overlap_cpu_optimizer_d2h_h2d=prefetch,
    )
    found, found_states, found_norms, optimizer = run(moved, bucket_size, bad_step)
    assert norms == found_norms and states.keys() == found_states.keys()
    assert all(torch.equal(a, b) for a, b in zip(weights, found, strict=True))
    for kind in states:
        assert all(torch.equal(a, b) for a, b in zip(states[kind], found_states[kind], strict=True)), kind
    kinds = [isinstance(shard, HostShard) for shard in optimizer.shards]
    sizes = [len(shard.main) for shard in optimizer.shards]
    away = sum(size for size, on_host in zip(sizes, kinds, strict=True) if on_host) / sum(sizes)
    assert away == 1 if fraction == 1 else fraction <= away < fraction + max(sizes) / sum(sizes)
    assert not any(isinstance(shard, HostShard) for shard in plain.shards)


@pytest.mark.parametrize("prefetch", [False, True])
def test_staging_keeps_order_and_reuses_its_buffers(prefetch):
    """Each shard comes as it was; two buffers each way carry any number of them."""
    shards = [torch.full((n,), float(n), dtype=torch.bfloat16) for n in (3, 5, 2, 4)]
    staging = HostStaging(shards, torch.device("cpu"), prefetch)
    for step in range(2):
        now = StepScalars(*[torch.tensor(step)] * 4)
        for shard in shards:
            fetched, on_host = staging.fetch(now)
            assert torch.equal(fetched, shard) and on_host.step == step
            params, main = torch.zeros_like(shard), fetched.float() + 1
            staging.send(lambda out, main=main: out.copy_(main), params)
            assert torch.equal(params, shard + 1)
    assert len(staging.buffers) == 4 and {len(buffer) for buffer in staging.buffers.values()} == {5}


def test_states_on_two_devices_are_checked_together():
    """A meta tensor stands for one on the GPU: torch refuses to stack it with one of the host."""
    shards = [
        SimpleNamespace(main=flat, exp_avg=flat, exp_avg_sq=flat)
        for flat in (torch.empty(8, device="meta"), torch.ones(8))
    ]
    optimizer = SimpleNamespace(shards=shards, counted=torch.empty(2, device="meta"))
    assert Optimizer.not_finite(optimizer).device.type == "meta"

"""Shards moved through memory that ranks share, against asynchronous collectives; files in place of GPUs."""

from functools import partial

import pytest
import torch

from nanomegatron.build import buckets_class
from nanomegatron.config.settings import ParallelConfig, PrecisionConfig
from nanomegatron.dp import ShardComm
from nanomegatron.fast.dp_peer import PeerShards, peer_shard_comm
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.optim import Optimizer
from nanomegatron.report.banner import buckets_text
from tests.order import recorded
from tests.spmd import run_spmd, spmd
from tests.toy import CONFIG, RATES, Toy, train_step

TYPES = [torch.float32, torch.bfloat16]
SIZES = [128, 128 * 5, 128 * 11]  # of a shard


def moved(comm: ShardComm | PeerShards, rank: int, op: str) -> list[torch.Tensor]:
    """What two steps give of tensors of all types and sizes, of bytes gathers alone; small whole numbers."""
    n, device, results = comm.axis.size, comm.device, []
    made = [comm.zeros(n * size, dtype) for dtype in (*TYPES, torch.uint8) for size in SIZES]
    for step in range(2):
        comm.wait_for_readers()
        for k, whole in enumerate(made):
            numbers = torch.arange(len(whole), device=device)
            if whole.dtype == torch.uint8:
                shard = whole.view(n, -1)[rank].copy_(numbers.view(n, -1)[rank] % 250)
            else:
                whole.copy_(numbers % 7 * 2 * n * (rank + 1) + step + k)
                shard = comm.start_reduce(whole, op).wait()
            results.append(shard.clone())
            results.append(comm.start_all_gather(whole).wait().clone())
    return results


def alike(mesh, folder: str) -> None:
    """Whole numbers: to the bit, in however many pieces, and of tensors that are no shared ones."""
    axis = mesh.dp_cp
    for op in ("sum", "avg"):
        plain = moved(ShardComm(axis, mesh.device, 0), mesh.rank, op)
        with recorded(f"{folder}/{op}", mesh.rank):
            PeerShards.PIECE = 300
            bytes_of = sum(dtype.itemsize for dtype in (*TYPES, torch.uint8))
            peers = PeerShards(axis, mesh.device, axis.size * sum(SIZES) * bytes_of)
            shared = moved(peers, mesh.rank, op)
            assert peers.used == peers.shared_bytes
            others = [torch.full((axis.size * 3,), mesh.rank + 1.0) for _ in range(2)]
            summed = peers.start_reduce(others[0], op).wait()
            whole = peers.start_all_gather(others[1]).wait()
        total = axis.size * (axis.size + 1) / 2 / (axis.size if op == "avg" else 1)
        assert summed.tolist() == [total] * 3
        assert whole.view(axis.size, -1)[:, 0].tolist() == [rank + 1.0 for rank in range(axis.size)]
        assert all(torch.equal(a, b) for a, b in zip(shared, plain, strict=True))


@pytest.mark.parametrize("world", [2, 3])
def test_sums_and_gathers_are_those_of_collectives(world, tmp_path):
    run_spmd(alike, world, str(tmp_path))


def trained(mesh, parallel: ParallelConfig, grad_dtype, shard_comm) -> tuple:
    """Norms of three steps, weights, and how shards moved."""
    model = Toy(dtype=torch.bfloat16)
    buckets = buckets_class(parallel)(model, parallel, mesh, grad_dtype, shard_comm)
    optimizer = Optimizer(buckets, CONFIG, PrecisionConfig(), RATES)
    norms = [train_step(model, buckets, optimizer, mesh).item() for _ in range(3)]
    buckets.wait_params()
    weights = [param.detach().clone() for param in model.parameters()]
    return norms, weights, buckets_text(buckets), buckets.shared_bytes


def train_both(mesh, folder: str) -> None:
    """Two ranks to the bit; three add in another order, and their gradients are padded to other lengths."""
    for sharding, dtype in (("optim", torch.float32), ("optim", torch.bfloat16), ("optim_grads", TYPES[0])):
        parallel = ParallelConfig(
            data_parallel_sharding_strategy=sharding,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            ddp_bucket_size=300,
            ddp_average_in_collective=sharding == "optim",
        )
        plain = trained(mesh, parallel, dtype, ShardComm)
        with recorded(f"{folder}/{sharding} {dtype}", mesh.rank):
            comm = partial(peer_shard_comm, PeerAccess({"dp_cp": ""}))
            norms, weights, text, shared = trained(mesh, parallel, dtype, comm)
        assert "by GPU copy engines" in text and "by collectives" in plain[2]
        assert shared > 0 and plain[3] == 0
        if mesh.dp.size == 2:
            assert norms == plain[0] and all(map(torch.equal, weights, plain[1]))
        else:
            near = 1e-5 if dtype == torch.float32 else 1e-2
            assert norms == pytest.approx(plain[0], rel=near)


@pytest.mark.parametrize("world", [2, 3])
def test_training_is_that_of_collectives(world, tmp_path):
    run_spmd(train_both, world, str(tmp_path))


@spmd(world=2)
def test_ranks_that_share_no_memory_use_collectives(mesh):
    peers = PeerAccess({"dp_cp": "dp_cp spans 2 machines"})
    comm = peer_shard_comm(peers, mesh.dp_cp, mesh.device, 8)
    assert isinstance(comm, ShardComm) and comm.description == "collectives (dp_cp spans 2 machines)"

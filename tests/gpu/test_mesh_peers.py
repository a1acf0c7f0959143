"""The trial of copies between GPUs, on GPUs."""

import pytest

from nanomegatron.config.settings import ParallelConfig
from nanomegatron.fast import peer_access as mesh_peers
from nanomegatron.fast.peer_access import PeerAccess
from tests.gpu.ranks import needs_two, run_on_gpus


def shares(mesh, device):
    peers = PeerAccess.build(mesh, ParallelConfig())
    assert peers.error(mesh.tp) == peers.error(mesh.world) == ""
    assert mesh_peers._failed_copies(mesh_peers._shared_memory(2, device), mesh.tp.group, device) == 0


def shares_nothing(mesh, device):
    assert PeerAccess.build(mesh, ParallelConfig(peer_memory=False)).error(mesh.tp) == "--no-peer-memory"


def damages(mesh, device):
    """What rank 1 pushes goes nowhere, and what it pulls is old."""
    real = mesh_peers.symmetric.rendezvous

    class Lost:
        def __init__(self, *how):
            self.handle = real(*how)

        def get_buffer(self, *what):
            return self.handle.get_buffer(*what).clone()

    if mesh.rank == 1:
        mesh_peers.symmetric.rendezvous = Lost
    failed = mesh_peers._failed_copies(mesh_peers._shared_memory(2, device), mesh.tp.group, device)
    mesh_peers.symmetric.rendezvous = real
    assert failed == 1 << (1 - mesh.rank)


@needs_two
@pytest.mark.parametrize("body", [shares, shares_nothing, damages])
def test_memory_of_two_gpus(body):
    run_on_gpus(2, body, tensor_model_parallel_size=2)

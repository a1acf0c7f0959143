"""Which axes share memory: by what machines report and by copies, on ranks whose GPUs' memory is files."""

from unittest.mock import Mock, patch

import pytest
import torch

from nanomegatron.config.settings import ParallelConfig
from nanomegatron.fast import peer_access as mesh_peers
from nanomegatron.fast.peer_access import Gpu, PeerAccess, _first_obstacle
from nanomegatron.mesh import Mesh, axis_groups
from tests.order import Handle, recorded
from tests.spmd import run_spmd


def errors_of(gpus, **sizes):
    groups = axis_groups(ParallelConfig(**sizes), len(gpus))
    return {name: _first_obstacle(name, groups[name], gpus) for name in groups}


def test_an_axis_is_of_one_machine_in_all_groups_or_in_none():
    """cp 3 with ep 4 on three machines of eight GPUs: of the cp groups some span two machines."""
    gpus = [Gpu(rank // 8, rank % 8, 255) for rank in range(24)]
    errors = errors_of(gpus, context_parallel_size=3, expert_model_parallel_size=4)
    assert errors["cp"] == "cp spans 2 machines" and errors["ep"] == "" and errors["tp"] == ""
    assert errors["dp_cp"] == "dp_cp spans 3 machines"


def test_what_machines_report():
    apart = [Gpu(0, 0, 0b0010), Gpu(0, 1, 0b0001), Gpu(0, 2, 0b1000), Gpu(0, 3, 0b0100)]
    errors = errors_of(apart, tensor_model_parallel_size=2)
    assert errors["tp"] == "" and errors["dp"] == "GPU 0 cannot reach GPU 2"
    assert errors_of([Gpu(0, 0, 0)] * 2)["dp"] == "each process sees its own GPU only"


def mesh_of(world, folder, machines=(0, 0, 0, 0), breaks=(), refuses="", **more):
    """The errors of a mesh of tp 2 and how often this rank has met others to share memory."""
    get_buffer = Handle.get_buffer

    def get_lost(handle, peer, *what):
        """breaks: a rank, and the peer whose memory it only seems to reach."""
        whole = get_buffer(handle, peer, *what)
        return whole.clone() if (world.rank, peer) == breaks else whole

    def refused(*how, **more):
        raise RuntimeError("CUDA driver error: operation not supported")

    node = patch("platform.node", lambda: f"machine {machines[world.rank]}")
    lost = patch.object(Handle, "get_buffer", get_lost)
    with node, lost, recorded(folder, world.rank) as recorder:
        if refuses and world.rank in (0, 1):
            setattr(mesh_peers.symmetric, refuses, refused)
        parallel = ParallelConfig(tensor_model_parallel_size=2, distributed_backend="gloo", **more)
        mesh = Mesh.build(parallel, world, torch.device("cuda", world.rank))
        peers = PeerAccess.build(mesh, parallel)
        names = ("tp", "dp", "dp_cp", "ep", "world")
        met = sum(n for key, n in recorder.made.items() if key != "empty")
        return {name: peers.error(getattr(mesh, name)) for name in names}, met


REFUSED = "torch cannot share GPU memory here"
DAMAGED = "copies between GPU 0 and GPU 1 arrive damaged"


@pytest.mark.parametrize(
    "case, tp, dp, met",
    [
        ({}, "", "", 1),
        ({"machines": (0, 0, 1, 1)}, "", "dp spans 2 machines", 1),
        ({"machines": (0, 0, 0, 1)}, "tp spans 2 machines", "dp spans 2 machines", 0),
        ({"breaks": (1, 0)}, DAMAGED, "", 1),
        ({"refuses": "empty"}, REFUSED, REFUSED, 0),
        ({"peer_memory": False}, "--no-peer-memory", "--no-peer-memory", 0),
    ],
    ids=["one machine", "two", "three and one", "damaged", "refused", "off"],
)
def test_all_ranks_decide_alike(case, tp, dp, met, tmp_path):
    """And have met as often as each other; one trial covers all axes of a machine."""
    for errors, meetings in run_spmd(mesh_cases, 4, tmp_path, case):
        assert (errors["tp"], errors["dp"], meetings) == (tp, dp, met)
        assert errors["world"] in (tp, "world spans 2 machines")


def mesh_cases(world, folder, case):
    return mesh_of(world, folder, **case)


def test_a_copy_that_never_ends(monkeypatch):
    monkeypatch.setattr(mesh_peers, "SECONDS", 0)
    event = Mock()
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    mesh_peers._wait_for_copies(torch.device("cuda", 1))
    event.query.return_value = False
    with pytest.raises(RuntimeError, match="copy from cuda:1 .* did not end in 0 s: .* --no-peer-memory"):
        mesh_peers._wait_for_copies(torch.device("cuda", 1))

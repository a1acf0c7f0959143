"""The fast ring on GPUs: transfers by copy engines with every rank late at another place; its results."""

import pytest
import torch

from nanomegatron.config.settings import ParallelConfig
from nanomegatron.cp import SequenceShard, context_attention
from nanomegatron.fast.peer_access import PeerAccess
from nanomegatron.fast.ring import Ring, plan_rounds
from nanomegatron.fast.transfers import PeerRing
from tests.gpu.ranks import all_right, dawdler, needs_two, run_on_gpus
from tests.test_cp import CASES, S, whole
from tests.test_cp_shard import shard_of

SIZES = [(3 * 2**17, torch.bfloat16), (2**19, torch.float32), (100, torch.bfloat16), (2**19, torch.bfloat16)]


def storm(mesh, device):
    """Two rings at a time, as keys and their gradients, with transfers of different lengths.

    What arrives by the first is read at once, by the second at the end. A stale element is another number.
    """
    (size, rank), dawdle, flags = (mesh.cp.size, mesh.cp.rank), dawdler(mesh.rank), []
    peers = PeerAccess.build(mesh, ParallelConfig())
    for turn in range(60):
        s, dtype = SIZES[turn % len(SIZES)]
        own = torch.full((2, s, 2), rank + turn % 7, device=device, dtype=dtype).unbind(0)
        rounds = plan_rounds(SequenceShard.of_row(mesh.cp, size * s, ("p2p",), device))
        how = mesh.cp, device
        keys = peers.ring(*how, "keys", 4 * own[0].nbytes, 1)
        back = peers.ring(*how, "gradients of keys", 4 * own[0].nbytes, len(rounds) - 1)
        assert isinstance(keys.func.__self__, PeerRing) and keys.func.__self__ is not back.func.__self__
        kept = []
        for this in rounds[1:]:
            dawdle()
            arriving = keys([[x[chosen] for x in own] for chosen in this.keys], own, this.there)
            dawdle()
            expected = [((rank - x.by) % size + turn % 7, *x[1:]) for x in this.there.recvs]
            found = arriving.wait()
            flags += [same(x, expected) for x in found]
            answers = [x * size + rank for x in found]
            parts = [[x[begin : begin + rows] for x in answers] for _, rows, (begin, _) in expected]
            pending = back(parts, own, this.back)
            dawdle()
            sent = rank + turn % 7
            values = [(sent * size + (rank - x.by) % size, *x[1:]) for x in this.back.recvs]
            kept.append((pending.wait(), values))
        flags += [same(x, values) for parts, values in kept for x in parts]
    all_right(flags)


def same(x, transfers):
    """Whether the rows of each have its value; a transfer: value, rows, (begin, rows of all)."""
    expected = torch.cat([torch.full((rows, 2), value, device=x.device) for value, rows, _ in transfers])
    return (x == expected).all()


@needs_two
@pytest.mark.parametrize("world", [2, 4])
def test_late_ranks_hand_on_in_turn(world):
    run_on_gpus(world, storm, context_parallel_size=world)


def in_both_forms(mesh, device):
    """By copy engines and by messages the fast ring gives the same to the bit, the plain one nearly."""
    peers = PeerAccess.build(mesh, ParallelConfig())
    assert peers.error(mesh.cp) == ""
    forms = Ring(peers), Ring(PeerAccess({})), context_attention
    flags = []
    for name in ("heads", "grouped", "documents"):
        inputs, grad, mask, bounds, _ = whole(CASES[name] | dict(d=64, dtype=torch.bfloat16))
        shard = shard_of(mesh.cp, S, ("p2p",), bounds, device)
        own = [x[torch.from_numpy(shard.positions)].to(device) for x in (*inputs, grad)]
        results = []
        for attention in forms:
            q, k, v = (x.clone().requires_grad_() for x in own[:3])
            context = attention(q, k, v, shard, 0, mask, "fused")
            results.append([context.detach(), *torch.autograd.grad(context, (q, k, v), own[3])])
        for memory, messages, plain in zip(*results, strict=True):
            near = (memory.float() - plain.float()).norm() <= 1e-2 * plain.float().norm()
            flags += [(memory == messages).all(), near]
    all_right(flags)


@needs_two
@pytest.mark.parametrize("world", [2, 4])
def test_the_forms_of_the_ring_agree(world):
    run_on_gpus(world, in_both_forms, context_parallel_size=world)

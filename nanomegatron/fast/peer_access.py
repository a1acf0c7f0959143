"""Same result as `comm.start_all_gather` and the like, by shared GPU memory; here: which axes can share it.

The drivers report which GPUs can access each other. Then every rank pushes numbers to its peers and pulls
theirs, once, as a trial: a driver can report access between two GPUs that does not work (an IOMMU, a virtual
machine).

Gain: that of the paths which use the memory (benchmarks/results/2026-11-22-cp-train-four.json against
2026-11-22-cp-train-four-messages.json, which has the same run by messages).
"""

import itertools
import platform
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nanomegatron.comm import Pending
from nanomegatron.config.parallel import ParallelConfig
from nanomegatron.fast.peer_memory import PeerMemory, symmetric
from nanomegatron.fast.transfers import PeerRing, start_transfers
from nanomegatron.mesh import Axis, Mesh

PeerGroups = list[tuple[int, ...]]  # of one axis: world ranks

NUMBERS = 2**18  # int32 numbers per copy of the trial: 1 MiB
SECONDS = 60  # timeout of the copies of the trial


class Gpu(NamedTuple):
    """The GPU of a rank."""

    machine: int  # hash of the host's name
    index: int
    reach: int  # bit i: the driver reports access to GPU i of this machine


class PeerAccess:
    """Which axes share GPU memory, and the buffers in it that the fast paths use, made at first use."""

    def __init__(self, errors: dict[str, str]) -> None:
        """errors: axis name -> the reason why its ranks share no memory; "" if they do."""
        self.errors = errors
        self.buffers: dict[tuple[str, str], PeerMemory | PeerRing] = {}

    @classmethod
    def build(cls, mesh: Mesh, parallel: ParallelConfig) -> "PeerAccess":
        """Find the axes of a run. All ranks call it together; communicates over world if there are GPUs."""
        if mesh.world.size == 1:
            return cls({})
        if not parallel.peer_memory:
            return cls(dict.fromkeys(mesh.groups, "--no-peer-memory"))
        errors = peer_access_errors(mesh.groups, mesh.communicators, mesh.device)
        if parallel.dynamic_context_parallel:
            changing = ["cp", *(axis.name for axis in mesh.cp.parts.values())]
            errors |= dict.fromkeys(changing, "cp works in groups that change from batch to batch")
        return cls(errors)

    def error(self, axis: Axis) -> str:
        """The reason why the ranks of an axis share no memory, for all of its groups; "" if they do."""
        return self.errors.get(axis.name, "no GPU")

    def describe(self, axis: Axis, otherwise: str = "asynchronous collectives") -> str:
        """How tensors are sent over this axis while the GPU works, as text for the banner."""
        error = self.error(axis)
        return f"{otherwise} ({error})" if error else "GPU copy engines"

    def memory(self, axis: Axis, device: torch.device, kind: str) -> PeerMemory | None:
        """Buffers for "all_gather" or "reduce_scatter", None if not shared. All ranks call it together."""
        if axis.size == 1 or self.error(axis):
            return None
        if (axis.name, kind) not in self.buffers:
            self.buffers[axis.name, kind] = PeerMemory(axis, device, kind)
        return self.buffers[axis.name, kind]

    def ring(
        self, axis: Axis, device: torch.device, name: str, room: int, kept: int
    ) -> Callable[..., Pending]:
        """A function of (parts, like, plan) like `start_transfers`: by the `PeerRing` `name`, or by messages.

        room: for `PeerRing.start_transfers`, kept: for the ring's constructor. All ranks of the axis call it
        together.
        """
        if axis.size == 1 or self.error(axis):
            return partial(start_transfers, axis=axis)
        if (axis.name, name) not in self.buffers:
            self.buffers[axis.name, name] = PeerRing(axis, device, kept)
        return partial(self.buffers[axis.name, name].start_transfers, room=room)


def peer_access_errors(
    axes: dict[str, PeerGroups], communicators: dict[tuple[int, ...], Any], device: torch.device
) -> dict[str, str]:
    """Axis name -> the reason why its ranks cannot share memory, "" if they can; the same on every rank.

    axes: the groups of each, `world` among them; communicators: this rank's, by the ranks of the group. All
    ranks of the world call it together. Raises RuntimeError if memory cannot be mapped or a copy does not
    end.

    An axis shares memory in all of its groups or in none. torch counts the rendezvous of each process, over
    all groups, and waits forever for a process whose count is lower: with cp 3 and ep 4 on machines of eight
    GPUs the cp group {6, 7, 8} spans two machines and {3, 4, 5} does not. If the second shared memory and the
    first did not, ranks 4 and 5 of the ep group {4, 5, 6, 7} would have counted one rendezvous and ranks 6
    and 7 none.
    """
    (everyone,) = axes["world"]
    if device.type != "cuda" or len(everyone) == 1:
        return dict.fromkeys(axes, "no GPU")
    if symmetric is None:
        return dict.fromkeys(axes, "torch has no symmetric memory")
    world = communicators[everyone]
    gpus = [Gpu(*row) for row in _gather(_here(device), world, device)]
    errors = {name: _first_obstacle(name, groups, gpus) for name, groups in axes.items()}
    tried: set[tuple[int, int]] = set()
    broken: set[tuple[int, int]] = set()
    for name, groups in sorted(axes.items(), key=lambda axis: -len(axis[1][0])):  # most pairs first
        pairs = {pair for group in groups for pair in itertools.permutations(group, 2)}
        if errors[name] or pairs <= tried or name == "embed":  # which not all ranks are in
            continue
        mine = next(group for group in groups if dist.get_rank() in group)
        own = _shared_memory(len(mine), device)
        if any(row[0] for row in _gather([int(own is None)], world, device)):
            return {name: error or "torch cannot share GPU memory here" for name, error in errors.items()}
        bad = _gather([_failed_copies(own, communicators[mine], device)], world, device)
        for group in groups:
            for rank, (i, peer) in itertools.product(group, enumerate(group)):
                if bad[rank][0] >> i & 1:
                    broken.add((min(rank, peer), max(rank, peer)))
        tried |= pairs
    for name, groups in axes.items():
        for a, b in sorted(broken):
            if any(a in group and b in group for group in groups):
                errors[name] = f"copies between GPU {gpus[a].index} and GPU {gpus[b].index} arrive damaged"
    return errors


def _here(device: torch.device) -> Gpu:
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    reach = sum(1 << i for i in others if torch.cuda.can_device_access_peer(device.index, i))
    return Gpu(zlib.crc32(platform.node().encode()), device.index, reach)


def _gather(row: Sequence[int], group: Any, device: torch.device) -> list[list[int]]:
    """All-gather the numbers of every rank of a group, to the host."""
    mine = torch.tensor(row, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return torch.stack(rows).tolist()


def _first_obstacle(name: str, groups: PeerGroups, gpus: list[Gpu]) -> str:
    """The reason, from the drivers' reports, why one of the groups cannot share memory; "" if all can."""
    for group in groups:
        machines = {gpus[rank].machine for rank in group}
        if len(machines) > 1:
            return f"{name} spans {len(machines)} machines"
        if len({gpus[rank].index for rank in group}) < len(group):
            return "each process sees its own GPU only"
        for a, b in itertools.permutations(group, 2):
            if not gpus[a].reach >> gpus[b].index & 1:
                return f"GPU {gpus[a].index} cannot reach GPU {gpus[b].index}"
    return ""


def _shared_memory(size: int, device: torch.device) -> torch.Tensor | None:
    """Memory to share: NUMBERS for each of `size` ranks; None, after a warning, if torch cannot."""
    try:
        return symmetric.empty(size * NUMBERS, dtype=torch.int32, device=device).fill_(-1)
    except RuntimeError as error:
        warnings.warn(f"{device} shares no memory with other GPUs: {error}", stacklevel=2)
        return None


def _failed_copies(own: torch.Tensor, group: Any, device: torch.device) -> int:
    """Bit i: a copy from or to rank i of the group arrived damaged. All of its ranks call it together.

    own: `_shared_memory` of this rank.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shape = size, NUMBERS
    numbers = torch.arange(size * NUMBERS, dtype=torch.int32, device=device).view(shape)
    try:
        handle = symmetric.rendezvous(own, group.group_name)
    except RuntimeError as error:
        raise RuntimeError(f"{device}: no shared memory with its peers; try --no-peer-memory") from error
    memory = [handle.get_buffer(peer, shape, torch.int32) for peer in range(size)]
    dist.barrier(group=group)  # all memory is filled
    for peer in range(size):
        memory[peer][rank].copy_(numbers[rank])
    _wait_for_copies(device)
    dist.barrier(group=group)
    pushed, pulled = memory[rank], torch.stack([memory[peer][peer] for peer in range(size)])
    _wait_for_copies(device)
    good = ((pushed == numbers) & (pulled == numbers)).all(1).tolist()
    dist.barrier(group=group)  # memory stays until all have pulled
    return sum(1 << peer for peer in range(size) if not good[peer])


def _wait_for_copies(device: torch.device) -> None:
    done, end = torch.cuda.Event(), time.monotonic() + SECONDS
    done.record()
    while not done.query():
        if time.monotonic() > end:
            raise RuntimeError(
                f"a copy from {device} to another GPU of {platform.node()} did not end in {SECONDS} s: peer "
                "access does not work there; --no-peer-memory leaves all communication to NCCL"
            )
        time.sleep(0.001)

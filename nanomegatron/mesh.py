"""The process groups of a run: built once, and passed to the layers that communicate.

Tests: tests/test_mesh.py. Page: docs/parallel.md.

The ranks form a grid, tensor parallel fastest, then context, data and pipeline (Megatron's tp-cp-ep-dp-pp):

    rank = tp + TP * (cp + CP * (dp + DP * pp))          world = TP * CP * DP * PP

    8 ranks, tp 2, dp 2, pp 2        pp 0              pp 1
                                  dp 0   dp 1       dp 0   dp 1
                          tp 0      0      2          4      6        tp groups  {0,1} {2,3} {4,5} {6,7}
                          tp 1      1      3          5      7        dp groups  {0,2} {1,3} {4,6} {5,7}

Experts use the same ranks in a second grid, `rank = etp + ETP * (ep + EP * (edp + EDP * pp))`: an expert
group may span data- and context-parallel ranks, and expert parallelism does not multiply the world size.

An `Axis` is this rank's group along one direction. A layer gets only the axes that it communicates over. An
axis of size 1 has no communicator, and every collective on it is the identity, so that one process and a
cluster run the same code. (Rank order: arXiv 2104.04473, section 3; the grids: Megatron's RankGenerator)

Messages between pipeline stages use point-to-point links, one for each ordered pair of ranks between which
the schedule sends. A link has its own communicator and, on a GPU, its own stream: a receive from a rank never
waits for a send to that rank, and messages need no tags, since both ends know their order.
"""

import datetime
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from nanomegatron.config.parallel import ParallelConfig
from nanomegatron.launch.world import World, connect, pick_device  # noqa: F401 (docs/api.md)
from nanomegatron.schedules import embedding_ranks, owners, placement

P2P_MAX_CTAS = 2  # multiprocessors that a link may take from matmuls; a message has the time of an op


class AxisObserver:
    """Sees what this rank communicates. This one does nothing; that of a run is `report/traffic.py`.

    Both methods return a context that is entered for the wait: on a GPU often of a stream, not of the host.
    """

    def start(self, axis: "Axis", kind: str, tensors: Sequence[torch.Tensor]) -> AbstractContextManager:
        """A communication of tensors `[...]` begins; kind: "all_reduce", "send", "receive", "barrier" ..."""
        return nullcontext()

    def wait(self) -> AbstractContextManager:
        """The host is about to wait for the device, thus for any communication."""
        return nullcontext()


@dataclass(frozen=True)
class Axis:
    """This rank's group along one direction of the mesh; `group` is None if the axis has one rank."""

    name: str
    size: int
    rank: int  # index of this rank in `ranks`
    ranks: tuple[int, ...]  # world ranks
    group: Any = field(default=None, compare=False, repr=False)
    observer: AxisObserver = field(default_factory=AxisObserver, compare=False, repr=False)
    parts: dict[int, "Axis"] = field(default_factory=dict, compare=False, repr=False)  # see `neighbours`
    levels: tuple["Axis", ...] = field(default=(), compare=False, repr=False)  # of a hierarchy: see `Mesh`

    @property
    def key(self) -> tuple[str, int, int]:
        """A short name that is the same on all ranks of the group: axis, first rank, last rank."""
        return self.name, self.ranks[0], self.ranks[-1]

    def neighbours(self, size: int) -> "Axis":
        """Return this rank's subgroup of `size` neighbours. Raises ValueError if there is none."""
        if size == self.size:
            return self
        if size not in self.parts:
            raise ValueError(f"{self.name}: Mesh.build has made no groups of {size} ranks")
        return self.parts[size]

    @staticmethod
    def single(name: str = "single") -> "Axis":
        """An axis of one rank, for a model on one process."""
        return Axis(name, 1, 0, (0,))


def axis_groups(parallel: ParallelConfig, world_size: int) -> dict[str, list[tuple[int, ...]]]:
    """Return the groups of every axis as world ranks; together they hold all ranks (except for `embed`)."""
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp = parallel.pipeline_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    ep = parallel.expert_model_parallel_size
    dense = {"tp": tp, "cp": cp, "dp": world_size // (tp * cp * pp), "pp": pp}
    expert = {"etp": etp, "ep": ep, "edp": world_size // (etp * ep * pp), "pp": pp}
    for grid in (dense, expert):
        if world_size != math.prod(grid.values()):
            raise ValueError(f"{world_size} processes do not fill the grid {grid}")
    ends = sorted(set(embedding_ranks(placement(parallel.schedule, pp, parallel.chunks))))
    return {
        "world": [tuple(range(world_size))],
        **{name: grid_groups(dense, name) for name in ("tp", "cp", "dp", "pp")},
        "dp_cp": grid_groups(dense, "dp", "cp"),
        "tp_cp": grid_groups(dense, "tp", "cp"),
        **{name: grid_groups(expert, name) for name in ("ep", "etp", "edp")},
        "etp_ep": grid_groups(expert, "etp", "ep"),
        "embed": [tuple(ranks[end] for end in ends) for ranks in grid_groups(dense, "pp")],
    }


def grid_groups(sizes: dict[str, int], *along: str) -> list[tuple[int, ...]]:
    """Groups of ranks that differ only in the coordinates `along`; `sizes` has the fastest axis first."""
    names = list(reversed(sizes))  # slowest first, as the dims of a tensor
    outer = [dim for dim, name in enumerate(names) if name not in along]
    inner = [dim for dim, name in enumerate(names) if name in along]
    grid = torch.arange(math.prod(sizes.values())).view([sizes[name] for name in names])
    groups = grid.permute(outer + inner).reshape(-1, math.prod(sizes[name] for name in along))
    return [tuple(group) for group in groups.tolist()]


def shared_head_sizes(parallel: ParallelConfig, num_query_groups: int | None) -> list[int]:
    """Sizes of the groups of tp ranks that share a key/value head; None: for every number of heads."""
    tp = parallel.tensor_model_parallel_size
    sizes = [n for n in range(2, tp) if tp % n == 0]
    return sizes if num_query_groups is None else [n for n in sizes if n == tp // num_query_groups]


def cp_part_sizes(parallel: ParallelConfig) -> Sequence[int]:
    """Sizes of the groups of cp ranks that share a pack (dynamic cp), or of a hierarchy's inner level."""
    cp = parallel.context_parallel_size
    if parallel.dynamic_context_parallel:
        return [n for n in range(1, cp) if cp % n == 0]
    return parallel.hierarchical_context_parallel_sizes[:1]


@dataclass(frozen=True)
class Link:
    """A one-way connection between two pipeline ranks; messages arrive in the order they are sent in."""

    axis: Axis  # sender and receiver
    stream: Any = None  # on a GPU, the stream of the receives


def link_ends(parallel: ParallelConfig) -> list[tuple[int, int]]:
    """The pipeline ranks (sender, receiver) between which the schedule sends, in the order to connect them.

    Both ends of a link wait for each other, so all ranks take their links in this order: 0-1, 2-3, ... first,
    which have no rank in common and connect at the same time, then 1-2, 3-4, ... In the order 0-1, 1-2, 2-3
    each link would wait for the one before it.
    """
    placed = placement(parallel.schedule, parallel.pipeline_model_parallel_size, parallel.chunks)
    ranks = [rank for _, rank in sorted(owners(placed).items())]
    links = {link for a, b in pairwise(ranks) for link in ((a, b), (b, a)) if a != b}
    return sorted(links, key=lambda pair: (min(pair) % 2, pair[0] > pair[1], pair))


@dataclass(frozen=True)
class Mesh:
    """All axes of this rank; by default those of a single process.

    `world`: all ranks; `etp_ep`: the ranks that together hold one copy of a stage's experts; `embed`: the
    ranks of the first and the last stage. `p2p_links`: this rank's links by (sender, receiver), as pp ranks.
    `cp.levels`, with hierarchical_context_parallel_sizes: the inner axis, of neighbours, and the outer axis,
    across such groups. `groups`: all groups of every axis, as world ranks; `communicators`: process groups by
    their ranks.
    """

    rank: int = 0
    device: torch.device = torch.device("cpu")
    world: Axis = Axis.single("world")
    tp: Axis = Axis.single("tp")
    cp: Axis = Axis.single("cp")
    dp: Axis = Axis.single("dp")
    pp: Axis = Axis.single("pp")
    dp_cp: Axis = Axis.single("dp_cp")
    tp_cp: Axis = Axis.single("tp_cp")
    ep: Axis = Axis.single("ep")
    etp: Axis = Axis.single("etp")
    edp: Axis = Axis.single("edp")
    etp_ep: Axis = Axis.single("etp_ep")
    embed: Axis = Axis.single("embed")
    p2p_links: dict[tuple[int, int], Link] = field(default_factory=dict)
    groups: dict[str, list[tuple[int, ...]]] = field(default_factory=dict, compare=False, repr=False)
    communicators: dict[tuple[int, ...], Any] = field(default_factory=dict, compare=False, repr=False)
    observer: AxisObserver = field(default_factory=AxisObserver, compare=False, repr=False)

    @staticmethod
    def build(
        parallel: ParallelConfig,
        world: World,
        device: torch.device,
        num_query_groups: int | None = None,
        observer: AxisObserver = AxisObserver(),  # noqa: B008 (has no state)
    ) -> "Mesh":
        """Connect to the other processes (if there are any) and build every group.

        Every rank calls this with the same `parallel`; a collective that waits longer than
        `distributed_timeout_minutes` raises. With fewer key/value heads (`num_query_groups`) than tp ranks,
        the ranks that share a head get a group; None: groups for every number of heads. observer: of every
        axis.
        """
        timeout = datetime.timedelta(minutes=parallel.distributed_timeout_minutes)
        if world.size > 1 and not dist.is_initialized():
            connect(parallel.distributed_backend, world, device, timeout)
        builder = GroupBuilder(world.rank, device, timeout, observer)
        groups = axis_groups(parallel, world.size)
        parts = {
            "tp": builder.parts("tp", groups["tp"], shared_head_sizes(parallel, num_query_groups)),
            "cp": builder.parts("cp", groups["cp"], cp_part_sizes(parallel)),
        }
        levels = {}
        if sizes := parallel.hierarchical_context_parallel_sizes:
            across = [ranks[i :: sizes[0]] for ranks in groups["cp"] for i in range(sizes[0])]
            levels["cp"] = parts["cp"][sizes[0]], builder.axis("cp across", across)
        axes = {
            name: builder.axis(name, each, parts.get(name), levels.get(name, ()))
            for name, each in groups.items()
        }
        links = {ends: link for ends in link_ends(parallel) if (link := builder.link(ends))}
        return Mesh(
            world.rank,
            device,
            **axes,
            p2p_links=links,
            groups=builder.groups,
            communicators=builder.communicators,
            observer=observer,
        )

    @property
    def label(self) -> str:
        """This rank's coordinates, as printed in front of its messages."""
        return f"rank {self.rank} tp{self.tp.rank} pp{self.pp.rank} cp{self.cp.rank} dp{self.dp.rank}"

    def connect_store(self) -> Any:
        """Return a new connection to the store of all ranks, for a thread; a store in a single process."""
        return _get_default_store().clone() if self.world.size > 1 else dist.HashStore()

    @staticmethod
    def close() -> None:
        """Destroy the process groups, if there are any."""
        if dist.is_initialized():
            dist.destroy_process_group()


class GroupBuilder:
    """Builds this rank's axes and links. All ranks build all groups in the same order, as torch requires.

    A rank waits only for the members of its own group; disjoint groups connect at the same time.
    """

    def __init__(
        self, rank: int, device: torch.device, timeout: datetime.timedelta, observer: AxisObserver
    ) -> None:
        self.rank = rank
        self.device = device
        self.timeout = timeout
        self.observer = observer
        self.groups: dict[str, list[tuple[int, ...]]] = {}  # of world ranks, by axis
        self.communicators: dict[tuple[int, ...], Any] = {}  # by the ranks in it

    def axis(
        self,
        name: str,
        groups: list[tuple[int, ...]],
        parts: dict[int, Axis] | None = None,
        levels: tuple[Axis, ...] = (),
    ) -> Axis:
        """Build the groups of an axis, return this rank's. Groups of the same ranks share a communicator."""
        self.groups[name] = groups
        for ranks in groups:
            if len(ranks) > 1 and ranks not in self.communicators:
                self.communicators[ranks] = self._communicator(ranks)
        mine = next((ranks for ranks in groups if self.rank in ranks), (self.rank,))
        return Axis(
            name,
            len(mine),
            mine.index(self.rank),
            mine,
            self.communicators.get(mine),
            self.observer,
            parts or {},
            levels,
        )

    def parts(self, name: str, groups: list[tuple[int, ...]], sizes: Sequence[int]) -> dict[int, Axis]:
        """Build subgroups of n neighbours of an axis, for each n of `sizes`; return this rank's."""
        return {
            n: self.axis(f"{name}{n}", [g[i : i + n] for g in groups for i in range(0, len(g), n)])
            for n in sizes
        }

    def link(self, ends: tuple[int, int]) -> Link | None:
        """Build the link `ends` in each pipeline; return this rank's, or None if it is at neither end."""
        pairs = [tuple(ranks[end] for end in ends) for ranks in self.groups["pp"]]
        communicators = [self._communicator(pair, P2P_MAX_CTAS) for pair in pairs]
        for pair, group in zip(pairs, communicators, strict=True):
            if self.rank in pair:
                axis = Axis("pp", 2, pair.index(self.rank), pair, group, self.observer)
                self._connect(axis)
                return Link(axis, torch.cuda.Stream(self.device) if self.device.type == "cuda" else None)
        return None

    def _connect(self, axis: Axis) -> None:
        """Send the first message of a link, which connects it: with NCCL the host waits for the other end.

        In the middle of a schedule two ranks could wait for each other on different links; here the order of
        links is the same on all ranks.
        """
        x = torch.zeros(1, device=self.device)
        if axis.rank == 0:
            dist.send(x, axis.ranks[1], axis.group)
        else:
            dist.recv(x, axis.ranks[0], axis.group)

    def _communicator(self, ranks: tuple[int, ...], max_ctas: int | None = None) -> Any:
        if dist.get_backend() != "nccl":
            return dist.new_group(ranks, timeout=self.timeout)  # not inherited from the default group
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = self.timeout  # else torch warns that the argument overrides it
        nccl.is_high_priority_stream = True  # scheduled before the matmuls that overlap with it
        if max_ctas:
            nccl.config.max_ctas = max_ctas
        # A device_id connects the group now.
        return dist.new_group(ranks, timeout=self.timeout, pg_options=nccl, device_id=self.device)

"""Who talks to whom: every process group of a run, made once and handed down.

The ranks form a grid, tensor parallel fastest, then context, data and pipeline (Megatron's tp-cp-ep-dp-pp):

    rank = tp + TP * (cp + CP * (dp + DP * pp))          world = TP * CP * DP * PP

    8 ranks, tp 2, dp 2, pp 2        pp 0              pp 1
                                  dp 0   dp 1       dp 0   dp 1
                          tp 0      0      2          4      6        tp groups  {0,1} {2,3} {4,5} {6,7}
                          tp 1      1      3          5      7        dp groups  {0,2} {1,3} {4,6} {5,7}

Experts fold over the same ranks with a grid of their own, `rank = etp + ETP * (ep + EP * (edp + EDP * pp))`:
an expert group may span data- and context-parallel ranks, and does not multiply the world.

An `Axis` is this rank's group along one direction. A layer is given the axes it uses and nothing else; an
axis of size 1 has no communicator, and every collective on it is the identity, so that one process and a
cluster run the same code. (Rank order: arXiv 2104.04473, section 3; the grids are Megatron's RankGenerator's)

Messages between pipeline stages use point-to-point links, one for each ordered pair of ranks between which
the schedule sends. A link has a communicator of its own, and on a GPU a stream: receives from a rank never
wait for sends to it, and messages need no tags, since both ends know their order.
"""

import datetime
import math
import os
import socket
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from nanomegatron.config.parallel import ParallelConfig
from nanomegatron.schedules import embedding_ranks, owners, placement

P2P_MAX_CTAS = 2  # multiprocessors that a link takes from matmuls: its messages have the time of an op


@dataclass(frozen=True)
class Axis:
    """This rank's group along one direction of the mesh; `group` is None where it is alone."""

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: Any = field(default=None, compare=False, repr=False)
    traffic: Counter = field(default_factory=Counter, compare=False, repr=False)
    parts: dict[int, "Axis"] = field(default_factory=dict, compare=False, repr=False)
    levels: tuple["Axis", ...] = field(default=(), compare=False, repr=False)  # of a hierarchy: see `Mesh`

    def neighbours(self, size: int) -> "Axis":
        """This rank's group of `size` neighbours on the axis. Raises ValueError for none of `part_sizes`."""
        if size != self.size and size not in self.parts:
            raise ValueError(f"{self.name}: Mesh.build has made no groups of {size} ranks")
        return self if size == self.size else self.parts[size]

    @staticmethod
    def single(name: str = "single") -> "Axis":
        """An axis of one rank, for a model on one process."""
        return Axis(name, 1, 0, (0,))


@dataclass(frozen=True)
class Link:
    """A one-way connection between two pipeline ranks; messages arrive in the order they are sent in."""

    axis: Axis  # sender and receiver
    stream: Any = None  # on a GPU, the one that receives run on


@dataclass(frozen=True)
class World:
    """The place of this process among all: as the launcher set it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    rendezvous: str = ""  # "", "env://" (torchrun) or "file:///..." (one machine, no open port)

    @staticmethod
    def from_environment() -> "World":
        """torchrun's variables, or a single process."""
        if "RANK" not in os.environ:
            return World()
        rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return World(rank, size, local, "env://")


def pick_device(asked: str, world: World) -> torch.device:
    """cuda:LOCAL_RANK where there are GPUs, unless `--device` says otherwise.

    Raises ValueError where it asks for a GPU and there is none.
    """
    gpus = 0 if asked == "cpu" else torch.cuda.device_count()
    if asked == "cuda" and not gpus:
        raise ValueError("--device cuda: torch sees no GPU here; leave it out, or install a CUDA build")
    return torch.device("cuda", world.local_rank % gpus) if gpus else torch.device("cpu")


@dataclass(frozen=True)
class Mesh:
    """All axes of this rank; by default those of a single process.

    `world` is every rank, `etp_ep` all that share one copy of a stage's experts, `embed` the ranks of the
    first and the last stage. `p2p_links`: this rank's by (sender, receiver), numbers on the pp axis.
    `cp.levels`, with hierarchical_context_parallel_sizes: some neighbours, and the ranks in the same place
    among theirs. `groups`: every group of world ranks, by axis; `communicators`: this rank's process groups
    by their ranks.
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
    traffic: Counter = field(default_factory=Counter, compare=False, repr=False)

    @staticmethod
    def build(
        parallel: ParallelConfig, world: World, device: torch.device, num_query_groups: int | None = None
    ) -> "Mesh":
        """Connect to the other processes (if there are any) and make every group.

        Every rank calls this with the same `parallel`; a collective that waits longer than
        `distributed_timeout_minutes` raises. With fewer key/value heads than tp ranks, those that share one
        get a group of their own (`num_query_groups`; None: whatever the number).
        """
        timeout = datetime.timedelta(minutes=parallel.distributed_timeout_minutes)
        if world.size > 1 and not dist.is_initialized():
            _connect(parallel.distributed_backend, world, device, timeout)
        builder = GroupBuilder(world.rank, device, timeout)
        axes = {name: builder.axis(name, each) for name, each in axis_groups(parallel, world.size).items()}
        for name, n in part_sizes(parallel, num_query_groups):
            parts = [g[i : i + n] for g in builder.groups[name] for i in range(0, len(g), n)]
            axes[name].parts[n] = builder.axis(f"{name}{n}", parts)
        if sizes := parallel.hierarchical_context_parallel_sizes:
            across = [g[i :: sizes[0]] for g in builder.groups["cp"] for i in range(sizes[0])]
            levels = axes["cp"].neighbours(sizes[0]), builder.axis("cp across", across)
            axes["cp"] = replace(axes["cp"], levels=levels)
        links = {ends: link for ends in link_ends(parallel) if (link := builder.link(ends))}
        kept = dict(groups=builder.groups, communicators=builder.communicators, traffic=builder.traffic)
        return Mesh(world.rank, device, **axes, p2p_links=links, **kept)

    @property
    def label(self) -> str:
        """This rank's coordinates, as they stand before its messages."""
        return f"rank {self.rank} tp{self.tp.rank} pp{self.pp.rank} cp{self.cp.rank} dp{self.dp.rank}"

    @staticmethod
    def all_ranks_arrive(place: str, seconds: float = 20) -> bool:
        """Whether all ranks call this for `place` in time. No collective: some may be waiting in one."""
        if not dist.is_initialized():
            return True
        store = dist.distributed_c10d._get_default_store()
        keys = [f"{place}/{rank}" for rank in range(dist.get_world_size())]
        store.set(keys[dist.get_rank()], "")
        try:
            store.wait(keys, datetime.timedelta(seconds=seconds))
        except RuntimeError:  # torch's DistStoreError: the time is over
            return False
        return True

    @staticmethod
    def close() -> None:
        """Leave the process groups; nothing to do in one process."""
        if dist.is_initialized():
            dist.destroy_process_group()


class GroupBuilder:
    """Makes this rank's axes and links. All ranks make the same in the same order: torch numbers groups.

    A rank waits for the members of its own group only; disjoint groups connect at the same time.
    """

    def __init__(self, rank: int, device: torch.device, timeout: datetime.timedelta) -> None:
        self.rank, self.device, self.timeout = rank, device, timeout
        self.groups: dict[str, list[tuple[int, ...]]] = {}  # of world ranks, by axis
        self.communicators: dict[tuple[int, ...], Any] = {}  # by the ranks in it
        self.traffic: Counter = Counter()

    def axis(self, name: str, groups: list[tuple[int, ...]]) -> Axis:
        """This rank's among the groups of an axis; equal groups of two axes share a communicator."""
        self.groups[name] = groups
        for ranks in groups:
            if len(ranks) > 1 and ranks not in self.communicators:
                self.communicators[ranks] = self._communicator(ranks)
        mine = next((ranks for ranks in groups if self.rank in ranks), (self.rank,))
        return Axis(name, len(mine), mine.index(self.rank), mine, self.communicators.get(mine), self.traffic)

    def link(self, ends: tuple[int, int]) -> Link | None:
        """A link in each pipeline; None for a rank at neither end. It is connected here, by a first message.

        With NCCL the host waits for the other end then. In the middle of a schedule both might wait, each in
        another link; here, where every rank takes its links in the same order, that cannot happen.
        """
        pairs = [tuple(ranks[end] for end in ends) for ranks in self.groups["pp"]]
        communicators = [self._communicator(pair, P2P_MAX_CTAS) for pair in pairs]
        for pair, group in zip(pairs, communicators, strict=True):
            if self.rank in pair:
                axis = Axis("pp", 2, pair.index(self.rank), pair, group, self.traffic)
                x = torch.zeros(1, device=self.device)
                dist.send(x, pair[1], group) if axis.rank == 0 else dist.recv(x, pair[0], group)
                return Link(axis, torch.cuda.Stream(self.device) if self.device.type == "cuda" else None)
        return None

    def _communicator(self, ranks: tuple[int, ...], max_ctas: int | None = None) -> Any:
        options = dict(timeout=self.timeout)  # it is not inherited
        if dist.get_backend() == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl.is_high_priority_stream = True  # before the matmuls of another stream that are to hide it
            if max_ctas:
                nccl.config.max_ctas = max_ctas
            options |= dict(pg_options=nccl, device_id=self.device)  # which connects it at once
        return dist.new_group(ranks, **options)


def axis_groups(parallel: ParallelConfig, world_size: int) -> dict[str, list[tuple[int, ...]]]:
    """For every axis the groups of world ranks that partition the world (or, for `embed`, part of it)."""
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


def part_sizes(parallel: ParallelConfig, num_query_groups: int | None) -> list[tuple[str, int]]:
    """(axis, size) of groups of neighbours that communicate.

    On tp those that share a key/value head, on cp those of a hierarchy's first level or of a pack.
    """
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads = range(2, tp) if num_query_groups is None else [tp // num_query_groups]
    levels = parallel.hierarchical_context_parallel_sizes
    packs = range(1, cp) if parallel.dynamic_context_parallel else levels[:1]
    sizes = [("tp", n) for n in heads if 1 < n < tp and tp % n == 0]
    return sizes + [("cp", n) for n in packs if n < cp and cp % n == 0]


def link_ends(parallel: ParallelConfig) -> list[tuple[int, int]]:
    """The pipeline ranks (sender, receiver) between which the schedule sends, in the order to connect them.

    Both ends of a link wait for each other, so all ranks take their links in this order: 0-1, 2-3, ... first,
    which have no rank in common and connect at the same time, then 1-2, 3-4, ... By their numbers each link
    would wait for the one before it.
    """
    placed = placement(parallel.schedule, parallel.pipeline_model_parallel_size, parallel.chunks)
    ranks = [rank for _, rank in sorted(owners(placed).items())]
    links = {link for a, b in pairwise(ranks) for link in ((a, b), (b, a)) if a != b}
    return sorted(links, key=lambda pair: (min(pair) % 2, pair[0] > pair[1], pair))


def grid_groups(sizes: dict[str, int], *along: str) -> list[tuple[int, ...]]:
    """Groups of ranks that differ only in the coordinates `along`; `sizes` has the fastest axis first."""
    names = list(reversed(sizes))  # slowest first, as the dims of a tensor
    dims = sorted(range(len(names)), key=lambda dim: names[dim] in along)  # those of a group come last
    ranks = torch.arange(math.prod(sizes.values())).view([sizes[name] for name in names]).permute(dims)
    return [tuple(group) for group in ranks.reshape(-1, math.prod(sizes[name] for name in along)).tolist()]


def _connect(backend: str | None, world: World, device: torch.device, timeout: datetime.timedelta) -> None:
    """Join the default process group.

    The store is prefixed by the attempt: after `torchrun --max-restarts` re-forms the run, the agent's store
    still holds the addresses of the dead ranks, and gloo and NCCL both would call them. The default group is
    bound to no device: NCCL would split every group from it, and all ranks of the world would have to join.
    """
    if world.rendezvous == "env://":
        store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
    else:
        # One machine: the ranks meet on the loopback interface, so no port is open to the network.
        for name in [name for _, name in socket.if_nameindex() if name.startswith("lo")][:1]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        store = dist.FileStore(world.rendezvous.removeprefix("file://"), world.size)
    store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    # A group of two ranks sends one message after the other, as torch warns: it is what a link is to do.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)

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
cluster run the same code. Two meshes can live in one process. (Rank order: arXiv 2104.04473, section 3.)

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
from typing import Any

import torch
import torch.distributed as dist

from nanomegatron.config.settings import ParallelConfig
from nanomegatron.schedules import embedding_ranks, owners, placement

# NCCL's blocks of a link: a message waits for its other end for as long as an op takes, and may be slow.
P2P_MAX_CTAS = 2


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
        """The part of this axis of `size` ranks next to each other that this rank is in.

        Raises ValueError for a size that `Mesh.build` has made no groups of.
        """
        if size == self.size:
            return self
        if size not in self.parts:
            raise ValueError(f"{self.name}: Mesh.build has made no groups of {size} ranks")
        return self.parts[size]

    @staticmethod
    def single(name: str = "single") -> "Axis":
        """An axis of one rank, for a model on one process."""
        return Axis(name, 1, 0, (0,))


@dataclass(frozen=True)
class Link:
    """A one-way connection between two pipeline ranks; messages arrive in the order in which they are sent.

    axis: sender and receiver. stream: on a GPU, the one that receives run on.
    """

    axis: Axis
    stream: Any = None


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
        Source of the grids: Megatron's RankGenerator.
        """
        timeout = datetime.timedelta(minutes=parallel.distributed_timeout_minutes)
        if world.size > 1 and not dist.is_initialized():
            _connect(parallel.distributed_backend, world, device, timeout)
        traffic: Counter = Counter()
        groups: dict[tuple[int, ...], Any] = {}
        made, tp = axis_groups(parallel, world.size), parallel.tensor_model_parallel_size
        copies = range(2, tp) if num_query_groups is None else [tp // num_query_groups]
        parts = {"tp": [n for n in copies if 1 < n < tp and tp % n == 0], "cp": cp_parts(parallel)}
        for name, sizes in parts.items():
            for n in sizes:
                made[f"{name}{n}"] = [g[i : i + n] for g in made[name] for i in range(0, len(g), n)]
        if levels := parallel.hierarchical_context_parallel_sizes:
            made["cp across"] = [g[i :: levels[0]] for g in made["cp"] for i in range(levels[0])]
        axes = {
            name: _axis(name, rank_groups, world.rank, groups, traffic, device, timeout)
            for name, rank_groups in made.items()
        }
        for name, sizes in parts.items():
            axes[name] = replace(axes[name], parts={n: axes.pop(f"{name}{n}") for n in sizes})
        if levels:
            outer = axes.pop("cp across")
            axes["cp"] = replace(axes["cp"], levels=(axes["cp"].neighbours(levels[0]), outer))
        links = {}
        for ends in link_ends(parallel):
            pairs = [tuple(ranks[end] for end in ends) for ranks in made["pp"]]
            axis = _axis("pp", pairs, world.rank, {}, traffic, device, timeout, P2P_MAX_CTAS)
            if axis.size > 1:
                links[ends] = Link(axis, torch.cuda.Stream(device) if device.type == "cuda" else None)
                _first_message(axis, device)
        kept = dict(p2p_links=links, groups=made, communicators=groups, traffic=traffic)
        return Mesh(world.rank, device, **axes, **kept)

    @property
    def label(self) -> str:
        """This rank's coordinates, as they stand before its messages."""
        return f"rank {self.rank} tp{self.tp.rank} pp{self.pp.rank} cp{self.cp.rank} dp{self.dp.rank}"

    @staticmethod
    def meet(place: str, seconds: float = 20) -> bool:
        """Whether all ranks come to a place in time, without a collective: some may be waiting in one."""
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


def axis_groups(parallel: ParallelConfig, world_size: int) -> dict[str, list[tuple[int, ...]]]:
    """For every axis the groups of world ranks that partition the world (or, for `embed`, part of it)."""
    tp, cp, pp = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.pipeline_model_parallel_size,
    )
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


def cp_parts(parallel: ParallelConfig) -> list[int]:
    """Sizes of groups of neighbours on the cp axis that communicate: of a hierarchy, or of packs."""
    cp, levels = parallel.context_parallel_size, parallel.hierarchical_context_parallel_sizes
    wanted = range(1, cp) if parallel.dynamic_context_parallel else levels[:1]
    return [n for n in wanted if n < cp and cp % n == 0]


def link_ends(parallel: ParallelConfig) -> list[tuple[int, int]]:
    """The pipeline ranks (sender, receiver) between which the schedule sends, in the order to connect them.

    Both ends of a link wait for each other, so all ranks take their links in this order: 0-1, 2-3, ... first,
    which have no rank in common and connect at the same time, then 1-2, 3-4, ... By their numbers each link
    would wait for the one before it.
    """
    placed = placement(parallel.schedule, parallel.pipeline_model_parallel_size, parallel.chunks)
    rank_of = owners(placed)
    pairs = {(rank_of[stage], rank_of[stage + 1]) for stage in range(len(rank_of) - 1)}
    both = {pair for a, b in pairs for pair in ((a, b), (b, a)) if a != b}
    return sorted(both, key=lambda pair: (min(pair) % 2, pair[0] > pair[1], pair))


def grid_groups(sizes: dict[str, int], *along: str) -> list[tuple[int, ...]]:
    """Groups of ranks that differ only in the coordinates `along`; `sizes` has the fastest axis first."""
    names = list(reversed(sizes))  # slowest first, as the dims of a tensor
    dims = sorted(range(len(names)), key=lambda dim: names[dim] in along)  # those of a group come last
    ranks = torch.arange(math.prod(sizes.values())).view([sizes[name] for name in names]).permute(dims)
    return [tuple(group) for group in ranks.reshape(-1, math.prod(sizes[name] for name in along)).tolist()]


def _axis(
    name: str,
    rank_groups: list,
    rank: int,
    groups: dict,
    traffic: Counter,
    device: torch.device,
    timeout: datetime.timedelta,
    ctas: int | None = None,
) -> Axis:
    """This rank's own communicator of an axis.

    All ranks call it in the same order, since torch names groups by their number. But a rank waits for the
    members of its own group only: the groups of an axis are disjoint and connect at the same time.
    """
    options = dict(timeout=timeout)  # it is not inherited
    if dist.is_initialized() and dist.get_backend() == "nccl":  # connect here, not at the first collective
        options |= dict(pg_options=_nccl_options(ctas), device_id=device)
    for ranks in rank_groups:
        if len(ranks) > 1 and ranks not in groups:
            groups[ranks] = dist.new_group(ranks, **options)
    mine = next((ranks for ranks in rank_groups if rank in ranks), (rank,))
    return Axis(name, len(mine), mine.index(rank), mine, groups.get(mine), traffic)


def _first_message(link: Axis, device: torch.device) -> None:
    """Send a number. NCCL connects two ranks at their first message, and the host waits for the other one.

    In the middle of a schedule both might wait, each for the other's part in another link; here, where every
    rank takes its links in the same order, that cannot happen.
    """
    x = torch.zeros(1, device=device)
    if link.rank == 0:
        dist.send(x, link.ranks[1], group=link.group)
    else:
        dist.recv(x, link.ranks[0], group=link.group)


def _nccl_options(ctas: int | None) -> Any:
    """NCCL's settings for a group: to run before matmuls of another stream, which it is to hide behind.

    ctas: how many multiprocessors it may take from them at most.
    """
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    if ctas:
        options.config.max_ctas = ctas
    return options


def _connect(backend: str | None, world: World, device: torch.device, timeout: datetime.timedelta) -> None:
    """Join the default process group.

    The store is prefixed by the attempt: after `torchrun --max-restarts` re-forms the run, the agent's store
    still holds the addresses of the dead ranks, and gloo and NCCL both would call them. The default group is
    bound to no device: NCCL would split every group from it, and all ranks of the world would have to join.
    """
    if world.rendezvous == "env://":
        store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
    else:
        _loopback_only()
        store = dist.FileStore(world.rendezvous.removeprefix("file://"), world.size)
    store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    # A group of two ranks sends one message after the other, as torch warns: it is what a link is to do.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def _loopback_only() -> None:
    """One machine: the ranks meet on the loopback interface, so no port is open to the network."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)

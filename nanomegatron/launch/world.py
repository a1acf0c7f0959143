"""A process of a run as the launcher started it: its rank, its device, and how it meets the others.

Torchrun's store outlives restarts, and has keys of dead ranks. So all ranks agree on a name of this start:

    rank r    here/r = a new word         waits for name/WORD        NAME/r: it has the name
    rank 0    makes a name        name/WORD = NAME for each word     until all have it

TORCHELASTIC_RESTART_COUNT would not do: each agent counts its own failures. On a machine whose ranks are
restarted only because others were, the number stays, and the ranks would wait under another name than those.
A word that a dead rank has left is answered, too; it is replaced as soon as its successor starts.
"""

import datetime
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

EVERY = 0.01  # seconds between rank 0's looks for the others


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of all processes, as the launcher set them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    rendezvous: str = ""  # "", "env://" (torchrun) or "file:///..." (one machine, no open port)
    agent: int = 0  # process number of torchrun, which this one must not outlive; 0: not started by it
    last_words: list[Callable[[], Any]] = field(default_factory=list, compare=False)  # if --nproc's is lost

    @staticmethod
    def from_environment() -> "World":
        """Read torchrun's variables; without them, return a single process."""
        if "RANK" not in os.environ:
            return World()
        rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return World(rank, size, local, "env://", os.getppid() * ("TORCHELASTIC_RESTART_COUNT" in os.environ))


def threads_given() -> int:
    """Return the threads that OMP_NUM_THREADS asks for; 0 if it is not set."""
    return torch.get_num_threads() * ("OMP_NUM_THREADS" in os.environ)


def pick_device(asked: str, world: World) -> torch.device:
    """Return cuda:LOCAL_RANK if there are GPUs and `asked` (--device) is not "cpu"; else the CPU.

    Raises ValueError if `asked` is "cuda" and there is no GPU.
    """
    if asked == "cuda" and not torch.cuda.device_count():
        raise ValueError("--device cuda: torch sees no GPU here; leave it out, or install a CUDA build")
    if asked == "cpu" or not torch.cuda.device_count():
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank % torch.cuda.device_count())


def connect(backend: str | None, world: World, device: torch.device, timeout: datetime.timedelta) -> None:
    """Join the default process group of all ranks.

    Under torchrun the store's keys are prefixed with a name of this start: after a restart (--max-restarts)
    it still holds the addresses of dead ranks, to which gloo and NCCL would try to connect. The default group
    has no device_id, else NCCL would make each group by splitting it, which all ranks must join.
    """
    if world.rendezvous == "env://":
        store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
        if world.agent:
            store = dist.PrefixStore(name_of_start(store, world.rank, world.size, timeout), store)
    else:
        # One machine: the ranks meet on the loopback interface, so no port is open to the network.
        for name in [name for _, name in socket.if_nameindex() if name.startswith("lo")][:1]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        store = dist.FileStore(world.rendezvous.removeprefix("file://"), world.size)
    # torch warns that a group of two ranks sends its messages one after the other: a link is meant to.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    dist.init_process_group(
        backend or dist.get_default_backend_for_device(device),
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
    )


def name_of_start(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> str:
    """Return a name that all ranks of this start share, and no earlier one. All ranks call this.

    store: a torch store, whose `get` waits. Raises TimeoutError on rank 0 if a rank does not come.
    """
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"here/{rank}", mine)
        name = store.get(f"name/{mine}").decode()
        store.set(f"{name}/{rank}", "")
        return name
    missing, end = set(range(1, size)), time.monotonic() + timeout.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"here/{other}"]):
                store.set(f"name/{store.get(f'here/{other}').decode()}", mine)
        time.sleep(EVERY)
        missing = {other for other in missing if not store.check([f"{mine}/{other}"])}
        if missing and time.monotonic() > end:
            raise TimeoutError(
                f"{len(missing)} ranks have not joined in {timeout}, among them {min(missing)}"
            )
    return mine

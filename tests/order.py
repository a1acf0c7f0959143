"""What the host issues and in which order, on CPU ranks: the recorder of `test_order.py`.

    with recorded() as found:              found.log: "start gather", "mm", "end gather", ...
    with recorded(folder) as found:        torch.cuda's streams and GPUs' shared memory are imitated, too;
                                           found.races: accesses on two streams that no wait puts in order

An imitated stream computes at once. It only counts its launches, and knows how many of each other stream's
come before its next one: the host's launches, waits for events and streams pass that on (vector clocks).
Shared memory is files that the ranks map. Only what one rank does is compared; between ranks stand barriers.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ProcessGroup's methods, of torch 2.11 and 2.13, and the word for each.
COLLECTIVES = dict(all_gather_single="gather", _allgather_base="gather", allreduce="reduce")
COLLECTIVES |= dict(reduce_scatter_single="scatter", _reduce_scatter_base="scatter", send="send", recv="recv")
WORDS = dict.fromkeys(("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"), "mm")
WORDS |= dict.fromkeys(("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"), "sync")


class Stream:
    """A stream that computes at once. seen: by stream, how many launches come before its next one."""

    def __init__(self, recorder: "Recorder", *_: Any, **how: Any) -> None:
        self.recorder, self.seen, self.cuda_stream = recorder, Counter(), 0

    def wait_stream(self, other: "Stream") -> None:
        self.seen |= other.seen

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def record_event(self) -> "Event":
        event = Event(self.recorder)
        event.record(self)
        return event


class Event:
    def __init__(self, recorder: "Recorder", **how: Any) -> None:
        self.recorder, self.seen = recorder, Counter()

    def record(self, stream: Stream | None = None) -> None:
        self.seen = (stream or self.recorder.stream).seen.copy()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.recorder.stream).seen |= self.seen

    def synchronize(self) -> None:
        self.recorder.note("sync")
        self.recorder.host |= self.seen

    def query(self) -> bool:
        return True


class Access(NamedTuple):
    """One tensor of a launch, number `time` of its stream: bytes of a storage, read or written."""

    what: str
    stream: Stream
    time: int
    begin: int
    end: int
    writes: bool

    def races(self, other: "Access") -> bool:
        """Whether this, the later one, may come before or beside the other and must not."""
        apart = self.end <= other.begin or other.end <= self.begin
        ordered = self.stream.seen[other.stream] >= other.time
        return (self.writes or other.writes) and not apart and not ordered


class Recorder(TorchDispatchMode):
    """The words of what was issued, and what no wait puts in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.races: list[str] = []
        self.host = Counter()  # what the host has waited for, as `Stream.seen`
        self.main = self.stream = Stream(self)
        self.barriers: list[tuple[Stream, int]] = []
        self.accesses: dict[int, tuple[torch.UntypedStorage, list[Access]]] = {}  # a storage that is kept
        self.made = Counter()  # of shared memory
        self.files: dict[int, str] = {}

    def note(self, word: str) -> None:
        """Once, where it follows itself."""
        if self.log[-1:] != [word]:
            self.log.append(word)

    def take(self) -> str:
        """The words so far, which are taken away."""
        words, self.log = self.log, []
        return ", ".join(words)

    def launch(self) -> int:
        """Its number on the current stream, which may be behind what the host has waited for."""
        self.stream.seen |= self.host
        self.stream.seen[self.stream] += 1
        return self.stream.seen[self.stream]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result, what = func(*args, **kwargs), func._schema.name
        if what in WORDS:
            self.note(WORDS[what])
        if what == "aten::copy_" and self.stream is not self.main:
            self.note("copy")
        time = self.launch()
        for x, writes in touched(func, args, kwargs, result):
            begin = x.storage_offset() * x.itemsize
            end = begin + x.itemsize * (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride())))
            access = Access(what, self.stream, time, begin, end if x.numel() else begin, writes)
            storage = x.untyped_storage()
            _, before = self.accesses.setdefault(storage._cdata, (storage, []))
            self.races += [f"{what} may overtake {other.what}" for other in before if access.races(other)]
            before.append(access)
        return result


def touched(func: Any, args: tuple, kwargs: dict, result: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """The tensors that an op reads or writes, and whether it writes them."""
    schema = func._schema
    views = any(x.alias_info and not x.alias_info.is_write for x in schema.returns)
    if views or "empty" in schema.name:
        return
    given = dict(zip((x.name for x in schema.arguments), args)) | kwargs
    for argument in schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for x in tree_leaves(given.get(argument.name)):
            if isinstance(x, torch.Tensor):
                yield x, writes
    yield from ((x, True) for x in tree_leaves(result) if isinstance(x, torch.Tensor))


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


class Handle:
    """A symmetric memory: files in place of the GPUs' memory."""

    def __init__(self, recorder: Recorder, maps: list[torch.Tensor], group: Any) -> None:
        self.recorder, self.maps, self.group = recorder, maps, group

    def get_buffer(self, rank: int, sizes: tuple, dtype: torch.dtype, storage_offset: int = 0):
        return self.maps[rank].view(dtype)[: torch.Size(sizes).numel()].view(sizes)

    def barrier(self, channel: int = 0) -> None:
        self.recorder.note("barrier")
        self.recorder.barriers.append((self.recorder.stream, self.recorder.launch()))
        dist.barrier(group=self.group)


def shared_files(recorder: Recorder, folder: str, rank: int) -> dict[str, Any]:
    """torch's symmetric memory, of files: ranks that rendezvous make one of the same number."""

    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        recorder.made["empty"] += 1
        name = f"{folder}/own{rank}-{recorder.made['empty']}"
        own = torch.from_file(name, True, torch.Size(size).numel(), dtype=dtype)
        recorder.files[own.data_ptr()] = name
        return own

    def rendezvous(own: torch.Tensor, group_name: str) -> Handle:
        group = dist.distributed_c10d._resolve_process_group(group_name)
        recorder.made[group_name] += 1
        names = [f"{folder}/{group_name}-{recorder.made[group_name]}-{i}" for i in range(group.size())]
        os.link(recorder.files[own.data_ptr()], names[group.rank()])
        dist.barrier(group=group)
        maps = [torch.from_file(name, True, own.numel(), dtype=own.dtype) for name in names]
        maps[group.rank()] = own
        return Handle(recorder, maps, group)

    return {"empty": empty, "rendezvous": rendezvous}


def streams(recorder: Recorder) -> dict[str, Any]:
    """What stands in torch.cuda meanwhile."""
    return {
        "Stream": partial(Stream, recorder),
        "Event": partial(Event, recorder),
        "stream": lambda stream: patch.object(recorder, "stream", stream),
        "current_stream": lambda device=None: recorder.stream,
        "synchronize": MagicMock(),
        "can_device_access_peer": lambda a, b: True,
        "device_count": lambda: 8,
    }


@contextmanager
def recorded(folder: Any = None, rank: int = 0) -> Iterator[Recorder]:
    """Record what is issued inside; with a folder of shared memory as on the GPU of this rank."""
    recorder, group = Recorder(), dist.ProcessGroup
    work = torch._C._distributed_c10d.Work
    words: dict[int, tuple[Any, str]] = {}  # by id, of works that are kept

    def wait(self: Any, *args: Any, real=work.wait) -> bool:
        if id(self) in words:
            recorder.note(f"end {words[id(self)][1]}")
        return real(self, *args)

    def start(self: Any, *args: Any, real: Any, word: str) -> Any:
        recorder.note(f"start {word}")
        begun = real(self, *args)
        words[id(begun)] = begun, word
        return begun

    with ExitStack() as stack:
        enter = stack.enter_context
        if folder is not None:
            os.makedirs(folder, exist_ok=True)
            enter(patch.multiple(torch.cuda, **streams(recorder)))
            enter(patch.multiple(symmetric, **shared_files(recorder, folder, rank)))
            enter(OnCpu())
        enter(patch.object(work, "wait", wait))
        for method in COLLECTIVES.keys() & set(dir(group)):
            begin = partial(start, real=getattr(group, method), word=COLLECTIVES[method])
            enter(
                patch.object(group, method, lambda self, *args, begin=begin, **how: begin(self, *args, **how))
            )
        yield enter(recorder)

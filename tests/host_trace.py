"""What the host issues on a GPU of several, recorded on CPU ranks: see `test_host_traces.py`.

    with faked(recorder := Recorder(folder, rank)):     build, train a step; recorder.on = True; another step

Nothing of the package is replaced. Ranks take their tensors to be on GPUs, and torch's side is faked:

    torch.cuda         streams and events that note what is asked of them, and do nothing
    symmetric memory   files that all ranks map; a barrier is gloo's
    NCCL               gloo; what begins and is waited for is noted at the methods of ProcessGroup and Work
    tensors            the CPU's; which would be on the GPU is tracked by their storage, so that `is_cuda`,
                       copies between the two and what the host has to wait for (`sync`) are as there

A copy is made when it is issued, on any stream: barriers are real, so the streams might take this order.
"""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanomegatron.mesh import Axis

FREE = set(  # launch nothing; views are known by their schema
    "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view lift_fresh set_ resize_ "
    "_local_scalar_dense is_same_size equal".split()
)
HEAVY = set("mm bmm addmm addmm_ baddbmm _grouped_mm".split())  # each has a line of its own
# ProcessGroup's methods, of torch 2.11 and 2.13, and what stands in a trace.
COLLECTIVES = dict(all_gather_single="all_gather", _allgather_base="all_gather", allreduce="all_reduce")
COLLECTIVES |= dict(reduce_scatter_single="reduce_scatter", _reduce_scatter_base="reduce_scatter")
COLLECTIVES |= dict(all_to_all_single="all_to_all", alltoall_base="all_to_all", barrier="host_barrier")
COLLECTIVES |= {name: name for name in ("broadcast", "send", "recv")}
CPU = torch.device("cpu")


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Issued(NamedTuple):
    """One thing: kind is what totals count it as, "ops" for a light op of `size` bytes."""

    stream: str
    kind: str
    what: str
    size: int = 0


class Recorder:
    """The trace of this rank, and which tensors would be on its GPU."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.gpu = folder, torch.device("cuda", rank)
        self.on, self.muted, self.inside = False, False, False
        self.main = self.stream = Stream(self)
        self.names: dict[int, tuple[Any, str]] = {}  # by id: what lives as long as this, and its name
        self.numbers = Counter()
        self.storages: dict[int, tuple[StorageWeakRef, str]] = {}  # on the GPU, and whose if shared
        self.issued: list[Issued] = []
        self.axes: list[Axis] = []
        self.calls, self.axis_names = Counter(), {}
        self.counts, self.files = Counter(), {}  # of shared memory

    def name(self, thing: Any, letter: str) -> str:
        """Of a stream, an event or a work: numbered as they come up."""
        if thing is self.main:
            return "main"
        if not self.on:
            return ""
        if id(thing) not in self.names:
            self.numbers[letter] += 1
            self.names[id(thing)] = thing, f"{letter}{self.numbers[letter]}"
        return self.names[id(thing)][1]

    def note(self, kind: str, what: str, stream: Any = None, size: int = 0) -> None:
        """Issued on this stream, or the current one."""
        if self.on and not self.muted:
            self.issued.append(Issued(self.name(stream or self.stream, "s"), kind, what, size))

    def quiet(self) -> Any:
        """A context in which nothing is noted, and nothing new is on the GPU."""
        return patch.object(self, "muted", True)

    def on_gpu(self, x: torch.Tensor) -> bool:
        return x.untyped_storage()._cdata in self.storages

    def put(self, x: torch.Tensor, owner: str = "") -> torch.Tensor:
        """x is on the GPU from now on; owner: whose memory, if others share it."""
        reference = StorageWeakRef(x.untyped_storage())  # keeps the address from being used again
        self.storages.setdefault(reference.cdata, (reference, owner))
        return x

    def place(self, x: torch.Tensor) -> str:
        """Whose memory, and where in it, as far as there is something to tell."""
        storage = x.untyped_storage()
        part = f"@{x.storage_offset() * x.itemsize}" * (x.nbytes < storage.nbytes())
        return self.storages.get(storage._cdata, (None, "host"))[1] + part

    def axis(self, group: Any) -> str:
        """The name of the axis that has just been counted in its traffic, else the last one of this group."""
        if not self.axes:
            return ""
        calls = {key: n for key, n in self.axes[0].traffic.items() if key[2] == "calls"}
        counted = {key[0] for key, n in calls.items() if n != self.calls[key]}
        self.calls = Counter(calls)
        names = [a.name for a in self.axes if a.group is not None and a.group.group_name == group.group_name]
        if len(found := counted.intersection(names)) == 1:
            self.axis_names[group.group_name] = found.pop()
        return self.axis_names.setdefault(group.group_name, next(iter(names), "all"))


class Stream:
    """torch.cuda.Stream: notes who waits for what."""

    def __init__(self, recorder: Recorder, *_: Any, **how: Any) -> None:
        self.recorder, self.cuda_stream, self.device = recorder, 0, None

    def wait_stream(self, other: "Stream") -> None:
        self.recorder.note("waits", f"wait {self.recorder.name(other, 's')}", self)

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.recorder)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.recorder.note("syncs", f"sync {self.recorder.name(self, 's')}", self)


class Event:
    """torch.cuda.Event; one that measures time is silent."""

    def __init__(self, recorder: Recorder, enable_timing: bool = False, **how: Any) -> None:
        self.recorder, self.silent = recorder, enable_timing

    def _note(self, kind: str, verb: str, stream: Stream | None = None) -> None:
        if not self.silent:
            self.recorder.note(kind, f"{verb} {self.recorder.name(self, 'e')}", stream)

    record = partialmethod(_note, "records", "record")
    wait = partialmethod(_note, "waits", "wait")
    synchronize = partialmethod(_note, "syncs", "sync")

    def elapsed_time(self, end: "Event") -> float:
        return 1.0

    def query(self) -> bool:
        return True


class Handle:
    """A symmetric memory: files in place of the GPUs' memory."""

    def __init__(self, recorder: Recorder, maps: list[torch.Tensor], group: Any) -> None:
        self.recorder, self.maps, self.group = recorder, maps, group

    def get_buffer(self, rank: int, sizes: tuple, dtype: torch.dtype, storage_offset: int = 0):
        whole = self.maps[rank].view(dtype)
        return whole[storage_offset : storage_offset + torch.Size(sizes).numel()].view(sizes)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        recorder = self.recorder
        recorder.note("barriers", f"barrier {recorder.axis(self.group)}" + f" of channel {channel}" * channel)
        with recorder.quiet():
            dist.barrier(group=self.group)


class Ops(TorchDispatchMode):
    """Every op that would launch something; what is made from the GPU's tensors is on the GPU."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, recorder = kwargs or {}, self.recorder
        given, result = tensors_of((args, kwargs)), func(*args, **kwargs)
        (namespace, _, op), returns = func._schema.name.partition("::"), func._schema.returns
        here = any(map(recorder.on_gpu, given)) if given else recorder.inside
        if not here or recorder.muted or namespace != "aten":
            return result
        made = tensors_of(result) or tensors_of(args[0])
        known = {x.untyped_storage()._cdata for x in given}
        for x in made:
            if x.untyped_storage()._cdata not in known:
                recorder.put(x)
        if op == "_local_scalar_dense":
            recorder.note("syncs", "sync item")
        elif op not in FREE and not any(x.alias_info and not x.alias_info.is_write for x in returns):
            self._note(op, args, made)
        return result

    def _note(self, op: str, args: tuple, made: list[torch.Tensor]) -> None:
        recorder, size = self.recorder, sum(x.nbytes for x in made)
        if op == "copy_":
            ends = [recorder.place(x) for x in (args[1], args[0])]
            way = f" {ends[0] or '.'} -> {ends[1] or '.'}" if any(ends) else ""
            recorder.note("copies", f"copy_ {size}{way}")
        elif op in HEAVY:
            recorder.note("matmuls", f"{op} {size} {recorder.place(made[0])}".rstrip(), size=size)
        else:
            recorder.note("ops", op, size=size)


class Devices(TorchFunctionMode):
    """Makes the package take tensors to be on a GPU, and does on the CPU what only a GPU can."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        base = torch.Tensor
        self.special = {
            base.device.__get__: lambda func, x: recorder.gpu if self._is_cuda(func, x) else CPU,
            base.is_cuda.__get__: self._is_cuda,
            base.to: self._to,
            base.cpu: lambda func, x: self._to(base.to, x, CPU),
            base.pin_memory: lambda func, x: x,
            base.register_post_accumulate_grad_hook: lambda func, x, hook: func(x, self.within(hook)),
            base.tolist: self._tolist,
            **dict.fromkeys((torch.mm, torch.addmm, torch._scaled_mm), self._product),
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, recorder = dict(kwargs or {}), self.recorder
        kwargs.pop("pin_memory", None)
        if special := self.special.get(func):
            return special(func, *args, **kwargs)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            with patch.object(recorder, "inside", True):
                return recorder.put(func(*args, **kwargs | {"device": CPU}))
        return func(*args, **kwargs)

    def within(self, call: Callable) -> Callable:
        """In this mode: what autograd calls in a backward is in no mode of this kind else."""

        def inside(*args: Any) -> Any:
            with self:
                return call(*args)

        return inside

    def _is_cuda(self, func, x: torch.Tensor) -> bool:
        """torch's own modules get the true device."""
        frame = sys._getframe()
        while frame.f_code.co_filename == __file__:
            frame = frame.f_back
        asks = frame.f_globals["__name__"].partition(".")[0]
        return asks in ("nanomegatron", "train") and self.recorder.on_gpu(x)

    def _to(self, func, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Between the host and the GPU a copy, of another type perhaps."""
        recorder, given = self.recorder, [*args, *kwargs.values()]
        place = [torch.device(a) for a in given if isinstance(a, str | torch.device)]
        here = recorder.on_gpu(x)
        there = place[0].type == "cuda" if place else here
        args = [CPU if isinstance(a, str | torch.device) else a for a in args]
        kwargs |= {"device": CPU} if "device" in kwargs else {}
        if here == there:
            return func(x, *args, **kwargs)
        with recorder.quiet():
            y = func(x, *args, **kwargs)
            y = y.clone() if y.untyped_storage()._cdata == x.untyped_storage()._cdata else y
        kind, verb = ("copies", "copy_") if there or kwargs.get("non_blocking") else ("syncs", "sync")
        recorder.note(kind, f"{verb} {y.nbytes} {'host -> gpu' if there else 'gpu -> host'}")
        return recorder.put(y) if there else y

    def _tolist(self, func, x: torch.Tensor) -> list:
        if self.recorder.on_gpu(x):
            self.recorder.note("syncs", "sync tolist")
        return func(x)

    def _product(self, func, *args: torch.Tensor, out_dtype=None, out=None, **kwargs) -> torch.Tensor:
        """A matmul that torch has no CPU kernel for: bf16 that gives fp32, FP8 with any scales."""
        recorder = self.recorder
        if out_dtype is None:
            return func(*args, **kwargs | ({} if out is None else {"out": out}))
        with recorder.quiet():
            if func is torch._scaled_mm:
                a, b, *scales = args
                y = ((a.float() * scales[0]) @ (b.float() * scales[1])).to(out_dtype)
            else:
                *more, a, b = args
                y = sum(more, a.to(out_dtype) @ b.to(out_dtype))
            y = recorder.put(y if out is None else out.copy_(y))
        what = f"{func.__name__} {y.nbytes} {recorder.place(y)}".rstrip()
        recorder.note("matmuls", what, size=y.nbytes)
        return y


def cuda(recorder: Recorder) -> dict[str, Any]:
    """What stands in torch.cuda meanwhile."""
    return {
        "Stream": partial(Stream, recorder),
        "Event": partial(Event, recorder),
        "stream": lambda stream: patch.object(recorder, "stream", stream or recorder.stream),
        "current_stream": lambda device=None: recorder.stream,
        "synchronize": lambda device=None: recorder.note("syncs", "sync device"),
        "nvtx": MagicMock(),
        "can_device_access_peer": lambda a, b: True,
        "device_count": lambda: 8,
        "get_device_name": lambda device=None: "host",
        "get_device_properties": lambda device=None: MagicMock(total_memory=2**50),
    }


def shared_files(recorder: Recorder) -> dict[str, Any]:
    """torch's symmetric memory, of files: ranks that rendezvous make one of the same number."""

    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        recorder.counts["empty"] += 1
        name = f"{recorder.folder}/own{recorder.gpu.index}-{recorder.counts['empty']}"
        own = torch.from_file(name, True, torch.Size(size).numel(), dtype=dtype)
        recorder.files[own.data_ptr()] = name
        return recorder.put(own, "own")

    def rendezvous(own: torch.Tensor, group_name: str) -> Handle:
        group = dist.distributed_c10d._resolve_process_group(group_name)
        recorder.counts[group_name] += 1
        place = f"{recorder.folder}/{group_name}-{recorder.counts[group_name]}"
        names = [f"{place}-{rank}" for rank in range(group.size())]
        os.link(recorder.files[own.data_ptr()], names[group.rank()])
        with recorder.quiet():
            dist.barrier(group=group)
        maps = [torch.from_file(name, True, own.numel(), dtype=own.dtype) for name in names]
        maps[group.rank()] = own
        for rank, whole in enumerate(maps):
            recorder.put(whole, f"peer{rank}")
        return Handle(recorder, maps, group)

    return {"empty": empty, "rendezvous": rendezvous}


def collective(recorder: Recorder, kind: str, real: Any) -> Any:
    """A method of ProcessGroup that notes what it begins."""

    def begin(group: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.muted:
            return real(group, *args, **kwargs)
        size = max((sum(x.nbytes for x in tensors_of(a)) for a in args), default=0)
        with recorder.quiet():
            work = real(group, *args, **kwargs)
        peer = {"send": f" to {args[1]}", "recv": f" from {args[1]}"}.get(kind, "") if args[1:] else ""
        recorder.note("collectives", f"{kind} {recorder.axis(group)}{peer} {size} {recorder.name(work, 'w')}")
        return work

    return begin


@contextmanager
def faked(recorder: Recorder) -> Iterator[None]:
    """Runs what is inside as on a GPU of several."""
    group, work = dist.ProcessGroup, torch._C._distributed_c10d.Work
    real = work.wait

    def wait(self: Any, *args: Any) -> bool:
        if not recorder.muted:
            recorder.note("waits", f"wait {recorder.name(self, 'w')}")
        with recorder.quiet():
            return real(self, *args)

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # that there are no kernels
        enter(patch.multiple(torch.cuda, **cuda(recorder)))
        enter(patch.multiple(symmetric, **shared_files(recorder)))
        enter(patch.object(torch.Tensor, "record_stream", lambda self, stream: None))
        enter(patch.object(torch, "Generator", lambda device=None, real=torch.Generator: real()))
        enter(patch.multiple(work, wait=wait, is_completed=lambda self: False))
        for method in COLLECTIVES.keys() & set(dir(group)):
            begin = collective(recorder, COLLECTIVES[method], getattr(group, method))
            enter(patch.object(group, method, begin))
        enter(Ops(recorder))
        enter(devices := Devices(recorder))
        enter(patch.object(BackwardCFunction, "apply", devices.within(BackwardCFunction.apply)))
        yield


if __name__ == "__main__":
    from tests.test_host_traces import main

    main(sys.argv[1:])

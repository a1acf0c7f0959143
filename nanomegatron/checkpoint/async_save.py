"""Saves beside the training: a snapshot in host memory, written by a process per rank, one for each save.

    step n            | boundary |  step n + 1: forward, backward  |  update  |  ...
    stream of the step   waits nothing                              waits for the copies
    side stream          [ copies to page-locked memory ]
    writer process                     [ file of this rank ... ]  rank 0: [ publish, prune ]

The buffer is shared with writers (memfd), sized once for what this rank owns, and page-locked by a thread
beside the first steps. CUDA launches nothing while it page-locks memory, so that it does this in parts, with
pauses as long between them. A copy may not cross from one part to the next.

Only the next update of the states waits for the copies, on the device. On a CPU the snapshot is a plain copy.
At most one save is in flight. The files are those of a synchronous save, to the byte.
"""

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import astuple
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import torch

from nanomegatron.checkpoint.checkpoint import Attempt, bytes_needed, on_all_ranks, owned_pieces
from nanomegatron.checkpoint.files import Piece, describe_shard, in_file_order
from nanomegatron.checkpoint.folder import Retention, make_folder
from nanomegatron.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    describe_error,
    to_json,
)
from nanomegatron.mesh import Mesh

START = """
import sys
sys.path.append(sys.argv[1])
from nanomegatron.checkpoint import writer
writer.write_job(int(sys.argv[2]), int(sys.argv[3]))
"""
SPARE = 0.1  # of the host's memory is left free
LOCKED = 2**26  # bytes that one call page-locks, in 30 to 80 ms on an H100


class HostBuffer:
    """Memory for a snapshot, `size` bytes, which another process can map; a thread prepares it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = max(1, size), device
        self.descriptor = os.memfd_create("checkpoint")
        self.ready: Future = Future()
        self.locked: list[torch.Tensor] = []
        self.wanted = False  # a save waits
        self.closed = False
        threading.Thread(target=self._prepare, daemon=True).start()

    def _prepare(self) -> None:
        """Allocate all pages, and page-lock them, which takes seconds; without the interpreter's lock."""
        try:
            os.ftruncate(self.descriptor, self.size)
            for begin in range(0, self.size, 2**30):
                if free_share() < SPARE:
                    raise MemoryError(f"the host's memory has no room for {self.size} bytes a rank")
                os.posix_fallocate(self.descriptor, begin, min(2**30, self.size - begin))
            data = torch.frombuffer(mmap.mmap(self.descriptor, self.size), dtype=torch.uint8)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # of this thread
                self._lock(data)
            self.ready.set_result(data)
        except Exception as error:
            self.ready.set_exception(error)
            self.close()

    def _lock(self, data: torch.Tensor) -> None:
        """Page-lock data `[size]` in parts, with pauses as long until a save waits for it; stop if closed."""
        for part in takewhile(lambda _: not self.closed, data.split(LOCKED)):
            begin = time.monotonic()
            if code := int(torch.cuda.cudart().cudaHostRegister(part.data_ptr(), len(part), 0)):
                raise RuntimeError(f"cudaHostRegister of {len(part)} bytes: error {code}")
            self.locked.append(part)
            if not self.wanted:
                time.sleep(time.monotonic() - begin)

    def close(self) -> None:
        """Free the memory, unlocked: else CUDA would use it for whatever is mapped there afterwards."""
        if self.closed:
            return
        self.closed = True
        self.ready.exception()  # waits
        while self.locked:
            torch.cuda.cudart().cudaHostUnregister(self.locked.pop().data_ptr())
        os.close(self.descriptor)

    def __del__(self) -> None:
        self.close()

    def views(self, pieces: Iterable[Piece]) -> list[torch.Tensor]:
        """A place for each piece's elements, one after another as in the file -> `[...]`, in its shape"""
        self.wanted = True
        tensors = [piece.data for piece in pieces]
        sizes = [x.nbytes for x in tensors]
        places = self.ready.result()[: sum(sizes)].split(sizes)
        return [place.view(x.dtype).view(x.shape) for place, x in zip(places, tensors, strict=True)]

    def parts(self, view: torch.Tensor) -> list[int]:
        """The numbers of elements of a view `[...]` in each part that is page-locked by itself."""
        begin = view.data_ptr() - self.ready.result().data_ptr()
        edges = [begin, *range(LOCKED * (begin // LOCKED + 1), begin + view.nbytes, LOCKED)]
        return [(b - a) // view.itemsize for a, b in pairwise([*edges, begin + view.nbytes])]


def free_share() -> float:
    """The part of this machine's memory, or its container's, that is free or can be freed; 1: unknown."""
    shares = [1.0]
    with suppress(OSError, ValueError, KeyError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        facts = {words[0]: int(words[1]) for words in lines}
        shares.append(facts["MemAvailable:"] / facts["MemTotal:"])
    with suppress(OSError, ValueError, KeyError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        shares.append(1 - (int(facts["anon"]) + int(facts["shmem"])) / limit)
    return min(shares)


class AsyncSaver:
    """Writes one checkpoint at a time beside the training. `begin`, then `join` before the next `begin`.

    size: bytes that this rank saves, the same each time.
    """

    def __init__(self, mesh: Mesh, size: int) -> None:
        self.mesh, self.first = mesh, mesh.world.rank == 0
        self.buffer = HostBuffer(size, mesh.device)
        on_gpu = mesh.device.type == "cuda"
        self.stream = torch.cuda.Stream(mesh.device) if on_gpu else None
        self.copied = torch.cuda.Event(blocking=True) if on_gpu else None
        self.process: subprocess.Popen | None = None
        self.submitted = False

    def begin(
        self,
        root: str | Path,
        iteration: int,
        pieces: Iterable[Piece],
        state: dict[str, Any],
        config: str,
        keep: Retention,
    ) -> None:
        """Start to copy the pieces and to write them as `checkpoint.save` does; all ranks call this.

        All-reduces a number and gathers texts over world. The pieces must not change before `wait_copies`.
        Raises SaveError on all ranks, also if the snapshot's memory could not be allocated.
        """
        owned = in_file_order(owned_pieces(pieces))
        need = bytes_needed(owned, self.mesh)
        self.attempt = Attempt(self.mesh, Path(root), iteration, need)
        self.job = dict(iteration=iteration, state=state, config=config, keep=astuple(keep))
        self._submit(self.attempt.stage(self._describe, owned))

    def _describe(self, owned: list[Piece]) -> list[tuple[torch.Tensor, Piece]]:
        """Describe the rank's file -> a place in the buffer for each piece"""
        rank = self.mesh.world.rank
        header, tensors = describe_shard(owned, rank)
        self.job |= dict(
            rank=rank,
            ranks=self.mesh.world.size,
            bytes=sum(piece.data.nbytes for piece in owned),
            folder=str(self.attempt.temporary),
            header=header.decode("latin-1"),
            part=to_json(Manifest(0, {}, "", tensors, {})),
        )
        return list(zip(self.buffer.views(owned), owned, strict=True))

    def _submit(self, pairs: Iterable[tuple[torch.Tensor, Piece]] = ()) -> None:
        """Copy pieces to their places, and let the writers write what the buffers hold.

        Raises SaveError as `begin`. The ranks agree first: a number read from the device waits for copies.
        """
        folder = self.attempt.temporary
        self.attempt.stage(make_folder if self.first else None, folder, self.attempt.need)
        self._copy(pairs)
        self.written = Future()
        self.published = Future()
        if not self.first:
            self.published.set_result([])
        threading.Thread(target=self._follow, daemon=True).start()
        self.submitted = True

    def _copy(self, pairs: Iterable[tuple[torch.Tensor, Piece]]) -> None:
        if self.stream is None:
            for target, piece in pairs:
                target.copy_(piece.data)
            return
        # A kernel after the last copy to the host: else the next step's first operation waits until all of
        # these are done, 0.7 s for 39 GB on an H100 (docs/log.md, Saves).
        torch.ones((), device=self.mesh.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.mesh.device))
        with torch.cuda.stream(self.stream):
            for target, piece in pairs:
                parts = self.buffer.parts(target)
                for part, data in zip(*(x.flatten().split(parts) for x in (target, piece.data)), strict=True):
                    part.copy_(data, non_blocking=True)
                if piece.data.is_cuda:
                    piece.data.record_stream(self.stream)  # it may be freed before it is copied
            self.copied.record()

    def _follow(self) -> None:
        """In a thread: wait for the copies, then run a writer, which says when each stage is done."""
        stages = [self.written, self.published][: 1 + self.first]
        try:
            if self.copied is not None:
                self.copied.synchronize()
            with self._start_writer() as self.process:
                self.process.stdin.write(f"{json.dumps(self.job)}\n")
                self.process.stdin.flush()
                for stage, notes in zip(stages, self.process.stdout):
                    stage.set_result(json.loads(notes))
                error = self.process.stderr.read().strip()
            code = self.process.returncode
            error = error or f"the writer process of rank {self.mesh.world.rank} ended (exit code {code})"
        except Exception as caught:
            error = describe_error(caught)
        for stage in stages:
            if not stage.done():
                stage.set_exception(CheckpointError(error))

    def _start_writer(self) -> subprocess.Popen:
        root, buffer = Path(__file__).resolve().parents[2], self.buffer
        alone = "-I -S -B -c".split()  # nothing but the standard library
        return subprocess.Popen(
            [sys.executable, *alone, START, str(root), str(buffer.descriptor), str(buffer.size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(buffer.descriptor,),
            start_new_session=True,  # no Ctrl-C of the terminal
        )

    @property
    def failed(self) -> bool:
        """Whether this rank's part of the save in flight has failed."""
        return any(stage.done() and stage.exception() for stage in (self.written, self.published))

    def wait_copies(self) -> None:
        """Make the stream of the step wait until the pieces are copied; the host does not wait."""
        if self.copied is not None:
            torch.cuda.current_stream(self.mesh.device).wait_event(self.copied)

    def join(self) -> list[str]:
        """Wait until the save in flight is published -> notes for the user; all ranks call this.

        Gathers texts over world. Raises SaveError on all ranks if it failed on any; called again, it writes
        the snapshot again.
        """
        if not self.submitted:
            self._submit()
        _, errors = on_all_ranks(self.mesh, self.written.result)
        if errors and self.process is not None:
            self.process.kill()  # that of rank 0 waits for all parts
        notes, unpublished = on_all_ranks(self.mesh, self.published.result)
        if unpublished:
            self.submitted = False
            self.attempt.fail(errors or unpublished)
        return notes

    def close(self) -> None:
        """Free the snapshot's memory."""
        self.buffer.close()

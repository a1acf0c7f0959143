"""The process that writes a rank's checkpoints beside its training; `checkpoint/async_save.py` starts it.

    stdin    a job in a line of JSON, or "cancel"             stdout   a line of JSON after each stage
    rank r   the shared buffer -> its file, synced to disk; then its part of the manifest, atomically
    rank 0   and then: waits for the parts of all ranks, publishes the folder, removes superseded ones

It ends when stdin closes, so it does not outlive its rank. It imports only the standard library, and starts
in less than 0.1 s; its niceness leaves the processors to the training.
"""

import json
import mmap
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nanomegatron.checkpoint.blocks import write_blocks, write_text
from nanomegatron.checkpoint.folder import Retention, index_path, prune, publish_folder
from nanomegatron.checkpoint.manifest import CheckpointError, describe_piece, parse_manifest, to_json

CANCELLED = "cancelled"
POLL = 0.05  # seconds between two looks for the other ranks' parts
NICENESS = 5


def serve(descriptor: int, size: int) -> None:
    """Do the jobs that arrive on stdin, one after another. descriptor: of the memory shared with the rank."""
    os.nice(NICENESS)
    buffer = memoryview(mmap.mmap(descriptor, size))
    jobs: queue.SimpleQueue = queue.SimpleQueue()
    cancelled = threading.Event()
    threading.Thread(target=_listen, args=(jobs, cancelled), daemon=True).start()

    def check() -> None:
        if cancelled.is_set():
            raise CheckpointError(CANCELLED)

    while True:
        job = jobs.get()
        for stage in (write_part, publish_all) if job["rank"] == 0 else (write_part,):
            reply = {"error": "", "notes": []}
            try:
                reply["notes"] = stage(job, buffer, check)
            except Exception as error:  # the rank decides what follows
                reply["error"] = describe_piece(error)
            print(json.dumps(reply), flush=True)
            if reply["error"]:
                break


def _listen(jobs: queue.SimpleQueue, cancelled: threading.Event) -> None:
    for line in sys.stdin:
        if line.strip() == "cancel":
            cancelled.set()
        else:
            cancelled.clear()
            jobs.put(json.loads(line))
    os._exit(1)  # the rank has ended, however it did


def write_part(job: dict, buffer: memoryview, check: Callable[[], None]) -> list[str]:
    """Write the rank's file from the buffer, then its part of the manifest."""
    path = Path(job["path"])
    chunks = job["header"].encode("latin-1"), buffer[: job["bytes"]]
    saved = write_blocks(path, chunks, job["threads"], check)
    part = replace(parse_manifest(job["part"].encode()), files={job["rank"]: saved})
    index = index_path(path.parent, job["rank"])
    write_text(index.with_suffix(".tmp"), to_json(part))
    os.replace(index.with_suffix(".tmp"), index)
    return []


def publish_all(job: dict, _: memoryview, check: Callable[[], None]) -> list[str]:
    """Publish the folder once all parts are there, and prune -> notes on what could not be removed"""
    temporary, ranks, keep = Path(job["path"]).parent, job["ranks"], Retention(*job["keep"])
    wanted = {index_path(temporary, rank).name for rank in range(ranks)}
    while not wanted <= set(os.listdir(temporary)):
        check()
        time.sleep(POLL)
    publish_folder(temporary, ranks, job["iteration"], job["state"], job["config"], keep.persistent)
    return prune(temporary.parent, job["iteration"], keep)

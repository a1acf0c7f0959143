"""The process that writes a rank's checkpoint beside its training; `checkpoint/async_save.py` starts it.

    stdin    the job, a line of JSON                          stdout   a line of JSON after each stage
    rank r   the shared buffer -> its file, synced to disk; then its part of the manifest, atomically
    rank 0   and then: waits for the parts of all ranks, publishes the folder, removes superseded ones

It ends when stdin closes, so it does not outlive its rank. It imports only the standard library, and starts
in less than 0.1 s; its niceness leaves the processors to the training.
"""

import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path

from nanomegatron.checkpoint.folder import Retention, index_path, publish_folder, write_rank
from nanomegatron.checkpoint.manifest import describe_error, parse_manifest

POLL = 0.05  # seconds between two looks for the other ranks' parts
NICENESS = 5


def write_job(descriptor: int, size: int) -> None:
    """Write the rank's file, or exit with the error as text. descriptor: of the memory that is shared."""
    os.nice(NICENESS)
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_rank, daemon=True).start()
    folder = Path(job["folder"])
    try:
        chunks = [job["header"].encode("latin-1"), memoryview(mmap.mmap(descriptor, size))[: job["bytes"]]]
        write_rank(folder, job["rank"], chunks, parse_manifest(job["part"].encode()).tensors, {})
        print("[]", flush=True)
        if job["rank"] == 0:
            print(json.dumps(publish_all(folder, job)), flush=True)
    except Exception as error:  # the rank decides what follows
        sys.exit(describe_error(error))


def _end_with_the_rank() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def publish_all(folder: Path, job: dict) -> list[str]:
    """Publish the folder once the parts of all ranks are there -> notes for the user"""
    wanted = {index_path(folder, rank).name for rank in range(job["ranks"])}
    while not wanted <= set(os.listdir(folder)):
        time.sleep(POLL)
    keep = Retention(*job["keep"])
    return publish_folder(folder, job["ranks"], job["iteration"], job["state"], job["config"], keep)

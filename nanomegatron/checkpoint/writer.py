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
from dataclasses import replace
from pathlib import Path

from nanomegatron.checkpoint.blocks import write_blocks, write_text
from nanomegatron.checkpoint.folder import Retention, index_path, prune, publish_folder
from nanomegatron.checkpoint.manifest import describe_error, parse_manifest, to_json

POLL = 0.05  # seconds between two looks for the other ranks' parts
NICENESS = 5


def run(descriptor: int, size: int) -> None:
    """Do the job, or exit with the error as text. descriptor: of the memory shared with the rank."""
    os.nice(NICENESS)
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_rank, daemon=True).start()
    try:
        write_part(job, memoryview(mmap.mmap(descriptor, size)))
        print("[]", flush=True)
        if job["rank"] == 0:
            print(json.dumps(publish_all(job)), flush=True)
    except Exception as error:  # the rank decides what follows
        sys.exit(describe_error(error))


def _end_with_the_rank() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def write_part(job: dict, buffer: memoryview) -> None:
    """Write the rank's file from the buffer, then its part of the manifest."""
    path = Path(job["path"])
    saved = write_blocks(path, [job["header"].encode("latin-1"), buffer[: job["bytes"]]], job["threads"])
    part = replace(parse_manifest(job["part"].encode()), files={job["rank"]: saved})
    index = index_path(path.parent, job["rank"])
    write_text(index.with_suffix(".tmp"), to_json(part))
    os.replace(index.with_suffix(".tmp"), index)


def publish_all(job: dict) -> list[str]:
    """Publish the folder once all parts are there, and prune -> notes on what could not be removed"""
    temporary = Path(job["path"]).parent
    ranks = job["ranks"]
    keep = Retention(*job["keep"])
    wanted = {index_path(temporary, rank).name for rank in range(ranks)}
    while not wanted <= set(os.listdir(temporary)):
        time.sleep(POLL)
    publish_folder(temporary, ranks, job["iteration"], job["state"], job["config"], keep.persistent)
    return prune(temporary.parent, job["iteration"], keep)
